//! Reads that may look at many rows: each is given up after a while, or when it stands in the way, so that none holds up the
//! write-ahead log for ever.
//!
//! SQLite reuses the WAL from its beginning only when nobody reads from it any more; a read that never ended would let it grow
//! until the disk is full.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sqlx::pool::PoolConnection;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use sqlx::{Sqlite, SqlitePool};

/// Long reads at a time; the next ones wait for their turn.
const CONNECTIONS: u32 = 2;
/// How long they wait.
const TURN_WAIT: Duration = Duration::from_secs(10);
/// What a read may take even if the WAL waits for it.
const SHORT: Duration = Duration::from_millis(100);
/// Steps of SQLite's machine between two looks at the clock: well under a millisecond.
const STEPS: i32 = 1000;

/// A pool of connections whose reads end in time. Cheap to clone.
#[derive(Clone)]
pub struct LongReads {
    pool: SqlitePool,
    limit: Duration,
    /// The writer waits for the readers.
    hurry: Arc<AtomicBool>,
}

impl LongReads {
    pub(super) fn new(options: SqliteConnectOptions, limit: Duration) -> Self {
        let pool = SqlitePoolOptions::new().max_connections(CONNECTIONS).min_connections(0).acquire_timeout(TURN_WAIT);
        Self { pool: pool.connect_lazy_with(options), limit, hurry: Arc::default() }
    }

    /// A connection for one request. Its reads fail with [`super::StoreError::Interrupted`] once `store.read_seconds` have
    /// passed since now, or once they stand in the way of the WAL.
    ///
    /// # Errors
    /// `sqlx::Error::PoolTimedOut` when others have had all connections for too long.
    pub async fn begin(&self) -> sqlx::Result<PoolConnection<Sqlite>> {
        self.begin_within(self.limit).await
    }

    /// [`LongReads::begin`] with a limit of its own.
    pub(super) async fn begin_within(&self, limit: Duration) -> sqlx::Result<PoolConnection<Sqlite>> {
        let mut connection = self.pool.acquire().await?;
        let (begun, hurry) = (Instant::now(), self.hurry.clone());
        connection.lock_handle().await?.set_progress_handler(STEPS, move || {
            let allowed = if hurry.load(Ordering::Relaxed) { SHORT.min(limit) } else { limit };
            begun.elapsed() < allowed
        });
        Ok(connection)
    }

    /// Asks the reads to end, or no more.
    pub(super) fn hurry(&self, hurry: bool) {
        self.hurry.store(hurry, Ordering::Relaxed);
    }

    /// The database file.
    pub(super) fn file(&self) -> PathBuf {
        self.pool.connect_options().get_filename().to_owned()
    }

    /// Gives the reads up and closes the connections.
    pub async fn close(&self) {
        self.hurry(true);
        self.pool.close().await;
    }
}
