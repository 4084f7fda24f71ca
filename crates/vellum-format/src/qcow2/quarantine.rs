//! Clusters between two uses: freed, but not to be reused yet. `give_back.rs` has the rules, and gives them
//! back.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use async_lock::MutexGuard;
use vellum_core::{BlockSize, ImageSpan};

use crate::state::lock;

/// While the disk is tended, requests give back nothing until this many runs wait.
const WAITING_MAX: usize = 1024;

/// Clusters whose freeing is durable.
#[derive(Default)]
pub(crate) struct Quarantine {
    /// Runs that wait for requests to leave, with the epoch in which they were sealed.
    waiting: Mutex<VecDeque<(u64, Vec<ImageSpan>)>>,
    /// Runs that were punched, with the number of that change.
    punched: Mutex<VecDeque<(u64, ImageSpan)>>,
    /// Roughly how many runs are in the two lists. Read without their locks.
    waits: AtomicUsize,
    /// Held while clusters are given back.
    giving: async_lock::Mutex<()>,
    /// A background task tends the disk.
    is_tended: AtomicBool,
    /// Runs that have been given back.
    given: AtomicU64,
}

/// The runs in descending order, with adjacent runs of whole clusters merged. A cluster that was freed twice
/// is in the result twice, and so is one of which two parts were freed: each time lowers its refcount.
fn merged(mut freed: Vec<ImageSpan>, cluster: BlockSize) -> Vec<ImageSpan> {
    freed.sort_unstable_by_key(|span| std::cmp::Reverse(span.start()));
    let is_whole = |span: &ImageSpan| cluster.widen(*span) == *span;
    let mut runs: Vec<ImageSpan> = Vec::new();
    for span in freed {
        match runs.last_mut() {
            Some(later) if later.start() == span.end() && is_whole(later) && is_whole(&span) => {
                *later = ImageSpan::between(span.start(), later.end());
            }
            _ => runs.push(span),
        }
    }
    runs
}

impl Quarantine {
    pub(crate) fn add(&self, epoch: u64, freed: Vec<ImageSpan>, cluster: BlockSize) {
        let runs = merged(freed, cluster);
        self.waits.fetch_add(runs.len(), Ordering::AcqRel);
        lock(&self.waiting).push_back((epoch, runs));
    }

    /// From now on a background task gives clusters back.
    pub(super) fn note_tended(&self) {
        if !self.is_tended.load(Ordering::Relaxed) {
            self.is_tended.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a background task tends the disk.
    pub(crate) fn is_tended(&self) -> bool {
        self.is_tended.load(Ordering::Relaxed)
    }

    /// Whether a request should give back something before it begins.
    pub(super) fn is_due(&self) -> bool {
        let waits = self.waits.load(Ordering::Acquire);
        waits > if self.is_tended.load(Ordering::Relaxed) { WAITING_MAX } else { 0 }
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.waiting).is_empty() && lock(&self.punched).is_empty()
    }

    /// How many runs have been given back so far. Only grows.
    pub(crate) fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// Counts a run that has been given back.
    pub(super) fn note_given(&self) {
        self.given.fetch_add(1, Ordering::AcqRel);
    }

    /// Held while clusters are given back.
    pub(super) async fn giving(&self) -> MutexGuard<'_, ()> {
        self.giving.lock().await
    }

    /// The same, unless another task holds it.
    pub(super) fn try_giving(&self) -> Option<MutexGuard<'_, ()>> {
        self.giving.try_lock()
    }

    /// The epoch of the runs that have waited longest.
    pub(super) fn first_stamp(&self) -> Option<u64> {
        lock(&self.waiting).front().map(|(stamp, _)| *stamp)
    }

    /// Takes the runs that have waited longest, if every request of their epoch has left.
    pub(super) fn take_passed(&self, has_passed: impl Fn(u64) -> bool) -> Option<(u64, Vec<ImageSpan>)> {
        let mut waiting = lock(&self.waiting);
        match waiting.front() {
            Some((stamp, _)) if has_passed(*stamp) => waiting.pop_front(),
            _ => None,
        }
    }

    /// Puts back what is left of them, in their old order.
    pub(super) fn put_back(&self, stamp: u64, spans: Vec<ImageSpan>) {
        lock(&self.waiting).push_front((stamp, spans));
    }

    /// Counts a run that no longer waits for requests, or for a flush.
    pub(super) fn note_left(&self) {
        self.waits.fetch_sub(1, Ordering::AcqRel);
    }

    /// Adds a run that was punched by this change.
    pub(super) fn add_zeroed(&self, change: u64, run: ImageSpan) {
        self.waits.fetch_add(1, Ordering::AcqRel);
        lock(&self.punched).push_back((change, run));
    }

    /// Takes the run that was punched first, if its change says that it may be reused.
    pub(super) fn take_zeroed(&self, may_be_reused: impl Fn(u64) -> bool) -> Option<(u64, ImageSpan)> {
        let mut punched = lock(&self.punched);
        match punched.front() {
            Some((change, _)) if may_be_reused(*change) => punched.pop_front(),
            _ => None,
        }
    }

    /// Puts back what is left of it.
    pub(super) fn put_back_zeroed(&self, change: u64, rest: ImageSpan) {
        lock(&self.punched).push_front((change, rest));
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::ImageOffset;

    use super::*;

    #[test]
    fn whole_clusters_in_a_row_are_one_run_and_parts_stay_as_they_are() {
        let cluster = BlockSize::from_shift(12);
        let span = |at: u64, len: u64| ImageOffset::new(at).span(len);
        let freed = vec![
            span(0x5000, 0x1000),
            span(0x1000, 0x1000),
            span(0x2000, 0x2000),
            span(0x5000, 0x1000), // twice: it was shared
            span(0x4000, 0x800),  // two parts of one cluster
            span(0x4800, 0x800),
            span(0x6000, 0x1000),
        ];
        let runs = [
            span(0x6000, 0x1000),
            span(0x5000, 0x1000),
            span(0x5000, 0x1000),
            span(0x4800, 0x800),
            span(0x4000, 0x800),
            span(0x1000, 0x3000),
        ];
        let got = merged(freed, cluster);
        let clusters = |runs: &[ImageSpan]| -> u64 {
            runs.iter().map(|run| cluster.count_for(cluster.widen(*run).len())).sum()
        };
        assert_eq!(clusters(&got), clusters(&runs), "each time lowers a refcount");
        assert_eq!(got.len(), 5, "{got:?}");
        assert!(got.contains(&span(0x1000, 0x3000)) && got.contains(&span(0x5000, 0x2000)));
        assert!(got.is_sorted_by_key(|run| std::cmp::Reverse(run.start())));
    }
}
