//! The order of writes of a commit that fits in a record.
//!
//! ```text
//!   sealed ──► [fence: flush] ──► record, [pages home] ► flush                       commit point
//! ```
//!
//! 1. A record is written after all data it counts on has been written, and before the flush that makes both
//!    durable. Data without checks in the record is durable before the record is written: the fence.
//! 2. Pages that go home are the last *durable* versions. A page whose place has an unproven check stays,
//!    because recovery would look for the bytes that the page would replace.
//! 3. The tail moves in memory when the flush after the home writes has succeeded. The ring's space is reused
//!    when a record that states the new tail is flushed.
//!
//! Any failure stops the image, because only recovery can then find out what is on the medium. The exception
//! is pages that could not go home: they are tried again as long as the ring has room.

use vellum_core::{
    Buffer, Error, ErrorKind, ImageOffset, ImageSpan, LocalFuture, Result, Storage, try_join_all,
};

use super::Journal;
use super::full::Home;
use super::record::{Item, Record};
use crate::sabotage::{self, Bug};

/// Space is zeroed in pieces of this many bytes.
const ZEROED_AT_ONCE: u64 = 1 << 20;

/// The operations of an image that a commit needs.
pub(crate) trait Medium {
    /// Writes pages and guest data to where they belong.
    async fn write_home(&self, home: &[Home]) -> Result<()>;
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

impl Journal {
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
        match fence && !sabotage::is(Bug::NoFence) {
            true => medium.flush().await,
            false => Ok(()),
        }
    }

    /// Makes a sealed transaction durable: `full`, with the pages and the data as they will be at home. With
    /// `fence`, the transaction counts on data without checks, which is flushed first. Only one task at a
    /// time may lead this.
    pub(crate) async fn commit_record(
        &self,
        medium: &impl Medium,
        mut full: Record,
        pages: Vec<Home>,
        data: Vec<Home>,
        fence: bool,
    ) -> Result<()> {
        self.flush_fenced(medium, fence).await?;
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
            home.clear(); // they stay kept, and are tried again
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

    /// Takes the last kept pages home. Everything is committed and proven.
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
