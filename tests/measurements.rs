//! Measurements (Cumulocity OpenAPI, "Measurements").

use serde_json::{Value, json};

use crate::harness::{BASIC, Gateway, eventually, forwarded, measurement, raw, value_of};
use crate::storage::check;

const PATH: &str = "/measurement/measurements";
const VENDOR: &str = "application/vnd.com.nsn.cumulocity.measurement+json";
const VENDOR_BULK: &str = "application/vnd.com.nsn.cumulocity.measurementcollection+json";

/// The values of a listed page, in its order.
fn values(page: &Value) -> Vec<u64> {
    page["measurements"].as_array().unwrap().iter().map(value_of).collect()
}

#[tokio::test]
async fn a_measurement_is_stored_and_found() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let answer = gateway.post_measurement(&measurement(&device, "c8y_T", 21)).await.expect(201);
    let posted = answer.json();
    let id = posted["id"].as_str().unwrap();
    let url = format!("http://{}{PATH}/{id}", gateway.addr);
    assert_eq!(answer.header("location"), Some(url.as_str()));
    assert_eq!(posted["self"], url);
    assert_eq!(posted["source"]["id"], device);
    assert_eq!(posted["source"]["self"], format!("http://{}/inventory/managedObjects/{device}", gateway.addr));
    assert_eq!((&posted["type"], &posted["time"]), (&json!("c8y_T"), &json!("2026-03-01T12:00:00.000Z")));
    assert_eq!(posted["c8y_Reading"], json!({"R": {"value": 21, "unit": "C"}}));
    assert_eq!(gateway.get(&format!("{PATH}/{id}")).await.expect(200).json(), posted);
    let list = gateway.get(&format!("{PATH}?source={device}")).await.expect(200).json();
    assert_eq!(list["measurements"], json!([posted]));

    for id in ["1", "abc", "0", "-1"] {
        let missing = gateway.get(&format!("{PATH}/{id}")).await;
        assert_eq!(missing.json()["error"], "measurement/Not Found");
        missing.error(404, "Finding measurement from database failed");
    }
}

#[tokio::test]
async fn many_at_once_are_stored_and_told_in_their_order_or_not_at_all() {
    let gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    for device in [&pump, &valve] {
        gateway.subscribe(&forwarded("Sub1", device)).await;
    }
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let bulk = |values: &[u64]| -> Value {
        let both = [&pump, &valve].into_iter().cycle();
        let all: Vec<_> = both.zip(values).map(|(device, value)| measurement(device, "t", *value)).collect();
        json!({"measurements": all})
    };

    let mut poisoned = bulk(&[1, 2, 3]);
    poisoned["measurements"][2]["time"] = json!("noon");
    gateway.post(PATH, &poisoned).await.error(422, "measurements[2]");
    let mut unknown = bulk(&[1, 2]);
    unknown["measurements"][1]["source"]["id"] = json!("1");
    gateway.post(PATH, &unknown).await.error(422, "measurements[1]");
    assert_eq!(gateway.get(PATH).await.expect(200).json()["measurements"], json!([]));

    let posted = gateway.post(PATH, &bulk(&[10, 11, 12, 13])).await.expect(201).json();
    assert_eq!(values(&posted), [10, 11, 12, 13]);
    let vendor = gateway.call("POST", PATH).header("Accept", VENDOR_BULK).body(VENDOR_BULK, bulk(&[14]).to_string());
    let vendor = vendor.await.expect(201);
    assert!(vendor.header("content-type").unwrap().starts_with(VENDOR_BULK));
    for value in 10..15 {
        let frame = consumer.receive().await;
        assert_eq!(value_of(&frame.json()), value, "nothing of the refused ones came");
    }
    assert_eq!(values(&gateway.get(&format!("{PATH}?pageSize=100")).await.expect(200).json()).len(), 5);
}

// Cumulocity OpenAPI, "Processing mode".
#[tokio::test]
async fn the_processing_mode_decides_on_store_and_notification() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let post = async |mode: &str, value: u64| {
        let call = gateway.post_measurement(&measurement(&device, "t", value));
        call.header("X-Cumulocity-Processing-Mode", mode).await
    };
    post("TRANSIENT", 1).await.expect(201);
    post("QUIESCENT", 2).await.expect(201);
    post("PERSISTENT", 3).await.expect(201);
    post("transient", 4).await.expect(201);
    post("EAGER", 5).await.error(422, "X-Cumulocity-Processing-Mode");
    gateway.measure(&device, "t", 6).await;

    for value in [1, 3, 4, 6] {
        assert_eq!(value_of(&consumer.receive().await.json()), value, "told");
    }
    let list = gateway.get(&format!("{PATH}?source={device}")).await.expect(200).json();
    assert_eq!(values(&list), [2, 3, 6], "stored");
}

#[tokio::test]
async fn lists_have_pages_and_filters() {
    let gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    for value in 1..=7 {
        let mut one = measurement(&pump, if value % 2 == 0 { "even" } else { "odd" }, value);
        one["time"] = json!(format!("2026-03-0{value}T12:00:00Z"));
        gateway.post_measurement(&one).await.expect(201);
    }
    let mut other = measurement(&valve, "odd", 99);
    other["c8y_Extra"] = json!({"S": {"value": 1}});
    gateway.post_measurement(&other).await.expect(201);

    let list = async |query: &str| gateway.get(&format!("{PATH}?{query}")).await.expect(200).json();
    let of_pump = format!("source={pump}");

    let first = list(&of_pump).await;
    assert_eq!(values(&first), [1, 2, 3, 4, 5], "five a page");
    assert_eq!((&first["statistics"]["currentPage"], &first["statistics"]["pageSize"]), (&json!(1), &json!(5)));
    assert!(first.get("prev").is_none_or(Value::is_null), "{first}");
    let next = first["next"].as_str().unwrap().strip_prefix(&format!("http://{}", gateway.addr)).unwrap();
    let second = gateway.get(next).await.expect(200).json();
    assert_eq!(values(&second), [6, 7]);
    assert!(second.get("next").is_none_or(Value::is_null) && second["prev"].is_string(), "{second}");
    assert_eq!(list(&format!("{of_pump}&currentPage=9")).await["measurements"], json!([]));

    let total = list(&format!("{of_pump}&pageSize=2&withTotalPages=true&withTotalElements=true")).await;
    assert_eq!((&total["statistics"]["totalPages"], &total["statistics"]["totalElements"]), (&json!(4), &json!(7)));
    assert_eq!(values(&list("pageSize=2000").await).len(), 8);

    for (query, expected) in [
        (format!("{of_pump}&type=even"), &[2, 4, 6][..]),
        (format!("{of_pump}&dateFrom=2026-03-06T12:00:00Z"), &[6, 7]),
        (format!("{of_pump}&dateTo=2026-03-02T13:30:00%2B01:00"), &[1, 2]),
        (format!("{of_pump}&dateFrom=2026-03-03T00:00:00Z&dateTo=2026-03-04T23:00:00Z"), &[3, 4]),
        (format!("{of_pump}&dateFrom=2026-03-05T00:00:00Z&revert=true"), &[7, 6, 5]),
        (format!("source={valve}"), &[99]),
        ("valueFragmentType=c8y_Extra".to_owned(), &[99]),
        ("valueFragmentType=c8y_Extra&valueFragmentSeries=S".to_owned(), &[99]),
        ("valueFragmentType=c8y_Extra&valueFragmentSeries=R".to_owned(), &[]),
        ("type=none".to_owned(), &[]),
        ("source=1".to_owned(), &[]),
    ] {
        assert_eq!(values(&list(&query).await), expected, "{query}");
    }
    for (query, field) in [
        ("pageSize=0", "pageSize"),
        ("pageSize=x", "pageSize"),
        ("currentPage=0", "currentPage"),
        ("dateFrom=noon", "dateFrom"),
        ("dateTo=2026-13-01T00:00:00Z", "dateTo"),
        ("revert=maybe", "revert"),
        ("source=pump", "source"),
    ] {
        gateway.get(&format!("{PATH}?{query}")).await.error(422, field);
    }
}

// The newest measurements are found elsewhere than older ones, and move there many at a time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_of_a_device_are_whole_and_in_order_while_its_measurements_take_their_places() {
    const BULK: u64 = 1000;
    let mut gateway = Gateway::start().await;
    let devices = [gateway.device("pump").await, gateway.device("valve").await, gateway.device("fan").await];
    // Most times twice, and in no order.
    let second = |value: u64| value * 7919 % 9000;
    let post = async |values: std::ops::Range<u64>| {
        let one = |value: u64| {
            let mut one = measurement(&devices[value as usize % devices.len()], "t", value);
            one["time"] = json!(format!(
                "2026-03-01T{:02}:{:02}:{:02}Z",
                second(value) / 3600,
                second(value) / 60 % 60,
                second(value) % 60
            ));
            one
        };
        let all: Vec<Value> = values.map(one).collect();
        gateway
            .post(PATH, &json!({"measurements": all}))
            .header("x-cumulocity-processing-mode", "QUIESCENT")
            .await
            .expect(201);
    };
    let listed = async |device: &str, more: &str| {
        let mut all = Vec::new();
        for page in 1.. {
            let path = format!("{PATH}?source={device}&pageSize=2000&currentPage={page}{more}");
            let values = values(&gateway.get(&path).await.expect(200).json());
            if values.is_empty() {
                break;
            }
            all.extend(values);
        }
        all
    };
    let expected = |device: usize, values: std::ops::Range<u64>| {
        let mut expected: Vec<u64> = values.filter(|value| *value as usize % devices.len() == device).collect();
        expected.sort_by_key(|value| (second(*value), *value));
        expected
    };
    let waiting = async || -> (i64, i64) {
        let counts = "SELECT (SELECT count(*) FROM measurement_recent), (SELECT count(*) FROM measurement_by_source)";
        sqlx::query_as(counts).fetch_one(&mut gateway.database().await).await.unwrap()
    };
    let mut posted = 0;
    while waiting().await.1 == 0 {
        post(posted..posted + BULK).await;
        posted += BULK;
    }
    let (recent, placed) = waiting().await;
    assert!(
        recent > 0 && recent <= 16_384 && (recent + placed).cast_unsigned() == posted,
        "{recent} and {placed} of {posted}"
    );
    for (number, device) in devices.iter().enumerate() {
        let mut expected = expected(number, 0..posted);
        assert_eq!(listed(device, "").await, expected);
        expected.reverse();
        assert_eq!(listed(device, "&revert=true").await, expected);
    }
    let noon = "2026-03-01T00:40:00Z";
    let (before, after): (Vec<u64>, Vec<u64>) =
        expected(0, 0..posted).into_iter().partition(|value| second(*value) < 2400);
    assert_eq!(listed(&devices[0], &format!("&dateTo={noon}")).await, before);
    let totals =
        gateway.get(&format!("{PATH}?source={}&dateFrom={noon}&withTotalElements=true", devices[0])).await.expect(200);
    assert_eq!(totals.json()["statistics"]["totalElements"], after.len());

    gateway.delete(&format!("{PATH}?source={}&dateTo={noon}", devices[0])).await.expect(204);
    gateway.delete(&format!("/inventory/managedObjects/{}", devices[1])).await.expect(204);
    assert_eq!(listed(&devices[0], "").await, after);
    assert!(listed(&devices[1], "").await.is_empty());
    let left = (after.len() + expected(2, 0..posted).len()) as i64;
    eventually("what is deleted has no place any more", async || {
        let (recent, placed) = waiting().await;
        (recent + placed == left).then_some(())
    })
    .await;
    gateway.kill9();
    let data = gateway.data().into_os_string().into_string().unwrap();
    let (sound, found, _) = check(&gateway, &["--data", &data]).await;
    assert!(sound, "{found}");
}

#[tokio::test]
async fn no_media_type_is_refused() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let body = measurement(&device, "t", 1).to_string();
    for content_type in [VENDOR, "application/json;charset=UTF-8;ver=0.9", "text/plain", "application/octet-stream"] {
        for accept in [VENDOR, "application/json", "*/*", "image/png"] {
            let call = gateway.call("POST", PATH).header("Accept", accept);
            let answer = call.body(content_type, body.clone()).await.expect(201);
            let expected = if accept == VENDOR { VENDOR } else { "application/json" };
            assert!(answer.header("content-type").unwrap().starts_with(expected), "{accept}");
        }
    }
}

// "Malformed JSON, wrong types, missing fields, unknown ids, deep nesting, invalid UTF-8: the documented code and an error
// that names the field; connection and store unharmed."
#[tokio::test]
async fn bad_measurements_are_422_and_name_the_field() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    let good = measurement(&device, "t", 1);
    let with = |name: &str, value: Value| -> Vec<u8> {
        let mut bad = good.clone();
        bad[name] = value;
        bad.to_string().into_bytes()
    };
    let without = |name: &str| -> Vec<u8> {
        let mut bad = good.clone();
        bad.as_object_mut().unwrap().remove(name);
        bad.to_string().into_bytes()
    };
    let nested = |depth: usize| -> Vec<u8> {
        let value = format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        good.to_string().replacen('{', &format!(r#"{{"deep":{value},"#), 1).into_bytes()
    };
    for (body, field) in [
        (without("source"), "source"),
        (without("type"), "type"),
        (without("time"), "time"),
        (with("source", json!("pump")), "source"),
        (with("source", json!({})), "source"),
        (with("source", json!({"id": true})), "source.id"),
        (with("source", json!({"id": "1"})), "source"),
        (with("source", json!({"id": "pump"})), "source.id"),
        (with("source", Value::Null), "source"),
        (with("type", json!(7)), "type"),
        (with("type", json!("")), "type"),
        (with("time", json!("noon")), "time"),
        (with("time", json!(1_700_000_000)), "time"),
        (with("time", json!("2026-02-30T00:00:00Z")), "time"),
        (with("c8y_Reading", json!({"R": {"unit": "C"}})), "c8y_Reading"),
        (with("c8y_Reading", json!({"R": {"value": "21"}})), "c8y_Reading"),
        (with("c8y Reading", json!({"R": {"value": 21}})), "c8y Reading"),
        (nested(100), "deep"),
        (nested(100_000), ""),
        (b"".to_vec(), ""),
        (b"{}".to_vec(), "source"),
        (b"[]".to_vec(), ""),
        (b"null".to_vec(), ""),
        (b"{\"source\":{\"id\":".to_vec(), ""),
        ([good.to_string().as_bytes(), b"x"].concat(), ""),
        (
            good.to_string()
                .replace("\"C\"", "\"\u{fffd}\"")
                .into_bytes()
                .into_iter()
                .map(|byte| if byte == 0xbf { 0xff } else { byte })
                .collect(),
            "",
        ),
        (good.to_string().replace("\"C\"", r#""\ud800""#).into_bytes(), ""),
        (good.to_string().replace("\"C\"", "\"a\nb\"").into_bytes(), ""),
        (good.to_string().replace(":1}", ":01}").into_bytes(), ""),
        (b"{\"measurements\":{}}".to_vec(), "measurements"),
        (b"{\"measurements\":[7]}".to_vec(), "measurements"),
    ] {
        let shown = String::from_utf8_lossy(&body[..body.len().min(120)]).into_owned();
        let refused = gateway.call("POST", PATH).body("application/json", body).await;
        assert_eq!(refused.status, 422, "{shown}: {}", refused.text());
        assert_eq!(refused.json()["error"], "undefined/validationError", "{shown}");
        refused.error(422, field);
    }
    assert_eq!(gateway.get(PATH).await.expect(200).json()["measurements"], json!([]));
    gateway.measure(&device, "t", 2).await;
    assert_eq!(value_of(&consumer.receive().await.json()), 2, "nothing of all that was told");
}

// `limits.body_bytes` and `limits.bulk_bytes`: oversized bodies are 413 before they are read whole, announced or not.
#[tokio::test]
async fn bodies_over_the_limit_are_413() {
    let gateway = Gateway::with("[limits]\nbody_bytes = 2000\nbulk_bytes = 8000").await;
    let device = gateway.device("pump").await;
    let sized = |bytes: usize| -> String {
        let mut one = measurement(&device, "t", 1);
        one["note"] = json!("");
        let missing = bytes - one.to_string().len();
        one["note"] = json!("x".repeat(missing));
        one.to_string()
    };
    let post = async |body: String| gateway.call("POST", PATH).body("application/json", body).await;
    post(sized(2000)).await.expect(201);
    post(sized(2001)).await.error(413, "2000");
    post(sized(8001)).await.error(413, "8000");
    let bulk = format!(r#"{{"measurements":[{},{},{}]}}"#, sized(2000), sized(2000), sized(2000));
    post(bulk).await.expect(201);
    post(format!(r#"{{"measurements":[{}]}}"#, vec![sized(2000); 4].join(","))).await.error(413, "8000");
    let object = json!({"note": "x".repeat(2000)});
    gateway.post("/inventory/managedObjects", &object).await.error(413, "2000");
    gateway.post("/notification2/subscriptions", &object).await.error(413, "2000");

    let head = format!(
        "POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\
         Authorization: Basic ZWRnZS9hZG1pbjpjb3JyZWN0IGhvcnNlIGJhdHRlcnkgc3RhcGxl\r\n\r\n"
    );
    let chunks = format!("1000\r\n{}\r\n", " ".repeat(0x1000)).repeat(4) + "0\r\n\r\n";
    let answer = raw(gateway.addr, (head + &chunks).as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

// Many clients send JSON compressed if they are told to; that is no malformed JSON.
#[tokio::test]
async fn a_compressed_body_is_415_and_names_what_is_taken() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let body = measurement(&device, "t", 1).to_string();
    for (headers, status) in [
        ("Content-Encoding: gzip\r\n", 415),
        ("Content-Encoding: identity\r\nContent-Encoding: deflate\r\n", 415),
        ("Content-Encoding: identity\r\n", 201),
        ("Content-Encoding: Identity\r\n", 201),
        ("", 201),
    ] {
        let head = format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{BASIC}{headers}");
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        let answer = raw(gateway.addr, request.as_bytes()).await.to_ascii_lowercase();
        assert!(answer.starts_with(&format!("http/1.1 {status} ")), "{headers}: {answer}");
        assert_eq!(answer.contains("\r\naccept-encoding: identity\r\n"), status == 415, "{headers}: {answer}");
    }
    let list = gateway.get(&format!("{PATH}?source={device}")).await.expect(200).json();
    assert_eq!(values(&list), [1, 1, 1]);
}

// `limits.frame_bytes`.
#[tokio::test]
async fn a_frame_over_the_limit_is_413_and_nothing_is_stored() {
    let gateway = Gateway::with("[limits]\nframe_bytes = 1000").await;
    let device = gateway.device("pump").await;
    let mut large = measurement(&device, "t", 1);
    large["note"] = json!("x".repeat(1000));
    gateway.post_measurement(&large).await.expect(201);
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    gateway.post_measurement(&large).await.error(413, "1000");
    gateway.measure(&device, "t", 2).await;
    assert_eq!(value_of(&consumer.receive().await.json()), 2);
    let list = gateway.get(&format!("{PATH}?source={device}")).await.expect(200).json();
    assert_eq!(values(&list), [1, 2]);
}

// `limits.fan_out_messages` and `limits.fan_out_bytes`.
#[tokio::test]
async fn a_request_for_too_many_topics_is_413_and_nothing_is_stored() {
    let gateway = Gateway::with("[limits]\nfan_out_messages = 5\nfan_out_bytes = 2000").await;
    let device = gateway.device("pump").await;
    let mut consumers = Vec::new();
    for topic in ["Sub1", "Sub2", "Sub3"] {
        gateway.subscribe(&forwarded(topic, &device)).await;
        consumers.push(gateway.consumer(topic, "subA").await);
    }
    let two = json!({"measurements": [measurement(&device, "t", 1), measurement(&device, "t", 2)]});
    gateway.post(PATH, &two).await.error(413, "more than 5 messages");
    let mut large = measurement(&device, "t", 3);
    large["note"] = json!("x".repeat(700));
    gateway.post_measurement(&large).await.error(413, "2000 bytes");
    gateway.measure(&device, "t", 4).await;
    for consumer in &mut consumers {
        assert_eq!(value_of(&consumer.receive().await.json()), 4);
    }
    let list = gateway.get(&format!("{PATH}?source={device}")).await.expect(200).json();
    assert_eq!(values(&list), [4]);
}

#[tokio::test]
async fn large_bodies_may_come_in_chunks_under_any_limit() {
    let gateway = Gateway::with("[limits]\nbulk_bytes = 268435456").await;
    let device = gateway.device("pump").await;
    let many: Vec<_> = (0..2000).map(|value| measurement(&device, "t", value)).collect();
    let body = json!({"measurements": many}).to_string().into_bytes();
    assert!(body.len() > 128 << 10);
    let chunks: Vec<Result<Vec<u8>, std::io::Error>> = body.chunks(10_000).map(|chunk| Ok(chunk.to_vec())).collect();
    let stream = reqwest::Body::wrap_stream(futures_util::stream::iter(chunks));
    let call = gateway.call("POST", PATH).body("application/json", stream);
    call.await.expect(201);
}

#[tokio::test]
async fn other_methods_are_405_and_name_the_allowed_ones() {
    let gateway = Gateway::start().await;
    for (method, path, allowed) in [
        ("PUT", PATH, "GET, POST"),
        ("BREW", PATH, "GET, POST"),
        ("POST", "/measurement/measurements/1", "GET"),
        ("PATCH", "/inventory/managedObjects", "POST"),
        ("POST", "/inventory/managedObjects/1", "GET, PUT, DELETE"),
        ("PUT", "/notification2/subscriptions", "GET, POST, DELETE"),
        ("PUT", "/notification2/subscriptions/1", "GET, DELETE"),
        ("PUT", "/notification2/token", "GET, POST"),
        ("GET", "/notification2/unsubscribe", "POST"),
        ("POST", "/notification2/consumer/", "GET"),
    ] {
        let refused = gateway.call(method, path).await;
        let shown = refused.header("allow").map(str::to_owned);
        refused.error(405, "");
        let has = |name: &str| shown.as_deref().is_some_and(|shown| shown.split(", ").any(|one| one == name));
        assert!(allowed.split(", ").all(has), "{method} {path}: {shown:?}");
    }
    for path in ["/", "/measurements", "/measurement/measurements/1/2", "/inventory/managedobjects"] {
        gateway.get(path).await.error(404, "");
    }
}
