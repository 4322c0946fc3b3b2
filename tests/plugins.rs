//! Guests that misbehave: "messages of other subscriptions go on, the fault is logged and counted, memory stays flat".

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::harness::{Consumer, Gateway, forwarded, measurement, typed, value_of};

/// A gateway whose `plugin` is the faulty guest of that name; `more` follows in the part `plugins` of its configuration.
pub(crate) async fn faulty(plugin: &str, guest: &str, more: &str) -> (Gateway, tempfile::TempDir) {
    let components = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugins/components");
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| -> PathBuf { directory.path().join(format!("{name}.wasm")) };
    for name in ["type-filter", "fragments-to-copy"] {
        fs::copy(components.join(format!("{name}.wasm")), place(name)).unwrap();
    }
    fs::copy(components.join("faulty").join(format!("{guest}.wasm")), place(plugin)).unwrap();
    // Who fails often is asked no more, which has scenes of its own.
    let patience = if more.contains("quarantine_faults") { "" } else { "quarantine_faults = 1000000" };
    let config = format!("[plugins]\nbuiltin_dir = '{}'\n{patience}\n{more}", directory.path().display());
    (Gateway::with(&config).await, directory)
}

/// A device whose measurements go to `Needs`, past the faulty plugin, and one whose measurements go to `Plain`.
struct Scene {
    gateway: Gateway,
    _components: tempfile::TempDir,
    needs: String,
    plain: String,
    needing: Consumer,
    others: Consumer,
}

impl Scene {
    async fn new(plugin: &str, guest: &str, more: &str) -> Self {
        let (gateway, components) = faulty(plugin, guest, more).await;
        let (needs, plain) = (gateway.device("needs").await, gateway.device("plain").await);
        let mut subscription = forwarded("Needs", &needs);
        match plugin {
            "type-filter" => subscription = typed("Needs", &needs, "'t'"),
            _ => subscription["fragmentsToCopy"] = json!(["c8y_Reading"]),
        }
        // So that the plugin is asked each time; `hold` has scenes of its own.
        subscription["tidegate"] = json!({"onFault": "drop"});
        gateway.subscribe(&subscription).await;
        gateway.subscribe(&forwarded("Plain", &plain)).await;
        let needing = gateway.consumer("Needs", "subA").await;
        let others = gateway.consumer("Plain", "subA").await;
        Self { gateway, _components: components, needs, plain, needing, others }
    }

    async fn stored(&self, device: &str) -> usize {
        let path = format!("/measurement/measurements?source={device}&pageSize=2000");
        let list = self.gateway.get(&path).await.expect(200).json();
        list["measurements"].as_array().unwrap().len()
    }
}

/// Posts what the faulty plugin has to see, `count` times beside as many that it has not.
async fn misbehaves(plugin: &str, guest: &str, count: u64) {
    let mut scene = Scene::new(plugin, guest, "").await;
    let faults_before = scene.gateway.metric("tidegate_plugin_faults_total").await;
    assert_eq!(faults_before, 0.0);
    let mut rss_after_warm_up = 0;
    for value in 0..count {
        scene.gateway.measure(&scene.needs, "t", value).await;
        scene.gateway.measure(&scene.plain, "t", value).await;
        assert_eq!(value_of(&scene.others.receive().await.json()), value, "{guest}: others go on");
        if value == count / 4 {
            rss_after_warm_up = scene.gateway.rss_kib();
        }
    }
    assert_eq!(scene.stored(&scene.needs).await, usize::try_from(count).unwrap(), "{guest}: the objects are stored");
    assert!(scene.gateway.metric("tidegate_plugin_faults_total").await >= count as f64, "{guest}: every fault counts");
    let log = scene.gateway.stderr();
    assert!(log.contains("plugin") && log.contains(plugin), "{guest}: the log says which\n{log}");
    let grown = scene.gateway.rss_kib().saturating_sub(rss_after_warm_up);
    assert!(grown < 24 * 1024, "{guest}: {grown} KiB more after {count} faults");

    // The place of the consumer is unharmed: when the plugin is well again, messages come.
    let path = format!("/notification2/subscriptions?source={}", scene.needs);
    scene.gateway.delete(&path).await.expect(204);
    scene.gateway.subscribe(&forwarded("Needs", &scene.needs)).await;
    scene.gateway.measure(&scene.needs, "t", 4711).await;
    assert_eq!(value_of(&scene.needing.receive().await.json()), 4711, "{guest}: the first that came");
}

#[tokio::test]
async fn an_endless_loop() {
    misbehaves("type-filter", "loop", 40).await;
}

#[tokio::test]
async fn memory_without_end() {
    misbehaves("type-filter", "memory", 300).await;
}

#[tokio::test]
async fn a_verdict_too_few() {
    misbehaves("type-filter", "wrong-length", 300).await;
}

#[tokio::test]
async fn an_answer_of_64_mib() {
    misbehaves("fragments-to-copy", "huge", 300).await;
}

/// What the interpreter is forced by.
const PULLEY: &str = "engine = 'pulley'\n";

#[tokio::test]
async fn the_interpreter_filters_and_shapes() {
    let gateway = Gateway::with(&format!("[plugins]\n{PULLEY}")).await;
    let device = gateway.device("pump").await;
    let mut subscription = typed("Sub1", &device, "'wanted' or 'other'");
    subscription["fragmentsToCopy"] = json!(["c8y_Absent"]);
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    for value in 0..20 {
        gateway.measure(&device, "unwanted", value).await;
        gateway.measure(&device, "wanted", value).await;
        let body = consumer.receive().await.json();
        assert_eq!((&body["type"], &body["c8y_Reading"]), (&json!("wanted"), &Value::Null), "{body}");
    }
    assert_eq!(gateway.metric("tidegate_plugin_faults_total").await, 0.0);
    let refused = gateway.post("/notification2/subscriptions", &typed("Sub2", &device, "'wanted")).await;
    assert!(refused.error(422, "").contains("never closed"));
}

#[tokio::test]
async fn the_interpreter_bears_traps() {
    traps_on_every_third("type-filter", "trap-third", PULLEY).await;
}

/// Posts one by one. The gateway tries a message that met a trap once more on a new instance, where it is the first.
async fn traps_on_every_third(plugin: &str, guest: &str, more: &str) {
    const COUNT: u64 = 60;
    let mut scene = Scene::new(plugin, guest, more).await;
    for value in 0..COUNT {
        // Another type each time: a filter is not asked again about what it has been asked.
        scene.gateway.measure(&scene.needs, &format!("t{value}"), value).await;
    }
    for value in 0..COUNT {
        assert_eq!(value_of(&scene.needing.receive().await.json()), value, "every one, in order");
    }
    assert!(scene.gateway.metric("tidegate_plugin_faults_total").await >= 20.0, "every trap counts");
    assert!(scene.gateway.stderr().contains(plugin), "the log says which:\n{}", scene.gateway.stderr());
}

#[tokio::test]
async fn a_filter_that_traps_on_every_third_message() {
    traps_on_every_third("type-filter", "trap-third", "").await;
}

#[tokio::test]
async fn a_transform_that_traps_on_every_third_message() {
    traps_on_every_third("fragments-to-copy", "shape-trap-third", "").await;
}

#[tokio::test]
async fn a_bulk_request_with_one_fault_is_taken_all_the_same() {
    let mut scene = Scene::new("type-filter", "loop", "").await;
    let bulk: Vec<Value> =
        [&scene.plain, &scene.needs, &scene.plain].map(|device| measurement(device, "t", 1)).into_iter().collect();
    scene.gateway.post("/measurement/measurements", &json!({"measurements": bulk})).await.expect(201);
    assert_eq!((scene.stored(&scene.plain).await, scene.stored(&scene.needs).await), (2, 1));
    for _ in 0..2 {
        assert_eq!(value_of(&scene.others.receive().await.json()), 1);
    }
}
