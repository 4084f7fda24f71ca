//! What the blocks that are found keep to, or the cache is refused.
//!
//! ```text
//!   a plain group ─► its slots, a word of neighbours at a time    is none of it zero?    a row    not dirty in a region
//!   others ─────────► block by block: the same
//! ```
//!
//! 1. No two blocks have one slot, none has a slot and a run of zeros, each has a row, and nothing dirty is in a region that counts
//!    as written.
//! 2. The slots are taken. After an error what is taken says nothing.

use vellum_core::{Result, SharedStorage};

use super::refused;
use super::sieve::Sieve;
use crate::layout::{GROUP_PLACES, Key, ROWS_MAX};
use crate::map::{Entry, Head};
use crate::slice::Ledger;
use crate::slots::Slots;

/// The rules of a ledger.
pub(super) struct Rules<'a> {
    storage: &'a SharedStorage,
    ledger: &'a Ledger,
    /// Which groups its runs of zeros may have.
    zeros: Sieve,
    /// A bit for each row that there is.
    rows: [u64; ROWS_MAX.div_ceil(64) as usize],
}

fn which(key: Key) -> String {
    format!("block {} of disk {}", key.block(), key.row())
}

impl<'a> Rules<'a> {
    pub(super) fn of(storage: &'a SharedStorage, ledger: &'a Ledger) -> Self {
        let zeros = Sieve::of(ledger.zeros.runs().map(|run| (run.key.bits(), run.key.bits() + run.blocks)));
        let mut rows = [0; ROWS_MAX.div_ceil(64) as usize];
        for row in ledger.rows.keys() {
            rows[usize::from(row / 64)] |= 1 << (row % 64);
        }
        Self { storage, ledger, zeros, rows }
    }

    fn check_slot(&self, key: Key, is_free: bool) -> Result<()> {
        match is_free {
            true => Ok(()),
            false => Err(refused(self.storage, &format!("{} has the slot of another", which(key)))),
        }
    }

    fn check_zero(&self, key: Key) -> Result<()> {
        match self.ledger.zeros.get(key) {
            None => Ok(()),
            Some(_) => Err(refused(self.storage, &format!("{} has a slot and is zero", which(key)))),
        }
    }

    /// Of a group: it has a row, and nothing dirty is in a region that counts as written.
    fn check_group(&self, first: Key, dirty: impl FnOnce() -> Option<Key>) -> Result<()> {
        let row = first.row();
        if self.rows[usize::from(row / 64)] & 1 << (row % 64) == 0 {
            return Err(refused(self.storage, &format!("{} has no row", which(first))));
        }
        // A region has whole groups.
        if self.ledger.regions.len() == 0 || !self.ledger.regions.has(first) {
            return Ok(());
        }
        match dirty() {
            None => Ok(()),
            Some(key) => {
                let why = format!("{} is dirty, and its region counts as written", which(key));
                Err(refused(self.storage, &why))
            }
        }
    }

    /// A plain group.
    pub(super) fn take_plain(&self, slots: &mut Slots, head: &Head, payload: &[u8]) -> Result<()> {
        let mut numbers = [0; GROUP_PLACES];
        let numbers = head.numbers(payload, &mut numbers);
        if let Some(n) = slots.take_these(head.segment, numbers) {
            return self.check_slot(head.nth(n), false);
        }
        if self.zeros.may_have(head.key) {
            head.entries(payload).try_for_each(|(key, _)| self.check_zero(key))?;
        }
        let first_dirty = || head.entries(payload).find(|(_, entry)| entry.dirty).map(|(key, _)| key);
        self.check_group(head.nth(0), first_dirty)
    }

    /// The blocks of a group, at least one.
    pub(super) fn take(&self, slots: &mut Slots, group: &[(Key, Entry)]) -> Result<()> {
        let (first, _) = group[0];
        let may_be_zero = self.zeros.may_have(first.group());
        for (key, entry) in group {
            self.check_slot(*key, slots.take_this(entry.slot))?;
            if may_be_zero {
                self.check_zero(*key)?;
            }
        }
        self.check_group(first, || group.iter().find(|(_, entry)| entry.dirty).map(|(key, _)| *key))
    }
}
