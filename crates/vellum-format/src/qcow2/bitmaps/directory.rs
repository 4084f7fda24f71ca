//! The directory of the bitmaps: its entries, read as untrusted bytes and written again.
//!
//! ```text
//!   │ table 8 │ entries 4 │ flags 4 │ type 1 │ granularity 1 │ name length 2 │ extra length 4 │ extra │ name │ pad to 8 │
//! ```
//!
//! 1. An entry that is not understood is kept as it is, with its extra data.
//! 2. What an entry has that this program uses is checked in [`Entry::check`] and [`Entry::table`].
//!
//! Source: QEMU's `docs/interop/qcow2.rst`, "Bitmaps".

use vellum_core::{BlockSize, Error, ImageSpan, Result};

use super::bits::BITMAP_BYTES_MAX;
use crate::qcow2::header::Header;
use crate::qcow2::layout::{be16, be32, be64, put32, put64};

const FIXED_LEN: usize = 24;
const IN_USE: u32 = 1 << 0;
const AUTO: u32 = 1 << 1;
const EXTRA_COMPATIBLE: u32 = 1 << 2;
const DIRTY_TRACKING: u8 = 1;
/// The granularities that QEMU reads, as powers of two.
pub(super) const GRANULARITY_BITS: std::ops::RangeInclusive<u32> = 9..=31;
/// The longest name, in bytes, as in QEMU.
pub(super) const NAME_BYTES_MAX: usize = 1023;
/// Bitmaps of an image, as in QEMU.
pub(super) const COUNT_MAX: usize = 65535;

/// One bitmap, as the directory has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    table_at: u64,
    table_entries: u32,
    flags: u32,
    kind: u8,
    bits: u8,
    extra: Vec<u8>,
    pub(super) name: Vec<u8>,
}

impl Entry {
    /// A new bitmap, enabled, whose table is set later.
    pub(super) fn new(name: &str, granularity_bits: u32) -> Self {
        Self {
            table_at: 0,
            table_entries: 0,
            flags: AUTO,
            kind: DIRTY_TRACKING,
            bits: u8::try_from(granularity_bits).expect("at most 31"),
            extra: Vec::new(),
            name: name.as_bytes().to_vec(),
        }
    }

    /// Its name, for people.
    pub(super) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.name).into_owned()
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.flags & IN_USE != 0
    }

    pub(super) fn is_auto(&self) -> bool {
        self.flags & AUTO != 0
    }

    pub(super) fn set_auto(&mut self, is_auto: bool) {
        self.flags = if is_auto { self.flags | AUTO } else { self.flags & !AUTO };
    }

    /// Bytes that a bit stands for, as a power of two.
    pub(super) fn granularity_bits(&self) -> u32 {
        u32::from(self.bits)
    }

    pub(super) fn set_table(&mut self, table: ImageSpan) {
        self.table_at = table.start().bytes();
        self.table_entries = u32::try_from(table.len() / 8).expect("a table is short");
    }

    /// Whether it is a bitmap that this program can use: of a known kind, saved by the last program that had it, and as long as
    /// the disk.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub(super) fn check(&self, header: &Header) -> Result<()> {
        let name = self.shown();
        if self.kind != DIRTY_TRACKING || self.flags & !(IN_USE | AUTO | EXTRA_COMPATIBLE) != 0 {
            return Err(Error::unsupported(format!("bitmap {name} is of a kind that is not known")));
        }
        if !self.extra.is_empty() && self.flags & EXTRA_COMPATIBLE == 0 {
            return Err(Error::unsupported(format!("bitmap {name} has extra data that is not known")));
        }
        if !GRANULARITY_BITS.contains(&self.granularity_bits()) {
            return Err(Error::unsupported(format!(
                "bitmap {name} has a granularity of 2^{} bytes; 2^9 to 2^31 are supported",
                self.bits
            )));
        }
        if self.is_in_use() {
            return Err(Error::corrupt(format!(
                "bitmap {name} is inconsistent: a program that changed the disk has not saved it. Remove it, add a new one, and \
                 make a full backup"
            )));
        }
        let needed = data_bytes(header.size(), self.granularity_bits())
            .map(|bytes| header.cluster_size().count_for(bytes))
            .filter(|clusters| *clusters == u64::from(self.table_entries));
        match needed {
            Some(_) => Ok(()),
            None => Err(Error::corrupt(format!("bitmap {name} is not as long as the disk"))),
        }
    }

    /// The place of its table.
    ///
    /// # Errors
    /// `Corrupt` for an impossible one.
    pub(super) fn table(&self, header: &Header) -> Result<ImageSpan> {
        header.table(self.table_at, u64::from(self.table_entries) * 8, "bitmap table")
    }

    fn put(&self, bytes: &mut Vec<u8>) {
        let mut fixed = [0; FIXED_LEN];
        put64(&mut fixed, 0, self.table_at);
        put32(&mut fixed, 8, self.table_entries);
        put32(&mut fixed, 12, self.flags);
        (fixed[16], fixed[17]) = (self.kind, self.bits);
        let name_len = u16::try_from(self.name.len()).expect("it was read from 16 bits, or is at most 1023");
        fixed[18..20].copy_from_slice(&name_len.to_be_bytes());
        put32(&mut fixed, 20, u32::try_from(self.extra.len()).expect("it was read from 32 bits"));
        bytes.extend_from_slice(&fixed);
        bytes.extend_from_slice(&self.extra);
        bytes.extend_from_slice(&self.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
}

/// Bytes of the bits of a disk of this size; nothing where they are too many.
pub(super) fn data_bytes(size: u64, granularity_bits: u32) -> Option<u64> {
    let bytes = size.div_ceil(1 << granularity_bits).div_ceil(8);
    (bytes <= BITMAP_BYTES_MAX).then_some(bytes)
}

/// The clusters of the bits of a disk, which are the entries of the table.
pub(super) fn table_entries(size: u64, granularity_bits: u32, cluster: BlockSize) -> Result<u64> {
    data_bytes(size, granularity_bits).map(|bytes| cluster.count_for(bytes)).ok_or_else(|| {
        Error::unsupported(format!(
            "a disk of {size} bytes has too many granules of 2^{granularity_bits} bytes: use a larger granularity"
        ))
    })
}

/// Reads the entries of a directory.
pub(super) fn parse(directory: &[u8], count: u32) -> Result<Vec<Entry>> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut at = 0;
    for _ in 0..count {
        let ends = || Error::corrupt("it ends too early");
        let fixed = directory.get(at..at + FIXED_LEN).ok_or_else(ends)?;
        let (name_len, extra_len) = (usize::from(be16(fixed, 18)), be32(fixed, 20) as usize);
        let extra_at = at + FIXED_LEN;
        let name_at = extra_at.checked_add(extra_len).ok_or_else(ends)?;
        let end = name_at.checked_add(name_len).ok_or_else(ends)?;
        let name = directory.get(name_at..end).ok_or_else(ends)?;
        if fixed[17] > 63 {
            return Err(Error::corrupt(format!("a granularity of 2^{} bytes is impossible", fixed[17])));
        }
        entries.push(Entry {
            table_at: be64(fixed, 0),
            table_entries: be32(fixed, 8),
            flags: be32(fixed, 12),
            kind: fixed[16],
            bits: fixed[17],
            extra: directory[extra_at..name_at].to_vec(),
            name: name.to_vec(),
        });
        at = end.next_multiple_of(8);
    }
    Ok(entries)
}

/// The bytes of a directory with these entries.
pub(super) fn encode(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    entries.iter().for_each(|entry| entry.put(&mut bytes));
    bytes
}

#[cfg(test)]
mod tests {
    use vellum_core::ImageOffset;

    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let mut first = Entry::new("daily", 16);
        first.set_table(ImageOffset::new(0x5_0000).span(32));
        let mut second = Entry::new("größer", 9);
        second.set_auto(false);
        second.extra = vec![1, 2, 3];
        second.flags |= EXTRA_COMPATIBLE | IN_USE;
        let bytes = encode(&[first.clone(), second.clone()]);
        assert!(bytes.len().is_multiple_of(8));
        assert_eq!(parse(&bytes, 2).unwrap(), [first, second]);
        assert_eq!(parse(&bytes, 0).unwrap(), []);
    }

    #[test]
    fn a_directory_that_contradicts_itself_is_refused() {
        let good = encode(&[Entry::new("daily", 16)]);
        for len in 0..FIXED_LEN + 5 {
            assert!(parse(&good[..len], 1).is_err(), "cut off at {len}");
        }
        assert!(parse(&good, 2).is_err(), "more entries than bytes");
        for (at, value) in [(17, 64), (18, 0xFF), (20, 0xFF)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(parse(&bad, 1).is_err(), "{at}");
        }
    }

    #[test]
    fn the_bits_of_a_disk_fill_whole_clusters() {
        let cluster = BlockSize::from_shift(16);
        assert_eq!(table_entries(1 << 40, 16, cluster).unwrap(), 32);
        assert_eq!(table_entries((1 << 40) + 1, 16, cluster).unwrap(), 33);
        assert_eq!(table_entries(0, 16, cluster).unwrap(), 0);
        assert!(table_entries(1 << 50, 9, cluster).is_err());
    }
}
