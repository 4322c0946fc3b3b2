//! The disk: one SQLite file with a single writing connection and two small pools of readers.
//!
//! In: a [`Transaction`], all rows of one commit. Out: committed, or a [`StoreError`] and nothing written.
//! This room knows SQL, files and how much room there is for them; it does not know what the rows mean to anybody.

mod copy;
mod examine;
mod long_reads;
mod places;
mod size;
mod transaction;
mod wal;
mod writing;

use std::path::{Path, PathBuf};
use std::time::Duration;

use sqlx::sqlite::{
    SqliteAutoVacuum, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{ConnectOptions as _, SqlitePool};

pub use copy::{CopyError, copy, copy_stopped};
pub use examine::check;
pub use long_reads::LongReads;
pub use size::Size;
pub use transaction::{CursorRow, MessageRow, ObjectRow, Statement, Transaction, Value};
pub use writing::Writing;

use crate::{config, faults};

/// Name of the database file in the data directory.
pub const FILE_NAME: &str = "tidegate.db";

/// Size of a database page in bytes, fixed when the file is created.
const PAGE_BYTES: u64 = 4096;
/// How long a statement waits for a lock that another process holds.
const BUSY_WAIT: Duration = Duration::from_secs(5);

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../migrations");

/// Why the disk did not take or give something.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// `store.max_bytes` is reached, or the disk is full.
    #[error("the store is full")]
    Full,
    /// The disk takes no writes, as one that is mounted read-only.
    #[error("the disk takes no writes")]
    Unwritable(#[source] Cause),
    /// Nobody knows what is on the disk: the process must not go on, a start reads what there is.
    #[error(
        "the disk failed ({0}), so nobody knows what of the last commit is on it: check the disk, then start again"
    )]
    DiskFailed(String),
    /// A read that took too long, or that stood in the way of the write-ahead log.
    #[error("the read took too long and was given up")]
    Interrupted,
    /// The file was written by a newer version of the gateway.
    #[error("the database was written by a newer version of Tidegate; start that version, or restore a backup")]
    Newer,
    /// The file holds something else.
    #[error("{FILE_NAME} is not a database of Tidegate; move it away, or name another directory")]
    Foreign,
    /// There was a database.
    #[error(
        "{FILE_NAME} is empty or gone, but the keys beside it are there; restore a backup, or move the directory away"
    )]
    Lost,
    /// Some of the file is not what SQLite wrote.
    #[error("the database is damaged ({0}); `tidegate check` says more; restore a backup")]
    Damaged(String),
    /// Somebody else holds a lock on the file.
    #[error("another program has locked the database; close it, then try again")]
    Locked,
    /// Anything else that SQLite reports.
    #[error("the database failed")]
    Database(#[source] Cause),
}

/// What SQLite said, by way of either crate.
type Cause = Box<dyn std::error::Error + Send + Sync>;

impl StoreError {
    /// Whether any other commit would have failed as well.
    #[must_use]
    pub fn concerns_all(&self) -> bool {
        matches!(self, Self::Unwritable(_) | Self::DiskFailed(_) | Self::Locked)
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
        Self::of(code.and_then(|code| code.parse().ok()), database_text(&error), error.into())
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        let code = error.sqlite_error().map(|error| error.extended_code);
        Self::of(code, error.to_string(), error.into())
    }
}

impl StoreError {
    /// Result codes of SQLite (sqlite.org/rescode.html): extended ones have the primary one in the low byte.
    fn of(code: Option<i32>, text: String, cause: Cause) -> Self {
        let code = code.unwrap_or_default();
        match (code & 0xff, code) {
            (5 | 6, _) => Self::Locked,
            (9, _) => Self::Interrupted,
            (11 | 26, _) => Self::Damaged(text),
            (13, _) => Self::Full,
            // SQLITE_IOERR_WRITE: before anything was flushed.
            (8, _) | (_, 778) => Self::Unwritable(cause),
            // SQLITE_IOERR_READ and SQLITE_IOERR_NOMEM leave everything as it was.
            (10, _) if !matches!(code, 266 | 3082) => Self::DiskFailed(text),
            _ => Self::Database(cause),
        }
    }
}

fn database_text(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}

/// An open database: the one writing connection and the readers.
pub struct Store {
    /// Only the writer's task uses it.
    pub writer: Writing,
    /// Read-only connections for short statements; a long read would keep the WAL from being reused.
    pub readers: SqlitePool,
    /// Read-only connections for statements that may look at many rows.
    pub long_reads: LongReads,
}

impl Store {
    /// Opens the database in `dir`, creating or migrating it as needed. One that is refused stays as it is.
    pub async fn open(dir: &Path, config: &config::Store) -> Result<Self, StoreError> {
        let file = dir.join(FILE_NAME);
        examine::refuse_unusable(&file).await?;
        let options = options(&file);
        let mut connection = options
            .clone()
            .create_if_missing(true)
            .page_size(PAGE_BYTES as u32)
            .auto_vacuum(SqliteAutoVacuum::Incremental)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(match config.durability {
                config::Durability::Commit => SqliteSynchronous::Full,
                config::Durability::Second => SqliteSynchronous::Normal,
            })
            // Two crates use it; SQLite itself sees to it that they do so one after the other.
            .serialized(true)
            // The writer sees to it.
            .pragma("wal_autocheckpoint", "0")
            .pragma("cache_size", "-8000")
            .pragma("temp_store", "MEMORY")
            .connect()
            .await?;
        migrate(&mut connection).await?;
        copy::remove_leftovers(dir).map_err(|error| StoreError::Unwritable(error.into()))?;
        let reading = options.read_only(true).pragma("cache_size", "-4000").pragma("temp_store", "MEMORY");
        let long_reads = LongReads::new(reading.clone(), Duration::from_secs(config.read_seconds));
        let readers = SqlitePoolOptions::new().max_connections(4).min_connections(0).connect_lazy_with(reading);
        let writer = Writing::new(connection, dir.to_owned(), config, long_reads.clone()).await?;
        Ok(Self { writer, readers, long_reads })
    }

    /// Closes it, with the WAL moved into the database file.
    pub async fn close(self) -> Result<(), StoreError> {
        self.readers.close().await;
        self.long_reads.close().await;
        self.writer.close().await
    }
}

async fn migrate(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    use sqlx::migrate::MigrateError;
    connection.lock_handle().await?.set_commit_hook(|| {
        faults::point("migration");
        true
    });
    let migrated = MIGRATIONS.run(&mut *connection).await;
    connection.lock_handle().await?.remove_commit_hook();
    migrated.map_err(|error| match error {
        MigrateError::VersionMissing(_) | MigrateError::VersionTooNew(..) => StoreError::Newer,
        MigrateError::Execute(error) => error.into(),
        other => StoreError::Database(other.into()),
    })
}

/// What all connections share.
fn options(file: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(file)
        .foreign_keys(false)
        .busy_timeout(BUSY_WAIT)
        .statement_cache_capacity(256)
        .disable_statement_logging()
}

/// The write-ahead log of the database `file`.
fn wal_of(file: &Path) -> PathBuf {
    beside(file, "-wal")
}

fn beside(file: &Path, end: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}
