//! What the example plugins share: how settings are read, and what is kept for each source.

use std::num::NonZeroUsize;

use lru::LruCache;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// The most sources that a plugin remembers.
pub const MAX_SOURCES: usize = 10_000;

/// Reads settings.
///
/// # Errors
/// What is wrong and where, for the author of the settings.
pub fn settings<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// A JSON pointer (RFC 6901) in settings: where in the body a value is.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Pointer(String);

impl Pointer {
    /// As it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The pointer of a member of the object that this one points to. The name must not need to be escaped.
    #[must_use]
    pub fn member(&self, name: &str) -> String {
        format!("{}/{name}", self.0)
    }
}

impl TryFrom<String> for Pointer {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.starts_with('/') {
            Ok(Self(text))
        } else {
            Err(format!("`{text}` is no JSON pointer, which starts with a slash, as in `/c8y_Temperature/T/value`"))
        }
    }
}

/// What a setting says of the messages that don't have the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Missing {
    /// They don't pass.
    #[default]
    Drop,
    /// They pass.
    Pass,
}

impl Missing {
    /// Whether they pass.
    #[must_use]
    pub fn passes(self) -> bool {
        self == Self::Pass
    }
}

/// What a plugin keeps for each source. The one that was asked about longest ago is forgotten beyond [`MAX_SOURCES`].
#[derive(Debug)]
pub struct PerSource<T>(LruCache<String, T>);

impl<T: Default> PerSource<T> {
    /// What is kept for the source; the default for one that is new or forgotten.
    pub fn of(&mut self, source: &str) -> &mut T {
        self.0.get_or_insert_mut_ref(source, T::default)
    }
}

impl<T> Default for PerSource<T> {
    fn default() -> Self {
        const CAPACITY: NonZeroUsize = NonZeroUsize::new(MAX_SOURCES).expect("invariant: not zero");
        Self(LruCache::new(CAPACITY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_of_the_longest_ago_is_forgotten() {
        let mut seen = PerSource::<bool>::default();
        for source in 0..MAX_SOURCES {
            *seen.of(&source.to_string()) = true;
        }
        assert!(*seen.of("0"), "all of them are known, and this is the latest");
        *seen.of("new") = true;
        assert!(*seen.of("0"));
        assert!(*seen.of("2"));
        assert!(!*seen.of("1"), "it made room for the new one");
    }

    #[test]
    fn a_pointer_starts_with_a_slash() {
        assert_eq!(settings::<Pointer>(r#""/a/b""#).map(|pointer| pointer.member("c")), Ok("/a/b/c".to_owned()));
        assert_eq!(
            settings::<Pointer>(r#""a/b""#),
            Err("`a/b` is no JSON pointer, which starts with a slash, as in `/c8y_Temperature/T/value`".to_owned())
        );
    }
}
