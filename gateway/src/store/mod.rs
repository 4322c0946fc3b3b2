//! The disk: one SQLite file with a single writing connection and a small pool of readers.
//!
//! In: a [`Transaction`], all rows of one commit. Out: committed, or a [`StoreError`] and nothing written.
//! This room knows SQL and files; it does not know what the rows mean to anybody.

mod size;
mod transaction;

use std::path::Path;
use std::time::Duration;

use sqlx::sqlite::{
    SqliteAutoVacuum, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, SqlitePool};

pub use size::Size;
pub use transaction::{CursorRow, MessageRow, ObjectRow, Statement, Transaction, Value};

/// Name of the database file in the data directory.
pub const FILE_NAME: &str = "tidegate.db";

/// Size of a database page in bytes, fixed when the file is created.
const PAGE_BYTES: u32 = 4096;

/// Texts that stay prepared for commits.
const STATEMENTS: usize = 64;

static MIGRATIONS: sqlx::migrate::Migrator = sqlx::migrate!("../migrations");

/// Why the disk did not take or give something.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// `store.max_bytes` or the disk is full.
    #[error("the store is full")]
    Full(#[source] Cause),
    /// The file was written by a newer version of the gateway.
    #[error("the database was written by a newer version of Tidegate; start that version, or restore a backup")]
    Newer,
    /// Anything else that SQLite reports.
    #[error("the database failed")]
    Database(#[source] Cause),
}

/// What SQLite said, by way of either crate.
type Cause = Box<dyn std::error::Error + Send + Sync>;

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
        Self::of(code.and_then(|code| code.parse().ok()), error.into())
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        Self::of(error.sqlite_error().map(|error| error.extended_code), error.into())
    }
}

impl StoreError {
    fn of(code: Option<i32>, cause: Cause) -> Self {
        // SQLITE_FULL is 13, extended codes keep it in the low byte.
        if code.is_some_and(|code| code & 0xff == 13) { Self::Full(cause) } else { Self::Database(cause) }
    }
}

/// An open database: the one writing connection and the readers.
pub struct Store {
    /// Only the writer's task uses it.
    pub writer: Writing,
    /// Read-only connections for short statements; a long read would keep the WAL from being reused.
    pub readers: SqlitePool,
}

/// The connection that writes. Commits are durable: WAL with `synchronous=FULL`.
///
/// sqlx takes two changes of threads for each statement, which is more than the statements of a commit themselves take. So
/// commits go to the same connection directly, on the thread of the writer.
pub struct Writing {
    /// Stands before `connection`, so that its statements are dropped before that is closed.
    direct: rusqlite::Connection,
    connection: SqliteConnection,
}

impl Store {
    /// Opens the database in `dir`, creating or migrating it as needed. `max_bytes` bounds the file.
    pub async fn open(dir: &Path, max_bytes: u64) -> Result<Self, StoreError> {
        let file = dir.join(FILE_NAME);
        let options = SqliteConnectOptions::new()
            .filename(&file)
            .foreign_keys(false)
            .busy_timeout(Duration::from_secs(5))
            .statement_cache_capacity(256)
            .disable_statement_logging();
        let mut connection = options
            .clone()
            .create_if_missing(true)
            .page_size(PAGE_BYTES)
            .auto_vacuum(SqliteAutoVacuum::Incremental)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            // Two rooms of code use it; SQLite itself sees to it that they do so one after the other.
            .serialized(true)
            .pragma("wal_autocheckpoint", "1000")
            .pragma("cache_size", "-8000")
            .pragma("temp_store", "MEMORY")
            .pragma("max_page_count", (max_bytes / u64::from(PAGE_BYTES)).to_string())
            .connect()
            .await?;
        MIGRATIONS.run(&mut connection).await.map_err(|error| match error {
            sqlx::migrate::MigrateError::VersionMissing(_) | sqlx::migrate::MigrateError::VersionTooNew(..) => {
                StoreError::Newer
            }
            sqlx::migrate::MigrateError::Execute(error) => error.into(),
            other => StoreError::Database(other.into()),
        })?;
        let readers = SqlitePoolOptions::new()
            .max_connections(4)
            .min_connections(0)
            .connect_lazy_with(options.read_only(true).pragma("cache_size", "-4000").pragma("temp_store", "MEMORY"));
        Ok(Self { writer: Writing::new(connection).await?, readers })
    }
}

impl Writing {
    async fn new(mut connection: SqliteConnection) -> Result<Self, StoreError> {
        let handle = connection.lock_handle().await?.as_raw_handle();
        #[allow(unsafe_code, reason = "the only way to commit without a change of threads for each statement")]
        // SAFETY: the handle stays open for as long as `connection` exists, which is dropped after `direct`. The connection is
        // in serialized mode, in which SQLite lets any thread use it at any time.
        let direct = unsafe { rusqlite::Connection::from_handle(handle.as_ptr()) }?;
        direct.set_prepared_statement_cache_capacity(STATEMENTS);
        Ok(Self { direct, connection })
    }

    /// Commits all rows of `transaction`, or none of them. Blocks the thread for as long as that takes.
    pub async fn commit(&mut self, transaction: &Transaction) -> Result<(), StoreError> {
        if transaction.is_empty() {
            return Ok(());
        }
        let committed = transaction.run(&self.direct);
        if committed.is_err() {
            self.roll_back().await;
        }
        Ok(committed?)
    }

    /// For the reads of a start, before anything else uses the connection.
    pub fn connection(&mut self) -> &mut SqliteConnection {
        &mut self.connection
    }

    /// Grows the WAL once, so that later commits overwrite it in place: while the file grows, each commit also waits
    /// for the file system's journal.
    pub async fn warm_up(&mut self) -> Result<(), StoreError> {
        let warmed = self
            .connection
            .execute(
                "BEGIN IMMEDIATE; CREATE TABLE warm_up(b BLOB);
                 INSERT INTO warm_up
                 WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 64) SELECT zeroblob(65536) FROM n;
                 DROP TABLE warm_up; COMMIT; PRAGMA wal_checkpoint(RESTART); PRAGMA incremental_vacuum; PRAGMA shrink_memory",
            )
            .await;
        if warmed.is_err() {
            self.roll_back().await;
        }
        Ok(warmed.map(drop)?)
    }

    async fn roll_back(&mut self) {
        // Fails harmlessly when SQLite has rolled back by itself.
        let _ = self.connection.execute("ROLLBACK").await;
    }

    /// Moves the WAL into the database file and closes it.
    pub async fn close(self) -> Result<(), StoreError> {
        let Self { direct, mut connection } = self;
        drop(direct);
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").await?;
        connection.close().await?;
        Ok(())
    }
}
