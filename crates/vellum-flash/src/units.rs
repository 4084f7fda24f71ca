//! Runs of two-byte numbers, handed out by a buddy allocator over pages of 16 numbers.
//!
//! ```text
//!   page 0  │n n n n·n n·n·_·n n n n n n n n│     runs of 1, 2, 4, 8 or 16 numbers, each at a multiple of its length
//!   mask 0   0 0 0 0 0 0 0 1 0 …                  a bit for each number that is free
//! ```
//!
//! 1. A run never crosses a page. Free neighbours need no merging: whether a run of some length is free is read
//!    from the mask. Without that, groups that grow one block at a time would leave pieces of sizes that no group
//!    has any more.
//! 2. A run comes from the lowest page that has room, so the last pages empty first, and are given back.
//! 3. The memory grows by an eighth at a time, and is given back when a quarter of it is not used.
//! 4. A caller makes all runs anew where they are sparse ([`Units::is_sparse`]). So a number takes at most
//!    [`NUMBER_BYTES_MAX`] bytes, beside what a few pages take.

/// The numbers of a page.
pub(crate) const PAGE: usize = 16;
/// Eight pages are kept, however little is in them.
pub(crate) const SMALL_PAGES: usize = 8;
/// A page with its mask, of which two thirds are used and a quarter more is reserved, by the number.
pub(crate) const NUMBER_BYTES_MAX: u64 = 5;
/// Pages that are kept take at most this much.
pub(crate) const SMALL_BYTES_MAX: u64 = 2 * 34 * SMALL_PAGES as u64;

/// All runs of a part of the map.
#[derive(Debug)]
pub(crate) struct Units {
    pages: Vec<[u16; PAGE]>,
    free: Vec<u16>,
    /// For each length, a page before which none has a run of it free.
    hints: [u16; 5],
    /// Numbers that are in runs.
    used: u32,
}

/// The numbers of which a page of this mask has the first of a free run of 2^order.
const fn starts(mask: u16, order: usize) -> u16 {
    match order {
        0 => mask,
        1 => mask & mask >> 1 & 0x5555,
        2 => {
            let pairs = mask & mask >> 1;
            pairs & pairs >> 2 & 0x1111
        }
        3 => {
            let pairs = mask & mask >> 1;
            let fours = pairs & pairs >> 2;
            fours & fours >> 4 & 0x0101
        }
        _ => (mask == u16::MAX) as u16,
    }
}

/// The length of the run that holds `numbers` numbers, as a power of two.
pub(crate) const fn order_of(numbers: u32) -> usize {
    numbers.next_power_of_two().trailing_zeros() as usize
}

/// The bits of a run in the mask of its page.
const fn bits(at: usize, order: usize) -> u16 {
    ((((1_u32 << (1 << order)) - 1) << at) & 0xFFFF) as u16
}

impl Units {
    /// Without any run, and without memory.
    pub(crate) const fn new() -> Self {
        Self { pages: Vec::new(), free: Vec::new(), hints: [0; 5], used: 0 }
    }

    /// A run of 2^order numbers: the number of its first one. Its content is undefined. Panics when there are more
    /// than 65,536 numbers, which a part of the map cannot have.
    pub(crate) fn take(&mut self, order: usize) -> u16 {
        let hint = usize::from(self.hints[order]);
        let found = self.free[hint.min(self.free.len())..].iter().position(|mask| starts(*mask, order) != 0);
        let page = found.map_or(self.pages.len(), |index| hint + index);
        if page == self.pages.len() {
            self.add_page();
        }
        self.hints[order] = u16::try_from(page).expect("at most 4096 pages");
        // Of the runs of this length in the page, one whose other half is in use already, so that longer ones
        // stay whole.
        let mask = self.free[page];
        let fits = starts(mask, order);
        let mut best = fits.trailing_zeros() as usize;
        for longer in order + 1..5 {
            let narrow = fits & !covered(starts(mask, longer), longer);
            if narrow != 0 {
                best = narrow.trailing_zeros() as usize;
                break;
            }
        }
        self.free[page] &= !bits(best, order);
        self.used += 1 << order;
        u16::try_from(page * PAGE + best).expect("a part has fewer numbers")
    }

    /// Makes room for runs of this many numbers in all, at once, and for no more.
    pub(crate) fn reserve(&mut self, numbers: usize) {
        let more = numbers.div_ceil(PAGE);
        self.pages.reserve_exact(more);
        self.free.reserve_exact(more);
    }

    /// Gives a run of 2^order numbers back.
    pub(crate) fn give_back(&mut self, first: u16, order: usize) {
        let (page, at) = (usize::from(first) / PAGE, usize::from(first) % PAGE);
        let run = bits(at, order);
        debug_assert!(self.free[page] & run == 0 && at.is_multiple_of(1 << order));
        self.free[page] |= run;
        self.used -= 1 << order;
        let number = u16::try_from(page).expect("at most 4096 pages");
        for hint in &mut self.hints {
            *hint = number.min(*hint);
        }
        while self.free.last() == Some(&u16::MAX) {
            self.free.pop();
            self.pages.pop();
        }
        if self.pages.is_empty() {
            *self = Self::new();
        } else if self.pages.capacity() > SMALL_PAGES && self.pages.len() * 4 < self.pages.capacity() * 3 {
            self.pages.shrink_to(self.pages.len() + self.pages.len() / 16);
            self.free.shrink_to(self.free.len() + self.free.len() / 16);
        }
    }

    /// The `count` numbers from `first` on.
    pub(crate) fn run(&self, first: u16, count: usize) -> &[u16] {
        let (page, at) = (usize::from(first) / PAGE, usize::from(first) % PAGE);
        &self.pages[page][at..at + count]
    }

    /// As above, to change them.
    pub(crate) fn run_mut(&mut self, first: u16, count: usize) -> &mut [u16] {
        let (page, at) = (usize::from(first) / PAGE, usize::from(first) % PAGE);
        &mut self.pages[page][at..at + count]
    }

    /// How many numbers are in runs.
    pub(crate) fn used(&self) -> u64 {
        u64::from(self.used)
    }

    /// Whether a third of the pages or more is free between runs: then it is worth making all runs anew, the longest
    /// first, which leaves no gap.
    pub(crate) const fn is_sparse(&self) -> bool {
        self.pages.len() > SMALL_PAGES && self.used as usize * 3 < self.pages.len() * PAGE * 2
    }

    /// The memory of all pages, in bytes.
    pub(crate) const fn memory_bytes(&self) -> u64 {
        (self.pages.capacity() * size_of::<[u16; PAGE]>() + self.free.capacity() * size_of::<u16>()) as u64
    }

    fn add_page(&mut self) {
        if self.pages.len() == self.pages.capacity() {
            let more = self.pages.len() / 8 + 1;
            self.pages.reserve_exact(more);
            self.free.reserve_exact(more);
        }
        self.pages.push([0; PAGE]);
        self.free.push(u16::MAX);
    }
}

/// All numbers of the runs of 2^order that begin at these.
const fn covered(mut starts: u16, order: usize) -> u16 {
    let mut half = 0;
    while half < order {
        starts |= starts << (1 << half);
        half += 1;
    }
    starts
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn no_two_runs_overlap_and_what_is_given_back_is_found_again() {
        for seed in 0..50 {
            let mut random = Random::from_seed(seed);
            let mut units = Units::new();
            let mut runs: Vec<(u16, usize, u16)> = Vec::new();
            for step in 0..4000_u16 {
                let grows = if step / 1000 % 2 == 0 { 3 } else { 1 };
                if random.below(4) < grows {
                    let order = random.index(5);
                    let first = units.take(order);
                    assert!(usize::from(first).is_multiple_of(1 << order), "seed {seed}");
                    units.run_mut(first, 1 << order).fill(step);
                    runs.push((first, order, step));
                } else if !runs.is_empty() {
                    let (first, order, value) = runs.swap_remove(random.index(runs.len()));
                    assert!(units.run(first, 1 << order).iter().all(|n| *n == value), "seed {seed}");
                    units.give_back(first, order);
                }
                let used: usize = runs.iter().map(|(_, order, _)| 1 << order).sum();
                let free: usize = units.free.iter().map(|mask| mask.count_ones() as usize).sum();
                assert_eq!(used + free, units.pages.len() * PAGE, "seed {seed}");
            }
            for (first, order, value) in runs.drain(..) {
                assert!(units.run(first, 1 << order).iter().all(|n| *n == value), "seed {seed}");
                units.give_back(first, order);
            }
            assert_eq!(units.pages.len(), 0, "seed {seed}");
        }
    }

    #[test]
    fn runs_that_grow_leave_no_pieces_behind() {
        let mut units = Units::new();
        let mut runs: Vec<u16> = (0..1000).map(|_| units.take(0)).collect();
        for order in 1..5 {
            for run in &mut runs {
                let longer = units.take(order);
                units.give_back(*run, order - 1);
                *run = longer;
            }
        }
        assert!(units.pages.len() <= 1100, "{} pages for 1000", units.pages.len());
    }

    #[test]
    fn a_short_run_comes_from_what_is_broken_already() {
        let mut units = Units::new();
        let one = units.take(0);
        let eight = units.take(3);
        let two = units.take(1);
        let other = units.take(0);
        assert_eq!((one, eight, two, other), (0, 8, 2, 1));
        assert_eq!(units.take(2), 4);
        assert_eq!(order_of(1), 0);
        assert_eq!((order_of(2), order_of(3), order_of(9), order_of(16)), (1, 2, 4, 4));
    }
}
