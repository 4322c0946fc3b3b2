//! Times as the platform's clients write them, in milliseconds since 1970.

use jiff::Timestamp;
use jiff::fmt::temporal::DateTimePrinter;

/// Why a text is not a usable time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TimeError {
    /// Not ISO 8601, or without a zone.
    #[error("must be a date and time with a zone in ISO 8601, such as 2021-09-03T12:29:01.664Z")]
    Syntax,
    /// The same, where a date will do as well.
    #[error(
        "must be a date, or a date and time with a zone in ISO 8601, such as 2021-09-03T12:29:01.664Z; a + in a query is written %2B"
    )]
    DateSyntax,
    /// A time that no device means.
    #[error("must lie in the years 1970 to 2261")]
    Range,
}

/// 2262-01-01T00:00:00Z; later times do not fit the nanoseconds of many clients.
const END_MS: i64 = 9_214_646_400_000;
/// Longest text that is looked at, in bytes.
const MAX_LEN: usize = 64;

/// Parses an ISO 8601 date and time with `Z` or an offset (`+02:00`, `+0200`, `+02`); finer fractions than milliseconds are cut.
///
/// # Errors
/// See [`TimeError`].
pub fn parse(text: &str) -> Result<i64, TimeError> {
    // The parser would also take, and ignore, RFC 9557 annotations in brackets.
    if text.len() > MAX_LEN || text.contains('[') {
        return Err(TimeError::Syntax);
    }
    in_range(text.parse().map_err(|_| TimeError::Syntax)?)
}

/// Parses what queries may give: a time as [`parse`] takes it, or a date, which is its first moment in UTC.
///
/// # Errors
/// See [`TimeError`].
pub fn parse_date_or_time(text: &str) -> Result<i64, TimeError> {
    const DATE_LEN: usize = "2021-09-03".len();
    let time = if text.len() == DATE_LEN { &format!("{text}T00:00:00Z") } else { text };
    parse(time).map_err(|error| if error == TimeError::Syntax { TimeError::DateSyntax } else { error })
}

fn in_range(time: Timestamp) -> Result<i64, TimeError> {
    let ms = time.as_millisecond();
    if time < Timestamp::UNIX_EPOCH || ms >= END_MS {
        return Err(TimeError::Range);
    }
    Ok(ms)
}

/// Appends `ms` as `2021-09-03T12:29:01.664Z`; a time outside the years 1970 to 2261 as the nearest one inside.
pub fn write(ms: i64, out: &mut Vec<u8>) {
    const PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));
    let time = Timestamp::from_millisecond(ms.clamp(0, END_MS - 1)).expect("invariant: the range lies within jiff's");
    PRINTER.print_timestamp(&time, out).expect("invariant: writing to memory succeeds");
}

/// `ms` as [`write()`] writes it.
#[must_use]
pub fn text(ms: i64) -> String {
    let mut out = Vec::new();
    write(ms, &mut out);
    String::from_utf8(out).expect("invariant: a time is ASCII")
}

/// A length of time in its two largest units, as `3 h 12 min`.
#[must_use]
pub fn span(seconds: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    let at = UNITS.iter().position(|(unit, _)| seconds >= *unit).unwrap_or(UNITS.len() - 1);
    let (unit, name) = UNITS[at];
    match UNITS.get(at + 1) {
        Some((next, next_name)) if seconds % unit >= *next => {
            format!("{} {name} {} {next_name}", seconds / unit, seconds % unit / next)
        }
        _ => format!("{} {name}", seconds / unit),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_forms_of_clients_are_understood() {
        for text in [
            "2021-09-03T12:29:01.664Z",
            "2021-09-03T14:29:01.664+02:00",
            "2021-09-03T14:29:01.664+0200",
            "2021-09-03T14:29:01.664+02",
            "2021-09-03T07:59:01.664-04:30",
            "2021-09-03T12:29:01.664999999Z",
            "2021-09-03T12:29:01.664000+00:00",
        ] {
            assert_eq!(parse(text), Ok(1_630_672_141_664), "{text}");
        }
        assert_eq!(parse("2021-09-03T12:29:01Z"), Ok(1_630_672_141_000));
        assert_eq!(parse("2021-09-03T12:29Z"), Ok(1_630_672_140_000));
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "now",
            "2021-09-03",
            "2021-09-03T12:29:01.664",
            "2021-13-03T12:29:01Z",
            "2021-09-03T25:29:01Z",
            "2021-09-03T12:29:01Z ",
            "2021-09-03T12:29:01Z[Europe/Berlin]",
            "1630672141664",
        ] {
            assert_eq!(parse(text), Err(TimeError::Syntax), "{text}");
        }
        assert_eq!(parse(&format!("2021-09-03T12:29:01.{}Z", "0".repeat(99))), Err(TimeError::Syntax));
    }

    #[test]
    fn years_are_limited() {
        assert_eq!(parse("1970-01-01T00:00:00Z"), Ok(0));
        assert_eq!(parse("1969-12-31T23:59:59.9999Z"), Err(TimeError::Range));
        assert_eq!(parse("2261-12-31T23:59:59.999Z"), Ok(END_MS - 1));
        assert_eq!(parse("2262-01-01T00:00:00Z"), Err(TimeError::Range));
        assert_eq!(parse("9999-01-01T00:00:00Z"), Err(TimeError::Range));
    }

    #[test]
    fn queries_may_give_a_date() {
        assert_eq!(parse_date_or_time("2021-09-03"), Ok(1_630_627_200_000));
        assert_eq!(parse_date_or_time("2021-09-03T12:29:01.664Z"), Ok(1_630_672_141_664));
        assert_eq!(parse_date_or_time("2021-02-30"), Err(TimeError::DateSyntax));
        assert_eq!(parse_date_or_time("2021-09-03T12:29:01 01:00"), Err(TimeError::DateSyntax));
        assert_eq!(parse_date_or_time("1969-09-03"), Err(TimeError::Range));
    }

    #[test]
    fn milliseconds_are_always_text() {
        assert_eq!(text(1_630_672_141_664), "2021-09-03T12:29:01.664Z");
        assert_eq!(text(1_630_672_141_000), "2021-09-03T12:29:01.000Z");
        assert_eq!(text(-1), "1970-01-01T00:00:00.000Z");
        assert_eq!(text(i64::MAX), "2261-12-31T23:59:59.999Z");
    }

    proptest! {
        #[test]
        fn written_times_are_read_back(ms in 0..END_MS) {
            prop_assert_eq!(parse(&text(ms)), Ok(ms));
        }
    }

    #[test]
    fn a_span_has_its_two_largest_units() {
        for (seconds, text) in [
            (0, "0 s"),
            (59, "59 s"),
            (60, "1 min"),
            (61, "1 min 1 s"),
            (11_520, "3 h 12 min"),
            (7_259, "2 h"),
            (90_000, "1 d 1 h"),
            (86_400 * 400, "400 d"),
        ] {
            assert_eq!(span(seconds), text);
        }
    }
}
