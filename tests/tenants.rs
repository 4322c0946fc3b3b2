//! Tenants come and go; what waits for consumers of one that went is still delivered.

use serde_json::{Value, json};

use crate::harness::{Gateway, PASSWORD, USER, event, eventually, forwarded, measurement, of_object};

const TENANTS: &str = "/tidegate/v1/tenants";
const TOPICS: &str = "/tidegate/v1/topics";

fn names(list: &Value) -> Vec<&str> {
    list["tenants"].as_array().unwrap().iter().map(|tenant| tenant["id"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_new_tenant_has_an_administrator_whose_password_is_shown_once() {
    let gateway = Gateway::start().await;
    let answer = gateway.post(TENANTS, &json!({"id": "plant1"})).await.expect(201);
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    let made = answer.json();
    let link = format!("http://{}{TENANTS}/plant1", gateway.addr);
    assert_eq!((&made["self"], &made["adminName"]), (&json!(link), &json!("admin")));
    let password = made["adminPassword"].as_str().unwrap();
    assert!(password.len() >= 16);
    let user = gateway.get("/user/currentUser").user("plant1/admin", password).await.expect(200).json();
    let roles: Vec<_> =
        user["effectiveRoles"].as_array().unwrap().iter().map(|role| role["id"].as_str().unwrap()).collect();
    assert!(roles.contains(&"ROLE_USER_MANAGEMENT_ADMIN") && roles.contains(&"ROLE_MEASUREMENT_ADMIN"), "{roles:?}");
    assert!(
        !roles.contains(&"ROLE_TENANT_MANAGEMENT_ADMIN") && !roles.contains(&"ROLE_TIDEGATE_OPERATOR"),
        "{roles:?}"
    );
    let read = gateway.get(&format!("{TENANTS}/plant1")).await.expect(200).json();
    assert_eq!((&read["self"], &read["adminPassword"]), (&made["self"], &Value::Null));

    let given = json!({"id": "plant2", "adminName": "boss", "adminPassword": PASSWORD});
    let made = gateway.post(TENANTS, &given).await.expect(201).json();
    assert_eq!(made["adminPassword"], Value::Null, "a given password is not repeated");
    gateway.get("/user/currentUser").user("plant2/boss", PASSWORD).await.expect(200);
    let list = gateway.get(&format!("{TENANTS}?pageSize=2")).await.expect(200).json();
    assert_eq!((names(&list), list["next"].is_string()), (vec!["edge", "plant1"], true));
}

#[tokio::test]
async fn what_a_tenant_cannot_be_is_refused_by_name() {
    let gateway = Gateway::with("[limits]\ntenants = 3\n").await;
    for (body, said) in [
        (json!({}), "Following mandatory fields should be included: id"),
        (json!({"id": "Plant"}), "id: must have 2 to 32 small letters and digits"),
        (json!({"id": "a"}), "id"),
        (json!({"id": "a".repeat(33)}), "id"),
        (json!({"id": "a/b"}), "id"),
        (json!({"id": 5}), "id: must be a string"),
        (json!({"id": "plant1", "adminPassword": "short"}), "at least 8 characters"),
        (json!({"id": "plant1", "adminName": "a:b"}), "userName"),
        (json!({"id": "plant1", "domain": "x"}), "domain: is not a known member"),
    ] {
        gateway.post(TENANTS, &body).await.error(422, said);
    }
    gateway.post(TENANTS, &json!({"id": "edge"})).await.error(409, "exists already");
    gateway.delete(&format!("{TENANTS}/edge")).await.error(422, "cannot be removed");
    gateway.get(&format!("{TENANTS}/plant1")).await.error(404, "no such tenant");
    gateway.delete(&format!("{TENANTS}/plant1")).await.error(404, "no such tenant");
    gateway.tenant("plant1").await;
    gateway.tenant("plant2").await;
    gateway.post(TENANTS, &json!({"id": "plant3"})).await.error(422, "at most 3 tenants");
    // Neither a new name is free by removing one, nor the old one.
    gateway.delete(&format!("{TENANTS}/plant1")).await.expect(204);
    gateway.post(TENANTS, &json!({"id": "plant3"})).await.error(422, "limits.tenants");
    gateway.post(TENANTS, &json!({"id": "plant1"})).await.error(409, "not given again");
}

#[tokio::test]
async fn only_operators_of_the_gateway_manage_tenants() {
    let gateway = Gateway::start().await;
    let keeper = gateway.tenant("plant1").await;
    gateway.add_user("edge", "ann", "ROLE_USER_MANAGEMENT_ADMIN").await;
    for user in [keeper.as_str(), "edge/ann"] {
        for call in [
            gateway.get(TENANTS),
            gateway.get(&format!("{TENANTS}/plant1")),
            gateway.post(TENANTS, &json!({"id": "plant2"})),
            gateway.delete(&format!("{TENANTS}/plant1")),
        ] {
            call.user(user, PASSWORD).await.error(403, "");
        }
    }
    assert_eq!(names(&gateway.get(TENANTS).await.expect(200).json()), ["edge", "plant1"]);
}

// Seed 000, "Deleting subscriptions": when a tenant is deleted, all its subscriptions are, while topics and consumers stay
// until all messages are consumed. Nobody gets in, nothing new arrives.
#[tokio::test]
async fn a_removed_tenant_takes_nothing_more_and_its_topics_drain() {
    let mut gateway = Gateway::start().await;
    let keeper = gateway.tenant("plant1").await;
    let created = gateway.post("/inventory/managedObjects", &json!({"name": "pump"})).user(&keeper, PASSWORD).await;
    let device = created.expect(201).json()["id"].as_str().unwrap().to_owned();
    gateway.post("/notification2/subscriptions", &forwarded("Sub1", &device)).user(&keeper, PASSWORD).await.expect(201);
    let token = |subscriber: &str| {
        let request = json!({"subscription": "Sub1", "subscriber": subscriber});
        gateway.post("/notification2/token", &request).user(&keeper, PASSWORD)
    };
    let mut tokens = Vec::new();
    for subscriber in ["subA", "subB", "subC"] {
        tokens.push(token(subscriber).await.expect(200).json()["token"].as_str().unwrap().to_owned());
    }
    let [connected, waiting, never] = &tokens[..] else { unreachable!() };
    let mut consumer = gateway.consumer_with(connected).await.unwrap();
    gateway.consumer_with(waiting).await.unwrap().close().await;
    let measure = |value| gateway.post_measurement(&measurement(&device, "t", value)).user(&keeper, PASSWORD);
    measure(1).await.expect(201);
    measure(2).await.expect(201);
    consumer.receive().await;

    gateway.delete(&format!("{TENANTS}/plant1")).await.expect(204);
    measure(3).await.error(401, "");
    token("subA").await.error(401, "");
    gateway.get("/notification2/subscriptions").user(&keeper, PASSWORD).await.error(401, "");
    assert_eq!(names(&gateway.get(TENANTS).await.expect(200).json()), ["edge"]);
    assert_eq!(consumer.receive().await.json()["c8y_Reading"]["R"]["value"], 2, "a connection stays");
    consumer.close().await;
    let refused = gateway.consumer_with(never).await.err();
    assert_eq!(refused, Some(401), "a consumer that would be new");

    gateway.restart().await;
    gateway.get("/user/currentUser").user(&keeper, PASSWORD).await.error(401, "");
    let mut consumer = gateway.consumer_with(waiting).await.unwrap();
    for value in [1, 2] {
        assert_eq!(consumer.receive().await.json()["c8y_Reading"]["R"]["value"], value);
    }
    // Nothing will ever come any more: consumers that have all go, and the topic with the last.
    assert!(consumer.try_next().await.is_none());
    let list = format!("{TOPICS}?tenant=plant1");
    eventually("the topic is gone", async || {
        let list = gateway.get(&list).await.expect(200).json();
        list["topics"].as_array().unwrap().is_empty().then_some(())
    })
    .await;
    assert_eq!(gateway.consumer_with(waiting).await.err(), Some(401));
    gateway.unsubscribe(waiting).await.error(500, "no subscriber");
    // The gateway's own tenant has not noticed.
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let mut own = gateway.consumer("Sub1", "subA").await;
    gateway.measure(&device, "t", 4).await;
    assert_eq!(own.receive().await.description, format!("/edge/measurements/{device}"));
}

// With `purge` nothing is left to drain, and nothing on the disk.
#[tokio::test]
async fn a_purged_tenant_leaves_nothing() {
    let mut gateway = Gateway::start().await;
    let tables = [
        "topic",
        "consumer",
        "cursor",
        "msg",
        "managed_object",
        "external_id",
        "subscription",
        "event",
        "topic_setting",
    ];
    let mut tokens = Vec::new();
    for tenant in ["plant1", "plant2"] {
        let keeper = gateway.tenant(tenant).await;
        let post = |path: &str, body: &Value| gateway.post(path, body).user(&keeper, PASSWORD);
        let created = post("/inventory/managedObjects", &json!({"name": "pump"})).await.expect(201).json();
        let device = created["id"].as_str().unwrap();
        post(&format!("/identity/globalIds/{device}/externalIds"), &json!({"type": "s", "externalId": "1"}))
            .await
            .expect(201);
        post("/notification2/subscriptions", &of_object("Sub1", device, &["events"])).await.expect(201);
        let request = json!({"subscription": "Sub1", "subscriber": "subA"});
        let token =
            post("/notification2/token", &request).await.expect(200).json()["token"].as_str().unwrap().to_owned();
        gateway.consumer_with(&token).await.unwrap().close().await;
        post("/event/events", &event(device, "t", "x")).await.expect(201);
        gateway
            .put(&format!("{TOPICS}/persistent/Sub1?tenant={tenant}"), &json!({"ttlSeconds": 9999}))
            .await
            .expect(200);
        tokens.push(token);
    }
    let mut connected = gateway.consumer_with(&tokens[0]).await.unwrap();
    connected.next().await;
    gateway.delete(&format!("{TENANTS}/plant1?purgee=true")).await.error(422, "purgee: is not a parameter");
    let queue = "tidegate_admission_queue_requests{tenant=\"plant1\"}";
    assert!(gateway.get("/metrics").await.expect(200).text().contains(queue));
    gateway.delete(&format!("{TENANTS}/plant1?purge=true")).await.expect(204);
    assert!(!gateway.get("/metrics").await.expect(200).text().contains(queue));
    assert!(connected.try_next().await.is_none(), "the connection ends");
    assert_eq!(gateway.consumer_with(&tokens[0]).await.err(), Some(401));
    // One that was removed before can be purged later.
    gateway.delete(&format!("{TENANTS}/plant2")).await.expect(204);
    gateway.consumer_with(&tokens[1]).await.unwrap().close().await;
    gateway.delete(&format!("{TENANTS}/plant2")).await.error(404, "no such tenant");
    let url = format!("http://{}", gateway.addr);
    let rest = [("TIDEGATE_URL", url.as_str()), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)];
    assert!(run(&gateway, &["remove", "plant2", "--purge"], &rest, "purge").await.0);
    gateway.delete(&format!("{TENANTS}/plant3?purge=true")).await.error(404, "no such tenant");
    eventually("the events are deleted", async || {
        (gateway.metric("tidegate_objects_deleted_total").await >= 2.0).then_some(())
    })
    .await;
    assert_eq!(gateway.consumer_with(&tokens[1]).await.err(), Some(401));
    gateway.stop().await;
    let mut database = gateway.database().await;
    for table in tables {
        let sql = sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
        let count: i64 = sqlx::query_scalar(sql).fetch_one(&mut database).await.unwrap();
        // Settings stay for a while, in case that a request is still arriving.
        let expected = if table == "topic_setting" { 2 } else { 0 };
        assert_eq!(count, expected, "{table}");
    }
}

/// Runs `tidegate tenant` and returns whether it succeeded and what it printed.
async fn run(gateway: &Gateway, arguments: &[&str], env: &[(&str, &str)], name: &str) -> (bool, String, String) {
    gateway.command(&[&["tenant"], arguments].concat(), env, name).await
}

#[tokio::test]
async fn the_command_works_on_the_directory_and_over_rest() {
    let mut gateway = Gateway::start().await;
    let url = format!("http://{}", gateway.addr);
    let rest = [("TIDEGATE_URL", url.as_str()), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)];
    let data = gateway.data().to_str().unwrap().to_owned();
    let (done, out, said) = run(&gateway, &["add", "plant1"], &rest, "add").await;
    assert!(done, "{said}");
    let password = out.split_once(" is ").unwrap().1.split(' ').next().unwrap();
    gateway.get("/user/currentUser").user("plant1/admin", password).await.expect(200);
    let (done, _, said) = run(&gateway, &["--data", &data, "list"], &[], "locked").await;
    assert!(!done && said.contains("the gateway is running, use --url"), "{said}");

    gateway.stop().await;
    let given = [("TIDEGATE_NEW_PASSWORD", PASSWORD)];
    let (done, out, said) =
        run(&gateway, &["--data", &data, "add", "plant2", "--admin", "boss"], &given, "plant2").await;
    assert!(done && out.is_empty(), "{out}{said}");
    let (done, _, said) = run(&gateway, &["--data", &data, "add", "Plant"], &given, "bad").await;
    assert!(!done && said.contains("small letters"), "{said}");
    let (done, _, said) = run(&gateway, &["--data", &data, "remove", "plant1"], &[], "remove").await;
    assert!(done, "{said}");
    let (done, _, said) = run(&gateway, &["--data", &data, "remove", "edge"], &[], "edge").await;
    assert!(!done && said.contains("cannot be removed"), "{said}");
    gateway.restart_process().await;
    gateway.get("/user/currentUser").user("plant2/boss", PASSWORD).await.expect(200);
    gateway.get("/user/currentUser").user("plant1/admin", password).await.error(401, "");
    let (_, list, _) = run(&gateway, &["list"], &rest, "list").await;
    assert_eq!(list, "edge\nplant2\n");
    assert!(run(&gateway, &["remove", "plant2"], &rest, "remove_rest").await.0);
    gateway.get("/user/currentUser").user("plant2/boss", PASSWORD).await.error(401, "");
}

// A database from before there were tenants: those of its users are there.
#[tokio::test]
async fn tenants_of_users_that_were_there_before_are_known() {
    let mut gateway = Gateway::start().await;
    gateway.stop().await;
    let mut database = gateway.database().await;
    for sql in [
        "DROP TABLE tenant",
        "ALTER TABLE user DROP COLUMN profile",
        "INSERT INTO user SELECT 'old', name, hash, roles FROM user",
        "DELETE FROM _sqlx_migrations WHERE description IN ('access', 'removal')",
    ] {
        sqlx::query(sql).execute(&mut database).await.unwrap();
    }
    sqlx::Connection::close(database).await.unwrap();
    gateway.restart_process().await;
    assert_eq!(names(&gateway.get(TENANTS).await.expect(200).json()), ["edge", "old"]);
    gateway.add_user("edge", "ann", "").await;
    gateway.get("/user/currentUser").user("old/admin", PASSWORD).await.expect(200);
}
