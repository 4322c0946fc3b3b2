//! `/tidegate/v1/plugins`: the plugins of a tenant, uploaded as components or scripts, and those that are built in.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use hyper::header::{CONTENT_TYPE, HeaderValue, LOCATION};
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};

use super::topics::part;
use super::{ApiError, App, AppState, Caller, Names, found, listed, parameter, query, read_body};
use crate::auth::Role;
use crate::json::Invalid;
use crate::message::Tenant;
use crate::platform::list::only_known;
use crate::platform::page::PageRequest;
use crate::plugin::{World, built_ins};
use crate::registry::{Language, RegistryError, Upload, Uploaded, Version};
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
    let body = read_body(&app, &headers, body, limit).await?;
    let (settings, author) = (text("settings"), principal.user.to_string());
    let upload = Upload { name, language, world, settings, author, body };
    let Uploaded { version, refusal } = app.registry.upload(&principal.tenant, upload, app.clock.now_ms()).await?;
    let mut body = render_version(&app, &caller, &version);
    if let Some(text) = refusal {
        body["configure"] = String::from(text).into();
    }
    let location = body["self"].as_str().unwrap_or_default().to_owned();
    let headers = [(CONTENT_TYPE, "application/json".to_owned()), (LOCATION, location)];
    Ok((StatusCode::CREATED, headers, body.to_string()).into_response())
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
    plugins.extend(built_ins().filter(|(name, _)| !uploaded.contains_key(*name)).map(render_built_in(&caller)));
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
        built_ins().find(|(known, _)| *known == name).map(render_built_in(&caller))
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
    match version.parse() {
        Ok(version) => Ok(app.registry.version(tenant, &name, Some(version)).await?),
        Err(_) => Err(ApiError::not_found("plugin", "A version is a number.")),
    }
}

/// Deletes versions of one plugin that no subscription uses.
async fn remove(app: &App, tenant: &Tenant, versions: &[Version]) -> Result<Response, ApiError> {
    for Version { name, version, .. } in versions {
        let users = app.index.list(tenant, |subscription| subscription.uses(name, *version));
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
        let text =
            format!("Version {version} of plugin '{name}' is used by subscriptions: {}{more}.", named.join(", "));
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

fn render_built_in(caller: &Caller) -> impl Fn((&'static str, World)) -> Value {
    |(name, world)| {
        json!({
            "name": name,
            "self": format!("{}{PATH}/{name}", caller.base_url),
            "builtIn": true,
            "world": world.name(),
            "versions": [],
        })
    }
}

fn render_version(app: &App, caller: &Caller, version: &Version) -> Value {
    let Version { name, version, world, language, digest, size, author, created_ms } = version;
    let users = app.index.list(&caller.principal.tenant, |subscription| subscription.uses(name, *version));
    json!({
        "name": name,
        "version": version,
        "self": format!("{}{PATH}/{name}/versions/{version}", caller.base_url),
        "world": world.name(),
        "language": language.name(),
        "digest": digest,
        "size": size,
        "author": author,
        "creationTime": time::text(*created_ms),
        "subscriptions": users.len(),
    })
}
