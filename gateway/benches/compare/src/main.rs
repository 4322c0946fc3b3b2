//! Tidegate beside NATS JetStream and Mosquitto, in interleaved rounds on one machine:
//! `cargo run --release --manifest-path gateway/benches/compare/Cargo.toml`.
//!
//! `nats-server` and `mosquitto` have to be installed; the gateway is built first. A run replaces the table in the README;
//! `-- --quick` takes about two minutes besides the build and only prints it. `-- --profile NAME` measures the binary of another Cargo profile
//! than `dist`.

mod binary;
mod broker;
mod jetstream;
mod mosquitto;
mod system;
mod table;
mod tidegate;

// What the benchmark `line` has already; it uses all of it.
#[path = "../../line/consumer.rs"]
#[allow(dead_code, reason = "shared")]
mod consumer;
#[path = "../../line/gateway.rs"]
#[allow(dead_code, reason = "shared")]
mod gateway;
#[path = "../../line/http.rs"]
#[allow(dead_code, reason = "shared")]
mod http;
#[path = "../../line/inbox.rs"]
mod inbox;
#[path = "../../line/load.rs"]
#[allow(dead_code, reason = "shared")]
mod load;
#[path = "../../line/measurement.rs"]
#[allow(dead_code, reason = "shared")]
mod measurement;
#[path = "../../line/process.rs"]
#[allow(dead_code, reason = "shared")]
mod process;
#[path = "../../line/report.rs"]
#[allow(dead_code, reason = "shared")]
mod report;
#[path = "../../line/scene.rs"]
#[allow(dead_code, reason = "shared")]
mod scene;
#[path = "../../line/stats.rs"]
mod stats;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use binary::binary;
use jetstream::JetStream;
use measurement::SendTimes;
use mosquitto::Mosquitto;
use report::note;
use system::{Round, System};
use table::{Cell, Table};
use tidegate::{How, Tidegate};

/// How many consumers get each message.
const CONSUMERS: [usize; 3] = [1, 4, 16];
const ROUNDS: usize = 3;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(&format!("failed: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<()> {
    let (mut quick, mut profile) = (false, "dist");
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--quick" => quick = true,
            "--profile" => profile = args.next().context("--profile needs the name of a Cargo profile")?,
            other => bail!("unknown argument {other:?}: --quick, --profile NAME"),
        }
    }
    binary::build(profile)?;
    let time = Duration::from_millis(if quick { 700 } else { 4_000 });
    let mut table = Table::default();
    for consumers in CONSUMERS {
        note(&format!("{consumers} consumers"));
        // On the disk of the build: a temporary folder may be memory.
        let folder = tempfile::tempdir_in(binary().parent().context("the binary has no folder")?)?;
        table.add(consumers, measure(folder.path(), consumers, time)?);
    }
    let text = table.render();
    if quick { table::print(&text) } else { table::replace(&text) }
}

/// All systems with so many consumers each, one after the other, for as many rounds.
fn measure(folder: &Path, consumers: usize, time: Duration) -> Result<Vec<Cell>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let sent = Arc::new(SendTimes::new());
    let systems: [Box<dyn System>; 5] = [
        Box::new(Tidegate::start(&folder.join("singly"), consumers, &sent, How::Singly)?),
        Box::new(Tidegate::start(&folder.join("together"), consumers, &sent, How::Together)?),
        Box::new(Tidegate::start(&folder.join("filtered"), consumers, &sent, How::Filtered)?),
        Box::new(JetStream::start(&folder.join("jetstream"), consumers, &sent, &runtime)?),
        Box::new(Mosquitto::start(&folder.join("mosquitto"), consumers, &sent, &runtime)?),
    ];
    for system in &systems {
        system::round(system.as_ref(), &sent, time / 2).context(system.name())?;
    }
    let mut rounds: [Vec<Round>; 5] = Default::default();
    for first in 0..ROUNDS {
        // Each time another one begins.
        for at in (0..systems.len()).map(|at| (first + at) % systems.len()) {
            let system = systems[at].as_ref();
            let round = system::round(system, &sent, time).context(system.name())?;
            note(&format!("  {}: {round}", system.name()));
            rounds[at].push(round);
        }
    }
    let cell = |(system, rounds): (Box<dyn System>, Vec<Round>)| {
        Ok(Cell { name: system.name(), resident: system.server().memory()?.resident, rounds })
    };
    systems.into_iter().zip(rounds).map(cell).collect()
}
