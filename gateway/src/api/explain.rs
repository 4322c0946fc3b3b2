//! `/tidegate/v1/subscriptions/{id}/explain`: the way that one message would take through the line, without sending it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::http::request::Parts;
use serde::Serialize;
use serde_json::Value;

use super::trial::take_place;
use super::{ApiError, App, AppState, Caller, Names, json_limits, read_body, subscriptions, topics};
use crate::auth::Role;
use crate::consumer::slot;
use crate::dispatch;
use crate::json::Members;
use crate::message::Message;
use crate::platform::{TooMany, parse_id};
use crate::plugin::{Fault, Instance, PluginError, Trial, Verdict, World};
use crate::samples::{self, Content, Meta, Outcome};
use crate::subscription::{OnFault, Route};
use crate::writer::Refused;

/// The answer.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Explained<'a> {
    message: Meta<'a>,
    index: Hit,
    /// What the plugins said, in the order of the line, as far as the message came.
    steps: Vec<Step>,
    /// The plugins ran on instances of their own, which have seen no other message.
    instances: &'static str,
    on_fault: OnFault,
    outcome: &'static str,
    /// The body that is forwarded.
    #[serde(flatten)]
    content: Content,
    /// One for each of `index.types`, of what is forwarded.
    frames: Vec<Frame>,
    /// Whether the topic has a consumer to keep messages for.
    wanted: bool,
    /// Whether it would wait behind a held message of its source.
    waits: bool,
    /// Whether the quota has room for the frames.
    fits: bool,
    topic: Value,
}

/// What the index says.
#[derive(Serialize)]
struct Hit {
    /// Under which the message is taken; none: it is not.
    types: Vec<&'static str>,
    /// Why it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Serialize)]
struct Step {
    plugin: String,
    /// Built-in plugins have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    world: &'static str,
    /// Whether it decides in the place of the version in force.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    canary: bool,
    #[serde(flatten)]
    outcome: Outcome,
}

/// A frame, without acknowledgement id, message id and body.
#[derive(Serialize)]
struct Frame {
    headers: Vec<String>,
    /// Of all of it.
    bytes: usize,
}

/// POST of a message, as in the samples for plugins.
pub(super) async fn explain(
    State(app): AppState,
    caller: Caller,
    Names(id): Names<String>,
    request: Request,
) -> Result<Response, ApiError> {
    let tenant = &caller.require(Role::Notification2Admin)?.tenant;
    let (Parts { headers, .. }, body) = request.into_parts();
    let body = read_body(&app, &headers, body, app.config.limits.body_bytes).await?;
    let route = parse_id(&id).and_then(|id| app.index.get(tenant, id)).ok_or_else(subscriptions::missing)?;
    let _place = take_place(&app, tenant)?;
    let limits = json_limits(&app.config);
    let message = Arc::new(samples::message(tenant, &Members::parse(&body, &limits)?, &limits)?);
    let index = hit(&app, &route, &message)?;
    let mut walk = Walk { message: message.clone(), steps: Vec::new(), outcome: "not-selected" };
    if !index.types.is_empty() {
        walk.through(&app, &route).await?;
    }
    let forwarded = walk.outcome == FORWARDED;
    let shaped = &walk.message;
    let stored: Vec<_> = index
        .types
        .iter()
        .filter(|_| forwarded)
        .map(|kind| dispatch::stored_form(shaped, kind, &shaped.body))
        .collect();
    let frames: Vec<_> = stored.iter().map(|form| Frame::of(form)).collect();
    if frames.iter().any(|frame| frame.bytes > app.config.limits.frame_bytes) {
        walk.outcome = "too-large";
    }
    let policy = app.topics.policy(&route.topic);
    let used = app.topics.topic_figures(&route.topic).map_or(0, |figures| figures.bytes);
    let more: usize = stored.iter().map(Bytes::len).sum();
    let explained = Explained {
        message: Meta::of(&message),
        index,
        steps: walk.steps,
        instances: "fresh",
        on_fault: route.subscription.on_fault.unwrap_or_default(),
        outcome: walk.outcome,
        content: if forwarded { Content::of(&shaped.body) } else { Content::default() },
        frames,
        wanted: app.topics.wants(&route.topic),
        waits: app.topics.get(&route.topic).is_some_and(|topic| topic.holds(slot(&message.source))),
        fits: route.topic.non_persistent || used + more as u64 <= policy.quota_bytes,
        topic: topics::rendered(&app, &caller, &route.topic),
    };
    let explained = serde_json::to_vec(&explained).expect("invariant: an explanation serializes");
    Ok(([(CONTENT_TYPE, "application/json")], explained).into_response())
}

/// What the line's own index says, and why.
fn hit(app: &App, route: &Arc<Route>, message: &Message) -> Result<Hit, ApiError> {
    let limit = app.config.limits.ancestors;
    let above = match parse_id(message.source.as_str()) {
        None => Vec::new(),
        Some(object) => app.sources.above(object, limit).map_err(|TooMany| Refused::Ancestors { object, limit })?,
    };
    let Ok(matching) = app.index.matching(message, || Ok::<_, Infallible>(above.clone()));
    let own = matching.into_iter().filter(|(other, _)| other.subscription.id == route.subscription.id);
    let types = own.map(|(_, kind)| kind).collect();
    Ok(Hit { types, reason: route.subscription.why_not(message, &above) })
}

const FORWARDED: &str = "forwarded";

/// A message on its way.
struct Walk {
    /// As it is shaped so far.
    message: Arc<Message>,
    steps: Vec<Step>,
    outcome: &'static str,
}

impl Walk {
    /// Asks the plugins until one drops the message, or fails on it and the subscription does not let it pass.
    async fn through(&mut self, app: &App, route: &Route) -> Result<(), ApiError> {
        let all =
            |world| route.instances(world).iter().enumerate().map(move |(step, instance)| (world, step, instance));
        for (world, step, instance) in all(World::Filter).chain(all(World::Transform)) {
            let of_canary = match route.rival(world, step, &self.message.source) {
                Some(rival) => Some(self.ask(app, &rival.instance, true).await?),
                None => None,
            };
            let answer = match of_canary {
                Some(Ok(verdict)) => Ok(verdict),
                Some(Err(_)) | None => self.ask(app, instance, false).await?,
            };
            self.outcome = match answer {
                Ok(Verdict::Pass) => FORWARDED,
                Ok(Verdict::Body(body)) => {
                    self.message = Arc::new(Message { body, ..(*self.message).clone() });
                    FORWARDED
                }
                Ok(Verdict::Drop) => "dropped",
                Err(fault) => match route.on_fault(&fault) {
                    OnFault::Pass => FORWARDED,
                    OnFault::Hold => "held",
                    OnFault::Drop => "dropped",
                },
            };
            if self.outcome != FORWARDED {
                return Ok(());
            }
        }
        self.outcome = FORWARDED;
        Ok(())
    }

    async fn ask(&mut self, app: &App, instance: &Instance, canary: bool) -> Result<Result<Verdict, Fault>, ApiError> {
        let trial = trial(app, instance, &self.message).await?;
        let id = instance.plugin().id();
        self.steps.push(Step {
            plugin: id.name.to_string(),
            version: id.tenant.as_ref().map(|_| id.version),
            world: instance.plugin().world().name(),
            canary,
            outcome: Outcome::of(&trial),
        });
        Ok(trial.outcome)
    }
}

/// What an instance like this one, but new, makes of the message. One that can't be made, or may not be asked, fails on it.
async fn trial(app: &App, instance: &Instance, message: &Arc<Message>) -> Result<Trial, ApiError> {
    let failed =
        |fault| Trial { outcome: Err(fault), processor_time: Duration::ZERO, memory_bytes: 0, log: Vec::new() };
    if let Some(quarantined) = app.plugins.quarantine().is(instance.tenant(), instance.plugin().id()) {
        return Ok(failed(Fault::Quarantined(quarantined.reason)));
    }
    let tried = app.plugins.trials(instance.tenant(), instance.plugin(), instance.settings()).await;
    let tried = match tried {
        Ok(mut trials) => trials.run(message.clone()).await,
        Err(error) => Err(error),
    };
    match tried {
        Ok(trial) => Ok(trial),
        Err(PluginError::Fault { fault, .. }) if fault != Fault::Stopped => Ok(failed(fault)),
        Err(PluginError::Settings(text)) => Ok(failed(Fault::Refused(text))),
        Err(error) => Err(error.into()),
    }
}

impl Frame {
    fn of(stored: &[u8]) -> Self {
        let text = String::from_utf8_lossy(stored);
        let head = text.split("\n\n").next().unwrap_or_default();
        Self { headers: head.lines().map(str::to_owned).collect(), bytes: stored.len() + dispatch::HEADER_BYTES }
    }
}
