//! The backlog against a simple model: random requests, acknowledgements, policies, ages, connections and restarts.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::Index;

use super::tests::{Gateway, NOW, key, record, records};
use super::*;
use crate::backlog::{OnFull, message_id};

const TTL_MS: i64 = super::tests::TTL.cast_signed() * 1_000;

#[derive(Clone, Debug)]
enum Step {
    /// Requests that are queued at once: records as topic, length, and whether they are held.
    Append(Vec<Vec<(usize, usize, bool)>>),
    /// The oldest held messages get these lengths, or go.
    Release(usize, Vec<Option<usize>>),
    Connect(usize, usize),
    Disconnect(usize, usize),
    /// Takes some messages, and acknowledges one of what it has, if it takes none.
    Claim(usize, usize, usize, Index),
    Unsubscribe(usize, usize),
    Policy(usize, OnFull, u64),
    Pass(i64),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let (topic, consumer) = (0usize..2, 0usize..3);
    let request = prop::collection::vec((0usize..2, 1usize..60, prop::bool::weighted(0.25)), 1..4);
    let releases = prop::collection::vec(prop::option::weighted(0.7, 1usize..90), 1..4);
    let on_full = prop::sample::select(vec![OnFull::Reject, OnFull::EvictOldest, OnFull::Park]);
    prop_oneof![
        12 => prop::collection::vec(request, 1..5).prop_map(Step::Append),
        4 => (topic.clone(), releases).prop_map(|(t, releases)| Step::Release(t, releases)),
        5 => (topic.clone(), consumer.clone()).prop_map(|(t, c)| Step::Connect(t, c)),
        2 => (topic.clone(), consumer.clone()).prop_map(|(t, c)| Step::Disconnect(t, c)),
        14 => (topic.clone(), consumer.clone(), 0usize..3, any::<Index>()).prop_map(|(t, c, n, i)| Step::Claim(t, c, n, i)),
        1 => (topic.clone(), consumer).prop_map(|(t, c)| Step::Unsubscribe(t, c)),
        3 => (topic, on_full, 50u64..400).prop_map(|(t, on_full, quota)| Step::Policy(t, on_full, quota)),
        3 => (1i64..60).prop_map(|seconds| Step::Pass(seconds * 1_000)),
        1 => Just(Step::Restart),
    ]
}

#[derive(Clone)]
struct Topic {
    on_full: OnFull,
    quota: u64,
    /// Length and time of each message that anybody waits for.
    messages: BTreeMap<u64, (u64, i64)>,
    /// The same of each that waits to be judged.
    held: BTreeMap<u64, (u64, i64)>,
    consumers: BTreeMap<usize, Consumer>,
}

#[derive(Clone, Default)]
struct Consumer {
    owed: BTreeSet<u64>,
    parked: bool,
    connected: bool,
    /// What its connection has and did not acknowledge.
    hand: BTreeSet<Handed>,
    /// How much was missed, by the id of the newest message that it stands for.
    gaps: BTreeMap<u64, u64>,
}

/// An id, and whether it is that of a gap.
type Handed = (u64, bool);

impl Consumer {
    /// Messages up to `id` are gone.
    fn miss(&mut self, id: u64, count: u64) {
        let open = self.gaps.last_key_value().map(|(id, _)| *id).filter(|id| !self.hand.contains(&(*id, true)));
        let (before, missed) = open.and_then(|open| self.gaps.remove_entry(&open)).unwrap_or_default();
        self.gaps.insert(before.max(id), missed + count);
    }
}

impl Topic {
    fn new() -> Self {
        Self {
            on_full: OnFull::Reject,
            quota: super::tests::QUOTA,
            messages: BTreeMap::new(),
            held: BTreeMap::new(),
            consumers: BTreeMap::new(),
        }
    }

    fn is_heard(&self) -> bool {
        self.consumers.values().any(|consumer| !consumer.parked)
    }

    fn forget_unneeded(&mut self) {
        self.messages.retain(|id, _| self.consumers.values().any(|consumer| consumer.owed.contains(id)));
    }

    fn bytes(&self) -> u64 {
        self.messages.values().chain(self.held.values()).map(|(len, _)| len).sum()
    }

    fn oldest(&self) -> Option<(u64, i64)> {
        let firsts = [&self.messages, &self.held].into_iter().filter_map(BTreeMap::first_key_value);
        firsts.map(|(id, (_, at_ms))| (*id, *at_ms)).min()
    }

    /// The oldest go while there is a reason for it: of what one reason takes, each consumer is told at once.
    fn drop_oldest(&mut self, goes_on: impl Fn(&Self) -> bool) {
        let mut missed: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
        while goes_on(self)
            && let Some((id, _)) = self.oldest()
        {
            self.messages.remove(&id);
            let held = self.held.remove(&id).is_some();
            for (number, consumer) in &mut self.consumers {
                if consumer.owed.remove(&id) || held && !consumer.parked {
                    let (last, count) = missed.entry(*number).or_default();
                    (*last, *count) = (id, *count + 1);
                }
            }
        }
        for (number, (last, count)) in missed {
            self.consumers.get_mut(&number).unwrap().miss(last, count);
        }
    }

    fn append(&mut self, next_id: &mut u64, len: usize, now_ms: i64) {
        for consumer in self.consumers.values_mut().filter(|consumer| consumer.parked) {
            consumer.miss(0, 1);
        }
        if self.is_heard() {
            self.messages.insert(*next_id, (len as u64, now_ms));
            for consumer in self.consumers.values_mut().filter(|consumer| !consumer.parked) {
                consumer.owed.insert(*next_id);
            }
            *next_id += 1;
        }
    }

    /// False if there cannot be room for `need` bytes.
    fn make_room(&mut self, need: u64) -> bool {
        if self.bytes() + need > self.quota && (self.on_full == OnFull::Reject || need > self.quota) {
            return false;
        }
        while self.bytes() + need > self.quota {
            match self.on_full {
                OnFull::EvictOldest => self.drop_oldest(|topic| topic.bytes() + need > topic.quota),
                _ => {
                    let lagging = self.consumers.values_mut().filter(|consumer| !consumer.owed.is_empty());
                    let lagging = lagging.min_by_key(|consumer| consumer.owed.first().copied());
                    // Nobody frees what is held.
                    let Some(consumer) = lagging else { return false };
                    let owed = std::mem::take(&mut consumer.owed);
                    consumer.miss(*owed.last().unwrap(), owed.len() as u64);
                    consumer.parked = !consumer.connected;
                    self.forget_unneeded();
                }
            }
        }
        true
    }

    fn expire(&mut self, now_ms: i64) {
        self.drop_oldest(|topic| topic.oldest().is_some_and(|(_, at_ms)| at_ms + TTL_MS <= now_ms));
    }
}

struct Scene {
    dir: tempfile::TempDir,
    /// There but for the moment of a restart.
    gateway: Option<Gateway>,
    attached: BTreeMap<(usize, usize), Attached>,
    topics: [Topic; 2],
    next_id: u64,
}

fn topic_key(topic: usize) -> Arc<TopicKey> {
    key(&format!("t{topic}"))
}

fn name(consumer: usize) -> String {
    format!("c{consumer}")
}

impl Scene {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let gateway = Gateway::open_at(dir.path(), Clock::manual(NOW)).await;
        let gaps = Settings { gap_messages: Some(true), ..Settings::default() };
        gateway.writer.set_tenant("t".into(), gaps).await.unwrap();
        Self {
            dir,
            gateway: Some(gateway),
            attached: BTreeMap::new(),
            topics: [Topic::new(), Topic::new()],
            next_id: 1,
        }
    }

    fn gateway(&self) -> &Gateway {
        self.gateway.as_ref().unwrap()
    }

    async fn run(mut self, steps: Vec<Step>) -> Result<(), TestCaseError> {
        for step in steps {
            self.step(step).await?;
            self.check().await?;
        }
        self.attached.clear();
        self.gateway.take().unwrap().close().await;
        Ok(())
    }

    async fn step(&mut self, step: Step) -> Result<(), TestCaseError> {
        match step {
            Step::Append(requests) => self.append(requests).await?,
            Step::Release(topic, releases) => self.release(topic, releases).await,
            Step::Connect(topic, consumer) => self.connect(topic, consumer).await,
            Step::Disconnect(topic, consumer) => {
                if self.attached.remove(&(topic, consumer)).is_some() {
                    let consumer = self.topics[topic].consumers.get_mut(&consumer).unwrap();
                    (consumer.connected, consumer.hand) = (false, BTreeSet::new());
                }
            }
            Step::Claim(topic, consumer, most, index) => self.claim(topic, consumer, most, index).await?,
            Step::Unsubscribe(topic, consumer) => {
                let removed = self.gateway().writer.unsubscribe(topic_key(topic), &name(consumer)).await.unwrap();
                prop_assert_eq!(removed, self.topics[topic].consumers.remove(&consumer).is_some());
                self.attached.remove(&(topic, consumer));
                self.topics[topic].forget_unneeded();
                if self.topics[topic].consumers.is_empty() {
                    self.topics[topic].held.clear();
                }
            }
            Step::Policy(topic, on_full, quota) => {
                let settings = Settings { quota_bytes: Some(quota), on_full: Some(on_full), ..Settings::default() };
                self.gateway().writer.set_topic(topic_key(topic), settings).await.unwrap();
                (self.topics[topic].on_full, self.topics[topic].quota) = (on_full, quota);
            }
            Step::Pass(ms) => self.gateway().clock.advance(ms),
            Step::Restart => {
                self.attached.clear();
                for consumer in self.topics.iter_mut().flat_map(|topic| topic.consumers.values_mut()) {
                    (consumer.connected, consumer.hand) = (false, BTreeSet::new());
                }
                let clock = self.gateway().clock.clone();
                self.gateway.take().unwrap().close().await;
                self.gateway = Some(Gateway::open_at(self.dir.path(), clock).await);
            }
        }
        Ok(())
    }

    async fn append(&mut self, requests: Vec<Vec<(usize, usize, bool)>>) -> Result<(), TestCaseError> {
        let record = |(topic, len, held): &(usize, usize, bool)| Record {
            held: held.then(|| super::tests::held(7)),
            ..record(&topic_key(*topic), *len)
        };
        let change = |request: &Vec<_>| records(request.iter().map(record).collect());
        let (changes, answers): (Vec<_>, Vec<_>) = requests
            .iter()
            .map(|request| {
                let (answer, result) = oneshot::channel();
                ((change(request), answer), result)
            })
            .unzip();
        self.gateway().writer.changes(changes, None).await;
        for (request, answer) in requests.into_iter().zip(answers) {
            let answer = answer.await.unwrap();
            let mut after = self.topics.clone();
            let mut fits = true;
            for topic in (0..2).filter(|topic| self.topics[*topic].is_heard()) {
                let need = request.iter().filter(|(t, ..)| *t == topic).map(|(_, len, _)| *len as u64).sum();
                fits = fits && (need == 0 || after[topic].make_room(need));
            }
            prop_assert_eq!(answer.is_ok(), fits, "{:?}", answer);
            if !fits {
                continue;
            }
            self.topics = after;
            let now_ms = self.gateway().clock.now_ms();
            for (topic, len, held) in request {
                let topic = &mut self.topics[topic];
                if held && topic.is_heard() {
                    topic.held.insert(self.next_id, (len as u64, now_ms));
                    self.next_id += 1;
                } else {
                    topic.append(&mut self.next_id, len, now_ms);
                }
            }
        }
        Ok(())
    }

    async fn release(&mut self, topic: usize, releases: Vec<Option<usize>>) {
        let Some(known) = self.gateway().topics.get(&topic_key(topic)) else { return };
        let now_ms = self.gateway().clock.now_ms();
        let mut commands = Vec::new();
        for (id, len) in self.topics[topic].held.clone().into_keys().zip(releases) {
            commands.push(Release { id, body: len.map(|len| vec![b'y'; len].into()) });
            self.topics[topic].held.remove(&id);
            if let Some(len) = len {
                self.topics[topic].append(&mut self.next_id, len, now_ms);
            }
        }
        self.gateway().writer.release(known.clone(), commands.clone()).await.unwrap();
        // What is gone already is not released again.
        self.gateway().writer.release(known, commands).await.unwrap();
    }

    async fn connect(&mut self, topic: usize, consumer: usize) {
        if !self.attached.contains_key(&(topic, consumer)) {
            let attached = self.gateway().attach(&topic_key(topic), &name(consumer)).await.unwrap();
            self.attached.insert((topic, consumer), attached);
            let consumer = self.topics[topic].consumers.entry(consumer).or_default();
            (consumer.connected, consumer.parked) = (true, false);
        }
    }

    async fn claim(&mut self, topic: usize, consumer: usize, most: usize, index: Index) -> Result<(), TestCaseError> {
        let Some(attached) = self.attached.get(&(topic, consumer)) else { return Ok(()) };
        let model = &self.topics[topic].consumers[&consumer];
        if most > 0 || model.hand.is_empty() {
            let mut expected: Vec<Handed> = model.owed.iter().map(|id| (*id, false)).collect();
            expected.extend(model.gaps.keys().map(|id| (*id, true)));
            expected.retain(|handed| !model.hand.contains(handed));
            expected.sort_unstable();
            expected.truncate(most);
            let ids = attached.claim(most, usize::MAX);
            let claimed: Vec<Handed> = ids.iter().map(|id| (message_id(*id), message_id(*id) != *id)).collect();
            prop_assert_eq!(&claimed, &expected);
            for ((_, body), (id, is_gap)) in
                attached.read(&ids, &self.gateway().bodies).await.unwrap().iter().zip(&claimed)
            {
                if *is_gap {
                    let missed = format!("{{\"missed\":{},", model.gaps[id]);
                    prop_assert!(String::from_utf8_lossy(body).contains(&missed), "{:?} is not {}", body, missed);
                }
            }
            self.topics[topic].consumers.get_mut(&consumer).unwrap().hand.extend(claimed);
            return Ok(());
        }
        let (id, is_gap) = *model.hand.iter().nth(index.index(model.hand.len())).unwrap();
        let handed = if is_gap { id | 1 << 63 } else { id };
        let settled = attached.settle(handed);
        self.gateway().writer.settle(attached.topic().clone(), name(consumer).as_str().into(), vec![handed]).await;
        let model = self.topics[topic].consumers.get_mut(&consumer).unwrap();
        model.hand.remove(&(id, is_gap));
        let owed = if is_gap { model.gaps.remove(&id).is_some() } else { model.owed.remove(&id) };
        prop_assert_eq!(settled, owed, "only what is owed can be acknowledged");
        self.topics[topic].forget_unneeded();
        Ok(())
    }

    /// Memory, disk and the model agree.
    async fn check(&mut self) -> Result<(), TestCaseError> {
        let Self { gateway: Some(gateway), topics, .. } = self else { unreachable!() };
        // Garbage goes with the next commit.
        for _ in 0..2 {
            gateway.writer.commit(Change::default()).await.unwrap();
        }
        let now_ms = gateway.clock.now_ms();
        for (index, topic) in topics.iter_mut().enumerate() {
            topic.expire(now_ms);
            let Some(figures) = gateway.topics.topic_figures(&topic_key(index)) else {
                prop_assert!(topic.consumers.is_empty());
                continue;
            };
            let row = gateway.topics.get(&topic_key(index)).unwrap().row();
            let sql = format!(
                "SELECT coalesce(json_group_array(id), '[]'), coalesce(sum(length(body)), 0) FROM msg WHERE topic = {row}"
            );
            let (ids, bytes): (String, i64) =
                sqlx::query_as(sqlx::AssertSqlSafe(sql)).fetch_one(&gateway.store).await.unwrap();
            let ids: BTreeSet<u64> = serde_json::from_str(&ids).unwrap();
            prop_assert_eq!(&ids, &topic.messages.keys().chain(topic.held.keys()).copied().collect());
            prop_assert_eq!((figures.bytes, figures.messages), (bytes.cast_unsigned(), ids.len() as u64));
            let held: Vec<_> = figures.held.values().map(|held| (held.messages, held.bytes)).collect();
            let expected = (topic.held.len() as u64, topic.held.values().map(|(len, _)| len).sum::<u64>());
            prop_assert_eq!(held, if topic.held.is_empty() { vec![] } else { vec![expected] });
            prop_assert_eq!(figures.bytes, topic.bytes());
            prop_assert_eq!(figures.consumers.len(), topic.consumers.len());
            for (figures, (consumer, model)) in figures.consumers.iter().zip(&topic.consumers) {
                prop_assert_eq!(&*figures.name, name(*consumer));
                let bytes: u64 = model.owed.iter().map(|id| topic.messages[id].0).sum();
                prop_assert_eq!(
                    (figures.backlog_messages, figures.backlog_bytes, figures.parked),
                    (model.owed.len() as u64, bytes, model.parked)
                );
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// What a consumer is owed is what it has not acknowledged and what was not dropped by the policy of its topic or for its
    /// age, in order, and gaps say how much that was; what is held is nobody's until it is released; bytes counted are bytes stored; a
    /// request is taken whole or not at all; nothing is kept that nobody waits for; and all of that holds over restarts.
    #[test]
    fn memory_disk_and_model_agree_whatever_goes(steps in prop::collection::vec(step(), 1..60)) {
        let scene = async { Scene::new().await.run(steps).await };
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(scene)?;
    }
}

// What was held and released without a message after it leaves no row that shows its id.
#[tokio::test]
async fn the_id_of_what_was_held_is_not_given_again() {
    let append = |held| Step::Append(vec![vec![(1, 1, held)]]);
    let steps = vec![Step::Connect(1, 0), append(true), Step::Release(1, vec![None]), Step::Restart, append(false)];
    Scene::new().await.run(steps).await.unwrap();
}
