//! The REST objects of the platform: what clients send, what is stored, what they and their consumers get back.

use std::borrow::Cow;

use bytes::Bytes;

use crate::json::{self, Invalid};

pub mod alarm;
pub mod children;
pub mod event;
pub mod identity;
pub mod inventory;
pub mod list;
pub mod measurement;
mod merge;
mod mode;
pub mod object;
pub mod operation;
pub mod page;
pub mod query;
pub mod relation;
pub mod search;
mod sources;

pub use mode::ProcessingMode;
pub use sources::{Counts, Related, Sources, TooMany};

/// Where managed objects are, with the slash at its end.
const PATH: &str = "/inventory/managedObjects/";

/// Longest type, name, owner, fragment or series name, in characters.
pub const MAX_NAME_CHARS: usize = 256;

/// Reads an id from a path or a parameter: decimal digits, at most 2^63 - 1.
#[must_use]
pub fn parse_id(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let id: i64 = text.parse().ok().filter(|_| digits)?;
    Some(id.cast_unsigned())
}

/// Reads an id from a raw JSON value; clients send it as a string or as a number.
///
/// # Errors
/// When it is neither; the error names `field`.
pub fn id_value(raw: &str, field: &str) -> Result<u64, Invalid> {
    let text = match raw.strip_prefix('"') {
        Some(rest) => rest.strip_suffix('"').unwrap_or(rest),
        None => raw,
    };
    parse_id(text).ok_or_else(|| Invalid::new(field, "must be an id of decimal digits"))
}

/// Reads a raw JSON value as a string of at most [`MAX_NAME_CHARS`].
pub(crate) fn short_string<'a>(raw: &'a str, field: &str) -> Result<Cow<'a, str>, Invalid> {
    let text = json::string(raw, field)?;
    if is_too_long(&text) {
        return Err(Invalid::new(field, format!("is longer than {MAX_NAME_CHARS} characters")));
    }
    Ok(text)
}

/// A fragment's or series' name that is empty or too long is refused.
fn check_name(name: &str) -> Result<(), Invalid> {
    match name {
        "" => Err(Invalid::new("", "the name of a fragment or series is empty")),
        _ if is_too_long(name) => {
            Err(Invalid::new(name, format!("the name is longer than {MAX_NAME_CHARS} characters")))
        }
        _ => Ok(()),
    }
}

fn is_too_long(text: &str) -> bool {
    text.len() > MAX_NAME_CHARS && text.chars().nth(MAX_NAME_CHARS).is_some()
}

/// The platform's wording for mandatory members, given with whether they are present: one error for all that are missing.
fn missing(fields: &[(&str, bool)]) -> Invalid {
    let names: Vec<_> = fields.iter().filter(|(_, present)| !present).map(|(name, _)| *name).collect();
    Invalid::new("", format!("Following mandatory fields should be included: {}", names.join(",")))
}

/// The body of the notification that an object is gone: `{"id":"…"}`.
#[must_use]
pub fn deletion(id: u64) -> Bytes {
    format!("{{\"id\":\"{id}\"}}").into()
}

/// Appends `"self":"BASE/PATH/ID"`, with `/CHILD` behind it unless `child` is empty.
fn push_self(base_url: &str, path: &str, id: u64, child: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(b"\"self\":\"");
    json::write_escaped(base_url, out);
    out.extend_from_slice(path.as_bytes());
    push_decimal(id, out);
    if !child.is_empty() {
        out.push(b'/');
        out.extend_from_slice(child.as_bytes());
    }
    out.push(b'"');
}

fn push_decimal(number: u64, out: &mut Vec<u8>) {
    use std::io::Write as _;
    write!(out, "{number}").expect("invariant: writing to memory succeeds");
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn ids_are_decimal_digits() {
        assert_eq!(parse_id("42"), Some(42));
        assert_eq!(parse_id("9223372036854775807"), Some(i64::MAX as u64));
        for text in ["", "+1", "-1", " 1", "1.0", "x", "9223372036854775808", "99999999999999999999", "١"] {
            assert_eq!(parse_id(text), None, "{text}");
        }
    }

    #[test]
    fn ids_come_as_strings_or_numbers() {
        assert_eq!(id_value("\"42\"", "source.id"), Ok(42));
        assert_eq!(id_value("42", "source.id"), Ok(42));
        for raw in ["\"\"", "\"", "true", "4.2", "4e2", "{}", "\"4\\u0032\""] {
            let refused = id_value(raw, "source.id").unwrap_err().to_string();
            assert_eq!(refused, "source.id: must be an id of decimal digits", "{raw}");
        }
    }

    #[test]
    fn names_are_counted_in_characters() {
        assert!(check_name(&"ä".repeat(256)).is_ok());
        assert!(check_name(&"ä".repeat(257)).is_err());
        assert!(check_name("").is_err());
    }

    #[test]
    fn all_missing_fields_are_named() {
        let refused = missing(&[("source", false), ("type", true), ("time", false)]);
        assert_eq!(refused.to_string(), "Following mandatory fields should be included: source,time");
    }

    #[test]
    fn a_deletion_tells_the_id() {
        assert_eq!(deletion(42), r#"{"id":"42"}"#);
    }
}
