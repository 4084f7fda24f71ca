//! Threads that are interrupted on purpose, for the tests that race real threads over one image.
//!
//! A window of a few instructions between two steps is hit once in a million tries, so a test that runs for a
//! second does not hit it. So each lock, each change of a page and each yield of the engine calls [`point`],
//! and a thread that has asked for it is delayed there: at a few places often and long, at others seldom and
//! briefly. The seed determines the slow places, because windows open when one place is slow and the others
//! are not.
//!
//! ```text
//!   seed, place in the source ──► slow (1 in 8): 1 in 8 times the thread sleeps, for up to 2 ms
//!                                 else:         1 in 64 times it lets others run
//! ```
//!
//! 1. Nothing is decided here: a thread only continues later than it would have. So whatever fails with these
//!    delays can fail without them.
//! 2. Without the feature `sabotage` none of this is compiled in, and with it threads that did not ask are
//!    not affected.

#[cfg(feature = "sabotage")]
mod on {
    use std::cell::Cell;
    use std::hash::{Hash, Hasher};
    use std::panic::Location;
    use std::time::Duration;

    use vellum_core::Random;

    struct Seeded {
        seed: u64,
        random: Random,
    }

    thread_local! {
        static CURRENT: Cell<Option<Box<Seeded>>> = const { Cell::new(None) };
    }

    /// From now on this thread is delayed as the seed determines. Threads of one test share the seed of the
    /// places; `thread` gives each its own sequence.
    pub fn begin(seed: u64, thread: u64) {
        let random = Random::from_seed(seed.wrapping_mul(64).wrapping_add(thread));
        CURRENT.set(Some(Box::new(Seeded { seed, random })));
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
    #[track_caller]
    pub fn point() {
        let Some(mut current) = CURRENT.take() else { return };
        let mut hasher = std::hash::DefaultHasher::new();
        let place = Location::caller();
        (current.seed, place.file(), place.line()).hash(&mut hasher);
        if hasher.finish().is_multiple_of(8) {
            if current.random.one_in(8) {
                std::thread::sleep(Duration::from_micros(current.random.below(2000)));
            }
        } else if current.random.one_in(64) {
            std::thread::yield_now();
        }
        CURRENT.set(Some(current));
    }
}

#[cfg(feature = "sabotage")]
pub use on::{begin, end, point, transfer};

/// A place where a thread may be held up in a test: not here.
#[cfg(not(feature = "sabotage"))]
#[inline(always)]
pub(crate) const fn point() {}
