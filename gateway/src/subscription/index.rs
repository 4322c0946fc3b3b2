//! From a message to the subscriptions that it concerns, without looking at the others.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, PoisonError, RwLock};

use super::canary::{Canary, Place, Rival, RolledBack};
use super::model::{OnFault, Subscription};
use crate::backlog::TopicKey;
use crate::consumer::slot;
use crate::message::{Api, Message, SourceId, Tenant};
use crate::plugin::{Fault, Instance, PluginId, World};

/// A subscription in force: where its messages go, and which plugins they pass.
#[derive(Debug)]
pub struct Route {
    /// The subscription itself.
    pub subscription: Subscription,
    /// The topic that it feeds.
    pub topic: Arc<TopicKey>,
    /// Decide one after another whether a message is forwarded.
    pub filters: Vec<Instance>,
    /// Reshape one after another what is forwarded.
    pub transforms: Vec<Instance>,
    /// Decides in the place of one of them for a share of the sources.
    pub canary: Option<Rival>,
}

impl Route {
    /// Its plugins of a world, in order.
    #[must_use]
    pub fn instances(&self, world: World) -> &[Instance] {
        match world {
            World::Filter => &self.filters,
            World::Transform => &self.transforms,
        }
    }

    /// The canary, if it has its place at this step and decides for this source.
    #[must_use]
    pub fn rival(&self, world: World, step: usize, source: &SourceId) -> Option<&Rival> {
        let rival = self.canary.as_ref().filter(|rival| (rival.world, rival.step) == (world, step))?;
        rival.takes(slot(source)).then_some(rival)
    }

    /// What becomes of a message that one of its plugins fails on so.
    #[must_use]
    pub fn on_fault(&self, fault: &Fault) -> OnFault {
        let wanted = match fault {
            // That is the gateway's own doing, and soon over.
            Fault::Loading => OnFault::Hold,
            _ => self.subscription.on_fault.unwrap_or_default(),
        };
        match wanted {
            // Nothing of a non-persistent topic is kept.
            OnFault::Hold if self.topic.non_persistent => OnFault::Drop,
            wanted => wanted,
        }
    }

    fn runs(&self, plugin: &PluginId) -> bool {
        let canary = self.canary.iter().map(|rival| &rival.instance);
        self.filters.iter().chain(&self.transforms).chain(canary).any(|instance| instance.plugin().id() == plugin)
    }

    /// The same with this canary, of which `instance` is the plugin, instead of any other.
    #[must_use]
    pub fn with(&self, canary: Canary, instance: Instance) -> Self {
        let Place { world, at } = canary.place;
        // The type filter is the first of the filters.
        let before = usize::from(world == World::Filter && self.subscription.type_filter.is_some());
        let rival = Rival::new(world, before + at, canary.share, instance);
        let subscription = Subscription { canary: Some(canary), rolled_back: None, ..self.subscription.clone() };
        Self { subscription, canary: Some(rival), ..self.without_canary(None) }
    }

    /// The same without a canary, and with what became of it.
    #[must_use]
    pub fn without_canary(&self, rolled_back: Option<RolledBack>) -> Self {
        Self {
            subscription: Subscription { canary: None, rolled_back, ..self.subscription.clone() },
            topic: self.topic.clone(),
            filters: self.filters.clone(),
            transforms: self.transforms.clone(),
            canary: None,
        }
    }

    /// The same with the canary in its place, if there is one.
    #[must_use]
    pub fn promoted(&self) -> Option<Self> {
        let Rival { world, step, instance, .. } = self.canary.as_ref()?;
        let mut subscription = self.subscription.clone();
        subscription.promote();
        let mut route = Self { subscription, ..self.without_canary(None) };
        let instances = match world {
            World::Filter => &mut route.filters,
            World::Transform => &mut route.transforms,
        };
        instances.get_mut(*step)?.clone_from(instance);
        Some(route)
    }
}

/// All subscriptions of all tenants.
#[derive(Default)]
pub struct Index(RwLock<HashMap<Tenant, Routes>>);

#[derive(Default)]
struct Routes {
    by_id: BTreeMap<u64, Arc<Route>>,
    by_source: HashMap<SourceId, Vec<Arc<Route>>>,
    /// Those of `by_source` that take messages of what is below their source, too, by the source.
    following: HashMap<u64, Vec<Arc<Route>>>,
    /// Those of the whole tenant, by the APIs that they take.
    tenant_wide: HashMap<Api, Vec<Arc<Route>>>,
    /// How many ask for gap messages, by topic.
    gaps: HashMap<Arc<TopicKey>, usize>,
}

impl Index {
    /// The routes that `message` takes, but for what their filters say, each with the type under which it takes it.
    ///
    /// `above` tells the ids of all that is above the message's source, each once and never the source itself. It is asked
    /// only where a subscription follows children, and for the APIs that can be followed.
    ///
    /// # Errors
    /// That of `above`.
    pub fn matching<E>(
        &self,
        message: &Message,
        above: impl FnOnce() -> Result<Vec<u64>, E>,
    ) -> Result<Vec<(Arc<Route>, &'static str)>, E> {
        let tenants = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let Some(routes) = tenants.get(&message.tenant) else { return Ok(Vec::new()) };
        let asks = !routes.following.is_empty() && message.api.with_children().is_some();
        let above = if asks { above()? } else { Vec::new() };
        let of_source = routes.by_source.get(&message.source).into_iter().flatten();
        let tenant_wide = routes.tenant_wide.get(&message.api).into_iter().flatten();
        let own = of_source.chain(tenant_wide).map(|route| (route, true));
        let of_children = above.iter().filter_map(|id| routes.following.get(id)).flatten().map(|route| (route, false));
        Ok(own
            .chain(of_children)
            .flat_map(|(route, own)| route.subscription.types(message, own).map(move |kind| (route.clone(), kind)))
            .collect())
    }

    /// Puts a subscription in force.
    pub fn insert(&self, route: Route) {
        let mut tenants = self.0.write().unwrap_or_else(PoisonError::into_inner);
        tenants.entry(route.topic.tenant.clone()).or_default().insert(Arc::new(route));
    }

    /// Puts a subscription out of force; false if there is none with this id.
    pub fn remove(&self, tenant: &Tenant, id: u64) -> bool {
        let mut tenants = self.0.write().unwrap_or_else(PoisonError::into_inner);
        tenants.get_mut(tenant).is_some_and(|routes| routes.remove(id))
    }

    /// Puts a subscription in force in the place of what it was before; false if it was deleted meanwhile. Messages that have found
    /// the old one go its way to the end.
    pub fn replace(&self, route: Arc<Route>) -> bool {
        let mut tenants = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let Some(routes) = tenants.get_mut(&route.topic.tenant) else { return false };
        let is_there = routes.remove(route.subscription.id);
        if is_there {
            routes.insert(route);
        }
        is_there
    }

    /// The subscriptions that have a canary.
    #[must_use]
    pub fn with_canaries(&self) -> Vec<Arc<Route>> {
        let tenants = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let routes = tenants.values().flat_map(|routes| routes.by_id.values());
        routes.filter(|route| route.canary.is_some()).cloned().collect()
    }

    /// Whether a subscription asks for gap messages in its topic.
    #[must_use]
    pub fn asks_for_gaps(&self, topic: &TopicKey) -> bool {
        let tenants = self.0.read().unwrap_or_else(PoisonError::into_inner);
        tenants.get(&topic.tenant).is_some_and(|routes| routes.gaps.contains_key(topic))
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

    /// The tenant's subscriptions whose messages pass this plugin, by ascending id.
    #[must_use]
    pub fn users(&self, tenant: &Tenant, plugin: &PluginId) -> Vec<Arc<Route>> {
        let tenants = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let routes = tenants.get(tenant).into_iter().flat_map(|routes| routes.by_id.values());
        routes.filter(|route| route.runs(plugin)).cloned().collect()
    }

    /// The tenant's subscriptions that `keep` keeps, by ascending id.
    pub fn list(&self, tenant: &Tenant, keep: impl Fn(&Subscription) -> bool) -> Vec<Arc<Route>> {
        let tenants = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let routes = tenants.get(tenant).into_iter().flat_map(|routes| routes.by_id.values());
        routes.filter(|route| keep(&route.subscription)).cloned().collect()
    }
}

impl Routes {
    fn insert(&mut self, route: Arc<Route>) {
        self.by_id.insert(route.subscription.id, route.clone());
        if route.subscription.gap_messages == Some(true) {
            *self.gaps.entry(route.topic.clone()).or_default() += 1;
        }
        match route.subscription.source {
            Some(id) => {
                if route.subscription.follows_children() {
                    self.following.entry(id).or_default().push(route.clone());
                }
                self.by_source.entry(source_id(id)).or_default().push(route);
            }
            None => {
                for api in Api::ALL.into_iter().filter(|api| route.subscription.takes(api.as_str())) {
                    self.tenant_wide.entry(api).or_default().push(route.clone());
                }
            }
        }
    }

    fn remove(&mut self, id: u64) -> bool {
        let Some(route) = self.by_id.remove(&id) else { return false };
        if route.subscription.gap_messages == Some(true)
            && let Some(count) = self.gaps.get_mut(&route.topic)
        {
            *count -= 1;
            if *count == 0 {
                self.gaps.remove(&route.topic);
            }
        }
        let others = |other: &Arc<Route>| !Arc::ptr_eq(other, &route);
        match route.subscription.source {
            None => Api::ALL.iter().for_each(|api| retain(&mut self.tenant_wide, api, others)),
            Some(source) => {
                retain(&mut self.by_source, &source_id(source), others);
                retain(&mut self.following, &source, others);
            }
        }
        true
    }
}

fn retain<K: Eq + Hash>(lists: &mut HashMap<K, Vec<Arc<Route>>>, key: &K, keep: impl Fn(&Arc<Route>) -> bool) {
    if let Some(list) = lists.get_mut(key) {
        list.retain(keep);
        if list.is_empty() {
            lists.remove(key);
        }
    }
}

fn source_id(id: u64) -> SourceId {
    SourceId::from(id.to_string().as_str())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::collections::BTreeSet;
    use std::convert::Infallible;

    use bytes::Bytes;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::message::Action;

    fn message(tenant: &str, api: Api, source: u64) -> Message {
        let source = source_id(source);
        let tenant = tenant.into();
        Message { tenant, api, action: Action::Create, source, kind: None, time: "".into(), body: Bytes::new() }
    }

    fn route(id: u64, source: Option<u64>, apis: &[&str]) -> Route {
        let mut body = json!({"context": "tenant", "subscription": "s", "subscriptionFilter": {"apis": apis}});
        if let Some(source) = source {
            body["context"] = "mo".into();
            body["source"] = json!({"id": source.to_string()});
        }
        let subscription = Subscription { id, ..Subscription::parse(body.to_string().as_bytes()).unwrap() };
        let topic = Arc::new(TopicKey { tenant: "t".into(), name: "s".into(), non_persistent: false });
        Route { subscription, topic, filters: Vec::new(), transforms: Vec::new(), canary: None }
    }

    /// Ids of subscriptions with the types of their frames, in order.
    fn found(index: &Index, message: &Message, above: &[u64]) -> Vec<(u64, &'static str)> {
        let matching = index.matching(message, || Ok::<_, Infallible>(above.to_vec())).unwrap();
        let mut found: Vec<_> = matching.into_iter().map(|(route, kind)| (route.subscription.id, kind)).collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn messages_go_up_to_those_who_follow_children() {
        let index = Index::default();
        for (id, source, apis) in [
            (1, Some(10), &["eventsWithChildren"][..]),
            (2, Some(10), &["events"]),
            (3, Some(10), &["*"]),
            (4, Some(11), &["alarmsWithChildren", "events"]),
            (5, None, &["events"]),
            (6, Some(12), &["eventsWithChildren", "events"]),
        ] {
            index.insert(route(id, source, apis));
        }
        let event = message("t", Api::Events, 12);
        let own = [(5, "events"), (6, "events"), (6, "eventsWithChildren")];
        assert_eq!(found(&index, &event, &[]), own);
        let all = [(1, "eventsWithChildren"), (3, "eventsWithChildren"), own[0], own[1], own[2]];
        assert_eq!(found(&index, &event, &[11, 10]), all);
        assert_eq!(
            found(&index, &message("t", Api::Alarms, 12), &[11, 10]),
            [(3, "alarmsWithChildren"), (4, "alarmsWithChildren")]
        );
        for id in [1, 3, 6] {
            assert!(index.remove(&"t".into(), id));
        }
        assert_eq!(found(&index, &event, &[11, 10]), [(5, "events")]);
    }

    #[test]
    fn a_subscription_is_replaced_whole_or_not_at_all() {
        let index = Index::default();
        for id in [1, 2] {
            index.insert(route(id, Some(10), &["eventsWithChildren"]));
        }
        let mut changed = route(1, Some(10), &["eventsWithChildren"]);
        changed.subscription.gap_messages = Some(true);
        let (changed, topic) = (Arc::new(changed), route(0, None, &["events"]).topic);
        assert!(index.replace(changed.clone()) && index.asks_for_gaps(&topic));
        assert!(Arc::ptr_eq(&index.get(&"t".into(), 1).unwrap(), &changed));
        let event = message("t", Api::Events, 12);
        assert_eq!(found(&index, &event, &[10]), [(1, "eventsWithChildren"), (2, "eventsWithChildren")]);
        index.remove(&"t".into(), 1);
        assert!(!index.replace(changed), "it is gone");
        assert_eq!(found(&index, &event, &[10]), [(2, "eventsWithChildren")]);
        assert!(!index.asks_for_gaps(&topic) && index.count(&"t".into()) == 1);
    }

    #[test]
    fn one_subscription_is_enough_to_ask_for_gap_messages() {
        let index = Index::default();
        let asking = |id| {
            let mut route = route(id, Some(10), &["events"]);
            route.subscription.gap_messages = Some(true);
            route
        };
        let topic = route(0, None, &["events"]).topic;
        index.insert(route(1, None, &["events"]));
        assert!(!index.asks_for_gaps(&topic));
        index.insert(asking(2));
        index.insert(asking(3));
        assert!(index.remove(&"t".into(), 2) && index.asks_for_gaps(&topic));
        assert!(!index.asks_for_gaps(&TopicKey { non_persistent: true, ..TopicKey::clone(&topic) }));
        assert!(index.remove(&"t".into(), 3) && !index.asks_for_gaps(&topic));
    }

    #[test]
    fn nobody_else_pays_for_the_walk() {
        let index = Index::default();
        index.insert(route(1, Some(10), &["events", "measurements"]));
        let asked = |tenant, api| index.matching(&message(tenant, api, 12), || Err("asked")).is_err();
        assert!(!asked("t", Api::Events), "no subscription follows children");
        index.insert(route(2, Some(10), &["eventsWithChildren"]));
        assert!(asked("t", Api::Events) && asked("t", Api::Alarms));
        assert!(!asked("t", Api::Measurements) && !asked("t", Api::ManagedObjects) && !asked("t", Api::Operations));
        assert!(!asked("u", Api::Events), "another tenant");
        index.remove(&"t".into(), 2);
        assert!(!asked("t", Api::Events));
    }

    proptest! {
        /// Whoever asks each subscription by itself whether its source is the message's or above it finds the same.
        #[test]
        fn the_index_finds_what_a_look_at_every_subscription_finds(
            subscriptions in prop::collection::vec((prop::option::of(0..6_u64), 0..5_usize), 0..12),
            removed in prop::collection::btree_set(0..12_u64, 0..4),
            above in prop::collection::btree_set(0..6_u64, 0..6),
            source in 0..6_u64,
            api in prop::sample::select(vec![Api::Events, Api::Alarms, Api::Measurements]),
        ) {
            const APIS: [&[&str]; 5] =
                [&["*"], &["events"], &["eventsWithChildren"], &["alarmsWithChildren", "alarms"], &["measurements"]];
            let above: BTreeSet<u64> = above.into_iter().filter(|id| *id != source).collect();
            let index = Index::default();
            let mut expected = Vec::new();
            let message = message("t", api, source);
            for (id, (of, apis)) in (0..).zip(subscriptions) {
                // What follows children is not for the tenant's context.
                let apis = if of.is_none() && matches!(apis, 2 | 3) { APIS[1] } else { APIS[apis] };
                let route = route(id, of, apis);
                let own = of.is_none_or(|of| of == source);
                if !removed.contains(&id) && (own || of.is_some_and(|of| above.contains(&of))) {
                    expected.extend(route.subscription.types(&message, own).map(|kind| (id, kind)));
                }
                index.insert(route);
            }
            for id in removed {
                index.remove(&"t".into(), id);
            }
            expected.sort_unstable();
            let above: Vec<_> = above.into_iter().collect();
            prop_assert_eq!(found(&index, &message, &above), expected);
        }
    }
}
