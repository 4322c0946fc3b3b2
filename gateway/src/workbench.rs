//! `tidegate plugin try` and `tidegate plugin check`: plugins for their authors, in this process, without a gateway and with a gateway's
//! limits.
//!
//! ```text
//! file ─▶ Plugins ─▶ Trials ◀─ samples of standard input
//!                      └─▶ an outcome a line
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::{env, fs, io};

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::Args;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::admin::print;
use crate::api::json_limits;
use crate::auth::DEFAULT_TENANT;
use crate::authoring::{check_world, json_text, language, version};
use crate::config::Config;
use crate::manage::subscription_id;
use crate::message::Tenant;
use crate::plugin::compiler::Compiler;
use crate::plugin::{Plugin, PluginError, PluginId, PluginLimits, Plugins, Trials, World, digest};
use crate::registry::{NO_SETTINGS, source};
use crate::samples::{self, Batched, Outcome, Tally};
use crate::scaffold::is_name;
use crate::serve::{own_program, plugin_limits};

/// `tidegate plugin try`
#[derive(Args, Debug)]
pub struct TryArgs {
    #[command(flatten)]
    pub(crate) bench: BenchArgs,
    /// Of a plugin of the gateway: which version, or `latest` (default)
    #[arg(long, value_name = "N", value_parser = version)]
    pub(crate) version: Option<String>,
    /// Of a plugin of the gateway: what it stores and this subscription selects, in place of standard input
    #[arg(long, value_name = "ID", value_parser = subscription_id)]
    pub(crate) subscription: Option<u64>,
    /// The newest so many of these (default: 100)
    #[arg(long, value_name = "N", requires = "subscription")]
    pub(crate) last: Option<u32>,
}

impl TryArgs {
    /// The name, if a plugin of the gateway is meant: it may not look like a file.
    pub(crate) fn name(&self) -> Option<&str> {
        let of_gateway = self.version.is_some() || self.subscription.is_some();
        let name = self.bench.file.to_str().filter(|name| is_name(name))?;
        (of_gateway || !self.bench.file.is_file()).then_some(name)
    }
}

/// `tidegate plugin check`
#[derive(Args, Debug)]
pub struct CheckArgs {
    #[command(flatten)]
    bench: BenchArgs,
}

#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// A component, or a script if the file ends in .js; `try` takes the name of a plugin of the gateway, too
    pub(crate) file: PathBuf,
    /// JSON for the plugin's `configure` (default: {})
    #[arg(long, value_name = "JSON", value_parser = json_text)]
    pub(crate) settings: Option<Box<RawValue>>,
    /// What a script is for: filter or transform; a component says so itself
    #[arg(long, value_enum)]
    pub(crate) world: Option<World>,
    /// The configuration file of a gateway, whose limits on plugins hold
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}

/// Runs `tidegate plugin try`: a line of JSON for each message, and the sum on standard error.
///
/// # Errors
/// A plugin or settings that a gateway would refuse; a line that is no sample, by its number, once those before it are tried and summed
/// up; when the plugin fails on a message, or on all of them as a batch, once all are tried.
pub async fn try_out(args: TryArgs) -> anyhow::Result<()> {
    #[derive(Serialize)]
    struct Tried {
        line: usize,
        #[serde(flatten)]
        outcome: Outcome,
    }
    ensure!(
        args.version.is_none() && args.subscription.is_none(),
        "--version and --subscription are for plugins of the gateway, by their names: upload the file, and nothing uses it yet"
    );
    let bench = Bench::open(&args.bench).await?;
    let mut trials = bench.configure(args.bench.settings.as_deref().map_or(NO_SETTINGS, RawValue::get)).await?;
    let limits = json_limits(&bench.config);
    let mut tally = Tally::new(bench.plugin.world());
    let read = |line: usize, text: io::Result<String>| {
        let text = text.with_context(|| format!("line {line} cannot be read"))?;
        let sample = (!text.trim().is_empty()).then_some(text);
        let message = sample.map(|text| samples::message_or_body(&bench.tenant, text.as_bytes(), &limits)).transpose();
        message.map_err(|error| anyhow!("line {line}: {error}"))
    };
    for (line, text) in (1..).zip(io::stdin().lines()) {
        // What was tried before a line that is no sample is told all the same.
        let message = read(line, text).inspect_err(|_| eprint(&tally.to_string()))?;
        let Some(message) = message else { continue };
        let outcome = Outcome::of(&trials.run(Arc::new(message)).await?);
        tally.count(&outcome);
        print(&[serde_json::to_string(&Tried { line, outcome })?])?;
    }
    sum_up(&tally, trials.finish().await?.map(|fault| Batched { fault }))
}

/// Tells the sum on standard error.
///
/// # Errors
/// When the plugin has failed on a message, or on all of them in a batch.
pub(crate) fn sum_up(tally: &Tally, batch: Option<Batched>) -> anyhow::Result<()> {
    eprint(&tally.to_string());
    match (tally.faults(), batch) {
        (0, None) => Ok(()),
        (0, Some(Batched { fault })) => bail!("the plugin fails on the same messages in a batch: {fault}"),
        (faults, _) => bail!("the plugin failed on {faults} messages"),
    }
}

/// Runs `tidegate plugin check`: what the plugin is, and what it wants to be told.
///
/// # Errors
/// A plugin that a gateway would refuse, with the reason; named settings that the plugin refuses.
pub async fn check(args: CheckArgs) -> anyhow::Result<Value> {
    let BenchArgs { file, settings, .. } = &args.bench;
    let bench = Bench::open(&args.bench).await?;
    let mut found = json!({
        "world": bench.plugin.world().name(),
        "language": language(file).name(),
        "size": bench.body.len(),
        "digest": digest(&bench.body),
        "imports": bench.plugin.imports(),
    });
    match bench.try_to_configure(settings.as_deref().map_or(NO_SETTINGS, RawValue::get)).await {
        Ok(trials) => found["interest"] = json!(trials.interest()),
        // Whoever uploads it without settings is told the same.
        Err(PluginError::Settings(text)) if settings.is_none() => found["configure"] = String::from(text).into(),
        Err(error) => return Err(refused(error)),
    }
    Ok(found)
}

/// A plugin in a sandbox of its own.
struct Bench {
    plugins: Plugins,
    plugin: Plugin,
    body: Vec<u8>,
    tenant: Tenant,
    config: Config,
    /// Without a directory of the user's own, compiled code is not kept.
    _cache: Option<TempDir>,
}

impl Bench {
    async fn open(args: &BenchArgs) -> anyhow::Result<Self> {
        let BenchArgs { file, world, config, .. } = args;
        check_world(file, *world)?;
        let config = Config::load(config.as_deref(), env::vars())?;
        let body = fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
        let source = source(language(file), *world, &body)?;
        let (cache, temporary) = match own_cache() {
            Some(cache) => (cache, None),
            None => TempDir::new().map(|dir| (dir.path().to_owned(), Some(dir)))?,
        };
        let limits = PluginLimits { log_lines: u32::MAX, ..plugin_limits(&config) };
        let compiler = Compiler::Child(own_program().context("this program was not found")?);
        let builtin_dir = config.plugins.builtin_dir.clone();
        let start = move || Plugins::start(&limits, &compiler, &cache, builtin_dir.as_deref());
        let plugins = tokio::task::spawn_blocking(start).await??;
        let tenant = Tenant::from(DEFAULT_TENANT);
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let id = PluginId { tenant: Some(tenant.clone()), name: (&*name).into(), version: 1 };
        let loaded = plugins.load(id, source).await;
        // The next build is another component, so that nobody would come for this one's code.
        plugins.forget(&digest(&body)).await;
        let plugin = loaded.map_err(refused)?;
        if let Some(world) = world.filter(|world| *world != plugin.world()) {
            bail!("--world is '{}', and the component is for the world '{}'", world.name(), plugin.world().name());
        }
        Ok(Self { plugins, plugin, body, tenant, config, _cache: temporary })
    }

    async fn configure(&self, settings: &str) -> anyhow::Result<Trials> {
        self.try_to_configure(settings).await.map_err(refused)
    }

    async fn try_to_configure(&self, settings: &str) -> Result<Trials, PluginError> {
        self.plugins.trials(&self.tenant, &self.plugin, settings).await
    }
}

fn refused(error: PluginError) -> anyhow::Error {
    samples::refusal(error).map_or_else(Into::into, Into::into)
}

/// Where this user's programs keep what they can make again (XDG Base Directory Specification). Compiled code is trusted, so that
/// it must be nobody else's directory.
fn own_cache() -> Option<PathBuf> {
    let directory = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = directory("XDG_CACHE_HOME").or_else(|| Some(directory("HOME")?.join(".cache")));
    base.map(|base| base.join("tidegate/plugins"))
}

pub(crate) fn eprint(line: &str) {
    use std::io::Write as _;
    // With stderr gone there is nobody left to tell.
    let _ = writeln!(io::stderr(), "{line}");
}
