//! Logs and metrics.
//!
//! ```text
//! what happens ─▶ counters, where it happens ─┐
//! what is so (backlogs, sizes) ─▶ asked ──────┴─▶ Metrics::render ─▶ Prometheus' text
//! ```
//! `docs/metrics.md` has the one table of all metrics. Its texts are the help texts of the output.

mod counters;
mod process;
mod throttle;

use std::time::Duration;

use anyhow::Context as _;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

pub(crate) use counters::{
    Connected, UnsentBytes, acknowledgements_ignored, answers_lost, at_zero, canaries_rolled_back, commits_failed,
    count, logins_refused, messages_dropped, push_requests, requests_refused, tls_handshakes_failed,
};
pub(crate) use throttle::Throttle;

use crate::config::{Log, LogFormat};

const REFERENCE: &str = include_str!("../../../docs/metrics.md");

/// Upper bounds in seconds: from a commit that waits for no disk to one that somebody notices.
const COMMIT_SECONDS: &[f64] = &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];
const COMMIT_COMMANDS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
const PLUGIN_SECONDS: &[f64] = &[0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5];

/// How often what was timed is summed up: the single values wait in memory until then.
const UPKEEP: Duration = Duration::from_secs(5);

/// Starts logging to stderr and collecting metrics. Once per process, on its runtime.
pub fn start(log: &Log) -> anyhow::Result<Metrics> {
    let filter =
        EnvFilter::try_new(&log.filter).with_context(|| format!("log.filter '{}' is not a filter", log.filter))?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match log.format {
        LogFormat::Text => subscriber.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        LogFormat::Json => subscriber.json().try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("the log could not be started: {error}"))?;
    Metrics::start().context("metrics could not be started")
}

/// Renders the metrics of the process.
#[derive(Clone)]
pub struct Metrics(PrometheusHandle);

impl Metrics {
    fn start() -> anyhow::Result<Self> {
        let buckets = [
            ("tidegate_commit_seconds", COMMIT_SECONDS),
            ("tidegate_commit_commands", COMMIT_COMMANDS),
            ("tidegate_plugin_call_seconds", PLUGIN_SECONDS),
        ];
        let mut builder = PrometheusBuilder::new();
        for (name, bounds) in buckets {
            builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), bounds)?;
        }
        let handle = builder.install_recorder()?;
        describe();
        counters::register();
        process::register();
        let upkeep = handle.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(UPKEEP).await;
                upkeep.run_upkeep();
            }
        });
        Ok(Self(handle))
    }

    /// Everything in Prometheus' text format: what was counted, and what `observe` finds to be so now. It sets gauges and counters
    /// by name as usual; they are in this answer alone, so what has gone is in no later one.
    pub fn render(&self, observe: impl FnOnce()) -> String {
        self.0.render() + &observed(observe)
    }
}

/// What `observe` finds, and the process.
pub(crate) fn observed(observe: impl FnOnce()) -> String {
    let recorder = PrometheusBuilder::new().build_recorder();
    metrics::with_local_recorder(&recorder, || {
        describe();
        process::observe();
        observe();
    });
    recorder.handle().render()
}

/// A name of others as the value of a label. The exporter takes two backslashes for one that is escaped already, and none for a
/// quote's.
pub(crate) fn label(name: &str) -> String {
    name.replace('\\', r"\\")
}

/// Gives each metric its text in the reference.
fn describe() {
    for [name, kind, _, _, text, _] in rows() {
        match kind {
            "counter" => metrics::describe_counter!(name, text),
            "histogram" => metrics::describe_histogram!(name, text),
            _ => metrics::describe_gauge!(name, text),
        }
    }
}

/// Name, type, labels, unit, meaning and alarm of each metric.
fn rows() -> impl Iterator<Item = [&'static str; 6]> {
    REFERENCE.lines().filter_map(|line| {
        let cells: Vec<_> = line.strip_prefix("| `")?.strip_suffix(" |")?.split(" | ").collect();
        let [name, kind, labels, unit, text, alarm] = cells[..] else { return None };
        Some([name.strip_suffix('`')?, kind, labels, unit, text, alarm])
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn what_is_asked_is_in_one_answer_alone_and_names_are_escaped() {
        for (name, escaped) in [
            ("plain", "plain"),
            (r"a\b", r"a\\b"),
            (r"a\\b", r"a\\\\b"),
            ("a\"b", "a\\\"b"),
            ("a\\\"b\\", "a\\\\\\\"b\\\\"),
            ("a\nb", "a\\nb"),
            ("a\\nb", "a\\\\nb"),
            ("{a=\u{e4}, b}", "{a=\u{e4}, b}"),
        ] {
            let text = observed(|| metrics::gauge!("tidegate_ready", "topic" => label(name)).set(1.0));
            assert!(text.contains(&format!("tidegate_ready{{topic=\"{escaped}\"}} 1\n")), "{name}: {text}");
        }
        assert!(!observed(|| ()).contains("tidegate_ready"));
    }

    /// The texts in the code that are names of metrics.
    fn named(directory: &Path, names: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                named(&path, names);
                continue;
            }
            let code = std::fs::read_to_string(&path).unwrap();
            let is_name = |text: &&str| {
                let tail = text.strip_prefix("tidegate_").or_else(|| text.strip_prefix("process_"));
                tail.is_some_and(|tail| !tail.is_empty() && tail.bytes().all(|c| c == b'_' || c.is_ascii_lowercase()))
            };
            names.extend(code.split('"').filter(is_name).map(str::to_owned));
        }
    }

    // A scene shows what appears; this, that nothing is missed that appears in rare cases.
    #[test]
    fn the_reference_lists_every_name_in_the_code() {
        let mut names = BTreeSet::new();
        named(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut names);
        let documented: BTreeSet<_> = rows().map(|[name, ..]| name.to_owned()).collect();
        assert_eq!(names, documented);
    }
}
