//! Children of managed objects (Cumulocity OpenAPI, "Child operations"), and what goes with a deleted one.

use serde_json::{Value, json};

use crate::harness::{Consumer, Gateway, PASSWORD, event};

const OBJECTS: &str = "/inventory/managedObjects";
const KINDS: [(&str, &str); 3] =
    [("childDevices", "deviceParents"), ("childAssets", "assetParents"), ("childAdditions", "additionParents")];

async fn made(gateway: &Gateway, object: Value) -> String {
    gateway.post(OBJECTS, &object).await.expect(201).json()["id"].as_str().unwrap().to_owned()
}

async fn link(gateway: &Gateway, parent: &str, kind: &str, child: &str) {
    let reference = json!({"managedObject": {"id": child}});
    gateway.post(&format!("{OBJECTS}/{parent}/{kind}"), &reference).await.expect(201);
}

/// Ids in the references of an object or a page of children.
fn ids(references: &Value) -> Vec<String> {
    let references = references.as_array().unwrap().iter();
    references.map(|reference| reference["managedObject"]["id"].as_str().unwrap().to_owned()).collect()
}

async fn object(gateway: &Gateway, id: &str) -> Value {
    gateway.get(&format!("{OBJECTS}/{id}?withParents=true")).await.expect(200).json()
}

#[tokio::test]
async fn children_are_linked_listed_and_unlinked() {
    let mut gateway = Gateway::start().await;
    let parent = gateway.device("parent").await;
    let base = format!("http://{}{OBJECTS}", gateway.addr);
    for (kind, parents) in KINDS {
        let collection = format!("{OBJECTS}/{parent}/{kind}");
        let (a, b, c) = (gateway.device("a").await, gateway.device("b").await, gateway.device("c").await);
        // A reference.
        let linked = gateway.post(&collection, &json!({"managedObject": {"id": a}})).await.expect(201);
        let one = format!("{base}/{parent}/{kind}/{a}");
        assert_eq!(linked.header("location"), Some(one.as_str()));
        let linked = linked.json();
        assert_eq!((&linked["self"], &linked["managedObject"]["name"]), (&json!(one), &json!("a")));
        // Several, one of which is linked already.
        let many = json!({"references": [{"managedObject": {"id": b}}, {"managedObject": {"id": a}}]});
        let many = gateway.post(&collection, &many).await.expect(201).json();
        assert_eq!(ids(&many["references"]), [a.as_str(), b.as_str()]);
        // The vendor's media type, and no body without `Accept`.
        let vendor = "application/vnd.com.nsn.cumulocity.managedobjectreference+json;charset=UTF-8;ver=0.9";
        let call = gateway.call("POST", &collection).body(vendor, json!({"managedObject": {"id": c}}).to_string());
        call.await.expect(201);
        // A new object.
        let vendor = "application/vnd.com.nsn.cumulocity.managedobject+json";
        let new =
            gateway.call("POST", &collection).header("Accept", "application/json").body(vendor, r#"{"name":"d"}"#);
        let new = new.await.expect(201).json();
        let d = new["id"].as_str().unwrap().to_owned();
        assert_eq!((&new["name"], &new["owner"]), (&json!("d"), &json!("admin")));

        let expected = [a.clone(), b.clone(), c.clone(), d.clone()];
        for restarted in [false, true] {
            if restarted {
                gateway.restart().await;
            }
            let shown = object(&gateway, &parent).await;
            assert_eq!(ids(&shown[kind]["references"]), expected, "{kind}");
            let first = json!({"managedObject": {"id": a, "name": "a", "self": format!("{base}/{a}")}, "self": one});
            assert_eq!(shown[kind]["references"][0], first);
            assert_eq!(ids(&object(&gateway, &d).await[parents]["references"]), [parent.as_str()]);
            let plain = gateway.get(&format!("{OBJECTS}/{d}")).await.expect(200).json();
            assert_eq!(plain[parents]["references"], json!([]), "parents are shown on request only");
        }
        let bare = gateway.get(&format!("{OBJECTS}/{parent}?withChildren=false")).await.expect(200).json();
        assert_eq!(bare[kind]["references"], json!([]));
        let nameless = gateway.get(&format!("{OBJECTS}/{parent}?skipChildrenNames=true")).await.expect(200).json();
        assert_eq!(nameless[kind]["references"][0]["managedObject"].get("name"), None);

        let page = |query: &str| gateway.get(&format!("{collection}?{query}"));
        let first = page("pageSize=3&withTotalElements=true&withTotalPages=true").await.expect(200).json();
        assert_eq!(ids(&first["references"]), expected[..3]);
        assert_eq!(first["references"][0]["managedObject"]["c8y_IsDevice"], json!({}), "the whole object");
        assert_eq!(first["references"][0]["self"], one);
        assert_eq!((&first["statistics"]["totalElements"], &first["statistics"]["totalPages"]), (&json!(4), &json!(2)));
        let next =
            first["next"].as_str().unwrap().strip_prefix(&format!("http://{}", gateway.addr)).unwrap().to_owned();
        let second = gateway.get(&next).await.expect(200).json();
        assert_eq!((ids(&second["references"]), second.get("next")), (vec![d.clone()], None));
        assert_eq!(page("currentPage=9").await.expect(200).json()["references"], json!([]));
        assert_eq!(ids(&page("query=name+eq+'b'").await.expect(200).json()["references"]), [b.as_str()]);

        let found = gateway.get(&format!("{collection}/{b}")).await.expect(200).json();
        assert_eq!((&found["managedObject"]["id"], &found["managedObject"]["name"]), (&json!(b), &json!("b")));
        assert!(gateway.delete(&format!("{collection}/{b}")).await.expect(204).body.is_empty());
        for call in [gateway.get(&format!("{collection}/{b}")), gateway.delete(&format!("{collection}/{b}"))] {
            let refused = call.await;
            assert_eq!(refused.json()["error"], "inventory/Invalid Data");
            refused.error(422, &format!("managedObject {b} is not a child of {parent}"));
        }
        let rest = json!({"references": [{"managedObject": {"id": a}}, {"managedObject": {"id": b}}]});
        gateway.call("DELETE", &collection).json(&rest).await.error(422, "is not a child of");
        assert_eq!(ids(&object(&gateway, &parent).await[kind]["references"]).len(), 3, "all or none");
        let rest = json!({"references": [{"managedObject": {"id": a}}, {"managedObject": {"id": c}}]});
        assert!(gateway.call("DELETE", &collection).json(&rest).await.expect(204).body.is_empty());
        gateway.restart().await;
        assert_eq!(ids(&object(&gateway, &parent).await[kind]["references"]), [d.as_str()]);
        gateway.get(&format!("{OBJECTS}/{a}")).await.expect(200);
    }
}

#[tokio::test]
async fn links_that_cannot_be_are_refused() {
    let gateway = Gateway::start().await;
    let (one, two) = (gateway.device("one").await, gateway.device("two").await);
    let collection = format!("{OBJECTS}/{one}/childDevices");
    let reference = |id: &str| json!({"managedObject": {"id": id}});
    let missing = gateway.post(&collection, &reference("99")).await;
    assert_eq!(missing.json()["error"], "inventory/Not Found");
    missing.error(404, "Finding device data from database failed : there is no managed object '99'");
    let some = json!({"references": [reference(&two), reference("99")]});
    gateway.post(&collection, &some).await.error(404, "'99'");
    gateway.post(&collection, &reference(&one)).await.error(422, "its own child");
    for parent in ["99", "abc"] {
        let collection = format!("{OBJECTS}/{parent}/childAssets");
        gateway.post(&collection, &reference(&one)).await.error(404, "Finding device data");
        gateway.post(&collection, &json!({"name": "new"})).await.error(404, "Finding device data");
        gateway.get(&collection).await.error(404, "Finding device data");
        gateway.get(&format!("{collection}/{one}")).await.error(404, "Finding device data");
        gateway.delete(&format!("{collection}/{one}")).await.error(404, "Finding device data");
    }
    gateway.get(&format!("{collection}/99")).await.error(404, "Finding device data");
    gateway.delete(&format!("{collection}/x")).await.error(404, "Finding device data");
    for (body, text) in [
        (json!({"references": {}}), "references: must be a JSON array"),
        (json!({"references": [reference("x")]}), "references[0].managedObject.id"),
        (json!({"managedObject": {}}), "managedObject.id"),
        (json!({"name": 7}), "name"),
    ] {
        gateway.post(&collection, &body).await.error(422, text);
    }
    gateway.call("DELETE", &collection).json(&json!({})).await.error(422, "references");
    gateway.call("PUT", &collection).json(&json!({})).await.error(405, "GET, POST, DELETE");
    gateway.get(&format!("{collection}?query=size+eq+1")).await.error(422, "at character 1");
    gateway.get(&format!("{collection}?withChildren=maybe")).await.error(422, "withChildren");
    gateway.get(&format!("{OBJECTS}/{one}/childThings")).await.error(404, "");
    assert_eq!(gateway.get(&collection).await.expect(200).json()["references"], json!([]));

    gateway.add_user("other", "boss", "*").await;
    gateway.add_user("edge", "reader", "ROLE_INVENTORY_READ,ROLE_INVENTORY_CREATE").await;
    let boss = "other/boss";
    let theirs = gateway.post(OBJECTS, &json!({})).user(boss, PASSWORD).await.expect(201).json();
    let theirs = theirs["id"].as_str().unwrap();
    gateway.post(&collection, &reference(theirs)).await.error(404, "");
    gateway.post(&collection, &reference(theirs)).user(boss, PASSWORD).await.error(404, "");
    gateway
        .post(&format!("{OBJECTS}/{theirs}/childDevices"), &reference(&one))
        .user(boss, PASSWORD)
        .await
        .error(404, "");
    gateway.get(&collection).user(boss, PASSWORD).await.error(404, "");
    let reader = "edge/reader";
    gateway.get(&collection).user(reader, PASSWORD).await.expect(200);
    gateway.post(&collection, &reference(&two)).user(reader, PASSWORD).await.error(403, "");
    gateway.delete(&format!("{collection}/{two}")).user(reader, PASSWORD).await.error(403, "");
}

#[tokio::test]
async fn the_tree_is_bounded() {
    let limits = "[limits]\nobjects_per_tenant = 8\nlinks_per_tenant = 6\nchildren_per_object = 3\nancestors = 3";
    let gateway = Gateway::with(limits).await;
    let mut devices = Vec::new();
    for n in 0..7 {
        devices.push(gateway.device(&format!("d{n}")).await);
    }
    let post = |parent: usize, kind: &str, child: usize| {
        let reference = json!({"managedObject": {"id": devices[child]}});
        gateway.post(&format!("{OBJECTS}/{}/{kind}", devices[parent]), &reference)
    };
    // A chain: three above the last one.
    for n in 0..3 {
        post(n, "childAssets", n + 1).await.expect(201);
    }
    post(3, "childDevices", 4).await.error(422, "at most 3 others above it");
    post(0, "childDevices", 4).await.expect(201);
    post(0, "childAdditions", 5).await.expect(201);
    post(0, "childDevices", 6).await.error(422, "at most 3 children");
    post(0, "childDevices", 4).await.expect(201);
    post(1, "childDevices", 6).await.expect(201);
    post(4, "childDevices", 5).await.error(422, "at most 6 links");
    let child = gateway.post(&format!("{OBJECTS}/{}/childDevices", devices[4]), &json!({"name": "new"}));
    child.await.error(422, "at most 6 links");
    gateway.device("the eighth").await;
    gateway.post(OBJECTS, &json!({})).await.error(422, "at most 8 managed objects");
    gateway.delete(&format!("{OBJECTS}/{}", devices[6])).await.expect(204);
    post(4, "childDevices", 5).await.expect(201);
    gateway.device("another").await;
}

// Seed 001, "Notification message header and content": an object is the subject of its own messages only; children change
// without a word to their parents.
#[tokio::test]
async fn deletions_follow_the_documented_rules_and_tell_of_each_object_once() {
    let gateway = Gateway::start().await;
    let device = || made(&gateway, json!({"c8y_IsDevice": {}}));
    let plain = || made(&gateway, json!({"type": "room"}));
    let (top, child, grandchild, asset) = (device().await, device().await, device().await, plain().await);
    let outside = device().await;
    link(&gateway, &top, "childDevices", &child).await;
    link(&gateway, &top, "childAdditions", &asset).await;
    link(&gateway, &child, "childAssets", &grandchild).await;
    // Another parent, a second path, and a cycle.
    link(&gateway, &outside, "childAssets", &child).await;
    link(&gateway, &top, "childAssets", &grandchild).await;
    link(&gateway, &grandchild, "childAdditions", &top).await;
    let mut consumers = Vec::new();
    for id in [&top, &child, &grandchild, &asset, &outside] {
        let topic = format!("T{id}");
        gateway
            .subscribe(&json!({
                "context": "mo", "source": {"id": id}, "subscription": topic,
                "subscriptionFilter": {"apis": ["managedobjects"]},
            }))
            .await;
        consumers.push((id, gateway.consumer(&topic, "subA").await));
    }
    let refused = gateway.delete(&format!("{OBJECTS}/{top}")).await;
    assert_eq!(refused.json()["error"], "inventory/conflict");
    refused.error(409, "Cannot delete the specified object as it has associated data.");
    gateway.delete(&format!("{OBJECTS}/{top}?cascade=maybe")).await.error(422, "cascade");
    // An object that is neither a device nor a group needs more than `cascade`.
    let (room, corner) = (plain().await, plain().await);
    link(&gateway, &room, "childAssets", &corner).await;
    gateway.delete(&format!("{OBJECTS}/{room}?cascade=true")).await.error(409, "");
    gateway.delete(&format!("{OBJECTS}/{room}?forceCascade=true")).await.expect(204);
    gateway.get(&format!("{OBJECTS}/{corner}")).await.error(404, "");

    gateway.delete(&format!("{OBJECTS}/{top}?cascade=true&withDeviceUser=true")).await.expect(204);
    for id in [&top, &child, &grandchild, &asset] {
        gateway.get(&format!("{OBJECTS}/{id}")).await.error(404, "");
    }
    assert_eq!(object(&gateway, &outside).await["childAssets"]["references"], json!([]));
    gateway.delete(&format!("{OBJECTS}/{outside}")).await.expect(204);
    let listed = gateway.get("/notification2/subscriptions").await.expect(200).json();
    assert_eq!(listed["subscriptions"], json!([]));
    for (id, consumer) in &mut consumers {
        let frame = consumer.receive().await;
        assert_eq!((frame.description, frame.action.as_str()), (format!("/edge/managedobjects/{id}"), "DELETE"));
        assert_eq!(frame.body, json!({"id": id}).to_string());
        consumer.ping().await;
        assert!(consumer.is_silent_for(std::time::Duration::from_millis(50)).await);
    }
}

#[tokio::test]
async fn a_group_goes_with_its_subgroups_and_leaves_its_devices() {
    let mut gateway = Gateway::with("[limits]\nbulk_count = 3").await;
    let group = made(&gateway, json!({"type": "c8y_DeviceGroup", "c8y_IsDeviceGroup": {}})).await;
    let sub = made(&gateway, json!({"type": "c8y_DeviceSubGroup"})).await;
    let (inner, outer) = (gateway.device("inner").await, gateway.device("outer").await);
    link(&gateway, &group, "childAssets", &sub).await;
    link(&gateway, &group, "childAssets", &outer).await;
    link(&gateway, &sub, "childAssets", &inner).await;
    link(&gateway, &inner, "childDevices", &outer).await;
    link(&gateway, &outer, "childDevices", &gateway.device("deep").await).await;
    gateway.delete(&format!("{OBJECTS}/{group}?cascade=true")).await.error(422, "More than 3 objects");
    gateway.delete(&format!("{OBJECTS}/{group}")).await.expect(204);
    for restarted in [false, true] {
        if restarted {
            gateway.restart().await;
        }
        gateway.get(&format!("{OBJECTS}/{sub}")).await.error(404, "");
        for id in [&inner, &outer] {
            assert_eq!(object(&gateway, id).await["assetParents"]["references"], json!([]));
        }
        assert_eq!(ids(&object(&gateway, &outer).await["deviceParents"]["references"]), [inner.as_str()]);
    }
}

// Facts of the platform: a new child is a creation like any other; linking tells nobody anything.
#[tokio::test]
async fn links_notify_nobody_and_notifications_show_no_references() {
    let gateway = Gateway::start().await;
    let (parent, child) = (gateway.device("parent").await, gateway.device("child").await);
    let subscribe = async |topic: &str, subscription: Value| -> Consumer {
        let mut subscription = subscription;
        subscription["subscription"] = json!(topic);
        subscription["subscriptionFilter"] = json!({"apis": ["managedobjects"]});
        gateway.subscribe(&subscription).await;
        gateway.consumer(topic, "subA").await
    };
    let mut of_parent = subscribe("Parent", json!({"context": "mo", "source": {"id": parent}})).await;
    let mut of_child = subscribe("Child", json!({"context": "mo", "source": {"id": child}})).await;
    let mut of_tenant = subscribe("Tenant", json!({"context": "tenant"})).await;
    link(&gateway, &parent, "childDevices", &child).await;
    let new =
        gateway.post(&format!("{OBJECTS}/{parent}/childAssets"), &json!({"name": "new"})).await.expect(201).json();
    gateway.put(&format!("{OBJECTS}/{child}"), &json!({"name": "child 2"})).await.expect(200);
    let changed = gateway.put(&format!("{OBJECTS}/{parent}"), &json!({"name": "parent 2"})).await.expect(200).json();
    assert_eq!(ids(&changed["childDevices"]["references"]), [child.as_str()], "an answer shows them");
    assert_eq!(object(&gateway, &parent).await["childDevices"]["references"][0]["managedObject"]["name"], "child 2");
    gateway.delete(&format!("{OBJECTS}/{parent}/childDevices/{child}")).await.expect(204);
    for (consumer, subject, action, name) in [
        (&mut of_parent, parent.as_str(), "UPDATE", "parent 2"),
        (&mut of_child, &child, "UPDATE", "child 2"),
        (&mut of_tenant, new["id"].as_str().unwrap(), "CREATE", "new"),
    ] {
        let frame = consumer.receive().await;
        assert_eq!((frame.description.as_str(), &*frame.action), (&*format!("/edge/managedobjects/{subject}"), action));
        let body = frame.json();
        assert_eq!(body["name"], name);
        for (children, parents) in KINDS {
            assert_eq!((&body[children]["references"], &body[parents]["references"]), (&json!([]), &json!([])));
        }
        consumer.ping().await;
        assert!(consumer.is_silent_for(std::time::Duration::from_millis(50)).await, "{name}");
    }
}

// Seed 000, "Message backlog quota": the request fails, but the operational store has it.
#[tokio::test]
async fn what_a_full_backlog_keeps_back_is_stored_and_in_memory() {
    let mut gateway = Gateway::with("[backlog]\nquota_bytes = 4096").await;
    let (parent, old) = (gateway.device("parent").await, gateway.device("old").await);
    link(&gateway, &parent, "childDevices", &old).await;
    for subscription in [
        json!({"context": "tenant", "subscription": "Full", "subscriptionFilter": {"apis": ["managedobjects"]}}),
        json!({"context": "mo", "source": {"id": old}, "subscription": "Full"}),
        json!({"context": "mo", "source": {"id": parent}, "subscription": "Full"}),
    ] {
        gateway.subscribe(&subscription).await;
    }
    gateway.consumer("Full", "subA").await.close().await;
    while gateway.post(&format!("{OBJECTS}/{parent}/childAssets"), &json!({"name": "new"})).await.status == 201 {}
    let refused = gateway.post(&format!("{OBJECTS}/{parent}/childAssets"), &json!({"name": "last"})).await;
    refused.error(500, "Full");
    gateway.put(&format!("{OBJECTS}/{parent}"), &json!({"name": "renamed"})).await.error(500, "Full");
    // The last free bytes go to messages as small as that of the deletion.
    let deleted = || gateway.delete(&format!("{OBJECTS}/{old}"));
    while deleted().header("X-Cumulocity-Processing-Mode", "TRANSIENT").await.status == 204 {}
    deleted().await.error(500, "Full");
    let seen = async |gateway: &Gateway| {
        let (parent, subscriptions) =
            (object(gateway, &parent).await, gateway.get("/notification2/subscriptions").await);
        (parent, subscriptions.expect(200).json()["subscriptions"].clone())
    };
    let (shown, subscriptions) = seen(&gateway).await;
    assert_eq!((&shown["name"], &shown["childDevices"]["references"]), (&json!("renamed"), &json!([])));
    let last = shown["childAssets"]["references"].as_array().unwrap().last().unwrap()["managedObject"].clone();
    assert_eq!(last["name"], "last");
    assert_eq!(subscriptions.as_array().unwrap().len(), 2, "that of the deleted object is gone");
    assert_eq!(subscriptions[1]["source"]["name"], "renamed");
    gateway.measure(last["id"].as_str().unwrap(), "t", 1).await;
    gateway.post_measurement(&crate::harness::measurement(&old, "t", 1)).await.error(422, "source.id");
    gateway.restart().await;
    assert_eq!(seen(&gateway).await, (shown, subscriptions));
}

#[tokio::test]
async fn processing_modes_are_kept() {
    let gateway = Gateway::start().await;
    let (parent, child) = (gateway.device("parent").await, gateway.device("child").await);
    let subscription =
        json!({"context": "tenant", "subscription": "S", "subscriptionFilter": {"apis": ["managedobjects"]}});
    gateway.subscribe(&subscription).await;
    let mut consumer = gateway.consumer("S", "subA").await;
    let collection = format!("{OBJECTS}/{parent}/childDevices");
    let transient = |call: crate::harness::Call| call.header("X-Cumulocity-Processing-Mode", "TRANSIENT");
    let quiet = |call: crate::harness::Call| call.header("X-Cumulocity-Processing-Mode", "QUIESCENT");
    for path in [OBJECTS, &collection] {
        let gone = transient(gateway.post(path, &json!({"name": "told"}))).await.expect(201);
        assert_eq!(gone.header("location"), None);
        gateway.get(&format!("{OBJECTS}/{}", gone.json()["id"].as_str().unwrap())).await.error(404, "");
        assert_eq!(consumer.receive().await.json()["name"], "told");
        let stored = quiet(gateway.post(path, &json!({"name": "stored"}))).await.expect(201).json();
        gateway.get(&format!("{OBJECTS}/{}", stored["id"].as_str().unwrap())).await.expect(200);
    }
    assert_eq!(object(&gateway, &parent).await["childDevices"]["references"].as_array().unwrap().len(), 1);
    let reference = json!({"managedObject": {"id": child}});
    transient(gateway.post(&collection, &reference)).await.error(422, "X-Cumulocity-Processing-Mode");
    quiet(gateway.post(&collection, &reference)).await.expect(201);
    transient(gateway.delete(&format!("{collection}/{child}"))).await.error(422, "X-Cumulocity-Processing-Mode");
    transient(gateway.put(&format!("{OBJECTS}/{child}"), &json!({"name": "x"}))).await.expect(200);
    transient(gateway.delete(&format!("{OBJECTS}/{child}"))).await.expect(204);
    assert_eq!(gateway.get(&format!("{OBJECTS}/{child}")).await.expect(200).json()["name"], "child");
    consumer.ping().await;
    assert!(consumer.is_silent_for(std::time::Duration::from_millis(50)).await);
}

#[tokio::test]
async fn links_made_and_broken_at_once_leave_memory_and_disk_alike() {
    let mut gateway = Gateway::start().await;
    let mut devices = Vec::new();
    for n in 0..4 {
        devices.push(gateway.device(&format!("d{n}")).await);
    }
    let calls = (0..160_usize).map(|n| {
        let (parent, child) = (&devices[n % 4], &devices[(n / 4 + n % 4 + 1) % 4]);
        let collection = format!("{OBJECTS}/{parent}/{}", KINDS[n % 3].0);
        match n / 3 % 3 {
            0 => gateway.delete(&format!("{collection}/{child}")),
            1 => gateway.post(
                &collection,
                &json!({"references": devices.iter().filter(|id| *id != parent)
                .map(|id| json!({"managedObject": {"id": id}})).collect::<Vec<_>>()}),
            ),
            _ => gateway.post(&collection, &json!({"managedObject": {"id": child}})),
        }
        .send()
    });
    for answer in futures_util::future::join_all(calls).await {
        let status = answer.unwrap().status;
        assert!(matches!(status, 201 | 204 | 422), "{status}");
    }
    let deleted = gateway.delete(&format!("{OBJECTS}/{}?forceCascade=true", gateway.device("alone").await));
    deleted.await.expect(204);
    let all = async |gateway: &Gateway| {
        let mut all = Vec::new();
        for id in &devices {
            all.push(object(gateway, id).await);
        }
        all
    };
    let before = all(&gateway).await;
    gateway.restart().await;
    assert_eq!(all(&gateway).await, before);
}

async fn post_event(gateway: &Gateway, device: &str, text: &str) {
    gateway.post("/event/events", &event(device, "c8y_Door", text)).await.expect(201);
}

async fn unlink(gateway: &Gateway, parent: &str, kind: &str, child: &str) {
    gateway.delete(&format!("{OBJECTS}/{parent}/{kind}/{child}")).await.expect(204);
}

// Seed 000, "Subscription filters": all recursively descendant children, in addition to the source itself.
#[tokio::test]
async fn subscriptions_follow_children_of_every_kind_to_any_depth() {
    let mut gateway = Gateway::start().await;
    let top = gateway.device("top").await;
    let mut devices = vec![top.clone()];
    for n in 0..30 {
        let device = gateway.device(&format!("d{n}")).await;
        link(&gateway, &devices[n], KINDS[n % 3].0, &device).await;
        devices.push(device);
    }
    let (bottom, outside) = (devices[30].clone(), gateway.device("outside").await);
    // A second path, and a cycle.
    link(&gateway, &top, "childAssets", &bottom).await;
    link(&gateway, &bottom, "childDevices", &top).await;
    for (topic, apis) in
        [("Children", json!(["eventsWithChildren"])), ("Plain", json!(["events"])), ("All", json!(["*"]))]
    {
        let filter = json!({"apis": apis});
        let source = json!({"id": top});
        gateway
            .subscribe(&json!({"context": "mo", "source": source, "subscription": topic, "subscriptionFilter": filter}))
            .await;
    }
    let mut children = gateway.consumer("Children", "subA").await;
    let mut plain = gateway.consumer("Plain", "subA").await;
    let mut all = gateway.consumer("All", "subA").await;
    for (n, device) in devices.iter().chain([&outside]).enumerate() {
        post_event(&gateway, device, &n.to_string()).await;
    }
    // The tree as it is when a message comes.
    link(&gateway, &devices[7], "childAdditions", &outside).await;
    post_event(&gateway, &outside, "in").await;
    unlink(&gateway, &devices[7], "childAdditions", &outside).await;
    post_event(&gateway, &outside, "out").await;
    unlink(&gateway, &top, "childAssets", &bottom).await;
    post_event(&gateway, &bottom, "one path left").await;

    let own = (top.clone(), "0".to_owned());
    let mut expected: Vec<_> = devices.iter().enumerate().map(|(n, device)| (device.clone(), n.to_string())).collect();
    expected.extend([(outside.clone(), "in".to_owned()), (bottom.clone(), "one path left".to_owned())]);
    for (device, text) in &expected {
        let frame = children.receive().await;
        assert_eq!(frame.description, format!("/edge/eventsWithChildren/{device}"));
        assert_eq!(frame.json()["text"], text.as_str());
        // `*` takes the source's own under both types.
        if *device == own.0 {
            let twice = [all.receive().await.description, all.receive().await.description];
            assert_eq!(twice, [format!("/edge/events/{device}"), format!("/edge/eventsWithChildren/{device}")]);
        } else {
            assert_eq!(all.receive().await.description, format!("/edge/eventsWithChildren/{device}"));
        }
    }
    assert_eq!(plain.receive().await.description, format!("/edge/events/{top}"));
    for consumer in [&mut children, &mut plain, &mut all] {
        consumer.ping().await;
        assert!(consumer.is_silent_for(std::time::Duration::from_millis(50)).await);
    }

    // The tree is there after a start, and what is cut off is followed no more.
    gateway.kill9();
    gateway.restart_process().await;
    let mut children = gateway.reconnect("Children", "subA").await;
    post_event(&gateway, &bottom, "again").await;
    assert_eq!(children.receive().await.json()["text"], "again");
    unlink(&gateway, &devices[15], KINDS[15 % 3].0, &devices[16]).await;
    post_event(&gateway, &bottom, "cut off").await;
    post_event(&gateway, &devices[15], "still below").await;
    assert_eq!(children.receive().await.json()["text"], "still below");
}

// `limits.ancestors`.
#[tokio::test]
async fn a_tree_that_is_too_high_refuses_rather_than_loses() {
    let gateway = Gateway::with("[limits]\nancestors = 2").await;
    let mut devices = Vec::new();
    for n in 0..4 {
        devices.push(gateway.device(&format!("d{n}")).await);
    }
    // From below, where no link has too much above its parent.
    for n in [2, 1, 0] {
        link(&gateway, &devices[n], "childDevices", &devices[n + 1]).await;
    }
    let filter = json!({"apis": ["eventsWithChildren"]});
    let source = json!({"id": devices[0]});
    post_event(&gateway, &devices[3], "nobody follows children").await;
    gateway
        .subscribe(&json!({"context": "mo", "source": source, "subscription": "S", "subscriptionFilter": filter}))
        .await;
    post_event(&gateway, &devices[2], "two above").await;
    let refused = gateway.post("/event/events", &event(&devices[3], "c8y_Door", "three above")).await;
    refused.error(422, "has more than 2 others above it");
}

// Lists of events and alarms can take in what is below their source; an agent's operations are those of all its devices.
#[tokio::test]
async fn lists_take_in_what_is_below_their_source() {
    let gateway = Gateway::start().await;
    let mut ids = Vec::new();
    for name in ["agent", "device", "asset", "stranger"] {
        ids.push(gateway.device(name).await);
    }
    let [agent, device, asset, _] = &ids[..] else { unreachable!() };
    link(&gateway, agent, "childDevices", device).await;
    link(&gateway, device, "childAssets", asset).await;
    for id in &ids {
        let time = "2026-11-30T00:00:00Z";
        let event = json!({"source": {"id": id}, "type": "t", "text": "x", "time": time});
        gateway.post("/event/events", &event).await.expect(201);
        let mut alarm = event.clone();
        alarm["severity"] = json!("MAJOR");
        gateway.post("/alarm/alarms", &alarm).await.expect(201);
        gateway.post("/devicecontrol/operations", &json!({"deviceId": id, "c8y_Restart": {}})).await.expect(201);
    }
    let sources = async |path: &str, array: &str, source: &str| {
        let list = gateway.get(&format!("{path}&pageSize=10")).await.expect(200).json();
        let objects = list[array].as_array().unwrap();
        let mut found: Vec<_> =
            objects.iter().map(|object| object.pointer(source).unwrap().as_str().unwrap().to_owned()).collect();
        found.sort_by_key(|id| id.parse::<u64>().unwrap());
        found
    };
    for (path, array) in [("/event/events", "events"), ("/alarm/alarms", "alarms")] {
        for (flags, expected) in [
            ("", &ids[..1]),
            ("&withSourceDevices=true", &ids[..2]),
            ("&withSourceAssets=true", &ids[..1]),
            ("&withSourceAssets=true&withSourceDevices=true", &ids[..3]),
        ] {
            let found = sources(&format!("{path}?source={agent}{flags}"), array, "/source/id").await;
            assert_eq!(found, expected, "{path} {flags}");
        }
        gateway.get(&format!("{path}?withSourceAssets=true")).await.error(422, "withSourceAssets: is only");
    }
    let operations = "/devicecontrol/operations";
    assert_eq!(sources(&format!("{operations}?agentId={agent}"), "operations", "/deviceId").await, ids[..3]);
    assert_eq!(sources(&format!("{operations}?deviceId={agent}"), "operations", "/deviceId").await, ids[..1]);
    // What is deleted is what is listed.
    gateway.delete(&format!("/event/events?source={agent}&withSourceDevices=true")).await.expect(204);
    assert_eq!(sources("/event/events?x=y", "events", "/source/id").await, ids[2..]);
}
