//! The open image: what is in memory of it, who may change what, and how a page gets here.
//!
//! ```text
//!   guest cluster ──► L1 entry (atomic) ──► page of an L2 table (atomic words) ──► Units ──► host cluster
//!                          │                      │
//!                          │ none: everything     │ not in memory: loaded once, whoever asks first
//!                          ▼ is in the disk below ▼
//! ```
//!
//! Locks, in the order in which they may be held together; none is held across I/O except the keyed ones, which are
//! made for that and of which a task holds one at a time:
//!
//! 1. claims on guest clusters (`claims.rs`), ascending;
//! 2. the table lock of an L1 index: making or copying an L2 table;
//! 3. the load lock of a page;
//! 4. short in-memory locks: refcounts, a page's state and within it the list of dirty pages, the lists of dirty L1
//!    entries and freed clusters.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use arc_swap::Guard;
use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, Geometry, GuestCluster, GuestOffset, GuestSpan,
    ImageCluster, ImageOffset, ImageSpan, Result, SharedDisk, SharedStorage,
};

use super::commit::Commits;
use super::compressed::Decompressor;
use super::entry::{ClusterState, Entries, Words};
use super::header::Header;
use super::journal::{Journal, SectorChecks, checks_of};
use super::layout::{COPIED, L1_RESERVED, OFFSET_MASK};
use super::pages::{Evicted, Page, Pages, SetFull};
use super::prepare::Prepare;
use super::refcount::{RefcountPage, Refcounts, Run, Stop};
use crate::claims::Claims;
use crate::epochs::Epochs;
use crate::hash::HashMap;
use crate::keyed::KeyedLocks;
use crate::sabotage::{self, Bug};
pub(crate) use crate::state::{State, lock};

/// When this many pages of refcounts are dirty, the next writer commits.
const REFCOUNT_PAGES_DIRTY_MAX: usize = 512;

/// The file grows by an eighth of itself at a time, but no less and no more than this; what is too much is cut off when the image
/// is closed. All who allocate wait meanwhile, on every worker, and what it grows by is a hole.
const GROWTH_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=64 << 20;

/// An open qcow2 image.
pub struct Qcow2 {
    pub(crate) name: String,
    pub(crate) header: Mutex<Header>,
    pub(crate) geometry: Geometry,
    pub(crate) cluster: BlockSize,
    pub(crate) entries: Entries,
    /// The image file, as the way for metadata.
    pub(crate) metadata: SharedStorage,
    /// The same, for what a journal takes home.
    pub(crate) home: SharedStorage,
    /// Where guest data lies: the image file again, or the external data file.
    pub(crate) data: SharedStorage,
    pub(crate) has_data_file: bool,
    pub(crate) below: Option<SharedDisk>,
    pub(crate) l1: L1,
    pub(crate) pages: Pages,
    pub(crate) page_bytes: usize,
    pub(crate) loads: KeyedLocks,
    pub(crate) tables: KeyedLocks,
    pub(crate) refcount_loads: KeyedLocks,
    pub(crate) claims: Claims,
    pub(crate) epochs: Epochs,
    /// Nothing when the image is open for reading.
    pub(crate) refcounts: Option<Mutex<Refcounts>>,
    pub(crate) dirty: Mutex<HashMap<u64, Arc<Page>>>,
    pub(crate) dirty_max: usize,
    pub(crate) commits: Commits,
    /// Nothing when the image is not to have one, or is open for reading.
    pub(crate) journal: Option<Journal>,
    /// Space ahead of need.
    pub(crate) prepare: Prepare,
    pub(crate) decompressor: Decompressor,
    pub(crate) marked: async_lock::Mutex<bool>,
    pub(crate) is_marked: AtomicBool,
    pub(crate) growing: async_lock::Mutex<()>,
    pub(crate) state: State,
}

/// The L1 table, all of it in memory.
pub(crate) struct L1 {
    pub(crate) at: ImageOffset,
    pub(crate) entries: Box<[AtomicU64]>,
    /// Indexes of entries that were changed and not yet written.
    pub(crate) dirty: Mutex<BTreeSet<usize>>,
}

/// Where a guest cluster's entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) l1_index: usize,
    pub(crate) page: u64,
    pub(crate) index: usize,
}

/// The mapping needs a page that is not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Missing(pub(crate) u64);

impl Qcow2 {
    /// Checks that the request is inside the disk and the disk still open.
    pub(crate) fn check(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        self.state.check_open()?;
        let span = span.ok_or_else(|| Error::invalid("the request passes 2^64"))?;
        if span.end().bytes() > self.geometry.size {
            return Err(Error::invalid(format!(
                "the request {span} passes the end of the disk at {:#x}",
                self.geometry.size
            )));
        }
        Ok(span)
    }

    /// Checks that a change is allowed.
    pub(crate) fn check_change(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        let span = self.check(span)?;
        if self.geometry.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open for reading only", self.name)));
        }
        self.state.check_stopped()?;
        Ok(span)
    }

    pub(crate) fn entries_per_page(&self) -> u64 {
        self.page_bytes as u64 / self.entry_bytes()
    }

    fn entry_bytes(&self) -> u64 {
        if self.entries.units() > 1 { 16 } else { 8 }
    }

    fn pages_per_table(&self) -> u64 {
        self.cluster.bytes() / self.page_bytes as u64
    }

    /// Where the entry of a guest cluster is.
    pub(crate) fn slot(&self, cluster: GuestCluster) -> Slot {
        let per_page = self.entries_per_page();
        let page = cluster.index() / per_page;
        Slot {
            l1_index: usize::try_from(page / self.pages_per_table()).expect("an L1 table fits memory"),
            page,
            index: usize::try_from(cluster.index() % per_page).expect("a page is small"),
        }
    }

    /// The part of the run that lies in its first cluster, and the rest.
    pub(crate) fn first_part(&self, span: GuestSpan) -> (GuestSpan, GuestSpan) {
        span.split_at(self.cluster.bytes() - self.cluster.within(span.start()))
    }

    fn l1_entry(&self, index: usize) -> u64 {
        self.l1.entries.get(index).map_or(0, |entry| entry.load(Ordering::Acquire))
    }

    /// What a guest cluster is made of, from memory alone. Waits for nobody and holds nothing.
    pub(crate) fn lookup(&self, cluster: GuestCluster) -> Result<Result<ClusterState, Missing>> {
        let slot = self.slot(cluster);
        if self.l1_entry(slot.l1_index) == 0 {
            return Ok(Ok(ClusterState::Plain(Default::default())));
        }
        match self.pages.get(slot.page) {
            Some(page) => {
                let page = page.as_ref().expect("a found page is there");
                self.decode(cluster, page.entry(slot.index)).map(Ok)
            }
            None => Ok(Err(Missing(slot.page))),
        }
    }

    pub(crate) fn decode(&self, cluster: GuestCluster, words: Words) -> Result<ClusterState> {
        let state = self.entries.decode(words);
        state.and_then(|state| self.entries.check_place(cluster, state).map(|()| state)).context(|| {
            let at = self.cluster.start_of(cluster);
            format!("{}: the mapping of the disk at {at} is damaged: run `vellum check`", self.name)
        })
    }

    /// What a guest cluster is made of, loading the page if need be.
    pub(crate) async fn look(&self, cluster: GuestCluster) -> Result<ClusterState> {
        loop {
            match self.lookup(cluster)? {
                Ok(state) => return Ok(state),
                Err(Missing(page)) => self.load(page).await?,
            }
        }
    }

    /// Where a page lies now, if its table exists.
    pub(crate) fn page_place(&self, page: u64) -> Result<Option<ImageSpan>> {
        let index = usize::try_from(page / self.pages_per_table()).expect("an L1 table fits memory");
        let entry = self.l1_entry(index);
        let table = ImageOffset::new(entry & OFFSET_MASK);
        if entry == 0 {
            return Ok(None);
        }
        if table.bytes() == 0 || entry & L1_RESERVED != 0 || !self.cluster.aligns(table) {
            return Err(Error::corrupt(format!(
                "{}: entry {index} of the L1 table is impossible ({entry:#x}): run `vellum check`",
                self.name
            )));
        }
        let at = table + (page % self.pages_per_table()) * self.page_bytes as u64;
        Ok(Some(at.span(self.page_bytes as u64)))
    }

    /// Brings a page into memory, unless it is there or has no table.
    pub(crate) async fn load(&self, number: u64) -> Result<()> {
        loop {
            {
                let _loading = self.loads.lock(number).await;
                if self.pages.get(number).is_some() {
                    return Ok(());
                }
                let Some(place) = self.page_place(number)? else { return Ok(()) };
                let page = self.read_page(number, place).await?;
                if self.pages.insert(page) == Ok(()) {
                    return Ok(());
                }
            }
            self.commit().await?; // every page of the set is dirty: write them, then there is room
        }
    }

    async fn read_page(&self, number: u64, place: ImageSpan) -> Result<Arc<Page>> {
        if place.end().bytes() > self.metadata.len().next_multiple_of(self.cluster.bytes()) {
            return Err(Error::corrupt(format!(
                "{}: an L2 table lies at {}, past the end of the file: it was truncated",
                self.name,
                place.start()
            )));
        }
        let context = || format!("{}: can't read the L2 table at {}", self.name, place.start());
        let bytes = self.read_metadata(place).await.context(context)?;
        let page = Page::from_bytes(number, &bytes, self.entries.words());
        if self.refcounts.is_some() {
            self.refuse_overlaps(&page, place)?;
        }
        Ok(page)
    }

    /// A page of metadata as it was when it was last committed.
    async fn read_metadata(&self, place: ImageSpan) -> Result<Arc<[u8]>> {
        if let Some(kept) = self.journal().and_then(|journal| journal.kept(place.start())) {
            return Ok(kept);
        }
        let len = usize::try_from(place.len()).expect("a page is small");
        let buffer = self.metadata.read(place.start(), Buffer::for_overwrite(len)).await?;
        Ok(Arc::from(buffer.slice()))
    }

    /// A page that was read must not send guest writes into the image's own metadata.
    fn refuse_overlaps(&self, page: &Page, place: ImageSpan) -> Result<()> {
        if self.has_data_file {
            return Ok(());
        }
        let refcounts = self.refcounts();
        for index in 0..page.entries() {
            let words = page.entry(index);
            if words == (0, 0) {
                continue;
            }
            let Ok(ClusterState::Plain(units)) = self.entries.decode(words) else { continue };
            if let Some(host) = units.host.filter(|host| refcounts.is_metadata(*host)) {
                return Err(Error::corrupt(format!(
                    "{}: an entry of the L2 table at {} points to metadata at {host}: run `vellum check`",
                    self.name,
                    place.start()
                )));
            }
        }
        Ok(())
    }

    /// The page in memory, loaded if need be; its table must exist.
    async fn page(&self, number: u64) -> Result<Guard<Option<Arc<Page>>>> {
        loop {
            if let Some(page) = self.pages.get(number) {
                return Ok(page);
            }
            if self.page_place(number)?.is_none() {
                return Err(Error::corrupt(format!(
                    "{}: an L1 entry names no table: run `vellum check`",
                    self.name
                )));
            }
            self.load(number).await?;
        }
    }

    /// Replaces the entry of a guest cluster by what `change` makes of its state, and gives the state before. The L2
    /// table must exist and be this image's own ([`Qcow2::own_table`]). From here on readers see the new entry; it is
    /// on the medium after the next commit, together with what `with` notes, which is told the state before.
    pub(crate) async fn publish(
        &self,
        cluster: GuestCluster,
        change: impl Fn(ClusterState) -> ClusterState,
        with: impl Fn(ClusterState),
    ) -> Result<ClusterState> {
        let slot = self.slot(cluster);
        loop {
            let page = self.page(slot.page).await?;
            let page = page.as_ref().expect("a found page is there");
            let mut before = None;
            let change = |words| {
                let state = self.decode(cluster, words)?;
                before = Some(state);
                with(state);
                match change(state) {
                    ClusterState::Plain(units) => Ok(self.entries.encode(units)),
                    ClusterState::Compressed(_) => Ok(words),
                }
            };
            let _shared = self.journal().map(|journal| journal.shared());
            match page.update(slot.index, change, || self.list_dirty(page)) {
                Err(Evicted) => continue,
                Ok(Err(error)) => return Err(error),
                Ok(Ok(_)) => return Ok(before.expect("the change was asked")),
            }
        }
    }

    /// Lists a page that must be written. The page is locked meanwhile.
    pub(crate) fn list_dirty(&self, page: &Arc<Page>) {
        lock(&self.dirty).insert(page.number(), page.clone());
    }

    /// Whether so much metadata waits to be written that the next writer should see to it.
    pub(crate) fn has_much_dirty(&self) -> bool {
        lock(&self.dirty).len() >= self.dirty_max
            || self.refcounts().dirty_pages() >= REFCOUNT_PAGES_DIRTY_MAX
            || self.journal().is_some_and(|journal| journal.is_large())
    }

    /// Bytes of the disk that one L2 table maps.
    pub(crate) fn l2_reach(&self) -> BlockSize {
        let entries = self.entries_per_page() * self.pages_per_table();
        BlockSize::from_shift(self.cluster.shift() + entries.trailing_zeros())
    }

    /// Whether there is an L2 table for the guest cluster.
    pub(crate) fn has_table(&self, cluster: GuestCluster) -> bool {
        self.l1_entry(self.slot(cluster).l1_index) != 0
    }

    /// Whether the external data file must read as the disk does.
    pub(crate) fn data_file_is_raw(&self) -> bool {
        self.has_data_file && lock(&self.header).data_file_is_raw()
    }

    /// Makes sure that the L2 table of a guest cluster exists and belongs to the active disk alone, so that its entries
    /// may be changed.
    pub(crate) async fn own_table(&self, cluster: GuestCluster) -> Result<()> {
        let slot = self.slot(cluster);
        if self.l1_entry(slot.l1_index) & COPIED != 0 {
            return Ok(());
        }
        let _making = self.tables.lock(slot.l1_index as u64).await;
        let entry = self.l1_entry(slot.l1_index);
        if entry & COPIED != 0 {
            return Ok(());
        }
        let old = ImageOffset::new(entry & OFFSET_MASK);
        let run = self.allocate(1).await?;
        let new = self.cluster.start_of(ImageCluster::new(run.first));
        let table = new.span(self.cluster.bytes());
        let checks = match self.fill_table(old, table, run.zeroed).await {
            Ok(checks) => checks,
            Err(error) => {
                self.give_back(run).await;
                return Err(error);
            }
        };
        self.refcounts().note_metadata(table);
        // Nobody loads the page of an empty table before it is put into memory below. Else somebody could load it, change
        // it, have it written and evicted, all in between, and the empty one would take its place.
        let _loading = match old.bytes() {
            0 => Some(self.loads.lock(slot.page).await),
            _ => None,
        };
        // Published: readers find the table. It is on the medium before the L1 entry is (commit.rs). A commit waits for the
        // lock, so nobody who uses the table can be told that it is durable before its index is listed.
        {
            let _shared = self.journal().map(|journal| journal.shared());
            if let Some(journal) = self.journal() {
                journal.settle(ImageCluster::new(run.first));
                journal.add_checks(&checks);
                if old.bytes() == 0 {
                    journal.add_zeros(table);
                }
            }
            let mut dirty = lock(&self.l1.dirty);
            self.l1.entries[slot.l1_index].store(new.bytes() | COPIED, Ordering::Release);
            dirty.insert(slot.l1_index);
            drop(dirty);
            if old.bytes() != 0 {
                self.free(old.span(self.cluster.bytes()));
            }
        }
        if old.bytes() == 0 {
            self.insert_empty(slot.page);
        }
        Ok(())
    }

    /// Gives a new L2 table its first content on the storage: zeros, or the table it replaces. A journal wants to know the
    /// checksums of that.
    async fn fill_table(
        &self,
        old: ImageOffset,
        table: ImageSpan,
        zeroed: bool,
    ) -> Result<Vec<SectorChecks>> {
        let context = || format!("{}: can't write a new L2 table at {}", self.name, table.start());
        if old.bytes() != 0 {
            let len = usize::try_from(table.len()).expect("a cluster fits memory");
            let content = self.metadata.read(old, Buffer::for_overwrite(len)).await.context(context)?;
            let has_journal = self.journal().is_some();
            let checks = if has_journal {
                checks_of(table.start(), &content, self.cluster, |_| true)
            } else {
                Vec::new()
            };
            self.metadata.write(table.start(), content).await.context(context)?;
            return Ok(checks);
        } else if !zeroed || self.journal().is_some() {
            // With a journal its entries go home later: space that is missing is to be missed now.
            self.metadata.write_zeroes(table, vellum_core::Zeroes::Allocated).await.context(context)?;
        }
        Ok(Vec::new())
    }

    /// Saves reading back a page of a table that is just made. If it does not fit, it will be read after all. The caller
    /// has held the page's load lock since before anybody could find the table.
    fn insert_empty(&self, number: u64) {
        let page = Page::empty(number, self.page_bytes, self.entries.words());
        let _: Result<(), SetFull> = self.pages.insert(page);
    }

    /// The refcounts, for a moment. Panics when the image is open for reading.
    pub(crate) fn refcounts(&self) -> MutexGuard<'_, Refcounts> {
        lock(self.refcounts.as_ref().expect("only a writer asks"))
    }

    /// Runs an operation on the refcounts, loading the pages it asks for.
    pub(crate) async fn with_refcounts<T>(
        &self,
        mut operation: impl FnMut(&mut Refcounts) -> Result<T, Stop>,
    ) -> Result<T> {
        loop {
            let stop = {
                // What the operation changes belongs together with what it tells the journal.
                let _shared = self.journal().map(|journal| journal.shared());
                match operation(&mut self.refcounts()) {
                    Ok(value) => return Ok(value),
                    Err(stop) => stop,
                }
            };
            match stop {
                Stop::Load(page) => self.load_refcounts(page).await?,
                Stop::Grow(end) => self.reach(end).await?,
                Stop::Reserve(span) => self.reserve_space(span).await?,
                Stop::Failed(error) => {
                    return Err(error.context(format!("{}: can't allocate space", self.name)));
                }
            }
        }
    }

    /// Has the host set space aside, where it can.
    async fn reserve_space(&self, span: ImageSpan) -> Result<()> {
        match self.metadata.preallocate(span).await {
            Err(error) if error.kind() != ErrorKind::Unsupported => {
                return Err(error.context(format!("{}: can't reserve space for refcounts", self.name)));
            }
            _ => self.refcounts().has_space(span),
        }
        Ok(())
    }

    async fn load_refcounts(&self, page: RefcountPage) -> Result<()> {
        let _loading = self.refcount_loads.lock(page.number).await;
        if self.refcounts().has(page) {
            // Somebody else was first. Were it read again all the same, it could be changed, written and evicted
            // meanwhile, and what this read brings would be out of date.
            return Ok(());
        }
        let bytes = self
            .read_metadata(page.span)
            .await
            .context(|| format!("{}: can't read the refcounts at {}", self.name, page.span.start()))?;
        self.refcounts().loaded(page, bytes.to_vec());
        Ok(())
    }

    /// Allocates up to `want` neighbouring clusters. The file reaches their end.
    pub(crate) async fn allocate(&self, want: u64) -> Result<Run> {
        self.with_refcounts(|refcounts| {
            let run = refcounts.allocate(want)?;
            if let Some(journal) = self.journal() {
                journal.owe(run.first, run.count);
            }
            Ok(run)
        })
        .await
    }

    /// Makes the file at least so long. It grows in steps, and never ends within a cluster: were the end within a
    /// sector, a write across it could come out of a crash with its bytes but without the new length, and the sector
    /// would be neither old nor new.
    pub(crate) async fn reach(&self, end: u64) -> Result<()> {
        if self.refcounts().reaches(end) {
            return Ok(());
        }
        let _growing = self.growing.lock().await;
        if self.refcounts().reaches(end) {
            return Ok(());
        }
        // Nobody writes past the end meanwhile: what lies there has not been handed out yet.
        let least = self.cluster.round_up(end.max(self.metadata.len()));
        let step = (least / 8).clamp(*GROWTH_BYTES.start(), *GROWTH_BYTES.end());
        let mut len = self.cluster.max(BlockSize::from_shift(20)).round_up(least + step);
        let mut grown = self.metadata.set_len(len).await;
        if grown.is_err() {
            // Perhaps no file may be so long, but one that holds what is asked for.
            len = least;
            grown = self.metadata.set_len(len).await;
        }
        grown.context(|| format!("{}: can't grow the file", self.name))?;
        self.refcounts().has_grown(len);
        Ok(())
    }

    /// Gives back clusters that no metadata ever named and no host write is still on its way to.
    pub(crate) async fn give_back(&self, run: Run) {
        for cluster in run.first..run.first + run.count {
            if let Err(error) = self.release(ImageCluster::new(cluster), false).await {
                self.state.stop(error); // the cluster is lost until the image is opened anew and repaired
            }
        }
    }

    /// Notes that the active disk no longer uses these bytes of the image. They are given back once that is so on the
    /// medium too and nobody is still reading them. Noted together with the change that frees them.
    pub(crate) fn free(&self, span: ImageSpan) {
        if let Some(journal) = self.journal() {
            journal.freed(span, self.cluster);
        }
        if sabotage::is(Bug::FreedBeforeDurable) {
            self.commits.quarantine.add(self.epochs.now(), vec![span]);
            return;
        }
        self.commits.note_free(span);
    }

    /// The first byte of the guest cluster.
    pub(crate) fn start(&self, cluster: GuestCluster) -> GuestOffset {
        self.cluster.start_of(cluster)
    }
}
