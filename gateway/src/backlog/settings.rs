//! What holds for a topic: what is set for it, else for its tenant, else in the configuration.

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::Arc;

use sqlx::Row as _;
use sqlx::sqlite::SqliteRow;

use super::TopicKey;
use crate::message::Tenant;
use crate::store::{Statement, StoreError, Value, Writing};

/// What happens when a message finds the quota of its topic used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// The request is refused, and nothing of it is appended.
    Reject,
    /// The oldest messages go.
    EvictOldest,
    /// The consumer that lags most is left behind.
    Park,
}

impl OnFull {
    /// As it stands in settings.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reject => "reject",
            Self::EvictOldest => "evict-oldest",
            Self::Park => "park",
        }
    }
}

impl FromStr for OnFull {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Reject, Self::EvictOldest, Self::Park]
            .into_iter()
            .find(|on_full| on_full.as_str() == text)
            .ok_or("none of reject, evict-oldest and park")
    }
}

/// What is set for a topic or a tenant; `None`: the level above decides (topic, then tenant, then configuration).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Stored bytes of a topic.
    pub quota_bytes: Option<u64>,
    /// Seconds after which a message goes, acknowledged or not.
    pub ttl_seconds: Option<u64>,
    /// What happens at the quota.
    pub on_full: Option<OnFull>,
    /// Whether a consumer is told what it missed.
    pub gap_messages: Option<bool>,
}

/// What holds for a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// See [`Settings::quota_bytes`].
    pub quota_bytes: u64,
    /// See [`Settings::ttl_seconds`].
    pub ttl_seconds: u64,
    /// See [`Settings::on_full`].
    pub on_full: OnFull,
    /// See [`Settings::gap_messages`].
    pub gap_messages: bool,
}

/// Whom settings are for.
#[derive(Clone, Debug)]
pub enum Scope {
    /// A topic, whether it exists or not.
    Topic(Arc<TopicKey>),
    /// All topics of a tenant that have none of their own.
    Tenant(Tenant),
}

impl Policy {
    /// The time to live in ms.
    #[must_use]
    pub fn ttl_ms(&self) -> u64 {
        self.ttl_seconds.saturating_mul(1_000)
    }
}

impl Settings {
    fn over(self, policy: Policy) -> Policy {
        Policy {
            quota_bytes: self.quota_bytes.unwrap_or(policy.quota_bytes),
            ttl_seconds: self.ttl_seconds.unwrap_or(policy.ttl_seconds),
            on_full: self.on_full.unwrap_or(policy.on_full),
            gap_messages: self.gap_messages.unwrap_or(policy.gap_messages),
        }
    }

    fn values(self) -> [Value; 4] {
        let int = |number: Option<u64>| number.map_or(Value::Null, |number| Value::Int(number.cast_signed()));
        [
            int(self.quota_bytes),
            int(self.ttl_seconds),
            self.on_full.map_or(Value::Null, |on_full| Value::Text(on_full.as_str().to_owned())),
            int(self.gap_messages.map(u64::from)),
        ]
    }

    fn read(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        let number = |column| Ok::<_, sqlx::Error>(row.try_get::<Option<i64>, _>(column)?.map(i64::cast_unsigned));
        let on_full = row.try_get::<Option<&str>, _>("on_full")?.map(OnFull::from_str).transpose();
        Ok(Self {
            quota_bytes: number("quota_bytes")?,
            ttl_seconds: number("ttl_seconds")?,
            on_full: on_full.map_err(|error| sqlx::Error::Decode(error.into()))?,
            gap_messages: number("gap_messages")?.map(|number| number != 0),
        })
    }
}

/// All settings.
pub(super) struct Book {
    persistent: Policy,
    volatile: Policy,
    topics: HashMap<Arc<TopicKey>, Settings>,
    tenants: HashMap<Tenant, Settings>,
}

impl Book {
    /// Nothing is set: `persistent` and `volatile` hold, by the kind of the topic.
    pub(super) fn new(persistent: Policy, volatile: Policy) -> Self {
        Self { persistent, volatile, topics: HashMap::new(), tenants: HashMap::new() }
    }

    pub(super) async fn load(&mut self, writing: &mut Writing) -> Result<(), StoreError> {
        for row in sqlx::query("SELECT * FROM topic_setting").fetch_all(writing.connection()).await? {
            let (tenant, name) = (row.try_get::<&str, _>("tenant")?.into(), row.try_get::<&str, _>("name")?.into());
            let key = TopicKey { tenant, name, non_persistent: row.try_get("non_persistent")? };
            self.topics.insert(Arc::new(key), Settings::read(&row)?);
        }
        for row in sqlx::query("SELECT * FROM tenant_setting").fetch_all(writing.connection()).await? {
            self.tenants.insert(row.try_get::<&str, _>("tenant")?.into(), Settings::read(&row)?);
        }
        Ok(())
    }

    pub(super) fn topic(&self, key: &TopicKey) -> Settings {
        self.topics.get(key).copied().unwrap_or_default()
    }

    pub(super) fn topics(&self, tenant: &Tenant) -> Vec<Arc<TopicKey>> {
        self.topics.keys().filter(|key| key.tenant == *tenant).cloned().collect()
    }

    pub(super) fn tenant(&self, tenant: &Tenant) -> Settings {
        self.tenants.get(tenant).copied().unwrap_or_default()
    }

    /// Non-persistent topics are in memory: a tenant's quota is not for them, and their producers are never refused.
    pub(super) fn policy(&self, key: &TopicKey) -> Policy {
        let (topic, tenant) = (self.topic(key), self.tenant(&key.tenant));
        if key.non_persistent {
            let tenant = Settings { quota_bytes: None, ..tenant };
            return Policy { on_full: OnFull::EvictOldest, ..topic.over(tenant.over(self.volatile)) };
        }
        topic.over(tenant.over(self.persistent))
    }

    pub(super) fn set(&mut self, scope: Scope, settings: Settings) {
        let nothing = settings == Settings::default();
        match scope {
            Scope::Topic(key) if nothing => drop(self.topics.remove(&key)),
            Scope::Topic(key) => drop(self.topics.insert(key, settings)),
            Scope::Tenant(tenant) if nothing => drop(self.tenants.remove(&tenant)),
            Scope::Tenant(tenant) => drop(self.tenants.insert(tenant, settings)),
        }
    }
}

/// The row that remembers settings, or its end if they say nothing.
pub(super) fn statement(scope: &Scope, settings: Settings) -> Statement {
    let text = |text: &str| Value::Text(text.to_owned());
    let mut values = match scope {
        Scope::Topic(key) => {
            vec![text(key.tenant.as_str()), text(&key.name), Value::Int(i64::from(key.non_persistent))]
        }
        Scope::Tenant(tenant) => vec![text(tenant.as_str())],
    };
    let nothing = settings == Settings::default();
    if !nothing {
        values.extend(settings.values());
    }
    let sql = match (scope, nothing) {
        (Scope::Topic(_), true) => "DELETE FROM topic_setting WHERE tenant = ? AND name = ? AND non_persistent = ?",
        (Scope::Topic(_), false) => {
            "INSERT OR REPLACE INTO
             topic_setting(tenant, name, non_persistent, quota_bytes, ttl_seconds, on_full, gap_messages)
             VALUES (?, ?, ?, ?, ?, ?, ?)"
        }
        (Scope::Tenant(_), true) => "DELETE FROM tenant_setting WHERE tenant = ?",
        (Scope::Tenant(_), false) => {
            "INSERT OR REPLACE INTO tenant_setting(tenant, quota_bytes, ttl_seconds, on_full, gap_messages)
             VALUES (?, ?, ?, ?, ?)"
        }
    };
    Statement { sql, values }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn key(tenant: &str, non_persistent: bool) -> TopicKey {
        TopicKey { tenant: tenant.into(), name: "s".into(), non_persistent }
    }

    #[test]
    fn the_nearest_level_that_says_something_decides() {
        let persistent = Policy { quota_bytes: 100, ttl_seconds: 10, on_full: OnFull::Reject, gap_messages: false };
        let mut book = Book::new(persistent, Policy { quota_bytes: 50, ..persistent });
        let (topic, tenant) = (key("a", false), Scope::Tenant("a".into()));
        assert_eq!(book.policy(&topic), persistent);

        let settings = Settings { quota_bytes: Some(7), on_full: Some(OnFull::Park), ..Settings::default() };
        book.set(tenant.clone(), settings);
        assert_eq!(book.policy(&topic), Policy { quota_bytes: 7, on_full: OnFull::Park, ..persistent });
        assert_eq!(book.policy(&key("b", false)), persistent, "of another tenant");
        let volatile = Policy { quota_bytes: 50, on_full: OnFull::EvictOldest, ..persistent };
        assert_eq!(book.policy(&key("a", true)), volatile, "in memory");

        let settings = Settings { quota_bytes: Some(8), ..Settings::default() };
        book.set(Scope::Topic(Arc::new(topic.clone())), settings);
        assert_eq!(book.policy(&topic), Policy { quota_bytes: 8, on_full: OnFull::Park, ..persistent });
        book.set(Scope::Topic(Arc::new(topic.clone())), Settings::default());
        book.set(tenant, Settings::default());
        assert_eq!(book.policy(&topic), persistent);
    }
}
