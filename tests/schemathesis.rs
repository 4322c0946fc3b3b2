//! schemathesis (PyPI) makes requests of the OpenAPI document, fitting ones and others, and compares every answer with it.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::{Gateway, PASSWORD, Program, USER, measurement};

/// Objects of each kind that are there to be read, changed and deleted.
const OBJECTS: usize = 20;
/// How long one run may take, in seconds: a guard for a machine that is busy, not a measure of the work.
const MOST_SECONDS: u64 = 600;

/// A gateway with objects of every kind, and the settings that tell schemathesis their ids.
async fn stage() -> (Gateway, String) {
    let gateway = Gateway::start().await;
    let mut kinds: Vec<(&str, Vec<String>)> = vec![
        ("/inventory/managedObjects", Vec::new()),
        ("/measurement/measurements", Vec::new()),
        ("/event/events", Vec::new()),
        ("/alarm/alarms", Vec::new()),
        ("/devicecontrol/operations", Vec::new()),
        ("/notification2/subscriptions", Vec::new()),
        ("/user/{tenant}/users", Vec::new()),
        ("/tidegate/v1/consumers", Vec::new()),
    ];
    for at in 0..OBJECTS {
        let device = gateway.device(&format!("pump{at}")).await;
        let (first, objects) = (kinds[0].1.first().cloned(), "/inventory/managedObjects");
        if let Some(first) = first {
            let link = json!({"managedObject": {"id": device}});
            for children in ["childDevices", "childAssets", "childAdditions"] {
                gateway.post(&format!("{objects}/{first}/{children}"), &link).await.expect(201);
            }
        }
        kinds[0].1.push(device.clone());
        let mut object = measurement(&device, "t", 1);
        object["text"] = json!("hot");
        object["severity"] = json!("MAJOR");
        object["deviceId"] = json!(device);
        for (path, ids) in &mut kinds[1..5] {
            let made = gateway.post(path, &object).await.expect(201).json();
            ids.push(made["id"].as_str().unwrap().to_owned());
        }
        let filter = json!({"apis": ["*"], "typeFilter": "'t' or 'u'"});
        let wanted =
            json!({"context": "mo", "source": {"id": device}, "subscription": "Sub", "subscriptionFilter": filter});
        kinds[5].1.push(gateway.subscribe(&wanted).await["id"].as_str().unwrap().to_owned());
        let user = format!("ann{at}");
        gateway.add_user("edge", &user, "*").await;
        let external = json!({"type": "serial", "externalId": user});
        gateway.post(&format!("/identity/globalIds/{device}/externalIds"), &external).await.expect(201);
        let push = json!({"uri": "https://endpoint.invalid/"});
        let wanted = json!({"subscription": "Pushed", "subscriber": user, "push": push});
        let made = gateway.post(kinds[7].0, &wanted).await.expect(201).json();
        kinds[7].1.push(made["id"].as_str().unwrap().to_owned());
        kinds[6].1.push(user);
    }
    // What subscriptions forward is kept for this one.
    gateway.consumer("Sub", "subA").await.close().await;
    gateway.tenant("quiet").await;
    let settings = settings(&kinds);
    (gateway, settings)
}

fn settings(kinds: &[(&str, Vec<String>)]) -> String {
    let mut settings = r#"
        [generation]
        # Unknown parameters are ignored, but for requests that select; and who is let in has tests of its own.
        allow-extra-parameters = false
        with-security-parameters = false
        database = "none"

        [parameters]
        "path.tenant" = "edge"
    "#
    .to_owned();
    for name in
        ["path.child", "query.source", "query.deviceId", "body.source.id", "body.deviceId", "body.managedObject.id"]
    {
        settings += &format!("{name:?} = {{ dictionary = \"kind0\", probability = 0.8 }}\n");
    }
    for (at, (_, ids)) in kinds.iter().enumerate() {
        settings += &format!("[dictionaries.kind{at}]\nvalues = {}\n", json!(ids));
    }
    for (at, (path, _)) in kinds.iter().enumerate() {
        settings += &format!(
            "[[operations]]\ninclude-path = \"{path}/{{id}}\"\n\
             parameters.\"path.id\" = {{ dictionary = \"kind{at}\", probability = 0.8 }}\n"
        );
    }
    settings += r#"
        [[operations]]
        include-path-regex = "^/(inventory|identity)/.*/\\{id\\}/[a-zA-Z]+$"
        parameters."path.id" = { dictionary = "kind0", probability = 0.8 }

        [[operations]]
        include-path = "/identity/externalIds/{type}/{externalId}"
        parameters."path.type" = "serial"
        parameters."path.externalId" = { dictionary = "kind6", probability = 0.8 }

        # A quota of a byte would refuse the requests of others.
        [[operations]]
        include-path = "/tidegate/v1/tenants/{tenant}/backlog"
        parameters."path.tenant" = "quiet"

        # An unknown consumer.
        [[operations]]
        include-path = "/notification2/unsubscribe"
        checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 500]
    "#;
    let parent = &kinds[0].1[0];
    settings + &format!("[[operations]]\ninclude-path-regex = \"child.$\"\nparameters.\"path.id\" = {parent:?}\n")
}

/// One run, which has to find nothing.
async fn run(gateway: &Gateway, settings: &str, name: &str, arguments: &[&str]) {
    let python = std::env::var_os("TIDEGATE_PYTHON").expect("TIDEGATE_PYTHON names a Python that has schemathesis");
    std::fs::write(gateway.path("schemathesis.toml"), settings).unwrap();
    let mut command = Command::new(Path::new(&python).with_file_name("schemathesis"));
    command.args(["--no-color", "--config-file", "schemathesis.toml", "run"]);
    command.args([&format!("http://{}/openapi.json", gateway.addr), "--auth", &format!("{USER}:{PASSWORD}")]);
    command.args(["--seed", "20260301", "-n", "10", "--no-shrink", "--continue-on-failure", "--warnings", "off"]);
    // Names that make another path are left out, and so many are drawn in vain.
    command.args(["--suppress-health-check", "filter_too_much"]);
    // The first script has its interpreter compiled, which an unoptimised gateway takes long for.
    command.args(["--request-timeout", "120"]);
    command.args(["--phases", "coverage,fuzzing", "--exclude-checks"]);
    // These compare several answers, or judge by what a schema cannot say.
    command.arg(
        "positive_data_acceptance,ensure_resource_availability,use_after_free,ignored_auth,object_level_authorization",
    );
    command.args(arguments);
    let hooks = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/peers/schemathesis_hooks.py");
    let hooks = hooks.to_str().unwrap().to_owned();
    let environment = [("NO_PROXY".to_owned(), "*".to_owned()), ("SCHEMATHESIS_HOOKS".to_owned(), hooks)];
    let mut program = Program::spawn_command(command, &environment, &gateway.path("."), name);
    let ended = async {
        loop {
            if let Some(status) = program.exited() {
                return status;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    let ended = tokio::time::timeout(std::time::Duration::from_secs(MOST_SECONDS), ended).await;
    let said = program.stdout();
    let status = ended.unwrap_or_else(|_| panic!("schemathesis took too long:\n{said}"));
    assert!(status.success(), "{status}:\n{said}\n{}", program.stderr());
    assert!(said.contains("No issues found"), "{said}");
}

#[tokio::test]
async fn schemathesis_finds_no_difference_between_the_document_and_the_gateway() {
    let (gateway, settings) = stage().await;
    // Deletion comes last, so that there is something to delete.
    run(&gateway, &settings, "others", &["--exclude-method", "DELETE"]).await;
    run(&gateway, &settings, "deletion", &["--include-method", "DELETE"]).await;
    let live: Value = gateway.get("/tenant/currentTenant").await.expect(200).json();
    assert_eq!(live["name"], "edge", "the gateway is there, and its administrator with the password");
}
