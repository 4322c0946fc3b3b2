//! The users of all tenants, in memory.

use std::collections::HashMap;
use std::sync::Arc;

use argon2::password_hash::phc::PasswordHash;

use super::password::parse_hash;
use super::roles::Roles;
use crate::message::Tenant;

/// The longest name of a tenant or a user, in characters.
pub const MAX_USER_CHARS: usize = 255;

/// A user as stored.
#[derive(Clone, PartialEq, Eq)]
pub struct UserRow {
    /// The tenant that the user belongs to.
    pub tenant: Tenant,
    /// The name within the tenant.
    pub name: String,
    /// The argon2id hash of the password, a PHC string.
    pub hash: String,
    /// What the user may do.
    pub roles: Roles,
}

/// Why a user cannot be taken in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// The named field is empty, too long, or holds a character that Basic credentials cannot carry.
    #[error("{0} must have 1 to {MAX_USER_CHARS} characters and no slash, colon or control character")]
    Name(&'static str),
    /// The stored hash is damaged or not argon2id.
    #[error("the password hash of user {0:?} is damaged; set a new password")]
    Hash(String),
}

/// What is known of one user.
#[derive(Clone)]
pub(super) struct User {
    pub(super) hash: Arc<PasswordHash>,
    pub(super) roles: Roles,
}

/// Users by tenant and name. Who adds them counts them.
#[derive(Default)]
pub struct Users(HashMap<Tenant, HashMap<Arc<str>, User>>);

impl Users {
    /// Takes in all rows. Of two rows with the same tenant and name the last counts.
    ///
    /// # Errors
    /// Those of [`Users::put`].
    pub fn load(rows: impl IntoIterator<Item = UserRow>) -> Result<Self, UserError> {
        let mut users = Self::default();
        for row in rows {
            users.put(row)?;
        }
        Ok(users)
    }

    /// Adds or replaces one user.
    ///
    /// # Errors
    /// [`UserError`]; the map is unchanged then.
    pub fn put(&mut self, row: UserRow) -> Result<(), UserError> {
        check("tenant", row.tenant.as_str())?;
        check_name(&row.name)?;
        let Some(hash) = parse_hash(&row.hash) else {
            return Err(UserError::Hash(row.name));
        };
        let user = User { hash: Arc::new(hash), roles: row.roles };
        self.0.entry(row.tenant).or_default().insert(row.name.into(), user);
        Ok(())
    }

    /// Removes one user; `false` when there was none.
    pub fn remove(&mut self, tenant: &Tenant, name: &str) -> bool {
        self.0.get_mut(tenant).is_some_and(|users| users.remove(name).is_some())
    }

    /// Removes all users of a tenant.
    pub fn remove_tenant(&mut self, tenant: &Tenant) {
        self.0.remove(tenant);
    }

    /// Whether the tenant has users.
    #[must_use]
    pub fn knows(&self, tenant: &Tenant) -> bool {
        self.0.contains_key(tenant)
    }

    /// Whether there is no user at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn get(&self, tenant: &Tenant, name: &str) -> Option<&User> {
        self.0.get(tenant)?.get(name)
    }
}

/// Refuses what cannot be the name of a user.
///
/// # Errors
/// [`UserError::Name`].
pub fn check_name(name: &str) -> Result<(), UserError> {
    check("userName", name)
}

fn check(field: &'static str, name: &str) -> Result<(), UserError> {
    let sound = !name.is_empty()
        && name.chars().count() <= MAX_USER_CHARS
        && !name.contains(|c: char| matches!(c, '/' | ':') || c.is_control());
    if sound { Ok(()) } else { Err(UserError::Name(field)) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::password::cheap_hash;
    use super::super::roles::Role;
    use super::*;

    fn row(tenant: &str, name: &str, hash: &str) -> UserRow {
        UserRow { tenant: tenant.into(), name: name.into(), hash: hash.into(), roles: Roles::NONE }
    }

    #[test]
    fn users_of_different_tenants_do_not_meet() {
        let hash = cheap_hash("x");
        let mut users = Users::load([row("a", "ann", &hash), row("b", "bob", &hash)]).unwrap();
        assert!(users.get(&"a".into(), "ann").is_some());
        assert!(users.get(&"b".into(), "ann").is_none());
        assert!(!users.remove(&"b".into(), "ann"));
        assert!(users.remove(&"a".into(), "ann"));
        assert!(users.get(&"b".into(), "bob").is_some());
        users.remove_tenant(&"b".into());
        assert!(users.get(&"b".into(), "bob").is_none() && !users.knows(&"b".into()));
    }

    #[test]
    fn the_last_row_of_a_user_counts() {
        let hash = cheap_hash("x");
        let mut users = Users::default();
        users.put(row("a", "ann", &hash)).unwrap();
        let roles = Roles::NONE.with(Role::AlarmRead);
        users.put(UserRow { roles, ..row("a", "ann", &hash) }).unwrap();
        assert_eq!(users.get(&"a".into(), "ann").unwrap().roles, roles);
    }

    #[test]
    fn names_have_limits() {
        let hash = cheap_hash("x");
        let long = "é".repeat(MAX_USER_CHARS);
        assert!(Users::load([row(&long, &long, &hash)]).is_ok());
        for bad in ["", "a/b", "a:b", "a\nb", &"é".repeat(MAX_USER_CHARS + 1)] {
            assert_eq!(Users::load([row("a", bad, &hash)]).err(), Some(UserError::Name("userName")), "{bad:?}");
            assert_eq!(Users::load([row(bad, "a", &hash)]).err(), Some(UserError::Name("tenant")), "{bad:?}");
        }
    }

    #[test]
    fn a_damaged_hash_is_refused_by_the_users_name() {
        let error = Users::load([row("a", "ann", "plain")]).err().unwrap();
        assert_eq!(error.to_string(), "the password hash of user \"ann\" is damaged; set a new password");
    }
}
