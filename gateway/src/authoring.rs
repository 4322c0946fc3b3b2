//! `tidegate plugin`: the plugins of a running gateway, for those who install them; what they make of messages, see [`probe`]; for those
//! who write them, see [`workbench`].

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::admin::print;
use crate::api::path_segment;
use crate::client::{Client, ClientArgs};
use crate::manage::{cell, subscription_id, table, text};
use crate::plugin::World;
use crate::probe;
use crate::registry::Language;
use crate::rollout::{self, RolloutCommand};
use crate::scaffold::{self, NewArgs};
use crate::workbench::{self, CheckArgs, TryArgs};

const PLUGINS: &str = "/tidegate/v1/plugins";
/// The newest version of a plugin, and a plugin that is built in.
pub(crate) const LATEST: &str = "latest";

/// `tidegate plugin`
#[derive(Args, Debug)]
pub struct PluginArgs {
    #[command(flatten)]
    gateway: ClientArgs,
    /// Prints the answer of the gateway as JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: PluginCommand,
}

#[derive(Subcommand, Debug)]
enum PluginCommand {
    /// Writes a project that builds into a working plugin with public tools
    New(NewArgs),
    /// Lists plugins and their versions, built-in ones included
    List,
    /// Shows a plugin with its versions, or one of them
    Show {
        /// The plugin
        name: String,
        /// Only this version, or `latest`
        #[arg(long, value_name = "N", value_parser = version)]
        version: Option<String>,
    },
    /// Uploads a component, or a script if the file ends in .js, as the next version of a plugin
    Upload {
        /// The file
        file: PathBuf,
        /// The plugin (default: the name of the file, with hyphens for underscores)
        #[arg(long)]
        name: Option<String>,
        /// What a script is for: filter or transform; a component says so itself
        #[arg(long, value_enum)]
        world: Option<World>,
        /// JSON that the plugin has to accept as settings
        #[arg(long, value_name = "JSON", value_parser = json_text)]
        settings: Option<Box<RawValue>>,
    },
    /// Writes a version to a file, as it was uploaded
    Download {
        /// The plugin
        name: String,
        /// Which version
        #[arg(long, value_name = "N", value_parser = version, default_value = LATEST)]
        version: String,
        /// The file, which must not exist (default: the name of the plugin, with .wasm or .js)
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Lets a plugin out of quarantine, or one of its versions, and has it judge what it has failed on
    Release {
        /// The plugin
        name: String,
        /// Only this version, or `latest`
        #[arg(long, value_name = "N", value_parser = version)]
        version: Option<String>,
    },
    /// Runs messages through a plugin: a file here and without a gateway, or one of a gateway there
    Try(TryArgs),
    /// Says which way a message from standard input would take through a subscription
    Explain {
        /// Id of the subscription
        #[arg(value_parser = subscription_id)]
        subscription: u64,
    },
    /// Shows what the plugins of a subscription have made of its messages, and what that took
    Usage {
        /// Id of the subscription
        #[arg(value_parser = subscription_id)]
        subscription: u64,
    },
    /// Says what a gateway would say to an upload of this file
    Check(CheckArgs),
    /// Deletes a plugin, or one of its versions; no subscription may use it
    Delete {
        /// The plugin
        name: String,
        /// Only this version, or `latest`
        #[arg(long, value_name = "N", value_parser = version)]
        version: Option<String>,
    },
    #[command(flatten)]
    Rollout(RolloutCommand),
}

/// Runs `tidegate plugin`.
///
/// # Errors
/// Refusals, with the reason; when the gateway cannot be reached; files that cannot be read or written; when a plugin that is tried
/// fails.
pub async fn run(args: PluginArgs) -> anyhow::Result<()> {
    let PluginArgs { gateway, json, command } = args;
    let client = || gateway.client();
    let show = |answer: Value, rows: Vec<String>| if json { print(&[answer]) } else { print(&rows) };
    match command {
        PluginCommand::New(args) => scaffold::new(&args),
        PluginCommand::List => {
            let plugins = client()?.pages(PLUGINS, "plugins").await?;
            let rows = plugin_table(&plugins);
            show(serde_json::json!({"plugins": plugins}), rows)
        }
        PluginCommand::Show { name, version: None } => {
            let plugin = client()?.get(&path(&name, None)).await?;
            let rows = plugin_table(std::slice::from_ref(&plugin));
            show(plugin, rows)
        }
        PluginCommand::Show { name, version } => {
            let version = client()?.get(&path(&name, version.as_deref())).await?;
            let rows = lines(&version);
            show(version, rows)
        }
        PluginCommand::Upload { file, name, world, settings } => {
            let version = upload(&client()?, &file, name, world, settings).await?;
            let rows = lines(&version);
            show(version, rows)
        }
        PluginCommand::Download { name, version, out } => download(&client()?, &name, &version, out).await,
        PluginCommand::Release { name, version } => {
            let path = format!("{}/release", path(&name, version.as_deref()));
            let released = client()?.upload(&path, "application/json", Bytes::new()).await?;
            let rows = lines(&released);
            show(released, rows)
        }
        PluginCommand::Try(args) => match args.name() {
            Some(name) => {
                let name = name.to_owned();
                probe::try_out(&gateway, &name, args, json).await
            }
            None => workbench::try_out(args).await,
        },
        PluginCommand::Explain { subscription } => probe::explain(&client()?, subscription, json).await,
        PluginCommand::Usage { subscription } => {
            let usage = probe::usage(&client()?, subscription).await?;
            let rows = probe::usage_table(&usage);
            show(usage, rows)
        }
        PluginCommand::Check(args) => {
            let found = workbench::check(args).await?;
            let rows = lines(&found);
            show(found, rows)
        }
        PluginCommand::Delete { name, version } => Ok(client()?.delete(&path(&name, version.as_deref())).await?),
        PluginCommand::Rollout(command) => match rollout::run(&client()?, command).await? {
            Some((canary, rows)) => show(canary, rows),
            None => Ok(()),
        },
    }
}

/// A version as it stands in paths: a number, or [`LATEST`].
pub(crate) fn version(text: &str) -> Result<String, &'static str> {
    match text.parse::<u32>() {
        Ok(number @ 1..) => Ok(number.to_string()),
        _ if text == LATEST => Ok(text.to_owned()),
        _ => Err("a version is a number from 1 on, or 'latest'"),
    }
}

/// JSON as it is written: numbers keep their digits. The error says in which line and column it is none.
pub(crate) fn json_text(text: &str) -> serde_json::Result<Box<RawValue>> {
    RawValue::from_string(text.to_owned())
}

/// Where a plugin, or a version of it, is found.
pub(crate) fn path(name: &str, version: Option<&str>) -> String {
    let version = version.map(|version| format!("/versions/{version}")).unwrap_or_default();
    format!("{PLUGINS}/{}{version}", path_segment(name))
}

async fn upload(
    client: &Client,
    file: &Path,
    name: Option<String>,
    world: Option<World>,
    settings: Option<Box<RawValue>>,
) -> anyhow::Result<Value> {
    check_world(file, world)?;
    let body = fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let stem = || file.file_stem().unwrap_or_default().to_string_lossy().replace('_', "-");
    let world = world.map(|world| world.name().to_owned());
    let settings = settings.map(|settings| settings.get().to_owned());
    let query = [("name", Some(name.unwrap_or_else(stem))), ("world", world), ("settings", settings)];
    let query = query.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(query).finish();
    Ok(client.upload(&format!("{PLUGINS}?{query}"), language(file).media_type(), body.into()).await?)
}

/// What a file is written in.
pub(crate) fn language(file: &Path) -> Language {
    match file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("js")) {
        true => Language::JavaScript,
        false => Language::Wasm,
    }
}

/// Nothing in a script says what it is for.
pub(crate) fn check_world(file: &Path, world: Option<World>) -> anyhow::Result<()> {
    let known = world.is_some() || language(file) == Language::Wasm;
    ensure!(known, "--world must say whether the script is a filter or a transform");
    Ok(())
}

async fn download(client: &Client, name: &str, version: &str, out: Option<PathBuf>) -> anyhow::Result<()> {
    let version = client.get(&path(name, Some(version))).await?;
    let extension = if text(&version["language"]) == Language::JavaScript.name() { "js" } else { "wasm" };
    let out = out.unwrap_or_else(|| format!("{name}.{extension}").into());
    if out.exists() {
        bail!("{} exists already, and is left as it is", out.display());
    }
    let mut body = Vec::new();
    // By its number, since another one may be the latest by now.
    let path = format!("{}/wasm", path(name, Some(&cell(&version["version"]))));
    client.download(Method::GET, &path, Bytes::new(), &mut body).await?;
    let written = File::create_new(&out).and_then(|mut file| file.write_all(&body));
    written.with_context(|| format!("{} cannot be written", out.display()))
}

/// A line for each version; built-in plugins have none.
fn plugin_table(plugins: &[Value]) -> Vec<String> {
    const HEAD: &[&str] = &[
        "PLUGIN",
        "WORLD",
        "VERSION",
        "LANGUAGE",
        "BYTES",
        "SUBSCRIPTIONS",
        "HELD",
        "AUTHOR",
        "CREATED",
        "IN QUARANTINE",
    ];
    let rows = plugins.iter().flat_map(|plugin| {
        let versions = plugin["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
        let row = |version: &Value| {
            let mut row = vec![cell(&plugin["name"]), cell(&plugin["world"])];
            row.extend(
                ["version", "language", "size", "subscriptions", "heldMessages", "author", "creationTime"]
                    .map(|name| cell(&version[name])),
            );
            row.push(cell(&version["quarantine"]["reason"]));
            row
        };
        let mut rows: Vec<_> = versions.iter().map(row).collect();
        if rows.is_empty() {
            // What is told of a version is told of the plugin itself.
            let mut built_in = row(plugin);
            built_in[2] = "built-in".to_owned();
            rows.push(built_in);
        }
        rows
    });
    table(HEAD, HEAD.len(), rows)
}

/// A line for each member.
pub(crate) fn lines(answer: &Value) -> Vec<String> {
    let members = answer.as_object().into_iter().flatten();
    members.map(|(name, value)| format!("{name}: {}", cell(value))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn built_in_plugins_have_a_line_without_a_version() {
        let version = json!({"version": 2, "language": "wasm", "size": 7, "subscriptions": 0, "heldMessages": 3, "author": "ann",
            "creationTime": "2026-11-30T00:00:00.000Z", "quarantine": {"reason": "it failed"}});
        let lines = plugin_table(&[
            json!({"name": "deadband", "world": "filter", "versions": [], "subscriptions": 4, "heldMessages": 1}),
            json!({"name": "mine", "world": "transform", "versions": [version]}),
        ]);
        let words = |line: &String| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(words(&lines[1]), "deadband filter built-in - - 4 1 - - -");
        assert_eq!(words(&lines[2]), "mine transform 2 wasm 7 0 3 ann 2026-11-30T00:00:00.000Z it failed");
    }

    #[test]
    fn a_version_is_a_number_or_the_latest() {
        for (text, expected) in
            [("1", Some("1")), ("007", Some("7")), ("latest", Some("latest")), ("0", None), ("x", None)]
        {
            assert_eq!(version(text).ok().as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_script_is_known_by_its_name() {
        for (file, language) in [("a/b.js", Language::JavaScript), ("b.wasm", Language::Wasm), ("b", Language::Wasm)] {
            assert_eq!(super::language(Path::new(file)), language, "{file}");
        }
    }
}
