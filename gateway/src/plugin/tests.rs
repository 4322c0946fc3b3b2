#![allow(clippy::unwrap_used, reason = "tests")]

mod examples;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::Deserialize;
use tempfile::TempDir;

use super::*;
use crate::message::{Action, Api};

const FILTER: BuiltIn = BuiltIn::TypeFilter;
const TRANSFORM: BuiltIn = BuiltIn::FragmentsToCopy;

fn plugins_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins")
}

/// One cache for all tests and runs: compiling takes most of their time.
fn shared_cache() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("tidegate-plugin-cache")
}

/// A directory in which a faulty guest has the name of a built-in plugin.
fn instead_of(plugin: BuiltIn, faulty: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    let component = plugins_dir().join(format!("components/faulty/{faulty}.wasm"));
    fs::copy(component, dir.path().join(plugin.name()).with_extension("wasm")).unwrap();
    dir
}

fn quick() -> PluginLimits {
    PluginLimits { call_ms: 50, quarantine_faults: u32::MAX, ..PluginLimits::default() }
}

fn start(limits: &PluginLimits) -> Plugins {
    Plugins::start(limits, &Compiler::Here, &shared_cache(), None).unwrap()
}

fn start_with(limits: &PluginLimits, plugin: BuiltIn, faulty: &str) -> Plugins {
    Plugins::start(limits, &Compiler::Here, &shared_cache(), Some(instead_of(plugin, faulty).path())).unwrap()
}

fn message(kind: &str, body: &str) -> Arc<Message> {
    Arc::new(Message {
        tenant: "t1".into(),
        api: Api::Measurements,
        action: Action::Create,
        source: "17".into(),
        kind: (!kind.is_empty()).then(|| kind.into()),
        time: "2026-11-30T00:00:00Z".into(),
        body: Bytes::copy_from_slice(body.as_bytes()),
    })
}

async fn instance(plugins: &Plugins, plugin: BuiltIn, settings: &str) -> Instance {
    plugins.configure(&"t1".into(), plugins.built_in(plugin), settings, 1).await.unwrap()
}

async fn judge(plugins: &Plugins, instance: &Instance, messages: Vec<Arc<Message>>) -> Vec<Result<bool, Fault>> {
    plugins.judge(vec![(instance.clone(), messages)]).await.remove(0).answers
}

async fn shape(plugins: &Plugins, instance: &Instance, messages: Vec<Arc<Message>>) -> Vec<Result<Bytes, Fault>> {
    plugins.shape(vec![(instance.clone(), messages)]).await.remove(0).answers
}

fn messages(count: usize) -> Vec<Arc<Message>> {
    (0..count).map(|_| message("a", r#"{"id":"1"}"#)).collect()
}

#[derive(Deserialize)]
struct FilterVector {
    name: String,
    settings: String,
    error: Option<String>,
    #[serde(default)]
    messages: Vec<TypeAndVerdict>,
}

#[derive(Deserialize)]
struct TypeAndVerdict {
    r#type: String,
    passes: bool,
}

/// The built-in plugins, or those of the directory that the build script names to compare two builds.
fn start_components() -> Plugins {
    let components = std::env::var_os("TIDEGATE_COMPONENTS").map(PathBuf::from);
    Plugins::start(&PluginLimits::default(), &Compiler::Here, &shared_cache(), components.as_deref()).unwrap()
}

#[tokio::test]
async fn the_type_filter_judges_its_vectors() {
    judge_vectors(&start_components()).await;
}

async fn judge_vectors(plugins: &Plugins) {
    let vectors = fs::read(plugins_dir().join("vectors/type-filter.json")).unwrap();
    let vectors: Vec<FilterVector> = serde_json::from_slice(&vectors).unwrap();
    assert!(!vectors.is_empty());
    for FilterVector { name, settings, error, messages } in vectors {
        match (plugins.configure(&"t1".into(), plugins.built_in(FILTER), &settings, 1).await, error) {
            (Ok(instance), None) => {
                let batch = messages.iter().map(|m| message(&m.r#type, "{}")).collect();
                let expected: Vec<_> = messages.iter().map(|m| Ok(m.passes)).collect();
                assert_eq!(judge(plugins, &instance, batch).await, expected, "{name}");
            }
            (Err(PluginError::Settings(text)), Some(expected)) => {
                assert_eq!(*text, *expected, "{name}");
            }
            (outcome, _) => panic!("{name}: {outcome:?}"),
        }
    }
}

#[derive(Deserialize)]
struct TransformVector {
    name: String,
    settings: String,
    error: Option<String>,
    #[serde(default)]
    messages: Vec<ApiAndBodies>,
}

#[derive(Deserialize)]
struct ApiAndBodies {
    api: String,
    body: String,
    expected: Option<String>,
    error: Option<String>,
}

#[tokio::test]
async fn fragments_to_copy_shapes_its_vectors() {
    shape_vectors(&start_components()).await;
}

async fn shape_vectors(plugins: &Plugins) {
    let vectors = fs::read(plugins_dir().join("vectors/fragments-to-copy.json")).unwrap();
    let vectors: Vec<TransformVector> = serde_json::from_slice(&vectors).unwrap();
    assert!(!vectors.is_empty());
    for TransformVector { name, settings, error, messages } in vectors {
        match (plugins.configure(&"t1".into(), plugins.built_in(TRANSFORM), &settings, 1).await, error) {
            (Ok(instance), None) => {
                // The gateway has not met all the APIs that the plugin knows.
                let known: Vec<_> = messages.into_iter().filter_map(|m| Some((api(&m.api)?, m))).collect();
                let batch = known.iter().map(|(api, m)| with_api(*api, &m.body)).collect();
                let answers = shape(plugins, &instance, batch).await;
                assert_eq!(answers.len(), known.len());
                for (answer, (_, m)) in answers.into_iter().zip(known) {
                    assert_eq!(answer, expected(&m), "{name}: {}", m.body);
                }
            }
            (Err(PluginError::Settings(text)), Some(expected)) => {
                assert_eq!(*text, *expected, "{name}");
            }
            (outcome, _) => panic!("{name}: {outcome:?}"),
        }
    }
}

fn api(name: &str) -> Option<Api> {
    Api::ALL.into_iter().find(|api| api.as_str() == name)
}

fn with_api(api: Api, body: &str) -> Arc<Message> {
    Arc::new(Message { api, ..Message::clone(&message("", body)) })
}

fn expected(vector: &ApiAndBodies) -> Result<Bytes, Fault> {
    match (&vector.expected, &vector.error) {
        (Some(body), _) if body.contains(char::is_control) => {
            let mut line = Vec::new();
            crate::json::one_line(body, &mut line);
            Ok(line.into())
        }
        (Some(body), _) => Ok(Bytes::copy_from_slice(body.as_bytes())),
        (None, error) => Err(Fault::Refused(error.clone().unwrap().into())),
    }
}

#[tokio::test]
async fn long_batches_keep_their_order() {
    let plugins = start(&PluginLimits::default());
    let a = instance(&plugins, FILTER, "'a'").await;
    let b = instance(&plugins, FILTER, "'b'").await;
    let large = format!(r#"{{"x":"{}"}}"#, "x".repeat(100_000));
    let batch: Vec<_> = (0..600)
        .map(|i| message(if i % 7 == 0 { "a" } else { "b" }, if i % 50 == 0 { &large } else { "{}" }))
        .collect();
    let answers = plugins.judge(vec![(a, batch.clone()), (b.clone(), Vec::new()), (b, batch)]).await;
    assert_eq!(answers.iter().map(|answered| answered.answers.len()).collect::<Vec<_>>(), [600, 0, 600]);
    for (i, (a, b)) in answers[0].answers.iter().zip(&answers[2].answers).enumerate() {
        assert_eq!((a, b), (&Ok(i % 7 == 0), &Ok(i % 7 != 0)), "{i}");
    }
}

async fn verdicts(plugins: &Plugins, instance: &Instance, messages: Vec<Arc<Message>>) -> Vec<Result<bool, Fault>> {
    plugins.verdicts(vec![(instance.clone(), messages)]).await.remove(0).answers
}

fn of_types<'a>(types: impl IntoIterator<Item = &'a str>) -> Vec<Arc<Message>> {
    types.into_iter().map(|kind| message(kind, "{}")).collect()
}

#[tokio::test]
async fn what_is_known_of_a_kind_is_not_asked_again() {
    let plugins = start(&PluginLimits::default());
    let a = instance(&plugins, FILTER, "'a'").await;
    assert_eq!(verdicts(&plugins, &a, of_types(["a", "b", ""])).await, [Ok(true), Ok(false), Ok(false)]);
    let same = instance(&plugins, FILTER, "'a'").await;
    let other = instance(&plugins, FILTER, "'b'").await;
    // From here on nobody can be asked.
    plugins.stop();
    for instance in [&a, &same] {
        let known = verdicts(&plugins, instance, of_types(["", "b", "a", "a"])).await;
        assert_eq!(known, [Ok(false), Ok(false), Ok(true), Ok(true)]);
    }
    let asked = [Err(Fault::Stopped)];
    assert_eq!(verdicts(&plugins, &other, of_types(["a"])).await, asked);
    assert_eq!(verdicts(&plugins, &a, of_types(["c"])).await, asked);
    assert_eq!(verdicts(&plugins, &a, vec![with_api(Api::Events, "{}")]).await, asked);
}

#[tokio::test]
async fn the_memory_for_kinds_is_bounded() {
    let plugins = start(&PluginLimits::default());
    let a = instance(&plugins, FILTER, "'a'").await;
    let types: Vec<_> = (0..memory::TYPES).map(|n| n.to_string()).collect();
    let many = || of_types(types.iter().map(String::as_str));
    verdicts(&plugins, &a, many()).await;
    verdicts(&plugins, &a, many()).await;
    verdicts(&plugins, &a, of_types(["one more"])).await;
    plugins.stop();
    assert_eq!(verdicts(&plugins, &a, of_types(["one more"])).await, [Ok(false)]);
    assert_eq!(verdicts(&plugins, &a, of_types(["0"])).await, [Err(Fault::Stopped)], "forgotten");
}

#[tokio::test]
async fn what_is_remembered_is_what_the_plugin_says() {
    let plugins = start(&PluginLimits::default());
    for settings in ["'a'", "'a' or 'b'"] {
        let filter = instance(&plugins, FILTER, settings).await;
        for round in 0..40 {
            let types = (0..5).map(|at| ["a", "b", "c", ""][(round * 7 + at * round) % 4]);
            let batch = of_types(types);
            let said = judge(&plugins, &filter, batch.clone()).await;
            assert_eq!(verdicts(&plugins, &filter, batch).await, said, "{settings}");
        }
    }
}

#[tokio::test]
async fn wrong_settings_are_refused() {
    let plugins = start(&PluginLimits { settings_bytes: 100, ..PluginLimits::default() });
    for (settings, reason) in [
        ("'a", "typeFilter: the quote at character 1 is never closed"),
        (&*"a".repeat(101), "the settings are longer than 100 bytes"),
    ] {
        let refusals = [
            plugins.configure(&"t1".into(), plugins.built_in(FILTER), settings, 1).await.err(),
            plugins.trial(&"t1".into(), plugins.built_in(FILTER), settings, messages(1)).await.err(),
        ];
        for refused in refusals {
            assert!(matches!(&refused, Some(PluginError::Settings(text)) if **text == *reason), "{refused:?}");
        }
    }
    assert_eq!(plugins.live_instances(), 0);
}

#[tokio::test]
async fn an_endless_loop_ends() {
    let plugins = start_with(&quick(), FILTER, "loop");
    let instance = instance(&plugins, FILTER, "").await;
    let started = Instant::now();
    assert_eq!(judge(&plugins, &instance, messages(4)).await, vec![Err(Fault::Deadline); 4]);
    assert!(started.elapsed() >= Duration::from_millis(200), "each had the whole time: {:?}", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
}

#[tokio::test]
async fn memory_has_a_limit() {
    let plugins = start_with(&PluginLimits { call_ms: 2000, ..quick() }, FILTER, "memory");
    let instance = instance(&plugins, FILTER, "").await;
    assert_eq!(judge(&plugins, &instance, messages(2)).await, vec![Err(Fault::Memory); 2]);
}

#[tokio::test]
async fn a_wrong_number_of_answers_is_a_fault() {
    let plugins = start_with(&quick(), FILTER, "wrong-length");
    let instance = instance(&plugins, FILTER, "").await;
    let expected = Fault::WrongLength { messages: 1, answers: 0 };
    assert_eq!(judge(&plugins, &instance, messages(3)).await, vec![Err(expected); 3]);
}

#[tokio::test]
async fn a_guest_that_wears_out_loses_nothing() {
    let third = start_with(&quick(), FILTER, "trap-third");
    let filter = instance(&third, FILTER, "").await;
    for count in [1, 1, 1, 9, 2] {
        assert_eq!(judge(&third, &filter, messages(count)).await, vec![Ok(true); count]);
    }
    let third = start_with(&quick(), TRANSFORM, "shape-trap-third");
    let transform = instance(&third, TRANSFORM, "").await;
    assert!(shape(&third, &transform, messages(9)).await.iter().all(Result::is_ok));
}

#[tokio::test]
async fn only_the_culprits_fault() {
    let plugins = start(&PluginLimits { copy_bytes: 8 << 10, ..quick() });
    let transform = instance(&plugins, TRANSFORM, r#"["f"]"#).await;
    let large = format!(r#"{{"id":"1","f":"{}"}}"#, "x".repeat(9 << 10));
    let batch = (0..30).map(|i| message("", if i % 3 == 2 { &large } else { r#"{"id":"1","f":7,"g":8}"# })).collect();
    for (i, answer) in shape(&plugins, &transform, batch).await.into_iter().enumerate() {
        match answer {
            Ok(body) if i % 3 != 2 => {
                assert!(body.windows(5).any(|part| part == b"\"f\":7"), "{body:?}");
            }
            Err(Fault::Output(_)) if i % 3 == 2 => {}
            other => panic!("{i}: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_transform_may_make_something_else_than_json() {
    let plugins = start_with(&quick(), TRANSFORM, "garbage");
    let transform = instance(&plugins, TRANSFORM, "").await;
    let answers = shape(&plugins, &transform, messages(3)).await;
    assert_eq!(answers, vec![Ok(Bytes::from_static(b"\xff\xfe\n\n{\"not\": JSON\r\n\0")); 3]);
}

#[tokio::test]
async fn huge_bodies_are_faults() {
    let small = start_with(&PluginLimits { call_ms: 2000, ..quick() }, TRANSFORM, "huge");
    let transform = instance(&small, TRANSFORM, "").await;
    assert_eq!(shape(&small, &transform, messages(2)).await, vec![Err(Fault::Memory); 2]);
    let roomy = PluginLimits { memory_bytes: 128 << 20, call_ms: 5000, ..quick() };
    let large = start_with(&roomy, TRANSFORM, "huge");
    let transform = instance(&large, TRANSFORM, "").await;
    assert_eq!(
        shape(&large, &transform, messages(1)).await,
        [Err(Fault::Output("more than the gateway copies".into()))]
    );
}

#[tokio::test]
async fn a_body_has_a_limit() {
    let plugins = start(&PluginLimits { output_bytes: 64, ..quick() });
    let transform = instance(&plugins, TRANSFORM, r#"["f"]"#).await;
    let batch = [10, 100].map(|length| message("", &format!(r#"{{"f":"{}"}}"#, "x".repeat(length))));
    let answers = shape(&plugins, &transform, batch.to_vec()).await;
    assert!(answers[0].is_ok());
    assert_eq!(answers[1], Err(Fault::Output("a body of 108 bytes, of at most 64 (plugins.output_bytes)".into())));
}

#[tokio::test]
async fn others_go_on_beside_a_faulty_guest() {
    let plugins = start_with(&quick(), FILTER, "loop");
    let (faulty, sound) = (instance(&plugins, FILTER, "").await, instance(&plugins, TRANSFORM, r#"["f"]"#).await);
    let (judged, shaped) = tokio::join!(judge(&plugins, &faulty, messages(1)), shape(&plugins, &sound, messages(1)));
    assert_eq!(judged, [Err(Fault::Deadline)]);
    assert!(shaped[0].is_ok());
    assert!(shape(&plugins, &sound, messages(1)).await[0].is_ok());
}

#[tokio::test]
async fn who_takes_all_the_time_holds_up_nobody_twice() {
    let plugins = start_with(&PluginLimits { call_ms: 300, ..quick() }, FILTER, "loop");
    let (faulty, sound) = (instance(&plugins, FILTER, "").await, instance(&plugins, TRANSFORM, r#"["f"]"#).await);
    assert_eq!(judge(&plugins, &faulty, messages(1)).await, [Err(Fault::Deadline)]);
    assert!(shape(&plugins, &sound, messages(1)).await[0].is_ok());
    let judged = async { (judge(&plugins, &faulty, messages(1)).await, Instant::now()) };
    let shaped = async { (shape(&plugins, &sound, messages(1)).await, Instant::now()) };
    let ((judged, late), (shaped, soon)) = tokio::join!(judged, shaped);
    assert!(judged == [Err(Fault::Deadline)] && shaped[0].is_ok());
    assert!(soon < late, "asked after it, answered before it");
}

#[tokio::test]
async fn a_plugin_is_not_asked_what_it_is_not_made_for() {
    let plugins = start(&quick());
    let filter = instance(&plugins, FILTER, "'a'").await;
    assert!(matches!(shape(&plugins, &filter, messages(1)).await[..], [Err(Fault::Refused(_))]));
    assert_eq!(judge(&plugins, &filter, messages(1)).await, [Ok(true)]);
}

#[tokio::test]
async fn callers_wait_for_a_place_in_the_queue() {
    let plugins = start(&PluginLimits { queue: 1, ..PluginLimits::default() });
    let filter = instance(&plugins, FILTER, "'a'").await;
    let callers = (0..50).map(|_| judge(&plugins, &filter, messages(16)));
    for answers in futures_util::future::join_all(callers).await {
        assert_eq!(answers, vec![Ok(true); 16]);
    }
}

#[tokio::test]
async fn instances_are_shared_bounded_and_dropped_when_idle() {
    let workers = std::thread::available_parallelism().map_or(1, |cores| (cores.get() - 1).max(1));
    let plugins = start(&PluginLimits { instances: 3 * workers, ..PluginLimits::default() });
    let first = instance(&plugins, FILTER, "'a'").await;
    assert_eq!(first, instance(&plugins, FILTER, "'a'").await);
    assert_ne!(first, plugins.configure(&"t2".into(), plugins.built_in(FILTER), "'a'", 1).await.unwrap());
    assert_eq!(plugins.live_instances(), 0, "none before there are messages");
    for i in 0..40 {
        let filter = instance(&plugins, FILTER, &format!("'{i}'")).await;
        judge(&plugins, &filter, messages(1)).await;
        assert!(plugins.live_instances() <= 3 * workers);
    }
    assert_eq!(judge(&plugins, &first, messages(1)).await, [Ok(true)], "made anew");

    let hasty = start(&PluginLimits { idle_seconds: 0, ..PluginLimits::default() });
    let filter = instance(&hasty, FILTER, "'a'").await;
    judge(&hasty, &filter, messages(1)).await;
    let patience = Instant::now() + Duration::from_secs(10);
    while hasty.live_instances() > 0 {
        assert!(Instant::now() < patience, "never dropped");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_second_start_compiles_nothing() {
    let dir = TempDir::new().unwrap();
    let cache = dir.path().join("compiled");
    let again = || Plugins::start(&quick(), &Compiler::Here, &cache, None).unwrap().compiled();
    assert_eq!((again(), again()), (2, 0));

    let files: Vec<PathBuf> = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 2);
    let mut damaged = fs::read(&files[0]).unwrap();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    fs::write(&files[0], &damaged).unwrap();
    assert_eq!((again(), again()), (1, 0), "a flipped bit");
    fs::copy(&files[0], &files[1]).unwrap();
    assert_eq!((again(), again()), (1, 0), "another component's file");
    fs::write(&files[0], "").unwrap();
    assert_eq!((again(), again()), (1, 0), "an empty file");
    open_to_all(&files[0]);
    assert_eq!((again(), again()), (1, 0), "a file that others may write");
}

fn open_to_all(path: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).unwrap();
}

#[tokio::test]
async fn without_a_cache_directory_plugins_run_all_the_same() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let plugins = Plugins::start(&quick(), &Compiler::Here, &file.join("cache"), None).unwrap();
    let filter = instance(&plugins, FILTER, "'a'").await;
    assert_eq!(judge(&plugins, &filter, messages(1)).await, [Ok(true)]);
}

/// A component that only imports an interface with a function `f`, in the binary format.
fn importing(interface: &str) -> Vec<u8> {
    let mut wasm = b"\0asm\x0d\0\x01\0".to_vec();
    // Type section: an instance type that declares `func()` and exports one as `f`.
    wasm.extend(b"\x07\x0e\x01\x42\x02\x01\x40\0\x01\0\x04\0\x01f\x01\0");
    // Import section: an instance of it.
    let length = u8::try_from(interface.len()).unwrap();
    wasm.extend([0x0a, length + 5, 1, 0, length]);
    wasm.extend(interface.as_bytes());
    wasm.extend([5, 0]);
    wasm
}

fn component(name: &str) -> Vec<u8> {
    fs::read(plugins_dir().join(format!("components/{name}.wasm"))).unwrap()
}

fn id(name: &str) -> PluginId {
    PluginId { tenant: Some("t1".into()), name: name.into(), version: 1 }
}

async fn load(plugins: &Plugins, wasm: &[u8]) -> Result<Plugin, String> {
    match plugins.load(id("mine"), Source::Component(wasm)).await {
        Ok(plugin) => Ok(plugin),
        Err(PluginError::Component { plugin, reason }) if plugin == id("mine") => Err(reason),
        Err(other) => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_component_says_itself_what_it_is_for() {
    let plugins = start(&quick());
    let filter = load(&plugins, &component("type-filter")).await.unwrap();
    let transform = load(&plugins, &component("fragments-to-copy")).await.unwrap();
    assert_eq!((filter.world(), transform.world()), (World::Filter, World::Transform));
    assert_ne!(&filter, plugins.built_in(FILTER));
    let filter = plugins.configure(&"t1".into(), &filter, "'a'", 1).await.unwrap();
    assert_eq!(judge(&plugins, &filter, of_types(["a", "b"])).await, [Ok(true), Ok(false)]);
    let transform = plugins.configure(&"t1".into(), &transform, r#"["f"]"#, 1).await.unwrap();
    assert!(shape(&plugins, &transform, messages(1)).await[0].is_ok());
}

/// The component with other names of the same length in it.
fn renamed(wasm: &[u8], from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut wasm = wasm.to_vec();
    let places: Vec<_> = (0..wasm.len()).filter(|at| wasm[*at..].starts_with(from.as_bytes())).collect();
    assert!(!places.is_empty());
    for at in places {
        wasm[at..][..to.len()].copy_from_slice(to.as_bytes());
    }
    wasm
}

#[tokio::test]
async fn authors_are_told_what_to_change() {
    let plugins = start(&PluginLimits { component_bytes: 1 << 20, ..quick() });
    let filter = component("type-filter");
    let longer = vec![0; (1 << 20) + 1];
    let of_two = renamed(&filter, "tidegate:plugin/filtering@1.0.0", "tidegate:plugin/filtering@2.0.0");
    let of_none = renamed(&filter, "tidegate:plugin/filtering@1.0.0", "somebody:plugin/filtering@1.0.0");
    let cases: [(&[u8], &str); 8] = [
        (b"not wasm", "it is no WebAssembly component"),
        (b"", "it is no WebAssembly component"),
        (b"\0asm\x01\0\0\0", "it is a core module; 'wasm-tools component new' makes a component of it"),
        (&filter[..filter.len() / 2], "it can't be compiled: failed to parse"),
        (&longer, "it is longer than 1048576 bytes (plugins.max_bytes)"),
        (
            &importing("wasi:cli/environment@0.2.0"),
            "exports neither tidegate:plugin/filtering nor tidegate:plugin/transforming",
        ),
        (&of_two, "it exports tidegate:plugin/filtering@2.0.0, and this gateway has version 1.0.0"),
        (&of_none, "exports neither tidegate:plugin/filtering"),
    ];
    for (wasm, expected) in cases {
        let reason = load(&plugins, wasm).await.unwrap_err();
        assert!(reason.contains(expected), "{reason}");
    }
}

#[tokio::test]
async fn an_import_that_is_not_offered_is_named() {
    let plugins = start(&quick());
    let filter = component("type-filter");
    for (import, expected) in [
        ("wasi:filesystem/types@0.2.0", "build it for wasm32-unknown-unknown, or with --stub-wasi"),
        ("tidegate:plugin/types@2.0.0", "it imports tidegate:plugin/types@2.0.0, and this gateway has version 1.0.0"),
        ("tidegate:plugin/tides@1.0.0", "a filter may import tidegate:plugin/{types, body-access, log} alone"),
    ] {
        let reason = load(&plugins, &renamed(&filter, "tidegate:plugin/types@1.0.0", import)).await.unwrap_err();
        assert!(reason.contains(import) && reason.contains(expected), "{reason}");
    }
}

#[test]
fn replacements_are_checked() {
    let reason = |wasm: &[u8]| {
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join("type-filter.wasm"), wasm).unwrap();
        let limits = PluginLimits { component_bytes: 1 << 20, ..quick() };
        match Plugins::start(&limits, &Compiler::Here, &shared_cache(), Some(dir.path())) {
            Err(PluginError::Component { plugin, reason }) if plugin == PluginId::built_in("type-filter") => reason,
            other => panic!("{:?}", other.err()),
        }
    };
    assert!(!reason(b"not wasm").is_empty());
    assert_eq!(reason(&vec![0; (1 << 20) + 1]), "its replacement is longer than 1048576 bytes");
    let other_world = reason(&component("fragments-to-copy"));
    assert_eq!(other_world, "its replacement is for the world 'transform', not 'filter'");
}

#[tokio::test]
async fn built_in_plugins_are_found_by_name() {
    let plugins = start(&quick());
    for plugin in BuiltIn::ALL {
        assert_eq!(&plugins.built_in_named(plugin.name()).await.unwrap().unwrap(), plugins.built_in(plugin));
    }
    assert!(plugins.built_in_named("nobody").await.is_none());
}

#[tokio::test]
async fn trials_tell_what_becomes_of_each_message() {
    let plugins = start(&quick());
    let tenant = Tenant::from("t1");
    let try_out = |plugin, settings, messages| plugins.trial(&tenant, plugins.built_in(plugin), settings, messages);
    let trials = try_out(FILTER, "'a'", of_types(["a", "b"])).await.unwrap();
    let outcomes: Vec<_> = trials.iter().map(|trial| trial.outcome.clone()).collect();
    assert_eq!(outcomes, [Ok(Verdict::Pass), Ok(Verdict::Drop)]);
    assert!(trials.iter().all(|trial| trial.memory_bytes >= 1 << 16 && trial.processor_time > Duration::ZERO));
    let trials = try_out(TRANSFORM, r#"["f"]"#, vec![message("", r#"{"id":"1","f":7,"g":8}"#)]).await.unwrap();
    assert!(matches!(&trials[0].outcome, Ok(Verdict::Body(body)) if body.starts_with(b"{")), "{trials:?}");
    assert_eq!(plugins.live_instances(), 0);

    let third = start_with(&quick(), FILTER, "trap-third");
    let trials = third.trial(&"t1".into(), third.built_in(FILTER), "", messages(7)).await.unwrap();
    let faulted: Vec<_> = trials.iter().map(|trial| trial.outcome.is_err()).collect();
    assert_eq!(faulted, [false, false, true, false, false, true, false], "a new instance after each fault");
}

#[tokio::test]
async fn an_unavailable_plugin_says_why() {
    let plugins = start(&quick());
    let gone = Plugin::unavailable(id("mine"), World::Filter, "it is too old");
    let filter = plugins.configure(&"t1".into(), &gone, "{}", 1).await.unwrap();
    let fault = Fault::Unavailable("it is too old".into());
    assert_eq!(verdicts(&plugins, &filter, messages(2)).await, vec![Err(fault.clone()); 2]);
    assert_eq!(judge(&plugins, &filter, messages(2)).await, vec![Err(fault.clone()); 2]);
    let sound = load(&plugins, &component("type-filter")).await.unwrap();
    assert_ne!(filter, plugins.configure(&"t1".into(), &sound, "{}", 1).await.unwrap());
}

fn from_source(source: &str, kind: &str) -> Arc<Message> {
    Arc::new(Message { source: source.into(), ..Message::clone(&message(kind, "{}")) })
}

async fn keeper(plugins: &Plugins, subscription: u64) -> Instance {
    plugins.configure(&"t1".into(), plugins.built_in(FILTER), "", subscription).await.unwrap()
}

#[tokio::test]
async fn what_keeps_state_belongs_to_one_subscription() {
    let plugins = start_with(&quick(), FILTER, "keeper");
    let [one, two] = [keeper(&plugins, 1).await, keeper(&plugins, 2).await];
    assert_ne!(one, two);
    let batch = || ["x", "y", "x"].map(|source| from_source(source, "")).to_vec();
    for instance in [&one, &two] {
        assert_eq!(verdicts(&plugins, instance, batch()).await, [Ok(true), Ok(true), Ok(false)]);
        assert_eq!(verdicts(&plugins, instance, batch()).await, vec![Ok(false); 3], "not remembered, but known");
    }
    assert_eq!(plugins.live_instances(), 2);
    // A trial has an instance of its own.
    let trials = plugins.trial(&"t1".into(), plugins.built_in(FILTER), "", batch()).await.unwrap();
    let outcomes: Vec<_> = trials.into_iter().map(|trial| trial.outcome).collect();
    assert_eq!(outcomes, [Ok(Verdict::Pass), Ok(Verdict::Pass), Ok(Verdict::Drop)]);
}

#[tokio::test]
async fn after_a_trap_what_keeps_state_begins_anew_and_goes_on_in_order() {
    let plugins = start_with(&quick(), FILTER, "keeper");
    let filter = keeper(&plugins, 1).await;
    assert_eq!(judge(&plugins, &filter, vec![from_source("x", "")]).await, [Ok(true)]);
    let batch =
        [("x", ""), ("x", ""), ("y", "trap"), ("x", ""), ("x", "")].map(|(source, kind)| from_source(source, kind));
    let answers = judge(&plugins, &filter, batch.to_vec()).await;
    assert!(matches!(answers[2], Err(Fault::Trap(_))));
    let passes: Vec<_> = answers.iter().map(|answer| answer.as_ref().ok().copied()).collect();
    assert_eq!(
        passes,
        [Some(true), Some(false), None, Some(true), Some(false)],
        "anew at the start and after the culprit"
    );
    assert_eq!(judge(&plugins, &filter, vec![from_source("x", "")]).await, [Ok(false)]);
}

#[tokio::test]
async fn what_keeps_state_goes_last() {
    let workers = std::thread::available_parallelism().map_or(1, |cores| (cores.get() - 1).max(1));
    let limits = PluginLimits { instances: 2 * workers, idle_seconds: 0, ..quick() };
    let dir = instead_of(FILTER, "keeper");
    let plugins = Plugins::start(&limits, &Compiler::Here, &shared_cache(), Some(dir.path())).unwrap();
    let filter = keeper(&plugins, 1).await;
    assert_eq!(judge(&plugins, &filter, vec![from_source("x", "")]).await, [Ok(true)]);
    for number in 0..10 {
        let other = instance(&plugins, TRANSFORM, &format!(r#"["f{number}"]"#)).await;
        assert!(shape(&plugins, &other, messages(1)).await[0].is_ok());
        assert_eq!(
            judge(&plugins, &filter, vec![from_source("x", "")]).await,
            [Ok(false)],
            "neither pushed out nor idle"
        );
    }
    drop(filter);
    let patience = Instant::now() + Duration::from_secs(10);
    while plugins.live_instances() > 0 {
        assert!(Instant::now() < patience, "its subscription is gone");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_tenant_with_many_instances_takes_none_from_one_with_few() {
    let workers = std::thread::available_parallelism().map_or(1, |cores| (cores.get() - 1).max(1));
    let plugins = start_with(&PluginLimits { instances: 4 * workers, ..quick() }, FILTER, "keeper");
    let modest = keeper(&plugins, 1).await;
    assert_eq!(judge(&plugins, &modest, vec![from_source("x", "")]).await, [Ok(true)]);
    let greedy = Tenant::from("t2");
    let mut all = Vec::new();
    for subscription in 2..12 * workers as u64 {
        let filter = plugins.configure(&greedy, plugins.built_in(FILTER), "", subscription).await.unwrap();
        assert_eq!(judge(&plugins, &filter, vec![from_source("x", "")]).await, [Ok(true)]);
        all.push(filter);
        assert!(plugins.live_instances() <= 4 * workers);
    }
    assert_eq!(judge(&plugins, &modest, vec![from_source("x", "")]).await, [Ok(false)], "it was not pushed out");
    let kept = judge(&plugins, all.last().unwrap(), vec![from_source("x", "")]).await;
    assert_eq!(kept, [Ok(false)], "nor was what the other has used last");
    assert_eq!(judge(&plugins, &all[0], vec![from_source("x", "")]).await, [Ok(true)], "that one was");
}

#[tokio::test]
async fn who_never_ends_when_configured_holds_nobody_up() {
    let plugins = start_with(&PluginLimits { call_ms: 300, ..quick() }, FILTER, "keeper");
    let sound = instance(&plugins, TRANSFORM, r#"["f"]"#).await;
    let tenant = Tenant::from("t1");
    let configure = |settings| plugins.configure(&tenant, plugins.built_in(FILTER), settings, 1);
    let others = async {
        let started = Instant::now();
        for _ in 0..10 {
            assert!(shape(&plugins, &sound, messages(1)).await[0].is_ok());
        }
        started.elapsed()
    };
    let (looping, took) = tokio::join!(configure(r#""loop""#), others);
    assert!(matches!(looping, Err(PluginError::Fault { fault: Fault::Deadline, .. })));
    assert!(took < Duration::from_millis(300), "{took:?}");
    assert!(matches!(configure(r#""deep""#).await, Err(PluginError::Fault { fault: Fault::Trap(_), .. })));

    let start = load(&plugins, &component("faulty/loop-start")).await.unwrap();
    let looping = plugins.configure(&tenant, &start, "", 1).await;
    assert!(matches!(looping, Err(PluginError::Fault { fault: Fault::Deadline, .. })), "{looping:?}");
    assert!(plugins.quarantine().list(None).is_empty());
}

fn kinds(plugins: &Plugins, plugin: BuiltIn, kind: &str) -> u64 {
    let usage = plugins.usage(&"t1".into(), plugins.built_in(plugin).id());
    usage.faults[Fault::KINDS.iter().position(|known| *known == kind).unwrap()]
}

#[tokio::test]
async fn who_fails_too_often_is_asked_no_more() {
    let limits = PluginLimits { quarantine_faults: 6, ..quick() };
    let plugins = start_with(&limits, FILTER, "wrong-length");
    let tenants = ["t1", "t2"].map(Tenant::from);
    let [filter, other] = [0, 1].map(|at| (plugins.built_in(FILTER).clone(), tenants[at].clone()));
    let filter = plugins.configure(&filter.1, &filter.0, "", 1).await.unwrap();
    let other = plugins.configure(&other.1, &other.0, "", 1).await.unwrap();
    let id = plugins.built_in(FILTER).id();
    // The batch and each message by itself.
    let fault = Fault::WrongLength { messages: 1, answers: 0 };
    assert_eq!(judge(&plugins, &filter, messages(4)).await, vec![Err(fault.clone()); 4]);
    assert_eq!(plugins.quarantine().is(&tenants[0], id), None);
    let last = Fault::WrongLength { messages: 3, answers: 2 }.to_string();
    let quarantined = Fault::Quarantined(last.as_str().into());
    let answers = judge(&plugins, &filter, messages(3)).await;
    assert_eq!(answers, vec![Err(quarantined.clone()); 3], "the batch's failure was one too many");
    let calls = plugins.usage(&tenants[0], id).calls;
    assert_eq!(verdicts(&plugins, &filter, messages(2)).await, vec![Err(quarantined); 2]);
    assert_eq!(plugins.usage(&tenants[0], id).calls, calls);
    assert_eq!(kinds(&plugins, FILTER, "quarantined"), 5);
    assert_eq!(judge(&plugins, &other, messages(1)).await, [Err(fault.clone())], "another tenant's");

    let why = plugins.quarantine().is(&tenants[0], id).unwrap();
    assert_eq!(*why.reason, *last);
    assert_eq!(plugins.quarantine().list(None), [(tenants[0].clone(), id.clone(), why.clone())]);
    assert!(plugins.quarantine().list(Some(&tenants[1])).is_empty());
    assert!(plugins.quarantine().lift(&tenants[0], id) && !plugins.quarantine().lift(&tenants[0], id));
    assert_eq!(judge(&plugins, &filter, messages(1)).await, [Err(fault)]);

    let mut changes = plugins.quarantine().follow().unwrap();
    assert_eq!(changes.recv().await, Some((tenants[0].clone(), id.clone(), Some(why.clone()))));
    assert_eq!(changes.recv().await, Some((tenants[0].clone(), id.clone(), None)));
    let restarted = start_with(&limits, FILTER, "wrong-length");
    restarted.quarantine().restore(tenants[0].clone(), id.clone(), why);
    let filter = restarted.configure(&tenants[0], restarted.built_in(FILTER), "", 1).await.unwrap();
    assert!(matches!(judge(&restarted, &filter, messages(1)).await[..], [Err(Fault::Quarantined(_))]));
}

#[tokio::test]
async fn words_on_each_message_are_a_reason_for_quarantine() {
    let limits = PluginLimits { quarantine_faults: 3, output_bytes: 4, ..quick() };
    let plugins = start(&limits);
    let transform = instance(&plugins, TRANSFORM, r#"["f"]"#).await;
    assert!(matches!(shape(&plugins, &transform, messages(2)).await[..], [Err(Fault::Output(_)), Err(_)]));
    assert!(plugins.quarantine().list(None).is_empty());
    shape(&plugins, &transform, messages(1)).await;
    assert_eq!(plugins.quarantine().list(None).len(), 1);
    assert_eq!(kinds(&plugins, TRANSFORM, "output"), 3);
    let answers = shape(&plugins, &transform, messages(1)).await;
    assert!(matches!(&answers[..], [Err(Fault::Quarantined(reason))] if reason.contains("a body of ")), "{answers:?}");
}

#[tokio::test]
async fn words_on_some_messages_are_none() {
    let plugins = start(&PluginLimits { quarantine_faults: 3, ..quick() });
    let text = "({ type }) => { if (type === 'bad') throw new Error('that is bad'); return true }";
    let filter = configure(&plugins, &script(&plugins, World::Filter, text).await.unwrap(), "{}").await;
    for _ in 0..3 {
        let answers = judge(&plugins, &filter, of_types(["bad", "bad", "good", "bad", "bad", "good"])).await;
        assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 2, "{answers:?}");
    }
    assert!(plugins.quarantine().list(None).is_empty());
    judge(&plugins, &filter, of_types(["bad"; 3])).await;
    assert_eq!(plugins.quarantine().list(None).len(), 1);
}

#[tokio::test]
async fn what_is_used_is_counted_by_tenant_and_version() {
    let plugins = start(&PluginLimits { idle_seconds: 0, ..quick() });
    let uploaded = load(&plugins, &component("type-filter")).await.unwrap();
    let first = plugins.configure(&"t1".into(), &uploaded, "'a'", 1).await.unwrap();
    let second = instance(&plugins, FILTER, "'a'").await;
    verdicts(&plugins, &first, of_types(["a", "b", "b"])).await;
    verdicts(&plugins, &second, of_types(["a"])).await;
    verdicts(&plugins, &second, of_types(["a"])).await;
    let usage = plugins.usage(&"t1".into(), uploaded.id());
    assert_eq!((usage.calls, usage.messages, usage.dropped), (1, 3, 2));
    assert!(usage.processor_time > Duration::ZERO && usage.memory_bytes >= 1 << 16);
    let usage = plugins.usage(&"t1".into(), plugins.built_in(FILTER).id());
    assert_eq!((usage.calls, usage.messages, usage.dropped), (1, 2, 0), "one was remembered");
    assert_eq!(plugins.usage(&"t2".into(), uploaded.id()), Usage::default());
    assert!(plugins.usages().iter().any(|(id, _)| id == uploaded.id()));
    let id = uploaded.id().clone();
    drop((first, uploaded));
    let patience = Instant::now() + Duration::from_secs(10);
    while plugins.usages().iter().any(|(known, _)| *known == id) {
        assert!(Instant::now() < patience, "its figures stay");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn who_asks_for_what_is_no_pointer_is_refused() {
    let plugins = start(&quick());
    let plugin = load(&plugins, &component("faulty/pointers")).await.unwrap();
    for (pointer, reason) in [("a/b", "a slash"), ("/a~b", "`~0`"), ("/a/b~1c", "")] {
        match plugins.configure(&"t1".into(), &plugin, &format!("\"{pointer}\""), 1).await {
            Err(PluginError::Settings(text)) => {
                assert!(
                    text.starts_with(&format!("`{pointer}` is no JSON pointer: ")) && text.contains(reason),
                    "{text}"
                );
            }
            outcome => assert!(outcome.is_ok() && reason.is_empty(), "{pointer}: {outcome:?}"),
        }
    }
}

#[tokio::test]
async fn what_is_forgotten_or_nobodys_is_deleted() {
    let dir = TempDir::new().unwrap();
    let plugins = Plugins::start(&quick(), &Compiler::Here, dir.path(), None).unwrap();
    let count = || fs::read_dir(dir.path()).unwrap().count();
    let [one, two] = ["garbage", "trap-third"].map(|name| component(&format!("faulty/{name}")));
    load(&plugins, &one).await.unwrap();
    let kept = load(&plugins, &two).await.unwrap();
    fs::write(dir.path().join("left.tmp"), "").unwrap();
    assert_eq!(count(), 5);
    plugins.tidy(HashSet::from([digest(&one), digest(&two)])).await;
    assert_eq!(count(), 4);
    plugins.tidy(HashSet::from([digest(&two)])).await;
    assert_eq!(count(), 3);
    plugins.forget(&digest(&two)).await;
    assert_eq!(count(), 2);
    // Who has it goes on.
    let filter = plugins.configure(&"t1".into(), &kept, "", 1).await.unwrap();
    assert_eq!(judge(&plugins, &filter, messages(1)).await, [Ok(true)]);
    let of_none = renamed(&one, "tidegate:plugin/transforming@1.0.0", "somebody:plugin/transforming@1.0.0");
    load(&plugins, &of_none).await.unwrap_err();
    assert_eq!(count(), 2, "what is refused leaves nothing behind");
}

#[tokio::test]
async fn a_stopped_pool_answers_at_once() {
    let plugins = start_with(&quick(), FILTER, "loop");
    let filter = instance(&plugins, FILTER, "").await;
    let (running, waiting, ()) =
        tokio::join!(judge(&plugins, &filter, messages(1)), judge(&plugins, &filter, messages(2)), async {
            tokio::task::yield_now().await;
            let plugins = plugins.clone();
            tokio::task::spawn_blocking(move || plugins.stop()).await.unwrap();
        });
    assert!(matches!(running[..], [Err(Fault::Deadline | Fault::Stopped)]), "{running:?}");
    assert_eq!(waiting, vec![Err(Fault::Stopped); 2]);
    assert_eq!(judge(&plugins, &filter, messages(1)).await, [Err(Fault::Stopped)]);
    let refused = plugins.configure(&"t1".into(), plugins.built_in(FILTER), "", 1).await;
    assert!(matches!(refused, Err(PluginError::Fault { fault: Fault::Stopped, .. })));
    assert_eq!(plugins.live_instances(), 0);
}

/// Kilobytes from `/proc/self/status`.
fn address_space_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmSize")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// 1800 instances that are lost in 300 rounds would hold 7 TiB of addresses. Other tests run beside, with some hundred instances.
#[tokio::test]
async fn endless_faults_leave_nothing_behind() {
    let plugins = start_with(&quick(), FILTER, "wrong-length");
    let filter = instance(&plugins, FILTER, "").await;
    let sound = instance(&plugins, TRANSFORM, r#"["f"]"#).await;
    let before = address_space_kib();
    for _ in 0..300 {
        let answers = judge(&plugins, &filter, messages(5)).await;
        assert!(answers.iter().all(Result::is_err));
        assert!(plugins.live_instances() <= 1);
        assert!(shape(&plugins, &sound, messages(1)).await[0].is_ok());
    }
    let grown = address_space_kib().saturating_sub(before);
    assert!(grown < 3 << 30, "address space grew by {grown} KiB");
}

#[test]
fn a_guest_sees_the_running_batch_only() {
    use super::bindings::filter::tidegate::plugin::{body_access::Host as _, log, log::Host as _, types::ValueResult};
    use super::host::{Batch, Host};

    let plugin = start(&quick()).built_in(FILTER).clone();
    let key = Key::new(&RandomState::new(), &"t1".into(), &plugin, "", None);
    let mut host = Host::new(&plugin.0.lines, &Instance(Arc::new(key)), &quick());
    assert!(host.get(0, "/n".into()).is_err(), "nothing runs");
    let bodies = (0..3).map(|n| message("", &format!(r#"{{"n":{n},"s":"é","o":{{"x":[1]}},"b":true,"z":null}}"#)));
    host.batch = Some(Batch::new(&Arc::new(bodies.collect()), 1..3));
    let mut get = |index, pointer: &str| host.get(index, pointer.into());
    assert!(matches!(get(0, "/n"), Ok(ValueResult::Number(n)) if n == 1.0));
    assert!(matches!(get(1, "/n"), Ok(ValueResult::Number(n)) if n == 2.0));
    assert!(get(2, "/n").is_err());
    assert!(matches!(get(0, "/s"), Ok(ValueResult::Text(text)) if text == "é"));
    assert!(matches!(get(0, "/o"), Ok(ValueResult::Json(text)) if text == r#"{"x":[1]}"#));
    assert!(matches!(get(0, "/b"), Ok(ValueResult::Boolean(true))));
    assert!(matches!(get(0, "/z"), Ok(ValueResult::Null)));
    assert!(matches!(get(0, "/q"), Ok(ValueResult::Missing)));
    for _ in 0..20 {
        host.write(log::Level::Info, "é".repeat(1000)).unwrap();
    }
    assert!(plugin.0.lines.pass(Instant::now()).is_none(), "the guest has used its lines up");
}

fn interpreted() -> PluginLimits {
    PluginLimits { engine: PluginEngine::Pulley, ..PluginLimits::default() }
}

#[tokio::test]
async fn the_interpreter_answers_the_same() {
    let plugins = start(&interpreted());
    judge_vectors(&plugins).await;
    shape_vectors(&plugins).await;
    let looping = start_with(&PluginLimits { call_ms: 50, ..interpreted() }, FILTER, "loop");
    let filter = instance(&looping, FILTER, "").await;
    assert_eq!(judge(&looping, &filter, messages(2)).await, vec![Err(Fault::Deadline); 2]);
    let script = script(&plugins, World::Filter, "(message) => message.body.n > 1").await.unwrap();
    let filter = configure(&plugins, &script, "null").await;
    let batch = (0..20).map(|n| message("", &format!(r#"{{"n":{n}}}"#))).collect();
    let expected: Vec<_> = (0..20).map(|n| Ok(n > 1)).collect();
    assert_eq!(judge(&plugins, &filter, batch).await, expected, "over several calls");
}

#[test]
fn machine_code_and_that_of_the_interpreter_are_kept_apart() {
    let dir = TempDir::new().unwrap();
    let compiled = |engine| {
        let limits = PluginLimits { engine, ..quick() };
        Plugins::start(&limits, &Compiler::Here, dir.path(), None).unwrap().compiled()
    };
    let [pulley, cranelift] = [PluginEngine::Pulley, PluginEngine::Cranelift];
    assert_eq!([pulley, cranelift, pulley, cranelift, PluginEngine::Auto].map(compiled), [2, 2, 0, 0, 0]);
}

async fn script(plugins: &Plugins, world: World, text: &str) -> Result<Plugin, String> {
    // Each is a plugin of its own.
    static VERSION: AtomicU32 = AtomicU32::new(1);
    let id = PluginId { version: VERSION.fetch_add(1, Relaxed), ..id("script") };
    match plugins.load(id.clone(), Source::Script { world, text }).await {
        Ok(plugin) => Ok(plugin),
        Err(PluginError::Component { plugin, reason }) if plugin == id => Err(reason),
        Err(other) => panic!("{other:?}"),
    }
}

async fn configure(plugins: &Plugins, plugin: &Plugin, settings: &str) -> Instance {
    plugins.configure(&"t1".into(), plugin, settings, 1).await.unwrap()
}

/// What a filter script says to one message with this body, of type `t`.
async fn verdict(plugins: &Plugins, text: &str, settings: &str, body: &str) -> Result<bool, Fault> {
    let script = script(plugins, World::Filter, text).await.unwrap();
    let filter = configure(plugins, &script, settings).await;
    judge(plugins, &filter, vec![message("t", body)]).await.remove(0)
}

#[tokio::test]
async fn scripts_are_written_as_people_write_functions() {
    let plugins = start(&PluginLimits::default());
    for text in [
        "(message, settings) => message.body.n > settings.limit",
        "(message, settings) => message.body.n > settings.limit;\n",
        "function (message, settings) {\n  return message.body.n > settings.limit;\n}",
        "// too warm?\nfunction tooWarm({ body }, { limit }) { return body.n > limit } // done",
        "export default (message, settings) => message.body.n > settings.limit;",
        "const over = (n, limit) => n > limit;\nexport default function (m, s) { return over(m.body.n, s.limit) }\n",
    ] {
        for (n, passes) in [(5, true), (3, false)] {
            let said = verdict(&plugins, text, r#"{"limit":4}"#, &format!(r#"{{"n":{n}}}"#)).await;
            assert_eq!(said, Ok(passes), "{text}");
        }
    }
    let sees = "({ api, source, type, action, time }) =>
        [api, source, type, action, time].join() === 'measurements,17,t,CREATE,2026-11-30T00:00:00Z'";
    assert_eq!(verdict(&plugins, sees, "null", "{}").await, Ok(true));
    for (truthy, passes) in [("1", true), ("'a'", true), ("{}", true), ("0", false), ("null", false), ("''", false)] {
        assert_eq!(verdict(&plugins, &format!("() => ({truthy})"), "null", "{}").await, Ok(passes), "{truthy}");
    }
    for (text, said) in [
        ("(m) => { m.type }", "the function returned nothing; a filter returns whether the message passes"),
        ("(m) => Promise.resolve(true)", "the function returned a promise: it must not be async"),
    ] {
        let refused = Fault::Refused(format!("TypeError: {said}").into());
        assert_eq!(verdict(&plugins, text, "null", "{}").await, Err(refused), "{text}");
    }
    let unread = "(m) => m.type === 't'";
    assert_eq!(verdict(&plugins, unread, "null", "no JSON").await, Ok(true), "a body that is not read is not parsed");
}

#[tokio::test]
async fn what_is_wrong_with_a_script_is_said_with_its_place() {
    let plugins = start(&PluginLimits::default());
    for (text, said) in [
        ("(m) => m.a ==== 3", "SyntaxError: unexpected token in expression: '=' (line 1, column 15)"),
        ("(m) =>\n  m.a ==== 3", "SyntaxError: unexpected token in expression: '=' (line 2, column 10)"),
        (
            "\nexport default (m) =>\n  m.a ==== 3",
            "SyntaxError: unexpected token in expression: '=' (line 3, column 10)",
        ),
        ("(m) => {\n  if (m.a) {", "SyntaxError: the script ends too early (line 2, column 13); write"),
        ("export default (m) => {\n  return true;\n\n", "SyntaxError: the script ends too early (line 2, column 15)"),
        (
            "message.body.x > 1",
            "the script is no function: ReferenceError: message is not defined (line 1, column 1); write",
        ),
        ("module.exports = (m) => true", "write `export default` in place of `module.exports =`"),
        ("exports.main = (m) => true", "write `export default`"),
        ("export default () => true\nexport async function configure() {}", "`configure` must be an ordinary function"),
        (
            "const limit = 3;\n(m) => m.body.n > limit",
            "SyntaxError: unexpected token in expression: 'const' (line 1, column 1); write",
        ),
        ("", "the script is empty"),
        ("3", "the script is no function"),
        ("async (m) => true", "the function must be an ordinary one"),
        ("export const a = 1", "SyntaxError"),
        ("const b = null.c;\nexport default () => b", "TypeError: cannot read property 'c' of null (line 1, column 1)"),
        (&format!("() => '{}'", "x".repeat(SCRIPT_BYTES)), "the script is longer than 262144 bytes"),
    ] {
        let reason = script(&plugins, World::Filter, text).await.unwrap_err();
        assert!(reason.starts_with(said), "{text:.60}: {reason}");
    }
}

#[tokio::test]
async fn nothing_can_be_imported() {
    let plugins = start(&PluginLimits::default());
    for text in [
        "import x from 'y';\nexport default () => x",
        "import { x } from \"y\";\n(m) => x",
        "const x = require('y');\nexport default () => x",
    ] {
        let reason = script(&plugins, World::Filter, text).await.unwrap_err();
        assert!(
            reason.ends_with("; nothing can be imported") && reason.contains("(line 1, column "),
            "{text}: {reason}"
        );
    }
}

#[tokio::test]
async fn a_script_may_refuse_settings() {
    let plugins = start(&PluginLimits::default());
    for configure in [
        "export function configure(settings) { if (!settings.limit) throw new Error('limit: is missing') }",
        "export const configure = ({ limit }) => { if (!limit) throw 'limit: is missing' };",
    ] {
        let text = format!("{configure}\nexport default (m, {{ limit }}) => m.body.n > limit;\n");
        let script = script(&plugins, World::Filter, &text).await.unwrap();
        match plugins.configure(&"t1".into(), &script, r#"{"limits":4}"#, 1).await {
            Err(PluginError::Settings(text)) => assert_eq!(&*text, "limit: is missing"),
            outcome => panic!("{outcome:?}"),
        }
        assert_eq!(verdict(&plugins, &text, r#"{"limit":4}"#, r#"{"n":5}"#).await, Ok(true), "{text}");
    }
    let broken = "export default () => true;\nexport function configure(settings) {\n  settings.a.b;\n}";
    let script = script(&plugins, World::Filter, broken).await.unwrap();
    match plugins.configure(&"t1".into(), &script, "{}", 1).await {
        Err(PluginError::Settings(text)) => {
            assert!(text.starts_with("TypeError: ") && text.contains("(line 3, "), "{text}");
        }
        outcome => panic!("{outcome:?}"),
    }
}

#[tokio::test]
async fn an_exception_is_a_fault_of_its_message_alone() {
    let plugins = start(&PluginLimits::default());
    let text = "let calls = 0;\nexport default (m) => {\n  calls += 1;\n  return m.body.a.b === calls;\n}";
    let script = script(&plugins, World::Filter, text).await.unwrap();
    let filter = configure(&plugins, &script, "null").await;
    let batch = [r#"{"a":{"b":1}}"#, "{}", r#"{"a":{"b":3}}"#, "no JSON"].map(|body| message("", body)).to_vec();
    let answers = judge(&plugins, &filter, batch).await;
    let fault = |text: &str| Err(Fault::Refused(text.into()));
    // The count shows that the instance has lived on.
    assert_eq!(answers[..2], [Ok(true), fault("TypeError: cannot read property 'b' of undefined (line 4, column 10)")]);
    assert_eq!(answers[2], Ok(true));
    assert!(matches!(&answers[3], Err(Fault::Refused(text)) if text.starts_with("SyntaxError")), "{answers:?}");
}

// The instance and what it keeps live on.
#[tokio::test]
async fn whatever_a_script_throws_or_returns_is_a_fault_of_one_message() {
    let plugins = start(&PluginLimits::default());
    for (world, text) in [
        (World::Filter, "throw { toString() { throw 1 }, toJSON() { throw 1 } }"),
        (World::Filter, "throw Object.assign(Object.create(null), { get a() { throw 1 } })"),
        (World::Filter, "const e = new Error('e'); e.name = Symbol('s'); throw e"),
        (World::Filter, "const e = new Error('e'); Object.defineProperty(e, 'stack', { get() { throw 1 } }); throw e"),
        (World::Filter, "throw Symbol('s')"),
        (World::Filter, "settings.limit = 1; return true"),
        (World::Transform, "const array = new Uint8Array(4); array.buffer.transfer(); return array"),
        (World::Transform, "return { toJSON() { throw 1 } }"),
    ] {
        let text = format!(
            "let calls = 0;\nexport default ({{ body }}, settings) => {{ calls++; if (body.bad) {{ {text} }} return calls > 1 ? body : null }}"
        );
        let script = script(&plugins, world, &text).await.unwrap();
        let used = configure(&plugins, &script, r#"{"limit":0}"#).await;
        let messages = [r#"{"bad":1}"#, "{}"].map(|body| message("t", body)).to_vec();
        let answers: Vec<Result<(), Fault>> = match world {
            World::Filter => judge(&plugins, &used, messages)
                .await
                .into_iter()
                .map(|answer| answer.map(|passes| assert!(passes)))
                .collect(),
            World::Transform => {
                shape(&plugins, &used, messages).await.into_iter().map(|answer| answer.map(drop)).collect()
            }
        };
        assert!(matches!(answers[..], [Err(Fault::Refused(_)), Ok(())]), "{text}: {answers:?}");
    }
}

#[tokio::test]
async fn what_would_never_work_is_refused_and_now_is_the_time_of_the_message() {
    let plugins = start(&PluginLimits::default());
    for (text, reason) in [
        ("class Filter {}", "nor a class"),
        ("(message, settings = {}, state) => true", "a third parameter"),
        ("(message, settings, state = {}) => true", "a third parameter"),
    ] {
        let refused = script(&plugins, World::Filter, text).await.unwrap_err();
        assert!(refused.contains(reason), "{text}: {refused}");
    }
    let marked = script(&plugins, World::Filter, "\u{feff}export default () => true").await;
    assert!(marked.is_ok(), "{marked:?}");
    let text = "() => Date.now() === Date.UTC(2026, 10, 30, 8) && new Date().getUTCHours() === 8";
    let script = script(&plugins, World::Filter, text).await.unwrap();
    let filter = configure(&plugins, &script, "null").await;
    let of_time = |time: &str| Arc::new(Message { time: time.into(), ..(*message("t", "{}")).clone() });
    let times = ["20261130T080000Z", "2026-11-30T08Z", "2026-11-30t08:00:00z", "2026-11-30T09:00:00+0100"];
    let answers = judge(&plugins, &filter, times.map(of_time).to_vec()).await;
    assert_eq!(answers, [Ok(true), Ok(true), Ok(true), Ok(true)]);
}

#[tokio::test]
async fn what_a_sandbox_lacks_harms_no_script() {
    let plugins = start(&PluginLimits::default());
    for text in [
        "() => { console.log('a', {}, null, undefined, 1n, new Error('e')); console.error(); return true }",
        "() => Date.now() === Date.parse('2026-11-30T00:00:00Z') && new Date().getFullYear() === 2026",
        "() => new Date(0).getTime() === 0 && new Date() instanceof Date && typeof Date() === 'string'",
        "() => Math.random() < 1",
        "() => console.log('\\ud800') === undefined",
    ] {
        assert_eq!(verdict(&plugins, text, "null", "{}").await, Ok(true), "{text}");
    }
    let half = verdict(&plugins, "() => { throw new Error('\\ud800') }", "null", "{}").await;
    assert_eq!(half, Err(Fault::Refused("Error: \u{fffd} (line 1, column 19)".into())));
    let recursion = verdict(&plugins, "() => { const f = () => 1 + f(); return f() }", "null", "{}").await;
    assert!(matches!(recursion, Err(Fault::Trap(_))), "{recursion:?}");
    let greedy = "() => { const held = []; for (;;) held.push(new Array(1000).fill(0)) }";
    let patient = start(&PluginLimits { call_ms: 10_000, ..PluginLimits::default() });
    assert_eq!(verdict(&patient, greedy, "null", "{}").await, Err(Fault::Memory));
    assert_eq!(verdict(&plugins, "() => { for (;;); }", "null", "{}").await, Err(Fault::Deadline));
}

/// Takes some tenths of a second to be compiled, and no time to be called.
const SLOW: &str = "let n = 0;\nfor (let i = 0; i < 5_000_000; i++) n += i;\nexport default () => true;";

#[tokio::test]
async fn who_takes_long_to_be_configured_may_and_holds_up_nobody() {
    let plugins = start(&PluginLimits { configure_ms: 30_000, ..quick() });
    let slow = script(&plugins, World::Filter, SLOW).await.unwrap();
    let slow = configure(&plugins, &slow, "null").await;
    let sound = instance(&plugins, TRANSFORM, r#"["f"]"#).await;
    assert!(shape(&plugins, &sound, messages(1)).await[0].is_ok());
    let judged = async { (judge(&plugins, &slow, messages(1)).await, Instant::now()) };
    let shaped = async { (shape(&plugins, &sound, messages(1)).await, Instant::now()) };
    let ((judged, late), (shaped, soon)) = tokio::join!(judged, shaped);
    assert!(judged == [Ok(true)] && shaped[0].is_ok(), "{judged:?}");
    assert!(soon < late, "asked after it, answered before it");
    assert_eq!(plugins.usage(&"t1".into(), slow.plugin().id()).faults, [0; Fault::KINDS.len()]);
    let hasty = start(&PluginLimits { configure_ms: 1, ..quick() });
    let refused = script(&hasty, World::Filter, SLOW).await.unwrap_err();
    assert!(refused.contains("longer than it may while the script was compiled"), "{refused}");
}

#[tokio::test]
async fn scripts_have_a_limit_of_their_own_on_memory() {
    // Some 12 MB.
    let holds =
        "() => { const held = []; for (let n = 0; n < 1500; n++) held.push(new Array(1000).fill(0)); return true }";
    let tight = PluginLimits { script_memory_bytes: 8 << 20, call_ms: 2000, ..PluginLimits::default() };
    assert_eq!(verdict(&start(&tight), holds, "null", "{}").await, Err(Fault::Memory));
    let roomy = PluginLimits { memory_bytes: 1 << 20, call_ms: 2000, ..PluginLimits::default() };
    assert_eq!(verdict(&start(&roomy), holds, "null", "{}").await, Ok(true));
}

#[tokio::test]
async fn a_script_with_a_third_parameter_keeps_state_for_each_source() {
    let plugins = start(&PluginLimits::default());
    let text = "(m, settings, state) => (state.n = (state.n ?? 0) + 1) % settings.every === 1";
    let script = script(&plugins, World::Filter, text).await.unwrap();
    let of = |source: &str| {
        let Message { tenant, api, action, kind, time, body, .. } = (*message("t", "{}")).clone();
        Arc::new(Message { tenant, api, action, kind, time, body, source: source.into() })
    };
    let batch = || ["1", "2", "1", "1", "2"].map(of).to_vec();
    let first = plugins.configure(&"t1".into(), &script, r#"{"every":2}"#, 1).await.unwrap();
    assert_eq!(judge(&plugins, &first, batch()).await, [true, true, false, true, false].map(Ok));
    let second = plugins.configure(&"t1".into(), &script, r#"{"every":2}"#, 2).await.unwrap();
    assert_eq!(
        judge(&plugins, &second, batch()).await,
        [true, true, false, true, false].map(Ok),
        "another subscription"
    );
    assert_eq!(judge(&plugins, &first, vec![of("1"), of("2")]).await, [false, true].map(Ok), "goes on");
    // The source that was not seen for longest is forgotten when there are more than 10,000.
    let crowd = (0..10_000).map(|n| of(&format!("crowd {n}"))).collect();
    judge(&plugins, &first, crowd).await;
    assert_eq!(judge(&plugins, &first, vec![of("1")]).await, [Ok(true)], "from the start");
}

#[tokio::test]
async fn a_script_reshapes_bodies() {
    let plugins = start(&PluginLimits::default());
    for (text, expected) in [
        ("(m) => ({ celsius: m.body.f - 32 })", Ok(r#"{"celsius":68}"#)),
        ("(m) => { m.body.g = 'ä'; return m.body }", Ok(r#"{"f":100,"g":"ä"}"#)),
        ("(m) => { m.body.g = 1; return m }", Ok(r#"{"f":100,"g":1}"#)),
        ("(m) => m", Ok(r#"{"f": 100}"#)),
        ("(m) => 'F,' + m.body.f", Ok("F,100")),
        ("() => new Uint8Array([65, 66])", Ok("AB")),
        ("() => '\\ud800'", Ok("\u{fffd}")),
        ("(m) => [m.body.f]", Ok("[100]")),
    ] {
        let script = script(&plugins, World::Transform, text).await.unwrap();
        let transform = configure(&plugins, &script, "null").await;
        let shaped = shape(&plugins, &transform, vec![message("t", r#"{"f": 100}"#)]).await.remove(0);
        assert_eq!(shaped, expected.map(|body| Bytes::from(body.to_owned())), "{text}");
    }
    for (text, what) in [
        ("(m) => { m.body.f }", "nothing"),
        ("(m) => 1", "a number"),
        ("(m) => true", "a boolean"),
        ("(m) => null", "null"),
        ("(m) => () => m", "a function"),
        ("(m) => 1n", "a bigint"),
        ("(m) => Promise.resolve(m)", "a promise: it must not be async"),
    ] {
        let script = script(&plugins, World::Transform, text).await.unwrap();
        let transform = configure(&plugins, &script, "null").await;
        let shaped = shape(&plugins, &transform, messages(1)).await.remove(0);
        let said = format!("TypeError: the function returned {what}");
        assert!(matches!(&shaped, Err(Fault::Refused(text)) if text.starts_with(&said)), "{text}: {shaped:?}");
    }
}
