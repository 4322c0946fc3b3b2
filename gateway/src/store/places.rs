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
               SELECT source FROM measurement_recent WHERE source >= ? AND id % ? = 0 ORDER BY source LIMIT ?)",
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
        Ok(Transaction { statements, ..Transaction::default() })
    }
}
