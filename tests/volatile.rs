//! Non-persistent topics (seed 000, "Persistent and non-persistent subscriptions").

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{Consumer, Frame, Gateway, eventually, forwarded, measurement, value_of};

const SILENCE: Duration = Duration::from_millis(300);

fn passing(topic: &str, device: &str) -> Value {
    let mut subscription = forwarded(topic, device);
    subscription["nonPersistent"] = json!(true);
    subscription
}

/// A gateway with a device whose measurements go to the non-persistent topic `Sub1`.
async fn line(config: &str) -> (Gateway, String) {
    let gateway = Gateway::with(config).await;
    let device = gateway.device("pump").await;
    let made = gateway.subscribe(&passing("Sub1", &device)).await;
    assert_eq!(made["nonPersistent"], true);
    (gateway, device)
}

async fn token(gateway: &Gateway, subscriber: &str, shared: bool) -> String {
    let request = json!({"subscription": "Sub1", "subscriber": subscriber, "nonPersistent": true, "shared": shared});
    gateway.token_of(&request).await
}

/// Connects as soon as the consumer's place is free.
async fn connect(gateway: &Gateway, subscriber: &str) -> Consumer {
    let token = token(gateway, subscriber, false).await;
    eventually("the place is free", async || gateway.consumer_with(&token).await.ok()).await
}

fn values(frames: &[Frame]) -> Vec<u64> {
    frames.iter().map(|frame| value_of(&frame.json())).collect()
}

async fn rows(gateway: &mut Gateway) -> Vec<i64> {
    gateway.stop().await;
    let mut database = gateway.database().await;
    let mut rows = Vec::new();
    for table in ["SELECT count(*) FROM msg", "SELECT count(*) FROM topic", "SELECT count(*) FROM consumer"] {
        rows.push(sqlx::query_scalar(table).fetch_one(&mut database).await.unwrap());
    }
    rows
}

// Seed 000, "Persistent and non-persistent subscriptions": "only buffered in memory".
#[tokio::test]
async fn messages_reach_whoever_is_connected_and_nothing_is_written() {
    let (mut gateway, device) = line("[consumer]\nwindow = 3").await;
    let (mut a, mut b) = (connect(&gateway, "subA").await, connect(&gateway, "subB").await);
    let mut posted = Vec::new();
    for value in 1..=5 {
        posted.push(gateway.measure(&device, "t", value).await);
    }
    let mut last_id = 0;
    for posted in &posted {
        let frame = a.receive().await;
        assert_eq!(
            (frame.description.as_str(), frame.action.as_str()),
            (&*format!("/edge/measurements/{device}"), "CREATE")
        );
        assert_eq!(frame.json(), *posted);
        assert!(frame.message_id() > last_id, "message ids increase");
        last_id = frame.message_id();
    }
    let first = b.take(3).await;
    assert!(b.is_silent_for(SILENCE).await, "the same window");
    b.ack(&first[1]).await;
    assert_eq!(values(&[b.next().await]), [4]);
    a.ping().await;
    gateway.restart().await;
    let mut a = connect(&gateway, "subA").await;
    gateway.measure(&device, "t", 6).await;
    let frame = a.next().await;
    assert_eq!(value_of(&frame.json()), 6);
    assert!(frame.message_id() > last_id, "after a restart, too");
    assert_eq!(rows(&mut gateway).await, [0, 0, 0]);
}

// Seed 000, "Persistent and non-persistent subscriptions": "They will start receiving notifications from the most recent
// message of the subscription, missing all other notifications that occurred during the connection outage […] even if other
// consumers are still receiving older messages".
#[tokio::test]
async fn a_consumer_begins_after_the_newest_message_at_each_connection() {
    let (gateway, device) = line("").await;
    gateway.measure(&device, "t", 1).await;
    let mut other = connect(&gateway, "other").await;
    gateway.measure(&device, "t", 2).await;
    let mut a = connect(&gateway, "subA").await;
    gateway.measure(&device, "t", 3).await;
    assert_eq!(values(&[a.next().await]), [3], "unacknowledged");
    a.close().await;
    gateway.measure(&device, "t", 4).await;
    let mut a = connect(&gateway, "subA").await;
    gateway.measure(&device, "t", 5).await;
    assert_eq!(values(&[a.next().await]), [5]);
    assert_eq!(values(&other.take(4).await), [2, 3, 4, 5]);
}

// Seed 000, "Creating subscriptions": "Subscriptions with the same subscription field value, but different nonPersistent values
// forward to two different topics"; so the key of a subscription has it, too.
#[tokio::test]
async fn the_persistent_topic_of_that_name_is_another_one() {
    let (gateway, device) = line("").await;
    let valve = gateway.device("valve").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    gateway.subscribe(&forwarded("Sub1", &valve)).await;
    for again in [passing("Sub1", &device), forwarded("Sub1", &device)] {
        gateway.post("/notification2/subscriptions", &again).await.error(409, "already exists");
    }
    let mut kept = gateway.consumer("Sub1", "subA").await;
    let mut passing = connect(&gateway, "subA").await;
    gateway.measure(&device, "t", 1).await;
    gateway.measure(&valve, "t", 2).await;
    assert_eq!(values(&kept.take(2).await), [1, 2]);
    assert_eq!(values(&[passing.next().await]), [1]);
    assert!(passing.is_silent_for(SILENCE).await);
    assert_eq!(gateway.unsubscribe(&token(&gateway, "subA", false).await).await.status, 200);
    assert_eq!(passing.closed().await, Some(1000));
    assert!(kept.is_silent_for(SILENCE).await, "still connected");
}

// `backlog.volatile_bytes`: the oldest go, counted; a producer never notices, even where no byte may be stored.
#[tokio::test]
async fn a_consumer_that_lags_loses_the_oldest_and_producers_never_see_an_error() {
    let (mut gateway, device) = line("[consumer]\nwindow = 2\n[backlog]\nquota_bytes = 1\nvolatile_bytes = 2000").await;
    let (mut slow, mut fast) = (connect(&gateway, "slow").await, connect(&gateway, "fast").await);
    let mut seen = Vec::new();
    for value in 1..=50 {
        gateway.measure(&device, "t", value).await;
        seen.push(fast.receive().await);
    }
    assert_eq!(values(&seen), (1..=50).collect::<Vec<_>>(), "who keeps up loses nothing");
    let first = slow.take(2).await;
    assert_eq!(values(&first), [1, 2], "handed out before they went");
    slow.ack(&first[0]).await;
    slow.ack(&first[1]).await;
    let mut rest = Vec::new();
    while rest.last() != Some(&50) {
        rest.push(value_of(&slow.receive().await.json()));
    }
    let gap = rest[0] - 3;
    assert!(gap > 20, "{rest:?}");
    assert_eq!(rest, (rest[0]..=50).collect::<Vec<_>>(), "what is left is whole");
    assert_eq!(gateway.metric("tidegate_messages_dropped_total").await, f64::from(u32::try_from(gap).unwrap()));
    assert_eq!(rows(&mut gateway).await, [0, 0, 0]);
}

#[tokio::test]
async fn a_message_larger_than_the_ring_still_arrives() {
    let (gateway, device) = line("[backlog]\nvolatile_bytes = 1").await;
    let mut consumer = connect(&gateway, "subA").await;
    for value in 1..=3 {
        gateway.measure(&device, "t", value).await;
        assert_eq!(values(&[consumer.receive().await]), [value]);
    }
}

// A request is all or nothing over all its topics: where the persistent one is full, the other gets nothing.
#[tokio::test]
async fn a_request_that_a_full_topic_refuses_passes_nowhere() {
    let (gateway, device) = line("[backlog]\nquota_bytes = 1").await;
    gateway.subscribe(&forwarded("Full", &device)).await;
    let mut consumer = connect(&gateway, "subA").await;
    gateway.measure(&device, "t", 1).await;
    let full = gateway.consumer("Full", "subA").await;
    gateway.post_measurement(&measurement(&device, "t", 2)).await.error(500, "Full");
    full.close().await;
    assert_eq!(gateway.unsubscribe(&gateway.token("Full", "subA").await).await.status, 200);
    gateway.measure(&device, "t", 3).await;
    assert_eq!(values(&consumer.take(2).await), [1, 3]);
}

#[tokio::test]
async fn clients_share_a_non_persistent_topic_and_take_over_from_each_other() {
    let gateway = Gateway::start().await;
    let mut devices = Vec::new();
    for _ in 0..12 {
        let device = gateway.device("pump").await;
        gateway.subscribe(&passing("Sub1", &device)).await;
        devices.push(device);
    }
    let token = token(&gateway, "crew", true).await;
    let (mut a, mut b) = (gateway.member(&token, "a").await.unwrap(), gateway.member(&token, "b").await.unwrap());
    assert_eq!(gateway.member(&token, "a").await.err(), Some(409));
    for (value, device) in (1..).zip(&devices) {
        gateway.measure(device, "t", value).await;
    }
    let mut of_a = Vec::new();
    while let Ok(Some(frame)) = tokio::time::timeout(SILENCE, a.try_next()).await {
        of_a.push(frame);
    }
    assert!(!of_a.is_empty() && of_a.len() < 12);
    let of_b = b.take(12 - of_a.len()).await;
    drop(a);
    let taken_over = b.take(of_a.len()).await;
    assert_eq!(values(&taken_over), values(&of_a));
    let mut all = values(&[of_a, of_b].concat());
    all.sort_unstable();
    assert_eq!(all, (1..=12).collect::<Vec<_>>());
}

// It exists only while it is connected.
#[tokio::test]
async fn a_consumer_of_a_non_persistent_topic_is_exclusive_and_gone_with_its_connection() {
    let (gateway, device) = line("[limits]\ntopics_per_tenant = 1").await;
    let token = token(&gateway, "subA", false).await;
    assert!(gateway.unsubscribe(&token).await.status >= 500, "never connected");
    let mut consumer = gateway.consumer_with(&token).await.unwrap();
    assert_eq!(gateway.consumer_with(&token).await.err(), Some(409));
    let persistent = gateway.token("Sub1", "subA").await;
    assert_eq!(gateway.consumer_with(&persistent).await.err(), Some(503), "the topic counts");
    consumer.send("unsubscribe_subscriber").await;
    assert_eq!(consumer.closed().await, Some(1000));
    let consumer = connect(&gateway, "subA").await;
    drop(consumer);
    eventually("it is gone", async || (gateway.unsubscribe(&token).await.status >= 500).then_some(())).await;
    gateway.consumer_with(&persistent).await.unwrap();
    gateway.measure(&device, "t", 1).await;
}

// `backlog.ttl_seconds` holds for what waits in memory, too.
#[tokio::test]
async fn what_waits_in_memory_grows_old() {
    let (gateway, device) = line("[consumer]\nwindow = 1\n[backlog]\nttl_seconds = 1").await;
    let mut slow = connect(&gateway, "slow").await;
    for value in 1..=3 {
        gateway.measure(&device, "t", value).await;
    }
    let first = slow.next().await;
    eventually("the others go", async || {
        (gateway.metric("tidegate_messages_dropped_total").await >= 2.0).then_some(())
    })
    .await;
    gateway.measure(&device, "t", 4).await;
    slow.ack(&first).await;
    assert_eq!(values(&[slow.next().await]), [4]);
}
