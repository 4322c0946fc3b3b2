//! Who may do what: HTTP Basic, tenants and roles.

use serde_json::json;

use crate::harness::{Call, Gateway, PASSWORD, forwarded, measurement, raw};

// Cumulocity OpenAPI: 401 `security/Unauthorized`, 403 `security/Forbidden`, always `{error, message, info}`.
#[tokio::test]
async fn without_valid_credentials_everything_but_health_is_401() {
    let gateway = Gateway::start().await;
    for (user, password) in [
        ("edge/admin", "wrong"),
        ("edge/admin", ""),
        ("edge/nobody", PASSWORD),
        ("elsewhere/admin", PASSWORD),
        ("", PASSWORD),
        ("edge/", PASSWORD),
        ("/admin", PASSWORD),
        ("edge/admin/", PASSWORD),
    ] {
        let refused = gateway.get("/inventory/managedObjects/1").user(user, password).await;
        assert_eq!(refused.json()["error"], "security/Unauthorized", "{user}");
        refused.error(401, "");
    }
    for (method, path) in [
        ("POST", "/inventory/managedObjects"),
        ("GET", "/measurement/measurements"),
        ("POST", "/measurement/measurements"),
        ("GET", "/notification2"),
        ("GET", "/notification2/subscriptions"),
        ("POST", "/notification2/subscriptions"),
        ("DELETE", "/notification2/subscriptions?context=tenant"),
        ("POST", "/notification2/token"),
        ("GET", "/platform"),
        ("GET", "/tenant/currentTenant"),
        ("GET", "/user/currentUser"),
        ("PUT", "/user/currentUser"),
        ("GET", "/user/roles"),
        ("GET", "/user/edge/users"),
        ("POST", "/user/edge/users"),
        ("DELETE", "/user/edge/users/admin"),
        ("GET", "/tidegate/v1/tenants"),
        ("POST", "/tidegate/v1/tenants"),
        ("DELETE", "/tidegate/v1/tenants/edge"),
    ] {
        gateway.call(method, path).anonymous().await.error(401, "");
    }
    for header in ["Basic", "Basic !", "Basic YWJj", "Bearer x", "Basic //79"] {
        gateway.get("/notification2").anonymous().header("Authorization", header).await.error(401, "");
    }
}

// `UseXBasic: true` is what the platform's web client sends to keep the browser's own dialog away.
#[tokio::test]
async fn a_401_challenges_unless_the_client_asks_it_not_to() {
    let gateway = Gateway::start().await;
    let refused = gateway.get("/notification2").anonymous().await.expect(401);
    assert!(refused.header("www-authenticate").unwrap().starts_with("Basic "));
    let refused = gateway.get("/notification2").anonymous().header("UseXBasic", "true").await.expect(401);
    assert_eq!(refused.header("www-authenticate"), None);
}

#[tokio::test]
async fn a_bare_user_belongs_to_the_tenant_edge() {
    let gateway = Gateway::start().await;
    gateway.get("/notification2").user("edge/admin", PASSWORD).await.expect(200);
    gateway.get("/notification2").user("admin", PASSWORD).await.expect(200);
}

// Seed 000, "Creating subscriptions" and "Creating tokens": ROLE_NOTIFICATION_2_ADMIN is needed.
// Cumulocity-IoT/cumulocity-dynamic-mapper#322: users want to be told.
#[tokio::test]
async fn what_no_role_allows_is_403_and_changes_nothing() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.add_user("edge", "reader", "ROLE_INVENTORY_READ,ROLE_MEASUREMENT_READ").await;
    let subscription = forwarded("Sub1", &device);
    let object = format!("/inventory/managedObjects/{device}");
    let token = json!({"subscription": "Sub1", "subscriber": "subA"});
    for call in [
        gateway.post("/notification2/subscriptions", &subscription),
        gateway.get("/notification2/subscriptions"),
        gateway.get("/notification2"),
        gateway.delete("/notification2/subscriptions?context=tenant"),
        gateway.post("/notification2/token", &token),
        gateway.post("/inventory/managedObjects", &json!({})),
        gateway.put(&object, &json!({"name": "mine"})),
        gateway.delete(&object),
        gateway.post_measurement(&measurement(&device, "t", 1)),
        gateway.get("/metrics"),
        gateway.get("/user/edge/users"),
        gateway.get("/user/edge/users/reader"),
        gateway.post("/user/edge/users", &json!({"userName": "mine", "password": PASSWORD})),
        gateway.put("/user/edge/users/reader", &json!({"roles": ["ROLE_INVENTORY_ADMIN"]})),
        gateway.delete("/user/edge/users/admin"),
        gateway.get("/tidegate/v1/tenants"),
        gateway.post("/tidegate/v1/tenants", &json!({"id": "mine"})),
        gateway.delete("/tidegate/v1/tenants/edge"),
    ] {
        let refused = call.user("edge/reader", PASSWORD).await;
        assert_eq!(refused.json()["error"], "security/Forbidden");
        refused.error(403, "");
    }
    let kept = gateway.get(&object).user("edge/reader", PASSWORD).await.expect(200).json();
    assert_eq!(kept["name"], "pump");
    let list = gateway.get("/measurement/measurements").user("edge/reader", PASSWORD).await.expect(200).json();
    assert_eq!(list["measurements"], json!([]));
}

// Seed 000, "Creating subscriptions" and "Creating tokens". The role opens every device of the tenant to whoever has it, and
// nothing else.
#[tokio::test]
async fn the_role_for_notifications_is_enough_for_all_of_them() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.add_user("edge", "listener", "ROLE_NOTIFICATION_2_ADMIN").await;
    let listener = |call: Call| call.user("edge/listener", PASSWORD);
    let made = listener(gateway.post("/notification2/subscriptions", &forwarded("Sub1", &device))).await.expect(201);
    let request = json!({"subscription": "Sub1", "subscriber": "subA"});
    let token = listener(gateway.post("/notification2/token", &request)).await.expect(200).json();
    let token = token["token"].as_str().unwrap();
    let mut consumer = gateway.consumer_with(token).await.unwrap();
    gateway.measure(&device, "t", 1).await;
    assert_eq!(consumer.receive().await.description, format!("/edge/measurements/{device}"));
    listener(gateway.call("POST", &format!("/notification2/unsubscribe?token={token}"))).await.expect(200);
    let path = format!("/notification2/subscriptions/{}", made.json()["id"].as_str().unwrap());
    for path in ["/notification2", "/notification2/subscriptions", &path] {
        listener(gateway.get(path)).await.expect(200);
    }
    listener(gateway.delete(&path)).await.expect(204);
    listener(gateway.get(&format!("/inventory/managedObjects/{device}"))).await.error(403, "");
    listener(gateway.get("/measurement/measurements")).await.error(403, "");
}

#[tokio::test]
async fn tenants_do_not_see_each_other() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    let subscription = gateway.subscribe(&forwarded("Sub1", &device)).await;
    let stored = gateway.measure(&device, "t", 1).await;
    gateway.add_user("other", "boss", "*").await;
    let boss = "other/boss";

    let paths = [
        format!("/inventory/managedObjects/{device}"),
        format!("/measurement/measurements/{}", stored["id"].as_str().unwrap()),
        format!("/notification2/subscriptions/{}", subscription["id"].as_str().unwrap()),
    ];
    for path in &paths {
        gateway.get(path).user(boss, PASSWORD).await.error(404, "");
    }
    gateway.put(&paths[0], &json!({"name": "mine"})).user(boss, PASSWORD).await.error(404, "");
    gateway.delete(&paths[0]).user(boss, PASSWORD).await.error(404, "");
    gateway.delete(&paths[2]).user(boss, PASSWORD).await.error(404, "");
    gateway.post_measurement(&measurement(&device, "t", 2)).user(boss, PASSWORD).await.error(422, "source");
    gateway.post("/notification2/subscriptions", &forwarded("Sub1", &device)).user(boss, PASSWORD).await.error(404, "");
    for path in ["/measurement/measurements", "/notification2/subscriptions"] {
        let list = gateway.get(path).user(boss, PASSWORD).await.expect(200).json();
        assert_eq!(list[path.rsplit('/').next().unwrap()], json!([]));
    }
    gateway.delete("/notification2/subscriptions?context=tenant").user(boss, PASSWORD).await.expect(204);

    // A topic of the same name is another topic.
    let request = json!({"subscription": "Sub1", "subscriber": "subA"});
    let token = gateway.post("/notification2/token", &request).user(boss, PASSWORD).await.expect(200).json();
    let mut theirs = gateway.consumer_with(token["token"].as_str().unwrap()).await.unwrap();
    let mut ours = gateway.consumer("Sub1", "subA").await;
    gateway.measure(&device, "t", 3).await;
    assert_eq!(ours.receive().await.description, format!("/edge/measurements/{device}"));
    let tenant =
        json!({"context": "tenant", "subscription": "Sub1", "subscriptionFilter": {"apis": ["managedobjects"]}});
    gateway.post("/notification2/subscriptions", &tenant).user(boss, PASSWORD).await.expect(201);
    let theirs_device = gateway.post("/inventory/managedObjects", &json!({})).user(boss, PASSWORD).await.expect(201);
    let id = theirs_device.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(theirs.receive().await.description, format!("/other/managedobjects/{id}"), "their first message");
}

// A request that would change something and has a foreign Origin is 403.
#[tokio::test]
async fn pages_of_other_sites_cannot_change_anything() {
    let gateway = Gateway::start().await;
    let own = format!("http://{}", gateway.addr);
    gateway.post("/inventory/managedObjects", &json!({})).header("Origin", "http://evil.example").await.error(403, "");
    gateway.post("/inventory/managedObjects", &json!({})).header("Origin", "null").await.error(403, "");
    gateway.post("/inventory/managedObjects", &json!({})).header("Origin", &own).await.expect(201);
    gateway.get("/notification2").header("Origin", "http://evil.example").await.expect(200);
}

// No CORS headers unless `http.cors_origins`.
#[tokio::test]
async fn only_pages_of_named_origins_may_use_the_api_from_a_browser() {
    let named = "https://dashboard.example";
    let gateway = Gateway::with(&format!("[http]\ncors_origins = '{named}, http://other:8000'\n")).await;
    let question = |origin: &str| {
        let call = gateway.call("OPTIONS", "/inventory/managedObjects").anonymous().header("Origin", origin);
        call.header("Access-Control-Request-Method", "POST")
            .header("Access-Control-Request-Headers", "authorization,x-y")
    };
    let allowed = question(named).await.expect(204);
    assert_eq!(allowed.header("access-control-allow-origin"), Some(named));
    assert_eq!(allowed.header("access-control-allow-headers"), Some("authorization,x-y"));
    assert!(allowed.header("access-control-allow-methods").unwrap().contains("POST"));
    let created = gateway.post("/inventory/managedObjects", &json!({})).header("Origin", named).await.expect(201);
    assert_eq!(created.header("access-control-allow-origin"), Some(named));
    assert_eq!(created.header("vary"), Some("Origin"));
    let refused = gateway.get("/notification2").anonymous().header("Origin", named).await.expect(401);
    assert_eq!(refused.header("access-control-allow-origin"), Some(named), "a page may read why");

    for foreign in ["https://dashboard.example:8443", "http://dashboard.example", "null"] {
        assert_eq!(question(foreign).await.expect(405).header("access-control-allow-origin"), None);
        let create = gateway.post("/inventory/managedObjects", &json!({})).header("Origin", foreign);
        create.await.error(403, "other sites");
    }
    let silent = Gateway::start().await;
    let created = silent.get("/health/live").header("Origin", named).await.expect(200);
    assert_eq!(created.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn what_is_no_http_harms_nothing() {
    let gateway = Gateway::start().await;
    for garbage in
        [&b"\x16\x03\x01\x02\x00\x01\x00"[..], b"GET\r\n\r\n", b"\0\0\0\0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    {
        let answer = raw(gateway.addr, garbage).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4") || answer.starts_with("HTTP/1.0 4"), "{answer}");
    }
    let long = format!("GET /{} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "a".repeat(200_000));
    let answer = raw(gateway.addr, long.as_bytes()).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{}", &answer[..answer.len().min(200)]);
    gateway.get("/health/ready").await.expect(200);
}
