//! What plugins have used, and how often they have failed of late.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::host::cut;
use super::{Fault, PluginLimits};
use crate::clock::Clock;
use crate::message::SourceId;

/// What the instances of a plugin have used since it was loaded.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Calls, those that failed and were tried again included.
    pub calls: u64,
    /// Messages judged or shaped.
    pub messages: u64,
    /// Messages that a filter did not pass.
    pub dropped: u64,
    /// Messages that were answered with a fault, and failed calls whose messages passed at the second try.
    pub faults: [u64; Fault::KINDS.len()],
    /// Processor time of its calls, and of what the gateway does around them.
    pub processor_time: Duration,
    /// Linear memory of its largest instance, in bytes.
    pub memory_bytes: u64,
    /// The latest fault that says what is wrong with it.
    pub last_fault: Option<LastFault>,
}

/// A fault that was.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LastFault {
    /// When, in milliseconds since 1970.
    pub time_ms: i64,
    /// [`Fault::kind`].
    pub kind: &'static str,
    /// Its text, cut.
    pub reason: Box<str>,
}

impl Usage {
    /// Adds what another has used.
    pub(super) fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.messages += other.messages;
        self.dropped += other.dropped;
        for (sum, faults) in self.faults.iter_mut().zip(other.faults) {
            *sum += faults;
        }
        self.processor_time += other.processor_time;
        self.memory_bytes = self.memory_bytes.max(other.memory_bytes);
        let both = [self.last_fault.take(), other.last_fault.clone()];
        self.last_fault = both.into_iter().flatten().max_by_key(|fault| fault.time_ms);
    }
}

/// Where so many instances of a plugin have taken all, every other one is taken for such a one.
const GREEDY: usize = 1000;

/// One tenant's use of one plugin.
#[derive(Default)]
pub(super) struct Account {
    calls: AtomicU64,
    messages: AtomicU64,
    dropped: AtomicU64,
    faults: [AtomicU64; Fault::KINDS.len()],
    processor_ns: AtomicU64,
    memory_bytes: AtomicU64,
    /// Whether there is anything in `greedy`: mostly not, which costs no look then.
    taken_all: AtomicBool,
    /// The hashes of the instances that once took all.
    greedy: Mutex<HashSet<u64>>,
    failures: Mutex<Run>,
    words: Mutex<Words>,
    last_fault: Mutex<Option<LastFault>>,
}

/// Failures since the first one of a time.
#[derive(Default)]
struct Run {
    since: Option<Instant>,
    count: u32,
}

impl Run {
    /// Counts one more. True if there have been too many; then it begins anew.
    fn is_too_long(&mut self, limits: &PluginLimits, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) >= Duration::from_secs(limits.quarantine_seconds) {
            *self = Self { since: Some(now), count: 0 };
        }
        self.count += 1;
        let too_many = self.count >= limits.quarantine_faults;
        if too_many {
            *self = Self::default();
        }
        too_many
    }
}

/// How messages were answered by word: whether the plugin fails on everything, or on what is bad.
#[derive(Default)]
pub(super) struct Words {
    /// Refusals since the last answer.
    run: Run,
    refused: Sources,
    /// Of all times.
    answered: Sources,
}

impl Words {
    pub(super) fn answered(&mut self, source: &SourceId) {
        (self.run, self.refused) = (Run::default(), Sources::None);
        self.answered.add(source);
    }

    /// True if there have been too many without an answer in between. Those of one source count only if it has answered no other:
    /// one bad device may send, or have held, any number.
    pub(super) fn refused(&mut self, source: &SourceId, limits: &PluginLimits, now: Instant) -> bool {
        self.refused.add(source);
        !self.refused.is_one_beside(&self.answered) && self.run.is_too_long(limits, now)
    }
}

/// Whose messages.
#[derive(Default)]
enum Sources {
    #[default]
    None,
    One(SourceId),
    Several,
}

impl Sources {
    fn add(&mut self, source: &SourceId) {
        match self {
            Self::None => *self = Self::One(source.clone()),
            Self::One(one) if one != source => *self = Self::Several,
            Self::One(_) | Self::Several => {}
        }
    }

    /// Whether it is one, and the others are not that one alone.
    fn is_one_beside(&self, others: &Self) -> bool {
        match (self, others) {
            (Self::One(one), Self::One(other)) => one != other,
            (Self::One(_), Self::Several) => true,
            _ => false,
        }
    }
}

impl Account {
    pub(super) fn judged(&self, messages: usize, dropped: usize) {
        self.messages.fetch_add(messages as u64, Relaxed);
        self.dropped.fetch_add(dropped as u64, Relaxed);
    }

    pub(super) fn called(&self) {
        self.calls.fetch_add(1, Relaxed);
    }

    pub(super) fn used(&self, processor_time: Duration) {
        self.processor_ns.fetch_add(u64::try_from(processor_time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    pub(super) fn held(&self, memory_bytes: usize) {
        self.memory_bytes.fetch_max(memory_bytes as u64, Relaxed);
    }

    /// Remembers for good that an instance took all the time or memory that a call may take.
    pub(super) fn takes_all(&self, instance: u64) {
        let mut greedy = self.greedy.lock().unwrap_or_else(PoisonError::into_inner);
        if greedy.len() < GREEDY {
            greedy.insert(instance);
        }
        self.taken_all.store(true, Relaxed);
    }

    pub(super) fn has_taken_all(&self, instance: u64) -> bool {
        self.taken_all.load(Relaxed) && {
            let greedy = self.greedy.lock().unwrap_or_else(PoisonError::into_inner);
            greedy.contains(&instance) || greedy.len() >= GREEDY
        }
    }

    pub(super) fn faulted(&self, fault: &Fault, messages: usize) {
        let kind = Fault::KINDS.iter().position(|kind| *kind == fault.kind());
        self.faults[kind.expect("invariant: all kinds are known")].fetch_add(messages as u64, Relaxed);
        // These tell nothing of what is wrong with it.
        if !matches!(fault, Fault::Stopped | Fault::Quarantined(_) | Fault::Loading) {
            let (time_ms, reason) = (Clock::system().now_ms(), cut(&fault.to_string()).into());
            *self.last_fault() = Some(LastFault { time_ms, kind: fault.kind(), reason });
        }
    }

    fn last_fault(&self) -> MutexGuard<'_, Option<LastFault>> {
        self.last_fault.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call that failed. True if there have been too many.
    pub(super) fn failed(&self, limits: &PluginLimits, now: Instant) -> bool {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).is_too_long(limits, now)
    }

    pub(super) fn words(&self) -> MutexGuard<'_, Words> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn usage(&self) -> Usage {
        Usage {
            calls: self.calls.load(Relaxed),
            messages: self.messages.load(Relaxed),
            dropped: self.dropped.load(Relaxed),
            faults: std::array::from_fn(|kind| self.faults[kind].load(Relaxed)),
            processor_time: Duration::from_nanos(self.processor_ns.load(Relaxed)),
            memory_bytes: self.memory_bytes.load(Relaxed),
            last_fault: self.last_fault().clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_failures_within_a_time_are_too_many() {
        let limits = PluginLimits { quarantine_faults: 3, quarantine_seconds: 10, ..PluginLimits::default() };
        let account = Account::default();
        let start = Instant::now();
        let at = |seconds| account.failed(&limits, start + Duration::from_secs(seconds));
        assert_eq!([at(0), at(9), at(10), at(11), at(12)], [false, false, false, false, true]);
        assert_eq!([at(12), at(13), at(14)], [false, false, true], "begins anew");
    }

    /// Whether it is too much at the end, after messages of these sources: `+` is answered, `-` refused.
    fn is_too_much(messages: &str) -> bool {
        let limits = PluginLimits { quarantine_faults: 3, ..PluginLimits::default() };
        let (mut words, mut is_too_much) = (Words::default(), false);
        for message in messages.split(' ') {
            let (source, word) = message.split_at(1);
            match word {
                "+" => words.answered(&source.into()),
                _ => is_too_much |= words.refused(&source.into(), &limits, Instant::now()),
            }
        }
        is_too_much
    }

    #[test]
    fn refusals_count_in_a_row_and_those_of_one_source_among_others_not_at_all() {
        for messages in ["a- a- a-", "a- b- c-", "a+ a- a- a-", "a+ b+ a- b- a- b-", "a- a- a+ a- b- a-"] {
            assert!(is_too_much(messages), "{messages}");
        }
        for messages in ["a- a- a+ a- a-", "b+ a- a- a- a- a-", "a+ b+ a- a- a- a-", "b+ a- a- a- b+ c- c- c-"] {
            assert!(!is_too_much(messages), "{messages}");
        }
    }
}
