//! Users: what they may be, and that every change takes effect at once.

use serde_json::{Value, json};

use crate::harness::{Gateway, PASSWORD, USER};

const USERS: &str = "/user/edge/users";

fn role_ids(user: &Value) -> Vec<&str> {
    user["roles"]["references"].as_array().unwrap().iter().map(|role| role["role"]["id"].as_str().unwrap()).collect()
}

fn names(list: &Value) -> Vec<&str> {
    list["users"].as_array().unwrap().iter().map(|user| user["userName"].as_str().unwrap()).collect()
}

// Cumulocity OpenAPI, "Users": 201 with the location, 200, 204, 404, 409, 422.
#[tokio::test]
async fn a_user_is_made_read_changed_and_removed() {
    let gateway = Gateway::start().await;
    let ann = json!({
        "userName": "ann@plant", "password": "correct horse", "email": "ann@plant.example", "firstName": "Ann",
        "enabled": true, "roles": ["ROLE_INVENTORY_READ"],
    });
    let media = "application/vnd.com.nsn.cumulocity.user+json";
    let answer = gateway.post(USERS, &ann).header("Accept", media).await.expect(201);
    let link = format!("http://{}/user/edge/users/ann%40plant", gateway.addr);
    assert_eq!(answer.header("location"), Some(link.as_str()));
    let made = answer.json();
    assert_eq!(
        (&made["self"], &made["id"], &made["email"]),
        (&json!(link), &json!("ann@plant"), &json!("ann@plant.example"))
    );
    assert_eq!(role_ids(&made), ["ROLE_INVENTORY_READ"]);
    assert!(!made.to_string().contains("horse") && !made.to_string().contains("argon2"), "{made}");

    let path = "/user/edge/users/ann%40plant";
    assert_eq!(gateway.get(path).await.expect(200).json(), made);
    assert_eq!(gateway.get("/user/edge/userByName/ann%40plant").await.expect(200).json(), made);
    gateway.get("/inventory/managedObjects/1").user("edge/ann@plant", "correct horse").await.error(404, "");

    // What was read can be sent back with a change.
    let mut changed = made.clone();
    changed["lastName"] = json!("Bee");
    changed["firstName"] = json!("");
    let changed = gateway.put(path, &changed).await.expect(200).json();
    assert_eq!((&changed["lastName"], &changed["firstName"]), (&json!("Bee"), &Value::Null));
    assert_eq!(role_ids(&changed), ["ROLE_INVENTORY_READ"]);

    gateway.delete(path).await.expect(204);
    for call in [gateway.get(path), gateway.delete(path), gateway.put(path, &json!({"phone": "2"}))] {
        call.await.error(404, "no such user");
    }
    gateway.get("/notification2").user("edge/ann@plant", "correct horse").await.error(401, "");
}

#[tokio::test]
async fn changes_take_effect_at_once_and_survive_a_restart() {
    let mut gateway = Gateway::start().await;
    gateway.add_user("edge", "ann", "ROLE_INVENTORY_READ").await;
    let ask = |password: &'static str| gateway.get("/inventory/managedObjects/1").user("edge/ann", password);
    ask(PASSWORD).await.error(404, "");
    ask("another horse").await.error(401, "");

    gateway.put("/user/edge/users/ann", &json!({"roles": []})).await.expect(200);
    ask(PASSWORD).await.error(403, "");
    gateway.put("/user/edge/users/ann", &json!({"roles": ["ROLE_INVENTORY_READ"]})).await.expect(200);
    ask(PASSWORD).await.error(404, "");
    gateway.put("/user/edge/users/ann", &json!({"password": "another horse"})).await.expect(200);
    ask(PASSWORD).await.error(401, "");
    ask("another horse").await.error(404, "");

    // Everybody may change their own password and profile, and nothing else.
    let own = |body: Value| gateway.put("/user/currentUser", &body).user("edge/ann", "another horse");
    own(json!({"roles": ["ROLE_INVENTORY_ADMIN"]})).await.error(422, "roles");
    own(json!({"userName": "bob"})).await.error(422, "userName");
    let changed = own(json!({"password": "a third horse", "email": "a@b"})).await.expect(200).json();
    assert_eq!(changed["email"], "a@b");
    ask("another horse").await.error(401, "");
    ask("a third horse").await.error(404, "");

    gateway.restart().await;
    let ask = |password: &'static str| gateway.get("/user/currentUser").user("edge/ann", password);
    assert_eq!(ask("a third horse").await.expect(200).json()["email"], "a@b");
    ask(PASSWORD).await.error(401, "");
}

#[tokio::test]
async fn what_a_user_cannot_be_is_refused_by_name() {
    let gateway = Gateway::start().await;
    let good = json!({"userName": "ann", "password": "correct horse"});
    for (member, value, said) in [
        ("userName", json!(null), "Following mandatory fields should be included: userName"),
        ("password", json!(null), "Following mandatory fields should be included: password"),
        ("userName", json!("a/b"), "userName"),
        ("userName", json!("x".repeat(256)), "userName"),
        ("userName", json!(".."), "userName"),
        ("password", json!("1234567"), "at least 8 characters"),
        ("password", json!("x".repeat(257)), "at most 256 bytes"),
        ("roles", json!(["ROLE_KING"]), "ROLE_KING"),
        ("roles", json!("ROLE_ALARM_READ"), "roles"),
        ("enabled", json!(false), "enabled"),
        ("pasword", json!("x"), "pasword: is not a known member"),
        ("email", json!(5), "email"),
    ] {
        let mut body = good.clone();
        body[member] = value;
        gateway.post(USERS, &body).await.error(422, said);
    }
    gateway.post(USERS, &good).await.expect(201);
    gateway.post(USERS, &good).await.error(409, "exists already");
    gateway.put("/user/edge/users/ann", &json!({"userName": "bob"})).await.error(422, "userName");
    gateway.call("POST", USERS).body("application/json", "{").await.error(422, "");
    gateway.call("PATCH", USERS).await.error(405, "GET, POST");
    // Bad UTF-8 in a path.
    gateway.get("/user/edge/users/%ff").await.error(400, "path");
}

#[tokio::test]
async fn the_list_is_paged_and_the_number_of_users_limited() {
    let gateway = Gateway::with("[limits]\nusers_per_tenant = 4\n").await;
    for name in ["cat", "ann", "bob"] {
        gateway.add_user("edge", name, "").await;
    }
    gateway
        .post(USERS, &json!({"userName": "dan", "password": PASSWORD}))
        .await
        .error(422, "at most 4 users in a tenant (limits.users_per_tenant)");
    let first = gateway.get(&format!("{USERS}?pageSize=3&withTotalPages=true")).await.expect(200).json();
    assert_eq!(names(&first), ["admin", "ann", "bob"]);
    assert_eq!(first["statistics"], json!({"currentPage": 1, "pageSize": 3, "totalPages": 2}));
    let next = first["next"].as_str().unwrap().strip_prefix(&format!("http://{}", gateway.addr)).unwrap();
    let second = gateway.get(next).await.expect(200).json();
    assert_eq!((names(&second), &second["next"]), (vec!["cat"], &Value::Null));
    assert_eq!(names(&gateway.get(&format!("{USERS}?currentPage=9")).await.expect(200).json()), [""; 0]);
    gateway.get(&format!("{USERS}?pageSize=2001")).await.error(422, "pageSize");
    // Another tenant has a count of its own.
    gateway.add_user("plant1", "dan", "").await;
}

#[tokio::test]
async fn the_last_administrator_stays() {
    let gateway = Gateway::start().await;
    let admin = "/user/edge/users/admin";
    gateway.delete(admin).await.error(422, "ROLE_USER_MANAGEMENT_ADMIN");
    gateway.put(admin, &json!({"roles": ["ROLE_ALARM_READ"]})).await.error(422, "ROLE_USER_MANAGEMENT_ADMIN");
    gateway.get(USERS).await.expect(200);
    gateway.put(admin, &json!({"email": "still@there"})).await.expect(200);
    gateway.add_user("edge", "ann", "ROLE_USER_MANAGEMENT_ADMIN").await;
    gateway.delete(admin).await.expect(204);
    gateway.get(USERS).await.error(401, "");
    gateway.delete("/user/edge/users/ann").user("edge/ann", PASSWORD).await.error(422, "ROLE_USER_MANAGEMENT_ADMIN");
}

// Two changes at a time must not both see the other as the one that stays.
#[tokio::test]
async fn two_administrators_cannot_remove_each_other_at_once() {
    let gateway = Gateway::start().await;
    gateway.add_user("edge", "ann", "ROLE_USER_MANAGEMENT_ADMIN").await;
    let (one, other) = futures_util::join!(
        gateway.delete("/user/edge/users/ann").into_future(),
        gateway.delete("/user/edge/users/admin").user("edge/ann", PASSWORD).into_future(),
    );
    let mut statuses = [one.status, other.status];
    statuses.sort_unstable();
    assert!(matches!(statuses, [204, 401 | 422]), "{statuses:?}");
}

#[tokio::test]
async fn users_of_other_tenants_are_out_of_reach() {
    let gateway = Gateway::start().await;
    let keeper = gateway.tenant("plant1").await;
    gateway.get("/user/plant1/users").await.error(403, "");
    gateway.get(USERS).user(&keeper, PASSWORD).await.error(403, "");
    gateway.post(USERS, &json!({"userName": "x", "password": PASSWORD})).user(&keeper, PASSWORD).await.error(403, "");
    gateway.delete("/user/edge/users/admin").user(&keeper, PASSWORD).await.error(403, "");
    gateway.get("/user/elsewhere/users").await.error(403, "");
    // Roles over the whole gateway exist in its own tenant only.
    for role in ["ROLE_TENANT_MANAGEMENT_ADMIN", "ROLE_TIDEGATE_OPERATOR", "ROLE_TIDEGATE_STREAM_ADMIN"] {
        let boss = json!({"userName": "boss", "password": PASSWORD, "roles": [role]});
        gateway.post("/user/plant1/users", &boss).user(&keeper, PASSWORD).await.error(422, role);
        let known = gateway.get("/user/roles").user(&keeper, PASSWORD).await.expect(200).text();
        assert!(!known.contains(role), "{known}");
    }
    gateway.get("/metrics").user(&keeper, PASSWORD).await.error(403, "");
}

/// Runs `tidegate user` and returns whether it succeeded and what it printed.
async fn run(gateway: &Gateway, arguments: &[&str], env: &[(&str, &str)], name: &str) -> (bool, String, String) {
    gateway.command(&[&["user"], arguments].concat(), env, name).await
}

// It opens the data directory, or does the same over REST; a locked directory says so.
#[tokio::test]
async fn the_command_works_on_the_directory_and_over_rest() {
    let mut gateway = Gateway::start().await;
    let url = format!("http://{}", gateway.addr);
    let rest = [("TIDEGATE_URL", url.as_str()), ("TIDEGATE_USER", USER), ("TIDEGATE_PASSWORD", PASSWORD)];
    let given = [("TIDEGATE_NEW_PASSWORD", "correct horse")];
    let data = gateway.data().to_str().unwrap().to_owned();

    let (done, _, said) = run(&gateway, &["--data", &data, "list"], &rest, "locked").await;
    assert!(!done && said.contains("the gateway is running, use --url"), "{said}");
    let (done, out, said) =
        run(&gateway, &["add", "ann", "--roles", "ROLE_ALARM_READ,ROLE_EVENT_READ"], &rest, "add").await;
    assert!(done, "{said}");
    let made = out.split_once(" is ").unwrap().1.split(' ').next().unwrap().to_owned();
    gateway.get("/user/currentUser").user("edge/ann", &made).await.expect(200);
    let (done, out, said) = run(&gateway, &["password", "ann"], &[&rest[..], &given].concat(), "password").await;
    assert!(done && out.is_empty(), "{out}{said}");
    gateway.get("/user/currentUser").user("edge/ann", "correct horse").await.expect(200);
    let (done, _, said) = run(&gateway, &["add", "ann"], &rest, "twice").await;
    assert!(!done && said.contains("exists already"), "{said}");

    gateway.stop().await;
    let (done, _, said) = run(&gateway, &["--data", &data, "add", "bob", "--roles", "all"], &given, "bob").await;
    assert!(done, "{said}");
    let (done, _, said) =
        run(&gateway, &["--data", &data, "add", "cat"], &[("TIDEGATE_NEW_PASSWORD", "short")], "cat").await;
    assert!(!done && said.contains("at least 8 characters"), "{said}");
    let (done, _, said) =
        run(&gateway, &["--data", &data, "--tenant", "nowhere", "add", "cat"], &given, "tenant").await;
    assert!(!done && said.contains("no such tenant"), "{said}");
    let (done, _, said) = run(&gateway, &["--data", &data, "remove", "ann"], &[], "remove").await;
    assert!(done, "{said}");
    let (_, list, _) = run(&gateway, &["--data", &data, "list"], &[], "list").await;
    let lines: Vec<_> = list.lines().map(|line| line.split('\t').next().unwrap()).collect();
    assert_eq!(lines, ["admin", "bob"]);
    let (done, _, said) = run(&gateway, &["--data", "nothing-here", "list"], &[], "nothing").await;
    assert!(!done && said.contains("holds no database") && !gateway.path("nothing-here").exists(), "{said}");

    gateway.restart_process().await;
    gateway.get("/metrics").user("edge/bob", "correct horse").await.expect(200);
    gateway.get("/user/currentUser").user("edge/ann", "correct horse").await.error(401, "");
    let (_, over_rest, _) = run(&gateway, &["list"], &rest, "list_rest").await;
    assert_eq!(over_rest, list);
}
