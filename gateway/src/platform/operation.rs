//! Operations: `{"deviceId",FRAGMENT:…,"description"}`, what a device is asked to do and what became of it.

use bytes::Bytes;
use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::alarm::word;
use super::list::{Filter, Stored, body_column, id_column, id_parameter, text_parameter, words_parameter};
use super::merge::{changeable, merge};
use super::object::{self, Names};
use super::page::{Query, parameter};
use super::relation::Kind;
use super::{check_name, id_value, missing, push_decimal};
use crate::json::{self, Invalid, Limits, Member, Members};

/// How the API calls its objects.
pub const NAMES: Names = Names { one: "operation", collection: "operationcollection", many: "operations" };
/// The parameters that select operations.
pub const PARAMETERS: &[&str] = &["deviceId", "agentId", "status", "fragmentType", "dateFrom", "dateTo", "revert"];
/// The states of an operation, the first one is that of a new one.
const STATUSES: [&str; 4] = ["PENDING", "EXECUTING", "SUCCESSFUL", "FAILED"];
const PATH: &str = "/devicecontrol/operations/";
/// Members that the gateway sets when an operation is created; a client's are ignored.
const SET_HERE: [&str; 7] = ["id", "self", "deviceId", "deviceName", "creationTime", "status", "failureReason"];
/// Members that a PUT cannot change.
const FIXED: &[&str] = &["deviceId", "deviceName", "creationTime"];

/// An operation as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Its id.
    pub id: u64,
    /// The device; whether it exists is for the caller to check.
    pub device: u64,
    /// `type`, if it has one; it also stands in the body.
    pub kind: Option<Box<str>>,
    /// When it was created, in milliseconds since 1970.
    pub created_ms: i64,
    /// PENDING, EXECUTING, SUCCESSFUL or FAILED; it also stands in the body.
    pub status: Box<str>,
    /// All members that the client set, and `status`, on one line, in order, without the braces.
    pub body: Bytes,
}

/// Reads the body of a POST as the operation `id`.
///
/// # Errors
/// Names the first member that is wrong, or the mandatory one that is missing.
pub fn parse(body: &[u8], id: u64, now_ms: i64, limits: &Limits) -> Result<Operation, Invalid> {
    let members = Members::parse(body, limits)?;
    let device = members.get("deviceId").ok_or_else(|| missing(&[("deviceId", false)]))?;
    let device = id_value(device, "deviceId")?;
    let mut rest = Vec::with_capacity(body.len());
    for Member { name, raw } in &members.without(&SET_HERE) {
        check_member(name, raw)?;
        if !json::is_null(raw) {
            json::push_member(name, raw, &mut rest);
        }
    }
    json::push_string_member("status", STATUSES[0], &mut rest);
    let kind = kind(members.get("type"));
    Ok(Operation { id, device, kind, created_ms: now_ms, status: STATUSES[0].into(), body: rest.into() })
}

/// Filters match against this; operations need none, so that a `type` that is no string is a fragment.
fn kind(raw: Option<&str>) -> Option<Box<str>> {
    json::string(raw?, "type").ok().map(Box::from)
}

fn check_member(name: &str, raw: &str) -> Result<(), Invalid> {
    match name {
        "description" | "failureReason" if !json::is_null(raw) => json::string(raw, name).map(drop),
        "status" => word(raw, name, &STATUSES).map(drop),
        _ => check_name(name),
    }
}

/// Reads the filter's parameters; the first of several with one name counts, unknown ones are left alone. `agentId` selects the
/// operations of that object and of all that is below it.
///
/// # Errors
/// Names the parameter whose value cannot be used.
pub fn filter(query: &Query<'_>) -> Result<Filter, Invalid> {
    if parameter(query, "bulkOperationId").is_some() {
        return Err(Invalid::new("bulkOperationId", "this gateway has no bulk operations"));
    }
    let agent = id_parameter(query, "agentId")?;
    let filter = Filter {
        statuses: words_parameter(query, "status", &STATUSES)?,
        fragment: text_parameter(query, "fragmentType")?,
        ..Filter::parse(query, "deviceId")?
    };
    let following = if filter.source.is_none() && agent.is_some() { Kind::ALL.to_vec() } else { Vec::new() };
    Ok(Filter { source: filter.source.or(agent), following, ..filter })
}

impl Operation {
    /// The operation after a PUT with `patch`, which has to hold a status; a device adds what came of it to the fragments.
    ///
    /// # Errors
    /// Names the member that is missing, wrong or cannot be changed; an operation that would pass `limits.members` or a body of
    /// `max_bytes` is refused.
    pub fn merge(&self, patch: &[u8], limits: &Limits, max_bytes: usize) -> Result<Self, Invalid> {
        let patch = Members::parse(patch, limits)?;
        let raw = patch.get("status").ok_or_else(|| missing(&[("status", false)]))?;
        let status = word(raw, "status", &STATUSES)?;
        let changes = changeable(&patch, FIXED, None)?;
        let body = merge(&self.body, changes.into_iter(), limits, max_bytes, check_member)?;
        let kind =
            if patch.iter().any(|member| member.name == "type") { kind(patch.get("type")) } else { self.kind.clone() };
        Ok(Self { kind, status: status.into(), body, ..*self })
    }

    /// Appends the operation as clients get it, one line; the body of its notifications is the same text.
    ///
    /// `name` is that of the device. `base_url` has no slash at its end.
    pub fn render(&self, name: Option<&str>, base_url: &str, out: &mut Vec<u8>) {
        object::open(self.id, base_url, PATH, out);
        out.extend_from_slice(b",\"deviceId\":\"");
        push_decimal(self.device, out);
        out.push(b'"');
        if let Some(name) = name {
            out.extend_from_slice(b",\"deviceName\":");
            json::write_string(name, out);
        }
        object::push_time("creationTime", self.created_ms, out);
        object::close(&self.body, out);
    }
}

impl Stored for Operation {
    const TABLE: &'static str = "operation";
    const COLUMNS: &'static str = "id, source, type, time, status, body";
    const NEWEST_FIRST: bool = false;
    const FRAGMENTS_ARE_OBJECTS: bool = false;

    /// Cumulocity OpenAPI: "in the order of their ascending IDs".
    fn in_order_of_time(_: &Filter) -> bool {
        false
    }

    fn from_row(row: &SqliteRow) -> sqlx::Result<Self> {
        Ok(Self {
            id: id_column(row, "id")?,
            device: id_column(row, "source")?,
            kind: row.try_get::<Option<String>, _>("type")?.map(Box::from),
            created_ms: row.try_get("time")?,
            status: row.try_get::<String, _>("status")?.into(),
            body: body_column(row)?,
        })
    }

    fn bytes(&self) -> usize {
        self.body.len()
    }

    fn subject(&self) -> (u64, u64, Option<&str>) {
        (self.id, self.device, self.kind.as_deref())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn new(body: &str) -> Result<Operation, Invalid> {
        parse(body.as_bytes(), 12, 1000, &Limits::default())
    }

    #[test]
    fn a_new_operation_is_pending_whatever_the_client_says() {
        let operation = new(
            r#"{"status":"FAILED","failureReason":"x","deviceName":"y","id":"1","deviceId":"7","c8y_Restart":{ }}"#,
        );
        let operation = operation.unwrap();
        assert_eq!((operation.device, &*operation.status, operation.kind.as_deref()), (7, "PENDING", None));
        let mut out = Vec::new();
        operation.render(Some("pump"), "http://g", &mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            r#"{"id":"12","self":"http://g/devicecontrol/operations/12","deviceId":"7","deviceName":"pump","#
                .to_owned()
                + r#""creationTime":"1970-01-01T00:00:01.000Z","c8y_Restart":{},"status":"PENDING"}"#
        );
    }

    #[test]
    fn a_put_needs_a_status_and_may_tell_more() {
        let operation = new(r#"{"deviceId":7,"type":"t","c8y_Command":{"text":"ls"}}"#).unwrap();
        assert_eq!(operation.kind.as_deref(), Some("t"));
        let put = |patch: &str| operation.merge(patch.as_bytes(), &Limits::default(), 1000);
        let done = put(r#"{"status":"SUCCESSFUL","type":null,"c8y_Command":{"result":"a"}}"#).unwrap();
        assert_eq!((&*done.status, done.kind.as_deref()), ("SUCCESSFUL", None));
        assert_eq!(String::from_utf8_lossy(&done.body), r#""c8y_Command":{"result":"a"},"status":"SUCCESSFUL""#);
        assert_eq!(
            put(r#"{"status":null}"#).unwrap_err().to_string(),
            "Following mandatory fields should be included: status"
        );
        assert_eq!(
            put(r#"{"status":"FAILED","deviceId":"7"}"#).unwrap_err().to_string(),
            "deviceId: cannot be changed"
        );
        assert!(put(r#"{"status":"OPEN"}"#).is_err());
    }
}
