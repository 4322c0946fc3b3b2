//! A small client of the gateway, for the commands that talk to a running one, in plain or over TLS.
//!
//! What enters is JSON, what leaves is JSON or an [`Error`] that says whether a later try may succeed; or a WebSocket. Each
//! request has a connection of its own, since one kept over a restart of the gateway would fail its next request; who sends many
//! keeps a [`Connection`] and opens the next one when it fails.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{self, Poll};
use std::time::Duration;

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde::Serialize;
use serde_json::Value;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::{WebSocketStream, client_async_with_config, tungstenite};

use crate::auth::DEFAULT_TENANT;
use crate::outbound::{Peer, Reach, Stream, is_caused_by, root_cause};
use crate::tls;

pub(crate) mod consumer;

/// How long one request may take, from the connection to the last byte of the answer.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// The longest answer that is read, in bytes; a longer one is [`Error::Unreadable`].
pub const ANSWER_BYTES: usize = 1024 * 1024;

/// The media type of what is sent and asked for, unless it is said.
const JSON: &str = "application/json";
/// Elements that a list is asked for at a time: few enough for [`ANSWER_BYTES`], even if they have settings.
const PAGE: usize = 100;

/// Why a request brought no result.
#[derive(Debug, Error)]
pub enum Error {
    /// The base URL cannot be used.
    #[error("{0}")]
    Url(&'static str),
    /// Nobody is said to ask.
    #[error("TIDEGATE_USER or --user must say who asks")]
    User,
    /// The user or the password does not fit into a header.
    #[error("the user or the password holds characters that HTTP Basic authentication cannot carry")]
    Credentials,
    /// No certificate is trusted.
    #[error("{0}")]
    Trust(String),
    /// The gateway's certificate is not one that is trusted, or TLS cannot be spoken with it.
    #[error("the gateway cannot be trusted: {0} (--ca FILE names the certificate of a private authority)")]
    Untrusted(String),
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

/// Where the gateway is, who we are to it, and whom to trust.
#[derive(clap::Args, Clone, Debug)]
pub struct ClientArgs {
    /// Base URL of the gateway
    #[arg(long, global = true, env = "TIDEGATE_URL", default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// Who asks: `tenant/user`; the password is read from TIDEGATE_PASSWORD
    #[arg(long, global = true, env = "TIDEGATE_USER", value_name = "TENANT/USER")]
    pub user: Option<String>,
    /// For https: trust the certificates in this PEM file, in place of those that the system trusts
    #[arg(long, global = true, env = "TIDEGATE_CA", value_name = "FILE")]
    pub ca: Option<PathBuf>,
}

impl ClientArgs {
    /// A client with the password in `TIDEGATE_PASSWORD`.
    ///
    /// # Errors
    /// Without that variable, and those of [`Client::new`].
    pub fn client(&self) -> anyhow::Result<Client> {
        let password = std::env::var("TIDEGATE_PASSWORD").context("TIDEGATE_PASSWORD must hold the password")?;
        Ok(Client::new(self, &password)?)
    }

    /// The tenant of the user.
    #[must_use]
    pub fn tenant(&self) -> &str {
        self.user.as_deref().and_then(|user| user.split_once('/')).map_or(DEFAULT_TENANT, |(tenant, _)| tenant)
    }
}

/// A gateway, and who we are to it.
#[derive(Clone)]
pub struct Client {
    /// `host[:port]`, as it stands in the URL.
    authority: String,
    peer: Peer,
    /// The path under which the gateway lives, without a trailing slash.
    prefix: String,
    authorization: HeaderValue,
}

impl Client {
    /// A client for the gateway at `args.url` (`http[s]://host[:port][/prefix]`). The user is `tenant/user`, or a bare user of the
    /// tenant `edge`. Nothing is connected yet.
    ///
    /// # Errors
    /// [`Error::Url`] for what is no such URL, [`Error::User`] without a user, [`Error::Credentials`] for what no header can carry,
    /// [`Error::Trust`].
    pub fn new(args: &ClientArgs, password: &str) -> Result<Self, Error> {
        let user = args.user.as_deref().ok_or(Error::User)?;
        let credentials = STANDARD.encode(format!("{user}:{password}"));
        let mut authorization =
            HeaderValue::try_from(format!("Basic {credentials}")).map_err(|_| Error::Credentials)?;
        authorization.set_sensitive(true);
        let uri = uri(&args.url)?;
        let authority = uri.authority().map(ToString::to_string).unwrap_or_default();
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let (tls, port) = if uri.scheme_str() == Some("https") {
            let name = ServerName::try_from(host.clone()).map_err(|_| Error::Url("the URL's host cannot be a name"))?;
            let connector =
                tls::connector("--ca", args.ca.as_deref()).map_err(|error| Error::Trust(format!("{error:#}")))?;
            (Some((connector, name)), 443)
        } else {
            (None, 80)
        };
        Ok(Self {
            authority,
            peer: Peer { host, port: uri.port_u16().unwrap_or(port), tls },
            prefix: uri.path().trim_end_matches('/').to_owned(),
            authorization,
        })
    }

    /// Opens a WebSocket at `path`, which starts with a slash and may carry a query.
    ///
    /// # Errors
    /// What the connection or the handshake ended with.
    pub async fn websocket(
        &self,
        path: &str,
        limits: WebSocketConfig,
    ) -> Result<WebSocketStream<Box<dyn Stream>>, tungstenite::Error> {
        let stream = self.connect().await.map_err(|error| tungstenite::Error::Io(io::Error::other(error)))?;
        Ok(client_async_with_config(self.websocket_url(path), stream, Some(limits)).await?.0)
    }

    fn websocket_url(&self, path: &str) -> String {
        let scheme = if self.peer.tls.is_some() { "wss" } else { "ws" };
        format!("{scheme}://{}{}{path}", self.authority, self.prefix)
    }

    async fn connect(&self) -> Result<Box<dyn Stream>, Error> {
        self.peer.connect(&Reach::Anywhere).await.map_err(|error| match is_caused_by::<rustls::Error>(&error) {
            true => Error::Untrusted(error.to_string()),
            false => Error::Unreachable(error.to_string()),
        })
    }

    /// Reads what is no JSON from `path`; bytes that are no UTF-8 are replaced.
    ///
    /// # Errors
    /// Any [`Error`] but the first four.
    pub(crate) async fn text(&self, path: &str) -> Result<String, Error> {
        let (_, body) = self.exchange(Method::GET, path, Bytes::new()).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Reads `path`.
    ///
    /// # Errors
    /// Any [`Error`] but the first four.
    pub async fn get(&self, path: &str) -> Result<Value, Error> {
        self.send(Method::GET, path, Bytes::new()).await
    }

    /// The elements of all pages of a list.
    ///
    /// # Errors
    /// Any [`Error`] but the first four.
    pub(crate) async fn pages(&self, path: &str, name: &str) -> Result<Vec<Value>, Error> {
        let query = if path.contains('?') { '&' } else { '?' };
        let mut all = Vec::new();
        for page in 1.. {
            let answer = self.get(&format!("{path}{query}pageSize={PAGE}&currentPage={page}")).await?;
            match answer[name].as_array() {
                Some(elements) if !elements.is_empty() => all.extend_from_slice(elements),
                _ => break,
            }
        }
        Ok(all)
    }

    /// Puts `body` as JSON to `path` and returns the answer's JSON.
    ///
    /// # Errors
    /// Any [`Error`] but the first four.
    pub async fn put(&self, path: &str, body: &impl Serialize) -> Result<Value, Error> {
        let body = serde_json::to_vec(body).expect("invariant: request bodies have text keys only");
        self.send(Method::PUT, path, body.into()).await
    }

    /// Posts `body` as JSON to `path` and returns the answer's JSON, [`Value::Null`] when it has no body.
    ///
    /// # Errors
    /// Any [`Error`] but the first four.
    pub async fn post(&self, path: &str, body: &impl Serialize) -> Result<Value, Error> {
        let body = serde_json::to_vec(body).expect("invariant: request bodies have text keys only");
        self.send(Method::POST, path, body.into()).await
    }

    /// Deletes `path`.
    ///
    /// # Errors
    /// Any [`Error`] but the first four.
    pub async fn delete(&self, path: &str) -> Result<(), Error> {
        self.send(Method::DELETE, path, Bytes::new()).await.map(drop)
    }

    /// Posts what is no JSON to `path` and returns the answer's JSON, for which it waits as long as the gateway takes.
    ///
    /// # Errors
    /// Any [`Error`] but the first four.
    pub(crate) async fn upload(&self, path: &str, media_type: &str, body: Bytes) -> Result<Value, Error> {
        let mut connection = Connection::open(self).await?;
        let (request, response) = connection.request(self, Method::POST, path, media_type, body).await?;
        let (request, body) = read(request, response).await?;
        json(request, &body)
    }

    /// Sends a request, with `body` as JSON unless it is empty, and writes the answer to `out` as it comes, however long that is. For the
    /// first byte it waits as long as the gateway takes.
    ///
    /// # Errors
    /// Any [`Error`] but the first four; `io::Error` where `out` cannot be written.
    pub(crate) async fn download(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        out: &mut impl io::Write,
    ) -> anyhow::Result<()> {
        let mut connection = Connection::open(self).await?;
        let (request, response) = connection.request(self, method, path, JSON, body).await?;
        if !response.status().is_success() {
            return Ok(read(request, response).await.map(drop)?);
        }
        let mut body = response.into_body();
        while let Some(frame) = tokio::time::timeout(TIMEOUT, body.frame()).await.map_err(|_| late())? {
            if let Ok(data) = frame.map_err(unreachable)?.into_data() {
                out.write_all(&data)?;
            }
        }
        Ok(())
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Value, Error> {
        let (request, body) = self.exchange(method, path, body).await?;
        json(request, &body)
    }

    /// The name of the request, for errors, and the body of its answer.
    async fn exchange(&self, method: Method, path: &str, body: Bytes) -> Result<(String, Bytes), Error> {
        let exchange = async { self.open().await?.send(self, method, path, body).await };
        tokio::time::timeout(TIMEOUT, exchange).await.unwrap_or_else(|_| Err(late()))
    }

    async fn open(&self) -> Result<Connection, Error> {
        let stream = TokioIo::new(Listening(self.connect().await?));
        let (sender, connection) = http1::handshake(stream).await.map_err(unreachable)?;
        // Ends with the sender, or with the gateway.
        tokio::spawn(connection);
        Ok(Connection { sender })
    }
}

/// A stream that goes on reading when the other side takes no more: a gateway that refuses a long body has answered by then.
struct Listening(Box<dyn Stream>);

impl Listening {
    fn over<T>(written: Poll<io::Result<T>>, instead: T) -> Poll<io::Result<T>> {
        match written {
            Poll::Ready(Err(error)) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {
                Poll::Ready(Ok(instead))
            }
            written => written,
        }
    }
}

impl AsyncRead for Listening {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Listening {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Self::over(Pin::new(&mut self.0).poll_write(cx, buf), buf.len())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        Self::over(Pin::new(&mut self.0).poll_flush(cx), ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// A connection that is kept for further requests, one after the other.
pub(crate) struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// Any [`Error`] but the first four.
    pub(crate) async fn open(client: &Client) -> Result<Self, Error> {
        tokio::time::timeout(TIMEOUT, client.open()).await.unwrap_or_else(|_| Err(late()))
    }

    /// As [`Client::post`]. After an error that is no [`Error::Refused`] the connection is of no more use.
    ///
    /// # Errors
    /// Any [`Error`] but the first four.
    pub(crate) async fn post(&mut self, client: &Client, path: &str, body: &impl Serialize) -> Result<Value, Error> {
        let body = serde_json::to_vec(body).expect("invariant: request bodies have text keys only");
        let exchange = self.send(client, Method::POST, path, body.into());
        let (request, body) = tokio::time::timeout(TIMEOUT, exchange).await.unwrap_or_else(|_| Err(late()))?;
        json(request, &body)
    }

    async fn send(
        &mut self,
        client: &Client,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(String, Bytes), Error> {
        let (name, response) = self.request(client, method, path, JSON, body).await?;
        read(name, response).await
    }

    /// The name of the request, for errors, and the answer, of which the body has not been read.
    async fn request(
        &mut self,
        client: &Client,
        method: Method,
        path: &str,
        media_type: &str,
        body: Bytes,
    ) -> Result<(String, Response<Incoming>), Error> {
        // The query may hold a token, which no error may show.
        let name = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", client.prefix))
            .header(HOST, &client.authority)
            .header(AUTHORIZATION, client.authorization.clone())
            .header(ACCEPT, JSON)
            .header(CONTENT_TYPE, media_type)
            .body(Full::new(body))
            .map_err(|_| Error::Url("the path holds characters that a URL cannot carry"))?;
        self.sender.ready().await.map_err(unreachable)?;
        Ok((name, self.sender.send_request(request).await.map_err(unreachable)?))
    }
}

#[allow(clippy::needless_pass_by_value, reason = "the form that map_err calls")]
fn unreachable(error: hyper::Error) -> Error {
    Error::Unreachable(root_cause(&error))
}

fn late() -> Error {
    Error::Unreachable(format!("no answer within {} s", TIMEOUT.as_secs()))
}

/// An accepted base URL.
fn uri(url: &str) -> Result<Uri, Error> {
    let uri: Uri =
        url.parse().map_err(|_| Error::Url("the URL cannot be read; it looks like http://127.0.0.1:8080"))?;
    match (uri.scheme_str(), uri.authority(), uri.query()) {
        (_, Some(authority), _) if authority.as_str().contains('@') => {
            Err(Error::Url("the URL holds a user; it belongs into TIDEGATE_USER"))
        }
        (Some("http" | "https"), Some(_), None) => Ok(uri),
        _ => Err(Error::Url("the URL must look like http://127.0.0.1:8080")),
    }
}

async fn read(request: String, response: Response<Incoming>) -> Result<(String, Bytes), Error> {
    let status = response.status();
    let body = match Limited::new(response.into_body(), ANSWER_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return Err(Error::Unreadable { request, reason: root_cause(error.as_ref()) }),
    };
    if !status.is_success() {
        return Err(Error::Refused { request, status, message: message(&body) });
    }
    Ok((request, body))
}

fn json(request: String, body: &[u8]) -> Result<Value, Error> {
    if body.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(body).map_err(|error| Error::Unreadable { request, reason: error.to_string() })
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn client(url: &str) -> Result<Client, Error> {
        Client::new(&ClientArgs { url: url.to_owned(), user: Some("edge/u".to_owned()), ca: None }, "p")
    }

    #[test]
    fn a_base_url_may_have_a_port_a_prefix_and_a_slash_at_its_end() {
        for (url, websocket, host, port) in [
            ("http://127.0.0.1:8080", "ws://127.0.0.1:8080/x?y", "127.0.0.1", 8080),
            ("http://box/", "ws://box/x?y", "box", 80),
            ("http://[::1]:81/edge1/", "ws://[::1]:81/edge1/x?y", "::1", 81),
        ] {
            let client = client(url).unwrap();
            assert_eq!(client.websocket_url("/x?y"), websocket);
            assert_eq!((client.peer.host.as_str(), client.peer.port), (host, port));
        }
    }

    #[test]
    fn other_urls_are_refused_with_the_reason() {
        for (url, reason) in [
            ("box:8080", "must look like"),
            ("ftp://box", "must look like"),
            ("http://box?x=1", "must look like"),
            ("http://edge%2Fadmin:pw@box", "TIDEGATE_USER"),
            ("", "cannot be read"),
        ] {
            let error = client(url).err().unwrap().to_string();
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
