//! Half of the peak rate for minutes, while retention deletes and consumers come and go: memory and files have to level off.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use tidegate::store::FILE_NAME;

use crate::Plan;
use crate::chart::{self, Curve};
use crate::consumer::Socket;
use crate::gateway::Gateway;
use crate::http::Client;
use crate::load::{Load, Posted};
use crate::measurement::{MOST, Request, SendTimes, TYPES};
use crate::report::{Report, Row, Target, note};
use crate::scene::{SUBSCRIPTION, Scene, token};
use crate::stats::median;

/// Measurements are posted as old as retention lets them be, but for this: so long they stay.
const KEPT: SignedDuration = SignedDuration::from_secs(30);
const RETENTION_DAYS: i64 = 1;
/// The time to live of messages, in seconds.
const TTL_SECONDS: &str = "20";
/// How long a consumer that comes and goes stays, and how long it is away.
const VISIT: Duration = Duration::from_secs(5);
/// So many guests in a row say that they will not come again; the next one just stays away.
const POLITE: u64 = 2;
const IN_FLIGHT: usize = 64;
/// Time for which requests are made at a time, since their time has to advance.
const SLICE: Duration = Duration::from_secs(5);
const SAMPLE: Duration = Duration::from_secs(1);
const DRAINED_WITHIN: Duration = Duration::from_secs(30);
/// The last third by the middle third.
const LEVEL: f64 = 1.1;
const PICTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/soak.svg");

/// What everybody shares.
struct Soak {
    gateway: Gateway,
    scene: Scene,
    sent: Arc<SendTimes>,
    ending: AtomicBool,
    /// Messages that the consumer which stays has acknowledged.
    steady: AtomicU64,
}

pub(crate) fn measure(plan: &Plan, report: &mut Report) -> Result<()> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let data = folder.path().join("data");
    let days = RETENTION_DAYS.to_string();
    let variables = [("TIDEGATE_RETENTION__MEASUREMENTS_DAYS", &*days), ("TIDEGATE_BACKLOG__TTL_SECONDS", TTL_SECONDS)];
    let gateway = Gateway::start_with(&data, &variables)?;
    let soak = Soak {
        scene: Scene::set_up(gateway.http, plan.devices, None)?,
        gateway,
        sent: Arc::new(SendTimes::new()),
        ending: AtomicBool::new(false),
        steady: AtomicU64::new(0),
    };
    soak.run(plan, &data, report)
        .with_context(|| format!("the gateway's log ends with {}", soak.gateway.last_words()))?;
    soak.gateway.stop()
}

impl Soak {
    fn run(&self, plan: &Plan, data: &Path, report: &mut Report) -> Result<()> {
        std::thread::scope(|scope| {
            let consumers = [
                scope.spawn(|| self.stay()),
                scope.spawn(|| self.come_and_go()),
                scope.spawn(|| self.one_after_another()),
            ];
            // Everybody has to be there before the first post.
            std::thread::sleep(SAMPLE);
            let outcome = self.post_and_watch(plan, data, report, &consumers);
            self.ending.store(true, Ordering::Relaxed);
            for consumer in consumers {
                consumer.join().map_err(|_| anyhow!("a consumer panicked"))??;
            }
            outcome
        })
    }

    fn post_and_watch(
        &self,
        plan: &Plan,
        data: &Path,
        report: &mut Report,
        consumers: &[ScopedJoinHandle<'_, Result<()>>],
    ) -> Result<()> {
        note("soak: looking for the peak");
        let peak = self.post(None)?;
        let half = peak.per_second() / 2.0;
        let title = format!("{} minutes at {half:.0} messages/s", plan.soak.as_secs_f64() / 60.0);
        note(&format!("soak: {title}"));
        let mut created = peak.created;
        let samples = std::thread::scope(|scope| -> Result<_> {
            let watching = scope.spawn(|| self.watch(data, plan.soak));
            let mut outcome = Ok(());
            while outcome.is_ok() && !watching.is_finished() {
                outcome = self.post(Some(half)).and_then(|posted| {
                    created += posted.created;
                    ensure!(!consumers.iter().any(ScopedJoinHandle::is_finished), "a consumer has ended");
                    Ok(())
                });
            }
            self.ending.store(outcome.is_err(), Ordering::Relaxed);
            outcome?;
            watching.join().map_err(|_| anyhow!("the watch panicked"))?
        })?;
        self.drained(created)?;
        report.add(Row {
            figure: "soak at half of the peak".into(),
            measured: format!("{title}, {created} in all"),
            ..Row::default()
        });
        for curve in &samples {
            note(&curve.text());
            report.add(level(curve));
        }
        std::fs::write(PICTURE, chart::svg(&title, &samples))?;
        note("the picture is docs/soak.svg");
        Ok(())
    }

    /// One slice; half of the devices have their measurements stored.
    fn post(&self, per_second: Option<f64>) -> Result<Posted> {
        let time = format!("{:.3}", Timestamp::now() - SignedDuration::from_hours(24 * RETENTION_DAYS) + KEPT);
        let devices = self.scene.devices.iter().zip(["TRANSIENT", "PERSISTENT"].iter().cycle());
        let requests = devices.map(|(device, mode)| Request::single(device, TYPES[0], &time, mode)).collect();
        let (to, sent) = (self.gateway.http, &self.sent);
        Load { to, requests: &requests, sent, in_flight: IN_FLIGHT, most: MOST, per_second, time: SLICE }.run()
    }

    /// Memory and files, once a second.
    fn watch(&self, data: &Path, time: Duration) -> Result<[Curve; 3]> {
        let mut curves =
            ["resident memory", "database", "write-ahead log"].map(|name| Curve { name, values: Vec::new() });
        let until = Instant::now() + time;
        while Instant::now() < until && !self.ending.load(Ordering::Relaxed) {
            let file = |name: &str| std::fs::metadata(data.join(name)).map_or(0.0, |file| file.len() as f64 / 1e6);
            let values = [self.gateway.process.memory()?.resident, file(FILE_NAME), file(&format!("{FILE_NAME}-wal"))];
            curves.iter_mut().zip(values).for_each(|(curve, value)| curve.values.push(value));
            std::thread::sleep(SAMPLE);
        }
        Ok(curves)
    }

    /// Waits until the consumer that stays has had every message once.
    fn drained(&self, created: u64) -> Result<()> {
        let deadline = Instant::now() + DRAINED_WITHIN;
        while self.steady.load(Ordering::Relaxed) < created && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let messages = self.steady.load(Ordering::Relaxed);
        ensure!(messages == created, "{messages} frames for {created} answers of 201");
        Ok(())
    }

    fn stay(&self) -> Result<()> {
        let mut socket = Socket::connect(self.gateway.http, &self.scene.token)?;
        while !self.ending.load(Ordering::Relaxed) {
            socket.turn(|_, _| {
                self.steady.fetch_add(1, Ordering::Relaxed);
            })?;
        }
        Ok(())
    }

    /// The same one leaves and comes back for what has waited.
    fn come_and_go(&self) -> Result<()> {
        let token = token(&mut Client::connect(self.gateway.http)?, SUBSCRIPTION, "visitor")?;
        while !self.ending.load(Ordering::Relaxed) {
            self.visit(&token)?;
            std::thread::sleep(VISIT);
        }
        Ok(())
    }

    /// Each is another one. What waits for one that does not unsubscribe goes when it has had its time.
    fn one_after_another(&self) -> Result<()> {
        for number in 1.. {
            if self.ending.load(Ordering::Relaxed) {
                break;
            }
            let mut client = Client::connect(self.gateway.http)?;
            let token = token(&mut client, SUBSCRIPTION, &format!("guest{number}"))?;
            self.visit(&token)?;
            if number % (POLITE + 1) > 0 {
                client.create(&format!("/notification2/unsubscribe?token={token}"), &json!({}))?;
            }
        }
        Ok(())
    }

    fn visit(&self, token: &str) -> Result<()> {
        let mut socket = Socket::connect(self.gateway.http, token).context("a visit")?;
        let until = Instant::now() + VISIT;
        while Instant::now() < until && !self.ending.load(Ordering::Relaxed) {
            socket.turn(|_, _| {})?;
        }
        socket.leave()
    }
}

/// Whether a curve is as high in its last third as in its middle third.
fn level(curve: &Curve) -> Row {
    let third = curve.values.len() / 3;
    let [middle, last] = [1, 2].map(|at| median(curve.values[at * third..][..third].iter().copied()));
    Row {
        figure: format!("soak: {}, last third", curve.name),
        measured: format!("{last:.1} MB"),
        beside: format!("middle third {middle:.1} MB"),
        ratios: vec![last / middle],
        target: Some(Target::at_most(last / middle, LEVEL, " times")),
    }
}
