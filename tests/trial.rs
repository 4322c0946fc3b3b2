//! Plugins are tried before they are used (`docs/http.md`, "Try and explain").

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{
    Call, Gateway, PASSWORD, alarm, component, event, forwarded, measurement, of_object, of_tenant, operation, value_of,
};
use crate::registry::{PATH, upload};

/// A request to try the version 1 of a plugin.
fn try_out(gateway: &Gateway, plugin: &str, body: &Value) -> Call {
    gateway.post(&format!("{PATH}/{plugin}/versions/1/try"), body)
}

fn verdicts(report: &Value) -> Vec<&str> {
    report["results"].as_array().unwrap().iter().map(|one| one["verdict"].as_str().unwrap()).collect()
}

/// The members of the results' messages.
fn told<'a>(report: &'a Value, name: &str) -> Vec<&'a str> {
    report["results"].as_array().unwrap().iter().map(|one| one["message"][name].as_str().unwrap_or("-")).collect()
}

pub(crate) fn of_type(kind: &str) -> Value {
    json!({"body": {"source": {"id": "7"}, "type": kind, "time": "2026-11-30T00:00:00Z"}})
}

#[tokio::test]
async fn samples_meet_their_verdicts() {
    let gateway = Gateway::start().await;
    upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    // The filter takes a bare text for one exact type, so that these settings match the type `1.50` alone.
    let messages: Vec<_> = ["1.50", "1.5", "1.50"].map(of_type).into();
    let body = format!(r#"{{"settings":1.50,"messages":{}}}"#, json!(messages));
    let call = gateway.call("POST", &format!("{PATH}/by-type/versions/1/try")).body("application/json", body);
    let report = call.await.expect(200).json();
    assert_eq!(verdicts(&report), ["pass", "drop", "pass"]);
    for (name, value) in [
        ("plugin", json!("by-type")),
        ("version", json!(1)),
        ("world", json!("filter")),
        ("messages", json!(3)),
        ("tried", json!(3)),
        ("verdicts", json!({"pass": 2, "drop": 1, "fault": 0})),
    ] {
        assert_eq!(report[name], value, "{name}");
    }
    let first = &report["results"][0];
    let expected = json!({
        "api": "measurements", "action": "CREATE", "source": "7", "type": "1.50", "time": "2026-11-30T00:00:00Z"});
    assert_eq!(first["message"], expected);
    assert!(first["memoryBytes"].as_u64() >= Some(65_536), "{first}");
    assert_eq!(first["memoryBytes"], report["memoryBytes"]);
    let micros = |value: &Value| value["processorMicroseconds"].as_u64().unwrap();
    assert_eq!(report["results"].as_array().unwrap().iter().map(micros).sum::<u64>(), micros(&report));
    assert!(report.get("truncated").is_none());

    let nothing = try_out(&gateway, "by-type", &json!({"settings": 1, "messages": []})).await.expect(200).json();
    assert_eq!((&nothing["tried"], &nothing["results"]), (&json!(0), &json!([])));
    assert_eq!(gateway.metric("tidegate_plugin_messages_total").await, 0.0, "trials are not counted");
}

#[tokio::test]
async fn plugins_of_the_gateway_are_tried_from_the_terminal() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let subscription = gateway.subscribe(&forwarded("Sub1", &device)).await;
    let id = subscription["id"].as_str().unwrap();
    for value in [10, 30, 50] {
        gateway.measure(&device, "t", value).await;
    }
    let above = |limit| json!({"value": "/c8y_Reading/R/value", "above": limit}).to_string();
    let lines = |out: &str| -> Vec<Value> { out.lines().map(|line| serde_json::from_str(line).unwrap()).collect() };
    let run = |arguments: &[&str], input: &str| gateway.run(&[&["plugin", "try"], arguments].concat(), input);

    let (done, out, error) =
        run(&["threshold", "--settings", &above(20), "--subscription", id, "--last", "2"], "this is not read");
    assert!(done && error == "0 drop, 0 fault, 2 pass\n", "{out}{error}");
    assert_eq!(lines(&out).iter().map(|line| &line["message"]["source"]).collect::<Vec<_>>(), [&device, &device]);
    let (done, out, error) = run(&["threshold", "--settings", &above(20), "--subscription", id], "");
    assert!(done && lines(&out)[0]["verdict"] == "drop" && error == "1 drop, 0 fault, 2 pass\n", "{out}{error}");

    // Samples and bare bodies from standard input, as for a file.
    let input = format!("{}\n\n{}\n", measurement("7", "t", 21), json!({"body": measurement("8", "t", 19)}));
    let (done, out, error) = run(&["threshold", "--settings", &above(20)], &input);
    assert!(done && error == "1 drop, 0 fault, 1 pass\n", "{out}{error}");
    assert_eq!(lines(&out).iter().map(|line| &line["message"]["source"]).collect::<Vec<_>>(), ["7", "8"]);
    let (done, out, _) = run(&["--json", "threshold", "--settings", &above(20)], &input);
    assert!(done && lines(&out)[0]["tried"] == 2, "{out}");

    // A file of that name is tried here unless the gateway's plugin must be meant, and a version is of an uploaded one.
    std::fs::write(gateway.path("broken"), component("faulty/trap-third")).unwrap();
    upload(&gateway, "broken", &component("faulty/loop")).await.expect(201);
    let (done, out, error) = run(&["broken"], &"{}\n".repeat(3));
    assert!(!done && lines(&out)[2]["fault"]["kind"] == "trap", "{out}{error}");
    let (done, out, error) = run(&["broken", "--version", "1"], "{}\n");
    assert!(!done && lines(&out)[0]["fault"]["kind"] == "deadline", "{out}{error}");
    assert!(error.contains("tidegate: the plugin failed on 1 messages"), "{error}");

    for (arguments, input, text) in [
        (&["threshold"][..], "{}\n", "settings: missing field `value`"),
        (&["threshold", "--settings", "{"], "", "EOF while parsing an object at line 1 column 1"),
        (&["threshold", "--world", "filter"], "", "--world and --config are for a plugin in a file"),
        (&["threshold", "--subscription", "Sub1"], "", "the id of a subscription is a number"),
        (&["threshold", "--subscription", "99"], "", "Finding subscription"),
        (&["none"], "{}\n", "there is no file 'none' to be tried, and no plugin of a gateway: "),
        (&["none", "--world", "filter"], "", "There is no plugin 'none'."),
        (&["broken", "--version", "9"], "{}\n", "tidegate: POST "),
        (&["threshold"], "{}\n[]\n", "line 2: must be a JSON object"),
    ] {
        let (done, out, error) = run(arguments, input);
        assert!(!done && out.is_empty() && error.contains(text), "{arguments:?}: {out}{error}");
    }
}

#[tokio::test]
async fn bodies_come_back_as_they_are() {
    let gateway = Gateway::start().await;
    upload(&gateway, "garbage", &component("faulty/garbage")).await.expect(201);
    let body = r#"{"settings":["c8y_T"],"messages":[{"api":"events","body":{"id":"1","c8y_T":1.50,"c8y_S":2}}]}"#;
    let path = format!("{PATH}/fragments-to-copy/versions/latest/try");
    let answer = gateway.call("POST", &path).body("application/json", body).await.expect(200);
    let report = answer.json();
    assert_eq!((&report["verdicts"], report.get("version")), (&json!({"shaped": 1, "fault": 0}), None), "{report}");
    assert!(answer.text().contains(r#""c8y_T":1.50"#), "{report}");
    assert_eq!(report["results"][0]["body"].get("c8y_S"), None);
    let report = try_out(&gateway, "garbage", &json!({"messages": [of_type("t")]})).await.expect(200).json();
    assert_eq!(report["results"][0]["base64"], "//4KCnsibm90IjogSlNPTg0KAA==");
}

#[tokio::test]
async fn state_is_tried_from_its_beginning_and_nobody_elses_is_touched() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let settings = json!({"value": "/c8y_Reading/R/value", "band": 5});
    let mut subscription = forwarded("Sub1", &device);
    subscription["tidegate"] = json!({"filters": [{"plugin": "deadband", "settings": settings}]});
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let sample = |source: &str, value: u64| json!({"body": measurement(source, "t", value)});
    let body = json!({"settings": settings, "messages": [
        sample(&device, 10), sample(&device, 14), sample("99", 14), sample(&device, 16), sample(&device, 11)]});
    for (live, passes) in [(10, true), (14, false), (16, true)] {
        let report = gateway.post(&format!("{PATH}/deadband/versions/latest/try"), &body).await.expect(200).json();
        assert_eq!(verdicts(&report), ["pass", "drop", "pass", "pass", "drop"]);
        gateway.measure(&device, "t", live).await;
        if passes {
            assert_eq!(value_of(&consumer.receive().await.json()), live);
        }
    }
}

#[tokio::test]
async fn what_is_wrong_with_a_request_is_named() {
    let gateway = Gateway::with("[limits]\nbulk_bytes = 50000\n").await;
    upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    upload(&gateway, "cut", &component("fragments-to-copy")).await.expect(201);
    for (plugin, body, text) in [
        ("by-type", json!([]), "must be a JSON object"),
        ("by-type", json!({}), "messages: is missing"),
        ("by-type", json!({"messages": {}}), "messages: must be a JSON array"),
        ("by-type", json!({"messages": [{}]}), "messages[0].body: is missing"),
        ("by-type", json!({"messages": [of_type("t"), {"body": []}]}), "messages[1].body: must be a JSON object"),
        ("by-type", json!({"messages": [{"body": {}, "api": "x"}]}), "messages[0].api: must be one of measurements"),
        ("by-type", json!({"messages": [], "subscription": "1"}), "messages: must not stand beside 'subscription'"),
        ("by-type", json!({"messages": [], "last": 1}), "last: is only for 'subscription'"),
        ("by-type", json!({"messages": [], "world": "filter"}), "world: is not a known member"),
        ("by-type", json!({"subscription": "x"}), "subscription: must be an id"),
        ("cut", json!({"messages": [of_type("t")]}), "settings: fragmentsToCopy: an array of names is expected"),
    ] {
        try_out(&gateway, plugin, &body).await.error(422, text);
    }
    let many = json!({"settings": 1, "messages": vec![json!({"body": {}}); 1001]});
    try_out(&gateway, "by-type", &many).await.error(422, "messages: has more than 1000 elements");
    let large = json!({"messages": [{"body": {"a": "x".repeat(50_000)}}]});
    try_out(&gateway, "by-type", &large).await.error(413, "at most 50000 bytes");
    let path = |plugin: &str, version: &str| format!("{PATH}/{plugin}/versions/{version}/try");
    for (plugin, version) in [("by-type", "2"), ("by-type", "x"), ("other", "latest"), ("type-filter", "1")] {
        gateway.post(&path(plugin, version), &json!({"messages": []})).await.error(404, "");
    }
    try_out(&gateway, "by-type", &json!({"subscription": "1"})).await.error(404, "");
}

/// A filter for a stored object's type.
fn last(subscription: &Value, last: u64) -> Value {
    json!({"settings": 1, "subscription": subscription["id"], "last": last})
}

// What a guest asks for is told when it is configured, not by each message having nothing.
#[tokio::test]
async fn a_pointer_that_is_none_is_named() {
    let gateway = Gateway::start().await;
    upload(&gateway, "look", &component("faulty/pointers")).await.expect(201);
    let body = json!({"settings": "c8y_T/value", "messages": [of_type("t")]});
    let text = "settings: `c8y_T/value` is no JSON pointer: it does not start with a slash";
    try_out(&gateway, "look", &body).await.error(422, text);
    let mut subscription = forwarded("Sub1", &gateway.device("pump").await);
    subscription["tidegate"] = json!({"filters": [{"plugin": "look", "settings": "c8y_T/value"}]});
    let made = gateway.post("/notification2/subscriptions", &subscription).await;
    made.error(422, "tidegate.filters[0].settings: `c8y_T/value` is no JSON pointer");
}

// A plugin must not care how many messages it gets at once.
#[tokio::test]
async fn who_answers_otherwise_in_a_batch_is_told() {
    let gateway = Gateway::start().await;
    upload(&gateway, "first", &component("faulty/first-alone")).await.expect(201);
    upload(&gateway, "keep", &component("faulty/keeper")).await.expect(201);
    let try_types = async |plugin: &str, types: &[&str]| {
        let messages: Vec<_> = types.iter().map(|kind| of_type(kind)).collect();
        try_out(&gateway, plugin, &json!({"messages": messages})).await.expect(200).json()
    };
    let short = try_types("first", &["short", "t", "t"]).await;
    assert_eq!(short["verdicts"], json!({"pass": 3, "drop": 0, "fault": 0}), "each by itself");
    assert_eq!(short["batch"]["fault"], "the plugin gave 1 answers to 3 messages");
    let other = try_types("first", &["t", "t", "t"]).await;
    assert_eq!(other["batch"]["fault"], "message 2 is answered with drop in a batch, with pass by itself");
    // As the gateway cuts them, at most 256 in a call.
    let many = try_types("first", &["t"; 257]).await;
    assert_eq!(many["batch"]["fault"], "message 2 is answered with drop in a batch, with pass by itself");
    assert_eq!(try_types("first", &["t"]).await.get("batch"), None, "no batch");
    // What keeps state sees the same from its beginning; a fault that costs the instance is told by its message alone.
    let kept = try_types("keep", &["t"; 300]).await;
    assert_eq!((&kept["verdicts"]["pass"], kept.get("batch")), (&json!(1), None), "{}", kept["verdicts"]);
    let trapped = try_types("keep", &["t", "trap", "t"]).await;
    assert_eq!((&trapped["verdicts"]["fault"], trapped.get("batch")), (&json!(1), None), "{trapped}");
}

#[tokio::test]
async fn what_a_plugin_writes_into_the_log_is_told() {
    let gateway = Gateway::start().await;
    let text = "({ type }) => {
        if (type === 'loud') for (let n = 0; n < 30; n++) console.debug('ä'.repeat(400));
        console.error(`it is ${type}`);
        if (type === 'bad') throw new Error('that is bad');
        return true;
    }";
    let upload = gateway.call("POST", &format!("{PATH}?name=talk&world=filter")).body("text/javascript", text);
    upload.await.expect(201);
    let messages = ["t", "bad", "loud"].map(of_type);
    let body = json!({"messages": messages});
    let report = try_out(&gateway, "talk", &body).await.expect(200).json();
    let log = |at: usize| &report["results"][at]["log"];
    assert_eq!(*log(0), json!([{"level": "error", "text": "it is t"}]));
    assert_eq!(*log(1), json!([{"level": "error", "text": "it is bad"}]), "also of one that fails");
    let lines = log(2).as_array().unwrap();
    assert_eq!((lines.len(), lines[0]["level"].as_str()), (20, Some("debug")), "{report}");
    assert_eq!(lines[0]["text"], "ä".repeat(256), "512 bytes");
}

#[tokio::test]
async fn what_is_stored_is_tried_as_a_subscription_selects_it() {
    let gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    let child = json!({"managedObject": {"id": valve}});
    gateway.post(&format!("/inventory/managedObjects/{pump}/childDevices"), &child).await.expect(201);
    upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    let post = async |path: &str, object: Value| -> String {
        gateway.post(path, &object).await.expect(201).json()["id"].as_str().unwrap().to_owned()
    };
    let mut measured = Vec::new();
    for (minute, kind) in [(3, "1"), (1, "2"), (2, "1")] {
        let mut object = measurement(&pump, kind, 1);
        object["time"] = json!(format!("2026-03-01T12:0{minute}:00.000Z"));
        measured.push((minute, post("/measurement/measurements", object).await));
    }
    measured.sort_unstable();
    let measured: Vec<_> = measured.into_iter().map(|(_, id)| id).collect();
    let of_valve = post("/measurement/measurements", measurement(&valve, "1", 1)).await;
    let event_of_valve = post("/event/events", event(&valve, "1", "x")).await;
    let alarm_of_pump = post("/alarm/alarms", alarm(&pump, "2", "MAJOR")).await;
    let operation_of_pump = post("/devicecontrol/operations", operation(&pump)).await;

    let of_pump = gateway.subscribe(&forwarded("Sub1", &pump)).await;
    let report = try_out(&gateway, "by-type", &last(&of_pump, 1000)).await.expect(200).json();
    assert_eq!(
        (told(&report, "id"), verdicts(&report)),
        (measured.iter().map(String::as_str).collect(), vec!["drop", "pass", "pass"])
    );
    let report = try_out(&gateway, "by-type", &last(&of_pump, 1)).await.expect(200).json();
    assert_eq!(told(&report, "id"), [&measured[2]], "the newest by time");

    // In the context of an object: its own, in the order of time, and of its children what can be taken of them.
    let everything = gateway.subscribe(&of_object("Sub2", &pump, &["*"])).await;
    let report = try_out(&gateway, "by-type", &last(&everything, 1000)).await.expect(200).json();
    let ids = told(&report, "id");
    let mut expected = measured.clone();
    expected.extend([event_of_valve.clone(), alarm_of_pump.clone()]);
    assert_eq!(ids[..5], expected, "{report}");
    assert!(ids[5..].contains(&&*operation_of_pump) && ids[5..].contains(&&*pump) && ids.len() == 7, "{ids:?}");
    assert!(!ids.contains(&&*of_valve));
    let object = report["results"].as_array().unwrap().iter().find(|one| one["message"]["id"] == *pump).unwrap();
    assert_eq!((&object["message"]["api"], &object["message"]["action"]), (&json!("managedobjects"), &json!("UPDATE")));

    let tenant_wide = gateway.subscribe(&of_tenant("Sub3", &["managedobjects", "events", "measurements"])).await;
    let report = try_out(&gateway, "by-type", &last(&tenant_wide, 1000)).await.expect(200).json();
    let ids = told(&report, "id");
    assert_eq!(ids.len(), 7, "{report}");
    assert!(ids.contains(&&*of_valve) && ids.contains(&&*valve) && !ids.contains(&&*alarm_of_pump), "{ids:?}");
    let report = try_out(&gateway, "by-type", &json!({"settings": 1, "subscription": tenant_wide["id"]})).await;
    assert_eq!(report.expect(200).json()["messages"], 7);
    for last in [json!(0), json!(1001), json!("1"), json!(1.5)] {
        let body = json!({"subscription": tenant_wide["id"], "last": last});
        try_out(&gateway, "by-type", &body).await.error(422, "last: must be a number from 1 to 1000");
    }
}

#[tokio::test]
async fn trials_need_a_role_and_stay_in_the_tenant() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    let subscription = gateway.subscribe(&forwarded("Sub1", &device)).await;
    gateway.add_user("edge", "author", "ROLE_TIDEGATE_PLUGIN_ADMIN").await;
    gateway.add_user("edge", "subscriber", "ROLE_NOTIFICATION_2_ADMIN").await;
    gateway.add_user("edge", "both", "ROLE_TIDEGATE_PLUGIN_ADMIN,ROLE_NOTIFICATION_2_ADMIN").await;
    let other = gateway.tenant("plant1").await;
    let samples = json!({"settings": 1, "messages": [of_type("1")]});
    let stored = last(&subscription, 10);
    for (user, of_samples, of_stored) in
        [("edge/author", 200, 403), ("edge/subscriber", 403, 403), ("edge/both", 200, 200), (&other, 404, 404)]
    {
        for (body, code) in [(&samples, of_samples), (&stored, of_stored)] {
            assert_eq!(try_out(&gateway, "by-type", body).user(user, PASSWORD).await.status, code, "{user} {body}");
        }
    }
}

#[tokio::test]
async fn hostile_plugins_are_tried_without_harm() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    for name in ["loop", "memory", "huge", "wrong-length", "trap-third"] {
        upload(&gateway, name, &component(&format!("faulty/{name}"))).await.expect(201);
    }
    for (name, fault) in
        [("loop", "deadline"), ("memory", "memory"), ("huge", "memory"), ("wrong-length", "wrong_length")]
    {
        let report =
            try_out(&gateway, name, &json!({"messages": [of_type("a"), of_type("b")]})).await.expect(200).json();
        assert_eq!((verdicts(&report), &report["verdicts"]["fault"]), (vec!["fault"; 2], &json!(2)), "{name}");
        let told = &report["results"][1]["fault"];
        assert!(told["reason"].as_str().is_some_and(|reason| reason.starts_with("the plugin ")), "{name}: {told}");
        assert!(told["kind"] == fault || name == "huge" && told["kind"] == "output", "{name}: {told}");
    }
    // After a fault it goes on with a new instance, which counts from the start.
    let report = try_out(&gateway, "trap-third", &json!({"messages": vec![of_type("a"); 6]})).await.expect(200).json();
    assert_eq!(verdicts(&report), ["pass", "pass", "fault", "pass", "pass", "fault"]);

    // One that never ends has its time, and others have theirs meanwhile.
    let endless = json!({"messages": vec![of_type("a"); 1000]});
    let trial = try_out(&gateway, "loop", &endless).into_future();
    let others = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let started = Instant::now();
        for value in 0..20 {
            gateway.measure(&device, "t", value).await;
        }
        let report = try_out(&gateway, "trap-third", &json!({"messages": [of_type("a")]})).await.expect(200).json();
        assert_eq!(verdicts(&report), ["pass"], "the trials take turns");
        started.elapsed()
    };
    let (report, waited) = tokio::join!(trial, others);
    let report = report.expect(200).json();
    assert_eq!(report["truncated"], "it took 10 s");
    let tried = report["tried"].as_u64().unwrap();
    assert!((1..1000).contains(&tried) && verdicts(&report).len() as u64 == tried, "{tried}");
    assert!(waited < Duration::from_secs(10), "{waited:?}");
}

#[tokio::test]
async fn so_many_are_tried_at_a_time() {
    let gateway = Gateway::start().await;
    upload(&gateway, "loop", &component("faulty/loop")).await.expect(201);
    let body = json!({"messages": vec![of_type("a"); 100]});
    let one = async || {
        let answer = try_out(&gateway, "loop", &body).await;
        (answer.status, answer)
    };
    let answers = tokio::join!(one(), one(), one());
    let mut codes = [answers.0.0, answers.1.0, answers.2.0];
    codes.sort_unstable();
    assert_eq!(codes, [200, 200, 503]);
    for (status, answer) in [answers.0, answers.1, answers.2] {
        if status == 503 {
            answer.error(503, "Too many plugins are being tried.");
        }
    }
    try_out(&gateway, "loop", &json!({"messages": []})).await.expect(200);
}

#[tokio::test]
async fn answers_and_what_is_stored_have_so_many_bytes() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let script = gateway.call("POST", &format!("{PATH}?name=long&world=transform"));
    script.body("text/javascript", "() => 'x'.repeat(1000000)").await.expect(201);
    let report = try_out(&gateway, "long", &json!({"messages": vec![json!({"body": {}}); 100]})).await;
    let report = report.expect(200).json();
    assert_eq!((&report["truncated"], &report["tried"]), (&json!("the results have 16777216 bytes"), &json!(17)));

    upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    let mut large = measurement(&device, "1", 1);
    large["note"] = json!("x".repeat(1_000_000));
    for _ in 0..17 {
        gateway.post_measurement(&large).await.expect(201);
    }
    let subscription = gateway.subscribe(&forwarded("Sub1", &device)).await;
    let refused = try_out(&gateway, "by-type", &last(&subscription, 17)).await;
    refused.error(422, "last: the objects have more than 16777216 bytes, ask for fewer");
    let report = try_out(&gateway, "by-type", &last(&subscription, 16)).await.expect(200).json();
    assert_eq!(report["verdicts"]["pass"], 16);
}
