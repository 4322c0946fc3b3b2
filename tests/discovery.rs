//! What clients ask before anything else: where things are, whose they are, how to log in.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::{Consumer, Gateway, PASSWORD, forwarded};

/// Every text in `value` that begins with `base`.
fn links(value: &Value, base: &str, out: &mut Vec<String>) {
    match value {
        Value::String(text) if text.starts_with(base) => out.push(text.clone()),
        Value::Array(elements) => elements.iter().for_each(|element| links(element, base, out)),
        Value::Object(members) => members.values().for_each(|member| links(member, base, out)),
        _ => {}
    }
}

// Java agents begin here, and use the links that they find.
#[tokio::test]
async fn the_platform_resource_names_every_api_and_its_queries() {
    let gateway = Gateway::start().await;
    let base = format!("http://{}", gateway.addr);
    let media = "application/vnd.com.nsn.cumulocity.platformapi+json";
    let answer = gateway.get("/platform").header("Accept", media).await.expect(200);
    assert!(answer.header("content-type").unwrap().starts_with(media), "{:?}", answer.headers);
    let platform = answer.json();
    let mut names: Vec<_> = platform.as_object().unwrap().keys().map(String::as_str).collect();
    names.sort_unstable();
    let expected =
        ["alarm", "deviceControl", "event", "identity", "inventory", "measurement", "self", "tenant", "user"];
    assert_eq!(names, expected);
    assert_eq!(platform["self"], format!("{base}/platform"));
    let measurements = format!("{base}/measurement/measurements");
    assert_eq!(platform["measurement"]["measurements"], json!({"self": measurements, "measurements": null}));
    assert_eq!(platform["measurement"]["measurementsForSource"], format!("{measurements}?source={{source}}"));
    let objects = format!("{base}/inventory/managedObjects");
    assert_eq!(platform["inventory"]["managedObjects"], json!({"self": objects, "references": []}));
    assert_eq!(platform["identity"]["externalId"], format!("{base}/identity/externalIds/{{type}}/{{externalId}}"));
    assert_eq!(platform["deviceControl"]["operations"]["self"], format!("{base}/devicecontrol/operations"));

    // Each API's own resource is where its link says, and says the same.
    for name in expected.iter().filter(|name| **name != "self") {
        let link = platform[name]["self"].as_str().unwrap();
        let own = gateway.get(link.strip_prefix(&base).unwrap()).await.expect(200).json();
        assert_eq!(own, platform[name], "{name}");
    }
    let mut all = Vec::new();
    links(&platform, &base, &mut all);
    assert!(all.len() > 30, "{all:?}");
}

// @c8y/client takes `name` for the tenant's id.
#[tokio::test]
async fn the_current_tenant_is_the_callers() {
    let gateway = Gateway::start().await;
    gateway.add_user("plant1", "ann", "").await;
    let media = "application/vnd.com.nsn.cumulocity.currenttenant+json";
    for (user, tenant) in [("edge/admin", "edge"), ("admin", "edge"), ("plant1/ann", "plant1")] {
        let call = gateway.get("/tenant/currentTenant").user(user, PASSWORD).header("UseXBasic", "true");
        let answer = call.header("Accept", media).await.expect(200);
        assert!(answer.header("content-type").unwrap().starts_with(media), "{:?}", answer.headers);
        let body = answer.json();
        assert_eq!(body["name"], tenant, "{body}");
        assert_eq!(body["domainName"], gateway.addr.ip().to_string());
        assert_eq!(body["allowCreateTenants"], false);
        assert_eq!(body["applications"]["references"], json!([]));
    }
}

#[tokio::test]
async fn login_options_are_open_and_know_basic_only() {
    let gateway = Gateway::start().await;
    let options = gateway.get("/tenant/loginOptions").anonymous().await.expect(200).json();
    let types: Vec<_> = options["loginOptions"].as_array().unwrap().iter().map(|option| &option["type"]).collect();
    assert_eq!(types, ["BASIC"]);
    gateway.call("POST", "/tenant/loginOptions").anonymous().await.error(405, "GET");
}

#[tokio::test]
async fn the_current_user_has_its_effective_roles() {
    let gateway = Gateway::start().await;
    gateway.add_user("edge", "ann", "ROLE_EVENT_READ,ROLE_ALARM_READ").await;
    let media = "application/vnd.com.nsn.cumulocity.currentuser+json";
    let answer = gateway.get("/user/currentUser").user("edge/ann", PASSWORD).header("Accept", media).await.expect(200);
    assert!(answer.header("content-type").unwrap().starts_with(media), "{:?}", answer.headers);
    let ann = answer.json();
    assert_eq!(
        (&ann["id"], &ann["userName"], &ann["shouldResetPassword"]),
        (&json!("ann"), &json!("ann"), &json!(false))
    );
    let roles = ann["effectiveRoles"].as_array().unwrap();
    assert_eq!(roles.iter().map(|role| &role["id"]).collect::<Vec<_>>(), ["ROLE_EVENT_READ", "ROLE_ALARM_READ"]);
    let link = roles[0]["self"].as_str().unwrap().strip_prefix(&format!("http://{}", gateway.addr)).unwrap();
    let role = gateway.get(link).await.expect(200).json();
    assert_eq!(role, roles[0]);
    assert!(!ann.to_string().contains("argon2"));
}

/// A proxy that serves the gateway under `/edge1/`, and does not listen to anything else.
async fn proxy(gateway: &Gateway) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (addr, upstream) = (listener.local_addr().unwrap(), gateway.addr);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b" ") {
                    head.push(client.read_u8().await?);
                }
                let mut prefix = [0; 6];
                client.read_exact(&mut prefix).await?;
                assert_eq!(&prefix, b"/edge1");
                let mut server = TcpStream::connect(upstream).await?;
                server.write_all(&head).await?;
                copy_bidirectional(&mut client, &mut server).await
            });
        }
    });
    addr.to_string()
}

// reubenmiller/go-c8y#33: behind a proxy with a fixed path prefix, upgrades work and links have the prefix.
#[tokio::test]
async fn behind_a_proxy_links_begin_with_the_public_url() {
    let gateway = Gateway::with("[http]\npublic_url = 'https://site.example/edge1'\n").await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let token = gateway.token("Sub1", "subA").await;
    let proxy = proxy(&gateway).await;
    let url = format!("ws://{proxy}/edge1/notification2/consumer/?token={token}");
    let mut consumer = Consumer::connect(&url).await.unwrap();
    gateway.measure(&device, "t", 1).await;
    let notified = consumer.receive().await.json();
    assert!(notified["self"].as_str().unwrap().starts_with("https://site.example/edge1/measurement/"), "{notified}");

    let platform = gateway.get("/platform").await.expect(200).json();
    assert_eq!(platform["alarm"]["alarms"]["self"], "https://site.example/edge1/alarm/alarms");
    let list = gateway.get("/measurement/measurements").await.expect(200).json();
    assert!(
        list["self"].as_str().unwrap().starts_with("https://site.example/edge1/measurement/measurements?"),
        "{list}"
    );
}

#[tokio::test]
async fn headers_of_proxies_are_not_believed() {
    let gateway = Gateway::start().await;
    let mut call = gateway.get("/platform");
    for (name, value) in [
        ("X-Forwarded-Host", "evil.example"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Prefix", "/evil"),
        ("Forwarded", "host=evil.example;proto=https"),
    ] {
        call = call.header(name, value);
    }
    let platform = call.await.expect(200).json();
    assert_eq!(platform["self"], format!("http://{}/platform", gateway.addr));
}
