//! The bytes of a qcow2 image: the offset of each field and the meaning of its bits. Nothing else knows them.
//!
//! ```text
//!  cluster 0                     anywhere else, each aligned to a cluster
//!  ┌────────┬────────────┬─────────────┐  ┌──────────┐ ┌──────────┐ ┌──────┐ ┌──────┐ ┌──────┐
//!  │ header │ extensions │ backing name│  │ refcount │→│ refcount │ │  L1  │→│  L2  │→│ data │
//!  │ 72/104…│ type,len,… │             │  │ table    │ │ blocks   │ │ table│ │tables│ │      │
//!  └────────┴────────────┴─────────────┘  └──────────┘ └──────────┘ └──────┘ └──────┘ └──────┘
//! ```
//!
//! Source: the qcow2 specification that QEMU keeps in `docs/interop/qcow2.rst`, versions 2 and 3. All numbers
//! are big-endian.

use vellum_core::{BlockSize, ImageOffset};

pub(crate) use crate::bytes::{be16, be32, be64, put32, put64};

/// The default size of a journal, in bytes.
pub const JOURNAL_BYTES_DEFAULT: u64 = 1 << 20;

/// "QFI" and 0xFB.
pub(crate) const MAGIC: u32 = 0x5146_49FB;

/// Byte offsets of the header's fields.
pub(crate) mod field {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 4;
    pub(crate) const BACKING_FILE_OFFSET: usize = 8;
    pub(crate) const BACKING_FILE_SIZE: usize = 16;
    pub(crate) const CLUSTER_BITS: usize = 20;
    pub(crate) const SIZE: usize = 24;
    pub(crate) const CRYPT_METHOD: usize = 32;
    pub(crate) const L1_SIZE: usize = 36;
    pub(crate) const L1_TABLE_OFFSET: usize = 40;
    pub(crate) const REFCOUNT_TABLE_OFFSET: usize = 48;
    pub(crate) const REFCOUNT_TABLE_CLUSTERS: usize = 56;
    pub(crate) const NB_SNAPSHOTS: usize = 60;
    pub(crate) const SNAPSHOTS_OFFSET: usize = 64;
    pub(crate) const INCOMPATIBLE: usize = 72;
    pub(crate) const COMPATIBLE: usize = 80;
    pub(crate) const AUTOCLEAR: usize = 88;
    pub(crate) const REFCOUNT_ORDER: usize = 96;
    pub(crate) const HEADER_LENGTH: usize = 100;
    pub(crate) const COMPRESSION_TYPE: usize = 104;
}

/// The encryption method LUKS, of three.
pub(crate) const CRYPT_LUKS: u32 = 2;

/// The header of version 2 ends here; its extensions begin.
pub(crate) const V2_HEADER_LEN: usize = 72;
/// The shortest header of version 3.
pub(crate) const V3_HEADER_LEN_MIN: usize = 104;
/// The header that this program writes: with the compression type and its padding.
pub(crate) const V3_HEADER_LEN: usize = 112;

/// Incompatible features: a program that does not know one must not open the image.
pub(crate) mod incompatible {
    /// Refcounts may be wrong; they are rebuilt before the image is used.
    pub(crate) const DIRTY: u64 = 1 << 0;
    /// Metadata is damaged; the image may be read, not written.
    pub(crate) const CORRUPT: u64 = 1 << 1;
    /// Guest data lies in another file.
    pub(crate) const DATA_FILE: u64 = 1 << 2;
    /// The header has a compression type other than zlib.
    pub(crate) const COMPRESSION: u64 = 1 << 3;
    /// L2 entries are 128 bits, with 32 subclusters.
    pub(crate) const EXTENDED_L2: u64 = 1 << 4;
    /// There are changes in a journal that must be replayed first. Vellum's own; its name is in the feature
    /// name table.
    pub(crate) const JOURNAL: u64 = 1 << super::JOURNAL_BIT;
    /// The image takes part in a migration that forbids writing it. Vellum's own, and named as above.
    pub(crate) const HANDOVER: u64 = 1 << super::HANDOVER_BIT;
    /// A flash cache may hold writes that the image has not. Vellum's own, and named as above.
    pub(crate) const HOLDS_WRITES: u64 = 1 << super::HOLDS_WRITES_BIT;
    /// The features that this program knows.
    pub(crate) const KNOWN: u64 =
        DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2 | JOURNAL | HANDOVER | HOLDS_WRITES;
}

/// Compatible features: a program that does not know one may ignore it.
pub(crate) mod compatible {
    /// Refcount updates may be postponed, with the dirty bit set meanwhile.
    pub(crate) const LAZY_REFCOUNTS: u64 = 1 << 0;
    /// The image asks for copy-on-read. Vellum's own.
    pub(crate) const COPY_ON_READ: u64 = 1 << 47;
    /// The image asks to be filled from its backing image and detached. Vellum's own.
    pub(crate) const PREFETCH: u64 = 1 << 48;
}

/// Autoclear features: a program that writes the image clears the bits whose data it does not update.
pub(crate) mod autoclear {
    /// The bitmaps extension is consistent with the data.
    pub(crate) const BITMAPS: u64 = 1 << 0;
    /// The external data file is a complete raw image on its own.
    pub(crate) const RAW_EXTERNAL: u64 = 1 << 1;
    /// The session with a flash cache counts. Vellum's own.
    pub(crate) const SESSION: u64 = 1 << 47;
    /// The bits that this program knows.
    pub(crate) const KNOWN: u64 = BITMAPS | RAW_EXTERNAL | SESSION;
    /// The bits whose meaning still holds after this program writes, but for the session of its own cache, and for bitmaps
    /// that it keeps up.
    pub(crate) const KEPT: u64 = RAW_EXTERNAL;
}

/// Header extensions.
pub(crate) mod extension {
    pub(crate) const END: u32 = 0;
    pub(crate) const BACKING_FORMAT: u32 = 0xE279_2ACA;
    pub(crate) const FEATURE_NAMES: u32 = 0x6803_F857;
    pub(crate) const BITMAPS: u32 = 0x2385_2875;
    pub(crate) const DATA_FILE: u32 = 0x4441_5441;
    pub(crate) const ENCRYPTION: u32 = 0x0537_BE77;
    /// Vellum's own: that the image is to have a journal, and where it is. "VLJ1"
    pub(crate) const JOURNAL: u32 = 0x564C_4A31;
    /// Vellum's own: what proves the content of the backing file. "VLPN"
    pub(crate) const PIN: u32 = 0x564C_504E;
    /// Vellum's own: how far the image is in a migration. "VLMV"
    pub(crate) const HANDOVER: u32 = 0x564C_4D56;
    /// Vellum's own: the session with a flash cache. "VLFS"
    pub(crate) const SESSION: u32 = 0x564C_4653;
    /// Vellum's own: bytes without a meaning, while a header is being changed. "VLPD"
    pub(crate) const PADDING: u32 = 0x564C_5044;
}

/// The number of the journal's incompatible feature bit.
pub(crate) const JOURNAL_BIT: u8 = 47;
/// The number of the incompatible feature bit of an image that a migration forbids to write.
pub(crate) const HANDOVER_BIT: u8 = 48;
/// The number of the incompatible feature bit of an image of which a flash cache holds writes.
pub(crate) const HOLDS_WRITES_BIT: u8 = 49;

/// What an entry of the directory of bitmaps takes at most on average, in bytes.
pub(crate) const BITMAP_ENTRY_BYTES_MAX: u64 = 2048;
/// Bytes of the extension that names the bitmaps.
pub(crate) const BITMAPS_LEN: usize = 24;

/// Bytes of one row of the feature name table: kind, bit, name padded with zeros.
pub(crate) const FEATURE_NAME_LEN: usize = 48;
/// Longest backing file name.
pub(crate) const BACKING_NAME_MAX: u32 = 1023;

pub(crate) const CLUSTER_BITS_MIN: u32 = 9;
pub(crate) const CLUSTER_BITS_MAX: u32 = 21;
/// The smallest cluster with subclusters: each then has a sector of its own.
pub(crate) const EXTENDED_CLUSTER_BITS_MIN: u32 = 14;
/// Subclusters in a cluster with extended L2 entries.
pub(crate) const SUBCLUSTERS: u32 = 32;
/// L1 tables up to this many bytes are accepted, as by QEMU.
pub(crate) const L1_BYTES_MAX: u64 = 32 << 20;
/// Refcount tables up to this many bytes are accepted, as by QEMU.
pub(crate) const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
/// Snapshots in one image, as by QEMU.
pub(crate) const SNAPSHOTS_MAX: u32 = 65536;
/// Bytes of a snapshot table, as by QEMU.
pub(crate) const SNAPSHOT_TABLE_BYTES_MAX: u64 = 64 << 20;
/// Extra data in one snapshot's entry, as by QEMU.
pub(crate) const SNAPSHOT_EXTRA_MAX: u32 = 1024;

/// Bits 9 to 55: a host offset in an L1, L2 or refcount table entry.
pub(crate) const OFFSET_MASK: u64 = 0x00FF_FFFF_FFFF_FE00;
/// Bit 63 of an L1 or L2 entry: the refcount is exactly one, so it may be written in place.
pub(crate) const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry: a compressed cluster.
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of a standard L2 entry, version 3: reads as zero.
pub(crate) const ZERO: u64 = 1 << 0;
/// Bits of an L1 entry that have no meaning and must be zero.
pub(crate) const L1_RESERVED: u64 = !(OFFSET_MASK | COPIED);

/// Bits of a standard L2 entry that have no meaning and must be zero, as in QEMU.
pub(crate) const L2_RESERVED: u64 = 0x3F00_0000_0000_01FE;
/// The L1 tables of all snapshots together, and the tables of all bitmaps, take at most this many bytes. Real
/// ones are far smaller. An image that claims more only causes work, as tables may lie in holes or on top of
/// each other.
pub(crate) const TABLES_BYTES_MAX: u64 = 256 << 20;

/// Metadata is read and written in runs of this size, or of a cluster where that is smaller.
pub(crate) const METADATA_PAGE: BlockSize = BlockSize::PAGE;

/// An encryption header with its key material takes at most this many bytes. Those of QEMU take 2 MiB.
pub(crate) const KEY_AREA_BYTES_MAX: u64 = 64 << 20;

/// Image offsets end here: 56 bits.
pub(crate) const IMAGE_END: ImageOffset = ImageOffset::new(1 << 56);
