//! The single writer: commands in, one commit for as many of them as are waiting, answers after the commit.
//!
//! ```text
//! commands ─▶ collect ─▶ Ledger stages ─▶ Store commits ─▶ Ledger follows, consumers wake ─▶ answers
//! ```
//! There is no timer on the way of a producer: a batch is what has queued up while the last one was committed. Only
//! acknowledgements without company wait up to [`SETTLE_WAIT`] for more (they need no answer).
//! If a batch fails, its commands are committed one at a time, so that only the culprit gets the error.

mod health;
#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

pub use health::Unwell;

use health::Health;

use crate::backlog::{
    Attached, Connecting, FullTopics, Ledger, NoRoom, Record, Rejected, Scope, Settings, Staged, Topic, TopicKey,
};
use crate::clock::Clock;
use crate::consumer::{Busy, GroupLimits};
use crate::message::Tenant;
use crate::store::{ObjectRow, Statement, StoreError, Transaction, Writing};
use crate::telemetry::{commits_failed, count};

/// Commands that wait; beyond that their senders wait.
const QUEUE: usize = 1024;
/// What one commit takes at most.
const BATCH_COMMANDS: usize = 1024;
/// Bytes of bodies that one commit takes before it stops collecting.
const BATCH_BYTES: usize = 4 << 20;
/// How long acknowledgements wait for company.
const SETTLE_WAIT: Duration = Duration::from_millis(10);
/// How long the writer must have been idle before it warms up the log.
const IDLE: Duration = Duration::from_millis(200);
/// How long it must have been idle before each commit that only deletes.
const PAUSE: Duration = Duration::from_millis(20);

/// Everything that one request writes; all of it or, but for the messages over a quota, nothing.
#[derive(Default)]
pub struct Change {
    /// Rows of the control plane and of objects that are changed in place.
    pub statements: Vec<Statement>,
    /// New measurements.
    pub measurements: Vec<ObjectRow>,
    /// New events.
    pub events: Vec<ObjectRow>,
    /// New messages.
    pub records: Vec<Record>,
    /// Messages for topics without room are left out; the others are appended all the same.
    pub skip_full: bool,
}

/// Why a request was not carried out as asked. Unless it says otherwise, nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// A topic's backlog is full: objects are stored, but no message was appended.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// A frame would pass `limits.frame_bytes`.
    #[error("the message for topic '{topic}' would have {bytes} bytes, at most {limit} are allowed")]
    FrameTooLarge {
        /// Name of the topic.
        topic: String,
        /// Size of the frame.
        bytes: usize,
        /// `limits.frame_bytes`.
        limit: usize,
    },
    /// The request's messages, for all topics together, would pass `limits.fan_out_messages` or `limits.fan_out_bytes`.
    #[error(
        "the request would append more than {messages} messages or {bytes} bytes to all topics together; send less at a time"
    )]
    FanOut {
        /// `limits.fan_out_messages`.
        messages: usize,
        /// `limits.fan_out_bytes`.
        bytes: usize,
    },
    /// A subscription with children may be meant, but finding it would take too long.
    #[error("the managed object '{object}' has more than {limit} others above it")]
    Ancestors {
        /// Id of the message's source.
        object: u64,
        /// `limits.ancestors`.
        limit: usize,
    },
    /// A plugin of a subscription could not judge or shape the message.
    #[error("a plugin of subscription '{subscription}' failed: {reason}")]
    Plugin {
        /// Id of the subscription.
        subscription: u64,
        /// What the plugin did.
        reason: String,
    },
    /// The disk is full: make room, then try again.
    #[error("the store is full")]
    Full,
    /// The database refused.
    #[error("the store failed")]
    Failed,
    /// The gateway is stopping.
    #[error("the gateway is stopping")]
    Stopping,
}

impl Refused {
    /// The reason in metrics.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Rejected(_) => "quota",
            Self::FrameTooLarge { .. } => "frame",
            Self::FanOut { .. } => "fan_out",
            Self::Ancestors { .. } => "ancestors",
            Self::Plugin { .. } => "plugin",
            Self::Full => "full",
            Self::Failed => "failed",
            Self::Stopping => "stopping",
        }
    }
}

/// Why a consumer cannot connect.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AttachError {
    /// Those who are connected leave no place.
    #[error(transparent)]
    Busy(#[from] Busy),
    /// `limits.topics_per_tenant` or the consumers of one topic.
    #[error("too many {0}")]
    TooMany(&'static str),
    /// The commit that was to create the consumer failed.
    #[error(transparent)]
    Refused(#[from] Refused),
}

/// Sends commands to the writer. Cheap to clone.
#[derive(Clone)]
pub struct Writer {
    commands: mpsc::Sender<Command>,
    health: Health,
    full: FullTopics,
}

/// Where the outcome of a change goes, once it is on disk.
pub type Answer = oneshot::Sender<Result<(), Refused>>;

enum Command {
    Changes { changes: Vec<(Change, Answer)>, place: Option<OwnedSemaphorePermit> },
    Settle { topic: Arc<Topic>, consumer: Box<str>, ids: Vec<u64> },
    Attach { who: Connecting, answer: oneshot::Sender<Result<Attached, AttachError>> },
    Unsubscribe { key: Arc<TopicKey>, consumer: Box<str>, answer: oneshot::Sender<Result<bool, Refused>> },
    Set { scope: Scope, settings: Settings, answer: Answer },
    Stop,
}

/// Bounds on what consumers may create.
#[derive(Clone, Copy, Debug)]
pub struct ConsumerLimits {
    /// Topics of one tenant.
    pub topics: usize,
    /// Consumers of one topic.
    pub consumers: usize,
    /// Connections of one consumer.
    pub group: GroupLimits,
}

impl Writer {
    /// Starts the writer, on a thread of its own, since commits block. It ends, with the database closed, after [`Writer::stop`].
    pub fn spawn(
        writing: Writing,
        ledger: Ledger,
        clock: Clock,
        limits: ConsumerLimits,
    ) -> (Self, tokio::task::JoinHandle<Result<(), StoreError>>) {
        let (commands, queue) = mpsc::channel(QUEUE);
        let (health, full) = (Health::default(), FullTopics::default());
        let worker = Worker {
            writing,
            ledger,
            full: full.clone(),
            clock,
            limits,
            queue,
            held: None,
            places: Vec::new(),
            warm: false,
            health: health.clone(),
        };
        let runtime = Handle::current();
        let task = tokio::task::spawn_blocking(move || runtime.block_on(worker.run()));
        (Self { commands, health, full }, task)
    }

    /// Whether it commits what it is given, as far as the last commits tell.
    pub fn health(&self) -> Result<(), Unwell> {
        self.health.check(Instant::now())
    }

    /// How many commands wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.commands.max_capacity() - self.commands.capacity()
    }

    /// Queues the changes of one turn, in order. Returns when they are queued; the answers follow the commit.
    /// `place` is given back after the commit.
    pub async fn changes(&self, changes: Vec<(Change, Answer)>, place: Option<OwnedSemaphorePermit>) {
        if changes.is_empty() {
            // There will be no commit to give the place back after.
            return;
        }
        if let Err(mpsc::error::SendError(Command::Changes { changes, .. })) =
            self.commands.send(Command::Changes { changes, place }).await
        {
            for (_, answer) in changes {
                let _ = answer.send(Err(Refused::Stopping));
            }
        }
    }

    /// Commits one change.
    pub async fn commit(&self, change: Change) -> Result<(), Refused> {
        let (answer, receipt) = oneshot::channel();
        self.changes(vec![(change, answer)], None).await;
        receipt.await.unwrap_or(Err(Refused::Stopping))
    }

    /// Queues acknowledgements; they are committed within about [`SETTLE_WAIT`]. Of non-persistent topics nothing is written.
    pub async fn settle(&self, topic: Arc<Topic>, consumer: Box<str>, ids: Vec<u64>) {
        if topic.key().non_persistent {
            return;
        }
        // A stopping writer takes no more: what was not committed comes again.
        let _ = self.commands.send(Command::Settle { topic, consumer, ids }).await;
    }

    /// Takes the consumer for one connection, creating it at its first connect.
    pub async fn attach(&self, who: Connecting) -> Result<Attached, AttachError> {
        let (answer, result) = oneshot::channel();
        let _ = self.commands.send(Command::Attach { who, answer }).await;
        result.await.unwrap_or(Err(Refused::Stopping.into()))
    }

    /// Stores what is set for a topic, whether it exists or not, and puts it in force. Settings that say nothing are forgotten.
    pub async fn set_topic(&self, key: Arc<TopicKey>, settings: Settings) -> Result<(), Refused> {
        self.set(Scope::Topic(key), settings).await
    }

    /// Stores what is set for the topics of a tenant; see [`Writer::set_topic`].
    pub async fn set_tenant(&self, tenant: Tenant, settings: Settings) -> Result<(), Refused> {
        self.set(Scope::Tenant(tenant), settings).await
    }

    async fn set(&self, scope: Scope, settings: Settings) -> Result<(), Refused> {
        let (answer, result) = oneshot::channel();
        let _ = self.commands.send(Command::Set { scope, settings, answer }).await;
        result.await.unwrap_or(Err(Refused::Stopping))
    }

    /// The topics that have refused messages.
    #[must_use]
    pub fn full(&self) -> &FullTopics {
        &self.full
    }

    /// Commits what is queued and ends the writer; what is sent later is refused.
    pub async fn stop(&self) {
        let _ = self.commands.send(Command::Stop).await;
    }

    /// Forgets the consumer and its backlog, closing a live connection. False if there is no such consumer.
    pub async fn unsubscribe(&self, key: Arc<TopicKey>, consumer: &str) -> Result<bool, Refused> {
        let (answer, result) = oneshot::channel();
        let _ = self.commands.send(Command::Unsubscribe { key, consumer: consumer.into(), answer }).await;
        result.await.unwrap_or(Err(Refused::Stopping))
    }
}

struct Worker {
    writing: Writing,
    ledger: Ledger,
    full: FullTopics,
    clock: Clock,
    limits: ConsumerLimits,
    queue: mpsc::Receiver<Command>,
    /// Taken from the queue, but it has to be carried out between two commits.
    held: Option<Command>,
    /// Of the turns in the batch at hand.
    places: Vec<OwnedSemaphorePermit>,
    warm: bool,
    health: Health,
}

/// A part of a batch that succeeds or fails by itself.
enum Item {
    Change(Change, Answer),
    Settle { topic: Arc<Topic>, consumer: Box<str>, ids: Vec<u64> },
}

impl Worker {
    async fn run(mut self) -> Result<(), StoreError> {
        while let Some(batch) = self.collect().await {
            self.health.works(Instant::now());
            self.commit(batch).await;
            self.places.clear();
            match self.held.take() {
                Some(Command::Attach { who, answer }) => {
                    let _ = answer.send(self.attach(&who).await);
                }
                Some(Command::Unsubscribe { key, consumer, answer }) => {
                    let removed = self.ledger.remove_consumer(&mut self.writing, &key, &consumer).await;
                    let _ = answer.send(removed.map_err(|error| refused(&error)));
                }
                Some(Command::Set { scope, settings, answer }) => {
                    let set = self.ledger.set(&mut self.writing, scope, settings).await;
                    let _ = answer.send(set.map_err(|error| refused(&error)));
                }
                Some(Command::Stop) => break,
                Some(Command::Changes { .. } | Command::Settle { .. }) | None => {}
            }
        }
        self.writing.close().await
    }

    /// What one commit takes: everything that waits, up to the next command that stands alone.
    /// `None` when there are no more senders.
    async fn collect(&mut self) -> Option<Vec<Item>> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        // Acknowledgements without company wait this long.
        let mut patience = None;
        while batch.len() < BATCH_COMMANDS && bytes < BATCH_BYTES {
            let command = match self.queue.try_recv() {
                Ok(command) => command,
                Err(_) if batch.is_empty() => self.idle().await?,
                Err(_) => {
                    let Some(patience) = patience else { break };
                    let Ok(Some(command)) = timeout_at(patience, self.queue.recv()).await else { break };
                    command
                }
            };
            match command {
                Command::Changes { changes, place } => {
                    self.places.extend(place);
                    patience = None;
                    bytes += changes.iter().map(|(change, _)| change.bytes()).sum::<usize>();
                    batch.extend(changes.into_iter().map(|(change, answer)| Item::Change(change, answer)));
                }
                Command::Settle { topic, consumer, ids } => {
                    if batch.is_empty() {
                        patience = Some(Instant::now() + SETTLE_WAIT);
                    }
                    batch.push(Item::Settle { topic, consumer, ids });
                }
                Command::Attach { .. } | Command::Unsubscribe { .. } | Command::Set { .. } | Command::Stop => {
                    self.held = Some(command);
                    break;
                }
            }
        }
        Some(batch)
    }

    /// Waits for a command, using the time for housekeeping.
    async fn idle(&mut self) -> Option<Command> {
        loop {
            self.health.rests();
            let Some(rest) = (if self.warm { self.ledger.rest() } else { Some(IDLE) }) else {
                return self.queue.recv().await;
            };
            if let Ok(command) = timeout_at(Instant::now() + rest.max(PAUSE), self.queue.recv()).await {
                return command;
            }
            self.health.works(Instant::now());
            if self.warm {
                self.commit(Vec::new()).await;
                continue;
            }
            self.warm = true;
            if let Err(error) = self.writing.warm_up().await {
                tracing::warn!(%error, cause = ?error, "warming up the write-ahead log failed");
            }
        }
    }

    async fn commit(&mut self, batch: Vec<Item>) {
        #[cfg(feature = "faults")]
        let batch = crate::faults::answer_before_commit(batch, |item| match item {
            Item::Change(change, answer) => {
                let _ = answer.send(Ok(()));
                Item::Change(change, oneshot::channel().0)
            }
            settle @ Item::Settle { .. } => settle,
        })
        .await;
        let mut batch = batch;
        loop {
            match self.try_commit(&batch).await {
                Ok(verdicts) => {
                    let done = batch.drain(..verdicts.len());
                    done.zip(verdicts).for_each(|(item, verdict)| item.answer(verdict));
                    if batch.is_empty() {
                        return;
                    }
                }
                Err(error) if batch.len() > 1 => {
                    tracing::warn!(%error, cause = ?error, commands = batch.len(), "a batch failed, trying its commands one at a time");
                    for item in batch {
                        let result = self.try_commit(std::slice::from_ref(&item)).await;
                        item.answer(alone(result));
                    }
                    return;
                }
                Err(error) => return batch.into_iter().for_each(|item| item.answer(alone(Err(&error)))),
            }
        }
    }

    /// Commits the items of `batch` up to one that needs a batch of its own, all of them or none. A verdict for each: messages may
    /// be rejected while objects are stored.
    async fn try_commit(&mut self, batch: &[Item]) -> Result<Vec<Result<(), Rejected>>, StoreError> {
        let mut staged = self.ledger.stage();
        let mut verdicts = Vec::with_capacity(batch.len());
        for item in batch {
            verdicts.push(match self.stage(&mut staged, item) {
                Ok(()) => Ok(()),
                Err(NoRoom::Rejected(rejected)) => Err(rejected),
                Err(NoRoom::Later) => break,
            });
        }
        self.ledger.seal(&mut staged);
        let began = Instant::now();
        match self.writing.commit(&staged.transaction).await {
            Ok(()) => {
                if !staged.transaction.is_empty() {
                    self.health.commits();
                    account(&staged.transaction, verdicts.len(), began.elapsed());
                }
                self.ledger.committed(staged);
                Ok(verdicts)
            }
            Err(error) => {
                let refused = refused(&error);
                commits_failed(refused.reason()).increment(1);
                self.health.fails(refused);
                self.ledger.failed(staged);
                Err(error)
            }
        }
    }

    fn stage(&self, staged: &mut Staged, item: &Item) -> Result<(), NoRoom> {
        match item {
            Item::Change(change, _) => {
                let appended = self.ledger.append(staged, change.records.clone(), change.skip_full);
                match &appended {
                    Err(NoRoom::Later) => return appended,
                    Err(NoRoom::Rejected(refusal)) => self.full.note(refusal),
                    Ok(()) => {}
                }
                staged.transaction.statements.extend_from_slice(&change.statements);
                staged.transaction.measurements.extend_from_slice(&change.measurements);
                staged.transaction.events.extend_from_slice(&change.events);
                appended
            }
            Item::Settle { topic, consumer, ids } => {
                staged.settle(topic, consumer, ids.clone());
                Ok(())
            }
        }
    }

    async fn attach(&mut self, who: &Connecting) -> Result<Attached, AttachError> {
        self.ledger.resume(&mut self.writing, who).await.map_err(|error| refused(&error))?;
        if let Some(attached) = self.ledger.attach(who, self.limits.group) {
            return Ok(attached?);
        }
        let Connecting { topic: key, consumer, .. } = who;
        match self.ledger.topics().get(key) {
            None if self.ledger.topics().count(&key.tenant) >= self.limits.topics => {
                return Err(AttachError::TooMany("topics"));
            }
            Some(topic) if topic.consumers() >= self.limits.consumers => return Err(AttachError::TooMany("consumers")),
            _ => {}
        }
        let now_ms = self.clock.now_ms();
        let created = self.ledger.create_consumer(&mut self.writing, key, consumer, now_ms).await;
        created.map_err(|error| refused(&error))?;
        Ok(self.ledger.attach(who, self.limits.group).expect("invariant: the consumer was just created")?)
    }
}

impl Item {
    fn answer(self, verdict: Result<(), impl Into<Refused>>) {
        // A producer that has gone away does not need its answer.
        if let Self::Change(_, answer) = self {
            let _ = answer.send(verdict.map_err(Into::into));
        }
    }
}

impl Change {
    fn bytes(&self) -> usize {
        let objects = self.measurements.iter().chain(&self.events);
        objects.map(|row| row.body.len()).sum::<usize>()
            + self.statements.iter().map(Statement::bytes).sum::<usize>()
            + self.records.iter().map(|record| record.body.len()).sum::<usize>()
    }
}

/// Counts what a commit has written, of so many commands, in this time.
fn account(transaction: &Transaction, commands: usize, time: Duration) {
    let count = count();
    count.commit_seconds.record(time);
    count.commit_commands.record(commands as f64);
    count.messages_appended.increment(transaction.messages.len() as u64);
    count.objects_stored.increment((transaction.measurements.len() + transaction.events.len()) as u64);
}

/// The verdict on an item that was committed alone.
fn alone(result: Result<Vec<Result<(), Rejected>>, impl std::borrow::Borrow<StoreError>>) -> Result<(), Refused> {
    match result {
        Ok(verdicts) => verdicts.into_iter().next().unwrap_or(Ok(())).map_err(Refused::from),
        Err(error) => {
            let error = error.borrow();
            tracing::error!(%error, cause = ?error, "a commit failed");
            Err(refused(error))
        }
    }
}

fn refused(error: &StoreError) -> Refused {
    match error {
        StoreError::Full(_) => Refused::Full,
        StoreError::Newer | StoreError::Database(_) => Refused::Failed,
    }
}
