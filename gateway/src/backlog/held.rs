//! Messages that wait to be judged: a plugin failed on them, or on an older one of their source.
//!
//! They stand in lines, one for each slot of a topic. What comes later of the slot, by whichever subscription, joins its line, so
//! consumers know nothing of held messages: what is released is appended like what has just come, in the order of its line.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::missed::{Missed, Reason};
use crate::consumer::Slot;
use crate::message::Api;

/// Why a record is not handed out: it waits to be judged. With its stored form, this is all that is needed for that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Id of the subscription that it came by.
    pub subscription: u64,
    /// Filters of the subscription that it has passed.
    pub step: u8,
    /// See [`crate::message::Message`].
    pub api: Api,
    /// See [`crate::message::Message`].
    #[serde(rename = "type")]
    pub kind: Option<Box<str>>,
    /// See [`crate::message::Message`].
    pub time: Box<str>,
}

/// A held message in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiter {
    pub(super) id: u64,
    pub(super) subscription: u64,
    pub(super) len: u32,
    pub(super) slot: Slot,
}

/// The held messages of a topic.
#[derive(Default)]
pub(super) struct Lines {
    /// Ascending ids.
    waiters: Vec<Waiter>,
    lengths: HashMap<Slot, u32>,
    tallies: BTreeMap<u64, Tally>,
}

/// What a topic holds for a subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) messages: u64,
    pub(super) bytes: u64,
    /// Id of the oldest.
    pub(super) oldest: u64,
}

/// What a subscription holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldFigures {
    /// Messages that wait to be judged.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Of the oldest of them.
    pub oldest_age_ms: Option<u64>,
}

impl Lines {
    pub(super) fn push(&mut self, waiter: Waiter) {
        *self.lengths.entry(waiter.slot).or_default() += 1;
        let empty = Tally { messages: 0, bytes: 0, oldest: waiter.id };
        let tally = self.tallies.entry(waiter.subscription).or_insert(empty);
        tally.messages += 1;
        tally.bytes += u64::from(waiter.len);
        self.waiters.push(waiter);
    }

    pub(super) fn get(&self, id: u64) -> Option<&Waiter> {
        let at = self.waiters.binary_search_by_key(&id, |waiter| waiter.id).ok()?;
        self.waiters.get(at)
    }

    /// Whether what comes of `slot` has to wait.
    pub(super) fn holds(&self, slot: Slot) -> bool {
        self.lengths.contains_key(&slot)
    }

    /// Oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiter> {
        self.waiters.iter()
    }

    /// By the ids of subscriptions.
    pub(super) fn tallies(&self) -> &BTreeMap<u64, Tally> {
        &self.tallies
    }

    /// Takes out what `goes`. Returns how many those were, and their bytes.
    pub(super) fn remove(&mut self, goes: impl Fn(u64) -> bool) -> (u64, u64) {
        let mut removed = (0, 0);
        let Self { waiters, lengths, tallies } = self;
        waiters.retain(|Waiter { id, subscription, len, slot }| {
            if goes(*id) {
                removed = (removed.0 + 1, removed.1 + u64::from(*len));
                if let (Some(length), Some(tally)) = (lengths.get_mut(slot), tallies.get_mut(subscription)) {
                    *length -= 1;
                    tally.messages -= 1;
                    tally.bytes -= u64::from(*len);
                }
            }
            !goes(*id)
        });
        if removed.0 > 0 {
            lengths.retain(|_, length| *length > 0);
            tallies.retain(|_, tally| tally.messages > 0);
            for (subscription, tally) in tallies {
                let first = waiters.iter().find(|waiter| waiter.subscription == *subscription);
                tally.oldest = first.map_or(tally.oldest, |waiter| waiter.id);
            }
        }
        removed
    }

    /// The lines whose oldest message came by `subscription`.
    pub(super) fn led_by(&self, subscription: u64) -> HashSet<Slot> {
        let mut seen = HashSet::new();
        let heads = self.waiters.iter().filter(|waiter| seen.insert(waiter.slot));
        heads.filter(|head| head.subscription == subscription).map(|head| head.slot).collect()
    }

    /// By which subscriptions messages wait; true: one of them leads a line.
    pub(super) fn subscriptions(&self) -> BTreeMap<u64, bool> {
        let mut seen = HashSet::new();
        let mut subscriptions = BTreeMap::new();
        for Waiter { subscription, slot, .. } in &self.waiters {
            *subscriptions.entry(*subscription).or_default() |= seen.insert(*slot);
        }
        subscriptions
    }

    /// The oldest messages of these lines: at most `most`, and `bytes`, but at least one.
    pub(super) fn first_of(&self, lines: &HashSet<Slot>, most: usize, bytes: usize) -> Vec<u64> {
        let (mut found, mut room) = (Vec::new(), bytes);
        for waiter in self.waiters.iter().filter(|waiter| lines.contains(&waiter.slot)).take(most) {
            if !found.is_empty() && room < waiter.len as usize {
                break;
            }
            room = room.saturating_sub(waiter.len as usize);
            found.push(waiter.id);
        }
        found
    }

    /// The oldest messages that came by `subscription`.
    pub(super) fn of(&self, subscription: u64) -> impl Iterator<Item = &Waiter> {
        self.waiters.iter().filter(move |waiter| waiter.subscription == subscription)
    }

    /// What consumers miss if everything from `from` on and below `below` goes; `None`: nothing. It was no part of their backlogs.
    pub(super) fn missed(&self, from: u64, below: u64, reason: Reason) -> Option<Missed> {
        let start = self.waiters.partition_point(|waiter| waiter.id < from);
        let end = self.waiters.partition_point(|waiter| waiter.id < below).max(start);
        let gone = &self.waiters[start..end];
        let (first, last) = (gone.first()?.id, gone.last()?.id);
        Some(Missed { reason, messages: gone.len() as u64, bytes: 0, first, last })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(waiters: &[(u64, Slot)]) -> Lines {
        let mut lines = Lines::default();
        for (at, (subscription, slot)) in waiters.iter().enumerate() {
            lines.push(Waiter { id: at as u64 + 1, subscription: *subscription, len: 10, slot: *slot });
        }
        lines
    }

    #[test]
    fn lines_stand_in_order_and_end_with_their_last_message() {
        let mut lines = lines(&[(1, 7), (2, 7), (1, 8), (1, 7), (3, 9)]);
        assert_eq!(lines.led_by(1), HashSet::from([7, 8]));
        assert_eq!(lines.led_by(2), HashSet::new(), "it stands behind another one's");
        assert_eq!(lines.subscriptions(), BTreeMap::from([(1, true), (2, false), (3, true)]));
        assert_eq!(lines.first_of(&HashSet::from([7, 8]), 9, 1000), [1, 2, 3, 4]);
        assert_eq!(lines.first_of(&HashSet::from([7]), 2, 1000), [1, 2]);
        assert_eq!(lines.first_of(&HashSet::from([7]), 9, 29), [1, 2]);
        assert_eq!(lines.first_of(&HashSet::from([7]), 9, 0), [1], "one always fits");
        assert_eq!(lines.remove(|id| id <= 2), (2, 20));
        assert!(lines.holds(7));
        assert_eq!(lines.remove(|id| id == 4), (1, 10));
        assert!(!lines.holds(7) && lines.holds(8));
        let tally = |oldest| Tally { messages: 1, bytes: 10, oldest };
        assert_eq!(lines.tallies(), &BTreeMap::from([(1, tally(3)), (3, tally(5))]));
    }

    #[test]
    fn what_goes_is_missed_once() {
        let lines = lines(&[(1, 7); 5]);
        let missed =
            |from, below| lines.missed(from, below, Reason::Expired).map(|missed| (missed.messages, missed.last));
        assert_eq!((missed(0, 3), missed(3, 5), missed(5, 3)), (Some((2, 2)), Some((2, 4)), None));
    }
}
