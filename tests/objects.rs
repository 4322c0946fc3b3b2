//! Events, alarms, operations, and what all kinds of objects have in common (Cumulocity OpenAPI; seed 000).

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::harness::{
    Consumer, Gateway, PASSWORD, Setup, TIME, alarm, event, eventually, measurement, of_object, operation,
};

const EVENTS: &str = "/event/events";
const ALARMS: &str = "/alarm/alarms";
const OPERATIONS: &str = "/devicecontrol/operations";
const MEASUREMENTS: &str = "/measurement/measurements";
const MODE: &str = "X-Cumulocity-Processing-Mode";

fn id(object: &Value) -> &str {
    object["id"].as_str().unwrap_or_else(|| panic!("no id in {object}"))
}

/// The ids of a listed page, in its order.
fn ids<'a>(page: &'a Value, name: &str) -> Vec<&'a str> {
    page[name].as_array().unwrap_or_else(|| panic!("no {name} in {page}")).iter().map(id).collect()
}

/// Description without the tenant, action and body of the next notification, acknowledged.
async fn told(consumer: &mut Consumer) -> (String, String, Value) {
    let frame = consumer.receive().await;
    let description = frame.description.strip_prefix("/edge/").unwrap().to_owned();
    (description, frame.action.clone(), frame.json())
}

#[track_caller]
fn assert_told(told: &(String, String, Value), api: &str, source: &str, action: &str) {
    assert_eq!((&*told.0, &*told.1), (&*format!("{api}/{source}"), action), "{}", told.2);
}

/// A gateway, one device, and a consumer of some of its APIs.
async fn listening(apis: &[&str]) -> (Gateway, String, Consumer) {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&of_object("Sub1", &device, apis)).await;
    let consumer = gateway.consumer("Sub1", "subA").await;
    (gateway, device, consumer)
}

#[tokio::test]
async fn an_event_is_made_read_changed_and_deleted() {
    let (gateway, device, mut consumer) = listening(&["events"]).await;
    let mut new = event(&device, "c8y_Door", "open");
    new["c8y_Position"] = json!({"lat": 1.50});
    let answer = gateway.post(EVENTS, &new).await.expect(201);
    let made = answer.json();
    let path = format!("{EVENTS}/{}", id(&made));
    let url = format!("http://{}{path}", gateway.addr);
    assert_eq!((answer.header("location"), &made["self"]), (Some(&*url), &json!(url)));
    let source = format!("http://{}/inventory/managedObjects/{device}", gateway.addr);
    assert_eq!(made["source"], json!({"id": device, "name": "pump", "self": source}));
    for name in ["type", "text", "time", "c8y_Position"] {
        assert_eq!(made[name], new[name]);
    }
    assert!(made["creationTime"].as_str().unwrap().ends_with('Z'));
    assert_eq!(gateway.get(&path).await.expect(200).json(), made);
    let created = told(&mut consumer).await;
    assert_told(&created, "events", &device, "CREATE");
    assert_eq!(created.2, made);

    let changed = gateway.put(&path, &json!({"text": "shut", "c8y_Position": null, "n": 1})).await.expect(200).json();
    assert_eq!((&changed["text"], changed.get("c8y_Position"), &changed["n"]), (&json!("shut"), None, &json!(1)));
    assert_eq!((&changed["time"], &changed["creationTime"]), (&made["time"], &made["creationTime"]));
    assert_eq!(gateway.get(&path).await.expect(200).json(), changed);
    let updated = told(&mut consumer).await;
    assert_told(&updated, "events", &device, "UPDATE");
    assert_eq!(updated.2, changed);
    gateway.put(&path, &json!({"source": {"id": "1"}})).await.error(422, "source: cannot be changed");
    for fixed in ["type", "time", "creationTime"] {
        gateway.put(&path, &json!({fixed: made[fixed]})).await.error(422, &format!("{fixed}: cannot be changed"));
    }
    gateway.put(&path, &json!({"text": null})).await.error(422, "text: must be a string");
    gateway.put(&path, &json!({"id": id(&made), "source": made["source"]})).await.expect(200);

    gateway.delete(&path).await.expect(204);
    let deleted = told(&mut consumer).await;
    assert_told(&deleted, "events", &device, "DELETE");
    assert_eq!(deleted.2, json!({"id": id(&made)}), "the changes that changed nothing were not told");
    for call in [gateway.get(&path), gateway.put(&path, &json!({"text": "x"})), gateway.delete(&path)] {
        let refused = call.await;
        assert_eq!(refused.json()["error"], "event/Not Found");
        refused.error(404, "Finding event from database failed");
    }
}

#[tokio::test]
async fn wrong_objects_are_422_and_name_the_field() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let good =
        [(EVENTS, event(&device, "t", "x")), (ALARMS, alarm(&device, "t", "MAJOR")), (OPERATIONS, operation(&device))];
    let missing = |names: &str| format!("Following mandatory fields should be included: {names}");
    for (path, body, text) in [
        (EVENTS, json!({}), missing("source,type,text,time")),
        (EVENTS, json!({"source": {"id": device}, "type": "t", "time": null}), missing("text,time")),
        (ALARMS, json!({"source": {"id": device}, "type": "t"}), missing("severity,text,time")),
        (OPERATIONS, json!({"c8y_Restart": {}}), missing("deviceId")),
    ] {
        let refused = gateway.post(path, &body).await;
        assert_eq!(refused.json()["error"], "undefined/validationError");
        refused.error(422, &text);
    }
    for (path, name, value, text) in [
        (EVENTS, "source", json!({"id": "1"}), "source.id: there is no managed object '1'"),
        (ALARMS, "source", json!({"id": "1"}), "source.id: there is no managed object '1'"),
        (OPERATIONS, "deviceId", json!("1"), "deviceId: there is no managed object '1'"),
        (OPERATIONS, "deviceId", json!("pump"), "deviceId: must be an id of decimal digits"),
        (EVENTS, "text", json!(7), "text: must be a string"),
        (EVENTS, "time", json!("noon"), "time: must be a date"),
        (EVENTS, "", json!(1), "the name of a fragment"),
        (ALARMS, "severity", json!("LOUD"), "severity: must be one of CRITICAL, MAJOR, MINOR, WARNING"),
        (ALARMS, "status", json!("active"), "status: must be one of ACTIVE, ACKNOWLEDGED, CLEARED"),
        (ALARMS, "text", json!({}), "text: must be a string"),
        (OPERATIONS, "description", json!(7), "description: must be a string"),
    ] {
        let mut body = good.iter().find(|(of, _)| *of == path).unwrap().1.clone();
        body[name] = value;
        gateway.post(path, &body).await.error(422, text);
    }
    for (path, many) in [(EVENTS, "events"), (ALARMS, "alarms"), (OPERATIONS, "operations")] {
        assert_eq!(gateway.get(path).await.expect(200).json()[many], json!([]), "nothing was stored");
    }
}

#[tokio::test]
async fn many_events_and_alarms_come_in_one_request_or_not_at_all() {
    let (gateway, device, mut consumer) = listening(&["events", "alarms"]).await;
    let many: Vec<_> = ["a", "b", "c"].iter().map(|text| event(&device, "t", text)).collect();
    let mut poisoned = json!({"events": many});
    poisoned["events"][1]["time"] = json!("noon");
    gateway.post(EVENTS, &poisoned).await.error(422, "events[1].time");
    poisoned["events"][1] = event("1", "t", "b");
    gateway.post(EVENTS, &poisoned).await.error(422, "events[1].source.id");
    let made = gateway.post(EVENTS, &json!({"events": many})).await.expect(201).json();
    assert_eq!(ids(&made, "events").len(), 3);
    for text in ["a", "b", "c"] {
        let told = told(&mut consumer).await;
        assert_told(&told, "events", &device, "CREATE");
        assert_eq!(told.2["text"], text);
    }
    let media = "application/vnd.com.nsn.cumulocity.alarmcollection+json";
    let many =
        json!({"alarms": [alarm(&device, "t", "MAJOR"), alarm(&device, "t", "MINOR"), alarm(&device, "u", "MINOR")]});
    let answer = gateway.call("POST", ALARMS).header("Accept", media).body(media, many.to_string()).await.expect(201);
    assert!(answer.header("content-type").unwrap().starts_with(media));
    let made = answer.json();
    let made = ids(&made, "alarms");
    assert!(made[0] == made[1] && made[1] != made[2], "{made:?}");
    for (action, count) in [("CREATE", 1), ("UPDATE", 2), ("CREATE", 1)] {
        let told = told(&mut consumer).await;
        assert_told(&told, "alarms", &device, action);
        assert_eq!(told.2["count"], count);
    }
    assert_eq!(gateway.get(ALARMS).await.expect(200).json()["alarms"].as_array().unwrap().len(), 2);
}

// Cumulocity OpenAPI, "Alarm de-duplication".
#[tokio::test]
async fn an_open_alarm_of_the_same_type_counts_instead_of_a_new_one() {
    let (gateway, device, mut consumer) = listening(&["alarms"]).await;
    let first = gateway.post(ALARMS, &alarm(&device, "hot", "MAJOR")).await.expect(201).json();
    assert_eq!((&first["status"], &first["count"]), (&json!("ACTIVE"), &json!(1)));
    assert_eq!((first.get("firstOccurrenceTime"), &first["source"]["name"]), (None, &json!("pump")));
    assert_eq!(first["history"]["auditRecords"], json!([]));
    assert!(first["history"]["self"].is_string());
    let created = told(&mut consumer).await;
    assert_told(&created, "alarms", &device, "CREATE");
    assert_eq!(created.2, first);

    let mut second = alarm(&device, "hot", "MINOR");
    second["time"] = json!("2026-11-02T14:00:00+02:00");
    second["text"] = json!("Hotter");
    let again = gateway.post(ALARMS, &second).await.expect(201).json();
    assert_eq!((id(&again), &again["count"], &again["time"]), (id(&first), &json!(2), &second["time"]));
    assert_eq!(again["firstOccurrenceTime"], TIME);
    assert_eq!((&again["severity"], &again["text"]), (&first["severity"], &first["text"]), "all else is ignored");
    let updated = told(&mut consumer).await;
    assert_told(&updated, "alarms", &device, "UPDATE");
    assert_eq!(updated.2, again);

    let path = format!("{ALARMS}/{}", id(&first));
    gateway.put(&path, &json!({"status": "ACKNOWLEDGED"})).await.expect(200);
    assert_eq!(told(&mut consumer).await.2["status"], "ACKNOWLEDGED");
    let third = gateway.post(ALARMS, &alarm(&device, "hot", "MAJOR")).await.expect(201).json();
    assert_eq!((id(&third), &third["count"], &third["status"]), (id(&first), &json!(3), &json!("ACKNOWLEDGED")));
    assert_eq!(told(&mut consumer).await.2, third);
    for other in [alarm(&device, "cold", "MAJOR"), alarm(&gateway.device("valve").await, "hot", "MAJOR")] {
        assert_ne!(id(&gateway.post(ALARMS, &other).await.expect(201).json()), id(&first));
    }
    gateway.put(&path, &json!({"status": "CLEARED"})).await.expect(200);
    let fresh = gateway.post(ALARMS, &alarm(&device, "hot", "MAJOR")).await.expect(201).json();
    assert_eq!((id(&fresh) == id(&first), &fresh["count"]), (false, &json!(1)), "a cleared one stays cleared");
}

// Sixteen clients at once raise one alarm: one object, and as many occurrences as were answered.
#[tokio::test]
async fn alarms_raised_at_once_are_all_counted() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let new = alarm(&device, "hot", "MAJOR");
    let raise = async || gateway.post(ALARMS, &new).await.expect(201);
    futures_util::future::join_all((0..16).map(|_| async { raise().await })).await;
    let list = gateway.get(ALARMS).await.expect(200).json();
    assert_eq!(list["alarms"].as_array().unwrap().len(), 1);
    assert_eq!(list["alarms"][0]["count"], 16);
    let object = gateway.get(&format!("/inventory/managedObjects/{device}")).await.expect(200).json();
    assert_eq!(object["c8y_ActiveAlarmsStatus"], json!({"major": 1}));
}

// A client that goes away must not make the gateway forget the lock of what it was changing: no occurrence is lost or told
// twice.
#[tokio::test]
async fn clients_that_go_away_do_no_harm() {
    const CLIENTS: usize = 12;
    const REQUESTS: usize = 15;
    let (gateway, device, mut consumer) = listening(&["alarms"]).await;
    let body = alarm(&device, "hot", "MAJOR").to_string();
    let request = format!(
        "POST {ALARMS} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\
         Authorization: Basic ZWRnZS9hZG1pbjpjb3JyZWN0IGhvcnNlIGJhdHRlcnkgc3RhcGxl\r\n\r\n{body}",
        body.len()
    );
    let client = async |client: usize| {
        for pause in 0..REQUESTS {
            let mut socket = TcpStream::connect(gateway.addr).await.unwrap();
            socket.write_all(request.as_bytes()).await.unwrap();
            tokio::time::sleep(Duration::from_micros(((pause * CLIENTS + client) * 20) as u64)).await;
        }
    };
    futures_util::future::join_all((0..CLIENTS).map(client)).await;
    let last = gateway.post(ALARMS, &alarm(&device, "hot", "MAJOR")).await.expect(201).json();
    let count = last["count"].as_u64().unwrap();
    assert!(count > 1, "some were carried out");
    for expected in 1..=count {
        assert_eq!(told(&mut consumer).await.2["count"], expected);
    }
}

#[tokio::test]
async fn a_device_tells_how_many_open_alarms_it_has_before_it_tells_of_the_alarm() {
    let (gateway, device, mut consumer) = listening(&["managedobjects", "alarms"]).await;
    let object = format!("/inventory/managedObjects/{device}");
    let mut expect = async |status: Option<Value>, action: &str| {
        if let Some(status) = status {
            let changed = told(&mut consumer).await;
            assert_told(&changed, "managedobjects", &device, "UPDATE");
            assert_eq!((&changed.2["c8y_ActiveAlarmsStatus"], &changed.2["name"]), (&status, &json!("pump")));
            let stored = gateway.get(&object).await.expect(200).json();
            assert_eq!(
                (&stored["c8y_ActiveAlarmsStatus"], &stored["lastUpdated"]),
                (&status, &changed.2["lastUpdated"])
            );
        }
        if !action.is_empty() {
            assert_told(&told(&mut consumer).await, "alarms", &device, action);
        }
    };
    let post = async |kind: &str, severity: &str| {
        let made = gateway.post(ALARMS, &alarm(&device, kind, severity)).await.expect(201).json();
        format!("{ALARMS}/{}", id(&made))
    };
    let hot = post("hot", "MAJOR").await;
    expect(Some(json!({"major": 1})), "CREATE").await;
    post("hot", "MAJOR").await;
    expect(None, "UPDATE").await;
    let cold = post("cold", "CRITICAL").await;
    expect(Some(json!({"major": 1, "critical": 1})), "CREATE").await;
    gateway.put(&hot, &json!({"severity": "WARNING"})).await.expect(200);
    expect(Some(json!({"critical": 1, "warning": 1})), "UPDATE").await;
    gateway.put(&hot, &json!({"status": "ACKNOWLEDGED"})).await.expect(200);
    expect(None, "UPDATE").await;
    // Cumulocity OpenAPI: "If the update operation doesn't change anything … no notifications will be sent."
    let before = gateway.get(&cold).await.expect(200).json();
    let same = json!({"status": "ACTIVE", "severity": "CRITICAL", "text": "Too hot", "id": before["id"]});
    assert_eq!(gateway.put(&cold, &same).await.expect(200).json(), before);
    gateway.put(&cold, &json!({"status": "CLEARED"})).await.expect(200);
    expect(Some(json!({"warning": 1})), "UPDATE").await;
    gateway.put(&cold, &json!({"status": "ACTIVE"})).await.expect(200);
    expect(Some(json!({"critical": 1, "warning": 1})), "UPDATE").await;
    // The alarms of a collection that goes are not told of.
    gateway.delete(&format!("{ALARMS}?source={device}&severity=CRITICAL")).await.expect(204);
    expect(Some(json!({"warning": 1})), "").await;
    gateway.put(&format!("{ALARMS}?source={device}&resolved=false"), &json!({"status": "CLEARED"})).await.expect(200);
    expect(Some(json!({})), "UPDATE").await;
    gateway.put(&object, &json!({"end": true})).await.expect(200);
    expect(None, "").await;
    assert_eq!(told(&mut consumer).await.2["end"], true, "nothing else was told");
}

// A random history of a device's alarms against a naive model; a failure prints the seed.
#[tokio::test]
async fn alarms_follow_a_naive_model_of_them() {
    const SEVERITIES: [&str; 4] = ["CRITICAL", "MAJOR", "MINOR", "WARNING"];
    const STATUSES: [&str; 3] = ["ACTIVE", "ACKNOWLEDGED", "CLEARED"];
    struct Model {
        id: String,
        kind: usize,
        severity: &'static str,
        status: &'static str,
        count: u64,
    }
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let seed = RandomState::new().hash_one(0);
    let mut state = seed | 1;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap() % below
    };
    let mut alarms: Vec<Model> = Vec::new();
    for step in 0..200 {
        let (kind, severity, status) = (random(3), SEVERITIES[random(4)], STATUSES[random(3)]);
        match random(10) {
            0..5 => {
                let made = gateway.post(ALARMS, &alarm(&device, &kind.to_string(), severity)).await.expect(201).json();
                let open = |alarm: &&mut Model| alarm.kind == kind && alarm.status != "CLEARED";
                // An ACTIVE one first, then the newest.
                match alarms
                    .iter_mut()
                    .filter(open)
                    .max_by_key(|alarm| (alarm.status == "ACTIVE", alarm.id.parse::<u64>().unwrap()))
                {
                    Some(alarm) => {
                        alarm.count += 1;
                        assert_eq!(id(&made), alarm.id, "seed {seed}, step {step}");
                    }
                    None => alarms.push(Model { id: id(&made).to_owned(), kind, severity, status: "ACTIVE", count: 1 }),
                }
            }
            5..8 if !alarms.is_empty() => {
                let chosen = random(alarms.len());
                let chosen = &mut alarms[chosen];
                let patch = json!({"status": status, "severity": severity});
                gateway.put(&format!("{ALARMS}/{}", chosen.id), &patch).await.expect(200);
                (chosen.status, chosen.severity) = (status, severity);
            }
            8 => {
                let path = format!("{ALARMS}?source={device}&type={kind}");
                gateway.put(&path, &json!({"status": status})).await.expect(200);
                alarms.iter_mut().filter(|alarm| alarm.kind == kind).for_each(|alarm| alarm.status = status);
            }
            _ => {
                gateway.delete(&format!("{ALARMS}?type={kind}&severity={severity}")).await.expect(204);
                alarms.retain(|alarm| alarm.kind != kind || alarm.severity != severity);
            }
        }
        let mut expected = json!({});
        for alarm in alarms.iter().filter(|alarm| alarm.status != "CLEARED") {
            let count = &mut expected[alarm.severity.to_lowercase()];
            *count = json!(count.as_u64().unwrap_or(0) + 1);
        }
        let object = gateway.get(&format!("/inventory/managedObjects/{device}")).await.expect(200).json();
        let shown = object.get("c8y_ActiveAlarmsStatus").cloned().unwrap_or(json!({}));
        assert_eq!(shown, expected, "seed {seed}, step {step}");
    }
    let page = gateway.get(&format!("{ALARMS}?pageSize=2000&revert=true")).await.expect(200).json();
    let mut listed: Vec<_> = page["alarms"].as_array().unwrap().iter().collect();
    listed.sort_by_key(|alarm| id(alarm).parse::<u64>().unwrap());
    alarms.sort_by_key(|alarm| alarm.id.parse::<u64>().unwrap());
    assert_eq!(listed.len(), alarms.len(), "seed {seed}");
    for (shown, model) in listed.into_iter().zip(&alarms) {
        let fields = (id(shown), &shown["severity"], &shown["status"], shown["count"].as_u64());
        let expected = (&*model.id, &json!(model.severity), &json!(model.status), Some(model.count));
        assert_eq!(fields, expected, "seed {seed}");
    }
}

#[tokio::test]
async fn an_alarm_is_changed_where_it_may_be() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let made = gateway.post(ALARMS, &alarm(&device, "hot", "MAJOR")).await.expect(201).json();
    let path = format!("{ALARMS}/{}", id(&made));
    let patch = json!({"text": "Cooler", "severity": "MINOR", "status": "ACKNOWLEDGED", "c8y_T": {"T": 1}});
    let changed = gateway.put(&path, &patch).await.expect(200).json();
    for (name, value) in patch.as_object().unwrap() {
        assert_eq!(&changed[name], value);
    }
    assert_eq!(gateway.get(&path).await.expect(200).json(), changed);
    // c8y_api 3.7.3 sends the source with every change.
    gateway.put(&path, &json!({"source": {"id": device}})).await.expect(200);
    gateway.put(&path, &json!({"source": {"id": "1"}})).await.error(422, "source: cannot be changed");
    for fixed in ["type", "time", "count", "creationTime", "history"] {
        gateway.put(&path, &json!({fixed: made[fixed]})).await.error(422, &format!("{fixed}: cannot be changed"));
    }
    for name in ["status", "severity", "text"] {
        gateway.put(&path, &json!({name: null})).await.error(422, name);
        gateway.put(&path, &json!({name: 1})).await.error(422, name);
    }
    assert_eq!(gateway.get(&path).await.expect(200).json(), changed);
    for unknown in ["1", "abc"] {
        let refused = gateway.put(&format!("{ALARMS}/{unknown}"), &patch).await;
        assert_eq!(refused.json()["error"], "alarm/Not Found");
        refused.error(404, "Finding alarm from database failed");
    }
    gateway.delete(&path).await.error(405, "GET, PUT");
    gateway.put(ALARMS, &json!({"status": "CLEARED"})).await.error(422, "At least one query parameter");
    let all = format!("{ALARMS}?source={device}");
    gateway.put(&all, &json!({"status": "CLEARED", "text": "x"})).await.error(422, "text: cannot be changed");
    gateway.put(&all, &json!({})).await.error(422, "status");
    for method in ["PUT", "DELETE"] {
        let call = gateway.call(method, &format!("{ALARMS}?sorce={device}")).json(&json!({"status": "CLEARED"}));
        call.await.error(422, "sorce");
    }
    assert_eq!(gateway.get(&path).await.expect(200).json(), changed);
}

// More alarms than one commit changes, of several devices, the last ones beside.
#[tokio::test]
async fn a_whole_collection_of_alarms_is_cleared_and_deleted() {
    let gateway = Gateway::start().await;
    let devices = [gateway.device("pump").await, gateway.device("valve").await, gateway.device("fan").await];
    let of = |device: &str| (0..60).map(|n| alarm(device, &format!("t{n}"), "MINOR")).collect::<Vec<_>>();
    let many: Vec<_> = devices.iter().flat_map(|device| of(device)).collect();
    gateway.post(ALARMS, &json!({"alarms": many})).await.expect(201);
    let count = async |query: &str| gateway.get(&format!("{ALARMS}/count?{query}")).await.expect(200).text();
    assert_eq!(count("status=ACTIVE").await, "180");
    let status = async |device: &str| {
        let object = gateway.get(&format!("/inventory/managedObjects/{device}")).await.expect(200).json();
        object["c8y_ActiveAlarmsStatus"].clone()
    };
    assert_eq!(status(&devices[0]).await, json!({"minor": 60}));
    let clear = json!({"status": "CLEARED"});
    gateway.put(&format!("{ALARMS}?source={}", devices[0]), &clear).await.expect(200);
    assert_eq!((count("resolved=true").await, status(&devices[0]).await), ("60".to_owned(), json!({})));
    gateway.put(&format!("{ALARMS}?severity=MINOR,MAJOR&resolved=false"), &clear).await.expect(200);
    assert_eq!(count("status=CLEARED").await, "180");
    assert_eq!((status(&devices[1]).await, status(&devices[2]).await), (json!({}), json!({})));
    gateway.delete(&format!("{ALARMS}?type=t1,t2")).await.expect(204);
    assert_eq!(count("").await, "174");
    gateway.delete(ALARMS).await.expect(204);
    assert_eq!(count("").await, "0");
}

#[tokio::test]
async fn an_operation_goes_its_way() {
    let (gateway, device, mut consumer) = listening(&["operations"]).await;
    let mut new = operation(&device);
    new["status"] = json!("SUCCESSFUL");
    let answer = gateway.post(OPERATIONS, &new).await.expect(201);
    let made = answer.json();
    let path = format!("{OPERATIONS}/{}", id(&made));
    assert_eq!(answer.header("location"), Some(&*format!("http://{}{path}", gateway.addr)));
    assert_eq!(
        (&made["status"], &made["deviceId"], &made["deviceName"]),
        (&json!("PENDING"), &json!(device), &json!("pump"))
    );
    assert_eq!((&made["description"], &made["c8y_Restart"]), (&json!("Restart"), &json!({})));
    assert!(made["creationTime"].as_str().unwrap().ends_with('Z'));
    assert_eq!(gateway.get(&path).await.expect(200).json(), made);
    let created = told(&mut consumer).await;
    assert_told(&created, "operations", &device, "CREATE");
    assert_eq!(created.2, made);

    gateway.put(&path, &json!({"status": "EXECUTING"})).await.expect(200);
    assert_told(&told(&mut consumer).await, "operations", &device, "UPDATE");
    let failed = json!({"status": "FAILED", "failureReason": "No power", "c8y_Restart": {"tries": 3}});
    let changed = gateway.put(&path, &failed).await.expect(200).json();
    for (name, value) in failed.as_object().unwrap() {
        assert_eq!(&changed[name], value);
    }
    assert_eq!(told(&mut consumer).await.2, changed);
    let missing = "Following mandatory fields should be included: status";
    gateway.put(&path, &json!({"failureReason": "x"})).await.error(422, missing);
    gateway.put(&path, &json!({"status": "DONE"})).await.error(422, "PENDING, EXECUTING, SUCCESSFUL, FAILED");
    gateway.put(&path, &json!({"status": "FAILED", "deviceId": "1"})).await.error(422, "deviceId: cannot be changed");
    gateway.delete(&path).await.error(405, "GET, PUT");
    let refused = gateway.put(&format!("{OPERATIONS}/1"), &json!({"status": "FAILED"})).await;
    assert_eq!(refused.json()["error"], "devicecontrol/Not Found");
    refused.error(404, "Finding device data from database failed : No operation for gid '1'!");
    gateway.delete(&format!("{OPERATIONS}?deviceId={device}&status=FAILED")).await.expect(204);
    gateway.get(&path).await.error(404, "");
    assert!(consumer.is_silent_for(Duration::from_millis(300)).await, "a collection that goes is not told of");
}

#[tokio::test]
async fn lists_have_the_documented_filters_and_order() {
    let gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    let post = async |path: &str, object: Value| id(&gateway.post(path, &object).await.expect(201).json()).to_owned();
    let with = |mut object: Value, name: &str, value: Value| {
        object[name] = value;
        object
    };
    let day = |day: u32| json!(format!("2026-11-{day:02}T12:00:00Z"));
    let mut known = std::collections::HashMap::new();
    for (name, path, object) in [
        ("e1", EVENTS, with(event(&pump, "a", "x"), "time", day(1))),
        ("e3", EVENTS, with(with(event(&pump, "b", "x"), "time", day(3)), "c8y_P", json!("here"))),
        ("e2", EVENTS, with(with(event(&valve, "a", "x"), "time", day(2)), "c8y_P", json!({"c8y_Q": 1}))),
        ("a1", ALARMS, with(alarm(&pump, "a", "MAJOR"), "time", day(1))),
        ("a3", ALARMS, with(with(alarm(&pump, "b", "MINOR"), "time", day(3)), "status", json!("CLEARED"))),
        ("a2", ALARMS, with(with(alarm(&valve, "c", "MAJOR"), "time", day(2)), "status", json!("ACKNOWLEDGED"))),
        ("o1", OPERATIONS, operation(&pump)),
        ("o2", OPERATIONS, with(operation(&valve), "c8y_Firmware", json!({"version": 1}))),
        ("o3", OPERATIONS, operation(&pump)),
    ] {
        known.insert(post(path, object).await, name);
    }
    let executing = known.iter().find(|(_, name)| **name == "o3").unwrap().0;
    gateway.put(&format!("{OPERATIONS}/{executing}"), &json!({"status": "EXECUTING"})).await.expect(200);
    for (path, query, expected) in [
        (EVENTS, String::new(), "e3 e2 e1"),
        (EVENTS, "revert=true".to_owned(), "e1 e2 e3"),
        (EVENTS, format!("source={pump}"), "e3 e1"),
        (EVENTS, format!("source={pump}&revert=true"), "e1 e3"),
        (EVENTS, "type=a".to_owned(), "e2 e1"),
        (EVENTS, "dateFrom=2026-11-02T12:00:00Z".to_owned(), "e3 e2"),
        (EVENTS, "dateTo=2026-11-02".to_owned(), "e1"),
        (EVENTS, "dateFrom=2026-11-01&dateTo=2026-11-03&revert=true".to_owned(), "e1 e2"),
        (EVENTS, "createdFrom=2026-01-01".to_owned(), "e3 e2 e1"),
        (EVENTS, "createdTo=2020-01-01".to_owned(), ""),
        (EVENTS, "lastUpdatedTo=2020-01-01".to_owned(), ""),
        (EVENTS, "fragmentType=c8y_P".to_owned(), "e3 e2"),
        (EVENTS, "fragmentType=c8y_Q".to_owned(), ""),
        (EVENTS, "fragmentType=c8y_P&fragmentValue=here".to_owned(), "e3"),
        (ALARMS, String::new(), "a3 a2 a1"),
        (ALARMS, format!("source={valve}"), "a2"),
        (ALARMS, "type=a,c".to_owned(), "a2 a1"),
        (ALARMS, "severity=MAJOR,CRITICAL".to_owned(), "a2 a1"),
        (ALARMS, "status=ACTIVE,CLEARED".to_owned(), "a3 a1"),
        (ALARMS, "resolved=true".to_owned(), "a3"),
        (ALARMS, "resolved=false&severity=MAJOR&dateTo=2026-11-02".to_owned(), "a1"),
        (OPERATIONS, String::new(), "o1 o2 o3"),
        (OPERATIONS, "revert=true".to_owned(), "o3 o2 o1"),
        (OPERATIONS, format!("deviceId={pump}"), "o1 o3"),
        (OPERATIONS, format!("agentId={pump}&status=PENDING"), "o1"),
        (OPERATIONS, "status=EXECUTING,PENDING&fragmentType=c8y_Firmware".to_owned(), "o2"),
        (OPERATIONS, "dateFrom=2020-01-01&revert=true".to_owned(), "o3 o2 o1"),
        (OPERATIONS, "dateTo=2020-01-01".to_owned(), ""),
    ] {
        let many = path.rsplit('/').next().unwrap();
        let page = gateway.get(&format!("{path}?pageSize=50&{query}")).await.expect(200).json();
        let found: Vec<_> = ids(&page, many).into_iter().map(|id| known[id]).collect();
        assert_eq!(found.join(" "), expected, "{path}?{query}");
    }
    let page = gateway.get(&format!("{EVENTS}?pageSize=2&withTotalPages=true&withTotalElements=true")).await.json();
    assert_eq!(page["statistics"], json!({"currentPage": 1, "pageSize": 2, "totalPages": 2, "totalElements": 3}));
    assert!(page["next"].is_string());
    for (path, query, field) in [
        (EVENTS, "fragmentValue=x", "fragmentValue"),
        (EVENTS, "lastUpdatedFrom=noon", "lastUpdatedFrom"),
        (EVENTS, "source=pump", "source"),
        (ALARMS, "status=OPEN", "status"),
        (ALARMS, "severity=MAJOR,,MINOR", "severity"),
        (ALARMS, "status=ACTIVE&resolved=true", "resolved"),
        (OPERATIONS, "deviceId=x", "deviceId"),
        (OPERATIONS, "status=DONE", "status"),
        (OPERATIONS, "bulkOperationId=1", "bulkOperationId"),
    ] {
        gateway.get(&format!("{path}?{query}")).await.error(422, field);
    }
}

// Cumulocity OpenAPI, "Processing mode", with what it says on which APIs each applies to.
#[tokio::test]
async fn each_processing_mode_does_what_it_says() {
    let (gateway, device, mut consumer) =
        listening(&["events", "measurements", "alarms", "operations", "managedobjects"]).await;
    let object = format!("/inventory/managedObjects/{device}");
    let objects = [
        (
            MEASUREMENTS,
            measurement(&device, "t", 1),
            "measurements",
            &["PERSISTENT", "TRANSIENT", "QUIESCENT", "CEP"][..],
        ),
        (EVENTS, event(&device, "t", "x"), "events", &["PERSISTENT", "TRANSIENT", "QUIESCENT", "CEP"]),
        (ALARMS, alarm(&device, "t", "MAJOR"), "alarms", &["PERSISTENT", "TRANSIENT"]),
        (OPERATIONS, operation(&device), "operations", &["PERSISTENT", "TRANSIENT"]),
    ];
    for (path, new, many, modes) in &objects {
        for mode in ["PERSISTENT", "TRANSIENT", "QUIESCENT", "CEP", "EAGER"] {
            let mut new = new.clone();
            new["c8y_Mode"] = json!(mode);
            let answer = gateway.post(path, &new).header(MODE, mode).await;
            if !modes.contains(&mode) {
                answer.error(422, MODE);
                continue;
            }
            let answer = answer.expect(201);
            let stored = matches!(mode, "PERSISTENT" | "QUIESCENT");
            assert_eq!(answer.header("location").is_some(), stored, "{path} {mode}");
            let found = gateway.get(&format!("{path}/{}", id(&answer.json()))).await.status;
            assert_eq!(found, if stored { 200 } else { 404 }, "{path} {mode}");
            if *path == ALARMS && stored {
                assert_told(&told(&mut consumer).await, "managedobjects", &device, "UPDATE");
            }
            if matches!(mode, "PERSISTENT" | "TRANSIENT") {
                let told = told(&mut consumer).await;
                assert_told(&told, many, &device, "CREATE");
                assert_eq!(told.2["c8y_Mode"], mode);
            }
        }
    }
    let made = gateway.post(EVENTS, &event(&device, "t", "x")).await.expect(201).json();
    assert_told(&told(&mut consumer).await, "events", &device, "CREATE");
    let path = format!("{EVENTS}/{}", id(&made));
    for (mode, stored, is_told) in [("TRANSIENT", false, true), ("QUIESCENT", true, false), ("CEP", false, false)] {
        let changed = gateway.put(&path, &json!({"text": mode})).header(MODE, mode).await.expect(200).json();
        assert_eq!(changed["text"], mode);
        let text = gateway.get(&path).await.expect(200).json()["text"].clone();
        assert_eq!(text == mode, stored, "{mode}: {text}");
        if is_told {
            assert_eq!(told(&mut consumer).await.2["text"], mode);
        }
    }
    gateway.delete(&path).header(MODE, "TRANSIENT").await.expect(204);
    assert_told(&told(&mut consumer).await, "events", &device, "DELETE");
    gateway.delete(EVENTS).header(MODE, "TRANSIENT").await.expect(204);
    gateway.get(&path).await.expect(200);
    gateway.delete(&path).header(MODE, "QUIESCENT").await.expect(204);
    gateway.get(&path).await.error(404, "");

    gateway.put(&object, &json!({"a": 1})).header(MODE, "TRANSIENT").await.expect(200);
    assert_eq!(told(&mut consumer).await.2["a"], 1);
    gateway.put(&object, &json!({"b": 1})).header(MODE, "QUIESCENT").await.expect(200);
    gateway.put(&object, &json!({"c": 1})).header(MODE, "CEP").await.error(422, MODE);
    gateway.put(&object, &json!({"d": 1})).await.expect(200);
    let last = told(&mut consumer).await.2;
    assert_eq!((last.get("a"), &last["b"], last.get("c"), &last["d"]), (None, &json!(1), None, &json!(1)));
}

#[tokio::test]
async fn measurements_are_deleted_by_id_and_by_what_they_are() {
    let (gateway, device, mut consumer) = listening(&["measurements"]).await;
    let other = gateway.device("valve").await;
    for kind in ["t", "t", "u"] {
        gateway.measure(&device, kind, 1).await;
        assert_told(&told(&mut consumer).await, "measurements", &device, "CREATE");
    }
    gateway.measure(&other, "t", 1).await;
    let list = gateway.get(MEASUREMENTS).await.expect(200).json();
    let list = ids(&list, "measurements");
    gateway.delete(&format!("{MEASUREMENTS}/{}", list[0])).await.expect(204);
    let deleted = told(&mut consumer).await;
    assert_told(&deleted, "measurements", &device, "DELETE");
    assert_eq!(deleted.2, json!({"id": list[0]}));
    gateway.delete(&format!("{MEASUREMENTS}/{}", list[0])).await.error(404, "Finding measurement from database failed");
    gateway.delete(&format!("{MEASUREMENTS}?sourc={device}")).await.error(422, "sourc");
    gateway.delete(&format!("{MEASUREMENTS}?fragmentType=c8y_None")).await.expect(204);
    gateway.delete(&format!("{MEASUREMENTS}?source={device}&type=t&fragmentType=c8y_Reading")).await.expect(204);
    let left = gateway.get(MEASUREMENTS).await.expect(200).json();
    assert_eq!(ids(&left, "measurements"), list[2..]);
    let many: Vec<_> = (0..2500).map(|n| measurement(&other, "v", n)).collect();
    gateway.post(MEASUREMENTS, &json!({"measurements": many})).await.expect(201);
    gateway.delete(&format!("{MEASUREMENTS}?type=v")).await.expect(204);
    let left = gateway.get(MEASUREMENTS).await.expect(200).json();
    assert_eq!(ids(&left, "measurements"), list[2..]);
    assert!(consumer.is_silent_for(Duration::from_millis(300)).await, "a collection that goes is not told of");
}

// A type filter judges the type of the object before its deletion.
#[tokio::test]
async fn deletions_have_the_type_of_what_is_gone() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut subscription = of_object("Sub1", &device, &["events", "measurements"]);
    subscription["subscriptionFilter"]["typeFilter"] = json!("'a'");
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    for kind in ["b", "a"] {
        let event = gateway.post(EVENTS, &event(&device, kind, "x")).await.expect(201).json();
        let measured = gateway.measure(&device, kind, 1).await;
        gateway.delete(&format!("{EVENTS}/{}", id(&event))).await.expect(204);
        gateway.delete(&format!("{MEASUREMENTS}/{}", id(&measured))).await.expect(204);
    }
    for (api, action) in
        [("events", "CREATE"), ("measurements", "CREATE"), ("events", "DELETE"), ("measurements", "DELETE")]
    {
        assert_told(&told(&mut consumer).await, api, &device, action);
    }
}

#[tokio::test]
async fn what_belonged_to_an_object_that_is_gone_is_gone_without_a_word() {
    let (gateway, device, mut consumer) = listening(&["*"]).await;
    let other = gateway.device("valve").await;
    let objects = [
        (MEASUREMENTS, measurement(&device, "t", 1), measurement(&other, "t", 1)),
        (EVENTS, event(&device, "t", "x"), event(&other, "t", "x")),
        (ALARMS, alarm(&device, "t", "MAJOR"), alarm(&other, "t", "MAJOR")),
        (OPERATIONS, operation(&device), operation(&other)),
    ];
    let mut paths = Vec::new();
    for (path, of_device, of_other) in &objects {
        let made = gateway.post(path, of_device).await.expect(201).json();
        paths.push(format!("{path}/{}", id(&made)));
        gateway.post(path, of_other).await.expect(201);
    }
    gateway.delete(&format!("/inventory/managedObjects/{device}")).await.expect(204);
    for path in &paths {
        gateway.get(path).await.error(404, "");
    }
    for (path, of_device, _) in &objects {
        let many = path.rsplit('/').next().unwrap();
        assert_eq!(ids(&gateway.get(path).await.expect(200).json(), many).len(), 1, "{path}");
        gateway.post(path, of_device).await.error(422, "there is no managed object");
    }
    loop {
        let (description, action, _) = told(&mut consumer).await;
        if action == "DELETE" {
            assert_eq!(description, format!("managedobjects/{device}"), "the one thing that is told");
            break;
        }
    }
    assert!(consumer.is_silent_for(Duration::from_millis(300)).await);
    eventually("the rows are gone", async || {
        (gateway.metric("tidegate_objects_deleted_total").await >= 4.0).then_some(())
    })
    .await;
}

// `retention.*_days`: what is too old goes, the rest stays, and nobody is told.
#[tokio::test]
async fn what_is_too_old_goes() {
    let days = |setup: Setup, kind: &str| setup.env(&format!("TIDEGATE_RETENTION__{kind}_DAYS"), "30");
    let mut gateway = ["MEASUREMENTS", "EVENTS", "ALARMS"].into_iter().fold(Gateway::setup(), days).start().await;
    let device = gateway.device("pump").await;
    let at = |mut object: Value, time: &str| {
        object["time"] = json!(time);
        object
    };
    const OLD: &str = "2020-01-01T00:00:00Z";
    const NEVER: &str = "2200-01-01T00:00:00Z";
    for (path, object) in [
        (MEASUREMENTS, at(measurement(&device, "t", 1), OLD)),
        (MEASUREMENTS, at(measurement(&device, "t", 2), NEVER)),
        (EVENTS, at(event(&device, "t", "x"), OLD)),
        (EVENTS, at(event(&device, "t", "y"), NEVER)),
        (ALARMS, at(alarm(&device, "open", "MAJOR"), OLD)),
        (ALARMS, at(alarm(&device, "cleared", "MAJOR"), OLD)),
        (OPERATIONS, operation(&device)),
    ] {
        gateway.post(path, &object).await.expect(201);
    }
    gateway.put(&format!("{ALARMS}?type=cleared"), &json!({"status": "CLEARED"})).await.expect(200);
    gateway.restart().await;
    let left = async |path: &str| {
        let page = gateway.get(path).await.expect(200).json();
        page[path.rsplit('/').next().unwrap()].as_array().unwrap().clone()
    };
    for (path, name, value) in [(MEASUREMENTS, "time", NEVER), (EVENTS, "text", "y"), (ALARMS, "status", "ACTIVE")] {
        let one = eventually(path, async || <[Value; 1]>::try_from(left(path).await).ok()).await;
        assert_eq!(one[0][name], value, "{path}");
    }
    assert_eq!(left(OPERATIONS).await.len(), 1);
}

// go-c8y-cli's documentation warns of it: with `*` an alarm comes under both of its names, and each has to be acknowledged
// (seed 001, "Notification message header and content": clients "must accept and acknowledge every message").
#[tokio::test]
async fn a_wildcard_tells_alarms_and_events_twice() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&of_object("Sub1", &device, &["*"])).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    gateway.post(ALARMS, &alarm(&device, "c", "MAJOR")).await.expect(201);
    gateway.post(EVENTS, &event(&device, "b", "x")).await.expect(201);
    let frames = consumer.take(5).await;
    let names: Vec<_> = frames.iter().map(|frame| frame.description.split('/').nth(2).unwrap()).collect();
    assert_eq!(names, ["managedobjects", "alarms", "alarmsWithChildren", "events", "eventsWithChildren"]);
    assert_ne!(frames[1].ack, frames[2].ack);
    for frame in frames.iter().filter(|frame| !frame.description.contains("alarmsWithChildren")) {
        consumer.ack(frame).await;
    }
    consumer.close().await;
    let mut again = gateway.reconnect("Sub1", "subA").await;
    assert_eq!(again.receive().await.description, format!("/edge/alarmsWithChildren/{device}"));
}

// c8y_api and pyc8y split a frame by `splitlines`: what Python takes for the end of a line must not break the body.
#[tokio::test]
async fn a_text_with_all_kinds_of_line_ends_comes_through() {
    let (gateway, device, mut consumer) = listening(&["events", "alarms", "operations"]).await;
    let text = "a\u{2028}b\u{85}c\nd\u{2029}e\rf\u{b}g\u{1c}h";
    gateway.post(EVENTS, &event(&device, "t", text)).await.expect(201);
    let mut raised = alarm(&device, "t", "MAJOR");
    raised["text"] = json!(text);
    gateway.post(ALARMS, &raised).await.expect(201);
    let mut asked = operation(&device);
    asked["description"] = json!(text);
    gateway.post(OPERATIONS, &asked).await.expect(201);
    for member in ["text", "text", "description"] {
        let frame = consumer.receive().await;
        assert!(
            !frame.body.contains(|c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}')),
            "{:?}",
            frame.body
        );
        assert_eq!(frame.json()[member], text);
    }
}

// Cumulocity OpenAPI: without `Accept` there is no body, for every API and method that has one.
#[tokio::test]
async fn without_accept_there_is_no_body() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    for (path, new, patch) in [
        (EVENTS, event(&device, "t", "x"), json!({"text": "y"})),
        (ALARMS, alarm(&device, "t", "MAJOR"), json!({"text": "y"})),
        (OPERATIONS, operation(&device), json!({"status": "EXECUTING"})),
        (MEASUREMENTS, measurement(&device, "t", 1), Value::Null),
        ("/notification2/subscriptions", of_object("Sub1", &device, &["events"]), Value::Null),
    ] {
        let media = path.rsplit('/').next().unwrap().trim_end_matches('s');
        let vendor = format!("application/vnd.com.nsn.cumulocity.{media}+json");
        let bare = gateway.call("POST", path).header("Accept", "").json(&new).await.expect(201);
        assert!(bare.body.is_empty(), "POST {path}: {}", bare.text());
        let one = bare.header("location").unwrap().strip_prefix(&format!("http://{}", gateway.addr)).unwrap();
        // Clients read the id from it.
        let made = gateway.get(one).await.expect(200).json();
        assert_eq!(one, format!("{path}/{}", id(&made)));
        if !patch.is_null() {
            let bare = gateway.call("PUT", one).header("Accept", "").json(&patch).await.expect(200);
            assert!(bare.body.is_empty(), "PUT {path}: {}", bare.text());
            let full = gateway.call("PUT", one).header("Accept", &vendor).json(&patch).await.expect(200);
            assert!(full.header("content-type").unwrap().starts_with(&vendor), "PUT {path}");
            assert_eq!(full.json()["id"], made["id"]);
            let full = gateway.call("POST", path).header("Accept", &vendor).json(&new).await.expect(201);
            assert!(full.header("content-type").unwrap().starts_with(&vendor), "POST {path}");
            assert!(full.json()["id"].is_string());
        }
    }
}

#[tokio::test]
async fn roles_and_tenants_keep_objects_apart() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.add_user("edge", "reader", "ROLE_EVENT_READ,ROLE_ALARM_READ,ROLE_DEVICE_CONTROL_READ").await;
    gateway.add_user("other", "admin", "*").await;
    let (reader, other) = (("edge/reader", PASSWORD), ("other/admin", PASSWORD));
    for (path, new, patch) in [
        (EVENTS, event(&device, "t", "x"), json!({"text": "y"})),
        (ALARMS, alarm(&device, "t", "MAJOR"), json!({"text": "y"})),
        (OPERATIONS, operation(&device), json!({"status": "EXECUTING"})),
    ] {
        let many = path.rsplit('/').next().unwrap();
        let made = gateway.post(path, &new).await.expect(201).json();
        let one = format!("{path}/{}", id(&made));
        gateway.get(&one).user(reader.0, reader.1).await.expect(200);
        gateway.post(path, &new).user(reader.0, reader.1).await.error(403, "");
        gateway.put(&one, &patch).user(reader.0, reader.1).await.error(403, "");
        gateway.delete(path).user(reader.0, reader.1).await.error(403, "");
        gateway.get(path).anonymous().await.error(401, "");
        gateway.get(&one).user(other.0, other.1).await.error(404, "");
        gateway.put(&one, &patch).user(other.0, other.1).await.error(404, "");
        gateway.post(path, &new).user(other.0, other.1).await.error(422, "there is no managed object");
        assert_eq!(gateway.get(path).user(other.0, other.1).await.expect(200).json()[many], json!([]));
        gateway.delete(path).user(other.0, other.1).await.expect(204);
        gateway.get(&one).await.expect(200);
    }
}

// `store.max_bytes`: 507, and room again when something is deleted.
#[tokio::test]
async fn a_full_store_takes_no_events() {
    let gateway = Gateway::with("[store]\nmax_bytes = 1048576").await;
    let device = gateway.device("pump").await;
    let mut large = event(&device, "t", "x");
    large["note"] = json!("x".repeat(50_000));
    let mut answers = Vec::new();
    for _ in 0..30 {
        answers.push(gateway.post(EVENTS, &large).await);
    }
    let refused = answers.into_iter().find(|answer| answer.status != 201).expect("the store is full");
    refused.error(507, "the store is full");
    gateway.delete(&format!("{EVENTS}?source={device}")).await.expect(204);
    gateway.post(EVENTS, &large).await.expect(201);
}

#[tokio::test]
async fn a_request_for_too_many_bytes_of_alarms_is_413() {
    let gateway = Gateway::with("[limits]\nfan_out_bytes = 100000").await;
    let device = gateway.device("pump").await;
    let mut large = alarm(&device, "t", "MAJOR");
    large["note"] = json!("x".repeat(40_000));
    let small = alarm(&device, "t", "MAJOR");
    gateway.post(ALARMS, &json!({"alarms": [large, small]})).await.expect(201);
    gateway.post(ALARMS, &json!({"alarms": [small, small, small]})).await.error(413, "100000 bytes");
    let list = gateway.get(ALARMS).await.expect(200).json();
    assert_eq!(list["alarms"][0]["count"], 2, "all or nothing");
}
