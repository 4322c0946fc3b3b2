//! HTTP: the one router, one file for each family of resources, and what all handlers share.

mod alarms;
mod canary;
mod children;
mod consumer;
mod cors;
mod discovery;
mod error;
mod events;
mod explain;
mod figures;
mod full_topics;
mod identity;
mod inventory;
mod measurements;
mod messaging;
mod objects;
mod openapi;
mod operations;
mod operator;
mod paths;
mod plugins;
mod push;
mod routes;
mod subscriptions;
mod tenants;
mod tokens;
mod topics;
mod trial;
mod users;

use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{FromRequestParts, Path, State};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderValue, LOCATION, ORIGIN,
};
use hyper::http::request::Parts;
use hyper::http::uri::Scheme;
use hyper::{HeaderMap, Method, StatusCode, Uri};
use serde::de::DeserializeOwned;
use serde_json::Value;
use sqlx::pool::PoolConnection;
use sqlx::{Sqlite, SqlitePool};
use tokio::sync::{Mutex, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub(crate) use canary::watch as watch_canaries;
pub use error::ApiError;
pub(crate) use full_topics::watch as watch_full_topics;
pub(crate) use paths::drop_empty_segments;
pub use routes::router;
pub(crate) use subscriptions::{load as load_subscriptions, load_plugins};
pub(crate) use tenants::ADMIN;
pub(crate) use trial::places as places_for_trials;

use crate::auth::{Authenticator, ConsumerTokens, Principal, Role};
use crate::backlog::{Bodies, Topics};
use crate::clock::Clock;
use crate::config::Config;
use crate::dispatch::Epochs;
use crate::ids::ObjectIds;
use crate::json;
use crate::locks::{KeyedLocks, Places};
use crate::message::{Api, Tenant};
use crate::pipeline::Pipeline;
use crate::platform::identity::ExternalId;
use crate::platform::page::{Envelope, PageRequest, Query};
use crate::platform::{ProcessingMode, Sources, parse_id};
use crate::plugin::Plugins;
use crate::push::Pushes;
use crate::registry::Registry;
use crate::store::LongReads;
use crate::subscription::Index;
use crate::telemetry::{Metrics, Throttle, logins_refused};
use crate::writer::Writer;

/// A body takes a piece of the common budget for each such part beyond the first.
pub(crate) const SMALL_BODY: usize = 64 << 10;

/// Longest `Host` header: a name of 255 bytes and a port.
const HOST_BYTES: usize = 261;

/// What handlers work with.
pub struct App {
    /// Settings.
    pub config: Config,
    /// Time.
    pub clock: Clock,
    /// Verifies Basic credentials.
    pub auth: Authenticator,
    /// Makes and verifies consumer tokens.
    pub tokens: ConsumerTokens,
    /// Reads of the operational store.
    pub store: SqlitePool,
    /// Managed objects that exist.
    pub sources: Arc<Sources>,
    /// Object ids.
    pub ids: ObjectIds,
    /// Locks on objects that are being changed; that of a device is also the lock of its alarms.
    pub objects: KeyedLocks<u64>,
    /// Locks on external ids that are being bound or unbound; taken after those on objects.
    pub external_ids: KeyedLocks<(Tenant, ExternalId)>,
    /// Locks on tenants whose users are being changed; the gateway's own stands for the set of all tenants as well.
    pub accounts: KeyedLocks<Tenant>,
    /// Topics with a consumer.
    pub topics: Topics,
    /// Subscriptions in force.
    pub index: Arc<Index>,
    /// Held while subscriptions are made or deleted, while push consumers are made, and while plugins are deleted.
    pub subscribing: Mutex<()>,
    /// The sandbox.
    pub plugins: Plugins,
    /// The uploaded plugins.
    pub registry: Registry,
    /// Of plugins that are tried.
    pub trials: Places<Tenant>,
    /// The line up to the disk.
    pub pipeline: Pipeline,
    /// The single writer.
    pub writer: Writer,
    /// Bodies of messages.
    pub bodies: Bodies,
    /// Tells connections apart.
    pub epochs: Epochs,
    /// Push consumers.
    pub pushes: Pushes,
    /// Renders `/metrics`.
    pub metrics: Metrics,
    /// Logins that were refused.
    pub refused_logins: RefusedLogins,
    /// Ends when consumers have to close.
    pub stopping: CancellationToken,
    /// Consumers that are connected, and push consumers.
    pub consumers: TaskTracker,
    /// Reads of lists, which may look at every row of a tenant.
    pub long_reads: LongReads,
    /// Pieces of large bodies that may be in memory at a time.
    pub body_budget: Semaphore,
}

/// Who asks, and how the gateway is called from there.
pub struct Caller {
    principal: Principal,
    /// `self` links begin with this.
    base_url: String,
}

impl Caller {
    fn require(&self, role: Role) -> Result<&Principal, ApiError> {
        self.principal.require(role)?;
        Ok(&self.principal)
    }
}

impl FromRequestParts<Arc<App>> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        refuse_foreign_origin(&app.config, parts)?;
        let header = parts.headers.get(AUTHORIZATION).map(HeaderValue::as_bytes);
        let principal = app.auth.basic(header).await.map_err(|error| {
            app.refused_logins.count(error.reason());
            // Clients that send this do not want a browser's own dialog.
            let quiet =
                parts.headers.get("UseXBasic").is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"));
            let error = ApiError::from(error);
            if quiet { error } else { error.with_challenge() }
        })?;
        Ok(Self { principal, base_url: base_url(&app.config, parts)? })
    }
}

/// Counts refused logins, and tells the log of at most one in a second: there may be a flood of them. Nothing of the credentials
/// is told, since people confuse the fields for names and passwords.
pub struct RefusedLogins(Throttle);

impl Default for RefusedLogins {
    fn default() -> Self {
        Self(Throttle::new(1))
    }
}

impl RefusedLogins {
    fn count(&self, reason: &'static str) {
        logins_refused(reason).increment(1);
        if let Some(suppressed) = self.0.pass(Instant::now()) {
            tracing::warn!(reason, suppressed, "a login was refused");
        }
    }
}

/// How the gateway is called by somebody of whom nothing else is known.
struct Origin(String);

impl FromRequestParts<Arc<App>> for Origin {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        base_url(&app.config, parts).map(Self)
    }
}

/// A page of another site must not be able to change anything with the credentials that a browser keeps, unless the operator
/// has named it.
fn refuse_foreign_origin(config: &Config, parts: &Parts) -> Result<(), ApiError> {
    let Some(origin) = parts.headers.get(ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let host = origin.split_once("://").map(|(_, host)| host.as_bytes());
    let own = parts.headers.get(HOST).map(HeaderValue::as_bytes);
    if host == own
        || matches!(parts.method, Method::GET | Method::HEAD | Method::OPTIONS)
        || config.http.allows_origin(origin)
    {
        return Ok(());
    }
    Err(ApiError::new(StatusCode::FORBIDDEN, "security/Forbidden", "Requests from other sites are refused."))
}

/// How the gateway is called from where the request comes. Headers of proxies are not believed: anybody can send them.
///
/// Every object in an answer repeats it, so it has to be short.
fn base_url(config: &Config, parts: &Parts) -> Result<String, ApiError> {
    if let Some(url) = &config.http.public_url {
        return Ok(url.trim_end_matches('/').to_owned());
    }
    let host = parts.headers.get(HOST).map_or(&b"localhost"[..], HeaderValue::as_bytes);
    let belongs = |byte: &u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(byte);
    let host = std::str::from_utf8(host)
        .ok()
        .filter(|host| host.len() <= HOST_BYTES && host.bytes().all(|byte| belongs(&byte)));
    let host =
        host.ok_or_else(|| ApiError::bad_request("The Host header must be a name or an address, and a port."))?;
    let scheme = parts.extensions.get().unwrap_or(&Scheme::HTTP);
    Ok(format!("{scheme}://{host}"))
}

/// Reads the body of a request, at most `limit` bytes. What passes [`SMALL_BODY`] counts to a common budget as it arrives.
async fn read_body(app: &App, headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    if headers.get_all(CONTENT_ENCODING).iter().any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(ApiError::encoded());
    }
    let too_large = || ApiError::too_large(format!("The body must have at most {limit} bytes."));
    let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: usize| length > limit) {
        return Err(too_large());
    }
    let read = async {
        let mut body = body;
        let mut read = BytesMut::with_capacity(announced.unwrap_or_default().min(SMALL_BODY));
        let mut held = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return Err(ApiError::bad_request("The body could not be read.")) };
            let Ok(data) = frame.into_data() else { continue };
            if read.len() + data.len() > limit {
                return Err(too_large());
            }
            read.extend_from_slice(&data);
            if read.len() > SMALL_BODY * (held.len() + 1) {
                // To wait for others that wait, too, would help nobody.
                held.push(
                    app.body_budget.try_acquire().map_err(|_| ApiError::busy("Too many large bodies are arriving."))?,
                );
            }
        }
        Ok(read.freeze())
    };
    let patience = Duration::from_secs(app.config.limits.request_seconds);
    tokio::time::timeout(patience, read).await.unwrap_or_else(|_| {
        Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "general/requestTimeout", "The body did not arrive in time."))
    })
}

/// The id behind the two names of a collection, as in `/inventory/managedObjects/1`; `None` for what cannot be one.
struct Id(Option<u64>);

impl<S: Sync> FromRequestParts<S> for Id {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.uri.path().split('/').nth(3).and_then(parse_id)))
    }
}

/// The names in a path, decoded.
struct Names<T>(T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Names<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let names = Path::from_request_parts(parts, state).await;
        names.map(|Path(names)| Self(names)).map_err(|_| ApiError::bad_request("The path is not UTF-8."))
    }
}

/// A name as it stands in a path.
pub(crate) fn path_segment(name: &str) -> String {
    let mut segment = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'-' | b'.' | b'_' | b'~' => segment.push(byte.into()),
            _ if byte.is_ascii_alphanumeric() => segment.push(byte.into()),
            _ => segment.push_str(&format!("%{byte:02X}")),
        }
    }
    segment
}

/// A page of rendered elements, of `total` there are.
fn listed(url: &str, query: &Query<'_>, name: &str, page: PageRequest, shown: Vec<Value>, total: u64) -> Vec<u8> {
    let more = page.offset() + (shown.len() as u64) < total;
    let mut body = Vec::new();
    let push = |element: Value, out: &mut Vec<u8>| out.extend_from_slice(element.to_string().as_bytes());
    Envelope { url, query, name, page, more, total: Some(total) }.render(shown, push, &mut body);
    body
}

/// Waits for a list's turn to read.
async fn list_turn(app: &App) -> Result<PoolConnection<Sqlite>, ApiError> {
    app.long_reads.begin().await.map_err(|error| match error {
        sqlx::Error::PoolTimedOut => ApiError::busy("Too many lists are being read."),
        error => error.into(),
    })
}

/// The query parameters, decoded, in order.
fn query(uri: &Uri) -> Vec<(Cow<'_, str>, Cow<'_, str>)> {
    form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).collect()
}

/// The first parameter of that name that is not empty.
fn parameter<'a>(query: &'a [(Cow<'_, str>, Cow<'_, str>)], name: &str) -> Option<&'a str> {
    query.iter().find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| &**value)
}

/// What becomes of the objects of a request to `api`.
fn processing_mode(headers: &HeaderMap, api: Api) -> Result<ProcessingMode, ApiError> {
    Ok(ProcessingMode::of(headers.get(ProcessingMode::HEADER).map(HeaderValue::as_bytes), api)?)
}

/// Limits of the JSON that clients send.
pub(crate) fn json_limits(config: &Config) -> json::Limits {
    json::Limits { depth: config.limits.json_depth, elements: config.limits.bulk_count, ..json::Limits::default() }
}

/// How a changed or made object is answered: without an `Accept` header there is no body, as on the platform.
struct Reply {
    status: StatusCode,
    location: Option<String>,
    /// The vendor media type, without the prefix, as `measurement`.
    media: &'static str,
}

impl Reply {
    fn respond(self, headers: &HeaderMap, body: impl FnOnce() -> Vec<u8>) -> Response {
        let accept = headers.get(ACCEPT).map(HeaderValue::as_bytes).filter(|accept| !accept.is_empty());
        let mut response = Response::builder().status(self.status);
        if let Some(location) = self.location {
            response = response.header(LOCATION, location);
        }
        let body = match accept {
            None => Vec::new(),
            Some(accept) => {
                response = response.header(CONTENT_TYPE, media_type(accept, self.media));
                body()
            }
        };
        response.body(body.into()).unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
    }
}

/// The vendor type for clients that ask for one, else plain JSON. Nobody gets a 406.
fn media_type(accept: &[u8], media: &str) -> String {
    if memchr::memmem::find(accept, b"vnd.com.nsn.cumulocity").is_some() {
        format!("application/vnd.com.nsn.cumulocity.{media}+json;charset=UTF-8;ver=0.9")
    } else {
        "application/json".to_owned()
    }
}

/// A read object or collection.
fn found(headers: &HeaderMap, media: &'static str, body: Vec<u8>) -> Response {
    let accept = headers.get(ACCEPT).map_or(&b""[..], |accept| accept.as_bytes());
    ([(CONTENT_TYPE, media_type(accept, media))], body).into_response()
}

type AppState = State<Arc<App>>;
