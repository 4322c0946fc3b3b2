//! The vectors, natively.

use unit_conversion::UnitConversion;

#[test]
fn vectors() {
    vectors::transform("unit-conversion", UnitConversion::parse, |conversion, body| {
        Ok(conversion.apply(body)?.unwrap_or_else(|| body.to_owned()))
    });
}
