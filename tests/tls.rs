//! HTTPS and secure WebSockets beside the plain listener, with a private authority.

use std::fs;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::harness::{Authority, Consumer, Gateway, PASSWORD, Program, USER, eventually, exchange, forwarded, in_time};

async fn secure() -> (Authority, Gateway) {
    let authority = Authority::new();
    let gateway = Gateway::with(&authority.config()).await;
    (authority, gateway)
}

/// A request of the administrator over TLS: the head and the JSON of the answer.
async fn request(authority: &Authority, gateway: &Gateway, head: &str, body: &str) -> (String, Value) {
    let addr = gateway.listener("https");
    let credentials = STANDARD.encode(format!("{USER}:{PASSWORD}"));
    let request = format!(
        "{head} HTTP/1.1\r\nHost: {addr}\r\nAuthorization: Basic {credentials}\r\nAccept: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    let answer = exchange(authority.connect(addr, &[]).await.unwrap(), request.as_bytes()).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    (head.to_owned(), serde_json::from_str(body).unwrap_or_else(|error| panic!("{error} in {answer}")))
}

/// Runs `tidegate` with the administrator's credentials at `url`, trusting the authority where `ca` says so.
fn client(gateway: &Gateway, url: &str, ca: Option<&Authority>, name: &str, arguments: &[&str]) -> Program {
    let mut env =
        vec![("TIDEGATE_URL", url.to_owned()), ("TIDEGATE_USER", USER.into()), ("TIDEGATE_PASSWORD", PASSWORD.into())];
    if let Some(authority) = ca {
        env.push(("TIDEGATE_CA", authority.file("ca.pem").to_str().unwrap().to_owned()));
    }
    let env: Vec<_> = env.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Program::spawn(arguments, &env, &gateway.path("."), name)
}

// Seed 001, "Consumer protocol": secure and unsecured WebSockets (reubenmiller/go-c8y#136); with the same token, and a private
// authority.
#[tokio::test]
async fn plain_and_secure_listeners_serve_the_same_token_side_by_side() {
    let (authority, gateway) = secure().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let token = gateway.token("Sub1", "subA").await;
    let addr = gateway.listener("https");
    let secure = async || {
        let stream = authority.connect(addr, &[]).await.unwrap();
        Consumer::over(Box::new(stream), &format!("wss://{addr}/notification2/consumer/?token={token}")).await
    };
    let mut consumer = secure().await.unwrap();
    gateway.measure(&device, "t", 1).await;
    let frame = consumer.receive().await;
    assert_eq!(frame.description, format!("/edge/measurements/{device}"));
    assert_eq!(gateway.consumer_with(&token).await.err(), Some(409), "it is one consumer");
    consumer.close().await;

    let mut consumer = eventually("the place is free", async || gateway.consumer_with(&token).await.ok()).await;
    gateway.measure(&device, "t", 2).await;
    consumer.receive().await;
    consumer.close().await;
    gateway.measure(&device, "t", 3).await;
    let mut consumer = eventually("the place is free", async || secure().await.ok()).await;
    assert_eq!(consumer.receive().await.json()["type"], "t");
}

#[tokio::test]
async fn links_in_answers_over_tls_are_https() {
    let (authority, gateway) = secure().await;
    let addr = gateway.listener("https");
    let (head, created) = request(&authority, &gateway, "POST /inventory/managedObjects", "{\"name\":\"pump\"}").await;
    assert!(head.starts_with("HTTP/1.1 201 "), "{head}");
    let link = format!("https://{addr}/inventory/managedObjects/{}", created["id"].as_str().unwrap());
    assert_eq!(created["self"], link);
    assert!(head.contains(&format!("location: {link}\r\n")), "{head}");
    let plain = gateway.get(link.strip_prefix(&format!("https://{addr}")).unwrap()).await.expect(200).json();
    assert!(plain["self"].as_str().unwrap().starts_with(&format!("http://{}/", gateway.addr)), "{plain}");
}

#[tokio::test]
async fn http_1_1_is_negotiated_and_nothing_else() {
    let (authority, gateway) = secure().await;
    let addr = gateway.listener("https");
    let stream = authority.connect(addr, &[b"h2", b"http/1.1"]).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    assert!(authority.connect(addr, &[b"h2"]).await.is_err());
    assert!(Authority::new().connect(addr, &[]).await.is_err(), "an authority that did not sign it");
    // Plain HTTP on the port of TLS, and a handshake on the plain one: refused, and nobody else suffers.
    let mut socket = TcpStream::connect(addr).await.unwrap();
    socket.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = in_time("the end", socket.read_to_end(&mut answer)).await;
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
    assert!(authority.connect(gateway.addr, &[]).await.is_err());
    request(&authority, &gateway, "GET /notification2", "").await;
    let failed = async || (gateway.metric("tidegate_tls_handshakes_failed_total").await == 3.0).then_some(());
    eventually("they are counted", failed).await;
}

#[tokio::test]
async fn a_handshake_that_does_not_come_is_given_up_and_its_place_is_free() {
    let authority = Authority::new();
    let limits = "[limits]\nconnections = 1\nrequest_seconds = 1\n";
    let gateway = Gateway::with(&format!("{}{limits}", authority.config())).await;
    let mut silent = TcpStream::connect(gateway.listener("https")).await.unwrap();
    // The only place is taken until the handshake is given up; then the next connection gets it.
    let (head, _) = request(&authority, &gateway, "GET /notification2", "").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert_eq!(in_time("the end", silent.read(&mut [0; 16])).await.unwrap_or(0), 0);
    gateway.get("/health/ready").await.expect(200);
}

#[tokio::test]
async fn a_renewed_certificate_is_taken_on_sighup_and_a_broken_one_is_not() {
    let (authority, gateway) = secure().await;
    let addr = gateway.listener("https");
    let shown = async || {
        let stream = authority.connect(addr, &[]).await.unwrap();
        stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
    };
    let first = shown().await;
    authority.issue();
    gateway.signal("HUP");
    eventually("the new certificate", async || (shown().await != first).then_some(())).await;
    let second = shown().await;
    fs::write(authority.file("cert.pem"), "no certificate").unwrap();
    gateway.signal("HUP");
    eventually("the log says so", async || gateway.stderr().contains("the certificate stays as it is").then_some(()))
        .await;
    assert_eq!(shown().await, second);
}

#[tokio::test]
async fn the_client_commands_speak_tls_and_trust_only_what_they_are_told() {
    let (authority, gateway) = secure().await;
    let device = gateway.device("pump").await;
    gateway.subscribe(&forwarded("Sub1", &device)).await;
    let url = format!("https://{}", gateway.listener("https"));
    let listen = ["listen", "--subscription", "Sub1", "--subscriber", "subA", "--count"];
    let connect = [&listen[..], &["0"]].concat();
    let take = [&listen[..], &["1"]].concat();
    assert!(client(&gateway, &url, Some(&authority), "connect", &connect).wait().await.success());
    gateway.measure(&device, "t", 42).await;
    let mut program = client(&gateway, &url, Some(&authority), "take", &take);
    assert!(program.wait().await.success(), "{}", program.stderr());
    assert!(program.stdout().contains("\"value\":42"), "{}", program.stdout());

    for (ca, name) in [(Some(Authority::new()), "foreign"), (None, "system")] {
        let mut program = client(&gateway, &url, ca.as_ref(), name, &connect);
        assert!(!program.wait().await.success());
        let said = program.stderr();
        assert!(said.contains("cannot be trusted") || said.contains("no list of trusted certificates"), "{said}");
    }
    let with_system_list = authority.file("ca.pem").to_str().unwrap().to_owned();
    let env: Vec<_> =
        [("SSL_CERT_FILE", with_system_list.as_str()), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into();
    let arguments = [&connect[..], &["--url", &url]].concat();
    let mut program = Program::spawn(&arguments, &env, &gateway.path("."), "ssl_cert_file");
    assert!(program.wait().await.success(), "{}", program.stderr());
}

#[tokio::test]
async fn what_is_wrong_with_the_files_or_the_addresses_is_said_at_the_start() {
    let (authority, mut gateway) = secure().await;
    gateway.stop().await;
    let other = Authority::new();
    let refused = async |config: &str, http: &str, name: &str| {
        fs::write(gateway.path("config.toml"), config).unwrap();
        let data = gateway.path("elsewhere");
        let config = gateway.path("config.toml");
        let arguments =
            ["serve", "--config", config.to_str().unwrap(), "--data", data.to_str().unwrap(), "--http", http];
        let mut program = Program::spawn(&arguments, &[], &gateway.path("."), name);
        let status = program.wait().await;
        let said = program.stderr();
        assert!(!status.success(), "{said}");
        said
    };
    let mixed = authority
        .config()
        .replace(authority.file("key.pem").to_str().unwrap(), other.file("key.pem").to_str().unwrap());
    let said = refused(&mixed, "127.0.0.1:0", "mixed").await;
    assert!(said.contains("is not the key of the certificate"), "{said}");
    let said = refused(&authority.config().replace("cert.pem", "none.pem"), "127.0.0.1:0", "absent").await;
    assert!(said.contains("http.tls_cert") && said.contains("none.pem"), "{said}");
    let said = refused("[http]\nhttps_addr = '127.0.0.1:0'\n", "127.0.0.1:0", "missing").await;
    assert!(said.contains("http.tls_cert must name a PEM file"), "{said}");
    let said = refused("", "off", "off").await;
    assert!(said.contains("http.addr and http.https_addr are both off"), "{said}");
    let said = refused("", "0.0.0.0:0", "open").await;
    assert!(said.contains("http.allow_plain = true") && said.contains("http.https_addr"), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
}

#[tokio::test]
async fn an_allowed_plain_listener_off_loopback_is_warned_of() {
    let (_authority, mut gateway) = secure().await;
    gateway.stop().await;
    fs::write(gateway.path("config.toml"), "[http]\nallow_plain = true\n").unwrap();
    // An address for documentation, which no machine has: the test opens nothing to the network.
    let (config, data) = (gateway.path("config.toml"), gateway.path("elsewhere"));
    let (config, data) = (config.to_str().unwrap(), data.to_str().unwrap());
    let arguments = ["serve", "--config", config, "--data", data, "--http", "192.0.2.1:8080"];
    let mut program = Program::spawn(&arguments, &[], &gateway.path("."), "open");
    assert!(!program.wait().await.success());
    let said = program.stderr();
    assert!(said.contains("shows passwords and tokens to the network"), "{said}");
    assert!(said.contains("cannot listen on 192.0.2.1:8080"), "{said}");
}

#[tokio::test]
async fn the_plain_listener_may_be_off_and_what_to_paste_is_https_then() {
    let (authority, mut gateway) = secure().await;
    gateway.stop().await;
    let text = |name: &str| gateway.path(name).to_str().unwrap().to_owned();
    let (config, data, ready) = (text("config.toml"), text("elsewhere"), text("elsewhere.json"));
    let arguments = ["serve", "--config", &config, "--data", &data, "--ready-file", &ready, "--http", "off"];
    let program = Program::spawn(&arguments, &[], &gateway.path("."), "closed");
    let ready = eventually("the ready file", async || fs::read(&ready).ok()).await;
    let ready: Value = serde_json::from_slice(&ready).unwrap();
    assert_eq!(ready.get("http"), None, "{ready}");
    let addr = ready["https"].as_str().unwrap();
    let said = program.stdout();
    for expected in [format!("serves https://{addr}"), format!("TIDEGATE_URL=https://{addr}"), "--cacert".to_owned()] {
        assert!(said.contains(&expected), "{expected} is not in {said}");
    }
    let stream = authority.connect(addr.parse().unwrap(), &[]).await.unwrap();
    let answer = exchange(stream, b"GET /health/ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

// A slow peer cannot keep the gateway from stopping.
#[tokio::test]
async fn a_half_open_handshake_does_not_delay_the_stop() {
    let (_authority, mut gateway) = secure().await;
    let _silent = TcpStream::connect(gateway.listener("https")).await.unwrap();
    gateway.get("/health/ready").await.expect(200);
    tokio::time::timeout(Duration::from_secs(20), gateway.stop()).await.expect("it took too long");
}
