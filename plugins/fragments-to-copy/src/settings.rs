use std::fmt;

use crate::json;

/// The most entries of `fragmentsToCopy`.
pub const MAX_FRAGMENTS: usize = 200;

/// The longest entry, in characters.
pub const MAX_FRAGMENT_CHARACTERS: usize = 256;

/// Why a text is no `fragmentsToCopy`. Entries count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettingsError {
    /// Not a JSON array.
    NotAnArray,
    /// An entry that is not a JSON string.
    NotAString {
        /// Which one.
        entry: usize,
    },
    /// An empty entry.
    Empty {
        /// Which one.
        entry: usize,
    },
    /// An entry of more than [`MAX_FRAGMENT_CHARACTERS`].
    TooLong {
        /// Which one.
        entry: usize,
    },
    /// More than [`MAX_FRAGMENTS`].
    TooMany,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("fragmentsToCopy: ")?;
        match self {
            Self::NotAnArray => f.write_str("an array of names is expected"),
            Self::NotAString { entry } => write!(f, "entry {entry} is not a string"),
            Self::Empty { entry } => write!(f, "entry {entry} is empty"),
            Self::TooLong { entry } => {
                write!(f, "entry {entry} is longer than {MAX_FRAGMENT_CHARACTERS} characters")
            }
            Self::TooMany => write!(f, "more than {MAX_FRAGMENTS} entries"),
        }
    }
}

impl std::error::Error for SettingsError {}

/// The entries, in the order of the text.
pub(crate) fn fragments(settings: &str) -> Result<Vec<String>, SettingsError> {
    let text = settings.as_bytes();
    let mut fragments = Vec::new();
    let malformed = |_| SettingsError::NotAnArray;

    let open = json::skip_whitespace(text, 0);
    json::expect(text, open, b'[').map_err(malformed)?;
    let mut at = json::skip_whitespace(text, open + 1);
    let mut more = text.get(at) != Some(&b']');
    while more {
        let entry = fragments.len() + 1;
        let end = json::skip_string(text, at).map_err(|_| SettingsError::NotAString { entry })?;
        let fragment = json::decode_string(&text[at..end]).ok_or(SettingsError::NotAString { entry })?;
        check(&fragment, entry)?;
        fragments.push(fragment);
        at = json::skip_whitespace(text, end);
        more = text.get(at) == Some(&b',');
        if more {
            at = json::skip_whitespace(text, at + 1);
        }
    }
    json::expect(text, at, b']').map_err(malformed)?;
    json::expect_end(text, at + 1).map_err(malformed)?;
    Ok(fragments)
}

fn check(fragment: &str, entry: usize) -> Result<(), SettingsError> {
    if entry > MAX_FRAGMENTS {
        Err(SettingsError::TooMany)
    } else if fragment.is_empty() {
        Err(SettingsError::Empty { entry })
    } else if fragment.chars().nth(MAX_FRAGMENT_CHARACTERS).is_some() {
        Err(SettingsError::TooLong { entry })
    } else {
        Ok(())
    }
}
