//! Every published figure of the line, measured in one run on one machine: `cargo bench --bench line`.
//!
//! What is measured stands beside what it is compared with, in interleaved rounds; the table ends with each target and whether
//! it was met. `-- --quick` takes about a minute; `-- posts`, `-- plugins` and `-- footprint` run one part;
//! `BENCH_BACKLOG` sets the messages that wait at the restart (1,000,000). `cargo bench --profile dist --bench line` measures
//! the binary of the packages.

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
mod scene;
mod stats;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use report::Report;

/// How long and how often everything is measured.
struct Plan {
    parts: Vec<Part>,
    devices: usize,
    in_flight: &'static [usize],
    rounds: usize,
    round: Duration,
    starts: usize,
    backlog: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Posts,
    Plugins,
    Footprint,
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
                // Cargo adds `--bench`.
                "--quick" | "--bench" => {}
                other => bail!("unknown argument {other:?}: --quick, posts, plugins, footprint"),
            }
        }
        if parts.is_empty() {
            parts = vec![Part::Posts, Part::Plugins, Part::Footprint];
        }
        let backlog = match std::env::var("BENCH_BACKLOG") {
            Ok(text) => text.parse().context("BENCH_BACKLOG is not a number")?,
            Err(_) if quick => 100_000,
            Err(_) => 1_000_000,
        };
        Ok(Self {
            parts,
            devices: 1_000,
            in_flight: &[1, 16, 64, 256],
            rounds: 3,
            round: Duration::from_millis(if quick { 500 } else { 3_000 }),
            starts: if quick { 3 } else { 5 },
            backlog,
        })
    }

    fn run(&self, report: &mut Report) -> Result<()> {
        for part in &self.parts {
            match part {
                Part::Posts => posts::measure(self, report)?,
                Part::Plugins => plugins::measure(self, report)?,
                Part::Footprint => footprint::measure(self, report)?,
            }
        }
        Ok(())
    }
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
