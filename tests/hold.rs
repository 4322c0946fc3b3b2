//! What becomes of a message that a plugin fails on (`tidegate.onFault`): held and released in order, dropped, or passed.
//!
//! A built-in plugin that is replaced by a faulty guest is mended by another file and a restart.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{
    Consumer, Gateway, PASSWORD, USER, component, event, eventually, forwarded, measurement, of_tenant, typed, value_of,
};
use crate::plugins::faulty;

const TRANSFORM: &str = "fragments-to-copy";

/// A gateway whose transform fails on all that it gets, a device whose measurements pass it on their way to `Sub1`, and one whose
/// measurements go there unshaped.
struct Scene {
    gateway: Gateway,
    components: tempfile::TempDir,
    bad: String,
    good: String,
    subscription: String,
    consumer: Consumer,
}

impl Scene {
    async fn new(more: &str, extension: Value) -> Self {
        let (gateway, components) = faulty(TRANSFORM, "huge", more).await;
        let (bad, good) = (gateway.device("bad").await, gateway.device("good").await);
        let subscription = gateway.subscribe(&shaped(&bad, extension)).await;
        gateway.subscribe(&forwarded("Sub1", &good)).await;
        let consumer = gateway.consumer("Sub1", "subA").await;
        let subscription = subscription["id"].as_str().unwrap().to_owned();
        Self { gateway, components, bad, good, subscription, consumer }
    }

    /// The plugin is well after the next start.
    fn mend(&self) {
        mend(&self.components, TRANSFORM);
    }

    async fn measure(&self, device: &str, value: u64) {
        self.gateway.measure(device, "t", value).await;
    }

    /// Measurements of the bad device, in one request.
    async fn measure_all(&self, values: std::ops::Range<u64>) {
        let all: Vec<_> = values.map(|value| measurement(&self.bad, "t", value)).collect();
        self.gateway.post("/measurement/measurements", &json!({"measurements": all})).await.expect(201);
    }

    async fn topic(&self) -> Value {
        topic(&self.gateway).await
    }

    async fn held(&self) -> u64 {
        held(&self.topic().await)
    }

    /// What the consumer gets, as the type and the value of a measurement, and whether it was shaped.
    async fn receive(&mut self) -> (u64, bool) {
        let body = self.consumer.receive().await.json();
        (value_of(&body), body.get("c8y_More").is_none())
    }
}

/// Puts the sound component in the place of the faulty one, for the next start.
pub(crate) fn mend(components: &tempfile::TempDir, plugin: &str) {
    fs::write(components.path().join(format!("{plugin}.wasm")), component(plugin)).unwrap();
}

fn shaped(device: &str, extension: Value) -> Value {
    let mut subscription = forwarded("Sub1", device);
    subscription["subscriptionFilter"] = json!({"apis": ["measurements"]});
    subscription["fragmentsToCopy"] = json!(["c8y_Reading"]);
    subscription["tidegate"] = extension;
    subscription
}

async fn topic(gateway: &Gateway) -> Value {
    gateway.get("/tidegate/v1/topics/persistent/Sub1").await.expect(200).json()
}

fn held(topic: &Value) -> u64 {
    topic["figures"]["heldMessages"].as_u64().unwrap()
}

// "what was held is delivered in order", "later ones of the same source wait behind it", other sources flow.
#[tokio::test]
async fn what_is_held_comes_in_order_once_the_plugin_is_mended() {
    let mut scene = Scene::new("", json!({"onFault": "hold"})).await;
    // Events of the same device come by another subscription, which has no plugin.
    scene.gateway.subscribe(&of_tenant("Sub1", &["events"])).await;
    for value in 0..5 {
        scene.measure(&scene.bad, value).await;
        scene.measure(&scene.good, 100 + value).await;
        assert_eq!(value_of(&scene.consumer.receive().await.json()), 100 + value, "another source does not wait");
    }
    scene.gateway.post("/event/events", &event(&scene.bad, "e", "behind")).await.expect(201);
    scene.measure_all(5..8).await;
    let topic = scene.topic().await;
    assert_eq!((&topic["figures"]["messages"], held(&topic)), (&json!(9), 9), "{topic}");
    let counts: u64 = topic["held"].as_array().unwrap().iter().map(|held| held["messages"].as_u64().unwrap()).sum();
    assert_eq!((topic["held"].as_array().unwrap().len(), counts), (2, 9), "{topic}");
    assert_eq!(topic["held"][0]["subscription"], *scene.subscription, "{topic}");
    assert!(topic["held"][0]["oldestAgeSeconds"].as_u64().unwrap() < 60, "{topic}");
    assert_eq!(topic["consumers"][0]["messages"], 0, "it is nobody's backlog");
    assert_eq!(scene.gateway.metric("tidegate_messages_held").await, 9.0);
    let url = format!("http://{}", scene.gateway.addr);
    let env = [("TIDEGATE_URL", url.as_str()), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)];
    let (_, table, said) = scene.gateway.command(&["topics"], &env, "topics").await;
    let row: Vec<_> = table.lines().nth(1).unwrap_or(&said).split_whitespace().collect();
    assert_eq!(row[6..8], ["9", "9"], "all of its messages are held:\n{table}");
    assert_eq!(scene.consumer.frames_until_pong().await, 0);

    // Over a restart they are still held.
    scene.gateway.restart().await;
    let topic = scene.topic().await;
    assert_eq!((held(&topic), &topic["figures"]["bytes"]), (9, &topic["figures"]["bytes"]), "{topic}");
    scene.mend();
    scene.gateway.restart().await;
    scene.consumer = scene.gateway.reconnect("Sub1", "subA").await;
    let mut newest = 0;
    for expected in [json!(0), json!(1), json!(2), json!(3), json!(4), json!("behind"), json!(5), json!(6), json!(7)] {
        let frame = scene.consumer.receive().await;
        assert!(frame.message_id() > newest, "ids increase");
        newest = frame.message_id();
        let body = frame.json();
        let found = if body["text"].is_string() { body["text"].clone() } else { json!(value_of(&body)) };
        assert_eq!(found, expected);
    }
    // From now on nothing waits.
    scene.measure(&scene.bad, 8).await;
    assert_eq!(value_of(&scene.consumer.receive().await.json()), 8);
    eventually("all is acknowledged", async || (scene.topic().await["figures"]["messages"] == 0).then_some(())).await;
    assert_eq!(scene.held().await, 0);
}

#[tokio::test]
async fn what_comes_in_during_a_release_comes_after_what_was_held() {
    const SOURCES: usize = 4;
    const HELD: u64 = 600;
    let (mut gateway, components) = faulty(TRANSFORM, "huge", "").await;
    let mut devices = Vec::new();
    for source in 0..SOURCES {
        let device = gateway.device(&format!("pump{source}")).await;
        gateway.subscribe(&shaped(&device, json!({}))).await;
        devices.push(device);
    }
    gateway.consumer("Sub1", "subA").await.close().await;
    let bulk = |values: std::ops::Range<u64>| {
        let all = values.flat_map(|value| devices.iter().map(move |device| measurement(device, "t", value)));
        json!({"measurements": all.collect::<Vec<_>>()})
    };
    for first in (0..HELD).step_by(100) {
        gateway.post("/measurement/measurements", &bulk(first..first + 100)).await.expect(201);
    }
    assert_eq!(held(&topic(&gateway).await), HELD * SOURCES as u64);
    mend(&components, TRANSFORM);
    gateway.restart().await;
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    let produce = async {
        for value in HELD..HELD + 100 {
            gateway.post("/measurement/measurements", &bulk(value..value + 1)).await.expect(201);
        }
    };
    let consume = async {
        let mut next = [0; SOURCES];
        for _ in 0..(HELD + 100) * SOURCES as u64 {
            let body = consumer.receive().await.json();
            let source = devices.iter().position(|device| body["source"]["id"] == **device).unwrap();
            assert_eq!(value_of(&body), next[source], "of {source}");
            next[source] += 1;
        }
    };
    tokio::join!(produce, consume);
    assert_eq!(consumer.frames_until_pong().await, 0, "nothing comes twice");
}

// The plugin is asked again by itself, with pauses up to `plugins.retry_seconds`.
#[tokio::test]
async fn what_is_held_is_tried_again_and_again() {
    let mut scene = Scene::new("retry_seconds = 1\n", json!({})).await;
    scene.gateway.subscribe(&of_tenant("Sub1", &["events"])).await;
    scene.measure_all(0..3).await;
    scene.gateway.post("/event/events", &event(&scene.bad, "e", "behind")).await.expect(201);
    let faults = || async { scene.gateway.metric("tidegate_plugin_faults_total").await };
    let before = faults().await;
    eventually("a fourth attempt", async || (faults().await >= before + 4.0).then_some(())).await;
    assert_eq!(scene.held().await, 4, "what would pass stays behind what faults again");
    assert_eq!(scene.consumer.frames_until_pong().await, 0);
}

#[tokio::test]
async fn on_fault_drop_forwards_nothing_and_counts_it() {
    let mut scene = Scene::new("", json!({"onFault": "drop"})).await;
    let _second = scene.gateway.consumer("Sub1", "subB").await;
    scene.measure_all(0..3).await;
    scene.measure(&scene.good, 100).await;
    assert_eq!(scene.receive().await.0, 100);
    assert_eq!(scene.held().await, 0);
    let metrics = scene.gateway.get("/metrics").await.expect(200).text();
    let counted = r#"tidegate_messages_dropped_total{reason="plugin_fault"} 6"#;
    assert!(metrics.lines().any(|line| line == counted), "once for each consumer:\n{metrics}");
}

#[tokio::test]
async fn on_fault_pass_forwards_as_if_the_plugin_were_not_there() {
    let mut scene = Scene::new("", json!({"onFault": "pass"})).await;
    let mut body = measurement(&scene.bad, "t", 1);
    body["c8y_More"] = json!({});
    scene.gateway.post_measurement(&body).await.expect(201);
    assert_eq!(scene.receive().await, (1, false), "unshaped");
    // What passes is not kept from the plugin for ever.
    scene.mend();
    scene.gateway.restart().await;
    scene.consumer = scene.gateway.reconnect("Sub1", "subA").await;
    scene.gateway.post_measurement(&body).await.expect(201);
    assert_eq!(scene.receive().await, (1, true));
}

// A filter that fails and is passed over does not keep the next plugin from its work.
#[tokio::test]
async fn on_fault_pass_still_asks_the_other_plugins() {
    let (gateway, _components) = faulty("type-filter", "wrong-length", "").await;
    let device = gateway.device("bad").await;
    let mut subscription = shaped(&device, json!({"onFault": "pass"}));
    subscription["subscriptionFilter"]["typeFilter"] = json!("'t'");
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let mut body = measurement(&device, "t", 1);
    body["c8y_More"] = json!({});
    gateway.post_measurement(&body).await.expect(201);
    let body = consumer.receive().await.json();
    assert_eq!((value_of(&body), body.get("c8y_More")), (1, None));
}

#[tokio::test]
async fn a_non_persistent_topic_holds_nothing() {
    let (gateway, _components) = faulty(TRANSFORM, "huge", "").await;
    let device = gateway.device("bad").await;
    let mut subscription = shaped(&device, json!({"onFault": "hold"}));
    subscription["nonPersistent"] = json!(true);
    gateway.subscribe(&subscription).await;
    let request = json!({"subscriber": "subA", "subscription": "Sub1", "nonPersistent": true});
    let mut consumer = gateway.consumer_with(&gateway.token_of(&request).await).await.unwrap();
    gateway.measure(&device, "t", 1).await;
    let dropped = async || (gateway.metric("tidegate_messages_dropped_total").await == 1.0).then_some(());
    eventually("it is dropped", dropped).await;
    assert_eq!(consumer.frames_until_pong().await, 0);
}

#[tokio::test]
async fn what_a_deleted_subscription_held_goes_and_frees_what_waits_behind_it() {
    let mut scene = Scene::new("retry_seconds = 1\n", json!({})).await;
    scene.gateway.subscribe(&of_tenant("Sub1", &["events"])).await;
    scene.measure_all(0..1_500).await;
    scene.gateway.post("/event/events", &event(&scene.bad, "e", "behind")).await.expect(201);
    assert_eq!(scene.held().await, 1_501);
    scene.gateway.delete(&format!("/notification2/subscriptions/{}", scene.subscription)).await.expect(204);
    assert_eq!(scene.consumer.receive().await.json()["text"], "behind");
    assert_eq!(scene.held().await, 0);
    let metrics = scene.gateway.get("/metrics").await.expect(200).text();
    let counted = r#"tidegate_messages_dropped_total{reason="subscription_deleted"} 1500"#;
    assert!(metrics.lines().any(|line| line == counted), "{metrics}");
    // So do those of a device that goes.
    let subscription = scene.gateway.subscribe(&shaped(&scene.bad, json!({}))).await;
    assert!(subscription["id"].is_string());
    scene.measure_all(0..3).await;
    assert_eq!(scene.held().await, 3);
    scene.gateway.delete(&format!("/inventory/managedObjects/{}", scene.bad)).await.expect(204);
    eventually("nothing is held", async || (scene.held().await == 0).then_some(())).await;
}

// What is held counts to the quota; whoever is refused is told why.
#[tokio::test]
async fn a_topic_that_is_full_of_held_messages_says_so() {
    let scene = Scene::new("\n[backlog]\nquota_bytes = 4096\n", json!({})).await;
    let mut value = 0;
    let refused = loop {
        let answer = scene.gateway.post_measurement(&measurement(&scene.bad, "t", value)).await;
        if answer.status != 201 {
            break answer;
        }
        value += 1;
        assert!(value < 100, "it is never full");
    };
    let held = scene.held().await;
    assert_eq!(held, value);
    let text = refused.error(500, "");
    let expected = format!("{held} messages are held, as a plugin of subscription '{}' failed", scene.subscription);
    assert!(text.contains(&expected), "{text}");
    // Another source of the topic is refused as well, until there is room.
    scene.gateway.post_measurement(&measurement(&scene.good, "t", 1)).await.error(500, "are held");
}

// Of what is held too long, consumers are told as of anything else that expires.
#[tokio::test]
async fn what_is_held_expires() {
    let mut scene = Scene::new("", json!({"gapMessages": true})).await;
    let settings = json!({"ttlSeconds": 1});
    scene.gateway.put("/tidegate/v1/topics/persistent/Sub1", &settings).await.expect(200);
    scene.measure_all(0..3).await;
    let gap = scene.consumer.receive().await.json();
    assert_eq!((&gap["missed"], &gap["reason"]), (&json!(3), &json!("expired")), "{gap}");
    eventually("nothing is held", async || (scene.held().await == 0).then_some(())).await;
}

/// A gateway in which a subscription for each of so many devices uses a filter that the first message puts into quarantine, where nothing is
/// released before it is asked for; the consumer `subA` of their topic `Sub1` has gone.
pub(crate) async fn quarantining(devices: usize) -> (Gateway, tempfile::TempDir, Vec<String>) {
    let (gateway, components) = faulty("type-filter", "wrong-length", "quarantine_faults = 1").await;
    let mut ids = Vec::new();
    for n in 0..devices {
        let device = gateway.device(&format!("pump{n}")).await;
        gateway.subscribe(&typed("Sub1", &device, "'t'")).await;
        ids.push(device);
    }
    gateway.consumer("Sub1", "subA").await.close().await;
    (gateway, components, ids)
}

/// Ends the process while it releases, at a named point.
#[cfg(feature = "faults")]
mod ended {
    use super::*;

    // systemd kills who takes 90 s to stop; what is held is safe where it is.
    #[tokio::test]
    async fn a_stop_does_not_wait_for_the_releases() {
        const DEVICES: usize = 20;
        const HELD: u64 = 400;
        let (mut gateway, components, devices) = quarantining(DEVICES).await;
        for device in &devices {
            let all: Vec<_> = (0..HELD).map(|value| measurement(device, "t", value)).collect();
            gateway.post("/measurement/measurements", &json!({"measurements": all})).await.expect(201);
        }
        mend(&components, "type-filter");
        gateway.stop().await;
        gateway.set_env("TIDEGATE_FAULT", "stop-at:release-committed");
        gateway.restart_process().await;
        // It waits for all of them, and the stop for its answer.
        let released = gateway.call("POST", "/tidegate/v1/plugins/type-filter/release").await.expect(200).json();
        gateway.ended().await;
        fs::write(components.path().join("type-filter.wasm"), component("faulty/wrong-length")).unwrap();
        gateway.set_env("TIDEGATE_FAULT", "");
        gateway.restart_process().await;
        let topic = topic(&gateway).await;
        let left = held(&topic);
        assert!(left > 0 && left < HELD * DEVICES as u64, "{topic}");
        assert_eq!(released["held"], left, "{released}");
        assert_eq!(topic["figures"]["messages"], HELD * DEVICES as u64, "{topic}");
    }

    // "kill between judge and commit of a release": nothing is lost, nothing is delivered unjudged, and nothing twice.
    #[tokio::test]
    async fn a_release_that_is_killed_goes_on_where_it_was() {
        const HELD: u64 = 2_500;
        let mut scene = Scene::new("", json!({})).await;
        for first in (0..HELD).step_by(500) {
            scene.measure_all(first..first + 500).await;
        }
        scene.mend();
        scene.gateway.stop().await;
        // Each commit releases 256 of them, a turn four times as many.
        for point in ["release-judged:1", "release-staged:2", "release-committed:1", "release-judged:2"] {
            scene.gateway.set_env("TIDEGATE_FAULT", &format!("kill-at:{point}"));
            scene.gateway.restart_process().await;
            let (code, said) = scene.gateway.ended_badly().await;
            assert_eq!(code, None, "{point} was not reached:\n{said}");
        }
        scene.gateway.set_env("TIDEGATE_FAULT", "");
        scene.gateway.restart_process().await;
        scene.consumer = scene.gateway.reconnect("Sub1", "subA").await;
        for value in 0..HELD {
            let body = scene.consumer.receive().await.json();
            assert_eq!(value_of(&body), value);
            assert!(body.get("time").is_some() && body.get("type").is_some(), "{body}");
        }
        assert_eq!(scene.consumer.frames_until_pong().await, 0);
        eventually("all is acknowledged", async || (scene.topic().await["figures"]["messages"] == 0).then_some(()))
            .await;
    }
}
