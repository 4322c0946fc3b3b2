//! What a consumer is owed: pure rules, without clock or I/O.
//!
//! [`Cursor`] is the durable half: what has been acknowledged. [`Group`] is the half that lives as long as anybody is
//! connected: its members, what each was handed, and what comes next. Seed 001: each message is acknowledged by itself, in
//! any order; at most a window of them is unacknowledged; after a reconnect everything unacknowledged comes again, in order.
//! Seed 000, "Shared consumer tokens": members divide the messages by their source. An exclusive consumer is a group of one.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::message::SourceId;

/// Messages that a group has looked at and that are not acknowledged. Beyond that a member whose window is full holds up the
/// others. It bounds the holes of a [`Cursor`] as well.
pub const LOOK_AHEAD: usize = 10_000;

/// What of a message's source its place in a group depends on. Sources of one slot always go the same way, so that order is
/// kept; 65,536 slots divide the load finely, and two bytes keep the list of a topic's messages small.
pub type Slot = u16;

/// The slot of a source. It is stored with messages, so it must never change.
#[must_use]
pub fn slot(source: &SourceId) -> Slot {
    let hash = hash(source.as_str());
    u16::try_from(hash >> 48).expect("invariant: 16 bits are left")
}

/// FNV-1a, with its bits mixed.
fn hash(text: &str) -> u64 {
    mixed(
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)),
    )
}

/// The finalizer of MurmurHash3: every bit of `hash` tells in every bit of the result.
fn mixed(mut hash: u64) -> u64 {
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    hash ^ (hash >> 33)
}

/// The durable position of a consumer in its topic: everything below `hi` is acknowledged, except the holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// One above the highest acknowledged id, or the id at which the consumer began.
    pub hi: u64,
    /// Ids below `hi` that are not acknowledged, ascending; at most a window of them.
    pub holes: Vec<u64>,
}

impl Cursor {
    /// A consumer that is owed everything from `hi` on.
    #[must_use]
    pub fn starting_at(hi: u64) -> Self {
        Self { hi, holes: Vec::new() }
    }

    /// Whether the consumer still needs message `id` of its topic.
    #[must_use]
    pub fn needs(&self, id: u64) -> bool {
        id >= self.hi || self.holes.binary_search(&id).is_ok()
    }

    /// The topic has given up everything below `below`.
    #[must_use]
    pub fn cut(&self, below: u64) -> Self {
        let holes = self.holes.iter().copied().filter(|id| *id >= below).collect();
        Self { hi: self.hi.max(below), holes }
    }

    /// Acknowledges `ids` (ascending, each still needed). `between` lists the topic's ids in a half-open range.
    #[must_use]
    pub fn settled<I>(&self, ids: &[u64], between: impl FnOnce(u64, u64) -> I) -> Self
    where
        I: Iterator<Item = u64>,
    {
        let Some(&highest) = ids.last() else { return self.clone() };
        let settled = |id: &u64| ids.binary_search(id).is_ok();
        let mut holes: Vec<u64> = self.holes.iter().copied().filter(|id| !settled(id)).collect();
        let hi = self.hi.max(highest + 1);
        holes.extend(between(self.hi, hi).filter(|id| !settled(id)));
        Self { hi, holes }
    }
}

/// A message of the topic, as far as the rules need it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its id.
    pub id: u64,
    /// See [`slot`].
    pub slot: Slot,
    /// Bytes of its stored form.
    pub len: u32,
}

/// Whether a consumer has one connection or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One.
    Exclusive,
    /// Any number, each with a share of the sources.
    Shared,
}

/// What the members of a group may have.
#[derive(Clone, Copy, Debug)]
pub struct GroupLimits {
    /// Messages that a member may have unacknowledged.
    pub window: usize,
    /// Members.
    pub members: usize,
}

/// Why nobody can join a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Busy {
    /// It has its one member.
    #[error("the consumer is connected already")]
    Exclusive,
    /// Shared and exclusive do not mix.
    #[error("clients are connected with tokens of the other kind, shared or exclusive")]
    Kind,
    /// A member has the name.
    #[error("a client of this name is connected already")]
    Name,
    /// There is no room for more members.
    #[error("too many clients share the consumer")]
    Full,
}

/// What became of an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The member was not handed this message, or has acknowledged it before.
    Unknown,
    /// It is acknowledged.
    Done {
        /// Whether other members may find something to do now.
        others: bool,
    },
}

/// Tells the members of a group apart.
pub type MemberId = u64;

/// The connected half of a consumer.
///
/// Each source belongs to the member that a rendezvous hash chooses, so that a member that comes or goes moves no source that
/// is not its own. A source moves to a new member only when nothing of it is in flight at the old one; until then its next
/// messages are held, and those of other sources pass.
#[derive(Clone, Debug)]
pub struct Group {
    kind: Kind,
    limits: GroupLimits,
    look_ahead: usize,
    /// Everything below was looked at: it is in `open`, or acknowledged.
    next: u64,
    members: BTreeMap<MemberId, Member>,
    joined: MemberId,
    open: BTreeMap<u64, Open>,
    /// The slots with messages in flight.
    flights: HashMap<Slot, Flight>,
    /// What the rendezvous hash said, until members change.
    owners: HashMap<Slot, MemberId>,
}

#[derive(Clone, Debug)]
struct Member {
    name: Box<str>,
    hash: u64,
    /// Messages that it may be handed, ascending.
    ready: BTreeSet<u64>,
    in_flight: usize,
}

/// A message that was looked at and is not acknowledged.
#[derive(Clone, Debug)]
struct Open {
    slot: Slot,
    len: u32,
    /// The member that was handed it.
    at: Option<MemberId>,
}

#[derive(Clone, Debug)]
struct Flight {
    /// The one member that has messages of the slot.
    member: MemberId,
    /// How many; at least one.
    count: usize,
    /// Messages for another member, which has to wait.
    held: BTreeSet<u64>,
}

impl Group {
    /// A group without members that is owed `holes` and everything from `next` on.
    #[must_use]
    pub fn new(kind: Kind, limits: GroupLimits, next: u64, holes: impl Iterator<Item = Listed>) -> Self {
        let open = holes.map(|Listed { id, slot, len }| (id, Open { slot, len, at: None })).collect();
        Self {
            kind,
            limits,
            look_ahead: LOOK_AHEAD,
            next,
            members: BTreeMap::new(),
            joined: 0,
            open,
            flights: HashMap::new(),
            owners: HashMap::new(),
        }
    }

    /// Whether nobody is connected.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// How many are connected.
    #[must_use]
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// Below it, everything that is not acknowledged is open.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.next
    }

    /// What was looked at and is not acknowledged, ascending.
    pub fn open(&self) -> impl Iterator<Item = Listed> + '_ {
        self.open.iter().map(|(id, Open { slot, len, .. })| Listed { id: *id, slot: *slot, len: *len })
    }

    /// A client connects with a token of `kind` under a name that is its own. Sources may move to it.
    pub fn join(&mut self, kind: Kind, name: &str) -> Result<MemberId, Busy> {
        if kind != self.kind {
            return Err(Busy::Kind);
        }
        if kind == Kind::Exclusive && !self.members.is_empty() {
            return Err(Busy::Exclusive);
        }
        if self.members.values().any(|member| *member.name == *name) {
            return Err(Busy::Name);
        }
        if self.members.len() >= self.limits.members {
            return Err(Busy::Full);
        }
        self.joined += 1;
        let member = Member { name: name.into(), hash: hash(name), ready: BTreeSet::new(), in_flight: 0 };
        self.members.insert(self.joined, member);
        self.deal();
        Ok(self.joined)
    }

    /// A client is gone: what it has not acknowledged goes to the others, older messages first. Returns that.
    pub fn leave(&mut self, member: MemberId) -> Vec<u64> {
        let mut returned = Vec::new();
        if self.members.remove(&member).is_none() {
            return returned;
        }
        for (id, open) in self.open.iter_mut().filter(|(_, open)| open.at == Some(member)) {
            open.at = None;
            returned.push(*id);
        }
        self.flights.retain(|_, flight| flight.member != member);
        self.deal();
        returned
    }

    /// Hands `member` its next messages, ascending: at most `most`, as its window allows, and `bytes` (but at least one).
    /// `list` lists the topic from an id on; what is found there for other members waits for them.
    pub fn claim<I>(&mut self, member: MemberId, most: usize, bytes: usize, list: impl FnOnce(u64) -> I) -> Vec<u64>
    where
        I: Iterator<Item = Listed>,
    {
        let Some(Member { in_flight, .. }) = self.members.get(&member) else { return Vec::new() };
        let most = most.min(self.limits.window - in_flight);
        self.look(member, most, list(self.next));
        let mut claimed = Vec::new();
        let mut room = bytes;
        let Some(Member { ready, in_flight, .. }) = self.members.get_mut(&member) else { return claimed };
        while claimed.len() < most
            && let Some(&id) = ready.first()
        {
            let open = self.open.get_mut(&id).expect("invariant: what is ready is open");
            if !claimed.is_empty() && room < open.len as usize {
                break;
            }
            room = room.saturating_sub(open.len as usize);
            ready.pop_first();
            open.at = Some(member);
            *in_flight += 1;
            self.flights
                .entry(open.slot)
                .or_insert_with(|| Flight { member, count: 0, held: BTreeSet::new() })
                .count += 1;
            claimed.push(id);
        }
        claimed
    }

    /// Looks at new messages until `member` has `most` to take or too many are open.
    fn look(&mut self, member: MemberId, most: usize, mut list: impl Iterator<Item = Listed>) {
        while self.open.len() < self.look_ahead
            && self.members.get(&member).is_some_and(|member| member.ready.len() < most)
            && let Some(Listed { id, slot, len }) = list.next()
        {
            self.next = id + 1;
            self.open.insert(id, Open { slot, len, at: None });
            self.place(id, slot);
        }
    }

    /// `member` has acknowledged message `id`.
    pub fn settle(&mut self, member: MemberId, id: u64) -> Settled {
        let Some(&Open { slot, at: Some(at), .. }) = self.open.get(&id) else { return Settled::Unknown };
        if at != member {
            return Settled::Unknown;
        }
        let full = self.open.len() >= self.look_ahead;
        self.open.remove(&id);
        let moved = self.land(member, slot);
        Settled::Done { others: full || moved }
    }

    /// Whether message `id` is in flight at `member`.
    #[must_use]
    pub fn holds(&self, member: MemberId, id: u64) -> bool {
        self.open.get(&id).is_some_and(|open| open.at == Some(member))
    }

    /// A message of `slot` is not in flight at `member` any more. True if that lets others have theirs.
    fn land(&mut self, member: MemberId, slot: Slot) -> bool {
        self.members.get_mut(&member).expect("invariant: what is in flight is at a member").in_flight -= 1;
        let flight = self.flights.get_mut(&slot).expect("invariant: the message was in flight");
        flight.count -= 1;
        if flight.count > 0 {
            return false;
        }
        let held = self.flights.remove(&slot).map(|flight| flight.held).unwrap_or_default();
        let moved = !held.is_empty();
        for id in held {
            self.place(id, slot);
        }
        moved
    }

    /// Something comes below what was looked at: it goes where its slot goes.
    pub fn offer(&mut self, Listed { id, slot, len }: Listed) {
        self.open.insert(id, Open { slot, len, at: None });
        self.place(id, slot);
    }

    /// The topic has given up all messages below `below` but those to `keep`, and those in flight, too: nobody waits for their
    /// acknowledgements. All members may find something to do now.
    pub fn give_up_below(&mut self, below: u64, keep: impl Fn(u64) -> bool) {
        self.next = self.next.max(below);
        let gone = self.open.range(..below).filter(|(id, _)| !keep(**id)).map(|(id, open)| (*id, open.at));
        let gone: Vec<_> = gone.collect();
        for (id, at) in gone {
            match at {
                Some(member) => drop(self.settle(member, id)),
                None => drop(self.give_up(id)),
            }
        }
    }

    /// The topic has given up message `id`. True if no member was handed it.
    pub fn give_up(&mut self, id: u64) -> bool {
        if id >= self.next {
            return true;
        }
        let Some(&Open { slot, at: None, .. }) = self.open.get(&id) else { return false };
        self.open.remove(&id);
        if let Some(flight) = self.flights.get_mut(&slot) {
            flight.held.remove(&id);
        }
        for member in self.members.values_mut() {
            member.ready.remove(&id);
        }
        true
    }

    /// Gives everything that is not in flight to the members anew.
    fn deal(&mut self) {
        self.owners.clear();
        self.members.values_mut().for_each(|member| member.ready.clear());
        self.flights.values_mut().for_each(|flight| flight.held.clear());
        let waiting: Vec<_> =
            self.open.iter().filter(|(_, open)| open.at.is_none()).map(|(id, open)| (*id, open.slot)).collect();
        for (id, slot) in waiting {
            self.place(id, slot);
        }
    }

    /// Puts an open message where its source belongs.
    fn place(&mut self, id: u64, slot: Slot) {
        // Without members it waits for the first one to join.
        let Some(owner) = self.owner(slot) else { return };
        match self.flights.get_mut(&slot) {
            Some(flight) if flight.member != owner => &mut flight.held,
            _ => &mut self.members.get_mut(&owner).expect("invariant: owners are members").ready,
        }
        .insert(id);
    }

    /// The member whose name and the slot have the highest common hash.
    fn owner(&mut self, slot: Slot) -> Option<MemberId> {
        if let Some(owner) = self.owners.get(&slot) {
            return Some(*owner);
        }
        let rank = |member: &Member| mixed(member.hash ^ mixed(u64::from(slot) + 1));
        let (owner, _) = self.members.iter().max_by_key(|(_, member)| (rank(member), &member.name))?;
        self.owners.insert(slot, *owner);
        Some(*owner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use proptest::prelude::*;

    fn settled(cursor: &Cursor, ids: &[u64], topic: &[u64]) -> Cursor {
        cursor.settled(ids, |from, to| topic.iter().copied().filter(move |id| (from..to).contains(id)))
    }

    #[test]
    fn acknowledging_in_order_leaves_no_holes() {
        let topic = [3, 7, 8];
        let cursor = settled(&Cursor::starting_at(2), &[3, 7], &topic);
        assert_eq!(cursor, Cursor { hi: 8, holes: vec![] });
    }

    #[test]
    fn skipping_leaves_holes_and_later_closes_them() {
        let topic = [3, 7, 8, 9];
        let cursor = settled(&Cursor::starting_at(2), &[8], &topic);
        assert_eq!(cursor, Cursor { hi: 9, holes: vec![3, 7] });
        assert!(cursor.needs(3) && !cursor.needs(8) && cursor.needs(9));
        assert_eq!(settled(&cursor, &[3, 9], &topic), Cursor { hi: 10, holes: vec![7] });
    }

    const NONE: [u64; 0] = [];
    const LIMITS: GroupLimits = GroupLimits { window: 2, members: 4 };

    /// Messages 1, 2, 3 … of the sources given, each of ten bytes.
    fn topic(sources: &[&str]) -> Vec<Listed> {
        (1..).zip(sources).map(|(id, source)| Listed { id, slot: slot(&SourceId::from(*source)), len: 10 }).collect()
    }

    fn from(topic: &[Listed]) -> impl FnOnce(u64) -> std::vec::IntoIter<Listed> {
        |next| topic.iter().copied().filter(|listed| listed.id >= next).collect::<Vec<_>>().into_iter()
    }

    fn group(kind: Kind, members: &[&str]) -> (Group, Vec<MemberId>) {
        let mut group = Group::new(kind, LIMITS, 1, std::iter::empty());
        let members = members.iter().map(|name| group.join(kind, name).unwrap()).collect();
        (group, members)
    }

    /// A source that belongs to the `nth` member of these names.
    fn source_of(names: &[&str], nth: usize) -> String {
        let (mut group, members) = group(Kind::Shared, names);
        (1000..)
            .map(|id: u64| id.to_string())
            .find(|id| group.owner(slot(&SourceId::from(id.as_str()))) == Some(members[nth]))
            .unwrap()
    }

    #[test]
    fn the_window_stops_delivery_until_an_acknowledgement() {
        let topic = topic(&["1", "2", "1", "2"]);
        let (mut group, members) = group(Kind::Exclusive, &["a"]);
        let a = members[0];
        assert_eq!(group.claim(a, 10, 1000, from(&topic)), [1, 2]);
        assert_eq!(group.claim(a, 10, 1000, from(&topic)), NONE);
        assert_eq!(group.settle(a, 2), Settled::Done { others: false });
        assert_eq!(group.settle(a, 2), Settled::Unknown);
        assert_eq!(group.settle(a, 77), Settled::Unknown);
        assert_eq!(group.settle(a + 1, 1), Settled::Unknown);
        assert_eq!(group.claim(a, 10, 1000, from(&topic)), [3]);
    }

    #[test]
    fn holes_come_first_and_a_page_is_bounded_in_messages_and_bytes() {
        let topic = topic(&["1"; 9]);
        let holes = [topic[2], topic[6]];
        let limits = GroupLimits { window: 9, ..LIMITS };
        let mut group = Group::new(Kind::Exclusive, limits, 8, holes.into_iter());
        let a = group.join(Kind::Exclusive, "a").unwrap();
        assert_eq!(group.claim(a, 1, 1000, from(&topic)), [3]);
        assert_eq!(group.claim(a, 9, 29, from(&topic)), [7, 8]);
        assert_eq!(group.claim(a, 9, 0, from(&topic)), [9], "one always fits");
    }

    #[test]
    fn an_exclusive_group_has_one_member_and_a_shared_one_no_two_of_a_name() {
        let (mut exclusive, _) = group(Kind::Exclusive, &["a"]);
        assert_eq!(exclusive.join(Kind::Exclusive, "b"), Err(Busy::Exclusive));
        assert_eq!(exclusive.join(Kind::Shared, "b"), Err(Busy::Kind));
        let (mut shared, members) = group(Kind::Shared, &["a", "b", "c"]);
        assert_eq!(shared.join(Kind::Exclusive, "d"), Err(Busy::Kind));
        assert_eq!(shared.join(Kind::Shared, "b"), Err(Busy::Name));
        shared.join(Kind::Shared, "d").unwrap();
        assert_eq!(shared.join(Kind::Shared, "e"), Err(Busy::Full));
        shared.leave(members[1]);
        assert_ne!(shared.join(Kind::Shared, "b"), Ok(members[1]), "another connection");
    }

    #[test]
    fn a_source_moves_to_a_new_member_when_nothing_of_it_is_in_flight() {
        let moving = source_of(&["a", "b"], 1);
        let staying = source_of(&["a", "b"], 0);
        let topic = topic(&[&moving, &moving, &staying, &moving]);
        let (mut group, members) = group(Kind::Shared, &["a"]);
        let a = members[0];
        assert_eq!(group.claim(a, 1, 1000, from(&topic)), [1]);
        let b = group.join(Kind::Shared, "b").unwrap();
        assert_eq!(group.claim(a, 9, 1000, from(&topic)), [3], "the other source goes on");
        assert_eq!(group.claim(b, 9, 1000, from(&topic)), NONE);
        assert_eq!(group.settle(a, 3), Settled::Done { others: false });
        assert_eq!(group.settle(a, 1), Settled::Done { others: true });
        assert_eq!(group.claim(b, 9, 1000, from(&topic)), [2, 4]);
    }

    #[test]
    fn what_a_member_leaves_behind_comes_before_what_is_newer() {
        let source = source_of(&["a", "b"], 1);
        let topic = topic(&[source.as_str(); 5]);
        let (mut group, members) = group(Kind::Shared, &["a", "b"]);
        let [a, b] = members[..] else { unreachable!() };
        assert_eq!(group.claim(a, 9, 1000, from(&topic)), NONE);
        assert_eq!(group.claim(b, 9, 1000, from(&topic)), [1, 2]);
        assert_eq!(group.settle(b, 2), Settled::Done { others: false });
        group.leave(b);
        assert_eq!(group.claim(a, 9, 1000, from(&topic)), [1, 3]);
        assert_eq!(group.settle(b, 1), Settled::Unknown, "gone");
    }

    #[test]
    fn a_silent_member_harms_no_other_until_too_much_is_open() {
        let (slow, fast) = (source_of(&["a", "b"], 0), source_of(&["a", "b"], 1));
        let sources: Vec<_> = (0..30).map(|n| if n % 2 == 0 { slow.as_str() } else { &fast }).collect();
        let topic = topic(&sources);
        let (mut group, members) = group(Kind::Shared, &["a", "b"]);
        let [a, b] = members[..] else { unreachable!() };
        group.look_ahead = 10;
        assert_eq!(group.claim(a, 9, 1000, from(&topic)), [1, 3]);
        let mut done = Vec::new();
        while let Some(id) = group.claim(b, 1, 1000, from(&topic)).first() {
            done.push(*id);
            group.settle(b, *id);
        }
        // Ten are open, all of them the slow member's: 1, 3, … 19.
        assert_eq!(done, [2, 4, 6, 8, 10, 12, 14, 16, 18]);
        assert_eq!(group.settle(a, 1), Settled::Done { others: true });
        assert_eq!(group.claim(b, 1, 1000, from(&topic)), [20]);
    }

    #[test]
    fn a_message_that_the_topic_gave_up_is_not_handed_out() {
        let topic = topic(&["1"; 6]);
        let (mut group, members) = group(Kind::Exclusive, &["a"]);
        let a = members[0];
        assert_eq!(group.claim(a, 9, 1, from(&topic)), [1]);
        assert!(!group.give_up(1), "it is with the member");
        assert!(group.give_up(2), "looked at, and waiting");
        assert!(!group.give_up(2));
        assert!(group.give_up(3), "not looked at");
        assert_eq!(group.claim(a, 9, 1000, from(&topic[3..])), [4]);
        assert_eq!(group.settle(a, 1), Settled::Done { others: false });
        assert_eq!(group.claim(a, 9, 1000, from(&topic[3..])), [5]);
    }

    #[test]
    fn what_the_topic_gave_up_is_not_waited_for() {
        let topic = topic(&["1"; 9]);
        let (mut group, members) = group(Kind::Exclusive, &["a"]);
        let a = members[0];
        assert_eq!(group.claim(a, 9, 1000, from(&topic)), [1, 2]);
        group.give_up_below(2, |_| false);
        assert!(!group.holds(a, 1) && group.holds(a, 2) && !group.holds(a, 3));
        assert_eq!(group.settle(a, 1), Settled::Unknown, "a late acknowledgement");
        assert_eq!(group.claim(a, 9, 1000, from(&topic)), [3], "there is room in the window");
        group.give_up_below(8, |_| false);
        assert_eq!(group.claim(a, 9, 1000, from(&topic)), [8, 9]);
        group.offer(Listed { id: 7, slot: 0, len: 0 });
        group.give_up_below(9, |id| id == 7);
        assert_eq!(group.claim(a, 9, 1000, from(&topic)), [7], "in flight is 9");
        let cursor = Cursor { hi: 5, holes: vec![1, 3] };
        assert_eq!(cursor.cut(3), Cursor { hi: 5, holes: vec![3] });
        assert_eq!(cursor.cut(7), Cursor { hi: 7, holes: vec![] });
    }

    #[test]
    fn sources_are_spread_evenly_and_only_those_of_a_member_that_goes_move() {
        let names = ["instance1", "instance2", "instance3", "instance4"];
        let (mut group, members) = group(Kind::Shared, &names);
        let slots: Vec<_> = (1000..9000).map(|id: u32| slot(&SourceId::from(id.to_string().as_str()))).collect();
        let before: Vec<_> = slots.iter().map(|slot| group.owner(*slot).unwrap()).collect();
        for member in &members {
            let share = before.iter().filter(|owner| *owner == member).count();
            assert!((1800..2200).contains(&share), "{share} of 8000 in four shares");
        }
        group.leave(members[2]);
        for (slot, before) in slots.iter().zip(&before) {
            let now = group.owner(*slot).unwrap();
            assert!(now == *before || *before == members[2]);
        }
        // The same name gets the same sources.
        let again = group.join(Kind::Shared, names[2]).unwrap();
        for (slot, before) in slots.iter().zip(&before) {
            let now = group.owner(*slot).unwrap();
            assert_eq!(now == again, *before == members[2]);
        }
    }

    // Slots are stored: another value for a source would break the order of what waits on disk.
    #[test]
    fn slots_stay_what_they_are() {
        assert_eq!(["1", "1001", "4711"].map(|id| slot(&SourceId::from(id))), [31_800, 48_591, 40_669]);
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Append(u8),
        Join(u8),
        Leave(prop::sample::Index),
        Claim(prop::sample::Index, usize),
        Acknowledge(prop::sample::Index, prop::sample::Index),
        GiveUp(prop::sample::Index),
        Restart,
    }

    fn step() -> impl Strategy<Value = Step> {
        let any = any::<prop::sample::Index>;
        prop_oneof![
            6 => (0u8..8).prop_map(Step::Append),
            2 => (0u8..5).prop_map(Step::Join),
            1 => any().prop_map(Step::Leave),
            8 => (any(), 1usize..4).prop_map(|(member, most)| Step::Claim(member, most)),
            8 => (any(), any()).prop_map(|(member, message)| Step::Acknowledge(member, message)),
            1 => any().prop_map(Step::GiveUp),
            1 => Just(Step::Restart),
        ]
    }

    /// A topic, the one consumer of it, and what its connections have seen.
    struct Scene {
        topic: Vec<Listed>,
        cursor: Cursor,
        group: Group,
        limits: GroupLimits,
        /// What each connection has and did not acknowledge, and the newest id of each slot that it saw.
        connections: BTreeMap<MemberId, (BTreeSet<u64>, HashMap<Slot, u64>)>,
        /// Or given up by the topic.
        acknowledged: BTreeSet<u64>,
        /// Who was told, since it last found nothing, that there may be something to claim.
        woken: BTreeSet<MemberId>,
    }

    const BOUND: usize = 12;

    impl Scene {
        fn new(window: usize) -> Self {
            let limits = GroupLimits { window, members: 4 };
            let cursor = Cursor::starting_at(1);
            let group = Group::new(Kind::Shared, limits, 1, std::iter::empty());
            let mut scene = Self {
                topic: Vec::new(),
                cursor,
                group,
                limits,
                connections: BTreeMap::new(),
                acknowledged: BTreeSet::new(),
                woken: BTreeSet::new(),
            };
            scene.restart();
            scene
        }

        fn restart(&mut self) {
            let holes = self.topic.iter().filter(|listed| self.cursor.holes.contains(&listed.id)).copied();
            self.group = Group::new(Kind::Shared, self.limits, self.cursor.hi, holes);
            self.group.look_ahead = BOUND;
            self.connections.clear();
        }

        fn member(&self, index: prop::sample::Index) -> Option<MemberId> {
            let members: Vec<_> = self.connections.keys().copied().collect();
            (!members.is_empty()).then(|| members[index.index(members.len())])
        }

        fn claim(&mut self, member: MemberId, most: usize) -> Result<usize, TestCaseError> {
            let claimed = self.group.claim(member, most, 25, from(&self.topic));
            prop_assert!(claimed.len() <= most.min(2));
            if claimed.is_empty() {
                self.woken.remove(&member);
            }
            for id in &claimed {
                let slot = self.topic.iter().find(|listed| listed.id == *id).unwrap().slot;
                prop_assert!(!self.acknowledged.contains(id), "acknowledged, and came again");
                prop_assert!(self.connections.values().all(|(has, _)| !has.contains(id)), "in two shares");
                let (has, seen) = self.connections.get_mut(&member).unwrap();
                prop_assert!(seen.insert(slot, *id).is_none_or(|before| before < *id), "a connection went back");
                has.insert(*id);
                // All that is older of the source is acknowledged or with the same member.
                let older = self.topic.iter().filter(|listed| listed.slot == slot && listed.id < *id);
                for older in older.filter(|older| !self.acknowledged.contains(&older.id)) {
                    prop_assert!(self.connections[&member].0.contains(&older.id), "out of order");
                }
            }
            prop_assert!(self.connections[&member].0.len() <= self.limits.window);
            Ok(claimed.len())
        }

        fn acknowledge(&mut self, member: MemberId, id: u64) -> Result<(), TestCaseError> {
            prop_assert!(self.connections.get_mut(&member).unwrap().0.remove(&id));
            self.woken.insert(member);
            match self.group.settle(member, id) {
                Settled::Unknown => prop_assert!(false, "it was with the member"),
                Settled::Done { others: true } => self.wake(),
                Settled::Done { others: false } => {}
            }
            prop_assert_eq!(self.group.settle(member, id), Settled::Unknown);
            let ids: Vec<_> = self.topic.iter().map(|listed| listed.id).collect();
            self.cursor = settled(&self.cursor, &[id], &ids);
            prop_assert!(self.cursor.holes.len() <= BOUND, "too many holes");
            self.acknowledged.insert(id);
            Ok(())
        }

        fn wake(&mut self) {
            self.woken.extend(self.connections.keys());
        }

        fn run(&mut self, step: Step) -> Result<(), TestCaseError> {
            match step {
                Step::Append(source) => {
                    let id = self.topic.last().map_or(1, |listed| listed.id) + u64::from(source) + 1;
                    self.topic.push(Listed { id, slot: u16::from(source), len: 10 });
                    self.wake();
                }
                Step::Join(name) => match self.group.join(Kind::Shared, &format!("member{name}")) {
                    Ok(member) => {
                        prop_assert!(self.connections.insert(member, Default::default()).is_none());
                        self.wake();
                    }
                    Err(busy) => prop_assert!(matches!(busy, Busy::Name | Busy::Full)),
                },
                Step::Leave(index) => {
                    if let Some(member) = self.member(index) {
                        self.group.leave(member);
                        self.connections.remove(&member);
                        self.wake();
                    }
                }
                Step::Claim(index, most) => {
                    if let Some(member) = self.member(index) {
                        self.claim(member, most)?;
                    }
                }
                Step::Acknowledge(index, message) => {
                    if let Some(member) = self.member(index)
                        && !self.connections[&member].0.is_empty()
                    {
                        let has: Vec<_> = self.connections[&member].0.iter().copied().collect();
                        self.acknowledge(member, has[message.index(has.len())])?;
                    }
                }
                Step::GiveUp(index) if !self.topic.is_empty() => {
                    let below = self.topic[index.index(self.topic.len())].id;
                    self.group.give_up_below(below, |_| false);
                    self.cursor = self.cursor.cut(below);
                    self.acknowledged.extend(self.topic.iter().map(|listed| listed.id).filter(|id| *id < below));
                    for (has, _) in self.connections.values_mut() {
                        has.retain(|id| *id >= below);
                    }
                    self.wake();
                }
                Step::GiveUp(_) => {}
                Step::Restart => self.restart(),
            }
            for listed in &self.topic {
                prop_assert_eq!(self.cursor.needs(listed.id), !self.acknowledged.contains(&listed.id));
            }
            for member in self.connections.keys().filter(|member| !self.woken.contains(member)) {
                let found = self.group.clone().claim(*member, 1, 1, from(&self.topic));
                prop_assert!(found.is_empty(), "{found:?} waits, and nobody said so");
            }
            Ok(())
        }

        /// Everybody takes and acknowledges until nothing more comes: then all is acknowledged, and no window has leaked.
        fn finish(mut self) -> Result<(), TestCaseError> {
            self.run(Step::Join(0))?;
            loop {
                let mut idle = true;
                let members: Vec<_> = self.connections.keys().copied().collect();
                for member in &members {
                    while self.claim(*member, 3)? > 0 {}
                    for id in self.connections[member].0.clone() {
                        self.acknowledge(*member, id)?;
                        idle = false;
                    }
                }
                if idle {
                    break;
                }
            }
            prop_assert_eq!(self.acknowledged.len(), self.topic.len(), "lost");
            prop_assert!(self.group.open.is_empty() && self.group.flights.is_empty());
            prop_assert!(self.group.members.values().all(|member| member.in_flight == 0));
            prop_assert!(self.cursor.holes.is_empty());
            Ok(())
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

        /// Clients that join, leave, take and acknowledge in any order, and restarts: no message is lost, none is in two
        /// shares at once, the order of each source is kept, windows and holes stay bounded, and nobody sleeps over a message.
        #[test]
        fn the_members_of_a_group_share_a_topic(
            steps in prop::collection::vec(step(), 1..150),
            window in 1usize..6,
        ) {
            let mut scene = Scene::new(window);
            for step in steps {
                scene.run(step)?;
            }
            scene.finish()?;
        }

        /// An exclusive consumer gets its whole topic in order, whatever it does not acknowledge again after each connection.
        #[test]
        fn an_exclusive_consumer_gets_everything_in_order(
            slots in prop::collection::vec(0u16..5, 1..60),
            steps in prop::collection::vec((0u8..3, any::<prop::sample::Index>()), 1..120),
            window in 1usize..8,
        ) {
            let topic: Vec<_> = (1..).zip(slots).map(|(id, slot)| Listed { id, slot, len: 10 }).collect();
            let ids: Vec<_> = topic.iter().map(|listed| listed.id).collect();
            let mut cursor = Cursor::starting_at(1);
            let connect = |cursor: &Cursor| {
                let holes = cursor.holes.iter().map(|id| topic[usize::try_from(*id).unwrap() - 1]);
                let limits = GroupLimits { window, members: 1 };
                let mut group = Group::new(Kind::Exclusive, limits, cursor.hi, holes.collect::<Vec<_>>().into_iter());
                let member = group.join(Kind::Exclusive, "").unwrap();
                (group, member)
            };
            let (mut group, mut member) = connect(&cursor);
            let mut sent: Vec<u64> = Vec::new();
            let mut newest = 0;
            for (step, index) in steps {
                match step {
                    0 => {
                        let owed: Vec<_> = ids.iter().copied()
                            .filter(|id| cursor.needs(*id) && *id > newest).take(3.min(window - sent.len())).collect();
                        let claimed = group.claim(member, 3, 1000, from(&topic));
                        prop_assert_eq!(&claimed, &owed);
                        newest = claimed.last().copied().unwrap_or(newest);
                        sent.extend(claimed);
                    }
                    1 if !sent.is_empty() => {
                        let id = sent.remove(index.index(sent.len()));
                        prop_assert_eq!(group.settle(member, id), Settled::Done { others: false });
                        cursor = settled(&cursor, &[id], &ids);
                    }
                    _ => {
                        (group, member) = connect(&cursor);
                        sent.clear();
                        newest = 0;
                    }
                }
            }
        }
    }
}
