//! Passes the messages whose value differs by more than the band from the one that passed last, of the same source.
//!
//! [`Deadband`] is plain Rust that runs natively too; on wasm32 a thin layer makes it a component of the world `filter`.

#[cfg(target_arch = "wasm32")]
mod component;

use kit::{Missing, PerSource, Pointer};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct Settings {
    value: Pointer,
    band: f64,
    #[serde(default)]
    missing: Missing,
}

/// The filter, with what it remembers.
#[derive(Debug)]
pub struct Deadband {
    settings: Settings,
    /// The value that passed last.
    last: PerSource<Option<f64>>,
}

impl Deadband {
    /// Reads the settings: `{"value": pointer, "band": number, "missing": "drop" (default) or "pass"}`.
    ///
    /// # Errors
    /// What is wrong with them, for their author.
    pub fn parse(settings: &str) -> Result<Self, String> {
        let settings: Settings = kit::settings(settings)?;
        if settings.band < 0.0 {
            return Err("`band` must not be negative".to_owned());
        }
        Ok(Self { settings, last: PerSource::default() })
    }

    /// Where in the body the value is.
    #[must_use]
    pub fn pointer(&self) -> &str {
        self.settings.value.as_str()
    }

    /// Whether a message passes.
    pub fn passes(&mut self, source: &str, value: Option<f64>) -> bool {
        let Some(value) = value else {
            return self.settings.missing.passes();
        };
        let last = self.last.of(source);
        let passes = last.is_none_or(|last| (value - last).abs() > self.settings.band);
        if passes {
            *last = Some(value);
        }
        passes
    }
}
