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
use super::host::{Batch, LogLine};
use super::instance::{Live, Traits, Work};
use super::lives::{Lives, state_lost};
use super::quarantine::Quarantine;
use super::stopwatch::Stopwatch;
use super::turns::Turns;
use super::{Answered, Fault, Instance, PluginError, PluginLimits, Verdict};
use crate::message::Message;
use crate::telemetry::at_zero;

/// Host code needs its share of the stack besides the guest's: an overflow there would end the process.
const HOST_STACK: usize = 2 << 20;
/// The channels take their memory at once.
const MAX_QUEUE: usize = 4096;

/// One call gets no more messages, and no more bytes of bodies unless one message has them: it must fit into a guest and into
/// the time of a call.
pub(super) struct Most {
    pub(super) messages: usize,
    pub(super) bytes: usize,
}

impl Most {
    pub(super) fn of(instance: &Instance) -> Self {
        match &instance.plugin().0 {
            // Others would wait for what takes all, and be tried again.
            _ if instance.has_taken_all() => Self { messages: 1, bytes: 0 },
            // Some twenty times slower.
            plugin if plugin.is_interpreted() => Self { messages: 8, bytes: 32 << 10 },
            // It may parse each body, at some 30 MB/s.
            plugin if plugin.is_script() => Self { messages: 64, bytes: 256 << 10 },
            _ => Self { messages: 256, bytes: 1 << 20 },
        }
    }

    /// The first messages, which one call gets.
    fn of_batch(&self, batch: &Batch) -> Batch {
        let mut bytes = 0;
        let fits = |message: &&Arc<Message>| {
            bytes += message.body.len();
            bytes <= self.bytes
        };
        let messages = batch.messages().iter().take(self.messages);
        batch.first(messages.take_while(fits).count().max(1))
    }
}

/// What became of a call that was tried.
pub(super) struct Tried {
    pub(super) answers: Result<Vec<Result<Verdict, Fault>>, Fault>,
    /// With that of a new instance, if one was made.
    pub(super) processor_time: Duration,
    /// The linear memory that the instance has; 0 if there is none.
    pub(super) memory_bytes: usize,
    pub(super) log: Vec<LogLine>,
}

type Messages = Vec<Arc<Message>>;
type Answers<W> = Vec<Result<<W as Work>::Answer, Fault>>;

/// What is to be answered yet of a batch, and the place of that among those of its run.
struct Open {
    place: usize,
    instance: Instance,
    batch: Batch,
}

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
    /// The last one is for those who have taken all the time or memory that they may, or take long to be configured: who does so
    /// again holds up nobody else.
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

    /// Runs messages through it as one call; where there is none, through a new one. Returns what is left of it.
    pub(super) async fn trial<W: Work>(
        &self,
        instance: &Instance,
        live: Option<Live>,
        messages: Messages,
    ) -> Result<(Tried, Option<Live>), Fault> {
        self.attempt(instance, move |shared, instance| shared.trial::<W>(instance, live, messages)).await
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

    /// Runs the batches, all those of one thread as one job, in as many rounds as it takes to have an answer for each message.
    pub(super) async fn run<W: Work>(&self, batches: Vec<(Instance, Messages)>) -> Vec<Answered<W::Answer>> {
        let sizes: Vec<usize> = batches.iter().map(|(_, messages)| messages.len()).collect();
        let mut answered: Vec<Answered<W::Answer>> = sizes.iter().map(|_| Answered::default()).collect();
        let batches = batches.into_iter().map(|(instance, messages)| (instance, Batch::whole(messages)));
        let mut open: Vec<Open> = batches
            .enumerate()
            .filter_map(|(place, (instance, batch))| Some(Open { place, instance, batch: batch? }))
            .collect();
        while !open.is_empty() {
            let mut pending = Vec::with_capacity(self.lanes.len());
            for (lane, share) in self.lanes.iter().zip(self.shares(open, &mut answered)) {
                if !share.is_empty() {
                    pending.push(lane.submit(move |worker| worker.share::<W>(share)).await);
                }
            }
            open = Vec::new();
            for answer in pending.into_iter().flatten() {
                for (Open { place, instance, batch }, answers) in answer.await.unwrap_or_default() {
                    let rest = batch.after(answers.answers.len());
                    answered[place].add(answers);
                    open.extend(rest.map(|batch| Open { place, instance, batch }));
                }
            }
        }
        for (batch, size) in answered.iter_mut().zip(sizes) {
            batch.answers.resize_with(size, || Err(Fault::Stopped));
        }
        answered
    }

    /// What goes to each thread. What is blocked is answered at once.
    fn shares<A>(&self, open: Vec<Open>, answered: &mut [Answered<A>]) -> Vec<Vec<Open>> {
        let mut shares: Vec<Vec<Open>> = self.lanes.iter().map(|_| Vec::new()).collect();
        for open in open {
            let Some(fault) = self.blocked(&open.instance) else {
                shares[self.lane(&open.instance)].push(open);
                continue;
            };
            let messages = open.batch.messages().len();
            open.instance.0.account.faulted(&fault, messages);
            answered[open.place].answers.extend((0..messages).map(|_| Err(fault.clone())));
        }
        shares
    }

    fn lane(&self, instance: &Instance) -> usize {
        let last = self.lanes.len() - 1;
        if instance.0.slow || instance.has_taken_all() {
            return last;
        }
        // The upper half: the worker's own map uses the lower one.
        (instance.0.hash >> 32) as usize % last
    }

    /// What an instance answers without being asked, if so.
    pub(super) fn blocked(&self, instance: &Instance) -> Option<Fault> {
        instance.plugin().blocked().cloned().or_else(|| self.quarantine().blocks(instance))
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

    /// Answers the first messages of the batches: all of them, if that takes no longer than one call may. Others wait for this
    /// thread: what is left goes on behind them.
    fn share<W: Work>(&mut self, share: Vec<Open>) -> Vec<(Open, Answered<W::Answer>)> {
        let end = Instant::now() + self.shared.limits.call();
        let mut answered = Vec::with_capacity(share.len());
        for open in share {
            let goes_on = answered.is_empty() || Instant::now() < end;
            let answers = if goes_on { self.batch::<W>(&open.instance, &open.batch, end) } else { Answered::default() };
            answered.push((open, answers));
        }
        answered
    }

    /// Answers at least one message until `end`, unless the instance has to go on on another thread.
    fn batch<W: Work>(&mut self, instance: &Instance, batch: &Batch, end: Instant) -> Answered<W::Answer> {
        let watch = Stopwatch::start_cheaply();
        let mut of_call = watch;
        let apart = instance.has_taken_all();
        let most = Most::of(instance);
        let mut live = self.live.take(instance);
        let mut answers = Vec::new();
        while let Some(rest) = batch.after(answers.len()) {
            if !answers.is_empty() {
                if Instant::now() >= end || instance.has_taken_all() != apart {
                    break;
                }
                of_call = Stopwatch::start_cheaply();
            }
            answers.append(&mut self.shared.call::<W>(instance, &mut live, &most.of_batch(&rest), of_call, end));
        }
        if let Some(live) = live {
            self.live.put(instance, live);
        }
        self.shared.account::<W>(instance, batch.messages(), &answers);
        let ended = Instant::now();
        let processor_time = watch.stop(ended);
        instance.plugin().0.seconds.record(ended - watch.started);
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
        self.instantiate(instance, self.limits.configure()).inspect_err(|fault| match fault {
            Fault::Refused(_) => {} // the user's mistake, not the plugin's
            fault => self.report(instance, fault),
        })
    }

    /// How long an instance may take to be made where the messages are.
    fn making(&self, instance: &Instance) -> Duration {
        if instance.0.slow { self.limits.configure() } else { self.limits.call() }
    }

    /// One call of the instance, and what is left of that.
    fn trial<W: Work>(&self, instance: &Instance, live: Option<Live>, messages: Messages) -> (Tried, Option<Live>) {
        let watch = Stopwatch::start();
        let (mut memory_bytes, mut log) = (0, Vec::new());
        let call = || {
            let mut live = live.map_or_else(|| self.instantiate(instance, self.limits.configure()), Ok)?;
            log = live.take_written();
            let batch = 0..messages.len();
            let batch = Batch::new(&Arc::new(messages), batch);
            let answers = live.call::<W>(&batch, Stopwatch::start(), self.limits.call());
            log.append(&mut live.take_written());
            let answers = answers?.into_iter().map(|answer| answer.map(Into::into)).collect();
            memory_bytes = live.memory_bytes();
            Ok((answers, live))
        };
        let (answers, live) = match call() {
            Ok((answers, live)) => (Ok(answers), Some(live)),
            Err(fault) => (Err(fault), None),
        };
        (Tried { answers, processor_time: watch.shows(), memory_bytes, log }, live)
    }

    /// Answers one call's messages. If it fails, the messages are tried each by itself on an instance that no other message
    /// has touched, so that only those answer for it that are to blame. What keeps state goes on message by message, in order.
    /// Only the first one has to be answered now: others wait for the thread, and an instance that has just taken all goes on
    /// on another one.
    fn call<W: Work>(
        &self,
        instance: &Instance,
        live: &mut Option<Live>,
        batch: &Batch,
        watch: Stopwatch,
        end: Instant,
    ) -> Answers<W> {
        let (fresh, apart) = (live.is_none(), instance.has_taken_all());
        match self.attempt::<W>(instance, live, batch, watch) {
            Ok(answers) => answers,
            Err(fault) if fresh && batch.messages().len() == 1 => vec![Err(fault)],
            Err(fault) => {
                // Counted and logged even if every message passes at its second try.
                self.report(instance, &fault);
                let mut answers = Vec::new();
                for single in batch.singly() {
                    let waits = !answers.is_empty() && Instant::now() >= end;
                    if waits || instance.has_taken_all() != apart {
                        break;
                    }
                    answers.push(self.alone::<W>(instance, live, &single));
                }
                answers
            }
        }
    }

    fn alone<W: Work>(&self, instance: &Instance, live: &mut Option<Live>, single: &Batch) -> Result<W::Answer, Fault> {
        if !instance.keeps_state() {
            *live = None;
        }
        let answers = self.attempt::<W>(instance, live, single, Stopwatch::start())?;
        answers.into_iter().next().expect("invariant: one answer for each message")
    }

    /// One call; a fault costs the live instance.
    fn attempt<W: Work>(
        &self,
        instance: &Instance,
        live: &mut Option<Live>,
        batch: &Batch,
        mut watch: Stopwatch,
    ) -> Result<Answers<W>, Fault> {
        if self.stopped.load(Relaxed) {
            return Err(Fault::Stopped);
        }
        if let Some(fault) = self.quarantine.blocks(instance) {
            return Err(fault);
        }
        instance.0.account.called();
        let made = match live.take() {
            Some(live) => Ok(live),
            None => self.instantiate(instance, self.making(instance)).inspect(|_| watch = Stopwatch::start()),
        };
        let answered = made.and_then(|mut current| {
            let answers = current.call::<W>(batch, watch, self.limits.call());
            instance.0.account.held(current.memory_bytes());
            let answers = answers.inspect_err(|_| {
                if instance.keeps_state() {
                    state_lost("trap").increment(1);
                }
            })?;
            *live = Some(current);
            Ok(answers)
        });
        answered.inspect_err(|fault| self.failed(instance, fault))
    }

    /// Counts a failed call, and puts who fails often into quarantine.
    fn failed(&self, instance: &Instance, fault: &Fault) {
        let is_to_blame = match fault {
            Fault::Trap(_) | Fault::Memory | Fault::WrongLength { .. } | Fault::Output(_) | Fault::Deadline => true,
            Fault::Refused(_) | Fault::Stopped | Fault::Quarantined(_) | Fault::Unavailable(_) | Fault::Loading => {
                false
            }
        };
        if matches!(fault, Fault::Deadline | Fault::Memory) {
            instance.0.account.takes_all(instance.0.hash);
        }
        if is_to_blame && instance.0.account.failed(&self.limits, Instant::now()) {
            self.quarantine.impose(instance, fault);
        }
    }

    fn account<W: Work>(&self, instance: &Instance, messages: &[Arc<Message>], answers: &Answers<W>) {
        let dropped = answers.iter().filter(|answer| answer.as_ref().is_ok_and(W::is_drop)).count();
        instance.0.account.judged(answers.len(), dropped);
        for fault in answers.iter().filter_map(|answer| answer.as_ref().err()) {
            self.report(instance, fault);
        }
        let mut words = instance.0.account.words();
        for (Message { source, .. }, answer) in messages.iter().map(Arc::as_ref).zip(answers) {
            match answer {
                Ok(_) => words.answered(source),
                Err(fault @ (Fault::Refused(_) | Fault::Output(_))) => {
                    if words.refused(source, &self.limits, Instant::now()) {
                        self.quarantine.impose(instance, fault);
                    }
                }
                Err(_) => {}
            }
        }
    }

    fn report(&self, instance: &Instance, fault: &Fault) {
        instance.0.account.faulted(fault, 1);
        if let Some(suppressed) = instance.plugin().0.faults.pass(Instant::now()) {
            let (plugin, tenant, kind) = (instance.plugin().id(), instance.tenant(), fault.kind());
            // Debug form: a guest's text must not forge lines.
            let fault = fault.to_string();
            tracing::warn!(%plugin, %tenant, kind, ?fault, suppressed, "plugin fault");
        }
    }
}
