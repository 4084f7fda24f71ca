//! The counts of a check: how often each cluster is named, and which clusters are tables.
//!
//! Counts are kept in chunks that exist only when something is in them. Entries of a sparse image may name
//! clusters that are far apart, so a chunk with few named clusters is a list of these. So the memory for
//! counts is in proportion to the entries, not to where they point. Only the chunks of the first [`NEAR`] have
//! their places in a table, of four bytes each, because most images have no others; those behind are hashed.

use std::ops::Range;

use smallvec::SmallVec;
use vellum_core::is_zero;

use crate::hash::HashMap;

/// References per cluster, for clusters inside the file.
#[derive(Default)]
pub(super) struct References {
    /// The chunks that exist, with their numbers, in no order.
    chunks: Vec<(u64, Chunk)>,
    /// Where among them those of the first numbers are, plus one; zero for one that does not exist.
    near: Vec<u32>,
    /// Where the others are.
    far: HashMap<u64, usize>,
    /// Counts that do not fit in 16 bits.
    large: HashMap<u64, u64>,
}

pub(super) const CHUNK: usize = 1024;

/// Chunks that are found without a hash: those of 64 TiB in clusters of 64 KiB.
const NEAR: u64 = 1 << 20;

/// The counts of adjacent clusters.
enum Chunk {
    /// The named clusters only: place in the chunk and count, in no order; at most [`FEW`].
    Few(SmallVec<[(u16, u16); 4]>),
    All(Box<[u16; CHUNK]>),
}

/// A list longer than this costs more to search than it saves.
const FEW: usize = 32;

impl Chunk {
    fn get(&self, at: usize) -> u16 {
        match self {
            Self::Few(few) => {
                few.iter().find(|(there, _)| usize::from(*there) == at).map_or(0, |(_, count)| *count)
            }
            Self::All(all) => all[at],
        }
    }

    fn slot(&mut self, at: usize) -> &mut u16 {
        let found = match self {
            Self::Few(few) => few.iter().position(|(there, _)| usize::from(*there) == at),
            Self::All(_) => None,
        };
        if let Self::Few(few) = self
            && found.is_none()
        {
            if few.len() == FEW {
                let mut all = Box::new([0; CHUNK]);
                few.iter().for_each(|(there, count)| all[usize::from(*there)] = *count);
                *self = Self::All(all);
            } else {
                few.push((u16::try_from(at).expect("within a chunk"), 0));
            }
        }
        match self {
            Self::Few(few) => {
                let last = few.len() - 1;
                &mut few[found.unwrap_or(last)].1
            }
            Self::All(all) => &mut all[at],
        }
    }

    /// Adds to all of these counts. Returns whether any is higher than one then; nothing, with nothing changed, where one would
    /// be too high.
    fn add_all(&mut self, range: Range<usize>, times: u16) -> Option<bool> {
        if let Self::Few(few) = self {
            let mut all = Box::new([0; CHUNK]);
            few.iter().for_each(|(there, count)| all[usize::from(*there)] = *count);
            *self = Self::All(all);
        }
        let Self::All(all) = self else { unreachable!("it was made one") };
        let counts = &mut all[range];
        let highest = counts.iter().fold(0, |highest, count| highest.max(*count));
        if highest >= u16::MAX - times {
            return None;
        }
        counts.iter_mut().for_each(|count| *count += times);
        Some(highest + times > 1)
    }

    /// Whether all of these counts are zero: whole groups.
    fn has_none(&self, range: Range<usize>) -> bool {
        match self {
            Self::Few(few) => {
                !few.iter().any(|(there, count)| *count > 0 && range.contains(&usize::from(*there)))
            }
            Self::All(all) => all[range].as_chunks::<GROUP>().0.iter().all(|group| *group == [0; GROUP]),
        }
    }

    /// The places in the chunk of clusters with a count, in no order.
    fn named(&self) -> impl Iterator<Item = usize> {
        let (few, all): (&[(u16, u16)], &[u16]) = match self {
            Self::Few(few) => (few, &[]),
            Self::All(all) => (&[], &all[..]),
        };
        let groups = all.as_chunks::<GROUP>().0.iter().enumerate().filter(|(_, group)| **group != [0; GROUP]);
        let few = few.iter().filter(|(_, count)| *count > 0).map(|(there, _)| usize::from(*there));
        few.chain(groups.flat_map(|(index, group)| {
            let named = group.iter().enumerate().filter(|(_, count)| **count > 0);
            named.map(move |(at, _)| index * GROUP + at)
        }))
    }
}

/// Clusters that are looked at together. The smallest block of refcounts counts this many.
pub(super) const GROUP: usize = 64;

impl References {
    /// Adds to a cluster's count. Returns the new count.
    pub(super) fn add(&mut self, cluster: u64, times: u64) -> u64 {
        let count = self.slot(cluster);
        let room = u64::from(u16::MAX - *count);
        *count += u16::try_from(times.min(room)).expect("within the room");
        if times > room {
            let large = self.large.entry(cluster).or_insert(0);
            *large = large.saturating_add(times - room);
        }
        self.get(cluster)
    }

    /// Adds to the counts of adjacent clusters. Returns whether any is higher than one then.
    pub(super) fn add_run(&mut self, first: u64, len: u64, times: u64) -> bool {
        let (mut at, end, mut is_shared) = (first, first + len, false);
        while at < end {
            let stop = end.min((at / CHUNK as u64 + 1) * CHUNK as u64);
            let range = within(at)..within(stop - 1) + 1;
            is_shared |= match u16::try_from(times) {
                Ok(times) if range.len() > FEW || self.has_all(at / CHUNK as u64) => {
                    match self.chunk_mut(at / CHUNK as u64).add_all(range, times) {
                        Some(is_shared) => is_shared,
                        None => self.add_each(at..stop, u64::from(times)),
                    }
                }
                _ => self.add_each(at..stop, times),
            };
            at = stop;
        }
        is_shared
    }

    fn add_each(&mut self, clusters: Range<u64>, times: u64) -> bool {
        let mut is_shared = false;
        for cluster in clusters {
            is_shared |= self.add(cluster, times) > 1;
        }
        is_shared
    }

    fn has_all(&self, number: u64) -> bool {
        matches!(self.chunk(number), Some(Chunk::All(_)))
    }

    fn index(&self, number: u64) -> Option<usize> {
        if number >= NEAR {
            return self.far.get(&number).copied();
        }
        let place = self.near.get(usize::try_from(number).expect("a small number")).copied().unwrap_or(0);
        (place as usize).checked_sub(1)
    }

    fn chunk(&self, number: u64) -> Option<&Chunk> {
        self.index(number).map(|index| &self.chunks[index].1)
    }

    fn chunk_mut(&mut self, number: u64) -> &mut Chunk {
        let index = self.index(number).unwrap_or_else(|| {
            let index = self.chunks.len();
            self.chunks.push((number, Chunk::Few(SmallVec::new())));
            if number >= NEAR {
                self.far.insert(number, index);
            } else {
                let number = usize::try_from(number).expect("a small number");
                if self.near.len() <= number {
                    self.near.resize(number + 1, 0);
                }
                self.near[number] = u32::try_from(index + 1).expect("at most 2^20");
            }
            index
        });
        &mut self.chunks[index].1
    }

    fn slot(&mut self, cluster: u64) -> &mut u16 {
        self.chunk_mut(cluster / CHUNK as u64).slot(within(cluster))
    }

    /// Whether the counts of these clusters, all in one chunk, are these refcounts of 16 bits; `None` where it takes longer to
    /// see.
    pub(super) fn are(&self, first: u64, refcounts: &[u8]) -> Option<bool> {
        if !self.large.is_empty() {
            return None;
        }
        match self.chunk(first / CHUNK as u64) {
            None => Some(is_zero(refcounts)),
            Some(Chunk::Few(_)) => None,
            Some(Chunk::All(all)) => {
                let (stored, rest) = refcounts.as_chunks::<2>();
                debug_assert!(rest.is_empty());
                let counts = &all[within(first)..][..stored.len()];
                let differs = counts
                    .iter()
                    .zip(stored)
                    .fold(0, |differs, (count, stored)| differs | (count ^ u16::from_be_bytes(*stored)));
                Some(differs == 0)
            }
        }
    }

    pub(super) fn get(&self, cluster: u64) -> u64 {
        let small = self.chunk(cluster / CHUNK as u64).map_or(0, |chunk| chunk.get(within(cluster)));
        match small {
            u16::MAX => u64::from(small).saturating_add(self.large.get(&cluster).copied().unwrap_or(0)),
            small => u64::from(small),
        }
    }

    /// Whether none of these clusters has a count: `len` of them, whole groups within one chunk.
    pub(super) fn has_none(&self, first: u64, len: u64) -> bool {
        let Some(chunk) = self.chunk(first / CHUNK as u64) else { return true };
        chunk.has_none(within(first)..within(first + len - 1) + 1)
    }

    /// The highest cluster with a count.
    pub(super) fn last(&self) -> Option<u64> {
        self.each().max()
    }

    /// All clusters with a count, in chunks, in no order.
    pub(super) fn each(&self) -> impl Iterator<Item = u64> {
        self.each_where(|_| true)
    }

    /// As above, in those of the chunks for whose clusters this is true.
    pub(super) fn each_where(&self, wanted: impl Fn(Range<u64>) -> bool) -> impl Iterator<Item = u64> {
        let span = |chunk: u64| chunk * CHUNK as u64..(chunk + 1) * CHUNK as u64;
        let chosen = self.chunks.iter().filter(move |(chunk, _)| wanted(span(*chunk)));
        chosen.flat_map(|(chunk, counts)| {
            let first = chunk * CHUNK as u64;
            counts.named().map(move |at| first + at as u64)
        })
    }
}

/// The groups of clusters (each by its first) in which any cluster has a refcount or a reference. `bytes` are
/// the refcounts of a whole block, of 2^`order` bits each, and `block` is the first cluster that it counts. A
/// block may count half a million clusters of which three are in use.
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

/// The kinds of tables that guest data must not overlap. (The refcount structure is counted separately.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Header,
    L1,
    L2,
    Snapshots,
    Bitmaps,
    Keys,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::L1 => "L1 table",
            Self::L2 => "L2 table",
            Self::Snapshots => "snapshot table",
            Self::Bitmaps => "bitmap directory or table",
            Self::Keys => "encryption header",
        }
    }
}

/// The clusters of tables, and how often each is named as the kind of table that it was first named as.
/// Snapshots share L2 tables. There are few tables compared with what they map, so this takes little memory.
#[derive(Default)]
pub(super) struct Tables(HashMap<u64, (Kind, u64)>);

impl Tables {
    pub(super) fn add(&mut self, cluster: u64, kind: Kind, times: u64) {
        let (first, count) = self.0.entry(cluster).or_insert((kind, 0));
        *count = count.saturating_add(if *first == kind { times } else { 0 });
    }

    /// Whether the cluster belongs to a table.
    pub(super) fn has(&self, cluster: u64) -> bool {
        self.0.contains_key(&cluster)
    }

    /// Clusters of tables that are also named as something else, in order.
    pub(super) fn shared(&self, all: &References) -> Vec<(u64, Kind)> {
        let is_shared = |(cluster, (_, count)): &(&u64, &(Kind, u64))| all.get(**cluster) > *count;
        let mut shared: Vec<(u64, Kind)> =
            self.0.iter().filter(is_shared).map(|(cluster, (kind, _))| (*cluster, *kind)).collect();
        shared.sort_unstable_by_key(|(cluster, _)| *cluster);
        shared
    }
}

/// The place of a cluster's count in its chunk.
fn within(cluster: u64) -> usize {
    usize::try_from(cluster % CHUNK as u64).expect("within a chunk")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    impl References {
        fn bytes(&self) -> usize {
            let heap = |chunk: &Chunk| match chunk {
                Chunk::Few(few) if few.spilled() => few.capacity() * size_of::<(u16, u16)>(),
                Chunk::Few(_) => 0,
                Chunk::All(_) => size_of::<[u16; CHUNK]>(),
            };
            let places = self.near.capacity() * 4 + self.far.capacity() * size_of::<(u64, usize)>();
            let heap: usize = self.chunks.iter().map(|(_, chunk)| heap(chunk)).sum();
            self.chunks.capacity() * size_of::<(u64, Chunk)>() + places + heap
        }
    }

    #[test]
    fn clusters_far_apart_take_little() {
        for (distance, most) in [(1024, 100), (1000, 100), (64, 80), (31, 100), (1, 3)] {
            let mut references = References::default();
            let count = 100_000;
            (0..count).for_each(|index| _ = references.add(index * distance, 1));
            let each = references.bytes() / usize::try_from(count).unwrap();
            assert!(each <= most, "{each} bytes each where they are {distance} clusters apart");
            assert_eq!(references.each().count() as u64, count);
        }
    }

    #[test]
    fn few_and_many_counts_of_a_chunk_read_the_same() {
        let (mut references, mut model) = (References::default(), BTreeMap::new());
        let mut state = 1_u64;
        for step in 0..20_000_u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Some chunks get few, others many.
            let chunk = (state >> 33) % 16;
            let cluster = chunk * CHUNK as u64 + (state >> 40) % (1 << (chunk / 2 + 3));
            let times = if step % 100 == 0 { 40_000 } else { step % 3 + 1 };
            let count = model.entry(cluster).or_insert(0);
            *count += times;
            assert_eq!(references.add(cluster, times), *count);
        }
        let is_few = |chunk: &Chunk| matches!(chunk, Chunk::Few(_));
        let mut chunks = references.chunks.iter().map(|(_, chunk)| chunk);
        assert!(chunks.clone().any(is_few) && !chunks.all(is_few));
        for cluster in 0..20 * CHUNK as u64 {
            assert_eq!(references.get(cluster), model.get(&cluster).copied().unwrap_or(0));
        }
        for first in (0..20 * CHUNK as u64).step_by(GROUP) {
            let is_none = model.range(first..first + GROUP as u64).next().is_none();
            assert_eq!(references.has_none(first, GROUP as u64), is_none);
        }
        let mut each: Vec<u64> = references.each().collect();
        each.sort_unstable();
        assert!(each.iter().eq(model.keys()));
        assert_eq!(references.last(), model.keys().last().copied());
    }

    /// Runs count as the clusters in them, near and far, and what is compared as a whole is what it is one by one.
    #[test]
    fn runs_are_counted_and_compared() {
        let mut state = 7_u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for base in [0, (NEAR - 2) * CHUNK as u64, u64::MAX / 4096 * 2048] {
            let (mut references, mut model) = (References::default(), BTreeMap::new());
            for _ in 0..600 {
                let (first, len) = (base + next(4 * CHUNK as u64), next(2000));
                let times = [1, 1, 1, 2, 40_000, 70_000][usize::try_from(next(6)).unwrap()];
                // Most counts stay small.
                let times = if next(20) == 0 { times } else { times.min(2) };
                let mut is_shared = false;
                for cluster in first..first + len {
                    let count = model.entry(cluster).or_insert(0_u64);
                    *count += times;
                    is_shared |= *count > 1;
                }
                assert_eq!(references.add_run(first, len, times), is_shared);
            }
            for cluster in base..base + 7 * CHUNK as u64 {
                assert_eq!(references.get(cluster), model.get(&cluster).copied().unwrap_or(0), "{cluster}");
            }
        }
        let mut references = References::default();
        references.add_run(0, 3000, 1);
        references.add(5000, 1);
        let counts = |range: Range<u64>| -> Vec<u8> {
            range.flat_map(|n| u16::from(n < 3000 || n == 5000).to_be_bytes()).collect()
        };
        for (range, expected) in [
            (0..1024, Some(true)),
            (1024..2048, Some(true)),
            (2048..3072, Some(true)),
            (3072..4096, Some(true)),
            (4096..5120, None),
        ] {
            assert_eq!(references.are(range.start, &counts(range.clone())), expected, "{range:?}");
            let mut other = counts(range.clone());
            other[77] ^= 1;
            assert_eq!(references.are(range.start, &other), expected.map(|_| false), "{range:?}");
        }
        references.add(0, 70_000);
        assert_eq!(references.are(1024, &counts(1024..2048)), None);
    }
}
