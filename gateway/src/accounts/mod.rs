//! Tenants and users as rows: what may be made, changed and removed. What is asked for comes in, the statements that do it come
//! out; who asks commits them, and holds the tenant's lock from before the question until then.

mod tenants;
mod users;

pub use tenants::{Removed, TenantRow, Tenants, check_name as check_tenant_name, removed};
pub use users::{Account, UserFields, Users};

use crate::json::Invalid;
use crate::store::StoreError;

/// Why accounts are not changed as asked. The text may be shown to whoever asked, but for that of the store.
#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    /// What was asked for is not allowed.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The name is taken; says by what.
    #[error("{0}")]
    Taken(String),
    /// There is no such `tenant` or `user`.
    #[error("There is no such {0}.")]
    Missing(&'static str),
    /// Somebody has to remain who may manage the users of the tenant.
    #[error("This is the last user of the tenant with ROLE_USER_MANAGEMENT_ADMIN, which somebody has to hold.")]
    LastAdministrator,
    /// A limit of the configuration is reached.
    #[error("There may be at most {limit} {what} ({key}).")]
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// The limit's key.
        key: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The disk refused.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<sqlx::Error> for AccountError {
    fn from(error: sqlx::Error) -> Self {
        Self::Store(error.into())
    }
}
