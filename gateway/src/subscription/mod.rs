//! Who wants what: the subscriptions of Notifications 2.0, and the index that finds those that a message concerns.
//!
//! In: JSON of a create request; messages. Out: a [`Subscription`] or what is wrong with it; [`Route`]s.
//! Only tenant, API, action and source are matched here. What looks at a message's content is a plugin.

mod canary;
mod index;
mod model;
mod reason;

pub use canary::{Canary, CanaryLimits, CanaryRequest, Figures, Judged, Place, Rival, RolledBack, Side};
pub use index::{Index, Route};
pub use model::{Context, OnFault, PluginSettings, PluginUse, Subscription, check_name};
