//! Which managed objects exist, and their names, kept in memory: every message asks, and must not wait for the disk.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use crate::message::Tenant;

/// Managed objects by id. 64 bytes or so for each, and its name.
#[derive(Debug, Default)]
pub struct Sources(RwLock<HashMap<u64, Source>>);

/// What is known of a managed object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Whose it is.
    pub tenant: Tenant,
    /// `name`, if it has one.
    pub name: Option<Arc<str>>,
}

impl Sources {
    /// All that the store holds.
    #[must_use]
    pub fn new(objects: impl IntoIterator<Item = (u64, Source)>) -> Self {
        Self(RwLock::new(objects.into_iter().collect()))
    }

    /// Whether the tenant has this object.
    #[must_use]
    pub fn exists(&self, tenant: &Tenant, id: u64) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&id).is_some_and(|source| source.tenant == *tenant)
    }

    /// The name of an object.
    #[must_use]
    pub fn name(&self, id: u64) -> Option<Arc<str>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&id)?.name.clone()
    }

    /// An object was stored, or stored anew.
    pub fn insert(&self, tenant: &Tenant, id: u64, name: Option<&str>) {
        let source = Source { tenant: tenant.clone(), name: name.map(Arc::from) };
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(id, source);
    }

    /// An object was deleted.
    pub fn remove(&self, id: u64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }
}
