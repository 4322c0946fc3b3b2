//! The plugins that subscriptions name without an upload, held against the vectors that their sources meet natively.

use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use super::*;

#[derive(Deserialize)]
struct Case<M> {
    name: String,
    settings: Box<RawValue>,
    error: Option<String>,
    #[serde(default = "Vec::new")]
    messages: Vec<M>,
}

#[derive(Deserialize)]
struct Judged {
    #[serde(default)]
    source: String,
    #[serde(default)]
    time: String,
    #[serde(default)]
    body: Value,
    passes: bool,
}

#[derive(Deserialize)]
struct Shaped {
    body: String,
    expected: Option<String>,
    error: Option<String>,
}

/// The cases of a plugin whose settings it accepts, each with an instance of its own. The others are checked.
async fn accepted<M: DeserializeOwned>(plugins: &Plugins, name: &str) -> Vec<(Instance, Case<M>)> {
    let plugin = plugins.built_in_named(name).await.unwrap().unwrap();
    let vectors = fs::read(plugins_dir().join(format!("vectors/{name}.json"))).unwrap();
    let cases: Vec<Case<M>> = serde_json::from_slice(&vectors).unwrap();
    let mut accepted = Vec::new();
    for (subscription, case) in (1..).zip(cases) {
        match (plugins.configure(&"t1".into(), &plugin, case.settings.get(), subscription).await, &case.error) {
            (Ok(instance), None) => accepted.push((instance, case)),
            (Err(PluginError::Settings(text)), Some(expected)) => assert_eq!(*text, **expected, "{}", case.name),
            (outcome, _) => panic!("{name}: {}: {outcome:?}", case.name),
        }
    }
    assert!(!accepted.is_empty(), "{name}");
    accepted
}

#[tokio::test]
async fn each_filter_judges_its_vectors() {
    let plugins = start_components();
    for name in ["threshold", "deadband", "rate-limit", "sampling", "geofence"] {
        for (instance, case) in accepted::<Judged>(&plugins, name).await {
            let message = |m: &Judged| {
                let message = Message::clone(&message("t", &m.body.to_string()));
                Arc::new(Message { source: m.source.as_str().into(), time: m.time.as_str().into(), ..message })
            };
            let expected: Vec<_> = case.messages.iter().map(|m| Ok(m.passes)).collect();
            let answers = judge(&plugins, &instance, case.messages.iter().map(message).collect()).await;
            assert_eq!(answers, expected, "{name}: {}", case.name);
        }
    }
}

#[tokio::test]
async fn the_unit_conversion_shapes_its_vectors() {
    let plugins = start_components();
    for (instance, case) in accepted::<Shaped>(&plugins, "unit-conversion").await {
        let expected = case.messages.iter().map(|m| match (&m.expected, &m.error) {
            (Some(body), _) => Ok(Bytes::copy_from_slice(body.as_bytes())),
            (None, error) => Err(Fault::Refused(error.clone().unwrap().into())),
        });
        let expected: Vec<_> = expected.collect();
        let messages = case.messages.iter().map(|m| message("t", &m.body)).collect();
        assert_eq!(shape(&plugins, &instance, messages).await, expected, "{}", case.name);
    }
}
