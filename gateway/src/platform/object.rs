//! What measurements, events and alarms have in common: a source, a type, a time, and all that a client set, kept as text.

use std::borrow::Cow;

use bytes::Bytes;

use super::merge::braced;
use super::{id_value, missing, push_decimal, push_self, short_string};
use crate::json::{self, Invalid, Limits, Member, Members};
use crate::time;

/// Members that the gateway sets; a client's are ignored.
const SET_HERE: [&str; 4] = ["id", "self", "creationTime", "lastUpdated"];

/// How an API calls its objects.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// One, as in its media type and its errors.
    pub one: &'static str,
    /// The collection, as in its media type.
    pub collection: &'static str,
    /// The array in a collection.
    pub many: &'static str,
}

/// An object as a client sent it.
#[derive(Clone, Debug)]
pub struct NewObject {
    /// The device; whether it exists is for the caller to check.
    pub source: u64,
    /// `type`.
    pub kind: Box<str>,
    /// `time` as the client wrote it, for messages.
    pub time: Box<str>,
    /// The same in milliseconds since 1970, for queries.
    pub time_ms: i64,
    /// All members but `source` and those that the gateway sets, on one line, in the client's order, without the braces.
    pub rest: Bytes,
}

/// What a POST may hold.
#[derive(Clone, Debug)]
pub enum Posted<T> {
    /// `…measurement+json`
    One(T),
    /// `…measurementcollection+json`
    Many(Vec<T>),
}

impl<T> Posted<T> {
    /// All of them.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }
}

/// Parses the body of a POST, single or bulk as [`is_bulk`] decides; `one` parses a single object. A bulk request has at most
/// `limits.elements`, none at all is fine.
///
/// # Errors
/// Names the first member that is wrong, as `measurements[3].time` in a bulk request, or all mandatory ones that are missing.
pub fn parse_posted<T>(
    content_type: Option<&str>,
    body: &[u8],
    limits: &Limits,
    names: &Names,
    one: impl Fn(&Members<'_>) -> Result<T, Invalid>,
) -> Result<Posted<T>, Invalid> {
    let members = Members::parse(body, limits)?;
    if !is_bulk(content_type, &members, names) {
        return one(&members).map(Posted::One);
    }
    let Some(array) = members.get(names.many) else {
        return Err(missing(&[(names.many, false)]));
    };
    let mut all = Vec::new();
    json::each_element(array, |raw| {
        let at = all.len();
        if at == limits.elements {
            return Err(Invalid::new(names.many, format!("has more than {at} elements")));
        }
        let element = Members::of(raw, limits).and_then(|members| one(&members));
        all.push(element.map_err(|error| error.within(&format!("{}[{at}]", names.many)))?);
        Ok(())
    })
    .map_err(|error| if error.field.is_empty() { error.within(names.many) } else { error })?;
    Ok(Posted::Many(all))
}

/// Whether a body is a collection: its media type says so or, since clients send plain `application/json` too, its shape does.
fn is_bulk(content_type: Option<&str>, members: &Members<'_>, names: &Names) -> bool {
    content_type.is_some_and(|media_type| media_type.to_ascii_lowercase().contains(names.collection))
        || (members.get(names.many).is_some() && members.get("source").is_none())
}

/// Reads an object with the mandatory members `required`; `check` looks at every member but source, type, time and those that
/// the gateway sets. JSON null is absent.
pub(super) fn parse<'a>(
    members: &Members<'a>,
    required: &[&'static str],
    mut check: impl FnMut(&str, &'a str) -> Result<(), Invalid>,
) -> Result<NewObject, Invalid> {
    let (mut source, mut kind, mut time) = (None, None, None);
    let mut rest = Vec::with_capacity(members.iter().map(|member| member.name.len() + member.raw.len() + 4).sum());
    for Member { name, raw } in members.iter().filter(|member| !json::is_null(member.raw)) {
        match &**name {
            name if SET_HERE.contains(&name) => continue,
            "source" => {
                source = Some(source_id(raw).map_err(|error| error.within("source"))?);
                continue;
            }
            "type" => kind = Some(non_empty(raw, "type")?),
            "time" => time = Some(parse_time(raw)?),
            name => check(name, raw)?,
        }
        json::push_member(name, raw, &mut rest);
    }
    let present: Vec<_> = required.iter().map(|name| (*name, members.get(name).is_some())).collect();
    match (source, kind, time) {
        (Some(source), Some(kind), Some((time, time_ms))) if present.iter().all(|(_, present)| *present) => {
            Ok(NewObject { source, kind: kind.into(), time: time.into(), time_ms, rest: rest.into() })
        }
        _ => Err(missing(&present)),
    }
}

pub(super) fn source_id(raw: &str) -> Result<u64, Invalid> {
    let mut id = None;
    json::each_member(raw, |name, raw| {
        if name == "id" && !json::is_null(raw) {
            id = Some(id_value(raw, "id")?);
        }
        Ok(())
    })?;
    id.ok_or_else(|| Invalid::new("id", "is missing"))
}

fn non_empty<'a>(raw: &'a str, field: &str) -> Result<Cow<'a, str>, Invalid> {
    let text = short_string(raw, field)?;
    if text.is_empty() {
        return Err(Invalid::new(field, "must not be empty"));
    }
    Ok(text)
}

fn parse_time(raw: &str) -> Result<(Cow<'_, str>, i64), Invalid> {
    let text = json::string(raw, "time")?;
    let ms = time::parse(&text).map_err(|error| Invalid::new("time", error.to_string()))?;
    Ok((text, ms))
}

/// `time` of a stored object as the client wrote it; empty if it has none.
pub(super) fn stored_time(body: &[u8]) -> Box<str> {
    stored_text(body, "time").unwrap_or_default()
}

/// A member of a stored object that is a text.
pub(super) fn stored_text(body: &[u8], wanted: &str) -> Option<Box<str>> {
    let object = braced(body);
    let raw = member(std::str::from_utf8(&object).ok()?, wanted)?;
    json::string(raw, wanted).ok().map(Box::from)
}

/// The raw value of a member of an object that was parsed when it came.
pub(crate) fn member<'a>(object: &'a str, wanted: &str) -> Option<&'a str> {
    let mut found = None;
    let walked = json::each_member(object, |name, raw| {
        if name == wanted {
            found = Some(raw);
        }
        Ok(())
    });
    walked.ok().and(found)
}

/// Appends `{"id":"…","self":"…"`, where every object begins.
pub(super) fn open(id: u64, base_url: &str, path: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"id\":\"");
    push_decimal(id, out);
    out.extend_from_slice(b"\",");
    push_self(base_url, path, id, "", out);
}

/// Appends `,"source":{"id":"…","name":"…","self":"…"}`, without a name where there is none to tell.
pub(super) fn push_source(source: u64, name: Option<&str>, base_url: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"source\":{\"id\":\"");
    push_decimal(source, out);
    out.extend_from_slice(b"\",");
    if let Some(name) = name {
        out.extend_from_slice(b"\"name\":");
        json::write_string(name, out);
        out.push(b',');
    }
    push_self(base_url, "/inventory/managedObjects/", source, "", out);
    out.push(b'}');
}

/// Appends `,"NAME":"2021-09-03T12:29:01.664Z"`.
pub(super) fn push_time(name: &str, ms: i64, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":\"");
    time::write(ms, out);
    out.push(b'"');
}

/// Appends the members of `rest` and the brace that ends the object.
pub(super) fn close(rest: &[u8], out: &mut Vec<u8>) {
    if !rest.is_empty() {
        out.push(b',');
        out.extend_from_slice(rest);
    }
    out.push(b'}');
}
