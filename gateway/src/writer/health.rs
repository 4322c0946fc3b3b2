//! What can be seen of the writer from outside: whether it moves, and whether the disk takes what it writes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Refused;

/// A batch that takes so long is stuck: the disk does not answer.
const STUCK: Duration = Duration::from_secs(10);

/// Why the gateway should get no requests now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unwell {
    /// The disk did not take the last commit.
    #[error("{0}")]
    Refusing(Refused),
    /// The commit at hand does not end.
    #[error("the disk has not answered for {} s", .0.as_secs())]
    Stuck(Duration),
}

/// Written by the writer, read by whoever asks.
#[derive(Clone, Default)]
pub(super) struct Health(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Since when the writer is at a batch.
    working: Option<Instant>,
    refusing: Option<Refused>,
}

impl Health {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A batch begins.
    pub(super) fn works(&self, now: Instant) {
        self.state().working = Some(now);
    }

    /// There is nothing to do.
    pub(super) fn rests(&self) {
        self.state().working = None;
    }

    /// Something was written, which says of a full store only sometimes that there is room. Whether that is news.
    pub(super) fn commits(&self, shows_room: bool) -> bool {
        let mut state = self.state();
        let over = shows_room || state.refusing != Some(Refused::Full);
        over && state.refusing.take().is_some()
    }

    /// Whether another program's lock was in the way of the last commit.
    pub(super) fn is_locked(&self) -> bool {
        self.state().refusing == Some(Refused::Locked)
    }

    /// Nothing could be written. What one command is to blame for says nothing of the next ones. Whether that is news.
    pub(super) fn fails(&self, refused: Refused) -> bool {
        matches!(refused, Refused::Full | Refused::Unwritable | Refused::Locked)
            && self.state().refusing.replace(refused).is_none()
    }

    pub(super) fn check(&self, now: Instant) -> Result<(), Unwell> {
        let state = self.state();
        let working = state.working.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        match &state.refusing {
            _ if working >= STUCK => Err(Unwell::Stuck(working)),
            Some(refused) => Err(Unwell::Refusing(refused.clone())),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_is_unwell_while_the_disk_is_full_or_does_not_answer() {
        let (health, start) = (Health::default(), Instant::now());
        assert_eq!(health.check(start), Ok(()));
        health.works(start);
        assert_eq!(health.check(start + STUCK / 2), Ok(()));
        let stuck = Unwell::Stuck(STUCK);
        assert_eq!(health.check(start + STUCK), Err(stuck.clone()));
        assert_eq!(stuck.to_string(), "the disk has not answered for 10 s");
        health.works(start + STUCK);
        assert_eq!(health.check(start + STUCK), Ok(()), "the next batch");
        health.rests();
        assert_eq!(health.check(start + STUCK * 9), Ok(()), "nothing to do");
        assert!(!health.fails(Refused::Failed));
        assert_eq!(health.check(start), Ok(()), "the fault of one command");
        assert!(health.fails(Refused::Full) && !health.fails(Refused::Unwritable), "news once");
        assert_eq!(health.check(start), Err(Unwell::Refusing(Refused::Unwritable)));
        assert!(health.commits(false) && !health.commits(true), "news once");
        assert_eq!(health.check(start), Ok(()));
        assert!(health.fails(Refused::Full) && !health.commits(false) && health.commits(true), "what needs no room");
        assert!(health.fails(Refused::Locked) && health.is_locked() && health.commits(false) && !health.is_locked());
    }
}
