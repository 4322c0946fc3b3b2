//! What waits for consumers, and for how long.

use serde_json::json;

use crate::harness::{Consumer, Frame, Gateway, Setup, eventually, forwarded, measurement, value_of};

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

/// Sets what happens when the topic `Sub1` is full, while it is in use or before.
async fn policy(gateway: &Gateway, on_full: &str) {
    let settings = json!({"quotaBytes": QUOTA, "onFull": on_full});
    gateway.put("/tidegate/v1/topics/persistent/Sub1", &settings).await.expect(200);
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
    policy(&gateway, "evict-oldest").await;
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
    policy(&gateway, "park").await;
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

/// A gateway whose topic evicts and tells what was missed, as a subscription asks for.
async fn telling() -> (Gateway, String) {
    telling_with(Gateway::setup()).await
}

async fn telling_with(setup: Setup) -> (Gateway, String) {
    let gateway = setup.start().await;
    let device = gateway.device("pump").await;
    let mut subscription = forwarded("Sub1", &device);
    subscription["tidegate"] = json!({"gapMessages": true});
    let made = gateway.subscribe(&subscription).await;
    assert_eq!(made["tidegate"], json!({"gapMessages": true}));
    policy(&gateway, "evict-oldest").await;
    (gateway, device)
}

#[tokio::test]
async fn a_consumer_that_missed_something_is_told_first_until_it_acknowledges_that() {
    let (mut gateway, device) = telling().await;
    let mut live = keeping_up_and_away(&gateway).await;
    pass(&gateway, &device, &mut live, 101..=140).await;
    let left = u64::try_from(stored(&gateway).await).unwrap();
    let missed = 40 - left;
    for _ in 0..2 {
        gateway.restart().await;
        let mut away = gateway.consumer("Sub1", "away").await;
        let frames = away.take(usize::try_from(left).unwrap() + 1).await;
        let (gap, rest) = frames.split_first().unwrap();
        assert_eq!((gap.description.as_str(), gap.action.as_str()), ("/edge/gap/away", "CREATE"));
        assert_eq!((&gap.json()["missed"], &gap.json()["reason"]), (&json!(missed), &json!("evicted")));
        let time = |name: &str| gap.json()[name].as_str().unwrap().to_owned();
        assert!(time("from") <= time("to") && time("to").ends_with('Z'), "{gap:?}");
        assert_eq!(values(rest), (101 + missed..=140).collect::<Vec<_>>());
        assert!(frames.is_sorted_by_key(Frame::message_id));
        away.close().await;
    }
    let mut away = gateway.reconnect("Sub1", "away").await;
    away.receive().await;
    away.close().await;
    let mut away = gateway.reconnect("Sub1", "away").await;
    assert_eq!(values(&[away.next().await]), [101 + missed], "acknowledged like any other");
    // One that keeps up has missed nothing.
    let mut live = gateway.consumer("Sub1", "live").await;
    pass(&gateway, &device, &mut live, 141..=141).await;
}

// A gap takes the id of the newest message that is lost: where that was in flight, its place in the window is free again.
#[tokio::test]
async fn messages_in_flight_that_are_evicted_take_no_place_in_the_window() {
    let setup = Gateway::setup().config("[consumer]\nwindow = 10");
    let (gateway, device) = telling_with(setup).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    for round in 1..=4 {
        let first = round * 1000;
        for value in first..first + 5 {
            gateway.measure(&device, "t", value).await;
        }
        let in_flight = consumer.take(5).await;
        for value in first + 5..first + 60 {
            gateway.measure(&device, "t", value).await;
        }
        for frame in &in_flight {
            consumer.ack(frame).await;
        }
        // The newest one comes last, after the gaps.
        loop {
            let frame = consumer.receive().await;
            if frame.description != "/edge/gap/subA" && value_of(&frame.json()) == first + 59 {
                break;
            }
        }
    }
}

#[tokio::test]
async fn one_of_those_who_share_is_told() {
    let (gateway, device) = telling().await;
    let token = gateway.shared_token("Sub1", "crew").await;
    gateway.member(&token, "a").await.unwrap().close().await;
    for value in 101..=140 {
        gateway.measure(&device, "t", value).await;
    }
    let left = usize::try_from(stored(&gateway).await).unwrap();
    let (mut a, mut b) = (gateway.member(&token, "a").await.unwrap(), gateway.member(&token, "b").await.unwrap());
    let mut gaps = 0;
    let mut seen = 0;
    while seen < left + 1 {
        let frame = tokio::select! {
            frame = a.try_next() => frame.unwrap(),
            frame = b.try_next() => frame.unwrap(),
        };
        seen += 1;
        gaps += usize::from(frame.description == "/edge/gap/crew");
        for member in [&mut a, &mut b] {
            member.ack(&frame).await;
        }
    }
    assert_eq!(gaps, 1);
    assert!(a.is_silent_for(SILENCE).await && b.is_silent_for(SILENCE).await);
}

// Only the platform's own messages reach clients that expect nothing else.
#[tokio::test]
async fn what_is_not_known_of_the_extension_is_refused() {
    let (gateway, device) = line("").await;
    for (extension, said) in [
        (json!({"gapMessage": true}), "tidegate.gapMessage: is not a known member"),
        (json!({"gapMessages": "yes"}), "tidegate.gapMessages: must be true or false"),
        (json!(true), "tidegate: must be a JSON object"),
    ] {
        let mut subscription = forwarded("Sub2", &device);
        subscription["tidegate"] = extension;
        gateway.post("/notification2/subscriptions", &subscription).await.error(422, said);
    }
    assert!(gateway.subscribe(&forwarded("Sub2", &device)).await.get("tidegate").is_none());
}
