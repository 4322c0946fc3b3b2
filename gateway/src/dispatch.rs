//! The lower half of the line: from the backlog to frames for one consumer, and from its acknowledgements back.
//!
//! ```text
//! backlog ─▶ Exclusive::wanted (window, order) ─▶ bodies ─▶ frame ─▶ deliver
//! deliver ─▶ acknowledgement ─▶ Exclusive::settle ─▶ writer (the last reference frees the message)
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;

use crate::backlog::{Attached, Bodies};
use crate::consumer::{Exclusive, Wanted};
use crate::message::Message;
use crate::store::StoreError;

/// What a delivery adds to the stored form at most: acknowledgement line and `message-id` line.
pub const HEADER_BYTES: usize = 25 + "message-id:".len() + 20 + 1;

/// Messages that are read and rendered at a time.
const PAGE_MESSAGES: usize = 256;
/// Bytes that are read and rendered at a time (at least one message).
const PAGE_BYTES: usize = 1 << 20;

/// The frame of `message` without what a delivery adds: description line, action line, blank line, `body`.
///
/// Line 2 of a frame is `/<tenant>/<type>/<source>` (seed 001, "Notification message header and content"); `kind` is that type.
#[must_use]
pub fn stored_form(message: &Message, kind: &str, body: &[u8]) -> Bytes {
    let (tenant, source, action) = (message.tenant.as_str(), message.source.as_str(), message.action.as_str());
    let mut form = Vec::with_capacity(tenant.len() + kind.len() + source.len() + action.len() + body.len() + 6);
    for part in ["/", tenant, "/", kind, "/", source, "\n", action, "\n\n"] {
        form.extend_from_slice(part.as_bytes());
    }
    form.extend_from_slice(body);
    form.into()
}

/// The frame as the consumer gets it: acknowledgement, description, action, `message-id`, blank line, body.
fn frame(epoch: u64, id: u64, stored: &str) -> String {
    let (header, body) = stored.split_once("\n\n").unwrap_or((stored, ""));
    let mut frame = String::with_capacity(HEADER_BYTES + stored.len());
    STANDARD.encode_string(ack_bytes(epoch, id), &mut frame);
    frame.push('\n');
    frame.push_str(header);
    frame.push_str("\nmessage-id:");
    frame.push_str(&id.to_string());
    frame.push_str("\n\n");
    frame.push_str(body);
    frame
}

fn ack_bytes(epoch: u64, id: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&epoch.to_be_bytes());
    bytes[8..].copy_from_slice(&id.to_be_bytes());
    bytes
}

/// Tells the connections apart, so that an acknowledgement that belongs to another one is not taken for this one's.
#[derive(Debug)]
pub struct Epochs(AtomicU64);

impl Epochs {
    /// Begins at random, so that epochs of different starts differ too.
    #[must_use]
    pub fn new() -> Self {
        let mut seed = [0; 8];
        // Without randomness epochs would begin at 0, which is still correct within one start.
        let _ = aws_lc_rs::rand::fill(&mut seed);
        Self(AtomicU64::new(u64::from_be_bytes(seed)))
    }

    fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

impl Default for Epochs {
    fn default() -> Self {
        Self::new()
    }
}

/// What a text from a consumer turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub enum Acknowledged {
    /// A message of this connection that was waiting for it.
    Message(u64),
    /// A message that was never sent on this connection, or is acknowledged already.
    Unknown,
    /// Not an acknowledgement at all.
    Garbage,
}

/// The delivery to one connected exclusive consumer.
pub struct Delivery {
    /// The hold on the consumer.
    pub attached: Attached,
    consumer: Exclusive,
    bodies: Bodies,
    epoch: u64,
}

impl Delivery {
    /// Begins with what the consumer has not acknowledged.
    #[must_use]
    pub fn new(attached: Attached, bodies: Bodies, window: usize, epochs: &Epochs) -> Self {
        let consumer = Exclusive::new(&attached.cursor, window);
        Self { attached, consumer, bodies, epoch: epochs.next() }
    }

    /// The next frames, in order; none while the window is full or nothing waits.
    pub async fn next(&mut self) -> Result<Vec<String>, StoreError> {
        let ids = match self.consumer.wanted(PAGE_MESSAGES) {
            Wanted::Nothing => return Ok(Vec::new()),
            Wanted::Again(ids) => ids,
            Wanted::From { from, most } => self.attached.topic.ids_from(from, most, PAGE_BYTES),
        };
        let stored = self.bodies.read(&ids).await?;
        let mut frames = Vec::with_capacity(stored.len());
        for (id, body) in stored {
            self.consumer.claim(id);
            frames.push(frame(self.epoch, id, &String::from_utf8_lossy(&body)));
        }
        Ok(frames)
    }

    /// Takes a text from the consumer. Each acknowledgement stands for one message (seed 001).
    pub fn acknowledge(&mut self, text: &str) -> Acknowledged {
        let mut bytes = [0; 18];
        let Ok(16) = STANDARD.decode_slice(text, &mut bytes) else { return Acknowledged::Garbage };
        let epoch = u64::from_be_bytes(bytes[..8].try_into().expect("invariant: 8 bytes"));
        let id = u64::from_be_bytes(bytes[8..16].try_into().expect("invariant: 8 bytes"));
        if epoch == self.epoch && self.consumer.settle(id) { Acknowledged::Message(id) } else { Acknowledged::Unknown }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::message::{Action, Api};

    #[test]
    fn a_frame_has_the_documented_lines() {
        let message = Message {
            tenant: "edge".into(),
            api: Api::Measurements,
            action: Action::Create,
            source: "1001".into(),
            kind: None,
            time: "".into(),
            body: Bytes::from_static(b"{}"),
        };
        let stored = stored_form(&message, "measurements", &message.body);
        assert_eq!(&stored[..], b"/edge/measurements/1001\nCREATE\n\n{}");
        let frame = frame(1, u64::MAX, std::str::from_utf8(&stored).unwrap());
        assert_eq!(
            frame,
            "AAAAAAAAAAH//////////w==\n/edge/measurements/1001\nCREATE\nmessage-id:18446744073709551615\n\n{}"
        );
        assert_eq!(frame.len(), stored.len() + HEADER_BYTES);
    }
}
