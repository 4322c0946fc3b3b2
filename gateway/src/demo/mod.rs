//! `tidegate demo`: the whole line in one minute, with a gateway of its own.
//!
//! Devices post, a filter drops what nobody wants, consumers receive and acknowledge; in the middle the gateway is killed and
//! started again. What both ends counted, and what the gateway says of itself, has to agree in the end.

mod account;
mod own;
mod traffic;

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use serde_json::json;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};
use tokio_util::sync::CancellationToken;

use self::account::{Account, Figures, Kind, Topic};
use self::own::OwnGateway;
use self::traffic::{PERIOD, Traffic, kind_name, path, subscription};
use crate::admin::print;
use crate::client::consumer::{stop_token, unless_stopped};
use crate::client::{Client, Error};

/// Devices that the demo simulates.
const DEVICES: u32 = 30;
/// How long the gateway stays away in the middle.
const OUTAGE: Duration = Duration::from_secs(1);
/// At the end: without any progress for so long, what has not come is lost.
const DRAIN_WAIT: Duration = Duration::from_secs(10);

/// Shows the whole line with simulated devices, and a kill -9 in the middle.
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// How long the devices send, in seconds
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(10..=600))]
    pub seconds: u64,
}

/// Runs the demo until it is over, or until SIGINT or SIGTERM; then tells what came of it.
///
/// # Errors
/// When a message was lost, came out of order or should not have come, when the gateway's own figures differ from what was
/// counted, and when anything refused to work.
pub async fn run(args: DemoArgs) -> anyhow::Result<()> {
    let stop = stop_token()?;
    let mut gateway = OwnGateway::new()?;
    let Some(client) = unless_stopped(&stop, gateway.start()).await else { return Ok(()) };
    let client = client?;
    say(&format!(
        "A gateway of its own serves, with its data in {}. {DEVICES} devices will send for {} s, {} messages a second.",
        gateway.directory().display(),
        args.seconds,
        f64::from(DEVICES) / PERIOD.as_secs_f64(),
    ))?;
    let Some(devices) = unless_stopped(&stop, prepare(&client)).await else { return Ok(()) };
    let devices = devices?;
    let (current, receiver) = watch::channel((client, 0));
    let traffic = Traffic::new(receiver);
    let mut tasks = Tasks::default();
    tasks.connect_consumers(&traffic).await?;
    let started = Instant::now();
    for (at, device) in (0..).zip(&devices) {
        tasks.devices.spawn(traffic.clone().device(*device, PERIOD / DEVICES * at));
    }
    let show = Show { stop, started, length: Duration::from_secs(args.seconds) };
    let told = show.run(&mut gateway, &current, &traffic, &mut tasks).await;
    let lasted = started.elapsed();
    told?;
    traffic.quiet.cancel();
    finished(&mut tasks.devices).await?;
    drain(&traffic).await?;
    traffic.over.cancel();
    finished(&mut tasks.consumers).await?;
    let (client, life) = current.borrow().clone();
    let figures = figures(&client, devices.len()).await.context("the gateway's own figures cannot be read")?;
    gateway.kill();
    let account = traffic.account();
    summary(&account, lasted)?;
    let mut faults = account.faults();
    faults.extend(figures.differences(&account, life));
    if faults.is_empty() {
        say("Nothing was lost, each device's messages came in order, and the gateway's metrics and lists agree.")?;
        return Ok(());
    }
    bail!("this must not happen:\n  {}", faults.join("\n  "))
}

/// Creates the devices and the subscriptions; returns the ids of the devices.
async fn prepare(client: &Client) -> anyhow::Result<Vec<u64>> {
    let mut devices = Vec::new();
    for number in 1..=DEVICES {
        let device = json!({"name": format!("device {number}"), "c8y_IsDevice": {}});
        let created = client.post("/inventory/managedObjects", &device).await?;
        devices.push(created["id"].as_str().and_then(|id| id.parse().ok()).context("a device got no id")?);
    }
    for topic in Topic::ALL {
        client.post("/notification2/subscriptions", &subscription(topic)).await?;
    }
    Ok(devices)
}

/// What runs beside the show.
#[derive(Default)]
struct Tasks {
    devices: JoinSet<anyhow::Result<()>>,
    consumers: JoinSet<anyhow::Result<()>>,
}

impl Tasks {
    /// Starts the consumers, and waits until all are connected: a topic keeps nothing for those who have never been.
    async fn connect_consumers(&mut self, traffic: &Traffic) -> anyhow::Result<()> {
        let all = [(Topic::Temperatures, None), (Topic::Watch, Some("one")), (Topic::Watch, Some("two"))];
        let (connected, mut connections) = mpsc::channel(all.len());
        for (topic, name) in all {
            let connected = connected.clone();
            let connected = move || {
                // Once it is full, nobody waits for it any more.
                let _ = connected.try_send(());
            };
            self.consumers.spawn(traffic.clone().consumer(topic, name, connected));
        }
        for _ in all {
            tokio::select! {
                _ = connections.recv() => {}
                ended = self.consumers.join_next() => return unexpected(ended),
            }
        }
        Ok(())
    }

    /// Returns when something ends that should go on.
    async fn end(&mut self) -> anyhow::Result<()> {
        tokio::select! {
            ended = self.devices.join_next() => unexpected(ended),
            ended = self.consumers.join_next() => unexpected(ended),
        }
    }
}

fn unexpected(ended: Option<Result<anyhow::Result<()>, tokio::task::JoinError>>) -> anyhow::Result<()> {
    ended.context("nothing runs")???;
    bail!("a device or a consumer ended too early")
}

async fn finished(tasks: &mut JoinSet<anyhow::Result<()>>) -> anyhow::Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

/// The time in which devices send.
struct Show {
    stop: CancellationToken,
    started: Instant,
    length: Duration,
}

impl Show {
    /// One line a second, and a kill in the middle; until it is over or stopped.
    async fn run(
        &self,
        gateway: &mut OwnGateway,
        current: &watch::Sender<traffic::Current>,
        traffic: &Traffic,
        tasks: &mut Tasks,
    ) -> anyhow::Result<()> {
        let killing = async {
            sleep(self.length / 2).await;
            gateway.kill();
            self.line(traffic, "kill -9: the gateway is gone, the devices try again")?;
            sleep(OUTAGE).await;
            let client = gateway.start().await?;
            let life = current.borrow().1 + 1;
            current.send_replace((client, life));
            self.line(traffic, "the gateway is back, the consumers go on where they were")?;
            sleep(self.length.saturating_sub(self.started.elapsed())).await;
            anyhow::Ok(())
        };
        let lines = async {
            let mut seconds = interval(Duration::from_secs(1));
            seconds.tick().await;
            loop {
                seconds.tick().await;
                self.line(traffic, "")?;
            }
        };
        tokio::select! {
            over = killing => over,
            told = lines => told,
            ended = tasks.end() => ended,
            () = self.stop.cancelled() => say("Stopped early."),
        }
    }

    fn line(&self, traffic: &Traffic, what: &str) -> anyhow::Result<()> {
        let line = {
            let account = traffic.account();
            let of = |topic| account.counted(topic);
            let (temperatures, watch) = (of(Topic::Temperatures), of(Topic::Watch));
            format!(
                "{:3} s  sent {:6}  accepted {:6}  delivered {:6}  acknowledged {:6}  on their way {:4}{}{what}",
                self.started.elapsed().as_secs(),
                account.sent(),
                account.accepted_all(),
                temperatures.delivered + watch.delivered,
                temperatures.acknowledged + watch.acknowledged,
                account.owed(Topic::Temperatures) + account.owed(Topic::Watch),
                if what.is_empty() { "" } else { "  " },
            )
        };
        say(&line)
    }
}

/// Waits until everything that was accepted has come, or nothing comes any more.
async fn drain(traffic: &Traffic) -> anyhow::Result<()> {
    let mut left = u64::MAX;
    let mut deadline = Instant::now() + DRAIN_WAIT;
    loop {
        let waiting = {
            let account = traffic.account();
            Topic::ALL.iter().map(|topic| account.owed(*topic)).sum()
        };
        if waiting == 0 {
            return Ok(());
        }
        if waiting < left {
            (left, deadline) = (waiting, Instant::now() + DRAIN_WAIT);
        } else if Instant::now() > deadline {
            return say(&format!("{left} messages do not come."));
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// What the gateway says of itself.
async fn figures(client: &Client, devices: usize) -> anyhow::Result<Figures> {
    let metrics = client.text("/metrics").await?;
    let metric = |name: &str| sum(&metrics, name);
    let mut listed = [0; Kind::ALL.len()];
    for (count, kind) in listed.iter_mut().zip(Kind::ALL) {
        *count = in_lists(client, kind, devices).await?;
    }
    Ok(Figures {
        appended: metric("tidegate_messages_appended_total"),
        delivered: metric("tidegate_messages_delivered_total"),
        acknowledged: metric("tidegate_messages_acknowledged_total"),
        listed,
    })
}

/// The value of a metric over all its labels, 0 for one that was never counted.
fn sum(metrics: &str, name: &str) -> u64 {
    let samples = metrics.lines().filter_map(|line| {
        let (sample, value) = line.rsplit_once(' ')?;
        value.parse::<u64>().ok().filter(|_| sample.split('{').next() == Some(name))
    });
    samples.sum()
}

/// How many objects of a kind the gateway lists; of alarms, which are one for each device, how often they occurred.
async fn in_lists(client: &Client, kind: Kind, devices: usize) -> Result<u64, Error> {
    let list = format!("{}?type={}&withTotalElements=true", path(kind), kind_name(kind));
    if kind != Kind::Overheat {
        let page = client.get(&format!("{list}&pageSize=1")).await?;
        return Ok(page["statistics"]["totalElements"].as_u64().unwrap_or_default());
    }
    let page = client.get(&format!("{list}&pageSize={devices}")).await?;
    Ok(page["alarms"].as_array().into_iter().flatten().filter_map(|alarm| alarm["count"].as_u64()).sum())
}

fn summary(account: &Account, lasted: Duration) -> anyhow::Result<()> {
    let accepted = |kinds: &[Kind]| kinds.iter().map(|kind| account.accepted_of(*kind)).sum::<u64>();
    #[allow(clippy::cast_precision_loss, reason = "for people")]
    let rate = account.accepted_all() as f64 / lasted.as_secs_f64();
    let mut text = format!(
        "\nDevices   sent {}, accepted {}, not answered and sent again {}; {rate:.0} messages a second over {:.0} s\n\n",
        account.sent(),
        account.accepted_all(),
        account.unanswered,
        lasted.as_secs_f64(),
    );
    text.push_str(
        "topic          filtered  stored  delivered  redelivered  acknowledged  repeated  lost  disordered     p50     p99\n",
    );
    for topic in Topic::ALL {
        let counted = account.counted(topic);
        let filtered = if topic == Topic::Temperatures { accepted(&[Kind::Humidity]) } else { 0 };
        let ms = |percent| format!("{} ms", counted.latency(percent).as_millis());
        text.push_str(&format!(
            "{:13}  {filtered:8}  {:6}  {:9}  {:11}  {:12}  {:8}  {:4}  {:10}  {:>6}  {:>6}\n",
            topic.name(),
            counted.stored(),
            counted.delivered,
            counted.redelivered,
            counted.acknowledged,
            counted.repeated,
            account.owed(topic),
            counted.disordered,
            ms(50),
            ms(99),
        ));
    }
    text.push_str(
        "\nfiltered: accepted, and not wanted by the subscription. redelivered: sent again after the kill, since the\n\
         acknowledgement was not on disk. repeated: stored twice, since the first answer was lost in the kill. p50, p99:\n\
         from the POST to the frame.\n",
    );
    say(&text)
}

/// A line on standard output. The demo has nobody to show anything to when that is closed.
fn say(line: &str) -> anyhow::Result<()> {
    print(&[line])
}
