//! Answers that are not sent yet: large ones take room of a common budget until the client has read them.
//!
//! ```text
//! answer ─▶ Unsent::hold ─▶ the same, piece by piece ─▶ socket (which ends who reads too slowly)
//!               └─▶ no room: 503, or the bare status of what was carried out
//! ```

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::{Body, HttpBody as _};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::api::{ApiError, SMALL_BODY};
use crate::telemetry::{UnsentBytes, answers_lost};

/// Bytes that are handed to the connection at a time. It copies them, and keeps room for them afterwards.
pub(crate) const PIECE_BYTES: usize = 16 << 10;
/// What the budget is counted in, since permits are 32 bits.
const UNIT_BYTES: usize = 1 << 10;

/// The budget for answers that are longer than [`SMALL_BODY`] and not sent yet. Cheap to clone.
#[derive(Clone)]
pub struct Unsent {
    room: Arc<Semaphore>,
    units: usize,
}

impl Unsent {
    /// Room for so many bytes, or for one answer that is longer.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let units = bytes.div_ceil(UNIT_BYTES);
        Self { room: Arc::new(Semaphore::new(units)), units }
    }

    /// Gives an answer its room. Where there is none, one that `may_be_repeated` becomes a 503; another one loses its body, since its
    /// status has to tell what was done.
    #[must_use]
    pub fn hold(&self, mut response: Response, may_be_repeated: bool) -> Response {
        let length = response.body().size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
        let Some(length) = length.filter(|length| *length > SMALL_BODY) else { return response };
        let units = u32::try_from(length.div_ceil(UNIT_BYTES).min(self.units)).unwrap_or(u32::MAX);
        if let Ok(room) = self.room.clone().try_acquire_many_owned(units) {
            let counted = UnsentBytes::new(length);
            return response.map(|body| Body::new(Held { body, piece: Bytes::new(), _room: room, _counted: counted }));
        }
        answers_lost("no_room").increment(1);
        if may_be_repeated {
            return ApiError::busy("Too many large answers wait to be read.").into_response();
        }
        for header in [CONTENT_TYPE, CONTENT_LENGTH] {
            response.headers_mut().remove(header);
        }
        response.map(|_| Body::empty())
    }
}

/// A body that holds its room until the connection has taken all of it.
struct Held {
    body: Body,
    /// What has come of it and was not handed on yet.
    piece: Bytes,
    _room: OwnedSemaphorePermit,
    _counted: UnsentBytes,
}

impl hyper::body::Body for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        if this.piece.is_empty() {
            match ready!(Pin::new(&mut this.body).poll_frame(context)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => this.piece = data,
                Some(Ok(Err(trailers))) => return Poll::Ready(Some(Ok(trailers))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        let piece = this.piece.split_to(this.piece.len().min(PIECE_BYTES));
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.piece.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.body.size_hint().exact().unwrap_or_default();
        SizeHint::with_exact(rest + self.piece.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use http_body_util::BodyExt as _;
    use hyper::StatusCode;

    use super::*;

    fn answer(bytes: usize) -> Response {
        (StatusCode::CREATED, [(CONTENT_TYPE, "application/json")], vec![b'x'; bytes]).into_response()
    }

    #[tokio::test]
    async fn an_answer_has_its_room_until_its_last_piece_is_taken() {
        let unsent = Unsent::new(200 << 10);
        let mut held = unsent.hold(answer(150 << 10), true).into_body();
        assert_eq!(held.size_hint().exact(), Some(150 << 10));
        let mut taken = 0;
        while let Some(frame) = held.frame().await {
            let bytes = frame.unwrap().into_data().unwrap().len();
            assert!(bytes <= PIECE_BYTES);
            taken += bytes;
            assert_eq!(held.size_hint().exact(), Some((150 << 10) - taken as u64));
            assert_eq!(unsent.room.available_permits(), 50);
        }
        assert!(held.is_end_stream());
        assert_eq!(taken, 150 << 10);
        drop(held);
        assert_eq!(unsent.room.available_permits(), 200);
    }

    #[tokio::test]
    async fn without_room_large_answers_are_refused_or_lose_their_bodies() {
        let unsent = Unsent::new(200 << 10);
        let _held = unsent.hold(answer(150 << 10), true);
        assert_eq!(unsent.hold(answer(SMALL_BODY), true).status(), StatusCode::CREATED, "small ones need none");
        let refused = unsent.hold(answer(100 << 10), true);
        assert_eq!(
            (refused.status(), &refused.headers()["retry-after"]),
            (StatusCode::SERVICE_UNAVAILABLE, &"1".parse().unwrap())
        );
        let done = unsent.hold(answer(100 << 10), false);
        assert_eq!((done.status(), done.headers().len()), (StatusCode::CREATED, 0));
        assert_eq!(done.into_body().collect().await.unwrap().to_bytes().len(), 0);
    }

    #[test]
    fn one_answer_may_be_longer_than_the_budget() {
        let unsent = Unsent::new(100 << 10);
        let held = unsent.hold(answer(1 << 20), true);
        assert_eq!((held.status(), unsent.room.available_permits()), (StatusCode::CREATED, 0));
    }
}
