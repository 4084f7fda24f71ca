//! Time and randomness, the two things that code may not take from the operating system by itself.
//!
//! Code that needs a clock gets an `Arc<dyn Clock>`; code that needs randomness gets a [`Random`]. In
//! production they come from the reactor and the system, in a test from the simulator and one seed, so that a
//! run can be repeated.

use std::time::Duration;

use crate::LocalFuture;

/// A monotonic clock and its alarm.
pub trait Clock: Send + Sync {
    /// Time since some fixed start. It never goes back.
    fn now(&self) -> Duration;

    /// Completes when `wait` has passed. Must be called and polled on a worker of the runtime (or of the
    /// simulated world) that the clock belongs to. It may be dropped at any time.
    fn sleep(&self, wait: Duration) -> LocalFuture<'static, ()>;
}

/// A source of random numbers that gives the same sequence for the same seed.
#[derive(Debug, Clone)]
pub struct Random(fastrand::Rng);

impl Random {
    /// The sequence that belongs to `seed`.
    pub fn from_seed(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// A whole number, each of the 2^64 equally likely.
    pub fn any(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// A whole number below `end`. Panics when `end` is zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.u64(..end)
    }

    /// An index below `end`. Panics when `end` is zero.
    pub fn index(&mut self, end: usize) -> usize {
        self.0.usize(..end)
    }

    /// True once in `times`, on average.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of the choices. Panics when there is none.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.index(choices.len())]
    }

    /// Fills the slice with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill(bytes);
    }

    /// A new, independent sequence drawn from this one.
    #[must_use]
    pub fn fork(&mut self) -> Self {
        Self::from_seed(self.any())
    }
}
