/// The API that a message belongs to.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Api {
    ManagedObjects,
    Measurements,
    Events,
    Alarms,
    Operations,
}

impl Api {
    /// By the name that subscriptions and notifications use.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "managedobjects" => Self::ManagedObjects,
            "measurements" => Self::Measurements,
            "events" | "eventsWithChildren" => Self::Events,
            "alarms" | "alarmsWithChildren" => Self::Alarms,
            "operations" => Self::Operations,
            _ => return None,
        })
    }

    /// Whether `key` is a property that every object of this API may have, rather than a fragment.
    pub(crate) fn is_standard(self, key: &[u8]) -> bool {
        match self {
            Self::ManagedObjects => matches!(
                key,
                b"id"
                    | b"self"
                    | b"name"
                    | b"type"
                    | b"owner"
                    | b"creationTime"
                    | b"lastUpdated"
                    | b"childDevices"
                    | b"childAssets"
                    | b"childAdditions"
                    | b"deviceParents"
                    | b"assetParents"
                    | b"additionParents"
            ),
            Self::Measurements => matches!(key, b"id" | b"self" | b"source" | b"time" | b"type"),
            Self::Events => is_standard_of_events(key),
            Self::Alarms => {
                is_standard_of_events(key)
                    || matches!(key, b"severity" | b"status" | b"count" | b"firstOccurrenceTime" | b"history")
            }
            Self::Operations => matches!(
                key,
                b"id"
                    | b"self"
                    | b"deviceId"
                    | b"deviceName"
                    | b"status"
                    | b"failureReason"
                    | b"creationTime"
                    | b"description"
                    | b"bulkOperationId"
                    | b"delivery"
                    | b"agentId"
            ),
        }
    }
}

fn is_standard_of_events(key: &[u8]) -> bool {
    matches!(key, b"id" | b"self" | b"source" | b"type" | b"time" | b"text" | b"creationTime" | b"lastUpdated")
}
