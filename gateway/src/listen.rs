//! `tidegate listen`: a consumer for the terminal.
//!
//! Frames of the consumer protocol (seed 001) enter, lines on standard output leave. A message is acknowledged after its
//! line is written out and flushed, never before, so that what a pipe did not take comes again. Everything else that there
//! is to say goes to standard error, each reason once.

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{interval, sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, WebSocketConfig};
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_util::sync::CancellationToken;

use crate::client::{self, Client, ClientArgs, TIMEOUT};

/// The first wait after a lost connection; each further one is half as long again.
const SHORTEST_DELAY: Duration = Duration::from_millis(100);
/// The longest wait between two attempts to connect.
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// Pings keep an idle connection open (the gateway closes at 300 s); a gateway that leaves one unanswered until the next
/// is due is taken for lost.
const PING_EVERY: Duration = Duration::from_secs(60);
/// How long the closing handshake may take before the socket is dropped.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
/// The longest frame that is read, in bytes: four times what the gateway sends. A longer one ends the connection.
const FRAME_BYTES: usize = 4 * 1024 * 1024;

/// Prints the messages of a topic, one a line, and acknowledges each once its line is written.
#[derive(Args, Debug)]
pub struct ListenArgs {
    /// The gateway, and who listens
    #[command(flatten)]
    pub gateway: ClientArgs,
    /// The topic: the `subscription` of the subscriptions that feed it
    #[arg(long, value_name = "NAME")]
    pub subscription: String,
    /// Name of this consumer, under which the gateway keeps what it has not acknowledged yet
    #[arg(long, value_name = "NAME")]
    pub subscriber: String,
    /// Share the messages, by their source, with other clients that listen as this consumer
    #[arg(long)]
    pub shared: bool,
    /// With --shared: the name of this client, which keeps its sources when it comes back under the same one
    #[arg(long, value_name = "NAME", requires = "shared")]
    pub consumer: Option<String>,
    /// Listen to the non-persistent topic of that name, which keeps nothing for those who are not connected
    #[arg(long)]
    pub non_persistent: bool,
    /// Create the subscription first; one that exists already stays as it is
    #[arg(long)]
    pub subscribe: bool,
    /// With --subscribe: only messages of this object; without it, the subscription is one of the tenant
    #[arg(long, value_name = "ID", requires = "subscribe")]
    pub source: Option<String>,
    /// With --subscribe: which APIs, such as `measurements,managedobjects`; without it, all: of a tenant these are new managed
    /// objects, and no measurements
    #[arg(long, value_name = "API", value_delimiter = ',', requires = "subscribe")]
    pub apis: Vec<String>,
    /// With --subscribe: which types, such as `'temperature' or 'pressure'`
    #[arg(long, value_name = "TEXT", requires = "subscribe")]
    pub type_filter: Option<String>,
    /// With --subscribe: which fragments the messages keep
    #[arg(long, value_name = "FRAGMENT", value_delimiter = ',', requires = "subscribe")]
    pub fragments: Vec<String>,
    /// Print the frames as they are, each followed by a blank line
    #[arg(long)]
    pub raw: bool,
    /// End after so many messages; 0 connects, so that the consumer exists and is owed what comes, and ends
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// At the end, unsubscribe the consumer: the gateway drops what is left for it
    #[arg(long)]
    pub unsubscribe: bool,
}

/// Listens until SIGINT, SIGTERM, `--count` messages or the end of whoever reads standard output.
///
/// # Errors
/// What no further attempt can cure: arguments, credentials, refusals by the gateway's REST API, a full disk behind
/// standard output.
pub async fn run(args: ListenArgs) -> anyhow::Result<()> {
    let stop = stop_token()?;
    let client = args.gateway.client()?;
    let unsubscribe = args.unsubscribe;
    let mut listener = Listener { client, args, stop, printed: 0, failures: 0, said: String::new() };
    listener.listen().await?;
    if unsubscribe {
        listener.unsubscribe().await?;
    }
    Ok(())
}

/// A token that SIGINT or SIGTERM cancels.
fn stop_token() -> anyhow::Result<CancellationToken> {
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

type Socket = WebSocketStream<Box<dyn client::Stream>>;

/// Why listening was interrupted.
#[derive(Debug)]
enum Setback {
    /// A later attempt may succeed.
    Passing(String),
    /// None will.
    Final(anyhow::Error),
}

impl From<client::Error> for Setback {
    fn from(error: client::Error) -> Self {
        if error.is_transient() { Self::Passing(error.to_string()) } else { Self::Final(error.into()) }
    }
}

impl From<tungstenite::Error> for Setback {
    fn from(error: tungstenite::Error) -> Self {
        match error {
            tungstenite::Error::Http(response) => upgrade_refused(response.status()),
            error => Self::Passing(format!("the connection is lost: {}", client::root_cause(&error))),
        }
    }
}

/// What a refused upgrade means. The token was made a moment ago, so 401 tells of a gateway that changed its key meanwhile.
fn upgrade_refused(status: hyper::StatusCode) -> Setback {
    match status.as_u16() {
        401 => Setback::Passing("the gateway does not know the token (401); asking for a new one".to_owned()),
        409 => Setback::Passing("another client of this consumer is connected (409)".to_owned()),
        _ if client::is_transient(status) => Setback::Passing(format!("the gateway refuses the connection ({status})")),
        _ => Setback::Final(anyhow::anyhow!("the gateway refuses the connection ({status})")),
    }
}

struct Listener {
    client: Client,
    args: ListenArgs,
    stop: CancellationToken,
    /// Messages printed and acknowledged.
    printed: u64,
    /// Attempts since the last one that brought anything.
    failures: u32,
    /// What standard error said last.
    said: String,
}

impl Listener {
    async fn listen(&mut self) -> anyhow::Result<()> {
        loop {
            let opened = Instant::now();
            match self.session().await {
                Ok(()) => return Ok(()),
                Err(Setback::Final(error)) => return Err(error),
                Err(Setback::Passing(reason)) => self.say(format!("{reason}; trying again")),
            }
            if opened.elapsed() > LONGEST_DELAY {
                self.failures = 0;
            }
            let delay = delay(self.failures, RandomState::new().hash_one(self.failures));
            self.failures = self.failures.saturating_add(1);
            if unless_stopped(&self.stop, sleep(delay)).await.is_none() {
                return Ok(());
            }
        }
    }

    /// One connection, from the token to its end. `Ok` is the wanted end.
    async fn session(&mut self) -> Result<(), Setback> {
        let stop = self.stop.clone();
        let Some(socket) = unless_stopped(&stop, self.open()).await else { return Ok(()) };
        let mut socket = socket?;
        self.say(format!("listening to {} as {}", self.args.subscription, self.args.subscriber));
        self.receive(&mut socket).await?;
        close(socket).await;
        Ok(())
    }

    async fn open(&mut self) -> Result<Socket, Setback> {
        if self.args.subscribe {
            self.subscribe().await?;
            self.args.subscribe = false;
        }
        let token = self.token().await?;
        let mut path = with_parameter("/notification2/consumer/?", "token", &token);
        if let Some(name) = &self.args.consumer {
            path = with_parameter(&format!("{path}&"), "consumer", name);
        }
        let limits = WebSocketConfig::default().max_message_size(Some(FRAME_BYTES)).max_frame_size(Some(FRAME_BYTES));
        match timeout(TIMEOUT, self.client.websocket(&path, limits)).await {
            Ok(connected) => Ok(connected?),
            Err(_) => Err(Setback::Passing("the gateway does not answer".to_owned())),
        }
    }

    async fn subscribe(&mut self) -> Result<(), Setback> {
        match self.client.post("/notification2/subscriptions", &subscription(&self.args)).await {
            Ok(_) => self.say(format!("subscription {} created", self.args.subscription)),
            Err(error) if error.status() == Some(hyper::StatusCode::CONFLICT) => {
                self.say(format!("subscription {} exists already and stays as it is", self.args.subscription));
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    async fn token(&self) -> Result<String, Setback> {
        let ListenArgs { subscription, subscriber, shared, non_persistent, .. } = &self.args;
        let request = json!({
            "subscription": subscription, "subscriber": subscriber, "shared": shared, "nonPersistent": non_persistent,
        });
        let answer = self.client.post("/notification2/token", &request).await?;
        let token = answer.get("token").and_then(Value::as_str);
        Ok(token.context("the gateway's answer to a token request holds no token").map_err(Setback::Final)?.to_owned())
    }

    async fn unsubscribe(&self) -> anyhow::Result<()> {
        let token = match self.token().await {
            Ok(token) => token,
            Err(Setback::Final(error)) => return Err(error),
            Err(Setback::Passing(reason)) => anyhow::bail!("not unsubscribed: {reason}"),
        };
        self.client.post(&with_parameter("/notification2/unsubscribe?", "token", &token), &json!({})).await?;
        Ok(())
    }

    /// Prints and acknowledges until there is a reason to stop (`Ok`) or the connection is lost.
    async fn receive(&mut self, socket: &mut Socket) -> Result<(), Setback> {
        let stop = self.stop.clone();
        let mut pings = interval(PING_EVERY);
        pings.reset();
        let mut silent = false;
        while self.args.count != Some(self.printed) {
            let message = tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                _ = pings.tick() => {
                    if silent {
                        return Err(Setback::Passing(format!("no sign of life for {} s", PING_EVERY.as_secs())));
                    }
                    silent = true;
                    send(socket, Message::Ping(Default::default())).await?;
                    continue;
                }
                message = socket.next() => message,
            };
            silent = false;
            match message {
                Some(Ok(Message::Text(text))) => {
                    self.failures = 0;
                    if !self.print(&text)? {
                        return Ok(());
                    }
                    send(socket, Message::text(Frame::parse(&text).ack)).await?;
                    self.printed += 1;
                }
                Some(Ok(Message::Close(frame))) => return Err(Setback::Passing(closed(frame.as_ref()))),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error.into()),
                None => return Err(Setback::Passing("the connection is lost".to_owned())),
            }
        }
        Ok(())
    }

    /// Writes a message out; `false` when nobody reads any more.
    fn print(&self, text: &str) -> Result<bool, Setback> {
        let shown = if self.args.raw { format!("{text}\n\n") } else { Frame::parse(text).line() };
        let mut out = io::stdout().lock();
        match out.write_all(shown.as_bytes()).and_then(|()| out.flush()) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
            Err(error) => Err(Setback::Final(anyhow::Error::new(error).context("standard output cannot be written"))),
        }
    }

    /// Tells on standard error what has changed.
    fn say(&mut self, text: String) {
        if text != self.said {
            // Nothing is left to tell it to when standard error is closed, and listening goes on.
            let _ = writeln!(io::stderr(), "tidegate listen: {text}");
            self.said = text;
        }
    }
}

/// The parts of one frame of the consumer protocol that matter here (seed 001).
#[derive(Debug, PartialEq, Eq)]
struct Frame<'a> {
    /// Line 1, which goes back to acknowledge the message.
    ack: &'a str,
    /// Line 2: `/<tenant>/<type>/<source>`.
    description: &'a str,
    /// Line 3: what happened.
    action: &'a str,
    /// What follows the blank line.
    body: &'a str,
}

impl<'a> Frame<'a> {
    /// Reads any text as a frame: lines between the third and the blank one are skipped, missing ones are empty.
    fn parse(text: &'a str) -> Self {
        let (head, body) = text.split_once("\n\n").unwrap_or((text, ""));
        let mut lines = head.split('\n');
        let mut line = || lines.next().unwrap_or_default();
        Self { ack: line(), description: line(), action: line(), body }
    }

    /// Description, action and body on one line, `-` for a missing part.
    fn line(&self) -> String {
        let part = |text: &str| if text.is_empty() { "-".to_owned() } else { text.replace(['\n', '\r'], " ") };
        format!("{} {} {}\n", part(self.description), part(self.action), part(self.body))
    }
}

/// The subscription that `--subscribe` creates.
fn subscription(args: &ListenArgs) -> Value {
    let mut subscription = json!({"context": "tenant", "subscription": args.subscription});
    if args.non_persistent {
        subscription["nonPersistent"] = json!(true);
    }
    if let Some(source) = &args.source {
        subscription["context"] = json!("mo");
        subscription["source"] = json!({"id": source});
    }
    if !args.apis.is_empty() {
        subscription["subscriptionFilter"]["apis"] = json!(args.apis);
    }
    if let Some(filter) = &args.type_filter {
        subscription["subscriptionFilter"]["typeFilter"] = json!(filter);
    }
    if !args.fragments.is_empty() {
        subscription["fragmentsToCopy"] = json!(args.fragments);
    }
    subscription
}

fn with_parameter(path: &str, name: &str, value: &str) -> String {
    let value: String = form_urlencoded::byte_serialize(value.as_bytes()).collect();
    format!("{path}{name}={value}")
}

/// How long to wait after `failures` fruitless attempts: the doc'd curve, shortened by up to a half by `random`, so that
/// many listeners do not come back at the same moment.
fn delay(failures: u32, random: u64) -> Duration {
    const STEEPEST: u32 = 20; // 1.5^20 times the shortest delay is beyond the longest.
    let factor = 1.5_f64.powi(failures.min(STEEPEST).cast_signed());
    let share = f64::from(u32::try_from(random >> 32).expect("invariant: 32 bits are left")) / f64::from(u32::MAX);
    SHORTEST_DELAY.mul_f64(factor).min(LONGEST_DELAY).mul_f64(1.0 - share / 2.0)
}

async fn unless_stopped<T>(stop: &CancellationToken, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        () = stop.cancelled() => None,
        done = work => Some(done),
    }
}

async fn send(socket: &mut Socket, message: Message) -> Result<(), Setback> {
    match timeout(TIMEOUT, socket.send(message)).await {
        Ok(sent) => Ok(sent?),
        Err(_) => Err(Setback::Passing("the gateway takes no acknowledgements".to_owned())),
    }
}

/// Says goodbye and waits for the answer: it tells that the gateway has read the last acknowledgement.
async fn close(mut socket: Socket) {
    let goodbye = CloseFrame { code: CloseCode::Normal, reason: Default::default() };
    let handshake = async {
        if socket.close(Some(goodbye)).await.is_ok() {
            while let Some(Ok(_)) = socket.next().await {}
        }
    };
    // Without an answer the message may come again, as after any lost connection.
    let _ = timeout(CLOSE_WAIT, handshake).await;
}

fn closed(frame: Option<&CloseFrame>) -> String {
    match frame {
        Some(frame) if frame.reason.is_empty() => format!("the gateway closed the connection ({})", frame.code),
        Some(frame) => format!("the gateway closed the connection ({}: {})", frame.code, frame.reason),
        None => "the gateway closed the connection".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use clap::Parser;
    use proptest::prelude::*;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        listen: ListenArgs,
    }

    fn args(flags: &str) -> Result<ListenArgs, clap::Error> {
        let always = ["listen", "--user", "edge/admin", "--subscription", "Sub1", "--subscriber", "subA"];
        Cli::try_parse_from(always.into_iter().chain(flags.split_whitespace())).map(|cli| cli.listen)
    }

    #[test]
    fn a_frame_is_read_up_to_the_blank_line_and_unknown_headers_are_skipped() {
        let text = "CAA=\n/edge/measurements/1001\nCREATE\nmessage-id:7\nx-future: 1\n\n{\"id\":\"1\"}";
        let frame = Frame::parse(text);
        assert_eq!(frame.ack, "CAA=");
        assert_eq!(frame.line(), "/edge/measurements/1001 CREATE {\"id\":\"1\"}\n");
    }

    #[test]
    fn a_frame_of_an_unknown_kind_still_has_its_acknowledgement_and_one_line() {
        for (text, ack, line) in [
            ("a1\n/edge/gap/subA\nCREATE\n\n", "a1", "/edge/gap/subA CREATE -\n"),
            ("a1\n/edge/new/1\nMOVE\n\nx\ny\r\n\nz", "a1", "/edge/new/1 MOVE x y   z\n"),
            ("a1\n\nbody", "a1", "- - body\n"),
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
    fn subscribe_makes_a_tenant_subscription_or_with_a_source_one_of_an_object() {
        assert_eq!(subscription(&args("--subscribe").unwrap()), json!({"context": "tenant", "subscription": "Sub1"}));
        assert_eq!(
            subscription(&args("--subscribe --non-persistent").unwrap()),
            json!({"context": "tenant", "subscription": "Sub1", "nonPersistent": true})
        );
        let all =
            args("--subscribe --source 1001 --apis measurements,managedobjects --type-filter c8y_T --fragments a,b");
        assert_eq!(
            subscription(&all.unwrap()),
            json!({
                "context": "mo", "source": {"id": "1001"}, "subscription": "Sub1",
                "subscriptionFilter": {"apis": ["measurements", "managedobjects"], "typeFilter": "c8y_T"},
                "fragmentsToCopy": ["a", "b"],
            })
        );
    }

    #[test]
    fn the_filter_needs_subscribe() {
        for flags in ["--source 1", "--apis measurements", "--type-filter x", "--fragments a"] {
            assert!(args(flags).is_err(), "{flags}");
        }
        assert!(args("--consumer a").is_err(), "a name is for those who share");
        assert_eq!(args("--shared --consumer a").unwrap().consumer.as_deref(), Some("a"));
        assert_eq!(args("--count 3").unwrap().count, Some(3));
    }

    #[test]
    fn delays_grow_from_a_tenth_of_a_second_to_thirty_and_are_spread_over_a_half() {
        for (failures, seconds) in [(0, 0.1), (1, 0.15), (2, 0.225), (14, 29.193), (15, 30.0), (u32::MAX, 30.0)] {
            let (longest, shortest) = (delay(failures, 0), delay(failures, u64::MAX));
            assert!((longest.as_secs_f64() - seconds).abs() < 0.001, "{failures}: {longest:?}");
            assert!((shortest.as_secs_f64() - seconds / 2.0).abs() < 0.001, "{failures}: {shortest:?}");
        }
    }

    #[test]
    fn a_refused_upgrade_is_final_only_when_waiting_cannot_help() {
        for (status, passing) in
            [(401, true), (409, true), (429, true), (500, true), (503, true), (403, false), (404, false)]
        {
            let setback = upgrade_refused(hyper::StatusCode::from_u16(status).unwrap());
            assert_eq!(matches!(setback, Setback::Passing(_)), passing, "{status}");
        }
    }

    #[test]
    fn parameters_are_encoded_for_the_query() {
        assert_eq!(with_parameter("/x?", "token", "a.b-c_d"), "/x?token=a.b-c_d");
        assert_eq!(with_parameter("/x?", "consumer", "a+b&c d"), "/x?consumer=a%2Bb%26c+d");
    }
}
