//! Keyed locks for what is read, changed and written: one holder per key, from the read until the commit is answered.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::OwnedMutexGuard;

/// Locks by key. A lock exists only while somebody holds it or waits for it.
#[derive(Debug)]
pub struct KeyedLocks<K>(Mutex<Locks<K>>);

#[derive(Debug)]
struct Locks<K> {
    by_key: HashMap<K, Weak<tokio::sync::Mutex<()>>>,
    /// Locks at which those without a holder are swept: twice those that the last sweep left, so that sweeping costs little
    /// for each lock.
    sweep_at: usize,
}

/// Fewer locks are never swept.
const SWEEP_AT: usize = 1024;

impl<K: Eq + Hash> KeyedLocks<K> {
    /// No locks.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::new(Locks { by_key: HashMap::new(), sweep_at: SWEEP_AT }))
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
        if locks.by_key.len() >= locks.sweep_at {
            locks.by_key.retain(|_, lock| lock.strong_count() > 0);
            locks.sweep_at = SWEEP_AT.max(2 * locks.by_key.len());
        }
        let slot = locks.by_key.entry(key).or_default();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn held_locks_survive_a_sweep_and_others_do_not() {
        let locks = KeyedLocks::new();
        let held = locks.lock_all((0..3000).collect()).await;
        assert!(locks.of(7).try_lock().is_err());
        drop(held);
        assert!(locks.of(7).try_lock().is_ok());
        for key in 10_000..20_000 {
            drop(locks.lock(key).await);
        }
        let left = locks.0.lock().unwrap_or_else(PoisonError::into_inner).by_key.len();
        assert!(left <= 8192, "{left} locks that nobody holds");
    }

    #[tokio::test]
    async fn overlapping_sets_of_keys_end() {
        let locks = Arc::new(KeyedLocks::new());
        let tasks = [[1, 2, 3], [3, 2, 1], [2, 3, 1]].map(|keys| {
            let locks = locks.clone();
            tokio::spawn(async move {
                for _ in 0..200 {
                    let _held = locks.lock_all(BTreeSet::from(keys)).await;
                    tokio::task::yield_now().await;
                }
            })
        });
        for task in tasks {
            assert!(task.await.is_ok());
        }
    }
}
