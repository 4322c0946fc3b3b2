//! Who asks, and what they may do: users and roles, Basic credentials, signing keys and consumer tokens.

mod basic;
mod keys;
mod password;
mod roles;
mod token;
mod users;

use std::sync::Arc;

pub use basic::{Authenticator, DEFAULT_TENANT};
pub use keys::{KEYS, KeyError, KeyKind, SigningKey};
pub use password::{MAX_PASSWORD_BYTES, MIN_PASSWORD_CHARS, generate_password, hash_password};
pub use roles::{Role, Roles, UnknownRole};
pub use token::{ConsumerClaims, ConsumerTokens, MAX_TOKEN_BYTES, MAX_TOKEN_MINUTES, TokenError};
pub use users::{MAX_USER_CHARS, UserError, UserRow, Users, check_name as check_user_name};

use crate::message::Tenant;

/// A user whose credentials were verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// The tenant whose data the user may reach.
    pub tenant: Tenant,
    /// The name within the tenant.
    pub user: Arc<str>,
    /// What the user may do.
    pub roles: Roles,
}

impl Principal {
    /// Whether the user holds `role`. No role implies another: ADMIN does not include READ, as on the platform.
    #[must_use]
    pub fn allows(&self, role: Role) -> bool {
        self.roles.contains(role)
    }

    /// Refuses a user who does not hold `role`.
    ///
    /// # Errors
    /// [`AuthError::NotAllowed`].
    pub fn require(&self, role: Role) -> Result<(), AuthError> {
        if self.allows(role) { Ok(()) } else { Err(AuthError::NotAllowed(role)) }
    }
}

/// Why a request is not let in. The text is the platform's `message` (Cumulocity REST, error responses) where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// No credentials were sent.
    #[error("Invalid credentials! : Bad credentials")]
    Missing,
    /// The header is not Basic, or its user is unknown, or its password is wrong; a caller cannot tell which.
    #[error("Invalid credentials! : Bad credentials")]
    BadCredentials,
    /// Too many logins wait for their verification.
    #[error("Too many logins are waiting for verification. Try again in a second.")]
    Busy,
    /// The user lacks this role.
    #[error("Access is denied.")]
    NotAllowed(Role),
    /// A new password is shorter than [`MIN_PASSWORD_CHARS`] or longer than [`MAX_PASSWORD_BYTES`].
    #[error("password must have at least {MIN_PASSWORD_CHARS} characters and at most {MAX_PASSWORD_BYTES} bytes.")]
    Password,
}

impl AuthError {
    /// The HTTP status.
    #[must_use]
    pub fn status(self) -> u16 {
        match self {
            Self::Missing | Self::BadCredentials => 401,
            Self::NotAllowed(_) => 403,
            Self::Password => 422,
            Self::Busy => 503,
        }
    }

    /// The reason in metrics and logs.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::BadCredentials => "credentials",
            Self::NotAllowed(_) => "role",
            Self::Password => "password",
            Self::Busy => "busy",
        }
    }

    /// The `error` member of the platform's error body.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Missing | Self::BadCredentials => "security/Unauthorized",
            Self::NotAllowed(_) => "security/Forbidden",
            Self::Password => "undefined/validationError",
            Self::Busy => "tidegate/Busy",
        }
    }
}

/// Bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).expect("invariant: the system's random source does not fail");
    bytes
}

/// Anything from 0 to 1.
pub(crate) fn chance() -> f64 {
    f64::from(u32::from_be_bytes(random())) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_principal_may_do_what_its_roles_say_and_nothing_else() {
        let principal = Principal {
            tenant: "edge".into(),
            user: "ann".into(),
            roles: [Role::MeasurementAdmin].into_iter().collect(),
        };
        assert!(principal.allows(Role::MeasurementAdmin));
        assert_eq!(principal.require(Role::MeasurementAdmin), Ok(()));
        assert_eq!(principal.require(Role::MeasurementRead), Err(AuthError::NotAllowed(Role::MeasurementRead)));
    }

    #[test]
    fn errors_speak_as_the_platform_does() {
        for error in [AuthError::Missing, AuthError::BadCredentials] {
            assert_eq!((error.status(), error.id()), (401, "security/Unauthorized"));
            assert_eq!(error.to_string(), "Invalid credentials! : Bad credentials");
        }
        let denied = AuthError::NotAllowed(Role::InventoryRead);
        assert_eq!((denied.status(), denied.id()), (403, "security/Forbidden"));
        assert_eq!(denied.to_string(), "Access is denied.");
    }
}
