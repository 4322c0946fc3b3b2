//! kill -9 under load, at random moments and at named points between the stages of the line, and what has to hold all the same:
//!
//! - no message whose POST was answered with 201 is missing at a consumer in the end, and none that was refused is there,
//! - first deliveries keep the order of the topic and of each source, and a connection never goes back,
//! - what was acknowledged long enough before the kill never comes again,
//! - what was to be stored is stored,
//! - a consumer that has connected is there, and one that has unsubscribed is not,
//! - `tidegate check` finds nothing wrong in the end.
//!
//! `TIDEGATE_CRASH_ROUNDS` is the number of kills, `TIDEGATE_CRASH_SEED` repeats the dice of a failed run.

#[cfg(feature = "faults")]
mod points;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::harness::{
    Consumer, Dice, Frame, Gateway, Producer, Setup, eventually, forwarded, measurement, of_tenant, value_of,
};

/// Where the seed of a failed run is given.
const SEED: &str = "TIDEGATE_CRASH_SEED";
const PRODUCERS: usize = 16;
const SOURCES_EACH: usize = 2;
/// Acknowledgements that were written this long before the kill hold.
const ACK_HOLDS_AFTER: Duration = Duration::from_millis(250);
/// Pause of a producer that was refused.
const REFUSED_PAUSE: Duration = Duration::from_millis(10);

/// One message: the id of its device, and which of the device's it is.
type Key = (String, u64);

/// Every third is of the type that the topic `CrashB` filters for.
fn kind(number: u64) -> &'static str {
    if number.is_multiple_of(3) { "b" } else { "a" }
}

fn key(frame: &Frame) -> Key {
    let body = frame.json();
    (body["source"]["id"].as_str().unwrap().to_owned(), value_of(&body))
}

/// A device and what its producer knows of its messages.
struct Source {
    id: String,
    mode: &'static str,
    /// The next number; one that failed is never sent again, since it may have arrived.
    next: u64,
    accepted: Vec<u64>,
    /// Since the store was full.
    refused: Vec<u64>,
}

/// Posts in turn for its sources, each after the answer to the one before, until the gateway is gone. Also returns a moment at
/// which it was still there.
async fn produce(producer: Producer, mut sources: Vec<Source>, ballast: usize) -> (Vec<Source>, Instant) {
    let mut alive = Instant::now();
    loop {
        for source in &mut sources {
            let number = source.next;
            source.next += 1;
            let mut body = measurement(&source.id, kind(number), number);
            body["c8y_Ballast"] = json!("x".repeat(ballast));
            let sent = Instant::now();
            match producer.post(&body, source.mode).await {
                Ok(201) => source.accepted.push(number),
                Ok(507) => {
                    source.refused.push(number);
                    tokio::time::sleep(REFUSED_PAUSE).await;
                }
                Ok(status) => panic!("a measurement was refused with {status}"),
                Err(_) => return (sources, alive),
            }
            alive = sent;
        }
    }
}

/// What one consumer has seen, and every rule that was broken before its eyes.
#[derive(Default)]
struct Ledger {
    topic: &'static str,
    name: &'static str,
    ids: HashMap<Key, u64>,
    newest_id: u64,
    newest_of_source: HashMap<String, u64>,
    acknowledged: HashMap<Key, Instant>,
    settled: HashSet<Key>,
    violations: Vec<String>,
}

impl Ledger {
    fn new(topic: &'static str, name: &'static str) -> Self {
        Self { topic, name, ..Self::default() }
    }

    fn violated(&mut self, what: &str) {
        self.violations.push(format!("{}/{}: {what}", self.topic, self.name));
    }

    /// `last_id` is the id that came before on the same connection.
    fn delivered(&mut self, key: &Key, id: u64, last_id: u64) {
        if id <= last_id {
            self.violated(&format!("order: {key:?} with id {id} came after id {last_id}"));
        }
        if self.settled.contains(key) {
            self.violated(&format!("acknowledged, and came again: {key:?}"));
        }
        match self.ids.get(key) {
            Some(known) if *known == id => {}
            Some(known) => self.violated(&format!("twice: {key:?} as {known} and as {id}")),
            None => self.delivered_first(key, id),
        }
    }

    fn delivered_first(&mut self, key: &Key, id: u64) {
        if id <= self.newest_id {
            self.violated(&format!("order: {key:?} with id {id} came first after id {}", self.newest_id));
        }
        let newest = self.newest_of_source.insert(key.0.clone(), key.1);
        if newest.is_some_and(|newest| newest >= key.1) {
            self.violated(&format!("order of the source: {key:?} came after {newest:?}"));
        }
        self.newest_id = self.newest_id.max(id);
        self.ids.insert(key.clone(), id);
    }

    fn killed(&mut self, at: Instant) {
        for (key, written) in self.acknowledged.drain() {
            if at.duration_since(written) >= ACK_HOLDS_AFTER {
                self.settled.insert(key);
            }
        }
    }

    /// Judges what has come in the end, and what has not.
    fn finished(&mut self, sources: &[Source]) {
        let wanted = |number: &u64| self.topic == "CrashAll" || kind(*number) == "b";
        let keys = |source: &Source, numbers: &[u64]| -> Vec<Key> {
            numbers.iter().copied().filter(wanted).map(|number| (source.id.clone(), number)).collect()
        };
        let accepted = sources.iter().flat_map(|source| keys(source, &source.accepted));
        let lost = accepted.filter(|key| !self.ids.contains_key(key)).map(|key| format!("lost: {key:?}"));
        let refused = sources.iter().flat_map(|source| keys(source, &source.refused));
        let half_done =
            refused.filter(|key| self.ids.contains_key(key)).map(|key| format!("refused, and came: {key:?}"));
        let found: Vec<_> = lost.chain(half_done).collect();
        found.iter().for_each(|found| self.violated(found));
    }
}

/// Reads until the connection ends. Of ten messages it acknowledges six at once, three later in any order, one never.
async fn consume(mut consumer: Consumer, mut ledger: Ledger, mut dice: Dice) -> Ledger {
    let mut last_id = 0;
    let mut held: Vec<(Key, Frame)> = Vec::new();
    while let Some(frame) = consumer.try_next().await {
        let key = key(&frame);
        ledger.delivered(&key, frame.message_id(), last_id);
        last_id = frame.message_id();
        let due = match dice.below(10) {
            0 => None,
            1..4 => {
                held.push((key, frame));
                let any = usize::try_from(dice.below(held.len() as u64)).unwrap();
                (held.len() > 20).then(|| held.swap_remove(any))
            }
            _ => Some((key, frame)),
        };
        if let Some((key, frame)) = due {
            if !consumer.try_ack(&frame).await {
                break;
            }
            ledger.acknowledged.insert(key, Instant::now());
        }
    }
    ledger
}

/// Acknowledges everything up to the message of `last`.
async fn drain(mut consumer: Consumer, mut ledger: Ledger, last: &str) -> Ledger {
    let mut last_id = 0;
    loop {
        let frame = consumer.receive().await;
        let key = key(&frame);
        ledger.delivered(&key, frame.message_id(), last_id);
        last_id = frame.message_id();
        if key.0 == last {
            consumer.close().await;
            return ledger;
        }
    }
}

/// What is known of a consumer that came for a moment.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Guest {
    Unknown,
    Here,
    Gone,
}

struct Run {
    gateway: Gateway,
    dice: Dice,
    sources: Vec<Source>,
    /// A device whose one message comes last.
    last: String,
    ledgers: Vec<Ledger>,
    guests: Vec<(String, Guest)>,
    violations: Vec<String>,
    /// Bytes that measurements have besides.
    ballast: usize,
    /// The consumers of this name do not connect.
    away: Option<&'static str>,
}

/// What runs until the gateway is gone.
struct Load {
    consumers: JoinSet<Ledger>,
    producers: JoinSet<(Vec<Source>, Instant)>,
}

impl Run {
    /// Two topics: one with everything, and one past both plugins with the messages of one type.
    async fn new(setup: Setup) -> Self {
        let gateway = setup.start().await;
        let mut sources = Vec::new();
        for number in 0..PRODUCERS * SOURCES_EACH {
            let id = gateway.device("source").await;
            gateway.subscribe(&filtered(&id)).await;
            let mode = if number % 2 == 0 { "TRANSIENT" } else { "PERSISTENT" };
            sources.push(Source { id, mode, next: 1, accepted: Vec::new(), refused: Vec::new() });
        }
        let last = gateway.device("last").await;
        gateway.subscribe(&filtered(&last)).await;
        gateway.subscribe(&of_tenant("CrashAll", &["measurements"])).await;
        let ledgers = [("CrashAll", "one"), ("CrashAll", "two"), ("CrashB", "one")];
        let ledgers = ledgers.map(|(topic, name)| Ledger::new(topic, name)).into();
        let (guests, violations) = (Vec::new(), Vec::new());
        Self { gateway, dice: Dice::new(SEED), sources, last, ledgers, guests, violations, ballast: 0, away: None }
    }

    /// Load, and a kill in the middle of it.
    async fn round(&mut self) {
        self.round_with(|| ()).await;
    }

    /// [`Run::round`], in which something happens halfway.
    async fn round_with(&mut self, halfway: impl FnOnce()) {
        let half = Duration::from_millis(150 + self.dice.below(450));
        let load = self.load().await;
        let _ = tokio::time::timeout(half, self.come_and_go()).await;
        halfway();
        let _ = tokio::time::timeout(half, self.come_and_go()).await;
        self.gateway.kill9();
        self.unload(load).await;
        self.gateway.restart_process().await;
        self.judge_guests().await;
    }

    async fn load(&mut self) -> Load {
        let mut load = Load { consumers: JoinSet::new(), producers: JoinSet::new() };
        let away = self.away;
        for ledger in self.ledgers.extract_if(.., |ledger| away != Some(ledger.name)) {
            let consumer = self.gateway.consumer(ledger.topic, ledger.name).await;
            load.consumers.spawn(consume(consumer, ledger, self.dice.split()));
        }
        let producer = self.gateway.producer();
        while !self.sources.is_empty() {
            let own = self.sources.split_off(self.sources.len() - SOURCES_EACH);
            load.producers.spawn(produce(producer.clone(), own, self.ballast));
        }
        load
    }

    /// The gateway was killed: what was acknowledged long enough before holds.
    async fn unload(&mut self, load: Load) {
        let mut alive = None;
        for (sources, last) in load.producers.join_all().await {
            self.sources.extend(sources);
            alive = alive.max(Some(last));
        }
        self.ledgers.extend(load.consumers.join_all().await);
        self.ledgers.iter_mut().for_each(|ledger| ledger.killed(alive.unwrap()));
    }

    /// Consumers connect to the busiest topic, stay for one message and unsubscribe, until the gateway is gone.
    async fn come_and_go(&mut self) -> Option<()> {
        loop {
            let name = format!("guest{}", self.dice.below(u64::from(u32::MAX)));
            self.guests.push((name.clone(), Guest::Unknown));
            let wanted = json!({"subscription": "CrashAll", "subscriber": name});
            let token = self.gateway.post("/notification2/token", &wanted).send().await.ok()?;
            let token = token.expect(200).json()["token"].as_str().unwrap().to_owned();
            let mut consumer = self.gateway.try_consumer(&token).await?;
            self.guests.last_mut().unwrap().1 = Guest::Here;
            consumer.try_next().await?;
            self.guests.last_mut().unwrap().1 = Guest::Unknown;
            let unsubscribe = format!("/notification2/unsubscribe?token={token}");
            self.gateway.call("POST", &unsubscribe).send().await.ok()?.expect(200);
            self.guests.last_mut().unwrap().1 = Guest::Gone;
        }
    }

    /// Finds the guests that should be there, and no others; then they go.
    async fn judge_guests(&mut self) {
        let topic = self.gateway.get("/tidegate/v1/topics/persistent/CrashAll").await.expect(200).json();
        let there: BTreeSet<_> =
            topic["consumers"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
        for (name, known) in std::mem::take(&mut self.guests) {
            match (known, there.contains(&*name)) {
                (Guest::Here, false) => self.violations.push(format!("connected, and not there: {name}")),
                (Guest::Gone, true) => self.violations.push(format!("unsubscribed, and still there: {name}")),
                (_, false) => {}
                (_, true) => {
                    let token = self.gateway.token("CrashAll", &name).await;
                    self.gateway.unsubscribe(&token).await.expect(200);
                }
            }
        }
    }

    /// Lets the consumers catch up and returns what was violated.
    async fn finish(mut self) -> Vec<String> {
        let mut drains = JoinSet::new();
        for ledger in self.ledgers.drain(..) {
            let (consumer, last) = (self.gateway.consumer(ledger.topic, ledger.name).await, self.last.clone());
            drains.spawn(async move { drain(consumer, ledger, &last).await });
        }
        let last = measurement(&self.last, "b", 0);
        eventually("there is room for the last message", async || {
            (self.gateway.post_measurement(&last).await.status == 201).then_some(())
        })
        .await;
        let mut violations = std::mem::take(&mut self.violations);
        for mut ledger in drains.join_all().await {
            ledger.finished(&self.sources);
            violations.append(&mut ledger.violations);
            let mut again = self.gateway.reconnect(ledger.topic, ledger.name).await;
            if !again.is_silent_for(Duration::from_millis(300)).await {
                violations.push(format!("{}/{}: acknowledged, and came again", ledger.topic, ledger.name));
            }
        }
        for source in self.sources.iter().filter(|source| source.mode == "PERSISTENT") {
            let stored = self.stored(&source.id).await;
            let lost = source.accepted.iter().filter(|number| !stored.contains(number));
            violations.extend(lost.map(|number| format!("lost from the store: {:?}", (&source.id, number))));
            let half_done = source.refused.iter().filter(|number| stored.contains(number));
            violations.extend(half_done.map(|number| format!("refused, and stored: {:?}", (&source.id, number))));
        }
        self.gateway.stop().await;
        let data = self.gateway.data().into_os_string().into_string().unwrap();
        let (sound, found, _) = self.gateway.command(&["check", "--data", &data], &[], "check").await;
        if !sound {
            violations.push(found);
        }
        violations
    }

    async fn stored(&self, source: &str) -> BTreeSet<u64> {
        let mut stored = BTreeSet::new();
        for page in 1.. {
            let path = format!("/measurement/measurements?source={source}&pageSize=2000&currentPage={page}");
            let list = self.gateway.get(&path).await.expect(200).json();
            let values: Vec<_> = list["measurements"].as_array().unwrap().iter().map(value_of).collect();
            if values.is_empty() {
                break;
            }
            stored.extend(values);
        }
        stored
    }

    #[cfg(feature = "faults")]
    fn refused(&self) -> usize {
        self.sources.iter().map(|source| source.refused.len()).sum()
    }

    fn accepted(&self) -> usize {
        self.sources.iter().map(|source| source.accepted.len()).sum()
    }
}

fn filtered(source: &str) -> Value {
    let mut subscription = forwarded("CrashB", source);
    subscription["subscriptionFilter"]["typeFilter"] = json!("'b' or 'c'");
    subscription["fragmentsToCopy"] = json!(["c8y_Reading"]);
    subscription
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_9_under_load_loses_nothing_and_keeps_every_order() {
    let rounds: usize = std::env::var("TIDEGATE_CRASH_ROUNDS").map_or(5, |rounds| rounds.parse().unwrap());
    let mut run = Run::new(Gateway::setup()).await;
    let seed = run.dice.seed();
    for round in 1..=rounds {
        let before = run.accepted();
        run.round().await;
        assert!(run.accepted() > before, "round {round} was no load");
    }
    let accepted = run.accepted();
    nothing_violated(seed, accepted, &run.finish().await);
}

// `store.durability = "second"`: "an end of the process takes nothing that was answered", flushed or not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_9_loses_nothing_that_was_only_written() {
    let mut run = Run::new(Gateway::setup().config("[store]\ndurability = 'second'")).await;
    let seed = run.dice.seed();
    for _ in 0..2 {
        run.round().await;
    }
    let accepted = run.accepted();
    assert!(accepted > 0, "there was no load");
    nothing_violated(seed, accepted, &run.finish().await);
}

#[track_caller]
fn nothing_violated(seed: u64, accepted: usize, violations: &[String]) {
    let shown = &violations[..violations.len().min(20)];
    assert!(violations.is_empty(), "seed {seed}, {accepted} accepted, {} violations: {shown:#?}", violations.len());
}

/// The checker must see what it is for: a gateway that answers before the commit.
#[cfg(feature = "faults")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_answers_before_the_commit_is_found_out() {
    let mut run = Run::new(Gateway::setup().env("TIDEGATE_FAULT", "answer-before-commit")).await;
    for _ in 0..10 {
        run.round().await;
    }
    let violations = run.finish().await;
    assert!(violations.iter().any(|violation| violation.contains("lost")), "nothing was lost: {violations:?}");
}

// The process ends by itself only when it is asked to.
#[tokio::test]
async fn a_start_after_a_kill_while_starting_works() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut dice = Dice::new(SEED);
    for _ in 0..5 {
        gateway.kill9();
        let arguments = gateway.serve_arguments();
        let started = crate::harness::Program::spawn(&arguments, &[], &gateway.path("."), "killed");
        tokio::time::sleep(Duration::from_millis(dice.below(150))).await;
        drop(started);
        gateway.restart_process().await;
        eventually("the device is there", async || {
            (gateway.get(&format!("/inventory/managedObjects/{device}")).await.status == 200).then_some(())
        })
        .await;
    }
}
