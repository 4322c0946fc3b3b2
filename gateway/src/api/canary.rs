//! `/tidegate/v1/subscriptions/{id}/canary`: another version of one of a subscription's plugins, for a share of the sources first.
//!
//! A version is rolled between messages: each finds one route in the index, and goes its way to the end.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use serde::Serialize;
use tokio::time::sleep;

use super::subscriptions::{Making, ROLE, Stage, missing, still_there, stored};
use super::{ApiError, App, AppState, Caller, Names, json_limits, read_body};
use crate::faults;
use crate::json::Invalid;
use crate::message::Tenant;
use crate::platform::parse_id;
use crate::store::{Statement, Value};
use crate::subscription::{
    Canary, CanaryLimits, CanaryRequest, Figures, Place, PluginSettings, PluginUse, RolledBack, Route, Side,
};
use crate::telemetry::canaries_rolled_back;
use crate::time;
use crate::writer::Change;

/// Pause between two looks at the canaries.
const PERIOD: Duration = Duration::from_secs(1);

/// GET: the canary, and how it compares; or what became of the last one.
pub(super) async fn get(State(app): AppState, caller: Caller, Names(id): Names<String>) -> Result<Response, ApiError> {
    let route = find(&app, &caller, &id)?;
    let Route { subscription, canary, .. } = &*route;
    if canary.is_none() && subscription.rolled_back.is_none() {
        return Err(no_canary());
    }
    Ok(rendered(&app, &caller, &route, None))
}

/// PUT: in the place of any other.
pub(super) async fn update(
    State(app): AppState,
    caller: Caller,
    Names(id): Names<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(ROLE)?.tenant;
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let before = find(&app, &caller, &id)?;
    let request = CanaryRequest::parse(&body, &json_limits(&app.config))?;
    let mut canary = request.of(&before.subscription, app.clock.now_ms())?;
    // Others need not wait until the plugin is loaded.
    let making = Making { registry: &app.registry, tenant, stage: Stage::Asked };
    let instance = making.canary(before.subscription.id, &mut canary).await?;
    if before.subscription.at(canary.place) == Some(&canary.named) {
        let text = format!("is what the subscription has at {}", canary.place);
        return Err(Invalid::new("version", text).into());
    }
    let _subscribing = app.subscribing.lock().await;
    if !Arc::ptr_eq(&find(&app, &caller, &id)?, &before) {
        let text = "The subscription was changed meanwhile.";
        return Err(ApiError::new(StatusCode::CONFLICT, "reliable-notification/Conflict", text));
    }
    still_there(&app.registry, tenant, [&canary.named]).await?;
    let route = put_in_force(&app, tenant, before.with(canary, instance)).await?;
    Ok(rendered(&app, &caller, &route, before.subscription.canary.as_ref()))
}

/// DELETE: all sources go back to the version that they had.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Names(id): Names<String>,
) -> Result<Response, ApiError> {
    let _subscribing = app.subscribing.lock().await;
    let route = find(&app, &caller, &id)?;
    if route.canary.is_none() {
        return Err(no_canary());
    }
    put_in_force(&app, &caller.principal.tenant, route.without_canary(None)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// POST: the canary becomes the subscription's version. What the old one has held is judged anew.
pub(super) async fn promote(
    State(app): AppState,
    caller: Caller,
    Names(id): Names<String>,
) -> Result<Response, ApiError> {
    let tenant = &caller.principal.tenant;
    let _subscribing = app.subscribing.lock().await;
    let route = find(&app, &caller, &id)?.promoted().ok_or_else(no_canary)?;
    let route = put_in_force(&app, tenant, route).await?;
    let (pipeline, tenant, id) = (app.pipeline.clone(), tenant.clone(), route.subscription.id);
    tokio::spawn(async move { pipeline.release(&tenant, [id]).await });
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Takes canaries back that fail too often, until the gateway stops.
pub(crate) async fn watch(app: Arc<App>) {
    let limits = CanaryLimits {
        messages: app.config.plugins.canary_messages,
        fault_percent: app.config.plugins.canary_fault_percent,
    };
    let stopping = app.stopping.clone();
    while stopping.run_until_cancelled(sleep(PERIOD)).await.is_some() {
        for route in app.index.with_canaries() {
            if let Some(canary) = &route.canary
                && let Some(reason) = canary.figures().failure(limits)
            {
                roll_back(&app, &route, reason).await;
            }
        }
    }
}

async fn roll_back(app: &App, failing: &Arc<Route>, reason: String) {
    let tenant = &failing.topic.tenant;
    let Route { subscription, .. } = &**failing;
    let Some(Canary { named: PluginUse { plugin, version, .. }, .. }) = &subscription.canary else { return };
    let _subscribing = app.subscribing.lock().await;
    if !app.index.get(tenant, subscription.id).is_some_and(|route| Arc::ptr_eq(&route, failing)) {
        return;
    }
    let rolled_back =
        RolledBack { plugin: plugin.clone(), version: *version, at_ms: app.clock.now_ms(), reason: reason.clone() };
    match put_in_force(app, tenant, failing.without_canary(Some(rolled_back))).await {
        Ok(_) => {
            canaries_rolled_back().increment(1);
            tracing::error!(%tenant, subscription = subscription.id, plugin, version, reason, "canary taken back");
        }
        Err(error) => tracing::warn!(%error, "the canary stays until it can be written down"),
    }
}

/// The caller's subscription; `ROLE` is required.
fn find(app: &App, caller: &Caller, id: &str) -> Result<Arc<Route>, ApiError> {
    let tenant = &caller.require(ROLE)?.tenant;
    parse_id(id).and_then(|id| app.index.get(tenant, id)).ok_or_else(missing)
}

fn no_canary() -> ApiError {
    ApiError::not_found("reliable-notification", "The subscription has no canary.")
}

/// Writes the subscription down as it is from now on. It has to be done while subscriptions are locked.
async fn put_in_force(app: &App, tenant: &Tenant, route: Route) -> Result<Arc<Route>, ApiError> {
    let route = Arc::new(route);
    let statement = Statement {
        sql: "UPDATE subscription SET body = ? WHERE id = ? AND tenant = ?",
        values: vec![
            stored(&route.subscription),
            Value::Int(route.subscription.id.cast_signed()),
            Value::Text(tenant.to_string()),
        ],
    };
    faults::point("canary-changing");
    app.writer.commit(Change { statements: vec![statement], ..Change::default() }).await?;
    faults::point("canary-changed");
    // It may have gone with its source.
    if app.index.replace(route.clone()) { Ok(route) } else { Err(missing()) }
}

fn rendered(app: &App, caller: &Caller, route: &Route, replaced: Option<&Canary>) -> Response {
    let Route { subscription, canary: rival, .. } = route;
    let replaced = replaced.map(|canary| &canary.named);
    let canary = subscription.canary.as_ref().map(|canary| {
        let Canary { place, named: PluginUse { plugin, version, settings }, share, since_ms } = canary;
        let (version, share, place, since) = (*version, *share, *place, time::text(*since_ms));
        let current = subscription.at(place);
        RenderedCanary { plugin, version, settings, share, place, since, current, replaced }
    });
    let comparison = rival.as_ref().map(|rival| {
        let ago = i64::try_from(rival.since().elapsed().as_millis()).unwrap_or(i64::MAX);
        Comparison::new(rival.figures(), time::text(app.clock.now_ms() - ago))
    });
    let rolled_back = subscription.rolled_back.as_ref().map(|rolled_back| {
        let RolledBack { plugin, version, at_ms, reason } = rolled_back;
        RenderedRolledBack { plugin, version: *version, at: time::text(*at_ms), reason }
    });
    let link = format!("{}/tidegate/v1/subscriptions/{}/canary", caller.base_url, subscription.id);
    let body = Rendered { link, canary, comparison, rolled_back };
    let body = serde_json::to_string(&body).expect("invariant: texts and numbers serialize");
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Rendered<'a> {
    #[serde(rename = "self")]
    link: String,
    #[serde(flatten)]
    canary: Option<RenderedCanary<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    comparison: Option<Comparison>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rolled_back: Option<RenderedRolledBack<'a>>,
}

#[derive(Serialize)]
struct RenderedCanary<'a> {
    plugin: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    settings: &'a PluginSettings,
    share: f64,
    place: Place,
    since: String,
    /// What it may take the place of.
    current: Option<&'a PluginUse>,
    /// The canary that was there before.
    #[serde(skip_serializing_if = "Option::is_none")]
    replaced: Option<&'a PluginUse>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Comparison {
    since: String,
    messages: u64,
    equal: u64,
    passes_more: u64,
    drops_more: u64,
    bodies_differ: u64,
    current: RenderedSide,
    canary: RenderedSide,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_fault: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct RenderedSide {
    faults: u64,
    processor_microseconds: u64,
}

impl From<Side> for RenderedSide {
    fn from(Side { faults, processor_time }: Side) -> Self {
        Self { faults, processor_microseconds: u64::try_from(processor_time.as_micros()).unwrap_or(u64::MAX) }
    }
}

#[derive(Serialize)]
struct RenderedRolledBack<'a> {
    plugin: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    at: String,
    reason: &'a str,
}

impl Comparison {
    fn new(figures: Figures, since: String) -> Self {
        let Figures { messages, equal, passes_more, drops_more, bodies_differ, .. } = figures;
        Self {
            since,
            messages,
            equal,
            passes_more,
            drops_more,
            bodies_differ,
            current: figures.current.into(),
            canary: figures.canary.into(),
            last_fault: figures.last_fault.map(|fault| fault.to_string()),
        }
    }
}
