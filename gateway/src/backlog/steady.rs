//! Backlog time, by which messages grow old: a time of day that never jumps.
//!
//! The clock of an edge box jumps: it begins in 1970, or where it was when the power went, until the network sets it. A jump
//! must not make messages old, and a clock that stands still must not keep them for ever. So backlog time goes on evenly while
//! the process runs; what the time of day did besides is in the offset, which is stored. The time of day counts over a restart
//! alone, less the offset, and never backwards.

use crate::clock::Clock;
use crate::store::{Statement, StoreError, Value, Writing};

/// A difference between the time of day and backlog time, in ms, that is no jump: clocks are set a little at a time, too.
const JUMP_MS: i64 = 5_000;
/// 2020-01-01T00:00:00Z. A clock that is earlier has not been set yet, and says nothing.
const UNSET_MS: i64 = 1_577_836_800_000;
/// How much backlog time a power cut may take back while nothing is written that tells it, in ms.
const NOTE_MS: i64 = 600_000;

/// What the clock says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    /// Time of day, ms since the epoch.
    pub(super) wall_ms: i64,
    /// Ms since some moment of this process.
    pub(super) running_ms: i64,
}

impl Reading {
    pub(super) fn of(clock: &Clock) -> Self {
        Self { wall_ms: clock.now_ms(), running_ms: clock.running_ms() }
    }
}

/// What is stored of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Note {
    /// A backlog time that was reached, ms.
    pub(super) reached_ms: i64,
    /// Time of day less backlog time, ms.
    pub(super) offset_ms: i64,
}

#[derive(Debug)]
pub(super) struct Steady {
    /// Backlog time less the time that the process has run.
    began_ms: i64,
    offset_ms: i64,
    stored: Note,
}

impl Note {
    pub(super) async fn load(writing: &mut Writing) -> Result<Self, StoreError> {
        let (reached_ms, offset_ms): (Option<i64>, Option<i64>) = sqlx::query_as(
            "SELECT max(v) FILTER (WHERE k = 'backlog_reached'), max(v) FILTER (WHERE k = 'backlog_offset') FROM meta",
        )
        .fetch_one(writing.connection())
        .await?;
        Ok(Self { reached_ms: reached_ms.unwrap_or_default(), offset_ms: offset_ms.unwrap_or_default() })
    }

    pub(super) fn statement(self) -> Statement {
        Statement {
            sql: "INSERT OR REPLACE INTO meta(k, v) VALUES ('backlog_reached', ?), ('backlog_offset', ?)",
            values: vec![Value::Int(self.reached_ms), Value::Int(self.offset_ms)],
        }
    }
}

impl Steady {
    /// Goes on from what is stored, and from the time of day if that is later.
    pub(super) fn start(reading: Reading, stored: Note) -> Self {
        let now_ms = stored.reached_ms.max(reading.wall_ms.saturating_sub(stored.offset_ms));
        Self { began_ms: now_ms - reading.running_ms, offset_ms: stored.offset_ms, stored }
    }

    /// The time, in ms; a jump of the time of day goes into the offset.
    pub(super) fn now(&mut self, reading: Reading) -> i64 {
        let now_ms = self.began_ms + reading.running_ms;
        let offset_ms = reading.wall_ms.saturating_sub(now_ms);
        if reading.wall_ms >= UNSET_MS && offset_ms.abs_diff(self.offset_ms) > JUMP_MS.unsigned_abs() {
            self.offset_ms = offset_ms;
        }
        now_ms
    }

    /// What the time of day was, or would have been with the clock as it is set now, at backlog time `ms`.
    pub(super) fn wall(&self, ms: i64) -> i64 {
        ms.saturating_add(self.offset_ms)
    }

    /// What should be stored with the next commit, which writes down `now_ms` itself if it `tells` it. `None`: nothing.
    pub(super) fn to_note(&self, now_ms: i64, tells: bool) -> Option<Note> {
        let Note { reached_ms, offset_ms } = self.stored;
        let late = now_ms - reached_ms >= NOTE_MS && !tells;
        (late || offset_ms != self.offset_ms).then_some(Note { reached_ms: now_ms, offset_ms: self.offset_ms })
    }

    /// A commit has stored this.
    pub(super) fn noted(&mut self, note: Note) {
        self.stored = note;
    }

    /// A commit told this time.
    pub(super) fn told(&mut self, now_ms: i64) {
        self.stored.reached_ms = now_ms;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const YEAR: i64 = 365 * 86_400_000;
    const NOW: i64 = 60 * YEAR;
    const HOUR: i64 = 3_600_000;

    /// A site whose gateway runs, is stopped, and starts again; all is stored that should be.
    struct Site {
        wall_ms: i64,
        running_ms: i64,
        stored: Note,
        steady: Option<Steady>,
    }

    impl Site {
        fn new(wall_ms: i64) -> Self {
            let mut new = Self { wall_ms, running_ms: 7, stored: Note { reached_ms: 0, offset_ms: 0 }, steady: None };
            new.start();
            new
        }

        fn reading(&self) -> Reading {
            Reading { wall_ms: self.wall_ms, running_ms: self.running_ms }
        }

        fn start(&mut self) {
            self.running_ms = 3;
            self.steady = Some(Steady::start(self.reading(), self.stored));
        }

        fn pass(&mut self, ms: i64) {
            self.wall_ms += ms;
            self.running_ms += ms;
        }

        /// The time, stored as with every commit.
        fn now(&mut self) -> i64 {
            let reading = self.reading();
            let steady = self.steady.as_mut().expect("it was started");
            let now_ms = steady.now(reading);
            if let Some(note) = steady.to_note(now_ms, true) {
                steady.noted(note);
                self.stored = note;
            }
            steady.told(now_ms);
            self.stored.reached_ms = now_ms;
            now_ms
        }
    }

    #[test]
    fn a_clock_that_is_right_is_followed_over_restarts() {
        let mut site = Site::new(NOW);
        assert_eq!(site.now(), NOW);
        site.pass(HOUR);
        assert_eq!(site.now(), NOW + HOUR);
        site.pass(HOUR);
        site.start();
        assert_eq!(site.now(), NOW + 2 * HOUR, "time passes while it is stopped");
    }

    #[test]
    fn a_jump_and_its_way_back_are_no_time_over_restarts_too() {
        for jump in [10 * YEAR, -10 * YEAR, 2 * HOUR, JUMP_MS + 1] {
            for restarts in 0..8 {
                let mut site = Site::new(NOW);
                let mut expected = site.now();
                for (step, by) in [jump, -jump, 0].into_iter().enumerate() {
                    site.wall_ms += by;
                    site.pass(HOUR);
                    expected += HOUR;
                    assert_eq!(site.now(), expected, "jump {jump}, step {step}");
                    let wall_ms = site.steady.as_ref().map(|steady| steady.wall(expected));
                    assert_eq!(wall_ms, (site.wall_ms >= UNSET_MS).then_some(site.wall_ms).or(wall_ms));
                    if restarts >> step & 1 == 1 {
                        site.start();
                    }
                }
            }
        }
    }

    #[test]
    fn a_clock_that_is_set_back_while_stopped_does_not_turn_time_back() {
        let mut site = Site::new(NOW);
        site.now();
        site.wall_ms -= YEAR;
        site.start();
        assert_eq!(site.now(), NOW);
        site.pass(HOUR);
        site.start();
        assert_eq!(site.now(), NOW + HOUR, "and goes on from there");
    }

    #[test]
    fn a_clock_that_begins_in_1970_at_every_start_says_nothing_until_it_is_set() {
        let mut site = Site::new(NOW);
        site.now();
        for _ in 0..3 {
            site.wall_ms = 0;
            site.start();
            site.pass(HOUR);
            site.now();
        }
        assert_eq!(site.now(), NOW + 3 * HOUR, "messages grow old all the same");
        assert_eq!(site.stored.offset_ms, 0);
        // Set while stopped: what would be left of fifty years must not come back as a jump.
        site.wall_ms = NOW + 5 * HOUR;
        site.start();
        assert_eq!(site.now(), NOW + 5 * HOUR);
    }

    #[test]
    fn small_corrections_are_no_jumps_and_do_not_add_up() {
        let mut site = Site::new(NOW);
        site.now();
        for _ in 0..100 {
            site.wall_ms += 1_000;
            site.pass(HOUR);
            site.now();
        }
        assert_eq!(site.now(), NOW + 100 * HOUR);
        site.start();
        assert!((NOW + 100 * HOUR..=NOW + 100 * HOUR + JUMP_MS).contains(&site.now()));
    }

    #[test]
    fn what_no_commit_tells_is_noted_every_ten_minutes() {
        let start = Reading { wall_ms: NOW, running_ms: 0 };
        let mut steady = Steady::start(start, Note { reached_ms: NOW, offset_ms: 0 });
        assert_eq!(steady.to_note(NOW + NOTE_MS - 1, false), None);
        assert_eq!(steady.to_note(NOW + NOTE_MS, true), None);
        let note = Note { reached_ms: NOW + NOTE_MS, offset_ms: 0 };
        assert_eq!(steady.to_note(NOW + NOTE_MS, false), Some(note));
        steady.noted(note);
        assert_eq!(steady.to_note(NOW + NOTE_MS + 1, false), None);
    }
}
