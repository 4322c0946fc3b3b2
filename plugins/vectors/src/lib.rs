//! Holds the example plugins against the files beside this crate, natively. The gateway does the same with the components.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct Case<M> {
    name: String,
    settings: Box<RawValue>,
    error: Option<String>,
    #[serde(default = "Vec::new")]
    messages: Vec<M>,
}

/// A message that a filter is asked about.
#[derive(Debug, Deserialize)]
pub struct Message {
    /// The id of its source.
    #[serde(default)]
    pub source: String,
    /// Its time, if it has one.
    pub time: Option<String>,
    #[serde(default)]
    body: Value,
    passes: bool,
}

impl Message {
    /// The number that the pointer finds, as the gateway passes it.
    #[must_use]
    pub fn number(&self, pointer: &str) -> Option<f64> {
        self.body.pointer(pointer)?.as_f64()
    }
}

#[derive(Deserialize)]
struct Bodies {
    body: String,
    expected: Option<String>,
    error: Option<String>,
}

/// Runs the cases of a filter. Each has a new one, and its messages are judged in order.
///
/// # Panics
/// If one is not met.
pub fn filter<F>(name: &str, parse: impl Fn(&str) -> Result<F, String>, passes: impl Fn(&mut F, &Message) -> bool) {
    each(name, parse, |case, filter, message: &Message| {
        assert_eq!(passes(filter, message), message.passes, "{case}: {message:?}");
    });
}

/// Runs the cases of a transform.
///
/// # Panics
/// If one is not met.
pub fn transform<T>(
    name: &str,
    parse: impl Fn(&str) -> Result<T, String>,
    apply: impl Fn(&mut T, &str) -> Result<String, String>,
) {
    each(name, parse, |case, transform, Bodies { body, expected, error }| {
        let expected = expected.clone().ok_or_else(|| error.clone().unwrap());
        assert_eq!(apply(transform, body), expected, "{case}: {body}");
    });
}

fn each<M: DeserializeOwned, P>(
    name: &str,
    parse: impl Fn(&str) -> Result<P, String>,
    check: impl Fn(&str, &mut P, &M),
) {
    let file = format!("{}/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let cases: Vec<Case<M>> = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    for Case { name, settings, error, messages } in cases {
        assert!(error.is_some() || !messages.is_empty(), "{name}: tests nothing");
        match parse(settings.get()) {
            Ok(mut plugin) => {
                assert_eq!(None, error, "{name}");
                messages.iter().for_each(|message| check(&name, &mut plugin, message));
            }
            Err(text) => assert_eq!(Some(text), error, "{name}"),
        }
    }
}
