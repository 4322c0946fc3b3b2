//! A small REST client of the gateway, for the commands that talk to a running one.
//!
//! What enters is JSON, what leaves is JSON or an [`Error`] that says whether a later try may succeed.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;

/// How long one request may take, from the connection to the last byte of the answer.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// The longest answer that is read, in bytes; a longer one is [`Error::Unreadable`].
pub const ANSWER_BYTES: usize = 1024 * 1024;

/// Why a request brought no result.
#[derive(Debug, Error)]
pub enum Error {
    /// The base URL cannot be used.
    #[error("{0}")]
    Url(&'static str),
    /// The user or the password does not fit into a header.
    #[error("the user or the password holds characters that HTTP Basic authentication cannot carry")]
    Credentials,
    /// The gateway answered, and the answer is no.
    #[error("{request}: {status}: {message}")]
    Refused {
        /// Method and path of the request.
        request: String,
        /// Status of the answer.
        status: StatusCode,
        /// The `message` of the platform's error object, or the answer itself.
        message: String,
    },
    /// There was no answer.
    #[error("the gateway cannot be reached: {0}")]
    Unreachable(String),
    /// There was an answer that is too long or no JSON.
    #[error("{request}: the answer cannot be read: {reason}")]
    Unreadable {
        /// Method and path of the request.
        request: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl Error {
    /// Whether the same request may succeed later without anybody changing it.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable(_) => true,
            Self::Refused { status, .. } => is_transient(*status),
            _ => false,
        }
    }

    /// The status of the answer, if there was one.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// Whether a refusal with `status` may pass by itself: the gateway is starting, full or busy.
#[must_use]
pub fn is_transient(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
}

/// A gateway, and who we are to it.
#[derive(Clone, Debug)]
pub struct Client {
    /// `host[:port]` and the path prefix under which the gateway lives, without a trailing slash.
    base: String,
    authorization: HeaderValue,
    http: legacy::Client<HttpConnector, Full<Bytes>>,
}

impl Client {
    /// A client for the gateway at `url` (`http://host[:port][/prefix]`). `user` is `tenant/user`, or a bare user of the
    /// tenant `edge`. Nothing is connected yet.
    ///
    /// # Errors
    /// [`Error::Url`] for what is no such URL, [`Error::Credentials`] for what no header can carry.
    pub fn new(url: &str, user: &str, password: &str) -> Result<Self, Error> {
        let credentials = STANDARD.encode(format!("{user}:{password}"));
        let mut authorization =
            HeaderValue::try_from(format!("Basic {credentials}")).map_err(|_| Error::Credentials)?;
        authorization.set_sensitive(true);
        Ok(Self {
            base: base(url)?,
            authorization,
            // A connection kept over a restart of the gateway would fail its next request.
            http: legacy::Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http(),
        })
    }

    /// The WebSocket URL of `path`, which starts with a slash and may carry a query.
    #[must_use]
    pub fn websocket_url(&self, path: &str) -> String {
        format!("ws://{}{path}", self.base)
    }

    /// Posts `body` as JSON to `path` and returns the answer's JSON, [`Value::Null`] when it has no body.
    ///
    /// # Errors
    /// Any [`Error`] but the first two.
    pub async fn post(&self, path: &str, body: &impl Serialize) -> Result<Value, Error> {
        let body = serde_json::to_vec(body).expect("invariant: request bodies have text keys only");
        self.send(Method::POST, path, body.into()).await
    }

    /// Deletes `path`.
    ///
    /// # Errors
    /// Any [`Error`] but the first two.
    pub async fn delete(&self, path: &str) -> Result<(), Error> {
        self.send(Method::DELETE, path, Bytes::new()).await.map(drop)
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Value, Error> {
        // The query may hold a token, which no error may show.
        let name = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.base))
            .header(AUTHORIZATION, self.authorization.clone())
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|_| Error::Url("the path holds characters that a URL cannot carry"))?;
        let exchange = async {
            let response = self.http.request(request).await.map_err(|error| Error::Unreachable(root_cause(&error)))?;
            read(name, response).await
        };
        tokio::time::timeout(TIMEOUT, exchange)
            .await
            .unwrap_or_else(|_| Err(Error::Unreachable(format!("no answer within {} s", TIMEOUT.as_secs()))))
    }
}

/// Splits an accepted base URL off its scheme and its trailing slash.
fn base(url: &str) -> Result<String, Error> {
    if url.starts_with("https://") {
        return Err(Error::Url("https:// is not supported yet: TLS comes with a later release; use http://"));
    }
    let uri: Uri =
        url.parse().map_err(|_| Error::Url("the URL cannot be read; it looks like http://127.0.0.1:8080"))?;
    match (uri.scheme_str(), uri.authority(), uri.query()) {
        (_, Some(authority), _) if authority.as_str().contains('@') => {
            Err(Error::Url("the URL holds a user; it belongs into TIDEGATE_USER"))
        }
        (Some("http"), Some(authority), None) => Ok(format!("{authority}{}", uri.path().trim_end_matches('/'))),
        _ => Err(Error::Url("the URL must look like http://127.0.0.1:8080")),
    }
}

async fn read(request: String, response: Response<hyper::body::Incoming>) -> Result<Value, Error> {
    let status = response.status();
    let body = match Limited::new(response.into_body(), ANSWER_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return Err(Error::Unreadable { request, reason: root_cause(error.as_ref()) }),
    };
    if !status.is_success() {
        return Err(Error::Refused { request, status, message: message(&body) });
    }
    if body.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&body).map_err(|error| Error::Unreadable { request, reason: error.to_string() })
}

/// What the gateway says in an error answer; of a stranger's answer (a proxy's page) the beginning.
fn message(body: &[u8]) -> String {
    const SHOWN_CHARS: usize = 200;
    if let Ok(Value::Object(error)) = serde_json::from_slice(body)
        && let Some(message) = error.get("message").and_then(Value::as_str)
    {
        return message.to_owned();
    }
    let text = String::from_utf8_lossy(body);
    let shown: String = text.trim().chars().take(SHOWN_CHARS).collect();
    if shown.is_empty() { "no message".to_owned() } else { shown }
}

/// The innermost cause, since the outer ones of an HTTP client only say that something failed.
pub(crate) fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn a_base_url_may_have_a_port_a_prefix_and_a_slash_at_its_end() {
        for (url, websocket) in [
            ("http://127.0.0.1:8080", "ws://127.0.0.1:8080/x?y"),
            ("http://box/", "ws://box/x?y"),
            ("http://[::1]:80/edge1/", "ws://[::1]:80/edge1/x?y"),
        ] {
            assert_eq!(Client::new(url, "edge/u", "p").unwrap().websocket_url("/x?y"), websocket);
        }
    }

    #[test]
    fn other_urls_are_refused_with_the_reason() {
        for (url, reason) in [
            ("https://box", "TLS comes with a later release"),
            ("box:8080", "must look like"),
            ("ftp://box", "must look like"),
            ("http://box?x=1", "must look like"),
            ("http://edge%2Fadmin:pw@box", "TIDEGATE_USER"),
            ("", "cannot be read"),
        ] {
            let error = Client::new(url, "edge/u", "p").unwrap_err().to_string();
            assert!(error.contains(reason), "{url}: {error}");
        }
    }

    #[test]
    fn the_platforms_message_is_shown_and_of_other_answers_the_beginning() {
        assert_eq!(message(br#"{"error":"e","message":"Access is denied.","info":"i"}"#), "Access is denied.");
        assert_eq!(message(b" <html>bad gateway</html>\n"), "<html>bad gateway</html>");
        assert_eq!(message(b""), "no message");
        assert_eq!(message("ä".repeat(1000).as_bytes()).chars().count(), 200);
    }

    #[test]
    fn only_what_may_pass_by_itself_is_transient() {
        for (status, transient) in [(401, false), (403, false), (404, false), (409, false), (422, false)] {
            assert_eq!(is_transient(StatusCode::from_u16(status).unwrap()), transient, "{status}");
        }
        for status in [408, 429, 500, 502, 503, 507] {
            assert!(is_transient(StatusCode::from_u16(status).unwrap()), "{status}");
        }
        assert!(Error::Unreachable("x".into()).is_transient());
        assert!(!Error::Url("x").is_transient());
    }
}
