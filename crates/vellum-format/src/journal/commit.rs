//! The order of writes of a commit that fits a record.
//!
//! ```text
//!   sealed ──► record, [pages home] ► flush                       commit point
//! ```
//!
//! 1. A record is written when all data it counts on has been written, and before the flush that makes both durable.
//! 2. Pages that go home are the last *durable* versions; a page with an unproven check in it stays, as recovery would look
//!    for what it replaces.
//! 3. The tail moves in memory when the flush after the home writes is over, and the ring's space is used again when a
//!    record that says so is flushed.
//!
//! Any failure stops the image: what is on the medium then is for recovery to find out. Only pages that could not go home
//! are tried again, as long as the ring has room.

use vellum_core::{
    Buffer, Error, ErrorKind, ImageOffset, ImageSpan, LocalFuture, Result, Storage, try_join_all,
};

use super::Journal;
use super::full::Home;
use super::record::{Item, Record};
use crate::sabotage::{self, Bug};

/// Space is written with zeros in pieces of this many bytes.
const ZEROED_AT_ONCE: u64 = 1 << 20;

/// An image as a commit needs it.
pub(crate) trait Medium {
    /// Writes pages and guest data to where they belong.
    async fn write_home(&self, home: &[Home]) -> Result<()>;
    /// Writes a record.
    async fn write_record_at(&self, at: ImageOffset, record: Buffer) -> Result<()>;
    /// A host flush of the image.
    async fn flush(&self) -> Result<()>;
}

/// Writes zeros over a run, so that it holds no record of anybody, and is there.
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

impl Journal {
    /// The record of a transaction, as it stands now.
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

    /// Whether the record may be written as it is.
    pub(crate) fn fits(&self, record: &Record) -> bool {
        record.encoded_len() as u64 <= self.with_ledger(|ledger| ledger.ring.record_max())
    }

    /// Makes a sealed transaction durable: `full`, with the pages and the data as they are to be at home. Must be led by one
    /// task at a time.
    pub(crate) async fn commit_record(
        &self,
        medium: &impl Medium,
        mut full: Record,
        pages: Vec<Home>,
        data: Vec<Home>,
    ) -> Result<()> {
        let sequence = full.sequence;
        let mut home = self.relief();
        if sabotage::is(Bug::TailBeforeHome) && !home.is_empty() {
            full.tail = sequence;
        }
        let may_fail = self.with_ledger(|ledger| ledger.ring.has_room());
        let mut homeward = Ok(());
        let both: [LocalFuture<'_, Result<()>>; 2] = [
            Box::pin(async {
                if !home.is_empty() {
                    homeward = medium.write_home(&home).await;
                }
                Ok(())
            }),
            Box::pin(self.write_record(medium, &full)),
        ];
        try_join_all(both).await?;
        if let Err(error) = homeward {
            if !may_fail {
                return Err(error);
            }
            home.clear(); // they stay where they are, and are tried again
        }
        if sabotage::is(Bug::CheckpointBeforeCommit) {
            medium.write_home(&pages).await?;
        }
        medium.flush().await?; // commit point
        self.has_proven(sequence - u64::from(!sabotage::is(Bug::DurableIsProven)));
        self.with_ledger(|ledger| {
            ledger.ring.advance(full.tail);
            ledger.told = full.tail;
            ledger.came_home(&home);
            ledger.keep(sequence, pages.into_iter().chain(data));
            if !home.is_empty() {
                ledger.tail = ledger.needed(sequence + 1);
                if sabotage::is(Bug::TailUsedEarly) {
                    ledger.ring.advance(ledger.tail);
                    self.full.forget(ledger.tail);
                }
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

    /// Takes the last of it home. Everything is committed, and proven.
    pub(crate) async fn empty(&self, medium: &impl Medium) -> Result<()> {
        let kept = self.all_kept();
        if !kept.is_empty() {
            medium.write_home(&kept).await?;
        }
        if !sabotage::is(Bug::ClosedBeforeHome) {
            medium.flush().await?;
        }
        Ok(())
    }
}
