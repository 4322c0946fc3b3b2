//! As much of HTTP/1.1 as the run needs: answers with a Content-Length over kept-alive connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::gateway::{PASSWORD, USER};

const PATIENCE: Duration = Duration::from_secs(10);
const ANSWER_BYTES: usize = 64 << 10;

/// Where the parts of a complete answer lie.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: Range<usize>,
}

impl Answer {
    /// Finds the answer at the beginning of `bytes`, or nothing as long as its end is missing.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<Self>> {
        let Some(head) = memchr::memmem::find(bytes, b"\r\n\r\n") else { return Ok(None) };
        let digits = bytes.get(9..12).and_then(|digits| std::str::from_utf8(digits).ok());
        let status = digits.and_then(|digits| digits.parse().ok()).context("no status code")?;
        let length = content_length(&bytes[..head]).unwrap_or(0);
        let body = head + 4..head + 4 + length;
        Ok((bytes.len() >= body.end).then_some(Self { status, body }))
    }
}

fn content_length(head: &[u8]) -> Option<usize> {
    const NAME: &[u8] = b"content-length:";
    let is_length = |line: &&[u8]| line.len() > NAME.len() && line[..NAME.len()].eq_ignore_ascii_case(NAME);
    let line = head.split(|byte| *byte == b'\n').find(is_length)?;
    std::str::from_utf8(&line[NAME.len()..]).ok()?.trim().parse().ok()
}

/// A POST of `user`, whose password is [`PASSWORD`].
pub(crate) fn post(user: &str, path: &str, headers: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: tidegate.local\r\nAuthorization: Basic {}\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        STANDARD.encode(format!("{user}:{PASSWORD}")),
        body.len(),
    )
}

/// A blocking client on one connection, for what is not measured.
pub(crate) struct Client(TcpStream);

impl Client {
    pub(crate) fn connect(to: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&to, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(stream))
    }

    /// Posts JSON and gives the JSON that comes back with a 200 or 201.
    pub(crate) fn create(&mut self, path: &str, body: &Value) -> Result<Value> {
        let headers = "Accept: application/json\r\nContent-Type: application/json\r\n";
        let answer = self.exchange(post(USER, path, headers, &body.to_string()).as_bytes())?;
        let parsed = Answer::parse(&answer)?.context("incomplete answer")?;
        let body = &answer[parsed.body];
        ensure!(matches!(parsed.status, 200 | 201), "{path}: {} {}", parsed.status, String::from_utf8_lossy(body));
        serde_json::from_slice(body).with_context(|| format!("{path}: the answer is not JSON"))
    }

    /// Sends a complete request and gives the complete answer.
    pub(crate) fn exchange(&mut self, request: &[u8]) -> Result<Vec<u8>> {
        self.0.write_all(request)?;
        let mut answer = Vec::new();
        let mut piece = [0; 4096];
        while answer.len() < ANSWER_BYTES {
            let count = self.0.read(&mut piece)?;
            ensure!(count > 0, "closed in the middle of an answer");
            answer.extend_from_slice(&piece[..count]);
            if Answer::parse(&answer)?.is_some() {
                return Ok(answer);
            }
        }
        bail!("an answer longer than {ANSWER_BYTES} bytes")
    }
}
