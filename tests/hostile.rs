//! Plugins that attack the gateway: what they do to it, to other tenants and to their own, while messages flow ("and never be hurt
//! by one"). Each scene prints what the other tenants notice.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::harness::{
    Answer, BASIC, Call, Consumer, Gateway, PASSWORD, component, eventually, filter_with, forwarded, leb, measurement,
    raw, section, value_of, with_length,
};
use crate::registry::PATH;

/// How long the pace without an attack is taken.
const QUIET: Duration = Duration::from_secs(1);
/// Longest way of a message of others from its producer to its consumer: long, since tests share the machine.
const STALL: Duration = Duration::from_secs(10);
/// What an attack may add to the memory that the gateway ever held.
const GROWN_KIB: u64 = 96 << 10;

// --- the others ---

/// A device whose measurements go to a consumer one by one.
struct Lane {
    device: String,
    consumer: Consumer,
    next: u64,
}

impl Lane {
    /// The times that messages take from the producer to the consumer, until `done`. None is lost, and none comes twice.
    async fn run(&mut self, tenant: &Tenant<'_>, done: &CancellationToken) -> Vec<Duration> {
        let mut times = Vec::new();
        while !done.is_cancelled() {
            let started = Instant::now();
            tenant.measure(&self.device, self.next).await;
            assert_eq!(value_of(&self.consumer.receive().await.json()), self.next);
            times.push(started.elapsed());
            self.next += 1;
        }
        times
    }
}

/// A tenant that is not to be hurt.
struct Other<'a> {
    tenant: Tenant<'a>,
    lanes: Vec<Lane>,
}

impl<'a> Other<'a> {
    async fn new(gateway: &'a Gateway, name: &str, extension: Value) -> Self {
        let tenant = Tenant::new(gateway, name).await;
        let mut lanes = Vec::new();
        for topic in ["One", "Two"] {
            let device = tenant.device(topic, extension.clone()).await;
            lanes.push(Lane { device, consumer: tenant.consumer(topic).await, next: 0 });
        }
        Self { tenant, lanes }
    }

    async fn run(&mut self, done: &CancellationToken) -> Pace {
        let started = Instant::now();
        let times = join_all(self.lanes.iter_mut().map(|lane| lane.run(&self.tenant, done))).await;
        Pace::of(times.concat(), started.elapsed())
    }
}

/// One that uses no plugin, and one whose messages all go past one.
struct Others<'a> {
    gateway: &'a Gateway,
    plain: Other<'a>,
    filtered: Other<'a>,
}

impl<'a> Others<'a> {
    async fn new(gateway: &'a Gateway) -> Self {
        let above = json!({"value": "/c8y_Reading/R/value", "above": -1});
        let filter = json!({"filters": [{"plugin": "threshold", "settings": above}]});
        let plain = Other::new(gateway, "plain", json!({})).await;
        Self { gateway, plain, filtered: Other::new(gateway, "filtered", filter).await }
    }

    /// Does `attack` beside them.
    async fn beside<T>(&mut self, name: &str, attack: impl Future<Output = T>) -> T {
        let ((), alone) = self.pace(tokio::time::sleep(QUIET)).await;
        let before = self.gateway.peak_rss_kib();
        let (done, beside) = self.pace(attack).await;
        let grown = self.gateway.peak_rss_kib().saturating_sub(before);
        let mut out = std::io::stderr().lock();
        let _ = writeln!(out, "{name}: {grown} KiB more at the peak");
        for (tenant, alone, beside) in [("plain", &alone[0], &beside[0]), ("filtered", &alone[1], &beside[1])] {
            let _ = writeln!(out, "  {tenant}: {alone} alone, {beside} beside");
            assert!(beside.worst < STALL, "{name}: {tenant}: {beside}");
        }
        assert!(grown < GROWN_KIB, "{name}: {grown} KiB more");
        done
    }

    async fn pace<T>(&mut self, work: impl Future<Output = T>) -> (T, [Pace; 2]) {
        let (gateway, done) = (self.gateway, CancellationToken::new());
        let work = async {
            let result = work.await;
            done.cancel();
            result
        };
        let ready = async {
            while !done.is_cancelled() {
                gateway.get("/health/ready").await.expect(200);
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let (result, plain, filtered, ()) = tokio::join!(work, self.plain.run(&done), self.filtered.run(&done), ready);
        (result, [plain, filtered])
    }
}

struct Pace {
    per_second: f64,
    median: Duration,
    p99: Duration,
    worst: Duration,
}

impl Pace {
    fn of(mut times: Vec<Duration>, within: Duration) -> Self {
        times.sort_unstable();
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        let per_second = times.len() as f64 / within.as_secs_f64();
        Self { per_second, median: at(0.5), p99: at(0.99), worst: at(1.0) }
    }
}

impl std::fmt::Display for Pace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { per_second, median, p99, worst } = self;
        write!(f, "{per_second:.0}/s (median {median:.1?}, p99 {p99:.1?}, worst {worst:.1?})")
    }
}

// --- tenants ---

/// One of many, as its administrator.
struct Tenant<'a> {
    gateway: &'a Gateway,
    user: String,
}

impl<'a> Tenant<'a> {
    async fn new(gateway: &'a Gateway, name: &str) -> Self {
        Self { gateway, user: gateway.tenant(name).await }
    }

    /// Whose plugins are hostile.
    async fn attacker(gateway: &'a Gateway) -> Self {
        Self::new(gateway, "attacker").await
    }

    fn as_them(&self, call: Call) -> Call {
        call.user(&self.user, PASSWORD)
    }

    fn upload(&self, query: &str, media_type: &str, body: impl Into<reqwest::Body>) -> Call {
        self.as_them(self.gateway.call("POST", &format!("{PATH}?name={query}")).body(media_type, body))
    }

    fn wasm(&self, query: &str, body: impl Into<reqwest::Body>) -> Call {
        self.upload(query, "application/wasm", body)
    }

    fn script(&self, query: &str, text: &str) -> Call {
        self.upload(query, "text/javascript", text.to_owned())
    }

    /// The names of their plugins.
    async fn uploaded(&self) -> BTreeSet<String> {
        let all = self.as_them(self.gateway.get(&format!("{PATH}?pageSize=2000"))).await.expect(200).json();
        let own = all["plugins"].as_array().unwrap().iter().filter(|plugin| plugin["builtIn"] == false);
        own.map(|plugin| plugin["name"].as_str().unwrap().to_owned()).collect()
    }

    /// A device whose measurements go to a topic of its name, past what `extension` names.
    async fn device(&self, name: &str, extension: Value) -> String {
        let device = json!({"name": name, "c8y_IsDevice": {}});
        let made = self.as_them(self.gateway.post("/inventory/managedObjects", &device)).await.expect(201).json();
        let device = made["id"].as_str().unwrap().to_owned();
        let mut subscription = forwarded(name, &device);
        subscription["tidegate"] = extension;
        self.as_them(self.gateway.post("/notification2/subscriptions", &subscription)).await.expect(201);
        device
    }

    async fn consumer(&self, topic: &str) -> Consumer {
        let request = json!({"subscription": topic, "subscriber": "subA"});
        let token = self.as_them(self.gateway.post("/notification2/token", &request)).await.expect(200).json();
        self.gateway.consumer_with(token["token"].as_str().unwrap()).await.unwrap()
    }

    /// Of another type each time: a filter is not asked again about what it has been asked.
    async fn measure(&self, device: &str, value: u64) {
        let measurement = measurement(device, &format!("t{value}"), value);
        self.as_them(self.gateway.post_measurement(&measurement)).await.expect(201);
    }
}

// --- components ---

/// A sound filter with a core module behind it that is cheap to read and dear to compile: loops in loops, all of which carry all
/// variables.
fn dear(loops: usize, variables: usize) -> Vec<u8> {
    const I64: u8 = 0x7e;
    let mut code = [&[1], &leb(variables)[..], &[I64]].concat();
    code.extend([0x03, 0x40].repeat(loops));
    for variable in 0..variables {
        let variable = leb(variable);
        // local.get, i64.const 1, i64.add, local.set
        code.extend([&[0x20], &variable[..], &[0x42, 0x01, 0x7c, 0x21], &variable].concat());
    }
    // Each loop goes on as long as its variable is odd.
    for variable in 0..loops {
        code.extend([&[0x20], &leb(variable % variables)[..], &[0xa7, 0x0d, 0x00, 0x0b]].concat());
    }
    code.push(0x0b);
    let module = [
        b"\0asm\x01\0\0\0".to_vec(),
        section(1, &[1, 0x60, 0, 0]),
        section(3, &[1, 0]),
        section(10, &[&[1], &with_length(&code)[..]].concat()),
    ];
    [component("type-filter"), section(1, &module.concat())].concat()
}

/// Waits until a component is being compiled, by one process.
async fn compiling(gateway: &Gateway) -> u32 {
    eventually("it is being compiled", async || gateway.children().first().copied()).await
}

async fn no_compiler_is_left(gateway: &Gateway) {
    eventually("no compiler is left", async || gateway.children().is_empty().then_some(())).await;
}

// --- what is refused ---

// "a module that takes Cranelift long to compile; a 100 MB upload; a component for another world; a core module; truncated bytes",
// "endless loop … in the start function".
#[tokio::test]
async fn hostile_components_are_refused_and_leave_nothing_behind() {
    let gateway = Gateway::with("[plugins]\ncompile_seconds = 3\n").await;
    let (mut others, attacker) = (Others::new(&gateway).await, Tenant::attacker(&gateway).await);
    let before = gateway.compiled();
    let sound = component("type-filter");
    let truncated = |share: usize| sound[..sound.len() * share / 8].to_vec();
    for (name, query, body, text) in [
        ("a start function without end", "a", component("faulty/loop-start"), "took longer than it may"),
        ("a module that is dear to compile", "a", dear(4_000, 4_000), "the compiler gave up on it"),
        ("a component for another world", "a&world=transform", sound.clone(), "is for the world 'filter'"),
        ("a core module", "a", b"\0asm\x01\0\0\0".to_vec(), "core module"),
        ("an eighth of a component", "a", truncated(1), "The plugin cannot be used: "),
        ("half of a component", "a", truncated(4), "The plugin cannot be used: "),
        ("most of a component", "a", truncated(7), "The plugin cannot be used: "),
    ] {
        let refused = others.beside(name, attacker.wasm(query, body).into_future()).await;
        refused.error(422, text);
    }
    let bytes = vec![0; 100_000_000];
    let announced = attacker.wasm("a", bytes.clone()).send();
    // Whoever is refused early may not get to read the answer.
    let refused = |answer: Result<Answer, _>| answer.is_ok_and(|answer| answer.status != 413);
    assert!(!refused(others.beside("100 MB", announced).await));
    let pieces: Vec<_> = bytes.chunks(1 << 20).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
    let unannounced = attacker.wasm("a", reqwest::Body::wrap_stream(stream::iter(pieces))).send();
    assert!(!refused(others.beside("100 MB without a length", unannounced).await));
    assert_eq!((attacker.uploaded().await, gateway.compiled()), (BTreeSet::new(), before));
    no_compiler_is_left(&gateway).await;
}

#[tokio::test]
async fn names_are_what_they_may_be() {
    let gateway = Gateway::start().await;
    let attacker = Tenant::attacker(&gateway).await;
    let huge = "a".repeat(4_000);
    for name in ["..", "a%2Fb", "a%00b", "%F0%9F%8C%8A", "a%0Ab", "A", "-", "%22", "a'--", &huge] {
        attacker.wasm(name, component("type-filter")).await.error(422, "name: must have 1 to 64 small letters");
        let path = format!("{PATH}/{name}/versions/1");
        let found = attacker.as_them(gateway.get(&path)).await;
        assert!(matches!(found.status, 404 | 414 | 422), "{name}: {}", found.text());
    }
    assert_eq!(attacker.uploaded().await, BTreeSet::new());
}

// "1,000 uploads in a row": those that are kept are bounded, those that are refused leave nothing behind.
#[tokio::test]
async fn a_thousand_uploads_in_a_row() {
    const KEPT: usize = 10;
    let gateway = Gateway::with(&format!("[plugins]\nversions_per_tenant = {KEPT}\n")).await;
    let (mut others, attacker) = (Others::new(&gateway).await, Tenant::attacker(&gateway).await);
    let before = gateway.compiled().len();
    let attack = async {
        let mut kept = 0;
        for number in 0..1_000 {
            let answer = attacker.wasm(&format!("p{}", number % 7), filter_with(&number.to_string())).await;
            match answer.status {
                201 => kept += 1,
                _ => drop(answer.error(422, "plugins.versions_per_tenant")),
            }
        }
        kept
    };
    assert_eq!(others.beside("1,000 uploads", attack).await, KEPT);
    assert_eq!(gateway.compiled().len(), before + KEPT);
    for name in attacker.uploaded().await {
        attacker.as_them(gateway.delete(&format!("{PATH}/{name}"))).await.expect(204);
    }
    assert_eq!(gateway.compiled().len(), before, "what is deleted goes from the disk");
}

#[tokio::test]
async fn uploads_by_twenty_clients_at_once() {
    let gateway = Gateway::start().await;
    let (mut others, attacker) = (Others::new(&gateway).await, Tenant::attacker(&gateway).await);
    let before = gateway.compiled().len();
    let uploads = join_all((0..20).map(|number| attacker.wasm("a", filter_with(&number.to_string())).into_future()));
    let answers = others.beside("20 clients", uploads).await;
    let (kept, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 201);
    let versions: BTreeSet<_> = kept.iter().map(|answer| answer.json()["version"].as_u64().unwrap()).collect();
    assert_eq!(versions, (1..=kept.len() as u64).collect(), "each is a version of its own");
    assert!(kept.len() >= 4 && !refused.is_empty(), "{} were kept", kept.len());
    for answer in refused {
        answer.error(503, "Too many plugins are being uploaded.");
    }
    assert_eq!(gateway.compiled().len(), before + kept.len());
}

// --- what is cut short ---

#[tokio::test]
async fn an_upload_that_is_cut_in_the_middle_leaves_nothing_behind() {
    let gateway = Gateway::start().await;
    let before = gateway.compiled();
    let wasm = component("type-filter");
    let head = format!(
        "POST {PATH}?name=a HTTP/1.1\r\nHost: {}\r\n{BASIC}Content-Type: application/wasm\r\nContent-Length: {}\r\n\r\n",
        gateway.addr,
        wasm.len()
    );
    for share in [0, 1, 4, 7] {
        let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
        socket.write_all(&[head.as_bytes(), &wasm[..wasm.len() * share / 8]].concat()).await.unwrap();
        drop(socket);
    }
    // A body that is shorter than was said.
    let short = [head.as_bytes(), &wasm[1..]].concat();
    let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
    socket.write_all(&short).await.unwrap();
    socket.shutdown().await.unwrap();
    assert!(!raw(gateway.addr, b"GET /health/live HTTP/1.1\r\nConnection: close\r\nHost: a\r\n\r\n").await.is_empty());
    gateway.get(&format!("{PATH}/a")).await.error(404, "no plugin 'a'");
    assert_eq!(gateway.compiled(), before);
}

// What is compiled is kept for a version, or not at all: also when nobody waits for the answer any more.
#[tokio::test]
async fn who_leaves_while_it_is_compiled_leaves_no_code_without_a_version() {
    let gateway = Gateway::start().await;
    let (mut others, attacker) = (Others::new(&gateway).await, Tenant::attacker(&gateway).await);
    let before = gateway.compiled().len();
    let attack = async {
        for number in 0..5 {
            let upload = attacker.wasm("a", filter_with(&number.to_string())).send();
            tokio::select! {
                answer = upload => drop(answer.unwrap().expect(201)),
                _ = compiling(&gateway) => {}
            }
            no_compiler_is_left(&gateway).await;
        }
    };
    others.beside("clients that leave", attack).await;
    let versions = async || {
        let shown = attacker.as_them(gateway.get(&format!("{PATH}/a"))).await;
        if shown.status == 404 { 0 } else { shown.json()["versions"].as_array().unwrap().len() }
    };
    eventually("each file is that of a version", async || {
        (gateway.compiled().len() == before + versions().await).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_kill_during_a_compilation_leaves_no_process_no_version_and_no_code() {
    let mut gateway = Gateway::start().await;
    let before = gateway.compiled();
    let upload = tokio::spawn(
        gateway.call("POST", &format!("{PATH}?name=a")).body("application/wasm", dear(2_000, 4_000)).send(),
    );
    let compiler = compiling(&gateway).await;
    gateway.kill9();
    assert!(upload.await.unwrap().is_err());
    let gone = || !Path::new(&format!("/proc/{compiler}/exe")).exists();
    eventually("the compiler ends with the gateway", async || gone().then_some(())).await;
    gateway.restart_process().await;
    gateway.get(&format!("{PATH}/a")).await.error(404, "no plugin 'a'");
    eventually("no code is left", async || (gateway.compiled() == before).then_some(())).await;
}

// --- what runs ---

/// Where a plugin stands in a subscription that forwards nothing when it fails.
fn used_as(world: &str, plugin: &str) -> Value {
    json!({world: [{"plugin": plugin}], "onFault": "drop"})
}

/// Sends a plugin messages for a while, each of which it is asked about. The attacker's own device `plain` goes on beside.
async fn provoke(attacker: &Tenant<'_>, device: &str, plain: (&str, &mut Consumer), next: &mut u64) {
    const ATTACK: Duration = Duration::from_secs(2);
    let until = Instant::now() + ATTACK;
    while Instant::now() < until {
        let measured = join_all((0..4).map(|number| attacker.measure(device, *next + number)));
        tokio::join!(measured, attacker.measure(plain.0, *next));
        assert_eq!(value_of(&plain.1.receive().await.json()), *next, "the attacker's other subscription");
        *next += 4;
    }
}

/// Uploads the plugins one after another and has them asked. Each has to fail, but for those that only answer nonsense.
async fn run(gateway: &Gateway, plugins: impl IntoIterator<Item = (&str, &str, Call)>) {
    let (mut others, attacker) = (Others::new(gateway).await, Tenant::attacker(gateway).await);
    let plain = attacker.device("Plain", json!({})).await;
    let (mut consumer, mut next) = (attacker.consumer("Plain").await, 0);
    for (name, world, upload) in plugins {
        attacker.as_them(upload).await.expect(201);
        let topic = name.replace('-', "");
        let device = attacker.device(&topic, used_as(world, name)).await;
        let _waiting = attacker.consumer(&topic).await;
        let before = gateway.metric("tidegate_plugin_faults_total").await;
        others.beside(name, provoke(&attacker, &device, (&plain, &mut consumer), &mut next)).await;
        assert!(gateway.metric("tidegate_plugin_faults_total").await > before, "{name} did not fail");
    }
}

/// So that plugins are asked as long as the attack lasts.
const PATIENT: &str = "[plugins]\nquarantine_faults = 1000000\n";

// "endless loop … in the evaluation; memory growth to the limit; a huge result; a trap on every third message; a verdict list of
// the wrong length".
#[tokio::test]
async fn components_that_fail_on_messages() {
    let gateway = Gateway::with(PATIENT).await;
    let of = |name: &'static str, world: &'static str| {
        let call = gateway.call("POST", &format!("{PATH}?name={name}"));
        (name, world, call.body("application/wasm", component(&format!("faulty/{name}"))))
    };
    let filters = ["loop", "memory", "wrong-length", "trap-third"].map(|name| of(name, "filters"));
    let transforms = ["huge", "shape-trap-third"].map(|name| of(name, "transforms"));
    run(&gateway, filters.into_iter().chain(transforms)).await;
}

// As it is without further settings: soon the plugins are asked no more, and cost nothing.
#[tokio::test]
async fn who_loops_on_every_message_is_soon_asked_no_more() {
    for plugins in [1, 8] {
        let gateway = Gateway::start().await;
        let (mut others, attacker) = (Others::new(&gateway).await, Tenant::attacker(&gateway).await);
        let (mut devices, mut waiting) = (Vec::new(), Vec::new());
        for number in 0..plugins {
            let name = format!("loop{number}");
            attacker.wasm(&name, component("faulty/loop")).await.expect(201);
            devices.push(attacker.device(&name, used_as("filters", &name)).await);
            waiting.push(attacker.consumer(&name).await);
        }
        let measure = async |value| drop(join_all(devices.iter().map(|device| attacker.measure(device, value))).await);
        let attack = async {
            let mut value = 0;
            while gateway.metric("tidegate_plugin_quarantined").await < f64::from(plugins) {
                measure(value).await;
                value += 1;
            }
        };
        others.beside(&format!("{plugins} that loop, until quarantine"), attack).await;
        let calls = || gateway.metric("tidegate_plugin_calls_total");
        let before = calls().await;
        for value in 1_000..1_010 {
            measure(value).await;
        }
        assert_eq!(calls().await, before);
    }
}

#[tokio::test]
async fn scripts_that_never_come_to_be_are_refused() {
    let gateway = Gateway::start().await;
    let (mut others, attacker) = (Others::new(&gateway).await, Tenant::attacker(&gateway).await);
    // It compiles what runs scripts.
    attacker.script("sound&world=filter", "() => true").await.expect(201);
    for (name, text, refusal) in [
        ("a script that never ends", "export default (() => { for (;;); })()", "took longer than it may"),
        (
            "a script of deep recursion",
            "export default (function deep() { return deep() + 1 })()",
            "too deep recursion",
        ),
        (
            "a script that is an array bomb",
            "const all = []; for (;;) all.push(new Array(1e5).fill(0));\nexport default all",
            "",
        ),
        ("a script of deep brackets", &format!("() => {}{}", "[".repeat(100_000), "]".repeat(100_000)), ""),
    ] {
        let refused = others.beside(name, attacker.script("a&world=filter", text).into_future()).await;
        let told = refused.error(422, "The plugin cannot be used: ");
        assert!(told.contains(refusal), "{name}: {told}");
    }
    assert_eq!(attacker.uploaded().await, ["sound".to_owned()].into());
}

#[tokio::test]
async fn scripts_that_fail_on_messages() {
    let gateway = Gateway::with(PATIENT).await;
    let of = |name: &'static str, text: &'static str| {
        let call = gateway.call("POST", &format!("{PATH}?name={name}&world=filter"));
        (name, "filters", call.body("text/javascript", text))
    };
    let scripts = [
        of("js-loop", "() => { for (;;); }"),
        of("js-deep", "function deep() { return deep() + 1 }"),
        of("js-bomb", "() => { const all = []; for (;;) all.push(new Array(1e5).fill(0)) }"),
        of("js-text", "() => { let text = 'x'; for (;;) text += text + '!'; }"),
        of("js-pattern", "() => /^(a+)+$/.test('a'.repeat(40) + '!')"),
        of(
            "js-spoiler",
            "() => { Array.prototype.map = () => []; JSON.parse = () => 0; Array.from = () => []; throw 1 }",
        ),
    ];
    run(&gateway, scripts).await;
}

/// A bulk of measurements, each of another type.
async fn bulk(tenant: &Tenant<'_>, measurements: impl IntoIterator<Item = (&String, u64)>) -> Answer {
    let of = |(device, value): (&String, u64)| measurement(device, &format!("t{value}"), value);
    let all: Vec<Value> = measurements.into_iter().map(of).collect();
    let post = tenant.gateway.call("POST", "/measurement/measurements");
    tenant.as_them(post.body(MEASUREMENTS, json!({ "measurements": all }).to_string())).await
}

const MEASUREMENTS: &str = "application/vnd.com.nsn.cumulocity.measurementcollection+json";

// What one message does is a fault of that message, wherever it stands among others and however many are like it.
#[tokio::test]
async fn messages_on_which_a_plugin_never_ends_cost_no_other_message() {
    let gateway = Gateway::start().await;
    let tenant = Tenant::attacker(&gateway).await;
    const EVIL: u64 = 1_000;
    let text = format!("(message) => {{ if (message.body.c8y_Reading.R.value >= {EVIL}) for (;;); return true; }}");
    tenant.script("picky&world=filter", &text).await.expect(201);
    let mut devices = Vec::new();
    for number in 0..5 {
        // The settings are equal: one instance is asked about all of them.
        devices.push(tenant.device(&format!("D{number}"), used_as("filters", "picky")).await);
    }
    let mut consumers = Vec::new();
    for number in 0..5 {
        consumers.push(tenant.consumer(&format!("D{number}")).await);
    }
    let evil = (0..4).map(|number| (&devices[0], EVIL + number));
    let sound = (0..40).map(|number| (&devices[1 + number as usize % 4], number));
    bulk(&tenant, evil.chain(sound)).await.expect(201);
    for (number, consumer) in consumers.iter_mut().enumerate().skip(1) {
        for turn in 0..10 {
            assert_eq!(value_of(&consumer.receive().await.json()), turn * 4 + number as u64 - 1);
        }
    }
    assert_eq!(consumers[0].frames_until_pong().await, 0, "those that never ended were dropped");
}

// Every call may take `plugins.call_ms`, and so may every message of a batch that took longer.
#[tokio::test]
async fn a_plugin_that_is_slow_but_in_time_is_asked_about_every_message() {
    let gateway = Gateway::start().await;
    let tenant = Tenant::attacker(&gateway).await;
    // Some milliseconds.
    const SLOW: &str = "() => { let sum = 0; for (let i = 0; i < 100_000; i++) sum += i; return sum > 0; }";
    tenant.script("slow&world=filter", SLOW).await.expect(201);
    let device = tenant.device("Slow", used_as("filters", "slow")).await;
    let mut consumer = tenant.consumer("Slow").await;
    for round in 0..3 {
        bulk(&tenant, (0..60).map(|number| (&device, round * 60 + number))).await.expect(201);
    }
    for value in 0..180 {
        assert_eq!(value_of(&consumer.receive().await.json()), value);
    }
}

// A tenant gets no more of the plugins' time at once than a call may take.
#[tokio::test]
async fn a_tenant_that_has_much_to_judge_lets_others_in_between() {
    let gateway = Gateway::start().await;
    let tenant = Tenant::attacker(&gateway).await;
    const BUSY: &str = "() => { let sum = 0; for (let i = 0; i < 10_000; i++) sum += i; return sum > 0; }";
    tenant.script("busy&world=filter", BUSY).await.expect(201);
    let device = tenant.device("Busy", used_as("filters", "busy")).await;
    let _consumer = tenant.consumer("Busy").await;
    let mut others = Others::new(&gateway).await;
    let done = CancellationToken::new();
    let much = async {
        let started = Instant::now();
        bulk(&tenant, (0..5_000).map(|value| (&device, value))).await.expect(201);
        done.cancel();
        started.elapsed()
    };
    let (took, pace) = tokio::join!(much, others.filtered.run(&done));
    assert!(pace.worst < took / 4, "{pace} beside a request of {took:.1?}");
}

// What one subscription's messages do to a plugin is not what another one's have.
#[tokio::test]
async fn who_loops_costs_other_subscriptions_no_state() {
    let gateway = Gateway::start().await;
    let tenant = Tenant::attacker(&gateway).await;
    const ONCE: &str = "(message, settings, state) => {
        if (message.body.c8y_Reading.R.value >= 1000) for (;;);
        const first = !state.seen;
        state.seen = true;
        return first;
    }";
    tenant.script("once&world=filter", ONCE).await.expect(201);
    let [one, two] = [
        tenant.device("One", used_as("filters", "once")).await,
        tenant.device("Two", used_as("filters", "once")).await,
    ];
    let mut consumer = tenant.consumer("Two").await;
    let _waiting = tenant.consumer("One").await;
    tenant.measure(&two, 0).await;
    assert_eq!(value_of(&consumer.receive().await.json()), 0);
    tenant.measure(&one, 1_000).await;
    tenant.measure(&two, 1).await;
    assert_eq!(consumer.frames_until_pong().await, 0, "its first message was another one");
    assert_eq!(gateway.metric("tidegate_plugin_state_lost_total").await, 1.0, "that of the one that looped");
}

// Prototypes, globals and what is kept for a source are those of one instance: of a tenant, of a subscription if it keeps state.
#[tokio::test]
async fn scripts_do_not_see_what_others_have_left() {
    let gateway = Gateway::start().await;
    let attacker = Tenant::attacker(&gateway).await;
    // Passes until it finds what it has left itself.
    const FIRST: &str = "(message, settings, state) => {
        const found = {}.left || globalThis.left || state.left;
        Object.prototype.left = globalThis.left = state.left = true;
        return !found;
    }";
    attacker.script("first&world=filter", FIRST).await.expect(201);
    let own = gateway.call("POST", &format!("{PATH}?name=first&world=filter"));
    own.body("text/javascript", FIRST).await.expect(201);
    let extension = json!({"filters": [{"plugin": "first"}]});
    let [one, two] = [attacker.device("One", extension.clone()).await, attacker.device("Two", extension.clone()).await];
    let mut consumers = [attacker.consumer("One").await, attacker.consumer("Two").await];
    let device = gateway.device("pump").await;
    let mut subscription = forwarded("Three", &device);
    subscription["tidegate"] = extension;
    gateway.subscribe(&subscription).await;
    let mut third = gateway.consumer("Three", "subA").await;
    for value in 0..3 {
        attacker.measure(&one, value).await;
        attacker.measure(&two, value).await;
        gateway.measure(&device, "t", value).await;
    }
    for consumer in consumers.iter_mut().chain([&mut third]) {
        assert_eq!(value_of(&consumer.receive().await.json()), 0);
        assert_eq!(consumer.frames_until_pong().await, 0, "the second message finds what the first has left");
    }
}

// "endless loop in `configure`", "deep recursion": of a component that is sound with other settings.
#[tokio::test]
async fn settings_that_configure_never_survives_are_refused() {
    let gateway = Gateway::start().await;
    let (mut others, attacker) = (Others::new(&gateway).await, Tenant::attacker(&gateway).await);
    attacker.wasm("keeper", component("faulty/keeper")).await.expect(201);
    let with = |settings: &str| json!({"filters": [{"plugin": "keeper", "settings": settings}]});
    let device = attacker.device("Sound", with("")).await;
    let mut consumer = attacker.consumer("Sound").await;
    let mut subscription = forwarded("Hostile", &device);
    for (settings, reason) in [("loop", "took longer than it may"), ("deep", "too deep recursion")] {
        subscription["tidegate"] = with(settings);
        let subscribe = || attacker.as_them(gateway.post("/notification2/subscriptions", &subscription)).into_future();
        let refused = others.beside(settings, join_all((0..10).map(|_| subscribe()))).await;
        for refused in refused {
            let told = refused.error(422, "tidegate.filters[0].settings: ");
            assert!(told.contains(reason) && told.ends_with("while it was configured"), "{told}");
        }
        let upload = attacker.wasm(&format!("keeper&settings=\"{settings}\""), component("faulty/keeper")).await;
        assert!(upload.error(422, "configure failed on these settings: ").contains(reason));
    }
    let own = attacker.as_them(gateway.get("/notification2/subscriptions")).await.expect(200).json();
    assert_eq!(own["subscriptions"].as_array().unwrap().len(), 1, "{own}");
    attacker.measure(&device, 1).await;
    assert_eq!(value_of(&consumer.receive().await.json()), 1, "the plugin is asked by who has other settings");
}

#[tokio::test]
async fn settings_of_32_kib_are_the_longest() {
    let gateway = Gateway::start().await;
    let attacker = Tenant::attacker(&gateway).await;
    attacker.wasm("a", component("faulty/trap-third")).await.expect(201);
    let settings = |bytes: usize| json!({"filters": [{"plugin": "a", "settings": "x".repeat(bytes - 2)}]});
    attacker.device("Longest", settings(32 << 10)).await;
    let device = attacker.device("Other", json!({})).await;
    let mut longer = forwarded("Longer", &device);
    longer["tidegate"] = settings((32 << 10) + 1);
    let refused = attacker.as_them(gateway.post("/notification2/subscriptions", &longer)).await;
    refused.error(422, "tidegate.filters[0].settings: the settings are longer than 32768 bytes");
}

// "delete during use": refused while a subscription names it; whoever made the subscription at the same time has the plugin.
// `plugins.instances`: who has more than there is room for loses of their own.
#[tokio::test]
async fn many_instances_of_one_tenant_take_no_state_of_another() {
    let workers = std::thread::available_parallelism().map_or(1, |cores| (cores.get() - 1).max(1));
    let gateway = Gateway::with(&format!("[plugins]\ninstances = {}\n", 4 * workers)).await;
    let attacker = Tenant::attacker(&gateway).await;
    // The first message of each source, and then none for long.
    let first = |number: usize| json!({"filters": [{"plugin": "sampling", "settings": {"every": 1000 + number}}]});
    let device = gateway.device("pump").await;
    let mut subscription = forwarded("Sub1", &device);
    subscription["tidegate"] = first(0);
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    gateway.measure(&device, "t", 0).await;
    let mut devices = Vec::new();
    for number in 0..12 * workers {
        let topic = format!("Topic{number}");
        devices.push(attacker.device(&topic, first(number)).await);
        attacker.consumer(&topic).await.close().await;
    }
    for device in &devices {
        attacker.measure(device, 0).await;
    }
    for value in 1..4 {
        gateway.measure(&device, "t", value).await;
    }
    assert_eq!(value_of(&consumer.receive().await.json()), 0);
    assert_eq!(consumer.frames_until_pong().await, 0, "it knows that it has passed one");
    assert!(gateway.metric("tidegate_plugin_state_lost_total").await > 0.0, "of the attacker");
    assert!(gateway.metric("tidegate_plugin_instances").await <= (4 * workers) as f64);
}

#[tokio::test]
async fn plugins_come_and_go_while_messages_pass_them() {
    let gateway = Gateway::start().await;
    let (mut others, attacker) = (Others::new(&gateway).await, Tenant::attacker(&gateway).await);
    let device = attacker.device("Sound", json!({})).await;
    let mut subscription = forwarded("Going", &device);
    subscription["tidegate"] = json!({"filters": [{"plugin": "a", "settings": "x"}]});
    let attack = async {
        for round in 0..20 {
            attacker.wasm("a", component("type-filter")).await.expect(201);
            let subscribe = attacker.as_them(gateway.post("/notification2/subscriptions", &subscription)).into_future();
            let delete = attacker.as_them(gateway.delete(&format!("{PATH}/a"))).into_future();
            let (made, deleted, ()) = tokio::join!(subscribe, delete, attacker.measure(&device, round));
            match (made.status, deleted.status) {
                (201, 409) => {
                    let path = format!("/notification2/subscriptions/{}", made.json()["id"].as_str().unwrap());
                    let unsubscribe = attacker.as_them(gateway.delete(&path)).into_future();
                    let (gone, ()) = tokio::join!(unsubscribe, attacker.measure(&device, round));
                    gone.expect(204);
                    attacker.as_them(gateway.delete(&format!("{PATH}/a"))).await.expect(204);
                }
                (422, 204) => {}
                other => panic!("{other:?}: {} {}", made.text(), deleted.text()),
            }
        }
    };
    others.beside("plugins that come and go", attack).await;
}
