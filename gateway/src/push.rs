//! Push consumers: who they are, and the tasks that serve them.
//!
//! In: rows of `push` at the start, requests while the gateway runs. Out: for each of them a task that holds the consumer, as a
//! connection would, and brings its messages to the endpoint. It ends with the consumer, however that is unsubscribed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::{Row as _, SqlitePool};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::backlog::{Attached, Bodies, Connecting, TopicKey};
use crate::clock::Clock;
use crate::config::Config;
use crate::consumer::Kind;
use crate::deliver::endpoint::{Courier, Target};
use crate::deliver::http::{End, Pushing, Status};
use crate::json::{Invalid, Limits};
use crate::message::Tenant;
use crate::store::{Statement, Value};
use crate::writer::{AttachError, Change, Refused, Writer};

/// A push consumer.
pub struct Push {
    /// An object id.
    pub id: u64,
    /// Its topic.
    pub topic: Arc<TopicKey>,
    /// Its name.
    pub consumer: Box<str>,
    /// When it was made, ms since the epoch.
    pub created_ms: i64,
    /// Where its messages go.
    pub target: Target,
    /// How that goes.
    pub status: Status,
    /// Ends when it is unsubscribed.
    kicked: CancellationToken,
}

/// Why there is no new push consumer.
#[derive(Debug, thiserror::Error)]
pub enum CreateError {
    /// Its endpoint cannot be reached.
    #[error(transparent)]
    Target(#[from] Invalid),
    /// `limits.push_consumers`.
    #[error("there are {0} push consumers, and no more are allowed (limits.push_consumers)")]
    TooMany(usize),
    /// It is connected, by push or otherwise, or may not be made.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// It could not be stored.
    #[error(transparent)]
    Refused(#[from] Refused),
}

/// All push consumers. Cheap to clone.
#[derive(Clone)]
pub struct Pushes(Arc<Room>);

struct Room {
    courier: Courier,
    writer: Writer,
    bodies: Bodies,
    clock: Clock,
    stopping: CancellationToken,
    tasks: TaskTracker,
    longest_pause: Duration,
    limit: usize,
    all: Mutex<BTreeMap<u64, Arc<Push>>>,
}

impl Pushes {
    /// Room for push consumers, none yet. Their tasks end with `stopping` and are among `tasks`.
    ///
    /// # Errors
    /// When `push.ca` cannot be used.
    pub fn new(
        config: &Config,
        writer: Writer,
        bodies: Bodies,
        clock: Clock,
        stopping: CancellationToken,
        tasks: TaskTracker,
    ) -> anyhow::Result<Self> {
        Ok(Self(Arc::new(Room {
            courier: Courier::new(&config.push, clock.clone())?,
            writer,
            bodies,
            clock,
            stopping,
            tasks,
            longest_pause: Duration::from_secs(config.push.retry_seconds),
            limit: config.limits.push_consumers,
            all: Mutex::default(),
        })))
    }

    /// Goes on with those that are stored, before anybody else can connect in their place.
    pub async fn resume(&self, store: &SqlitePool) -> anyhow::Result<()> {
        let rows = sqlx::query("SELECT id, tenant, topic, non_persistent, consumer, created, target FROM push");
        for row in rows.fetch_all(store).await? {
            let (tenant, name) = (row.try_get::<&str, _>(1)?.into(), row.try_get::<&str, _>(2)?.into());
            let topic = Arc::new(TopicKey { tenant, name, non_persistent: row.try_get(3)? });
            let consumer: Box<str> = row.try_get::<&str, _>(4)?.into();
            // As where a lower limit leaves a non-persistent topic no room. The others are not to blame.
            let cannot = |error: String| {
                tracing::error!(error, consumer, topic = topic.name, "a push consumer cannot go on");
            };
            let target = match Target::parse(row.try_get(6)?, &Limits::default()) {
                Ok(target) => target,
                Err(error) => {
                    cannot(error.to_string());
                    continue;
                }
            };
            let attached = match self.attach(&topic, &consumer).await {
                Ok(attached) => attached,
                Err(error) => {
                    cannot(error.to_string());
                    continue;
                }
            };
            let id = row.try_get::<i64, _>(0)?.cast_unsigned();
            self.begin(Push::new(id, topic, consumer, row.try_get(5)?, target, attached.kicked()), attached);
        }
        Ok(())
    }

    /// Makes a push consumer, or turns one that is not connected into one, with all that waits for it.
    ///
    /// # Errors
    /// See [`CreateError`]; there is no push consumer then.
    pub async fn create(
        &self,
        id: u64,
        topic: Arc<TopicKey>,
        consumer: Box<str>,
        target: Target,
    ) -> Result<Arc<Push>, CreateError> {
        self.0.courier.check(&target).map_err(|error| error.within("push"))?;
        if self.all().len() >= self.0.limit {
            return Err(CreateError::TooMany(self.0.limit));
        }
        let attached = self.attach(&topic, &consumer).await?;
        let push = Push::new(id, topic, consumer, self.0.clock.now_ms(), target, attached.kicked());
        self.commit(push.insert()).await?;
        Ok(self.begin(push, attached))
    }

    /// Those of a tenant, oldest first.
    #[must_use]
    pub fn list(&self, tenant: &Tenant) -> Vec<Arc<Push>> {
        self.all().values().filter(|push| push.topic.tenant == *tenant && push.is_subscribed()).cloned().collect()
    }

    /// One of a tenant.
    #[must_use]
    pub fn get(&self, tenant: &Tenant, id: u64) -> Option<Arc<Push>> {
        self.all().get(&id).filter(|push| push.topic.tenant == *tenant && push.is_subscribed()).cloned()
    }

    async fn attach(&self, topic: &Arc<TopicKey>, consumer: &str) -> Result<Attached, AttachError> {
        let (topic, consumer) = (topic.clone(), consumer.into());
        self.0.writer.attach(Connecting { topic, consumer, kind: Kind::Exclusive, member: "push".into() }).await
    }

    fn begin(&self, push: Push, attached: Attached) -> Arc<Push> {
        let push = Arc::new(push);
        self.all().insert(push.id, push.clone());
        self.0.tasks.spawn(self.clone().serve(push.clone(), attached));
        push
    }

    async fn serve(self, push: Arc<Push>, attached: Attached) {
        let Room { courier, writer, bodies, clock, stopping, longest_pause, .. } = &*self.0;
        let pushing = Pushing {
            attached,
            bodies,
            writer,
            lane: courier.lane(push.target.clone()),
            status: &push.status,
            clock,
            longest_pause: *longest_pause,
            stopping,
        };
        if pushing.run().await == End::Stopping {
            return;
        }
        self.all().remove(&push.id);
        if let Err(error) = self.commit(push.delete()).await {
            tracing::warn!(%error, consumer = push.consumer, "an unsubscribed push consumer could not be forgotten");
        }
    }

    async fn commit(&self, statement: Statement) -> Result<(), Refused> {
        self.0.writer.commit(Change { statements: vec![statement], ..Change::default() }).await
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Push>>> {
        self.0.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Push {
    fn new(
        id: u64,
        topic: Arc<TopicKey>,
        consumer: Box<str>,
        created_ms: i64,
        target: Target,
        kicked: &CancellationToken,
    ) -> Self {
        Self { id, topic, consumer, created_ms, target, status: Status::default(), kicked: kicked.clone() }
    }

    /// False for one whose task is about to end.
    fn is_subscribed(&self) -> bool {
        !self.kicked.is_cancelled()
    }

    fn insert(&self) -> Statement {
        let TopicKey { tenant, name, non_persistent } = &*self.topic;
        Statement {
            // The row of one that was just unsubscribed may still be there.
            sql: "INSERT OR REPLACE INTO push(id, tenant, topic, non_persistent, consumer, created, target)
                  VALUES (?, ?, ?, ?, ?, ?, ?)",
            values: vec![
                Value::Int(self.id.cast_signed()),
                Value::Text(tenant.to_string()),
                Value::Text(name.to_string()),
                Value::Int(i64::from(*non_persistent)),
                Value::Text(self.consumer.to_string()),
                Value::Int(self.created_ms),
                Value::Text(self.target.stored()),
            ],
        }
    }

    fn delete(&self) -> Statement {
        Statement { sql: "DELETE FROM push WHERE id = ?", values: vec![Value::Int(self.id.cast_signed())] }
    }
}
