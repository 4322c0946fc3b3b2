//! `/service/messaging-management`: the platform's view of topics and their subscribers (Cumulocity, "Messaging management").
//!
//! Of its namespaces there is the one of Notifications 2.0. A subscriber is what Notifications 2.0 calls a consumer.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use hyper::{StatusCode, Uri};
use serde_json::{Value, json};

use super::topics::{default_of, existing, key, of_tenant, part, plain, readable, rounded, subscriptions};
use super::{ApiError, App, AppState, Caller, Names, parameter, query};
use crate::auth::{AuthError, Role};
use crate::backlog::{ConsumerFigures, TopicFigures, TopicKey};
use crate::message::Tenant;
use crate::platform::page::PageRequest;
use crate::time;

/// Notifications 2.0.
const NAMESPACE: &str = "relnotif";

/// GET of the namespaces.
pub(super) async fn namespaces(
    State(app): AppState,
    caller: Caller,
    Names(tenant): Names<String>,
) -> Result<Response, ApiError> {
    readable(&app, &caller, Some(&tenant)).await?;
    Ok(plain(&json!({"namespaces": [{"name": NAMESPACE}]})))
}

/// GET of what there is in a namespace. Each topic with subscriptions has one publisher, the gateway.
pub(super) async fn namespace(
    State(app): AppState,
    caller: Caller,
    Names((tenant, namespace)): Names<(String, String)>,
) -> Result<Response, ApiError> {
    let tenant = readable_in(&app, &caller, &tenant, &namespace).await?;
    let topics = of_tenant(&app, &tenant, "");
    let subscribers: usize = topics.keys().filter_map(|key| app.topics.get(key)).map(|topic| topic.consumers()).sum();
    Ok(plain(&json!({
        "topics": {"count": topics.len(), "limit": app.config.limits.topics_per_tenant},
        "publishers": {"count": topics.values().filter(|subscriptions| **subscriptions > 0).count()},
        "subscribers": {"count": subscribers},
    })))
}

/// GET of what holds for topics that have no settings of their own.
pub(super) async fn policies(
    State(app): AppState,
    caller: Caller,
    Names((tenant, namespace)): Names<(String, String)>,
) -> Result<Response, ApiError> {
    let tenant = readable_in(&app, &caller, &tenant, &namespace).await?;
    let policy = app.topics.policy(&default_of(&tenant));
    Ok(plain(&json!({"backlogQuota": {"limit": policy.quota_bytes}, "messageTTL": policy.ttl_seconds})))
}

/// GET of a page of topics whose name holds `name`.
pub(super) async fn topics(
    State(app): AppState,
    caller: Caller,
    Names((tenant, namespace)): Names<(String, String)>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let tenant = readable_in(&app, &caller, &tenant, &namespace).await?;
    let query = query(&uri);
    let page = PageRequest::parse(&query)?;
    let topics = of_tenant(&app, &tenant, parameter(&query, "name").unwrap_or_default());
    let shown: Vec<_> = part(topics.keys(), page).map(|key| topic(&app, key)).collect();
    Ok(plain(&json!({"topics": shown, "pageStatistics": statistics(page, topics.len())})))
}

/// GET of one topic.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Names((tenant, namespace, name, persistence)): Names<(String, String, String, String)>,
) -> Result<Response, ApiError> {
    let tenant = readable_in(&app, &caller, &tenant, &namespace).await?;
    let key = known(&app, &tenant, &persistence, &name)?;
    Ok(plain(&topic(&app, &key)))
}

/// GET of a page of a topic's subscribers whose name holds `name`.
pub(super) async fn subscribers(
    State(app): AppState,
    caller: Caller,
    Names((tenant, namespace, topic, persistence)): Names<(String, String, String, String)>,
    uri: Uri,
) -> Result<Response, ApiError> {
    let tenant = readable_in(&app, &caller, &tenant, &namespace).await?;
    let key = known(&app, &tenant, &persistence, &topic)?;
    let query = query(&uri);
    let page = PageRequest::parse(&query)?;
    let name = parameter(&query, "name").unwrap_or_default();
    let mut consumers = Vec::new();
    if let Some(figures) = app.topics.topic_figures(&key) {
        let quota = figures.policy.quota_bytes;
        consumers.extend(figures.consumers.into_iter().filter(|one| one.name.contains(name)).map(|one| (one, quota)));
    }
    let shown: Vec<_> = part(&consumers, page).map(|(consumer, quota)| subscriber(consumer, *quota)).collect();
    Ok(plain(&json!({"subscribers": shown, "pageStatistics": statistics(page, consumers.len())})))
}

/// DELETE of a subscriber: what a POST of `/notification2/unsubscribe` does, without a token. Whoever may make the token may do
/// it, and whoever manages the tenants.
pub(super) async fn unsubscribe(
    State(app): AppState,
    caller: Caller,
    Names((tenant, namespace, topic, persistence, name)): Names<(String, String, String, String, String)>,
) -> Result<Response, ApiError> {
    let principal = &caller.principal;
    if !principal.allows(Role::TenantManagementAdmin) {
        principal.require(Role::Notification2Admin)?;
        if principal.tenant.as_str() != tenant {
            return Err(AuthError::NotAllowed(Role::TenantManagementAdmin).into());
        }
    }
    let tenant = existing(&app, &caller, Some(&tenant)).await?;
    check_namespace(&namespace)?;
    let key = key(&tenant, &persistence, &topic)?;
    if app.writer.unsubscribe(key, &name).await? {
        Ok(StatusCode::NO_CONTENT.into_response())
    } else {
        Err(ApiError::not_found(
            "reliable-notification",
            format!("There is no subscriber '{name}' on topic '{topic}'."),
        ))
    }
}

async fn readable_in(app: &App, caller: &Caller, tenant: &str, namespace: &str) -> Result<Tenant, ApiError> {
    let tenant = readable(app, caller, Some(tenant)).await?;
    check_namespace(namespace).map(|()| tenant)
}

fn check_namespace(namespace: &str) -> Result<(), ApiError> {
    if namespace == NAMESPACE {
        return Ok(());
    }
    Err(ApiError::not_found("reliable-notification", format!("The only namespace is '{NAMESPACE}'.")))
}

/// The topic of a path, which has subscriptions or consumers.
fn known(app: &App, tenant: &Tenant, persistence: &str, name: &str) -> Result<Arc<TopicKey>, ApiError> {
    let key = key(tenant, persistence, name)?;
    if app.topics.wants(&key) || !subscriptions(app, &key).is_empty() {
        return Ok(key);
    }
    Err(ApiError::not_found("reliable-notification", format!("There is no {persistence} topic '{name}'.")))
}

fn topic(app: &App, key: &Arc<TopicKey>) -> Value {
    let figures = app.topics.topic_figures(key);
    let figure = |of: fn(&TopicFigures) -> f64| figures.as_ref().map_or(0.0, of);
    let number = |of: fn(&TopicFigures) -> u64| figures.as_ref().map_or(0, of);
    json!({
        "name": key.name,
        "msgRateIn": rounded(figure(|topic| topic.rate_in)),
        "msgRateOut": rounded(figure(|topic| topic.rate_out)),
        "subscribers": number(|topic| topic.consumers.len() as u64),
        "activeSubscribers": number(|topic| topic.consumers.iter().filter(|one| one.clients > 0).count() as u64),
        "backlogSize": number(|topic| topic.bytes),
        "backlogUsagePercentage": figure(|topic| percentage(topic.bytes, topic.policy.quota_bytes)),
        "unackMsgBacklog": number(|topic| topic.consumers.iter().map(|one| one.backlog_messages).sum()),
    })
}

fn subscriber(consumer: &ConsumerFigures, quota_bytes: u64) -> Value {
    let mut shown = json!({
        "name": consumer.name,
        "activeClients": consumer.clients,
        "messageAckRate": rounded(consumer.ack_rate),
        "unackMsgBacklog": consumer.backlog_messages,
        "backlogUsagePercentage": percentage(consumer.backlog_bytes, quota_bytes),
    });
    if let Some(ms) = consumer.last_ack_ms {
        shown["lastAcknowledgeTimestamp"] = time::text(ms).into();
    }
    shown
}

#[expect(clippy::cast_precision_loss, reason = "to two digits")]
fn percentage(bytes: u64, quota_bytes: u64) -> f64 {
    rounded(bytes as f64 * 100.0 / quota_bytes as f64)
}

fn statistics(page: PageRequest, total: usize) -> Value {
    json!({
        "currentPage": page.current,
        "pageSize": page.size,
        "totalPages": total.div_ceil(page.size as usize),
        "totalElements": total,
    })
}
