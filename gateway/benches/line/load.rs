//! The load: kept-alive connections with one request in flight each, all on the calling thread.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::http::Answer;
use crate::measurement::{Request, SendTimes};

const ANSWER_BYTES: usize = 16 << 10;
/// For connecting, and for the answers that are still out when the time is up.
const GRACE: Duration = Duration::from_secs(30);

/// What to send, and until when.
pub(crate) struct Load<'a> {
    pub(crate) to: SocketAddr,
    pub(crate) requests: &'a Arc<[Request]>,
    pub(crate) sent: &'a Arc<SendTimes>,
    pub(crate) in_flight: usize,
    pub(crate) most: u64,
    /// At most; without it, as many as are answered.
    pub(crate) per_second: Option<f64>,
    pub(crate) time: Duration,
}

/// What came of it; every answer was a 201.
pub(crate) struct Posted {
    /// Measurements that carry a number, and requests without one.
    pub(crate) created: u64,
    pub(crate) elapsed: Duration,
}

impl Posted {
    pub(crate) fn per_second(&self) -> f64 {
        self.created as f64 / self.elapsed.as_secs_f64()
    }
}

impl Load<'_> {
    /// Runs to the end; any answer but 201 is an error that says how many there were.
    pub(crate) fn run(&self) -> Result<Posted> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let finished = runtime.block_on(async { tokio::time::timeout(self.time + GRACE, self.drive()).await });
        finished.context("answers are missing long after the end of the load")?
    }

    async fn drive(&self) -> Result<Posted> {
        let mut connections = Vec::new();
        for _ in 0..self.in_flight {
            connections.push(Connection::open(self.to).await?);
        }
        let turn = Arc::new(Turn::new(self.sent.clone(), self.most, self.per_second, self.time));
        let mut running: JoinSet<Result<Statuses>> = JoinSet::new();
        for connection in connections {
            running.spawn(connection.run(self.requests.clone(), turn.clone()));
        }
        let mut statuses = Statuses::default();
        while let Some(done) = running.join_next().await {
            statuses.add(done??);
        }
        let elapsed = turn.started.elapsed();
        Ok(Posted { created: statuses.all_created()?, elapsed })
    }
}

/// The numbers of one load, which its connections share.
pub(crate) struct Turn {
    pub(crate) started: Instant,
    sent: Arc<SendTimes>,
    next: AtomicU64,
    most: u64,
    per_second: Option<f64>,
    until: Instant,
}

impl Turn {
    pub(crate) fn new(sent: Arc<SendTimes>, most: u64, per_second: Option<f64>, time: Duration) -> Self {
        let started = Instant::now();
        Self { started, sent, next: AtomicU64::new(0), most, per_second, until: started + time }
    }

    /// The next `count` numbers, sent from now on, when the first is due; nothing when the load is over.
    pub(crate) async fn next(&self, count: u64) -> Option<u64> {
        let number = self.next.fetch_add(count, Ordering::Relaxed);
        if let Some(per_second) = self.per_second {
            let due = self.started + Duration::from_secs_f64(number as f64 / per_second);
            tokio::time::sleep_until(due.min(self.until).into()).await;
        }
        let now = Instant::now();
        let is_on = number + count <= self.most && now < self.until;
        is_on.then(|| (number..number + count).for_each(|number| self.sent.stamp(number, now))).map(|()| number)
    }
}

/// Answers by status, with the first body that was not wanted.
#[derive(Default)]
struct Statuses {
    counts: BTreeMap<u16, u64>,
    refusal: Option<String>,
}

impl Statuses {
    fn add(&mut self, other: Self) {
        for (status, count) in other.counts {
            *self.counts.entry(status).or_default() += count;
        }
        self.refusal = self.refusal.take().or(other.refusal);
    }

    fn all_created(self) -> Result<u64> {
        match self.refusal {
            Some(body) => bail!("not every answer was 201: {:?}; the first other one said {body}", self.counts),
            None => Ok(self.counts.values().sum()),
        }
    }
}

struct Connection {
    stream: TcpStream,
    request: Vec<u8>,
    answer: Box<[u8]>,
}

impl Connection {
    async fn open(to: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, request: Vec::new(), answer: vec![0; ANSWER_BYTES].into() })
    }

    async fn run(mut self, requests: Arc<[Request]>, turn: Arc<Turn>) -> Result<Statuses> {
        let mut created = 0;
        let mut others = Statuses::default();
        // Each takes as many numbers as the others.
        let takes = requests[0].takes();
        while let Some(number) = turn.next(takes).await {
            requests[(number / takes) as usize % requests.len()].write(number, &mut self.request);
            let answer = self.exchange().await?;
            if answer.status == 201 {
                created += takes;
            } else {
                *others.counts.entry(answer.status).or_default() += 1;
                others.refusal.get_or_insert_with(|| String::from_utf8_lossy(&self.answer[answer.body]).into());
            }
        }
        others.counts.insert(201, created);
        Ok(others)
    }

    async fn exchange(&mut self) -> Result<Answer> {
        self.stream.write_all(&self.request).await?;
        let mut filled = 0;
        loop {
            let count = self.stream.read(&mut self.answer[filled..]).await?;
            ensure!(count > 0, "the connection was closed, or an answer was longer than {ANSWER_BYTES} bytes");
            filled += count;
            if let Some(answer) = Answer::parse(&self.answer[..filled])? {
                return Ok(answer);
            }
        }
    }
}
