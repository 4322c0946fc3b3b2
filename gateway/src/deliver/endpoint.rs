//! Endpoints of push consumers: what may be asked for, and one attempt to bring a message there.
//!
//! In: a [`Target`] and a message. Out: delivered, or a [`Failure`]. Consumers with the same endpoint share its lane.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::header::{CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT};
use hyper::http::uri::Scheme;
use hyper::{HeaderMap, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tower_service::Service;

use crate::clock::Clock;
use crate::json::{self, Invalid, Limits, Members};
use crate::outbound::{Networks, Peer, Reach, Stream, Unreachable, is_caused_by, root_cause};
use crate::{config, tls};

/// Longest URI, in bytes.
const URI_BYTES: usize = 2048;
/// Headers that a consumer may set, and bytes of their names and values together.
const HEADERS: usize = 32;
const HEADER_BYTES: usize = 8 << 10;
/// Bytes of an answer's head.
const HEAD_BYTES: usize = 64 << 10;
/// Bytes of an answer's body that are read, so that its connection can be used again, and how long that may take.
const ANSWER_BYTES: usize = 64 << 10;
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// How long a connection may wait for its next request.
const POOL_IDLE: Duration = Duration::from_secs(30);
/// The longest pause that an endpoint may ask for.
const RETRY_AFTER_MOST: Duration = Duration::from_secs(3600);

/// Headers that belong to the connection, to the message or to the gateway.
const RESERVED: [&str; 9] =
    ["connection", "date", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"];
const RESERVED_PREFIXES: [&str; 3] = ["content-", "proxy-", "tidegate-"];

/// Where the messages of a consumer go, and what each request carries beside them.
#[derive(Clone, Debug)]
pub struct Target {
    /// `http` or `https`, with a host.
    pub uri: Uri,
    /// Their values are secrets.
    pub headers: HeaderMap,
}

impl Target {
    /// Reads `{"uri", "headers"}`, the text of a JSON object; `headers` may be absent.
    ///
    /// # Errors
    /// Names the member that cannot be used.
    pub fn parse(object: &str, limits: &Limits) -> Result<Self, Invalid> {
        let members = Members::of(object, limits)?;
        if let Some(unknown) = members.iter().find(|member| !["uri", "headers"].contains(&&*member.name)) {
            return Err(Invalid::new(&unknown.name, "is not a known member of a push"));
        }
        let uri = members.get("uri").ok_or_else(|| Invalid::new("uri", "is missing"))?;
        let headers = members
            .get("headers")
            .map_or(Ok(HeaderMap::new()), |raw| parse_headers(raw, limits).map_err(|error| error.within("headers")));
        Ok(Self { uri: parse_uri(&json::string(uri, "uri")?)?, headers: headers? })
    }

    /// What [`Target::parse`] reads.
    #[must_use]
    pub fn stored(&self) -> String {
        let text = |value: &HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        let headers: serde_json::Map<_, _> =
            self.headers.iter().map(|(name, value)| (name.to_string(), text(value).into())).collect();
        serde_json::json!({"uri": self.uri.to_string(), "headers": headers}).to_string()
    }

    /// Scheme, host and port: what a lane is for, and what logs may show.
    fn endpoint(&self) -> String {
        let scheme = self.uri.scheme_str().unwrap_or_default();
        format!("{scheme}://{}:{}", host(&self.uri), port(&self.uri))
    }
}

fn parse_uri(text: &str) -> Result<Uri, Invalid> {
    let refused = |reason: &str| Err(Invalid::new("uri", reason));
    let too_long = || refused(&format!("must have at most {URI_BYTES} bytes"));
    if text.len() > URI_BYTES {
        return too_long();
    }
    let Ok(uri) = text.parse::<Uri>() else { return refused("is not a URI") };
    // As it is kept, it has a path.
    if uri.to_string().len() > URI_BYTES {
        return too_long();
    }
    let Some(authority) = uri.authority().filter(|_| matches!(uri.scheme_str(), Some("http" | "https"))) else {
        return refused("must begin with https:// or http:// and a host");
    };
    if authority.as_str().contains('@') {
        return refused("must not hold a user; credentials belong into headers");
    }
    if text.contains('#') {
        return refused("must not have a fragment");
    }
    if ServerName::try_from(host(&uri)).is_err() || uri.port_u16() == Some(0) {
        return refused("must name a host that can be connected to");
    }
    Ok(uri)
}

fn parse_headers(object: &str, limits: &Limits) -> Result<HeaderMap, Invalid> {
    let mut headers = HeaderMap::new();
    let mut bytes = 0;
    for member in &Members::of(object, limits)? {
        let refused = |reason: &str| Err(Invalid::new(&member.name, reason));
        let Ok(name) = HeaderName::from_bytes(member.name.as_bytes()) else {
            return refused("is not a name of a header");
        };
        if RESERVED.contains(&name.as_str()) || RESERVED_PREFIXES.iter().any(|prefix| name.as_str().starts_with(prefix))
        {
            return refused("is a header that the gateway sets itself");
        }
        let text = json::string(member.raw, &member.name)?;
        bytes += name.as_str().len() + text.len();
        let Some(mut value) = HeaderValue::from_str(&text).ok().filter(|_| text.is_ascii()) else {
            return refused("must be visible ASCII text");
        };
        value.set_sensitive(true);
        if headers.insert(name, value).is_some() {
            return refused("occurs twice");
        }
        if headers.len() > HEADERS || bytes > HEADER_BYTES {
            return Err(Invalid::new("", format!("must be at most {HEADERS} headers of {HEADER_BYTES} bytes")));
        }
    }
    Ok(headers)
}

/// Without the brackets of an IPv6 address.
fn host(uri: &Uri) -> &str {
    uri.host().unwrap_or_default().trim_matches(['[', ']'])
}

fn port(uri: &Uri) -> u16 {
    uri.port_u16().unwrap_or(if uri.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 })
}

/// Why an attempt failed.
#[derive(Debug)]
pub struct Failure {
    /// Of what kind, as metrics name it.
    pub kind: FailureKind,
    /// For operators; holds no secret.
    pub reason: String,
    /// How long the endpoint asks to wait, at most [`RETRY_AFTER_MOST`].
    pub retry_after: Option<Duration>,
}

/// The kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// A status that says that the request is wrong, or belongs elsewhere (3xx, 4xx).
    Refused,
    /// A status that says that the endpoint is busy (408, 425, 429) or broken (5xx).
    Unavailable,
    /// There was no answer in time.
    Timeout,
    /// There was no connection, or it broke.
    Unreachable,
    /// The address may not be connected to.
    Forbidden,
}

impl FailureKind {
    fn of(status: StatusCode) -> Self {
        let busy = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_EARLY, StatusCode::TOO_MANY_REQUESTS];
        if status.is_server_error() || busy.contains(&status) { Self::Unavailable } else { Self::Refused }
    }

    /// The value of the label `outcome`.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::Unreachable => "unreachable",
            Self::Forbidden => "forbidden",
        }
    }

    /// Whether it passes only when somebody changes something.
    #[must_use]
    pub fn is_lasting(self) -> bool {
        matches!(self, Self::Refused | Self::Forbidden)
    }
}

/// Brings messages to endpoints. Cheap to clone.
#[derive(Clone)]
pub struct Courier(Arc<Shared>);

struct Shared {
    client: legacy::Client<Connector, Full<Bytes>>,
    connector: Connector,
    clock: Clock,
    timeout: Duration,
    connections: usize,
    /// Lanes that are in use, by endpoint.
    lanes: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// One consumer's way to its endpoint, whose bounded connections it shares.
pub struct Lane {
    courier: Courier,
    target: Target,
    /// For logs.
    pub endpoint: String,
    places: Arc<Semaphore>,
}

impl Courier {
    /// A courier under the settings of `push`.
    ///
    /// # Errors
    /// When `push.ca` cannot be used.
    pub fn new(settings: &config::Push, clock: Clock) -> anyhow::Result<Self> {
        let networks = settings.allowed_networks.as_deref().and_then(Networks::parse).unwrap_or_default();
        let connector = Connector(Arc::new(Ways {
            plain: if settings.allow_plain { Reach::Public(networks.clone()) } else { Reach::Within(networks.clone()) },
            secure: Reach::Public(networks),
            trust: OnceLock::new(),
        }));
        if let Some(ca) = &settings.ca {
            let trust = tls::connector("push.ca", Some(ca))?;
            let _ = connector.0.trust.set(Ok(trust));
        }
        let client = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE)
            .pool_max_idle_per_host(settings.connections_per_endpoint)
            .http1_max_buf_size(HEAD_BYTES)
            .build(connector.clone());
        Ok(Self(Arc::new(Shared {
            client,
            connector,
            clock,
            timeout: Duration::from_secs(settings.timeout_seconds),
            connections: settings.connections_per_endpoint,
            lanes: Mutex::default(),
        })))
    }

    /// Refuses what can be seen never to be reached; what a name leads to shows when it is connected to.
    ///
    /// # Errors
    /// Names the key that would allow it.
    pub fn check(&self, target: &Target) -> Result<(), Invalid> {
        let reach = self.0.connector.reach(&target.uri);
        if reach.is_empty() {
            let reason = "plain http is for push.allowed_networks only, unless push.allow_plain is set";
            return Err(Invalid::new("uri", reason));
        }
        let Ok(address) = host(&target.uri).parse() else { return Ok(()) };
        reach.check(address).map_err(|error| Invalid::new("uri", forbidden(&error, reach)))
    }

    /// The way to a target.
    #[must_use]
    pub fn lane(&self, target: Target) -> Lane {
        let endpoint = target.endpoint();
        let mut lanes = self.0.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let places = lanes.get(&endpoint).and_then(Weak::upgrade).unwrap_or_else(|| {
            lanes.retain(|_, places| places.strong_count() > 0);
            let places = Arc::new(Semaphore::new(self.0.connections));
            lanes.insert(endpoint.clone(), Arc::downgrade(&places));
            places
        });
        Lane { courier: self.clone(), target, endpoint, places }
    }
}

impl Lane {
    /// One attempt: a POST of `body` with these headers and those of the target, once the endpoint has a place for it.
    ///
    /// # Errors
    /// Anything but a status of 2xx. Redirects are not followed.
    pub async fn post(&self, headers: HeaderMap, media_type: &'static str, body: Bytes) -> Result<(), Failure> {
        let _place = self.places.acquire().await;
        let mut request =
            Request::post(self.target.uri.clone()).body(Full::new(body)).expect("invariant: a URI is one");
        let agent = HeaderValue::from_static(concat!("Tidegate/", env!("CARGO_PKG_VERSION")));
        request.headers_mut().insert(USER_AGENT, agent);
        request.headers_mut().extend(self.target.headers.clone());
        request.headers_mut().extend(headers);
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
        let shared = &self.courier.0;
        match timeout(shared.timeout, shared.client.request(request)).await {
            Ok(Ok(response)) => answered(response, shared.clock.now_ms()).await,
            Ok(Err(error)) => Err(self.broken(&error)),
            Err(_) => {
                let reason = format!("no answer within {} s", shared.timeout.as_secs());
                Err(Failure { kind: FailureKind::Timeout, reason, retry_after: None })
            }
        }
    }

    fn broken(&self, error: &legacy::Error) -> Failure {
        let forbidden_here = is_caused_by::<Unreachable>(error);
        let kind = if forbidden_here { FailureKind::Forbidden } else { FailureKind::Unreachable };
        let cause = root_cause(error);
        let reach = self.courier.0.connector.reach(&self.target.uri);
        let reason = if forbidden_here { forbidden(&cause, reach) } else { cause };
        Failure { kind, reason, retry_after: None }
    }
}

/// Says what would allow it.
fn forbidden(error: &impl fmt::Display, reach: &Reach) -> String {
    let plain = if matches!(reach, Reach::Within(_)) { " over plain http" } else { "" };
    format!("{error}{plain}; it is not in push.allowed_networks")
}

/// What an answer says. Its body is of no interest, but a connection can be used again only when it has been read.
async fn answered(response: Response<hyper::body::Incoming>, now_ms: i64) -> Result<(), Failure> {
    let (head, body) = response.into_parts();
    let _ = timeout(ANSWER_WAIT, Limited::new(body, ANSWER_BYTES).collect()).await;
    if head.status.is_success() {
        return Ok(());
    }
    let asked = head.headers.get(RETRY_AFTER).and_then(|value| retry_after(value.to_str().ok()?, now_ms));
    let reason = format!("the endpoint answered {}", head.status);
    Err(Failure { kind: FailureKind::of(head.status), reason, retry_after: asked })
}

/// `Retry-After` (RFC 9110, section 10.2.3): seconds, or a date.
fn retry_after(value: &str, now_ms: i64) -> Option<Duration> {
    let wait = match value.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let at = httpdate::parse_http_date(value).ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
            at.saturating_sub(Duration::from_millis(now_ms.try_into().unwrap_or_default()))
        }
    };
    Some(wait.min(RETRY_AFTER_MOST))
}

/// Makes the connections that the client keeps.
#[derive(Clone)]
struct Connector(Arc<Ways>);

struct Ways {
    plain: Reach,
    secure: Reach,
    /// Made when it is first needed: to read what the system trusts takes time and memory.
    trust: OnceLock<Result<TlsConnector, String>>,
}

impl Connector {
    fn reach(&self, uri: &Uri) -> &Reach {
        if uri.scheme() == Some(&Scheme::HTTPS) { &self.0.secure } else { &self.0.plain }
    }

    async fn connect(self, uri: Uri) -> io::Result<TokioIo<Box<dyn Stream>>> {
        let host = host(&uri).to_owned();
        let tls = if uri.scheme() == Some(&Scheme::HTTPS) {
            let make = || tls::connector("push.ca", None).map_err(|error| format!("{error:#}"));
            let connector = self.0.trust.get_or_init(make).clone().map_err(io::Error::other)?;
            Some((connector, ServerName::try_from(host.clone()).map_err(io::Error::other)?))
        } else {
            None
        };
        let peer = Peer { host, port: port(&uri), tls };
        peer.connect(self.reach(&uri)).await.map(TokioIo::new)
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Box<dyn Stream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn parse(object: &str) -> Result<Target, String> {
        Target::parse(object, &Limits::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_target_comes_back_from_its_stored_form() {
        let target =
            parse(r#"{"uri":"https://[2001:db8::1]/a?b=c","headers":{"Authorization":"Bearer \"x\"","X-A":""}}"#);
        let again = parse(&target.unwrap().stored()).unwrap();
        assert_eq!(again.uri, "https://[2001:db8::1]/a?b=c");
        assert_eq!(again.endpoint(), "https://2001:db8::1:443");
        assert_eq!(
            (&again.headers["authorization"], &again.headers["x-a"]),
            (&"Bearer \"x\"".parse().unwrap(), &"".parse().unwrap())
        );
        assert!(!format!("{again:?}").contains("Bearer"), "a secret");
    }

    #[test]
    fn what_cannot_be_a_target_is_refused_with_its_member() {
        for (object, field) in [
            (r#"{}"#, "uri"),
            (r#"{"uri":1}"#, "uri"),
            (r#"{"uri":""}"#, "uri"),
            (r#"{"uri":"/a"}"#, "uri"),
            (r#"{"uri":"ftp://a.example"}"#, "uri"),
            (r#"{"uri":"https://"}"#, "uri"),
            (r#"{"uri":"https://u:p@a.example"}"#, "uri"),
            (r#"{"uri":"https://a.example/#b"}"#, "uri"),
            (r#"{"uri":"https://a b.example/"}"#, "uri"),
            (r#"{"uri":"https://a..example/"}"#, "uri"),
            (r#"{"uri":"https://a.example:0/"}"#, "uri"),
            (r#"{"uri":"https://a.example","url":""}"#, "url"),
            (r#"{"uri":"https://a.example","headers":[]}"#, "headers"),
            (r#"{"uri":"https://a.example","headers":{"a b":""}}"#, "headers.a b"),
            (r#"{"uri":"https://a.example","headers":{"a":"b\nc: d"}}"#, "headers.a"),
            (r#"{"uri":"https://a.example","headers":{"a":"ä"}}"#, "headers.a"),
            (r#"{"uri":"https://a.example","headers":{"a":1}}"#, "headers.a"),
            (r#"{"uri":"https://a.example","headers":{"a":"","A":""}}"#, "headers.A"),
            (r#"{"uri":"https://a.example","headers":{"Host":"b"}}"#, "headers.Host"),
            (r#"{"uri":"https://a.example","headers":{"Content-Length":"0"}}"#, "headers.Content-Length"),
            (r#"{"uri":"https://a.example","headers":{"transfer-encoding":"chunked"}}"#, "headers.transfer-encoding"),
            (r#"{"uri":"https://a.example","headers":{"Connection":"close"}}"#, "headers.Connection"),
            (r#"{"uri":"https://a.example","headers":{"Tidegate-Action":"x"}}"#, "headers.Tidegate-Action"),
        ] {
            let error = parse(object).unwrap_err();
            assert!(error.starts_with(&format!("{field}: ")), "{object}: {error}");
        }
        let long = |bytes: usize| format!(r#"{{"uri":"https://a.example/{}"}}"#, "x".repeat(bytes - 18));
        assert!(parse(&long(URI_BYTES)).is_ok());
        assert!(parse(&long(URI_BYTES + 1)).unwrap_err().contains("at most 2048"));
        let without_path = format!(r#"{{"uri":"https://a.example?{}"}}"#, "x".repeat(URI_BYTES - 18));
        assert!(parse(&without_path).unwrap_err().contains("at most 2048"));
        let many = |count: usize| {
            let headers: Vec<_> = (0..count).map(|at| format!(r#""x-{at}":"""#)).collect();
            parse(&format!(r#"{{"uri":"https://a.example","headers":{{{}}}}}"#, headers.join(",")))
        };
        assert!(many(HEADERS).is_ok());
        assert!(many(HEADERS + 1).unwrap_err().starts_with("headers: must be at most"));
        let large = |bytes: usize| {
            parse(&format!(r#"{{"uri":"https://a.example","headers":{{"a":"{}"}}}}"#, "x".repeat(bytes - 1)))
        };
        assert!(large(HEADER_BYTES).is_ok() && large(HEADER_BYTES + 1).is_err());
    }

    #[test]
    fn what_is_out_of_reach_is_refused_with_the_key() {
        let check = |settings: config::Push, uri: &str| {
            let target = parse(&format!(r#"{{"uri":"{uri}"}}"#)).unwrap();
            Courier::new(&settings, Clock::system()).unwrap().check(&target).err().map(|error| error.to_string())
        };
        let networks = |list: &str| config::Push { allowed_networks: Some(list.to_owned()), ..config::Push::default() };
        let plain = config::Push { allow_plain: true, ..config::Push::default() };
        for (settings, uri) in [
            (config::Push::default(), "https://a.example"),
            (config::Push::default(), "https://1.1.1.1"),
            (config::Push::default(), "https://localhost"),
            (plain.clone(), "http://1.1.1.1"),
            (networks("127.0.0.0/8"), "http://127.0.0.1:1"),
            (networks("127.0.0.0/8"), "http://a.example"),
            (networks("fd00::/8"), "https://[fd00::1]"),
        ] {
            assert_eq!(check(settings, uri), None, "{uri}");
        }
        for (settings, uri, key) in [
            (config::Push::default(), "https://127.0.0.1", "push.allowed_networks"),
            (config::Push::default(), "https://[::ffff:10.0.0.1]", "10.0.0.1 may not be reached"),
            (config::Push::default(), "http://a.example", "push.allow_plain"),
            (plain, "http://10.0.0.1", "push.allowed_networks"),
            (networks("10.0.0.0/8"), "http://1.1.1.1", "push.allowed_networks"),
            (networks("10.0.0.0/8"), "https://192.168.0.1", "push.allowed_networks"),
        ] {
            assert!(check(settings, uri).unwrap().contains(key), "{uri}");
        }
    }

    #[test]
    fn only_what_may_pass_by_itself_is_unavailable() {
        for status in [408, 425, 429, 500, 502, 503, 507] {
            assert_eq!(FailureKind::of(StatusCode::from_u16(status).unwrap()), FailureKind::Unavailable, "{status}");
        }
        for status in [300, 301, 307, 400, 401, 404, 410, 422] {
            assert_eq!(FailureKind::of(StatusCode::from_u16(status).unwrap()), FailureKind::Refused, "{status}");
        }
    }

    // RFC 9110, section 10.2.3.
    #[test]
    fn an_endpoint_asks_to_wait_in_seconds_or_until_a_date() {
        let now_ms = (784_111_777 - 30) * 1000;
        for (value, seconds) in [
            ("0", Some(0)),
            ("120", Some(120)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(30)),
            ("Sunday, 06-Nov-94 08:49:37 GMT", Some(30)),
            ("Sat, 05 Nov 1994 08:49:37 GMT", Some(0)),
            ("99999999", Some(3600)),
            ("Sun, 06 Nov 2044 08:49:37 GMT", Some(3600)),
            ("-1", None),
            ("soon", None),
        ] {
            assert_eq!(retry_after(value, now_ms), seconds.map(Duration::from_secs), "{value}");
        }
    }
}
