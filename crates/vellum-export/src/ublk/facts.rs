//! The parameters of a disk that the kernel is given.
//!
//! 1. The logical block is 512 bytes whatever lies below, so that an image reads the same wherever it is
//!    served. The preferred I/O size is reported as the physical block.
//! 2. Bytes behind the last whole sector of a disk cannot be reached.

use vellum_core::Geometry;

use super::request::{RANGE_SECTORS_MAX, SECTOR_BYTES, ZEROES_WRITTEN_SECTORS_MAX};

/// The physical block is at least this: files are written in pages, whatever an image can do below that.
const PHYSICAL_BYTES_MIN: u64 = 4096;

/// No larger size is reported as a block size or a preferred I/O size.
const BEST_BYTES_MAX: u64 = 32 << 20;

/// The parameters that the kernel is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// The size, in sectors.
    pub sectors: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// Each write is durable when it is answered.
    pub write_through: bool,
    /// The physical block, as a power of two.
    pub physical_shift: u8,
    /// What is best, as a power of two.
    pub best_shift: u8,
    /// The most sectors of one discard; zero when there are none.
    pub range_sectors_max: u32,
    /// The most sectors of one write-zeroes; fewer where each zero is written.
    pub zeroes_sectors_max: u32,
}

impl Facts {
    /// Those of a disk, which may be served for reading only, or write-through.
    pub fn new(geometry: &Geometry, read_only: bool, write_through: bool) -> Self {
        let shift = |bytes: u64| u8::try_from(bytes.min(BEST_BYTES_MAX).ilog2()).expect("below 64");
        let read_only = read_only || geometry.read_only;
        let physical = geometry.block_size.bytes().max(PHYSICAL_BYTES_MIN);
        Self {
            sectors: geometry.size / SECTOR_BYTES,
            read_only,
            write_through,
            physical_shift: shift(physical),
            best_shift: shift(geometry.preferred_size.bytes().max(physical)),
            range_sectors_max: if read_only { 0 } else { RANGE_SECTORS_MAX },
            zeroes_sectors_max: match (read_only, geometry.fast_zeroes) {
                (true, _) => 0,
                (false, true) => RANGE_SECTORS_MAX,
                (false, false) => ZEROES_WRITTEN_SECTORS_MAX,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::BlockSize;

    use super::*;

    #[test]
    fn a_disk_is_told_in_sectors_and_powers_of_two() {
        let block = |bytes: u64| BlockSize::from_bytes(bytes).expect("a power of two");
        let geometry = |size, block_size, preferred_size, read_only| Geometry {
            size,
            block_size: block(block_size),
            preferred_size: block(preferred_size),
            read_only,
            fast_zeroes: true,
        };
        let facts = Facts::new(&geometry((1 << 20) + 511, 512, 65536, false), false, false);
        let expected = Facts {
            sectors: 2048,
            read_only: false,
            write_through: false,
            physical_shift: 12,
            best_shift: 16,
            range_sectors_max: RANGE_SECTORS_MAX,
            zeroes_sectors_max: RANGE_SECTORS_MAX,
        };
        assert_eq!(facts, expected);
        let slow = Geometry { fast_zeroes: false, ..geometry((1 << 20) + 511, 512, 65536, false) };
        let expected = Facts { zeroes_sectors_max: ZEROES_WRITTEN_SECTORS_MAX, ..expected };
        assert_eq!(Facts::new(&slow, false, false), expected);
        for (of_disk, of_export) in [(true, false), (false, true), (true, true)] {
            let facts = Facts::new(&geometry(512, 512, 512, of_disk), of_export, true);
            let expected = Facts {
                sectors: 1,
                read_only: true,
                write_through: true,
                physical_shift: 12,
                best_shift: 12,
                range_sectors_max: 0,
                zeroes_sectors_max: 0,
            };
            assert_eq!(facts, expected);
        }
        let facts = Facts::new(&geometry(1 << 30, 1 << 16, 1 << 31, false), false, false);
        assert_eq!((facts.physical_shift, facts.best_shift), (16, 25));
    }
}
