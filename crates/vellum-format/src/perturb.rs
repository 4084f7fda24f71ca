//! Threads that are interrupted on purpose, for the tests that race real threads over one image.
//!
//! A window of a few instructions between two steps is hit once in a million tries, so a test that runs for a
//! second does not hit it. So each lock, each change of a page and each yield of the engine calls [`point`],
//! and a thread that has asked for it is delayed there: at a few places often and long, at others seldom and
//! briefly. The seed determines the slow places, because windows open when one place is slow and the others
//! are not. Where that is not enough, a test stops a thread in the middle of a change ([`in_a_change`]).
//!
//! ```text
//!   seed, place in the source ──► slow (1 in 8): 1 in 8 times the thread sleeps, for up to 2 ms
//!                                 else:         1 in 64 times it lets others run
//! ```
//!
//! 1. Nothing is decided here: a thread only continues later than it would have. So whatever fails with these
//!    delays can fail without them.
//! 2. Without the feature `test-hooks` none of this is compiled in. With it, threads that did not ask are not
//!    affected, and while no thread has asked a call costs one relaxed load.

#[cfg(feature = "test-hooks")]
mod on {
    use std::cell::{Cell, RefCell};
    use std::hash::{Hash, Hasher};
    use std::panic::Location;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use vellum_core::Random;

    /// How many threads have asked for something. A thread sees at least what it has asked for itself.
    static ASKED: AtomicUsize = AtomicUsize::new(0);

    fn is_idle() -> bool {
        ASKED.load(Ordering::Relaxed) == 0
    }

    /// Counts in [`ASKED`] for as long as it lives.
    struct Asked;

    impl Asked {
        fn new() -> Self {
            ASKED.fetch_add(1, Ordering::Relaxed);
            Self
        }
    }

    impl Drop for Asked {
        fn drop(&mut self) {
            ASKED.fetch_sub(1, Ordering::Relaxed);
        }
    }

    struct Seeded {
        seed: u64,
        random: Random,
        _asked: Asked,
    }

    struct Stop {
        what: Box<dyn FnMut()>,
        _asked: Asked,
    }

    thread_local! {
        static CURRENT: Cell<Option<Box<Seeded>>> = const { Cell::new(None) };
        static IN_A_CHANGE: RefCell<Option<Stop>> = const { RefCell::new(None) };
    }

    /// From now on this thread is delayed as the seed determines. Threads of one test share the seed of the
    /// places; `thread` gives each its own sequence.
    pub fn begin(seed: u64, thread: u64) {
        let random = Random::from_seed(seed.wrapping_mul(64).wrapping_add(thread));
        CURRENT.set(Some(Box::new(Seeded { seed, random, _asked: Asked::new() })));
    }

    /// From now on this thread is not delayed.
    pub fn end() {
        CURRENT.set(None);
    }

    /// Delays one transfer in eight.
    pub fn transfer() {
        let Some(mut current) = CURRENT.take() else { return };
        if current.random.one_in(8) {
            std::thread::sleep(Duration::from_micros(current.random.below(3000)));
        }
        CURRENT.set(Some(current));
    }

    /// A place where the thread may be held up.
    #[inline]
    #[track_caller]
    pub fn point() {
        if !is_idle() {
            delay(Location::caller());
        }
    }

    #[cold]
    fn delay(place: &Location<'_>) {
        let Some(mut current) = CURRENT.take() else { return };
        // A copy of this source lies elsewhere, and has the same slow places.
        let file = place.file().rsplit_once("src/").map_or(place.file(), |(_, file)| file);
        let mut hasher = std::hash::DefaultHasher::new();
        (current.seed, file, place.line()).hash(&mut hasher);
        if hasher.finish().is_multiple_of(8) {
            if current.random.one_in(8) {
                std::thread::sleep(Duration::from_micros(current.random.below(2000)));
            }
        } else if current.random.one_in(64) {
            std::thread::yield_now();
        }
        CURRENT.set(Some(current));
    }

    /// From now on this thread calls this in the middle of each change of a mapping: when everything that
    /// belongs to it is recorded, and the entry is not stored yet. A test stops there while other threads
    /// continue.
    pub fn do_in_a_change(what: Option<Box<dyn FnMut()>>) {
        IN_A_CHANGE.set(what.map(|what| Stop { what, _asked: Asked::new() }));
    }

    /// The middle of a change.
    #[inline]
    pub(crate) fn in_a_change() {
        if !is_idle() {
            stop();
        }
    }

    #[cold]
    fn stop() {
        if let Some(mut stop) = IN_A_CHANGE.take() {
            (stop.what)();
            IN_A_CHANGE.set(Some(stop));
        }
    }
}

#[cfg(feature = "test-hooks")]
pub(crate) use on::in_a_change;
#[cfg(feature = "test-hooks")]
pub use on::{begin, do_in_a_change, end, point, transfer};

/// A place where a thread may be held up in a test: not here.
#[cfg(not(feature = "test-hooks"))]
#[inline(always)]
pub(crate) const fn point() {}

/// The middle of a change: nothing is done there.
#[cfg(not(feature = "test-hooks"))]
#[inline(always)]
pub(crate) const fn in_a_change() {}
