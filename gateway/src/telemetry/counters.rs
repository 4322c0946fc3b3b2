//! What is counted and timed where it happens. Handles of what happens often are looked up once; everything that can be known
//! before it happens stands at 0 from the start, so that a rate sees the first time.

use std::sync::LazyLock;

use hyper::StatusCode;
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

const IGNORED: [&str; 3] = ["unknown", "garbage", "binary"];
const DROPPED: [&str; 6] = ["expired", "evicted", "parked", "lag", "plugin_fault", "subscription_deleted"];
const LOGINS: [&str; 5] = ["credentials", "missing", "busy", "token", "token_expired"];
const REFUSED: [&str; 9] =
    ["quota", "frame", "fan_out", "ancestors", "full", "unwritable", "locked", "failed", "stopping"];
const FAILED: [&str; 4] = ["full", "unwritable", "locked", "failed"];
const PUSHES: [&str; 6] = ["delivered", "refused", "unavailable", "timeout", "unreachable", "forbidden"];
const LOST: [&str; 2] = ["no_room", "slow"];
const CONNECTIONS: [&str; 3] = ["http", "https", "websocket"];

static OFTEN: LazyLock<Often> = LazyLock::new(|| Often {
    messages_appended: counter!("tidegate_messages_appended_total"),
    messages_delivered: counter!("tidegate_messages_delivered_total"),
    messages_redelivered: counter!("tidegate_messages_redelivered_total"),
    messages_acknowledged: counter!("tidegate_messages_acknowledged_total"),
    objects_stored: counter!("tidegate_objects_stored_total"),
    commit_seconds: histogram!("tidegate_commit_seconds"),
    commit_commands: histogram!("tidegate_commit_commands"),
    responses: ["1xx", "2xx", "3xx", "4xx", "5xx"]
        .map(|class| counter!("tidegate_http_responses_total", "class" => class)),
});

/// What happens often.
pub(crate) struct Often {
    pub(crate) messages_appended: Counter,
    pub(crate) messages_delivered: Counter,
    pub(crate) messages_redelivered: Counter,
    pub(crate) messages_acknowledged: Counter,
    /// Measurements and events.
    pub(crate) objects_stored: Counter,
    pub(crate) commit_seconds: Histogram,
    pub(crate) commit_commands: Histogram,
    /// By the first digit of the status, from 1 on.
    responses: [Counter; 5],
}

/// The handles of what happens often.
pub(crate) fn count() -> &'static Often {
    &OFTEN
}

impl Often {
    /// An answer over HTTP.
    pub(crate) fn response(&self, status: StatusCode) {
        if let Some(counter) = self.responses.get(usize::from(status.as_u16() / 100).wrapping_sub(1)) {
            counter.increment(1);
        }
    }
}

pub(super) fn register() {
    LazyLock::force(&OFTEN);
    at_zero(acknowledgements_ignored, &IGNORED);
    at_zero(messages_dropped, &DROPPED);
    at_zero(logins_refused, &LOGINS);
    at_zero(requests_refused, &REFUSED);
    at_zero(commits_failed, &FAILED);
    at_zero(push_requests, &PUSHES);
    at_zero(answers_lost, &LOST);
    unsent_bytes().set(0.0);
    tls_handshakes_failed().increment(0);
    canaries_rolled_back().increment(0);
    for kind in CONNECTIONS {
        connections(kind).set(0.0);
    }
}

/// A counter exists once it was named.
pub(crate) fn at_zero(counter: impl Fn(&'static str) -> Counter, values: &[&'static str]) {
    for value in values {
        counter(value).increment(0);
    }
}

/// Texts of a consumer that acknowledge nothing.
pub(crate) fn acknowledgements_ignored(reason: &'static str) -> Counter {
    counter!("tidegate_acks_ignored_total", "reason" => reason)
}

/// Messages that a consumer should have got, and will not; once for each consumer.
pub(crate) fn messages_dropped(reason: &'static str) -> Counter {
    counter!("tidegate_messages_dropped_total", "reason" => reason)
}

pub(crate) fn logins_refused(reason: &'static str) -> Counter {
    counter!("tidegate_logins_refused_total", "reason" => reason)
}

/// Requests of producers that the line did not carry out as asked.
pub(crate) fn requests_refused(reason: &'static str) -> Counter {
    counter!("tidegate_requests_refused_total", "reason" => reason)
}

pub(crate) fn commits_failed(reason: &'static str) -> Counter {
    counter!("tidegate_commit_failures_total", "reason" => reason)
}

/// Requests to endpoints of push consumers.
pub(crate) fn push_requests(outcome: &'static str) -> Counter {
    counter!("tidegate_push_requests_total", "outcome" => outcome)
}

/// Canaries that were taken back since they failed too often.
pub(crate) fn canaries_rolled_back() -> Counter {
    counter!("tidegate_canaries_rolled_back_total")
}

pub(crate) fn tls_handshakes_failed() -> Counter {
    counter!("tidegate_tls_handshakes_failed_total")
}

/// Answers that clients did not get, or not whole, since they or others read too slowly.
pub(crate) fn answers_lost(reason: &'static str) -> Counter {
    counter!("tidegate_answers_lost_total", "reason" => reason)
}

fn unsent_bytes() -> Gauge {
    gauge!("tidegate_unsent_bytes")
}

/// Counts the bytes of a large answer while it lives.
pub(crate) struct UnsentBytes(f64);

impl UnsentBytes {
    pub(crate) fn new(bytes: usize) -> Self {
        let bytes = bytes as f64;
        unsent_bytes().increment(bytes);
        Self(bytes)
    }
}

impl Drop for UnsentBytes {
    fn drop(&mut self) {
        unsent_bytes().decrement(self.0);
    }
}

fn connections(kind: &'static str) -> Gauge {
    gauge!("tidegate_connections", "kind" => kind)
}

/// Counts as one of its kind while it lives.
pub(crate) struct Connected(Gauge);

impl Connected {
    pub(crate) fn new(kind: &'static str) -> Self {
        let gauge = connections(kind);
        gauge.increment(1.0);
        Self(gauge)
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}
