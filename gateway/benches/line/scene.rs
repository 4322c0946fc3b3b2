//! What stands ready before anything is measured: devices, a subscription, a consumer's token.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use serde_json::json;

use crate::http::Client;

/// Where subscriptions are made.
pub(crate) const SUBSCRIPTIONS: &str = "/notification2/subscriptions";
/// The one that a scene has.
pub(crate) const SUBSCRIPTION: &str = "line";

/// The devices of the run and the token of its one consumer.
pub(crate) struct Scene {
    pub(crate) devices: Vec<String>,
    pub(crate) token: String,
}

impl Scene {
    /// Without a filter, everything that is measured comes through.
    pub(crate) fn set_up(http: SocketAddr, devices: usize, type_filter: Option<&str>) -> Result<Self> {
        let mut client = Client::connect(http)?;
        let devices = (0..devices).map(|number| device(&mut client, number)).collect::<Result<_>>()?;
        let mut filter = json!({"apis": ["measurements"]});
        if let Some(type_filter) = type_filter {
            filter["typeFilter"] = type_filter.into();
        }
        client.create(
            SUBSCRIPTIONS,
            &json!({"context": "tenant", "subscription": SUBSCRIPTION, "subscriptionFilter": filter}),
        )?;
        let token = token(&mut client, SUBSCRIPTION, "bench")?;
        Ok(Self { devices, token })
    }
}

/// The token of a consumer.
pub(crate) fn token(client: &mut Client, subscription: &str, subscriber: &str) -> Result<String> {
    let asked = json!({"subscription": subscription, "subscriber": subscriber});
    let token = client.create("/notification2/token", &asked)?;
    Ok(token["token"].as_str().context("no token")?.to_owned())
}

/// The id of a new device.
pub(crate) fn device(client: &mut Client, number: usize) -> Result<String> {
    let created =
        client.create("/inventory/managedObjects", &json!({"name": format!("Device {number}"), "c8y_IsDevice": {}}))?;
    Ok(created["id"].as_str().context("a managed object without an id")?.to_owned())
}
