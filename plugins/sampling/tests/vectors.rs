//! The vectors, natively.

use sampling::Sampling;

#[test]
fn vectors() {
    vectors::filter("sampling", Sampling::parse, |filter, message| filter.passes(&message.source));
}
