//! The order of writes of a commit with a journal. Who leads it and who waits is in the module above (`commit.rs`).
//!
//! ```text
//!   sealed ──► fits a record ──yes──► record, [pages home] ► flush                       commit point
//!                   │no
//!                   └► a record that proves ► flush ► all pages home ► flush
//!                                    ► a record that needs no other ► flush ► the ordered stages
//! ```
//!
//! 1. A record is written when all data it counts on has been written, and before the flush that makes both durable.
//! 2. Pages that go home are the last *durable* versions; a page with an unproven check in it stays, as recovery would look
//!    for what it replaces.
//! 3. The tail moves in memory when the flush after the home writes is over, and the ring's space is used again when a
//!    record that says so is flushed.
//! 4. What a record cannot tell (a refcount table that grew), and what does not fit one, goes the ordered way. Older records
//!    must not undo it: their pages are home before, and the record before it needs none of them. The two records ask for a
//!    repair, should one of them be the last: a crash in the middle is mended as with a dirty image.
//!
//! Any failure stops the image: what is on the medium then is for recovery to find out. Only pages that could not go home
//! are tried again, as long as the ring has room.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_core::{Buffer, Context, Error, ErrorKind, ImageSpan, LocalFuture, Result, try_join_all};

use super::super::commit::Sealed;
use super::super::image::{Qcow2, lock};
use super::full::Home;
use super::record::{Item, Record, SECTOR, SECTOR_LEN};
use super::words::items_of;
use super::{Journal, KEPT_MAX, Kept, Ledger, Transaction};
use crate::sabotage::{self, Bug};

impl Ledger {
    fn wants_relief(&self) -> bool {
        // Once told of, the last relief has to show first.
        self.tail == self.told && (self.ring.is_half_full() || self.kept.len() > KEPT_MAX)
    }

    /// These versions are home and covered by a flush.
    fn came_home(&mut self, home: &[Home]) {
        for (at, page) in home {
            if self.kept.get(at).is_some_and(|kept| Arc::ptr_eq(&kept.bytes, page)) {
                self.kept.remove(at);
            }
        }
    }

    fn keep(&mut self, sequence: u64, pages: impl Iterator<Item = Home>) {
        for (at, bytes) in pages {
            let since = self.kept.get(&at).map_or(sequence, |kept| kept.since);
            self.kept.insert(at, Kept { bytes, since });
        }
    }

    /// The first record that is needed, when `next` is the one that comes next.
    fn needed(&self, next: u64) -> u64 {
        self.kept.values().map(|kept| kept.since).min().unwrap_or(next)
    }
}

impl Journal {
    fn with_ledger<T>(&self, act: impl FnOnce(&mut Ledger) -> T) -> T {
        act(lock(&self.ledger).as_mut().expect("a journal that is on has a ledger"))
    }

    /// Where the journal is, if it has begun.
    pub(super) fn run(&self) -> Option<ImageSpan> {
        lock(&self.ledger).as_ref().map(|ledger| ledger.run)
    }

    /// All pages that are not home.
    pub(super) fn all_kept(&self) -> Vec<Home> {
        self.with_ledger(|ledger| ledger.kept.iter().map(|(at, kept)| (*at, kept.bytes.clone())).collect())
    }

    /// The pages that should go home now.
    fn relief(&self) -> Vec<Home> {
        let is_asked = self.relief_wanted.swap(false, Ordering::AcqRel);
        if !is_asked && !self.with_ledger(|ledger| ledger.wants_relief()) {
            return Vec::new();
        }
        let mut home = self.all_kept();
        let may_go = |(at, page): &Home| !self.is_unproven(at.span(page.len() as u64));
        home.retain(|home| may_go(home) || sabotage::is(Bug::HomeBeforeProven));
        home
    }

    /// A mistake: guest data that records have is forgotten, and not taken home either.
    pub(super) fn forget_full(&self, span: ImageSpan) {
        self.full.drop_all(span);
        self.with_ledger(|ledger| {
            ledger.kept.retain(|at, kept| kept.bytes.len() != SECTOR_LEN || !at.span(SECTOR).overlaps(span))
        });
    }
}

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
        let generation = journal.with_ledger(|ledger| ledger.generation);
        let key = journal.with_ledger(|ledger| ledger.key);
        let record = |items, tail| Record {
            generation,
            key,
            sequence,
            durable: sequence - 1,
            tail,
            asks_for_repair: false,
            items,
        };
        let mut full = record(items, journal.with_ledger(|ledger| ledger.tail));
        let longest = journal.with_ledger(|ledger| ledger.ring.record_max());
        if !sealed.refcounts.table.is_empty() || full.encoded_len() as u64 > longest {
            return self.commit_in_order(journal, sealed, full, &data).await;
        }
        let mut home = journal.relief();
        if sabotage::is(Bug::TailBeforeHome) && !home.is_empty() {
            full.tail = sequence;
        }
        let may_fail = journal.with_ledger(|ledger| ledger.ring.has_room());
        let mut homeward = Ok(());
        let both: [LocalFuture<'_, Result<()>>; 2] = [
            Box::pin(async {
                homeward = self.write_home(&home).await;
                Ok(())
            }),
            Box::pin(self.write_record(journal, &full)),
        ];
        try_join_all(both).await?;
        if let Err(error) = homeward {
            if !may_fail {
                return Err(error);
            }
            home.clear(); // they stay where they are, and are tried again
        }
        if sabotage::is(Bug::CheckpointBeforeCommit) {
            self.write_home(&pages_of(sealed).collect::<Vec<_>>()).await?;
        }
        self.flush_storage().await?; // commit point
        journal.has_proven(sequence - u64::from(!sabotage::is(Bug::DurableIsProven)));
        journal.with_ledger(|ledger| {
            ledger.ring.advance(full.tail);
            ledger.told = full.tail;
            ledger.came_home(&home);
            ledger.keep(sequence, pages_of(sealed).chain(data));
            if !home.is_empty() {
                ledger.tail = ledger.needed(sequence + 1);
                if sabotage::is(Bug::TailUsedEarly) {
                    ledger.ring.advance(ledger.tail);
                    journal.full.forget(ledger.tail);
                }
            }
        });
        journal.full.forget(full.tail);
        Ok(())
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
        self.write_record(journal, &proof).await?;
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
        self.write_record(journal, &barrier).await?;
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
            true => self.write_record(journal, &whole).await,
            false => Ok(()),
        }
    }

    pub(super) async fn write_home(&self, home: &[Home]) -> Result<()> {
        self.write_all(&self.home, home.iter().map(|(at, page)| (*at, &page[..])), "the mapping").await
    }

    async fn write_record(&self, journal: &Journal, record: &Record) -> Result<()> {
        let bytes = record.encode();
        let place = journal.with_ledger(|ledger| {
            let at = ledger.ring.place(record.sequence, bytes.len() as u64)?;
            Some(ledger.run.start() + at)
        });
        let place =
            place.ok_or_else(|| Error::new(ErrorKind::Poisoned, "the journal is full: reopen the image"))?;
        let written = self.metadata.write(place, Buffer::copy_of(&bytes)).await;
        written.context(|| format!("{}: can't write the journal", self.name))
    }
}

/// The pages of a transaction as they are to be at home.
fn pages_of(sealed: &Sealed) -> impl Iterator<Item = Home> + '_ {
    let l1 = sealed.l1.iter().map(|(at, bytes, _)| (*at, Arc::from(&bytes[..])));
    let pages = sealed.pages.iter().map(|page| (page.at, Arc::from(&page.bytes[..])));
    let refcounts = sealed.refcounts.pages.iter().map(|page| (page.at, Arc::from(&page.bytes[..])));
    l1.chain(pages).chain(refcounts)
}
