//! `tidegate listen`: a consumer for the terminal.
//!
//! Frames of the consumer protocol (seed 001) enter, lines on standard output leave. A message is acknowledged after its
//! line is written out and flushed, never before, so that what a pipe did not take comes again. Everything else that there
//! is to say goes to standard error, each reason once.

use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};
use std::time::{Duration, Instant};

use clap::Args;
use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::time::{interval, sleep};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

use crate::api::path_segment;
use crate::client::consumer::{Frame, Setback, Socket, Subscriber, close, closed, send, stop_token, unless_stopped};
use crate::client::{Client, ClientArgs};
use crate::platform::parse_id;

/// The first wait after a lost connection; each further one is half as long again.
const SHORTEST_DELAY: Duration = Duration::from_millis(100);
/// The longest wait between two attempts to connect.
const LONGEST_DELAY: Duration = Duration::from_secs(30);
/// Pings keep an idle connection open (the gateway closes at 300 s); a gateway that leaves one unanswered until the next
/// is due is taken for lost.
const PING_EVERY: Duration = Duration::from_secs(60);
/// Subscriptions that are looked at to see whether one sends to the topic.
const LOOKED_AT: usize = 100;

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
    #[arg(long, value_name = "ID", requires = "subscribe", value_parser = object_id)]
    pub source: Option<u64>,
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
    let mut listener = Listener { client, args, stop, looked: false, printed: 0, failures: 0, said: String::new() };
    listener.listen().await?;
    let Listener { client, args, .. } = listener;
    if args.unsubscribe {
        args.subscriber().unsubscribe(&client).await?;
    }
    Ok(())
}

impl ListenArgs {
    fn subscriber(&self) -> Subscriber<'_> {
        Subscriber {
            subscription: &self.subscription,
            subscriber: &self.subscriber,
            shared: self.shared,
            non_persistent: self.non_persistent,
            consumer: self.consumer.as_deref(),
        }
    }
}

struct Listener {
    client: Client,
    args: ListenArgs,
    stop: CancellationToken,
    /// Whether it was looked for a subscription that sends to the topic.
    looked: bool,
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
        let socket = self.args.subscriber().open(&self.client).await?;
        if !self.looked {
            self.looked = true;
            self.tell_if_nothing_is_sent().await;
        }
        Ok(socket)
    }

    /// Who waits for a topic to which nothing is sent waits for ever. What the gateway does not tell is no reason not to listen.
    async fn tell_if_nothing_is_sent(&mut self) {
        let ListenArgs { subscription, non_persistent, .. } = &self.args;
        let name = path_segment(subscription);
        let path = format!("/notification2/subscriptions?subscription={name}&pageSize={LOOKED_AT}");
        let Ok(page) = self.client.get(&path).await else { return };
        let Some(named) = page["subscriptions"].as_array() else { return };
        // Among more than these there may be one.
        if named.len() < LOOKED_AT && named.iter().all(|one| one["nonPersistent"] != *non_persistent) {
            let kind = if *non_persistent { "non-persistent" } else { "persistent" };
            self.say(format!("no subscription of the tenant sends to the {kind} topic {subscription} yet"));
        }
    }

    async fn subscribe(&mut self) -> Result<(), Setback> {
        match self.client.post("/notification2/subscriptions", &subscription(&self.args)).await {
            Ok(made) => {
                let id = made["id"].as_str().unwrap_or_default();
                self.say(format!("subscription {} created, with the id {id}", self.args.subscription));
                if self.args.source.is_none() && self.args.apis.is_empty() {
                    self.say("it tells of new managed objects alone; --apis or --source says what else".to_owned());
                }
                if let Some(one) = self.args.type_filter.as_deref().filter(|filter| looks_like_several(filter)) {
                    let several = one.replace(" or ", "' or '");
                    self.say(format!("{one} is one type, since it has no quotes; several would be '{several}'"));
                }
            }
            Err(error) if error.status() == Some(hyper::StatusCode::CONFLICT) => {
                self.say(format!(
                    "subscription {} exists already and stays as it is, whatever the other options say",
                    self.args.subscription
                ));
            }
            Err(error) => return Err(error.into()),
        }
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

fn object_id(text: &str) -> Result<u64, &'static str> {
    parse_id(text).ok_or("the id of a managed object is a number; GET /inventory/managedObjects lists them")
}

/// Whether somebody may have meant a list where a text without quotes is one type, compared as a whole.
fn looks_like_several(type_filter: &str) -> bool {
    type_filter.contains(" or ") && !type_filter.contains('\'')
}

/// The subscription that `--subscribe` creates.
fn subscription(args: &ListenArgs) -> Value {
    let mut subscription = json!({"context": "tenant", "subscription": args.subscription});
    if args.non_persistent {
        subscription["nonPersistent"] = json!(true);
    }
    if let Some(source) = &args.source {
        subscription["context"] = json!("mo");
        subscription["source"] = json!({"id": source.to_string()});
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

/// How long to wait after `failures` fruitless attempts: the doc'd curve, shortened by up to a half by `random`, so that
/// many listeners do not come back at the same moment.
fn delay(failures: u32, random: u64) -> Duration {
    const STEEPEST: u32 = 20; // 1.5^20 times the shortest delay is beyond the longest.
    let factor = 1.5_f64.powi(failures.min(STEEPEST).cast_signed());
    let share = f64::from(u32::try_from(random >> 32).expect("invariant: 32 bits are left")) / f64::from(u32::MAX);
    SHORTEST_DELAY.mul_f64(factor).min(LONGEST_DELAY).mul_f64(1.0 - share / 2.0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use clap::Parser;

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
}
