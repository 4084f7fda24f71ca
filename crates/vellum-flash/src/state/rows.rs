//! The rows of the disks: which there are, and which number of a session counts.

use vellum_core::{Error, Result};

use super::State;
use crate::layout::{Key, ROWS_MAX};
use crate::open::Share;
use crate::record::{Item, Row};

impl State {
    /// The row of a disk that no session names.
    pub(crate) fn row_of(&self, disk: u128) -> Option<Row> {
        let is_it = |row: &&Row| row.disk == disk && row.named == 0 && row.newest == 0;
        self.ledger.rows.values().find(is_it).copied()
    }

    /// A new row for the disk.
    pub(crate) fn add_row(&mut self, disk: u128) -> Result<Row> {
        let free = (0..ROWS_MAX).find(|number| !self.ledger.rows.contains_key(number));
        let Some(number) = free else {
            let why = format!(
                "the flash cache knows {ROWS_MAX} disks already: forget one of them with `vellum flash forget`"
            );
            return Err(Error::new(vellum_core::ErrorKind::NoSpace, why));
        };
        let row = Row { number, has_record: false, disk, named: 0, newest: 0 };
        self.set_row(row);
        Ok(row)
    }

    pub(crate) fn set_row(&mut self, row: Row) {
        self.ledger.rows.insert(row.number, row);
        self.open.note_ledger(Item::Row(row), Share::Guest);
    }

    /// The row has a new number, which the image does not name yet. Until it does, no block is published: a record would
    /// void the number that the image still names.
    pub(crate) fn begin_row(&mut self, row: Row) {
        self.undecided.insert(row.number);
        self.set_row(row);
    }

    /// The image that is opened names the newest number of the row, and that is the only one which counts.
    pub(crate) fn decide_row(&mut self, row: Row) {
        self.undecided.remove(&row.number);
        if self.ledger.rows.get(&row.number) != Some(&row) {
            self.set_row(row);
        }
    }

    /// The image names the newest number of the row. The next commit says so, also when all that was written until then
    /// lies in place and needs no record: a copy that names the number before must not count after a flush.
    pub(crate) fn row_has_begun(&mut self, row: u16) {
        self.undecided.remove(&row);
        self.note_record(row, Share::Guest);
    }

    /// Whether a block of the disk must not be published now.
    pub(crate) fn is_undecided(&self, row: u16) -> bool {
        self.undecided.contains(&row)
    }

    /// Nothing of the disk is cached any more, and its row is free.
    pub(crate) fn remove_row(&mut self, row: u16) {
        let keys = self.map.keys_between(Key::new(row, 0), crate::layout::BLOCKS_MAX);
        for key in keys {
            self.forget(key);
        }
        self.open.forget_blocks(Key::new(row, 0), crate::layout::BLOCKS_MAX);
        self.ledger.zeros.remove_row(row);
        self.ledger.regions.remove_row(row);
        self.uses.forget_row(row);
        self.ledger.rows.remove(&row);
        self.counts.remove(&row);
        self.undecided.remove(&row);
        self.open.note_ledger(Item::NoRow(row), Share::Guest);
    }
}
