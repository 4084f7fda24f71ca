//! The search for free clusters. When it is long, no request waits for it.
//!
//! ```text
//!   in use, in use, in use … │ looked at next … │ … unknown ……… │ new clusters come from here
//!                            ▲ cursor                              ▲ behind
//! ```
//!
//! Clusters are taken from the first free one on. In a large image that is full, finding it means looking at
//! all refcounts. So a request that has passed a few pages without a free cluster takes clusters from behind
//! everything else. The search continues in the background, in large reads, by the task that tends the disk.
//! If no task tends the disk, each allocating request does a piece of the search after its own allocation.
//! The free clusters that it finds are used from then on.
//!
//! 1. A page is judged only by its current refcounts. If it was in memory or not checkpointed when it was
//!    read, or a cluster of it was freed since, the bytes that were read do not count.
//! 2. When nothing is left behind everything else, a request waits for the search after all, so a free
//!    cluster is found if there is one. The next request tries behind everything else again, because the host
//!    may have got space.
//! 3. One look is in progress at a time: what it reads is judged.

use std::collections::BTreeSet;
use std::ops::Range;

use vellum_core::{ErrorKind, ImageOffset, ImageSpan};

use super::{Refcounts, Run, Stop, read};

/// A request passes at most this many pages before it takes clusters from behind everything else.
const PAGES_PASSED_MAX: u32 = 32;

/// One look reads at most this many bytes, and stops at the end of a block.
const LOOK_BYTES: u64 = 256 << 10;

/// The state of the search.
#[derive(Debug, Default)]
pub(super) struct Search {
    /// The search has become long: clusters come from behind everything else, and others are looked for in
    /// the background.
    is_long: bool,
    /// While the search is long, the next cluster comes from this one's page, or from behind it.
    behind: u64,
    /// Nothing is left behind everything else.
    has_no_more: bool,
    /// How many pages without a free cluster were passed in a row.
    passed: u32,
    /// The pages of the look in progress, and those of them that must not be judged by what is read.
    pages: Range<u64>,
    changed: BTreeSet<u64>,
}

/// Adjacent pages of a block, to be read and judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Look {
    first: u64,
    /// Their place.
    pub(crate) span: ImageSpan,
    order: u32,
    page_len: u64,
}

impl Look {
    /// For each page, whether all its clusters are in use.
    pub(crate) fn judge(&self, bytes: &[u8]) -> Vec<bool> {
        let len = usize::try_from(self.page_len).expect("a page is small");
        bytes.chunks_exact(len).map(|page| is_full(page, self.order)).collect()
    }
}

/// Whether no refcount of 2^`order` bits on the page is zero.
fn is_full(page: &[u8], order: u32) -> bool {
    match order {
        0 => page.iter().all(|byte| *byte == 0xFF),
        1 | 2 => (0..(page.len() as u64 * 8) >> order).all(|index| read(page, order, index) != 0),
        _ => page.chunks_exact(1 << (order - 3)).all(|refcount| refcount.iter().any(|byte| *byte != 0)),
    }
}

impl Refcounts {
    /// Hands out up to `want` adjacent clusters, at least one.
    pub(crate) fn allocate(&mut self, want: u64) -> Result<Run, Stop> {
        if self.search.is_long {
            match self.allocate_from(self.search.behind - self.search.behind % self.per_page(), want) {
                Err(Stop::Failed(error)) if error.kind() == ErrorKind::NoSpace => {
                    self.has_nothing_behind();
                }
                result => return result,
            }
        }
        match self.allocate_from(self.cursor, want) {
            Err(Stop::Load(_)) if self.goes_behind() => self.allocate(want),
            result => result,
        }
    }

    /// Whether new clusters come from behind everything else, and a background search should look for others.
    pub(crate) fn is_searched(&self) -> bool {
        self.search.is_long
    }

    /// The storage cannot grow. Returns whether other places are worth a try.
    pub(crate) fn has_nothing_behind(&mut self) -> bool {
        self.search.has_no_more = true;
        std::mem::take(&mut self.search.is_long)
    }

    /// Roughly where the next cluster comes from.
    pub(super) fn next(&self) -> u64 {
        if self.search.is_long { self.search.behind } else { self.cursor }
    }

    /// Whether the search has become too long for a request. Clusters then come from behind everything else.
    fn goes_behind(&mut self) -> bool {
        let search = &self.search;
        if search.is_long || search.has_no_more || search.passed < PAGES_PASSED_MAX {
            return false;
        }
        let behind = match self.end {
            None => self.front(),
            // Where a block is missing, or else in the last one.
            Some(end) => {
                let blocks = self.table.blocks().next_back().map_or(0, |(last, _)| last as u64 + 1);
                let free = blocks * self.per_block();
                if free < end { free } else { free - self.per_block() }
            }
        };
        if behind <= self.cursor {
            return false;
        }
        (self.search.is_long, self.search.behind) = (true, behind);
        true
    }

    /// Records that a page without a free cluster was passed.
    pub(super) fn has_passed(&mut self, next: u64) {
        match self.search.is_long {
            true => self.search.behind = next,
            false => {
                self.cursor = next;
                self.search.passed += 1;
            }
        }
    }

    /// Records that clusters were handed out. They end here.
    pub(super) fn has_taken(&mut self, end: u64) {
        match self.search.is_long {
            true => self.search.behind = end,
            false => {
                self.cursor = end;
                self.search.has_no_more = false;
                // A cluster that was freed meanwhile does not make a long search short: once it is used, new
                // ones come from behind everything else.
                if self.search.passed < PAGES_PASSED_MAX {
                    self.search.passed = 0;
                }
            }
        }
    }

    /// Records that the cluster is free from now on.
    pub(super) fn is_free_again(&mut self, cluster: u64) {
        self.search.has_no_more = false;
        if cluster < self.cursor {
            self.cursor = cluster;
            self.search.is_long = false; // it comes next
        }
    }

    /// Clusters that were skipped come next, from here on.
    pub(super) fn begins_again_at(&mut self, cluster: u64) {
        self.search.behind = self.search.behind.min(cluster);
        self.is_free_again(cluster);
    }

    /// Records that the refcounts of a page have changed and one of them is zero now.
    pub(super) fn has_changed(&mut self, page: u64) {
        if self.search.pages.contains(&page) {
            self.search.changed.insert(page);
        }
    }

    /// The next pages to look at, while the search is long. `is_newer` says whether a page is newer than its
    /// version in the image.
    pub(crate) fn begin_look(&mut self, is_newer: impl Fn(ImageOffset) -> bool) -> Option<Look> {
        if !self.search.is_long || !self.search.pages.is_empty() {
            return None;
        }
        let mut first = self.cursor / self.per_page();
        while self.full.contains(first) {
            first += 1;
            self.cursor = first * self.per_page();
        }
        let behind = self.search.behind / self.per_page();
        let place = self.place(first).filter(|_| first < behind);
        let Some(at) = place else {
            // Everything was looked at, or a block is missing, so that all clusters it would count are free.
            (self.search.is_long, self.search.passed) = (false, 0);
            return None;
        };
        let per_block = self.cluster.bytes() / self.page_len;
        let most = (LOOK_BYTES / self.page_len).max(1);
        let pages = first..(first + most).min(behind).min((first / per_block + 1) * per_block);
        let place_of = |page: u64| at + (page - first) * self.page_len;
        let changed = pages.clone().filter(|page| self.pages.contains_key(page) || is_newer(place_of(*page)));
        self.search.changed = changed.collect();
        let span = at.span((pages.end - pages.start) * self.page_len);
        self.search.pages = pages;
        Some(Look { first, span, order: self.order, page_len: self.page_len })
    }

    /// Ends a look. `judged` says for each page whether it is full, and is empty if the pages could not be
    /// read.
    pub(crate) fn end_look(&mut self, look: &Look, judged: &[bool]) {
        let changed = std::mem::take(&mut self.search.changed);
        self.search.pages = 0..0;
        let per_page = self.per_page();
        for (page, was_full) in (look.first..).zip(judged) {
            let known_full = match self.pages.get(&page) {
                Some(known) => is_full(&known.bytes, self.order),
                None => *was_full && !changed.contains(&page),
            };
            if !known_full {
                // Found, or left to the next allocation to decide. Everything before this page is in use.
                if self.cursor / per_page == page {
                    (self.search.is_long, self.search.passed) = (false, 0);
                }
                return;
            }
            self.full.insert(page);
            if self.cursor / per_page == page {
                self.cursor = (page + 1) * per_page;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::write;
    use super::*;

    #[test]
    fn a_page_is_full_when_no_refcount_is_zero() {
        for order in 0..=6 {
            let mut page = vec![0; 512];
            let count = (512 * 8) >> order;
            for index in 0..count {
                assert!(!is_full(&page, order), "{order} {index}");
                write(&mut page, order, index, 1);
            }
            assert!(is_full(&page, order), "{order}");
        }
    }
}
