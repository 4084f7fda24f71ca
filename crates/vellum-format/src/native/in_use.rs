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
pub(super) struct InUse {
    /// Held while it is written.
    mark: async_lock::Mutex<Option<Mark>>,
    /// Whether the superblock says so durably.
    is_marked: AtomicBool,
    /// Of an image without a mark: the first change is to make its session void.
    voids: AtomicBool,
}

impl InUse {
    /// `voids`: there is no mark, and a session that the first change makes void.
    pub(super) fn new(voids: bool) -> Self {
        Self { mark: Default::default(), is_marked: AtomicBool::new(false), voids: AtomicBool::new(voids) }
    }

    pub(super) fn voids(&self) -> bool {
        self.voids.load(Ordering::Acquire)
    }

    /// The session is void, durably, or another has taken its place.
    pub(super) fn note_voided(&self) {
        self.voids.store(false, Ordering::Release);
    }

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
