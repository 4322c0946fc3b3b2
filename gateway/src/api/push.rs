//! `/tidegate/v1/consumers`: consumers whose messages are pushed over HTTP.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};

use super::topics::{created, part};
use super::{ApiError, App, AppState, Caller, Names, found, json_limits, listed, query, read_body};
use crate::auth::{AuthError, Role};
use crate::backlog::TopicKey;
use crate::deliver::endpoint::Target;
use crate::json::{self, Invalid, Limits, Members};
use crate::message::Tenant;
use crate::platform::page::PageRequest;
use crate::platform::parse_id;
use crate::push::Push;
use crate::subscription::check_name;
use crate::time;

const ROLE: Role = Role::Notification2Admin;
const PATH: &str = "/tidegate/v1/consumers";

/// POST of `{"subscription", "subscriber", "nonPersistent", "push": {"uri", "headers"}}`. The consumer exists from now on, and is
/// owed what comes, or what waits already for one of that name.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let tenant = &caller.require(ROLE)?.tenant;
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let Wanted { topic, consumer, target } = Wanted::parse(&body, tenant, &json_limits(&app.config))?;
    let _subscribing = app.subscribing.lock().await;
    // The tenant may have been removed since the caller was let in.
    if !app.auth.knows(tenant) {
        return Err(AuthError::BadCredentials.into());
    }
    let id = app.ids.take(1, &app.writer).await?;
    let push = app.pushes.create(id, topic, consumer, target).await?;
    Ok(created(&render(&caller, &push)))
}

/// GET of a page.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(ROLE)?.tenant;
    let query = query(&uri);
    let page = PageRequest::parse(&query)?;
    let pushes = app.pushes.list(tenant);
    let shown = part(&pushes, page).map(|push| render(&caller, push)).collect();
    let url = format!("{}{PATH}", caller.base_url);
    let body = listed(&url, &query, "consumers", page, shown, pushes.len() as u64);
    Ok(found(&headers, "consumercollection", body))
}

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Names(id): Names<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let push = find(&app, &caller, &id)?;
    Ok(found(&headers, "consumer", render(&caller, &push).to_string().into_bytes()))
}

/// DELETE: unsubscribes the consumer; what waits for it goes, and a request on its way is given up.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Names(id): Names<String>,
) -> Result<Response, ApiError> {
    let push = find(&app, &caller, &id)?;
    app.writer.unsubscribe(push.topic.clone(), &push.consumer).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn find(app: &App, caller: &Caller, id: &str) -> Result<Arc<Push>, ApiError> {
    let tenant = &caller.require(ROLE)?.tenant;
    let push = parse_id(id).and_then(|id| app.pushes.get(tenant, id));
    push.ok_or_else(|| ApiError::not_found("reliable-notification", "There is no such push consumer."))
}

/// What a request for a push consumer asks for.
struct Wanted {
    topic: Arc<TopicKey>,
    consumer: Box<str>,
    target: Target,
}

impl Wanted {
    fn parse(body: &[u8], tenant: &Tenant, limits: &Limits) -> Result<Self, Invalid> {
        let members = Members::parse(body, limits)?;
        const KNOWN: [&str; 4] = ["subscription", "subscriber", "nonPersistent", "push"];
        if let Some(unknown) = members.iter().find(|member| !KNOWN.contains(&&*member.name)) {
            return Err(Invalid::new(&unknown.name, "is not a known member of a push consumer"));
        }
        let mandatory = |field: &str| {
            let missing = || Invalid::new("", format!("Following mandatory fields should be included: {field}"));
            members.get(field).ok_or_else(missing)
        };
        let name = |field: &str| -> Result<Box<str>, Invalid> {
            let name = json::string(mandatory(field)?, field)?;
            check_name(field, &name).map(|()| name.into())
        };
        let non_persistent =
            members.get("nonPersistent").map_or(Ok(false), |raw| json::boolean(raw, "nonPersistent"))?;
        Ok(Self {
            topic: Arc::new(TopicKey { tenant: tenant.clone(), name: name("subscription")?, non_persistent }),
            consumer: name("subscriber")?,
            target: Target::parse(mandatory("push")?, limits).map_err(|error| error.within("push"))?,
        })
    }
}

/// Values of headers are secrets: that there is one is all that is shown.
fn render(caller: &Caller, push: &Push) -> Value {
    let headers: serde_json::Map<_, _> =
        push.target.headers.keys().map(|name| (name.to_string(), "***".into())).collect();
    let trouble = push.status.trouble();
    let mut body = json!({
        "id": push.id.to_string(),
        "self": format!("{}{PATH}/{}", caller.base_url, push.id),
        "subscription": push.topic.name,
        "subscriber": push.consumer,
        "nonPersistent": push.topic.non_persistent,
        "creationTime": time::text(push.created_ms),
        "push": {"uri": push.target.uri.to_string(), "headers": headers},
        "attempts": trouble.attempts,
    });
    if let Some(since_ms) = trouble.since_ms {
        body["failingSince"] = time::text(since_ms).into();
        body["lastError"] = trouble.last_error.into();
    }
    body
}
