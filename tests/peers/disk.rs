//! Disks that are full, read-only or failing, and when what was written reaches them: with tmpfs, and with strace as the disk
//! that fails. Both need root, or sudo without a password.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{Consumer, Gateway, Program, eventually, filter_with, forwarded, measurement, value_of};

fn as_root(program: &str) -> Command {
    if fs::metadata("/proc/self").unwrap().uid() == 0 {
        return Command::new(program);
    }
    let mut command = Command::new("sudo");
    command.args(["-n", program]);
    command
}

fn run(mut command: Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}

/// A small disk of its own over the data directory of a gateway that is stopped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn over(gateway: &Gateway, options: &str) -> Self {
        let mut mount = as_root("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("mode=0777,{options}"), "tmpfs"]).arg(gateway.data());
        run(mount);
        Self(gateway.data())
    }

    fn remount(&self, options: &str) {
        let mut mount = as_root("mount");
        mount.args(["-o", &format!("remount,{options}")]).arg(&self.0);
        run(mount);
    }

    /// A file that leaves no byte free.
    fn fill(&self) -> PathBuf {
        self.fill_but(0)
    }

    /// A file that leaves so many bytes free.
    fn fill_but(&self, bytes: u64) -> PathBuf {
        let path = self.0.join("others");
        let mut file = File::create(&path).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
        let length = file.metadata().unwrap().len();
        file.set_len(length - bytes).unwrap();
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let mut umount = as_root("umount");
        umount.arg("--lazy").arg(&self.0);
        let _ = umount.status();
    }
}

fn large(device: &str, value: u64) -> Value {
    let mut large = measurement(device, "t", value);
    large["c8y_Ballast"] = json!("x".repeat(8000));
    large
}

/// Sends measurements one by one until one is refused with `status` and `text`.
async fn send_until(gateway: &Gateway, device: &str, from: u64, status: u16, text: &str) -> Vec<u64> {
    let mut accepted = Vec::new();
    for value in from..from + 10_000 {
        let answer = gateway.post_measurement(&large(device, value)).await;
        if answer.status != 201 {
            answer.error(status, text);
            return accepted;
        }
        accepted.push(value);
    }
    panic!("nothing was refused");
}

async fn accepted_again(gateway: &Gateway, device: &str, value: u64) {
    eventually("data is taken again", async || {
        (gateway.post_measurement(&measurement(device, "t", value)).await.status == 201).then_some(())
    })
    .await;
}

async fn receive_all(consumer: &mut Consumer, values: &[u64]) {
    for value in values {
        assert_eq!(value_of(&consumer.receive().await.json()), *value);
    }
}

/// What a consumer has acknowledged does not come again, also after a kill.
async fn nothing_comes_again(gateway: &mut Gateway, consumers: &[&str]) {
    // Acknowledgements that failed are tried again each second.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    gateway.kill9();
    gateway.restart_process().await;
    for name in consumers {
        let mut consumer = gateway.reconnect("Sub1", name).await;
        assert!(consumer.is_silent_for(Duration::from_millis(300)).await, "{name}: acknowledged, and came again");
    }
}

/// A gateway with a device, whose measurements go to `Sub1`, on a disk of its own.
async fn on_small_disk(config: &str, options: &str) -> (Gateway, SmallDisk, String) {
    let mut gateway = Gateway::with(config).await;
    gateway.stop().await;
    let disk = SmallDisk::over(&gateway, options);
    gateway.restart_process().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    (gateway, disk, device)
}

// `store.reserve_bytes`: "a disk that is full turns into a clear error to producers and recovers by itself when there is room
// again"; what makes room works even when others have taken the last byte.
#[tokio::test]
async fn a_disk_that_fills_up_refuses_producers_until_there_is_room() {
    let (mut gateway, disk, device) = on_small_disk("[store]\nreserve_bytes = 4194304", "size=24m").await;
    let mut reader = gateway.consumer("Sub1", "reader").await;
    gateway.consumer("Sub1", "late").await.close().await;
    let mut accepted = send_until(&gateway, &device, 0, 507, "the store is full").await;
    assert!(accepted.len() > 100, "{}", accepted.len());
    receive_all(&mut reader, &accepted).await;

    let others = disk.fill();
    let mut late = gateway.reconnect("Sub1", "late").await;
    receive_all(&mut late, &accepted).await;
    let list = gateway.get("/measurement/measurements?pageSize=50").await.expect(200).json();
    for one in list["measurements"].as_array().unwrap() {
        let path = format!("/measurement/measurements/{}", one["id"].as_str().unwrap());
        gateway.delete(&path).header("X-Cumulocity-Processing-Mode", "QUIESCENT").await.expect(204);
    }
    // All of the messages and some of the measurements are gone: their room is there again, on the same full disk.
    accepted_again(&gateway, &device, 1_000).await;
    accepted = vec![1_000];
    accepted.extend(send_until(&gateway, &device, 1_001, 507, "the store is full").await);
    fs::remove_file(others).unwrap();
    accepted_again(&gateway, &device, 2_000).await;
    accepted.push(2_000);
    receive_all(&mut reader, &accepted).await;
    receive_all(&mut late, &accepted).await;
    nothing_comes_again(&mut gateway, &["reader", "late"]).await;
}

// Without a reserve it is SQLite that meets the end of the disk.
#[tokio::test]
async fn a_disk_that_is_full_to_the_last_byte_refuses_producers_until_there_is_room() {
    let (mut gateway, disk, device) = on_small_disk("[store]\nreserve_bytes = 0", "size=16m").await;
    let mut reader = gateway.consumer("Sub1", "reader").await;
    let mut accepted = send_until(&gateway, &device, 0, 507, "the store is full").await;
    receive_all(&mut reader, &accepted).await;
    disk.remount("size=32m");
    accepted_again(&gateway, &device, 1_000).await;
    accepted = vec![1_000];
    receive_all(&mut reader, &accepted).await;
    nothing_comes_again(&mut gateway, &["reader"]).await;
}

// "requests that would store something are answered with 507 and store nothing", "as soon as they have made room, requests are
// taken again": an upload that is too large for what was freed is refused all the same, and hurts no producer.
#[tokio::test]
async fn a_plugin_that_finds_the_disk_full_leaves_nothing_behind_and_is_taken_when_there_is_room() {
    const PLUGIN: &str = "/tidegate/v1/plugins/mine";
    let (gateway, disk, device) = on_small_disk("[store]\nreserve_bytes = 4194304", "size=32m").await;
    let wasm = filter_with(&"x".repeat(3 << 20));
    let upload = || gateway.call("POST", "/tidegate/v1/plugins?name=mine").body("application/wasm", wasm.clone());
    let (mut reader, compiled) = (gateway.consumer("Sub1", "reader").await, gateway.compiled());
    for value in 0..200 {
        gateway.post_measurement(&large(&device, value)).await.expect(201);
    }
    // With room for the compiled code at first, and then without.
    let others = disk.fill_but(2 << 20);
    let (uploaded, measured) = tokio::join!(upload(), gateway.post_measurement(&measurement(&device, "t", 200)));
    uploaded.error(507, "the store is full");
    measured.error(507, "the store is full");
    receive_all(&mut reader, &(0..200).collect::<Vec<_>>()).await;
    accepted_again(&gateway, &device, 200).await;
    for (room, value) in [(2 << 20, 201), (0, 211)] {
        fs::remove_file(&others).unwrap();
        disk.fill_but(room);
        let measure = async {
            for value in value..value + 10 {
                gateway.measure(&device, "t", value).await;
            }
        };
        let (uploaded, ()) = tokio::join!(upload(), measure);
        uploaded.error(507, "the store is full");
        gateway.get(PLUGIN).await.error(404, "no plugin 'mine'");
        assert_eq!(gateway.compiled(), compiled, "{room}");
    }
    receive_all(&mut reader, &(200..221).collect::<Vec<_>>()).await;

    fs::remove_file(others).unwrap();
    assert_eq!(upload().await.expect(201).json()["version"], 1);
    assert_eq!(gateway.compiled().len(), compiled.len() + 1);
    let mut filtered = forwarded("Sub2", &device);
    filtered["tidegate"] = json!({"filters": [{"plugin": "mine", "settings": 1}]});
    gateway.subscribe(&filtered).await;
    let mut consumer = gateway.consumer("Sub2", "reader").await;
    for (kind, value) in [("t", 300), ("1", 301)] {
        gateway.measure(&device, kind, value).await;
    }
    receive_all(&mut consumer, &[301]).await;
}

#[tokio::test]
async fn a_data_directory_on_a_read_only_disk_is_refused() {
    let (mut gateway, disk, _) = on_small_disk("", "size=64m").await;
    gateway.stop().await;
    disk.remount("ro");
    let (succeeded, _, said) = gateway
        .command(&gateway.serve_arguments().iter().map(String::as_str).collect::<Vec<_>>(), &[], "read-only")
        .await;
    assert!(!succeeded && said.trim_end().lines().count() == 1, "{said}");
    assert!(said.contains("cannot be written") && said.contains("Read-only file system"), "{said}");
}

/// strace on a running gateway, until it is dropped.
struct Trace {
    program: Program,
}

impl Trace {
    async fn of(gateway: &Gateway, arguments: &[&str]) -> Self {
        let mut strace = as_root("strace");
        strace.args(["-f", "-p", &gateway.id().to_string()]).args(arguments);
        let program = Program::spawn_command(strace, &[], &gateway.path("."), "strace");
        let trace = Self { program };
        eventually("strace is there", async || trace.text().contains("attached").then_some(())).await;
        trace
    }

    /// Writes to `file` and its like fail with `error`.
    async fn failing(gateway: &Gateway, calls: &str, error: &str) -> Self {
        let file = |name: &str| gateway.data().join(name).into_os_string().into_string().unwrap();
        let inject = format!("inject={calls}:error={error}");
        let trace = format!("trace={calls}");
        Self::of(gateway, &["-P", &file("tidegate.db"), "-P", &file("tidegate.db-wal"), "-e", &trace, "-e", &inject])
            .await
    }

    fn text(&self) -> String {
        self.program.stderr()
    }

    /// Lets the gateway go on alone.
    async fn end(mut self) -> String {
        self.program.signal("INT");
        self.program.wait().await;
        self.text()
    }
}

// "a disk that is read-only turns into a clear error to producers and recovers by itself"; what waits is delivered meanwhile.
#[tokio::test]
async fn a_disk_that_takes_no_writes_refuses_producers_until_it_does() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    gateway.consumer("Sub1", "reader").await.close().await;
    for value in 0..20 {
        gateway.measure(&device, "t", value).await;
    }
    let read_only = Trace::failing(&gateway, "write,pwrite64", "EROFS").await;
    let answer = gateway.post_measurement(&measurement(&device, "t", 100)).await;
    assert_eq!(answer.header("retry-after"), Some("1"));
    answer.error(503, "the disk takes no writes; it may be mounted read-only");
    let mut reader = gateway.reconnect("Sub1", "reader").await;
    receive_all(&mut reader, &(0..20).collect::<Vec<_>>()).await;
    // The acknowledgements are read, and then they have met the disk.
    reader.ping().await;
    gateway.post_measurement(&measurement(&device, "t", 100)).await.error(503, "takes no writes");
    read_only.end().await;
    accepted_again(&gateway, &device, 200).await;
    receive_all(&mut reader, &[200]).await;
    nothing_comes_again(&mut gateway, &["reader"]).await;
}

// What is committed takes its room twice, in the log and in the database: a commit for which there is room only once would be the last one.
#[tokio::test]
async fn a_commit_that_could_not_be_moved_into_the_database_is_refused() {
    let (mut gateway, _disk, device) = on_small_disk("", "size=24500k").await;
    let topics: Vec<String> = (0..14).map(|number| format!("Fan{number}")).collect();
    for topic in &topics {
        gateway.subscribe(&forwarded(topic, &device)).await;
        gateway.consumer(topic, "one").await.close().await;
    }
    let mut reader = gateway.consumer("Sub1", "reader").await;
    let mut huge = measurement(&device, "t", 0);
    huge["c8y_Ballast"] = json!("x".repeat(900_000));
    gateway.post_measurement(&huge).await.error(507, "the store is full");
    gateway.measure(&device, "t", 1).await;
    let accepted = send_until(&gateway, &device, 2, 507, "the store is full").await;
    receive_all(&mut reader, &[1]).await;
    receive_all(&mut reader, &accepted).await;
    for topic in &topics {
        let mut consumer = gateway.reconnect(topic, "one").await;
        receive_all(&mut consumer, &[1]).await;
        receive_all(&mut consumer, &accepted).await;
    }
    accepted_again(&gateway, &device, 10_000).await;
    gateway.stop().await;
    gateway.restart_process().await;
    receive_all(&mut gateway.reconnect("Sub1", "reader").await, &[10_000]).await;
}

// Whoever reads the database from outside keeps the log from being moved; what it owes the database counts all the while.
#[tokio::test]
async fn a_disk_that_fills_up_while_somebody_reads_recovers_when_that_ends() {
    let (mut gateway, _disk, device) = on_small_disk("[store]\nreserve_bytes = 4194304", "size=32m").await;
    let mut reader = gateway.consumer("Sub1", "reader").await;
    let database = gateway.data().join("tidegate.db");
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&database).read_only(true);
    let mut outside = sqlx::ConnectOptions::connect(&options).await.unwrap();
    sqlx::raw_sql("BEGIN; SELECT count(*) FROM msg").execute(&mut outside).await.unwrap();
    let accepted = send_until(&gateway, &device, 0, 507, "the store is full").await;
    assert!(accepted.len() > 100, "{}", accepted.len());
    sqlx::Connection::close(outside).await.unwrap();
    receive_all(&mut reader, &accepted).await;
    accepted_again(&gateway, &device, 10_000).await;
    receive_all(&mut reader, &[10_000]).await;
    nothing_comes_again(&mut gateway, &["reader"]).await;
    gateway.stop().await;
}

// Commits that wait for their flush meet a disk that has become read-only: as with "commit", that is no end.
#[tokio::test]
async fn a_flush_that_meets_a_read_only_disk_refuses_producers_and_is_tried_again() {
    let mut gateway = Gateway::with("[store]\ndurability = 'second'").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let wal = gateway.data().join("tidegate.db-wal");
    eventually("the log is warm", async || (fs::metadata(&wal).unwrap().len() > 4 << 20).then_some(())).await;
    let mut reader = gateway.consumer("Sub1", "reader").await;
    let read_only = Trace::failing(&gateway, "fsync,fdatasync", "EROFS").await;
    gateway.measure(&device, "t", 1).await;
    let ready = async || gateway.get("/health/ready").anonymous().await;
    let refusing = async || (ready().await.status == 503).then_some(());
    eventually("the gateway is not ready", refusing).await;
    receive_all(&mut reader, &[1]).await;
    read_only.end().await;
    accepted_again(&gateway, &device, 2).await;
    receive_all(&mut reader, &[2]).await;
    ready().await.expect(200);
    nothing_comes_again(&mut gateway, &["reader"]).await;
}

// "fsync failures must never be ignored": whoever writes on after one does not know what is on the disk.
#[tokio::test]
async fn a_flush_that_fails_ends_the_process_and_loses_nothing_that_was_answered() {
    for durability in ["commit", "second"] {
        let mut gateway = Gateway::with(&format!("[store]\ndurability = '{durability}'")).await;
        let device = gateway.device("pump").await;
        gateway.subscribe(&forwarded("Sub1", &device)).await;
        gateway.consumer("Sub1", "reader").await.close().await;
        let failing = Trace::failing(&gateway, "fsync,fdatasync", "EIO").await;
        let mut accepted = Vec::new();
        for value in 0..1_000 {
            match gateway.post_measurement(&measurement(&device, "t", value)).send().await {
                Ok(answer) if answer.status == 201 => accepted.push(value),
                _ => break,
            }
        }
        assert!(accepted.len() < 1_000 && (durability == "second" || accepted.is_empty()), "{accepted:?}");
        let (code, said) = gateway.ended_badly().await;
        assert_eq!(code, Some(1), "{said}");
        assert!(
            said.contains("tidegate: the disk failed (") && said.contains("check the disk, then start again"),
            "{said}"
        );
        drop(failing);
        gateway.restart_process().await;
        let mut reader = gateway.reconnect("Sub1", "reader").await;
        receive_all(&mut reader, &accepted).await;
    }
}

/// What strace saw of one thread's call, in the order in which they ended; a write counts from its beginning.
struct Seen {
    seconds: f64,
    what: What,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    WalWritten,
    WalFlushed,
    Answered,
}

fn seen(log: &str) -> Vec<Seen> {
    let mut flushing: Vec<&str> = Vec::new();
    let mut all = Vec::new();
    for line in log.lines() {
        // "[pid 123] 1700000000.123456 fdatasync(14</…/tidegate.db-wal>) = 0"
        let (thread, rest) = match line.strip_prefix("[pid ").and_then(|rest| rest.split_once("] ")) {
            Some((thread, rest)) => (thread.trim(), rest),
            None => ("", line),
        };
        let Some((time, call)) = rest.split_once(' ') else { continue };
        let Ok(seconds) = time.parse() else { continue };
        let flush = call.starts_with("fdatasync(") || call.starts_with("fsync(");
        let what = if flush && call.contains("tidegate.db-wal>") {
            if call.contains("<unfinished") {
                flushing.push(thread);
                continue;
            }
            What::WalFlushed
        } else if call.starts_with("<... f") && flushing.contains(&thread) {
            flushing.retain(|other| *other != thread);
            What::WalFlushed
        } else if call.contains("tidegate.db-wal>") {
            What::WalWritten
        } else if call.contains("HTTP/1.1 201") {
            What::Answered
        } else {
            continue;
        };
        all.push(Seen { seconds, what });
    }
    all
}

/// Traces what is written, flushed and answered while `count` measurements are sent, one after the other.
async fn traced(durability: &str, count: u64, at_least: Duration) -> Vec<Seen> {
    let gateway = Gateway::with(&format!("[store]\ndurability = '{durability}'")).await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let _consumer = gateway.consumer("Sub1", "reader").await;
    let calls = "trace=write,pwrite64,writev,sendto,sendmsg,fsync,fdatasync";
    let trace = Trace::of(&gateway, &["-y", "-ttt", "-s", "16", "-e", calls]).await;
    let (began, mut posted) = (Instant::now(), 0);
    while posted < count || began.elapsed() < at_least {
        gateway.measure(&device, "t", posted).await;
        posted += 1;
    }
    let seen = seen(&trace.end().await);
    let answers = seen.iter().filter(|seen| seen.what == What::Answered).count();
    assert!(answers as u64 >= posted, "strace has seen {answers} of {posted} answers");
    seen
}

// `store.durability = "commit"`: "no 201 leaves the socket before an fdatasync of the WAL that follows its write".
#[tokio::test]
async fn what_is_answered_is_flushed_before() {
    let seen = traced("commit", 100, Duration::ZERO).await;
    let mut flushed = false;
    for Seen { what, .. } in seen {
        match what {
            What::WalWritten => flushed = false,
            What::WalFlushed => flushed = true,
            What::Answered => assert!(flushed, "an answer before the flush"),
        }
    }
}

// `store.durability = "second"`: "syncs are at most about a second apart while there is load".
#[tokio::test]
async fn what_is_answered_is_flushed_within_about_a_second() {
    let seen = traced("second", 200, Duration::from_secs(4)).await;
    let times =
        |what: What| seen.iter().filter(move |seen| seen.what == what).map(|seen| seen.seconds).collect::<Vec<_>>();
    let (answered, flushed) = (times(What::Answered), times(What::WalFlushed));
    let (first, last) = (answered[0], answered[answered.len() - 1]);
    assert!(flushed.len() * 10 < answered.len(), "{} flushes of {} answers", flushed.len(), answered.len());
    let mut since = first;
    for flush in flushed.into_iter().chain([last]) {
        assert!(flush - since < 3.0, "{} s without a flush", flush - since);
        since = flush;
    }
}
