//! Shared consumers: clients that divide the messages of a topic by their source (seed 000, "Shared consumer tokens").

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use serde_json::json;

use crate::harness::{Consumer, Frame, Gateway, eventually, forwarded, measurement, upgrade, value_of};

const SILENCE: Duration = Duration::from_millis(300);

/// A gateway with `count` devices whose measurements go to the topic `Sub1`, and a token of its shared consumer `crew`.
struct Scene {
    gateway: Gateway,
    devices: Vec<String>,
    token: String,
}

impl Scene {
    async fn new(count: usize, config: &str) -> Self {
        let gateway = Gateway::with(config).await;
        let mut devices = Vec::new();
        for _ in 0..count {
            let device = gateway.device("pump").await;
            gateway.subscribe(&forwarded("Sub1", &device)).await;
            devices.push(device);
        }
        let token = gateway.shared_token("Sub1", "crew").await;
        Self { gateway, devices, token }
    }

    async fn member(&self, name: &str) -> Consumer {
        self.gateway.member(&self.token, name).await.unwrap()
    }

    /// One measurement of this value from each device.
    async fn measure(&self, value: u64) {
        let all: Vec<_> = self.devices.iter().map(|device| measurement(device, "t", value)).collect();
        self.gateway.post("/measurement/measurements", &json!({"measurements": all})).await.expect(201);
    }
}

fn source(frame: &Frame) -> String {
    frame.description.rsplit('/').next().unwrap().to_owned()
}

fn sources(frames: &[Frame]) -> BTreeSet<String> {
    frames.iter().map(source).collect()
}

/// The values of each source, in the order of their arrival.
fn by_source(frames: &[Frame]) -> BTreeMap<String, Vec<u64>> {
    let mut values: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for frame in frames {
        values.entry(source(frame)).or_default().push(value_of(&frame.json()));
    }
    values
}

/// Everything that comes until there is a pause; acknowledged if `ack`.
async fn everything(consumer: &mut Consumer, ack: bool) -> Vec<Frame> {
    let mut frames = Vec::new();
    while let Ok(Some(frame)) = tokio::time::timeout(SILENCE, consumer.try_next()).await {
        if ack {
            consumer.ack(&frame).await;
        }
        frames.push(frame);
    }
    frames
}

/// So many that each of two or three clients gets some.
const DEVICES: usize = 12;

// "Each consumer client receives a non-overlapping subset (share) of the notifications […] Collectively, the set receives all."
// "All notifications for a given id are delivered to the same consumer." "They all operate independently."
#[tokio::test]
async fn clients_divide_the_sources_and_every_other_consumer_gets_all_of_them() {
    let scene = Scene::new(DEVICES, "").await;
    let mut members = [scene.member("one").await, scene.member("two").await, scene.member("three").await];
    let mut exclusive = scene.gateway.consumer("Sub1", "alone").await;
    let others = scene.gateway.shared_token("Sub1", "others").await;
    let mut other = scene.gateway.consumer_with(&others).await.unwrap();
    for value in 1..=5 {
        scene.measure(value).await;
    }
    let mut seen = BTreeSet::new();
    for member in &mut members {
        let frames = everything(member, true).await;
        for (source, values) in by_source(&frames) {
            assert_eq!(values, [1, 2, 3, 4, 5], "all of {source}, in order");
            assert!(seen.insert(source), "in one share");
        }
    }
    assert_eq!(seen.len(), DEVICES);
    for consumer in [&mut exclusive, &mut other] {
        let frames = consumer.take(DEVICES * 5).await;
        assert!(by_source(&frames).values().all(|values| *values == [1, 2, 3, 4, 5]));
    }
    for member in members {
        member.close().await;
    }
    let mut again =
        eventually("the places are free", async || scene.gateway.member(&scene.token, "one").await.ok()).await;
    assert!(again.is_silent_for(SILENCE).await, "all is acknowledged");
}

// `decisions` 9, leave: what a member has not acknowledged goes to the others at once, in order, before what is newer.
#[tokio::test]
async fn what_a_client_leaves_unacknowledged_goes_to_the_others_in_order() {
    let scene = Scene::new(DEVICES, "").await;
    let (mut a, mut b) = (scene.member("a").await, scene.member("b").await);
    for value in 1..=3 {
        scene.measure(value).await;
    }
    let of_b = everything(&mut b, false).await;
    let of_a = everything(&mut a, true).await;
    let (sources_of_a, sources_of_b) = (sources(&of_a), sources(&of_b));
    assert!(!sources_of_a.is_empty() && !sources_of_b.is_empty() && sources_of_a.is_disjoint(&sources_of_b));
    // Of each source of b, the second message is acknowledged.
    for frame in of_b.iter().filter(|frame| value_of(&frame.json()) == 2) {
        b.ack(frame).await;
    }
    b.ping().await;
    scene.measure(4).await;
    // Gone without a goodbye.
    drop(b);
    let taken_over = everything(&mut a, true).await;
    for (source, values) in by_source(&taken_over) {
        let expected: &[u64] = if sources_of_b.contains(&source) { &[1, 3, 4] } else { &[4] };
        assert_eq!(values, expected, "{source}");
    }
    assert_eq!(sources(&taken_over).len(), DEVICES);
    let ids: HashMap<_, _> = of_b.iter().map(|frame| (&frame.body, frame.message_id())).collect();
    for frame in taken_over.iter().filter(|frame| ids.contains_key(&frame.body)) {
        assert_eq!(ids[&frame.body], frame.message_id(), "the same message, the same id");
    }
}

// `decisions` 9, join: a source moves only after its messages in flight are acknowledged or its old member is gone.
#[tokio::test]
async fn a_client_that_joins_gets_a_source_when_nothing_of_it_is_in_flight() {
    let scene = Scene::new(DEVICES, "").await;
    let mut a = scene.member("a").await;
    scene.measure(1).await;
    let in_flight = a.take(DEVICES).await;
    let mut b = scene.member("b").await;
    scene.measure(2).await;
    let stayed = sources(&everything(&mut a, false).await);
    assert!(!stayed.is_empty() && stayed.len() < DEVICES, "what does not move goes on");
    assert!(b.is_silent_for(SILENCE).await, "everything that moves is in flight");
    let moving: Vec<_> = in_flight.iter().filter(|frame| !stayed.contains(&source(frame))).collect();
    a.ack(moving[0]).await;
    let first = b.next().await;
    assert_eq!((source(&first), value_of(&first.json())), (source(moving[0]), 2), "one source has moved");
    assert!(b.is_silent_for(SILENCE).await);
    drop(a);
    let rest = everything(&mut b, false).await;
    for (source, values) in by_source(&rest) {
        let expected: &[u64] = if source == self::source(&first) { &[] } else { &[1, 2] };
        assert_eq!(values, expected, "{source}");
    }
    assert_eq!(sources(&rest).len(), DEVICES - 1);
}

// "To keep the messages from a given set of source ids 'sticky' to a specific consumer client".
#[tokio::test]
async fn a_name_keeps_its_sources_over_connections_and_restarts() {
    let mut scene = Scene::new(DEVICES, "").await;
    let mut shares: HashMap<&str, BTreeSet<String>> = HashMap::new();
    for (round, order) in [["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]].into_iter().enumerate() {
        let mut members = Vec::new();
        for name in order {
            members.push((name, scene.member(name).await));
        }
        scene.measure(round as u64).await;
        for (name, mut member) in members {
            let share = sources(&everything(&mut member, true).await);
            assert_eq!(*shares.entry(name).or_insert_with(|| share.clone()), share, "round {round}, {name}");
            member.close().await;
        }
        scene.gateway.restart().await;
    }
    assert_eq!(shares.values().map(BTreeSet::len).sum::<usize>(), DEVICES);
}

#[tokio::test]
async fn a_client_that_does_not_acknowledge_holds_up_its_own_sources_only() {
    let scene = Scene::new(DEVICES, "[consumer]\nwindow = 20").await;
    let (mut silent, mut busy) = (scene.member("a").await, scene.member("b").await);
    for value in 1..=30 {
        scene.measure(value).await;
    }
    let of_silent = everything(&mut silent, false).await;
    assert_eq!(of_silent.len(), 20, "a full window");
    let of_busy = by_source(&everything(&mut busy, true).await);
    assert!(of_busy.values().all(|values| *values == (1..=30).collect::<Vec<_>>()), "{of_busy:?}");
    for frame in &of_silent {
        silent.ack(frame).await;
    }
    let mut all = of_silent;
    all.extend(everything(&mut silent, true).await);
    let all = by_source(&all);
    assert!(all.values().all(|values| *values == (1..=30).collect::<Vec<_>>()), "{all:?}");
    assert_eq!(of_busy.len() + all.len(), DEVICES);
}

// `decisions` 9: at most 10,000 messages that one member holds up are looked beyond.
#[tokio::test]
async fn the_look_ahead_ends_at_10000_messages_until_the_silent_client_is_gone() {
    let scene = Scene::new(DEVICES, "").await;
    let (mut silent, mut busy) = (scene.member("a").await, scene.member("b").await);
    scene.measure(0).await;
    let held_up = everything(&mut silent, false).await;
    let of_silent = source(&held_up[0]);
    let of_busy = source(&everything(&mut busy, true).await[0]);
    let post = async |device: &str, values: std::ops::Range<u64>| {
        let all: Vec<_> = values.map(|value| measurement(device, "t", value)).collect();
        scene.gateway.post("/measurement/measurements", &json!({"measurements": all})).await.expect(201);
    };
    post(&of_silent, 1..5001).await;
    post(&of_busy, 1..2).await;
    assert_eq!(value_of(&busy.receive().await.json()), 1, "5,000 are looked beyond");
    post(&of_silent, 5001..10_001).await;
    post(&of_busy, 2..3).await;
    assert!(busy.is_silent_for(SILENCE).await, "10,000 are not");
    drop(silent);
    let mut newest: HashMap<String, u64> = HashMap::new();
    for _ in 0..held_up.len() + 10_001 {
        let frame = busy.receive().await;
        let value = value_of(&frame.json());
        assert!(newest.insert(source(&frame), value).is_none_or(|before| before < value));
    }
    assert_eq!((newest[&of_silent], newest[&of_busy]), (10_000, 2));
}

#[tokio::test]
async fn names_are_checked_and_nobody_gets_one_that_is_connected() {
    let scene = Scene::new(1, "[limits]\nclients_per_consumer = 3").await;
    let (gateway, token) = (&scene.gateway, &scene.token);
    let path = |name: &str| format!("/notification2/consumer/?token={token}&consumer={name}");
    for blank in ["", "%20", "+%09", "%0A"] {
        assert_eq!(upgrade(gateway.addr, &path(blank)).await, "HTTP/1.1 400 Bad Request", "{blank:?}");
    }
    for odd in ["a%00", "a%0Ab", "%7F", &"x".repeat(256)] {
        assert_eq!(upgrade(gateway.addr, &path(odd)).await, "HTTP/1.1 400 Bad Request", "{odd}");
    }
    gateway.get(&path("%20")).anonymous().await.error(400, "consumer");
    let first = scene.member("instance1").await;
    assert_eq!(upgrade(gateway.addr, &path("instance1")).await, "HTTP/1.1 409 Conflict");
    gateway.member(token, &"x".repeat(255)).await.unwrap().close().await;
    // Two without a name do not get into each other's way.
    let _two = [gateway.consumer_with(token).await.unwrap(), gateway.consumer_with(token).await.unwrap()];
    assert_eq!(gateway.member(token, "fourth").await.err(), Some(503), "limits.clients_per_consumer");
    first.close().await;
    eventually("the name is free", async || gateway.member(token, "instance1").await.ok()).await;
}

// Shared and exclusive do not mix while anybody is connected; then the next one decides, and goes on where the last one was.
#[tokio::test]
async fn a_subscriber_is_shared_or_exclusive_while_it_is_connected() {
    let scene = Scene::new(1, "").await;
    let gateway = &scene.gateway;
    let mut shared = scene.member("a").await;
    let exclusive = gateway.token("Sub1", "crew").await;
    assert_eq!(gateway.consumer_with(&exclusive).await.err(), Some(409));
    scene.measure(1).await;
    shared.receive().await;
    shared.close().await;
    scene.measure(2).await;
    let mut alone = gateway.reconnect("Sub1", "crew").await;
    assert_eq!(gateway.member(&scene.token, "a").await.err(), Some(409));
    assert_eq!(value_of(&alone.next().await.json()), 2, "the same cursor");
    alone.close().await;
    let mut shared = eventually("the place is free", async || gateway.member(&scene.token, "a").await.ok()).await;
    assert_eq!(value_of(&shared.next().await.json()), 2);
}

#[tokio::test]
async fn one_client_unsubscribes_for_all() {
    let scene = Scene::new(DEVICES, "").await;
    for in_band in [true, false] {
        let (mut a, mut b) = (scene.member("a").await, scene.member("b").await);
        scene.measure(1).await;
        if in_band {
            a.send("unsubscribe_subscriber").await;
        } else {
            assert_eq!(scene.gateway.unsubscribe(&scene.token).await.expect(200).json(), json!({"result": "DONE"}));
        }
        assert_eq!((a.closed().await, b.closed().await), (Some(1000), Some(1000)));
        assert!(scene.gateway.unsubscribe(&scene.token).await.status >= 500, "gone");
        let mut anew = scene.member("a").await;
        assert!(anew.is_silent_for(SILENCE).await, "a new consumer");
        anew.send("unsubscribe_subscriber").await;
        assert_eq!(anew.closed().await, Some(1000));
    }
}

// Kills under load: whatever was answered with 201 arrives at one of the clients, each source in order, nothing that was
// acknowledged long before the kill comes again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_9_with_clients_that_share_loses_nothing() {
    const ROUNDS: u64 = 3;
    let mut scene = Scene::new(DEVICES, "").await;
    let mut accepted: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut first: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut settled: BTreeSet<(String, u64)> = BTreeSet::new();
    let mut next = 1;
    for round in 0..=ROUNDS {
        // In the order in which they connect: a source moves only to those that came later.
        let mut clients = Vec::new();
        for name in ["a", "b", "c"] {
            let mut member = scene.member(name).await;
            clients.push(tokio::spawn(async move {
                let (mut seen, mut acked) = (Vec::new(), Vec::new());
                while let Some(frame) = member.try_next().await {
                    let message = (source(&frame), value_of(&frame.json()));
                    // The last round acknowledges everything, the others two of three.
                    if (round == ROUNDS || !message.1.is_multiple_of(3)) && member.try_ack(&frame).await {
                        acked.push((message.clone(), std::time::Instant::now()));
                    }
                    seen.push(message);
                }
                (seen, acked)
            }));
        }
        let producer = scene.gateway.producer();
        if round < ROUNDS {
            let mut posts = tokio::task::JoinSet::new();
            for device in scene.devices.clone() {
                let producer = producer.clone();
                posts.spawn(async move {
                    let mut accepted = Vec::new();
                    let mut number = next;
                    while let Ok(status) = producer.post(&measurement(&device, "t", number), "TRANSIENT").await {
                        assert_eq!(status, 201);
                        accepted.push(number);
                        number += 1;
                    }
                    (device, accepted)
                });
            }
            tokio::time::sleep(Duration::from_millis(700)).await;
            let killed = std::time::Instant::now();
            scene.gateway.kill9();
            for (device, numbers) in posts.join_all().await {
                accepted.entry(device).or_default().extend(numbers);
            }
            next = accepted.values().flatten().max().unwrap() + 2;
            for client in clients {
                let (seen, acked) = client.await.unwrap();
                note(&mut first, &settled, seen);
                let held = acked.into_iter().filter(|(_, at)| killed.duration_since(*at) >= Duration::from_millis(250));
                settled.extend(held.map(|(message, _)| message));
            }
            scene.gateway.restart_process().await;
        } else {
            // The clients close once there has been nothing for them to do.
            eventually("everything is acknowledged", async || {
                let before = scene.gateway.metric("tidegate_messages_acknowledged_total").await;
                tokio::time::sleep(Duration::from_secs(1)).await;
                (before == scene.gateway.metric("tidegate_messages_acknowledged_total").await).then_some(())
            })
            .await;
            scene.gateway.stop().await;
            for client in clients {
                let (seen, _) = client.await.unwrap();
                note(&mut first, &settled, seen);
            }
        }
    }
    for (device, numbers) in &accepted {
        assert!(numbers.len() > 5, "no load");
        let missing: Vec<_> = numbers.iter().filter(|number| !first[device].contains(number)).collect();
        assert!(missing.is_empty(), "{device} lost {missing:?}");
    }
    let mut database = scene.gateway.database().await;
    let kept: i64 = sqlx::query_scalar("SELECT count(*) FROM msg").fetch_one(&mut database).await.unwrap();
    assert_eq!(kept, 0, "everything is acknowledged");
}

/// First deliveries keep the order of their source.
fn note(first: &mut BTreeMap<String, Vec<u64>>, settled: &BTreeSet<(String, u64)>, seen: Vec<(String, u64)>) {
    for message in seen {
        assert!(!settled.contains(&message), "{message:?} was acknowledged, and came again");
        let (device, number) = message;
        let numbers = first.entry(device).or_default();
        if !numbers.contains(&number) {
            assert!(numbers.last().is_none_or(|last| *last < number), "{number} came first after {:?}", numbers.last());
            numbers.push(number);
        }
    }
}
