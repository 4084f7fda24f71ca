//! What a transaction has gathered is sealed here, and made durable if it fits in a record, in this order.
//!
//! ```text
//!   sealed ──► [fence: flush] ──► record, [checkpoint] ► flush                       commit point
//! ```
//!
//! 1. A record is written after all data it counts on has been written, and before the flush that makes both
//!    durable. Data without checks in the record is durable before the record is written: the fence.
//! 2. A checkpoint writes the last *durable* versions of pages. A page whose place has an unverified check is
//!    left out, because recovery would look for the bytes that the page would replace.
//! 3. The tail moves in memory when the flush after the checkpoint has succeeded. The ring's space is reused
//!    when a record that states the new tail is flushed.
//!
//! Any failure stops the image, because only recovery can then find out what is on the medium. The exception
//! is a checkpoint that failed: it is tried again as long as the ring has room.

use std::sync::atomic::Ordering;

use vellum_core::{
    Buffer, Error, ErrorKind, ImageOffset, ImageSpan, LocalFuture, Result, Storage, try_join_all,
};

use super::Journal;
use super::full::HomeWrite;
use super::record::{Item, Record};
use crate::state::lock;

/// Space is zeroed in pieces of this many bytes.
const ZEROED_AT_ONCE: u64 = 1 << 20;

/// The operations of an image that a commit needs.
pub(crate) trait Medium {
    /// Writes pages and guest data to their home locations.
    async fn write_home(&self, writes: &[HomeWrite]) -> Result<()>;
    /// Writes a record.
    async fn write_record_at(&self, at: ImageOffset, record: Buffer) -> Result<()>;
    /// A host flush of the image.
    async fn flush(&self) -> Result<()>;
}

/// Writes zeros over a run, so that it holds no old record and its space is allocated.
pub(crate) async fn write_zeros(storage: &dyn Storage, run: ImageSpan) -> Result<()> {
    let mut rest = run;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(ZEROED_AT_ONCE);
        let zeros = Buffer::zeroed(usize::try_from(now.len()).expect("bounded"));
        storage.write(now.start(), zeros).await?;
        rest = later;
    }
    Ok(())
}

/// What a seal took.
pub(crate) struct Transaction {
    pub(crate) sequence: u64,
    pub(crate) items: Vec<Item>,
    /// Guest data as it will be in place.
    pub(crate) full: Vec<HomeWrite>,
    /// Some of the data it counts on has no checks, so a flush must come before the record is written.
    pub(crate) fence: bool,
}

impl Journal {
    /// Takes what was gathered. `None` when there is nothing to record; `has_pages` says that pages have
    /// changed. The caller holds the gate alone.
    pub(crate) fn seal(&self, has_pages: bool) -> Option<Transaction> {
        let mut open = lock(&self.open);
        let record_wanted = self.record_wanted.swap(false, Ordering::AcqRel);
        if !has_pages && open.is_empty() && !record_wanted {
            // Copies that found room and were left out after all: that room is free again.
            open.no_copies();
            return None;
        }
        let fence = open.is_fenced();
        let (sequence, mut items, places) = open.take();
        self.word_bytes.store(0, Ordering::Relaxed);
        let (full, writes) = self.full.seal(sequence, &places);
        drop(open);
        items.extend(full);
        Some(Transaction { sequence, items, full: writes, fence })
    }

    /// A transaction's record, with the ledger's state as it is now.
    pub(crate) fn record_of(&self, sequence: u64, items: Vec<Item>) -> Record {
        self.with_ledger(|ledger| Record {
            generation: ledger.generation,
            key: ledger.key,
            sequence,
            durable: sequence - 1,
            tail: ledger.tail,
            asks_for_repair: false,
            items,
        })
    }

    /// Whether the record is short enough to be written.
    pub(crate) fn fits(&self, record: &Record) -> bool {
        record.encoded_len() as u64 <= self.with_ledger(|ledger| ledger.ring.record_max())
    }

    /// Flushes what a sealed transaction counts on, if it has no checks of that data. Comes before its record
    /// is written.
    async fn flush_fenced(&self, medium: &impl Medium, fence: bool) -> Result<()> {
        match fence {
            true => medium.flush().await,
            false => Ok(()),
        }
    }

    /// Makes a sealed transaction durable: `full`, with the pages and the data as they will be in place. With
    /// `fence`, the transaction counts on data without checks, which is flushed first. Only one task at a
    /// time may lead this.
    pub(crate) async fn commit_record(
        &self,
        medium: &impl Medium,
        full: Record,
        pages: Vec<HomeWrite>,
        data: Vec<HomeWrite>,
        fence: bool,
    ) -> Result<()> {
        self.flush_fenced(medium, fence).await?;
        let sequence = full.sequence;
        let mut written = self.pages_to_checkpoint();
        let may_fail = self.with_ledger(|ledger| ledger.ring.has_room());
        let mut checkpoint = Ok(());
        let both: [LocalFuture<'_, Result<()>>; 2] = [
            Box::pin(async {
                if !written.is_empty() {
                    checkpoint = medium.write_home(&written).await;
                }
                Ok(())
            }),
            Box::pin(self.write_record(medium, &full)),
        ];
        try_join_all(both).await?;
        if let Err(error) = checkpoint {
            if !may_fail {
                return Err(error);
            }
            written.clear(); // they stay in the ledger, and are tried again
        }
        medium.flush().await?; // commit point
        self.note_verified(sequence - 1);
        self.with_ledger(|ledger| {
            ledger.ring.advance(full.tail);
            ledger.durable_tail = full.tail;
            ledger.drop_checkpointed(&written);
            ledger.add_uncheckpointed(sequence, pages.into_iter().chain(data));
            if !written.is_empty() {
                ledger.tail = ledger.needed(sequence + 1);
            }
        });
        self.full.forget(full.tail);
        Ok(())
    }

    /// Writes a record to the ring.
    pub(crate) async fn write_record(&self, medium: &impl Medium, record: &Record) -> Result<()> {
        let bytes = record.encode();
        let place = self.with_ledger(|ledger| {
            let at = ledger.ring.place(record.sequence, bytes.len() as u64)?;
            Some(ledger.run.start() + at)
        });
        let place =
            place.ok_or_else(|| Error::new(ErrorKind::Poisoned, "the journal is full: reopen the image"))?;
        medium.write_record_at(place, Buffer::copy_of(&bytes)).await
    }

    /// Checkpoints the last pages. Everything is committed and verified.
    pub(crate) async fn empty(&self, medium: &impl Medium) -> Result<()> {
        let pages = self.all_uncheckpointed();
        if !pages.is_empty() {
            medium.write_home(&pages).await?;
        }
        medium.flush().await
    }
}
