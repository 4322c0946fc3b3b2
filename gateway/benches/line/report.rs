//! The table, with each target and whether it was met, under a description of the machine.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::Command;

use crate::gateway;
use crate::stats::median;

/// One line of the table.
#[derive(Default)]
pub(crate) struct Row {
    pub(crate) figure: String,
    pub(crate) measured: String,
    /// What it is compared with, measured in the same rounds.
    pub(crate) beside: String,
    /// Measured by beside, one for each round.
    pub(crate) ratios: Vec<f64>,
    pub(crate) target: Option<Target>,
}

/// A promise and whether it was kept.
pub(crate) struct Target {
    text: String,
    met: bool,
}

impl Target {
    pub(crate) fn at_least(value: f64, must: f64, ambition: f64) -> Self {
        Self { text: format!(">= {must} (ambition {ambition})"), met: value >= must }
    }

    pub(crate) fn at_most(value: f64, must: f64, unit: &str) -> Self {
        Self { text: format!("<= {must}{unit}"), met: value <= must }
    }
}

/// All lines so far.
#[derive(Default)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

impl Report {
    pub(crate) fn add(&mut self, row: Row) {
        note(&format!("  {}: {} {}", row.figure, row.measured, ratio(&row.ratios)));
        self.rows.push(row);
    }

    pub(crate) fn print(&self) -> io::Result<()> {
        let mut lines =
            vec![["figure", "measured", "beside", "ratio (min..max)", "target", "verdict"].map(String::from)];
        lines.extend(self.rows.iter().map(Row::cells));
        let widths = [0, 1, 2, 3, 4, 5].map(|column| lines.iter().map(|line| line[column].len()).max().unwrap_or(0));
        let mut text = machine();
        for line in &lines {
            for (cell, width) in line.iter().zip(widths) {
                let _ = write!(text, "{cell:width$}  ");
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        let missed = self.rows.iter().filter(|row| row.target.as_ref().is_some_and(|target| !target.met)).count();
        let _ = writeln!(text, "\n{missed} targets missed");
        io::stdout().lock().write_all(text.as_bytes())
    }
}

impl Row {
    fn cells(&self) -> [String; 6] {
        let (target, verdict) = match &self.target {
            Some(target) => (target.text.clone(), if target.met { "ok" } else { "MISSED" }),
            None => (String::new(), ""),
        };
        [self.figure.clone(), self.measured.clone(), self.beside.clone(), ratio(&self.ratios), target, verdict.into()]
    }
}

pub(crate) fn ratio(ratios: &[f64]) -> String {
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let most = ratios.iter().copied().fold(0.0, f64::max);
    match ratios.len() {
        0 => String::new(),
        _ => format!("{:.2} ({least:.2}..{most:.2})", median(ratios.iter().copied())),
    }
}

/// Says on standard error how far the run is.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

pub(crate) fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let processors = read("/proc/cpuinfo");
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    let commit = git(&["rev-parse", "--short=12", "HEAD"]);
    let changes = if git(&["status", "--porcelain"]).is_empty() { "" } else { " with changes" };
    format!(
        "machine  {cores} cores, {}, Linux {}, load {}\ncommit   {}{changes}, profile {}\ndate     {:.0}\n\n",
        model.trim_start_matches([' ', '\t', ':']),
        read("/proc/sys/kernel/osrelease").trim(),
        read("/proc/loadavg").split(' ').next().unwrap_or_default(),
        if commit.is_empty() { "unknown" } else { &commit },
        gateway::profile(),
        jiff::Timestamp::now(),
    )
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn git(args: &[&str]) -> String {
    let output = Command::new("git").args(args).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    output.map_or_else(|_| String::new(), |output| String::from_utf8_lossy(&output.stdout).trim().into())
}
