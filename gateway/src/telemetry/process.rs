//! The process itself, under the names that Prometheus' own clients give it.

use std::fs;
use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

use metrics::{counter, gauge};
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};

/// When the process began to serve, in seconds since the epoch.
static STARTED: LazyLock<f64> =
    LazyLock::new(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()));

pub(super) fn register() {
    LazyLock::force(&STARTED);
}

/// What cannot be asked on this system is left out.
pub(super) fn observe() {
    gauge!("tidegate_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    gauge!("process_start_time_seconds").set(*STARTED);
    if let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) {
        let seconds = usage.user_time().tv_sec() + usage.system_time().tv_sec();
        counter!("process_cpu_seconds_total").absolute(seconds.unsigned_abs());
    }
    if let Some(bytes) = resident_bytes() {
        gauge!("process_resident_memory_bytes").set(bytes as f64);
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        // One of them is the directory itself.
        gauge!("process_open_fds").set(open.count().saturating_sub(1) as f64);
    }
    if let Ok((most, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
        gauge!("process_max_fds").set(most as f64);
    }
}

fn resident_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().strip_suffix("kB")?;
    kib.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}
