//! The live instances of one thread. When there are too many, the tenant that has most of them gives one up, of those that keep state
//! the last.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use metrics::{Counter, counter};

use super::Instance;
use super::instance::Live;

/// At most so many; of a tenant, the least recently used ones go first.
pub(super) struct Lives {
    stateless: LruCache<Instance, Live>,
    stateful: LruCache<Instance, Live>,
    bound: usize,
    idle: Duration,
}

impl Lives {
    pub(super) fn new(bound: NonZeroUsize, idle: Duration) -> Self {
        // One more for a moment.
        let room = bound.saturating_add(1);
        Self { stateless: LruCache::sparse(room), stateful: LruCache::sparse(room), bound: bound.get(), idle }
    }

    /// Takes it out for a call.
    pub(super) fn take(&mut self, instance: &Instance) -> Option<Live> {
        self.of(instance).pop(instance)
    }

    /// Puts it back, or a new one in.
    pub(super) fn put(&mut self, instance: &Instance, live: Live) {
        self.of(instance).push(instance.clone(), live);
        if self.stateless.len() + self.stateful.len() > self.bound {
            self.evict();
        }
    }

    /// Who has many takes nothing from who has few.
    fn evict(&mut self) {
        let all = || self.stateless.iter().chain(&self.stateful).map(|(instance, _)| instance.tenant());
        let mut counts = HashMap::new();
        all().for_each(|tenant| *counts.entry(tenant).or_default() += 1);
        let most: usize = counts.values().copied().max().unwrap_or_default();
        let oldest = |lives: &LruCache<Instance, Live>| {
            let mut instances = lives.iter().rev().map(|(instance, _)| instance);
            instances.find(|instance| counts[instance.tenant()] == most).cloned()
        };
        if let Some(instance) = oldest(&self.stateless) {
            self.stateless.pop(&instance);
        } else if let Some(instance) = oldest(&self.stateful) {
            self.stateful.pop(&instance);
            state_lost("eviction").increment(1);
        }
    }

    pub(super) fn clear(&mut self) {
        self.stateless.clear();
        self.stateful.clear();
    }

    /// When the next look is due.
    pub(super) fn next_expiry(&self) -> Option<Duration> {
        let oldest = [&self.stateless, &self.stateful].into_iter().filter_map(|lives| lives.peek_lru());
        oldest.map(|(_, live)| self.idle.saturating_sub(live.used.elapsed())).min()
    }

    /// Drops what nobody has used for long; what keeps state only if its subscription is gone, too.
    pub(super) fn drop_idle(&mut self) {
        let is_idle = |lives: &LruCache<Instance, Live>| {
            lives.peek_lru().is_some_and(|(_, live)| live.used.elapsed() >= self.idle)
        };
        while is_idle(&self.stateless) {
            self.stateless.pop_lru();
        }
        // Each at most once: one that stays is looked at again after a while.
        for _ in 0..self.stateful.len() {
            if !is_idle(&self.stateful) {
                return;
            }
            if let Some((instance, mut live)) = self.stateful.pop_lru()
                && Arc::strong_count(&instance.0) > 1
            {
                live.used = Instant::now();
                self.stateful.push(instance, live);
            }
        }
    }

    fn of(&mut self, instance: &Instance) -> &mut LruCache<Instance, Live> {
        if instance.keeps_state() { &mut self.stateful } else { &mut self.stateless }
    }
}

/// Counts the instances that took with them what they kept.
pub(super) fn state_lost(reason: &'static str) -> Counter {
    counter!("tidegate_plugin_state_lost_total", "reason" => reason)
}
