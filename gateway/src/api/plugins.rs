//! `/tidegate/v1/plugins`: the plugins of a tenant, uploaded as components or scripts, and those that are built in.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};

use super::subscriptions::missing;
use super::topics::{created, part, plain};
use super::{ApiError, App, AppState, Caller, Names, found, listed, parameter, query, read_body};
use crate::auth::Role;
use crate::json::Invalid;
use crate::message::Tenant;
use crate::pipeline::Released;
use crate::platform::list::only_known;
use crate::platform::page::PageRequest;
use crate::platform::parse_id;
use crate::plugin::{Fault, Instance, LastFault, PluginId, Quarantined, Usage, World, built_ins};
use crate::registry::{Language, RegistryError, Upload, Uploaded, Version};
use crate::subscription::Route;
use crate::time;

const PATH: &str = "/tidegate/v1/plugins";
/// Subscriptions that a refusal names.
const NAMED: usize = 10;

/// POST of a component or a script, which becomes the next version of the plugin `name`, even if the one before has the same bytes.
/// `settings` are tried on it; `world` says what a script is for.
pub(super) async fn upload(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let principal = caller.require(Role::TidegatePluginAdmin)?;
    let (Parts { headers, uri, .. }, body) = request.into_parts();
    let language = language(&headers)?;
    let query = query(&uri);
    only_known(&query, &["name", "settings", "world"])?;
    let text = |name: &str| parameter(&query, name).map(str::to_owned);
    let name = text("name").ok_or_else(|| Invalid::new("name", "must name the plugin"))?;
    let world = match parameter(&query, "world") {
        None => None,
        Some(name) => Some(World::named(name).ok_or_else(|| Invalid::new("world", "must be 'filter' or 'transform'"))?),
    };
    let limit = usize::try_from(app.config.plugins.max_bytes).unwrap_or(usize::MAX);
    let body = read_body(&app, &headers, body, limit).await;
    let body = body.map_err(|error| error.with_limit("plugins.max_bytes"))?;
    let (settings, author) = (text("settings"), principal.user.to_string());
    let upload = Upload { name, language, world, settings, author, body };
    let Uploaded { version, refusal } = app.registry.upload(&principal.tenant, upload, app.clock.now_ms()).await?;
    let mut body = render_version(&app, &caller, &version);
    if let Some(text) = refusal {
        body["configure"] = String::from(text).into();
    }
    Ok(created(&body))
}

/// GET of a page, by name; each plugin with its versions.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = reader(&caller)?;
    let query = query(&uri);
    let page = PageRequest::parse(&query)?;
    let uploaded = app.registry.list(tenant).await?;
    let mut plugins: Vec<Value> =
        uploaded.iter().map(|(name, versions)| render(&app, &caller, name, versions)).collect();
    // A name that is built in today may have been anybody's when it was uploaded.
    plugins.extend(built_ins().filter(|(name, _)| !uploaded.contains_key(*name)).map(render_built_in(&app, &caller)));
    plugins.sort_by(|one, other| one["name"].as_str().cmp(&other["name"].as_str()));
    let total = plugins.len() as u64;
    let url = format!("{}{PATH}", caller.base_url);
    let body = listed(&url, &query, "plugins", page, part(plugins, page).collect(), total);
    Ok(found(&headers, "plugincollection", body))
}

/// GET of one, with its versions.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Names(name): Names<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = reader(&caller)?;
    let versions = app.registry.of_name(tenant, &name).await?;
    let body = if versions.is_empty() {
        built_ins().find(|(known, _)| *known == name).map(render_built_in(&app, &caller))
    } else {
        Some(render(&app, &caller, &name, &versions))
    };
    let body = body.ok_or(RegistryError::Missing { name, version: None })?;
    Ok(found(&headers, "plugin", body.to_string().into_bytes()))
}

/// GET of a version.
pub(super) async fn get_version(
    State(app): AppState,
    caller: Caller,
    Names(names): Names<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let version = find(&app, reader(&caller)?, names).await?;
    Ok(found(&headers, "pluginversion", render_version(&app, &caller, &version).to_string().into_bytes()))
}

/// GET of the component or script, as it was uploaded.
pub(super) async fn download(
    State(app): AppState,
    caller: Caller,
    Names(names): Names<(String, String)>,
) -> Result<Response, ApiError> {
    let tenant = reader(&caller)?;
    let version = find(&app, tenant, names).await?;
    let body = app.registry.body(tenant, &version).await?;
    Ok(([(CONTENT_TYPE, version.language.media_type())], body).into_response())
}

/// DELETE of a plugin with all its versions.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Names(name): Names<String>,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::TidegatePluginAdmin)?.tenant;
    let _subscribing = app.subscribing.lock().await;
    let versions = app.registry.of_name(tenant, &name).await?;
    if versions.is_empty() {
        return Err(RegistryError::Missing { name, version: None }.into());
    }
    remove(&app, tenant, &versions).await
}

/// DELETE of a version.
pub(super) async fn delete_version(
    State(app): AppState,
    caller: Caller,
    Names(names): Names<(String, String)>,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::TidegatePluginAdmin)?.tenant;
    let _subscribing = app.subscribing.lock().await;
    let version = find(&app, tenant, names).await?;
    remove(&app, tenant, &[version]).await
}

/// POST: the plugin is asked again, in all its versions, and judges what it has failed on.
pub(super) async fn release(
    State(app): AppState,
    caller: Caller,
    Names(name): Names<String>,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::TidegatePluginAdmin)?.tenant;
    let mut plugins: Vec<_> = app.registry.of_name(tenant, &name).await?.iter().map(|row| row.id(tenant)).collect();
    if plugins.is_empty() {
        plugins.extend(built_ins().filter(|(known, _)| *known == name).map(|(name, _)| PluginId::built_in(name)));
    }
    if plugins.is_empty() {
        return Err(RegistryError::Missing { name, version: None }.into());
    }
    Ok(let_out(&app, tenant, &plugins).await)
}

/// POST: the version is asked again, and judges what it has failed on.
pub(super) async fn release_version(
    State(app): AppState,
    caller: Caller,
    Names(names): Names<(String, String)>,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::TidegatePluginAdmin)?.tenant;
    let version = find(&app, tenant, names).await?;
    Ok(let_out(&app, tenant, &[version.id(tenant)]).await)
}

/// Lifts the quarantine of plugins in the tenant, and has their subscriptions judge anew what they hold.
async fn let_out(app: &App, tenant: &Tenant, plugins: &[PluginId]) -> Response {
    let lifted = plugins.iter().filter(|plugin| app.plugins.quarantine().lift(tenant, plugin)).count();
    let users = plugins.iter().flat_map(|plugin| app.index.users(tenant, plugin));
    let users: BTreeSet<u64> = users.map(|route| route.subscription.id).collect();
    let subscriptions = users.len();
    let Released { passed, dropped, held } = app.pipeline.release(tenant, users.clone()).await;
    let routes = users.into_iter().filter_map(|user| app.index.get(tenant, user));
    let holding = routes.filter(|route| app.topics.held(&route.topic, route.subscription.id).messages > 0);
    let reason = holding.filter_map(|route| last_fault(&route)).max_by_key(|(_, fault)| fault.time_ms);
    let mut body = json!({
        "lifted": lifted > 0,
        "subscriptions": subscriptions,
        "passed": passed,
        "dropped": dropped,
        "held": held,
    });
    if let Some((plugin, fault)) = reason {
        body["lastFault"] = named(&plugin, render_fault(&fault));
    }
    if let Some(why) = plugins.iter().find_map(|plugin| app.plugins.quarantine().is(tenant, plugin)) {
        body["quarantine"] = render_quarantine(&why);
    }
    plain(&body)
}

/// The latest fault of the plugins of a subscription on its messages.
fn last_fault(route: &Route) -> Option<(PluginId, LastFault)> {
    let instances = route.filters.iter().chain(&route.transforms);
    let faults =
        instances.filter_map(|instance| Some((instance.plugin().id().clone(), instance.own_usage().last_fault?)));
    faults.max_by_key(|(_, fault)| fault.time_ms)
}

/// GET of what the plugins of a subscription have made of its messages, in the order in which they are asked, and its canary.
pub(super) async fn usage_of_subscription(
    State(app): AppState,
    caller: Caller,
    Names(id): Names<String>,
) -> Result<Response, ApiError> {
    let tenant = reader(&caller)?;
    let route = parse_id(&id).and_then(|id| app.index.get(tenant, id)).ok_or_else(missing)?;
    let share = |instance: &Instance| {
        let mut share = named(instance.plugin().id(), render_usage(&instance.own_usage()));
        share["world"] = instance.plugin().world().name().into();
        share
    };
    let mut body = json!({
        "self": format!("{}/tidegate/v1/subscriptions/{id}/usage", caller.base_url),
        "heldMessages": app.topics.held(&route.topic, route.subscription.id).messages,
        "plugins": route.filters.iter().chain(&route.transforms).map(share).collect::<Vec<_>>(),
    });
    if let (Some(rival), Some(canary)) = (&route.canary, &route.subscription.canary) {
        body["canary"] = share(&rival.instance);
        body["canary"]["place"] = String::from(canary.place).into();
    }
    Ok(plain(&body))
}

/// The tenant of somebody who may see plugins: those who install them, and those who name them in subscriptions.
fn reader(caller: &Caller) -> Result<&Tenant, ApiError> {
    let principal = &caller.principal;
    if !principal.allows(Role::Notification2Admin) {
        principal.require(Role::TidegatePluginAdmin)?;
    }
    Ok(&principal.tenant)
}

fn language(headers: &HeaderMap) -> Result<Language, ApiError> {
    let media_type = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let media_type = std::str::from_utf8(media_type).unwrap_or_default().split(';').next().unwrap_or_default();
    Language::of_media_type(media_type.trim()).ok_or_else(|| {
        let text = "The Content-Type must be application/wasm, for a component, or text/javascript, for a script.";
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "general/unsupportedMediaType", text)
    })
}

async fn find(app: &App, tenant: &Tenant, (name, version): (String, String)) -> Result<Version, ApiError> {
    match app.registry.version(tenant, &name, version_number(&version)?).await {
        Err(RegistryError::Missing { version: None, .. }) if built_ins().any(|(known, _)| known == name) => {
            Err(ApiError::not_found("plugin", format!("'{name}' is built in, and has no versions.")))
        }
        found => Ok(found?),
    }
}

/// The version that a path names; `None`: the latest.
pub(super) fn version_number(text: &str) -> Result<Option<u32>, ApiError> {
    match text {
        "latest" => Ok(None),
        number => match number.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(ApiError::not_found("plugin", "A version is a number, or 'latest'.")),
        },
    }
}

/// Deletes versions of one plugin that no subscription uses.
async fn remove(app: &App, tenant: &Tenant, versions: &[Version]) -> Result<Response, ApiError> {
    for row in versions {
        let users = app.index.users(tenant, &row.id(tenant));
        if users.is_empty() {
            continue;
        }
        let named: Vec<_> = users
            .iter()
            .take(NAMED)
            .map(|route| format!("{} ({})", route.subscription.id, route.subscription.subscription))
            .collect();
        let more = users.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let text = format!(
            "Version {} of plugin '{}' is used by subscriptions: {}{more}.",
            row.version,
            row.name,
            named.join(", ")
        );
        return Err(ApiError::new(StatusCode::CONFLICT, "plugin/In Use", text));
    }
    app.registry.delete(tenant, versions).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn render(app: &App, caller: &Caller, name: &str, versions: &[Version]) -> Value {
    let world = versions.first().map(|version| version.world.name());
    json!({
        "name": name,
        "self": format!("{}{PATH}/{name}", caller.base_url),
        "builtIn": false,
        "world": world,
        "versions": versions.iter().map(|version| render_version(app, caller, version)).collect::<Vec<_>>(),
    })
}

fn render_built_in(app: &App, caller: &Caller) -> impl Fn((&'static str, World)) -> Value {
    |(name, world)| {
        let body = json!({
            "name": name,
            "self": format!("{}{PATH}/{name}", caller.base_url),
            "builtIn": true,
            "world": world.name(),
            "versions": [],
        });
        with_state(app, caller, &PluginId::built_in(name), body)
    }
}

fn render_version(app: &App, caller: &Caller, version: &Version) -> Value {
    let Version { name, version: number, world, language, digest, size, author, created_ms } = version;
    let body = json!({
        "name": name,
        "version": number,
        "self": format!("{}{PATH}/{name}/versions/{number}", caller.base_url),
        "world": world.name(),
        "language": language.name(),
        "digest": digest,
        "size": size,
        "author": author,
        "creationTime": time::text(*created_ms),
    });
    with_state(app, caller, &version.id(&caller.principal.tenant), body)
}

/// How the plugin fares in the caller's tenant.
fn with_state(app: &App, caller: &Caller, plugin: &PluginId, mut body: Value) -> Value {
    let tenant = &caller.principal.tenant;
    let users = app.index.users(tenant, plugin);
    let held = |route: &Arc<Route>| app.topics.held(&route.topic, route.subscription.id).messages;
    body["subscriptions"] = users.len().into();
    body["heldMessages"] = users.iter().map(held).sum::<u64>().into();
    let usage = app.plugins.usage(tenant, plugin);
    body["usage"] = render_usage(&usage);
    body["usage"]["calls"] = usage.calls.into();
    body["usage"]["memoryBytes"] = usage.memory_bytes.into();
    if let Some(why) = app.plugins.quarantine().is(tenant, plugin) {
        body["quarantine"] = render_quarantine(&why);
    }
    body
}

/// With the plugin's name, and its version if it has one.
fn named(PluginId { tenant, name, version }: &PluginId, mut body: Value) -> Value {
    body["plugin"] = (&**name).into();
    if tenant.is_some() {
        body["version"] = (*version).into();
    }
    body
}

fn render_quarantine(Quarantined { since_ms, reason }: &Quarantined) -> Value {
    json!({"since": time::text(*since_ms), "reason": reason})
}

fn render_fault(LastFault { time_ms, kind, reason }: &LastFault) -> Value {
    json!({"time": time::text(*time_ms), "kind": kind, "reason": reason})
}

/// What became of messages, and what that took of the processor.
fn render_usage(usage: &Usage) -> Value {
    let faults = Fault::KINDS.into_iter().zip(usage.faults).filter(|(_, faults)| *faults > 0);
    let mut body = json!({
        "messages": usage.messages,
        "dropped": usage.dropped,
        "faults": faults.collect::<BTreeMap<_, _>>(),
        "processorMicroseconds": u64::try_from(usage.processor_time.as_micros()).unwrap_or(u64::MAX),
    });
    if let Some(fault) = &usage.last_fault {
        body["lastFault"] = render_fault(fault);
    }
    body
}
