//! Roles, by the platform's names.

use std::fmt;
use std::str::FromStr;

use super::DEFAULT_TENANT;
use crate::message::Tenant;

macro_rules! roles {
    ($($role:ident = $name:literal, $doc:literal;)+) => {
        /// Permission to use one kind of resource. The names are the platform's (Cumulocity OpenAPI, "Required roles"); those
        /// that begin with `ROLE_TIDEGATE_` are the gateway's own.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Role {
            $(#[doc = concat!("`", $name, "`: ", $doc)] $role,)+
        }

        impl Role {
            /// Every role.
            pub const ALL: &[Self] = &[$(Self::$role),+];

            /// The name on the wire.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$role => $name,)+
                }
            }
        }
    };
}

impl Role {
    /// Whether users of this tenant can hold the role. Those over the gateway as a whole exist in its own tenant only.
    #[must_use]
    pub fn exists_in(self, tenant: &Tenant) -> bool {
        tenant.as_str() == DEFAULT_TENANT
            || !matches!(self, Self::TenantManagementAdmin | Self::TidegateStreamAdmin | Self::TidegateOperator)
    }
}

roles! {
    InventoryRead = "ROLE_INVENTORY_READ", "read managed objects.";
    InventoryAdmin = "ROLE_INVENTORY_ADMIN", "change and delete managed objects.";
    InventoryCreate = "ROLE_INVENTORY_CREATE", "create managed objects.";
    IdentityRead = "ROLE_IDENTITY_READ", "read external ids.";
    IdentityAdmin = "ROLE_IDENTITY_ADMIN", "bind and unbind external ids.";
    MeasurementRead = "ROLE_MEASUREMENT_READ", "read measurements.";
    MeasurementAdmin = "ROLE_MEASUREMENT_ADMIN", "create and delete measurements.";
    EventRead = "ROLE_EVENT_READ", "read events.";
    EventAdmin = "ROLE_EVENT_ADMIN", "create, change and delete events.";
    AlarmRead = "ROLE_ALARM_READ", "read alarms.";
    AlarmAdmin = "ROLE_ALARM_ADMIN", "create, change and delete alarms.";
    DeviceControlRead = "ROLE_DEVICE_CONTROL_READ", "read operations.";
    DeviceControlAdmin = "ROLE_DEVICE_CONTROL_ADMIN", "create, change and delete operations.";
    Notification2Admin = "ROLE_NOTIFICATION_2_ADMIN", "manage subscriptions, tokens and consumers.";
    TenantStatisticsRead = "ROLE_TENANT_STATISTICS_READ", "read how the topics of the tenant fare.";
    TenantManagementAdmin = "ROLE_TENANT_MANAGEMENT_ADMIN", "create and delete tenants; exists in tenant `edge`.";
    UserManagementAdmin = "ROLE_USER_MANAGEMENT_ADMIN", "manage the users of the tenant.";
    TidegatePluginAdmin = "ROLE_TIDEGATE_PLUGIN_ADMIN", "install and remove plugins.";
    TidegateStreamAdmin = "ROLE_TIDEGATE_STREAM_ADMIN", "manage streams; exists in tenant `edge`.";
    TidegateOperator = "ROLE_TIDEGATE_OPERATOR", "read metrics, and see and change what is set for the topics of all tenants; exists in tenant `edge`.";
}

/// A name that is no role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a role")]
pub struct UnknownRole(String);

impl FromStr for Role {
    type Err = UnknownRole;

    fn from_str(name: &str) -> Result<Self, UnknownRole> {
        let known = Self::ALL.iter().copied().find(|role| role.as_str() == name);
        known.ok_or_else(|| UnknownRole(name.chars().take(64).collect()))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A set of roles. Its text form is the names in the order of [`Role::ALL`], separated by commas.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Roles(u32);

const _: () = assert!(Role::ALL.len() <= u32::BITS as usize);

impl Roles {
    /// No role.
    pub const NONE: Self = Self(0);

    /// Every role that exists in this tenant: what its first administrator gets.
    #[must_use]
    pub fn all_of(tenant: &Tenant) -> Self {
        Role::ALL.iter().copied().filter(|role| role.exists_in(tenant)).collect()
    }

    /// This set and `role`.
    #[must_use]
    pub const fn with(self, role: Role) -> Self {
        Self(self.0 | 1 << role as u32)
    }

    /// Whether `role` is in the set.
    #[must_use]
    pub const fn contains(self, role: Role) -> bool {
        self.0 & 1 << role as u32 != 0
    }

    /// The roles of the set, in the order of [`Role::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Role> {
        Role::ALL.iter().copied().filter(move |role| self.contains(*role))
    }
}

impl FromIterator<Role> for Roles {
    fn from_iter<I: IntoIterator<Item = Role>>(roles: I) -> Self {
        roles.into_iter().fold(Self::NONE, Self::with)
    }
}

impl FromStr for Roles {
    type Err = UnknownRole;

    fn from_str(names: &str) -> Result<Self, UnknownRole> {
        names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(Role::from_str).collect()
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, role) in self.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "," })?;
            f.write_str(role.as_str())?;
        }
        Ok(())
    }
}

impl fmt::Debug for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn each_role_has_a_name_of_its_own_that_parses_back() {
        for role in Role::ALL {
            assert!(role.as_str().starts_with("ROLE_"));
            assert_eq!(role.as_str().parse::<Role>().unwrap(), *role);
        }
        assert_eq!("ROLE_ROOT".parse::<Role>().unwrap_err().to_string(), "\"ROLE_ROOT\" is not a role");
        assert!("role_alarm_read".parse::<Role>().is_err());
    }

    #[test]
    fn the_reference_lists_exactly_the_roles_and_where_they_exist() {
        let reference = include_str!("../../../docs/access.md");
        let documented: Vec<_> = reference
            .lines()
            .filter(|line| line.starts_with("| `ROLE_"))
            .map(|line| line.trim_matches('|').split('|').map(str::trim).take(2).collect::<Vec<_>>())
            .collect();
        let known = Role::ALL.iter().map(|role| {
            let everywhere = role.exists_in(&"plant1".into());
            [format!("`{role}`"), if everywhere { "all" } else { "edge" }.to_owned()]
        });
        assert_eq!(documented, known.collect::<Vec<_>>());
    }

    #[test]
    fn a_set_holds_what_was_put_in_and_nothing_else() {
        for role in Role::ALL {
            let set = Roles::NONE.with(*role);
            assert_eq!(set.iter().collect::<Vec<_>>(), [*role]);
        }
        assert_eq!(Roles::all_of(&DEFAULT_TENANT.into()).iter().count(), Role::ALL.len());
        assert!(!Roles::all_of(&"plant1".into()).contains(Role::TenantManagementAdmin));
        assert!(Roles::all_of(&"plant1".into()).contains(Role::UserManagementAdmin));
        assert_eq!(Roles::NONE.iter().next(), None);
    }

    #[test]
    fn a_set_is_written_and_read_as_names() {
        let set = Roles::NONE.with(Role::AlarmRead).with(Role::InventoryRead);
        assert_eq!(set.to_string(), "ROLE_INVENTORY_READ,ROLE_ALARM_READ");
        assert_eq!("ROLE_ALARM_READ, ROLE_INVENTORY_READ".parse::<Roles>().unwrap(), set);
        let all = Roles::all_of(&DEFAULT_TENANT.into());
        assert_eq!(all.to_string().parse::<Roles>().unwrap(), all);
        assert_eq!("".parse::<Roles>().unwrap(), Roles::NONE);
        assert!("ROLE_ALARM_READ,nobody".parse::<Roles>().is_err());
    }

    #[test]
    fn the_error_repeats_only_the_start_of_a_long_name() {
        let error = "x".repeat(10_000).parse::<Role>().unwrap_err();
        assert!(error.to_string().len() < 100);
    }
}
