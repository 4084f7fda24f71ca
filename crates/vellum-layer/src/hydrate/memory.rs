//! What copies on their way into images may take in memory: one amount for all disks of a process, and a part of it for each.
//!
//! ```text
//!   all ─┬─ half: a part of the same size for each disk, which no other takes
//!        └─ half: first come, first served, up to DISK_BYTES_MAX for one disk
//! ```
//!
//! 1. A disk whose copies do not end, because what is below it does not answer, never keeps other disks from copying.
//! 2. Where there are so many disks that a part is smaller than a piece, each may have one piece all the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What all disks may take together unless something else is said, in bytes.
const ALL_BYTES_MAX: u64 = 64 << 20;
/// What the copies of one disk may take, in bytes.
const DISK_BYTES_MAX: u64 = 16 << 20;
/// The largest piece that a disk may have whatever its part is.
const PIECE_MAX: u64 = 2 << 20;

/// What copies of all disks may take together.
#[derive(Debug)]
pub struct CopyMemory {
    /// What was taken of the half that is not divided.
    common: AtomicU64,
    used: AtomicU64,
    disks: AtomicU64,
    bytes_max: u64,
}

impl Default for CopyMemory {
    fn default() -> Self {
        Self::of(ALL_BYTES_MAX)
    }
}

impl CopyMemory {
    /// This many bytes.
    pub fn of(bytes: u64) -> Self {
        let zero = || AtomicU64::new(0);
        Self { common: zero(), used: zero(), disks: zero(), bytes_max: bytes }
    }

    /// How much is taken, in bytes.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }
}

/// Takes this much of `most`.
fn take(used: &AtomicU64, bytes: u64, most: u64) -> bool {
    let more = |used: u64| used.checked_add(bytes).filter(|used| *used <= most);
    used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
}

/// What copies of one disk take.
#[derive(Debug)]
pub(super) struct DiskMemory {
    all: Arc<CopyMemory>,
    used: AtomicU64,
    /// What it has of its own part.
    own: AtomicU64,
}

impl DiskMemory {
    /// Of one more disk.
    pub(super) fn of(all: &Arc<CopyMemory>) -> Self {
        all.disks.fetch_add(1, Ordering::AcqRel);
        Self { all: all.clone(), used: AtomicU64::new(0), own: AtomicU64::new(0) }
    }

    /// Memory for a copy, if that much is free.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Taken> {
        let all = &self.all;
        let part = all.bytes_max / 2 / all.disks.load(Ordering::Acquire).max(1);
        if !take(&self.used, bytes, DISK_BYTES_MAX) {
            return None;
        }
        let is_only = || bytes <= PIECE_MAX && take(&self.own, bytes, bytes);
        let is_own = take(&self.own, bytes, part) || is_only();
        if !is_own && !take(&all.common, bytes, all.bytes_max / 2) {
            self.used.fetch_sub(bytes, Ordering::AcqRel);
            return None;
        }
        all.used.fetch_add(bytes, Ordering::AcqRel);
        Some(Taken { disk: self.clone(), bytes, is_own })
    }
}

impl Drop for DiskMemory {
    fn drop(&mut self) {
        self.all.disks.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Memory that a copy takes, until dropped.
#[derive(Debug)]
pub(super) struct Taken {
    disk: Arc<DiskMemory>,
    bytes: u64,
    is_own: bool,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let all = &self.disk.all;
        let part = if self.is_own { &self.disk.own } else { &all.common };
        for used in [part, &self.disk.used, &all.used] {
            used.fetch_sub(self.bytes, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disk_has_its_part_whatever_others_keep() {
        const MIB: u64 = 1 << 20;
        let all = Arc::new(CopyMemory::default());
        let disks: Vec<_> = (0..16).map(|_| Arc::new(DiskMemory::of(&all))).collect();
        let most = |disk: &Arc<DiskMemory>| std::iter::from_fn(|| disk.take(MIB / 2)).collect::<Vec<_>>();
        let (first, others) = disks.split_first().expect("there are some");
        let kept: Vec<_> = others.iter().map(most).collect();
        assert_eq!(kept.iter().map(Vec::len).max(), Some(32), "a disk alone has as much as one may");
        assert_eq!(all.used(), 15 * 2 * MIB + 32 * MIB);
        let its = most(first);
        assert_eq!((its.len(), all.used()), (4, 64 * MIB), "its part is there");
        drop(its);
        drop(kept);
        assert_eq!(all.used(), 0);
        assert_eq!(most(first).len(), 32);
        // As many that each part is smaller than a piece.
        let many: Vec<_> = (0..500).map(|_| Arc::new(DiskMemory::of(&all))).collect();
        let kept: Vec<_> = disks.iter().map(most).collect();
        assert!(kept.iter().all(|kept| !kept.is_empty()));
        assert!(many.iter().all(|disk| most(disk).len() == 1), "one piece each");
        drop(kept);
        drop((disks, many));
        assert_eq!((all.used(), all.disks.load(Ordering::SeqCst)), (0, 0));
    }
}
