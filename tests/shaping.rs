//! What the built-in plugins make of messages: `typeFilter`, `fragmentsToCopy`, and bodies as they go out.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::harness::{Endpoint, Gateway, forwarded, measurement, of_tenant, typed, value_of};
use crate::plugins::faulty;

const PATH: &str = "/measurement/measurements";

// Two subscriptions of equal settings share nothing that a plugin remembers.
#[tokio::test]
async fn example_filters_remember_each_source_for_each_subscription() {
    let gateway = Gateway::start().await;
    let [one, two] = [gateway.device("one").await, gateway.device("two").await];
    let value = "/c8y_Reading/R/value";
    let filters = json!([
        {"plugin": "threshold", "settings": {"value": value, "above": 80, "hysteresis": 5}},
        {"plugin": "deadband", "settings": {"value": value, "band": 3}},
    ]);
    let mut consumers = Vec::new();
    for topic in ["Sub1", "Sub2"] {
        let mut subscription = of_tenant(topic, &["measurements"]);
        subscription["tidegate"] = json!({"filters": filters});
        let made = gateway.subscribe(&subscription).await;
        assert_eq!(made["tidegate"]["filters"], filters, "what is built in has no version");
        consumers.push(gateway.consumer(topic, "subA").await);
    }
    let measured = [
        (&one, 70, false),
        (&one, 81, true),
        (&two, 79, false),
        // It comes back by less than the hysteresis, and no further than the band.
        (&one, 78, false),
        (&one, 77, true),
        (&two, 84, true),
        // By all of it: from now on the limit counts.
        (&one, 75, false),
        (&one, 79, false),
        (&two, 83, false),
        (&two, 90, true),
        (&one, 81, true),
    ];
    for (device, value, _) in measured {
        gateway.measure(device, "t", value).await;
    }
    for consumer in &mut consumers {
        for (device, value, _) in measured.iter().filter(|(_, _, passes)| *passes) {
            let body = consumer.receive().await.json();
            assert_eq!((&body["source"]["id"], value_of(&body)), (&json!(device), *value));
        }
        assert_eq!(consumer.frames_until_pong().await, 0);
    }
}

// Seed 000, "Subscription filters": a single value, or an OData expression of `or` alone. A value may stand bare, as in the
// OpenAPI.
#[tokio::test]
async fn type_filters_let_their_types_pass() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut consumers = Vec::new();
    for (topic, filter, expected) in [
        ("One", "'temperature'", &[1, 5][..]),
        ("Two", "'temperature' or 'pressure'", &[1, 2, 5]),
        ("Three", "'temperature' or 'pressure' or 'x y'", &[1, 2, 4, 5]),
        ("Bare", "temperature", &[1, 5]),
        ("None", "'Temperature'", &[]),
    ] {
        gateway.subscribe(&typed(topic, &device, filter)).await;
        consumers.push((topic, gateway.consumer(topic, "subA").await, expected));
    }
    for (value, kind) in [(1, "temperature"), (2, "pressure"), (3, "humidity"), (4, "x y"), (5, "temperature")] {
        gateway.measure(&device, kind, value).await;
    }
    for (topic, consumer, expected) in &mut consumers {
        let mut sentinel = forwarded(topic, &gateway.device("sentinel").await);
        sentinel["subscriptionFilter"]["typeFilter"] = json!("'sentinel'");
        gateway.subscribe(&sentinel).await;
        gateway.measure(sentinel["source"]["id"].as_str().unwrap(), "sentinel", 99).await;
        for value in expected.iter().chain(&[99]) {
            assert_eq!(value_of(&consumer.receive().await.json()), *value, "{topic}");
        }
    }
}

// Seed 000, "Subscription filters": typeFilter looks at "the original message's type". Objects without one do not match, and do
// not make the request fail.
#[tokio::test]
async fn objects_without_a_type_match_no_type_filter() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut subscription = typed("Sub1", &device, "'c8y_Pump'");
    subscription["subscriptionFilter"]["apis"] = json!(["managedobjects"]);
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let object = format!("/inventory/managedObjects/{device}");
    gateway.put(&object, &json!({"name": "no type"})).await.expect(200);
    gateway.put(&object, &json!({"type": "c8y_Pump"})).await.expect(200);
    gateway.put(&object, &json!({"type": null})).await.expect(200);
    gateway.put(&object, &json!({"type": "c8y_Pump", "name": "again"})).await.expect(200);
    gateway.delete(&object).await.expect(204);
    assert_eq!(consumer.receive().await.json()["type"], "c8y_Pump");
    assert_eq!(consumer.receive().await.json()["name"], "again");
    assert_eq!(consumer.receive().await.action, "DELETE", "judged by the type it had");
}

// Seed 000, "Creating subscriptions": "only a specific subset of the fragments". A projection, not a filter; what is no
// fragment stays.
#[tokio::test]
async fn fragments_to_copy_keeps_the_named_fragments_and_what_every_object_has() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut subscription = forwarded("Sub1", &device);
    subscription["subscriptionFilter"]["apis"] = json!(["measurements", "managedobjects"]);
    subscription["fragmentsToCopy"] = json!(["c8y_Reading", "c8y_Missing"]);
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;

    let mut one = measurement(&device, "t", 1);
    one["c8y_Other"] = json!({"O": {"value": 2}});
    let posted = gateway.post_measurement(&one).await.expect(201).json();
    let mut expected = posted.clone();
    expected.as_object_mut().unwrap().remove("c8y_Other");
    assert_eq!(consumer.receive().await.json(), expected);

    let mut none = measurement(&device, "t", 1);
    none["c8y_Other"] = none["c8y_Reading"].take();
    none.as_object_mut().unwrap().remove("c8y_Reading");
    gateway.post_measurement(&none).await.expect(201);
    let bare = consumer.receive().await.json();
    let mut names: Vec<_> = bare.as_object().unwrap().keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["id", "self", "source", "time", "type"], "sent although no fragment is left");

    gateway
        .put(&format!("/inventory/managedObjects/{device}"), &json!({"type": "c8y_Pump", "c8y_X": {}}))
        .await
        .expect(200);
    let updated = consumer.receive().await;
    assert_eq!(updated.action, "UPDATE");
    let body = updated.json();
    assert_eq!((&body["id"], &body["name"], &body["type"]), (&json!(device), &json!("pump"), &json!("c8y_Pump")));
    assert_eq!((body.get("c8y_X"), body.get("c8y_IsDevice")), (None, None));
    gateway.delete(&format!("/inventory/managedObjects/{device}")).await.expect(204);
    assert_eq!(consumer.receive().await.json(), json!({"id": device}));
}

// Seed 000, "Topics and subscriptions": "multiple subscriptions can forward messages to the same topic", each in its own shape.
#[tokio::test]
async fn subscriptions_that_overlap_on_a_topic_give_a_message_each() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut mo = typed("Sub1", &device, "'t'");
    mo["fragmentsToCopy"] = json!(["c8y_A"]);
    gateway.subscribe(&mo).await;
    gateway
        .subscribe(&json!({
            "context": "tenant", "subscription": "Sub1", "fragmentsToCopy": ["c8y_B"],
            "subscriptionFilter": {"apis": ["measurements"]},
        }))
        .await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let mut one = measurement(&device, "t", 1);
    one["c8y_A"] = json!({"A": {"value": 1}});
    one["c8y_B"] = json!({"B": {"value": 2}});
    let posted = gateway.post_measurement(&one).await.expect(201).json();
    let frames = consumer.take(2).await;
    assert_ne!(frames[0].ack, frames[1].ack);
    assert!(frames[0].message_id() < frames[1].message_id());
    let mut kept: Vec<String> = Vec::new();
    for frame in &frames {
        let body = frame.json();
        assert_eq!(body["id"], posted["id"]);
        kept.extend(body.as_object().unwrap().keys().filter(|name| name.starts_with("c8y_")).cloned());
        consumer.ack(frame).await;
    }
    kept.sort_unstable();
    assert_eq!(kept, ["c8y_A", "c8y_B"]);
    gateway.measure(&device, "u", 7).await;
    let other = consumer.receive().await;
    assert_eq!((other.json()["type"].as_str(), other.json().get("c8y_A")), (Some("u"), None));
    gateway.measure(&device, "t", 8).await;
    assert_eq!(consumer.take(2).await.len(), 2);
}

// Seed 001, "Notification message header and content": UTF-8 text after a blank line. On one line, since clients split at every
// line end that Unicode knows; the text itself arrives unharmed.
#[tokio::test]
async fn a_body_is_one_line_whatever_it_holds() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Plain", &device)).await;
    let mut projected = forwarded("Projected", &device);
    projected["fragmentsToCopy"] = json!(["note"]);
    gateway.subscribe(&projected).await;
    let mut consumers = [gateway.consumer("Plain", "subA").await, gateway.consumer("Projected", "subA").await];
    let text = "a\u{2028}b\u{2029}c\u{85}d\u{b}e\u{c}f\u{1c}g\u{1d}h\u{1e}i\u{7f}j\u{feff}k ä 😀 \\ \" \n\r\t";
    let escaped: String = text
        .chars()
        .map(|letter| match letter {
            '"' => "\\\"".to_owned(),
            '\\' => "\\\\".to_owned(),
            control if control < ' ' => format!("\\u{:04x}", control as u32),
            other => other.to_string(),
        })
        .collect();
    // As raw in the request as JSON allows, over several lines.
    let raw = format!(
        "\u{20}{{\r\n\t\"source\" : {{ \"id\" : \"{device}\" }},\n\"type\":\"t\",\n\"time\":\"2026-03-01T12:00:00Z\",\n\
         \"note\": {{\n\"text\": \"{escaped}\",\n\"a\u{2028}b\": [ 1 ,\n 2 ]\n}}\n}}\r\n"
    );
    gateway.call("POST", PATH).body("application/json", raw).await.expect(201);
    for consumer in &mut consumers {
        let frame = consumer.receive().await;
        let splits = |letter: char| letter < ' ' || matches!(letter, '\u{85}' | '\u{2028}' | '\u{2029}');
        assert!(!frame.body.contains(splits), "{:?}", frame.body);
        assert_eq!(frame.json()["note"]["text"], text);
        assert_eq!(frame.json()["note"]["a\u{2028}b"], json!([1, 2]));
        assert!(frame.body.contains("\\u2028") && frame.body.contains("\\u0085"), "{}", frame.body);
    }
    let listed = gateway.get(&format!("{PATH}?source={device}")).await.expect(200).json();
    assert_eq!(listed["measurements"][0]["note"]["text"], text);
}

// The transform copies text: the order of keys and the digits of numbers stay.
#[tokio::test]
async fn key_order_and_number_text_stay() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Plain", &device)).await;
    let mut projected = forwarded("Projected", &device);
    projected["fragmentsToCopy"] = json!(["zeta", "c8y_N", "alpha"]);
    gateway.subscribe(&projected).await;
    let mut consumers = [gateway.consumer("Plain", "subA").await, gateway.consumer("Projected", "subA").await];
    let fragments = r#""zeta":{"y":{"value":1.0e5},"x":{"value":12345678901234567890.123},"b":-0.0,"a":1E400}"#;
    let more = r#""c8y_N":{"n":{"value":1.10,"unit":"C"}},"alpha":[1e-7,0.1000,100]"#;
    let body = format!(
        r#"{{{fragments},"type":"t","drop":1,"time":"2026-03-01T12:00:00.0000000Z","source":{{"id":"{device}"}},{more}}}"#
    );
    gateway.call("POST", PATH).body("application/json", body).await.expect(201);
    for (consumer, dropped) in consumers.iter_mut().zip([false, true]) {
        let body = consumer.receive().await.body;
        assert!(body.contains(fragments), "{body}");
        assert!(body.contains(more), "{body}");
        assert_eq!(body.contains("\"drop\""), !dropped);
        let place = |text: &str| body.find(text).unwrap_or_else(|| panic!("no {text} in {body}"));
        assert!(place("\"zeta\"") < place("\"type\"") && place("\"type\"") < place("\"c8y_N\""), "{body}");
        assert!(body.contains("2026-03-01T12:00:00.0000000Z"), "{body}");
    }
}

#[tokio::test]
async fn hundreds_of_subscriptions_share_what_they_can_and_still_differ() {
    // Fewer than there are settings, so that instances come and go.
    let gateway = Gateway::with("[plugins]\ninstances = 8").await;
    let device = gateway.device("pump").await;
    for number in 0..64 {
        gateway.subscribe(&typed(&format!("Sub{number}"), &device, &format!("'t{number}' or 'all'"))).await;
    }
    let mut consumers = Vec::new();
    for number in 0..64 {
        consumers.push(gateway.consumer(&format!("Sub{number}"), "subA").await);
    }
    let all: Vec<Value> = (0..64)
        .map(|number| measurement(&device, &format!("t{number}"), number))
        .chain([measurement(&device, "all", 99)])
        .collect();
    gateway.post(PATH, &json!({"measurements": all})).await.expect(201);
    for (number, consumer) in (0..64).zip(&mut consumers) {
        assert_eq!(value_of(&consumer.receive().await.json()), number);
        assert_eq!(value_of(&consumer.receive().await.json()), 99);
    }
}

// Seed 001: "If the notification is binary data or includes binary data then it will be Base64-encoded."
#[tokio::test]
async fn what_is_no_text_is_base64_in_frames_and_as_it_is_in_pushes() {
    const MADE: &[u8] = b"\xff\xfe\n\n{\"not\": JSON\r\n\0";
    let push = "[push]\nallowed_networks = '127.0.0.1'\n";
    let (gateway, _components) = faulty("fragments-to-copy", "garbage", push).await;
    let device = gateway.device("pump").await;
    let mut subscription = forwarded("Sub1", &device);
    subscription["fragmentsToCopy"] = json!(["c8y_Reading"]);
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let mut endpoint = Endpoint::start().await;
    let pushed = json!({"subscription": "Sub1", "subscriber": "subB", "push": {"uri": endpoint.url("/in")}});
    gateway.post("/tidegate/v1/consumers", &pushed).await.expect(201);
    gateway.measure(&device, "t", 1).await;

    let frame = consumer.receive().await;
    assert_eq!(frame.headers[0], "content-transfer-encoding:base64");
    assert_eq!(STANDARD.decode(&frame.body).unwrap(), MADE);
    assert!(frame.message_id() > 0);
    let request = endpoint.next().await;
    assert_eq!(request.header("content-type"), "application/octet-stream");
    assert_eq!(request.body, MADE);
}
