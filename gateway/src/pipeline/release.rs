//! What plugins failed on is judged anew, line by line, by turns of the tenant's queue.
//!
//! ```text
//! release ─▶ admission queue ─▶ turn: read ─▶ judge ─▶ shape ─▶ writer ─▶ the next part, until nothing is left or faults again
//! ```
//! What comes in goes on between these turns. Each is on disk before it ends, so that memory tells the next turn who stands in line.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::{Admitted, Line, Outcome, Pipeline, Routed, TURN_BYTES, TURN_MESSAGES};
use crate::backlog::{Release, Topic, TopicKey};
use crate::consumer::{self, Slot};
use crate::message::Tenant;
use crate::store::StoreError;
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
    /// Messages that the subscription still holds.
    pub held: u64,
}

/// A turn of a release.
pub(super) struct Turn {
    topic: Arc<Topic>,
    /// Where there may be more to do.
    lines: HashSet<Slot>,
    /// What was done before.
    released: Released,
    /// Gets the lines and what was done after it.
    done: oneshot::Sender<(HashSet<Slot>, Released)>,
}

impl Pipeline {
    /// Judges what is held for the subscription anew, in order, in turns. Returns when nothing is left or what is left faults again.
    ///
    /// What stands in the same lines by other subscriptions of the topic is judged with it; where one of those leads a line, that
    /// is left to its own release.
    pub async fn release(&self, tenant: &Tenant, subscription: u64) -> Released {
        let mut released = Released::default();
        let Some(route) = self.0.index.get(tenant, subscription) else { return released };
        if let Some(topic) = self.0.topics.get(&route.topic) {
            let mut lines = topic.lines_led_by(subscription);
            while !lines.is_empty() {
                let (done, outcome) = oneshot::channel();
                let turn = Turn { topic: topic.clone(), lines, released, done };
                let _ = self.queue(tenant).send(Admitted::Release(turn)).await;
                // The gateway may be stopping.
                let Ok(after) = outcome.await else { break };
                (lines, released) = after;
            }
        }
        released.held = self.0.topics.held(&route.topic, subscription).messages;
        released
    }
}

impl Line {
    pub(super) async fn release(&self, Turn { topic, mut lines, mut released, done }: Turn) {
        // Memory shows what earlier turns have held once the writer has that on disk.
        self.writer.settled().await;
        for _ in 0..PARTS {
            if let Err(error) = self.release_part(&topic, &mut lines, &mut released).await {
                tracing::warn!(%error, "held messages are not released");
                lines.clear();
            }
        }
        let _ = done.send((lines, released));
    }

    /// Judges the oldest messages of the lines, and takes the lines away in which there is nothing more to do.
    async fn release_part(
        &self,
        topic: &Arc<Topic>,
        lines: &mut HashSet<Slot>,
        released: &mut Released,
    ) -> Result<(), Refused> {
        let ids = topic.held_in(lines, TURN_MESSAGES, TURN_BYTES);
        if ids.is_empty() {
            lines.clear();
            return Ok(());
        }
        let read = self.held(topic.key(), &ids).await;
        let (mut releases, mut routed) = read.map_err(|error| {
            tracing::warn!(%error, cause = ?error, "held messages could not be read");
            Refused::Failed
        })?;
        self.judge(&mut routed).await;
        self.shape(&mut routed).await;
        faults::point("release-judged");
        for Routed { request, original, message, kind, outcome, .. } in routed {
            let slot = consumer::slot(&original.source);
            // What came before a lower limit on frames goes all the same: consumers can do with what waits.
            let body = (outcome == Outcome::Passed).then(|| dispatch::stored_form(&message, kind, &message.body));
            if outcome == Outcome::Held {
                // What follows in its line is judged again, after it.
                lines.remove(&slot);
            } else if lines.contains(&slot) {
                releases.push(Release { id: ids[request], body });
            }
        }
        let passed = releases.iter().filter(|release| release.body.is_some()).count();
        let dropped = releases.len() - passed;
        if !releases.is_empty() {
            self.writer.release(topic.clone(), releases).await?;
        }
        faults::point("release-committed");
        released.passed += passed as u64;
        released.dropped += dropped as u64;
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
