//! How many operations of each backend in a ring may occupy kernel threads.
//!
//! A flush or an `fallocate` always occupies a kernel thread (`io-wq`) until it has ended; so does every
//! transfer of a file whose file system cannot report that it would have to wait. The kernel has one pool of
//! these threads for a worker, whatever they wait for: without a limit, storage that does not answer would
//! soon occupy all of them. Copying to and from the page cache can also take long. The worker itself copies
//! only as much as takes it a moment, and gives the rest to such threads too, in a line for each file and
//! direction, so that no copy is queued behind another file's, or before a flush.
//!
//! ```text
//!   enter ──▶ begun, at most a share of a line ──▶ the kernel ──▶ leave ──▶ the next that waits is begun
//!        └──▶ waits its turn ────────────────────────────────────────────────────▲
//! ```
//!
//! 1. The kernel may start as many threads as all lines that were ever used may begin operations, and
//!    [`SHARE`] for everything else; and that many in each of the two groups in which it counts them. So whatever
//!    hangs, there is a thread for each operation that was begun, and no line ever takes those of another.
//! 2. A waiting operation has not been submitted to the kernel, and can be withdrawn.

use std::collections::{HashMap, VecDeque};

use crate::blocking::Backend;

/// How many threads of the kernel work for one backend at most.
pub(crate) const SHARE: usize = 16;

/// How many of them copy for one file in one direction, beside that.
const COPIES: usize = 8;

/// For how many files at once. What is copied for more of them is copied by the worker, as before: threads
/// are not free.
const FILES: usize = 16;

/// The operations that wait for the same share, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Line {
    /// What takes a thread, always.
    Waits(Backend),
    /// What is only too much to be copied by the worker, of one file in one direction: what is not in memory,
    /// or written faster than the host can, holds up no other file.
    Copies { file: usize, is_write: bool },
}

impl Line {
    fn share(self) -> usize {
        match self {
            Self::Waits(_) => SHARE,
            Self::Copies { .. } => COPIES,
        }
    }
}

/// The lines of a ring.
#[derive(Default)]
pub(crate) struct Shares(HashMap<Line, Share>);

#[derive(Default)]
struct Share {
    begun: usize,
    waiting: VecDeque<usize>,
}

impl Shares {
    /// Whether the operation in this slot may begin; else it waits.
    pub(crate) fn enter(&mut self, line: Line, key: usize) -> bool {
        let share = self.0.entry(line).or_default();
        if share.begun < line.share() {
            share.begun += 1;
            return true;
        }
        share.waiting.push_back(key);
        false
    }

    /// Whether copies of this line may have threads.
    pub(crate) fn may_copy(&self, line: Line) -> bool {
        let files = || self.0.keys().filter(|line| matches!(line, Line::Copies { .. })).count();
        self.0.contains_key(&line) || files() < FILES
    }

    /// An operation that was begun has ended. Returns the slot of the next one that begins.
    pub(crate) fn leave(&mut self, line: Line) -> Option<usize> {
        let share = self.0.get_mut(&line).expect("it was entered");
        let next = share.waiting.pop_front();
        share.begun -= usize::from(next.is_none());
        // There are as many files as there are; of backends there are few.
        if share.begun == 0 && matches!(line, Line::Copies { .. }) {
            self.0.remove(&line);
        }
        next
    }

    /// Takes back one that waits; false when it does not.
    pub(crate) fn take_back(&mut self, line: Line, key: usize) -> bool {
        let Some(share) = self.0.get_mut(&line) else { return false };
        let place = share.waiting.iter().position(|waiting| *waiting == key);
        place.is_some_and(|place| share.waiting.remove(place).is_some())
    }

    /// How many threads the kernel is to have for all of them.
    pub(crate) fn threads(&self) -> u32 {
        let lines: usize = self.0.keys().map(|line| line.share()).sum();
        u32::try_from(SHARE + lines).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_beyond_a_share_waits_for_its_own_backend_only() {
        let (hung, other) = (Line::Waits(Backend::Device(1)), Line::Waits(Backend::Device(2)));
        let mut shares = Shares::default();
        for key in 0..SHARE + 2 {
            assert_eq!(shares.enter(hung, key), key < SHARE);
        }
        assert!(shares.enter(other, 100), "another begins at once");
        assert_eq!(shares.threads() as usize, 3 * SHARE);
        assert_eq!(shares.leave(other), None);
        assert!(
            shares.take_back(hung, SHARE) && !shares.take_back(hung, SHARE) && !shares.take_back(hung, 0)
        );
        assert_eq!(shares.leave(hung), Some(SHARE + 1));
        for _ in 0..SHARE {
            assert_eq!(shares.leave(hung), None);
        }
        assert!(shares.enter(hung, 7));
    }

    #[test]
    fn copies_take_no_threads_from_flushes() {
        let flushes = Line::Waits(Backend::Device(1));
        let [copies, others] = [1, 2].map(|file| Line::Copies { file, is_write: false });
        let mut shares = Shares::default();
        for key in 0..100 {
            assert_eq!(shares.enter(copies, key), key < COPIES);
        }
        for key in 100..100 + SHARE {
            assert!(shares.enter(flushes, key), "not behind the copies");
        }
        assert!(shares.enter(others, 200), "not behind those of another file");
        assert_eq!(shares.threads() as usize, SHARE + SHARE + 2 * COPIES, "one for each that was begun");
        assert_eq!(shares.leave(copies), Some(COPIES));
        assert_eq!(shares.leave(others), None);
        assert_eq!(shares.threads() as usize, SHARE + SHARE + COPIES, "it is forgotten");
        assert!(shares.take_back(copies, 99));
        for file in 2..=FILES {
            assert!(shares.enter(Line::Copies { file, is_write: true }, 300 + file));
        }
        let one_more = Line::Copies { file: 99, is_write: true };
        assert!(shares.may_copy(copies) && !shares.may_copy(one_more), "of at most FILES files");
    }
}
