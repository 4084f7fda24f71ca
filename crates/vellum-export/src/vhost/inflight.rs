//! The requests that were taken from a queue and not handed back, in memory that the front end keeps when a
//! server is killed.
//!
//! ```text
//!   region of a queue, at a multiple of 64 bytes
//!     0 features, 8 version, 10 rows, 12 last handed back, 14 used index │ one row of 16 bytes for each descriptor:
//!                                                                        │ 0 in flight, 6 next, 8 when it was taken
//! ```
//!
//! A request is entered before it begins. Handing it back takes three steps: it is noted as the last one; the
//! used ring moves; its entry is cleared and the index noted. The next server sees a kill between any two of
//! them:
//!
//! 1. Where the noted index differs from the ring's, the last one was handed back: its entry is cleared.
//! 2. Requests that are still entered were not handed back: they are executed again, in the order in which
//!    they were taken.
//!
//! The front end can also write here. Numbers are checked, and at worst its own requests are executed twice
//! or never.
//!
//! Source: the vhost-user protocol, "Inflight I/O tracking" (split rings).

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::fence;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vellum_core::{Context, Error, Result};
use vm_memory::{AtomicAccess, Bytes, FileOffset, MmapRegion, VolatileMemory};

use super::keep_from_children;

const HEADER_BYTES: usize = 16;
const ROW_BYTES: usize = 16;
const QUEUE_ALIGNMENT: usize = 64;

/// In the first region: how the last server ended (`reconnects`).
const FEATURES_AT: usize = 0;

const VERSION_AT: usize = 8;
const ROWS_AT: usize = 10;
const LAST_AT: usize = 12;
const USED_AT: usize = 14;

const VERSION: u16 = 1;

/// The regions of all queues.
#[derive(Debug)]
pub(super) struct Book {
    mapping: MmapRegion,
    queues: u16,
    rows: u16,
}

/// How a server ended, or will have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Mark {
    /// It serves, or was killed: what it answered and was not flushed may be missing then.
    Open = 1,
    /// It closed the image in good order.
    Closed = 2,
    /// It serves, or was killed: all that it answered is durable.
    OpenAndDurable = 3,
}

/// The region of one queue.
pub(super) struct Pages {
    book: Arc<Book>,
    start: usize,
    /// How many were taken, for the order.
    taken: u64,
}

fn pages_bytes(rows: u16) -> usize {
    (HEADER_BYTES + usize::from(rows) * ROW_BYTES).next_multiple_of(QUEUE_ALIGNMENT)
}

impl Book {
    /// A file for `queues` queues of `rows` descriptors each. Front ends map it too.
    pub(super) fn create(queues: u16, rows: u16) -> Result<(File, u64)> {
        let context = || "can't create a file for requests in flight";
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("vellum-inflight", flags).map_err(std::io::Error::from).context(context)?;
        let file = File::from(file);
        let len = (pages_bytes(rows) * usize::from(queues)) as u64;
        file.set_len(len).context(context)?;
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(std::io::Error::from).context(context)?;
        Ok((file, len))
    }

    /// Maps what a front end kept.
    pub(super) fn map(file: File, in_file: u64, queues: u16, rows: u16) -> Result<Arc<Self>> {
        keep_from_children(&file)?;
        let refuse = |why: &str| Error::invalid(format!("can't use a file of requests in flight: {why}"));
        let len = pages_bytes(rows) * usize::from(queues);
        let facts = file.metadata().context(|| "can't stat the file of requests in flight")?;
        let end = in_file.checked_add(len as u64);
        if len == 0 || !facts.is_file() || end.is_none_or(|end| end > facts.len()) {
            return Err(refuse("it is too short or not a regular file"));
        }
        let mapping = MmapRegion::from_file(FileOffset::new(file, in_file), len)
            .map_err(|error| refuse(&error.to_string()))?;
        Ok(Arc::new(Self { mapping, queues, rows }))
    }

    /// Whether both are one file.
    pub(super) fn is(&self, other: &Self) -> bool {
        let identity = |book: &Self| {
            let file = book.mapping.file_offset()?.file();
            file.metadata().ok().map(|facts| (facts.dev(), facts.ino()))
        };
        identity(self).is_some_and(|its| identity(other) == Some(its))
    }

    /// Whether a queue was ever served with it.
    pub(super) fn was_used(&self) -> bool {
        (0..self.queues)
            .any(|queue| self.load::<u16>(pages_bytes(self.rows) * usize::from(queue) + VERSION_AT) != 0)
    }

    /// Whether its last server records how it ended.
    pub(super) fn has_mark(&self) -> bool {
        let mark = self.load::<u64>(FEATURES_AT);
        [Mark::Open, Mark::Closed, Mark::OpenAndDurable].iter().any(|known| mark == *known as u64)
    }

    /// Whether nothing is missing of what its last server answered.
    pub(super) fn loses_nothing(&self) -> bool {
        [Mark::Closed, Mark::OpenAndDurable].iter().any(|mark| self.load::<u64>(FEATURES_AT) == *mark as u64)
    }

    pub(super) fn mark(&self, mark: Mark) {
        self.store(FEATURES_AT, mark as u64);
    }

    // Numbers here are those of the host: both sides are on it.
    fn load<T: AtomicAccess>(&self, at: usize) -> T {
        let slice = self.mapping.as_volatile_slice();
        slice.load(at, Relaxed).expect("it is within the region, and at its boundary")
    }

    fn store<T: AtomicAccess>(&self, at: usize, value: T) {
        let slice = self.mapping.as_volatile_slice();
        slice.store(value, at, Relaxed).expect("it is within the region, and at its boundary");
    }

    /// Its file.
    #[cfg(test)]
    pub(super) fn file(&self) -> &File {
        self.mapping.file_offset().expect("it has one").file()
    }

    /// The region of a queue of this length, whose used ring is at this index; and the heads of what was not
    /// handed back. Nothing when there is no such region.
    pub(super) fn open(self: &Arc<Self>, queue: u32, size: u16, used: u16) -> Option<(Pages, Vec<u16>)> {
        let number = u16::try_from(queue).ok().filter(|number| *number < self.queues && size <= self.rows)?;
        let start = pages_bytes(self.rows) * usize::from(number);
        let mut pages = Pages { book: self.clone(), start, taken: 0 };
        if pages.load::<u16>(VERSION_AT) != VERSION {
            pages.store(ROWS_AT, self.rows);
            pages.store(USED_AT, used);
            pages.store(VERSION_AT, VERSION);
        }
        if pages.load::<u16>(USED_AT) != used {
            let last = pages.load::<u16>(LAST_AT);
            if last < size {
                pages.store(row(last), 0u8);
            }
            fence(SeqCst);
            pages.store(USED_AT, used);
        }
        let mut left: Vec<(u64, u16)> = (0..size)
            .filter(|head| pages.load::<u8>(row(*head)) != 0)
            .map(|head| (pages.load::<u64>(row(head) + 8), head))
            .collect();
        left.sort_unstable();
        pages.taken = left.last().map_or(0, |(taken, _)| taken.wrapping_add(1));
        Some((pages, left.into_iter().map(|(_, head)| head).collect()))
    }
}

/// Where the row of a head is.
fn row(head: u16) -> usize {
    HEADER_BYTES + usize::from(head) * ROW_BYTES
}

impl Pages {
    /// A request is about to begin. What [`Book::open`] gave is entered already, and keeps its place in the
    /// order.
    pub(super) fn enter(&mut self, head: u16) {
        self.store(row(head) + 8, self.taken);
        self.taken = self.taken.wrapping_add(1);
        fence(SeqCst);
        self.store(row(head), 1u8);
        fence(SeqCst);
    }

    /// It is about to be handed back.
    pub(super) fn end(&self, head: u16) {
        self.store(LAST_AT, head);
        fence(SeqCst);
    }

    /// It has been handed back; the used ring is at this index now.
    pub(super) fn strike(&self, head: u16, used: u16) {
        fence(SeqCst);
        self.store(row(head), 0u8);
        fence(SeqCst);
        self.store(USED_AT, used);
    }

    fn load<T: AtomicAccess>(&self, at: usize) -> T {
        self.book.load(self.start + at)
    }

    fn store<T: AtomicAccess>(&self, at: usize, value: T) {
        self.book.store(self.start + at, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn book() -> (Arc<Book>, File) {
        let (file, len) = Book::create(2, 8).expect("a file");
        assert_eq!(len, 2 * 192);
        (Book::map(file.try_clone().expect("a descriptor"), 0, 2, 8).expect("it is mapped"), file)
    }

    /// The requests that the next server still has to execute.
    fn left(book: &Arc<Book>, used: u16) -> Vec<u16> {
        book.open(1, 8, used).expect("a region").1
    }

    #[test]
    fn what_was_not_handed_back_is_found_in_the_order_in_which_it_was_taken() {
        let (book, file) = book();
        let (mut pages, none) = book.open(1, 8, 65_535).expect("a region");
        assert_eq!(none, [0; 0]);
        for head in [5, 2, 7, 0] {
            pages.enter(head);
        }
        pages.end(2);
        pages.strike(2, 0);
        drop((pages, book));
        let again = Book::map(file, 0, 2, 8).expect("it is mapped");
        assert_eq!(left(&again, 0), [5, 7, 0]);
        assert_eq!(again.open(0, 8, 9).expect("the other").1, [0; 0]);
    }

    #[test]
    fn a_kill_between_the_steps_neither_loses_nor_repeats() {
        let (book, _file) = book();
        let (mut pages, _) = book.open(1, 8, 10).expect("a region");
        pages.enter(3);
        pages.enter(4);
        assert_eq!(left(&book, 10), [3, 4]);
        pages.end(4);
        assert_eq!(left(&book, 10), [3, 4], "noted, not handed back");
        assert_eq!(left(&book, 11), [3], "handed back, not struck out");
        assert_eq!(left(&book, 11), [3], "and the same once more");
        let (mut pages, _) = book.open(1, 8, 11).expect("a region");
        pages.enter(4);
        assert_eq!(left(&book, 11), [3, 4], "taken again, it comes behind");
    }

    #[test]
    fn a_book_that_does_not_fit_is_refused() {
        let (_, file) = book();
        let clone = || file.try_clone().expect("a descriptor");
        Book::map(clone(), 0, 3, 8).expect_err("it has two queues");
        Book::map(clone(), u64::MAX, 2, 8).expect_err("it ends before");
        Book::map(clone(), 0, 0, 8).expect_err("nothing to map");
        Book::map(File::open("/dev/zero").expect("a device"), 0, 2, 8).expect_err("no file");
        let book = Book::map(clone(), 0, 2, 8).expect("it fits");
        assert!(book.open(2, 8, 0).is_none() && book.open(0, 16, 0).is_none());
    }
}
