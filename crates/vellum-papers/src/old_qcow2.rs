//! What QEMU 0.12 requested of the host for a qcow2: a model of its order of operations, without the data.
//!
//! ```text
//!   first write to clusters    [L2 table not cached: read 64 KiB]
//!                              [no L2 table: allocate one ─ write it, 64 KiB ─ write the L1 sector]
//!                              allocate ─ write the refcount sector        the main loop waits for each of these
//!                              data ────────────────────────────────────   this one runs beside other requests
//!                              [fill before it] [fill behind it] ─ write the L2 sector
//!   write to mapped clusters   [L2 table not cached: read] data
//!   read                       [L2 table not cached: read] data
//! ```
//!
//! From block/qcow2.c, qcow2-cluster.c and qcow2-refcount.c of that version: clusters of 64 KiB, allocated at
//! the end of the file; metadata written through, a sector at a time, while nothing else is begun; a cache of
//! 16 L2 tables with LRU eviction, and of a single refcount block; a request that runs into a cluster whose
//! first write is in flight waits for it; a request that is partly mapped is executed in parts, one after the
//! other. With `cache=none` it never flushed by itself, and then metadata had no order. The fill is read from
//! the base: behind the end of the base it costs a write only.
//!
//! Left out: reads of the base (the workloads here are behind its end), compression, snapshots, growing
//! tables.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use vellum_core::{Buffer, ImageOffset, Result, SharedStorage};

const CLUSTER: u64 = 64 << 10;
const SECTOR: u64 = 512;
/// Clusters that an L2 table maps.
const L2_ENTRIES: u64 = CLUSTER / 8;
/// Clusters that a refcount block counts.
const REFCOUNTS: u64 = CLUSTER / 2;
/// L2 tables in memory.
const L2_CACHE: usize = 16;

/// Where things are in a new image.
const L1_TABLE: u64 = 1;
const REFCOUNT_TABLE: u64 = 2;
const FIRST_REFCOUNT_BLOCK: u64 = 3;

/// An image.
pub(super) struct OldQcow2 {
    storage: SharedStorage,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// Guest cluster to image cluster.
    clusters: HashMap<u64, u64>,
    /// Index in the L1 table to the cluster of the L2 table.
    tables: HashMap<u64, u64>,
    /// L2 tables in memory: index in the L1 table, and how often it was used.
    cache: Vec<(u64, u32)>,
    /// The clusters of refcount blocks.
    refcount_blocks: Vec<u64>,
    cached_refcount_block: Option<u64>,
    /// The end of the image, in clusters.
    end: u64,
    /// Guest clusters whose first write is in flight.
    under_way: Vec<Range<u64>>,
}

/// Clusters that were allocated for a write and are not linked.
#[derive(Debug, Clone)]
pub(super) struct Allocation {
    clusters: Range<u64>,
    image: u64,
    /// The bytes that the guest writes, from the start of the first cluster on.
    written: Range<u64>,
}

/// What a request, or its first part, comes to.
#[derive(Debug)]
pub(super) enum Step {
    /// So many bytes are moved there in the image; then they are linked, if they are new.
    Move { at: ImageOffset, len: usize, allocation: Option<Allocation> },
    /// Nothing is stored there and the base has ended: zeros.
    Nothing { len: usize },
    /// Another request has to be linked before.
    Wait,
}

impl OldQcow2 {
    /// An empty image.
    pub(super) fn new(storage: SharedStorage) -> Self {
        let end = FIRST_REFCOUNT_BLOCK + 1;
        let refcount_blocks = vec![FIRST_REFCOUNT_BLOCK];
        Self { storage, state: RefCell::new(State { end, refcount_blocks, ..State::default() }) }
    }

    async fn write(&self, at: u64, len: u64) -> Result<()> {
        let data = Buffer::zeroed(usize::try_from(len).expect("small"));
        self.storage.write(ImageOffset::new(at), data).await
    }

    async fn read(&self, at: u64, len: u64) -> Result<()> {
        let buffer = Buffer::zeroed(usize::try_from(len).expect("small"));
        self.storage.read(ImageOffset::new(at), buffer).await.map(drop)
    }

    /// Writes entries of a table, whole sectors around them.
    async fn write_entries(&self, table: u64, entries: Range<u64>, entry: u64) -> Result<()> {
        let start = entries.start * entry / SECTOR * SECTOR;
        let end = (entries.end * entry).next_multiple_of(SECTOR);
        self.write(table * CLUSTER + start, end - start).await
    }

    /// Takes clusters at the end of the image, and writes their refcounts.
    async fn allocate(&self, count: u64) -> Result<u64> {
        loop {
            let (end, block) = {
                let state = self.state.borrow();
                (state.end, state.end / REFCOUNTS)
            };
            // A run stays within one refcount block, as nearly all do.
            let fits = (end + count - 1) / REFCOUNTS == block;
            if !fits {
                self.state.borrow_mut().end = (block + 1) * REFCOUNTS;
                continue;
            }
            let index = usize::try_from(block).expect("an image of moderate size");
            let known = self.state.borrow().refcount_blocks.get(index).copied();
            let Some(at) = known else {
                // The block counts itself.
                self.write(end * CLUSTER, CLUSTER).await?;
                self.write_entries(REFCOUNT_TABLE, block..block + 1, 8).await?;
                let mut state = self.state.borrow_mut();
                state.refcount_blocks.push(end);
                state.cached_refcount_block = Some(block);
                state.end += 1;
                continue;
            };
            if self.state.borrow().cached_refcount_block != Some(block) {
                self.read(at * CLUSTER, CLUSTER).await?;
                self.state.borrow_mut().cached_refcount_block = Some(block);
            }
            self.state.borrow_mut().end += count;
            let first = end % REFCOUNTS;
            self.write_entries(at, first..first + count, 2).await?;
            return Ok(end);
        }
    }

    /// Whether the L2 table is there; it is in memory then.
    async fn load_table(&self, index: u64) -> Result<bool> {
        let Some(at) = self.state.borrow().tables.get(&index).copied() else {
            return Ok(false);
        };
        if let Some((_, used)) = self.state.borrow_mut().cache.iter_mut().find(|(of, _)| *of == index) {
            *used += 1;
            return Ok(true);
        }
        self.read(at * CLUSTER, CLUSTER).await?;
        self.state.borrow_mut().keep(index);
        Ok(true)
    }

    async fn make_table(&self, index: u64) -> Result<()> {
        let at = self.allocate(1).await?;
        self.write(at * CLUSTER, CLUSTER).await?;
        self.write_entries(L1_TABLE, index..index + 1, 8).await?;
        let mut state = self.state.borrow_mut();
        state.tables.insert(index, at);
        state.keep(index);
        Ok(())
    }

    /// Handles the first part of a request. The main loop does nothing else meanwhile.
    pub(super) async fn begin(&self, is_read: bool, offset: u64, len: u64) -> Result<Step> {
        let (first, within) = (offset / CLUSTER, offset % CLUSTER);
        let last = (offset + len - 1) / CLUSTER;
        let index = first / L2_ENTRIES;
        let is_there = self.load_table(index).await?;
        let end = (last + 1).min((index + 1) * L2_ENTRIES);
        let part = |end: u64| ((end - first) * CLUSTER - within).min(len);
        let bytes = |len: u64| usize::try_from(len).expect("a request is short");
        let mapped = self.state.borrow().clusters.get(&first).copied();
        if let Some(image) = mapped {
            let follows = |cluster: &u64| {
                let state = self.state.borrow();
                let is_linked = !state.under_way.iter().any(|range| range.contains(cluster));
                is_linked && state.clusters.get(cluster) == Some(&(image + (*cluster - first)))
            };
            let run = (first..end).take_while(follows).count() as u64;
            if run == 0 {
                return Ok(Step::Wait);
            }
            let at = ImageOffset::new(image * CLUSTER + within);
            return Ok(Step::Move { at, len: bytes(part(first + run)), allocation: None });
        }
        let is_new = |cluster: &u64| !self.state.borrow().clusters.contains_key(cluster);
        let run = (first..end).take_while(is_new).count() as u64;
        let clusters = first..first + run;
        let len = part(clusters.end);
        if is_read {
            return Ok(Step::Nothing { len: bytes(len) });
        }
        if !is_there {
            self.make_table(index).await?;
        }
        let image = self.allocate(run).await?;
        {
            let mut state = self.state.borrow_mut();
            state.under_way.push(clusters.clone());
            state.clusters.extend(clusters.clone().map(|cluster| (cluster, image + (cluster - first))));
        }
        let at = ImageOffset::new(image * CLUSTER + within);
        let allocation = Some(Allocation { clusters, image, written: within..within + len });
        Ok(Step::Move { at, len: bytes(len), allocation })
    }

    /// The data of new clusters is written: the fill around it, and the L2 table. The main loop does nothing
    /// else meanwhile.
    pub(super) async fn link(&self, allocation: Allocation) -> Result<()> {
        let Allocation { clusters, image, written } = allocation;
        if written.start > 0 {
            self.write(image * CLUSTER, written.start).await?;
        }
        let end = (clusters.end - clusters.start) * CLUSTER;
        if written.end < end {
            self.write(image * CLUSTER + written.end, end - written.end).await?;
        }
        let index = clusters.start / L2_ENTRIES;
        let table = self.state.borrow().tables[&index];
        let first = clusters.start % L2_ENTRIES;
        self.write_entries(table, first..first + (clusters.end - clusters.start), 8).await?;
        self.state.borrow_mut().under_way.retain(|range| *range != clusters);
        Ok(())
    }
}

impl State {
    /// Puts an L2 table into memory, in the place of the least used one.
    fn keep(&mut self, index: u64) {
        if self.cache.len() < L2_CACHE {
            self.cache.push((index, 1));
        } else if let Some(least) = self.cache.iter_mut().min_by_key(|(_, used)| *used) {
            *least = (index, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::MemoryStorage;
    use vellum_core::{IoTally, Tallied};
    use vellum_sim::World;

    use super::*;

    /// The requests of the image to its host: reads, writes, bytes written.
    fn asked(requests: &[(bool, u64, u64)]) -> (u64, u64, u64) {
        let tally = std::sync::Arc::new(IoTally::default());
        let storage = Tallied::shared(MemoryStorage::new("image"), tally.clone());
        let image = OldQcow2::new(storage);
        World::new(0).run(async {
            for (is_read, offset, len) in requests.iter().copied() {
                let (mut offset, mut left) = (offset, len);
                while left > 0 {
                    let done = match image.begin(is_read, offset, left).await.unwrap() {
                        Step::Move { at, len, allocation } => {
                            match is_read {
                                true => image.read(at.bytes(), len as u64).await.unwrap(),
                                false => image.write(at.bytes(), len as u64).await.unwrap(),
                            }
                            if let Some(allocation) = allocation {
                                image.link(allocation).await.unwrap();
                            }
                            len
                        }
                        Step::Nothing { len } => len,
                        Step::Wait => panic!("nothing is under way"),
                    };
                    (offset, left) = (offset + done as u64, left - done as u64);
                }
            }
        });
        let counts = tally.counts();
        (counts.reads, counts.writes, counts.bytes_written)
    }

    const K: u64 = 1 << 10;

    #[test]
    fn a_first_write_costs_what_the_source_says() {
        // The refcount block comes into memory with the first allocation, which is that of the L2 table:
        // refcount, table, L1. Then the cluster: refcount, data, what is before and behind it, L2.
        let table = 512 + 64 * K + 512;
        assert_eq!(asked(&[(false, 4 * K, 4 * K)]), (1, 3 + 5, table + 512 + 64 * K + 512));
        // The same place again, and a read: only data.
        let again = [(false, 4 * K, 4 * K), (false, 4 * K, 4 * K), (true, 4 * K, 4 * K)];
        assert_eq!(asked(&again), (2, 8 + 1, table + 1024 + 68 * K));
        // Eight whole clusters at once: one refcount write, one L2 write.
        assert_eq!(asked(&[(false, 0, 512 * K)]), (1, 3 + 3, table + 1024 + 512 * K));
        // Half of it is there: two parts.
        let half = [(false, 0, 64 * K), (false, 0, 128 * K)];
        assert_eq!(asked(&half), (1, 3 + 3 + 1 + 3, table + 2048 + 192 * K));
        assert_eq!(asked(&[(true, 0, 64 * K)]), (0, 0, 0), "nothing is there");
    }

    #[test]
    fn the_seventeenth_table_throws_one_out() {
        let reach = L2_ENTRIES * CLUSTER;
        let writes: Vec<_> = (0..17).map(|i| (false, i * reach, CLUSTER)).collect();
        let with = |reads: &[u64]| {
            let reads = reads.iter().map(|i| (true, i * reach, CLUSTER));
            asked(&writes.iter().copied().chain(reads).collect::<Vec<_>>()).0
        };
        let before = with(&[]);
        assert_eq!(with(&[16]) - before, 1, "the last one is in memory: data alone");
        assert_eq!(with(&[0]) - before, 2, "the first one is not");
    }

    #[test]
    fn who_runs_into_a_first_write_waits_for_it() {
        let image = OldQcow2::new(MemoryStorage::new("image"));
        World::new(0).run(async {
            let Step::Move { allocation: Some(allocation), .. } =
                image.begin(false, 0, CLUSTER).await.unwrap()
            else {
                panic!("it is new");
            };
            assert!(matches!(image.begin(false, 4 * K, 4 * K).await.unwrap(), Step::Wait));
            image.link(allocation).await.unwrap();
            assert!(matches!(
                image.begin(false, 4 * K, 4 * K).await.unwrap(),
                Step::Move { allocation: None, .. }
            ));
        });
    }
}
