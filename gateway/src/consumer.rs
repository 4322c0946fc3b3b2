//! What a consumer is owed: pure rules, without clock or I/O.
//!
//! [`Cursor`] is the durable half: what has been acknowledged. [`Exclusive`] is the half that lives as long as a
//! connection: what has been handed out and what comes next. Seed 001: each message is acknowledged by itself, in any
//! order; at most a window of them is unacknowledged; after a reconnect everything unacknowledged comes again, in order.

use std::collections::{BTreeSet, VecDeque};

/// The durable position of a consumer in its topic: everything below `hi` is acknowledged, except the holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// One above the highest acknowledged id, or the id at which the consumer began.
    pub hi: u64,
    /// Ids below `hi` that are not acknowledged, ascending; at most a window of them.
    pub holes: Vec<u64>,
}

impl Cursor {
    /// A consumer that is owed everything from `hi` on.
    #[must_use]
    pub fn starting_at(hi: u64) -> Self {
        Self { hi, holes: Vec::new() }
    }

    /// Whether the consumer still needs message `id` of its topic.
    #[must_use]
    pub fn needs(&self, id: u64) -> bool {
        id >= self.hi || self.holes.binary_search(&id).is_ok()
    }

    /// Acknowledges `ids` (ascending, each still needed). `between` lists the topic's ids in a half-open range.
    #[must_use]
    pub fn settled<I>(&self, ids: &[u64], between: impl FnOnce(u64, u64) -> I) -> Self
    where
        I: Iterator<Item = u64>,
    {
        let Some(&highest) = ids.last() else { return self.clone() };
        let settled = |id: &u64| ids.binary_search(id).is_ok();
        let mut holes: Vec<u64> = self.holes.iter().copied().filter(|id| !settled(id)).collect();
        let hi = self.hi.max(highest + 1);
        holes.extend(between(self.hi, hi).filter(|id| !settled(id)));
        Self { hi, holes }
    }
}

/// What to read next from the topic.
#[derive(Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The window is full.
    Nothing,
    /// These, ascending: they were delivered before and not acknowledged.
    Again(Vec<u64>),
    /// At most `most` messages with an id of at least `from`.
    From {
        /// The lowest id that was not yet handed out.
        from: u64,
        /// Room in the window.
        most: usize,
    },
}

/// The one connection of an exclusive consumer.
#[derive(Debug)]
pub struct Exclusive {
    window: usize,
    again: VecDeque<u64>,
    next: u64,
    in_flight: BTreeSet<u64>,
}

impl Exclusive {
    /// Begins where `cursor` stands; at most `window` messages will be unacknowledged at a time.
    #[must_use]
    pub fn new(cursor: &Cursor, window: usize) -> Self {
        Self { window, again: cursor.holes.iter().copied().collect(), next: cursor.hi, in_flight: BTreeSet::new() }
    }

    /// What to read next, of at most `most` messages.
    #[must_use]
    pub fn wanted(&self, most: usize) -> Wanted {
        let most = most.min(self.window.saturating_sub(self.in_flight.len()));
        if most == 0 {
            Wanted::Nothing
        } else if self.again.is_empty() {
            Wanted::From { from: self.next, most }
        } else {
            Wanted::Again(self.again.iter().copied().take(most).collect())
        }
    }

    /// Message `id`, the next of what was wanted, is handed out.
    pub fn claim(&mut self, id: u64) {
        // Ids that turned out to be gone are passed over.
        while self.again.front().is_some_and(|next| *next < id) {
            self.again.pop_front();
        }
        if self.again.front() == Some(&id) {
            self.again.pop_front();
        } else {
            self.next = id + 1;
        }
        self.in_flight.insert(id);
    }

    /// The consumer has acknowledged `id`. False if it is not waiting for that: never sent, or acknowledged before.
    pub fn settle(&mut self, id: u64) -> bool {
        self.in_flight.remove(&id)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use proptest::prelude::*;

    fn settled(cursor: &Cursor, ids: &[u64], topic: &[u64]) -> Cursor {
        cursor.settled(ids, |from, to| topic.iter().copied().filter(move |id| (from..to).contains(id)))
    }

    #[test]
    fn acknowledging_in_order_leaves_no_holes() {
        let topic = [3, 7, 8];
        let cursor = settled(&Cursor::starting_at(2), &[3, 7], &topic);
        assert_eq!(cursor, Cursor { hi: 8, holes: vec![] });
    }

    #[test]
    fn skipping_leaves_holes_and_later_closes_them() {
        let topic = [3, 7, 8, 9];
        let cursor = settled(&Cursor::starting_at(2), &[8], &topic);
        assert_eq!(cursor, Cursor { hi: 9, holes: vec![3, 7] });
        assert!(cursor.needs(3) && !cursor.needs(8) && cursor.needs(9));
        assert_eq!(settled(&cursor, &[3, 9], &topic), Cursor { hi: 10, holes: vec![7] });
    }

    #[test]
    fn the_window_stops_delivery_until_an_acknowledgement() {
        let mut consumer = Exclusive::new(&Cursor::starting_at(1), 2);
        assert_eq!(consumer.wanted(10), Wanted::From { from: 1, most: 2 });
        consumer.claim(1);
        consumer.claim(5);
        assert_eq!(consumer.wanted(10), Wanted::Nothing);
        assert!(consumer.settle(5));
        assert!(!consumer.settle(5));
        assert!(!consumer.settle(77));
        assert_eq!(consumer.wanted(10), Wanted::From { from: 6, most: 1 });
    }

    #[test]
    fn holes_come_first() {
        let mut consumer = Exclusive::new(&Cursor { hi: 9, holes: vec![3, 7] }, 3);
        assert_eq!(consumer.wanted(1), Wanted::Again(vec![3]));
        consumer.claim(3);
        consumer.claim(7);
        assert_eq!(consumer.wanted(9), Wanted::From { from: 9, most: 1 });
    }

    proptest! {
        /// Random deliveries, acknowledgements and reconnects: what was not acknowledged comes again, in order, nothing else.
        #[test]
        fn nothing_is_lost_or_repeated(
            topic in prop::collection::btree_set(1u64..200, 1..60),
            steps in prop::collection::vec((0u8..3, any::<prop::sample::Index>()), 1..120),
            window in 1usize..8,
        ) {
            let topic: Vec<u64> = topic.into_iter().collect();
            let mut cursor = Cursor::starting_at(1);
            let mut acknowledged = BTreeSet::new();
            let mut consumer = Exclusive::new(&cursor, window);
            let mut sent: Vec<u64> = Vec::new();
            for (step, index) in steps {
                match step {
                    0 => {
                        let ids = match consumer.wanted(3) {
                            Wanted::Nothing => { prop_assert_eq!(sent.len(), window); vec![] }
                            Wanted::Again(ids) => ids,
                            Wanted::From { from, most } =>
                                topic.iter().copied().filter(|id| *id >= from).take(most).collect(),
                        };
                        for id in ids {
                            prop_assert!(!acknowledged.contains(&id));
                            prop_assert!(sent.iter().all(|other| *other < id), "out of order");
                            consumer.claim(id);
                            sent.push(id);
                        }
                        prop_assert!(sent.len() <= window);
                    }
                    1 if !sent.is_empty() => {
                        let id = sent.remove(index.index(sent.len()));
                        prop_assert!(consumer.settle(id));
                        cursor = settled(&cursor, &[id], &topic);
                        acknowledged.insert(id);
                        // A later, higher delivery must not be mistaken for disorder.
                    }
                    _ => {
                        consumer = Exclusive::new(&cursor, window);
                        sent.clear();
                    }
                }
                for id in &topic {
                    prop_assert_eq!(cursor.needs(*id), !acknowledged.contains(id));
                }
            }
        }
    }
}
