//! The files on the disk: how they stay in bounds, and what happens when there is no room for them or they cannot be used.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteLockingMode};
use sqlx::{ConnectOptions as _, Connection as _};
use tokio::task::JoinSet;

use crate::harness::{Gateway, Program, eventually, forwarded, measurement, value_of};

const MIB: u64 = 1 << 20;
/// A measurement that takes two pages, and as much again as a message.
const LARGE: usize = 8000;

fn large(device: &str, value: u64) -> Value {
    let mut large = measurement(device, "t", value);
    large["c8y_Ballast"] = json!("x".repeat(LARGE));
    large
}

fn length(gateway: &Gateway, file: &str) -> u64 {
    fs::metadata(gateway.data().join(file)).map_or(0, |file| file.len())
}

/// Sends measurements one by one until the gateway refuses one; those that it took.
async fn fill(gateway: &Gateway, device: &str, from: u64) -> Vec<u64> {
    let mut accepted = Vec::new();
    for value in from..from + 10_000 {
        let answer = gateway.post_measurement(&large(device, value)).await;
        match answer.status {
            201 => accepted.push(value),
            _ => {
                answer.error(507, "the store is full");
                return accepted;
            }
        }
    }
    panic!("the store was never full");
}

/// Values of the stored measurements.
async fn stored(gateway: &Gateway) -> Vec<u64> {
    let list = gateway.get("/measurement/measurements?pageSize=2000").await.expect(200).json();
    let mut values: Vec<_> = list["measurements"].as_array().unwrap().iter().map(value_of).collect();
    values.sort_unstable();
    values
}

// `store.max_bytes`: producers get 507 and nothing is half done; consuming, acknowledging, deleting and unsubscribing go on,
// and make room without a restart.
#[tokio::test]
async fn a_full_store_refuses_producers_and_lets_everybody_make_room() {
    let mut gateway = Gateway::with("[store]\nmax_bytes = 1048576").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let mut reader = gateway.consumer("Sub1", "reader").await;
    gateway.consumer("Sub1", "lazy").await.close().await;

    let mut accepted = fill(&gateway, &device, 0).await;
    assert!(accepted.len() > 10, "{accepted:?}");
    assert_eq!(stored(&gateway).await, accepted, "what was refused is not stored");
    for expected in &accepted {
        assert_eq!(value_of(&reader.receive().await.json()), *expected);
    }
    assert!(reader.is_silent_for(Duration::from_millis(300)).await, "what was refused is not delivered");
    gateway.kill9();
    gateway.restart_process().await;
    let mut reader = gateway.reconnect("Sub1", "reader").await;
    assert!(reader.is_silent_for(Duration::from_millis(300)).await, "a full store takes acknowledgements");

    // A deletion makes room for as much as it deletes.
    let list = gateway.get("/measurement/measurements?pageSize=4").await.expect(200).json();
    for one in list["measurements"].as_array().unwrap() {
        let id = one["id"].as_str().unwrap();
        gateway.delete(&format!("/measurement/measurements/{id}")).await.expect(204);
        accepted.retain(|value| *value != value_of(one));
    }
    accepted.extend(fill(&gateway, &device, 1000).await);
    assert!(accepted.last().unwrap() >= &1000, "there was room again");

    // So does a consumer that goes, or comes and acknowledges.
    gateway.unsubscribe(&gateway.token("Sub1", "lazy").await).await.expect(200);
    let more = fill(&gateway, &device, 2000).await;
    assert!(more.len() > 10, "{more:?}");
    accepted.extend(more);
    assert_eq!(stored(&gateway).await, accepted);
    let log = gateway.stderr();
    assert_eq!(log.matches("refused until this is over").count(), 3, "each time once:\n{log}");
}

// A cursor with many holes needs pages of its own, for which a full store has kept room.
#[tokio::test]
async fn a_full_store_takes_acknowledgements_in_any_order() {
    let mut gateway = Gateway::with("[store]\nmax_bytes = 1048576\n[consumer]\nwindow = 10000").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let mut reader = gateway.consumer("Sub1", "reader").await;
    let producer = gateway.producer();
    let mut sent = 0;
    while producer.post(&measurement(&device, "t", sent), "TRANSIENT").await.unwrap() == 201 {
        sent += 1;
    }
    let frames = reader.take(usize::try_from(sent).unwrap()).await;
    let (settled, waiting): (Vec<_>, Vec<_>) = frames.into_iter().partition(|frame| value_of(&frame.json()) % 2 == 1);
    for frame in &settled {
        reader.ack(frame).await;
    }
    reader.ping().await;
    tokio::time::sleep(Duration::from_millis(250)).await;
    gateway.kill9();
    gateway.restart_process().await;
    let mut reader = gateway.reconnect("Sub1", "reader").await;
    for frame in waiting {
        assert_eq!(value_of(&reader.next().await.json()), value_of(&frame.json()));
    }
}

// The room of what was deleted is used again, and given back to the disk when it is much: here by an idle gateway.
#[tokio::test]
async fn the_file_shrinks_after_a_backlog_is_gone() {
    let mut drained = Drained::new().await;
    drained.shrinks_to(6 * MIB).await;
    // And is sound.
    drained.gateway.stop().await;
    let mut database = drained.gateway.database().await;
    let found: String = sqlx::query_scalar("PRAGMA integrity_check").fetch_one(&mut database).await.unwrap();
    assert_eq!(found, "ok");
}

// "also on a box that is never quite idle"
#[tokio::test]
async fn the_file_shrinks_under_load() {
    let drained = Drained::new().await;
    let done = AtomicBool::new(false);
    tokio::join!(
        async {
            let producer = drained.gateway.producer();
            while !done.load(Ordering::Relaxed) {
                let one = measurement(&drained.device, "t", 0);
                assert_eq!(producer.post(&one, "TRANSIENT").await.unwrap(), 201);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        },
        async {
            drained.shrinks_to(8 * MIB).await;
            done.store(true, Ordering::Relaxed);
        }
    );
}

/// A gateway whose file is longer than it has to be.
struct Drained {
    gateway: Gateway,
    device: String,
}

impl Drained {
    async fn new() -> Self {
        const MESSAGES: u64 = 2000;
        let gateway = Gateway::start().await;
        let device = gateway.device("pump").await;
        gateway.subscribe(&forwarded("Sub1", &device)).await;
        let consumer = gateway.consumer("Sub1", "subA").await;
        send_large(&gateway, &device, MESSAGES, "TRANSIENT").await;
        let mut consumer = consumer;
        for _ in 0..MESSAGES {
            consumer.receive().await;
        }
        consumer.close().await;
        assert!(
            length(&gateway, "tidegate.db") + length(&gateway, "tidegate.db-wal") > 12 * MIB,
            "there is no backlog"
        );
        Self { gateway, device }
    }

    async fn shrinks_to(&self, most: u64) {
        eventually("the file is short", async || (length(&self.gateway, "tidegate.db") < most).then_some(())).await;
    }
}

async fn send_large(gateway: &Gateway, device: &str, count: u64, mode: &'static str) {
    let mut senders = JoinSet::new();
    for sender in 0..8 {
        let (producer, device) = (gateway.producer(), device.to_owned());
        senders.spawn(async move {
            for value in (sender..count).step_by(8) {
                assert_eq!(producer.post(&large(&device, value), mode).await.unwrap(), 201);
            }
        });
    }
    senders.join_all().await;
}

/// Lists that have to look at every measurement, of which there are many.
const SLOW_LIST: &str = "/measurement/measurements?valueFragmentType=c8y_None&pageSize=1";

/// A gateway with so many measurements that reading them all takes seconds.
pub(crate) async fn with_many_rows(config: &str) -> (Gateway, String) {
    let mut gateway = Gateway::with(config).await;
    let device = gateway.device("pump").await;
    gateway.stop().await;
    let mut database = gateway.database().await;
    sqlx::query(
        "INSERT INTO measurement(id, tenant, source, type, time, body)
         WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 150000),
         body(b) AS (SELECT CAST(group_concat('\"c8y_Part' || i || '\":{\"a\":1}') AS BLOB) FROM n WHERE i <= 40)
         SELECT 1000000000 + i, 'edge', ?, 't', 1772366400000 + i, b FROM n, body",
    )
    .bind(&device)
    .execute(&mut database)
    .await
    .unwrap();
    sqlx::raw_sql("UPDATE meta SET v = 2000000000 WHERE k = 'object_id'").execute(&mut database).await.unwrap();
    database.close().await.unwrap();
    gateway.restart_process().await;
    (gateway, device)
}

// `store.wal_bytes`: "The WAL is bounded under any reader".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_list_does_not_let_the_write_ahead_log_grow() {
    let (gateway, device) = with_many_rows("[store]\nwal_bytes = 8388608\nread_seconds = 60").await;
    let done = AtomicBool::new(false);
    let (given_up, longest, ()) = tokio::join!(
        async {
            let mut given_up = 0;
            while !done.load(Ordering::Relaxed) {
                let answer = gateway.get(SLOW_LIST).await;
                if answer.status == 503 {
                    answer.error(503, "took too long to read");
                    given_up += 1;
                } else {
                    answer.expect(200);
                }
            }
            given_up
        },
        async {
            let mut longest = 0;
            while !done.load(Ordering::Relaxed) {
                longest = longest.max(length(&gateway, "tidegate.db-wal"));
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            longest
        },
        async {
            send_large(&gateway, &device, 3000, "PERSISTENT").await;
            done.store(true, Ordering::Relaxed);
        },
    );
    assert!(given_up > 0, "no list was in the way");
    assert!(longest > 8 * MIB, "the log was never too long: {longest}");
    // One commit more than the limit.
    assert!(longest < 14 * MIB, "the log had {longest} bytes");
}

// `store.read_seconds`
#[tokio::test]
async fn a_list_that_reads_too_long_is_503() {
    let (gateway, device) = with_many_rows("[store]\nread_seconds = 1").await;
    let answer = gateway.get(SLOW_LIST).await;
    assert_eq!(answer.header("retry-after"), Some("1"));
    answer.error(503, "took too long to read");
    gateway.get(&format!("/measurement/measurements?source={device}&pageSize=1")).await.expect(200);
}

// --- another program's lock ---

/// Another program that is about to write to the database.
async fn lock(gateway: &Gateway) -> SqliteConnection {
    let mut other = gateway.database().await;
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
    other
}

#[tokio::test]
async fn a_lock_of_another_program_refuses_producers_until_it_is_gone() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let other = lock(&gateway).await;
    for _ in 0..2 {
        let answer = gateway.post_measurement(&measurement(&device, "t", 1)).await;
        assert_eq!(answer.header("retry-after"), Some("1"));
        answer.error(503, "another program has locked the database; close it");
    }
    let reason = gateway.get("/health/ready").anonymous().await.expect(503).text();
    assert_eq!(reason, "another program has locked the database; close it\n");
    other.close().await.unwrap();
    // Without a request that would show it.
    let ready = async || (gateway.get("/health/ready").anonymous().await.status == 200).then_some(());
    eventually("the gateway is ready", ready).await;
    gateway.measure(&device, "t", 2).await;
    assert_eq!(stored(&gateway).await, [2]);
    let log = gateway.stderr();
    assert_eq!(log.matches("ERROR").count(), 1, "once:\n{log}");
}

#[tokio::test]
async fn a_stop_does_not_wait_for_a_lock_with_each_command() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let mut tokens = Vec::new();
    for number in 0..12 {
        let subscriber = format!("sub{number}");
        gateway.consumer("Sub1", &subscriber).await.close().await;
        tokens.push(gateway.token("Sub1", &subscriber).await);
    }
    let other = lock(&gateway).await;
    let begun = Instant::now();
    let (answers, ()) = tokio::join!(join_all(tokens.iter().map(|token| gateway.unsubscribe(token))), async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        gateway.signal("TERM");
    });
    gateway.ended().await;
    assert!(begun.elapsed() < Duration::from_secs(30), "it took {:?}", begun.elapsed());
    for answer in answers {
        answer.error(503, "another program has locked the database");
    }
    other.close().await.unwrap();
}

// --- databases that are refused ---

/// A data directory that `serve` has left, and what it holds.
struct Refused {
    gateway: Gateway,
}

impl Refused {
    async fn new() -> Self {
        let mut gateway = Gateway::start().await;
        gateway.device("pump").await;
        gateway.stop().await;
        Self { gateway }
    }

    fn file(&self) -> PathBuf {
        self.gateway.data().join("tidegate.db")
    }

    /// [`Refused::said`], and nothing has changed.
    async fn expect(&self, text: &str) {
        let before = fs::read(self.file()).unwrap();
        self.said(text).await;
        assert!(fs::read(self.file()).unwrap() == before, "{text}: the database has changed");
    }

    /// Starts it: one sentence with `text` and exit code 1.
    async fn said(&self, text: &str) {
        let mut program = Program::spawn(&self.gateway.serve_arguments(), &[], &self.gateway.path("."), "refused");
        let status = program.wait().await;
        let said = program.stderr();
        assert_eq!(status.code(), Some(1), "{said}");
        assert_eq!(said.trim_end().lines().count(), 1, "one sentence, not:\n{said}");
        assert!(said.contains(text), "{text:?} is not in {said:?}");
        fs::remove_file(self.gateway.path("refused.err")).unwrap();
    }

    /// Starts it: it works.
    async fn expect_none(&mut self) {
        self.gateway.restart_process().await;
        self.gateway.get("/inventory/managedObjects").await.expect(200);
        self.gateway.stop().await;
    }
}

#[tokio::test]
async fn a_database_that_another_program_has_locked_is_refused() {
    let mut refused = Refused::new().await;
    let options = SqliteConnectOptions::new().filename(refused.file());
    let mut other = options.locking_mode(SqliteLockingMode::Exclusive).connect().await.unwrap();
    sqlx::raw_sql("BEGIN EXCLUSIVE; COMMIT").execute(&mut other).await.unwrap();
    // Reading the file here would give up the lock: it is this process's.
    refused.said("another program has locked the database; close it").await;
    other.close().await.unwrap();
    refused.expect_none().await;
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused() {
    let mut refused = Refused::new().await;
    let sql = async |sql: &'static str| {
        let mut database = refused.gateway.database().await;
        sqlx::raw_sql(sql).execute(&mut database).await.unwrap();
        database.close().await.unwrap();
    };
    sql("INSERT INTO _sqlx_migrations SELECT 9999, 'x', installed_on, success, checksum, 0 FROM _sqlx_migrations LIMIT 1").await;
    refused.expect("written by a newer version of Tidegate; start that version, or restore a backup").await;
    sql("DELETE FROM _sqlx_migrations WHERE version = 9999").await;
    refused.expect_none().await;
}

#[tokio::test]
async fn a_file_that_is_no_database_of_ours_is_refused() {
    let refused = Refused::new().await;
    fs::write(refused.file(), "This is no database. ".repeat(500)).unwrap();
    refused.expect("the database is damaged (file is not a database)").await;
    fs::remove_file(refused.file()).unwrap();
    let options = SqliteConnectOptions::new().filename(refused.file()).create_if_missing(true);
    let mut other = options.connect().await.unwrap();
    sqlx::raw_sql("CREATE TABLE browsing_history(url TEXT)").execute(&mut other).await.unwrap();
    other.close().await.unwrap();
    refused.expect("tidegate.db is not a database of Tidegate; move it away").await;
}

// It would be taken for a first start, and everything would be gone without a word.
#[tokio::test]
async fn a_database_that_is_lost_is_refused() {
    const LOST: &str = "tidegate.db is empty or gone, but the keys beside it are there; restore a backup, or move";
    let mut refused = Refused::new().await;
    let sound = fs::read(refused.file()).unwrap();
    fs::write(refused.file(), "").unwrap();
    refused.expect(LOST).await;
    fs::remove_file(refused.file()).unwrap();
    refused.said(LOST).await;
    assert!(!refused.file().exists(), "it has made something");
    fs::write(refused.file(), sound).unwrap();
    refused.expect_none().await;
}

#[tokio::test]
async fn a_damaged_database_is_refused() {
    const PAGE: usize = 4096;
    let mut refused = Refused::new().await;
    let sound = fs::read(refused.file()).unwrap();
    fs::write(refused.file(), &sound[..sound.len() / 2 / PAGE * PAGE]).unwrap();
    refused.expect("the database is damaged (database disk image is malformed); `tidegate check` says more").await;
    // Pages of tables and indexes alike.
    for page in 2..sound.len() / PAGE {
        let mut damaged = sound.clone();
        damaged[page * PAGE..(page + 1) * PAGE].fill(0xa5);
        fs::write(refused.file(), &damaged).unwrap();
        refused.expect("`tidegate check` says more; restore a backup").await;
    }
    fs::write(refused.file(), &sound).unwrap();
    refused.expect_none().await;
}

#[tokio::test]
async fn a_damaged_key_is_refused_before_anything_is_written() {
    let mut refused = Refused::new().await;
    let key = refused.gateway.data().join("keys/consumer.key");
    let sound = fs::read(&key).unwrap();
    fs::write(&key, &sound[1..]).unwrap();
    refused.expect("consumer.key is damaged: it does not hold exactly 32 bytes; restore it, or delete it").await;
    fs::write(&key, &sound).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    refused.expect("is open to other users (mode 644); run: chmod 600").await;
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    refused.expect_none().await;
}

#[tokio::test]
async fn a_data_directory_that_cannot_be_made_is_refused() {
    let refused = Refused::new().await;
    let below_a_file = refused.file().join("data");
    let arguments = ["serve", "--http", "127.0.0.1:0", "--data", below_a_file.to_str().unwrap()];
    let (succeeded, _, said) = refused.gateway.command(&arguments, &[], "nowhere").await;
    assert!(!succeeded && said.trim_end().lines().count() == 1, "{said}");
    assert!(said.contains("could not be created") && said.contains(below_a_file.to_str().unwrap()), "{said}");
}

// --- tidegate check ---

/// Runs `tidegate check`; whether all is well, what it printed, and what it said of it.
pub(crate) async fn check(gateway: &Gateway, arguments: &[&str]) -> (bool, String, String) {
    // What all runs of this name have said is in it.
    let _ = fs::remove_file(gateway.path("check.err"));
    gateway.command(&[&["check"], arguments].concat(), &[], "check").await
}

#[tokio::test]
async fn check_tells_a_sound_database_from_a_damaged_one() {
    const PAGE: usize = 4096;
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    gateway.measure(&device, "t", 1).await;
    let data = gateway.data().into_os_string().into_string().unwrap();
    let (sound, _, said) = check(&gateway, &["--data", &data]).await;
    assert!(!sound && said.contains("the gateway is running: stop it, or make a backup with --url"), "{said}");
    gateway.stop().await;
    let (sound, printed, said) = check(&gateway, &["--data", &data]).await;
    assert!(sound && printed.ends_with("is sound\n") && said.is_empty(), "{printed}{said}");

    let copy = gateway.path("copy.db");
    let name = copy.to_str().unwrap();
    let mut content = fs::read(gateway.data().join("tidegate.db")).unwrap();
    fs::write(&copy, &content).unwrap();
    let (sound, printed, _) = check(&gateway, &[name]).await;
    assert!(sound && printed.ends_with("copy.db is sound\n"), "{printed}");
    assert!(!gateway.path("copy.db-wal").exists() && !gateway.path("copy.db-shm").exists(), "it left files behind");
    let last = content.len() - PAGE;
    content[last..].fill(0xa5);
    fs::write(&copy, &content).unwrap();
    let (sound, printed, said) = check(&gateway, &[name]).await;
    assert!(
        !sound && !printed.is_empty() && said.contains("copy.db is not sound; restore a backup"),
        "{printed}{said}"
    );
    assert!(fs::read(&copy).unwrap() == content, "the check has changed something");
    let (sound, _, said) = check(&gateway, &[&data]).await;
    assert!(!sound && said.contains(&format!("is a directory: --data {data} checks")), "{said}");
    let (sound, _, said) = check(&gateway, &["nowhere.db"]).await;
    assert!(!sound && said.contains("there is no file nowhere.db"), "{said}");
}

#[tokio::test]
async fn check_finds_what_does_not_fit_together() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    for topic in ["Sub1", "Sub2", "Sub3", "Sub4"] {
        gateway.subscribe(&forwarded(topic, &device)).await;
        gateway.consumer(topic, &format!("of{topic}")).await.close().await;
    }
    let external = json!({"externalId": "p1", "type": "serial"});
    gateway.post(&format!("/identity/globalIds/{device}/externalIds"), &external).await.expect(201);
    gateway.measure(&device, "t", 1).await;
    gateway.measure(&device, "t", 2).await;
    gateway.stop().await;
    let mut database = gateway.database().await;
    sqlx::raw_sql(
        "DELETE FROM topic WHERE name = 'Sub1';
         DELETE FROM cursor WHERE consumer = (SELECT id FROM consumer WHERE name = 'ofSub2');
         DELETE FROM consumer WHERE name = 'ofSub3';
         UPDATE cursor SET hi = 9, holes = '[3,2]' WHERE consumer = (SELECT id FROM consumer WHERE name = 'ofSub4');
         UPDATE meta SET v = 1 WHERE k = 'object_id'; DELETE FROM meta WHERE k = 'message_id';
         UPDATE subscription SET body = '{' WHERE id = (SELECT min(id) FROM subscription);
         UPDATE external_id SET object = 7;
         DELETE FROM measurement_recent WHERE id = (SELECT min(id) FROM measurement);
         INSERT INTO measurement_by_source SELECT source, time, id FROM measurement_recent;
         INSERT INTO measurement_by_source VALUES (7, 7, 7);
         WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 30)
         INSERT INTO cursor(consumer, hi, holes) SELECT 1000 + i, 1, '[]' FROM n",
    )
    .execute(&mut database)
    .await
    .unwrap();
    database.close().await.unwrap();
    let data = gateway.data().into_os_string().into_string().unwrap();
    let (sound, printed, said) = check(&gateway, &["--data", &data]).await;
    assert!(!sound && said.contains("is not sound; restore a backup"), "{said}");
    for found in [
        "a consumer without its topic: ofSub1 (row ",
        "a consumer without its cursor: ofSub2 (row ",
        "a cursor without its consumer: row 1001\n",
        "a cursor without its consumer: and 11 more\n",
        "a cursor whose unacknowledged messages are not ascending ids below its end: row ",
        "a counter that is missing: message_id",
        "an object whose id would be given again: managed object ",
        "a subscription that cannot be read: subscription ",
        "an external id of an object that does not exist: serial p1",
        "a place of a measurement that does not exist: measurement 7",
    ] {
        assert!(printed.contains(found), "{found:?} is not in:\n{printed}");
    }
    let misplaced = "a measurement that has no place, or two, among those of its source: measurement ";
    assert_eq!(printed.matches(misplaced).count(), 2, "{printed}");
}
