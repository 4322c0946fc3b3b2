//! A topic that is full: what producers are told, and the alarm that tells an operator. That it fails the requests that would be
//! published to it is told in `notifications`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::{Gateway, event, eventually, of_object, of_tenant};

const EVENTS: &str = "/event/events";
const QUOTA: &str = "[backlog]\nquota_bytes = 8192";

/// An event whose message has about a kilobyte.
fn large(device: &str, number: u64) -> Value {
    event(device, &format!("t{number}"), &"x".repeat(800))
}

/// Posts events of the device until they are refused, and returns how many were not, and what the refusal said.
async fn fill(gateway: &Gateway, device: &str, mode: &str) -> (usize, String) {
    for number in 0..100 {
        let call = gateway.post(EVENTS, &large(device, number));
        let answer = call.header("X-Cumulocity-Processing-Mode", mode).await;
        if answer.status != 201 {
            return (number as usize, answer.error(500, "quota"));
        }
    }
    panic!("the topic never was full");
}

async fn total(gateway: &Gateway, list: &str) -> u64 {
    let list = gateway.get(&format!("{list}&withTotalElements=true")).await.expect(200).json();
    list["statistics"]["totalElements"].as_u64().unwrap()
}

/// The alarms about topics, by type.
async fn alarms(gateway: &Gateway) -> Vec<Value> {
    let list = gateway.get("/alarm/alarms?pageSize=100").await.expect(200).json();
    let mut alarms = list["alarms"].as_array().unwrap().clone();
    alarms.retain(|alarm| alarm["type"].as_str().unwrap().starts_with("tidegate_BacklogQuota_"));
    alarms.sort_by_key(|alarm| alarm["type"].as_str().unwrap().to_owned());
    alarms
}

// Reports, row 21: a consumer that was forgotten fills the backlog, requests of everybody fail with 500, and blind retries store
// twice what was stored already.
#[tokio::test]
async fn a_forgotten_consumer_fills_its_topic_until_it_is_unsubscribed() {
    let gateway = Gateway::with("[backlog]\nquota_bytes = 65536").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&of_object("Sub1", &device, &["events"])).await;
    let token = gateway.token("Sub1", "subA").await;
    gateway.consumer_with(&token).await.unwrap().close().await;
    let (_, said) = fill(&gateway, &device, "PERSISTENT").await;
    for part in [
        "topic 'Sub1' leaves no room",
        "of 65536 bytes are used",
        " s for consumer 'subA'; let it consume and acknowledge, unsubscribe it, or raise the quota",
        "PUT /tidegate/v1/topics/persistent/Sub1",
    ] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    let refused = large(&device, 99);
    let mine = format!("{EVENTS}?source={device}&type=t99");
    for stored in [1, 2] {
        gateway.post(EVENTS, &refused).await.error(500, "Sub1");
        assert_eq!(total(&gateway, &mine).await, stored);
    }
    // Each advice helps.
    let topic = "/tidegate/v1/topics/persistent/Sub1";
    gateway.put(topic, &json!({"quotaBytes": 70_000})).await.expect(200);
    gateway.post(EVENTS, &refused).await.expect(201);
    gateway.delete(topic).await.expect(204);
    gateway.post(EVENTS, &refused).await.error(500, "Sub1");
    gateway.unsubscribe(&token).await.expect(200);
    gateway.post(EVENTS, &refused).await.expect(201);
}

// Whatever is done at the quota: nobody's acknowledgements make room for it.
#[tokio::test]
async fn a_request_larger_than_the_quota_says_so_and_its_alarm_stays() {
    let gateway = Gateway::with("[backlog]\nquota_bytes = 500").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&of_object("Sub1", &device, &["events"])).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    gateway.post(EVENTS, &event(&device, "t", "x")).await.expect(201);
    let topic = "/tidegate/v1/topics/persistent/Sub1";
    for policy in ["park", "evict-oldest", "reject"] {
        gateway.put(topic, &json!({"onFull": policy})).await.expect(200);
        let said = gateway
            .post(EVENTS, &large(&device, 1))
            .await
            .error(500, "topic 'Sub1' leaves no room (the request needs ");
        assert!(said.contains(" bytes of a quota of 500): raise the quota (PUT "), "{policy}: {said}");
    }
    eventually("the alarm", async || (alarms(&gateway).await.len() == 1).then_some(())).await;
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let alarm = &alarms(&gateway).await[0];
    assert_eq!((&alarm["status"], &alarm["count"]), (&json!("ACTIVE"), &json!(1)));
    assert!(alarm["text"].as_str().unwrap().contains("the request needs "), "{alarm}");
    gateway.put(topic, &json!({"quotaBytes": 8192})).await.expect(200);
    eventually("it is cleared", async || (alarms(&gateway).await[0]["status"] == "CLEARED").then_some(())).await;
}

// Reports, row 22: users of the platform asked for an alarm when the quota blocks publishing.
#[tokio::test]
async fn a_full_topic_raises_one_alarm_which_is_cleared_when_there_is_room() {
    let mut gateway = Gateway::with(QUOTA).await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    gateway.subscribe(&of_object("FullA", &pump, &["events"])).await;
    gateway.subscribe(&of_object("FullB", &valve, &["events"])).await;
    // One of the full topics wants alarms, too.
    gateway.subscribe(&of_tenant("FullA", &["alarms", "managedobjects"])).await;
    gateway.subscribe(&of_tenant("Alarms", &["alarms", "managedobjects"])).await;
    let mut told = gateway.consumer("Alarms", "ops").await;
    for topic in ["FullA", "FullB"] {
        gateway.consumer(topic, "subA").await.close().await;
    }
    let (accepted, refusal) = fill(&gateway, &pump, "PERSISTENT").await;
    fill(&gateway, &valve, "TRANSIENT").await;
    // A flood of refusals is one alarm.
    for number in 0..50 {
        gateway.post(EVENTS, &large(&pump, number)).await.error(500, "FullA");
    }
    let created = told.receive().await;
    assert_eq!((created.action.as_str(), &created.json()["type"]), ("CREATE", &json!("tidegate_Gateway")));
    let source = created.json()["id"].clone();
    let mut names = Vec::new();
    for _ in 0..2 {
        let raised = told.receive().await;
        let alarm = raised.json();
        assert_eq!(
            (raised.description, raised.action),
            (format!("/edge/alarms/{}", source.as_str().unwrap()), "CREATE".to_owned())
        );
        assert_eq!((&alarm["severity"], &alarm["status"]), (&json!("MAJOR"), &json!("ACTIVE")));
        names.push(alarm["type"].as_str().unwrap().to_owned());
        if names.last().unwrap().ends_with("FullA") {
            assert_eq!(alarm["text"], refusal);
        }
    }
    names.sort();
    assert_eq!(names, ["tidegate_BacklogQuota_FullA", "tidegate_BacklogQuota_FullB"]);
    let object =
        gateway.get(&format!("/inventory/managedObjects/{}", source.as_str().unwrap())).await.expect(200).json();
    assert_eq!(object["c8y_ActiveAlarmsStatus"], json!({"major": 2}));

    // The next process knows the object and the alarms.
    told.close().await;
    gateway.restart().await;
    let mut consumer = gateway.consumer("FullA", "subA").await;
    for _ in 0..accepted {
        assert!(consumer.receive().await.description.starts_with("/edge/events/"));
    }
    consumer.close().await;
    let states = eventually("the alarm of the topic with room is cleared", async || {
        let states: Vec<_> = alarms(&gateway).await.iter().map(|alarm| alarm["status"].clone()).collect();
        (states != ["ACTIVE", "ACTIVE"]).then_some(states)
    })
    .await;
    assert_eq!(states, ["CLEARED", "ACTIVE"]);
    assert_eq!(alarms(&gateway).await.iter().map(|alarm| alarm["count"].as_u64().unwrap()).sum::<u64>(), 2);
    // However soon it is full again.
    let topic = "/tidegate/v1/topics/persistent/FullA";
    for count in [3, 4] {
        gateway.put(topic, &json!({"onFull": "reject"})).await.expect(200);
        fill(&gateway, &pump, "PERSISTENT").await;
        let raised = eventually("a new alarm", async || {
            let alarms = alarms(&gateway).await;
            (alarms.len() == count).then_some(alarms)
        })
        .await;
        assert!(raised.iter().all(|alarm| alarm["source"]["id"] == source), "{raised:?}");
        // One that gives up its oldest refuses nothing, however full it is.
        gateway.put(topic, &json!({"onFull": "evict-oldest"})).await.expect(200);
        eventually("it is cleared", async || {
            let alarms = alarms(&gateway).await;
            (alarms.iter().filter(|alarm| alarm["status"] == "ACTIVE").count() == 1).then_some(())
        })
        .await;
    }
    for line in ["a topic refuses messages", "a topic has room again"] {
        let told = gateway.stderr().lines().filter(|told| told.contains(line) && told.contains("FullA")).count();
        assert_eq!(told, 3, "{line}: {}", gateway.stderr());
    }
}

// Nobody who is told of an alarm may be the cause of the next one.
#[tokio::test]
async fn the_alarm_does_not_reach_full_topics_and_causes_no_other() {
    let gateway = Gateway::with(QUOTA).await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&of_object("Full", &device, &["events"])).await;
    gateway.subscribe(&of_tenant("Full", &["alarms", "managedobjects"])).await;
    gateway.consumer("Full", "subA").await.close().await;
    let (mut accepted, _) = fill(&gateway, &device, "PERSISTENT").await;
    // To the last bytes, in which an alarm would not fit.
    while gateway.post(EVENTS, &event(&device, "t", "x")).await.status == 201 {
        accepted += 1;
    }
    eventually("the alarm", async || (!alarms(&gateway).await.is_empty()).then_some(())).await;
    tokio::time::sleep(Duration::from_millis(2500)).await;
    let alarms = alarms(&gateway).await;
    assert_eq!((alarms.len(), &alarms[0]["count"]), (1, &json!(1)));
    let mut consumer = gateway.reconnect("Full", "subA").await;
    for _ in 0..accepted {
        assert!(consumer.receive().await.description.starts_with("/edge/events/"));
    }
    // With room it hears of the end.
    let cleared = consumer.receive().await;
    assert_eq!((cleared.action.as_str(), &cleared.json()["status"]), ("UPDATE", &json!("CLEARED")));
}
