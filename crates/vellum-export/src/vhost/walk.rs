//! The descriptors of one chain, from the table in the guest's memory or from an indirect table.
//!
//! A chain that leaves the table, its memory or the rules ends with a descriptor that has a next one: the
//! gathering code sees that it has no end.
//!
//! Source: VIRTIO 1.2, 2.7.5.

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};

use super::chain::Link;
use super::memory::Memory;

/// How long a descriptor is.
const ROW_BYTES: u32 = 16;

/// A chain that is being walked along.
pub(super) struct Walk<'a> {
    memory: &'a Memory,
    table: u64,
    rows: u32,
    next: Option<u32>,
    /// How many more descriptors this table can have in one chain.
    left: u32,
    is_indirect: bool,
}

impl<'a> Walk<'a> {
    /// The chain that begins at `head` of a table of this many rows.
    pub(super) fn along(memory: &'a Memory, table: u64, rows: u16, head: u16) -> Self {
        let rows = u32::from(rows);
        Self { memory, table, rows, next: Some(u32::from(head)), left: rows, is_indirect: false }
    }

    fn row(&mut self) -> Option<Descriptor> {
        let index = self.next.take().filter(|index| *index < self.rows && self.left > 0)?;
        self.left -= 1;
        let at = self.table.checked_add(u64::from(index * ROW_BYTES))?;
        self.memory.mapped().read_obj(GuestAddress(at)).ok()
    }
}

impl Iterator for Walk<'_> {
    type Item = Link;

    fn next(&mut self) -> Option<Link> {
        let mut row = self.row()?;
        if row.refers_to_indirect_table() {
            let rows = row.len() / ROW_BYTES;
            let is_right =
                row.len().is_multiple_of(ROW_BYTES) && rows <= u32::from(u16::MAX) && !row.has_next();
            if self.is_indirect || !is_right {
                return None;
            }
            (self.table, self.rows, self.left) = (row.addr().0, rows, rows);
            (self.next, self.is_indirect) = (Some(0), true);
            row = self.row()?;
            if row.refers_to_indirect_table() {
                return None;
            }
        }
        self.next = row.has_next().then(|| u32::from(row.next()));
        Some(Link {
            at: row.addr().0,
            len: row.len(),
            is_writable: row.is_write_only(),
            has_next: row.has_next(),
        })
    }
}
