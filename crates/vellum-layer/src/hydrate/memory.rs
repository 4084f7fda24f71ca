//! What copies on their way into images may take in memory: one amount for all disks of a process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What all disks may take together unless something else is said, in bytes.
const ALL_BYTES_MAX: u64 = 64 << 20;

/// What copies of all disks may take together.
#[derive(Debug)]
pub struct CopyMemory {
    free: AtomicU64,
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
        Self { free: AtomicU64::new(bytes), bytes_max: bytes }
    }

    /// A part of it, if that much is free.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Option<Taken> {
        let less = |free: u64| free.checked_sub(bytes);
        let taken = self.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        taken.is_ok().then(|| Taken { memory: self.clone(), bytes })
    }

    /// How much is taken, in bytes.
    pub fn used(&self) -> u64 {
        self.bytes_max - self.free.load(Ordering::Acquire)
    }
}

/// A part of the memory, until dropped.
#[derive(Debug)]
pub(super) struct Taken {
    memory: Arc<CopyMemory>,
    bytes: u64,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.memory.free.fetch_add(self.bytes, Ordering::AcqRel);
    }
}
