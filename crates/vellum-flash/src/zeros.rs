//! Runs of blocks that are zero, and have no slots: a bounded table.
//!
//! ```text
//!   key of the first block ─► number of blocks, whether home may give up their space         sorted by key
//! ```
//!
//! 1. Runs do not overlap, and neighbours of one disk that say the same are one run.
//! 2. There are at most [`RUNS_MAX`]. New runs are taken up to two thirds of that; the rest is for those that
//!    arise when a run is split, so a write into a run finds room for the split as long as runs go home
//!    when two thirds of the table are used. An older cache may have more, up to [`RUNS_FOUND_MAX`]; then there is no
//!    room until some have gone.
//! 3. An operation that finds no room changes nothing.
//! 4. A run stays within its disk.

use std::collections::BTreeMap;

use crate::layout::{BLOCKS_MAX, Key};

/// The most runs in the table.
pub(crate) const RUNS_MAX: usize = 1536;
/// The most that are found on flash.
pub(crate) const RUNS_FOUND_MAX: usize = 2048;
/// From this number of runs on, none is added that makes them more.
pub(crate) const RUNS_FOR_NEW: usize = 1024;

/// Neighbouring blocks that are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// The first block.
    pub(crate) key: Key,
    /// How many, at least 1.
    pub(crate) blocks: u64,
    /// Home may give up their space.
    pub(crate) may_free: bool,
}

impl Run {
    /// The bits of the first key after it.
    const fn end(&self) -> u64 {
        self.key.bits() + self.blocks
    }
}

/// The table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Zeros {
    runs: BTreeMap<u64, (u64, bool)>,
}

impl Zeros {
    /// How many runs there are.
    pub(crate) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// All runs in the order of their keys.
    pub(crate) fn runs(&self) -> impl DoubleEndedIterator<Item = Run> {
        self.runs.iter().map(|(&key, &(blocks, may_free))| Run { key: Key::from_bits(key), blocks, may_free })
    }

    /// The run that this block is in.
    pub(crate) fn get(&self, key: Key) -> Option<Run> {
        self.touching(key, 1).next()
    }

    /// What these blocks have of runs, in order.
    pub(crate) fn overlapping(&self, key: Key, blocks: u64) -> impl Iterator<Item = Run> {
        let (start, end) = (key.bits(), key.bits().saturating_add(blocks));
        self.touching(key, blocks).map(move |run| {
            let (from, to) = (run.key.bits().max(start), run.end().min(end));
            Run { key: Key::from_bits(from), blocks: to - from, ..run }
        })
    }

    /// The runs that have a block of these, whole, in order.
    fn touching(&self, key: Key, blocks: u64) -> impl Iterator<Item = Run> {
        let (start, end) = (key.bits(), key.bits().saturating_add(blocks));
        let before = self.runs.range(..start).next_back().filter(move |(at, run)| *at + run.0 > start);
        before.into_iter().chain(self.runs.range(start..end)).map(|(&key, &(blocks, may_free))| Run {
            key: Key::from_bits(key),
            blocks,
            may_free,
        })
    }

    /// These blocks are zero from now on, and say so themselves. False, and nothing is changed, when the table
    /// takes no new runs. Panics when the run is empty or leaves its disk.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn add(&mut self, run: Run) -> bool {
        self.change(run.key, run.blocks, Some(run.may_free), RUNS_FOR_NEW)
    }

    /// These blocks are zero from now on, and say so themselves. False, and nothing is changed, when the table is full.
    /// A caller promises new runs no more than [`RUNS_FOR_NEW`]. Panics when the run is empty or leaves its disk.
    #[must_use]
    pub(crate) fn put(&mut self, run: Run) -> bool {
        self.change(run.key, run.blocks, Some(run.may_free), RUNS_MAX)
    }

    /// The same for what is found on flash: all has room that had.
    #[must_use]
    pub(crate) fn restore(&mut self, run: Run) -> bool {
        self.change(run.key, run.blocks, Some(run.may_free), RUNS_FOUND_MAX)
    }

    /// These blocks are in no run from now on. False, and nothing is changed, when a run has to be split and the
    /// table is full. Panics when there are none, or they leave their disk.
    #[must_use]
    pub(crate) fn remove(&mut self, key: Key, blocks: u64) -> bool {
        self.change(key, blocks, None, RUNS_MAX)
    }

    /// The same as a record on flash says it.
    #[must_use]
    pub(crate) fn remove_found(&mut self, key: Key, blocks: u64) -> bool {
        self.change(key, blocks, None, RUNS_FOUND_MAX)
    }

    /// The runs of a disk are gone.
    pub(crate) fn remove_row(&mut self, row: u16) {
        self.runs.retain(|key, _| Key::from_bits(*key).row() != row);
    }

    /// Whether the table takes a new run.
    #[cfg(test)]
    pub(crate) fn takes_new(&self) -> bool {
        self.runs.len() < RUNS_FOR_NEW
    }

    /// Whether `splits` runs can be split.
    #[cfg(test)]
    pub(crate) fn takes_splits(&self, splits: usize) -> bool {
        self.runs.len() + splits <= RUNS_MAX
    }

    /// What of a run lies before these keys, and what behind.
    fn rests(run: Run, start: u64, end: u64) -> [Option<(u64, u64)>; 2] {
        let before = (run.key.bits() < start).then(|| (run.key.bits(), start - run.key.bits()));
        let behind = (run.end() > end).then(|| (end, run.end() - end));
        [before, behind]
    }

    fn change(&mut self, key: Key, blocks: u64, value: Option<bool>, most: usize) -> bool {
        assert!(blocks > 0 && blocks <= BLOCKS_MAX - key.block(), "{blocks} blocks from {key:?}");
        let (mut start, mut end) = (key.bits(), key.bits() + blocks);
        // What stays of the runs here, and, of one that says the same, what joins the new one: with its
        // neighbours, unless a disk ends there.
        let wide = key.bits().saturating_sub(u64::from(key.block() > 0));
        let wide_blocks = end - wide + u64::from(key.block() + blocks < BLOCKS_MAX);
        let near: Vec<Run> = self.touching(Key::from_bits(wide), wide_blocks).collect();
        let mut rests = Vec::new();
        for run in &near {
            if value == Some(run.may_free) {
                (start, end) = (start.min(run.key.bits()), end.max(run.end()));
            } else {
                rests.extend(
                    Self::rests(*run, key.bits(), key.bits() + blocks)
                        .into_iter()
                        .flatten()
                        .map(|(at, blocks)| (at, (blocks, run.may_free))),
                );
            }
        }
        let after = self.runs.len() - near.len() + rests.len() + usize::from(value.is_some());
        if after > most && after > self.runs.len() {
            return false;
        }
        for run in &near {
            self.runs.remove(&run.key.bits());
        }
        self.runs.extend(rests);
        self.runs.extend(value.map(|may_free| (start, (end - start, may_free))));
        true
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    fn run(block: u64, blocks: u64, may_free: bool) -> Run {
        Run { key: Key::new(1, block), blocks, may_free }
    }

    fn all(zeros: &Zeros) -> Vec<(u64, u64, bool)> {
        zeros.runs().map(|run| (run.key.block(), run.blocks, run.may_free)).collect()
    }

    #[test]
    fn neighbours_that_say_the_same_are_one_run() {
        let mut zeros = Zeros::default();
        assert!(
            zeros.add(run(10, 10, false)) && zeros.add(run(30, 10, false)) && zeros.add(run(20, 10, false))
        );
        assert_eq!(all(&zeros), [(10, 30, false)]);
        assert!(zeros.add(run(15, 5, true)));
        assert_eq!(all(&zeros), [(10, 5, false), (15, 5, true), (20, 20, false)]);
        assert!(zeros.remove(Key::new(1, 25), 1));
        assert_eq!(all(&zeros), [(10, 5, false), (15, 5, true), (20, 5, false), (26, 14, false)]);
        assert!(zeros.get(Key::new(1, 25)).is_none());
        assert_eq!(zeros.get(Key::new(1, 39)).unwrap().blocks, 14);
        assert!(zeros.get(Key::new(2, 12)).is_none());
    }

    #[test]
    fn runs_of_two_disks_do_not_join() {
        let mut zeros = Zeros::default();
        assert!(zeros.add(Run { key: Key::new(1, BLOCKS_MAX - 1), blocks: 1, may_free: true }));
        assert!(zeros.add(Run { key: Key::new(2, 0), blocks: 1, may_free: true }));
        assert_eq!(zeros.len(), 2);
        zeros.remove_row(1);
        assert_eq!(zeros.runs().map(|run| run.key.row()).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_third_of_the_table_is_for_splits() {
        let mut zeros = Zeros::default();
        let mut added = 0;
        while zeros.takes_new() {
            assert!(zeros.add(run(added * 100, 10, false)));
            added += 1;
        }
        assert_eq!(added, 1024);
        assert!(!zeros.add(run(added * 100, 10, false)), "a new run");
        assert!(zeros.add(run(0, 11, false)), "one that grows");
        for n in 0..512 {
            assert!(zeros.takes_splits(1));
            assert!(zeros.remove(Key::new(1, n * 100 + 5), 1), "split {n}");
        }
        let full = zeros.clone();
        assert!(!zeros.remove(Key::new(1, 2), 1) && !zeros.takes_splits(1));
        assert_eq!(zeros, full, "nothing is changed");
        assert!(zeros.remove(Key::new(1, 0), 5));
        assert!(zeros.remove(Key::new(1, 102), 1), "one is gone, so there is room");
    }

    #[test]
    fn the_runs_are_those_of_a_model() {
        for seed in 0..200 {
            let mut random = Random::from_seed(seed);
            let mut zeros = Zeros::default();
            let mut model = [None; 200];
            for _ in 0..300 {
                let start = random.index(200);
                let blocks = 1 + random.index((200 - start).min(40));
                let value = [None, Some(false), Some(true)][random.index(3)];
                let (key, count) = (Key::new(1, start as u64), blocks as u64);
                assert!(match value {
                    Some(may_free) => zeros.add(Run { key, blocks: count, may_free }),
                    None => zeros.remove(key, count),
                });
                model[start..start + blocks].fill(value);
                for (block, value) in model.iter().enumerate() {
                    let found = zeros.get(Key::new(1, block as u64));
                    assert_eq!(found.map(|run| run.may_free), *value, "seed {seed}, block {block}");
                }
                let runs: Vec<Run> = zeros.runs().collect();
                for pair in runs.windows(2) {
                    let joined = pair[0].end() == pair[1].key.bits() && pair[0].may_free == pair[1].may_free;
                    assert!(pair[0].end() <= pair[1].key.bits() && !joined, "seed {seed}");
                }
                let overlapping: Vec<Run> = zeros.overlapping(key, count).collect();
                let wanted: Vec<Run> = runs
                    .into_iter()
                    .filter(|run| run.key.bits() < key.bits() + count && key.bits() < run.end())
                    .map(|run| {
                        let from = run.key.max(key);
                        let blocks = run.end().min(key.bits() + count) - from.bits();
                        Run { key: from, blocks, ..run }
                    })
                    .collect();
                assert_eq!(overlapping, wanted, "seed {seed}");
            }
        }
    }
}
