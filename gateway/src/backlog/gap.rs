//! Gap messages: where it is switched on, a consumer is told what it missed by one ordinary message, which it acknowledges.
//!
//! A gap takes the place and the id of the newest message that it stands for, so it comes before what follows. It counts to no
//! quota. While it was not handed out it grows, so that a consumer has at most one more than its connections have in flight.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::missed::Reason;
use crate::consumer::{Listed, Slot};
use crate::message::{self, Action, Tenant};
use crate::store::{Statement, StoreError, Value, Writing};
use crate::time;

/// Marks the id of a gap where ids of messages and gaps are handed around together: a late acknowledgement of the message that
/// was lost is none of the gap.
const GAP: u64 = 1 << 63;
/// In a shared consumer, the gap goes where the sources of this slot go.
const SLOT: Slot = 0;

/// The `message-id` of what is handed out as `id`.
#[must_use]
pub fn message_id(id: u64) -> u64 {
    id & !GAP
}

/// Whether a gap is handed out as `id`.
pub(super) fn is_gap(id: u64) -> bool {
    id & GAP != 0
}

/// What a consumer missed and has not acknowledged. Times of day, ms since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gap {
    /// Why the newest of the messages went.
    pub(super) reason: Reason,
    pub(super) missed: u64,
    pub(super) first_ms: i64,
    pub(super) last_ms: i64,
}

impl Gap {
    /// This, and then another one.
    pub(super) fn and(self, newer: Self) -> Self {
        Self {
            reason: newer.reason,
            missed: self.missed + newer.missed,
            first_ms: self.first_ms.min(newer.first_ms),
            last_ms: self.last_ms.max(newer.last_ms),
        }
    }

    /// Its stored form, as if it were stored.
    fn form(&self, tenant: &Tenant, consumer: &str) -> Bytes {
        let Self { reason, missed, first_ms, last_ms } = *self;
        let mut body = format!(r#"{{"missed":{missed},"from":""#).into_bytes();
        time::write(first_ms, &mut body);
        body.extend_from_slice(br#"","to":""#);
        time::write(last_ms, &mut body);
        body.extend_from_slice(format!(r#"","reason":"{}"}}"#, reason.as_str()).as_bytes());
        message::form(tenant, "gap", consumer, Action::Create, "", &body)
    }
}

/// The gaps of one consumer, by id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Gaps(BTreeMap<u64, Gap>);

impl Gaps {
    pub(super) fn contains(&self, id: u64) -> bool {
        self.0.contains_key(&id)
    }

    /// As a group takes them.
    pub(super) fn listed(&self) -> impl Iterator<Item = Listed> + '_ {
        self.0.keys().map(|id| Listed { id: *id, slot: SLOT, len: 0 })
    }

    /// Marks those of `ids`, which a group handed out, that are gaps.
    pub(super) fn mark(&self, ids: &mut [u64]) {
        if !self.0.is_empty() {
            ids.iter_mut().filter(|id| self.contains(**id)).for_each(|id| *id |= GAP);
        }
    }

    /// The stored forms of those of `ids` that are gaps.
    pub(super) fn forms(&self, ids: &[u64], tenant: &Tenant, consumer: &str) -> Vec<(u64, Bytes)> {
        let gaps = ids.iter().filter(|id| is_gap(**id));
        gaps.filter_map(|id| Some((*id, self.0.get(&message_id(*id))?.form(tenant, consumer)))).collect()
    }

    /// Forgets those of `ids` that are gaps and leaves the others. True if there were any.
    pub(super) fn acknowledge(&mut self, ids: &mut Vec<u64>) -> bool {
        let before = self.0.len();
        ids.retain(|id| {
            if is_gap(*id) {
                self.0.remove(&message_id(*id));
            }
            !is_gap(*id)
        });
        self.0.len() < before
    }

    /// The newest.
    pub(super) fn last(&self) -> Option<u64> {
        self.0.last_key_value().map(|(id, _)| *id)
    }

    /// Adds a gap, which swallows the one at `grows`. Its id is `id`, or that of the other one if that is newer.
    pub(super) fn add(&mut self, id: u64, gap: Gap, grows: Option<u64>) {
        let before = grows.and_then(|before| self.0.remove_entry(&before));
        let (id, gap) = before.map_or((id, gap), |(before_id, before)| (before_id.max(id), before.and(gap)));
        self.0.insert(id, gap);
    }

    pub(super) fn insert(&mut self, id: u64, gap: Gap) {
        self.0.insert(id, gap);
    }

    /// Those of `self` that `before` does not have.
    pub(super) fn new_since(&self, before: &Self) -> impl Iterator<Item = (u64, Gap)> {
        self.0.iter().filter(|(id, gap)| before.0.get(id) != Some(gap)).map(|(id, gap)| (*id, *gap))
    }
}

/// Rows that change with gaps.
#[derive(Default)]
pub(super) struct Rows {
    gone: Vec<(i64, u64)>,
    new: Vec<(i64, u64, &'static str, u64, i64, i64)>,
}

impl Rows {
    /// The gaps of a consumer change.
    pub(super) fn add(&mut self, consumer: i64, before: &Gaps, after: &Gaps) {
        self.gone.extend(before.new_since(after).map(|(id, _)| (consumer, id)));
        let row = |(id, Gap { reason, missed, first_ms, last_ms })| {
            (consumer, id, reason.as_str(), missed, first_ms, last_ms)
        };
        self.new.extend(after.new_since(before).map(row));
    }

    pub(super) fn statements(self) -> impl Iterator<Item = Statement> {
        let delete = "DELETE FROM gap WHERE (consumer, id) IN (SELECT value->>0, value->>1 FROM json_each(?))";
        let insert = "INSERT INTO gap(consumer, id, reason, missed, first, last)
                      SELECT value->>0, value->>1, value->>2, value->>3, value->>4, value->>5 FROM json_each(?)";
        let gone = (!self.gone.is_empty()).then(|| (delete, serde_json::to_string(&self.gone)));
        let new = (!self.new.is_empty()).then(|| (insert, serde_json::to_string(&self.new)));
        [gone, new].into_iter().flatten().map(|(sql, rows)| {
            let rows = rows.expect("invariant: numbers and texts always serialize");
            Statement { sql, values: vec![Value::Text(rows)] }
        })
    }
}

/// The row id of the topic, the consumer's name, and the gap of each row.
pub(super) async fn load(writing: &mut Writing) -> Result<Vec<(i64, String, u64, Gap)>, StoreError> {
    let rows: Vec<(i64, String, i64, String, i64, i64, i64)> = sqlx::query_as(
        "SELECT topic, name, gap.id, reason, missed, first, last FROM gap JOIN consumer ON gap.consumer = consumer.id",
    )
    .fetch_all(writing.connection())
    .await?;
    let gap = |(topic, name, id, reason, missed, first_ms, last_ms): (_, _, i64, String, i64, _, _)| {
        let reason = reason.parse().map_err(|error: &str| sqlx::Error::Decode(error.into()))?;
        Ok((topic, name, id.cast_unsigned(), Gap { reason, missed: missed.cast_unsigned(), first_ms, last_ms }))
    };
    rows.into_iter().map(gap).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gap(reason: Reason, missed: u64, first_ms: i64, last_ms: i64) -> Gap {
        Gap { reason, missed, first_ms, last_ms }
    }

    #[test]
    fn a_gap_reads_like_any_message() {
        let mut gaps = Gaps::default();
        gaps.add(7, gap(Reason::Expired, 3, 1_630_672_141_664, 1_630_672_200_000), None);
        let mut ids = [6, 7];
        gaps.mark(&mut ids);
        assert_eq!(ids.map(message_id), [6, 7]);
        let forms = gaps.forms(&ids, &"t".into(), "sub");
        assert_eq!(forms.len(), 1);
        assert_eq!(
            forms[0],
            (
                ids[1],
                Bytes::from_static(
                    b"/t/gap/sub\nCREATE\n\n{\"missed\":3,\"from\":\"2021-09-03T12:29:01.664Z\",\"to\":\"2021-09-03T12:30:00.000Z\",\"reason\":\"expired\"}"
                )
            )
        );
        let mut acknowledged = vec![6, 7];
        assert!(!gaps.acknowledge(&mut acknowledged), "the message that was lost, late");
        assert_eq!(acknowledged, [6, 7]);
        let mut acknowledged = ids.to_vec();
        assert!(gaps.acknowledge(&mut acknowledged));
        assert_eq!((acknowledged, gaps), (vec![6], Gaps::default()));
    }

    #[test]
    fn a_gap_grows_at_its_newer_end_and_rows_follow() {
        let mut before = Gaps::default();
        before.add(3, gap(Reason::Expired, 1, 10, 20), None);
        before.add(5, gap(Reason::Expired, 2, 30, 40), None);
        let mut after = before.clone();
        after.add(9, gap(Reason::Evicted, 4, 50, 60), Some(5));
        let mut rows = Rows::default();
        rows.add(77, &before, &after);
        assert_eq!(rows.gone, [(77, 5)]);
        assert_eq!(rows.new, [(77, 9, "evicted", 6, 30, 60)]);
        assert_eq!(rows.statements().count(), 2);
        // What is left behind stays where it is.
        after.add(8, gap(Reason::Parked, 1, 70, 70), Some(9));
        let mut rows = Rows::default();
        rows.add(77, &before, &after);
        assert_eq!((rows.gone, rows.new), (vec![(77, 5)], vec![(77, 9, "parked", 7, 30, 70)]));
    }
}
