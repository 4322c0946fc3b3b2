//! Starts gateways and speaks to them, so that a test reads as a scene.
#![allow(dead_code, unused_imports, reason = "shared by two test binaries, neither of which needs all of it")]

mod call;
mod components;
mod consumer;
mod dice;
mod endpoint;
mod gateway;
#[cfg(target_os = "linux")]
mod mortal;
mod raw;
mod tls;
mod words;

use std::time::{Duration, Instant};

pub(crate) use call::{Answer, Call};
pub(crate) use components::{component, filter_with, leb, section, with_length};
pub(crate) use consumer::{Consumer, Frame, Stream};
pub(crate) use dice::Dice;
pub(crate) use endpoint::{Endpoint, Pushed, Reply};
pub(crate) use gateway::{Gateway, PASSWORD, Producer, Program, Setup, USER};
#[cfg(target_os = "linux")]
pub(crate) use mortal::Mortal;
pub(crate) use raw::{BASIC, exchange, raw, upgrade, upgraded};
pub(crate) use tls::Authority;
pub(crate) use words::{TIME, alarm, event, forwarded, measurement, of_object, of_tenant, operation, typed, value_of};

/// How long anything may take before a test fails: long, since many gateways share the machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `look` finds something.
pub(crate) async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "it never came to this: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The result of `work`, which must not take longer than [`PATIENCE`].
pub(crate) async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or_else(|_| panic!("it took too long: {what}"))
}
