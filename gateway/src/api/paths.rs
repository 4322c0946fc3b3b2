//! Paths as clients write them.

use hyper::Uri;
use hyper::http::uri::PathAndQuery;

/// Names behind this prefix are the client's own, and may hold slashes.
const EXTERNAL_IDS: &str = "/identity/externalIds/";

/// Drops the empty segments of a path: c8y_api 3.7.3 creates alarms at `/alarm/alarms/` and updates them at `/alarm/alarms//1`,
/// and consumers connect to `/notification2/consumer/` as well as without the last slash.
pub(crate) fn drop_empty_segments(uri: &mut Uri) {
    if let Some(clean) = cleaned(uri) {
        *uri = clean;
    }
}

/// `None` if there is nothing to drop.
fn cleaned(uri: &Uri) -> Option<Uri> {
    let path = uri.path();
    let has_empty = path.len() > 1 && (path.ends_with('/') || path.contains("//"));
    if !has_empty || path.starts_with(EXTERNAL_IDS) {
        return None;
    }
    let mut clean = String::with_capacity(path.len());
    for segment in path.split('/').filter(|segment| !segment.is_empty()) {
        clean.push('/');
        clean.push_str(segment);
    }
    if clean.is_empty() {
        clean.push('/');
    }
    if let Some(query) = uri.query() {
        clean.push('?');
        clean.push_str(query);
    }
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(PathAndQuery::try_from(clean).ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn empty_segments_are_dropped_and_everything_else_stays() {
        for (path, expected) in [
            ("/alarm/alarms/", "/alarm/alarms"),
            ("/alarm/alarms//1?a=//b/", "/alarm/alarms/1?a=//b/"),
            ("//inventory///managedObjects//", "/inventory/managedObjects"),
            ("/notification2/consumer/?token=a.b-c", "/notification2/consumer?token=a.b-c"),
            ("//", "/"),
            ("/a%2F/b%20c/", "/a%2F/b%20c"),
            ("http://edge:80/alarm/alarms/", "http://edge:80/alarm/alarms"),
        ] {
            let cleaned = cleaned(&path.parse().unwrap()).unwrap_or_else(|| panic!("{path} was left alone"));
            assert_eq!(cleaned, expected.parse::<Uri>().unwrap(), "{path}");
        }
        for path in ["/", "/alarm/alarms", "/a?b=//", "/identity/externalIds/url/http://a//b/", "*"] {
            assert_eq!(cleaned(&path.parse().unwrap()), None, "{path}");
        }
    }
}
