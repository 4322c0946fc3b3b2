//! A TCP connection that ends when its peer has vanished, or reads its answers too slowly, and only then.
//!
//! The kernel's own user timeout would also end the connection of a peer that is there and does not read for a while: a
//! consumer that is busy with a message. So the kernel is asked from time to time when it last heard from the peer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep};

use crate::telemetry::answers_lost;

/// Bytes that the kernel queues for a connection beyond what is on its way, so that what is urgent (the answer to a consumer's
/// ping) does not stand behind megabytes.
#[cfg(target_os = "linux")]
const UNSENT_BYTES: u32 = 128 << 10;

/// A connection under watch while it is being read, or waits to be written.
pub struct Socket {
    stream: TcpStream,
    watch: Watch,
    /// How fast the peer takes what there is for it; of no interest once the connection is upgraded.
    pace: Pace,
    upgraded: Arc<AtomicBool>,
    /// Given back with the connection, whatever it has been upgraded to.
    _place: OwnedSemaphorePermit,
}

/// Looks at the connection six times within the time after which a peer counts as vanished.
struct Watch {
    pause: Duration,
    silence: Duration,
    next: Pin<Box<Sleep>>,
    suspect: bool,
}

/// How fast a peer takes what there is for it. Only time counts in which it is waited for, so that neither pauses between
/// answers nor short answers make anybody slow.
pub struct Pace {
    /// Bytes that it has to take within [`Pace::period`].
    least: u64,
    period: Duration,
    taken: u64,
    waited: Duration,
    /// Since when it is being waited for.
    waiting: Option<Instant>,
}

/// What the kernel knows of a peer.
#[derive(Clone, Copy, Debug)]
struct Heard {
    /// Whether something that it has to answer was sent after its last answer.
    owing: bool,
    /// Since it last answered anything.
    silent_for: Duration,
}

impl Socket {
    /// Watches over `stream`, which holds `place` while it is open: a peer that does not answer on TCP for `dead` is gone, and
    /// so is one that is slower than `pace`.
    pub fn new(stream: TcpStream, dead: Duration, pace: Pace, place: OwnedSemaphorePermit) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let socket = SockRef::from(&stream);
        let third = (dead / 3).max(Duration::from_secs(1));
        // While nothing is on its way, these are what it has to answer.
        socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(third).with_interval(third).with_retries(2))?;
        #[cfg(target_os = "linux")]
        socket.set_tcp_notsent_lowat(UNSENT_BYTES)?;
        let pause = dead / 6;
        let watch = Watch { pause, silence: dead * 2 / 3, next: Box::pin(sleep(pause)), suspect: false };
        Ok(Self { stream, watch, pace, upgraded: Arc::default(), _place: place })
    }

    /// To be set when the connection is a WebSocket: then who does not read is a matter of its idle time.
    pub fn upgraded(&self) -> Arc<AtomicBool> {
        self.upgraded.clone()
    }

    /// `pending`, or that the peer is gone.
    fn unless_gone<T>(&mut self, context: &mut Context<'_>, pending: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if pending.is_ready() {
            return pending;
        }
        loop {
            ready!(self.watch.next.as_mut().poll(context));
            self.watch.next.as_mut().reset(Instant::now() + self.watch.pause);
            if self.watch.is_gone(heard(&self.stream)?) {
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer has vanished")));
            }
            if self.pace.is_slow() && !self.upgraded.load(Ordering::Relaxed) {
                answers_lost("slow").increment(1);
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer reads too slowly")));
            }
        }
    }
}

impl Pace {
    /// At least so many bytes per second, over `period`.
    #[must_use]
    pub fn new(bytes_per_second: u64, period: Duration) -> Self {
        let least = bytes_per_second.saturating_mul(period.as_secs()).max(1);
        Self { least, period, taken: 0, waited: Duration::ZERO, waiting: None }
    }

    /// Notes what a write came to.
    fn note(&mut self, written: &Poll<io::Result<usize>>) {
        match written {
            Poll::Ready(taken) => {
                self.waited += self.waiting.take().map_or(Duration::ZERO, |since| since.elapsed());
                self.taken += taken.as_ref().map_or(0, |bytes| *bytes as u64);
            }
            Poll::Pending => {
                self.waiting.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Whether too little was taken in a whole period; begins the next one when one is over.
    fn is_slow(&mut self) -> bool {
        let waited = self.waited + self.waiting.map_or(Duration::ZERO, |since| since.elapsed());
        if waited < self.period {
            return false;
        }
        let slow = self.taken < self.least;
        (self.taken, self.waited) = (0, Duration::ZERO);
        self.waiting = self.waiting.map(|_| Instant::now());
        slow
    }
}

impl Watch {
    /// A peer that owes an answer at two looks in a row, and gave none for long, is gone. One look is not enough: what it owes
    /// may have been sent a moment ago, after a long silence of both.
    fn is_gone(&mut self, Heard { owing, silent_for }: Heard) -> bool {
        let suspect = owing && silent_for >= self.silence;
        std::mem::replace(&mut self.suspect, suspect) && suspect
    }
}

#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "the only way to ask the kernel when it last heard from a peer")]
fn heard(stream: &TcpStream) -> io::Result<Heard> {
    use std::os::fd::AsRawFd as _;

    use nix::libc;

    // SAFETY: the struct holds only integers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = libc::socklen_t::try_from(size_of_val(&info)).expect("invariant: a small struct");
    // SAFETY: the descriptor is open, and the kernel writes at most `len` bytes to `info`.
    let failed = unsafe {
        libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len)
    };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    // What has no room at a peer that does not read is sent again ever more rarely, and answered each time.
    let unanswered = info.tcpi_unacked > 0 && info.tcpi_last_ack_recv > info.tcpi_last_data_sent;
    Ok(Heard {
        // One probe may go unanswered, since kernels limit the rate of such answers.
        owing: unanswered || info.tcpi_probes > 1,
        silent_for: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

/// Elsewhere only keep-alive finds vanished peers, and what is on its way delays it.
#[cfg(not(target_os = "linux"))]
#[allow(clippy::unnecessary_wraps, reason = "as where the kernel is asked")]
fn heard(_: &TcpStream) -> io::Result<Heard> {
    Ok(Heard { owing: false, silent_for: Duration::ZERO })
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        this.unless_gone(context, read)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.pace.note(&written);
        this.unless_gone(context, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, parts);
        this.pace.note(&written);
        this.unless_gone(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::sync::Semaphore;

    use super::*;

    async fn pair(dead: Duration) -> (Socket, TcpStream) {
        patient(dead, Duration::from_secs(30)).await
    }

    async fn patient(dead: Duration, patience: Duration) -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (connected, accepted) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        (Socket::new(accepted.unwrap().0, dead, Pace::new(1, patience), place).unwrap(), connected.unwrap())
    }

    #[tokio::test]
    async fn the_kernel_looks_after_vanished_peers_where_nothing_is_on_its_way() {
        let (watched, _peer) = pair(Duration::from_secs(30)).await;
        let socket = SockRef::from(&watched.stream);
        assert!(socket.keepalive().unwrap());
        let probing = socket.tcp_keepalive_interval().unwrap() * socket.tcp_keepalive_retries().unwrap();
        assert_eq!(socket.tcp_keepalive_time().unwrap() + probing, Duration::from_secs(30));
    }

    #[tokio::test]
    async fn the_kernel_tells_what_a_peer_owes() {
        let (mut watched, mut peer) = pair(Duration::from_secs(30)).await;
        watched.write_all(b"x").await.unwrap();
        peer.read_u8().await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let heard = heard(&watched.stream).unwrap();
        assert!(!heard.owing && heard.silent_for >= Duration::from_millis(100), "{heard:?}");
    }

    #[tokio::test]
    async fn a_peer_is_gone_when_it_owes_an_answer_for_long() {
        let (Socket { mut watch, .. }, _peer) = pair(Duration::from_secs(30)).await;
        let heard = |owing, seconds| Heard { owing, silent_for: Duration::from_secs(seconds) };
        let looks = [
            // A long silence of both, and a message a moment ago.
            (heard(false, 1000), false),
            (heard(true, 1005), false),
            (heard(false, 3), false),
            // It answers each time at last.
            (heard(true, 19), false),
            (heard(true, 24), false),
            (heard(true, 2), false),
            (heard(true, 21), false),
            (heard(true, 26), true),
        ];
        for (heard, gone) in looks {
            assert_eq!(watch.is_gone(heard), gone, "{heard:?}");
        }
    }

    // The peer is there: it answers that it has no room.
    #[tokio::test]
    async fn a_peer_that_does_not_read_is_not_gone() {
        let (mut watched, mut peer) = pair(Duration::from_secs(1)).await;
        let sent = vec![b'x'; 20 << 20];
        let reading = async {
            tokio::time::sleep(Duration::from_secs(4)).await;
            let mut received = vec![0; sent.len()];
            peer.read_exact(&mut received).await.map(|_| ())
        };
        let writing = async { watched.write_all(&sent).await.unwrap() };
        let ((), read) = tokio::join!(writing, reading);
        read.unwrap();
    }

    #[tokio::test]
    async fn a_peer_that_takes_nothing_is_left_unless_it_is_a_websocket() {
        let sent = vec![b'x'; 20 << 20];
        let (mut watched, _peer) = patient(Duration::from_secs(1), Duration::from_millis(500)).await;
        let refused = watched.write_all(&sent).await.unwrap_err();
        assert_eq!(
            (refused.kind(), refused.to_string().as_str()),
            (io::ErrorKind::TimedOut, "the peer reads too slowly")
        );
        let (mut watched, _peer) = patient(Duration::from_secs(1), Duration::from_millis(500)).await;
        watched.upgraded().store(true, Ordering::Relaxed);
        let waiting = tokio::time::timeout(Duration::from_secs(2), watched.write_all(&sent)).await;
        assert!(waiting.is_err(), "{waiting:?}");
    }
}
