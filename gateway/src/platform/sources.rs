//! Which managed objects exist, kept in memory: every measurement asks, and must not wait for the disk.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use crate::message::Tenant;

/// Managed objects by id, with their owner. 32 bytes or so for each.
#[derive(Debug, Default)]
pub struct Sources(RwLock<HashMap<u64, Tenant>>);

impl Sources {
    /// All that the store holds.
    #[must_use]
    pub fn new(objects: impl IntoIterator<Item = (Tenant, u64)>) -> Self {
        Self(RwLock::new(objects.into_iter().map(|(tenant, id)| (id, tenant)).collect()))
    }

    /// Whether the tenant has this object.
    #[must_use]
    pub fn exists(&self, tenant: &Tenant, id: u64) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&id) == Some(tenant)
    }

    /// An object was stored.
    pub fn insert(&self, tenant: &Tenant, id: u64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(id, tenant.clone());
    }

    /// An object was deleted.
    pub fn remove(&self, id: u64) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }
}
