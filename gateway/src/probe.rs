//! `tidegate plugin try NAME|explain|usage`: what the plugins of a running gateway make of messages.
//!
//! ```text
//! samples of standard input, or what a subscription selects ─▶ gateway ─▶ an outcome a line
//! ```

use std::io;

use anyhow::{Context as _, anyhow, ensure};
use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::admin::print;
use crate::authoring::{LATEST, path};
use crate::client::{Client, ClientArgs};
use crate::json::Limits;
use crate::manage::{cell, plugin_name, table, text};
use crate::samples::{self, Batched, Tally};
use crate::workbench::{BenchArgs, TryArgs, eprint, sum_up};

/// What is asked for.
#[derive(Serialize)]
struct NewTrial {
    #[serde(skip_serializing_if = "Option::is_none")]
    settings: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<Vec<Box<RawValue>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subscription: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last: Option<u32>,
}

/// What is shown of a trial.
#[derive(Deserialize)]
struct Report {
    messages: usize,
    tried: usize,
    truncated: Option<String>,
    verdicts: Tally,
    batch: Option<Batched>,
    results: Vec<Box<RawValue>>,
}

/// Runs `tidegate plugin try` for a plugin of the gateway: a line of JSON for each message, and the sum on standard error.
///
/// # Errors
/// Refusals, with the reason; a line that is no sample, by its number; when the plugin has failed on a message, or on all of
/// them in a batch.
pub(crate) async fn try_out(gateway: &ClientArgs, name: &str, args: TryArgs, json: bool) -> anyhow::Result<()> {
    let TryArgs { bench: BenchArgs { file, settings, world, config }, version, subscription, last } = args;
    let found = find(gateway, name).await;
    // Its name may be that of a file that is not there.
    let no_file = || format!("there is no file '{name}' to be tried, and no plugin of a gateway");
    let client = if file.is_file() { found? } else { found.with_context(no_file)? };
    ensure!(world.is_none() && config.is_none(), "--world and --config are for a plugin in a file");
    let messages = if subscription.is_some() { None } else { Some(written()?) };
    let trial = NewTrial { settings, messages, subscription: subscription.map(|id| id.to_string()), last };
    let path = format!("{}/try", path(name, Some(version.as_deref().unwrap_or(LATEST))));
    let answer = ask(&client, &path, &trial).await?;
    if json {
        return print(&[answer]);
    }
    let Report { messages, tried, truncated, verdicts, batch, results } = serde_json::from_str(&answer)?;
    print(&results)?;
    if let Some(reason) = truncated {
        eprint(&format!("only {tried} of {messages} messages were tried: {reason}"));
    }
    sum_up(&verdicts, batch)
}

/// A gateway that has a plugin of this name.
async fn find(gateway: &ClientArgs, name: &str) -> anyhow::Result<Client> {
    let client = gateway.client()?;
    client.get(&path(name, None)).await?;
    Ok(client)
}

/// The samples of standard input, one a line.
fn written() -> anyhow::Result<Vec<Box<RawValue>>> {
    let mut written = Vec::new();
    for (line, text) in (1..).zip(io::stdin().lines()) {
        let text = text.with_context(|| format!("line {line} cannot be read"))?;
        if !text.trim().is_empty() {
            let sample = samples::sample(&text, &Limits::default());
            written.push(sample.map_err(|error| anyhow!("line {line}: {error}"))?);
        }
    }
    Ok(written)
}

/// What is shown of the way of a message.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Explained {
    message: Value,
    index: Hit,
    steps: Vec<Value>,
    outcome: String,
    body: Option<Box<RawValue>>,
    text: Option<String>,
    base64: Option<String>,
    frames: Vec<Frame>,
    wanted: bool,
    waits: bool,
    fits: bool,
    topic: Value,
}

#[derive(Deserialize)]
struct Hit {
    types: Vec<String>,
    reason: Option<String>,
}

#[derive(Deserialize)]
struct Frame {
    headers: Vec<String>,
    bytes: usize,
}

/// Runs `tidegate plugin explain`: the way of the message of standard input through a subscription, a step a line.
///
/// # Errors
/// Refusals, with the reason; what is no sample.
pub(crate) async fn explain(client: &Client, subscription: u64, json: bool) -> anyhow::Result<()> {
    let message = io::read_to_string(io::stdin()).context("standard input cannot be read")?;
    let sample = samples::sample(&message, &Limits::default())?;
    let answer = ask(client, &format!("/tidegate/v1/subscriptions/{subscription}/explain"), &sample).await?;
    if json { print(&[answer]) } else { print(&serde_json::from_str::<Explained>(&answer)?.lines()) }
}

impl Explained {
    fn lines(&self) -> Vec<String> {
        let Self { message, index, outcome, frames, .. } = self;
        let mut lines = vec![format!(
            "message: {} {} of {}, type {}, time {}",
            text(&message["api"]),
            text(&message["action"]),
            match text(&message["source"]) {
                "" => "nothing",
                source => source,
            },
            cell(&message["type"]),
            cell(&message["time"]),
        )];
        lines.push(match &index.reason {
            Some(reason) => format!("selected: no, {reason}"),
            None => format!("selected: as {}", index.types.join(", ")),
        });
        lines.extend(self.steps.iter().map(step));
        lines.push(format!("outcome: {outcome}"));
        if let Some(body) = &self.body {
            lines.push(format!("body: {body}"));
        }
        let others = [("text", &self.text), ("base64", &self.base64)];
        lines.extend(others.into_iter().filter_map(|(name, text)| Some(format!("{name}: {}", text.as_ref()?))));
        lines.extend(
            frames.iter().map(|Frame { headers, bytes }| format!("frame: {}, {bytes} bytes", headers.join(" "))),
        );
        if !frames.is_empty() {
            lines.push(self.room());
        }
        lines
    }

    /// What becomes of what is forwarded.
    fn room(&self) -> String {
        let mut found = vec![if self.wanted { "somebody is owed it" } else { "nobody is owed it: it has no consumer" }];
        found.extend((!self.fits).then_some("its quota has no room"));
        found.extend(self.waits.then_some("it waits behind a held message of its source"));
        format!("topic {}: {}", text(&self.topic["name"]), found.join("; "))
    }
}

fn step(step: &Value) -> String {
    let reason = step["fault"]["reason"].as_str().map(|reason| format!(", {reason}")).unwrap_or_default();
    let (world, verdict, took) = (text(&step["world"]), text(&step["verdict"]), &step["processorMicroseconds"]);
    format!("{world} {}: {verdict}{reason} ({took} µs)", plugin_name(step))
}

/// What the plugins of a subscription have used.
///
/// # Errors
/// Refusals, with the reason.
pub(crate) async fn usage(client: &Client, subscription: u64) -> anyhow::Result<Value> {
    Ok(client.get(&format!("/tidegate/v1/subscriptions/{subscription}/usage")).await?)
}

/// A line for each plugin, in the order in which they are asked, and one for what waits.
pub(crate) fn usage_table(usage: &Value) -> Vec<String> {
    const HEAD: &[&str] = &["PLUGIN", "WORLD", "FAULTS", "MESSAGES", "DROPPED", "PROCESSOR µs"];
    let row = |share: &Value| {
        let faults = share["faults"].as_object().into_iter().flatten();
        let faults: Vec<_> = faults.map(|(kind, count)| format!("{count} {kind}")).collect();
        let faults = if faults.is_empty() { "-".to_owned() } else { faults.join(", ") };
        let mut row = vec![plugin_name(share), cell(&share["world"]), faults];
        row.extend(["messages", "dropped", "processorMicroseconds"].map(|name| cell(&share[name])));
        row
    };
    let mut rows = table(HEAD, 3, usage["plugins"].as_array().into_iter().flatten().map(row));
    rows.push(format!("{} messages are held", usage["heldMessages"]));
    rows
}

/// The answer to a POST, as it was written.
async fn ask(client: &Client, path: &str, body: &impl Serialize) -> anyhow::Result<String> {
    let mut answer = Vec::new();
    client.download(Method::POST, path, serde_json::to_vec(body)?.into(), &mut answer).await?;
    Ok(String::from_utf8(answer)?)
}
