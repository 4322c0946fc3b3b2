//! All rows of one commit, and the statements that write them.

use bytes::Bytes;
use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, ToSql, params_from_iter};

use super::PAGE_BYTES;

/// Pages of indexes and of other tables that a transaction changes here and there.
const INDEX_BYTES: u64 = 256 << 10;
/// Pages that a transaction changes which moves rows.
const MOVED_BYTES: u64 = 8 << 20;

/// A value bound to a [`Statement`].
#[derive(Clone, Debug)]
pub enum Value {
    /// NULL.
    Null,
    /// An integer.
    Int(i64),
    /// A text.
    Text(String),
    /// A blob.
    Blob(Bytes),
}

/// A row change that is too rare to deserve a shape of its own.
#[derive(Clone, Debug)]
pub struct Statement {
    /// One statement with a bare `?` for each value.
    pub sql: &'static str,
    /// What is bound, in order.
    pub values: Vec<Value>,
}

impl Statement {
    /// Bytes of the texts and blobs that are bound.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let bytes = |value: &Value| match value {
            Value::Null | Value::Int(_) => 0,
            Value::Text(text) => text.len(),
            Value::Blob(blob) => blob.len(),
        };
        self.values.iter().map(bytes).sum()
    }
}

/// A row of `measurement` or `event`.
#[derive(Clone, Debug)]
pub struct ObjectRow {
    /// Object id.
    pub id: u64,
    /// Owner.
    pub tenant: crate::message::Tenant,
    /// Id of the managed object that it belongs to.
    pub source: u64,
    /// `type`.
    pub kind: Box<str>,
    /// `time` in ms since the epoch.
    pub time_ms: i64,
    /// When it was made, in ms since the epoch; measurements do not keep it.
    pub created_ms: i64,
    /// JSON members on one line.
    pub body: Bytes,
}

/// A row of `msg`.
#[derive(Clone, Debug)]
pub struct MessageRow {
    /// Message id.
    pub id: u64,
    /// Row id of its topic.
    pub topic: i64,
    /// Of its source: what its share depends on.
    pub slot: u16,
    /// The frame without what a delivery adds.
    pub body: Bytes,
    /// What is needed to judge it, if that is still to be done.
    pub held: Option<String>,
}

/// Where a consumer is; see `consumer::Cursor`.
#[derive(Clone, Debug)]
pub struct CursorRow {
    /// Row id of the consumer.
    pub consumer: i64,
    /// Everything below is settled,
    pub hi: u64,
    /// but for these ids.
    pub holes: Vec<u64>,
    /// When it acknowledged a message, ms since the epoch; `None`: as before.
    pub settled_ms: Option<i64>,
}

/// The rows of one commit.
#[derive(Debug, Default)]
pub struct Transaction {
    /// Time of the messages' admission, ms since the epoch.
    pub now_ms: i64,
    /// Single statements, run first and in order.
    pub statements: Vec<Statement>,
    /// They move rows from one table to another: what they delete makes no room.
    pub moves: bool,
    /// New measurements.
    pub measurements: Vec<ObjectRow>,
    /// New events.
    pub events: Vec<ObjectRow>,
    /// New messages.
    pub messages: Vec<MessageRow>,
    /// Cursors that move.
    pub cursors: Vec<CursorRow>,
    /// Ids of messages that nobody needs any more.
    pub freed: Vec<u64>,
}

impl Transaction {
    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.statements.is_empty()
            && self.measurements.is_empty()
            && self.events.is_empty()
            && self.messages.is_empty()
            && self.cursors.is_empty()
            && self.freed.is_empty()
    }

    /// Whether it makes room: it takes rows away, or says what is not needed any more. The few bytes that it may add for that
    /// (a notification, a cursor, a counter) are what a full store keeps its last room for.
    #[must_use]
    pub fn relieves(&self) -> bool {
        const SMALL: [&str; 4] = ["UPDATE cursor ", "UPDATE meta ", "INSERT OR REPLACE INTO meta(", "INSERT INTO gap("];
        let is_small = |statement: &Statement| SMALL.iter().any(|small| statement.sql.starts_with(small));
        let grows = !self.measurements.is_empty() || !self.events.is_empty();
        !grows && !self.moves && (self.deletes() || self.messages.is_empty() && self.statements.iter().all(is_small))
    }

    /// Whether its commit shows that there is room again: it made some, or needed some.
    #[must_use]
    pub fn shows_room(&self) -> bool {
        !self.freed.is_empty() || self.deletes() || !self.relieves()
    }

    fn deletes(&self) -> bool {
        self.statements.iter().any(|statement| statement.sql.starts_with("DELETE"))
    }

    /// Bytes of pages that it takes at most, what it changes in indexes included.
    pub(super) fn most_bytes(&self) -> u64 {
        let objects = self.measurements.iter().chain(&self.events).map(|row| row.body.len());
        let rows = objects.chain(self.messages.iter().map(|row| row.body.len()));
        let rows = rows.chain(self.statements.iter().map(Statement::bytes)).map(most_bytes).sum::<u64>();
        rows + if self.moves { MOVED_BYTES } else { INDEX_BYTES }
    }

    /// Runs all of it, from BEGIN to COMMIT. On an error the transaction may still be open.
    ///
    /// Every text is prepared once: `connection` keeps what it has prepared.
    pub(super) fn run(&self, connection: &Connection) -> rusqlite::Result<()> {
        let now_ms = self.now_ms;
        connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        // First, so that a full store has room for what follows.
        let mut delete = connection.prepare_cached("DELETE FROM msg WHERE id BETWEEN ? AND ?")?;
        for run in self.freed.chunk_by(|id, next| id + 1 == *next) {
            delete.execute((run[0].cast_signed(), run[run.len() - 1].cast_signed()))?;
        }
        for Statement { sql, values } in &self.statements {
            connection.prepare_cached(sql)?.execute(params_from_iter(values))?;
        }
        let mut insert = connection.prepare_cached(
            "INSERT INTO measurement(id, tenant, source, type, time, body) VALUES (?, ?, ?, ?, ?, ?)",
        )?;
        for ObjectRow { id, tenant, source, kind, time_ms, body, .. } in ascending(&self.measurements) {
            let (id, source) = (id.cast_signed(), source.cast_signed());
            insert.execute((id, tenant.as_str(), source, kind, time_ms, &**body))?;
        }
        let mut insert = connection.prepare_cached(
            "INSERT INTO event(id, tenant, source, type, time, body, created, updated)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7)",
        )?;
        for ObjectRow { id, tenant, source, kind, time_ms, body, created_ms } in ascending(&self.events) {
            let (id, source) = (id.cast_signed(), source.cast_signed());
            insert.execute((id, tenant.as_str(), source, kind, time_ms, &**body, created_ms))?;
        }
        let mut insert =
            connection.prepare_cached("INSERT INTO msg(id, topic, slot, ts, body, held) VALUES (?, ?, ?, ?, ?, ?)")?;
        for MessageRow { id, topic, slot, body, held } in &self.messages {
            insert.execute((id.cast_signed(), topic, slot, now_ms, &**body, held))?;
        }
        let mut update = connection
            .prepare_cached("UPDATE cursor SET hi = ?, holes = ?, settled = coalesce(?, settled) WHERE consumer = ?")?;
        for CursorRow { consumer, hi, holes, settled_ms } in &self.cursors {
            let holes = serde_json::to_string(holes).expect("invariant: numbers always serialize");
            update.execute((hi.cast_signed(), holes, settled_ms, consumer))?;
        }
        connection.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }
}

/// By id. Requests that came at once are not in that order, and a row that is not the last one may split a page.
fn ascending(rows: &[ObjectRow]) -> Vec<&ObjectRow> {
    let mut rows: Vec<&ObjectRow> = rows.iter().collect();
    rows.sort_unstable_by_key(|row| row.id);
    rows
}

/// What one row with so many bytes takes: small ones fill their pages by half at least, of larger ones all but the last page are full. Two
/// of its entries in indexes take a small share of a page each.
fn most_bytes(bytes: usize) -> u64 {
    let bytes = bytes as u64 + 200;
    if bytes < PAGE_BYTES { 2 * bytes } else { bytes + bytes / 64 + 2 * PAGE_BYTES }
}

impl ToSql for Value {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self {
            Self::Null => ValueRef::Null,
            Self::Int(number) => ValueRef::Integer(*number),
            Self::Text(text) => ValueRef::Text(text.as_bytes()),
            Self::Blob(blob) => ValueRef::Blob(blob),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_room_is_told_from_what_needs_it() {
        let statements = |sql: &[&'static str]| sql.iter().map(|sql| Statement { sql, values: Vec::new() }).collect();
        let of = |sql: &[&'static str]| Transaction { statements: statements(sql), ..Transaction::default() };
        let message = || MessageRow { id: 1, topic: 1, slot: 0, body: Bytes::new(), held: None };
        let settling = Transaction { freed: vec![1], ..of(&["INSERT OR REPLACE INTO meta(k, v) VALUES (?, ?)"]) };
        let deleting = Transaction { messages: vec![message()], ..of(&["DELETE FROM event WHERE id = ?"]) };
        let expiring = Transaction { freed: vec![1], ..of(&["INSERT INTO gap(consumer) VALUES (?)"]) };
        let moving = of(&["UPDATE meta SET v = ? WHERE k = 'message_id'", "UPDATE cursor SET hi = ?"]);
        let told = Transaction { messages: vec![message()], ..Transaction::default() };
        for (transaction, relieves, shows_room) in [
            (&settling, true, true),
            (&deleting, true, true),
            (&expiring, true, true),
            (&moving, true, false),
            (&told, false, true),
            (
                &Transaction {
                    moves: true,
                    ..of(&["INSERT INTO measurement_by_source", "DELETE FROM measurement_recent"])
                },
                false,
                true,
            ),
            (&of(&["UPDATE event SET body = ?"]), false, true),
            (&of(&["INSERT INTO consumer(topic) VALUES (?)", "UPDATE meta SET v = ?"]), false, true),
        ] {
            assert_eq!((transaction.relieves(), transaction.shows_room()), (relieves, shows_room), "{transaction:?}");
        }
    }
}
