//! Plugins that failed too often are asked no more, until somebody lets them out; what was held for them comes in order then.

use serde_json::{Value, json};

use crate::harness::{Gateway, PASSWORD, USER, component, eventually, forwarded, measurement, typed, value_of};
use crate::hold::{mend, quarantining};
use crate::plugins::faulty;
use crate::registry::{PATH, upload};

/// A gateway whose quarantine begins at so many failed calls, with a device whose measurements pass version 1 of the uploaded plugin
/// `mine` on their way to `Sub1`.
async fn scene(guest: &str, quarantine_faults: u32) -> (Gateway, String) {
    let gateway = Gateway::with(&format!("[plugins]\nquarantine_faults = {quarantine_faults}\n")).await;
    upload(&gateway, "mine", &component(&format!("faulty/{guest}"))).await.expect(201);
    let device = gateway.device("pump").await;
    let mut subscription = forwarded("Sub1", &device);
    subscription["tidegate"] = json!({"filters": [{"plugin": "mine"}]});
    gateway.subscribe(&subscription).await;
    (gateway, device)
}

async fn plugin(gateway: &Gateway, path: &str) -> Value {
    gateway.get(&format!("{PATH}/{path}")).await.expect(200).json()
}

async fn release(gateway: &Gateway, path: &str) -> Value {
    gateway.call("POST", &format!("{PATH}/{path}/release")).await.expect(200).json()
}

// "quarantine after repeated faults": not asked any more, also after a restart.
#[tokio::test]
async fn a_plugin_in_quarantine_stays_there() {
    let (mut gateway, _components) = faulty("type-filter", "wrong-length", "quarantine_faults = 5").await;
    let device = gateway.device("pump").await;
    let mut subscription = typed("Sub1", &device, "'t'");
    subscription["tidegate"] = json!({"onFault": "drop"});
    gateway.subscribe(&subscription).await;
    let _consumer = gateway.consumer("Sub1", "subA").await;
    for value in 0..8 {
        assert_eq!(gateway.metric("tidegate_plugin_quarantined").await, f64::from(u8::from(value >= 5)), "{value}");
        gateway.measure(&device, "t", value).await;
    }
    assert_eq!(gateway.metric("tidegate_plugin_calls_total").await, 5.0);
    gateway.restart().await;
    gateway.measure(&device, "t", 8).await;
    assert_eq!(gateway.metric("tidegate_plugin_quarantined").await, 1.0);
    assert_eq!(gateway.metric("tidegate_plugin_calls_total").await, 0.0);
}

#[tokio::test]
async fn one_that_goes_on_to_fail_is_soon_back() {
    let (gateway, device) = scene("wrong-length", 3).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    let path = "mine/versions/1";
    let before = plugin(&gateway, path).await;
    assert_eq!((&before["usage"]["calls"], &before["heldMessages"]), (&json!(0), &json!(0)), "{before}");
    assert_eq!((before.get("quarantine"), &before["usage"]["faults"]), (None, &json!({})), "{before}");
    for value in 0..5 {
        // The first one is held, the others stand behind it and are judged by the attempts at it.
        gateway.measure(&device, "t", value).await;
    }
    let quarantined = async || Some(plugin(&gateway, path).await).filter(|plugin| plugin.get("quarantine").is_some());
    let first = eventually("the quarantine", quarantined).await;
    assert!(first["quarantine"]["reason"].as_str().unwrap().contains("answers to"), "{first}");
    assert_eq!((&first["heldMessages"], &first["subscriptions"]), (&json!(5), &json!(1)), "{first}");
    let usage = &first["usage"];
    assert!(usage["faults"]["wrong_length"].as_u64() >= Some(3), "{first}");
    for member in ["calls", "messages", "processorMicroseconds", "memoryBytes"] {
        assert!(usage[member].as_u64() > Some(0), "{member} of {first}");
    }
    let released = release(&gateway, path).await;
    for (member, value) in
        [("lifted", json!(true)), ("subscriptions", json!(1)), ("passed", json!(0)), ("held", json!(5))]
    {
        assert_eq!(released[member], value, "{member} of {released}");
    }
    assert!(released["quarantine"]["reason"].as_str().unwrap().contains("answers to"), "back already: {released}");
    let fault = &released["lastFault"];
    assert_eq!(
        [&fault["plugin"], &fault["version"], &fault["kind"]],
        [&json!("mine"), &json!(1), &json!("wrong_length")]
    );
    let second = eventually("the quarantine again", quarantined).await;
    assert!(second["usage"]["calls"].as_u64() > usage["calls"].as_u64(), "it was asked in between: {second}");
    assert_ne!(second["quarantine"]["since"], first["quarantine"]["since"], "{second}");
}

// A function that throws on everything is in quarantine; on the messages of one device, it is not, however many those are.
#[tokio::test]
async fn one_that_refuses_everything_is_asked_no_more() {
    let gateway = Gateway::with("[plugins]\nquarantine_faults = 5\n").await;
    let (good, bad) = (gateway.device("good").await, gateway.device("bad").await);
    let text =
        format!("({{ source }}) => {{ if (source === '{bad}') throw new Error('no such reading'); return true }}");
    for (name, text) in [("bad-device", &*text), ("broken", "() => { throw new Error('no such setting') }")] {
        let upload = gateway.call("POST", &format!("{PATH}?name={name}&world=filter"));
        upload.body("text/javascript", text.to_owned()).await.expect(201);
        for device in [&good, &bad] {
            let mut subscription = forwarded(&name.replace('-', ""), device);
            subscription["tidegate"] = json!({"filters": [{"plugin": name}], "onFault": "drop"});
            gateway.subscribe(&subscription).await;
        }
    }
    let mut consumer = gateway.consumer("baddevice", "subA").await;
    let _other = gateway.consumer("broken", "subA").await;
    gateway.measure(&good, "t", 0).await;
    for value in 1..30 {
        gateway.measure(&bad, "t", value).await;
    }
    gateway.measure(&good, "t", 30).await;
    for value in [0, 30] {
        assert_eq!(value_of(&consumer.receive().await.json()), value);
    }
    let sound = plugin(&gateway, "bad-device/versions/1").await;
    assert_eq!((sound.get("quarantine"), &sound["usage"]["faults"]), (None, &json!({"refused": 29})), "{sound}");
    let broken = plugin(&gateway, "broken/versions/1").await;
    assert_eq!(broken["usage"]["faults"], json!({"refused": 5, "quarantined": 26}), "{broken}");
    let reason = broken["quarantine"]["reason"].as_str().unwrap();
    assert!(reason.contains("Error: no such setting (line 1, column"), "{broken}");
    assert_eq!(broken["usage"]["lastFault"]["reason"], broken["quarantine"]["reason"], "{broken}");
}

// A guest that fails on every third message of an instance, and so is well when it begins anew.
#[tokio::test]
async fn what_was_held_comes_in_order_when_it_is_let_out() {
    const COUNT: u64 = 12;
    let (gateway, device) = scene("trap-third", 2).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    for value in 0..COUNT {
        gateway.measure(&device, &format!("t{value}"), value).await;
    }
    let held = plugin(&gateway, "mine/versions/1").await["heldMessages"].as_u64().unwrap();
    assert_eq!(held, COUNT - 4, "the second failure is that of the fifth message, and all behind it wait");
    let released = release(&gateway, "mine").await;
    let expected = json!({"lifted": true, "subscriptions": 1, "passed": held, "dropped": 0, "held": 0});
    assert_eq!(released, expected);
    for value in 0..COUNT {
        assert_eq!(value_of(&consumer.receive().await.json()), value);
    }
    assert_eq!(consumer.frames_until_pong().await, 0);
}

#[tokio::test]
async fn a_built_in_plugin_that_is_mended_is_let_out_by_hand() {
    let (mut gateway, components) = faulty("type-filter", "wrong-length", "quarantine_faults = 2").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&typed("Sub1", &device, "'t'")).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    for value in 0..4 {
        gateway.measure(&device, if value == 2 { "other" } else { "t" }, value).await;
    }
    let quarantined = async || plugin(&gateway, "type-filter").await.get("quarantine").map(drop);
    eventually("the quarantine", quarantined).await;
    mend(&components, "type-filter");
    gateway.restart().await;
    let shown = plugin(&gateway, "type-filter").await;
    assert_eq!((&shown["heldMessages"], &shown["subscriptions"]), (&json!(4), &json!(1)), "{shown}");
    assert_eq!(gateway.metric("tidegate_plugin_calls_total").await, 0.0, "the start lets nothing out");

    let url = format!("http://{}", gateway.addr);
    let env = [("TIDEGATE_URL", &*url), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)];
    let (done, out, error) = gateway.command(&["plugin", "release", "type-filter"], &env, "plugin").await;
    assert!(done && out.contains("lifted: true\n") && out.contains("dropped: 1\n"), "{out}{error}");
    assert!(out.contains("passed: 3\n") && out.contains("held: 0\n"), "{out}");
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    for value in [0, 1, 3] {
        assert_eq!(value_of(&consumer.receive().await.json()), value);
    }
    // It stays out.
    let out_of_it = async || (gateway.metric("tidegate_plugin_quarantined").await == 0.0).then_some(());
    eventually("it is out", out_of_it).await;
    gateway.restart().await;
    assert_eq!(plugin(&gateway, "type-filter").await.get("quarantine"), None);
}

// One subscription for each device is how most have it: a commit for each of them would hold up what comes in meanwhile.
#[tokio::test]
async fn many_subscriptions_are_let_out_together() {
    const DEVICES: u64 = 100;
    const HELD: u64 = 4;
    let (mut gateway, components, devices) = quarantining(DEVICES as usize).await;
    let all = (0..HELD).flat_map(|value| devices.iter().map(move |device| measurement(device, "t", value)));
    let all = json!({"measurements": all.collect::<Vec<_>>()});
    gateway.post("/measurement/measurements", &all).await.expect(201);
    mend(&components, "type-filter");
    gateway.restart().await;
    let shown = plugin(&gateway, "type-filter").await;
    assert_eq!((&shown["heldMessages"], &shown["subscriptions"]), (&json!(DEVICES * HELD), &json!(DEVICES)), "{shown}");
    let commits = async || gateway.metric("tidegate_commit_seconds_count").await;
    let before = commits().await;
    let expected = json!({"lifted": true, "subscriptions": DEVICES, "passed": DEVICES * HELD, "dropped": 0, "held": 0});
    assert_eq!(release(&gateway, "type-filter").await, expected);
    let taken = commits().await - before;
    assert!(taken < 20.0, "a release takes 256 at a time, and took {taken} commits");
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    for value in 0..HELD {
        for device in &devices {
            let body = consumer.receive().await.json();
            assert_eq!((&body["source"]["id"], value_of(&body)), (&json!(device), value), "the oldest comes first");
        }
    }
    assert_eq!(consumer.frames_until_pong().await, 0);
}

#[tokio::test]
async fn each_tenant_lets_out_its_own_and_only_who_may() {
    let (gateway, components) = faulty("type-filter", "wrong-length", "quarantine_faults = 1").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&typed("Sub1", &device, "'t'")).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    gateway.measure(&device, "t", 1).await;
    let shown = plugin(&gateway, "type-filter").await;
    assert!(shown.get("quarantine").is_some() && shown["usage"]["calls"] == 1, "{shown}");
    // The built-in plugin is another tenant's, too.
    let keeper = gateway.tenant("plant1").await;
    let foreign = gateway.get(&format!("{PATH}/type-filter")).user(&keeper, PASSWORD).await.expect(200).json();
    assert_eq!((foreign.get("quarantine"), &foreign["usage"]["calls"]), (None, &json!(0)), "{foreign}");
    let path = format!("{PATH}/type-filter/release");
    let released = gateway.call("POST", &path).user(&keeper, PASSWORD).await.expect(200).json();
    assert_eq!((&released["lifted"], &released["subscriptions"]), (&json!(false), &json!(0)), "{released}");
    assert!(plugin(&gateway, "type-filter").await.get("quarantine").is_some());
    gateway.add_user("edge", "subscriber", "ROLE_NOTIFICATION_2_ADMIN").await;
    gateway.call("POST", &path).user("edge/subscriber", PASSWORD).await.error(403, "");
    for path in ["none", "type-filter/versions/1", "none/versions/1", "type-filter/versions/x"] {
        gateway.call("POST", &format!("{PATH}/{path}/release")).await.error(404, "");
    }
    drop(components);
}
