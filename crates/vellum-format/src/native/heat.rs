//! How hot the units of a disk are: what was read of them since they were written last, fading.
//!
//! ```text
//!   16 bits a unit │ shy: 4 bits │ heat: 12 bits, in sixteenths of a unit that were read │
//!
//!   read     heat + its share, at least a sixteenth, as a small read costs a slow drive a seek   hot at 16 · 2^shy
//!   write    heat = 0; of a copy: shy + 1                          so what is written again and again has to be read more
//!   age      heat / 2; after several, shy − 1
//! ```
//!
//! 1. Two bytes a unit and a bounded list of those that became hot. A unit that finds the list full is found by a later
//!    round of [`Heat::age`].
//! 2. It is a hint: it is counted without an order between workers, and what is lost costs a later promotion.
//! 3. No clock: the caller decides when it ages.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use crate::state::lock;

/// Heat of a unit that was read once in whole.
const WHOLE: u64 = 16;
const HEAT_BITS: u32 = 12;
const HEAT_MAX: u16 = (1 << HEAT_BITS) - 1;
const SHY_MAX: u16 = 7;
/// The list of hot units.
const HOT_MAX: usize = 4096;
/// A unit grows less shy once in this many rounds of aging.
const ROUNDS_SHY: u32 = 8;

/// What is kept over restarts: pages of this many units that have any heat.
const PAGE: usize = 512;
const MAGIC: &[u8; 8] = b"VELLUMt1";
const HEAD: usize = 24;

pub(super) struct Heat {
    unit_bytes: u64,
    units: Box<[AtomicU16]>,
    hot: Mutex<Vec<u64>>,
    rounds: Mutex<u32>,
}

fn heat_of(word: u16) -> u16 {
    word & HEAT_MAX
}

fn shy_of(word: u16) -> u16 {
    word >> HEAT_BITS
}

/// From which heat on a unit is hot.
fn hot_at(word: u16) -> u16 {
    u16::try_from(WHOLE).expect("small") << shy_of(word).min(SHY_MAX)
}

fn is_hot(word: u16) -> bool {
    heat_of(word) >= hot_at(word)
}

impl Heat {
    pub(super) fn new(units: u64, unit_bytes: u64) -> Self {
        let units = (0..units).map(|_| AtomicU16::new(0)).collect();
        Self { unit_bytes, units, hot: Mutex::default(), rounds: Mutex::default() }
    }

    fn word(&self, unit: u64) -> Option<&AtomicU16> {
        self.units.get(usize::try_from(unit).ok()?)
    }

    fn change(&self, unit: u64, change: impl Fn(u16) -> u16) -> (u16, u16) {
        let Some(word) = self.word(unit) else { return (0, 0) };
        match word.fetch_update(Relaxed, Relaxed, |word| Some(change(word))) {
            Ok(before) => (before, change(before)),
            Err(before) => (before, before),
        }
    }

    fn note_hot(&self, unit: u64) {
        let mut hot = lock(&self.hot);
        if hot.len() < HOT_MAX {
            hot.push(unit);
        }
    }

    /// A request has read this many bytes of a unit.
    pub(super) fn read(&self, unit: u64, bytes: u64) {
        let share = (bytes * WHOLE).div_ceil(self.unit_bytes).clamp(1, WHOLE);
        let share = u16::try_from(share).expect("at most a whole");
        let (before, after) =
            self.change(unit, |word| (word & !HEAT_MAX) | (heat_of(word) + share).min(HEAT_MAX));
        if is_hot(after) && !is_hot(before) {
            self.note_hot(unit);
        }
    }

    /// A unit changes. Of one that the fast medium had, the copy was in vain.
    pub(super) fn written(&self, unit: u64, was_copied: bool) {
        let shy = u16::from(was_copied);
        self.change(unit, |word| (shy_of(word) + shy).min(SHY_MAX) << HEAT_BITS);
    }

    pub(super) fn heat(&self, unit: u64) -> u16 {
        self.word(unit).map_or(0, |word| heat_of(word.load(Relaxed)))
    }

    /// Whether a unit that was promoted for its heat is worth less than one that is hot.
    pub(super) fn is_cold(&self, unit: u64) -> bool {
        u64::from(self.heat(unit)) < WHOLE / 4
    }

    /// Some of those that are hot and not `copied`. Each is named once.
    pub(super) fn take_hot(&self, most: usize, is_copied: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut hot = lock(&self.hot);
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some(unit) = hot.pop()
        {
            let is_worth = self.word(unit).is_some_and(|word| is_hot(word.load(Relaxed)));
            if is_worth && !is_copied(unit) && !taken.contains(&unit) {
                taken.push(unit);
            }
        }
        taken.sort_unstable();
        taken
    }

    /// Time has passed: all heat fades. What is still hot, and not `copied`, is listed again.
    pub(super) fn age(&self, is_copied: impl Fn(u64) -> bool) {
        let less_shy = {
            let mut rounds = lock(&self.rounds);
            *rounds += 1;
            rounds.is_multiple_of(ROUNDS_SHY)
        };
        lock(&self.hot).clear();
        for unit in (0..self.units.len() as u64)
            .filter(|unit| self.word(*unit).is_some_and(|word| word.load(Relaxed) != 0))
        {
            let (_, after) = self.change(unit, |word| {
                let shy = shy_of(word).saturating_sub(u16::from(less_shy));
                (shy << HEAT_BITS) | (heat_of(word) / 2)
            });
            if is_hot(after) && !is_copied(unit) {
                self.note_hot(unit);
            }
        }
    }

    /// What is kept over a restart.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEAD];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[12..20].copy_from_slice(&self.unit_bytes.to_be_bytes());
        for (number, page) in (0_u32..).zip(self.units.chunks(PAGE)) {
            if page.iter().any(|word| word.load(Relaxed) != 0) {
                bytes.extend_from_slice(&number.to_be_bytes());
                let words = (0..PAGE).map(|index| page.get(index).map_or(0, |word| word.load(Relaxed)));
                bytes.extend(words.flat_map(u16::to_be_bytes));
            }
        }
        let crc = crc32c::crc32c(&bytes[12..]);
        bytes[8..12].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    /// Takes up what was kept, if it is of such a disk. Whether it is.
    pub(super) fn take_up(&self, bytes: &[u8]) -> bool {
        let is_its = bytes.len() >= HEAD
            && bytes[..8] == *MAGIC
            && bytes[8..12] == crc32c::crc32c(&bytes[12..]).to_be_bytes()
            && bytes[12..20] == self.unit_bytes.to_be_bytes();
        if !is_its {
            return false;
        }
        for page in bytes[HEAD..].chunks_exact(4 + 2 * PAGE) {
            let (number, words) = page.split_at(4);
            let number = u64::from(u32::from_be_bytes(number.try_into().expect("four bytes")));
            for (index, word) in (0_u64..).zip(words.chunks_exact(2)) {
                let unit = number * PAGE as u64 + index;
                let kept = u16::from_be_bytes(word.try_into().expect("two bytes"));
                let (before, after) = self.change(unit, |word| word.max(kept));
                if is_hot(after) && !is_hot(before) {
                    self.note_hot(unit);
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 1 << 20;

    fn none(_: u64) -> bool {
        false
    }

    #[test]
    fn a_unit_that_was_read_once_in_whole_is_hot_and_one_that_was_read_in_part_is_not() {
        let heat = Heat::new(8, UNIT);
        heat.read(3, UNIT);
        heat.read(4, UNIT / 2);
        for _ in 0..16 {
            heat.read(5, 4096);
            heat.read(9, 4096);
        }
        assert_eq!(heat.take_hot(9, none), [3, 5]);
        assert!(heat.take_hot(9, none).is_empty(), "each is named once");
        heat.read(4, UNIT / 2);
        assert!(heat.take_hot(9, |unit| unit == 4).is_empty(), "it was copied meanwhile");
    }

    #[test]
    fn a_write_cools_a_unit_and_one_that_was_copied_in_vain_has_to_be_read_more() {
        let heat = Heat::new(2, UNIT);
        heat.read(0, UNIT);
        heat.written(0, false);
        assert!(heat.take_hot(2, none).is_empty());
        heat.read(0, UNIT);
        assert_eq!(heat.take_hot(2, none), [0]);
        heat.written(0, true);
        heat.read(0, UNIT);
        assert!(heat.take_hot(2, none).is_empty());
        heat.read(0, UNIT);
        assert_eq!(heat.take_hot(2, none), [0], "twice as much");
        for _ in 0..100 {
            heat.written(0, true);
        }
        (0..1000).for_each(|_| heat.read(0, UNIT));
        assert_eq!(heat.take_hot(2, none), [0], "never out of reach");
        assert_eq!(heat.heat(0), HEAT_MAX);
    }

    #[test]
    fn heat_fades_and_what_the_list_had_no_room_for_is_found() {
        let heat = Heat::new(10_000, UNIT);
        (0..10_000).for_each(|unit| (0..4).for_each(|_| heat.read(unit, UNIT)));
        assert_eq!(heat.take_hot(20_000, none).len(), HOT_MAX);
        heat.age(|unit| unit < 9_000);
        let hot = heat.take_hot(20_000, none);
        assert_eq!((hot.len(), hot[0]), (1_000, 9_000));
        assert!(!heat.is_cold(1));
        (0..4).for_each(|_| heat.age(none));
        assert!(heat.is_cold(1) && heat.take_hot(9, none).is_empty());
        heat.written(2, true);
        (0..8).for_each(|_| heat.age(none));
        heat.read(2, UNIT);
        assert_eq!(heat.take_hot(9, none), [2], "it is not shy any more");
    }

    #[test]
    fn what_is_kept_is_taken_up_and_nothing_else_is() {
        let heat = Heat::new(5_000, UNIT);
        for unit in [7, 8, 4_999] {
            heat.read(unit, UNIT);
        }
        heat.read(9, 1);
        let bytes = heat.to_bytes();
        assert_eq!(bytes.len(), HEAD + 2 * (4 + 2 * PAGE), "two pages have any");
        let again = Heat::new(5_000, UNIT);
        assert!(again.take_up(&bytes));
        assert_eq!((again.take_hot(9, none), again.heat(9)), (vec![7, 8, 4_999], 1));
        let smaller = Heat::new(8, UNIT);
        assert!(smaller.take_up(&bytes));
        assert_eq!(smaller.take_hot(9, none), [7]);
        for at in [0, 9, 15, 30, bytes.len() - 1] {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(!Heat::new(5_000, UNIT).take_up(&bad), "{at}");
        }
        assert!(!Heat::new(5_000, UNIT / 2).take_up(&bytes), "another unit size");
        assert!(!Heat::new(5_000, UNIT).take_up(&bytes[..10]));
    }
}
