//! What a guest finds outside: its limits, the log, and the bodies of the running batch.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use wasmtime::{ResourceLimiter, Result};

use super::bindings::filter::tidegate::plugin::{body_access, log, types};
use super::pointer::{self, Found};
use super::stopwatch::{Budget, Stopwatch};
use super::{Instance, PluginId, PluginLimits};
use crate::message::{Message, Tenant};
use crate::telemetry::Throttle;

/// Bytes of a guest's text that reach a user or the log.
const TEXT_BYTES: usize = 512;
/// Lines that a guest wrote in one call, for who tries it.
const LINES: usize = 20;
const TABLE_ELEMENTS: usize = 20_000;

/// The messages of one call.
#[derive(Clone)]
pub(super) struct Batch {
    messages: Arc<Vec<Arc<Message>>>,
    range: Range<usize>,
}

impl Batch {
    pub(super) fn new(messages: &Arc<Vec<Arc<Message>>>, range: Range<usize>) -> Self {
        Self { messages: Arc::clone(messages), range }
    }

    /// All of them, if there are any.
    pub(super) fn whole(messages: Vec<Arc<Message>>) -> Option<Self> {
        let size = messages.len();
        (size > 0).then(|| Self::new(&Arc::new(messages), 0..size))
    }

    pub(super) fn messages(&self) -> &[Arc<Message>] {
        &self.messages[self.range.clone()]
    }

    /// What comes after the first `count` messages, if anything does.
    pub(super) fn after(&self, count: usize) -> Option<Self> {
        let rest = self.range.start + count..self.range.end;
        (!rest.is_empty()).then(|| Self::new(&self.messages, rest))
    }

    /// Its first `count` messages.
    pub(super) fn first(&self, count: usize) -> Self {
        Self::new(&self.messages, self.range.start..self.range.start + count)
    }

    /// The same messages, each by itself.
    pub(super) fn singly(&self) -> impl Iterator<Item = Self> + '_ {
        self.range.clone().map(|i| Self::new(&self.messages, i..i + 1))
    }
}

/// A line that a guest wrote into the log, cut.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LogLine {
    /// `debug`, `info`, `warn` or `error`.
    pub level: &'static str,
    /// What it says.
    pub text: Box<str>,
}

/// The state of a store.
pub(super) struct Host {
    pub(super) limiter: Limiter,
    /// What the running call may still use.
    pub(super) budget: Budget,
    /// There while a call runs.
    pub(super) batch: Option<Batch>,
    /// What it wrote into the log since the last call began, or while it was configured.
    pub(super) written: Vec<LogLine>,
    lines: Arc<Throttle>,
    // Not the instance itself, so that it is seen when nobody else has that.
    plugin: PluginId,
    tenant: Tenant,
}

impl Host {
    pub(super) fn new(lines: &Arc<Throttle>, instance: &Instance, limits: &PluginLimits) -> Self {
        Self {
            limiter: Limiter::new(limits, instance.plugin().0.is_script()),
            budget: Budget::new(Stopwatch::start_cheaply(), Duration::ZERO),
            batch: None,
            written: Vec::new(),
            lines: Arc::clone(lines),
            plugin: instance.plugin().id().clone(),
            tenant: instance.tenant().clone(),
        }
    }
}

/// Bounds what an instance holds, over all its memories and tables.
pub(super) struct Limiter {
    memory_bytes: usize,
    memory_left: usize,
    instances: usize,
    /// The guest has asked for more memory than it may have.
    pub(super) denied: bool,
}

impl Limiter {
    fn new(limits: &PluginLimits, is_script: bool) -> Self {
        let PluginLimits { memory_bytes, script_memory_bytes, core_instances, .. } = *limits;
        let memory_bytes = if is_script { script_memory_bytes } else { memory_bytes };
        Self { memory_bytes, memory_left: memory_bytes, instances: core_instances, denied: false }
    }

    /// Bytes that its memories have.
    pub(super) fn held(&self) -> usize {
        self.memory_bytes - self.memory_left
    }
}

impl ResourceLimiter for Limiter {
    fn memory_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        match self.memory_left.checked_sub(desired.saturating_sub(current)) {
            Some(left) => self.memory_left = left,
            None => {
                self.denied = true;
                wasmtime::bail!("memory limit reached");
            }
        }
        Ok(true)
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> Result<bool> {
        wasmtime::ensure!(desired <= TABLE_ELEMENTS, "table limit reached");
        Ok(true)
    }

    fn instances(&self) -> usize {
        self.instances
    }

    fn tables(&self) -> usize {
        10
    }

    fn memories(&self) -> usize {
        4
    }
}

impl types::Host for Host {}

impl body_access::Host for Host {
    fn get(&mut self, index: u32, pointer: String) -> Result<types::ValueResult> {
        let messages = self.batch.as_ref().map(Batch::messages).unwrap_or_default();
        let message = usize::try_from(index).ok().and_then(|index| messages.get(index));
        let message = message.ok_or_else(|| wasmtime::format_err!("no message {index} in the batch"))?;
        Ok(match pointer::find(&message.body, &pointer) {
            Found::Missing => types::ValueResult::Missing,
            Found::Null => types::ValueResult::Null,
            Found::Boolean(value) => types::ValueResult::Boolean(value),
            Found::Number(value) => types::ValueResult::Number(value),
            Found::Text(text) => types::ValueResult::Text(text.into_owned()),
            Found::Json(text) => types::ValueResult::Json(text.to_owned()),
        })
    }
}

impl log::Host for Host {
    fn write(&mut self, level: log::Level, text: String) -> Result<()> {
        let text = cut(&text);
        if self.written.len() < LINES {
            let level = match level {
                log::Level::Debug => "debug",
                log::Level::Info => "info",
                log::Level::Warn => "warn",
                log::Level::Error => "error",
            };
            self.written.push(LogLine { level, text: text.into() });
        }
        let Some(suppressed) = self.lines.pass(Instant::now()) else {
            return Ok(());
        };
        let (plugin, tenant) = (&self.plugin, &self.tenant);
        // Debug form: a guest's text must not forge lines.
        match level {
            log::Level::Debug => tracing::debug!(%plugin, %tenant, ?text, suppressed, "plugin"),
            log::Level::Info => tracing::info!(%plugin, %tenant, ?text, suppressed, "plugin"),
            log::Level::Warn => tracing::warn!(%plugin, %tenant, ?text, suppressed, "plugin"),
            log::Level::Error => tracing::error!(%plugin, %tenant, ?text, suppressed, "plugin"),
        }
        Ok(())
    }
}

/// The start of a guest's text.
pub(super) fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES)]
}
