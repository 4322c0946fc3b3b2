#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::path::Path;

use bytes::Bytes;
use proptest::prelude::*;
use sqlx::SqlitePool;

use super::*;
use crate::backlog::{BacklogLimits, OnFull, Policy, Topics};
use crate::consumer::Kind;
use crate::store::{Store, Value};

struct Gateway {
    writer: Writer,
    topics: Topics,
    task: tokio::task::JoinHandle<Result<(), StoreError>>,
    store: SqlitePool,
    clock: Clock,
}

const QUOTA: u64 = 1000;
const TTL: u64 = 100;

impl Gateway {
    async fn open(dir: &Path) -> Self {
        Self::open_at(dir, Clock::system()).await
    }

    async fn open_at(dir: &Path, clock: Clock) -> Self {
        let Store { writer: mut writing, readers } = Store::open(dir, 1 << 30).await.unwrap();
        let limits = BacklogLimits { quota_bytes: QUOTA, ttl_seconds: TTL, tail_bytes: 1 << 20, volatile_bytes: 100 };
        let ledger = Ledger::load(&mut writing, readers.clone(), limits, clock.clone()).await.unwrap();
        let topics = ledger.topics();
        let limits = ConsumerLimits { topics: 3, consumers: 2, group: GroupLimits { window: 10_000, members: 2 } };
        let (writer, task) = Writer::spawn(writing, ledger, clock.clone(), limits);
        Self { writer, topics, task, store: readers, clock }
    }

    async fn close(self) {
        self.writer.stop().await;
        self.task.await.unwrap().unwrap();
        self.store.close().await;
    }

    async fn attach(&self, topic: &Arc<TopicKey>, consumer: &str) -> Result<Attached, AttachError> {
        let (topic, consumer) = (topic.clone(), consumer.into());
        self.writer.attach(Connecting { topic, consumer, kind: Kind::Exclusive, member: "".into() }).await
    }

    async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.store).await.unwrap()
    }
}

fn key(name: &str) -> Arc<TopicKey> {
    Arc::new(TopicKey { tenant: "t".into(), name: name.into(), non_persistent: false })
}

fn record(topic: &Arc<TopicKey>, len: usize) -> Record {
    Record { topic: topic.clone(), slot: 7, body: Bytes::from(vec![b'x'; len]) }
}

fn records(list: Vec<Record>) -> Change {
    Change { records: list, ..Change::default() }
}

fn insert_user(name: &str) -> Change {
    let text = |text: &str| Value::Text(text.to_owned());
    let statement = Statement {
        sql: "INSERT INTO user(tenant, name, hash, roles) VALUES (?, ?, ?, ?)",
        values: vec![text("t"), text(name), text(""), text("")],
    };
    Change { statements: vec![statement], ..Change::default() }
}

#[tokio::test]
async fn one_poisoned_command_among_64() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open(dir.path()).await;
    gateway.writer.commit(insert_user("taken")).await.unwrap();
    let (changes, answers): (Vec<_>, Vec<_>) = (0..64)
        .map(|n| {
            let (answer, result) = oneshot::channel();
            let name = if n == 40 { "taken".to_owned() } else { format!("user{n}") };
            ((insert_user(&name), answer), result)
        })
        .unzip();
    gateway.writer.changes(changes, None).await;
    for (n, answer) in answers.into_iter().enumerate() {
        let expected = if n == 40 { Err(Refused::Failed) } else { Ok(()) };
        assert_eq!(answer.await.unwrap(), expected, "command {n}");
    }
    assert_eq!(gateway.count("SELECT count(*) FROM user").await, 64);
    gateway.close().await;
}

#[tokio::test]
async fn a_full_topic_takes_nothing_of_a_request_but_its_objects() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open(dir.path()).await;
    let (full, free) = (key("full"), key("free"));
    let consumer = gateway.attach(&full, "c").await.unwrap();
    let _other = gateway.attach(&free, "c").await.unwrap();
    gateway.writer.commit(records(vec![record(&full, 900)])).await.unwrap();
    let change = Change {
        measurements: vec![ObjectRow {
            id: 1,
            tenant: "t".into(),
            source: 2,
            kind: "k".into(),
            time_ms: 3,
            created_ms: 4,
            body: Bytes::from_static(b"\"a\":1"),
        }],
        ..records(vec![record(&free, 10), record(&full, 60), record(&full, 60)])
    };
    let Err(Refused::Rejected(refusal)) = gateway.writer.commit(change).await else { panic!("it was not refused") };
    assert_eq!((&refusal.topic, refusal.used, refusal.quota), (&full, 960, QUOTA));
    assert_eq!(&*refusal.holder.unwrap().consumer, "c");
    assert_eq!(gateway.count("SELECT count(*) FROM measurement").await, 1);
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 1);
    // What is not to be refused is left out of the topic alone.
    let change = Change { skip_full: true, ..records(vec![record(&full, 101), record(&free, 10), record(&full, 101)]) };
    gateway.writer.commit(change).await.unwrap();
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 2);
    // Up to the last byte there is room, and an acknowledgement makes more.
    gateway.writer.commit(records(vec![record(&full, 100)])).await.unwrap();
    assert!(gateway.writer.commit(records(vec![record(&full, 1)])).await.is_err());
    let first = consumer.claim(1, 1);
    gateway.writer.settle(consumer.topic().clone(), "c".into(), first).await;
    gateway.writer.commit(records(vec![])).await.unwrap();
    gateway.writer.commit(records(vec![record(&full, 900)])).await.unwrap();
    gateway.close().await;
}

#[tokio::test]
async fn consumers_and_topics_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open(dir.path()).await;
    let mut held = Vec::new();
    for consumer in ["a", "b"] {
        held.push(gateway.attach(&key("one"), consumer).await.unwrap());
    }
    let refusal = |result: Result<Attached, AttachError>| result.err().map(|error| error.to_string());
    assert_eq!(refusal(gateway.attach(&key("one"), "c").await).unwrap(), "too many consumers");
    assert_eq!(refusal(gateway.attach(&key("one"), "a").await).unwrap(), "the consumer is connected already");
    for topic in ["two", "three"] {
        held.push(gateway.attach(&key(topic), "a").await.unwrap());
    }
    assert_eq!(refusal(gateway.attach(&key("four"), "a").await).unwrap(), "too many topics");
    // The last consumer of a topic takes the topic with it.
    assert!(gateway.writer.unsubscribe(key("two"), "a").await.unwrap());
    assert!(!gateway.writer.unsubscribe(key("two"), "a").await.unwrap());
    gateway.attach(&key("four"), "a").await.unwrap();
    gateway.close().await;
}

#[tokio::test]
async fn what_an_unsubscribed_consumer_alone_waited_for_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open(dir.path()).await;
    let topic = key("s");
    let gone = gateway.attach(&topic, "gone").await.unwrap();
    for _ in 0..5 {
        gateway.writer.commit(records(vec![record(&topic, 10)])).await.unwrap();
    }
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 5);
    assert!(gateway.writer.unsubscribe(topic.clone(), "gone").await.unwrap());
    gone.kicked().cancelled().await;
    assert!(gone.claim(9, 1000).is_empty(), "another one of that name would have another backlog");
    gateway.writer.commit(insert_user("next")).await.unwrap();
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 0);
    gateway.close().await;
}

#[tokio::test]
async fn settings_are_in_force_at_once_and_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open(dir.path()).await;
    let topic = key("s");
    let _consumer = gateway.attach(&topic, "c").await.unwrap();
    let of = |quota_bytes| Settings { quota_bytes: Some(quota_bytes), ..Settings::default() };
    let tenant = Settings { ttl_seconds: Some(5), on_full: Some(OnFull::Park), gap_messages: Some(true), ..of(100) };
    gateway.writer.set_tenant("t".into(), tenant).await.unwrap();
    assert!(gateway.writer.commit(records(vec![record(&topic, 101)])).await.is_err());
    gateway.writer.set_topic(topic.clone(), of(101)).await.unwrap();
    gateway.writer.commit(records(vec![record(&topic, 101)])).await.unwrap();
    gateway.writer.set_topic(key("later"), of(7)).await.unwrap();
    gateway.writer.set_topic(key("never"), of(7)).await.unwrap();
    gateway.writer.set_topic(key("never"), Settings::default()).await.unwrap();
    // Less than what waits: nothing is dropped, and nothing more fits.
    gateway.writer.set_topic(topic.clone(), of(10)).await.unwrap();
    assert_eq!(gateway.topics.get(&topic).unwrap().bytes(), 101);
    assert!(gateway.writer.commit(records(vec![record(&topic, 1)])).await.is_err());
    gateway.close().await;

    let gateway = Gateway::open(dir.path()).await;
    assert_eq!(gateway.topics.tenant_settings(&"t".into()), tenant);
    assert_eq!(gateway.topics.topic_settings(&topic), of(10));
    let policy = Policy { quota_bytes: 10, ttl_seconds: 5, on_full: OnFull::Park, gap_messages: true };
    assert_eq!(gateway.topics.policy(&topic), policy);
    assert_eq!(gateway.topics.topic_figures(&topic).unwrap().policy, policy);
    assert_eq!(gateway.topics.policy(&key("later")).quota_bytes, 7);
    assert_eq!(gateway.topics.policy(&key("never")).quota_bytes, 100);
    gateway.close().await;
}

#[tokio::test]
async fn figures_tell_what_each_consumer_did() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open(dir.path()).await;
    let topic = key("s");
    let (fast, slow) = (gateway.attach(&topic, "fast").await.unwrap(), gateway.attach(&topic, "slow").await.unwrap());
    for len in [10, 20, 30] {
        gateway.writer.commit(records(vec![record(&topic, len)])).await.unwrap();
    }
    for id in fast.claim(9, 1000) {
        assert!(fast.settle(id));
        gateway.writer.settle(fast.topic().clone(), "fast".into(), vec![id]).await;
    }
    let ids = slow.claim(2, 1000);
    drop(slow);
    let slow = gateway.attach(&topic, "slow").await.unwrap();
    assert_eq!(slow.claim(9, 1000)[..2], ids);
    assert!(slow.settle(ids[1]));
    gateway.writer.settle(slow.topic().clone(), "slow".into(), vec![ids[1]]).await;
    gateway.writer.commit(Change::default()).await.unwrap();

    let figures = gateway.topics.topic_figures(&topic).unwrap();
    assert_eq!((figures.messages, figures.bytes, figures.appended, figures.delivered), (2, 40, 3, 8));
    assert!(figures.rate_in > 0.0 && figures.rate_out > figures.rate_in);
    let oldest = figures.oldest_age_ms.unwrap();
    assert!(oldest < 60_000 && figures.expires_in_ms == Some(TTL * 1_000 - oldest));
    let [fast, slow_now] = &figures.consumers[..] else { unreachable!() };
    assert_eq!((&*fast.name, fast.clients, fast.backlog_messages, fast.backlog_bytes), ("fast", 1, 0, 0));
    assert_eq!((fast.delivered, fast.redelivered, fast.acknowledged, fast.oldest_age_ms), (3, 0, 3, None));
    assert_eq!((slow_now.backlog_messages, slow_now.backlog_bytes), (2, 40));
    assert_eq!((slow_now.delivered, slow_now.redelivered, slow_now.acknowledged), (5, 2, 1));
    assert!(slow_now.oldest_age_ms.is_some() && slow_now.last_ack_ms.is_some());
    drop(slow);
    gateway.close().await;

    let gateway = Gateway::open(dir.path()).await;
    let figures = &gateway.topics.figures(Some(&"t".into()))[0];
    assert_eq!((figures.messages, figures.bytes, figures.appended), (2, 40, 0));
    let [fast, slow] = &figures.consumers[..] else { unreachable!() };
    assert_eq!((fast.clients, fast.backlog_messages, fast.backlog_bytes), (0, 0, 0));
    assert_eq!((slow.clients, slow.backlog_messages, slow.backlog_bytes), (0, 2, 40));
    let before = slow_now.last_ack_ms.unwrap();
    assert!((before..before + 60_000).contains(&slow.last_ack_ms.unwrap()), "when it was committed");
    assert!(gateway.topics.figures(Some(&"other".into())).is_empty());
    gateway.close().await;
}

/// `count` messages of ten bytes.
async fn append(gateway: &Gateway, topic: &Arc<TopicKey>, count: usize) {
    gateway.writer.commit(records(vec![record(topic, 10); count])).await.unwrap();
}

const NOW: i64 = 1_800_000_000_000;

#[tokio::test]
async fn messages_past_their_time_to_live_go_for_everybody_and_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open_at(dir.path(), Clock::manual(NOW)).await;
    let topic = key("s");
    let consumer = gateway.attach(&topic, "c").await.unwrap();
    drop(gateway.attach(&topic, "away").await.unwrap());
    append(&gateway, &topic, 3).await;
    gateway.clock.advance(60_000);
    append(&gateway, &topic, 2).await;
    let ids = consumer.claim(9, 1000);
    assert!(consumer.settle(ids[1]));
    gateway.writer.settle(consumer.topic().clone(), "c".into(), vec![ids[1]]).await;

    gateway.clock.advance(i64::try_from(TTL).unwrap() * 1_000 - 60_000 - 1);
    gateway.writer.commit(Change::default()).await.unwrap();
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 5, "a moment too early");
    gateway.clock.advance(1_001);
    gateway.writer.commit(Change::default()).await.unwrap();
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 2);
    assert!(!consumer.settle(ids[0]), "a late acknowledgement is ignored");
    assert!(consumer.settle(ids[3]));
    gateway.writer.settle(consumer.topic().clone(), "c".into(), vec![ids[0], ids[3]]).await;
    gateway.writer.commit(Change::default()).await.unwrap();
    let figures = gateway.topics.topic_figures(&topic).unwrap();
    assert_eq!((figures.messages, figures.bytes), (2, 20));
    let backlogs: Vec<_> = figures.consumers.iter().map(|c| (c.backlog_messages, c.backlog_bytes)).collect();
    assert_eq!(backlogs, [(2, 20), (1, 10)]);
    drop(consumer);
    gateway.close().await;

    // The time of day counts over a restart.
    let gateway = Gateway::open_at(dir.path(), Clock::manual(NOW + 160_000 + 1)).await;
    assert!(gateway.attach(&topic, "away").await.unwrap().claim(9, 1000).is_empty());
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 0);
    assert_eq!(gateway.topics.topic_figures(&topic).unwrap().bytes, 0);
    gateway.close().await;
}

#[tokio::test]
async fn too_old_messages_go_a_thousand_at_a_time_and_a_quiet_writer_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open_at(dir.path(), Clock::manual(NOW)).await;
    let quota = Settings { quota_bytes: Some(1 << 20), ..Settings::default() };
    gateway.writer.set_tenant("t".into(), quota).await.unwrap();
    for name in ["a", "b"] {
        drop(gateway.attach(&key(name), "c").await.unwrap());
        append(&gateway, &key(name), 1_400).await;
    }
    gateway.clock.advance(200_000);
    gateway.writer.commit(Change::default()).await.unwrap();
    let left = gateway.topics.figures(None).iter().map(|topic| topic.messages).sum::<u64>();
    assert!(
        (800..=1_800).contains(&left),
        "{left} of 2800 are left: a thousand in this commit, or in the next one, too"
    );
    let mut rounds = 0;
    while gateway.count("SELECT count(*) FROM msg").await > 0 {
        rounds += 1;
        assert!(rounds < 500, "nobody deletes the rest");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    gateway.close().await;
}

#[tokio::test]
async fn a_clock_that_jumps_takes_no_message_away_and_keeps_none() {
    let dir = tempfile::tempdir().unwrap();
    const YEARS: i64 = 10 * 365 * 86_400_000;
    let topic = key("s");
    let mut wall_ms = NOW;
    let mut gateway = Gateway::open_at(dir.path(), Clock::manual(wall_ms)).await;
    drop(gateway.attach(&topic, "c").await.unwrap());
    append(&gateway, &topic, 1).await;
    for jump in [YEARS, -YEARS, -NOW, NOW] {
        gateway.clock.jump(jump);
        gateway.clock.advance(2_000);
        wall_ms += jump + 2_000;
        gateway.writer.commit(Change::default()).await.unwrap();
        gateway.close().await;
        gateway = Gateway::open_at(dir.path(), Clock::manual(wall_ms)).await;
        gateway.writer.commit(Change::default()).await.unwrap();
        assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 1, "{jump}");
    }
    let age = gateway.topics.topic_figures(&topic).unwrap().oldest_age_ms.unwrap();
    assert_eq!(age, 8_000);
    gateway.clock.jump(-YEARS);
    gateway.clock.advance(100_000);
    gateway.writer.commit(Change::default()).await.unwrap();
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 0);
    gateway.close().await;
}

#[derive(Clone, Debug)]
enum Step {
    Append(u8, usize),
    Settle(u8, u8, prop::sample::Index),
    Unsubscribe(u8, u8),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u8..2, 1usize..200).prop_map(|(topic, len)| Step::Append(topic, len)),
        8 => (0u8..2, 0u8..2, any::<prop::sample::Index>()).prop_map(|(t, c, i)| Step::Settle(t, c, i)),
        1 => (0u8..2, 0u8..2).prop_map(|(topic, consumer)| Step::Unsubscribe(topic, consumer)),
        1 => Just(Step::Restart),
    ]
}

/// What each consumer has not acknowledged, in order.
type Model = BTreeMap<(u8, u8), Vec<u64>>;

async fn run_steps(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let dir = tempfile::tempdir().unwrap();
    let mut gateway = Gateway::open(dir.path()).await;
    let mut model = Model::new();
    for step in steps {
        let keys: Vec<_> = (0..2u8).map(|topic| key(&format!("t{topic}"))).collect();
        match step {
            Step::Append(topic, len) => {
                if gateway.writer.commit(records(vec![record(&keys[topic as usize], len)])).await.is_ok() {
                    let id = newest_id(&gateway).await;
                    for ((_, _), waiting) in model.iter_mut().filter(|((t, _), _)| *t == topic) {
                        waiting.push(id);
                    }
                }
            }
            Step::Settle(topic, consumer, index) => {
                let name = format!("c{consumer}");
                let attached = gateway.attach(&keys[topic as usize], &name).await.unwrap();
                let waiting = model.entry((topic, consumer)).or_default();
                if !waiting.is_empty() {
                    let id = waiting.remove(index.index(waiting.len()));
                    gateway.writer.settle(attached.topic().clone(), name.as_str().into(), vec![id, id]).await;
                    gateway.writer.commit(Change::default()).await.unwrap();
                }
            }
            Step::Unsubscribe(topic, consumer) => {
                let removed =
                    gateway.writer.unsubscribe(keys[topic as usize].clone(), &format!("c{consumer}")).await.unwrap();
                prop_assert_eq!(removed, model.remove(&(topic, consumer)).is_some());
            }
            Step::Restart => {
                gateway.close().await;
                gateway = Gateway::open(dir.path()).await;
            }
        }
        check(&gateway, &model).await?;
    }
    gateway.close().await;
    Ok(())
}

async fn newest_id(gateway: &Gateway) -> u64 {
    gateway.count("SELECT coalesce(max(id), 0) FROM msg").await.cast_unsigned()
}

/// Memory, disk and the model agree.
async fn check(gateway: &Gateway, model: &Model) -> Result<(), TestCaseError> {
    // Garbage goes with the next commit.
    gateway.writer.commit(insert_user(&unique())).await.unwrap();
    for ((topic, consumer), waiting) in model {
        let name = format!("c{consumer}");
        let attached = gateway.attach(&key(&format!("t{topic}")), &name).await.unwrap();
        prop_assert_eq!(&attached.claim(usize::MAX, usize::MAX), waiting);
        let sql = format!("SELECT coalesce(sum(length(body)), 0) FROM msg WHERE topic = {}", attached.topic().row());
        let on_disk: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(&gateway.store).await.unwrap();
        let figures = gateway.topics.topic_figures(attached.topic().key()).unwrap();
        prop_assert_eq!(figures.bytes, on_disk.cast_unsigned());
        let consumer = figures.consumers.iter().find(|consumer| *consumer.name == *name).unwrap();
        prop_assert_eq!(consumer.backlog_messages, waiting.len() as u64);
        let ids = serde_json::to_string(waiting).unwrap();
        let bytes: i64 = sqlx::query_scalar(
            "SELECT coalesce(sum(length(body)), 0) FROM msg WHERE id IN (SELECT value FROM json_each(?))",
        )
        .bind(ids)
        .fetch_one(&gateway.store)
        .await
        .unwrap();
        prop_assert_eq!(consumer.backlog_bytes, bytes.cast_unsigned());
    }
    let needed: std::collections::BTreeSet<_> = model.values().flatten().collect();
    prop_assert_eq!(gateway.count("SELECT count(*) FROM msg").await, i64::try_from(needed.len()).unwrap());
    Ok(())
}

fn unique() -> String {
    let mut bytes = [0; 8];
    aws_lc_rs::rand::fill(&mut bytes).unwrap();
    format!("{bytes:?}")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Appends, acknowledgements in any order, consumers that come and go, restarts: what a consumer is owed is what it has
    /// not acknowledged, in order; bytes counted are bytes stored; nothing is kept that nobody waits for.
    #[test]
    fn memory_disk_and_model_agree(steps in prop::collection::vec(step(), 1..40)) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run_steps(steps))?;
    }
}
