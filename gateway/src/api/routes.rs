//! The one router, made of one table of paths and methods; the OpenAPI document is held against the same table.

use std::borrow::Cow;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{MethodRouter, delete, get, post};

use super::{
    ApiError, App, alarms, canary, children, consumer, cors, discovery, events, explain, identity, inventory,
    measurements, messaging, openapi, operations, operator, plugins, push, subscriptions, tenants, tokens, topics,
    trial, users,
};
use crate::platform::relation::Kind;

/// A path and what it answers.
pub(super) struct Route {
    /// As the router matches it.
    pub(super) path: Cow<'static, str>,
    /// The methods, as an `Allow` header names them; HEAD comes with GET.
    pub(super) allowed: &'static str,
    methods: MethodRouter<Arc<App>>,
}

/// The whole HTTP surface, for paths without empty segments: [`super::drop_empty_segments`] has to stand before it.
pub fn router(app: Arc<App>) -> Router {
    let add = |router: Router<Arc<App>>, Route { path, allowed, methods }: Route| {
        let refuse = move || async move { ApiError::method_not_allowed(allowed) };
        router.route(&path, methods.fallback(refuse))
    };
    let changing = changing_routes().fold(Router::new(), add);
    let mut router = other_routes()
        .fold(Router::new(), add)
        .merge(changing.route_layer(middleware::from_fn(to_the_end)))
        .fallback(|| async { ApiError::not_found("general", "There is nothing at this path.") });
    if app.config.http.cors_origins.is_some() {
        router = router.layer(middleware::from_fn_with_state(app.clone(), cors::answer));
    }
    router.with_state(app)
}

/// Carries a request out to its end even if the client goes away, since hyper would drop it: memory follows its commit, and
/// locks are held until then.
async fn to_the_end(request: Request, next: Next) -> Result<Response, ApiError> {
    tokio::spawn(next.run(request)).await.map_err(|error| {
        tracing::error!(%error, "a request was not carried out");
        ApiError::internal("the request failed")
    })
}

fn route(path: impl Into<Cow<'static, str>>, allowed: &'static str, methods: MethodRouter<Arc<App>>) -> Route {
    Route { path: path.into(), allowed, methods }
}

/// Where locks are taken or memory is changed.
pub(super) fn changing_routes() -> impl Iterator<Item = Route> {
    let backup = route("/tidegate/v1/backup", "POST", post(operator::backup));
    inventory_routes()
        .chain(object_routes())
        .chain(subscription_routes())
        .chain(account_routes())
        .chain(topic_routes())
        .chain(plugin_routes())
        .chain([backup])
}

fn inventory_routes() -> impl Iterator<Item = Route> {
    let children = Kind::ALL.into_iter().flat_map(|kind| {
        let collection = format!("/inventory/managedObjects/{{id}}/{}", kind.children());
        let one = format!("{collection}/{{child}}");
        [
            route(
                collection,
                "GET, POST, DELETE",
                get(children::list).post(children::create).delete(children::delete_many),
            ),
            route(one, "GET, DELETE", get(children::get).delete(children::delete)),
        ]
    });
    children.chain([
        route("/inventory/managedObjects", "GET, POST", get(inventory::list).post(inventory::create)),
        route("/inventory/managedObjects/count", "GET", get(inventory::count)),
        route(
            "/inventory/managedObjects/{id}",
            "GET, PUT, DELETE",
            get(inventory::get).put(inventory::update).delete(inventory::delete),
        ),
        route("/identity/globalIds/{id}/externalIds", "GET, POST", get(identity::list).post(identity::create)),
        // A value may hold slashes that the client did not encode.
        route("/identity/externalIds/{type}/{*externalId}", "GET, DELETE", get(identity::get).delete(identity::delete)),
    ])
}

/// Objects that belong to a managed object, where they are changed in place.
fn object_routes() -> impl Iterator<Item = Route> {
    [
        route("/measurement/measurements/{id}", "GET, DELETE", get(measurements::get).delete(measurements::delete)),
        route("/event/events/{id}", "GET, PUT, DELETE", get(events::get).put(events::update).delete(events::delete)),
        route(
            "/alarm/alarms",
            "GET, POST, PUT, DELETE",
            get(alarms::list).post(alarms::create).put(alarms::update_all).delete(alarms::delete_all),
        ),
        route("/alarm/alarms/count", "GET", get(alarms::count)),
        route("/alarm/alarms/{id}", "GET, PUT", get(alarms::get).put(alarms::update)),
        route(
            "/devicecontrol/operations",
            "GET, POST, DELETE",
            get(operations::list).post(operations::create).delete(operations::delete_all),
        ),
        route("/devicecontrol/operations/{id}", "GET, PUT", get(operations::get).put(operations::update)),
    ]
    .into_iter()
}

fn subscription_routes() -> impl Iterator<Item = Route> {
    [
        route(
            "/notification2/subscriptions",
            "GET, POST, DELETE",
            get(subscriptions::list).post(subscriptions::create).delete(subscriptions::delete_by_query),
        ),
        route(
            "/notification2/subscriptions/{id}",
            "GET, DELETE",
            get(subscriptions::get).delete(subscriptions::delete),
        ),
        route(
            "/tidegate/v1/subscriptions/{id}/canary",
            "GET, PUT, DELETE",
            get(canary::get).put(canary::update).delete(canary::delete),
        ),
        route("/tidegate/v1/subscriptions/{id}/canary/promote", "POST", post(canary::promote)),
        route("/tidegate/v1/subscriptions/{id}/usage", "GET", get(plugins::usage_of_subscription)),
        route("/tidegate/v1/consumers", "GET, POST", get(push::list).post(push::create)),
        route("/tidegate/v1/consumers/{id}", "GET, DELETE", get(push::get).delete(push::delete)),
    ]
    .into_iter()
}

/// Users and tenants.
fn account_routes() -> impl Iterator<Item = Route> {
    [
        route("/user/currentUser", "GET, PUT", get(users::current).put(users::update_current)),
        route("/user/{tenant}/users", "GET, POST", get(users::list).post(users::create)),
        route(
            "/user/{tenant}/users/{id}",
            "GET, PUT, DELETE",
            get(users::get).put(users::update).delete(users::delete),
        ),
        route("/tidegate/v1/tenants", "GET, POST", get(tenants::list).post(tenants::create)),
        route("/tidegate/v1/tenants/{id}", "GET, DELETE", get(tenants::get).delete(tenants::delete)),
    ]
    .into_iter()
}

/// Topics and their consumers.
fn topic_routes() -> impl Iterator<Item = Route> {
    const NAMESPACES: &str = "/service/messaging-management/tenants/{tenant}/namespaces";
    const TOPIC: &str = "{namespace}/topics/{topic}/types/{persistence}";
    let messaging = |rest: &str, allowed, methods| route(format!("{NAMESPACES}{rest}"), allowed, methods);
    [
        route("/tidegate/v1/topics", "GET", get(topics::list)),
        route(
            "/tidegate/v1/topics/{persistence}/{topic}",
            "GET, PUT, DELETE",
            get(topics::get).put(topics::update).delete(topics::delete),
        ),
        route(
            "/tidegate/v1/tenants/{tenant}/backlog",
            "GET, PUT, DELETE",
            get(topics::get_defaults).put(topics::update_defaults).delete(topics::delete_defaults),
        ),
        messaging("", "GET", get(messaging::namespaces)),
        messaging("/{namespace}", "GET", get(messaging::namespace)),
        messaging("/{namespace}/policies", "GET", get(messaging::policies)),
        messaging("/{namespace}/topics", "GET", get(messaging::topics)),
        messaging(&format!("/{TOPIC}"), "GET", get(messaging::get)),
        messaging(&format!("/{TOPIC}/subscribers"), "GET", get(messaging::subscribers)),
        messaging(&format!("/{TOPIC}/subscribers/{{subscriber}}"), "DELETE", delete(messaging::unsubscribe)),
    ]
    .into_iter()
}

/// The registry of plugins.
fn plugin_routes() -> impl Iterator<Item = Route> {
    const VERSION: &str = "/tidegate/v1/plugins/{name}/versions/{version}";
    [
        route("/tidegate/v1/plugins", "GET, POST", get(plugins::list).post(plugins::upload)),
        route("/tidegate/v1/plugins/{name}", "GET, DELETE", get(plugins::get).delete(plugins::delete)),
        route("/tidegate/v1/plugins/{name}/release", "POST", post(plugins::release)),
        route(VERSION, "GET, DELETE", get(plugins::get_version).delete(plugins::delete_version)),
        route(format!("{VERSION}/wasm"), "GET", get(plugins::download)),
        route(format!("{VERSION}/release"), "POST", post(plugins::release_version)),
    ]
    .into_iter()
}

/// What takes no locks and changes no memory, and so needs no task of its own.
pub(super) fn other_routes() -> impl Iterator<Item = Route> {
    let families = discovery::families().map(|path| route(path, "GET", get(discovery::family)));
    families.chain([
        route(
            "/measurement/measurements",
            "GET, POST, DELETE",
            get(measurements::list).post(measurements::create).delete(measurements::delete_all),
        ),
        route("/event/events", "GET, POST, DELETE", get(events::list).post(events::create).delete(events::delete_all)),
        route("/notification2", "GET", get(subscriptions::resource)),
        route("/notification2/token", "GET, POST", get(tokens::get).post(tokens::create)),
        route("/notification2/unsubscribe", "POST", post(tokens::unsubscribe)),
        route("/notification2/consumer", "GET", get(consumer::connect)),
        route("/tidegate/v1/subscriptions/{id}/explain", "POST", post(explain::explain)),
        route("/tidegate/v1/plugins/{name}/versions/{version}/try", "POST", post(trial::try_out)),
        route("/platform", "GET", get(discovery::platform)),
        route("/tenant/currentTenant", "GET", get(discovery::tenant)),
        route("/tenant/loginOptions", "GET", get(discovery::login_options)),
        route("/user/roles", "GET", get(users::roles)),
        route("/user/roles/{id}", "GET", get(users::role)),
        route("/user/{tenant}/userByName/{id}", "GET", get(users::get)),
        route("/health/live", "GET", get(operator::live)),
        route("/health/ready", "GET", get(operator::ready)),
        route("/metrics", "GET", get(operator::metrics)),
        route("/openapi.json", "GET", get(openapi::document)),
    ])
}
