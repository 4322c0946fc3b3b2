//! The compiler of components, in a process of its own.
//!
//! wasmtime bounds neither the time nor the memory that compiling takes, so the work is done by a child process that bounds
//! itself before it looks at the component. The gateway keeps the memory that it had, too: what a compiler has touched is
//! never given back whole.

use std::io::{self, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Instant;

use metrics::Counter;
use nix::sys::resource::{Resource, setrlimit};
use wasmtime::Engine;

use super::engine::engine;
use super::{PluginError, PluginLimits};

/// Name of the hidden command that compiles.
pub const COMMAND: &str = "compile-plugin";

/// What the child may use: seconds of processor time and bytes of memory.
const CPU_SECONDS: u64 = 60;
const MEMORY_BYTES: u64 = 1 << 30;

/// Where components are compiled.
#[derive(Clone, Debug)]
pub enum Compiler {
    /// In a child process that runs this program with [`COMMAND`].
    Child(PathBuf),
    /// In this process, without bounds: for programs that are not the gateway, with components that they trust.
    Here,
}

impl Compiler {
    /// The compiled code of `wasm`; the error says what is wrong with it.
    pub(super) fn compile(
        &self,
        engine: &Engine,
        limits: &PluginLimits,
        plugin: &Arc<str>,
        wasm: &[u8],
    ) -> Result<Vec<u8>, String> {
        let started = Instant::now();
        let code = match self {
            Self::Here => precompile(engine, wasm),
            Self::Child(program) => in_child(program, limits, wasm),
        }?;
        compilations(plugin).increment(1);
        tracing::info!(%plugin, milliseconds = started.elapsed().as_millis(), "plugin compiled");
        Ok(code)
    }
}

pub(super) fn compilations(plugin: &Arc<str>) -> Counter {
    metrics::counter!("tidegate_plugin_compilations_total", "plugin" => plugin.clone())
}

fn precompile(engine: &Engine, wasm: &[u8]) -> Result<Vec<u8>, String> {
    engine.precompile_component(wasm).map_err(|error| format!("{error:#}"))
}

fn in_child(program: &PathBuf, limits: &PluginLimits, wasm: &[u8]) -> Result<Vec<u8>, String> {
    let unusable = |error: io::Error| format!("the compiler could not be run: {error}");
    let mut child = Command::new(program)
        .args([COMMAND, "--stack-bytes", &limits.stack_bytes.to_string()])
        .env_clear()
        // The allocator takes address space in advance, which would count as memory.
        .env("MIMALLOC_ARENA_EAGER_COMMIT", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(unusable)?;
    // It reads all of its input first. If it ends before that, its status tells why.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(wasm));
    let output = child.wait_with_output().map_err(unusable)?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(if text.is_empty() { gave_up(output.status) } else { text.into_owned() })
}

/// A child that dies without a word has met one of its limits.
fn gave_up(status: ExitStatus) -> String {
    format!("the compiler gave up on it ({status}): it may use {CPU_SECONDS} s and {MEMORY_BYTES} bytes")
}

/// The child: compiles what comes in at standard input to standard output. The error is for standard error.
pub fn run_child(stack_bytes: usize) -> Result<(), String> {
    let bound = |resource, limit| setrlimit(resource, limit, limit).map_err(|error| error.to_string());
    bound(Resource::RLIMIT_CPU, CPU_SECONDS)?;
    bound(Resource::RLIMIT_DATA, MEMORY_BYTES)?;
    let text = |error: io::Error| error.to_string();
    let mut wasm = Vec::new();
    io::stdin().read_to_end(&mut wasm).map_err(text)?;
    let engine = engine(&PluginLimits { stack_bytes, ..PluginLimits::default() })
        .map_err(|error: PluginError| error.to_string())?;
    io::stdout().write_all(&precompile(&engine, &wasm)?).map_err(text)
}
