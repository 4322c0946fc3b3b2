//! The gateway's binary, built before it is measured.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The root of the repository.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../..");

static BINARY: OnceLock<PathBuf> = OnceLock::new();

/// The binary that is measured.
pub(crate) fn binary() -> &'static Path {
    BINARY.get().expect("invariant: it is built first")
}

/// Builds it with a Cargo profile.
pub(crate) fn build(profile: &str) -> Result<()> {
    let output = Command::new("cargo")
        .args(["build", "--locked", "--bin", "tidegate", "--message-format", "json-render-diagnostics", "--profile"])
        .arg(profile)
        .current_dir(ROOT)
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "the gateway does not build");
    let messages = String::from_utf8(output.stdout)?;
    let executable = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .context("Cargo does not say where the binary is")?;
    BINARY.set(executable).expect("invariant: it is built once");
    Ok(())
}
