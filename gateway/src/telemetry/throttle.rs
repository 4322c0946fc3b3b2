//! Keeps what others cause from flooding the log.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const WINDOW: Duration = Duration::from_secs(1);

/// Lets so many pass in a second, and counts the others.
pub(crate) struct Throttle {
    per_second: u32,
    state: Mutex<State>,
}

struct State {
    since: Instant,
    passed: u32,
    suppressed: u64,
}

impl Throttle {
    pub(crate) fn new(per_second: u32) -> Self {
        let state = State { since: Instant::now(), passed: 0, suppressed: 0 };
        Self { per_second, state: Mutex::new(state) }
    }

    /// Some number of those suppressed since the last that passed, if this one may pass.
    pub(crate) fn pass(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(state.since) >= WINDOW {
            (state.since, state.passed) = (now, 0);
        }
        if state.passed >= self.per_second {
            state.suppressed += 1;
            return None;
        }
        state.passed += 1;
        Some(std::mem::take(&mut state.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_a_second_pass() {
        let throttle = Throttle::new(2);
        let start = Instant::now();
        let passed: Vec<_> = (0..5).map(|_| throttle.pass(start)).collect();
        assert_eq!(passed, [Some(0), Some(0), None, None, None]);
        assert_eq!(throttle.pass(start + WINDOW * 2), Some(3));
        assert_eq!(throttle.pass(start + WINDOW * 2), Some(0));
    }
}
