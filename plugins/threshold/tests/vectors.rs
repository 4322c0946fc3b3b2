//! The vectors, natively.

use threshold::Threshold;

#[test]
fn vectors() {
    vectors::filter("threshold", Threshold::parse, |filter, message| {
        let value = message.number(filter.pointer());
        filter.passes(&message.source, value)
    });
}
