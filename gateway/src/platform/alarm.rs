//! Alarms: `{"source":{"id"},"type","text","time","severity","status",FRAGMENT:…}`, and how many open ones a device has.
//!
//! An alarm that is ACTIVE or ACKNOWLEDGED is open. As long as one is, further alarms of its device and type are occurrences of
//! it: they count, and set its time.

use bytes::Bytes;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteExecutor};

use super::list::{Filter, Range, Stored, body_column, id_column, text_column, texts_parameter, words_parameter};
use super::merge::{changeable, merge};
use super::object::{self, Names, NewObject};
use super::page::{Query, flag, parameter};
use super::{check_name, push_decimal};
use crate::json::{self, Invalid, Limits, Member, Members};

/// How the API calls its objects.
pub const NAMES: Names = Names { one: "alarm", collection: "alarmcollection", many: "alarms" };
/// The parameters that select alarms.
pub const PARAMETERS: &[&str] = &[
    "source",
    "withSourceAssets",
    "withSourceDevices",
    "type",
    "status",
    "severity",
    "resolved",
    "dateFrom",
    "dateTo",
    "createdFrom",
    "createdTo",
    "lastUpdatedFrom",
    "lastUpdatedTo",
    "revert",
];
/// The states of an alarm.
pub const STATUSES: [&str; 3] = ["ACTIVE", "ACKNOWLEDGED", CLEARED];
/// The severities of an alarm, with the names under which a device tells how many open ones it has.
const SEVERITIES: [(&str, &str); 4] =
    [("CRITICAL", "critical"), ("MAJOR", "major"), ("MINOR", "minor"), ("WARNING", "warning")];
/// The state of an alarm that is over.
pub const CLEARED: &str = "CLEARED";
const PATH: &str = "/alarm/alarms/";
/// Members that only the gateway sets.
const SET_HERE: [&str; 3] = ["count", "firstOccurrenceTime", "history"];
/// Members that a PUT cannot change (Cumulocity OpenAPI: "A request will be rejected when non-modifiable properties are
/// provided").
const FIXED: &[&str] =
    &["source", "type", "time", "creationTime", "lastUpdated", SET_HERE[0], SET_HERE[1], SET_HERE[2]];
/// The fragment of a managed object with the number of its open alarms (Cumulocity OpenAPI).
const STATUS_FRAGMENT: &str = "c8y_ActiveAlarmsStatus";

/// An alarm as a client sent it.
#[derive(Clone, Debug)]
pub struct NewAlarm {
    /// What it has in common with other objects; its members hold `status` and `severity`, too.
    pub object: NewObject,
    status: &'static str,
    severity: &'static str,
}

/// An alarm as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alarm {
    /// Its id.
    pub id: u64,
    /// The device.
    pub source: u64,
    /// `type`; it also stands in the body, as do `time`, `status` and `severity`.
    pub kind: Box<str>,
    /// `time` of the last occurrence, in milliseconds since 1970.
    pub time_ms: i64,
    /// `time` of the first one.
    pub first_ms: i64,
    /// Occurrences.
    pub count: i64,
    /// When it was created, in milliseconds since 1970.
    pub created_ms: i64,
    /// When it was last changed.
    pub updated_ms: i64,
    /// One of [`STATUSES`].
    pub status: Box<str>,
    /// CRITICAL, MAJOR, MINOR or WARNING.
    pub severity: Box<str>,
    /// As `rest` of [`NewObject`].
    pub body: Bytes,
}

/// Reads one alarm; without a status it is ACTIVE.
///
/// # Errors
/// Names the first member that is wrong, or all mandatory ones that are missing.
pub fn parse(members: &Members<'_>) -> Result<NewAlarm, Invalid> {
    let of_client = members.without(&SET_HERE);
    let required = ["source", "type", "severity", "text", "time"];
    let mut object = object::parse(&of_client, &required, check_member)?;
    let severity = severity(of_client.get("severity").unwrap_or_default())?;
    let status = match of_client.get("status") {
        Some(raw) => status(raw)?,
        None => {
            let mut rest = object.rest.to_vec();
            json::push_string_member("status", STATUSES[0], &mut rest);
            object.rest = rest.into();
            STATUSES[0]
        }
    };
    Ok(NewAlarm { object, status, severity })
}

fn check_member(name: &str, raw: &str) -> Result<(), Invalid> {
    match name {
        "text" => json::string(raw, name).map(drop),
        "status" => status(raw).map(drop),
        "severity" => severity(raw).map(drop),
        _ => check_name(name),
    }
}

fn status(raw: &str) -> Result<&'static str, Invalid> {
    word(raw, "status", &STATUSES)
}

fn severity(raw: &str) -> Result<&'static str, Invalid> {
    word(raw, "severity", &SEVERITIES.map(|(name, _)| name))
}

/// Reads a raw value as one of a few words.
pub(super) fn word(raw: &str, field: &str, words: &[&'static str]) -> Result<&'static str, Invalid> {
    let text = json::string(raw, field)?;
    let refusal = || Invalid::new(field, format!("must be one of {}", words.join(", ")));
    words.iter().copied().find(|word| *word == text).ok_or_else(refusal)
}

/// Reads the filter's parameters; the first of several with one name counts, unknown ones are left alone.
///
/// # Errors
/// Names the parameter whose value cannot be used.
pub fn filter(query: &Query<'_>) -> Result<Filter, Invalid> {
    let mut statuses = words_parameter(query, "status", &STATUSES)?;
    if parameter(query, "resolved").is_some() {
        let resolved = flag(query, "resolved")?;
        if statuses.is_empty() {
            statuses = STATUSES.map(Box::from).to_vec();
        }
        statuses.retain(|status| (&**status == CLEARED) == resolved);
        if statuses.is_empty() {
            return Err(Invalid::new("resolved", "no status is left with this and 'status'"));
        }
    }
    let mut filter = Filter {
        kinds: texts_parameter(query, "type")?,
        statuses,
        severities: words_parameter(query, "severity", &SEVERITIES.map(|(name, _)| name))?,
        created: Range::parse(query, "createdFrom", "createdTo")?,
        updated: Range::parse(query, "lastUpdatedFrom", "lastUpdatedTo")?,
        ..Filter::parse(query, "source")?
    };
    filter.parse_following(query)?;
    Ok(filter)
}

/// Reads the body of a PUT on the collection: `{"status":"…"}` and nothing else (Cumulocity OpenAPI: "Currently, only the status
/// of alarms can be modified").
///
/// # Errors
/// Names the member that is wrong.
pub fn parse_status(body: &[u8], limits: &Limits) -> Result<&'static str, Invalid> {
    let members = Members::parse(body, limits)?;
    if let Some(other) = members.iter().find(|member| member.name != "status") {
        return Err(Invalid::new(&other.name, "cannot be changed"));
    }
    members.get("status").map_or_else(|| Err(super::missing(&[("status", false)])), status)
}

impl Alarm {
    /// The alarm that `new` becomes.
    #[must_use]
    pub fn created(id: u64, new: NewAlarm, now_ms: i64) -> Self {
        let NewAlarm { object: NewObject { source, kind, time_ms, rest, .. }, status, severity } = new;
        Self {
            id,
            source,
            kind,
            time_ms,
            first_ms: time_ms,
            count: 1,
            created_ms: now_ms,
            updated_ms: now_ms,
            status: status.into(),
            severity: severity.into(),
            body: rest,
        }
    }

    /// The alarm after `new`, another occurrence of it: everything but the time is ignored.
    ///
    /// # Errors
    /// None that a stored alarm gives cause for.
    pub fn again(&self, new: &NewObject, now_ms: i64) -> Result<Self, Invalid> {
        let mut time = Vec::new();
        json::write_string(&new.time, &mut time);
        let body = self.with_member("time", &String::from_utf8_lossy(&time))?;
        Ok(Self { time_ms: new.time_ms, count: self.count.saturating_add(1), updated_ms: now_ms, body, ..self.clone() })
    }

    /// The alarm with this status; `None` if it has it already.
    ///
    /// # Errors
    /// None that a stored alarm gives cause for.
    pub fn with_status(&self, status: &'static str, now_ms: i64) -> Result<Option<Self>, Invalid> {
        if &*self.status == status {
            return Ok(None);
        }
        let body = self.with_member("status", &format!("\"{status}\""))?;
        Ok(Some(Self { status: status.into(), updated_ms: now_ms, body, ..self.clone() }))
    }

    fn with_member(&self, name: &str, raw: &str) -> Result<Bytes, Invalid> {
        let unlimited = Limits { depth: usize::MAX, members: usize::MAX, elements: usize::MAX };
        merge(&self.body, [&Member { name: name.into(), raw }].into_iter(), &unlimited, usize::MAX, |_, _| Ok(()))
    }

    /// The alarm after a PUT with `patch`; `None` for one that changes nothing.
    ///
    /// # Errors
    /// Names the member that is wrong or cannot be changed; an alarm that would pass `limits.members` or a body of `max_bytes`
    /// is refused.
    pub fn merge(&self, patch: &[u8], now_ms: i64, limits: &Limits, max_bytes: usize) -> Result<Option<Self>, Invalid> {
        let patch = Members::parse(patch, limits)?;
        let patch = changeable(&patch, FIXED, Some(self.source))?;
        let (mut status, mut severity) = (self.status.clone(), self.severity.clone());
        for member in &patch {
            match &*member.name {
                "status" => status = self::status(member.raw)?.into(),
                "severity" => severity = self::severity(member.raw)?.into(),
                "text" => drop(json::string(member.raw, "text")?),
                _ => {}
            }
        }
        let body = merge(&self.body, patch.into_iter(), limits, max_bytes, check_member)?;
        if body == self.body {
            return Ok(None);
        }
        Ok(Some(Self { status, severity, updated_ms: now_ms, body, ..self.clone() }))
    }

    /// Whether it counts as one that the device has.
    #[must_use]
    pub fn is_open(&self) -> bool {
        &*self.status != CLEARED
    }

    /// `time` as the client wrote it.
    #[must_use]
    pub fn time(&self) -> Box<str> {
        object::stored_time(&self.body)
    }

    /// Appends the alarm as clients get it, one line; the body of its notifications is the same text.
    ///
    /// `name` is that of the device. `base_url` has no slash at its end.
    pub fn render(&self, name: Option<&str>, base_url: &str, out: &mut Vec<u8>) {
        object::open(self.id, base_url, PATH, out);
        object::push_source(self.source, name, base_url, out);
        object::push_time("creationTime", self.created_ms, out);
        object::push_time("lastUpdated", self.updated_ms, out);
        out.extend_from_slice(b",\"count\":");
        push_decimal(self.count.cast_unsigned(), out);
        if self.count > 1 {
            object::push_time("firstOccurrenceTime", self.first_ms, out);
        }
        // No record is kept of changes.
        out.extend_from_slice(b",\"history\":{\"auditRecords\":[],\"self\":\"");
        json::write_escaped(base_url, out);
        out.extend_from_slice(b"/audit/auditRecords\"}");
        object::close(&self.body, out);
    }

    /// The alarm as a row for [`REPLACE`].
    #[must_use]
    pub fn row(&self, tenant: &str) -> serde_json::Value {
        serde_json::json!([
            self.id,
            tenant,
            self.source,
            self.kind,
            self.time_ms,
            self.first_ms,
            self.count,
            self.created_ms,
            self.updated_ms,
            self.status,
            self.severity,
            String::from_utf8_lossy(&self.body),
        ])
    }
}

/// Stores alarms, new ones and changed ones; its one value is an array of [`Alarm::row`].
pub const REPLACE: &str = "INSERT OR REPLACE INTO alarm(id, tenant, source, type, time, first, count, created, updated, status, \
     severity, body)
     SELECT value->>0, value->>1, value->>2, value->>3, value->>4, value->>5, value->>6, value->>7, value->>8, value->>9,
     value->>10, CAST(value->>11 AS BLOB) FROM json_each(?)";

impl Stored for Alarm {
    const TABLE: &'static str = "alarm";
    const COLUMNS: &'static str = "id, source, type, time, first, count, created, updated, status, severity, body";
    /// Cumulocity OpenAPI.
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
            first_ms: row.try_get("first")?,
            count: row.try_get("count")?,
            created_ms: row.try_get("created")?,
            updated_ms: row.try_get("updated")?,
            status: text_column(row, "status")?,
            severity: text_column(row, "severity")?,
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

/// The open alarm of a device and type that another one of them is an occurrence of: an ACTIVE one before an ACKNOWLEDGED one,
/// then the newest.
///
/// # Errors
/// When the store fails.
pub async fn open(store: impl SqliteExecutor<'_>, source: u64, kind: &str) -> sqlx::Result<Option<Alarm>> {
    let row = sqlx::query(
        "SELECT id, source, type, time, first, count, created, updated, status, severity, body FROM alarm
         WHERE source = ? AND type = ? AND status <> 'CLEARED' ORDER BY status = 'ACTIVE' DESC, id DESC LIMIT 1",
    )
    .bind(source.cast_signed())
    .bind(kind)
    .fetch_optional(store)
    .await?;
    row.as_ref().map(Alarm::from_row).transpose()
}

/// How many open alarms a device has, by severity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenAlarms([i64; SEVERITIES.len()]);

impl OpenAlarms {
    /// Counts those of a device.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn of(store: impl SqliteExecutor<'_>, source: u64) -> sqlx::Result<Self> {
        let rows = sqlx::query(
            "SELECT severity, count(*) FROM alarm WHERE source = ? AND status <> 'CLEARED' GROUP BY severity",
        )
        .bind(source.cast_signed())
        .fetch_all(store)
        .await?;
        let mut open = Self::default();
        for row in rows {
            open.add(row.try_get(0)?, row.try_get(1)?);
        }
        Ok(open)
    }

    /// Takes a change of an alarm into account; `None` where there was or will be none.
    pub fn change(&mut self, before: Option<&Alarm>, after: Option<&Alarm>) {
        for (alarm, by) in [(before, -1), (after, 1)] {
            if let Some(alarm) = alarm.filter(|alarm| alarm.is_open()) {
                self.add(&alarm.severity, by);
            }
        }
    }

    /// The sum of both.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(count, more)| *count += more);
        self
    }

    fn add(&mut self, severity: &str, by: i64) {
        if let Some(at) = SEVERITIES.iter().position(|(name, _)| *name == severity) {
            self.0[at] += by;
        }
    }

    /// The patch of the device: `{"c8y_ActiveAlarmsStatus":{"major":1}}`, with those severities that it has alarms of.
    #[must_use]
    pub fn patch(&self) -> String {
        let counts: serde_json::Map<_, _> = SEVERITIES
            .iter()
            .zip(self.0)
            .filter(|(_, count)| *count > 0)
            .map(|((_, name), count)| ((*name).to_owned(), count.into()))
            .collect();
        serde_json::json!({STATUS_FRAGMENT: counts}).to_string()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::borrow::Cow;

    use serde_json::Value;

    use super::*;

    const BODY: &str = r#"{"severity":"MAJOR","count":7,"history":{},"source":{"id":"7"},"type":"t","text":"x",
        "time":"2021-09-03T12:29:01.664Z","n":1}"#;

    fn new(body: &str) -> Result<NewAlarm, Invalid> {
        parse(&Members::parse(body.as_bytes(), &Limits::default())?)
    }

    fn alarm() -> Alarm {
        Alarm::created(12, new(BODY).unwrap(), 1000)
    }

    fn rendered(alarm: &Alarm) -> Value {
        let mut out = Vec::new();
        alarm.render(Some("pump"), "http://g", &mut out);
        serde_json::from_slice(&out).unwrap()
    }

    #[test]
    fn an_alarm_is_active_unless_the_client_says_otherwise() {
        let alarm = alarm();
        assert_eq!((&*alarm.status, &*alarm.severity, alarm.count, alarm.is_open()), ("ACTIVE", "MAJOR", 1, true));
        let shown = rendered(&alarm);
        assert_eq!(
            (&shown["status"], &shown["count"], shown.get("firstOccurrenceTime")),
            (&"ACTIVE".into(), &1.into(), None)
        );
        assert_eq!(shown["history"]["self"], "http://g/audit/auditRecords");
        let cleared = new(&BODY.replacen('{', r#"{"status":"CLEARED","#, 1)).unwrap();
        assert!(!Alarm::created(1, cleared, 0).is_open());
        assert!(new(&BODY.replace("MAJOR", "major")).unwrap_err().to_string().starts_with("severity: must be one of"));
    }

    #[test]
    fn another_occurrence_sets_the_time_and_counts() {
        let later = new(&BODY.replace("12:29:01.664Z", "15:00:00+02:00").replace("MAJOR", "MINOR")).unwrap();
        let twice = alarm().again(&later.object, 2000).unwrap();
        let shown = rendered(&twice);
        assert_eq!((&shown["count"], &shown["time"]), (&2.into(), &"2021-09-03T15:00:00+02:00".into()));
        assert_eq!(shown["firstOccurrenceTime"], "2021-09-03T12:29:01.664Z");
        assert_eq!((&shown["severity"], twice.updated_ms, twice.time_ms), (&"MAJOR".into(), 2000, 1_630_674_000_000));
        assert_eq!(&*twice.time(), "2021-09-03T15:00:00+02:00");
    }

    #[test]
    fn a_put_that_changes_nothing_is_none() {
        let put = |patch: &str| alarm().merge(patch.as_bytes(), 2000, &Limits::default(), 1000);
        for patch in ["{}", r#"{"id":"12"}"#, r#"{"status":"ACTIVE","severity":"MAJOR","text":"x","n":1,"z":null}"#] {
            assert_eq!(put(patch).unwrap(), None, "{patch}");
        }
        let changed = put(r#"{"severity":"WARNING","status":"CLEARED"}"#).unwrap().unwrap();
        assert_eq!((&*changed.severity, changed.is_open(), changed.updated_ms), ("WARNING", false, 2000));
        assert_eq!(alarm().with_status("ACTIVE", 9).unwrap(), None);
        assert_eq!(rendered(&alarm().with_status("CLEARED", 9).unwrap().unwrap())["status"], "CLEARED");
    }

    #[test]
    fn resolved_stands_for_states() {
        let statuses = |pairs: &[(&str, &str)]| {
            let query: Vec<_> =
                pairs.iter().map(|(name, value)| (Cow::Borrowed(*name), Cow::Borrowed(*value))).collect();
            filter(&query).map(|filter| filter.statuses.join(","))
        };
        assert_eq!(statuses(&[]).unwrap(), "");
        assert_eq!(statuses(&[("resolved", "true")]).unwrap(), "CLEARED");
        assert_eq!(statuses(&[("resolved", "false")]).unwrap(), "ACTIVE,ACKNOWLEDGED");
        assert_eq!(statuses(&[("resolved", "false"), ("status", "ACTIVE,CLEARED")]).unwrap(), "ACTIVE");
        assert_eq!(statuses(&[("resolved", "true"), ("status", "ACTIVE")]).unwrap_err().field, "resolved");
    }

    #[test]
    fn open_alarms_are_counted_by_severity() {
        let (open, cleared) = (alarm(), alarm().with_status("CLEARED", 0).unwrap().unwrap());
        let minor = alarm().merge(br#"{"severity":"MINOR"}"#, 0, &Limits::default(), 1000).unwrap().unwrap();
        let mut counts = OpenAlarms::default();
        counts.change(None, Some(&cleared));
        assert_eq!(counts.patch(), r#"{"c8y_ActiveAlarmsStatus":{}}"#);
        counts.change(None, Some(&open));
        counts.change(Some(&cleared), Some(&minor));
        assert_eq!(counts.patch(), r#"{"c8y_ActiveAlarmsStatus":{"major":1,"minor":1}}"#);
        counts.change(Some(&open), Some(&minor));
        counts.change(Some(&minor), None);
        assert_eq!(counts.and(counts).patch(), r#"{"c8y_ActiveAlarmsStatus":{"minor":2}}"#);
    }
}
