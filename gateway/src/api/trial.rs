//! `/tidegate/v1/plugins/{name}/versions/{version}/try`: what a plugin makes of samples, or of what is stored, without anybody noticing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use super::plugins::version_number;
use super::subscriptions::missing;
use super::{
    ApiError, App, AppState, Caller, Names, alarms, events, inventory, json_limits, measurements, operations, read_body,
};
use crate::auth::Role;
use crate::json::{self, Invalid, Limits, Members};
use crate::locks::{Place, Places};
use crate::message::{Action, Api, Message, Tenant};
use crate::platform::list::{Filter, ListError, Range};
use crate::platform::page::{MAX_BYTES, PageRequest};
use crate::platform::relation::Kind;
use crate::platform::{id_value, search};
use crate::plugin::{Plugin, PluginError};
use crate::registry::{NO_SETTINGS, RegistryError};
use crate::samples::{self, Batched, Meta, Outcome, Tally};
use crate::subscription::Subscription;
use crate::time;

/// Messages of one request.
const MESSAGES: u32 = 1000;
/// Objects that are tried where the request does not say how many.
const LAST: u32 = 100;
/// How long one request may try messages, by the wall clock; at least one is tried.
const PATIENCE: Duration = Duration::from_secs(10);
/// Requests at a time, and those of one tenant: each holds its messages and its answer in memory, some [`MAX_BYTES`] of either.
const REQUESTS: usize = 4;
const REQUESTS_OF_TENANT: usize = 2;

/// The places of requests.
pub(crate) fn places() -> Places<Tenant> {
    Places::new(REQUESTS, REQUESTS_OF_TENANT)
}

/// The answer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    plugin: String,
    /// Built-in plugins have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    world: &'static str,
    /// That there were to be tried.
    messages: usize,
    /// That were.
    tried: usize,
    /// Why not all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    truncated: Option<String>,
    verdicts: Tally,
    #[serde(skip_serializing_if = "Option::is_none")]
    batch: Option<Batched>,
    processor_microseconds: u64,
    /// The most that the instance had.
    memory_bytes: usize,
    /// One for each that was tried, in order.
    results: Vec<Box<RawValue>>,
}

#[derive(Serialize)]
struct Tried<'a> {
    message: Meta<'a>,
    #[serde(flatten)]
    outcome: Outcome,
}

/// POST of `{"settings","messages":[…]}` or `{"settings","subscription","last"}`. The version may be `latest`, which built-in plugins
/// have, too.
pub(super) async fn try_out(
    State(app): AppState,
    caller: Caller,
    Names((name, version)): Names<(String, String)>,
    request: Request,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::TidegatePluginAdmin)?.tenant;
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(&app, &headers, body, app.config.limits.bulk_bytes).await?;
    let _place = take_place(&app, tenant)?;
    let members = Members::parse(&body, &json_limits(&app.config))?;
    let messages = messages(&app, &caller, &members).await?;
    let plugin = plugin(&app, tenant, name, &version).await?;
    let report = run(&app, tenant, &plugin, members.get("settings").unwrap_or(NO_SETTINGS), messages).await?;
    let report = serde_json::to_vec(&report).expect("invariant: a report serializes");
    Ok(([(CONTENT_TYPE, "application/json")], report).into_response())
}

/// A place for one request that runs plugins.
pub(super) fn take_place<'a>(app: &'a App, tenant: &Tenant) -> Result<Place<'a, Tenant>, ApiError> {
    app.trials.take(tenant).ok_or_else(|| ApiError::busy("Too many plugins are being tried."))
}

async fn plugin(app: &App, tenant: &Tenant, name: String, version: &str) -> Result<Plugin, ApiError> {
    match app.registry.get(tenant, &name, version_number(version)?).await {
        Err(missing @ RegistryError::Missing { version: None, .. }) => match app.plugins.built_in_named(&name).await {
            Some(built_in) => Ok(built_in?),
            None => Err(missing.into()),
        },
        found => Ok(found?),
    }
}

/// What the request wants to be tried.
async fn messages(app: &App, caller: &Caller, members: &Members<'_>) -> Result<VecDeque<Arc<Message>>, ApiError> {
    for member in members {
        if !["settings", "messages", "subscription", "last"].contains(&&*member.name) {
            return Err(Invalid::new(&member.name, "is not a known member of a trial").into());
        }
    }
    match (members.get("messages"), members.get("subscription")) {
        (Some(_), Some(_)) => Err(Invalid::new("messages", "must not stand beside 'subscription'").into()),
        (None, None) => Err(Invalid::new("messages", "is missing, and so is 'subscription'").into()),
        (Some(array), None) if members.get("last").is_none() => {
            Ok(written(&caller.principal.tenant, array, &json_limits(&app.config))?)
        }
        (Some(_), None) => Err(Invalid::new("last", "is only for 'subscription'").into()),
        (None, Some(id)) => {
            // Whoever may make a subscription may see what it forwards.
            let tenant = &caller.require(Role::Notification2Admin)?.tenant;
            let id = id_value(id, "subscription")?;
            let route = app.index.get(tenant, id).ok_or_else(missing)?;
            let last = members.get("last").map_or(Ok(LAST), last)?;
            stored(app, caller, &route.subscription, last).await
        }
    }
}

fn last(raw: &str) -> Result<u32, Invalid> {
    let number = raw.parse().ok().filter(|number| (1..=MESSAGES).contains(number));
    number.ok_or_else(|| Invalid::new("last", format!("must be a number from 1 to {MESSAGES}")))
}

/// The samples in the request.
fn written(tenant: &Tenant, array: &str, limits: &Limits) -> Result<VecDeque<Arc<Message>>, Invalid> {
    let mut messages = VecDeque::new();
    json::each_element(array, |raw| {
        let at = messages.len();
        if at == MESSAGES as usize {
            return Err(Invalid::new("messages", format!("has more than {MESSAGES} elements")));
        }
        let message = Members::of(raw, limits).and_then(|sample| samples::message(tenant, &sample, limits));
        messages.push_back(Arc::new(message.map_err(|error| error.within(&format!("messages[{at}]")))?));
        Ok(())
    })
    .map_err(|error| if error.field.is_empty() { error.within("messages") } else { error })?;
    Ok(messages)
}

/// The newest objects of the operational store that the subscription selects, but for what its plugins say, in the order of time.
async fn stored(
    app: &App,
    caller: &Caller,
    subscription: &Subscription,
    last: u32,
) -> Result<VecDeque<Arc<Message>>, ApiError> {
    let mut newest = Vec::new();
    let mut left = MAX_BYTES;
    for api in Api::ALL {
        let Some(selected) = Selected::of(subscription, api) else { continue };
        let filter = || selected.filter(subscription).follow(&app.sources, app.config.limits.bulk_count);
        let found = match api {
            Api::Measurements => measurements::newest(app, caller, filter()?, (last, left)).await,
            Api::Events => events::newest(app, caller, filter()?, (last, left)).await,
            Api::Alarms => alarms::newest(app, caller, filter()?, (last, left)).await,
            Api::Operations => operations::newest(app, caller, filter()?, (last, left)).await,
            Api::ManagedObjects => objects(app, caller, subscription, selected.action, (last, left)).await,
        };
        let found = found?;
        left = left.saturating_sub(found.iter().map(|message| message.body.len()).sum());
        newest.extend(found.into_iter().rev());
    }
    newest.sort_by_cached_key(|message| time::parse(&message.time).unwrap_or_default());
    let older = newest.len().saturating_sub(last as usize);
    Ok(newest.split_off(older).into())
}

/// How a subscription takes the stored objects of an API.
struct Selected {
    /// As new ones or, where it takes none, as changed ones.
    action: Action,
    /// Whether it takes those of what is below its source, too.
    below: bool,
}

impl Selected {
    fn of(subscription: &Subscription, api: Api) -> Option<Self> {
        let takes = |action: Action, own: bool| {
            let (tenant, source, time) = ("".into(), "".into(), "".into());
            let message = Message { tenant, api, action, source, kind: None, time, body: Bytes::new() };
            subscription.types(&message, own).next().is_some()
        };
        let action = [Action::Create, Action::Update].into_iter().find(|action| takes(*action, true))?;
        Some(Self { action, below: takes(action, false) })
    }

    fn filter(&self, subscription: &Subscription) -> Filter {
        // A range of time, even of all times, is read in the order of time.
        let time = Range { from_ms: Some(0), to_ms: None };
        let following = if self.below { Kind::ALL.to_vec() } else { Vec::new() };
        Filter { source: subscription.source, following, time, ..Filter::default() }
    }
}

/// The managed object that the subscription is about, or the newest ones, newest first.
async fn objects(
    app: &App,
    caller: &Caller,
    subscription: &Subscription,
    action: Action,
    (most, max_bytes): (u32, usize),
) -> Result<Vec<Arc<Message>>, ApiError> {
    let tenant = &caller.principal.tenant;
    let found = match subscription.source {
        Some(_) => vec![inventory::load(app, tenant, subscription.source).await?],
        None => {
            let filter = search::Filter::newest_first();
            let bounds = search::Bounds { page_bytes: max_bytes, ..search::Bounds::default() };
            let page = PageRequest::first(most);
            search::list(&app.store, tenant.as_str(), &filter, &page, &bounds).await.map_err(too_large)?.objects
        }
    };
    let message = |object| inventory::message(tenant, object, action, inventory::render(object, caller));
    Ok(found.iter().map(message).collect())
}

/// There is no page to ask for less of.
pub(super) fn too_large(error: ListError) -> ApiError {
    match error {
        ListError::TooLarge { .. } => {
            Invalid::new("last", format!("the objects have more than {MAX_BYTES} bytes, ask for fewer")).into()
        }
        error => error.into(),
    }
}

/// Tries the messages in order, until time or room for the answer are used up.
async fn run(
    app: &App,
    tenant: &Tenant,
    plugin: &Plugin,
    settings: &str,
    mut messages: VecDeque<Arc<Message>>,
) -> Result<Report, ApiError> {
    let mut trials = app.plugins.trials(tenant, plugin, settings).await.map_err(refused)?;
    let id = plugin.id();
    let mut report = Report {
        plugin: id.name.to_string(),
        version: id.tenant.as_ref().map(|_| id.version),
        world: plugin.world().name(),
        messages: messages.len(),
        tried: 0,
        truncated: None,
        verdicts: Tally::new(plugin.world()),
        batch: None,
        processor_microseconds: 0,
        memory_bytes: 0,
        results: Vec::new(),
    };
    let (started, mut bytes) = (Instant::now(), 0);
    while let Some(message) = messages.pop_front() {
        let outcome = Outcome::of(&trials.run(message.clone()).await.map_err(refused)?);
        report.tried += 1;
        report.verdicts.count(&outcome);
        report.processor_microseconds += outcome.processor_microseconds;
        report.memory_bytes = report.memory_bytes.max(outcome.memory_bytes);
        let tried = Tried { message: Meta::of(&message), outcome };
        report.results.push(to_raw_value(&tried).expect("invariant: an outcome serializes"));
        bytes += report.results[report.tried - 1].get().len();
        report.truncated = match messages.is_empty() {
            true => None,
            false if started.elapsed() >= PATIENCE => Some(format!("it took {} s", PATIENCE.as_secs())),
            false if bytes >= MAX_BYTES => Some(format!("the results have {MAX_BYTES} bytes")),
            false => None,
        };
        if report.truncated.is_some() {
            break;
        }
    }
    report.batch = trials.finish().await.map_err(refused)?.map(|fault| Batched { fault });
    Ok(report)
}

fn refused(error: PluginError) -> ApiError {
    samples::refusal(error).map_or_else(Into::into, Into::into)
}
