//! Which records each slice of the map lacks on flash, and which slices are copied next.
//!
//! ```text
//!   record   1   2   3   4   5   6                 the tail is the first record that some slice lacks
//!   slice A  ×───────────×                         lacks 1 and 4: behind since 1
//!   slice B      ×                                 lacks 2
//!                        └ copied at the seal of 5, written with 6, counted from then on
//! ```
//!
//! 1. A slice is behind from the first record that changes it after the state that is on flash, durably.
//! 2. A copy is what the slice is at a seal. Records after that seal are what it lacks once it is durable.
//! 3. What is copied is written to the place that does not count.
//!
//! Left out: what a slice says, and when it is copied (`state`).

use std::collections::BTreeSet;

/// What is known of one slice.
#[derive(Debug, Clone, Copy, Default)]
struct One {
    /// The first record that what is on flash lacks; 0 when it lacks none.
    behind: u64,
    /// While a copy is on its way: the first record that the copy lacks.
    behind_copy: u64,
    is_copied: bool,
    /// The place that counts.
    place: u32,
}

/// All slices of a cache.
#[derive(Debug)]
pub(crate) struct Slices {
    each: Vec<One>,
    /// Those that are behind, by since when.
    behind: BTreeSet<(u64, u32)>,
}

impl Slices {
    /// Slices that lack nothing; the first place of each counts.
    pub(crate) fn new(count: u32) -> Self {
        Self { each: vec![One::default(); count as usize], behind: BTreeSet::new() }
    }

    fn one(&mut self, number: u32) -> &mut One {
        &mut self.each[number as usize]
    }

    /// A recovery found that this place counts.
    pub(crate) fn set_place(&mut self, number: u32, place: u32) {
        self.one(number).place = place;
    }

    /// The record changes the slice. Records come in order.
    pub(crate) fn touch(&mut self, number: u32, record: u64) {
        let one = self.one(number);
        if one.is_copied {
            if one.behind_copy == 0 {
                one.behind_copy = record;
            }
        } else if one.behind == 0 {
            one.behind = record;
            self.behind.insert((record, number));
        }
    }

    /// The first record that some slice lacks.
    pub(crate) fn tail(&self) -> Option<u64> {
        self.behind.first().map(|(record, _)| *record)
    }

    /// How many slices are behind and have no copy on its way.
    pub(crate) fn uncopied(&self) -> usize {
        self.behind.iter().filter(|(_, number)| !self.each[*number as usize].is_copied).count()
    }

    /// The next slices to copy, the furthest behind first; they count as copied from now on.
    pub(crate) fn copy_next(&mut self, most: usize) -> Vec<u32> {
        let each = &self.each;
        let is_due = |(_, number): &&(u64, u32)| !each[*number as usize].is_copied;
        let chosen: Vec<u32> =
            self.behind.iter().filter(is_due).take(most).map(|(_, number)| *number).collect();
        for number in &chosen {
            let one = self.one(*number);
            (one.is_copied, one.behind_copy) = (true, 0);
        }
        chosen
    }

    /// Of these slices, which are behind, those are copied that have no copy on its way; they count as copied from now on.
    pub(crate) fn copy_chosen(&mut self, numbers: &[u32]) -> Vec<u32> {
        let mut chosen = numbers.to_vec();
        chosen.retain(|number| {
            let one = self.one(*number);
            debug_assert!(one.behind != 0, "slice {number} lacks nothing");
            let is_due = !one.is_copied;
            if is_due {
                (one.is_copied, one.behind_copy) = (true, 0);
            }
            is_due
        });
        chosen
    }

    /// Whether a copy of the slice is on its way.
    pub(crate) fn is_copied(&self, number: u32) -> bool {
        self.each[number as usize].is_copied
    }

    /// The place that the copy is written to.
    pub(crate) fn place_of_copy(&self, number: u32) -> u32 {
        1 - self.each[number as usize].place
    }

    /// The copy is durable.
    pub(crate) fn note_written(&mut self, number: u32) {
        let one = self.one(number);
        debug_assert!(one.is_copied);
        let before = (one.behind, number);
        (one.behind, one.behind_copy, one.is_copied, one.place) = (one.behind_copy, 0, false, 1 - one.place);
        let now = one.behind;
        self.behind.remove(&before);
        if now != 0 {
            self.behind.insert((now, number));
        }
    }

    /// How much memory this takes when all slices are behind, in bytes.
    pub(crate) fn memory_bytes_max(&self) -> u64 {
        (self.each.len() * (size_of::<One>() + 24)) as u64
    }

    /// How much memory this takes, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        (self.each.len() * size_of::<One>() + self.behind.len() * 24) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_behind_from_its_first_change_on() {
        let mut slices = Slices::new(3);
        assert_eq!((slices.tail(), slices.uncopied()), (None, 0));
        slices.touch(1, 5);
        slices.touch(2, 6);
        slices.touch(1, 7);
        assert_eq!((slices.tail(), slices.uncopied()), (Some(5), 2));
        assert_eq!(slices.copy_next(1), [1]);
        assert_eq!((slices.tail(), slices.uncopied()), (Some(5), 1), "the copy is not durable yet");
        assert_eq!(slices.place_of_copy(1), 1);
        slices.note_written(1);
        assert_eq!(slices.tail(), Some(6));
        slices.touch(1, 9);
        assert_eq!(slices.copy_next(9), [2, 1]);
        assert_eq!(slices.place_of_copy(1), 0, "the places take turns");
    }

    #[test]
    fn those_that_are_named_are_copied_once() {
        let mut slices = Slices::new(4);
        [1, 3].into_iter().for_each(|number| slices.touch(number, 7));
        slices.touch(2, 5);
        assert_eq!(slices.copy_chosen(&[1, 3]), [1, 3]);
        assert!(slices.is_copied(1) && !slices.is_copied(2));
        assert_eq!(
            (slices.copy_chosen(&[3, 2]), slices.copy_next(9), slices.tail()),
            (vec![2], vec![], Some(5))
        );
        slices.touch(1, 8);
        [1, 2, 3].into_iter().for_each(|number| slices.note_written(number));
        assert_eq!((slices.tail(), slices.uncopied()), (Some(8), 1));
    }

    #[test]
    fn what_comes_after_a_copy_is_lacked_by_it() {
        let mut slices = Slices::new(1);
        slices.touch(0, 1);
        assert_eq!(slices.copy_next(4), [0]);
        slices.touch(0, 2);
        slices.touch(0, 3);
        assert_eq!(slices.tail(), Some(1));
        slices.note_written(0);
        assert_eq!(slices.tail(), Some(2));
    }
}
