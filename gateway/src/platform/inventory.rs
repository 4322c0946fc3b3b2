//! Managed objects: what a client sets (name, type, owner, fragments) and what the gateway adds around it.

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row as _, SqliteExecutor, SqlitePool};

use super::list::id_list;
use super::merge::merge;
use super::object::{member, stored_text};
use super::relation::{Kind, Relation};
use super::{PATH, Sources, check_name, push_decimal, push_self, short_string};
use crate::json::{self, Invalid, Limits, Member, Members};
use crate::message::Tenant;
use crate::store::{Statement, Value};
use crate::time;

/// A managed object as a client sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewManagedObject {
    /// `type`.
    pub kind: Option<Box<str>>,
    /// As in [`ManagedObject`].
    pub body: Bytes,
}

/// A managed object as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagedObject {
    /// Its id.
    pub id: u64,
    /// `type`; it also stands in the body.
    pub kind: Option<Box<str>>,
    /// When it was created, in milliseconds since 1970.
    pub created_ms: i64,
    /// When it was last changed.
    pub updated_ms: i64,
    /// All members that the client set, `name`, `type` and `owner` among them, on one line, in order, without the braces.
    pub body: Bytes,
}

/// Parses the body of a POST; no member is required, and `owner` is the one given here unless the client names another.
///
/// `id`, `self`, the times and the references are the gateway's and are ignored; JSON null is absent.
///
/// # Errors
/// Names the first member that is wrong.
pub fn parse(body: &[u8], owner: &str, limits: &Limits) -> Result<NewManagedObject, Invalid> {
    let members = Members::parse(body, limits)?;
    let (mut text, mut kind, mut has_owner) = (Vec::with_capacity(body.len() + owner.len()), None, false);
    for Member { name, raw } in client_members(&members).filter(|member| !json::is_null(member.raw)) {
        check_member(name, raw)?;
        match &**name {
            "type" => kind = Some(json::string(raw, "type")?.into()),
            "owner" => has_owner = true,
            _ => {}
        }
        json::push_member(name, raw, &mut text);
    }
    if !has_owner {
        json::push_string_member("owner", owner, &mut text);
    }
    Ok(NewManagedObject { kind, body: text.into() })
}

/// The members that are the client's to set. An object always has an owner, so null leaves it.
fn client_members<'m, 'a>(members: &'m Members<'a>) -> impl Iterator<Item = &'m Member<'a>> {
    members.iter().filter(|Member { name, raw }| match &**name {
        "id" | "self" | "creationTime" | "lastUpdated" => false,
        "owner" => !json::is_null(raw),
        name => !Relation::ALL.iter().any(|relation| relation.name() == name),
    })
}

fn check_member(name: &str, raw: &str) -> Result<(), Invalid> {
    match name {
        "name" | "type" | "owner" => short_string(raw, name).map(drop),
        _ => check_name(name),
    }
}

impl NewManagedObject {
    /// The object once it has an id.
    #[must_use]
    pub fn created(self, id: u64, now_ms: i64) -> ManagedObject {
        ManagedObject { id, kind: self.kind, created_ms: now_ms, updated_ms: now_ms, body: self.body }
    }
}

impl ManagedObject {
    /// The object after a PUT with `patch`: its members replace those of the same name in place, null removes, new ones follow.
    ///
    /// `None` is a heartbeat: a patch without any member of the client's, as `{"id":"1"}`, changes nothing. Values are replaced
    /// as a whole, and a patch that repeats the present ones is a change.
    ///
    /// # Errors
    /// Names the member that is wrong; an object that would pass `limits.members` or a body of `max_bytes` is refused.
    pub fn merge(&self, patch: &[u8], now_ms: i64, limits: &Limits, max_bytes: usize) -> Result<Option<Self>, Invalid> {
        let patch = Members::parse(patch, limits)?;
        let changes: Vec<_> = client_members(&patch).collect();
        if changes.is_empty() {
            return Ok(None);
        }
        let body = merge(&self.body, changes.iter().copied(), limits, max_bytes, check_member)?;
        let kind = match changes.iter().find(|member| member.name == "type") {
            Some(member) if json::is_null(member.raw) => None,
            Some(member) => Some(json::string(member.raw, "type")?.into()),
            None => self.kind.clone(),
        };
        Ok(Some(Self { kind, updated_ms: now_ms, body, ..*self }))
    }

    /// `name`, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<Box<str>> {
        stored_text(&self.body, "name")
    }

    /// Appends the object as its notifications tell of it, one line: its references are empty, as on the platform.
    ///
    /// `base_url` has no slash at its end.
    pub fn render(&self, base_url: &str, out: &mut Vec<u8>) {
        self.render_with(base_url, |_, _| {}, out);
    }

    /// Appends the object as clients get it; `references` appends those of a relation, separated by commas.
    pub fn render_with(&self, base_url: &str, references: impl Fn(Relation, &mut Vec<u8>), out: &mut Vec<u8>) {
        const FIXED: usize = 800;
        out.reserve(self.body.len() + 7 * base_url.len() + FIXED);
        out.extend_from_slice(b"{\"id\":\"");
        push_decimal(self.id, out);
        out.extend_from_slice(b"\",");
        push_self(base_url, PATH, self.id, "", out);
        for (name, ms) in [("creationTime", self.created_ms), ("lastUpdated", self.updated_ms)] {
            out.extend_from_slice(b",\"");
            out.extend_from_slice(name.as_bytes());
            out.extend_from_slice(b"\":\"");
            time::write(ms, out);
            out.push(b'"');
        }
        for relation in Relation::ALL {
            out.extend_from_slice(b",\"");
            out.extend_from_slice(relation.name().as_bytes());
            out.extend_from_slice(b"\":{");
            push_self(base_url, PATH, self.id, relation.name(), out);
            out.extend_from_slice(b",\"references\":[");
            references(relation, out);
            out.extend_from_slice(b"]}");
        }
        if !self.body.is_empty() {
            out.push(b',');
            out.extend_from_slice(&self.body);
        }
        out.push(b'}');
    }

    /// Whether it is a group, whose subgroups are deleted with it.
    #[must_use]
    pub fn is_group(&self) -> bool {
        matches!(self.kind.as_deref(), Some("c8y_DeviceGroup" | "c8y_DeviceSubGroup")) || self.has("c8y_IsDeviceGroup")
    }

    /// Whether it is a device.
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.has("c8y_IsDevice")
    }

    fn has(&self, fragment: &str) -> bool {
        member(&self.text(), fragment).is_some()
    }

    /// The body as a JSON object.
    pub(super) fn text(&self) -> String {
        format!("{{{}}}", String::from_utf8_lossy(&self.body))
    }

    /// Reads a row of all columns but the tenant.
    pub(super) fn from_row(row: &SqliteRow) -> sqlx::Result<Self> {
        Ok(Self {
            id: row.try_get::<i64, _>("id")?.cast_unsigned(),
            kind: row.try_get::<Option<String>, _>("type")?.map(Box::from),
            created_ms: row.try_get("created")?,
            updated_ms: row.try_get("updated")?,
            body: row.try_get::<Vec<u8>, _>("body")?.into(),
        })
    }
}

/// Reads one managed object.
///
/// # Errors
/// When the store fails.
pub async fn get(store: impl SqliteExecutor<'_>, tenant: &str, id: u64) -> sqlx::Result<Option<ManagedObject>> {
    let row = sqlx::query("SELECT id, type, created, updated, body FROM managed_object WHERE id = ? AND tenant = ?")
        .bind(id.cast_signed())
        .bind(tenant)
        .fetch_optional(store)
        .await?;
    row.as_ref().map(ManagedObject::from_row).transpose()
}

/// Deletes managed objects and what hangs on them: subscriptions, links, external ids.
#[must_use]
pub fn deletions<'a>(ids: impl IntoIterator<Item = &'a u64>) -> Vec<Statement> {
    let ids = id_list(ids);
    [
        "DELETE FROM managed_object WHERE id IN (SELECT value FROM json_each(?))",
        "DELETE FROM subscription WHERE source IN (SELECT value FROM json_each(?))",
        "DELETE FROM external_id WHERE object IN (SELECT value FROM json_each(?))",
        "DELETE FROM link WHERE parent IN (SELECT value FROM json_each(?))",
        "DELETE FROM link WHERE child IN (SELECT value FROM json_each(?))",
    ]
    .map(|sql| Statement { sql, values: vec![Value::Text(ids.clone())] })
    .into()
}

/// Reads all managed objects into memory, with their names and links.
///
/// # Errors
/// When the store fails.
pub async fn load(store: &SqlitePool) -> sqlx::Result<Sources> {
    let sources = Sources::default();
    let mut rows =
        sqlx::query("SELECT tenant, id, '{' || body || '}' ->> '$.name' FROM managed_object ORDER BY tenant")
            .fetch(store);
    let mut tenant = Tenant::from("");
    while let Some(row) = rows.try_next().await? {
        let name: &str = row.try_get(0)?;
        if tenant.as_str() != name {
            // One text for all objects of a tenant.
            tenant = Tenant::from(name);
        }
        sources.insert(&tenant, row.try_get::<i64, _>(1)?.cast_unsigned(), row.try_get(2)?);
    }
    drop(rows);
    let mut links = sqlx::query("SELECT parent, kind, child FROM link").fetch(store);
    while let Some(row) = links.try_next().await? {
        if let Some(kind) = Kind::stored(row.try_get("kind")?) {
            let [parent, child] = ["parent", "child"].map(|end| row.try_get::<i64, _>(end));
            sources.link(kind, parent?.cast_unsigned(), child?.cast_unsigned());
        }
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use proptest::prelude::*;
    use serde_json::{Map, Value};

    use crate::store::Store;

    use super::*;

    const MAX_BYTES: usize = 1 << 20;

    fn new(body: &str) -> Result<NewManagedObject, Invalid> {
        parse(body.as_bytes(), "admin", &Limits::default())
    }

    fn body(object: &[u8]) -> &str {
        std::str::from_utf8(object).unwrap()
    }

    fn object(text: &str) -> ManagedObject {
        let members = Members::parse(text.as_bytes(), &Limits::default()).unwrap();
        let kind = members.get("type").map(|raw| json::string(raw, "type").unwrap().into());
        let body = Bytes::copy_from_slice(&text.as_bytes()[1..text.len() - 1]);
        ManagedObject { id: 7, kind, created_ms: 1000, updated_ms: 1000, body }
    }

    fn merged(stored: &str, patch: &str) -> Result<Option<ManagedObject>, Invalid> {
        object(stored).merge(patch.as_bytes(), 2000, &Limits::default(), MAX_BYTES)
    }

    #[test]
    fn a_new_object_keeps_what_the_client_may_set() {
        let text = r#"{ "id":"1","self":"x","c8y_IsDevice": { }, "creationTime":1, "lastUpdated":"x", "type":"c8y_Linux",
            "childDevices":{"references":[1]},"childAssets":1,"childAdditions":1,"deviceParents":1,"assetParents":1,
            "additionParents":1, "name": "One", "gone": null }"#;
        let object = new(text).unwrap();
        assert_eq!(object.kind.as_deref(), Some("c8y_Linux"));
        assert_eq!(body(&object.body), r#""c8y_IsDevice":{},"type":"c8y_Linux","name":"One","owner":"admin""#);
    }

    #[test]
    fn nothing_is_required() {
        for text in ["{}", r#"{"name":null,"type":null,"owner":null}"#] {
            let object = new(text).unwrap();
            assert_eq!((object.kind, body(&object.body)), (None, r#""owner":"admin""#));
        }
        assert_eq!(body(&new(r#"{"owner":"me"}"#).unwrap().body), r#""owner":"me""#);
    }

    #[test]
    fn wrong_members_are_named() {
        let long = "x".repeat(257);
        for (text, reason) in [
            (r#"{"name":1}"#, "name: must be a string"),
            (r#"{"type":{}}"#, "type: must be a string"),
            (r#"{"owner":[]}"#, "owner: must be a string"),
            (&format!(r#"{{"name":"{long}"}}"#), "name: is longer than 256 characters"),
            (r#"{"":1}"#, "the name of a fragment or series is empty"),
            ("[]", "must be a JSON object"),
        ] {
            assert_eq!(new(text).unwrap_err().to_string(), reason);
            let patched = merged("{}", text).unwrap_err();
            assert_eq!(patched.to_string(), reason);
        }
        assert!(new(&format!(r#"{{"{long}":1}}"#)).unwrap_err().to_string().ends_with("longer than 256 characters"));
    }

    #[test]
    fn a_patch_replaces_removes_and_appends() {
        let stored = r#"{"name":"One","a":{"x":1},"type":"t","b":2}"#;
        for (patch, expected, kind) in [
            (r#"{"c": [1], "a":{"y":2}}"#, r#""name":"One","a":{"y":2},"type":"t","b":2,"c":[1]"#, Some("t")),
            (r#"{"a":null,"z":null,"type":"u"}"#, r#""name":"One","type":"u","b":2"#, Some("u")),
            (r#"{"type":null,"owner":null}"#, r#""name":"One","a":{"x":1},"b":2"#, None),
            (r#"{"b":2}"#, r#""name":"One","a":{"x":1},"type":"t","b":2"#, Some("t")),
            (r#"{"\u0062":3,"lastUpdated":"x"}"#, r#""name":"One","a":{"x":1},"type":"t","b":3"#, Some("t")),
            (r#"{"name":null,"a":null,"type":null,"b":null}"#, "", None),
        ] {
            let object = merged(stored, patch).unwrap().unwrap();
            assert_eq!((body(&object.body), object.kind.as_deref()), (expected, kind), "{patch}");
            assert_eq!((object.id, object.created_ms, object.updated_ms), (7, 1000, 2000));
        }
    }

    #[test]
    fn a_heartbeat_changes_nothing() {
        for patch in ["{}", r#"{"id":"7"}"#, r#"{"id":"7","lastUpdated":"x","childDevices":{},"owner":null}"#] {
            assert_eq!(merged(r#"{"a":1}"#, patch).unwrap(), None, "{patch}");
        }
    }

    #[test]
    fn a_merged_object_is_limited() {
        let stored = object(r#"{"a":"12345"}"#);
        let patched = |max_bytes| stored.merge(br#"{"b":1}"#, 0, &Limits::default(), max_bytes);
        assert!(patched(r#""a":"12345","b":1"#.len()).is_ok());
        let refused = patched(r#""a":"12345","b":1"#.len() - 1).unwrap_err();
        assert_eq!(refused.to_string(), "the object would be larger than 16 bytes");

        let limits = Limits { members: 2, ..Limits::default() };
        let patched = |patch: &str| stored.merge(patch.as_bytes(), 0, &limits, MAX_BYTES);
        assert!(patched(r#"{"b":1}"#).is_ok());
        assert!(patched(r#"{"a":null,"b":1}"#).is_ok());
        assert_eq!(patched(r#"{"b":1,"c":1}"#).unwrap_err().to_string(), "the object would have more than 2 members");
    }

    #[test]
    fn an_object_is_rendered_with_its_six_references() {
        let object = new(r#"{"name":"One","c8y_IsDevice":{}}"#).unwrap().created(7, 1_630_672_141_664);
        let mut out = Vec::new();
        object.render("http://gate:8080", &mut out);
        let text = body(&out);
        let head = "{\"id\":\"7\",\"self\":\"http://gate:8080/inventory/managedObjects/7\",\
            \"creationTime\":\"2021-09-03T12:29:01.664Z\",\"lastUpdated\":\"2021-09-03T12:29:01.664Z\",\
            \"childDevices\":{\"self\":\"http://gate:8080/inventory/managedObjects/7/childDevices\",\"references\":[]},";
        assert!(text.starts_with(head), "{text}");
        assert!(text.ends_with(r#","name":"One","c8y_IsDevice":{},"owner":"admin"}"#), "{text}");
        let parsed: Value = serde_json::from_str(text).unwrap();
        for name in Relation::ALL.map(Relation::name) {
            let link = format!("http://gate:8080/inventory/managedObjects/7/{name}");
            assert_eq!(parsed[name], serde_json::json!({"self": link, "references": []}));
        }
    }

    #[test]
    fn an_empty_body_and_a_hostile_base_url_still_give_json() {
        let mut out = Vec::new();
        object("{}").render("http://a\"b\\", &mut out);
        let parsed: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(parsed["self"], "http://a\"b\\/inventory/managedObjects/7");
    }

    #[tokio::test]
    async fn what_is_stored_is_read_and_loaded() {
        let place = tempfile::tempdir().unwrap();
        let mut store = Store::open(place.path(), &crate::config::Store::default()).await.unwrap();
        let first = object(r#"{"type":"t","a":{"name":1},"name":"pump \"1\""}"#);
        assert_eq!(first.name().as_deref(), Some("pump \"1\""));
        let second = object(r#"{"c8y_IsDevice":{}}"#);
        assert_eq!((second.name(), second.is_device(), first.is_device()), (None, true, false));
        for (tenant, id, object) in [("b", 3, &second), ("a", 9, &second), ("a", 7, &first)] {
            sqlx::query(
                "INSERT INTO managed_object(id, tenant, type, created, updated, body) VALUES (?, ?, ?, ?, ?, ?)",
            )
            .bind(id)
            .bind(tenant)
            .bind(object.kind.as_deref())
            .bind(object.created_ms)
            .bind(object.updated_ms)
            .bind(&object.body[..])
            .execute(store.writer.connection())
            .await
            .unwrap();
        }
        sqlx::raw_sql("INSERT INTO link(parent, kind, child) VALUES (7, 1, 9)")
            .execute(store.writer.connection())
            .await
            .unwrap();
        let store = &store.readers;
        assert_eq!(get(store, "a", 7).await.unwrap(), Some(first));
        assert_eq!(get(store, "a", 9).await.unwrap().unwrap().kind, None);
        assert_eq!(get(store, "b", 7).await.unwrap(), None);
        assert_eq!(get(store, "a", 8).await.unwrap(), None);
        let sources = load(store).await.unwrap();
        let (a, b) = (Tenant::from("a"), Tenant::from("b"));
        let known = [(&a, 7), (&a, 9), (&b, 3), (&b, 7), (&a, 8)].map(|(tenant, id)| sources.exists(tenant, id));
        assert_eq!(known, [true, true, true, false, false]);
        assert_eq!((sources.name(7).as_deref(), sources.name(9)), (Some("pump \"1\""), None));
        assert!(sources.is_child(Kind::Assets, 7, 9) && !sources.is_child(Kind::Devices, 7, 9));
    }

    /// Objects over few names, so that patches hit; no nulls inside the stored one.
    fn members(with_null: bool) -> impl Strategy<Value = Map<String, Value>> {
        let value = prop_oneof![
            any::<i32>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            prop::collection::vec(any::<u8>(), 0..3).prop_map(Value::from),
            Just(if with_null { Value::Null } else { Value::Bool(true) }),
        ];
        let name = prop_oneof!["[a-f]", "[a-fé\"\u{2028}]{1,2}"];
        prop::collection::btree_map(name, value, 0..6).prop_map(|members| members.into_iter().collect())
    }

    proptest! {
        #[test]
        fn merge_does_what_a_merge_of_trees_does(stored in members(false), patch in members(true)) {
            let merged = merged(&serde_json::to_string(&stored).unwrap(), &serde_json::to_string(&patch).unwrap()).unwrap();
            let mut expected = stored;
            prop_assert_eq!(merged.is_none(), patch.is_empty());
            for (name, value) in patch {
                if value.is_null() {
                    expected.remove(&name);
                } else {
                    expected.insert(name, value);
                }
            }
            if let Some(merged) = merged {
                let text = format!("{{{}}}", body(&merged.body));
                prop_assert_eq!(serde_json::from_str::<Map<String, Value>>(&text).unwrap(), expected);
                let split = text.contains('\u{2028}');
                prop_assert!(!split);
            }
        }
    }
}
