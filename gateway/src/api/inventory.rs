//! `/inventory/managedObjects` (Cumulocity OpenAPI).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode};

use super::subscriptions::forget_source;
use super::{ApiError, App, AppState, Caller, Id, Reply, found, json_limits, processing_mode, read_body};
use crate::auth::Role;
use crate::message::{Action, Api, Message, Tenant};
use crate::pipeline::Request as LineRequest;
use crate::platform::inventory::{self, ManagedObject};
use crate::platform::{ProcessingMode, deletion};
use crate::store::{Statement, Value};
use crate::time;

const PATH: &str = "/inventory/managedObjects";

/// POST.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let principal = caller.require(Role::InventoryAdmin).or_else(|_| caller.require(Role::InventoryCreate))?;
    let (Parts { headers, .. }, body) = request.into_parts();
    let mode = processing_mode(&headers, Api::ManagedObjects)?;
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let new = inventory::parse(&body, &principal.user, &json_limits(&app.config))?;
    let id = app.ids.take(1, &app.writer).await?;
    let object = new.created(id, app.clock.now_ms());
    let statement = Statement {
        sql: "INSERT INTO managed_object(id, tenant, type, created, updated, body) VALUES (?, ?, ?, ?, ?, ?)",
        values: vec![
            Value::Int(id.cast_signed()),
            Value::Text(principal.tenant.to_string()),
            kind(&object),
            Value::Int(object.created_ms),
            Value::Int(object.updated_ms),
            Value::Blob(object.body.clone()),
        ],
    };
    let rendered = render(&object, &caller);
    submit(&app, &principal.tenant, mode, &object, Action::Create, rendered.clone(), vec![statement]).await?;
    if mode.stores() {
        app.sources.insert(&principal.tenant, id, object.name().as_deref());
    }
    let location = mode.stores().then(|| format!("{}{PATH}/{id}", caller.base_url));
    Ok(Reply { status: StatusCode::CREATED, location, media: "managedobject" }.respond(&headers, || rendered.to_vec()))
}

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let principal = caller.require(Role::InventoryRead)?;
    let object = load(&app, &principal.tenant, id).await?;
    Ok(found(&headers, "managedobject", render(&object, &caller).to_vec()))
}

/// PUT: merges; null removes a member.
pub(super) async fn update(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    request: Request,
) -> Result<Response, ApiError> {
    let principal = caller.require(Role::InventoryAdmin)?;
    let (Parts { headers, .. }, body) = request.into_parts();
    let mode = processing_mode(&headers, Api::ManagedObjects)?;
    let limit = app.config.limits.body_bytes;
    let patch = read_body(&app, &headers, body, limit).await?;
    let _held = app.objects.lock(id.ok_or_else(missing)?).await;
    let before = load(&app, &principal.tenant, id).await?;
    let reply = Reply { status: StatusCode::OK, location: None, media: "managedobject" };
    let Some(after) = before.merge(&patch, app.clock.now_ms(), &json_limits(&app.config), limit)? else {
        // A heartbeat changes nothing, and is answered with nothing but the id.
        return Ok(reply.respond(&headers, || deletion(before.id).to_vec()));
    };
    let rendered = render(&after, &caller);
    submit(&app, &principal.tenant, mode, &after, Action::Update, rendered.clone(), vec![replacement(&after)]).await?;
    if mode.stores() {
        app.sources.insert(&principal.tenant, after.id, after.name().as_deref());
    }
    Ok(reply.respond(&headers, || rendered.to_vec()))
}

/// DELETE; the object's subscriptions go with it.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let principal = caller.require(Role::InventoryAdmin)?;
    let mode = processing_mode(&headers, Api::ManagedObjects)?;
    let _held = app.objects.lock(id.ok_or_else(missing)?).await;
    let object = load(&app, &principal.tenant, id).await?;
    let _subscribing = app.subscribing.lock().await;
    let row = || vec![Value::Int(object.id.cast_signed())];
    let statements = vec![
        Statement { sql: "DELETE FROM managed_object WHERE id = ?", values: row() },
        Statement { sql: "DELETE FROM subscription WHERE source = ?", values: row() },
    ];
    submit(&app, &principal.tenant, mode, &object, Action::Delete, deletion(object.id), statements).await?;
    if mode.stores() {
        app.sources.remove(object.id);
        forget_source(&app, &principal.tenant, object.id);
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn missing() -> ApiError {
    ApiError::not_found("inventory", "Finding device data from database failed")
}

pub(super) async fn load(app: &App, tenant: &Tenant, id: Option<u64>) -> Result<ManagedObject, ApiError> {
    let id = id.ok_or_else(missing)?;
    inventory::get(&app.store, tenant.as_str(), id).await?.ok_or_else(missing)
}

pub(super) fn render(object: &ManagedObject, caller: &Caller) -> Bytes {
    let mut body = Vec::new();
    object.render(&caller.base_url, &mut body);
    body.into()
}

fn kind(object: &ManagedObject) -> Value {
    object.kind.as_deref().map_or(Value::Null, |kind| Value::Text(kind.to_owned()))
}

async fn submit(
    app: &App,
    tenant: &Tenant,
    mode: ProcessingMode,
    object: &ManagedObject,
    action: Action,
    body: Bytes,
    statements: Vec<Statement>,
) -> Result<(), ApiError> {
    let mut request = LineRequest::default();
    if mode.stores() {
        request.change.statements = statements;
    }
    if mode.notifies() {
        request.messages.push(message(tenant, object, action, body));
    }
    app.pipeline.submit(tenant, request).await.map_err(ApiError::from)
}

/// What subscriptions hear of an object.
pub(super) fn message(tenant: &Tenant, object: &ManagedObject, action: Action, body: Bytes) -> Arc<Message> {
    let mut updated = Vec::new();
    time::write(object.updated_ms, &mut updated);
    Arc::new(Message {
        tenant: tenant.clone(),
        api: Api::ManagedObjects,
        action,
        source: object.id.to_string().as_str().into(),
        kind: object.kind.clone(),
        time: String::from_utf8_lossy(&updated).into(),
        body,
    })
}

/// Stores an object that has changed.
pub(super) fn replacement(object: &ManagedObject) -> Statement {
    Statement {
        sql: "UPDATE managed_object SET type = ?, updated = ?, body = ? WHERE id = ?",
        values: vec![
            kind(object),
            Value::Int(object.updated_ms),
            Value::Blob(object.body.clone()),
            Value::Int(object.id.cast_signed()),
        ],
    }
}
