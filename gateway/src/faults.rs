//! Faults that tests ask for by environment variables. Only with the feature `faults`.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

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
