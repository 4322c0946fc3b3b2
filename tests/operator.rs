//! What operators look at: metrics, health, the log.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Value, json};

use crate::harness::{Gateway, PASSWORD, Setup, component, eventually, forwarded, measurement, typed};
use crate::registry::upload;

/// What the output or the reference says of a metric.
#[derive(Debug, PartialEq, Eq)]
struct Family {
    kind: String,
    labels: BTreeSet<String>,
    text: String,
}

fn reference() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md")).unwrap()
}

/// The families of the tables.
fn documented() -> BTreeMap<String, Family> {
    let mut families = BTreeMap::new();
    for row in reference().lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = row.trim_matches(['|', ' ']).split(" | ").collect();
        let [name, kind, labels, unit, text, alarm] = cells[..] else { panic!("{row}") };
        assert!(!unit.is_empty() && text.ends_with('.') && !alarm.is_empty(), "{row}");
        let labels = labels.split(", ").filter(|label| *label != "–").map(str::to_owned).collect();
        let family = Family { kind: kind.to_owned(), labels, text: text.to_owned() };
        assert!(families.insert(name.trim_matches('`').to_owned(), family).is_none(), "twice: {name}");
    }
    families
}

/// Name, labels and value of a line.
fn sample(line: &str) -> (&str, BTreeMap<String, String>, f64) {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let mut rest = labels.strip_suffix('}').unwrap_or_else(|| panic!("{line}"));
    let mut found = BTreeMap::new();
    while let Some((label, value)) = rest.split_once("=\"") {
        // A quote that no backslash stands before ends the value.
        let mut escaped = false;
        let end = value.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let (value, after) = value.split_at(end.unwrap_or_else(|| panic!("{line}")));
        found.insert(label.trim_start_matches(',').to_owned(), value.to_owned());
        rest = &after[1..];
    }
    (name, found, value.parse().unwrap())
}

/// The families of the output.
fn shown(output: &str) -> BTreeMap<String, Family> {
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut texts = BTreeMap::new();
    for line in output.lines().filter(|line| !line.is_empty()) {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, text) = help.split_once(' ').unwrap();
            texts.insert(name.to_owned(), text.to_owned());
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            let text = texts.remove(name).unwrap_or_default();
            let family = Family { kind: kind.to_owned(), labels: BTreeSet::new(), text };
            assert!(families.insert(name.to_owned(), family).is_none(), "twice: {name}");
        } else {
            let (name, labels, _) = sample(line);
            let histogram = ["_bucket", "_sum", "_count"].into_iter().find_map(|end| name.strip_suffix(end));
            let family = histogram.filter(|name| families.contains_key(*name)).unwrap_or(name);
            let family = families.get_mut(family).unwrap_or_else(|| panic!("no type: {line}"));
            family.labels.extend(labels.into_keys().filter(|label| label != "le"));
        }
    }
    families
}

/// A gateway at which everything has happened that can be counted without harm.
async fn busy(setup: Setup) -> (Gateway, String) {
    let gateway = setup.start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&typed("Sub1", &device, "'t'")).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    for value in 1..=3 {
        gateway.measure(&device, "t", value).await;
    }
    consumer.receive().await;
    consumer.ping().await;
    consumer.close().await;
    (gateway, device)
}

#[tokio::test]
async fn the_reference_lists_exactly_the_metrics() {
    let (gateway, _) = busy(Gateway::setup()).await;
    upload(&gateway, "mine", &component("faulty/trap-third")).await.expect(201);
    let mut subscription = forwarded("Sub1", &gateway.device("valve").await);
    subscription["tidegate"] = json!({"filters": [{"plugin": "mine"}]});
    gateway.subscribe(&subscription).await;
    let documented = documented();
    let shown = eventually("retention has looked once", async || {
        let shown = shown(&gateway.get("/metrics").await.expect(200).text());
        shown.contains_key("tidegate_objects_deleted_total").then_some(shown)
    })
    .await;
    for (name, family) in &documented {
        assert_eq!(shown.get(name), Some(family), "{name}");
    }
    let more: Vec<_> = shown.keys().filter(|name| !documented.contains_key(*name)).collect();
    assert!(more.is_empty(), "not documented: {more:?}");
}

// The rules, and whatever else the reference says.
#[test]
fn the_reference_names_no_other_metrics() {
    let documented = documented();
    let reference = reference();
    let words = reference.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names: BTreeSet<_> =
        words.filter(|word| word.starts_with("tidegate_") || word.starts_with("process_")).collect();
    for name in &names {
        let histogram = ["_bucket", "_sum", "_count"].into_iter().find_map(|end| name.strip_suffix(end));
        let histogram =
            histogram.and_then(|name| documented.get(name)).is_some_and(|family| family.kind == "histogram");
        assert!(histogram || documented.contains_key(*name), "{name}");
    }
    assert!(names.contains("tidegate_commit_seconds_bucket"), "the rules were read");
}

#[tokio::test]
async fn metrics_count_what_has_happened() {
    let (gateway, device) = busy(Gateway::setup().config("[limits]\nframe_bytes = 4096")).await;
    assert_eq!(gateway.metric("tidegate_messages_appended_total").await, 3.0);
    assert_eq!(gateway.metric("tidegate_objects_stored_total").await, 3.0);
    assert_eq!(gateway.metric("tidegate_messages_acknowledged_total").await, 1.0);
    assert_eq!(gateway.metric("tidegate_plugin_messages_total").await, 3.0);
    assert!(gateway.metric("tidegate_commit_seconds_sum").await > 0.0);
    assert_eq!(gateway.metric("tidegate_topic_messages").await, 2.0, "what is not acknowledged");
    assert_eq!(gateway.metric("tidegate_consumer_lag_messages").await, 2.0);
    assert_eq!(gateway.metric("tidegate_consumer_acknowledged_total").await, 1.0);
    assert_eq!(gateway.metric("tidegate_topic_bytes").await, gateway.metric("tidegate_backlog_bytes").await);
    assert_eq!(gateway.metric("tidegate_topic_quota_bytes").await, 26_214_400.0);
    let left = gateway.metric("tidegate_consumer_expires_in_seconds").await;
    assert!((129_000.0..=129_600.0).contains(&left), "{left}");
    assert!(gateway.metric("tidegate_database_bytes").await > 4096.0);
    assert!(gateway.metric("tidegate_wal_bytes").await > 4096.0);
    assert!(gateway.metric("process_resident_memory_bytes").await > 1e6);
    assert_eq!(gateway.metric("tidegate_ready").await, 1.0);
    let counted = async |name: &str, label: &str, value: &str| {
        let text = gateway.get("/metrics").await.expect(200).text();
        let samples = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(sample);
        let of = samples.filter(|(of, labels, _)| *of == name && labels.get(label).is_some_and(|is| is == value));
        of.map(|(_, _, value)| value).sum::<f64>()
    };

    gateway.get("/inventory/managedObjects").anonymous().await.expect(401);
    gateway.get("/inventory/managedObjects").user("edge/admin", "wrong password").await.expect(401);
    assert_eq!(gateway.consumer_with("garbage").await.err(), Some(401));
    for reason in ["missing", "credentials", "token"] {
        assert_eq!(counted("tidegate_logins_refused_total", "reason", reason).await, 1.0, "{reason}");
    }
    assert!(counted("tidegate_http_responses_total", "class", "4xx").await >= 3.0);
    assert_eq!(counted("tidegate_http_responses_total", "class", "1xx").await, 1.0, "one upgrade");
    assert_eq!(counted("tidegate_connections", "kind", "websocket").await, 0.0);
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    eventually("it is counted", async || {
        (counted("tidegate_connections", "kind", "websocket").await == 1.0).then_some(())
    })
    .await;
    assert_eq!(gateway.metric("tidegate_consumer_clients").await, 1.0);
    consumer.take(2).await;
    assert_eq!(gateway.metric("tidegate_messages_redelivered_total").await, 2.0);
    consumer.close().await;
    eventually("it is gone", async || {
        (counted("tidegate_connections", "kind", "websocket").await == 0.0).then_some(())
    })
    .await;
    assert!(counted("tidegate_connections", "kind", "http").await >= 1.0, "the scrape's own");
    assert_eq!(gateway.metric("tidegate_consumer_clients").await, 0.0);
    let mut large = measurement(&device, "t", 4);
    large["c8y_Text"] = json!("x".repeat(5_000));
    gateway.post_measurement(&large).await.expect(413);
    assert_eq!(counted("tidegate_requests_refused_total", "reason", "frame").await, 1.0);
}

// `metrics.topics`, `metrics.consumers`: the sums tell of the others. What is unsubscribed leaves nothing behind.
#[tokio::test]
async fn series_of_topics_and_consumers_are_bounded_and_vanish_with_them() {
    let (gateway, device) = busy(Gateway::setup().config("[metrics]\ntopics = 1\nconsumers = 2")).await;
    gateway.subscribe(&forwarded("Sub2", &device)).await;
    for subscriber in ["subA", "subB"] {
        gateway.consumer("Sub2", subscriber).await.close().await;
    }
    for value in 1..=20 {
        gateway.measure(&device, "t", value).await;
    }
    let text = gateway.get("/metrics").await.expect(200).text();
    let of = |name: &str| text.lines().filter(|line| line.starts_with(&format!("{name}{{"))).collect::<Vec<_>>();
    assert_eq!((of("tidegate_topic_messages").len(), of("tidegate_consumer_clients").len()), (1, 2), "{text}");
    assert!(of("tidegate_topic_messages")[0].contains("topic=\"Sub1\""), "the largest: {text}");
    assert_eq!(gateway.metric("tidegate_backlog_messages").await, 42.0);
    assert_eq!(gateway.metric("tidegate_topics_left_out").await, 1.0);
    assert_eq!(gateway.metric("tidegate_consumers_left_out").await, 1.0);
    for (topic, subscriber) in [("Sub1", "subA"), ("Sub2", "subA"), ("Sub2", "subB")] {
        gateway.unsubscribe(&gateway.token(topic, subscriber).await).await.expect(200);
    }
    let text = gateway.get("/metrics").await.expect(200).text();
    assert!(!text.contains("topic=") && text.contains("\ntidegate_topics 0\n"), "{text}");
}

#[tokio::test]
async fn metrics_are_for_operators_unless_they_are_public() {
    let gateway = Gateway::start().await;
    gateway.add_user("edge", "reader", "ROLE_INVENTORY_READ").await;
    gateway.add_user("edge", "watcher", "ROLE_TIDEGATE_OPERATOR").await;
    gateway.get("/metrics").anonymous().await.expect(401);
    gateway.get("/metrics").user("edge/reader", PASSWORD).await.expect(403);
    let answer = gateway.get("/metrics").user("edge/watcher", PASSWORD).await.expect(200);
    assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    let gateway = Gateway::with("[metrics]\npublic = true").await;
    gateway.get("/metrics").anonymous().await.expect(200);
    gateway.get("/metrics").user("edge/admin", "wrong password").await.expect(200);
}

#[tokio::test]
async fn a_gateway_whose_store_is_full_is_not_ready_until_it_has_room() {
    let gateway = Gateway::with("[store]\nmax_bytes = 1048576").await;
    gateway.get("/health/live").anonymous().await.expect(200);
    assert_eq!(gateway.get("/health/ready").anonymous().await.expect(200).text(), "ok\n");
    let device = gateway.device("pump").await;
    let mut large = measurement(&device, "t", 1);
    large["c8y_Text"] = json!("x".repeat(100_000));
    let mut refused = Value::Null;
    while refused.is_null() {
        let answer = gateway.post_measurement(&large).await;
        match answer.status {
            201 => {}
            507 => refused = answer.json(),
            _ => drop(answer.expect(507)),
        }
    }
    assert_eq!(gateway.get("/health/ready").anonymous().await.expect(503).text(), "the store is full\n");
    assert_eq!(gateway.metric("tidegate_ready").await, 0.0);
    assert!(gateway.metric("tidegate_commit_failures_total").await >= 1.0);
    gateway.get("/health/live").anonymous().await.expect(200);
    gateway.delete(&format!("/measurement/measurements?source={device}")).await.expect(204);
    gateway.measure(&device, "t", 2).await;
    gateway.get("/health/ready").anonymous().await.expect(200);
}

/// The lines of the log, which is JSON.
fn lines(gateway: &Gateway) -> Vec<Value> {
    gateway.stderr().lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
}

#[tokio::test]
async fn the_log_says_in_fields_who_came_and_why_they_went() {
    let (mut gateway, _) = busy(Gateway::setup().config("[log]\nformat = 'json'\n[consumer]\nidle_seconds = 1")).await;
    gateway.consumer("Sub1", "subB").await.closed().await;
    drop(gateway.consumer("Sub1", "subC").await);
    let mut gone = gateway.consumer("Sub1", "subD").await;
    gone.send("unsubscribe_subscriber").await;
    gone.closed().await;
    let told = |event: &str, consumer: &str| {
        let lines = lines(&gateway).into_iter().map(|line| line["fields"].clone());
        lines.filter(|fields| fields["message"] == event && fields["consumer"] == consumer).collect::<Vec<_>>()
    };
    for (consumer, reason) in
        [("subA", "closed by the client"), ("subB", "idle"), ("subC", "WebSocket"), ("subD", "unsubscribed")]
    {
        let came = told("consumer connected", consumer);
        assert_eq!((came.len(), &came[0]["tenant"], &came[0]["topic"]), (1, &json!("edge"), &json!("Sub1")));
        let went = eventually("the line", async || told("consumer disconnected", consumer).pop()).await;
        assert!(went["reason"].as_str().unwrap().contains(reason), "{went}");
    }
    gateway.stop().await;
    gateway.restart_process().await;
    let all: Vec<_> = lines(&gateway).iter().map(|line| line["fields"]["message"].clone()).collect();
    for event in ["serving", "stopping", "stopped"] {
        assert!(all.contains(&json!(event)), "{event} is not in {all:?}");
    }
}

#[tokio::test]
async fn the_log_warns_of_what_a_power_cut_would_take() {
    for (durability, warnings) in [("commit", 0), ("second", 1)] {
        let gateway = Gateway::with(&format!("[store]\ndurability = '{durability}'")).await;
        let log = gateway.stderr();
        assert_eq!(log.matches("store.durability is second").count(), warnings, "{log}");
    }
}

// Passwords, tokens and bodies stay out of the log even where it says everything that the gateway itself can say.
#[tokio::test]
async fn the_log_holds_no_secrets_and_no_line_for_each_message() {
    const SECRETS: [&str; 3] = ["S3cret-In-A-Body", "S3cret-Wrong-Password", "S3cret-New-Password"];
    let (gateway, device) = busy(Gateway::setup().config("[log]\nfilter = 'info,tidegate=trace'")).await;
    let token = gateway.token("Sub1", "subA").await;
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    consumer.send("S3cret-In-A-Body").await;
    let mut body = measurement(&device, "t", 7);
    body["c8y_Text"] = json!(SECRETS[0]);
    for _ in 0..50 {
        gateway.post_measurement(&body).await.expect(201);
        gateway.get("/platform").user("edge/admin", SECRETS[1]).await.expect(401);
        assert_eq!(gateway.consumer_with(&format!("{token}x")).await.err(), Some(401));
    }
    body["source"] = json!({"id": "S3cret-In-A-Body"});
    gateway.post_measurement(&body).await.expect(422);
    gateway.subscribe(&forwarded("Sub2", &device)).await;
    let user = json!({"userName": "ann", "password": SECRETS[2], "roles": []});
    gateway.post("/user/edge/users", &user).await.expect(201);
    consumer.close().await;
    let log = gateway.stderr();
    for secret in [&SECRETS[..], &[PASSWORD, &token, "Basic "]].concat() {
        assert!(!log.contains(secret), "{secret} is in the log:\n{log}");
    }
    assert!(log.contains("a login was refused"), "{log}");
    assert!(log.lines().count() < 60, "200 requests were made:\n{log}");
}
