//! A plugin as it was loaded: who it is, what it is for, and its compiled code, ready to make instances of.

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use metrics::Histogram;
use wasmtime::component::{Component, HasSelf, Linker};
use wasmtime::{Engine, Store};

use super::Fault;
use super::bindings::filter::{Filter, FilterPre};
use super::bindings::script::{ScriptRunner, ScriptRunnerPre};
use super::bindings::transform::{Transform, TransformPre};
use super::compiler::compilations;
use super::host::Host;
use super::instance::Guest;
use super::usage::{Account, Usage};
use crate::message::Tenant;
use crate::telemetry::Throttle;

/// What a plugin does: its world in `wit/plugin.wit`.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum World {
    /// Decides which messages pass.
    Filter,
    /// Reshapes their bodies.
    Transform,
}

/// Which plugin.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PluginId {
    /// Whose it is; `None`: built in, and there for everybody.
    pub tenant: Option<Tenant>,
    /// Its name, unique among those of its owner.
    pub name: Arc<str>,
    /// Counts from 1, and never comes again.
    pub version: u32,
}

/// A plugin in memory. Cheap to clone.
#[derive(Clone)]
pub struct Plugin(pub(super) Arc<Loaded>);

/// A plugin that stays in memory only as long as somebody holds a [`Plugin`].
#[derive(Clone)]
pub struct WeakPlugin(Weak<Loaded>);

impl WeakPlugin {
    /// The plugin, if it is still there.
    #[must_use]
    pub fn upgrade(&self) -> Option<Plugin> {
        self.0.upgrade().map(Plugin)
    }
}

/// A plugin that is compiled and linked.
pub(super) struct Loaded {
    id: PluginId,
    code: Code,
    /// Whether it can look at more than it is handed, or be heard of but by its answers.
    pub(super) imports: bool,
    /// By who uses it: one if it is uploaded, each tenant if it is built in.
    accounts: Mutex<HashMap<Tenant, Arc<Account>>>,
    /// Of a batch, tries included.
    pub(super) seconds: Histogram,
    /// Keeps faults from flooding the log.
    pub(super) faults: Throttle,
    /// Keeps the guest's own lines from flooding the log.
    pub(super) lines: Arc<Throttle>,
}

enum Code {
    Filter(FilterPre<Host>),
    Transform(TransformPre<Host>),
    /// The script runner, and what it is told to run in which world.
    Script(ScriptRunnerPre<Host>, World, Box<str>),
    /// There is none, and so it answers this.
    None(World, Fault),
}

impl World {
    /// Its name in `wit/plugin.wit`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Transform => "transform",
        }
    }

    /// The world of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Filter, Self::Transform].into_iter().find(|world| world.name() == name)
    }

    /// The interface that a plugin of it exports.
    pub(super) fn export(self) -> &'static str {
        match self {
            Self::Filter => "filtering",
            Self::Transform => "transforming",
        }
    }

    pub(super) fn that_exports(interface: &str) -> Option<Self> {
        [Self::Filter, Self::Transform].into_iter().find(|world| world.export() == interface)
    }

    /// The interfaces that a plugin of it may import.
    pub(super) fn imports(self) -> &'static [&'static str] {
        match self {
            Self::Filter => &["types", "body-access", "log"],
            Self::Transform => &["types", "log"],
        }
    }
}

impl PluginId {
    /// A plugin that is in the program.
    #[must_use]
    pub fn built_in(name: &str) -> Self {
        Self { tenant: None, name: name.into(), version: 1 }
    }

    /// Its name in metrics that stay when it is deleted: uploaded ones have one for all.
    pub(super) fn family(&self) -> &str {
        if self.tenant.is_some() { "uploaded" } else { &self.name }
    }
}

impl fmt::Display for PluginId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tenant {
            None => f.write_str(&self.name),
            Some(_) => write!(f, "{} version {}", self.name, self.version),
        }
    }
}

impl Plugin {
    /// Links a component to what its world offers; it is the script runner if there is a `script`. The error says what is missing
    /// on either side.
    pub(super) fn new(
        engine: &Engine,
        id: PluginId,
        world: World,
        component: &Component,
        script: Option<&str>,
        lines: u32,
    ) -> Result<Self, String> {
        let code = Code::new(engine, world, component, script).map_err(|error| format!("{error:#}"))?;
        let is_types = |name: &str| name.starts_with("tidegate:plugin/types@");
        let imports = component.component_type().imports(engine).any(|(name, _)| !is_types(name));
        Ok(Self::with(id, code, imports, lines))
    }

    /// A plugin that could not be loaded. Whatever it is asked, it answers [`Fault::Unavailable`].
    #[must_use]
    pub fn unavailable(id: PluginId, world: World, reason: &str) -> Self {
        Self::with(id, Code::None(world, Fault::Unavailable(reason.into())), false, 0)
    }

    /// A plugin that is still to be loaded. Whatever it is asked, it answers [`Fault::Loading`].
    #[must_use]
    pub fn loading(id: PluginId, world: World) -> Self {
        Self::with(id, Code::None(world, Fault::Loading), false, 0)
    }

    fn with(id: PluginId, code: Code, imports: bool, lines: u32) -> Self {
        compilations(id.family()).increment(0);
        Self(Arc::new(Loaded {
            accounts: Mutex::default(),
            seconds: metrics::histogram!("tidegate_plugin_call_seconds", "plugin" => id.family().to_owned()),
            id,
            code,
            imports,
            faults: Throttle::new(1),
            lines: Arc::new(Throttle::new(lines)),
        }))
    }

    /// Which one it is.
    #[must_use]
    pub fn id(&self) -> &PluginId {
        &self.0.id
    }

    /// Finds it as long as somebody else holds it.
    #[must_use]
    pub fn downgrade(&self) -> WeakPlugin {
        WeakPlugin(Arc::downgrade(&self.0))
    }

    /// What it does.
    #[must_use]
    pub fn world(&self) -> World {
        match self.0.code {
            Code::Filter(_) => World::Filter,
            Code::Transform(_) => World::Transform,
            Code::Script(_, world, _) | Code::None(world, _) => world,
        }
    }

    /// The names of the interfaces that it imports.
    #[must_use]
    pub fn imports(&self) -> Vec<String> {
        let (engine, component) = match &self.0.code {
            Code::Filter(pre) => (pre.engine(), pre.instance_pre().component()),
            Code::Transform(pre) => (pre.engine(), pre.instance_pre().component()),
            Code::Script(pre, ..) => (pre.engine(), pre.instance_pre().component()),
            Code::None(..) => return Vec::new(),
        };
        component.component_type().imports(engine).map(|(name, _)| name.to_owned()).collect()
    }

    /// Why it is asked nothing, if so.
    pub(super) fn blocked(&self) -> Option<&Fault> {
        match &self.0.code {
            Code::None(_, fault) => Some(fault),
            Code::Filter(_) | Code::Transform(_) | Code::Script(..) => None,
        }
    }
}

impl PartialEq for Plugin {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || (self.id(), self.blocked()) == (other.id(), other.blocked())
    }
}

impl Eq for Plugin {}

impl Hash for Plugin {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.id().hash(state);
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id())
    }
}

impl Loaded {
    /// A store of its engine, for one instance.
    pub(super) fn store(&self, host: Host) -> Result<Store<Host>, Fault> {
        match &self.code {
            Code::Filter(pre) => Ok(Store::new(pre.engine(), host)),
            Code::Transform(pre) => Ok(Store::new(pre.engine(), host)),
            Code::Script(pre, ..) => Ok(Store::new(pre.engine(), host)),
            Code::None(_, fault) => Err(fault.clone()),
        }
    }

    /// Whether its component is the script runner.
    pub(super) fn is_script(&self) -> bool {
        matches!(self.code, Code::Script(..))
    }

    /// Whether its code is interpreted, not compiled.
    pub(super) fn is_interpreted(&self) -> bool {
        match &self.code {
            Code::Filter(pre) => pre.engine().is_pulley(),
            Code::Transform(pre) => pre.engine().is_pulley(),
            Code::Script(pre, ..) => pre.engine().is_pulley(),
            Code::None(..) => false,
        }
    }

    /// Instantiates and configures. The inner error is the guest's word on the settings.
    pub(super) fn configure(&self, store: &mut Store<Host>, settings: &str) -> wasmtime::Result<Result<Guest, String>> {
        Ok(match &self.code {
            Code::Filter(pre) => {
                let filter = pre.instantiate(&mut *store)?;
                let interest = filter.tidegate_plugin_filtering().call_configure(store, settings)?;
                interest.map(|interest| Guest::filter(filter, interest))
            }
            Code::Transform(pre) => {
                let transform = pre.instantiate(&mut *store)?;
                let interest = transform.tidegate_plugin_transforming().call_configure(store, settings)?;
                interest.map(|interest| Guest::Transform(transform, interest))
            }
            Code::Script(pre, world, text) => {
                let runner = pre.instantiate(&mut *store)?;
                let settings = Some(settings).filter(|settings| !settings.is_empty());
                let stateful = runner.tidegate_script_runner_scripting().call_configure(store, text, settings)?;
                stateful.map(|stateful| Guest::script(runner, *world, stateful))
            }
            Code::None(_, fault) => wasmtime::bail!("{fault}"),
        })
    }

    /// Where the tenant's use of it is counted.
    pub(super) fn account(&self, tenant: &Tenant) -> Arc<Account> {
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(accounts.entry(tenant.clone()).or_default())
    }

    /// The use of it by one tenant, or by all.
    pub(super) fn usage(&self, tenant: Option<&Tenant>) -> Usage {
        let accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        let selected = accounts.iter().filter(|(owner, _)| tenant.is_none_or(|tenant| tenant == *owner));
        let mut sum = Usage::default();
        selected.for_each(|(_, account)| sum.add(&account.usage()));
        sum
    }
}

impl Code {
    fn new(engine: &Engine, world: World, component: &Component, script: Option<&str>) -> wasmtime::Result<Self> {
        let mut linker = Linker::new(engine);
        if let Some(text) = script {
            ScriptRunner::add_to_linker::<_, HasSelf<Host>>(&mut linker, |host| host)?;
            let pre = ScriptRunnerPre::new(linker.instantiate_pre(component)?)?;
            return Ok(Self::Script(pre, world, text.into()));
        }
        match world {
            World::Filter => {
                Filter::add_to_linker::<_, HasSelf<Host>>(&mut linker, |host| host)?;
                FilterPre::new(linker.instantiate_pre(component)?).map(Self::Filter)
            }
            World::Transform => {
                Transform::add_to_linker::<_, HasSelf<Host>>(&mut linker, |host| host)?;
                TransformPre::new(linker.instantiate_pre(component)?).map(Self::Transform)
            }
        }
    }
}
