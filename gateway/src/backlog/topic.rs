//! A topic in memory: its messages' ids, its consumers' cursors, and who is connected.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::consumer::Cursor;
use crate::message::Tenant;

/// What identifies a topic (seed 000: subscriptions with the same name feed the same topic).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TopicKey {
    /// Whose it is.
    pub tenant: Tenant,
    /// The subscription name.
    pub name: Box<str>,
}

/// All topics that have ever had a consumer. Only the writer adds and removes.
#[derive(Clone, Default)]
pub struct Topics(Arc<RwLock<HashMap<Arc<TopicKey>, Arc<Topic>>>>);

/// One topic.
pub struct Topic {
    /// Row id.
    pub(super) id: i64,
    key: Arc<TopicKey>,
    log: Mutex<Log>,
    newest: watch::Sender<u64>,
}

/// A stored message that waits for `refs` consumers.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) id: u64,
    pub(super) refs: u16,
    pub(super) len: u32,
}

/// What the writer changes after a commit.
#[derive(Default)]
pub(super) struct Log {
    /// Ascending ids. Entries without references stay until they are at the front.
    pub(super) entries: VecDeque<Entry>,
    /// Bytes of the stored bodies.
    pub(super) bytes: u64,
    pub(super) consumers: HashMap<Box<str>, Consumer>,
}

pub(super) struct Consumer {
    pub(super) id: i64,
    pub(super) cursor: Cursor,
    /// The connection that holds the consumer, if any.
    connected: Option<CancellationToken>,
}

/// An exclusive connection's hold on its consumer; dropping it lets the next one in.
pub struct Attached {
    /// The topic that it reads.
    pub topic: Arc<Topic>,
    /// The consumer's name.
    pub consumer: Box<str>,
    /// Where the consumer stands.
    pub cursor: Cursor,
    /// Ends when the consumer is unsubscribed.
    pub kicked: Kicked,
}

/// Resolves when the consumer has been unsubscribed under a live connection.
pub type Kicked = CancellationToken;

impl Topics {
    /// The topic, if any consumer has ever connected to it.
    #[must_use]
    pub fn get(&self, key: &TopicKey) -> Option<Arc<Topic>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Whether messages for the topic have to be stored.
    #[must_use]
    pub fn wants(&self, key: &TopicKey) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains_key(key)
    }

    /// How many topics the tenant has.
    #[must_use]
    pub fn count(&self, tenant: &Tenant) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).keys().filter(|key| key.tenant == *tenant).count()
    }

    pub(super) fn insert(&self, topic: Arc<Topic>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(topic.key.clone(), topic);
    }

    pub(super) fn remove(&self, key: &TopicKey) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

impl Topic {
    pub(super) fn new(id: i64, key: Arc<TopicKey>) -> Self {
        Self { id, key, log: Mutex::default(), newest: watch::Sender::new(0) }
    }

    /// What identifies the topic.
    #[must_use]
    pub fn key(&self) -> &Arc<TopicKey> {
        &self.key
    }

    pub(super) fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes when messages have been committed; the value is the newest id.
    #[must_use]
    pub fn newest(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    pub(super) fn announce(&self, newest: u64) {
        self.newest.send_replace(newest);
    }

    /// At most `most` ids of at least `from`, ascending, whose bodies together hold at most `bytes` (but at least one).
    #[must_use]
    pub fn ids_from(&self, from: u64, most: usize, bytes: usize) -> Vec<u64> {
        let log = self.log();
        let start = log.entries.partition_point(|entry| entry.id < from);
        let mut room = bytes;
        let mut ids = Vec::new();
        for entry in log.entries.range(start..).take(most) {
            if !ids.is_empty() && room < entry.len as usize {
                break;
            }
            room = room.saturating_sub(entry.len as usize);
            ids.push(entry.id);
        }
        ids
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

    /// Takes the consumer for one connection; `None` while another one holds it.
    pub(super) fn attach(self: &Arc<Self>, name: &str) -> Option<Attached> {
        let mut log = self.log();
        let consumer = log.consumers.get_mut(name)?;
        if consumer.connected.is_some() {
            return None;
        }
        let kicked = CancellationToken::new();
        consumer.connected = Some(kicked.clone());
        Some(Attached { topic: self.clone(), consumer: name.into(), cursor: consumer.cursor.clone(), kicked })
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // An unsubscribed consumer is gone, and a new one of the same name belongs to somebody else.
        if !self.kicked.is_cancelled()
            && let Some(consumer) = self.topic.log().consumers.get_mut(&self.consumer)
        {
            consumer.connected = None;
        }
    }
}

impl Consumer {
    pub(super) fn new(id: i64, cursor: Cursor) -> Self {
        Self { id, cursor, connected: None }
    }

    /// Ends the live connection, if there is one.
    pub(super) fn kick(&self) {
        if let Some(connected) = &self.connected {
            connected.cancel();
        }
    }
}

impl Log {
    pub(super) fn position(&self, id: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&id, |entry| entry.id).ok()
    }

    pub(super) fn ids_between(&self, from: u64, to: u64) -> impl Iterator<Item = u64> + '_ {
        let start = self.entries.partition_point(|entry| entry.id < from);
        let end = self.entries.partition_point(|entry| entry.id < to);
        self.entries.range(start..end).map(|entry| entry.id)
    }

    /// Drops one reference; true if that was the last one.
    pub(super) fn release(&mut self, id: u64) -> bool {
        let Some(position) = self.position(id) else { return false };
        let entry = &mut self.entries[position];
        entry.refs = entry.refs.saturating_sub(1);
        if entry.refs > 0 {
            return false;
        }
        self.bytes -= u64::from(std::mem::take(&mut entry.len));
        while self.entries.front().is_some_and(|entry| entry.refs == 0) {
            self.entries.pop_front();
        }
        true
    }
}
