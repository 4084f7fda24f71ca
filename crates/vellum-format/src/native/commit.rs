//! How the journal begins, how large a transaction may become, and the native format as the engine needs it
//! ([`Map`]).
//!
//! ```text
//!   first change           superblock: bit, generation + 1, key ── flush ──► marked
//!   first change of home   holes of the ring filled; the same, if not marked yet ──► on
//!   flush of the guest     seal ► record, [checkpoint] ► flush: commit point       `engine/commit.rs`
//!                          nothing to seal: flush; nothing written: nothing
//!   clean close            a last record, so that all is verified ► checkpoint ── flush  `engine/close.rs`
//!                                                             ► superblock: no bit ── flush
//! ```
//!
//! 1. Nothing is changed, in place or otherwise, before the superblock durably says that the image is in use. A
//!    write that changes no page of home needs no record. An image without a journal has no such mark.
//! 2. A transaction never needs more than one record holds: a change that would make it larger commits first.
//!    A quarter of a record is for words and checks, an eighth for second values, half for guest data.
//! 3. A page is changed and listed under the gate, together with everything that belongs to the change.

use std::sync::atomic::Ordering;
use std::sync::{RwLockReadGuard, RwLockWriteGuard};

use vellum_core::{Buffer, Context, Error, ImageOffset, ImageSpan, Result};

use super::geometry::Region;
use super::home_pages::SealedPage;
use super::image::Native;
use super::in_use::Mark;
use super::ready::Haste;
use crate::engine::{self, Commit as _, Engine, Map, write_all};
use crate::journal::commit::{Medium, write_zeros};
use crate::journal::record::{Item, Record};
use crate::journal::ring::Ring;
use crate::journal::{HomeWrite, Journal};
use crate::state::{UnderWay, lock};

/// When this many pages of home have changed, the next writer commits.
const DIRTY_PAGES_MAX: usize = 1024;

/// Copies of everything that a commit makes durable.
pub(crate) struct Sealed {
    freed: Vec<u32>,
    pages: Vec<SealedPage>,
}

impl engine::Sealed for Sealed {
    fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    fn fits_a_record(&self) -> bool {
        true
    }

    fn pages(&self) -> Vec<HomeWrite> {
        self.pages.iter().map(|page| (page.at, page.bytes.clone())).collect()
    }
}

impl Native {
    /// The longest record, in bytes.
    pub(super) fn record_max(&self) -> u64 {
        match &self.journal {
            Some(_) => Ring::new(self.places.region(Region::Journal).len()).record_max(),
            None => u64::MAX,
        }
    }

    /// Called before bytes are overwritten in place. Marks the image as in use, without beginning the journal,
    /// whose ring may need space.
    pub(super) async fn begin_in_place(&self) -> Result<()> {
        if self.journal.is_none() && self.in_use.voids() {
            return Box::pin(self.void_session()).await;
        }
        if self.journal.is_none() || self.in_use.is_marked() {
            return Ok(()); // an image without a journal has no mark
        }
        let mut marked = self.in_use.lock().await;
        self.engine.state.check_stopped()?;
        self.mark(&mut marked).await.map(drop)
    }

    /// Begins the journal before the first change of home.
    pub(super) async fn begin_journal(&self) -> Result<()> {
        let Some(journal) = &self.journal else {
            return Err(Error::corrupt(format!(
                "{}: the home pages cannot change without a journal",
                self.engine.name
            )));
        };
        if journal.is_on() {
            return Ok(());
        }
        let mut marked = self.in_use.lock().await;
        if journal.is_on() {
            return Ok(());
        }
        self.engine.state.check_stopped()?;
        let run = self.places.region(Region::Journal);
        let under_way = UnderWay::begin(&self.engine.state, "the beginning of the journal");
        let filled = self.fill_ring(run).await;
        under_way.end();
        filled.context(|| format!("{}: can't begin the journal", self.engine.name))?;
        let mark = self.mark(&mut marked).await?;
        journal.begin(mark.generation, mark.key, run);
        self.drop_empty_map_units().await
    }

    /// Allocated space takes records without further metadata work on the host. Records in it are of older
    /// generations.
    async fn fill_ring(&self, run: ImageSpan) -> Result<()> {
        for hole in self.metadata.runs(run).await?.into_iter().filter(|run| !run.is_data) {
            write_zeros(&*self.metadata, hole.span).await?;
        }
        Ok(())
    }

    /// Marks the image durably as in use, before the first change of an opening. The next opening after a crash
    /// then trusts no page that only the page cache has. Without the mark, bytes whose flush failed would be
    /// read as new until the cache drops them.
    async fn mark(&self, marked: &mut Option<Mark>) -> Result<Mark> {
        if let Some(mark) = *marked {
            return Ok(mark);
        }
        let journal = self.journal.as_ref().expect("the caller has looked");
        let key = journal.new_key()?;
        let under_way = UnderWay::begin(&self.engine.state, "a write of the superblock");
        // The other copy, which the next write goes over, is needed until this one is durable.
        let mut superblocks = self.superblocks.lock().await;
        let before = superblocks.clone();
        superblocks.superblock.draw_generation(self.flash);
        if self.keeps_fast() {
            superblocks.superblock.renew_fast();
        }
        superblocks.superblock.key = Some(key);
        let written = superblocks.write(&*self.metadata).await;
        let generation = superblocks.superblock.generation;
        if written.is_err() {
            *superblocks = before;
        }
        under_way.end();
        written.context(|| format!("{}: can't mark the image as in use", self.engine.name))?;
        self.flush_storage().await?; // a crash from here on is recovered with the journal
        drop(superblocks);
        let mark = Mark { generation, key };
        *marked = Some(mark);
        self.in_use.note_marked();
        Ok(mark)
    }

    /// Enters the open transaction with a change that needs at most `cost` bytes of a record. Everything that
    /// is changed before the guard is dropped belongs together.
    pub(super) async fn enter_transaction(&self, cost: u64) -> Result<RwLockReadGuard<'_, ()>> {
        let journal = self.journal().expect("the journal has begun");
        let most = self.record_max() / 4;
        debug_assert!(cost <= most, "{cost} bytes are too much for one step");
        loop {
            self.engine.state.check_stopped()?;
            let gate = journal.shared();
            let before = self.open_bytes.fetch_add(cost, Ordering::AcqRel);
            if before + cost <= most && self.home.dirty_count() < DIRTY_PAGES_MAX {
                return Ok(gate);
            }
            self.open_bytes.fetch_sub(cost, Ordering::AcqRel);
            // Checks go first: a fence replaces them.
            let fenced = if before + cost > most { journal.fence_instead(most / 2) } else { 0 };
            if fenced > 0 {
                self.open_bytes.fetch_sub(fenced, Ordering::AcqRel);
                continue;
            }
            drop(gate);
            self.commit().await?;
        }
    }

    /// As above, for a change that may as well be left out: `None` where it would have to wait for a commit, or
    /// where others soon would.
    pub(super) fn try_enter_transaction(&self, cost: u64) -> Result<Option<RwLockReadGuard<'_, ()>>> {
        self.engine.state.check_stopped()?;
        let journal = self.journal().expect("the journal has begun");
        let gate = journal.shared();
        let before = self.open_bytes.fetch_add(cost, Ordering::AcqRel);
        if before + cost <= self.record_max() / 8 && self.home.dirty_count() < DIRTY_PAGES_MAX / 4 {
            return Ok(Some(gate));
        }
        self.open_bytes.fetch_sub(cost, Ordering::AcqRel);
        Ok(None)
    }

    /// Truncates the file behind the last unit.
    async fn cut_off(&self) -> Result<()> {
        if self.units.is_none() || self.metadata.limits().fixed_len {
            return Ok(());
        }
        let mut last = self.places.units_of_parts().max().unwrap_or(0);
        for span in self.places.table() {
            self.home.each_loaded(span, |_, word| last = last.max(self.places.last_unit(word)));
        }
        let of_snapshots = self.views.as_ref().map_or(Vec::new(), |views| views.units());
        last = of_snapshots.into_iter().fold(last, u32::max);
        let end = match last {
            0 => self.places.data_offset(),
            last => self.places.unit(last).end(),
        };
        match self.metadata.len() > end.bytes() {
            true => self
                .metadata
                .set_len(end.bytes())
                .await
                .context(|| format!("{}: can't truncate the file", self.engine.name)),
            false => Ok(()),
        }
    }
}

impl Map for Native {
    type Freed = u32;
    type Sealed = Sealed;

    fn engine(&self) -> &Engine<u32> {
        &self.engine
    }

    fn journal(&self) -> Option<&Journal> {
        Self::journal(self)
    }

    /// Without a journal no page of home changes.
    fn seal_in_order(&self) -> Result<Option<Sealed>> {
        Ok(None)
    }

    async fn write_in_order(&self, _sealed: &Sealed) -> Result<()> {
        unreachable!("nothing is sealed without a journal")
    }

    fn alone<'a>(&'a self, journal: &'a Journal) -> RwLockWriteGuard<'a, ()> {
        journal.alone()
    }

    fn seal(&self) -> Result<Sealed> {
        self.open_bytes.store(0, Ordering::Release);
        let freed = self.engine.commits.take_freed();
        let mut pages = self.home.seal();
        pages.extend(self.views.iter().flat_map(|views| views.seal()));
        Ok(Sealed { freed, pages })
    }

    fn items_of(&self, sealed: &Sealed, items: &mut Vec<Item>) {
        for page in &sealed.pages {
            items.extend(page.changed.items(page.at, &page.bytes));
        }
    }

    /// Does not happen: see invariant 2.
    async fn commit_unfit(&self, _: &Journal, _: &Sealed, _: Record, _: &[HomeWrite]) -> Result<()> {
        Err(Error::corrupt("a transaction has become larger than a record"))
    }

    fn flush_host(&self) -> impl Future<Output = Result<()>> {
        self.data.flush()
    }

    fn settle(&self, sealed: Sealed, is_durable: bool) {
        if let Some(units) = self.units.as_ref().filter(|_| is_durable && !sealed.freed.is_empty()) {
            units.add_freed(self.engine.epochs.now(), sealed.freed);
        }
    }

    fn note_flushed(&self) {
        if let Some(units) = &self.units {
            self.settle_zeroed(units);
            lock(&units.zero_pace).note_flush(units.written_bytes());
            units.note_due();
        }
    }

    async fn come_to_rest(&self) -> Result<impl Sized> {
        let nothing_is_deleted = self.end_deleting().await;
        if let Some(units) = &self.units {
            drop(units.giving.lock().await); // a running preparation ends, and no other begins
        }
        self.end_compaction().await;
        self.end_promoting().await?;
        self.record_all().await?;
        self.keep_filled().await?;
        self.commit().await?;
        if Self::journal(self).is_some() {
            // Holes are punched for the host's sake. The next opening assumes nothing about free units.
            let _ = self.give_back_freed(Haste::Later).await;
        }
        Ok(nothing_is_deleted)
    }

    async fn clear_mark(&self) -> Result<Option<impl Sized>> {
        if !self.in_use.is_marked() {
            return Ok(None);
        }
        let mut superblocks = self.superblocks.lock().await;
        superblocks.superblock.key = None;
        superblocks
            .write(&*self.metadata)
            .await
            .context(|| format!("{}: can't write the superblock", self.engine.name))?;
        Ok(Some(superblocks))
    }

    async fn trim(&self) -> Result<()> {
        match Self::journal(self) {
            Some(_) => self.cut_off().await,
            None => Ok(()),
        }
    }
}

impl Medium for Native {
    async fn write_home(&self, writes: &[HomeWrite]) -> Result<()> {
        let pages = writes.iter().map(|(at, page)| (*at, &page[..]));
        write_all(&self.engine.name, &self.checkpoint_storage, pages, "home").await
    }

    async fn write_record_at(&self, at: ImageOffset, record: Buffer) -> Result<()> {
        self.metadata
            .write(at, record)
            .await
            .context(|| format!("{}: can't write the journal", self.engine.name))
    }

    async fn flush(&self) -> Result<()> {
        self.flush_storage().await
    }
}
