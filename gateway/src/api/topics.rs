//! `/tidegate/v1/topics` and `/tidegate/v1/tenants/{tenant}/backlog`: how topics fare, and what is set for them.
//!
//! What may be set for a topic does not depend on whether it exists: quotas can be there before the first consumer.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use hyper::header::{CONTENT_TYPE, LOCATION};
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};

use super::tenants::tenants;
use super::{
    ApiError, App, AppState, Caller, Names, found, json_limits, listed, parameter, path_segment, query, read_body,
};
use crate::auth::{AuthError, Role};
use crate::backlog::{ConsumerFigures, HeldFigures, OnFull, Policy, Settings, TopicFigures, TopicKey};
use crate::config;
use crate::json::{self, Invalid, Member, Members};
use crate::message::Tenant;
use crate::platform::list::only_known;
use crate::platform::page::PageRequest;
use crate::subscription::{Route, check_name};
use crate::time;

const PATH: &str = "/tidegate/v1/topics";

/// GET of a page of the topics that have subscriptions, consumers or settings, by name.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let query = query(&uri);
    let tenant = readable(&app, &caller, parameter(&query, "tenant")).await?;
    let page = PageRequest::parse(&query)?;
    let mut topics = of_tenant(&app, &tenant, parameter(&query, "name").unwrap_or_default());
    for key in app.topics.with_settings(&tenant) {
        topics.entry(key).or_default();
    }
    let shown = part(&topics, page).map(|(key, subscriptions)| render(&app, &caller, key, *subscriptions)).collect();
    let url = format!("{}{PATH}", caller.base_url);
    Ok(found(&headers, "topiccollection", listed(&url, &query, "topics", page, shown, topics.len() as u64)))
}

/// GET of one, with its consumers.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Names(names): Names<(String, String)>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let query = query(&uri);
    let tenant = readable(&app, &caller, parameter(&query, "tenant")).await?;
    let key = key(&tenant, &names.0, &names.1)?;
    Ok(plain(&rendered(&app, &caller, &key)))
}

/// PUT of settings: those that are left out stay, null takes one back.
pub(super) async fn update(
    State(app): AppState,
    caller: Caller,
    Names(names): Names<(String, String)>,
    request: Request,
) -> Result<Response, ApiError> {
    let (Parts { headers, uri, .. }, body) = request.into_parts();
    let query = query(&uri);
    only_known(&query, &["tenant"])?;
    let tenant = changeable(&app, &caller, parameter(&query, "tenant")).await?;
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let key = key(&tenant, &names.0, &names.1)?;
    check_name("name", &key.name)?;
    let members = Members::parse(&body, &json_limits(&app.config))?;
    if key.non_persistent
        && let Some(set) = members.iter().find(|member| !json::is_null(member.raw))
    {
        return Err(Invalid::new(&set.name, "is only for persistent topics").into());
    }
    let _held = app.accounts.lock(tenant.clone()).await;
    let settings = changed(app.topics.topic_settings(&key), &members)?;
    let others = app.topics.with_settings(&tenant).into_iter().filter(|other| *other != key).count();
    let limit = app.config.limits.topics_per_tenant;
    if settings != Settings::default() && others >= limit {
        let message = format!("A tenant may have settings for at most {limit} topics (limits.topics_per_tenant).");
        return Err(ApiError::unprocessable(message));
    }
    app.writer.set_topic(key.clone(), settings).await?;
    Ok(plain(&rendered(&app, &caller, &key)))
}

/// DELETE: takes the settings back. The topic itself goes with its last consumer.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Names(names): Names<(String, String)>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let query = query(&uri);
    only_known(&query, &["tenant"])?;
    let tenant = changeable(&app, &caller, parameter(&query, "tenant")).await?;
    let key = key(&tenant, &names.0, &names.1)?;
    let _held = app.accounts.lock(tenant).await;
    app.writer.set_topic(key, Settings::default()).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// GET of what is set for the topics of a tenant that have no settings of their own.
pub(super) async fn get_defaults(
    State(app): AppState,
    caller: Caller,
    Names(tenant): Names<String>,
) -> Result<Response, ApiError> {
    let tenant = readable(&app, &caller, Some(&tenant)).await?;
    Ok(plain(&rendered_defaults(&app, &caller, &tenant)))
}

/// PUT of settings, as of a topic.
pub(super) async fn update_defaults(
    State(app): AppState,
    caller: Caller,
    Names(tenant): Names<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let (Parts { headers, .. }, body) = request.into_parts();
    let tenant = changeable(&app, &caller, Some(&tenant)).await?;
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let members = Members::parse(&body, &json_limits(&app.config))?;
    let _held = app.accounts.lock(tenant.clone()).await;
    let settings = changed(app.topics.tenant_settings(&tenant), &members)?;
    app.writer.set_tenant(tenant.clone(), settings).await?;
    Ok(plain(&rendered_defaults(&app, &caller, &tenant)))
}

/// DELETE: takes the settings back.
pub(super) async fn delete_defaults(
    State(app): AppState,
    caller: Caller,
    Names(tenant): Names<String>,
) -> Result<Response, ApiError> {
    let tenant = changeable(&app, &caller, Some(&tenant)).await?;
    let _held = app.accounts.lock(tenant.clone()).await;
    app.writer.set_tenant(tenant, Settings::default()).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// The tenant whose topics a caller asks about: their own, or any for an operator.
pub(super) async fn readable(app: &App, caller: &Caller, wanted: Option<&str>) -> Result<Tenant, ApiError> {
    let principal = &caller.principal;
    if !principal.allows(Role::TidegateOperator) {
        principal.require(Role::TenantStatisticsRead)?;
        if wanted.is_some_and(|wanted| wanted != principal.tenant.as_str()) {
            return Err(AuthError::NotAllowed(Role::TidegateOperator).into());
        }
    }
    existing(app, caller, wanted).await
}

/// The tenant whose topics a caller changes.
async fn changeable(app: &App, caller: &Caller, wanted: Option<&str>) -> Result<Tenant, ApiError> {
    caller.require(Role::TidegateOperator)?;
    existing(app, caller, wanted).await
}

/// The tenant that is meant. Of a removed one the topics may still be there.
pub(super) async fn existing(app: &App, caller: &Caller, wanted: Option<&str>) -> Result<Tenant, ApiError> {
    let own = &caller.principal.tenant;
    match wanted.map(Tenant::from).filter(|wanted| wanted != own) {
        None => Ok(own.clone()),
        Some(other) if tenants(app).was_there(&other).await? => Ok(other),
        Some(_) => Err(ApiError::not_found("tenant", "There is no such tenant.")),
    }
}

/// The topics of a tenant that have subscriptions or consumers and whose name holds `name`, each with its number of
/// subscriptions, by name.
pub(super) fn of_tenant(app: &App, tenant: &Tenant, name: &str) -> BTreeMap<Arc<TopicKey>, usize> {
    let mut topics = BTreeMap::new();
    for route in app.index.list(tenant, |_| true) {
        *topics.entry(route.topic.clone()).or_default() += 1;
    }
    for key in app.topics.keys(tenant) {
        topics.entry(key).or_default();
    }
    topics.retain(|key, _| key.name.contains(name));
    topics
}

/// A page of a list that is all there.
pub(super) fn part<T>(all: impl IntoIterator<Item = T>, page: PageRequest) -> impl Iterator<Item = T> {
    all.into_iter().skip(usize::try_from(page.offset()).unwrap_or(usize::MAX)).take(page.size as usize)
}

/// The topic of these two segments of a path.
pub(super) fn key(tenant: &Tenant, persistence: &str, name: &str) -> Result<Arc<TopicKey>, ApiError> {
    let non_persistent = match persistence {
        "persistent" => false,
        "non-persistent" => true,
        _ => return Err(ApiError::not_found("reliable-notification", "A topic is 'persistent' or 'non-persistent'.")),
    };
    Ok(Arc::new(TopicKey { tenant: tenant.clone(), name: name.into(), non_persistent }))
}

/// The settings after a PUT.
fn changed(mut settings: Settings, members: &Members<'_>) -> Result<Settings, Invalid> {
    for Member { name, raw } in members.iter() {
        match &**name {
            "quotaBytes" => settings.quota_bytes = whole(name, raw, "backlog.quota_bytes")?,
            "ttlSeconds" => settings.ttl_seconds = whole(name, raw, "backlog.ttl_seconds")?,
            "onFull" => settings.on_full = given(raw).map(|raw| on_full(name, raw)).transpose()?,
            "gapMessages" => settings.gap_messages = given(raw).map(|raw| json::boolean(raw, name)).transpose()?,
            _ => return Err(Invalid::new(name, "is not a setting of a topic")),
        }
    }
    Ok(settings)
}

fn given(raw: &str) -> Option<&str> {
    Some(raw).filter(|raw| !json::is_null(raw))
}

/// A whole number in the range of the configuration's key.
fn whole(name: &str, raw: &str, key: &str) -> Result<Option<u64>, Invalid> {
    let range = config::range(key);
    let refusal = || Invalid::new(name, format!("must be a whole number from {} to {}", range.start(), range.end()));
    given(raw).map(|raw| raw.parse().ok().filter(|number| range.contains(number)).ok_or_else(refusal)).transpose()
}

fn on_full(name: &str, raw: &str) -> Result<OnFull, Invalid> {
    json::string(raw, name)?.parse().map_err(|_| Invalid::new(name, "must be reject, evict-oldest or park"))
}

/// An answer of APIs that have no vendor types.
pub(super) fn plain(body: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// The 201 of such an API, for something that says itself where it is.
pub(super) fn created(body: &Value) -> Response {
    let location = body["self"].as_str().unwrap_or_default().to_owned();
    (StatusCode::CREATED, [(LOCATION, location)], plain(body)).into_response()
}

fn rendered_defaults(app: &App, caller: &Caller, tenant: &Tenant) -> Value {
    let settings = app.topics.tenant_settings(tenant);
    let policy = app.topics.policy(&default_of(tenant));
    let url = format!("{}/tidegate/v1/tenants/{tenant}/backlog", caller.base_url);
    json!({"self": url, "settings": render_settings(settings), "policy": render_policy(policy)})
}

/// A topic for which nothing can be set, as the tenant's settings make it.
pub(super) fn default_of(tenant: &Tenant) -> TopicKey {
    TopicKey { tenant: tenant.clone(), name: "".into(), non_persistent: false }
}

/// The subscriptions that feed a topic.
pub(super) fn subscriptions(app: &App, key: &TopicKey) -> Vec<Arc<Route>> {
    app.index.list(&key.tenant, |one| *one.subscription == *key.name && one.non_persistent == key.non_persistent)
}

/// A topic with its consumers.
pub(super) fn rendered(app: &App, caller: &Caller, key: &Arc<TopicKey>) -> Value {
    let mut topic = render(app, caller, key, subscriptions(app, key).len());
    let (consumers, held) =
        app.topics.topic_figures(key).map(|figures| (figures.consumers, figures.held)).unwrap_or_default();
    let pushes = app.pushes.list(&key.tenant);
    let is_push = |name: &str| pushes.iter().any(|push| push.topic == *key && *push.consumer == *name);
    topic["held"] = held.iter().map(|(subscription, held)| render_held(*subscription, held)).collect();
    topic["consumers"] = consumers.iter().map(|consumer| render_consumer(consumer, is_push(&consumer.name))).collect();
    topic
}

fn render(app: &App, caller: &Caller, key: &Arc<TopicKey>, subscriptions: usize) -> Value {
    let persistence = if key.non_persistent { "non-persistent" } else { "persistent" };
    let mut url = format!("{}{PATH}/{persistence}/{}", caller.base_url, path_segment(&key.name));
    if key.tenant != caller.principal.tenant {
        url += &format!("?tenant={}", key.tenant);
    }
    let mut topic = json!({
        "self": url,
        "name": key.name,
        "persistence": persistence,
        "subscriptions": subscriptions,
        "settings": render_settings(app.topics.topic_settings(key)),
        "policy": render_policy(app.topics.policy(key)),
    });
    let figures = app.topics.topic_figures(key);
    topic["figures"] = figures.map_or_else(
        || json!({"messages": 0, "bytes": 0, "heldMessages": 0, "consumers": 0, "clients": 0}),
        |figures| render_figures(&figures),
    );
    topic
}

fn render_settings(settings: Settings) -> Value {
    let Settings { quota_bytes, ttl_seconds, on_full, gap_messages } = settings;
    let members = [
        ("quotaBytes", quota_bytes.map(Value::from)),
        ("ttlSeconds", ttl_seconds.map(Value::from)),
        ("onFull", on_full.map(|on_full| on_full.as_str().into())),
        ("gapMessages", gap_messages.map(Value::from)),
    ];
    let set = members.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Value::Object(set.collect())
}

fn render_policy(policy: Policy) -> Value {
    let Policy { quota_bytes, ttl_seconds, on_full, gap_messages } = policy;
    json!({
        "quotaBytes": quota_bytes,
        "ttlSeconds": ttl_seconds,
        "onFull": on_full.as_str(),
        "gapMessages": gap_messages,
    })
}

fn render_figures(figures: &TopicFigures) -> Value {
    let mut shown = json!({
        "messages": figures.messages,
        "bytes": figures.bytes,
        "heldMessages": figures.held.values().map(|held| held.messages).sum::<u64>(),
        "appended": figures.appended,
        "delivered": figures.delivered,
        "rateIn": rounded(figures.rate_in),
        "rateOut": rounded(figures.rate_out),
        "consumers": figures.consumers.len(),
        "clients": figures.consumers.iter().map(|consumer| consumer.clients).sum::<usize>(),
    });
    add_ages(&mut shown, figures.oldest_age_ms, figures.expires_in_ms);
    shown
}

/// What the plugins of a subscription failed on, and what waits behind it.
fn render_held(subscription: u64, held: &HeldFigures) -> Value {
    let mut shown = json!({"subscription": subscription.to_string(), "messages": held.messages, "bytes": held.bytes});
    add_ages(&mut shown, held.oldest_age_ms, None);
    shown
}

fn render_consumer(consumer: &ConsumerFigures, push: bool) -> Value {
    let mut shown = json!({
        "name": consumer.name,
        "clients": consumer.clients,
        "messages": consumer.backlog_messages,
        "bytes": consumer.backlog_bytes,
        "delivered": consumer.delivered,
        "redelivered": consumer.redelivered,
        "acknowledged": consumer.acknowledged,
        "ackRate": rounded(consumer.ack_rate),
        "parked": consumer.parked,
        "push": push,
    });
    if let Some(ms) = consumer.last_ack_ms {
        shown["lastAcknowledged"] = time::text(ms).into();
    }
    add_ages(&mut shown, consumer.oldest_age_ms, consumer.expires_in_ms);
    shown
}

/// Of the oldest message; absent where there is none.
fn add_ages(shown: &mut Value, age_ms: Option<u64>, expires_ms: Option<u64>) {
    for (name, ms) in [("oldestAgeSeconds", age_ms), ("expiresInSeconds", expires_ms)] {
        if let Some(ms) = ms {
            shown[name] = (ms / 1000).into();
        }
    }
}

/// A rate or a percentage, to two digits.
pub(super) fn rounded(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}
