//! Verdicts that need not be asked for again.
//!
//! A filter that keeps no state and is told of a message no more than its API, its action and its type gives all messages
//! that have these in common the same verdict. So it is asked once.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use lru::LruCache;

use super::{Fault, Instance};
use crate::message::{Action, Api, Message};

/// Instances whose verdicts are remembered; the least recently used one is forgotten first.
const INSTANCES: NonZeroUsize = NonZeroUsize::new(1024).expect("not zero");
/// Types of messages that are remembered for each of them, less than 500 bytes each; then it begins anew.
pub(super) const TYPES: usize = 32;

/// The verdicts of one instance, by type.
type Known = HashMap<Box<str>, Vec<(Api, Action, bool)>>;

/// What filters have said.
pub(super) struct Memory(Mutex<LruCache<Instance, Known>>);

impl Memory {
    pub(super) fn new() -> Self {
        Self(Mutex::new(LruCache::sparse(INSTANCES)))
    }

    /// The verdicts on the messages, if all of them are known.
    pub(super) fn recall(&self, instance: &Instance, messages: &[Arc<Message>]) -> Option<Vec<Result<bool, Fault>>> {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = memory.get(instance)?;
        messages.iter().map(|message| verdict(known, message).map(Ok)).collect()
    }

    /// Forgets the instances that nobody else has, so that it keeps no deleted plugin.
    pub(super) fn tidy(&self) {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let unused = memory.iter().filter(|(instance, _)| Arc::strong_count(&instance.0) == 1);
        let unused: Vec<Instance> = unused.map(|(instance, _)| instance.clone()).collect();
        for instance in unused {
            memory.pop(&instance);
        }
    }

    /// Takes what `instance` has said of the messages, unless more than their kind decides.
    pub(super) fn keep(&self, instance: &Instance, messages: &[Arc<Message>], verdicts: &[Result<bool, Fault>]) {
        if !instance.0.kind_decides {
            return;
        }
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = memory.get_or_insert_mut(instance.clone(), Known::new);
        for (message, passes) in messages.iter().zip(verdicts) {
            let (Ok(passes), None) = (passes, verdict(known, message)) else { continue };
            if known.len() == TYPES {
                known.clear();
            }
            known.entry(kind(message).into()).or_default().push((message.api, message.action, *passes));
        }
    }
}

fn verdict(known: &Known, message: &Message) -> Option<bool> {
    let of_type = known.get(kind(message))?;
    let (.., passes) = of_type.iter().find(|(api, action, _)| (*api, *action) == (message.api, message.action))?;
    Some(*passes)
}

/// To a plugin, a message without a type has an empty one.
fn kind(message: &Message) -> &str {
    message.kind.as_deref().unwrap_or_default()
}
