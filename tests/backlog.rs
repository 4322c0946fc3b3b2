//! What waits for consumers, and for how long.

use crate::harness::{Consumer, Frame, Gateway, eventually, forwarded, measurement, value_of};

/// A gateway with a device whose measurements go to the topic `Sub1`.
async fn line(config: &str) -> (Gateway, String) {
    let gateway = Gateway::with(config).await;
    let device = device(&gateway).await;
    (gateway, device)
}

async fn device(gateway: &Gateway) -> String {
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    device
}

fn values(frames: &[Frame]) -> Vec<u64> {
    frames.iter().map(|frame| value_of(&frame.json())).collect()
}

/// The messages on disk.
async fn stored(gateway: &Gateway) -> i64 {
    let mut database = gateway.database().await;
    sqlx::query_scalar("SELECT count(*) FROM msg").fetch_one(&mut database).await.unwrap()
}

/// Their bytes.
async fn stored_bytes(gateway: &Gateway) -> i64 {
    let mut database = gateway.database().await;
    sqlx::query_scalar("SELECT coalesce(sum(length(body)), 0) FROM msg").fetch_one(&mut database).await.unwrap()
}

const QUOTA: i64 = 3_000;

/// Sets what happens when the topic `Sub1` is full.
async fn policy(gateway: &mut Gateway, on_full: &str) {
    gateway.stop().await;
    let set = sqlx::query("INSERT INTO topic_setting VALUES ('edge', 'Sub1', 0, ?, NULL, ?, NULL)");
    set.bind(QUOTA).bind(on_full).execute(&mut gateway.database().await).await.unwrap();
    gateway.restart_process().await;
}

/// Two consumers: one that keeps up, and one that is away.
async fn keeping_up_and_away(gateway: &Gateway) -> Consumer {
    gateway.consumer("Sub1", "away").await.close().await;
    gateway.consumer("Sub1", "live").await
}

/// Posts measurements, which the consumer gets and acknowledges, whatever becomes of others.
async fn pass(gateway: &Gateway, device: &str, live: &mut Consumer, numbers: std::ops::RangeInclusive<u64>) {
    for value in numbers {
        gateway.measure(device, "t", value).await;
        assert_eq!(values(&[live.receive().await]), [value]);
    }
}

const SILENCE: std::time::Duration = std::time::Duration::from_millis(300);

// Seed 000, "Message backlog quota": "no new messages can be added to the backlog until some older messages have been delivered".
#[tokio::test]
async fn the_quota_is_kept_to_the_byte_over_restarts_too() {
    let (mut gateway, device) = line(&format!("[backlog]\nquota_bytes = {QUOTA}")).await;
    let (live, away) = (gateway.consumer("Sub1", "live").await, gateway.consumer("Sub1", "away").await);
    live.close().await;
    away.close().await;
    let full = async |gateway: &Gateway, value| {
        gateway.post_measurement(&measurement(&device, "t", value)).await.status == 500
    };
    let mut count = 0;
    while !full(&gateway, 10 + count).await {
        count += 1;
    }
    let (bytes, each) = (stored_bytes(&gateway).await, stored_bytes(&gateway).await / i64::try_from(count).unwrap());
    assert!((QUOTA - each + 1..=QUOTA).contains(&bytes), "{bytes} of {QUOTA}, {each} each");
    gateway.restart().await;
    assert!(full(&gateway, 10).await);
    // A message goes when the last of both has acknowledged it, and leaves room for one.
    let mut live = gateway.consumer("Sub1", "live").await;
    live.receive().await;
    live.close().await;
    assert!(full(&gateway, 10).await);
    let mut away = gateway.consumer("Sub1", "away").await;
    away.receive().await;
    away.close().await;
    assert!(!full(&gateway, 10).await);
    assert!(full(&gateway, 10).await);
    assert!((QUOTA - each + 1..=QUOTA).contains(&stored_bytes(&gateway).await));
}

#[tokio::test]
async fn under_evict_oldest_producers_and_who_keeps_up_never_notice() {
    let (mut gateway, device) = line("").await;
    policy(&mut gateway, "evict-oldest").await;
    let mut live = keeping_up_and_away(&gateway).await;
    pass(&gateway, &device, &mut live, 101..=140).await;
    let (bytes, each) = (stored_bytes(&gateway).await, stored_bytes(&gateway).await / stored(&gateway).await);
    assert!((QUOTA - each + 1..=QUOTA).contains(&bytes), "just enough goes: {bytes} of {QUOTA}, {each} each");
    let left = u64::try_from(stored(&gateway).await).unwrap();
    assert_eq!(gateway.metric("tidegate_messages_dropped_total").await, 40.0 - f64::from(u32::try_from(left).unwrap()));
    gateway.restart().await;
    let mut away = gateway.consumer("Sub1", "away").await;
    let rest = away.take(usize::try_from(left).unwrap()).await;
    assert_eq!(values(&rest), (141 - left..=140).collect::<Vec<_>>(), "the newest are there, in order");
}

#[tokio::test]
async fn under_park_who_is_away_is_left_behind_and_goes_on_from_the_newest() {
    let (mut gateway, device) = line("").await;
    policy(&mut gateway, "park").await;
    let mut live = keeping_up_and_away(&gateway).await;
    pass(&gateway, &device, &mut live, 101..=140).await;
    eventually("nothing waits for who is left behind", async || (stored(&gateway).await == 0).then_some(())).await;
    live.close().await;
    gateway.restart().await;
    let mut live = gateway.consumer("Sub1", "live").await;
    pass(&gateway, &device, &mut live, 141..=143).await;
    let mut away = gateway.consumer("Sub1", "away").await;
    assert!(away.is_silent_for(SILENCE).await);
    pass(&gateway, &device, &mut live, 144..=144).await;
    assert_eq!(values(&[away.receive().await]), [144]);
}

// Seed 000, "Message time-to-live": "Any undelivered messages will be automatically deleted if they have been on the backlog for
// longer than the TTL limit."
#[tokio::test]
async fn a_message_past_its_time_to_live_is_deleted_acknowledged_or_not() {
    let (gateway, device) = line("[backlog]\nttl_seconds = 2").await;
    let (mut here, away) = (gateway.consumer("Sub1", "here").await, gateway.consumer("Sub1", "away").await);
    away.close().await;
    for value in 1..=3 {
        gateway.measure(&device, "t", value).await;
    }
    let frames = here.take(3).await;
    here.ack(&frames[1]).await;
    eventually("they are gone", async || (stored(&gateway).await == 0).then_some(())).await;
    assert_eq!(gateway.metric("tidegate_messages_dropped_total").await, 5.0, "two of one consumer, three of the other");
    let mut away = gateway.consumer("Sub1", "away").await;
    gateway.measure(&device, "t", 4).await;
    assert_eq!(values(&[here.receive().await, away.receive().await]), [4, 4]);
}

// Edge boxes have clocks that are set while they run.
#[cfg(feature = "faults")]
#[tokio::test]
async fn a_clock_that_jumps_takes_nothing_away_and_time_passes_all_the_same() {
    const YEARS: i64 = 10 * 365 * 86_400_000;
    let clock = tempfile::NamedTempFile::new().unwrap();
    let set = |ms: i64| std::fs::write(clock.path(), ms.to_string()).unwrap();
    let mut gateway = Gateway::setup().env("TIDEGATE_FAULT_CLOCK", clock.path().to_str().unwrap()).start().await;
    let device = device(&gateway).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    gateway.measure(&device, "t", 1).await;
    for jump in [YEARS, 0, -YEARS] {
        set(jump);
        // More than one look for old messages.
        tokio::time::sleep(std::time::Duration::from_millis(2_500)).await;
        gateway.restart().await;
        assert_eq!(stored(&gateway).await, 1, "{jump}");
    }
    std::fs::write(gateway.path("config.toml"), "[backlog]\nttl_seconds = 1").unwrap();
    gateway.restart().await;
    eventually("it grows old", async || (stored(&gateway).await == 0).then_some(())).await;
}
