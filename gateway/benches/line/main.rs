//! Every published figure of the line, measured in one run on one machine: `cargo bench --bench line`.
//!
//! What is measured stands beside what it is compared with, in interleaved rounds; the table ends with each target and whether
//! it was met. `-- --quick` takes a few minutes; `-- posts`, `-- plugins`, `-- footprint` and `-- scale` run one part;
//! `BENCH_BACKLOG` sets the messages that wait at the restart (1,000,000). `-- soak` is run on its own: `BENCH_MINUTES` (10).
//! `cargo bench --profile dist --bench line` measures the binary of the packages.

mod chart;
mod consumer;
mod footprint;
mod gateway;
mod http;
mod inbox;
mod load;
mod measurement;
mod noop;
mod plugins;
mod posts;
mod process;
mod report;
mod scale;
mod scene;
mod soak;
mod stats;

use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};

use report::Report;

/// The gateway's: plugins are measured in this process.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long and how often everything is measured.
struct Plan {
    parts: Vec<Part>,
    devices: usize,
    in_flight: &'static [usize],
    rounds: usize,
    round: Duration,
    starts: usize,
    backlog: u64,
    /// Subscriptions that do not match.
    subscriptions: [usize; 2],
    /// Consumers that are connected at once.
    crowd: usize,
    soak: Duration,
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Posts,
    Plugins,
    Footprint,
    Scale,
    Soak,
}

impl Plan {
    fn read(args: &[String]) -> Result<Self> {
        let quick = args.iter().any(|arg| arg == "--quick");
        let mut parts = Vec::new();
        for arg in args {
            match arg.as_str() {
                "posts" => parts.push(Part::Posts),
                "plugins" => parts.push(Part::Plugins),
                "footprint" => parts.push(Part::Footprint),
                "scale" => parts.push(Part::Scale),
                "soak" => parts.push(Part::Soak),
                // Cargo adds `--bench`.
                "--quick" | "--bench" => {}
                other => bail!("unknown argument {other:?}: --quick, posts, plugins, footprint, scale, soak"),
            }
        }
        if parts.is_empty() {
            parts = vec![Part::Posts, Part::Plugins, Part::Footprint, Part::Scale];
        }
        let minutes: f64 = variable("BENCH_MINUTES")?.unwrap_or(10.0);
        Ok(Self {
            parts,
            devices: 1_000,
            in_flight: &[1, 16, 64, 256],
            rounds: 3,
            round: Duration::from_millis(if quick { 500 } else { 3_000 }),
            starts: if quick { 3 } else { 5 },
            backlog: variable("BENCH_BACKLOG")?.unwrap_or(if quick { 100_000 } else { 1_000_000 }),
            subscriptions: if quick { [100, 1_000] } else { [1_000, 10_000] },
            crowd: if quick { 100 } else { 1_000 },
            soak: Duration::from_secs_f64(minutes * 60.0),
        })
    }

    fn run(&self, report: &mut Report) -> Result<()> {
        for part in &self.parts {
            match part {
                Part::Posts => posts::measure(self, report)?,
                Part::Plugins => plugins::measure(self, report)?,
                Part::Footprint => footprint::measure(self, report)?,
                Part::Scale => scale::measure(self, report)?,
                Part::Soak => soak::measure(self, report)?,
            }
        }
        Ok(())
    }
}

/// A number from the environment.
fn variable<T: FromStr>(name: &str) -> Result<Option<T>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| anyhow!("{name} is not a number"))
}

/// The binary that is measured.
fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_tidegate"))
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match args.split_first() {
        Some((first, headers)) if first == noop::ARGUMENT => noop::serve(headers),
        _ => bench(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::note(&format!("failed: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Prints what was measured also when a later part fails.
fn bench(args: &[String]) -> Result<()> {
    let plan = Plan::read(args)?;
    let mut report = Report::default();
    let outcome = plan.run(&mut report);
    report.print()?;
    outcome
}
