//! What the demo counts, and what it concludes from it. Pure: no sockets, no clock.
//!
//! Producers tell what they sent and what was accepted, consumers tell what they received and acknowledged. Each message is known
//! by its device and its time, which no filter and no transform takes away; so both sides are counted by themselves.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// What devices say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Temperature,
    Humidity,
    Door,
    Overheat,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Temperature, Self::Humidity, Self::Door, Self::Overheat];

    /// What a device says `number`th: of ten messages six temperatures, two of humidity, an event and an alarm.
    pub(super) fn of(number: u64) -> Self {
        match number % 10 {
            3 | 7 => Self::Humidity,
            5 => Self::Door,
            9 => Self::Overheat,
            _ => Self::Temperature,
        }
    }

    /// The topic whose subscription wants it.
    pub(super) fn topic(self) -> Option<Topic> {
        match self {
            Self::Temperature => Some(Topic::Temperatures),
            Self::Humidity => None,
            Self::Door | Self::Overheat => Some(Topic::Watch),
        }
    }
}

/// The two topics of the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Topic {
    /// Measurements of one type, without the fragments that nobody needs, for one consumer.
    Temperatures,
    /// All events and alarms of the tenant, for two clients that share them.
    Watch,
}

impl Topic {
    pub(super) const ALL: [Self; 2] = [Self::Temperatures, Self::Watch];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Temperatures => "temperatures",
            Self::Watch => "watch",
        }
    }
}

/// The id of a device, and the time of the message in milliseconds since 1970.
pub(super) type Key = (u64, i64);

struct Sent {
    kind: Kind,
    /// When the last attempt to post it began.
    at: Instant,
    accepted: bool,
    delivered: bool,
}

/// What was counted of a topic.
#[derive(Debug, Default)]
pub(super) struct Counted {
    /// Messages that are on the disk of the gateway, by the ids that it gave them.
    ids: HashSet<u64>,
    /// The newest message of each device.
    newest: HashMap<u64, i64>,
    /// Sent messages that came at least once.
    pub(super) delivered: u64,
    /// Frames of messages that had come before.
    pub(super) redelivered: u64,
    /// Messages that were stored a second time, since their first POST was not answered.
    pub(super) repeated: u64,
    pub(super) acknowledged: u64,
    /// Came before an older one of the same device.
    pub(super) disordered: u64,
    /// Not sent, not wanted, or not shaped as the subscription says.
    pub(super) foreign: u64,
    /// From the POST to the frame, in the order of arrival.
    latencies: Vec<Duration>,
}

impl Counted {
    /// Messages that the topic has held.
    pub(super) fn stored(&self) -> u64 {
        self.ids.len() as u64
    }

    /// The latency that `percent` of the messages did not exceed.
    pub(super) fn latency(&self, percent: usize) -> Duration {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        let last = sorted.len().saturating_sub(1);
        sorted.get((sorted.len() * percent / 100).min(last)).copied().unwrap_or_default()
    }
}

/// What one process of the gateway did, from outside: its own figures begin anew with each process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Life {
    /// 2xx to messages that a topic wants.
    pub(super) accepted: u64,
    /// POSTs of such messages without an answer: they may be stored or not.
    pub(super) unanswered: u64,
    pub(super) frames: u64,
    pub(super) acknowledged: u64,
}

/// What was sent and received by all.
#[derive(Default)]
pub(super) struct Account {
    sent: HashMap<Key, Sent>,
    /// Messages that were answered with 2xx, by what they are.
    accepted: HashMap<Kind, u64>,
    /// POSTs that were not answered.
    pub(super) unanswered: u64,
    topics: [Counted; 2],
    lives: [Life; 2],
}

/// What a consumer has seen on its connection.
#[derive(Default)]
pub(super) struct Session(HashMap<u64, u64>);

impl Account {
    /// A POST begins, perhaps not the first one of this message.
    pub(super) fn posting(&mut self, key: Key, kind: Kind, now: Instant) {
        let sent = Sent { kind, at: now, accepted: false, delivered: false };
        self.sent.entry(key).or_insert(sent).at = now;
    }

    /// It was answered with 2xx by the process `life`.
    pub(super) fn accepted(&mut self, key: Key, life: usize) {
        let Some(sent) = self.sent.get_mut(&key).filter(|sent| !sent.accepted) else { return };
        sent.accepted = true;
        *self.accepted.entry(sent.kind).or_default() += 1;
        self.lives[life].accepted += u64::from(sent.kind.topic().is_some());
    }

    /// It was not answered.
    pub(super) fn unanswered(&mut self, kind: Kind, life: usize) {
        self.unanswered += 1;
        self.lives[life].unanswered += u64::from(kind.topic().is_some());
    }

    /// A frame came. `key` is that of its body, if it could be read; `shaped`: it has what the subscription promises and no more.
    pub(super) fn received(
        &mut self,
        (topic, life): (Topic, usize),
        session: &mut Session,
        (key, id): (Option<Key>, u64),
        shaped: bool,
        now: Instant,
    ) {
        self.lives[life].frames += 1;
        let counted = &mut self.topics[topic as usize];
        let sent = key.and_then(|key| Some((key, self.sent.get_mut(&key)?)));
        let Some(((device, time), sent)) = sent.filter(|(_, sent)| shaped && sent.kind.topic() == Some(topic)) else {
            counted.foreign += 1;
            return;
        };
        if session.0.insert(device, id).is_some_and(|last| last >= id) {
            counted.disordered += 1;
        }
        if !counted.ids.insert(id) {
            counted.redelivered += 1;
            return;
        }
        match counted.newest.insert(device, time) {
            Some(newest) if newest > time => counted.disordered += 1,
            _ => {}
        }
        if std::mem::replace(&mut sent.delivered, true) {
            counted.repeated += 1;
        } else {
            counted.delivered += 1;
            counted.latencies.push(now.duration_since(sent.at));
        }
    }

    /// An acknowledgement left.
    pub(super) fn acknowledged(&mut self, topic: Topic, life: usize) {
        self.topics[topic as usize].acknowledged += 1;
        self.lives[life].acknowledged += 1;
    }

    /// Messages that were sent.
    pub(super) fn sent(&self) -> u64 {
        self.sent.len() as u64
    }

    /// Messages of this kind that were accepted.
    pub(super) fn accepted_of(&self, kind: Kind) -> u64 {
        self.accepted.get(&kind).copied().unwrap_or_default()
    }

    /// Messages that were accepted.
    pub(super) fn accepted_all(&self) -> u64 {
        self.accepted.values().sum()
    }

    /// What is counted of a topic so far.
    pub(super) fn counted(&self, topic: Topic) -> &Counted {
        &self.topics[topic as usize]
    }

    /// Messages of a topic that were accepted and are on their way; in the end they are lost.
    pub(super) fn owed(&self, topic: Topic) -> u64 {
        let owed = |sent: &&Sent| sent.accepted && !sent.delivered && sent.kind.topic() == Some(topic);
        self.sent.values().filter(owed).count() as u64
    }

    /// Everything that a gateway must not do, in words; empty when all is well. To be asked when nothing is on its way any more.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for topic in Topic::ALL {
            let &Counted { disordered, foreign, .. } = self.counted(topic);
            for (count, what) in [
                (self.owed(topic), "accepted and never delivered"),
                (disordered, "delivered before older ones of the same device"),
                (foreign, "delivered that were not wanted, or not as the subscription says"),
            ] {
                if count > 0 {
                    faults.push(format!("topic {}: {count} messages {what}", topic.name()));
                }
            }
        }
        faults
    }

    /// What the process `life` did.
    pub(super) fn life(&self, life: usize) -> Life {
        self.lives[life]
    }
}

/// What the gateway itself says at the end: its metrics, and how many objects its lists hold.
#[derive(Clone, Debug, Default)]
pub(super) struct Figures {
    pub(super) appended: u64,
    pub(super) delivered: u64,
    pub(super) acknowledged: u64,
    /// By kind, in the order of [`Kind::ALL`].
    pub(super) listed: [u64; 4],
}

impl Figures {
    /// Where the gateway's figures differ from what was counted outside, in words. `life` is the process that told them.
    pub(super) fn differences(&self, account: &Account, life: usize) -> Vec<String> {
        let Life { accepted, unanswered, frames, acknowledged } = account.life(life);
        let mut differences = Vec::new();
        let mut compare = |what: &str, told: u64, least: u64, most: u64| {
            if !(least..=most).contains(&told) {
                let counted = if least == most { least.to_string() } else { format!("{least} to {most}") };
                differences.push(format!("{what}: the gateway says {told}, outside it is {counted}"));
            }
        };
        compare("messages appended", self.appended, accepted, accepted + unanswered);
        compare("frames delivered", self.delivered, frames, frames);
        compare("acknowledgements", self.acknowledged, acknowledged, acknowledged);
        let [temperatures, humidity, doors, overheats] = self.listed;
        let stored = |topic| account.counted(topic).stored();
        compare("temperatures in the list", temperatures, stored(Topic::Temperatures), stored(Topic::Temperatures));
        let accepted = account.accepted_of(Kind::Humidity);
        compare("humidities in the list", humidity, accepted, accepted + account.unanswered);
        compare("events and alarms in the lists", doors + overheats, stored(Topic::Watch), stored(Topic::Watch));
        differences
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: u64 = 7;

    /// Temperatures of one device that are accepted, one a millisecond.
    struct Scene {
        account: Account,
        session: Session,
        start: Instant,
    }

    impl Scene {
        fn new(count: i64) -> Self {
            let (mut account, start) = (Account::default(), Instant::now());
            for time in 0..count {
                account.posting((DEVICE, time), Kind::Temperature, start);
                account.accepted((DEVICE, time), 0);
            }
            Self { account, session: Session::default(), start }
        }

        fn receives(&mut self, time: i64, id: u64) {
            self.frame(Topic::Temperatures, Some((DEVICE, time)), id, true);
        }

        fn frame(&mut self, topic: Topic, key: Option<Key>, id: u64, shaped: bool) {
            let now = self.start + Duration::from_millis(id);
            self.account.received((topic, 0), &mut self.session, (key, id), shaped, now);
            self.account.acknowledged(topic, 0);
        }

        fn counted(&self) -> &Counted {
            self.account.counted(Topic::Temperatures)
        }
    }

    #[test]
    fn of_ten_messages_eight_are_wanted() {
        let kinds: Vec<_> = (0..10).map(Kind::of).collect();
        let wanted = |topic| kinds.iter().filter(|kind| kind.topic() == Some(topic)).count();
        assert_eq!((wanted(Topic::Temperatures), wanted(Topic::Watch)), (6, 2));
        assert!(Kind::ALL.iter().all(|kind| kinds.contains(kind)));
    }

    #[test]
    fn all_in_order_is_no_fault() {
        let mut scene = Scene::new(100);
        (0..100).for_each(|time| scene.receives(time, time.cast_unsigned() + 1));
        assert_eq!(scene.account.faults(), Vec::<String>::new());
        let counted = scene.counted();
        assert_eq!((counted.delivered, counted.acknowledged, counted.stored()), (100, 100, 100));
        assert_eq!(counted.latency(50), Duration::from_millis(51));
        assert_eq!(counted.latency(99), Duration::from_millis(100));
        assert_eq!(Counted::default().latency(99), Duration::ZERO);
    }

    #[test]
    fn a_missing_message_is_lost() {
        let mut scene = Scene::new(3);
        scene.receives(0, 1);
        scene.receives(2, 3);
        assert_eq!((scene.account.owed(Topic::Temperatures), scene.account.owed(Topic::Watch)), (1, 0));
        assert_eq!(scene.account.faults(), ["topic temperatures: 1 messages accepted and never delivered"]);
    }

    #[test]
    fn what_was_never_accepted_is_not_owed() {
        let mut scene = Scene::new(1);
        scene.receives(0, 1);
        scene.account.posting((DEVICE, 1), Kind::Temperature, scene.start);
        scene.account.unanswered(Kind::Temperature, 0);
        scene.account.posting((DEVICE, 2), Kind::Humidity, scene.start);
        scene.account.accepted((DEVICE, 2), 0);
        assert!(scene.account.faults().is_empty());
        assert_eq!((scene.account.sent(), scene.account.accepted_all(), scene.account.unanswered), (3, 2, 1));
    }

    #[test]
    fn an_older_message_after_a_newer_one_is_disorder() {
        let mut scene = Scene::new(2);
        scene.receives(1, 1);
        scene.receives(0, 2);
        assert_eq!(scene.counted().disordered, 1);
        assert_eq!(scene.account.faults().len(), 1);
    }

    #[test]
    fn after_a_reconnect_messages_come_again_in_their_order() {
        let mut scene = Scene::new(3);
        (0..3).for_each(|time| scene.receives(time, time.cast_unsigned() + 1));
        scene.session = Session::default();
        scene.receives(1, 2);
        scene.receives(2, 3);
        let counted = scene.counted();
        assert_eq!((counted.delivered, counted.redelivered, counted.disordered), (3, 2, 0));
        scene.receives(1, 2);
        assert_eq!(scene.counted().disordered, 1, "on one connection nothing goes back");
    }

    #[test]
    fn a_post_that_was_repeated_may_be_stored_twice() {
        let mut scene = Scene::new(1);
        scene.account.unanswered(Kind::Temperature, 0);
        scene.receives(0, 1);
        scene.receives(0, 2);
        let counted = scene.counted();
        assert_eq!((counted.delivered, counted.repeated, counted.stored()), (1, 1, 2));
        assert!(scene.account.faults().is_empty());
    }

    #[test]
    fn what_nobody_sent_or_wanted_is_foreign() {
        let mut scene = Scene::new(1);
        scene.account.posting((DEVICE, 9), Kind::Humidity, scene.start);
        scene.frame(Topic::Temperatures, Some((DEVICE, 9)), 1, true);
        scene.frame(Topic::Temperatures, Some((DEVICE, 8)), 2, true);
        scene.frame(Topic::Temperatures, None, 3, true);
        scene.frame(Topic::Watch, Some((DEVICE, 0)), 4, true);
        scene.frame(Topic::Temperatures, Some((DEVICE, 0)), 5, false);
        assert_eq!((scene.counted().foreign, scene.account.counted(Topic::Watch).foreign), (4, 1));
        assert_eq!(scene.account.faults().len(), 3, "two topics, and one message that never came as it should");
    }

    #[test]
    fn the_gateways_own_figures_have_to_agree() {
        let mut scene = Scene::new(2);
        scene.receives(0, 1);
        scene.receives(1, 2);
        let right = Figures { appended: 2, delivered: 2, acknowledged: 2, listed: [2, 0, 0, 0] };
        assert!(right.differences(&scene.account, 0).is_empty());
        for wrong in [
            Figures { appended: 1, ..right.clone() },
            Figures { appended: 3, ..right.clone() },
            Figures { delivered: 3, ..right.clone() },
            Figures { acknowledged: 1, ..right.clone() },
            Figures { listed: [1, 0, 0, 0], ..right.clone() },
            Figures { listed: [2, 1, 0, 0], ..right.clone() },
            Figures { listed: [2, 0, 0, 1], ..right.clone() },
        ] {
            assert_eq!(wrong.differences(&scene.account, 0).len(), 1, "{wrong:?}");
        }
        scene.account.unanswered(Kind::Temperature, 0);
        let unsure = Figures { appended: 3, ..right };
        assert!(unsure.differences(&scene.account, 0).is_empty(), "what was not answered may have been stored");
    }
}
