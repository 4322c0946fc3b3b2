//! `tidegate listen` as a process.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::json;

use crate::harness::{Gateway, PASSWORD, Program, USER, eventually, forwarded, measurement, value_of};

fn env(gateway: &Gateway) -> Vec<(String, String)> {
    let url = format!("http://{}", gateway.addr);
    [("TIDEGATE_URL", url.as_str()), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into()
}

/// Starts `tidegate listen` for the consumer `subA` of the topic `Sub1`.
fn listen(gateway: &Gateway, name: &str, flags: &[&str]) -> Program {
    let mut arguments = vec!["listen", "--subscription", "Sub1", "--subscriber", "subA"];
    arguments.extend(flags);
    Program::spawn(&arguments, &env(gateway), &gateway.path("."), name)
}

/// Starts it and waits until it is connected.
async fn listening(gateway: &Gateway, name: &str, flags: &[&str]) -> Program {
    let mut program = listen(gateway, name, flags);
    eventually("tidegate listen is connected", async || {
        assert!(program.exited().is_none(), "it ended: {}", program.stderr());
        program.stderr().contains("listening to Sub1 as subA").then_some(())
    })
    .await;
    program
}

async fn lines(program: &Program, count: usize) -> Vec<String> {
    eventually("the lines", async || {
        let lines: Vec<_> = program.stdout().lines().map(str::to_owned).collect();
        (lines.len() >= count).then_some(lines)
    })
    .await
}

/// Waits for a line with this value; around a kill there may be more than one.
async fn printed(program: &Program, value: u64) {
    let member = format!("\"value\":{value}");
    eventually("the line", async || program.stdout().contains(&member).then_some(())).await;
}

async fn subscribed() -> (Gateway, String) {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    (gateway, device)
}

#[tokio::test]
async fn it_prints_a_message_a_line_and_acknowledges_it() {
    let (gateway, device) = subscribed().await;
    let mut program = listening(&gateway, "listen", &["--count", "3"]).await;
    let mut posted = Vec::new();
    for value in 1..=4 {
        posted.push(gateway.measure(&device, "t", value).await);
    }
    assert!(program.wait().await.success());
    let lines = lines(&program, 3).await;
    assert_eq!(lines.len(), 3);
    for (line, posted) in lines.iter().zip(&posted) {
        let body = line.strip_prefix(&format!("/edge/measurements/{device} CREATE ")).unwrap();
        assert_eq!(&serde_json::from_str::<serde_json::Value>(body).unwrap(), posted);
    }
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    assert_eq!(value_of(&consumer.next().await.json()), 4, "three are acknowledged");
}

#[tokio::test]
async fn it_creates_the_subscription_and_a_second_time_says_that_it_exists() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let flags = ["--subscribe", "--source", &device, "--apis", "measurements", "--type-filter", "'t' or 'u'"];
    let all = [&flags[..], &["--fragments", "c8y_Reading,c8y_Other", "--count", "1"]].concat();
    let mut program = listening(&gateway, "first", &all).await;
    let list = gateway.get("/notification2/subscriptions").await.expect(200).json();
    let made = &list["subscriptions"][0];
    assert_eq!((&made["context"], &made["source"]["id"]), (&json!("mo"), &json!(device)));
    let said = format!("subscription Sub1 created, with the id {}\n", made["id"].as_str().unwrap());
    assert!(program.stderr().contains(&said), "{}", program.stderr());
    assert_eq!(made["subscriptionFilter"], json!({"apis": ["measurements"], "typeFilter": "'t' or 'u'"}));
    assert_eq!(made["fragmentsToCopy"], json!(["c8y_Reading", "c8y_Other"]));
    gateway.measure(&device, "v", 1).await;
    gateway.measure(&device, "u", 2).await;
    assert!(program.wait().await.success());
    assert!(program.stdout().contains("\"value\":2"), "{}", program.stdout());

    let program = listening(&gateway, "second", &["--subscribe", "--source", &device]).await;
    assert!(program.stderr().contains("exists already"), "{}", program.stderr());
    assert_eq!(gateway.get("/notification2/subscriptions").await.expect(200).json(), list);
}

#[tokio::test]
async fn a_list_of_types_without_quotes_is_told_to_be_one_type() {
    let gateway = Gateway::start().await;
    for (filter, told) in [("t or u", true), ("'t' or 'u'", false), ("t", false)] {
        let device = gateway.device("pump").await;
        let flags = ["--subscribe", "--source", &device, "--type-filter", filter];
        let program = listening(&gateway, &device, &flags).await;
        assert_eq!(
            program.stderr().contains("t or u is one type, since it has no quotes; several would be 't' or 'u'\n"),
            told,
            "{filter}: {}",
            program.stderr()
        );
        assert_eq!(program.stdout(), "");
    }
}

#[tokio::test]
async fn a_subscription_of_the_whole_tenant_is_told_to_have_no_measurements() {
    for (flags, told) in [(&["--subscribe", "--apis", "measurements"][..], false), (&["--subscribe"], true)] {
        let gateway = Gateway::start().await;
        let said = listening(&gateway, "tenant", flags).await.stderr();
        assert_eq!(
            said.contains("it tells of new managed objects alone; --apis or --source says what else"),
            told,
            "{said}"
        );
    }
}

#[tokio::test]
async fn it_says_once_that_no_subscription_sends_to_the_topic() {
    let (mut gateway, device) = subscribed().await;
    let said = |program: &Program, kind: &str| {
        program.stderr().matches(&format!("no subscription of the tenant sends to the {kind} topic Sub1 yet")).count()
    };
    let silent = listening(&gateway, "fed", &[]).await;
    assert_eq!((silent.stderr().lines().count(), silent.stdout()), (1, String::new()), "{}", silent.stderr());
    // It has the name of the other topic.
    let program = listening(&gateway, "unfed", &["--non-persistent"]).await;
    assert_eq!(said(&program, "non-persistent"), 1, "{}", program.stderr());
    gateway.restart().await;
    eventually("it is connected again", async || (program.stderr().matches("listening to").count() == 2).then_some(()))
        .await;
    assert_eq!((said(&program, "non-persistent"), program.stdout()), (1, String::new()), "{}", program.stderr());
    drop((silent, program));
    gateway.delete(&format!("/notification2/subscriptions?source={device}")).await.expect(204);
    let program = listening(&gateway, "deleted", &[]).await;
    assert_eq!(said(&program, "persistent"), 1, "{}", program.stderr());
    drop(program);
    // Of 100 that send to the other one it cannot tell.
    for _ in 0..100 {
        let mut other = forwarded("Sub1", &gateway.device("pump").await);
        other["nonPersistent"] = json!(true);
        gateway.subscribe(&other).await;
    }
    let program = listening(&gateway, "many", &[]).await;
    assert_eq!(said(&program, "persistent"), 0, "{}", program.stderr());
}

#[tokio::test]
async fn raw_prints_the_frames_as_they_are() {
    let (gateway, device) = subscribed().await;
    let mut program = listening(&gateway, "listen", &["--raw", "--count", "2"]).await;
    gateway.measure(&device, "t", 1).await;
    gateway.measure(&device, "t", 2).await;
    assert!(program.wait().await.success());
    let out = program.stdout();
    let parts: Vec<_> = out.split("\n\n").collect();
    assert_eq!(parts.len(), 5, "{out}");
    for head in [parts[0], parts[2]] {
        let lines: Vec<_> = head.lines().collect();
        assert_eq!((lines[1], lines[2]), (format!("/edge/measurements/{device}").as_str(), "CREATE"));
        assert!(lines[3].starts_with("message-id:"));
    }
    assert!(parts[1].starts_with('{') && parts[3].ends_with('}') && parts[4].is_empty(), "{out}");
}

#[tokio::test]
async fn it_survives_restarts_and_kills_of_the_gateway_and_ends_with_sigterm() {
    let (mut gateway, device) = subscribed().await;
    let mut program = listening(&gateway, "listen", &[]).await;
    gateway.measure(&device, "t", 1).await;
    printed(&program, 1).await;
    gateway.restart().await;
    gateway.measure(&device, "t", 2).await;
    printed(&program, 2).await;
    gateway.kill9();
    gateway.restart_process().await;
    gateway.measure(&device, "t", 3).await;
    printed(&program, 3).await;
    let said = program.stderr();
    assert!(said.contains("1001") && said.contains("the connection is lost"), "it says why: {said}");
    program.signal("TERM");
    assert!(program.wait().await.success());
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    gateway.measure(&device, "t", 4).await;
    assert_eq!(value_of(&consumer.next().await.json()), 4, "all that was printed is acknowledged");
}

#[tokio::test]
async fn it_shares_under_a_name_and_listens_to_a_non_persistent_topic() {
    let (gateway, device) = subscribed().await;
    let first = ["--shared", "--consumer", "a b", "--non-persistent"];
    let mut program = listening(&gateway, "first", &[&first[..], &["--subscribe", "--source", &device]].concat()).await;
    let list = gateway.get("/notification2/subscriptions").await.expect(200).json();
    assert_eq!(
        (&list["subscriptions"][1]["nonPersistent"], &list["subscriptions"][1]["source"]["id"]),
        (&json!(true), &json!(device))
    );
    let second = listen(&gateway, "second", &first);
    eventually("the name is taken", async || second.stderr().contains("409").then_some(())).await;
    let mut third = listening(&gateway, "third", &["--shared", "--non-persistent"]).await;
    gateway.measure(&device, "t", 1).await;
    eventually("one of them prints it", async || {
        let lines = program.stdout().lines().count() + third.stdout().lines().count();
        assert!(lines < 2);
        (lines == 1).then_some(())
    })
    .await;
    drop(second);
    for program in [&mut program, &mut third] {
        program.signal("TERM");
        assert!(program.wait().await.success());
    }
}

#[tokio::test]
async fn it_waits_for_another_client_to_go_and_says_so_once() {
    let (gateway, device) = subscribed().await;
    let other = gateway.consumer("Sub1", "subA").await;
    gateway.measure(&device, "t", 1).await;
    let program = listen(&gateway, "listen", &[]);
    eventually("it is refused", async || program.stderr().contains("409").then_some(())).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(program.stderr().matches("409").count(), 1, "{}", program.stderr());
    other.close().await;
    assert_eq!(lines(&program, 1).await.len(), 1);
    program.signal("INT");
}

#[tokio::test]
async fn unsubscribe_leaves_no_consumer_behind() {
    let (gateway, device) = subscribed().await;
    let mut program = listening(&gateway, "listen", &["--count", "1", "--unsubscribe"]).await;
    gateway.measure(&device, "t", 1).await;
    assert!(program.wait().await.success(), "{}", program.stderr());
    let token = gateway.token("Sub1", "subA").await;
    assert!(gateway.unsubscribe(&token).await.status >= 500);
}

// What nobody read is not acknowledged.
#[tokio::test]
async fn it_ends_when_nobody_reads_its_output_and_does_not_acknowledge_that_message() {
    let (gateway, device) = subscribed().await;
    gateway.consumer("Sub1", "subA").await.close().await;
    gateway.measure(&device, "t", 1).await;
    let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["listen", "--subscription", "Sub1", "--subscriber", "subA"])
        .envs(env(&gateway))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let status = eventually("it ends", async || child.try_wait().unwrap()).await;
    assert!(status.success(), "{status}");
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    assert_eq!(value_of(&consumer.next().await.json()), 1);
}

#[tokio::test]
async fn it_gives_up_at_once_on_what_waiting_cannot_cure() {
    let (gateway, device) = subscribed().await;
    gateway.add_user("edge", "reader", "ROLE_INVENTORY_READ").await;
    let with = |name: &str, value: &str| {
        let mut env = env(&gateway);
        env.retain(|(known, _)| known != name);
        env.push((name.to_owned(), value.to_owned()));
        env
    };
    let good = ["--subscription", "Sub1", "--subscriber", "subA"];
    let bad_name = ["--subscription", "Sub-1", "--subscriber", "subA"];
    let secure = [&good[..], &["--url", "https://127.0.0.1:1"]].concat();
    let no_device = [&good[..], &["--subscribe", "--source", "1"]].concat();
    for (number, (env, flags, said)) in [
        (with("TIDEGATE_PASSWORD", "wrong"), &good[..], "401"),
        (with("TIDEGATE_USER", "edge/reader"), &good, "403"),
        (with("TIDEGATE_URL", &format!("http://{}/elsewhere", gateway.addr)), &good, "404"),
        (with("TIDEGATE_URL", "ftp://127.0.0.1:1"), &good, "must look like"),
        (with("TIDEGATE_CA", "none.pem"), &secure, "none.pem"),
        (env(&gateway), &bad_name, "subscription"),
        (env(&gateway), &no_device, "Finding device data from database failed"),
        (
            env(&gateway).into_iter().filter(|(name, _)| name != "TIDEGATE_PASSWORD").collect(),
            &good,
            "TIDEGATE_PASSWORD",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let arguments: Vec<_> = ["listen"].into_iter().chain(flags.iter().copied()).collect();
        let mut program = Program::spawn(&arguments, &env, &gateway.path("."), &format!("bad{number}"));
        let status = program.wait().await;
        assert_eq!(status.code(), Some(1), "{flags:?}: {}", program.stderr());
        assert!(program.stderr().contains(said), "{said} is not in {}", program.stderr());
        assert_eq!(program.stdout(), "");
    }
    gateway.post_measurement(&measurement(&device, "t", 1)).await.expect(201);
}
