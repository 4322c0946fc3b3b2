//! What a PUT does to a stored object: members replace those of the same name in place, null removes, new ones follow.

use std::collections::HashMap;

use bytes::Bytes;

use super::check_name;
use super::object::source_id;
use crate::json::{self, Invalid, Limits, Member, Members};

/// Merges `patch` into `stored`, members on one line without the braces. Values are replaced as a whole. `check` looks at every
/// member that stays.
///
/// # Errors
/// What `check` says; an object that would pass `limits.members` or `max_bytes` is refused.
pub(super) fn merge<'m, 'a: 'm>(
    stored: &[u8],
    patch: impl Iterator<Item = &'m Member<'a>> + Clone,
    limits: &Limits,
    max_bytes: usize,
    check: impl Fn(&str, &str) -> Result<(), Invalid>,
) -> Result<Bytes, Invalid> {
    let mut changes: HashMap<&str, &str> = patch.clone().map(|member| (&*member.name, member.raw)).collect();
    let (mut merged, mut members) = (Vec::with_capacity(stored.len()), 0);
    let mut push = |name: &str, raw: &str| {
        if json::is_null(raw) {
            return Ok(());
        }
        check(name, raw)?;
        members += 1;
        json::push_member(name, raw, &mut merged);
        Ok(())
    };
    let stored = braced(stored);
    // What is stored was within the limits of its day.
    let unlimited = Limits { depth: usize::MAX, members: usize::MAX, elements: usize::MAX };
    for Member { name, raw } in &Members::parse(&stored, &unlimited)? {
        push(name, changes.remove(&**name).unwrap_or(raw))?;
    }
    for Member { name, .. } in patch {
        if let Some(raw) = changes.remove(&**name) {
            push(name, raw)?;
        }
    }
    if members > limits.members {
        return Err(Invalid::new("", format!("the object would have more than {} members", limits.members)));
    }
    if merged.len() > max_bytes {
        return Err(Invalid::new("", format!("the object would be larger than {max_bytes} bytes")));
    }
    Ok(merged.into())
}

/// The client's part of a PUT that may set only some members: `id` and `self` are ignored, those of `fixed` are refused. The
/// `source` that the object has is ignored, too: c8y_api 3.7.3 sends it with every change of an alarm.
///
/// # Errors
/// Names the first member that cannot be changed, or whose name cannot be one.
pub(super) fn changeable<'m, 'a>(
    members: &'m Members<'a>,
    fixed: &[&str],
    source: Option<u64>,
) -> Result<Vec<&'m Member<'a>>, Invalid> {
    let is_ignored = |member: &Member<'_>| match &*member.name {
        "id" | "self" => true,
        "source" => source.is_some() && source_id(member.raw).ok() == source,
        _ => false,
    };
    let patch: Vec<_> = members.iter().filter(|member| !is_ignored(member)).collect();
    for member in &patch {
        check_name(&member.name)?;
        if fixed.contains(&&*member.name) {
            return Err(Invalid::new(&member.name, "cannot be changed"));
        }
    }
    Ok(patch)
}

/// Members without braces as an object.
pub(super) fn braced(members: &[u8]) -> Vec<u8> {
    [b"{", members, b"}"].concat()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn merged(stored: &str, patch: &str, members: usize, max_bytes: usize) -> Result<String, Invalid> {
        let limits = Limits { members, ..Limits::default() };
        let patch = Members::parse(patch.as_bytes(), &limits)?;
        let merged = merge(stored.as_bytes(), patch.iter(), &limits, max_bytes, |name, _| check_name(name))?;
        Ok(String::from_utf8(merged.to_vec()).unwrap())
    }

    #[test]
    fn members_are_replaced_removed_and_appended() {
        let stored = r#""a":1,"b":{"x":1},"c":1.50"#;
        assert_eq!(
            merged(stored, r#"{"d":[1], "b":{"y":2}, "a":null}"#, 9, 99).unwrap(),
            r#""b":{"y":2},"c":1.50,"d":[1]"#
        );
        assert_eq!(merged(stored, r#"{"\u0061":null,"b":null,"c":null,"z":null}"#, 9, 99).unwrap(), "");
        assert_eq!(merged("", r#"{"a":1}"#, 9, 99).unwrap(), r#""a":1"#);
    }

    #[test]
    fn what_comes_of_it_is_limited_but_what_is_stored_is_not_refused() {
        let stored = r#""a":1,"b":2"#;
        assert!(merged(stored, r#"{"a":3}"#, 2, 11).is_ok());
        assert!(merged(stored, r#"{"a":10}"#, 2, 11).unwrap_err().to_string().ends_with("larger than 11 bytes"));
        assert!(merged(stored, r#"{"c":3}"#, 2, 99).unwrap_err().to_string().ends_with("more than 2 members"));
        assert!(merged(stored, r#"{"a":null}"#, 1, 99).is_ok());
    }

    #[test]
    fn fixed_members_are_refused_by_name() {
        let patch = |fixed: &str, source: &str, own: Option<u64>| {
            let members = format!(r#"{{"id":"1","self":"x","a":1,"time":null,"source":{source}}}"#);
            let members = Members::parse(members.as_bytes(), &Limits::default()).unwrap();
            changeable(&members, &[fixed, "source"], own).map(|patch| patch.len()).map_err(|error| error.to_string())
        };
        assert_eq!(patch("type", r#"{"id":"7","name":"n"}"#, Some(7)), Ok(2));
        assert_eq!(patch("time", r#"{"id":7}"#, Some(7)), Err("time: cannot be changed".to_owned()));
        for (source, own) in [(r#"{"id":"8"}"#, Some(7)), ("{}", Some(7)), ("null", Some(7)), (r#"{"id":"7"}"#, None)] {
            assert_eq!(patch("type", source, own), Err("source: cannot be changed".to_owned()), "{source}");
        }
    }
}
