//! A canary: another version of one of a subscription's plugins, which decides for a share of the sources before all get it.
//!
//! In: the answers of both versions to the same messages. Out: the one that counts, and how they compare. The version that the
//! subscription names is asked about every message all the time, so that its state stays whole for the way back.

use std::fmt;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::model::{PluginSettings, PluginUse, Subscription};
use crate::consumer::Slot;
use crate::json::{self, Invalid, Limits, Members};
use crate::plugin::{BuiltIn, Fault, Instance, Verdict, World};

/// How many slots there are.
const SLOTS: f64 = 65_536.0;

/// A share in slots: at least one, at most all of them.
fn slots(share: f64) -> u32 {
    (share * SLOTS).ceil() as u32
}

/// Where a subscription names a plugin: `filters[0]`, `transforms[1]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Place {
    /// The list.
    pub world: World,
    /// The place in it.
    pub at: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s[{}]", self.world.name(), self.at)
    }
}

impl From<Place> for String {
    fn from(place: Place) -> Self {
        place.to_string()
    }
}

impl FromStr for Place {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (list, at) = text.strip_suffix(']')?.split_once('[')?;
            Some(Self { world: World::named(list.strip_suffix('s')?)?, at: at.parse().ok()? })
        };
        parse().ok_or("must be like 'filters[0]' or 'transforms[0]'")
    }
}

impl TryFrom<String> for Place {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// A canary as it is kept with its subscription.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Canary {
    /// Whose place it may take.
    pub place: Place,
    /// What it is.
    pub named: PluginUse,
    /// Which part of the sources it decides for: more than 0, at most 1.
    pub share: f64,
    /// When it was asked for, ms since the epoch.
    pub since_ms: i64,
}

/// A canary that was taken back since it failed too often.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RolledBack {
    /// What it was.
    pub plugin: String,
    /// Which version.
    pub version: Option<u32>,
    /// When, ms since the epoch.
    pub at_ms: i64,
    /// Why, for people.
    pub reason: String,
}

/// What a client asks for.
#[derive(Clone, PartialEq, Debug)]
pub struct CanaryRequest {
    plugin: String,
    version: Option<u32>,
    settings: Option<PluginSettings>,
    share: f64,
    place: Option<Place>,
}

impl CanaryRequest {
    /// Reads `{"plugin","version","settings","share","place"}`; `plugin` and `share` have to be there.
    ///
    /// # Errors
    /// What is wrong, by its member.
    pub fn parse(body: &[u8], limits: &Limits) -> Result<Self, Invalid> {
        let members = Members::parse(body, limits)?;
        members.only(&["plugin", "version", "settings", "share", "place"])?;
        let (plugin, version, settings) = PluginUse::parts(&members)?;
        let share =
            members.get("share").ok_or_else(|| Invalid::new("share", "must say for which part of the sources"))?;
        let share = json::number(share, "share")?;
        if !(share > 0.0 && share <= 1.0) {
            return Err(Invalid::new("share", "must be more than 0 and at most 1"));
        }
        let place = members
            .get("place")
            .map(|raw| json::string(raw, "place")?.parse().map_err(|reason: &str| Invalid::new("place", reason)));
        Ok(Self { plugin, version, settings, share, place: place.transpose()? })
    }

    /// The canary of this subscription that it means; its version may be open yet.
    ///
    /// # Errors
    /// If it has no place there.
    pub fn of(self, subscription: &Subscription, since_ms: i64) -> Result<Canary, Invalid> {
        let place = match self.place {
            Some(place) => place,
            None => subscription.place_of(&self.plugin)?,
        };
        let current = subscription
            .at(place)
            .ok_or_else(|| Invalid::new("place", format!("the subscription has no plugin at {place}")))?;
        let fragments = BuiltIn::FragmentsToCopy.name();
        if [current.plugin.as_str(), &self.plugin].contains(&fragments) {
            let text = format!("'{fragments}' stands for 'fragmentsToCopy', and has no versions");
            return Err(Invalid::new("plugin", text));
        }
        let settings = self.settings.unwrap_or_else(|| current.settings.clone());
        let named = PluginUse { plugin: self.plugin, version: self.version, settings };
        Ok(Canary { place, named, share: self.share, since_ms })
    }
}

/// When a canary is taken back.
#[derive(Clone, Copy, Debug)]
pub struct CanaryLimits {
    /// Messages that it has to have judged.
    pub messages: u64,
    /// Percent of them that it may fail on.
    pub fault_percent: u64,
}

/// A canary in force.
#[derive(Debug)]
pub struct Rival {
    /// Its plugin.
    pub instance: Instance,
    /// Which list of the route's instances it has its place in, and where.
    pub(super) world: World,
    pub(super) step: usize,
    /// It decides for the slots below.
    slots: u32,
    since: Instant,
    figures: Mutex<Figures>,
}

/// How the answers of a canary and of the version in force to the same messages compare. Each message counts once, to `equal`,
/// `passes_more`, `drops_more`, `bodies_differ` or where somebody failed.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Figures {
    /// Messages that both judged.
    pub messages: u64,
    /// Same verdict, same body.
    pub equal: u64,
    /// The canary passes what would have been dropped.
    pub passes_more: u64,
    /// The canary drops what would have passed.
    pub drops_more: u64,
    /// The bodies are not the same, byte for byte.
    pub bodies_differ: u64,
    /// The version in force.
    pub current: Side,
    /// The canary.
    pub canary: Side,
    /// The last thing that the canary failed with.
    pub last_fault: Option<Fault>,
}

/// One of both versions.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Side {
    /// Messages that it failed on.
    pub faults: u64,
    /// What the messages took of the processor.
    pub processor_time: Duration,
}

/// An answer, and the processor time that it took.
pub type Judged<T> = (Result<T, Fault>, Duration);

impl Side {
    fn add<T>(&mut self, (answer, time): &Judged<T>) {
        self.faults += u64::from(answer.is_err());
        self.processor_time += *time;
    }
}

impl Rival {
    pub(super) fn new(world: World, step: usize, share: f64, instance: Instance) -> Self {
        Self { instance, world, step, slots: slots(share), since: Instant::now(), figures: Mutex::default() }
    }

    /// Whether it decides for the sources of this slot. A larger share takes all that a smaller one takes.
    #[must_use]
    pub fn takes(&self, slot: Slot) -> bool {
        u32::from(slot) < self.slots
    }

    /// Which answer counts: the canary's, unless it has failed.
    pub fn decide<T: Clone + Into<Verdict>>(&self, current: Judged<T>, canary: Judged<T>) -> Result<T, Fault> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).compare(&current, &canary);
        canary.0.or(current.0)
    }

    /// How the answers compare so far.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Since when they are compared.
    #[must_use]
    pub fn since(&self) -> Instant {
        self.since
    }
}

impl Figures {
    fn compare<T: Clone + Into<Verdict>>(&mut self, current: &Judged<T>, canary: &Judged<T>) {
        let was_asked = |(answer, _): &Judged<T>| !matches!(answer, Err(Fault::Stopped | Fault::Loading));
        if !(was_asked(current) && was_asked(canary)) {
            return;
        }
        self.messages += 1;
        self.current.add(current);
        self.canary.add(canary);
        match (&current.0, &canary.0) {
            (_, Err(fault)) => self.last_fault = Some(fault.clone()),
            (Err(_), Ok(_)) => {}
            (Ok(current), Ok(canary)) => match (current.clone().into(), canary.clone().into()) {
                (Verdict::Drop, Verdict::Pass) => self.passes_more += 1,
                (Verdict::Pass, Verdict::Drop) => self.drops_more += 1,
                (current, canary) if current == canary => self.equal += 1,
                _ => self.bodies_differ += 1,
            },
        }
    }

    /// Why the canary has to be taken back: it fails too often, and more often than the version in force. One that is asked no
    /// more has failed for good.
    #[must_use]
    pub fn failure(&self, limits: CanaryLimits) -> Option<String> {
        let Self { messages, last_fault, .. } = self;
        let last = last_fault.as_ref()?;
        let (current_faults, canary_faults) = (self.current.faults, self.canary.faults);
        let for_good = matches!(last, Fault::Quarantined(_) | Fault::Unavailable(_));
        let too_often = *messages >= limits.messages && canary_faults * 100 > limits.fault_percent * messages;
        (canary_faults > current_faults && (for_good || too_often))
            .then(|| format!("it failed on {canary_faults} of {messages} messages, on the last of them so: {last}"))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    const LIMITS: CanaryLimits = CanaryLimits { messages: 20, fault_percent: 5 };

    const MS: Duration = Duration::from_millis(1);

    fn fault() -> Fault {
        Fault::Trap("unreachable".into())
    }

    #[test]
    fn places_are_written_like_the_fields_that_errors_name() {
        for (text, place) in [
            ("filters[0]", Place { world: World::Filter, at: 0 }),
            ("transforms[12]", Place { world: World::Transform, at: 12 }),
        ] {
            assert_eq!((text.parse(), place.to_string().as_str()), (Ok(place), text));
        }
        for text in ["", "filters", "filters[]", "filters[-1]", "filter[0]", "filters[0", "sinks[0]", "filters[0] "] {
            assert!(text.parse::<Place>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_answers_are_compared_message_by_message() {
        let mut figures = Figures::default();
        let answers = [Ok(true), Ok(false), Err(fault())];
        for current in &answers {
            for canary in &answers {
                figures.compare(&(current.clone(), MS), &(canary.clone(), 2 * MS));
            }
        }
        figures.compare(&(Err(Fault::Stopped), MS), &(Ok(true), MS));
        figures.compare(&(Ok(true), MS), &(Err(Fault::Stopped), MS));
        figures.compare(&(Ok(true), MS), &(Err(Fault::Loading), MS));
        let expected = Figures {
            messages: 9,
            equal: 2,
            passes_more: 1,
            drops_more: 1,
            bodies_differ: 0,
            current: Side { faults: 3, processor_time: 9 * MS },
            canary: Side { faults: 3, processor_time: 18 * MS },
            last_fault: Some(fault()),
        };
        assert_eq!(figures, expected);
        let mut figures = Figures::default();
        let body = |text: &'static str| (Ok(Bytes::from_static(text.as_bytes())), MS);
        figures.compare(&body("a"), &body("a"));
        figures.compare(&body("a"), &body("b"));
        assert_eq!((figures.messages, figures.equal, figures.bodies_differ), (2, 1, 1));
    }

    #[test]
    fn a_canary_that_fails_too_often_is_taken_back() {
        let side = |faults| Side { faults, ..Side::default() };
        let failure = |messages, current, canary| {
            let last_fault = (canary > 0).then(fault);
            let (current, canary) = (side(current), side(canary));
            Figures { messages, current, canary, last_fault, ..Figures::default() }.failure(LIMITS)
        };
        for (messages, current, canary) in [(0, 0, 0), (19, 0, 19), (20, 0, 1), (100, 0, 5), (100, 50, 50)] {
            assert_eq!(failure(messages, current, canary), None, "{messages} {current} {canary}");
        }
        for (messages, current, canary) in [(20, 0, 2), (100, 0, 6), (100, 50, 51)] {
            assert!(failure(messages, current, canary).is_some(), "{messages} {current} {canary}");
        }
        assert_eq!(
            failure(20, 0, 2).unwrap(),
            "it failed on 2 of 20 messages, on the last of them so: the plugin failed: unreachable"
        );
        let in_quarantine = Figures {
            messages: 1,
            canary: side(1),
            last_fault: Some(Fault::Quarantined("it traps".into())),
            ..Figures::default()
        };
        assert!(in_quarantine.failure(LIMITS).is_some(), "it will not be asked again");
    }

    #[test]
    fn a_request_says_what_is_wrong_with_it() {
        let parse = |text: &str| CanaryRequest::parse(text.as_bytes(), &Limits::default());
        for (text, expected) in [
            ("[]", ""),
            (r#"{"share":1}"#, "plugin: must name a plugin"),
            (r#"{"plugin":"a"}"#, "share: must say"),
            (r#"{"plugin":"a","share":0}"#, "share: must be more than 0 and at most 1"),
            (r#"{"plugin":"a","share":1.01}"#, "share: must be more than 0"),
            (r#"{"plugin":"a","share":"1"}"#, "share: "),
            (r#"{"plugin":"a","share":1,"place":"filters"}"#, "place: must be like 'filters[0]'"),
            (r#"{"plugin":"a","share":1,"version":0}"#, "version: must be a number from 1 on"),
            (r#"{"plugin":"a","share":1,"x":1}"#, "x: is not a known member"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
        let body = br#"{"context":"tenant","subscription":"s","tidegate":{
            "filters":[{"plugin":"a","version":1,"settings":{"x":1.50}},{"plugin":"b","version":1},{"plugin":"b","version":1}],
            "transforms":[{"plugin":"c","version":7}]}}"#;
        let subscription = Subscription::parse(body).unwrap();
        let canary = |text: &str| parse(text).unwrap().of(&subscription, 7);
        let of_a = canary(r#"{"plugin":"a","version":2,"share":0.1}"#).unwrap();
        assert_eq!((of_a.place.to_string().as_str(), of_a.named.settings.as_str()), ("filters[0]", r#"{"x":1.50}"#));
        assert_eq!((of_a.share, of_a.named.version, of_a.since_ms), (0.1, Some(2), 7));
        let other = canary(r#"{"plugin":"z","settings":[],"share":1,"place":"transforms[0]"}"#).unwrap();
        assert_eq!((other.named.plugin.as_str(), other.named.settings.as_str()), ("z", "[]"));
        for (text, expected) in [
            (r#"{"plugin":"z","share":1}"#, "plugin: 'z' is not among those that the subscription names"),
            (r#"{"plugin":"b","share":1}"#, "place: must say which, since the subscription names 'b' more than once"),
            (r#"{"plugin":"b","share":1,"place":"filters[3]"}"#, "place: the subscription has no plugin at filters[3]"),
        ] {
            let error = canary(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    proptest! {
        /// The share is kept to within one slot, is stable, and grows without giving anything back.
        #[test]
        fn a_share_is_a_part_of_the_slots(share in 1e-9..=1.0_f64, larger in 0.0..=1.0_f64) {
            let of = f64::from(slots(share));
            prop_assert!((1.0..=SLOTS).contains(&of) && (of - share * SLOTS).abs() < 1.0, "{of}");
            prop_assert!(slots(share.max(larger)) >= slots(share));
        }
    }
}
