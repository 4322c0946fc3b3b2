//! `/alarm/alarms` (Cumulocity OpenAPI).
//!
//! Whoever changes alarms holds the lock of their devices: one device has at most one open alarm of a type that occurs again, and
//! tells how many open ones it has. What changes of the device stands before the alarms in the same commit.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use hyper::{HeaderMap, StatusCode, Uri};
use tokio::sync::OwnedMutexGuard;

use super::inventory;
use super::objects::{Family, Received};
use super::{ApiError, App, AppState, Caller, Id, Reply, json_limits, list_turn, query, read_body};
use crate::auth::Role;
use crate::json::Limits;
use crate::message::{Action, Api, Message, Tenant};
use crate::pipeline::Request as LineRequest;
use crate::platform::ProcessingMode;
use crate::platform::alarm::{self, Alarm, NewAlarm, OpenAlarms};
use crate::platform::list::{self, Filter};
use crate::store::{Statement, Value};
use crate::writer::Refused;

/// Alarms that one commit of a request for many changes, and bytes of their bodies: each may also change a device.
const CHUNK: u32 = 50;
const CHUNK_BYTES: usize = 8 << 20;

const FAMILY: Family = Family {
    api: Api::Alarms,
    path: "/alarm/alarms",
    names: alarm::NAMES,
    read: Role::AlarmRead,
    admin: Role::AlarmAdmin,
    error: "alarm",
    filter: alarm::filter,
    parameters: alarm::PARAMETERS,
    delete: "DELETE FROM alarm WHERE id IN (SELECT value FROM json_each(?))",
};

/// POST: one alarm, or many at once; those that an open one of their device and type stands for are occurrences of it.
pub(super) async fn create(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let principal = caller.require(FAMILY.admin)?;
    let tenant = &principal.tenant;
    let Received { headers, mode, posted } = FAMILY.receive(&app, request, alarm::parse).await?;
    let new = posted.as_slice();
    let _held = app.objects.lock_all(new.iter().map(|one| one.object.source).collect()).await;
    FAMILY.check_sources(&app, principal, new.iter().map(|one| one.object.source))?;
    let first = app.ids.take(new.len() as u64, &app.writer).await?;
    let mut changes = Changes::new(&app, &caller, tenant, mode);
    let mut made = Vec::with_capacity(new.len());
    for (id, one) in (first..).zip(new) {
        made.push(changes.raise(id, one).await?);
    }
    changes.submit().await?;
    Ok(FAMILY.created(&caller, &headers, mode, &posted, &made))
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

/// GET of the number of those that a filter selects.
pub(super) async fn count(State(app): AppState, caller: Caller, uri: Uri) -> Result<Response, ApiError> {
    let principal = caller.require(FAMILY.read)?;
    let filter = FAMILY.selects(&app, &query(&uri))?;
    let mut store = list_turn(&app).await?;
    let count = list::count::<Alarm>(&mut *store, principal.tenant.as_str(), &filter).await?;
    Ok(([(CONTENT_TYPE, "text/plain")], count.to_string()).into_response())
}

/// PUT: text, status, severity and fragments; null removes a fragment. What changes nothing is not told to anybody.
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
    // The device never changes, the rest may until its lock is held.
    let Alarm { source, .. } = FAMILY.load(&app, tenant, id).await?;
    let _held = app.objects.lock(source).await;
    let before: Alarm = FAMILY.load(&app, tenant, id).await?;
    let after = before.merge(&patch, app.clock.now_ms(), &json_limits(&app.config), limit)?;
    let reply = Reply { status: StatusCode::OK, location: None, media: FAMILY.names.one };
    let Some(after) = after else {
        return Ok(reply.respond(&headers, || rendered(&app, &caller, &before).to_vec()));
    };
    let mut changes = Changes::new(&app, &caller, tenant, mode);
    let body = changes.change(Some(&before), after)?;
    changes.submit().await?;
    Ok(reply.respond(&headers, || body.to_vec()))
}

/// PUT of the status of all that the parameters select; there has to be one, lest all alarms change by accident.
pub(super) async fn update_all(State(app): AppState, caller: Caller, request: Request) -> Result<Response, ApiError> {
    let tenant = &caller.require(FAMILY.admin)?.tenant;
    let (Parts { headers, uri, .. }, body) = request.into_parts();
    let mode = FAMILY.mode(&headers)?;
    let query = query(&uri);
    if query.is_empty() {
        return Err(ApiError::unprocessable("At least one query parameter is needed to select alarms."));
    }
    let filter = FAMILY.selection(&app, &query)?;
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let status = alarm::parse_status(&body, &json_limits(&app.config))?;
    let mut chunks = Chunks::new(&app, tenant, filter).await?;
    while let Some(alarms) = chunks.next().await? {
        let mut changes = Changes::new(&app, &caller, tenant, mode);
        for before in alarms {
            if let Some(after) = before.with_status(status, app.clock.now_ms())? {
                changes.change(Some(&before), after)?;
            }
        }
        changes.submit().await?;
    }
    Ok(StatusCode::OK.into_response())
}

/// DELETE of all that the parameters select. Their devices change, and nothing is told of the alarms.
pub(super) async fn delete_all(
    State(app): AppState,
    caller: Caller,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(FAMILY.admin)?.tenant;
    let mode = FAMILY.mode(&headers)?;
    let filter = FAMILY.selection(&app, &query(&uri))?;
    let mut chunks = Chunks::new(&app, tenant, filter).await?;
    while mode.stores()
        && let Some(alarms) = chunks.next().await?
    {
        let mut changes = Changes::new(&app, &caller, tenant, mode);
        alarms.iter().for_each(|alarm| changes.delete(alarm));
        changes.submit().await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Raises an alarm of the gateway's own. Topics without room do not hear of it.
pub(super) async fn raise_own(app: &Arc<App>, caller: &Caller, new: &NewAlarm) -> Result<(), ApiError> {
    let _held = app.objects.lock(new.object.source).await;
    let id = app.ids.take(1, &app.writer).await?;
    let mut changes = Changes::own(app, caller);
    changes.raise(id, new).await?;
    changes.submit().await
}

/// Clears an alarm of the gateway's own, if it is open.
pub(super) async fn clear_own(app: &Arc<App>, caller: &Caller, source: u64, kind: &str) -> Result<(), ApiError> {
    let _held = app.objects.lock(source).await;
    let Some(before) = alarm::open(&app.store, source, kind).await? else { return Ok(()) };
    let mut changes = Changes::own(app, caller);
    if let Some(after) = before.with_status(alarm::CLEARED, app.clock.now_ms())? {
        changes.change(Some(&before), after)?;
    }
    changes.submit().await
}

/// All alarms that a filter selects, some at a time. Those that are raised meanwhile are not among them.
struct Chunks<'a> {
    app: &'a App,
    tenant: &'a Tenant,
    filter: Filter,
    /// Ids between these are left.
    left: (u64, u64),
    /// The locks of the devices of the chunk at hand.
    held: Vec<OwnedMutexGuard<()>>,
}

impl<'a> Chunks<'a> {
    async fn new(app: &'a App, tenant: &'a Tenant, filter: Filter) -> Result<Self, ApiError> {
        let below = app.ids.take(1, &app.writer).await?;
        Ok(Self { app, tenant, filter, left: (0, below), held: Vec::new() })
    }

    /// The next ones; the locks of their devices are held until those after them are asked for.
    async fn next(&mut self) -> Result<Option<Vec<Alarm>>, ApiError> {
        self.held.clear();
        let (store, tenant) = (&self.app.store, self.tenant.as_str());
        let found = list::ids_after::<Alarm>(store, tenant, &self.filter, self.left, CHUNK).await?;
        let Some((last, _)) = found.last() else { return Ok(None) };
        self.held = self.app.objects.lock_all(found.iter().map(|(_, source)| *source).collect()).await;
        let ids: Vec<_> = found.iter().map(|(id, _)| *id).collect();
        let mut store = store.acquire().await?;
        let alarms = list::those_of::<Alarm>(&mut store, tenant, &self.filter, &ids, CHUNK_BYTES).await?;
        let is_cut = alarms.iter().map(|alarm| alarm.body.len()).sum::<usize>() > CHUNK_BYTES;
        self.left.0 = alarms.last().filter(|_| is_cut).map_or(*last, |alarm| alarm.id);
        Ok(Some(alarms))
    }
}

/// What one commit changes of alarms and of their devices, whose locks are held.
struct Changes<'a> {
    app: &'a Arc<App>,
    caller: &'a Caller,
    tenant: &'a Tenant,
    mode: ProcessingMode,
    now_ms: i64,
    /// Open alarms by device and type, as they are after the changes; `None`: it is known that there is none.
    open: HashMap<(u64, Box<str>), Option<Alarm>>,
    /// How the numbers of open alarms change.
    devices: BTreeMap<u64, OpenAlarms>,
    rows: BTreeMap<u64, Alarm>,
    deleted: Vec<u64>,
    /// Of the bodies that are to be told.
    bytes: usize,
    line: LineRequest,
}

impl<'a> Changes<'a> {
    fn new(app: &'a Arc<App>, caller: &'a Caller, tenant: &'a Tenant, mode: ProcessingMode) -> Self {
        Self {
            app,
            caller,
            tenant,
            mode,
            now_ms: app.clock.now_ms(),
            open: HashMap::new(),
            devices: BTreeMap::new(),
            rows: BTreeMap::new(),
            deleted: Vec::new(),
            bytes: 0,
            line: LineRequest::default(),
        }
    }

    /// Changes of the gateway's own, which have to come to pass whatever topic is full.
    fn own(app: &'a Arc<App>, caller: &'a Caller) -> Self {
        let mut changes = Self::new(app, caller, &caller.principal.tenant, ProcessingMode::Persistent);
        changes.line.change.skip_full = true;
        changes
    }

    /// A new alarm, or another occurrence of an open one; returns the id and the body of what it is then.
    async fn raise(&mut self, id: u64, new: &NewAlarm) -> Result<(u64, Bytes), ApiError> {
        let key = (new.object.source, new.object.kind.clone());
        let open = match self.open.remove(&key) {
            Some(open) => open,
            // What is not stored occurs once.
            None if !self.mode.stores() => None,
            None => alarm::open(&self.app.store, key.0, &key.1).await?,
        };
        let after = match &open {
            Some(open) => open.again(&new.object, self.now_ms)?,
            None => Alarm::created(id, new.clone(), self.now_ms),
        };
        if self.mode.stores() {
            self.open.insert(key, Some(after.clone()).filter(Alarm::is_open));
        }
        let id = after.id;
        Ok((id, self.change(open.as_ref(), after)?))
    }

    /// A new or a changed alarm; returns its body.
    fn change(&mut self, before: Option<&Alarm>, after: Alarm) -> Result<Bytes, ApiError> {
        let body = rendered(self.app, self.caller, &after);
        self.take(body.len())?;
        let action = if before.is_some() { Action::Update } else { Action::Create };
        let kind = Some(after.kind.clone());
        self.line.messages.push(FAMILY.message(self.tenant, action, after.source, kind, after.time(), body.clone()));
        self.count(before, Some(&after));
        self.rows.insert(after.id, after);
        Ok(body)
    }

    /// A few bytes of a request can make many of these, by occurrences of a large alarm or by alarms of large devices.
    fn take(&mut self, bytes: usize) -> Result<(), ApiError> {
        self.bytes += bytes;
        let limits = &self.app.config.limits;
        if self.bytes > limits.fan_out_bytes {
            let (messages, bytes) = (limits.fan_out_messages, limits.fan_out_bytes);
            return Err(Refused::FanOut { messages, bytes }.into());
        }
        Ok(())
    }

    fn delete(&mut self, alarm: &Alarm) {
        self.count(Some(alarm), None);
        self.deleted.push(alarm.id);
    }

    fn count(&mut self, before: Option<&Alarm>, after: Option<&Alarm>) {
        if let Some(alarm) = after.or(before) {
            self.devices.entry(alarm.source).or_default().change(before, after);
        }
    }

    /// Commits it all.
    async fn submit(mut self) -> Result<(), ApiError> {
        if self.mode.stores() {
            let mut messages = Vec::new();
            for (device, change) in std::mem::take(&mut self.devices) {
                if change == OpenAlarms::default() {
                    continue;
                }
                let open = OpenAlarms::of(&self.app.store, device).await?.and(change);
                let before = inventory::load(self.app, self.tenant, Some(device)).await?;
                self.take(before.body.len())?;
                // A device that is as large as it may be still tells of its alarms.
                let unlimited = Limits { depth: usize::MAX, members: usize::MAX, elements: usize::MAX };
                let patch = open.patch();
                if let Some(after) = before.merge(patch.as_bytes(), self.now_ms, &unlimited, usize::MAX)?
                    && after.body != before.body
                {
                    let body = inventory::render(&after, self.caller);
                    messages.push(inventory::message(self.tenant, &after, Action::Update, body));
                    self.line.change.statements.push(inventory::replacement(&after));
                }
            }
            messages.append(&mut self.line.messages);
            self.line.messages = messages;
            if !self.rows.is_empty() {
                let rows: Vec<_> = self.rows.values().map(|alarm| alarm.row(self.tenant.as_str())).collect();
                let values = vec![Value::Text(serde_json::Value::from(rows).to_string())];
                self.line.change.statements.push(Statement { sql: alarm::REPLACE, values });
            }
            if !self.deleted.is_empty() {
                self.line.change.statements.push(FAMILY.deletion_of(&self.deleted));
            }
        }
        self.app.pipeline.submit(self.tenant, self.line).await?;
        Ok(())
    }
}

fn render(app: &App, caller: &Caller, alarm: &Alarm, out: &mut Vec<u8>) {
    alarm.render(app.sources.name(alarm.source).as_deref(), &caller.base_url, out);
}

fn rendered(app: &App, caller: &Caller, alarm: &Alarm) -> Bytes {
    let mut body = Vec::new();
    render(app, caller, alarm, &mut body);
    body.into()
}
