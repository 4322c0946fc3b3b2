//! Which managed objects exist, what they are called and how they hang together, kept in memory: every measurement and event
//! asks, and must not wait for the disk.
//!
//! A link joins a parent and a child under one of three kinds. Nothing keeps links from forming a cycle, so every walk
//! remembers where it has been, and every walk is bounded.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::relation::{Kind, Relation, Side};
use crate::message::Tenant;

/// All managed objects. 100 bytes or so for each, its name, and twice 20 for each link.
#[derive(Debug, Default)]
pub struct Sources(RwLock<Objects>);

#[derive(Debug, Default)]
struct Objects {
    by_id: HashMap<u64, Object>,
    counts: HashMap<Tenant, Counts>,
}

#[derive(Debug)]
struct Object {
    tenant: Tenant,
    name: Option<Arc<str>>,
    /// Most objects have none.
    links: Option<Box<Links>>,
}

#[derive(Debug, Default)]
struct Links {
    children: BTreeSet<(Kind, u64)>,
    parents: BTreeSet<(Kind, u64)>,
}

/// What a tenant has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Managed objects.
    pub objects: usize,
    /// Links between them.
    pub links: usize,
}

/// A walk met more objects than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMany;

/// A part of the objects that an object is linked with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Related {
    /// Ids, ascending, with names.
    pub objects: Vec<(u64, Option<Arc<str>>)>,
    /// How many there are in all.
    pub total: usize,
}

impl Sources {
    /// Whether the tenant has this object.
    #[must_use]
    pub fn exists(&self, tenant: &Tenant, id: u64) -> bool {
        self.read().by_id.get(&id).is_some_and(|object| object.tenant == *tenant)
    }

    /// The name of an object, if it has one.
    #[must_use]
    pub fn name(&self, id: u64) -> Option<Arc<str>> {
        self.read().by_id.get(&id)?.name.clone()
    }

    /// How much the tenant has.
    #[must_use]
    pub fn counts(&self, tenant: &Tenant) -> Counts {
        self.read().counts.get(tenant).copied().unwrap_or_default()
    }

    /// An object was stored, or its name may have changed.
    pub fn insert(&self, tenant: &Tenant, id: u64, name: Option<&str>) {
        let name = name.map(Arc::from);
        let objects = &mut *self.write();
        if let Some(object) = objects.by_id.get_mut(&id) {
            object.name = name;
        } else {
            objects.by_id.insert(id, Object { tenant: tenant.clone(), name, links: None });
            objects.counts.entry(tenant.clone()).or_default().objects += 1;
        }
    }

    /// An object was deleted, and all its links with it.
    pub fn remove(&self, id: u64) {
        let objects = &mut *self.write();
        let links = objects.links(id);
        let children: Vec<_> = links.map_or_else(Vec::new, |links| links.children.iter().copied().collect());
        let parents: Vec<_> = links.map_or_else(Vec::new, |links| links.parents.iter().copied().collect());
        for (kind, child) in children {
            objects.unlink(kind, id, child);
        }
        for (kind, parent) in parents {
            objects.unlink(kind, parent, id);
        }
        if let Some(object) = objects.by_id.remove(&id)
            && let Some(counts) = objects.counts.get_mut(&object.tenant)
        {
            counts.objects -= 1;
            if counts.objects == 0 {
                objects.counts.remove(&object.tenant);
            }
        }
    }

    /// A link was stored. Both objects exist and are of one tenant; a link that is there already stays.
    pub fn link(&self, kind: Kind, parent: u64, child: u64) {
        let objects = &mut *self.write();
        if let Some(links) = objects.links_mut(parent)
            && links.children.insert((kind, child))
        {
            objects.count_links(parent, 1);
            if let Some(links) = objects.links_mut(child) {
                links.parents.insert((kind, parent));
            }
        }
    }

    /// A link was deleted.
    pub fn unlink(&self, kind: Kind, parent: u64, child: u64) {
        self.write().unlink(kind, parent, child);
    }

    /// Whether `child` is a child of this kind.
    #[must_use]
    pub fn is_child(&self, kind: Kind, parent: u64, child: u64) -> bool {
        self.read().links(parent).is_some_and(|links| links.children.contains(&(kind, child)))
    }

    /// How many children of all kinds an object has.
    #[must_use]
    pub fn children(&self, parent: u64) -> usize {
        self.read().links(parent).map_or(0, |links| links.children.len())
    }

    /// The objects in that relation with `id`, `take` of them behind the first `skip`.
    #[must_use]
    pub fn related(&self, id: u64, relation: Relation, skip: usize, take: usize) -> Related {
        let objects = self.read();
        let Some(links) = objects.links(id) else { return Related::default() };
        let all = match relation.side {
            Side::Children => &links.children,
            Side::Parents => &links.parents,
        };
        let ids = || all.range((relation.kind, 0)..=(relation.kind, u64::MAX)).map(|(_, id)| *id);
        let name = |id: u64| objects.by_id.get(&id).and_then(|object| object.name.clone());
        Related { objects: ids().skip(skip).take(take).map(|id| (id, name(id))).collect(), total: ids().count() }
    }

    /// All that is above `id`, over links of all kinds, each object once and `id` itself never.
    ///
    /// # Errors
    /// When there are more than `most`.
    pub fn above(&self, id: u64, most: usize) -> Result<Vec<u64>, TooMany> {
        self.read().walk(id, &Kind::ALL, most, |links| &links.parents)
    }

    /// All that is below `id` over links of these kinds; otherwise as [`Sources::above`].
    ///
    /// # Errors
    /// When there are more than `most`.
    pub fn below(&self, id: u64, kinds: &[Kind], most: usize) -> Result<Vec<u64>, TooMany> {
        self.read().walk(id, kinds, most, |links| &links.children)
    }

    fn read(&self) -> RwLockReadGuard<'_, Objects> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Objects> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Objects {
    fn links(&self, id: u64) -> Option<&Links> {
        self.by_id.get(&id)?.links.as_deref()
    }

    fn links_mut(&mut self, id: u64) -> Option<&mut Links> {
        Some(self.by_id.get_mut(&id)?.links.get_or_insert_default())
    }

    fn count_links(&mut self, of: u64, change: isize) {
        if let Some(object) = self.by_id.get(&of)
            && let Some(counts) = self.counts.get_mut(&object.tenant)
        {
            counts.links = counts.links.saturating_add_signed(change);
        }
    }

    fn unlink(&mut self, kind: Kind, parent: u64, child: u64) {
        if self.links_mut(parent).is_some_and(|links| links.children.remove(&(kind, child))) {
            self.count_links(parent, -1);
        }
        if let Some(links) = self.links_mut(child) {
            links.parents.remove(&(kind, parent));
        }
        for id in [parent, child] {
            if let Some(object) = self.by_id.get_mut(&id) {
                object.links.take_if(|links| links.children.is_empty() && links.parents.is_empty());
            }
        }
    }

    fn walk(
        &self,
        from: u64,
        kinds: &[Kind],
        most: usize,
        next: impl Fn(&Links) -> &BTreeSet<(Kind, u64)>,
    ) -> Result<Vec<u64>, TooMany> {
        let Some(links) = self.links(from) else { return Ok(Vec::new()) };
        let mut seen = HashSet::from([from]);
        let mut found = Vec::new();
        let mut at = 0;
        let mut links = Some(links);
        loop {
            for (kind, id) in links.into_iter().flat_map(&next) {
                if kinds.contains(kind) && seen.insert(*id) {
                    if found.len() == most {
                        return Err(TooMany);
                    }
                    found.push(*id);
                }
            }
            let Some(id) = found.get(at) else { return Ok(found) };
            links = self.links(*id);
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    fn sources(count: u64) -> Sources {
        let sources = Sources::default();
        for id in 1..=count {
            sources.insert(&"t".into(), id, Some(&format!("object {id}")));
        }
        sources
    }

    fn sorted(mut ids: Vec<u64>) -> Vec<u64> {
        ids.sort_unstable();
        ids
    }

    #[test]
    fn objects_belong_to_one_tenant() {
        let sources = sources(1);
        sources.insert(&"u".into(), 2, None);
        assert!(sources.exists(&"t".into(), 1) && !sources.exists(&"u".into(), 1) && sources.exists(&"u".into(), 2));
        assert_eq!((sources.name(1).as_deref(), sources.name(2), sources.name(3)), (Some("object 1"), None, None));
        sources.insert(&"t".into(), 1, Some("new"));
        assert_eq!(sources.name(1).as_deref(), Some("new"));
        assert_eq!(sources.counts(&"t".into()), Counts { objects: 1, links: 0 });
        sources.remove(1);
        assert!(!sources.exists(&"t".into(), 1));
        assert_eq!(sources.counts(&"t".into()), Counts::default());
    }

    #[test]
    fn relations_are_listed_by_kind_in_parts() {
        let sources = sources(5);
        for (kind, child) in [(Kind::Assets, 5), (Kind::Devices, 3), (Kind::Assets, 4), (Kind::Assets, 2)] {
            sources.link(kind, 1, child);
            sources.link(kind, 1, child);
        }
        let relation = |side, kind| Relation { side, kind };
        let named = |ids: &[u64]| ids.iter().map(|id| (*id, Some(format!("object {id}").into()))).collect();
        let assets = relation(Side::Children, Kind::Assets);
        assert_eq!(sources.related(1, assets, 1, 1), Related { objects: named(&[4]), total: 3 });
        assert_eq!(sources.related(1, assets, 0, 9), Related { objects: named(&[2, 4, 5]), total: 3 });
        assert_eq!(sources.related(3, relation(Side::Parents, Kind::Devices), 0, 9).objects, named(&[1]));
        assert_eq!(sources.related(3, relation(Side::Parents, Kind::Assets), 0, 9), Related::default());
        assert_eq!((sources.children(1), sources.counts(&"t".into()).links), (4, 4));
        sources.unlink(Kind::Assets, 1, 4);
        sources.unlink(Kind::Assets, 1, 3);
        assert!(!sources.is_child(Kind::Assets, 1, 4) && sources.is_child(Kind::Devices, 1, 3));
        assert_eq!((sources.children(1), sources.counts(&"t".into()).links), (3, 3));
    }

    #[test]
    fn walks_are_bounded() {
        let sources = sources(1000);
        for id in 1..1000 {
            sources.link(Kind::Additions, id, id + 1);
        }
        assert_eq!(sources.above(1000, 999).map(|ids| ids.len()), Ok(999));
        assert_eq!(sources.above(1000, 998), Err(TooMany));
        assert_eq!(sources.below(1, &Kind::ALL, 999).map(|ids| ids.len()), Ok(999));
        assert_eq!(sources.below(1, &Kind::ALL, 998), Err(TooMany));
        assert_eq!(sources.below(1, &[Kind::Devices, Kind::Assets], 998), Ok(vec![]));
        sources.link(Kind::Devices, 1000, 1);
        assert_eq!(sources.above(1, 999).map(sorted), Ok((2..=1000).collect()), "a cycle ends where it began");
    }

    /// What is reached from `from`, found by going over all links until nothing new turns up.
    fn closure(links: &BTreeSet<(Kind, u64, u64)>, from: u64, up: bool) -> Vec<u64> {
        let mut reached = BTreeSet::from([from]);
        loop {
            let before = reached.len();
            for (_, parent, child) in links {
                let (near, far) = if up { (child, parent) } else { (parent, child) };
                if reached.contains(near) {
                    reached.insert(*far);
                }
            }
            if reached.len() == before {
                break;
            }
        }
        reached.remove(&from);
        reached.into_iter().collect()
    }

    proptest! {
        #[test]
        fn walks_find_what_a_naive_closure_finds(
            steps in prop::collection::vec((0..4_u8, 0..3_usize, 1..=8_u64, 1..=8_u64), 0..40),
        ) {
            let sources = sources(8);
            let mut links = BTreeSet::new();
            for (step, kind, parent, child) in steps {
                let kind = Kind::ALL[kind];
                match step {
                    0 => {
                        sources.unlink(kind, parent, child);
                        links.remove(&(kind, parent, child));
                    }
                    1 if parent == child => {
                        sources.remove(parent);
                        sources.insert(&"t".into(), parent, None);
                        links.retain(|(_, a, b)| *a != parent && *b != parent);
                    }
                    _ => {
                        sources.link(kind, parent, child);
                        links.insert((kind, parent, child));
                    }
                }
                prop_assert_eq!(sources.counts(&"t".into()), Counts { objects: 8, links: links.len() });
                for id in 1..=8 {
                    prop_assert_eq!(sources.above(id, 8).map(sorted), Ok(closure(&links, id, true)));
                    prop_assert_eq!(sources.below(id, &Kind::ALL, 8).map(sorted), Ok(closure(&links, id, false)));
                }
            }
        }
    }
}
