//! `tidegate backup`: a copy of what is stored, made beside the traffic, and a gateway that goes on from it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::task::JoinSet;

use crate::harness::{Consumer, Gateway, PASSWORD, Producer, USER, eventually, forwarded, measurement, value_of};
use crate::storage::{check, with_many_rows};

const BACKUP: &str = "/tidegate/v1/backup";

/// Runs `tidegate backup` against the running gateway as this user; whether there is one, and what was said.
async fn backup_as(gateway: &Gateway, user: &str, file: &Path) -> (bool, String) {
    let _ = fs::remove_file(gateway.path("backup.err"));
    let url = format!("http://{}", gateway.addr);
    let env = [("TIDEGATE_URL", url.as_str()), ("TIDEGATE_USER", user), ("TIDEGATE_PASSWORD", PASSWORD)];
    let (done, told, said) = gateway.command(&["backup", file.to_str().unwrap()], &env, "backup").await;
    let bytes = || fs::metadata(file).unwrap().len();
    assert!(!done || told.ends_with(&format!("backup.db has everything up to now, in {} bytes\n", bytes())), "{told}");
    (done, said)
}

async fn backup(gateway: &Gateway, file: &Path) {
    let (done, said) = backup_as(gateway, USER, file).await;
    assert!(done && said.is_empty(), "{said}");
    let (sound, found, _) = check(gateway, &[file.to_str().unwrap()]).await;
    assert!(sound, "{found}");
}

/// Starts the gateway on a new data directory that holds the backup alone.
async fn restore(gateway: &mut Gateway, file: &Path) {
    gateway.kill9();
    fs::remove_dir_all(gateway.data()).unwrap();
    fs::create_dir(gateway.data()).unwrap();
    fs::copy(file, gateway.data().join("tidegate.db")).unwrap();
    gateway.restart_process().await;
}

/// Posts values of its own until it is told to stop; those that were accepted.
async fn produce(producer: Producer, device: String, from: u64, mode: &'static str, stop: Arc<AtomicBool>) -> Vec<u64> {
    let mut accepted = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let value = from + accepted.len() as u64;
        assert_eq!(producer.post(&measurement(&device, "t", value), mode).await.unwrap(), 201);
        accepted.push(value);
    }
    accepted
}

/// Acknowledges everything until the connection ends; the values, and the newest id.
async fn consume(mut consumer: Consumer) -> (BTreeSet<u64>, u64) {
    let (mut values, mut newest) = (BTreeSet::new(), 0);
    while let Some(frame) = consumer.try_next().await {
        if !consumer.try_ack(&frame).await {
            break;
        }
        values.insert(value_of(&frame.json()));
        newest = newest.max(frame.message_id());
    }
    (values, newest)
}

/// What waits for a consumer, up to the value `last`.
async fn waiting(gateway: &Gateway, name: &str, last: u64) -> BTreeSet<u64> {
    let mut consumer = gateway.consumer("Sub1", name).await;
    let mut values = BTreeSet::new();
    while !values.contains(&last) {
        values.insert(value_of(&consumer.receive().await.json()));
    }
    // A connection that is dropped may take its last acknowledgements with it.
    consumer.close().await;
    values
}

// "makes a consistent copy while running": what was answered before it began is in it, unless its consumer has acknowledged it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_under_load_has_all_that_was_answered_before() {
    const LAST: u64 = 1 << 40;
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    gateway.consumer("Sub1", "late").await.close().await;
    let reader = tokio::spawn(consume(gateway.consumer("Sub1", "reader").await));
    let load = |from: u64| {
        let stop = Arc::new(AtomicBool::new(false));
        let mut producers = JoinSet::new();
        for (number, mode) in (0..).zip(["TRANSIENT", "PERSISTENT", "TRANSIENT", "PERSISTENT"]) {
            let (producer, device) = (gateway.producer(), device.clone());
            producers.spawn(produce(producer, device, from + number * 1_000_000, mode, stop.clone()));
        }
        (producers, stop)
    };
    let (before, stop) = load(0);
    tokio::time::sleep(Duration::from_millis(700)).await;
    stop.store(true, Ordering::Relaxed);
    let before: BTreeSet<u64> = before.join_all().await.into_iter().flatten().collect();
    // No pause of the load around the backup.
    let (during, stop) = load(100_000_000);
    let file = gateway.path("backup.db");
    backup(&gateway, &file).await;
    stop.store(true, Ordering::Relaxed);
    let during: BTreeSet<u64> = during.join_all().await.into_iter().flatten().collect();
    assert!(before.len() > 100 && during.len() > 10, "{} and {}", before.len(), during.len());
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(!gateway.data().join("backup.tmp").exists());

    restore(&mut gateway, &file).await;
    let (acknowledged, newest) = reader.await.unwrap();
    gateway.measure(&device, "t", LAST).await;
    let late = waiting(&gateway, "late", LAST).await;
    assert!(before.is_subset(&late), "lost: {:?}", before.difference(&late).take(20).collect::<Vec<_>>());
    let again = waiting(&gateway, "reader", LAST).await;
    let there: BTreeSet<u64> = acknowledged.union(&again).copied().collect();
    assert!(before.is_subset(&there), "lost: {:?}", before.difference(&there).take(20).collect::<Vec<_>>());
    let sent = |value: &u64| before.contains(value) || during.contains(value) || *value == LAST;
    assert!(late.iter().chain(&again).all(sent));
    // No id that was given since the backup is given again.
    let mut reader = gateway.reconnect("Sub1", "reader").await;
    let made = gateway.measure(&device, "t", 1).await;
    assert!(reader.receive().await.message_id() > newest + 1_000_000_000);
    assert!(made["id"].as_str().unwrap().parse::<u64>().unwrap() > 1_000_000_000);
}

#[tokio::test]
async fn a_backup_that_cannot_be_made_says_why_and_leaves_nothing() {
    let mut gateway = Gateway::start().await;
    let file = gateway.path("backup.db");
    fs::write(&file, "precious").unwrap();
    let (done, said) = backup_as(&gateway, USER, &file).await;
    assert!(!done && said.contains("backup.db exists already, and is left as it is"), "{said}");
    assert_eq!(fs::read(&file).unwrap(), b"precious");
    fs::remove_file(&file).unwrap();

    gateway.call("POST", BACKUP).anonymous().await.expect(401);
    gateway.add_user("edge", "reader", "ROLE_MEASUREMENT_READ,ROLE_INVENTORY_ADMIN").await;
    gateway.call("POST", BACKUP).user("edge/reader", PASSWORD).await.error(403, "Access is denied.");
    let (done, said) = backup_as(&gateway, "edge/reader", &file).await;
    assert!(!done && said.contains("403 Forbidden: Access is denied."), "{said}");
    let (done, said) = backup_as(&gateway, USER, &gateway.path("nowhere/backup.db")).await;
    assert!(!done && said.contains("nowhere/backup.db cannot be written: No such file"), "{said}");

    // One at a time; what a crash has left of one goes with the next start.
    fs::create_dir(gateway.data().join("backup.tmp")).unwrap();
    fs::write(gateway.data().join("backup.tmp/copy"), "half").unwrap();
    let answer = gateway.call("POST", BACKUP).await;
    assert_eq!(answer.header("retry-after"), Some("1"));
    answer.error(503, "another backup is being made");
    gateway.stop().await;
    fs::write(gateway.path("config.toml"), "[store]\nreserve_bytes = 1099511627776").unwrap();
    gateway.restart_process().await;
    assert!(!gateway.data().join("backup.tmp").exists());

    gateway.call("POST", BACKUP).await.error(507, " bytes of room beside the database, ");
    let (done, said) = backup_as(&gateway, USER, &file).await;
    assert!(!done && said.contains("507 Insufficient Storage: a backup needs 10995"), "{said}");
    let left = fs::read_dir(gateway.path(".")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let left: Vec<_> = left.filter(|name| name.starts_with(".tmp") || name == "backup.db").collect();
    assert!(left.is_empty(), "{left:?}");
}

// "it must not stall ingest nor let the WAL grow without bound"
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_gives_way_to_the_write_ahead_log() {
    let (gateway, device) = with_many_rows("[store]\nwal_bytes = 8388608").await;
    let mut large = measurement(&device, "t", 0);
    large["c8y_Ballast"] = json!("x".repeat(200_000));
    let done = Arc::new(AtomicBool::new(false));
    let mut producers = JoinSet::new();
    for _ in 0..4 {
        let (producer, large, done) = (gateway.producer(), large.clone(), done.clone());
        producers.spawn(async move {
            while !done.load(Ordering::Relaxed) {
                assert_eq!(producer.post(&large, "PERSISTENT").await.unwrap(), 201);
            }
        });
    }
    let wal = gateway.data().join("tidegate.db-wal");
    let (_, longest) = tokio::join!(
        async {
            eventually("a backup is in the way", async || {
                let answer = gateway.call("POST", BACKUP).await;
                let overtaken = answer.status != 200;
                overtaken.then(|| answer.error(503, "too much was written while the backup was made (store.wal_bytes)"))
            })
            .await;
            done.store(true, Ordering::Relaxed);
        },
        async {
            let mut longest = 0;
            while !done.load(Ordering::Relaxed) {
                longest = longest.max(fs::metadata(&wal).unwrap().len());
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            longest
        },
    );
    producers.join_all().await;
    assert!(longest < 14 << 20, "the log had {longest} bytes");
    let file = gateway.path("backup.db");
    backup(&gateway, &file).await;
    assert!(fs::metadata(&file).unwrap().len() > 64 << 20);
}

#[tokio::test]
async fn a_backup_of_a_gateway_that_is_stopped_has_what_a_kill_has_left() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    gateway.consumer("Sub1", "late").await.close().await;
    for value in 0..20 {
        gateway.measure(&device, "t", value).await;
    }
    let (data, file) = (gateway.data().into_os_string().into_string().unwrap(), gateway.path("backup.db"));
    let arguments = ["backup", "--data", data.as_str(), file.to_str().unwrap()];
    let (done, _, said) = gateway.command(&arguments, &[], "running").await;
    assert!(!done && said.contains("the gateway is running"), "{said}");
    gateway.kill9();
    let (done, _, said) = gateway.command(&arguments, &[], "stopped").await;
    assert!(done && said.is_empty(), "{said}");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    restore(&mut gateway, &file).await;
    assert!(waiting(&gateway, "late", 19).await.into_iter().eq(0..20));
}
