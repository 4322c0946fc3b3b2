//! What the writer knows of the backlog: it stages a batch, and changes memory only after the batch is committed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use sqlx::Row as _;

use super::gap;
use super::held::Waiter;
use super::missed::{self, Reason};
use super::room::{self, NoRoom, Room, Short};
use super::settings::{self, Book, OnFull, Policy, Scope, Settings};
use super::staged::{self, Appended, Moved, Staged, Touched};
use super::steady::Note;
use super::topic::{Entry, Log, Topic, TopicKey, Topics, VOLATILE_ID_BITS, length};
use super::{Attached, Bodies, Connecting, Held, Record, Rejected, Release};
use crate::clock::Clock;
use crate::consumer::{Busy, Cursor, GroupLimits, Slot};
use crate::faults;
use crate::store::{CursorRow, MessageRow, Statement, StoreError, Transaction, Value, Writing};

/// Messages that one transaction deletes when a consumer's backlog is given up.
const GARBAGE_PER_COMMIT: usize = 1000;
/// Messages past their time to live that one transaction deletes.
const EXPIRED_PER_COMMIT: usize = 1000;
/// Time between two looks for them, in ms.
const SWEEP_MS: i64 = 1_000;
/// Messages per query of the start-up scan.
const SCAN_PAGE: i64 = 20_000;

/// Topics, cursors and the sequence of message ids. There is one, and the writer owns it.
pub struct Ledger {
    topics: Topics,
    bodies: Bodies,
    next_id: u64,
    /// The next message id of non-persistent topics. They begin with the time, since nothing is written down that they could
    /// go on from.
    next_volatile_id: u64,
    /// Messages that lost their last reference outside a batch.
    garbage: Vec<u64>,
    /// Backlog time of the next look for messages that are too old.
    sweep_ms: i64,
    /// Whether there may be messages that grow old.
    ageing: bool,
}

/// Bounds on what waits.
#[derive(Clone, Copy, Debug)]
pub struct BacklogLimits {
    /// Stored bytes of a topic, if nothing else is set for it.
    pub quota_bytes: u64,
    /// Seconds that a message is kept, if nothing else is set for its topic.
    pub ttl_seconds: u64,
    /// Bytes of the newest bodies, of all topics together, that are in memory.
    pub tail_bytes: usize,
    /// Bytes of a non-persistent topic, if nothing else is set for it.
    pub volatile_bytes: u64,
}

impl Ledger {
    /// Reads the topics, consumers and the list of waiting messages.
    pub async fn load(
        writing: &mut Writing,
        readers: sqlx::SqlitePool,
        limits: BacklogLimits,
        clock: Clock,
    ) -> Result<Self, StoreError> {
        let BacklogLimits { quota_bytes, ttl_seconds, volatile_bytes, .. } = limits;
        let persistent = Policy { quota_bytes, ttl_seconds, on_full: OnFull::Reject, gap_messages: false };
        let mut book = Book::new(persistent, Policy { quota_bytes: volatile_bytes, ..persistent });
        book.load(writing).await?;
        let topics = Topics::new(book, clock);
        let by_row = load_topics(writing, &topics).await?;
        let mut highest = load_consumers(writing, &by_row).await?;
        let mut garbage = Vec::new();
        highest = highest.max(load_messages(writing, &topics, &by_row, &mut garbage).await?);
        let floor: i64 =
            sqlx::query_scalar("SELECT v FROM meta WHERE k = 'message_id'").fetch_one(writing.connection()).await?;
        let next_id = highest.max(floor.cast_unsigned());
        let bodies = Bodies::new(readers, limits.tail_bytes, next_id);
        let stored = Note::load(writing).await?;
        let reached_ms = stored.reached_ms.max(topics.times().newest_ms());
        topics.go_on(Note { reached_ms, ..stored });
        Ok(Self { bodies, topics, next_id, next_volatile_id: 0, garbage, sweep_ms: 0, ageing: true })
    }

    /// The topics, for rooms that only look.
    #[must_use]
    pub fn topics(&self) -> Topics {
        self.topics.clone()
    }

    /// The bodies, for dispatch.
    #[must_use]
    pub fn bodies(&self) -> Bodies {
        self.bodies.clone()
    }

    /// An empty batch, with a slice of the garbage.
    pub fn stage(&mut self) -> Staged {
        let now_ms = self.topics.now_ms();
        self.next_volatile_id = self.next_volatile_id.max(now_ms.cast_unsigned() << VOLATILE_ID_BITS);
        let garbage = self.garbage.split_off(self.garbage.len().saturating_sub(GARBAGE_PER_COMMIT));
        let transaction = Transaction { now_ms, freed: garbage.clone(), ..Transaction::default() };
        Staged { transaction, garbage, ..Staged::default() }
    }

    /// How long an otherwise idle writer may wait before it commits to delete something; `None`: there is nothing.
    #[must_use]
    pub fn rest(&self) -> Option<Duration> {
        let until_sweep = self.sweep_ms.saturating_sub(self.topics.now_ms()).max(0).cast_unsigned();
        match (self.garbage.is_empty(), self.ageing) {
            (false, _) => Some(Duration::ZERO),
            (true, true) => Some(Duration::from_millis(until_sweep)),
            (true, false) => None,
        }
    }

    /// Stages all of a request's records, or none of them if one topic has no room; with `skip_full` those for which there is. What
    /// has to go to make room goes with them.
    ///
    /// Records for topics that no consumer has ever connected to are left out (seed 000, "Consumer lifecycle"), and so are those
    /// for topics whose consumers are all left behind. Non-persistent topics always have room.
    pub fn append(&self, staged: &mut Staged, records: Vec<Record>, skip_full: bool) -> Result<(), NoRoom> {
        let wanted = records.into_iter().filter_map(|record| Some((self.topics.get(&record.topic)?, record)));
        let (passing, wanted): (Vec<_>, Vec<_>) = wanted.partition(|(topic, _)| topic.key().non_persistent);
        let mut needs: BTreeMap<i64, (Arc<Topic>, u64)> = BTreeMap::new();
        for (topic, record) in wanted.iter().filter(|(topic, _)| staged.is_heard(topic)) {
            needs.entry(topic.id).or_insert_with(|| (topic.clone(), 0)).1 += record.body.len() as u64;
        }
        let mut rooms = Vec::new();
        let mut full = HashSet::new();
        for (topic, need) in needs.into_values() {
            // Whoever tells of a refusal looks at the topic.
            let room = room::make(&topic.log(), staged.touched.get(&topic.id), need);
            match room {
                Ok(room) => rooms.push((topic, room)),
                Err(Short::Later) => return Err(NoRoom::Later),
                Err(Short::Full { .. }) if skip_full => drop(full.insert(topic.id)),
                Err(Short::Full { used, quota }) => {
                    return Err(NoRoom::Rejected(Rejected::new(&self.topics, topic.key(), used, quota, need)));
                }
            }
        }
        for (topic, room) in rooms.into_iter().filter(|(_, room)| *room != Room::default()) {
            staged.give_up(&topic, room, self.next_id + staged.appended.len() as u64);
        }
        staged.passing.extend(passing);
        for (topic, Record { slot, body, held, .. }) in
            wanted.into_iter().filter(|(topic, _)| !full.contains(&topic.id))
        {
            self.add(staged, topic, slot, body, held.as_ref());
        }
        Ok(())
    }

    /// Stages one message, for which there is room.
    fn add(&self, staged: &mut Staged, topic: Arc<Topic>, slot: Slot, body: Bytes, held: Option<&Held>) {
        let heard = staged.is_heard(&topic);
        let touched = staged.touched(&topic);
        // Those who are left behind miss a held message when it is released.
        touched.messages += u64::from(held.is_none() || !heard);
        if heard {
            touched.bytes += body.len() as u64;
            let id = self.next_id + staged.appended.len() as u64;
            let row = held.map(|held| serde_json::to_string(held).expect("invariant: texts always serialize"));
            staged.transaction.messages.push(MessageRow { id, topic: topic.id, slot, body: body.clone(), held: row });
            let held = held.map(|held| held.subscription);
            staged.appended.push(Appended { topic, id, slot, body, held });
        }
    }

    /// A batch, sealed, in which held messages of a topic get what they waited for, whether there is room or not. Those that are
    /// gone meanwhile are left out. There is nothing else in it, so that none of them can go for another reason as well.
    pub fn release(&mut self, topic: &Arc<Topic>, releases: Vec<Release>) -> Staged {
        let mut staged = self.stage();
        let mut released = Vec::with_capacity(releases.len());
        for Release { id, body } in releases {
            let Some(slot) = topic.log().held.get(id).map(|waiter| waiter.slot) else { continue };
            released.push(id);
            if let Some(body) = body {
                self.add(&mut staged, topic.clone(), slot, body, None);
            }
        }
        if !released.is_empty() {
            let ids = serde_json::to_string(&released).expect("invariant: numbers always serialize");
            staged.transaction.statements.push(Statement {
                sql: "DELETE FROM msg WHERE id IN (SELECT value FROM json_each(?))",
                values: vec![Value::Text(ids)],
            });
            staged.transaction.statements.push(floor(self.next_id + staged.appended.len() as u64));
        }
        staged.released = Some((topic.clone(), released));
        self.close(&mut staged);
        staged
    }

    /// Completes a batch: what is too old goes with it, and the rows that follow are added.
    pub fn seal(&mut self, staged: &mut Staged) {
        if staged.transaction.now_ms >= self.sweep_ms {
            self.expire(staged);
        }
        self.close(staged);
    }

    fn close(&self, staged: &mut Staged) {
        let now_ms = staged.transaction.now_ms;
        staged.seal(&self.topics);
        let note = self.topics.steady().1.to_note(now_ms, !staged.appended.is_empty() || !self.ageing);
        staged.transaction.statements.extend(note.map(Note::statement));
        staged.note = note;
    }

    /// Stages the end of messages that are past their time to live: the oldest first, and not too many at once.
    fn expire(&mut self, staged: &mut Staged) {
        let now_ms = staged.transaction.now_ms;
        let mut room = EXPIRED_PER_COMMIT;
        let mut oldest = u64::MAX;
        self.ageing = false;
        for topic in self.topics.all() {
            let log = topic.log();
            let Some(first) = log.oldest_id() else { continue };
            self.ageing = true;
            let end_ms = now_ms.saturating_sub_unsigned(log.policy.ttl_ms());
            if topic.key().non_persistent {
                drop(log);
                topic.expire_volatile(end_ms.max(0).cast_unsigned() << VOLATILE_ID_BITS);
                continue;
            }
            oldest = oldest.min(first);
            let end = self.topics.times().until(end_ms);
            let expired = log.waiting().map(|(id, _)| id).take_while(|id| *id < end).take(room);
            if let Some((count, last)) = (1..).zip(expired).last() {
                room -= count;
                faults::point("sweep");
                let touched = staged.touched(&topic);
                (touched.expired, touched.gives_up) = (last + 1, true);
            }
        }
        // As long as there are more, each commit takes some.
        if room > 0 {
            self.sweep_ms = now_ms + SWEEP_MS;
        }
        self.topics.times().forget_below(oldest);
    }

    /// The batch is on disk: memory follows, and consumers are woken.
    pub fn committed(&mut self, staged: Staged) {
        self.next_id += staged.appended.len() as u64;
        let judged = staged.appended.iter().filter(|appended| appended.held.is_none());
        self.bodies.push(judged.map(|appended| (appended.id, appended.body.clone())));
        self.ageing |= !staged.appended.is_empty() || !staged.passing.is_empty();
        if let Some(newest) = staged.appended.last() {
            self.topics.times().push(newest.id, staged.transaction.now_ms);
            self.topics.steady().1.told(staged.transaction.now_ms);
        }
        if let Some(note) = staged.note {
            self.topics.steady().1.noted(note);
        }
        for moved in staged.moved.into_values() {
            moved.missed.iter().for_each(|missed| missed::count(missed.reason, missed.messages));
            let topic = moved.topic.clone();
            let below = staged.touched.get(&topic.id).map_or(0, Touched::cut);
            self.garbage.extend(moved.apply(&mut topic.log(), below));
        }
        for touched in staged.touched.into_values() {
            touched.topic.cut(touched.cut());
            missed::count(Reason::Parked, touched.messages * touched.topic.log().parked as u64);
        }
        if let Some((topic, released)) = staged.released {
            topic.log().unhold(released);
        }
        let now = Instant::now();
        let mut woken: Vec<(Arc<Topic>, u64)> = Vec::new();
        for Appended { topic, id, slot, body, held } in staged.appended {
            let mut log = topic.log();
            let len = length(&body);
            if let Some(subscription) = held {
                log.hold(Waiter { id, subscription, len, slot });
                continue;
            }
            let refs = u16::try_from(log.consumers.len() - log.parked).unwrap_or(u16::MAX);
            log.push(Entry { id, len, refs, slot });
            log.appended.add(1, now);
            drop(log);
            match woken.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &topic)) {
                Some((_, newest)) => *newest = id,
                None => woken.push((topic, id)),
            }
        }
        for (topic, newest) in woken {
            topic.announce(newest);
        }
        for (topic, Record { slot, body, .. }) in staged.passing {
            topic.push_volatile(self.next_volatile_id, slot, body);
            self.next_volatile_id += 1;
        }
    }

    /// The batch failed: nothing has changed. What it settled comes again.
    pub fn failed(&mut self, staged: Staged) {
        self.garbage.extend(staged.garbage);
        staged.moved.into_values().for_each(Moved::undo);
    }

    /// A consumer that was left behind connects: from now on it is owed every message again.
    pub async fn resume(&self, writing: &mut Writing, who: &Connecting) -> Result<(), StoreError> {
        let Some(topic) = self.topics.get(&who.topic) else { return Ok(()) };
        let parked = |log: &Log| log.consumers.get(&who.consumer).filter(|consumer| consumer.parked).map(|c| c.id);
        let Some(consumer) = parked(&topic.log()) else { return Ok(()) };
        let cursor = CursorRow { consumer, hi: self.next_id, holes: Vec::new(), settled_ms: None };
        let statements = vec![staged::park(consumer, false)];
        writing.commit(&Transaction { statements, cursors: vec![cursor], ..Transaction::default() }).await?;
        topic.log().resume(&who.consumer, self.next_id);
        Ok(())
    }

    /// Attaches to an existing consumer. `None`: it does not exist, see [`Ledger::create_consumer`].
    #[must_use]
    pub fn attach(&self, who: &Connecting, limits: GroupLimits) -> Option<Result<Attached, Busy>> {
        self.topics.get(&who.topic)?.attach(who, limits, &self.topics)
    }

    /// Creates a consumer, and its topic if need be, that is owed every message from now on (seed 000: a consumer
    /// begins when it first connects).
    pub async fn create_consumer(
        &mut self,
        writing: &mut Writing,
        key: &Arc<TopicKey>,
        name: &str,
        now_ms: i64,
    ) -> Result<(), StoreError> {
        if key.non_persistent {
            self.topics.add_volatile(key, name, self.next_volatile_id);
            return Ok(());
        }
        let next_id = self.next_id.cast_signed();
        let text = |text: &str| Value::Text(text.to_owned());
        let topic_values = vec![text(key.tenant.as_str()), text(&key.name)];
        let mut consumer_values = vec![text(name), Value::Int(now_ms)];
        consumer_values.extend(topic_values.clone());
        let transaction = Transaction {
            statements: vec![
                Statement { sql: "INSERT OR IGNORE INTO topic(tenant, name) VALUES (?, ?)", values: topic_values },
                Statement {
                    sql: "INSERT INTO consumer(topic, name, created)
                          SELECT id, ?, ? FROM topic WHERE tenant = ? AND name = ?",
                    values: consumer_values,
                },
                Statement {
                    sql: "INSERT INTO cursor(consumer, hi, holes) VALUES (last_insert_rowid(), ?, '[]')",
                    values: vec![Value::Int(next_id)],
                },
                floor(self.next_id),
            ],
            ..Transaction::default()
        };
        writing.commit(&transaction).await?;
        faults::point("consumer-create");
        let row = sqlx::query("SELECT topic, id FROM consumer WHERE id = (SELECT max(id) FROM consumer)")
            .fetch_one(writing.connection())
            .await?;
        let topic = self.topics.get(key).unwrap_or_else(|| {
            let topic = Arc::new(Topic::new(row.get(0), key.clone(), self.topics.policy_set(key)));
            self.topics.insert(topic.clone());
            topic
        });
        topic.log().add_consumer(name, row.get(1), Cursor::starting_at(self.next_id));
        Ok(())
    }

    /// Stores settings and puts them in force. Messages that are over a lower quota stay.
    pub async fn set(&self, writing: &mut Writing, scope: Scope, settings: Settings) -> Result<(), StoreError> {
        let statements = vec![settings::statement(&scope, settings)];
        writing.commit(&Transaction { statements, ..Transaction::default() }).await?;
        self.topics.set(scope, settings);
        Ok(())
    }

    /// Forgets a consumer and what waits for it alone; its topic goes with the last consumer. False if there is none.
    pub async fn remove_consumer(
        &mut self,
        writing: &mut Writing,
        key: &TopicKey,
        name: &str,
    ) -> Result<bool, StoreError> {
        if key.non_persistent {
            return Ok(self.topics.remove_volatile(key, name));
        }
        let Some(topic) = self.topics.get(key) else { return Ok(false) };
        let Some((row, last)) = ({
            let log = topic.log();
            log.consumers.get(name).map(|consumer| (consumer.id, log.consumers.len() == 1))
        }) else {
            return Ok(false);
        };
        let mut statements = vec![
            Statement { sql: "DELETE FROM cursor WHERE consumer = ?", values: vec![Value::Int(row)] },
            Statement { sql: "DELETE FROM consumer WHERE id = ?", values: vec![Value::Int(row)] },
            Statement { sql: "DELETE FROM gap WHERE consumer = ?", values: vec![Value::Int(row)] },
            floor(self.next_id),
        ];
        if last {
            statements.push(Statement { sql: "DELETE FROM topic WHERE id = ?", values: vec![Value::Int(topic.id)] });
        }
        writing.commit(&Transaction { statements, ..Transaction::default() }).await?;
        faults::point("unsubscribe");
        let mut log = topic.log();
        self.garbage.extend(log.give_up(name));
        if last {
            let held = log.held.below(u64::MAX);
            self.garbage.extend(&held);
            log.unhold(held);
        }
        if let Some(consumer) = log.consumers.remove(name) {
            log.parked -= usize::from(consumer.parked);
            consumer.kick();
        }
        // Whoever needs both takes the topics first.
        drop(log);
        if last {
            self.topics.remove(key);
        }
        Ok(true)
    }
}

/// Ids below `next_id` may have no row left that shows they were used.
fn floor(next_id: u64) -> Statement {
    Statement { sql: "UPDATE meta SET v = ? WHERE k = 'message_id'", values: vec![Value::Int(next_id.cast_signed())] }
}

async fn load_topics(writing: &mut Writing, topics: &Topics) -> Result<HashMap<i64, Arc<Topic>>, StoreError> {
    let rows = sqlx::query("SELECT id, tenant, name FROM topic").fetch_all(writing.connection()).await?;
    let mut by_row = HashMap::new();
    for row in rows {
        let (tenant, name) = (row.try_get::<&str, _>(1)?.into(), row.try_get::<&str, _>(2)?.into());
        let key = TopicKey { tenant, name, non_persistent: false };
        let policy = topics.policy_set(&key);
        let topic = Arc::new(Topic::new(row.try_get(0)?, Arc::new(key), policy));
        by_row.insert(topic.id, topic.clone());
        topics.insert(topic);
    }
    Ok(by_row)
}

/// Returns one above the highest id that a cursor knows.
async fn load_consumers(writing: &mut Writing, topics: &HashMap<i64, Arc<Topic>>) -> Result<u64, StoreError> {
    let rows =
        sqlx::query("SELECT id, topic, name, hi, holes, settled, parked FROM consumer JOIN cursor ON consumer = id")
            .fetch_all(writing.connection())
            .await?;
    let mut highest = 0;
    for row in rows {
        let Some(topic) = topics.get(&row.try_get(1)?) else { continue };
        let holes = serde_json::from_str(row.try_get(4)?).map_err(|error| StoreError::Database(error.into()))?;
        let cursor = Cursor { hi: row.try_get::<i64, _>(3)?.cast_unsigned(), holes };
        highest = highest.max(cursor.hi);
        let mut log = topic.log();
        let consumer = log.add_consumer(row.try_get(2)?, row.try_get(0)?, cursor);
        consumer.counts.settled_ms = row.try_get(5)?;
        consumer.parked = row.try_get(6)?;
        log.parked += usize::from(consumer.parked);
    }
    for (topic, name, id, gap) in gap::load(writing).await? {
        let Some(topic) = topics.get(&topic) else { continue };
        if let Some(consumer) = topic.log().consumers.get_mut(&*name) {
            consumer.gaps.insert(id, gap);
        }
    }
    Ok(highest)
}

/// Lists what waits, counting references; what nobody needs becomes garbage. Returns one above the highest id.
///
/// Ids come packed by the thousand, since a million rows fetched one by one would take seconds.
async fn load_messages(
    writing: &mut Writing,
    topics: &Topics,
    by_row: &HashMap<i64, Arc<Topic>>,
    garbage: &mut Vec<u64>,
) -> Result<u64, StoreError> {
    let held = load_held(writing).await?;
    let mut last = 0u64;
    loop {
        let columns: (Option<String>, Option<String>, Option<String>, Option<String>) = sqlx::query_as(
            "SELECT group_concat(id, ' '), group_concat(topic, ' '), group_concat((length(body) << 16) | slot, ' '),
             group_concat(ts, ' ')
             FROM (SELECT id, topic, slot, ts, body FROM msg WHERE id > ? ORDER BY id LIMIT ?)",
        )
        .bind(last.cast_signed())
        .bind(SCAN_PAGE)
        .fetch_one(writing.connection())
        .await?;
        let (Some(ids), Some(rows), Some(packed), Some(times)) = columns else { return Ok(last + 1) };
        let ids = numbers(&ids).map(i64::cast_unsigned);
        for (((id, row), packed), ms) in ids.zip(numbers(&rows)).zip(numbers(&packed)).zip(numbers(&times)) {
            last = id;
            let (len, slot) = (u32::try_from(packed >> 16).unwrap_or(u32::MAX), (packed & 0xffff) as Slot);
            let Some(topic) = by_row.get(&row) else {
                garbage.push(id);
                continue;
            };
            let mut refs = 0;
            let mut log = topic.log();
            if let Some(subscription) = held.get(&id) {
                log.hold(Waiter { id, subscription: *subscription, len, slot });
                topics.times().push(id, ms);
                continue;
            }
            for consumer in log.consumers.values_mut() {
                if consumer.needs(id) {
                    refs += 1;
                } else {
                    consumer.done_bytes += u64::from(len);
                }
            }
            if refs == 0 {
                garbage.push(id);
                continue;
            }
            log.push(Entry { id, len, refs, slot });
            topics.times().push(id, ms);
        }
    }
}

/// The subscriptions of held messages, by the messages' ids.
async fn load_held(writing: &mut Writing) -> Result<HashMap<u64, u64>, StoreError> {
    let sql = "SELECT id, held ->> '$.subscription' FROM msg WHERE held IS NOT NULL";
    let rows: Vec<(i64, i64)> = sqlx::query_as(sql).fetch_all(writing.connection()).await?;
    Ok(rows.into_iter().map(|(id, subscription)| (id.cast_unsigned(), subscription.cast_unsigned())).collect())
}

fn numbers(text: &str) -> impl Iterator<Item = i64> + '_ {
    text.split(' ').filter_map(|number| number.parse().ok())
}
