//! Subscriptions (Notifications 2.0 OpenAPI; seed 000, "Creating subscriptions").

use serde_json::{Value, json};

use crate::harness::{Gateway, forwarded, measurement, typed, value_of};

const PATH: &str = "/notification2/subscriptions";
const VENDOR: &str = "application/vnd.com.nsn.cumulocity.subscription+json";

fn names(page: &Value) -> Vec<&str> {
    page["subscriptions"].as_array().unwrap().iter().map(|one| one["subscription"].as_str().unwrap()).collect()
}

// Seed 000, "Creating subscriptions" and "Deleting subscriptions"; the codes are those that the platform's Java client insists
// on.
#[tokio::test]
async fn a_subscription_is_made_read_and_deleted() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let body = json!({
        "context": "mo", "source": {"id": device}, "subscription": "Sub1", "nonPersistent": false,
        "subscriptionFilter": {"apis": ["measurements", "managedobjects"], "typeFilter": "'a' or 'b'"},
        "fragmentsToCopy": ["c8y_T"],
    });
    let answer = gateway.post(PATH, &body).await.expect(201);
    let made = answer.json();
    let id = made["id"].as_str().unwrap();
    assert!(id.bytes().all(|digit| digit.is_ascii_digit()), "{id}");
    let url = format!("http://{}{PATH}/{id}", gateway.addr);
    assert_eq!(made["self"], url);
    assert_eq!(answer.header("location"), Some(url.as_str()));
    for name in ["context", "subscription", "subscriptionFilter", "fragmentsToCopy"] {
        assert_eq!(made[name], body[name]);
    }
    assert_eq!(made["source"]["id"], device);
    assert_eq!(made["source"]["self"], format!("http://{}/inventory/managedObjects/{device}", gateway.addr));
    let path = format!("{PATH}/{id}");
    assert_eq!(gateway.get(&path).await.expect(200).json(), made);
    assert_eq!(gateway.get(PATH).await.expect(200).json()["subscriptions"], json!([made]));
    assert!(gateway.get(&path).header("Accept", VENDOR).await.header("content-type").unwrap().starts_with(VENDOR));

    gateway.delete(&path).await.expect(204);
    for call in [gateway.get(&path), gateway.delete(&path), gateway.get(&format!("{PATH}/abc"))] {
        let refused = call.await;
        assert_eq!(refused.json()["error"], "reliable-notification/Not Found");
        refused.error(404, "Finding subscription from database failed");
    }
    let tenant = gateway.subscribe(&json!({"context": "tenant", "subscription": "Sub2"})).await;
    assert_eq!(tenant.get("source"), None);
}

// Notifications 2.0 OpenAPI: the key is source, context and name; filters are no part of it. Seed 000, "Topics and
// subscriptions": several subscriptions may have one topic.
#[tokio::test]
async fn a_second_one_with_equal_source_context_and_name_is_409() {
    let gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    gateway.subscribe(&forwarded("Sub1", &pump)).await;
    for again in [forwarded("Sub1", &pump), typed("Sub1", &pump, "'t'")] {
        let refused = gateway.post(PATH, &again).await;
        assert_eq!(refused.json()["error"], "reliable-notification/Duplicate");
        let text =
            format!("Subscription with source <'{pump}'>, context <'mo'> & subscription <'Sub1'> already exists!");
        refused.error(409, &text);
    }
    gateway.subscribe(&forwarded("Sub1", &valve)).await;
    gateway.subscribe(&forwarded("Sub2", &pump)).await;
    let tenant = json!({"context": "tenant", "subscription": "Sub1"});
    gateway.subscribe(&tenant).await;
    gateway.post(PATH, &tenant).await.error(409, "already exists!");
    assert_eq!(gateway.get(&format!("{PATH}?pageSize=100")).await.json()["subscriptions"].as_array().unwrap().len(), 4);
}

// Notifications 2.0 OpenAPI. c8y_api and pyc8y go on until a page is an empty array; the Java client follows `self` and `next`.
#[tokio::test]
async fn lists_have_pages_and_filters() {
    let gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    for number in 1..=7 {
        gateway.subscribe(&typed(&format!("Sub{number}"), &pump, &format!("'a' or 'b{number}'"))).await;
    }
    gateway.subscribe(&forwarded("Sub1", &valve)).await;
    gateway.subscribe(&json!({"context": "tenant", "subscription": "Sub1"})).await;
    let list = async |query: &str| gateway.get(&format!("{PATH}?{query}")).await.expect(200).json();

    let first = list(&format!("source={pump}")).await;
    assert_eq!(names(&first), ["Sub1", "Sub2", "Sub3", "Sub4", "Sub5"]);
    assert_eq!(first["statistics"]["currentPage"], 1);
    assert_eq!(first["statistics"]["pageSize"], 5);
    let link = first["self"].as_str().unwrap().strip_prefix(&format!("http://{}", gateway.addr)).unwrap();
    assert_eq!(gateway.get(link).await.expect(200).json(), first);
    let next = first["next"].as_str().unwrap().strip_prefix(&format!("http://{}", gateway.addr)).unwrap();
    let second = gateway.get(next).await.expect(200).json();
    assert_eq!(names(&second), ["Sub6", "Sub7"]);
    assert!(second.get("next").is_none_or(Value::is_null) && second["prev"].is_string(), "{second}");
    let past = list(&format!("source={pump}&pageSize=1000&currentPage=2")).await;
    assert_eq!(past["subscriptions"], json!([]));

    for (query, expected) in [
        (format!("source={valve}"), 1),
        (format!("source={valve}&context=mo"), 1),
        ("context=mo&pageSize=100".to_owned(), 8),
        ("context=tenant".to_owned(), 1),
        ("subscription=Sub1".to_owned(), 3),
        (format!("source={pump}&subscription=Sub1"), 1),
        ("typeFilter=b3".to_owned(), 1),
        ("typeFilter=a&pageSize=100".to_owned(), 7),
        ("typeFilter=b".to_owned(), 0),
        ("source=1".to_owned(), 0),
    ] {
        assert_eq!(names(&list(&query).await).len(), expected, "{query}");
    }
    // How c8y_api counts, parameter twice and all.
    let counted = list(&format!("source={pump}&pageSize=1&pageSize=1&withTotalPages=true")).await;
    assert_eq!(counted["statistics"]["totalPages"], 7);
    for (query, field) in [("context=other", "context"), ("pageSize=0", "pageSize"), ("currentPage=x", "currentPage")] {
        gateway.get(&format!("{PATH}?{query}")).await.error(422, field);
    }
    let root = gateway.get("/notification2").await.expect(200).json();
    assert_eq!(root["self"], format!("http://{}/notification2", gateway.addr));
    assert_eq!(root["notificationSubscriptions"]["self"], format!("http://{}{PATH}", gateway.addr));
    let template = root["notificationSubscriptionsBySource"].as_str().unwrap();
    assert!(template.ends_with("?source={source}"), "{template}");
}

// Notifications 2.0 OpenAPI: context defaults to mo, and mo needs a source.
#[tokio::test]
async fn deletion_by_query_needs_a_source_or_the_context_tenant() {
    let gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    let all = async || {
        let all = gateway.get(&format!("{PATH}?pageSize=100")).await.expect(200).json();
        names(&all).join(" ")
    };
    gateway.subscribe(&forwarded("Pump1", &pump)).await;
    gateway.subscribe(&forwarded("Pump2", &pump)).await;
    gateway.subscribe(&forwarded("Valve1", &valve)).await;
    gateway.subscribe(&json!({"context": "tenant", "subscription": "Tenant1"})).await;
    for query in ["", "?context=mo", "?context=other", "?source=", &format!("?context=tenant&source={pump}")] {
        gateway.delete(&format!("{PATH}{query}")).await.error(422, "");
    }
    assert_eq!(all().await, "Pump1 Pump2 Valve1 Tenant1");
    gateway.delete(&format!("{PATH}?source={pump}")).await.expect(204);
    assert_eq!(all().await, "Valve1 Tenant1");
    gateway.delete(&format!("{PATH}?context=tenant")).await.expect(204);
    assert_eq!(all().await, "Valve1");
    gateway.delete(&format!("{PATH}?source={valve}&context=mo")).await.expect(204);
    gateway.delete(&format!("{PATH}?source={valve}&context=mo")).await.expect(204);
    assert_eq!(all().await, "");
}

// Seed 000, "Subscription filters", names the fields in two ways, the OpenAPI and all clients in a third: whichever a client
// takes, it never gets an unfiltered subscription by mistake.
#[tokio::test]
async fn both_spellings_of_the_filter_filter() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let spellings = [
        json!({"subscriptionFilter": {"apis": ["measurements"], "typeFilter": "'t'"}}),
        json!({"filter": {"apis": ["measurements"], "type": "'t'"}}),
        json!({"filter": {"apis": ["measurements"], "typeFilter": "'t'"}, "subscriptionFilter": null}),
        json!({"subscriptionFilter": {"apis": null, "type": "'t'", "typeFilter": null}}),
        json!({"subscriptionFilter": {"apis": ["measurements", "events", "measurements"], "typeFilter": "'t'"}}),
    ];
    let mut consumers = Vec::new();
    for (number, filter) in spellings.into_iter().enumerate() {
        let topic = format!("Sub{number}");
        let mut subscription = json!({"context": "mo", "source": {"id": device}, "subscription": topic});
        subscription.as_object_mut().unwrap().extend(filter.as_object().unwrap().clone());
        let made = gateway.subscribe(&subscription).await;
        assert_eq!(made["subscriptionFilter"]["typeFilter"], "'t'", "answers use the platform's spelling");
        assert_eq!(made.get("filter"), None);
        consumers.push(gateway.consumer(&topic, "subA").await);
    }
    gateway.measure(&device, "u", 1).await;
    gateway.measure(&device, "t", 2).await;
    for consumer in &mut consumers {
        assert_eq!(value_of(&consumer.receive().await.json()), 2);
    }
    let last = gateway.get(&format!("{PATH}?subscription=Sub4")).await.expect(200).json();
    let apis = &last["subscriptions"][0]["subscriptionFilter"]["apis"];
    assert_eq!(*apis, json!(["measurements", "events"]), "each once");
    let both = json!({"apis": ["measurements"]});
    let twice = json!({"context": "tenant", "subscription": "S", "filter": both, "subscriptionFilter": both});
    gateway.post(PATH, &twice).await.error(422, "filter");
    let twice = json!({"context": "tenant", "subscription": "S", "filter": {"type": "'t'", "typeFilter": "'t'"}});
    gateway.post(PATH, &twice).await.error(422, "type");
}

// c8y_api sends explicit JSON nulls for what is absent; generated clients send back what the server sets.
#[tokio::test]
async fn nulls_are_absent_and_what_the_server_sets_is_ignored() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let made = gateway
        .subscribe(&json!({
            "id": "7", "self": "http://x", "context": "mo", "subscription": "Sub1", "nonPersistent": null,
            "source": {"id": device, "name": "x", "self": "http://x"},
            "subscriptionFilter": {"apis": ["measurements"], "typeFilter": null}, "fragmentsToCopy": null,
        }))
        .await;
    assert_ne!(made["id"], "7");
    assert_eq!(made["subscriptionFilter"], json!({"apis": ["measurements"]}));
    assert_eq!(made.get("fragmentsToCopy"), None);
    let tenant = json!({"context": "tenant", "subscription": "Sub2", "source": null, "subscriptionFilter": null});
    let made = gateway.subscribe(&tenant).await;
    assert_eq!(made.get("source"), None);
}

// Seed 000, "Creating subscriptions": "There are two valid context values", `source` is for one of them alone; "Subscription
// filters": `*` stands alone, and typeFilter supports only `or`.
#[tokio::test]
async fn bad_subscriptions_are_422_and_name_the_field() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let filter = |filter: Value| json!({"context": "tenant", "subscription": "S", "subscriptionFilter": filter});
    for (body, field) in [
        (json!([]), "object"),
        (json!({}), "context"),
        (json!({"context": "tenant"}), "subscription"),
        (json!({"context": "group", "subscription": "S"}), "context"),
        (json!({"context": "", "subscription": "S"}), "context"),
        (json!({"context": "tenant", "subscription": ""}), "subscription"),
        (json!({"context": "tenant", "subscription": "a-b"}), "subscription"),
        (json!({"context": "tenant", "subscription": "ä"}), "subscription"),
        (json!({"context": "tenant", "subscription": 7}), "subscription"),
        (json!({"context": "mo", "subscription": "S"}), "source"),
        (json!({"context": "mo", "subscription": "S", "source": {}}), "source.id"),
        (json!({"context": "tenant", "subscription": "S", "source": {"id": device}}), "source"),
        (json!({"context": "tenant", "subscription": "S", "colour": "red"}), "colour"),
        (json!({"context": "tenant", "subscription": "S", "nonPersistent": "no"}), "nonPersistent"),
        (json!({"context": "tenant", "subscription": "S", "fragmentsToCopy": "a"}), "fragmentsToCopy"),
        (json!({"context": "tenant", "subscription": "S", "fragmentsToCopy": [7]}), "fragmentsToCopy"),
        (filter(json!([])), "subscriptionFilter"),
        (filter(json!({"colour": 1})), "colour"),
        (filter(json!({"apis": "measurements"})), "apis"),
        (filter(json!({"apis": []})), "apis"),
        (filter(json!({"apis": ["*", "measurements"]})), "apis"),
        (filter(json!({"apis": ["audits"]})), "audits"),
        (filter(json!({"apis": ["alarmsWithChildren"]})), "alarmsWithChildren"),
        (filter(json!({"typeFilter": 7})), "typeFilter"),
        (filter(json!({"typeFilter": "'a' and 'b'"})), "typeFilter"),
        (filter(json!({"typeFilter": "'a' or"})), "typeFilter"),
        (filter(json!({"typeFilter": "'a"})), "typeFilter"),
        // What has no key in the configuration has a limit all the same.
        (filter(json!({"typeFilter": "a".repeat(4097)})), "typeFilter"),
        (json!({"context": "tenant", "subscription": "a".repeat(256)}), "subscription"),
        (json!({"context": "tenant", "subscription": "S", "fragmentsToCopy": vec!["a"; 201]}), "fragmentsToCopy"),
        (json!({"context": "tenant", "subscription": "S", "fragmentsToCopy": ["a".repeat(257)]}), "fragmentsToCopy"),
        (json!({"context": "mo", "subscription": "S", "source": {"id": format!("+{device}")}}), "source.id"),
    ] {
        let refused = gateway.post(PATH, &body).await;
        assert_eq!(refused.status, 422, "{body}: {}", refused.text());
        assert_eq!(refused.json()["error"], "undefined/validationError");
        refused.error(422, field);
    }
    let unknown = gateway.post(PATH, &forwarded("S", "1")).await;
    assert_eq!(unknown.json()["error"], "inventory/Not Found");
    unknown.error(404, "Finding device data from database failed");
    for (body, field) in [
        (r#"{"context":"#, ""),
        (r#"{"context":"tenant","subscription":"S","filter":{"apis":["events"]},"filter":null}"#, "filter"),
        (r#"{"context":"tenant","subscription":"S","filter":{"type":"'a'","type":null}}"#, "filter.type"),
    ] {
        gateway.call("POST", PATH).body("application/json", body).await.error(422, field);
    }
    assert_eq!(gateway.get(PATH).await.expect(200).json()["subscriptions"], json!([]));
}

// `limits.subscriptions_per_tenant`.
#[tokio::test]
async fn subscriptions_past_the_limit_are_refused() {
    let gateway = Gateway::with("[limits]\nsubscriptions_per_tenant = 2").await;
    let tenant = |name: &str| json!({"context": "tenant", "subscription": name});
    gateway.subscribe(&tenant("A")).await;
    let second = gateway.subscribe(&tenant("B")).await;
    gateway.post(PATH, &tenant("C")).await.error(422, "at most 2");
    gateway.delete(&format!("{PATH}/{}", second["id"].as_str().unwrap())).await.expect(204);
    gateway.subscribe(&tenant("C")).await;
}

// Seed 000, "Deleting subscriptions": nothing more is added to the topic, which is not deleted, and consumers drain it. c8y_api
// expects the deletion of a managed object to delete its subscriptions.
#[tokio::test]
async fn subscriptions_go_with_their_object_and_consumers_stay_without_subscriptions() {
    let mut gateway = Gateway::start().await;
    let (pump, valve) = (gateway.device("pump").await, gateway.device("valve").await);
    let subscription = gateway.subscribe(&forwarded("Sub1", &pump)).await;
    let other = gateway.subscribe(&forwarded("Sub1", &valve)).await;
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    gateway.measure(&pump, "t", 1).await;
    let one = consumer.next().await;

    gateway.delete(&format!("{PATH}/{}", subscription["id"].as_str().unwrap())).await.expect(204);
    gateway.measure(&pump, "t", 2).await;
    gateway.delete(&format!("/inventory/managedObjects/{valve}")).await.expect(204);
    gateway.get(&format!("{PATH}/{}", other["id"].as_str().unwrap())).await.error(404, "");
    gateway.post_measurement(&measurement(&valve, "t", 3)).await.error(422, "source");

    gateway.restart().await;
    assert_eq!(gateway.get(PATH).await.expect(200).json()["subscriptions"], json!([]));
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    assert_eq!(consumer.next().await.body, one.body, "what was in the backlog stays there");
    gateway.subscribe(&forwarded("Sub1", &pump)).await;
    gateway.measure(&pump, "t", 4).await;
    assert_eq!(value_of(&consumer.next().await.json()), 4);
}

#[tokio::test]
async fn subscriptions_survive_a_restart() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let mut subscription = typed("Sub1", &device, "'t' or 'u'");
    subscription["fragmentsToCopy"] = json!(["c8y_Reading"]);
    let made = gateway.subscribe(&subscription).await;
    gateway.restart().await;
    let path = format!("{PATH}/{}", made["id"].as_str().unwrap());
    assert_eq!(gateway.get(&path).await.expect(200).json(), made);
    let mut consumer = gateway.consumer("Sub1", "subA").await;
    for (kind, value) in [("v", 1), ("t", 2), ("u", 3)] {
        let mut one = measurement(&device, kind, value);
        one["c8y_Other"] = json!({"O": {"value": 1}});
        gateway.post_measurement(&one).await.expect(201);
    }
    for value in [2, 3] {
        let body = consumer.receive().await.json();
        assert_eq!(value_of(&body), value);
        assert_eq!(body.get("c8y_Other"), None);
    }
}

// A client that goes away before its answer leaves no subscription that the disk has and memory has not.
#[tokio::test]
async fn subscriptions_of_clients_that_went_away_are_in_force() {
    use tokio::io::AsyncWriteExt as _;
    let mut gateway = Gateway::start().await;
    gateway.device("the first request, which waits for its password to be verified").await;
    for n in 0..100 {
        let body = format!(r#"{{"context":"tenant","subscription":"Sub{n}"}}"#);
        let post = format!(
            "POST /notification2/subscriptions HTTP/1.1\r\nHost: g\r\nContent-Length: {}\r\n\
             Authorization: Basic ZWRnZS9hZG1pbjpjb3JyZWN0IGhvcnNlIGJhdHRlcnkgc3RhcGxl\r\n\r\n{body}",
            body.len()
        );
        let mut socket = tokio::net::TcpStream::connect(gateway.addr).await.unwrap();
        socket.write_all(post.as_bytes()).await.unwrap();
    }
    // Those under way are carried out before these, one at a time.
    for n in 0..20 {
        gateway.subscribe(&json!({"context": "tenant", "subscription": format!("Last{n}")})).await;
    }
    let shown = async |gateway: &Gateway| {
        gateway.get("/notification2/subscriptions?pageSize=2000").await.expect(200).json()["subscriptions"].clone()
    };
    let before = shown(&gateway).await;
    assert!(before.as_array().unwrap().len() > 20, "no request arrived");
    gateway.restart().await;
    assert_eq!(shown(&gateway).await, before);
}
