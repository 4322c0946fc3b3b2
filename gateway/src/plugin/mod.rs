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
mod memory;
mod module;
mod pointer;
mod pool;
#[cfg(test)]
mod tests;

use std::fmt;
use std::fs::File;
use std::hash::{BuildHasher as _, Hash, Hasher, RandomState};
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;

use self::cache::Cache;
use self::compiler::Compiler;
use self::instance::{Judge, Shape};
use self::memory::Memory;
pub use self::module::{Plugin, PluginId, World};
use self::pool::Pool;
use crate::message::{Message, Tenant};

/// What a plugin may use. At each limit the call ends in a [`Fault`], unless said otherwise.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PluginLimits {
    /// Bytes of linear memory that one instance may hold, all its memories together; more is [`Fault::Memory`].
    pub memory_bytes: usize,
    /// Bytes of stack that a call may use; more is [`Fault::Trap`].
    pub stack_bytes: usize,
    /// Milliseconds of processor time that a call may take, kept to within some 10 ms; more is [`Fault::Deadline`]. A failed batch
    /// is run again message by message, for four times this long in all, by the wall clock.
    pub call_ms: u64,
    /// Bytes of one body that a transform returns; more is [`Fault::Output`].
    pub output_bytes: usize,
    /// Bytes that one call may make the gateway copy out of a guest; more is [`Fault::Output`].
    pub copy_bytes: usize,
    /// Bytes of settings text; more is refused with [`PluginError::Settings`].
    pub settings_bytes: usize,
    /// Bytes of a component file that replaces a built-in one; more is [`PluginError::Component`].
    pub component_bytes: u64,
    /// Live instances in the process, about 100 KiB each; at the limit the least recently used one is dropped, to be made
    /// anew when it is needed.
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
            memory_bytes: 16 << 20,
            stack_bytes: 256 << 10,
            call_ms: 100,
            output_bytes: 1 << 20,
            copy_bytes: 4 << 20,
            settings_bytes: 32 << 10,
            component_bytes: 4 << 20,
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

    fn idle(&self) -> Duration {
        Duration::from_secs(self.idle_seconds)
    }
}

/// The plugins that every gateway has.
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
        match self {
            Self::TypeFilter => "type-filter",
            Self::FragmentsToCopy => "fragments-to-copy",
        }
    }

    fn world(self) -> World {
        match self {
            Self::TypeFilter => World::Filter,
            Self::FragmentsToCopy => World::Transform,
        }
    }

    fn wasm(self) -> &'static [u8] {
        match self {
            Self::TypeFilter => include_bytes!("../../../plugins/components/type-filter.wasm"),
            Self::FragmentsToCopy => {
                include_bytes!("../../../plugins/components/fragments-to-copy.wasm")
            }
        }
    }
}

/// A plugin with its settings, in one tenant. All subscriptions with the same three share one live instance.
#[derive(Clone)]
pub struct Instance(Arc<Key>);

#[derive(Clone)]
struct Key {
    hash: u64,
    tenant: Tenant,
    plugin: Plugin,
    settings: Box<str>,
    /// Whether API, action and type of a message decide over the verdict.
    kind_decides: bool,
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

    /// The settings text.
    #[must_use]
    pub fn settings(&self) -> &str {
        &self.0.settings
    }
}

impl PartialEq for Instance {
    fn eq(&self, other: &Self) -> bool {
        fn content(Instance(key): &Instance) -> (u64, &Plugin, &Tenant, &str) {
            (key.hash, &key.plugin, &key.tenant, &key.settings)
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
    /// It took longer than `call_ms`, or the whole batch longer than four times that.
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
}

impl Fault {
    /// What [`Fault::kind`] may say.
    pub(crate) const KINDS: [&str; 7] = ["trap", "deadline", "memory", "wrong_length", "output", "refused", "stopped"];

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
        }
    }
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
    memory: Memory,
    hasher: RandomState,
    settings_bytes: usize,
    compiled: usize,
    built_in: Vec<Plugin>,
}

impl Plugins {
    /// Loads the built-in plugins, having `compiler` compile those that `cache_dir` doesn't hold, and starts a thread for each core but one.
    /// Files `<name>.wasm` in `replace_dir` take the place of the built-in components, sandboxed the same.
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
        let mut cache = Cache::open(cache_dir);
        let mut load = |plugin: BuiltIn| {
            let replaced = replace_dir.map_or(Ok(None), |dir| replacement(plugin, dir, limits.component_bytes));
            replaced
                .and_then(|wasm| {
                    let wasm = wasm.as_deref().unwrap_or(plugin.wasm());
                    let id = PluginId::from(plugin);
                    let compile = || compiler.compile(&engine, limits, &id.name, wasm);
                    let component = cache.load(&engine, &id.name, wasm, compile)?;
                    Plugin::new(&engine, id, plugin.world(), &component, limits.log_lines)
                })
                .map_err(|reason| PluginError::Component { plugin: plugin.into(), reason })
        };
        let built_in = BuiltIn::ALL.into_iter().map(&mut load).collect::<Result<Vec<_>, _>>()?;
        let inner = Inner {
            pool: Pool::start(&engine, limits)?,
            memory: Memory::new(),
            hasher: RandomState::new(),
            settings_bytes: limits.settings_bytes,
            compiled: cache.compiled(),
            built_in,
        };
        Ok(Self(Arc::new(inner)))
    }

    /// A plugin that every gateway has.
    #[must_use]
    pub fn built_in(&self, plugin: BuiltIn) -> &Plugin {
        &self.0.built_in[plugin as usize]
    }

    /// The instance for these settings, after a live one has accepted them.
    ///
    /// # Errors
    /// [`PluginError::Settings`] with the guest's text for the user; [`PluginError::Fault`] if the guest fails on them.
    pub async fn configure(&self, tenant: &Tenant, plugin: &Plugin, settings: &str) -> Result<Instance, PluginError> {
        let limit = self.0.settings_bytes;
        if settings.len() > limit {
            return Err(PluginError::Settings(format!("the settings are longer than {limit} bytes").into()));
        }
        let key = Key {
            hash: self.0.hasher.hash_one((tenant, plugin, settings)),
            tenant: tenant.clone(),
            plugin: plugin.clone(),
            settings: settings.into(),
            kind_decides: false,
        };
        match self.0.pool.configure(&Instance(Arc::new(key.clone()))).await {
            Ok(kind_decides) => Ok(Instance(Arc::new(Key { kind_decides, ..key }))),
            Err(Fault::Refused(text)) => Err(PluginError::Settings(text)),
            Err(fault) => Err(PluginError::Fault { plugin: plugin.id().clone(), fault }),
        }
    }

    /// A verdict for each message of each batch, in their order: `true` passes it on. The instances must be of filters.
    pub async fn judge(&self, batches: Vec<(Instance, Vec<Arc<Message>>)>) -> Vec<Vec<Result<bool, Fault>>> {
        self.0.pool.run::<Judge>(batches).await
    }

    /// What [`Plugins::judge`] answers, without asking where the verdicts on all messages of a batch are known.
    pub async fn verdicts(&self, batches: Vec<(Instance, Vec<Arc<Message>>)>) -> Vec<Vec<Result<bool, Fault>>> {
        let memory = &self.0.memory;
        let recall = |(instance, messages): &(Instance, Vec<Arc<Message>>)| {
            memory.recall(instance, messages).inspect(|known| Pool::count(instance, known.len()))
        };
        let known: Vec<_> = batches.iter().map(recall).collect();
        let batches = batches.into_iter().zip(&known).filter(|(_, known)| known.is_none());
        let unknown: Vec<_> = batches.map(|(batch, _)| batch).collect();
        let asked = if unknown.is_empty() { Vec::new() } else { self.judge(unknown.clone()).await };
        for ((instance, messages), verdicts) in unknown.iter().zip(&asked) {
            memory.keep(instance, messages, verdicts);
        }
        let mut asked = asked.into_iter();
        known.into_iter().map(|known| known.or_else(|| asked.next()).unwrap_or_default()).collect()
    }

    /// A new body for each message of each batch, in their order, at most `output_bytes` long: whatever the transform makes, but
    /// JSON on one line.
    /// The instances must be of transforms.
    pub async fn shape(&self, batches: Vec<(Instance, Vec<Arc<Message>>)>) -> Vec<Vec<Result<Bytes, Fault>>> {
        self.0.pool.run::<Shape>(batches).await
    }

    /// Ends the threads after the calls that they are at; what is not judged by then is answered with [`Fault::Stopped`].
    /// Blocks for about `call_ms` at most.
    pub fn stop(&self) {
        self.0.pool.stop();
    }

    /// How many plugins the start had to compile.
    #[must_use]
    pub fn compiled(&self) -> usize {
        self.0.compiled
    }

    /// How many WebAssembly instances are live now.
    #[must_use]
    pub fn live_instances(&self) -> usize {
        self.0.pool.live_instances()
    }
}

fn replacement(plugin: BuiltIn, dir: &Path, limit: u64) -> Result<Option<Vec<u8>>, String> {
    let unreadable = |error: std::io::Error| format!("its replacement can't be read: {error}");
    let path = dir.join(plugin.name()).with_extension("wasm");
    if !path.try_exists().map_err(unreadable)? {
        return Ok(None);
    }
    let mut wasm = Vec::new();
    File::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut wasm)).map_err(unreadable)?;
    if wasm.len() as u64 > limit {
        return Err(format!("its replacement is longer than {limit} bytes"));
    }
    tracing::info!(plugin = plugin.name(), "the built-in plugin is replaced by a file");
    Ok(Some(wasm))
}
