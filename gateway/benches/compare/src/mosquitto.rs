//! Mosquitto: MQTT 3.1.1, QoS 1 in and out, a persistent session for each consumer.
//!
//! It keeps sessions in memory and saves them now and then; a crash loses what has come since.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use rumqttc::{AsyncClient, Event, EventLoop, Incoming, MqttOptions, PublishOptions, QoS};
use tokio::runtime::Runtime;

use crate::broker;
use crate::inbox::Inbox;
use crate::measurement::{Request, SendTimes};
use crate::process::Guarded;
use crate::system::{self, IN_FLIGHT, System};

const PROGRAM: &str = "mosquitto";
const TOPIC: &str = "measurements";

/// A broker with its consumers.
pub(crate) struct Mosquitto<'a> {
    version: String,
    server: Guarded,
    runtime: &'a Runtime,
    publisher: AsyncClient,
    inboxes: Vec<Inbox>,
    payloads: Arc<[Request]>,
}

impl<'a> Mosquitto<'a> {
    pub(crate) fn start(folder: &Path, consumers: usize, sent: &Arc<SendTimes>, runtime: &'a Runtime) -> Result<Self> {
        std::fs::create_dir(folder)?;
        let address = broker::free_address()?;
        let file = folder.join("mosquitto.conf");
        // By default it has 20 messages in flight to a consumer and 1000 queued, and what is too much is lost.
        let config = format!(
            "listener {} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\nmax_queued_messages 0\n\
             max_inflight_messages {IN_FLIGHT}\nuser root\npersistence true\npersistence_location {}/\n",
            address.port(),
            folder.display()
        );
        std::fs::write(&file, config)?;
        let server = broker::start(Command::new(PROGRAM).arg("-c").arg(&file), folder, address)?;
        let inboxes: Vec<Inbox> = (0..consumers).map(|_| Inbox::default()).collect();
        let publisher = runtime.block_on(async {
            for (number, inbox) in inboxes.iter().enumerate() {
                consume(address.port(), number, inbox.clone(), sent.clone()).await?;
            }
            let (publisher, mut events) = client("publisher", address.port());
            tokio::spawn(async move { while events.poll().await.is_ok() {} });
            anyhow::Ok(publisher)
        })?;
        let version = broker::version(PROGRAM, "-h")?;
        Ok(Self { version, server, runtime, publisher, inboxes, payloads: system::payloads() })
    }
}

fn client(name: &str, port: u16) -> (AsyncClient, EventLoop) {
    let mut options = MqttOptions::new(name, ("127.0.0.1", port));
    options.set_clean_session(false).set_inflight(IN_FLIGHT as u16);
    AsyncClient::builder(options).capacity(IN_FLIGHT).build()
}

/// Subscribes; the client reads, records and acknowledges from then on.
async fn consume(port: u16, number: usize, inbox: Inbox, sent: Arc<SendTimes>) -> Result<()> {
    let (client, mut events) = client(&format!("consumer{number}"), port);
    client.subscribe(TOPIC, QoS::AtLeastOnce).await?;
    while !matches!(events.poll().await?, Event::Incoming(Incoming::SubAck(_))) {}
    tokio::spawn(async move {
        // Without the client the events end.
        let _client = client;
        let outcome: Result<()> = async {
            loop {
                if let Event::Incoming(Incoming::Publish(message)) = events.poll().await? {
                    inbox.lock().note(&message.payload, &sent, Instant::now());
                }
            }
        }
        .await;
        inbox.end(outcome);
    });
    Ok(())
}

impl System for Mosquitto<'_> {
    fn name(&self) -> String {
        format!("Mosquitto {}", self.version)
    }

    fn server(&self) -> &Guarded {
        &self.server
    }

    fn inboxes(&self) -> Vec<&Inbox> {
        self.inboxes.iter().collect()
    }

    fn publish(&self, sent: &Arc<SendTimes>, time: Duration) -> Result<u64> {
        let publisher = self.publisher.clone();
        let send = move |payload: Bytes| {
            let publisher = publisher.clone();
            async move {
                let options = PublishOptions::new(QoS::AtLeastOnce);
                publisher.publish_tracked(TOPIC, payload, options).await?.wait_completion_async().await?;
                Ok(())
            }
        };
        self.runtime.block_on(system::publish(self.payloads.clone(), sent.clone(), time, send))
    }
}
