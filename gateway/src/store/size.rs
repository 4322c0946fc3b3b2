//! How large the database is, and how much room it has.

use std::io;
use std::path::Path;

use nix::sys::statvfs::statvfs;
use sqlx::SqlitePool;

use super::{StoreError, wal_of};

/// Sizes in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// The database without its write-ahead log.
    pub database: u64,
    /// Pages of it that nothing is in.
    pub free: u64,
    /// The file of the write-ahead log.
    pub wal: u64,
    /// What the file system still gives; `None` where it does not say.
    pub available: Option<u64>,
}

impl Size {
    /// As one of the readers and the file system tell it.
    pub async fn of(readers: &SqlitePool) -> Result<Self, StoreError> {
        let (page, pages, free): (i64, i64, i64) = sqlx::query_as(
            "SELECT page_size, page_count, freelist_count
             FROM pragma_page_size, pragma_page_count, pragma_freelist_count",
        )
        .fetch_one(readers)
        .await?;
        let bytes = |pages: i64| (pages * page).unsigned_abs();
        let file = readers.connect_options().get_filename().to_owned();
        let wal = length(&wal_of(&file));
        let available = file.parent().and_then(|directory| available(directory).ok());
        Ok(Self { database: bytes(pages), free: bytes(free), wal, available })
    }
}

/// Bytes that the file system still gives to files in `directory`.
pub(super) fn available(directory: &Path) -> io::Result<u64> {
    let disk = statvfs(directory)?;
    Ok(disk.blocks_available().saturating_mul(disk.fragment_size()))
}

/// Bytes of a file; 0 if it is not there.
pub(super) fn length(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |file| file.len())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::{Statement, Store, Transaction, Value};
    use super::*;

    #[tokio::test]
    async fn what_is_deleted_is_free_and_what_is_written_is_in_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), &crate::config::Store::default()).await.unwrap();
        let Store { writer: mut writing, readers, .. } = store;
        let before = Size::of(&readers).await.unwrap();
        let mut run = async |sql, values| {
            let statements = vec![Statement { sql, values }];
            writing.commit(&Transaction { statements, ..Transaction::default() }).await.unwrap();
        };
        let sql = "INSERT INTO msg(id, topic, slot, ts, body) VALUES (1, 1, 0, 0, zeroblob(?))";
        run(sql, vec![Value::Int(1 << 20)]).await;
        let full = Size::of(&readers).await.unwrap();
        assert!(full.database >= before.database + (1 << 20), "{before:?} {full:?}");
        assert!(full.wal > 1 << 20 && full.available.is_some_and(|bytes| bytes > 0), "{full:?}");
        run("DELETE FROM msg", Vec::new()).await;
        let empty = Size::of(&readers).await.unwrap();
        assert!(empty.free >= full.free + (1 << 20), "{full:?} {empty:?}");
    }
}
