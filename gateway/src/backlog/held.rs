//! Messages that wait to be judged: a plugin failed on them, or on an older one of their source.
//!
//! They stand in lines, one for each slot of a topic. What comes later of the slot, by whichever subscription, joins its line, so
//! consumers know nothing of held messages: what is released is appended like what has just come, in the order of its line.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

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

/// The held messages of a topic. Whoever asks for some of them does not walk past the others.
#[derive(Default)]
pub(super) struct Lines {
    /// By their ids: the oldest is the first.
    waiters: BTreeMap<u64, Waiter>,
    /// The ids of each line, and of each subscription.
    by_line: BTreeSet<(Slot, u64)>,
    by_subscription: BTreeSet<(u64, u64)>,
    /// The subscriptions that the oldest messages of the lines came by.
    leaders: BTreeSet<(u64, Slot)>,
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
    /// Adds the newest one.
    pub(super) fn push(&mut self, waiter: Waiter) {
        let Waiter { id, subscription, len, slot } = waiter;
        if !self.holds(slot) {
            self.leaders.insert((subscription, slot));
        }
        self.by_line.insert((slot, id));
        self.by_subscription.insert((subscription, id));
        let tally = self.tallies.entry(subscription).or_insert(Tally { messages: 0, bytes: 0, oldest: id });
        tally.messages += 1;
        tally.bytes += u64::from(len);
        self.waiters.insert(id, waiter);
    }

    pub(super) fn get(&self, id: u64) -> Option<&Waiter> {
        self.waiters.get(&id)
    }

    /// Whether what comes of `slot` has to wait.
    pub(super) fn holds(&self, slot: Slot) -> bool {
        self.first_in(slot, 0).is_some()
    }

    /// Oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiter> {
        self.waiters.values()
    }

    /// By the ids of subscriptions.
    pub(super) fn tallies(&self) -> &BTreeMap<u64, Tally> {
        &self.tallies
    }

    /// Takes out those of `ids` that are there. Returns how many those were, and their bytes.
    pub(super) fn remove(&mut self, ids: impl IntoIterator<Item = u64>) -> (u64, u64) {
        let gone = ids.into_iter().filter_map(|id| self.take(id));
        gone.fold((0, 0), |(messages, bytes), len| (messages + 1, bytes + u64::from(len)))
    }

    /// Returns its length.
    fn take(&mut self, id: u64) -> Option<u32> {
        let Waiter { subscription, len, slot, .. } = self.waiters.remove(&id)?;
        self.by_line.remove(&(slot, id));
        self.by_subscription.remove(&(subscription, id));
        let next = self.first_in(slot, 0);
        if next.is_none_or(|next| next > id) {
            self.leaders.remove(&(subscription, slot));
            self.leaders.extend(next.and_then(|next| self.get(next)).map(|next| (next.subscription, slot)));
        }
        let oldest = self.of(subscription).next();
        match (self.tallies.get_mut(&subscription), oldest) {
            (Some(Tally { messages, bytes, oldest }), Some(first)) => {
                *messages -= 1;
                *bytes -= u64::from(len);
                *oldest = first;
            }
            _ => drop(self.tallies.remove(&subscription)),
        }
        Some(len)
    }

    /// The oldest message of a line from `id` on.
    fn first_in(&self, slot: Slot, id: u64) -> Option<u64> {
        self.by_line.range((slot, id)..=(slot, u64::MAX)).next().map(|(_, id)| *id)
    }

    /// The lines whose oldest message came by `subscription`.
    pub(super) fn led_by(&self, subscription: u64) -> impl Iterator<Item = Slot> {
        self.leaders.range((subscription, Slot::MIN)..=(subscription, Slot::MAX)).map(|(_, slot)| *slot)
    }

    /// By which subscriptions messages wait; true: one of them leads a line.
    pub(super) fn subscriptions(&self) -> BTreeMap<u64, bool> {
        let leads = |subscription| self.led_by(subscription).next().is_some();
        self.tallies.keys().map(|subscription| (*subscription, leads(*subscription))).collect()
    }

    /// The oldest messages of these lines, ascending, each with its line: at most `most`, and `bytes`, but at least one.
    pub(super) fn first_of(&self, lines: impl Iterator<Item = Slot>, most: usize, bytes: usize) -> Vec<(u64, Slot)> {
        let next = |slot, id| self.first_in(slot, id).map(|id| Reverse((id, slot)));
        let mut heads: BinaryHeap<_> = lines.filter_map(|slot| next(slot, 0)).collect();
        let (mut found, mut room) = (Vec::new(), bytes);
        while found.len() < most
            && let Some(Reverse((id, slot))) = heads.pop()
        {
            let len = self.get(id).map_or(0, |waiter| waiter.len as usize);
            if !found.is_empty() && room < len {
                break;
            }
            room = room.saturating_sub(len);
            found.push((id, slot));
            heads.extend(next(slot, id + 1));
        }
        found
    }

    /// The messages that came by `subscription`, oldest first.
    pub(super) fn of(&self, subscription: u64) -> impl Iterator<Item = u64> {
        self.by_subscription.range((subscription, 0)..=(subscription, u64::MAX)).map(|(_, id)| *id)
    }

    /// The messages below `below`, oldest first.
    pub(super) fn below(&self, below: u64) -> Vec<u64> {
        self.waiters.range(..below).map(|(id, _)| *id).collect()
    }

    /// What consumers miss if everything from `from` on and below `below` goes; `None`: nothing. It was no part of their backlogs.
    pub(super) fn missed(&self, from: u64, below: u64, reason: Reason) -> Option<Missed> {
        let mut gone = self.waiters.range(from..below.max(from)).map(|(id, _)| *id);
        let first = gone.next()?;
        let (more, last) = gone.fold((0, first), |(more, _), id| (more + 1, id));
        Some(Missed { reason, messages: 1 + more, bytes: 0, first, last })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;
    use proptest::test_runner::TestCaseError;

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
        let led_by = |lines: &Lines, subscription| lines.led_by(subscription).collect::<Vec<_>>();
        assert_eq!(led_by(&lines, 1), [7, 8]);
        assert!(led_by(&lines, 2).is_empty(), "it stands behind another one's");
        assert_eq!(lines.subscriptions(), BTreeMap::from([(1, true), (2, false), (3, true)]));
        let first_of = |slots: &[Slot], most, bytes| lines.first_of(slots.iter().copied(), most, bytes);
        assert_eq!(first_of(&[8, 7], 9, 1000), [(1, 7), (2, 7), (3, 8), (4, 7)]);
        assert_eq!(first_of(&[7], 2, 1000), [(1, 7), (2, 7)]);
        assert_eq!(first_of(&[7], 9, 29), [(1, 7), (2, 7)]);
        assert_eq!(first_of(&[7], 9, 0), [(1, 7)], "one always fits");
        assert_eq!(lines.remove([1, 2, 6]), (2, 20));
        assert_eq!((led_by(&lines, 1), led_by(&lines, 2)), (vec![7, 8], vec![]));
        assert_eq!(lines.remove([4]), (1, 10));
        assert!(!lines.holds(7) && lines.holds(8));
        let tally = |oldest| Tally { messages: 1, bytes: 10, oldest };
        assert_eq!(lines.tallies(), &BTreeMap::from([(1, tally(3)), (3, tally(5))]));
    }

    // A walk past what others hold, for each subscription or at each release, would take a thousand times as long.
    #[test]
    fn four_thousand_subscriptions_are_released_as_fast_as_one() {
        const SUBSCRIPTIONS: u64 = 4_000;
        const EACH: u64 = 10;
        let began = Instant::now();
        let mut lines = Lines::default();
        for id in 0..SUBSCRIPTIONS * EACH {
            let subscription = id / EACH;
            lines.push(Waiter { id, subscription, len: 10, slot: subscription as Slot });
        }
        for leader in 0..SUBSCRIPTIONS {
            let slots: Vec<Slot> = lines.led_by(leader).collect();
            while let ids @ [_, ..] = &*lines.first_of(slots.iter().copied(), 2, 1000) {
                lines.remove(ids.iter().map(|(id, _)| *id).collect::<Vec<_>>());
            }
        }
        assert_eq!((lines.iter().count(), lines.tallies().len()), (0, 0));
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }

    /// What is there, and what a walk past all of it finds.
    #[derive(Default)]
    struct Walked(Vec<Waiter>);

    impl Walked {
        fn check(&self, lines: &Lines, most: usize, bytes: usize) -> Result<(), TestCaseError> {
            let Self(waiters) = self;
            let ids = |keep: &dyn Fn(&Waiter) -> bool| -> Vec<u64> {
                waiters.iter().filter(|waiter| keep(waiter)).map(|waiter| waiter.id).collect()
            };
            prop_assert_eq!(lines.iter().map(|waiter| waiter.id).collect::<Vec<_>>(), ids(&|_| true));
            let heads: Vec<&Waiter> =
                (0..LINES).filter_map(|slot| waiters.iter().find(|waiter| waiter.slot == slot)).collect();
            prop_assert!((0..LINES).all(|slot| lines.holds(slot) == heads.iter().any(|head| head.slot == slot)));
            let (mut tallies, mut subscriptions) = (BTreeMap::new(), BTreeMap::new());
            for subscription in 0..SUBSCRIPTIONS {
                let own = ids(&|waiter| waiter.subscription == subscription);
                let led = heads.iter().filter(|head| head.subscription == subscription).map(|head| head.slot);
                let led: Vec<Slot> = led.collect();
                prop_assert_eq!(lines.of(subscription).collect::<Vec<_>>(), &own[..]);
                prop_assert_eq!(lines.led_by(subscription).collect::<Vec<_>>(), &led[..]);
                let Some(oldest) = own.first() else { continue };
                let bytes = own.iter().filter_map(|id| lines.get(*id)).map(|waiter| u64::from(waiter.len)).sum();
                tallies.insert(subscription, Tally { messages: own.len() as u64, bytes, oldest: *oldest });
                subscriptions.insert(subscription, !led.is_empty());
            }
            prop_assert_eq!(lines.tallies(), &tallies);
            prop_assert_eq!(lines.subscriptions(), subscriptions);
            let mut room = bytes;
            let mut fits = |waiter: &Waiter| {
                let fits = room == bytes || waiter.len as usize <= room;
                room = room.saturating_sub(waiter.len as usize);
                fits
            };
            let even = waiters.iter().filter(|waiter| waiter.slot % 2 == 0).take(most);
            let first: Vec<_> = even.take_while(|waiter| fits(waiter)).map(|waiter| (waiter.id, waiter.slot)).collect();
            prop_assert_eq!(lines.first_of((0..LINES).step_by(2), most, bytes), first);
            Ok(())
        }
    }

    const LINES: Slot = 6;
    const SUBSCRIPTIONS: u64 = 4;

    #[derive(Clone, Debug)]
    enum Step {
        Push(u64, Slot, u32),
        /// Some from anywhere, as they are released, and some that are not there.
        Remove(Vec<u64>),
        /// Those below a share of them, as they expire.
        Cut(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..SUBSCRIPTIONS, 0..LINES, 1..50u32).prop_map(|(by, slot, len)| Step::Push(by, slot, len)),
            1 => proptest::collection::vec(0..80u64, 0..8).prop_map(Step::Remove),
            1 => (0..4u8).prop_map(Step::Cut),
        ]
    }

    proptest! {
        #[test]
        fn what_is_found_is_what_a_walk_past_all_finds(
            steps in proptest::collection::vec(step(), 1..80),
            most in 1..20usize,
            bytes in 1..300usize,
        ) {
            let (mut lines, mut walked) = (Lines::default(), Walked::default());
            for (id, step) in (1..).zip(steps) {
                let gone = match step {
                    Step::Push(subscription, slot, len) => {
                        let waiter = Waiter { id, subscription, len, slot };
                        lines.push(waiter);
                        walked.0.push(waiter);
                        Vec::new()
                    }
                    Step::Remove(ids) => ids,
                    Step::Cut(eighths) => lines.below(id * u64::from(eighths) / 8),
                };
                let (gone, left): (Vec<_>, Vec<_>) = walked.0.into_iter().partition(|waiter| gone.contains(&waiter.id));
                let removed = (gone.len() as u64, gone.iter().map(|waiter| u64::from(waiter.len)).sum());
                prop_assert_eq!(lines.remove(gone.iter().map(|waiter| waiter.id)), removed);
                walked.0 = left;
                walked.check(&lines, most, bytes)?;
            }
        }
    }

    #[test]
    fn what_goes_is_missed_once() {
        let lines = lines(&[(1, 7); 5]);
        let missed =
            |from, below| lines.missed(from, below, Reason::Expired).map(|missed| (missed.messages, missed.last));
        assert_eq!((missed(0, 3), missed(3, 5), missed(5, 3)), (Some((2, 2)), Some((2, 4)), None));
    }
}
