//! Exclusive consumers of a topic (seed 001, "Consumer protocol").

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::{Consumer, Frame, Gateway, eventually, forwarded, measurement, upgrade, value_of};

/// How long a consumer is watched that must not receive anything.
const SILENCE: Duration = Duration::from_millis(300);

/// A gateway with a device whose measurements go to the topic `Sub1`.
async fn line(config: &str) -> (Gateway, String) {
    let gateway = Gateway::with(config).await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    (gateway, device)
}

fn values(frames: &[Frame]) -> Vec<u64> {
    frames.iter().map(|frame| value_of(&frame.json())).collect()
}

async fn measure(gateway: &Gateway, device: &str, values: std::ops::RangeInclusive<u64>) {
    for value in values {
        gateway.measure(device, "t", value).await;
    }
}

// Seed 001, "Notification message header and content": acknowledgement, description, action, further lines, a blank line, the
// body as UTF-8 text; on one line, since clients take the last line of a frame.
#[tokio::test]
async fn a_frame_has_its_headers_and_the_stored_object_as_its_body() {
    let (gateway, device) = line("").await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let mut last_id = 0;
    for value in 1..=3 {
        let posted = gateway.measure(&device, "t", value).await;
        let frame = consumer.receive().await;
        assert!(!frame.ack.is_empty() && frame.ack.bytes().all(|byte| byte.is_ascii_graphic()), "{}", frame.ack);
        assert_eq!(frame.description, format!("/edge/measurements/{device}"));
        assert_eq!(frame.action, "CREATE");
        assert_eq!(frame.json(), posted);
        assert!(!frame.body.contains(['\n', '\r']));
        assert!(frame.message_id() > last_id, "message ids increase");
        last_id = frame.message_id();
    }
}

// Seed 000, "Shared consumer tokens": only one client can connect as an exclusive consumer.
// Cumulocity-IoT/cumulocity-python-api#97: the second is refused by the upgrade itself, with 409, until the first is gone, so
// that clients try again.
#[tokio::test]
async fn an_exclusive_consumer_has_one_connection() {
    let (gateway, device) = line("").await;
    let first = gateway.consumer("Sub1", "subA").await;
    let token = gateway.token("Sub1", "subA").await;
    let status = upgrade(gateway.addr, &format!("/notification2/consumer/?token={token}")).await;
    assert_eq!(status, "HTTP/1.1 409 Conflict");
    let mut other_name = gateway.consumer("Sub1", "subB").await;
    first.close().await;
    let mut second = gateway.reconnect("Sub1", "subA").await;
    gateway.measure(&device, "t", 1).await;
    assert_eq!(values(&[second.receive().await, other_name.receive().await]), [1, 1]);

    // A socket that ends without a goodbye frees the place as well.
    drop(second);
    gateway.reconnect("Sub1", "subA").await;
}

// Seed 001, "Notification acknowledgments": the flow stops until some of the unacknowledged messages are acknowledged.
#[tokio::test]
async fn delivery_stops_at_the_window_and_goes_on_with_acknowledgements() {
    let (gateway, device) = line("[consumer]\nwindow = 3").await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    measure(&gateway, &device, 1..=8).await;
    let first = consumer.take(3).await;
    assert_eq!(values(&first), [1, 2, 3]);
    assert!(consumer.is_silent_for(SILENCE).await, "a full window");
    consumer.ack(&first[1]).await;
    assert_eq!(values(&[consumer.next().await]), [4], "one acknowledged, one sent");
    assert!(consumer.is_silent_for(SILENCE).await, "full again");
    consumer.ack(&first[0]).await;
    consumer.ack(&first[2]).await;
    assert_eq!(values(&consumer.take(2).await), [5, 6]);
    assert!(consumer.is_silent_for(SILENCE).await);
}

// Seed 001, "Notification acknowledgments": "1000 by default".
#[tokio::test]
async fn the_window_has_1000_messages_by_default() {
    let (gateway, device) = line("").await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let all: Vec<_> = (1..=1010).map(|value| crate::harness::measurement(&device, "t", value)).collect();
    gateway.post("/measurement/measurements", &json!({"measurements": all})).await.expect(201);
    let frames = consumer.take(1000).await;
    assert!(consumer.is_silent_for(SILENCE).await);
    for frame in &frames {
        consumer.ack(frame).await;
    }
    assert_eq!(values(&consumer.take(10).await), (1001..=1010).collect::<Vec<_>>());
}

// Seed 001, "Notification acknowledgments" (none is cumulative) and "Dealing with notification duplication": what was
// acknowledged stays so, the rest comes again, in order.
#[tokio::test]
async fn everything_unacknowledged_comes_again_in_order_after_a_reconnect() {
    let (gateway, device) = line("").await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    measure(&gateway, &device, 1..=10).await;
    let frames = consumer.take(10).await;
    for index in [8, 0, 5, 1, 5] {
        consumer.ack(&frames[index]).await;
    }
    consumer.close().await;
    measure(&gateway, &device, 11..=12).await;
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    let again = consumer.take(8).await;
    assert_eq!(values(&again), [3, 4, 5, 7, 8, 10, 11, 12]);
    for (index, frame) in [(2, 0), (3, 1), (4, 2), (6, 3), (7, 4), (9, 5)] {
        assert_eq!(frames[index].message_id(), again[frame].message_id(), "the same message, the same id");
    }
    assert!(consumer.is_silent_for(SILENCE).await);
}

/// Acknowledges the messages at `acked` of ten, and waits until the gateway has written that down.
async fn acknowledge_some(consumer: &mut Consumer, acked: &[usize]) -> Vec<Frame> {
    let frames = consumer.take(10).await;
    for index in acked {
        consumer.ack(&frames[*index]).await;
    }
    consumer.ping().await;
    // Acknowledgements are committed within 20 ms, and hold 250 ms after they were written.
    tokio::time::sleep(Duration::from_millis(300)).await;
    frames
}

// Seed 000, "Persistent and non-persistent subscriptions": secondary storage holds backlogs and positions.
#[tokio::test]
async fn everything_unacknowledged_comes_again_in_order_after_a_restart_and_after_kill_9() {
    let (mut gateway, device) = line("").await;
    for kill in [false, true] {
        let consumer_name = if kill { "killed" } else { "stopped" };
        let mut consumer = gateway.consumer("Sub1", consumer_name).await;
        measure(&gateway, &device, 1..=10).await;
        let frames = acknowledge_some(&mut consumer, &[9, 0, 1, 2, 6]).await;
        if kill {
            gateway.kill9();
            gateway.restart_process().await;
        } else {
            gateway.restart().await;
        }
        let mut consumer = gateway.consumer("Sub1", consumer_name).await;
        measure(&gateway, &device, 11..=11).await;
        let again = consumer.take(6).await;
        assert_eq!(values(&again), [4, 5, 6, 8, 9, 11], "kill: {kill}");
        assert_eq!(again[0].message_id(), frames[3].message_id());
        assert!(again[5].message_id() > frames[9].message_id(), "new ids are larger than all before");
        for frame in &again {
            consumer.ack(frame).await;
        }
        consumer.close().await;
        let mut consumer = gateway.reconnect("Sub1", consumer_name).await;
        assert!(consumer.is_silent_for(SILENCE).await, "all is acknowledged");
    }
}

// Seed 000, "Consumer lifecycle": a consumer and its backlog begin with its first connection, and each consumer has a position
// of its own (reubenmiller/go-c8y-cli#454).
#[tokio::test]
async fn consumers_have_their_own_cursors_and_one_that_never_connected_has_nothing() {
    let (gateway, device) = line("").await;
    gateway.token("Sub1", "subC").await;
    measure(&gateway, &device, 1..=2).await;
    let mut a = gateway.consumer("Sub1", "subA").await;
    measure(&gateway, &device, 3..=4).await;
    let mut b = gateway.consumer("Sub1", "subB").await;
    measure(&gateway, &device, 5..=6).await;
    assert_eq!(values(&[a.receive().await, a.receive().await]), [3, 4]);
    a.close().await;
    assert_eq!(values(&b.take(2).await), [5, 6]);
    b.close().await;
    let mut a = gateway.reconnect("Sub1", "subA").await;
    assert_eq!(values(&a.take(2).await), [5, 6]);
    let mut b = gateway.reconnect("Sub1", "subB").await;
    assert_eq!(values(&b.take(2).await), [5, 6]);
    let mut c = gateway.consumer("Sub1", "subC").await;
    measure(&gateway, &device, 7..=7).await;
    assert_eq!(values(&[c.next().await]), [7]);
}

// Seed 001, "Notification acknowledgments": one message at a time, on the connection that it came on; "unique to a particular
// notification and consumer"; no batches. Whatever else a client sends harms neither the connection nor the store.
#[tokio::test]
async fn garbage_from_a_client_harms_nothing() {
    let (gateway, device) = line("").await;
    let mut a = gateway.consumer("Sub1", "subA").await;
    let mut b = gateway.consumer("Sub1", "subB").await;
    measure(&gateway, &device, 1..=3).await;
    let (of_a, of_b) = (a.take(3).await, b.take(3).await);
    let acks: std::collections::BTreeSet<_> = of_a.iter().chain(&of_b).map(|frame| &frame.ack).collect();
    assert_eq!(acks.len(), 6, "unique to a message and a consumer");
    for garbage in ["", " ", "CAAQACAAMAE=", "\u{0}", "ä", "\"quoted\"", "unsubscribe", &"x".repeat(10_000)] {
        a.send(garbage).await;
    }
    a.send_binary(of_a[0].ack.clone().into_bytes()).await;
    a.send_binary(vec![0; 10_000]).await;
    for frame in &of_b {
        a.ack(frame).await;
    }
    let quoted = format!("\"{}\"", of_a[0].ack);
    a.send(&quoted).await;
    for separator in ["\n", ",", ""] {
        a.send(&[&*of_a[0].ack, &of_a[1].ack].join(separator)).await;
    }
    a.ping().await;
    a.close().await;
    let mut a = gateway.reconnect("Sub1", "subA").await;
    assert_eq!(values(&a.take(3).await), [1, 2, 3], "none of that acknowledged anything");
    // An acknowledgement of the connection before is none of this one.
    for frame in &of_a {
        a.ack(frame).await;
    }
    a.close().await;
    let mut a = gateway.reconnect("Sub1", "subA").await;
    let again = a.take(3).await;
    assert_eq!(values(&again), [1, 2, 3]);
    // A newline after it is forgiven.
    a.send(&format!("{}\n", again[0].ack)).await;
    a.send(&format!("{}\r\n", again[1].ack)).await;
    a.close().await;
    let mut a = gateway.reconnect("Sub1", "subA").await;
    assert_eq!(values(&[a.next().await]), [3]);
    drop(b);
    let mut b = gateway.reconnect("Sub1", "subB").await;
    assert_eq!(values(&b.take(3).await), [1, 2, 3], "the other one has lost nothing");
    assert!(gateway.metric("tidegate_acks_ignored_total").await >= 10.0);
}

#[tokio::test]
async fn a_frame_larger_than_the_gateway_reads_ends_that_connection_only() {
    let (gateway, device) = line("").await;
    let mut a = gateway.consumer("Sub1", "subA").await;
    let mut b = gateway.consumer("Sub1", "subB").await;
    // The gateway may have closed before all of it has left.
    if a.try_send(&"x".repeat(1 << 20)).await {
        a.closed().await;
    }
    let mut a = gateway.reconnect("Sub1", "subA").await;
    measure(&gateway, &device, 1..=1).await;
    assert_eq!(values(&[a.next().await, b.next().await]), [1, 1]);
}

// Seed 000, "Consumer lifecycle": the backlog goes when it is unsubscribed, the subscription stays. go-c8y and the Java client
// send `unsubscribe_subscriber` for it, with or without a newline.
#[tokio::test]
async fn a_consumer_unsubscribes_in_band() {
    let (gateway, device) = line("").await;
    for command in ["unsubscribe_subscriber", "unsubscribe_subscriber\n"] {
        let mut consumer = gateway.consumer("Sub1", "subA").await;
        measure(&gateway, &device, 1..=2).await;
        consumer.take(2).await;
        consumer.send(command).await;
        assert_eq!(consumer.closed().await, Some(1000), "{command:?}");
        let token = gateway.token("Sub1", "subA").await;
        eventually("the consumer is gone", async || (gateway.unsubscribe(&token).await.status >= 500).then_some(()))
            .await;
    }
    let list = gateway.get("/notification2/subscriptions").await.expect(200).json();
    assert_eq!(list["subscriptions"].as_array().unwrap().len(), 1);
    let mut anew = gateway.reconnect("Sub1", "subA").await;
    measure(&gateway, &device, 3..=3).await;
    assert_eq!(values(&[anew.next().await]), [3]);
}

// Seed 001, "WebSocket timeouts": what keeps a connection is texts in either direction and the client's pings
// (reubenmiller/go-c8y-cli#243), nothing else.
#[tokio::test]
async fn idle_connections_are_closed_unless_texts_pass_or_the_client_pings() {
    let (gateway, device) = line("[consumer]\nidle_seconds = 1").await;
    let other = gateway.device("other").await;
    gateway.subscribe(&forwarded("Busy", &other)).await;
    let mut idle = gateway.consumer("Sub1", "subA").await;
    let mut pinging = gateway.consumer("Sub1", "subB").await;
    let mut sending = gateway.consumer("Sub1", "subC").await;
    let mut receiving = gateway.consumer("Busy", "subA").await;
    let mut ponging = gateway.consumer("Sub1", "subD").await;
    let life = async {
        for value in 1..=12 {
            tokio::time::sleep(Duration::from_millis(250)).await;
            pinging.ping().await;
            sending.send("garbage").await;
            ponging.try_pong().await;
            gateway.measure(&other, "t", value).await;
        }
    };
    let ((), code) = tokio::join!(life, idle.closed());
    assert_eq!((code, ponging.closed().await), (Some(1001), Some(1001)));
    assert_eq!(values(&receiving.take(12).await), (1..=12).collect::<Vec<_>>());
    measure(&gateway, &device, 1..=1).await;
    assert_eq!(values(&[pinging.receive().await, sending.receive().await]), [1, 1]);
}

/// Sends 24 MB to the topic.
async fn fill(gateway: &Gateway, device: &str) {
    for value in 1..=60 {
        let mut large = crate::harness::measurement(device, "t", value);
        large["c8y_Padding"] = json!("x".repeat(400_000));
        gateway.post_measurement(&large).await.expect(201);
    }
}

// Seed 001, "WebSocket timeouts": pings are how clients keep a connection. One that has not read for a while finds the answer
// behind what was on its way, ahead of what waited.
#[tokio::test]
async fn pings_are_answered_ahead_of_queued_messages() {
    let (gateway, device) = line("").await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    fill(&gateway, &device).await;
    let frames = consumer.frames_until_pong().await;
    assert!(frames < 5, "{frames} of 60 messages came first");
    assert_eq!(consumer.take(60 - frames).await.len() + frames, 60);
}

// A client that is busy for longer than `consumer.dead_seconds` is not dead: its kernel answers, though there is no room.
#[tokio::test]
async fn a_client_that_does_not_read_for_long_is_not_taken_for_dead() {
    let (gateway, device) = line("[consumer]\ndead_seconds = 1").await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    fill(&gateway, &device).await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(values(&consumer.take(60).await), (1..=60).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_client_that_pings_and_does_not_read_costs_no_memory() {
    let (gateway, _) = line("").await;
    let mut flooding = gateway.consumer("Sub1", "subA").await;
    let mut other = gateway.consumer("Sub1", "subB").await;
    other.ping().await;
    let before = gateway.rss_kib();
    // 40 MB of answers.
    for _ in 0..300_000 {
        if !flooding.try_ping(&[b'x'; 125]).await {
            break;
        }
    }
    other.ping().await;
    let grown = gateway.rss_kib().saturating_sub(before);
    assert!(grown < 10_000, "{grown} KiB");
}

/// Stops the gateway and counts the messages on its disk.
async fn kept(gateway: &mut Gateway) -> i64 {
    gateway.stop().await;
    let mut database = gateway.database().await;
    sqlx::query_scalar("SELECT count(*) FROM msg").fetch_one(&mut database).await.unwrap()
}

// Seed 000, "Consumer lifecycle": a message is stored once, until no backlog refers to it, and not at all where there is none
// (Cumulocity-IoT/cumulocity-dynamic-mapper#248).
#[tokio::test]
async fn what_no_consumer_needs_any_more_is_not_kept() {
    let (mut gateway, device) = line("").await;
    measure(&gateway, &device, 1..=5).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    gateway.consumer("Sub1", "subB").await.close().await;
    measure(&gateway, &device, 6..=10).await;
    assert_eq!(kept(&mut gateway).await, 5, "once, though two consumers wait for them");
    gateway.restart_process().await;
    let mut a = gateway.consumer("Sub1", "subA").await;
    for _ in 6..=10 {
        a.receive().await;
    }
    a.close().await;
    assert_eq!(kept(&mut gateway).await, 5, "subB has not seen them");
    gateway.restart_process().await;
    let token = gateway.token("Sub1", "subB").await;
    gateway.unsubscribe(&token).await.expect(200);
    measure(&gateway, &device, 11..=12).await;
    assert_eq!(kept(&mut gateway).await, 2, "only what subA has not seen");
}

// The last consumer of a topic is unsubscribed while its connection ends: neither may wait for the other.
#[tokio::test]
async fn unsubscribing_and_closing_at_once_does_not_block_the_gateway() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let many: Vec<_> = (0..2000).map(|value| measurement(&device, "t", value)).collect();
    for round in 0..20 {
        let token = gateway.token("Sub1", "subA").await;
        let consumer = gateway.consumer_with(&token).await.unwrap();
        let bulk = gateway.post("/measurement/measurements", &json!({"measurements": many}));
        bulk.header("X-Cumulocity-Processing-Mode", "TRANSIENT").await.expect(201);
        let closing = async {
            tokio::time::sleep(Duration::from_micros(200 * round)).await;
            consumer.close().await;
        };
        let (answer, ()) = tokio::join!(gateway.unsubscribe(&token), closing);
        answer.expect(200);
        gateway.get("/health/live").await.expect(200);
    }
}

// RFC 6455, section 4.1: an upgrade is a GET of HTTP/1.1.
#[tokio::test]
async fn what_is_no_upgrade_is_not_upgraded() {
    let gateway = Gateway::start().await;
    let token = gateway.token("Sub1", "subA").await;
    let rest = format!(
        "Host: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        gateway.addr
    );
    let path = format!("/notification2/consumer/?token={token}");
    for request in [
        format!("GET {path} HTTP/1.0\r\n{rest}\r\n"),
        format!("HEAD {path} HTTP/1.1\r\n{rest}\r\n"),
        format!("GET {path} HTTP/1.1\r\n{rest}Content-Length: 5\r\n\r\nhello"),
    ] {
        let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
        socket.write_all(request.as_bytes()).await.unwrap();
        let mut status = [0; 12];
        socket.read_exact(&mut status).await.unwrap();
        assert_eq!(&status[9..], b"400", "{request}");
    }
    gateway.consumer_with(&token).await.unwrap();
}
