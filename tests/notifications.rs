//! What the documentation of Notifications 2.0 promises about topics, subscriptions and filters (seed 000), over all APIs at
//! once.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::harness::{
    Consumer, Frame, Gateway, alarm, event, eventually, forwarded, measurement, of_object, of_tenant, operation,
    value_of,
};

const OBJECTS: &str = "/inventory/managedObjects";
const MEASUREMENTS: &str = "/measurement/measurements";
const EVENTS: &str = "/event/events";
const ALARMS: &str = "/alarm/alarms";
const OPERATIONS: &str = "/devicecontrol/operations";
/// How long a consumer is watched that has got everything: what was answered is on its way already.
const SILENCE: std::time::Duration = std::time::Duration::from_millis(50);

/// Posts, and returns the id of what was made.
async fn post(gateway: &Gateway, path: &str, body: Value) -> String {
    let made = gateway.post(path, &body).await.expect(201).json();
    made["id"].as_str().unwrap_or_else(|| panic!("no id in {made}")).to_owned()
}

/// Type, source and action of a notification.
fn summary(frame: &Frame) -> String {
    format!("{} {}", frame.description.strip_prefix("/edge/").unwrap(), frame.action)
}

async fn is_done(consumer: &mut Consumer) -> bool {
    consumer.ping().await;
    consumer.is_silent_for(SILENCE).await
}

// Seed 000, "Topics and subscriptions" and "Consumers and tokens": the scene of the two diagrams.
#[tokio::test]
async fn three_subscriptions_feed_two_topics_that_four_clients_consume() {
    let gateway = Gateway::start().await;
    let (left, middle, outside) =
        (gateway.device("left").await, gateway.device("middle").await, gateway.device("outside").await);
    gateway.subscribe(&forwarded("temperature", &left)).await;
    gateway.subscribe(&forwarded("temperature", &middle)).await;
    gateway.subscribe(&of_tenant("alarms", &["alarms"])).await;
    let mut alarm_monitor = gateway.consumer("alarms", "monitor").await;
    let mut audit = gateway.consumer("temperature", "audit").await;
    let token = gateway.shared_token("temperature", "monitor").await;
    let mut monitors = [gateway.member(&token, "a").await.unwrap(), gateway.member(&token, "b").await.unwrap()];

    for (value, device) in [&left, &middle, &outside, &left].into_iter().enumerate() {
        gateway.measure(device, "c8y_Temperature", value as u64).await;
        post(&gateway, ALARMS, alarm(device, &format!("alarm{value}"), "MAJOR")).await;
    }
    for device in [&left, &middle, &outside, &left] {
        assert_eq!(summary(&alarm_monitor.receive().await), format!("alarms/{device} CREATE"));
    }
    let measured = |device| format!("measurements/{device} CREATE");
    for (device, value) in [(&left, 0), (&middle, 1), (&left, 3)] {
        let frame = audit.receive().await;
        assert_eq!((summary(&frame), value_of(&frame.json())), (measured(device), value));
    }
    // The shares of `monitor`, which has its own name in each topic.
    let mut shares: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for monitor in &mut monitors {
        let mut of_one: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        while let Ok(Some(frame)) = tokio::time::timeout(10 * SILENCE, monitor.try_next()).await {
            of_one.entry(summary(&frame)).or_default().push(value_of(&frame.json()));
        }
        assert!(of_one.keys().all(|source| !shares.contains_key(source)), "{of_one:?} and {shares:?}");
        shares.extend(of_one);
    }
    assert_eq!(shares, BTreeMap::from([(measured(&left), vec![0, 3]), (measured(&middle), vec![1])]));
    assert!(is_done(&mut alarm_monitor).await && is_done(&mut audit).await);
}

/// What a subscription forwards: the type in line 2, then of which API, of which objects and which of their actions.
type Pick = (&'static str, &'static str, &'static str, &'static str);

const ALL: &str = "CREATE UPDATE DELETE";

/// Seed 000, "Creating subscriptions": "The following summarizes the context and API support". `D` is the source, `C` its child
/// and `N` an object that is new.
fn forwarding(filter: fn(&[&str]) -> Value) -> Vec<(&'static str, Value, Vec<Pick>)> {
    const MEASURED: Pick = ("measurements", "measurements", "D", ALL);
    const EVENT: Pick = ("events", "events", "D", ALL);
    const EVENT_BELOW: Pick = ("eventsWithChildren", "events", "D C", ALL);
    const ALARM: Pick = ("alarms", "alarms", "D", ALL);
    const ALARM_BELOW: Pick = ("alarmsWithChildren", "alarms", "D C", ALL);
    const OPERATION: Pick = ("operations", "operations", "D", ALL);
    // An object gets the id that a subscription needs when it is created, and so its creation cannot be forwarded.
    const CHANGED: Pick = ("managedobjects", "managedobjects", "D", "UPDATE DELETE");
    const EVERYTHING: [Pick; 7] = [MEASURED, EVENT, EVENT_BELOW, ALARM, ALARM_BELOW, OPERATION, CHANGED];
    const MEASURED_ANYWHERE: Pick = ("measurements", "measurements", "D C", ALL);
    const EVENT_ANYWHERE: Pick = ("events", "events", "D C", ALL);
    const ALARM_ANYWHERE: Pick = ("alarms", "alarms", "D C", ALL);
    const OPERATION_ANYWHERE: Pick = ("operations", "operations", "D C", ALL);
    const CREATED: Pick = ("managedobjects", "managedobjects", "D C N", "CREATE");
    // Cumulocity-IoT/c8y-docs#2467 and #5167: operations are in the tenant's wildcard, measurements have to be named.
    const TENANT_WIDE: [Pick; 4] = [EVENT_ANYWHERE, ALARM_ANYWHERE, OPERATION_ANYWHERE, CREATED];
    vec![
        ("mo", filter(&["measurements"]), vec![MEASURED]),
        ("mo", filter(&["events"]), vec![EVENT]),
        ("mo", filter(&["eventsWithChildren"]), vec![EVENT_BELOW]),
        ("mo", filter(&["alarms"]), vec![ALARM]),
        ("mo", filter(&["alarmsWithChildren"]), vec![ALARM_BELOW]),
        ("mo", filter(&["operations"]), vec![OPERATION]),
        ("mo", filter(&["managedobjects"]), vec![CHANGED]),
        ("mo", filter(&["measurements", "alarms"]), vec![MEASURED, ALARM]),
        ("mo", filter(&["alarms", "alarmsWithChildren"]), vec![ALARM, ALARM_BELOW]),
        ("mo", filter(&["*"]), EVERYTHING.into()),
        ("mo", Value::Null, EVERYTHING.into()),
        // The original type decides, of a deletion the one that the object had; operations have none.
        (
            "mo",
            json!({"typeFilter": "'own'"}),
            vec![
                MEASURED,
                EVENT,
                ("eventsWithChildren", "events", "D", ALL),
                ALARM,
                ("alarmsWithChildren", "alarms", "D", ALL),
                CHANGED,
            ],
        ),
        (
            "mo",
            json!({"apis": ["eventsWithChildren", "measurements"], "typeFilter": "'below'"}),
            vec![("eventsWithChildren", "events", "C", ALL)],
        ),
        ("tenant", filter(&["measurements"]), vec![MEASURED_ANYWHERE]),
        // Cumulocity-IoT/c8y-docs#2805: events alone need no type filter.
        ("tenant", filter(&["events"]), vec![EVENT_ANYWHERE]),
        ("tenant", filter(&["alarms"]), vec![ALARM_ANYWHERE]),
        ("tenant", filter(&["operations"]), vec![OPERATION_ANYWHERE]),
        ("tenant", filter(&["managedobjects"]), vec![CREATED]),
        ("tenant", filter(&["measurements", "managedobjects"]), vec![MEASURED_ANYWHERE, CREATED]),
        ("tenant", filter(&["*"]), TENANT_WIDE.into()),
        ("tenant", Value::Null, TENANT_WIDE.into()),
        // c8y_api sends explicit nulls.
        ("tenant", json!({"apis": null, "typeFilter": null}), TENANT_WIDE.into()),
        (
            "tenant",
            json!({"apis": ["alarms", "events", "operations"], "typeFilter": "'below' or 'none'"}),
            vec![("events", "events", "C", ALL), ("alarms", "alarms", "C", ALL)],
        ),
    ]
}

// Seed 000, "Creating subscriptions" and "Subscription filters".
#[tokio::test]
async fn context_apis_and_type_decide_what_is_forwarded_in_the_order_of_the_requests() {
    let gateway = Gateway::start().await;
    let object = |name: &str, kind: &str| json!({"name": name, "type": kind, "c8y_IsDevice": {}});
    let d = post(&gateway, OBJECTS, object("D", "own")).await;
    let c = post(&gateway, OBJECTS, object("C", "below")).await;
    let children = format!("{OBJECTS}/{d}/childAssets");
    gateway.post(&children, &json!({"managedObject": {"id": c}})).await.expect(201);
    let mut consumers = Vec::new();
    for (number, (context, filter, picks)) in forwarding(|apis| json!({"apis": apis})).into_iter().enumerate() {
        let topic = format!("Sub{number}");
        let mut subscription = json!({"context": context, "subscription": topic, "subscriptionFilter": filter});
        if context == "mo" {
            subscription["source"] = json!({"id": d});
        }
        gateway.subscribe(&subscription).await;
        consumers.push((subscription, picks, gateway.consumer(&topic, "subA").await));
    }

    let put = async |path: String, patch: Value| drop(gateway.put(&path, &patch).await.expect(200));
    post(&gateway, MEASUREMENTS, measurement(&d, "own", 1)).await;
    post(&gateway, MEASUREMENTS, measurement(&c, "below", 2)).await;
    let event_of_d = post(&gateway, EVENTS, event(&d, "own", "x")).await;
    put(format!("{EVENTS}/{event_of_d}"), json!({"text": "y"})).await;
    gateway.delete(&format!("{EVENTS}/{event_of_d}")).await.expect(204);
    post(&gateway, EVENTS, event(&c, "below", "x")).await;
    let alarm_of_d = post(&gateway, ALARMS, alarm(&d, "own", "MAJOR")).await;
    put(format!("{ALARMS}/{alarm_of_d}"), json!({"text": "y"})).await;
    post(&gateway, ALARMS, alarm(&c, "below", "MAJOR")).await;
    let operation_of_d = post(&gateway, OPERATIONS, operation(&d)).await;
    put(format!("{OPERATIONS}/{operation_of_d}"), json!({"status": "EXECUTING"})).await;
    post(&gateway, OPERATIONS, operation(&c)).await;
    let n = post(&gateway, OBJECTS, object("N", "own")).await;
    put(format!("{OBJECTS}/{d}"), json!({"name": "renamed"})).await;
    gateway.delete(&format!("{children}/{c}")).await.expect(204);
    gateway.delete(&format!("{OBJECTS}/{d}")).await.expect(204);
    let happened = [
        ("measurements", "D", "CREATE"),
        ("measurements", "C", "CREATE"),
        ("events", "D", "CREATE"),
        ("events", "D", "UPDATE"),
        ("events", "D", "DELETE"),
        ("events", "C", "CREATE"),
        // The number of its alarms stands in the device.
        ("managedobjects", "D", "UPDATE"),
        ("alarms", "D", "CREATE"),
        ("alarms", "D", "UPDATE"),
        ("managedobjects", "C", "UPDATE"),
        ("alarms", "C", "CREATE"),
        ("operations", "D", "CREATE"),
        ("operations", "D", "UPDATE"),
        ("operations", "C", "CREATE"),
        ("managedobjects", "N", "CREATE"),
        ("managedobjects", "D", "UPDATE"),
        ("managedobjects", "D", "DELETE"),
    ];

    let ids = BTreeMap::from([("D", &d), ("C", &c), ("N", &n)]);
    for (subscription, picks, mut consumer) in consumers {
        for (api, whose, action) in happened {
            for (name, of_api, whom, actions) in &picks {
                if *of_api != api || !whom.contains(whose) || !actions.contains(action) {
                    continue;
                }
                let frame = consumer.receive().await;
                assert_eq!(summary(&frame), format!("{name}/{} {action}", ids[whose]), "{subscription}");
                let body = frame.json();
                if action == "DELETE" {
                    let gone = if api == "events" { &event_of_d } else { &d };
                    assert_eq!(body, json!({"id": gone}));
                } else if api == "managedobjects" {
                    assert_eq!(body["childDevices"]["references"], json!([]), "the whole object");
                } else {
                    assert!(body["id"].is_string() && body.get("source").or(body.get("deviceId")).is_some(), "{body}");
                }
            }
        }
        assert!(is_done(&mut consumer).await, "{subscription}");
    }
}

// Seed 000, "Subscription filters": the examples as they stand there, but for the id. Their spelling of the filter is not that
// of the API; a gateway that ignored it would forward everything.
#[tokio::test]
async fn the_examples_of_the_documentation_forward_what_they_say() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut consumers = Vec::new();
    for (example, expected) in [
        (
            r#"{"context":"mo","subscription":"subscription01","source":{"id":"2468"},"filter":{"apis":["*"]}}"#,
            "measurements measurements measurements managedobjects alarms alarmsWithChildren events eventsWithChildren",
        ),
        (
            r#"{"context":"mo","subscription":"subscription02","source":{"id":"2468"},"filter":{"apis":["measurements","alarms"]}}"#,
            "measurements measurements measurements alarms",
        ),
        (
            r#"{"context":"mo","subscription":"subscription03","source":{"id":"2468"},"filter":{"type":"'temperature' or 'pressure'"}}"#,
            "measurements measurements alarms alarmsWithChildren events eventsWithChildren",
        ),
        (
            r#"{"context":"mo","subscription":"subscription04","source":{"id":"2468"},"filter":{"type":"'temperature'"}}"#,
            "measurements alarms alarmsWithChildren",
        ),
    ] {
        let made = gateway.subscribe(&serde_json::from_str(&example.replace("2468", &device)).unwrap()).await;
        assert_eq!(made.get("filter"), None, "the answer has the API's spelling: {made}");
        assert!(made["subscriptionFilter"].is_object(), "{made}");
        let topic = made["subscription"].as_str().unwrap().to_owned();
        consumers.push((gateway.consumer(&topic, "subA").await, topic, expected));
    }
    for kind in ["temperature", "pressure", "humidity"] {
        gateway.measure(&device, kind, 1).await;
    }
    post(&gateway, ALARMS, alarm(&device, "temperature", "MAJOR")).await;
    post(&gateway, EVENTS, event(&device, "pressure", "x")).await;
    for (mut consumer, topic, expected) in consumers {
        for name in expected.split(' ') {
            assert_eq!(consumer.receive().await.description, format!("/edge/{name}/{device}"), "{topic}");
        }
        assert!(is_done(&mut consumer).await, "{topic}");
    }
}

// Seed 000, "Creating subscriptions": an application discovers new managed objects by a subscription in tenant context, and
// then subscribes to them.
#[tokio::test]
async fn an_application_discovers_new_objects_and_subscribes_to_them() {
    let gateway = Gateway::start().await;
    gateway.subscribe(&of_tenant("discovery", &["managedobjects"])).await;
    let mut consumer = gateway.consumer("discovery", "app").await;
    let device = gateway.device("pump").await;
    let found = consumer.receive().await;
    assert_eq!((summary(&found), &found.json()["name"]), (format!("managedobjects/{device} CREATE"), &json!("pump")));
    let id = found.description.rsplit('/').next().unwrap();
    gateway.subscribe(&of_object("discovery", id, &["managedobjects", "events"])).await;
    post(&gateway, EVENTS, event(&device, "t", "x")).await;
    gateway.put(&format!("{OBJECTS}/{device}"), &json!({"name": "pump 1"})).await.expect(200);
    for expected in [format!("events/{device} CREATE"), format!("managedobjects/{device} UPDATE")] {
        assert_eq!(summary(&consumer.receive().await), expected);
    }
    assert!(is_done(&mut consumer).await);
}

// Seed 000, "Consumers and tokens": "Notification order is preserved from the point of view of any given device sending in REST
// […] API requests", whatever the others do at the same time.
#[tokio::test]
async fn each_device_is_told_of_in_the_order_of_its_requests() {
    const DEVICES: usize = 6;
    const REQUESTS: usize = 30;
    let gateway = Gateway::start().await;
    gateway.subscribe(&of_tenant("Sub1", &["measurements", "events", "alarms"])).await;
    let mut alone = gateway.consumer("Sub1", "alone").await;
    let token = gateway.shared_token("Sub1", "crew").await;
    let mut crew = [gateway.member(&token, "a").await.unwrap(), gateway.member(&token, "b").await.unwrap()];
    let mut devices = Vec::new();
    for _ in 0..DEVICES {
        devices.push(gateway.device("pump").await);
    }
    let send = async |device: &str| {
        for number in 0..REQUESTS {
            let (path, mut body) = match number % 3 {
                0 => (MEASUREMENTS, measurement(device, "t", 1)),
                1 => (EVENTS, event(device, "t", "x")),
                _ => (ALARMS, alarm(device, &number.to_string(), "MAJOR")),
            };
            body["number"] = json!(number);
            gateway.post(path, &body).await.expect(201);
        }
    };
    futures_util::future::join_all(devices.iter().map(|device| send(device))).await;

    let mut seen: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut note = |frame: &Frame| {
        let body = frame.json();
        let numbers = seen.entry(body["source"]["id"].as_str().unwrap().to_owned()).or_default();
        numbers.push(body["number"].as_u64().unwrap());
    };
    for _ in 0..DEVICES * REQUESTS {
        note(&alone.receive().await);
    }
    for member in &mut crew {
        while let Ok(Some(frame)) = tokio::time::timeout(10 * SILENCE, member.try_next()).await {
            note(&frame);
            member.ack(&frame).await;
        }
    }
    let once: Vec<u64> = (0..REQUESTS as u64).collect();
    assert_eq!(seen.len(), DEVICES);
    assert!(seen.values().all(|numbers| *numbers == [&once[..], &once].concat()), "{seen:?}");
}

// Seed 000, "Message backlog quota": one backlog for each topic, "shared by all consumers using the same topic". While it is
// full, "any API request […] that would be published onto that topic will receive HTTP response code 500", "the Cumulocity
// operational store will still be updated", and blind retries lead to duplicates there.
#[tokio::test]
async fn a_full_topic_fails_the_requests_that_would_be_published_to_it() {
    let gateway = Gateway::with("[backlog]\nquota_bytes = 5000").await;
    let mut devices = Vec::new();
    for topic in ["Shared", "Twin", "Other"] {
        let device = gateway.device("pump").await;
        gateway.subscribe(&forwarded(topic, &device)).await;
        devices.push(device);
    }
    let [shared, twin, other] = &devices[..] else { unreachable!() };
    let mut fast = gateway.consumer("Shared", "fast").await;
    gateway.consumer("Shared", "slow").await.close().await;
    gateway.consumer("Twin", "slow").await.close().await;
    // Of two digits, so that all are of one length.
    let mut full_at = Vec::new();
    for (device, topic) in [(shared, "Shared"), (twin, "Twin")] {
        let mut value = 10;
        while gateway.post_measurement(&measurement(device, "t", value)).await.status == 201 {
            value += 1;
        }
        gateway.post_measurement(&measurement(device, "t", value)).await.error(500, topic);
        full_at.push(value);
    }
    let full_at = match full_at[..] {
        [with_two_consumers, with_one] if with_two_consumers == with_one => with_one,
        _ => panic!("a message is stored once, for however many consumers: {full_at:?}"),
    };
    let accepted: Vec<u64> = (10..full_at).collect();
    assert!((5..50).contains(&accepted.len()), "{accepted:?}");
    for value in &accepted {
        assert_eq!(value_of(&fast.receive().await.json()), *value);
    }

    let with_mode = |mode: &str| {
        let call = gateway.post_measurement(&measurement(shared, "t", 99));
        call.header("X-Cumulocity-Processing-Mode", mode)
    };
    with_mode("TRANSIENT").await.error(500, "Shared");
    let stored = async || {
        let path = format!("{MEASUREMENTS}?source={shared}&pageSize=100");
        let list = gateway.get(&path).await.expect(200).json();
        list["measurements"].as_array().unwrap().iter().map(value_of).collect::<Vec<_>>()
    };
    assert_eq!(stored().await, [&accepted[..], &[full_at, full_at]].concat(), "stored, and the retry, too");
    // What is not published there is none of its business.
    with_mode("QUIESCENT").await.expect(201);
    post(&gateway, EVENTS, event(shared, "t", "x")).await;
    gateway.measure(other, "t", 1).await;
    gateway.measure(&gateway.device("unsubscribed").await, "t", 1).await;

    // The last one that waits has got them, each in its place.
    let mut slow = gateway.reconnect("Shared", "slow").await;
    for value in &accepted {
        assert_eq!(value_of(&slow.receive().await.json()), *value);
    }
    assert!(is_done(&mut slow).await && is_done(&mut fast).await, "what was answered with 500 is told to nobody");
    eventually("there is room", async || {
        (gateway.post_measurement(&measurement(shared, "t", 99)).await.status == 201).then_some(())
    })
    .await;
    for consumer in [&mut slow, &mut fast] {
        assert_eq!(value_of(&consumer.receive().await.json()), 99);
    }
    gateway.post_measurement(&measurement(twin, "t", 99)).await.error(500, "Twin");
}
