//! Times as producers write them. The gateway has checked them, so that reading them takes little.

/// Milliseconds since 1970 of an ISO 8601 date and time with `Z` or an offset (`+02:00`, `+0200`, `+02`).
pub(crate) fn parse(text: &str) -> Option<i64> {
    let (date, rest) = text.split_once(['T', 't', ' '])?;
    let (clock, zone) = rest.split_at(rest.find(['Z', 'z', '+', '-'])?);
    let minutes = days(date)? * 24 * 60 - offset(zone)?;
    let mut clock = clock.split(':');
    let (hour, minute) = (number(clock.next()?)?, number(clock.next()?)?);
    let seconds: f64 = clock.next().unwrap_or("0").replace(',', ".").parse().ok()?;
    Some((minutes + hour * 60 + minute) * 60_000 + (seconds * 1000.0) as i64)
}

fn number(digits: &str) -> Option<i64> {
    digits.parse().ok()
}

/// Days since 1970 of `2026-01-01`. Years begin in March here, so that the leap day is the last one.
fn days(date: &str) -> Option<i64> {
    let mut parts = date.split('-').map(number);
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year / 4 - year / 100 + year / 400;
    Some(year * 365 + leap_days + (month * 153 + 2) / 5 + day - 1 - 719_468)
}

/// Minutes east of Greenwich.
fn offset(zone: &str) -> Option<i64> {
    let (sign, digits) = zone.split_at_checked(1)?;
    let digits = digits.replace(':', "");
    let minutes = match digits.split_at_checked(2) {
        Some((hours, minutes)) => number(hours)? * 60 + number(minutes).unwrap_or(0),
        None => 0,
    };
    Some(if sign == "-" { -minutes } else { minutes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (text, ms) in [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01T00:00Z", 0),
            ("1970-03-01T00:00:00.000Z", 59 * 86_400_000),
            ("2000-02-29T12:00:00.5Z", 951_825_600_500),
            ("2000-03-01T00:00:00Z", 951_868_800_000),
            ("2100-03-01T00:00:00Z", 4_107_542_400_000),
            ("2021-09-03T12:29:01.664Z", 1_630_672_141_664),
            ("2021-09-03T14:29:01.664+02:00", 1_630_672_141_664),
            ("2021-09-03T14:29:01,664+0200", 1_630_672_141_664),
            ("2021-09-03T14:29:01.664+02", 1_630_672_141_664),
            ("2021-09-03T06:59:01.664-05:30", 1_630_672_141_664),
        ] {
            assert_eq!(parse(text), Some(ms), "{text}");
        }
        for wrong in ["", "2021-09-03", "2021-09-03T12:29:01", "soon", "T+", "-T:Z", "2021-09-03T12:29:01+é"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
