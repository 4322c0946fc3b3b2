//! One at a time, and the tenants by turns: who asks for much waits behind itself.

use std::sync::Arc;

use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use super::Fault;
use crate::locks::KeyedLocks;
use crate::message::Tenant;

/// What one at a time may use. Of each tenant one waits for it, the others wait for that one.
pub(super) struct Turns {
    tenants: KeyedLocks<Option<Tenant>>,
    place: Arc<Semaphore>,
}

/// The turn lasts as long as this lives.
pub(super) struct Turn {
    _tenant: OwnedMutexGuard<()>,
    _place: OwnedSemaphorePermit,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self { tenants: KeyedLocks::new(), place: Arc::new(Semaphore::new(1)) }
    }

    /// Waits for the tenant's turn; plugins that are nobody's are one tenant more.
    pub(super) async fn take(&self, tenant: Option<&Tenant>) -> Result<Turn, Fault> {
        let _tenant = self.tenants.lock(tenant.cloned()).await;
        let _place = Arc::clone(&self.place).acquire_owned().await.map_err(|_| Fault::Stopped)?;
        Ok(Turn { _tenant, _place })
    }

    /// Nobody gets a turn any more.
    pub(super) fn close(&self) {
        self.place.close();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_tenant_that_asks_for_much_waits_behind_itself() {
        let turns = Turns::new();
        let [greedy, modest] = ["greedy", "modest"].map(Tenant::from);
        let first = turns.take(Some(&greedy)).await.unwrap();
        let mut second = Box::pin(turns.take(Some(&greedy)));
        let mut third = Box::pin(turns.take(Some(&greedy)));
        assert!(second.as_mut().now_or_never().is_none() && third.as_mut().now_or_never().is_none());
        let mut other = Box::pin(turns.take(Some(&modest)));
        assert!(other.as_mut().now_or_never().is_none());
        drop(first);
        assert!(second.as_mut().now_or_never().is_none(), "it has just had its turn");
        let other = other.await.unwrap();
        assert!(second.as_mut().now_or_never().is_none());
        drop(other);
        drop(second.await.unwrap());
        drop(third.await.unwrap());
        turns.close();
        assert_eq!(turns.take(None).await.err(), Some(Fault::Stopped));
    }
}
