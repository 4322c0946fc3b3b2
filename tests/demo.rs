//! `tidegate demo` as a process.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::harness::{Program, eventually};

/// Starts it with a directory for temporary files of its own.
fn demo(place: &TempDir, flags: &[&str]) -> Program {
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    // A setting of the user's own gateway, which must not reach that of the demo.
    let env = [("TMPDIR", text(place.path())), ("TIDEGATE_HTTP__ADDR", "off".to_owned())];
    let env = env.map(|(name, value)| (name.to_owned(), value));
    Program::spawn(&[&["demo"], flags].concat(), &env, place.path(), "demo")
}

/// The figures of a topic in the summary.
fn row(summary: &str, topic: &str) -> Vec<u64> {
    let row = summary.lines().find(|line| line.starts_with(topic)).unwrap_or_else(|| panic!("no {topic}: {summary}"));
    let words = row.split_whitespace().skip(1);
    words.filter_map(|word| word.parse().ok()).collect()
}

/// What the demo leaves behind.
fn left(place: &TempDir) -> BTreeSet<String> {
    fs::read_dir(place.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// The process of the gateway whose data is in `directory`.
fn gateway_of(directory: &str) -> Option<String> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let lines = processes.filter_map(|process| fs::read(process.join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).into_owned()).find(|line| line.contains(directory))
}

// Acceptance: what was sent, filtered, stored, delivered, redelivered and lost (nothing), with a restart in the middle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_shows_the_line_with_a_kill_in_the_middle_and_loses_nothing() {
    let place = tempfile::tempdir().unwrap();
    let mut program = demo(&place, &["--seconds", "10"]);
    let status = program.wait().await;
    let (shown, errors) = (program.stdout(), program.stderr());
    assert!(status.success(), "{status}: {errors}\n{shown}");
    for text in ["kill -9", "the gateway is back", "Nothing was lost"] {
        assert!(shown.contains(text), "{text:?} is not in {shown}");
    }
    assert!(shown.lines().filter(|line| line.contains(" s  sent ")).count() >= 9, "a line a second: {shown}");
    for topic in ["temperatures", "watch"] {
        let [filtered, stored, delivered, redelivered, acknowledged, repeated, lost, disordered, ..] =
            row(&shown, topic)[..]
        else {
            panic!("{shown}");
        };
        assert!(delivered > 100, "{shown}");
        assert_eq!(stored, delivered + repeated, "{shown}");
        // An acknowledgement may not have left before the kill.
        assert!((stored..=stored + redelivered).contains(&acknowledged), "{shown}");
        assert_eq!((lost, disordered, filtered > 0), (0, 0, topic == "temperatures"), "{shown}");
    }
    assert_eq!(left(&place), BTreeSet::from(["demo.err".to_owned(), "demo.out".to_owned()]));
}

#[tokio::test]
async fn ctrl_c_ends_it_early_with_the_summary_and_nothing_is_left_behind() {
    let place = tempfile::tempdir().unwrap();
    let mut program = demo(&place, &[]);
    let directory = place.path().join("tidegate-demo-");
    let directory = directory.to_str().unwrap();
    eventually("it runs", async || program.stdout().contains("  2 s  sent ").then_some(())).await;
    assert!(gateway_of(directory).is_some());
    program.signal("INT");
    let status = program.wait().await;
    let shown = program.stdout();
    assert!(status.success(), "{status}: {}\n{shown}", program.stderr());
    for text in ["Stopped early", "Nothing was lost"] {
        assert!(shown.contains(text), "{text:?} is not in {shown}");
    }
    assert!(row(&shown, "temperatures")[2] > 0, "{shown}");
    assert!(gateway_of(directory).is_none(), "its gateway still runs");
    assert_eq!(left(&place), BTreeSet::from(["demo.err".to_owned(), "demo.out".to_owned()]));
}

#[tokio::test]
async fn a_length_that_shows_nothing_or_never_ends_is_refused() {
    let place = tempfile::tempdir().unwrap();
    for seconds in ["9", "601", "x"] {
        let mut program = demo(&place, &["--seconds", seconds]);
        assert_eq!(program.wait().await.code(), Some(2));
        assert!(program.stderr().contains("--seconds"), "{}", program.stderr());
    }
}
