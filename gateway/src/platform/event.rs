//! Events: `{"source":{"id"},"type","text","time",FRAGMENT:…}`.

use bytes::Bytes;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::check_name;
use super::list::{Filter, Range, Stored, body_column, id_column, text_column, text_parameter};
use super::merge::{changeable, merge};
use super::object::{self, Names, NewObject};
use super::page::Query;
use crate::json::{self, Invalid, Limits, Members};

/// How the API calls its objects.
pub const NAMES: Names = Names { one: "event", collection: "eventcollection", many: "events" };
/// The parameters that select events.
pub const PARAMETERS: &[&str] = &[
    "source",
    "withSourceAssets",
    "withSourceDevices",
    "type",
    "dateFrom",
    "dateTo",
    "createdFrom",
    "createdTo",
    "lastUpdatedFrom",
    "lastUpdatedTo",
    "fragmentType",
    "fragmentValue",
    "revert",
];
const PATH: &str = "/event/events/";
/// Members that a PUT cannot change (Cumulocity OpenAPI: "Only its text description and custom fragments can be updated").
const FIXED: &[&str] = &["source", "type", "time", "creationTime", "lastUpdated"];

/// An event as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its id.
    pub id: u64,
    /// The device.
    pub source: u64,
    /// `type`; it also stands in the body.
    pub kind: Box<str>,
    /// `time` in milliseconds since 1970.
    pub time_ms: i64,
    /// When it was created, in milliseconds since 1970.
    pub created_ms: i64,
    /// When it was last changed.
    pub updated_ms: i64,
    /// As `rest` of [`NewObject`].
    pub body: Bytes,
}

/// Reads one event.
///
/// # Errors
/// Names the first member that is wrong, or all mandatory ones that are missing.
pub fn parse(members: &Members<'_>) -> Result<NewObject, Invalid> {
    object::parse(members, &["source", "type", "text", "time"], check_member)
}

fn check_member(name: &str, raw: &str) -> Result<(), Invalid> {
    match name {
        "text" => json::string(raw, name).map(drop),
        _ => check_name(name),
    }
}

/// Reads the filter's parameters; the first of several with one name counts, unknown ones are left alone.
///
/// # Errors
/// Names the parameter whose value cannot be used.
pub fn filter(query: &Query<'_>) -> Result<Filter, Invalid> {
    let mut filter = Filter {
        kinds: text_parameter(query, "type")?.into_iter().collect(),
        created: Range::parse(query, "createdFrom", "createdTo")?,
        updated: Range::parse(query, "lastUpdatedFrom", "lastUpdatedTo")?,
        fragment: text_parameter(query, "fragmentType")?,
        fragment_value: text_parameter(query, "fragmentValue")?,
        ..Filter::parse(query, "source")?
    };
    if filter.fragment_value.is_some() && filter.fragment.is_none() {
        return Err(Invalid::new("fragmentValue", "is only for requests with fragmentType"));
    }
    filter.parse_following(query)?;
    Ok(filter)
}

impl Event {
    /// The event that `new` becomes.
    #[must_use]
    pub fn created(id: u64, new: NewObject, now_ms: i64) -> Self {
        let NewObject { source, kind, time_ms, rest, .. } = new;
        Self { id, source, kind, time_ms, created_ms: now_ms, updated_ms: now_ms, body: rest }
    }

    /// The event after a PUT with `patch`; `None` for a patch without any member to set.
    ///
    /// # Errors
    /// Names the member that is wrong or cannot be changed; an event that would pass `limits.members` or a body of `max_bytes`
    /// is refused.
    pub fn merge(&self, patch: &[u8], now_ms: i64, limits: &Limits, max_bytes: usize) -> Result<Option<Self>, Invalid> {
        let patch = Members::parse(patch, limits)?;
        let patch = changeable(&patch, FIXED, Some(self.source))?;
        if patch.is_empty() {
            return Ok(None);
        }
        if patch.iter().any(|member| member.name == "text" && json::is_null(member.raw)) {
            return Err(Invalid::new("text", "must be a string"));
        }
        let body = merge(&self.body, patch.into_iter(), limits, max_bytes, check_member)?;
        Ok(Some(Self { kind: self.kind.clone(), updated_ms: now_ms, body, ..*self }))
    }

    /// `time` as the client wrote it.
    #[must_use]
    pub fn time(&self) -> Box<str> {
        object::stored_time(&self.body)
    }

    /// Appends the event as clients get it, one line; the body of its notifications is the same text.
    ///
    /// `name` is that of the device. `base_url` has no slash at its end.
    pub fn render(&self, name: Option<&str>, base_url: &str, out: &mut Vec<u8>) {
        object::open(self.id, base_url, PATH, out);
        object::push_source(self.source, name, base_url, out);
        object::push_time("creationTime", self.created_ms, out);
        object::push_time("lastUpdated", self.updated_ms, out);
        object::close(&self.body, out);
    }
}

impl Stored for Event {
    const TABLE: &'static str = "event";
    const COLUMNS: &'static str = "id, source, type, time, created, updated, body";
    /// Cumulocity OpenAPI, of ranges; here of every list.
    const NEWEST_FIRST: bool = true;
    const FRAGMENTS_ARE_OBJECTS: bool = false;

    fn in_order_of_time(_: &Filter) -> bool {
        true
    }

    fn from_row(row: &SqliteRow) -> sqlx::Result<Self> {
        Ok(Self {
            id: id_column(row, "id")?,
            source: id_column(row, "source")?,
            kind: text_column(row, "type")?,
            time_ms: row.try_get("time")?,
            created_ms: row.try_get("created")?,
            updated_ms: row.try_get("updated")?,
            body: body_column(row)?,
        })
    }

    fn bytes(&self) -> usize {
        self.body.len()
    }

    fn subject(&self) -> (u64, u64, Option<&str>) {
        (self.id, self.source, Some(&self.kind))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn event() -> Event {
        let body = r#"{"text":"a b","id":"9","creationTime":"x","source":{"id":7,"name":"n"},"type":"t",
            "time":"2021-09-03T14:29:01.664+02:00", "c8y_P":{"lat":1.50}, "gone":null}"#;
        let new = parse(&Members::parse(body.as_bytes(), &Limits::default()).unwrap()).unwrap();
        assert_eq!((new.source, &*new.kind, new.time_ms), (7, "t", 1_630_672_141_664));
        Event::created(12, new, 1000)
    }

    #[test]
    fn an_event_is_rendered_in_the_clients_order() {
        let mut out = Vec::new();
        event().render(Some("pump \"1\""), "http://g", &mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            r#"{"id":"12","self":"http://g/event/events/12","source":{"id":"7","name":"pump \"1\"","#.to_owned()
                + r#""self":"http://g/inventory/managedObjects/7"},"creationTime":"1970-01-01T00:00:01.000Z","#
                + r#""lastUpdated":"1970-01-01T00:00:01.000Z","text":"a b","type":"t","#
                + r#""time":"2021-09-03T14:29:01.664+02:00","c8y_P":{"lat":1.50}}"#
        );
        assert_eq!(&*event().time(), "2021-09-03T14:29:01.664+02:00");
    }

    #[test]
    fn a_put_changes_text_and_fragments() {
        let event = event();
        let put = |patch: &str| event.merge(patch.as_bytes(), 2000, &Limits::default(), 1000);
        let changed = put(r#"{"c8y_P":null,"text":"c","n":1}"#).unwrap().unwrap();
        assert_eq!(
            String::from_utf8_lossy(&changed.body),
            r#""text":"c","type":"t","time":"2021-09-03T14:29:01.664+02:00","n":1"#
        );
        assert_eq!((changed.created_ms, changed.updated_ms), (1000, 2000));
        assert_eq!(put(r#"{"id":"12"}"#).unwrap(), None);
        for (patch, refusal) in [
            (r#"{"type":"t"}"#, "type: cannot be changed"),
            (r#"{"text":null}"#, "text: must be a string"),
            (r#"{"text":1}"#, "text: must be a string"),
            ("[]", "must be a JSON object"),
        ] {
            assert_eq!(put(patch).unwrap_err().to_string(), refusal);
        }
    }
}
