//! The kill comes from within, at a named point, or in the middle of something else that goes wrong.

use super::*;
use crate::harness::{PASSWORD, PATIENCE, Program};

const FAULT: &str = "TIDEGATE_FAULT";

/// Points between the stages of the line, and at which time there the kill comes at the earliest, since the load has to run by
/// then. It comes at twice that time at the latest.
const POINTS: [(&str, u64); 15] = [
    ("sweep", 1),
    ("place", 1),
    ("admitted", 50),
    ("judged", 50),
    ("staged", 50),
    ("before-commit", 50),
    ("after-commit", 50),
    ("before-answer", 50),
    ("after-answer", 50),
    ("ack-received", 200),
    ("ack-committed", 50),
    ("move-log", 2),
    ("end-log", 2),
    ("consumer-create", 2),
    ("unsubscribe", 2),
];

impl Run {
    /// Load, until the gateway comes to this point for the n-th time.
    async fn round_to(&mut self, point: &str, n: u64) {
        self.gateway.stop().await;
        self.gateway.set_env(FAULT, &format!("kill-at:{point}:{n}"));
        self.gateway.restart_process().await;
        let before = self.accepted();
        let load = self.load().await;
        self.come_and_go().await;
        let (code, said) = self.gateway.ended_badly().await;
        assert_eq!(code, None, "{point} was not reached:\n{said}");
        self.unload(load).await;
        assert!(self.accepted() > before, "there was no load before {point}");
        self.gateway.set_env(FAULT, "");
        self.gateway.restart_process().await;
        self.judge_guests().await;
    }
}

// "kill -9 at named points between the stages of the line": "zero lost, duplicates only where an ack was in flight".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_between_any_two_stages_loses_nothing_and_repeats_nothing() {
    let mut run = Run::new(Gateway::setup()).await;
    let seed = run.dice.seed();
    // Messages that nobody takes, which go when they are a second old.
    let old = json!({"ttlSeconds": 1});
    run.gateway.put("/tidegate/v1/topics/persistent/CrashOld", &old).await.expect(200);
    run.gateway.subscribe(&forwarded("CrashOld", &run.sources[0].id)).await;
    run.gateway.consumer("CrashOld", "late").await.close().await;
    // As many measurements as wait for their places, nearly.
    let archived = run.gateway.device("archive").await;
    let archived: Vec<Value> = (0..1000).map(|value| measurement(&archived, "t", value)).collect();
    for _ in 0..16 {
        let all = run.gateway.post("/measurement/measurements", &json!({"measurements": archived}));
        all.header("x-cumulocity-processing-mode", "QUIESCENT").await.expect(201);
    }
    for (point, least) in POINTS {
        let n = least + run.dice.below(least);
        run.round_to(point, n).await;
    }
    let accepted = run.accepted();
    nothing_violated(seed, accepted, &run.finish().await);
}

// "a full disk": a consumer that is away holds everything back until nothing more is taken, and comes back later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_9_with_a_full_store_loses_nothing_and_leaves_nothing_half_done() {
    let mut run = Run::new(Gateway::setup().config("[store]\nmax_bytes = 1048576")).await;
    let seed = run.dice.seed();
    run.ballast = 1000;
    run.sources.iter_mut().for_each(|source| source.mode = "TRANSIENT");
    run.ledgers.push(Ledger::new("CrashAll", "hog"));
    for _ in 0..2 {
        let (before, refused) = (run.accepted(), run.refused());
        run.round().await;
        assert!(run.accepted() > before, "there was no room again");
        run.away = Some("hog");
        let deadline = Instant::now() + PATIENCE;
        while run.refused() == refused {
            assert!(Instant::now() < deadline, "the store was never full");
            run.round().await;
        }
        run.away = None;
    }
    run.round().await;
    run.ballast = 0;
    let accepted = run.accepted();
    nothing_violated(seed, accepted, &run.finish().await);
}

// Without its writer a gateway can do nothing but begin anew.
#[tokio::test]
async fn a_writer_that_panics_takes_the_process_with_it() {
    let mut gateway = Gateway::setup().env(FAULT, "panic-at:staged:20").start().await;
    let device = gateway.device("pump").await;
    let producer = gateway.producer();
    let mut number = 0;
    while producer.post(&measurement(&device, "t", number), "PERSISTENT").await.is_ok() {
        number += 1;
    }
    let (code, said) = gateway.ended_badly().await;
    assert_eq!(code, Some(1), "{said}");
    gateway.set_env(FAULT, "");
    gateway.restart_process().await;
    gateway.measure(&device, "t", number).await;
}

// "a clock that jumps", while the gateway runs and over a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill_9_with_a_clock_that_jumps_loses_nothing() {
    const YEARS: i64 = 10 * 365 * 86_400_000;
    let clock = tempfile::NamedTempFile::new().unwrap();
    let set = |ms: i64| std::fs::write(clock.path(), ms.to_string()).unwrap();
    let mut run = Run::new(Gateway::setup().env("TIDEGATE_FAULT_CLOCK", clock.path().to_str().unwrap())).await;
    let seed = run.dice.seed();
    for jump in [YEARS, 0, -YEARS, YEARS] {
        run.round_with(|| set(jump)).await;
        run.gateway.stop().await;
        set(-jump);
        run.gateway.restart_process().await;
    }
    let accepted = run.accepted();
    nothing_violated(seed, accepted, &run.finish().await);
}

/// A gateway that has just got much room in its file, and a topic that others wait for.
async fn roomy(fault: &str) -> Gateway {
    let gateway = Gateway::setup().env(FAULT, fault).start().await;
    let (large, small) = (gateway.device("large").await, gateway.device("small").await);
    gateway.subscribe(&forwarded("Large", &large)).await;
    gateway.subscribe(&forwarded("Small", &small)).await;
    for (topic, name) in [("Large", "goes"), ("Small", "stays")] {
        gateway.consumer(topic, name).await.close().await;
    }
    let mut producers = JoinSet::new();
    for producer in 0..4 {
        let (gateway, large, small) = (gateway.producer(), large.clone(), small.clone());
        producers.spawn(async move {
            let mut body = measurement(&large, "t", 0);
            body["c8y_Ballast"] = json!("x".repeat(60_000));
            for value in 0..50 {
                assert_eq!(gateway.post(&body, "TRANSIENT").await.unwrap(), 201);
                let body = measurement(&small, "t", producer * 50 + value);
                assert_eq!(gateway.post(&body, "TRANSIENT").await.unwrap(), 201);
            }
        });
    }
    producers.join_all().await;
    gateway.unsubscribe(&gateway.token("Large", "goes").await).await.expect(200);
    gateway
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_while_the_file_is_made_shorter_loses_nothing() {
    for point in ["vacuum:3", "checkpoint"] {
        let mut gateway = roomy(&format!("kill-at:{point}")).await;
        let (code, said) = gateway.ended_badly().await;
        assert_eq!(code, None, "{point} was not reached:\n{said}");
        gateway.set_env(FAULT, "");
        gateway.restart_process().await;
        let mut stays = gateway.consumer("Small", "stays").await;
        let mut values = BTreeSet::new();
        for _ in 0..200 {
            values.insert(value_of(&stays.receive().await.json()));
        }
        assert!(values.iter().copied().eq(0..200), "{values:?}");
        let file = gateway.data().join("tidegate.db");
        eventually("the file is short", async || (std::fs::metadata(&file).unwrap().len() < 6 << 20).then_some(()))
            .await;
        gateway.stop().await;
        let data = gateway.data().into_os_string().into_string().unwrap();
        let (sound, found, _) = gateway.command(&["check", "--data", &data], &[], "check").await;
        assert!(sound, "{found}");
    }
}

// A start that is killed before each of the commits that bring the database up to date.
#[tokio::test]
async fn a_kill_between_migrations_leaves_a_database_that_starts() {
    const MIGRATIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../migrations");
    let migrations = std::fs::read_dir(MIGRATIONS).unwrap().count();
    let mut gateway = Gateway::start().await;
    gateway.stop().await;
    std::fs::remove_dir_all(gateway.data()).unwrap();
    let env = [(FAULT, "kill-at:migration:2"), ("TIDEGATE_ADMIN_PASSWORD", PASSWORD)];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let mut kills = 0;
    let start = || Program::spawn(&gateway.serve_arguments(), &env, &gateway.path("."), "killed");
    let ready = gateway.path("ready.json");
    loop {
        let mut program = start();
        let killed = eventually("the end or the start", async || match program.exited() {
            Some(status) => {
                assert_eq!(status.code(), None, "{}", program.stderr());
                Some(true)
            }
            None => ready.exists().then_some(false),
        })
        .await;
        if !killed {
            break;
        }
        kills += 1;
    }
    assert!(kills >= migrations, "{kills} kills of {migrations} migrations");
    gateway.restart_process().await;
    gateway.device("pump").await;
}
