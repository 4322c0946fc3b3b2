//! Passes the messages whose value lies beyond a limit, or those that cross it. With hysteresis, a value that trembles about
//! the limit does not cross it again and again.
//!
//! [`Threshold`] is plain Rust that runs natively too; on wasm32 a thin layer makes it a component of the world `filter`.

#[cfg(target_arch = "wasm32")]
mod component;

use kit::{Missing, PerSource, Pointer};
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct Settings {
    value: Pointer,
    above: Option<f64>,
    below: Option<f64>,
    #[serde(default)]
    hysteresis: f64,
    #[serde(default)]
    pass: Pass,
    #[serde(default)]
    missing: Missing,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Pass {
    /// Every message while the value is beyond the limit.
    #[default]
    Beyond,
    /// The message with which a source goes beyond the limit or comes back, and its first one.
    Crossings,
}

#[derive(Debug, Clone, Copy)]
enum Limit {
    Above(f64),
    Below(f64),
}

impl Limit {
    /// A value that has been beyond the limit has to come back by more than `hysteresis`.
    fn is_beyond(self, value: f64, has_been: bool, hysteresis: f64) -> bool {
        let slack = if has_been { hysteresis } else { 0.0 };
        match self {
            Self::Above(limit) => value > limit - slack,
            Self::Below(limit) => value < limit + slack,
        }
    }
}

/// The filter, with what it remembers.
#[derive(Debug)]
pub struct Threshold {
    settings: Settings,
    limit: Limit,
    /// On which side each source was; `None` before its first message.
    beyond: PerSource<Option<bool>>,
}

impl Threshold {
    /// Reads the settings: `{"value": pointer, "above" or "below": number, "hysteresis": number (0),
    /// "pass": "beyond" (default) or "crossings", "missing": "drop" (default) or "pass"}`.
    ///
    /// # Errors
    /// What is wrong with them, for their author.
    pub fn parse(settings: &str) -> Result<Self, String> {
        let settings: Settings = kit::settings(settings)?;
        let limit = match (settings.above, settings.below) {
            (Some(limit), None) => Limit::Above(limit),
            (None, Some(limit)) => Limit::Below(limit),
            (Some(_), Some(_)) => return Err("only one of `above` and `below` may be set".to_owned()),
            (None, None) => return Err("either `above` or `below` is needed".to_owned()),
        };
        if settings.hysteresis < 0.0 {
            return Err("`hysteresis` must not be negative".to_owned());
        }
        Ok(Self { settings, limit, beyond: PerSource::default() })
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
        let side = self.beyond.of(source);
        let before = *side;
        let now = self.limit.is_beyond(value, before == Some(true), self.settings.hysteresis);
        *side = Some(now);
        match self.settings.pass {
            Pass::Beyond => now,
            Pass::Crossings => before != Some(now),
        }
    }
}
