//! Many subscriptions and many consumers: what they weigh, and what the subscriptions that do not match cost those who post.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::Plan;
use crate::consumer::Socket;
use crate::gateway::{Gateway, PASSWORD, USER};
use crate::http::{Client, post};
use crate::load::Load;
use crate::measurement::{MOST, Request, SendTimes, TYPES, now};
use crate::report::{Report, Row, Target, note};
use crate::scene::{SUBSCRIPTIONS, device, token};
use crate::stats::median;

const IN_FLIGHT: usize = 64;
/// Times the CPU time of a post without any subscription.
const FLAT: f64 = 1.2;
const CREATED_WITHIN: Duration = Duration::from_secs(600);
const DRAINED_WITHIN: Duration = Duration::from_secs(60);
/// Between two looks at all connections of a crowd.
const PAUSE: Duration = Duration::from_millis(2);
const SETTLED_AFTER: Duration = Duration::from_secs(1);
const JSON: &str = "Content-Type: application/json\r\n";

/// Why subscriptions do not match what is posted.
#[derive(Clone, Copy, PartialEq)]
enum Other {
    Source,
    Api,
    Tenant,
}

impl Other {
    const ALL: [(Self, &str); 3] = [(Self::Source, "source"), (Self::Api, "api"), (Self::Tenant, "tenant")];

    /// Requests that make so many subscriptions, each with a topic of its own. `sources` are not those that post.
    fn subscriptions(self, count: usize, sources: &[String]) -> Arc<[Request]> {
        let user = if self == Self::Tenant { "other/admin" } else { USER };
        let subscription = |number| match self {
            Self::Source => json!({"context": "mo", "subscription": topic(number), "source": {"id": sources[number]}}),
            Self::Api => subscription(number, "events"),
            Self::Tenant => subscription(number, "measurements"),
        };
        let request =
            |number| Request::new(post(user, SUBSCRIPTIONS, JSON, &subscription(number).to_string()).into_bytes());
        (0..count).map(request).collect()
    }
}

fn topic(number: usize) -> String {
    format!("topic{number}")
}

fn subscription(number: usize, api: &str) -> serde_json::Value {
    json!({"context": "tenant", "subscription": topic(number), "subscriptionFilter": {"apis": [api]}})
}

/// A gateway with subscriptions, and what is posted past them.
struct Place {
    figure: String,
    gateway: Gateway,
    /// Sources of its subscriptions, if these are of other sources.
    sources: Vec<String>,
    requests: Arc<[Request]>,
    rates: Vec<f64>,
    /// CPU time of each post, in microseconds.
    cpu: Vec<f64>,
}

pub(crate) fn measure(plan: &Plan, report: &mut Report) -> Result<()> {
    note("scale: setting up");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let mut none = Place::set_up(&folder.path().join("none"), Other::Source, "", 0, report)?;
    let mut places = Vec::new();
    for (other, name) in Other::ALL {
        for count in plan.subscriptions {
            places.push(Place::set_up(&folder.path().join(format!("{name}{count}")), other, name, count, report)?);
        }
    }
    let sent = Arc::new(SendTimes::new());
    for _ in 0..plan.rounds {
        none.round(plan, &sent)?;
        places.iter_mut().try_for_each(|place| place.round(plan, &sent))?;
    }
    places.iter().for_each(|place| place.report(&none, report));
    // The most of other sources: each of these has a topic.
    let many = plan.subscriptions.len() - 1;
    crowd(plan, places.swap_remove(many), &folder.path().join(format!("source{}", plan.subscriptions[many])), report)
}

impl Place {
    fn set_up(data: &Path, other: Other, name: &str, count: usize, report: &mut Report) -> Result<Self> {
        let gateway = Gateway::start(data)?;
        let mut client = Client::connect(gateway.http)?;
        let poster = device(&mut client, 0)?;
        let sources = if other == Other::Source { count } else { 0 };
        let sources = (0..sources).map(|number| device(&mut client, number)).collect::<Result<Vec<_>>>()?;
        if other == Other::Tenant {
            client.create("/tidegate/v1/tenants", &json!({"id": "other", "adminPassword": PASSWORD}))?;
        }
        let requests = [Request::single(&poster, TYPES[0], &now(), "TRANSIENT")].into();
        let figure = format!("{count} subscriptions of another {name}");
        if count > 0 {
            let before = settled(&gateway, &requests)?;
            let created = create(gateway.http, &other.subscriptions(count, &sources))?;
            let weight = (settled(&gateway, &requests)? - before) * 1e3 / count as f64;
            let measured = format!("{weight:.1} KB each, made at {created:.0}/s");
            report.add(Row { figure: figure.clone(), measured, ..Row::default() });
        }
        Ok(Self { figure, gateway, sources, requests, rates: Vec::new(), cpu: Vec::new() })
    }

    fn round(&mut self, plan: &Plan, sent: &Arc<SendTimes>) -> Result<()> {
        let before = self.gateway.process.cpu();
        let posted = load(self.gateway.http, &self.requests, sent, plan.round).run().context("posting")?;
        self.rates.push(posted.per_second());
        self.cpu.push((self.gateway.process.cpu() - before).as_secs_f64() * 1e6 / posted.created as f64);
        Ok(())
    }

    fn report(&self, none: &Self, report: &mut Report) {
        let ratios: Vec<f64> = self.cpu.iter().zip(&none.cpu).map(|(ours, none)| ours / none).collect();
        report.add(Row {
            figure: format!("POST past {}", self.figure),
            measured: self.shown(),
            beside: format!("none {}", none.shown()),
            target: Some(Target::at_most(median(ratios.iter().copied()), FLAT, " of the CPU")),
            ratios,
        });
    }

    fn shown(&self) -> String {
        let median = |values: &[f64]| median(values.iter().copied());
        format!("{:.0}/s, {:.1} us CPU", median(&self.rates), median(&self.cpu))
    }
}

fn load<'a>(to: SocketAddr, requests: &'a Arc<[Request]>, sent: &'a Arc<SendTimes>, time: Duration) -> Load<'a> {
    Load { to, requests, sent, in_flight: IN_FLIGHT, most: MOST, per_second: None, time }
}

/// Memory in MB after some posts that nobody wants, so that it is compared in the same state.
fn settled(gateway: &Gateway, requests: &Arc<[Request]>) -> Result<f64> {
    load(gateway.http, requests, &Arc::new(SendTimes::new()), SETTLED_AFTER).run()?;
    Ok(gateway.process.memory()?.resident)
}

/// Sends each of the requests once and says how many there were each second.
fn create(to: SocketAddr, requests: &Arc<[Request]>) -> Result<f64> {
    let sent = Arc::new(SendTimes::new());
    let posted = Load { most: requests.len() as u64, ..load(to, requests, &sent, CREATED_WITHIN) }.run()?;
    ensure!(posted.created == requests.len() as u64, "only {} of {} were made", posted.created, requests.len());
    Ok(posted.per_second())
}

/// Consumers that are all connected, each to a topic of its own, to which one device posts.
fn crowd(plan: &Plan, place: Place, data: &Path, report: &mut Report) -> Result<()> {
    let Place { gateway, sources, requests, .. } = place;
    let all = format!("{} consumers, {} subscriptions", plan.crowd, sources.len());
    note(&format!("scale: {all}"));
    let mut client = Client::connect(gateway.http)?;
    let tokens = (0..plan.crowd).map(|number| token(&mut client, &topic(number), "crowd"));
    let tokens = tokens.collect::<Result<Vec<_>>>()?;
    let before = settled(&gateway, &requests)?;
    let sockets = tokens.iter().map(|token| Socket::connect(gateway.http, token));
    let mut sockets = sockets.collect::<Result<Vec<_>>>()?;
    sockets.iter().try_for_each(Socket::do_not_wait)?;
    let weight = (settled(&gateway, &requests)? - before) * 1e3 / plan.crowd as f64;
    report.add(Row {
        figure: format!("{all}: connecting"),
        measured: format!("{weight:.1} KB each"),
        ..Row::default()
    });

    let time = now();
    let single = |source: &String| Request::single(source, TYPES[0], &time, "TRANSIENT");
    let wanted = sources[..plan.crowd].iter().map(single).collect();
    let (mut rates, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        let (before, started) = (gateway.process.cpu(), Instant::now());
        let count = serve(gateway.http, &wanted, &mut sockets, plan.round)?;
        rates.push(count as f64 / started.elapsed().as_secs_f64());
        cpu.push((gateway.process.cpu() - before).as_secs_f64() * 1e6 / count as f64);
    }
    let memory = gateway.process.memory()?;
    report.add(Row {
        figure: format!("{all}: all in turn"),
        measured: format!("{:.0}/s, {:.1} us CPU, RSS {:.1} MB", median(rates), median(cpu), memory.resident),
        ..Row::default()
    });
    drop(sockets);
    gateway.stop()?;
    let gateway = Gateway::start(data)?;
    report.add(Row {
        figure: format!("{all}: start to ready"),
        measured: format!("{:.1} ms", gateway.ready_after.as_secs_f64() * 1e3),
        ..Row::default()
    });
    gateway.stop()
}

/// Posts, and returns how many when the consumers have acknowledged as many.
fn serve(to: SocketAddr, requests: &Arc<[Request]>, sockets: &mut [Socket], time: Duration) -> Result<u64> {
    let sent = Arc::new(SendTimes::new());
    std::thread::scope(|scope| {
        let posting = scope.spawn(|| load(to, requests, &sent, time).run());
        let deadline = Instant::now() + time + DRAINED_WITHIN;
        let mut messages = 0;
        while !posting.is_finished() {
            messages += look(sockets)?;
        }
        let created = posting.join().map_err(|_| anyhow::anyhow!("the load panicked"))??.created;
        while messages < created {
            ensure!(Instant::now() < deadline, "{messages} frames for {created} answers of 201");
            messages += look(sockets)?;
        }
        ensure!(messages == created, "{messages} frames for {created} answers of 201");
        Ok(created)
    })
}

/// Takes and acknowledges what has come for each of the consumers.
fn look(sockets: &mut [Socket]) -> Result<u64> {
    std::thread::sleep(PAUSE);
    let mut messages = 0;
    sockets.iter_mut().try_for_each(|socket| socket.turn(|_, _| messages += 1))?;
    Ok(messages)
}
