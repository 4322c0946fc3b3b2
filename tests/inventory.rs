//! Managed objects (Cumulocity OpenAPI, "Managed objects").

use serde_json::json;

use crate::harness::{Consumer, Gateway, raw};

const VENDOR: &str = "application/vnd.com.nsn.cumulocity.managedobject+json";
const MISSING: &str = "Finding device data from database failed";

#[tokio::test]
async fn an_object_is_made_read_changed_and_deleted() {
    let gateway = Gateway::start().await;
    let body = json!({"name": "pump", "type": "c8y_Pump", "c8y_IsDevice": {}, "c8y_Hardware": {"model": "P1"}});
    let created = gateway.post("/inventory/managedObjects", &body).await.expect(201);
    let object = created.json();
    let id = object["id"].as_str().unwrap();
    let url = format!("http://{}/inventory/managedObjects/{id}", gateway.addr);
    assert!(id.bytes().all(|digit| digit.is_ascii_digit()), "{id}");
    assert_eq!(created.header("location"), Some(url.as_str()));
    assert_eq!(object["self"], url);
    assert_eq!(object["owner"], "admin");
    for (name, value) in body.as_object().unwrap() {
        assert_eq!(&object[name], value);
    }
    for name in ["creationTime", "lastUpdated"] {
        assert!(object[name].as_str().unwrap().ends_with('Z'), "{object}");
    }
    for name in ["childDevices", "childAssets", "childAdditions", "deviceParents", "assetParents", "additionParents"] {
        assert_eq!(object[name]["references"], json!([]), "{name}");
        assert!(object[name]["self"].as_str().unwrap().starts_with(&url), "{name}");
    }

    let path = format!("/inventory/managedObjects/{id}");
    assert_eq!(gateway.get(&path).await.expect(200).json(), object);

    let patch = json!({"name": "pump 1", "c8y_Hardware": null, "c8y_Firmware": {"version": "2"}});
    let changed = gateway.put(&path, &patch).await.expect(200).json();
    assert_eq!((&changed["id"], &changed["name"]), (&object["id"], &json!("pump 1")));
    assert_eq!(changed["type"], "c8y_Pump", "what the patch does not name stays");
    assert_eq!(changed.get("c8y_Hardware"), None, "null removes");
    assert_eq!(changed["c8y_Firmware"], json!({"version": "2"}));
    assert_eq!(changed["creationTime"], object["creationTime"]);
    assert_eq!(gateway.get(&path).await.expect(200).json(), changed);

    // What the server sets, no client can.
    let forged = gateway.put(&path, &json!({"id": "1", "self": "x", "creationTime": "2000-01-01T00:00:00Z"})).await;
    assert!(forged.status == 200 || forged.status == 422, "{}", forged.text());
    let kept = gateway.get(&path).await.expect(200).json();
    assert_eq!(
        (&kept["id"], &kept["self"], &kept["creationTime"]),
        (&object["id"], &object["self"], &object["creationTime"])
    );

    let deleted = gateway.delete(&path).await.expect(204);
    assert!(deleted.body.is_empty());
    for call in [gateway.get(&path), gateway.put(&path, &json!({"name": "x"})), gateway.delete(&path)] {
        let refused = call.await;
        assert_eq!(refused.json()["error"], "inventory/Not Found");
        refused.error(404, MISSING);
    }
}

// Without `Accept` the answer to POST and PUT has no body; with any it has one, and nobody gets 406 or 415.
#[tokio::test]
async fn the_accept_header_decides_on_the_body_and_no_media_type_is_refused() {
    let gateway = Gateway::start().await;
    let credentials = "Authorization: Basic ZWRnZS9hZG1pbjpjb3JyZWN0IGhvcnNlIGJhdHRlcnkgc3RhcGxl\r\n";
    let head = format!("HTTP/1.1\r\nHost: gateway.example\r\nConnection: close\r\n{credentials}");
    let post = format!("POST /inventory/managedObjects {head}Content-Length: 12\r\n\r\n{{\"name\":\"a\"}}");
    let answer = raw(gateway.addr, post.as_bytes()).await;
    let (top, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(top.starts_with("HTTP/1.1 201 ") && body.is_empty(), "{answer}");
    let location = top.lines().find_map(|line| line.split_once("ocation: ")).unwrap().1;
    let path = location.strip_prefix("http://gateway.example").unwrap();
    let put = format!("PUT {path} {head}Content-Length: 12\r\n\r\n{{\"name\":\"b\"}}");
    let answer = raw(gateway.addr, put.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n"), "{answer}");
    assert_eq!(gateway.get(path).await.expect(200).json()["name"], "b");

    for (accept, expected) in [
        ("application/json", "application/json"),
        (VENDOR, VENDOR),
        ("application/vnd.com.nsn.cumulocity.managedobject+json;charset=UTF-8;ver=0.9", VENDOR),
        (
            "application/vnd.com.nsn.cumulocity.error+json, application/vnd.com.nsn.cumulocity.managedobject+json",
            VENDOR,
        ),
        ("*/*", "application/json"),
        ("text/html", "application/json"),
    ] {
        let call = gateway.call("POST", "/inventory/managedObjects").header("Accept", accept);
        let answer = call.body(VENDOR, r#"{"name":"c"}"#).await.expect(201);
        assert!(answer.header("content-type").unwrap().starts_with(expected), "{accept}: {:?}", answer.headers);
        assert_eq!(answer.json()["name"], "c");
        gateway.get(path).header("Accept", accept).await.expect(200);
    }
    for content_type in
        ["application/json;charset=UTF-8", VENDOR, "text/plain", "application/x-www-form-urlencoded", "x"]
    {
        gateway.call("POST", "/inventory/managedObjects").body(content_type, "{}").await.expect(201);
    }
}

#[tokio::test]
async fn a_put_with_nothing_but_the_id_is_a_heartbeat() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let path = format!("/inventory/managedObjects/{device}");
    let before = gateway.get(&path).await.expect(200).json();
    assert_eq!(gateway.put(&path, &json!({"id": device})).await.expect(200).json(), json!({"id": device}));
    assert_eq!(gateway.get(&path).await.expect(200).json(), before);
}

#[tokio::test]
async fn bad_objects_are_422_and_name_the_field() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let object = format!("/inventory/managedObjects/{device}");
    let before = gateway.get(&object).await.expect(200).json();
    let deep = format!(r#"{{"a":{}1{}}}"#, "[".repeat(500), "]".repeat(500));
    for (body, text) in [
        ("", ""),
        ("{", ""),
        ("[]", "object"),
        ("7", "object"),
        (r#"{"name":7}"#, "name"),
        (r#"{"type":["a"]}"#, "type"),
        (r#"{"a":1,}"#, ""),
        (r#"{"a":1} x"#, ""),
        (r#"{"a":NaN}"#, ""),
        (deep.as_str(), ""),
    ] {
        for (method, path) in [("POST", "/inventory/managedObjects"), ("PUT", object.as_str())] {
            let refused = gateway.call(method, path).body("application/json", body.to_owned()).await;
            assert_eq!(refused.json()["error"], "undefined/validationError", "{method} {body}");
            refused.error(422, text);
        }
    }
    let refused =
        gateway.call("POST", "/inventory/managedObjects").body("application/json", b"{\"a\":\"\xff\"}".to_vec());
    refused.await.error(422, "");
    assert_eq!(gateway.get(&object).await.expect(200).json(), before);
}

#[tokio::test]
async fn ids_that_are_none_are_404() {
    let gateway = Gateway::start().await;
    for id in ["1", "0", "-1", "abc", "99999999999999999999999", "%00", "1001%2F", "1e3"] {
        let refused = gateway.get(&format!("/inventory/managedObjects/{id}")).await;
        assert_eq!(refused.json()["error"], "inventory/Not Found", "{id}");
        refused.error(404, MISSING);
    }
}

// Seed 000: mo context cannot announce creations; tenant context announces nothing else.
#[tokio::test]
async fn contexts_and_apis_decide_which_changes_are_told() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let subscribe = async |topic: &str, context: &str, apis: Option<&[&str]>| -> Consumer {
        let mut subscription = json!({"context": context, "subscription": topic});
        if context == "mo" {
            subscription["source"] = json!({"id": device});
        }
        if let Some(apis) = apis {
            subscription["subscriptionFilter"] = json!({"apis": apis});
        }
        gateway.subscribe(&subscription).await;
        gateway.consumer(topic, "subA").await
    };
    const SENTINEL: &str = "sentinel";
    let mut consumers = Vec::new();
    for (topic, context, apis, expected) in [
        (
            "MoAll",
            "mo",
            Some(&["*"][..]),
            &["measurements CREATE", "managedobjects UPDATE", "managedobjects DELETE"][..],
        ),
        ("MoNone", "mo", None, &["measurements CREATE", "managedobjects UPDATE", "managedobjects DELETE"]),
        ("MoInventory", "mo", Some(&["managedobjects"]), &["managedobjects UPDATE", "managedobjects DELETE"]),
        ("MoMeasurements", "mo", Some(&["measurements"]), &["measurements CREATE"]),
        ("TenantAll", "tenant", Some(&["*"]), &["managedobjects CREATE"]),
        ("TenantNone", "tenant", None, &["managedobjects CREATE"]),
        ("TenantMeasurements", "tenant", Some(&["measurements"]), &["measurements CREATE"]),
        (
            "TenantBoth",
            "tenant",
            Some(&["measurements", "managedobjects"]),
            &["managedobjects CREATE", "measurements CREATE"],
        ),
    ] {
        consumers.push((topic, subscribe(topic, context, apis).await, expected));
    }

    let other = gateway.device("other").await;
    gateway.measure(&device, "t", 1).await;
    let object = format!("/inventory/managedObjects/{device}");
    gateway.put(&object, &json!({"name": "pump 2"})).await.expect(200);
    gateway.delete(&object).await.expect(204);
    // One message that everybody gets tells that nothing else is under way.
    for (topic, ..) in &consumers {
        let both = json!(["managedobjects", "measurements"]);
        let everything = json!({
            "context": "mo", "source": {"id": other}, "subscription": topic, "subscriptionFilter": {"apis": both},
        });
        gateway.subscribe(&everything).await;
    }
    gateway.put(&format!("/inventory/managedObjects/{other}"), &json!({"name": SENTINEL})).await.expect(200);

    for (topic, consumer, expected) in &mut consumers {
        let mut seen = Vec::new();
        loop {
            let frame = consumer.receive().await;
            let body = frame.json();
            if body["name"] == SENTINEL {
                break;
            }
            let mut parts = frame.description.split('/').skip(1);
            assert_eq!(parts.next(), Some("edge"));
            let api = parts.next().unwrap();
            let subject = if frame.action == "CREATE" && api == "managedobjects" { &other } else { &device };
            assert_eq!(parts.next(), Some(subject.as_str()), "{frame:?}");
            seen.push(format!("{api} {}", frame.action));
            if frame.action == "DELETE" {
                assert_eq!(body, json!({"id": device}));
            } else if api == "managedobjects" {
                assert_eq!(body["childDevices"]["references"], json!([]), "the whole object");
            }
        }
        assert_eq!(seen, *expected, "{topic}");
    }
}
