//! `tidegate topics`, `tidegate consumers` and `tidegate subscriptions`: how those of a running gateway fare, and what is set for them.

use std::io::{self, Write as _};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use hyper::StatusCode;
use serde_json::{Map, Value, json};

use crate::admin::print;
use crate::api::path_segment;
use crate::client::{Client, ClientArgs};
use crate::platform::parse_id;
use crate::rollout;
use crate::time::span;

const TOPICS: &str = "/tidegate/v1/topics";

/// Whom and what a command is about.
#[derive(Args, Debug)]
struct Place {
    #[command(flatten)]
    gateway: ClientArgs,
    /// The tenant (default: that of the user who asks)
    #[arg(long, global = true, value_name = "NAME")]
    tenant: Option<String>,
    /// Prints the answer of the gateway as JSON
    #[arg(long, global = true)]
    json: bool,
}

/// `tidegate topics`
#[derive(Args, Debug)]
pub struct TopicsArgs {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    command: Option<TopicsCommand>,
}

#[derive(Subcommand, Debug)]
enum TopicsCommand {
    /// Changes what is set for a persistent topic, which need not exist yet; `default` takes a setting back
    Set {
        /// The topic
        name: String,
        /// Bytes that may wait
        #[arg(long, value_name = "BYTES")]
        quota_bytes: Option<String>,
        /// How long a message waits
        #[arg(long, value_name = "SECONDS")]
        ttl_seconds: Option<String>,
        /// What happens at the quota: reject, evict-oldest or park
        #[arg(long, value_name = "POLICY")]
        on_full: Option<String>,
        /// Whether consumers are told what they missed: true or false
        #[arg(long, value_name = "BOOL")]
        gap_messages: Option<String>,
    },
}

/// `tidegate consumers`
#[derive(Args, Debug)]
pub struct ConsumersArgs {
    #[command(flatten)]
    place: Place,
    /// Only those of this topic; `remove` needs it
    #[arg(long, global = true, value_name = "NAME")]
    topic: Option<String>,
    #[command(subcommand)]
    command: Option<ConsumersCommand>,
}

#[derive(Subcommand, Debug)]
enum ConsumersCommand {
    /// Unsubscribes a consumer; what waits for it alone is deleted
    Remove {
        /// Of the non-persistent topic of that name
        #[arg(long)]
        non_persistent: bool,
        /// The consumer
        name: String,
    },
}

/// `tidegate subscriptions`
#[derive(Args, Debug)]
pub struct SubscriptionsArgs {
    #[command(flatten)]
    gateway: ClientArgs,
    /// Prints the answers of the gateway as JSON, each subscription with its canary
    #[arg(long)]
    json: bool,
}

/// Runs `tidegate topics`.
///
/// # Errors
/// Refusals, with the reason; and when the gateway cannot be reached.
pub async fn topics(args: TopicsArgs) -> anyhow::Result<()> {
    let TopicsArgs { place, command } = args;
    let client = place.gateway.client()?;
    let Some(TopicsCommand::Set { name, quota_bytes, ttl_seconds, on_full, gap_messages }) = command else {
        let topics = place.topics(&client).await?;
        return show(place.json, json!({"topics": topics}), &topic_table(&topics), "there are no topics");
    };
    let members =
        [("quotaBytes", quota_bytes), ("ttlSeconds", ttl_seconds), ("onFull", on_full), ("gapMessages", gap_messages)];
    let body: Map<_, _> =
        members.into_iter().filter_map(|(name, text)| Some((name.to_owned(), setting(&text?)))).collect();
    let path = place.path(&format!("{TOPICS}/persistent/{}", path_segment(&name)));
    let topic = client.put(&path, &body).await?;
    if place.json { print(&[topic]) } else { print(&topic_table(&[topic])) }
}

/// Runs `tidegate consumers`.
///
/// # Errors
/// As [`topics`].
pub async fn consumers(args: ConsumersArgs) -> anyhow::Result<()> {
    let ConsumersArgs { place, topic, command } = args;
    let client = place.gateway.client()?;
    if let Some(ConsumersCommand::Remove { non_persistent, name }) = command {
        let topic = topic.context("--topic must say of which topic it is a consumer")?;
        let tenant = place.tenant.as_deref().unwrap_or(place.gateway.tenant());
        let persistence = if non_persistent { "non-persistent" } else { "persistent" };
        let path = format!(
            "/service/messaging-management/tenants/{}/namespaces/relnotif/topics/{}/types/{persistence}/subscribers/{}",
            path_segment(tenant),
            path_segment(&topic),
            path_segment(&name)
        );
        client.delete(&path).await?;
        return print(&[format!("{name} is unsubscribed from {topic}")]);
    }
    let mut topics = place.topics(&client).await?;
    if let Some(topic) = &topic {
        topics.retain(|one| one["name"] == **topic);
        if topics.is_empty() {
            bail!("there is no topic '{topic}'");
        }
    }
    topics.retain(|one| one["figures"]["consumers"] != 0);
    for topic in &mut topics {
        let (persistence, name) = (text(&topic["persistence"]), path_segment(text(&topic["name"])));
        *topic = client.get(&place.path(&format!("{TOPICS}/{persistence}/{name}"))).await?;
    }
    let table = consumer_table(&topics);
    show(place.json, json!({"topics": topics}), &table, "there are no consumers")
}

/// Runs `tidegate subscriptions`.
///
/// # Errors
/// As [`topics`].
pub async fn subscriptions(args: SubscriptionsArgs) -> anyhow::Result<()> {
    let SubscriptionsArgs { gateway, json } = args;
    let client = gateway.client()?;
    let mut subscriptions = client.pages("/notification2/subscriptions", "subscriptions").await?;
    for subscription in subscriptions.iter_mut().filter(|one| plugins(one).next().is_some()) {
        let id = subscription_id(text(&subscription["id"])).map_err(anyhow::Error::msg)?;
        match client.get(&rollout::path(id)).await {
            Ok(canary) => subscription["canary"] = canary,
            Err(error) if error.status() == Some(StatusCode::NOT_FOUND) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let table = subscription_table(&subscriptions);
    show(json, json!({"subscriptions": subscriptions}), &table, "there are no subscriptions")
}

impl Place {
    /// The topics of all pages.
    async fn topics(&self, client: &Client) -> anyhow::Result<Vec<Value>> {
        Ok(client.pages(&self.path(TOPICS), "topics").await?)
    }

    fn path(&self, path: &str) -> String {
        match &self.tenant {
            Some(tenant) => format!("{path}?tenant={}", path_segment(tenant)),
            None => path.to_owned(),
        }
    }
}

/// Prints the answer as JSON or its table; of an empty one it says `none` on standard error, so that no output means no rows.
fn show(json: bool, answer: Value, table: &[String], none: &str) -> anyhow::Result<()> {
    if json {
        return print(&[answer]);
    }
    if table.len() > 1 {
        return print(table);
    }
    writeln!(io::stderr(), "{none}").context("standard error cannot be written")
}

/// Reads the id of a subscription from the command line.
pub(crate) fn subscription_id(text: &str) -> Result<u64, &'static str> {
    parse_id(text).ok_or("the id of a subscription is a number; `tidegate subscriptions` lists them")
}

/// A value as it is typed; the gateway says what is wrong with it.
fn setting(text: &str) -> Value {
    match text {
        "default" => Value::Null,
        _ => serde_json::from_str(text).unwrap_or_else(|_| text.into()),
    }
}

fn topic_table(topics: &[Value]) -> Vec<String> {
    const HEAD: &[&str] = &[
        "TOPIC",
        "PERSISTENCE",
        "ON FULL",
        "SUBSCRIPTIONS",
        "CONSUMERS",
        "CLIENTS",
        "MESSAGES",
        "HELD",
        "BYTES",
        "QUOTA",
        "TTL",
        "GAP",
        "OLDEST",
        "EXPIRES IN",
        "IN/S",
        "OUT/S",
    ];
    let row = |topic: &Value| {
        let (policy, figures) = (&topic["policy"], &topic["figures"]);
        let mut row = vec![
            cell(&topic["name"]),
            cell(&topic["persistence"]),
            cell(&policy["onFull"]),
            cell(&topic["subscriptions"]),
        ];
        row.extend(["consumers", "clients", "messages", "heldMessages", "bytes"].map(|name| cell(&figures[name])));
        row.extend([cell(&policy["quotaBytes"]), age(&policy["ttlSeconds"]), cell(&policy["gapMessages"])]);
        row.extend(["oldestAgeSeconds", "expiresInSeconds"].map(|name| age(&figures[name])));
        row.extend(["rateIn", "rateOut"].map(|name| cell(&figures[name])));
        row
    };
    table(HEAD, 3, topics.iter().map(row))
}

fn consumer_table(topics: &[Value]) -> Vec<String> {
    const HEAD: &[&str] = &[
        "TOPIC",
        "PERSISTENCE",
        "CONSUMER",
        "STATE",
        "LAST ACK",
        "CLIENTS",
        "MESSAGES",
        "BYTES",
        "OLDEST",
        "EXPIRES IN",
        "ACK/S",
    ];
    let rows = topics.iter().flat_map(|topic| {
        topic["consumers"].as_array().into_iter().flatten().map(move |consumer| {
            let mut row = vec![cell(&topic["name"]), cell(&topic["persistence"]), cell(&consumer["name"])];
            row.extend([state(consumer), cell(&consumer["lastAcknowledged"])]);
            row.extend(["clients", "messages", "bytes"].map(|name| cell(&consumer[name])));
            row.extend(["oldestAgeSeconds", "expiresInSeconds"].map(|name| age(&consumer[name])));
            row.push(cell(&consumer["ackRate"]));
            row
        })
    });
    table(HEAD, 5, rows)
}

fn subscription_table(subscriptions: &[Value]) -> Vec<String> {
    const HEAD: &[&str] = &["ID", "TOPIC", "PERSISTENCE", "CONTEXT", "SOURCE", "PLUGINS", "CANARY"];
    let row = |one: &Value| {
        let persistence = if one["nonPersistent"] == true { "non-persistent" } else { "persistent" };
        let plugins = steps(one);
        let plugins = if plugins.is_empty() { "-".to_owned() } else { plugins.join(", ") };
        vec![
            cell(&one["id"]),
            cell(&one["subscription"]),
            persistence.to_owned(),
            cell(&one["context"]),
            cell(&one["source"]["id"]),
            plugins,
            canary(&one["canary"]),
        ]
    };
    table(HEAD, HEAD.len(), subscriptions.iter().map(row))
}

/// All plugins that a subscription has messages go through, in their order.
fn steps(subscription: &Value) -> Vec<String> {
    let of_types = subscription["subscriptionFilter"].get("typeFilter").map(|_| "type-filter".to_owned());
    let mut steps: Vec<_> = of_types.into_iter().chain(plugins(subscription).map(plugin_name)).collect();
    let copying = "fragments-to-copy".to_owned();
    if subscription.get("fragmentsToCopy").is_some() && !steps.contains(&copying) {
        steps.push(copying);
    }
    steps
}

/// The plugins that a subscription names, in the order in which they are asked.
fn plugins(subscription: &Value) -> impl Iterator<Item = &Value> {
    ["filters", "transforms"]
        .into_iter()
        .flat_map(|list| subscription["tidegate"][list].as_array().into_iter().flatten())
}

/// A plugin with its version, if it has one.
pub(crate) fn plugin_name(named: &Value) -> String {
    let name = text(&named["plugin"]);
    named["version"].as_u64().map_or_else(|| name.to_owned(), |version| format!("{name} {version}"))
}

fn canary(canary: &Value) -> String {
    let (current, last) = (&canary["plugin"], &canary["rolledBack"]);
    match (current.is_null(), last.is_null()) {
        (false, _) => format!("{} on {}", plugin_name(canary), canary["share"]),
        (true, false) => format!("{} was taken back", plugin_name(last)),
        (true, true) => "-".to_owned(),
    }
}

fn state(consumer: &Value) -> String {
    let states: Vec<_> = ["push", "parked"].into_iter().filter(|name| consumer[name] == true).collect();
    if states.is_empty() { "-".to_owned() } else { states.join(",") }
}

pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

pub(crate) fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn age(seconds: &Value) -> String {
    seconds.as_u64().map_or_else(|| "-".to_owned(), span)
}

/// Lines of equal columns, of which the first `texts` are aligned to the left.
pub(crate) fn table(head: &[&str], texts: usize, rows: impl Iterator<Item = Vec<String>>) -> Vec<String> {
    let rows: Vec<Vec<String>> =
        std::iter::once(head.iter().map(|&name| name.to_owned()).collect()).chain(rows).collect();
    let width = |at: usize| rows.iter().map(|row| row[at].chars().count()).max().unwrap_or_default();
    let widths: Vec<_> = (0..head.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells =
            row.iter().zip(&widths).enumerate().map(|(at, (cell, width))| {
                if at < texts { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["pumps", "7"], ["ü", "12345"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(table(&["TOPIC", "N"], 1, rows.into_iter()), ["TOPIC      N", "pumps      7", "ü      12345"]);
    }

    #[test]
    fn settings_are_numbers_words_and_nothing() {
        for (text, value) in [("7", json!(7)), ("true", json!(true)), ("park", json!("park")), ("default", Value::Null)]
        {
            assert_eq!(setting(text), value);
        }
    }
}
