//! Which clusters of the image are in use, and which is next: refcounts in memory, and the allocator on them.
//!
//! ```text
//!   refcount table ──► block 0 ──► refcounts of clusters 0 … n-1        a block is one cluster of refcounts,
//!   (all in memory)    block 1 ──► refcounts of clusters n … 2n-1       held here in pages of up to 4 KiB
//! ```
//!
//! Everything here is decided in memory, under one short lock that is never held across I/O. An operation
//! that needs a page that is not in memory returns [`Stop::Load`]. The caller loads the page and tries again.
//!
//! 1. A cluster is handed out only when its refcount is zero in memory. The refcount is one from then on.
//! 2. A refcount is lowered only after the metadata that named the cluster no longer does so on the medium,
//!    and no request can still be using it (the caller's duty: see `commit.rs`, `epochs.rs`). So "zero in
//!    memory" always means "may be used".
//! 3. All clusters below `cursor` have a refcount above zero, and so have all clusters on a page that is
//!    listed as full. This knowledge outlives the page in memory: the search for a free cluster may pass more
//!    pages than fit.
//! 4. A new block lies in the first cluster that it counts, so that it needs no other block. When the table
//!    itself is full, the new blocks and the new table lie together behind everything else.
//! 5. No cluster is handed out, and no block or table placed, before the storage reaches its end
//!    ([`Stop::Grow`]). Otherwise a commit could write refcounts there while another task is still setting a
//!    smaller length, which cuts them off. And a storage that cannot grow would fail the commit, and with it
//!    the requests that need no space.
//! 6. A cluster that is being zeroed ahead of need ([`Refcounts::prepare`]) is not handed out until that
//!    write has ended. Until then it is skipped; afterwards it comes next. Only clusters that were never in
//!    use are prepared, and only where their refcounts have a block.
//! 7. A cluster known to hold metadata is never handed out, whatever its refcount: the image is corrupt then.
//!    Only the journal lies where refcounts are zero.
//!
//! The search for the next free cluster is in `search.rs`.
//!
//! Long because taking, making and writing refcounts change one state together, under one lock.

mod search;
mod table;

use std::collections::BTreeSet;
use std::ops::Range;

use roaring::RoaringTreemap;
use vellum_core::{BlockSize, Error, ErrorKind, ImageOffset, ImageSpan, Result, is_zero};

use super::header::Header;
use super::journal::Changed;
use super::layout::{METADATA_PAGE, REFCOUNT_TABLE_BYTES_MAX};
use crate::hash::HashMap;
pub(crate) use search::Look;
use search::Search;
use table::Table;

/// Why an operation could not be done now.
#[derive(Debug)]
pub(crate) enum Stop {
    /// This page must be loaded first.
    Load(RefcountPage),
    /// The storage must be at least this many bytes long first.
    Grow(u64),
    /// The host must reserve space for this run first.
    Reserve(ImageSpan),
    /// The operation failed.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A page of refcounts that is not in memory, and its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RefcountPage {
    pub(crate) number: u64,
    pub(crate) span: ImageSpan,
}

/// Adjacent clusters that were handed out together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Index of the first cluster.
    pub(crate) first: u64,
    /// How many.
    pub(crate) count: u64,
    /// They read as zero until they are written.
    pub(crate) zeroed: bool,
}

/// A page of refcounts, to be written.
#[derive(Debug)]
pub(crate) struct SealedPage {
    number: u64,
    pub(crate) at: ImageOffset,
    pub(crate) bytes: Vec<u8>,
    /// Words that differ from the last seal.
    pub(crate) changed: Changed,
}

/// The refcounts that a commit must write.
#[derive(Debug, Default)]
pub(crate) struct SealedRefcounts {
    /// Pages of blocks.
    pub(crate) pages: Vec<SealedPage>,
    /// Parts of the table, to be written after the pages are durable.
    pub(crate) table: Vec<(ImageOffset, Vec<u8>)>,
    /// The table has moved: it is written as a whole with the pages, and then the header must name this
    /// place.
    pub(crate) moved_to: Option<ImageSpan>,
    /// The old places of the table. They are free once the header names the new place.
    pub(crate) old_tables: Vec<ImageSpan>,
}

struct Page {
    bytes: Vec<u8>,
    dirty: bool,
    writing: bool,
    changed: Changed,
    /// No refcount before this index is zero.
    free_from: u64,
}

/// The refcounts of an image that is open for writing.
pub(crate) struct Refcounts {
    cluster: BlockSize,
    order: u32,
    page_len: u64,
    table: Table,
    table_at: ImageSpan,
    table_dirty: BTreeSet<usize>,
    moved: bool,
    old_tables: Vec<ImageSpan>,
    pages: HashMap<u64, Page>,
    pages_max: usize,
    /// How many pages are dirty.
    dirty: usize,
    /// Bytes that the changes since the last seal take in a record.
    record_bytes: u64,
    cursor: u64,
    search: Search,
    /// Pages on which no refcount is zero.
    full: RoaringTreemap,
    /// The storage reads as zero from this cluster on: nothing was ever written there.
    frontier: u64,
    /// No cluster from this one on was ever in use.
    used: u64,
    /// Free clusters below the frontier that read as zero: punched, or skipped while they were prepared.
    punched: RoaringTreemap,
    metadata: RoaringTreemap,
    /// Clusters that are never handed out, because the journal lies there.
    kept_out: Range<u64>,
    /// Clusters that are being zeroed.
    preparing: Range<u64>,
    /// The prepared clusters end before this one.
    prepared: u64,
    /// The storage ends before this cluster and cannot grow.
    end: Option<u64>,
    /// The storage holds all clusters before this one.
    reached: u64,
    /// Pages are written some time after a change was promised, so they must have space before that.
    reserves: bool,
    /// Clusters of refcounts that the host has space for.
    reserved: RoaringTreemap,
}

/// Entries of the table that are written together.
const TABLE_CHUNK: usize = 512;

impl Refcounts {
    /// The refcounts of an image whose table has been read.
    pub(crate) fn new(
        header: &Header,
        table: &[u8],
        storage_len: u64,
        may_grow: bool,
        grows_zeroed: bool,
    ) -> Self {
        let cluster = header.cluster_size();
        let mut new = Self {
            cluster,
            order: header.refcount_order,
            page_len: METADATA_PAGE.min(cluster).bytes(),
            table: Table::of(table),
            table_at: header.refcount_table,
            table_dirty: BTreeSet::new(),
            moved: false,
            old_tables: Vec::new(),
            pages: HashMap::default(),
            pages_max: 1024,
            dirty: 0,
            record_bytes: 0,
            cursor: 0,
            search: Search::default(),
            full: RoaringTreemap::new(),
            frontier: if may_grow && grows_zeroed { cluster.count_for(storage_len) } else { u64::MAX },
            used: cluster.count_for(storage_len),
            punched: RoaringTreemap::new(),
            metadata: RoaringTreemap::new(),
            kept_out: 0..0,
            preparing: 0..0,
            prepared: 0,
            end: (!may_grow).then(|| storage_len >> cluster.shift()),
            // A file that ends within a cluster is extended before the first change.
            reached: if may_grow { storage_len >> cluster.shift() } else { u64::MAX },
            reserves: false,
            reserved: RoaringTreemap::new(),
        };
        new.note_metadata(ImageOffset::ZERO.span(1));
        new.note_metadata(header.refcount_table);
        // `check_table` refuses what lies beyond 2^56.
        let blocks: Vec<u64> = new.table.blocks().map(|(_, at)| at).filter(|at| at >> 56 == 0).collect();
        for at in blocks {
            new.note_metadata(ImageOffset::new(at).span(1));
        }
        new
    }

    /// Refuses a table that points where no block can be.
    pub(crate) fn check_table(&self) -> Result<()> {
        let mut seen = RoaringTreemap::new();
        for (index, at) in self.table.blocks() {
            let at = ImageOffset::new(at);
            if !self.cluster.aligns(at)
                || at.bytes() >> 56 != 0
                || !seen.insert(self.cluster.cluster_of(at).index())
            {
                return Err(Error::corrupt(format!(
                    "entry {index} of the refcount table is impossible ({at}): run `vellum check -r all`"
                )));
            }
        }
        Ok(())
    }

    /// Records that the run holds metadata.
    pub(crate) fn note_metadata(&mut self, span: ImageSpan) {
        let first = self.cluster.cluster_of(span.start()).index();
        self.metadata.insert_range(first..self.cluster.count_for(span.end().bytes()).max(first));
    }

    /// Whether the cluster is known to hold metadata.
    pub(crate) fn is_metadata(&self, at: ImageOffset) -> bool {
        self.metadata.contains(self.cluster.cluster_of(at).index())
    }

    fn per_page(&self) -> u64 {
        (self.page_len * 8) >> self.order
    }

    fn per_block(&self) -> u64 {
        (self.cluster.bytes() * 8) >> self.order
    }

    fn block_of(&self, cluster: u64) -> usize {
        usize::try_from(cluster / self.per_block()).unwrap_or(usize::MAX)
    }

    /// The place of a page, if its block exists.
    fn place(&self, page: u64) -> Option<ImageOffset> {
        let pages_per_block = self.cluster.bytes() / self.page_len;
        let block = usize::try_from(page / pages_per_block).ok()?;
        let at = self.table.block(block)?;
        Some(ImageOffset::new(at) + (page % pages_per_block) * self.page_len)
    }

    fn page(&mut self, cluster: u64) -> Result<&mut Page, Stop> {
        let number = cluster / self.per_page();
        let place = self.place(number);
        match (self.pages.contains_key(&number), place) {
            (true, _) => Ok(self.pages.get_mut(&number).expect("it is there")),
            (false, Some(at)) => Err(Stop::Load(RefcountPage { number, span: at.span(self.page_len) })),
            (false, None) => {
                let at = cluster << self.cluster.shift();
                Err(Error::corrupt(format!("cluster {at:#x} is in use but has no refcount")).into())
            }
        }
    }

    /// Whether the page is in memory.
    pub(crate) fn has(&self, page: RefcountPage) -> bool {
        self.pages.contains_key(&page.number)
    }

    /// Brings a page into memory. The caller has read it and is the only task that loads it. The page was
    /// absent when that read began.
    pub(crate) fn loaded(&mut self, page: RefcountPage, bytes: Vec<u8>) {
        // The block cannot have moved since the page was requested, but a fresh one may have been put in its
        // place.
        if self.place(page.number) != Some(page.span.start()) || self.pages.contains_key(&page.number) {
            return;
        }
        self.make_room();
        self.pages.insert(
            page.number,
            Page { bytes, dirty: false, writing: false, changed: Changed::default(), free_from: 0 },
        );
    }

    fn make_room(&mut self) {
        if self.pages.len() < self.pages_max {
            return;
        }
        // The choice hardly matters: pages are read again in microseconds, and allocation moves on.
        let near = self.next() / self.per_page();
        let far = |number: &u64| number.abs_diff(near);
        let victim = self
            .pages
            .iter()
            .filter(|(_, page)| !page.dirty && !page.writing)
            .map(|(n, _)| *n)
            .max_by_key(far);
        if let Some(victim) = victim {
            self.pages.remove(&victim);
        }
    }

    /// How many pages wait to be written.
    pub(crate) fn dirty_pages(&self) -> usize {
        self.dirty
    }

    /// Bytes of a record that the changes waiting to be written take.
    pub(crate) fn record_bytes(&self) -> u64 {
        self.record_bytes
    }

    /// The refcount of a cluster.
    pub(crate) fn get(&mut self, cluster: u64) -> Result<u64, Stop> {
        if self.table.block(self.block_of(cluster)).is_none() {
            return Ok(0);
        }
        let (order, index) = (self.order, cluster % self.per_page());
        Ok(read(&self.page(cluster)?.bytes, order, index))
    }

    /// How many clusters from `first` on, up to `most`, have a refcount of one, or how many have a different
    /// one; and whether it is one. Fewer where a page is not in memory.
    pub(crate) fn alike(&mut self, first: u64, most: u64) -> Result<(u64, bool), Stop> {
        let is_sole = self.get(first)? == 1;
        let mut count = 1;
        while count < most {
            match self.get(first + count) {
                Ok(refcount) if (refcount == 1) == is_sole => count += 1,
                _ => break,
            }
        }
        Ok((count, is_sole))
    }

    /// The end of the last cluster that was ever in use, in bytes. `None` if the storage cannot grow.
    pub(crate) fn end(&self) -> Option<u64> {
        self.end.is_none().then(|| self.used.max(1) << self.cluster.shift())
    }

    /// Whether the storage is at least this long, in bytes.
    pub(crate) fn reaches(&self, end: u64) -> bool {
        self.cluster.count_for(end) <= self.reached
    }

    /// Records that the storage now has this length, in bytes.
    pub(crate) fn has_grown(&mut self, len: u64) {
        self.reached = self.reached.max(len >> self.cluster.shift());
    }

    /// Requires that the storage hold all clusters before this one.
    fn need(&self, end: u64) -> Result<(), Stop> {
        if end <= self.reached { Ok(()) } else { Err(Stop::Grow(end << self.cluster.shift())) }
    }

    /// From now on space is reserved for every refcount before it changes.
    pub(crate) fn reserve(&mut self) {
        self.reserves = true;
    }

    /// Records that the host has reserved space for these clusters.
    pub(crate) fn has_space(&mut self, span: ImageSpan) {
        let end = self.cluster.count_for(span.end().bytes());
        self.reserved.insert_range(self.cluster.cluster_of(span.start()).index()..end);
    }

    /// Requires reserved space for these clusters, which hold pages.
    fn need_space(&self, clusters: Range<u64>) -> Result<(), Stop> {
        if !self.reserves || clusters.clone().all(|cluster| self.reserved.contains(cluster)) {
            return Ok(());
        }
        let at = ImageOffset::new(clusters.start << self.cluster.shift());
        Err(Stop::Reserve(at.span((clusters.end - clusters.start) << self.cluster.shift())))
    }

    /// As above, for the block with this cluster's refcount. A page that is not all zeros cannot be a hole.
    fn need_space_of(&mut self, cluster: u64) -> Result<(), Stop> {
        let at = self.place(cluster / self.per_page()).expect("its page is here");
        let block = self.cluster.cluster_of(at).index();
        match self.reserves && !self.reserved.contains(block) && is_zero(&self.page(cluster)?.bytes) {
            true => self.need_space(block..block + 1),
            false => Ok(()),
        }
    }

    /// Finds clusters for a journal: between `least` and `want` of them, beginning at a multiple of `align`,
    /// none of them in use, and none where a refcount block will have to be. They are behind everything else
    /// if the storage can grow, and near its end if it cannot. `None` if there is no such place.
    pub(crate) fn find_journal(
        &mut self,
        least: u64,
        want: u64,
        align: u64,
    ) -> Result<Option<Range<u64>>, Stop> {
        let mut want = want.min(self.per_block() / 2 / align * align);
        while want >= least {
            if let Some(found) = self.find_run(want, align)? {
                return Ok(Some(found));
            }
            want = if want > least { (want / 2 / align * align).max(least) } else { 0 };
        }
        Ok(None)
    }

    fn find_run(&mut self, want: u64, align: u64) -> Result<Option<Range<u64>>, Stop> {
        let per_block = self.per_block();
        let Some(end) = self.end else {
            let block = self.block_of(self.used);
            for block in block..block + 3 {
                let start = self.behind_block(block).max(self.used).next_multiple_of(align);
                let fits = start + want <= (block as u64 + 1) * per_block;
                if fits && self.are_free(start..start + want)? {
                    return Ok(Some(start..start + want));
                }
            }
            return Ok(None);
        };
        let last = self.block_of(end.saturating_sub(1));
        for block in (last.saturating_sub(7)..=last).rev() {
            let bottom = self.behind_block(block);
            let mut start = end.min((block as u64 + 1) * per_block) / align * align;
            let mut run_end = start;
            while start > bottom {
                start -= 1;
                if self.get(start)? != 0 || self.metadata.contains(start) {
                    run_end = start / align * align;
                } else if run_end.saturating_sub(start) >= want && start.is_multiple_of(align) {
                    return Ok(Some(start..start + want));
                }
            }
        }
        Ok(None)
    }

    fn are_free(&mut self, mut clusters: Range<u64>) -> Result<bool, Stop> {
        clusters.try_fold(true, |all, cluster| Ok(all && self.get(cluster)? == 0))
    }

    /// The first cluster of a block's range that is not needed for a block or table.
    fn behind_block(&self, block: usize) -> u64 {
        let first = block as u64 * self.per_block();
        match self.table.block(block) {
            Some(_) => first,
            None => {
                let (blocks, table) = self.block_needs(block);
                first + blocks + table
            }
        }
    }

    /// Makes the clusters that were kept out ordinary again.
    pub(crate) fn let_in(&mut self) {
        let clusters = std::mem::replace(&mut self.kept_out, 0..0);
        self.metadata.remove_range(clusters);
    }

    /// From now on these clusters are never handed out, and never count as guest data.
    pub(crate) fn keep_out(&mut self, clusters: Range<u64>) {
        self.metadata.insert_range(clusters.clone());
        self.kept_out = clusters;
    }

    /// Hands out up to `want` adjacent clusters, the first free ones from `at` on. All clusters before `at`
    /// on its page are in use.
    fn allocate_from(&mut self, mut at: u64, want: u64) -> Result<Run, Stop> {
        loop {
            if self.end.is_some_and(|end| at >= end) {
                return Err(full("the image's storage is full and cannot grow").into());
            }
            let block = self.block_of(at);
            if self.table.block(block).is_none() {
                self.add_block(block)?;
                continue;
            }
            let (order, per_page) = (self.order, self.per_page());
            let page_start = at - at % per_page;
            if self.full.contains(at / per_page) {
                at = page_start + per_page;
                continue;
            }
            let page = self.page(at)?;
            let from = (at - page_start).max(page.free_from);
            let Some(index) = (from..per_page).find(|index| read(&page.bytes, order, *index) == 0) else {
                // The clusters before `from` are in use as well: they are below the cursor, or below the
                // page's own mark.
                page.free_from = per_page;
                self.full.insert(at / per_page);
                at = page_start + per_page;
                self.has_passed(at);
                continue;
            };
            if from == page.free_from {
                page.free_from = index;
            }
            let first = page_start + index;
            if self.kept_out.contains(&first) {
                at = self.kept_out.end;
                continue;
            }
            if self.preparing.contains(&first) {
                at = self.preparing.end;
                continue;
            }
            if self.end.is_some_and(|end| first >= end) {
                at = first;
                continue;
            }
            return self.take(first, want);
        }
    }

    /// Takes the free cluster `first` and up to `want - 1` free clusters after it on the same page, as long
    /// as they are like it.
    fn take(&mut self, first: u64, want: u64) -> Result<Run, Stop> {
        let zeroed = self.reads_zero(first);
        let (order, per_page) = (self.order, self.per_page());
        let limit =
            (first - first % per_page + per_page).min(self.end.unwrap_or(u64::MAX)).min(first + want.max(1));
        let limit = if first < self.kept_out.start { limit.min(self.kept_out.start) } else { limit };
        let limit = if first < self.preparing.start { limit.min(self.preparing.start) } else { limit };
        // The space that the storage has already is used up first.
        let limit = if first < self.reached { limit.min(self.reached) } else { limit };
        let mut count = 0;
        while first + count < limit {
            let cluster = first + count;
            if read(&self.page(cluster)?.bytes, order, cluster % per_page) != 0
                || self.reads_zero(cluster) != zeroed
            {
                break;
            }
            if self.metadata.contains(cluster) {
                let at = cluster << self.cluster.shift();
                return Err(Error::corrupt(format!(
                    "the metadata cluster {at:#x} has refcount 0: run `vellum check -r all`"
                ))
                .into());
            }
            count += 1;
        }
        self.need(first + count)?;
        self.need_space_of(first)?;
        for cluster in first..first + count {
            self.set(cluster, 1)?;
        }
        self.has_taken(first + count);
        self.not_zero(first..first + count);
        Ok(Run { first, count, zeroed })
    }

    /// The first cluster behind everything that was ever in use, including the journal. New clusters come
    /// from here in the end.
    fn front(&self) -> u64 {
        self.used.max(self.kept_out.end)
    }

    /// The end of the clusters that were ever in use, and how much is prepared behind them, in bytes.
    pub(crate) fn ahead(&self) -> (u64, u64) {
        let (front, shift) = (self.front(), self.cluster.shift());
        (front << shift, self.prepared.saturating_sub(front) << shift)
    }

    /// The next clusters to zero ahead of need: up to `want`. None of them is handed out before
    /// [`Refcounts::prepare_ended`]. `None` if there are none to prepare.
    pub(crate) fn prepare(&mut self, want: u64) -> Result<Option<Range<u64>>, Stop> {
        let start = self.prepared.max(self.front());
        let block = self.block_of(start);
        let has_block = self.table.block(block).is_some();
        if self.end.is_some() || self.frontier > start || !has_block || !self.preparing.is_empty() {
            return Ok(None);
        }
        let piece = start..(start + want).min((block as u64 + 1) * self.per_block());
        // Clusters that the image names behind its end are damage, and must not be touched.
        let is_metadata = piece.clone().any(|cluster| self.metadata.contains(cluster));
        if is_metadata || !self.are_free(piece.clone())? {
            return Ok(None);
        }
        self.need(piece.end)?;
        self.preparing = piece.clone();
        Ok(Some(piece))
    }

    /// The zeros have been written, or the attempt has failed and is over. The clusters read as zero, as
    /// before, and may be handed out.
    pub(crate) fn prepare_ended(&mut self, done: bool) {
        let piece = std::mem::replace(&mut self.preparing, 0..0);
        if done {
            self.prepared = self.prepared.max(piece.end);
        }
        // If the search for a cluster has skipped them, it begins with them again.
        let behind = piece.start..piece.end.min(self.frontier).max(piece.start);
        self.punched.insert_range(behind);
        self.begins_again_at(piece.start);
        let per_page = self.per_page();
        for number in piece.start / per_page..piece.end.div_ceil(per_page) {
            self.full.remove(number);
            if let Some(page) = self.pages.get_mut(&number) {
                page.free_from = page.free_from.min(piece.start.saturating_sub(number * per_page));
            }
        }
    }

    fn reads_zero(&self, cluster: u64) -> bool {
        cluster >= self.frontier || self.punched.contains(cluster)
    }

    /// From now on these clusters cannot be assumed to read as zero.
    fn not_zero(&mut self, clusters: Range<u64>) {
        self.frontier = self.frontier.max(clusters.end);
        self.used = self.used.max(clusters.end);
        self.punched.remove_range(clusters);
    }

    fn set(&mut self, cluster: u64, value: u64) -> Result<(), Stop> {
        let (order, index) = (self.order, cluster % self.per_page());
        let page = self.page(cluster)?;
        write(&mut page.bytes, order, index, value);
        let bytes = page.changed.add(usize::try_from((index << order) / 64).expect("within a page"));
        if value == 0 {
            page.free_from = page.free_from.min(index);
        }
        if !std::mem::replace(&mut page.dirty, true) {
            self.dirty += 1;
        }
        self.record_bytes += bytes;
        if value == 0 {
            let page = cluster / self.per_page();
            self.full.remove(page);
            self.has_changed(page);
        }
        Ok(())
    }

    /// How many clusters a new block takes: for blocks and, when the table is full, for a larger table behind
    /// them.
    fn block_needs(&self, block: usize) -> (u64, u64) {
        if block < self.table.len() {
            return (1, 0);
        }
        let entries_per_cluster = self.cluster.bytes() / 8;
        let mut blocks = 1u64;
        loop {
            let entries = (block as u64 + blocks).max(self.table.len() as u64 * 3 / 2);
            let clusters = entries.div_ceil(entries_per_cluster);
            if (blocks + clusters).div_ceil(self.per_block()) <= blocks {
                return (blocks, clusters);
            }
            blocks += 1;
        }
    }

    /// Makes refcounts for clusters that have none.
    fn add_block(&mut self, block: usize) -> Result<(), Stop> {
        let first = block as u64 * self.per_block();
        let (blocks, table_clusters) = self.block_needs(block);
        let table_len = table_clusters << self.cluster.shift();
        if table_len > REFCOUNT_TABLE_BYTES_MAX {
            return Err(full("the image has reached the largest size that its refcount table allows").into());
        }
        let new = first..first + blocks + table_clusters;
        let is_in_the_way = new.start < self.kept_out.end && self.kept_out.start < new.end;
        if self.end.is_some_and(|end| new.end > end) || is_in_the_way {
            return Err(full("the image's storage is full and cannot grow").into());
        }
        self.need(new.end)?;
        if let Some(cluster) = new.clone().find(|cluster| self.metadata.contains(*cluster)) {
            let at = cluster << self.cluster.shift();
            return Err(Error::corrupt(format!(
                "the metadata cluster {at:#x} has no refcount: run `vellum check -r all`"
            ))
            .into());
        }
        self.need_space(new.clone())?;
        if table_clusters > 0 {
            self.old_tables.push(self.table_at);
            let entries = usize::try_from(table_len / 8).expect("at most 8 MiB");
            self.table.extend(entries);
            self.table_at = ImageOffset::new((first + blocks) << self.cluster.shift()).span(table_len);
            self.moved = true;
            self.note_metadata(self.table_at);
        }
        let pages_per_block = self.cluster.bytes() / self.page_len;
        for i in 0..blocks {
            let at = ImageOffset::new((first + i) << self.cluster.shift());
            let index = block + usize::try_from(i).expect("a few blocks");
            self.table.set(index, at.bytes());
            self.table_dirty.insert(index / TABLE_CHUNK);
            self.note_metadata(at.span(1));
            for page in 0..pages_per_block {
                // The cluster's old bytes, if any, must not pass for refcounts: every page is written.
                let number = index as u64 * pages_per_block + page;
                let bytes = vec![0; usize::try_from(self.page_len).expect("a page")];
                let dirty = !self.reads_zero(first + i);
                self.dirty += usize::from(dirty);
                self.pages.insert(
                    number,
                    Page { bytes, dirty, writing: false, changed: Changed::default(), free_from: 0 },
                );
            }
        }
        for cluster in new.clone() {
            self.set(cluster, 1)?;
        }
        self.not_zero(new);
        Ok(())
    }

    /// The highest refcount that can be written.
    pub(crate) fn most(&self) -> u64 {
        u64::MAX >> (64 - (1 << self.order))
    }

    /// Adds to the refcount of a cluster that is in use.
    pub(crate) fn raise(&mut self, cluster: u64, more: u64) -> Result<(), Stop> {
        let old = self.get(cluster)?;
        match old.checked_add(more).filter(|new| old > 0 && *new <= self.most()) {
            Some(new) => self.set(cluster, new),
            None => {
                let at = cluster << self.cluster.shift();
                Err(Error::corrupt(format!(
                    "the refcount {old} of cluster {at:#x} cannot be raised by {more}"
                ))
                .into())
            }
        }
    }

    /// Lowers a refcount by one and returns the new value. `punched` says that the cluster's bytes now read
    /// as zero. It has a meaning only when the new refcount is zero.
    pub(crate) fn release(&mut self, cluster: u64, punched: bool) -> Result<u64, Stop> {
        let old = self.get(cluster)?;
        if old == 0 {
            let at = cluster << self.cluster.shift();
            return Err(Error::corrupt(format!("cluster {at:#x} is freed but its refcount is 0")).into());
        }
        self.set(cluster, old - 1)?;
        if old == 1 {
            self.is_free_again(cluster);
            self.metadata.remove(cluster);
            self.reserved.remove(cluster);
            self.not_zero(cluster..cluster + 1);
            if punched {
                self.punched.insert(cluster);
            }
        }
        Ok(old - 1)
    }

    /// Takes the refcounts that must be written. The pages count as being written until
    /// [`Refcounts::written`].
    pub(crate) fn seal(&mut self) -> SealedRefcounts {
        let mut sealed = SealedRefcounts::default();
        let dirty: Vec<u64> =
            self.pages.iter().filter(|(_, page)| page.dirty).map(|(number, _)| *number).collect();
        for number in dirty {
            let at = self.place(number).expect("a page in memory has a block");
            let page = self.pages.get_mut(&number).expect("it is there");
            page.dirty = false;
            page.writing = true;
            let changed = std::mem::take(&mut page.changed);
            sealed.pages.push(SealedPage { number, at, bytes: page.bytes.clone(), changed });
        }
        self.dirty = 0;
        self.record_bytes = 0;
        sealed.pages.sort_by_key(|page| page.at);
        let chunks = std::mem::take(&mut self.table_dirty);
        if std::mem::take(&mut self.moved) {
            sealed.table.push((self.table_at.start(), self.table.bytes(0, self.table.len())));
            sealed.moved_to = Some(self.table_at);
            sealed.old_tables = std::mem::take(&mut self.old_tables);
        } else {
            for chunk in chunks {
                let first = chunk * TABLE_CHUNK;
                let bytes = self.table.bytes(first, TABLE_CHUNK);
                sealed.table.push((self.table_at.start() + first as u64 * 8, bytes));
            }
        }
        sealed
    }

    /// The sealed pages are on the medium. If `failed`, they must be written again.
    pub(crate) fn written(&mut self, sealed: SealedRefcounts, failed: bool) {
        for page in &sealed.pages {
            if let Some(page) = self.pages.get_mut(&page.number) {
                page.writing = false;
                if failed && !std::mem::replace(&mut page.dirty, true) {
                    self.dirty += 1;
                }
            }
        }
        if !failed {
            return;
        }
        if sealed.moved_to.is_some() {
            self.moved = true;
            let mut old = sealed.old_tables;
            old.append(&mut self.old_tables);
            self.old_tables = old;
        }
        let base = self.table_at.start();
        for (at, _) in sealed.table.iter().filter(|(at, _)| *at >= base) {
            self.table_dirty.insert(usize::try_from((*at - base) / 8).unwrap_or(0) / TABLE_CHUNK);
        }
    }
}

fn full(why: &'static str) -> Error {
    Error::new(ErrorKind::NoSpace, why)
}

/// Reads refcount `index` of 2^`order` bits.
pub(crate) fn read(bytes: &[u8], order: u32, index: u64) -> u64 {
    let index = usize::try_from(index).expect("an index within a block");
    match order {
        0..=2 => {
            let (bits, per_byte) = (1u32 << order, 8usize >> order);
            let shift = u32::try_from(index % per_byte).expect("below 8") * bits;
            u64::from(bytes[index / per_byte] >> shift) & ((1 << bits) - 1)
        }
        3 => u64::from(bytes[index]),
        _ => {
            let len = 1usize << (order - 3);
            bytes[index * len..(index + 1) * len].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
        }
    }
}

/// Writes refcount `index` of 2^`order` bits.
pub(crate) fn write(bytes: &mut [u8], order: u32, index: u64, value: u64) {
    let index = usize::try_from(index).expect("an index within a block");
    assert!(order == 6 || value < 1 << (1 << order), "the refcount {value} fits {} bits", 1 << order);
    match order {
        0..=2 => {
            let (bits, per_byte) = (1u32 << order, 8usize >> order);
            let shift = u32::try_from(index % per_byte).expect("below 8") * bits;
            let mask = ((1u8 << bits) - 1) << shift;
            let value = u8::try_from(value).expect("it fits the bits") << shift;
            bytes[index / per_byte] = bytes[index / per_byte] & !mask | value;
        }
        3 => bytes[index] = u8::try_from(value).expect("it fits the bits"),
        _ => {
            let len = 1usize << (order - 3);
            bytes[index * len..(index + 1) * len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
        }
    }
}
