//! `/inventory/managedObjects` (Cumulocity OpenAPI). Children are in `children`.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};

use super::subscriptions::forget_sources;
use super::{ApiError, App, AppState, Caller, Id, Reply, found, json_limits, processing_mode, query, read_body};
use crate::auth::Role;
use crate::json::Invalid;
use crate::message::{Action, Api, Message, Tenant};
use crate::pipeline::Request as LineRequest;
use crate::platform::children::Shown;
use crate::platform::inventory::{self, ManagedObject};
use crate::platform::list::Listed;
use crate::platform::page::{Envelope, MAX_BYTES, PageRequest, flag};
use crate::platform::relation::{Kind, Relation, Side};
use crate::platform::search::{self, Bounds, Filter};
use crate::platform::{ProcessingMode, TooMany, deletion};
use crate::store::{Statement, Value};
use crate::time;
use crate::writer::Refused;

pub(super) const PATH: &str = "/inventory/managedObjects";
/// How often a deletion looks again at a hierarchy that changes meanwhile.
const LOOKS: usize = 8;

/// POST.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    caller.require(Role::InventoryAdmin).or_else(|_| caller.require(Role::InventoryCreate))?;
    let (Parts { headers, .. }, body) = request.into_parts();
    let mode = processing_mode(&headers, Api::ManagedObjects)?;
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let (object, done) = create_object(&app, &caller, mode, &body, |_| Vec::new()).await?;
    done.told?;
    Ok(created(&caller, &object, done.stored, &headers))
}

/// The answer to the POST of an object, which has no references yet. Nothing can be found under the URL of what was not stored.
pub(super) fn created(caller: &Caller, object: &ManagedObject, stored: bool, headers: &HeaderMap) -> Response {
    let location = stored.then(|| format!("{}{PATH}/{}", caller.base_url, object.id));
    Reply { status: StatusCode::CREATED, location, media: "managedobject" }
        .respond(headers, || render(object, caller).to_vec())
}

/// Stores a new object, with what `more` adds to its commit, and tells of it, as `mode` says.
pub(super) async fn create_object(
    app: &App,
    caller: &Caller,
    mode: ProcessingMode,
    body: &[u8],
    more: impl FnOnce(u64) -> Vec<Statement>,
) -> Result<(ManagedObject, Done), ApiError> {
    let principal = &caller.principal;
    let tenant = &principal.tenant;
    let new = inventory::parse(body, &principal.user, &json_limits(&app.config))?;
    let limit = app.config.limits.objects_per_tenant;
    if app.sources.counts(tenant).objects >= limit {
        return Err(ApiError::unprocessable(format!("A tenant may have at most {limit} managed objects.")));
    }
    let id = app.ids.take(1, &app.writer).await?;
    let object = new.created(id, app.clock.now_ms());
    let mut statements = vec![insertion(tenant, &object)];
    statements.extend(more(id));
    let messages = vec![message(tenant, &object, Action::Create, render(&object, caller))];
    let done = submit(app, tenant, mode, messages, statements).await?;
    if done.stored {
        app.sources.insert(tenant, id, object.name().as_deref());
    }
    Ok((object, done))
}

/// GET of a page, filtered by the parameters of [`Filter`].
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::InventoryRead)?.tenant;
    let query = query(&uri);
    let filter = Filter::parse(&query, &app.sources).map_err(|error| invalid_data(&error))?;
    let page = PageRequest::parse(&query)?;
    let shown = Shown::parse(&query)?;
    let listed = search::list(&app.store, tenant.as_str(), &filter, &page, &Bounds::default()).await?;
    let url = format!("{}{PATH}", caller.base_url);
    let envelope =
        Envelope { url: &url, query: &query, name: "managedObjects", page, more: listed.more, total: listed.total };
    let push = |object: &ManagedObject, out: &mut Vec<u8>| push_object(&app, &caller, shown, object, out);
    Ok(found(&headers, "managedobjectcollection", rendered_page(&envelope, &listed, push)?))
}

/// GET of the number of those that the parameters of [`Filter`] select.
pub(super) async fn count(State(app): AppState, caller: Caller, uri: Uri) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::InventoryRead)?.tenant;
    let filter = Filter::parse(&query(&uri), &app.sources).map_err(|error| invalid_data(&error))?;
    let page = PageRequest { current: 1, size: 1, with_total_pages: false, with_total_elements: true };
    let listed = search::list(&app.store, tenant.as_str(), &filter, &page, &Bounds::default()).await?;
    let total = listed.total.unwrap_or_default();
    Ok(([(CONTENT_TYPE, "text/plain")], total.to_string()).into_response())
}

/// The answer to a list request; with references, which no stored size tells of, it may be too large.
pub(super) fn rendered_page(
    envelope: &Envelope<'_>,
    listed: &Listed<ManagedObject>,
    push: impl Fn(&ManagedObject, &mut Vec<u8>),
) -> Result<Vec<u8>, ApiError> {
    let mut elements = Vec::new();
    let mut bytes = 0;
    for object in &listed.objects {
        let mut element = Vec::new();
        push(object, &mut element);
        bytes += element.len();
        if bytes > 2 * MAX_BYTES {
            return Err(ApiError::unprocessable(
                "pageSize: the page is too large, ask for a smaller one or less of it",
            ));
        }
        elements.push(element);
    }
    let mut body = Vec::with_capacity(bytes);
    envelope.render(&elements, |element, out| out.extend_from_slice(element), &mut body);
    Ok(body)
}

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::InventoryRead)?.tenant;
    let shown = Shown::parse(&query(&uri))?;
    let object = load(&app, tenant, id).await?;
    let mut body = Vec::new();
    push_object(&app, &caller, shown, &object, &mut body);
    Ok(found(&headers, "managedobject", body))
}

/// PUT: merges; null removes a member.
pub(super) async fn update(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    request: Request,
) -> Result<Response, ApiError> {
    caller.require(Role::InventoryAdmin)?;
    let (Parts { headers, .. }, body) = request.into_parts();
    let mode = processing_mode(&headers, Api::ManagedObjects)?;
    let limit = app.config.limits.body_bytes;
    let patch = read_body(&app, &headers, body, limit).await?;
    let tenant = &caller.principal.tenant;
    let _held = app.objects.lock(id.ok_or_else(missing)?).await;
    let before = load(&app, tenant, id).await?;
    let reply = Reply { status: StatusCode::OK, location: None, media: "managedobject" };
    let Some(after) = before.merge(&patch, app.clock.now_ms(), &json_limits(&app.config), limit)? else {
        // A heartbeat changes nothing, and is answered with nothing but the id.
        return Ok(reply.respond(&headers, || deletion(before.id).to_vec()));
    };
    let messages = vec![message(tenant, &after, Action::Update, render(&after, &caller))];
    let done = submit(&app, tenant, mode, messages, vec![replacement(&after)]).await?;
    if done.stored {
        app.sources.insert(tenant, after.id, after.name().as_deref());
    }
    done.told?;
    Ok(reply.respond(&headers, || {
        let mut body = Vec::new();
        push_object(&app, &caller, Shown::default(), &after, &mut body);
        body
    }))
}

/// DELETE; what hangs on the object (subscriptions, links, external ids) goes with it, in one commit.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    Id(id): Id,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    caller.require(Role::InventoryAdmin)?;
    let mode = processing_mode(&headers, Api::ManagedObjects)?;
    let query = query(&uri);
    let wish = Wish { cascade: flag(&query, "cascade")?, force: flag(&query, "forceCascade")? };
    // Devices have no users of their own here, so none is left behind.
    flag(&query, "withDeviceUser")?;
    let tenant = &caller.principal.tenant;
    let id = id.ok_or_else(missing)?;
    let mut seen = BTreeSet::from([id]);
    for _ in 0..LOOKS {
        let _held = app.objects.lock_all(seen.clone()).await;
        let doomed = doomed(&app, tenant, id, wish).await?;
        // Links change only under the locks of both ends, so a hierarchy whose objects are all held stays as it is.
        if doomed.is_subset(&seen) {
            delete_objects(&app, tenant, mode, id, &doomed).await?;
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
        seen = doomed;
    }
    Err(ApiError::busy("The hierarchy is being changed. Try again in a second."))
}

/// What of a hierarchy a DELETE asks for.
#[derive(Clone, Copy)]
struct Wish {
    /// `cascade`: all of it, if it is that of a device or a group.
    cascade: bool,
    /// `forceCascade`: all of it.
    force: bool,
}

/// The objects that go: the object itself and, as the platform documents it, all of its hierarchy, the subgroups of a group
/// (whose other members stay), or nothing else.
async fn doomed(app: &App, tenant: &Tenant, id: u64, wish: Wish) -> Result<BTreeSet<u64>, ApiError> {
    let object = load(app, tenant, Some(id)).await?;
    let most = app.config.limits.bulk_count;
    let too_many =
        || ApiError::unprocessable(format!("More than {most} objects would be deleted; delete parts first."));
    let mut doomed = BTreeSet::from([id]);
    if wish.force || (wish.cascade && (object.is_device() || object.is_group())) {
        doomed.extend(app.sources.below(id, &Kind::ALL, most).map_err(|TooMany| too_many())?);
    } else if object.is_group() {
        let mut groups = vec![id];
        while let Some(group) = groups.pop() {
            let assets = Relation { side: Side::Children, kind: Kind::Assets };
            for (child, _) in app.sources.related(group, assets, 0, usize::MAX).objects {
                // One that is gone meanwhile is none.
                let child_object = inventory::get(&app.store, tenant.as_str(), child).await?;
                if child_object.is_some_and(|object| object.is_group()) && doomed.insert(child) {
                    groups.push(child);
                }
            }
            if doomed.len() > most {
                return Err(too_many());
            }
        }
    } else if app.sources.children(id) > 0 {
        let message = "Cannot delete the specified object as it has associated data.";
        return Err(ApiError::new(StatusCode::CONFLICT, "inventory/conflict", message));
    }
    Ok(doomed)
}

/// Deletes the objects, `root` last, and tells of each.
async fn delete_objects(
    app: &App,
    tenant: &Tenant,
    mode: ProcessingMode,
    root: u64,
    doomed: &BTreeSet<u64>,
) -> Result<(), ApiError> {
    let mut messages = Vec::with_capacity(doomed.len());
    for id in doomed.iter().copied().filter(|id| *id != root).chain([root]) {
        let object = load(app, tenant, Some(id)).await?;
        messages.push(message(tenant, &object, Action::Delete, deletion(id)));
    }
    let _subscribing = app.subscribing.lock().await;
    let done = submit(app, tenant, mode, messages, inventory::deletions(doomed)).await?;
    if done.stored {
        for id in doomed {
            app.sources.remove(*id);
        }
        forget_sources(app, tenant, doomed);
    }
    done.told
}

pub(super) fn missing() -> ApiError {
    ApiError::not_found("inventory", "Finding device data from database failed")
}

/// 422 in the platform's words for what a list cannot be filtered by.
pub(super) fn invalid_data(error: &Invalid) -> ApiError {
    let message = format!("Find by filter query failed : {error}");
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "inventory/Invalid Data", message)
}

pub(super) async fn load(app: &App, tenant: &Tenant, id: Option<u64>) -> Result<ManagedObject, ApiError> {
    let id = id.ok_or_else(missing)?;
    inventory::get(&app.store, tenant.as_str(), id).await?.ok_or_else(missing)
}

/// Appends the object with the references that are to be shown.
pub(super) fn push_object(app: &App, caller: &Caller, shown: Shown, object: &ManagedObject, out: &mut Vec<u8>) {
    let references = |relation: Relation, out: &mut Vec<u8>| {
        shown.push_references(&app.sources, &caller.base_url, object.id, relation, out);
    };
    object.render_with(&caller.base_url, references, out);
}

/// The object as its notifications tell of it.
pub(super) fn render(object: &ManagedObject, caller: &Caller) -> Bytes {
    let mut body = Vec::new();
    object.render(&caller.base_url, &mut body);
    body.into()
}

fn kind(object: &ManagedObject) -> Value {
    object.kind.as_deref().map_or(Value::Null, |kind| Value::Text(kind.to_owned()))
}

/// What subscriptions hear of an object.
pub(super) fn message(tenant: &Tenant, object: &ManagedObject, action: Action, body: Bytes) -> Arc<Message> {
    Arc::new(Message {
        tenant: tenant.clone(),
        api: Api::ManagedObjects,
        action,
        source: object.id.to_string().as_str().into(),
        kind: object.kind.clone(),
        time: time::text(object.updated_ms).into(),
        body,
    })
}

/// Stores a new object.
pub(super) fn insertion(tenant: &Tenant, object: &ManagedObject) -> Statement {
    Statement {
        sql: "INSERT INTO managed_object(id, tenant, type, created, updated, body) VALUES (?, ?, ?, ?, ?, ?)",
        values: vec![
            Value::Int(object.id.cast_signed()),
            Value::Text(tenant.to_string()),
            kind(object),
            Value::Int(object.created_ms),
            Value::Int(object.updated_ms),
            Value::Blob(object.body.clone()),
        ],
    }
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

/// What became of a request that was not refused as a whole.
pub(super) struct Done {
    /// The store holds it: memory has to follow, whatever the answer is.
    pub(super) stored: bool,
    /// A full backlog keeps messages back, but not what is stored (seed 000, "Message backlog quota").
    pub(super) told: Result<(), ApiError>,
}

async fn submit(
    app: &App,
    tenant: &Tenant,
    mode: ProcessingMode,
    messages: Vec<Arc<Message>>,
    statements: Vec<Statement>,
) -> Result<Done, ApiError> {
    let mut request = LineRequest::default();
    let stored = mode.stores();
    if stored {
        request.change.statements = statements;
    }
    if mode.notifies() {
        request.messages = messages;
    }
    match app.pipeline.submit(tenant, request).await {
        Ok(()) => Ok(Done { stored, told: Ok(()) }),
        Err(refused @ Refused::Rejected(_)) => Ok(Done { stored, told: Err(refused.into()) }),
        Err(refused) => Err(refused.into()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::json::Limits;

    #[test]
    fn a_page_is_bounded_with_its_references() {
        let object = inventory::parse(b"{}", "admin", &Limits::default()).unwrap().created(1, 0);
        let page = PageRequest::parse(&[]).unwrap();
        let envelope = Envelope { url: "", query: &[], name: "managedObjects", page, more: false, total: None };
        let mebibyte = |_: &ManagedObject, out: &mut Vec<u8>| out.resize(1 << 20, b'0');
        let rendered = |count| {
            let listed = Listed { objects: vec![object.clone(); count], more: false, total: None };
            rendered_page(&envelope, &listed, mebibyte)
        };
        assert!(rendered(32).unwrap().len() > 32 << 20);
        assert!(format!("{:?}", rendered(33).unwrap_err()).contains("pageSize: the page is too large"));
    }
}
