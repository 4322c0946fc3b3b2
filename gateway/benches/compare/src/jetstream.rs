//! NATS JetStream: a stream in a file, durable pull consumers with explicit acknowledgements, a connection for each.
//!
//! Its publications are acknowledged before they are flushed to the disk, which is its default.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::stream::{self, StorageType};
use async_nats::jetstream::{self, Context};
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::runtime::Runtime;

use crate::broker;
use crate::inbox::Inbox;
use crate::measurement::{Request, SendTimes};
use crate::process::Guarded;
use crate::system::{self, System};

const PROGRAM: &str = "nats-server";
const STREAM: &str = "measurements";

/// A server with one stream.
pub(crate) struct JetStream<'a> {
    version: String,
    server: Guarded,
    runtime: &'a Runtime,
    publisher: Context,
    inboxes: Vec<Inbox>,
    payloads: Arc<[Request]>,
}

impl<'a> JetStream<'a> {
    pub(crate) fn start(folder: &Path, consumers: usize, sent: &Arc<SendTimes>, runtime: &'a Runtime) -> Result<Self> {
        std::fs::create_dir(folder)?;
        let address = broker::free_address()?;
        let mut command = Command::new(PROGRAM);
        command.args(["-a", "127.0.0.1", "-p", &address.port().to_string(), "-js", "-sd"]).arg(folder);
        let server = broker::start(&mut command, folder, address)?;
        let url = format!("nats://{address}");
        let inboxes: Vec<Inbox> = (0..consumers).map(|_| Inbox::default()).collect();
        let publisher = runtime.block_on(async {
            let publisher = jetstream::new(async_nats::connect(&url).await?);
            let config = stream::Config { name: STREAM.into(), storage: StorageType::File, ..Default::default() };
            publisher.create_stream(config).await?;
            for (number, inbox) in inboxes.iter().enumerate() {
                consume(&url, number, inbox.clone(), sent.clone()).await?;
            }
            anyhow::Ok(publisher)
        })?;
        let version = broker::version(PROGRAM, "--version")?;
        Ok(Self { version, server, runtime, publisher, inboxes, payloads: system::payloads() })
    }
}

/// Creates a consumer, which reads, records and acknowledges from then on.
async fn consume(url: &str, number: usize, inbox: Inbox, sent: Arc<SendTimes>) -> Result<()> {
    let stream = jetstream::new(async_nats::connect(url).await?).get_stream(STREAM).await?;
    let config = pull::Config {
        durable_name: Some(format!("consumer{number}")),
        ack_policy: AckPolicy::Explicit,
        ..Default::default()
    };
    let mut messages = stream.create_consumer(config).await?.messages().await?;
    tokio::spawn(async move {
        let outcome: Result<()> = async {
            while let Some(message) = messages.next().await {
                let message = message?;
                inbox.lock().note(&message.payload, &sent, Instant::now());
                message.ack().await.map_err(|error| anyhow!(error))?;
            }
            Ok(())
        }
        .await;
        inbox.end(outcome);
    });
    Ok(())
}

impl System for JetStream<'_> {
    fn name(&self) -> String {
        format!("NATS JetStream {}", self.version)
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
                publisher.publish(STREAM, payload).await?.await?;
                Ok(())
            }
        };
        self.runtime.block_on(system::publish(self.payloads.clone(), sent.clone(), time, send))
    }
}
