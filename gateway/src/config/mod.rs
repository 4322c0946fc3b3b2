//! The configuration: every default and every limit of the gateway, with its unit and what happens at it.
//!
//! Later sources win: the defaults here, a TOML file, the environment (`TIDEGATE_<SECTION>__<KEY>`), flags (applied by the
//! caller). `docs/configuration.md` is the reference for operators; a test compares it with this module.

mod keys;
mod load;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub(crate) use keys::range;
pub use load::ConfigError;

/// Everything that can be configured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The HTTP listeners.
    pub http: Http,
    /// Limits on what clients send and create.
    pub limits: Limits,
    /// Messages that wait for consumers.
    pub backlog: Backlog,
    /// Connections of consumers.
    pub consumer: Consumer,
    /// Messages that are pushed to endpoints.
    pub push: Push,
    /// The sandbox of plugins.
    pub plugins: Plugins,
    /// How long objects are kept.
    pub retention: Retention,
    /// The file that holds everything.
    pub store: Store,
    /// What operators' tools see.
    pub metrics: Metrics,
    /// The log.
    pub log: Log,
}

/// `http`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Http {
    /// Where plain HTTP is spoken.
    pub addr: ListenAddr,
    /// Where HTTP over TLS is spoken.
    pub https_addr: ListenAddr,
    /// PEM file with the certificate of the TLS listeners, and those that lead from it to the root.
    pub tls_cert: Option<PathBuf>,
    /// PEM file with the private key of that certificate.
    pub tls_key: Option<PathBuf>,
    /// Whether plain HTTP may be spoken off loopback, where others can read passwords.
    pub allow_plain: bool,
    /// How clients reach the gateway, as in `https://gateway.example:8443/edge1`; stands in `self` links. Without it the `Host` of
    /// the request does.
    pub public_url: Option<String>,
    /// Origins, separated by commas, whose pages may use the API from a browser.
    pub cors_origins: Option<String>,
}

/// Where a listener listens, if it does. As text, an IP address and a port, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ListenAddr {
    /// Nowhere.
    Off,
    /// Here; port 0 picks a free one.
    At(SocketAddr),
}

impl ListenAddr {
    /// The address of a listener that is not off.
    #[must_use]
    pub fn at(self) -> Option<SocketAddr> {
        match self {
            Self::Off => None,
            Self::At(addr) => Some(addr),
        }
    }
}

impl FromStr for ListenAddr {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            _ => text
                .parse()
                .map(Self::At)
                .map_err(|_| "neither an IP address and a port, as in 127.0.0.1:8080, nor off"),
        }
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::At(addr) => addr.fmt(f),
        }
    }
}

impl TryFrom<String> for ListenAddr {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ListenAddr> for String {
    fn from(addr: ListenAddr) -> Self {
        addr.to_string()
    }
}

impl Http {
    /// Whether pages of this origin may use the API.
    #[must_use]
    pub fn allows_origin(&self, origin: &str) -> bool {
        self.cors_origins.iter().flat_map(|origins| origins.split(',')).any(|allowed| allowed.trim() == origin)
    }
}

/// `limits`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Bytes of a request body; a longer one is 413.
    pub body_bytes: usize,
    /// Bytes of the body of a bulk request; a longer one is 413.
    pub bulk_bytes: usize,
    /// Bytes of a notification with its header lines; a request that would make a longer one is 413 and stores nothing.
    pub frame_bytes: usize,
    /// Messages that a request appends to all topics together; one that would append more is 413 and stores nothing.
    pub fan_out_messages: usize,
    /// Bytes of these messages' bodies, before they are shaped; one that would append more is 413 and stores nothing.
    pub fan_out_bytes: usize,
    /// Levels of nesting in a JSON body; a deeper one is 422.
    pub json_depth: usize,
    /// Objects in a bulk request, or in a hierarchy that one request deletes; more are 422.
    pub bulk_count: usize,
    /// Open connections of a listener; the next ones wait in the kernel until one ends.
    pub connections: usize,
    /// Managed objects of a tenant; the next one is 422.
    pub objects_per_tenant: usize,
    /// Links between managed objects of a tenant; a request that would make more is 422.
    pub links_per_tenant: usize,
    /// Children of a managed object, of all kinds together; a request that would make more is 422.
    pub children_per_object: usize,
    /// Managed objects above another; a child that would have more is 422, and so is a message of one that has, where a
    /// subscription follows children.
    pub ancestors: usize,
    /// External ids of a managed object; the next one is 422.
    pub external_ids_per_object: usize,
    /// Tenants, with those that were removed, whose names are not given again; the next one is 422.
    pub tenants: usize,
    /// Users of a tenant; the next one is 422.
    pub users_per_tenant: usize,
    /// Subscriptions of a tenant; the next one is 422.
    pub subscriptions_per_tenant: usize,
    /// Topics of a tenant; a consumer whose first connect would make the next one is 503.
    pub topics_per_tenant: usize,
    /// Consumers of a topic, connected or not; the next one to connect is 503.
    pub consumers_per_topic: usize,
    /// Clients that share a consumer; the next one is 503.
    pub clients_per_consumer: usize,
    /// Push consumers of all tenants together; the next one is 422.
    pub push_consumers: usize,
    /// Requests of a tenant that wait for their turn; the next ones wait before they queue.
    pub admission: usize,
    /// Seconds for a request's head to arrive, or the connection is closed; then for its body, or it is 408.
    pub request_seconds: u64,
    /// Bytes of answers that are longer than 64 KiB and not read yet; where the next one has no room it is 503.
    pub unsent_bytes: usize,
    /// Bytes per second that a client has to take of an answer; one that takes less over `request_seconds` is cut off.
    pub answer_bytes_per_second: u64,
}

/// `backlog`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Backlog {
    /// Stored bytes of a topic; a request that would pass it is 500 and appends nothing.
    pub quota_bytes: u64,
    /// Seconds after which a message is deleted, acknowledged or not.
    pub ttl_seconds: u64,
    /// Bytes of message bodies kept in memory for live consumers; older ones are read from the store.
    pub tail_bytes: usize,
    /// Bytes of a non-persistent topic; beyond it the oldest messages go, whoever has not seen them.
    pub volatile_bytes: u64,
}

/// `consumer`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Consumer {
    /// Messages sent and not yet acknowledged on a connection; delivery pauses there.
    pub window: usize,
    /// Seconds without a text frame in either direction and without a ping of the client; then the connection is closed.
    pub idle_seconds: u64,
    /// Seconds without an answer of the peer's TCP; then the connection is closed and its place is free.
    pub dead_seconds: u64,
}

/// `push`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Push {
    /// Networks and addresses, separated by commas, that may be reached though they are not of the public internet, and over
    /// plain HTTP.
    pub allowed_networks: Option<String>,
    /// Whether plain HTTP may be spoken with the public internet, where others can read the messages.
    pub allow_plain: bool,
    /// PEM file with the certificates that are trusted, in place of those that the system trusts.
    pub ca: Option<PathBuf>,
    /// Requests to one scheme, host and port at a time; the next ones wait for their turn.
    pub connections_per_endpoint: usize,
    /// Seconds for an endpoint to answer; then the request has failed.
    pub timeout_seconds: u64,
    /// Seconds between two attempts at most, unless the endpoint asks for more.
    pub retry_seconds: u64,
}

/// `plugins`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plugins {
    /// What runs WebAssembly.
    pub engine: PluginEngine,
    /// Directory with the components of the built-in plugins, in place of those in the program.
    pub builtin_dir: Option<PathBuf>,
    /// Bytes of linear memory of an instance; asking for more is a fault.
    pub memory_bytes: usize,
    /// The same of an instance that runs a script.
    pub script_memory_bytes: usize,
    /// Bytes of stack of a call; past it the call is a fault.
    pub stack_bytes: usize,
    /// Milliseconds of processor time of a call; past it the call is a fault.
    pub call_ms: u64,
    /// The same of the start and the configuration of an instance; never less than `call_ms`.
    pub configure_ms: u64,
    /// Bytes of one body that a transform returns; more are a fault of that message.
    pub output_bytes: usize,
    /// Bytes that a call may make the gateway copy out of a plugin; more are a fault.
    pub copy_bytes: usize,
    /// Instances over all subscriptions; past it the longest unused one of the tenant that has most goes.
    pub instances: usize,
    /// Seconds after which an unused instance goes.
    pub idle_seconds: u64,
    /// Bytes of a component; a longer one is refused.
    pub max_bytes: u64,
    /// Core instances of a component; one with more fails when it is configured.
    pub max_instances: usize,
    /// Seconds of processor time that compiling a component may take; past it the component is refused.
    pub compile_seconds: u64,
    /// Bytes of memory that the compiler may use; past it the component is refused.
    pub compile_bytes: u64,
    /// Messages that a canary judges before it may be taken back.
    pub canary_messages: u64,
    /// Percent of the messages that a canary may fail on; with more it is taken back.
    pub canary_fault_percent: u64,
    /// Versions of plugins that a tenant may upload; the next one is refused.
    pub versions_per_tenant: u64,
    /// Bytes of them all; an upload that passes it is refused.
    pub tenant_bytes: u64,
    /// Longest pause in seconds between two attempts at messages that a plugin failed on.
    pub retry_seconds: u64,
    /// Failed calls, or refusals in a row, within `quarantine_seconds` after which a plugin is asked no more.
    pub quarantine_faults: u32,
    /// Seconds in which they are counted.
    pub quarantine_seconds: u64,
}

/// What runs WebAssembly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PluginEngine {
    /// Machine code where Cranelift can make it, else the interpreter.
    #[default]
    Auto,
    /// Machine code.
    Cranelift,
    /// The interpreter.
    Pulley,
}

impl PluginEngine {
    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cranelift => "cranelift",
            Self::Pulley => "pulley",
        }
    }
}

/// `retention`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// Days after its time that a measurement is deleted.
    pub measurements_days: u64,
    /// Days after its time that an event is deleted.
    pub events_days: u64,
    /// Days after its time that a cleared alarm is deleted; open ones stay.
    pub alarms_days: u64,
    /// Days after its creation that an operation is deleted.
    pub operations_days: u64,
}

/// `store`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Store {
    /// Bytes of the database; a request that would pass it is 507.
    pub max_bytes: u64,
    /// Bytes that stay free on the disk; a request that would grow the database into them is 507.
    pub reserve_bytes: u64,
    /// Bytes of the write-ahead log; past it, reads that keep it from being reused are given up with 503.
    pub wal_bytes: u64,
    /// Seconds that the read of a list may take; then it is given up with 503.
    pub read_seconds: u64,
    /// When a commit is flushed to the disk.
    pub durability: Durability,
}

/// When commits are flushed to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// Before the producer gets its answer.
    Commit,
    /// Once a second.
    Second,
}

/// `metrics`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// Whether `/metrics` is for everybody, without a login.
    pub public: bool,
    /// Topics that have series of their own.
    pub topics: usize,
    /// Consumers that have series of their own, over all topics.
    pub consumers: usize,
}

/// `log`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Log {
    /// What is logged, in the syntax of `RUST_LOG`: a level, or levels per module.
    pub filter: String,
    /// How a line looks.
    pub format: LogFormat,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

const KIB: usize = 1_024;
const MIB: usize = 1_024 * KIB;

impl Default for Http {
    fn default() -> Self {
        Self {
            addr: ListenAddr::At(SocketAddr::from(([127, 0, 0, 1], 8080))),
            https_addr: ListenAddr::Off,
            tls_cert: None,
            tls_key: None,
            allow_plain: false,
            public_url: None,
            cors_origins: None,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: MIB,
            bulk_bytes: 16 * MIB,
            frame_bytes: MIB,
            fan_out_messages: 100_000,
            fan_out_bytes: 64 * MIB,
            json_depth: 64,
            bulk_count: 10_000,
            connections: 4_096,
            objects_per_tenant: 100_000,
            links_per_tenant: 1_000_000,
            children_per_object: 10_000,
            ancestors: 1_000,
            external_ids_per_object: 100,
            tenants: 100,
            users_per_tenant: 1_000,
            subscriptions_per_tenant: 10_000,
            topics_per_tenant: 10_000,
            consumers_per_topic: 1_000,
            clients_per_consumer: 100,
            push_consumers: 1_000,
            admission: 4_096,
            request_seconds: 30,
            unsent_bytes: 64 * MIB,
            answer_bytes_per_second: 16 * KIB as u64,
        }
    }
}

impl Default for Backlog {
    fn default() -> Self {
        Self {
            quota_bytes: 25 * MIB as u64,
            ttl_seconds: 36 * 60 * 60,
            tail_bytes: 16 * MIB,
            volatile_bytes: MIB as u64,
        }
    }
}

impl Default for Consumer {
    fn default() -> Self {
        Self { window: 1_000, idle_seconds: 300, dead_seconds: 30 }
    }
}

impl Default for Push {
    fn default() -> Self {
        Self {
            allowed_networks: None,
            allow_plain: false,
            ca: None,
            connections_per_endpoint: 4,
            timeout_seconds: 30,
            retry_seconds: 60,
        }
    }
}

impl Default for Plugins {
    fn default() -> Self {
        Self {
            engine: PluginEngine::Auto,
            builtin_dir: None,
            memory_bytes: 16 * MIB,
            script_memory_bytes: 32 * MIB,
            stack_bytes: 256 * KIB,
            call_ms: 50,
            configure_ms: 1000,
            output_bytes: MIB,
            copy_bytes: 4 * MIB,
            instances: 256,
            idle_seconds: 60,
            max_bytes: 4 * MIB as u64,
            max_instances: 20,
            compile_seconds: 60,
            compile_bytes: 1_024 * MIB as u64,
            canary_messages: 20,
            canary_fault_percent: 5,
            versions_per_tenant: 200,
            tenant_bytes: 64 * MIB as u64,
            retry_seconds: 300,
            quarantine_faults: 20,
            quarantine_seconds: 60,
        }
    }
}

impl Default for Retention {
    fn default() -> Self {
        Self { measurements_days: 60, events_days: 60, alarms_days: 60, operations_days: 60 }
    }
}

impl Default for Store {
    fn default() -> Self {
        Self {
            max_bytes: 2_048 * MIB as u64,
            reserve_bytes: 16 * MIB as u64,
            wal_bytes: 64 * MIB as u64,
            read_seconds: 10,
            durability: Durability::Commit,
        }
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self { public: false, topics: 1_000, consumers: 1_000 }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { filter: "info".into(), format: LogFormat::Text }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use serde_json::Value;

    use super::keys::{KEYS, Kind};
    use super::*;

    const REFERENCE: &str = include_str!("../../../docs/configuration.md");

    /// Key and default, as the reference writes them, in the order of the code.
    fn defaults() -> Vec<(String, String)> {
        let config = serde_json::to_string(&Config::default()).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        let text = |value: &Value| match value {
            Value::Null => "none".to_owned(),
            Value::String(text) => format!("`{text}`"),
            other => format!("`{other}`"),
        };
        let sections = config.as_object().unwrap().iter();
        let mut keys: Vec<_> = sections
            .flat_map(|(section, keys)| {
                let keys = keys.as_object().unwrap().iter();
                keys.map(move |(key, value)| (format!("{section}.{key}"), text(value)))
            })
            .collect();
        keys.sort();
        keys
    }

    /// The cells of the reference's rows.
    fn rows() -> Vec<Vec<&'static str>> {
        let rows = REFERENCE.lines().filter(|line| line.starts_with("| `"));
        rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
    }

    #[test]
    fn the_table_of_keys_is_the_configuration() {
        let mut known: Vec<_> = KEYS.iter().map(|(key, _)| (*key).to_owned()).collect();
        known.sort();
        assert_eq!(known, defaults().into_iter().map(|(key, _)| key).collect::<Vec<_>>());
    }

    #[test]
    fn the_reference_lists_exactly_the_keys_and_defaults() {
        let mut documented: Vec<_> = rows()
            .iter()
            .map(|row| {
                assert_eq!(row.len(), 5, "{row:?}");
                assert!(row.iter().all(|cell| !cell.is_empty()), "{row:?}");
                (row[0].trim_matches('`').to_owned(), row[1].to_owned())
            })
            .collect();
        documented.sort();
        assert_eq!(documented, defaults());
    }

    #[test]
    fn the_reference_lists_the_ranges_and_choices() {
        for row in rows() {
            let key = row[0].trim_matches('`');
            let allowed = match super::keys::kind(key).unwrap() {
                Kind::Number(range) => format!("{} to {}", range.start(), range.end()),
                Kind::Choice(words) => words.join(", "),
                _ => continue,
            };
            assert_eq!(row[3], allowed, "{key}");
        }
    }
}
