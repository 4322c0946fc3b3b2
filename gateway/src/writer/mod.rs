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

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

pub use health::Unwell;

use health::Health;

use crate::backlog::{
    Attached, Connecting, FullTopics, Ledger, NoRoom, Record, Rejected, Release, Scope, Settings, Staged, Topic,
    TopicKey,
};
use crate::clock::Clock;
use crate::consumer::{Busy, GroupLimits};
use crate::faults;
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
/// How long acknowledgements wait that could not be committed, and how often a lock of another program is looked at.
const RETRY_WAIT: Duration = Duration::from_secs(1);
/// How often a writer that is never idle looks whether the file has much free space,
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// and how much of it goes then, in pages: a millisecond's work. An idle writer gives back more at a time.
const BUSY_PAGES: u64 = 64;
const IDLE_PAGES: u64 = 256;
const IDLE_STEPS: usize = 64;
/// Pause after housekeeping that failed.
const FAILED_PAUSE: Duration = Duration::from_secs(10);

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
    /// `store.max_bytes` or `store.reserve_bytes` is reached, or the disk is full: make room, then try again.
    #[error("the store is full")]
    Full,
    /// The disk takes no writes.
    #[error("the disk takes no writes; it may be mounted read-only")]
    Unwritable,
    /// Another program holds a lock on the database.
    #[error("another program has locked the database; close it")]
    Locked,
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
            Self::Full => "full",
            Self::Unwritable => "unwritable",
            Self::Locked => "locked",
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
    Release { topic: Arc<Topic>, releases: Vec<Release>, answer: Answer },
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
            owed: HashMap::new(),
            owed_at: Instant::now(),
            upkeep: Upkeep { warm: false, tidy: false, at: Instant::now(), place_at: Instant::now() },
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

    /// Gives held messages of a topic what they waited for, in one commit of its own: they are appended in this order, whether
    /// there is room or not, or gone. Those that are gone meanwhile stay so.
    pub async fn release(&self, topic: Arc<Topic>, releases: Vec<Release>) -> Result<(), Refused> {
        let (answer, result) = oneshot::channel();
        let _ = self.commands.send(Command::Release { topic, releases, answer }).await;
        result.await.unwrap_or(Err(Refused::Stopping))
    }

    /// Returns once everything that was queued before is on disk, or refused.
    pub async fn settled(&self) {
        // A writer that is stopping settles nothing more.
        let _ = self.commit(Change::default()).await;
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
    /// Acknowledgements whose commit failed, by topic row and consumer. They are tried again until they succeed.
    owed: HashMap<(i64, Box<str>), Owed>,
    /// When they are tried next.
    owed_at: Instant,
    upkeep: Upkeep,
    health: Health,
}

/// Acknowledgements of one consumer.
struct Owed {
    topic: Arc<Topic>,
    ids: Vec<u64>,
}

/// What is left to do for the files.
struct Upkeep {
    /// The write-ahead log has its length.
    warm: bool,
    /// Free space was given back since the last commit.
    tidy: bool,
    /// Not before.
    at: Instant,
    /// Measurements do not take their places before.
    place_at: Instant,
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
            self.keep_up().await;
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
                Some(Command::Release { topic, releases, answer }) => {
                    let staged = self.ledger.release(&topic, releases);
                    faults::point("release-staged");
                    let released = self.commit_staged(staged, 1).await;
                    let _ = answer.send(released.map_err(|error| refused(&error)));
                }
                Some(Command::Stop) => break,
                Some(Command::Changes { .. } | Command::Settle { .. }) | None => {}
            }
        }
        match self.writing.disk_failed() {
            Some(error) => Err(error),
            None => self.writing.close().await,
        }
    }

    /// What one commit takes: everything that waits, up to the next command that stands alone.
    /// `None` when there are no more senders, or the disk has failed.
    async fn collect(&mut self) -> Option<Vec<Item>> {
        if self.writing.disk_failed().is_some() {
            return None;
        }
        let mut batch = self.owed_by_now();
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
                    faults::point("ack-received");
                    if batch.is_empty() {
                        patience = Some(Instant::now() + SETTLE_WAIT);
                    }
                    batch.push(Item::Settle { topic, consumer, ids });
                }
                Command::Attach { .. }
                | Command::Unsubscribe { .. }
                | Command::Set { .. }
                | Command::Release { .. }
                | Command::Stop => {
                    self.held = Some(command);
                    break;
                }
            }
        }
        Some(batch)
    }

    /// Waits for a command, using the time for housekeeping. `None` as for [`Worker::collect`].
    async fn idle(&mut self) -> Option<Command> {
        while self.writing.disk_failed().is_none() {
            self.health.rests();
            let now = Instant::now();
            let upkeep = (!self.upkeep.warm || !self.upkeep.tidy).then(|| self.upkeep.at.max(now + IDLE));
            let deletion = self.ledger.rest().map(|rest| self.upkeep.at.max(now + rest.max(PAUSE)));
            let owed = (!self.owed.is_empty()).then_some(self.owed_at);
            // A gateway that is not ready may get no request that would show that the lock is gone.
            let lock = self.health.is_locked().then(|| now + RETRY_WAIT);
            let Some(next) = [upkeep, deletion, owed, lock, self.writing.flush_due()].into_iter().flatten().min()
            else {
                return self.queue.recv().await;
            };
            if let Ok(command) = timeout_at(next, self.queue.recv()).await {
                return command;
            }
            let now = Instant::now();
            self.health.works(now);
            let owed = self.owed_by_now();
            if !owed.is_empty() {
                self.commit(owed).await;
            } else if self.writing.flush_due().is_some_and(|due| due <= now) {
                self.flush().await;
            } else if lock.is_some_and(|at| at <= now) {
                if self.writing.can_lock().await {
                    self.commits(false);
                }
            } else if deletion.is_some_and(|at| at <= now) {
                let deleted = self.try_commit(&[]).await;
                self.told(deleted.map(drop), "what nobody needs could not be deleted");
            } else {
                self.tidy_up().await;
            }
        }
        None
    }

    /// What even a writer that is never idle does for the files, a little at a time.
    async fn keep_up(&mut self) {
        if self.writing.flush_due().is_some_and(|due| due <= Instant::now()) {
            self.flush().await;
        }
        if self.upkeep.place_at <= Instant::now() {
            let placed = self.writing.place_measurements().await;
            if placed.is_err() {
                self.upkeep.place_at = Instant::now() + FAILED_PAUSE;
            }
            // Of a full store it is told where producers are refused.
            let placed = if matches!(placed, Err(StoreError::Full)) { Ok(()) } else { placed };
            self.told(placed, "measurements could not take their places among those of their source");
        }
        if self.upkeep.at <= Instant::now() {
            self.upkeep.at = Instant::now() + LOOK_EVERY;
            let given = self.writing.give_back(BUSY_PAGES).await;
            self.told(given.map(drop), "free space could not be given back");
        }
    }

    /// What an idle writer does: grows the write-ahead log, once, or makes the file shorter until there is little to gain.
    async fn tidy_up(&mut self) {
        if !self.upkeep.warm {
            self.upkeep.warm = true;
            let warmed = self.writing.warm_up().await;
            return self.told(warmed, "the write-ahead log could not be warmed up");
        }
        for step in 0..IDLE_STEPS {
            match self.writing.give_back(IDLE_PAGES).await {
                Ok(true) if self.queue.is_empty() => {}
                Ok(true) => break,
                Ok(false) if step == 0 => {
                    self.upkeep.tidy = true;
                    return;
                }
                Ok(false) => break,
                Err(error) => return self.told(Err(error), "free space could not be given back"),
            }
        }
        let moved = self.writing.checkpoint();
        self.told(moved, "the write-ahead log could not be emptied");
    }

    async fn flush(&mut self) {
        match self.writing.flush().await {
            Err(error @ StoreError::Unwritable(_)) => self.fails(&error),
            flushed => self.told(flushed, "commits could not be flushed"),
        }
    }

    fn told(&mut self, done: Result<(), StoreError>, what: &'static str) {
        if let Err(error) = done {
            self.upkeep.at = Instant::now() + FAILED_PAUSE;
            tracing::warn!(%error, cause = ?error, "{what}");
        }
    }

    /// The acknowledgements that it is time to try again.
    fn owed_by_now(&mut self) -> Vec<Item> {
        if self.owed.is_empty() || Instant::now() < self.owed_at {
            return Vec::new();
        }
        let owed = self.owed.drain();
        owed.map(|((_, consumer), Owed { topic, ids })| Item::Settle { topic, consumer, ids }).collect()
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
                    faults::point("before-answer");
                    let done = batch.drain(..verdicts.len());
                    done.zip(verdicts).for_each(|(item, verdict)| item.answer(verdict));
                    faults::point("after-answer");
                    if batch.is_empty() {
                        return;
                    }
                }
                Err(error) if batch.len() > 1 && !error.concerns_all() => {
                    tracing::debug!(%error, cause = ?error, commands = batch.len(), "a batch failed, trying its commands one at a time");
                    for item in batch {
                        match self.try_commit(std::slice::from_ref(&item)).await {
                            Ok(verdicts) => item.answer(verdicts.into_iter().next().unwrap_or(Ok(()))),
                            Err(error) => self.refuse(item, &error),
                        }
                    }
                    return;
                }
                Err(error) => return batch.into_iter().for_each(|item| self.refuse(item, &error)),
            }
        }
    }

    /// Nothing of `item` is written: its producer has to know, and an acknowledgement is tried again.
    fn refuse(&mut self, item: Item, error: &StoreError) {
        // Those who go on refusing would fill the log as well.
        if !matches!(error, StoreError::Full | StoreError::Unwritable(_) | StoreError::Locked) {
            tracing::error!(%error, cause = ?error, "a commit failed");
        }
        match item {
            Item::Change(..) => item.answer(Err(refused(error))),
            Item::Settle { topic, consumer, mut ids } => {
                self.owed_at = Instant::now() + RETRY_WAIT;
                let owed = self.owed.entry((topic.id, consumer)).or_insert_with(|| Owed { topic, ids: Vec::new() });
                owed.ids.append(&mut ids);
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
        faults::point("staged");
        self.commit_staged(staged, verdicts.len()).await?;
        Ok(verdicts)
    }

    /// Commits a sealed batch of so many commands; memory follows.
    async fn commit_staged(&mut self, staged: Staged, commands: usize) -> Result<(), StoreError> {
        let began = Instant::now();
        match self.writing.commit(&staged.transaction).await {
            Ok(()) => {
                if !staged.transaction.is_empty() {
                    self.upkeep.tidy = false;
                    self.commits(staged.transaction.shows_room());
                    account(&staged.transaction, commands, began.elapsed());
                }
                if !staged.transaction.cursors.is_empty() {
                    faults::point("ack-committed");
                }
                self.ledger.committed(staged);
                Ok(())
            }
            Err(error) => {
                commits_failed(refused(&error).reason()).increment(1);
                self.fails(&error);
                self.ledger.failed(staged);
                Err(error)
            }
        }
    }

    fn fails(&self, error: &StoreError) {
        if self.health.fails(refused(error)) {
            tracing::error!(%error, cause = ?error, "what comes in is refused until this is over");
        }
    }

    fn commits(&self, shows_room: bool) {
        if self.health.commits(shows_room) {
            tracing::info!("the store takes data again");
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
    // A held message is appended when it is released.
    let appended = transaction.messages.iter().filter(|message| message.held.is_none());
    count.messages_appended.increment(appended.count() as u64);
    count.objects_stored.increment((transaction.measurements.len() + transaction.events.len()) as u64);
}

fn refused(error: &StoreError) -> Refused {
    match error {
        StoreError::Full => Refused::Full,
        StoreError::Unwritable(_) => Refused::Unwritable,
        StoreError::Locked => Refused::Locked,
        _ => Refused::Failed,
    }
}
