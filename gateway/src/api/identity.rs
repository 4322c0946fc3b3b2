//! `/identity` (Cumulocity OpenAPI): external ids of managed objects.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode};

use super::inventory::missing as missing_object;
use super::{ApiError, App, AppState, Caller, Id, Reply, found, json_limits, read_body};
use crate::auth::Role;
use crate::message::Tenant;
use crate::platform::identity::{self, ExternalId};
use crate::store::{Statement, Value};
use crate::writer::Change;

/// POST: binds an external id to an object.
pub(super) async fn create(
    State(app): AppState,
    caller: Caller,
    Id(object): Id,
    request: Request,
) -> Result<Response, ApiError> {
    caller.require(Role::IdentityAdmin)?;
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let id = identity::parse(&body, &json_limits(&app.config))?;
    let object = object.ok_or_else(missing_object)?;
    bind(&app, &caller.principal.tenant, object, &id).await?;
    let mut location = caller.base_url.clone().into_bytes();
    id.push_path(&mut location);
    let location = String::from_utf8(location).ok();
    Ok(Reply { status: StatusCode::CREATED, location, media: "externalid" }.respond(&headers, || {
        let mut body = Vec::new();
        id.render(object, &caller.base_url, &mut body);
        body
    }))
}

async fn bind(app: &App, tenant: &Tenant, object: u64, id: &ExternalId) -> Result<(), ApiError> {
    let _object = app.objects.lock(object).await;
    let _id = app.external_ids.lock((tenant.clone(), id.clone())).await;
    if !app.sources.exists(tenant, object) {
        return Err(missing_object());
    }
    if identity::find(&app.store, tenant.as_str(), id).await?.is_some() {
        let message = "Identity already bound to a different Global ID.";
        return Err(ApiError::new(StatusCode::CONFLICT, "identity/Duplicate", message));
    }
    let limit = app.config.limits.external_ids_per_object;
    if identity::of_object(&app.store, object).await?.len() >= limit {
        return Err(ApiError::unprocessable(format!("A managed object may have at most {limit} external ids.")));
    }
    let statements = vec![binding(tenant, object, id)];
    app.writer.commit(Change { statements, ..Change::default() }).await?;
    Ok(())
}

/// Stores a new external id.
pub(super) fn binding(tenant: &Tenant, object: u64, id: &ExternalId) -> Statement {
    let mut values = key(tenant, id);
    values.push(Value::Int(object.cast_signed()));
    Statement { sql: "INSERT INTO external_id(tenant, type, value, object) VALUES (?, ?, ?, ?)", values }
}

/// GET of all external ids of an object.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    Id(object): Id,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::IdentityRead)?.tenant;
    let object = object.filter(|object| app.sources.exists(tenant, *object)).ok_or_else(missing_object)?;
    let ids = identity::of_object(&app.store, object).await?;
    let mut body = b"{\"externalIds\":[".to_vec();
    for (at, id) in ids.iter().enumerate() {
        if at > 0 {
            body.push(b',');
        }
        id.render(object, &caller.base_url, &mut body);
    }
    let url = format!("{}/identity/globalIds/{object}/externalIds", caller.base_url);
    body.extend_from_slice(b"],\"self\":");
    crate::json::write_string(&url, &mut body);
    body.push(b'}');
    Ok(found(&headers, "externalidcollection", body))
}

/// The external id that a path names.
type Named = Result<Path<(Box<str>, Box<str>)>, PathRejection>;

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    named: Named,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::IdentityRead)?.tenant;
    let id = external_id(named)?;
    let object = identity::find(&app.store, tenant.as_str(), &id).await?.ok_or_else(missing)?;
    let mut body = Vec::new();
    id.render(object, &caller.base_url, &mut body);
    Ok(found(&headers, "externalid", body))
}

/// DELETE: the object stays.
pub(super) async fn delete(State(app): AppState, caller: Caller, named: Named) -> Result<Response, ApiError> {
    caller.require(Role::IdentityAdmin)?;
    let id = external_id(named)?;
    let tenant = &caller.principal.tenant;
    let _id = app.external_ids.lock((tenant.clone(), id.clone())).await;
    identity::find(&app.store, tenant.as_str(), &id).await?.ok_or_else(missing)?;
    let statement = Statement {
        sql: "DELETE FROM external_id WHERE tenant = ? AND type = ? AND value = ?",
        values: key(tenant, &id),
    };
    app.writer.commit(Change { statements: vec![statement], ..Change::default() }).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// A path that is no text names nothing.
fn external_id(named: Named) -> Result<ExternalId, ApiError> {
    let Path((kind, value)) = named.map_err(|_| missing())?;
    Ok(ExternalId { kind, value })
}

fn key(tenant: &Tenant, id: &ExternalId) -> Vec<Value> {
    [tenant.as_str(), &id.kind, &id.value].map(|text| Value::Text(text.to_owned())).into()
}

fn missing() -> ApiError {
    ApiError::not_found("identity", "External ID not found")
}
