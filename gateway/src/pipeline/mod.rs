//! The upper half of the line: from a request to the commit that holds its objects and messages.
//!
//! ```text
//! submit ─▶ admission queue (one per tenant) ─▶ turn: route ─▶ judge ─▶ shape ─▶ writer ─▶ answer after the commit
//! ```
//! The place in the admission queue is the order. A turn takes what is queued, without a timer; while the writer commits
//! one turn, the next is judged. Each plugin instance is called once per turn with all that it has to see. What a plugin fails on is
//! held, and released by turns between these.

mod release;

use std::collections::{HashMap, HashSet};
use std::future::ready;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backlog::{Bodies, Held, Record, TopicKey, Topics};
use crate::consumer::Slot;
use crate::message::{Message, Tenant};
use crate::platform::{Sources, TooMany, parse_id};
use crate::plugin::{Answered, Fault, Instance, Plugins, Verdict, World};
use crate::subscription::{Index, Judged, OnFault, Route};
use crate::telemetry::{messages_dropped, requests_refused};
use crate::writer::{Answer, Change, Refused, Writer};
use crate::{consumer, dispatch, faults};

pub use release::Released;
use release::{Ask, Releases};

/// Messages that a turn takes before it stops collecting; also what one call of a plugin gets at most.
const TURN_MESSAGES: usize = 256;
/// Bytes of bodies that a turn takes before it stops collecting.
const TURN_BYTES: usize = 1 << 20;
/// Routed messages after which a turn is handed to the writer in parts, and their bytes.
const PART_MESSAGES: usize = 1 << 14;
const PART_BYTES: usize = 8 << 20;

/// Bounds on the upper half of the line.
#[derive(Clone, Copy, Debug)]
pub struct PipelineLimits {
    /// Requests of one tenant that wait for their turn; beyond that the next ones wait before they queue.
    pub admission: usize,
    /// Largest frame in bytes; a request with a larger one is refused whole.
    pub frame_bytes: usize,
    /// Messages that one request may append to all topics together.
    pub fan_out_messages: usize,
    /// Bytes of their bodies before they are shaped.
    pub fan_out_bytes: usize,
    /// Objects above the source of a message that subscriptions of children are looked for at.
    pub ancestors: usize,
}

/// What a producer asks for: all of it or nothing.
#[derive(Default)]
pub struct Request {
    /// What happened, in order.
    pub messages: Vec<Arc<Message>>,
    /// The objects' rows. The pipeline adds the records.
    pub change: Change,
}

/// The upper half of the line. Cheap to clone.
#[derive(Clone)]
pub struct Pipeline(Arc<Line>);

struct Line {
    index: Arc<Index>,
    sources: Arc<Sources>,
    topics: Topics,
    bodies: Bodies,
    plugins: Plugins,
    writer: Writer,
    limits: PipelineLimits,
    queues: Mutex<HashMap<Tenant, Queue>>,
    turns: TaskTracker,
    releases_end: CancellationToken,
}

/// What waits for the turns of a tenant.
#[derive(Clone)]
struct Queue {
    requests: mpsc::Sender<Asked>,
    asks: mpsc::Sender<Ask>,
}

struct Asked {
    request: Request,
    answer: Answer,
}

/// A message on its way to the topic of one route.
struct Routed {
    /// Index of the request in its turn.
    request: usize,
    original: Arc<Message>,
    /// As its plugins have shaped it so far.
    message: Arc<Message>,
    route: Arc<Route>,
    /// The type in line 2 of its frame.
    kind: &'static str,
    /// Filters that it has passed.
    step: usize,
    outcome: Outcome,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Forwarded.
    Passed,
    /// Not wanted.
    Dropped,
    /// A plugin failed on it, or on an older one of its source.
    Held,
}

impl Pipeline {
    /// A line without any traffic yet.
    #[must_use]
    pub fn new(
        index: Arc<Index>,
        sources: Arc<Sources>,
        topics: Topics,
        bodies: Bodies,
        plugins: Plugins,
        writer: Writer,
        limits: PipelineLimits,
    ) -> Self {
        let (queues, turns, releases_end) = (Mutex::default(), TaskTracker::new(), CancellationToken::new());
        Self(Arc::new(Line { index, sources, topics, bodies, plugins, writer, limits, queues, turns, releases_end }))
    }

    /// Carries out a request: returns once everything that it asks for is on disk.
    ///
    /// Waits while the tenant's queue is full. Dropping the future does not take back a request that is queued.
    pub async fn submit(&self, tenant: &Tenant, request: Request) -> Result<(), Refused> {
        let (answer, outcome) = oneshot::channel();
        let requests = self.queue(tenant).requests;
        let outcome = match requests.send(Asked { request, answer }).await {
            Ok(()) => outcome.await.unwrap_or(Err(Refused::Stopping)),
            Err(_) => Err(Refused::Stopping),
        };
        outcome.inspect_err(|refused| requests_refused(refused.reason()).increment(1))
    }

    /// How many requests of each tenant wait for their turn.
    #[must_use]
    pub fn waiting(&self) -> Vec<(Tenant, usize)> {
        let queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = |Queue { requests, .. }: &Queue| requests.max_capacity() - requests.capacity();
        queues.iter().map(|(tenant, queue)| (tenant.clone(), waiting(queue))).collect()
    }

    /// Gives up the queue of a tenant that was removed; what is in it is carried out.
    pub fn remove(&self, tenant: &Tenant) {
        self.0.queues.lock().unwrap_or_else(PoisonError::into_inner).remove(tenant);
    }

    /// Takes no more requests and returns when the queued ones have been handed to the writer.
    pub async fn drain(&self) {
        self.0.queues.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.0.turns.close();
        self.0.turns.wait().await;
    }

    fn queue(&self, tenant: &Tenant) -> Queue {
        let mut queues = self.0.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get(tenant) {
            return queue.clone();
        }
        let (requests, admitted) = mpsc::channel(self.0.limits.admission);
        let (asks, asked) = mpsc::channel(self.0.limits.admission);
        let queue = Queue { requests, asks };
        if !self.0.turns.is_closed() {
            queues.insert(tenant.clone(), queue.clone());
            self.0.turns.spawn(turns(self.0.clone(), admitted, asked));
        }
        queue
    }
}

/// The turns of one tenant, until its queue is closed: one of requests, one of releases, as long as there are both.
///
/// A turn begins when the one before is on disk, so that it has grown meanwhile: a commit costs the same for one message as for
/// a hundred. If a whole turn is waiting already, it is judged while the one before is committed.
async fn turns(line: Arc<Line>, mut requests: mpsc::Receiver<Asked>, mut asks: mpsc::Receiver<Ask>) {
    let places = Arc::new(Semaphore::new(1));
    let mut releases = Releases::default();
    loop {
        let next = tokio::select! {
            biased;
            Some(ask) = asks.recv() => {
                releases.add(ask);
                continue;
            }
            next = requests.recv() => Some(next),
            () = ready(()), if !releases.is_empty() => None,
        };
        match next {
            Some(Some(first)) => turn_of_requests(&line, first, &mut requests, &places).await,
            Some(None) => return,
            None => {}
        }
        if !releases.is_empty() {
            line.release(&mut releases).await;
        }
    }
}

async fn turn_of_requests(line: &Line, first: Asked, requests: &mut mpsc::Receiver<Asked>, places: &Arc<Semaphore>) {
    faults::point("admitted");
    let place = if requests.len() < TURN_MESSAGES { places.clone().acquire_owned().await.ok() } else { None };
    let mut messages = first.messages();
    let mut bytes = first.bytes();
    let mut turn = vec![first];
    while messages < TURN_MESSAGES
        && bytes < TURN_BYTES
        && let Ok(asked) = requests.try_recv()
    {
        messages += asked.messages();
        bytes += asked.bytes();
        turn.push(asked);
    }
    line.turn(turn, place).await;
}

impl Line {
    async fn turn(&self, turn: Vec<Asked>, mut place: Option<OwnedSemaphorePermit>) {
        let mut rest = turn.into_iter();
        while rest.len() > 0 {
            let (part, mut routed) = self.route(&mut rest);
            self.judge(&mut routed).await;
            self.shape(&mut routed).await;
            faults::point("judged");
            let place = if rest.len() == 0 { place.take() } else { None };
            let mut lines = Lines::default();
            let changes = self.changes(part, routed, &mut lines);
            self.writer.changes(changes, place).await;
            if !lines.0.is_empty() {
                // What comes next of these sources has to find them on hold.
                self.writer.settled().await;
            }
        }
    }

    /// Which subscriptions each message concerns, for as many requests as make a part. A topic that no consumer has ever
    /// connected to needs nothing.
    fn route(&self, rest: &mut impl Iterator<Item = Asked>) -> (Vec<Asked>, Vec<Routed>) {
        let mut part = Vec::new();
        let mut routed = Vec::new();
        let mut bytes = 0;
        while routed.len() < PART_MESSAGES
            && bytes < PART_BYTES
            && let Some(admitted) = rest.next()
        {
            let before = routed.len();
            match self.route_request(part.len(), &admitted.request, &mut routed) {
                Ok(more) => {
                    bytes += more;
                    part.push(admitted);
                }
                Err(refused) => {
                    routed.truncate(before);
                    let _ = admitted.answer.send(Err(refused));
                }
            }
        }
        (part, routed)
    }

    /// Returns the bytes of what was routed.
    fn route_request(&self, at: usize, request: &Request, routed: &mut Vec<Routed>) -> Result<usize, Refused> {
        let PipelineLimits { fan_out_messages, fan_out_bytes, .. } = self.limits;
        let (mut messages, mut bytes) = (0, 0);
        for message in &request.messages {
            for (route, kind) in self.index.matching(message, || self.above(message))? {
                let Some(topic) = self.topics.get(&route.topic) else { continue };
                messages += 1;
                bytes += message.body.len();
                if messages > fan_out_messages || bytes > fan_out_bytes {
                    return Err(Refused::FanOut { messages: fan_out_messages, bytes: fan_out_bytes });
                }
                let held = topic.holds(consumer::slot(&message.source));
                let outcome = if held { Outcome::Held } else { Outcome::Passed };
                routed.push(Routed { outcome, ..Routed::new(at, message.clone(), route, kind) });
            }
        }
        Ok(bytes)
    }

    /// What is above the source of `message` at this moment.
    fn above(&self, message: &Message) -> Result<Vec<u64>, Refused> {
        let Some(object) = parse_id(message.source.as_str()) else { return Ok(Vec::new()) };
        let limit = self.limits.ancestors;
        self.sources.above(object, limit).map_err(|TooMany| Refused::Ancestors { object, limit })
    }

    /// Asks the filters of each route in their order, all routes' first ones together, until one drops the message.
    async fn judge(&self, routed: &mut [Routed]) {
        loop {
            let Batches { calls, members } = Batches::new(routed, World::Filter, |routed| routed.step);
            if calls.is_empty() {
                return;
            }
            let verdicts = self.plugins.verdicts(calls).await;
            for (at, verdict) in members.decide(routed, verdicts) {
                routed[at].outcome = match verdict {
                    Ok(true) => Outcome::Passed,
                    Ok(false) => Outcome::Dropped,
                    Err(fault) => self.faulted(&routed[at].route, &fault),
                };
                routed[at].step += usize::from(routed[at].outcome == Outcome::Passed);
            }
        }
    }

    /// Has the transforms of each route reshape what is forwarded, each what the one before has made of it.
    async fn shape(&self, routed: &mut [Routed]) {
        for step in 0.. {
            let Batches { calls, members } = Batches::new(routed, World::Transform, |_| step);
            if calls.is_empty() {
                return;
            }
            let bodies = self.plugins.shape(calls).await;
            for (at, body) in members.decide(routed, bodies) {
                match body {
                    Ok(body) => routed[at].message = Arc::new(Message { body, ..(*routed[at].message).clone() }),
                    Err(fault) => routed[at].outcome = self.faulted(&routed[at].route, &fault),
                }
            }
        }
    }

    /// What becomes of a message that a plugin of the route failed on. The room of the plugins has told of it.
    fn faulted(&self, route: &Route, fault: &Fault) -> Outcome {
        match route.on_fault(fault) {
            OnFault::Pass => Outcome::Passed,
            OnFault::Hold => Outcome::Held,
            OnFault::Drop => {
                let hearers = self.topics.get(&route.topic).map_or(0, |topic| topic.hearers());
                messages_dropped("plugin_fault").increment(hearers as u64);
                Outcome::Dropped
            }
        }
    }

    /// What the writer commits for each request. One oversized frame refuses its whole request. `lines` begin with what is held.
    fn changes(&self, turn: Vec<Asked>, routed: Vec<Routed>, lines: &mut Lines) -> Vec<(Change, Answer)> {
        let mut records: Vec<Result<Vec<Record>, Refused>> = turn.iter().map(|_| Ok(Vec::new())).collect();
        let mut last = None;
        for mut routed in routed {
            if let Ok(list) = &mut records[routed.request] {
                lines.queue(&mut routed);
                match self.record(&routed, &mut last) {
                    Ok(record) => list.extend(record),
                    Err(refused) => records[routed.request] = Err(refused),
                }
            }
        }
        let mut changes = Vec::with_capacity(turn.len());
        for (admitted, records) in turn.into_iter().zip(records) {
            match records {
                Ok(records) => changes.push((Change { records, ..admitted.request.change }, admitted.answer)),
                Err(refused) => {
                    // A producer that has gone away does not need its answer.
                    let _ = admitted.answer.send(Err(refused));
                }
            }
        }
        changes
    }

    /// `last`: the stored form of the message before, which the next one has, too, if it is the same message unshaped.
    fn record(&self, routed: &Routed, last: &mut Option<Unshaped>) -> Result<Option<Record>, Refused> {
        let kind = routed.kind;
        let (message, held) = match routed.outcome {
            Outcome::Passed => (&routed.message, None),
            Outcome::Held => (&routed.original, Some(routed.held())),
            Outcome::Dropped => return Ok(None),
        };
        let body = match last {
            Some((same, of, form)) if Arc::ptr_eq(same, message) && *of == kind => form.clone(),
            _ => last.insert((message.clone(), kind, dispatch::stored_form(message, kind, &message.body))).2.clone(),
        };
        let topic = routed.route.topic.clone();
        self.check_frame(&topic, &body)?;
        Ok(Some(Record { topic, slot: consumer::slot(&message.source), body, held }))
    }

    fn check_frame(&self, topic: &TopicKey, body: &Bytes) -> Result<(), Refused> {
        let bytes = body.len() + dispatch::HEADER_BYTES;
        let limit = self.limits.frame_bytes;
        if bytes > limit {
            return Err(Refused::FrameTooLarge { topic: topic.name.to_string(), bytes, limit });
        }
        Ok(())
    }
}

impl Routed {
    fn new(request: usize, message: Arc<Message>, route: Arc<Route>, kind: &'static str) -> Self {
        Self { request, original: message.clone(), message, route, kind, step: 0, outcome: Outcome::Passed }
    }

    fn held(&self) -> Held {
        let Message { api, kind, time, .. } = &*self.original;
        let step = u8::try_from(self.step).expect("invariant: a subscription has few filters");
        let subscription = self.route.subscription.id;
        Held { subscription, step, api: *api, kind: kind.clone(), time: time.clone() }
    }
}

/// The lines of held messages that a turn begins or lengthens, by topic and slot.
#[derive(Default)]
struct Lines(HashSet<(Arc<TopicKey>, Slot)>);

impl Lines {
    /// A held message begins its line, and what follows of its slot joins it.
    fn queue(&mut self, routed: &mut Routed) {
        if routed.outcome == Outcome::Dropped || self.0.is_empty() && routed.outcome == Outcome::Passed {
            return;
        }
        let line = (routed.route.topic.clone(), consumer::slot(&routed.original.source));
        if routed.outcome == Outcome::Held {
            self.0.insert(line);
        } else if self.0.contains(&line) {
            routed.outcome = Outcome::Held;
        }
    }
}

/// A message, the type that it was stored under, and its stored form.
type Unshaped = (Arc<Message>, &'static str, Bytes);

/// One call for each plugin instance.
struct Batches<'a> {
    calls: Vec<(Instance, Vec<Arc<Message>>)>,
    members: Members<'a>,
}

/// Who the members of each batch are.
struct Members<'a> {
    /// For each call, indices into the routed messages, and the instances of their own subscriptions.
    of: Vec<Vec<(usize, &'a Instance)>>,
    /// The calls from here on are to canaries, about messages that others are asked about, too.
    canaries: usize,
}

impl<'a> Batches<'a> {
    /// Calls to the plugins at the step that each message is at, and to the canaries that it meets there.
    fn new(routed: &'a [Routed], world: World, step: impl Fn(&Routed) -> usize) -> Self {
        let mut batches = Self { calls: Vec::new(), members: Members { of: Vec::new(), canaries: 0 } };
        batches.add(routed, |routed| routed.route.instances(world).get(step(routed)));
        batches.members.canaries = batches.calls.len();
        batches.add(routed, |routed| {
            routed.route.rival(world, step(routed), &routed.message.source).map(|rival| &rival.instance)
        });
        batches
    }

    fn add(&mut self, routed: &'a [Routed], instance: impl Fn(&'a Routed) -> Option<&'a Instance>) {
        let mut open: HashMap<&Instance, usize> = HashMap::new();
        let Self { calls, members: Members { of: members, .. } } = self;
        for (at, routed) in routed.iter().enumerate() {
            let (Outcome::Passed, Some(instance)) = (routed.outcome, instance(routed)) else { continue };
            let call = match open.get(instance) {
                Some(&call) if members[call].len() < TURN_MESSAGES => call,
                _ => {
                    calls.push((instance.clone(), Vec::new()));
                    members.push(Vec::new());
                    open.insert(instance, calls.len() - 1);
                    calls.len() - 1
                }
            };
            calls[call].1.push(routed.message.clone());
            members[call].push((at, instance));
        }
    }
}

impl Members<'_> {
    /// The answer that counts for each message, of those to the calls.
    fn decide<T: Clone + Into<Verdict>>(
        mut self,
        routed: &[Routed],
        mut answered: Vec<Answered<T>>,
    ) -> Vec<(usize, Result<T, Fault>)> {
        /// The time of a call is shared by its messages.
        fn each<T: Clone + Into<Verdict>>(
            members: Vec<Vec<(usize, &Instance)>>,
            answered: Vec<Answered<T>>,
        ) -> impl Iterator<Item = (usize, Judged<T>)> {
            members.into_iter().zip(answered).flat_map(|(members, Answered { answers, processor_time })| {
                let time = processor_time / u32::try_from(members.len().max(1)).unwrap_or(u32::MAX);
                members.into_iter().zip(answers).map(move |((at, instance), answer)| {
                    instance.count(&answer, time);
                    (at, (answer, time))
                })
            })
        }
        let of_canaries = each(self.of.split_off(self.canaries), answered.split_off(self.canaries));
        let mut of_canaries: HashMap<usize, Judged<T>> = of_canaries.collect();
        let decide = |(at, judged): (usize, Judged<T>)| match (of_canaries.remove(&at), &routed[at].route.canary) {
            (Some(of_canary), Some(canary)) => (at, canary.decide(judged, of_canary)),
            _ => (at, judged.0),
        };
        each(self.of, answered).map(decide).collect()
    }
}

impl Asked {
    fn messages(&self) -> usize {
        self.request.messages.len()
    }

    fn bytes(&self) -> usize {
        self.request.messages.iter().map(|message| message.body.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::message::{Action, Api};
    use crate::subscription::Subscription;

    fn routed(topic: &str, source: &str, outcome: Outcome) -> Routed {
        let body = format!(r#"{{"context":"mo","source":{{"id":"{source}"}},"subscription":"{topic}"}}"#);
        let subscription = Subscription::parse(body.as_bytes()).unwrap();
        let topic = Arc::new(TopicKey { tenant: "t".into(), name: topic.into(), non_persistent: false });
        let route = Route { subscription, topic, filters: Vec::new(), transforms: Vec::new(), canary: None };
        let message = Message {
            tenant: "t".into(),
            api: Api::Events,
            action: Action::Create,
            source: source.into(),
            kind: None,
            time: "".into(),
            body: Bytes::new(),
        };
        Routed { outcome, ..Routed::new(0, Arc::new(message), Arc::new(route), "events") }
    }

    #[test]
    fn what_follows_a_held_message_in_a_turn_waits_behind_it() {
        let mut lines = Lines::default();
        let mut after = |topic, source, outcome| {
            let mut routed = routed(topic, source, outcome);
            lines.queue(&mut routed);
            routed.outcome
        };
        assert!(after("a", "1", Outcome::Passed) == Outcome::Passed);
        assert!(after("a", "1", Outcome::Held) == Outcome::Held);
        assert!(after("a", "1", Outcome::Passed) == Outcome::Held);
        assert!(after("a", "1", Outcome::Dropped) == Outcome::Dropped, "nobody waits for it");
        assert!(after("a", "2", Outcome::Passed) == Outcome::Passed, "another source");
        assert!(after("b", "1", Outcome::Passed) == Outcome::Passed, "another topic");
    }
}
