//! Whether the superblock says that the image is in use. `commit.rs` writes it.

use std::sync::atomic::{AtomicBool, Ordering};

use async_lock::MutexGuard;

/// What the superblock says of an image that is in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    pub(super) generation: u64,
    pub(super) key: u128,
}

/// What the superblock says since the first change of an opening.
#[derive(Default)]
pub(super) struct InUse {
    /// Held while it is written.
    mark: async_lock::Mutex<Option<Mark>>,
    /// Whether the superblock says so durably.
    is_marked: AtomicBool,
}

impl InUse {
    pub(super) fn is_marked(&self) -> bool {
        self.is_marked.load(Ordering::Acquire)
    }

    /// Held while the superblock is written.
    pub(super) async fn lock(&self) -> MutexGuard<'_, Option<Mark>> {
        self.mark.lock().await
    }

    /// The superblock says so durably.
    pub(super) fn note_marked(&self) {
        self.is_marked.store(true, Ordering::Release);
    }
}
