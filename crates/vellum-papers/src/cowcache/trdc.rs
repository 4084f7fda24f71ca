//! The paper's rival, TRDC: a flash cache below the format, which knows nothing of copy-on-write.
//!
//! ```text
//!   tables of the format   memory of whole tables (64 KiB), LRU ── a miss: the table is read from flash
//!                                                              └─ a dirty one leaves, or the guest flushes: 64 KiB to flash
//!   data, delta and base   blocks of 4 KiB, LRU: what is read from the network is admitted, what is written goes to flash
//!                          writeback: home when it leaves         writethrough: home at the same time
//! ```
//!
//! 1. What the cache sees is what our qcow2 asks for: a first write to a cluster over a base is a read of the base, a write
//!    of the whole cluster, a look at its table and a change of it.
//! 2. One lookup of a table is made at a time, over its transfers too, as QEMU holds its lock. The others are as many
//!    as come.
//! 3. A table that is on no medium yet is a miss without a read.
//! 4. A block that is admitted, or goes home because it leaves, is not waited for; it takes the devices' time.
//! 5. A flush of the guest sends dirty tables to flash, as the paper says of OLTP, and a block of refcounts with them.
//!    How often they go without a flush is not published, so without one they stay. With writethrough the store is flushed
//!    too, at the same time: it is to have all.
//!
//! A lookup is counted as the format makes it. Bytes of data are not kept: they read as `FILL`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use futures_lite::future::zip;
use serde::Serialize;
use vellum_core::{
    Buffer, Disk, Extent, Geometry, GuestOffset, GuestSpan, ImageOffset, ImageSpan, Limits, LocalFuture,
    MemoryDisk, Place, Result, SharedStorage, Storage, StorageRun, WriteFlags, ZeroFlags, Zeroes, lock,
};
use vellum_sim::Operation;

use super::{BLOCK_BYTES, CLUSTER_BYTES, DISK_BYTES};
use crate::model::Device;

/// What data reads as.
pub(crate) const FILL: u8 = 0x5A;

/// When what is written goes home.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Policy {
    WriteBack,
    WriteThrough,
}

/// What the cache did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct TrdcCounts {
    pub(crate) lookups: u64,
    pub(crate) misses: u64,
    /// Tables that were read from flash, and written to it.
    pub(crate) tables_read: u64,
    pub(crate) tables_written: u64,
    /// Data that was written to flash, because of writes and because of reads.
    pub(crate) written_bytes: u64,
    pub(crate) admitted_bytes: u64,
}

impl TrdcCounts {
    /// Bytes of tables to flash.
    pub(crate) fn metadata_bytes(&self) -> u64 {
        self.tables_written * CLUSTER_BYTES
    }

    /// Bytes of data to flash.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.written_bytes + self.admitted_bytes
    }
}

/// The cache. The module says what it is.
pub(crate) struct Trdc {
    flash: Arc<Device>,
    network: Arc<Device>,
    policy: Policy,
    lookup: async_lock::Mutex<()>,
    state: Mutex<State>,
}

struct State {
    tables: Tables,
    blocks: Blocks,
    counts: TrdcCounts,
}

/// Tables in memory.
struct Tables {
    most: usize,
    /// When each was used, and whether it is dirty.
    known: HashMap<u64, (u64, bool)>,
    order: BTreeMap<u64, u64>,
    on_flash: HashSet<u64>,
    clock: u64,
}

/// What a lookup comes to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Looked {
    is_miss: bool,
    reads: bool,
    writes: bool,
}

impl Tables {
    fn new(most: usize) -> Self {
        let most = most.max(1);
        Self { most, known: HashMap::new(), order: BTreeMap::new(), on_flash: HashSet::new(), clock: 0 }
    }

    fn look(&mut self, table: u64, is_change: bool) -> Looked {
        self.clock += 1;
        if let Some((used, is_dirty)) = self.known.get_mut(&table) {
            self.order.remove(used);
            *used = self.clock;
            *is_dirty |= is_change;
            self.order.insert(self.clock, table);
            return Looked::default();
        }
        let mut looked = Looked { is_miss: true, reads: self.on_flash.contains(&table), writes: false };
        if self.known.len() >= self.most {
            let (_, victim) = self.order.pop_first().expect("as many as are known");
            let (_, is_dirty) = self.known.remove(&victim).expect("it is known");
            if is_dirty {
                self.on_flash.insert(victim);
            }
            looked.writes = is_dirty;
        }
        self.known.insert(table, (self.clock, is_change));
        self.order.insert(self.clock, table);
        looked
    }

    /// Cleans all; how many were dirty.
    fn clean(&mut self) -> u64 {
        let mut cleaned = 0;
        for (table, (_, is_dirty)) in &mut self.known {
            if std::mem::take(is_dirty) {
                self.on_flash.insert(*table);
                cleaned += 1;
            }
        }
        cleaned
    }
}

/// Blocks on flash: as many as come, or the most recently used.
enum Blocks {
    /// For each cluster a bit for each block.
    All(HashMap<u64, u16>),
    Lru {
        most: usize,
        known: HashMap<u64, (u64, bool)>,
        order: BTreeMap<u64, u64>,
        clock: u64,
    },
}

impl Blocks {
    fn new(most: Option<u64>) -> Self {
        match most.map(|most| usize::try_from(most.max(1)).expect("blocks fit memory")) {
            None => Self::All(HashMap::new()),
            Some(most) => Self::Lru { most, known: HashMap::new(), order: BTreeMap::new(), clock: 0 },
        }
    }

    /// Whether a block is there; it is used now.
    fn touch(&mut self, key: u64) -> bool {
        match self {
            Self::All(groups) => groups.get(&(key / 16)).is_some_and(|group| group & 1 << (key % 16) != 0),
            Self::Lru { known, order, clock, .. } => {
                let Some((used, _)) = known.get_mut(&key) else { return false };
                *clock += 1;
                order.remove(used);
                *used = *clock;
                order.insert(*clock, key);
                true
            }
        }
    }

    /// Puts a block there. True when a dirty one leaves for it.
    fn put(&mut self, key: u64, is_dirty: bool) -> bool {
        let is_there = self.touch(key);
        match self {
            Self::All(groups) => {
                *groups.entry(key / 16).or_default() |= 1 << (key % 16);
                false
            }
            Self::Lru { most, known, order, clock } => {
                if is_there {
                    known.get_mut(&key).expect("it is there").1 |= is_dirty;
                    return false;
                }
                let mut leaves_dirty = false;
                if known.len() >= *most {
                    let (_, victim) = order.pop_first().expect("as many as are known");
                    leaves_dirty = known.remove(&victim).expect("it is known").1;
                }
                *clock += 1;
                known.insert(key, (*clock, is_dirty));
                order.insert(*clock, key);
                leaves_dirty
            }
        }
    }
}

/// The blocks that a run touches, and of these the ones that it has whole.
fn blocks_of(start: u64, len: u64) -> impl Iterator<Item = (u64, bool)> {
    let end = start + len;
    (start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES))
        .map(move |block| (block, start <= block * BLOCK_BYTES && (block + 1) * BLOCK_BYTES <= end))
}

fn run(len: u64) -> ImageSpan {
    ImageOffset::ZERO.span(len)
}

impl Trdc {
    /// An empty one. Memory has room for so many tables, flash for so many blocks.
    pub(crate) fn new(
        (flash, network): (Arc<Device>, Arc<Device>),
        policy: Policy,
        tables: usize,
        blocks: Option<u64>,
    ) -> Arc<Self> {
        let counts = TrdcCounts::default();
        let state = Mutex::new(State { tables: Tables::new(tables), blocks: Blocks::new(blocks), counts });
        Arc::new(Self { flash, network, policy, lookup: async_lock::Mutex::new(()), state })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn counts(&self) -> TrdcCounts {
        self.state().counts
    }

    /// The guest has flushed: dirty tables go to flash.
    pub(crate) async fn sync(&self) {
        let _turn = self.lookup.lock().await;
        let cleaned = {
            let mut state = self.state();
            let tables = state.tables.clean();
            // What was allocated is counted too; our data file has no refcounts, QCOW2 has a block of them.
            let cleaned = tables + u64::from(tables > 0);
            state.counts.tables_written += cleaned;
            cleaned
        };
        for _ in 0..cleaned {
            self.write_table().await;
        }
        let of_flash = self.flash.pass(Operation::Flush, run(0));
        match self.policy {
            Policy::WriteBack => of_flash.await,
            Policy::WriteThrough => {
                zip(of_flash, self.network.pass(Operation::Flush, run(0))).await;
            }
        }
    }

    async fn write_table(&self) {
        self.write_both(CLUSTER_BYTES, CLUSTER_BYTES).await;
    }

    /// To flash, and with writethrough home.
    async fn write_both(&self, flash: u64, home: u64) {
        let to_flash = self.flash.pass(Operation::Write, run(flash));
        match self.policy {
            Policy::WriteBack => to_flash.await,
            Policy::WriteThrough => {
                zip(to_flash, self.network.pass(Operation::Write, run(home))).await;
            }
        }
    }

    async fn look(&self, table: u64, is_change: bool) {
        let _turn = self.lookup.lock().await;
        let looked = {
            let mut state = self.state();
            let looked = state.tables.look(table, is_change);
            state.counts.lookups += 1;
            state.counts.misses += u64::from(looked.is_miss);
            state.counts.tables_read += u64::from(looked.reads);
            state.counts.tables_written += u64::from(looked.writes);
            looked
        };
        if looked.writes {
            self.write_table().await;
        }
        if looked.reads {
            self.flash.pass(Operation::Read, run(CLUSTER_BYTES)).await;
        }
    }

    /// What left flash dirty goes home.
    fn send_home(&self, blocks: u64) {
        for _ in 0..blocks {
            self.flash.begin(Operation::Read, run(BLOCK_BYTES));
            self.network.begin(Operation::Write, run(BLOCK_BYTES));
        }
    }

    async fn write(&self, disk: u64, start: u64, len: u64) {
        let is_dirty = self.policy == Policy::WriteBack;
        let (mut blocks, mut home, mut edges) = (0, 0, 0);
        {
            let mut state = self.state();
            for (block, is_whole) in blocks_of(start, len) {
                let key = disk << 40 | block;
                edges += u64::from(!is_whole && !state.blocks.touch(key));
                home += u64::from(state.blocks.put(key, is_dirty));
                blocks += 1;
            }
            state.counts.written_bytes += blocks * BLOCK_BYTES;
        }
        for _ in 0..edges {
            self.network.pass(Operation::Read, run(BLOCK_BYTES)).await;
        }
        self.send_home(home);
        self.write_both(blocks * BLOCK_BYTES, len).await;
    }

    async fn read(&self, disk: u64, start: u64, len: u64) {
        let (mut here, mut elsewhere, mut home) = (0, 0, 0);
        {
            let mut state = self.state();
            for (block, _) in blocks_of(start, len) {
                let key = disk << 40 | block;
                if state.blocks.touch(key) {
                    here += BLOCK_BYTES;
                } else {
                    elsewhere += BLOCK_BYTES;
                    home += u64::from(state.blocks.put(key, false));
                }
            }
            state.counts.admitted_bytes += elsewhere;
        }
        if here > 0 {
            self.flash.pass(Operation::Read, run(here)).await;
        }
        if elsewhere > 0 {
            self.network.pass(Operation::Read, run(elsewhere)).await;
            self.flash.begin(Operation::Write, run(elsewhere));
        }
        self.send_home(home);
    }
}

/// The image file: its tables go through the cache's memory.
pub(crate) struct TableSide {
    pub(crate) trdc: Arc<Trdc>,
    /// Keeps the bytes, and takes no time.
    pub(crate) bytes: SharedStorage,
    /// Where the first table is: behind everything that a new image has.
    pub(crate) first: u64,
    /// Which of several images it is.
    pub(crate) image: u64,
}

impl TableSide {
    async fn look(&self, span: ImageSpan, is_change: bool) {
        let tables = span.start().bytes().max(self.first) / CLUSTER_BYTES;
        for table in tables..span.end().bytes().div_ceil(CLUSTER_BYTES) {
            self.trdc.look(self.image << 40 | table, is_change).await;
        }
    }
}

impl Storage for TableSide {
    fn name(&self) -> &'static str {
        "image"
    }

    fn limits(&self) -> &Limits {
        self.bytes.limits()
    }

    fn len(&self) -> u64 {
        self.bytes.len()
    }

    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            self.look(at.span(buffer.len() as u64), false).await;
            self.bytes.read(at, buffer).await
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.look(at.span(data.len() as u64), true).await;
            self.bytes.write(at, data).await
        })
    }

    /// Of the format's own order; the guest's flushes are [`Trdc::sync`].
    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.bytes.flush()
    }

    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.look(span, true).await;
            self.bytes.write_zeroes(span, how).await
        })
    }

    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.bytes.discard(span)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        self.bytes.set_len(len)
    }

    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        self.bytes.preallocate(span)
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        self.bytes.runs(span)
    }
}

/// The data of the delta: an external data file, whose places are those of the disk.
pub(crate) struct DataSide {
    pub(crate) trdc: Arc<Trdc>,
    pub(crate) limits: Limits,
    pub(crate) image: u64,
}

impl Storage for DataSide {
    fn name(&self) -> &'static str {
        "data"
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn len(&self) -> u64 {
        DISK_BYTES
    }

    fn read(&self, at: ImageOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            self.trdc.read(self.image, at.bytes(), buffer.len() as u64).await;
            buffer.fill(FILL);
            Ok(buffer)
        })
    }

    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.trdc.write(self.image, at.bytes(), data.len() as u64).await;
            Ok(())
        })
    }

    /// With writethrough the format's own order is one on the store, as it is below the flash cache.
    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            if self.trdc.policy == Policy::WriteThrough {
                self.trdc.network.pass(Operation::Flush, run(0)).await;
            }
            Ok(())
        })
    }

    fn write_zeroes(&self, _span: ImageSpan, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn discard(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn set_len(&self, _len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn preallocate(&self, _span: ImageSpan) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>> {
        Box::pin(async move { Ok(vec![StorageRun { span, is_data: true }]) })
    }
}

/// The base: a full disk that is only read, through the cache or straight over the network.
pub(crate) struct Base {
    pub(crate) through: Option<Arc<Trdc>>,
    pub(crate) network: Arc<Device>,
    /// What `map` names.
    pub(crate) bytes: SharedStorage,
    /// How often it was read.
    pub(crate) reads: Arc<AtomicU64>,
}

/// The base's number among the images.
const BASE: u64 = (1 << 20) - 1;

impl Disk for Base {
    fn geometry(&self) -> Geometry {
        Geometry { size: DISK_BYTES, read_only: true, ..MemoryDisk::new(BLOCK_BYTES).geometry() }
    }

    fn read(&self, at: GuestOffset, mut buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let len = buffer.len() as u64;
            self.reads.fetch_add(1, Ordering::Relaxed);
            match &self.through {
                Some(trdc) => trdc.read(BASE, at.bytes(), len).await,
                None => self.network.pass(Operation::Read, run(len)).await,
            }
            buffer.fill(FILL);
            Ok(buffer)
        })
    }

    fn write(&self, _: GuestOffset, _: Buffer, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        panic!("a base is only read");
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn write_zeroes(&self, _: GuestSpan, _: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        panic!("a base is only read");
    }

    fn discard(&self, _: GuestSpan, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
        panic!("a base is only read");
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        let (storage, at) = (self.bytes.clone(), ImageOffset::new(span.start().bytes()));
        Box::pin(async move { Ok(vec![Extent { span, place: Place::Data { storage, at } }]) })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_leave_in_the_order_of_their_use_and_are_written_if_dirty() {
        let mut tables = Tables::new(2);
        let miss = Looked { is_miss: true, ..Looked::default() };
        assert_eq!(tables.look(1, true), miss);
        assert_eq!(tables.look(2, false), miss);
        assert_eq!(tables.look(1, false), Looked::default(), "a hit");
        assert_eq!(tables.look(3, true), miss, "2 was clean");
        assert_eq!(tables.look(2, false), Looked { writes: true, ..miss }, "1 was dirty");
        assert_eq!(tables.look(1, false), Looked { is_miss: true, reads: true, writes: true });
        assert_eq!(tables.clean(), 0);
        tables.look(1, true);
        assert_eq!((tables.clean(), tables.clean()), (1, 0));
    }

    #[test]
    fn blocks_leave_in_the_order_of_their_use() {
        let mut blocks = Blocks::new(Some(2));
        assert!(!blocks.put(1, true) && !blocks.put(2, false));
        assert!(blocks.touch(1) && !blocks.touch(3));
        assert!(!blocks.put(3, false), "2 was clean");
        assert!(!blocks.put(3, true), "it is there");
        assert!(blocks.put(4, false), "1 was dirty");
        assert!(blocks.touch(3) && blocks.touch(4) && !blocks.touch(1));
        let mut all = Blocks::new(None);
        assert!(!all.put(17, true) && all.touch(17) && !all.touch(16));
    }
}
