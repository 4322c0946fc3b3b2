//! Children that never outlive the run, and what the kernel says about a process.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// A child that is killed when it is dropped.
pub(crate) struct Guarded(Child);

/// Memory of a process in MB (10^6 bytes).
pub(crate) struct Memory {
    pub(crate) resident: f64,
    /// The part of it that no file holds.
    pub(crate) anonymous: f64,
    pub(crate) peak: f64,
}

impl Guarded {
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        command.spawn().map(Self).with_context(|| format!("cannot start {:?}", command.get_program()))
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    pub(crate) fn memory(&self) -> Result<Memory> {
        memory(&self.0.id().to_string())
    }

    pub(crate) fn cpu(&self) -> Duration {
        cpu(format!("/proc/{}/task", self.0.id()))
    }

    /// Asks for a clean end and waits for it.
    pub(crate) fn terminate(mut self, patience: Duration) -> Result<()> {
        // The shell's own kill: the standard library has no signals.
        let asked = Command::new("sh").args(["-c", "kill -TERM \"$0\"", &self.0.id().to_string()]).status()?;
        ensure!(asked.success(), "the process has ended before it was asked to");
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.0.try_wait()? {
                ensure!(status.success(), "ended with {status} after SIGTERM");
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "still running {patience:?} after SIGTERM");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Memory of the process of this id.
pub(crate) fn memory(process: &str) -> Result<Memory> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let field = |name: &str| -> Result<f64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
        let kibibytes: f64 = line.trim().trim_end_matches(" kB").parse()?;
        Ok(kibibytes * 1024.0 / 1e6)
    };
    Ok(Memory { resident: field("VmRSS:")?, anonymous: field("RssAnon:")?, peak: field("VmHWM:")? })
}

/// CPU time of the living threads in a `task` folder of procfs.
pub(crate) fn cpu(tasks: impl AsRef<Path>) -> Duration {
    let Ok(threads) = std::fs::read_dir(tasks) else { return Duration::ZERO };
    threads.flatten().map(|thread| on_cpu(&thread.path())).sum()
}

fn on_cpu(thread: &Path) -> Duration {
    let statistics = std::fs::read_to_string(thread.join("schedstat")).unwrap_or_default();
    let nanoseconds = statistics.split(' ').next().and_then(|first| first.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}
