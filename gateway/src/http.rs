//! The HTTP listeners, plain and over TLS: sockets in, a hyper connection for each.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::response::Response;
use futures_util::TryFutureExt as _;
use hyper::Request;
use hyper::body::Incoming;
use hyper::http::uri::Scheme;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::answers::Unsent;
use crate::api::drop_empty_segments;
use crate::socket::{Pace, Socket};
use crate::telemetry::{Connected, count, tls_handshakes_failed};

/// Bytes that are read ahead of a connection; a head that does not fit is 431.
const HEAD_BYTES: usize = 64 << 10;
/// How long requests may take to finish when the gateway stops.
const DRAIN_WAIT: Duration = Duration::from_secs(3);
/// Pause after a failed accept, as when the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Bounds on connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Open connections, upgraded ones too; the next ones wait in the kernel.
    pub connections: usize,
    /// A request's head has to arrive within this time; the handshake of TLS before it as well.
    pub head: Duration,
    /// Bytes per second that a peer has to take of what there is for it; one that takes less over [`ConnectionLimits::head`] is left.
    pub answer_bytes_per_second: u64,
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
    /// Upgraded connections are not waited for. Requests carry the [`Scheme`] that they came by as an extension.
    pub async fn serve(self, router: Router, limits: ConnectionLimits, unsent: Unsent, stop: CancellationToken) {
        let (scheme, kind) = if self.tls.is_some() { (Scheme::HTTPS, "https") } else { (Scheme::HTTP, "http") };
        let router = TowerToHyperService::new(router);
        // Done here, since each layer of a router costs every request some boxes.
        let service = service_fn(move |mut request: Request<Incoming>| {
            drop_empty_segments(request.uri_mut());
            request.extensions_mut().insert(scheme.clone());
            let (unsent, may_be_repeated) = (unsent.clone(), request.method().is_safe());
            router.call(request).map_ok(move |response| {
                let response = unsent.hold(response, may_be_repeated);
                count().response(response.status());
                response
            })
        });
        let connections = TaskTracker::new();
        let permits = Arc::new(Semaphore::new(limits.connections));
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => break,
                accepted = accept(&self.listener, &permits) => accepted,
            };
            let (stream, place) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let pace = Pace::new(limits.answer_bytes_per_second, limits.head);
            let socket = match Socket::new(stream, limits.dead, pace, place) {
                Ok(socket) => socket,
                Err(error) => {
                    tracing::debug!(%error, "a connection was gone at once");
                    continue;
                }
            };
            let (service, tls, stop, upgraded) = (service.clone(), self.tls.clone(), stop.clone(), socket.upgraded());
            let connected = Connected::new(kind);
            connections.spawn(async move {
                let _connected = connected;
                match tls {
                    None => speak(socket, service, limits, stop, &upgraded).await,
                    Some(tls) => {
                        let shaken = tokio::select! {
                            () = stop.cancelled() => return,
                            shaken = tokio::time::timeout(limits.head, tls.accept(socket)) => shaken,
                        };
                        let error = match shaken {
                            Ok(Ok(stream)) => return speak(stream, service, limits, stop, &upgraded).await,
                            Ok(Err(error)) => error,
                            Err(late) => late.into(),
                        };
                        tls_handshakes_failed().increment(1);
                        tracing::debug!(%error, "a TLS handshake failed");
                    }
                }
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
async fn speak<S, V>(stream: S, service: V, limits: ConnectionLimits, stop: CancellationToken, upgraded: &AtomicBool)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    V: Service<Request<Incoming>, Response = Response, Error = Infallible>,
{
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(HEAD_BYTES);
    // Answers are short: to put them together takes less than to have the kernel gather them.
    server.writev(false);
    let mut connection = pin!(server.serve_connection(TokioIo::new(stream), service).with_upgrades());
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    // What is left of it is a WebSocket, if anything.
    upgraded.store(true, Ordering::Relaxed);
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
