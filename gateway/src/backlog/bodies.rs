//! The bodies of messages: the newest from memory, the others from disk.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use sqlx::{Row as _, SqlitePool};

use super::Held;
use crate::store::StoreError;

/// Reads bodies by id. Consumers that keep up never touch the disk.
#[derive(Clone)]
pub struct Bodies {
    tail: Arc<Mutex<Tail>>,
    readers: SqlitePool,
}

struct Tail {
    /// Every message committed since the oldest one here, ascending.
    bodies: VecDeque<(u64, Bytes)>,
    bytes: usize,
    limit: usize,
    /// Messages below this may be on disk alone.
    floor: u64,
}

impl Bodies {
    /// Keeps at most `tail_bytes` in memory. `floor`: the id that the next message gets.
    #[must_use]
    pub fn new(readers: SqlitePool, tail_bytes: usize, floor: u64) -> Self {
        let tail = Tail { bodies: VecDeque::new(), bytes: 0, limit: tail_bytes, floor };
        Self { tail: Arc::new(Mutex::new(tail)), readers }
    }

    /// Adds what has just been committed, before the topics announce it.
    pub(super) fn push(&self, bodies: impl Iterator<Item = (u64, Bytes)>) {
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, body) in bodies {
            tail.bytes += body.len();
            tail.bodies.push_back((id, body));
        }
        while tail.bytes > tail.limit
            && let Some((id, body)) = tail.bodies.pop_front()
        {
            tail.bytes -= body.len();
            tail.floor = id + 1;
        }
    }

    /// The bodies of `ids` (ascending), in that order. Ids that are gone are left out.
    pub async fn read(&self, ids: &[u64]) -> Result<Vec<(u64, Bytes)>, StoreError> {
        let Some(&first) = ids.first() else { return Ok(Vec::new()) };
        if let Some(bodies) = self.recent(first, ids) {
            return Ok(bodies);
        }
        let list = serde_json::to_string(ids).expect("invariant: numbers always serialize");
        let rows = sqlx::query("SELECT id, body FROM msg WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id")
            .bind(list)
            .fetch_all(&self.readers)
            .await?;
        rows.into_iter()
            .map(|row| Ok((row.try_get::<i64, _>(0)?.cast_unsigned(), Bytes::from(row.try_get::<Vec<u8>, _>(1)?))))
            .collect::<Result<_, sqlx::Error>>()
            .map_err(StoreError::from)
    }

    /// Held messages `ids` (ascending) with what is needed to judge them, in that order. Ids that are gone are left out.
    pub async fn held(&self, ids: &[u64]) -> Result<Vec<(u64, Bytes, Held)>, StoreError> {
        let list = serde_json::to_string(ids).expect("invariant: numbers always serialize");
        let sql = "SELECT id, body, held FROM msg
                   WHERE id IN (SELECT value FROM json_each(?)) AND held IS NOT NULL ORDER BY id";
        let rows: Vec<(i64, Vec<u8>, String)> = sqlx::query_as(sql).bind(list).fetch_all(&self.readers).await?;
        let row = |(id, body, held): (i64, Vec<u8>, String)| {
            let held = serde_json::from_str(&held).map_err(|error| StoreError::Database(error.into()))?;
            Ok((id.cast_unsigned(), body.into(), held))
        };
        rows.into_iter().map(row).collect()
    }

    fn recent(&self, first: u64, ids: &[u64]) -> Option<Vec<(u64, Bytes)>> {
        let tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        if first < tail.floor {
            return None;
        }
        let mut at = 0;
        let found = ids
            .iter()
            .filter_map(|id| {
                // Most are neighbours.
                if tail.bodies.get(at).is_none_or(|(found, _)| found != id) {
                    at = tail.bodies.binary_search_by_key(id, |(id, _)| *id).ok()?;
                }
                at += 1;
                tail.bodies.get(at - 1).cloned()
            })
            .collect();
        Some(found)
    }
}
