//! `/notification2/consumer`: the upgrade to the WebSocket of a consumer (seed 001, "Consumer protocol").

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::header::{CONNECTION, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE};
use hyper::{HeaderMap, StatusCode};
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::{ApiError, AppState, tokens};
use crate::deliver::websocket::{self, Conditions};
use crate::dispatch::Delivery;

/// GET with an upgrade. Who may not connect is refused here, with a status, before there is a WebSocket.
pub(super) async fn connect(State(app): AppState, mut request: Request) -> Result<Response, ApiError> {
    let claims = tokens::verify(&app, request.uri())?;
    if claims.shared || claims.non_persistent {
        return Err(ApiError::unprocessable("Shared and non-persistent consumers are not supported yet."));
    }
    let accept = accept_key(request.headers())?;
    let attached = app.writer.attach(tokens::topic(&claims), &claims.subscriber).await?;
    let settings = &app.config.consumer;
    let delivery = Delivery::new(attached, app.bodies.clone(), settings.window, &app.epochs);
    let conditions = Conditions { idle: Duration::from_secs(settings.idle_seconds), stopping: app.stopping.clone() };
    let writer = app.writer.clone();
    let upgrade = hyper::upgrade::on(&mut request);
    app.consumers.spawn(async move {
        // A peer that is gone by now gives its place back.
        let Ok(upgraded) = upgrade.await else { return };
        let config = Some(websocket::config());
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
