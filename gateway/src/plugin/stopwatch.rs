//! The processor time that guests take, measured and bounded. Time that passes while others have the processor does not count:
//! on a busy box it would end calls of healthy plugins.
//!
//! To ask the system for the processor time of a thread takes as long as a filter takes for some messages; what time it is costs
//! next to nothing. So what is soon done counts for as long as it took, which is never too little. The thread's clock is
//! read for what is not.

use std::cell::Cell;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

/// What is done sooner counts whole, even if others had the processor for a part of it.
const BRIEF: Duration = Duration::from_micros(100);
/// A reading of the thread's clock serves so long. What the thread has done since without a stopwatch may count for the next one.
const SLACK: Duration = Duration::from_millis(1);

thread_local! {
    /// When this thread's clock was read last, and what it said; with what has been shown for the time since.
    static LAST: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// Measures the processor time of this thread.
#[derive(Clone, Copy)]
pub(super) struct Stopwatch {
    /// When it was started.
    pub(super) started: Instant,
    /// What the thread had used by then, as far as is known.
    used: Duration,
}

impl Stopwatch {
    /// Is exact.
    pub(super) fn start() -> Self {
        let started = Instant::now();
        Self { started, used: read(started) }
    }

    /// Costs next to nothing most of the time, but may show up to [`SLACK`] too much, though never more than the time that has passed.
    pub(super) fn start_cheaply() -> Self {
        let started = Instant::now();
        let last = LAST.get().filter(|(time, _)| started.duration_since(*time) < SLACK);
        Self { started, used: last.map_or_else(|| read(started), |(_, used)| used) }
    }

    /// What the thread has used since the start.
    pub(super) fn shows(&self) -> Duration {
        self.shows_at(Instant::now())
    }

    /// The same at the end, for who knows what time it is. It counts for no other one.
    pub(super) fn stop(self, now: Instant) -> Duration {
        let shown = self.shows_at(now);
        if let Some((time, used)) = LAST.get().filter(|(time, _)| *time <= self.started) {
            LAST.set(Some((time, used + shown)));
        }
        shown
    }

    fn shows_at(&self, now: Instant) -> Duration {
        let passed = now.duration_since(self.started);
        if passed < BRIEF { passed } else { passed.min(read(now).saturating_sub(self.used)) }
    }
}

/// What this thread's clock says, which is remembered.
fn read(now: Instant) -> Duration {
    let used = clock();
    LAST.set(Some((now, used)));
    used
}

/// The processor time that this thread has used.
fn clock() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map(Duration::from)
        .expect("invariant: every thread has a clock of its own")
}

/// The processor time that a call may use.
pub(super) struct Budget {
    watch: Stopwatch,
    time: Duration,
}

impl Budget {
    pub(super) fn new(watch: Stopwatch, time: Duration) -> Self {
        Self { watch, time: time + SLACK }
    }

    /// What is left, if anything is.
    pub(super) fn left(&self) -> Option<Duration> {
        self.time.checked_sub(self.watch.shows()).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Uses that much of the processor.
    fn work(time: Duration) {
        let end = clock() + time;
        while clock() < end {}
    }

    #[test]
    fn only_time_of_the_processor_counts() {
        let (watch, budget) = (Stopwatch::start(), Budget::new(Stopwatch::start_cheaply(), Duration::from_millis(10)));
        thread::sleep(Duration::from_millis(30));
        let shown = watch.shows();
        assert!(shown < Duration::from_millis(5), "{shown:?}");
        assert!(budget.left() > Some(Duration::from_millis(5)));
        work(Duration::from_millis(12));
        let shown = watch.shows();
        assert!(shown >= Duration::from_millis(12), "{shown:?}");
        assert_eq!(budget.left(), None);
    }

    #[test]
    fn what_is_brief_counts_for_as_long_as_it_took() {
        let watch = Stopwatch::start_cheaply();
        let at = |passed| watch.shows_at(watch.started + passed);
        assert_eq!([at(Duration::ZERO), at(BRIEF / 2)], [Duration::ZERO, BRIEF / 2]);
        // It has not used that.
        assert!(at(Duration::from_secs(3600)) < Duration::from_secs(1));
    }

    #[test]
    fn a_start_is_exact_or_cheap() {
        let same = || Stopwatch::start().used == Stopwatch::start_cheaply().used;
        assert!((0..1000).any(|_| same()), "each reads the clock");
        let watch = Stopwatch::start();
        work(BRIEF);
        assert!(Stopwatch::start().used >= watch.used + BRIEF);
    }

    #[test]
    fn what_was_done_before_a_cheap_start_counts_little_and_never_more_than_has_passed() {
        for before in [SLACK / 4, SLACK * 4] {
            Stopwatch::start();
            work(before);
            let watch = Stopwatch::start_cheaply();
            work(BRIEF * 2);
            let shown = watch.shows();
            assert!(shown >= BRIEF * 2 && shown <= watch.started.elapsed(), "{shown:?} after {before:?}");
            thread::sleep(SLACK * 8);
            let shown = watch.shows();
            assert!(shown < SLACK * 3, "{shown:?} after {before:?}");
        }
    }

    #[test]
    fn nothing_counts_twice() {
        Stopwatch::start();
        for _ in 0..10 {
            let watch = Stopwatch::start_cheaply();
            work(BRIEF / 2);
            watch.stop(Instant::now());
        }
        let watch = Stopwatch::start_cheaply();
        thread::sleep(SLACK * 2);
        let shown = watch.shows();
        assert!(shown < BRIEF * 3, "{shown:?}");
    }
}
