//! A plugin as it was loaded: who it is, what it is for, and its compiled code, ready to make instances of.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use metrics::{Counter, Histogram};
use wasmtime::component::{Component, HasSelf, Linker};
use wasmtime::{Engine, Store};

use super::bindings::filter::{Filter, FilterPre};
use super::bindings::transform::{Transform, TransformPre};
use super::compiler::compilations;
use super::host::Host;
use super::instance::Guest;
use super::{BuiltIn, Fault};
use crate::message::Tenant;
use crate::telemetry::{Throttle, at_zero};

/// What a plugin does: its world in `wit/plugin.wit`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
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

/// A plugin that is compiled and linked.
pub(super) struct Loaded {
    id: PluginId,
    code: Code,
    /// Whether it can look at more than it is handed, or be heard of but by its answers.
    pub(super) imports: bool,
    pub(super) messages: Counter,
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
}

impl From<BuiltIn> for PluginId {
    fn from(plugin: BuiltIn) -> Self {
        Self { tenant: None, name: plugin.name().into(), version: 1 }
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
    /// Links a component to what its world offers; the error says what is missing on either side.
    pub(super) fn new(
        engine: &Engine,
        id: PluginId,
        world: World,
        component: &Component,
        lines: u32,
    ) -> Result<Self, String> {
        let code = Code::new(engine, world, component).map_err(|error| format!("{error:#}"))?;
        compilations(&id.name).increment(0);
        at_zero(|kind| faulted(&id.name, kind), &Fault::KINDS);
        let is_types = |name: &str| name.starts_with("tidegate:plugin/types@");
        Ok(Self(Arc::new(Loaded {
            messages: metrics::counter!("tidegate_plugin_messages_total", "plugin" => id.name.clone()),
            seconds: metrics::histogram!("tidegate_plugin_call_seconds", "plugin" => id.name.clone()),
            id,
            code,
            imports: component.component_type().imports(engine).any(|(name, _)| !is_types(name)),
            faults: Throttle::new(1),
            lines: Arc::new(Throttle::new(lines)),
        })))
    }

    /// Which one it is.
    #[must_use]
    pub fn id(&self) -> &PluginId {
        &self.0.id
    }

    /// What it does.
    #[must_use]
    pub fn world(&self) -> World {
        match self.0.code {
            Code::Filter(_) => World::Filter,
            Code::Transform(_) => World::Transform,
        }
    }
}

impl PartialEq for Plugin {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.id() == other.id()
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
    pub(super) fn engine(&self) -> &Engine {
        match &self.code {
            Code::Filter(pre) => pre.engine(),
            Code::Transform(pre) => pre.engine(),
        }
    }

    /// Instantiates and configures. The inner error is the guest's word on the settings.
    pub(super) fn configure(&self, store: &mut Store<Host>, settings: &str) -> wasmtime::Result<Result<Guest, String>> {
        Ok(match &self.code {
            Code::Filter(pre) => {
                let filter = pre.instantiate(&mut *store)?;
                let interest = filter.tidegate_plugin_filtering().call_configure(store, settings)?;
                interest.map(|interest| Guest::Filter(filter, interest))
            }
            Code::Transform(pre) => {
                let transform = pre.instantiate(&mut *store)?;
                let interest = transform.tidegate_plugin_transforming().call_configure(store, settings)?;
                interest.map(|interest| Guest::Transform(transform, interest))
            }
        })
    }

    /// Counts its faults.
    pub(super) fn faulted(&self, kind: &'static str) -> Counter {
        faulted(&self.id.name, kind)
    }
}

fn faulted(plugin: &Arc<str>, kind: &'static str) -> Counter {
    metrics::counter!("tidegate_plugin_faults_total", "plugin" => plugin.clone(), "kind" => kind)
}

impl Code {
    fn new(engine: &Engine, world: World, component: &Component) -> wasmtime::Result<Self> {
        match world {
            World::Filter => {
                let mut linker = Linker::new(engine);
                Filter::add_to_linker::<_, HasSelf<Host>>(&mut linker, |host| host)?;
                FilterPre::new(linker.instantiate_pre(component)?).map(Self::Filter)
            }
            World::Transform => {
                let mut linker = Linker::new(engine);
                Transform::add_to_linker::<_, HasSelf<Host>>(&mut linker, |host| host)?;
                TransformPre::new(linker.instantiate_pre(component)?).map(Self::Transform)
            }
        }
    }
}
