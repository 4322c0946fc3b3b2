//! Why a subscription does not take a message, for those who wonder.

use super::model::{Context, Subscription};
use crate::message::{Action, Api, Message};

impl Subscription {
    /// Why it forwards nothing of `message`, its plugins aside; `None` if it does. `above`: ids of what is above the message's source.
    #[must_use]
    pub fn why_not(&self, message: &Message, above: &[u64]) -> Option<String> {
        let Message { api, action, source, .. } = message;
        let own = self.source.is_none_or(|id| id.to_string() == source.as_str());
        let below = self.source.is_some_and(|id| above.contains(&id));
        let takes = |own: bool| self.types(message, own).next().is_some();
        if own && takes(true) || below && takes(false) {
            return None;
        }
        let name = api.as_str();
        Some(match (self.context, api, action, api.with_children()) {
            _ if !own && !below => {
                let id = self.source.unwrap_or_default();
                format!("its source, '{source}', is neither that of the subscription, '{id}', nor below it")
            }
            (_, _, _, Some(children)) if !own => {
                format!("its source is below that of the subscription, whose filter does not name '{children}'")
            }
            _ if !own => format!("{name} of what is below the source of a subscription are never forwarded"),
            (Context::Mo, Api::ManagedObjects, Action::Create, _) => {
                "in the context 'mo' the creation of a managed object is never forwarded".to_owned()
            }
            (Context::Tenant, Api::ManagedObjects, Action::Update | Action::Delete, _) => {
                "in the context 'tenant' nothing of managed objects is forwarded but their creation".to_owned()
            }
            (Context::Tenant, Api::Measurements, ..) => {
                "in the context 'tenant' measurements are forwarded only where the filter names them".to_owned()
            }
            _ => format!("the subscription's filter does not name '{name}'"),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use serde_json::json;

    use super::*;

    fn subscription(source: Option<&str>, apis: &[&str]) -> Subscription {
        let mut body = json!({"context": "tenant", "subscription": "s", "subscriptionFilter": {"apis": apis}});
        if let Some(id) = source {
            (body["context"], body["source"]) = ("mo".into(), json!({"id": id}));
        }
        Subscription::parse(body.to_string().as_bytes()).unwrap()
    }

    fn message(api: Api, action: Action, source: &str) -> Message {
        let (kind, time, body) = (None, "".into(), bytes::Bytes::new());
        Message { tenant: "t".into(), api, action, source: source.into(), kind, time, body }
    }

    #[test]
    fn the_first_thing_that_is_in_the_way_is_named() {
        let (create, update) = (Action::Create, Action::Update);
        for (source, apis, api, action, above, reason) in [
            (Some("7"), &["*"][..], Api::Events, create, &[][..], ""),
            (Some("9"), &["*"], Api::Events, create, &[5, 9], ""),
            (None, &["events"], Api::Events, create, &[], ""),
            (Some("9"), &["*"], Api::Events, create, &[5], "neither that of the subscription, '9', nor below it"),
            (Some("9"), &["events"], Api::Events, create, &[9], "does not name 'eventsWithChildren'"),
            (Some("9"), &["*"], Api::Measurements, create, &[9], "measurements of what is below"),
            (Some("7"), &["*"], Api::ManagedObjects, create, &[], "in the context 'mo' the creation"),
            (None, &["*"], Api::ManagedObjects, update, &[], "in the context 'tenant' nothing of managed objects"),
            (None, &["*"], Api::Measurements, create, &[], "in the context 'tenant' measurements"),
            (None, &["events"], Api::Alarms, create, &[], "does not name 'alarms'"),
            (Some("7"), &["events"], Api::ManagedObjects, update, &[], "does not name 'managedobjects'"),
        ] {
            let why = subscription(source, apis).why_not(&message(api, action, "7"), above).unwrap_or_default();
            assert!(why.contains(reason) && why.is_empty() == reason.is_empty(), "{source:?} {apis:?} {api:?}: {why}");
        }
    }
}
