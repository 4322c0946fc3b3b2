//! Chance that can be repeated.

use std::hash::{BuildHasher, RandomState};

/// A small generator (xorshift64*), so that a seed repeats a run.
#[derive(Clone)]
pub(crate) struct Dice(u64);

impl Dice {
    /// With the seed in the environment variable `name`, or with one that is made up.
    pub(crate) fn new(name: &str) -> Self {
        let seed = std::env::var(name).ok().map(|seed| seed.parse().unwrap());
        Self(seed.unwrap_or_else(|| RandomState::new().hash_one(0)).max(1))
    }

    /// What repeats the throws from here on.
    pub(crate) fn seed(&self) -> u64 {
        self.0
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % end
    }

    /// Dice of their own for another task.
    pub(crate) fn split(&mut self) -> Self {
        Self(self.0 ^ (self.below(u64::from(u32::MAX)) << 20) | 1)
    }

    pub(crate) fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }

    /// Whether one throw of `sides` was the highest.
    pub(crate) fn one_in(&mut self, sides: u64) -> bool {
        self.below(sides) == sides - 1
    }
}
