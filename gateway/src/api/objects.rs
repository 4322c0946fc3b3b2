//! What the APIs of measurements, events, alarms and operations have in common.

use std::sync::Arc;

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};

use super::trial::too_large;
use super::{ApiError, App, Caller, Reply, found, json_limits, list_turn, processing_mode, query, read_body};
use crate::auth::{Principal, Role};
use crate::json::{Invalid, Members};
use crate::message::{Action, Api, Message, Tenant};
use crate::pipeline::Request as LineRequest;
use crate::platform::list::{self, Filter, Stored, id_list, only_known};
use crate::platform::object::{Names, NewObject, Posted, parse_posted};
use crate::platform::page::{Envelope, MAX_BYTES, PageRequest, Query};
use crate::platform::{ProcessingMode, deletion};
use crate::samples;
use crate::store::{ObjectRow, Statement, Value};
use crate::writer::Change;

/// Objects that one commit deletes.
const CHUNK: u32 = 1000;

/// One API.
pub(super) struct Family {
    pub(super) api: Api,
    /// Of its collection.
    pub(super) path: &'static str,
    pub(super) names: Names,
    pub(super) read: Role,
    pub(super) admin: Role,
    /// First part of the identifier of its errors.
    pub(super) error: &'static str,
    /// Reads the parameters of a list request or of one to delete.
    pub(super) filter: fn(&Query<'_>) -> Result<Filter, Invalid>,
    /// The parameters of a request to delete.
    pub(super) parameters: &'static [&'static str],
    /// Deletes rows; its one value is an array of ids.
    pub(super) delete: &'static str,
}

/// The body of a POST that may hold several objects.
pub(super) struct Received<T> {
    pub(super) headers: HeaderMap,
    pub(super) mode: ProcessingMode,
    pub(super) posted: Posted<T>,
}

impl Family {
    /// 404 for an object that the tenant does not have.
    pub(super) fn missing(&self, id: Option<u64>) -> ApiError {
        let message = match (self.api, id) {
            (Api::Operations, Some(id)) => {
                format!("Finding device data from database failed : No operation for gid '{id}'!")
            }
            _ => format!("Finding {} from database failed", self.names.one),
        };
        ApiError::not_found(self.error, message)
    }

    /// The id of a path, or 404.
    pub(super) fn id(&self, id: Option<u64>) -> Result<u64, ApiError> {
        id.ok_or_else(|| self.missing(None))
    }

    /// What becomes of the objects of a request.
    pub(super) fn mode(&self, headers: &HeaderMap) -> Result<ProcessingMode, ApiError> {
        processing_mode(headers, self.api)
    }

    /// Reads a POST: one object, or many at once.
    pub(super) async fn receive<T>(
        &self,
        app: &App,
        request: Request,
        one: impl Fn(&Members<'_>) -> Result<T, Invalid>,
    ) -> Result<Received<T>, ApiError> {
        let (Parts { headers, .. }, body) = request.into_parts();
        let mode = self.mode(&headers)?;
        let limits = &app.config.limits;
        let body = read_body(app, &headers, body, limits.bulk_bytes).await?;
        let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let posted = parse_posted(content_type, &body, &json_limits(&app.config), &self.names, one)?;
        if matches!(posted, Posted::One(_)) && body.len() > limits.body_bytes {
            let message = format!("An object must have at most {} bytes.", limits.body_bytes);
            return Err(ApiError::too_large(message));
        }
        Ok(Received { headers, mode, posted })
    }

    /// POST of measurements or events: stores and forwards them as the mode says, all or nothing.
    ///
    /// `make` makes the object and its body of an id; `rows` tells where its row goes.
    pub(super) async fn create(
        &self,
        app: &Arc<App>,
        caller: &Caller,
        request: Request,
        parse: impl Fn(&Members<'_>) -> Result<NewObject, Invalid>,
        render: impl Fn(u64, NewObject, i64) -> Bytes,
        rows: impl Fn(&mut Change) -> &mut Vec<ObjectRow>,
    ) -> Result<Response, ApiError> {
        let principal = caller.require(self.admin)?;
        let Received { headers, mode, posted } = self.receive(app, request, parse).await?;
        let new = posted.as_slice();
        self.check_sources(app, principal, new.iter().map(|one| one.source))?;
        let first = app.ids.take(new.len() as u64, &app.writer).await?;
        let now_ms = app.clock.now_ms();
        let mut line = LineRequest::default();
        let mut made = Vec::with_capacity(new.len());
        for (id, one) in (first..).zip(new) {
            let body = render(id, one.clone(), now_ms);
            if mode.notifies() {
                line.messages.push(self.message(
                    &principal.tenant,
                    Action::Create,
                    one.source,
                    Some(one.kind.clone()),
                    one.time.clone(),
                    body.clone(),
                ));
            }
            if mode.stores() {
                rows(&mut line.change).push(ObjectRow {
                    id,
                    tenant: principal.tenant.clone(),
                    source: one.source,
                    kind: one.kind.clone(),
                    time_ms: one.time_ms,
                    created_ms: now_ms,
                    body: one.rest.clone(),
                });
            }
            made.push((id, body));
        }
        app.pipeline.submit(&principal.tenant, line).await?;
        Ok(self.created(caller, &headers, mode, &posted, &made))
    }

    /// Refuses objects of devices that the tenant does not have, by the name of the field.
    pub(super) fn check_sources(
        &self,
        app: &App,
        principal: &Principal,
        sources: impl ExactSizeIterator<Item = u64>,
    ) -> Result<(), ApiError> {
        let alone = sources.len() == 1;
        for (at, source) in sources.enumerate() {
            if !app.sources.exists(&principal.tenant, source) {
                let field = if alone { "source.id".to_owned() } else { format!("{}[{at}].source.id", self.names.many) };
                return Err(unknown_source(&field, source));
            }
        }
        Ok(())
    }

    /// The answer to a POST of which `made` came, ids and bodies.
    pub(super) fn created<T>(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        mode: ProcessingMode,
        posted: &Posted<T>,
        made: &[(u64, Bytes)],
    ) -> Response {
        let status = StatusCode::CREATED;
        match (posted, made) {
            (Posted::One(_), [(id, body)]) => {
                // Nothing can be found under the URL of what was not stored.
                let location = mode.stores().then(|| format!("{}{}/{id}", caller.base_url, self.path));
                Reply { status, location, media: self.names.one }.respond(headers, || body.to_vec())
            }
            _ => {
                let reply = Reply { status, location: None, media: self.names.collection };
                reply.respond(headers, || collection(self.names.many, made))
            }
        }
    }

    /// What subscriptions hear of an object.
    pub(super) fn message(
        &self,
        tenant: &Tenant,
        action: Action,
        source: u64,
        kind: Option<Box<str>>,
        time: Box<str>,
        body: Bytes,
    ) -> Arc<Message> {
        let source = source.to_string().as_str().into();
        Arc::new(Message { tenant: tenant.clone(), api: self.api, action, source, kind, time, body })
    }

    /// One object of the tenant, or 404.
    pub(super) async fn load<T: Stored>(&self, app: &App, tenant: &Tenant, id: Option<u64>) -> Result<T, ApiError> {
        let id = self.id(id)?;
        list::get(&app.store, tenant.as_str(), id).await?.ok_or_else(|| self.missing(Some(id)))
    }

    /// GET of one.
    pub(super) async fn get<T: Stored>(
        &self,
        app: &App,
        caller: &Caller,
        id: Option<u64>,
        headers: &HeaderMap,
        render: impl Fn(&T, &mut Vec<u8>),
    ) -> Result<Response, ApiError> {
        let principal = caller.require(self.read)?;
        let object = self.load(app, &principal.tenant, id).await?;
        let mut body = Vec::new();
        render(&object, &mut body);
        Ok(found(headers, self.names.one, body))
    }

    /// GET of a page.
    pub(super) async fn list<T: Stored>(
        &self,
        app: &App,
        caller: &Caller,
        uri: &Uri,
        headers: &HeaderMap,
        render: impl Fn(&T, &mut Vec<u8>),
    ) -> Result<Response, ApiError> {
        let principal = caller.require(self.read)?;
        let query = query(uri);
        let filter = self.selects(app, &query)?;
        let page = PageRequest::parse(&query)?;
        let mut store = list_turn(app).await?;
        let listed = list::list(&mut store, principal.tenant.as_str(), &filter, &page, MAX_BYTES).await?;
        drop(store);
        let url = format!("{}{}", caller.base_url, self.path);
        let (more, total) = (listed.more, listed.total);
        let envelope = Envelope { url: &url, query: &query, name: self.names.many, page, more, total };
        let mut body = Vec::new();
        envelope.render(&listed.objects, render, &mut body);
        Ok(found(headers, self.names.collection, body))
    }

    /// The newest of what `filter` selects, newest first, as subscriptions heard of it when it was new. All of it together has at most
    /// `max_bytes`.
    pub(super) async fn newest<T: Stored>(
        &self,
        app: &App,
        tenant: &Tenant,
        filter: Filter,
        (most, max_bytes): (u32, usize),
        render: impl Fn(&T, &mut Vec<u8>),
    ) -> Result<Vec<Arc<Message>>, ApiError> {
        let filter = Filter { revert: !T::NEWEST_FIRST, ..filter };
        let page = PageRequest::first(most);
        let mut store = list_turn(app).await?;
        let listed = list::list(&mut store, tenant.as_str(), &filter, &page, max_bytes).await.map_err(too_large)?;
        drop(store);
        let message = |one: &T| {
            let mut body = Vec::new();
            render(one, &mut body);
            Ok(Arc::new(samples::of_body(tenant, self.api, Action::Create, &body)?))
        };
        listed.objects.iter().map(message).collect()
    }

    /// DELETE of one.
    pub(super) async fn delete<T: Stored>(
        &self,
        app: &App,
        caller: &Caller,
        id: Option<u64>,
        headers: &HeaderMap,
    ) -> Result<Response, ApiError> {
        let tenant = &caller.require(self.admin)?.tenant;
        let mode = self.mode(headers)?;
        let _held = app.objects.lock(self.id(id)?).await;
        let object: T = self.load(app, tenant, id).await?;
        let (id, source, kind) = object.subject();
        let mut line = LineRequest::default();
        if mode.notifies() {
            let kind = kind.map(Box::from);
            line.messages.push(self.message(tenant, Action::Delete, source, kind, "".into(), deletion(id)));
        }
        if mode.stores() {
            line.change.statements.push(self.deletion_of(&[id]));
        }
        app.pipeline.submit(tenant, line).await?;
        Ok(StatusCode::NO_CONTENT.into_response())
    }

    /// Deletes the rows of these ids.
    pub(super) fn deletion_of(&self, ids: &[u64]) -> Statement {
        Statement { sql: self.delete, values: vec![Value::Text(id_list(ids))] }
    }

    /// DELETE of all that a filter selects, without notifications; those that are made meanwhile stay.
    pub(super) async fn delete_all<T: Stored>(
        &self,
        app: &App,
        caller: &Caller,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Response, ApiError> {
        let principal = caller.require(self.admin)?;
        let mode = self.mode(headers)?;
        let filter = self.selection(app, &query(uri))?;
        let below = app.ids.take(1, &app.writer).await?;
        while mode.stores() {
            let tenant = principal.tenant.as_str();
            let mut store = list_turn(app).await?;
            let ids = list::some_ids::<T>(&mut *store, tenant, &filter, below, CHUNK).await?;
            drop(store);
            if ids.is_empty() {
                break;
            }
            app.writer.commit(Change { statements: vec![self.deletion_of(&ids)], ..Change::default() }).await?;
        }
        Ok(StatusCode::NO_CONTENT.into_response())
    }

    /// The filter of a request that changes or deletes what it selects.
    pub(super) fn selection(&self, app: &App, query: &Query<'_>) -> Result<Filter, ApiError> {
        only_known(query, self.parameters)?;
        self.selects(app, query)
    }

    /// The filter of a request that reads.
    pub(super) fn selects(&self, app: &App, query: &Query<'_>) -> Result<Filter, ApiError> {
        Ok((self.filter)(query)?.follow(&app.sources, app.config.limits.bulk_count)?)
    }
}

/// 422: the device is not there.
pub(super) fn unknown_source(field: &str, source: u64) -> ApiError {
    ApiError::unprocessable(format!("{field}: there is no managed object '{source}'"))
}

fn collection(many: &str, made: &[(u64, Bytes)]) -> Vec<u8> {
    let mut out = format!("{{\"{many}\":[").into_bytes();
    for (at, (_, body)) in made.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        out.extend_from_slice(body);
    }
    out.extend_from_slice(b"]}");
    out
}
