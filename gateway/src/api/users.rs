//! `/user`: the users of the caller's tenant, the caller, and the roles that there are (Cumulocity OpenAPI, "Users").
//!
//! Of a user's members the gateway keeps those of [`UserFields::parse`]. A password is never shown.

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};
use serde_json::{Value, json};

use super::{
    ApiError, App, AppState, Caller, Names, Reply, found, json_limits, listed, path_segment, query, read_body,
};
use crate::accounts::{Account, AccountError, UserFields, Users};
use crate::auth::{AuthError, Role, Roles};
use crate::json::Invalid;
use crate::message::Tenant;
use crate::platform::page::PageRequest;
use crate::store::Statement;
use crate::writer::Change;

const ROLE: Role = Role::UserManagementAdmin;

/// POST of `/user/{tenant}/users`.
pub(super) async fn create(
    State(app): AppState,
    caller: Caller,
    Names(tenant): Names<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let tenant = own(&caller, &tenant)?;
    let (headers, mut fields) = read(&app, tenant, request).await?;
    let missing: Vec<_> = [("userName", fields.name.is_none()), ("password", fields.password.is_none())]
        .into_iter()
        .filter_map(|(name, missing)| missing.then_some(name))
        .collect();
    let (Some(name), Some(password)) = (fields.name.take(), fields.password.take()) else {
        let message = format!("Following mandatory fields should be included: {}", missing.join(","));
        return Err(Invalid::new("", message).into());
    };
    let account = Account::new(tenant, name, app.auth.hash(password).await?, Roles::NONE)?.with(fields);
    let _held = app.accounts.lock(tenant.clone()).await;
    let statements = users(&app, tenant).add(&account).await?;
    store(&app, account.clone(), statements).await?;
    let location = Some(link(&caller, &account));
    let reply = Reply { status: StatusCode::CREATED, location, media: "user" };
    Ok(reply.respond(&headers, || render(&caller, &account).to_string().into_bytes()))
}

/// GET of a page of `/user/{tenant}/users`.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    Names(tenant): Names<String>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = own(&caller, &tenant)?;
    let query = query(&uri);
    let page = PageRequest::parse(&query)?;
    let users = users(&app, tenant);
    let shown = users.list(page.offset(), u64::from(page.size)).await?;
    let shown = shown.iter().map(|account| render(&caller, account)).collect();
    let url = format!("{}/user/{tenant}/users", caller.base_url);
    let body = listed(&url, &query, "users", page, shown, users.count().await?);
    Ok(found(&headers, "usercollection", body))
}

/// GET of `/user/{tenant}/users/{id}`, and of `/user/{tenant}/userByName/{id}`, which is the same: the id is the name.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Names((tenant, name)): Names<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = own(&caller, &tenant)?;
    let account = users(&app, tenant).get(&name).await?;
    Ok(found(&headers, "user", render(&caller, &account).to_string().into_bytes()))
}

/// PUT of `/user/{tenant}/users/{id}`: what is absent stays.
pub(super) async fn update(
    State(app): AppState,
    caller: Caller,
    Names((tenant, name)): Names<(String, String)>,
    request: Request,
) -> Result<Response, ApiError> {
    let tenant = own(&caller, &tenant)?;
    let (headers, fields) = read(&app, tenant, request).await?;
    let account = change(&app, tenant, &name, fields).await?;
    let reply = Reply { status: StatusCode::OK, location: None, media: "user" };
    Ok(reply.respond(&headers, || render(&caller, &account).to_string().into_bytes()))
}

/// DELETE of `/user/{tenant}/users/{id}`.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Names((tenant, name)): Names<(String, String)>,
) -> Result<Response, ApiError> {
    let tenant = own(&caller, &tenant)?;
    let _held = app.accounts.lock(tenant.clone()).await;
    let statements = users(&app, tenant).remove(&name).await?;
    app.writer.commit(Change { statements, ..Change::default() }).await?;
    app.auth.remove(tenant, &name);
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// GET of `/user/currentUser`: who asks, with the roles in force.
pub(super) async fn current(State(app): AppState, caller: Caller, headers: HeaderMap) -> Result<Response, ApiError> {
    let account = users(&app, &caller.principal.tenant).get(&caller.principal.user).await?;
    Ok(found(&headers, "currentuser", render_current(&caller, &account)))
}

/// PUT of `/user/currentUser`: everybody may change their own password and profile.
pub(super) async fn update_current(
    State(app): AppState,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let principal = &caller.principal;
    let (headers, fields) = read(&app, &principal.tenant, request).await?;
    if fields.roles.is_some() {
        return Err(Invalid::new("roles", "cannot be changed here").into());
    }
    let account = change(&app, &principal.tenant, &principal.user, fields).await?;
    let reply = Reply { status: StatusCode::OK, location: None, media: "currentuser" };
    Ok(reply.respond(&headers, || render_current(&caller, &account)))
}

/// GET of `/user/roles`: those that the caller's tenant can give, in one page.
pub(super) async fn roles(caller: Caller, uri: Uri, headers: HeaderMap) -> Result<Response, ApiError> {
    let query = query(&uri);
    let page = PageRequest { size: crate::platform::page::MAX_SIZE, ..PageRequest::parse(&query)? };
    let roles = Roles::all_of(&caller.principal.tenant);
    let roles: Vec<_> = roles.iter().map(|role| render_role(&caller, role)).collect();
    let total = roles.len() as u64;
    let shown = if page.current == 1 { roles } else { Vec::new() };
    let url = format!("{}/user/roles", caller.base_url);
    Ok(found(&headers, "rolecollection", listed(&url, &query, "roles", page, shown, total)))
}

/// GET of `/user/roles/{id}`.
pub(super) async fn role(caller: Caller, Names(name): Names<String>, headers: HeaderMap) -> Result<Response, ApiError> {
    let role = name.parse().map_err(|_| ApiError::not_found("user", "There is no such role."))?;
    Ok(found(&headers, "role", render_role(&caller, role).to_string().into_bytes()))
}

/// The caller's tenant, when it is the one in the path and the caller may manage its users.
fn own<'a>(caller: &'a Caller, tenant: &str) -> Result<&'a Tenant, ApiError> {
    let own = &caller.require(ROLE)?.tenant;
    if own.as_str() == tenant { Ok(own) } else { Err(AuthError::NotAllowed(ROLE).into()) }
}

fn users<'a>(app: &'a App, tenant: &'a Tenant) -> Users<'a> {
    Users { store: &app.store, tenant, limit: app.config.limits.users_per_tenant }
}

async fn read(app: &App, tenant: &Tenant, request: Request) -> Result<(HeaderMap, UserFields), ApiError> {
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(app, &headers, body, app.config.limits.body_bytes).await?;
    let fields = UserFields::parse(&body, tenant, &json_limits(&app.config))?;
    Ok((headers, fields))
}

/// Changes the user `name` and returns it as it is then.
async fn change(app: &App, tenant: &Tenant, name: &str, mut fields: UserFields) -> Result<Account, ApiError> {
    if fields.name.as_deref().is_some_and(|new| new != name) {
        return Err(Invalid::new("userName", "cannot be changed").into());
    }
    let hash = match fields.password.take() {
        Some(password) => Some(app.auth.hash(password).await?),
        None => None,
    };
    let _held = app.accounts.lock(tenant.clone()).await;
    let users = users(app, tenant);
    let mut account = users.get(name).await?.with(fields);
    account.row.hash = hash.unwrap_or(account.row.hash);
    let statements = users.change(&account).await?;
    store(app, account.clone(), statements).await?;
    Ok(account)
}

/// Commits, and puts the user in force.
async fn store(app: &App, account: Account, statements: Vec<Statement>) -> Result<(), ApiError> {
    app.writer.commit(Change { statements, ..Change::default() }).await?;
    app.auth.put(account.row).expect("invariant: the name was checked and the hash is fresh or was loaded");
    Ok(())
}

fn link(caller: &Caller, account: &Account) -> String {
    format!("{}/user/{}/users/{}", caller.base_url, account.row.tenant, path_segment(&account.row.name))
}

fn render(caller: &Caller, account: &Account) -> Value {
    let references: Vec<_> = account.row.roles.iter().map(|role| json!({"role": render_role(caller, role)})).collect();
    let mut user = render_person(caller, account);
    user["roles"] = json!({"references": references});
    user["groups"] = json!({"references": []});
    user
}

fn render_current(caller: &Caller, account: &Account) -> Vec<u8> {
    let mut user = render_person(caller, account);
    user["self"] = format!("{}/user/currentUser", caller.base_url).into();
    user["effectiveRoles"] = account.row.roles.iter().map(|role| render_role(caller, role)).collect();
    user.to_string().into_bytes()
}

/// What both views of a user have in common.
fn render_person(caller: &Caller, account: &Account) -> Value {
    let name = &account.row.name;
    let mut user = json!({
        "id": name,
        "self": link(caller, account),
        "userName": name,
        "enabled": true,
        "shouldResetPassword": false,
    });
    for (member, text) in &account.profile {
        user[member] = text.as_str().into();
    }
    user
}

fn render_role(caller: &Caller, role: Role) -> Value {
    json!({"id": role.as_str(), "name": role.as_str(), "self": format!("{}/user/roles/{role}", caller.base_url)})
}

impl From<AccountError> for ApiError {
    fn from(error: AccountError) -> Self {
        let message = error.to_string();
        match error {
            AccountError::Store(error) => error.into(),
            AccountError::Taken(_) => Self::new(StatusCode::CONFLICT, "general/conflict", message),
            AccountError::Missing(what) => Self::not_found(what, message),
            AccountError::Invalid(_) | AccountError::LastAdministrator | AccountError::TooMany { .. } => {
                Self::unprocessable(message)
            }
        }
    }
}
