//! What a consumer has received, held against what was sent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::measurement::{SendTimes, number};

/// How long a message too many is waited for.
pub(crate) const LINGER: Duration = Duration::from_millis(100);

/// What has come since the last look.
#[derive(Default)]
pub(crate) struct Received {
    messages: u64,
    /// Messages whose number was not sent or had come before.
    strange: u64,
    /// One bit for each number that has come.
    seen: Vec<u64>,
    /// From the sending of the post to the reading of its message, in milliseconds.
    pub(crate) delays: Vec<f64>,
    failure: Option<anyhow::Error>,
}

impl Received {
    /// Takes note of a message that came at `now`.
    pub(crate) fn note(&mut self, body: &[u8], sent: &SendTimes, now: Instant) {
        self.messages += 1;
        let delay = number(body).filter(|number| self.is_new(*number)).and_then(|number| sent.since(number, now));
        match delay {
            Some(delay) => self.delays.push(delay.as_secs_f64() * 1e3),
            None => self.strange += 1,
        }
    }

    fn is_new(&mut self, number: u64) -> bool {
        let (word, bit) = (number as usize / 64, 1 << (number % 64));
        if self.seen.len() <= word {
            self.seen.resize(word + 1, 0);
        }
        let is_new = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        is_new
    }
}

/// Between a consumer and those who wait for what it receives.
#[derive(Clone, Default)]
pub(crate) struct Inbox(Arc<Mutex<Received>>);

impl Inbox {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Received> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes how the consumer ended, for those who wait.
    pub(crate) fn end(&self, outcome: Result<()>) {
        self.lock().failure = outcome.err();
    }

    /// Waits for at least `count` messages since they were last taken.
    pub(crate) fn wait(&self, count: u64, patience: Duration) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            let mut received = self.lock();
            if let Some(failure) = received.failure.take() {
                return Err(failure.context("consumer"));
            }
            if received.messages >= count {
                return Ok(());
            }
            let messages = received.messages;
            drop(received);
            ensure!(Instant::now() < deadline, "{messages} messages for {count} that were sent, after {patience:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What has come since the last time: exactly `count` messages, each another one that was sent, or an error.
    pub(crate) fn take(&self, count: u64) -> Result<Received> {
        let received = std::mem::take(&mut *self.lock());
        ensure!(received.messages == count, "{} messages for {count} that were sent", received.messages);
        ensure!(received.strange == 0, "{} messages came twice or were never sent", received.strange);
        Ok(received)
    }
}
