//! Looks one value up in JSON text without building a tree of it.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// What stands at a pointer.
#[derive(Debug, PartialEq)]
pub(super) enum Found<'a> {
    /// Nothing, or the text is not JSON.
    Missing,
    Null,
    Boolean(bool),
    Number(f64),
    Text(Cow<'a, str>),
    /// An object or an array, as it is written.
    Json(&'a str),
}

/// The value at an RFC 6901 pointer; of equal keys the last one counts.
pub(super) fn find<'a>(json: &'a [u8], pointer: &str) -> Found<'a> {
    descend(json, pointer).map_or(Found::Missing, classify)
}

fn descend<'a>(json: &'a [u8], pointer: &str) -> Option<&'a str> {
    let mut tokens = pointer.split('/');
    if tokens.next() != Some("") {
        return None;
    }
    let text = std::str::from_utf8(json).ok()?.trim_ascii();
    tokens.try_fold(text, child)
}

fn child<'a>(json: &'a str, token: &str) -> Option<&'a str> {
    if !json.starts_with(['{', '[']) {
        return None;
    }
    let token = token.replace("~1", "/").replace("~0", "~");
    serde_json::Deserializer::from_str(json).deserialize_any(Child(&token)).ok()?.map(RawValue::get)
}

fn classify(json: &str) -> Found<'_> {
    match json.as_bytes().first() {
        Some(b'{' | b'[') => Found::Json(json),
        Some(b'"') => serde_json::from_str(json).map_or(Found::Missing, |Text(text)| Found::Text(text)),
        Some(b'n') => Found::Null,
        Some(b't') => Found::Boolean(true),
        Some(b'f') => Found::Boolean(false),
        _ => json.parse().map_or(Found::Missing, Found::Number),
    }
}

/// A string that is copied only if it holds escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Takes the child with this name, or at this index, and passes over the others.
struct Child<'t>(&'t str);

impl<'de> Visitor<'de> for Child<'_> {
    type Value = Option<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or an array")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(Text(key)) = map.next_key()? {
            if key == self.0 {
                found = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let wanted = index(self.0);
        let mut found = None;
        for i in 0.. {
            if Some(i) == wanted {
                found = items.next_element()?;
                if found.is_none() {
                    break;
                }
            } else if items.next_element::<IgnoredAny>()?.is_none() {
                break;
            }
        }
        Ok(found)
    }
}

/// RFC 6901 knows neither signs nor leading zeros.
fn index(token: &str) -> Option<usize> {
    let plain = token == "0" || token.starts_with(|first: char| matches!(first, '1'..='9'));
    plain.then(|| token.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn finds_what_serde_json_finds() {
        let json = br#" {"a":{"b":[10,{"c/d":"x\u0041","e~f":null}]},"t":true,"":{"z":-1.5e3},"a b":"q"} "#;
        let tree: serde_json::Value = serde_json::from_slice(json).unwrap();
        for pointer in [
            "/a/b/0",
            "/a/b/1/c~1d",
            "/a/b/1/e~0f",
            "/t",
            "//z",
            "/a b",
            "/a/b",
            "/a/b/1",
            "/a/b/2",
            "/a/b/-1",
            "/a/b/01",
            "/a/b/0/x",
            "/t/x",
            "/missing",
            "a",
            "/a/b/+1",
        ] {
            let expected = match tree.pointer(pointer) {
                None => Found::Missing,
                Some(serde_json::Value::Null) => Found::Null,
                Some(serde_json::Value::Bool(value)) => Found::Boolean(*value),
                Some(serde_json::Value::Number(value)) => Found::Number(value.as_f64().unwrap()),
                Some(serde_json::Value::String(value)) => Found::Text(value.as_str().into()),
                Some(_) => {
                    let Found::Json(text) = find(json, pointer) else { panic!("{pointer} is no structure") };
                    assert_eq!(Some(&serde_json::from_str::<serde_json::Value>(text).unwrap()), tree.pointer(pointer));
                    continue;
                }
            };
            assert_eq!(find(json, pointer), expected, "{pointer}");
        }
    }

    #[test]
    fn the_whole_text_and_broken_text() {
        assert_eq!(find(b" {\"a\":1} ", ""), Found::Json("{\"a\":1}"));
        for broken in [&b"{\"a\":"[..], b"", b"{\"a\" 1}", b"\xff{}"] {
            assert_eq!(find(broken, "/a"), Found::Missing);
        }
        assert_eq!(find(b"{\"a\":1,\"a\":2}", "/a"), Found::Number(2.0));
    }
}
