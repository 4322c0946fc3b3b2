//! An HTTP endpoint for pushes: it answers as it is told, and shows what it got.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{LOCATION, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::{Stream, in_time};

/// How a request is answered.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    /// With this status, at once.
    Status(u16),
    /// With 204, after this time.
    After(Duration),
    /// With 503 and this `Retry-After`.
    RetryAfter(String),
    /// With 307 to somewhere else.
    Redirect(String),
    /// With 200 and a body without an end.
    Endless,
    /// Not at all.
    Silence,
}

/// A request that came.
#[derive(Debug)]
pub(crate) struct Pushed {
    pub(crate) at: Instant,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Pushed {
    #[track_caller]
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.headers)).to_str().unwrap()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {:?}", self.body))
    }

    #[track_caller]
    pub(crate) fn message_id(&self) -> u64 {
        self.header("tidegate-message-id").parse().unwrap()
    }
}

/// The endpoint. Dropping it closes its listener and its connections.
pub(crate) struct Endpoint {
    pub(crate) addr: SocketAddr,
    scheme: &'static str,
    shared: Arc<Shared>,
    pushed: mpsc::UnboundedReceiver<Pushed>,
    stop: CancellationToken,
}

struct Shared {
    script: Mutex<VecDeque<Reply>>,
    /// What is answered when the script is at its end.
    otherwise: Mutex<Reply>,
    pushed: mpsc::UnboundedSender<Pushed>,
    connections: AtomicUsize,
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Endpoint {
    /// On a free port of 127.0.0.1; answers 204.
    pub(crate) async fn start() -> Self {
        Self::bind(([127, 0, 0, 1], 0).into(), None).await
    }

    /// Over TLS.
    pub(crate) async fn secure(acceptor: TlsAcceptor) -> Self {
        Self::bind(([127, 0, 0, 1], 0).into(), Some(acceptor)).await
    }

    pub(crate) async fn bind(addr: SocketAddr, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind(addr).await.unwrap();
        let (addr, scheme) = (listener.local_addr().unwrap(), if tls.is_some() { "https" } else { "http" });
        let (sender, pushed) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            script: Mutex::default(),
            otherwise: Mutex::new(Reply::Status(204)),
            pushed: sender,
            connections: AtomicUsize::new(0),
            now: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        });
        let stop = CancellationToken::new();
        tokio::spawn(stop.clone().run_until_cancelled_owned(accept(listener, tls, shared.clone(), stop.clone())));
        Self { addr, scheme, shared, pushed, stop }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}://{}{path}", self.scheme, self.addr)
    }

    /// How the next requests are answered.
    pub(crate) fn script(&self, replies: impl IntoIterator<Item = Reply>) {
        self.shared.script.lock().unwrap().extend(replies);
    }

    /// How all others are answered from now on.
    pub(crate) fn otherwise(&self, reply: Reply) {
        *self.shared.otherwise.lock().unwrap() = reply;
    }

    /// The next request.
    pub(crate) async fn next(&mut self) -> Pushed {
        in_time("the next push", self.pushed.recv()).await.unwrap()
    }

    /// The next `count` requests.
    pub(crate) async fn take(&mut self, count: usize) -> Vec<Pushed> {
        let mut pushed = Vec::with_capacity(count);
        for _ in 0..count {
            pushed.push(self.next().await);
        }
        pushed
    }

    /// Whether nothing comes for `pause`.
    pub(crate) async fn is_silent_for(&mut self, pause: Duration) -> bool {
        tokio::time::timeout(pause, self.pushed.recv()).await.is_err()
    }

    /// Requests that are not answered yet.
    pub(crate) fn waiting(&self) -> usize {
        self.shared.now.load(Ordering::SeqCst)
    }

    /// The most requests that ever were at a time.
    pub(crate) fn most_at_a_time(&self) -> usize {
        self.shared.most.load(Ordering::SeqCst)
    }

    /// Connections that were ever opened.
    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, shared: Arc<Shared>, stop: CancellationToken) {
    loop {
        let (socket, _) = listener.accept().await.unwrap();
        shared.connections.fetch_add(1, Ordering::SeqCst);
        let (tls, shared) = (tls.clone(), shared.clone());
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            let stream: Box<dyn Stream> = match tls {
                None => Box::new(socket),
                // Who does not trust the certificate leaves.
                Some(tls) => match tls.accept(socket).await {
                    Ok(stream) => Box::new(stream),
                    Err(_) => return,
                },
            };
            let service = service_fn(move |request| answer(shared.clone(), request));
            let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
        }));
    }
}

/// Counts the requests that are not answered, even if they are given up.
struct Waiting(Arc<Shared>);

impl Waiting {
    fn new(shared: Arc<Shared>) -> Self {
        let now = shared.now.fetch_add(1, Ordering::SeqCst) + 1;
        shared.most.fetch_max(now, Ordering::SeqCst);
        Self(shared)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

type Body = BoxBody<Bytes, Infallible>;

async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, hyper::Error> {
    let _waiting = Waiting::new(shared.clone());
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let scripted = shared.script.lock().unwrap().pop_front();
    let reply = scripted.unwrap_or_else(|| shared.otherwise.lock().unwrap().clone());
    let path = head.uri.path_and_query().unwrap().to_string();
    let _ = shared.pushed.send(Pushed { at: Instant::now(), path, headers: head.headers, body });
    let response = Response::builder();
    let response = match &reply {
        Reply::Status(status) => response.status(*status),
        Reply::After(pause) => {
            tokio::time::sleep(*pause).await;
            response.status(204)
        }
        Reply::RetryAfter(value) => response.status(503).header(RETRY_AFTER, value),
        Reply::Redirect(location) => response.status(307).header(LOCATION, location),
        Reply::Endless => response.status(200),
        Reply::Silence => std::future::pending().await,
    };
    let body = if matches!(reply, Reply::Endless) {
        StreamBody::new(stream::repeat_with(|| Ok(Frame::data(Bytes::from_static(&[b'x'; 8 << 10]))))).boxed()
    } else {
        Full::default().boxed()
    };
    Ok(response.body(body).unwrap())
}
