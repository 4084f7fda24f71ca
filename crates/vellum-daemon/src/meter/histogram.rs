//! How long requests took: a histogram with four steps to each doubling.
//!
//! ```text
//!   microseconds   0 1 2 3 │ 4 5 6 7 │ 8 10 12 14 │ 16 20 24 28 │ …       each number begins a step, the next one ends it
//! ```
//!
//! A time is accurate to within a fifth; recording one is three additions to numbers that many workers share.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The last step has all that took longer than about a minute.
const STEPS: usize = 100;

/// Counts by time.
pub(crate) struct Histogram {
    steps: [AtomicU64; STEPS],
    micros: AtomicU64,
    max: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            steps: [const { AtomicU64::new(0) }; STEPS],
            micros: AtomicU64::new(0),
            max: AtomicU64::new(0),
        }
    }
}

/// The step that this many microseconds belong to.
fn step_of(micros: u64) -> usize {
    let step = match micros {
        0..4 => micros,
        _ => {
            let doubling = u64::from(micros.ilog2());
            4 * (doubling - 1) + (micros >> (doubling - 2) & 3)
        }
    };
    usize::try_from(step).map_or(STEPS - 1, |step| step.min(STEPS - 1))
}

/// Where a step begins, in microseconds.
fn begin_of(step: usize) -> u64 {
    let step = step as u64;
    if step < 4 { step } else { (4 + step % 4) << (step / 4 - 1) }
}

impl Histogram {
    pub(crate) fn add(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.steps[step_of(micros)].fetch_add(1, Relaxed);
        self.micros.fetch_add(micros, Relaxed);
        self.max.fetch_max(micros, Relaxed);
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts {
            steps: self.steps.iter().map(|step| step.load(Relaxed)).collect(),
            micros: self.micros.load(Relaxed),
            max: self.max.load(Relaxed),
        }
    }
}

/// What a histogram had at one moment.
pub(crate) struct Counts {
    steps: Vec<u64>,
    micros: u64,
    max: u64,
}

impl Counts {
    pub(crate) fn count(&self) -> u64 {
        self.steps.iter().sum()
    }

    /// The sum of all times.
    pub(crate) fn micros(&self) -> u64 {
        self.micros
    }

    /// The longest time.
    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// So many thousandths of the requests took no longer than this, in microseconds: the end of a step, or
    /// the longest time.
    pub(crate) fn quantile(&self, thousandths: u64) -> u64 {
        let wanted = (self.count() * thousandths).div_ceil(1000);
        let mut seen = 0;
        for (step, count) in self.steps.iter().enumerate() {
            seen += count;
            if seen >= wanted && *count > 0 {
                return begin_of(step + 1).min(self.max);
            }
        }
        self.max
    }

    /// How many took less than this many microseconds, which must be a power of two.
    pub(crate) fn below(&self, micros: u64) -> u64 {
        self.steps[..step_of(micros)].iter().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_each_other_and_times_fall_into_theirs() {
        for step in 0..STEPS - 1 {
            let (begin, end) = (begin_of(step), begin_of(step + 1));
            assert!(begin < end, "{step}");
            assert_eq!((step_of(begin), step_of(end - 1)), (step, step), "{step}");
        }
        assert_eq!(step_of(u64::MAX), STEPS - 1);
    }

    #[test]
    fn quantiles_are_as_near_as_a_step() {
        let histogram = Histogram::default();
        for micros in 1..=1000 {
            histogram.add(Duration::from_micros(micros));
        }
        let counts = histogram.counts();
        assert_eq!((counts.count(), counts.micros(), counts.max()), (1000, 500_500, 1000));
        for (thousandths, micros) in [(500, 500), (900, 900), (990, 990), (1000, 1000)] {
            let found = counts.quantile(thousandths);
            assert!(found >= micros && found <= micros * 5 / 4, "{thousandths}: {found}");
        }
        assert_eq!((counts.below(512), counts.below(1 << 20)), (511, 1000));
        assert_eq!(Histogram::default().counts().quantile(990), 0);
    }
}
