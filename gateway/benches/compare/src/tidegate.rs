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
use crate::measurement::{MOST, Request, SendTimes, TYPES, now, type_filter};
use crate::process::Guarded;
use crate::scene::{SUBSCRIPTION, Scene, token};
use crate::system::{DEVICES, IN_FLIGHT, System};

/// A gateway with one subscription.
pub(crate) struct Tidegate {
    name: &'static str,
    gateway: Gateway,
    consumers: Vec<Consumer>,
    requests: Arc<[Request]>,
}

impl Tidegate {
    /// If it is `filtered`, every message is judged by a plugin.
    pub(crate) fn start(data: &Path, consumers: usize, sent: &Arc<SendTimes>, filtered: bool) -> Result<Self> {
        let gateway = Gateway::start(data)?;
        let type_filter = filtered.then(type_filter);
        let Scene { devices, .. } = Scene::set_up(gateway.http, DEVICES, type_filter.as_deref())?;
        let mut client = Client::connect(gateway.http)?;
        let mut connect = |number| {
            let token = token(&mut client, SUBSCRIPTION, &format!("consumer{number}"))?;
            Consumer::connect(gateway.http, &token, sent.clone())
        };
        let consumers = (0..consumers).map(&mut connect).collect::<Result<_>>()?;
        let time = now();
        let typed = devices.iter().zip(TYPES.iter().cycle());
        let requests = typed.map(|(device, type_)| Request::single(device, type_, &time, "TRANSIENT")).collect();
        let name = if filtered { "Tidegate with a typeFilter" } else { "Tidegate" };
        Ok(Self { name, gateway, consumers, requests })
    }
}

impl System for Tidegate {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn server(&self) -> &Guarded {
        &self.gateway.process
    }

    fn inboxes(&self) -> Vec<&Inbox> {
        self.consumers.iter().map(|consumer| &consumer.inbox).collect()
    }

    fn publish(&self, sent: &Arc<SendTimes>, time: Duration) -> Result<u64> {
        let (to, requests) = (self.gateway.http, &self.requests);
        Ok(Load { to, requests, sent, in_flight: IN_FLIGHT, most: MOST, per_second: None, time }.run()?.created)
    }
}
