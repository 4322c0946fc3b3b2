//! The vectors, natively.

use geofence::{Geofence, Position};

#[test]
fn vectors() {
    vectors::filter("geofence", Geofence::parse, |filter, message| {
        let [lat, lng] = filter.pointers().map(|pointer| message.number(&pointer));
        let position = lat.zip(lng).map(|(lat, lng)| Position { lat, lng });
        filter.passes(&message.source, position)
    });
}
