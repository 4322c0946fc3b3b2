//! Consumers that are stuck, slow or gone: they harm nobody else, give back what they hold, and cost little.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::harness::{BASIC, Consumer, Gateway, eventually, forwarded, in_time, measurement, upgraded, value_of};

/// A gateway with a device whose measurements go to the topic `Sub1`.
async fn line(config: &str) -> (Gateway, String) {
    let gateway = Gateway::with(&format!("[backlog]\nquota_bytes = 1073741824\n{config}")).await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    (gateway, device)
}

fn padded(device: &str, value: u64, bytes: usize) -> Value {
    let mut padded = measurement(device, "t", value);
    padded["c8y_Padding"] = json!("x".repeat(bytes));
    padded
}

/// Posts measurements of so many bytes.
async fn fill(gateway: &Gateway, device: &str, values: std::ops::RangeInclusive<u64>, bytes: usize) {
    for value in values {
        gateway.post_measurement(&padded(device, value, bytes)).await.expect(201);
    }
}

/// A client that reads nothing.
async fn stuck(gateway: &Gateway, token: &str) -> TcpStream {
    let (status, socket) = upgraded(gateway.addr, &format!("/notification2/consumer/?token={token}")).await;
    assert_eq!(status, "HTTP/1.1 101 Switching Protocols");
    socket
}

/// Clients that read a byte a second, until this is dropped.
#[derive(Default)]
struct Trickle(JoinSet<()>);

impl Trickle {
    async fn connect(&mut self, gateway: &Gateway, token: &str) {
        let mut socket = stuck(gateway, token).await;
        self.0.spawn(async move {
            while socket.read_u8().await.is_ok() {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        });
    }
}

/// The time that `MESSAGES` take from four producers to a consumer that acknowledges each.
async fn pace(gateway: &Gateway, device: &str, consumer: &mut Consumer) -> Duration {
    const MESSAGES: u64 = 200;
    let started = Instant::now();
    let mut producers = JoinSet::new();
    for _ in 0..4 {
        let (producer, measurement) = (gateway.producer(), padded(device, 1, 4_000));
        producers.spawn(async move {
            for _ in 0..MESSAGES / 4 {
                assert_eq!(producer.post(&measurement, "TRANSIENT").await.unwrap(), 201);
            }
        });
    }
    for _ in 0..MESSAGES {
        consumer.receive().await;
    }
    in_time("the producers", producers.join_all()).await;
    started.elapsed()
}

/// The best of a few rounds: others share the machine.
async fn best_pace(gateway: &Gateway, device: &str, consumer: &mut Consumer) -> Duration {
    let mut best = Duration::MAX;
    for _ in 0..4 {
        best = best.min(pace(gateway, device, consumer).await);
    }
    best
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn producers_and_other_consumers_keep_their_pace() {
    let (gateway, device) = line("").await;
    let mut fast = gateway.consumer("Sub1", "fast").await;
    let alone = best_pace(&gateway, &device, &mut fast).await;
    let (mut sockets, mut trickle) = (Vec::new(), Trickle::default());
    #[cfg(target_os = "linux")]
    let mut vanished = Vec::new();
    for number in 0..12 {
        let token = async |kind: &str| gateway.token("Sub1", &format!("{kind}{number}")).await;
        sockets.push(stuck(&gateway, &token("stuck").await).await);
        trickle.connect(&gateway, &token("slow").await).await;
        #[cfg(target_os = "linux")]
        vanished.push(crate::harness::Mortal::connect(&gateway, &token("gone").await).await);
    }
    #[cfg(target_os = "linux")]
    vanished.iter().for_each(crate::harness::Mortal::vanish);
    let all = async {
        for _ in 0..40 {
            fast.receive().await;
        }
    };
    // More than the buffers on the way hold.
    tokio::join!(fill(&gateway, &device, 1..=40, 200_000), all);
    let beside = best_pace(&gateway, &device, &mut fast).await;
    assert!(beside < alone * 4, "{alone:?} alone, {beside:?} beside those who do not read");
    assert!(gateway.metric("tidegate_consumer_lag_messages").await >= 24.0 * 200.0, "they had something to read");
}

// Seed 001, "WebSocket timeouts": no text passes to a client that does not read, so it is idle. A goodbye that it does not take holds
// up nothing.
#[tokio::test]
async fn the_place_of_a_client_that_does_not_read_is_free_after_the_idle_time() {
    let (gateway, device) = line("[consumer]\nidle_seconds = 2").await;
    let token = async |subscriber: &str| gateway.token("Sub1", subscriber).await;
    let _socket = stuck(&gateway, &token("stuck").await).await;
    let mut trickle = Trickle::default();
    trickle.connect(&gateway, &token("slow").await).await;
    fill(&gateway, &device, 1..=40, 200_000).await;
    for subscriber in ["stuck", "slow"] {
        let mut back = gateway.reconnect("Sub1", subscriber).await;
        for value in 1..=40 {
            assert_eq!(value_of(&back.receive().await.json()), value, "{subscriber}");
        }
    }
}

/// Measurements of many devices, which two clients share. Returns how many there are.
async fn shared(gateway: &Gateway, bytes: usize) -> usize {
    const DEVICES: usize = 40;
    for number in 0..DEVICES {
        let device = gateway.device(&format!("pump {number}")).await;
        gateway.subscribe(&forwarded("Shared", &device)).await;
        gateway.post_measurement(&padded(&device, 1, bytes)).await.expect(201);
    }
    DEVICES
}

/// Receives until it has had the messages of so many devices. Pings meanwhile, so as not to be idle.
async fn receive_all(consumer: &mut Consumer, devices: usize) {
    let mut seen = BTreeSet::new();
    let receiving = async {
        while seen.len() < devices {
            match timeout(Duration::from_millis(500), consumer.receive()).await {
                Ok(frame) => drop(seen.insert(frame.description)),
                Err(_) => assert!(consumer.try_ping(b"?").await),
            }
        }
    };
    in_time("the messages of all devices", receiving).await;
}

#[tokio::test]
async fn the_share_of_a_client_that_does_not_read_passes_to_the_others() {
    let (gateway, _) = line("[consumer]\nidle_seconds = 4").await;
    let token = gateway.shared_token("Shared", "crew").await;
    let _socket = stuck(&gateway, &format!("{token}&consumer=a")).await;
    let mut other = gateway.member(&token, "b").await.unwrap();
    let devices = shared(&gateway, 400_000).await;
    receive_all(&mut other, devices).await;
}

// `consumer.dead_seconds`.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_share_of_a_client_that_has_vanished_passes_to_the_others() {
    let (gateway, _) = line("[consumer]\ndead_seconds = 2").await;
    let token = gateway.shared_token("Shared", "crew").await;
    let gone = crate::harness::Mortal::connect(&gateway, &format!("{token}&consumer=a")).await;
    let mut other = gateway.member(&token, "b").await.unwrap();
    gone.vanish();
    let devices = shared(&gateway, 100).await;
    receive_all(&mut other, devices).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_costs_little_memory() {
    const CLIENTS: u64 = 40;
    let (gateway, device) = line("").await;
    let connect = async |number: u64| {
        let token = gateway.token("Sub1", &format!("stuck{number}")).await;
        stuck(&gateway, &token).await
    };
    let mut sockets = Vec::new();
    for number in 0..=CLIENTS {
        sockets.push(connect(number).await);
    }
    // Known before there is anything, and away but for one, which has made the gateway's own buffers grow.
    drop(sockets.split_off(1));
    let away = async || (gateway.metric("tidegate_consumer_clients").await == 1.0).then_some(());
    eventually("the others are away", away).await;
    fill(&gateway, &device, 1..=400, 100_000).await;
    let before = gateway.rss_kib();
    for number in 1..=CLIENTS {
        sockets.push(connect(number).await);
    }
    let full = async || {
        // A page for each, and what fits on the way.
        (gateway.metric("tidegate_messages_delivered_total").await >= 2.0 * CLIENTS as f64).then_some(())
    };
    eventually("each has been given something", full).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let each = gateway.rss_kib().saturating_sub(before) / CLIENTS;
    // 40 MB wait for each of them.
    assert!(each < 1_000, "{each} KiB for each");
}

/// Room for the answers of [`asking`] beside a small limit: two fit.
const ROOM: &str = "[limits]\nunsent_bytes = 10485760\n";
/// A list of 4 MB.
const LARGE: &str = "/measurement/measurements?pageSize=40";

/// A gateway whose list [`LARGE`] is full.
async fn large_list(config: &str) -> Gateway {
    let (gateway, device) = line(config).await;
    fill(&gateway, &device, 1..=40, 100_000).await;
    gateway
}

/// A client that has asked for the large list and lets the kernel take little of it.
async fn asking(gateway: &Gateway) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let mut socket = socket.connect(gateway.addr).await.unwrap();
    let request = format!("GET {LARGE} HTTP/1.1\r\nHost: x\r\n{BASIC}Connection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    socket
}

// `limits.unsent_bytes`: those who do not read take no more than that, nothing from those who ask for little, and give it back.
#[tokio::test]
async fn answers_that_are_not_read_have_bounded_room() {
    let gateway = large_list(ROOM).await;
    gateway.get(LARGE).await.expect(200);
    let before = gateway.rss_kib();
    let mut sockets = Vec::new();
    for _ in 0..60 {
        sockets.push(asking(&gateway).await);
    }
    let lost = async || gateway.metric("tidegate_answers_lost_total").await;
    eventually("the answers past the limit", async || (lost().await >= 20.0).then_some(())).await;
    let grown = gateway.rss_kib().saturating_sub(before);
    assert!(grown < 80_000, "{grown} KiB");
    let unsent = gateway.metric("tidegate_unsent_bytes").await;
    assert!((4e6..=10_485_760.0).contains(&unsent), "{unsent} B");
    gateway.get(LARGE).await.error(503, "Too many large answers");
    gateway.get("/measurement/measurements?pageSize=1&type=none").await.expect(200);
    let device = gateway.device("pump").await;
    let many: Vec<_> = (1..=40).map(|value| padded(&device, value, 100_000)).collect();
    let done = gateway.post("/measurement/measurements", &json!({"measurements": many})).await.expect(201);
    assert!(done.text().is_empty(), "it is done, but there is no room to say more");
    drop(sockets);
    eventually("room for the next", async || (gateway.get(LARGE).await.status == 200).then_some(())).await;
    eventually("nothing unsent", async || (gateway.metric("tidegate_unsent_bytes").await == 0.0).then_some(())).await;
}

// `limits.answer_bytes_per_second`: over `limits.request_seconds`, and only while the client is waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_trickles_is_cut_off_and_one_that_reads_on_is_not() {
    const CONFIG: &str =
        "[limits]\nrequest_seconds = 1\nanswer_bytes_per_second = 65536\n[consumer]\ndead_seconds = 1\n";
    let gateway = large_list(CONFIG).await;
    let read = async |pause: Duration, bytes: usize| {
        let (mut socket, mut piece, mut taken) = (asking(&gateway).await, vec![0; bytes], 0);
        while let Ok(read @ 1..) = socket.read(&mut piece).await {
            taken += read;
            tokio::time::sleep(pause).await;
        }
        taken
    };
    let both = async { tokio::join!(read(Duration::from_millis(100), 512), read(Duration::from_millis(20), 32 << 10)) };
    let (trickled, steady) = in_time("both answers", both).await;
    assert!(trickled < 1_000_000, "{trickled} B");
    assert!(steady > 4_000_000, "{steady} B");
    assert_eq!(gateway.metric("tidegate_answers_lost_total").await, 1.0);
}
