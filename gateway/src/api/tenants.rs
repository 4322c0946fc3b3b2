//! `/tidegate/v1/tenants`: the tenants of the gateway, for the operators in its own one.

use std::borrow::Cow;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use hyper::header::CACHE_CONTROL;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};

use super::topics::created;
use super::{ApiError, App, AppState, Caller, Names, found, json_limits, listed, query, read_body};
use crate::accounts::{Account, TenantRow, Tenants, check_tenant_name};
use crate::auth::{AuthError, DEFAULT_TENANT, Role, Roles, generate_password};
use crate::json::{self, Invalid, Members};
use crate::message::Tenant;
use crate::platform::list::only_known;
use crate::platform::page::{PageRequest, flag};
use crate::time;
use crate::writer::Change;

const ROLE: Role = Role::TenantManagementAdmin;
const PATH: &str = "/tidegate/v1/tenants";

/// Name of a tenant's first administrator where the request gives none.
pub(crate) const ADMIN: &str = "admin";

/// POST of `{"id", "adminName", "adminPassword"}`; the last two may be absent. A password that was not given is made up, and
/// shown in the answer to this request only.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    operator(&caller)?;
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let Wanted { tenant, admin, password } = Wanted::parse(&body, &json_limits(&app.config))?;
    let made = if password.is_none() { Some(generate_password()) } else { None };
    let hash = app.auth.hash(password.or_else(|| made.clone()).unwrap_or_default()).await?;
    let account = Account::new(&tenant, admin, hash, Roles::all_of(&tenant))?;
    // They are counted together.
    let _held = app.accounts.lock(DEFAULT_TENANT.into()).await;
    let now_ms = app.clock.now_ms();
    let statements = tenants(&app).add(&tenant, &account, now_ms).await?;
    app.writer.commit(Change { statements, ..Change::default() }).await?;
    app.auth.put(account.row.clone()).expect("invariant: the name was checked and the hash is fresh");
    let row = TenantRow { name: tenant, created_ms: now_ms };
    let mut body = render(&caller, &row);
    body["adminName"] = account.row.name.into();
    if let Some(password) = made {
        body["adminPassword"] = password.into();
    }
    Ok(([(CACHE_CONTROL, "no-store")], created(&body)).into_response())
}

/// GET of a page.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    operator(&caller)?;
    let query = query(&uri);
    let page = PageRequest::parse(&query)?;
    let tenants = tenants(&app);
    let shown = tenants.list(page.offset(), u64::from(page.size)).await?;
    let shown = shown.iter().map(|row| render(&caller, row)).collect();
    let url = format!("{}{PATH}", caller.base_url);
    let body = listed(&url, &query, "tenants", page, shown, tenants.count().await?);
    Ok(found(&headers, "tenantcollection", body))
}

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Names(name): Names<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    operator(&caller)?;
    let row = tenants(&app).get(&name.as_str().into()).await?;
    Ok(found(&headers, "tenant", render(&caller, &row).to_string().into_bytes()))
}

/// DELETE: users and subscriptions go, so that nobody gets in and nothing new arrives; consumers that have a token still get
/// what waits for them. With `purge` topics and objects go, too, see [`crate::removal`].
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Names(name): Names<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    operator(&caller)?;
    let query = query(&uri);
    only_known(&query, &["purge"])?;
    let purge = flag(&query, "purge")?;
    let tenant = Tenant::from(name.as_str());
    let _held = app.accounts.lock(tenant.clone()).await;
    let _subscribing = app.subscribing.lock().await;
    let statements = tenants(&app).remove(&tenant, purge, app.clock.now_ms()).await?;
    let plugins = app.registry.list(&tenant).await?;
    app.writer.commit(Change { statements, ..Change::default() }).await?;
    app.auth.remove_tenant(&tenant);
    for route in app.index.list(&tenant, |_| true) {
        app.index.remove(&tenant, route.subscription.id);
    }
    for (_, plugin, _) in app.plugins.quarantine().list(Some(&tenant)) {
        app.plugins.quarantine().lift(&tenant, &plugin);
    }
    app.registry.let_go(&tenant, plugins.values().flatten()).await?;
    app.pipeline.remove(&tenant);
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// What a request for a tenant asks for.
struct Wanted {
    tenant: Tenant,
    admin: String,
    password: Option<String>,
}

impl Wanted {
    fn parse(body: &[u8], limits: &json::Limits) -> Result<Self, Invalid> {
        let members = Members::parse(body, limits)?;
        const KNOWN: [&str; 3] = ["id", "adminName", "adminPassword"];
        if let Some(unknown) = members.iter().find(|member| !KNOWN.contains(&&*member.name)) {
            return Err(Invalid::new(&unknown.name, "is not a known member of a tenant"));
        }
        let text = |name: &str| members.get(name).map(|raw| json::string(raw, name)).transpose();
        let missing = || Invalid::new("", "Following mandatory fields should be included: id");
        let tenant = text("id")?.ok_or_else(missing)?;
        check_tenant_name(&tenant)?;
        Ok(Self {
            tenant: Tenant::from(&*tenant),
            admin: text("adminName")?.map_or_else(|| ADMIN.to_owned(), Cow::into_owned),
            password: text("adminPassword")?.map(Cow::into_owned),
        })
    }
}

/// Tenants are the business of the gateway's own tenant.
fn operator(caller: &Caller) -> Result<(), ApiError> {
    let principal = caller.require(ROLE)?;
    if principal.tenant.as_str() == DEFAULT_TENANT { Ok(()) } else { Err(AuthError::NotAllowed(ROLE).into()) }
}

pub(super) fn tenants(app: &App) -> Tenants<'_> {
    Tenants { store: &app.store, limit: app.config.limits.tenants }
}

fn render(caller: &Caller, row: &TenantRow) -> Value {
    json!({
        "id": row.name.as_str(),
        "self": format!("{}{PATH}/{}", caller.base_url, row.name),
        "creationTime": time::text(row.created_ms),
    })
}
