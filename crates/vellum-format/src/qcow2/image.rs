//! The open image: what is in memory, which locks protect it, and how a page is loaded.
//!
//! ```text
//!   guest cluster ──► L1 entry (atomic) ──► page of an L2 table (atomic words) ──► Units ──► host cluster
//!                          │                      │
//!                          │ none: everything     │ not in memory: loaded once, by the first request
//!                          ▼ is in the disk below ▼
//! ```
//!
//! Locks, in the order in which they may be held together. None is held across I/O except the keyed ones,
//! which are made for that; a task holds one of those at a time.
//!
//! 1. claims on guest clusters (`claims.rs`), ascending;
//! 2. the table lock of an L1 index: making or copying an L2 table;
//! 3. the load lock of a page;
//! 4. the gate, shared by changes of metadata in memory, and held alone by the seal of a commit;
//! 5. short in-memory locks: refcounts, a page's state and within it the list of dirty pages, the lists of
//!    dirty L1 entries and freed clusters.
//!
//! Everything that belongs to one change (an entry, the list that its page is on, the cluster that it frees,
//! what the journal records) is changed under one hold of the shared gate. So a seal has all of a change or
//! nothing of it, with a journal and without one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use arc_swap::Guard;
use futures_lite::future::yield_now;
use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestCluster, GuestOffset, GuestSpan, ImageCluster,
    ImageOffset, ImageSpan, Result, SharedDisk, SharedStorage,
};

use super::bitmaps::track::Tracking;
use super::compressed::Decompressor;
use super::contradiction::Contradiction;
use super::entry::{ClusterState, Entries, Words};
use super::header::Header;
use super::header_state::HeaderState;
use super::journal::{Journal, SectorChecks, checks_of};
use super::late::Late;
use super::layout::{COPIED, OFFSET_MASK};
use super::mapping::Mapping;
use super::pages::{Evicted, Page, SetFull};
use super::prepare::Prepare;
use super::quarantine::Quarantine;
use super::refcount::{Look, RefcountPage, Refcounts, Run, Stop};
use crate::engine::{Commit as _, Engine};
use crate::image::FileGrowth;
use crate::keyed::KeyedLocks;
use crate::luks::{GuestCipher, OldCipher};
use crate::perturb;
use crate::session::CacheId;
use crate::state::lock;

/// When this many pages of refcounts are dirty, the next writer commits.
const REFCOUNT_PAGES_DIRTY_MAX: usize = 512;

/// The file grows by an eighth of its size at a time, within these bounds, or by more if the caller says so. The excess is cut off when the
/// image is closed. Allocations on all workers wait meanwhile. The file grows by a hole.
const GROWTH_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=64 << 20;

/// An open qcow2 image.
pub struct Qcow2 {
    pub(crate) engine: Engine<ImageSpan>,
    pub(crate) header: HeaderState,
    pub(crate) cluster: BlockSize,
    pub(crate) entries: Entries,
    /// The image file, for metadata.
    pub(crate) metadata: SharedStorage,
    /// The image file again, for reads of tables: through the cache that keeps them, if there is one.
    pub(crate) tables: SharedStorage,
    /// The image file again, for the writes of checkpoints.
    pub(crate) checkpoint_storage: SharedStorage,
    /// The storage of guest data: the image file again, or the external data file.
    pub(crate) data: SharedStorage,
    /// As above, for reading what is not encrypted there: the same storage, where nothing is.
    pub(crate) plain: SharedStorage,
    /// How guest data is encrypted, if it is.
    pub(crate) encrypted: Option<GuestCipher>,
    /// As above, in the old scheme, which is only read: a sector has its number in the disk.
    pub(crate) old_cipher: Option<OldCipher>,
    pub(crate) has_data_file: bool,
    pub(crate) below: Option<SharedDisk>,
    /// The same, for reads that complete a cluster.
    pub(crate) fills: Option<SharedDisk>,
    pub(crate) mapping: Mapping,
    pub(crate) refcount_loads: KeyedLocks,
    /// Units whose place an older write may still reach.
    pub(crate) late: Late,
    /// `None` when the image is open read-only.
    pub(crate) refcounts: Option<Mutex<Refcounts>>,
    /// Shared by changes of the metadata in memory, alone for a seal.
    pub(crate) gate: RwLock<()>,
    /// Clusters whose freeing is durable.
    pub(crate) quarantine: Quarantine,
    /// `None` when the image is to have no journal, or is open read-only.
    pub(crate) journal: Option<Journal>,
    /// Space prepared ahead of need.
    pub(crate) prepare: Prepare,
    pub(crate) decompressor: Decompressor,
    pub(crate) growing: async_lock::Mutex<()>,
    pub(crate) growth: FileGrowth,
    /// Up to where the host has found space, in bytes of the file; 0 before it has for any.
    pub(crate) space_end: AtomicU64,
    pub(crate) contradiction: Contradiction,
    /// Bitmaps that are kept up.
    pub(crate) tracking: Tracking,
    /// The flash cache that it is open with.
    pub(crate) flash: Option<CacheId>,
}

/// The mapping needs this page, which is not in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Missing(pub(crate) u64);

impl Qcow2 {
    /// The part of the run that lies in its first cluster, and the rest.
    pub(crate) fn first_part(&self, span: GuestSpan) -> (GuestSpan, GuestSpan) {
        span.split_at(self.cluster.bytes() - self.cluster.within(span.start()))
    }

    /// The state of a guest cluster, from memory alone. Never waits, and holds nothing.
    pub(crate) fn lookup(&self, cluster: GuestCluster) -> Result<Result<ClusterState, Missing>> {
        let slot = self.mapping.slot(cluster);
        if self.mapping.l1_entry(slot.l1_index) == 0 {
            return Ok(Ok(ClusterState::Plain(Default::default())));
        }
        match self.mapping.page(slot.page) {
            Some(page) => {
                let page = page.as_ref().expect("a found page is there");
                self.decode(cluster, page.entry(slot.index)).map(Ok)
            }
            None => Ok(Err(Missing(slot.page))),
        }
    }

    pub(crate) fn decode(&self, cluster: GuestCluster, words: Words) -> Result<ClusterState> {
        let state = self.entries.decode(words);
        state
            .and_then(|state| self.entries.check_place(cluster, state).map(|()| state))
            .context(|| {
                let at = self.cluster.start_of(cluster);
                format!(
                    "{}: the mapping of the disk at {at} is damaged: run `vellum check`",
                    self.engine.name
                )
            })
            .map_err(|error| self.contradicts(error))
    }

    /// The state of a guest cluster. Loads the page if necessary.
    pub(crate) async fn look(&self, cluster: GuestCluster) -> Result<ClusterState> {
        loop {
            match self.lookup(cluster)? {
                Ok(state) => return Ok(state),
                Err(Missing(page)) => self.load(page).await?,
            }
        }
    }

    /// The current place of a page, if its table exists.
    pub(crate) fn page_place(&self, page: u64) -> Result<Option<ImageSpan>> {
        let (index, within) = self.mapping.table_of(page);
        let entry = self.mapping.l1_entry(index);
        let table = ImageOffset::new(entry & OFFSET_MASK);
        if entry == 0 {
            return Ok(None);
        }
        if !self.cluster.aligns(table) {
            return Err(self.contradicts(Error::corrupt(format!(
                "{}: entry {index} of the L1 table is impossible ({entry:#x}): run `vellum check`",
                self.engine.name
            ))));
        }
        self.refuse_misnamed(index)?;
        Ok(Some((table + within).span(self.mapping.page_bytes() as u64)))
    }

    /// Refuses an L1 entry that names other metadata as its L2 table. Writing entries to a refcount block, to
    /// the header or to a snapshot's table would destroy the image.
    fn refuse_misnamed(&self, index: usize) -> Result<()> {
        if !self.mapping.is_misnamed(index) {
            return Ok(());
        }
        Err(self.contradicts(Error::corrupt(format!(
            "{}: entry {index} of the L1 table names other metadata as its L2 table: run `vellum check`",
            self.engine.name
        ))))
    }

    /// Brings a page into memory, unless it is already there or has no table.
    pub(crate) async fn load(&self, number: u64) -> Result<()> {
        loop {
            {
                let _loading = self.mapping.loading(number).await;
                if self.mapping.has_page(number) {
                    return Ok(());
                }
                let Some(place) = self.page_place(number)? else { return Ok(()) };
                let page = self.read_page(number, place).await?;
                if self.mapping.insert(page) == Ok(()) {
                    return Ok(());
                }
            }
            self.commit().await?; // every page of the set is dirty: write them, then there is room
        }
    }

    async fn read_page(&self, number: u64, place: ImageSpan) -> Result<Arc<Page>> {
        if place.end().bytes() > self.metadata.len().next_multiple_of(self.cluster.bytes()) {
            return Err(self.contradicts(Error::corrupt(format!(
                "{}: an L2 table lies at {}, past the end of the file: it was truncated",
                self.engine.name,
                place.start()
            ))));
        }
        let context = || format!("{}: can't read the L2 table at {}", self.engine.name, place.start());
        let bytes = self.read_metadata(place).await.context(context)?;
        let page = Page::from_bytes(number, &bytes, self.entries.words());
        if self.refcounts.is_some() {
            self.refuse_overlaps(&page, place)?;
        }
        Ok(page)
    }

    /// A page of metadata as of its last commit.
    async fn read_metadata(&self, place: ImageSpan) -> Result<Arc<[u8]>> {
        if let Some(page) = self.journal().and_then(|journal| journal.common.uncheckpointed(place.start())) {
            return Ok(page);
        }
        let len = usize::try_from(place.len()).expect("a page is small");
        let buffer = self.tables.read(place.start(), Buffer::for_overwrite(len)).await?;
        Ok(Arc::from(buffer.contiguous().slice()))
    }

    /// Refuses a page whose entries would send guest writes into the image's own metadata.
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
                drop(refcounts);
                return Err(self.contradicts(Error::corrupt(format!(
                    "{}: an entry of the L2 table at {} points to metadata at {host}: run `vellum check`",
                    self.engine.name,
                    place.start()
                ))));
            }
        }
        Ok(())
    }

    /// The page in memory, loaded if necessary. Its table must exist.
    async fn page(&self, number: u64) -> Result<Guard<Option<Arc<Page>>>> {
        loop {
            if let Some(page) = self.mapping.page(number) {
                return Ok(page);
            }
            if self.page_place(number)?.is_none() {
                return Err(Error::corrupt(format!(
                    "{}: an L1 entry does not name a table: run `vellum check`",
                    self.engine.name
                )));
            }
            self.load(number).await?;
        }
    }

    /// Replaces the entry of a guest cluster by what `change` makes of its state, and returns the state
    /// before. The L2 table must exist and be this image's own ([`Qcow2::own_table`]). From here on readers
    /// see the new entry. The next commit makes it durable, together with what `with` records, which gets the
    /// state before.
    pub(crate) async fn publish(
        &self,
        cluster: GuestCluster,
        change: impl Fn(ClusterState) -> ClusterState,
        with: impl Fn(ClusterState),
    ) -> Result<ClusterState> {
        let slot = self.mapping.slot(cluster);
        loop {
            let page = self.page(slot.page).await?;
            let page = page.as_ref().expect("a found page is there");
            let mut before = None;
            let change = |words| {
                let state = self.decode(cluster, words)?;
                before = Some(state);
                with(state);
                perturb::in_a_change();
                match change(state) {
                    ClusterState::Plain(units) => Ok(self.entries.encode(units)),
                    same if same == state => Ok(words),
                    ClusterState::Compressed(span) => self.entries.encode_compressed(span),
                }
            };
            let _shared = self.shared();
            let note = |bytes, was_clean| {
                if was_clean {
                    self.mapping.list_dirty(page);
                }
                if let Some(journal) = self.journal() {
                    journal.common.add_words(bytes);
                }
            };
            match page.update(slot.index, change, note) {
                Err(Evicted) => continue,
                Ok(Err(error)) => return Err(error),
                Ok(Ok(_)) => return Ok(before.expect("the change was asked")),
            }
        }
    }

    /// Held during changes that belong together. A task must not take it twice, nor hold it across an await.
    #[track_caller]
    pub(crate) fn shared(&self) -> RwLockReadGuard<'_, ()> {
        perturb::point();
        self.gate.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held during a seal: no change is half done meanwhile.
    #[track_caller]
    pub(crate) fn alone(&self) -> RwLockWriteGuard<'_, ()> {
        perturb::point();
        self.gate.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The journal, if this image is being written with one.
    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref().filter(|journal| journal.common.is_on())
    }

    /// Whether enough metadata waits to be written that the next writer should commit.
    pub(crate) fn has_much_dirty(&self) -> bool {
        let (pages, record_bytes) = {
            let refcounts = self.refcounts();
            (refcounts.dirty_pages(), refcounts.record_bytes())
        };
        pages >= REFCOUNT_PAGES_DIRTY_MAX
            || self.mapping.has_much_dirty()
            || self.journal().is_some_and(|journal| journal.fills_a_record(record_bytes))
    }

    /// Whether the external data file must read as the disk does.
    pub(crate) fn data_file_is_raw(&self) -> bool {
        self.has_data_file && self.header.read(Header::data_file_is_raw)
    }

    /// Makes sure that the L2 table of a guest cluster exists and belongs to the active disk alone, so that
    /// its entries may be changed.
    pub(crate) async fn own_table(&self, cluster: GuestCluster) -> Result<()> {
        let slot = self.mapping.slot(cluster);
        self.refuse_misnamed(slot.l1_index)?;
        if self.mapping.l1_entry(slot.l1_index) & COPIED != 0 {
            return Ok(());
        }
        let _making = self.mapping.making_table(slot.l1_index).await;
        let entry = self.mapping.l1_entry(slot.l1_index);
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
        // No other task may load the page of an empty table before it is put into memory below. Otherwise
        // that page could be loaded, changed, written and evicted in between, and the empty page would take
        // its place.
        let _loading = match old.bytes() {
            0 => Some(self.mapping.loading(slot.page).await),
            _ => None,
        };
        // Published: readers find the table. It is on the medium before the L1 entry is (`commit.rs`). A
        // commit waits for this lock, so no commit can report the table's entries as durable before its index
        // is listed.
        {
            let _shared = self.shared();
            if let Some(journal) = self.journal() {
                journal.remove_pending(ImageCluster::new(run.first));
                journal.common.add_checks(&checks);
                if old.bytes() == 0 {
                    journal.common.add_zeros(table);
                }
            }
            self.mapping.set_l1_entry(slot.l1_index, new.bytes() | COPIED);
            if old.bytes() != 0 {
                self.free(old.span(self.cluster.bytes()));
            }
        }
        if old.bytes() == 0 {
            self.insert_empty(slot.page);
        }
        Ok(())
    }

    /// Writes the first content of a new L2 table to the storage: zeros, or the table it replaces. Returns
    /// the checksums of that for the journal.
    async fn fill_table(
        &self,
        old: ImageOffset,
        table: ImageSpan,
        zeroed: bool,
    ) -> Result<Vec<SectorChecks>> {
        let context = || format!("{}: can't write a new L2 table at {}", self.engine.name, table.start());
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
            // With a journal the entries are checkpointed later, so missing space must show now.
            self.metadata.write_zeroes(table, vellum_core::Zeroes::Allocated).await.context(context)?;
        }
        Ok(Vec::new())
    }

    /// Puts the page of a new table into memory, which saves reading it back. A page that does not fit is
    /// read later. The caller has held the page's load lock since before the table could be found.
    fn insert_empty(&self, number: u64) {
        let page = Page::empty(number, self.mapping.page_bytes(), self.entries.words());
        let _: Result<(), SetFull> = self.mapping.insert(page);
    }

    /// The refcounts, locked for a moment. Panics when the image is open read-only.
    pub(crate) fn refcounts(&self) -> MutexGuard<'_, Refcounts> {
        lock(self.refcounts.as_ref().expect("only a writer asks"))
    }

    /// Runs an operation on the refcounts, and loads the pages it needs.
    pub(crate) async fn with_refcounts<T>(
        &self,
        mut operation: impl FnMut(&mut Refcounts) -> Result<T, Stop>,
    ) -> Result<T> {
        loop {
            let stop = {
                // Under the gate: what the operation changes belongs together with what it records in the
                // journal.
                let _shared = self.shared();
                match operation(&mut self.refcounts()) {
                    Ok(value) => return Ok(value),
                    Err(stop) => stop,
                }
            };
            match stop {
                Stop::Load(page) => self.load_refcounts(page).await?,
                Stop::Grow(end) => match self.reach(end).await {
                    Err(error) if error.kind() == ErrorKind::NoSpace && self.has_nothing_behind() => {}
                    reached => reached?,
                },
                Stop::Reserve(span) => self.reserve_space(span).await?,
                Stop::Failed(error) => {
                    let error = error.context(format!("{}: can't allocate space", self.engine.name));
                    return Err(match error.kind() {
                        ErrorKind::Corrupt => self.contradicts(error),
                        _ => error,
                    });
                }
            }
        }
    }

    /// Asks the host to reserve space, where it can.
    async fn reserve_space(&self, span: ImageSpan) -> Result<()> {
        match self.metadata.preallocate(span).await {
            Err(error) if error.kind() != ErrorKind::Unsupported => {
                return Err(error.context(format!("{}: can't reserve space for refcounts", self.engine.name)));
            }
            _ => self.refcounts().has_space(span),
        }
        Ok(())
    }

    async fn load_refcounts(&self, page: RefcountPage) -> Result<()> {
        let _loading = self.refcount_loads.lock(page.number).await;
        if self.refcounts().has(page) {
            // Another task was first. A second read could become stale, because the page in memory may be
            // changed, written and evicted meanwhile.
            return Ok(());
        }
        let bytes = self
            .read_metadata(page.span)
            .await
            .context(|| format!("{}: can't read the refcounts at {}", self.engine.name, page.span.start()))?;
        self.refcounts().loaded(page, bytes.to_vec());
        Ok(())
    }

    /// Allocates up to `want` adjacent clusters. The file reaches their end.
    pub(crate) async fn allocate(&self, want: u64) -> Result<Run> {
        let (run, is_searched) = self
            .with_refcounts(|refcounts| {
                let run = refcounts.allocate(want)?;
                if let Some(journal) = self.journal() {
                    journal.add_pending(run.first, run.count);
                }
                Ok((run, refcounts.is_searched()))
            })
            .await?;
        self.find_space(run).await;
        if is_searched && !self.quarantine.is_tended() {
            self.look_for_space().await;
        }
        Ok(run)
    }

    fn has_nothing_behind(&self) -> bool {
        self.refcounts().has_nothing_behind()
    }

    /// As below, in the background.
    pub(crate) async fn look_for_space_in_background(&self) -> bool {
        let is_well = self.engine.state.check_open().is_ok() && self.engine.state.check_stopped().is_ok();
        is_well && self.look_for_space().await
    }

    /// Looks through some of the refcounts for free clusters while the search is long. Returns whether there
    /// is more to look through.
    pub(crate) async fn look_for_space(&self) -> bool {
        let Some(refcounts) = &self.refcounts else { return false };
        let is_newer = |at| self.journal().is_some_and(|journal| journal.common.uncheckpointed(at).is_some());
        let Some(look) = lock(refcounts).begin_look(is_newer) else {
            yield_now().await; // another task may be looking
            return lock(refcounts).is_searched();
        };
        let mut looking = Looking { refcounts, look, judged: Vec::new() };
        let len = usize::try_from(looking.look.span.len()).expect("a look is short");
        // A page that cannot be read is skipped: an allocation that needs it will report the error.
        let at = looking.look.span.start();
        let Ok(bytes) = self.metadata.read(at, Buffer::for_overwrite(len)).await else { return false };
        looking.judged = looking.look.judge(bytes.slice());
        drop(looking);
        lock(refcounts).is_searched()
    }

    /// Makes the file at least this long. It grows in steps, and never ends within a cluster. If it ended
    /// within a sector, a crash could leave the bytes of a write across the end without the new length, and
    /// the sector would be neither old nor new.
    pub(crate) async fn reach(&self, end: u64) -> Result<()> {
        if self.refcounts().reaches(end) {
            return Ok(());
        }
        let _growing = self.growing.lock().await;
        if self.refcounts().reaches(end) {
            return Ok(());
        }
        // No write goes past the end meanwhile: the clusters there have not been handed out yet.
        let least = self.cluster.round_up(end.max(self.metadata.len()));
        let step = (least / 8).clamp(*GROWTH_BYTES.start(), *GROWTH_BYTES.end()).max(self.growth.least());
        let mut len = self.cluster.max(BlockSize::from_shift(20)).round_up(least + step);
        let mut grown = self.metadata.set_len(len).await;
        if grown.is_err() {
            // Perhaps a file of this length is not allowed, but one that holds just what is needed is.
            len = least;
            grown = self.metadata.set_len(len).await;
        }
        grown.context(|| format!("{}: can't grow the file", self.engine.name))?;
        self.refcounts().has_grown(len);
        Ok(())
    }

    /// Has the host find space for these clusters, and for those that will follow. They were handed out before, so that writes that wait
    /// here lie in the order in which they began.
    async fn find_space(&self, run: Run) {
        let FileGrowth::Allocated { space_bytes, .. } = self.growth else { return };
        let (start, end) =
            (run.first << self.cluster.shift(), (run.first + run.count) << self.cluster.shift());
        if end <= self.space_end.load(Ordering::Relaxed) {
            return;
        }
        let _growing = self.growing.lock().await;
        let from = self.space_end.load(Ordering::Relaxed);
        if end <= from {
            return;
        }
        let from = if from == 0 { start } else { from };
        let until = (end.max(from) + space_bytes).min(self.metadata.len());
        // A host that cannot finds space when it is written to; for want of space a write may still fail, and say so.
        let _ = self.metadata.preallocate(ImageOffset::new(from).span(until - from)).await;
        self.space_end.store(until, Ordering::Relaxed);
    }

    /// Gives back clusters that no metadata ever named and to which no host write is still in flight.
    pub(crate) async fn give_back(&self, run: Run) {
        for cluster in run.first..run.first + run.count {
            if let Err(error) = self.release(ImageCluster::new(cluster), false).await {
                self.engine.state.stop(error); // the cluster is lost until the image is reopened and repaired
            }
        }
    }

    /// Records that the active disk no longer uses these bytes of the image. They are given back once that is
    /// durable and no request still reads them. Recorded together with the change that frees them.
    pub(crate) fn free(&self, span: ImageSpan) {
        if let Some(journal) = self.journal() {
            journal.freed(span, self.cluster);
        }
        self.engine.commits.note_freed(span);
    }

    /// The first byte of the guest cluster.
    pub(crate) fn start(&self, cluster: GuestCluster) -> GuestOffset {
        self.cluster.start_of(cluster)
    }
}

/// A look at refcounts. It ends when this is dropped, whatever its outcome.
struct Looking<'a> {
    refcounts: &'a Mutex<Refcounts>,
    look: Look,
    judged: Vec<bool>,
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        lock(self.refcounts).end_look(&self.look, &self.judged);
    }
}
