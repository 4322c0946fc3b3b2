//! Time, from one place, so that tests can set it: the time of day, which may jump, and the time that has run, which does not.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Where the gateway reads the time. Clones share the same time.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    System { started: Instant },
    Manual(Arc<Manual>),
}

#[derive(Debug)]
struct Manual {
    wall_ms: AtomicI64,
    running_ms: AtomicI64,
}

impl Clock {
    /// The time of the operating system.
    #[must_use]
    pub fn system() -> Self {
        Self(Source::System { started: Instant::now() })
    }

    /// A time that stands still at `ms` since the epoch until [`Clock::advance`] or [`Clock::jump`] moves it; for tests.
    #[must_use]
    pub fn manual(ms: i64) -> Self {
        Self(Source::Manual(Arc::new(Manual { wall_ms: ms.into(), running_ms: 0.into() })))
    }

    /// Milliseconds since 1970-01-01T00:00:00Z; negative before it.
    #[must_use]
    pub fn now_ms(&self) -> i64 {
        match &self.0 {
            Source::System { .. } => system_ms(),
            Source::Manual(manual) => manual.wall_ms.load(Ordering::Relaxed),
        }
    }

    /// Milliseconds since the clock was made. Whatever happens to the time of day, they go on evenly.
    #[must_use]
    pub fn running_ms(&self) -> i64 {
        match &self.0 {
            Source::System { started } => i64::try_from(started.elapsed().as_millis()).unwrap_or(i64::MAX),
            Source::Manual(manual) => manual.running_ms.load(Ordering::Relaxed),
        }
    }

    /// Lets `ms` pass on a manual clock. The system's clock does not listen.
    pub fn advance(&self, ms: i64) {
        self.jump(ms);
        if let Source::Manual(manual) = &self.0 {
            manual.running_ms.fetch_add(ms, Ordering::Relaxed);
        }
    }

    /// Sets a manual clock's time of day forward by `ms`, backwards if negative, while no time passes.
    pub fn jump(&self, ms: i64) {
        if let Source::Manual(manual) = &self.0 {
            manual.wall_ms.fetch_add(ms, Ordering::Relaxed);
        }
    }
}

fn system_ms() -> i64 {
    let (sign, distance) = match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(after) => (1, after),
        Err(before) => (-1, before.duration()),
    };
    let ms = i64::try_from(distance.as_millis()).map_or(i64::MAX, |ms| sign * ms);
    #[cfg(feature = "faults")]
    let ms = ms.saturating_add(crate::faults::clock_ms());
    ms
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_of_a_manual_clock_share_its_times() {
        let clock = Clock::manual(1_000);
        let clone = clock.clone();
        clock.advance(500);
        assert_eq!((clone.now_ms(), clone.running_ms()), (1_500, 500));
        clone.jump(-2_000);
        assert_eq!((clock.now_ms(), clock.running_ms()), (-500, 500));
    }

    #[test]
    fn the_system_clock_runs_and_cannot_be_moved() {
        let clock = Clock::system();
        let before = clock.now_ms();
        assert!(before > 1_700_000_000_000, "later than 2023");
        clock.advance(1_000_000_000);
        assert!(clock.now_ms() - before < 60_000);
        assert!((0..60_000).contains(&clock.running_ms()));
    }
}
