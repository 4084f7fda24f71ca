//! What others ask of an open image: requests (`Disk`), the parts of a commit that only qcow2 knows ([`Map`],
//! [`Medium`]), and the ordered way, the stages in which metadata reaches the medium without a journal.
//!
//! Metadata changes in memory first, where readers see it at once ("published"). A *commit* takes everything
//! that has changed until then and writes it in stages, each made durable by a host flush before the next:
//!
//! ```text
//!   seal      copy at one moment: freed clusters, L1, L2 pages, refcounts    (the gate is held alone)
//!   stage 1   refcount pages, a moved refcount table      ── flush ──     also makes all guest data durable
//!   stage 2   refcount table entries, or the header       ── flush ──     only when blocks were added
//!   stage 3   L2 pages, L1 entries, bitmaps               ── flush ──     commit point
//!   after     freed clusters may be given back, once no request reads them any more
//! ```
//!
//! Invariants, for the medium at every moment:
//!
//! 1. An L2 entry names a cluster only if its refcount, its data and its refcount block's place are durable
//!    (1, 2 before 3).
//! 2. An L1 entry names a table only if its refcount is durable, and so is its first content: zeros, or a
//!    copy of the table it replaces (written when the table was made, before stage 1's flush).
//! 3. A refcount is lowered, and the cluster's bytes are punched or reused, only after the metadata that
//!    named it was replaced durably (freed in an earlier commit) and after every request has left that may
//!    have looked it up.
//! 4. So whatever a crash leaves, no reachable cluster has a refcount that is too low. A refcount may be too
//!    high; the dirty bit says so, and the next opening repairs it.
//!
//! That is the ordered way. An image with a journal writes a record instead, with one flush
//! (`journal/commit.rs`), and uses these stages for a transaction that does not fit in one
//! (`journal/oversized.rs`). Both begin with the same seal. The choice of a leader, the wait for it and the
//! meaning of a failure are the same for every format (`engine/commit.rs`), and so is the clean close
//! (`engine/close.rs`). The parts of both that only qcow2 knows are here, in [`Map`].

use std::sync::{Arc, RwLockWriteGuard};
use std::time::Duration;

use vellum_core::{
    Buffer, Context, Disk, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, ImageOffset, ImageSpan,
    LocalFuture, Result, SharedDisk, WriteFlags, ZeroFlags, try_join_all,
};

use super::bitmaps::track::SealedBitmap;
use super::give_back::Pace;
use super::header::Header;
use super::image::Qcow2;
use super::layout::incompatible;
use super::mapping::L1Sector;
use super::pages::Page;
use super::refcount::SealedRefcounts;
use crate::engine::{self, Close as _, Commit as _, Engine, Map, write_all};
use crate::journal::commit::Medium;
use crate::journal::record::{Item, Record};
use crate::journal::{Changed, HomeWrite, Journal};

/// A page of the mapping, to be written.
pub(crate) struct SealedPage {
    page: Arc<Page>,
    pub(crate) at: ImageOffset,
    pub(crate) bytes: Vec<u8>,
    pub(crate) changed: Changed,
}

/// Copies of everything that a commit writes.
pub(crate) struct Sealed {
    freed: Vec<ImageSpan>,
    pub(crate) l1: Vec<L1Sector>,
    pub(crate) pages: Vec<SealedPage>,
    pub(crate) refcounts: SealedRefcounts,
    bitmaps: Vec<SealedBitmap>,
}

impl Sealed {
    fn has_mapping(&self) -> bool {
        !self.l1.is_empty() || !self.pages.is_empty() || !self.bitmaps.is_empty()
    }

    /// The sectors of bitmaps and of their tables.
    fn bitmap_sectors(&self) -> impl Iterator<Item = &L1Sector> {
        self.bitmaps.iter().flat_map(|bitmap| &bitmap.sectors)
    }
}

impl engine::Sealed for Sealed {
    fn is_empty(&self) -> bool {
        !self.has_mapping() && self.refcounts.pages.is_empty() && self.refcounts.table.is_empty()
    }

    /// A refcount table that grew cannot be expressed in a record.
    fn fits_a_record(&self) -> bool {
        self.refcounts.table.is_empty()
    }

    fn pages(&self) -> Vec<HomeWrite> {
        let l1 = self.l1.iter().chain(self.bitmap_sectors());
        let l1 = l1.map(|sector| (sector.at, Arc::from(&sector.bytes[..])));
        let pages = self.pages.iter().map(|page| (page.at, Arc::from(&page.bytes[..])));
        let refcounts = self.refcounts.pages.iter().map(|page| (page.at, Arc::from(&page.bytes[..])));
        l1.chain(pages).chain(refcounts).collect()
    }
}

impl Disk for Qcow2 {
    fn geometry(&self) -> Geometry {
        self.engine.geometry.clone()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.below.clone()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = self.engine.check(GuestSpan::checked(at, buffer.len() as u64))?;
            self.noticed(self.read_span(span, buffer).await).await
        })
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.engine.check_change(GuestSpan::checked(at, data.len() as u64))?;
            self.mark_changed(span).await?;
            self.noticed(self.write_span(span, data).await).await?;
            if flags.fua { self.noticed(self.make_durable().await).await } else { Ok(()) }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.engine.state.check_open()?;
            if self.engine.geometry.read_only {
                Ok(())
            } else {
                self.noticed(self.make_durable().await).await
            }
        })
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.engine.check_change(Some(span))?;
            self.mark_changed(span).await?;
            self.noticed(self.zero_span(span, flags).await).await?;
            if flags.fua { self.noticed(self.make_durable().await).await } else { Ok(()) }
        })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let span = self.engine.check_change(Some(span))?;
            self.mark_changed(span).await?;
            self.noticed(self.discard_span(span).await).await?;
            if flags.fua { self.noticed(self.make_durable().await).await } else { Ok(()) }
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let span = self.engine.check(Some(span))?;
            self.noticed(self.map_span(span).await).await
        })
    }

    fn filling(&self) -> Option<Filling> {
        self.takes_copies()
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        Box::pin(async move {
            let span = self.engine.check_change(GuestSpan::checked(at, data.len() as u64))?;
            self.noticed(self.fill_span(span, data).await).await
        })
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        Box::pin(async move {
            let has_more = self.give_back_in_background().await;
            let is_searched = self.look_for_space_in_background().await;
            self.prepare_some(now).await || has_more || is_searched
        })
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.noticed(self.close_image().await).await })
    }
}

impl Qcow2 {
    /// Marks the image as being written, before its first change: sets the dirty bit (version 3), so that the
    /// next opening after a crash repairs the refcounts, and clears the autoclear bits of data that this
    /// program does not update. With a journal, it begins that instead.
    pub(crate) async fn begin_change(&self) -> Result<()> {
        if self.header.is_marked() {
            return Ok(());
        }
        // Boxed: it happens once, and would make the future of every write larger.
        Box::pin(self.header.mark_once(async || self.mark().await)).await
    }

    async fn mark(&self) -> Result<()> {
        if let Some(end) = { self.refcounts().end() } {
            self.reach(end).await?;
        }
        let has_journal = self.begin_journal().await?;
        if has_journal || self.header.read(Header::version) < 3 {
            return Ok(());
        }
        self.change_header(|header| {
            let autoclear = header.kept_autoclear(self.flash, self.tracking.unusable().is_none());
            header.set_features(header.incompatible | incompatible::DIRTY, autoclear);
        })
        .await?;
        self.flush_storage().await
    }

    /// Cuts the file to the end of the clusters that were ever in use, or to the end of `keep` if that is
    /// further.
    pub(crate) async fn cut_to_end(&self, keep: ImageSpan) -> Result<()> {
        let end = { self.refcounts().end() }.map(|end| end.max(keep.end().bytes()));
        match end.filter(|end| *end < self.metadata.len()) {
            Some(end) => {
                let context = || format!("{}: can't truncate the file", self.engine.name);
                self.metadata.set_len(end).await.context(context)
            }
            None => Ok(()),
        }
    }

    /// Writes a changed header. The change is not durable before the next flush.
    pub(crate) async fn change_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        self.header.change(&*self.metadata, &self.engine.name, change).await
    }
}

impl Map for Qcow2 {
    type Freed = ImageSpan;
    type Sealed = Sealed;

    fn engine(&self) -> &Engine<ImageSpan> {
        &self.engine
    }

    fn journal(&self) -> Option<&Journal> {
        Self::journal(self).map(|journal| &journal.common)
    }

    fn seal_in_order(&self) -> Result<Option<Sealed>> {
        let _alone = self.alone();
        self.seal().map(Some)
    }

    async fn write_in_order(&self, sealed: &Sealed) -> Result<()> {
        let refcounts = &sealed.refcounts;
        let moved = refcounts.moved_to;
        // Stage 1.
        let pages = refcounts.pages.iter().map(|page| (page.at, &page.bytes[..]));
        let table = refcounts.table.iter().map(|(at, bytes)| (*at, &bytes[..]));
        let with_pages = moved.is_some().then(|| table.clone()).into_iter().flatten();
        write_all(&self.engine.name, &self.metadata, pages.chain(with_pages), "refcounts").await?;
        self.flush_storage().await?;
        // Stage 2.
        if let Some(place) = moved {
            self.change_header(|header| header.set_refcount_table(place)).await?;
            self.flush_storage().await?;
        } else if !refcounts.table.is_empty() {
            write_all(&self.engine.name, &self.metadata, table, "the refcount table").await?;
            self.flush_storage().await?;
        }
        // Stage 3.
        if sealed.has_mapping() {
            let l1 = sealed.l1.iter().chain(sealed.bitmap_sectors());
            let l1 = l1.map(|sector| (sector.at, &sector.bytes[..]));
            let pages = sealed.pages.iter().map(|page| (page.at, &page.bytes[..]));
            write_all(&self.engine.name, &self.metadata, l1.chain(pages), "the mapping").await?;
            self.flush_storage().await?; // commit point
        }
        Ok(())
    }

    fn alone<'a>(&'a self, _journal: &'a Journal) -> RwLockWriteGuard<'a, ()> {
        Self::alone(self)
    }

    fn seal(&self) -> Result<Sealed> {
        let freed = self.engine.commits.take_freed();
        let l1 = self.mapping.seal_l1();
        let dirty = self.mapping.take_dirty();
        let mut pages = Vec::with_capacity(dirty.len());
        for page in dirty.into_values() {
            let place = self.page_place(page.number())?.expect("a changed page has a table");
            let (bytes, changed) = page.seal();
            pages.push(SealedPage { page, at: place.start(), bytes, changed });
        }
        pages.sort_by_key(|page| page.at);
        let refcounts = self.refcounts().seal();
        Ok(Sealed { freed, l1, pages, refcounts, bitmaps: self.tracking.seal() })
    }

    fn items_of(&self, sealed: &Sealed, items: &mut Vec<Item>) {
        items.extend(Self::journal(self).into_iter().flat_map(|journal| journal.pending_items()));
        for sector in sealed.l1.iter().chain(sealed.bitmap_sectors()) {
            items.extend(sector.items());
        }
        for page in &sealed.pages {
            items.extend(page.changed.items(page.at, &page.bytes));
        }
        for page in &sealed.refcounts.pages {
            items.extend(page.changed.items(page.at, &page.bytes));
        }
    }

    async fn commit_unfit(
        &self,
        journal: &Journal,
        sealed: &Sealed,
        record: Record,
        data: &[HomeWrite],
    ) -> Result<()> {
        self.commit_in_order(journal, sealed, record, data).await
    }

    async fn flush_host(&self) -> Result<()> {
        match self.has_data_file {
            true => try_join_all([self.data.flush(), self.metadata.flush()]).await.map(drop),
            false => self.data.flush().await,
        }
    }

    fn settle(&self, sealed: Sealed, is_durable: bool) {
        let failed = !is_durable;
        for SealedPage { page, .. } in &sealed.pages {
            page.written(failed, || self.mapping.list_dirty(page));
        }
        let Sealed { freed, l1, mut refcounts, bitmaps, .. } = sealed;
        let old_tables = if failed { Vec::new() } else { std::mem::take(&mut refcounts.old_tables) };
        self.refcounts().written(refcounts, failed);
        if failed {
            self.mapping.put_back_l1(l1);
            self.tracking.put_back(bitmaps);
            self.engine.commits.put_back_freed(freed);
            return;
        }
        // Until now the header named the old places of the refcount table.
        if let Some(journal) = Self::journal(self) {
            let _shared = self.shared();
            old_tables.iter().for_each(|table| journal.freed(*table, self.cluster));
        }
        let freed: Vec<ImageSpan> = freed.into_iter().chain(old_tables).collect();
        if !freed.is_empty() {
            self.quarantine.add(self.engine.epochs.now(), freed, self.cluster);
        }
    }

    fn note_flush(&self) {
        self.prepare.note_flush();
    }

    async fn come_to_rest(&self) -> Result<impl Sized> {
        let nothing_is_prepared = self.prepare.rest().await;
        self.settle_bitmaps();
        loop {
            self.commit().await?;
            if !self.give_back_freed(Pace::Now).await? {
                break;
            }
        }
        Ok(nothing_is_prepared)
    }

    async fn clear_mark(&self) -> Result<Option<impl Sized>> {
        if let Some(journal) = Self::journal(self) {
            return self.clear_journal_bit(journal).await.map(Some);
        }
        let was_marked = self.header.was_marked().await;
        if was_marked {
            self.cut_to_end(ImageOffset::ZERO.span(0)).await?;
        }
        if !was_marked || self.header.read(Header::version) < 3 {
            return Ok(None);
        }
        // Everything the bit stands for was flushed above.
        self.change_header(|header| {
            header.set_features(header.incompatible & !incompatible::DIRTY, header.autoclear);
        })
        .await
        .map(Some)
    }

    async fn trim(&self) -> Result<()> {
        match Self::journal(self) {
            Some(journal) => self.give_back_run_of(journal).await,
            None => Ok(()),
        }
    }
}

impl Medium for Qcow2 {
    async fn write_home(&self, writes: &[HomeWrite]) -> Result<()> {
        write_all(
            &self.engine.name,
            &self.checkpoint_storage,
            writes.iter().map(|(at, page)| (*at, &page[..])),
            "the mapping",
        )
        .await
    }

    async fn write_record_at(&self, at: ImageOffset, record: Buffer) -> Result<()> {
        let written = self.metadata.write(at, record).await;
        written.context(|| format!("{}: can't write the journal", self.engine.name))
    }

    async fn flush(&self) -> Result<()> {
        self.flush_storage().await
    }
}
