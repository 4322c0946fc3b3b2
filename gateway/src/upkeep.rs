//! `tidegate backup` and `tidegate check`: a copy of all that is stored, and whether it is sound.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use clap::Args;
use hyper::Method;
use tempfile::NamedTempFile;

use crate::admin::{Place, Reached, print};
use crate::serve::lock;
use crate::store::{self, FILE_NAME};

/// `tidegate backup`
#[derive(Args, Debug)]
pub struct BackupArgs {
    #[command(flatten)]
    place: Place,
    /// The file to write; it must not exist
    file: PathBuf,
}

/// `tidegate check`
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// A backup
    #[arg(required_unless_present = "data", conflicts_with = "data")]
    file: Option<PathBuf>,
    /// Data directory of a gateway that is not running
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

/// Runs `tidegate backup`. The file is there when it is whole, or not at all.
///
/// # Errors
/// When it exists, or cannot be written; refusals of the gateway.
pub async fn backup(args: BackupArgs) -> anyhow::Result<()> {
    let file = args.file;
    if file.exists() {
        bail!("{} exists already, and is left as it is", file.display());
    }
    let beside = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let unwritable = || format!("{} cannot be written", file.display());
    // Mode 0600; it goes when it is dropped.
    let mut unfinished = NamedTempFile::new_in(beside).with_context(unwritable)?;
    match args.place.reach()? {
        Reached::Gateway(client, _) => {
            let copy = unfinished.as_file_mut();
            client.download(Method::POST, "/tidegate/v1/backup", Bytes::new(), copy).await?;
        }
        Reached::Directory(data) => {
            let _lock = hold(&data)?;
            store::copy_stopped(&data.join(FILE_NAME), unfinished.path()).await?;
        }
    }
    unfinished.as_file().sync_all().with_context(unwritable)?;
    unfinished.persist_noclobber(&file).map_err(|error| error.error).with_context(unwritable)?;
    File::open(beside).and_then(|directory| directory.sync_all()).with_context(unwritable)?;
    let bytes = file.metadata().with_context(unwritable)?.len();
    print(&[format!("{} has everything up to now, in {bytes} bytes", file.display())])
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
    if file.is_dir() {
        bail!("{0} is a directory: --data {0} checks the database in it", file.display());
    }
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
fn hold(data: &Path) -> anyhow::Result<File> {
    if !data.join(FILE_NAME).is_file() {
        bail!("{} holds no database: name another directory with --data", data.display());
    }
    lock(data)?.context("the gateway is running: stop it, or make a backup with --url")
}
