//! Topics that are full: why they refuse messages, and which ones did, for whoever tells an operator.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{ConsumerFigures, TopicFigures, TopicKey, Topics};
use crate::time::span;

/// Why a request's messages were not appended: a topic's backlog is at its quota (seed 000, "Message backlog quota").
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the backlog quota of topic '{}' leaves no room ({}): {}raise the quota (PUT /tidegate/v1/topics/persistent/{})",
    topic.name,
    self.shortage(),
    holder.as_ref().map_or_else(String::new, Holder::advice),
    topic.name
)]
pub struct Rejected {
    /// The topic.
    pub topic: Arc<TopicKey>,
    /// Bytes that wait.
    pub used: u64,
    /// Bytes that may wait.
    pub quota: u64,
    /// Bytes of the request's messages for the topic.
    pub need: u64,
    /// There unless the request alone is too large.
    pub holder: Option<Holder>,
}

/// Who holds a topic back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The consumer whose oldest unacknowledged message is the oldest of all.
    Consumer {
        /// Its name.
        name: Box<str>,
        /// Age of that message, ms.
        age_ms: u64,
    },
    /// The subscription whose plugins failed on what is at least half of the messages, by bytes.
    Subscription {
        /// Its id.
        id: u64,
        /// Messages that it holds.
        messages: u64,
    },
}

impl Rejected {
    /// A refusal of the topic as it is now.
    pub(super) fn new(topics: &Topics, topic: &Arc<TopicKey>, used: u64, quota: u64, need: u64) -> Self {
        // Whoever consumes makes no room for what is larger than the quota.
        let figures = topics.topic_figures(topic).filter(|_| need <= quota);
        let holder =
            figures.and_then(|figures| Holder::plugins(&figures).or_else(|| Holder::consumer(figures.consumers)));
        Self { topic: topic.clone(), used, quota, need, holder }
    }

    fn shortage(&self) -> String {
        let Self { used, quota, need, .. } = self;
        if need > quota {
            format!("the request needs {need} bytes of a quota of {quota}")
        } else {
            format!("{used} of {quota} bytes are used")
        }
    }
}

impl Holder {
    fn plugins(TopicFigures { held, bytes, .. }: &TopicFigures) -> Option<Self> {
        let (id, held) = held.iter().max_by_key(|(_, held)| held.bytes).filter(|(_, held)| 2 * held.bytes >= *bytes)?;
        Some(Self::Subscription { id: *id, messages: held.messages })
    }

    fn consumer(consumers: Vec<ConsumerFigures>) -> Option<Self> {
        let oldest = consumers.into_iter().filter_map(|consumer| Some((consumer.oldest_age_ms?, consumer)));
        let (age_ms, consumer) = oldest.max_by_key(|(age_ms, consumer)| (*age_ms, consumer.backlog_messages))?;
        Some(Self::Consumer { name: consumer.name, age_ms })
    }

    fn advice(&self) -> String {
        match self {
            Self::Consumer { name, age_ms } => format!(
                "its oldest message has waited {} for consumer '{name}'; let it consume and acknowledge, unsubscribe it, or ",
                span(age_ms / 1000)
            ),
            Self::Subscription { id, messages } => format!(
                "{messages} messages are held, as a plugin of subscription '{id}' failed on them or on older ones of their \
                 sources; mend the plugin, delete the subscription, or "
            ),
        }
    }
}

/// The last refusal of each topic, until it is taken. Bounded by the number of topics; clones share it.
#[derive(Clone, Default)]
pub struct FullTopics(Arc<Mutex<HashMap<Arc<TopicKey>, Rejected>>>);

impl FullTopics {
    /// A topic has refused a request's messages.
    pub(crate) fn note(&self, refusal: &Rejected) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(refusal.topic.clone(), refusal.clone());
    }

    /// Takes them all.
    pub fn take(&self) -> Vec<Rejected> {
        let mut refusals = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.drain().map(|(_, refusal)| refusal).collect()
    }
}
