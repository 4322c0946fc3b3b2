//! The connection that writes, and what keeps its files in bounds: the database, the write-ahead log, and the room beside them.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _};
use tokio::time::Instant;

use super::places::Recent;
use super::size::{available, length};
use super::wal::{Log, Mover};
use super::{BUSY_WAIT, FILE_NAME, LongReads, PAGE_BYTES, StoreError, Transaction, wal_of};
use crate::config::{self, Durability};
use crate::faults;

/// What may still be written to a store that is full, so that deletions and acknowledgements can make room.
const RELIEF_PAGES: u64 = 1024;
/// Free pages that stay in the file for the next messages.
const SPARE_PAGES: u64 = 1024;
/// A page in the WAL, which has a header for each.
const FRAME_BYTES: u64 = PAGE_BYTES + 24;
/// Pages of the WAL that are not in the database file when they are moved there, beside the commits that go on,
const AHEAD_PAGES: u64 = 500;
/// and how long it is when the rest is moved between two commits, so that the next one begins it anew.
const LOG_PAGES: u64 = 1500;
/// How long after that has failed it is tried again.
const MOVE_PAUSE: Duration = Duration::from_secs(1);
/// Pages that the warm-up of the WAL frees again.
const WARM_PAGES: u64 = LOG_PAGES + 200;
/// How long a checkpoint waits for readers.
const CHECKPOINT_WAIT: Duration = Duration::from_millis(500);
/// How long after one that had to give up the next one is tried.
const CHECKPOINT_PAUSE: Duration = Duration::from_secs(5);
/// With `store.durability = "second"`: what a power cut takes at most, but for the time that the flush itself takes.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// Texts that stay prepared for commits.
const STATEMENTS: usize = 64;

/// The connection that writes.
///
/// With `store.durability = "commit"` each commit is flushed (WAL with `synchronous=FULL`), else all commits of a second are.
///
/// sqlx takes two changes of threads for each statement, which is more than the statements of a commit themselves take. So
/// commits go to the same connection directly, on the thread of the writer.
pub struct Writing {
    /// Stands before `connection`, so that its statements are dropped before that is closed.
    direct: rusqlite::Connection,
    connection: SqliteConnection,
    directory: PathBuf,
    wal: PathBuf,
    wal_bytes: u64,
    reserve_bytes: u64,
    /// `store.max_bytes` in pages, or what the file had at the start if that was more.
    max_pages: u64,
    /// The disk has hardly more room than what is kept.
    disk_is_low: bool,
    long_reads: LongReads,
    recent: Recent,
    mover: Mover,
    /// When pages of the WAL are moved again after that has failed.
    next_move: Option<Instant>,
    /// When a WAL that is too long is looked at again.
    next_checkpoint: Option<Instant>,
    flushing: Option<Flushing>,
    waits_for_locks: bool,
    /// What the disk said when it failed.
    disk_failed: Option<String>,
}

/// Commits that are flushed together, once a second.
struct Flushing {
    wal: Arc<File>,
    /// When the first commit was made that is not flushed.
    since: Option<Instant>,
}

impl Writing {
    pub(super) async fn new(
        mut connection: SqliteConnection,
        directory: PathBuf,
        config: &config::Store,
        long_reads: LongReads,
    ) -> Result<Self, StoreError> {
        let file = directory.join(FILE_NAME);
        let wal = wal_of(&file);
        let flushing = match config.durability {
            Durability::Commit => None,
            Durability::Second => {
                let wal = File::open(&wal).map_err(|error| StoreError::Database(error.into()))?;
                Some(Flushing { wal: Arc::new(wal), since: None })
            }
        };
        let handle = connection.lock_handle().await?.as_raw_handle();
        #[allow(unsafe_code, reason = "the only way to commit without a change of threads for each statement")]
        // SAFETY: the handle stays open for as long as `connection` exists, which is dropped after `direct`. The connection is
        // in serialized mode, in which SQLite lets any thread use it at any time.
        let direct = unsafe { rusqlite::Connection::from_handle(handle.as_ptr()) }?;
        direct.set_prepared_statement_cache_capacity(STATEMENTS);
        let mut writing = Self {
            recent: Recent::of(&direct)?,
            direct,
            connection,
            directory,
            wal,
            wal_bytes: config.wal_bytes,
            reserve_bytes: config.reserve_bytes,
            max_pages: config.max_bytes / PAGE_BYTES,
            disk_is_low: false,
            long_reads,
            mover: Mover::start(&file)?,
            next_move: None,
            next_checkpoint: None,
            flushing,
            waits_for_locks: true,
            disk_failed: None,
        };
        writing.fit().await?;
        Ok(writing)
    }

    /// Puts `store.max_bytes` in force, which a migration may pass. Of a file that is longer, the free pages go first: what is kept for
    /// deletions begins behind its end.
    async fn fit(&mut self) -> Result<(), StoreError> {
        let too_many = self.pages()?.saturating_sub(self.max_pages);
        if too_many > 0 {
            self.run(format!("PRAGMA incremental_vacuum({too_many})")).await?;
        }
        self.max_pages = self.max_pages.max(self.pages()?);
        self.limit_pages(self.max_pages).await
    }

    /// Commits all rows of `transaction`, or none of them. Blocks the thread for as long as that takes.
    ///
    /// The future must be driven to its end: dropped halfway it would leave the transaction open.
    pub async fn commit(&mut self, transaction: &Transaction) -> Result<(), StoreError> {
        if transaction.is_empty() {
            return Ok(());
        }
        if let Some(error) = self.disk_failed() {
            return Err(error);
        }
        let relieves = transaction.relieves();
        if !relieves && !self.has_room(transaction)? {
            self.move_log();
            return Err(StoreError::Full);
        }
        faults::point("before-commit");
        let mut result = self.try_commit(transaction).await;
        if relieves && matches!(result, Err(StoreError::Full)) {
            self.limit_pages(self.max_pages + RELIEF_PAGES).await?;
            result = self.try_commit(transaction).await;
            self.limit_pages(self.max_pages).await?;
        }
        result?;
        faults::point("after-commit");
        self.recent.add(transaction.measurements.len());
        if let Some(flushing) = &mut self.flushing {
            flushing.since.get_or_insert_with(Instant::now);
        }
        self.move_log();
        self.bound_wal().await;
        Ok(())
    }

    /// Moves the WAL into the database file before it is long. Left to SQLite, each commit would be held up after which it is
    /// longer than so many pages.
    fn move_log(&mut self) {
        let now = Instant::now();
        if self.next_move.is_some_and(|next| now < next) {
            return;
        }
        let moved = self.try_move_log().map_err(|error| self.failed(error));
        self.next_move = moved.err().map(|error| {
            tracing::warn!(%error, cause = ?error, "the write-ahead log could not be moved into the database");
            now + MOVE_PAUSE
        });
    }

    fn try_move_log(&mut self) -> rusqlite::Result<()> {
        let log = Log::of(&self.direct)?;
        // Others may take the room that the WAL owes the file, and with a WAL that cannot be begun anew nobody can make any.
        let owes = self.disk_is_low && log.moved < log.pages;
        if owes || log.pages >= LOG_PAGES {
            self.mover.wait()?;
            faults::point("end-log");
            Log::checkpoint(&self.direct)?;
        } else if log.pages.saturating_sub(log.moved) >= AHEAD_PAGES && !self.mover.is_busy()? {
            self.mover.begin();
        }
        Ok(())
    }

    async fn try_commit(&mut self, transaction: &Transaction) -> Result<(), StoreError> {
        let committed = transaction.run(&self.direct).map_err(|error| self.failed(error));
        if committed.is_err() {
            self.roll_back().await;
        }
        self.wait_for_locks(!matches!(committed, Err(StoreError::Locked)));
        committed
    }

    /// One commit waits for another program's lock; those behind it fail at once until it is gone, or their waits would add up.
    fn wait_for_locks(&mut self, wait: bool) {
        if self.waits_for_locks != wait {
            self.waits_for_locks = wait;
            // Fails only for a connection that is not open.
            let _ = self.direct.busy_timeout(if wait { BUSY_WAIT } else { Duration::ZERO });
        }
    }

    /// Whether no other program's lock is in the way of a commit.
    pub async fn can_lock(&mut self) -> bool {
        self.run("BEGIN IMMEDIATE; ROLLBACK".to_owned()).await.is_ok()
    }

    /// For the reads of a start, before anything else uses the connection.
    pub fn connection(&mut self) -> &mut SqliteConnection {
        &mut self.connection
    }

    /// [`StoreError::DiskFailed`] since that has happened: nothing is committed any more, and the process must not go on.
    #[must_use]
    pub fn disk_failed(&self) -> Option<StoreError> {
        self.disk_failed.clone().map(StoreError::DiskFailed)
    }

    /// Takes measurements to their places as long as too many wait for that; see `places.rs`.
    pub async fn place_measurements(&mut self) -> Result<(), StoreError> {
        while self.recent.are_too_many() {
            faults::point("place");
            let placing = self.recent.place_some(&self.direct).map_err(|error| self.failed(error))?;
            self.commit(&placing).await?;
            self.recent.count(&self.direct).map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    /// Gives back at most `pages` free pages at the end of the file if a large part of it is free. Whether it did.
    pub async fn give_back(&mut self, pages: u64) -> Result<bool, StoreError> {
        let (all, free) = (self.pages()?, self.free_pages()?);
        if free <= SPARE_PAGES || free <= all / 4 {
            return Ok(false);
        }
        faults::point("vacuum");
        self.run(format!("PRAGMA incremental_vacuum({})", pages.min(free - SPARE_PAGES))).await?;
        Ok(true)
    }

    /// Moves what the WAL holds into the database file as far as no reader needs it, which is when the file becomes shorter.
    pub fn checkpoint(&mut self) -> Result<(), StoreError> {
        faults::point("checkpoint");
        Log::checkpoint(&self.direct).map(drop).map_err(|error| self.failed(error))
    }

    /// When [`Writing::flush`] is due.
    #[must_use]
    pub fn flush_due(&self) -> Option<Instant> {
        Some(self.flushing.as_ref()?.since? + FLUSH_EVERY)
    }

    /// Flushes the commits that were only written.
    ///
    /// # Errors
    /// [`StoreError::Unwritable`]: the disk has become read-only; the flush stays due. [`StoreError::DiskFailed`]: the system may
    /// have forgotten what it could not flush, while readers still see it.
    pub async fn flush(&mut self) -> Result<(), StoreError> {
        let Some(flushing) = &mut self.flushing else { return Ok(()) };
        flushing.since = None;
        let wal = flushing.wal.clone();
        let flushed = tokio::task::spawn_blocking(move || wal.sync_data()).await;
        flushed.unwrap_or_else(|error| Err(error.into())).map_err(|error| {
            if error.kind() == io::ErrorKind::ReadOnlyFilesystem {
                flushing.since = Some(Instant::now());
                return StoreError::Unwritable(error.into());
            }
            self.disk_failed = Some(error.to_string());
            StoreError::DiskFailed(error.to_string())
        })
    }

    /// Grows the WAL once, so that later commits overwrite it in place: while the file grows, each commit also waits
    /// for the file system's journal. Pages that are free again by then do not reach the database file.
    pub async fn warm_up(&mut self) -> Result<(), StoreError> {
        let long = LOG_PAGES * FRAME_BYTES;
        let room =
            available(&self.directory).map_or(u64::MAX, |available| available.saturating_sub(self.reserve_bytes));
        if length(&self.wal) >= long || room < 2 * long {
            return Ok(());
        }
        let warmed = self
            .run(format!(
                "BEGIN IMMEDIATE; CREATE TABLE warm_up(b BLOB);
                 INSERT INTO warm_up
                 WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 96) SELECT zeroblob(65536) FROM n;
                 DROP TABLE warm_up; COMMIT; PRAGMA incremental_vacuum({WARM_PAGES}); PRAGMA wal_checkpoint(RESTART);
                 PRAGMA shrink_memory",
            ))
            .await;
        if warmed.is_err() {
            self.roll_back().await;
        }
        warmed
    }

    /// Moves the WAL into the database file and closes it.
    pub async fn close(self) -> Result<(), StoreError> {
        let Self { direct, mut connection, mover, .. } = self;
        drop((direct, mover));
        let (busy, _, _): (bool, i64, i64) =
            sqlx::query_as("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(&mut connection).await?;
        if busy {
            tracing::warn!(
                "another program reads the database: the write-ahead log stays as it is until the next start"
            );
        }
        connection.close().await?;
        Ok(())
    }

    async fn roll_back(&mut self) {
        // Fails harmlessly when SQLite has rolled back by itself.
        let _ = self.connection.execute("ROLLBACK").await;
    }

    async fn run(&mut self, sql: String) -> Result<(), StoreError> {
        let result = self.connection.execute(AssertSqlSafe(sql)).await;
        result.map(drop).map_err(|error| self.failed(error))
    }

    fn failed(&mut self, error: impl Into<StoreError>) -> StoreError {
        let error = error.into();
        if let StoreError::DiskFailed(text) = &error {
            self.disk_failed = Some(text.clone());
        }
        error
    }

    async fn limit_pages(&mut self, pages: u64) -> Result<(), StoreError> {
        self.run(format!("PRAGMA max_page_count = {pages}")).await
    }

    /// Whether the disk has room for the transaction beside what is kept for those who make more. Each page takes that twice, in the
    /// WAL and, when it is moved, in the database file: what the WAL still owes that counts as taken, or the move would find no
    /// room, and after that nobody.
    fn has_room(&mut self, transaction: &Transaction) -> Result<bool, StoreError> {
        // Where the system does not tell, SQLite's own error has to do.
        let Ok(available) = available(&self.directory) else { return Ok(true) };
        let (wal, most) = (length(&self.wal), transaction.most_bytes());
        // Mostly it is seen without a look into the database: at worst each page of the WAL is new to the file.
        self.disk_is_low = available < self.reserve_bytes + wal + 2 * most;
        if !self.disk_is_low {
            return Ok(true);
        }
        let (all, free) = (self.pages()? * PAGE_BYTES, self.free_pages()? * PAGE_BYTES);
        let log = Log::of(&self.direct)?;
        // One that is moved as a whole is begun anew.
        let written = if log.moved < log.pages { log.pages * FRAME_BYTES } else { 0 };
        let grows = most.saturating_sub(free) + most.saturating_sub(wal.saturating_sub(written));
        let owed = all.saturating_sub(length(&self.directory.join(FILE_NAME)));
        Ok(grows == 0 || available >= self.reserve_bytes + owed + grows)
    }

    /// Pages that the database has.
    fn pages(&self) -> Result<u64, StoreError> {
        self.number("PRAGMA page_count")
    }

    /// Those of them that hold nothing.
    fn free_pages(&self) -> Result<u64, StoreError> {
        self.number("PRAGMA freelist_count")
    }

    fn number(&self, pragma: &str) -> Result<u64, StoreError> {
        let number: i64 = self.direct.prepare_cached(pragma)?.query_row([], |row| row.get(0))?;
        Ok(number.cast_unsigned())
    }

    /// Empties a WAL that has become too long because of a reader, with the long reads held off.
    async fn bound_wal(&mut self) {
        let now = Instant::now();
        if self.next_checkpoint.is_some_and(|next| now < next) || length(&self.wal) <= self.wal_bytes {
            return;
        }
        self.long_reads.hurry(true);
        let truncated = self.truncate_wal().await;
        self.long_reads.hurry(false);
        self.next_checkpoint = match truncated {
            Ok(true) => None,
            Ok(false) => {
                tracing::warn!(
                    "the write-ahead log is longer than store.wal_bytes, and somebody who reads the database, or moves the log, keeps it so"
                );
                Some(now + CHECKPOINT_PAUSE)
            }
            Err(error) => {
                tracing::warn!(%error, cause = ?error, "the write-ahead log is longer than store.wal_bytes");
                Some(now + CHECKPOINT_PAUSE)
            }
        };
    }

    async fn truncate_wal(&mut self) -> Result<bool, StoreError> {
        self.mover.wait().map_err(|error| self.failed(error))?;
        self.run(format!("PRAGMA busy_timeout = {}", CHECKPOINT_WAIT.as_millis())).await?;
        let row = sqlx::query_as("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(&mut self.connection).await;
        self.run(format!("PRAGMA busy_timeout = {}", BUSY_WAIT.as_millis())).await?;
        let (busy, _, _): (bool, i64, i64) = row.map_err(|error| self.failed(error))?;
        Ok(!busy)
    }
}
