//! From the bytes of a component to a plugin: checked, compiled unless the cache has its code, and linked to what its world offers.

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::OnceCell;
use wasmtime::Engine;
use wasmtime::component::Component;

use super::cache::{self, Cache};
use super::compiler::Compiler;
use super::module::{Loaded, Plugin, PluginId, World};
use super::turns::Turns;
use super::{Fault, PluginError, PluginLimits};

/// What a component and a core module begin with: magic number, version and layer (component model, "Component Definitions";
/// core specification, "Modules").
const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";
const MODULE: &[u8] = b"\0asm\x01\0\0\0";

/// The package of `wit/plugin.wit`, and its version. Others of the same major version are compatible.
const PACKAGE: &str = "tidegate:plugin/";
const VERSION: &str = "1.0.0";

/// The component that runs scripts, in either world.
pub(super) static SCRIPT_RUNNER: &[u8] = include_bytes!("../../../plugins/components/script-runner.wasm");

/// The bytes of a component.
pub(super) type Wasm = Cow<'static, [u8]>;

/// Loads plugins.
pub(super) struct Loader {
    engine: Engine,
    limits: PluginLimits,
    compiler: Compiler,
    cache: Cache,
    /// A compiler takes a core and much memory.
    compiling: Turns,
    /// [`SCRIPT_RUNNER`], once a script was loaded.
    script_runner: OnceCell<Component>,
    compiled: AtomicUsize,
    loaded: Mutex<Vec<Weak<Loaded>>>,
}

impl Loader {
    pub(super) fn new(engine: &Engine, limits: &PluginLimits, compiler: &Compiler, cache: &Path) -> Self {
        Self {
            engine: engine.clone(),
            limits: limits.clone(),
            compiler: compiler.clone(),
            cache: Cache::open(cache),
            compiling: Turns::new(),
            script_runner: OnceCell::new(),
            compiled: AtomicUsize::new(0),
            loaded: Mutex::default(),
        }
    }

    /// Loads without a runtime, and blocks as long as that takes.
    pub(super) fn load_blocking(&self, id: &PluginId, wasm: &[u8]) -> Result<Plugin, PluginError> {
        let component = self.find(id, wasm).map_or_else(|| self.compile(id, wasm), Ok);
        component.and_then(|component| self.link(id, wasm, &component)).map_err(|reason| unusable(id, reason))
    }

    /// Loads on the threads that may block; a component that must be compiled waits for its tenant's turn.
    pub(super) async fn load(self: &Arc<Self>, id: PluginId, wasm: Wasm) -> Result<Plugin, PluginError> {
        check_preamble(&wasm).map_err(|reason| unusable(&id, reason.to_owned()))?;
        let wasm = Arc::new(wasm);
        let component = self.component(&id, &wasm).await?;
        self.blocking(&id, &wasm, move |loader, id, wasm| loader.link(id, wasm, &component)).await
    }

    /// A script, for the script runner. Whether it is one is not known before it is configured.
    pub(super) async fn load_script(
        self: &Arc<Self>,
        id: PluginId,
        world: World,
        text: &str,
    ) -> Result<Plugin, PluginError> {
        let runner = PluginId::built_in("script-runner");
        let wasm = Arc::new(Wasm::Borrowed(SCRIPT_RUNNER));
        let component = self.script_runner.get_or_try_init(|| self.component(&runner, &wasm)).await?;
        Plugin::new(&self.engine, id, world, component, Some(text), self.limits.log_lines)
            .inspect(|plugin| self.note(plugin))
            .map_err(|reason| unusable(&runner, reason))
    }

    async fn component(self: &Arc<Self>, id: &PluginId, wasm: &Arc<Wasm>) -> Result<Component, PluginError> {
        if let Some(component) = self.blocking(id, wasm, |loader, id, wasm| Ok(loader.find(id, wasm))).await? {
            return Ok(component);
        }
        let turn = self.compiling.take(id.tenant.as_ref()).await;
        let turn = turn.map_err(|fault| PluginError::Fault { plugin: id.clone(), fault })?;
        self.blocking(id, wasm, move |loader, id, wasm| {
            let _turn = turn;
            loader.compile(id, wasm)
        })
        .await
    }

    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        id: &PluginId,
        wasm: &Arc<Wasm>,
        work: impl FnOnce(&Self, &PluginId, &[u8]) -> Result<T, String> + Send + 'static,
    ) -> Result<T, PluginError> {
        let (loader, plugin, wasm) = (Arc::clone(self), id.clone(), Arc::clone(wasm));
        match tokio::task::spawn_blocking(move || work(&loader, &plugin, &wasm)).await {
            Ok(done) => done.map_err(|reason| unusable(id, reason)),
            Err(gone) if gone.is_cancelled() => Err(PluginError::Fault { plugin: id.clone(), fault: Fault::Stopped }),
            Err(panicked) => Err(unusable(id, format!("loading it failed: {panicked}"))),
        }
    }

    fn find(&self, id: &PluginId, wasm: &[u8]) -> Option<Component> {
        self.cache
            .find(&self.engine, wasm)
            .inspect(|_| tracing::debug!(plugin = %id, "compiled code taken from the cache"))
    }

    fn compile(&self, id: &PluginId, wasm: &[u8]) -> Result<Component, String> {
        let code = self.compiler.compile(&self.engine, &self.limits, id, wasm)?;
        self.compiled.fetch_add(1, Relaxed);
        self.cache.keep(&self.engine, wasm, &code).map_err(|error| format!("{error:#}"))
    }

    /// What can't be linked leaves nothing behind.
    fn link(&self, id: &PluginId, wasm: &[u8], component: &Component) -> Result<Plugin, String> {
        world(&self.engine, component)
            .and_then(|world| Plugin::new(&self.engine, id.clone(), world, component, None, self.limits.log_lines))
            .inspect(|plugin| self.note(plugin))
            .inspect_err(|_| self.cache.forget(&cache::digest(wasm)))
    }

    fn note(&self, plugin: &Plugin) {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.retain(|plugin| plugin.strong_count() > 0);
        loaded.push(Arc::downgrade(&plugin.0));
    }

    /// The plugins that somebody has.
    pub(super) fn loaded(&self) -> Vec<Plugin> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.iter().filter_map(Weak::upgrade).map(Plugin).collect()
    }

    /// Deletes the compiled code of the component with this digest.
    pub(super) async fn forget(self: &Arc<Self>, component: String) {
        let loader = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || loader.cache.forget(&component)).await;
    }

    /// Deletes all compiled code but that of the components with these digests.
    pub(super) async fn tidy(self: &Arc<Self>, components: HashSet<String>) {
        let loader = Arc::clone(self);
        let _ = tokio::task::spawn_blocking(move || loader.cache.tidy(&components)).await;
    }

    /// How many components had to be compiled.
    pub(super) fn compiled(&self) -> usize {
        self.compiled.load(Relaxed)
    }

    /// Compiles nothing more.
    pub(super) fn stop(&self) {
        self.compiling.close();
    }
}

fn unusable(plugin: &PluginId, reason: String) -> PluginError {
    PluginError::Component { plugin: plugin.clone(), reason }
}

fn check_preamble(wasm: &[u8]) -> Result<(), &'static str> {
    if wasm.starts_with(COMPONENT) {
        Ok(())
    } else if wasm.starts_with(MODULE) {
        Err("it is a core module; 'wasm-tools component new' makes a component of it")
    } else {
        Err(
            "it is no WebAssembly component; a script is one by its name, which ends in .js, over HTTP by the type text/javascript",
        )
    }
}

/// The world that a component is made for. The error tells its author what to change.
fn world(engine: &Engine, component: &Component) -> Result<World, String> {
    let component = component.component_type();
    let exports = component.exports(engine).filter_map(|(name, _)| of_package(name));
    let mut worlds = exports.filter_map(|(interface, version)| Some((World::that_exports(interface)?, version)));
    let Some((world, version)) = worlds.next() else {
        let [filter, transform] = [World::Filter, World::Transform].map(World::export);
        return Err(format!(
            "it exports neither {PACKAGE}{filter} nor {PACKAGE}{transform}: build it for the world 'filter' or 'transform' of \
             wit/plugin.wit"
        ));
    };
    if worlds.next().is_some() {
        return Err(
            "it exports more than one of the gateway's interfaces: build it for one world of wit/plugin.wit".into()
        );
    }
    check_version(world.export(), version, "exports")?;
    for (name, _) in component.imports(engine) {
        match of_package(name) {
            Some((interface, version)) if world.imports().contains(&interface) => {
                check_version(interface, version, "imports")?;
            }
            _ if name.starts_with("wasi:") => {
                return Err(format!(
                    "it imports {name}, and plugins reach nothing outside: build it for wasm32-unknown-unknown, or with \
                     --stub-wasi"
                ));
            }
            _ => {
                let offered = world.imports().join(", ");
                return Err(format!("it imports {name}; a {} may import {PACKAGE}{{{offered}}} alone", world.name()));
            }
        }
    }
    Ok(world)
}

/// Name and version of one of our interfaces.
fn of_package(name: &str) -> Option<(&str, &str)> {
    let name = name.strip_prefix(PACKAGE)?;
    Some(name.split_once('@').unwrap_or((name, "")))
}

fn check_version(interface: &str, version: &str, how: &str) -> Result<(), String> {
    let major = |version: &str| version.split('.').next().map(str::to_owned);
    if major(version) == major(VERSION) {
        return Ok(());
    }
    Err(format!(
        "it {how} {PACKAGE}{interface}@{version}, and this gateway has version {VERSION}: build it with the wit/plugin.wit of \
         this gateway"
    ))
}
