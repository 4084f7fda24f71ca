//! The part of the mapping that is in memory: pages of L2 tables, found and read without a lock.
//!
//! ```text
//!   page number ──► set (8 ways) ──► way: number, page        a page holds 4 KiB of an L2 table
//!                                                              (512 entries, 256 with subclusters)
//! ```
//!
//! Memory is bounded whatever the image says: the number of sets is fixed when the image is opened, and a new
//! page takes the place of a clean one of its set (second chance). Readers find a page through an `ArcSwap`
//! and read its words as atomics; they never wait. Writers change a page under its own small lock.
//!
//! 1. At most one `Page` object stands for a page number at any time, from the moment it is inserted until it
//!    is evicted. An evicted page refuses changes, so that no change is made to a page that will not be
//!    written.
//! 2. A dirty page is not evicted, nor is one whose sealed copy is on its way to the medium.
//! 3. An extended entry is two words: readers see both words of one write (a sequence count), never a mix.
//! 4. One task per page number inserts at a time (the caller holds the load lock of that number).
//! 5. A page is listed as dirty before other tasks can see that it is dirty. Otherwise a second writer could
//!    find it dirty, trust the first to list it, and get a flush that reports its entry as durable while the
//!    page is on no list yet.
//!
//! Left out: where a page lies in the image. The L1 table says that, and it may change while a page is in
//! memory.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};

use arc_swap::{ArcSwapOption, Guard};

use super::entry::Words;
use super::journal::Changed;
use super::layout::be64;
use crate::perturb;
use crate::state::lock;

const WAYS: usize = 8;

/// A page of the mapping.
pub(crate) struct Page {
    number: u64,
    /// One word per standard entry, two per extended one.
    words: Box<[AtomicU64]>,
    words_per_entry: usize,
    /// Odd while an extended entry is being changed.
    sequence: AtomicU32,
    state: Mutex<PageState>,
}

#[derive(Default)]
struct PageState {
    dirty: bool,
    writing: bool,
    evicted: bool,
    /// Words that differ from the last seal.
    changed: Changed,
}

/// The page was evicted in the meantime: find it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Evicted;

impl Page {
    fn new(number: u64, words: Box<[AtomicU64]>, words_per_entry: usize) -> Arc<Self> {
        Arc::new(Self {
            number,
            words,
            words_per_entry,
            sequence: AtomicU32::new(0),
            state: Mutex::default(),
        })
    }

    /// Makes a page from its bytes in the image.
    pub(crate) fn from_bytes(number: u64, bytes: &[u8], words_per_entry: usize) -> Arc<Self> {
        let words = bytes.chunks_exact(8).map(|word| AtomicU64::new(be64(word, 0))).collect();
        Self::new(number, words, words_per_entry)
    }

    /// A page whose entries are all empty.
    pub(crate) fn empty(number: u64, bytes: usize, words_per_entry: usize) -> Arc<Self> {
        Self::new(number, (0..bytes / 8).map(|_| AtomicU64::new(0)).collect(), words_per_entry)
    }

    /// The number of the page: entries before it, divided by the entries of a page.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// How many entries it has.
    pub(crate) fn entries(&self) -> usize {
        self.words.len() / self.words_per_entry
    }

    /// Reads an entry. Never waits for a lock.
    pub(crate) fn entry(&self, index: usize) -> Words {
        if self.words_per_entry == 1 {
            return (self.words[index].load(Ordering::Acquire), 0);
        }
        let mut tries = 0u32;
        loop {
            let before = self.sequence.load(Ordering::Acquire);
            let words = (
                self.words[2 * index].load(Ordering::Relaxed),
                self.words[2 * index + 1].load(Ordering::Relaxed),
            );
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before {
                return words;
            }
            tries += 1;
            if tries.is_multiple_of(64) {
                std::thread::yield_now(); // the writer was preempted between its two stores
            } else {
                std::hint::spin_loop();
            }
        }
    }

    #[track_caller]
    fn lock(&self) -> MutexGuard<'_, PageState> {
        lock(&self.state)
    }

    /// Replaces an entry by what `change` makes of it, and returns the old one. If `change` refuses, nothing
    /// changes. Otherwise `note` gets the number of bytes that the change takes in a record, and whether the
    /// page was clean and must be listed. The page is locked meanwhile.
    pub(crate) fn update<E>(
        &self,
        index: usize,
        change: impl FnOnce(Words) -> Result<Words, E>,
        note: impl FnOnce(u64, bool),
    ) -> Result<Result<Words, E>, Evicted> {
        let mut state = self.lock();
        if state.evicted {
            return Err(Evicted);
        }
        let old = self.entry_locked(index);
        let new = match change(old) {
            Ok(new) => new,
            Err(error) => return Ok(Err(error)),
        };
        if new != old {
            perturb::point(); // the effects of `change` are visible, the entry is not yet
            self.store(index, new);
            perturb::point();
            let first = index * self.words_per_entry;
            let bytes = state.changed.add(first) + state.changed.add(first + self.words_per_entry - 1);
            let was_clean = !std::mem::replace(&mut state.dirty, true);
            note(bytes, was_clean);
        }
        Ok(Ok(old))
    }

    /// Reads an entry while holding the page's lock, when no change can be half done.
    fn entry_locked(&self, index: usize) -> Words {
        match self.words_per_entry {
            1 => (self.words[index].load(Ordering::Relaxed), 0),
            _ => (
                self.words[2 * index].load(Ordering::Relaxed),
                self.words[2 * index + 1].load(Ordering::Relaxed),
            ),
        }
    }

    fn store(&self, index: usize, (first, second): Words) {
        if self.words_per_entry == 1 {
            self.words[index].store(first, Ordering::Release);
            return;
        }
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.words[2 * index].store(first, Ordering::Relaxed);
        self.words[2 * index + 1].store(second, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// The page's bytes as they are now, to be written, and which words have changed. The page counts as
    /// being written until [`Page::written`].
    pub(crate) fn seal(&self) -> (Vec<u8>, Changed) {
        let mut state = self.lock();
        debug_assert!(state.dirty && !state.evicted);
        state.dirty = false;
        state.writing = true;
        let mut bytes = vec![0; self.words.len() * 8];
        for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(&self.words) {
            *place = word.load(Ordering::Relaxed).to_be_bytes();
        }
        (bytes, std::mem::take(&mut state.changed))
    }

    /// The sealed copy is on the medium. If `failed`, it is not and must be written again. If that makes the
    /// page dirty, `list` is called to list it, with the page locked.
    pub(crate) fn written(&self, failed: bool, list: impl FnOnce()) {
        let mut state = self.lock();
        state.writing = false;
        if failed && !std::mem::replace(&mut state.dirty, true) {
            list();
        }
    }
}

struct Way {
    /// Page number + 1, and whether that is [`COUNTED`]; 0 when empty. Written after the page, so a match may still be stale and is checked.
    tag: AtomicU64,
    page: ArcSwapOption<Page>,
    used: AtomicBool,
}

/// The tag of a page in memory whose finding is counted, beside its number + 1: a look that does not count passes it by.
const COUNTED: u64 = 1 << 63;

/// All pages in memory.
pub(crate) struct Pages {
    ways: Box<[Way]>,
    sets: u64,
    /// Counts what was found, where that is wanted. Then all tags have [`COUNTED`].
    found: Option<Arc<AtomicU64>>,
    /// The position of each set's clock hand. The lock also orders insertions into the set.
    hands: Box<[Mutex<usize>]>,
}

/// Every page of the set is dirty: something must be written before another page fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SetFull;

impl Pages {
    /// Room for at least `pages` pages.
    pub(crate) fn with_room_for(pages: usize) -> Self {
        let sets = pages.div_ceil(WAYS).max(2).next_power_of_two();
        let way =
            || Way { tag: AtomicU64::new(0), page: ArcSwapOption::empty(), used: AtomicBool::new(false) };
        Self {
            ways: (0..sets * WAYS).map(|_| way()).collect(),
            sets: sets as u64,
            found: None,
            hands: (0..sets).map(|_| Mutex::new(0)).collect(),
        }
    }

    /// Counts each look that finds its page.
    pub(crate) fn counted(mut self, found: Arc<AtomicU64>) -> Self {
        self.found = Some(found);
        self
    }

    /// How many pages fit.
    pub(crate) fn capacity(&self) -> usize {
        self.ways.len()
    }

    fn set_of(&self, number: u64) -> usize {
        // Adjacent numbers go to different sets. The higher bits are mixed in so that equal strides do not
        // collide.
        let mixed = number ^ (number >> 20);
        usize::try_from(mixed & (self.sets - 1)).expect("sets fit memory")
    }

    fn ways_of(&self, set: usize) -> &[Way] {
        &self.ways[set * WAYS..(set + 1) * WAYS]
    }

    /// The page, if it is in memory. Never waits.
    pub(crate) fn get(&self, number: u64) -> Option<Guard<Option<Arc<Page>>>> {
        match self.find(number, number + 1) {
            None => self.find_counted(number),
            found => found,
        }
    }

    /// What is counted costs nothing where nothing is counted and the page is found.
    #[cold]
    fn find_counted(&self, number: u64) -> Option<Guard<Option<Arc<Page>>>> {
        let count = self.found.as_ref()?;
        let found = self.find(number, (number + 1) | COUNTED)?;
        count.fetch_add(1, Ordering::Relaxed);
        Some(found)
    }

    /// Whether the page is in memory, for one who does not look anything up in it.
    pub(crate) fn has(&self, number: u64) -> bool {
        self.find(number, self.tag(number)).is_some()
    }

    fn tag(&self, number: u64) -> u64 {
        (number + 1) | if self.found.is_some() { COUNTED } else { 0 }
    }

    #[inline]
    fn find(&self, number: u64, tag: u64) -> Option<Guard<Option<Arc<Page>>>> {
        for way in self.ways_of(self.set_of(number)) {
            if way.tag.load(Ordering::Acquire) != tag {
                continue;
            }
            let page = way.page.load();
            if page.as_ref().is_some_and(|page| page.number == number) {
                if !way.used.load(Ordering::Relaxed) {
                    way.used.store(true, Ordering::Relaxed);
                }
                return Some(page);
            }
        }
        None
    }

    /// Inserts a page, in place of a clean one if necessary. Only the caller inserts this number.
    pub(crate) fn insert(&self, page: Arc<Page>) -> Result<(), SetFull> {
        let set = self.set_of(page.number);
        let mut hand = lock(&self.hands[set]);
        let ways = self.ways_of(set);
        let victim = match ways.iter().position(|way| way.tag.load(Ordering::Relaxed) == 0) {
            Some(empty) => empty,
            None => Self::evict(ways, &mut hand).ok_or(SetFull)?,
        };
        let way = &ways[victim];
        let number = page.number;
        way.tag.store(0, Ordering::Release);
        way.page.store(Some(page));
        way.used.store(true, Ordering::Relaxed);
        way.tag.store(self.tag(number), Ordering::Release);
        Ok(())
    }

    fn evict(ways: &[Way], hand: &mut usize) -> Option<usize> {
        for _ in 0..2 * WAYS {
            let index = *hand;
            *hand = (*hand + 1) % WAYS;
            let way = &ways[index];
            if way.used.swap(false, Ordering::Relaxed) {
                continue;
            }
            let page = way.page.load_full()?;
            let mut state = page.lock();
            if !state.dirty && !state.writing {
                state.evicted = true;
                return Some(index);
            }
        }
        // Second chances are used up; take any clean page.
        ways.iter().position(|way| {
            way.page.load().as_ref().is_some_and(|page| {
                let mut state = page.lock();
                let clean = !state.dirty && !state.writing;
                state.evicted |= clean;
                clean
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u64) -> Arc<Page> {
        Page::empty(number, 4096, 1)
    }

    /// Changes an entry. Returns whether that listed the page.
    fn set(page: &Page, index: usize, word: u64) -> bool {
        let mut listed = false;
        page.update(index, |_| Ok::<_, ()>((word, 0)), |_, was_clean| listed = was_clean).unwrap().unwrap();
        listed
    }

    fn written(page: &Page, failed: bool) -> bool {
        let mut listed = false;
        page.written(failed, || listed = true);
        listed
    }

    #[test]
    fn a_page_is_found_until_it_is_evicted_and_then_refuses_changes() {
        let pages = Pages::with_room_for(16);
        assert_eq!(pages.capacity(), 16);
        let first = page(0);
        pages.insert(first.clone()).unwrap();
        for i in 1..9 {
            pages.insert(page(i * 2)).unwrap(); // all in the same set
        }
        assert!(pages.get(0).is_none(), "eight others took its place");
        assert_eq!(first.update(0, Ok::<_, ()>, |_, _| {}), Err(Evicted));
        assert!(pages.get(16).is_some());
    }

    #[test]
    fn dirty_pages_stay_and_a_set_full_of_them_says_so() {
        let pages = Pages::with_room_for(16);
        for i in 0..8 {
            let page = page(i * 2);
            assert!(set(&page, 1, 7));
            assert!(!set(&page, 1, 8));
            pages.insert(page).unwrap();
        }
        assert_eq!(pages.insert(page(100)), Err(SetFull));
        let kept = pages.get(4).unwrap().as_ref().unwrap().clone();
        let (bytes, _) = kept.seal();
        assert_eq!(be64(&bytes, 8), 8);
        assert_eq!(pages.insert(page(100)), Err(SetFull), "a page being written stays too");
        assert!(!written(&kept, false));
        pages.insert(page(100)).unwrap();
        assert!(pages.get(4).is_none());
    }

    #[test]
    fn a_page_is_listed_before_a_second_writer_finds_it_dirty() {
        let page = page(0);
        let is_listed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let list = || {
                scope.spawn(|| {
                    assert!(!set(&page, 1, 2), "the first writer lists it");
                    assert!(
                        is_listed.load(Ordering::SeqCst),
                        "the second was done before the page was listed"
                    );
                });
                std::thread::sleep(std::time::Duration::from_millis(20));
                is_listed.store(true, Ordering::SeqCst);
            };
            page.update(0, |_| Ok::<_, ()>((1, 0)), |_, _| list()).unwrap().unwrap();
        });
    }

    #[test]
    fn a_failed_write_makes_the_page_dirty_again() {
        let page = page(3);
        set(&page, 0, 1);
        let _ = page.seal();
        assert!(written(&page, true));
        let _ = page.seal();
        set(&page, 0, 2);
        assert!(!written(&page, true), "it was dirty already");
    }

    #[test]
    fn extended_entries_are_never_seen_half() {
        let page = Page::empty(0, 4096, 2);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for value in 1..200_000u64 {
                    page.update(5, |_| Ok::<_, ()>((value, !value)), |_, _| {}).unwrap().unwrap();
                }
                stop.store(true, Ordering::Release);
            });
            while !stop.load(Ordering::Acquire) {
                let (first, second) = page.entry(5);
                assert!(second == !first || (first, second) == (0, 0));
            }
        });
    }
}
