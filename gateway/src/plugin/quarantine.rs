//! The plugins that have failed too often: nobody asks them until somebody lets them out.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::host::cut;
use super::{Fault, Instance, PluginId};
use crate::clock::Clock;
use crate::message::Tenant;

/// Why a plugin is in quarantine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Quarantined {
    /// Since when, in milliseconds since 1970.
    pub since_ms: i64,
    /// The fault that was one too many.
    pub reason: Box<str>,
}

/// In or, with `None`, out.
pub type QuarantineChange = (Tenant, PluginId, Option<Quarantined>);

/// Which plugins are in quarantine, by tenant: a built-in one may be in for one and not for another.
pub struct Quarantine {
    entries: Mutex<HashMap<(Tenant, PluginId), Quarantined>>,
    /// How many; mostly none, which costs no look then.
    count: AtomicUsize,
    changes: UnboundedSender<QuarantineChange>,
    follower: Mutex<Option<UnboundedReceiver<QuarantineChange>>>,
}

impl Quarantine {
    pub(super) fn new() -> Self {
        let (changes, follower) = unbounded_channel();
        Self { entries: Mutex::default(), count: AtomicUsize::new(0), changes, follower: Mutex::new(Some(follower)) }
    }

    /// Why this version is in quarantine for this tenant, if it is.
    #[must_use]
    pub fn is(&self, tenant: &Tenant, plugin: &PluginId) -> Option<Quarantined> {
        if self.count.load(Relaxed) == 0 {
            return None;
        }
        self.entries().get(&(tenant.clone(), plugin.clone())).cloned()
    }

    /// All that are in quarantine for this tenant, or for any.
    #[must_use]
    pub fn list(&self, tenant: Option<&Tenant>) -> Vec<(Tenant, PluginId, Quarantined)> {
        let entries = self.entries();
        let selected = entries.iter().filter(|((owner, _), _)| tenant.is_none_or(|tenant| tenant == owner));
        selected.map(|((tenant, plugin), why)| (tenant.clone(), plugin.clone(), why.clone())).collect()
    }

    /// Lets it out; false if it is not in.
    pub fn lift(&self, tenant: &Tenant, plugin: &PluginId) -> bool {
        let lifted = self.set(tenant, plugin, None);
        if lifted {
            tracing::info!(%plugin, %tenant, "plugin out of quarantine");
        }
        lifted
    }

    /// Puts back what an earlier process has put in.
    pub fn restore(&self, tenant: Tenant, plugin: PluginId, why: Quarantined) {
        let mut entries = self.entries();
        entries.insert((tenant, plugin), why);
        self.count.store(entries.len(), Relaxed);
    }

    /// All changes from the start on, for one who writes them down.
    pub fn follow(&self) -> Option<UnboundedReceiver<QuarantineChange>> {
        self.follower.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn impose(&self, instance: &Instance, fault: &Fault) {
        let (plugin, tenant, reason) = (instance.plugin().id(), instance.tenant(), cut(&fault.to_string()).into());
        tracing::error!(%plugin, %tenant, ?reason, "plugin put into quarantine: it has failed too often");
        self.set(tenant, plugin, Some(Quarantined { since_ms: Clock::system().now_ms(), reason }));
    }

    /// What its messages are answered, if it is in.
    pub(super) fn blocks(&self, instance: &Instance) -> Option<Fault> {
        self.is(instance.tenant(), instance.plugin().id()).map(|why| Fault::Quarantined(why.reason))
    }

    fn set(&self, tenant: &Tenant, plugin: &PluginId, why: Option<Quarantined>) -> bool {
        let mut entries = self.entries();
        let key = (tenant.clone(), plugin.clone());
        let changed = match why.clone() {
            Some(why) => entries.insert(key, why).is_none(),
            None => entries.remove(&key).is_some(),
        };
        self.count.store(entries.len(), Relaxed);
        if changed {
            // Nobody may follow.
            let _ = self.changes.send((tenant.clone(), plugin.clone(), why));
        }
        changed
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<(Tenant, PluginId), Quarantined>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
