//! The order of writes of a commit with a journal. Who leads it and who waits is in the module above (`commit.rs`); what fits
//! a record goes the way that all formats share (`crate::journal::commit`).
//!
//! ```text
//!   sealed ──► fits a record ──yes──► record, [pages home] ► flush                       commit point
//!                   │no
//!                   └► a record that proves ► flush ► all pages home ► flush
//!                                    ► a record that needs no other ► flush ► the ordered stages
//! ```
//!
//! What a record cannot tell (a refcount table that grew), and what does not fit one, goes the ordered way. Older records
//! must not undo it: their pages are home before, and the record before it needs none of them. The two records ask for a
//! repair, should one of them be the last: a crash in the middle is mended as with a dirty image.

use std::sync::Arc;

use vellum_core::{Buffer, Context, ImageOffset, Result};

use super::super::commit::Sealed;
use super::super::image::Qcow2;
use super::Journal;
use crate::journal::commit::Medium;
use crate::journal::record::{Item, Record};
use crate::journal::words::items_of;
use crate::journal::{Home, Transaction};
use crate::sabotage::{self, Bug};

impl Qcow2 {
    /// Copies all that the open transaction is made of; nothing when it is empty.
    pub(crate) fn seal_transaction(&self, journal: &Journal) -> Result<(Sealed, Option<Transaction>)> {
        let _alone = journal.alone();
        let sealed = self.seal()?;
        let transaction = self.transaction_of(journal, &sealed);
        Ok((sealed, transaction))
    }

    /// What belongs to the sealed copies; the caller has sealed them just now.
    pub(crate) fn transaction_of(&self, journal: &Journal, sealed: &Sealed) -> Option<Transaction> {
        let mut transaction = journal.seal(!sealed.is_empty())?;
        let items = &mut transaction.items;
        items.extend(journal.owed_items());
        for (at, bytes, indexes) in sealed.l1.iter().filter(|_| !sabotage::is(Bug::NoL1)) {
            let first = (at.bytes() - self.l1.at.bytes()) / 8;
            items.extend(items_of(indexes.iter().map(|index| {
                let word = *index - usize::try_from(first).expect("an L1 table fits memory");
                (*at + word as u64 * 8, super::super::layout::be64(bytes, word * 8))
            })));
        }
        for page in &sealed.pages {
            items.extend(page.changed.items(page.at, &page.bytes));
        }
        for page in sealed.refcounts.pages.iter().filter(|_| !sabotage::is(Bug::NoRefcounts)) {
            items.extend(page.changed.items(page.at, &page.bytes));
        }
        Some(transaction)
    }

    /// Makes a sealed transaction durable. Must be led by one task at a time.
    pub(crate) async fn commit_transaction(
        &self,
        journal: &Journal,
        sealed: &Sealed,
        transaction: Transaction,
    ) -> Result<()> {
        let Transaction { sequence, items, full: data } = transaction;
        let full = journal.record_of(sequence, items);
        if !sealed.refcounts.table.is_empty() || !journal.fits(&full) {
            return self.commit_in_order(journal, sealed, full, &data).await;
        }
        journal.commit_record(self, full, pages_of(sealed).collect(), data).await
    }

    /// The way for what does not fit a record.
    async fn commit_in_order(
        &self,
        journal: &Journal,
        sealed: &Sealed,
        full: Record,
        data: &[Home],
    ) -> Result<()> {
        let owed: Vec<Item> =
            full.items.iter().filter(|item| matches!(item, Item::Owed { .. })).cloned().collect();
        // Proven first: a page that goes home may have checks. What this transaction owes is no use without it.
        let asks_for_repair = !sabotage::is(Bug::BarrierWantsNoRepair);
        let proof = Record { items: Vec::new(), asks_for_repair, ..full };
        journal.write_record(self, &proof).await?;
        self.flush_storage().await?;
        journal.has_proven(proof.sequence - 1);
        let home = journal.all_kept();
        if !sabotage::is(Bug::BarrierBeforeHome) {
            self.write_home(&home).await?;
            self.flush_storage().await?;
        }
        let sequence = journal.skip();
        let barrier = Record { sequence, durable: sequence - 1, tail: sequence, items: Vec::new(), ..proof };
        let longest = journal.with_ledger(|ledger| ledger.ring.record_max());
        journal.write_record(self, &barrier).await?;
        self.flush_storage().await?;
        journal.with_ledger(|ledger| {
            ledger.ring.advance(sequence);
            (ledger.tail, ledger.told) = (sequence, sequence);
            ledger.came_home(&home);
        });
        self.write_home(data).await?;
        self.write_sealed(sealed).await?;
        journal.full.forget(sequence);
        journal.has_proven(sequence - 1); // what it counted on was flushed before the mapping
        // Once this one is durable, with the next flush, a crash no longer wants the repair. It may be missing when the next
        // one is there; that one needs none before it.
        let sequence = journal.skip();
        journal.with_ledger(|ledger| ledger.tail = sequence + 1);
        let whole = Record {
            sequence,
            durable: sequence - 1,
            tail: sequence,
            asks_for_repair: false,
            items: owed,
            ..barrier
        };
        match whole.encoded_len() as u64 <= longest {
            true => journal.write_record(self, &whole).await,
            false => Ok(()),
        }
    }
}

impl Medium for Qcow2 {
    async fn write_home(&self, home: &[Home]) -> Result<()> {
        self.write_all(&self.home, home.iter().map(|(at, page)| (*at, &page[..])), "the mapping").await
    }

    async fn write_record_at(&self, at: ImageOffset, record: Buffer) -> Result<()> {
        let written = self.metadata.write(at, record).await;
        written.context(|| format!("{}: can't write the journal", self.name))
    }

    async fn flush(&self) -> Result<()> {
        self.flush_storage().await
    }
}

/// The pages of a transaction as they are to be at home.
fn pages_of(sealed: &Sealed) -> impl Iterator<Item = Home> + '_ {
    let l1 = sealed.l1.iter().map(|(at, bytes, _)| (*at, Arc::from(&bytes[..])));
    let pages = sealed.pages.iter().map(|page| (page.at, Arc::from(&page.bytes[..])));
    let refcounts = sealed.refcounts.pages.iter().map(|page| (page.at, Arc::from(&page.bytes[..])));
    l1.chain(pages).chain(refcounts)
}
