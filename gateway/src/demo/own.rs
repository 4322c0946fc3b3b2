//! The demo's own gateway: a process of this program, with a directory that goes with it.

use std::fs::{self, DirBuilder, File};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use serde_json::Value;
use tokio::time::sleep;

use crate::auth::generate_password;
use crate::client::{Client, ClientArgs};
use crate::serve::{environment, own_program};

/// How long the gateway may take to get ready; at a first start it compiles the plugins.
const START_WAIT: Duration = Duration::from_secs(120);
/// How often to look whether it is.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Lines of the log that are shown when it does not.
const SHOWN_LINES: usize = 5;

/// A gateway on a free port of loopback. Dropping it kills the process and removes the directory.
pub(super) struct OwnGateway {
    process: Option<Child>,
    directory: Directory,
    password: String,
}

impl OwnGateway {
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self { process: None, directory: Directory::new()?, password: generate_password() })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory.0
    }

    /// Starts the process and waits until it serves. Returns a client of it: each start takes a free port.
    pub(super) async fn start(&mut self) -> anyhow::Result<Client> {
        let path = |name| self.directory.0.join(name);
        let (ready, log) = (path("ready.json"), path("log"));
        let _ = fs::remove_file(&ready);
        let mut command = Command::new(own_program().context("the program of this process was not found")?);
        // Nothing of the user's own gateway.
        for (name, _) in environment().filter(|(name, _)| name.starts_with("TIDEGATE_")) {
            command.env_remove(name);
        }
        command
            .env("TIDEGATE_ADMIN_PASSWORD", &self.password)
            .args(["serve", "--http", "127.0.0.1:0", "--data"])
            .arg(path("data"))
            .arg("--ready-file")
            .arg(&ready)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::options().create(true).append(true).open(&log).context("the log cannot be written")?)
            // Ctrl-C is for the demo, which has something to finish.
            .process_group(0);
        let process = self.process.insert(command.spawn().context("the gateway cannot be started")?);
        let deadline = Instant::now() + START_WAIT;
        while !ready.exists() {
            if let Some(status) = process.try_wait()? {
                bail!("the gateway ended with {status}:\n{}", end_of(&log));
            }
            if Instant::now() > deadline {
                bail!("the gateway was not ready within {} s:\n{}", START_WAIT.as_secs(), end_of(&log));
            }
            sleep(LOOK_EVERY).await;
        }
        let addresses: Value = serde_json::from_slice(&fs::read(&ready)?)?;
        let address = addresses["http"].as_str().context("the ready file names no address")?;
        let gateway = ClientArgs { url: format!("http://{address}"), user: Some("edge/admin".to_owned()), ca: None };
        Ok(Client::new(&gateway, &self.password)?)
    }

    /// kill -9.
    pub(super) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // One that has ended already is killed enough.
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for OwnGateway {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A new directory that only this user may enter, and that goes when it is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new() -> anyhow::Result<Self> {
        let name = format!("tidegate-demo-{:016x}", RandomState::new().hash_one(std::process::id()));
        let path = std::env::temp_dir().join(name);
        DirBuilder::new().mode(0o700).create(&path).with_context(|| format!("{} cannot be created", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "{} could not be removed", self.0.display());
        }
    }
}

fn end_of(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
}
