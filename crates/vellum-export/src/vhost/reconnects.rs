//! Whether a front end that was connected before, to another server, may continue.
//!
//! ```text
//!   server 1   marks the book of the front end: open
//!      ├─ closes the image in good order ──► marks the book: closed    ──► server 2 accepts the front end
//!      ├─ is killed, but every answer was durable: that is also marked ──► server 2 accepts the front end
//!      └─ is killed: answered writes that were not flushed may be gone,
//!         and the guest does not know                                  ──► server 2 refuses it, with the reason
//! ```
//!
//! 1. A front end of this server may reconnect at any time: its books are known.
//! 2. A front end whose used ring has moved, and which comes without such a book, can only be judged by the
//!    image: it is refused where the image was not closed.
//! 3. A front end whose writes were lost when its image was opened again, and which has sent no flush since
//!    that could have reported it, is treated like one whose server was killed.
//! 4. A guest that was reset begins with empty rings and a new book, and is admitted.
//!
//! The marks are the feature flags of the book's region, which the protocol leaves at zero and front ends do
//! not read. What a front end writes there concerns its own guest alone.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use vellum_core::{Error, ErrorKind, Result, Witness, lock};

use super::inflight::{Book, Mark};

/// So many books are remembered for a disk: more than front ends that it has at once.
const BOOKS_MAX: usize = 64;

/// What is known of the front ends of a disk.
#[derive(Clone)]
pub struct Reconnects(Arc<Known>);

struct Known {
    /// Nothing of what is answered here will be missing, however this server ends.
    is_durable: bool,
    /// The previous writer did not close the image.
    was_left_open: bool,
    books: Mutex<VecDeque<Kept>>,
}

/// The book of a front end, and what its guest has seen of lost writes.
struct Kept {
    book: Arc<Book>,
    witness: Option<Arc<Witness>>,
}

impl Reconnects {
    /// All that is answered is durable, or a killed server loses nothing that was answered.
    pub fn durable() -> Self {
        Self::new(true, false)
    }

    /// A front end may continue only if its server ended in good order. If this server does not, its front
    /// ends may not continue.
    pub fn doubtful(was_left_open: bool) -> Self {
        Self::new(false, was_left_open)
    }

    fn new(is_durable: bool, was_left_open: bool) -> Self {
        Self(Arc::new(Known { is_durable, was_left_open, books: Mutex::default() }))
    }

    fn books(&self) -> MutexGuard<'_, VecDeque<Kept>> {
        lock(&self.0.books)
    }

    /// The image was closed in good order: a front end that comes to the next server misses nothing, or has
    /// been notified of its losses.
    pub fn closed(&self) {
        let books = self.books();
        let knows = |kept: &&Kept| !kept.witness.as_ref().is_some_and(|witness| witness.is_behind());
        books.iter().filter(knows).for_each(|kept| kept.book.mark(Mark::Closed));
    }

    /// Writes that were answered may be missing: from now on a server that is killed has lost some, whatever
    /// its disk is.
    pub fn lost(&self) {
        self.books().iter().for_each(|kept| kept.book.mark(Mark::Open));
    }

    /// Whether the front end with this book, if it has one, may continue with a queue whose used ring is at
    /// this index. If it may now, it may from now on. The witness is what its guest has seen of lost writes.
    pub(super) fn look(
        &self,
        book: Option<&Arc<Book>>,
        used: u16,
        witness: Option<&Arc<Witness>>,
    ) -> Result<()> {
        let is_known = book.is_some_and(|book| self.books().iter().any(|known| known.book.is(book)));
        let was_killed = match book {
            _ if is_known => false,
            Some(book) if book.has_mark() => book.was_used() && !book.loses_nothing(),
            // It cannot say what its last server was.
            _ if self.0.is_durable => false,
            _ => self.0.was_left_open && (used != 0 || book.is_some_and(|book| book.was_used())),
        };
        if was_killed {
            return Err(Error::new(
                ErrorKind::Refused,
                "this virtual machine was connected to a server that was killed: writes that were acknowledged but \
                 not flushed may be missing. Reset the virtual machine, as after a power failure. (With --durable \
                 every acknowledged write is durable, and virtual machines continue after a server was killed.)",
            ));
        }
        if let Some(book) = book.filter(|_| !is_known) {
            book.mark(if self.0.is_durable { Mark::OpenAndDurable } else { Mark::Open });
            let mut books = self.books();
            books.push_back(Kept { book: book.clone(), witness: witness.cloned() });
            if books.len() > BOOKS_MAX {
                books.pop_front();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn book() -> (Arc<Book>, std::fs::File) {
        let (file, _) = Book::create(1, 8).expect("a file");
        (Book::map(file.try_clone().expect("a descriptor"), 0, 1, 8).expect("it is mapped"), file)
    }

    fn again(file: &std::fs::File) -> Arc<Book> {
        Book::map(file.try_clone().expect("a descriptor"), 0, 1, 8).expect("it is mapped")
    }

    /// A front end is served and its server killed, or not; the next server judges it.
    #[test]
    fn a_front_end_of_a_killed_server_is_refused_and_one_of_a_server_that_ended_is_not() {
        let (first, file) = book();
        let server = Reconnects::doubtful(false);
        server.look(Some(&first), 0, None).expect("a new one");
        drop(first.open(0, 8, 0).expect("it is used"));
        server.look(Some(&again(&file)), 7, None).expect("it comes again");

        let killed = Reconnects::doubtful(false);
        let error = killed
            .look(Some(&again(&file)), 7, None)
            .expect_err("whether or not the image was recovered since");
        assert!(error.kind() == ErrorKind::Refused && error.chain().contains("--durable"), "{error:?}");
        assert!(
            killed.look(Some(&again(&file)), 0, None).is_err(),
            "an index that has come round says nothing"
        );
        Reconnects::durable()
            .look(Some(&again(&file)), 7, None)
            .expect_err("what is missing stays so, however it goes on");

        server.closed();
        let next = Reconnects::doubtful(true);
        next.look(Some(&again(&file)), 7, None).expect("its server ended in good order");
        let after = Reconnects::doubtful(false);
        after.look(Some(&again(&file)), 7, None).expect_err("and this one did not");
    }

    #[test]
    fn a_front_end_of_a_durable_server_that_was_killed_goes_on() {
        let (first, file) = book();
        Reconnects::durable().look(Some(&first), 0, None).expect("a new one");
        drop(first.open(0, 8, 0).expect("it is used"));
        Reconnects::doubtful(true).look(Some(&again(&file)), 7, None).expect("it misses nothing");
        Reconnects::durable()
            .look(Some(&again(&file)), 7, None)
            .expect_err("but that one was killed, and was not durable");
    }

    #[test]
    fn a_front_end_that_has_not_heard_of_lost_writes_is_refused_by_the_next_server() {
        let losses = Arc::<vellum_core::Losses>::default();
        let [(one, its), (other, others)] = [book(), book()];
        let server = Reconnects::doubtful(false);
        let [hears, does_not] = [losses.witness(), losses.witness()];
        server.look(Some(&one), 0, Some(&hears)).expect("a new one");
        server.look(Some(&other), 0, Some(&does_not)).expect("a new one");
        for book in [&one, &other] {
            drop(book.open(0, 8, 0).expect("it is used"));
        }
        losses.grow();
        server.lost();
        futures_lite::future::block_on(hears.promise(std::future::ready(Ok(())))).expect_err("it hears");
        server.closed();
        let next = Reconnects::doubtful(false);
        next.look(Some(&again(&its)), 7, None).expect("it was told");
        next.look(Some(&again(&others)), 7, None).expect_err("it was not");
    }

    #[test]
    fn without_a_book_the_image_decides() {
        Reconnects::doubtful(false).look(None, 7, None).expect("it was closed");
        Reconnects::doubtful(true).look(None, 7, None).expect_err("it was not");
        Reconnects::doubtful(true).look(None, 0, None).expect("a new one");
        Reconnects::durable().look(None, 7, None).expect("all may");
        let (book, file) = book();
        Reconnects::doubtful(true).look(Some(&book), 0, None).expect("a new one");
        Reconnects::doubtful(true).look(Some(&again(&file)), 0, None).expect("it was never used");
    }
}
