//! The table, as Markdown, and its place in the README.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::{Context, Result};

use crate::binary::ROOT;
use crate::report::{machine, note, ratio};
use crate::stats::median;
use crate::system::Round;

const BEGIN: &str = "<!-- comparison -->\n";
const END: &str = "<!-- end of the comparison -->\n";

/// A system's rounds with so many consumers.
pub(crate) struct Cell {
    pub(crate) name: String,
    /// Memory of the server in MB, at the end.
    pub(crate) resident: f64,
    pub(crate) rounds: Vec<Round>,
}

/// All that was measured.
#[derive(Default)]
pub(crate) struct Table(Vec<(usize, Vec<Cell>)>);

impl Table {
    /// Adds the systems with so many consumers; the first two are what is promised, singly and together, the others are what they
    /// are held against.
    pub(crate) fn add(&mut self, consumers: usize, cells: Vec<Cell>) {
        self.0.push((consumers, cells));
    }

    pub(crate) fn render(&self) -> String {
        let mut text = format!("```\n{}```\n\n", machine());
        text.push_str("| consumers | system | messages/s | p99 | server CPU | client CPU | server memory | Tidegate is | 16 in a POST are | wanted |\n");
        text.push_str("|---|---|---|---|---|---|---|---|---|---|\n");
        for (consumers, cells) in &self.0 {
            for cell in cells {
                cell.render(*consumers, &cells[..2], &mut text);
            }
        }
        text
    }
}

impl Cell {
    fn render(&self, consumers: usize, ours: &[Self], text: &mut String) {
        let figure = |of: fn(&Round) -> f64| median(self.rounds.iter().map(of));
        let target = target(&self.name, consumers);
        let times = ours.iter().map(|ours| match target {
            Some(target) => {
                let rounds = ours.rounds.iter().zip(&self.rounds);
                let ratios: Vec<f64> = rounds.map(|(ours, other)| ours.rate / other.rate).collect();
                format!("{} {}", ratio(&ratios), verdict(median(ratios), target))
            }
            None => String::new(),
        });
        let times = times.collect::<Vec<_>>().join(" | ");
        let wanted = target.map(|target| format!("≥ {target:.1}")).unwrap_or_default();
        let _ = writeln!(
            text,
            "| {consumers} | {} | {:.0} | {:.1} ms | {:.1} µs | {:.1} µs | {:.0} MB | {times} | {wanted} |",
            self.name,
            figure(|round| round.rate),
            figure(|round| round.p99),
            figure(|round| round.server),
            figure(|round| round.client),
            self.resident,
        );
    }
}

/// How many times as fast as this system Tidegate promises to be.
fn target(system: &str, consumers: usize) -> Option<f64> {
    match (system, consumers) {
        (name, 1) if name.starts_with("NATS") => Some(1.0),
        (name, 4) if name.starts_with("NATS") => Some(1.5),
        (name, 16) if name.starts_with("NATS") => Some(3.0),
        (name, _) if name.starts_with("Mosquitto") => Some(1.0),
        _ => None,
    }
}

fn verdict(is: f64, wanted: f64) -> &'static str {
    if is >= wanted { "ok" } else { "**missed**" }
}

pub(crate) fn print(text: &str) -> Result<()> {
    Ok(io::stdout().lock().write_all(text.as_bytes())?)
}

/// Puts the table between the markers in the README.
pub(crate) fn replace(text: &str) -> Result<()> {
    let file = Path::new(ROOT).join("README.md");
    let readme = std::fs::read_to_string(&file)?;
    let (before, rest) = readme.split_once(BEGIN).context("the README has no place for the table")?;
    let (_, after) = rest.split_once(END).context("the place for the table in the README has no end")?;
    std::fs::write(&file, format!("{before}{BEGIN}{text}{END}{after}"))?;
    note("the table is in README.md");
    print(text)
}
