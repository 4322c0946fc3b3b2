//! Other people's servers: started on a free port of loopback, in a folder of the run.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::process::Guarded;

const READY_WITHIN: Duration = Duration::from_secs(10);

/// An address that nobody listens on.
pub(crate) fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}

/// Starts a server whose log goes into `folder`, and waits until it accepts connections.
pub(crate) fn start(command: &mut Command, folder: &Path, address: SocketAddr) -> Result<Guarded> {
    let log = File::create(folder.join("log"))?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut server = Guarded::spawn(command)?;
    let deadline = Instant::now() + READY_WITHIN;
    while TcpStream::connect(address).is_err() {
        let has_ended = server.child().try_wait()?.is_some();
        let log = || std::fs::read_to_string(folder.join("log")).unwrap_or_default();
        ensure!(!has_ended && Instant::now() < deadline, "{:?} has not started: {}", command.get_program(), log());
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(server)
}

/// The last word of the first line that a program prints: its version.
pub(crate) fn version(program: &str, argument: &str) -> Result<String> {
    let output = Command::new(program).arg(argument).output().with_context(|| format!("{program} is not installed"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().next().and_then(|line| line.split(' ').next_back()).context("no version")?;
    Ok(version.trim_start_matches('v').to_owned())
}
