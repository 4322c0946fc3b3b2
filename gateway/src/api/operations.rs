//! `/devicecontrol/operations` (Cumulocity OpenAPI).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};

use super::objects::{Family, unknown_source};
use super::{ApiError, App, AppState, Caller, Id, Reply, json_limits, read_body};
use crate::auth::Role;
use crate::message::{Action, Api, Message, Tenant};
use crate::pipeline::Request as LineRequest;
use crate::platform::ProcessingMode;
use crate::platform::list::Filter;
use crate::platform::operation::{self, Operation};
use crate::store::{Statement, Value};
use crate::time;

const FAMILY: Family = Family {
    api: Api::Operations,
    path: "/devicecontrol/operations",
    names: operation::NAMES,
    read: Role::DeviceControlRead,
    admin: Role::DeviceControlAdmin,
    error: "devicecontrol",
    filter: operation::filter,
    parameters: operation::PARAMETERS,
    delete: "DELETE FROM operation WHERE id IN (SELECT value FROM json_each(?))",
};

/// POST.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let tenant = &caller.require(FAMILY.admin)?.tenant;
    let (Parts { headers, .. }, body) = request.into_parts();
    let mode = FAMILY.mode(&headers)?;
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let id = app.ids.take(1, &app.writer).await?;
    let operation = operation::parse(&body, id, app.clock.now_ms(), &json_limits(&app.config))?;
    if !app.sources.exists(tenant, operation.device) {
        return Err(unknown_source("deviceId", operation.device));
    }
    let statement = Statement {
        sql: "INSERT INTO operation(id, tenant, source, type, time, status, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
        values: vec![
            Value::Int(id.cast_signed()),
            Value::Text(tenant.to_string()),
            Value::Int(operation.device.cast_signed()),
            kind(&operation),
            Value::Int(operation.created_ms),
            Value::Text(operation.status.to_string()),
            Value::Blob(operation.body.clone()),
        ],
    };
    let body = rendered(&app, &caller, &operation);
    submit(&app, tenant, mode, &operation, Action::Create, body.clone(), statement).await?;
    let location = mode.stores().then(|| format!("{}{}/{id}", caller.base_url, FAMILY.path));
    let reply = Reply { status: StatusCode::CREATED, location, media: FAMILY.names.one };
    Ok(reply.respond(&headers, || body.to_vec()))
}

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    FAMILY.get(&app, &caller, id, &headers, |one, out| render(&app, &caller, one, out)).await
}

/// GET of a page.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    FAMILY.list(&app, &caller, &uri, &headers, |one, out| render(&app, &caller, one, out)).await
}

/// The newest, for those who try plugins on them.
pub(super) async fn newest(
    app: &App,
    caller: &Caller,
    filter: Filter,
    bounds: (u32, usize),
) -> Result<Vec<Arc<Message>>, ApiError> {
    FAMILY.newest(app, &caller.principal.tenant, filter, bounds, |one, out| render(app, caller, one, out)).await
}

/// PUT of the status, and of what the device has to say to it.
pub(super) async fn update(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    request: Request,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(FAMILY.admin)?.tenant;
    let (Parts { headers, .. }, body) = request.into_parts();
    let mode = FAMILY.mode(&headers)?;
    let limit = app.config.limits.body_bytes;
    let patch = read_body(&app, &headers, body, limit).await?;
    let _held = app.objects.lock(FAMILY.id(id)?).await;
    let before: Operation = FAMILY.load(&app, tenant, id).await?;
    let after = before.merge(&patch, &json_limits(&app.config), limit)?;
    let statement = Statement {
        sql: "UPDATE operation SET type = ?, status = ?, body = ? WHERE id = ?",
        values: vec![
            kind(&after),
            Value::Text(after.status.to_string()),
            Value::Blob(after.body.clone()),
            Value::Int(after.id.cast_signed()),
        ],
    };
    let body = rendered(&app, &caller, &after);
    submit(&app, tenant, mode, &after, Action::Update, body.clone(), statement).await?;
    let reply = Reply { status: StatusCode::OK, location: None, media: FAMILY.names.one };
    Ok(reply.respond(&headers, || body.to_vec()))
}

/// DELETE of all that the parameters select.
pub(super) async fn delete_all(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    FAMILY.delete_all::<Operation>(&app, &caller, &uri, &headers).await
}

async fn submit(
    app: &App,
    tenant: &Tenant,
    mode: ProcessingMode,
    operation: &Operation,
    action: Action,
    body: Bytes,
    statement: Statement,
) -> Result<(), ApiError> {
    let mut line = LineRequest::default();
    if mode.stores() {
        line.change.statements.push(statement);
    }
    let time = time::text(operation.created_ms).into();
    line.messages.push(FAMILY.message(tenant, action, operation.device, operation.kind.clone(), time, body));
    app.pipeline.submit(tenant, line).await.map_err(ApiError::from)
}

fn kind(operation: &Operation) -> Value {
    operation.kind.as_deref().map_or(Value::Null, |kind| Value::Text(kind.to_owned()))
}

fn render(app: &App, caller: &Caller, operation: &Operation, out: &mut Vec<u8>) {
    operation.render(app.sources.name(operation.device).as_deref(), &caller.base_url, out);
}

fn rendered(app: &App, caller: &Caller, operation: &Operation) -> Bytes {
    let mut body = Vec::new();
    render(app, caller, operation, &mut body);
    body.into()
}
