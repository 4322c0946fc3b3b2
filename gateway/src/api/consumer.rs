//! `/notification2/consumer`: the upgrade to the WebSocket of a consumer (seed 001, "Consumer protocol").

use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{Request, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::header::{CONNECTION, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE};
use hyper::{HeaderMap, Method, StatusCode, Uri, Version};
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::{ApiError, App, AppState, query, tokens};
use crate::auth::random;
use crate::backlog::Connecting;
use crate::consumer::Kind;
use crate::deliver::websocket::{self, Conditions};
use crate::dispatch::{Delivery, HEADER_BYTES};
use crate::telemetry::Connected;

/// Longest `consumer` name, in characters.
const NAME_CHARS: usize = 255;

/// GET with an upgrade. Who may not connect is refused here, with a status, before there is a WebSocket.
pub(super) async fn connect(State(app): AppState, mut request: Request) -> Result<Response, ApiError> {
    if request.method() != Method::GET || request.version() != Version::HTTP_11 || !request.body().is_end_stream() {
        return Err(ApiError::bad_request("An upgrade is a GET of HTTP/1.1 without a body."));
    }
    let claims = tokens::verify(&app, request.uri()).map_err(|unverified| unverified.refuse(&app))?;
    let who = Connecting {
        topic: tokens::topic(&claims),
        consumer: claims.subscriber.as_str().into(),
        kind: if claims.shared { Kind::Shared } else { Kind::Exclusive },
        member: member_name(request.uri())?,
    };
    if !app.auth.knows(&claims.tenant) && !is_known(&app, &who) {
        let message = "The token's tenant was removed; only consumers for which messages wait may connect.";
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "security/Unauthorized", message));
    }
    let accept = accept_key(request.headers())?;
    let attached = app.writer.attach(who).await?;
    let idle = Duration::from_secs(app.config.consumer.idle_seconds);
    let conditions = Conditions { idle, stopping: app.stopping.clone() };
    // What waits may be longer than the limit that holds now.
    let frame_bytes = app.config.limits.frame_bytes.max(attached.topic().longest() + HEADER_BYTES);
    let writer = app.writer.clone();
    let delivery = Delivery::new(attached, app.bodies.clone(), &app.epochs);
    let upgrade = hyper::upgrade::on(&mut request);
    app.consumers.spawn(async move {
        // A peer that is gone by now gives its place back.
        let Ok(upgraded) = upgrade.await else { return };
        let config = Some(websocket::config(frame_bytes));
        let _connected = Connected::new("websocket");
        let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, config).await;
        websocket::serve(socket, delivery, writer, conditions).await;
    });
    Response::builder()
        .status(StatusCode::SWITCHING_PROTOCOLS)
        .header(CONNECTION, "Upgrade")
        .header(UPGRADE, "websocket")
        .header(SEC_WEBSOCKET_ACCEPT, accept)
        .body(Body::empty())
        .map_err(|_| ApiError::new(StatusCode::BAD_REQUEST, "general/badRequest", "The upgrade cannot be answered."))
}

/// Whether the consumer has connected before and was not unsubscribed.
fn is_known(app: &App, who: &Connecting) -> bool {
    let figures = app.topics.topic_figures(&who.topic);
    figures.is_some_and(|topic| topic.consumers.iter().any(|consumer| consumer.name == who.consumer))
}

/// The `consumer` parameter: a name that makes sources stick to this client of a shared consumer (seed 000, "Shared consumer
/// tokens"). Without it, a name that nobody else has.
fn member_name(uri: &Uri) -> Result<Box<str>, ApiError> {
    let query = query(uri);
    let Some((_, name)) = query.iter().find(|(key, _)| key == "consumer") else {
        return Ok(format!("{:032x}", u128::from_be_bytes(random())).into());
    };
    if name.trim().is_empty() {
        Err(ApiError::bad_request("consumer: must not be blank"))
    } else if name.chars().count() > NAME_CHARS {
        Err(ApiError::bad_request("consumer: must have at most 255 characters"))
    } else if name.chars().any(char::is_control) {
        Err(ApiError::bad_request("consumer: must not hold control characters"))
    } else {
        Ok((&**name).into())
    }
}

/// Checks the handshake of RFC 6455 and answers its key.
fn accept_key(headers: &HeaderMap) -> Result<String, ApiError> {
    let has = |name, token: &str| {
        let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        values.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case(token))
    };
    if !has(CONNECTION, "upgrade") || !has(UPGRADE, "websocket") || !has(SEC_WEBSOCKET_VERSION, "13") {
        let message = "This is a WebSocket endpoint: ask for an upgrade to version 13.";
        return Err(ApiError::new(StatusCode::UPGRADE_REQUIRED, "general/upgradeRequired", message));
    }
    let key = headers.get(SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes);
    let key = key.filter(|key| STANDARD.decode(key).is_ok_and(|key| key.len() == 16));
    let key = key.ok_or_else(|| ApiError::bad_request("The Sec-WebSocket-Key header must be 16 bytes in base64."))?;
    Ok(derive_accept_key(key))
}
