//! Starting, stopping, and what goes wrong on the way.

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use sqlx::sqlite::{SqliteAutoVacuum, SqliteConnectOptions, SqliteConnection, SqliteJournalMode};
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _};

use crate::harness::{Gateway, PASSWORD, Program, forwarded, measurement, value_of};
use crate::storage::check;

/// Runs a command that has to fail, and returns what it says on standard error.
async fn failure(gateway: &Gateway, arguments: &[String], name: &str) -> String {
    let mut program = Program::spawn(arguments, &[], &gateway.path("."), name);
    let status = program.wait().await;
    assert!(!status.success(), "{arguments:?} ended with {status}");
    program.stderr()
}

/// [`failure`] with one clear sentence.
async fn sentence(gateway: &Gateway, arguments: &[String], name: &str) -> String {
    let said = failure(gateway, arguments, name).await;
    assert_eq!(said.trim_end().lines().count(), 1, "one clear sentence, not:\n{said}");
    said
}

/// The value of `name` in a printed `export` line.
fn exported(text: &str, name: &str) -> String {
    let rest = text.split_once(&format!("{name}=")).unwrap_or_else(|| panic!("no {name} in:\n{text}")).1;
    rest.split_whitespace().next().unwrap().to_owned()
}

// "The first start creates the database, tenant edge and user admin, prints the password once, and prints lines that can be
// pasted".
#[tokio::test]
async fn the_first_start_prints_the_password_and_what_to_paste_and_the_second_does_not() {
    let mut gateway = Gateway::setup().without_password().start().await;
    let first = gateway.stdout();
    assert_eq!(exported(&first, "TIDEGATE_URL"), format!("http://{}", gateway.addr));
    assert_eq!(exported(&first, "TIDEGATE_USER"), "edge/admin");
    let password = exported(&first, "TIDEGATE_PASSWORD");
    assert!(password.len() >= 16, "{password}");
    assert!(first.contains(" listen --subscription "), "{first}");
    gateway.get("/metrics").user("edge/admin", &password).await.expect(200);
    gateway.get("/metrics").user("edge/admin", PASSWORD).await.expect(401);
    assert!(!gateway.stderr().contains(&password), "the log shows the password");

    gateway.restart().await;
    let second = gateway.stdout();
    assert!(second.contains(&gateway.addr.to_string()), "{second}");
    assert!(!second.contains("PASSWORD") && !second.contains(&password), "{second}");
    gateway.get("/metrics").user("edge/admin", &password).await.expect(200);
}

#[tokio::test]
async fn a_given_password_is_not_printed_and_later_ones_change_nothing() {
    let mut gateway = Gateway::start().await;
    assert!(!gateway.stdout().contains(PASSWORD));
    gateway.get("/metrics").await.expect(200);
    gateway.stop().await;
    let other = vec![("TIDEGATE_ADMIN_PASSWORD".to_owned(), "another one".to_owned())];
    let _program = Program::spawn(&gateway.serve_arguments(), &other, &gateway.path("."), "other");
    crate::harness::eventually("the gateway answers", async || gateway.get("/health/ready").send().await.ok()).await;
    gateway.get("/metrics").await.expect(200);
}

// The ready file is JSON with the bound addresses, written atomically.
#[tokio::test]
async fn the_ready_file_names_the_bound_address_and_nothing_half_written_lies_beside_it() {
    let gateway = Gateway::start().await;
    let ready: Value = serde_json::from_slice(&fs::read(gateway.path("ready.json")).unwrap()).unwrap();
    assert_eq!(ready, serde_json::json!({"http": gateway.addr.to_string()}));
    assert_ne!(gateway.addr.port(), 0);
    let beside: Vec<_> = fs::read_dir(gateway.path(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(beside.iter().all(|name| !name.to_string_lossy().contains("tmp")), "{beside:?}");
}

// "Clean shutdown on SIGTERM and SIGINT: stop accepting, drain, close consumers (1001), checkpoint, exit 0."
#[tokio::test]
async fn sigterm_and_sigint_close_consumers_with_1001_and_exit_0() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    for signal in ["TERM", "INT"] {
        let mut consumer = gateway.consumer("Sub1", "subA").await;
        gateway.measure(&device, "t", 1).await;
        consumer.receive().await;
        gateway.signal(signal);
        assert_eq!(consumer.closed().await, Some(1001), "SIG{signal}");
        gateway.ended().await;
        let log = fs::metadata(gateway.data().join("tidegate.db-wal")).map_or(0, |log| log.len());
        assert_eq!(log, 0, "the write-ahead log was not checkpointed");
        gateway.restart_process().await;
    }
}

#[tokio::test]
async fn a_data_directory_has_one_gateway_and_a_port_one_listener() {
    let gateway = Gateway::start().await;
    let said = sentence(&gateway, &gateway.serve_arguments(), "second").await;
    assert!(said.contains("in use by another gateway"), "{said}");

    let elsewhere = gateway.path("elsewhere").into_os_string().into_string().unwrap();
    let http = gateway.addr.to_string();
    let arguments = ["serve", "--data", &elsewhere, "--http", &http].map(str::to_owned);
    let said = sentence(&gateway, &arguments, "third").await;
    assert!(said.contains(&http) && said.contains("in use"), "{said}");

    gateway.get("/health/ready").await.expect(200);
}

// Unknown keys are an error that names the nearest known one.
#[tokio::test]
async fn an_unknown_key_names_the_nearest_known_one() {
    let mut gateway = Gateway::start().await;
    gateway.stop().await;
    for (config, key, nearest) in [
        ("[consumer]\nwindwo = 10\n", "consumer.windwo", "consumer.window"),
        ("[limits]\nbody_byte = 10\n", "limits.body_byte", "limits.body_bytes"),
        ("[htpp]\naddr = '127.0.0.1:0'\n", "htpp.addr", "http.addr"),
    ] {
        fs::write(gateway.path("config.toml"), config).unwrap();
        let said = sentence(&gateway, &gateway.serve_arguments(), key).await;
        assert!(said.contains(key) && said.contains(nearest), "{said}");
    }
    fs::write(gateway.path("config.toml"), "[consumer]\nwindow = 'many'\n").unwrap();
    let said = sentence(&gateway, &gateway.serve_arguments(), "value").await;
    assert!(said.contains("consumer.window") && said.contains("a whole number"), "{said}");
    fs::write(gateway.path("config.toml"), "[consumer\n").unwrap();
    let said = failure(&gateway, &gateway.serve_arguments(), "syntax").await;
    assert!(said.contains("not valid TOML"), "{said}");
}

#[tokio::test]
async fn health_is_open_and_metrics_are_not() {
    let gateway = Gateway::start().await;
    gateway.get("/health/live").anonymous().await.expect(200);
    gateway.get("/health/ready").anonymous().await.expect(200);
    gateway.get("/metrics").anonymous().await.error(401, "");
}

// "compiled components kept in a cache keyed by digest and engine so that a second start compiles nothing"
#[tokio::test]
async fn a_second_start_compiles_nothing() {
    let mut gateway = Gateway::start().await;
    assert!(gateway.metric("tidegate_plugin_compilations_total").await >= 2.0);
    gateway.restart().await;
    assert_eq!(gateway.metric("tidegate_plugin_compilations_total").await, 0.0);
    let device = gateway.device("pump").await;
    gateway.subscribe(&crate::harness::typed("Sub1", &device, "'t'")).await;
    assert_eq!(gateway.metric("tidegate_plugin_compilations_total").await, 0.0);
}

// "Compilation happens in a child process of its own with limits."
#[tokio::test]
async fn plugins_are_compiled_by_a_child_that_says_what_is_wrong() {
    let gateway = Gateway::start().await;
    // The child's engine is the gateway's: what it made was taken.
    assert!(gateway.metric("tidegate_plugin_compilations_total").await >= 2.0);
    for (wasm, said) in [(&b"\0asm\x01\0\0\0"[..], "component"), (b"(not wasm", "expected")] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["compile-plugin", "--stack-bytes", "262144", "--seconds", "60", "--bytes", "1073741824"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(wasm).unwrap();
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty() && text.contains(said), "{text}");
    }
}

/// A database with these migrations in place of that of the gateway, which is stopped.
async fn earlier(gateway: &Gateway, migrations: usize) -> SqliteConnection {
    for end in ["", "-wal", "-shm"] {
        let _ = fs::remove_file(gateway.data().join(format!("tidegate.db{end}")));
    }
    let options = SqliteConnectOptions::new().filename(gateway.data().join("tidegate.db")).create_if_missing(true);
    let options = options.auto_vacuum(SqliteAutoVacuum::Incremental).journal_mode(SqliteJournalMode::Wal);
    let mut database = options.connect().await.unwrap();
    let mut first = sqlx::migrate!("../migrations");
    first.migrations.to_mut().truncate(migrations);
    first.run(&mut database).await.unwrap();
    database
}

// Migration 0012 needs room for a moment.
#[tokio::test]
async fn a_full_database_of_an_earlier_release_keeps_its_room_for_deletions() {
    const ROWS: u64 = 300_000;
    const MEASUREMENTS: &str = "/measurement/measurements";
    let mut gateway = Gateway::start().await;
    gateway.stop().await;
    let mut database = earlier(&gateway, 11).await;
    sqlx::raw_sql(AssertSqlSafe(format!(
        r#"INSERT INTO managed_object VALUES (1000, 'edge', 't', 1, 1, CAST('"name":"pump","owner":"admin"' AS BLOB));
           WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS})
           INSERT INTO measurement SELECT 100000 + i, 'edge', 1000, 't', unixepoch() * 1000 + i, CAST('"type":"t"' AS BLOB) FROM n;
           UPDATE meta SET v = 1000000 WHERE k = 'object_id'; UPDATE meta SET v = 3 WHERE k = 'message_id';"#
    )))
    .execute(&mut database)
    .await
    .unwrap();
    database.close().await.unwrap();
    let data = gateway.data().into_os_string().into_string().unwrap();
    let (sound, found, said) = check(&gateway, &["--data", &data]).await;
    assert!(sound, "{found}{said}");
    let file = gateway.data().join("tidegate.db");
    let max_bytes = fs::metadata(&file).unwrap().len() + 40 * 4096;
    gateway.set_env("TIDEGATE_STORE__MAX_BYTES", &max_bytes.to_string());
    gateway.restart_process().await;
    for count in [1000, 100, 10, 1] {
        let all = json!({"measurements": vec![measurement("1000", "t", 1); count]});
        while gateway.post(MEASUREMENTS, &all).await.status == 201 {}
    }
    for id in 100_001..=100_300 {
        gateway.delete(&format!("{MEASUREMENTS}/{id}")).await.expect(204);
    }
    gateway.stop().await;
    let length = fs::metadata(&file).unwrap().len();
    assert!(length <= max_bytes + (4 << 20), "{length}, {max_bytes}");
}

// Migrations only go forward: what the first release has written is there, and what waited is delivered.
#[tokio::test]
async fn a_database_of_the_first_release_opens() {
    let mut gateway = Gateway::start().await;
    gateway.stop().await;
    let mut database = earlier(&gateway, 1).await;
    sqlx::raw_sql(
        r#"INSERT INTO managed_object VALUES (1000, 'edge', 't', 1, 1, CAST('"name":"pump","owner":"admin"' AS BLOB));
           INSERT INTO measurement VALUES (1002, 'edge', 1000, 't', 1, CAST('"type":"t","time":"1970-01-01T00:00:00.001Z"' AS BLOB));
           INSERT INTO subscription VALUES (1001, 'edge', 1000, '{"id":1001,"context":"mo","source":1000,"subscription":"Sub1"}');
           INSERT INTO topic VALUES (1, 'edge', 'Sub1');
           INSERT INTO consumer VALUES (1, 1, 'subA', 0);
           INSERT INTO cursor VALUES (1, 2, '[]');
           INSERT INTO msg VALUES (1, 1, unixepoch() * 1000, CAST('/edge/measurements/1000' || x'0a' || 'CREATE' || x'0a0a' || '{"n":1}' AS BLOB)),
             (2, 1, unixepoch() * 1000, CAST('/edge/measurements/1000' || x'0a' || 'CREATE' || x'0a0a' || '{"n":2}' AS BLOB));
           UPDATE meta SET v = 66536 WHERE k = 'object_id'; UPDATE meta SET v = 3 WHERE k = 'message_id';"#,
    )
    .execute(&mut database)
    .await
    .unwrap();
    database.close().await.unwrap();
    gateway.restart_process().await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    assert_eq!(consumer.receive().await.json()["n"], 2);
    assert_eq!(gateway.get("/inventory/managedObjects/1000").await.expect(200).json()["name"], "pump");
    let measurements = gateway.get("/measurement/measurements?source=1000").await.expect(200).json();
    assert_eq!(measurements["measurements"][0]["id"], "1002");
    let subscription = gateway.get("/notification2/subscriptions/1001").await.expect(200).json();
    assert_eq!(subscription["nonPersistent"], false);
    gateway.measure("1000", "t", 3).await;
    assert_eq!(value_of(&consumer.receive().await.json()), 3);
}
