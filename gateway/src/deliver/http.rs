//! The pushes of one consumer: each message is a POST to its endpoint, and a 2xx acknowledges it.
//!
//! One request at a time, in the order of the topic: the next message goes when the one before is acknowledged or given up by the
//! topic. What fails is tried again, with pauses that grow.

use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::endpoint::{Failure, Lane};
use crate::auth::chance;
use crate::backlog::{self, Attached, Bodies, TopicKey};
use crate::clock::Clock;
use crate::dispatch::Notification;
use crate::store::StoreError;
use crate::telemetry::{Throttle, push_requests};
use crate::writer::Writer;

/// The longest pause after a first failure.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The shortest pause.
const LEAST_PAUSE: Duration = Duration::from_millis(50);
/// What a request that is on its way gets to be answered when the gateway stops.
const GRACE: Duration = Duration::from_secs(2);

/// Lines on endpoints that begin or cease to fail, in a second.
const LINES: u32 = 20;

static FAILING: LazyLock<Throttle> = LazyLock::new(|| Throttle::new(LINES));

/// How the pushes of a consumer go, for those who look.
#[derive(Debug, Default)]
pub struct Status(Mutex<Trouble>);

/// What went wrong since the last delivery; nothing at first.
#[derive(Clone, Debug, Default)]
pub struct Trouble {
    /// Attempts that failed.
    pub attempts: u32,
    /// When the first of them did, ms since the epoch.
    pub since_ms: Option<i64>,
    /// Why the last of them did; holds no secret.
    pub last_error: Option<String>,
}

impl Status {
    /// How it goes now.
    #[must_use]
    pub fn trouble(&self) -> Trouble {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Trouble> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why pushing ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The gateway stops.
    Stopping,
    /// The consumer is unsubscribed.
    Unsubscribed,
}

/// What pushing to one consumer takes.
pub struct Pushing<'a> {
    /// The hold on the consumer.
    pub attached: Attached,
    /// Bodies of messages.
    pub bodies: &'a Bodies,
    /// The single writer.
    pub writer: &'a Writer,
    /// The way to the endpoint.
    pub lane: Lane,
    /// Told how it goes.
    pub status: &'a Status,
    /// Time of failures.
    pub clock: &'a Clock,
    /// The longest pause between attempts that an endpoint does not ask for.
    pub longest_pause: Duration,
    /// Ends when the gateway stops.
    pub stopping: &'a CancellationToken,
}

impl Pushing<'_> {
    /// Delivers until something ends it. The hold on the consumer is given up at the return.
    pub async fn run(mut self) -> End {
        let kicked = self.attached.kicked().clone();
        while !self.stopping.is_cancelled() {
            let next = self.attached.claim(1, usize::MAX);
            let delivered = match next.first() {
                Some(id) => tokio::select! {
                    biased;
                    () = kicked.cancelled() => return End::Unsubscribed,
                    delivered = self.deliver(*id) => delivered,
                },
                None => tokio::select! {
                    biased;
                    () = kicked.cancelled() => Err(End::Unsubscribed),
                    () = self.stopping.cancelled() => Ok(()),
                    changed = self.attached.changed() => if changed { Ok(()) } else { Err(End::Unsubscribed) },
                },
            };
            if let Err(end) = delivered {
                return end;
            }
        }
        End::Stopping
    }

    /// Tries until the message is acknowledged, or the topic has given it up.
    async fn deliver(&self, id: u64) -> Result<(), End> {
        loop {
            let pause = match self.read(id).await {
                Ok(None) => return Ok(()),
                Ok(Some(notification)) => {
                    let attempt = tokio::select! {
                        attempt = self.attempt(id, notification) => attempt,
                        () = async { self.stopping.cancelled().await; sleep(GRACE).await } => return Err(End::Stopping),
                    };
                    match attempt {
                        Ok(()) => {
                            self.acknowledge(id).await;
                            return Ok(());
                        }
                        Err(failure) => self.note(&failure),
                    }
                }
                Err(error) => {
                    tracing::error!(%error, cause = ?error, "reading the backlog failed");
                    self.longest_pause
                }
            };
            tokio::select! {
                biased;
                () = self.stopping.cancelled() => return Err(End::Stopping),
                () = sleep(pause) => {}
            }
        }
    }

    /// The message, read anew for each attempt: what has waited for long may have been given up, and need not be in memory.
    async fn read(&self, id: u64) -> Result<Option<Notification>, StoreError> {
        if !self.attached.holds(id) {
            return Ok(None);
        }
        let found = self.attached.read(&[id], self.bodies).await?;
        Ok(found.first().map(|(_, stored)| Notification::of(stored)))
    }

    async fn attempt(&self, id: u64, notification: Notification) -> Result<(), Failure> {
        let mut headers = HeaderMap::new();
        let key = self.attached.topic().key();
        for (name, value) in [
            ("tidegate-message-id", backlog::message_id(id).to_string().as_bytes()),
            ("tidegate-notification", &notification.description),
            ("tidegate-action", &notification.action),
            ("tidegate-subscription", key.name.as_bytes()),
            ("tidegate-subscriber", self.attached.consumer().as_bytes()),
        ] {
            // Names and ids hold no control characters, so that there is always a value.
            headers.extend(HeaderValue::from_bytes(value).ok().map(|value| (HeaderName::from_static(name), value)));
        }
        let outcome = self.lane.post(headers, notification.media_type, notification.body).await;
        push_requests(outcome.as_ref().map_or_else(|failure| failure.kind.label(), |()| "delivered")).increment(1);
        outcome
    }

    async fn acknowledge(&self, id: u64) {
        let before = std::mem::take(&mut *self.status.lock());
        if before.since_ms.is_some() {
            self.tell(|TopicKey { tenant, name, non_persistent }, consumer, endpoint, suppressed| {
                let failures = before.attempts;
                tracing::info!(%tenant, topic = name, non_persistent, consumer, endpoint, failures, suppressed, "pushing goes on");
            });
        }
        if self.attached.settle(id) {
            let (topic, consumer) = (self.attached.topic().clone(), self.attached.consumer().into());
            self.writer.settle(topic, consumer, vec![id]).await;
        }
    }

    /// Takes a failure down; returns how long to wait.
    fn note(&self, failure: &Failure) -> Duration {
        let mut trouble = self.status.lock();
        trouble.attempts = trouble.attempts.saturating_add(1);
        trouble.last_error = Some(failure.reason.clone());
        if trouble.since_ms.is_none() {
            trouble.since_ms = Some(self.clock.now_ms());
            self.tell(|TopicKey { tenant, name, non_persistent }, consumer, endpoint, suppressed| {
                let reason = &failure.reason;
                tracing::warn!(%tenant, topic = name, non_persistent, consumer, endpoint, reason, suppressed, "pushing fails");
            });
        }
        pause(trouble.attempts, failure, self.longest_pause, chance())
    }

    /// Hands the topic, the consumer and the endpoint to `line`, with the number of lines left out before, if there is room in the log.
    fn tell(&self, line: impl FnOnce(&TopicKey, &str, &str, u64)) {
        if let Some(suppressed) = FAILING.pass(Instant::now()) {
            line(self.attached.topic().key(), self.attached.consumer(), &self.lane.endpoint, suppressed);
        }
    }
}

/// How long to wait after `attempts` failures in a row: anything up to a bound that doubles (full jitter), lest consumers that
/// failed together come again together. What only a change can mend waits for at least half of the longest pause. `chance`: 0 to 1.
fn pause(attempts: u32, failure: &Failure, longest: Duration, chance: f64) -> Duration {
    let pause = if failure.kind.is_lasting() {
        longest.mul_f64(0.5 + chance / 2.0)
    } else {
        let bound = FIRST_PAUSE.saturating_mul(1 << attempts.saturating_sub(1).min(20)).min(longest);
        bound.mul_f64(chance).max(LEAST_PAUSE)
    };
    failure.retry_after.map_or(pause, |asked| pause.max(asked + FIRST_PAUSE.mul_f64(chance)))
}

#[cfg(test)]
mod tests {
    use super::super::endpoint::FailureKind;
    use super::*;

    const LONGEST: Duration = Duration::from_secs(60);

    fn after(attempts: u32, kind: FailureKind, asked: Option<u64>, chance: f64) -> u128 {
        let failure = Failure { kind, reason: String::new(), retry_after: asked.map(Duration::from_secs) };
        pause(attempts, &failure, LONGEST, chance).as_millis()
    }

    #[test]
    fn pauses_grow_up_to_the_longest_and_lie_anywhere_below() {
        let unavailable = |attempts, chance| after(attempts, FailureKind::Unavailable, None, chance);
        let bounds = [1, 2, 3, 7, 8, 9, u32::MAX].map(|attempts| unavailable(attempts, 1.0));
        assert_eq!(bounds, [500, 1_000, 2_000, 32_000, 60_000, 60_000, 60_000]);
        assert_eq!([0.0, 0.5].map(|chance| unavailable(8, chance)), [50, 30_000]);
    }

    #[test]
    fn what_only_a_change_can_mend_is_tried_seldom() {
        for kind in [FailureKind::Refused, FailureKind::Forbidden] {
            assert_eq!([0.0, 1.0].map(|chance| after(1, kind, None, chance)), [30_000, 60_000]);
        }
    }

    #[test]
    fn an_endpoint_that_asks_for_a_pause_gets_it() {
        assert_eq!(after(1, FailureKind::Unavailable, Some(10), 0.5), 10_250);
        assert_eq!(after(1, FailureKind::Unavailable, Some(600), 0.0), 600_000);
        assert_eq!(after(8, FailureKind::Unavailable, Some(1), 1.0), 60_000);
        assert_eq!(after(1, FailureKind::Refused, Some(1), 0.0), 30_000);
    }
}
