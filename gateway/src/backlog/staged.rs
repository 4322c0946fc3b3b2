//! A batch on its way to the disk: what it appends, what consumers do not need any more, and the rows that follow.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::Record;
use super::missed::{Missed, Reason};
use super::steady::Note;
use super::topic::{Consumer, Topic};
use crate::consumer::{Cursor, Slot};
use crate::store::{CursorRow, Transaction};

/// A batch that is ready to be committed.
#[derive(Default)]
pub struct Staged {
    /// The rows.
    pub transaction: Transaction,
    pub(super) appended: Vec<Appended>,
    /// For non-persistent topics.
    pub(super) passing: Vec<(Arc<Topic>, Record)>,
    /// By the consumer's row id.
    pub(super) moved: HashMap<i64, Moved>,
    /// By the topic's row id.
    pub(super) cuts: HashMap<i64, Cut>,
    /// Bytes appended, by the topic's row id.
    pub(super) bytes: HashMap<i64, u64>,
    /// Messages that nobody needed before.
    pub(super) garbage: Vec<u64>,
    pub(super) note: Option<Note>,
}

pub(super) struct Appended {
    pub(super) topic: Arc<Topic>,
    pub(super) id: u64,
    pub(super) slot: Slot,
    pub(super) body: Bytes,
}

/// A consumer that does not need everything any more.
pub(super) struct Moved {
    pub(super) topic: Arc<Topic>,
    pub(super) consumer: Box<str>,
    pub(super) cursor: Cursor,
    /// What it acknowledged.
    pub(super) ids: Vec<u64>,
    pub(super) missed: Option<Missed>,
}

/// All messages of a topic below an id go, whoever needs them.
pub(super) struct Cut {
    pub(super) topic: Arc<Topic>,
    pub(super) below: u64,
    pub(super) reason: Reason,
}

impl Staged {
    /// What the batch leaves a consumer with so far.
    fn moved(&mut self, topic: &Arc<Topic>, name: &str, consumer: &Consumer) -> &mut Moved {
        self.moved.entry(consumer.id).or_insert_with(|| Moved {
            topic: topic.clone(),
            consumer: name.into(),
            cursor: consumer.cursor.clone(),
            ids: Vec::new(),
            missed: None,
        })
    }

    /// Stages acknowledgements. Ids that the consumer does not need any more are ignored, as is a consumer that is gone.
    pub fn settle(&mut self, topic: &Arc<Topic>, name: &str, mut ids: Vec<u64>) {
        ids.sort_unstable();
        ids.dedup();
        let log = topic.log();
        let Some(consumer) = log.consumers.get(name) else { return };
        let moved = self.moved(topic, name, consumer);
        ids.retain(|id| moved.cursor.needs(*id) && log.position(*id).is_some());
        moved.cursor = moved.cursor.settled(&ids, |from, to| log.ids_between(from, to));
        moved.ids.extend(ids);
    }

    /// Adds the rows that follow. What the batch acknowledges is not missed, wherever it stood. `wall_ms`: the time of day.
    pub(super) fn seal(&mut self, wall_ms: i64) {
        let cuts = std::mem::take(&mut self.cuts);
        cuts.values().for_each(|cut| self.cut(cut));
        self.cuts = cuts;
        let mut released: HashMap<(i64, u64), u16> = HashMap::new();
        for (consumer, moved) in &self.moved {
            let Cursor { hi, holes } = moved.cursor.clone();
            let settled_ms = (!moved.ids.is_empty()).then_some(wall_ms);
            self.transaction.cursors.push(CursorRow { consumer: *consumer, hi, holes, settled_ms });
            let cut = self.cuts.get(&moved.topic.id).map_or(0, |cut| cut.below);
            let log = moved.topic.log();
            for id in moved.ids.iter().filter(|id| **id >= cut) {
                let released = released.entry((moved.topic.id, *id)).or_default();
                *released += 1;
                if log.position(*id).is_some_and(|at| log.entries[at].refs == *released) {
                    self.transaction.freed.push(*id);
                }
            }
        }
    }

    fn cut(&mut self, Cut { topic, below, reason }: &Cut) {
        let log = topic.log();
        self.transaction.freed.extend(log.waiting().map(|entry| entry.id).take_while(|id| id < below));
        for (name, consumer) in &log.consumers {
            let cursor = self.moved.get(&consumer.id).map_or(&consumer.cursor, |moved| &moved.cursor);
            let cut = cursor.cut(*below);
            if let Some(missed) = log.missed(cursor, *below, *reason) {
                let moved = self.moved(topic, name, consumer);
                moved.cursor = cut;
                moved.missed = Some(missed);
            }
        }
    }
}
