//! `/notification2/subscriptions` (Notifications 2.0 OpenAPI; seed 000, "Creating subscriptions").

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
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
use crate::plugin::{BuiltIn, Fault, Instance, Plugin, PluginError, PluginId, Plugins, World};
use crate::registry::{Registry, RegistryError};
use crate::store::{Statement, Value};
use crate::subscription::{Canary, Context, Index, PluginSettings, PluginUse, Route, Subscription};
use crate::writer::Change;

const PATH: &str = "/notification2/subscriptions";
pub(super) const ROLE: Role = Role::Notification2Admin;

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
    check(app, tenant, &subscription)?;
    subscription.id = app.ids.take(1, &app.writer).await?;
    // Others need not wait until plugins are loaded.
    let route = Making { registry: &app.registry, tenant, stage: Stage::Asked }.route(subscription).await?;
    let _subscribing = app.subscribing.lock().await;
    check(app, tenant, &route.subscription)?;
    still_there(&app.registry, tenant, route.subscription.plugins()).await?;
    let subscription = &route.subscription;
    let statement = Statement {
        sql: "INSERT INTO subscription(id, tenant, source, body) VALUES (?, ?, ?, ?)",
        values: vec![
            Value::Int(subscription.id.cast_signed()),
            Value::Text(tenant.to_string()),
            subscription.source.map_or(Value::Null, |source| Value::Int(source.cast_signed())),
            stored(subscription),
        ],
    };
    app.writer.commit(Change { statements: vec![statement], ..Change::default() }).await?;
    let rendered = render(app, caller, subscription);
    let location = Some(format!("{}{PATH}/{}", caller.base_url, subscription.id));
    app.index.insert(route);
    let reply = Reply { status: StatusCode::CREATED, location, media: "subscription" };
    Ok(reply.respond(headers, || rendered.into_bytes()))
}

/// A subscription as it stands in its row.
pub(super) fn stored(subscription: &Subscription) -> Value {
    Value::Text(serde_json::to_string(subscription).expect("invariant: a subscription serializes"))
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
        out.extend_from_slice(render(&app, &caller, &route.subscription).as_bytes());
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
    let body = render(&app, &caller, &route.subscription).into_bytes();
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

/// Puts all stored subscriptions in force. Returns those whose plugins are still to be loaded.
pub(crate) async fn load(
    store: &sqlx::SqlitePool,
    registry: &Registry,
    index: &Index,
) -> anyhow::Result<Vec<(Tenant, u64)>> {
    let rows = sqlx::query("SELECT tenant, body FROM subscription ORDER BY id").fetch_all(store).await?;
    let mut waiting = Vec::new();
    for row in rows {
        let tenant = Tenant::from(row.try_get::<&str, _>(0)?);
        let subscription: Subscription = serde_json::from_str(row.try_get(1)?)?;
        if subscription.plugins().next().is_some() {
            waiting.push((tenant.clone(), subscription.id));
        }
        let making = Making { registry, tenant: &tenant, stage: Stage::Starting };
        index.insert(making.route(subscription).await.map_err(|error| anyhow::anyhow!("{error:?}"))?);
    }
    Ok(waiting)
}

/// Subscriptions of a tenant whose plugins are loaded at a time: what is compiled already does not wait for what has to be.
const LOADS: usize = 64;

/// Loads the plugins that these subscriptions name, which takes long where they have to be compiled. What has come for them meanwhile is
/// judged then. A plugin that cannot be had any more faults each of its messages.
pub(crate) async fn load_plugins(app: Arc<App>, waiting: Vec<(Tenant, u64)>) {
    let mut tenants: HashMap<Tenant, Vec<u64>> = HashMap::new();
    for (tenant, id) in waiting {
        tenants.entry(tenant).or_default().push(id);
    }
    let loads = tenants.into_iter().map(|(tenant, ids)| load_plugins_of(&app, tenant, ids));
    let _stopped = app.stopping.run_until_cancelled(join_all(loads)).await;
}

async fn load_plugins_of(app: &App, tenant: Tenant, subscriptions: Vec<u64>) {
    let load = async |id| match equip(app, &tenant, id).await {
        Ok(()) => {
            let (pipeline, tenant) = (app.pipeline.clone(), tenant.clone());
            tokio::spawn(async move { pipeline.release(&tenant, [id]).await });
        }
        Err(error) => tracing::error!(%tenant, subscription = id, %error, "its plugins cannot be loaded"),
    };
    stream::iter(subscriptions).for_each_concurrent(LOADS, load).await;
}

/// Gives a subscription its plugins, between two messages.
async fn equip(app: &App, tenant: &Tenant, id: u64) -> Result<(), ApiError> {
    while let Some(waiting) = app.index.get(tenant, id) {
        let making = Making { registry: &app.registry, tenant, stage: Stage::InForce };
        let route = making.route(waiting.subscription.clone()).await?;
        let _subscribing = app.subscribing.lock().await;
        // What was changed meanwhile is made once more.
        if app.index.get(tenant, id).is_some_and(|now| Arc::ptr_eq(&now, &waiting)) {
            app.index.replace(Arc::new(route));
            return Ok(());
        }
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

fn render(app: &App, caller: &Caller, subscription: &Subscription) -> String {
    let name = subscription.source.and_then(|source| app.sources.name(source));
    subscription.render(&caller.base_url, name.as_deref())
}

/// Puts together what a subscription needs.
pub(super) struct Making<'a> {
    pub(super) registry: &'a Registry,
    pub(super) tenant: &'a Tenant,
    pub(super) stage: Stage,
}

/// How far a subscription is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Somebody asks for it, and is told what is wrong with it.
    Asked,
    /// It is in force, and the plugins that it names are still to be loaded.
    Starting,
    /// It is in force as it is: what cannot be had stands in for itself and answers with faults.
    InForce,
}

impl Making<'_> {
    /// The subscription with its plugins, all of them configured. Versions that it leaves open are filled in.
    async fn route(&self, mut subscription: Subscription) -> Result<Route, ApiError> {
        let mut filters = Vec::new();
        if let Some(text) = &subscription.type_filter {
            let plugin = self.registry.plugins().built_in(BuiltIn::TypeFilter);
            // The guest knows which field its settings come from.
            filters.push(self.configure(plugin, text, subscription.id, "").await?);
        }
        for (at, named) in subscription.filters.iter_mut().enumerate() {
            let field = format!("tidegate.filters[{at}]");
            filters.push(self.named(World::Filter, named, subscription.id, &field).await?);
        }
        let transforms = self.transforms(&mut subscription).await?;
        let topic = TopicKey {
            tenant: self.tenant.clone(),
            name: subscription.subscription.as_str().into(),
            non_persistent: subscription.non_persistent,
        };
        let canary = subscription.canary.take();
        let route = Route { subscription, topic: Arc::new(topic), filters, transforms, canary: None };
        let Some(mut canary) = canary else { return Ok(route) };
        let instance = self.canary(route.subscription.id, &mut canary).await?;
        Ok(route.with(canary, instance))
    }

    /// The instance of a subscription's canary, whose version is filled in.
    pub(super) async fn canary(&self, subscription: u64, canary: &mut Canary) -> Result<Instance, ApiError> {
        self.named(canary.place.world, &mut canary.named, subscription, "canary").await
    }

    /// The fragments are copied last, unless the subscription says where.
    async fn transforms(&self, subscription: &mut Subscription) -> Result<Vec<Instance>, ApiError> {
        let mut fragments = match &subscription.fragments_to_copy {
            Some(names) => {
                let settings = serde_json::to_string(names).expect("invariant: texts serialize");
                let plugin = self.registry.plugins().built_in(BuiltIn::FragmentsToCopy);
                Some(self.configure(plugin, &settings, subscription.id, "").await?)
            }
            None => None,
        };
        let mut transforms = Vec::new();
        for (at, named) in subscription.transforms.iter_mut().enumerate() {
            let field = format!("tidegate.transforms[{at}]");
            transforms.push(if named.plugin == BuiltIn::FragmentsToCopy.name() {
                if self.stage == Stage::Asked
                    && (named.version.is_some() || named.settings != PluginSettings::default())
                {
                    let text = "stands for 'fragmentsToCopy', and has neither version nor settings of its own";
                    return Err(Invalid::new(&field, text).into());
                }
                fragments.take().ok_or_else(|| {
                    Invalid::new(&field, "stands for 'fragmentsToCopy', which is not there or is used")
                })?
            } else {
                self.named(World::Transform, named, subscription.id, &field).await?
            });
        }
        transforms.extend(fragments);
        Ok(transforms)
    }

    /// An instance of the plugin that `field` names.
    async fn named(
        &self,
        world: World,
        named: &mut PluginUse,
        subscription: u64,
        field: &str,
    ) -> Result<Instance, ApiError> {
        let plugin = match self.stage {
            Stage::Starting => Plugin::loading(self.id(named), world),
            Stage::InForce => self.find(named, field).await.unwrap_or_else(|error| self.stand_in(world, named, &error)),
            Stage::Asked => self.find(named, field).await?,
        };
        if plugin.world() != world {
            let text = format!("'{}' is a {}, and this takes a {}", named.plugin, plugin.world().name(), world.name());
            return Err(Invalid::new(&format!("{field}.plugin"), text).into());
        }
        named.version = plugin.id().tenant.as_ref().map(|_| plugin.id().version);
        self.configure(&plugin, named.settings.as_str(), subscription, field).await
    }

    /// The tenant's own plugin, or the built-in one: so a plugin stays itself when a later gateway has one of its name built in.
    async fn find(&self, PluginUse { plugin, version, .. }: &PluginUse, field: &str) -> Result<Plugin, ApiError> {
        if plugin == BuiltIn::TypeFilter.name() {
            let text = "stands for 'subscriptionFilter.typeFilter', which says what it lets pass";
            return Err(Invalid::new(&format!("{field}.plugin"), text).into());
        }
        // What was made without a version, and still has none, is built in.
        if self.stage == Stage::Asked || version.is_some() {
            match self.registry.get(self.tenant, plugin, *version).await {
                Err(RegistryError::Missing { .. }) => {}
                found => return Ok(found?),
            }
        }
        match self.registry.plugins().built_in_named(plugin).await {
            Some(_) if version.is_some() => {
                let text = format!("must be absent: '{plugin}' is built in, and has no versions");
                Err(Invalid::new(&format!("{field}.version"), text).into())
            }
            Some(built_in) => Ok(built_in?),
            None => {
                let missing = RegistryError::Missing { name: plugin.clone(), version: *version };
                Err(Invalid::new(&format!("{field}.plugin"), missing.to_string()).into())
            }
        }
    }

    fn stand_in(&self, world: World, named: &PluginUse, error: &ApiError) -> Plugin {
        let PluginUse { plugin, version, .. } = named;
        tracing::error!(tenant = %self.tenant, plugin, version, %error, "a plugin that a subscription names cannot be had");
        Plugin::unavailable(self.id(named), world, &error.to_string())
    }

    /// The plugin that a subscription in force names.
    fn id(&self, PluginUse { plugin, version, .. }: &PluginUse) -> PluginId {
        let tenant = version.map(|_| self.tenant.clone());
        PluginId { tenant, name: plugin.as_str().into(), version: version.unwrap_or(1) }
    }

    /// An instance with the settings of `field`, which is empty where the plugin itself says where they come from.
    async fn configure(
        &self,
        plugin: &Plugin,
        settings: &str,
        subscription: u64,
        field: &str,
    ) -> Result<Instance, ApiError> {
        let plugins = self.registry.plugins();
        let error = match plugins.configure(self.tenant, plugin, settings, subscription).await {
            Err(error) if self.stage != Stage::Asked => {
                tracing::error!(tenant = %self.tenant, subscription, ?plugin, %error, "a plugin takes its settings no more");
                let unavailable = Plugin::unavailable(plugin.id().clone(), plugin.world(), &error.to_string());
                return Ok(plugins.configure(self.tenant, &unavailable, settings, subscription).await?);
            }
            Err(error) => error,
            Ok(instance) => return Ok(instance),
        };
        Err(match error {
            PluginError::Settings(text) if field.is_empty() => ApiError::unprocessable(text.into_string()),
            PluginError::Settings(text) => Invalid::new(&format!("{field}.settings"), text).into(),
            PluginError::Fault { fault, .. } if fault != Fault::Stopped && !field.is_empty() => {
                Invalid::new(&format!("{field}.settings"), format!("{fault} while it was configured")).into()
            }
            error => error.into(),
        })
    }
}

/// Refuses plugins that were deleted while they were loaded.
pub(super) async fn still_there(
    registry: &Registry,
    tenant: &Tenant,
    plugins: impl IntoIterator<Item = &PluginUse>,
) -> Result<(), ApiError> {
    for named in plugins.into_iter().filter(|named| named.version.is_some()) {
        match registry.version(tenant, &named.plugin, named.version).await {
            Err(missing @ RegistryError::Missing { .. }) => return Err(ApiError::unprocessable(missing.to_string())),
            found => drop(found?),
        }
    }
    Ok(())
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
    let verdicts = plugins.judge(calls).await.into_iter().flat_map(|answered| answered.answers);
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

/// Refuses what has no place. The tenant may have been removed since the caller was let in.
fn check(app: &App, tenant: &Tenant, new: &Subscription) -> Result<(), ApiError> {
    if !app.auth.knows(tenant) {
        return Err(AuthError::BadCredentials.into());
    }
    if let Some(source) = new.source
        && !app.sources.exists(tenant, source)
    {
        return Err(ApiError::not_found("inventory", "Finding device data from database failed"));
    }
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

pub(super) fn missing() -> ApiError {
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
