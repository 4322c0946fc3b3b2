#![allow(clippy::unwrap_used, reason = "tests")]

use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Vector {
    name: String,
    settings: String,
    error: Option<String>,
    #[serde(default)]
    messages: Vec<Message>,
}

#[derive(Deserialize)]
struct Message {
    #[serde(rename = "type")]
    message_type: String,
    passes: bool,
}

#[test]
fn vectors() {
    let vectors: Vec<Vector> = serde_json::from_str(include_str!("../../vectors/type-filter.json")).unwrap();
    for Vector { name, settings, error, messages } in vectors {
        let filter = TypeFilter::parse(&settings);
        assert_eq!(filter.as_ref().err().map(ToString::to_string), error, "{name}");
        assert!(error.is_some() || !messages.is_empty(), "{name}: tests nothing");
        for message in messages {
            let passes = filter.as_ref().unwrap().matches(&message.message_type);
            assert_eq!(passes, message.passes, "{name}: {}", message.message_type);
        }
    }
}

#[test]
fn length_is_limited_in_characters() {
    let longest = "ä".repeat(MAX_CHARACTERS);
    assert!(TypeFilter::parse(&longest).unwrap().matches(&longest));
    let error = TypeFilter::parse(&format!("{longest}a")).unwrap_err();
    assert_eq!(error.to_string(), "typeFilter: 4097 characters are too many, at most 4096 are allowed");
}

#[test]
fn terms_are_limited() {
    let most = vec!["'a'"; MAX_TERMS].join(" or ");
    assert_eq!(TypeFilter::parse(&most).unwrap(), TypeFilter::parse("'a'").unwrap());
    let error = TypeFilter::parse(&format!("{most} or 'b'")).unwrap_err();
    assert_eq!(error.to_string(), "typeFilter: more than 200 types, the first too many is at character 1401");
}

#[test]
fn every_listed_type_passes() {
    let types: Vec<String> = (0..MAX_TERMS).map(|i| format!("t{i}'s")).collect();
    let quoted: Vec<String> = types.iter().map(|name| format!("'{}'", name.replace('\'', "''"))).collect();
    let filter = TypeFilter::parse(&quoted[1..].join(" or ")).unwrap();
    assert!(types[1..].iter().all(|name| filter.matches(name)));
    assert!(!filter.matches(&types[0]));
}
