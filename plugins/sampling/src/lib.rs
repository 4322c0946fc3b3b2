//! Passes every n-th message of each source, or all messages of a share of the sources.
//!
//! [`Sampling`] is plain Rust that runs natively too; on wasm32 a thin layer makes it a component of the world `filter`.

#[cfg(target_arch = "wasm32")]
mod component;

use kit::PerSource;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a JSON object")]
struct Settings {
    every: Option<u32>,
    share: Option<f64>,
}

/// The filter, with what it remembers.
#[derive(Debug)]
pub enum Sampling {
    /// One of so many messages of each source, the first among them.
    Every {
        /// How many.
        every: u32,
        /// How many more don't pass.
        left: PerSource<u32>,
    },
    /// All messages of the sources whose hash is below the share.
    Share(f64),
}

impl Sampling {
    /// Reads the settings: `{"every": whole number}` or `{"share": number from 0 to 1}`.
    ///
    /// # Errors
    /// What is wrong with them, for their author.
    pub fn parse(settings: &str) -> Result<Self, String> {
        let Settings { every, share } = kit::settings(settings)?;
        match (every, share) {
            (Some(every @ 1..), None) => Ok(Self::Every { every, left: PerSource::default() }),
            (None, Some(share @ 0.0..=1.0)) => Ok(Self::Share(share)),
            (Some(_), None) => Err("`every` must be at least 1".to_owned()),
            (None, Some(_)) => Err("`share` must be from 0 to 1".to_owned()),
            (Some(_), Some(_)) => Err("only one of `every` and `share` may be set".to_owned()),
            (None, None) => Err("either `every` or `share` is needed".to_owned()),
        }
    }

    /// Whether something is kept for each source.
    #[must_use]
    pub fn keeps_state(&self) -> bool {
        matches!(self, Self::Every { .. })
    }

    /// Whether a message passes.
    pub fn passes(&mut self, source: &str) -> bool {
        match self {
            Self::Every { every, left } => {
                let left = left.of(source);
                let passes = *left == 0;
                *left = if passes { *every } else { *left } - 1;
                passes
            }
            Self::Share(share) => place(source) < *share,
        }
    }
}

/// The place of a source among all, from 0 to below 1; the same in every gateway, and at every time.
fn place(source: &str) -> f64 {
    // FNV-1a, and the finalizer of MurmurHash3, without which short ids differ in the low bits only.
    let hash = source
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3));
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    f64::from((hash >> 32) as u32) / 2_f64.powi(32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_sources_passes() {
        let passing = |share| {
            let mut sampling = Sampling::Share(share);
            (0..10_000).filter(|source: &u32| sampling.passes(&source.to_string())).count()
        };
        assert_eq!((passing(0.0), passing(1.0)), (0, 10_000));
        for share in [0.01, 0.1, 0.5, 0.9] {
            let (expected, passing) = (10_000.0 * share, passing(share) as f64);
            assert!((passing - expected).abs() < 4.0 * (expected * (1.0 - share)).sqrt(), "{share}: {passing}");
        }
    }

    #[test]
    fn a_larger_share_holds_the_smaller_one() {
        let passing = |share| -> Vec<u32> {
            let mut sampling = Sampling::Share(share);
            (0..1000).filter(|source| sampling.passes(&source.to_string())).collect()
        };
        let larger = passing(0.3);
        assert!(passing(0.2).iter().all(|source| larger.contains(source)));
    }
}
