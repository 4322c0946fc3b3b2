//! Logs and metrics.

use anyhow::Context as _;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

use crate::config::{Log, LogFormat};

/// Starts logging to stderr and collecting metrics. Once per process.
pub fn start(log: &Log) -> anyhow::Result<PrometheusHandle> {
    let filter =
        EnvFilter::try_new(&log.filter).with_context(|| format!("log.filter '{}' is not a filter", log.filter))?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match log.format {
        LogFormat::Text => subscriber.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        LogFormat::Json => subscriber.json().try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("the log could not be started: {error}"))?;
    PrometheusBuilder::new().install_recorder().context("metrics could not be started")
}
