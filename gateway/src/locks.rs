//! Keyed locks for what is read, changed and written: one holder per key, from the read until the commit is answered; and places for
//! what may be done a few times at once.

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

/// Places for what takes much: some for all together, fewer for each key. Who gets none is refused.
#[derive(Debug)]
pub struct Places<K> {
    all: usize,
    each: usize,
    taken: Mutex<HashMap<K, usize>>,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub struct Place<'a, K: Eq + Hash + Clone> {
    places: &'a Places<K>,
    key: K,
}

impl<K: Eq + Hash + Clone> Places<K> {
    /// So many for all together, and so many of them for each key.
    #[must_use]
    pub fn new(all: usize, each: usize) -> Self {
        Self { all, each, taken: Mutex::default() }
    }

    /// A place for the key, if one is left.
    #[must_use]
    pub fn take(&self, key: &K) -> Option<Place<'_, K>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let of_all: usize = taken.values().sum();
        let of_key = taken.get(key).copied().unwrap_or_default();
        if of_all >= self.all || of_key >= self.each {
            return None;
        }
        taken.insert(key.clone(), of_key + 1);
        Some(Place { places: self, key: key.clone() })
    }
}

impl<K: Eq + Hash + Clone> Drop for Place<'_, K> {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(of_key) = taken.get_mut(&self.key) {
            *of_key -= 1;
        }
        taken.retain(|_, of_key| *of_key > 0);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn one_key_cannot_take_all_places() {
        let places = Places::new(8, 4);
        let mut held: Vec<_> = (0..4).map(|_| places.take(&1).unwrap()).collect();
        assert!(places.take(&1).is_none());
        held.extend((0..4).map(|_| places.take(&2).unwrap()));
        assert!(places.take(&3).is_none());
        held.remove(0);
        assert!(places.take(&3).is_some() && places.take(&1).is_some(), "each gave its place back at once");
        drop(held);
        assert!(places.taken.lock().unwrap().is_empty());
    }

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
