//! Measurements: `{"source":{"id"},"type","time",FRAGMENT:{SERIES:{"value","unit"}}}`.
//!
//! An object inside a fragment is a series and must have a number as `value`; other members of a fragment, and top-level members
//! that are no objects, are custom properties and stay as they are. JSON null is absent.

use std::borrow::Cow;

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use sqlx::sqlite::SqliteRow;
use sqlx::{QueryBuilder, Row as _, Sqlite, SqliteConnection, SqliteExecutor};

use super::page::{PageRequest, Query, flag, parameter};
use super::{check_name, id_value, missing, parse_id, push_decimal, push_self, short_string};
use crate::json::{self, Invalid, Limits, Member, Members};
use crate::time;

/// A measurement as a client sent it.
#[derive(Clone, Debug)]
pub struct NewMeasurement {
    /// The device; whether it exists is for the caller to check.
    pub source: u64,
    /// `type`.
    pub kind: Box<str>,
    /// `time` as the client wrote it, for messages.
    pub time: Box<str>,
    /// The same in milliseconds since 1970, for queries.
    pub time_ms: i64,
    /// All members but `id`, `self` and `source` on one line, in the client's order, without the braces.
    pub rest: Bytes,
}

/// What a POST may hold.
#[derive(Clone, Debug)]
pub enum Posted {
    /// `…measurement+json`
    One(NewMeasurement),
    /// `…measurementcollection+json`
    Many(Vec<NewMeasurement>),
}

/// Parses the body of a POST, single or bulk as [`is_bulk`] decides.
///
/// # Errors
/// Names the first member that is wrong, or all mandatory ones that are missing.
pub fn parse_posted(content_type: Option<&str>, body: &[u8], limits: &Limits) -> Result<Posted, Invalid> {
    let members = Members::parse(body, limits)?;
    if is_bulk(content_type, &members) {
        return many(&members, limits).map(Posted::Many);
    }
    one(&members).map(Posted::One)
}

/// Parses a single measurement.
///
/// # Errors
/// As [`parse_posted`].
pub fn parse(body: &[u8], limits: &Limits) -> Result<NewMeasurement, Invalid> {
    one(&Members::parse(body, limits)?)
}

/// Parses `{"measurements":[…]}` of at most `limits.elements`; none at all is fine.
///
/// # Errors
/// As [`parse_posted`]; fields are named as `measurements[3].time`.
pub fn parse_bulk(body: &[u8], limits: &Limits) -> Result<Vec<NewMeasurement>, Invalid> {
    many(&Members::parse(body, limits)?, limits)
}

/// Whether a body is a collection: its media type says so or, since clients send plain `application/json` too, its shape does.
#[must_use]
pub fn is_bulk(content_type: Option<&str>, members: &Members<'_>) -> bool {
    content_type.is_some_and(|media_type| media_type.to_ascii_lowercase().contains("measurementcollection"))
        || (members.get("measurements").is_some() && members.get("source").is_none())
}

fn many(members: &Members<'_>, limits: &Limits) -> Result<Vec<NewMeasurement>, Invalid> {
    const ARRAY: &str = "measurements";
    let Some(array) = members.get(ARRAY) else {
        return Err(missing(&[(ARRAY, false)]));
    };
    let mut all = Vec::new();
    json::each_element(array, |raw| {
        let at = all.len();
        if at == limits.elements {
            return Err(Invalid::new(ARRAY, format!("has more than {at} elements")));
        }
        let element = Members::of(raw, limits).and_then(|members| one(&members));
        all.push(element.map_err(|error| error.within(&format!("{ARRAY}[{at}]")))?);
        Ok(())
    })
    .map_err(|error| if error.field.is_empty() { error.within(ARRAY) } else { error })?;
    Ok(all)
}

fn one(members: &Members<'_>) -> Result<NewMeasurement, Invalid> {
    let (mut source, mut kind, mut time) = (None, None, None);
    let mut rest = Vec::with_capacity(members.iter().map(|member| member.name.len() + member.raw.len() + 4).sum());
    for Member { name, raw } in members.iter().filter(|member| !json::is_null(member.raw)) {
        match &**name {
            "id" | "self" => continue,
            "source" => {
                source = Some(source_id(raw).map_err(|error| error.within("source"))?);
                continue;
            }
            "type" => kind = Some(non_empty(raw, "type")?),
            "time" => time = Some(parse_time(raw)?),
            _ => check_fragment(name, raw)?,
        }
        json::push_member(name, raw, &mut rest);
    }
    let fields = [("source", source.is_some()), ("type", kind.is_some()), ("time", time.is_some())];
    let (Some(source), Some(kind), Some((time, time_ms))) = (source, kind, time) else {
        return Err(missing(&fields));
    };
    Ok(NewMeasurement { source, kind: kind.into(), time: time.into(), time_ms, rest: rest.into() })
}

fn source_id(raw: &str) -> Result<u64, Invalid> {
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

fn check_fragment(name: &str, raw: &str) -> Result<(), Invalid> {
    check_value_name(name)?;
    if !is_object(raw) {
        return Ok(());
    }
    json::each_member(raw, |series, raw| {
        if !is_object(raw) {
            return Ok(());
        }
        check_value_name(&series)?;
        check_series(raw).map_err(|error| error.within(&series))
    })
    .map_err(|error| error.within(name))
}

fn check_series(raw: &str) -> Result<(), Invalid> {
    let mut has_value = false;
    json::each_member(raw, |name, raw| {
        match &*name {
            "value" => {
                json::number(raw, "value")?;
                has_value = true;
            }
            "unit" if !json::is_null(raw) => {
                json::string(raw, "unit")?;
            }
            _ => {}
        }
        Ok(())
    })?;
    if has_value { Ok(()) } else { Err(Invalid::new("value", "is missing")) }
}

/// Names of fragments and series (Cumulocity OpenAPI).
fn check_value_name(name: &str) -> Result<(), Invalid> {
    check_name(name)?;
    let forbidden = |char: char| char.is_whitespace() || ".,*[]()@$".contains(char);
    if name.contains(forbidden) {
        return Err(Invalid::new(name, "the name holds whitespace or one of . , * [ ] ( ) @ $"));
    }
    Ok(())
}

fn is_object(raw: &str) -> bool {
    raw.starts_with('{')
}

/// Appends the measurement as clients get it, one line; the body of its notification is the same text.
///
/// `rest` is that of [`NewMeasurement`]. `base_url` has no slash at its end.
pub fn render(id: u64, source: u64, base_url: &str, rest: &[u8], out: &mut Vec<u8>) {
    const FIXED: usize = 160;
    out.reserve(rest.len() + 2 * base_url.len() + FIXED);
    out.extend_from_slice(b"{\"id\":\"");
    push_decimal(id, out);
    out.extend_from_slice(b"\",");
    push_self(base_url, "/measurement/measurements/", id, "", out);
    out.extend_from_slice(b",\"source\":{\"id\":\"");
    push_decimal(source, out);
    out.extend_from_slice(b"\",");
    push_self(base_url, "/inventory/managedObjects/", source, "", out);
    out.push(b'}');
    if !rest.is_empty() {
        out.push(b',');
        out.extend_from_slice(rest);
    }
    out.push(b'}');
}

/// A measurement as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// Its id.
    pub id: u64,
    /// The device.
    pub source: u64,
    /// As in [`NewMeasurement`].
    pub rest: Bytes,
}

impl Measurement {
    fn from_row(row: &SqliteRow) -> sqlx::Result<Self> {
        Ok(Self {
            id: row.try_get::<i64, _>("id")?.cast_unsigned(),
            source: row.try_get::<i64, _>("source")?.cast_unsigned(),
            rest: row.try_get::<Vec<u8>, _>("body")?.into(),
        })
    }

    /// As [`render`].
    pub fn render(&self, base_url: &str, out: &mut Vec<u8>) {
        render(self.id, self.source, base_url, &self.rest, out);
    }
}

/// Which measurements of a tenant a list request wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// `source`: of this device.
    pub source: Option<u64>,
    /// `type`: exactly this one.
    pub kind: Option<Box<str>>,
    /// `dateFrom`: not before, in milliseconds. The platform documents a date or a date and time.
    pub from_ms: Option<i64>,
    /// `dateTo`: before. The platform does not say whether its end belongs to the range; here it does not, so that ranges can
    /// follow each other without an overlap.
    pub to_ms: Option<i64>,
    /// `valueFragmentType`: with this fragment, which must be an object.
    pub fragment: Option<Box<str>>,
    /// `valueFragmentSeries`: with this series, in that fragment or, without one, in any.
    pub series: Option<Box<str>>,
    /// `revert`: the newest first. Documented for ranges of time only; here for every list.
    pub revert: bool,
}

impl Filter {
    /// Reads the filter's parameters; the first of several with one name counts, unknown ones are left alone.
    ///
    /// # Errors
    /// Names the parameter whose value cannot be used.
    pub fn parse(query: &Query<'_>) -> Result<Self, Invalid> {
        let source = parameter(query, "source")
            .map(|text| parse_id(text).ok_or_else(|| Invalid::new("source", "must be an id of decimal digits")));
        Ok(Self {
            source: source.transpose()?,
            kind: text_parameter(query, "type")?,
            from_ms: time_parameter(query, "dateFrom")?,
            to_ms: time_parameter(query, "dateTo")?,
            fragment: text_parameter(query, "valueFragmentType")?,
            series: text_parameter(query, "valueFragmentSeries")?,
            revert: flag(query, "revert")?,
        })
    }

    /// A range of time or one device reads in the order of time, everything else in the order of creation: no index gives the
    /// order of time over all devices.
    fn order(&self) -> &'static str {
        let by_time = self.source.is_some() || self.from_ms.is_some() || self.to_ms.is_some();
        match (by_time, self.revert) {
            (true, false) => " ORDER BY time, id",
            (true, true) => " ORDER BY time DESC, id DESC",
            (false, false) => " ORDER BY id",
            (false, true) => " ORDER BY id DESC",
        }
    }

    fn push_where(&self, tenant: &str, sql: &mut QueryBuilder<Sqlite>) {
        sql.push(" FROM measurement WHERE tenant = ").push_bind(tenant.to_owned());
        if let Some(source) = self.source {
            sql.push(" AND source = ").push_bind(source.cast_signed());
        }
        if let Some(kind) = &self.kind {
            sql.push(" AND type = ").push_bind(kind.to_string());
        }
        if let Some(from) = self.from_ms {
            sql.push(" AND time >= ").push_bind(from);
        }
        if let Some(to) = self.to_ms {
            sql.push(" AND time < ").push_bind(to);
        }
        self.push_fragment(sql);
    }

    fn push_fragment(&self, sql: &mut QueryBuilder<Sqlite>) {
        if self.fragment.is_none() && self.series.is_none() {
            return;
        }
        sql.push(" AND EXISTS (SELECT 1 FROM json_each('{' || body || '}') AS fragment");
        if self.series.is_some() {
            // CASE, since nothing else promises that values which are no objects stay out of the inner json_each.
            sql.push(", json_each(CASE fragment.type WHEN 'object' THEN fragment.value ELSE '{}' END) AS series");
        }
        sql.push(" WHERE fragment.type = 'object'");
        if let Some(fragment) = &self.fragment {
            sql.push(" AND fragment.key = ").push_bind(fragment.to_string());
        }
        if let Some(series) = &self.series {
            sql.push(" AND series.type = 'object' AND series.key = ").push_bind(series.to_string());
        }
        sql.push(")");
    }
}

fn text_parameter(query: &Query<'_>, name: &str) -> Result<Option<Box<str>>, Invalid> {
    match parameter(query, name) {
        Some("") => Err(Invalid::new(name, "must not be empty")),
        value => Ok(value.map(Box::from)),
    }
}

fn time_parameter(query: &Query<'_>, name: &str) -> Result<Option<i64>, Invalid> {
    let parse = |text| time::parse_date_or_time(text).map_err(|error| Invalid::new(name, error.to_string()));
    parameter(query, name).map(parse).transpose()
}

/// One page of measurements.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The measurements of the page; none past the end.
    pub measurements: Vec<Measurement>,
    /// Whether others follow.
    pub more: bool,
    /// The number of all that match, where the page wants a total.
    pub total: Option<u64>,
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// The store failed.
    #[error("the store could not be read")]
    Store(#[from] sqlx::Error),
    /// The page would not fit into memory; a smaller one may.
    #[error("pageSize: the page is larger than {max_bytes} bytes, ask for a smaller one")]
    TooLarge {
        /// The limit.
        max_bytes: usize,
    },
}

/// Reads one measurement.
///
/// # Errors
/// When the store fails.
pub async fn get(store: impl SqliteExecutor<'_>, tenant: &str, id: u64) -> sqlx::Result<Option<Measurement>> {
    let row = sqlx::query("SELECT id, source, body FROM measurement WHERE id = ? AND tenant = ?")
        .bind(id.cast_signed())
        .bind(tenant)
        .fetch_optional(store)
        .await?;
    row.as_ref().map(Measurement::from_row).transpose()
}

/// Reads a page whose stored bodies have at most `max_bytes` together.
///
/// # Errors
/// See [`ListError`].
pub async fn list(
    store: &mut SqliteConnection,
    tenant: &str,
    filter: &Filter,
    page: &PageRequest,
    max_bytes: usize,
) -> Result<Listed, ListError> {
    let total = if page.wants_total() { Some(count(store, tenant, filter).await?) } else { None };
    let mut sql = QueryBuilder::new("SELECT id, source, body");
    filter.push_where(tenant, &mut sql);
    sql.push(filter.order());
    // One row past the page tells whether there is a next one.
    sql.push(" LIMIT ").push_bind(i64::from(page.size) + 1);
    sql.push(" OFFSET ").push_bind(page.offset().cast_signed());
    let mut rows = sql.build().fetch(store);
    let mut listed = Listed { measurements: Vec::new(), more: false, total };
    let mut bytes = 0;
    while let Some(row) = rows.try_next().await? {
        if listed.measurements.len() == page.size as usize {
            listed.more = true;
            break;
        }
        let measurement = Measurement::from_row(&row)?;
        bytes += measurement.rest.len();
        if bytes > max_bytes {
            return Err(ListError::TooLarge { max_bytes });
        }
        listed.measurements.push(measurement);
    }
    Ok(listed)
}

async fn count(store: &mut SqliteConnection, tenant: &str, filter: &Filter) -> sqlx::Result<u64> {
    let mut sql = QueryBuilder::new("SELECT count(*)");
    filter.push_where(tenant, &mut sql);
    let count: i64 = sql.build_query_scalar().fetch_one(store).await?;
    Ok(count.cast_unsigned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use serde_json::Value;
    use sqlx::Connection as _;

    use super::*;

    const MAX_BYTES: usize = 1 << 20;
    const TIME_MS: i64 = 1_630_672_141_664;

    fn with(member: &str) -> String {
        format!(r#"{{"source":{{"id":"7"}},"type":"t","time":"2021-09-03T12:29:01.664Z",{member}}}"#)
    }

    fn single(body: &str) -> Result<NewMeasurement, Invalid> {
        parse(body.as_bytes(), &Limits::default())
    }

    fn bulk(body: &str) -> Result<Vec<NewMeasurement>, Invalid> {
        parse_bulk(body.as_bytes(), &Limits::default())
    }

    fn refusal(body: &str) -> String {
        single(body).unwrap_err().to_string()
    }

    fn rest(body: &str) -> String {
        String::from_utf8(single(body).unwrap().rest.to_vec()).unwrap()
    }

    #[test]
    fn a_measurement_is_taken_apart() {
        let body = r#" { "id": "9", "c8y_T" : {"T":{"value": 1.50, "unit":"°C"}}, "self":"x",
            "time": "2021-09-03T14:29:01.664+02:00", "source": {"name":"n","id": 7}, "type":"c8y_T" } "#;
        let measurement = single(body).unwrap();
        assert_eq!((measurement.source, &*measurement.kind), (7, "c8y_T"));
        assert_eq!((&*measurement.time, measurement.time_ms), ("2021-09-03T14:29:01.664+02:00", TIME_MS));
        assert_eq!(
            rest(body),
            r#""c8y_T":{"T":{"value":1.50,"unit":"°C"}},"time":"2021-09-03T14:29:01.664+02:00","type":"c8y_T""#
        );
    }

    #[test]
    fn all_missing_fields_are_named_at_once() {
        for (body, missing) in [
            ("{}", "source,type,time"),
            (r#"{"source":null,"type":"t","time":null}"#, "source,time"),
            (r#"{"source":{"id":"1"},"time":"2021-09-03T12:29:01Z","c":{}}"#, "type"),
        ] {
            assert_eq!(refusal(body), format!("Following mandatory fields should be included: {missing}"));
        }
    }

    #[test]
    fn wrong_fields_are_named() {
        for (body, text) in [
            (r#"{"source":"7"}"#, "source: must be a JSON object"),
            (r#"{"source":{}}"#, "source.id: is missing"),
            (r#"{"source":{"id":null}}"#, "source.id: is missing"),
            (r#"{"source":{"id":"seven"}}"#, "source.id: must be an id of decimal digits"),
            (r#"{"type":1}"#, "type: must be a string"),
            (r#"{"type":""}"#, "type: must not be empty"),
            (r#"{"time":1630672141664}"#, "time: must be a string"),
            (r#"{"time":"1969-01-01T00:00:00Z"}"#, "time: must lie in the years 1970 to 2261"),
        ] {
            assert_eq!(refusal(body), text);
        }
        assert!(refusal(r#"{"time":"2021-09-03T12:29:01"}"#).starts_with("time: must be a date and time with a zone"));
        let kind = format!(r#"{{"type":"{}"}}"#, "x".repeat(257));
        assert_eq!(refusal(&kind), "type: is longer than 256 characters");
    }

    #[test]
    fn series_have_a_number_and_perhaps_a_unit() {
        for (member, text) in [
            (r#""c8y_Temp":{"T":{}}"#, "c8y_Temp.T.value: is missing"),
            (r#""c8y_Temp":{"T":{"unit":"C"}}"#, "c8y_Temp.T.value: is missing"),
            (r#""c8y_Temp":{"T":{"value":null}}"#, "c8y_Temp.T.value: must be a number"),
            (r#""c8y_Temp":{"T":{"value":"1"}}"#, "c8y_Temp.T.value: must be a number"),
            (r#""c8y_Temp":{"T":{"value":1e999}}"#, "c8y_Temp.T.value: is out of range"),
            (r#""c8y_Temp":{"T":{"value":1,"unit":2}}"#, "c8y_Temp.T.unit: must be a string"),
            (r#""c8y_Temp":{"":{"value":1}}"#, "c8y_Temp: the name of a fragment or series is empty"),
        ] {
            assert_eq!(refusal(&with(member)), text);
        }
    }

    #[test]
    fn names_are_checked() {
        for char in [' ', '\t', '\u{a0}', '.', ',', '*', '[', ']', '(', ')', '@', '$'] {
            let name = serde_json::to_string(&format!("a{char}b")).unwrap();
            for member in [format!("{name}:1"), format!("{name}:{{}}"), format!("\"c\":{{{name}:{{\"value\":1}}}}")] {
                assert!(refusal(&with(&member)).ends_with("one of . , * [ ] ( ) @ $"), "{member}");
            }
        }
        assert!(refusal(&with(&format!("\"{}\":1", "x".repeat(257)))).ends_with("longer than 256 characters"));
    }

    #[test]
    fn custom_properties_and_documented_names_pass() {
        for member in [
            r#""note":"a b","count":3,"list":[{"value":"x"}],"flag":true"#,
            r#""A+:1":{"A-:1":{"value":-2e3,"unit":"kWh"},"é":{"value":0,"unit":null}}"#,
            r#""c8y_T":{"T":{"value":1,"extra":{"deep":[1]}},"comment":"x","a b":1}"#,
            r#""empty":{}"#,
        ] {
            assert!(rest(&with(member)).ends_with(member), "{member}");
        }
    }

    #[test]
    fn null_is_absent() {
        assert_eq!(rest(&with(r#""a":null,"bad name":null"#)), r#""type":"t","time":"2021-09-03T12:29:01.664Z""#);
    }

    #[test]
    fn bulk_errors_tell_the_element() {
        let good = with("\"c\":{}");
        assert_eq!(bulk(&format!(r#"{{"measurements":[{good}, {good}]}}"#)).unwrap().len(), 2);
        assert!(bulk(r#"{"measurements":[]}"#).unwrap().is_empty());
        for (body, text) in [
            ("{}".to_owned(), "Following mandatory fields should be included: measurements"),
            (r#"{"measurements":{}}"#.to_owned(), "measurements: must be a JSON array"),
            (format!(r#"{{"measurements":[{good},7]}}"#), "measurements[1]: must be a JSON object"),
            (format!(r#"{{"measurements":[{good},{{"time":1}}]}}"#), "measurements[1].time: must be a string"),
            (
                r#"{"measurements":[{"type":"t"}]}"#.to_owned(),
                "measurements[0]: Following mandatory fields should be included: source,time",
            ),
        ] {
            assert_eq!(bulk(&body).unwrap_err().to_string(), text);
        }
    }

    #[test]
    fn the_number_of_elements_is_limited() {
        let limits = Limits { elements: 2, ..Limits::default() };
        let of = |count| format!("{{\"measurements\":[{}]}}", vec![with("\"c\":{}"); count].join(","));
        assert_eq!(parse_bulk(of(2).as_bytes(), &limits).unwrap().len(), 2);
        let refused = parse_bulk(of(3).as_bytes(), &limits).unwrap_err();
        assert_eq!(refused.to_string(), "measurements: has more than 2 elements");
    }

    #[test]
    fn media_type_or_shape_tells_a_collection() {
        let single = "application/vnd.com.nsn.cumulocity.measurement+json";
        let collection = "application/vnd.com.nsn.cumulocity.measurementCollection+json;ver=0.9";
        for (content_type, body, bulk) in [
            (None, r#"{"measurements":[]}"#, true),
            (Some("application/json"), r#"{"measurements":[]}"#, true),
            (Some(single), r#"{"measurements":[]}"#, true),
            (Some(collection), r#"{"source":{"id":"1"}}"#, true),
            (None, r#"{"measurements":{"m":{"value":1}},"source":{"id":"1"}}"#, false),
            (Some(single), r#"{"source":{"id":"1"}}"#, false),
        ] {
            let members = Members::parse(body.as_bytes(), &Limits::default()).unwrap();
            assert_eq!(is_bulk(content_type, &members), bulk, "{content_type:?} {body}");
        }
        let posted = |body: &str| parse_posted(None, body.as_bytes(), &Limits::default()).unwrap();
        assert!(matches!(posted(&with("\"measurements\":{}")), Posted::One(_)));
        assert!(matches!(posted(r#"{"measurements":[]}"#), Posted::Many(all) if all.is_empty()));
    }

    #[test]
    fn a_measurement_is_rendered_on_one_line() {
        let mut out = Vec::new();
        render(12, 7, "http://gate:8080", br#""type":"t","c":{}"#, &mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "{\"id\":\"12\",\"self\":\"http://gate:8080/measurement/measurements/12\",\"source\":{\"id\":\"7\",\
             \"self\":\"http://gate:8080/inventory/managedObjects/7\"},\"type\":\"t\",\"c\":{}}"
        );
    }

    #[test]
    fn a_hostile_base_url_cannot_break_the_json() {
        let mut out = Vec::new();
        render(12, 7, "http://a\"b\\", b"", &mut out);
        let parsed: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(parsed["self"], "http://a\"b\\/measurement/measurements/12");
    }

    fn filter(pairs: &[(&str, &str)]) -> Result<Filter, Invalid> {
        let query: Vec<_> = pairs.iter().map(|(name, value)| (Cow::Borrowed(*name), Cow::Borrowed(*value))).collect();
        Filter::parse(&query)
    }

    #[test]
    fn filters_are_read() {
        let read = filter(&[
            ("source", "7"),
            ("source", "x"),
            ("type", "t"),
            ("dateFrom", "2021-09-03T12:29:01.664Z"),
            ("dateTo", "2021-09-04"),
            ("valueFragmentType", "c8y_T"),
            ("valueFragmentSeries", "T"),
            ("revert", "true"),
            ("unknown", ""),
        ]);
        let expected = Filter {
            source: Some(7),
            kind: Some("t".into()),
            from_ms: Some(TIME_MS),
            to_ms: Some(1_630_713_600_000),
            fragment: Some("c8y_T".into()),
            series: Some("T".into()),
            revert: true,
        };
        assert_eq!(read, Ok(expected));
        assert_eq!(filter(&[]), Ok(Filter::default()));
    }

    #[test]
    fn bad_filters_are_refused_by_name() {
        for name in ["source", "type", "dateFrom", "dateTo", "valueFragmentType", "valueFragmentSeries", "revert"] {
            assert_eq!(filter(&[(name, "")]).unwrap_err().field, name);
        }
        assert_eq!(filter(&[("source", "x")]).unwrap_err().to_string(), "source: must be an id of decimal digits");
        assert!(filter(&[("dateTo", "yesterday")]).is_err());
    }

    /// Ids from 1, times in the order given; the last one is another tenant's.
    const ROWS: &[(&str, i64, &str, i64, &str)] = &[
        ("a", 7, "t", 3000, r#""c8y_T":{"T":{"value":1}},"note":"c8y_S""#),
        ("a", 7, "u", 1000, r#""c8y_S":{"S":{"value":1},"T":2}"#),
        ("a", 8, "t", 2000, r#""c8y\u005fT":{"\u0053":{"value":1}},"c8y_S":"text""#),
        ("a", 7, "t", 2000, ""),
        ("a", 7, "t", 2000, r#""odd\"'name":{"x'y":{"value":1}}"#),
        ("b", 7, "t", 2000, r#""c8y_T":{"T":{"value":1}}"#),
    ];

    async fn store() -> SqliteConnection {
        let mut store = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(
            "CREATE TABLE measurement(id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, source INTEGER NOT NULL, type TEXT NOT NULL,
             time INTEGER NOT NULL, body BLOB NOT NULL) STRICT;
             CREATE INDEX measurement_source_time ON measurement(source, time);",
        )
        .execute(&mut store)
        .await
        .unwrap();
        for (tenant, source, kind, time, body) in ROWS {
            sqlx::query("INSERT INTO measurement(tenant, source, type, time, body) VALUES (?, ?, ?, ?, ?)")
                .bind(*tenant)
                .bind(*source)
                .bind(*kind)
                .bind(*time)
                .bind(body.as_bytes())
                .execute(&mut store)
                .await
                .unwrap();
        }
        store
    }

    const ALL: PageRequest =
        PageRequest { current: 1, size: 2000, with_total_pages: false, with_total_elements: false };

    async fn listed(
        store: &mut SqliteConnection,
        filter: &Filter,
        page: &PageRequest,
    ) -> (Vec<u64>, bool, Option<u64>) {
        let listed = list(store, "a", filter, page, MAX_BYTES).await.unwrap();
        (listed.measurements.iter().map(|m| m.id).collect(), listed.more, listed.total)
    }

    #[tokio::test]
    async fn one_measurement_is_read_by_its_tenant_only() {
        let mut store = store().await;
        let found = get(&mut store, "a", 1).await.unwrap().unwrap();
        assert_eq!((found.id, found.source, &found.rest[..]), (1, 7, ROWS[0].4.as_bytes()));
        assert_eq!(get(&mut store, "b", 1).await.unwrap(), None);
        assert_eq!(get(&mut store, "a", 99).await.unwrap(), None);
    }

    #[tokio::test]
    async fn filters_select_and_order() {
        let mut store = store().await;
        let text = |text: &str| Some(Box::from(text));
        let any = Filter::default;
        for (filter, ids) in [
            (any(), vec![1, 2, 3, 4, 5]),
            (Filter { revert: true, ..any() }, vec![5, 4, 3, 2, 1]),
            (Filter { source: Some(7), ..any() }, vec![2, 4, 5, 1]),
            (Filter { source: Some(7), revert: true, ..any() }, vec![1, 5, 4, 2]),
            (Filter { kind: text("t"), ..any() }, vec![1, 3, 4, 5]),
            (Filter { from_ms: Some(2000), ..any() }, vec![3, 4, 5, 1]),
            (Filter { to_ms: Some(2000), ..any() }, vec![2]),
            (Filter { from_ms: Some(1000), to_ms: Some(3000), revert: true, ..any() }, vec![5, 4, 3, 2]),
            (Filter { fragment: text("c8y_T"), ..any() }, vec![1, 3]),
            (Filter { fragment: text("c8y_S"), ..any() }, vec![2]),
            (Filter { fragment: text("note"), ..any() }, vec![]),
            (Filter { series: text("S"), ..any() }, vec![2, 3]),
            (Filter { series: text("T"), ..any() }, vec![1]),
            (Filter { fragment: text("c8y_T"), series: text("S"), ..any() }, vec![3]),
            (Filter { fragment: text("odd\"'name"), series: text("x'y"), ..any() }, vec![5]),
            (Filter { kind: text("' OR 1=1 --"), ..any() }, vec![]),
        ] {
            assert_eq!(listed(&mut store, &filter, &ALL).await.0, ids, "{filter:?}");
        }
    }

    #[tokio::test]
    async fn pages_end_and_are_counted() {
        let mut store = store().await;
        let page = |current, size| PageRequest { current, size, ..ALL };
        let all = Filter::default();
        assert_eq!(listed(&mut store, &all, &page(1, 2)).await, (vec![1, 2], true, None));
        assert_eq!(listed(&mut store, &all, &page(3, 2)).await, (vec![5], false, None));
        assert_eq!(listed(&mut store, &all, &page(1, 5)).await, (vec![1, 2, 3, 4, 5], false, None));
        assert_eq!(listed(&mut store, &all, &page(4, 2)).await, (vec![], false, None));
        assert_eq!(listed(&mut store, &all, &page(u32::MAX, 2000)).await, (vec![], false, None));
        let counted = PageRequest { with_total_pages: true, ..page(1, 1) };
        let device = Filter { source: Some(7), ..all };
        assert_eq!(listed(&mut store, &device, &counted).await, (vec![2], true, Some(4)));
    }

    #[tokio::test]
    async fn the_bytes_of_a_page_are_limited() {
        let mut store = store().await;
        let bytes = ROWS[..5].iter().map(|row| row.4.len()).sum::<usize>();
        assert!(list(&mut store, "a", &Filter::default(), &ALL, bytes).await.is_ok());
        let refused = list(&mut store, "a", &Filter::default(), &ALL, bytes - 1).await;
        assert!(matches!(refused, Err(ListError::TooLarge { .. })));
        let still_usable = list(&mut store, "a", &Filter::default(), &PageRequest { size: 1, ..ALL }, MAX_BYTES).await;
        assert_eq!(still_usable.unwrap().measurements.len(), 1);
    }

    #[tokio::test]
    async fn what_was_parsed_is_found_and_rendered() {
        let mut store = store().await;
        let new = single(&with(r#""c8y_W":{"W":{"value":1,"unit":"a b"}}"#)).unwrap();
        sqlx::query("INSERT INTO measurement(id, tenant, source, type, time, body) VALUES (77, 'a', ?, ?, ?, ?)")
            .bind(new.source.cast_signed())
            .bind(&*new.kind)
            .bind(new.time_ms)
            .bind(&new.rest[..])
            .execute(&mut store)
            .await
            .unwrap();
        let wanted = filter(&[("dateFrom", &new.time), ("valueFragmentSeries", "W")]).unwrap();
        let found = list(&mut store, "a", &wanted, &ALL, MAX_BYTES).await.unwrap();
        let mut out = Vec::new();
        found.measurements[0].render("http://g", &mut out);
        let parsed: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(parsed["id"], "77");
        assert_eq!(parsed["source"]["self"], "http://g/inventory/managedObjects/7");
        assert_eq!(parsed["c8y_W"]["W"]["unit"], "a b");
    }
}
