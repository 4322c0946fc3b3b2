//! What a message costs in guests, beside native code: processor time of the call, as the gateway accounts it. What the caller
//! waits is shown too: a lone call wakes the plugins' thread up, which takes longer than most calls.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fragments_to_copy::Projection;
use nix::time::{ClockId, clock_gettime};
use serde_json::Value;
use tidegate::config::PluginEngine;
use tidegate::message::{Action, Api, Message, Tenant};
use tidegate::plugin::compiler::Compiler;
use tidegate::plugin::{BuiltIn, Fault, Instance, Plugin, PluginId, PluginLimits, Plugins, Source, World};
use tokio::runtime::Runtime;

use crate::Plan;
use crate::measurement::{TYPES, body, now, type_filter};
use crate::process;
use crate::report::{Report, Row, Target, note};
use crate::stats::median;

const FRAGMENTS: &str = r#"["c8y_Temperature"]"#;
const MOST: usize = 256;
const TENANT: &str = "edge";

/// How many messages a guest gets in one call, and how many calls are handed over to its thread at once.
const CASES: [(usize, usize); 5] = [(1, 1), (16, 1), (16, 16), (64, 1), (256, 1)];

/// The same for filters that users upload, and for those that are interpreted.
const UPLOADED: [(usize, usize); 2] = [(1, 1), (64, 1)];

/// A filter that a user uploads, and what does the same natively. Another one is another entry here.
struct Uploaded {
    name: &'static str,
    source: Source<'static>,
    settings: &'static str,
    twin: fn(&Message) -> bool,
    /// Nanoseconds of a message in large batches, compiled.
    limit: Option<f64>,
}

const THRESHOLD: &[u8] = include_bytes!("../../../plugins/components/threshold.wasm");
const THRESHOLD_SETTINGS: &str = r#"{"value":"/c8y_Temperature/inside/value","above":20}"#;

const FILTERS: [Uploaded; 3] = [
    Uploaded {
        name: "threshold in Rust, uploaded",
        source: Source::Component(THRESHOLD),
        settings: THRESHOLD_SETTINGS,
        twin: by_body,
        limit: None,
    },
    Uploaded {
        name: "JavaScript by type",
        source: script("(message) => message.type === 'temperature' || message.type === 'pressure'"),
        settings: "null",
        twin: by_type,
        limit: Some(5_000.0),
    },
    Uploaded {
        name: "JavaScript by body",
        source: script("(message) => message.body.c8y_Temperature.inside.value > 20"),
        settings: "null",
        twin: by_body,
        limit: Some(20_000.0),
    },
];

const fn script(text: &str) -> Source<'_> {
    Source::Script { world: World::Filter, text }
}

fn by_type(message: &Message) -> bool {
    message.kind.as_deref().is_some_and(|kind| TYPES.contains(&kind))
}

fn by_body(message: &Message) -> bool {
    let body: Option<Value> = serde_json::from_slice(&message.body).ok();
    body.and_then(|body| body.pointer("/c8y_Temperature/inside/value")?.as_f64()).is_some_and(|value| value > 20.0)
}

/// Each round of the line is cut into so many: the medians of many short ones are steadier on a busy machine.
const CUTS: usize = 8;

/// How many plugins are weighed at once.
const MANY: usize = 100;

type Batches = Vec<(Instance, Vec<Arc<Message>>)>;

/// Nanoseconds of a message.
#[derive(Clone, Copy)]
struct Cost {
    processor: f64,
    wall: f64,
}

/// The cost of a guest in each round, and the nanoseconds of what it is compared with.
type Costs = Vec<(Cost, f64)>;

struct Bench {
    runtime: Runtime,
    plugins: Plugins,
    filter: Instance,
    transform: Instance,
    projection: Projection,
    messages: Vec<Arc<Message>>,
    round: Duration,
}

pub(crate) fn measure(plan: &Plan, report: &mut Report) -> Result<()> {
    note("plugins");
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let rounds = plan.rounds * CUTS;
    let bench = Bench::set_up(folder.path(), PluginEngine::Cranelift, plan.round / (6 * CUTS as u32))?;
    bench.check()?;
    for (size, calls) in CASES {
        // The first cases would pay for what is made on demand.
        bench.judge(size, calls)?;
        let costs = (0..rounds).map(|_| Ok((bench.judge(size, calls)?, bench.parse()?))).collect::<Result<_>>()?;
        let limit = (size >= 16).then_some(Limit::Times(0.2));
        report.add(row("type-filter", size, calls, costs, "serde_json", limit));
    }
    let remembered = (0..rounds).map(|_| Ok((bench.recall(16)?, bench.parse()?))).collect::<Result<_>>()?;
    report.add(row("type-filter as the line asks it", 16, 1, remembered, "serde_json", None));
    for (size, calls) in CASES {
        bench.shape(size, calls)?;
        let costs = (0..rounds).map(|_| Ok((bench.shape(size, calls)?, bench.project()?))).collect::<Result<_>>()?;
        let limit = (size >= 16).then_some(Limit::Times(4.0));
        report.add(row("fragments-to-copy", size, calls, costs, "native", limit));
    }
    bench.uploaded("", true, rounds, report)?;
    bench.as_built_in(FILTERS[0].name, Source::Component(THRESHOLD), THRESHOLD_SETTINGS, 1.1, rounds, report)?;
    match threshold_in_c(folder.path()) {
        Ok(component) => {
            let source = Source::Component(&component);
            bench.as_built_in("threshold in C, uploaded", source, r#"{"limit":20}"#, 2.0, rounds, report)?;
        }
        Err(error) => note(&format!("no filter in C: {error:#}")),
    }
    let limits: Vec<String> = (0..MANY).map(|number| THRESHOLD_SETTINGS.replace("20", &number.to_string())).collect();
    let threshold = bench.upload("threshold", 2, Source::Component(THRESHOLD), THRESHOLD_SETTINGS)?;
    bench.weigh("settings of a Rust filter", 15.0, report, |number| {
        bench.configure(threshold.plugin(), &limits[number])
    })?;
    let version =
        |number| bench.upload("threshold", 3 + number as u32, Source::Component(THRESHOLD), THRESHOLD_SETTINGS);
    bench.weigh("versions of a Rust filter", 15.0, report, version)?;
    let texts: Vec<String> = (0..MANY).map(|number| format!("(message) => message.type !== 't{number}'")).collect();
    let of_text = |number: usize| bench.upload("script", 1 + number as u32, script(&texts[number]), "null");
    bench.weigh("scripts", 80.0, report, of_text)?;
    bench.plugins.stop();

    let interpreted = Bench::set_up(folder.path(), PluginEngine::Pulley, bench.round)?;
    interpreted.check()?;
    let filter = &interpreted.filter;
    interpreted.beside(filter, by_type, rounds, |size, costs| {
        report.add(row("type-filter, interpreted", size, 1, costs, "native", None));
    })?;
    interpreted.uploaded(", interpreted", false, rounds, report)?;
    interpreted.plugins.stop();
    Ok(())
}

enum Limit {
    /// What it is compared with, so many times.
    Times(f64),
    Nanoseconds(f64),
}

fn row(guest: &str, size: usize, calls: usize, costs: Costs, twin: &str, limit: Option<Limit>) -> Row {
    let (ours, twins): (Vec<Cost>, Vec<f64>) = costs.into_iter().unzip();
    let ratios: Vec<f64> = ours.iter().zip(&twins).map(|(ours, twin)| ours.processor / twin).collect();
    let together = if calls > 1 { format!(", {calls} calls at once") } else { String::new() };
    let wall = median(ours.iter().map(|cost| cost.wall));
    let ours = median(ours.iter().map(|cost| cost.processor));
    Row {
        figure: format!("{guest}, {size} a call{together}"),
        measured: format!("{ours:.0} ns a message, {wall:.0} ns until it is answered"),
        beside: format!("{twin} {:.0} ns", median(twins)),
        target: limit.map(|limit| match limit {
            Limit::Times(limit) => Target::at_most(median(ratios.iter().copied()), limit, ""),
            Limit::Nanoseconds(limit) => Target::at_most(ours, limit, " ns"),
        }),
        ratios,
    }
}

impl Bench {
    fn set_up(cache: &Path, engine: PluginEngine, round: Duration) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let limits = PluginLimits { engine, ..PluginLimits::default() };
        let plugins = Plugins::start(&limits, &Compiler::Here, cache, None)?;
        let tenant = Tenant::from(TENANT);
        let configure = |plugin, settings: &str| {
            runtime.block_on(plugins.configure(&tenant, plugins.built_in(plugin), settings, 1))
        };
        let filter = configure(BuiltIn::TypeFilter, &type_filter())?;
        let transform = configure(BuiltIn::FragmentsToCopy, FRAGMENTS)?;
        let projection = Projection::parse(FRAGMENTS)?;
        let messages = (0..MOST).map(|number| Arc::new(message(&tenant, number))).collect();
        Ok(Self { runtime, plugins, filter, transform, projection, messages, round })
    }

    /// The guests do what their twins do.
    fn check(&self) -> Result<()> {
        let verdicts = self.runtime.block_on(self.plugins.judge(self.batches(&self.filter, MOST, 1)));
        ensure!(
            verdicts[0].answers.iter().all(|verdict| *verdict == Ok(true)),
            "type-filter does not pass every message"
        );
        let shaped = self.runtime.block_on(self.plugins.shape(self.batches(&self.transform, MOST, 1)));
        for (message, body) in self.messages.iter().zip(&shaped[0].answers) {
            let guest = body.as_ref().map_err(Fault::clone)?;
            ensure!(*guest == self.projected(message)?, "fragments-to-copy differs from its twin");
            ensure!(guest.len() < message.body.len(), "fragments-to-copy cuts nothing off");
        }
        Ok(())
    }

    /// Rows for the filters that users upload.
    fn uploaded(&self, how: &str, limited: bool, rounds: usize, report: &mut Report) -> Result<()> {
        for (version, Uploaded { name, source, settings, twin, limit }) in (1..).zip(&FILTERS) {
            let filter = self.upload("uploaded", version, *source, settings)?;
            let verdicts = self.runtime.block_on(self.plugins.judge(self.batches(&filter, MOST, 1)));
            for (message, verdict) in self.messages.iter().zip(&verdicts[0].answers) {
                ensure!(*verdict == Ok(twin(message)), "{name} differs from its twin");
            }
            self.beside(&filter, *twin, rounds, |size, costs| {
                let limit = limit.filter(|_| limited && size >= 16).map(Limit::Nanoseconds);
                report.add(row(&format!("{name}{how}"), size, 1, costs, "native", limit));
            })?;
        }
        Ok(())
    }

    fn upload(&self, name: &str, version: u32, source: Source<'_>, settings: &str) -> Result<Instance> {
        let id = PluginId { tenant: Some(TENANT.into()), name: name.into(), version };
        let plugin = self.runtime.block_on(self.plugins.load(id, source))?;
        self.configure(&plugin, settings)
    }

    fn configure(&self, plugin: &Plugin, settings: &str) -> Result<Instance> {
        Ok(self.runtime.block_on(self.plugins.configure(&TENANT.into(), plugin, settings, 1))?)
    }

    /// Rows for a filter that is uploaded beside one of the same logic that is built in.
    fn as_built_in(
        &self,
        name: &str,
        source: Source<'_>,
        settings: &str,
        limit: f64,
        rounds: usize,
        report: &mut Report,
    ) -> Result<()> {
        let uploaded = self.upload(name, 1, source, settings)?;
        let built_in = self.runtime.block_on(self.plugins.built_in_named("threshold"));
        let built_in = self.configure(&built_in.context("there is no threshold")??, THRESHOLD_SETTINGS)?;
        for (size, calls) in UPLOADED {
            self.ask(&uploaded, size, calls)?;
            let both = || Ok((self.ask(&uploaded, size, calls)?, self.ask(&built_in, size, calls)?.processor));
            let costs = (0..rounds).map(|_| both()).collect::<Result<_>>()?;
            let limit = (size >= 16).then_some(Limit::Times(limit));
            report.add(row(name, size, calls, costs, "built in", limit));
        }
        Ok(())
    }

    /// What [`MANY`] filters, each of which has judged a message, add to the memory.
    fn weigh(
        &self,
        what: &str,
        limit: f64,
        report: &mut Report,
        filter: impl Fn(usize) -> Result<Instance>,
    ) -> Result<()> {
        let before = process::memory("self")?;
        let mut held = Vec::with_capacity(MANY);
        for number in 0..MANY {
            let filter = filter(number)?;
            let verdicts = self.runtime.block_on(self.plugins.judge(self.batches(&filter, 1, 1)));
            ensure!(verdicts[0].answers[0].is_ok(), "{filter:?} failed");
            held.push(filter);
        }
        ensure!(self.plugins.live_instances() >= MANY, "not all {what} are live");
        let after = process::memory("self")?;
        let (resident, anonymous) = (after.resident - before.resident, after.anonymous - before.anonymous);
        report.add(Row {
            figure: format!("{MANY} {what}"),
            measured: format!("{resident:.1} MB, {anonymous:.1} MB of it in no file"),
            target: Some(Target::at_most(resident, limit, " MB")),
            ..Row::default()
        });
        Ok(())
    }

    /// The costs of a filter and of its native twin, by the size of a call.
    fn beside(
        &self,
        filter: &Instance,
        twin: fn(&Message) -> bool,
        rounds: usize,
        mut add: impl FnMut(usize, Costs),
    ) -> Result<()> {
        for (size, calls) in UPLOADED {
            self.ask(filter, size, calls)?;
            let native = || self.native(|message| Ok(twin(message)));
            let costs = (0..rounds).map(|_| Ok((self.ask(filter, size, calls)?, native()?))).collect::<Result<_>>()?;
            add(size, costs);
        }
        Ok(())
    }

    fn judge(&self, size: usize, calls: usize) -> Result<Cost> {
        self.ask(&self.filter, size, calls)
    }

    fn ask(&self, filter: &Instance, size: usize, calls: usize) -> Result<Cost> {
        self.cost(filter, || {
            let verdicts = self.runtime.block_on(self.plugins.judge(self.batches(filter, size, calls)));
            ensure!(verdicts.iter().flat_map(|answered| &answered.answers).all(Result::is_ok), "{filter:?} failed");
            Ok(size * calls)
        })
    }

    /// What [`Bench::ask`] does, as the line does it: of types that it has been asked about, the verdicts are remembered.
    fn recall(&self, size: usize) -> Result<Cost> {
        let (before, started) = (processor_time()?, Instant::now());
        let messages = self.for_a_round(|| {
            let verdicts = self.runtime.block_on(self.plugins.verdicts(self.batches(&self.filter, size, 1)));
            ensure!(verdicts[0].answers.iter().all(|verdict| *verdict == Ok(true)), "type-filter failed");
            Ok(size)
        })?;
        let used = processor_time()?.saturating_sub(before);
        Ok(Cost { wall: each(started.elapsed(), messages), processor: each(used, messages) })
    }

    fn shape(&self, size: usize, calls: usize) -> Result<Cost> {
        self.cost(&self.transform, || {
            let batches = self.batches(&self.transform, size, calls);
            let bodies = self.runtime.block_on(self.plugins.shape(batches));
            ensure!(
                bodies.iter().flat_map(|answered| &answered.answers).all(Result::is_ok),
                "fragments-to-copy failed"
            );
            Ok(size * calls)
        })
    }

    fn parse(&self) -> Result<f64> {
        self.native(|message| Ok(serde_json::from_slice::<Value>(&message.body)?))
    }

    fn project(&self) -> Result<f64> {
        self.native(|message| self.projected(message))
    }

    fn native<T>(&self, work: impl Fn(&Message) -> Result<T>) -> Result<f64> {
        let before = processor_time()?;
        let messages = self.for_a_round(|| {
            for message in &self.messages {
                black_box(work(black_box(message))?);
            }
            Ok(self.messages.len())
        })?;
        Ok(each(processor_time()?.saturating_sub(before), messages))
    }

    fn projected(&self, message: &Message) -> Result<Vec<u8>> {
        let mut body = message.body.to_vec();
        self.projection.project(message.api.as_str(), &mut body)?;
        Ok(body)
    }

    fn batches(&self, instance: &Instance, size: usize, calls: usize) -> Batches {
        (0..calls).map(|_| (instance.clone(), self.messages[..size].to_vec())).collect()
    }

    /// What the calls that `work` makes of the instance cost.
    fn cost(&self, instance: &Instance, work: impl FnMut() -> Result<usize>) -> Result<Cost> {
        let used = || self.plugins.usage(instance.tenant(), instance.plugin().id()).processor_time;
        let (before, started) = (used(), Instant::now());
        let messages = self.for_a_round(work)?;
        Ok(Cost { wall: each(started.elapsed(), messages), processor: each(used().saturating_sub(before), messages) })
    }

    /// The messages that `work` has handled; it tells how many each time.
    fn for_a_round(&self, mut work: impl FnMut() -> Result<usize>) -> Result<usize> {
        let until = Instant::now() + self.round;
        let mut messages = 0;
        while Instant::now() < until {
            messages += work()?;
        }
        Ok(messages)
    }
}

/// Of this thread.
fn processor_time() -> Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

/// Nanoseconds.
fn each(time: Duration, messages: usize) -> f64 {
    time.as_nanos() as f64 / messages as f64
}

/// What `tidegate plugin new --lang c` writes, built as its README says.
fn threshold_in_c(folder: &Path) -> Result<Vec<u8>> {
    let new = ["plugin", "new", "--lang", "c", "--world", "filter", "in-c"];
    run(Command::new(crate::binary()).args(new).current_dir(folder))?;
    let project = folder.join("in-c");
    let source = project.join("plugin.c");
    let text = fs::read_to_string(&source)?;
    let adapted = text.replace("/c8y_Temperature/T/value", "/c8y_Temperature/inside/value");
    ensure!(adapted != text, "the project reads another value");
    fs::write(&source, adapted)?;
    run(Command::new("make").current_dir(&project))?;
    Ok(fs::read(project.join("in-c.wasm"))?)
}

fn run(command: &mut Command) -> Result<()> {
    let ended = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(ended.status.success(), "{command:?}: {}", String::from_utf8_lossy(&ended.stderr));
    Ok(())
}

fn message(tenant: &Tenant, number: usize) -> Message {
    let kind = TYPES[number % TYPES.len()];
    let source = (1_000 + number).to_string();
    let time = now();
    Message {
        tenant: tenant.clone(),
        api: Api::Measurements,
        action: Action::Create,
        source: source.as_str().into(),
        kind: Some(kind.into()),
        body: body(&source, kind, &time).into(),
        time: time.into(),
    }
}
