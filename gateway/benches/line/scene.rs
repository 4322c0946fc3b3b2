//! What stands ready before anything is measured: devices, a subscription whose type filter judges every message, a consumer's
//! token.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use serde_json::json;

use crate::http::Client;
use crate::measurement::type_filter;

/// The devices of the run and the token of its one consumer.
pub(crate) struct Scene {
    pub(crate) devices: Vec<String>,
    pub(crate) token: String,
}

impl Scene {
    pub(crate) fn set_up(http: SocketAddr, devices: usize) -> Result<Self> {
        let mut client = Client::connect(http)?;
        let devices = (0..devices).map(|number| device(&mut client, number)).collect::<Result<_>>()?;
        client.create(
            "/notification2/subscriptions",
            &json!({
                "context": "tenant",
                "subscription": "line",
                "subscriptionFilter": {"apis": ["measurements"], "typeFilter": type_filter()},
            }),
        )?;
        let token = client.create("/notification2/token", &json!({"subscription": "line", "subscriber": "bench"}))?;
        let token = token["token"].as_str().context("no token")?.to_owned();
        Ok(Self { devices, token })
    }
}

fn device(client: &mut Client, number: usize) -> Result<String> {
    let created =
        client.create("/inventory/managedObjects", &json!({"name": format!("Device {number}"), "c8y_IsDevice": {}}))?;
    Ok(created["id"].as_str().context("a managed object without an id")?.to_owned())
}
