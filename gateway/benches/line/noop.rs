//! What an HTTP server costs that does nothing: it reads the body and answers 201. It runs in a process of its own.

use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;

use crate::process::Guarded;

/// The first argument with which this program becomes the server; a `name: value` for each header of its answers follows.
pub(crate) const ARGUMENT: &str = "noop-server";

/// The running server.
pub(crate) struct NoOp {
    pub(crate) process: Guarded,
    pub(crate) http: SocketAddr,
}

impl NoOp {
    /// Starts the server; its answers have the headers of `answer`, which came from the gateway.
    pub(crate) fn start(answer: &[u8]) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(ARGUMENT).args(headers(answer)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Guarded::spawn(&mut command)?;
        let output = process.child().stdout.take().context("invariant: the output is piped")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        Ok(Self { process, http: line.trim().parse().context("the no-op server has not started")? })
    }
}

/// The header lines of an answer, without those that hyper writes itself.
fn headers(answer: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(answer);
    let head = text.split("\r\n\r\n").next().unwrap_or_default();
    let own = ["content-length", "date", "connection"];
    let is_other = |line: &&str| !own.iter().any(|name| line.to_ascii_lowercase().starts_with(name));
    head.lines().skip(1).filter(is_other).map(String::from).collect()
}

/// Serves on a free port, which is the only line on standard output, until standard input ends.
pub(crate) fn serve(lines: &[String]) -> Result<()> {
    let mut headers = HeaderMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ").context("a header without a colon")?;
        headers.insert(HeaderName::try_from(name)?, HeaderValue::try_from(value)?);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    writeln!(std::io::stdout(), "{}", listener.local_addr()?)?;
    runtime.spawn(accept(listener, Arc::new(headers)));
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

async fn accept(listener: tokio::net::TcpListener, headers: Arc<HeaderMap>) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let headers = headers.clone();
        let answer = service_fn(move |request| answer(request, headers.clone()));
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
    }
}

async fn answer(request: Request<Incoming>, headers: Arc<HeaderMap>) -> Result<Response<Empty<Bytes>>, Infallible> {
    let _ = request.into_body().collect().await;
    let mut response = Response::new(Empty::new());
    *response.status_mut() = StatusCode::CREATED;
    response.headers_mut().clone_from(&headers);
    Ok(response)
}
