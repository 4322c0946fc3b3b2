//! A consistent copy of a database, made while others write to it.
//!
//! The copy is the database at one moment, without its free pages. While it is made, the write-ahead log cannot be reused; if
//! that becomes too long, the copy is given up.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteSynchronous};
use sqlx::{ConnectOptions as _, Connection as _};

use super::examine::refuse_other_versions;
use super::size::available;
use super::{LongReads, PAGE_BYTES, StoreError, options};

/// Where in the data directory a copy is made, one at a time.
const WORKPLACE: &str = "backup.tmp";
/// A gateway that goes on from a copy gives none of the ids that were given after the copy was made, so that consumers which
/// know messages by their id do not take a new one for a repetition.
const SKIP_IDS: &str = "UPDATE meta SET v = v + CASE k WHEN 'message_id' THEN 1000000000000 ELSE 1000000000 END
                        WHERE k IN ('message_id', 'object_id')";

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// There is not enough room for it.
    #[error("a backup needs {needed} bytes of room beside the database, {available} are free")]
    NoRoom {
        /// Bytes that it needs, with `store.reserve_bytes`.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// Others took the room meanwhile.
    #[error("there is no room for the backup")]
    Full,
    /// Another copy is being made.
    #[error("another backup is being made; try again when it is done")]
    Busy,
    /// So much was written meanwhile that the write-ahead log had to be emptied.
    #[error(
        "too much was written while the backup was made (store.wal_bytes); try again when there is less to do, or raise it"
    )]
    Overtaken,
    /// The store failed.
    #[error(transparent)]
    Store(StoreError),
    /// The file system refused.
    #[error("the backup could not be made")]
    Io(#[from] io::Error),
}

impl From<sqlx::Error> for CopyError {
    fn from(error: sqlx::Error) -> Self {
        match error {
            sqlx::Error::PoolTimedOut => Self::Busy,
            error => StoreError::from(error).into(),
        }
    }
}

impl From<StoreError> for CopyError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Interrupted => Self::Overtaken,
            StoreError::Full => Self::Full,
            error => Self::Store(error),
        }
    }
}

/// Copies the running database, leaving `reserve_bytes` of the disk free. The copy has no name, and so is gone when it is closed.
///
/// The future must be driven to its end: dropped halfway, it would leave the copy, and there could be no other until the next start.
///
/// # Errors
/// [`CopyError`].
pub async fn copy(reads: &LongReads, reserve_bytes: u64) -> Result<File, CopyError> {
    let mut connection = reads.begin_within(Duration::MAX).await?;
    let file = reads.file();
    let dir = file.parent().unwrap_or(Path::new("."));
    let pages: i64 =
        sqlx::query_scalar("SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count")
            .fetch_one(&mut *connection)
            .await?;
    let needed = pages.cast_unsigned() * PAGE_BYTES + reserve_bytes;
    let available = available(dir)?;
    if available < needed {
        return Err(CopyError::NoRoom { needed, available });
    }
    let workplace = dir.join(WORKPLACE);
    DirBuilder::new().mode(0o700).create(&workplace).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => CopyError::Busy,
        _ => error.into(),
    })?;
    let target = workplace.join("copy");
    let copied = copy_into(&mut connection, &target).await;
    let copy = File::open(target);
    remove_leftovers(dir)?;
    copied?;
    Ok(copy?)
}

/// Copies the database `file`, of a gateway that does not run, to `target`, which must be absent or empty.
///
/// # Errors
/// [`CopyError`].
pub async fn copy_stopped(file: &Path, target: &Path) -> Result<(), CopyError> {
    let mut connection = options(file).read_only(true).connect().await?;
    refuse_other_versions(&mut connection).await?;
    copy_into(&mut connection, target).await?;
    Ok(connection.close().await?)
}

async fn copy_into(connection: &mut SqliteConnection, target: &Path) -> Result<(), CopyError> {
    let name = target.to_str().ok_or_else(|| io::Error::other("the path is no UTF-8 text"))?;
    // Whoever keeps the copy flushes it; meanwhile commits should not have to wait for that.
    sqlx::query("PRAGMA synchronous = OFF").execute(&mut *connection).await?;
    sqlx::query("VACUUM INTO ?").bind(name).execute(connection).await?;
    let options = SqliteConnectOptions::new().filename(target).synchronous(SqliteSynchronous::Off);
    let mut copy = options.disable_statement_logging().connect().await?;
    sqlx::query(SKIP_IDS).execute(&mut copy).await?;
    Ok(copy.close().await?)
}

/// Removes what a copy has left that was interrupted.
pub(super) fn remove_leftovers(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir.join(WORKPLACE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
