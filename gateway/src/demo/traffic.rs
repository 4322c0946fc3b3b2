//! The devices and the consumers of the demo.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval_at, sleep};
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

use super::account::{Account, Key, Kind, Session, Topic};
use crate::client::consumer::{Frame, Setback, Socket, Subscriber, close, closed, send, unless_stopped};
use crate::client::{Client, Connection};
use crate::clock::Clock;
use crate::time;

/// A device says something this often.
pub(super) const PERIOD: Duration = Duration::from_millis(200);
/// How long a device goes on trying once the demo is over.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// Between two attempts to reach a gateway that is gone.
const PAUSE: Duration = Duration::from_millis(100);
/// A fragment of each measurement that no consumer needs.
const DEBUG: &str = "demo_Debug";
const TEMPERATURE: &str = "c8y_Temperature";

/// The gateway at this moment, and the how manieth of its processes that is.
pub(super) type Current = (Client, usize);

/// What devices and consumers have in common.
#[derive(Clone)]
pub(super) struct Traffic {
    pub(super) gateway: watch::Receiver<Current>,
    account: Arc<Mutex<Account>>,
    /// Ends when devices are to say no more.
    pub(super) quiet: CancellationToken,
    /// Ends when consumers are to leave.
    pub(super) over: CancellationToken,
}

impl Traffic {
    pub(super) fn new(gateway: watch::Receiver<Current>) -> Self {
        let (quiet, over) = (CancellationToken::new(), CancellationToken::new());
        Self { gateway, account: Arc::default(), quiet, over }
    }

    pub(super) fn account(&self) -> MutexGuard<'_, Account> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn current(&self) -> Current {
        self.gateway.borrow().clone()
    }

    /// The device `id`, until it is quiet. It says one thing after the other, and repeats what is not answered.
    ///
    /// # Errors
    /// When the gateway refuses for good.
    pub(super) async fn device(self, id: u64, first_after: Duration) -> anyhow::Result<()> {
        let mut ticks = interval_at(tokio::time::Instant::now() + first_after, PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let clock = Clock::system();
        let mut connection = None;
        let mut last_ms = 0;
        for number in 0.. {
            if unless_stopped(&self.quiet, ticks.tick()).await.is_none() {
                break;
            }
            // The time is the name of the message, so that each one has its own.
            last_ms = clock.now_ms().max(last_ms + 1);
            self.say((id, last_ms), Kind::of(number), &mut connection).await?;
        }
        Ok(())
    }

    async fn say(&self, key: Key, kind: Kind, connection: &mut Option<(Connection, Current)>) -> anyhow::Result<()> {
        let body = body(key, kind);
        let mut deadline = None;
        loop {
            let (open, (client, life)) = match connection {
                Some(connection) => connection,
                None => {
                    let current = self.current();
                    match Connection::open(&current.0).await {
                        Ok(open) => connection.insert((open, current)),
                        Err(error) if error.is_transient() => {
                            if self.gives_up(&mut deadline) {
                                return Ok(());
                            }
                            sleep(PAUSE).await;
                            continue;
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
            };
            let life = *life;
            self.account().posting(key, kind, Instant::now());
            match open.post(client, path(kind), &body).await {
                Ok(_) => {
                    self.account().accepted(key, life);
                    return Ok(());
                }
                Err(error) if error.is_transient() => {
                    self.account().unanswered(kind, life);
                    *connection = None;
                    if self.gives_up(&mut deadline) {
                        return Ok(());
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Whether the demo has been over for long enough.
    fn gives_up(&self, deadline: &mut Option<Instant>) -> bool {
        self.quiet.is_cancelled() && *deadline.get_or_insert_with(|| Instant::now() + ANSWER_WAIT) < Instant::now()
    }

    /// A consumer of the topic, exclusive or, with a name, one of those who share it; until it is all over. `connected` is told
    /// of each connection.
    ///
    /// # Errors
    /// When the gateway refuses for good.
    pub(super) async fn consumer(
        self,
        topic: Topic,
        name: Option<&'static str>,
        connected: impl Fn(),
    ) -> anyhow::Result<()> {
        let subscriber = Subscriber {
            subscription: topic.name(),
            subscriber: "demo",
            shared: name.is_some(),
            non_persistent: false,
            consumer: name,
        };
        loop {
            let (client, life) = self.current();
            let Some(opened) = unless_stopped(&self.over, subscriber.open(&client)).await else { return Ok(()) };
            let ended = match opened {
                Ok(mut socket) => {
                    connected();
                    match self.receive(topic, life, &mut socket).await {
                        Ok(()) => {
                            close(socket).await;
                            return Ok(());
                        }
                        Err(setback) => setback,
                    }
                }
                Err(setback) => setback,
            };
            match ended {
                Setback::Passing(_) => sleep(PAUSE).await,
                Setback::Final(error) => return Err(error),
            }
        }
    }

    async fn receive(&self, topic: Topic, life: usize, socket: &mut Socket) -> Result<(), Setback> {
        let mut session = Session::default();
        while let Some(message) = unless_stopped(&self.over, socket.next()).await {
            match message {
                Some(Ok(Message::Text(text))) => {
                    let frame = Frame::parse(&text);
                    let (key, shaped) = read(topic, &frame);
                    let id = frame.message_id.unwrap_or_default();
                    let now = Instant::now();
                    self.account().received((topic, life), &mut session, (key, id), shaped, now);
                    send(socket, Message::text(frame.ack)).await?;
                    self.account().acknowledged(topic, life);
                }
                Some(Ok(Message::Close(frame))) => return Err(Setback::Passing(closed(frame.as_ref()))),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error.into()),
                None => return Err(Setback::Passing("the connection is lost".to_owned())),
            }
        }
        Ok(())
    }
}

/// The subscription that feeds a topic.
pub(super) fn subscription(topic: Topic) -> Value {
    match topic {
        Topic::Temperatures => json!({
            "context": "tenant",
            "subscription": topic.name(),
            "subscriptionFilter": {"apis": ["measurements"], "typeFilter": format!("'{}'", kind_name(Kind::Temperature))},
            "fragmentsToCopy": [TEMPERATURE],
        }),
        Topic::Watch => json!({
            "context": "tenant",
            "subscription": topic.name(),
            "subscriptionFilter": {"apis": ["events", "alarms"]},
        }),
    }
}

/// The `type` of what a device says.
pub(super) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Temperature => "demo_Temperature",
        Kind::Humidity => "demo_Humidity",
        Kind::Door => "demo_Door",
        Kind::Overheat => "demo_Overheat",
    }
}

/// Where it is posted, and listed.
pub(super) fn path(kind: Kind) -> &'static str {
    match kind {
        Kind::Temperature | Kind::Humidity => "/measurement/measurements",
        Kind::Door => "/event/events",
        Kind::Overheat => "/alarm/alarms",
    }
}

fn body((device, time_ms): Key, kind: Kind) -> Value {
    let mut body = json!({
        "source": {"id": device.to_string()},
        "type": kind_name(kind),
        "time": time::text(time_ms),
    });
    // Anything that looks like a reading.
    let reading = time_ms.rem_euclid(100);
    match kind {
        Kind::Temperature => {
            body[TEMPERATURE] = json!({"T": {"value": reading, "unit": "C"}});
            body[DEBUG] = json!({"raw": {"value": reading * 17}});
        }
        Kind::Humidity => body["demo_Humidity"] = json!({"H": {"value": reading, "unit": "%"}}),
        Kind::Door => body["text"] = json!("The door was opened"),
        Kind::Overheat => {
            body["text"] = json!("Too hot");
            body["severity"] = json!("MAJOR");
        }
    }
    body
}

/// Which message a frame is, and whether its body is what the subscription promises.
fn read(topic: Topic, frame: &Frame<'_>) -> (Option<Key>, bool) {
    let Ok(body) = serde_json::from_str::<Value>(frame.body) else { return (None, false) };
    let device = body["source"]["id"].as_str().and_then(|id| id.parse().ok());
    let time = body["time"].as_str().and_then(|text| time::parse(text).ok());
    let shaped = topic != Topic::Temperatures || (body.get(TEMPERATURE).is_some() && body.get(DEBUG).is_none());
    (device.zip(time), shaped)
}
