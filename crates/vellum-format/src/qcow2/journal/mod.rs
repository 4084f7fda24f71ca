//! The journal of a qcow2 image: the common one (`crate::journal`), and the owed refcounts.
//!
//! A cluster that is reserved or freed, and not yet settled, has a refcount higher than the mapping explains:
//! it is *owed*. A record lists these clusters, and recovery lowers their refcounts, so a crash leaks
//! nothing.
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
pub(crate) use crate::journal::record::SECTOR;
pub(crate) use crate::journal::{Changed, Overlaid, SectorChecks, checks_of, unchanging};
use crate::sabotage::{self, Bug};
use crate::state::lock;

/// The bytes that a run of owed clusters takes in a record.
const OWED_BYTES: u64 = 24;

/// The journal of a qcow2 image that is open for writing.
pub(crate) struct Journal {
    /// What it has in common with the journal of any format.
    pub(crate) common: crate::journal::Journal,
    wanted_bytes: u64,
    owed: Mutex<Owed>,
}

/// Clusters whose refcount is higher than the mapping explains, and by how much.
#[derive(Default)]
struct Owed {
    counts: BTreeMap<u64, u64>,
    /// How many runs these clusters form.
    runs: u64,
}

impl Owed {
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
        Self { common: crate::journal::Journal::new(key), wanted_bytes, owed: Mutex::default() }
    }

    /// Records that the refcounts of these clusters are higher than the published mapping explains.
    pub(crate) fn owe(&self, first: u64, count: u64) {
        let mut owed = lock(&self.owed);
        (first..first + count).for_each(|cluster| owed.add(cluster));
    }

    /// Records that one of them was published, or its refcount lowered.
    pub(crate) fn settle(&self, cluster: ImageCluster) {
        if sabotage::is(Bug::OwedNotSettled) {
            return;
        }
        lock(&self.owed).take(cluster.index());
    }

    /// Records that the active disk no longer uses these bytes: the refcounts of their clusters are owed, and
    /// their data need not arrive.
    pub(crate) fn freed(&self, span: ImageSpan, cluster: BlockSize) {
        let wide = cluster.widen(span);
        self.owe(cluster.cluster_of(wide.start()).index(), cluster.count_for(wide.len()));
        self.common.forget_checks(wide);
    }

    /// The items that list the owed clusters.
    pub(crate) fn owed_items(&self) -> Vec<Item> {
        match sabotage::is(Bug::NoOwed) {
            true => Vec::new(),
            false => runs_of(&lock(&self.owed).counts),
        }
    }

    /// Whether the next writer should commit the open transaction, when refcounts take this many bytes of its
    /// record.
    pub(crate) fn fills_a_record(&self, refcounts: u64) -> bool {
        let owed = lock(&self.owed).runs * OWED_BYTES;
        self.common.has_large_record(refcounts + owed)
    }
}

/// Clusters that are owed, as runs. A cluster that is owed twice is in two runs.
fn runs_of(owed: &BTreeMap<u64, u64>) -> Vec<Item> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    let most = owed.values().copied().max().unwrap_or(0);
    for times in 1..=most {
        let mut last: Option<(u64, u64)> = None;
        for cluster in owed.iter().filter(|(_, count)| **count >= times).map(|(cluster, _)| *cluster) {
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
    runs.into_iter().map(|(first, count)| Item::Owed { first, count }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owed_clusters_are_told_as_runs() {
        let journal = Journal::new(0, None);
        journal.owe(5, 3);
        journal.owe(6, 1);
        journal.owe(9, 1);
        let runs = runs_of(&lock(&journal.owed).counts);
        let owed = |first, count| Item::Owed { first, count };
        assert_eq!(runs, [owed(5, 3), owed(9, 1), owed(6, 1)]);
        assert_eq!(lock(&journal.owed).runs, 2);
        for cluster in [5, 6, 6, 7, 9] {
            journal.settle(ImageCluster::new(cluster));
        }
        assert!(runs_of(&lock(&journal.owed).counts).is_empty());
        assert_eq!(lock(&journal.owed).runs, 0);
    }
}
