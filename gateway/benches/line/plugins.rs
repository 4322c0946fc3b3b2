//! What a message costs in the built-in guests, beside native code: CPU time of the whole process, so that handing the batch
//! over to another thread counts too.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fragments_to_copy::Projection;
use serde_json::Value;
use tidegate::config::PluginEngine;
use tidegate::message::{Action, Api, Message, Tenant};
use tidegate::plugin::compiler::Compiler;
use tidegate::plugin::{BuiltIn, Fault, Instance, PluginId, PluginLimits, Plugins, Source, World};
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
    twin: fn(&Message) -> bool,
    /// Nanoseconds of a message in large batches, compiled.
    limit: f64,
}

const FILTERS: [Uploaded; 2] = [
    Uploaded {
        name: "JavaScript by type",
        source: script("(message) => message.type === 'temperature' || message.type === 'pressure'"),
        twin: by_type,
        limit: 5_000.0,
    },
    Uploaded {
        name: "JavaScript by body",
        source: script("(message) => message.body.c8y_Temperature.inside.value > 20"),
        twin: by_body,
        limit: 20_000.0,
    },
];

const fn script(text: &'static str) -> Source<'static> {
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

type Batches = Vec<(Instance, Vec<Arc<Message>>)>;

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
    for (size, calls) in CASES {
        bench.shape(size, calls)?;
        let costs = (0..rounds).map(|_| Ok((bench.shape(size, calls)?, bench.project()?))).collect::<Result<_>>()?;
        let limit = (size >= 16).then_some(Limit::Times(4.0));
        report.add(row("fragments-to-copy", size, calls, costs, "native", limit));
    }
    bench.uploaded("", true, rounds, report)?;
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

fn row(guest: &str, size: usize, calls: usize, costs: Vec<(f64, f64)>, twin: &str, limit: Option<Limit>) -> Row {
    let (ours, twins): (Vec<f64>, Vec<f64>) = costs.into_iter().unzip();
    let ratios: Vec<f64> = ours.iter().zip(&twins).map(|(ours, twin)| ours / twin).collect();
    let together = if calls > 1 { format!(", {calls} calls at once") } else { String::new() };
    let ours = median(ours);
    Row {
        figure: format!("{guest}, {size} a call{together}"),
        measured: format!("{ours:.0} ns a message"),
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
        for (version, Uploaded { name, source, twin, limit }) in (1..).zip(&FILTERS) {
            let id = PluginId { tenant: Some(TENANT.into()), name: "uploaded".into(), version };
            let plugin = self.runtime.block_on(self.plugins.load(id, *source))?;
            let filter = self.runtime.block_on(self.plugins.configure(&TENANT.into(), &plugin, "null", 1))?;
            let verdicts = self.runtime.block_on(self.plugins.judge(self.batches(&filter, MOST, 1)));
            for (message, verdict) in self.messages.iter().zip(&verdicts[0].answers) {
                ensure!(*verdict == Ok(twin(message)), "{name} differs from its twin");
            }
            self.beside(&filter, *twin, rounds, |size, costs| {
                let limit = (limited && size >= 16).then_some(Limit::Nanoseconds(*limit));
                report.add(row(&format!("{name}{how}"), size, 1, costs, "native", limit));
            })?;
        }
        Ok(())
    }

    /// The costs of a filter and of its native twin, by the size of a call.
    fn beside(
        &self,
        filter: &Instance,
        twin: fn(&Message) -> bool,
        rounds: usize,
        mut add: impl FnMut(usize, Vec<(f64, f64)>),
    ) -> Result<()> {
        for (size, calls) in UPLOADED {
            self.ask(filter, size, calls)?;
            let native = || self.native(|message| Ok(twin(message)));
            let costs = (0..rounds).map(|_| Ok((self.ask(filter, size, calls)?, native()?))).collect::<Result<_>>()?;
            add(size, costs);
        }
        Ok(())
    }

    fn judge(&self, size: usize, calls: usize) -> Result<f64> {
        self.ask(&self.filter, size, calls)
    }

    fn ask(&self, filter: &Instance, size: usize, calls: usize) -> Result<f64> {
        self.cost(|| {
            let verdicts = self.runtime.block_on(self.plugins.judge(self.batches(filter, size, calls)));
            ensure!(verdicts.iter().flat_map(|answered| &answered.answers).all(Result::is_ok), "{filter:?} failed");
            Ok(size * calls)
        })
    }

    fn shape(&self, size: usize, calls: usize) -> Result<f64> {
        self.cost(|| {
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
        self.cost(|| {
            for message in &self.messages {
                black_box(work(black_box(message))?);
            }
            Ok(self.messages.len())
        })
    }

    fn projected(&self, message: &Message) -> Result<Vec<u8>> {
        let mut body = message.body.to_vec();
        self.projection.project(message.api.as_str(), &mut body)?;
        Ok(body)
    }

    fn batches(&self, instance: &Instance, size: usize, calls: usize) -> Batches {
        (0..calls).map(|_| (instance.clone(), self.messages[..size].to_vec())).collect()
    }

    /// Nanoseconds of CPU time for a message; `work` gives the messages it has handled.
    fn cost(&self, mut work: impl FnMut() -> Result<usize>) -> Result<f64> {
        let threads = "/proc/self/task";
        let before = process::cpu(threads);
        let until = Instant::now() + self.round;
        let mut messages = 0;
        while Instant::now() < until {
            messages += work()?;
        }
        let spent = process::cpu(threads).checked_sub(before).context("a thread has ended in between")?;
        Ok(spent.as_nanos() as f64 / messages as f64)
    }
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
