//! Faults that tests ask for by environment variables. Without the feature `faults` there are none.

/// A place where `TIDEGATE_FAULT=kill-at:<name>` ends the process as kill -9 would; with `kill-at:<name>:<n>` at the n-th time.
/// `panic-at` lets the task panic there, and `stop-at` ends the process as SIGTERM does.
#[inline]
pub(crate) fn point(name: &str) {
    #[cfg(feature = "faults")]
    asked::fail_at(name);
    #[cfg(not(feature = "faults"))]
    let _ = name;
}

#[cfg(feature = "faults")]
pub(crate) use asked::{answer_before_commit, clock_ms};

#[cfg(feature = "faults")]
mod asked {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{LazyLock, Mutex, PoisonError};
    use std::time::{Duration, Instant};

    use nix::sys::signal::{Signal, raise};

    pub(super) fn fail_at(name: &str) {
        struct Wanted {
            point: String,
            left: AtomicU64,
            how: String,
        }
        static WANTED: LazyLock<Option<Wanted>> = LazyLock::new(|| {
            let fault = std::env::var("TIDEGATE_FAULT").ok()?;
            let (how, at) = fault.split_once("-at:").filter(|(how, _)| matches!(*how, "kill" | "panic" | "stop"))?;
            let (point, times) = at.split_once(':').unwrap_or((at, "1"));
            let times = times.parse().expect("TIDEGATE_FAULT=kill-at:<name>:<n>");
            Some(Wanted { point: point.to_owned(), left: AtomicU64::new(times), how: how.to_owned() })
        });
        if let Some(Wanted { point, left, how }) = &*WANTED
            && point == name
            && left.fetch_sub(1, Ordering::Relaxed) == 1
        {
            assert!(how != "panic", "TIDEGATE_FAULT asks for it");
            let _ = raise(if how == "stop" { Signal::SIGTERM } else { Signal::SIGKILL });
        }
    }

    /// `TIDEGATE_FAULT=answer-before-commit`: producers are told that a batch is safe before it is. A gateway that does this loses
    /// messages when it is killed, and the crash test has to notice.
    pub(crate) async fn answer_before_commit<I>(batch: Vec<I>, answer: impl Fn(I) -> I) -> Vec<I> {
        if std::env::var("TIDEGATE_FAULT").is_ok_and(|fault| fault == "answer-before-commit") {
            let batch = batch.into_iter().map(answer).collect();
            tokio::time::sleep(Duration::from_millis(5)).await;
            batch
        } else {
            batch
        }
    }

    /// `TIDEGATE_FAULT_CLOCK=FILE`: the time of day is wrong by the milliseconds in the file, which is read again every now and then.
    pub(crate) fn clock_ms() -> i64 {
        const READ_EVERY: Duration = Duration::from_millis(50);
        static KNOWN: Mutex<Option<(Instant, i64)>> = Mutex::new(None);
        let Some(file) = std::env::var_os("TIDEGATE_FAULT_CLOCK") else { return 0 };
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((read, ms)) = *known
            && read.elapsed() < READ_EVERY
        {
            return ms;
        }
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let ms = text.trim().parse().unwrap_or_default();
        *known = Some((Instant::now(), ms));
        ms
    }
}
