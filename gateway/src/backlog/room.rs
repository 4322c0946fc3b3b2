//! Room for a request's messages in a topic that is full: who or what has to go.

use super::Rejected;
use super::settings::{OnFull, Policy};
use super::staged::Touched;
use super::topic::{Consumer, Log};

/// Why a request's messages have no room in a batch.
#[derive(Debug)]
pub enum NoRoom {
    /// A topic is full, and nothing may go.
    Rejected(Rejected),
    /// What may go is not all on disk yet: the request has to begin a batch. One that does is never told so.
    Later,
}

/// Why a topic has no room for a request's messages.
pub(super) enum Short {
    /// It is full, and nothing may go.
    Full { used: u64, quota: u64 },
    /// See [`NoRoom::Later`].
    Later,
}

/// What a topic gives up.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Room {
    /// Everything below this id, whoever needs it,
    pub(super) below: u64,
    /// which makes so many bytes.
    pub(super) freed: u64,
    /// What these consumers need, and no other one.
    pub(super) parked: Vec<Box<str>>,
}

/// Makes room for `need` bytes of one request in `log`, of which a batch has `touched` something already.
pub(super) fn make(log: &Log, touched: Option<&Touched>, need: u64) -> Result<Room, Short> {
    let Policy { quota_bytes: quota, on_full, .. } = log.policy;
    let (appended, freed, cut) = touched.map_or((0, 0, 0), |touched| (touched.bytes, touched.freed, touched.evicted));
    let used = log.bytes - freed + appended;
    let missing = (used + need).saturating_sub(quota);
    if missing == 0 {
        return Ok(Room::default());
    }
    match on_full {
        OnFull::EvictOldest if need <= quota => {
            if let Some(room) = evict(log, cut, missing) {
                return Ok(room);
            }
            if touched.is_some() {
                return Err(Short::Later);
            }
        }
        OnFull::Park if need <= quota && touched.is_some() => return Err(Short::Later),
        OnFull::Park if need <= quota => {
            if let Some(room) = park(log, missing) {
                return Ok(room);
            }
        }
        _ => {}
    }
    Err(Short::Full { used, quota })
}

/// The oldest messages from `cut` on, just enough. `None`: all together are not.
fn evict(log: &Log, cut: u64, missing: u64) -> Option<Room> {
    let mut freed = 0;
    let last = log.waiting().skip_while(|(id, _)| *id < cut).find(|(_, len)| {
        freed += u64::from(*len);
        freed >= missing
    });
    Some(Room { below: last?.0 + 1, freed, parked: Vec::new() })
}

/// The consumers that lag most, until what only they need is enough. `None`: all together are not, as messages are held.
fn park(log: &Log, missing: u64) -> Option<Room> {
    let lagging = log.consumers.iter().filter_map(|(name, consumer)| Some((log.oldest(consumer)?, name, consumer)));
    let mut lagging: Vec<(u64, &Box<str>, &Consumer)> = lagging.collect();
    lagging.sort_unstable_by_key(|(oldest, name, _)| (*oldest, *name));
    let mut refs: Vec<u16> = log.entries.iter().map(|entry| entry.refs).collect();
    let mut room = Room::default();
    let mut freed = 0;
    for (_, name, consumer) in lagging {
        room.parked.push(name.clone());
        for (entry, refs) in log.entries.iter().zip(&mut refs).filter(|(entry, _)| consumer.needs(entry.id)) {
            *refs -= 1;
            freed += if *refs == 0 { u64::from(entry.len) } else { 0 };
        }
        if freed >= missing {
            return Some(room);
        }
    }
    None
}
