//! Versions of plugins are rolled between messages: canaries, promotion, and the way back (`docs/plugins.md`).

use std::cell::Cell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{
    Call, Consumer, Gateway, PASSWORD, USER, component, eventually, forwarded, measurement, of_tenant, value_of,
};
use crate::registry::{PATH, upload};

/// Settings of a threshold over the values of measurements.
fn above(limit: u64) -> Value {
    json!({"value": "/c8y_Reading/R/value", "above": limit})
}

/// A subscription whose only filter is version 1 of the plugin `hot`, which is `guest`.
struct Scene {
    gateway: Gateway,
    device: String,
    subscription: String,
    consumer: Consumer,
}

impl Scene {
    async fn new(guest: &str, settings: Value) -> Self {
        Self::with("", guest, settings).await
    }

    async fn with(config: &str, guest: &str, settings: Value) -> Self {
        let gateway = Gateway::with(config).await;
        let device = gateway.device("pump").await;
        upload(&gateway, "hot", &component(guest)).await.expect(201);
        let mut wanted = forwarded("Sub1", &device);
        wanted["tidegate"] = json!({"filters": [{"plugin": "hot", "settings": settings}]});
        let subscription = gateway.subscribe(&wanted).await["id"].as_str().unwrap().to_owned();
        let consumer = gateway.consumer("Sub1", "subA").await;
        Self { gateway, device, subscription, consumer }
    }

    fn path(&self) -> String {
        format!("/tidegate/v1/subscriptions/{}/canary", self.subscription)
    }

    fn put(&self, canary: &Value) -> Call {
        self.gateway.put(&self.path(), canary)
    }

    fn promote(&self) -> Call {
        self.gateway.call("POST", &format!("{}/promote", self.path()))
    }

    async fn canary(&self) -> Value {
        self.gateway.get(&self.path()).await.expect(200).json()
    }

    async fn measure(&self, values: impl IntoIterator<Item = u64>) {
        for value in values {
            self.gateway.measure(&self.device, "t", value).await;
        }
    }

    async fn receives(&mut self, values: &[u64]) {
        for expected in values {
            assert_eq!(value_of(&self.consumer.receive().await.json()), *expected);
        }
    }

    /// The filter that the subscription names.
    async fn filter(&self) -> Value {
        let path = format!("/notification2/subscriptions/{}", self.subscription);
        self.gateway.get(&path).await.expect(200).json()["tidegate"]["filters"][0].clone()
    }

    /// The canary, once it was taken back.
    async fn rolled_back(&self) -> Value {
        let look = async || Some(self.canary().await).filter(|canary| canary.get("rolledBack").is_some());
        eventually("the canary is taken back", look).await
    }
}

#[tokio::test]
async fn a_canary_decides_and_is_compared_until_it_is_taken_back_or_promoted() {
    let mut scene = Scene::new("threshold", above(50)).await;
    scene.gateway.get(&scene.path()).await.error(404, "has no canary");
    upload(&scene.gateway, "hot", &component("threshold")).await.expect(201);
    let made = scene.put(&json!({"plugin": "hot", "settings": above(70), "share": 1})).await.expect(200).json();
    for (name, value) in [
        ("plugin", json!("hot")),
        ("version", json!(2)),
        ("settings", above(70)),
        ("share", json!(1.0)),
        ("place", json!("filters[0]")),
        ("current", json!({"plugin": "hot", "version": 1, "settings": above(50)})),
        ("self", json!(format!("http://{}{}", scene.gateway.addr, scene.path()))),
    ] {
        assert_eq!(made[name], value, "{name}");
    }
    assert!(made.get("replaced").is_none() && made["since"].as_str().unwrap().ends_with('Z'), "{made}");
    assert_eq!(scene.filter().await["version"], 1, "ordinary clients see what is in force");
    scene.measure([40, 60, 80]).await;
    scene.receives(&[80]).await;
    let compared = scene.canary().await["comparison"].clone();
    let counts = ["messages", "equal", "passesMore", "dropsMore", "bodiesDiffer"];
    assert_eq!(counts.map(|name| compared[name].as_u64().unwrap()), [3, 2, 0, 1, 0], "{compared}");
    for side in ["current", "canary"] {
        assert_eq!(compared[side]["faults"], 0, "{compared}");
        assert!(compared[side]["processorMicroseconds"].as_u64().unwrap() > 0, "{compared}");
    }

    // Another one takes its place, and begins anew.
    let made = scene.put(&json!({"plugin": "hot", "version": 2, "settings": above(20), "share": 1})).await.expect(200);
    assert_eq!(made.json()["replaced"], json!({"plugin": "hot", "version": 2, "settings": above(70)}));
    scene.measure([40, 60]).await;
    scene.receives(&[40, 60]).await;
    let compared = scene.canary().await["comparison"].clone();
    assert_eq!(counts.map(|name| compared[name].as_u64().unwrap()), [2, 1, 1, 0, 0], "{compared}");

    // It survives a restart, and is not deleted meanwhile.
    scene.gateway.restart().await;
    scene.consumer = scene.gateway.reconnect("Sub1", "subA").await;
    let after = scene.canary().await;
    assert_eq!((&after["settings"], &after["comparison"]["messages"]), (&above(20), &json!(0)), "{after}");
    let version = |number: u64| format!("{PATH}/hot/versions/{number}");
    scene.gateway.delete(&version(2)).await.error(409, &scene.subscription);
    scene.measure([30]).await;
    scene.receives(&[30]).await;

    scene.gateway.delete(&scene.path()).await.expect(204);
    scene.gateway.delete(&scene.path()).await.error(404, "has no canary");
    scene.promote().await.error(404, "has no canary");
    scene.measure([30, 60]).await;
    scene.receives(&[60]).await;

    scene.put(&json!({"plugin": "hot", "version": 2, "settings": above(70), "share": 1})).await.expect(200);
    scene.promote().await.expect(204);
    assert_eq!(scene.filter().await, json!({"plugin": "hot", "version": 2, "settings": above(70)}));
    scene.gateway.get(&scene.path()).await.error(404, "has no canary");
    scene.gateway.delete(&version(1)).await.expect(204);
    scene.gateway.restart().await;
    scene.consumer = scene.gateway.reconnect("Sub1", "subA").await;
    scene.measure([60, 80]).await;
    scene.receives(&[80]).await;
}

#[tokio::test]
async fn usage_and_explanations_show_the_canary_beside_the_version_in_force() {
    let mut scene = Scene::new("threshold", above(50)).await;
    upload(&scene.gateway, "hot", &component("threshold")).await.expect(201);
    upload(&scene.gateway, "hot", &component("faulty/wrong-length")).await.expect(201);
    scene.put(&json!({"plugin": "hot", "version": 2, "settings": above(70), "share": 1})).await.expect(200);
    scene.measure([40, 60, 80]).await;
    scene.receives(&[80]).await;
    let path = |what: &str| format!("/tidegate/v1/subscriptions/{}/{what}", scene.subscription);
    let usage = scene.gateway.get(&path("usage")).await.expect(200).json();
    for (share, version, dropped) in [(&usage["plugins"][0], 1, 1), (&usage["canary"], 2, 2)] {
        let figures = ["version", "messages", "dropped"].map(|name| share[name].as_u64().unwrap());
        assert_eq!(figures, [version, 3, dropped], "{usage}");
    }
    assert_eq!((&usage["canary"]["place"], usage["plugins"].as_array().unwrap().len()), (&json!("filters[0]"), 1));

    let message = json!({"body": measurement(&scene.device, "t", 60)});
    let explain = async || scene.gateway.post(&path("explain"), &message).await.expect(200).json();
    let explained = explain().await;
    let steps = |explained: &Value| {
        let steps = explained["steps"].as_array().unwrap().iter();
        steps.map(|step| (step["version"].clone(), step["canary"] == true, step["verdict"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(steps(&explained), [(json!(2), true, json!("drop"))], "{explained}");
    assert_eq!(explained["outcome"], "dropped");
    // Where it fails, the version in force decides.
    scene.put(&json!({"plugin": "hot", "version": 3, "share": 1})).await.expect(200);
    let explained = explain().await;
    assert_eq!(steps(&explained), [(json!(3), true, json!("fault")), (json!(1), false, json!("pass"))], "{explained}");
    assert_eq!(explained["outcome"], "forwarded");
    scene.gateway.delete(&scene.path()).await.expect(204);
    assert_eq!(steps(&explain().await), [(json!(1), false, json!("pass"))]);
    assert!(scene.gateway.get(&path("usage")).await.expect(200).json().get("canary").is_none());
}

#[tokio::test]
async fn a_share_of_the_sources_is_always_the_same_and_part_of_a_larger_one() {
    const DEVICES: usize = 40;
    let gateway = Gateway::start().await;
    upload(&gateway, "hot", &component("threshold")).await.expect(201);
    let mut devices = Vec::new();
    for _ in 0..DEVICES {
        devices.push(gateway.device("pump").await);
    }
    let mut wanted = of_tenant("Sub1", &["measurements"]);
    wanted["tidegate"] = json!({"filters": [{"plugin": "hot", "settings": above(0)}]});
    let subscription = gateway.subscribe(&wanted).await["id"].as_str().unwrap().to_owned();
    let path = format!("/tidegate/v1/subscriptions/{subscription}/canary");
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    // The canary passes nothing. The last message is above its limit, too, so that all before it have been judged.
    let mut spared = async |share: f64| -> HashSet<String> {
        gateway.put(&path, &json!({"plugin": "hot", "settings": above(1000), "share": share})).await.expect(200);
        let all: Vec<_> = devices.iter().map(|device| measurement(device, "t", 1)).collect();
        gateway.post("/measurement/measurements", &json!({"measurements": all})).await.expect(201);
        gateway.measure(&devices[0], "t", 1001).await;
        let mut spared = HashSet::new();
        loop {
            let body = consumer.receive().await.json();
            if value_of(&body) == 1001 {
                return spared;
            }
            assert!(spared.insert(body["source"]["id"].as_str().unwrap().to_owned()), "once for each");
        }
    };
    let (third, again, most, all) = (spared(0.3).await, spared(0.3).await, spared(0.8).await, spared(1.0).await);
    assert!((15..DEVICES).contains(&third.len()), "{} of {DEVICES} are spared", third.len());
    assert_eq!(third, again);
    assert!(most.is_subset(&third) && most.len() < third.len() && all.is_empty(), "{most:?}");
}

// "The old one judges the same messages in its shadow, so that its state stays whole for a rollback."
#[tokio::test]
async fn the_way_back_finds_the_old_state() {
    // All measurements have the same time, so that each source passes once.
    let mut scene = Scene::new("rate-limit", json!({"seconds": 60})).await;
    let other = scene.gateway.device("other").await;
    let mut wanted = forwarded("Sub1", &other);
    wanted["tidegate"] = json!({"filters": [{"plugin": "hot", "version": 1, "settings": {"seconds": 60}}]});
    scene.gateway.subscribe(&wanted).await;
    upload(&scene.gateway, "hot", &component("rate-limit")).await.expect(201);
    let canary = json!({"plugin": "hot", "share": 1});
    scene.put(&canary).await.expect(200);
    // Both see their first message.
    scene.measure([1, 2]).await;
    scene.receives(&[1]).await;
    scene.gateway.delete(&scene.path()).await.expect(204);
    scene.measure([3]).await;
    scene.gateway.measure(&other, "t", 4).await;
    scene.receives(&[4]).await;
}

#[tokio::test]
async fn where_a_canary_fails_the_old_answer_counts_and_soon_it_is_gone() {
    let mut scene = Scene::new("threshold", above(50)).await;
    upload(&scene.gateway, "hot", &component("faulty/wrong-length")).await.expect(201);
    let broken = json!({"plugin": "hot", "version": 2, "share": 1});
    scene.put(&broken).await.expect(200);
    scene.measure([40, 60]).await;
    scene.receives(&[60]).await;
    let compared = scene.canary().await["comparison"].clone();
    assert_eq!((&compared["messages"], &compared["canary"]["faults"]), (&json!(2), &json!(2)), "{compared}");
    assert!(compared["lastFault"].as_str().unwrap().contains("answers"), "{compared}");
    scene.measure(100..120).await;
    scene.receives(&(100..120).collect::<Vec<_>>()).await;
    let shown = scene.rolled_back().await;
    let rolled_back = &shown["rolledBack"];
    assert_eq!((&rolled_back["plugin"], &rolled_back["version"]), (&json!("hot"), &json!(2)));
    let reason = rolled_back["reason"].as_str().unwrap();
    assert!(reason.starts_with("it failed on ") && reason.contains(" of "), "{reason}");
    assert!(shown.get("plugin").is_none() && shown.get("comparison").is_none(), "{shown}");
    assert_eq!(scene.gateway.metric("tidegate_canaries_rolled_back_total").await, 1.0);
    assert!(scene.gateway.stderr().contains("canary taken back"), "{}", scene.gateway.stderr());
    scene.gateway.delete(&format!("{PATH}/hot/versions/2")).await.expect(204);

    // It is still told after a restart, until there is another one.
    scene.gateway.restart().await;
    assert_eq!(scene.canary().await, shown);
    scene.gateway.delete(&scene.path()).await.error(404, "has no canary");
    scene.put(&json!({"plugin": "hot", "settings": above(70), "share": 0.5})).await.expect(200);
    assert!(scene.canary().await.get("rolledBack").is_none());
}

#[tokio::test]
async fn so_many_messages_and_faults_are_waited_for() {
    let config = "[plugins]\ncanary_messages = 30\ncanary_fault_percent = 100\n";
    let mut scene = Scene::with(config, "threshold", above(50)).await;
    upload(&scene.gateway, "hot", &component("faulty/wrong-length")).await.expect(201);
    scene.put(&json!({"plugin": "hot", "version": 2, "share": 1})).await.expect(200);
    // Fewer than would be put into quarantine.
    scene.measure(100..110).await;
    scene.receives(&(100..110).collect::<Vec<_>>()).await;
    // The gateway looks each second.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(scene.canary().await["comparison"]["canary"]["faults"], 10);
}

// "After a promotion what was held for the subscription is released", and not only at the next attempt.
#[tokio::test]
async fn a_promotion_delivers_what_the_old_version_held() {
    let mut scene = Scene::new("faulty/wrong-length", above(50)).await;
    upload(&scene.gateway, "hot", &component("threshold")).await.expect(201);
    scene.measure([60]).await;
    // The pause after that is four seconds at least.
    let faults = async || scene.gateway.metric("tidegate_plugin_faults_total").await;
    eventually("a third attempt", async || (faults().await >= 4.0).then_some(())).await;
    scene.measure([40, 70]).await;
    let topic = scene.gateway.get("/tidegate/v1/topics/persistent/Sub1").await.expect(200).json();
    assert_eq!(topic["figures"]["heldMessages"], 3, "{topic}");
    scene.put(&json!({"plugin": "hot", "version": 2, "share": 1})).await.expect(200);
    scene.promote().await.expect(204);
    scene.measure([80]).await;
    let received = tokio::time::timeout(Duration::from_secs(3), scene.receives(&[60, 70, 80])).await;
    received.expect("it is released at once");
    eventually("nothing is held", async || {
        let topic = scene.gateway.get("/tidegate/v1/topics/persistent/Sub1").await.expect(200).json();
        (topic["figures"]["heldMessages"] == 0).then_some(())
    })
    .await;
}

// A transform that is too generous faults on what is held as on what comes.
#[tokio::test]
async fn a_version_that_makes_what_is_held_too_large_holds_it() {
    let gateway = Gateway::with("[limits]\nframe_bytes = 2000\n").await;
    let device = gateway.device("pump").await;
    for text in ["() => { throw new Error('broken') }", "() => 'x'.repeat(2000)", "(message) => message"] {
        let script = gateway.call("POST", &format!("{PATH}?name=mine&world=transform"));
        script.body("text/javascript", text.to_owned()).await.expect(201);
    }
    let mut wanted = forwarded("Sub1", &device);
    wanted["tidegate"] = json!({"transforms": [{"plugin": "mine", "version": 1}]});
    let subscription = gateway.subscribe(&wanted).await["id"].as_str().unwrap().to_owned();
    let mut scene = Scene { device, subscription, consumer: gateway.consumer("Sub1", "subA").await, gateway };
    scene.measure(0..3).await;
    for (version, held, faults) in [(2, json!(3), Some(1)), (3, json!(0), None)] {
        scene.put(&json!({"plugin": "mine", "version": version, "share": 1})).await.expect(200);
        scene.promote().await.expect(204);
        scene.gateway.call("POST", &format!("{PATH}/mine/release")).await.expect(200);
        let path = format!("/tidegate/v1/subscriptions/{}/usage", scene.subscription);
        let usage = scene.gateway.get(&path).await.expect(200).json();
        assert_eq!((&usage["plugins"][0]["version"], &usage["heldMessages"]), (&json!(version), &held), "{usage}");
        assert!(usage["plugins"][0]["faults"]["output"].as_u64() >= faults, "{usage}");
    }
    scene.receives(&[0, 1, 2]).await;
    assert!(scene.gateway.stderr().contains("(limits.frame_bytes)"), "{}", scene.gateway.stderr());
}

// The database was changed by other means.
#[tokio::test]
async fn a_version_that_is_lost_is_rolled_away_from() {
    let mut scene = Scene::new("threshold", above(50)).await;
    upload(&scene.gateway, "hot", &component("threshold")).await.expect(201);
    scene.gateway.stop().await;
    let mut database = scene.gateway.database().await;
    sqlx::query("DELETE FROM plugin WHERE version = 1").execute(&mut database).await.unwrap();
    drop(database);
    scene.gateway.restart_process().await;
    scene.consumer = scene.gateway.reconnect("Sub1", "subA").await;
    scene.measure([60]).await;
    scene.put(&json!({"plugin": "hot", "version": 2, "share": 1})).await.expect(200);
    scene.promote().await.expect(204);
    scene.receives(&[60]).await;
}

#[tokio::test]
async fn transforms_have_canaries_and_bodies_are_compared() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    for _ in 0..2 {
        upload(&gateway, "cut", &component("fragments-to-copy")).await.expect(201);
    }
    let mut wanted = forwarded("Sub1", &device);
    wanted["subscriptionFilter"]["typeFilter"] = json!("'t'");
    wanted["tidegate"] = json!({"transforms": [{"plugin": "cut", "version": 1, "settings": ["c8y_Reading"]}]});
    let subscription = gateway.subscribe(&wanted).await["id"].as_str().unwrap().to_owned();
    let path = format!("/tidegate/v1/subscriptions/{subscription}/canary");
    let canary = json!({"plugin": "cut", "version": 2, "settings": ["c8y_Other"], "share": 1});
    assert_eq!(gateway.put(&path, &canary).await.expect(200).json()["place"], "transforms[0]");
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    gateway.measure(&device, "t", 1).await;
    gateway.measure(&device, "u", 1).await;
    let mut other = measurement(&device, "t", 1);
    other.as_object_mut().unwrap().remove("c8y_Reading");
    other["c8y_More"] = json!({"M": {"value": 1}});
    gateway.post_measurement(&other).await.expect(201);
    assert!(consumer.receive().await.json().get("c8y_Reading").is_none());
    consumer.receive().await;
    let compared = gateway.get(&path).await.expect(200).json()["comparison"].clone();
    let counts = ["messages", "equal", "bodiesDiffer"].map(|name| compared[name].as_u64().unwrap());
    assert_eq!(counts, [2, 1, 1], "{compared}");
}

#[tokio::test]
async fn what_is_wrong_is_refused_and_changes_nothing() {
    let scene = Scene::new("threshold", above(50)).await;
    let gateway = &scene.gateway;
    for (name, guest) in [("cut", "fragments-to-copy"), ("hot", "threshold"), ("other", "type-filter")] {
        upload(gateway, name, &component(guest)).await.expect(201);
    }
    let good = json!({"plugin": "hot", "version": 2, "share": 0.5});
    for (changes, expected) in [
        (json!({"version": 7}), "canary.plugin: There is no plugin 'hot' in version 7."),
        (json!({"version": 1}), "version: is what the subscription has at filters[0]"),
        (json!({"plugin": "none"}), "plugin: 'none' is not among those that the subscription names"),
        (json!({"plugin": "none", "place": "filters[0]"}), "canary.plugin: There is no plugin 'none'"),
        (
            json!({"plugin": "cut", "version": 1, "place": "filters[0]"}),
            "'cut' is a transform, and this takes a filter",
        ),
        (json!({"place": "filters[1]"}), "place: the subscription has no plugin at filters[1]"),
        (json!({"place": "filters"}), "place: must be like 'filters[0]'"),
        (json!({"settings": {"above": true}}), "canary.settings: "),
        (json!({"share": 0}), "share: must be more than 0 and at most 1"),
        (json!({"share": 2}), "share: must be more than 0 and at most 1"),
        (json!({"share": null}), "share: must say"),
        (json!({"colour": 1}), "colour: is not a known member"),
    ] {
        let mut canary = good.clone();
        canary.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        scene.put(&canary).await.error(422, expected);
        gateway.get(&scene.path()).await.error(404, "has no canary");
    }
    assert_eq!(scene.filter().await["version"], 1);

    // Of other tenants and of nobody.
    let keeper = gateway.tenant("plant1").await;
    gateway.add_user("edge", "reader", "ROLE_TIDEGATE_PLUGIN_ADMIN").await;
    scene.put(&good).await.expect(200);
    let calls = |path: &str| {
        [
            gateway.get(path),
            gateway.put(path, &good),
            gateway.delete(path),
            gateway.call("POST", &format!("{path}/promote")),
        ]
    };
    for call in calls(&scene.path()) {
        call.user(&keeper, PASSWORD).await.error(404, "Finding subscription from database failed");
    }
    for call in calls(&scene.path()) {
        call.user("edge/reader", PASSWORD).await.error(403, "");
    }
    for call in ["4711", "x"].into_iter().flat_map(|id| calls(&format!("/tidegate/v1/subscriptions/{id}/canary"))) {
        call.await.error(404, "Finding subscription from database failed");
    }
    assert_eq!(scene.canary().await["version"], 2, "nobody has changed it");
    // A subscription that names one twice has to be told which.
    let mut twice = of_tenant("Sub2", &["measurements"]);
    twice["tidegate"] =
        json!({"filters": [{"plugin": "hot", "settings": above(1)}, {"plugin": "hot", "settings": above(2)}]});
    let id = gateway.subscribe(&twice).await["id"].as_str().unwrap().to_owned();
    let path = format!("/tidegate/v1/subscriptions/{id}/canary");
    let mut canary = json!({"plugin": "hot", "version": 1, "share": 1});
    gateway.put(&path, &canary).await.error(422, "place: must say which");
    canary["place"] = json!("filters[1]");
    assert_eq!(gateway.put(&path, &canary).await.expect(200).json()["settings"], above(2));
    // It goes with the subscription.
    gateway.delete(&format!("/notification2/subscriptions/{id}")).await.expect(204);
    gateway.get(&path).await.error(404, "Finding subscription");
    gateway.delete(&format!("{PATH}/hot/versions/1")).await.error(409, &scene.subscription);
}

#[tokio::test]
async fn versions_are_rolled_from_the_terminal() {
    let scene = Scene::new("threshold", above(50)).await;
    upload(&scene.gateway, "hot", &component("threshold")).await.expect(201);
    let url = format!("http://{}", scene.gateway.addr);
    let env = [("TIDEGATE_URL", &*url), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)];
    let run = async |command: &str, more: &[&str]| {
        let arguments = [&["plugin", command, &scene.subscription], more].concat();
        scene.gateway.command(&arguments, &env, "plugin").await
    };
    let (done, out, error) = run("roll", &["hot", "2", "--share", "0.1"]).await;
    let line = format!("subscription {} tries hot 2 on a share of 0.1 (else hot 1)\n", scene.subscription);
    assert!(done && out == line, "{out}{error}");
    let (done, out, error) = run("canary", &["--json"]).await;
    assert!(done && out.contains("\"share\":0.1"), "{out}{error}");
    assert!(run("rollback", &[]).await.0);
    assert_eq!(scene.filter().await["version"], 1);
    let settings = r#"{"value":"/c8y_Reading/R/value","above":70.50}"#;
    assert!(run("roll", &["hot", "latest", "--share", "1", "--settings", settings]).await.0);
    assert!(run("promote", &[]).await.0);
    assert_eq!(
        (&scene.filter().await["version"], &scene.filter().await["settings"]["above"]),
        (&json!(2), &json!(70.5))
    );
    let (done, _, error) = run("promote", &[]).await;
    assert!(!done && error.contains("has no canary"), "{error}");
    // Without a share it is done at once.
    let line = format!("subscription {} uses hot 1 (was hot 2)\n", scene.subscription);
    let (done, out, error) = run("roll", &["hot", "1"]).await;
    assert!(done && out == line, "{out}{error}");
    assert_eq!(scene.filter().await["version"], 1);
    scene.gateway.get(&scene.path()).await.error(404, "has no canary");
}

/// A gateway with sources whose measurements all pass version 1 of a filter on their way to `Sub1`.
struct Rolled {
    gateway: Gateway,
    devices: Vec<String>,
    path: String,
}

impl Rolled {
    const SOURCES: usize = 20;

    async fn new() -> Self {
        let gateway = Gateway::start().await;
        for _ in 0..2 {
            upload(&gateway, "hot", &component("threshold")).await.expect(201);
        }
        let mut devices = Vec::new();
        for _ in 0..Self::SOURCES {
            devices.push(gateway.device("pump").await);
        }
        let mut wanted = of_tenant("Sub1", &["measurements"]);
        wanted["tidegate"] = json!({"filters": [{"plugin": "hot", "version": 1, "settings": {
            "value": "/c8y_Reading/R/value", "below": 1e9}}]});
        let id = gateway.subscribe(&wanted).await["id"].as_str().unwrap().to_owned();
        gateway.consumer("Sub1", "subA").await.close().await;
        Self { gateway, devices, path: format!("/tidegate/v1/subscriptions/{id}/canary") }
    }

    /// Measurements with these values of each source, in one request.
    fn bulk(&self, values: std::ops::Range<u64>) -> Call {
        let all = values.flat_map(|value| self.devices.iter().map(move |device| measurement(device, "t", value)));
        let body = json!({"measurements": all.collect::<Vec<_>>()});
        let call = self.gateway.call("POST", "/measurement/measurements").json(&body);
        call.header("X-Cumulocity-Processing-Mode", "TRANSIENT")
    }

    fn put(&self, version: u32, share: f64) -> Call {
        self.gateway.put(&self.path, &json!({"plugin": "hot", "version": version, "share": share}))
    }

    fn promote(&self) -> Call {
        self.gateway.call("POST", &format!("{}/promote", self.path))
    }

    /// The version in force, and the canary's.
    #[cfg(feature = "faults")]
    async fn versions(&self) -> (u64, Option<u64>) {
        let canary = self.gateway.get(&self.path).await;
        let canary = (canary.status == 200).then(|| canary.json()["version"].as_u64().unwrap());
        let list = self.gateway.get("/notification2/subscriptions").await.expect(200).json();
        let filter = &list["subscriptions"][0]["tidegate"]["filters"][0];
        (filter["version"].as_u64().unwrap(), canary)
    }
}

// Acceptance 3: "Rolling versions back and forth 100 times under 2,000 messages/s loses and doubles nothing."
#[allow(clippy::print_stderr, reason = "what was reached")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_rolls_under_load_lose_and_double_nothing() {
    const ROLLS: u32 = 100;
    const BETWEEN_ROLLS: Duration = Duration::from_millis(50);
    /// Each request has a message of each source.
    const BETWEEN_REQUESTS: Duration = Duration::from_millis(1000 * Rolled::SOURCES as u64 / 2000);
    let scene = Rolled::new().await;
    let mut consumer = scene.gateway.reconnect("Sub1", "subA").await;
    let rolled = Cell::new(false);
    let requests = Cell::new(u64::MAX);
    let produce = async {
        let mut clock = tokio::time::interval(BETWEEN_REQUESTS);
        for value in 0.. {
            clock.tick().await;
            let is_last = rolled.get();
            if is_last {
                requests.set(value + 1);
            }
            scene.bulk(value..value + 1).await.expect(201);
            if is_last {
                return;
            }
        }
    };
    let roll = async {
        let mut clock = tokio::time::interval(BETWEEN_ROLLS);
        for number in 0..ROLLS {
            clock.tick().await;
            let version = 2 - number % 2;
            if number % 3 == 0 {
                scene.put(version, 0.5).await.expect(200);
                scene.gateway.delete(&scene.path).await.expect(204);
            }
            scene.put(version, 1.0).await.expect(200);
            scene.promote().await.expect(204);
        }
        rolled.set(true);
    };
    let consume = async {
        let mut next = [0; Rolled::SOURCES];
        while next.iter().any(|next| *next < requests.get()) {
            let body = consumer.receive().await.json();
            let source = scene.devices.iter().position(|device| body["source"]["id"] == **device).unwrap();
            assert_eq!(value_of(&body), next[source], "each once and in order, of source {source}");
            next[source] += 1;
        }
    };
    let begun = Instant::now();
    tokio::join!(produce, roll, consume);
    let (messages, seconds) = (requests.get() * Rolled::SOURCES as u64, begun.elapsed().as_secs_f64());
    eprintln!("rollout: {ROLLS} rolls in {seconds:.1} s under {:.0} messages/s", messages as f64 / seconds);
    assert_eq!(consumer.frames_until_pong().await, 0, "nothing comes twice");
}

/// Kills the process at a named point of a promotion.
#[cfg(feature = "faults")]
mod killed {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::*;
    use crate::harness::in_time;

    // "kill -9 during a promotion: either version, nothing lost."
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_promotion_that_is_killed_is_done_or_not() {
        const END: u64 = 1_000_000;
        let mut scene = Rolled::new().await;
        // The next value of each source.
        let mut sent = 0;
        // The first change is the PUT, the second one the promotion to the version `to`.
        for (point, to, in_force, canary) in [
            ("canary-changing:2", 2, 1, Some(2)),
            ("canary-changed:2", 2, 2, None),
            ("canary-changed:1", 1, 2, Some(1)),
        ] {
            scene.gateway.stop().await;
            scene.gateway.set_env("TIDEGATE_FAULT", &format!("kill-at:{point}"));
            scene.gateway.restart_process().await;
            let answered = AtomicU64::new(sent);
            let produce = async {
                let mut value = sent;
                while scene.bulk(value..value + 1).send().await.is_ok_and(|answer| answer.status == 201) {
                    value += 1;
                    answered.store(value, Relaxed);
                }
            };
            let roll = async {
                eventually("there is load", async || (answered.load(Relaxed) >= sent + 5).then_some(())).await;
                let _ = scene.put(to, 1.0).send().await;
                let _ = scene.promote().send().await;
            };
            in_time("the kill", async { tokio::join!(produce, roll) }).await;
            let (code, said) = scene.gateway.ended_badly().await;
            assert_eq!(code, None, "{point} was not reached:\n{said}");
            let answered = answered.into_inner();
            scene.gateway.set_env("TIDEGATE_FAULT", "");
            scene.gateway.restart_process().await;
            assert_eq!(scene.versions().await, (in_force, canary), "{point}");

            scene.bulk(END..END + 1).await.expect(201);
            let mut consumer = scene.gateway.reconnect("Sub1", "subA").await;
            let (mut next, mut ended) = ([sent; Rolled::SOURCES], 0);
            while ended < Rolled::SOURCES {
                let body = consumer.receive().await.json();
                let source = scene.devices.iter().position(|device| body["source"]["id"] == **device).unwrap();
                match value_of(&body) {
                    END => ended += 1,
                    value => {
                        assert_eq!(value, next[source], "{point}: of source {source}");
                        next[source] += 1;
                    }
                }
            }
            // The request that got no answer was carried out or not.
            assert!([answered, answered + 1].contains(&next[0]), "{point}: {next:?}, {answered} were answered");
            assert!(next.iter().all(|count| *count == next[0]), "{point}: {next:?}");
            sent = answered + 1;
            consumer.close().await;
        }
    }
}
