//! Sandboxed WebAssembly plugins: which messages pass, and what their bodies become.
//!
//! A batch goes to the one thread that its [`Instance`] belongs to, into a live WebAssembly instance that is made on demand.
//! A plugin that fails loses its live instance, and only the messages that make it fail are answered with a [`Fault`].
//! This is the only room that names wasmtime.

mod bindings;
mod cache;
pub mod compiler;
mod engine;
mod host;
mod instance;
mod lives;
mod load;
mod memory;
mod module;
mod pointer;
mod pool;
mod quarantine;
mod stopwatch;
#[cfg(test)]
mod tests;
mod trials;
mod turns;
mod usage;

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher as _, Hash, Hasher, RandomState};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;

pub use self::cache::digest;
use self::compiler::Compiler;
pub use self::host::LogLine;
use self::instance::{Judge, Shape, Traits};
use self::load::{Loader, Wasm};
use self::memory::Memory;
pub use self::module::{Plugin, PluginId, WeakPlugin, World};
use self::pool::Pool;
pub use self::quarantine::{Quarantine, QuarantineChange, Quarantined};
pub use self::trials::{Trial, Trials};
use self::usage::Account;
pub use self::usage::{LastFault, Usage};
use crate::config::PluginEngine;
use crate::message::{Message, Tenant};

/// What a plugin may use. At each limit the call ends in a [`Fault`], unless said otherwise.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PluginLimits {
    /// What runs WebAssembly.
    pub engine: PluginEngine,
    /// Bytes of linear memory that one instance may hold, all its memories together; more is [`Fault::Memory`].
    pub memory_bytes: usize,
    /// The same for an instance that runs a script.
    pub script_memory_bytes: usize,
    /// Bytes of stack that a call may use; more is [`Fault::Trap`].
    pub stack_bytes: usize,
    /// Milliseconds of processor time that a call may take, kept to within some 10 ms; more is [`Fault::Deadline`]. A failed batch
    /// is run again message by message, each for as long.
    pub call_ms: u64,
    /// The same for the start and the configuration of an instance, if it is more.
    pub configure_ms: u64,
    /// Bytes of one body that a transform returns; more is [`Fault::Output`].
    pub output_bytes: usize,
    /// Bytes of the frame that it makes; more is [`Fault::Output`].
    pub frame_bytes: usize,
    /// Bytes that one call may make the gateway copy out of a guest; more is [`Fault::Output`].
    pub copy_bytes: usize,
    /// Bytes of settings text; more is refused with [`PluginError::Settings`].
    pub settings_bytes: usize,
    /// Core instances of one component: most have one or three, Python's more than 20. More is [`Fault::Trap`].
    pub core_instances: usize,
    /// Bytes of a component that is loaded or replaces a built-in one; more is [`PluginError::Component`].
    pub component_bytes: u64,
    /// Seconds of processor time that compiling a component may take; more is [`PluginError::Component`].
    pub compile_seconds: u64,
    /// Bytes of memory that the compiler may use; more is [`PluginError::Component`].
    pub compile_bytes: u64,
    /// Failed calls of one version in one tenant, or messages that it refuses one after another, within `quarantine_seconds`, after
    /// which it is asked no more; then its messages are answered with [`Fault::Quarantined`].
    pub quarantine_faults: u32,
    /// See `quarantine_faults`.
    pub quarantine_seconds: u64,
    /// Live instances in the process, about 100 KiB each; at the limit the least recently used one of the tenant that has most is
    /// dropped, to be made anew when it is needed.
    pub instances: usize,
    /// Seconds after which an unused live instance is dropped.
    pub idle_seconds: u64,
    /// Batches that wait for one worker thread, from 1 to 4096; at the limit the callers wait.
    pub queue: usize,
    /// Lines that one plugin may write into the log in a second; more are counted and left out.
    pub log_lines: u32,
}

impl Default for PluginLimits {
    fn default() -> Self {
        Self {
            engine: PluginEngine::Auto,
            memory_bytes: 16 << 20,
            script_memory_bytes: 32 << 20,
            stack_bytes: 256 << 10,
            call_ms: 100,
            configure_ms: 1000,
            output_bytes: 1 << 20,
            frame_bytes: 1 << 20,
            copy_bytes: 4 << 20,
            settings_bytes: 32 << 10,
            core_instances: 20,
            component_bytes: 4 << 20,
            compile_seconds: 60,
            compile_bytes: 1 << 30,
            quarantine_faults: 20,
            quarantine_seconds: 60,
            instances: 256,
            idle_seconds: 60,
            queue: 64,
            log_lines: 10,
        }
    }
}

impl PluginLimits {
    fn call(&self) -> Duration {
        Duration::from_millis(self.call_ms)
    }

    fn configure(&self) -> Duration {
        Duration::from_millis(self.configure_ms.max(self.call_ms))
    }

    fn idle(&self) -> Duration {
        Duration::from_secs(self.idle_seconds)
    }
}

/// The built-in plugins that properties of subscriptions stand for. They are loaded at the start.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BuiltIn {
    /// A filter: passes the messages whose type its settings name.
    TypeFilter,
    /// A transform: copies the fragments that its settings name.
    FragmentsToCopy,
}

impl BuiltIn {
    const ALL: [Self; 2] = [Self::TypeFilter, Self::FragmentsToCopy];

    /// The plugin's name in subscriptions, metrics and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        COMPONENTS[self as usize].0
    }

    /// Refuses a replacement that is for something else.
    fn check(self, loaded: &Plugin) -> Result<(), PluginError> {
        let world = COMPONENTS[self as usize].1;
        if loaded.world() == world {
            return Ok(());
        }
        let reason = format!("its replacement is for the world '{}', not '{}'", loaded.world().name(), world.name());
        Err(PluginError::Component { plugin: PluginId::built_in(self.name()), reason })
    }
}

macro_rules! component {
    ($name:literal, $world:ident) => {
        ($name, World::$world, include_bytes!(concat!("../../../plugins/components/", $name, ".wasm")))
    };
}

/// The components in the program by name: those of [`BuiltIn`] in its order, then those that are loaded when they are first named.
static COMPONENTS: [(&str, World, &[u8]); 8] = [
    component!("type-filter", Filter),
    component!("fragments-to-copy", Transform),
    component!("threshold", Filter),
    component!("deadband", Filter),
    component!("rate-limit", Filter),
    component!("sampling", Filter),
    component!("geofence", Filter),
    component!("unit-conversion", Transform),
];

/// Names and worlds of the built-in plugins.
pub fn built_ins() -> impl Iterator<Item = (&'static str, World)> {
    COMPONENTS.iter().map(|(name, world, _)| (*name, *world))
}

/// Bytes of a script.
const SCRIPT_BYTES: usize = 256 << 10;

/// What a plugin is made of.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A component of one of the worlds in `wit/plugin.wit`.
    Component(&'a [u8]),
    /// The text of a JavaScript function, which the script runner compiles: `plugins/script-runner/runner.js` says what it may be.
    Script {
        /// What it is for.
        world: World,
        /// The text.
        text: &'a str,
    },
}

/// A plugin with its settings, in one tenant. All subscriptions with the same three share one live instance, unless the plugin
/// keeps state.
#[derive(Clone)]
pub struct Instance(Arc<Key>);

struct Key {
    hash: u64,
    tenant: Tenant,
    plugin: Plugin,
    /// JSON text; empty if a script is only to be compiled.
    settings: Box<str>,
    /// The subscription that it belongs to, if it keeps state.
    owner: Option<u64>,
    /// What the tenant has used of the plugin.
    account: Arc<Account>,
    /// What was answered to the subscription that it was configured for; equal instances of others count for themselves.
    own: Account,
    /// Whether API, action and type of a message decide over the verdict.
    kind_decides: bool,
    /// Whether to configure it takes longer than a call may.
    slow: bool,
}

impl Instance {
    /// The plugin.
    #[must_use]
    pub fn plugin(&self) -> &Plugin {
        &self.0.plugin
    }

    /// Whose it is.
    #[must_use]
    pub fn tenant(&self) -> &Tenant {
        &self.0.tenant
    }

    /// Whether it once took all the time or memory that a call may take.
    pub(crate) fn has_taken_all(&self) -> bool {
        self.0.account.has_taken_all(self.0.hash)
    }

    /// The settings text.
    #[must_use]
    pub fn settings(&self) -> &str {
        &self.0.settings
    }

    /// Counts an answer for the subscription that this was configured for, with its share of the processor time of the call.
    pub fn count<T: Clone + Into<Verdict>>(&self, answer: &Result<T, Fault>, processor_time: Duration) {
        let dropped = answer.clone().is_ok_and(|answer| answer.into() == Verdict::Drop);
        self.0.own.judged(1, usize::from(dropped));
        if let Err(fault) = answer {
            self.0.own.faulted(fault, 1);
        }
        self.0.own.used(processor_time);
    }

    /// What was counted so. Calls and memory are shared with equal instances, and not in it.
    #[must_use]
    pub fn own_usage(&self) -> Usage {
        self.0.own.usage()
    }

    /// Whether it keeps something for each source.
    fn keeps_state(&self) -> bool {
        self.0.owner.is_some()
    }
}

impl Key {
    fn new(hasher: &RandomState, tenant: &Tenant, plugin: &Plugin, settings: &str, owner: Option<u64>) -> Self {
        Self {
            hash: hasher.hash_one((tenant, plugin, settings, owner)),
            tenant: tenant.clone(),
            plugin: plugin.clone(),
            settings: settings.into(),
            owner,
            account: plugin.0.account(tenant),
            own: Account::default(),
            kind_decides: false,
            slow: false,
        }
    }
}

impl PartialEq for Instance {
    fn eq(&self, other: &Self) -> bool {
        fn content(Instance(key): &Instance) -> (u64, Option<u64>, &Plugin, &Tenant, &str) {
            (key.hash, key.owner, &key.plugin, &key.tenant, &key.settings)
        }
        Arc::ptr_eq(&self.0, &other.0) || content(self) == content(other)
    }
}

impl Eq for Instance {}

impl Hash for Instance {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.plugin().id(), self.tenant())
    }
}

/// Why a plugin gave no answer for a message. The texts come from the guest or from wasmtime, cut, and hold no paths.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// The guest's code failed.
    #[error("the plugin failed: {0}")]
    Trap(Box<str>),
    /// It took longer than `call_ms`, or than `configure_ms` to be configured.
    #[error("the plugin took longer than it may")]
    Deadline,
    /// It asked for more than `memory_bytes`.
    #[error("the plugin asked for more memory than it may use")]
    Memory,
    /// It gave more or fewer answers than there were messages.
    #[error("the plugin gave {answers} answers to {messages} messages")]
    WrongLength {
        /// Asked.
        messages: usize,
        /// Given.
        answers: usize,
    },
    /// What it returned cannot be used: see the text.
    #[error("the plugin returned {0}")]
    Output(Box<str>),
    /// The guest's own error text, for this message or for its settings.
    #[error("the plugin refused: {0}")]
    Refused(Box<str>),
    /// The gateway is stopping; the message was not judged.
    #[error("the gateway is stopping")]
    Stopped,
    /// The plugin has failed too often; it was not asked.
    #[error("the plugin is in quarantine: {0}")]
    Quarantined(Box<str>),
    /// The plugin could not be loaded or not be configured; it was not asked.
    #[error("the plugin is unavailable: {0}")]
    Unavailable(Box<str>),
    /// The gateway has just started, and has not come to this plugin yet; it was not asked.
    #[error("the plugin is being loaded")]
    Loading,
}

impl Fault {
    /// What [`Fault::kind`] may say.
    pub(crate) const KINDS: [&str; 10] = [
        "trap",
        "deadline",
        "memory",
        "wrong_length",
        "output",
        "refused",
        "stopped",
        "quarantined",
        "unavailable",
        "loading",
    ];

    /// The kind in metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Trap(_) => "trap",
            Self::Deadline => "deadline",
            Self::Memory => "memory",
            Self::WrongLength { .. } => "wrong_length",
            Self::Output(_) => "output",
            Self::Refused(_) => "refused",
            Self::Stopped => "stopped",
            Self::Quarantined(_) => "quarantined",
            Self::Unavailable(_) => "unavailable",
            Self::Loading => "loading",
        }
    }
}

/// What a plugin has made of a message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The filter passes it on.
    Pass,
    /// The filter does not.
    Drop,
    /// The transform's new body.
    Body(Bytes),
}

impl From<bool> for Verdict {
    fn from(passes: bool) -> Self {
        if passes { Self::Pass } else { Self::Drop }
    }
}

impl From<Bytes> for Verdict {
    fn from(body: Bytes) -> Self {
        Self::Body(body)
    }
}

/// What was answered to a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answered<T> {
    /// One for each message, in their order.
    pub answers: Vec<Result<T, Fault>>,
    /// The processor time of the calls; none where nobody was asked.
    pub processor_time: Duration,
}

impl<T> Default for Answered<T> {
    fn default() -> Self {
        Self { answers: Vec::new(), processor_time: Duration::ZERO }
    }
}

impl<T> Answered<T> {
    /// What was answered to the messages that follow.
    fn add(&mut self, mut next: Self) {
        self.answers.append(&mut next.answers);
        self.processor_time += next.processor_time;
    }
}

/// What a plugin with its settings wants to be told of each message.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Interest {
    /// The fields of `meta` in `wit/plugin.wit`.
    pub meta: Vec<&'static str>,
    /// How it takes the body: `none`, `bytes` or `text`.
    pub body: &'static str,
    /// JSON pointers to the values that it is handed.
    pub pointers: Vec<String>,
    /// Whether it keeps something for each source.
    pub keeps_state: bool,
}

/// Why plugins could not be started or an instance not be configured.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    /// The plugin does not accept the settings; the text is the guest's own, for the user.
    #[error("{0}")]
    Settings(Box<str>),
    /// The component file is unusable.
    #[error("plugin {plugin}: {reason}")]
    Component {
        /// Which.
        plugin: PluginId,
        /// What is wrong with it.
        reason: String,
    },
    /// It failed while it was configured.
    #[error("plugin {plugin}: {fault}")]
    Fault {
        /// Which.
        plugin: PluginId,
        /// How.
        fault: Fault,
    },
    /// The engine or a thread could not be started.
    #[error("plugins could not be started: {0}")]
    Start(String),
}

/// The loaded plugins and the threads that run them; a handle, cheap to clone. The last handle stops them.
#[derive(Clone)]
pub struct Plugins(Arc<Inner>);

struct Inner {
    pool: Pool,
    loader: Arc<Loader>,
    memory: Memory,
    hasher: RandomState,
    settings_bytes: usize,
    component_bytes: u64,
    /// One for each of [`COMPONENTS`].
    built_in: Vec<OnceCell<Plugin>>,
    replace_dir: Option<PathBuf>,
}

impl Plugins {
    /// Loads the plugins of [`BuiltIn`], having `compiler` compile those that `cache_dir` doesn't hold, and starts a thread for each core
    /// but one, and one for trials. Files `<name>.wasm` in `replace_dir` take the place of the built-in components, sandboxed
    /// the same.
    ///
    /// # Errors
    /// [`PluginError::Component`] for a replacement that is unreadable, too long, not of the plugin's world or that imports
    /// what the gateway doesn't offer; [`PluginError::Start`].
    pub fn start(
        limits: &PluginLimits,
        compiler: &Compiler,
        cache_dir: &Path,
        replace_dir: Option<&Path>,
    ) -> Result<Self, PluginError> {
        let engine = engine::engine(limits)?;
        let inner = Inner {
            pool: Pool::start(&engine, limits)?,
            loader: Arc::new(Loader::new(&engine, limits, compiler, cache_dir)),
            memory: Memory::new(),
            hasher: RandomState::new(),
            settings_bytes: limits.settings_bytes,
            component_bytes: limits.component_bytes,
            built_in: COMPONENTS.iter().map(|_| OnceCell::new()).collect(),
            replace_dir: replace_dir.map(Path::to_owned),
        };
        for plugin in BuiltIn::ALL {
            let loaded = inner
                .loader
                .load_blocking(&PluginId::built_in(plugin.name()), &inner.built_in_wasm(plugin as usize)?)?;
            plugin.check(&loaded)?;
            inner.built_in[plugin as usize].set(loaded).expect("invariant: each is loaded once");
        }
        Ok(Self(Arc::new(inner)))
    }

    /// A plugin that a property of subscriptions stands for.
    #[must_use]
    pub fn built_in(&self, plugin: BuiltIn) -> &Plugin {
        self.0.built_in[plugin as usize].get().expect("invariant: these are loaded at the start")
    }

    /// A built-in plugin by its name, loaded when it is first asked for; `None`: there is none of that name.
    pub async fn built_in_named(&self, name: &str) -> Option<Result<Plugin, PluginError>> {
        let at = COMPONENTS.iter().position(|(known, ..)| *known == name)?;
        let load = || async {
            let wasm = self.0.built_in_wasm(at)?;
            self.0.loader.load(PluginId::built_in(name), wasm).await
        };
        Some(self.0.built_in[at].get_or_try_init(load).await.cloned())
    }

    /// Compiles (in the child, one component at a time; or finds the compiled code), finds out the world, and links.
    ///
    /// # Errors
    /// [`PluginError::Component`] with what the author has to change; [`PluginError::Fault`] if the gateway is stopping.
    pub async fn load(&self, id: PluginId, source: Source<'_>) -> Result<Plugin, PluginError> {
        let plugin = self.load_again(id, source).await?;
        if plugin.0.is_script() { self.check_script(plugin).await } else { Ok(plugin) }
    }

    /// [`Plugins::load`] of what was sound before.
    ///
    /// # Errors
    /// Those of [`Plugins::load`].
    pub async fn load_again(&self, id: PluginId, source: Source<'_>) -> Result<Plugin, PluginError> {
        let unusable = |reason| Err(PluginError::Component { plugin: id.clone(), reason });
        let limit = self.0.component_bytes;
        match source {
            Source::Component(wasm) if wasm.len() as u64 > limit => {
                unusable(format!("it is longer than {limit} bytes (plugins.max_bytes)"))
            }
            Source::Component(wasm) => self.0.loader.load(id, wasm.to_vec().into()).await,
            Source::Script { text, .. } if text.len() > SCRIPT_BYTES => {
                unusable(format!("the script is longer than {SCRIPT_BYTES} bytes"))
            }
            Source::Script { world, text } => self.0.loader.load_script(id, world, text).await,
        }
    }

    /// Has the script compiled, without settings: what is wrong with it is told now, not when it is used.
    async fn check_script(&self, plugin: Plugin) -> Result<Plugin, PluginError> {
        let tenant = plugin.id().tenant.clone().unwrap_or_else(|| "edge".into());
        let reason = match self.trial(&tenant, &plugin, "", Vec::new()).await {
            Ok(_) => return Ok(plugin),
            Err(PluginError::Settings(text)) => text.into(),
            Err(PluginError::Fault { fault, .. }) if fault != Fault::Stopped => {
                format!("{fault} while the script was compiled")
            }
            Err(error) => return Err(error),
        };
        Err(PluginError::Component { plugin: plugin.id().clone(), reason })
    }

    /// Deletes what is kept for a plugin that was deleted; `component` is the [`digest`] of what it was loaded from, which may be
    /// built in as well.
    pub async fn forget(&self, component: &str) {
        if !self.0.built_in_digests().any(|digest| digest == component) {
            self.0.loader.forget(component.to_owned()).await;
        }
    }

    /// Deletes the compiled code of all components but those whose [`digest`]s are in `registered`, and the built-in ones.
    pub async fn tidy(&self, mut registered: HashSet<String>) {
        registered.extend(self.0.built_in_digests());
        self.0.loader.tidy(registered).await;
    }

    /// The instance for these settings, after one on the trial lane has accepted them. If the plugin keeps state, it belongs to
    /// `subscription`.
    ///
    /// # Errors
    /// [`PluginError::Settings`] with the guest's text for the user; [`PluginError::Fault`] if the guest fails on them.
    pub async fn configure(
        &self,
        tenant: &Tenant,
        plugin: &Plugin,
        settings: &str,
        subscription: u64,
    ) -> Result<Instance, PluginError> {
        let candidate = self.candidate(tenant, plugin, settings)?;
        if plugin.blocked().is_some() {
            return Ok(candidate);
        }
        let traits = self.0.pool.configure(&candidate).await.map_err(|fault| refused(plugin, fault))?;
        let Traits { kind_decides, keeps_state, slow } = traits;
        let owner = keeps_state.then_some(subscription);
        let key = Key::new(&self.0.hasher, tenant, plugin, settings, owner);
        Ok(Instance(Arc::new(Key { kind_decides, slow, ..key })))
    }

    /// An instance on the trial lane, for samples. Nothing live is touched.
    ///
    /// # Errors
    /// Those of [`Plugins::configure`].
    pub async fn trials(&self, tenant: &Tenant, plugin: &Plugin, settings: &str) -> Result<Trials, PluginError> {
        let instance = self.candidate(tenant, plugin, settings)?;
        let live = self.0.pool.begin(&instance).await.map_err(|fault| refused(plugin, fault))?;
        Ok(Trials::new(self.clone(), instance, live))
    }

    /// [`Plugins::trials`] of as many messages as are given, without a limit on the whole.
    ///
    /// # Errors
    /// Those of [`Plugins::configure`].
    pub async fn trial(
        &self,
        tenant: &Tenant,
        plugin: &Plugin,
        settings: &str,
        messages: Vec<Arc<Message>>,
    ) -> Result<Vec<Trial>, PluginError> {
        let mut trials = self.trials(tenant, plugin, settings).await?;
        let mut tried = Vec::with_capacity(messages.len());
        for message in messages {
            tried.push(trials.run(message).await?);
        }
        Ok(tried)
    }

    /// An instance that nobody has asked whether it accepts its settings.
    fn candidate(&self, tenant: &Tenant, plugin: &Plugin, settings: &str) -> Result<Instance, PluginError> {
        let limit = self.0.settings_bytes;
        if settings.len() > limit {
            return Err(PluginError::Settings(format!("the settings are longer than {limit} bytes").into()));
        }
        Ok(Instance(Arc::new(Key::new(&self.0.hasher, tenant, plugin, settings, None))))
    }

    /// A verdict for each message of each batch, in their order: `true` passes it on. The instances must be of filters.
    pub async fn judge(&self, batches: Vec<(Instance, Vec<Arc<Message>>)>) -> Vec<Answered<bool>> {
        self.0.pool.run::<Judge>(batches).await
    }

    /// What [`Plugins::judge`] answers, without asking where the verdicts on all messages of a batch are known.
    pub async fn verdicts(&self, batches: Vec<(Instance, Vec<Arc<Message>>)>) -> Vec<Answered<bool>> {
        let memory = &self.0.memory;
        let recall = |(instance, messages): &(Instance, Vec<Arc<Message>>)| {
            let known = self.0.pool.blocked(instance).is_none().then(|| memory.recall(instance, messages)).flatten();
            known.map(|answers| {
                let dropped = answers.iter().filter(|verdict| **verdict == Ok(false)).count();
                instance.0.account.judged(answers.len(), dropped);
                let mut words = instance.0.account.words();
                messages.iter().for_each(|message| words.answered(&message.source));
                Answered { answers, processor_time: Duration::ZERO }
            })
        };
        let known: Vec<_> = batches.iter().map(recall).collect();
        let batches = batches.into_iter().zip(&known).filter(|(_, known)| known.is_none());
        let unknown: Vec<_> = batches.map(|(batch, _)| batch).collect();
        let asked = if unknown.is_empty() { Vec::new() } else { self.judge(unknown.clone()).await };
        for ((instance, messages), answered) in unknown.iter().zip(&asked) {
            memory.keep(instance, messages, &answered.answers);
        }
        let mut asked = asked.into_iter();
        known.into_iter().map(|known| known.or_else(|| asked.next()).unwrap_or_default()).collect()
    }

    /// A new body for each message of each batch, in their order, at most `output_bytes` long and in a frame of at most `frame_bytes`:
    /// whatever the transform makes, but JSON on one line. Bodies that it leaves as they are may be longer.
    /// The instances must be of transforms.
    pub async fn shape(&self, batches: Vec<(Instance, Vec<Arc<Message>>)>) -> Vec<Answered<Bytes>> {
        self.0.pool.run::<Shape>(batches).await
    }

    /// The plugins that are asked no more, since they have failed too often.
    #[must_use]
    pub fn quarantine(&self) -> &Quarantine {
        self.0.pool.quarantine()
    }

    /// What the tenant has used of a plugin since that was loaded; nothing if it is not.
    #[must_use]
    pub fn usage(&self, tenant: &Tenant, plugin: &PluginId) -> Usage {
        let loaded = self.0.loader.loaded();
        loaded
            .iter()
            .find(|loaded| loaded.id() == plugin)
            .map(|plugin| plugin.0.usage(Some(tenant)))
            .unwrap_or_default()
    }

    /// What all tenants together have used of each loaded plugin.
    #[must_use]
    pub fn usages(&self) -> Vec<(PluginId, Usage)> {
        self.0.memory.tidy();
        self.0.loader.loaded().iter().map(|plugin| (plugin.id().clone(), plugin.0.usage(None))).collect()
    }

    /// Ends the threads after the calls that they are at; what is not judged by then is answered with [`Fault::Stopped`].
    /// Blocks for about `call_ms` at most, or `configure_ms` where an instance is being configured.
    pub fn stop(&self) {
        self.0.loader.stop();
        self.0.pool.stop();
    }

    /// How many components had to be compiled.
    #[must_use]
    pub fn compiled(&self) -> usize {
        self.0.loader.compiled()
    }

    /// How many WebAssembly instances are live now.
    #[must_use]
    pub fn live_instances(&self) -> usize {
        self.0.pool.live_instances()
    }
}

impl Inner {
    /// The digests of the components that come with the gateway, and of what replaces them.
    fn built_in_digests(&self) -> impl Iterator<Item = String> {
        let components = (0..COMPONENTS.len()).filter_map(|at| Some(digest(&self.built_in_wasm(at).ok()?)));
        components.chain([digest(load::SCRIPT_RUNNER)])
    }

    /// The component of a built-in plugin, or what replaces it.
    fn built_in_wasm(&self, at: usize) -> Result<Wasm, PluginError> {
        let (name, _, wasm) = COMPONENTS[at];
        let replaced = self.replace_dir.as_deref().map_or(Ok(None), |dir| replacement(name, dir, self.component_bytes));
        let replaced =
            replaced.map_err(|reason| PluginError::Component { plugin: PluginId::built_in(name), reason })?;
        Ok(replaced.map_or(Wasm::Borrowed(wasm), Wasm::Owned))
    }
}

/// What a fault at configuring means to who configures.
fn refused(plugin: &Plugin, fault: Fault) -> PluginError {
    match fault {
        Fault::Refused(text) => PluginError::Settings(text),
        fault => PluginError::Fault { plugin: plugin.id().clone(), fault },
    }
}

fn replacement(name: &str, dir: &Path, limit: u64) -> Result<Option<Vec<u8>>, String> {
    let unreadable = |error: std::io::Error| format!("its replacement can't be read: {error}");
    let path = dir.join(name).with_extension("wasm");
    if !path.try_exists().map_err(unreadable)? {
        return Ok(None);
    }
    let mut wasm = Vec::new();
    File::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut wasm)).map_err(unreadable)?;
    if wasm.len() as u64 > limit {
        return Err(format!("its replacement is longer than {limit} bytes"));
    }
    tracing::info!(plugin = name, "the built-in plugin is replaced by a file");
    Ok(Some(wasm))
}
