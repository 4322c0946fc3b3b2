//! `/measurement/measurements` (Cumulocity OpenAPI).

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};

use super::{ApiError, App, AppState, Caller, Id, Reply, found, json_limits, processing_mode, query, read_body};
use crate::auth::{Principal, Role};
use crate::message::{Action, Api, Message};
use crate::pipeline::Request as LineRequest;
use crate::platform::ProcessingMode;
use crate::platform::measurement::{self, Filter, NewMeasurement, Posted};
use crate::platform::page::{Envelope, MAX_BYTES, PageRequest};
use crate::store::MeasurementRow;

const PATH: &str = "/measurement/measurements";

/// POST: one measurement, or many at once.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let principal = caller.require(Role::MeasurementAdmin)?;
    let (Parts { headers, .. }, body) = request.into_parts();
    let mode = processing_mode(&headers)?;
    let limits = &app.config.limits;
    let body = read_body(&app, &headers, body, limits.bulk_bytes).await?;
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    match measurement::parse_posted(content_type, &body, &json_limits(&app.config))? {
        Posted::One(_) if body.len() > limits.body_bytes => {
            Err(ApiError::too_large(format!("A measurement must have at most {} bytes.", limits.body_bytes)))
        }
        Posted::One(new) => {
            let made = carry_out(&app, &caller, principal, mode, vec![new]).await?;
            let (id, body) = &made[0];
            // Nothing can be found under the URL of what was not stored.
            let location = mode.stores().then(|| format!("{}{PATH}/{id}", caller.base_url));
            Ok(Reply { status: StatusCode::CREATED, location, media: "measurement" }
                .respond(&headers, || body.to_vec()))
        }
        Posted::Many(new) => {
            let made = carry_out(&app, &caller, principal, mode, new).await?;
            let reply = Reply { status: StatusCode::CREATED, location: None, media: "measurementcollection" };
            Ok(reply.respond(&headers, || collection(&made)))
        }
    }
}

/// Stores and forwards `new` as `mode` says, all or nothing. Returns ids and bodies.
async fn carry_out(
    app: &Arc<App>,
    caller: &Caller,
    principal: &Principal,
    mode: ProcessingMode,
    new: Vec<NewMeasurement>,
) -> Result<Vec<(u64, Bytes)>, ApiError> {
    for (at, one) in new.iter().enumerate() {
        if !app.sources.exists(&principal.tenant, one.source) {
            let field = if new.len() == 1 { "source.id".to_owned() } else { format!("measurements[{at}].source.id") };
            return Err(ApiError::unprocessable(format!("{field}: there is no managed object '{}'", one.source)));
        }
    }
    let first = app.ids.take(new.len() as u64, &app.writer).await?;
    let mut request = LineRequest::default();
    let mut made = Vec::with_capacity(new.len());
    for (id, one) in (first..).zip(new) {
        let mut body = Vec::with_capacity(one.rest.len() + 192);
        measurement::render(id, one.source, &caller.base_url, &one.rest, &mut body);
        let body = Bytes::from(body);
        if mode.notifies() {
            request.messages.push(Arc::new(Message {
                tenant: principal.tenant.clone(),
                api: Api::Measurements,
                action: Action::Create,
                source: one.source.to_string().as_str().into(),
                kind: Some(one.kind.clone()),
                time: one.time,
                body: body.clone(),
            }));
        }
        if mode.stores() {
            request.change.measurements.push(MeasurementRow {
                id,
                tenant: principal.tenant.clone(),
                source: one.source,
                kind: one.kind,
                time_ms: one.time_ms,
                body: one.rest,
            });
        }
        made.push((id, body));
    }
    app.pipeline.submit(&principal.tenant, request).await?;
    Ok(made)
}

fn collection(made: &[(u64, Bytes)]) -> Vec<u8> {
    let mut out = b"{\"measurements\":[".to_vec();
    for (at, (_, body)) in made.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        out.extend_from_slice(body);
    }
    out.extend_from_slice(b"]}");
    out
}

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let principal = caller.require(Role::MeasurementRead)?;
    let missing = || ApiError::not_found("measurement", "Finding measurement from database failed");
    let id = id.ok_or_else(missing)?;
    let measurement = measurement::get(&app.store, principal.tenant.as_str(), id).await?.ok_or_else(missing)?;
    let mut body = Vec::new();
    measurement.render(&caller.base_url, &mut body);
    Ok(found(&headers, "measurement", body))
}

/// GET of a page.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let principal = caller.require(Role::MeasurementRead)?;
    let query = query(&uri);
    let filter = Filter::parse(&query)?;
    let page = PageRequest::parse(&query)?;
    let mut store = app.store.acquire().await?;
    let listed = measurement::list(&mut store, principal.tenant.as_str(), &filter, &page, MAX_BYTES).await?;
    drop(store);
    let url = format!("{}{PATH}", caller.base_url);
    let envelope =
        Envelope { url: &url, query: &query, name: "measurements", page, more: listed.more, total: listed.total };
    let mut body = Vec::new();
    envelope.render(&listed.measurements, |one, out| one.render(&caller.base_url, out), &mut body);
    Ok(found(&headers, "measurementcollection", body))
}
