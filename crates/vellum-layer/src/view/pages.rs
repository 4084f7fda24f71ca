//! The pages of a view that are in memory: at most a given number of bytes.
//!
//! A page with many small runs takes as much as hundreds of plain ones, so bytes are counted, not pages. Pages
//! are evicted by second chance (the CLOCK algorithm): one that was used since the hand came by stays once more. Pages of
//! different shards never wait for one another.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use vellum_core::lock;

use super::page::Page;

const SHARDS: usize = 16;

/// The pages in memory, by their index.
pub(super) struct Pages {
    shards: [Mutex<Shard>; SHARDS],
    /// Memory for each shard, in bytes.
    limit: u64,
}

#[derive(Default)]
struct Shard {
    pages: HashMap<u64, Entry>,
    /// The pages in the order in which the hand meets them.
    order: VecDeque<u64>,
    memory: u64,
}

struct Entry {
    page: Arc<Page>,
    was_used: bool,
}

impl Pages {
    /// Pages of at most this many bytes; one for each shard in any case.
    pub(super) fn new(memory_max: u64) -> Self {
        Self { shards: Default::default(), limit: memory_max / SHARDS as u64 }
    }

    /// The page at this index, if it is in memory.
    pub(super) fn get(&self, index: u64) -> Option<Arc<Page>> {
        let mut shard = lock(self.shard(index));
        let entry = shard.pages.get_mut(&index)?;
        entry.was_used = true;
        Some(entry.page.clone())
    }

    /// Keeps a page, and lets others go.
    pub(super) fn put(&self, index: u64, page: Arc<Page>) {
        let mut shard = lock(self.shard(index));
        if shard.pages.contains_key(&index) {
            return; // another request made the same page at the same time
        }
        shard.memory += page.memory();
        shard.pages.insert(index, Entry { page, was_used: false });
        shard.order.push_back(index);
        while shard.memory > self.limit && shard.order.len() > 1 {
            shard.turn_the_hand(index);
        }
    }

    /// What they take in memory, in bytes.
    #[cfg(test)]
    pub(super) fn memory(&self) -> u64 {
        self.shards.iter().map(|shard| lock(shard).memory).sum()
    }

    /// Forgets all.
    pub(super) fn clear(&self) {
        self.shards.iter().for_each(|shard| *lock(shard) = Shard::default());
    }

    fn shard(&self, index: u64) -> &Mutex<Shard> {
        let of = index % SHARDS as u64;
        &self.shards[usize::try_from(of).expect("a small number")]
    }
}

impl Shard {
    /// Lets the page under the hand go, or passes it if it was used, or is the one that was just put in.
    fn turn_the_hand(&mut self, newest: u64) {
        let Some(index) = self.order.pop_front() else { return };
        let used = self.pages.get_mut(&index).is_some_and(|entry| std::mem::take(&mut entry.was_used));
        if used || index == newest {
            self.order.push_back(index);
        } else if let Some(entry) = self.pages.remove(&index) {
            self.memory -= entry.page.memory();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::page::Draft;
    use super::*;

    fn page() -> Arc<Page> {
        Arc::new(Draft::new(4096).finish())
    }

    #[test]
    fn no_more_memory_is_taken_than_allowed_and_what_is_used_stays() {
        let shards = SHARDS as u64;
        let limit = shards * 4 * page().memory();
        let pages = Pages::new(limit);
        for index in 0..1000 {
            pages.put(index, page());
            assert!(pages.memory() <= limit);
            for used in 0..shards.min(index) {
                assert!(pages.get(used).is_some(), "{used} after {index}");
            }
        }
        assert_eq!(pages.memory(), limit);
        assert!(pages.get(999).is_some());
        assert!(pages.get(500).is_none());
        pages.clear();
        assert_eq!(pages.memory(), 0);
        assert!(pages.get(999).is_none());
    }

    #[test]
    fn one_page_is_kept_however_little_memory_there_is() {
        let pages = Pages::new(0);
        for index in [3, 19, 35] {
            pages.put(index, page());
            assert!(pages.get(index).is_some());
        }
        assert_eq!(pages.memory(), page().memory());
        pages.put(35, page());
        assert_eq!(pages.memory(), page().memory(), "the same page twice");
    }
}
