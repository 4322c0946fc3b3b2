//! What operators and their tools ask: health, metrics and backups.

use std::fs::File;
use std::io::{self, Read as _};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts as _, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use hyper::StatusCode;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE};

use super::{ApiError, App, AppState, Caller, figures};
use crate::auth::Role;
use crate::store::{self, Size};

/// How long a scrape waits for the sizes of the database; it goes without them then.
const SIZE_WAIT: Duration = Duration::from_secs(2);
/// The text format of Prometheus (docs of the exposition formats).
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Bytes of a backup that are in memory at a time.
const PIECE_BYTES: usize = 256 << 10;

/// The process answers.
pub(super) async fn live() -> &'static str {
    "ok\n"
}

/// The gateway takes requests, or why it does not.
pub(super) async fn ready(State(app): AppState) -> (StatusCode, String) {
    match trouble(&app) {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
    }
}

/// Why the gateway should get no requests now.
pub(super) fn trouble(app: &App) -> Option<String> {
    if app.stopping.is_cancelled() {
        return Some("the gateway is stopping".to_owned());
    }
    app.writer.health().err().map(|unwell| unwell.to_string())
}

/// Metrics in Prometheus' text format.
pub(super) async fn metrics(State(app): AppState, request: Request) -> Result<Response, ApiError> {
    if !app.config.metrics.public {
        Caller::from_request_parts(&mut request.into_parts().0, &app).await?.require(Role::TidegateOperator)?;
    }
    let size = tokio::time::timeout(SIZE_WAIT, Size::of(&app.store)).await;
    let size = size.ok().and_then(Result::ok);
    // With thousands of series it takes milliseconds, which others would wait for.
    let render = move || app.metrics.render(|| figures::observe(&app, size.as_ref()));
    let text = tokio::task::spawn_blocking(render).await.map_err(|error| {
        tracing::error!(%error, "the metrics could not be rendered");
        ApiError::internal("the metrics could not be rendered")
    })?;
    Ok(([(CONTENT_TYPE, TEXT_FORMAT)], text).into_response())
}

/// A copy of the database. It is made before the answer begins, so that a slow client holds up nothing.
pub(super) async fn backup(State(app): AppState, caller: Caller) -> Result<Response, ApiError> {
    caller.require(Role::TidegateOperator)?;
    let copy = store::copy(&app.long_reads, app.config.store.reserve_bytes).await?;
    let bytes = copy.metadata().map_err(store::CopyError::from)?.len();
    let pieces = stream::try_unfold(copy, |copy| async {
        tokio::task::spawn_blocking(move || next_piece(copy)).await.map_err(io::Error::other)?
    });
    let headers = [(CONTENT_TYPE, "application/vnd.sqlite3".to_owned()), (CONTENT_LENGTH, bytes.to_string())];
    Ok((headers, Body::from_stream(pieces)).into_response())
}

fn next_piece(mut file: File) -> io::Result<Option<(Bytes, File)>> {
    let mut piece = Vec::with_capacity(PIECE_BYTES);
    (&mut file).take(PIECE_BYTES as u64).read_to_end(&mut piece)?;
    Ok((!piece.is_empty()).then(|| (piece.into(), file)))
}
