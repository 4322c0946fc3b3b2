//! The OpenAPI document, held against the gateway that serves it. What the router knows of paths is compared beside the code;
//! schemathesis, in the tests with peers, looks for what fits neither.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::harness::{Answer, Call, Gateway, PASSWORD, measurement};

/// One operation of the document.
struct Operation {
    method: String,
    /// Its path; every parameter is 999.
    path: String,
    /// The operation itself, with the parameters of its path.
    value: Value,
}

/// What a reference in the document points to; anything else is itself.
fn followed<'d>(document: &'d Value, value: &'d Value) -> &'d Value {
    let Some(reference) = value.get("$ref") else { return value };
    document.pointer(reference.as_str().unwrap().strip_prefix('#').unwrap()).unwrap()
}

/// Every operation, with its parameters in place of the references to them.
fn operations(document: &Value) -> Vec<Operation> {
    let mut operations = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let item = followed(document, item).as_object().unwrap();
        let path = path.split('/').map(|segment| match segment {
            // Nobody may manage the users of another tenant.
            "{tenant}" => "edge",
            _ if segment.starts_with('{') => "999",
            _ => segment,
        });
        let path = path.collect::<Vec<_>>().join("/");
        for (method, operation) in item.iter().filter(|(name, _)| *name != "parameters") {
            let mut value = operation.clone();
            let parameters = [item.get("parameters"), operation.get("parameters")].into_iter().flatten();
            let parameters = parameters.flat_map(|list| list.as_array().unwrap());
            value["parameters"] = parameters.map(|parameter| followed(document, parameter).clone()).collect();
            operations.push(Operation { method: method.to_ascii_uppercase(), path: path.clone(), value });
        }
    }
    operations
}

impl Operation {
    fn has(&self, parameter: &str) -> bool {
        self.value["parameters"].as_array().unwrap().iter().any(|one| one["name"] == parameter)
    }

    fn answers(&self, status: u16) -> bool {
        self.value["responses"].get(status.to_string()).is_some()
    }

    /// The roles that let a user in; `None` for what takes no Basic credentials.
    fn roles(&self) -> Option<Vec<&str>> {
        let basic: Vec<_> = self.value["security"].as_array()?.iter().filter_map(|way| way.get("basic")).collect();
        let roles = basic.iter().flat_map(|roles| roles.as_array().unwrap()).map(|role| role.as_str().unwrap());
        (!basic.is_empty()).then(|| roles.collect())
    }

    /// A request with `query`, and with a body that is none where there has to be one.
    fn call(&self, gateway: &Gateway, query: &str) -> Call {
        // What changes all that it selects asks for a parameter.
        let select = if self.has("revert") { "revert=false&" } else { "" };
        let call = gateway.call(&self.method, &format!("{}?{select}{query}", self.path));
        let call = call.header("Accept", "application/json");
        if self.value.get("requestBody").is_some() { call.body(self.media_type(), "[]") } else { call }
    }

    /// That of the body.
    fn media_type(&self) -> &str {
        self.value["requestBody"]["content"].as_object().unwrap().keys().next().unwrap()
    }

    /// The answer has to be a documented one. Errors have the one form, but for those of the text endpoints.
    #[track_caller]
    fn check(&self, document: &Value, answer: Answer) -> u16 {
        let status = answer.status;
        assert!(self.answers(status), "{} {}: {status} is not documented: {}", self.method, self.path, answer.text());
        if status >= 400 {
            let known = &document["components"]["schemas"]["Error"]["properties"]["error"]["enum"];
            let error = answer.json()["error"].clone();
            assert!(known.as_array().unwrap().contains(&error), "{} {}: {error}", self.method, self.path);
            answer.error(status, "");
        }
        status
    }
}

async fn document(gateway: &Gateway) -> Value {
    let answer = gateway.get("/openapi.json").anonymous().await.expect(200);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    answer.json()
}

#[tokio::test]
async fn the_document_is_served_to_anybody_and_names_the_gateway_as_it_was_reached() {
    let gateway = Gateway::start().await;
    let served = document(&gateway).await;
    assert_eq!(served["openapi"], "3.1.0");
    assert_eq!(served["servers"][0]["url"], format!("http://{}", gateway.addr));
    let gateway = Gateway::with("[http]\npublic_url = 'https://site.example/edge1/'\n").await;
    assert_eq!(document(&gateway).await["servers"][0]["url"], "https://site.example/edge1");
}

#[tokio::test]
async fn methods_that_are_not_documented_are_405_and_name_those_that_are() {
    let gateway = Gateway::start().await;
    let document = document(&gateway).await;
    let operations = operations(&document);
    let paths: BTreeSet<_> = operations.iter().map(|operation| &operation.path).collect();
    assert!(paths.len() > 40, "{paths:?}");
    for path in paths {
        let of_path = operations.iter().filter(|operation| &operation.path == path);
        let documented: BTreeSet<_> = of_path.map(|operation| operation.method.as_str()).collect();
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"] {
            if documented.contains(method) {
                continue;
            }
            let answer = gateway.call(method, path).await;
            let allowed: Vec<_> = answer.header("allow").unwrap_or_default().split(", ").map(str::to_owned).collect();
            answer.error(405, "not allowed here");
            assert_eq!(allowed.iter().map(String::as_str).collect::<BTreeSet<_>>(), documented, "{method} {path}");
            assert_eq!(allowed.len(), documented.len(), "{method} {path}: {allowed:?}");
        }
        let head = gateway.call("HEAD", path).await;
        assert_eq!(head.status == 405, !documented.contains("GET"), "HEAD {path}: {}", head.status);
        assert!(head.body.is_empty());
    }
    for path in ["/", "/openapi", "/alarm/alarms/1/2", "/inventory/managedObjects/1/childDevices/2/3"] {
        gateway.get(path).await.error(404, "nothing at this path");
    }
}

#[tokio::test]
async fn every_operation_lets_in_exactly_the_documented_roles() {
    let gateway = Gateway::start().await;
    let document = document(&gateway).await;
    let all = gateway.get("/user/roles").await.expect(200).json();
    let all: Vec<_> = all["roles"].as_array().unwrap().iter().map(|role| role["id"].as_str().unwrap()).collect();
    for role in &all {
        gateway.add_user("edge", role, role).await;
    }
    for operation in operations(&document) {
        let anonymous = operation.check(&document, operation.call(&gateway, "").anonymous().await);
        let Some(roles) = operation.roles() else {
            // A token is asked for instead, or nothing at all.
            let takes_token = operation.value["security"][0].get("consumer").is_some();
            assert_eq!(anonymous == 401, takes_token, "{} {}", operation.method, operation.path);
            continue;
        };
        assert_eq!(anonymous, 401, "{} {}", operation.method, operation.path);
        assert!(roles.iter().all(|role| all.contains(role)), "{roles:?}");
        for role in &all {
            let call = operation.call(&gateway, "").user(&format!("edge/{role}"), PASSWORD);
            let refused = operation.check(&document, call.await) == 403;
            let expected = !roles.is_empty() && !roles.contains(role);
            assert_eq!(refused, expected, "{} {} as {role}", operation.method, operation.path);
        }
    }
}

#[tokio::test]
async fn documented_errors_come_where_they_are_documented() {
    let limits = "[limits]\nbody_bytes = 4096\nbulk_bytes = 4096\n[plugins]\nmax_bytes = 65536\n";
    let gateway = Gateway::with(limits).await;
    let document = document(&gateway).await;
    let large = format!("{{\"x\":\"{}\"}}", "x".repeat(70_000));
    let mut provoked = 0;
    let mut expect = async |operation: &Operation, call: Call, status: u16| {
        assert_eq!(operation.check(&document, call.await), status, "{} {}", operation.method, operation.path);
        provoked += 1;
    };
    for operation in operations(&document).iter().filter(|operation| operation.roles().is_some()) {
        if operation.value.get("requestBody").is_some() {
            // Parameters are looked at before the body.
            let query = if operation.has("name") { "name=x" } else { "" };
            let call = operation.call(&gateway, query).body(operation.media_type(), large.clone());
            expect(operation, call, 413).await;
            let call = operation.call(&gateway, query).header("Content-Encoding", "gzip");
            expect(operation, call, 415).await;
        } else if operation.path.contains("999") && operation.answers(404) {
            expect(operation, operation.call(&gateway, ""), 404).await;
        }
        if operation.has("pageSize") && !operation.path.contains("999") {
            expect(operation, operation.call(&gateway, "pageSize=0"), 422).await;
        }
        if operation.has("X-Cumulocity-Processing-Mode") {
            let call = operation.call(&gateway, "").header("X-Cumulocity-Processing-Mode", "EAGER");
            expect(operation, call, 422).await;
        }
        if operation.method != "GET" {
            let call = operation.call(&gateway, "").header("Origin", "https://elsewhere.example");
            expect(operation, call, 403).await;
        }
    }
    assert!(provoked > 100, "{provoked}");
}

// The document has one form for ids.
#[tokio::test]
async fn ids_in_bodies_are_read_as_the_document_says() {
    let gateway = Gateway::start().await;
    let device = gateway.device("pump").await;
    for (id, status) in [
        (json!(device), 201),
        (json!(device.parse::<u64>().unwrap()), 201),
        (json!(format!("+{device}")), 422),
        (json!(format!(" {device}")), 422),
        (json!(-1), 422),
        (json!(9_223_372_036_854_775_808_u64), 422),
    ] {
        let subscription =
            json!({"context": "mo", "source": {"id": id}, "subscription": format!("Sub{}", id.is_string())});
        let mut object = measurement(&device, "t", 1);
        (object["text"], object["severity"]) = (json!("hot"), json!("MAJOR"));
        (object["source"]["id"], object["deviceId"]) = (id.clone(), id.clone());
        for (path, body) in [
            ("/notification2/subscriptions", &subscription),
            ("/measurement/measurements", &object),
            ("/event/events", &object),
            ("/alarm/alarms", &object),
            ("/devicecontrol/operations", &object),
        ] {
            let answer = gateway.post(path, body).await;
            if status == 422 { drop(answer.error(422, "d: must be ")) } else { drop(answer.expect(status)) }
        }
    }
}
