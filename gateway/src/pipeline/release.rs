//! What plugins failed on is judged anew, line by line, by turns between those of the tenant's requests.
//!
//! ```text
//! release ─▶ what is asked for by now ─▶ turn: read ─▶ judge ─▶ shape ─▶ writer ─▶ the next, until nothing is left or faults again
//! ```
//! What comes in goes on between these turns: they alternate. Each is on disk before it ends, so that memory tells the next turn who
//! stands in line. What is asked for meanwhile joins them, so that a thousand subscriptions take no more turns than one that
//! holds as much.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use tokio::sync::mpsc;

use super::{Line, Outcome, Pipeline, Routed, TURN_BYTES, TURN_MESSAGES};
use crate::backlog::{Release, Topic, TopicKey};
use crate::consumer::{self, Slot};
use crate::message::Tenant;
use crate::store::StoreError;
use crate::subscription::Route;
use crate::telemetry::messages_dropped;
use crate::writer::Refused;
use crate::{dispatch, faults};

/// What one turn judges, each as much as another turn brings: so a release catches up with what is held meanwhile.
const PARTS: usize = 4;

/// What a release has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Messages that were forwarded.
    pub passed: u64,
    /// Messages that the plugins do not want, or that nobody wants any more.
    pub dropped: u64,
    /// Messages that the subscriptions still hold.
    pub held: u64,
}

/// Somebody wants the lines judged that these subscriptions lead in a topic.
pub(super) struct Ask {
    topic: Arc<Topic>,
    subscriptions: Vec<u64>,
    teller: Teller,
}

/// Tells whoever asked what was done in the lines, and by its end that there is nothing more to do.
type Teller = mpsc::UnboundedSender<Released>;

/// The lines of a topic in which there may be more to do, and who asked for that.
type Lines = HashMap<Slot, Vec<Teller>>;

/// The releases of a tenant.
#[derive(Default)]
pub(super) struct Releases {
    /// Since the last turn.
    asks: Vec<Ask>,
    /// By the topics' row ids.
    topics: BTreeMap<i64, (Arc<Topic>, Lines)>,
    /// The topic that came last; its next one is the next.
    last: i64,
}

impl Pipeline {
    /// Judges what is held for these subscriptions anew, in order, in turns. Returns when nothing is left, or what is left faults
    /// again, or the gateway stops.
    ///
    /// What stands in the same lines by other subscriptions of the topics is judged with it; where one of those leads a line, that
    /// is left to its own release.
    pub async fn release(&self, tenant: &Tenant, subscriptions: impl IntoIterator<Item = u64>) -> Released {
        let routes = subscriptions.into_iter().filter_map(|subscription| self.0.index.get(tenant, subscription));
        let routes: Vec<Arc<Route>> = routes.collect();
        let mut by_topic: BTreeMap<&TopicKey, Vec<u64>> = BTreeMap::new();
        for route in &routes {
            by_topic.entry(&route.topic).or_default().push(route.subscription.id);
        }
        let (teller, mut told) = mpsc::unbounded_channel();
        let asks = self.queue(tenant).asks;
        for (topic, subscriptions) in by_topic {
            let Some(topic) = self.0.topics.get(topic) else { continue };
            // The gateway may be stopping.
            let _ = asks.send(Ask { topic, subscriptions, teller: teller.clone() }).await;
        }
        drop(teller);
        let mut released = Released::default();
        while let Some(Released { passed, dropped, .. }) = told.recv().await {
            released.passed += passed;
            released.dropped += dropped;
        }
        let held = routes.iter().map(|route| self.0.topics.held(&route.topic, route.subscription.id).messages);
        Released { held: held.sum(), ..released }
    }

    /// Ends the releases, those under way after their next commit: what is held is on disk.
    pub fn stop_releases(&self) {
        self.0.releases_end.cancel();
    }
}

impl Releases {
    pub(super) fn add(&mut self, ask: Ask) {
        self.asks.push(ask);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.asks.is_empty() && self.topics.is_empty()
    }

    /// Finds the lines of those who asked since the last turn.
    fn begin(&mut self) {
        for Ask { topic, subscriptions, teller } in self.asks.drain(..) {
            for slot in subscriptions.iter().flat_map(|leader| topic.lines_led_by(*leader)) {
                let (_, lines) = self.topics.entry(topic.id).or_insert_with(|| (topic.clone(), Lines::default()));
                lines.entry(slot).or_default().push(teller.clone());
            }
        }
    }

    /// The topics take turns.
    fn next(&mut self) -> Option<(Arc<Topic>, Lines)> {
        let (&next, _) = self.topics.range(self.last + 1..).next().or(self.topics.first_key_value())?;
        self.last = next;
        self.topics.remove(&next)
    }
}

impl Line {
    pub(super) async fn release(&self, releases: &mut Releases) {
        // Memory shows what earlier turns have held once the writer has that on disk.
        self.writer.settled().await;
        releases.begin();
        for _ in 0..PARTS {
            if self.releases_end.is_cancelled() {
                *releases = Releases::default();
            }
            let Some((topic, mut lines)) = releases.next() else { return };
            match self.release_part(&topic, &mut lines).await {
                Ok(()) if lines.is_empty() => {}
                Ok(()) => drop(releases.topics.insert(topic.id, (topic, lines))),
                Err(error) => tracing::warn!(%error, "held messages are not released"),
            }
        }
    }

    /// Judges the oldest messages of the lines, and takes the lines away in which there is nothing more to do.
    async fn release_part(&self, topic: &Arc<Topic>, lines: &mut Lines) -> Result<(), Refused> {
        let waiting = topic.held_in(lines, TURN_MESSAGES, TURN_BYTES);
        if waiting.is_empty() {
            return Ok(());
        }
        let ids: Vec<u64> = waiting.iter().map(|(id, _)| *id).collect();
        let read = self.held(topic.key(), &ids).await;
        let (mut releases, mut routed) = read.map_err(|error| {
            tracing::warn!(%error, cause = ?error, "held messages could not be read");
            Refused::Failed
        })?;
        self.judge(&mut routed).await;
        self.shape(&mut routed).await;
        faults::point("release-judged");
        let mut stuck = HashSet::new();
        for Routed { request, original, message, kind, outcome, .. } in routed {
            let slot = consumer::slot(&original.source);
            // What came before a lower limit on frames goes all the same: consumers can do with what waits.
            let body = (outcome == Outcome::Passed).then(|| dispatch::stored_form(&message, kind, &message.body));
            if outcome == Outcome::Held {
                // What follows in its line is judged again, after it.
                stuck.insert(slot);
            } else if !stuck.contains(&slot) {
                releases.push(Release { id: ids[request], body });
            }
        }
        let mut released: HashMap<Slot, Released> = HashMap::new();
        for Release { id, body } in &releases {
            let Ok(at) = ids.binary_search(id) else { continue };
            let Released { passed, dropped, .. } = released.entry(waiting[at].1).or_default();
            *if body.is_some() { passed } else { dropped } += 1;
        }
        if !releases.is_empty() {
            self.writer.release(topic.clone(), releases).await?;
            faults::point("release-committed");
        }
        for (slot, released) in released {
            // Whoever has gone away does not need to know.
            lines.get(&slot).into_iter().flatten().for_each(|teller| {
                let _ = teller.send(released);
            });
        }
        lines.retain(|slot, _| !stuck.contains(slot));
        Ok(())
    }

    /// Held messages as they go on from where they are; their `request` is their place in `ids`. Those that nobody wants any more go.
    async fn held(&self, topic: &TopicKey, ids: &[u64]) -> Result<(Vec<Release>, Vec<Routed>), StoreError> {
        let mut gone: HashSet<u64> = ids.iter().copied().collect();
        let mut routed = Vec::with_capacity(ids.len());
        for (id, form, held) in self.bodies.held(ids).await? {
            let Some(route) = self.index.get(&topic.tenant, held.subscription) else {
                let hearers = self.topics.get(topic).map_or(0, |topic| topic.hearers());
                messages_dropped("subscription_deleted").increment(hearers as u64);
                continue;
            };
            if let Some((message, kind)) = dispatch::original(&topic.tenant, &form, &held)
                && let Ok(at) = ids.binary_search(&id)
            {
                gone.remove(&id);
                let step = usize::from(held.step);
                routed.push(Routed { step, ..Routed::new(at, Arc::new(message), route, kind) });
            }
        }
        Ok((gone.into_iter().map(|id| Release { id, body: None }).collect(), routed))
    }
}
