//! Functions in JavaScript as plugins, and what plugins keep for each source.

use serde_json::{Value, json};

use crate::harness::{Call, Gateway, forwarded, measurement, value_of};
use crate::registry::PATH;

/// Uploads a script; the query begins with the name.
fn upload(gateway: &Gateway, query: &str, text: &str) -> Call {
    gateway.call("POST", &format!("{PATH}?name={query}")).body("text/javascript; charset=utf-8", text.to_owned())
}

fn with(topic: &str, device: &str, extension: Value) -> Value {
    let mut subscription = forwarded(topic, device);
    subscription["tidegate"] = extension;
    subscription
}

const ABOVE: &str = "
export default function (message, settings) {
  const { value } = message.body.c8y_Reading.R;
  console.log('the reading is', value);
  return value > settings.limit;
}";

/// Adds a fragment with what the message says of itself.
const STAMP: &str = "(message, settings) => ({ ...message.body, [settings.name]: [message.api, message.type] })";

async fn filters_and_shapes(config: &str) {
    let gateway = Gateway::with(config).await;
    let device = gateway.device("pump").await;
    let made = upload(&gateway, "above&world=filter", ABOVE).await.expect(201).json();
    assert_eq!((&made["world"], &made["language"]), (&json!("filter"), &json!("javascript")), "{made}");
    upload(&gateway, "stamp&world=transform", STAMP).await.expect(201);
    let downloaded = gateway.get(&format!("{PATH}/above/versions/1/wasm")).await.expect(200);
    assert_eq!((downloaded.header("content-type"), downloaded.text().as_str()), (Some("text/javascript"), ABOVE));
    let extension = json!({
        "filters": [{"plugin": "above", "settings": {"limit": 10}}],
        "transforms": [{"plugin": "stamp", "settings": {"name": "c8y_Stamp"}}],
    });
    gateway.subscribe(&with("Sub1", &device, extension)).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    for value in [9, 11, 10, 12] {
        gateway.measure(&device, "t", value).await;
    }
    for value in [11, 12] {
        let body = consumer.receive().await.json();
        assert_eq!((value_of(&body), &body["c8y_Stamp"]), (value, &json!(["measurements", "t"])), "{body}");
    }
    assert_eq!(gateway.metric("tidegate_plugin_faults_total").await, 0.0);
    let log = gateway.stderr();
    assert!(log.contains("the reading is 9") && log.contains("above"), "{log}");
    let usage = &gateway.get(&format!("{PATH}/above/versions/1")).await.json()["usage"];
    assert_eq!((&usage["messages"], &usage["dropped"]), (&json!(4), &json!(2)), "{usage}");
    assert!(usage["memoryBytes"].as_u64() > Some(1 << 16), "{usage}");
}

#[tokio::test]
async fn a_script_filters_and_another_shapes() {
    filters_and_shapes("").await;
}

#[tokio::test]
async fn scripts_run_in_the_interpreter() {
    // It is slow where the gateway is not optimized.
    filters_and_shapes("[plugins]\nengine = 'pulley'\ncall_ms = 5000\n").await;
}

#[tokio::test]
async fn what_is_wrong_with_a_script_is_told_with_its_place() {
    let gateway = Gateway::start().await;
    for (text, found) in [
        ("(message) => {\n  return message.body +;\n}", "SyntaxError: unexpected token"),
        ("(message) => {\n  return message.body +;\n}", "(line 2, column "),
        ("export default function (message) {\n\n  let let = 1;\n}", "(line 3, column "),
        ("(message) => {", "the script ends too early"),
        ("while (true) {}\nexport default () => true", "longer than it may while the script was compiled"),
        ("42", "the script is no function"),
        ("", "the script is empty"),
    ] {
        let message = upload(&gateway, "mine&world=filter", text).await.error(422, "The plugin cannot be used: ");
        assert!(message.contains(found), "{found:?} is not in {message:?}");
    }
    gateway.get(&format!("{PATH}/mine")).await.error(404, "");
}

#[tokio::test]
async fn a_script_refuses_settings_with_its_own_words() {
    let gateway = Gateway::start().await;
    let text = "export function configure({ limit }) {
        if (typeof limit !== 'number') throw new Error('limit: a number is expected');
    }
    export default ({ body }, { limit }) => body.c8y_Reading.R.value > limit";
    let made = upload(&gateway, "above&world=filter", text).await.expect(201).json();
    assert_eq!(made["configure"], "limit: a number is expected", "of {{}}: {made}");
    upload(&gateway, "above&world=filter&settings=%7B%22limit%22%3A%22x%22%7D", text)
        .await
        .error(422, "settings: limit: a");
    let device = gateway.device("pump").await;
    let using = |settings| with("Sub1", &device, json!({"filters": [{"plugin": "above", "settings": settings}]}));
    let refused = gateway.post("/notification2/subscriptions", &using(json!({"limits": 3}))).await;
    refused.error(422, "tidegate.filters[0].settings: limit: a number is expected");
    gateway.subscribe(&using(json!({"limit": 3}))).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    for value in [3, 4] {
        gateway.measure(&device, "t", value).await;
    }
    assert_eq!(value_of(&consumer.receive().await.json()), 4);
}

// "an exception in the user's function is a fault of that message, not a dead instance".
#[tokio::test]
async fn what_a_script_throws_is_a_fault_of_that_message_alone() {
    // One more than there are subscriptions that have the bad message judged.
    let gateway = Gateway::with("[plugins]\nquarantine_faults = 4\n").await;
    let (device, other) = (gateway.device("pump").await, gateway.device("other").await);
    let text = "({ type }) => { if (type === 'bad') throw new Error('that is bad'); return true }";
    upload(&gateway, "mine&world=filter", text).await.expect(201);
    let (mut consumers, mut holding) = (Vec::new(), Vec::new());
    for (topic, on_fault) in [("Hold", "hold"), ("Drop", "drop"), ("Pass", "pass")] {
        for source in [&device, &other] {
            let extension = json!({"filters": [{"plugin": "mine"}], "onFault": on_fault});
            let made = gateway.subscribe(&with(topic, source, extension)).await;
            holding.push(made["id"].as_str().unwrap().to_owned());
        }
        consumers.push(gateway.consumer(topic, "subA").await);
    }
    let all = [(&device, "t", 0), (&device, "bad", 1), (&device, "t", 2), (&other, "t", 3)];
    let all = all.map(|(source, kind, value)| measurement(source, kind, value));
    gateway.post("/measurement/measurements", &json!({"measurements": all})).await.expect(201);
    for (consumer, values) in consumers.iter_mut().zip([&[0, 3][..], &[0, 2, 3], &[0, 1, 2, 3]]) {
        for value in values {
            assert_eq!(value_of(&consumer.receive().await.json()), *value, "of {values:?}");
        }
        assert_eq!(consumer.frames_until_pong().await, 0, "{values:?} is all");
    }
    let shown = gateway.get(&format!("{PATH}/mine/versions/1")).await.expect(200).json();
    assert_eq!((&shown["heldMessages"], shown.get("quarantine")), (&json!(2), None), "{shown}");
    assert_eq!(shown["usage"]["faults"].as_object().unwrap().keys().collect::<Vec<_>>(), ["refused"], "{shown}");
    assert!(gateway.stderr().contains("that is bad"), "{}", gateway.stderr());
    let fault = &shown["usage"]["lastFault"];
    let reason = fault["reason"].as_str().unwrap();
    assert!(fault["kind"] == "refused" && reason.starts_with("the plugin refused: Error: that is bad"), "{fault}");
    let last_fault = async |subscription: &str| {
        let path = format!("/tidegate/v1/subscriptions/{subscription}/usage");
        gateway.get(&path).await.expect(200).json()["plugins"][0]["lastFault"]["reason"].clone()
    };
    assert_eq!(last_fault(&holding[0]).await, fault["reason"]);
    assert_eq!(last_fault(&holding[1]).await, Value::Null, "the other device sent nothing bad");
    let released = gateway.call("POST", &format!("{PATH}/mine/release")).await.expect(200).json();
    assert_eq!((&released["held"], &released["lastFault"]["reason"]), (&json!(2), &fault["reason"]), "{released}");
}

// `limits.frame_bytes`: the body fits into `plugins.output_bytes`, but not as Base64 into a notification. Producers and other
// subscriptions have nothing to do with it.
#[tokio::test]
async fn what_a_transform_makes_too_large_is_a_fault_of_that_message_alone() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let text = "(message) => message.type === 'bad' ? new Uint8Array(800000).fill(200) : message";
    upload(&gateway, "mine&world=transform", text).await.expect(201);
    gateway.subscribe(&forwarded("Plain", &device)).await;
    let mut consumers = vec![gateway.consumer("Plain", "subA").await];
    let mut made = Vec::new();
    for (topic, on_fault) in [("Hold", "hold"), ("Drop", "drop"), ("Pass", "pass")] {
        let extension = json!({"transforms": [{"plugin": "mine"}], "onFault": on_fault});
        made.push(gateway.subscribe(&with(topic, &device, extension)).await["id"].as_str().unwrap().to_owned());
        consumers.push(gateway.consumer(topic, "subA").await);
    }
    let all = [("t", 0), ("bad", 1), ("t", 2)].map(|(kind, value)| measurement(&device, kind, value));
    gateway.post("/measurement/measurements", &json!({"measurements": all})).await.expect(201);
    for (consumer, values) in consumers.iter_mut().zip([&[0, 1, 2][..], &[0], &[0, 2], &[0, 1, 2]]) {
        for value in values {
            assert_eq!(value_of(&consumer.receive().await.json()), *value, "of {values:?}");
        }
        assert_eq!(consumer.frames_until_pong().await, 0, "{values:?} is all");
    }
    let shown = gateway.get(&format!("{PATH}/mine/versions/1")).await.expect(200).json();
    let faults = &shown["usage"]["faults"]["output"];
    assert!(faults.as_u64() >= Some(3), "once each, and each time that the held one is tried again: {shown}");
    for (id, outcome) in made.iter().zip(["held", "dropped", "forwarded"]) {
        let subscription = format!("/tidegate/v1/subscriptions/{id}");
        let usage = gateway.get(&format!("{subscription}/usage")).await.expect(200).json();
        assert!(usage["plugins"][0]["faults"]["output"].as_u64() >= Some(1), "{usage}");
        let message = json!({"body": measurement(&device, "bad", 3)});
        let explained = gateway.post(&format!("{subscription}/explain"), &message).await.expect(200).json();
        let reason = explained["steps"][0]["fault"]["reason"].as_str().unwrap_or_default();
        let too_large = reason.starts_with("the plugin returned a body that makes a notification of 10667")
            && reason.ends_with(" bytes, of at most 1048576 (limits.frame_bytes)");
        assert!(too_large && explained["outcome"] == outcome, "{explained}");
    }
    assert!(gateway.stderr().contains("(limits.frame_bytes)"), "{}", gateway.stderr());
}

// `plugins.configure_ms`: to compile the script takes longer than `plugins.call_ms`, here by far.
#[tokio::test]
async fn a_script_that_is_slow_to_compile_is_there_after_a_restart_as_before() {
    const ROOMY: &str = "[plugins]\nconfigure_ms = 30000\nretry_seconds = 1\n";
    let mut gateway = Gateway::with(ROOMY).await;
    let (device, other) = (gateway.device("pump").await, gateway.device("other").await);
    let text = "let n = 0;\nfor (let i = 0; i < 5_000_000; i++) n += i;\nexport default (message) => n > 0";
    upload(&gateway, "mine&world=filter", text).await.expect(201);
    for (topic, source, on_fault) in [("Drop", &device, "drop"), ("Hold", &other, "hold")] {
        let extension = json!({"filters": [{"plugin": "mine"}], "onFault": on_fault});
        gateway.subscribe(&with(topic, source, extension)).await;
        gateway.consumer(topic, "subA").await.close().await;
    }
    gateway.measure(&device, "t", 1).await;
    gateway.restart().await;
    gateway.measure(&device, "t", 2).await;
    let mut consumer = gateway.reconnect("Drop", "subA").await;
    for value in [1, 2] {
        assert_eq!(value_of(&consumer.receive().await.json()), value);
    }
    assert_eq!(gateway.metric("tidegate_plugin_faults_total").await, 0.0, "{}", gateway.stderr());

    // With less time it is unavailable, and is well again with more.
    std::fs::write(gateway.path("config.toml"), "[plugins]\nconfigure_ms = 1\n").unwrap();
    gateway.restart().await;
    gateway.measure(&other, "t", 3).await;
    assert_eq!(gateway.metric("tidegate_messages_held").await, 1.0, "{}", gateway.stderr());
    upload(&gateway, "mine&world=filter", text).await.error(422, "longer than it may while the script was compiled");
    std::fs::write(gateway.path("config.toml"), ROOMY).unwrap();
    gateway.restart().await;
    assert_eq!(value_of(&gateway.reconnect("Hold", "subA").await.receive().await.json()), 3);
}

// What the transform leaves as it is, is the producer's.
#[tokio::test]
async fn a_message_that_is_too_large_by_itself_is_413_with_a_transform_as_without() {
    let gateway = Gateway::with("[limits]\nframe_bytes = 2000\n").await;
    let device = gateway.device("pump").await;
    upload(&gateway, "mine&world=transform", "(m) => m.type === 'less' ? 'less' : m").await.expect(201);
    gateway.subscribe(&with("Sub1", &device, json!({"transforms": [{"plugin": "mine"}], "onFault": "drop"}))).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let large = |kind: &str| {
        let mut large = measurement(&device, kind, 1);
        large["c8y_Text"] = json!("x".repeat(2000));
        large
    };
    gateway.post_measurement(&large("t")).await.error(413, "2000");
    gateway.post_measurement(&large("less")).await.expect(201);
    assert_eq!(consumer.receive().await.body, "less");
}

// Both share an instance, and its calls; what these cost is told of each.
#[tokio::test]
async fn what_plugins_use_is_told_by_subscription() {
    let gateway = Gateway::start().await;
    upload(&gateway, "above&world=filter", ABOVE).await.expect(201);
    upload(&gateway, "stamp&world=transform", STAMP).await.expect(201);
    let (mut made, mut all) = (Vec::new(), Vec::new());
    for (topic, values) in [("Sub1", 5..15), ("Sub2", 9..14)] {
        let device = gateway.device(topic).await;
        let mut subscription = with(
            topic,
            &device,
            json!({
                "filters": [{"plugin": "above", "settings": {"limit": 10}}],
                "transforms": [{"plugin": "stamp", "settings": {"name": "c8y_Stamp"}}],
            }),
        );
        subscription["subscriptionFilter"]["typeFilter"] = json!("'t'");
        made.push(gateway.subscribe(&subscription).await["id"].as_str().unwrap().to_owned());
        gateway.consumer(topic, "subA").await.close().await;
        all.extend(values.map(|value| measurement(&device, "t", value)));
    }
    gateway.post("/measurement/measurements", &json!({"measurements": all})).await.expect(201);
    let mut processor_time = 0;
    for (id, messages, dropped) in [(&made[0], 10, 6), (&made[1], 5, 2)] {
        let usage = gateway.get(&format!("/tidegate/v1/subscriptions/{id}/usage")).await.expect(200).json();
        let counted = |at: usize| {
            let plugin = &usage["plugins"][at];
            ["plugin", "version", "messages", "dropped"].map(|member| plugin[member].clone())
        };
        assert_eq!(counted(0), [json!("type-filter"), Value::Null, json!(messages), json!(0)], "{usage}");
        assert_eq!(counted(1), [json!("above"), json!(1), json!(messages), json!(dropped)], "{usage}");
        assert_eq!(counted(2), [json!("stamp"), json!(1), json!(messages - dropped), json!(0)], "{usage}");
        assert_eq!((usage["plugins"].as_array().unwrap().len(), &usage["heldMessages"]), (3, &json!(0)), "{usage}");
        let time = usage["plugins"][1]["processorMicroseconds"].as_u64().unwrap();
        assert!(time > 0, "{usage}");
        processor_time += time;
    }
    let of_both = &gateway.get(&format!("{PATH}/above/versions/1")).await.json()["usage"];
    assert_eq!((&of_both["messages"], &of_both["dropped"]), (&json!(15), &json!(8)), "{of_both}");
    let whole = of_both["processorMicroseconds"].as_u64().unwrap();
    assert!((processor_time..processor_time + 3).contains(&whole), "{processor_time} of {whole}");
    gateway.get("/tidegate/v1/subscriptions/1/usage").await.error(404, "");
}

#[tokio::test]
async fn a_script_keeps_something_for_each_source() {
    let gateway = Gateway::start().await;
    let devices = [gateway.device("a").await, gateway.device("b").await];
    // The first of so many.
    let text = "(message, settings, state) => (state.seen = (state.seen ?? 0) + 1) % settings.of === 1";
    upload(&gateway, "first&world=filter", text).await.expect(201);
    let mut subscription = with("Sub1", "", json!({"filters": [{"plugin": "first", "settings": {"of": 3}}]}));
    subscription["context"] = json!("tenant");
    subscription.as_object_mut().unwrap().remove("source");
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    for value in 0..7 {
        // The second one begins later.
        for (device, from) in devices.iter().zip([0, 2]) {
            if value >= from {
                gateway.measure(device, "t", value).await;
            }
        }
    }
    for (device, value) in [(0, 0), (1, 2), (0, 3), (1, 5), (0, 6)] {
        let body = consumer.receive().await.json();
        assert_eq!((&body["source"]["id"], value_of(&body)), (&json!(devices[device]), value), "{body}");
    }
    assert_eq!(consumer.frames_until_pong().await, 0);
}

// A stateful instance belongs to one subscription: another of the same settings sees nothing of it.
#[tokio::test]
async fn two_subscriptions_of_equal_settings_each_have_their_own_rate_limit() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut consumers = Vec::new();
    for topic in ["Sub1", "Sub2"] {
        let extension = json!({"filters": [{"plugin": "rate-limit", "settings": {"seconds": 60}}]});
        gateway.subscribe(&with(topic, &device, extension)).await;
        consumers.push(gateway.consumer(topic, "subA").await);
    }
    for (value, second) in [(0, 0), (1, 30), (2, 60), (3, 119), (4, 120)] {
        let mut body = measurement(&device, "t", value);
        body["time"] = json!(format!("2026-03-01T12:{:02}:{:02}.000Z", second / 60, second % 60));
        gateway.post_measurement(&body).await.expect(201);
    }
    for consumer in &mut consumers {
        for value in [0, 2, 4] {
            assert_eq!(value_of(&consumer.receive().await.json()), value);
        }
        assert_eq!(consumer.frames_until_pong().await, 0);
    }
}
