//! The vectors, natively.

use rate_limit::RateLimit;

#[test]
fn vectors() {
    vectors::filter("rate-limit", RateLimit::parse, |filter, message| {
        filter.passes(&message.source, message.time.as_deref())
    });
}
