//! Slots that are free are passed to flash as discards, in the background.
//!
//! ```text
//!   released, settled ─► free and stale ─► trimmed: not free ─► discard ─► free
//! ```
//!
//! 1. While a TRIM is under way its slots are not free. What is written into one afterwards comes after it.
//! 2. Only slots that are free are trimmed: no durable record names them, and nobody reads them. The same holds for a slot
//!    that is overwritten.
//! 3. Only runs of neighbours, and only what is free beyond what requests have been promised and the low water: nobody waits
//!    for a TRIM who would not have to wait without it.
//! 4. One at a time, with a limit on its rate. Once one fails, there are no more until the cache is opened again.
//!
//! What was free before the cache was opened is not trimmed until it was used.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vellum_core::lock;

use crate::layout::{BLOCK_BYTES, Slot};
use crate::shared::FlashCache;

/// At most this many bytes are trimmed in a second, and at once.
const BYTES_PER_SECOND: u64 = 256 << 20;
const SLOTS_AT_ONCE: u64 = (32 << 20) / BLOCK_BYTES;

/// Slots of which a TRIM is under way. Where it is dropped before its end, they are never free again: the discard may
/// still happen.
pub(crate) struct Trim {
    cache: Arc<FlashCache>,
    first: Slot,
    count: u32,
}

impl FlashCache {
    /// The next TRIM, if one is due.
    pub(crate) fn next_trim(&self, now: Duration) -> Option<Trim> {
        if !self.options.discards || self.failure().is_some() {
            return None;
        }
        let mut pace = lock(&self.trims);
        let passed = pace.last.map_or(Duration::from_secs(1), |last| now.saturating_sub(last));
        let more = u64::try_from(passed.as_micros())
            .unwrap_or(u64::MAX)
            .saturating_mul(BYTES_PER_SECOND / 1_000_000);
        pace.last = Some(now);
        pace.allowed = pace.allowed.saturating_add(more).min(BYTES_PER_SECOND);
        if pace.is_under_way || pace.has_failed {
            return None;
        }
        let cache = self.me.upgrade()?;
        let mut state = self.state();
        let spare = u64::from(state.free_unpromised().saturating_sub(2 * state.low_water()));
        let most = spare.min(pace.allowed / BLOCK_BYTES).min(SLOTS_AT_ONCE);
        let most = u32::try_from(most).expect("bounded above");
        let (first, count) = state.slots.begin_trim(self.options.discard_slots_min, most)?;
        pace.allowed -= u64::from(count) * BLOCK_BYTES;
        pace.is_under_way = true;
        Some(Trim { cache, first, count })
    }
}

impl Trim {
    /// Tells flash. An error is none of anybody's: flash has the bytes, and nobody needs them.
    pub(crate) async fn run(self) {
        let Self { cache, first, count } = self;
        let bytes = u64::from(count) * BLOCK_BYTES;
        let trimmed = cache.storage.discard(cache.slot_at(first).span(bytes)).await;
        cache.state().slots.end_trim(first, count);
        {
            let mut pace = lock(&cache.trims);
            (pace.is_under_way, pace.has_failed) = (false, trimmed.is_err());
        }
        if trimmed.is_ok() {
            lock(&cache.counts).discard_bytes += bytes;
            cache.has_more.store(true, Ordering::Relaxed);
        }
        cache.freed.notify(usize::MAX);
    }
}
