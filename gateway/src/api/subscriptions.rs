//! `/notification2/subscriptions` (Notifications 2.0 OpenAPI; seed 000, "Creating subscriptions").

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};
use sqlx::Row as _;

use super::{ApiError, App, AppState, Caller, Id, Reply, found, json_limits, parameter, query, read_body};
use crate::auth::{AuthError, Role};
use crate::backlog::TopicKey;
use crate::json::{Invalid, Limits, Members};
use crate::message::{Action, Api, Message, Tenant};
use crate::platform::page::{Envelope, PageRequest};
use crate::platform::parse_id;
use crate::plugin::{BuiltIn, Instance, Plugin, PluginError, Plugins, World};
use crate::store::{Statement, Value};
use crate::subscription::{Context, Index, PluginUse, Route, Subscription};
use crate::writer::Change;

const PATH: &str = "/notification2/subscriptions";
const ROLE: Role = Role::Notification2Admin;

/// GET of `/notification2`: where things are.
pub(super) async fn resource(caller: Caller, headers: HeaderMap) -> Result<Response, ApiError> {
    caller.require(ROLE)?;
    let base = &caller.base_url;
    let body = serde_json::json!({
        "self": format!("{base}/notification2"),
        "notificationSubscriptions": {"self": format!("{base}{PATH}"), "subscriptions": null},
        "notificationSubscriptionsBySource": format!("{base}{PATH}?source={{source}}"),
        "notificationSubscriptionsBySourceAndContext": format!("{base}{PATH}?source={{source}}&context={{context}}"),
        "notificationSubscriptionsByContext": format!("{base}{PATH}?context={{context}}"),
    });
    Ok(found(&headers, "notificationapi", body.to_string().into_bytes()))
}

/// POST.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    caller.require(ROLE)?;
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    each_name_once(&body, &json_limits(&app.config))?;
    let subscription = Subscription::parse(&body)?;
    make(&app, &caller, &headers, subscription).await
}

/// A member that comes twice could take the place of a filter.
fn each_name_once(body: &[u8], limits: &Limits) -> Result<(), Invalid> {
    let members = Members::parse(body, limits)?;
    for member in members.iter().filter(|member| member.raw.starts_with('{')) {
        Members::of(member.raw, limits).map_err(|error| error.within(&member.name))?;
    }
    Ok(())
}

async fn make(
    app: &App,
    caller: &Caller,
    headers: &HeaderMap,
    mut subscription: Subscription,
) -> Result<Response, ApiError> {
    let tenant = &caller.principal.tenant;
    let _subscribing = app.subscribing.lock().await;
    // The tenant may have been removed since the caller was let in.
    if !app.auth.knows(tenant) {
        return Err(AuthError::BadCredentials.into());
    }
    if let Some(source) = subscription.source
        && !app.sources.exists(tenant, source)
    {
        return Err(ApiError::not_found("inventory", "Finding device data from database failed"));
    }
    refuse_duplicate(app, tenant, &subscription)?;
    subscription.id = app.ids.take(1, &app.writer).await?;
    let route = route(&app.plugins, tenant, subscription).await?;
    let subscription = &route.subscription;
    let statement = Statement {
        sql: "INSERT INTO subscription(id, tenant, source, body) VALUES (?, ?, ?, ?)",
        values: vec![
            Value::Int(subscription.id.cast_signed()),
            Value::Text(tenant.to_string()),
            subscription.source.map_or(Value::Null, |source| Value::Int(source.cast_signed())),
            Value::Text(serde_json::to_string(subscription).expect("invariant: a subscription serializes")),
        ],
    };
    app.writer.commit(Change { statements: vec![statement], ..Change::default() }).await?;
    let rendered = render(app, caller, subscription);
    let location = Some(format!("{}{PATH}/{}", caller.base_url, subscription.id));
    app.index.insert(route);
    let reply = Reply { status: StatusCode::CREATED, location, media: "subscription" };
    Ok(reply.respond(headers, || rendered.to_string().into_bytes()))
}

/// GET of a page, filtered by `context`, `source`, `subscription` and `typeFilter`.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(ROLE)?.tenant;
    let query = query(&uri);
    let selection = Selection::parse(&query)?;
    let name = parameter(&query, "subscription");
    let mut routes = app.index.list(tenant, |subscription| {
        selection.selects(subscription) && name.is_none_or(|name| name == subscription.subscription)
    });
    if let Some(kind) = parameter(&query, "typeFilter") {
        routes = with_type(&app.plugins, tenant, routes, kind).await?;
    }
    // Totals are always told: some clients count by them without asking.
    let page = PageRequest { with_total_pages: true, ..PageRequest::parse(&query)? };
    let total = routes.len() as u64;
    let shown: Vec<_> =
        routes.iter().skip(usize::try_from(page.offset()).unwrap_or(usize::MAX)).take(page.size as usize).collect();
    let url = format!("{}{PATH}", caller.base_url);
    let more = page.offset() + (shown.len() as u64) < total;
    let envelope = Envelope { url: &url, query: &query, name: "subscriptions", page, more, total: Some(total) };
    let mut body = Vec::new();
    let push = |route: &Arc<Route>, out: &mut Vec<u8>| {
        out.extend_from_slice(render(&app, &caller, &route.subscription).to_string().as_bytes());
    };
    envelope.render(shown, push, &mut body);
    Ok(found(&headers, "subscriptioncollection", body))
}

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(ROLE)?.tenant;
    let route = id.and_then(|id| app.index.get(tenant, id)).ok_or_else(missing)?;
    let body = render(&app, &caller, &route.subscription).to_string().into_bytes();
    Ok(found(&headers, "subscription", body))
}

/// DELETE of one. Topics and consumers stay (seed 000, "Deleting subscriptions").
pub(super) async fn delete(State(app): AppState, caller: Caller, Id(id): Id) -> Result<Response, ApiError> {
    caller.require(ROLE)?;
    let tenant = &caller.principal.tenant;
    let _subscribing = app.subscribing.lock().await;
    let route = id.and_then(|id| app.index.get(tenant, id)).ok_or_else(missing)?;
    remove(&app, tenant, &[route]).await
}

/// DELETE of all subscriptions of a source, or of the tenant context.
pub(super) async fn delete_by_query(State(app): AppState, caller: Caller, uri: Uri) -> Result<Response, ApiError> {
    caller.require(ROLE)?;
    let mut selection = Selection::parse(&query(&uri))?;
    // Without a context the source's own are meant.
    let context = *selection.context.get_or_insert(Context::Mo);
    match (context, selection.source) {
        (Context::Mo, None) => Err(ApiError::unprocessable("source: is needed unless 'context' is 'tenant'")),
        (Context::Tenant, Some(_)) => Err(ApiError::unprocessable("source: is only for the context 'mo'")),
        _ => {
            let tenant = &caller.principal.tenant;
            let _subscribing = app.subscribing.lock().await;
            let routes = app.index.list(tenant, |subscription| selection.selects(subscription));
            remove(&app, tenant, &routes).await
        }
    }
}

/// Puts all stored subscriptions in force.
pub(crate) async fn load(store: &sqlx::SqlitePool, plugins: &Plugins, index: &Index) -> anyhow::Result<()> {
    let rows = sqlx::query("SELECT tenant, body FROM subscription ORDER BY id").fetch_all(store).await?;
    for row in rows {
        let tenant = Tenant::from(row.try_get::<&str, _>(0)?);
        let subscription: Subscription = serde_json::from_str(row.try_get(1)?)?;
        index.insert(route(plugins, &tenant, subscription).await.map_err(|error| anyhow::anyhow!("{error:?}"))?);
    }
    Ok(())
}

/// The deleted objects' subscriptions are out of force; their rows went with the objects'.
pub(super) fn forget_sources(app: &App, tenant: &Tenant, sources: &BTreeSet<u64>) {
    let of_deleted = |subscription: &Subscription| subscription.source.is_some_and(|id| sources.contains(&id));
    for route in app.index.list(tenant, of_deleted) {
        app.index.remove(tenant, route.subscription.id);
    }
}

fn render(app: &App, caller: &Caller, subscription: &Subscription) -> serde_json::Value {
    let name = subscription.source.and_then(|source| app.sources.name(source));
    subscription.render(&caller.base_url, name.as_deref())
}

/// Configures the plugins that the subscription needs.
async fn route(plugins: &Plugins, tenant: &Tenant, subscription: Subscription) -> Result<Route, ApiError> {
    let filters = filters(plugins, tenant, &subscription).await?;
    let transforms = transforms(plugins, tenant, &subscription).await?;
    let topic = TopicKey {
        tenant: tenant.clone(),
        name: subscription.subscription.as_str().into(),
        non_persistent: subscription.non_persistent,
    };
    let topic = Arc::new(topic);
    Ok(Route { subscription, topic, filters, transforms })
}

async fn filters(plugins: &Plugins, tenant: &Tenant, subscription: &Subscription) -> Result<Vec<Instance>, ApiError> {
    let mut filters = Vec::new();
    if let Some(text) = &subscription.type_filter {
        filters.push(configure(plugins, tenant, plugins.built_in(BuiltIn::TypeFilter), text, subscription.id).await?);
    }
    for (at, named) in subscription.filters.iter().enumerate() {
        filters.push(named_plugin(plugins, tenant, World::Filter, named, &format!("tidegate.filters[{at}]")).await?);
    }
    Ok(filters)
}

/// The fragments are copied last, unless the subscription says where.
async fn transforms(
    plugins: &Plugins,
    tenant: &Tenant,
    subscription: &Subscription,
) -> Result<Vec<Instance>, ApiError> {
    let mut fragments = match &subscription.fragments_to_copy {
        Some(names) => {
            let settings = serde_json::to_string(names).expect("invariant: texts serialize");
            let plugin = plugins.built_in(BuiltIn::FragmentsToCopy);
            Some(configure(plugins, tenant, plugin, &settings, subscription.id).await?)
        }
        None => None,
    };
    let mut transforms = Vec::new();
    for (at, named) in subscription.transforms.iter().enumerate() {
        let field = format!("tidegate.transforms[{at}]");
        transforms.push(if named.plugin == BuiltIn::FragmentsToCopy.name() {
            fragments
                .take()
                .ok_or_else(|| Invalid::new(&field, "stands for 'fragmentsToCopy', which is not there or is used"))?
        } else {
            named_plugin(plugins, tenant, World::Transform, named, &field).await?
        });
    }
    transforms.extend(fragments);
    Ok(transforms)
}

/// An instance of the plugin that `field` names.
async fn named_plugin(
    _plugins: &Plugins,
    _tenant: &Tenant,
    world: World,
    named: &PluginUse,
    field: &str,
) -> Result<Instance, ApiError> {
    let there_is_none = format!("there is no {} '{}'", world.name(), named.plugin);
    Err(Invalid::new(&format!("{field}.plugin"), there_is_none).into())
}

async fn configure(
    plugins: &Plugins,
    tenant: &Tenant,
    plugin: &Plugin,
    settings: &str,
    subscription: u64,
) -> Result<Instance, ApiError> {
    plugins.configure(tenant, plugin, settings, subscription).await.map_err(|error| match error {
        // The guest knows which field its settings come from.
        PluginError::Settings(text) => ApiError::unprocessable(text.into_string()),
        other => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "tidegate/Plugin Fault", other.to_string()),
    })
}

/// The routes whose filter lets a message of type `kind` pass: asked of the filters themselves.
async fn with_type(
    plugins: &Plugins,
    tenant: &Tenant,
    routes: Vec<Arc<Route>>,
    kind: &str,
) -> Result<Vec<Arc<Route>>, ApiError> {
    let probe = Arc::new(Message {
        tenant: tenant.clone(),
        api: Api::Measurements,
        action: Action::Create,
        source: "".into(),
        kind: Some(kind.into()),
        time: "".into(),
        body: Bytes::new(),
    });
    let filtered: Vec<(Arc<Route>, Instance)> =
        routes.into_iter().filter_map(|route| Some((route.clone(), type_filter(&route)?))).collect();
    let calls = filtered.iter().map(|(_, instance)| (instance.clone(), vec![probe.clone()])).collect();
    let verdicts = plugins.judge(calls).await.into_iter().flatten();
    Ok(filtered
        .into_iter()
        .zip(verdicts)
        .filter(|(_, verdict)| *verdict == Ok(true))
        .map(|((route, _), _)| route)
        .collect())
}

/// It is the first of the filters.
fn type_filter(route: &Route) -> Option<Instance> {
    route.subscription.type_filter.is_some().then(|| route.filters.first().cloned()).flatten()
}

fn refuse_duplicate(app: &App, tenant: &Tenant, new: &Subscription) -> Result<(), ApiError> {
    if !app.index.list(tenant, |existing| existing.duplicates(new)).is_empty() {
        let source = new.source.map_or_else(String::new, |source| format!("source <'{source}'>, "));
        let context = if new.context == Context::Mo { "mo" } else { "tenant" };
        let message = format!(
            "Subscription with {source}context <'{context}'> & subscription <'{}'> already exists!",
            new.subscription
        );
        return Err(ApiError::new(StatusCode::CONFLICT, "reliable-notification/Duplicate", message));
    }
    let limit = app.config.limits.subscriptions_per_tenant;
    if app.index.count(tenant) >= limit {
        return Err(ApiError::unprocessable(format!("A tenant may have at most {limit} subscriptions.")));
    }
    Ok(())
}

async fn remove(app: &App, tenant: &Tenant, routes: &[Arc<Route>]) -> Result<Response, ApiError> {
    let statements = routes
        .iter()
        .map(|route| Statement {
            sql: "DELETE FROM subscription WHERE id = ?",
            values: vec![Value::Int(route.subscription.id.cast_signed())],
        })
        .collect();
    app.writer.commit(Change { statements, ..Change::default() }).await?;
    for route in routes {
        app.index.remove(tenant, route.subscription.id);
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn missing() -> ApiError {
    ApiError::not_found("reliable-notification", "Finding subscription from database failed")
}

/// `context` and `source` of a query.
struct Selection {
    context: Option<Context>,
    source: Option<u64>,
}

impl Selection {
    fn parse(query: &[(Cow<'_, str>, Cow<'_, str>)]) -> Result<Self, ApiError> {
        let context = match parameter(query, "context") {
            None => None,
            Some("mo") => Some(Context::Mo),
            Some("tenant") => Some(Context::Tenant),
            Some(_) => return Err(ApiError::unprocessable("context: must be 'mo' or 'tenant'")),
        };
        let source = parameter(query, "source")
            .map(|id| parse_id(id).ok_or_else(|| ApiError::unprocessable("source: must be the id of a managed object")))
            .transpose()?;
        Ok(Self { context, source })
    }

    fn selects(&self, subscription: &Subscription) -> bool {
        self.context.is_none_or(|context| context == subscription.context)
            && self.source.is_none_or(|source| Some(source) == subscription.source)
    }
}
