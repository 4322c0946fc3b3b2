//! What all systems are asked to do, and what it costs them.

use std::fmt;
use std::future::Future;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use tokio::task::JoinSet;

use crate::inbox::{Inbox, LINGER};
use crate::load::Turn;
use crate::measurement::{MOST, Request, SendTimes, TYPES, body, now};
use crate::process::{self, Guarded};
use crate::stats::percentile;

/// Publications that are not yet acknowledged, for every system.
pub(crate) const IN_FLIGHT: usize = 256;
/// Devices that the measurements come from.
pub(crate) const DEVICES: usize = 1_000;

/// How long the consumers may need for what was published.
const DRAINED_WITHIN: Duration = Duration::from_secs(60);

/// A server with its connected consumers.
pub(crate) trait System {
    fn name(&self) -> String;
    fn server(&self) -> &Guarded;
    /// One for each consumer; a consumer acknowledges what it notes there.
    fn inboxes(&self) -> Vec<&Inbox>;
    /// Publishes for `time` and returns how many publications there were; each was acknowledged.
    fn publish(&self, sent: &Arc<SendTimes>, time: Duration) -> Result<u64>;
}

/// What one round came to.
pub(crate) struct Round {
    /// Messages each second, from the first publication until the last consumer has the last message.
    pub(crate) rate: f64,
    /// The 99th percentile from publication to reception, in milliseconds.
    pub(crate) p99: f64,
    /// CPU time of the server for each message, in microseconds.
    pub(crate) server: f64,
    /// The same of this process, publisher and consumers.
    pub(crate) client: f64,
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rate, p99, server, client } = self;
        write!(f, "{rate:.0}/s, p99 {p99:.1} ms, server {server:.1} us, client {client:.1} us")
    }
}

/// Publishes for `time`, and waits until every consumer has everything exactly once.
pub(crate) fn round(system: &dyn System, sent: &Arc<SendTimes>, time: Duration) -> Result<Round> {
    // What others have left to the kernel to write would be on the way of who flushes.
    ensure!(Command::new("sync").status()?.success(), "the disk cannot be flushed");
    sent.clear();
    let (server, client) = (system.server().cpu(), process::cpu(OWN));
    let started = Instant::now();
    let count = system.publish(sent, time)?;
    for inbox in system.inboxes() {
        inbox.wait(count, DRAINED_WITHIN)?;
    }
    let elapsed = started.elapsed();
    std::thread::sleep(LINGER);
    let each = |spent: Duration| spent.as_secs_f64() * 1e6 / count as f64;
    let (server, client) = (each(system.server().cpu() - server), each(process::cpu(OWN) - client));
    let mut delays = Vec::new();
    for inbox in system.inboxes() {
        delays.extend(inbox.take(count)?.delays);
    }
    Ok(Round { rate: count as f64 / elapsed.as_secs_f64(), p99: percentile(delays, 0.99), server, client })
}

/// The threads of this process.
const OWN: &str = "/proc/self/task";

/// What brokers get: the bodies that the gateway gets in its POSTs.
pub(crate) fn payloads() -> Arc<[Request]> {
    let time = now();
    let payload =
        |(device, type_): (usize, &&str)| Request::new(body(&(1000 + device).to_string(), type_, &time).into());
    (0..DEVICES).zip(TYPES.iter().cycle()).map(payload).collect()
}

/// Publishes with `send`, which waits for the acknowledgement.
pub(crate) async fn publish<F, A>(
    payloads: Arc<[Request]>,
    sent: Arc<SendTimes>,
    time: Duration,
    send: F,
) -> Result<u64>
where
    F: Fn(Bytes) -> A + Clone + Send + 'static,
    A: Future<Output = Result<()>> + Send + 'static,
{
    let turn = Arc::new(Turn::new(sent, MOST, None, time));
    let mut lanes: JoinSet<Result<u64>> = JoinSet::new();
    for _ in 0..IN_FLIGHT {
        let (turn, payloads, send) = (turn.clone(), payloads.clone(), send.clone());
        lanes.spawn(async move {
            let mut count = 0;
            while let Some(number) = turn.next(1).await {
                let mut payload = Vec::new();
                payloads[number as usize % payloads.len()].write(number, &mut payload);
                send(payload.into()).await?;
                count += 1;
            }
            Ok(count)
        });
    }
    let mut count = 0;
    while let Some(lane) = lanes.join_next().await {
        count += lane??;
    }
    Ok(count)
}
