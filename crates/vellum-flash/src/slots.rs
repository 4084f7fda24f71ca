//! Which slots of flash are free.
//!
//! ```text
//!   free ──take──► taken ──leave──► leaving ──release──► free         three bits a slot, by segments of 65,536
//!     ▲              │  give back: it was never published     │ begin trim: it is stale, flash still has its bytes
//!     └──────────────┘                                       ▼
//!     ▲───────────────────── end trim ────────────────── trimmed
//!
//!   free ──take this──► taken ──leave──► leaving, unrecorded ──release──► free       of an opening alone
//! ```
//!
//! 1. A slot is given out only while it is free, and to one caller. One of which a TRIM is under way is not free.
//! 2. The caller decides when a slot that leaves is free again (a durable record has released it, no request can
//!    be reading it). Nothing here reads or writes flash.
//! 3. A caller names a segment first, that of the block's group. Only when it has nothing free is another used.
//!    A block without a segment gets one that has more free slots than most, so that the rest of its group will
//!    have room there.
//! 4. A slot leaves *unrecorded* when the map does not have its block and no record says so. It is free when no slice on flash
//!    names it any more, which the caller decides for all of them at once.
//!
//! Within a segment slots are given out upwards from where the last one was, so neighbouring blocks that are
//! written together are neighbours on flash.

use crate::layout::{SEGMENT_SLOTS, Slot};

/// What a slot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// Nothing is in it.
    Free,
    /// A block's, or promised to a request that writes it.
    Taken,
    /// No block's any more, but a recovery or a request may still read it.
    Leaving,
    /// A TRIM of it is under way.
    Trimmed,
}

/// The slots of 64 numbers: a bit for each in two words.
#[derive(Debug, Clone, Copy, Default)]
struct Word {
    free: u64,
    leaving: u64,
    /// Of those that are free: flash was not told that nobody needs their bytes. Of those that leave: unrecorded. Of the others: a
    /// TRIM is under way.
    stale: u64,
}

#[derive(Debug, Clone, Copy)]
struct Segment {
    free: u32,
    /// The word in which the last slot was found.
    at: u32,
}

const WORD_SLOTS: u32 = 64;
/// A search for stale slots looks at this many words, or less.
const TRIM_LOOKS_MAX: u32 = 4096;
const SEGMENT_WORDS: u32 = SEGMENT_SLOTS / WORD_SLOTS;

/// The states of all slots.
#[derive(Debug)]
pub(crate) struct Slots {
    words: Vec<Word>,
    segments: Vec<Segment>,
    slots: u32,
    free: u32,
    leaving: u32,
    /// How many are free and stale, and of how many a TRIM is under way.
    stale: u32,
    trimmed: u32,
    /// The slot at which the next search for stale ones begins.
    trim_at: u32,
    /// The segment of blocks that name none.
    current: u16,
}

impl Slots {
    /// `slots` slots, all free.
    pub(crate) fn new(slots: u32) -> Self {
        let word = |number: u32| {
            let left = slots - number * WORD_SLOTS;
            Word { free: if left >= WORD_SLOTS { u64::MAX } else { (1 << left) - 1 }, leaving: 0, stale: 0 }
        };
        let segment =
            |number: u32| Segment { free: (slots - number * SEGMENT_SLOTS).min(SEGMENT_SLOTS), at: 0 };
        Self {
            words: (0..slots.div_ceil(WORD_SLOTS)).map(word).collect(),
            segments: (0..slots.div_ceil(SEGMENT_SLOTS)).map(segment).collect(),
            slots,
            free: slots,
            leaving: 0,
            stale: 0,
            trimmed: 0,
            trim_at: 0,
            current: 0,
        }
    }

    /// How many there are.
    pub(crate) const fn total(&self) -> u32 {
        self.slots
    }

    /// How many are free.
    pub(crate) const fn free(&self) -> u32 {
        self.free
    }

    /// How many are leaving.
    pub(crate) const fn leaving(&self) -> u32 {
        self.leaving
    }

    /// Of how many a TRIM is under way.
    pub(crate) const fn trimmed(&self) -> u32 {
        self.trimmed
    }

    /// How many are taken.
    pub(crate) const fn taken(&self) -> u32 {
        self.slots - self.free - self.leaving - self.trimmed
    }

    /// What a slot is. Panics when there is no such slot.
    pub(crate) fn state(&self, slot: Slot) -> SlotState {
        assert!(slot.0 < self.slots, "slot {} of {}", slot.0, self.slots);
        let (word, bit) = self.word(slot);
        match (word.free & bit != 0, word.leaving & bit != 0) {
            (true, _) => SlotState::Free,
            (false, true) => SlotState::Leaving,
            (false, false) if word.stale & bit != 0 => SlotState::Trimmed,
            (false, false) => SlotState::Taken,
        }
    }

    /// A free slot, which is taken from now on: of the segment `prefer` if it has one. `None` when no slot is
    /// free.
    pub(crate) fn take(&mut self, prefer: Option<u16>) -> Option<Slot> {
        self.take_run(prefer, 1).map(|(slot, _)| slot)
    }

    /// Up to `most` neighbouring free slots of one segment, as [`Slots::take`]: the first, and how many. It takes
    /// the first run that it finds, so a caller that needs more asks again.
    pub(crate) fn take_run(&mut self, prefer: Option<u16>, most: u32) -> Option<(Slot, u32)> {
        debug_assert!(most > 0);
        if self.free == 0 || most == 0 {
            return None;
        }
        let has_free = |segment: &u16| self.segments.get(usize::from(*segment)).is_some_and(|s| s.free > 0);
        let segment = match prefer.filter(has_free) {
            Some(segment) => segment,
            None => self.choose_segment(),
        };
        let first = self.find_in(segment);
        let end = self.segment_end(segment);
        let mut count = 0;
        while count < most && first.0 + count < end && self.is_free(Slot(first.0 + count)) {
            self.set_taken(Slot(first.0 + count));
            count += 1;
        }
        Some((first, count))
    }

    /// Takes this very slot, which a recovery has found in use. False when it is not free.
    #[must_use]
    pub(crate) fn take_this(&mut self, slot: Slot) -> bool {
        let is_free = slot.0 < self.slots && self.is_free(slot);
        if is_free {
            self.set_taken(slot);
        }
        is_free
    }

    /// Takes these slots of a segment, as [`Slots::take_this`]: at most those of a group, of which the segment has each. The index of
    /// the first that is not free, if there is one.
    pub(crate) fn take_these(&mut self, segment: u16, numbers: &[u16]) -> Option<usize> {
        let words = usize::from(segment) * SEGMENT_WORDS as usize;
        let mut at = 0;
        while at < numbers.len() {
            // Neighbours in one word are taken at once.
            let (first, bit) = (numbers[at], u32::from(numbers[at]) % WORD_SLOTS);
            let mut count = 1;
            while at + count < numbers.len()
                && bit as usize + count < WORD_SLOTS as usize
                && usize::from(numbers[at + count]) == usize::from(first) + count
            {
                count += 1;
            }
            let bits = u64::MAX >> (WORD_SLOTS as usize - count) << bit;
            let word = &mut self.words[words + usize::from(first) / WORD_SLOTS as usize];
            if word.free & bits != bits {
                let taken = (!word.free & bits) >> bit;
                return Some(at + taken.trailing_zeros() as usize);
            }
            word.free &= !bits;
            if word.stale & bits != 0 {
                self.stale -= (word.stale & bits).count_ones();
                word.stale &= !bits;
            }
            at += count;
        }
        let count = u32::try_from(numbers.len()).expect("at most those of a group");
        self.segments[usize::from(segment)].free -= count;
        self.free -= count;
        None
    }

    /// A taken slot is free again: no entry has ever named it.
    pub(crate) fn give_back(&mut self, slot: Slot) {
        assert_eq!(self.state(slot), SlotState::Taken, "slot {} is given back", slot.0);
        self.set_free(slot);
        self.set_stale(slot);
    }

    /// No entry names this taken slot any more.
    pub(crate) fn leave(&mut self, slot: Slot) {
        assert_eq!(self.state(slot), SlotState::Taken, "slot {} leaves", slot.0);
        let (index, bit) = Self::place(slot);
        self.words[index].leaving |= bit;
        self.leaving += 1;
    }

    /// A slot that was leaving is free.
    pub(crate) fn release(&mut self, slot: Slot) {
        assert_eq!(self.state(slot), SlotState::Leaving, "slot {} is released", slot.0);
        let (index, bit) = Self::place(slot);
        self.words[index].leaving &= !bit;
        self.leaving -= 1;
        self.set_free(slot);
        self.set_stale(slot);
    }

    /// As [`Slots::leave`], unrecorded.
    pub(crate) fn leave_unrecorded(&mut self, slot: Slot) {
        self.leave(slot);
        let (index, bit) = Self::place(slot);
        self.words[index].stale |= bit;
    }

    /// All slots that have left unrecorded are free.
    pub(crate) fn release_unrecorded(&mut self) {
        for index in 0..self.words.len() {
            let mut unrecorded = self.words[index].leaving & self.words[index].stale;
            while unrecorded != 0 {
                let bit = unrecorded & unrecorded.wrapping_neg();
                unrecorded ^= bit;
                self.words[index].stale &= !bit;
                let number = u32::try_from(index).expect("a slot has 32 bits") * WORD_SLOTS;
                self.release(Slot(number + bit.trailing_zeros()));
            }
        }
    }

    /// Up to `most` neighbouring slots that are free and stale, at least `least` of them: the first, and how many. They are
    /// not free until [`Slots::end_trim`]. Looks at a bounded number of slots, so it may find none although there are
    /// some: a caller asks again.
    pub(crate) fn begin_trim(&mut self, least: u32, most: u32) -> Option<(Slot, u32)> {
        if self.stale < least || most < least || least == 0 {
            return None;
        }
        let mut looked = 0;
        while looked < TRIM_LOOKS_MAX {
            let first = self.trim_at;
            if first >= self.slots {
                (self.trim_at, looked) = (0, looked + 1);
                continue;
            }
            let is_stale = |slots: &Self, slot: u32| {
                let (word, bit) = slots.word(Slot(slot));
                word.free & word.stale & bit != 0
            };
            let (word, bit) = self.word(Slot(first));
            let rest = (word.free & word.stale) & !(bit - 1);
            if rest == 0 {
                self.trim_at = (first / WORD_SLOTS + 1) * WORD_SLOTS;
                looked += 1;
                continue;
            }
            let first = first / WORD_SLOTS * WORD_SLOTS + rest.trailing_zeros();
            let mut count = 1;
            while count < most && first + count < self.slots && is_stale(self, first + count) {
                count += 1;
            }
            (self.trim_at, looked) = (first + count, looked + count.div_ceil(WORD_SLOTS));
            if count < least {
                continue;
            }
            for slot in first..first + count {
                self.set_taken_keeping_stale(Slot(slot));
            }
            return Some((Slot(first), count));
        }
        None
    }

    /// The TRIM has ended, in whatever way: these slots are free.
    pub(crate) fn end_trim(&mut self, first: Slot, count: u32) {
        for slot in first.0..first.0 + count {
            assert_eq!(self.state(Slot(slot)), SlotState::Trimmed, "slot {slot} was trimmed");
            let (index, bit) = Self::place(Slot(slot));
            self.words[index].stale &= !bit;
            self.trimmed -= 1;
            self.set_free(Slot(slot));
        }
    }

    /// The memory that all this takes, in bytes.
    pub(crate) const fn memory_bytes(&self) -> u64 {
        (self.words.capacity() * size_of::<Word>() + self.segments.capacity() * size_of::<Segment>()) as u64
    }

    fn place(slot: Slot) -> (usize, u64) {
        ((slot.0 / WORD_SLOTS) as usize, 1 << (slot.0 % WORD_SLOTS))
    }

    fn word(&self, slot: Slot) -> (Word, u64) {
        let (index, bit) = Self::place(slot);
        (self.words[index], bit)
    }

    /// Whether it is free. Panics when there is no such slot.
    pub(crate) fn is_free(&self, slot: Slot) -> bool {
        let (word, bit) = self.word(slot);
        word.free & bit != 0
    }

    fn set_stale(&mut self, slot: Slot) {
        let (index, bit) = Self::place(slot);
        self.words[index].stale |= bit;
        self.stale += 1;
    }

    /// A TRIM of it begins.
    fn set_taken_keeping_stale(&mut self, slot: Slot) {
        let (index, bit) = Self::place(slot);
        self.set_taken(slot);
        self.words[index].stale |= bit;
        self.trimmed += 1;
    }

    fn set_taken(&mut self, slot: Slot) {
        let (index, bit) = Self::place(slot);
        self.stale -= u32::from(self.words[index].stale & bit != 0);
        self.words[index].stale &= !bit;
        self.words[index].free &= !bit;
        self.segments[usize::from(slot.segment())].free -= 1;
        self.free -= 1;
    }

    fn set_free(&mut self, slot: Slot) {
        let (index, bit) = Self::place(slot);
        self.words[index].free |= bit;
        self.segments[usize::from(slot.segment())].free += 1;
        self.free += 1;
    }

    /// The number after the last slot of a segment.
    fn segment_end(&self, segment: u16) -> u32 {
        let first = u32::from(segment) * SEGMENT_SLOTS;
        first + (self.slots - first).min(SEGMENT_SLOTS)
    }

    /// The first free slot at or after the place where the last was found. The segment has one.
    fn find_in(&mut self, segment: u16) -> Slot {
        let first = u32::from(segment) * SEGMENT_WORDS;
        let words = self.segment_end(segment).div_ceil(WORD_SLOTS) - first;
        let at = self.segments[usize::from(segment)].at;
        for step in 0..words {
            let within = (at + step) % words;
            let word = self.words[(first + within) as usize];
            if word.free != 0 {
                self.segments[usize::from(segment)].at = within;
                return Slot((first + within) * WORD_SLOTS + word.free.trailing_zeros());
            }
        }
        unreachable!("segment {segment} counts a free slot that it has not")
    }

    /// A segment for a block that names none, or one that is full. The current one stays until it has fewer free
    /// slots than half the average; then it is the one with most.
    fn choose_segment(&mut self) -> u16 {
        let half = self.free / 2 / u32::try_from(self.segments.len()).expect("at most 65,536");
        if self.segments[usize::from(self.current)].free <= half {
            let most = self.segments.iter().enumerate().max_by_key(|(_, segment)| segment.free);
            let (index, _) = most.expect("there is a segment");
            self.current = u16::try_from(index).expect("at most 65,536");
        }
        self.current
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn every_slot_is_given_out_once() {
        for slots in [1, 63, 64, 65, 1000, 65_536, 65_537, 200_001] {
            let mut free = Slots::new(slots);
            let mut seen = vec![false; slots as usize];
            for n in 0..slots {
                let slot = free.take(Some([0, 1, 2, 3, 4][n as usize % 5])).unwrap();
                assert!(!std::mem::replace(&mut seen[slot.0 as usize], true), "slot {}", slot.0);
            }
            assert_eq!((free.take(None), free.free(), free.taken()), (None, 0, slots));
        }
    }

    #[test]
    fn a_segment_that_is_named_is_used_while_it_has_room() {
        let mut free = Slots::new(3 * SEGMENT_SLOTS + 5);
        for _ in 0..SEGMENT_SLOTS {
            assert_eq!(free.take(Some(1)).unwrap().segment(), 1);
        }
        assert_ne!(free.take(Some(1)).unwrap().segment(), 1);
        assert_eq!(free.take(Some(3)).unwrap(), Slot(3 * SEGMENT_SLOTS));
    }

    #[test]
    fn runs_are_neighbours_and_end_with_their_segment() {
        let mut free = Slots::new(2 * SEGMENT_SLOTS);
        assert_eq!(free.take_run(Some(0), 256), Some((Slot(0), 256)));
        assert_eq!(free.take_run(Some(0), SEGMENT_SLOTS), Some((Slot(256), SEGMENT_SLOTS - 256)));
        assert_eq!(free.take_run(Some(0), 9).map(|(slot, n)| (slot.segment(), n)), Some((1, 9)));
        free.leave(Slot(300));
        assert_eq!(free.leaving(), 1);
        free.release(Slot(300));
        assert_eq!(free.take_run(Some(0), 9), Some((Slot(300), 1)));
    }

    #[test]
    fn what_left_unrecorded_is_free_all_at_once_and_nothing_else_is() {
        for seed in 0..20 {
            let mut random = Random::from_seed(seed);
            let mut slots = Slots::new(1000);
            let mut model = vec![SlotState::Free; 1000];
            let mut unrecorded = 0;
            for number in 0..1000 {
                let slot = Slot(number);
                let state = &mut model[number as usize];
                if random.one_in(4) {
                    continue;
                }
                assert!(slots.take_this(slot));
                *state = SlotState::Taken;
                match random.below(3) {
                    0 => {
                        slots.leave(slot);
                        *state = SlotState::Leaving;
                    }
                    1 => {
                        slots.leave_unrecorded(slot);
                        assert_eq!(slots.state(slot), SlotState::Leaving);
                        (*state, unrecorded) = (SlotState::Free, unrecorded + 1);
                    }
                    _ => {}
                }
            }
            let (free, leaving) = (slots.free(), slots.leaving());
            slots.release_unrecorded();
            assert_eq!(
                (slots.free(), slots.leaving()),
                (free + unrecorded, leaving - unrecorded),
                "seed {seed}"
            );
            assert!((0..1000).zip(&model).all(|(number, state)| slots.state(Slot(number)) == *state));
            slots.release_unrecorded();
            assert_eq!(slots.free(), free + unrecorded, "once");
            // Flash has bytes in them that nobody needs.
            let mut stale = 0;
            while let Some((first, count)) = slots.begin_trim(1, 64) {
                assert!((first.0..first.0 + count).all(|slot| model[slot as usize] == SlotState::Free));
                stale += count;
            }
            assert_eq!(stale, unrecorded);
        }
    }

    #[test]
    fn slots_that_are_taken_together_are_those_that_one_by_one_would_be() {
        for seed in 0..200 {
            let mut random = Random::from_seed(seed);
            let count = SEGMENT_SLOTS + 300;
            let (mut together, mut single) = (Slots::new(count), Slots::new(count));
            loop {
                let segment = u16::from(random.one_in(2));
                let most = if segment == 0 { 400 } else { 300 };
                let (mut numbers, mut number) = (Vec::new(), u16::try_from(random.below(most)).unwrap());
                for _ in 0..=random.below(16) {
                    numbers.push(number);
                    let is_next = !random.one_in(8) && u64::from(number) + 1 < most;
                    number = if is_next { number + 1 } else { u16::try_from(random.below(most)).unwrap() };
                }
                let one_by_one =
                    numbers.iter().position(|number| !single.take_this(Slot::of_segment(segment, *number)));
                assert_eq!(together.take_these(segment, &numbers), one_by_one, "seed {seed}: {numbers:?}");
                if one_by_one.is_some() {
                    break;
                }
                assert_eq!(together.free(), single.free(), "seed {seed}");
                let mut looked_at = (0..400).chain(SEGMENT_SLOTS..count);
                assert!(
                    looked_at.all(|n| together.is_free(Slot(n)) == single.is_free(Slot(n))),
                    "seed {seed}"
                );
            }
        }
    }

    #[test]
    fn the_states_are_those_of_a_model() {
        for seed in 0..20 {
            let mut random = Random::from_seed(seed);
            let slots = [5, 130, 70_000][random.index(3)];
            let mut free = Slots::new(slots);
            let mut model = vec![SlotState::Free; slots as usize];
            let (mut stale, mut trims) = (vec![false; slots as usize], Vec::new());
            for _ in 0..3000 {
                let slot = Slot(u32::try_from(random.below(u64::from(slots))).unwrap());
                let state = &mut model[slot.0 as usize];
                match (random.below(4), *state) {
                    (0, _) => {
                        let most = *random.pick(&[1, 2, 5, 9]);
                        let prefer = random.one_in(2).then(|| *random.pick(&[0, 1, 2]));
                        if let Some((first, count)) = free.take_run(prefer, most) {
                            assert!((1..=most).contains(&count));
                            for n in first.0..first.0 + count {
                                assert_eq!(model[n as usize], SlotState::Free, "seed {seed}");
                                (model[n as usize], stale[n as usize]) = (SlotState::Taken, false);
                            }
                        } else {
                            assert!(model.iter().all(|state| *state != SlotState::Free), "seed {seed}");
                        }
                    }
                    (1, was) => {
                        assert_eq!(free.take_this(slot), was == SlotState::Free, "seed {seed}");
                        if was == SlotState::Free {
                            (*state, stale[slot.0 as usize]) = (SlotState::Taken, false);
                        }
                    }
                    (2, SlotState::Taken) => {
                        free.give_back(slot);
                        (*state, stale[slot.0 as usize]) = (SlotState::Free, true);
                    }
                    (3, SlotState::Taken) => {
                        free.leave(slot);
                        *state = SlotState::Leaving;
                    }
                    (3, SlotState::Leaving) => {
                        free.release(slot);
                        (*state, stale[slot.0 as usize]) = (SlotState::Free, true);
                    }
                    (2, SlotState::Leaving) => {
                        let least = *random.pick(&[1, 2, 4]);
                        if let Some((first, count)) = free.begin_trim(least, 6) {
                            assert!((least..=6).contains(&count));
                            for n in first.0..first.0 + count {
                                assert!(
                                    model[n as usize] == SlotState::Free && stale[n as usize],
                                    "seed {seed}"
                                );
                                model[n as usize] = SlotState::Trimmed;
                            }
                            trims.push((first, count));
                        }
                    }
                    (_, SlotState::Trimmed) => {
                        let (first, count) = trims.swap_remove(random.index(trims.len()));
                        free.end_trim(first, count);
                        for n in first.0..first.0 + count {
                            (model[n as usize], stale[n as usize]) = (SlotState::Free, false);
                        }
                    }
                    _ => {}
                }
            }
            let count =
                |wanted| u32::try_from(model.iter().filter(|state| **state == wanted).count()).unwrap();
            assert_eq!(free.free(), count(SlotState::Free), "seed {seed}");
            assert_eq!(free.leaving(), count(SlotState::Leaving), "seed {seed}");
            assert_eq!(free.taken(), count(SlotState::Taken), "seed {seed}");
            assert_eq!(free.trimmed(), count(SlotState::Trimmed), "seed {seed}");
            for (n, state) in model.iter().enumerate() {
                assert_eq!(free.state(Slot(u32::try_from(n).unwrap())), *state, "seed {seed}, slot {n}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "slot 3 is released")]
    fn a_slot_that_is_taken_is_not_released() {
        let mut free = Slots::new(9);
        assert!(free.take_this(Slot(3)));
        free.release(Slot(3));
    }
}
