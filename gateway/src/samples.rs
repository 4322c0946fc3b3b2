//! Samples: messages that plugins are tried on, as people write them, and what became of them, as people read it.
//!
//! ```text
//! JSON ─▶ Message ─▶ plugin::Trials ─▶ Outcome ─▶ JSON
//! ```

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::json::{self, Invalid, Limits, Members};
use crate::message::{Action, Api, Message, Tenant};
use crate::platform::object::member;
use crate::platform::parse_id;
use crate::plugin::{Fault, LogLine, PluginError, Trial, Verdict, World};

/// Reads `{"api","action","source","type","time","body"}`. Only `body` is needed, a JSON object: the API is measurements, the
/// action CREATE, and everything else is read from the body, where the API puts it, unless the sample says otherwise.
///
/// # Errors
/// Names the first member that is wrong.
pub fn message(tenant: &Tenant, sample: &Members<'_>, limits: &Limits) -> Result<Message, Invalid> {
    const MEMBERS: [&str; 6] = ["api", "action", "source", "type", "time", "body"];
    if let Some(unknown) = sample.iter().find(|member| !MEMBERS.contains(&&*member.name)) {
        return Err(Invalid::new(&unknown.name, "is not a known member of a message"));
    }
    let api = word(sample, "api", &Api::ALL, Api::as_str)?.unwrap_or(Api::Measurements);
    let action = word(sample, "action", &Action::ALL, Action::as_str)?.unwrap_or(Action::Create);
    let body = sample.get("body").ok_or_else(|| Invalid::new("body", "is missing"))?;
    let members = Members::of(body, limits).map_err(|error| error.within("body"))?;
    let mut message = of_members(tenant, api, action, body, &members);
    if let Some(raw) = sample.get("source") {
        let id = id(raw).filter(|id| parse_id(id).is_some());
        message.source = (&*id.ok_or_else(|| Invalid::new("source", "must be an id"))?).into();
    }
    if let Some(raw) = sample.get("type") {
        message.kind = Some(json::string(raw, "type")?.into());
    }
    if let Some(raw) = sample.get("time") {
        message.time = json::string(raw, "time")?.into();
    }
    Ok(message)
}

/// Reads a sample, or the bare body of a measurement: what has no object as its `body`.
///
/// # Errors
/// Syntax errors, and those of [`message`].
pub fn message_or_body(tenant: &Tenant, text: &[u8], limits: &Limits) -> Result<Message, Invalid> {
    let members = Members::parse(text, limits)?;
    if !is_bare(&members) {
        return message(tenant, &members, limits);
    }
    let text = std::str::from_utf8(text).expect("invariant: it was parsed");
    Ok(of_members(tenant, Api::Measurements, Action::Create, text, &members))
}

/// A sample for a request, of a sample or of the bare body of a measurement.
///
/// # Errors
/// Syntax errors.
pub fn sample(text: &str, limits: &Limits) -> Result<Box<RawValue>, Invalid> {
    let bare = is_bare(&Members::parse(text.as_bytes(), limits)?);
    let sample = if bare { format!("{{\"body\":{text}}}") } else { text.to_owned() };
    RawValue::from_string(sample).map_err(|error| Invalid::new("", error.to_string()))
}

/// Whether it is no sample: it has no object as its `body`.
fn is_bare(members: &Members<'_>) -> bool {
    !members.get("body").is_some_and(|raw| raw.starts_with('{'))
}

/// The message that tells of an object with this body, as `api` renders it.
///
/// # Errors
/// When it is no JSON object.
pub fn of_body(tenant: &Tenant, api: Api, action: Action, body: &[u8]) -> Result<Message, Invalid> {
    let unlimited = Limits { depth: usize::MAX, members: usize::MAX, elements: usize::MAX };
    let members = Members::parse(body, &unlimited)?;
    let text = std::str::from_utf8(body).expect("invariant: it was parsed");
    Ok(of_members(tenant, api, action, text, &members))
}

fn of_members(tenant: &Tenant, api: Api, action: Action, body: &str, members: &Members<'_>) -> Message {
    let text = |name: &str| members.get(name).and_then(|raw| json::string(raw, name).ok());
    let (source, time) = match api {
        Api::Measurements | Api::Events | Api::Alarms => {
            (members.get("source").and_then(|source| member(source, "id")), "time")
        }
        Api::ManagedObjects => (members.get("id"), "lastUpdated"),
        Api::Operations => (members.get("deviceId"), "creationTime"),
    };
    let mut line = Vec::with_capacity(body.len());
    json::one_line(body, &mut line);
    Message {
        tenant: tenant.clone(),
        api,
        action,
        source: (&*source.and_then(id).unwrap_or_default()).into(),
        kind: text("type").map(Into::into),
        time: text(time).unwrap_or_default().into(),
        body: line.into(),
    }
}

/// An id, which clients write as a text or as a number.
fn id(raw: &str) -> Option<Cow<'_, str>> {
    let is_number = raw.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { Some(Cow::Borrowed(raw)) } else { json::string(raw, "").ok() }
}

fn word<T: Copy>(
    sample: &Members<'_>,
    name: &str,
    all: &[T],
    text: impl Fn(T) -> &'static str,
) -> Result<Option<T>, Invalid> {
    let Some(raw) = sample.get(name) else { return Ok(None) };
    let word = json::string(raw, name)?;
    let found = all.iter().copied().find(|one| text(*one) == word);
    let refusal = || {
        let known: Vec<_> = all.iter().map(|one| text(*one)).collect();
        Invalid::new(name, format!("must be one of {}", known.join(", ")))
    };
    found.map(Some).ok_or_else(refusal)
}

/// What is told of a message beside its body.
#[derive(Serialize)]
pub struct Meta<'a> {
    /// Of the object that it tells of, if its body says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Cow<'a, str>>,
    api: &'static str,
    action: &'static str,
    source: &'a str,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'a str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    time: &'a str,
}

impl<'a> Meta<'a> {
    /// Of this message.
    #[must_use]
    pub fn of(message: &'a Message) -> Self {
        let Message { api, action, source, kind, time, body, .. } = message;
        let id = std::str::from_utf8(body).ok().and_then(|body| member(body, "id")).and_then(id);
        Self { id, api: api.as_str(), action: action.as_str(), source: source.as_str(), kind: kind.as_deref(), time }
    }
}

/// A body: JSON as it is, any other text as a text, everything else as Base64.
#[derive(Serialize, Default)]
pub struct Content {
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
}

impl Content {
    /// Of this body.
    #[must_use]
    pub fn of(body: &Bytes) -> Self {
        match (serde_json::from_slice(body), std::str::from_utf8(body)) {
            (Ok(json), _) => Self { body: Some(json), ..Self::default() },
            (_, Ok(text)) => Self { text: Some(text.to_owned()), ..Self::default() },
            _ => Self { base64: Some(STANDARD.encode(body)), ..Self::default() },
        }
    }
}

/// What became of a message.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    /// `pass` or `drop`, `shaped`, or `fault`.
    pub verdict: &'static str,
    #[serde(flatten)]
    content: Content,
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<Told>,
    /// What the plugin wrote into the log.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    log: Vec<LogLine>,
    /// Processor time.
    pub processor_microseconds: u64,
    /// Linear memory of the instance after it; 0 if the fault has cost it.
    pub memory_bytes: usize,
}

/// A fault, as it is told.
#[derive(Serialize)]
struct Told {
    kind: &'static str,
    reason: String,
}

impl Outcome {
    /// Of this trial.
    #[must_use]
    pub fn of(trial: &Trial) -> Self {
        let Trial { outcome, processor_time, memory_bytes, log } = trial;
        let told = |fault: &Fault| Told { kind: fault.kind(), reason: fault.to_string() };
        let (verdict, content, fault) = match outcome {
            Ok(Verdict::Pass) => (PASS, None, None),
            Ok(Verdict::Drop) => (DROP, None, None),
            Ok(Verdict::Body(body)) => (SHAPED, Some(Content::of(body)), None),
            Err(fault) => (FAULT, None, Some(told(fault))),
        };
        let processor_microseconds = u64::try_from(processor_time.as_micros()).unwrap_or(u64::MAX);
        let content = content.unwrap_or_default();
        Self { verdict, content, fault, log: log.clone(), processor_microseconds, memory_bytes: *memory_bytes }
    }

    /// Whether the plugin failed.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        self.verdict == FAULT
    }
}

const PASS: &str = "pass";
const DROP: &str = "drop";
const SHAPED: &str = "shaped";
const FAULT: &str = "fault";

/// What goes wrong only when the plugin gets many messages at once.
#[derive(Serialize, Deserialize)]
pub struct Batched {
    /// How it answered otherwise.
    pub fault: String,
}

/// How many messages met each verdict.
#[derive(Serialize, Deserialize)]
pub struct Tally(BTreeMap<Cow<'static, str>, usize>);

impl Tally {
    /// Nothing yet, of all that a plugin of this world may answer.
    #[must_use]
    pub fn new(world: World) -> Self {
        let verdicts: &[_] = match world {
            World::Filter => &[PASS, DROP, FAULT],
            World::Transform => &[SHAPED, FAULT],
        };
        Self(verdicts.iter().map(|verdict| (Cow::from(*verdict), 0)).collect())
    }

    /// Counts a message.
    pub fn count(&mut self, outcome: &Outcome) {
        *self.0.entry(outcome.verdict.into()).or_default() += 1;
    }

    /// How many messages the plugin failed on.
    #[must_use]
    pub fn faults(&self) -> usize {
        self.0.get(FAULT).copied().unwrap_or_default()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdicts: Vec<_> = self.0.iter().map(|(verdict, count)| format!("{count} {verdict}")).collect();
        f.write_str(&verdicts.join(", "))
    }
}

/// What somebody who tries a plugin has to change; the error itself, where that is nothing.
///
/// # Errors
/// The same.
pub fn refusal(error: PluginError) -> Result<Invalid, PluginError> {
    match error {
        PluginError::Settings(text) => Ok(Invalid::new("settings", text)),
        PluginError::Component { reason, .. } => Ok(Invalid::new("", format!("The plugin cannot be used: {reason}"))),
        PluginError::Fault { fault, .. } if fault != Fault::Stopped => {
            Ok(Invalid::new("settings", format!("configure failed on them: {fault}")))
        }
        error => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    fn read(text: &str) -> Result<Message, Invalid> {
        message_or_body(&"t".into(), text.as_bytes(), &Limits::default())
    }

    fn parts(message: &Message) -> (&str, &str, &str, Option<&str>, &str) {
        let Message { api, action, source, kind, time, .. } = message;
        (api.as_str(), action.as_str(), source.as_str(), kind.as_deref(), time)
    }

    #[test]
    fn what_a_sample_leaves_out_is_read_from_its_body() {
        for (text, expected) in [
            (
                r#"{"source":{"id":"7"},"type":"t","time":"2026-11-30T00:00:00Z"}"#,
                ("measurements", "CREATE", "7", Some("t"), "2026-11-30T00:00:00Z"),
            ),
            ("{}", ("measurements", "CREATE", "", None, "")),
            (r#"{"body":{"source":{"id":7}}}"#, ("measurements", "CREATE", "7", None, "")),
            (r#"{"body":"no object","type":"t"}"#, ("measurements", "CREATE", "", Some("t"), "")),
            (
                r#"{"api":"managedobjects","body":{"id":"9","type":"d","lastUpdated":"u"}}"#,
                ("managedobjects", "CREATE", "9", Some("d"), "u"),
            ),
            (
                r#"{"api":"operations","action":"UPDATE","body":{"deviceId":"8","creationTime":"c","type":1}}"#,
                ("operations", "UPDATE", "8", None, "c"),
            ),
            (
                r#"{"api":"alarms","source":5,"type":"x","time":"y","body":{"source":{"id":"7"},"type":"t"}}"#,
                ("alarms", "CREATE", "5", Some("x"), "y"),
            ),
            (r#"{"source":null,"body":{"source":{"id":"7"}}}"#, ("measurements", "CREATE", "7", None, "")),
        ] {
            assert_eq!(parts(&read(text).unwrap()), expected, "{text}");
        }
        let pretty = read("{ \"a\" : 1.50,\n \"b\": {} }").unwrap();
        assert_eq!(pretty.body, r#"{"a":1.50,"b":{}}"#);
        assert_eq!(read(r#"{"api":"events","body":{ "a" : 1.50 }}"#).unwrap().body, r#"{"a":1.50}"#);
    }

    #[test]
    fn what_is_wrong_with_a_sample_is_named() {
        for (text, expected) in [
            ("[]", "must be a JSON object"),
            (
                r#"{"body":{},"api":"audits"}"#,
                "api: must be one of measurements, managedobjects, events, alarms, operations",
            ),
            (r#"{"body":{},"action":"create"}"#, "action: must be one of CREATE, UPDATE, DELETE"),
            (r#"{"body":{},"source":{}}"#, "source: must be an id"),
            (r#"{"body":{},"type":1}"#, "type: must be a string"),
            (r#"{"body":{},"kind":"t"}"#, "kind: is not a known member of a message"),
            (r#"{"body":{"a":1,"a":2}}"#, "body.a: occurs twice"),
        ] {
            assert_eq!(read(text).unwrap_err().to_string(), expected, "{text}");
        }
        let sample = Members::parse(br#"{"api":"events"}"#, &Limits::default()).unwrap();
        let refused = message(&"t".into(), &sample, &Limits::default()).unwrap_err();
        assert_eq!(refused.to_string(), "body: is missing");
    }

    fn told(outcome: Result<Verdict, Fault>) -> Value {
        let trial =
            Trial { outcome, processor_time: Duration::from_nanos(12_999), memory_bytes: 65_536, log: Vec::new() };
        serde_json::to_value(Outcome::of(&trial)).unwrap()
    }

    #[test]
    fn an_outcome_says_what_kind_of_body_it_has() {
        let plain = json!({"verdict": "pass", "processorMicroseconds": 12, "memoryBytes": 65_536});
        assert_eq!(told(Ok(Verdict::Pass)), plain);
        let shaped = |body: &'static [u8]| told(Ok(Verdict::Body(Bytes::from_static(body))));
        for (body, member, expected) in [
            (&br#"{"a":1}"#[..], "body", json!({"a": 1})),
            (b"\"a\"", "body", json!("a")),
            (b"a,b\n", "text", json!("a,b\n")),
            (b"", "text", json!("")),
            (b"\xff", "base64", json!("/w==")),
        ] {
            let outcome = shaped(body);
            assert_eq!((&outcome["verdict"], &outcome[member]), (&json!("shaped"), &expected));
            assert_eq!(outcome.as_object().unwrap().len(), 4, "{outcome}");
        }
        let body = Content::of(&Bytes::from_static(br#"{"a":1.50}"#));
        assert_eq!(serde_json::to_string(&body).unwrap(), r#"{"body":{"a":1.50}}"#, "as the plugin wrote it");
        let fault = told(Err(Fault::Refused("no".into())));
        assert_eq!(fault["fault"], json!({"kind": "refused", "reason": "the plugin refused: no"}));
    }

    #[test]
    fn verdicts_are_counted() {
        let trial = |outcome| Trial { outcome, processor_time: Duration::ZERO, memory_bytes: 0, log: Vec::new() };
        let mut tally = Tally::new(World::Filter);
        for outcome in [Ok(Verdict::Pass), Err(Fault::Deadline), Ok(Verdict::Pass)] {
            tally.count(&Outcome::of(&trial(outcome)));
        }
        assert_eq!((tally.to_string(), tally.faults()), ("0 drop, 1 fault, 2 pass".to_owned(), 1));
        assert_eq!(Tally::new(World::Transform).to_string(), "0 fault, 0 shaped");
    }

    #[test]
    fn a_message_is_told_with_the_id_of_its_object() {
        let message = of_body(&"t".into(), Api::Events, Action::Create, br#"{"id":"12","source":{"id":"7"}}"#).unwrap();
        let meta = serde_json::to_value(Meta::of(&message)).unwrap();
        assert_eq!(meta, json!({"id": "12", "api": "events", "action": "CREATE", "source": "7"}));
    }
}
