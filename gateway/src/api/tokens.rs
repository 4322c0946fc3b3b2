//! `/notification2/token` and `/notification2/unsubscribe` (Notifications 2.0 OpenAPI; seed 000, "Creating tokens").

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use hyper::{StatusCode, Uri};

use super::{ApiError, App, AppState, Caller, json_limits, parameter, query, read_body};
use crate::auth::{AuthError, ConsumerClaims, Role, TokenError};
use crate::backlog::TopicKey;
use crate::json::{self, Invalid, Members};
use crate::message::Tenant;
use crate::subscription::check_name;

/// What a token lives for when the request does not say (seed 000).
const DEFAULT_MINUTES: u64 = 1440;

/// POST of `/notification2/token`.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::Notification2Admin)?.tenant;
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let (claims, minutes) = read(&Members::parse(&body, &json_limits(&app.config))?, tenant)?;
    let token = app.tokens.mint(&claims, minutes, app.clock.now_ms()).map_err(|error| {
        tracing::error!(%error, "a token could not be made");
        ApiError::from(error)
    })?;
    let body = serde_json::json!({"token": token}).to_string();
    Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
}

/// Reads a token request. JSON null counts as absent; `signed` is accepted and ignored, since every token is signed.
fn read(wanted: &Members<'_>, tenant: &Tenant) -> Result<(ConsumerClaims, u64), Invalid> {
    const KNOWN: [&str; 7] =
        ["subscriber", "subscription", "expiresInMinutes", "shared", "nonPersistent", "signed", "type"];
    if let Some(unknown) = wanted.iter().find(|member| !KNOWN.contains(&&*member.name)) {
        return Err(Invalid::new(&unknown.name, "is not a known member of a token request"));
    }
    let name = |field: &str| {
        let missing = || Invalid::new("", format!("Following mandatory fields should be included: {field}"));
        let name = json::string(wanted.get(field).ok_or_else(missing)?, field)?;
        check_name(field, &name).map(|()| name.into_owned())
    };
    let flag = |field: &str| wanted.get(field).map_or(Ok(false), |raw| json::boolean(raw, field));
    let claims = ConsumerClaims {
        tenant: tenant.clone(),
        subscription: name("subscription")?,
        subscriber: name("subscriber")?,
        shared: flag("shared")?,
        non_persistent: flag("nonPersistent")?,
    };
    let minutes = match wanted.get("expiresInMinutes") {
        None => DEFAULT_MINUTES,
        Some(raw) => raw
            .parse()
            .ok()
            .filter(|minutes| *minutes > 0)
            .ok_or_else(|| Invalid::new("expiresInMinutes", "must be a whole number of minutes, at least 1"))?,
    };
    if wanted.get("type").is_some_and(|kind| kind != "\"notification\"") {
        return Err(Invalid::new("type", "must be 'notification'"));
    }
    Ok((claims, minutes))
}

/// GET of `/notification2/token?token=…`: the claims of a token that is valid, as the Java client asks for them.
pub(super) async fn get(State(app): AppState, caller: Caller, uri: Uri) -> Result<Response, ApiError> {
    caller.require(Role::Notification2Admin)?;
    let query = query(&uri);
    let token = parameter(&query, "token").ok_or_else(|| ApiError::unprocessable("token: is missing"))?;
    let claims = app.tokens.describe(token, app.clock.now_ms())?;
    Ok(([(CONTENT_TYPE, "application/json")], claims).into_response())
}

/// POST of `/notification2/unsubscribe?token=…`. The token is the credential, even an expired one.
pub(super) async fn unsubscribe(State(app): AppState, uri: Uri) -> Result<Response, ApiError> {
    let claims = match verify(&app, &uri) {
        Ok(claims) => claims,
        Err(Unverified::Token(TokenError::Expired { claims, .. })) => claims,
        Err(error) => return Err(error.refuse(&app)),
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

impl Unverified {
    /// The refusal, which is counted.
    pub(super) fn refuse(self, app: &App) -> ApiError {
        let (reason, error) = match self {
            Self::Missing => (AuthError::Missing.reason(), AuthError::Missing.into()),
            Self::Token(error @ TokenError::Expired { .. }) => ("token_expired", error.into()),
            Self::Token(error) => ("token", error.into()),
        };
        app.refused_logins.count(reason);
        error
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
    let ConsumerClaims { tenant, subscription, non_persistent, .. } = claims;
    Arc::new(TopicKey { tenant: tenant.clone(), name: subscription.as_str().into(), non_persistent: *non_persistent })
}
