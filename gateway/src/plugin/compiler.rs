//! The compiler of components, in a process of its own.
//!
//! wasmtime bounds neither the time nor the memory that compiling takes, so the work is done by a child process that bounds
//! itself before it looks at the component. The gateway keeps the memory that it had, too: what a compiler has touched is
//! never given back whole.

use std::io::{self, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use metrics::Counter;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;
use wasmtime::Engine;

use super::engine::engine;
use super::{PluginError, PluginId, PluginLimits};
use crate::config::PluginEngine;

/// Name of the hidden command that compiles.
pub const COMMAND: &str = "compile-plugin";

/// How much the child stands back behind the gateway.
const NICE: i32 = 10;
/// With what the child ends when it has said what is wrong.
const REFUSED: i32 = 1;

/// What the child is told. Its limits are for itself, the others for the engine that the code is made for.
#[derive(clap::Args, Clone, Debug)]
pub struct ChildArgs {
    /// Bytes of stack that a call may use.
    #[arg(long)]
    stack_bytes: usize,
    /// What runs the code.
    #[arg(long, default_value = "auto")]
    engine: PluginEngine,
    /// Seconds of processor time.
    #[arg(long)]
    seconds: u64,
    /// Bytes of memory.
    #[arg(long)]
    bytes: u64,
}

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
        plugin: &PluginId,
        wasm: &[u8],
    ) -> Result<Vec<u8>, String> {
        let started = Instant::now();
        let code = match self {
            Self::Here => precompile(engine, wasm),
            Self::Child(program) => in_child(program, limits, wasm),
        }?;
        compilations(plugin.family()).increment(1);
        tracing::info!(%plugin, milliseconds = started.elapsed().as_millis(), "plugin compiled");
        Ok(code)
    }
}

pub(super) fn compilations(plugin: &str) -> Counter {
    metrics::counter!("tidegate_plugin_compilations_total", "plugin" => plugin.to_owned())
}

fn precompile(engine: &Engine, wasm: &[u8]) -> Result<Vec<u8>, String> {
    engine.precompile_component(wasm).map_err(|error| format!("it can't be compiled: {error:#}"))
}

fn in_child(program: &PathBuf, limits: &PluginLimits, wasm: &[u8]) -> Result<Vec<u8>, String> {
    let unusable = |error: io::Error| format!("the compiler could not be run: {error}");
    let mut child = Command::new(program)
        .args([COMMAND, "--engine", limits.engine.name(), "--stack-bytes", &limits.stack_bytes.to_string()])
        .args(["--seconds", &limits.compile_seconds.to_string(), "--bytes", &limits.compile_bytes.to_string()])
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
    Err(match output.status.code() {
        Some(REFUSED) => {
            let text = String::from_utf8_lossy(&output.stderr);
            text.trim_start_matches("tidegate: ").trim_end().to_owned()
        }
        _ => gave_up(output.status, limits),
    })
}

/// A child that dies without a word has met one of its limits, or an error of the compiler.
fn gave_up(status: ExitStatus, limits: &PluginLimits) -> String {
    let PluginLimits { compile_seconds, compile_bytes, .. } = limits;
    format!(
        "the compiler gave up on it ({status}): it may use {compile_seconds} s (plugins.compile_seconds) and \
         {compile_bytes} bytes (plugins.compile_bytes)"
    )
}

/// The child: compiles what comes in at standard input to standard output. The error is for standard error.
pub fn run_child(args: &ChildArgs) -> Result<(), String> {
    let bound = |resource, limit| setrlimit(resource, limit, limit).map_err(|error| error.to_string());
    bound(Resource::RLIMIT_CPU, args.seconds)?;
    bound(Resource::RLIMIT_DATA, args.bytes)?;
    stand_back().map_err(|error| error.to_string())?;
    // Nobody waits for its work once the gateway is gone.
    set_pdeathsig(Signal::SIGKILL).map_err(|error| error.to_string())?;
    let text = |error: io::Error| error.to_string();
    let mut wasm = Vec::new();
    io::stdin().read_to_end(&mut wasm).map_err(text)?;
    let ChildArgs { stack_bytes, engine: backend, .. } = *args;
    let engine = engine(&PluginLimits { stack_bytes, engine: backend, ..PluginLimits::default() })
        .map_err(|error: PluginError| error.to_string())?;
    io::stdout().write_all(&precompile(&engine, &wasm)?).map_err(text)
}

/// Gives this thread a low priority, and what it starts from then on.
pub(super) fn stand_back() -> io::Result<()> {
    #[allow(unsafe_code, reason = "no crate at hand wraps it")]
    // SAFETY: it takes a number and touches no memory. On Linux a thread has a priority of its own, see setpriority(2), "BUGS".
    let priority = unsafe { libc::nice(NICE) };
    if priority == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
