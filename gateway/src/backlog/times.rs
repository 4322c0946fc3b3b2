//! When messages were admitted, for all topics together.
//!
//! Message ids are one sequence and their times do not go back, so that one short list says about when each was made, in
//! place of eight bytes for every message that waits.

use std::collections::VecDeque;

/// How far the times of messages are told apart, in ms, while there are not too many.
const STEP_MS: i64 = 1_000;
/// Entries, 16 bytes each; past it every other one goes, so that old times get coarser.
const MOST: usize = 1 << 17;

/// Ids and times in ms since the epoch.
#[derive(Default)]
pub(super) struct Times {
    /// The ids up to this one, from the entry before, are no newer than this time.
    steps: VecDeque<(u64, i64)>,
    /// When the newest step began.
    began: i64,
}

impl Times {
    /// Message `id`, the newest, was made at `ms`. A time before the last one counts as the last one.
    pub(super) fn push(&mut self, id: u64, ms: i64) {
        if let Some(newest) = self.steps.back_mut() {
            let ms = ms.max(newest.1);
            if ms - self.began < STEP_MS {
                *newest = (id, ms);
                return;
            }
        }
        if self.steps.len() >= MOST {
            let mut keep = false;
            self.steps.retain(|_| {
                keep = !keep;
                !keep
            });
        }
        self.began = ms;
        self.steps.push_back((id, ms));
    }

    /// About when message `id` was made: never before it was. `None` for one that is newer than all.
    pub(super) fn of(&self, id: u64) -> Option<i64> {
        self.steps.get(self.steps.partition_point(|(last, _)| *last < id)).map(|(_, ms)| *ms)
    }

    /// One above the newest message that was made at `ms` or before, for sure.
    pub(super) fn until(&self, ms: i64) -> u64 {
        let steps = self.steps.partition_point(|(_, at)| *at <= ms);
        steps.checked_sub(1).map_or(0, |last| self.steps[last].0 + 1)
    }

    /// When the newest message was made; 0 if there is none.
    pub(super) fn newest_ms(&self) -> i64 {
        self.steps.back().map_or(0, |(_, ms)| *ms)
    }

    /// Nobody asks for messages below `id` any more.
    pub(super) fn forget_below(&mut self, id: u64) {
        let gone = self.steps.partition_point(|(last, _)| *last < id);
        // The newest step stays, so that times do not go back.
        self.steps.drain(..gone.min(self.steps.len().saturating_sub(1)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_never_too_early_and_at_most_a_step_too_late() {
        let mut times = Times::default();
        for (id, ms) in [(5, 10_000), (6, 10_900), (9, 11_000), (10, 9_000), (12, 60_000)] {
            times.push(id, ms);
        }
        assert_eq!([4, 5, 6].map(|id| times.of(id)), [Some(10_900); 3]);
        assert_eq!([7, 9, 10].map(|id| times.of(id)), [Some(11_000); 3]);
        assert_eq!([11, 12].map(|id| times.of(id)), [Some(60_000); 2]);
        assert_eq!(times.of(13), None);
        assert_eq!([10_899, 10_900, 11_000, 59_999, 60_000].map(|ms| times.until(ms)), [0, 7, 11, 11, 13]);
        times.forget_below(8);
        assert_eq!((times.steps.len(), times.of(8)), (2, Some(11_000)));
        times.forget_below(99);
        times.push(14, 5_000);
        assert_eq!((times.steps.len(), times.of(14)), (1, Some(60_000)));
    }

    #[test]
    fn past_the_bound_old_times_get_coarser() {
        let mut times = Times::default();
        let count = MOST as u64 + 1;
        for id in 1..=count {
            times.push(id, id.cast_signed() * STEP_MS);
        }
        assert_eq!(times.steps.len(), MOST / 2 + 1);
        assert_eq!(times.of(1), Some(2 * STEP_MS));
        assert_eq!(times.of(count - 1), Some((count - 1).cast_signed() * STEP_MS));
    }
}
