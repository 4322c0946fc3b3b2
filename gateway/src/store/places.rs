//! The places of measurements among those of their source, in the order of time.
//!
//! A commit that stores something of many devices would change a page of each one's. So what is new waits in the order in which it
//! came, for which a commit changes one page, and takes its place together with what has come of the same device since. Whoever
//! reads looks at both (view `measurement_place`).

use rusqlite::Connection;

use super::{Statement, Transaction, Value};

/// How many measurements wait: whoever looks for those of a device looks at all of them, which takes half a millisecond.
const WAITING: u64 = 16_384;
/// How many of them, about, take their places in one commit,
const SLICE: u64 = 2048;
/// and of how many one is looked at to find out of which devices these are.
const SAMPLE: u64 = 8;

/// Which measurements wait for their places.
pub(super) struct Recent {
    /// How many; more if some were deleted.
    waiting: u64,
    /// They go by their sources: those that have waited longest have got most company.
    next_source: i64,
}

impl Recent {
    pub(super) fn of(connection: &Connection) -> rusqlite::Result<Self> {
        let mut recent = Self { waiting: 0, next_source: 0 };
        recent.count(connection)?;
        Ok(recent)
    }

    pub(super) fn add(&mut self, measurements: usize) {
        self.waiting += measurements as u64;
    }

    pub(super) fn are_too_many(&self) -> bool {
        self.waiting > WAITING
    }

    pub(super) fn count(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        let mut count = connection.prepare_cached("SELECT count(*) FROM measurement_recent")?;
        self.waiting = count.query_row([], |row| row.get::<_, i64>(0))?.cast_unsigned();
        Ok(())
    }

    /// What takes the next of them to their places.
    pub(super) fn place_some(&mut self, connection: &Connection) -> rusqlite::Result<Transaction> {
        let mut last = connection.prepare_cached(
            "SELECT max(source) FROM (
               SELECT source FROM measurement_recent WHERE source >= ?1 AND (id + id / ?2) % ?2 = 0 ORDER BY source LIMIT ?3)",
        )?;
        let sample = (self.next_source, SAMPLE.cast_signed(), (SLICE / SAMPLE).cast_signed());
        let last: Option<i64> = last.query_row(sample, |row| row.get(0))?;
        let sources = [Value::Int(self.next_source), Value::Int(last.unwrap_or(i64::MAX))];
        // After the last one it is the first one's turn.
        self.next_source = last.map_or(0, |last| last.saturating_add(1));
        let statement = |sql| Statement { sql, values: sources.to_vec() };
        let statements = vec![
            statement(
                "INSERT INTO measurement_by_source SELECT source, time, id FROM measurement_recent
                 WHERE source BETWEEN ? AND ? ORDER BY source, time, id",
            ),
            statement("DELETE FROM measurement_recent WHERE source BETWEEN ? AND ?"),
        ];
        Ok(Transaction { statements, moves: true, ..Transaction::default() })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use bytes::Bytes;

    use super::super::{ObjectRow, Store, StoreError, Writing};
    use super::*;
    use crate::config;

    const PAGES: i64 = 1024;

    /// A measurement of each of 500 devices.
    async fn store_some(writing: &mut Writing, number: u64) -> Result<(), StoreError> {
        let row = |device| ObjectRow {
            id: number * 500 + device + 1,
            tenant: "edge".into(),
            source: device,
            kind: "t".into(),
            time_ms: i64::from(u32::MAX),
            created_ms: 0,
            body: Bytes::from_static(b"\"a\":1"),
        };
        let measurements = (0..500).map(row).collect();
        writing.commit(&Transaction { measurements, ..Transaction::default() }).await
    }

    async fn number(writing: &mut Writing, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(writing.connection()).await.unwrap()
    }

    const RECENT: &str = "SELECT count(*) FROM measurement_recent";

    #[tokio::test]
    async fn in_a_full_store_they_wait_for_room_and_take_none_that_is_kept() {
        let place = tempfile::tempdir().unwrap();
        let config = config::Store { max_bytes: PAGES.cast_unsigned() * 4096, ..config::Store::default() };
        let mut store = Store::open(place.path(), &config).await.unwrap();
        let writing = &mut store.writer;
        let (mut next, mut refused) = (0, 0);
        for round in 0..4 {
            loop {
                let stored = store_some(writing, next).await;
                if matches!(writing.place_measurements().await, Err(StoreError::Full)) {
                    refused += 1;
                }
                let pages = number(writing, "SELECT page_count FROM pragma_page_count").await;
                assert!(pages <= PAGES, "{pages} pages in round {round}");
                match stored {
                    Ok(()) => next += 1,
                    Err(StoreError::Full) => break,
                    Err(error) => panic!("{error}"),
                }
            }
            // Every tenth of them goes.
            let sql = "DELETE FROM measurement WHERE id % 10 = ?";
            let statements = vec![Statement { sql, values: vec![Value::Int(round)] }];
            writing.commit(&Transaction { statements, ..Transaction::default() }).await.unwrap();
        }
        assert!(refused > 0, "there was always room");
        writing.place_measurements().await.unwrap();
        assert!(number(writing, RECENT).await <= WAITING.cast_signed());
        store.close().await.unwrap();
    }
}
