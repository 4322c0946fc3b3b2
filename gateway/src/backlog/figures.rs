//! What operators see of topics and consumers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::held::{HeldFigures, Tally};
use super::settings::Policy;
use super::topic::{Consumer, Log, Topic, TopicKey, Topics, VOLATILE_ID_BITS};
use crate::consumer::Group;
use crate::message::Tenant;

/// What a rate looks back on.
const LOOK_BACK: Duration = Duration::from_secs(60);

/// A topic that has a consumer.
#[derive(Clone, Debug)]
pub struct TopicFigures {
    /// What identifies it.
    pub key: Arc<TopicKey>,
    /// What holds for it.
    pub policy: Policy,
    /// Stored messages.
    pub messages: u64,
    /// Their bytes, which the quota bounds.
    pub bytes: u64,
    /// Of the oldest stored message.
    pub oldest_age_ms: Option<u64>,
    /// Of the oldest stored message.
    pub expires_in_ms: Option<u64>,
    /// Those of them that wait to be judged, by the id of their subscription.
    pub held: BTreeMap<u64, HeldFigures>,
    /// Messages appended since the start of the process.
    pub appended: u64,
    /// Deliveries to all consumers since the start of the process, repeated ones included.
    pub delivered: u64,
    /// Messages appended per second, over about the last minute.
    pub rate_in: f64,
    /// Deliveries per second, over about the last minute.
    pub rate_out: f64,
    /// By name.
    pub consumers: Vec<ConsumerFigures>,
}

/// A consumer of a topic.
#[derive(Clone, Debug)]
pub struct ConsumerFigures {
    /// Its name.
    pub name: Box<str>,
    /// Connections.
    pub clients: usize,
    /// Messages that it has not acknowledged, delivered or not.
    pub backlog_messages: u64,
    /// Their bytes.
    pub backlog_bytes: u64,
    /// Of the oldest of them.
    pub oldest_age_ms: Option<u64>,
    /// Of the oldest of them.
    pub expires_in_ms: Option<u64>,
    /// Deliveries since the start of the process, repeated ones included.
    pub delivered: u64,
    /// Deliveries of messages that were delivered before, since the start of the process.
    pub redelivered: u64,
    /// Acknowledgements since the start of the process.
    pub acknowledged: u64,
    /// Acknowledgements per second, over about the last minute.
    pub ack_rate: f64,
    /// The last acknowledgement, in ms since the epoch; survives a restart.
    pub last_ack_ms: Option<i64>,
    /// Whether it was left behind and is owed nothing until it connects.
    pub parked: bool,
}

/// Counts, and tells how fast.
pub(super) struct Meter {
    pub(super) total: u64,
    /// What was counted, each fading with its age.
    fading: f64,
    at: Instant,
}

impl Meter {
    pub(super) fn new(now: Instant) -> Self {
        Self { total: 0, fading: 0.0, at: now }
    }

    #[expect(clippy::cast_precision_loss, reason = "a rate is no exact number")]
    pub(super) fn add(&mut self, count: u64, now: Instant) {
        self.fading = self.faded(now) + count as f64;
        self.at = now;
        self.total += count;
    }

    /// Per second.
    pub(super) fn rate(&self, now: Instant) -> f64 {
        self.faded(now) / LOOK_BACK.as_secs_f64()
    }

    fn faded(&self, now: Instant) -> f64 {
        let age = now.saturating_duration_since(self.at).as_secs_f64();
        self.fading * (-age / LOOK_BACK.as_secs_f64()).exp()
    }
}

/// What waits for a consumer: messages, bytes, and the oldest id.
struct Waiting {
    messages: u64,
    bytes: u64,
    oldest: Option<u64>,
}

impl Topics {
    /// Of all topics that have a consumer, of one tenant or of all.
    #[must_use]
    pub fn figures(&self, tenant: Option<&Tenant>) -> Vec<TopicFigures> {
        let topics = self.all();
        let wanted = topics.iter().filter(|topic| tenant.is_none_or(|tenant| topic.key().tenant == *tenant));
        wanted.map(|topic| self.figures_of(topic)).collect()
    }

    /// Of one topic, if it has a consumer.
    #[must_use]
    pub fn topic_figures(&self, key: &TopicKey) -> Option<TopicFigures> {
        Some(self.figures_of(&*self.get(key)?))
    }

    /// What a subscription holds in its topic.
    #[must_use]
    pub fn held(&self, topic: &TopicKey, subscription: u64) -> HeldFigures {
        let tally = self.get(topic).and_then(|topic| topic.log().held.tallies().get(&subscription).copied());
        tally.map(|tally| self.held_figures(tally, self.now_ms())).unwrap_or_default()
    }

    fn held_figures(&self, Tally { messages, bytes, oldest }: Tally, now_ms: i64) -> HeldFigures {
        let made_ms = self.times().of(oldest);
        let oldest_age_ms = made_ms.map(|ms| u64::try_from(now_ms - ms).unwrap_or_default());
        HeldFigures { messages, bytes, oldest_age_ms }
    }

    fn figures_of(&self, topic: &Topic) -> TopicFigures {
        let (now, now_ms) = (Instant::now(), self.now_ms());
        let log = topic.log();
        let policy = log.policy;
        let gap_messages = policy.gap_messages || self.asks_for_gaps(topic.key());
        let age = |id: Option<u64>| {
            let ms = if topic.key().non_persistent { volatile_ms(id?) } else { self.times().of(id?)? };
            Some(u64::try_from(now_ms - ms).unwrap_or_default())
        };
        let expires = |age: Option<u64>| age.map(|age| policy.ttl_ms().saturating_sub(age));
        let oldest_age_ms = age(log.oldest_id());
        let figures = |name: &str, consumer: &Consumer| {
            let Waiting { messages, bytes, oldest } = consumer.waiting(&log, topic.key().non_persistent);
            let oldest_age_ms = age(oldest);
            ConsumerFigures {
                name: name.into(),
                clients: consumer.group().map_or(0, Group::members),
                backlog_messages: messages,
                backlog_bytes: bytes,
                oldest_age_ms,
                expires_in_ms: expires(oldest_age_ms),
                delivered: consumer.counts.delivered,
                redelivered: consumer.counts.redelivered,
                acknowledged: consumer.counts.acknowledged.total,
                ack_rate: consumer.counts.acknowledged.rate(now),
                last_ack_ms: consumer.counts.settled_ms,
                parked: consumer.parked,
            }
        };
        let mut consumers: Vec<_> = log.consumers.iter().map(|(name, consumer)| figures(name, consumer)).collect();
        consumers.sort_by(|a, b| a.name.cmp(&b.name));
        TopicFigures {
            key: topic.key().clone(),
            policy: Policy { gap_messages, ..policy },
            messages: log.messages,
            bytes: log.bytes,
            oldest_age_ms,
            expires_in_ms: expires(oldest_age_ms),
            held: log.held.tallies().iter().map(|(id, tally)| (*id, self.held_figures(*tally, now_ms))).collect(),
            appended: log.appended.total,
            delivered: log.delivered.total,
            rate_in: log.appended.rate(now),
            rate_out: log.delivered.rate(now),
            consumers,
        }
    }
}

/// The ids of non-persistent topics begin with the time.
fn volatile_ms(id: u64) -> i64 {
    (id >> VOLATILE_ID_BITS).cast_signed()
}

impl Consumer {
    /// A cursor tells it of a persistent topic; of another one, those who are connected.
    fn waiting(&self, log: &Log, volatile: bool) -> Waiting {
        if self.parked {
            return Waiting { messages: 0, bytes: 0, oldest: None };
        }
        let group = self.group().filter(|_| volatile);
        let from = group.map_or(self.cursor.hi, Group::next);
        let start = log.entries.partition_point(|entry| entry.id < from);
        let new = (log.entries.len() - start) as u64;
        match group {
            Some(group) => Waiting {
                messages: new + group.open().count() as u64,
                bytes: log.entries.range(start..).map(|entry| u64::from(entry.len)).sum::<u64>()
                    + group.open().map(|listed| u64::from(listed.len)).sum::<u64>(),
                oldest: group.open().map(|listed| listed.id).next().or(log.entries.get(start).map(|entry| entry.id)),
            },
            None => Waiting {
                messages: new + self.cursor.holes.len() as u64,
                bytes: log.appended_bytes - self.done_bytes,
                oldest: log.oldest(self),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_stream_has_its_rate_and_silence_fades() {
        let start = Instant::now();
        let mut meter = Meter::new(start);
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        (1..=600).for_each(|second| meter.add(5, at(second)));
        assert_eq!(meter.total, 3_000);
        assert!((meter.rate(at(600)) - 5.0).abs() < 0.1, "{}", meter.rate(at(600)));
        assert!((meter.rate(at(660)) - 5.0 / std::f64::consts::E).abs() < 0.1);
        assert!(meter.rate(at(6_000)) < 1e-9);
    }
}
