//! A consumer of a topic (seed 001, "Consumer protocol").

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async};

use super::in_time;

/// What a consumer's connection runs over.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// A connected consumer.
pub(crate) struct Consumer {
    socket: WebSocketStream<Box<dyn Stream>>,
}

/// One notification, as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) ack: String,
    pub(crate) description: String,
    pub(crate) action: String,
    /// The lines after the third.
    pub(crate) headers: Vec<String>,
    pub(crate) body: String,
}

impl Consumer {
    /// Connects, or returns the status of the refused upgrade.
    pub(crate) async fn connect(url: &str) -> Result<Self, u16> {
        let addr = url.strip_prefix("ws://").and_then(|rest| rest.split('/').next()).unwrap();
        let stream = in_time("connecting to the gateway", TcpStream::connect(addr)).await.unwrap();
        Self::over(Box::new(stream), url).await
    }

    /// [`Consumer::connect`] to a gateway that may be gone.
    pub(crate) async fn try_connect(url: &str) -> Option<Self> {
        let addr = url.strip_prefix("ws://").and_then(|rest| rest.split('/').next()).unwrap();
        let stream: Box<dyn Stream> = Box::new(TcpStream::connect(addr).await.ok()?);
        Some(Self { socket: client_async(url, stream).await.ok()?.0 })
    }

    /// [`Consumer::connect`] over a connection that is there.
    pub(crate) async fn over(stream: Box<dyn Stream>, url: &str) -> Result<Self, u16> {
        match in_time("connecting a consumer", client_async(url, stream)).await {
            Ok((socket, _)) => Ok(Self { socket }),
            Err(Error::Http(response)) => Err(response.status().as_u16()),
            Err(error) => panic!("the consumer could not connect: {error}"),
        }
    }

    /// The next notification; `None` when the connection has ended.
    pub(crate) async fn try_next(&mut self) -> Option<Frame> {
        loop {
            match self.socket.next().await? {
                Ok(Message::Text(text)) => return Some(Frame::parse(&text)),
                Ok(Message::Close(_)) | Err(_) => return None,
                Ok(_) => {}
            }
        }
    }

    /// The next notification.
    pub(crate) async fn next(&mut self) -> Frame {
        in_time("the next notification", self.try_next()).await.expect("the connection ended")
    }

    /// The next `count` notifications, none acknowledged.
    pub(crate) async fn take(&mut self, count: usize) -> Vec<Frame> {
        let mut frames = Vec::with_capacity(count);
        for _ in 0..count {
            frames.push(self.next().await);
        }
        frames
    }

    pub(crate) async fn ack(&mut self, frame: &Frame) {
        self.send(&frame.ack).await;
    }

    /// The next notification, acknowledged.
    pub(crate) async fn receive(&mut self) -> Frame {
        let frame = self.next().await;
        self.ack(&frame).await;
        frame
    }

    /// Whether nothing arrives for `pause`.
    pub(crate) async fn is_silent_for(&mut self, pause: Duration) -> bool {
        tokio::time::timeout(pause, self.try_next()).await.is_err()
    }

    pub(crate) async fn send(&mut self, text: &str) {
        self.send_message(Message::text(text)).await;
    }

    pub(crate) async fn send_binary(&mut self, bytes: Vec<u8>) {
        self.send_message(Message::binary(bytes)).await;
    }

    /// Pings, and waits for the answer: all that was sent before has been read by then.
    pub(crate) async fn ping(&mut self) {
        self.send_message(Message::Ping("?".into())).await;
        in_time("a pong", async {
            while !matches!(self.socket.next().await.expect("the connection ended").unwrap(), Message::Pong(_)) {}
        })
        .await;
    }

    /// Pings, reads nothing for a while, and then counts the notifications that come before the answer.
    pub(crate) async fn frames_until_pong(&mut self) -> usize {
        self.send_message(Message::Ping("?".into())).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        in_time("a pong", async {
            let mut frames = 0;
            loop {
                match self.socket.next().await.expect("the connection ended").unwrap() {
                    Message::Pong(_) => return frames,
                    Message::Text(_) => frames += 1,
                    other => panic!("{other:?}"),
                }
            }
        })
        .await
    }

    /// Pings without reading, or caring whether the gateway is still there; `true` when the bytes left.
    pub(crate) async fn try_ping(&mut self, payload: &[u8]) -> bool {
        self.socket.send(Message::Ping(payload.to_vec().into())).await.is_ok()
    }

    /// A pong that nobody asked for.
    pub(crate) async fn try_pong(&mut self) {
        let _ = self.socket.send(Message::Pong("?".into())).await;
    }

    async fn send_message(&mut self, message: Message) {
        in_time("sending to the gateway", self.socket.send(message)).await.expect("the connection ended");
    }

    /// Sends without caring whether the gateway is still there; `true` when the bytes left.
    pub(crate) async fn try_send(&mut self, text: &str) -> bool {
        in_time("sending to the gateway", self.socket.send(Message::text(text))).await.is_ok()
    }

    /// Acknowledges without caring whether the gateway is still there.
    pub(crate) async fn try_ack(&mut self, frame: &Frame) -> bool {
        self.try_send(&frame.ack).await
    }

    /// Says goodbye and waits until the gateway has read it, and every acknowledgement before it.
    pub(crate) async fn close(mut self) {
        in_time("closing", async {
            let _ = self.socket.close(None).await;
            while let Some(Ok(_)) = self.socket.next().await {}
        })
        .await;
    }

    /// Waits for the gateway's close and returns its code; other messages are dropped. `None`: closed without one.
    pub(crate) async fn closed(&mut self) -> Option<u16> {
        in_time("the gateway's close", async {
            loop {
                match self.socket.next().await {
                    Some(Ok(Message::Close(frame))) => {
                        let code = frame.map(|frame| CloseCode::into(frame.code));
                        // The answer to it.
                        let _ = self.socket.flush().await;
                        return code;
                    }
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return None,
                }
            }
        })
        .await
    }
}

impl Frame {
    #[track_caller]
    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\n\n").unwrap_or_else(|| panic!("no blank line in {text:?}"));
        let mut lines = head.split('\n').map(str::to_owned);
        let mut line = || lines.next().unwrap_or_else(|| panic!("less than three header lines in {text:?}"));
        let (ack, description, action) = (line(), line(), line());
        Self { ack, description, action, headers: lines.collect(), body: body.to_owned() }
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.body))
    }

    /// The number in the `message-id` line.
    #[track_caller]
    pub(crate) fn message_id(&self) -> u64 {
        let ids: Vec<_> = self.headers.iter().filter_map(|line| line.strip_prefix("message-id:")).collect();
        assert_eq!(ids.len(), 1, "{:?}", self.headers);
        assert!(ids[0].bytes().all(|digit| digit.is_ascii_digit()), "{:?}", self.headers);
        ids[0].parse().unwrap()
    }
}
