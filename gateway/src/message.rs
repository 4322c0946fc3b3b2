//! The vocabulary of the line: what a message is, whose it is and where it came from.
//!
//! Everything here is a value. Bodies are bytes of JSON text on one line; no room parses them unless it has to.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// The tenant that owns an object, a subscription, a topic or a user.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(Arc<str>);

/// The object that generated a message or is its subject; the key by which shared consumers divide the load.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SourceId(Arc<str>);

/// The platform API whose object a message tells about; its name stands in line 2 of a frame and in subscriptions.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Api {
    /// `measurements`
    Measurements,
    /// `managedobjects`
    ManagedObjects,
    /// `events`
    Events,
    /// `alarms`
    Alarms,
    /// `operations`
    Operations,
}

/// What happened to the object (seed 001, third header line).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// It is new.
    Create,
    /// It has changed.
    Update,
    /// It is gone.
    Delete,
}

/// One thing that happened in one tenant, before any subscription has looked at it.
#[derive(Clone, Debug)]
pub struct Message {
    /// Whose it is.
    pub tenant: Tenant,
    /// Which API it belongs to.
    pub api: Api,
    /// What happened.
    pub action: Action,
    /// The object that it came from or is about.
    pub source: SourceId,
    /// The `type` of the original object; filters match against this.
    pub kind: Option<Box<str>>,
    /// RFC 3339 time of the object, as the producer wrote it; empty where it has none.
    pub time: Box<str>,
    /// JSON text on one line.
    pub body: Bytes,
}

impl Api {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Measurements, Self::ManagedObjects, Self::Events, Self::Alarms, Self::Operations];

    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Measurements => "measurements",
            Self::ManagedObjects => "managedobjects",
            Self::Events => "events",
            Self::Alarms => "alarms",
            Self::Operations => "operations",
        }
    }

    /// The name under which a subscription takes this API's messages of its source and of all that is below it, where the API
    /// has one (seed 000, "Subscription filters").
    #[must_use]
    pub fn with_children(self) -> Option<&'static str> {
        match self {
            Self::Events => Some("eventsWithChildren"),
            Self::Alarms => Some("alarmsWithChildren"),
            Self::Measurements | Self::ManagedObjects | Self::Operations => None,
        }
    }
}

impl Action {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Create, Self::Update, Self::Delete];

    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "CREATE",
            Self::Update => "UPDATE",
            Self::Delete => "DELETE",
        }
    }
}

/// A frame without what a delivery adds: description line, action line, `headers` (whole lines), blank line, `body`. The
/// description is `/<tenant>/<type>/<source>` (seed 001, "Notification message header and content"); `kind` is that type.
#[must_use]
pub fn form(tenant: &Tenant, kind: &str, source: &str, action: Action, headers: &str, body: &[u8]) -> Bytes {
    let head = head(tenant, kind, source, action, headers);
    let mut form = Vec::with_capacity(bytes(head) + body.len());
    for part in head {
        form.extend_from_slice(part.as_bytes());
    }
    form.extend_from_slice(body);
    form.into()
}

/// How long [`form`] is without headers and body.
#[must_use]
pub fn head_bytes(tenant: &Tenant, kind: &str, source: &str, action: Action) -> usize {
    bytes(head(tenant, kind, source, action, ""))
}

type Head<'a> = [&'a str; 11];

fn head<'a>(tenant: &'a Tenant, kind: &'a str, source: &'a str, action: Action, headers: &'a str) -> Head<'a> {
    ["/", tenant.as_str(), "/", kind, "/", source, "\n", action.as_str(), "\n", headers, "\n"]
}

fn bytes(head: Head<'_>) -> usize {
    head.iter().map(|part| part.len()).sum()
}

macro_rules! text_id {
    ($name:ident) => {
        impl $name {
            /// The text itself.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}
text_id!(Tenant);
text_id!(SourceId);
