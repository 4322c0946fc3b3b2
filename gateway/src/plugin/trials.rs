//! Messages that are tried on instances of their own: one by one, and once more in batches.
//!
//! ```text
//! message ─▶ instance ─▶ Trial
//!    └─ with others, as many as the gateway hands over at once ─▶ another instance ─▶ is anything answered otherwise?
//! ```

use std::sync::Arc;
use std::time::Duration;

use super::host::cut;
use super::instance::{Judge, Live, Shape};
use super::pool::{Most, Tried};
use super::{Fault, Instance, Interest, LogLine, PluginError, Plugins, Verdict, World, refused};
use crate::message::Message;

/// One message that was tried.
#[derive(Clone, Debug)]
pub struct Trial {
    /// What became of it.
    pub outcome: Result<Verdict, Fault>,
    /// The processor time of its call; for the first after a fault, with that of a new instance.
    pub processor_time: Duration,
    /// The linear memory that the instance has after it; 0 if there is none.
    pub memory_bytes: usize,
    /// What the plugin wrote into the log meanwhile, at most 20 lines for each call.
    pub log: Vec<LogLine>,
}

/// Messages that are tried one by one, in order, on an instance of their own; and once more in batches, on another one.
pub struct Trials {
    plugins: Plugins,
    instance: Instance,
    live: Option<Live>,
    interest: Interest,
    rehearsal: Rehearsal,
}

/// What is tried once more in batches as large as the gateway's: a plugin must not care how many messages it gets at once.
#[derive(Default)]
struct Rehearsal {
    live: Option<Live>,
    /// The next batch, with what became of its messages one by one.
    batch: Vec<(Arc<Message>, Result<Verdict, Fault>)>,
    /// Messages of the batches before it.
    done: usize,
    /// Nothing is left to be compared.
    over: bool,
    difference: Option<String>,
}

impl Trials {
    pub(super) fn new(plugins: Plugins, instance: Instance, live: Live) -> Self {
        let interest = live.interest();
        Self { plugins, instance, live: Some(live), interest, rehearsal: Rehearsal::default() }
    }

    /// What the plugin wants to be told.
    #[must_use]
    pub fn interest(&self) -> &Interest {
        &self.interest
    }

    /// Tries one more message. After a fault the instance is made anew, and has forgotten what it kept.
    ///
    /// # Errors
    /// [`PluginError::Fault`] if the gateway is stopping.
    pub async fn run(&mut self, message: Arc<Message>) -> Result<Trial, PluginError> {
        let live = self.live.take();
        let (Tried { answers, processor_time, memory_bytes, log }, left) =
            self.call(live, vec![message.clone()]).await?;
        self.live = left;
        let outcome = answers.and_then(|answers| answers.into_iter().next().expect("invariant: one for each message"));
        self.rehearse(message, &outcome).await?;
        Ok(Trial { outcome, processor_time, memory_bytes, log })
    }

    /// How the plugin answered otherwise when it got the messages in batches, if it did.
    ///
    /// # Errors
    /// [`PluginError::Fault`] if the gateway is stopping.
    pub async fn finish(mut self) -> Result<Option<String>, PluginError> {
        // One message by itself is what was tried.
        if self.rehearsal.done + self.rehearsal.batch.len() > 1 {
            self.compare().await?;
        }
        Ok(self.rehearsal.difference)
    }

    async fn call(
        &self,
        live: Option<Live>,
        messages: Vec<Arc<Message>>,
    ) -> Result<(Tried, Option<Live>), PluginError> {
        let (pool, instance) = (&self.plugins.0.pool, &self.instance);
        let tried = match instance.plugin().world() {
            World::Filter => pool.trial::<Judge>(instance, live, messages).await,
            World::Transform => pool.trial::<Shape>(instance, live, messages).await,
        };
        tried.map_err(|fault| refused(instance.plugin(), fault))
    }

    /// Takes a message that was tried for a batch.
    async fn rehearse(&mut self, message: Arc<Message>, outcome: &Result<Verdict, Fault>) -> Result<(), PluginError> {
        // What costs the instance fails the whole batch, and a new instance has kept nothing.
        self.rehearsal.over |= self.live.is_none();
        let most = Most::of(&self.instance);
        let batch = &self.rehearsal.batch;
        let bytes = batch.iter().map(|(message, _)| message.body.len()).sum::<usize>() + message.body.len();
        if batch.len() == most.messages || (bytes > most.bytes && !batch.is_empty()) {
            self.compare().await?;
        }
        if !self.rehearsal.over {
            self.rehearsal.batch.push((message, outcome.clone()));
        }
        Ok(())
    }

    async fn compare(&mut self) -> Result<(), PluginError> {
        let (messages, alone): (Vec<_>, Vec<_>) = std::mem::take(&mut self.rehearsal.batch).into_iter().unzip();
        if self.rehearsal.over || messages.is_empty() {
            return Ok(());
        }
        let live = self.rehearsal.live.take();
        let (tried, left) = self.call(live, messages).await?;
        let Rehearsal { live, done, over, difference, .. } = &mut self.rehearsal;
        *live = left;
        *difference = match tried.answers {
            Err(fault) => Some(fault.to_string()),
            Ok(together) => differing(&alone, &together).map(|at| {
                let (number, alone, together) = (*done + at + 1, word(&alone[at]), word(&together[at]));
                format!("message {number} is answered with {together} in a batch, with {alone} by itself")
            }),
        };
        *done += alone.len();
        *over |= difference.is_some();
        Ok(())
    }
}

/// Where the first difference is, but for the texts of faults.
fn differing(alone: &[Result<Verdict, Fault>], together: &[Result<Verdict, Fault>]) -> Option<usize> {
    alone.iter().zip(together).position(|pair| match pair {
        (Err(one), Err(other)) => one.kind() != other.kind(),
        (one, other) => one != other,
    })
}

fn word(outcome: &Result<Verdict, Fault>) -> String {
    match outcome {
        Ok(Verdict::Pass) => "pass".to_owned(),
        Ok(Verdict::Drop) => "drop".to_owned(),
        Ok(Verdict::Body(body)) => format!("`{}`", cut(&String::from_utf8_lossy(body))),
        Err(fault) => format!("a fault ({fault})"),
    }
}
