//! The write-ahead log: how much it holds, and how that gets into the database file.

use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::{self, JoinHandle};

use rusqlite::{Connection, OpenFlags, Row};

use super::StoreError;
use crate::faults;

/// The writer shares the fate of the thread.
const PANICKED: &str = "a checkpoint panicked";

/// What the log holds, in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Log {
    /// Since it was begun anew,
    pub(super) pages: u64,
    /// and of those, what is in the database file, too.
    pub(super) moved: u64,
}

impl Log {
    pub(super) fn of(connection: &Connection) -> rusqlite::Result<Self> {
        Self::told(connection, "PRAGMA wal_checkpoint(NOOP)")
    }

    /// Moves pages into the database file as far as no reader needs them, and nobody else is at it.
    pub(super) fn checkpoint(connection: &Connection) -> rusqlite::Result<Self> {
        Self::told(connection, "PRAGMA wal_checkpoint(PASSIVE)")
    }

    fn told(connection: &Connection, sql: &str) -> rusqlite::Result<Self> {
        let log = |row: &Row<'_>| Ok(Self { pages: pages(row, 1)?, moved: pages(row, 2)? });
        connection.prepare_cached(sql)?.query_row([], log)
    }
}

fn pages(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(column)?.max(0).cast_unsigned())
}

/// A thread with a connection of its own that makes checkpoints beside the commits. A checkpoint writes pages all over the
/// database file and flushes it, for which the next commits need not wait.
///
/// Whoever drops this waits for the one that is under way.
pub(super) struct Mover {
    /// There until it is dropped.
    orders: Option<SyncSender<()>>,
    done: Receiver<rusqlite::Result<Log>>,
    busy: bool,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    pub(super) fn start(file: &Path) -> Result<Self, StoreError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(file, flags)?;
        let (orders, inbox) = sync_channel(1);
        let (outbox, done) = sync_channel(1);
        let work = move || {
            while let Ok(()) = inbox.recv() {
                faults::point("move-log");
                if outbox.send(Log::checkpoint(&connection)).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("tidegate-checkpoint".into()).spawn(work);
        let thread = thread.map_err(|error| StoreError::Database(error.into()))?;
        Ok(Self { orders: Some(orders), done, busy: false, thread: Some(thread) })
    }

    /// Begins a checkpoint. None may be under way.
    pub(super) fn begin(&mut self) {
        // Fails only after a panic, which is passed on when it is looked how the checkpoint ended.
        let _ = self.orders.as_ref().map(|orders| orders.try_send(()));
        self.busy = true;
    }

    /// Whether one is under way. The error is that of one that has ended.
    pub(super) fn is_busy(&mut self) -> rusqlite::Result<bool> {
        match self.busy.then(|| self.done.try_recv()) {
            Some(Ok(moved)) => self.ended(moved)?,
            Some(Err(TryRecvError::Disconnected)) => panic!("{PANICKED}"),
            Some(Err(TryRecvError::Empty)) | None => {}
        }
        Ok(self.busy)
    }

    /// Waits for the one that is under way, if one is.
    pub(super) fn wait(&mut self) -> rusqlite::Result<()> {
        match self.busy.then(|| self.done.recv()) {
            Some(moved) => self.ended(moved.expect(PANICKED)),
            None => Ok(()),
        }
    }

    fn ended(&mut self, moved: rusqlite::Result<Log>) -> rusqlite::Result<()> {
        self.busy = false;
        moved.map(drop)
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        self.orders = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use bytes::Bytes;

    use super::super::{FILE_NAME, MessageRow, Store, Transaction, Writing, wal_of};
    use super::*;
    use crate::config;

    async fn write(writing: &mut Writing, ids: std::ops::Range<u64>) {
        let body = Bytes::from(vec![b'x'; 4000]);
        let messages = ids.map(|id| MessageRow { id, topic: 1, slot: 0, body: body.clone(), held: None });
        writing.commit(&Transaction { messages: messages.collect(), ..Transaction::default() }).await.unwrap();
    }

    #[tokio::test]
    async fn the_log_is_moved_and_begun_anew_while_commits_go_on() {
        let place = tempfile::tempdir().unwrap();
        let mut store = Store::open(place.path(), &config::Store::default()).await.unwrap();
        let file = place.path().join(FILE_NAME);
        let look = Connection::open(&file).unwrap();
        let (mut anew, mut last) = (0, Log::of(&look).unwrap());
        for commit in 0..600 {
            write(&mut store.writer, commit * 10..commit * 10 + 10).await;
            let log = Log::of(&look).unwrap();
            anew += u32::from(log.pages < last.pages);
            last = log;
        }
        assert!(anew >= 3, "begun anew {anew} times");
        // 1500 pages and the last commit's.
        let longest = std::fs::metadata(wal_of(&file)).unwrap().len();
        assert!(longest < 7 << 20, "{longest}");
        drop(look);
        store.close().await.unwrap();
    }

    #[tokio::test]
    async fn a_checkpoint_beside_moves_all_there_is() {
        let place = tempfile::tempdir().unwrap();
        let mut store = Store::open(place.path(), &config::Store::default()).await.unwrap();
        write(&mut store.writer, 0..50).await;
        let file = place.path().join(FILE_NAME);
        let mut mover = Mover::start(&file).unwrap();
        assert!(!mover.is_busy().unwrap());
        mover.begin();
        mover.wait().unwrap();
        assert!(!mover.is_busy().unwrap());
        let log = Log::of(&Connection::open(&file).unwrap()).unwrap();
        assert!(log.pages > 50 && log.moved == log.pages, "{log:?}");
        drop(mover);
        store.close().await.unwrap();
    }
}
