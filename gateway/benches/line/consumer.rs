//! A Notifications 2.0 consumer with hand-written framing, so that it takes little of the machine that is measured.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::inbox::{Inbox, LINGER, Received};
use crate::measurement::SendTimes;

const BUFFER_BYTES: usize = 2 << 20;
const PATIENCE: Duration = Duration::from_secs(10);
/// How often a waiting thread looks whether it should end.
const TICK: Duration = Duration::from_millis(50);

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

    /// From now on a turn takes what has come and does not wait for more.
    pub(crate) fn do_not_wait(&self) -> Result<()> {
        Ok(self.stream.set_nonblocking(true)?)
    }

    /// Reads what has come, or nothing for a tick, and acknowledges it: all acknowledgements go out in one write.
    pub(crate) fn turn(&mut self, mut on_notification: impl FnMut(&[u8], Instant)) -> Result<()> {
        self.fill()?;
        let now = Instant::now();
        let mut out = Vec::new();
        while let Some(Frame { opcode, payload }) = self.next()? {
            match opcode {
                TEXT => {
                    let line =
                        memchr::memchr(b'\n', payload).context("a notification without an acknowledgement id")?;
                    put(&mut out, TEXT, &payload[..line]);
                    on_notification(payload, now);
                }
                PING => put(&mut out, PONG, payload),
                PONG => {}
                other => bail!("a frame of kind {other}"),
            }
        }
        Ok(self.stream.write_all(&out)?)
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

/// A consumer on a thread of its own that acknowledges each message.
pub(crate) struct Consumer {
    thread: Option<JoinHandle<()>>,
    pub(crate) inbox: Inbox,
    ending: Arc<AtomicBool>,
}

impl Consumer {
    pub(crate) fn connect(to: SocketAddr, token: &str, sent: Arc<SendTimes>) -> Result<Self> {
        let mut socket = Socket::connect(to, token)?;
        let (inbox, ending) = (Inbox::default(), Arc::<AtomicBool>::default());
        let (shared, flag) = (inbox.clone(), ending.clone());
        let consume = move || {
            let mut outcome = Ok(());
            while outcome.is_ok() && !flag.load(Ordering::Relaxed) {
                outcome = socket.turn(|frame, now| shared.lock().note(frame, &sent, now));
            }
            shared.end(outcome);
        };
        let thread = std::thread::Builder::new().name("consumer".into()).spawn(consume)?;
        Ok(Self { thread: Some(thread), inbox, ending })
    }

    /// Waits for exactly `count` frames since the last call, each of another post; fewer and more are errors.
    pub(crate) fn take(&self, count: u64, patience: Duration) -> Result<Received> {
        self.inbox.wait(count, patience)?;
        std::thread::sleep(LINGER);
        self.inbox.take(count)
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
