//! A batch on its way to the disk: what it appends, what consumers do not need any more, and the rows that follow.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::Record;
use super::gap::{self, Gap, Gaps};
use super::missed::{Missed, Reason};
use super::room::Room;
use super::steady::Note;
use super::topic::{Consumer, Log, Topic, Topics};
use crate::consumer::{Cursor, Slot};
use crate::store::{CursorRow, Statement, Transaction, Value};

/// A batch that is ready to be committed.
#[derive(Default)]
pub struct Staged {
    /// The rows.
    pub transaction: Transaction,
    pub(super) appended: Vec<Appended>,
    /// For non-persistent topics.
    pub(super) passing: Vec<(Arc<Topic>, Record)>,
    /// By the topic's row id.
    pub(super) touched: HashMap<i64, Touched>,
    /// By the consumer's row id.
    pub(super) moved: HashMap<i64, Moved>,
    /// Messages that nobody needed before.
    pub(super) garbage: Vec<u64>,
    /// Messages that are held no longer.
    pub(super) released: Option<(Arc<Topic>, Vec<u64>)>,
    pub(super) note: Option<Note>,
}

pub(super) struct Appended {
    pub(super) topic: Arc<Topic>,
    pub(super) id: u64,
    pub(super) slot: Slot,
    pub(super) body: Bytes,
    /// The subscription that it waits to be judged for.
    pub(super) held: Option<u64>,
}

/// A topic that changes.
pub(super) struct Touched {
    pub(super) topic: Arc<Topic>,
    /// Messages for it, stored or not,
    pub(super) messages: u64,
    /// and bytes of those that are stored.
    pub(super) bytes: u64,
    /// All messages below these ids go: first those that are too old, then those that make room, which are so many bytes.
    pub(super) expired: u64,
    pub(super) evicted: u64,
    pub(super) freed: u64,
    /// Consumers that are left behind until they connect.
    pub(super) parked: usize,
    /// Whether anything goes that was not acknowledged.
    pub(super) gives_up: bool,
}

/// A consumer that does not need everything any more.
pub(super) struct Moved {
    pub(super) topic: Arc<Topic>,
    pub(super) consumer: Box<str>,
    pub(super) cursor: Cursor,
    /// What it acknowledged.
    pub(super) ids: Vec<u64>,
    pub(super) missed: Vec<Missed>,
    pub(super) parked: Option<Parked>,
    acknowledges: bool,
    /// What it is to be told of what it missed.
    gaps: Gaps,
    /// The gap that its connections cannot get meanwhile.
    withdrawn: Option<u64>,
}

/// A consumer that is owed nothing of what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parked {
    /// It is connected, and goes on with what comes next.
    Skips,
    /// It goes on when it connects.
    Waits,
}

impl Touched {
    fn new(topic: &Arc<Topic>) -> Self {
        let topic = topic.clone();
        Self { topic, messages: 0, bytes: 0, expired: 0, evicted: 0, freed: 0, parked: 0, gives_up: false }
    }

    /// Nothing below is left.
    pub(super) fn cut(&self) -> u64 {
        self.expired.max(self.evicted)
    }
}

impl Staged {
    pub(super) fn touched(&mut self, topic: &Arc<Topic>) -> &mut Touched {
        self.touched.entry(topic.id).or_insert_with(|| Touched::new(topic))
    }

    /// What the batch leaves a consumer with so far.
    fn moved(&mut self, topic: &Arc<Topic>, name: &str, consumer: &Consumer) -> &mut Moved {
        self.moved.entry(consumer.id).or_insert_with(|| Moved {
            topic: topic.clone(),
            consumer: name.into(),
            cursor: consumer.cursor.clone(),
            ids: Vec::new(),
            missed: Vec::new(),
            parked: None,
            acknowledges: false,
            gaps: consumer.gaps.clone(),
            withdrawn: None,
        })
    }

    /// Whether any consumer gets what is appended to the topic.
    pub(super) fn is_heard(&self, topic: &Topic) -> bool {
        let log = topic.log();
        log.consumers.len() > log.parked + self.touched.get(&topic.id).map_or(0, |touched| touched.parked)
    }

    /// Stages acknowledgements. Ids that the consumer does not need any more are ignored, as is a consumer that is gone.
    pub fn settle(&mut self, topic: &Arc<Topic>, name: &str, mut ids: Vec<u64>) {
        ids.sort_unstable();
        ids.dedup();
        let log = topic.log();
        let Some(consumer) = log.consumers.get(name) else { return };
        self.touched(topic);
        let moved = self.moved(topic, name, consumer);
        let gaps = moved.gaps.acknowledge(&mut ids);
        ids.retain(|id| moved.cursor.needs(*id) && log.position(*id).is_some());
        moved.cursor = moved.cursor.settled(&ids, |from, to| log.ids_between(from, to));
        moved.acknowledges |= gaps || !ids.is_empty();
        moved.ids.extend(ids);
    }

    /// Stages what makes room in a topic. `next_id`: of the next message.
    pub(super) fn give_up(&mut self, topic: &Arc<Topic>, Room { below, freed, parked }: Room, next_id: u64) {
        let touched = self.touched(topic);
        touched.evicted = touched.evicted.max(below);
        touched.freed += freed;
        touched.gives_up = true;
        let log = topic.log();
        for name in parked {
            let Some(consumer) = log.consumers.get(&name) else { continue };
            let how = if consumer.group().is_some() { Parked::Skips } else { Parked::Waits };
            self.touched(topic).parked += usize::from(how == Parked::Waits);
            let moved = self.moved(topic, &name, consumer);
            moved.missed.extend(log.missed(&consumer.cursor, next_id, Reason::Parked));
            moved.cursor = Cursor::starting_at(next_id);
            moved.parked = Some(how);
        }
    }

    /// Adds the rows that follow. What the batch acknowledges is not missed, wherever it stood.
    pub(super) fn seal(&mut self, topics: &Topics) {
        let touched = std::mem::take(&mut self.touched);
        touched.values().filter(|touched| touched.cut() > 0).for_each(|touched| self.cut(touched));
        touched.values().for_each(|touched| self.tell(touched, topics));
        let mut gaps = gap::Rows::default();
        let mut released: HashMap<(i64, u64), u16> = HashMap::new();
        for (consumer, moved) in &self.moved {
            let Cursor { hi, holes } = moved.cursor.clone();
            let settled_ms = moved.acknowledges.then(|| topics.wall_ms());
            self.transaction.cursors.push(CursorRow { consumer: *consumer, hi, holes, settled_ms });
            if moved.parked == Some(Parked::Waits) {
                self.transaction.statements.push(park(*consumer, true));
            }
            let cut = touched.get(&moved.topic.id).map_or(0, Touched::cut);
            let log = moved.topic.log();
            if let Some(known) = log.consumers.get(&moved.consumer) {
                gaps.add(*consumer, &known.gaps, &moved.gaps);
            }
            for id in moved.ids.iter().filter(|id| **id >= cut) {
                let released = released.entry((moved.topic.id, *id)).or_default();
                *released += 1;
                if log.position(*id).is_some_and(|at| log.entries[at].refs == *released) {
                    self.transaction.freed.push(*id);
                }
            }
        }
        self.transaction.statements.extend(gaps.statements());
        self.touched = touched;
    }

    /// Where it is switched on, each consumer of a topic is to be told what it missed.
    fn tell(&mut self, touched: &Touched, topics: &Topics) {
        let topic = &touched.topic;
        let mut log = topic.log();
        let passing = touched.messages > 0 && log.parked + touched.parked > 0;
        if !(passing || touched.gives_up) || !(log.policy.gap_messages || topics.asks_for_gaps(topic.key())) {
            return;
        }
        // What is appended now is missed by those who are left behind, too.
        let now_ms = topics.day_time(self.transaction.now_ms);
        let passed = Gap { reason: Reason::Parked, missed: touched.messages, first_ms: now_ms, last_ms: now_ms };
        for (name, consumer) in &mut log.consumers {
            let moved = self.moved.get(&consumer.id);
            let waits = consumer.parked || moved.is_some_and(|moved| moved.parked == Some(Parked::Waits));
            let missed = moved.map_or(&[][..], |moved| &moved.missed);
            let gaps = missed.iter().map(|missed| topics.gap(missed)).chain((passing && waits).then_some(passed));
            let Some(gap) = gaps.reduce(Gap::and) else { continue };
            // What passes has no id of its own.
            let newest = missed.last().map(|missed| missed.last).or(consumer.gaps.last());
            let id = newest.unwrap_or(consumer.cursor.hi.saturating_sub(1));
            let grows = consumer.gaps.last().filter(|last| consumer.withdraw(*last));
            let moved = self.moved(topic, name, consumer);
            moved.withdrawn = grows;
            moved.gaps.add(id, gap, grows);
        }
    }

    fn cut(&mut self, touched: &Touched) {
        let (topic, cut) = (&touched.topic, touched.cut());
        let log = topic.log();
        let held_expired = log.held.missed(0, touched.expired, Reason::Expired);
        let held_evicted = log.held.missed(touched.expired, cut, Reason::Evicted);
        self.transaction.freed.extend(log.waiting().map(|(id, _)| id).take_while(|id| *id < cut));
        for (name, consumer) in log.consumers.iter().filter(|(_, consumer)| !consumer.parked) {
            let cursor = self.moved.get(&consumer.id).map_or(&consumer.cursor, |moved| &moved.cursor);
            let expired = Missed::both(log.missed(cursor, touched.expired, Reason::Expired), held_expired);
            let evicted = log.missed(&cursor.cut(touched.expired), cut, Reason::Evicted);
            let evicted = Missed::both(evicted, held_evicted);
            if expired.or(evicted).is_some() {
                let cursor = cursor.cut(cut);
                let moved = self.moved(topic, name, consumer);
                moved.missed.extend(expired.into_iter().chain(evicted));
                moved.cursor = cursor;
            }
        }
    }
}

impl Moved {
    /// The topic, of which nothing is left below `below`, follows the commit. Returns ids of messages that nobody needs any more,
    /// whose rows are there still.
    pub(super) fn apply(self, log: &mut Log, below: u64) -> Vec<u64> {
        let Self { consumer, cursor, ids, missed, parked, gaps, withdrawn, .. } = self;
        let garbage = match parked {
            None => {
                log.settle(&consumer, cursor, &ids, missed.iter().map(|missed| missed.bytes).sum());
                Vec::new()
            }
            Some(how) => log.park(&consumer, cursor, how),
        };
        if let Some(consumer) = log.consumers.get_mut(&consumer) {
            // A gap has the id of a message that may be in flight: that has to be given up first.
            consumer.skip_below(below);
            consumer.set_gaps(gaps, withdrawn);
        }
        garbage
    }

    /// The commit failed: what was withdrawn for it can be handed out again.
    pub(super) fn undo(self) {
        if let Some(consumer) = self.topic.log().consumers.get_mut(&self.consumer) {
            let gaps = consumer.gaps.clone();
            consumer.set_gaps(gaps, self.withdrawn);
        }
    }
}

/// Remembers whether a consumer is owed nothing until it connects.
pub(super) fn park(consumer: i64, parked: bool) -> Statement {
    let values = vec![Value::Int(parked.into()), Value::Int(consumer)];
    Statement { sql: "UPDATE cursor SET parked = ? WHERE consumer = ?", values }
}
