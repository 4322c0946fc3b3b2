//! `/platform` and what clients ask before anything else (Cumulocity OpenAPI, "Platform API"): where things are, whose they
//! are, and how to log in. Links lead only to what there is: `audit` is not among them.

use axum::extract::State;
use axum::response::Response;
use hyper::{HeaderMap, Uri};
use serde_json::{Map, Value, json};

use super::{ApiError, AppState, Caller, Origin, found};

/// The resource of one API: its path, its collection and the queries that have names.
struct Family {
    /// Its member in `/platform`.
    name: &'static str,
    /// Its media type.
    media: &'static str,
    path: &'static str,
    /// Its collection under `path`, with the member that holds its elements.
    collection: Option<(&'static str, &'static str)>,
    /// Links by name, with the rest of their path.
    links: &'static [(&'static str, &'static str)],
}

const FAMILIES: [Family; 8] = [
    Family {
        name: "inventory",
        media: "inventoryapi",
        path: "/inventory",
        collection: Some(("managedObjects", "references")),
        links: &[
            ("managedObjectsForType", "/managedObjects?type={type}"),
            ("managedObjectsForFragmentType", "/managedObjects?fragmentType={fragmentType}"),
            ("managedObjectsForListOfIds", "/managedObjects?ids={ids}"),
            ("managedObjectsForText", "/managedObjects?text={text}"),
        ],
    },
    Family {
        name: "identity",
        media: "identityapi",
        path: "/identity",
        collection: None,
        links: &[
            ("externalId", "/externalIds/{type}/{externalId}"),
            ("externalIdsOfGlobalId", "/globalIds/{globalId}/externalIds"),
        ],
    },
    Family {
        name: "measurement",
        media: "measurementapi",
        path: "/measurement",
        collection: Some(("measurements", "measurements")),
        links: &[
            ("measurementsForType", "/measurements?type={type}"),
            ("measurementsForSource", "/measurements?source={source}"),
            ("measurementsForSourceAndType", "/measurements?source={source}&type={type}"),
            ("measurementsForDate", "/measurements?dateFrom={dateFrom}&dateTo={dateTo}"),
            ("measurementsForSourceAndDate", "/measurements?source={source}&dateFrom={dateFrom}&dateTo={dateTo}"),
        ],
    },
    Family {
        name: "event",
        media: "eventapi",
        path: "/event",
        collection: Some(("events", "events")),
        links: &[
            ("eventsForType", "/events?type={type}"),
            ("eventsForSource", "/events?source={source}"),
            ("eventsForSourceAndType", "/events?source={source}&type={type}"),
            ("eventsForTime", "/events?dateFrom={dateFrom}&dateTo={dateTo}"),
            ("eventsForSourceAndTime", "/events?source={source}&dateFrom={dateFrom}&dateTo={dateTo}"),
        ],
    },
    Family {
        name: "alarm",
        media: "alarmapi",
        path: "/alarm",
        collection: Some(("alarms", "alarms")),
        links: &[
            ("alarmsForStatus", "/alarms?status={status}"),
            ("alarmsForSource", "/alarms?source={source}"),
            ("alarmsForSourceAndStatus", "/alarms?source={source}&status={status}"),
            ("alarmsForTime", "/alarms?dateFrom={dateFrom}&dateTo={dateTo}"),
            ("alarmsForStatusAndTime", "/alarms?status={status}&dateFrom={dateFrom}&dateTo={dateTo}"),
            ("alarmsForSourceAndTime", "/alarms?source={source}&dateFrom={dateFrom}&dateTo={dateTo}"),
            (
                "alarmsForSourceAndStatusAndTime",
                "/alarms?source={source}&status={status}&dateFrom={dateFrom}&dateTo={dateTo}",
            ),
        ],
    },
    Family {
        name: "deviceControl",
        media: "devicecontrolapi",
        path: "/devicecontrol",
        collection: Some(("operations", "operations")),
        links: &[
            ("operationsByStatus", "/operations?status={status}"),
            ("operationsByAgentId", "/operations?agentId={agentId}"),
            ("operationsByAgentIdAndStatus", "/operations?agentId={agentId}&status={status}"),
            ("operationsByDeviceId", "/operations?deviceId={deviceId}"),
            ("operationsByDeviceIdAndStatus", "/operations?deviceId={deviceId}&status={status}"),
        ],
    },
    Family {
        name: "tenant",
        media: "tenantapi",
        path: "/tenant",
        collection: None,
        links: &[("currentTenant", "/currentTenant"), ("loginOptions", "/loginOptions")],
    },
    Family {
        name: "user",
        media: "userapi",
        path: "/user",
        collection: None,
        links: &[
            ("currentUser", "/currentUser"),
            ("users", "/{realm}/users"),
            ("userByName", "/{realm}/userByName/{userName}"),
            ("roles", "/roles"),
        ],
    },
];

impl Family {
    fn render(&self, base: &str) -> Value {
        let own = format!("{base}{}", self.path);
        let links = self.links.iter().map(|(name, rest)| ((*name).to_owned(), format!("{own}{rest}").into()));
        let mut family: Map<_, _> = links.collect();
        if let Some((collection, elements)) = self.collection {
            // The platform's own answers hold no elements here; one of the clients wants a list for `references`.
            let none = if elements == "references" { json!([]) } else { Value::Null };
            family.insert(collection.to_owned(), json!({"self": format!("{own}/{collection}"), elements: none}));
        }
        family.insert("self".to_owned(), own.into());
        family.into()
    }
}

/// GET of `/platform`.
pub(super) async fn platform(caller: Caller, headers: HeaderMap) -> Response {
    let base = &caller.base_url;
    let mut platform: Map<_, _> = FAMILIES.iter().map(|family| (family.name.to_owned(), family.render(base))).collect();
    platform.insert("self".to_owned(), format!("{base}/platform").into());
    found(&headers, "platformapi", Value::from(platform).to_string().into_bytes())
}

/// GET of one API's resource, as `/alarm`.
pub(super) async fn family(caller: Caller, uri: Uri, headers: HeaderMap) -> Result<Response, ApiError> {
    let family = FAMILIES.iter().find(|family| family.path == uri.path());
    let family = family.ok_or_else(|| ApiError::not_found("general", "There is nothing at this path."))?;
    Ok(found(&headers, family.media, family.render(&caller.base_url).to_string().into_bytes()))
}

/// The paths of [`family`].
pub(super) fn families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|family| family.path)
}

/// GET of `/tenant/currentTenant`.
pub(super) async fn tenant(caller: Caller, headers: HeaderMap) -> Response {
    let base = &caller.base_url;
    let domain = base.split_once("://").map_or("", |(_, rest)| rest).split(['/', ':']).next();
    let body = json!({
        "name": caller.principal.tenant.as_str(),
        "domainName": domain,
        "allowCreateTenants": false,
        "customProperties": {},
        "applications": {"references": []},
        "self": format!("{base}/tenant/currentTenant"),
    });
    found(&headers, "currenttenant", body.to_string().into_bytes())
}

/// GET of `/tenant/loginOptions`, for anybody: Basic is the only way in.
pub(super) async fn login_options(State(_): AppState, Origin(base): Origin, headers: HeaderMap) -> Response {
    let own = format!("{base}/tenant/loginOptions");
    let option = json!({
        "self": format!("{own}/BASIC"),
        "type": "BASIC",
        "userManagementSource": "INTERNAL",
        "visibleOnLoginPage": true,
    });
    let body = json!({"self": own, "loginOptions": [option]});
    found(&headers, "loginoptioncollection", body.to_string().into_bytes())
}
