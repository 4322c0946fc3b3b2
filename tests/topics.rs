//! How topics and consumers fare, what is set for them, and how they come and go: over REST and in the terminal.

use serde_json::{Value, json};

use crate::harness::{Gateway, PASSWORD, USER, event, eventually, forwarded, of_tenant};

const TOPICS: &str = "/tidegate/v1/topics";
const EVENTS: &str = "/event/events";

fn messaging(tenant: &str, rest: &str) -> String {
    format!("/service/messaging-management/tenants/{tenant}/namespaces/relnotif{rest}")
}

async fn get(gateway: &Gateway, path: &str) -> Value {
    gateway.get(path).await.expect(200).json()
}

/// A consumer of an edge's topic as the platform's management shows it; null where there is none.
async fn subscriber(gateway: &Gateway, topic: &str, name: &str) -> Value {
    let path = messaging("edge", &format!("/topics/{topic}/types/persistent/subscribers?pageSize=100"));
    let list = get(gateway, &path).await;
    let found = list["subscribers"].as_array().unwrap().iter().find(|subscriber| subscriber["name"] == name);
    found.cloned().unwrap_or_default()
}

fn names(list: &Value) -> Vec<&str> {
    list["topics"].as_array().unwrap().iter().map(|topic| topic["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn settings_of_topics_and_tenants_are_in_force_at_once_and_stay() {
    let mut gateway = Gateway::with("[backlog]\nquota_bytes = 100000").await;
    let topic = format!("{TOPICS}/persistent/Sub1");
    gateway.get(&topic).await.expect(200);
    // The topic need not exist yet.
    let set = gateway.put(&topic, &json!({"quotaBytes": 3000, "onFull": "reject"})).await.expect(200).json();
    assert_eq!(set["settings"], json!({"quotaBytes": 3000, "onFull": "reject"}));
    assert_eq!(
        set["policy"],
        json!({"quotaBytes": 3000, "ttlSeconds": 129_600, "onFull": "reject", "gapMessages": false})
    );
    gateway.subscribe(&of_tenant("Sub1", &["events"])).await;
    gateway.consumer("Sub1", "subA").await.close().await;
    let device = gateway.device("pump").await;
    let large = event(&device, "t", &"x".repeat(2000));
    gateway.post(EVENTS, &large).await.expect(201);
    gateway.post(EVENTS, &large).await.error(500, "of 3000 bytes");
    // Others stay, and one is taken back.
    gateway.put(&topic, &json!({"ttlSeconds": 60, "quotaBytes": null})).await.expect(200);
    gateway.post(EVENTS, &large).await.expect(201);
    gateway.restart().await;
    assert_eq!(get(&gateway, &topic).await["settings"], json!({"ttlSeconds": 60, "onFull": "reject"}));

    let defaults = "/tidegate/v1/tenants/edge/backlog";
    let set = gateway.put(defaults, &json!({"quotaBytes": 3500, "gapMessages": true})).await.expect(200).json();
    assert_eq!((&set["settings"]["quotaBytes"], &set["policy"]["gapMessages"]), (&json!(3500), &json!(true)));
    gateway.post(EVENTS, &large).await.error(500, "of 3500 bytes");
    let policies = get(&gateway, &messaging("edge", "/policies")).await;
    assert_eq!(policies, json!({"backlogQuota": {"limit": 3500}, "messageTTL": 129_600}));
    gateway.delete(defaults).await.expect(204);
    gateway.delete(&topic).await.expect(204);
    gateway.post(EVENTS, &large).await.expect(201);
    let left = get(&gateway, &topic).await;
    assert_eq!((&left["settings"], &left["policy"]["quotaBytes"]), (&json!({}), &json!(100_000)));
}

#[tokio::test]
async fn settings_that_cannot_be_are_refused_by_name() {
    let gateway = Gateway::with("[limits]\ntopics_per_tenant = 2").await;
    let topic = format!("{TOPICS}/persistent/Sub1");
    for (body, said) in [
        (json!({"quotaBytes": 0}), "quotaBytes: must be a whole number from 1 to "),
        (json!({"quotaBytes": 1.5}), "quotaBytes: must be a whole number"),
        (json!({"quotaBytes": "1"}), "quotaBytes: must be a whole number"),
        (json!({"ttlSeconds": -1}), "ttlSeconds: must be a whole number"),
        (json!({"onFull": "drop"}), "onFull: must be reject, evict-oldest or park"),
        (json!({"onFull": 1}), "onFull: must be a string"),
        (json!({"gapMessages": "yes"}), "gapMessages: must be true or false"),
        (json!({"quota": 1}), "quota: is not a setting"),
        (json!([]), "must be a JSON object"),
    ] {
        gateway.put(&topic, &body).await.error(422, said);
        gateway.put("/tidegate/v1/tenants/edge/backlog", &body).await.error(422, said);
    }
    assert_eq!(get(&gateway, &topic).await["settings"], json!({}));
    let volatile = format!("{TOPICS}/non-persistent/Sub1");
    for setting in ["quotaBytes", "ttlSeconds", "onFull", "gapMessages"] {
        gateway
            .put(&volatile, &json!({setting: 1}))
            .await
            .error(422, &format!("{setting}: is only for persistent topics"));
    }
    gateway.put(&volatile, &json!({"onFull": null})).await.expect(200);
    let some = json!({"quotaBytes": 1});
    gateway.put(&format!("{TOPICS}/persistent/pumps%2F%C3%A4%20b"), &some).await.error(422, "name: must consist of");
    gateway.put(&format!("{TOPICS}/durable/Sub1"), &some).await.error(404, "'persistent' or 'non-persistent'");
    gateway.put(&format!("{topic}?tennant=plant1"), &some).await.error(422, "tennant: is not a parameter");
    gateway.put(&topic, &some).await.expect(200);
    gateway.put(&format!("{TOPICS}/persistent/Sub2"), &some).await.expect(200);
    gateway.put(&topic, &json!({"quotaBytes": 2})).await.expect(200);
    gateway.put(&format!("{TOPICS}/persistent/Sub3"), &some).await.error(422, "limits.topics_per_tenant");
    gateway.delete(&topic).await.expect(204);
    // A name as a client may encode it.
    gateway.put(&format!("{TOPICS}/persistent/%53ub3"), &some).await.expect(200);
    assert_eq!(names(&get(&gateway, TOPICS).await), ["Sub2", "Sub3"]);
    // An odd name is no topic, but it is a name.
    let odd = get(&gateway, &format!("{TOPICS}/persistent/a%2Fb%20%C3%A4")).await;
    assert_eq!(odd["name"], "a/b ä");
    gateway.get(odd["self"].as_str().unwrap().split_once(&gateway.addr.to_string()).unwrap().1).await.expect(200);
}

#[tokio::test]
async fn who_may_see_and_change_topics() {
    let gateway = Gateway::start().await;
    let keeper = gateway.tenant("plant1").await;
    gateway.add_user("plant1", "reader", "ROLE_TENANT_STATISTICS_READ").await;
    gateway.add_user("plant1", "ann", "ROLE_NOTIFICATION_2_ADMIN").await;
    gateway.add_user("edge", "ops", "ROLE_TIDEGATE_OPERATOR").await;
    gateway.add_user("edge", "boss", "ROLE_TENANT_MANAGEMENT_ADMIN").await;
    gateway
        .post("/notification2/subscriptions", &of_tenant("Sub1", &["events"]))
        .user(&keeper, PASSWORD)
        .await
        .expect(201);
    let defaults = "/tidegate/v1/tenants/plant1/backlog";
    let reads = [
        format!("{TOPICS}?tenant=plant1"),
        format!("{TOPICS}/persistent/Sub1?tenant=plant1"),
        defaults.to_owned(),
        messaging("plant1", "/topics"),
    ];
    for path in &reads {
        for user in ["plant1/reader", "edge/ops"] {
            gateway.get(path).user(user, PASSWORD).await.expect(200);
        }
        for user in ["plant1/ann", "edge/boss"] {
            gateway.get(path).user(user, PASSWORD).await.error(403, "");
        }
        let own = path.replace("plant1", "edge");
        gateway.get(&own).user("plant1/reader", PASSWORD).await.error(403, "");
    }
    let some = json!({"quotaBytes": 10_000});
    let topic = format!("{TOPICS}/persistent/Sub1");
    for (path, user) in [(&*topic, &*keeper), (&topic, "edge/boss"), (defaults, &keeper)] {
        gateway.put(path, &some).user(user, PASSWORD).await.error(403, "");
        gateway.delete(path).user(user, PASSWORD).await.error(403, "");
    }
    let theirs =
        gateway.put(&format!("{topic}?tenant=plant1"), &some).user("edge/ops", PASSWORD).await.expect(200).json();
    assert_eq!(theirs["subscriptions"], 1);
    assert!(theirs["self"].as_str().unwrap().ends_with("/Sub1?tenant=plant1"), "{theirs}");
    assert_eq!(get(&gateway, &topic).await["settings"], json!({}), "of the tenant edge");
    gateway.get(&format!("{TOPICS}?tenant=plant9")).await.error(404, "no such tenant");
    gateway.get(&messaging("plant9", "")).await.error(404, "no such tenant");

    // A subscriber goes by the word of those who could make its token, or who manage tenants.
    let path = messaging("plant1", "/topics/Sub1/types/persistent/subscribers/subA");
    let connect = async || {
        let request = json!({"subscription": "Sub1", "subscriber": "subA"});
        let made = gateway.post("/notification2/token", &request).user(&keeper, PASSWORD).await.expect(200).json();
        gateway.consumer_with(made["token"].as_str().unwrap()).await.unwrap()
    };
    for user in ["plant1/ann", "edge/boss"] {
        let mut consumer = connect().await;
        gateway.delete(&path).user("plant1/reader", PASSWORD).await.error(403, "");
        gateway.delete(&path).user("edge/ops", PASSWORD).await.error(403, "");
        gateway.delete(&path).user(user, PASSWORD).await.expect(204);
        assert!(consumer.try_next().await.is_none(), "its connection ends");
        gateway.delete(&path).user(user, PASSWORD).await.error(404, "no subscriber 'subA'");
    }
}

// Reports, rows 5 and 8: whether a subscriber is connected, when it last acknowledged and what waits for it was invisible, and
// a queue grew without end after its client was gone.
#[tokio::test]
async fn a_subscriber_shows_its_connection_its_backlog_and_its_last_acknowledgement() {
    let mut gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let token = gateway.token("Sub1", "subA").await;
    assert_eq!(subscriber(&gateway, "Sub1", "subA").await, Value::Null);
    let mut consumer = gateway.consumer_with(&token).await.unwrap();
    let shown = subscriber(&gateway, "Sub1", "subA").await;
    assert_eq!((&shown["activeClients"], &shown["unackMsgBacklog"]), (&json!(1), &json!(0)));
    assert_eq!(shown.get("lastAcknowledgeTimestamp"), None);
    gateway.measure(&device, "t", 1).await;
    consumer.receive().await;
    let acknowledged = eventually("the time of the acknowledgement", async || {
        subscriber(&gateway, "Sub1", "subA").await["lastAcknowledgeTimestamp"].as_str().map(str::to_owned)
    })
    .await;
    assert!(acknowledged.ends_with('Z') && acknowledged.len() == 24, "{acknowledged}");
    consumer.close().await;
    eventually("the connection is gone", async || {
        (subscriber(&gateway, "Sub1", "subA").await["activeClients"] == 0).then_some(())
    })
    .await;

    for value in 0..100 {
        gateway.measure(&device, "t", value).await;
    }
    let shown = subscriber(&gateway, "Sub1", "subA").await;
    assert_eq!(shown["unackMsgBacklog"], 100);
    assert!(shown["backlogUsagePercentage"].as_f64().unwrap() > 0.0, "{shown}");
    let topic = get(&gateway, &messaging("edge", "/topics/Sub1/types/persistent")).await;
    let members: Vec<_> = topic.as_object().unwrap().keys().map(String::as_str).collect();
    let mut expected = [
        "name",
        "msgRateIn",
        "msgRateOut",
        "subscribers",
        "backlogSize",
        "backlogUsagePercentage",
        "activeSubscribers",
        "unackMsgBacklog",
    ];
    expected.sort_unstable();
    assert_eq!(members, expected);
    assert_eq!(
        (&topic["subscribers"], &topic["activeSubscribers"], &topic["unackMsgBacklog"]),
        (&json!(1), &json!(0), &json!(100))
    );
    assert!(topic["backlogSize"].as_u64().unwrap() > 10_000 && topic["msgRateIn"].as_f64().unwrap() > 1.0, "{topic}");
    let shown = get(&gateway, &format!("{TOPICS}/persistent/Sub1")).await;
    assert_eq!((&shown["figures"]["messages"], &shown["figures"]["clients"]), (&json!(100), &json!(0)));
    assert_eq!(shown["figures"]["bytes"], topic["backlogSize"]);
    let consumer = &shown["consumers"][0];
    assert_eq!(
        (&consumer["name"], &consumer["messages"], &consumer["acknowledged"]),
        (&json!("subA"), &json!(100), &json!(1))
    );
    assert!(consumer["oldestAgeSeconds"].as_u64().unwrap() < 60, "{shown}");
    assert!((129_000..=129_600).contains(&consumer["expiresInSeconds"].as_u64().unwrap()), "{shown}");

    gateway.restart().await;
    let again = subscriber(&gateway, "Sub1", "subA").await;
    assert_eq!(again["unackMsgBacklog"], 100);
    // The disk has the time of the commit.
    assert!(again["lastAcknowledgeTimestamp"].as_str().unwrap() >= acknowledged.as_str(), "{again}");
    gateway.unsubscribe(&token).await.expect(200);
    assert_eq!(subscriber(&gateway, "Sub1", "subA").await, Value::Null);
    gateway.measure(&device, "t", 1).await;
    let topic = get(&gateway, &messaging("edge", "/topics/Sub1/types/persistent")).await;
    assert_eq!((&topic["backlogSize"], &topic["subscribers"]), (&json!(0), &json!(0)));
}

// Reports, row 24: subscription, subscriber and consumer were taken for one, and the in-band unsubscribe has no result.
#[tokio::test]
async fn a_consumer_that_unsubscribes_in_band_is_gone_and_its_subscription_is_not() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    for command in ["unsubscribe_subscriber", "unsubscribe_subscriber\n"] {
        let mut consumer = gateway.consumer("Sub1", "subA").await;
        assert_eq!(subscriber(&gateway, "Sub1", "subA").await["activeClients"], 1);
        consumer.send(command).await;
        consumer.closed().await;
        assert_eq!(subscriber(&gateway, "Sub1", "subA").await, Value::Null, "{command:?}");
        let subscriptions = get(&gateway, "/notification2/subscriptions").await;
        assert_eq!(subscriptions["subscriptions"].as_array().unwrap().len(), 1);
    }
}

// Reports, row 25: a topic per device leaked resources and could not be deleted; unsubscribing where nothing is attached was 500.
#[tokio::test]
async fn topics_vanish_with_their_last_consumer_and_subscription() {
    const TOPICS_AT_ONCE: usize = 500;
    let gateway = Gateway::start().await;
    let never = gateway.token("Never", "subA").await;
    gateway.unsubscribe(&never).await.error(500, "no subscriber 'subA'");
    let device = gateway.device("pump").await;
    let mut tokens = Vec::new();
    for at in 0..TOPICS_AT_ONCE {
        let topic = format!("Once{at:03}");
        gateway.subscribe(&forwarded(&topic, &device)).await;
        let token = gateway.token(&topic, "subA").await;
        gateway.consumer_with(&token).await.unwrap().close().await;
        tokens.push(token);
    }
    gateway.measure(&device, "t", 1).await;
    let list = get(&gateway, &messaging("edge", "/topics?pageSize=200&currentPage=3")).await;
    assert_eq!((names(&list).len(), names(&list)[0]), (100, "Once400"));
    assert_eq!(
        list["pageStatistics"],
        json!({"currentPage": 3, "pageSize": 200, "totalPages": 3, "totalElements": 500})
    );
    assert_eq!(list["topics"][0]["unackMsgBacklog"], 1);
    let list = get(&gateway, &messaging("edge", "/topics?name=ce49")).await;
    assert_eq!((&list["pageStatistics"]["totalElements"], names(&list)[4]), (&json!(10), "Once494"));
    let space = get(&gateway, &messaging("edge", "")).await;
    let expected =
        json!({"topics": {"count": 500, "limit": 10_000}, "publishers": {"count": 500}, "subscribers": {"count": 500}});
    assert_eq!(space, expected);

    // Deleting subscriptions leaves topics and consumers.
    gateway.delete(&format!("/inventory/managedObjects/{device}")).await.expect(204);
    let space = get(&gateway, &messaging("edge", "")).await;
    assert_eq!((&space["topics"]["count"], &space["publishers"]["count"]), (&json!(500), &json!(0)));
    let one = messaging("edge", "/topics/Once000/types/persistent");
    gateway.delete(&one).await.error(405, "");
    for token in tokens {
        gateway.unsubscribe(&token).await.expect(200);
    }
    let list = get(&gateway, &messaging("edge", "/topics")).await;
    assert_eq!(
        list,
        json!({"topics": [], "pageStatistics": {"currentPage": 1, "pageSize": 5, "totalPages": 0, "totalElements": 0}})
    );
    gateway.get(&one).await.error(404, "no persistent topic 'Once000'");
    assert_eq!(names(&get(&gateway, TOPICS).await), [""; 0]);
}

#[tokio::test]
async fn what_is_not_there_is_404_and_both_kinds_of_topics_are_told_apart() {
    let gateway = Gateway::start().await;
    let mut subscription = of_tenant("Sub1", &["events"]);
    gateway.subscribe(&subscription).await;
    subscription["nonPersistent"] = json!(true);
    gateway.subscribe(&subscription).await;
    let request = json!({"subscription": "Sub1", "subscriber": "subA", "nonPersistent": true});
    let consumer = gateway.consumer_with(&gateway.token_of(&request).await).await.unwrap();
    let topic = |kind: &str| messaging("edge", &format!("/topics/Sub1/types/{kind}"));
    assert_eq!(get(&gateway, &topic("persistent")).await["subscribers"], 0);
    assert_eq!(get(&gateway, &topic("non-persistent")).await["subscribers"], 1);
    let subscribers = get(&gateway, &format!("{}/subscribers?name=ubA", topic("non-persistent"))).await;
    assert_eq!(
        (&subscribers["subscribers"][0]["name"], &subscribers["pageStatistics"]["totalElements"]),
        (&json!("subA"), &json!(1))
    );
    let none = get(&gateway, &format!("{}/subscribers?name=x", topic("non-persistent"))).await;
    assert_eq!(none["subscribers"], json!([]));
    gateway.get(&topic("durable")).await.error(404, "'persistent' or 'non-persistent'");
    gateway.get(&messaging("edge", "/topics/Sub2/types/persistent")).await.error(404, "no persistent topic 'Sub2'");
    gateway.get(&messaging("edge", "/topics/Sub2/types/persistent/subscribers")).await.error(404, "Sub2");
    gateway.get("/service/messaging-management/tenants/edge/namespaces/mqtt").await.error(404, "'relnotif'");
    assert_eq!(
        get(&gateway, "/service/messaging-management/tenants/edge/namespaces").await,
        json!({"namespaces": [{"name": "relnotif"}]})
    );
    let list = get(&gateway, TOPICS).await;
    let kinds: Vec<_> =
        list["topics"].as_array().unwrap().iter().map(|topic| topic["persistence"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["persistent", "non-persistent"]);
    consumer.close().await;
    gateway.delete(&format!("{}/subscribers/subA", topic("persistent"))).await.error(404, "no subscriber 'subA'");
}

#[tokio::test]
async fn the_commands_show_and_change_the_same() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("pumps", &device)).await;
    gateway.subscribe(&forwarded("x", &device)).await;
    gateway.consumer("pumps", "subA").await.close().await;
    gateway.measure(&device, "t", 1).await;
    let url = format!("http://{}", gateway.addr);
    let env = [("TIDEGATE_URL", url.as_str()), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)];
    let mut runs = 0;
    let mut run = async |arguments: &[&str]| {
        runs += 1;
        gateway.command(arguments, &env, &format!("run{runs}")).await
    };
    let (done, out, said) = run(&["topics"]).await;
    assert!(done, "{said}");
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 3, "{out}");
    assert_eq!(lines[1][..8], ["pumps", "persistent", "reject", "1", "1", "0", "1", "0"], "{out}");
    assert_eq!(lines[2][..8], ["x", "persistent", "reject", "1", "0", "0", "0", "0"], "{out}");
    assert_eq!(lines[1][9..13], ["26214400", "1", "d", "12"], "{out}");
    let lengths: Vec<_> = out.lines().map(|line| line.chars().count()).collect();
    assert!(lengths.iter().all(|length| *length == lengths[0]), "{out}");

    let (_, out, said) = run(&[
        "topics",
        "set",
        "pumps",
        "--quota-bytes",
        "5000",
        "--on-full",
        "evict-oldest",
        "--ttl-seconds",
        "77",
        "--gap-messages",
        "true",
    ])
    .await;
    assert!(
        ["5000", "1 min 17 s", "true"].iter().all(|cell| out.contains(cell)) && out.contains("evict-oldest"),
        "{out}{said}"
    );
    let (done, out, said) = run(&["topics", "--json", "set", "pumps", "--quota-bytes", "default"]).await;
    assert!(done, "{said}");
    let set: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(set["settings"], json!({"onFull": "evict-oldest", "ttlSeconds": 77, "gapMessages": true}));
    let (done, _, said) = run(&["topics", "set", "pumps", "--on-full", "explode"]).await;
    assert!(!done && said.contains("onFull: must be reject"), "{said}");

    let (_, out, said) = run(&["consumers", "--topic", "pumps"]).await;
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 2, "{out}{said}");
    assert_eq!(lines[1][..7], ["pumps", "persistent", "subA", "-", "-", "0", "1"], "{out}");
    let (_, out, _) = run(&["consumers", "--json"]).await;
    let all: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(all["topics"][0]["consumers"][0]["name"], "subA");
    // Flags may stand anywhere.
    let (done, _, said) = run(&["consumers", "--topic", "pumps", "remove", "subA"]).await;
    assert!(done, "{said}");
    assert_eq!(run(&["consumers"]).await, (true, String::new(), "there are no consumers\n".to_owned()));
    let (done, out, said) = run(&["consumers", "--topic", "nosuch"]).await;
    assert!(!done && out.is_empty() && said.contains("there is no topic 'nosuch'"), "{out}{said}");
    let (done, _, said) = run(&["consumers", "remove", "subA"]).await;
    assert!(!done && said.contains("--topic must say"), "{said}");
    let (done, _, said) = run(&["consumers", "remove", "--topic", "pumps", "subA"]).await;
    assert!(!done && said.contains("no subscriber 'subA'"), "{said}");

    let keeper = gateway.tenant("plant1").await;
    gateway
        .post("/notification2/subscriptions", &of_tenant("theirs", &["events"]))
        .user(&keeper, PASSWORD)
        .await
        .expect(201);
    let (_, out, _) = run(&["topics", "--tenant", "plant1"]).await;
    assert!(out.contains("theirs") && !out.contains("pumps"), "{out}");
    let (_, out, said) = run(&["topics", "set", "theirs", "--quota-bytes", "4321", "--tenant", "plant1"]).await;
    assert!(out.contains("4321"), "{out}{said}");
    gateway.tenant("plant2").await;
    let (done, out, said) = run(&["topics", "--tenant", "plant2"]).await;
    assert!(done && out.is_empty() && said == "there are no topics\n", "{out}{said}");
    let (_, out, said) = run(&["user", "list", "--tenant", "edge"]).await;
    assert!(out.contains("admin\t"), "{out}{said}");
    assert!(run(&["tenant", "list", "--url", &url]).await.0);
}
