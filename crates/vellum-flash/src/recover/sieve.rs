//! Whether runs of blocks may have something of a group. It is asked for every group, and says no of nearly all of them without a
//! look at the runs.
//!
//! ```text
//!   short runs ─► their regions, hashed ─► 65,536 bits              long ones, a few ─► a list
//! ```
//!
//! A no is certain, a yes is not.

use crate::layout::{GROUP_BLOCKS, Key};
use crate::regions::REGION_BLOCKS;

const BITS: u32 = 16;
/// A run of more regions is long.
const SHORT_REGIONS_MAX: u64 = 1024;
/// Of more long runs than these the sieve says yes of everything.
const LONG_MAX: usize = 8;

/// The sieve.
#[derive(Debug, Default)]
pub(super) struct Sieve {
    /// Empty where there are no short runs.
    bits: Vec<u64>,
    long: Vec<(u64, u64)>,
    says_yes: bool,
}

const fn place_of(region: u64) -> (usize, u64) {
    let hash = region.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - BITS);
    ((hash / 64) as usize, 1 << (hash % 64))
}

impl Sieve {
    /// Of runs from a key on, up to another.
    pub(super) fn of(runs: impl Iterator<Item = (u64, u64)>) -> Self {
        let mut sieve = Self::default();
        for (start, end) in runs {
            let regions = start / REGION_BLOCKS..end.div_ceil(REGION_BLOCKS);
            if regions.end - regions.start > SHORT_REGIONS_MAX {
                sieve.says_yes |= sieve.long.len() == LONG_MAX;
                if !sieve.says_yes {
                    sieve.long.push((start, end));
                }
                continue;
            }
            sieve.bits.resize(1 << (BITS - 6), 0);
            for region in regions {
                let (word, bit) = place_of(region);
                sieve.bits[word] |= bit;
            }
        }
        sieve
    }

    /// Whether there may be something of this group.
    pub(super) fn may_have(&self, group: Key) -> bool {
        let (start, end) = (group.bits(), group.bits() + GROUP_BLOCKS);
        let is_short = || {
            let (word, bit) = place_of(start / REGION_BLOCKS);
            self.bits.get(word).is_some_and(|bits| bits & bit != 0)
        };
        self.says_yes || is_short() || self.long.iter().any(|(from, to)| *from < end && start < *to)
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn a_no_is_certain() {
        for seed in 0..60 {
            let mut random = Random::from_seed(seed);
            let runs: Vec<(u64, u64)> = (0..random.below(30))
                .map(|_| {
                    let start = random.below(1 << 30);
                    (start, start + 1 + random.below(*random.clone().pick(&[1, 20, 1 << 16, 1 << 27])))
                })
                .collect();
            let sieve = Sieve::of(runs.iter().copied());
            let mut noes = 0;
            for number in 0..2000 {
                let near = runs.first().map_or(0, |_| random.pick(&runs).0.saturating_sub(40));
                let block = if number % 2 == 0 { near + random.below(80) } else { random.below(1 << 30) };
                let group = Key::from_bits(block).group();
                let has = |(from, to): &(u64, u64)| *from < group.bits() + 16 && group.bits() < *to;
                let is_there = runs.iter().any(has);
                assert!(sieve.may_have(group) || !is_there, "seed {seed}: {group:?} of {runs:?}");
                noes += u32::from(!sieve.may_have(group));
            }
            // Few of 65,536 regions have one of these runs.
            let is_short = |(from, to): &(u64, u64)| to - from < REGION_BLOCKS;
            assert!(noes >= 900 || !runs.iter().all(is_short), "seed {seed}: {noes}");
        }
        assert!(!Sieve::of(std::iter::empty()).may_have(Key::new(3, 16)));
    }
}
