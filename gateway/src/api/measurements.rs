//! `/measurement/measurements` (Cumulocity OpenAPI).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use hyper::{HeaderMap, Uri};

use super::objects::Family;
use super::{ApiError, App, AppState, Caller, Id};
use crate::auth::Role;
use crate::message::{Api, Message};
use crate::platform::list::Filter;
use crate::platform::measurement::{self, Measurement};

const FAMILY: Family = Family {
    api: Api::Measurements,
    path: "/measurement/measurements",
    names: measurement::NAMES,
    read: Role::MeasurementRead,
    admin: Role::MeasurementAdmin,
    error: "measurement",
    filter: measurement::filter,
    parameters: measurement::PARAMETERS,
    delete: "DELETE FROM measurement WHERE id IN (SELECT value FROM json_each(?))",
};

/// POST: one measurement, or many at once.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let render = |id, new, _| {
        let mut body = Vec::new();
        Measurement::created(id, new).render(&caller.base_url, &mut body);
        body.into()
    };
    FAMILY.create(&app, &caller, request, measurement::parse, render, |change| &mut change.measurements).await
}

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let render = |one: &Measurement, out: &mut Vec<u8>| one.render(&caller.base_url, out);
    FAMILY.get(&app, &caller, id, &headers, render).await
}

/// GET of a page.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let render = |one: &Measurement, out: &mut Vec<u8>| one.render(&caller.base_url, out);
    FAMILY.list(&app, &caller, &uri, &headers, render).await
}

/// The newest, for those who try plugins on them.
pub(super) async fn newest(
    app: &App,
    caller: &Caller,
    filter: Filter,
    bounds: (u32, usize),
) -> Result<Vec<Arc<Message>>, ApiError> {
    let render = |one: &Measurement, out: &mut Vec<u8>| one.render(&caller.base_url, out);
    FAMILY.newest(app, &caller.principal.tenant, filter, bounds, render).await
}

/// DELETE of one.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    FAMILY.delete::<Measurement>(&app, &caller, id, &headers).await
}

/// DELETE of all that the parameters select.
pub(super) async fn delete_all(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    FAMILY.delete_all::<Measurement>(&app, &caller, &uri, &headers).await
}
