//! The lower half of the line: from the backlog to frames or requests for one consumer, and from its acknowledgements back.
//!
//! ```text
//! backlog ─▶ Group::claim (window, share, order) ─▶ bodies ─▶ frame, Notification ─▶ deliver
//! deliver ─▶ acknowledgement ─▶ Group::settle ─▶ writer (the last reference frees the message)
//! ```

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::de::IgnoredAny;

use crate::backlog::{self, Attached, Bodies, Held};
use crate::message::{self, Action, Message, Tenant};
use crate::store::StoreError;

/// What a delivery adds to the stored form at most: acknowledgement line and `message-id` line.
pub const HEADER_BYTES: usize = 25 + "message-id:".len() + 19 + 1;

/// Messages that are read and rendered at a time.
const PAGE_MESSAGES: usize = 256;
/// Bytes that are read and rendered at a time, which each consumer that does not read costs (at least one message).
const PAGE_BYTES: usize = 128 << 10;

/// The header line of a body that is Base64; there is none where the body is as it was.
pub(crate) const BASE64: &str = "content-transfer-encoding:base64";

/// The frame of `message` without what a delivery adds, see [`message::form`].
///
/// A body that is no UTF-8 text goes as Base64 (seed 001, "Notification message header and content"), and a header line says so.
#[must_use]
pub fn stored_form(message: &Message, kind: &str, body: &[u8]) -> Bytes {
    let form = |headers: &str, body: &[u8]| {
        message::form(&message.tenant, kind, message.source.as_str(), message.action, headers, body)
    };
    match std::str::from_utf8(body) {
        Ok(_) => form("", body),
        Err(_) => form(&format!("{BASE64}\n"), STANDARD.encode(body).as_bytes()),
    }
}

/// Bytes of the frame that `message` makes with this body, under the longest type that it may go by.
#[must_use]
pub fn frame_bytes(message: &Message, body: &[u8]) -> usize {
    let kind = message.api.with_children().unwrap_or(message.api.as_str());
    let encoded = || BASE64.len() + 1 + base64::encoded_len(body.len(), true).unwrap_or(usize::MAX / 2);
    let body = str::from_utf8(body).map_or_else(|_| encoded(), str::len);
    HEADER_BYTES + message::head_bytes(&message.tenant, kind, message.source.as_str(), message.action) + body
}

/// What a stored form was made of, and the type that stands in it; `None` if the disk has spoilt it.
#[must_use]
pub fn original(tenant: &Tenant, stored: &Bytes, held: &Held) -> Option<(Message, &'static str)> {
    let Notification { description, action, body, .. } = Notification::of(stored);
    let of_tenant = str::from_utf8(&description).ok()?.strip_prefix('/')?.strip_prefix(tenant.as_str())?;
    let (kind, source) = of_tenant.strip_prefix('/')?.split_once('/')?;
    let kind = [Some(held.api.as_str()), held.api.with_children()].into_iter().flatten().find(|name| *name == kind)?;
    let action = Action::ALL.into_iter().find(|known| known.as_str().as_bytes() == action)?;
    let Held { api, kind: type_, time, .. } = held;
    let (tenant, source) = (tenant.clone(), source.into());
    Some((Message { tenant, api: *api, action, source, kind: type_.clone(), time: time.clone(), body }, kind))
}

/// The frame as the consumer gets it: acknowledgement, description, action, `message-id`, blank line, body.
fn frame(epoch: u64, id: u64, stored: &str) -> String {
    let (header, body) = stored.split_once("\n\n").unwrap_or((stored, ""));
    let mut frame = String::with_capacity(HEADER_BYTES + stored.len());
    STANDARD.encode_string(ack_bytes(epoch, id), &mut frame);
    frame.push('\n');
    frame.push_str(header);
    frame.push_str("\nmessage-id:");
    frame.push_str(&backlog::message_id(id).to_string());
    frame.push_str("\n\n");
    frame.push_str(body);
    frame
}

/// A stored form is text, unless the disk has spoilt it.
fn text(stored: &[u8]) -> Cow<'_, str> {
    // To replace what is wrong takes much longer, even where nothing is.
    str::from_utf8(stored).map_or_else(|_| String::from_utf8_lossy(stored), Cow::Borrowed)
}

/// What a stored form says, for those to whom it does not go as a frame.
#[derive(Debug, PartialEq, Eq)]
pub struct Notification {
    /// `/<tenant>/<type>/<source>`.
    pub description: Bytes,
    /// What happened.
    pub action: Bytes,
    /// The object, or whatever a transform has made of it.
    pub body: Bytes,
    /// What the body is.
    pub media_type: &'static str,
}

impl Notification {
    /// Takes the parts of a stored form, the body as it was before it went into Base64.
    #[must_use]
    pub fn of(stored: &Bytes) -> Self {
        let end = memchr::memmem::find(stored, b"\n\n").unwrap_or(stored.len());
        let mut lines = stored[..end].split(|byte| *byte == b'\n').map(|line| stored.slice_ref(line));
        let (description, action) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        let mut body = stored.slice((end + 2).min(stored.len())..);
        let mut media_type = "application/octet-stream";
        if lines.any(|line| line == BASE64) {
            // What the disk has spoilt goes as it is.
            body = STANDARD.decode(&body).map_or(body, Bytes::from);
        } else {
            let is_json = serde_json::from_slice::<IgnoredAny>(&body).is_ok();
            media_type = if is_json { "application/json" } else { "text/plain;charset=utf-8" };
        }
        Self { description, action, body, media_type }
    }
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
pub enum Acknowledgement {
    /// Of this connection, for a message that was perhaps sent on it; see [`Delivery::settle`].
    Own(u64),
    /// Of another connection.
    Foreign,
    /// Not an acknowledgement at all.
    Garbage,
}

/// The delivery to one connection.
pub struct Delivery {
    /// The hold on the consumer.
    pub attached: Attached,
    bodies: Bodies,
    epoch: u64,
}

impl Delivery {
    /// Begins with what the consumer has not acknowledged.
    #[must_use]
    pub fn new(attached: Attached, bodies: Bodies, epochs: &Epochs) -> Self {
        Self { attached, bodies, epoch: epochs.next() }
    }

    /// The next frames, in order; none while the window is full or nothing waits.
    pub async fn next(&mut self) -> Result<Vec<String>, StoreError> {
        loop {
            let ids = self.attached.claim(PAGE_MESSAGES, PAGE_BYTES);
            let stored = self.attached.read(&ids, &self.bodies).await?;
            if stored.is_empty() && !ids.is_empty() {
                // All of them were given up meanwhile; what follows may be there.
                continue;
            }
            let frame = |(id, body): (u64, Bytes)| frame(self.epoch, id, &text(&body));
            return Ok(stored.into_iter().map(frame).collect());
        }
    }

    /// Reads a text from the consumer. Each acknowledgement stands for one message (seed 001).
    #[must_use]
    pub fn acknowledgement(&self, text: &str) -> Acknowledgement {
        let mut bytes = [0; 18];
        let Ok(16) = STANDARD.decode_slice(text, &mut bytes) else { return Acknowledgement::Garbage };
        let epoch = u64::from_be_bytes(bytes[..8].try_into().expect("invariant: 8 bytes"));
        let id = u64::from_be_bytes(bytes[8..16].try_into().expect("invariant: 8 bytes"));
        if epoch == self.epoch { Acknowledgement::Own(id) } else { Acknowledgement::Foreign }
    }

    /// Takes acknowledgements. Returns those of messages that were sent on this connection and not acknowledged before.
    pub fn settle(&mut self, ids: Vec<u64>) -> Vec<u64> {
        self.attached.settle_all(ids)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::message::Api;

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
        let held = Held { subscription: 1, step: 0, api: message.api, kind: None, time: "".into() };
        let (original, kind) = original(&message.tenant, &stored, &held).unwrap();
        assert_eq!((kind, stored_form(&original, kind, &original.body)), ("measurements", stored.clone()));
        let frame = frame(1, u64::MAX >> 1, std::str::from_utf8(&stored).unwrap());
        assert_eq!(
            frame,
            "AAAAAAAAAAF//////////w==\n/edge/measurements/1001\nCREATE\nmessage-id:9223372036854775807\n\n{}"
        );
        assert_eq!(frame.len(), stored.len() + HEADER_BYTES);
    }

    /// Seed 001: "If the notification is binary data or includes binary data then it will be Base64-encoded."
    #[test]
    fn what_is_no_text_goes_as_base64_and_says_so() {
        let message = Message {
            tenant: "edge".into(),
            api: Api::Measurements,
            action: Action::Create,
            source: "1001".into(),
            kind: None,
            time: "".into(),
            body: Bytes::new(),
        };
        let json = "application/json";
        let text = "text/plain;charset=utf-8";
        for (body, header, sent, media_type) in [
            ("{\"a\":\"ä\"}".as_bytes(), "", "{\"a\":\"ä\"}", json),
            (b"[1]", "", "[1]", json),
            (b"{\"a\":\"\xff\"}", "content-transfer-encoding:base64\n", "eyJhIjoi/yJ9", "application/octet-stream"),
            (b"eyJhIjoi/yJ9", "", "eyJhIjoi/yJ9", text),
            (b"a,b\n\n1,2\n", "", "a,b\n\n1,2\n", text),
            (b"", "", "", text),
        ] {
            let stored = stored_form(&message, "measurements", body);
            assert_eq!(frame_bytes(&message, body), stored.len() + HEADER_BYTES, "{body:?}");
            assert_eq!(stored, format!("/edge/measurements/1001\nCREATE\n{header}\n{sent}"));
            let notification = Notification::of(&stored);
            assert_eq!(
                (&*notification.description, &*notification.action, &*notification.body, notification.media_type),
                (&b"/edge/measurements/1001"[..], &b"CREATE"[..], body, media_type)
            );
        }
        // No form is beyond it.
        for (stored, body) in [("/t/a/1\nDELETE\n\n\n\n", "\n\n"), ("/t/a/1", "")] {
            assert_eq!(Notification::of(&Bytes::from_static(stored.as_bytes())).body, body);
        }
    }
}
