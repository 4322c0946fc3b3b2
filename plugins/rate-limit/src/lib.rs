//! Passes a message of a source when enough time lies between it and the one of the source that passed last.
//!
//! The clock is the time that the messages carry: the same messages always get the same verdicts. Messages without a time pass.
//!
//! [`RateLimit`] is plain Rust that runs natively too; on wasm32 a thin layer makes it a component of the world `filter`.

#[cfg(target_arch = "wasm32")]
mod component;
mod time;

use kit::PerSource;
use serde::Deserialize;

/// The longest time between two messages, in seconds: a year.
const MAX_SECONDS: f64 = 366.0 * 86400.0;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct Settings {
    seconds: f64,
}

/// The filter, with what it remembers.
#[derive(Debug)]
pub struct RateLimit {
    pause_ms: i64,
    /// The time of the message that passed last.
    last: PerSource<Option<i64>>,
}

impl RateLimit {
    /// Reads the settings: `{"seconds": number}`.
    ///
    /// # Errors
    /// What is wrong with them, for their author.
    pub fn parse(settings: &str) -> Result<Self, String> {
        let Settings { seconds } = kit::settings(settings)?;
        if !(seconds > 0.0 && seconds <= MAX_SECONDS) {
            return Err(format!("`seconds` must be more than 0 and at most {MAX_SECONDS}"));
        }
        Ok(Self { pause_ms: (seconds * 1000.0) as i64, last: PerSource::default() })
    }

    /// Whether a message passes.
    pub fn passes(&mut self, source: &str, time: Option<&str>) -> bool {
        let Some(time) = time.and_then(time::parse) else {
            return true;
        };
        let last = self.last.of(source);
        // A clock that was put back must not silence its device until it has caught up.
        let passes = last.is_none_or(|last| (time - last).abs() >= self.pause_ms);
        if passes {
            *last = Some(time);
        }
        passes
    }
}
