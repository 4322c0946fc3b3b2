//! The `fragmentsToCopy` of a Cumulocity subscription: of each body, the standard properties of its API and the
//! listed fragments remain.
//!
//! [`Projection`] is plain Rust that runs natively too; on wasm32 a thin layer makes it a component of the world
//! `transform`.

mod api;
mod json;
mod settings;

#[cfg(target_arch = "wasm32")]
mod component;

use std::fmt;

pub use settings::{MAX_FRAGMENT_CHARACTERS, MAX_FRAGMENTS, SettingsError};

use api::Api;

/// A parsed `fragmentsToCopy`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Projection {
    /// Sorted, without duplicates.
    fragments: Vec<String>,
}

impl Projection {
    /// Parses a JSON array of names; none at all leaves the standard properties alone.
    ///
    /// # Errors
    ///
    /// [`SettingsError`], whose text is for the author of the subscription, when the text is anything but an array of
    /// at most [`MAX_FRAGMENTS`] non-empty strings of at most [`MAX_FRAGMENT_CHARACTERS`] each.
    pub fn parse(settings: &str) -> Result<Self, SettingsError> {
        let mut fragments = settings::fragments(settings)?;
        fragments.sort_unstable();
        fragments.dedup();
        Ok(Self { fragments })
    }

    /// Cuts `body`, a message of `api` ("measurements", "managedobjects", …), down in place. What remains is byte for
    /// byte as it was, in its order; only what stood between a member that goes and its neighbours goes with it.
    ///
    /// `body` is taken to be valid JSON: of the members only as much is looked at as is needed to find their ends.
    ///
    /// # Errors
    ///
    /// [`BodyError`] when the API is unknown or the body is not a JSON object; the content of `body` is then
    /// unspecified.
    pub fn project(&self, api: &str, body: &mut Vec<u8>) -> Result<(), BodyError> {
        let api = Api::named(api).ok_or(BodyError::UnknownApi)?;
        let open = json::skip_whitespace(body, 0);
        if body.get(open) != Some(&b'{') {
            return Err(BodyError::NotAnObject);
        }
        let mut kept = Kept::new(body);
        let mut at = json::skip_whitespace(body, open + 1);
        let mut more = body.get(at) != Some(&b'}');
        while more {
            let start = at;
            let key_end = json::skip_string(body, start)?;
            let colon = json::skip_whitespace(body, key_end);
            json::expect(body, colon, b':')?;
            let end = json::skip_value(body, json::skip_whitespace(body, colon + 1))?;
            if self.keeps(api, &body[start..key_end]) {
                kept.extend(start, end);
            } else {
                kept.flush(body);
            }
            at = json::skip_whitespace(body, end);
            more = body.get(at) == Some(&b',');
            if more {
                at = json::skip_whitespace(body, at + 1);
            }
        }
        json::expect(body, at, b'}')?;
        json::expect_end(body, at + 1)?;
        kept.close(body);
        Ok(())
    }

    /// Whether the member with this key, given with its quotes, remains.
    fn keeps(&self, api: Api, quoted: &[u8]) -> bool {
        let raw = &quoted[1..quoted.len() - 1];
        if !raw.contains(&b'\\') {
            return self.keeps_key(api, raw);
        }
        json::decode_string(quoted).is_some_and(|key| self.keeps_key(api, key.as_bytes()))
    }

    fn keeps_key(&self, api: Api, key: &[u8]) -> bool {
        api.is_standard(key) || self.fragments.binary_search_by(|fragment| fragment.as_bytes().cmp(key)).is_ok()
    }
}

/// The object that grows at the start of the body, always behind the place that is read.
struct Kept {
    /// Where the object ends so far.
    end: usize,
    /// The members last kept, not yet moved: neighbours move together.
    run: std::ops::Range<usize>,
}

impl Kept {
    /// `body` holds at least one byte.
    fn new(body: &mut [u8]) -> Self {
        body[0] = b'{';
        Self { end: 1, run: 0..0 }
    }

    fn extend(&mut self, start: usize, end: usize) {
        if self.run.is_empty() {
            self.run.start = start;
        }
        self.run.end = end;
    }

    fn flush(&mut self, body: &mut [u8]) {
        let run = std::mem::take(&mut self.run);
        if run.is_empty() {
            return;
        }
        if self.end > 1 {
            body[self.end] = b',';
            self.end += 1;
        }
        let length = run.len();
        if run.start != self.end {
            body.copy_within(run, self.end);
        }
        self.end += length;
    }

    fn close(mut self, body: &mut Vec<u8>) {
        self.flush(body);
        body[self.end] = b'}';
        body.truncate(self.end + 1);
    }
}

/// Why a body could not be cut down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BodyError {
    /// The standard properties of this API are not known.
    UnknownApi,
    /// The body starts with something other than `{`.
    NotAnObject,
    /// The body is not JSON.
    Malformed {
        /// Where, in bytes from 0.
        offset: usize,
    },
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("fragmentsToCopy: ")?;
        match self {
            Self::UnknownApi => f.write_str("the standard properties of this API are not known"),
            Self::NotAnObject => f.write_str("the body is not a JSON object"),
            Self::Malformed { offset } => write!(f, "the body is not JSON at byte {offset}"),
        }
    }
}

impl std::error::Error for BodyError {}

impl From<json::Malformed> for BodyError {
    fn from(json::Malformed { offset }: json::Malformed) -> Self {
        Self::Malformed { offset }
    }
}

#[cfg(test)]
mod tests;
