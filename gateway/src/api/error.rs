//! The one place that turns errors into HTTP responses, in the platform's form `{error, message, info}`.

use std::borrow::Cow;
use std::fmt;

use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};

use crate::auth::{AuthError, TokenError};
use crate::consumer::Busy;
use crate::json::Invalid;
use crate::platform::list::ListError;
use crate::plugin::{Fault, PluginError};
use crate::push::CreateError;
use crate::registry::RegistryError;
use crate::store::{CopyError, StoreError};
use crate::writer::{AttachError, Refused};

const INFO: &str = "https://www.cumulocity.com/guides/reference-guide/#error_reporting";
/// Media type of every error body.
const MEDIA_TYPE: &str = "application/vnd.com.nsn.cumulocity.error+json";

/// An error as the client sees it: no paths, no SQL, no tokens.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    error: Cow<'static, str>,
    message: Cow<'static, str>,
    header: Option<(&'static str, &'static str)>,
}

impl ApiError {
    /// An error with the platform's identifier and a text.
    pub fn new(status: StatusCode, error: impl Into<Cow<'static, str>>, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, error: error.into(), message: message.into(), header: None }
    }

    /// 404 of the API `api`.
    pub fn not_found(api: &str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::NOT_FOUND, format!("{api}/Not Found"), message)
    }

    /// 422 with a text of its own.
    pub fn unprocessable(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "undefined/validationError", message)
    }

    /// 413.
    pub fn too_large(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "general/payloadTooLarge", message)
    }

    /// 415 for a body that is compressed (RFC 9110, 12.5.3 and 15.5.16).
    pub fn encoded() -> Self {
        let message = "The body must be sent as it is, without a Content-Encoding.";
        let mut error = Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "general/unsupportedMediaType", message);
        error.header = Some(("accept-encoding", "identity"));
        error
    }

    /// 400: what HTTP itself asks for is not there.
    pub fn bad_request(message: &'static str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "general/badRequest", message)
    }

    /// 503: the same request may succeed in a moment.
    pub fn busy(message: &'static str) -> Self {
        Self::unavailable(message)
    }

    /// 405 that names what is allowed.
    pub fn method_not_allowed(allowed: &'static str) -> Self {
        let message = format!("This method is not allowed here; allowed: {allowed}.");
        let mut error = Self::new(StatusCode::METHOD_NOT_ALLOWED, "general/methodNotAllowed", message);
        error.header = Some(("allow", allowed));
        error
    }

    /// Asks browsers and tools for Basic credentials.
    pub fn with_challenge(mut self) -> Self {
        if self.status == StatusCode::UNAUTHORIZED {
            self.header = Some(("www-authenticate", "Basic realm=\"Tidegate\""));
        }
        self
    }

    /// Names the configuration key that says what is too large.
    pub(super) fn with_limit(mut self, key: &str) -> Self {
        if self.status == StatusCode::PAYLOAD_TOO_LARGE {
            self.message = format!("{} ({key}).", self.message.trim_end_matches('.')).into();
        }
        self
    }

    fn unavailable(message: impl Into<Cow<'static, str>>) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "general/serviceUnavailable", message);
        error.header = Some(("retry-after", "1"));
        error
    }

    pub(super) fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "general/internalError", message)
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = serde_json::json!({"error": self.error, "message": self.message, "info": INFO}).to_string();
        let mut response = (self.status, [(CONTENT_TYPE, MEDIA_TYPE)], body).into_response();
        if let Some((name, value)) = self.header {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

impl From<Invalid> for ApiError {
    fn from(invalid: Invalid) -> Self {
        Self::unprocessable(invalid.to_string())
    }
}

impl From<AuthError> for ApiError {
    fn from(error: AuthError) -> Self {
        let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::UNAUTHORIZED);
        Self::new(status, error.id(), error.to_string())
    }
}

impl From<TokenError> for ApiError {
    fn from(error: TokenError) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "security/Unauthorized", error.to_string())
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused {
            // The platform answers 500 when a backlog is full (seed 000, "Message backlog quota").
            Refused::Rejected(_) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "tidegate/Backlog Quota", message),
            Refused::Ancestors { .. } => Self::unprocessable(message),
            Refused::FrameTooLarge { .. } | Refused::FanOut { .. } => Self::too_large(message),
            Refused::Full => {
                let way_out = "deleting objects, consuming messages and unsubscribing consumers make room";
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "tidegate/Store Full", format!("{message}; {way_out}"))
            }
            Refused::Failed => Self::internal(message),
            Refused::Unwritable | Refused::Locked | Refused::Stopping => Self::unavailable(message),
        }
    }
}

impl From<AttachError> for ApiError {
    fn from(error: AttachError) -> Self {
        match error {
            AttachError::Busy(Busy::Full) | AttachError::TooMany(_) => Self::unavailable(error.to_string()),
            AttachError::Busy(_) => {
                Self::new(StatusCode::CONFLICT, "reliable-notification/Conflict", error.to_string())
            }
            AttachError::Refused(refused) => refused.into(),
        }
    }
}

impl From<CreateError> for ApiError {
    fn from(error: CreateError) -> Self {
        match error {
            CreateError::Target(invalid) => invalid.into(),
            CreateError::TooMany(_) => Self::unprocessable(error.to_string()),
            CreateError::Attach(error) => error.into(),
            CreateError::Refused(refused) => refused.into(),
        }
    }
}

impl From<RegistryError> for ApiError {
    fn from(error: RegistryError) -> Self {
        match error {
            RegistryError::Missing { .. } => Self::not_found("plugin", error.to_string()),
            RegistryError::Invalid(invalid) => invalid.into(),
            RegistryError::Plugin(error) => error.into(),
            RegistryError::Busy => Self::unavailable(error.to_string()),
            RegistryError::Store(error) => error.into(),
            RegistryError::Refused(refused) => refused.into(),
        }
    }
}

impl From<PluginError> for ApiError {
    fn from(error: PluginError) -> Self {
        match error {
            PluginError::Fault { fault: Fault::Stopped, .. } => Self::unavailable(Fault::Stopped.to_string()),
            PluginError::Settings(_) | PluginError::Component { .. } => Self::unprocessable(error.to_string()),
            PluginError::Fault { .. } => {
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "tidegate/Plugin Fault", error.to_string())
            }
            PluginError::Start(_) => Self::internal(error.to_string()),
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        if matches!(error, StoreError::Interrupted) {
            return Self::busy(
                "The list took too long to read; narrow it by source, type or time, or try again when there is less to do.",
            );
        }
        tracing::error!(%error, cause = ?error, "the store failed");
        Self::internal("the store failed")
    }
}

impl From<CopyError> for ApiError {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::NoRoom { .. } | CopyError::Full => {
                Self::new(StatusCode::INSUFFICIENT_STORAGE, "tidegate/Store Full", error.to_string())
            }
            CopyError::Busy | CopyError::Overtaken => Self::unavailable(error.to_string()),
            CopyError::Store(error) => error.into(),
            CopyError::Io(ref cause) => {
                tracing::error!(%cause, "a backup could not be made");
                Self::internal(error.to_string())
            }
        }
    }
}

impl From<sqlx::Error> for ApiError {
    fn from(error: sqlx::Error) -> Self {
        StoreError::from(error).into()
    }
}

impl From<ListError> for ApiError {
    fn from(error: ListError) -> Self {
        match error {
            ListError::Store(error) => error.into(),
            ListError::TooLarge { .. } | ListError::TooMuch { .. } => Self::unprocessable(error.to_string()),
        }
    }
}
