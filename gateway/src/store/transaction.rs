//! All rows of one commit, sent to SQLite as one multi-statement query.
//!
//! One round trip costs the same for one row and for a thousand: the bodies travel in one blob, and `json_each` unpacks
//! the rows. The text depends only on which kinds of rows there are, so it is prepared once.

use std::fmt::Write as _;

use bytes::Bytes;
use sqlx::query::Query;
use sqlx::sqlite::SqliteArguments;
use sqlx::{AssertSqlSafe, Sqlite};

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
}

/// Where a consumer is; see `consumer::Cursor`.
#[derive(Clone, Debug, serde::Serialize)]
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

    /// The whole transaction as one query. Bare `?` take the arguments statement by statement.
    pub(super) fn query(&self) -> Query<'static, Sqlite, SqliteArguments> {
        let mut sql = String::from("BEGIN IMMEDIATE;");
        // First, so that a full store has room for what follows.
        if !self.freed.is_empty() {
            sql.push_str("DELETE FROM msg WHERE id IN (SELECT value FROM json_each(?));");
        }
        for statement in &self.statements {
            sql.push_str(statement.sql);
            sql.push(';');
        }
        if !self.measurements.is_empty() {
            sql.push_str(
                "INSERT INTO measurement(id, tenant, source, type, time, body)
                 SELECT value->>0, value->>1, value->>2, value->>3, value->>4, substr(?, (value->>5) + 1, value->>6)
                 FROM json_each(?);",
            );
        }
        if !self.events.is_empty() {
            sql.push_str(
                "INSERT INTO event(id, tenant, source, type, time, body, created, updated)
                 SELECT value->>0, value->>1, value->>2, value->>3, value->>4, substr(?, (value->>5) + 1, value->>6),
                 value->>7, value->>7 FROM json_each(?);",
            );
        }
        if !self.messages.is_empty() {
            sql.push_str(
                "INSERT INTO msg(id, topic, slot, ts, body)
                 SELECT value->>0, value->>1, value->>2, ?, substr(?, (value->>3) + 1, value->>4) FROM json_each(?);",
            );
        }
        if !self.cursors.is_empty() {
            sql.push_str(
                "UPDATE cursor SET hi = e.value->>'hi', holes = e.value->'holes',
                 settled = coalesce(e.value->>'settled_ms', settled)
                 FROM json_each(?) AS e WHERE consumer = e.value->>'consumer';",
            );
        }
        sql.push_str("COMMIT");
        // There is no end of combinations of single statements; the connection keeps those texts that come again.
        self.bind(sqlx::query(AssertSqlSafe(sql))).persistent(self.statements.len() <= 1)
    }

    fn bind(&self, mut query: Query<'static, Sqlite, SqliteArguments>) -> Query<'static, Sqlite, SqliteArguments> {
        if !self.freed.is_empty() {
            query = query.bind(json(&self.freed));
        }
        for value in self.statements.iter().flat_map(|statement| &statement.values) {
            query = match value {
                Value::Null => query.bind(None::<i64>),
                Value::Int(number) => query.bind(*number),
                Value::Text(text) => query.bind(text.clone()),
                Value::Blob(bytes) => query.bind(bytes.to_vec()),
            };
        }
        for objects in [&self.measurements, &self.events] {
            if !objects.is_empty() {
                let (blob, rows) = pack_objects(objects);
                query = query.bind(blob).bind(rows);
            }
        }
        if !self.messages.is_empty() {
            let (blob, rows) = self.pack_messages();
            query = query.bind(self.now_ms).bind(blob).bind(rows);
        }
        if !self.cursors.is_empty() {
            query = query.bind(json(&self.cursors));
        }
        query
    }

    fn pack_messages(&self) -> (Vec<u8>, String) {
        let mut blob = Vec::with_capacity(self.messages.iter().map(|row| row.body.len()).sum());
        let mut rows = String::with_capacity(self.messages.len() * 32);
        rows.push('[');
        for (index, row) in self.messages.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let MessageRow { id, topic, slot, body } = row;
            let _ = write!(rows, "{comma}[{id},{topic},{slot},{},{}]", blob.len(), body.len());
            blob.extend_from_slice(&row.body);
        }
        rows.push(']');
        (blob, rows)
    }
}

/// All bodies in one blob, and a row `[id, tenant, source, type, time, offset, length, created]` for each object.
fn pack_objects(objects: &[ObjectRow]) -> (Vec<u8>, String) {
    let mut blob = Vec::with_capacity(objects.iter().map(|row| row.body.len()).sum());
    let rows: Vec<_> = objects
        .iter()
        .map(|row| {
            let offset = blob.len();
            blob.extend_from_slice(&row.body);
            (row.id, row.tenant.as_str(), row.source, &*row.kind, row.time_ms, offset, row.body.len(), row.created_ms)
        })
        .collect();
    let rows = json(&rows);
    (blob, rows)
}

fn json(rows: &impl serde::Serialize) -> String {
    serde_json::to_string(rows).expect("invariant: numbers and texts always serialize")
}
