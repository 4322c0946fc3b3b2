//! A topic in memory: its messages' ids, its consumers' cursors, and who is connected.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Instant;

use bytes::Bytes;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Bodies;
use super::figures::Meter;
use super::gap::{Gap, Gaps, is_gap, message_id};
use super::held::{Lines, Waiter};
use super::missed::{self, Missed, Reason};
use super::settings::{Book, Policy, Scope, Settings};
use super::staged::Parked;
use super::steady::{Note, Reading, Steady};
use super::times::Times;
use crate::clock::Clock;
use crate::consumer::{Busy, Cursor, Group, GroupLimits, Kind, Listed, MemberId, Settled, Slot};
use crate::message::Tenant;
use crate::store::StoreError;
use crate::telemetry::{count, messages_dropped};

/// A non-persistent topic's ids are the time in ms and these bits: more messages than a commit takes fit into a millisecond.
pub(super) const VOLATILE_ID_BITS: u32 = 20;

/// What identifies a topic (seed 000: subscriptions with the same name and persistence feed the same topic).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TopicKey {
    /// Whose it is.
    pub tenant: Tenant,
    /// The subscription name.
    pub name: Box<str>,
    /// Whether its messages are kept in memory only, for those who are connected.
    pub non_persistent: bool,
}

/// All topics that have ever had a consumer, and the non-persistent ones that have one now. Only the writer adds; it removes
/// the persistent ones, and the last connection of a non-persistent one takes that with it.
#[derive(Clone)]
pub struct Topics(Arc<Shared>);

/// Whoever needs several of these locks takes them in this order, with that of a [`Log`] after `list`.
struct Shared {
    list: RwLock<HashMap<Arc<TopicKey>, Arc<Topic>>>,
    settings: RwLock<Book>,
    /// Whether somebody asks for gap messages, for other reasons than the settings.
    asks: OnceLock<Asks>,
    times: Mutex<Times>,
    steady: Mutex<Steady>,
    clock: Clock,
}

type Asks = Box<dyn Fn(&TopicKey) -> bool + Send + Sync>;

/// One topic.
pub struct Topic {
    /// Row id; 0 of a non-persistent topic.
    pub(crate) id: i64,
    key: Arc<TopicKey>,
    log: Mutex<Log>,
    newest: watch::Sender<u64>,
}

/// A message that waits for `refs` consumers.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) id: u64,
    pub(super) len: u32,
    pub(super) refs: u16,
    pub(super) slot: Slot,
}

/// What the writer changes after a commit.
pub(super) struct Log {
    pub(super) policy: Policy,
    /// Ascending ids. Entries without references stay until they are at the front.
    pub(super) entries: VecDeque<Entry>,
    /// What waits to be judged.
    pub(super) held: Lines,
    /// The bodies of the entries, of a non-persistent topic.
    ring: VecDeque<Bytes>,
    /// Messages that wait, held ones among them.
    pub(super) messages: u64,
    /// Bytes of their bodies.
    pub(super) bytes: u64,
    /// Bytes that were ever in `bytes` since the start.
    pub(super) appended_bytes: u64,
    pub(super) appended: Meter,
    pub(super) delivered: Meter,
    pub(super) consumers: Consumers,
    /// How many of them are left behind until they connect.
    pub(super) parked: usize,
}

/// By name.
type Consumers = HashMap<Box<str>, Consumer>;

pub(super) struct Consumer {
    /// Row id; 0 on a non-persistent topic.
    pub(super) id: i64,
    pub(super) cursor: Cursor,
    pub(super) gaps: Gaps,
    /// Of `Log::appended_bytes`, those that it does not need any more.
    pub(super) done_bytes: u64,
    /// It was left behind, and is owed nothing until it connects.
    pub(super) parked: bool,
    pub(super) counts: Counts,
    /// There while anybody is connected.
    connected: Option<Connected>,
}

/// What a consumer did.
pub(super) struct Counts {
    pub(super) delivered: u64,
    pub(super) redelivered: u64,
    pub(super) acknowledged: Meter,
    /// When it last acknowledged a message, ms since the epoch.
    pub(super) settled_ms: Option<i64>,
    /// Messages that were handed to connections that ended without acknowledging them.
    returned: BTreeSet<u64>,
}

struct Connected {
    group: Group,
    kicked: CancellationToken,
    /// Wakes the members when one of them has made something possible for another.
    moved: watch::Sender<()>,
}

/// Who connects.
pub struct Connecting {
    /// The topic.
    pub topic: Arc<TopicKey>,
    /// The name of the consumer.
    pub consumer: Box<str>,
    /// What the token says of the consumer.
    pub kind: Kind,
    /// The name of the connection, which nobody else in the group has.
    pub member: Box<str>,
}

/// A connection's hold on its consumer; dropping it lets the others have what it has not acknowledged.
pub struct Attached {
    topic: Arc<Topic>,
    consumer: Box<str>,
    member: MemberId,
    kicked: CancellationToken,
    topics: Topics,
    newest: watch::Receiver<u64>,
    moved: watch::Receiver<()>,
}

impl Topics {
    pub(super) fn new(settings: Book, clock: Clock) -> Self {
        let (list, settings, times) = (RwLock::default(), RwLock::new(settings), Mutex::default());
        let steady = Mutex::new(Steady::start(Reading::of(&clock), Note::default()));
        Self(Arc::new(Shared { list, settings, asks: OnceLock::new(), times, steady, clock }))
    }

    /// Backlog time goes on from what is stored.
    pub(super) fn go_on(&self, stored: Note) {
        *self.steady().1 = Steady::start(Reading::of(&self.0.clock), stored);
    }

    /// The topic, if any consumer has ever connected to it.
    #[must_use]
    pub fn get(&self, key: &TopicKey) -> Option<Arc<Topic>> {
        self.0.list.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Whether anybody needs messages of the topic.
    #[must_use]
    pub fn wants(&self, key: &TopicKey) -> bool {
        self.0.list.read().unwrap_or_else(PoisonError::into_inner).contains_key(key)
    }

    /// How many topics the tenant has.
    #[must_use]
    pub fn count(&self, tenant: &Tenant) -> usize {
        self.0.list.read().unwrap_or_else(PoisonError::into_inner).keys().filter(|key| key.tenant == *tenant).count()
    }

    /// The topics of the tenant.
    #[must_use]
    pub fn keys(&self, tenant: &Tenant) -> Vec<Arc<TopicKey>> {
        let topics = self.0.list.read().unwrap_or_else(PoisonError::into_inner);
        topics.keys().filter(|key| key.tenant == *tenant).cloned().collect()
    }

    /// The topics of the tenant for which something is set.
    #[must_use]
    pub fn with_settings(&self, tenant: &Tenant) -> Vec<Arc<TopicKey>> {
        self.0.settings.read().unwrap_or_else(PoisonError::into_inner).topics(tenant)
    }

    /// The topics with held messages, and by which subscriptions they came; true: one of them leads a line.
    #[must_use]
    pub fn holding(&self) -> Vec<(Arc<Topic>, BTreeMap<u64, bool>)> {
        let of = |topic: Arc<Topic>| {
            let subscriptions = topic.log().held.subscriptions();
            (topic, subscriptions)
        };
        self.all().into_iter().map(of).filter(|(_, subscriptions)| !subscriptions.is_empty()).collect()
    }

    pub(super) fn all(&self) -> Vec<Arc<Topic>> {
        self.0.list.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// What holds for a topic, whether it exists or not.
    #[must_use]
    pub fn policy(&self, key: &TopicKey) -> Policy {
        let policy = self.policy_set(key);
        Policy { gap_messages: policy.gap_messages || self.asks_for_gaps(key), ..policy }
    }

    /// What holds by the settings alone.
    pub(super) fn policy_set(&self, key: &TopicKey) -> Policy {
        self.0.settings.read().unwrap_or_else(PoisonError::into_inner).policy(key)
    }

    /// `asks`: whether a subscription asks for gap messages in its topic, whatever the settings say. Once, at the start.
    pub fn listen_to(&self, asks: impl Fn(&TopicKey) -> bool + Send + Sync + 'static) {
        let _ = self.0.asks.set(Box::new(asks));
    }

    /// Whether the topic's subscriptions ask for gap messages.
    pub(super) fn asks_for_gaps(&self, key: &TopicKey) -> bool {
        self.0.asks.get().is_some_and(|asks| asks(key))
    }

    /// What is set for a topic, whether it exists or not.
    #[must_use]
    pub fn topic_settings(&self, key: &TopicKey) -> Settings {
        self.0.settings.read().unwrap_or_else(PoisonError::into_inner).topic(key)
    }

    /// What is set for the topics of a tenant.
    #[must_use]
    pub fn tenant_settings(&self, tenant: &Tenant) -> Settings {
        self.0.settings.read().unwrap_or_else(PoisonError::into_inner).tenant(tenant)
    }

    /// Puts settings in force.
    pub(super) fn set(&self, scope: Scope, settings: Settings) {
        self.0.settings.write().unwrap_or_else(PoisonError::into_inner).set(scope, settings);
        for topic in self.all() {
            topic.log().policy = self.policy_set(&topic.key);
        }
    }

    pub(super) fn times(&self) -> MutexGuard<'_, Times> {
        self.0.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of day, ms since the epoch.
    pub(super) fn wall_ms(&self) -> i64 {
        self.0.clock.now_ms()
    }

    /// Backlog time and its state.
    pub(super) fn steady(&self) -> (i64, MutexGuard<'_, Steady>) {
        let mut steady = self.0.steady.lock().unwrap_or_else(PoisonError::into_inner);
        (steady.now(Reading::of(&self.0.clock)), steady)
    }

    /// Backlog time, in ms.
    pub(super) fn now_ms(&self) -> i64 {
        self.steady().0
    }

    /// The time of day at backlog time `ms`.
    pub(super) fn day_time(&self, ms: i64) -> i64 {
        self.steady().1.wall(ms)
    }

    /// What a consumer is to be told of what it missed.
    pub(super) fn gap(&self, Missed { reason, messages, first, last, .. }: &Missed) -> Gap {
        let made_ms = |id| self.times().of(id).unwrap_or_else(|| self.now_ms());
        let [first_ms, last_ms] = [made_ms(*first), made_ms(*last)].map(|ms| self.day_time(ms));
        Gap { reason: *reason, missed: *messages, first_ms, last_ms }
    }

    pub(super) fn insert(&self, topic: Arc<Topic>) {
        self.0.list.write().unwrap_or_else(PoisonError::into_inner).insert(topic.key.clone(), topic);
    }

    pub(super) fn remove(&self, key: &TopicKey) {
        self.0.list.write().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// Adds a consumer to a non-persistent topic, and the topic if need be. It begins at message `next`.
    pub(super) fn add_volatile(&self, key: &Arc<TopicKey>, consumer: &str, next: u64) {
        let mut topics = self.0.list.write().unwrap_or_else(PoisonError::into_inner);
        let topic =
            topics.entry(key.clone()).or_insert_with(|| Arc::new(Topic::new(0, key.clone(), self.policy_set(key))));
        topic.log().add_consumer(consumer, 0, Cursor::starting_at(next));
    }

    /// Removes a consumer of a non-persistent topic, and the topic with its last one. False if there is none.
    pub(super) fn remove_volatile(&self, key: &TopicKey, consumer: &str) -> bool {
        let mut topics = self.0.list.write().unwrap_or_else(PoisonError::into_inner);
        let Some(topic) = topics.get(key) else { return false };
        let mut log = topic.log();
        let Some(consumer) = log.consumers.remove(consumer) else { return false };
        consumer.kick();
        let last = log.consumers.is_empty();
        drop(log);
        if last {
            topics.remove(key);
        }
        true
    }
}

impl Topic {
    pub(super) fn new(id: i64, key: Arc<TopicKey>, policy: Policy) -> Self {
        let now = Instant::now();
        let log = Log {
            policy,
            entries: VecDeque::new(),
            held: Lines::default(),
            ring: VecDeque::new(),
            messages: 0,
            bytes: 0,
            appended_bytes: 0,
            appended: Meter::new(now),
            delivered: Meter::new(now),
            consumers: HashMap::new(),
            parked: 0,
        };
        Self { id, key, log: Mutex::new(log), newest: watch::Sender::new(0) }
    }

    /// Bytes of the longest message that waits; 0 where none does.
    #[must_use]
    pub fn longest(&self) -> usize {
        let log = self.log();
        let lengths = log.entries.iter().map(|entry| entry.len).chain(log.held.iter().map(|waiter| waiter.len));
        lengths.max().unwrap_or_default() as usize
    }

    /// What identifies the topic.
    #[must_use]
    pub fn key(&self) -> &Arc<TopicKey> {
        &self.key
    }

    pub(super) fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn announce(&self, newest: u64) {
        self.newest.send_replace(newest);
    }

    /// Adds a message to a non-persistent topic, which gives up its oldest ones beyond its quota.
    pub(super) fn push_volatile(&self, id: u64, slot: Slot, body: Bytes) {
        let mut log = self.log();
        log.push(Entry { id, len: length(&body), refs: 0, slot });
        log.appended.add(1, Instant::now());
        log.ring.push_back(body);
        let mut lost = 0;
        while log.bytes > log.policy.quota_bytes && log.entries.len() > 1 {
            lost += log.pop_volatile();
        }
        drop(log);
        count_lost(lost);
        self.announce(id);
    }

    /// A non-persistent topic gives up what is below `below`.
    pub(super) fn expire_volatile(&self, below: u64) {
        let mut log = self.log();
        let mut expired = 0;
        while log.entries.front().is_some_and(|entry| entry.id < below) {
            expired += log.pop_volatile();
        }
        drop(log);
        missed::count(Reason::Expired, expired);
    }

    /// All messages below `below` are gone, and so is what waited in flight for acknowledgements of them.
    pub(super) fn cut(&self, below: u64) {
        if below == 0 {
            return;
        }
        let mut log = self.log();
        while log.entries.front().is_some_and(|entry| entry.id < below)
            && let Some(entry) = log.entries.pop_front()
        {
            log.messages -= u64::from(entry.refs > 0);
            log.bytes -= u64::from(entry.len);
        }
        log.trim();
        let expired = log.held.below(below);
        log.unhold(expired);
        log.consumers.values_mut().for_each(|consumer| consumer.skip_below(below));
    }

    /// Whether messages of `slot` have to wait behind held ones.
    #[must_use]
    pub fn holds(&self, slot: Slot) -> bool {
        self.log().held.holds(slot)
    }

    /// The lines of held messages whose oldest came by `subscription`.
    #[must_use]
    pub fn lines_led_by(&self, subscription: u64) -> Vec<Slot> {
        self.log().held.led_by(subscription).collect()
    }

    /// The oldest messages of these lines, ascending, each with its line: at most `most`, and `bytes`, but at least one. Lines that
    /// have ended are taken out.
    pub fn held_in<T>(&self, lines: &mut HashMap<Slot, T>, most: usize, bytes: usize) -> Vec<(u64, Slot)> {
        let log = self.log();
        lines.retain(|slot, _| log.held.holds(*slot));
        log.held.first_of(lines.keys().copied(), most, bytes)
    }

    /// The oldest held messages that came by `subscription`, ascending.
    #[must_use]
    pub fn held_by(&self, subscription: u64, most: usize) -> Vec<u64> {
        self.log().held.of(subscription).take(most).collect()
    }

    /// How many consumers get what is appended.
    #[must_use]
    pub fn hearers(&self) -> usize {
        let log = self.log();
        log.consumers.len() - log.parked
    }

    /// Bytes of the messages that wait.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.log().bytes
    }

    /// Row id.
    #[cfg(test)]
    pub(crate) fn row(&self) -> i64 {
        self.id
    }

    /// How many consumers have connected and not unsubscribed.
    #[must_use]
    pub fn consumers(&self) -> usize {
        self.log().consumers.len()
    }

    /// Takes the consumer for one connection; `None` if there is no such consumer.
    pub(super) fn attach(
        self: &Arc<Self>,
        who: &Connecting,
        limits: GroupLimits,
        topics: &Topics,
    ) -> Option<Result<Attached, Busy>> {
        let mut log = self.log();
        let Log { entries, consumers, .. } = &mut *log;
        let Consumer { cursor, gaps, connected, .. } = consumers.get_mut(&who.consumer)?;
        let connected = connected.get_or_insert_with(|| {
            let holes = cursor.holes.iter().filter_map(|id| position(entries, *id)).map(|at| entries[at].listed());
            Connected {
                group: Group::new(who.kind, limits, cursor.hi, holes.chain(gaps.listed())),
                kicked: CancellationToken::new(),
                moved: watch::Sender::new(()),
            }
        });
        Some(connected.group.join(who.kind, &who.member).map(|member| {
            connected.moved.send_replace(());
            Attached {
                topic: self.clone(),
                consumer: who.consumer.clone(),
                member,
                kicked: connected.kicked.clone(),
                topics: topics.clone(),
                newest: self.newest.subscribe(),
                moved: connected.moved.subscribe(),
            }
        }))
    }
}

impl Attached {
    /// The topic that it reads.
    #[must_use]
    pub fn topic(&self) -> &Arc<Topic> {
        &self.topic
    }

    /// The consumer's name.
    #[must_use]
    pub fn consumer(&self) -> &str {
        &self.consumer
    }

    /// Ends when the consumer is unsubscribed.
    #[must_use]
    pub fn kicked(&self) -> &CancellationToken {
        &self.kicked
    }

    /// The next messages for this connection, ascending; see [`Group::claim`]. What stands for messages that it missed is among
    /// them, under an id of its own kind, see [`super::message_id`].
    #[must_use]
    pub fn claim(&self, most: usize, bytes: usize) -> Vec<u64> {
        let mut log = self.topic.log();
        let Log { entries, consumers, delivered, .. } = &mut *log;
        let Some((connected, counts, gaps)) = self.held(consumers) else { return Vec::new() };
        let list = |next| {
            let start = entries.partition_point(|entry| entry.id < next);
            entries.range(start..).map(Entry::listed)
        };
        let mut claimed = connected.group.claim(self.member, most, bytes, list);
        let again = claimed.iter().filter(|id| counts.returned.remove(id)).count() as u64;
        counts.delivered += claimed.len() as u64;
        counts.redelivered += again;
        delivered.add(claimed.len() as u64, Instant::now());
        count().messages_delivered.increment(claimed.len() as u64);
        count().messages_redelivered.increment(again);
        gaps.mark(&mut claimed);
        claimed
    }

    /// The bodies of claimed messages, in that order. Those that are gone are settled and left out.
    pub async fn read(&self, ids: &[u64], bodies: &Bodies) -> Result<Vec<(u64, Bytes)>, StoreError> {
        if ids.iter().any(|id| is_gap(*id)) {
            return self.read_with_gaps(ids, bodies).await;
        }
        let found = if self.topic.key.non_persistent { self.ring(ids) } else { bodies.read(ids).await? };
        if found.len() < ids.len() {
            let gone = ids.iter().filter(|id| found.binary_search_by_key(*id, |(id, _)| *id).is_err());
            let lost = self.release(gone.copied().collect(), |_, _| ()).len() as u64;
            // Of what is gone from the disk, the commit that deleted it counts who missed it.
            if self.topic.key.non_persistent {
                count_lost(lost);
            }
        }
        Ok(found)
    }

    async fn read_with_gaps(&self, ids: &[u64], bodies: &Bodies) -> Result<Vec<(u64, Bytes)>, StoreError> {
        let messages: Vec<u64> = ids.iter().copied().filter(|id| !is_gap(*id)).collect();
        let mut found = Box::pin(self.read(&messages, bodies)).await?;
        let mut log = self.topic.log();
        if let Some((_, _, gaps)) = self.held(&mut log.consumers) {
            found.extend(gaps.forms(ids, &self.topic.key.tenant, &self.consumer));
        }
        found.sort_unstable_by_key(|(id, _)| message_id(*id));
        Ok(found)
    }

    fn ring(&self, ids: &[u64]) -> Vec<(u64, Bytes)> {
        let log = self.topic.log();
        ids.iter().filter_map(|id| Some((*id, log.ring.get(log.position(*id)?)?.clone()))).collect()
    }

    /// Whether message `id` waits for the connection to acknowledge it; no more, once the topic has given it up.
    #[must_use]
    pub fn holds(&self, id: u64) -> bool {
        let mut log = self.topic.log();
        self.held(&mut log.consumers).is_some_and(|(connected, _, gaps)| {
            gaps.contains(message_id(id)) == is_gap(id) && connected.group.holds(self.member, message_id(id))
        })
    }

    /// The connection has acknowledged message `id`. False if it is not waiting for that.
    pub fn settle(&self, id: u64) -> bool {
        !self.settle_all(vec![id]).is_empty()
    }

    /// The connection has acknowledged these messages. Returns those that it was waiting for.
    pub fn settle_all(&self, ids: Vec<u64>) -> Vec<u64> {
        self.release(ids, |counts, settled| {
            counts.acknowledged.add(settled, Instant::now());
            count().messages_acknowledged.increment(settled);
            counts.settled_ms = Some(self.topics.wall_ms());
        })
    }

    fn release(&self, mut ids: Vec<u64>, count: impl FnOnce(&mut Counts, u64)) -> Vec<u64> {
        let mut log = self.topic.log();
        let Some((connected, counts, gaps)) = self.held(&mut log.consumers) else { return Vec::new() };
        let mut moved = false;
        ids.retain(|id| {
            if gaps.contains(message_id(*id)) != is_gap(*id) {
                return false;
            }
            match connected.group.settle(self.member, message_id(*id)) {
                Settled::Unknown => false,
                Settled::Done { others } => {
                    moved |= others;
                    true
                }
            }
        });
        if moved {
            connected.moved.send_replace(());
        }
        if !ids.is_empty() {
            count(counts, ids.len() as u64);
        }
        ids
    }

    /// Waits until there may be something new to claim. False if there never will be.
    pub async fn changed(&mut self) -> bool {
        tokio::select! {
            changed = self.newest.changed() => changed.is_ok(),
            changed = self.moved.changed() => changed.is_ok(),
        }
    }

    /// `None` once the consumer is unsubscribed: one of the same name is another one.
    fn held<'a>(&self, consumers: &'a mut Consumers) -> Option<(&'a mut Connected, &'a mut Counts, &'a Gaps)> {
        let Consumer { connected, counts, gaps, .. } = consumers.get_mut(&self.consumer)?;
        connected.as_mut().filter(|_| !self.kicked.is_cancelled()).map(|connected| (connected, counts, &*gaps))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // Nobody may connect to a non-persistent topic while it goes with its last consumer.
        let mut topics = self.topics.0.list.write().unwrap_or_else(PoisonError::into_inner);
        let mut log = self.topic.log();
        if self.kicked.is_cancelled() {
            return;
        }
        let Some(consumer) = log.consumers.get_mut(&self.consumer) else { return };
        let Some(connected) = &mut consumer.connected else { return };
        consumer.counts.returned.extend(connected.group.leave(self.member));
        consumer.counts.returned.retain(|id| consumer.cursor.needs(*id));
        if !connected.group.is_empty() {
            connected.moved.send_replace(());
            return;
        }
        consumer.connected = None;
        if self.topic.key.non_persistent {
            log.consumers.remove(&self.consumer);
            if log.consumers.is_empty() {
                topics.remove(&self.topic.key);
            }
        }
    }
}

impl Consumer {
    /// Messages below `Log::appended_bytes` that it does not need make up `done_bytes`.
    fn new(id: i64, cursor: Cursor, done_bytes: u64) -> Self {
        let counts = Counts {
            delivered: 0,
            redelivered: 0,
            acknowledged: Meter::new(Instant::now()),
            settled_ms: None,
            returned: BTreeSet::new(),
        };
        let gaps = Gaps::default();
        Self { id, cursor, gaps, done_bytes, parked: false, counts, connected: None }
    }

    /// Whether message `id` of the topic waits for it.
    pub(super) fn needs(&self, id: u64) -> bool {
        !self.parked && self.cursor.needs(id)
    }

    pub(super) fn group(&self) -> Option<&Group> {
        self.connected.as_ref().map(|connected| &connected.group)
    }

    /// No message below `below` is waited for.
    pub(super) fn skip_below(&mut self, below: u64) {
        let Some(connected) = &mut self.connected else { return };
        connected.group.give_up_below(below, |id| self.gaps.contains(id));
        connected.moved.send_replace(());
    }

    /// Takes a gap back from its connections; false if they have it already.
    pub(super) fn withdraw(&mut self, gap: u64) -> bool {
        self.connected.as_mut().is_none_or(|connected| connected.group.give_up(gap))
    }

    /// What it missed changes. Gaps that it did not have, or that were withdrawn, go to its connections.
    pub(super) fn set_gaps(&mut self, gaps: Gaps, withdrawn: Option<u64>) {
        if let Some(connected) = &mut self.connected {
            let new = |id| !self.gaps.contains(id) || withdrawn == Some(id);
            for gap in gaps.listed().filter(|gap| new(gap.id)) {
                connected.group.offer(gap);
                connected.moved.send_replace(());
            }
        }
        self.gaps = gaps;
    }

    /// Ends the live connections, if there are any.
    pub(super) fn kick(&self) {
        if let Some(connected) = &self.connected {
            connected.kicked.cancel();
        }
    }
}

impl Entry {
    fn listed(&self) -> Listed {
        Listed { id: self.id, slot: self.slot, len: self.len }
    }
}

/// Bytes of a message.
pub(super) fn length(body: &Bytes) -> u32 {
    u32::try_from(body.len()).unwrap_or(u32::MAX)
}

fn position(entries: &VecDeque<Entry>, id: u64) -> Option<usize> {
    entries.binary_search_by_key(&id, |entry| entry.id).ok()
}

fn count_lost(messages: u64) {
    if messages > 0 {
        messages_dropped("lag").increment(messages);
    }
}

impl Log {
    pub(super) fn position(&self, id: u64) -> Option<usize> {
        position(&self.entries, id)
    }

    pub(super) fn ids_between(&self, from: u64, to: u64) -> impl Iterator<Item = u64> + '_ {
        let start = self.entries.partition_point(|entry| entry.id < from);
        let end = self.entries.partition_point(|entry| entry.id < to).max(start);
        self.entries.range(start..end).map(|entry| entry.id)
    }

    /// Adds the newest message.
    pub(super) fn push(&mut self, entry: Entry) {
        self.messages += 1;
        self.bytes += u64::from(entry.len);
        self.appended_bytes += u64::from(entry.len);
        self.entries.push_back(entry);
    }

    /// Adds a consumer that is owed nothing of what is here.
    pub(super) fn add_consumer(&mut self, name: &str, row: i64, cursor: Cursor) -> &mut Consumer {
        let consumer = Consumer::new(row, cursor, self.appended_bytes);
        self.consumers.entry(name.into()).insert_entry(consumer).into_mut()
    }

    /// Adds the newest message, which has to be judged.
    pub(super) fn hold(&mut self, waiter: Waiter) {
        self.messages += 1;
        self.bytes += u64::from(waiter.len);
        self.held.push(waiter);
    }

    /// Held messages go.
    pub(super) fn unhold(&mut self, ids: impl IntoIterator<Item = u64>) {
        let (messages, bytes) = self.held.remove(ids);
        self.messages -= messages;
        self.bytes -= bytes;
    }

    /// Id and length of what waits, oldest first.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (u64, u32)> {
        let mut judged =
            self.entries.iter().filter(|entry| entry.refs > 0).map(|entry| (entry.id, entry.len)).peekable();
        let mut held = self.held.iter().map(|waiter| (waiter.id, waiter.len)).peekable();
        std::iter::from_fn(move || match (judged.peek(), held.peek()) {
            (Some((judged_id, _)), Some((held_id, _))) if held_id < judged_id => held.next(),
            (Some(_), _) => judged.next(),
            (None, _) => held.next(),
        })
    }

    /// The oldest message that waits.
    pub(super) fn oldest_id(&self) -> Option<u64> {
        let (judged, held) = (self.entries.front().map(|entry| entry.id), self.held.iter().next().map(|held| held.id));
        judged.into_iter().chain(held).min()
    }

    /// What a consumer at `cursor` misses if everything below `below` goes; `None`: nothing.
    pub(super) fn missed(&self, cursor: &Cursor, below: u64, reason: Reason) -> Option<Missed> {
        let holes = cursor.holes.iter().copied().take_while(|id| *id < below);
        let lens = holes.chain(self.ids_between(cursor.hi, below)).filter_map(|id| self.position(id));
        lens.map(|at| self.entries[at]).fold(None, |missed: Option<Missed>, Entry { id, len, .. }| {
            let missed = missed.unwrap_or(Missed { reason, messages: 0, bytes: 0, first: id, last: id });
            Some(Missed { messages: missed.messages + 1, bytes: missed.bytes + u64::from(len), last: id, ..missed })
        })
    }

    /// Drops the oldest message of a non-persistent topic. Returns how many consumers had not been handed it.
    fn pop_volatile(&mut self) -> u64 {
        let Some(entry) = self.entries.pop_front() else { return 0 };
        self.ring.pop_front();
        self.messages -= 1;
        self.bytes -= u64::from(entry.len);
        let groups = self.consumers.values_mut().filter_map(|consumer| consumer.connected.as_mut());
        groups.map(|connected| u64::from(connected.group.give_up(entry.id))).sum()
    }

    /// Moves a consumer's cursor; it acknowledged `ids`, and `missed_bytes` are gone besides.
    pub(super) fn settle(&mut self, consumer: &str, cursor: Cursor, ids: &[u64], missed_bytes: u64) {
        let bytes = |id: &u64| self.position(*id).map_or(0, |at| u64::from(self.entries[at].len));
        let done_bytes = ids.iter().map(bytes).sum::<u64>() + missed_bytes;
        let Some(consumer) = self.consumers.get_mut(consumer) else { return };
        consumer.cursor = cursor;
        consumer.done_bytes += done_bytes;
        for id in ids {
            self.release(*id);
        }
    }

    /// The oldest message that waits for a consumer.
    pub(super) fn oldest(&self, consumer: &Consumer) -> Option<u64> {
        let Cursor { hi, holes } = &consumer.cursor;
        let first = || self.ids_between(*hi, u64::MAX).next();
        if consumer.parked { None } else { holes.first().copied().or_else(first) }
    }

    /// Nothing waits for a consumer any more. Returns what waits for nobody now.
    pub(super) fn give_up(&mut self, consumer: &str) -> Vec<u64> {
        let Some(consumer) = self.consumers.get(consumer) else { return Vec::new() };
        let needed = self.entries.iter().map(|entry| entry.id).filter(|id| consumer.needs(*id));
        let needed: Vec<u64> = needed.collect();
        needed.into_iter().filter(|id| self.release(*id)).collect()
    }

    /// A consumer that lags goes on at `cursor`, above all that is there. Returns what waits for nobody now.
    pub(super) fn park(&mut self, name: &str, cursor: Cursor, how: Parked) -> Vec<u64> {
        let garbage = self.give_up(name);
        let Some(consumer) = self.consumers.get_mut(name) else { return garbage };
        consumer.skip_below(cursor.hi);
        consumer.cursor = cursor;
        consumer.done_bytes = self.appended_bytes;
        consumer.parked = how == Parked::Waits;
        self.parked += usize::from(consumer.parked);
        garbage
    }

    /// A consumer that was left behind is owed everything from `next_id` on.
    pub(super) fn resume(&mut self, name: &str, next_id: u64) {
        let Some(consumer) = self.consumers.get_mut(name).filter(|consumer| consumer.parked) else { return };
        consumer.cursor = Cursor::starting_at(next_id);
        consumer.done_bytes = self.appended_bytes;
        consumer.parked = false;
        self.parked -= 1;
    }

    /// Drops one reference; true if that was the last one.
    pub(super) fn release(&mut self, id: u64) -> bool {
        let Some(position) = self.position(id) else { return false };
        let entry = &mut self.entries[position];
        entry.refs = entry.refs.saturating_sub(1);
        if entry.refs > 0 {
            return false;
        }
        self.messages -= 1;
        self.bytes -= u64::from(std::mem::take(&mut entry.len));
        self.trim();
        true
    }

    /// What nobody needs goes from the front.
    fn trim(&mut self) {
        while self.entries.front().is_some_and(|entry| entry.refs == 0) {
            self.entries.pop_front();
        }
    }
}
