//! Links between managed objects: what clients send to make and to break them, and how they are shown.

use super::page::{Query, flag, flag_or};
use super::relation::{Relation, Side};
use super::sources::{Related, Sources};
use super::{PATH, id_value, missing, push_decimal, push_self};
use crate::json::{self, Invalid, Limits, Members};

/// References of one kind that an object is shown with; the rest stands in the collection that `self` names.
pub const MAX_SHOWN: usize = 1000;

/// Which references a request wants to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    /// `withChildren`, unless it says `false`.
    pub children: bool,
    /// `withParents`, where it says `true`.
    pub parents: bool,
    /// Not `skipChildrenNames`.
    pub names: bool,
}

impl Default for Shown {
    fn default() -> Self {
        Self { children: true, parents: false, names: true }
    }
}

impl Shown {
    /// Reads the parameters.
    ///
    /// # Errors
    /// Names the parameter whose value cannot be used.
    pub fn parse(query: &Query<'_>) -> Result<Self, Invalid> {
        Ok(Self {
            children: flag_or(query, "withChildren", true)?,
            parents: flag(query, "withParents")?,
            names: !flag(query, "skipChildrenNames")?,
        })
    }

    /// Appends the references of `id` in that relation, at most [`MAX_SHOWN`], separated by commas.
    pub fn push_references(self, sources: &Sources, base_url: &str, id: u64, relation: Relation, out: &mut Vec<u8>) {
        let (wanted, names) = match relation.side {
            Side::Children => (self.children, self.names),
            Side::Parents => (self.parents, true),
        };
        if !wanted {
            return;
        }
        let Related { objects, .. } = sources.related(id, relation, 0, MAX_SHOWN);
        for (at, (other, name)) in objects.into_iter().enumerate() {
            if at > 0 {
                out.push(b',');
            }
            let short = |out: &mut Vec<u8>| {
                out.extend_from_slice(b"{\"id\":\"");
                push_decimal(other, out);
                out.push(b'"');
                if let Some(name) = name.filter(|_| names) {
                    out.push(b',');
                    out.extend_from_slice(b"\"name\":");
                    json::write_string(&name, out);
                }
                out.push(b',');
                push_self(base_url, PATH, other, "", out);
                out.push(b'}');
            };
            push_reference(base_url, id, relation, other, short, out);
        }
    }
}

/// Appends `{"managedObject":…,"self":…}`; `push` appends the object.
pub fn push_reference(
    base_url: &str,
    id: u64,
    relation: Relation,
    other: u64,
    push: impl FnOnce(&mut Vec<u8>),
    out: &mut Vec<u8>,
) {
    out.extend_from_slice(b"{\"managedObject\":");
    push(out);
    out.push(b',');
    push_self(base_url, PATH, id, &format!("{}/{other}", relation.name()), out);
    out.push(b'}');
}

/// What a POST to a collection of children may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Posted {
    /// `…managedobjectreference+json`: an object that exists.
    Reference(u64),
    /// `…managedobjectreferencecollection+json`: several of them.
    References(Vec<u64>),
    /// `…managedobject+json`: a new object, whose members are in the body.
    Object,
}

/// Reads a POST; the media type says what it is or, since clients send plain `application/json` too, its shape does.
///
/// # Errors
/// Names the first member that is wrong or missing.
pub fn parse_posted(content_type: Option<&str>, body: &[u8], limits: &Limits) -> Result<Posted, Invalid> {
    let members = Members::parse(body, limits)?;
    let media_type = content_type.unwrap_or_default().to_ascii_lowercase();
    if media_type.contains("managedobjectreferencecollection") {
        references(&members, limits).map(Posted::References)
    } else if media_type.contains("managedobjectreference") {
        reference(&members).map(Posted::Reference)
    } else if media_type.contains("vnd.com.nsn.cumulocity.managedobject+json") {
        Ok(Posted::Object)
    } else if members.get("references").is_some() {
        references(&members, limits).map(Posted::References)
    } else if members.get("managedObject").is_some() {
        reference(&members).map(Posted::Reference)
    } else {
        Ok(Posted::Object)
    }
}

/// Reads `{"references":[{"managedObject":{"id":…}},…]}`, at most `limits.elements`, each object once, ascending.
///
/// # Errors
/// Names the first member that is wrong or missing.
pub fn parse_references(body: &[u8], limits: &Limits) -> Result<Vec<u64>, Invalid> {
    references(&Members::parse(body, limits)?, limits)
}

fn references(members: &Members<'_>, limits: &Limits) -> Result<Vec<u64>, Invalid> {
    const ARRAY: &str = "references";
    let array = members.get(ARRAY).ok_or_else(|| missing(&[(ARRAY, false)]))?;
    let mut ids = Vec::new();
    json::each_element(array, |raw| {
        let at = ids.len();
        if at == limits.elements {
            return Err(Invalid::new(ARRAY, format!("has more than {at} elements")));
        }
        let element = Members::of(raw, limits).and_then(|members| reference(&members));
        ids.push(element.map_err(|error| error.within(&format!("{ARRAY}[{at}]")))?);
        Ok(())
    })
    .map_err(|error| if error.field.is_empty() { error.within(ARRAY) } else { error })?;
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn reference(members: &Members<'_>) -> Result<u64, Invalid> {
    let object = members.get("managedObject").ok_or_else(|| Invalid::new("managedObject.id", "is missing"))?;
    let mut id = None;
    json::each_member(object, |name, raw| {
        if name == "id" && !json::is_null(raw) {
            id = Some(id_value(raw, "id")?);
        }
        Ok(())
    })
    .and_then(|()| id.ok_or_else(|| Invalid::new("id", "is missing")))
    .map_err(|error| error.within("managedObject"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::super::relation::Kind;
    use super::*;

    fn posted(content_type: Option<&str>, body: &str) -> Result<Posted, Invalid> {
        parse_posted(content_type, body.as_bytes(), &Limits::default())
    }

    #[test]
    fn the_media_type_or_the_shape_says_what_is_posted() {
        const VENDOR: &str = "application/vnd.com.nsn.cumulocity.managedobject";
        let vendor = |rest: &str| format!("{VENDOR}{rest}+json;charset=UTF-8;ver=0.9");
        let one = r#"{"managedObject":{"id":"128","name":"x"}}"#;
        let many =
            r#"{"references":[{"managedObject":{"id":"9"}},{"managedObject":{"id":7}},{"managedObject":{"id":9}}]}"#;
        for (content_type, body, expected) in [
            (None, one, Posted::Reference(128)),
            (Some("application/json"), many, Posted::References(vec![7, 9])),
            (Some("application/json"), r#"{"name":"new"}"#, Posted::Object),
            (None, r#"{"references":null,"managedObject":null}"#, Posted::Object),
            (Some(&vendor("Reference")), one, Posted::Reference(128)),
            (Some(&vendor("ReferenceCollection")), many, Posted::References(vec![7, 9])),
            (Some(&vendor("")), one, Posted::Object),
            (Some(&vendor("referencecollection")), r#"{"references":[]}"#, Posted::References(vec![])),
        ] {
            assert_eq!(posted(content_type, body), Ok(expected), "{content_type:?} {body}");
        }
    }

    #[test]
    fn wrong_references_are_named() {
        let collection = Some("application/vnd.com.nsn.cumulocity.managedobjectreferencecollection+json");
        let reference = Some("application/vnd.com.nsn.cumulocity.managedobjectreference+json");
        for (content_type, body, reason) in [
            (None, "[]", "must be a JSON object"),
            (collection, "{}", "Following mandatory fields should be included: references"),
            (None, r#"{"references":{}}"#, "references: must be a JSON array"),
            (None, r#"{"references":[1]}"#, "references[0]: must be a JSON object"),
            (None, r#"{"references":[{"managedObject":{}}]}"#, "references[0].managedObject.id: is missing"),
            (reference, "{}", "managedObject.id: is missing"),
            (None, r#"{"managedObject":7}"#, "managedObject: must be a JSON object"),
            (None, r#"{"managedObject":{"id":"x"}}"#, "managedObject.id: must be an id of decimal digits"),
        ] {
            assert_eq!(posted(content_type, body).unwrap_err().to_string(), reason, "{body}");
        }
        let limits = Limits { elements: 1, ..Limits::default() };
        let body = br#"{"references":[{"managedObject":{"id":"1"}},{"managedObject":{"id":"2"}}]}"#;
        assert_eq!(parse_references(body, &limits).unwrap_err().to_string(), "references: has more than 1 elements");
    }

    #[test]
    fn references_are_shown_as_asked_for_and_not_without_end() {
        let sources = Sources::default();
        for id in 1..=1003 {
            sources.insert(&"t".into(), id, (id == 2).then_some("a\"b"));
        }
        sources.link(Kind::Devices, 1, 2);
        sources.link(Kind::Devices, 1, 3);
        let shown = |shown: Shown, id, relation| {
            let mut out = Vec::new();
            shown.push_references(&sources, "http://g", id, relation, &mut out);
            String::from_utf8(out).unwrap()
        };
        let both = Shown { parents: true, ..Shown::default() };
        let three = r#"{"managedObject":{"id":"3","self":"http://g/inventory/managedObjects/3"},"self":"http://g/inventory/managedObjects/1/childDevices/3"}"#;
        let two = three.replace("/3", "/2").replace("\"3\"", "\"2\"");
        let named = two.replace("\"2\"", r#""2","name":"a\"b""#);
        let [devices, assets, _, parents, ..] = Relation::ALL;
        assert_eq!(shown(both, 1, devices), format!("{named},{three}"));
        assert_eq!(shown(Shown { names: false, ..both }, 1, devices), format!("{two},{three}"));
        assert_eq!(shown(Shown { children: false, ..both }, 1, devices), "");
        assert_eq!((shown(both, 1, assets), shown(Shown::default(), 2, parents)), (String::new(), String::new()));
        assert!(shown(both, 2, parents).ends_with("/inventory/managedObjects/2/deviceParents/1\"}"));
        for id in 2..=1003 {
            sources.link(Kind::Assets, 1, id);
        }
        assert_eq!(shown(both, 1, assets).matches("\"managedObject\"").count(), MAX_SHOWN);
    }

    #[test]
    fn kinds_are_stored_as_numbers() {
        for kind in Kind::ALL {
            assert_eq!(Kind::stored(kind as i64), Some(kind));
        }
        assert_eq!(Kind::stored(3), None);
    }
}
