//! What nobody shall find any more goes from the disk: objects past their time, and those whose managed object is gone.
//!
//! A few rows at a time, the oldest first, each time in one small commit among the others: producers hardly notice, and a device
//! with millions of measurements is no different from one with ten. There are no notifications.

use std::time::Duration;

use sqlx::SqlitePool;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::config;
use crate::platform::list::id_list;
use crate::store::{Statement, StoreError, Value};
use crate::writer::{Change, Refused, Writer};

/// Pause between two looks for something to delete.
const PERIOD: Duration = Duration::from_secs(10);
/// Pause between two commits while there is something.
const PAUSE: Duration = Duration::from_millis(50);
/// Rows that one commit deletes.
const CHUNK: u32 = 1000;
/// Managed objects that are gone and read at a time.
const GONE: u32 = 100;
/// How long a managed object that is gone is remembered at least: a request that found it may still be on its way to the disk.
const LINGER_SECONDS: i64 = 60;
const DAY_MS: i64 = 86_400_000;

/// A table that objects are deleted from.
struct Table {
    /// Name of its metric's label.
    name: &'static str,
    /// Its tenants, one after another along the index on tenant and time.
    tenants: &'static str,
    /// Ids of a tenant's objects before a time, the oldest first.
    expired: &'static str,
    /// Ids of a source's objects.
    of_source: &'static str,
    delete: &'static str,
}

macro_rules! table {
    ($name:literal, $by_source:literal, $also:literal) => {
        Table {
            name: $name,
            tenants: concat!(
                "WITH RECURSIVE t(tenant) AS (SELECT min(tenant) FROM ",
                $name,
                " UNION ALL SELECT (SELECT min(tenant) FROM ",
                $name,
                " WHERE tenant > t.tenant) FROM t WHERE t.tenant IS NOT NULL) SELECT tenant FROM t WHERE tenant IS NOT NULL"
            ),
            expired: concat!("SELECT id FROM ", $name, " WHERE tenant = ? AND time < ?", $also, " ORDER BY time LIMIT ?"),
            of_source: concat!("SELECT id FROM ", $by_source, " WHERE source = ? LIMIT ?"),
            delete: concat!("DELETE FROM ", $name, " WHERE id IN (SELECT value FROM json_each(?))"),
        }
    };
}

const TABLES: [Table; 4] = [
    table!("measurement", "measurement_place", ""),
    table!("event", "event", ""),
    // On the platform, too, an alarm must be cleared before it can be forgotten.
    table!("alarm", "alarm", " AND status = 'CLEARED'"),
    table!("operation", "operation", ""),
];

/// Why a round was not finished; the next one goes on.
#[derive(Debug, thiserror::Error)]
enum Unfinished {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Refused(#[from] Refused),
}

impl From<sqlx::Error> for Unfinished {
    fn from(error: sqlx::Error) -> Self {
        Self::Store(error.into())
    }
}

/// Deletes what is too old, or whose managed object is gone.
pub struct Retention {
    store: SqlitePool,
    writer: Writer,
    clock: Clock,
    /// For each of [`TABLES`], how long its objects are kept.
    keep_ms: [i64; TABLES.len()],
}

impl Retention {
    /// Nothing is done before [`Retention::run`].
    #[must_use]
    pub fn new(config: &config::Retention, store: SqlitePool, writer: Writer, clock: Clock) -> Self {
        let days = [config.measurements_days, config.events_days, config.alarms_days, config.operations_days];
        let keep_ms = days.map(|days| i64::try_from(days).unwrap_or(i64::MAX).saturating_mul(DAY_MS));
        Self { store, writer, clock, keep_ms }
    }

    /// Runs until `stop` ends.
    pub async fn run(self, stop: CancellationToken) {
        let rounds = async {
            loop {
                if let Err(error) = self.round().await {
                    tracing::warn!(%error, cause = ?error, "old objects could not be deleted, trying again later");
                }
                tokio::time::sleep(PERIOD).await;
            }
        };
        tokio::select! {
            () = rounds => {}
            () = stop.cancelled() => {}
        }
    }

    /// Deletes all that there is to delete.
    async fn round(&self) -> Result<(), Unfinished> {
        let now_ms = self.clock.now_ms();
        for (table, keep_ms) in TABLES.iter().zip(self.keep_ms) {
            let tenants: Vec<String> = sqlx::query_scalar(table.tenants).fetch_all(&self.store).await?;
            for tenant in tenants {
                let values = [Value::Text(tenant), Value::Int(now_ms.saturating_sub(keep_ms))];
                self.empty(table, "expired", table.expired, &values).await?;
            }
        }
        self.forget_gone().await
    }

    /// Objects of managed objects that are gone; nobody has seen them since.
    async fn forget_gone(&self) -> Result<(), Unfinished> {
        let old: i64 = sqlx::query_scalar("SELECT unixepoch() - ?").bind(LINGER_SECONDS).fetch_one(&self.store).await?;
        let (mut after, mut is_old) = (0, false);
        loop {
            let gone: Vec<(i64, i64)> =
                sqlx::query_as("SELECT source, since FROM gone WHERE source > ? ORDER BY source LIMIT ?")
                    .bind(after)
                    .bind(GONE)
                    .fetch_all(&self.store)
                    .await?;
            let Some((last, _)) = gone.last() else { break };
            after = *last;
            for (source, since) in gone {
                is_old |= since < old;
                for table in &TABLES {
                    self.empty(table, "orphaned", table.of_source, &[Value::Int(source)]).await?;
                }
            }
        }
        if is_old {
            self.commit("DELETE FROM gone WHERE since < ?", vec![Value::Int(old)]).await?;
        }
        Ok(())
    }

    /// Deletes what the query `some` finds, with these values and a limit, until it finds less than a chunk.
    async fn empty(
        &self,
        table: &Table,
        reason: &'static str,
        some: &'static str,
        values: &[Value],
    ) -> Result<(), Unfinished> {
        loop {
            let deleted = self.delete_chunk(table, some, values).await?;
            metrics::counter!("tidegate_objects_deleted_total", "table" => table.name, "reason" => reason)
                .increment(deleted as u64);
            if deleted < CHUNK as usize {
                return Ok(());
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Returns how many rows it has deleted.
    async fn delete_chunk(&self, table: &Table, some: &'static str, values: &[Value]) -> Result<usize, Unfinished> {
        let mut query = sqlx::query_scalar(some);
        for value in values {
            query = match value {
                Value::Text(text) => query.bind(text),
                Value::Int(number) => query.bind(number),
                Value::Null | Value::Blob(_) => query,
            };
        }
        let ids: Vec<i64> = query.bind(CHUNK).fetch_all(&self.store).await?;
        if !ids.is_empty() {
            let list: Vec<_> = ids.iter().map(|id| id.cast_unsigned()).collect();
            self.commit(table.delete, vec![Value::Text(id_list(&list))]).await?;
        }
        Ok(ids.len())
    }

    async fn commit(&self, sql: &'static str, values: Vec<Value>) -> Result<(), Refused> {
        let statements = vec![Statement { sql, values }];
        self.writer.commit(Change { statements, ..Change::default() }).await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use bytes::Bytes;

    use super::*;
    use crate::backlog::{BacklogLimits, Ledger};
    use crate::consumer::GroupLimits;
    use crate::store::{ObjectRow, Store};
    use crate::writer::ConsumerLimits;

    /// A store with its writer, and a retention of one day that has a clock of its own.
    struct Place {
        _dir: tempfile::TempDir,
        retention: Retention,
    }

    impl Place {
        async fn at(now_ms: i64) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let Store { mut writer, readers, .. } =
                Store::open(dir.path(), &crate::config::Store::default()).await.unwrap();
            let backlog = BacklogLimits { quota_bytes: 1 << 20, ttl_seconds: 1, tail_bytes: 0, volatile_bytes: 0 };
            let clock = Clock::manual(now_ms);
            let ledger = Ledger::load(&mut writer, readers.clone(), backlog, clock.clone()).await.unwrap();
            let limits = ConsumerLimits { topics: 1, consumers: 1, group: GroupLimits { window: 1, members: 1 } };
            let (writer, _) = Writer::spawn(writer, ledger, clock.clone(), limits);
            let days = config::Retention { measurements_days: 1, events_days: 2, alarms_days: 1, operations_days: 1 };
            Self { _dir: dir, retention: Retention::new(&days, readers, writer, clock) }
        }

        async fn write(&self, change: Change) {
            self.retention.writer.commit(change).await.unwrap();
        }

        async fn sql(&self, sql: &'static str) {
            self.write(Change { statements: vec![Statement { sql, values: Vec::new() }], ..Change::default() }).await;
        }

        async fn numbers(&self, sql: &'static str) -> Vec<i64> {
            sqlx::query_scalar(sql).fetch_all(&self.retention.store).await.unwrap()
        }
    }

    fn row(id: u64, tenant: &str, time_ms: i64) -> ObjectRow {
        let (kind, body) = ("t".into(), Bytes::from_static(b"\"a\":1"));
        ObjectRow { id, tenant: tenant.into(), source: 7, kind, time_ms, created_ms: 0, body }
    }

    #[tokio::test]
    async fn what_has_had_its_time_goes_for_every_tenant_and_table() {
        let place = Place::at(3 * DAY_MS).await;
        let of = |times: [i64; 4]| {
            let row = |(id, (tenant, days)): (u64, (&str, i64))| row(id, tenant, days * DAY_MS);
            (1..).zip(["a", "a", "b", "c"].into_iter().zip(times)).map(row).collect::<Vec<_>>()
        };
        place.write(Change { measurements: of([1, 2, 0, 3]), events: of([1, 2, 0, 3]), ..Change::default() }).await;
        place
            .sql(
                "INSERT INTO alarm SELECT id, tenant, source, type, time, time, 1, 0, 0,
                 CASE id WHEN 3 THEN 'ACTIVE' ELSE 'CLEARED' END, 'MAJOR', body FROM event",
            )
            .await;
        place.sql("INSERT INTO operation SELECT id, tenant, source, NULL, time, 'PENDING', body FROM event").await;
        place.retention.round().await.unwrap();
        for (sql, left) in [
            ("SELECT id FROM measurement ORDER BY id", &[2, 4][..]),
            ("SELECT id FROM event ORDER BY id", &[1, 2, 4]),
            ("SELECT id FROM alarm ORDER BY id", &[2, 3, 4]),
            ("SELECT id FROM operation ORDER BY id", &[2, 4]),
        ] {
            assert_eq!(place.numbers(sql).await, left, "{sql}");
        }
        place.retention.clock.advance(1);
        place.retention.round().await.unwrap();
        assert_eq!(place.numbers("SELECT id FROM measurement").await, [4], "a moment later");
    }

    #[tokio::test]
    async fn a_commit_deletes_no_more_than_a_chunk_and_the_oldest_first() {
        let place = Place::at(10 * DAY_MS).await;
        let count = i64::from(CHUNK) + 5;
        // The newest come first.
        let rows = (1..=count).map(|id| row(id.cast_unsigned(), "a", count - id)).collect();
        place.write(Change { measurements: rows, ..Change::default() }).await;
        let table = &TABLES[0];
        let values = [Value::Text("a".to_owned()), Value::Int(DAY_MS)];
        let deleted = place.retention.delete_chunk(table, table.expired, &values).await.unwrap();
        assert_eq!(deleted, CHUNK as usize);
        assert_eq!(place.numbers("SELECT id FROM measurement ORDER BY id").await, [1, 2, 3, 4, 5]);
        place.retention.round().await.unwrap();
        assert_eq!(place.numbers("SELECT count(*) FROM measurement").await, [0]);
    }

    #[tokio::test]
    async fn objects_go_with_their_managed_object_which_is_remembered_for_a_while() {
        let place = Place::at(0).await;
        place.sql("INSERT INTO managed_object VALUES (7, 'a', NULL, 0, 0, x''), (8, 'a', NULL, 0, 0, x'')").await;
        let other = ObjectRow { source: 8, ..row(2, "a", 0) };
        place
            .write(Change {
                measurements: vec![row(1, "a", 0), other],
                events: vec![row(3, "a", 0)],
                ..Change::default()
            })
            .await;
        place.sql("DELETE FROM managed_object WHERE id = 7").await;
        place.retention.round().await.unwrap();
        assert_eq!(place.numbers("SELECT id FROM measurement").await, [2]);
        assert_eq!(place.numbers("SELECT count(*) FROM event").await, [0]);
        assert_eq!(place.numbers("SELECT source FROM gone").await, [7]);
        place.write(Change { measurements: vec![row(4, "a", 0)], ..Change::default() }).await;
        place.sql("UPDATE gone SET since = since - 100").await;
        place.retention.round().await.unwrap();
        assert_eq!(place.numbers("SELECT id FROM measurement").await, [2], "a late one");
        assert_eq!(place.numbers("SELECT count(*) FROM gone").await, [0]);
    }
}
