//! The JSON that the scenes are made of.

use serde_json::{Value, json};

/// A measurement of `kind` whose one series holds `value`.
pub(crate) fn measurement(device: &str, kind: &str, value: u64) -> Value {
    json!({
        "source": {"id": device},
        "type": kind,
        "time": "2026-03-01T12:00:00.000Z",
        "c8y_Reading": {"R": {"value": value, "unit": "C"}},
    })
}

/// The value that [`measurement`] put in.
pub(crate) fn value_of(measurement: &Value) -> u64 {
    measurement["c8y_Reading"]["R"]["value"].as_u64().unwrap_or_else(|| panic!("no reading in {measurement}"))
}

/// A subscription that forwards the measurements of a device to a topic.
pub(crate) fn forwarded(topic: &str, device: &str) -> Value {
    json!({
        "context": "mo",
        "source": {"id": device},
        "subscription": topic,
        "subscriptionFilter": {"apis": ["measurements"]},
    })
}

/// [`forwarded`] with a filter on the type.
pub(crate) fn typed(topic: &str, device: &str, type_filter: &str) -> Value {
    let mut subscription = forwarded(topic, device);
    subscription["subscriptionFilter"]["typeFilter"] = json!(type_filter);
    subscription
}
