//! The WebSocket of one consumer (seed 001, "Consumer protocol").

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::sync::LazyLock;
use std::time::Duration;

use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{FutureExt as _, SinkExt as _, StreamExt as _};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_util::sync::CancellationToken;

use crate::backlog::TopicKey;
use crate::dispatch::{Acknowledgement, Delivery};
use crate::telemetry::{Throttle, acknowledgements_ignored};
use crate::writer::Writer;

/// The in-band command that unsubscribes the consumer; the server then closes without another answer.
const UNSUBSCRIBE: &str = "unsubscribe_subscriber";
/// Largest message that a client may send. An acknowledgement has 24 bytes; what is longer is garbage.
const INCOMING_BYTES: usize = 64 << 10;
/// Texts that are read before what they settle is handed on.
const INCOMING_BURST: usize = 1024;
/// How long a closing peer may take to answer.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// What a connection is told and what it may do.
#[derive(Clone, Debug)]
pub struct Conditions {
    /// Without a text in either direction or a ping for this long, the connection is closed.
    pub idle: Duration,
    /// Ends when the gateway stops.
    pub stopping: CancellationToken,
}

/// The settings for server-side sockets that send messages of at most `frame_bytes`, the longest that waits included.
#[must_use]
pub fn config(frame_bytes: usize) -> WebSocketConfig {
    WebSocketConfig::default()
        .max_message_size(Some(INCOMING_BYTES))
        .max_frame_size(Some(INCOMING_BYTES))
        .read_buffer_size(8 << 10)
        .write_buffer_size(64 << 10)
        // Room for a message and for the answers to pings of a client that does not read; one that goes on is closed.
        .max_write_buffer_size(frame_bytes + (1 << 20))
}

/// Lines on consumers that come and go, in a second. A client that reconnects in a loop must not flood the log.
const LINES: u32 = 20;

static COMING_AND_GOING: LazyLock<Throttle> = LazyLock::new(|| Throttle::new(LINES));

/// Why the loop ended.
enum End {
    /// The peer closed.
    Gone,
    /// The peer vanished, or does not speak the protocol.
    Lost(Error),
    /// We close, with this code and reason.
    Close(CloseCode, &'static str),
    /// The consumer asked to be unsubscribed.
    Unsubscribe,
}

/// For the log. What the peer has sent is not in it.
impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => f.write_str("closed by the client"),
            Self::Lost(error) => error.fmt(f),
            Self::Close(_, reason) => f.write_str(reason),
            Self::Unsubscribe => f.write_str("unsubscribed by the client"),
        }
    }
}

/// The sending half, with what has been rendered and not yet been taken by the socket.
struct Outgoing<S> {
    sink: SplitSink<WebSocketStream<S>, Message>,
    outbox: VecDeque<Message>,
    flushed: bool,
    /// When a text was last handed to the socket.
    active: Instant,
}

type Incoming<S> = SplitStream<WebSocketStream<S>>;

/// Delivers until one side ends it. The hold on the consumer is given up at the return.
pub async fn serve<S>(socket: WebSocketStream<S>, mut delivery: Delivery, writer: Writer, conditions: Conditions)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (sink, mut incoming) = socket.split();
    let mut outgoing = Outgoing { sink, outbox: VecDeque::new(), flushed: true, active: Instant::now() };
    let began = Instant::now();
    tell(&delivery, |TopicKey { tenant, name, non_persistent }, consumer, suppressed| {
        tracing::info!(%tenant, topic = name, non_persistent, consumer, suppressed, "consumer connected");
    });
    let end = exchange(&mut outgoing, &mut incoming, &mut delivery, &writer, &conditions).await;
    tell(&delivery, |TopicKey { tenant, name, non_persistent }, consumer, suppressed| {
        let seconds = began.elapsed().as_secs();
        tracing::info!(%tenant, topic = name, non_persistent, consumer, reason = %end, seconds, suppressed, "consumer disconnected");
    });
    let (code, reason) = match end {
        End::Gone | End::Lost(_) => return,
        End::Close(code, reason) => (code, reason),
        End::Unsubscribe => {
            let topic = delivery.attached.topic().key().clone();
            if let Err(error) = writer.unsubscribe(topic, delivery.attached.consumer()).await {
                tracing::warn!(%error, "unsubscribing in band failed");
            }
            (CloseCode::Normal, "unsubscribed")
        }
    };
    let settled = close(&mut outgoing, &mut incoming, code, reason, &mut delivery).await;
    settle(&writer, &delivery, settled).await;
}

async fn exchange<S>(
    outgoing: &mut Outgoing<S>,
    incoming: &mut Incoming<S>,
    delivery: &mut Delivery,
    writer: &Writer,
    conditions: &Conditions,
) -> End
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let kicked = delivery.attached.kicked().clone();
    let mut heard_at = Instant::now();
    // Whether the topic may hold something that was not looked at yet.
    let mut more = true;
    loop {
        if more && outgoing.outbox.is_empty() {
            match delivery.next().await {
                Ok(frames) => {
                    more = !frames.is_empty();
                    outgoing.outbox.extend(frames.into_iter().map(Message::text));
                }
                Err(error) => {
                    tracing::error!(%error, cause = ?error, "reading the backlog failed");
                    return End::Close(CloseCode::Error, "the backlog cannot be read");
                }
            }
        }
        let idle_at = heard_at.max(outgoing.active) + conditions.idle;
        tokio::select! {
            biased;
            () = conditions.stopping.cancelled() => return End::Close(CloseCode::Away, "the gateway is stopping"),
            () = kicked.cancelled() => return End::Close(CloseCode::Normal, "unsubscribed"),
            first = incoming.next() => {
                let first = match first {
                    Some(Ok(first)) => first,
                    Some(Err(Error::Capacity(_))) => return End::Close(CloseCode::Size, "the message is too large"),
                    Some(Err(error)) => return End::Lost(error),
                    None => return End::Gone,
                };
                let heard = hear(incoming, first, delivery);
                if heard.active {
                    heard_at = Instant::now();
                }
                more |= !heard.settled.is_empty();
                settle(writer, delivery, heard.settled).await;
                if heard.unsubscribe {
                    return End::Unsubscribe;
                }
                if heard.closed {
                    // The answer to a close is the last that is owed; a peer that does not read it is left behind.
                    let _ = timeout(CLOSE_WAIT, outgoing.sink.close()).await;
                    return End::Gone;
                }
            }
            sent = outgoing.drain(), if !outgoing.outbox.is_empty() || !outgoing.flushed => {
                if let Err(error) = sent {
                    return End::Lost(error);
                }
            }
            changed = delivery.attached.changed(), if !more => more = changed,
            () = sleep_until(idle_at) => {
                // A text may have left since the timer was set.
                if idle_at == heard_at.max(outgoing.active) + conditions.idle {
                    return End::Close(CloseCode::Away, "idle");
                }
            }
        }
    }
}

/// Hands the topic and the consumer to `line`, with the number of lines left out before, if there is room in the log.
fn tell(delivery: &Delivery, line: impl FnOnce(&TopicKey, &str, u64)) {
    if let Some(suppressed) = COMING_AND_GOING.pass(std::time::Instant::now()) {
        line(delivery.attached.topic().key(), delivery.attached.consumer(), suppressed);
    }
}

async fn settle(writer: &Writer, delivery: &Delivery, ids: Vec<u64>) {
    if !ids.is_empty() {
        let attached = &delivery.attached;
        writer.settle(attached.topic().clone(), attached.consumer().into(), ids).await;
    }
}

/// What a burst of incoming messages meant.
#[derive(Default)]
struct Heard {
    settled: Vec<u64>,
    active: bool,
    unsubscribe: bool,
    closed: bool,
}

/// Takes `first` and whatever else has arrived, so that acknowledgements travel in company.
fn hear<S>(incoming: &mut Incoming<S>, first: Message, delivery: &mut Delivery) -> Heard
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut heard = Heard::default();
    let mut own = Vec::new();
    let mut next = Some(first);
    while let Some(message) = next.take() {
        match message {
            Message::Text(text) => {
                heard.active = true;
                let text = text.trim_end_matches(['\r', '\n']);
                if text == UNSUBSCRIBE {
                    heard.unsubscribe = true;
                    break;
                }
                match delivery.acknowledgement(text) {
                    Acknowledgement::Own(id) => own.push(id),
                    Acknowledgement::Foreign => acknowledgements_ignored("unknown").increment(1),
                    Acknowledgement::Garbage => acknowledgements_ignored("garbage").increment(1),
                }
            }
            // Tungstenite answers pings by itself, ahead of what is queued here.
            Message::Ping(_) => heard.active = true,
            Message::Binary(_) => acknowledgements_ignored("binary").increment(1),
            Message::Pong(_) | Message::Frame(_) => {}
            Message::Close(_) => {
                heard.closed = true;
                break;
            }
        }
        if own.len() < INCOMING_BURST {
            next = match incoming.next().now_or_never() {
                Some(Some(Ok(message))) => Some(message),
                // A broken connection shows again at the next read, after what was heard is settled.
                Some(Some(Err(_)) | None) | None => None,
            };
        }
    }
    let said = own.len();
    heard.settled = delivery.settle(own);
    if heard.settled.len() < said {
        acknowledgements_ignored("unknown").increment((said - heard.settled.len()) as u64);
    }
    heard
}

impl<S: AsyncRead + AsyncWrite + Unpin> Outgoing<S> {
    /// Writes the outbox and flushes once. May be dropped and called again at any point.
    async fn drain(&mut self) -> Result<(), Error> {
        self.flushed = false;
        while !self.outbox.is_empty() {
            poll_fn(|context| self.sink.poll_ready_unpin(context)).await?;
            if let Some(message) = self.outbox.pop_front() {
                self.sink.start_send_unpin(message)?;
                self.active = Instant::now();
            }
        }
        self.sink.flush().await?;
        self.flushed = true;
        Ok(())
    }
}

/// Closes and waits for the peer's answer, still taking acknowledgements; returns what they settle.
async fn close<S: AsyncRead + AsyncWrite + Unpin>(
    outgoing: &mut Outgoing<S>,
    incoming: &mut Incoming<S>,
    code: CloseCode,
    reason: &'static str,
    delivery: &mut Delivery,
) -> Vec<u64> {
    let mut own = Vec::new();
    let frame = CloseFrame { code, reason: reason.into() };
    let goodbye = async {
        outgoing.sink.send(Message::Close(Some(frame))).await?;
        while let Some(message) = incoming.next().await {
            if let Message::Text(text) = message?
                && let Acknowledgement::Own(id) = delivery.acknowledgement(text.trim_end_matches(['\r', '\n']))
            {
                own.push(id);
            }
        }
        Ok::<_, Error>(())
    };
    // A peer that does not answer is left behind.
    let _ = timeout(CLOSE_WAIT, goodbye).await;
    delivery.settle(own)
}
