//! A consumer's side of the consumer protocol (seed 001), for the commands that consume.
//!
//! Tokens, connections and acknowledgements leave, frames enter. What goes wrong is a [`Setback`]: it says whether the next attempt
//! may succeed.

use std::future::Future;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::{SinkExt, StreamExt};
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_util::sync::CancellationToken;

use super::{Client, TIMEOUT};
use crate::dispatch::BASE64;
use crate::outbound::{Stream, root_cause};

/// How long the closing handshake may take before the socket is dropped.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
/// The longest frame that is read, in bytes: four times what the gateway sends. A longer one ends the connection.
const FRAME_BYTES: usize = 4 * 1024 * 1024;

/// The connection of a consumer.
pub(crate) type Socket = WebSocketStream<Box<dyn Stream>>;

/// Why consuming was interrupted.
#[derive(Debug)]
pub(crate) enum Setback {
    /// A later attempt may succeed.
    Passing(String),
    /// None will.
    Final(anyhow::Error),
}

impl From<super::Error> for Setback {
    fn from(error: super::Error) -> Self {
        if error.is_transient() { Self::Passing(error.to_string()) } else { Self::Final(error.into()) }
    }
}

impl From<tungstenite::Error> for Setback {
    fn from(error: tungstenite::Error) -> Self {
        match error {
            tungstenite::Error::Http(response) => upgrade_refused(response.status()),
            error => Self::Passing(format!("the connection is lost: {}", root_cause(&error))),
        }
    }
}

/// What a refused upgrade means. The token was made a moment ago, so 401 tells of a gateway that changed its key meanwhile.
fn upgrade_refused(status: StatusCode) -> Setback {
    match status.as_u16() {
        401 => Setback::Passing("the gateway does not know the token (401); asking for a new one".to_owned()),
        409 => Setback::Passing("another client of this consumer is connected (409)".to_owned()),
        _ if super::is_transient(status) => Setback::Passing(format!("the gateway refuses the connection ({status})")),
        _ => Setback::Final(anyhow::anyhow!("the gateway refuses the connection ({status})")),
    }
}

/// A consumer of a topic, as it names itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subscriber<'a> {
    /// The topic.
    pub(crate) subscription: &'a str,
    /// Under which the gateway keeps what is not acknowledged.
    pub(crate) subscriber: &'a str,
    /// Shares the messages with other clients of this name.
    pub(crate) shared: bool,
    /// Of the topic of that name that keeps nothing.
    pub(crate) non_persistent: bool,
    /// The name of this client among those who share.
    pub(crate) consumer: Option<&'a str>,
}

impl Subscriber<'_> {
    /// Connects with a new token.
    pub(crate) async fn open(&self, client: &Client) -> Result<Socket, Setback> {
        let token = self.token(client).await?;
        let mut path = with_parameter("/notification2/consumer/?", "token", &token);
        if let Some(name) = self.consumer {
            path = with_parameter(&format!("{path}&"), "consumer", name);
        }
        let limits = WebSocketConfig::default().max_message_size(Some(FRAME_BYTES)).max_frame_size(Some(FRAME_BYTES));
        match timeout(TIMEOUT, client.websocket(&path, limits)).await {
            Ok(connected) => Ok(connected?),
            Err(_) => Err(Setback::Passing("the gateway does not answer".to_owned())),
        }
    }

    async fn token(&self, client: &Client) -> Result<String, Setback> {
        let Self { subscription, subscriber, shared, non_persistent, .. } = self;
        let request = json!({
            "subscription": subscription, "subscriber": subscriber, "shared": shared, "nonPersistent": non_persistent,
        });
        let answer = client.post("/notification2/token", &request).await?;
        let token = answer.get("token").and_then(Value::as_str);
        Ok(token.context("the gateway's answer to a token request holds no token").map_err(Setback::Final)?.to_owned())
    }

    /// Gives the consumer up: the gateway drops what is left for it.
    pub(crate) async fn unsubscribe(&self, client: &Client) -> anyhow::Result<()> {
        let token = match self.token(client).await {
            Ok(token) => token,
            Err(Setback::Final(error)) => return Err(error),
            Err(Setback::Passing(reason)) => anyhow::bail!("not unsubscribed: {reason}"),
        };
        client.post(&with_parameter("/notification2/unsubscribe?", "token", &token), &json!({})).await?;
        Ok(())
    }
}

/// The parts of one frame of the consumer protocol that matter here (seed 001).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame<'a> {
    /// Line 1, which goes back to acknowledge the message.
    pub(crate) ack: &'a str,
    /// Line 2: `/<tenant>/<type>/<source>`.
    pub(crate) description: &'a str,
    /// Line 3: what happened.
    pub(crate) action: &'a str,
    /// What follows the blank line.
    pub(crate) body: &'a str,
    /// Whether the body is Base64 of what is no text.
    pub(crate) base64: bool,
    /// The number in the line `message-id`.
    pub(crate) message_id: Option<u64>,
}

impl<'a> Frame<'a> {
    /// Reads any text as a frame: unknown lines between the third and the blank one are skipped, missing ones are empty.
    pub(crate) fn parse(text: &'a str) -> Self {
        let (head, body) = text.split_once("\n\n").unwrap_or((text, ""));
        let mut lines = head.split('\n');
        let mut line = || lines.next().unwrap_or_default();
        let (ack, description, action) = (line(), line(), line());
        let (mut base64, mut message_id) = (false, None);
        for line in lines {
            base64 |= line == BASE64;
            message_id = message_id.or_else(|| line.strip_prefix("message-id:")?.trim().parse().ok());
        }
        Self { ack, description, action, body, base64, message_id }
    }

    /// Description, action and body on one line, `-` for a missing part; what is no text follows `base64:`.
    pub(crate) fn line(&self) -> String {
        let part = |text: &str| if text.is_empty() { "-".to_owned() } else { text.replace(['\n', '\r'], " ") };
        let form = if self.base64 { "base64:" } else { "" };
        format!("{} {} {form}{}\n", part(self.description), part(self.action), part(self.body))
    }
}

fn with_parameter(path: &str, name: &str, value: &str) -> String {
    let value: String = form_urlencoded::byte_serialize(value.as_bytes()).collect();
    format!("{path}{name}={value}")
}

/// A token that SIGINT or SIGTERM cancels.
pub(crate) fn stop_token() -> anyhow::Result<CancellationToken> {
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be handled")?;
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be handled")?;
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        stopped.cancel();
    });
    Ok(stop)
}

/// What `work` brings, or `None` when `stop` ends before.
pub(crate) async fn unless_stopped<T>(stop: &CancellationToken, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        () = stop.cancelled() => None,
        done = work => Some(done),
    }
}

/// Sends, in time.
pub(crate) async fn send(socket: &mut Socket, message: Message) -> Result<(), Setback> {
    match timeout(TIMEOUT, socket.send(message)).await {
        Ok(sent) => Ok(sent?),
        Err(_) => Err(Setback::Passing("the gateway takes no acknowledgements".to_owned())),
    }
}

/// Says goodbye and waits for the answer: it tells that the gateway has read the last acknowledgement.
pub(crate) async fn close(mut socket: Socket) {
    let goodbye = CloseFrame { code: CloseCode::Normal, reason: Default::default() };
    let handshake = async {
        if socket.close(Some(goodbye)).await.is_ok() {
            while let Some(Ok(_)) = socket.next().await {}
        }
    };
    // Without an answer the message may come again, as after any lost connection.
    let _ = timeout(CLOSE_WAIT, handshake).await;
}

/// Why the gateway closed, in words.
pub(crate) fn closed(frame: Option<&CloseFrame>) -> String {
    match frame {
        Some(frame) if frame.reason.is_empty() => format!("the gateway closed the connection ({})", frame.code),
        Some(frame) => format!("the gateway closed the connection ({}: {})", frame.code, frame.reason),
        None => "the gateway closed the connection".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_frame_is_read_up_to_the_blank_line_and_unknown_headers_are_skipped() {
        let text = "CAA=\n/edge/measurements/1001\nCREATE\nmessage-id:7\nx-future: 1\n\n{\"id\":\"1\"}";
        let frame = Frame::parse(text);
        assert_eq!((frame.ack, frame.message_id), ("CAA=", Some(7)));
        assert_eq!(frame.line(), "/edge/measurements/1001 CREATE {\"id\":\"1\"}\n");
    }

    #[test]
    fn a_frame_of_an_unknown_kind_still_has_its_acknowledgement_and_one_line() {
        for (text, ack, line) in [
            ("a1\n/edge/gap/subA\nCREATE\n\n", "a1", "/edge/gap/subA CREATE -\n"),
            ("a1\n/edge/new/1\nMOVE\n\nx\ny\r\n\nz", "a1", "/edge/new/1 MOVE x y   z\n"),
            ("a1\n\nbody", "a1", "- - body\n"),
            ("a1\n/t/a/1\nCREATE\ncontent-transfer-encoding:base64\n\n//4=", "a1", "/t/a/1 CREATE base64://4=\n"),
            ("a1", "a1", "- - -\n"),
            ("", "", "- - -\n"),
        ] {
            let frame = Frame::parse(text);
            assert_eq!((frame.ack, frame.line().as_str()), (ack, line), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_one_line_and_its_first_line_is_the_acknowledgement(text in ".*(\n.*){0,6}") {
            let frame = Frame::parse(&text);
            prop_assert_eq!(frame.ack, text.split('\n').next().unwrap());
            prop_assert_eq!(frame.line().matches(['\n', '\r']).count(), 1);
        }
    }

    #[test]
    fn a_refused_upgrade_is_final_only_when_waiting_cannot_help() {
        for (status, passing) in
            [(401, true), (409, true), (429, true), (500, true), (503, true), (403, false), (404, false)]
        {
            let setback = upgrade_refused(StatusCode::from_u16(status).unwrap());
            assert_eq!(matches!(setback, Setback::Passing(_)), passing, "{status}");
        }
    }

    #[test]
    fn parameters_are_encoded_for_the_query() {
        assert_eq!(with_parameter("/x?", "token", "a.b-c_d"), "/x?token=a.b-c_d");
        assert_eq!(with_parameter("/x?", "consumer", "a+b&c d"), "/x?consumer=a%2Bb%26c+d");
    }
}
