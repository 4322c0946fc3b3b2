//! Push consumers: messages of a topic as POSTs to an endpoint (`docs/push.md`).

use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use sqlx::SqliteConnection;

use crate::harness::{Answer, Authority, Endpoint, Gateway, PASSWORD, Pushed, Reply, eventually, forwarded, value_of};

/// How long is watched what must not come.
const SILENCE: Duration = Duration::from_millis(500);

const PATH: &str = "/tidegate/v1/consumers";

/// Quick to try again, and allowed to reach the endpoints of these scenes.
fn settings(more: &str) -> String {
    format!("[push]\nallowed_networks = '127.0.0.1'\nretry_seconds = 1\n{more}")
}

/// A gateway that may push to 127.0.0.1, with a device whose measurements go to the topic `Sub1`.
async fn line(more: &str) -> (Gateway, String) {
    let gateway = Gateway::with(&settings(more)).await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    (gateway, device)
}

fn wanted(subscriber: &str, uri: &str) -> Value {
    json!({"subscription": "Sub1", "subscriber": subscriber, "push": {"uri": uri}})
}

/// Makes a push consumer of `Sub1`; returns the path where it is found.
async fn push(gateway: &Gateway, subscriber: &str, uri: &str) -> String {
    let made = gateway.post(PATH, &wanted(subscriber, uri)).await.expect(201).json();
    format!("{PATH}/{}", made["id"].as_str().unwrap())
}

async fn measure(gateway: &Gateway, device: &str, values: RangeInclusive<u64>) {
    for value in values {
        gateway.measure(device, "t", value).await;
    }
}

fn values(pushed: &[Pushed]) -> Vec<u64> {
    pushed.iter().map(|pushed| value_of(&pushed.json())).collect()
}

/// Waits until nothing fails or waits, and acknowledgements are on disk.
async fn settled(gateway: &Gateway, messages: f64) {
    eventually("all is acknowledged", async || {
        (gateway.metric("tidegate_messages_acknowledged_total").await >= messages).then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_millis(300)).await;
}

/// Waits until an attempt has failed; returns what is said of it.
async fn trouble(gateway: &Gateway, path: &str) -> String {
    eventually("an attempt fails", async || {
        let shown = gateway.get(path).await.expect(200).json();
        shown["lastError"].as_str().map(|error| {
            assert!(shown["attempts"].as_u64().unwrap() > 0 && shown["failingSince"].is_string(), "{shown}");
            error.to_owned()
        })
    })
    .await
}

async fn rows(database: &mut SqliteConnection, table: &str) -> i64 {
    let count = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {table}")));
    count.fetch_one(database).await.unwrap()
}

#[tokio::test]
async fn each_message_is_a_post_and_a_2xx_acknowledges_it() {
    let (mut gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    let path = push(&gateway, "subA", &endpoint.url("/in?a=b")).await;
    let mut last_id = 0;
    for (value, status) in (1..=3).zip([200, 202, 204]) {
        endpoint.script([Reply::Status(status)]);
        let posted = gateway.measure(&device, "t", value).await;
        let pushed = endpoint.next().await;
        assert_eq!(pushed.path, "/in?a=b");
        assert_eq!(pushed.json(), posted);
        assert_eq!(pushed.header("content-type"), "application/json");
        assert_eq!(pushed.header("host"), endpoint.addr.to_string());
        assert_eq!(pushed.header("content-length"), pushed.body.len().to_string());
        assert_eq!(pushed.header("tidegate-notification"), format!("/edge/measurements/{device}"));
        assert_eq!(pushed.header("tidegate-action"), "CREATE");
        assert_eq!(pushed.header("tidegate-subscription"), "Sub1");
        assert_eq!(pushed.header("tidegate-subscriber"), "subA");
        assert!(pushed.header("user-agent").starts_with("Tidegate/"));
        assert!(pushed.message_id() > last_id, "message ids increase");
        last_id = pushed.message_id();
    }
    settled(&gateway, 3.0).await;
    assert_eq!(gateway.metric("tidegate_messages_delivered_total").await, 3.0);
    assert_eq!(gateway.metric("tidegate_push_requests_total").await, 3.0);
    assert_eq!(endpoint.connections(), 1, "it is kept");
    let shown = gateway.get(&path).await.expect(200).json();
    assert_eq!((&shown["attempts"], shown.get("lastError")), (&json!(0), None));
    gateway.restart().await;
    assert!(endpoint.is_silent_for(SILENCE).await, "all was acknowledged");
    measure(&gateway, &device, 4..=4).await;
    let next = endpoint.next().await;
    assert!(value_of(&next.json()) == 4 && next.message_id() > last_id);
}

#[tokio::test]
async fn a_push_consumer_is_listed_and_read_and_its_headers_stay_secret() {
    let gateway =
        Gateway::setup().config(&settings("[log]\nfilter = 'debug,hyper=trace,hyper_util=trace'\n")).start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let mut endpoint = Endpoint::start().await;
    endpoint.script([Reply::Status(500)]);
    let mut request = wanted("subA", &endpoint.url("/in"));
    request["push"]["headers"] = json!({"Authorization": "Bearer s3cr3t", "X-Site": "pl4nt"});
    let made = gateway.post(PATH, &request).await.expect(201);
    let id = made.json()["id"].as_str().unwrap().to_owned();
    let itself = format!("http://{}{PATH}/{id}", gateway.addr);
    assert_eq!(made.header("location"), Some(&*itself));
    let mut shown = made.json();
    assert!(shown["creationTime"].as_str().unwrap().ends_with('Z'));
    shown.as_object_mut().unwrap().remove("creationTime");
    assert_eq!(
        shown,
        json!({
            "id": id, "self": itself, "subscription": "Sub1", "subscriber": "subA", "nonPersistent": false, "attempts": 0,
            "push": {"uri": endpoint.url("/in"), "headers": {"authorization": "***", "x-site": "***"}},
        })
    );
    measure(&gateway, &device, 1..=1).await;
    for pushed in endpoint.take(2).await {
        assert_eq!((pushed.header("authorization"), pushed.header("x-site")), ("Bearer s3cr3t", "pl4nt"));
    }
    settled(&gateway, 1.0).await;
    let second = push(&gateway, "subB", &endpoint.url("/")).await;
    let list = gateway.get(&format!("{PATH}?pageSize=1&withTotalElements=true")).await.expect(200);
    assert_eq!(list.json()["consumers"].as_array().unwrap().len(), 1);
    assert_eq!(list.json()["statistics"]["totalElements"], 2);
    let second = gateway.get(&second).await.expect(200).json();
    assert_eq!(
        gateway.get(&format!("{PATH}?pageSize=1&currentPage=2")).await.expect(200).json()["consumers"][0],
        second
    );
    for text in [made.text(), list.text(), gateway.get(&format!("{PATH}/{id}")).await.text(), gateway.stderr()] {
        assert!(!text.contains("s3cr3t") && !text.contains("pl4nt"), "{text}");
    }
}

#[tokio::test]
async fn what_cannot_be_a_push_consumer_is_refused_with_its_member() {
    let (gateway, _) = line("").await;
    for (change, text) in [
        (json!({"subscription": null}), "should be included: subscription"),
        (json!({"subscriber": null}), "should be included: subscriber"),
        (json!({"subscriber": "a b"}), "subscriber: must consist"),
        (json!({"push": null}), "should be included: push"),
        (json!({"push": {}}), "push.uri: is missing"),
        (json!({"push": {"uri": "mqtt://a.example"}}), "push.uri: must begin with"),
        (json!({"push": {"uri": "https://u:p@a.example"}}), "push.uri: must not hold a user"),
        (
            json!({"push": {"uri": "https://a.example", "headers": {"Host": "b"}}}),
            "push.headers.Host: is a header that",
        ),
        (
            json!({"push": {"uri": "https://a.example", "headers": {"a": "b\r\nc: d"}}}),
            "push.headers.a: must be visible",
        ),
        (json!({"nonPersistent": "yes"}), "nonPersistent"),
        (json!({"shared": true}), "shared: is not a known member"),
    ] {
        let mut request = wanted("subA", "https://a.example");
        request.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        gateway.post(PATH, &request).await.error(422, text);
    }
    assert_eq!(gateway.get(PATH).await.expect(200).json()["consumers"], json!([]));
    for path in ["/tidegate/v1/consumers/1", "/tidegate/v1/consumers/x"] {
        gateway.get(path).await.error(404, "no such push consumer");
        gateway.delete(path).await.error(404, "no such push consumer");
    }
}

// At least once and in order: nothing overtakes a message that is tried again, and it keeps its id.
#[tokio::test]
async fn what_fails_is_tried_again_and_the_order_stays() {
    let (gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    endpoint.script([200, 500, 503, 429, 200, 408, 425].map(Reply::Status));
    push(&gateway, "subA", &endpoint.url("/")).await;
    measure(&gateway, &device, 1..=5).await;
    let pushed = endpoint.take(10).await;
    assert_eq!(values(&pushed), [1, 2, 2, 2, 2, 3, 3, 3, 4, 5]);
    for pair in pushed.windows(2) {
        let same = value_of(&pair[0].json()) == value_of(&pair[1].json());
        assert_eq!(pair[0].message_id() == pair[1].message_id(), same);
    }
    settled(&gateway, 5.0).await;
    assert_eq!(gateway.metric("tidegate_messages_delivered_total").await, 5.0);
    let metrics = gateway.get("/metrics").await.expect(200).text();
    for sample in ["{outcome=\"delivered\"} 5", "{outcome=\"unavailable\"} 5"] {
        assert!(metrics.contains(&format!("tidegate_push_requests_total{sample}")), "{metrics}");
    }
}

#[tokio::test]
async fn a_message_past_its_time_to_live_is_not_tried_again() {
    let (gateway, device) = line("[backlog]\nttl_seconds = 3").await;
    let mut endpoint = Endpoint::start().await;
    endpoint.otherwise(Reply::Status(500));
    let path = push(&gateway, "subA", &endpoint.url("/")).await;
    measure(&gateway, &device, 1..=1).await;
    assert_eq!(value_of(&endpoint.next().await.json()), 1);
    eventually("it is given up", async || {
        (gateway.metric("tidegate_messages_dropped_total").await >= 1.0).then_some(())
    })
    .await;
    while !endpoint.is_silent_for(2 * SILENCE).await {}
    assert!(gateway.get(&path).await.expect(200).json()["attempts"].as_u64().unwrap() > 0, "the trouble is still told");
    endpoint.otherwise(Reply::Status(200));
    measure(&gateway, &device, 2..=2).await;
    assert_eq!(value_of(&endpoint.next().await.json()), 2);
    settled(&gateway, 1.0).await;
}

// RFC 9110, section 10.2.3: seconds, or a date.
#[tokio::test]
async fn an_endpoint_that_asks_for_a_pause_gets_it() {
    let (gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(8));
    endpoint.script([Reply::RetryAfter("3".to_owned()), Reply::RetryAfter(date)]);
    push(&gateway, "subA", &endpoint.url("/")).await;
    measure(&gateway, &device, 1..=1).await;
    let pushed = endpoint.take(3).await;
    assert!(pushed[1].at - pushed[0].at >= Duration::from_secs(3), "{pushed:?}");
    // A date has whole seconds.
    assert!(pushed[2].at - pushed[0].at >= Duration::from_secs(6), "{pushed:?}");
}

#[tokio::test]
async fn a_refusal_is_shown_and_tried_again_until_somebody_mends_it() {
    let (gateway, device) = line("").await;
    let (mut endpoint, mut elsewhere) = (Endpoint::start().await, Endpoint::start().await);
    endpoint.script([Reply::Redirect(elsewhere.url("/")), Reply::Status(301)]);
    endpoint.otherwise(Reply::Status(401));
    let path = push(&gateway, "subA", &endpoint.url("/")).await;
    measure(&gateway, &device, 1..=2).await;
    assert_eq!(values(&endpoint.take(3).await), [1, 1, 1]);
    eventually("the refusal is shown", async || {
        (trouble(&gateway, &path).await == "the endpoint answered 401 Unauthorized").then_some(())
    })
    .await;
    endpoint.otherwise(Reply::Status(200));
    eventually("the second message comes", async || (value_of(&endpoint.next().await.json()) == 2).then_some(())).await;
    settled(&gateway, 2.0).await;
    let shown = gateway.get(&path).await.expect(200).json();
    assert_eq!((&shown["attempts"], shown.get("lastError"), shown.get("failingSince")), (&json!(0), None, None));
    assert!(elsewhere.is_silent_for(SILENCE).await, "redirects are not followed");
}

#[tokio::test]
async fn consumers_share_the_lane_of_their_endpoint_and_harm_no_other() {
    let (gateway, device) = line("connections_per_endpoint = 2").await;
    let (mut slow, mut quick) = (Endpoint::start().await, Endpoint::start().await);
    slow.otherwise(Reply::After(Duration::from_millis(50)));
    for name in ["subA", "subB", "subC", "subD"] {
        push(&gateway, name, &slow.url(&format!("/{name}"))).await;
    }
    push(&gateway, "subE", &quick.url("/")).await;
    measure(&gateway, &device, 1..=5).await;
    assert_eq!(values(&quick.take(5).await), [1, 2, 3, 4, 5]);
    let pushed = slow.take(20).await;
    for name in ["subA", "subB", "subC", "subD"] {
        let own = pushed.iter().filter(|pushed| pushed.header("tidegate-subscriber") == name);
        let own: Vec<_> = own
            .inspect(|pushed| assert_eq!(pushed.path, format!("/{name}")))
            .map(|pushed| value_of(&pushed.json()))
            .collect();
        assert_eq!(own, [1, 2, 3, 4, 5], "{name}");
    }
    assert_eq!((slow.most_at_a_time(), quick.most_at_a_time()), (2, 1));
    settled(&gateway, 25.0).await;
    // An endpoint that does not answer at all keeps its lane, and nobody else's.
    slow.otherwise(Reply::Silence);
    measure(&gateway, &device, 6..=9).await;
    assert_eq!(values(&quick.take(4).await), [6, 7, 8, 9]);
    assert!(slow.waiting() <= 2);
}

#[tokio::test]
async fn an_endpoint_that_does_not_answer_in_time_or_at_all_is_tried_again() {
    let (gateway, device) = line("timeout_seconds = 1").await;
    let mut endpoint = Endpoint::start().await;
    endpoint.script([Reply::Silence]);
    let path = push(&gateway, "subA", &endpoint.url("/")).await;
    measure(&gateway, &device, 1..=2).await;
    assert_eq!(values(&endpoint.take(3).await), [1, 1, 2]);
    let addr = endpoint.addr;
    drop(endpoint);
    measure(&gateway, &device, 3..=3).await;
    assert!(trouble(&gateway, &path).await.contains("onnection refused"));
    let mut endpoint = Endpoint::bind(addr, None).await;
    assert_eq!(value_of(&endpoint.next().await.json()), 3);
    let metrics = gateway.get("/metrics").await.expect(200).text();
    for outcome in ["timeout", "unreachable"] {
        assert!(metrics.contains(&format!("tidegate_push_requests_total{{outcome=\"{outcome}\"}}")), "{metrics}");
    }
}

#[tokio::test]
async fn an_endless_answer_costs_neither_memory_nor_the_message() {
    let (gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    endpoint.otherwise(Reply::Endless);
    push(&gateway, "subA", &endpoint.url("/")).await;
    measure(&gateway, &device, 1..=1).await;
    endpoint.next().await;
    settled(&gateway, 1.0).await;
    let before = gateway.rss_kib();
    measure(&gateway, &device, 2..=30).await;
    assert_eq!(values(&endpoint.take(29).await), (2..=30).collect::<Vec<_>>());
    settled(&gateway, 30.0).await;
    let grown = gateway.rss_kib().saturating_sub(before);
    assert!(grown < 10_000, "{grown} KiB");
}

// Seed 000, "Consumer lifecycle": consumers and their positions are on disk; so are those that are pushed to.
#[tokio::test]
async fn pushing_goes_on_after_a_restart_and_after_kill_9() {
    let (mut gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    let path = push(&gateway, "subA", &endpoint.url("/")).await;
    let mut next = 1;
    for kill in [false, true] {
        measure(&gateway, &device, next..=next + 1).await;
        assert_eq!(values(&endpoint.take(2).await), [next, next + 1]);
        eventually("both are acknowledged", async || {
            (gateway.metric("tidegate_messages_acknowledged_total").await >= 2.0).then_some(())
        })
        .await;
        // Acknowledgements hold 250 ms after they were made.
        tokio::time::sleep(Duration::from_millis(300)).await;
        endpoint.otherwise(Reply::Status(500));
        measure(&gateway, &device, next + 2..=next + 3).await;
        let tried = endpoint.next().await;
        if kill {
            gateway.kill9();
            gateway.restart_process().await;
        } else {
            gateway.restart().await;
        }
        endpoint.otherwise(Reply::Status(200));
        let last = async |endpoint: &mut Endpoint| {
            let pushed = endpoint.next().await;
            (value_of(&pushed.json()) == next + 3).then_some(pushed)
        };
        let mut again = Vec::new();
        let last = loop {
            match last(&mut endpoint).await {
                Some(pushed) => break pushed,
                None => again.push(next + 2),
            }
        };
        assert!(!again.is_empty() && last.message_id() > tried.message_id(), "kill: {kill}");
        settled(&gateway, 2.0).await;
        next += 4;
    }
    gateway.get(&path).await.expect(200);
}

#[tokio::test]
async fn a_request_that_is_on_its_way_is_answered_before_the_gateway_ends() {
    let (mut gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    endpoint.script([Reply::After(Duration::from_millis(700))]);
    push(&gateway, "subA", &endpoint.url("/")).await;
    measure(&gateway, &device, 1..=1).await;
    endpoint.next().await;
    gateway.restart().await;
    assert!(endpoint.is_silent_for(SILENCE).await, "it was acknowledged");
    // One that does not answer is not waited for.
    endpoint.otherwise(Reply::Silence);
    measure(&gateway, &device, 2..=2).await;
    endpoint.next().await;
    endpoint.otherwise(Reply::After(Duration::from_millis(50)));
    let begun = std::time::Instant::now();
    gateway.restart().await;
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert_eq!(value_of(&endpoint.next().await.json()), 2);
    // Neither is what follows.
    measure(&gateway, &device, 3..=100).await;
    gateway.stop().await;
    gateway.restart_process().await;
    assert!(!gateway.stderr().contains("did not close in time"));
}

#[tokio::test]
async fn a_consumer_that_is_not_connected_is_taken_over_with_what_waits_for_it() {
    let (gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    measure(&gateway, &device, 1..=6).await;
    let frames = consumer.take(6).await;
    for index in [0, 2] {
        consumer.ack(&frames[index]).await;
    }
    gateway.post(PATH, &wanted("subA", &endpoint.url("/"))).await.error(409, "connected already");
    consumer.close().await;
    eventually("its place is free", async || {
        match gateway.post(PATH, &wanted("subA", &endpoint.url("/"))).await.status {
            201 => Some(()),
            409 => None,
            status => panic!("{status}"),
        }
    })
    .await;
    assert_eq!(values(&endpoint.take(4).await), [2, 4, 5, 6]);
    let topic = gateway.get("/tidegate/v1/topics/persistent/Sub1").await.expect(200).json();
    assert_eq!(topic["consumers"][0]["push"], true, "{topic}");
}

#[tokio::test]
async fn nobody_connects_in_the_place_of_a_push_consumer_until_it_is_gone() {
    let (mut gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    let path = push(&gateway, "subA", &endpoint.url("/")).await;
    let shared = gateway.shared_token("Sub1", "subA").await;
    for restarted in [false, true] {
        let token = gateway.token("Sub1", "subA").await;
        assert_eq!(gateway.consumer_with(&token).await.err(), Some(409), "restarted: {restarted}");
        assert_eq!(gateway.consumer_with(&shared).await.err(), Some(409));
        gateway.post(PATH, &wanted("subA", &endpoint.url("/other"))).await.error(409, "connected already");
        gateway.restart().await;
    }
    // It gets what comes before anybody answers.
    endpoint.otherwise(Reply::Status(500));
    measure(&gateway, &device, 1..=1).await;
    endpoint.next().await;
    gateway.delete(&path).await.expect(204);
    gateway.get(&path).await.expect(404);
    gateway.delete(&path).await.expect(404);
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    measure(&gateway, &device, 2..=2).await;
    assert_eq!(value_of(&consumer.next().await.json()), 2, "it is another one, which begins here");
    while !endpoint.is_silent_for(SILENCE).await {}
}

#[tokio::test]
async fn a_consumer_that_is_deleted_gives_up_the_request_on_its_way() {
    let (gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    endpoint.otherwise(Reply::Silence);
    let path = push(&gateway, "subA", &endpoint.url("/")).await;
    measure(&gateway, &device, 1..=2).await;
    endpoint.next().await;
    assert_eq!(endpoint.waiting(), 1);
    gateway.delete(&path).await.expect(204);
    eventually("the request is given up", async || (endpoint.waiting() == 0).then_some(())).await;
    assert!(endpoint.is_silent_for(SILENCE).await);
}

#[tokio::test]
async fn unsubscribing_with_a_token_ends_a_push_consumer_for_good() {
    let (mut gateway, device) = line("").await;
    let mut endpoint = Endpoint::start().await;
    for request in [
        wanted("subA", &endpoint.url("/")),
        json!({"subscription": "Sub1", "subscriber": "subA", "nonPersistent": true, "push": {"uri": endpoint.url("/")}}),
    ] {
        gateway.post(PATH, &request).await.expect(201);
        let token = json!({"subscription": "Sub1", "subscriber": "subA", "nonPersistent": request["nonPersistent"]});
        let token = gateway.token_of(&token).await;
        gateway.unsubscribe(&token).await.expect(200);
        assert_eq!(gateway.get(PATH).await.expect(200).json()["consumers"], json!([]));
        // The same name can be used again at once.
        gateway.post(PATH, &request).await.expect(201);
        gateway.unsubscribe(&token).await.expect(200);
    }
    measure(&gateway, &device, 1..=1).await;
    assert!(endpoint.is_silent_for(SILENCE).await);
    gateway.stop().await;
    let mut database = gateway.database().await;
    assert_eq!(rows(&mut database, "push").await, 0);
}

// A crash between the two would bring a consumer back that was unsubscribed.
#[tokio::test]
async fn a_push_consumer_goes_in_the_commit_that_removes_its_consumer() {
    let (mut gateway, _) = line("").await;
    for name in ["subA", "subB"] {
        push(&gateway, name, "https://a.example").await;
    }
    gateway.stop().await;
    let mut database = gateway.database().await;
    sqlx::query("DELETE FROM consumer WHERE name = 'subA'").execute(&mut database).await.unwrap();
    assert_eq!(rows(&mut database, "push").await, 1);
    drop(database);
    gateway.restart_process().await;
    assert_eq!(gateway.get(PATH).await.expect(200).json()["consumers"][0]["subscriber"], "subB");
}

// Seed 000, "Persistent and non-persistent subscriptions".
#[tokio::test]
async fn a_push_consumer_of_a_non_persistent_topic_gets_what_comes_while_the_gateway_runs() {
    let (mut gateway, device) = line("").await;
    let mut subscription = forwarded("Passing", &device);
    subscription["nonPersistent"] = json!(true);
    gateway.subscribe(&subscription).await;
    let mut endpoint = Endpoint::start().await;
    let request = json!({
        "subscription": "Passing", "subscriber": "subA", "nonPersistent": true, "push": {"uri": endpoint.url("/")},
    });
    let made = gateway.post(PATH, &request).await.expect(201).json();
    assert_eq!(made["nonPersistent"], json!(true));
    for restarted in [0, 10] {
        endpoint.script([Reply::Status(500)]);
        measure(&gateway, &device, restarted + 1..=restarted + 2).await;
        assert_eq!(values(&endpoint.take(3).await), [1, 1, 2].map(|value| value + restarted));
        gateway.restart().await;
    }
    let path = format!("{PATH}/{}", made["id"].as_str().unwrap());
    gateway.delete(&path).await.expect(204);
    gateway.restart().await;
    gateway.get(&path).await.expect(404);
}

#[tokio::test]
async fn addresses_that_are_not_allowed_are_not_reached() {
    let gateway = Gateway::with("[push]\nallow_plain = true\nretry_seconds = 1").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let endpoint = Endpoint::start().await;
    let port = endpoint.addr.port();
    for host in ["127.0.0.1", "10.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "[fd00::1]", "0.0.0.0"] {
        for scheme in ["http", "https"] {
            let request = wanted("subA", &format!("{scheme}://{host}:{port}/"));
            gateway.post(PATH, &request).await.error(422, "push.allowed_networks");
        }
    }
    assert_eq!(gateway.get(PATH).await.expect(200).json()["consumers"], json!([]));
    // What a name leads to shows when it is called.
    let path = push(&gateway, "subA", &format!("http://localhost:{port}/")).await;
    measure(&gateway, &device, 1..=1).await;
    let said = trouble(&gateway, &path).await;
    assert!(said.contains("may not be reached;") && said.contains("push.allowed_networks"), "{said}");
    assert_eq!(endpoint.connections(), 0);
    assert!(gateway.metric("tidegate_push_requests_total").await >= 1.0);
    // Numbers are no names, whatever a resolver makes of them.
    gateway.post(PATH, &wanted("subB", &format!("http://2130706433:{port}/"))).await.error(422, "push.uri");
    let gateway = Gateway::start().await;
    gateway.post(PATH, &wanted("subA", "http://a.example/")).await.error(422, "push.allow_plain");
}

#[tokio::test]
async fn endpoints_over_tls_have_to_be_trusted() {
    let authority = Authority::new();
    let ca = format!("ca = '{}'", authority.file("ca.pem").display());
    for (more, trusted) in [(&*ca, true), ("", false)] {
        let (gateway, device) = line(more).await;
        let mut endpoint = Endpoint::secure(authority.acceptor()).await;
        let path = push(&gateway, "subA", &endpoint.url("/")).await;
        measure(&gateway, &device, 1..=2).await;
        if trusted {
            assert_eq!(values(&endpoint.take(2).await), [1, 2]);
        } else {
            let said = trouble(&gateway, &path).await;
            assert!(said.contains("certificate"), "{said}");
            assert!(endpoint.is_silent_for(SILENCE).await);
        }
    }
}

#[tokio::test]
async fn five_hundred_push_consumers_are_served() {
    let (gateway, device) = line("connections_per_endpoint = 32").await;
    let mut endpoint = Endpoint::start().await;
    let before = gateway.rss_kib();
    for number in 0..500 {
        push(&gateway, &format!("sub{number}"), &endpoint.url("/")).await;
    }
    measure(&gateway, &device, 1..=4).await;
    let mut last = std::collections::HashMap::new();
    for pushed in endpoint.take(2000).await {
        let value = value_of(&pushed.json());
        assert_eq!(last.insert(pushed.header("tidegate-subscriber").to_owned(), value).unwrap_or_default() + 1, value);
    }
    assert_eq!(last.len(), 500);
    settled(&gateway, 2000.0).await;
    assert!(endpoint.most_at_a_time() <= 32 && endpoint.connections() <= 64, "{}", endpoint.connections());
    let grown = gateway.rss_kib().saturating_sub(before);
    assert!(grown < 50_000, "{grown} KiB");
}

#[tokio::test]
async fn push_consumers_are_bounded() {
    let (gateway, _) = line("[limits]\npush_consumers = 2").await;
    let endpoint = Endpoint::start().await;
    push(&gateway, "subA", &endpoint.url("/")).await;
    let second = push(&gateway, "subB", &endpoint.url("/")).await;
    gateway.post(PATH, &wanted("subC", &endpoint.url("/"))).await.error(422, "limits.push_consumers");
    gateway.delete(&second).await.expect(204);
    eventually("there is room again", async || {
        (gateway.post(PATH, &wanted("subC", &endpoint.url("/"))).await.status == 201).then_some(())
    })
    .await;
}

#[tokio::test]
async fn push_consumers_belong_to_their_tenant_and_end_drained_when_it_is_removed() {
    let (mut gateway, _) = line("").await;
    let mut endpoint = Endpoint::start().await;
    let keeper = gateway.tenant("plant1").await;
    let own = |path: &str| gateway.get(path).user(&keeper, PASSWORD);
    let post = |path: &str, body: &Value| gateway.post(path, body).user(&keeper, PASSWORD);
    let device = post("/inventory/managedObjects", &json!({"name": "pump"})).await.expect(201).json();
    let device = device["id"].as_str().unwrap();
    post("/notification2/subscriptions", &forwarded("Sub1", device)).await.expect(201);
    let made: Answer = post(PATH, &wanted("subA", &endpoint.url("/"))).await.expect(201);
    let path = format!("{PATH}/{}", made.json()["id"].as_str().unwrap());
    own(&path).await.expect(200);
    gateway.get(&path).await.expect(404);
    gateway.delete(&path).await.expect(404);
    assert_eq!(gateway.get(PATH).await.expect(200).json()["consumers"], json!([]));
    endpoint.otherwise(Reply::Status(500));
    for value in 1..=3 {
        post("/measurement/measurements", &crate::harness::measurement(device, "t", value)).await.expect(201);
    }
    endpoint.next().await;
    gateway.delete("/tidegate/v1/tenants/plant1").await.expect(204);
    gateway.restart().await;
    endpoint.otherwise(Reply::Status(200));
    let mut seen = Vec::new();
    while seen.last() != Some(&3) {
        seen.push(value_of(&endpoint.next().await.json()));
    }
    seen.dedup();
    assert_eq!(seen, [1, 2, 3]);
    eventually("it is gone", async || (gateway.metric("tidegate_consumers").await == 0.0).then_some(())).await;
    gateway.stop().await;
    let mut database = gateway.database().await;
    for table in ["push", "consumer", "topic WHERE tenant = 'plant1'"] {
        assert_eq!(rows(&mut database, table).await, 0, "{table}");
    }
}
