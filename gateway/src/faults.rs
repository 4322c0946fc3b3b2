//! Faults that crash tests ask for by the environment variable `TIDEGATE_FAULT`. Only with the feature `faults`.

use std::time::Duration;

/// `answer-before-commit`: producers are told that a batch is safe before it is. A gateway that does this loses
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
