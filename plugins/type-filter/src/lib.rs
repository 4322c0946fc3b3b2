//! The `typeFilter` of a Cumulocity subscription: passes the messages whose `type` is one of those listed.
//!
//! [`TypeFilter`] is plain Rust that runs natively too; on wasm32 a thin layer makes it a component of the
//! world `filter`.

mod parse;

#[cfg(target_arch = "wasm32")]
mod component;

pub use parse::{MAX_CHARACTERS, MAX_TERMS, ParseError};

/// A parsed `typeFilter`: the set of types that pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypeFilter {
    /// Sorted, without duplicates, none of them empty.
    types: Vec<String>,
}

impl TypeFilter {
    /// Parses the text that the user wrote, in one of these forms (Notifications 2.0 OpenAPI and concepts guide):
    ///
    /// - `'a'` or `'a' or 'b' or …`, where `''` inside quotes is a quote, as in OData;
    /// - the same with `type eq` before any of the quoted types;
    /// - a text that starts with neither: the one type that passes, compared as a whole (the form before 10.16).
    ///
    /// # Errors
    ///
    /// [`ParseError`], whose text is for the author of the subscription, when the text has none of these forms or
    /// passes [`MAX_CHARACTERS`] or [`MAX_TERMS`].
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        let mut types = parse::types(text)?;
        types.sort_unstable();
        types.dedup();
        Ok(Self { types })
    }

    /// Whether a message of this `type` passes. A message without a type, "", never does.
    #[must_use]
    pub fn matches(&self, message_type: &str) -> bool {
        match self.types.as_slice() {
            [only] => only == message_type,
            types => types.binary_search_by(|candidate| candidate.as_str().cmp(message_type)).is_ok(),
        }
    }
}

#[cfg(test)]
mod tests;
