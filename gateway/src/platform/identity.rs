//! External ids: names that other systems have for a managed object, each a type and a value, unique in the tenant.

use sqlx::{Row as _, SqliteExecutor};

use super::{MAX_NAME_CHARS, is_too_long, missing, push_decimal, push_self};
use crate::json::{self, Invalid, Limits, Member, Members};

const EXTERNAL: &str = "/identity/externalIds/";

/// A name of a managed object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ExternalId {
    /// `type`, as `c8y_Serial`.
    pub kind: Box<str>,
    /// `externalId`
    pub value: Box<str>,
}

/// Reads the body of a POST; `managedObject` and `self` are the gateway's and are ignored.
///
/// # Errors
/// Names the first member that is wrong, or all mandatory ones that are missing.
pub fn parse(body: &[u8], limits: &Limits) -> Result<ExternalId, Invalid> {
    let (mut kind, mut value) = (None, None);
    for Member { name, raw } in Members::parse(body, limits)?.iter().filter(|member| !json::is_null(member.raw)) {
        match &**name {
            "type" => kind = Some(text(raw, "type")?),
            "externalId" => value = Some(text(raw, "externalId")?),
            "managedObject" | "self" => {}
            _ => return Err(Invalid::new(name, "is not a known member of an external id")),
        }
    }
    let fields = [("externalId", value.is_some()), ("type", kind.is_some())];
    let (Some(kind), Some(value)) = (kind, value) else { return Err(missing(&fields)) };
    Ok(ExternalId { kind, value })
}

fn text(raw: &str, field: &str) -> Result<Box<str>, Invalid> {
    let text = json::string(raw, field)?;
    if text.is_empty() {
        Err(Invalid::new(field, "must not be empty"))
    } else if is_too_long(&text) {
        Err(Invalid::new(field, format!("is longer than {MAX_NAME_CHARS} characters")))
    } else {
        Ok(text.into())
    }
}

impl ExternalId {
    /// Appends the path under which it is found, percent-encoded.
    pub fn push_path(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(EXTERNAL.as_bytes());
        push_segment(&self.kind, out);
        out.push(b'/');
        push_segment(&self.value, out);
    }

    /// Appends the external id of `object` as clients get it. `base_url` has no slash at its end.
    pub fn render(&self, object: u64, base_url: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"externalId\":");
        json::write_string(&self.value, out);
        out.extend_from_slice(b",\"type\":");
        json::write_string(&self.kind, out);
        out.extend_from_slice(b",\"managedObject\":{\"id\":\"");
        push_decimal(object, out);
        out.extend_from_slice(b"\",");
        push_self(base_url, super::PATH, object, "", out);
        out.extend_from_slice(b"},\"self\":\"");
        json::write_escaped(base_url, out);
        self.push_path(out);
        out.extend_from_slice(b"\"}");
    }
}

/// Appends a segment of a path: all but unreserved characters (RFC 3986, section 2.3) encoded.
fn push_segment(text: &str, out: &mut Vec<u8>) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            out.push(byte);
        } else {
            out.extend([b'%', DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 0xf)]]);
        }
    }
}

/// The object that an external id stands for.
///
/// # Errors
/// When the store fails.
pub async fn find(store: impl SqliteExecutor<'_>, tenant: &str, id: &ExternalId) -> sqlx::Result<Option<u64>> {
    let object = sqlx::query_scalar("SELECT object FROM external_id WHERE tenant = ? AND type = ? AND value = ?")
        .bind(tenant)
        .bind(&*id.kind)
        .bind(&*id.value)
        .fetch_optional(store)
        .await?;
    Ok(object.map(i64::cast_unsigned))
}

/// All external ids of an object, ordered by type and value; their number is limited when they are bound.
///
/// # Errors
/// When the store fails.
pub async fn of_object(store: impl SqliteExecutor<'_>, object: u64) -> sqlx::Result<Vec<ExternalId>> {
    let rows = sqlx::query("SELECT type, value FROM external_id WHERE object = ? ORDER BY type, value")
        .bind(object.cast_signed())
        .fetch_all(store)
        .await?;
    let read = |row: &sqlx::sqlite::SqliteRow| {
        Ok(ExternalId { kind: row.try_get::<String, _>(0)?.into(), value: row.try_get::<String, _>(1)?.into() })
    };
    rows.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn bad_external_ids_are_named() {
        let long = format!(r#"{{"type":"t","externalId":"{}"}}"#, "x".repeat(257));
        for (body, reason) in [
            ("{}", "Following mandatory fields should be included: externalId,type"),
            (r#"{"type":"t","externalId":null}"#, "Following mandatory fields should be included: externalId"),
            (r#"{"type":"","externalId":"x"}"#, "type: must not be empty"),
            (r#"{"type":7,"externalId":"x"}"#, "type: must be a string"),
            (r#"{"type":"t","externalId":"x","colour":1}"#, "colour: is not a known member of an external id"),
            (&long, "externalId: is longer than 256 characters"),
            ("[]", "must be a JSON object"),
        ] {
            assert_eq!(parse(body.as_bytes(), &Limits::default()).unwrap_err().to_string(), reason, "{body}");
        }
    }

    #[test]
    fn links_are_percent_encoded() {
        let body = r#"{"type":"c8y_Serial","externalId":"a/b:c d+é%\"","managedObject":{"id":"9"},"self":"x"}"#;
        let id = parse(body.as_bytes(), &Limits::default()).unwrap();
        let mut out = Vec::new();
        id.render(7, "http://g", &mut out);
        let rendered: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let expected = serde_json::json!({
            "externalId": "a/b:c d+é%\"", "type": "c8y_Serial",
            "managedObject": {"id": "7", "self": "http://g/inventory/managedObjects/7"},
            "self": "http://g/identity/externalIds/c8y_Serial/a%2Fb%3Ac%20d%2B%C3%A9%25%22",
        });
        assert_eq!(rendered, expected);
    }
}
