//! The refcount table in memory: where each block lies.
//!
//! A new table is a cluster of zeros with one entry or two. What is behind the last entry that is not zero takes
//! no memory, so that a server of a thousand new images does not hold a thousand clusters of zeros.

use crate::bytes::{be64, put64};

/// The image offsets of the blocks; 0 where there is none.
pub(super) struct Table {
    /// Up to the last one that is not zero, at least.
    entries: Vec<u64>,
    /// The number of all entries.
    len: usize,
}

impl Table {
    /// The table with these bytes.
    pub(super) fn of(bytes: &[u8]) -> Self {
        let all = bytes.chunks_exact(8);
        let (len, used) =
            (all.len(), all.clone().rposition(|entry| *entry != [0; 8]).map_or(0, |last| last + 1));
        Self { entries: all.take(used).map(|entry| be64(entry, 0)).collect(), len }
    }

    /// The number of entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Where a block lies, if there is one.
    pub(super) fn block(&self, index: usize) -> Option<u64> {
        self.entries.get(index).copied().filter(|at| *at != 0)
    }

    /// All blocks: their entries, and where they lie.
    pub(super) fn blocks(&self) -> impl DoubleEndedIterator<Item = (usize, u64)> {
        self.entries.iter().copied().enumerate().filter(|(_, at)| *at != 0)
    }

    /// Makes the table longer, with entries that are zero.
    pub(super) fn extend(&mut self, len: usize) {
        self.len = self.len.max(len);
    }

    /// Enters a block.
    pub(super) fn set(&mut self, index: usize, at: u64) {
        assert!(index < self.len, "entry {index} of {}", self.len);
        if index >= self.entries.len() {
            self.entries.resize(index + 1, 0);
        }
        self.entries[index] = at;
    }

    /// The bytes of `count` entries from `first` on, or of those that there are.
    pub(super) fn bytes(&self, first: usize, count: usize) -> Vec<u8> {
        let end = self.len.min(first.saturating_add(count));
        let mut bytes = vec![0; end.saturating_sub(first) * 8];
        for (index, at) in self.entries.iter().enumerate().take(end).skip(first) {
            put64(&mut bytes, (index - first) * 8, *at);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_at_the_end_take_no_memory_and_are_there() {
        let mut bytes = vec![0; 64 << 10];
        put64(&mut bytes, 0, 0x2_0000);
        put64(&mut bytes, 16, 0x5_0000);
        let mut table = Table::of(&bytes);
        assert_eq!((table.len(), table.entries.len()), (8192, 3));
        assert_eq!(
            [0, 1, 2, 3, 9000].map(|index| table.block(index)),
            [Some(0x2_0000), None, Some(0x5_0000), None, None]
        );
        assert!(table.bytes(0, usize::MAX) == bytes);
        assert_eq!(table.bytes(8000, 512).len(), 192 * 8);
        table.extend(10_000);
        table.set(9999, 0x7_0000);
        assert_eq!(table.blocks().next_back(), Some((9999, 0x7_0000)));
        bytes.resize(80_000, 0);
        put64(&mut bytes, 9999 * 8, 0x7_0000);
        assert!(table.bytes(0, 10_000) == bytes);
        assert_eq!(table.bytes(9998, 2), bytes[79_984..]);
        let empty = Table::of(&[]);
        assert_eq!((empty.len(), empty.blocks().count(), empty.bytes(0, 9).len()), (0, 0, 0));
    }
}
