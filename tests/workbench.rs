//! `tidegate plugin try` and `tidegate plugin check` as processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::component;

/// Compiled code of built-in plugins is kept from run to run.
fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("workbench")
}

/// Runs `tidegate plugin …` in a directory of its own, which holds this component as `mine.wasm`.
fn plugin(arguments: &[&str], component_name: &str, input: &str) -> (bool, String, String) {
    let place = TempDir::new().unwrap();
    fs::write(place.path().join("mine.wasm"), component(component_name)).unwrap();
    fs::write(place.path().join("input"), input).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("plugin").args(arguments).current_dir(&place).env("XDG_CACHE_HOME", cache());
    command.stdin(fs::File::open(place.path().join("input")).unwrap());
    run(&mut command)
}

fn run(command: &mut Command) -> (bool, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.success(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn lines(out: &str) -> Vec<Value> {
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn samples_are_tried_in_the_terminal() {
    let input =
        "{\"type\":\"1.50\"}\n\n{\"type\":\"u\",\"body\":{\"type\":\"1.50\"}}\n{\"body\":{\"type\":\"1.50\"}}\n";
    let (done, out, error) = plugin(&["try", "mine.wasm", "--settings", "1.50"], "type-filter", input);
    assert!(done, "{error}");
    let told: Vec<_> = lines(&out).iter().map(|line| (line["line"].clone(), line["verdict"].clone())).collect();
    assert_eq!(told, [(json!(1), json!("pass")), (json!(3), json!("drop")), (json!(4), json!("pass"))]);
    assert_eq!(error, "1 drop, 0 fault, 2 pass\n");

    let (done, out, _) = plugin(
        &["try", "mine.wasm", "--settings", r#"["c8y_T"]"#],
        "fragments-to-copy",
        "{\"id\":\"1\",\"c8y_T\":1.50,\"c8y_S\":2}\n",
    );
    assert!(done && out.contains(r#""verdict":"shaped","body":{"#) && out.contains(r#""c8y_T":1.50"#), "{out}");
    assert!(!out.contains("c8y_S"), "{out}");
}

#[test]
fn the_terminal_is_told_what_is_wrong() {
    let (done, out, error) = plugin(&["try", "mine.wasm"], "type-filter", "{}\n{\"a\":1\n{}\n");
    assert!(!done && error.starts_with("1 drop, 0 fault, 0 pass\ntidegate: line 2: EOF while parsing"), "{error}");
    assert_eq!(lines(&out).len(), 1, "{out}");
    let faulty = |name: &str| plugin(&["try", "mine.wasm"], &format!("faulty/{name}"), &"{}\n".repeat(4));
    let (done, out, error) = faulty("trap-third");
    assert!(!done && error.contains("tidegate: the plugin failed on 1 messages"), "{error}");
    assert_eq!(lines(&out).iter().map(|line| &line["verdict"]).collect::<Vec<_>>(), ["pass", "pass", "fault", "pass"]);
    let (done, out, error) = faulty("first-alone");
    assert!(!done && error.contains("in a batch: message 2 is answered with drop"), "{error}");
    assert!(lines(&out).iter().all(|line| line["verdict"] == "pass"), "{out}");
    let (done, out, _) = faulty("loop");
    assert!(!done && lines(&out).iter().all(|line| line["fault"]["kind"] == "deadline"), "{out}");
    for (arguments, component, text) in [
        (
            &["check", "mine.wasm"][..],
            "faulty/loop-start",
            "settings: configure failed on them: the plugin took longer",
        ),
        (&["try", "mine.wasm"], "fragments-to-copy", "settings: fragmentsToCopy: an array of names is expected"),
        (
            &["try", "mine.wasm", "--settings", "{\"a\": 1,\n limit: 2}"],
            "type-filter",
            "for '--settings <JSON>': key must be a string at line 2 column 2",
        ),
        (&["check", "mine.wasm", "--settings", "{"], "type-filter", "EOF while parsing an object at line 1 column 1"),
        (&["upload", "mine.wasm", "--settings", "{"], "type-filter", "EOF while parsing an object at line 1 column 1"),
        (
            &["roll", "7", "mine", "2", "--settings", "{"],
            "type-filter",
            "EOF while parsing an object at line 1 column 1",
        ),
        (&["try", "mine.wasm", "--world", "transform"], "type-filter", "the component is for the world 'filter'"),
        (&["try", "input"], "type-filter", "The plugin cannot be used: it is no WebAssembly component"),
        (&["try", "none.wasm"], "type-filter", "none.wasm cannot be read"),
        (
            &["try", "none", "--world", "filter"],
            "type-filter",
            "there is no file 'none' to be tried, and no plugin of a",
        ),
        (&["check", "script.js"], "type-filter", "--world must say whether the script is a filter or a transform"),
        (&["try", "mine.wasm", "--subscription", "7"], "type-filter", "are for plugins of the gateway, by their names"),
        (&["try", "mine", "--last", "7"], "type-filter", "--subscription <ID>"),
        (&["check", "mine.wasm", "--settings", "{}"], "fragments-to-copy", "settings: fragmentsToCopy: "),
    ] {
        let (done, _, error) = plugin(arguments, component, "{}\n");
        assert!(!done && error.contains(text), "{arguments:?}: {error}");
    }
}

#[test]
fn a_plugin_is_checked_as_an_upload_would_be() {
    let (done, out, error) = plugin(&["check", "mine.wasm", "--json"], "type-filter", "");
    assert!(done, "{error}");
    let found: Value = serde_json::from_str(&out).unwrap();
    for (name, value) in [
        ("world", json!("filter")),
        ("language", json!("wasm")),
        ("size", json!(component("type-filter").len())),
        ("interest", json!({"meta": ["type"], "body": "none", "pointers": [], "keepsState": false})),
    ] {
        assert_eq!(found[name], value, "{name}");
    }
    assert!(
        found["imports"].as_array().unwrap().iter().all(|name| name.as_str().unwrap().starts_with("tidegate:plugin/"))
    );
    let (done, out, _) = plugin(&["check", "mine.wasm"], "fragments-to-copy", "");
    assert!(done && out.contains("world: transform\n"), "{out}");
    assert!(out.contains("configure: fragmentsToCopy: an array of names is expected\n"), "{out}");
    // The limits are those of a gateway's configuration.
    let place = TempDir::new().unwrap();
    let config = place.path().join("config.toml");
    fs::write(&config, "[plugins]\nmax_bytes = 65536\n").unwrap();
    let (done, _, error) =
        plugin(&["check", "input", "--config", config.to_str().unwrap()], "type-filter", &"x".repeat(65_537));
    assert!(!done && error.contains("it is longer than 65536 bytes (plugins.max_bytes)"), "{error}");
}

#[test]
fn a_script_needs_nothing_but_its_text() {
    let script = |text: &str, input: &str| {
        let place = TempDir::new().unwrap();
        fs::write(place.path().join("hot.js"), text).unwrap();
        fs::write(place.path().join("input"), input).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["plugin", "try", "hot.js", "--world", "filter", "--settings", r#"{"limit":20}"#]);
        command.current_dir(&place).env("XDG_CACHE_HOME", cache());
        run(command.stdin(fs::File::open(place.path().join("input")).unwrap()))
    };
    let (done, out, error) = script(
        "export default function (message, settings) {\n  console.log('hot?');\n  return message.body.t > settings.limit;\n}\n",
        "{\"t\":20.5}\n{\"t\":19.5}\n",
    );
    assert!(done, "{error}");
    assert_eq!(lines(&out).iter().map(|line| &line["verdict"]).collect::<Vec<_>>(), ["pass", "drop"]);
    assert_eq!(lines(&out)[0]["log"], json!([{"level": "info", "text": "hot?"}]));
    let (done, out, _) = script("(message) => message.body.t.u.v > 1", "{\"t\":{}}\n");
    assert!(!done && lines(&out)[0]["fault"]["kind"] == "refused", "{out}");
    let (done, out, error) = script("(message) => {\n  return (;\n}", "{}\n");
    assert!(!done && out.is_empty() && error.contains("The plugin cannot be used: "), "{error}");
}
