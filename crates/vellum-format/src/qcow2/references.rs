//! What a check counts: how often each cluster is named, and which clusters are tables.

use vellum_core::is_zero;

use crate::hash::HashMap;

/// References per cluster, for clusters inside the file.
#[derive(Default)]
pub(super) struct References {
    chunks: HashMap<u64, Box<[u16; CHUNK]>>,
    /// What does not fit 16 bits.
    large: HashMap<u64, u64>,
}

const CHUNK: usize = 1024;

/// Clusters that are looked at together. The smallest block of refcounts counts as many.
pub(super) const GROUP: usize = 64;

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
        match small {
            u16::MAX => u64::from(small) + self.large.get(&cluster).copied().unwrap_or(0),
            small => u64::from(small),
        }
    }

    /// Whether none of these clusters has one: `len` of them, whole groups within one chunk.
    pub(super) fn has_none(&self, first: u64, len: u64) -> bool {
        let Some(chunk) = self.chunks.get(&(first / CHUNK as u64)) else { return true };
        let counts = &chunk[within(first)..within(first + len - 1) + 1];
        counts.as_chunks::<GROUP>().0.iter().all(|group| *group == [0; GROUP])
    }

    /// The highest cluster that has one.
    pub(super) fn last(&self) -> Option<u64> {
        self.each().max()
    }

    /// All clusters that have one, in chunks, in no order.
    pub(super) fn each(&self) -> impl Iterator<Item = u64> {
        let groups = self.chunks.iter().flat_map(|(chunk, counts)| {
            let groups = counts.as_chunks::<GROUP>().0.iter().enumerate();
            groups.map(move |(index, group)| (chunk * CHUNK as u64 + (index * GROUP) as u64, group))
        });
        groups.filter(|(_, group)| **group != [0; GROUP]).flat_map(|(first, group)| {
            let named = group.iter().enumerate().filter(|(_, count)| **count > 0);
            named.map(move |(index, _)| first + index as u64)
        })
    }
}

/// The groups of clusters (each by its first) in which anything has a refcount or a reference. `bytes` are the refcounts
/// of a whole block, of 2^`order` bits each, and `block` the first cluster that it counts. A block may count half a
/// million clusters of which three are in use.
pub(super) fn busy_groups(block: u64, bytes: &[u8], order: u32, all: [&References; 2]) -> Vec<u64> {
    let is_idle = |first: u64, bytes: &[u8], len: u64| {
        all.iter().all(|references| references.has_none(first, len)) && is_zero(bytes)
    };
    let mut busy = Vec::new();
    let (chunk, group) = (CHUNK << order >> 3, GROUP << order >> 3);
    for (chunk, first) in bytes.chunks(chunk).zip((block..).step_by(CHUNK)) {
        if is_idle(first, chunk, ((chunk.len() << 3) >> order) as u64) {
            continue;
        }
        for (bytes, first) in chunk.chunks(group).zip((first..).step_by(GROUP)) {
            if !is_idle(first, bytes, GROUP as u64) {
                busy.push(first);
            }
        }
    }
    busy
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
