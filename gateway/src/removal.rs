//! What is left of tenants that were removed goes from the disk: a consumer when nothing waits for it any more, a topic with its
//! last consumer, settings with the last topic. Of tenants that are to be purged all topics go at once, and the objects, too.
//!
//! Nothing new arrives for such a tenant, so that its topics can only shrink: they are delivered, or expire. Objects go a few at
//! a time, as [`crate::retention`] deletes, which also deletes what belonged to them.

use std::sync::Arc;
use std::time::Duration;

use sqlx::SqlitePool;
use tokio_util::sync::CancellationToken;

use crate::accounts::{self, Removed};
use crate::backlog::{Settings, Topics};
use crate::clock::Clock;
use crate::platform::{Sources, inventory};
use crate::store::StoreError;
use crate::writer::{Change, Refused, Writer};

/// Pause between two looks.
const PERIOD: Duration = Duration::from_secs(1);
/// Pause after a look that failed.
const RETRY: Duration = Duration::from_secs(10);
/// Pause between two commits that delete objects.
const PAUSE: Duration = Duration::from_millis(50);
/// Managed objects that one commit deletes.
const CHUNK: u32 = 1000;
/// So long after the removal a turn may still be on its way to the disk.
const TURN_MS: i64 = 5_000;
/// So long after the removal a request may still be arriving that was let in before.
const REQUEST_MS: i64 = 600_000;

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

/// Deletes what is left of removed tenants.
pub struct Removal {
    /// Where it is read.
    pub store: SqlitePool,
    /// Where it is deleted.
    pub writer: Writer,
    /// Topics with a consumer.
    pub topics: Topics,
    /// Managed objects that exist.
    pub sources: Arc<Sources>,
    /// The time.
    pub clock: Clock,
}

impl Removal {
    /// Runs until `stop` ends.
    pub async fn run(self, stop: CancellationToken) {
        let mut pause = PERIOD;
        while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
            pause = match stop.run_until_cancelled(self.round()).await {
                Some(Err(error)) => {
                    tracing::warn!(%error, cause = ?error, "what is left of removed tenants could not be deleted");
                    RETRY
                }
                _ => PERIOD,
            };
        }
    }

    async fn round(&self) -> Result<(), Unfinished> {
        for tenant in accounts::removed(&self.store).await? {
            self.delete(&tenant).await?;
        }
        Ok(())
    }

    async fn delete(&self, tenant: &Removed) -> Result<(), Unfinished> {
        let since_ms = self.clock.now_ms() - tenant.removed_ms;
        let topics = self.topics.figures(Some(&tenant.name));
        for topic in &topics {
            for consumer in &topic.consumers {
                if tenant.purge || (consumer.backlog_messages == 0 && since_ms > TURN_MS) {
                    self.writer.unsubscribe(topic.key.clone(), &consumer.name).await?;
                }
            }
        }
        if tenant.purge {
            while self.delete_objects(tenant).await? {
                tokio::time::sleep(PAUSE).await;
            }
        }
        if topics.is_empty() && since_ms > REQUEST_MS {
            self.forget(tenant).await?;
        }
        Ok(())
    }

    /// False if there was none.
    async fn delete_objects(&self, tenant: &Removed) -> Result<bool, Unfinished> {
        let ids: Vec<i64> = sqlx::query_scalar("SELECT id FROM managed_object WHERE tenant = ? LIMIT ?")
            .bind(tenant.name.as_str())
            .bind(CHUNK)
            .fetch_all(&self.store)
            .await?;
        let ids: Vec<u64> = ids.into_iter().map(i64::cast_unsigned).collect();
        if ids.is_empty() {
            return Ok(false);
        }
        self.writer.commit(Change { statements: inventory::deletions(&ids), ..Change::default() }).await?;
        ids.iter().for_each(|id| self.sources.remove(*id));
        Ok(true)
    }

    async fn forget(&self, tenant: &Removed) -> Result<(), Unfinished> {
        for key in self.topics.with_settings(&tenant.name) {
            self.writer.set_topic(key, Settings::default()).await?;
        }
        self.writer.set_tenant(tenant.name.clone(), Settings::default()).await?;
        Ok(self.writer.commit(Change { statements: vec![tenant.settle()], ..Change::default() }).await?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::backlog::{BacklogLimits, Ledger, TopicKey};
    use crate::consumer::GroupLimits;
    use crate::store::{Statement, Store};
    use crate::writer::ConsumerLimits;

    const REMOVED_MS: i64 = 1_000_000;
    const OBJECTS: u64 = 1_500;

    /// A tenant that was just removed, with objects and settings, beside another one.
    async fn removal(dir: &std::path::Path, rest: &'static str) -> Removal {
        let Store { mut writer, readers, .. } = Store::open(dir, &crate::config::Store::default()).await.unwrap();
        let clock = Clock::manual(REMOVED_MS);
        let limits = BacklogLimits { quota_bytes: 1, ttl_seconds: 1, tail_bytes: 0, volatile_bytes: 0 };
        let ledger = Ledger::load(&mut writer, readers.clone(), limits, clock.clone()).await.unwrap();
        let topics = ledger.topics();
        let limits = ConsumerLimits { topics: 1, consumers: 1, group: GroupLimits { window: 1, members: 1 } };
        let (writer, _) = Writer::spawn(writer, ledger, clock.clone(), limits);
        let sources = Arc::new(Sources::default());
        let removal = Removal { store: readers, writer, topics, sources, clock };
        removal.sql("INSERT INTO tenant(name, created, removed) VALUES ('gone', 0, 1000000)").await;
        removal.sql(rest).await;
        removal
            .sql(
                "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 1600)
                 INSERT INTO managed_object SELECT i, iif(i > 1500, 'other', 'gone'), NULL, 0, 0, x'' FROM n",
            )
            .await;
        (1..=OBJECTS).for_each(|id| removal.sources.insert(&"gone".into(), id, None));
        let key = TopicKey { tenant: "gone".into(), name: "s".into(), non_persistent: false };
        let settings = Settings { quota_bytes: Some(7), ..Settings::default() };
        removal.writer.set_topic(Arc::new(key), settings).await.unwrap();
        removal.writer.set_tenant("gone".into(), settings).await.unwrap();
        removal
    }

    impl Removal {
        async fn sql(&self, sql: &'static str) {
            let statements = vec![Statement { sql, values: Vec::new() }];
            self.writer.commit(Change { statements, ..Change::default() }).await.unwrap();
        }

        async fn number(&self, sql: &'static str) -> i64 {
            sqlx::query_scalar(sql).fetch_one(&self.store).await.unwrap()
        }
    }

    #[tokio::test]
    async fn objects_are_purged_a_chunk_at_a_time_and_those_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let removal = removal(dir.path(), "UPDATE tenant SET rest = 2 WHERE name = 'gone'").await;
        let tenant = accounts::removed(&removal.store).await.unwrap().remove(0);
        assert!(removal.delete_objects(&tenant).await.unwrap());
        assert_eq!(removal.number("SELECT count(*) FROM managed_object WHERE tenant = 'gone'").await, 500);
        removal.round().await.unwrap();
        assert_eq!(removal.number("SELECT count(*) FROM managed_object").await, 100);
        assert_eq!(removal.sources.counts(&"gone".into()).objects, 0);
        assert_eq!(removal.number("SELECT count(*) FROM gone").await, 1_500, "what belonged to them goes, too");
    }

    #[tokio::test]
    async fn a_tenant_is_settled_when_no_request_can_be_on_its_way() {
        let dir = tempfile::tempdir().unwrap();
        let removal = removal(dir.path(), "UPDATE tenant SET rest = 1 WHERE name = 'gone'").await;
        removal.clock.advance(REQUEST_MS);
        removal.round().await.unwrap();
        assert_eq!(removal.topics.with_settings(&"gone".into()).len(), 1);
        removal.clock.advance(1);
        removal.round().await.unwrap();
        assert_eq!(removal.topics.with_settings(&"gone".into()), []);
        assert_eq!(removal.topics.tenant_settings(&"gone".into()), Settings::default());
        assert!(accounts::removed(&removal.store).await.unwrap().is_empty());
        assert_eq!(removal.number("SELECT count(*) FROM managed_object").await, 1_600, "objects stay");
    }
}
