//! The backlog: which topics and consumers there are, which messages wait for whom, and their bodies.
//!
//! In: records and acknowledgements, by way of the [`crate::writer`]. Out: receipts; pages of messages for a consumer.
//! A message is stored once for all consumers of its topic, and only while one that has ever connected needs it.
//! Memory holds the list of ids (16 bytes a message) and the newest bodies; the disk holds all bodies. A non-persistent topic
//! is in memory alone, and exists while somebody is connected. What waits to be judged is on disk beside the others, and in no
//! consumer's way.

mod bodies;
mod figures;
mod full;
mod gap;
mod held;
mod ledger;
mod missed;
mod room;
mod settings;
mod staged;
mod steady;
mod times;
mod topic;

pub use bodies::Bodies;
pub use figures::{ConsumerFigures, TopicFigures};
pub use full::{FullTopics, Holder, Rejected};
pub use gap::message_id;
pub use held::{Held, HeldFigures};
pub use ledger::{BacklogLimits, Ledger};
pub use room::NoRoom;
pub use settings::{OnFull, Policy, Scope, Settings};
pub use staged::Staged;
pub use topic::{Attached, Connecting, Topic, TopicKey, Topics};

use std::sync::Arc;

use bytes::Bytes;

use crate::consumer::Slot;

/// One message on its way into one topic.
#[derive(Clone, Debug)]
pub struct Record {
    /// Where it goes.
    pub topic: Arc<TopicKey>,
    /// Of its source.
    pub slot: Slot,
    /// Description line, action line, blank line, JSON: a frame without what a delivery adds. Of a held one, the original.
    pub body: Bytes,
    /// There if it still has to be judged.
    pub held: Option<Held>,
}

/// What becomes of a held message.
#[derive(Clone, Debug)]
pub struct Release {
    /// Its id.
    pub id: u64,
    /// Its stored form, judged and shaped: it is appended. `None`: nobody gets it.
    pub body: Option<Bytes>,
}
