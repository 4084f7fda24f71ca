//! The feature bits of the superblock.

/// Incompatible features: a program that does not know one must not open the image.
pub(super) mod incompatible {
    pub(in super::super) const REPLAY: u64 = 1 << 0;
    pub(in super::super) const TABLE: u64 = 1 << 1;
    pub(in super::super) const BASE: u64 = 1 << 2;
    pub(in super::super) const SNAPSHOTS: u64 = 1 << 3;
    pub(in super::super) const ZONED: u64 = 1 << 4;
    pub(in super::super) const PARTS: u64 = 1 << 5;
    pub(in super::super) const CLONED: u64 = 1 << 6;
    pub(in super::super) const HANDOVER: u64 = 1 << 7;
    /// A flash cache may hold writes that the image has not.
    pub(in super::super) const HOLDS_WRITES: u64 = 1 << 8;
    /// A session counts, and the image has no journal whose generation would make it void.
    pub(in super::super) const SESSION: u64 = 1 << 9;
    /// Guest data is encrypted.
    pub(in super::super) const ENCRYPTED: u64 = 1 << 10;
    /// The fast medium may be the only one that has a unit.
    pub(in super::super) const MOVED: u64 = 1 << 11;
    /// Packed blocks may be the only ones that tell of parts of the base that the image has.
    pub(in super::super) const PACKED_OVER_BASE: u64 = 1 << 12;
    /// All of the above.
    pub(in super::super) const KNOWN: u64 = (PACKED_OVER_BASE << 1) - 1;
}

/// Compatible features: a program that does not know one may ignore it.
pub(super) mod compatible {
    pub(in super::super) const COPY_ON_READ: u64 = 1 << 0;
    pub(in super::super) const PREFETCH: u64 = 1 << 1;
    /// A fast medium has copies of units.
    pub(in super::super) const FAST: u64 = 1 << 2;
}
