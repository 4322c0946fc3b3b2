//! Looks values up in JSON text without building a tree of it.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
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

/// RFC 6901 pointers that are looked up together, in one pass over a text however many they are and however deep they go. Only
/// below a value that is itself asked for, the text is read once more.
#[derive(Default)]
pub(super) struct Pointers {
    count: usize,
    root: Node,
}

/// What is asked of a value.
#[derive(Default)]
struct Node {
    /// The pointers that end here.
    here: Vec<usize>,
    /// What is asked of its members or elements, by name or index.
    below: Vec<(Box<str>, Node)>,
}

impl Pointers {
    pub(super) fn new(pointers: &[impl AsRef<str>]) -> Self {
        let mut root = Node::default();
        for (number, pointer) in pointers.iter().enumerate() {
            let mut tokens = pointer.as_ref().split('/');
            // What is no pointer finds nothing.
            if tokens.next() == Some("") {
                let end =
                    tokens.fold(&mut root, |node, token| node.child(&token.replace("~1", "/").replace("~0", "~")));
                end.here.push(number);
            }
        }
        Self { count: pointers.len(), root }
    }

    /// How many they are.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// What stands at each of them; of equal keys the last one counts.
    pub(super) fn find<'a>(&self, json: &'a [u8], found: &mut Vec<Found<'a>>) {
        let start = found.len();
        found.resize_with(start + self.count, || Found::Missing);
        let found = &mut found[start..];
        if let Ok(text) = std::str::from_utf8(json)
            && look(&self.root, text.trim_ascii(), found).is_err()
        {
            found.fill_with(|| Found::Missing);
        }
    }
}

impl Node {
    fn child(&mut self, token: &str) -> &mut Self {
        let known = self.below.iter().position(|(name, _)| **name == *token);
        let at = known.unwrap_or_else(|| {
            self.below.push((token.into(), Self::default()));
            self.below.len() - 1
        });
        &mut self.below[at].1
    }

    fn named(&self, key: &str) -> Option<&Self> {
        self.below.iter().find(|(name, _)| **name == *key).map(|(_, node)| node)
    }

    fn at(&self, place: usize) -> Option<&Self> {
        self.below.iter().find(|(name, _)| index(name) == Some(place)).map(|(_, node)| node)
    }

    /// Takes back what an earlier member of the same name has answered.
    fn forget(&self, found: &mut [Found<'_>]) {
        self.here.iter().for_each(|number| found[*number] = Found::Missing);
        self.below.iter().for_each(|(_, node)| node.forget(found));
    }
}

/// Says what is wrong with what is to be an RFC 6901 pointer (section 3).
pub(super) fn check(pointer: &str) -> Result<(), &'static str> {
    if !pointer.is_empty() && !pointer.starts_with('/') {
        return Err("it does not start with a slash");
    }
    match pointer.split('~').skip(1).all(|rest| rest.starts_with(['0', '1'])) {
        true => Ok(()),
        false => Err("in it, `~` is written `~0`, and a slash in a name `~1`"),
    }
}

/// The value at one pointer.
pub(super) fn find<'a>(json: &'a [u8], pointer: &str) -> Found<'a> {
    let mut found = Vec::with_capacity(1);
    Pointers::new(&[pointer]).find(json, &mut found);
    found.pop().unwrap_or(Found::Missing)
}

fn look<'a>(node: &Node, json: &'a str, found: &mut [Found<'a>]) -> serde_json::Result<()> {
    Look { node, found }.deserialize(&mut serde_json::Deserializer::from_str(json))
}

/// Answers what is asked of the value that comes.
struct Look<'n, 'f, 'a> {
    node: &'n Node,
    found: &'f mut [Found<'a>],
}

impl<'de> DeserializeSeed<'de> for Look<'_, '_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let Self { node, found } = self;
        if node.here.is_empty() {
            return deserializer.deserialize_any(Look { node, found });
        }
        let text = <&RawValue>::deserialize(deserializer)?.get();
        node.here.iter().for_each(|number| found[*number] = classify(text));
        if node.below.is_empty() {
            return Ok(());
        }
        let below = Look { node, found };
        serde_json::Deserializer::from_str(text).deserialize_any(below).map_err(D::Error::custom)
    }
}

impl<'de> Visitor<'de> for Look<'_, '_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Text(key)) = map.next_key()? {
            match self.node.named(&key) {
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
                Some(node) => {
                    node.forget(self.found);
                    map.next_value_seed(Look { node, found: &mut *self.found })?;
                }
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        for place in 0.. {
            let more = match self.node.at(place) {
                None => items.next_element::<IgnoredAny>()?.is_some(),
                Some(node) => items.next_element_seed(Look { node, found: &mut *self.found })?.is_some(),
            };
            if !more {
                break;
            }
        }
        Ok(())
    }

    // Nothing is below the others.

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
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
    fn what_is_no_pointer_is_told_from_one() {
        for pointer in ["", "/", "/a/b~0c~1d", "//", "/~01"] {
            assert_eq!(check(pointer), Ok(()), "{pointer}");
        }
        for (text, reason) in [("a/b", "slash"), ("$.a", "slash"), ("/a~", "`~0`"), ("/a~2b", "`~0`"), ("/~1~", "`~0`")]
        {
            assert!(check(text).unwrap_err().contains(reason), "{text}");
        }
    }

    #[test]
    fn the_whole_text_and_broken_text() {
        assert_eq!(find(b" {\"a\":1} ", ""), Found::Json("{\"a\":1}"));
        for broken in [&b"{\"a\":"[..], b"", b"{\"a\" 1}", b"\xff{}"] {
            assert_eq!(find(broken, "/a"), Found::Missing);
        }
        assert_eq!(find(b"{\"a\":1,\"a\":2}", "/a"), Found::Number(2.0));
        assert_eq!(find(b"{\"a\":{\"b\":1},\"a\":{\"c\":2}}", "/a/b"), Found::Missing);
    }

    #[test]
    fn many_are_found_together() {
        let json = br#"{"a":{"b":[1,{"c":"x"}]},"d":null}"#;
        let pointers = ["/a", "/a/b/1/c", "/missing", "no pointer", "/a/b", "/d", "/a/b/0", "/a/b", "/d/e", ""];
        let mut found = vec![Found::Null];
        Pointers::new(&pointers).find(json, &mut found);
        assert_eq!(found.remove(0), Found::Null, "what was there stays");
        let alone: Vec<Found<'_>> = pointers.iter().map(|pointer| find(json, pointer)).collect();
        assert_eq!(found, alone);
        assert_eq!(found[1], Found::Text("x".into()));
        found.clear();
        Pointers::new(&pointers).find(&json[..json.len() - 1], &mut found);
        assert!(found.iter().all(|found| *found == Found::Missing), "a text that breaks off has nothing");
    }

    /// The work grows with the text alone, not with what is asked of it.
    #[test]
    fn deep_and_many_pointers_take_one_pass() {
        let depth = 50;
        let filler = "x".repeat(100_000);
        let json = format!("{}{{\"f\":\"{filler}\",\"v\":7}}{}", "{\"k\":".repeat(depth), "}".repeat(depth));
        let deep = format!("{}/v", "/k".repeat(depth));
        let pointers: Vec<String> =
            (0..32).map(|number| format!("{}/{number}", "/k".repeat(depth))).chain([deep]).collect();
        let pointers = Pointers::new(&pointers);
        let time = |pointers: &Pointers| {
            let started = std::time::Instant::now();
            let mut found = Vec::new();
            pointers.find(json.as_bytes(), &mut found);
            (found.pop(), started.elapsed())
        };
        let one = Pointers::new(&["/f"]);
        let least = (0..5).map(|_| time(&one).1).min().unwrap();
        let many = (0..5).map(|_| time(&pointers).1).min().unwrap();
        assert_eq!(time(&pointers).0, Some(Found::Number(7.0)));
        assert!(many < least * 20, "{many:?} for many, {least:?} for one");
    }
}
