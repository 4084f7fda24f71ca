//! What is known about space ahead of need: how much the guest writes, and how much is to be zeroed.
//! `ahead.rs` carries it out.

use std::sync::atomic::{AtomicU64, Ordering};

use async_lock::{Mutex, MutexGuard};
use vellum_core::{Buffer, ImageOffset, Result, SharedStorage};

use crate::prealloc::{Need, Prealloc, earned_by_flush};

/// What is prepared, and how.
pub(crate) struct Prepare {
    is_on: bool,
    /// The image file, for zeros.
    storage: SharedStorage,
    /// Held during a preparation, and during the close.
    need: Mutex<Need>,
    /// Bytes that the guest has written since its last flush.
    unflushed: AtomicU64,
    /// How many of the bytes that it has written and flushed count.
    flushed: AtomicU64,
}

impl Prepare {
    pub(crate) fn new(how: Prealloc, storage: SharedStorage) -> Self {
        let need = Need::new(how, storage.limits());
        let (unflushed, flushed) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { is_on: need.is_on(), storage, need: Mutex::new(need), unflushed, flushed }
    }

    /// Counts bytes that the guest writes.
    pub(crate) fn note_written(&self, bytes: u64) {
        if self.is_on {
            self.unflushed.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Counts a flush of the guest.
    pub(crate) fn note_flush(&self) {
        if self.is_on {
            let bytes = self.unflushed.swap(0, Ordering::Relaxed);
            self.flushed.fetch_add(earned_by_flush(bytes), Ordering::Relaxed);
        }
    }

    /// Whether anything is ever prepared.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// How many of the bytes that the guest has written and flushed count.
    pub(super) fn flushed(&self) -> u64 {
        self.flushed.load(Ordering::Relaxed)
    }

    /// How much is needed, unless a piece is in flight. None is begun while the guard lives.
    pub(super) fn try_need(&self) -> Option<MutexGuard<'_, Need>> {
        self.need.try_lock()
    }

    /// Writes zeros to clusters that were handed out for that.
    pub(super) async fn write_zeros(&self, at: ImageOffset, len: usize) -> Result<()> {
        self.storage.write(at, Buffer::zeroed(len)).await
    }

    /// Waits for the piece in flight. Nothing is begun while the guard lives.
    pub(crate) async fn rest(&self) -> MutexGuard<'_, Need> {
        self.need.lock().await
    }
}
