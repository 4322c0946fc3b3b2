//! The threads that run guests. A live instance stays on the one that made it, so stores never move.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use wasmtime::Engine;

use super::compiler::stand_back;
use super::engine::Clock;
use super::host::{Batch, processor_time};
use super::instance::{Live, Traits, Work};
use super::lives::{Lives, state_lost};
use super::quarantine::Quarantine;
use super::turns::Turns;
use super::{Answered, Fault, Instance, Plugin, PluginError, PluginLimits, Trial};
use crate::message::Message;
use crate::telemetry::at_zero;

/// Host code needs its share of the stack besides the guest's: an overflow there would end the process.
const HOST_STACK: usize = 2 << 20;
/// The channels take their memory at once.
const MAX_QUEUE: usize = 4096;
/// All tries of one call together take so many times as long as a call may.
const TRIES: u32 = 4;

/// One call gets no more messages, and no more bytes of bodies unless one message has them: it must fit into a guest and into
/// the time of a call.
struct Most {
    messages: usize,
    bytes: usize,
}

impl Most {
    fn of(plugin: &Plugin) -> Self {
        match &plugin.0 {
            // Some twenty times slower.
            plugin if plugin.is_interpreted() => Self { messages: 8, bytes: 32 << 10 },
            // It may parse each body, at some 30 MB/s.
            plugin if plugin.is_script() => Self { messages: 64, bytes: 256 << 10 },
            _ => Self { messages: 256, bytes: 1 << 20 },
        }
    }
}

type Messages = Vec<Arc<Message>>;
type Answers<W> = Vec<Result<<W as Work>::Answer, Fault>>;
type Job = Box<dyn FnOnce(&mut Worker) + Send>;

enum Order {
    /// The permit is the job's place in the queue.
    Run(Job, OwnedSemaphorePermit),
    /// Wakes the thread up to see that the pool is stopped.
    Stop,
}

/// The worker threads.
pub(super) struct Pool {
    shared: Arc<Shared>,
    /// The last one is for those who have taken all the time or memory that they may: who does so again holds up nobody else.
    lanes: Vec<Lane>,
    /// Where settings and samples are tried, so that who never ends there holds nobody up that judges.
    trials: Lane,
    /// Who may use it.
    trying: Turns,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The way to one worker. The channel has room for all permits and the order to stop, so sending never blocks.
struct Lane {
    permits: Arc<Semaphore>,
    orders: SyncSender<Order>,
}

struct Shared {
    clock: Clock,
    limits: PluginLimits,
    live: Arc<AtomicUsize>,
    stopped: AtomicBool,
    quarantine: Quarantine,
}

impl Pool {
    pub(super) fn start(engine: &Engine, limits: &PluginLimits) -> Result<Self, PluginError> {
        let failed = |error: std::io::Error| PluginError::Start(error.to_string());
        let clock = Clock::start(engine.weak()).map_err(failed)?;
        let shared = Arc::new(Shared {
            clock,
            limits: limits.clone(),
            live: Arc::default(),
            stopped: AtomicBool::new(false),
            quarantine: Quarantine::new(),
        });
        at_zero(state_lost, &["trap", "eviction"]);
        let mut threads = Vec::new();
        let workers = thread::available_parallelism().map_or(1, |cores| (cores.get() - 1).max(1));
        let mut lane = |name, work: fn(Worker, &Receiver<Order>)| {
            let bound = NonZeroUsize::new(limits.instances / workers).unwrap_or(NonZeroUsize::MIN);
            let worker = Worker { shared: Arc::clone(&shared), live: Lives::new(bound, limits.idle()) };
            let queue = limits.queue.clamp(1, MAX_QUEUE);
            let (orders, inbox) = sync_channel(queue + 1);
            threads.push(
                thread::Builder::new()
                    .name(name)
                    .stack_size(HOST_STACK + limits.stack_bytes)
                    .spawn(move || work(worker, &inbox))?,
            );
            Ok(Lane { permits: Arc::new(Semaphore::new(queue)), orders })
        };
        let lanes = (0..=workers).map(|number| lane(format!("tidegate-wasm-{number}"), Worker::work));
        let lanes = lanes.collect::<Result<_, _>>().map_err(failed)?;
        let trials = lane("tidegate-trials".into(), Worker::work_behind).map_err(failed)?;
        Ok(Self { shared, lanes, trials, trying: Turns::new(), threads: Mutex::new(threads) })
    }

    /// Has an instance configured on the trial lane. It is dropped then; where the messages are, it is made anew.
    pub(super) async fn configure(&self, instance: &Instance) -> Result<Traits, Fault> {
        Ok(self.begin(instance).await?.traits())
    }

    /// A live instance on the trial lane, which has accepted its settings.
    pub(super) async fn begin(&self, instance: &Instance) -> Result<Live, Fault> {
        self.attempt(instance, Shared::configure).await?
    }

    /// Runs a message through it; where there is none, through a new one. Returns what is left of it.
    pub(super) async fn trial<W: Work>(
        &self,
        instance: &Instance,
        live: Option<Live>,
        message: Arc<Message>,
    ) -> Result<(Trial, Option<Live>), Fault> {
        self.attempt(instance, move |shared, instance| shared.trial::<W>(instance, live, message)).await
    }

    /// One piece of work on the trial lane, in the tenant's turn.
    async fn attempt<T: Send + 'static>(
        &self,
        instance: &Instance,
        work: impl FnOnce(&Shared, &Instance) -> T + Send + 'static,
    ) -> Result<T, Fault> {
        let turn = self.trying.take(Some(instance.tenant())).await?;
        let instance = instance.clone();
        let answer = self.trials.submit(move |worker| {
            let _turn = turn;
            work(&worker.shared, &instance)
        });
        answer.await?.await.map_err(|_| Fault::Stopped)
    }

    /// Runs the batches, all those of one thread as one job.
    pub(super) async fn run<W: Work>(&self, batches: Vec<(Instance, Messages)>) -> Vec<Answered<W::Answer>> {
        let sizes: Vec<usize> = batches.iter().map(|(_, messages)| messages.len()).collect();
        let blocked: Vec<Option<Fault>> = batches.iter().map(|(instance, _)| self.blocked(instance)).collect();
        let mut shares: Vec<Vec<(usize, Instance, Messages)>> = self.lanes.iter().map(|_| Vec::new()).collect();
        for (place, (instance, messages)) in batches.into_iter().enumerate() {
            if let Some(fault) = &blocked[place] {
                instance.0.account.faulted(fault, messages.len());
            } else if !messages.is_empty() {
                shares[self.lane(&instance)].push((place, instance, messages));
            }
        }
        let mut pending = Vec::with_capacity(shares.len());
        for (lane, share) in self.lanes.iter().zip(shares) {
            if !share.is_empty() {
                pending.push(lane.submit(move |worker| worker.share::<W>(share)).await);
            }
        }
        let mut answered: Vec<Answered<W::Answer>> = sizes.iter().map(|_| Answered::default()).collect();
        for answer in pending.into_iter().flatten() {
            for (place, batch) in answer.await.unwrap_or_default() {
                answered[place] = batch;
            }
        }
        for ((batch, size), fault) in answered.iter_mut().zip(sizes).zip(blocked) {
            let fault = fault.unwrap_or(Fault::Stopped);
            batch.answers.resize_with(size, || Err(fault.clone()));
        }
        answered
    }

    fn lane(&self, instance: &Instance) -> usize {
        let last = self.lanes.len() - 1;
        if instance.0.account.has_taken_all() {
            return last;
        }
        // The upper half: the worker's own map uses the lower one.
        (instance.0.hash >> 32) as usize % last
    }

    /// What an instance answers without being asked, if so.
    pub(super) fn blocked(&self, instance: &Instance) -> Option<Fault> {
        instance.plugin().blocked().or_else(|| self.quarantine().blocks(instance))
    }

    pub(super) fn quarantine(&self) -> &Quarantine {
        &self.shared.quarantine
    }

    pub(super) fn live_instances(&self) -> usize {
        self.shared.live.load(Relaxed)
    }

    pub(super) fn stop(&self) {
        self.shared.stopped.store(true, Relaxed);
        self.trying.close();
        for lane in self.lanes.iter().chain([&self.trials]) {
            lane.permits.close();
            let _ = lane.orders.try_send(Order::Stop);
        }
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            let _ = thread.join();
        }
        // Last, for its ticks end what the workers are at.
        self.shared.clock.stop();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Lane {
    /// Waits for a place in the queue. A job that is dropped unfinished drops its answer's sender.
    async fn submit<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Worker) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, Fault> {
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|_| Fault::Stopped)?;
        let (answer, receiver) = oneshot::channel();
        let job = Box::new(move |worker: &mut Worker| {
            if !answer.is_closed() {
                let _ = answer.send(work(worker));
            }
        });
        self.orders.try_send(Order::Run(job, permit)).map_err(|_| Fault::Stopped)?;
        Ok(receiver)
    }
}

/// What one thread owns.
struct Worker {
    shared: Arc<Shared>,
    live: Lives,
}

impl Worker {
    /// Works with a low priority.
    fn work_behind(self, inbox: &Receiver<Order>) {
        if let Err(error) = stand_back() {
            tracing::warn!(%error, "trials of plugins have the priority of everything else");
        }
        self.work(inbox);
    }

    fn work(mut self, inbox: &Receiver<Order>) {
        loop {
            let order = match self.live.next_expiry() {
                None => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(time) => inbox.recv_timeout(time),
            };
            match order {
                _ if self.shared.stopped.load(Relaxed) => return,
                Ok(Order::Run(job, _permit)) => self.run(job),
                Ok(Order::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.live.drop_idle();
        }
    }

    fn run(&mut self, job: Job) {
        let shared = Arc::clone(&self.shared);
        let _ticking = shared.clock.ticking();
        if catch_unwind(AssertUnwindSafe(|| job(self))).is_err() {
            tracing::error!("a plugin call panicked; the thread's instances are dropped");
            self.live.clear();
        }
    }

    fn share<W: Work>(&mut self, share: Vec<(usize, Instance, Messages)>) -> Vec<(usize, Answered<W::Answer>)> {
        share.into_iter().map(|(place, instance, messages)| (place, self.batch::<W>(&instance, messages))).collect()
    }

    fn batch<W: Work>(&mut self, instance: &Instance, messages: Messages) -> Answered<W::Answer> {
        let (started, processor) = (Instant::now(), processor_time());
        let messages = Arc::new(messages);
        let mut live = self.live.take(instance);
        let mut answers = Vec::new();
        for batch in calls(&messages, &Most::of(instance.plugin())) {
            answers.append(&mut self.shared.call::<W>(instance, &mut live, &batch));
        }
        if let Some(live) = live {
            self.live.put(instance, live);
        }
        instance.plugin().0.seconds.record(started.elapsed());
        self.shared.account::<W>(instance, &answers);
        let processor_time = processor_time().saturating_sub(processor);
        instance.0.account.used(processor_time);
        Answered { answers, processor_time }
    }
}

impl Shared {
    fn instantiate(&self, instance: &Instance, time: Duration) -> Result<Live, Fault> {
        Live::new(instance, &self.limits, &self.live, time)
    }

    /// A new instance, which has accepted its settings.
    fn configure(&self, instance: &Instance) -> Result<Live, Fault> {
        self.instantiate(instance, self.limits.call()).inspect_err(|fault| match fault {
            Fault::Refused(_) => {} // the user's mistake, not the plugin's
            fault => self.report(instance, fault),
        })
    }

    /// One message through the instance, and what is left of that.
    fn trial<W: Work>(&self, instance: &Instance, live: Option<Live>, message: Arc<Message>) -> (Trial, Option<Live>) {
        let started = processor_time();
        let mut memory_bytes = 0;
        let call = || {
            let mut live = live.map_or_else(|| self.instantiate(instance, self.limits.call()), Ok)?;
            let answers = live.call::<W>(&Batch::new(&Arc::new(vec![message]), 0..1), self.limits.call());
            memory_bytes = live.memory_bytes();
            let answer = answers?.into_iter().next().expect("invariant: one answer for each message");
            Ok((answer, live))
        };
        let (outcome, live) = match call() {
            Ok((answer, live)) => (answer.map(Into::into), Some(live)),
            Err(fault) => (Err(fault), None),
        };
        (Trial { outcome, processor_time: processor_time().saturating_sub(started), memory_bytes }, live)
    }

    /// Answers one call's messages. If it fails, the messages are tried each by itself on an instance that no other message
    /// has touched, so that only those answer for it that are to blame. What keeps state goes on message by message, in order.
    fn call<W: Work>(&self, instance: &Instance, live: &mut Option<Live>, batch: &Batch) -> Answers<W> {
        let end = Instant::now() + self.limits.call() * TRIES;
        let fresh = live.is_none();
        match self.attempt::<W>(instance, live, batch, end) {
            Ok(answers) => answers,
            Err(fault) if fresh && batch.messages().len() == 1 => vec![Err(fault)],
            Err(fault) => {
                // Counted and logged even if every message passes at its second try.
                self.report(instance, &fault);
                batch.singly().map(|single| self.alone::<W>(instance, live, &single, end)).collect()
            }
        }
    }

    fn alone<W: Work>(
        &self,
        instance: &Instance,
        live: &mut Option<Live>,
        single: &Batch,
        end: Instant,
    ) -> Result<W::Answer, Fault> {
        if !instance.keeps_state() {
            *live = None;
        }
        let answers = self.attempt::<W>(instance, live, single, end)?;
        answers.into_iter().next().expect("invariant: one answer for each message")
    }

    /// One call; a fault costs the live instance.
    fn attempt<W: Work>(
        &self,
        instance: &Instance,
        live: &mut Option<Live>,
        batch: &Batch,
        end: Instant,
    ) -> Result<Answers<W>, Fault> {
        let time = || {
            let left = end.saturating_duration_since(Instant::now());
            match (self.stopped.load(Relaxed), left) {
                (true, _) => Err(Fault::Stopped),
                (_, Duration::ZERO) => Err(Fault::Deadline),
                _ => Ok(left.min(self.limits.call())),
            }
        };
        let mut given = time()?;
        if let Some(fault) = self.quarantine.blocks(instance) {
            return Err(fault);
        }
        instance.0.account.called();
        let made = live.take().map_or_else(|| self.instantiate(instance, given), Ok);
        let answered = made.and_then(|mut current| {
            given = time()?;
            let answers = current.call::<W>(batch, given);
            instance.0.account.held(current.memory_bytes());
            let answers = answers.inspect_err(|_| {
                if instance.keeps_state() {
                    state_lost("trap").increment(1);
                }
            })?;
            *live = Some(current);
            Ok(answers)
        });
        answered.inspect_err(|fault| self.failed(instance, fault, given))
    }

    /// Counts a failed call, unless it had less time than it may take, and puts who fails often into quarantine.
    fn failed(&self, instance: &Instance, fault: &Fault, given: Duration) {
        let is_to_blame = match fault {
            Fault::Trap(_) | Fault::Memory | Fault::WrongLength { .. } | Fault::Output(_) => true,
            Fault::Deadline => given >= self.limits.call(),
            Fault::Refused(_) | Fault::Stopped | Fault::Quarantined(_) | Fault::Unavailable(_) => false,
        };
        if is_to_blame && matches!(fault, Fault::Deadline | Fault::Memory) {
            instance.0.account.takes_all();
        }
        if is_to_blame && instance.0.account.failed(&self.limits, Instant::now()) {
            self.quarantine.impose(instance, fault);
        }
    }

    fn account<W: Work>(&self, instance: &Instance, answers: &Answers<W>) {
        let dropped = answers.iter().filter(|answer| answer.as_ref().is_ok_and(W::is_drop)).count();
        instance.0.account.judged(answers.len(), dropped);
        for fault in answers.iter().filter_map(|answer| answer.as_ref().err()) {
            self.report(instance, fault);
        }
    }

    fn report(&self, instance: &Instance, fault: &Fault) {
        instance.0.account.faulted(fault, 1);
        if let Some(suppressed) = instance.plugin().0.faults.pass(Instant::now()) {
            let (plugin, tenant, kind) = (instance.plugin().id(), instance.tenant(), fault.kind());
            tracing::warn!(%plugin, %tenant, kind, %fault, suppressed, "plugin fault");
        }
    }
}

/// Cuts a batch into calls.
fn calls<'a>(messages: &'a Arc<Messages>, most: &'a Most) -> impl Iterator<Item = Batch> + use<'a> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let rest = &messages[start..];
        let mut bytes = 0;
        let fits = |message: &&Arc<Message>| {
            bytes += message.body.len();
            bytes <= most.bytes
        };
        let count = rest.iter().take(most.messages).take_while(fits).count().max(1).min(rest.len());
        let call = start..start + count;
        start += count;
        (!call.is_empty()).then(|| Batch::new(messages, call))
    })
}
