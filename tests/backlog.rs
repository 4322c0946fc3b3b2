//! What waits for consumers, and for how long.

use crate::harness::{Frame, Gateway, eventually, forwarded, value_of};

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
