//! The vectors, natively.

use deadband::Deadband;

#[test]
fn vectors() {
    vectors::filter("deadband", Deadband::parse, |filter, message| {
        let value = message.number(filter.pointer());
        filter.passes(&message.source, value)
    });
}
