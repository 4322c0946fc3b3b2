//! The keys by name, and what each accepts. A value is checked where it comes from, so that an error can say where that is.

use std::fmt;
use std::ops::RangeInclusive;

use ::config::{Value, ValueKind};
use tracing_subscriber::EnvFilter;

use super::ListenAddr;
use crate::outbound::Networks;

/// What a key accepts.
#[derive(Debug)]
pub(super) enum Kind {
    /// A whole number.
    Number(RangeInclusive<u64>),
    /// An IP address and a port, or `off`.
    Address,
    /// `true` or `false`.
    Flag,
    /// An absolute `http` or `https` URL.
    Url,
    /// Origins of web pages, separated by commas.
    Origins,
    /// Networks and addresses, separated by commas.
    Networks,
    /// A path.
    Path,
    /// A filter of log lines.
    Filter,
    /// One of these words.
    Choice(&'static [&'static str]),
}

/// Where a value was written; the environment knows only text.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Medium {
    File,
    Environment,
}

const KIB: u64 = 1_024;
const MIB: u64 = 1_024 * KIB;
const GIB: u64 = 1_024 * MIB;

/// Every key. Byte ranges end where a value would no longer be a limit on a gateway with a few gigabytes of memory.
pub(super) const KEYS: &[(&str, Kind)] = &[
    ("http.addr", Kind::Address),
    ("http.https_addr", Kind::Address),
    ("http.tls_cert", Kind::Path),
    ("http.tls_key", Kind::Path),
    ("http.allow_plain", Kind::Flag),
    ("http.public_url", Kind::Url),
    ("http.cors_origins", Kind::Origins),
    ("limits.body_bytes", Kind::Number(1..=256 * MIB)),
    ("limits.bulk_bytes", Kind::Number(1..=256 * MIB)),
    ("limits.frame_bytes", Kind::Number(256..=64 * MIB)),
    // serde_json stops at 128 levels.
    ("limits.fan_out_messages", Kind::Number(1..=10_000_000)),
    ("limits.fan_out_bytes", Kind::Number(1_024..=268_435_456)),
    ("limits.json_depth", Kind::Number(1..=127)),
    ("limits.bulk_count", Kind::Number(1..=1_000_000)),
    ("limits.connections", Kind::Number(1..=1_000_000)),
    ("limits.objects_per_tenant", Kind::Number(1..=10_000_000)),
    ("limits.links_per_tenant", Kind::Number(1..=100_000_000)),
    ("limits.children_per_object", Kind::Number(1..=1_000_000)),
    ("limits.ancestors", Kind::Number(1..=100_000)),
    ("limits.external_ids_per_object", Kind::Number(1..=10_000)),
    ("limits.tenants", Kind::Number(1..=10_000)),
    ("limits.users_per_tenant", Kind::Number(1..=10_000)),
    ("limits.subscriptions_per_tenant", Kind::Number(1..=1_000_000)),
    ("limits.topics_per_tenant", Kind::Number(1..=1_000_000)),
    ("limits.consumers_per_topic", Kind::Number(1..=10_000)),
    ("limits.clients_per_consumer", Kind::Number(1..=1_000)),
    ("limits.push_consumers", Kind::Number(1..=10_000)),
    ("limits.admission", Kind::Number(1..=1_000_000)),
    ("limits.request_seconds", Kind::Number(1..=3_600)),
    ("limits.unsent_bytes", Kind::Number(MIB..=GIB)),
    ("limits.answer_bytes_per_second", Kind::Number(1..=MIB)),
    ("backlog.quota_bytes", Kind::Number(1..=1_024 * GIB)),
    ("backlog.ttl_seconds", Kind::Number(1..=1_000_000_000)),
    ("backlog.tail_bytes", Kind::Number(0..=GIB)),
    ("backlog.volatile_bytes", Kind::Number(1..=GIB)),
    ("consumer.window", Kind::Number(1..=10_000)),
    ("consumer.idle_seconds", Kind::Number(1..=86_400)),
    ("consumer.dead_seconds", Kind::Number(1..=3_600)),
    ("push.allowed_networks", Kind::Networks),
    ("push.allow_plain", Kind::Flag),
    ("push.ca", Kind::Path),
    ("push.connections_per_endpoint", Kind::Number(1..=1_000)),
    ("push.timeout_seconds", Kind::Number(1..=600)),
    ("push.retry_seconds", Kind::Number(1..=86_400)),
    ("plugins.builtin_dir", Kind::Path),
    ("plugins.engine", Kind::Choice(&["auto", "cranelift", "pulley"])),
    ("plugins.memory_bytes", Kind::Number(64 * KIB..=GIB)),
    ("plugins.script_memory_bytes", Kind::Number(64 * KIB..=GIB)),
    ("plugins.stack_bytes", Kind::Number(16 * KIB..=8 * MIB)),
    ("plugins.call_ms", Kind::Number(1..=60_000)),
    ("plugins.configure_ms", Kind::Number(1..=60_000)),
    ("plugins.output_bytes", Kind::Number(1..=256 * MIB)),
    ("plugins.copy_bytes", Kind::Number(1..=256 * MIB)),
    ("plugins.instances", Kind::Number(1..=10_000)),
    ("plugins.idle_seconds", Kind::Number(1..=86_400)),
    ("plugins.max_bytes", Kind::Number(64 * KIB..=256 * MIB)),
    ("plugins.max_instances", Kind::Number(1..=1_000)),
    ("plugins.compile_seconds", Kind::Number(1..=3_600)),
    ("plugins.compile_bytes", Kind::Number(64 * MIB..=64 * GIB)),
    ("plugins.canary_messages", Kind::Number(1..=1_000_000)),
    ("plugins.canary_fault_percent", Kind::Number(0..=100)),
    ("plugins.versions_per_tenant", Kind::Number(1..=10_000)),
    ("plugins.tenant_bytes", Kind::Number(1..=1_024 * GIB)),
    ("plugins.retry_seconds", Kind::Number(1..=86_400)),
    ("plugins.quarantine_faults", Kind::Number(1..=1_000_000)),
    ("plugins.quarantine_seconds", Kind::Number(1..=86_400)),
    ("retention.measurements_days", Kind::Number(1..=36_500)),
    ("retention.events_days", Kind::Number(1..=36_500)),
    ("retention.alarms_days", Kind::Number(1..=36_500)),
    ("retention.operations_days", Kind::Number(1..=36_500)),
    ("store.max_bytes", Kind::Number(MIB..=1_024 * GIB)),
    ("store.reserve_bytes", Kind::Number(0..=1_024 * GIB)),
    // The log is 4 MiB long at all times.
    ("store.wal_bytes", Kind::Number(8 * MIB..=1_024 * GIB)),
    ("store.read_seconds", Kind::Number(1..=3_600)),
    ("store.durability", Kind::Choice(&["commit", "second"])),
    ("metrics.public", Kind::Flag),
    ("metrics.topics", Kind::Number(0..=1_000_000)),
    ("metrics.consumers", Kind::Number(0..=1_000_000)),
    ("log.filter", Kind::Filter),
    ("log.format", Kind::Choice(&["text", "json"])),
];

/// The kind of a key; `None` when there is no such key.
pub(super) fn kind(key: &str) -> Option<&'static Kind> {
    KEYS.iter().find(|(known, _)| *known == key).map(|(_, kind)| kind)
}

/// What a key that is a number may be, for whoever accepts the same value elsewhere.
pub(crate) fn range(key: &str) -> RangeInclusive<u64> {
    match kind(key) {
        Some(Kind::Number(range)) => range.clone(),
        _ => unreachable!("{key} is not a number"),
    }
}

/// The known key that looks most like `key`, as a whole or without its section.
pub(super) fn nearest(key: &str) -> &'static str {
    let distance = |known: &str| {
        let name = known.split_once('.').map_or(known, |(_, name)| name);
        strsim::damerau_levenshtein(key, known).min(strsim::damerau_levenshtein(key, name))
    };
    KEYS.iter().map(|(known, _)| *known).min_by_key(|known| distance(known)).expect("invariant: there are keys")
}

impl Kind {
    /// Whether `value` is of this kind and in its range.
    pub(super) fn accepts(&self, value: &Value, medium: Medium) -> bool {
        match (self, &value.kind) {
            (Self::Number(range), ValueKind::I64(number)) => {
                u64::try_from(*number).is_ok_and(|number| range.contains(&number))
            }
            (Self::Number(range), ValueKind::String(text)) if medium == Medium::Environment => {
                text.parse().is_ok_and(|number| range.contains(&number))
            }
            (Self::Address, ValueKind::String(text)) => text.parse::<ListenAddr>().is_ok(),
            (Self::Flag, ValueKind::Boolean(_)) => true,
            (Self::Flag, ValueKind::String(text)) if medium == Medium::Environment => {
                matches!(text.as_str(), "true" | "false")
            }
            (Self::Url, ValueKind::String(text)) => is_url(text),
            (Self::Origins, ValueKind::String(text)) => text.split(',').all(|origin| is_origin(origin.trim())),
            (Self::Networks, ValueKind::String(text)) => Networks::parse(text).is_some(),
            (Self::Path, ValueKind::String(text)) => !text.is_empty() && !text.contains('\0'),
            (Self::Filter, ValueKind::String(text)) => !text.is_empty() && EnvFilter::try_new(text).is_ok(),
            (Self::Choice(words), ValueKind::String(text)) => words.contains(&text.as_str()),
            _ => false,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(range) => write!(f, "a whole number from {} to {}", range.start(), range.end()),
            Self::Address => f.write_str("an IP address and a port, as in 127.0.0.1:8080, or off"),
            Self::Flag => f.write_str("true or false"),
            Self::Url => {
                f.write_str("an http or https URL without query and fragment, as in https://gateway.example:8443/edge1")
            }
            Self::Origins => f.write_str(
                "http or https origins, separated by commas, as in https://a.example,https://b.example:8443",
            ),
            Self::Networks => {
                f.write_str("networks or IP addresses, separated by commas, as in 10.0.0.0/8,fd00::/8,192.168.1.7")
            }
            Self::Path => f.write_str("a path"),
            Self::Filter => f.write_str("a log filter, as in info or warn,tidegate=debug"),
            Self::Choice(words) => f.write_str(&words.join(" or ")),
        }
    }
}

/// Scheme, host, perhaps port and path: links are this and an absolute path.
fn is_url(text: &str) -> bool {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    rest.is_some_and(|rest| {
        !rest.is_empty()
            && !rest.starts_with('/')
            && rest.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#@,\"<>\\".contains(&byte))
    })
}

/// A URL without a path, not even a slash: browsers write an origin so.
fn is_origin(text: &str) -> bool {
    is_url(text) && text.bytes().filter(|byte| *byte == b'/').count() == 2
}
