//! What consumers did not get, and why.

use std::str::FromStr;

use crate::telemetry::messages_dropped;

/// Why messages are gone that a consumer had not acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// They were older than the time to live.
    Expired,
    /// They were the oldest, and there had to be room.
    Evicted,
    /// The consumer lagged, and there had to be room.
    Parked,
}

impl Reason {
    /// As in metrics, gap messages and rows.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Evicted => "evicted",
            Self::Parked => "parked",
        }
    }
}

impl FromStr for Reason {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Expired, Self::Evicted, Self::Parked]
            .into_iter()
            .find(|reason| reason.as_str() == text)
            .ok_or("none of expired, evicted and parked")
    }
}

/// Messages that a consumer had not acknowledged and that are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Missed {
    pub(super) reason: Reason,
    pub(super) messages: u64,
    pub(super) bytes: u64,
    /// The oldest and the newest of them.
    pub(super) first: u64,
    pub(super) last: u64,
}

impl Missed {
    /// Two lots that go for the same reason.
    pub(super) fn both(one: Option<Self>, other: Option<Self>) -> Option<Self> {
        let (Some(one), Some(other)) = (one, other) else { return one.or(other) };
        Some(Self {
            messages: one.messages + other.messages,
            bytes: one.bytes + other.bytes,
            first: one.first.min(other.first),
            last: one.last.max(other.last),
            ..one
        })
    }
}

/// Counts messages that consumers miss.
pub(super) fn count(reason: Reason, messages: u64) {
    if messages > 0 {
        messages_dropped(reason.as_str()).increment(messages);
    }
}
