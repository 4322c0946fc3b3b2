//! Measurements: `{"source":{"id"},"type","time",FRAGMENT:{SERIES:{"value","unit"}}}`.
//!
//! An object inside a fragment is a series and must have a number as `value`; other members of a fragment, and top-level members
//! that are no objects, are custom properties and stay as they are. JSON null is absent.

use bytes::Bytes;
use sqlx::sqlite::SqliteRow;

use super::check_name;
use super::list::{Filter, Stored, body_column, id_column, text_column, text_parameter};
use super::object::{self, Names, NewObject};
use super::page::Query;
use crate::json::{self, Invalid, Members};

/// How the API calls its objects.
pub const NAMES: Names = Names { one: "measurement", collection: "measurementcollection", many: "measurements" };
/// The parameters that select measurements to delete.
pub const PARAMETERS: &[&str] =
    &["source", "type", "dateFrom", "dateTo", "fragmentType", "valueFragmentType", "valueFragmentSeries", "revert"];
const PATH: &str = "/measurement/measurements/";

/// Reads one measurement.
///
/// # Errors
/// Names the first member that is wrong, or all mandatory ones that are missing.
pub fn parse(members: &Members<'_>) -> Result<NewObject, Invalid> {
    object::parse(members, &["source", "type", "time"], check_fragment)
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

/// Reads the filter's parameters; the first of several with one name counts, unknown ones are left alone. Requests to delete
/// call the fragment `fragmentType`, lists `valueFragmentType`; both are understood.
///
/// # Errors
/// Names the parameter whose value cannot be used.
pub fn filter(query: &Query<'_>) -> Result<Filter, Invalid> {
    Ok(Filter {
        kinds: text_parameter(query, "type")?.into_iter().collect(),
        fragment: text_parameter(query, "valueFragmentType")?.or(text_parameter(query, "fragmentType")?),
        series: text_parameter(query, "valueFragmentSeries")?,
        ..Filter::parse(query, "source")?
    })
}

/// A measurement as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// Its id.
    pub id: u64,
    /// The device.
    pub source: u64,
    /// `type`; it also stands in the body.
    pub kind: Box<str>,
    /// As `rest` of [`NewObject`].
    pub body: Bytes,
}

impl Measurement {
    /// The measurement that `new` becomes.
    #[must_use]
    pub fn created(id: u64, new: NewObject) -> Self {
        Self { id, source: new.source, kind: new.kind, body: new.rest }
    }

    /// Appends the measurement as clients get it, one line; the body of its notification is the same text.
    ///
    /// `base_url` has no slash at its end.
    pub fn render(&self, base_url: &str, out: &mut Vec<u8>) {
        const FIXED: usize = 160;
        out.reserve(self.body.len() + 2 * base_url.len() + FIXED);
        object::open(self.id, base_url, PATH, out);
        object::push_source(self.source, None, base_url, out);
        object::close(&self.body, out);
    }
}

impl Stored for Measurement {
    const TABLE: &'static str = "measurement";
    const COLUMNS: &'static str = "id, source, type, body";
    const NEWEST_FIRST: bool = false;
    const FRAGMENTS_ARE_OBJECTS: bool = true;
    const PLACES: Option<&'static str> = Some("measurement_place");

    /// A range of time or one device reads in the order of time, everything else in that of creation.
    fn in_order_of_time(filter: &Filter) -> bool {
        filter.has_source_or_time()
    }

    fn from_row(row: &SqliteRow) -> sqlx::Result<Self> {
        Ok(Self {
            id: id_column(row, "id")?,
            source: id_column(row, "source")?,
            kind: text_column(row, "type")?,
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

    use std::borrow::Cow;

    use serde_json::Value;

    use super::super::list::Range;
    use super::super::object::{Posted, parse_posted};
    use super::*;
    use crate::json::Limits;

    const TIME_MS: i64 = 1_630_672_141_664;

    fn with(member: &str) -> String {
        format!(r#"{{"source":{{"id":"7"}},"type":"t","time":"2021-09-03T12:29:01.664Z",{member}}}"#)
    }

    fn posted(content_type: Option<&str>, body: &str, limits: &Limits) -> Result<Posted<NewObject>, Invalid> {
        parse_posted(content_type, body.as_bytes(), limits, &NAMES, parse)
    }

    fn single(body: &str) -> Result<NewObject, Invalid> {
        parse(&Members::parse(body.as_bytes(), &Limits::default())?)
    }

    fn bulk(body: &str, limits: &Limits) -> Result<Vec<NewObject>, Invalid> {
        posted(Some("application/vnd.com.nsn.cumulocity.measurementCollection+json;ver=0.9"), body, limits)
            .map(|posted| posted.as_slice().to_vec())
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
        let bulk = |body: &str| bulk(body, &Limits::default());
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
        assert_eq!(bulk(&of(2), &limits).unwrap().len(), 2);
        let refused = bulk(&of(3), &limits).unwrap_err();
        assert_eq!(refused.to_string(), "measurements: has more than 2 elements");
    }

    #[test]
    fn media_type_or_shape_tells_a_collection() {
        let single = "application/vnd.com.nsn.cumulocity.measurement+json";
        let collection = "application/vnd.com.nsn.cumulocity.measurementCollection+json;ver=0.9";
        let one = with("\"measurements\":{}");
        for (content_type, body, bulk) in [
            (None, r#"{"measurements":[]}"#, true),
            (Some("application/json"), r#"{"measurements":[]}"#, true),
            (Some(single), r#"{"measurements":[]}"#, true),
            (Some(collection), r#"{"measurements":[]}"#, true),
            (None, &one, false),
            (Some(single), &one, false),
        ] {
            let is_bulk = matches!(posted(content_type, body, &Limits::default()).unwrap(), Posted::Many(_));
            assert_eq!(is_bulk, bulk, "{content_type:?} {body}");
        }
        let refused = posted(Some(collection), &one, &Limits::default()).unwrap_err();
        assert_eq!(refused.to_string(), "measurements: must be a JSON array");
    }

    fn stored(body: &'static [u8]) -> Measurement {
        Measurement { id: 12, source: 7, kind: "t".into(), body: Bytes::from_static(body) }
    }

    #[test]
    fn a_measurement_is_rendered_on_one_line() {
        let mut out = Vec::new();
        stored(br#""type":"t","c":{}"#).render("http://gate:8080", &mut out);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "{\"id\":\"12\",\"self\":\"http://gate:8080/measurement/measurements/12\",\"source\":{\"id\":\"7\",\
             \"self\":\"http://gate:8080/inventory/managedObjects/7\"},\"type\":\"t\",\"c\":{}}"
        );
    }

    #[test]
    fn a_hostile_base_url_cannot_break_the_json() {
        let mut out = Vec::new();
        stored(b"").render("http://a\"b\\", &mut out);
        let parsed: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(parsed["self"], "http://a\"b\\/measurement/measurements/12");
    }

    fn filter(pairs: &[(&str, &str)]) -> Result<Filter, Invalid> {
        let query: Vec<_> = pairs.iter().map(|(name, value)| (Cow::Borrowed(*name), Cow::Borrowed(*value))).collect();
        super::filter(&query)
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
            kinds: vec!["t".into()],
            time: Range { from_ms: Some(TIME_MS), to_ms: Some(1_630_713_600_000) },
            fragment: Some("c8y_T".into()),
            series: Some("T".into()),
            revert: true,
            ..Filter::default()
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
}
