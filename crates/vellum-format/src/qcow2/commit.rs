//! The order in which metadata reaches the medium. All of it stands here.
//!
//! Metadata changes in memory first, where readers see them at once ("published"). A *commit* takes everything that was
//! changed until then and writes it in stages, each made durable by a host flush before the next:
//!
//! ```text
//!   seal      copy, in this order: freed clusters, L1, L2 pages, refcounts      (a change seen in a later copy may be
//!                                                                                missing in an earlier one, never the
//!                                                                                other way round)
//!   stage 1   refcount pages, a moved refcount table      ── flush ──           also makes all guest data durable
//!   stage 2   refcount table entries, or the header       ── flush ──           only when blocks were added
//!   stage 3   L2 pages, L1 entries                        ── flush ──           commit point
//!   after     what was freed may be given back, once nobody reads it any more
//! ```
//!
//! Invariants, for the medium at every moment:
//!
//! 1. An L2 entry names a cluster only if its refcount, its data and its refcount block's place are durable (1, 2
//!    before 3).
//! 2. An L1 entry names a table only if its refcount is durable, and so is its first content: zeros, or a copy of the
//!    table it replaces (written when the table was made, before stage 1's flush).
//! 3. A refcount is lowered, and the cluster's bytes are punched or reused, only after the metadata that named it was
//!    replaced durably (freed in an earlier commit) and after every request has left that may have looked it up.
//! 4. So whatever a crash leaves, no reachable cluster has a refcount too low; too high it may be, which the dirty bit
//!    tells and the next opening repairs.
//!
//! That is the ordered way. An image with a journal goes another one, with one flush (`journal/commit.rs`); both begin with
//! the same seal.
//!
//! One commit runs at a time; flushes that arrive meanwhile share the next one. With nothing to write a flush is one
//! host flush, and none when nothing was written since the last. A failed metadata *write* fails the flushes that waited
//! for it and is tried again by the next; a failed *flush* stops the image for good.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vellum_core::{
    Buffer, Clock, Context, Error, ErrorKind, ImageOffset, ImageSpan, LocalFuture, Result, SharedStorage,
    try_join_all,
};

use super::image::{Qcow2, lock};
use super::journal::{Changed, Journal};
use super::layout::{autoclear, incompatible, put64};
use super::pages::Page;
use super::quarantine::{Pace, Quarantine};
use super::refcount::SealedRefcounts;
use crate::sabotage::{self, Bug};
use crate::turns::Turns;

/// This many metadata writes are under way at once.
const WRITES_AT_ONCE: usize = 32;
/// L1 entries are written in sectors of this many.
const L1_SECTOR_ENTRIES: usize = 64;

/// Who commits, who waits, and what was freed.
#[derive(Default)]
pub(crate) struct Commits {
    turns: Turns,
    /// Freed since the last seal.
    freed: Mutex<Vec<ImageSpan>>,
    pub(crate) quarantine: Quarantine,
    /// Changes of the storage that have completed.
    changes: AtomicU64,
    /// The value of `changes` that the last good host flush covers.
    covered: AtomicU64,
}

impl Commits {
    /// With a clock by which those who flush wait for one another.
    pub(crate) fn new(clock: Option<Arc<dyn Clock>>) -> Self {
        Self { turns: Turns::with_clock(clock), ..Self::default() }
    }

    /// Notes that bytes of the storage were changed by a request that is about to return.
    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn note_free(&self, span: ImageSpan) {
        lock(&self.freed).push(span);
    }

    /// Whether clusters wait to be given back.
    pub(crate) fn has_quarantine(&self) -> bool {
        !lock(&self.freed).is_empty() || !self.quarantine.is_empty()
    }

    /// Whether the last host flush covers all of this many changes.
    fn covers(&self, changes: u64) -> bool {
        self.covered.load(Ordering::Acquire) == changes
    }

    /// How many changes there have been, and how many of them a host flush covers.
    pub(crate) fn changes(&self) -> (u64, u64) {
        (self.changes.load(Ordering::Acquire), self.covered.load(Ordering::Acquire))
    }
}

/// A page of the mapping as it is to be written.
pub(crate) struct SealedPage {
    page: Arc<Page>,
    pub(crate) at: ImageOffset,
    pub(crate) bytes: Vec<u8>,
    pub(crate) changed: Changed,
}

/// Copies of everything that a commit writes.
pub(crate) struct Sealed {
    freed: Vec<ImageSpan>,
    /// Sectors of the L1 table: where, what, and the indexes of the entries that have changed.
    pub(crate) l1: Vec<(ImageOffset, Vec<u8>, Vec<usize>)>,
    pub(crate) pages: Vec<SealedPage>,
    pub(crate) refcounts: SealedRefcounts,
}

impl Sealed {
    fn has_mapping(&self) -> bool {
        !self.l1.is_empty() || !self.pages.is_empty()
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.has_mapping() && self.refcounts.pages.is_empty() && self.refcounts.table.is_empty()
    }
}

impl Qcow2 {
    /// Makes durable every change that was published before the call.
    pub(crate) async fn commit(&self) -> Result<()> {
        let abandoned = || {
            let why = Error::new(ErrorKind::Poisoned, "a commit was abandoned half way: reopen the image");
            self.state.stop(why.clone());
            Some(why)
        };
        self.commits.turns.share(async || self.lead().await, abandoned).await
    }

    async fn lead(&self) -> Result<()> {
        self.state.check_stopped()?;
        let covers = self.commits.changes.load(Ordering::Acquire);
        if let Some(journal) = self.journal() {
            let result = self.lead_journaled(journal, covers).await;
            return result.map_err(|error| {
                let why = error
                    .context(format!("{}: the journal could not be written; reopen the image", self.name));
                let why = why.with_kind(ErrorKind::Poisoned);
                self.state.stop(why.clone());
                why
            });
        }
        // What a seal has taken up when it fails is on no list any more: nobody may believe that it was written.
        let sealed = self.seal().inspect_err(|error| self.state.stop(error.clone()))?;
        let result = match sealed.is_empty() {
            true => self.flush_unless_covered(covers).await,
            false => self.write_sealed(&sealed).await,
        };
        self.settle(sealed, covers, result)
    }

    /// The same with a journal. Any failure stops the image.
    async fn lead_journaled(&self, journal: &Journal, covers: u64) -> Result<()> {
        let (mut sealed, mut transaction) = match sabotage::is(Bug::SealHalf) {
            false => self.seal_transaction(journal)?,
            true => {
                let sealed = self.seal()?;
                self.flush_storage().await?; // others run meanwhile
                let transaction = self.transaction_of(journal, &sealed);
                (sealed, transaction)
            }
        };
        if transaction.is_none() && !self.commits.covers(covers) && journal.has_chores() {
            // The flush is due in any case: a record that goes with it costs nothing else.
            journal.do_chores();
            (sealed, transaction) = self.seal_transaction(journal)?;
        }
        let result = match transaction {
            None => self.flush_unless_covered(covers).await,
            Some(transaction) => self.commit_transaction(journal, &sealed, transaction).await,
        };
        self.settle(sealed, covers, result)
    }

    /// A host flush, unless nothing was changed since the last one began.
    async fn flush_unless_covered(&self, covers: u64) -> Result<()> {
        match self.commits.covers(covers) {
            true => Ok(()),
            false => self.flush_storage().await,
        }
    }

    /// Copies what is dirty, in the order that the module gives.
    pub(crate) fn seal(&self) -> Result<Sealed> {
        let freed = std::mem::take(&mut *lock(&self.commits.freed));
        let l1 = self.seal_l1();
        let dirty = std::mem::take(&mut *lock(&self.dirty));
        let mut pages = Vec::with_capacity(dirty.len());
        for page in dirty.into_values() {
            let place = self.page_place(page.number())?.expect("a changed page has a table");
            let (bytes, changed) = page.seal();
            pages.push(SealedPage { page, at: place.start(), bytes, changed });
        }
        pages.sort_by_key(|page| page.at);
        let refcounts = self.refcounts().seal();
        Ok(Sealed { freed, l1, pages, refcounts })
    }

    fn seal_l1(&self) -> Vec<(ImageOffset, Vec<u8>, Vec<usize>)> {
        let dirty = std::mem::take(&mut *lock(&self.l1.dirty));
        let mut sectors: Vec<(ImageOffset, Vec<u8>, Vec<usize>)> = Vec::new();
        let mut last = None;
        for index in dirty {
            let sector = index / L1_SECTOR_ENTRIES;
            if last == Some(sector) {
                sectors.last_mut().expect("there is one").2.push(index);
                continue;
            }
            last = Some(sector);
            let first = sector * L1_SECTOR_ENTRIES;
            let end = self.l1.entries.len().min(first + L1_SECTOR_ENTRIES);
            let mut bytes = vec![0; (end - first) * 8];
            for (i, entry) in self.l1.entries[first..end].iter().enumerate() {
                put64(&mut bytes, i * 8, entry.load(Ordering::Acquire));
            }
            sectors.push((self.l1.at + first as u64 * 8, bytes, vec![index]));
        }
        sectors
    }

    /// Writes what was sealed in the ordered way.
    pub(crate) async fn write_sealed(&self, sealed: &Sealed) -> Result<()> {
        let refcounts = &sealed.refcounts;
        let moved = refcounts.moved_to;
        // Stage 1.
        let pages = refcounts.pages.iter().map(|page| (page.at, &page.bytes[..]));
        let table = refcounts.table.iter().map(|(at, bytes)| (*at, &bytes[..]));
        let with_pages = moved.is_some().then(|| table.clone()).into_iter().flatten();
        self.write_all(&self.metadata, pages.chain(with_pages), "refcounts").await?;
        self.flush_storage().await?;
        // Stage 2.
        if let Some(place) = moved {
            self.change_header(|header| header.set_refcount_table(place)).await?;
            self.flush_storage().await?;
        } else if !refcounts.table.is_empty() {
            self.write_all(&self.metadata, table, "the refcount table").await?;
            self.flush_storage().await?;
        }
        // Stage 3.
        if sealed.has_mapping() {
            let l1 = sealed.l1.iter().map(|(at, bytes, _)| (*at, &bytes[..]));
            let pages = sealed.pages.iter().map(|page| (page.at, &page.bytes[..]));
            self.write_all(&self.metadata, l1.chain(pages), "the mapping").await?;
            self.flush_storage().await?; // commit point
        }
        Ok(())
    }

    /// Writes parts of the image, neighbours as one.
    pub(crate) async fn write_all<'a>(
        &self,
        storage: &SharedStorage,
        parts: impl Iterator<Item = (ImageOffset, &'a [u8])>,
        what: &str,
    ) -> Result<()> {
        let mut parts = parts.peekable();
        while parts.peek().is_some() {
            let mut batch: Vec<LocalFuture<'_, Result<()>>> = Vec::new();
            while let Some((at, bytes)) = parts.next().filter(|_| batch.len() < WRITES_AT_ONCE) {
                // Neighbours go out as one write.
                let mut data = Buffer::copy_of(bytes);
                while let Some((_, next)) = parts.next_if(|(next, _)| *next == at + data.len() as u64) {
                    data.append(Buffer::copy_of(next));
                }
                batch.push(storage.write(at, data));
                if batch.len() == WRITES_AT_ONCE {
                    break;
                }
            }
            try_join_all(batch).await.context(|| format!("{}: can't write {what}", self.name))?;
        }
        Ok(())
    }

    /// Makes durable what was written to the image and to its data file. A failure stops the image.
    pub(crate) async fn flush_storage(&self) -> Result<()> {
        let flushed = match self.has_data_file {
            true => try_join_all([self.data.flush(), self.metadata.flush()]).await.map(drop),
            false => self.data.flush().await,
        };
        if sabotage::is(Bug::FlushErrorIgnored) {
            return Ok(());
        }
        flushed.map_err(|error| {
            let why = error.context(format!("{}: a host flush failed; reopen the image", self.name));
            let why = why.with_kind(ErrorKind::Poisoned);
            self.state.stop(why.clone());
            why
        })
    }

    /// Takes note of how the commit ended.
    fn settle(&self, sealed: Sealed, covers: u64, result: Result<()>) -> Result<()> {
        let failed = result.is_err();
        for SealedPage { page, .. } in &sealed.pages {
            page.written(failed, || self.list_dirty(page));
        }
        let Sealed { freed, l1, mut refcounts, .. } = sealed;
        let old_tables = if failed { Vec::new() } else { std::mem::take(&mut refcounts.old_tables) };
        self.refcounts().written(refcounts, failed);
        if failed {
            lock(&self.l1.dirty).extend(l1.into_iter().flat_map(|(_, _, indexes)| indexes));
            lock(&self.commits.freed).extend(freed);
            return result;
        }
        self.commits.covered.fetch_max(covers, Ordering::AcqRel);
        // The old places of the refcount table were named by the header until now.
        if let Some(journal) = self.journal() {
            let _shared = journal.shared();
            old_tables.iter().for_each(|table| journal.freed(*table, self.cluster));
        }
        let freed: Vec<ImageSpan> = freed.into_iter().chain(old_tables).collect();
        if !freed.is_empty() {
            self.commits.quarantine.add(self.epochs.now(), freed);
        }
        Ok(())
    }

    /// Marks the image as being written, before its first change: sets the dirty bit (version 3), so that whoever opens
    /// it after a crash repairs the refcounts, and clears the autoclear bits of what this program does not keep up. With a
    /// journal, that is begun instead.
    pub(crate) async fn begin_change(&self) -> Result<()> {
        if self.is_marked.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut marked = self.marked.lock().await;
        if *marked {
            return Ok(());
        }
        if let Some(end) = { self.refcounts().end() } {
            self.reach(end).await?;
        }
        let has_journal = self.begin_journal().await?;
        if !has_journal && lock(&self.header).version() >= 3 {
            self.change_header(|header| {
                let autoclear = header.autoclear & autoclear::KEPT;
                header.set_features(header.incompatible | incompatible::DIRTY, autoclear);
            })
            .await?;
            self.flush_storage().await?;
        }
        *marked = true;
        self.is_marked.store(true, Ordering::Release);
        Ok(())
    }

    /// Whether the image has been marked as being written.
    pub(crate) fn is_changed(&self) -> bool {
        self.is_marked.load(Ordering::Acquire)
    }

    /// Cuts the file to the end of what was ever in use, or of `keep`.
    pub(crate) async fn cut_to_end(&self, keep: ImageSpan) -> Result<()> {
        let end = { self.refcounts().end() }.map(|end| end.max(keep.end().bytes()));
        match end.filter(|end| *end < self.metadata.len()) {
            Some(end) => {
                let context = || format!("{}: can't cut the file to its end", self.name);
                self.metadata.set_len(end).await.context(context)
            }
            None => Ok(()),
        }
    }

    /// Writes a changed header; in memory it changes when the write has succeeded. Not durable before the next flush.
    pub(crate) async fn change_header(&self, change: impl FnOnce(&mut super::header::Header)) -> Result<()> {
        let mut new = lock(&self.header).clone();
        change(&mut new);
        let sector = new.first_sector();
        self.metadata
            .write(ImageOffset::ZERO, sector)
            .await
            .context(|| format!("{}: can't write the header", self.name))?;
        *lock(&self.header) = new;
        Ok(())
    }

    /// Everything home, everything freed given back, and the dirty bit cleared. When that failed once it is not tried
    /// again, nor taken for done: the image stays marked, and the next opening repairs it.
    pub(crate) async fn close_image(&self) -> Result<()> {
        if self.geometry.read_only {
            self.state.close();
            return Ok(());
        }
        self.state.check_stopped()?;
        if !self.state.close() {
            return Ok(());
        }
        self.close_once().await.inspect_err(|error| self.state.stop(error.clone()))
    }

    async fn close_once(&self) -> Result<()> {
        let _nothing_is_prepared = self.prepare.rest().await;
        loop {
            self.commit().await?;
            if !self.give_back_freed(Pace::Now).await? {
                break;
            }
        }
        if let Some(journal) = self.journal() {
            return self.end_journal(journal).await;
        }
        let was_marked = *self.marked.lock().await;
        if was_marked {
            self.cut_to_end(ImageOffset::ZERO.span(0)).await?;
        }
        if was_marked && lock(&self.header).version() >= 3 {
            // Commit point of the clean close: what the bit stands for was flushed above.
            self.change_header(|header| {
                header.set_features(header.incompatible & !incompatible::DIRTY, header.autoclear);
            })
            .await?;
            self.flush_storage().await?;
        }
        Ok(())
    }
}
