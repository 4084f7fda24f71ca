//! The home pages in memory: bitmap, masks and table, as words that are read without a lock.
//!
//! ```text
//!   a reader     word ──────────────────────────► value          no lock; a page that is not here is read first
//!   a change     page's lock: word, what changed, dirty list     under the journal's gate
//!   a seal       gate alone: the dirty pages, copied
//! ```
//!
//! 1. A page is loaded once and then stays in memory. Its bytes in the image matter only until then, because
//!    a page that is not in memory cannot be changed. Two concurrent loads of a page find the same bytes, and
//!    the first one's are kept.
//! 2. A page that was never touched takes one pointer.
//! 3. A region that was scanned once is not read again: a page of it that is not in memory is zero, and
//!    cannot have changed.
//! 4. Before a page changes, the host has space for it. A full file system then fails the request that asks
//!    for the change, and not the journal's checkpoint.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use vellum_core::{Buffer, ErrorKind, ImageOffset, ImageSpan, Result, Storage};

use super::geometry::Bits;
use crate::bytes::be64;
use crate::journal::Changed;
use crate::perturb;
use crate::state::lock;
use crate::work;

/// The size of a page in bytes.
pub(super) const PAGE: u64 = 4096;
const WORDS: usize = 512;

struct Page {
    words: Box<[AtomicU64]>,
    /// What has changed since the last seal.
    changed: Mutex<Option<Changed>>,
    /// The host has space for the page. This is so for every page that was not read as zeros.
    has_space: AtomicBool,
}

/// A page as it was when sealed.
pub(super) struct SealedPage {
    pub(super) at: ImageOffset,
    pub(super) bytes: Arc<[u8]>,
    pub(super) changed: Changed,
}

/// All home pages of an image: those of the metadata that the journal protects.
pub(super) struct HomePages {
    /// Where each span lies, and the number of its first page.
    spans: Vec<(ImageSpan, usize)>,
    pages: Box<[OnceLock<Box<Page>>]>,
    /// Numbers of pages with changes that are not sealed.
    dirty: Mutex<Vec<usize>>,
    dirty_count: AtomicUsize,
    /// Spans that were scanned. Pages in them that are not in memory are zero.
    scanned: OnceLock<Vec<ImageSpan>>,
}

/// A page that is needed is not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Missing(pub(super) ImageOffset);

impl HomePages {
    pub(super) fn new(all: impl Iterator<Item = ImageSpan>) -> Self {
        let mut count = 0;
        let spans = all.map(|span| {
            let first = count;
            count += usize::try_from(span.len() / PAGE).expect("bounded by the superblock's limits");
            (span, first)
        });
        let spans: Vec<(ImageSpan, usize)> = spans.collect();
        let pages = (0..count).map(|_| OnceLock::new()).collect();
        Self {
            spans,
            pages,
            dirty: Mutex::default(),
            dirty_count: AtomicUsize::new(0),
            scanned: OnceLock::new(),
        }
    }

    fn index(&self, word: ImageOffset) -> (usize, usize) {
        let there = self.spans.iter().find(|(span, _)| span.contains(word));
        let (span, first) = there.expect("the words of home are asked for");
        let within = word - span.start();
        let page = first + usize::try_from(within / PAGE).expect("as many as there are pages");
        (page, usize::try_from(within % PAGE / 8).expect("below 512"))
    }

    /// Where a page lies.
    fn place(&self, number: usize) -> ImageOffset {
        let span = self.spans.iter().rfind(|(_, first)| *first <= number);
        let (span, first) = span.expect("the first one begins with page 0");
        span.start() + (number - first) as u64 * PAGE
    }

    /// The value of some bits of a word.
    pub(super) fn get(&self, bits: Bits) -> Result<u64, Missing> {
        let (page, word) = self.index(bits.word);
        match self.pages[page].get() {
            Some(page) => Ok(bits.get(page.words[word].load(Ordering::Acquire))),
            None => Err(Missing(bits.word)),
        }
    }

    /// The value of a word.
    pub(super) fn word(&self, at: ImageOffset) -> Result<u64, Missing> {
        let (page, word) = self.index(at);
        match self.pages[page].get() {
            Some(page) => Ok(page.words[word].load(Ordering::Acquire)),
            None => Err(Missing(at)),
        }
    }

    /// Changes a word without entering it in the open transaction, because something else records it for a
    /// crash. Its page must be in memory. The caller holds the journal's gate.
    pub(super) fn change_unrecorded(&self, at: ImageOffset, change: impl FnOnce(u64) -> u64) {
        let (number, word) = self.index(at);
        let page = self.pages[number].get().expect("pages are loaded before they are changed");
        let _changed = lock(&page.changed);
        let old = page.words[word].load(Ordering::Acquire);
        page.words[word].store(change(old), Ordering::Release);
    }

    /// Enters a word with its present value in the open transaction. The caller holds the journal's gate.
    pub(super) fn touch(&self, at: ImageOffset) {
        let (number, word) = self.index(at);
        let page = self.pages[number].get().expect("what was changed is here");
        let _bytes = self.list(number, &mut lock(&page.changed)).add(word);
    }

    /// The changes of a page. The page is listed as dirty if it had none.
    fn list<'a>(&self, number: usize, changed: &'a mut Option<Changed>) -> &'a mut Changed {
        if changed.is_none() {
            lock(&self.dirty).push(number);
            self.dirty_count.fetch_add(1, Ordering::AcqRel);
        }
        changed.get_or_insert_default()
    }

    /// Changes a word and returns the old value. Its page must be in memory. The caller holds the journal's
    /// gate.
    pub(super) fn change(&self, at: ImageOffset, change: impl FnOnce(u64) -> u64) -> u64 {
        let (number, word) = self.index(at);
        let page = self.pages[number].get().expect("pages are loaded before they are changed");
        let mut changed = lock(&page.changed);
        let old = page.words[word].load(Ordering::Acquire);
        let new = change(old);
        if new != old {
            perturb::point();
            page.words[word].store(new, Ordering::Release);
            perturb::point();
            let _bytes = self.list(number, &mut changed).add(word);
        }
        old
    }

    /// Makes sure that the host has space for the pages of these words, which are in memory.
    pub(super) async fn reserve(&self, storage: &dyn Storage, words: &[ImageOffset]) -> Result<()> {
        for word in words {
            let (number, _) = self.index(*word);
            let page = self.pages[number].get().expect("pages are loaded before they are changed");
            if page.has_space.load(Ordering::Acquire) {
                continue;
            }
            match storage.preallocate(page_of(*word).span(PAGE)).await {
                Err(error) if error.kind() != ErrorKind::Unsupported => return Err(error),
                _ => page.has_space.store(true, Ordering::Release),
            }
        }
        Ok(())
    }

    /// How many pages have changes that are not sealed.
    pub(super) fn dirty_count(&self) -> usize {
        self.dirty_count.load(Ordering::Acquire)
    }

    /// Copies all changed pages. The caller holds the gate alone.
    pub(super) fn seal(&self) -> Vec<SealedPage> {
        let mut numbers = std::mem::take(&mut *lock(&self.dirty));
        self.dirty_count.store(0, Ordering::Release);
        numbers.sort_unstable();
        let sealed = numbers.into_iter().map(|number| {
            let page = self.pages[number].get().expect("a changed page is here");
            let changed = lock(&page.changed).take().expect("a listed page has changes");
            let mut bytes = vec![0; page.words.len() * 8];
            for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(&page.words) {
                *place = word.load(Ordering::Acquire).to_be_bytes();
            }
            SealedPage { at: self.place(number), bytes: bytes.into(), changed }
        });
        sealed.collect()
    }

    /// Loads the page of a word. `place` says where the page lies if not at its home location, or `None` when
    /// it is zero.
    pub(super) async fn load(
        &self,
        storage: &dyn Storage,
        Missing(at): Missing,
        place: impl FnOnce(ImageOffset) -> Option<ImageOffset>,
    ) -> Result<()> {
        let (number, _) = self.index(at);
        if self.scanned.get().is_some_and(|scanned| scanned.iter().any(|span| span.contains(at))) {
            self.keep(number, &[0; 4096]);
            return Ok(());
        }
        let bytes = match place(page_of(at)) {
            Some(at) => storage.read(at, Buffer::for_overwrite(4096)).await?.to_vec(),
            None => vec![0; 4096],
        };
        self.keep(number, &bytes);
        Ok(())
    }

    /// Uses these bytes for the page of a missing word.
    pub(super) fn hold(&self, Missing(at): Missing, bytes: &[u8]) {
        self.keep(self.index(at).0, bytes);
    }

    /// The bytes of a page. `None` when it is not in memory.
    pub(super) fn bytes(&self, at: ImageOffset) -> Option<Vec<u8>> {
        let page = self.pages[self.index(at).0].get()?;
        Some(page.words.iter().flat_map(|word| word.load(Ordering::Acquire).to_be_bytes()).collect())
    }

    /// Loads the pages of these spans, several at a time, and calls `see` with each word.
    pub(super) async fn scan(
        &self,
        storage: &dyn Storage,
        spans: impl Iterator<Item = ImageSpan>,
        mut see: impl FnMut(ImageOffset, u64) -> Result<()>,
    ) -> Result<()> {
        let spans: Vec<ImageSpan> = spans.collect();
        for span in &spans {
            self.scan_span(storage, *span, &mut see).await?;
        }
        let _was_scanned = self.scanned.set(spans);
        Ok(())
    }

    async fn scan_span(
        &self,
        storage: &dyn Storage,
        span: ImageSpan,
        see: &mut impl FnMut(ImageOffset, u64) -> Result<()>,
    ) -> Result<()> {
        const PAGES_AT_ONCE: u64 = 256;
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(PAGES_AT_ONCE * PAGE);
            // Tables have room to grow, which is a hole in the file.
            let runs = storage.runs(now).await?;
            if runs.iter().all(|run| !run.is_data)
                && runs.last().is_some_and(|run| run.span.end() >= now.end())
            {
                rest = later;
                continue;
            }
            let len = usize::try_from(now.len()).expect("bounded");
            let bytes = storage.read(now.start(), Buffer::for_overwrite(len)).await?;
            for (at, page) in (0..).map(|page| now.start() + page * PAGE).zip(bytes.slice().chunks(4096)) {
                if vellum_core::is_zero(page) {
                    continue;
                }
                self.keep(self.index(at).0, page);
                work::note(WORDS);
                for word in 0..WORDS {
                    see(at + word as u64 * 8, be64(page, word * 8))?;
                }
            }
            rest = later;
        }
        Ok(())
    }

    /// Calls `see` with each word of the span whose page is in memory.
    pub(super) fn each_loaded(&self, span: ImageSpan, mut see: impl FnMut(ImageOffset, u64)) {
        let mut at = span.start();
        while at < span.end() {
            if let Some(page) = self.pages[self.index(at).0].get() {
                for (index, word) in (0..).zip(&page.words) {
                    see(at + index * 8, word.load(Ordering::Acquire));
                }
            }
            at += PAGE;
        }
    }

    fn keep(&self, number: usize, bytes: &[u8]) {
        let words = bytes.chunks_exact(8).map(|word| AtomicU64::new(be64(word, 0))).collect();
        let has_space = AtomicBool::new(!vellum_core::is_zero(bytes));
        let _was_there =
            self.pages[number].set(Box::new(Page { words, changed: Mutex::default(), has_space }));
    }
}

/// Where the page of a word begins.
fn page_of(word: ImageOffset) -> ImageOffset {
    ImageOffset::new(word.bytes() / PAGE * PAGE)
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::MemoryStorage;

    use super::*;

    #[test]
    fn changed_words_are_sealed_once() {
        let storage = MemoryStorage::holding("image", &[0xFF; 4 * 4096]);
        // In two pieces. The word lies in the second one.
        let pieces = [ImageOffset::new(0).span(4096), ImageOffset::new(8192).span(8192)];
        let home = HomePages::new(pieces.into_iter());
        let word = ImageOffset::new(8192 + 4096 + 16);
        let bits = Bits { word, shift: 62, width: 2 };
        assert_eq!(home.get(bits), Err(Missing(word)));
        block_on(home.load(&*storage, Missing(word), Some)).unwrap();
        assert_eq!(home.get(bits), Ok(3));
        assert_eq!(home.change(word, |value| value), u64::MAX);
        assert_eq!(home.dirty_count(), 0, "nothing has changed");
        home.change(word, |value| bits.set(value, 1));
        home.change(word, |value| bits.set(value, 2));
        assert_eq!(home.dirty_count(), 1);
        let sealed = home.seal();
        assert_eq!(sealed.len(), 1);
        assert_eq!(sealed[0].at, ImageOffset::new(12288));
        assert_eq!(sealed[0].bytes[16], 0xBF);
        let items = sealed[0].changed.items(sealed[0].at, &sealed[0].bytes);
        assert_eq!(items.len(), 1);
        assert!(home.seal().is_empty());
        block_on(home.load(&*storage, Missing(word), Some)).unwrap();
        assert_eq!(home.get(bits), Ok(2), "what is in memory stays");
    }
}
