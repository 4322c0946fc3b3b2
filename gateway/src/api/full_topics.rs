//! An alarm for each topic that is full: raised when it refuses messages, cleared when it has room again.
//!
//! It is an ordinary alarm, of a managed object that stands for the gateway in the tenant. Its messages leave out topics without
//! room, so that no alarm can be refused and cause the next one. Whoever was refused does not wait for it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use sqlx::SqlitePool;
use tokio::time::Instant;

use super::{ApiError, App, Caller, alarms, identity, inventory, json_limits};
use crate::auth::{Principal, Roles};
use crate::backlog::{OnFull, Policy, Rejected, TopicKey};
use crate::json::Members;
use crate::message::{Action, Tenant};
use crate::pipeline::Request;
use crate::platform::alarm;
use crate::platform::identity::{ExternalId, find};
use crate::platform::inventory::parse;
use crate::time;
use crate::writer::Change;

/// Pause between two looks at the topics.
const PERIOD: Duration = Duration::from_secs(1);
/// An open alarm counts up at most this often, and a refusal is over when none has followed for so long.
const AGAIN: Duration = Duration::from_secs(60);
/// The alarm is cleared when at least so much of the quota is left, in percent.
const ROOM_PERCENT: u64 = 20;
/// Types of these alarms begin so; the topic's name follows, so that two full topics have two alarms.
const KIND: &str = "tidegate_BacklogQuota_";
/// Who makes the alarms and the object.
const OWNER: &str = "tidegate";

/// Runs until the gateway stops. Links in what it makes begin with `base_url`.
pub(crate) async fn watch(app: Arc<App>, base_url: String) {
    let known = open(&app.store).await.unwrap_or_else(|error| {
        tracing::warn!(%error, "the open alarms of full topics could not be read, and will not be cleared");
        HashMap::new()
    });
    let stopping = app.stopping.clone();
    let mut alarms = Alarms { app, base_url, known };
    while stopping.run_until_cancelled(tokio::time::sleep(PERIOD)).await.is_some() {
        alarms.round().await;
    }
}

/// Topics that refuse, and those with an open alarm.
struct Alarms {
    app: Arc<App>,
    base_url: String,
    known: HashMap<Arc<TopicKey>, Known>,
}

#[derive(Default)]
struct Known {
    /// When it refused last, and for how many bytes it had no room; `None`: it did in an earlier process.
    refused: Option<(Instant, u64)>,
    /// What the alarm does not tell yet.
    untold: Option<Rejected>,
    /// When the alarm was raised last.
    raised: Option<Instant>,
    is_open: bool,
}

impl Known {
    fn is_recent(&self) -> bool {
        self.raised.is_some_and(|raised| raised.elapsed() < AGAIN)
    }

    /// Bytes that have to find room before all is well: those that were refused last, if that is not long ago.
    fn need(&self) -> u64 {
        self.refused.filter(|(at, _)| at.elapsed() < AGAIN).map_or(0, |(_, need)| need)
    }
}

impl Alarms {
    async fn round(&mut self) {
        for refusal in self.app.writer.full().take() {
            self.note(refusal);
        }
        for (topic, mut known) in std::mem::take(&mut self.known) {
            if self.has_room(&topic, known.need()) {
                if !known.is_open || went_well(&topic.tenant, "cleared", self.clear(&topic).await) {
                    tracing::info!(tenant = %topic.tenant, topic = %topic.name, "a topic has room again");
                    continue;
                }
            } else if !(known.is_open && known.is_recent())
                && let Some(refusal) = known.untold.take()
                // What fails is tried again when the topic refuses the next time.
                && went_well(&topic.tenant, "raised", self.raise(&refusal).await)
            {
                (known.raised, known.is_open) = (Some(Instant::now()), true);
            }
            self.known.insert(topic, known);
        }
    }

    fn note(&mut self, refusal: Rejected) {
        let (topic, need) = (refusal.topic.clone(), refusal.need);
        if !self.known.contains_key(&topic) && self.has_room(&topic, need) {
            return;
        }
        let known = self.known.entry(topic.clone()).or_default();
        if known.refused.replace((Instant::now(), need)).is_none() {
            tracing::warn!(tenant = %topic.tenant, topic = %topic.name, reason = %refusal, "a topic refuses messages");
        }
        known.untold = Some(refusal);
    }

    /// Whether a request of `need` bytes is not refused, nor those that follow soon.
    fn has_room(&self, topic: &TopicKey, need: u64) -> bool {
        let Policy { quota_bytes, on_full, .. } = self.app.topics.policy(topic);
        let Some(topic) = self.app.topics.get(topic) else { return true };
        match on_full {
            OnFull::Reject => topic.bytes() + need.max(quota_bytes * ROOM_PERCENT / 100) <= quota_bytes,
            OnFull::EvictOldest | OnFull::Park => need <= quota_bytes,
        }
    }

    async fn raise(&self, refusal: &Rejected) -> Result<(), ApiError> {
        let topic = &refusal.topic;
        let caller = self.caller(&topic.tenant);
        let source = self.source(&caller).await?;
        let body = json!({
            "source": {"id": source.to_string()},
            "type": kind(topic),
            "severity": "MAJOR",
            "text": refusal.to_string(),
            "time": time::text(self.app.clock.now_ms()),
        });
        let body = body.to_string();
        let new = alarm::parse(&Members::parse(body.as_bytes(), &json_limits(&self.app.config))?)?;
        alarms::raise_own(&self.app, &caller, &new).await
    }

    async fn clear(&self, topic: &TopicKey) -> Result<(), ApiError> {
        let found = find(&self.app.store, topic.tenant.as_str(), &external_id()).await?;
        match found {
            Some(source) => alarms::clear_own(&self.app, &self.caller(&topic.tenant), source, &kind(topic)).await,
            None => Ok(()),
        }
    }

    /// The gateway as one who asks.
    fn caller(&self, tenant: &Tenant) -> Caller {
        let principal = Principal { tenant: tenant.clone(), user: OWNER.into(), roles: Roles::NONE };
        Caller { principal, base_url: self.base_url.clone() }
    }

    /// The managed object that stands for the gateway; made where there is none (any more).
    async fn source(&self, caller: &Caller) -> Result<u64, ApiError> {
        let (app, tenant, id) = (&*self.app, &caller.principal.tenant, external_id());
        let _id = app.external_ids.lock((tenant.clone(), id.clone())).await;
        if let Some(object) = find(&app.store, tenant.as_str(), &id).await? {
            return Ok(object);
        }
        let body = json!({"name": "Tidegate", "type": "tidegate_Gateway"}).to_string();
        let new = parse(body.as_bytes(), OWNER, &json_limits(&app.config))?;
        let object = new.created(app.ids.take(1, &app.writer).await?, app.clock.now_ms());
        let statements = vec![inventory::insertion(tenant, &object), identity::binding(tenant, object.id, &id)];
        let created = inventory::message(tenant, &object, Action::Create, inventory::render(&object, caller));
        let change = Change { statements, skip_full: true, ..Change::default() };
        app.pipeline.submit(tenant, Request { messages: vec![created], change }).await?;
        app.sources.insert(tenant, object.id, object.name().as_deref());
        Ok(object.id)
    }
}

fn went_well(tenant: &Tenant, done: &str, result: Result<(), ApiError>) -> bool {
    result.map_err(|error| tracing::warn!(%tenant, ?error, "the alarm of a full topic could not be {done}")).is_ok()
}

/// By what the object is found again.
fn external_id() -> ExternalId {
    ExternalId { kind: "tidegate_Gateway".into(), value: "tidegate".into() }
}

fn kind(topic: &TopicKey) -> String {
    format!("{KIND}{}", topic.name)
}

/// The topics whose alarms are open in the store.
async fn open(store: &SqlitePool) -> sqlx::Result<HashMap<Arc<TopicKey>, Known>> {
    let ExternalId { kind, value } = external_id();
    let rows: Vec<(String, String)> = sqlx::query_as(
        "SELECT tenant.name, alarm.type FROM tenant
         JOIN external_id ON external_id.tenant = tenant.name AND external_id.type = ? AND external_id.value = ?
         JOIN alarm ON alarm.source = external_id.object AND alarm.status <> 'CLEARED' WHERE tenant.removed IS NULL",
    )
    .bind(&*kind)
    .bind(&*value)
    .fetch_all(store)
    .await?;
    let topic = |(tenant, kind): &(String, String)| {
        let name = kind.strip_prefix(KIND)?.into();
        Some(Arc::new(TopicKey { tenant: tenant.as_str().into(), name, non_persistent: false }))
    };
    let known = || Known { is_open: true, ..Known::default() };
    Ok(rows.iter().filter_map(topic).map(|topic| (topic, known())).collect())
}
