//! The gateway under test: the real binary in a data directory of the run.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::process::Guarded;

/// Who posts.
pub(crate) const USER: &str = "edge/admin";
/// Their password.
pub(crate) const PASSWORD: &str = "a password of the benchmark";

const READY_WITHIN: Duration = Duration::from_secs(60);
const STOPPED_WITHIN: Duration = Duration::from_secs(30);

/// The cargo profile that the binary was built with.
pub(crate) fn profile() -> &'static str {
    let folder = crate::binary().parent().and_then(Path::file_name).and_then(|name| name.to_str());
    folder.unwrap_or("unknown")
}

/// A running gateway; it is killed when it is dropped.
pub(crate) struct Gateway {
    pub(crate) process: Guarded,
    pub(crate) http: SocketAddr,
    pub(crate) spawned: Instant,
    pub(crate) ready_after: Duration,
    log: PathBuf,
}

impl Gateway {
    /// Starts it on `data` and waits until it is ready.
    pub(crate) fn start(data: &Path) -> Result<Self> {
        Self::start_with(data, &[])
    }

    /// Starts it with these variables in its environment.
    pub(crate) fn start_with(data: &Path, variables: &[(&str, &str)]) -> Result<Self> {
        let ready = data.with_extension("ready");
        let log = data.with_extension("log");
        let _ = std::fs::remove_file(&ready);
        let mut command = Command::new(crate::binary());
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TIDEGATE_")) {
            command.env_remove(name);
        }
        command
            .args(["serve", "--http", "127.0.0.1:0", "--data"])
            .arg(data)
            .arg("--ready-file")
            .arg(&ready)
            .env("TIDEGATE_ADMIN_PASSWORD", PASSWORD)
            .env("TIDEGATE_BACKLOG__QUOTA_BYTES", (4u64 << 30).to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?);
        let spawned = Instant::now();
        let mut process = Guarded::spawn(&mut command)?;
        let written =
            wait_for(&ready, &mut process).with_context(|| format!("the gateway is not ready: {}", tail(&log)))?;
        let ready_after = spawned.elapsed();
        let addresses: Value = serde_json::from_str(&written)?;
        let http = addresses["http"].as_str().context("the ready file has no http")?.parse()?;
        Ok(Self { process, http, spawned, ready_after, log })
    }

    /// The end of its log.
    pub(crate) fn last_words(&self) -> String {
        tail(&self.log)
    }

    /// Stops it cleanly.
    pub(crate) fn stop(self) -> Result<()> {
        self.process.terminate(STOPPED_WITHIN).context("the gateway does not stop cleanly")
    }
}

fn wait_for(ready: &Path, process: &mut Guarded) -> Result<String> {
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        if let Ok(text) = std::fs::read_to_string(ready) {
            return Ok(text);
        }
        if let Some(status) = process.child().try_wait()? {
            bail!("it ended with {status}");
        }
        ensure!(Instant::now() < deadline, "nothing after {READY_WITHIN:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn tail(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join(" | ")
}
