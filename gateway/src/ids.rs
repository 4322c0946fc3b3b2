//! Object ids: one counter for all kinds and tenants, reserved in blocks, so that an id is never given twice.

use std::sync::Mutex;
use std::sync::PoisonError;

use crate::store::{Statement, StoreError, Value};
use crate::writer::{Change, Refused, Writer};

/// Ids that one reservation covers. A restart leaves the rest of a block unused.
const BLOCK: u64 = 1 << 16;

/// The counter.
pub struct ObjectIds {
    block: Mutex<Block>,
    /// Held while a block is being reserved.
    reserving: tokio::sync::Mutex<()>,
}

#[derive(Clone, Copy)]
struct Block {
    next: u64,
    end: u64,
}

impl ObjectIds {
    /// Begins with the next id that no block has reserved.
    pub async fn load(store: &sqlx::SqlitePool) -> Result<Self, StoreError> {
        let next: i64 = sqlx::query_scalar("SELECT v FROM meta WHERE k = 'object_id'").fetch_one(store).await?;
        let next = next.cast_unsigned();
        Ok(Self { block: Mutex::new(Block { next, end: next }), reserving: tokio::sync::Mutex::new(()) })
    }

    /// The first of `count` consecutive ids; waits for a commit when the block is used up.
    pub async fn take(&self, count: u64, writer: &Writer) -> Result<u64, Refused> {
        if let Some(first) = self.try_take(count) {
            return Ok(first);
        }
        let _reserving = self.reserving.lock().await;
        // Another request may have reserved while this one waited.
        if let Some(first) = self.try_take(count) {
            return Ok(first);
        }
        let start = self.block.lock().unwrap_or_else(PoisonError::into_inner).end;
        let end = start + count + BLOCK;
        let values = vec![Value::Int(end.cast_signed())];
        let statement = Statement { sql: "UPDATE meta SET v = ? WHERE k = 'object_id'", values };
        writer.commit(Change { statements: vec![statement], ..Change::default() }).await?;
        *self.block.lock().unwrap_or_else(PoisonError::into_inner) = Block { next: start + count, end };
        Ok(start)
    }

    fn try_take(&self, count: u64) -> Option<u64> {
        let mut block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        let first = block.next;
        if first + count > block.end {
            return None;
        }
        block.next += count;
        Some(first)
    }
}
