//! Subscriptions say what they would make of a message (`docs/http.md`, "Try and explain").

use serde_json::{Value, json};

use crate::harness::{
    Call, Gateway, PASSWORD, component, eventually, forwarded, measurement, of_object, typed, value_of,
};
use crate::registry::upload;
use crate::trial::of_type;

fn explain(gateway: &Gateway, subscription: &Value, message: &Value) -> Call {
    let id = subscription["id"].as_str().unwrap();
    gateway.post(&format!("/tidegate/v1/subscriptions/{id}/explain"), message)
}

#[tokio::test]
async fn a_message_is_followed_to_its_frame() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut wanted = typed("Sub1", &device, "'t'");
    wanted["fragmentsToCopy"] = json!(["c8y_Reading"]);
    let subscription = gateway.subscribe(&wanted).await;
    let message = json!({"body": measurement(&device, "t", 21)});

    let explained = explain(&gateway, &subscription, &message).await.expect(200).json();
    assert_eq!(explained["index"], json!({"types": ["measurements"]}));
    let steps: Vec<_> =
        explained["steps"].as_array().unwrap().iter().map(|step| (&step["plugin"], &step["verdict"])).collect();
    assert_eq!(steps, [(&json!("type-filter"), &json!("pass")), (&json!("fragments-to-copy"), &json!("shaped"))]);
    assert_eq!((&explained["outcome"], &explained["instances"]), (&json!("forwarded"), &json!("fresh")));
    assert_eq!(explained["frames"][0]["headers"], json!([format!("/edge/measurements/{device}"), "CREATE"]));
    assert_eq!((&explained["wanted"], &explained["fits"]), (&json!(false), &json!(true)), "nobody has subscribed");
    assert_eq!(value_of(&explained["body"]), 21);
    assert_eq!(explained["topic"]["name"], "Sub1");

    // What it says is what comes to pass.
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    gateway.measure(&device, "t", 21).await;
    let frame = consumer.receive().await;
    let explained = explain(&gateway, &subscription, &json!({"body": frame.json()})).await.expect(200).json();
    assert_eq!((&explained["body"], &explained["wanted"]), (&frame.json(), &json!(true)));
    assert_eq!(explained["topic"]["consumers"][0]["name"], "subA");
    let (dropped, message) = ("dropped", json!({"body": measurement(&device, "u", 21)}));
    let explained = explain(&gateway, &subscription, &message).await.expect(200).json();
    assert_eq!((&explained["outcome"], &explained["frames"]), (&json!(dropped), &json!([])));
    assert_eq!(explained["steps"].as_array().unwrap().len(), 1);
    assert!(explained.get("body").is_none());
    eventually("nothing was sent", async || (gateway.metric("tidegate_backlog_messages").await == 0.0).then_some(()))
        .await;
}

#[tokio::test]
async fn what_the_index_does_not_find_is_told_with_its_reason() {
    let gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    let child = json!({"managedObject": {"id": valve}});
    gateway.post(&format!("/inventory/managedObjects/{pump}/childDevices"), &child).await.expect(201);
    let subscription = gateway.subscribe(&of_object("Sub1", &pump, &["events", "eventsWithChildren"])).await;
    let of = |api: &str, source: &str| json!({"api": api, "source": source, "body": {}});
    for (message, types, reason) in [
        (of("events", &pump), json!(["events", "eventsWithChildren"]), ""),
        (of("events", &valve), json!(["eventsWithChildren"]), ""),
        (of("events", "99"), json!([]), "its source, '99', is neither that of the subscription"),
        (of("alarms", &valve), json!([]), "whose filter does not name 'alarmsWithChildren'"),
        (of("measurements", &pump), json!([]), "does not name 'measurements'"),
    ] {
        let explained = explain(&gateway, &subscription, &message).await.expect(200).json();
        assert_eq!(explained["index"]["types"], types, "{message}");
        let told = explained["index"]["reason"].as_str().unwrap_or_default();
        assert!(told.contains(reason) && told.is_empty() == reason.is_empty(), "{message}: {told}");
        assert_eq!(explained["outcome"] == "not-selected", !reason.is_empty());
        assert_eq!(explained["frames"].as_array().unwrap().len(), types.as_array().unwrap().len());
    }
    explain(&gateway, &subscription, &json!({"body": {}, "api": "x"})).await.error(422, "api: must be one of");
    explain(&gateway, &json!({"id": "99"}), &of_type("t")).await.error(404, "");
}

#[tokio::test]
async fn a_fault_is_explained_with_what_becomes_of_the_message() {
    let gateway = Gateway::with("[plugins]\nquarantine_faults = 1\n").await;
    let device = gateway.device("pump").await;
    upload(&gateway, "loop", &component("faulty/loop")).await.expect(201);
    for (number, (on_fault, outcome)) in
        [("drop", "dropped"), ("pass", "forwarded"), ("hold", "held")].into_iter().enumerate()
    {
        let mut subscription = forwarded(&format!("Sub{number}"), &device);
        subscription["tidegate"] = json!({"filters": [{"plugin": "loop"}], "onFault": on_fault});
        let subscription = gateway.subscribe(&subscription).await;
        let explained = explain(&gateway, &subscription, &json!({"body": measurement(&device, "t", 1)})).await;
        let explained = explained.expect(200).json();
        assert_eq!((&explained["onFault"], &explained["outcome"]), (&json!(on_fault), &json!(outcome)));
        let step = &explained["steps"][0];
        assert_eq!((&step["version"], &step["fault"]["kind"]), (&json!(1), &json!("deadline")), "{step}");
        if on_fault == "hold" {
            assert_eq!(explained["waits"], false);
            let _consumer = gateway.consumer("Sub2", "subA").await;
            gateway.measure(&device, "t", 1).await;
            let explained = explain(&gateway, &subscription, &json!({"body": measurement(&device, "t", 2)})).await;
            let explained = explained.expect(200).json();
            assert_eq!(explained["waits"], true);
            let fault = json!({
                "kind": "quarantined", "reason": "the plugin is in quarantine: the plugin took longer than it may"});
            assert_eq!(explained["steps"][0]["fault"], fault, "the line does not ask it");
        }
    }
}

#[tokio::test]
async fn frames_that_are_too_large_and_quotas_without_room_are_told() {
    let gateway = Gateway::with("[limits]\nframe_bytes = 70000\n[backlog]\nquota_bytes = 65536\n").await;
    let device = gateway.device("pump").await;
    let subscription = gateway.subscribe(&forwarded("Sub1", &device)).await;
    for (bytes, outcome, fits) in
        [(1000, "forwarded", true), (66_000, "forwarded", false), (80_000, "too-large", false)]
    {
        let mut body = measurement(&device, "t", 1);
        body["note"] = json!("x".repeat(bytes));
        let explained = explain(&gateway, &subscription, &json!({"body": body})).await.expect(200).json();
        assert_eq!((&explained["outcome"], &explained["fits"]), (&json!(outcome), &json!(fits)), "{bytes}");
        assert!(explained["frames"][0]["bytes"].as_u64() > Some(bytes as u64));
    }
}

#[tokio::test]
async fn explaining_needs_a_role_and_stays_in_the_tenant() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let subscription = gateway.subscribe(&forwarded("Sub1", &device)).await;
    gateway.add_user("edge", "author", "ROLE_TIDEGATE_PLUGIN_ADMIN").await;
    gateway.add_user("edge", "subscriber", "ROLE_NOTIFICATION_2_ADMIN").await;
    let other = gateway.tenant("plant1").await;
    for (user, code) in [("edge/author", 403), ("edge/subscriber", 200), (&other, 404)] {
        let call = explain(&gateway, &subscription, &of_type("t")).user(user, PASSWORD);
        assert_eq!(call.await.status, code, "{user}");
    }
}

#[tokio::test]
async fn the_way_of_a_message_is_told_in_the_terminal() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    upload(&gateway, "hot", &component("threshold")).await.expect(201);
    let mut wanted = typed("Sub1", &device, "'t'");
    wanted["tidegate"] = json!({
        "filters": [{"plugin": "hot", "settings": {"value": "/c8y_Reading/R/value", "above": 20}}],
        "transforms": [{"plugin": "unit-conversion", "settings": {"series": "/c8y_Reading/R", "factor": 2, "unit": "u"}}]});
    let subscription = gateway.subscribe(&wanted).await;
    let id = subscription["id"].as_str().unwrap();
    let run = |message: &Value| gateway.run(&["plugin", "explain", id], &format!("{message:#}\n"));
    let (done, out, error) = run(&measurement(&device, "t", 21));
    assert!(done, "{error}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 9, "{out}");
    for (line, (start, end)) in lines.iter().zip([
        ("message: measurements CREATE of ", "Z"),
        ("selected: as measurements", ""),
        ("filter type-filter: pass (", " µs)"),
        ("filter hot 1: pass (", " µs)"),
        ("transform unit-conversion: shaped (", " µs)"),
        ("outcome: forwarded", ""),
        ("body: {", "}"),
        ("frame: /edge/measurements/", " bytes"),
        ("topic Sub1: nobody is owed it: it has no consumer", ""),
    ]) {
        assert!(line.starts_with(start) && line.ends_with(end), "{line}");
    }
    assert!(lines[6].contains("\"value\":42") && lines[7].contains(&format!("/{device} CREATE, ")), "{out}");
    let (_, out, _) = run(&json!({"body": measurement(&device, "t", 19)}));
    assert!(out.contains("filter hot 1: drop (") && out.ends_with("outcome: dropped\n"), "{out}");
    let (_, out, _) = run(&measurement("99", "t", 21));
    assert!(out.contains("selected: no, its source, '99', is neither"), "{out}");
    let (done, out, _) = gateway.run(&["plugin", "explain", id, "--json"], "{}");
    assert!(done && serde_json::from_str::<Value>(&out).unwrap()["outcome"] == "not-selected", "{out}");
    let (done, _, error) = gateway.run(&["plugin", "explain", id], "none");
    assert!(!done && error.contains("must be a JSON object"), "{error}");
}
