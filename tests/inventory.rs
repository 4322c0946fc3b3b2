//! Managed objects (Cumulocity OpenAPI, "Managed objects").

use serde_json::json;

use crate::harness::{Gateway, PASSWORD, raw};

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

#[tokio::test]
async fn objects_are_listed_by_what_is_asked_for() {
    let gateway = Gateway::start().await;
    let mut ids = Vec::new();
    for body in [
        json!({"name": "pump 1", "type": "c8y_Pump", "c8y_IsDevice": {}, "c8y_Hardware": {"serialNumber": "S-1"}}),
        json!({"name": "pump 2", "type": "c8y_Pump", "c8y_IsDevice": {}, "owner": "device_2"}),
        json!({"name": "hall", "type": "c8y_Hall"}),
    ] {
        let created = gateway.post("/inventory/managedObjects", &body).await.expect(201).json();
        ids.push(created["id"].as_str().unwrap().to_owned());
    }
    let reference = json!({"managedObject": {"id": ids[0]}});
    gateway.post(&format!("/inventory/managedObjects/{}/childAssets", ids[2]), &reference).await.expect(201);
    gateway.add_user("other", "boss", "*").await;
    gateway
        .post("/inventory/managedObjects", &json!({"name": "pump 1"}))
        .user("other/boss", PASSWORD)
        .await
        .expect(201);

    let both = format!("ids={},{}", ids[0], ids[2]);
    let child = format!("childAssetId={}", ids[0]);
    let id = format!("query=id+eq+'{}'", ids[1]);
    for (query, expected) in [
        ("", &[0, 1, 2][..]),
        ("type=c8y_Pump", &[0, 1]),
        ("fragmentType=c8y_Hardware", &[0]),
        (&both, &[0, 2]),
        ("text=S-1", &[0]),
        ("owner=device_2", &[1]),
        (&child, &[2]),
        ("childDeviceId=1", &[]),
        ("query=name+eq+'pump*'", &[0, 1]),
        ("query=$filter=(has(c8y_IsDevice)+and+name+eq+'*2')+$orderby=id", &[1]),
        ("query=%24filter%3Dnot%28type%20eq%20%27c8y_Pump%27%29", &[2]),
        ("q=$filter=(owner+eq+'admin')", &[0]),
        (&id, &[1]),
        ("unknown=parameter", &[0, 1, 2]),
    ] {
        let page =
            gateway.get(&format!("/inventory/managedObjects?{query}&withTotalElements=true")).await.expect(200).json();
        let found: Vec<_> =
            page["managedObjects"].as_array().unwrap().iter().map(|object| object["id"].clone()).collect();
        let expected: Vec<_> = expected.iter().map(|at| json!(ids[*at])).collect();
        assert_eq!((&found, &page["statistics"]["totalElements"]), (&expected, &json!(expected.len())), "{query}");
        let count = gateway.get(&format!("/inventory/managedObjects/count?{query}")).await.expect(200);
        assert_eq!(
            (count.text(), count.header("content-type")),
            (expected.len().to_string(), Some("text/plain")),
            "{query}"
        );
    }

    let page = gateway.get("/inventory/managedObjects?pageSize=2&withTotalPages=true").await.expect(200);
    assert!(page.header("content-type").unwrap().starts_with("application/json"));
    let page = page.json();
    assert_eq!(page["statistics"], json!({"currentPage": 1, "pageSize": 2, "totalPages": 2}));
    let next = page["next"].as_str().unwrap().strip_prefix(&format!("http://{}", gateway.addr)).unwrap();
    let last = gateway.get(next).await.expect(200).json();
    assert_eq!((&last["managedObjects"][0]["id"], last.get("next")), (&json!(ids[2]), None));
    assert_eq!(last["managedObjects"][0]["childAssets"]["references"][0]["managedObject"]["name"], "pump 1");
    assert_eq!(last["managedObjects"][0], gateway.get(&format!("/inventory/managedObjects/{}", ids[2])).await.json());
    let with_parents =
        gateway.get("/inventory/managedObjects?withParents=true&withChildren=false").await.expect(200).json();
    assert_eq!(with_parents["managedObjects"][0]["assetParents"]["references"][0]["managedObject"]["id"], ids[2]);
    assert_eq!(with_parents["managedObjects"][2]["childAssets"]["references"], json!([]));
    let past = gateway.get("/inventory/managedObjects?currentPage=99").await.expect(200).json();
    assert_eq!(past["managedObjects"], json!([]));
}

#[tokio::test]
async fn lists_that_cannot_be_are_refused_with_the_place() {
    let gateway = Gateway::start().await;
    for (query, text) in [
        ("ids=1,x", "ids: must be ids"),
        ("childDeviceId=x", "childDeviceId"),
        ("type=", "type: must not be empty"),
        ("query=name+like+'x'", "query: 'eq' is expected at character 6"),
        ("query=c8y_Position.lng+gt+10", "at character 1"),
        ("query=$orderby=name", "'id' is expected at character 10"),
    ] {
        let refused = gateway.get(&format!("/inventory/managedObjects?{query}")).await;
        assert_eq!(refused.json()["error"], "inventory/Invalid Data", "{query}");
        refused.error(422, text);
        gateway.get(&format!("/inventory/managedObjects/count?{query}")).await.error(422, text);
    }
    gateway.get("/inventory/managedObjects?pageSize=2001").await.error(422, "pageSize");
    gateway.get("/inventory/managedObjects?withParents=2").await.error(422, "withParents");
    gateway.add_user("edge", "maker", "ROLE_INVENTORY_CREATE").await;
    for path in ["/inventory/managedObjects", "/inventory/managedObjects/count"] {
        gateway.get(path).user("edge/maker", PASSWORD).await.error(403, "");
    }
}

// c8y_api 3.7.3 creates alarms at `/alarm/alarms/` and changes them at `/alarm/alarms//1`.
#[tokio::test]
async fn empty_segments_of_a_path_are_dropped_but_not_those_of_external_ids() {
    let gateway = Gateway::start().await;
    let made = gateway.post("//inventory/managedObjects/", &json!({"name": "pump"})).await.expect(201);
    let id = made.json()["id"].as_str().unwrap().to_owned();
    let link = format!("http://{}/inventory/managedObjects/{id}", gateway.addr);
    assert_eq!((made.header("location"), &made.json()["self"]), (Some(&*link), &json!(link)));
    gateway.put(&format!("/inventory/managedObjects//{id}//"), &json!({"name": "pump 2"})).await.expect(200);
    let list = gateway.get("/inventory//managedObjects/?pageSize=1").await.expect(200).json();
    assert_eq!(list["managedObjects"][0]["name"], "pump 2");
    gateway.call("PATCH", "/inventory/managedObjects/").await.error(405, "GET, POST");
    gateway.get("/inventory/").await.expect(200);
    gateway.get("/nothing//here/").await.error(404, "");

    for value in ["http://a//b", "a/"] {
        let external = json!({"type": "url", "externalId": value});
        gateway.post(&format!("/identity/globalIds/{id}/externalIds"), &external).await.expect(201);
        let found = gateway.get(&format!("/identity/externalIds/url/{value}")).await.expect(200).json();
        assert_eq!((&found["externalId"], &found["managedObject"]["id"]), (&json!(value), &json!(id)));
    }
    gateway.get("/identity/externalIds/url/http://a/b").await.error(404, "");
}

// A page of large objects: bounded in bytes, not only in rows.
#[tokio::test]
async fn a_page_is_bounded_in_bytes() {
    let gateway = Gateway::start().await;
    let large = json!({"text": "x".repeat(1_000_000)});
    for _ in 0..18 {
        gateway.call("POST", "/inventory/managedObjects").json(&large).await.expect(201);
    }
    gateway.get("/inventory/managedObjects?pageSize=16").await.expect(200);
    gateway.get("/inventory/managedObjects?pageSize=18").await.error(422, "pageSize: the page is larger than");
}

#[tokio::test]
async fn a_subscription_shows_the_name_of_its_source() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let nameless = gateway.post("/inventory/managedObjects", &json!({})).await.expect(201).json();
    let subscribe = async |id: &str| {
        gateway.subscribe(&json!({"context": "mo", "source": {"id": id}, "subscription": "Sub1"})).await
    };
    let subscription = subscribe(&device).await;
    let link = format!("http://{}/inventory/managedObjects/{device}", gateway.addr);
    assert_eq!(subscription["source"], json!({"id": device, "name": "pump", "self": link}));
    assert_eq!(subscribe(nameless["id"].as_str().unwrap()).await["source"].get("name"), None);
    let renamed = json!({"name": "pump \u{2028}2"});
    gateway.put(&format!("/inventory/managedObjects/{device}"), &renamed).await.expect(200);
    let path = format!("/notification2/subscriptions/{}", subscription["id"].as_str().unwrap());
    for restarted in [false, true] {
        if restarted {
            gateway.restart().await;
        }
        assert_eq!(gateway.get(&path).await.expect(200).json()["source"]["name"], renamed["name"]);
        let listed = gateway.get(&format!("/notification2/subscriptions?source={device}")).await.expect(200).json();
        assert_eq!(listed["subscriptions"][0]["source"]["name"], renamed["name"]);
    }
    gateway.put(&format!("/inventory/managedObjects/{device}"), &json!({"name": null})).await.expect(200);
    assert_eq!(gateway.get(&path).await.expect(200).json()["source"].get("name"), None);
}

// A client that goes away before its answer leaves nothing that the disk has and memory has not.
#[tokio::test]
async fn requests_of_clients_that_went_away_are_carried_out_to_the_end() {
    use tokio::io::AsyncWriteExt as _;
    let gateway = Gateway::start().await;
    let body = r#"{"name":"orphan"}"#;
    let post = format!(
        "POST /inventory/managedObjects HTTP/1.1\r\nHost: g\r\nContent-Length: {}\r\n\
         Authorization: Basic ZWRnZS9hZG1pbjpjb3JyZWN0IGhvcnNlIGJhdHRlcnkgc3RhcGxl\r\n\r\n{body}",
        body.len()
    );
    gateway.device("the first request, which waits for its password to be verified").await;
    for _ in 0..100 {
        let mut socket = tokio::net::TcpStream::connect(gateway.addr).await.unwrap();
        socket.write_all(post.as_bytes()).await.unwrap();
    }
    for _ in 0..20 {
        // Those under way are on disk before these.
        gateway.device("later").await;
    }
    let page = gateway.get("/inventory/managedObjects?query=name+eq+orphan&pageSize=2000").await.expect(200).json();
    let found = page["managedObjects"].as_array().unwrap();
    assert!(!found.is_empty(), "no request arrived");
    for object in found {
        gateway.measure(object["id"].as_str().unwrap(), "t", 1).await;
    }
}
