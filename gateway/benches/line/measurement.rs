//! The requests that are posted: measurements of about 300 bytes, each carrying a number that comes out again in its frame.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::gateway::USER;
use crate::http::post;

/// Most numbered posts of a round.
pub(crate) const MOST: u64 = 1 << 20;
/// What the type filter of the subscription lets through, and all that is posted.
pub(crate) const TYPES: [&str; 2] = ["temperature", "pressure"];

const DIGITS: usize = 7;
const MARK: &[u8] = b"\"#";
const BATTERY: &str = r#","c8y_Battery":{"T":{"value":87}}}"#;
const PATH: &str = "/measurement/measurements";

/// A request ready to send, except for its numbers.
pub(crate) struct Request {
    bytes: Vec<u8>,
    numbers_at: Vec<usize>,
}

impl Request {
    /// These bytes; the number of each [`body`] among them can be set.
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        let numbers_at = memchr::memmem::find_iter(&bytes, MARK).map(|at| at + MARK.len()).collect();
        Self { bytes, numbers_at }
    }

    /// One measurement of the device `source`.
    pub(crate) fn single(source: &str, type_: &str, time: &str, mode: &str) -> Self {
        let body = body(source, type_, time);
        Self::new(post(USER, PATH, &headers("measurement", mode), &body).into_bytes())
    }

    /// One measurement of about 200 bytes for each of `sources` in a single request.
    pub(crate) fn bulk(sources: &[String], mode: &str) -> Self {
        let time = now();
        Self::collection(sources.iter().map(|source| short_body(source, TYPES[0], &time)), mode)
    }

    /// These measurements in a single request.
    pub(crate) fn collection(bodies: impl Iterator<Item = String>, mode: &str) -> Self {
        let body = format!(r#"{{"measurements":[{}]}}"#, bodies.collect::<Vec<_>>().join(","));
        Self::new(post(USER, PATH, &headers("measurementcollection", mode), &body).into_bytes())
    }

    /// How many numbers it takes: of its measurements, or one if they carry none.
    pub(crate) fn takes(&self) -> u64 {
        self.numbers_at.len().max(1) as u64
    }

    /// Puts the request with numbers from `first` on into `buffer`.
    pub(crate) fn write(&self, first: u64, buffer: &mut Vec<u8>) {
        buffer.clear();
        buffer.extend_from_slice(&self.bytes);
        for (mut number, at) in (first..).zip(&self.numbers_at) {
            for digit in buffer[*at..at + DIGITS].iter_mut().rev() {
                *digit = b'0' + (number % 10) as u8;
                number /= 10;
            }
        }
    }
}

fn headers(kind: &str, mode: &str) -> String {
    format!("Content-Type: application/vnd.com.nsn.cumulocity.{kind}+json\r\nX-Cumulocity-Processing-Mode: {mode}\r\n")
}

/// The time as a device writes it.
pub(crate) fn now() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}

/// A measurement of about 300 bytes, with room for a number.
pub(crate) fn body(source: &str, type_: &str, time: &str) -> String {
    [
        &head(source, type_, time),
        r##","c8y_Sequence":{"n":{"value":1,"unit":"#0000000"}}"##,
        r#","c8y_Temperature":{"inside":{"value":21.5,"unit":"C"}}"#,
        r#","c8y_Pressure":{"line":{"value":1013.25,"unit":"hPa"},"tank":{"value":998.5,"unit":"hPa"}}"#,
        BATTERY,
    ]
    .concat()
}

fn short_body(source: &str, type_: &str, time: &str) -> String {
    let temperature = r#","c8y_Temperature":{"inside":{"value":21.5,"unit":"C"},"outside":{"value":-3.25,"unit":"C"}}"#;
    [&head(source, type_, time), temperature, BATTERY].concat()
}

fn head(source: &str, type_: &str, time: &str) -> String {
    format!(r#"{{"source":{{"id":"{source}"}},"type":"{type_}","time":"{time}""#)
}

/// The filter that lets [`TYPES`] through.
pub(crate) fn type_filter() -> String {
    TYPES.map(|name| format!("'{name}'")).join(" or ")
}

/// The number that a body carries.
pub(crate) fn number(body: &[u8]) -> Option<u64> {
    let at = memchr::memmem::find(body, MARK)? + MARK.len();
    std::str::from_utf8(body.get(at..at + DIGITS)?).ok()?.parse().ok()
}

/// When each numbered post of a round was sent; shared by the load and the consumers.
pub(crate) struct SendTimes {
    origin: Instant,
    /// Nanoseconds since `origin`; 0: not sent.
    nanoseconds: Box<[AtomicU64]>,
}

impl SendTimes {
    pub(crate) fn new() -> Self {
        Self { origin: Instant::now(), nanoseconds: (0..MOST).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn clear(&self) {
        self.nanoseconds.iter().for_each(|slot| slot.store(0, Ordering::Relaxed));
    }

    pub(crate) fn stamp(&self, number: u64, now: Instant) {
        let since = now.duration_since(self.origin).as_nanos() as u64;
        self.nanoseconds[number as usize].store(since, Ordering::Relaxed);
    }

    /// How long ago the post was sent, if it was.
    pub(crate) fn since(&self, number: u64, now: Instant) -> Option<Duration> {
        let sent = self.nanoseconds.get(number as usize)?.load(Ordering::Relaxed);
        let since = now.duration_since(self.origin).as_nanos() as u64;
        (sent > 0).then(|| Duration::from_nanos(since.saturating_sub(sent)))
    }
}
