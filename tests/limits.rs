//! Limits of `docs/configuration.md` that stand with no single API: each is shown where it bites. The others have their scene
//! beside what they limit.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::{
    BASIC, Gateway, alarm, event, exchange, forwarded, in_time, measurement, operation, raw, typed, value_of,
};
use crate::plugins::faulty;

const MEASUREMENTS: &str = "/measurement/measurements";

/// A gateway with a device whose measurements go to the topic `Sub1`.
async fn line(config: &str) -> (Gateway, String) {
    let gateway = Gateway::with(config).await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    (gateway, device)
}

// `limits.topics_per_tenant` and `limits.consumers_per_topic`: of those who connect for the first time, never of those who are
// known.
#[tokio::test]
async fn a_consumer_that_would_be_one_too_many_is_503() {
    let mut gateway = Gateway::with("[limits]\ntopics_per_tenant = 2\nconsumers_per_topic = 2").await;
    let connect = async |gateway: &Gateway, topic: &str, subscriber: &str| {
        let token = gateway.token(topic, subscriber).await;
        gateway.consumer_with(&token).await
    };
    let first = connect(&gateway, "Sub1", "subA").await.unwrap();
    connect(&gateway, "Sub1", "subB").await.unwrap();
    assert_eq!(connect(&gateway, "Sub1", "subC").await.err(), Some(503), "consumers_per_topic");
    connect(&gateway, "Sub2", "subC").await.unwrap();
    assert_eq!(connect(&gateway, "Sub3", "subA").await.err(), Some(503), "topics_per_tenant");
    let token = gateway.token("Sub3", "subA").await;
    let handshake = format!(
        "GET /notification2/consumer/?token={token} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    let answer = raw(gateway.addr, handshake.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("too many topics"), "{answer}");
    assert!(answer.to_ascii_lowercase().contains("\r\nretry-after: 1\r\n"), "{answer}");

    first.close().await;
    gateway.restart().await;
    connect(&gateway, "Sub1", "subA").await.unwrap();
    assert_eq!(connect(&gateway, "Sub1", "subC").await.err(), Some(503), "they are counted after a start, too");
    // An unsubscribed one makes room.
    gateway.unsubscribe(&gateway.token("Sub1", "subB").await).await.expect(200);
    connect(&gateway, "Sub1", "subC").await.unwrap();
    gateway.unsubscribe(&gateway.token("Sub2", "subC").await).await.expect(200);
    connect(&gateway, "Sub3", "subA").await.unwrap();
}

// `limits.json_depth`, of every body.
#[tokio::test]
async fn json_that_is_nested_too_deep_is_422() {
    let gateway = Gateway::with("[limits]\njson_depth = 5").await;
    let device = gateway.device("pump").await;
    // The body itself is the first level.
    let nested = |levels: usize| (1..levels).fold(json!(1), |value, _| json!([value]));
    for (path, body) in [
        (MEASUREMENTS, measurement(&device, "t", 1)),
        ("/event/events", event(&device, "t", "x")),
        ("/alarm/alarms", alarm(&device, "t", "MAJOR")),
        ("/devicecontrol/operations", operation(&device)),
        ("/inventory/managedObjects", json!({})),
    ] {
        let with = |levels: usize| {
            let mut body = body.clone();
            body["c8y_Deep"] = nested(levels);
            body
        };
        gateway.post(path, &with(5)).await.expect(201);
        gateway.post(path, &with(6)).await.error(422, "nested deeper than 5 levels");
    }
    let deep = json!({"context": "tenant", "subscription": nested(6)});
    for path in ["/notification2/subscriptions", "/notification2/token"] {
        gateway.post(path, &deep).await.error(422, "nested deeper than 5 levels");
    }
}

// `limits.bulk_count`, of objects in one request and of references.
#[tokio::test]
async fn a_collection_of_too_many_elements_is_422_and_nothing_is_stored() {
    let gateway = Gateway::with("[limits]\nbulk_count = 3").await;
    let device = gateway.device("pump").await;
    let many = |one: &Value, count: usize| vec![one.clone(); count];
    for (path, name, one) in [
        (MEASUREMENTS, "measurements", measurement(&device, "t", 1)),
        ("/event/events", "events", event(&device, "t", "x")),
        ("/alarm/alarms", "alarms", alarm(&device, "t", "MAJOR")),
    ] {
        gateway.post(path, &json!({name: many(&one, 4)})).await.error(422, name);
        assert_eq!(gateway.get(path).await.expect(200).json()[name], json!([]));
        gateway.post(path, &json!({name: many(&one, 3)})).await.expect(201);
    }
    let children = format!("/inventory/managedObjects/{device}/childDevices");
    let mut references = Vec::new();
    for _ in 0..4 {
        references.push(json!({"managedObject": {"id": gateway.device("child").await}}));
    }
    gateway.post(&children, &json!({"references": references})).await.error(422, "references");
    assert_eq!(gateway.get(&children).await.expect(200).json()["references"], json!([]));
    gateway.post(&children, &json!({"references": references[..3]})).await.expect(201);
}

// `limits.frame_bytes`: by default a frame fits into the MiB at which many WebSocket clients close.
#[tokio::test]
async fn no_frame_is_larger_than_a_mib_by_default() {
    const MIB: usize = 1 << 20;
    let (gateway, device) = line("").await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let mut sized = measurement(&device, "t", 1);
    let mut post = async |bytes: usize| {
        sized["note"] = json!("");
        let rest = sized.to_string().len();
        sized["note"] = json!("x".repeat(bytes - rest));
        gateway.post_measurement(&sized).await
    };
    post(MIB).await.error(413, "1048576");
    let (mut largest, mut step) = (MIB - 1000, 500);
    post(largest).await.expect(201);
    while step > 0 {
        if post(largest + step).await.status == 201 {
            largest += step;
        }
        step /= 2;
    }
    let mut bytes = 0;
    while bytes < MIB - 100 {
        let frame = consumer.receive().await;
        let lines = [&[frame.ack, frame.description, frame.action], &frame.headers[..]].concat();
        bytes = lines.iter().map(|line| line.len() + 1).sum::<usize>() + 1 + frame.body.len();
        assert!(bytes <= MIB, "{bytes}");
    }
}

// `limits.request_seconds`: first for the head, then for the body.
#[tokio::test]
async fn a_request_that_does_not_arrive_in_time_is_given_up() {
    let gateway = Gateway::with("[limits]\nrequest_seconds = 1").await;
    let silent = raw(gateway.addr, b"").await;
    let half = raw(gateway.addr, b"GET /health/live HTTP/1.1\r\nHost: x\r\n").await;
    for answer in [silent, half] {
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408 "), "{answer}");
    }
    let head = format!(
        "POST {MEASUREMENTS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{BASIC}Content-Length: 1000\r\n\r\n{{"
    );
    let answer = raw(gateway.addr, head.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("general/requestTimeout"), "{answer}");
    // Time between requests is a head that does not come; a consumer's connection is no request any more.
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    consumer.ping().await;
}

// `limits.connections`: consumers and requests have the same places; the next ones wait, and are served when one is free.
#[tokio::test]
async fn connections_past_the_limit_wait_for_a_place() {
    let gateway = Gateway::with("[limits]\nconnections = 2").await;
    let token = gateway.token("Sub1", "subA").await;
    let consumer = gateway.consumer_with(&token).await.unwrap();
    let held = TcpStream::connect(gateway.addr).await.unwrap();
    let request = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let mut waiting = TcpStream::connect(gateway.addr).await.unwrap();
    waiting.write_all(request).await.unwrap();
    let early = tokio::time::timeout(Duration::from_millis(500), waiting.read(&mut [0; 1])).await;
    assert!(early.is_err(), "it was served beside two others: {early:?}");
    drop(held);
    let answer = exchange(waiting, b"").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    consumer.close().await;
}

// `limits.request_seconds`: a client that asks and does not read gives its place back; one that is being upgraded is no such client.
#[tokio::test]
async fn a_client_that_does_not_read_its_answers_is_left() {
    let gateway = Gateway::with("[limits]\nconnections = 1\nrequest_seconds = 1\n[consumer]\ndead_seconds = 2").await;
    let mut hog = TcpStream::connect(gateway.addr).await.unwrap();
    // More than the buffers of both kernels hold.
    for _ in 0..200 {
        hog.write_all(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    }
    let request = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let answer = raw(gateway.addr, request).await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    drop(hog);
}

// Every object in an answer repeats the `Host`.
#[tokio::test]
async fn a_host_that_is_none_is_refused() {
    let gateway = Gateway::start().await;
    for host in [&"x".repeat(262), "a/b", "a\"b", "a b", "ä"] {
        let request = format!("GET /platform HTTP/1.1\r\nHost: {host}\r\n{BASIC}Connection: close\r\n\r\n");
        let answer = raw(gateway.addr, request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("The Host header"), "{host}: {answer}");
    }
    for host in ["edge-1.example:8080", "[::1]:80", &"x".repeat(261)] {
        let request = format!("GET /platform HTTP/1.1\r\nHost: {host}\r\n{BASIC}Connection: close\r\n\r\n");
        let answer = raw(gateway.addr, request.as_bytes()).await;
        assert!(answer.contains(&format!("\"self\":\"http://{host}/platform\"")), "{host}: {answer}");
    }
}

// What waits is delivered, also when it is longer than the limit that holds by then.
#[tokio::test]
async fn a_lower_limit_holds_up_no_message_that_waits() {
    let mut gateway = Gateway::with("[limits]\nframe_bytes = 8388608\nbody_bytes = 8388608").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    let mut large = measurement(&device, "t", 1);
    large["c8y_Text"] = json!("x".repeat(5 << 20));
    gateway.post(MEASUREMENTS, &large).await.expect(201);
    gateway.measure(&device, "t", 2).await;
    std::fs::write(gateway.path("config.toml"), "").unwrap();
    gateway.restart().await;
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    assert!(consumer.receive().await.body.len() > 5 << 20);
    assert_eq!(value_of(&consumer.receive().await.json()), 2);
}

// `limits.admission`: while a turn takes its time, so many requests are queued; whoever waits before the queue, and goes away,
// has not been admitted.
#[tokio::test]
async fn requests_past_the_limit_wait_before_the_queue() {
    let (gateway, _components) = faulty("type-filter", "loop", "call_ms = 3000\n[limits]\nadmission = 2\n").await;
    let (slow, plain) = (gateway.device("slow").await, gateway.device("plain").await);
    gateway.subscribe(&typed("Sub1", &slow, "'t'")).await;
    let _consumer = gateway.consumer("Sub1", "subA").await;
    let send = async |device: &str, value: u64| {
        let body = measurement(device, "t", value).to_string();
        let length = body.len();
        let head = format!("POST {MEASUREMENTS} HTTP/1.1\r\nHost: x\r\n{BASIC}Content-Length: {length}\r\n\r\n{body}");
        let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
        socket.write_all(head.as_bytes()).await.unwrap();
        socket
    };
    let mut held_up = send(&slow, 0).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut sockets = Vec::new();
    for value in 1..=6 {
        sockets.push(send(&plain, value).await);
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    drop(sockets);
    let mut answer = [0; 13];
    in_time("the answer to the slow one", held_up.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 201 ", "the plugin was stopped, and the message is held");
    gateway.measure(&plain, "t", 7).await;
    let list = gateway.get(&format!("{MEASUREMENTS}?source={plain}&pageSize=100")).await.expect(200).json();
    let values: Vec<_> = list["measurements"].as_array().unwrap().iter().map(value_of).collect();
    assert_eq!((values.len(), values[2]), (3, 7), "{values:?}");
}

#[cfg(target_os = "linux")]
mod vanished {
    use super::*;
    use crate::harness::Mortal;

    // `consumer.dead_seconds`: the place of a peer that has vanished is free, whether something was on its way or nothing; one
    // that is there and silent keeps its own. Cumulocity-IoT/cumulocity-python-api#97 waits for that place.
    #[tokio::test]
    async fn the_place_of_a_vanished_peer_is_free() {
        let (gateway, device) = line("[consumer]\ndead_seconds = 2").await;
        let mut waiting = Mortal::connect(&gateway, &gateway.token("Sub1", "subA").await).await;
        let quiet = Mortal::connect(&gateway, &gateway.token("Quiet", "subA").await).await;
        let mut silent = gateway.consumer("Quiet", "subB").await;
        gateway.measure(&device, "t", 1).await;
        waiting.consumer.receive().await;
        waiting.consumer.ping().await;
        waiting.vanish();
        quiet.vanish();
        gateway.measure(&device, "t", 2).await;
        for topic in ["Sub1", "Quiet"] {
            let token = gateway.token(topic, "subA").await;
            assert_eq!(gateway.consumer_with(&token).await.err(), Some(409), "not known yet");
        }
        let mut back = gateway.reconnect("Sub1", "subA").await;
        assert_eq!(back.receive().await.json()["c8y_Reading"]["R"]["value"], 2);
        gateway.reconnect("Quiet", "subA").await;
        silent.ping().await;
    }
}
