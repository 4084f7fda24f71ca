//! What a guest reads about its disk before it sends a request: the features, and the configuration space.
//!
//! ```text
//!    0  capacity, in sectors of 512   24  physical blocks, preferred size   36  discard: limits, alignment
//!    8  size_max, 12 seg_max          32  write cache switch: none, zero    48  write-zeroes: limits, unmap
//!   20  block size                    34  queues                            60  what is not offered: zeros
//! ```
//!
//! 1. The logical block is 512 bytes whatever lies below, so that an image reads the same wherever it is
//!    served. The preferred I/O size is reported as the physical block.
//! 2. A guest that cannot send flushes is served write-through (VIRTIO 1.2, 5.2.6.2).
//! 3. The guest cannot switch the write cache: a front end that connects to the next server does not repeat
//!    the state of the switch.
//!
//! Source: VIRTIO 1.2, 5.2.4; its fields are little-endian.

use std::sync::atomic::{AtomicU64, Ordering};

use vellum_core::Geometry;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::request::{RANGE_SECTORS_MAX, RANGES_MAX, REQUEST_BYTES_MAX, SECTOR_BYTES, Terms};

/// The most segments of a request's data, and the most bytes of each: what QEMU's smallest usual queue has
/// room for, and what is one transfer for us.
const SEGMENTS_MAX: u32 = 126;
const SEGMENT_BYTES_MAX: u32 = 256 << 10;
const _: () = assert!(SEGMENTS_MAX as usize * SEGMENT_BYTES_MAX as usize <= REQUEST_BYTES_MAX);

/// The physical block that guests are given: files are written in pages, whatever granularity an image
/// supports below that.
const PHYSICAL_BYTES_MIN: u64 = 4096;

/// As much of the space as there can be (`VHOST_USER_CONFIG_SIZE`).
pub(super) const CONFIG_BYTES_MAX: usize = 256;

/// Where a guest switches the write cache that took the switch from an earlier server.
pub(super) const WRITEBACK_AT: usize = 32;

/// What earlier servers offered. A guest that took it comes back with it.
pub(super) const OFFERED_BEFORE: u64 = bit(VIRTIO_BLK_F_CONFIG_WCE);

/// What this device is, for one front end.
#[derive(Debug)]
pub(super) struct Facts {
    /// The size of the disk, in sectors.
    sectors: AtomicU64,
    read_only: bool,
    physical: u64,
    preferred: u64,
    queues: u16,
}

impl Facts {
    pub(super) fn new(geometry: &Geometry, read_only: bool, queues: u16) -> Self {
        let physical = geometry.block_size.bytes().max(PHYSICAL_BYTES_MIN);
        Self {
            sectors: AtomicU64::new(geometry.size / SECTOR_BYTES),
            read_only: read_only || geometry.read_only,
            physical,
            preferred: geometry.preferred_size.bytes().max(physical),
            queues,
        }
    }

    /// What requests are measured by now.
    pub(super) fn terms(&self) -> Terms {
        Terms { sectors: self.sectors.load(Ordering::Relaxed), read_only: self.read_only }
    }

    /// Reads the current size of the disk, and returns it in sectors.
    pub(super) fn update_size(&self, geometry: &Geometry) -> u64 {
        let sectors = geometry.size / SECTOR_BYTES;
        self.sectors.store(sectors, Ordering::Relaxed);
        sectors
    }

    /// The features that are offered.
    pub(super) fn features(&self) -> u64 {
        let always = [
            VIRTIO_BLK_F_SIZE_MAX,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_TOPOLOGY,
            VIRTIO_BLK_F_MQ,
            VIRTIO_RING_F_INDIRECT_DESC,
            VIRTIO_RING_F_EVENT_IDX,
            VIRTIO_F_VERSION_1,
        ];
        let by_kind: &[u32] = match self.read_only {
            true => &[VIRTIO_BLK_F_RO],
            false => &[VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES],
        };
        always.iter().chain(by_kind).fold(0, |all, feature| all | bit(*feature))
    }

    /// The configuration space.
    pub(super) fn space(&self) -> [u8; CONFIG_BYTES_MAX] {
        let mut space = [0; CONFIG_BYTES_MAX];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        let in_sectors = |bytes: u64| bytes / SECTOR_BYTES;
        let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        put(0, &self.terms().sectors.to_le_bytes());
        put(8, &SEGMENT_BYTES_MAX.to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        put(20, &narrow(SECTOR_BYTES).to_le_bytes());
        put(24, &[u8::try_from(in_sectors(self.physical).trailing_zeros()).expect("below 64"), 0]);
        put(26, &u16::try_from(in_sectors(self.physical)).unwrap_or(u16::MAX).to_le_bytes());
        put(28, &narrow(in_sectors(self.preferred)).to_le_bytes());
        put(34, &self.queues.to_le_bytes());
        if !self.read_only {
            put(36, &RANGE_SECTORS_MAX.to_le_bytes());
            put(40, &RANGES_MAX.to_le_bytes());
            put(44, &narrow(in_sectors(self.physical)).to_le_bytes());
            put(48, &RANGE_SECTORS_MAX.to_le_bytes());
            put(52, &RANGES_MAX.to_le_bytes());
            put(56, &[1]);
        }
        space
    }
}

/// Whether every write of a guest that accepted these features is made durable. A guest that accepted the
/// switch from an earlier server may have used it, and does not say so again.
pub(super) fn is_writethrough(taken: u64) -> bool {
    !has(taken, VIRTIO_BLK_F_FLUSH) || has(taken, VIRTIO_BLK_F_CONFIG_WCE)
}

/// Whether a feature was taken.
pub(super) fn has(taken: u64, feature: u32) -> bool {
    taken & bit(feature) != 0
}

const fn bit(feature: u32) -> u64 {
    1 << feature
}

#[cfg(test)]
mod tests {
    use vellum_core::BlockSize;

    use super::*;

    fn facts(block: u64, read_only: bool) -> Facts {
        let geometry = Geometry {
            size: (3 << 20) + 700,
            block_size: BlockSize::from_bytes(block).expect("a power of two"),
            preferred_size: BlockSize::from_bytes(65536).expect("a power of two"),
            read_only: false,
            fast_zeroes: true,
        };
        Facts::new(&geometry, read_only, 4)
    }

    fn number(space: &[u8], at: usize, len: usize) -> u64 {
        space[at..at + len].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    #[test]
    fn every_field_is_where_the_specification_has_it() {
        let space = facts(512, false).space();
        let fields = [
            (0, 8, (3 << 11) + 1), // what is behind the last whole sector is left out
            (8, 4, 256 << 10),
            (12, 4, 126),
            (16, 4, 0),
            (20, 4, 512),
            (24, 1, 3),
            (25, 1, 0),
            (26, 2, 8),
            (28, 4, 128),
            (32, 1, 0),
            (34, 2, 4),
            (36, 4, 1 << 22),
            (40, 4, 32),
            (44, 4, 8),
            (48, 4, 1 << 22),
            (52, 4, 32),
            (56, 1, 1),
            (57, 8, 0),
        ];
        for (at, len, expected) in fields {
            assert_eq!(number(&space, at, len), expected, "{len} bytes at {at}");
        }
        assert_eq!(number(&facts(512, true).space(), 36, 24), 0);
        assert_eq!(number(&facts(65536, false).space(), 24, 1), 7);
    }

    #[test]
    fn what_cannot_be_done_is_not_offered() {
        let offered = |read_only, feature| has(facts(512, read_only).features(), feature);
        assert!(offered(false, VIRTIO_BLK_F_DISCARD) && !offered(true, VIRTIO_BLK_F_DISCARD));
        assert!(offered(false, VIRTIO_BLK_F_WRITE_ZEROES) && !offered(true, VIRTIO_BLK_F_WRITE_ZEROES));
        assert!(offered(true, VIRTIO_BLK_F_RO) && !offered(false, VIRTIO_BLK_F_RO));
        assert!(!offered(false, VIRTIO_BLK_F_CONFIG_WCE) && !offered(true, VIRTIO_BLK_F_CONFIG_WCE));
    }

    #[test]
    fn who_cannot_flush_is_served_write_through() {
        let (flush, switch) = (bit(VIRTIO_BLK_F_FLUSH), bit(VIRTIO_BLK_F_CONFIG_WCE));
        assert!(is_writethrough(0) && !is_writethrough(flush));
        assert!(is_writethrough(switch) && is_writethrough(switch | flush), "it may have been turned");
    }
}
