//! The mapping in memory: the L1 table as a whole, pages of the L2 tables, and what of both waits to be
//! written.
//!
//! ```text
//!   guest cluster ──► slot: L1 index, page, entry in the page
//!                          │             │
//!                          │ L1 entry    │ page, if it is in memory        changed ──► dirty list ──► seal
//! ```
//!
//! 1. Nothing here waits, except for the two keyed locks: the load of a page, and the making of a table.
//! 2. An L1 entry changes together with its place on the list of dirty entries: a seal has both or neither.
//! 3. Reading a page, and deciding what an entry may name, is the image's business (`image.rs`).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use arc_swap::Guard;
use vellum_core::{BlockSize, GuestCluster, GuestSpan, ImageOffset};

use super::entry::Entries;
use super::layout::{be64, put64};
use super::pages::{Page, Pages, SetFull};
use crate::hash::{HashMap, HashSet};
use crate::journal::record::Item;
use crate::journal::words::items_of;
use crate::keyed::{KeyGuard, KeyedLocks};
use crate::state::lock;

/// L1 entries are written in sectors of this many.
const L1_SECTOR_ENTRIES: usize = 64;

/// The L1 table.
pub(crate) struct L1 {
    pub(crate) at: ImageOffset,
    pub(crate) entries: Box<[AtomicU64]>,
    /// Indexes of entries that name some other part of the metadata as their L2 table. Filled only when the
    /// image is open for writing.
    pub(crate) misnamed: HashSet<usize>,
}

/// A sector of the L1 table, or of bitmaps, copied at one moment.
pub(crate) struct L1Sector {
    pub(crate) at: ImageOffset,
    pub(crate) bytes: Vec<u8>,
    /// The entries in it that have changed, counted from the start of the table.
    changed: Vec<usize>,
}

impl L1Sector {
    /// A sector of another table at this place, of which these words have changed.
    pub(crate) fn new(at: ImageOffset, bytes: Vec<u8>, changed: Vec<usize>) -> Self {
        Self { at, bytes, changed }
    }

    /// What a record says of it.
    pub(crate) fn items(&self) -> Vec<Item> {
        let words = self.changed.iter().map(|index| index % L1_SECTOR_ENTRIES);
        items_of(words.map(|word| (self.at + word as u64 * 8, be64(&self.bytes, word * 8))))
    }
}

/// Where a guest cluster's entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) l1_index: usize,
    pub(crate) page: u64,
    pub(crate) index: usize,
}

pub(crate) struct Mapping {
    cluster: BlockSize,
    /// Bytes of an entry of an L2 table.
    entry_bytes: u64,
    page_bytes: usize,
    l1: L1,
    pages: Pages,
    loads: KeyedLocks,
    tables: KeyedLocks,
    dirty: Mutex<HashMap<u64, Arc<Page>>>,
    dirty_max: usize,
    dirty_l1: Mutex<BTreeSet<usize>>,
}

impl Mapping {
    pub(crate) fn new(cluster: BlockSize, entries: Entries, page_bytes: usize, l1: L1, pages: Pages) -> Self {
        Self {
            cluster,
            entry_bytes: if entries.units() > 1 { 16 } else { 8 },
            page_bytes,
            l1,
            dirty_max: (pages.capacity() / 4).clamp(4, 1024),
            pages,
            loads: Default::default(),
            tables: Default::default(),
            dirty: Default::default(),
            dirty_l1: Default::default(),
        }
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    fn entries_per_page(&self) -> u64 {
        self.page_bytes as u64 / self.entry_bytes
    }

    fn pages_per_table(&self) -> u64 {
        self.cluster.bytes() / self.page_bytes as u64
    }

    /// Bytes of the disk that one L2 table maps.
    pub(crate) fn l2_reach(&self) -> BlockSize {
        let entries = self.entries_per_page() * self.pages_per_table();
        BlockSize::from_shift(self.cluster.shift() + entries.trailing_zeros())
    }

    /// Where the entry of a guest cluster is.
    pub(crate) fn slot(&self, cluster: GuestCluster) -> Slot {
        let per_page = self.entries_per_page();
        let page = cluster.index() / per_page;
        Slot {
            l1_index: self.table_of(page).0,
            page,
            index: usize::try_from(cluster.index() % per_page).expect("a page is small"),
        }
    }

    /// The L1 index of the table that has a page, and where in the table the page begins, in bytes.
    pub(crate) fn table_of(&self, page: u64) -> (usize, u64) {
        let index = usize::try_from(page / self.pages_per_table()).expect("an L1 table fits memory");
        (index, (page % self.pages_per_table()) * self.page_bytes as u64)
    }

    pub(crate) fn l1_entry(&self, index: usize) -> u64 {
        self.l1.entries.get(index).map_or(0, |entry| entry.load(Ordering::Acquire))
    }

    /// Whether an L1 entry names some other part of the metadata as its L2 table.
    pub(crate) fn is_misnamed(&self, index: usize) -> bool {
        self.l1.misnamed.contains(&index)
    }

    /// Whether there is an L2 table for the guest cluster.
    pub(crate) fn has_table(&self, cluster: GuestCluster) -> bool {
        self.l1_entry(self.slot(cluster).l1_index) != 0
    }

    /// The beginning of the run that no L2 table maps, and the rest; `None` if the run begins under a table.
    /// It takes one step for each missing table, however many clusters that table would map.
    pub(crate) fn without_table(&self, span: GuestSpan) -> Option<(GuestSpan, GuestSpan)> {
        let table = self.l2_reach().bytes();
        let mut index = self.slot(self.cluster.cluster_of(span.start())).l1_index;
        let mut len = 0;
        while len < span.len() && self.l1_entry(index) == 0 {
            len += table - (span.start().bytes() + len) % table;
            index += 1;
        }
        (len > 0).then(|| span.split_at(len))
    }

    /// Changes an L1 entry. The caller holds the gate, and the lock of the table.
    pub(crate) fn set_l1_entry(&self, index: usize, entry: u64) {
        let mut dirty = lock(&self.dirty_l1);
        self.l1.entries[index].store(entry, Ordering::Release);
        dirty.insert(index);
    }

    /// The page, if it is in memory.
    pub(crate) fn page(&self, number: u64) -> Option<Guard<Option<Arc<Page>>>> {
        self.pages.get(number)
    }

    /// Whether the page is in memory.
    pub(crate) fn has_page(&self, number: u64) -> bool {
        self.pages.has(number)
    }

    /// Keeps a page in memory. Fails when all pages that could make room are dirty.
    pub(crate) fn insert(&self, page: Arc<Page>) -> Result<(), SetFull> {
        self.pages.insert(page)
    }

    /// Held while a page is loaded.
    pub(crate) async fn loading(&self, page: u64) -> KeyGuard<'_> {
        self.loads.lock(page).await
    }

    /// Held while an L2 table is made or copied.
    pub(crate) async fn making_table(&self, l1_index: usize) -> KeyGuard<'_> {
        self.tables.lock(l1_index as u64).await
    }

    /// Adds a page to those that must be written. The page is locked meanwhile.
    pub(crate) fn list_dirty(&self, page: &Arc<Page>) {
        lock(&self.dirty).insert(page.number(), page.clone());
    }

    /// Whether a writer should commit, to make room for pages.
    pub(crate) fn has_much_dirty(&self) -> bool {
        lock(&self.dirty).len() >= self.dirty_max
    }

    /// The pages that must be written. They are on no list from here on.
    pub(crate) fn take_dirty(&self) -> HashMap<u64, Arc<Page>> {
        std::mem::take(&mut *lock(&self.dirty))
    }

    /// Copies the sectors of the L1 table that have changed. They are on no list from here on.
    pub(crate) fn seal_l1(&self) -> Vec<L1Sector> {
        let dirty = std::mem::take(&mut *lock(&self.dirty_l1));
        let mut sectors: Vec<L1Sector> = Vec::new();
        let mut last = None;
        for index in dirty {
            let sector = index / L1_SECTOR_ENTRIES;
            if last == Some(sector) {
                sectors.last_mut().expect("there is one").changed.push(index);
                continue;
            }
            last = Some(sector);
            let first = sector * L1_SECTOR_ENTRIES;
            let end = self.l1.entries.len().min(first + L1_SECTOR_ENTRIES);
            let mut bytes = vec![0; (end - first) * 8];
            for (i, entry) in self.l1.entries[first..end].iter().enumerate() {
                put64(&mut bytes, i * 8, entry.load(Ordering::Acquire));
            }
            sectors.push(L1Sector { at: self.l1.at + first as u64 * 8, bytes, changed: vec![index] });
        }
        sectors
    }

    /// The commit has failed: the sectors wait to be written again.
    pub(crate) fn put_back_l1(&self, sectors: Vec<L1Sector>) {
        lock(&self.dirty_l1).extend(sectors.into_iter().flat_map(|sector| sector.changed));
    }
}
