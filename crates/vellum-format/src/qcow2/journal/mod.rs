//! The journal of a qcow2 image: the shared one (`crate::journal`), and the refcounts that are owed.
//!
//! A record says of each cluster that is reserved or freed, and not yet settled, that its refcount is higher than the mapping
//! explains. Recovery lowers these, so a crash leaks nothing.
//!
//! The order of writes is in `commit.rs`, where the journal lies and when it begins and ends in `life.rs`, what a crash leaves
//! in `recover.rs`.

mod commit;
pub(crate) mod extension;
mod life;
pub(crate) mod recover;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Mutex;

use vellum_core::{BlockSize, ImageCluster, ImageSpan};

use crate::journal::record::Item;
pub(crate) use crate::journal::record::SECTOR;
pub(crate) use crate::journal::{Changed, Overlaid, SectorChecks, checks_of, unchanging};
use crate::sabotage::{self, Bug};
use crate::state::lock;

/// The journal of a qcow2 image that is open for writing.
pub(crate) struct Journal {
    shared: crate::journal::Journal,
    wanted_bytes: u64,
    /// Clusters whose refcount is higher than the mapping explains, and by how much.
    owed: Mutex<BTreeMap<u64, u64>>,
}

impl Deref for Journal {
    type Target = crate::journal::Journal;

    fn deref(&self) -> &Self::Target {
        &self.shared
    }
}

impl Journal {
    pub(crate) fn new(wanted_bytes: u64, key: Option<u128>) -> Self {
        Self { shared: crate::journal::Journal::new(key), wanted_bytes, owed: Mutex::default() }
    }

    /// The refcounts of these clusters are higher than what is published explains.
    pub(crate) fn owe(&self, first: u64, count: u64) {
        let mut owed = lock(&self.owed);
        for cluster in first..first + count {
            *owed.entry(cluster).or_insert(0) += 1;
        }
    }

    /// One of them was published, or its refcount lowered.
    pub(crate) fn settle(&self, cluster: ImageCluster) {
        if sabotage::is(Bug::OwedNotSettled) {
            return;
        }
        let mut owed = lock(&self.owed);
        if let Some(count) = owed.get_mut(&cluster.index()) {
            *count -= 1;
            if *count == 0 {
                owed.remove(&cluster.index());
            }
        }
    }

    /// The active disk no longer uses these bytes: their clusters' refcounts are owed, and what lies there need not
    /// arrive.
    pub(crate) fn freed(&self, span: ImageSpan, cluster: BlockSize) {
        let wide = cluster.widen(span);
        self.owe(cluster.cluster_of(wide.start()).index(), cluster.count_for(wide.len()));
        self.forget_checks(wide);
    }

    /// What the record says of them.
    fn owed_items(&self) -> Vec<Item> {
        match sabotage::is(Bug::NoOwed) {
            true => Vec::new(),
            false => runs_of(&lock(&self.owed)),
        }
    }
}

/// Clusters that are owed, as runs; twice where twice.
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
        let runs = runs_of(&lock(&journal.owed));
        let owed = |first, count| Item::Owed { first, count };
        assert_eq!(runs, [owed(5, 3), owed(9, 1), owed(6, 1)]);
        for cluster in [5, 6, 6, 7, 9] {
            journal.settle(ImageCluster::new(cluster));
        }
        assert!(runs_of(&lock(&journal.owed)).is_empty());
    }
}
