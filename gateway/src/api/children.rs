//! `/inventory/managedObjects/{id}/childDevices`, `childAssets` and `childAdditions` (Cumulocity OpenAPI, "Child operations").
//!
//! Links are told to nobody: a change of a child is none of its parent, nor the reverse. They may form cycles; whoever follows
//! them ends all the same.

use std::collections::BTreeSet;
use std::convert::Infallible;

use axum::extract::{FromRequestParts, Request, State};
use axum::response::{IntoResponse, Response};
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};

use super::inventory::{PATH, create_object, created, invalid_data, load, missing, push_object, rendered_page};
use super::{ApiError, App, AppState, Caller, Reply, found, json_limits, processing_mode, query, read_body};
use crate::auth::Role;
use crate::json::Invalid;
use crate::message::{Api, Tenant};
use crate::platform::children::{self, Posted, Shown, push_reference};
use crate::platform::inventory::ManagedObject;
use crate::platform::list::id_list;
use crate::platform::page::{Envelope, PageRequest};
use crate::platform::relation::{Kind, Relation, Side};
use crate::platform::search::{self, Bounds, Filter};
use crate::platform::{ProcessingMode, parse_id};
use crate::store::{Statement, Value};
use crate::writer::Change;

/// The path of a collection of children, or of one in it.
pub(super) struct Link {
    parent: Option<u64>,
    kind: Kind,
    child: Option<u64>,
}

impl<S: Sync> FromRequestParts<S> for Link {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        let mut segments = parts.uri.path().split('/').skip(3);
        let parent = segments.next().and_then(parse_id);
        let name = segments.next();
        let kind = Kind::ALL.into_iter().find(|kind| Some(kind.children()) == name);
        let kind = kind.expect("invariant: the router knows the names of the collections");
        Ok(Self { parent, kind, child: segments.next().and_then(parse_id) })
    }
}

impl Link {
    fn relation(&self) -> Relation {
        Relation { side: Side::Children, kind: self.kind }
    }

    /// The parent, if the tenant has it.
    fn parent(&self, app: &App, tenant: &Tenant) -> Result<u64, ApiError> {
        self.parent.filter(|parent| app.sources.exists(tenant, *parent)).ok_or_else(missing)
    }

    /// 422 in the platform's words, unless the link is there.
    fn check(&self, app: &App, parent: u64, child: u64) -> Result<(), ApiError> {
        if app.sources.is_child(self.kind, parent, child) {
            return Ok(());
        }
        let message = format!("managedObject {child} is not a child of {parent}");
        Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "inventory/Invalid Data", message))
    }

    fn push(&self, app: &App, caller: &Caller, parent: u64, shown: Shown, child: &ManagedObject, out: &mut Vec<u8>) {
        let push = |out: &mut Vec<u8>| push_object(app, caller, shown, child, out);
        push_reference(&caller.base_url, parent, self.relation(), child.id, push, out);
    }
}

/// POST: links objects that exist, or makes one and links it, in one commit. What is linked already stays.
pub(super) async fn create(
    State(app): AppState,
    caller: Caller,
    link: Link,
    request: Request,
) -> Result<Response, ApiError> {
    caller.require(Role::InventoryAdmin)?;
    let (Parts { headers, .. }, body) = request.into_parts();
    let mode = processing_mode(&headers, Api::ManagedObjects)?;
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let posted = children::parse_posted(content_type, &body, &json_limits(&app.config))?;
    let tenant = &caller.principal.tenant;
    let parent = link.parent(&app, tenant)?;
    match posted {
        Posted::Object => {
            let _held = app.objects.lock(parent).await;
            link.parent(&app, tenant)?;
            check_room(&app, tenant, parent, 1)?;
            let more = |child| vec![insert(link.kind, parent, &BTreeSet::from([child]))];
            let (child, done) = create_object(&app, &caller, mode, &body, more).await?;
            if done.stored {
                app.sources.link(link.kind, parent, child.id);
            }
            done.told?;
            Ok(created(&caller, &child, done.stored, &headers))
        }
        Posted::Reference(child) => {
            check_mode(mode)?;
            add(&app, tenant, link.kind, parent, BTreeSet::from([child])).await?;
            let child = load(&app, tenant, Some(child)).await?;
            let base = &caller.base_url;
            let location = Some(format!("{base}{PATH}/{parent}/{}/{}", link.kind.children(), child.id));
            let reply = Reply { status: StatusCode::CREATED, location, media: "managedobjectreference" };
            Ok(reply.respond(&headers, || {
                let mut body = Vec::new();
                link.push(&app, &caller, parent, Shown::default(), &child, &mut body);
                body
            }))
        }
        Posted::References(children) => {
            check_mode(mode)?;
            add(&app, tenant, link.kind, parent, children.iter().copied().collect()).await?;
            let base = &caller.base_url;
            let url = format!("{base}{PATH}/{parent}/{}", link.kind.children());
            let reply =
                Reply { status: StatusCode::CREATED, location: None, media: "managedobjectreferencecollection" };
            Ok(reply.respond(&headers, || {
                serde_json::json!({"self": url, "references": children.iter().map(|child| serde_json::json!({
                    "managedObject": {"id": child.to_string(), "self": format!("{base}{PATH}/{child}")},
                    "self": format!("{url}/{child}"),
                })).collect::<Vec<_>>()})
                .to_string()
                .into_bytes()
            }))
        }
    }
}

/// Nobody is told of a link, so nothing would be left of one that is not stored.
fn check_mode(mode: ProcessingMode) -> Result<(), ApiError> {
    if mode.stores() {
        return Ok(());
    }
    Err(Invalid::new(ProcessingMode::HEADER, "must be one that stores, since nobody is told of links").into())
}

/// Links children that exist.
async fn add(app: &App, tenant: &Tenant, kind: Kind, parent: u64, children: BTreeSet<u64>) -> Result<(), ApiError> {
    let mut ends = children.clone();
    if !ends.insert(parent) {
        return Err(ApiError::unprocessable(format!("The managed object '{parent}' cannot be its own child.")));
    }
    let _held = app.objects.lock_all(ends).await;
    if !app.sources.exists(tenant, parent) {
        return Err(missing());
    }
    if let Some(unknown) = children.iter().find(|child| !app.sources.exists(tenant, **child)) {
        let message = format!("Finding device data from database failed : there is no managed object '{unknown}'");
        return Err(ApiError::not_found("inventory", message));
    }
    let new: BTreeSet<u64> = children.into_iter().filter(|child| !app.sources.is_child(kind, parent, *child)).collect();
    check_room(app, tenant, parent, new.len())?;
    if !new.is_empty() {
        let statements = vec![insert(kind, parent, &new)];
        app.writer.commit(Change { statements, ..Change::default() }).await?;
    }
    for child in new {
        app.sources.link(kind, parent, child);
    }
    Ok(())
}

/// Whether the parent may have so many children more. Under its lock.
fn check_room(app: &App, tenant: &Tenant, parent: u64, more: usize) -> Result<(), ApiError> {
    let limits = &app.config.limits;
    if app.sources.children(parent) + more > limits.children_per_object {
        let limit = limits.children_per_object;
        return Err(ApiError::unprocessable(format!("A managed object may have at most {limit} children.")));
    }
    if app.sources.counts(tenant).links + more > limits.links_per_tenant {
        let limit = limits.links_per_tenant;
        return Err(ApiError::unprocessable(format!(
            "A tenant may have at most {limit} links between managed objects."
        )));
    }
    // The child will have these and the parent itself above it.
    if app.sources.above(parent, limits.ancestors - 1).is_err() {
        let limit = limits.ancestors;
        return Err(ApiError::unprocessable(format!("A managed object may have at most {limit} others above it.")));
    }
    Ok(())
}

fn insert(kind: Kind, parent: u64, children: &BTreeSet<u64>) -> Statement {
    Statement {
        sql: "INSERT INTO link(parent, kind, child) SELECT ?, ?, value FROM json_each(?)",
        values: ends(kind, parent, children),
    }
}

fn ends(kind: Kind, parent: u64, children: &BTreeSet<u64>) -> Vec<Value> {
    vec![Value::Int(parent.cast_signed()), Value::Int(kind as i64), Value::Text(id_list(children))]
}

/// GET of a page of children, each a whole object.
pub(super) async fn list(
    State(app): AppState,
    caller: Caller,
    link: Link,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::InventoryRead)?.tenant;
    let parent = link.parent(&app, tenant)?;
    let query = query(&uri);
    let page = PageRequest::parse(&query)?;
    let shown = Shown::parse(&query)?;
    let mut filter = Filter::parse_query(&query).map_err(|error| invalid_data(&error))?;
    let children = app.sources.related(parent, link.relation(), 0, usize::MAX);
    filter.narrow(children.objects.into_iter().map(|(child, _)| child).collect());
    let listed = search::list(&app.store, tenant.as_str(), &filter, &page, &Bounds::default()).await?;
    let url = format!("{}{PATH}/{parent}/{}", caller.base_url, link.kind.children());
    let envelope =
        Envelope { url: &url, query: &query, name: "references", page, more: listed.more, total: listed.total };
    let push = |child: &ManagedObject, out: &mut Vec<u8>| link.push(&app, &caller, parent, shown, child, out);
    Ok(found(&headers, "managedobjectreferencecollection", rendered_page(&envelope, &listed, push)?))
}

/// GET of one.
pub(super) async fn get(
    State(app): AppState,
    caller: Caller,
    link: Link,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::InventoryRead)?.tenant;
    let parent = link.parent(&app, tenant)?;
    let child = load(&app, tenant, link.child).await?;
    link.check(&app, parent, child.id)?;
    let mut body = Vec::new();
    link.push(&app, &caller, parent, Shown::default(), &child, &mut body);
    Ok(found(&headers, "managedobjectreference", body))
}

/// DELETE of one link; the child stays.
pub(super) async fn delete(
    State(app): AppState,
    caller: Caller,
    link: Link,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    caller.require(Role::InventoryAdmin)?;
    check_mode(processing_mode(&headers, Api::ManagedObjects)?)?;
    let child = link.child.ok_or_else(missing)?;
    remove(&app, &caller.principal.tenant, &link, BTreeSet::from([child])).await
}

/// DELETE of the links that the body names, all or none.
pub(super) async fn delete_many(
    State(app): AppState,
    caller: Caller,
    link: Link,
    request: Request,
) -> Result<Response, ApiError> {
    caller.require(Role::InventoryAdmin)?;
    let (Parts { headers, .. }, body) = request.into_parts();
    check_mode(processing_mode(&headers, Api::ManagedObjects)?)?;
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let children = children::parse_references(&body, &json_limits(&app.config))?;
    remove(&app, &caller.principal.tenant, &link, children.into_iter().collect()).await
}

/// Breaks links that are there.
async fn remove(app: &App, tenant: &Tenant, link: &Link, children: BTreeSet<u64>) -> Result<Response, ApiError> {
    let parent = link.parent(app, tenant)?;
    let _held = app.objects.lock_all(children.iter().copied().chain([parent]).collect()).await;
    link.parent(app, tenant)?;
    for child in &children {
        if !app.sources.exists(tenant, *child) {
            return Err(missing());
        }
        link.check(app, parent, *child)?;
    }
    let statement = Statement {
        sql: "DELETE FROM link WHERE parent = ? AND kind = ? AND child IN (SELECT value FROM json_each(?))",
        values: ends(link.kind, parent, &children),
    };
    app.writer.commit(Change { statements: vec![statement], ..Change::default() }).await?;
    for child in children {
        app.sources.unlink(link.kind, parent, child);
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}
