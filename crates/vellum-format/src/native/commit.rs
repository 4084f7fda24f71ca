//! The journal's life, and how changes become durable.
//!
//! ```text
//!   first change of home   holes of the ring filled ► superblock: bit, generation + 1, key ── flush ──► on
//!   flush of the guest     seal ► record, [pages home] ► flush                                     commit point
//!                          nothing to seal: flush; nothing written: nothing
//!   clean close            a last record, so that all is proven ► pages home ── flush ► superblock: no bit ── flush
//! ```
//!
//! 1. Writes that change no page of home need no record, and no bit: such an image is clean all the time.
//! 2. A transaction never takes more than a record holds: who would make it larger commits first. A quarter of a record is for
//!    words and checks, an eighth for second values, half for guest data.
//! 3. A page is changed and listed under the gate, together with everything that belongs to the change.

use std::sync::RwLockReadGuard;
use std::sync::atomic::Ordering;

use vellum_core::{Buffer, Context, Error, ErrorKind, ImageOffset, LocalFuture, Result, try_join_all};

use super::geometry::Region;
use super::home::SealedPage;
use super::image::Native;
use super::ready::Haste;
use crate::journal::commit::{Medium, write_zeros};
use crate::journal::ring::Ring;
use crate::journal::{Home, Journal, Transaction};
use crate::sabotage::{self, Bug};
use crate::state::lock;

/// This many metadata writes are under way at once.
const WRITES_AT_ONCE: usize = 32;
/// When so many pages of home have changed, the next writer commits.
const DIRTY_PAGES_MAX: usize = 1024;

/// Copies of everything that a commit makes durable.
struct Sealed {
    freed: Vec<u32>,
    pages: Vec<SealedPage>,
}

impl Sealed {
    fn pages(&self) -> Vec<Home> {
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

    /// Begins the journal before the first change of home.
    pub(super) async fn begin_journal(&self) -> Result<()> {
        let Some(journal) = &self.journal else {
            return Err(Error::corrupt(format!("{}: there is no journal to change home with", self.name)));
        };
        if journal.is_on() {
            return Ok(());
        }
        let _one = self.beginning.lock().await;
        if journal.is_on() {
            return Ok(());
        }
        let run = self.places.region(Region::Journal);
        let context = || format!("{}: can't begin the journal", self.name);
        // Space that is there already takes records without more work of the host. What was there is of older generations.
        for hole in self.metadata.runs(run).await?.into_iter().filter(|run| !run.is_data) {
            write_zeros(&*self.metadata, hole.span).await.context(context)?;
        }
        let key = journal.new_key()?;
        let mut superblocks = self.superblocks.lock().await;
        let before = superblocks.clone();
        superblocks.superblock.generation += 1;
        superblocks.superblock.key = Some(key);
        if let Err(error) = superblocks.write(&*self.metadata).await {
            *superblocks = before;
            return Err(error.context(context()));
        }
        let generation = superblocks.superblock.generation;
        self.flush_storage().await?; // a crash from here on is recovered with the journal
        journal.begin(generation, key, run);
        self.drop_empty_map_units().await
    }

    /// Enters the open transaction with something that takes so many bytes of a record, at most. What is changed before the
    /// guard is dropped belongs together.
    pub(super) async fn enter_transaction(&self, cost: u64) -> Result<RwLockReadGuard<'_, ()>> {
        let journal = self.journal().expect("the journal has begun");
        let most = self.record_max() / 4;
        debug_assert!(cost <= most, "{cost} bytes are too much for one step");
        loop {
            self.state.check_stopped()?;
            let gate = journal.shared();
            let before = self.open_bytes.fetch_add(cost, Ordering::AcqRel);
            if before + cost <= most && self.home.dirty_count() < DIRTY_PAGES_MAX {
                return Ok(gate);
            }
            self.open_bytes.fetch_sub(cost, Ordering::AcqRel);
            drop(gate);
            self.commit().await?;
        }
    }

    /// Makes durable every change that was published before the call.
    pub(super) async fn commit(&self) -> Result<()> {
        let abandoned = || {
            let why = Error::new(ErrorKind::Poisoned, "a commit was abandoned half way: reopen the image");
            self.state.stop(why.clone());
            Some(why)
        };
        self.commits.turns.share(async || self.lead().await, abandoned).await
    }

    async fn lead(&self) -> Result<()> {
        self.state.check_stopped()?;
        let covers = self.commits.changes();
        match self.journal() {
            None if self.commits.covered() == covers => Ok(()),
            None => {
                self.flush_storage().await?;
                self.commits.cover(covers);
                Ok(())
            }
            Some(journal) => self.lead_journaled(journal, covers).await.map_err(|error| {
                let why = error
                    .context(format!("{}: the journal could not be written; reopen the image", self.name));
                let why = why.with_kind(ErrorKind::Poisoned);
                self.state.stop(why.clone());
                why
            }),
        }
    }

    /// The same with a journal. Any failure stops the image.
    async fn lead_journaled(&self, journal: &Journal, covers: u64) -> Result<()> {
        let (mut sealed, mut transaction) = self.seal(journal);
        if transaction.is_none() && self.commits.covered() != covers && journal.has_chores() {
            // The flush is due in any case: a record that goes with it costs nothing else.
            journal.do_chores();
            (sealed, transaction) = self.seal(journal);
        }
        match transaction {
            None if self.commits.covered() == covers => {}
            None => self.flush_storage().await?,
            Some(Transaction { sequence, items, full }) => {
                let record = journal.record_of(sequence, items);
                if !journal.fits(&record) {
                    return Err(Error::corrupt("a transaction has become larger than a record"));
                }
                journal.commit_record(self, record, sealed.pages(), full).await?;
                self.commits.note_record(sequence);
            }
        }
        self.commits.cover(covers);
        if let Some(units) = self.units.as_ref().filter(|_| !sealed.freed.is_empty()) {
            units.add_freed(self.epochs.now(), sealed.freed);
        }
        Ok(())
    }

    /// Copies all that the open transaction is made of; no transaction when it is empty.
    fn seal(&self, journal: &Journal) -> (Sealed, Option<Transaction>) {
        let _alone = journal.alone();
        self.open_bytes.store(0, Ordering::Release);
        let freed = std::mem::take(&mut *lock(&self.commits.freed));
        let mut pages = self.home.seal();
        pages.extend(self.views.iter().flat_map(|views| views.seal()));
        let sealed = Sealed { freed, pages };
        let transaction = journal.seal(!sealed.pages.is_empty()).map(|mut transaction| {
            for page in sealed.pages.iter().filter(|page| !self.is_left_out(page)) {
                transaction.items.extend(page.changed.items(page.at, &page.bytes));
            }
            transaction
        });
        (sealed, transaction)
    }

    /// A mistake: this page's words are not in the record.
    fn is_left_out(&self, page: &SealedPage) -> bool {
        let is_in = |region| self.places.region(region).contains(page.at);
        (sabotage::is(Bug::MaskNotInRecord) && is_in(Region::Masks))
            || (sabotage::is(Bug::EntryNotInRecord) && is_in(Region::Table))
            || (sabotage::is(Bug::BitNotInRecord) && is_in(Region::Bitmap))
            || (sabotage::is(Bug::CopyNotInRecord) && page.at >= self.places.data_offset())
    }

    /// Makes durable what was written to the image. A failure stops it.
    pub(super) async fn flush_storage(&self) -> Result<()> {
        let flushed = self.data.flush().await;
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

    /// What a flush of the guest asks for.
    pub(super) async fn make_durable(&self) -> Result<()> {
        self.state.check_stopped()?;
        self.commit().await?;
        // The promise is kept by now. What cannot be given back at this moment will be later.
        match self.give_back_unless_busy().await {
            Err(error) if error.kind() == ErrorKind::Corrupt => Err(error),
            _ => Ok(()),
        }
    }

    /// Everything home, and the bit cleared. When that failed once it is not tried again, nor taken for done: the image stays
    /// marked, and the next opening recovers it.
    pub(super) async fn close_image(&self) -> Result<()> {
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
        if let Some(units) = &self.units {
            drop(units.giving.lock().await); // whoever makes units ready ends first, and nobody begins
        }
        self.end_compaction().await;
        self.settle_all().await?;
        self.commit().await?;
        let Some(journal) = self.journal() else { return Ok(()) };
        // Punched for the host's sake: whoever opens the image believes nothing of what is free.
        let _ = self.give_back_freed(Haste::Later).await;
        if journal.has_unproven() {
            journal.want_proof();
            self.commit().await?;
        }
        journal.empty(self).await?;
        let mut superblocks = self.superblocks.lock().await;
        superblocks.superblock.key = None;
        superblocks
            .write(&*self.metadata)
            .await
            .context(|| format!("{}: can't write the superblock", self.name))?;
        self.flush_storage().await?; // commit point of the clean close
        // From here on the image is whole without what follows.
        self.cut_off().await
    }

    /// Gives back what the file has behind the last unit.
    async fn cut_off(&self) -> Result<()> {
        if self.units.is_none() || self.metadata.limits().fixed_len {
            return Ok(());
        }
        let mut last = 0;
        self.home.each_loaded(self.places.region(Region::Table), |_, word| {
            last = last.max(self.places.last_unit(word));
        });
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
                .context(|| format!("{}: can't cut it off", self.name)),
            false => Ok(()),
        }
    }

    async fn write_pages(&self, pages: &[Home]) -> Result<()> {
        let mut pages = pages.iter().peekable();
        while pages.peek().is_some() {
            let mut batch: Vec<LocalFuture<'_, Result<()>>> = Vec::new();
            while batch.len() < WRITES_AT_ONCE
                && let Some((at, bytes)) = pages.next()
            {
                // Neighbours go out as one write.
                let mut data = Buffer::copy_of(bytes);
                while let Some((_, next)) = pages.next_if(|(next, _)| *next == *at + data.len() as u64) {
                    data.append(Buffer::copy_of(next));
                }
                batch.push(self.homeward.write(*at, data));
            }
            try_join_all(batch).await.context(|| format!("{}: can't write home", self.name))?;
        }
        Ok(())
    }
}

impl Medium for Native {
    async fn write_home(&self, home: &[Home]) -> Result<()> {
        self.write_pages(home).await
    }

    async fn write_record_at(&self, at: ImageOffset, record: Buffer) -> Result<()> {
        self.metadata.write(at, record).await.context(|| format!("{}: can't write the journal", self.name))
    }

    async fn flush(&self) -> Result<()> {
        self.flush_storage().await
    }
}
