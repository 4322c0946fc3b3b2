//! `/notification2/token` and `/notification2/unsubscribe` (Notifications 2.0 OpenAPI; seed 000, "Creating tokens").

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use hyper::{StatusCode, Uri};
use serde::Deserialize;

use super::{ApiError, App, AppState, Caller, parameter, query, read_body};
use crate::auth::{AuthError, ConsumerClaims, Role, TokenError};
use crate::backlog::TopicKey;
use crate::json::Invalid;
use crate::subscription::check_name;

/// What a token lives for when the request does not say (seed 000).
const DEFAULT_MINUTES: i64 = 1440;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TokenRequest {
    subscriber: Option<String>,
    subscription: Option<String>,
    expires_in_minutes: Option<i64>,
    shared: Option<bool>,
    non_persistent: Option<bool>,
    /// Accepted and ignored: every token is signed.
    #[serde(rename = "signed")]
    _signed: Option<bool>,
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// POST of `/notification2/token`.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::Notification2Admin)?.tenant;
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let wanted: TokenRequest =
        serde_json::from_slice(&body).map_err(|error| ApiError::unprocessable(error.to_string()))?;
    let (claims, minutes) = check(wanted, tenant)?;
    let token = app.tokens.mint(&claims, minutes, app.clock.now_ms()).map_err(|error| {
        tracing::error!(%error, "a token could not be made");
        ApiError::from(error)
    })?;
    let body = serde_json::json!({"token": token}).to_string();
    Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
}

fn check(wanted: TokenRequest, tenant: &crate::message::Tenant) -> Result<(ConsumerClaims, u64), Invalid> {
    let name = |field: &str, value: Option<String>| {
        let name =
            value.ok_or_else(|| Invalid::new("", format!("Following mandatory fields should be included: {field}")))?;
        check_name(field, &name).map(|()| name)
    };
    let subscription = name("subscription", wanted.subscription)?;
    let subscriber = name("subscriber", wanted.subscriber)?;
    let minutes = wanted.expires_in_minutes.unwrap_or(DEFAULT_MINUTES);
    let minutes = u64::try_from(minutes).ok().filter(|minutes| *minutes > 0);
    let minutes = minutes.ok_or_else(|| Invalid::new("expiresInMinutes", "must be at least 1"))?;
    if wanted.kind.is_some_and(|kind| kind != "notification") {
        return Err(Invalid::new("type", "must be 'notification'"));
    }
    if wanted.shared.unwrap_or(false) {
        return Err(Invalid::new("shared", "shared consumers are not supported yet"));
    }
    if wanted.non_persistent.unwrap_or(false) {
        return Err(Invalid::new("nonPersistent", "non-persistent topics are not supported yet"));
    }
    let tenant = tenant.clone();
    Ok((ConsumerClaims { tenant, subscriber, subscription, shared: false, non_persistent: false }, minutes))
}

/// POST of `/notification2/unsubscribe?token=…`. The token is the credential, even an expired one.
pub(super) async fn unsubscribe(State(app): AppState, uri: Uri) -> Result<Response, ApiError> {
    let claims = match verify(&app, &uri) {
        Ok(claims) => claims,
        Err(Unverified::Token(TokenError::Expired { claims, .. })) => claims,
        Err(error) => return Err(error.into()),
    };
    let topic = topic(&claims);
    if app.writer.unsubscribe(topic, &claims.subscriber).await? {
        Ok(([(CONTENT_TYPE, "application/json")], r#"{"result":"DONE"}"#).into_response())
    } else {
        // Clients take a 5xx, and nothing else, for "was unsubscribed before".
        let message = format!("There is no subscriber '{}' on topic '{}'.", claims.subscriber, claims.subscription);
        Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "reliable-notification/Not Found", message))
    }
}

/// Why a request is not a consumer's.
pub(super) enum Unverified {
    /// There is no `token` parameter.
    Missing,
    /// See [`TokenError`].
    Token(TokenError),
}

impl From<Unverified> for ApiError {
    fn from(error: Unverified) -> Self {
        match error {
            Unverified::Missing => AuthError::Missing.into(),
            Unverified::Token(error) => error.into(),
        }
    }
}

/// The claims of the `token` parameter.
pub(super) fn verify(app: &App, uri: &Uri) -> Result<ConsumerClaims, Unverified> {
    let query = query(uri);
    let token = parameter(&query, "token").ok_or(Unverified::Missing)?;
    app.tokens.verify(token, app.clock.now_ms()).map_err(Unverified::Token)
}

/// The topic that a token is for.
pub(super) fn topic(claims: &ConsumerClaims) -> Arc<TopicKey> {
    Arc::new(TopicKey { tenant: claims.tenant.clone(), name: claims.subscription.as_str().into() })
}
