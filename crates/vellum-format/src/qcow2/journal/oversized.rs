//! The order of writes of a transaction that does not fit in a record. One that does is written as in every
//! format (`crate::journal::commit`). The choice of a commit's leader is in `engine/commit.rs`.
//!
//! ```text
//!   sealed ──► fits a record ──yes──► record, [checkpoint] ► flush                       commit point
//!                   │no
//!                   └► a record that verifies ► flush ► checkpoint ► flush
//!                                    ► a record that needs no other ► flush ► the ordered stages
//! ```
//!
//! A change that a record cannot express (a refcount table that grew), or that is too long for one, is
//! written in the ordered way. Older records must not undo it: their pages are checkpointed before, and the
//! record before it needs none of them. The two records ask for a repair, in case one of them is the last: a
//! crash halfway is repaired as in a dirty image.

use vellum_core::Result;

use super::super::commit::Sealed;
use super::super::image::Qcow2;
use crate::engine::{Commit as _, Map as _};
use crate::journal::commit::Medium as _;
use crate::journal::record::{Item, Record};
use crate::journal::{HomeWrite, Journal};

impl Qcow2 {
    /// Commits what does not fit in a record. The first flush comes before the mapping is written, so it
    /// needs no fence.
    pub(crate) async fn commit_in_order(
        &self,
        journal: &Journal,
        sealed: &Sealed,
        full: Record,
        data: &[HomeWrite],
    ) -> Result<()> {
        let pending: Vec<Item> =
            full.items.iter().filter(|item| matches!(item, Item::PendingRefcount { .. })).cloned().collect();
        // Verified first, because a page of the checkpoint may have checks. The pending refcounts of this
        // transaction have no meaning without it.
        let verifying = Record { items: Vec::new(), asks_for_repair: true, ..full };
        journal.write_record(self, &verifying).await?;
        self.flush_storage().await?;
        journal.note_verified(verifying.sequence - 1);
        let pages = journal.all_uncheckpointed();
        self.write_home(&pages).await?;
        self.flush_storage().await?;
        let sequence = journal.skip();
        let barrier =
            Record { sequence, durable: sequence - 1, tail: sequence, items: Vec::new(), ..verifying };
        let longest = journal.with_ledger(|ledger| ledger.ring.record_max());
        journal.write_record(self, &barrier).await?;
        self.flush_storage().await?;
        journal.with_ledger(|ledger| {
            ledger.ring.advance(sequence);
            (ledger.tail, ledger.durable_tail) = (sequence, sequence);
            ledger.drop_checkpointed(&pages);
        });
        self.write_home(data).await?;
        self.write_in_order(sealed).await?;
        journal.full.forget(sequence);
        journal.note_verified(sequence - 1); // what it counted on was flushed before the mapping
        // Once this record is durable, with the next flush, a crash no longer needs the repair. It may be
        // missing when the next record is there, because that one needs none before it.
        let sequence = journal.skip();
        journal.with_ledger(|ledger| ledger.tail = sequence + 1);
        let whole = Record {
            sequence,
            durable: sequence - 1,
            tail: sequence,
            asks_for_repair: false,
            items: pending,
            ..barrier
        };
        match whole.encoded_len() as u64 <= longest {
            true => journal.write_record(self, &whole).await,
            false => Ok(()),
        }
    }
}
