//! Tenants.

use sqlx::{Row as _, SqlitePool};

use super::{Account, AccountError};
use crate::auth::DEFAULT_TENANT;
use crate::json::Invalid;
use crate::message::Tenant;
use crate::store::{Statement, StoreError, Value};

/// Length of a tenant's name in characters.
const NAME_CHARS: std::ops::RangeInclusive<usize> = 2..=32;

/// What is still to be deleted of a removed tenant: topics as they drain, or topics and objects at once. 0 is nothing.
const REST_TOPICS: i64 = 1;
const REST_ALL: i64 = 2;

/// A tenant that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantRow {
    /// Its name.
    pub name: Tenant,
    /// When it was made, ms since the epoch.
    pub created_ms: i64,
}

/// A tenant that was removed, and of which something is left.
#[derive(Clone, Debug)]
pub struct Removed {
    /// Its name.
    pub name: Tenant,
    /// When it was removed, ms since the epoch.
    pub removed_ms: i64,
    /// Whether its topics and objects are to be deleted at once.
    pub purge: bool,
}

/// The tenants that were removed, and of which something is left.
pub async fn removed(store: &SqlitePool) -> Result<Vec<Removed>, StoreError> {
    let rows: Vec<(String, i64, i64)> =
        sqlx::query_as("SELECT name, removed, rest FROM tenant WHERE removed IS NOT NULL AND rest > 0")
            .fetch_all(store)
            .await?;
    let read = |(name, removed_ms, rest): (String, i64, i64)| Removed {
        name: name.as_str().into(),
        removed_ms,
        purge: rest == REST_ALL,
    };
    Ok(rows.into_iter().map(read).collect())
}

impl Removed {
    /// Nothing is left of it, unless more was asked for meanwhile.
    #[must_use]
    pub fn settle(&self) -> Statement {
        let rest = if self.purge { REST_ALL } else { REST_TOPICS };
        let values = vec![Value::Text(self.name.to_string()), Value::Int(rest)];
        Statement { sql: "UPDATE tenant SET rest = 0 WHERE name = ? AND rest = ?", values }
    }
}

/// The rows of tenants.
#[derive(Clone, Copy)]
pub struct Tenants<'a> {
    /// Where they are read.
    pub store: &'a SqlitePool,
    /// `limits.tenants`.
    pub limit: usize,
}

impl Tenants<'_> {
    /// Makes a tenant with its first administrator.
    ///
    /// # Errors
    /// For a name that is not allowed or was given before, and at the limit.
    pub async fn add(&self, name: &Tenant, admin: &Account, now_ms: i64) -> Result<Vec<Statement>, AccountError> {
        check_name(name.as_str())?;
        match self.removed(name).await? {
            Some(None) => return Err(AccountError::Taken(format!("Tenant '{name}' exists already."))),
            Some(Some(_)) => {
                let message =
                    format!("Tenant '{name}' was removed, and the name of a removed tenant is not given again.");
                return Err(AccountError::Taken(message));
            }
            None => {}
        }
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM tenant").fetch_one(self.store).await?;
        if count.cast_unsigned() >= self.limit as u64 {
            return Err(AccountError::TooMany {
                what: "tenants, removed ones included",
                key: "limits.tenants",
                limit: self.limit,
            });
        }
        let values = vec![Value::Text(name.to_string()), Value::Int(now_ms)];
        Ok(vec![Statement { sql: "INSERT INTO tenant(name, created) VALUES (?, ?)", values }, admin.insert()])
    }

    /// Removes a tenant with its users, subscriptions and plugins. What waits in its topics stays for the consumers that have tokens,
    /// unless it is to be purged: then the topics go, too, and all objects. A tenant that was removed before can still be purged.
    ///
    /// # Errors
    /// When it is not there, or is the gateway's own.
    pub async fn remove(&self, name: &Tenant, purge: bool, now_ms: i64) -> Result<Vec<Statement>, AccountError> {
        if name.as_str() == DEFAULT_TENANT {
            return Err(Invalid::new(
                "",
                format!("Tenant '{DEFAULT_TENANT}' is the gateway's own and cannot be removed."),
            )
            .into());
        }
        let removed = self.removed(name).await?.ok_or(AccountError::Missing("tenant"))?;
        if removed.is_some() && !purge {
            return Err(AccountError::Missing("tenant"));
        }
        let tenant = || Value::Text(name.to_string());
        Ok(vec![
            Statement { sql: "DELETE FROM user WHERE tenant = ?", values: vec![tenant()] },
            Statement { sql: "DELETE FROM subscription WHERE tenant = ?", values: vec![tenant()] },
            Statement { sql: "DELETE FROM plugin WHERE tenant = ?", values: vec![tenant()] },
            Statement { sql: "DELETE FROM plugin_name WHERE tenant = ?", values: vec![tenant()] },
            Statement {
                sql: "UPDATE tenant SET removed = ifnull(removed, ?), rest = ? WHERE name = ?",
                values: vec![Value::Int(now_ms), Value::Int(if purge { REST_ALL } else { REST_TOPICS }), tenant()],
            },
        ])
    }

    /// When a tenant was removed; `None` for one that never was there.
    async fn removed(&self, name: &Tenant) -> Result<Option<Option<i64>>, StoreError> {
        let removed = sqlx::query_scalar("SELECT removed FROM tenant WHERE name = ?");
        Ok(removed.bind(name.as_str()).fetch_optional(self.store).await?)
    }

    /// Whether there is or was such a tenant.
    pub async fn was_there(&self, name: &Tenant) -> Result<bool, StoreError> {
        Ok(self.removed(name).await?.is_some())
    }

    /// A tenant that is there.
    ///
    /// # Errors
    /// [`AccountError::Missing`].
    pub async fn get(&self, name: &Tenant) -> Result<TenantRow, AccountError> {
        let created: Option<i64> = sqlx::query_scalar("SELECT created FROM tenant WHERE name = ? AND removed IS NULL")
            .bind(name.as_str())
            .fetch_optional(self.store)
            .await?;
        match created {
            Some(created_ms) => Ok(TenantRow { name: name.clone(), created_ms }),
            None => Err(AccountError::Missing("tenant")),
        }
    }

    /// At most `count` tenants that are there, by name, after the first `offset`.
    pub async fn list(&self, offset: u64, count: u64) -> Result<Vec<TenantRow>, StoreError> {
        let rows = sqlx::query("SELECT name, created FROM tenant WHERE removed IS NULL ORDER BY name LIMIT ? OFFSET ?")
            .bind(i64::try_from(count).unwrap_or(i64::MAX))
            .bind(i64::try_from(offset).unwrap_or(i64::MAX))
            .fetch_all(self.store)
            .await?;
        rows.iter()
            .map(|row| Ok(TenantRow { name: row.try_get::<&str, _>(0)?.into(), created_ms: row.try_get(1)? }))
            .collect()
    }

    /// How many are there.
    pub async fn count(&self) -> Result<u64, StoreError> {
        let count: i64 =
            sqlx::query_scalar("SELECT count(*) FROM tenant WHERE removed IS NULL").fetch_one(self.store).await?;
        Ok(count.cast_unsigned())
    }
}

/// Refuses what cannot be the name of a tenant: a small letter, then small letters and digits, as on the platform. `roles` stands
/// for something else where the users of a tenant are found.
///
/// # Errors
/// Says what a name looks like.
pub fn check_name(name: &str) -> Result<(), Invalid> {
    let sound = NAME_CHARS.contains(&name.len())
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
        && name != "roles";
    if sound {
        return Ok(());
    }
    let (min, max) = (NAME_CHARS.start(), NAME_CHARS.end());
    Err(Invalid::new(
        "id",
        format!("must have {min} to {max} small letters and digits, a letter first, and not be 'roles'"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_small_letters_and_digits() {
        for good in ["edge", "t1", "t07007007", &"a".repeat(32)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        for bad in ["", "a", "1a", "Plant", "a-b", "a_b", "a/b", "a b", "plänt", "roles", &"a".repeat(33)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
