//! `tidegate plugin roll|canary|promote|rollback`: which versions the subscriptions of a running gateway have.

use clap::Subcommand;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::authoring::{json_text, lines, version};
use crate::client::Client;
use crate::manage::{plugin_name, subscription_id};

#[derive(Subcommand, Debug)]
pub(crate) enum RolloutCommand {
    /// Gives a subscription another version of one of its plugins
    Roll {
        /// Id of the subscription
        #[arg(value_parser = subscription_id)]
        subscription: u64,
        /// The plugin
        plugin: String,
        /// The version, or `latest`
        #[arg(value_parser = version)]
        version: String,
        /// Only for this share of the sources, such as 0.1, until `promote` or `rollback`
        #[arg(long)]
        share: Option<f64>,
        /// JSON that the plugin gets as settings (default: those that it has)
        #[arg(long, value_name = "JSON", value_parser = json_text)]
        settings: Option<Box<RawValue>>,
        /// Where the subscription names the plugin, such as filters[0], if it names it more than once
        #[arg(long)]
        place: Option<String>,
    },
    /// Shows how the canary of a subscription compares
    Canary {
        /// Id of the subscription
        #[arg(value_parser = subscription_id)]
        subscription: u64,
    },
    /// Gives all sources of a subscription the version of its canary
    Promote {
        /// Id of the subscription
        #[arg(value_parser = subscription_id)]
        subscription: u64,
    },
    /// Takes the canary of a subscription back
    Rollback {
        /// Id of the subscription
        #[arg(value_parser = subscription_id)]
        subscription: u64,
    },
}

/// What is asked of a canary.
#[derive(Serialize)]
struct NewCanary {
    plugin: String,
    version: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    settings: Option<Box<RawValue>>,
    share: f64,
    place: Option<String>,
}

/// Runs one of them; the answer that there is to show afterwards and its lines, if there is anything.
///
/// # Errors
/// Refusals, with the reason; when the gateway cannot be reached.
pub(crate) async fn run(client: &Client, command: RolloutCommand) -> anyhow::Result<Option<(Value, Vec<String>)>> {
    match command {
        RolloutCommand::Roll { subscription, plugin, version, share, settings, place } => {
            let version = version.parse::<u32>().map_or(version.into(), Value::from);
            let canary = NewCanary { plugin, version, settings, share: share.unwrap_or(1.0), place };
            let made = client.put(&path(subscription), &canary).await?;
            let (new, old) = (plugin_name(&made), plugin_name(&made["current"]));
            let line = match share {
                Some(share) => format!("subscription {subscription} tries {new} on a share of {share} (else {old})"),
                None => {
                    promote(client, subscription).await?;
                    format!("subscription {subscription} uses {new} (was {old})")
                }
            };
            Ok(Some((made, vec![line])))
        }
        RolloutCommand::Canary { subscription } => {
            let canary = client.get(&path(subscription)).await?;
            let rows = lines(&canary);
            Ok(Some((canary, rows)))
        }
        RolloutCommand::Promote { subscription } => promote(client, subscription).await.map(|()| None),
        RolloutCommand::Rollback { subscription } => {
            client.delete(&path(subscription)).await?;
            Ok(None)
        }
    }
}

pub(crate) fn path(subscription: u64) -> String {
    format!("/tidegate/v1/subscriptions/{subscription}/canary")
}

async fn promote(client: &Client, subscription: u64) -> anyhow::Result<()> {
    client.post(&format!("{}/promote", path(subscription)), &()).await?;
    Ok(())
}
