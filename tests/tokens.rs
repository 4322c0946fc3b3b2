//! Tokens and unsubscribing (Notifications 2.0 OpenAPI; seed 000, "Creating tokens").

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde_json::{Value, json};

use crate::harness::{Gateway, eventually, forwarded, upgrade, value_of};

const PATH: &str = "/notification2/token";

fn now() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap()
}

/// A token as the gateway makes it, for the consumer `subA` of `Sub1`, with the gateway's own key.
fn mint(gateway: &Gateway, issued: i64, expires: i64) -> String {
    let key = std::fs::read(gateway.data().join("keys").join("consumer.key")).unwrap();
    assert_eq!(key.len(), 32);
    signed(&key, issued, expires)
}

fn signed(key: &[u8], issued: i64, expires: i64) -> String {
    let claims = json!({
        "sub": "subA", "topic": "edge/relnotif/Sub1", "jti": "0f1e2d3c4b5a69788796a5b4c3d2e1f0", "iat": issued, "exp": expires,
    });
    let mut header = Header::new(Algorithm::HS256);
    header.typ = None;
    jsonwebtoken::encode(&header, &claims, &EncodingKey::from_secret(key).unwrap()).unwrap()
}

fn claims(token: &str) -> Value {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap()).unwrap()
}

async fn handshake(gateway: &Gateway, token: &str) -> String {
    upgrade(gateway.addr, &format!("/notification2/consumer/?token={token}")).await
}

// Seed 000, "Creating tokens" (1440 minutes by default) and "Token expiration": clients decode the payload, and some (the Java
// client, go-c8y) with the standard alphabet and without padding.
#[tokio::test]
async fn a_token_has_the_platforms_claims_in_a_payload_for_every_base64_decoder() {
    let gateway = Gateway::start().await;
    for (minutes, subscriber) in [(None, "subA"), (Some(1), "a"), (Some(86_400), "Subscriber0123456789")] {
        let mut request = json!({"subscription": "Sub1", "subscriber": subscriber});
        if let Some(minutes) = minutes {
            request["expiresInMinutes"] = json!(minutes);
        }
        let answer = gateway.post(PATH, &request).await.expect(200);
        assert!(answer.header("content-type").unwrap().starts_with("application/json"));
        assert_eq!(answer.json().as_object().unwrap().len(), 1, "nothing but the token");
        let token = answer.json()["token"].as_str().unwrap().to_owned();

        let parts: Vec<_> = token.split('.').collect();
        assert_eq!(parts.len(), 3);
        assert_eq!(URL_SAFE_NO_PAD.decode(parts[0]).unwrap(), br#"{"alg":"HS256"}"#);
        assert!(parts[1].bytes().all(|letter| letter.is_ascii_alphanumeric()), "{}", parts[1]);
        let payload = String::from_utf8(STANDARD_NO_PAD.decode(parts[1]).unwrap()).unwrap();
        let places: Vec<_> = ["sub", "topic", "jti", "iat", "exp"]
            .map(|name| payload.find(&format!("\"{name}\":")).unwrap_or_else(|| panic!("no {name} in {payload}")))
            .to_vec();
        assert!(places.is_sorted(), "{payload}");
        let claims = claims(&token);
        assert_eq!(claims.as_object().unwrap().len(), 5, "no shared, no volatile: {claims}");
        assert_eq!(claims["sub"], subscriber);
        assert_eq!(claims["topic"], "edge/relnotif/Sub1");
        let (issued, expires) = (claims["iat"].as_i64().unwrap(), claims["exp"].as_i64().unwrap());
        assert!((issued - now()).abs() < 60, "{claims}");
        assert_eq!(expires - issued, minutes.unwrap_or(1440) * 60);
    }
}

// go-c8y reads flags in claims as strings: "true" or absent.
#[tokio::test]
async fn the_kind_of_consumer_and_topic_is_in_the_claims_as_a_string() {
    let gateway = Gateway::start().await;
    for (shared, non_persistent, names) in [
        (true, false, "sub shared topic jti iat exp"),
        (false, true, "sub topic volatile jti iat exp"),
        (true, true, "sub shared topic volatile jti iat exp"),
    ] {
        let request = json!({
            "subscription": "Sub1", "subscriber": "subA", "shared": shared, "nonPersistent": non_persistent,
        });
        let token = gateway.token_of(&request).await;
        let payload = String::from_utf8(URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap()).unwrap();
        let members: Vec<_> = names.split(' ').map(|name| payload.find(&format!("\"{name}\":")).unwrap()).collect();
        assert!(members.is_sorted(), "{payload}");
        let claims = claims(&token);
        assert_eq!(claims.as_object().unwrap().len(), members.len(), "{claims}");
        for flag in ["shared", "volatile"] {
            assert!(claims.get(flag).is_none_or(|value| value == "true"), "{claims}");
        }
    }
}

// Seed 000, "Token expiration": "Tokens can be refreshed by calling the token create request with the same parameters", which
// "can be extracted from the token string"; so the Java client does it, decoder and all.
#[tokio::test]
async fn a_token_is_refreshed_from_what_stands_in_it() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    for (shared, non_persistent) in [(false, false), (true, false), (false, true), (true, true)] {
        let request = json!({
            "subscription": "Sub1", "subscriber": format!("sub{shared}"), "shared": shared,
            "nonPersistent": non_persistent, "expiresInMinutes": 7,
        });
        let first = gateway.token_of(&request).await;
        let decoded = STANDARD_NO_PAD.decode(first.split('.').nth(1).unwrap()).unwrap();
        let fields: Value = serde_json::from_slice(&decoded).unwrap();
        let topic: Vec<_> = fields["topic"].as_str().unwrap().split('/').collect();
        assert_eq!(topic.len(), 3, "{fields}");
        let again = json!({
            "subscription": topic[2], "subscriber": fields["sub"], "shared": fields.get("shared").is_some(),
            "nonPersistent": fields.get("volatile").is_some(),
            "expiresInMinutes": (fields["exp"].as_i64().unwrap() - fields["iat"].as_i64().unwrap()) / 60,
        });
        assert_eq!(again, request);
        let refreshed = gateway.token_of(&again).await;
        assert_ne!(refreshed, first);
        // Both are the same consumer's.
        let consumer = gateway.consumer_with(&first).await.unwrap();
        assert_eq!(gateway.consumer_with(&refreshed).await.err(), (!shared).then_some(409), "{request}");
        gateway.measure(&device, "t", 1).await;
        consumer.close().await;
        let mut consumer = eventually("the place is free", async || gateway.consumer_with(&refreshed).await.ok()).await;
        if !non_persistent {
            assert_eq!(value_of(&consumer.receive().await.json()), 1, "{request}");
        }
        assert_eq!(gateway.unsubscribe(&refreshed).await.status, 200);
    }
}

// `verify` of the Java client.
#[tokio::test]
async fn a_valid_token_is_described_by_its_claims() {
    let gateway = Gateway::start().await;
    let token = gateway.shared_token("Sub1", "subA").await;
    let path = |token: &str| format!("{PATH}?token={token}");
    assert_eq!(gateway.get(&path(&token)).await.expect(200).json(), claims(&token));
    gateway.get(&path(&token)).anonymous().await.error(401, "");
    gateway.get(PATH).await.error(422, "token");
    gateway.get(&path("x")).await.error(401, "malformed");
    gateway.get(&path(&signed(&[7; 32], now(), now() + 60))).await.error(401, "signature");
    gateway.get(&path(&mint(&gateway, now() - 120, now() - 60))).await.error(401, "expired");
}

// Seed 000, "Creating tokens". `signed` and `type` are of the clients.
#[tokio::test]
async fn what_clients_send_beside_the_names_is_accepted() {
    let gateway = Gateway::start().await;
    for extra in [
        json!({"expiresInMinutes": 1440, "signed": true, "shared": false}),
        json!({"nonPersistent": false, "type": "notification"}),
        json!({"expiresInMinutes": null, "signed": null, "shared": null, "type": null}),
        // go-c8y computes the minutes of a renewal from seconds.
        json!({"expiresInMinutes": 5_184_000}),
    ] {
        let mut request = json!({"subscription": "Unknown", "subscriber": "subA"});
        request.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        gateway.post(PATH, &request).await.expect(200);
    }
    for (request, field) in [
        (json!({}), "subscri"),
        (json!({"subscription": "Sub1"}), "subscriber"),
        (json!({"subscriber": "subA"}), "subscription"),
        (json!({"subscription": "Sub-1", "subscriber": "subA"}), "subscription"),
        (json!({"subscription": "Sub1", "subscriber": "sub A"}), "subscriber"),
        (json!({"subscription": "Sub1", "subscriber": ""}), "subscriber"),
        (json!({"subscription": "Sub1", "subscriber": "a".repeat(256)}), "subscriber"),
        (json!({"subscription": "Sub1", "subscriber": "subA", "expiresInMinutes": 0}), "expiresInMinutes"),
        (json!({"subscription": "Sub1", "subscriber": "subA", "expiresInMinutes": -5}), "expiresInMinutes"),
        (json!({"subscription": "Sub1", "subscriber": "subA", "type": "mqtt"}), "type"),
        (json!({"subscription": "Sub1", "subscriber": "subA", "shared": "true"}), "shared"),
        (json!({"subscription": "Sub1", "subscriber": "subA", "nonPersistent": 1}), "nonPersistent"),
        (json!({"subscription": "Sub1", "subscriber": "subA", "colour": 1}), "colour"),
        (json!([]), ""),
    ] {
        gateway.post(PATH, &request).await.error(422, field);
    }
}

// Seed 000, "Consumers and tokens": "a valid authorizing token for that specific topic".
// Cumulocity-IoT/cumulocity-dynamic-mapper#528: the refusal is the status of the upgrade itself, never a WebSocket close code.
#[tokio::test]
async fn tokens_that_are_not_ours_are_refused_with_401_on_the_upgrade() {
    let gateway = Gateway::start().await;
    let genuine = gateway.token("Sub1", "subA").await;
    let parts: Vec<_> = genuine.split('.').collect();
    let forge = |header: &str, payload: Value, signature: &str| {
        format!("{}.{}.{signature}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(payload.to_string()))
    };
    let with = |name: &str, value: Value| {
        let mut claims = claims(&genuine);
        claims[name] = value;
        claims
    };
    let header = r#"{"alg":"HS256"}"#;
    for (what, token) in [
        ("empty", String::new()),
        ("no token at all", "x".to_owned()),
        ("two parts", format!("{}.{}", parts[0], parts[1])),
        ("four parts", format!("{genuine}.x")),
        ("another consumer", forge(header, with("sub", json!("subB")), parts[2])),
        ("another topic", forge(header, with("topic", json!("edge/relnotif/Sub2")), parts[2])),
        ("another tenant", forge(header, with("topic", json!("other/relnotif/Sub1")), parts[2])),
        ("a longer life", forge(header, with("exp", json!(now() + 1_000_000)), parts[2])),
        ("alg none", forge(r#"{"alg":"none"}"#, claims(&genuine), "")),
        ("alg none, signed", forge(r#"{"alg":"none"}"#, claims(&genuine), parts[2])),
        ("another algorithm", forge(r#"{"alg":"HS512"}"#, claims(&genuine), parts[2])),
        ("no signature", format!("{}.{}.", parts[0], parts[1])),
        ("another key", signed(&[7; 32], now(), now() + 60)),
        ("expired", mint(&gateway, now() - 120, now() - 60)),
        ("10 kB", "a".repeat(10_000)),
    ] {
        let status = handshake(&gateway, &token).await;
        assert_eq!(status, "HTTP/1.1 401 Unauthorized", "{what}");
    }
    assert_eq!(upgrade(gateway.addr, "/notification2/consumer/").await, "HTTP/1.1 401 Unauthorized");
    // The refusals are JSON like every other.
    gateway.get("/notification2/consumer/?token=x").anonymous().await.error(401, "");
    assert!(handshake(&gateway, &genuine).await.starts_with("HTTP/1.1 101 "));
}

// Seed 001, "Consumer protocol": the path ends with a slash; seed 000, "Shared consumer tokens", writes it without.
#[tokio::test]
async fn the_path_may_lack_its_slash_and_other_parameters_and_headers_do_not_matter() {
    let gateway = Gateway::start().await;
    for (number, path) in [
        "/notification2/consumer?token=TOKEN",
        "/notification2/consumer/?token=TOKEN",
        "/notification2/consumer/?consumer=me&token=TOKEN&x=1",
    ]
    .into_iter()
    .enumerate()
    {
        let token = gateway.token("Sub1", &format!("sub{number}")).await;
        let status = upgrade(gateway.addr, &path.replace("TOKEN", &token)).await;
        assert!(status.starts_with("HTTP/1.1 101 "), "{path}: {status}");
    }
    let encoded = gateway.token("Sub1", "encoded").await.replace('.', "%2E");
    assert!(handshake(&gateway, &encoded).await.starts_with("HTTP/1.1 101 "));
    // Not an upgrade: a client's mistake, and no hold on the consumer.
    let token = gateway.token("Sub1", "plain").await;
    let plain = gateway.get(&format!("/notification2/consumer/?token={token}")).anonymous().await;
    assert!((400..500).contains(&plain.status), "{}", plain.status);
    gateway.consumer_with(&token).await.unwrap();
}

// Seed 000, "Token expiration". Cumulocity-IoT/cumulocity-dynamic-mapper#471: it ends no connection, and each new one is 401.
#[tokio::test]
async fn expiry_ends_no_connection_and_blocks_every_new_one() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let expires = now() + 3;
    let token = mint(&gateway, now(), expires);
    let mut consumer = gateway.consumer_with(&token).await.unwrap();
    eventually("the token expires", async || (now() > expires).then_some(())).await;

    gateway.measure(&device, "t", 1).await;
    assert_eq!(value_of(&consumer.receive().await.json()), 1);
    for _ in 0..3 {
        assert_eq!(handshake(&gateway, &token).await, "HTTP/1.1 401 Unauthorized");
    }
    gateway.measure(&device, "t", 2).await;
    let unseen = consumer.next().await;
    consumer.close().await;
    assert_eq!(handshake(&gateway, &token).await, "HTTP/1.1 401 Unauthorized");
    let mut consumer = gateway.reconnect("Sub1", "subA").await;
    assert_eq!(consumer.next().await.body, unseen.body, "a new token, and the backlog");
}

// Seed 000, "Consumer lifecycle". c8y_api and pyc8y expect 200 `{"result":"DONE"}`, and take a 5xx, and nothing else, for a
// consumer that was unsubscribed before.
#[tokio::test]
async fn unsubscribing_ends_the_consumer_and_its_backlog_and_nothing_else() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let token = gateway.token("Sub1", "subA").await;
    let refused = gateway.unsubscribe(&token).await;
    let status = refused.status;
    assert!(status >= 500, "never connected: {status}");
    refused.error(status, "subA");

    let mut consumer = gateway.consumer_with(&token).await.unwrap();
    let mut other = gateway.consumer("Sub1", "subB").await;
    gateway.measure(&device, "t", 1).await;
    consumer.next().await;
    assert_eq!(gateway.unsubscribe(&token).await.expect(200).json(), json!({"result": "DONE"}));
    assert_eq!(consumer.closed().await, Some(1000), "a live connection is closed");
    assert!(gateway.unsubscribe(&token).await.status >= 500, "gone already");
    assert_eq!(gateway.get("/notification2/subscriptions").await.json()["subscriptions"].as_array().unwrap().len(), 1);

    // It starts anew with what comes after it connects again; the other one has lost nothing.
    gateway.measure(&device, "t", 2).await;
    let mut anew = gateway.consumer_with(&token).await.unwrap();
    gateway.measure(&device, "t", 3).await;
    assert_eq!(value_of(&anew.next().await.json()), 3);
    for value in 1..=3 {
        assert_eq!(value_of(&other.next().await.json()), value);
    }
}

#[tokio::test]
async fn an_expired_token_still_unsubscribes_and_a_forged_one_does_not() {
    let gateway = Gateway::start().await;
    let genuine = gateway.token("Sub1", "subA").await;
    let mut consumer = gateway.consumer_with(&genuine).await.unwrap();
    gateway.unsubscribe(&signed(&[7; 32], now(), now() + 60)).await.error(401, "");
    gateway.unsubscribe(&signed(&[7; 32], now() - 120, now() - 60)).await.error(401, "");
    gateway.unsubscribe("").await.error(401, "");
    gateway.call("POST", "/notification2/unsubscribe").await.error(401, "");
    assert!(consumer.is_silent_for(Duration::from_millis(100)).await, "still connected");

    let expired = mint(&gateway, now() - 120, now() - 60);
    // Bodies do not matter: clients send `{}`, empty text, or nothing.
    let call = gateway.call("POST", &format!("/notification2/unsubscribe?token={expired}"));
    call.body("text/plain", "").await.expect(200);
    assert_eq!(consumer.closed().await, Some(1000));
}
