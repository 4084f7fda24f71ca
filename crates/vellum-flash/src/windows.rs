//! How many windows of tables may be known beside what flash has of them (`metadata/known`): the memory for them has a bound, for
//! all images together.

use std::sync::atomic::{AtomicU64, Ordering};

/// At most this many windows are known of all images; the rest is read from the image.
pub(crate) const WINDOWS_MAX: u64 = 1 << 17;
/// As many in the smallest caches.
pub(crate) const WINDOWS_MIN: u64 = 512;
/// There are more windows than one for this many slots only where most of them are zero.
const SLOTS_OF_WINDOW: u64 = 8;
/// What a window that is known takes at most: 56 bytes in tree nodes that may be half full.
pub(crate) const WINDOW_BYTES: u64 = 112;

/// How many windows may be known, of all images that a cache has tables of.
pub(crate) struct Room {
    used: AtomicU64,
    most: u64,
}

impl Room {
    /// For a cache of this many slots.
    pub(crate) fn of_slots(slots: u64) -> Self {
        Self { used: AtomicU64::new(0), most: (slots / SLOTS_OF_WINDOW).clamp(WINDOWS_MIN, WINDOWS_MAX) }
    }

    /// The most memory that all windows take.
    pub(crate) const fn bytes_max(&self) -> u64 {
        self.most * WINDOW_BYTES
    }

    /// The memory that they take now.
    pub(crate) fn bytes(&self) -> u64 {
        self.used.load(Ordering::Relaxed) * WINDOW_BYTES
    }

    /// The image knows this many windows less.
    pub(crate) fn give_back(&self, windows: u64) {
        self.used.fetch_sub(windows, Ordering::Relaxed);
    }

    /// One more, for an image that has `own` already.
    pub(crate) fn take(&self, own: u64) -> bool {
        let may = |used: u64| (used < self.most && own <= self.most - used).then_some(used + 1);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, may).is_ok()
    }
}
