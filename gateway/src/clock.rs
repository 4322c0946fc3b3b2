//! Wall time, from one place, so that tests can set it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Where the gateway reads the time of day. Clones share the same time.
#[derive(Clone, Debug)]
pub struct Clock(Source);

#[derive(Clone, Debug)]
enum Source {
    System,
    Manual(Arc<AtomicI64>),
}

impl Clock {
    /// The time of the operating system.
    #[must_use]
    pub fn system() -> Self {
        Self(Source::System)
    }

    /// A time that stands still at `ms` since the epoch until [`Clock::advance`] moves it; for tests.
    #[must_use]
    pub fn manual(ms: i64) -> Self {
        Self(Source::Manual(Arc::new(AtomicI64::new(ms))))
    }

    /// Milliseconds since 1970-01-01T00:00:00Z; negative before it.
    #[must_use]
    pub fn now_ms(&self) -> i64 {
        match &self.0 {
            Source::System => system_ms(),
            Source::Manual(ms) => ms.load(Ordering::Relaxed),
        }
    }

    /// Moves a manual clock by `ms`, backwards if negative. The system's clock does not listen.
    pub fn advance(&self, ms: i64) {
        if let Source::Manual(now) = &self.0 {
            now.fetch_add(ms, Ordering::Relaxed);
        }
    }
}

fn system_ms() -> i64 {
    let (sign, distance) = match SystemTime::now().duration_since(UNIX_EPOCH) {
        Ok(after) => (1, after),
        Err(before) => (-1, before.duration()),
    };
    i64::try_from(distance.as_millis()).map_or(i64::MAX, |ms| sign * ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_of_a_manual_clock_share_its_time() {
        let clock = Clock::manual(1_000);
        let clone = clock.clone();
        clock.advance(500);
        assert_eq!(clone.now_ms(), 1_500);
        clone.advance(-2_000);
        assert_eq!(clock.now_ms(), -500);
    }

    #[test]
    fn the_system_clock_runs_and_cannot_be_moved() {
        let clock = Clock::system();
        let before = clock.now_ms();
        assert!(before > 1_700_000_000_000, "later than 2023");
        clock.advance(1_000_000_000);
        assert!(clock.now_ms() - before < 60_000);
    }
}
