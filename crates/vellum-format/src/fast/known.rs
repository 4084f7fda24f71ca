//! What is known in memory of an open fast medium: whose its slots are, and who has which row open.

use roaring::RoaringBitmap;
use vellum_core::{Error, Random};

use super::layout::{Entry, ROWS, Row};
use crate::hash::HashMap;

/// Who has a row open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opened {
    /// So many images that are only read: the same one, in several chains.
    Reads(u32),
    /// One that may be written.
    Writes,
}

impl Opened {
    pub(super) const NOT: Self = Self::Reads(0);
}

pub(super) struct State {
    pub(super) rows: Vec<Option<Row>>,
    /// By row: which images of this process have it.
    pub(super) open: Vec<Opened>,
    /// By row.
    pub(super) used: Vec<u32>,
    /// By slot: what the medium says of it.
    pub(super) entries: Vec<Option<Entry>>,
    pub(super) free: RoaringBitmap,
    /// Slots that are free or were free when they were taken, and of which the medium says something, which may be
    /// nothing that can be read.
    pub(super) litter: RoaringBitmap,
    /// Rows that are damaged or cannot be read.
    pub(super) bad_rows: RoaringBitmap,
    /// Slots of whose entries nothing is known, or which were cut off.
    pub(super) blind: RoaringBitmap,
    /// The highest of all entries and rows.
    pub(super) sequence: u64,
    pub(super) random: Random,
    pub(super) failed: Option<Error>,
}

impl State {
    pub(super) fn row_of(&self, uuid: [u8; 16]) -> Option<u16> {
        let row = self.rows.iter().position(|row| row.as_ref().is_some_and(|row| row.uuid == uuid));
        row.map(|row| u16::try_from(row).expect("at most 1024"))
    }

    pub(super) fn free_row(&self) -> Option<u16> {
        let is_free =
            |row: &u16| self.rows[usize::from(*row)].is_none() && !self.bad_rows.contains((*row).into());
        (0..ROWS).find(is_free)
    }

    /// Finds out which slots may be in use: those with the newest entries of a unit of a disk that has a row.
    pub(super) fn find_free(&mut self) {
        let mut newest: HashMap<(u16, u64), u64> = HashMap::default();
        for entry in self.entries.iter().flatten() {
            let sequence = newest.entry((entry.row, entry.unit)).or_default();
            *sequence = entry.sequence.max(*sequence);
        }
        for (slot, entry) in (0..).zip(&self.entries) {
            let used = entry.filter(|one| newest.get(&(one.row, one.unit)) == Some(&one.sequence));
            match used {
                Some(entry) => self.used[usize::from(entry.row)] += 1,
                None if self.blind.contains(slot) => {}
                None => {
                    self.free.insert(slot);
                    if entry.is_some() {
                        self.litter.insert(slot);
                    }
                }
            }
        }
    }

    /// The slots that a row has.
    pub(super) fn slots_of(&self, row: u16) -> impl Iterator<Item = (u32, Entry)> {
        let of_row = move |(slot, entry): (u32, &Option<Entry>)| {
            entry.filter(|entry| entry.row == row && !self.free.contains(slot)).map(|entry| (slot, entry))
        };
        (0..).zip(&self.entries).filter_map(of_row)
    }

    pub(super) fn free_slots(&mut self, row: u16, slots: &[u32]) {
        for slot in slots {
            if self.free.insert(*slot) {
                self.used[usize::from(row)] -= 1;
                if self.entries[*slot as usize].is_some() {
                    self.litter.insert(*slot);
                }
            }
        }
    }

    pub(super) fn free_all_of(&mut self, row: u16) {
        let slots: Vec<u32> = self.slots_of(row).map(|(slot, _)| slot).collect();
        self.free_slots(row, &slots);
    }
}
