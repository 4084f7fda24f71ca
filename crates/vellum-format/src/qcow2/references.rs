//! What a check counts: how often each cluster is named, and which clusters are tables.

use std::collections::HashMap;

/// References per cluster, for clusters inside the file.
#[derive(Default)]
pub(super) struct References {
    chunks: HashMap<u64, Box<[u16; CHUNK]>>,
    /// What does not fit 16 bits.
    large: HashMap<u64, u64>,
}

const CHUNK: usize = 4096;

impl References {
    pub(super) fn add(&mut self, cluster: u64) {
        let count = self.slot(cluster);
        match count.checked_add(1) {
            Some(more) => *count = more,
            None => *self.large.entry(cluster).or_insert(0) += 1,
        }
    }

    fn slot(&mut self, cluster: u64) -> &mut u16 {
        let chunk = self.chunks.entry(cluster / CHUNK as u64).or_insert_with(|| Box::new([0; CHUNK]));
        &mut chunk[within(cluster)]
    }

    pub(super) fn get(&self, cluster: u64) -> u64 {
        let small = self.chunks.get(&(cluster / CHUNK as u64)).map_or(0, |chunk| chunk[within(cluster)]);
        u64::from(small) + self.large.get(&cluster).copied().unwrap_or(0)
    }

    /// The highest cluster that has one.
    pub(super) fn last(&self) -> Option<u64> {
        let chunk = self
            .chunks
            .iter()
            .filter(|(_, counts)| counts.iter().any(|count| *count > 0))
            .map(|(n, _)| *n)
            .max()?;
        let within = self.chunks[&chunk].iter().rposition(|count| *count > 0)?;
        Some(chunk * CHUNK as u64 + within as u64)
    }

    /// All clusters that have one, in chunks, in no order.
    pub(super) fn each(&self) -> impl Iterator<Item = u64> {
        self.chunks.iter().flat_map(|(chunk, counts)| {
            let first = chunk * CHUNK as u64;
            counts.iter().enumerate().filter(|(_, count)| **count > 0).map(move |(i, _)| first + i as u64)
        })
    }
}

/// What a table is that guest data must not lie in. (The refcount structure is counted apart from all this.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Header,
    L1,
    L2,
    Snapshots,
    Bitmaps,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::L1 => "L1 table",
            Self::L2 => "L2 table",
            Self::Snapshots => "snapshot table",
            Self::Bitmaps => "bitmap directory or table",
        }
    }
}

/// The clusters of tables, and how often each is named as the kind of table that it was named as first. Snapshots share
/// L2 tables. There are few tables beside what they map, so this takes little.
#[derive(Default)]
pub(super) struct Tables(HashMap<u64, (Kind, u64)>);

impl Tables {
    pub(super) fn add(&mut self, cluster: u64, kind: Kind) {
        let (first, count) = self.0.entry(cluster).or_insert((kind, 0));
        *count += u64::from(*first == kind);
    }

    /// Clusters of tables that are named as something else, too; in order.
    pub(super) fn shared(&self, all: &References) -> Vec<(u64, Kind)> {
        let is_shared = |(cluster, (_, count)): &(&u64, &(Kind, u64))| all.get(**cluster) > *count;
        let mut shared: Vec<(u64, Kind)> =
            self.0.iter().filter(is_shared).map(|(cluster, (kind, _))| (*cluster, *kind)).collect();
        shared.sort_unstable_by_key(|(cluster, _)| *cluster);
        shared
    }
}

/// Where in its chunk a cluster's count is.
fn within(cluster: u64) -> usize {
    usize::try_from(cluster % CHUNK as u64).expect("within a chunk")
}
