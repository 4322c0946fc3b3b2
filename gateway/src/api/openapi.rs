//! `/openapi.json`: every endpoint, parameter, field and code of the HTTP surface (OpenAPI 3.1).

use std::convert::Infallible;
use std::iter;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE};

use super::Origin;
use crate::answers::PIECE_BYTES;

/// All of it but the address at which the gateway is reached.
const DOCUMENT: &str = include_str!("../../../docs/openapi.json");

/// GET, for anybody. It is sent from where it is: those who have no login must not take the room of others' answers.
pub(super) async fn document(Origin(base): Origin) -> Response {
    let servers = serde_json::json!([{"url": base}]);
    let head = format!("{{\"servers\":{servers},");
    let rest = DOCUMENT.trim_start_matches('{').as_bytes();
    let length = (head.len() + rest.len()).to_string();
    let pieces = iter::once(Bytes::from(head)).chain(rest.chunks(PIECE_BYTES).map(Bytes::from_static));
    let body = Body::from_stream(stream::iter(pieces.map(Ok::<_, Infallible>)));
    ([(CONTENT_TYPE, "application/json".to_owned()), (CONTENT_LENGTH, length)], body).into_response()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::collections::{BTreeMap, BTreeSet};

    use axum::body::HttpBody as _;
    use serde_json::Value;

    use super::super::routes::{changing_routes, other_routes};
    use super::*;
    use crate::platform::{alarm, event, measurement, operation};

    #[tokio::test]
    async fn it_takes_no_room_of_answers_that_are_not_sent() {
        let response = document(Origin("http://gate".to_owned())).await;
        assert_eq!(response.body().size_hint().exact(), None);
        let length: usize = response.headers()[CONTENT_LENGTH].to_str().unwrap().parse().unwrap();
        let body = axum::body::to_bytes(response.into_body(), length).await.unwrap();
        let document: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!((body.len(), document["servers"][0]["url"].as_str()), (length, Some("http://gate")));
    }

    fn parsed() -> Value {
        serde_json::from_str(DOCUMENT).unwrap()
    }

    /// What a reference in the document points to; anything else is itself.
    #[track_caller]
    fn followed<'d>(document: &'d Value, value: &'d Value) -> &'d Value {
        let Some(reference) = value.get("$ref") else { return value };
        let target = document.pointer(reference.as_str().unwrap().strip_prefix('#').unwrap());
        target.unwrap_or_else(|| panic!("{reference} leads nowhere"))
    }

    /// The methods of a path as an `Allow` header names them, in order.
    fn methods(item: &Value) -> BTreeSet<String> {
        let names = item.as_object().unwrap().keys().filter(|name| *name != "parameters");
        names.map(|name| name.to_ascii_uppercase()).collect()
    }

    #[test]
    fn the_document_lists_exactly_the_paths_and_methods_of_the_router() {
        let document = parsed();
        let documented: BTreeMap<_, _> = document["paths"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(path, item)| (path.clone(), methods(followed(&document, item))))
            .collect();
        let routed: BTreeMap<_, _> = changing_routes()
            .chain(other_routes())
            .map(|route| (route.path.replace("{*", "{"), route.allowed.split(", ").map(str::to_owned).collect()))
            .collect();
        assert_eq!(documented, routed);
    }

    /// The names of the parameters in the query.
    fn query_parameters<'d>(document: &'d Value, operation: &'d Value) -> Vec<&'d str> {
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        let parameters = parameters.map(|parameter| followed(document, parameter));
        parameters
            .filter(|parameter| parameter["in"] == "query")
            .map(|parameter| parameter["name"].as_str().unwrap())
            .collect()
    }

    #[test]
    fn the_document_lists_exactly_the_parameters_that_select() {
        let document = parsed();
        for (path, known) in [
            ("/measurement/measurements", measurement::PARAMETERS),
            ("/event/events", event::PARAMETERS),
            ("/alarm/alarms", alarm::PARAMETERS),
            ("/devicecontrol/operations", operation::PARAMETERS),
        ] {
            let item = &document["paths"][path];
            assert_eq!(query_parameters(&document, &item["delete"]), known, "{path}");
            let listed = query_parameters(&document, &item["get"]);
            let page = ["currentPage", "pageSize", "withTotalPages", "withTotalElements"];
            assert_eq!(listed, [known, &page].concat(), "{path}");
        }
        assert_eq!(query_parameters(&document, &document["paths"]["/alarm/alarms"]["put"]), alarm::PARAMETERS);
        assert_eq!(query_parameters(&document, &document["paths"]["/alarm/alarms/count"]["get"]), alarm::PARAMETERS);
    }

    fn references<'d>(value: &'d Value, out: &mut BTreeSet<&'d str>) {
        match value {
            Value::Array(elements) => elements.iter().for_each(|element| references(element, out)),
            Value::Object(members) => {
                out.extend(members.get("$ref").and_then(Value::as_str));
                members.values().for_each(|member| references(member, out));
            }
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_component_is_used() {
        let document = parsed();
        let mut used = BTreeSet::new();
        references(&document, &mut used);
        let kinds = document["components"].as_object().unwrap().iter().filter(|(kind, _)| *kind != "securitySchemes");
        let known: BTreeSet<_> = kinds
            .flat_map(|(kind, of_kind)| {
                of_kind.as_object().unwrap().keys().map(move |name| format!("#/components/{kind}/{name}"))
            })
            .collect();
        assert_eq!(used, known.iter().map(String::as_str).collect());
    }

    #[test]
    fn the_document_has_the_version_of_the_program() {
        assert_eq!(parsed()["info"]["version"], env!("CARGO_PKG_VERSION"));
    }
}
