#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use bytes::Bytes;
use sqlx::SqlitePool;

use super::*;
use crate::backlog::{BacklogLimits, Bodies, Held, Holder, OnFull, Policy, Topics};
use crate::consumer::Kind;
use crate::message::Api;
use crate::store::{Store, Value};

pub(super) struct Gateway {
    pub(super) writer: Writer,
    pub(super) topics: Topics,
    task: tokio::task::JoinHandle<Result<(), StoreError>>,
    pub(super) bodies: Bodies,
    pub(super) store: SqlitePool,
    pub(super) clock: Clock,
}

pub(super) const QUOTA: u64 = 1000;
pub(super) const TTL: u64 = 100;

impl Gateway {
    async fn open(dir: &Path) -> Self {
        Self::open_at(dir, Clock::system()).await
    }

    pub(super) async fn open_at(dir: &Path, clock: Clock) -> Self {
        let Store { writer: mut writing, readers, .. } =
            Store::open(dir, &crate::config::Store::default()).await.unwrap();
        let limits = BacklogLimits { quota_bytes: QUOTA, ttl_seconds: TTL, tail_bytes: 1 << 20, volatile_bytes: 100 };
        let ledger = Ledger::load(&mut writing, readers.clone(), limits, clock.clone()).await.unwrap();
        let (topics, bodies) = (ledger.topics(), ledger.bodies());
        let limits = ConsumerLimits { topics: 3, consumers: 3, group: GroupLimits { window: 10_000, members: 2 } };
        let (writer, task) = Writer::spawn(writing, ledger, clock.clone(), limits);
        Self { writer, topics, task, bodies, store: readers, clock }
    }

    pub(super) async fn close(self) {
        self.writer.stop().await;
        self.task.await.unwrap().unwrap();
        self.store.close().await;
    }

    pub(super) async fn attach(&self, topic: &Arc<TopicKey>, consumer: &str) -> Result<Attached, AttachError> {
        let (topic, consumer) = (topic.clone(), consumer.into());
        self.writer.attach(Connecting { topic, consumer, kind: Kind::Exclusive, member: "".into() }).await
    }

    async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.store).await.unwrap()
    }
}

pub(super) fn key(name: &str) -> Arc<TopicKey> {
    Arc::new(TopicKey { tenant: "t".into(), name: name.into(), non_persistent: false })
}

pub(super) fn record(topic: &Arc<TopicKey>, len: usize) -> Record {
    Record { topic: topic.clone(), slot: 7, body: Bytes::from(vec![b'x'; len]), held: None }
}

pub(super) fn held(subscription: u64) -> Held {
    Held { subscription, step: 0, api: Api::Measurements, kind: None, time: "".into() }
}

pub(super) fn records(list: Vec<Record>) -> Change {
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
    assert_eq!((&refusal.topic, refusal.used, refusal.quota, refusal.need), (&full, 900, QUOTA, 120));
    assert!(matches!(refusal.holder.unwrap(), Holder::Consumer { name, .. } if &*name == "c"));
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
    for consumer in ["a", "b", "c"] {
        held.push(gateway.attach(&key("one"), consumer).await.unwrap());
    }
    let refusal = |result: Result<Attached, AttachError>| result.err().map(|error| error.to_string());
    assert_eq!(refusal(gateway.attach(&key("one"), "d").await).unwrap(), "too many consumers");
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
    let lower = Settings { on_full: Some(OnFull::Reject), ..of(10) };
    gateway.writer.set_topic(topic.clone(), lower).await.unwrap();
    assert_eq!(gateway.topics.get(&topic).unwrap().bytes(), 101);
    assert!(gateway.writer.commit(records(vec![record(&topic, 1)])).await.is_err());
    gateway.close().await;

    let gateway = Gateway::open(dir.path()).await;
    assert_eq!(gateway.topics.tenant_settings(&"t".into()), tenant);
    assert_eq!(gateway.topics.topic_settings(&topic), lower);
    let policy = Policy { quota_bytes: 10, ttl_seconds: 5, on_full: OnFull::Reject, gap_messages: true };
    assert_eq!(gateway.topics.policy(&topic), policy);
    assert_eq!(gateway.topics.topic_figures(&topic).unwrap().policy, policy);
    assert_eq!(gateway.topics.policy(&key("later")), Policy { quota_bytes: 7, on_full: OnFull::Park, ..policy });
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

pub(super) const NOW: i64 = 1_800_000_000_000;

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

fn policy(on_full: OnFull) -> Settings {
    Settings { quota_bytes: Some(100), on_full: Some(on_full), ..Settings::default() }
}

async fn acknowledge(gateway: &Gateway, consumer: &Attached, count: usize) {
    let ids = consumer.claim(count, 1000);
    assert_eq!(ids.len(), count);
    assert!(ids.iter().all(|id| consumer.settle(*id)));
    gateway.writer.settle(consumer.topic().clone(), consumer.consumer().into(), ids).await;
}

fn backlog(gateway: &Gateway, topic: &TopicKey) -> Vec<(u64, bool)> {
    let figures = gateway.topics.topic_figures(topic).unwrap();
    figures.consumers.iter().map(|consumer| (consumer.backlog_messages, consumer.parked)).collect()
}

#[tokio::test]
async fn under_evict_oldest_just_enough_goes_and_a_batch_may_push_out_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open(dir.path()).await;
    let (topic, other) = (key("s"), key("other"));
    gateway.writer.set_topic(topic.clone(), policy(OnFull::EvictOldest)).await.unwrap();
    let live = gateway.attach(&topic, "live").await.unwrap();
    drop(gateway.attach(&topic, "slow").await.unwrap());
    drop(gateway.attach(&other, "c").await.unwrap());
    append(&gateway, &topic, 10).await;
    acknowledge(&gateway, &live, 3).await;
    gateway.writer.commit(records(vec![record(&topic, 15)])).await.unwrap();
    assert_eq!(backlog(&gateway, &topic), [(8, false), (9, false)], "the live one had acknowledged what went");
    assert_eq!(gateway.topics.topic_figures(&topic).unwrap().bytes, 95);

    // Larger than the quota alone: nothing goes, and the other topic of the request gets nothing.
    let change = records(vec![record(&other, 10), record(&topic, 60), record(&topic, 41)]);
    assert!(matches!(gateway.writer.commit(change).await, Err(Refused::Rejected(_))));
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 9);

    // More than the quota in one batch: each request finds what came before it.
    let (changes, answers): (Vec<_>, Vec<_>) = (0..30)
        .map(|_| {
            let (answer, result) = oneshot::channel();
            ((records(vec![record(&topic, 10)]), answer), result)
        })
        .unzip();
    gateway.writer.changes(changes, None).await;
    for answer in answers {
        answer.await.unwrap().unwrap();
    }
    assert_eq!(backlog(&gateway, &topic), [(10, false), (10, false)]);
    assert_eq!(gateway.count("SELECT sum(length(body)) FROM msg").await, 100);
    assert_eq!(live.claim(99, 1000).len(), 10, "what was in flight and went leaves the window");
    drop(live);
    gateway.close().await;
}

#[tokio::test]
async fn under_park_who_lags_is_left_behind_until_it_connects() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open(dir.path()).await;
    let topic = key("s");
    gateway.writer.set_topic(topic.clone(), policy(OnFull::Park)).await.unwrap();
    let live = gateway.attach(&topic, "live").await.unwrap();
    drop(gateway.attach(&topic, "slow").await.unwrap());
    append(&gateway, &topic, 10).await;
    acknowledge(&gateway, &live, 9).await;
    append(&gateway, &topic, 2).await;
    assert_eq!(backlog(&gateway, &topic), [(3, false), (0, true)]);
    assert_eq!(gateway.topics.topic_figures(&topic).unwrap().bytes, 30, "only what somebody waits for");
    gateway.writer.commit(Change::default()).await.unwrap();
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 3);
    drop(live);
    gateway.close().await;

    let gateway = Gateway::open(dir.path()).await;
    assert_eq!(backlog(&gateway, &topic), [(3, false), (0, true)]);
    append(&gateway, &topic, 1).await;
    let slow = gateway.attach(&topic, "slow").await.unwrap();
    assert!(slow.claim(9, 1000).is_empty());
    append(&gateway, &topic, 1).await;
    assert_eq!(backlog(&gateway, &topic), [(5, false), (1, false)]);
    assert_eq!(slow.claim(9, 1000).len(), 1);
    // Now the other one lags most. It alone is not enough for seven: then the next, which is connected and goes on at once.
    append(&gateway, &topic, 7).await;
    assert_eq!(backlog(&gateway, &topic), [(0, true), (8, false)]);
    append(&gateway, &topic, 9).await;
    assert_eq!(backlog(&gateway, &topic), [(0, true), (9, false)]);
    assert_eq!(slow.claim(99, 1000).len(), 9);
    drop(slow);
    append(&gateway, &topic, 2).await;
    assert_eq!(backlog(&gateway, &topic), [(0, true), (0, true)], "nobody is left, nothing is stored");
    append(&gateway, &topic, 99 / 10).await;
    gateway.writer.commit(Change::default()).await.unwrap();
    assert_eq!(gateway.count("SELECT count(*) FROM msg").await, 0);
    gateway.close().await;
}

/// What waits for a connection that takes all: the lengths of messages, and what gap messages say.
async fn take(gateway: &Gateway, consumer: &Attached) -> (Vec<u64>, Vec<String>) {
    let ids = consumer.claim(99, 10_000);
    let bodies = consumer.read(&ids, &gateway.bodies).await.unwrap();
    assert_eq!(bodies.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids);
    let said = |(_, body): (u64, Bytes)| match std::str::from_utf8(&body).unwrap().strip_prefix("/t/gap/") {
        Some(gap) => {
            let (head, body) = gap.split_once("\n\n").unwrap();
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            let (from, to) = (body["from"].as_str().unwrap(), body["to"].as_str().unwrap());
            let seconds = |text| (crate::time::parse(text).unwrap() - NOW) / 1_000;
            let [missed, reason] = ["missed", "reason"].map(|name| body[name].to_string());
            format!("{} {missed} {reason} {}-{}", head.replace('\n', " "), seconds(from), seconds(to))
        }
        None => body.len().to_string(),
    };
    (ids, bodies.into_iter().map(said).collect())
}

async fn settle(gateway: &Gateway, consumer: &Attached, ids: &[u64]) {
    for id in ids {
        assert!(consumer.settle(*id));
    }
    gateway.writer.settle(consumer.topic().clone(), consumer.consumer().into(), ids.to_vec()).await;
    gateway.writer.commit(Change::default()).await.unwrap();
}

#[tokio::test]
async fn a_consumer_is_told_what_it_missed_before_what_follows() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open_at(dir.path(), Clock::manual(NOW)).await;
    let topic = key("s");
    let told = Settings { gap_messages: Some(true), ..policy(OnFull::EvictOldest) };
    gateway.writer.set_topic(topic.clone(), told).await.unwrap();
    let live = gateway.attach(&topic, "live").await.unwrap();
    drop(gateway.attach(&topic, "away").await.unwrap());
    for _ in 0..10 {
        append(&gateway, &topic, 1).await;
        gateway.clock.advance(1_000);
    }
    let (ids, _) = take(&gateway, &live).await;
    settle(&gateway, &live, &[ids[0], ids[2]]).await;
    append(&gateway, &topic, 4).await;
    // It had two of the four; the other one had none. What it has in flight and what is newer stay.
    let (gap, said) = take(&gateway, &live).await;
    assert_eq!(said, ["live CREATE 2 \"evicted\" 1-3", "10", "10", "10", "10"]);
    assert!(!live.settle(ids[3]), "of the message that is lost, late, and not of the gap in its place");
    // While it is in flight, the next one is another.
    append(&gateway, &topic, 2).await;
    let (next, said) = take(&gateway, &live).await;
    assert_eq!(said, ["live CREATE 2 \"evicted\" 4-5", "10", "10"]);
    settle(&gateway, &live, &[gap[0]]).await;
    assert_eq!(gateway.count("SELECT count(*) FROM gap").await, 2, "one of each consumer");
    assert_eq!(gateway.count("SELECT sum(length(body)) FROM msg").await, 100, "gaps count to no quota");
    drop(live);
    gateway.close().await;

    let gateway = Gateway::open_at(dir.path(), Clock::manual(NOW + 10_000)).await;
    let away = gateway.attach(&topic, "away").await.unwrap();
    let (ids, said) = take(&gateway, &away).await;
    assert_eq!(said[..2], ["away CREATE 6 \"evicted\" 0-5", "10"], "it grew until it was handed out");
    assert!(ids[1..].iter().all(|id| *id > crate::backlog::message_id(ids[0])), "ids increase");
    let live = gateway.attach(&topic, "live").await.unwrap();
    assert_eq!(take(&gateway, &live).await.0[0], next[0], "what is not acknowledged comes again");
    settle(&gateway, &away, &ids[..1]).await;
    // The time to live, too.
    gateway.clock.advance(1_000_000);
    gateway.writer.commit(Change::default()).await.unwrap();
    assert_eq!(take(&gateway, &away).await.1, ["away CREATE 10 \"expired\" 6-10"]);
    assert!(gateway.writer.unsubscribe(topic.clone(), "live").await.unwrap());
    assert_eq!(gateway.count("SELECT count(*) FROM gap").await, 1);
    drop((away, live));
    gateway.close().await;
}

#[tokio::test]
async fn who_was_left_behind_is_told_how_much_passed_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open_at(dir.path(), Clock::manual(NOW)).await;
    let topic = key("s");
    gateway.writer.set_topic(topic.clone(), policy(OnFull::Park)).await.unwrap();
    gateway.topics.listen_to(|topic| &*topic.name == "s");
    drop(gateway.attach(&topic, "away").await.unwrap());
    let live = gateway.attach(&topic, "live").await.unwrap();
    append(&gateway, &topic, 10).await;
    acknowledge(&gateway, &live, 10).await;
    gateway.clock.advance(5_000);
    append(&gateway, &topic, 2).await;
    gateway.clock.advance(5_000);
    append(&gateway, &topic, 1).await;
    drop(live);
    gateway.close().await;
    let gateway = Gateway::open_at(dir.path(), Clock::manual(NOW + 10_000)).await;
    gateway.topics.listen_to(|topic| &*topic.name == "s");
    append(&gateway, &topic, 1).await;
    let away = gateway.attach(&topic, "away").await.unwrap();
    append(&gateway, &topic, 1).await;
    assert_eq!(take(&gateway, &away).await.1, ["away CREATE 14 \"parked\" 0-10", "10"]);
    drop(away);
    gateway.close().await;
}

#[tokio::test]
async fn where_it_is_not_switched_on_nobody_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::open(dir.path()).await;
    let topic = key("s");
    gateway.writer.set_topic(topic.clone(), policy(OnFull::EvictOldest)).await.unwrap();
    let consumer = gateway.attach(&topic, "c").await.unwrap();
    append(&gateway, &topic, 10).await;
    append(&gateway, &topic, 10).await;
    assert_eq!(take(&gateway, &consumer).await.1, ["10"; 10]);
    assert_eq!(gateway.count("SELECT count(*) FROM gap").await, 0);
    drop(consumer);
    gateway.close().await;
}
