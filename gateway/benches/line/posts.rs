//! Durable posts per second beside a server that does nothing, and how long a message takes from its POST to its frame.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::Plan;
use crate::consumer::Consumer;
use crate::gateway::Gateway;
use crate::http::{Answer, Client};
use crate::load::Load;
use crate::measurement::{MOST, Request, SendTimes, TYPES, now, type_filter};
use crate::noop::NoOp;
use crate::process::Guarded;
use crate::report::{Report, Row, Target, note};
use crate::scene::Scene;
use crate::stats::{median, percentile};

/// How long the consumer may need for what was posted.
const DRAINED_WITHIN: Duration = Duration::from_secs(60);

/// A processing mode and what it promises at 64 in flight, as shares of the no-op server's rate.
struct Mode {
    name: &'static str,
    must: f64,
    ambition: f64,
}

const MODES: [Mode; 2] =
    [Mode { name: "TRANSIENT", must: 0.40, ambition: 0.50 }, Mode { name: "PERSISTENT", must: 0.30, ambition: 0.40 }];

/// What one load against one server came to.
struct Round {
    rate: f64,
    /// CPU time of the server for each post, in microseconds.
    cpu: f64,
    /// Milliseconds from POST to frame; empty for the no-op server.
    delays: Vec<f64>,
}

/// Everything that the rounds need.
struct Bench<'a> {
    plan: &'a Plan,
    gateway: Gateway,
    noop: NoOp,
    consumer: Consumer,
    sent: Arc<SendTimes>,
    requests: [Arc<[Request]>; 2],
}

pub(crate) fn measure(plan: &Plan, report: &mut Report) -> Result<()> {
    note("posts: setting up");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let mut bench = Bench::set_up(plan, Gateway::start(&folder.path().join("data"))?)?;
    bench.rounds(16, 1)?;
    for in_flight in plan.in_flight {
        note(&format!("posts: {in_flight} in flight"));
        let rounds = bench.rounds(*in_flight, plan.rounds)?;
        for (at, mode) in MODES.iter().enumerate() {
            mode.report(*in_flight, rounds.iter().map(|round| (&round[0], &round[1 + at])), report);
        }
    }
    let memory = bench.gateway.process.memory()?;
    report.add(Row {
        figure: "RSS under load".into(),
        measured: format!("peak {:.1} MB, at the end {:.1} MB", memory.peak, memory.resident),
        ..Row::default()
    });
    drop(bench.consumer);
    bench.gateway.stop()
}

impl Bench<'_> {
    fn set_up(plan: &Plan, gateway: Gateway) -> Result<Bench<'_>> {
        let scene = Scene::set_up(gateway.http, plan.devices, Some(&type_filter()))?;
        let time = now();
        let requests = MODES.map(|mode| -> Arc<[Request]> {
            let typed = scene.devices.iter().zip(TYPES.iter().cycle());
            typed.map(|(device, type_)| Request::single(device, type_, &time, mode.name)).collect()
        });
        // Nobody has connected yet, so that this post leaves no message.
        let answer = sample(gateway.http, &requests[0][0])?;
        let sent = Arc::new(SendTimes::new());
        let consumer = Consumer::connect(gateway.http, &scene.token, sent.clone())?;
        Ok(Bench { plan, noop: NoOp::start(&answer)?, gateway, consumer, sent, requests })
    }

    /// The no-op server and each mode, one after the other, `rounds` times.
    fn rounds(&mut self, in_flight: usize, rounds: usize) -> Result<Vec<[Round; 3]>> {
        let mut round = || -> Result<[Round; 3]> {
            let noop = self.load(&self.noop.process, self.noop.http, &self.requests[0], in_flight)?.1;
            Ok([noop, self.mode(0, in_flight)?, self.mode(1, in_flight)?])
        };
        (0..rounds).map(|_| round()).collect()
    }

    fn mode(&mut self, mode: usize, in_flight: usize) -> Result<Round> {
        let (created, round) = self.load(&self.gateway.process, self.gateway.http, &self.requests[mode], in_flight)?;
        let received = self.consumer.take(created, DRAINED_WITHIN).context(MODES[mode].name)?;
        Ok(Round { delays: received.delays, ..round })
    }

    fn load(
        &self,
        server: &Guarded,
        to: SocketAddr,
        requests: &Arc<[Request]>,
        in_flight: usize,
    ) -> Result<(u64, Round)> {
        self.sent.clear();
        let before = server.cpu();
        let load =
            Load { to, requests, sent: &self.sent, in_flight, most: MOST, per_second: None, time: self.plan.round };
        let posted = load.run()?;
        let cpu = (server.cpu() - before).as_secs_f64() * 1e6 / posted.created as f64;
        Ok((posted.created, Round { rate: posted.per_second(), cpu, delays: Vec::new() }))
    }
}

/// The gateway's answer to one post, headers and all.
fn sample(to: SocketAddr, request: &Request) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    request.write(0, &mut bytes);
    let answer = Client::connect(to)?.exchange(&bytes)?;
    let status = Answer::parse(&answer)?.context("incomplete answer")?.status;
    ensure!(status == 201, "the first post was answered with {}", String::from_utf8_lossy(&answer));
    Ok(answer)
}

impl Mode {
    fn report<'a>(&self, in_flight: usize, rounds: impl Iterator<Item = (&'a Round, &'a Round)>, report: &mut Report) {
        let (noops, ours): (Vec<_>, Vec<_>) = rounds.unzip();
        let ratios: Vec<f64> = ours.iter().zip(&noops).map(|(ours, noop)| ours.rate / noop.rate).collect();
        let target =
            (in_flight == 64).then(|| Target::at_least(median(ratios.iter().copied()), self.must, self.ambition));
        report.add(Row {
            figure: format!("POST {}, {in_flight} in flight", self.name),
            measured: rate(&ours),
            beside: format!("no-op {}", rate(&noops)),
            ratios,
            target,
        });
        let delay = |rank| median(ours.iter().map(|round| percentile(round.delays.clone(), rank)));
        report.add(Row {
            figure: format!("POST to frame {}, {in_flight} in flight", self.name),
            measured: format!("p50 {:.2} ms, p99 {:.2} ms", delay(0.5), delay(0.99)),
            ..Row::default()
        });
    }
}

fn rate(rounds: &[&Round]) -> String {
    let rate = median(rounds.iter().map(|round| round.rate));
    let cpu = median(rounds.iter().map(|round| round.cpu));
    format!("{rate:.0}/s, {cpu:.1} us CPU")
}
