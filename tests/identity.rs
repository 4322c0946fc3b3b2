//! External ids (Cumulocity OpenAPI, "External IDs").

use serde_json::{Value, json};

use crate::harness::{Gateway, PASSWORD};

const MISSING: &str = "External ID not found";

fn path(device: &str) -> String {
    format!("/identity/globalIds/{device}/externalIds")
}

#[tokio::test]
async fn an_external_id_is_bound_found_and_unbound() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let base = format!("http://{}", gateway.addr);

    let id = json!({"type": "c8y_Serial", "externalId": "4711"});
    let created = gateway.post(&path(&device), &id).await.expect(201);
    let link = format!("{base}/identity/externalIds/c8y_Serial/4711");
    let expected = json!({
        "externalId": "4711", "type": "c8y_Serial", "self": link,
        "managedObject": {"id": device, "self": format!("{base}/inventory/managedObjects/{device}")},
    });
    assert_eq!(created.header("location"), Some(link.as_str()));
    assert_eq!(created.json(), expected);
    assert_eq!(gateway.get("/identity/externalIds/c8y_Serial/4711").await.expect(200).json(), expected);
    let all = json!({"externalIds": [expected], "self": format!("{base}{}", path(&device))});
    assert_eq!(gateway.get(&path(&device)).await.expect(200).json(), all);
    // Without `Accept` there is no body.
    let quiet = gateway.call("POST", &path(&device)).json(&json!({"type": "a", "externalId": "b"})).await.expect(201);
    assert!(!quiet.header("location").unwrap().is_empty());

    assert!(gateway.delete("/identity/externalIds/c8y_Serial/4711").await.expect(204).body.is_empty());
    for call in
        [gateway.get("/identity/externalIds/c8y_Serial/4711"), gateway.delete("/identity/externalIds/c8y_Serial/4711")]
    {
        let refused = call.await;
        assert_eq!(refused.json()["error"], "identity/Not Found");
        refused.error(404, MISSING);
    }
    gateway.get(&format!("/inventory/managedObjects/{device}")).await.expect(200);
}

#[tokio::test]
async fn values_with_slashes_and_colons_come_encoded_or_not() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    for (value, encoded) in [
        ("device:main/service a+b", "device%3Amain%2Fservice%20a%2Bb"),
        ("a/b:c", "a/b:c"),
        ("50%", "50%25"),
        ("ü\"?#", "%C3%BC%22%3F%23"),
    ] {
        let id = json!({"type": "c8y/Type", "externalId": value});
        let created = gateway.post(&path(&device), &id).await.expect(201).json();
        let link = created["self"].as_str().unwrap();
        let own = link.strip_prefix(&format!("http://{}", gateway.addr)).unwrap();
        for path in [own, &format!("/identity/externalIds/c8y%2FType/{encoded}")] {
            let found = gateway.get(path).await.expect(200).json();
            assert_eq!(
                (&found["externalId"], &found["managedObject"]["id"]),
                (&json!(value), &json!(device)),
                "{path}"
            );
        }
        gateway.delete(own).await.expect(204);
        gateway.get(own).await.error(404, MISSING);
    }
    gateway.get("/identity/externalIds/c8y_Serial/%ff").await.error(404, MISSING);
}

#[tokio::test]
async fn an_external_id_stands_for_one_object_in_its_tenant() {
    let gateway = Gateway::start().await;
    let (one, two) = (gateway.device("one").await, gateway.device("two").await);
    let id = json!({"type": "c8y_Serial", "externalId": "4711"});
    let binds = (0..8).map(|n| gateway.post(&path(if n % 2 == 0 { &one } else { &two }), &id).send());
    let statuses: Vec<_> =
        futures_util::future::join_all(binds).await.into_iter().map(|answer| answer.unwrap().status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 201).count(), 1, "{statuses:?}");
    assert_eq!(statuses.iter().filter(|status| **status == 409).count(), 7, "{statuses:?}");
    let refused = gateway.post(&path(&two), &id).await;
    assert_eq!(refused.json()["error"], "identity/Duplicate");
    refused.error(409, "Identity already bound to a different Global ID");

    gateway.add_user("other", "boss", "*").await;
    let boss = "other/boss";
    gateway.get("/identity/externalIds/c8y_Serial/4711").user(boss, PASSWORD).await.error(404, MISSING);
    gateway.delete("/identity/externalIds/c8y_Serial/4711").user(boss, PASSWORD).await.error(404, MISSING);
    gateway.get(&path(&one)).user(boss, PASSWORD).await.error(404, "Finding device data");
    gateway.post(&path(&one), &json!({"type": "x", "externalId": "y"})).user(boss, PASSWORD).await.error(404, "");
    let theirs = gateway.post("/inventory/managedObjects", &json!({})).user(boss, PASSWORD).await.expect(201).json();
    gateway.post(&path(theirs["id"].as_str().unwrap()), &id).user(boss, PASSWORD).await.expect(201);
    gateway.get("/identity/externalIds/c8y_Serial/4711").await.expect(200);
}

#[tokio::test]
async fn bad_external_ids_are_refused_by_name() {
    let gateway = Gateway::with("[limits]\nexternal_ids_per_object = 2").await;
    let device = gateway.device("pump").await;
    for (body, text) in [
        (json!({}), "Following mandatory fields should be included: externalId,type"),
        (json!({"type": "t", "externalId": ""}), "externalId: must not be empty"),
        (json!({"type": "t".repeat(257), "externalId": "x"}), "type: is longer than 256 characters"),
        (json!({"type": "t", "externalId": 7}), "externalId: must be a string"),
        (json!({"type": "t", "externalId": "x", "colour": 1}), "colour"),
    ] {
        gateway.post(&path(&device), &body).await.error(422, text);
    }
    let bind = |value: u64| gateway.post(&path(&device), &json!({"type": "t", "externalId": value.to_string()}));
    bind(1).await.expect(201);
    bind(2).await.expect(201);
    bind(3).await.error(422, "at most 2 external ids");
    for id in ["1", "abc", "%ff"] {
        gateway.post(&path(id), &json!({"type": "t", "externalId": "4"})).await.error(404, "Finding device data");
        gateway.get(&path(id)).await.error(404, "Finding device data");
    }
    // Roles of the platform.
    gateway.add_user("edge", "reader", "ROLE_IDENTITY_READ").await;
    gateway.get(&path(&device)).user("edge/reader", PASSWORD).await.expect(200);
    gateway.get("/identity/externalIds/t/1").user("edge/reader", PASSWORD).await.expect(200);
    gateway.post(&path(&device), &json!({})).user("edge/reader", PASSWORD).await.error(403, "");
    gateway.delete("/identity/externalIds/t/1").user("edge/reader", PASSWORD).await.error(403, "");
}

#[tokio::test]
async fn external_ids_survive_a_restart_and_go_with_their_object() {
    let mut gateway = Gateway::start().await;
    let (one, two) = (gateway.device("one").await, gateway.device("two").await);
    let id = |value: &str| json!({"type": "c8y_Serial", "externalId": value});
    gateway.post(&path(&one), &id("1")).await.expect(201);
    gateway.post(&path(&two), &id("2")).await.expect(201);
    gateway.kill9();
    gateway.restart_process().await;
    gateway.get("/identity/externalIds/c8y_Serial/1").await.expect(200);
    gateway.delete(&format!("/inventory/managedObjects/{one}")).await.expect(204);
    gateway.get("/identity/externalIds/c8y_Serial/1").await.error(404, MISSING);
    gateway.get("/identity/externalIds/c8y_Serial/2").await.expect(200);
    let bound: Value = gateway.post(&path(&two), &id("1")).await.expect(201).json();
    assert_eq!(bound["managedObject"]["id"], two.as_str());
}
