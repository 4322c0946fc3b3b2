//! Keyed locks for what is read, changed and written: one holder per key, from the read until the commit is answered.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::OwnedMutexGuard;

/// Locks by key. A lock exists only while somebody holds it or waits for it.
#[derive(Debug)]
pub struct KeyedLocks<K>(Mutex<HashMap<K, Weak<tokio::sync::Mutex<()>>>>);

/// Locks beyond which those without a holder are swept.
const SWEEP_AT: usize = 1024;

impl<K: Eq + Hash> KeyedLocks<K> {
    /// No locks.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::default())
    }

    /// Waits for the key's turn.
    pub async fn lock(&self, key: K) -> OwnedMutexGuard<()> {
        self.of(key).lock_owned().await
    }

    /// Waits for the turns of all keys, in their order, so that two who want the same ones never wait for each other.
    pub async fn lock_all(&self, keys: BTreeSet<K>) -> Vec<OwnedMutexGuard<()>>
    where
        K: Ord,
    {
        let mut held = Vec::with_capacity(keys.len());
        for key in keys {
            held.push(self.lock(key).await);
        }
        held
    }

    fn of(&self, key: K) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if locks.len() >= SWEEP_AT {
            locks.retain(|_, lock| lock.strong_count() > 0);
        }
        let slot = locks.entry(key).or_default();
        slot.upgrade().unwrap_or_else(|| {
            let lock = Arc::default();
            *slot = Arc::downgrade(&lock);
            lock
        })
    }
}

impl<K: Eq + Hash> Default for KeyedLocks<K> {
    fn default() -> Self {
        Self::new()
    }
}
