//! One live WebAssembly instance and what can be asked of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::value::RawValue;
use wasmtime::{Store, Trap, UpdateDeadline};

use super::bindings::filter::Filter;
use super::bindings::filter::exports::tidegate::plugin::filtering;
use super::bindings::filter::tidegate::plugin::types::{Body, BodyForm, Meta, MetaFields, State, ValueParam};
use super::bindings::script::ScriptRunner;
use super::bindings::script::exports::tidegate::script_runner::scripting::{self, Shaped};
use super::bindings::transform::Transform;
use super::bindings::transform::exports::tidegate::plugin::transforming::{self, NewBody};
use super::engine::Clock;
use super::host::{Batch, Host, LogLine, cut};
use super::pointer::{self, Found, Pointers};
use super::stopwatch::{Budget, Stopwatch};
use super::{Fault, Instance, Interest, PluginLimits, Verdict, World};
use crate::message::Message;
use crate::{dispatch, json};

const COMPONENT_HANDLES: usize = 1000;
/// Pointers that a filter may have extracted from each message.
const POINTERS: usize = 32;
/// The fields of a message's metadata, and their names.
const FIELDS: [(MetaFields, &str); 6] = [
    (MetaFields::TENANT, "tenant"),
    (MetaFields::API, "api"),
    (MetaFields::SOURCE, "source"),
    (MetaFields::TYPE, "type"),
    (MetaFields::ACTION, "action"),
    (MetaFields::TIME, "time"),
];

/// A configured instance in a store of its own. After an error it is dead and must be dropped.
pub(super) struct Live {
    store: Store<Host>,
    guest: Guest,
    imports: bool,
    sizes: Sizes,
    slow: bool,
    /// When the last call began.
    pub(super) used: Instant,
    _counted: Counted,
}

pub(super) enum Guest {
    Filter(Filter, filtering::Interest, Pointers),
    Transform(Transform, transforming::Interest),
    /// Runs a script.
    Script(ScriptRunner, World, State),
}

/// How large what a transform returns may be.
#[derive(Clone, Copy)]
struct Sizes {
    body_bytes: usize,
    frame_bytes: usize,
}

/// Counts the live instances of the process.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Live {
    /// Instantiates and configures, within `time`. `Fault::Refused` is the guest's word on the settings.
    pub(super) fn new(
        instance: &Instance,
        limits: &PluginLimits,
        count: &Arc<AtomicUsize>,
        time: Duration,
    ) -> Result<Self, Fault> {
        let loaded = &instance.plugin().0;
        let host = Host::new(&loaded.lines, instance, limits);
        let mut store = loaded.store(host)?;
        store.limiter(|host| &mut host.limiter);
        store.set_hostcall_fuel(limits.copy_bytes);
        store.set_max_component_handles(COMPONENT_HANDLES);
        store.epoch_deadline_callback(|context| match context.data().budget.left() {
            Some(left) => Ok(UpdateDeadline::Continue(Clock::ticks(left))),
            None => Err(Trap::Interrupt.into()),
        });
        // Instantiating runs guest code, so the deadline comes first.
        let watch = Stopwatch::start();
        allow(&mut store, watch, time);
        let guest = match loaded.configure(&mut store, instance.settings()) {
            Ok(Ok(guest)) => guest,
            Ok(Err(text)) => return Err(refused(&text)),
            Err(error) => return Err(fault(&store, &error)),
        };
        guest.check()?;
        // Twice as long may pass the next time.
        let slow = watch.shows() > limits.call() / 2;
        let (used, _counted) = (watch.started, Counted::new(count));
        let sizes = Sizes { body_bytes: limits.output_bytes, frame_bytes: limits.frame_bytes };
        Ok(Self { store, guest, imports: loaded.imports, sizes, slow, used, _counted })
    }

    /// What it has said of itself.
    pub(super) fn traits(&self) -> Traits {
        Traits {
            kind_decides: matches!(&self.guest, Guest::Filter(_, interest, _) if !self.imports && names_kinds_alone(interest)),
            keeps_state: self.guest.state() == State::PerSource,
            slow: self.slow,
        }
    }

    /// What it has asked for.
    pub(super) fn interest(&self) -> Interest {
        let (meta, body, pointers) = match &self.guest {
            Guest::Filter(_, interest, _) => (interest.meta, interest.body, interest.pointers.clone()),
            Guest::Transform(_, interest) => (interest.meta, interest.body, Vec::new()),
            // As `columns` hands over.
            Guest::Script(..) => (MetaFields::all() ^ MetaFields::TENANT, BodyForm::Text, Vec::new()),
        };
        let meta = FIELDS.iter().filter(|(field, _)| meta.contains(*field)).map(|(_, name)| *name).collect();
        let body = match body {
            BodyForm::None => "none",
            BodyForm::Bytes => "bytes",
            BodyForm::Text => "text",
        };
        Interest { meta, body, pointers, keeps_state: self.traits().keeps_state }
    }

    /// Bytes of linear memory that it holds; it never gives any back.
    pub(super) fn memory_bytes(&self) -> usize {
        self.store.data().limiter.held()
    }

    /// What it has written into the log since it was made, or since the last call began.
    pub(super) fn take_written(&mut self) -> Vec<LogLine> {
        std::mem::take(&mut self.store.data_mut().written)
    }

    /// Asks about a batch, until `watch` shows `time`.
    pub(super) fn call<W: Work>(
        &mut self,
        batch: &Batch,
        watch: Stopwatch,
        time: Duration,
    ) -> Result<Vec<Result<W::Answer, Fault>>, Fault> {
        allow(&mut self.store, watch, time);
        self.store.data_mut().batch = Some(batch.clone());
        self.store.data_mut().written.clear();
        let answers = W::call(self, batch.messages())?;
        self.store.data_mut().batch = None;
        self.used = watch.started;
        Ok(answers)
    }
}

/// What a plugin with its settings is like.
#[derive(Clone, Copy)]
pub(super) struct Traits {
    /// Whether API, action and type of a message decide over the verdict: a filter that is told nothing else.
    pub(super) kind_decides: bool,
    /// Whether it keeps something for each source.
    pub(super) keeps_state: bool,
    /// Whether to configure it takes longer than a call may.
    pub(super) slow: bool,
}

fn names_kinds_alone(interest: &filtering::Interest) -> bool {
    let more = MetaFields::SOURCE | MetaFields::TIME;
    let little = interest.body == BodyForm::None && interest.pointers.is_empty() && !interest.meta.intersects(more);
    little && interest.state == State::None
}

impl Guest {
    pub(super) fn filter(filter: Filter, interest: filtering::Interest) -> Self {
        let pointers = Pointers::new(&interest.pointers);
        Self::Filter(filter, interest, pointers)
    }

    pub(super) fn script(runner: ScriptRunner, world: World, stateful: bool) -> Self {
        Self::Script(runner, world, if stateful { State::PerSource } else { State::None })
    }

    fn state(&self) -> State {
        match self {
            Self::Filter(_, interest, _) => interest.state,
            Self::Transform(_, interest) => interest.state,
            Self::Script(_, _, state) => *state,
        }
    }

    /// Refuses what this gateway can't give.
    fn check(&self) -> Result<(), Fault> {
        let Self::Filter(_, filtering::Interest { pointers, .. }, _) = self else { return Ok(()) };
        if pointers.len() > POINTERS {
            return Err(Fault::Refused(format!("it asks for more than {POINTERS} pointers").into()));
        }
        pointers.iter().try_for_each(|pointer| {
            let refusal = |reason| refused(&format!("`{}` is no JSON pointer: {reason}", cut(pointer)));
            pointer::check(pointer).map_err(refusal)
        })
    }
}

/// A kind of question that a batch is put.
pub(super) trait Work: 'static {
    /// What is answered for each message.
    type Answer: Into<Verdict> + Send + 'static;

    /// Whether the answer is that the message is not passed on.
    fn is_drop(answer: &Self::Answer) -> bool;

    /// An outer error leaves the instance dead.
    fn call(live: &mut Live, messages: &[Arc<Message>]) -> Result<Vec<Result<Self::Answer, Fault>>, Fault>;
}

/// Asks a filter.
pub(super) struct Judge;

impl Work for Judge {
    type Answer = bool;

    fn is_drop(passes: &bool) -> bool {
        !passes
    }

    fn call(live: &mut Live, messages: &[Arc<Message>]) -> Result<Vec<Result<bool, Fault>>, Fault> {
        let (filter, interest, pointers) = match &live.guest {
            Guest::Filter(filter, interest, pointers) => (filter, interest, pointers),
            Guest::Script(runner, World::Filter, _) => return judge_by_script(runner, &mut live.store, messages),
            _ => return Err(Fault::Refused("it is no filter".into())),
        };
        let width = pointers.len();
        let mut found: Vec<Found<'_>> = Vec::with_capacity(messages.len() * width);
        if width > 0 {
            messages.iter().for_each(|message| pointers.find(&message.body, &mut found));
        }
        let values: Vec<ValueParam<'_>> = found.iter().map(value).collect();
        let batch: Vec<filtering::Message<'_>> = messages
            .iter()
            .enumerate()
            .map(|(i, message)| filtering::Message {
                meta: meta(message, interest.meta),
                body: body(message, interest.body),
                values: (width > 0).then(|| &values[i * width..][..width]),
            })
            .collect();
        let verdicts = filter.tidegate_plugin_filtering().call_evaluate(&mut live.store, &batch);
        let verdicts = one_each(verdicts.map_err(|error| fault(&live.store, &error))?, messages)?;
        Ok(verdicts.into_iter().map(|verdict| verdict.map_err(|text| refused(&text))).collect())
    }
}

/// Asks a transform.
pub(super) struct Shape;

impl Work for Shape {
    type Answer = Bytes;

    fn is_drop(_: &Bytes) -> bool {
        false
    }

    fn call(live: &mut Live, messages: &[Arc<Message>]) -> Result<Vec<Result<Bytes, Fault>>, Fault> {
        let (transform, interest) = match &live.guest {
            Guest::Transform(transform, interest) => (transform, interest),
            Guest::Script(runner, World::Transform, _) => {
                return shape_by_script(runner, &mut live.store, messages, live.sizes);
            }
            _ => return Err(Fault::Refused("it is no transform".into())),
        };
        let batch: Vec<transforming::Message<'_>> = messages
            .iter()
            .map(|message| transforming::Message {
                meta: meta(message, interest.meta),
                body: body(message, interest.body),
            })
            .collect();
        let bodies = transform.tidegate_plugin_transforming().call_apply(&mut live.store, &batch);
        let bodies = one_each(bodies.map_err(|error| fault(&live.store, &error))?, messages)?;
        Ok(bodies
            .into_iter()
            .zip(messages)
            .map(|(body, message)| match body {
                Ok(NewBody::Unchanged) => Ok(message.body.clone()),
                Ok(NewBody::Bytes(body)) => checked(body, message, live.sizes),
                Ok(NewBody::Text(body)) => checked(body.into_bytes(), message, live.sizes),
                Err(text) => Err(refused(&text)),
            })
            .collect())
    }
}

fn judge_by_script(
    runner: &ScriptRunner,
    store: &mut Store<Host>,
    messages: &[Arc<Message>],
) -> Result<Vec<Result<bool, Fault>>, Fault> {
    let judged =
        Columns::of(messages).handed(|batch| runner.tidegate_script_runner_scripting().call_judge(&mut *store, batch));
    let judged = judged.map_err(|error| fault(store, &error))?;
    let mut faults = judged.faults.iter();
    let mut verdict = |number| match number {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(refused(faults.next().map_or("", String::as_str))),
    };
    Ok(one_each(judged.verdicts, messages)?.into_iter().map(&mut verdict).collect())
}

fn shape_by_script(
    runner: &ScriptRunner,
    store: &mut Store<Host>,
    messages: &[Arc<Message>],
    sizes: Sizes,
) -> Result<Vec<Result<Bytes, Fault>>, Fault> {
    let bodies =
        Columns::of(messages).handed(|batch| runner.tidegate_script_runner_scripting().call_shape(&mut *store, batch));
    let bodies = one_each(bodies.map_err(|error| fault(store, &error))?, messages)?;
    let body = |(body, message): (Shaped, &Arc<Message>)| match body {
        Shaped::Unchanged => Ok(message.body.clone()),
        Shaped::Bytes(body) => checked(body, message, sizes),
        Shaped::Text(body) => checked(body.into_bytes(), message, sizes),
        Shaped::Fault(text) => Err(refused(&text)),
    };
    Ok(bodies.into_iter().zip(messages).map(body).collect())
}

/// A batch as the script runner wants it.
struct Columns<'a> {
    apis: Vec<&'a str>,
    sources: Vec<&'a str>,
    types: Vec<Option<&'a str>>,
    actions: Vec<&'a str>,
    times: Vec<Option<&'a str>>,
    instants: Vec<Option<f64>>,
    bodies: Vec<Option<&'a str>>,
}

impl<'a> Columns<'a> {
    fn of(messages: &'a [Arc<Message>]) -> Self {
        Self {
            apis: messages.iter().map(|message| message.api.as_str()).collect(),
            sources: messages.iter().map(|message| message.source.as_str()).collect(),
            types: messages.iter().map(|message| kind(message)).collect(),
            actions: messages.iter().map(|message| message.action.as_str()).collect(),
            times: messages.iter().map(|message| time(message)).collect(),
            instants: messages.iter().map(|message| instant(message)).collect(),
            bodies: messages.iter().map(|message| text(message)).collect(),
        }
    }

    fn handed<T>(&self, call: impl FnOnce(scripting::Columns<'_>) -> T) -> T {
        let Self { apis, sources, types, actions, times, instants, bodies } = self;
        call(scripting::Columns { apis, sources, types, actions, times, instants, bodies })
    }
}

/// Refuses answers that can't be told which message they belong to.
fn one_each<T>(answers: Vec<T>, messages: &[Arc<Message>]) -> Result<Vec<T>, Fault> {
    if answers.len() == messages.len() {
        Ok(answers)
    } else {
        Err(Fault::WrongLength { messages: messages.len(), answers: answers.len() })
    }
}

fn meta(message: &Message, fields: MetaFields) -> Meta<'_> {
    let wanted = |field, text| fields.contains(field).then_some(text).flatten();
    Meta {
        tenant: wanted(MetaFields::TENANT, Some(message.tenant.as_str())),
        api: wanted(MetaFields::API, Some(message.api.as_str())),
        source: wanted(MetaFields::SOURCE, Some(message.source.as_str())),
        type_: wanted(MetaFields::TYPE, kind(message)),
        action: wanted(MetaFields::ACTION, Some(message.action.as_str())),
        time: wanted(MetaFields::TIME, time(message)),
    }
}

fn kind(message: &Message) -> Option<&str> {
    message.kind.as_deref().filter(|kind| !kind.is_empty())
}

fn time(message: &Message) -> Option<&str> {
    Some(&*message.time).filter(|time| !time.is_empty())
}

/// In milliseconds since 1970, which a number of JavaScript holds exactly.
fn instant(message: &Message) -> Option<f64> {
    time(message).and_then(|time| crate::time::parse(time).ok()).map(|ms| ms as f64)
}

/// A body is JSON text from where it is made; one that isn't has nothing to show.
fn text(message: &Message) -> Option<&str> {
    std::str::from_utf8(&message.body).ok()
}

fn body(message: &Message, form: BodyForm) -> Body<'_> {
    match form {
        BodyForm::None => Body::None,
        BodyForm::Bytes => Body::Bytes(&message.body),
        BodyForm::Text => text(message).map_or(Body::None, Body::Text),
    }
}

fn value<'a>(found: &'a Found<'_>) -> ValueParam<'a> {
    match found {
        Found::Missing => ValueParam::Missing,
        Found::Null => ValueParam::Null,
        Found::Boolean(value) => ValueParam::Boolean(*value),
        Found::Number(value) => ValueParam::Number(*value),
        Found::Text(text) => ValueParam::Text(text),
        Found::Json(text) => ValueParam::Json(text),
    }
}

/// A body as it goes on, if it may.
fn checked(body: Vec<u8>, message: &Message, sizes: Sizes) -> Result<Bytes, Fault> {
    let check = |what, bytes, limit, key| {
        let too_long = || Fault::Output(format!("{what} of {bytes} bytes, of at most {limit} ({key})").into());
        (bytes <= limit).then_some(()).ok_or_else(too_long)
    };
    check("a body", body.len(), sizes.body_bytes, "plugins.output_bytes")?;
    let body = on_one_line(body);
    // Whoever sent the message is not to blame for what the transform makes of it.
    let frame_bytes = dispatch::frame_bytes(message, &body);
    check("a body that makes a notification", frame_bytes, sizes.frame_bytes, "limits.frame_bytes")?;
    Ok(body)
}

/// JSON is put on one line, since clients that read frames by lines would break it; everything else stays as it is.
fn on_one_line(body: Vec<u8>) -> Bytes {
    // Without a way out of the loop it is done many bytes at a time.
    let plain = body.iter().fold(true, |plain, byte| plain & (b' '..=b'~').contains(byte));
    if !plain && let Ok(json) = serde_json::from_slice::<&RawValue>(&body) {
        let mut line = Vec::with_capacity(body.len());
        json::one_line(json.get(), &mut line);
        return line.into();
    }
    body.into()
}

/// Lets the next call go on until `watch` shows `time`.
fn allow(store: &mut Store<Host>, watch: Stopwatch, time: Duration) {
    store.data_mut().budget = Budget::new(watch, time);
    store.set_epoch_deadline(Clock::ticks(time));
}

/// The guest's own word.
fn refused(text: &str) -> Fault {
    Fault::Refused(cut(text).into())
}

/// What an error of wasmtime means to the plugin's user. Its backtrace is left out: names in it may hold paths.
fn fault(store: &Store<Host>, error: &wasmtime::Error) -> Fault {
    if store.data().limiter.denied {
        return Fault::Memory;
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::Interrupt) => Fault::Deadline,
        Some(Trap::StackOverflow | Trap::MemoryOutOfBounds) => {
            Fault::Trap("too deep recursion or a wild pointer".into())
        }
        _ => {
            let text = error.root_cause().to_string();
            if text.contains("fuel allocated for hostcalls") {
                return Fault::Output("more than the gateway copies".into());
            }
            if text.contains("instance count too high") {
                return Fault::Trap("it has more core instances than it may (plugins.max_instances)".into());
            }
            // Panic hooks write what the trap itself does not tell.
            let words = store.data().written.last().filter(|line| line.level == "error");
            let text = words.map_or(text.clone(), |words| format!("{text}; it wrote: {}", words.text));
            Fault::Trap(cut(&text).into())
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::message::{Action, Api};

    fn message() -> Message {
        Message {
            tenant: "t1".into(),
            api: Api::Measurements,
            action: Action::Create,
            source: "17".into(),
            kind: Some("a".into()),
            time: "2026-11-30T00:00:00Z".into(),
            body: Bytes::from_static(b"{}"),
        }
    }

    #[test]
    fn a_plugin_sees_what_it_reads_and_the_message_has() {
        let mut message = message();
        let seen = |message: &Message, fields| {
            let Meta { tenant, api, source, type_, action, time } = meta(message, fields);
            [tenant, api, source, type_, action, time].map(|text| text.map(str::to_owned))
        };
        assert_eq!(seen(&message, MetaFields::empty()), [const { None }; 6]);
        let all = ["t1", "measurements", "17", "a", "CREATE", "2026-11-30T00:00:00Z"].map(|text| Some(text.to_owned()));
        assert_eq!(seen(&message, MetaFields::all()), all);
        let [tenant, _, _, kind, ..] = seen(&message, MetaFields::TENANT | MetaFields::TYPE);
        assert_eq!((tenant.as_deref(), kind.as_deref()), (Some("t1"), Some("a")));
        (message.kind, message.time) = (None, "".into());
        assert_eq!(seen(&message, MetaFields::TYPE | MetaFields::TIME), [const { None }; 6]);
    }

    #[test]
    fn a_filter_that_is_told_more_than_the_kind_is_asked_each_time() {
        let kind = filtering::Interest {
            meta: MetaFields::TENANT | MetaFields::API | MetaFields::TYPE | MetaFields::ACTION,
            body: BodyForm::None,
            pointers: Vec::new(),
            state: State::None,
        };
        assert!(names_kinds_alone(&kind));
        for more in [
            filtering::Interest { meta: MetaFields::SOURCE, ..kind.clone() },
            filtering::Interest { meta: kind.meta | MetaFields::TIME, ..kind.clone() },
            filtering::Interest { body: BodyForm::Text, ..kind.clone() },
            filtering::Interest { pointers: vec!["/c8y_Temperature".into()], ..kind.clone() },
            filtering::Interest { state: State::PerSource, ..kind.clone() },
        ] {
            assert!(!names_kinds_alone(&more), "{more:?}");
        }
    }

    #[test]
    fn json_goes_on_one_line_and_everything_else_as_it_is() {
        for (body, expected) in [
            (&b"{\"a\":1}"[..], &b"{\"a\":1}"[..]),
            (b"{\n \"a\":\r\n\t1.50\n}\n", b"{\"a\":1.50}"),
            ("{\"a\":\"\u{2028}ä\"}".as_bytes(), "{\"a\":\"\\u2028ä\"}".as_bytes()),
            (b"[1,\n2]", b"[1,2]"),
            (b"a,b\n1,2\n", b"a,b\n1,2\n"),
            (b"{\"a\":\n", b"{\"a\":\n"),
            (b"\xff\n\n\0", b"\xff\n\n\0"),
            (b"", b""),
        ] {
            assert_eq!(on_one_line(body.to_vec()), expected, "{body:?}");
        }
    }

    #[test]
    fn a_body_is_as_long_as_it_may_be_by_itself_and_in_its_frame() {
        let message = message();
        let sizes = Sizes { body_bytes: 20, frame_bytes: dispatch::frame_bytes(&message, &[0xff; 18]) };
        let check = |body: &[u8]| checked(body.to_vec(), &message, sizes).map_err(|fault| fault.to_string());
        assert!(check(&[b'x'; 20]).is_ok());
        let too_long = "the plugin returned a body of 21 bytes, of at most 20 (plugins.output_bytes)";
        assert_eq!(check(&[b'x'; 21]).unwrap_err(), too_long);
        // It would go as Base64.
        assert!(check(&[0xff; 18]).is_ok());
        let found = check(&[0xff; 19]).unwrap_err();
        let most = sizes.frame_bytes;
        let too_large = format!("makes a notification of {} bytes, of at most {most} (limits.frame_bytes)", most + 4);
        assert!(found.ends_with(&too_large), "{found}");
    }
}
