//! Which regions of a disk are being written: home and flash may differ there after a crash.
//!
//! ```text
//!   key of the first block of 64 regions ─► a bit for each region of 64 MiB             sorted by key, part of the ledger
//!
//!   not written ──enter──► a record says *written* ► durable ──► writers ──► flush of home ► flush of flash ► *settled*
//!                                                                   crash: the blocks of the region are void
//! ```
//!
//! 1. There are at most as many words as fit the ledger's slice beside all rows and runs, and few enough that one record
//!    can name them all. A writer that finds no room for another goes past the cache.
//! 2. A word without a bit is not there.
//! 3. A region is settled only if no writer has entered it since before the flush of home. A writer that is not known to have
//!    ended keeps its region from being settled until the disk is opened again.
//!
//! Nothing here waits. Who enters and settles is in `through`.

use std::collections::BTreeMap;

use crate::layout::Key;

/// Blocks of a region: 64 MiB.
pub(crate) const REGION_BLOCKS: u64 = 1 << 14;
/// Blocks that the regions of one word have: 4 GiB.
pub(crate) const WORD_BLOCKS: u64 = 64 * REGION_BLOCKS;
/// The most words.
pub(crate) const WORDS_MAX: usize = 512;
/// An item about a word takes 24 bytes of a record.
pub(crate) const WORD_BYTES: usize = 24;

/// How many words a cache has whose records have this many bytes at most: an eighth of one record can name all.
pub(crate) fn words_max(record_bytes_max: usize) -> usize {
    (record_bytes_max / 8 / 32).min(WORDS_MAX)
}

/// 64 regions of a disk, and some of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word {
    /// The first block of the first of the 64.
    pub(crate) key: Key,
    /// A bit for each region, the first the lowest. Not zero.
    pub(crate) bits: u64,
}

impl Word {
    /// The word of this region alone.
    pub(crate) fn of(region: Key) -> Self {
        let within = region.block() % WORD_BLOCKS / REGION_BLOCKS;
        Self { key: Key::new(region.row(), region.block() / WORD_BLOCKS * WORD_BLOCKS), bits: 1 << within }
    }

    /// Whether these numbers, found on flash, are a word.
    pub(crate) fn is_good(self) -> bool {
        self.key.block().is_multiple_of(WORD_BLOCKS) && self.bits != 0
    }

    /// The first block of each of its regions.
    pub(crate) fn regions(self) -> impl Iterator<Item = Key> {
        (0..64u64).filter(move |n| self.bits & 1 << n != 0).map(move |n| self.key.plus(n * REGION_BLOCKS))
    }
}

/// The first block of the region that the block is in.
pub(crate) fn region_of(key: Key) -> Key {
    Key::new(key.row(), key.block() / REGION_BLOCKS * REGION_BLOCKS)
}

/// The first block of each region that has some of these blocks.
pub(crate) fn regions_of(row: u16, blocks: &std::ops::Range<u64>) -> impl Iterator<Item = Key> + use<> {
    let (first, end) = (blocks.start / REGION_BLOCKS, blocks.end.div_ceil(REGION_BLOCKS));
    (first..end).map(move |region| Key::new(row, region * REGION_BLOCKS))
}

/// The regions that count as written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Regions {
    words: BTreeMap<u64, u64>,
}

impl Regions {
    /// How many words there are.
    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// How many regions.
    pub(crate) fn count(&self) -> u64 {
        self.words.values().map(|bits| u64::from(bits.count_ones())).sum()
    }

    /// All words in the order of their keys.
    pub(crate) fn words(&self) -> impl Iterator<Item = Word> {
        self.words.iter().map(|(&key, &bits)| Word { key: Key::from_bits(key), bits })
    }

    /// Those of a disk.
    pub(crate) fn words_of(&self, row: u16) -> impl Iterator<Item = Word> {
        let first = u64::from(row) << 48;
        let words = self.words.range(first..=first | (crate::layout::BLOCKS_MAX - 1));
        words.map(|(&key, &bits)| Word { key: Key::from_bits(key), bits })
    }

    /// Whether the region of this block counts as written.
    pub(crate) fn has(&self, key: Key) -> bool {
        let word = Word::of(key);
        self.words.get(&word.key.bits()).is_some_and(|bits| bits & word.bits != 0)
    }

    /// Whether there is a word for the region of this block.
    pub(crate) fn has_word(&self, key: Key) -> bool {
        self.words.contains_key(&Word::of(key).key.bits())
    }

    /// These regions count as written.
    pub(crate) fn add(&mut self, word: Word) {
        *self.words.entry(word.key.bits()).or_default() |= word.bits;
    }

    /// These regions count as written no more.
    pub(crate) fn remove(&mut self, word: Word) {
        if let Some(bits) = self.words.get_mut(&word.key.bits()) {
            *bits &= !word.bits;
            if *bits == 0 {
                self.words.remove(&word.key.bits());
            }
        }
    }

    /// The regions of a disk are gone.
    pub(crate) fn remove_row(&mut self, row: u16) {
        self.words.retain(|key, _| Key::from_bits(*key).row() != row);
    }
}

/// The writers in a region.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    /// Writers that have not ended.
    writers: u32,
    /// How many there have been.
    entered: u64,
    /// When the last one entered, in seconds.
    last: u32,
    /// The record that says *written* is durable.
    is_durable: bool,
    /// A writer was dropped half way: its bytes may come later.
    is_lost: bool,
}

/// The writers in the regions that count as written.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    each: BTreeMap<u64, Use>,
}

/// A region without writers, and how many had entered it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Idle {
    pub(crate) region: Key,
    entered: u64,
}

impl Uses {
    /// A writer enters the region. Returns whether that is durable.
    pub(crate) fn enter(&mut self, region: Key, now: u32) -> bool {
        let one = self.each.entry(region.bits()).or_default();
        one.writers += 1;
        one.entered += 1;
        one.last = now;
        one.is_durable
    }

    /// The record that says *written* is durable. A writer is in the region.
    pub(crate) fn is_durable_now(&mut self, region: Key) {
        self.each.entry(region.bits()).or_default().is_durable = true;
    }

    /// A writer has ended, or was dropped half way.
    pub(crate) fn leave(&mut self, region: Key, is_lost: bool) {
        if let Some(one) = self.each.get_mut(&region.bits()) {
            one.writers = one.writers.saturating_sub(1);
            one.is_lost |= is_lost;
        }
    }

    /// The region, if there is no writer in it, and none has entered it since then.
    pub(crate) fn idle(&self, region: Key, until: u32) -> Option<Idle> {
        let one = self.each.get(&region.bits()).copied().unwrap_or_default();
        let is_idle = one.writers == 0 && !one.is_lost && one.last <= until;
        is_idle.then_some(Idle { region, entered: one.entered })
    }

    /// Whether no writer has entered the region since it was found idle.
    pub(crate) fn is_still(&self, idle: Idle) -> bool {
        self.idle(idle.region, u32::MAX).is_some_and(|now| now.entered == idle.entered)
    }

    /// The region counts as written no more.
    pub(crate) fn forget(&mut self, region: Key) {
        self.each.remove(&region.bits());
    }

    /// Those of a disk count as written no more.
    pub(crate) fn forget_row(&mut self, row: u16) {
        self.each.retain(|key, _| Key::from_bits(*key).row() != row);
    }

    /// How much memory this takes, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        (self.each.len() * (size_of::<Use>() + 16)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_has_its_word_and_its_bit() {
        let key = Key::new(3, 70 * REGION_BLOCKS + 5);
        assert_eq!(region_of(key), Key::new(3, 70 * REGION_BLOCKS));
        let word = Word::of(key);
        assert_eq!((word.key, word.bits), (Key::new(3, WORD_BLOCKS), 1 << 6));
        assert_eq!(word.regions().collect::<Vec<_>>(), [region_of(key)]);
        let of: Vec<u64> = regions_of(3, &(REGION_BLOCKS - 1..REGION_BLOCKS + 1)).map(Key::block).collect();
        assert_eq!(of, [0, REGION_BLOCKS]);
        let last = Key::new(3, crate::layout::BLOCKS_MAX - 1);
        assert_eq!(Word::of(last).bits, 1 << 63);
        assert_eq!(Word::of(last).regions().count(), 1);
    }

    #[test]
    fn the_words_are_those_of_a_model() {
        let mut random = vellum_core::Random::from_seed(4);
        let (mut regions, mut model) = (Regions::default(), std::collections::BTreeSet::new());
        for _ in 0..4000 {
            let row = u16::try_from(random.below(2)).unwrap();
            let key = region_of(Key::new(row, random.below(300) * REGION_BLOCKS));
            match random.below(20) {
                0 => {
                    regions.remove_row(row);
                    model.retain(|key: &Key| key.row() != row);
                }
                1..=9 => {
                    regions.remove(Word::of(key));
                    model.remove(&key);
                }
                _ => {
                    regions.add(Word::of(key));
                    model.insert(key);
                }
            }
            assert_eq!(regions.has(key.plus(7)), model.contains(&key));
            assert_eq!(regions.count(), model.len() as u64);
        }
        let all: Vec<Key> = regions.words().flat_map(Word::regions).collect();
        assert_eq!(all, model.iter().copied().collect::<Vec<_>>());
        let of_row: Vec<Key> = regions.words_of(1).flat_map(Word::regions).collect();
        assert_eq!(of_row, model.into_iter().filter(|key| key.row() == 1).collect::<Vec<_>>());
        assert!(regions.words().all(Word::is_good));
    }

    #[test]
    fn a_region_is_idle_when_all_writers_have_ended() {
        let (mut uses, region) = (Uses::default(), Key::new(1, 0));
        assert!(!uses.enter(region, 5));
        uses.is_durable_now(region);
        assert!(uses.enter(region, 6) && uses.idle(region, 9).is_none());
        uses.leave(region, false);
        uses.leave(region, false);
        assert!(uses.idle(region, 5).is_none());
        let idle = uses.idle(region, 6).unwrap();
        assert!(uses.is_still(idle));
        uses.enter(region, 6);
        uses.leave(region, false);
        assert!(!uses.is_still(idle), "somebody has been there");
        uses.enter(region, 6);
        uses.leave(region, true);
        assert!(uses.idle(region, u32::MAX).is_none(), "its bytes may come later");
    }
}
