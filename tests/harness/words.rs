//! The JSON that the scenes are made of.

use serde_json::{Value, json};

/// `time` of events and alarms.
pub(crate) const TIME: &str = "2026-11-01T12:00:00.000Z";

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
    of_object(topic, device, &["measurements"])
}

/// [`forwarded`] with a filter on the type.
pub(crate) fn typed(topic: &str, device: &str, type_filter: &str) -> Value {
    let mut subscription = forwarded(topic, device);
    subscription["subscriptionFilter"]["typeFilter"] = json!(type_filter);
    subscription
}

/// An event of `kind`.
pub(crate) fn event(device: &str, kind: &str, text: &str) -> Value {
    json!({"source": {"id": device}, "type": kind, "text": text, "time": TIME})
}

/// An alarm of `kind`, which is ACTIVE.
pub(crate) fn alarm(device: &str, kind: &str, severity: &str) -> Value {
    json!({"source": {"id": device}, "type": kind, "text": "Too hot", "time": TIME, "severity": severity})
}

/// An operation for a device.
pub(crate) fn operation(device: &str) -> Value {
    json!({"deviceId": device, "description": "Restart", "c8y_Restart": {}})
}

/// A subscription to some APIs of one object.
pub(crate) fn of_object(topic: &str, device: &str, apis: &[&str]) -> Value {
    let filter = json!({"apis": apis});
    json!({"context": "mo", "source": {"id": device}, "subscription": topic, "subscriptionFilter": filter})
}

/// A subscription to some APIs of the whole tenant.
pub(crate) fn of_tenant(topic: &str, apis: &[&str]) -> Value {
    json!({"context": "tenant", "subscription": topic, "subscriptionFilter": {"apis": apis}})
}
