//! The gateway with programs that other people wrote: `cargo test --features peers --test peers`.
//!
//! `TIDEGATE_PYTHON` names the Python of an environment that has c8y_api 3.7.3 and schemathesis 4.32.5; bash and curl are needed,
//! too. `.ci/run` sets all that up.
#![allow(clippy::unwrap_used, reason = "tests")]

mod harness;
mod schemathesis;

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use harness::{Gateway, PASSWORD, PATIENCE, Program, eventually, measurement, value_of};

/// The events that the Python script has printed.
fn events(program: &Program, name: &str) -> Vec<Value> {
    let out = program.stdout();
    let complete = out.rfind('\n').map_or("", |end| &out[..end]);
    let all = complete.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    all.filter(|event| event["event"] == name).collect()
}

async fn events_until(program: &mut Program, name: &str, count: usize) -> Vec<Value> {
    eventually(&format!("{count} events '{name}' of the Python client"), async || {
        assert!(program.exited().is_none(), "the Python client ended:\n{}{}", program.stdout(), program.stderr());
        let events = events(program, name);
        (events.len() >= count).then_some(events)
    })
    .await
}

// "c8y_api 3.7.3 (PyPI), unmodified: creates a subscription with typeFilter and one fragment for a device, listens, receives
// exactly the matching measurements, projected, in order, survives a restart of the gateway, and unsubscribes."
#[tokio::test]
async fn c8y_api_receives_what_it_subscribed_to_over_a_restart_and_unsubscribes() {
    let python = std::env::var_os("TIDEGATE_PYTHON").expect("TIDEGATE_PYTHON names a Python that has c8y_api 3.7.3");
    let mut gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/peers/c8y_api_line.py");
    let mut command = Command::new(python);
    command.arg(script.canonicalize().unwrap()).args([&format!("http://{}", gateway.addr), PASSWORD, &pump]);
    let environment = [("NO_PROXY".to_owned(), "*".to_owned())];
    let mut client = Program::spawn_command(command, &environment, &gateway.path("."), "python");
    events_until(&mut client, "connected", 1).await;

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
    events_until(&mut client, "message", first.len()).await;
    // What is acknowledged by now holds.
    tokio::time::sleep(Duration::from_millis(300)).await;
    gateway.restart().await;
    // The consumer is known, so that what comes before it is back is kept for it.
    let expected = batch(&gateway).await;
    let messages = events_until(&mut client, "message", expected.len()).await;

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

    client.signal("TERM");
    let status = client.wait().await;
    assert!(status.success(), "{status}:\n{}", client.stderr());
    assert!(!client.stderr().contains("could not be unsubscribed"), "{}", client.stderr());
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
