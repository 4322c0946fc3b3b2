//! A Notifications 2.0 consumer with hand-written framing, so that it takes little of the machine that is measured.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::measurement::{SendTimes, number};

const BUFFER_BYTES: usize = 2 << 20;
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a waiting thread looks whether it should end.
const TICK: Duration = Duration::from_millis(50);
/// How long a frame too many is waited for.
const LINGER: Duration = Duration::from_millis(100);

const TEXT: u8 = 1;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// A connected WebSocket.
pub(crate) struct Socket {
    stream: TcpStream,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

struct Frame<'a> {
    opcode: u8,
    payload: &'a [u8],
}

impl Socket {
    pub(crate) fn connect(to: SocketAddr, token: &str) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_read_timeout(Some(TICK))?;
        let mut socket = Self { stream, buffer: vec![0; BUFFER_BYTES].into(), start: 0, end: 0 };
        socket.upgrade(token)?;
        Ok(socket)
    }

    fn upgrade(&mut self, token: &str) -> Result<()> {
        write!(
            self.stream,
            "GET /notification2/consumer/?token={token} HTTP/1.1\r\nHost: tidegate.local\r\nConnection: Upgrade\r\nUpgrade: \
             websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )?;
        let deadline = Instant::now() + PATIENCE;
        let head = loop {
            self.fill()?;
            if let Some(head) = memchr::memmem::find(&self.buffer[..self.end], b"\r\n\r\n") {
                break head;
            }
            ensure!(Instant::now() < deadline, "no answer to the upgrade");
        };
        let answer = String::from_utf8_lossy(&self.buffer[..self.end]);
        ensure!(answer.starts_with("HTTP/1.1 101"), "the upgrade was refused: {answer}");
        self.start = head + 4;
        Ok(())
    }

    /// Reads what has come, or nothing for a tick.
    fn fill(&mut self) -> Result<()> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        ensure!(self.end < self.buffer.len(), "a frame longer than {BUFFER_BYTES} bytes");
        match self.stream.read(&mut self.buffer[self.end..]) {
            Ok(0) => bail!("the gateway closed the connection"),
            Ok(count) => self.end += count,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// The next frame that is complete in the buffer.
    fn next(&mut self) -> Result<Option<Frame<'_>>> {
        let bytes = &self.buffer[self.start..self.end];
        let Some((&[first, second], rest)) = bytes.split_first_chunk() else { return Ok(None) };
        ensure!(first & 0xf0 == 0x80 && second & 0x80 == 0, "a fragmented, compressed or masked frame");
        let extended = match second {
            126 => 2,
            127 => 8,
            _ => 0,
        };
        let Some(length) = rest.get(..extended) else { return Ok(None) };
        let length = match extended {
            0 => usize::from(second),
            _ => length.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)),
        };
        let at = self.start + 2 + extended;
        let Some(payload) = self.buffer[..self.end].get(at..at + length) else { return Ok(None) };
        self.start = at + length;
        Ok(Some(Frame { opcode: first & 0x0f, payload }))
    }

    /// Waits for the first notification, unacknowledged, and says when it came.
    pub(crate) fn first_notification(mut self, patience: Duration) -> Result<Instant> {
        self.wait_for(TEXT, patience).context("no notification")
    }

    /// Makes sure that the consumer is known, and leaves.
    pub(crate) fn leave(mut self) -> Result<()> {
        // A pong proves that the gateway has begun to serve this consumer.
        self.send(PING, b"")?;
        self.wait_for(PONG, PATIENCE).context("no pong")?;
        self.send(CLOSE, &1000u16.to_be_bytes())?;
        self.wait_for(CLOSE, PATIENCE).context("the closing was not answered")?;
        Ok(())
    }

    fn wait_for(&mut self, opcode: u8, patience: Duration) -> Result<Instant> {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            while let Some(frame) = self.next()? {
                if frame.opcode == opcode {
                    return Ok(Instant::now());
                }
            }
            self.fill()?;
        }
        bail!("nothing within {patience:?}")
    }

    fn send(&mut self, opcode: u8, payload: &[u8]) -> Result<()> {
        let mut out = Vec::new();
        put(&mut out, opcode, payload);
        Ok(self.stream.write_all(&out)?)
    }
}

/// Appends a client's frame; its mask is zero, so that the payload stays as it is.
fn put(out: &mut Vec<u8>, opcode: u8, payload: &[u8]) {
    debug_assert!(payload.len() < 126, "acknowledgements and control frames are short");
    out.extend_from_slice(&[0x80 | opcode, 0x80 | payload.len() as u8, 0, 0, 0, 0]);
    out.extend_from_slice(payload);
}

/// What a consumer has received since the last look.
#[derive(Default)]
pub(crate) struct Received {
    frames: u64,
    /// Frames whose number was not sent or had come before.
    strange: u64,
    /// From the sending of the post to the reading of its frame, in milliseconds.
    pub(crate) delays: Vec<f64>,
}

/// A consumer on a thread of its own that acknowledges each message.
pub(crate) struct Consumer {
    thread: Option<JoinHandle<Result<()>>>,
    received: Arc<Mutex<Received>>,
    ending: Arc<AtomicBool>,
}

impl Consumer {
    pub(crate) fn connect(to: SocketAddr, token: &str, sent: Arc<SendTimes>) -> Result<Self> {
        let socket = Socket::connect(to, token)?;
        let received = Arc::<Mutex<Received>>::default();
        let ending = Arc::<AtomicBool>::default();
        let (shared, flag) = (received.clone(), ending.clone());
        let thread = std::thread::Builder::new()
            .name("consumer".into())
            .spawn(move || consume(socket, &sent, &shared, &flag))?;
        Ok(Self { thread: Some(thread), received, ending })
    }

    /// Waits for exactly `count` frames since the last call, each of another post; fewer and more are errors.
    pub(crate) fn take(&mut self, count: u64, patience: Duration) -> Result<Received> {
        let deadline = Instant::now() + patience;
        while lock(&self.received).frames < count {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                self.join()?;
                bail!("the consumer has ended");
            }
            let frames = lock(&self.received).frames;
            ensure!(Instant::now() < deadline, "{frames} frames for {count} answers of 201 after {patience:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(LINGER);
        let received = std::mem::take(&mut *lock(&self.received));
        ensure!(received.frames == count, "{} frames for {count} answers of 201", received.frames);
        ensure!(received.strange == 0, "{} frames came twice or were never posted", received.strange);
        Ok(received)
    }

    fn join(&mut self) -> Result<()> {
        self.ending.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(outcome)) => outcome.context("consumer"),
            Some(Err(_)) => bail!("the consumer panicked"),
            None => Ok(()),
        }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

fn lock(received: &Mutex<Received>) -> MutexGuard<'_, Received> {
    received.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads, records and acknowledges; all acknowledgements of one read go out in one write.
fn consume(mut socket: Socket, sent: &SendTimes, received: &Mutex<Received>, ending: &AtomicBool) -> Result<()> {
    let mut out = Vec::new();
    while !ending.load(Ordering::Relaxed) {
        socket.fill()?;
        let now = Instant::now();
        let mut received = lock(received);
        while let Some(frame) = socket.next()? {
            match frame.opcode {
                TEXT => {
                    let line =
                        memchr::memchr(b'\n', frame.payload).context("a notification without an acknowledgement id")?;
                    put(&mut out, TEXT, &frame.payload[..line]);
                    received.frames += 1;
                    match number(frame.payload).and_then(|number| sent.take(number, now)) {
                        Some(delay) => received.delays.push(delay.as_secs_f64() * 1e3),
                        None => received.strange += 1,
                    }
                }
                PING => put(&mut out, PONG, frame.payload),
                PONG => {}
                other => bail!("a frame of kind {other}"),
            }
        }
        drop(received);
        socket.stream.write_all(&out)?;
        out.clear();
    }
    Ok(())
}
