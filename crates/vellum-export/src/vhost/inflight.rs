//! What was taken from a queue and not handed back, in memory that the front end keeps when a server is killed.
//!
//! ```text
//!   region of a queue, at a multiple of 64 bytes
//!     0 features, 8 version, 10 rows, 12 last handed back, 14 used index │ one row of 16 bytes for each descriptor:
//!                                                                        │ 0 in flight, 6 next, 8 when it was taken
//! ```
//!
//! A request is entered before it begins. To hand it back takes three steps: it is noted as the last one, the used ring
//! moves, it is struck out and the index noted. A kill between any two of them is seen by who comes next:
//!
//! 1. Where the index noted is not the ring's, the last one was handed back: it is struck out.
//! 2. What is still entered was not handed back: it is done again, in the order in which it was taken.
//!
//! The front end can write here, too. Numbers are checked, and at worst its own requests are done twice or never.
//!
//! Source: the vhost-user protocol, "Inflight I/O tracking" (split rings).

use std::fs::File;
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
    /// A file for so many queues of so many descriptors, which front ends map, too.
    pub(super) fn create(queues: u16, rows: u16) -> Result<(File, u64)> {
        let context = || "can't make a file for requests in flight";
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
        let facts = file.metadata().context(|| "can't look at a file of requests in flight")?;
        let end = in_file.checked_add(len as u64);
        if len == 0 || !facts.is_file() || end.is_none_or(|end| end > facts.len()) {
            return Err(refuse("it is too short, or is none"));
        }
        let mapping = MmapRegion::from_file(FileOffset::new(file, in_file), len)
            .map_err(|error| refuse(&error.to_string()))?;
        Ok(Arc::new(Self { mapping, queues, rows }))
    }

    /// Its file.
    #[cfg(test)]
    pub(super) fn file(&self) -> &File {
        self.mapping.file_offset().expect("it has one").file()
    }

    /// The region of a queue of this length, whose used ring is at this index; and the heads of what was not handed back.
    /// Nothing when there is no such region.
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
    /// A request is about to begin. What [`Book::open`] gave is entered already, and keeps its place in the order.
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

    // Numbers here are those of the host: both sides are on it.
    fn load<T: AtomicAccess>(&self, at: usize) -> T {
        let slice = self.book.mapping.as_volatile_slice();
        slice.load(self.start + at, Relaxed).expect("it is within the region, and at its boundary")
    }

    fn store<T: AtomicAccess>(&self, at: usize, value: T) {
        let slice = self.book.mapping.as_volatile_slice();
        slice.store(value, self.start + at, Relaxed).expect("it is within the region, and at its boundary");
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

    /// What the next server finds that is still to be done.
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
