//! Further parts of the table and of the zone table: how a disk outgrows what its image was made for.
//!
//! ```text
//!   home                                           data
//!   ├─ ─┬────────────┬─ ─┬───────────────┬─ ─┤     ├──────┬──────┬──────────────┬────────────┬──────┬─ ─ ─ ─┬────────────
//!   │   │ entries    │   │ zones 0 to 15 │   │     │ unit │ unit │ entries from │ zones from │ unit │       │ entries from
//!   │   │ 0 to 1023  │   │               │   │     │      │      │ 1024 on      │ 16 on      │      │       │ 17408 on
//!   └─ ─┴────────────┴─ ─┴───────────────┴─ ─┘     └──────┴──────┴──────────────┴────────────┴──────┴─ ─ ─ ─┴────────────
//!       the region         the region                            ╰───── part 1 ──────────────╯              ╰── part 2 ─ ─
//! ```
//!
//! 1. A part is a run of units that the superblock names and no table does. Its pages are pages of home: the
//!    journal changes them and snapshots keep copies of them, by their places. So nothing that exists moves
//!    when a disk grows.
//! 2. A part makes the table at least four times as long. So [`PARTS_MAX`] parts are enough for the longest
//!    table, whatever its first length.
//! 3. Parts stay. A disk that shrinks keeps them, and their entries behind its end are zero, as in the
//!    region.
//!
//! `table_places.rs` finds the entries in them. `resize.rs` makes a part.

use vellum_core::{ImageOffset, ImageSpan};

/// The largest number of parts that is ever needed.
pub const PARTS_MAX: usize = 8;

/// Further entries of the table, followed by further entries of the zone table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Its offset: the beginning of a unit.
    pub at: ImageOffset,
    /// The length of its piece of the table, in bytes.
    pub table_len: u64,
    /// The length of its piece of the zone table, in bytes.
    pub zones_len: u64,
}

impl Part {
    /// No part.
    pub(super) const NONE: Self = Self { at: ImageOffset::ZERO, table_len: 0, zones_len: 0 };

    /// The pages of the part that belong to home.
    pub fn home(&self) -> ImageSpan {
        self.at.span(self.table_len + self.zones_len)
    }

    /// Its piece of the table.
    pub(super) fn table(&self) -> ImageSpan {
        self.at.span(self.table_len)
    }

    /// Its piece of the zone table.
    pub(super) fn zones(&self) -> ImageSpan {
        self.home().split_at(self.table_len).1
    }
}

/// All parts of an image. Those that exist come first.
pub type Parts = [Part; PARTS_MAX];
