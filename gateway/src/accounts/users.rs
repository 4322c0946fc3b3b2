//! Users of a tenant.

use std::borrow::Cow;
use std::collections::BTreeMap;

use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqlitePool};

use super::{AccountError, Tenants};
use crate::auth::{DEFAULT_TENANT, Role, Roles, UserRow, check_user_name};
use crate::json::{self, Invalid, Limits, Members};
use crate::message::Tenant;
use crate::platform::short_string;
use crate::store::{Statement, StoreError, Value};

/// What a user's record may tell of the person.
const PROFILE: [&str; 5] = ["displayName", "email", "firstName", "lastName", "phone"];

/// Members of a user that say what only the gateway can know; clients send back what they have read.
const READ_ONLY: [&str; 5] = ["id", "self", "effectiveRoles", "groups", "lastPasswordChange"];

const COLUMNS: &str = "SELECT tenant, name, hash, roles, profile FROM user WHERE tenant = ?";

/// A user with everything that is stored.
#[derive(Clone)]
pub struct Account {
    /// What authentication works with.
    pub row: UserRow,
    /// Of [`PROFILE`] what is set.
    pub profile: BTreeMap<String, String>,
}

/// What a client sets of a user. A member that is absent or null stays as it is.
#[derive(Debug, Default)]
pub struct UserFields {
    /// `userName`.
    pub name: Option<String>,
    /// `password`, in the clear.
    pub password: Option<String>,
    /// `roles`.
    pub roles: Option<Roles>,
    /// Members of the profile; an empty text takes the member away.
    profile: Vec<(String, String)>,
}

impl UserFields {
    /// Reads the body of a request about a user of `tenant`: `userName`, `password`, `roles` (an array of names, or the
    /// platform's `{"references":[{"role":{"id":…}}]}`), `displayName`, `email`, `firstName`, `lastName`, `phone`. `enabled` may
    /// only be true and `shouldResetPassword` only false.
    ///
    /// # Errors
    /// Names the member that is unknown or wrong.
    pub fn parse(body: &[u8], tenant: &Tenant, limits: &Limits) -> Result<Self, Invalid> {
        let mut fields = Self::default();
        for member in &Members::parse(body, limits)? {
            let (name, raw) = (&*member.name, member.raw);
            let text = || short_string(raw, name).map(Cow::into_owned);
            match name {
                _ if json::is_null(raw) || READ_ONLY.contains(&name) => {}
                "userName" => fields.name = Some(text()?),
                // A password has a length limit of its own.
                "password" => fields.password = Some(json::string(raw, name)?.into_owned()),
                "roles" => fields.roles = Some(roles(raw, tenant, limits)?),
                "enabled" if !json::boolean(raw, name)? => {
                    return Err(Invalid::new(name, "must be true: users are removed, not disabled"));
                }
                "shouldResetPassword" if json::boolean(raw, name)? => {
                    return Err(Invalid::new(name, "must be false: passwords are not reset by mail"));
                }
                "enabled" | "shouldResetPassword" => {}
                _ if PROFILE.contains(&name) => fields.profile.push((name.to_owned(), text()?)),
                _ => return Err(Invalid::new(name, "is not a known member of a user")),
            }
        }
        Ok(fields)
    }
}

/// The rows of one tenant's users.
#[derive(Clone, Copy)]
pub struct Users<'a> {
    /// Where they are read.
    pub store: &'a SqlitePool,
    /// The tenant.
    pub tenant: &'a Tenant,
    /// `limits.users_per_tenant`.
    pub limit: usize,
}

impl Users<'_> {
    /// Makes a user.
    ///
    /// # Errors
    /// For a name that is not allowed or taken, when the tenant is gone, and at the limit.
    pub async fn add(&self, account: &Account) -> Result<Vec<Statement>, AccountError> {
        Tenants { store: self.store, limit: 0 }.get(self.tenant).await?;
        if self.find(&account.row.name).await?.is_some() {
            return Err(AccountError::Taken(format!("User '{}' exists already.", account.row.name)));
        }
        if self.count().await? >= self.limit as u64 {
            return Err(AccountError::TooMany {
                what: "users in a tenant",
                key: "limits.users_per_tenant",
                limit: self.limit,
            });
        }
        Ok(vec![account.insert()])
    }

    /// Changes the user that is there into `after`.
    ///
    /// # Errors
    /// When nobody would be left who may manage users.
    pub async fn change(&self, after: &Account) -> Result<Vec<Statement>, AccountError> {
        let row = &after.row;
        if !row.roles.contains(Role::UserManagementAdmin) {
            self.keep_an_administrator(&row.name).await?;
        }
        let text = |text: &str| Value::Text(text.to_owned());
        let values = vec![
            text(&row.hash),
            text(&row.roles.to_string()),
            Value::Text(after.profile()),
            text(row.tenant.as_str()),
            text(&row.name),
        ];
        let sql = "UPDATE user SET hash = ?, roles = ?, profile = ? WHERE tenant = ? AND name = ?";
        Ok(vec![Statement { sql, values }])
    }

    /// Removes a user.
    ///
    /// # Errors
    /// When there is none, or nobody would be left who may manage users.
    pub async fn remove(&self, name: &str) -> Result<Vec<Statement>, AccountError> {
        self.get(name).await?;
        self.keep_an_administrator(name).await?;
        let values = vec![Value::Text(self.tenant.to_string()), Value::Text(name.to_owned())];
        Ok(vec![Statement { sql: "DELETE FROM user WHERE tenant = ? AND name = ?", values }])
    }

    /// A user that is there.
    ///
    /// # Errors
    /// [`AccountError::Missing`].
    pub async fn get(&self, name: &str) -> Result<Account, AccountError> {
        self.find(name).await?.ok_or_else(|| AccountError::Missing("user"))
    }

    /// At most `count` users, by name, after the first `offset`.
    pub async fn list(&self, offset: u64, count: u64) -> Result<Vec<Account>, AccountError> {
        let sql = sqlx::AssertSqlSafe(format!("{COLUMNS} ORDER BY name LIMIT ? OFFSET ?"));
        let rows = sqlx::query(sql)
            .bind(self.tenant.as_str())
            .bind(i64::try_from(count).unwrap_or(i64::MAX))
            .bind(i64::try_from(offset).unwrap_or(i64::MAX))
            .fetch_all(self.store)
            .await?;
        rows.iter().map(read).collect()
    }

    /// How many there are.
    pub async fn count(&self) -> Result<u64, StoreError> {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM user WHERE tenant = ?")
            .bind(self.tenant.as_str())
            .fetch_one(self.store)
            .await?;
        Ok(count.cast_unsigned())
    }

    async fn find(&self, name: &str) -> Result<Option<Account>, AccountError> {
        let sql = sqlx::AssertSqlSafe(format!("{COLUMNS} AND name = ?"));
        let row = sqlx::query(sql).bind(self.tenant.as_str()).bind(name).fetch_optional(self.store).await?;
        row.as_ref().map(read).transpose()
    }

    /// Refuses when `leaving` is the only user that may manage users.
    async fn keep_an_administrator(&self, leaving: &str) -> Result<(), AccountError> {
        let others: bool = sqlx::query_scalar(
            "SELECT EXISTS(SELECT 1 FROM user WHERE tenant = ? AND name <> ? AND instr(',' || roles || ',', ?))",
        )
        .bind(self.tenant.as_str())
        .bind(leaving)
        .bind(format!(",{},", Role::UserManagementAdmin))
        .fetch_one(self.store)
        .await?;
        if others { Ok(()) } else { Err(AccountError::LastAdministrator) }
    }
}

impl Account {
    /// A new user.
    ///
    /// # Errors
    /// For a name that is not allowed.
    pub fn new(tenant: &Tenant, name: String, hash: String, roles: Roles) -> Result<Self, Invalid> {
        check_user_name(&name).map_err(|error| Invalid::new("", error.to_string()))?;
        if matches!(name.as_str(), "." | "..") {
            return Err(Invalid::new("userName", "must not be a step in a path"));
        }
        let row = UserRow { tenant: tenant.clone(), name, hash, roles };
        Ok(Self { row, profile: BTreeMap::new() })
    }

    /// This user with what the client sets, but for the password.
    #[must_use]
    pub fn with(mut self, fields: UserFields) -> Self {
        self.row.roles = fields.roles.unwrap_or(self.row.roles);
        for (name, text) in fields.profile {
            if text.is_empty() {
                self.profile.remove(&name);
            } else {
                self.profile.insert(name, text);
            }
        }
        self
    }

    /// The statement that stores a new user.
    #[must_use]
    pub fn insert(&self) -> Statement {
        let text = |text: &str| Value::Text(text.to_owned());
        let row = &self.row;
        let values = vec![
            text(row.tenant.as_str()),
            text(&row.name),
            text(&row.hash),
            text(&row.roles.to_string()),
            Value::Text(self.profile()),
        ];
        Statement { sql: "INSERT INTO user(tenant, name, hash, roles, profile) VALUES (?, ?, ?, ?, ?)", values }
    }

    fn profile(&self) -> String {
        serde_json::to_string(&self.profile).expect("invariant: texts serialize")
    }
}

fn read(row: &SqliteRow) -> Result<Account, AccountError> {
    let damaged = |column: &'static str| sqlx::Error::Decode(format!("user.{column} is damaged").into());
    Ok(Account {
        row: UserRow {
            tenant: row.try_get::<&str, _>(0)?.into(),
            name: row.try_get(1)?,
            hash: row.try_get(2)?,
            roles: row.try_get::<&str, _>(3)?.parse().map_err(|_| damaged("roles"))?,
        },
        profile: serde_json::from_str(row.try_get(4)?).map_err(|_| damaged("profile"))?,
    })
}

/// Reads `roles`. Roles over the gateway as a whole exist in its own tenant only.
fn roles(raw: &str, tenant: &Tenant, limits: &Limits) -> Result<Roles, Invalid> {
    let mut roles = Roles::NONE;
    let mut take = |raw: &str| {
        let role: Role =
            json::string(raw, "roles")?.parse().map_err(|error| Invalid::new("roles", format!("{error}")))?;
        if !role.exists_in(tenant) {
            return Err(Invalid::new("roles", format!("{role} exists only in tenant '{DEFAULT_TENANT}'")));
        }
        roles = roles.with(role);
        Ok(())
    };
    if raw.starts_with('[') {
        json::each_element(raw, take)?;
        return Ok(roles);
    }
    let wrong = || Invalid::new("roles", "must be an array of names, or an object with 'references'");
    let members = Members::of(raw, limits).map_err(|_| wrong())?;
    json::each_element(members.get("references").ok_or_else(wrong)?, |reference| {
        let reference = Members::of(reference, limits).map_err(|_| wrong())?;
        let role = Members::of(reference.get("role").ok_or_else(wrong)?, limits).map_err(|_| wrong())?;
        take(role.get("id").ok_or_else(wrong)?)
    })?;
    Ok(roles)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn parse(body: &str) -> Result<UserFields, Invalid> {
        UserFields::parse(body.as_bytes(), &"plant1".into(), &Limits::default())
    }

    #[test]
    fn roles_come_as_names_or_as_the_platforms_references() {
        let expected = Roles::NONE.with(Role::AlarmRead).with(Role::EventRead);
        for body in [
            r#"{"roles":["ROLE_ALARM_READ","ROLE_EVENT_READ","ROLE_ALARM_READ"]}"#,
            r#"{"roles":{"references":[{"role":{"id":"ROLE_EVENT_READ","name":"x"}},{"role":{"id":"ROLE_ALARM_READ"}}]}}"#,
        ] {
            assert_eq!(parse(body).unwrap().roles, Some(expected), "{body}");
        }
        assert_eq!(parse(r#"{"roles":[]}"#).unwrap().roles, Some(Roles::NONE));
        assert_eq!(parse(r#"{"roles":null}"#).unwrap().roles, None);
        for body in [r#"{"roles":{}}"#, r#"{"roles":"ROLE_ALARM_READ"}"#, r#"{"roles":{"references":[{"id":"x"}]}}"#] {
            assert!(parse(body).unwrap_err().to_string().starts_with("roles: must be an array"), "{body}");
        }
        assert_eq!(parse(r#"{"roles":["ROLE_X"]}"#).unwrap_err().to_string(), "roles: \"ROLE_X\" is not a role");
    }

    #[test]
    fn roles_of_the_gateway_exist_in_its_own_tenant_only() {
        let body = r#"{"roles":["ROLE_TENANT_MANAGEMENT_ADMIN"]}"#;
        let error = parse(body).unwrap_err().to_string();
        assert_eq!(error, "roles: ROLE_TENANT_MANAGEMENT_ADMIN exists only in tenant 'edge'");
        assert!(UserFields::parse(body.as_bytes(), &DEFAULT_TENANT.into(), &Limits::default()).is_ok());
    }

    #[test]
    fn unknown_and_wrong_members_are_named() {
        for (body, reason) in [
            (r#"{"pasword":"x"}"#, "pasword: is not a known member of a user"),
            (r#"{"userName":5}"#, "userName: must be a string"),
            (r#"{"password":[]}"#, "password: must be a string"),
            (r#"{"enabled":false}"#, "enabled: must be true: users are removed, not disabled"),
            (r#"{"shouldResetPassword":true}"#, "shouldResetPassword: must be false: passwords are not reset by mail"),
        ] {
            assert_eq!(parse(body).unwrap_err().to_string(), reason);
        }
        let long = format!(r#"{{"email":"{}"}}"#, "x".repeat(257));
        assert_eq!(parse(&long).unwrap_err().to_string(), "email: is longer than 256 characters");
    }

    #[test]
    fn what_was_read_can_be_sent_back_and_an_empty_text_takes_a_member_away() {
        let body = r#"{"id":"a","self":"x","userName":"a","enabled":true,"shouldResetPassword":false,"groups":{},
                       "effectiveRoles":[],"email":"a@b","firstName":"A","password":null}"#;
        let account = Account::new(&"plant1".into(), "a".into(), "hash".into(), Roles::NONE).unwrap();
        let account = account.with(parse(body).unwrap());
        assert_eq!(account.profile(), r#"{"email":"a@b","firstName":"A"}"#);
        let account = account.with(parse(r#"{"email":"","phone":"1"}"#).unwrap());
        assert_eq!(account.profile(), r#"{"firstName":"A","phone":"1"}"#);
        for name in ["", ".", "..", "a/b", "a:b"] {
            assert!(Account::new(&"plant1".into(), name.into(), String::new(), Roles::NONE).is_err(), "{name}");
        }
    }
}
