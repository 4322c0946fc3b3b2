//! Tidegate: TRANSIENT measurements over HTTP, consumers over WebSocket, every commit flushed before its 201.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use crate::consumer::Consumer;
use crate::gateway::Gateway;
use crate::http::Client;
use crate::inbox::Inbox;
use crate::load::Load;
use crate::measurement::{MOST, Request, SendTimes, TYPES, body, now, type_filter};
use crate::process::Guarded;
use crate::scene::{SUBSCRIPTION, Scene, token};
use crate::system::{DEVICES, IN_FLIGHT, System};

/// The others keep no objects either.
const MODE: &str = "TRANSIENT";
/// Measurements in a POST of a producer that has several to send.
const SEVERAL: usize = 16;

/// How the measurements go in.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum How {
    Singly,
    /// Singly, and every message is judged by a plugin.
    Filtered,
    /// [`SEVERAL`] in a POST; as many are in flight.
    Together,
}

/// A gateway with one subscription.
pub(crate) struct Tidegate {
    how: How,
    gateway: Gateway,
    consumers: Vec<Consumer>,
    requests: Arc<[Request]>,
}

impl Tidegate {
    pub(crate) fn start(data: &Path, consumers: usize, sent: &Arc<SendTimes>, how: How) -> Result<Self> {
        let gateway = Gateway::start(data)?;
        let type_filter = (how == How::Filtered).then(type_filter);
        let Scene { devices, .. } = Scene::set_up(gateway.http, DEVICES, type_filter.as_deref())?;
        let mut client = Client::connect(gateway.http)?;
        let mut connect = |number| {
            let token = token(&mut client, SUBSCRIPTION, &format!("consumer{number}"))?;
            Consumer::connect(gateway.http, &token, sent.clone())
        };
        let consumers = (0..consumers).map(&mut connect).collect::<Result<_>>()?;
        let time = now();
        let typed: Vec<(&String, &str)> = devices.iter().zip(TYPES.into_iter().cycle()).collect();
        let each = if how == How::Together { SEVERAL } else { 1 };
        let requests = typed.chunks_exact(each).map(|some| match some {
            [(device, type_)] => Request::single(device, type_, &time, MODE),
            some => Request::collection(some.iter().map(|(device, type_)| body(device, type_, &time)), MODE),
        });
        Ok(Self { how, gateway, consumers, requests: requests.collect() })
    }
}

impl System for Tidegate {
    fn name(&self) -> String {
        match self.how {
            How::Singly => "Tidegate".to_owned(),
            How::Filtered => "Tidegate with a typeFilter".to_owned(),
            How::Together => format!("Tidegate, {SEVERAL} in a POST"),
        }
    }

    fn server(&self) -> &Guarded {
        &self.gateway.process
    }

    fn inboxes(&self) -> Vec<&Inbox> {
        self.consumers.iter().map(|consumer| &consumer.inbox).collect()
    }

    fn publish(&self, sent: &Arc<SendTimes>, time: Duration) -> Result<u64> {
        let (to, requests) = (self.gateway.http, &self.requests);
        let in_flight = IN_FLIGHT / requests[0].takes() as usize;
        Ok(Load { to, requests, sent, in_flight, most: MOST, per_second: None, time }.run()?.created)
    }
}
