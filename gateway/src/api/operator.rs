//! What operators and their tools ask: health and metrics.

use axum::extract::State;
use hyper::StatusCode;

use super::{ApiError, AppState, Caller};
use crate::auth::Role;

/// The process answers.
pub(super) async fn live() -> &'static str {
    "ok\n"
}

/// The gateway takes requests: not any more once it is stopping.
pub(super) async fn ready(State(app): AppState) -> (StatusCode, &'static str) {
    if app.stopping.is_cancelled() { (StatusCode::SERVICE_UNAVAILABLE, "stopping\n") } else { (StatusCode::OK, "ok\n") }
}

/// Metrics in Prometheus' text format.
pub(super) async fn metrics(State(app): AppState, caller: Caller) -> Result<String, ApiError> {
    caller.require(Role::TidegateOperator)?;
    Ok(app.metrics.render())
}
