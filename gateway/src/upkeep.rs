//! `tidegate check`: whether what is stored is sound.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;

use crate::admin::print;
use crate::serve::lock;
use crate::store::{self, FILE_NAME};

/// `tidegate check`
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// A copy of a database
    #[arg(required_unless_present = "data", conflicts_with = "data")]
    file: Option<PathBuf>,
    /// Data directory of a gateway that is not running
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

/// Runs `tidegate check`: prints what is wrong.
///
/// # Errors
/// When anything is, or the database cannot be read.
pub async fn check(args: CheckArgs) -> anyhow::Result<()> {
    let (file, _lock) = match (args.file, args.data) {
        (Some(file), _) => (file, None),
        (None, data) => {
            let data = data.context("a file or --data must say what to check")?;
            (data.join(FILE_NAME), Some(hold(&data)?))
        }
    };
    if !file.is_file() {
        bail!("there is no file {}", file.display());
    }
    let findings = store::check(&file).await.with_context(|| format!("{} is not sound", file.display()))?;
    if findings.is_empty() {
        return print(&[format!("{} is sound", file.display())]);
    }
    print(&findings)?;
    bail!("{} is not sound; restore a backup", file.display())
}

/// The data directory of a gateway, which must not run meanwhile.
fn hold(data: &Path) -> anyhow::Result<std::fs::File> {
    if !data.join(FILE_NAME).is_file() {
        bail!("{} holds no database: name another directory with --data", data.display());
    }
    lock(data)?.context("the gateway is running: stop it, or check a copy")
}
