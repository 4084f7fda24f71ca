//! Recovery: makes an image consistent after a crash.
//!
//! The records that count are chosen by the table in `journal/cases.rs`. If the newest of them asks for a
//! repair, the tables were being changed in place: the records are replayed, then the image is repaired.
//!
//! ```text
//!   flush ► drop what only a cache has ► read the run ► verify the newest ─fails► void ► flush ► the older
//!         ► replay in memory ► lower pending refcounts ► a record of the result (the newest is durable) ► flush
//!         ► checkpoint of zeros and pages ► flush ► [repair] ► header without the bit ► flush          commit point
//! ```
//!
//! 1. Up to the last step every input stays as it was, or is replaced by one that says the same, so recovery
//!    may be interrupted anywhere and started again. The record that is added has no checks, so pages that
//!    are then checkpointed cannot fail the checks of the record before it.
//! 2. The cost is bounded by the journal, whatever the size of the image: one read of the run, the checks of
//!    one transaction, one write of each changed page. Only a repair looks at everything.
//! 3. The journal's bytes are trusted only to change the contents of clusters: nothing is written to the
//!    header, to the journal itself or far behind the end.

use std::collections::BTreeSet;

use vellum_core::{BlockSize, Error, ImageOffset, ImageSpan, Result, SharedStorage, Storage, Zeroes};

use super::super::header::Header;
use super::super::layout::{METADATA_PAGE, OFFSET_MASK, be64, incompatible};
use super::super::refcount;
use super::super::tail::give_back_tail;
use super::extension::Extension;
use crate::journal::find::{Found, Needed, Place, find};
use crate::journal::record::{Item, Record};
use crate::journal::replay::{self, Replay, Rules};
use crate::journal::words::items_of;
use crate::report::Recovery;
use crate::truth::settle;

/// The journal may extend the file by at most this many bytes: the length itself may have been lost in the
/// crash.
const GROWTH_MAX: u64 = 1 << 40;
/// More pending refcounts than this are left to a repair.
const PENDING_MAX: u64 = 1 << 24;

/// Replays the journal of an image that was not closed ([`Header::needs_replay`]), and calls `repair` when
/// the journal asks for that.
pub(crate) async fn replay(
    image: &SharedStorage,
    repair: impl AsyncFnOnce(&Header) -> Result<()>,
) -> Result<Recovery> {
    let storage = &**image;
    settle(storage).await?;
    let header = &Header::read(storage).await?;
    if !header.needs_replay() {
        return Ok(Recovery::default());
    }
    let (extension, _) =
        header.journal.ok_or_else(|| Error::corrupt("the header does not say where the journal is"))?;
    let run = extension.run;
    let cluster = header.cluster_size();
    if run.is_empty() || !cluster.aligns(run.start()) || run.start().bytes() == 0 {
        return Err(Error::corrupt("the journal cannot lie where the header says"));
    }
    let place = Place { run, generation: extension.generation, key: extension.key };
    // Only the native format has packed blocks.
    let names_lost = async |_: &[Found]| Ok(false);
    let Needed { records: needed, left_out, .. } = find(storage, place, names_lost).await?;
    let mut recovery = Recovery { left_out, ..Recovery::default() };
    let Some(newest) = needed.last() else {
        forget(header, storage, run).await?;
        return Ok(recovery);
    };
    let newest = newest.record.clone();

    let mut tables = Tables::new(header, storage, run);
    for found in &needed {
        tables.replay.replay(&found.record).await?;
    }
    recovery.records = needed.len() as u64;
    let mut asks_for_repair = newest.asks_for_repair;
    if !asks_for_repair {
        match tables.lower_pending(&newest).await? {
            Some(count) => recovery.given_back = count,
            None => asks_for_repair = true,
        }
    }
    let is_recorded = replay::is_result(&newest) && asks_for_repair == newest.asks_for_repair;
    if !is_recorded {
        let result = Record {
            sequence: newest.sequence + 1,
            durable: newest.sequence,
            asks_for_repair,
            items: match asks_for_repair {
                true => Vec::new(),
                false => tables.lowered_items(),
            },
            ..newest
        };
        asks_for_repair = replay::write_result(storage, run, &needed, result).await?;
    }
    recovery.pages = tables.replay.checkpoint().await?;
    storage.flush().await?;
    if asks_for_repair {
        repair(header).await?;
        recovery.repaired = true;
    }
    forget(&Header::read(storage).await?, storage, run).await?;
    Ok(recovery)
}

/// Clears the bit, and forgets where the journal was. Gives back space by which the file grew and that is not
/// in use: before the bit is cleared, what lies behind the journal; after it is cleared, the journal too, if
/// it is last. What lies before the journal was there when the image was opened.
async fn forget(header: &Header, storage: &dyn Storage, run: ImageSpan) -> Result<()> {
    give_back_tail(header, storage, run).await?;
    let mut header = header.clone();
    let (extension, _) = header.journal.expect("as before");
    header.set_journal(Extension { run: ImageOffset::ZERO.span(0), key: 0, ..extension });
    header.set_features(header.incompatible & !incompatible::JOURNAL, header.autoclear);
    storage.write(ImageOffset::ZERO, header.first_sector()).await?;
    storage.flush().await?; // commit point of the recovery
    give_back_tail(&header, storage, run.start().span(0)).await?;
    if storage.limits().fast_zeroes && run.end().bytes() <= storage.len() {
        let _ = storage.write_zeroes(run, Zeroes::MayUnmap).await; // free space from now on
    }
    Ok(())
}

/// The bytes of a qcow2 image that a journal may change.
struct Places<'a> {
    header: &'a Header,
    run: ImageSpan,
    /// Nothing may be written behind this.
    end: u64,
}

impl Rules for Places<'_> {
    fn check_words(&self, span: ImageSpan) -> Result<()> {
        let is_header = span.start().bytes() < self.header.cluster_size().bytes();
        if is_header || span.overlaps(self.run) || span.end().bytes() > self.end {
            return Err(Error::corrupt(format!(
                "the journal changes bytes at {}, which belong to no table",
                span.start()
            )));
        }
        Ok(())
    }

    fn check_data(&self, span: ImageSpan) -> Result<()> {
        self.check_words(span)
    }

    fn table(&self) -> BlockSize {
        self.header.cluster_size()
    }

    fn page(&self) -> BlockSize {
        METADATA_PAGE.min(self.header.cluster_size())
    }
}

/// The image's tables as they will be, and the refcounts among them.
struct Tables<'a> {
    header: &'a Header,
    replay: Replay<'a, Places<'a>>,
    /// Words of refcounts that were lowered.
    lowered: BTreeSet<ImageOffset>,
}

impl<'a> Tables<'a> {
    fn new(header: &'a Header, storage: &'a dyn Storage, run: ImageSpan) -> Self {
        let end = storage.len().saturating_add(if storage.limits().fixed_len { 0 } else { GROWTH_MAX });
        let places = Places { header, run, end };
        Self { header, replay: Replay::new(places, storage), lowered: BTreeSet::new() }
    }

    /// Lowers the pending refcounts. Returns how many, or `None` when they are not what the journal
    /// expects and the image needs a repair.
    async fn lower_pending(&mut self, record: &Record) -> Result<Option<u64>> {
        let mut lowered = 0;
        for item in &record.items {
            let Item::PendingRefcount { first, count } = item else { continue };
            lowered += count;
            let end = (first + count).checked_mul(self.header.cluster_size().bytes());
            if lowered > PENDING_MAX || end.is_none_or(|end| end > self.replay.rules.end) {
                return Ok(None);
            }
            for cluster in *first..first + count {
                if !self.lower(cluster).await? {
                    return Ok(None);
                }
            }
        }
        Ok(Some(lowered))
    }

    async fn lower(&mut self, cluster: u64) -> Result<bool> {
        let order = self.header.refcount_order;
        let per_block = (self.header.cluster_size().bytes() * 8) >> order;
        let entry = self.header.refcount_table.start() + (cluster / per_block) * 8;
        if entry >= self.header.refcount_table.end() {
            return Ok(false);
        }
        if self.replay.is_full() {
            return Ok(false); // more than a journal of its size can need
        }
        let (table, within) = self.replay.page(entry).await?;
        let block = ImageOffset::new(be64(table, within) & OFFSET_MASK);
        if block.bytes() == 0 || !self.header.cluster_size().aligns(block) {
            return Ok(false);
        }
        let index = cluster % per_block;
        let word = block + ((index << order) / 64) * 8;
        self.replay.rules.check_words(word.span(8))?;
        let per_word = 64 >> order;
        let (page, within) = self.replay.page(word).await?;
        let word_bytes = &mut page[within..within + 8];
        let count = refcount::read(word_bytes, order, index % per_word);
        if count == 0 {
            return Ok(false);
        }
        refcount::write(word_bytes, order, index % per_word, count - 1);
        self.lowered.insert(word);
        Ok(true)
    }

    fn lowered_items(&self) -> Vec<Item> {
        items_of(self.lowered.iter().map(|word| {
            let (page, within) = self.replay.seen_page(*word);
            (*word, be64(page, within))
        }))
    }
}
