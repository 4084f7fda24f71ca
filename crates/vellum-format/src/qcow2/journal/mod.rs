//! The journal of a qcow2 image: the shared one (`crate::journal`), and the pending refcounts.
//!
//! A cluster that is reserved but not published, or freed but not given back, has a refcount higher than the
//! mapping explains: its refcount is *pending*. A record lists these clusters, and recovery lowers their
//! refcounts, so a crash leaks nothing.
//!
//! The order of writes is that of every journal (`crate::journal::commit`). The order for a transaction that
//! does not fit in a record is in `oversized.rs`. The place of the journal, its beginning and its end are in
//! `life.rs`, and the recovery after a crash in `recover.rs`.

pub(crate) mod extension;
mod life;
mod oversized;
pub(crate) mod recover;

use std::collections::BTreeMap;
use std::sync::Mutex;

use vellum_core::{BlockSize, ImageCluster, ImageSpan};

use crate::journal::record::Item;
pub(crate) use crate::journal::{Changed, Overlaid, SectorChecks, checks_of};
use crate::state::lock;

/// The bytes that a run of clusters with pending refcounts takes in a record.
const PENDING_BYTES: u64 = 24;

/// The journal of a qcow2 image that is open for writing.
pub(crate) struct Journal {
    /// What it has in common with the journal of any format.
    pub(crate) common: crate::journal::Journal,
    wanted_bytes: u64,
    pending: Mutex<PendingRefcounts>,
}

/// Clusters whose refcount is higher than the mapping explains, and by how much.
#[derive(Default)]
struct PendingRefcounts {
    counts: BTreeMap<u64, u64>,
    /// How many runs these clusters form.
    runs: u64,
}

impl PendingRefcounts {
    /// How many runs this cluster adds, and how many runs beside it would then be merged with it.
    fn runs_with(&self, cluster: u64) -> (u64, u64) {
        let beside = [cluster.checked_sub(1), cluster.checked_add(1)];
        let count = beside.into_iter().flatten().filter(|beside| self.counts.contains_key(beside)).count();
        (1, count as u64)
    }

    fn add(&mut self, cluster: u64) {
        let count = self.counts.entry(cluster).or_insert(0);
        *count += 1;
        if *count == 1 {
            let (one, beside) = self.runs_with(cluster);
            self.runs = self.runs + one - beside.min(self.runs + one);
        }
    }

    fn take(&mut self, cluster: u64) {
        let Some(count) = self.counts.get_mut(&cluster) else { return };
        *count -= 1;
        if *count == 0 {
            self.counts.remove(&cluster);
            let (one, beside) = self.runs_with(cluster);
            self.runs = (self.runs + beside).saturating_sub(one);
        }
    }
}

impl Journal {
    pub(crate) fn new(wanted_bytes: u64, key: Option<u128>) -> Self {
        Self { common: crate::journal::Journal::new(key), wanted_bytes, pending: Mutex::default() }
    }

    /// Records that the refcounts of these clusters are higher than the published mapping explains.
    pub(crate) fn add_pending(&self, first: u64, count: u64) {
        let mut pending = lock(&self.pending);
        (first..first + count).for_each(|cluster| pending.add(cluster));
    }

    /// Records that one of them was published, or its refcount lowered.
    pub(crate) fn remove_pending(&self, cluster: ImageCluster) {
        lock(&self.pending).take(cluster.index());
    }

    /// Records that the active disk no longer uses these bytes: the refcounts of their clusters become
    /// pending, and their data need not arrive.
    pub(crate) fn freed(&self, span: ImageSpan, cluster: BlockSize) {
        let wide = cluster.widen(span);
        self.add_pending(cluster.cluster_of(wide.start()).index(), cluster.count_for(wide.len()));
        self.common.forget_checks(wide);
    }

    /// The items that list the clusters with pending refcounts.
    pub(crate) fn pending_items(&self) -> Vec<Item> {
        runs_of(&lock(&self.pending).counts)
    }

    /// Whether the next writer should commit the open transaction, when refcounts take this many bytes of its
    /// record.
    pub(crate) fn fills_a_record(&self, refcounts: u64) -> bool {
        let pending = lock(&self.pending).runs * PENDING_BYTES;
        self.common.has_large_record(refcounts + pending)
    }
}

/// Clusters with pending refcounts, as runs. A cluster that is in there twice is in two runs.
fn runs_of(pending: &BTreeMap<u64, u64>) -> Vec<Item> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let most = pending.values().copied().max().unwrap_or(0);
    for times in 1..=most {
        let mut last: Option<(u64, u64)> = None;
        for cluster in pending.iter().filter(|(_, count)| **count >= times).map(|(cluster, _)| *cluster) {
            last = match last {
                Some((first, count)) if first + count == cluster => Some((first, count + 1)),
                other => {
                    runs.extend(other);
                    Some((cluster, 1))
                }
            };
        }
        runs.extend(last);
    }
    runs.into_iter().map(|(first, count)| Item::PendingRefcount { first, count }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pending_clusters_are_recorded_as_runs() {
        let journal = Journal::new(0, None);
        journal.add_pending(5, 3);
        journal.add_pending(6, 1);
        journal.add_pending(9, 1);
        let runs = runs_of(&lock(&journal.pending).counts);
        let pending = |first, count| Item::PendingRefcount { first, count };
        assert_eq!(runs, [pending(5, 3), pending(9, 1), pending(6, 1)]);
        assert_eq!(lock(&journal.pending).runs, 2);
        for cluster in [5, 6, 6, 7, 9] {
            journal.remove_pending(ImageCluster::new(cluster));
        }
        assert!(runs_of(&lock(&journal.pending).counts).is_empty());
        assert_eq!(lock(&journal.pending).runs, 0);
    }
}
