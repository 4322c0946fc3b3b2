#![allow(clippy::unwrap_used, reason = "tests")]

use serde::Deserialize;
use serde_json::value::RawValue;

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
    api: String,
    body: String,
    expected: Option<String>,
    error: Option<String>,
}

fn project(projection: &Projection, api: &str, body: &str) -> Result<String, BodyError> {
    let mut body = body.as_bytes().to_vec();
    projection.project(api, &mut body)?;
    Ok(String::from_utf8(body).unwrap())
}

#[test]
fn vectors() {
    let vectors: Vec<Vector> = serde_json::from_str(include_str!("../../vectors/fragments-to-copy.json")).unwrap();
    for Vector { name, settings, error, messages } in vectors {
        let projection = Projection::parse(&settings);
        assert_eq!(projection.as_ref().err().map(ToString::to_string), error, "{name}");
        assert!(error.is_some() || !messages.is_empty(), "{name}: tests nothing");
        for Message { api, body, expected, error } in messages {
            let expected = expected.ok_or_else(|| error.unwrap());
            let projected = project(projection.as_ref().unwrap(), &api, &body);
            assert_eq!(projected.map_err(|error| error.to_string()), expected, "{name}: {body}");
        }
    }
}

#[test]
fn entries_are_limited() {
    let most = vec![r#""a""#; MAX_FRAGMENTS].join(",");
    assert_eq!(Projection::parse(&format!("[{most}]")), Projection::parse(r#"["a"]"#));
    assert_eq!(Projection::parse(&format!(r#"[{most},"a"]"#)), Err(SettingsError::TooMany));
}

#[test]
fn length_of_an_entry_is_limited_in_characters() {
    let longest = "ä".repeat(MAX_FRAGMENT_CHARACTERS);
    assert!(Projection::parse(&format!(r#"["{longest}"]"#)).is_ok());
    let error = Projection::parse(&format!(r#"["a","{longest}a"]"#)).unwrap_err();
    assert_eq!(error, SettingsError::TooLong { entry: 2 });
}

#[test]
fn depth_costs_no_stack() {
    let nested = "[".repeat(1 << 20) + &"]".repeat(1 << 20);
    let projection = Projection::parse("[]").unwrap();
    let body = format!(r#"{{"deep":{nested},"id":"1"}}"#);
    assert_eq!(project(&projection, "events", &body).unwrap(), r#"{"id":"1"}"#);
}

#[test]
fn every_prefix_of_a_body_is_an_error() {
    let body = r#"{"id":"1","a":{"b":["\"",1.5e3]},"time":null}"#;
    let projection = Projection::parse(r#"["a"]"#).unwrap();
    assert!(project(&projection, "events", body).is_ok());
    for length in 0..body.len() {
        assert!(project(&projection, "events", &body[..length]).is_err(), "{}", &body[..length]);
    }
}

/// Keeps what a parser of JSON keeps, whatever the members look like.
#[test]
fn agrees_with_a_parser() {
    let projection = Projection::parse(r#"["a","\u00e4\"b","c{}"]"#).unwrap();
    let mut random = Random(1);
    for _ in 0..2000 {
        let body = random.object(3);
        let expected: Vec<_> = members(&body)
            .into_iter()
            .filter(|(key, _)| ["a", "ä\"b", "c{}", "id", "time"].contains(&key.as_str()))
            .collect();
        let projected = project(&projection, "measurements", &body).unwrap();
        assert_eq!(members(&projected), expected, "{body}");
    }
}

/// The members of an object, in order: the decoded key and the text of the value.
fn members(object: &str) -> Vec<(String, String)> {
    struct Members;

    impl<'de> serde::de::Visitor<'de> for Members {
        type Value = Vec<(String, String)>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
                members.push((key, value.get().to_owned()));
            }
            Ok(members)
        }
    }

    let mut deserializer = serde_json::Deserializer::from_str(object);
    let members = serde::Deserializer::deserialize_map(&mut deserializer, Members).unwrap();
    deserializer.end().unwrap();
    members
}

/// Writes random JSON; xorshift, so that a failure repeats.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % limit
    }

    fn pick<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.below(choices.len())]
    }

    fn blank(&mut self) -> &'static str {
        self.pick(&["", "", "", " ", "\n\t", "\r\n  "])
    }

    fn string(&mut self) -> &'static str {
        self.pick(&[
            r#""a""#,
            r#""\u0061""#,
            r#""id""#,
            r#""ti\u006de""#,
            r#""\u00e4\"b""#,
            r#""c{}""#,
            r#""c\u007b\u007d""#,
            r#""""#,
            r#""\\""#,
            r#""\\\"}],""#,
            r#""{\"a\":[""#,
            r#""\ud83d\ude00""#,
            r#""other""#,
        ])
    }

    fn object(&mut self, depth: usize) -> String {
        let members: Vec<String> = (0..self.below(6))
            .map(|_| [self.blank(), self.string(), self.blank(), ":", &self.value(depth), self.blank()].concat())
            .collect();
        [self.blank(), "{", &members.join(","), self.blank(), "}", self.blank()].concat()
    }

    fn array(&mut self, depth: usize) -> String {
        let items: Vec<String> = (0..self.below(4)).map(|_| self.value(depth)).collect();
        ["[", &items.join(","), self.blank(), "]"].concat()
    }

    fn value(&mut self, depth: usize) -> String {
        let value = match self.below(if depth == 0 { 3 } else { 5 }) {
            0 => self.pick(&["0", "-1.50E+03", "12345678901234567890.123", "1e-7"]).to_owned(),
            1 => self.pick(&["true", "false", "null"]).to_owned(),
            2 => self.string().to_owned(),
            3 => self.object(depth - 1),
            _ => self.array(depth - 1),
        };
        [self.blank(), &value].concat()
    }
}
