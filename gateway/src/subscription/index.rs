//! From a message to the subscriptions that it concerns, without looking at the others.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use super::model::Subscription;
use crate::backlog::TopicKey;
use crate::message::{Message, SourceId, Tenant};
use crate::plugin::Instance;

/// A subscription in force: where its messages go, and which plugins they pass.
#[derive(Debug)]
pub struct Route {
    /// The subscription itself.
    pub subscription: Subscription,
    /// The topic that it feeds.
    pub topic: Arc<TopicKey>,
    /// Decides whether a message is forwarded.
    pub filter: Option<Instance>,
    /// Reshapes what is forwarded.
    pub transform: Option<Instance>,
}

/// All subscriptions of all tenants.
#[derive(Default)]
pub struct Index(RwLock<HashMap<Tenant, Routes>>);

#[derive(Default)]
struct Routes {
    by_id: BTreeMap<u64, Arc<Route>>,
    by_source: HashMap<SourceId, Vec<Arc<Route>>>,
    tenant_wide: Vec<Arc<Route>>,
}

impl Index {
    /// The routes that `message` takes, but for what their filters say, each with the type under which it takes it.
    #[must_use]
    pub fn matching(&self, message: &Message) -> Vec<(Arc<Route>, &'static str)> {
        let tenants = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let Some(routes) = tenants.get(&message.tenant) else { return Vec::new() };
        let of_source = routes.by_source.get(&message.source).map_or(&[][..], Vec::as_slice);
        let concerned = of_source.iter().chain(&routes.tenant_wide);
        concerned
            .flat_map(|route| route.subscription.types(message, true).map(move |kind| (route.clone(), kind)))
            .collect()
    }

    /// Puts a subscription in force.
    pub fn insert(&self, route: Route) {
        let route = Arc::new(route);
        let mut tenants = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let routes = tenants.entry(route.topic.tenant.clone()).or_default();
        routes.by_id.insert(route.subscription.id, route.clone());
        match route.subscription.source {
            Some(id) => routes.by_source.entry(source_id(id)).or_default().push(route),
            None => routes.tenant_wide.push(route),
        }
    }

    /// Puts a subscription out of force; false if there is none with this id.
    pub fn remove(&self, tenant: &Tenant, id: u64) -> bool {
        let mut tenants = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let Some(routes) = tenants.get_mut(tenant) else { return false };
        let Some(route) = routes.by_id.remove(&id) else { return false };
        let others = |other: &Arc<Route>| !Arc::ptr_eq(other, &route);
        match route.subscription.source {
            None => routes.tenant_wide.retain(others),
            Some(source) => {
                let source = source_id(source);
                if let Some(list) = routes.by_source.get_mut(&source) {
                    list.retain(others);
                    if list.is_empty() {
                        routes.by_source.remove(&source);
                    }
                }
            }
        }
        true
    }

    /// One subscription of the tenant.
    #[must_use]
    pub fn get(&self, tenant: &Tenant, id: u64) -> Option<Arc<Route>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(tenant)?.by_id.get(&id).cloned()
    }

    /// How many subscriptions the tenant has.
    #[must_use]
    pub fn count(&self, tenant: &Tenant) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(tenant).map_or(0, |routes| routes.by_id.len())
    }

    /// The tenant's subscriptions that `keep` keeps, by ascending id.
    pub fn list(&self, tenant: &Tenant, keep: impl Fn(&Subscription) -> bool) -> Vec<Arc<Route>> {
        let tenants = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let routes = tenants.get(tenant).into_iter().flat_map(|routes| routes.by_id.values());
        routes.filter(|route| keep(&route.subscription)).cloned().collect()
    }
}

fn source_id(id: u64) -> SourceId {
    SourceId::from(id.to_string().as_str())
}
