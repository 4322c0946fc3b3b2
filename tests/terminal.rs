//! What all commands of the terminal share, and `tidegate subscriptions` and `tidegate plugin list|usage`.

use std::process::{Output, Stdio};

use serde_json::{Value, json};

use crate::harness::{Gateway, component, eventually, forwarded, of_tenant};
use crate::registry::upload;

/// Settings of a threshold over the values of measurements.
fn above(limit: u64) -> Value {
    json!({"value": "/c8y_Reading/R/value", "above": limit})
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[tokio::test]
async fn subscriptions_are_listed_with_their_plugins_and_canaries() {
    let gateway = Gateway::start().await;
    assert_eq!(gateway.run(&["subscriptions"], ""), (true, String::new(), "there are no subscriptions\n".to_owned()));
    let device = gateway.device("pump").await;
    for _ in 0..2 {
        upload(&gateway, "hot", &component("threshold")).await.expect(201);
    }
    let mut with_plugins = forwarded("pumps", &device);
    with_plugins["tidegate"] = json!({
        "filters": [{"plugin": "hot", "version": 1, "settings": above(50)}, {"plugin": "sampling", "settings": {"every": 1}}]});
    let mut ids = Vec::new();
    let mut plain = of_tenant("all", &["events"]);
    plain["nonPersistent"] = json!(true);
    let mut shaped = forwarded("shaped", &device);
    shaped["subscriptionFilter"]["typeFilter"] = json!("t");
    shaped["fragmentsToCopy"] = json!(["c8y_Reading"]);
    for wanted in [&with_plugins, &plain, &shaped] {
        ids.push(gateway.subscribe(wanted).await["id"].as_str().unwrap().to_owned());
    }
    let rows = |out: &str| -> Vec<Vec<String>> {
        out.lines().map(|line| words(line).into_iter().map(str::to_owned).collect()).collect()
    };
    let (done, out, error) = gateway.run(&["subscriptions"], "");
    assert!(done, "{error}");
    let shown = rows(&out);
    assert_eq!(shown[0], ["ID", "TOPIC", "PERSISTENCE", "CONTEXT", "SOURCE", "PLUGINS", "CANARY"]);
    assert_eq!(shown[1], [&*ids[0], "pumps", "persistent", "mo", &*device, "hot", "1,", "sampling", "-"], "{out}");
    assert_eq!(shown[2], [&*ids[1], "all", "non-persistent", "tenant", "-", "-", "-"], "{out}");
    assert_eq!(shown[3][5..], ["type-filter,", "fragments-to-copy", "-"], "{out}");
    assert!(gateway.run(&["plugin", "roll", &ids[0], "hot", "2", "--share", "0.25"], "").0);
    let (_, out, _) = gateway.run(&["subscriptions"], "");
    assert!(out.lines().nth(1).unwrap().ends_with("  hot 2 on 0.25"), "{out}");
    let (_, out, _) = gateway.run(&["subscriptions", "--json"], "");
    let all: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(all["subscriptions"][0]["canary"]["version"], 2, "{all}");
    assert_eq!(all["subscriptions"][1].get("canary"), None, "{all}");
}

#[tokio::test]
async fn plugins_are_listed_with_what_is_held_and_why_they_are_in_quarantine() {
    let gateway = Gateway::with("[plugins]\nquarantine_faults = 1\n").await;
    let device = gateway.device("pump").await;
    upload(&gateway, "broken", &component("faulty/wrong-length")).await.expect(201);
    let mut wanted = forwarded("Sub1", &device);
    wanted["tidegate"] = json!({"filters": [
        {"plugin": "threshold", "settings": above(50)}, {"plugin": "broken", "settings": {}}]});
    let id = gateway.subscribe(&wanted).await["id"].as_str().unwrap().to_owned();
    gateway.consumer("Sub1", "subA").await.close().await;
    gateway.measure(&device, "t", 10).await;
    gateway.measure(&device, "t", 60).await;
    let row = |command: &[&str], start: &str| -> Option<String> {
        let (done, out, error) = gateway.run(command, "");
        assert!(done, "{error}");
        out.lines().find(|line| line.starts_with(start)).map(str::to_owned)
    };
    for command in [&["plugin", "list"][..], &["plugin", "show", "broken"]] {
        let line =
            eventually("the quarantine", async || row(command, "broken").filter(|line| !line.ends_with('-'))).await;
        assert_eq!(words(&line)[..3], ["broken", "filter", "1"], "{line}");
        assert_eq!(words(&line)[5..7], ["1", "1"], "a subscription, and a message: {line}");
    }
    let line = row(&["plugin", "list"], "threshold").unwrap();
    assert_eq!(words(&line)[2..], ["built-in", "-", "-", "1", "1", "-", "-", "-"], "{line}");

    let (done, out, error) = gateway.run(&["plugin", "usage", &id], "");
    assert!(done, "{error}");
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(words(lines[1])[..2], ["threshold", "filter"], "{out}");
    assert!(words(lines[1])[4] == "1", "it dropped one: {out}");
    assert_eq!(words(lines[2])[..3], ["broken", "1", "filter"], "{out}");
    assert_eq!(lines[3], "1 messages are held");
    let (_, out, _) = gateway.run(&["plugin", "usage", &id, "--json"], "");
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["heldMessages"], 1, "{out}");
}

#[tokio::test]
async fn a_name_where_an_id_belongs_is_told_where_ids_come_from() {
    let gateway = Gateway::start().await;
    let listen = ["listen", "--subscription", "s", "--subscriber", "a", "--subscribe", "--source", "pump"];
    for (arguments, text) in [
        (&["plugin", "roll", "jumps", "jump", "2"][..], "`tidegate subscriptions` lists them"),
        (&["plugin", "canary", "jumps"], "`tidegate subscriptions` lists them"),
        (&["plugin", "promote", "jumps"], "`tidegate subscriptions` lists them"),
        (&["plugin", "rollback", "jumps"], "`tidegate subscriptions` lists them"),
        (&["plugin", "usage", "jumps"], "`tidegate subscriptions` lists them"),
        (&["plugin", "explain", "jumps"], "`tidegate subscriptions` lists them"),
        (&["plugin", "roll", "7", "jump", "new"], "a version is a number from 1 on, or 'latest'"),
        (&listen, "GET /inventory/managedObjects lists them"),
    ] {
        let (done, _, error) = gateway.run(arguments, "");
        assert!(!done && error.contains(text), "{arguments:?}: {error}");
    }
}

// As before `| head -1`, which has read a line and is gone.
#[tokio::test]
async fn a_command_whose_output_nobody_reads_ends_without_a_word() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    for arguments in [
        &["topics"][..],
        &["consumers", "--json"],
        &["subscriptions"],
        &["plugin", "list"],
        &["plugin", "show", "threshold", "--json"],
        &["plugin", "try", "sampling", "--settings", "{\"every\":1}"],
        &["user", "list"],
        &["tenant", "list"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = gateway.terminal(arguments, "{}\n{}\n");
        let Output { status, stderr, .. } = command.stdout(Stdio::from(writer)).output().unwrap();
        assert_eq!((status.code(), String::from_utf8(stderr).unwrap()), (Some(141), String::new()), "{arguments:?}");
    }
}
