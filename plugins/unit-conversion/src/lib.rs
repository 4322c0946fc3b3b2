//! Converts a value of a body to another unit. The rest of the text stays as it is.
//!
//! [`UnitConversion`] is plain Rust that runs natively too; on wasm32 a thin layer makes it a component of the world
//! `transform`.

#[cfg(target_arch = "wasm32")]
mod component;
mod find;

use kit::Pointer;
use serde::Deserialize;
use serde_json::value::RawValue;

/// The most decimals that can be asked for.
pub const MAX_DECIMALS: usize = 15;

/// A parsed conversion.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
pub struct UnitConversion {
    /// Where the series is: an object with a number `value`, and perhaps a `unit`.
    series: Pointer,
    factor: f64,
    #[serde(default)]
    offset: f64,
    unit: String,
    decimals: Option<usize>,
}

/// A part of the body that is replaced.
type Edit<'a> = (&'a RawValue, String);

impl UnitConversion {
    /// Reads the settings: `{"series": pointer of an object with value and unit, "factor": number, "offset": number (0),
    /// "unit": text, "decimals": number (as many as are needed)}`. What comes out is `value * factor + offset`.
    ///
    /// # Errors
    /// What is wrong with them, for their author.
    pub fn parse(settings: &str) -> Result<Self, String> {
        let conversion: Self = kit::settings(settings)?;
        if conversion.decimals.is_some_and(|decimals| decimals > MAX_DECIMALS) {
            return Err(format!("`decimals` must be at most {MAX_DECIMALS}"));
        }
        Ok(conversion)
    }

    /// The new body; `None`: it has no such value, and stays as it is.
    ///
    /// # Errors
    /// If the result is too large for a number.
    pub fn apply(&self, body: &str) -> Result<Option<String>, String> {
        let Some(series) = find::pointed(body, self.series.as_str()) else {
            return Ok(None);
        };
        let Some(old) = find::pointed(series.get(), "/value") else {
            return Ok(None);
        };
        let Ok(number) = serde_json::from_str(old.get()) else {
            return Ok(None);
        };
        let new = self.convert(number).ok_or_else(|| format!("{old} is too large to be converted"))?;
        let unit = serde_json::to_string(&self.unit).map_err(|error| error.to_string())?;
        let edits = match find::pointed(series.get(), "/unit") {
            Some(old_unit) => vec![(old, new), (old_unit, unit)],
            None => vec![(old, format!("{new},\"unit\":{unit}"))],
        };
        Ok(Some(edit(body, edits)))
    }

    /// `None` if the result is too large for a number.
    fn convert(&self, number: f64) -> Option<String> {
        let result = number * self.factor + self.offset;
        result.is_finite().then(|| match self.decimals {
            Some(decimals) => format!("{result:.decimals$}"),
            None => serde_json::Value::from(result).to_string(),
        })
    }
}

/// Replaces parts of the body, each of which must be a slice of it.
fn edit(body: &str, mut edits: Vec<Edit<'_>>) -> String {
    let offset = |part: &RawValue| part.get().as_ptr().addr() - body.as_ptr().addr();
    edits.sort_by_key(|(part, _)| offset(part));
    let mut edited = String::with_capacity(body.len() + 32);
    let mut done = 0;
    for (part, new) in edits {
        edited.push_str(&body[done..offset(part)]);
        edited.push_str(&new);
        done = offset(part) + part.get().len();
    }
    edited.push_str(&body[done..]);
    edited
}
