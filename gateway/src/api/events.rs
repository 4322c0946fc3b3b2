//! `/event/events` (Cumulocity OpenAPI).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};

use super::objects::Family;
use super::{ApiError, App, AppState, Caller, Id, Reply, json_limits, read_body};
use crate::auth::Role;
use crate::message::{Action, Api, Message};
use crate::pipeline::Request as LineRequest;
use crate::platform::event::{self, Event};
use crate::platform::list::Filter;
use crate::store::{Statement, Value};

const FAMILY: Family = Family {
    api: Api::Events,
    path: "/event/events",
    names: event::NAMES,
    read: Role::EventRead,
    admin: Role::EventAdmin,
    error: "event",
    filter: event::filter,
    parameters: event::PARAMETERS,
    delete: "DELETE FROM event WHERE id IN (SELECT value FROM json_each(?))",
};

/// POST: one event, or many at once.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let render = |id, new, now_ms| rendered(&app, &caller, &Event::created(id, new, now_ms));
    FAMILY.create(&app, &caller, request, event::parse, render, |change| &mut change.events).await
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

/// PUT: text and fragments; null removes a fragment.
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
    let before: Event = FAMILY.load(&app, tenant, id).await?;
    let reply = Reply { status: StatusCode::OK, location: None, media: FAMILY.names.one };
    let Some(after) = before.merge(&patch, app.clock.now_ms(), &json_limits(&app.config), limit)? else {
        return Ok(reply.respond(&headers, || rendered(&app, &caller, &before).to_vec()));
    };
    let body = rendered(&app, &caller, &after);
    let mut request = LineRequest::default();
    if mode.notifies() {
        let kind = Some(after.kind.clone());
        request.messages.push(FAMILY.message(tenant, Action::Update, after.source, kind, after.time(), body.clone()));
    }
    if mode.stores() {
        request.change.statements.push(Statement {
            sql: "UPDATE event SET updated = ?, body = ? WHERE id = ?",
            values: vec![
                Value::Int(after.updated_ms),
                Value::Blob(after.body.clone()),
                Value::Int(after.id.cast_signed()),
            ],
        });
    }
    app.pipeline.submit(tenant, request).await?;
    Ok(reply.respond(&headers, || body.to_vec()))
}

/// DELETE of one.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    FAMILY.delete::<Event>(&app, &caller, id, &headers).await
}

/// DELETE of all that the parameters select.
pub(super) async fn delete_all(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    FAMILY.delete_all::<Event>(&app, &caller, &uri, &headers).await
}

fn render(app: &App, caller: &Caller, event: &Event, out: &mut Vec<u8>) {
    event.render(app.sources.name(event.source).as_deref(), &caller.base_url, out);
}

fn rendered(app: &App, caller: &Caller, event: &Event) -> Bytes {
    let mut body = Vec::new();
    render(app, caller, event, &mut body);
    body.into()
}
