//! Held messages are tried again: soon after their plugin has failed, then less and less often. They go with their subscription.
//!
//! In: the lines of held messages, looked at once a second. Out: releases.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::auth::chance;
use crate::backlog::{Release, Topic, Topics};
use crate::message::Tenant;
use crate::pipeline::Pipeline;
use crate::subscription::Index;
use crate::telemetry::messages_dropped;
use crate::writer::Writer;

/// Time between two looks.
const PERIOD: Duration = Duration::from_secs(1);
/// The pause before the first attempt; each that changes nothing doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Messages that one transaction deletes, and the pause after it.
const CHUNK: usize = 1000;
const PAUSE: Duration = Duration::from_millis(20);

/// What is needed for it.
pub struct Retries {
    /// Subscriptions in force.
    pub index: Arc<Index>,
    /// Where messages are held.
    pub topics: Topics,
    /// Releases them.
    pub pipeline: Pipeline,
    /// Deletes them.
    pub writer: Writer,
    /// The longest pause between two attempts.
    pub longest_pause: Duration,
}

impl Retries {
    /// Runs until `stop` ends.
    pub async fn run(self, stop: CancellationToken) {
        let mut attempts = HashMap::new();
        while stop.run_until_cancelled(tokio::time::sleep(PERIOD)).await.is_some() {
            self.look(&mut attempts).await;
        }
    }

    /// `attempts` has a task for each subscription, by its id, that leads a line.
    async fn look(&self, attempts: &mut HashMap<u64, AbortOnDropHandle<()>>) {
        let mut leading = BTreeMap::new();
        for (topic, subscriptions) in self.topics.holding() {
            let tenant = &topic.key().tenant;
            let (kept, deleted): (Vec<_>, Vec<_>) =
                subscriptions.into_iter().partition(|(id, _)| self.index.get(tenant, *id).is_some());
            leading.extend(kept.into_iter().filter(|(_, leads)| *leads).map(|(id, _)| (id, tenant.clone())));
            self.forget(&topic, deleted.into_iter().map(|(id, _)| id).collect()).await;
        }
        // Whoever leads a line again begins with a short pause.
        attempts.retain(|subscription, _| leading.contains_key(subscription));
        for (subscription, tenant) in leading {
            attempts.entry(subscription).or_insert_with(|| {
                let task = retry(self.pipeline.clone(), tenant, subscription, self.longest_pause);
                AbortOnDropHandle::new(tokio::spawn(task))
            });
        }
    }

    /// What subscriptions held that were deleted goes.
    async fn forget(&self, topic: &Arc<Topic>, deleted: Vec<u64>) {
        loop {
            let ids: Vec<u64> = deleted.iter().flat_map(|id| topic.held_by(*id, CHUNK)).take(CHUNK).collect();
            let missed = ids.len() * topic.hearers();
            if ids.is_empty() {
                return;
            }
            let releases = ids.into_iter().map(|id| Release { id, body: None }).collect();
            if self.writer.release(topic.clone(), releases).await.is_err() {
                // The writer has said why; the next look tries it again.
                return;
            }
            messages_dropped("subscription_deleted").increment(missed as u64);
            tokio::time::sleep(PAUSE).await;
        }
    }
}

async fn retry(pipeline: Pipeline, tenant: Tenant, subscription: u64, longest: Duration) {
    let mut pause = FIRST_PAUSE.min(longest);
    loop {
        // Subscriptions of one plugin do not all come at once.
        tokio::time::sleep(pause.mul_f64(0.5 + chance() / 2.0)).await;
        let released = pipeline.release(&tenant, [subscription]).await;
        tracing::debug!(%tenant, subscription, ?released, "held messages were tried again");
        let idle = released.passed + released.dropped == 0;
        pause = if idle { (2 * pause).min(longest) } else { FIRST_PAUSE.min(longest) };
    }
}
