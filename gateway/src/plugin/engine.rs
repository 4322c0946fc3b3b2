//! One engine for all plugins, and the clock that ends their calls.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::Duration;

use wasmtime::{Config, Engine, EngineWeak};

use super::{PluginError, PluginLimits};
use crate::config::PluginEngine;

/// How exact a deadline is.
const TICK: Duration = Duration::from_millis(5);
/// Pulley for the pointers of this machine.
const INTERPRETER: &str = if cfg!(target_pointer_width = "64") { "pulley64" } else { "pulley32" };

/// An engine whose compiled code answers equally on every CPU and offers no more of WebAssembly than Rust, C and QuickJS
/// guests need. Without a choice, wasmtime interprets where it can make no machine code.
pub(super) fn engine(limits: &PluginLimits) -> Result<Engine, PluginError> {
    let failed = |error: wasmtime::Error| PluginError::Start(error.root_cause().to_string());
    let mut config = Config::new();
    if limits.engine == PluginEngine::Pulley {
        config.target(INTERPRETER).map_err(failed)?;
    }
    config
        .epoch_interruption(true)
        .max_wasm_stack(limits.stack_bytes)
        .concurrency_support(false)
        .shared_memory(false)
        .wasm_memory64(false)
        .wasm_relaxed_simd(false)
        .wasm_tail_call(false)
        .wasm_wide_arithmetic(false)
        .wasm_custom_page_sizes(false)
        .cranelift_nan_canonicalization(true)
        .wasm_backtrace_max_frames(NonZeroUsize::new(16));
    let engine = Engine::new(&config).map_err(failed)?;
    // To name the machine as a target would make code for the least of its kind.
    if limits.engine == PluginEngine::Cranelift && engine.is_pulley() {
        return Err(PluginError::Start("plugins.engine is cranelift, which has no backend for this machine".into()));
    }
    Ok(engine)
}

/// Advances the engine's epoch while calls run, and sleeps otherwise, so that an idle box is not woken.
pub(super) struct Clock {
    state: Arc<State>,
    ticker: Thread,
    handle: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct State {
    running: AtomicUsize,
    stopped: AtomicBool,
}

/// The clock ticks as long as this lives.
pub(super) struct Ticking<'a>(&'a State);

impl Clock {
    /// Starts the thread that ticks; it ends at `stop`, or with the engine.
    pub(super) fn start(engine: EngineWeak) -> std::io::Result<Self> {
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        let handle = thread::Builder::new()
            .name("tidegate-epoch".into())
            .stack_size(128 << 10)
            .spawn(move || shared.tick(&engine))?;
        Ok(Self { state, ticker: handle.thread().clone(), handle: Mutex::new(Some(handle)) })
    }

    /// Keeps the clock going. Must be held around everything that enters a guest.
    pub(super) fn ticking(&self) -> Ticking<'_> {
        if self.state.running.fetch_add(1, SeqCst) == 0 {
            self.ticker.unpark();
        }
        Ticking(&self.state)
    }

    /// From now on no call ends by its deadline.
    pub(super) fn stop(&self) {
        self.state.stopped.store(true, SeqCst);
        self.ticker.unpark();
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = handle.map(JoinHandle::join);
    }

    /// How many ticks are at least this long.
    pub(super) fn ticks(time: Duration) -> u64 {
        let whole = time.as_nanos().div_ceil(TICK.as_nanos());
        // The tick that is under way may end at once.
        u64::try_from(whole).unwrap_or(u64::MAX >> 1) + 1
    }
}

impl State {
    fn tick(&self, engine: &EngineWeak) {
        while !self.stopped.load(SeqCst) {
            if self.running.load(SeqCst) == 0 {
                // An `unpark` since the look at `running` makes this return at once.
                thread::park();
                continue;
            }
            thread::sleep(TICK);
            match engine.upgrade() {
                Some(engine) => engine.increment_epoch(),
                None => return,
            }
        }
    }
}

impl Drop for Ticking<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn deadlines_are_never_short() {
        assert_eq!(Clock::ticks(Duration::ZERO), 1);
        assert_eq!(Clock::ticks(Duration::from_millis(1)), 2);
        assert_eq!(Clock::ticks(Duration::from_millis(50)), 11);
    }

    #[test]
    fn the_clock_stops_when_told() {
        let engine = engine(&PluginLimits::default()).unwrap();
        let clock = Clock::start(engine.weak()).unwrap();
        drop(clock.ticking());
        clock.stop();
        clock.stop();
    }
}
