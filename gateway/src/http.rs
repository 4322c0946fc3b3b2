//! The HTTP listeners, plain and over TLS: sockets in, a hyper connection for each.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::{Extension, Router};
use hyper::http::uri::Scheme;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Bytes that are read ahead of a connection; a head that does not fit is 431.
const HEAD_BYTES: usize = 64 << 10;
/// Bytes that the kernel queues for a connection beyond what is on its way.
const UNSENT_BYTES: u32 = 128 << 10;
/// How long requests may take to finish when the gateway stops.
const DRAIN_WAIT: Duration = Duration::from_secs(3);
/// Pause after a failed accept, as when the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Bounds on connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Open connections; the next ones wait in the kernel.
    pub connections: usize,
    /// A request's head has to arrive within this time; the handshake of TLS before it as well.
    pub head: Duration,
    /// A peer whose TCP does not answer for this long is gone.
    pub dead: Duration,
}

/// A bound listener.
pub struct Http {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    /// Where it listens.
    pub addr: SocketAddr,
}

impl Http {
    /// Binds `addr`; port 0 picks a free one. Speaks TLS if it is given what that takes.
    pub async fn bind(addr: SocketAddr, tls: Option<TlsAcceptor>) -> io::Result<Self> {
        let listener = TcpListener::bind(addr).await?;
        let addr = listener.local_addr()?;
        Ok(Self { listener, tls, addr })
    }

    /// Serves until `stop` ends; then closes the listener and returns when the requests at hand are answered.
    /// Upgraded connections do not count. Requests carry the [`Scheme`] that they came by as an extension.
    pub async fn serve(self, router: Router, limits: ConnectionLimits, stop: CancellationToken) {
        let scheme = if self.tls.is_some() { Scheme::HTTPS } else { Scheme::HTTP };
        let service = TowerToHyperService::new(router.layer(Extension(scheme)));
        let connections = TaskTracker::new();
        let permits = Arc::new(Semaphore::new(limits.connections));
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = accept(&self.listener, &permits) => accepted,
            };
            let (stream, permit) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            if let Err(error) = prepare(&stream, limits.dead) {
                tracing::debug!(%error, "a connection was gone at once");
                continue;
            }
            let (service, tls, stop) = (service.clone(), self.tls.clone(), stop.clone());
            connections.spawn(async move {
                match tls {
                    None => speak(stream, service, limits, stop).await,
                    Some(tls) => {
                        let shaken = tokio::select! {
                            () = stop.cancelled() => return,
                            shaken = tokio::time::timeout(limits.head, tls.accept(stream)) => shaken,
                        };
                        match shaken {
                            Ok(Ok(stream)) => speak(stream, service, limits, stop).await,
                            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
                            Err(_) => tracing::debug!("a TLS handshake took too long"),
                        }
                    }
                }
                drop(permit);
            });
        }
        drop(self.listener);
        connections.close();
        if tokio::time::timeout(DRAIN_WAIT, connections.wait()).await.is_err() {
            tracing::warn!("some requests were not finished in time");
        }
    }
}

/// Answers the requests of one connection until it ends, or `stop` does and the request at hand is answered.
async fn speak<S>(stream: S, service: TowerToHyperService<Router>, limits: ConnectionLimits, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(HEAD_BYTES);
    let mut connection = pin!(server.serve_connection(TokioIo::new(stream), service).with_upgrades());
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended");
    }
}

async fn accept(
    listener: &TcpListener,
    permits: &Arc<Semaphore>,
) -> io::Result<(TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    let permit = permits.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

/// Makes the kernel find peers that have vanished, whether or not there is anything to send, and queue little, so that what is
/// urgent (the answer to a consumer's ping) does not stand behind megabytes.
fn prepare(stream: &TcpStream, dead: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let third = (dead / 3).max(Duration::from_secs(1));
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(third).with_interval(third).with_retries(2))?;
    #[cfg(target_os = "linux")]
    {
        socket.set_tcp_user_timeout(Some(dead))?;
        socket.set_tcp_notsent_lowat(UNSENT_BYTES)?;
    }
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    // `decisions` 10: vanished peers are found by TCP keep-alive and user timeout.
    #[tokio::test]
    async fn the_kernel_looks_after_vanished_peers() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        prepare(&stream, Duration::from_secs(30)).unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        let idle = socket.tcp_keepalive_time().unwrap();
        let interval = socket.tcp_keepalive_interval().unwrap();
        assert_eq!(idle + interval * socket.tcp_keepalive_retries().unwrap(), Duration::from_secs(30));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(30)));
    }
}
