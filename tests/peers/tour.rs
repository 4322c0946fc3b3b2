//! Each client ingests and reads back all that its users would, and the listeners of both others hear of each change.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::harness::{Authority, Gateway};
use crate::peer::{Peer, Site};

/// What a script finds on its way, the same with every client.
fn findings() -> Vec<(&'static str, Value)> {
    vec![
        ("own subscription", json!(["Tour", "mo", true])),
        ("subscriptions", json!(2)),
        ("subscriptions of the device", json!([["managedobjects", "measurements"]])),
        ("device", json!(["pump 2", "c8y_Pump", "admin", 8])),
        ("children", json!([["valve"], ["hall"], ["note"]])),
        ("assets", json!([])),
        ("asset is gone", json!(true)),
        ("by type", json!(["pump 2"])),
        ("by query", json!(["pump 2"])),
        ("devices", json!(["pump 2", "valve"])),
        ("count of devices", json!(2)),
        ("by external id", json!("pump 2")),
        ("external ids", json!(["SN-1", "line/4:pump"])),
        ("external ids left", json!(["line/4:pump"])),
        ("measurement", json!([1])),
        ("measurements by page", json!([1, 2, 3, 4])),
        // A range ends before `dateTo`.
        ("measurements in between", json!([2, 3])),
        ("last measurement", json!([4])),
        ("count of measurements", json!(4)),
        ("measurement is gone", json!(true)),
        ("event", json!(["closed", false])),
        ("events", json!(["closed"])),
        ("count of events", json!(1)),
        ("event is gone", json!(true)),
        ("alarm", json!([true, 2, "ACTIVE", "MAJOR"])),
        ("count of alarms", json!(1)),
        ("alarms", json!(["CLEARED"])),
        ("alarm is gone", json!(true)),
        ("operation", json!(["PENDING", "restart"])),
        ("pending operations", json!(0)),
        ("operations", json!(["SUCCESSFUL"])),
        ("last operation", json!("restart")),
        ("count of operations", json!(1)),
        ("operation is gone", json!(true)),
        ("device is gone", json!(true)),
        ("subscriptions left", json!(1)),
        ("subscriptions at last", json!(0)),
    ]
}

/// The notifications of the tour: the object that one is about, what line 2 calls it, the action, and members of the body. The
/// tenant's subscription tells of new objects, the device's of its changes and its end.
fn notifications() -> Vec<(&'static str, &'static str, &'static str, Value)> {
    let measured = |value: u64| json!({"type": "t", "c8y_Reading": {"R": {"value": value, "unit": "C"}}});
    vec![
        ("pump", "managedobjects", "CREATE", json!({"type": "c8y_Pump", "c8y_Serial": {"number": 7}})),
        ("pump", "managedobjects", "UPDATE", json!({"name": "pump 2", "c8y_Serial": {"number": 8}})),
        ("valve", "managedobjects", "CREATE", json!({"type": "c8y_Valve", "c8y_IsDevice": {}})),
        ("hall", "managedobjects", "CREATE", json!({"owner": "admin"})),
        ("note", "managedobjects", "CREATE", json!({"owner": "admin"})),
        ("pump", "measurements", "CREATE", measured(1)),
        ("pump", "measurements", "CREATE", measured(2)),
        ("pump", "measurements", "CREATE", measured(3)),
        ("pump", "measurements", "CREATE", measured(4)),
        ("pump", "measurements", "DELETE", json!({})),
        ("pump", "events", "CREATE", json!({"type": "door", "text": "opened", "c8y_Door": {"open": true}})),
        ("pump", "events", "UPDATE", json!({"type": "door", "text": "closed", "c8y_Door": {"open": false}})),
        ("pump", "events", "DELETE", json!({})),
        ("pump", "managedobjects", "UPDATE", json!({"c8y_ActiveAlarmsStatus": {"major": 1}})),
        ("pump", "alarms", "CREATE", json!({"text": "too hot", "count": 1, "status": "ACTIVE", "severity": "MAJOR"})),
        ("pump", "alarms", "UPDATE", json!({"text": "too hot", "count": 2, "status": "ACTIVE"})),
        ("pump", "alarms", "UPDATE", json!({"count": 2, "status": "ACKNOWLEDGED"})),
        ("pump", "managedobjects", "UPDATE", json!({"c8y_ActiveAlarmsStatus": {}})),
        ("pump", "alarms", "UPDATE", json!({"count": 2, "status": "CLEARED"})),
        ("pump", "operations", "CREATE", json!({"status": "PENDING", "description": "restart", "c8y_Restart": {}})),
        ("pump", "operations", "UPDATE", json!({"status": "EXECUTING", "description": "restart"})),
        ("pump", "operations", "UPDATE", json!({"status": "SUCCESSFUL", "description": "restart"})),
        ("pump", "managedobjects", "DELETE", json!({})),
    ]
}

fn assert_notified(messages: &[Value], url: &str) {
    let expected = notifications();
    let told: Vec<_> = messages.iter().map(|message| (&message["source"], &message["action"])).collect();
    assert_eq!(messages.len(), expected.len(), "{told:?}");
    // Managed objects by name, and what was created last of each kind.
    let (mut ids, mut created) = (HashMap::new(), HashMap::new());
    for (message, (subject, api, action, members)) in messages.iter().zip(expected) {
        let body = &message["body"];
        if (api, action) == ("managedobjects", "CREATE") {
            assert_eq!(body["name"], subject);
            ids.insert(subject, body["id"].as_str().unwrap());
        }
        let source = format!("/edge/{api}/{}", ids[subject]);
        assert_eq!((&message["source"], &message["action"]), (&json!(source), &json!(action)), "{told:?}");
        for (name, value) in members.as_object().unwrap() {
            assert_eq!(&body[name], value, "{name} in {body}");
        }
        if action == "DELETE" {
            let id = if api == "managedobjects" { ids[subject] } else { created[api] };
            assert_eq!(body["id"], id, "{api}");
            continue;
        }
        if api != "managedobjects" {
            let device = if api == "operations" { &body["deviceId"] } else { &body["source"]["id"] };
            assert_eq!(device, ids[subject], "{body}");
            // The one that is deleted is the first of them.
            let first = *created.entry(api).or_insert_with(|| body["id"].as_str().unwrap());
            assert!(action == "CREATE" || body["id"] == first, "{body}");
        }
        assert!(body["self"].as_str().unwrap().starts_with(&format!("{url}/")), "{body}");
    }
}

async fn tour(script: &str, is_secure: bool) {
    let authority = Authority::new();
    let gateway = Gateway::with(&authority.config()).await;
    let site = if is_secure { Site::secure(&gateway, &authority) } else { Site::plain(&gateway) };
    let mut listeners = Vec::new();
    for client in ["c8y_api", "pyc8y"] {
        listeners.push(Peer::listener(&site, client, "Tour", &client.replace('_', ""), "exclusive").await);
    }

    let mut tour = Peer::run(&site, script, &[], &[]);
    tour.ended().await;
    let found: Vec<_> =
        tour.events("found").iter().map(|event| (event["what"].clone(), event["value"].clone())).collect();
    let expected: Vec<_> = findings().into_iter().map(|(what, value)| (json!(what), value)).collect();
    assert_eq!(found, expected);

    for (listener, subscriber) in listeners.iter_mut().zip(["c8yapi", "pyc8y"]) {
        listener.until("acked", notifications().len()).await;
        listener.stop().await;
        assert_notified(&listener.events("message"), site.url());
        let token = gateway.token("Tour", subscriber).await;
        assert!(gateway.unsubscribe(&token).await.status >= 500, "{subscriber} had unsubscribed");
    }
}

#[tokio::test]
async fn c8y_api_ingests_and_listens() {
    tour("c8y_api_tour.py", false).await;
}

#[tokio::test]
async fn pyc8y_ingests_and_listens() {
    tour("pyc8y_tour.py", false).await;
}

#[tokio::test]
async fn c8y_client_ingests() {
    tour("c8y_client_tour.js", false).await;
}

#[tokio::test]
async fn c8y_api_ingests_and_listens_over_tls_with_a_private_authority() {
    tour("c8y_api_tour.py", true).await;
}

#[tokio::test]
async fn pyc8y_ingests_and_listens_over_tls_with_a_private_authority() {
    tour("pyc8y_tour.py", true).await;
}

#[tokio::test]
async fn c8y_client_ingests_over_tls_with_a_private_authority() {
    tour("c8y_client_tour.js", true).await;
}
