//! Uploaded plugins: versions, who may see and use them, what is refused (`docs/http.md`).

use std::fs;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::harness::{
    Call, Gateway, PASSWORD, USER, component, filter_with, forwarded, leb, measurement, of_tenant, section, value_of,
    with_length,
};
use crate::plugins::faulty;

pub(crate) const PATH: &str = "/tidegate/v1/plugins";
const WASM: &str = "application/wasm";

/// Uploads a component; the query begins with the name.
pub(crate) fn upload(gateway: &Gateway, query: &str, wasm: &[u8]) -> Call {
    gateway.call("POST", &format!("{PATH}?name={query}")).body(WASM, wasm.to_vec())
}

/// A subscription of the device's measurements with this extension.
fn with(topic: &str, device: &str, extension: Value) -> Value {
    let mut subscription = forwarded(topic, device);
    subscription["tidegate"] = extension;
    subscription
}

fn versions(plugin: &Value) -> Vec<u64> {
    plugin["versions"].as_array().unwrap().iter().map(|version| version["version"].as_u64().unwrap()).collect()
}

#[tokio::test]
async fn each_upload_is_a_version_that_never_changes_and_never_comes_again() {
    let gateway = Gateway::start().await;
    let wasm = component("type-filter");
    let answer = upload(&gateway, "by-type", &wasm).await.expect(201);
    let first = answer.json();
    let own = format!("http://{}{PATH}/by-type/versions/1", gateway.addr);
    assert_eq!(answer.header("location"), Some(own.as_str()));
    for (name, value) in [
        ("name", json!("by-type")),
        ("version", json!(1)),
        ("self", json!(own)),
        ("world", json!("filter")),
        ("language", json!("wasm")),
        ("size", json!(wasm.len())),
        ("author", json!("admin")),
        ("subscriptions", json!(0)),
    ] {
        assert_eq!(first[name], value, "{name}");
    }
    assert_eq!(first["digest"].as_str().unwrap().len(), 64);
    assert!(first["creationTime"].as_str().unwrap().ends_with('Z') && first.get("configure").is_none(), "{first}");

    let second = upload(&gateway, "by-type", &wasm).await.expect(201).json();
    assert_eq!((&second["version"], &second["digest"]), (&json!(2), &first["digest"]), "the same bytes again");
    assert_eq!(gateway.get(&format!("{PATH}/by-type/versions/1")).await.expect(200).json(), first);
    let shown = gateway.get(&format!("{PATH}/by-type")).await.expect(200).json();
    assert_eq!((versions(&shown), &shown["builtIn"], &shown["world"]), (vec![1, 2], &json!(false), &json!("filter")));
    let downloaded = gateway.get(&format!("{PATH}/by-type/versions/2/wasm")).await.expect(200);
    assert_eq!(downloaded.header("content-type"), Some(WASM));
    assert!(downloaded.body == wasm);

    gateway.delete(&format!("{PATH}/by-type/versions/2")).await.expect(204);
    gateway.get(&format!("{PATH}/by-type/versions/2")).await.error(404, "no plugin 'by-type' in version 2");
    assert_eq!(upload(&gateway, "by-type", &wasm).await.expect(201).json()["version"], 3);
    gateway.delete(&format!("{PATH}/by-type")).await.expect(204);
    for path in ["by-type", "by-type/versions/1", "by-type/versions/x", "by-type/versions/3/wasm", "other"] {
        gateway.get(&format!("{PATH}/{path}")).await.error(404, "");
    }
    gateway.delete(&format!("{PATH}/by-type")).await.error(404, "no plugin 'by-type'");
    assert_eq!(upload(&gateway, "by-type", &wasm).await.expect(201).json()["version"], 4);
}

#[tokio::test]
async fn the_list_has_pages_and_the_built_in_plugins() {
    let gateway = Gateway::start().await;
    for name in ["zz", "aa"] {
        upload(&gateway, name, &component("type-filter")).await.expect(201);
    }
    let all = gateway.get(&format!("{PATH}?pageSize=2000")).await.expect(200).json();
    let plugins = all["plugins"].as_array().unwrap();
    let names: Vec<_> = plugins.iter().map(|plugin| plugin["name"].as_str().unwrap()).collect();
    assert!(names.is_sorted() && names[0] == "aa" && names.contains(&"type-filter"), "{names:?}");
    for plugin in plugins {
        let built_in = !["aa", "zz"].contains(&plugin["name"].as_str().unwrap());
        assert_eq!((&plugin["builtIn"], versions(plugin).is_empty()), (&json!(built_in), built_in), "{plugin}");
        let link = plugin["self"].as_str().unwrap().strip_prefix(&format!("http://{}", gateway.addr)).unwrap();
        assert_eq!(gateway.get(link).await.expect(200).json(), *plugin);
    }
    let last = gateway.get(&format!("{PATH}?pageSize=1&currentPage={}", plugins.len())).await.expect(200).json();
    assert_eq!(last["plugins"], json!([plugins[plugins.len() - 1]]));
}

#[tokio::test]
async fn a_subscription_runs_the_version_that_it_names() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    let refusal = upload(&gateway, "cut", &component("fragments-to-copy")).await.expect(201).json();
    assert_eq!(refusal["configure"], "fragmentsToCopy: an array of names is expected");
    // The filter takes a bare text for one exact type, so that these settings match the type `1.50` alone.
    let extension = r#"{"filters":[{"plugin":"by-type","version":"latest","settings":1.50}],"transforms":[{"plugin":"cut","settings":["c8y_Other"]}]}"#;
    let mut wanted = forwarded("Sub1", &device).to_string();
    wanted.truncate(wanted.len() - 1);
    let call = gateway.call("POST", "/notification2/subscriptions").header("Accept", "application/json");
    let made = call.body("application/json", format!("{wanted},\"tidegate\":{extension}}}")).await.expect(201);
    let text = made.text();
    assert!(text.contains(r#"{"plugin":"by-type","version":2,"settings":1.50}"#), "{text}");
    assert!(text.contains(r#"{"plugin":"cut","version":1,"settings":["c8y_Other"]}"#), "{text}");
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let mut expected = Vec::new();
    for kind in ["1.5", "1.50", "t", "1.50"] {
        let measured = gateway.measure(&device, kind, 1).await;
        expected.extend((kind == "1.50").then(|| measured["id"].clone()));
    }
    for id in expected {
        let body = consumer.receive().await.json();
        assert_eq!((&body["id"], body.get("c8y_Reading")), (&id, None), "{body}");
    }
    consumer.close().await;

    // A newer version is not followed, and a start changes nothing.
    upload(&gateway, "by-type", &component("faulty/loop")).await.expect(201);
    gateway.restart().await;
    let path = format!("/notification2/subscriptions/{}", made.json()["id"].as_str().unwrap());
    assert_eq!(gateway.get(&path).await.expect(200).text(), text);
    let shown = gateway.get(&format!("{PATH}/by-type")).await.expect(200).json();
    let users: Vec<_> = shown["versions"].as_array().unwrap().iter().map(|version| &version["subscriptions"]).collect();
    assert_eq!(users, [&json!(0), &json!(1), &json!(0)]);
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    let measured = gateway.measure(&device, "1.50", 5).await;
    assert_eq!(consumer.receive().await.json()["id"], measured["id"]);
}

#[tokio::test]
async fn what_subscriptions_use_is_not_deleted() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    for _ in 0..2 {
        upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    }
    let mut ids = Vec::new();
    for number in 1..=11 {
        let extension = json!({"filters": [{"plugin": "by-type", "settings": "t"}]});
        let made = gateway.subscribe(&with(&format!("Sub{number}"), &device, extension)).await;
        ids.push(made["id"].as_str().unwrap().to_owned());
    }
    let version = format!("{PATH}/by-type/versions/2");
    for path in [version.as_str(), &format!("{PATH}/by-type")] {
        let refused = gateway.delete(path).await;
        assert_eq!(refused.json()["error"], "plugin/In Use");
        let text = refused.error(409, "Version 2 of plugin 'by-type' is used by subscriptions: ");
        assert!(text.contains(&format!("{} (Sub1)", ids[0])) && text.ends_with(" and 1 more."), "{text}");
    }
    gateway.delete(&format!("{PATH}/by-type/versions/1")).await.expect(204);
    gateway.delete(&format!("/notification2/subscriptions?source={device}")).await.expect(204);
    gateway.delete(&version).await.expect(204);
}

#[tokio::test]
async fn what_cannot_be_used_is_refused_and_says_what_to_change() {
    let gateway = Gateway::start().await;
    let wasm = component("type-filter");
    let core = b"\0asm\x01\0\0\0".to_vec();
    for (query, body, text) in [
        ("mine", core, "core module"),
        ("mine", b"hello".to_vec(), "no WebAssembly component"),
        ("mine", wasm[..wasm.len() / 2].to_vec(), "The plugin cannot be used: "),
        ("mine", Vec::new(), "no WebAssembly component"),
        ("Mine", wasm.clone(), "name: must have 1 to 64 small letters"),
        ("1st", wasm.clone(), "name: "),
        ("", wasm.clone(), "name: must name the plugin"),
        ("type-filter", wasm.clone(), "is built in"),
        ("mine&world=transform", wasm.clone(), "world: is 'transform', and the component is for the world 'filter'"),
        ("mine&world=x", wasm.clone(), "world: must be 'filter' or 'transform'"),
        (
            "mine&settings={",
            wasm.clone(),
            "settings: must be JSON text: EOF while parsing an object at line 1 column 1",
        ),
        ("mine&setting={}", wasm.clone(), "setting: is not a parameter"),
        (
            "mine&settings={}",
            component("fragments-to-copy"),
            "settings: fragmentsToCopy: an array of names is expected",
        ),
    ] {
        upload(&gateway, query, &body).await.error(422, text);
    }
    let post = || gateway.call("POST", &format!("{PATH}?name=mine"));
    post().body("application/json", wasm.clone()).await.error(415, "application/wasm");
    post().body("text/javascript", "x").await.error(422, "world: must say");
    gateway.get(&format!("{PATH}/mine")).await.error(404, "no plugin 'mine'");
    // Nothing was used up.
    assert_eq!(upload(&gateway, "mine&settings=true", &wasm).await.expect(201).json()["version"], 1);
    let other = upload(&gateway, "mine", &component("fragments-to-copy")).await;
    other.error(422, "name: is that of a filter, in version 1; this is a transform");
}

#[tokio::test]
async fn a_subscription_that_cannot_run_is_refused_where_it_is_wrong() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    upload(&gateway, "cut", &component("fragments-to-copy")).await.expect(201);
    for (extension, text) in [
        (json!({"filters": [{"plugin": "none"}]}), "tidegate.filters[0].plugin: There is no plugin 'none'."),
        (
            json!({"filters": [{"plugin": "by-type", "version": 2}]}),
            "tidegate.filters[0].plugin: There is no plugin 'by-type' in version 2.",
        ),
        (
            json!({"filters": [{"plugin": "by-type"}, {"plugin": "cut", "settings": ["a"]}]}),
            "tidegate.filters[1].plugin: 'cut' is a transform, and this takes a filter",
        ),
        (
            json!({"transforms": [{"plugin": "cut", "settings": {}}]}),
            "tidegate.transforms[0].settings: fragmentsToCopy: an array of names is expected",
        ),
        (json!({"transforms": [{"plugin": "fragments-to-copy"}]}), "tidegate.transforms[0]: stands for"),
        (
            json!({"transforms": [{"plugin": "fragments-to-copy", "settings": ["a"]}]}),
            "tidegate.transforms[0]: stands for 'fragmentsToCopy', and has neither version nor settings",
        ),
        (json!({"filters": [{"plugin": "type-filter"}]}), "tidegate.filters[0].plugin: stands for"),
        (
            json!({"filters": [{"plugin": "by-type", "settings": "x".repeat(40_000)}]}),
            "tidegate.filters[0].settings: the settings are longer than",
        ),
    ] {
        gateway.post("/notification2/subscriptions", &with("Sub1", &device, extension)).await.error(422, text);
    }
    let twice =
        r#"{"context":"tenant","subscription":"s","tidegate":{"filters":[{"plugin":"by-type","plugin":"none"}]}}"#;
    let call = gateway.call("POST", "/notification2/subscriptions").body("application/json", twice);
    call.await.error(422, "tidegate.filters[0].plugin: occurs twice");
    assert_eq!(gateway.get("/notification2/subscriptions").await.json()["subscriptions"], json!([]));
}

#[tokio::test]
async fn plugins_belong_to_their_tenant_and_go_with_it() {
    let mut gateway = Gateway::start().await;
    let keeper = gateway.tenant("plant1").await;
    let wasm = component("type-filter");
    let own = upload(&gateway, "by-type", &wasm).user(&keeper, PASSWORD).await.expect(201).json();
    assert_eq!(own["author"], "keeper");
    for path in ["by-type", "by-type/versions/1", "by-type/versions/1/wasm"] {
        gateway.get(&format!("{PATH}/{path}")).await.error(404, "no plugin 'by-type'");
    }
    gateway.delete(&format!("{PATH}/by-type/versions/1")).await.error(404, "");
    let device = gateway.device("pump").await;
    let foreign = with("Sub1", &device, json!({"filters": [{"plugin": "by-type"}]}));
    gateway.post("/notification2/subscriptions", &foreign).await.error(422, "There is no plugin 'by-type'.");

    // Roles: who manages subscriptions reads, who manages plugins does both.
    gateway.add_user("plant1", "subscriber", "ROLE_NOTIFICATION_2_ADMIN").await;
    gateway.add_user("plant1", "author", "ROLE_TIDEGATE_PLUGIN_ADMIN").await;
    for (user, status) in [("plant1/subscriber", 403), ("plant1/author", 201)] {
        upload(&gateway, "by-type", &wasm).user(user, PASSWORD).await.expect(status);
        gateway.get(&format!("{PATH}/by-type")).user(user, PASSWORD).await.expect(200);
    }
    gateway.delete("/tidegate/v1/tenants/plant1").await.expect(204);
    gateway.stop().await;
    let mut database = gateway.database().await;
    for table in ["plugin", "plugin_name"] {
        let count: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {table}")))
            .fetch_one(&mut database)
            .await
            .unwrap();
        assert_eq!(count, 0, "{table}");
    }
}

#[tokio::test]
async fn compiled_code_goes_with_the_last_version_of_its_bytes() {
    let mut gateway = Gateway::start().await;
    let built_in = gateway.compiled();
    let [one, two] = [gateway.tenant("plant1").await, gateway.tenant("plant2").await];
    let wasm = filter_with("shared");
    for user in [&one, &one, &two] {
        upload(&gateway, "by-type", &wasm).user(user, PASSWORD).await.expect(201);
    }
    assert_eq!(gateway.compiled().len(), built_in.len() + 1, "equal bytes are compiled once");
    let delete = |user: &str, path: &str| gateway.delete(&format!("{PATH}/by-type{path}")).user(user, PASSWORD);
    delete(&one, "/versions/1").await.expect(204);
    delete(&one, "").await.expect(204);
    assert_eq!(gateway.compiled().len(), built_in.len() + 1, "another tenant has them");
    let mut subscription = of_tenant("Sub1", &["measurements"]);
    subscription["tidegate"] = json!({"filters": [{"plugin": "by-type", "settings": 1}]});
    gateway.post("/notification2/subscriptions", &subscription).user(&two, PASSWORD).await.expect(201);
    gateway.restart().await;
    assert_eq!(gateway.metric("tidegate_plugin_compilations_total").await, 0.0, "it is still there");
    let subscriptions = gateway.get("/notification2/subscriptions").user(&two, PASSWORD).await.expect(200).json();
    let id = subscriptions["subscriptions"][0]["id"].as_str().unwrap();
    gateway.delete(&format!("/notification2/subscriptions/{id}")).user(&two, PASSWORD).await.expect(204);
    gateway.delete(&format!("{PATH}/by-type")).user(&two, PASSWORD).await.expect(204);
    assert_eq!(gateway.compiled(), built_in);

    // With their tenant they go as well.
    upload(&gateway, "by-type", &wasm).user(&two, PASSWORD).await.expect(201);
    gateway.delete("/tidegate/v1/tenants/plant2").await.expect(204);
    assert_eq!(gateway.compiled(), built_in);
}

#[tokio::test]
async fn a_tenant_keeps_so_many_versions_and_bytes() {
    let wasm = component("type-filter");
    let gateway = Gateway::with(&format!(
        "[plugins]\nversions_per_tenant = 2\nmax_bytes = 70000\ntenant_bytes = {}\n",
        wasm.len() * 2
    ))
    .await;
    assert!(wasm.len() < 70_000);
    upload(&gateway, "one", &wasm).await.expect(201);
    upload(&gateway, "two", &wasm).await.expect(201);
    upload(&gateway, "one", &wasm).await.error(422, "at most 2 versions of plugins (plugins.versions_per_tenant)");
    gateway.delete(&format!("{PATH}/two")).await.expect(204);
    upload(&gateway, "two", &vec![b'x'; 69_999]).await.error(422, "plugins.tenant_bytes");
    upload(&gateway, "two", &vec![b'x'; 70_001]).await.error(413, "at most 70000 bytes (plugins.max_bytes).");
    upload(&gateway, "two", &wasm).await.expect(201);
    let keeper = gateway.tenant("plant1").await;
    upload(&gateway, "one", &wasm).user(&keeper, PASSWORD).await.expect(201);
}

// Numbers are kept for names whose versions are gone, so that their number is bounded.
#[tokio::test]
async fn a_tenant_uses_so_many_names() {
    let mut gateway = Gateway::start().await;
    let wasm = component("type-filter");
    upload(&gateway, "one", &wasm).await.expect(201);
    gateway.stop().await;
    let mut database = gateway.database().await;
    let names = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < 9999)
                 INSERT INTO plugin_name SELECT 'edge', 'n' || i, 1 FROM n";
    sqlx::query(names).execute(&mut database).await.unwrap();
    drop(database);
    gateway.restart_process().await;
    upload(&gateway, "two", &wasm).await.error(422, "name: must be one that was used before");
    assert_eq!(upload(&gateway, "one", &wasm).await.expect(201).json()["version"], 2);
    assert_eq!(upload(&gateway, "n1", &wasm).await.expect(201).json()["version"], 2);
}

#[tokio::test]
async fn uploads_at_the_same_time_are_versions_of_their_own() {
    let gateway = Gateway::start().await;
    let wasm = component("type-filter");
    let upload = || upload(&gateway, "by-type", &wasm).into_future();
    let (a, b, c) = tokio::join!(upload(), upload(), upload());
    let mut versions = [a, b, c].map(|answer| answer.expect(201).json()["version"].as_u64().unwrap());
    versions.sort_unstable();
    assert_eq!(versions, [1, 2, 3]);
}

// The database was changed by other means: that must not keep the gateway from starting.
#[tokio::test]
async fn a_gateway_starts_without_a_plugin_that_its_subscriptions_name() {
    let mut gateway = Gateway::start().await;
    let (needs, plain) = (gateway.device("needs").await, gateway.device("plain").await);
    upload(&gateway, "by-type", &component("type-filter")).await.expect(201);
    let extension = json!({"filters": [{"plugin": "by-type", "settings": "t"}]});
    let made = gateway.subscribe(&with("Needs", &needs, extension)).await;
    gateway.subscribe(&forwarded("Plain", &plain)).await;
    gateway.consumer("Plain", "subA").await.close().await;
    gateway.stop().await;
    let mut database = gateway.database().await;
    sqlx::query("DELETE FROM plugin").execute(&mut database).await.unwrap();
    drop(database);
    gateway.restart_process().await;
    let path = format!("/notification2/subscriptions/{}", made["id"].as_str().unwrap());
    assert_eq!(gateway.get(&path).await.expect(200).json(), made);
    assert!(gateway.stderr().contains("by-type"), "the log says which:\n{}", gateway.stderr());
    let mut consumer = gateway.reconnect("Plain", "subA").await;
    gateway.measure(&plain, "t", 1).await;
    assert_eq!(value_of(&consumer.receive().await.json()), 1);
}

// After a restore there is no compiled code, and the interpreter of scripts takes seconds to compile.
#[tokio::test]
async fn a_start_holds_the_messages_of_plugins_that_are_still_to_be_compiled() {
    const TOPICS: [&str; 4] = ["Drop", "Pass", "Canary", "Plain"];
    let mut gateway = Gateway::start().await;
    for remainder in [1, 0] {
        let text = format!("(message) => message.body.c8y_Reading.R.value % 2 === {remainder}");
        let upload = gateway.call("POST", &format!("{PATH}?name=some&world=filter")).body("text/javascript", text);
        upload.await.expect(201);
    }
    let some = |version: u32| json!([{"plugin": "some", "version": version}]);
    let (device, mut ids) = (gateway.device("pump").await, Vec::new());
    for (topic, extension) in TOPICS.into_iter().zip([
        json!({"filters": some(1), "onFault": "drop"}),
        json!({"filters": some(1), "onFault": "pass"}),
        json!({"filters": some(1)}),
        json!({}),
    ]) {
        let made = gateway.subscribe(&with(topic, &device, extension)).await;
        ids.push(made["id"].as_str().unwrap().to_owned());
        gateway.consumer(topic, "subA").await.close().await;
    }
    let canary = format!("/tidegate/v1/subscriptions/{}/canary", ids[2]);
    gateway.put(&canary, &json!({"plugin": "some", "version": 2, "share": 1})).await.expect(200);

    // Also when it is killed meanwhile.
    for first in [0, 10] {
        gateway.kill9();
        fs::remove_dir_all(gateway.data().join("plugin-cache")).unwrap();
        gateway.restart_process().await;
        for value in first..first + 10 {
            gateway.measure(&device, "t", value).await;
        }
        for topic in ["Drop", "Pass", "Canary"] {
            let topic = gateway.get(&format!("/tidegate/v1/topics/persistent/{topic}")).await.expect(200).json();
            assert_eq!(topic["figures"]["heldMessages"], first + 10, "nothing is compiled yet: {topic}");
        }
        let message = json!({"body": measurement(&device, "t", 0)});
        let path = format!("/tidegate/v1/subscriptions/{}/explain", ids[0]);
        let explained = gateway.post(&path, &message).await.expect(200).json();
        let fault = &explained["steps"][0]["fault"]["kind"];
        assert_eq!((&explained["outcome"], fault), (&json!("held"), &json!("loading")), "{explained}");
    }
    let mut consumers = Vec::new();
    for topic in TOPICS {
        consumers.push(gateway.reconnect(topic, "subA").await);
    }
    for value in 0..20 {
        assert_eq!(value_of(&consumers[3].receive().await.json()), value, "others flow");
    }
    let expected = |topic: usize, value: &u64| topic == 3 || value % 2 == u64::from(topic < 2);
    for (topic, consumer) in consumers.iter_mut().enumerate().take(3) {
        for value in (0..20).filter(|value| expected(topic, value)) {
            assert_eq!(value_of(&consumer.receive().await.json()), value, "{}", TOPICS[topic]);
        }
    }
    for value in 20..30 {
        gateway.measure(&device, "t", value).await;
    }
    for (topic, consumer) in consumers.iter_mut().enumerate() {
        for value in (20..30).filter(|value| expected(topic, value)) {
            assert_eq!(value_of(&consumer.receive().await.json()), value, "{}", TOPICS[topic]);
        }
        assert_eq!(consumer.frames_until_pong().await, 0, "{}: nothing comes twice", TOPICS[topic]);
    }
    let compared = gateway.get(&canary).await.expect(200).json();
    assert!(compared.get("rolledBack").is_none() && compared["comparison"]["canary"]["faults"] == 0, "{compared}");
}

// A large component takes a small box minutes to compile: what it has compiled before goes on meanwhile.
#[tokio::test]
async fn a_start_does_not_let_compiled_plugins_wait_for_one_that_is_not() {
    let mut gateway = Gateway::start().await;
    upload(&gateway, "compiled", &component("threshold")).await.expect(201);
    let script =
        gateway.call("POST", &format!("{PATH}?name=script&world=filter")).body("text/javascript", "() => true");
    script.await.expect(201);
    let device = gateway.device("pump").await;
    // In the order in which they would be loaded.
    let settings = json!({"value": "/c8y_Reading/R/value", "above": 0});
    for (topic, filter) in
        [("Script", json!({"plugin": "script"})), ("Compiled", json!({"plugin": "compiled", "settings": settings}))]
    {
        gateway.subscribe(&with(topic, &device, json!({"filters": [filter]}))).await;
        gateway.consumer(topic, "subA").await.close().await;
    }
    gateway.stop().await;
    // By far the largest code is that of the interpreter of scripts.
    let size = |path: &std::path::PathBuf| fs::metadata(path).unwrap().len();
    let files = fs::read_dir(gateway.data().join("plugin-cache")).unwrap().map(|file| file.unwrap().path());
    fs::remove_file(files.max_by_key(size).unwrap()).unwrap();
    gateway.restart_process().await;
    gateway.measure(&device, "t", 1).await;
    assert_eq!(value_of(&gateway.reconnect("Compiled", "subA").await.receive().await.json()), 1);
    let topic = gateway.get("/tidegate/v1/topics/persistent/Script").await.expect(200).json();
    assert_eq!(topic["figures"]["heldMessages"], 1, "the script is still to be compiled: {topic}");
    assert_eq!(value_of(&gateway.reconnect("Script", "subA").await.receive().await.json()), 1);
}

/// A component that holds a core module of so many functions, each of which stirs its parameter so often.
fn stirring(functions: usize, times: usize) -> Vec<u8> {
    // x = rotl(x, 5) ^ x, from no locals to the result.
    let stir = [0x20, 0, 0x41, 5, 0x77, 0x20, 0, 0x73, 0x21, 0];
    let body = with_length(&[&[0], &stir.repeat(times)[..], &[0x20, 0, 0x0b]].concat());
    let module = [
        b"\0asm\x01\0\0\0".to_vec(),
        section(1, &[1, 0x60, 1, 0x7f, 1, 0x7f]),
        section(3, &[leb(functions), vec![0; functions]].concat()),
        section(10, &[leb(functions), body.repeat(functions)].concat()),
    ];
    [b"\0asm\x0d\0\x01\0".to_vec(), section(1, &module.concat())].concat()
}

// "a module that takes Cranelift long to compile": it costs what a compiler may use, and nothing else.
#[tokio::test]
async fn the_compiler_may_use_so_much_time_and_memory() {
    let sound = component("type-filter");
    // Longer than the limit allows, and not: what compiles goes on to be refused for what it is not.
    let small = stirring(1, 10);
    for (limit, large) in
        [("compile_seconds = 1", stirring(200, 2_000)), ("compile_bytes = 134217728", stirring(1, 100_000))]
    {
        let gateway = Gateway::with(&format!("[plugins]\n{limit}\n")).await;
        let text = upload(&gateway, "mine", &large).await.error(422, "the compiler gave up on it");
        assert!(text.contains("plugins.compile_seconds") && text.contains("plugins.compile_bytes"), "{limit}: {text}");
        let text = upload(&gateway, "mine", &small).await.error(422, "The plugin cannot be used");
        assert!(!text.contains("gave up"), "{limit}: {text}");
        upload(&gateway, "mine", &sound).await.expect(201);
    }
}

#[tokio::test]
async fn a_component_may_have_so_many_core_instances() {
    let gateway = Gateway::with("[plugins]\nmax_instances = 10\n").await;
    upload(&gateway, "mine", &component("threshold")).await.expect(201);
    // A script brings its interpreter along, which has one more.
    let script =
        gateway.call("POST", &format!("{PATH}?name=script&world=filter")).body("text/javascript", "() => true");
    script.await.error(422, "more core instances than it may (plugins.max_instances)");
}

// Settings that never end are tried beside the lock that subscriptions are made under.
#[tokio::test]
async fn settings_that_never_end_hold_up_no_other_tenant() {
    const LOOPS: usize = 30;
    let (gateway, _components) = faulty("type-filter", "loop-start", "").await;
    let keeper = gateway.tenant("plant1").await;
    let device = gateway.device("pump").await;
    let mut looping = of_tenant("Sub1", &["measurements"]);
    looping["subscriptionFilter"]["typeFilter"] = json!("'t'");
    let mut looping_ones = JoinSet::new();
    for _ in 0..LOOPS {
        let call = gateway.post("/notification2/subscriptions", &looping).user(&keeper, PASSWORD);
        looping_ones.spawn(call.into_future());
    }
    looping_ones.join_next().await.unwrap().unwrap().error(500, "longer than it may");
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let mut shaped = forwarded("Sub2", &device);
    shaped["fragmentsToCopy"] = json!(["c8y_Reading"]);
    gateway.subscribe(&shaped).await;
    let mut ended = 1;
    while let Some(answer) = looping_ones.try_join_next() {
        answer.unwrap().error(500, "longer than it may");
        ended += 1;
    }
    assert!(ended < LOOPS / 2, "{ended} of {LOOPS} came first");
}

#[tokio::test]
async fn plugins_are_managed_from_the_terminal() {
    let gateway = Gateway::with("[plugins]\nmax_bytes = 3000000\n").await;
    let file = |name: &str| gateway.path(name);
    let wasm = component("type-filter");
    fs::write(file("hot_pumps.wasm"), &wasm).unwrap();
    let url = format!("http://{}", gateway.addr);
    let env = [("TIDEGATE_URL", &*url), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)];
    let run = async |arguments: &str| {
        let arguments: Vec<_> = ["plugin"].into_iter().chain(arguments.split(' ')).collect();
        gateway.command(&arguments, &env, "plugin").await
    };
    let (done, out, error) = run("upload hot_pumps.wasm").await;
    assert!(done && out.contains("name: hot-pumps\n") && out.contains("version: 1\n"), "{out}{error}");
    assert!(run("upload hot_pumps.wasm --name other --settings true").await.0);
    let (_, out, _) = run("list").await;
    assert!(out.lines().any(|line| line.starts_with("hot-pumps") && line.contains("filter")), "{out}");
    assert!(out.lines().any(|line| line.starts_with("type-filter") && line.contains("built-in")), "{out}");
    let (_, out, _) = run("show hot-pumps --version 1 --json").await;
    let shown: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(shown, gateway.get(&format!("{PATH}/hot-pumps/versions/1")).await.json());
    let (done, _, error) = run("download hot-pumps").await;
    assert!(done && fs::read(file("hot-pumps.wasm")).unwrap() == wasm, "{error}");
    let (done, _, error) = run("download hot-pumps").await;
    assert!(!done && error.contains("exists already"), "{error}");
    assert!(run("upload hot_pumps.wasm").await.0);
    let (_, out, error) = run("show hot-pumps --version latest").await;
    assert!(out.contains("version: 2\n"), "{out}{error}");
    assert!(run("download hot-pumps --version latest --out newest.wasm").await.0);
    assert!(fs::read(file("newest.wasm")).unwrap() == wasm);
    for (arguments, text) in [
        ("show hot-pumps --version new", "a version is a number from 1 on, or 'latest'"),
        ("download threshold", "'threshold' is built in, and has no versions."),
        ("show none --version latest", "There is no plugin 'none'."),
    ] {
        let (done, _, error) = run(arguments).await;
        assert!(!done && error.contains(text), "{arguments}: {error}");
    }
    fs::write(file("hot.js"), "(message) => true").unwrap();
    let (done, _, error) = run("upload hot.js").await;
    assert!(!done && error.contains("--world must say whether the script is a filter or a transform"), "{error}");
    assert!(run("delete hot-pumps --version latest").await.0);
    fs::write(file("large.wasm"), vec![0; 40_000_000]).unwrap();
    // The answer is there before the gateway stops reading, and often before all is written.
    for _ in 0..5 {
        let (done, _, error) = run("upload large.wasm").await;
        assert!(!done && error.ends_with("at most 3000000 bytes (plugins.max_bytes).\n"), "{error}");
    }
    assert!(run("delete hot-pumps --version 1").await.0);
    let (done, _, error) = run("show hot-pumps").await;
    assert!(!done && error.contains("There is no plugin 'hot-pumps'."), "{error}");
}
