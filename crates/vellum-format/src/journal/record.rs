//! The bytes of the journal: its records.
//!
//! ```text
//!   magic  generation  sequence  durable  tail  length  flags  items  crc  zero  key │ item │ … │ zeros
//!   0      8           16        24       32    40      44     48     52   56    64    80     to the block
//! ```
//!
//! All numbers are big-endian. A record begins at a multiple of 4 KiB and is contiguous. Its CRC32C covers
//! its whole length with the field itself as zero, so half a record does not count. The generation
//! distinguishes it from records of an earlier opening. The sequence gives its place in the order. The key is
//! drawn at random when the journal begins, and no guest knows it. Records contain guest data, and without
//! the key no guest data can pass for a record.
//!
//! 1. [`Record::decode`] trusts nothing: lengths and counts are bounded by the bytes that are there.
//! 2. Words and zeros are absolute. Applying them twice, or again after a crash halfway, gives the same
//!    bytes.
//!
//! See `docs/design/0003-qcow2-journal.md` for what the items mean.

use vellum_core::{ImageOffset, ImageSpan};

use crate::bytes::{be32, be64, put32, put64};

const MAGIC: u64 = 0x5645_4C4C_554D_4A31; // "VELLUMJ1"
const HEADER_LEN: usize = 80;

/// Records begin at multiples of this, whatever physical block size the drive has.
pub(crate) const BLOCK: u64 = 4096;
/// The sector that a check is about.
pub(crate) const SECTOR: u64 = 512;

/// [`BLOCK`], as a length in memory.
pub(crate) const BLOCK_LEN: usize = 4096;
/// [`SECTOR`], as a length in memory.
pub(crate) const SECTOR_LEN: usize = 512;

/// Offsets of the header's fields.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const GENERATION: usize = 8;
    pub(super) const SEQUENCE: usize = 16;
    pub(super) const DURABLE: usize = 24;
    pub(super) const TAIL: usize = 32;
    pub(super) const LENGTH: usize = 40;
    pub(super) const FLAGS: usize = 44;
    pub(super) const ITEMS: usize = 48;
    pub(super) const CRC: usize = 52;
    pub(super) const KEY: usize = 64;
}

/// A sequence never comes near this limit.
const SEQUENCE_MAX: u64 = 1 << 62;

const REPAIR: u32 = 1;

/// One change, or one thing to verify.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item {
    /// Consecutive entries of metadata tables (such as L1, L2 or refcount tables), from this place of the
    /// image on.
    Words { at: ImageOffset, values: Vec<u64> },
    /// Fresh metadata that begins as zeros.
    Zero(ImageSpan),
    /// The CRC32C of each sector of guest data, from this place on, that the transaction counts on.
    Check { at: ImageOffset, crcs: Vec<u32> },
    /// Guest data that could not be written in place yet: whole sectors.
    Full { at: ImageOffset, bytes: Vec<u8> },
    /// A second value that a checked sector may have, because an overwrite was in flight when the transaction
    /// was sealed.
    Other { at: ImageOffset, crc: u32 },
    /// The refcount of each of these clusters is one higher than the mapping explains.
    PendingRefcount { first: u64, count: u64 },
}

mod kind {
    pub(super) const WORDS: u32 = 1;
    pub(super) const ZERO: u32 = 2;
    pub(super) const CHECK: u32 = 3;
    pub(super) const PENDING: u32 = 4;
    pub(super) const OTHER: u32 = 5;
    pub(super) const FULL: u32 = 6;
}

/// Kind, count, place.
const ITEM_HEAD: usize = 16;

impl Item {
    /// How many bytes the item takes in a record.
    pub(crate) fn encoded_len(&self) -> usize {
        ITEM_HEAD
            + match self {
                Self::Words { values, .. } => values.len() * 8,
                Self::Zero(_) | Self::PendingRefcount { .. } | Self::Other { .. } => 8,
                Self::Full { bytes, .. } => bytes.len(),
                Self::Check { crcs, .. } => crcs.len().next_multiple_of(2) * 4,
            }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let mut head = |kind: u32, count: usize, place: u64| {
            out.extend(kind.to_be_bytes());
            out.extend(u32::try_from(count).expect("a record is far below 4 GiB").to_be_bytes());
            out.extend(place.to_be_bytes());
        };
        match self {
            Self::Words { at, values } => {
                head(kind::WORDS, values.len(), at.bytes());
                out.extend(values.iter().flat_map(|value| value.to_be_bytes()));
            }
            Self::Zero(span) => {
                head(kind::ZERO, 1, span.start().bytes());
                out.extend(span.len().to_be_bytes());
            }
            Self::Check { at, crcs } => {
                head(kind::CHECK, crcs.len(), at.bytes());
                out.extend(crcs.iter().flat_map(|crc| crc.to_be_bytes()));
                out.resize(out.len().next_multiple_of(8), 0);
            }
            Self::PendingRefcount { first, count } => {
                head(kind::PENDING, 1, *first);
                out.extend(count.to_be_bytes());
            }
            Self::Full { at, bytes } => {
                head(kind::FULL, bytes.len() / SECTOR_LEN, at.bytes());
                out.extend_from_slice(bytes);
            }
            Self::Other { at, crc } => {
                head(kind::OTHER, 1, at.bytes());
                out.extend(u64::from(*crc).to_be_bytes());
            }
        }
    }

    fn decode(bytes: &[u8]) -> Option<(Self, usize)> {
        let head = bytes.get(..ITEM_HEAD)?;
        let (count, place) = (be32(head, 4), be64(head, 8));
        let body = |len: usize| bytes.get(ITEM_HEAD..ITEM_HEAD.checked_add(len)?);
        let n = count as usize;
        let at = ImageOffset::new(place);
        let fits = |len: u64| ImageSpan::checked(at, len).filter(|span| span.end().bytes() <= 1 << 56);
        let item = match be32(head, 0) {
            kind::WORDS => {
                fits(u64::from(count) * 8).filter(|_| place.is_multiple_of(8))?;
                let values = body(n.checked_mul(8)?)?.chunks_exact(8).map(|word| be64(word, 0)).collect();
                Self::Words { at, values }
            }
            kind::ZERO => Self::Zero(fits(be64(body(8)?, 0))?),
            kind::CHECK => {
                fits(u64::from(count) * SECTOR).filter(|_| place.is_multiple_of(SECTOR))?;
                let crcs = body(n.checked_mul(4)?)?.chunks_exact(4).map(|crc| be32(crc, 0)).collect();
                Self::Check { at, crcs }
            }
            kind::PENDING => {
                let count = be64(body(8)?, 0);
                place.checked_add(count).filter(|end| *end <= 1 << 47)?;
                Self::PendingRefcount { first: place, count }
            }
            kind::FULL => {
                fits(u64::from(count) * SECTOR).filter(|_| place.is_multiple_of(SECTOR))?;
                Self::Full { at, bytes: body(n.checked_mul(SECTOR_LEN)?)?.to_vec() }
            }
            kind::OTHER => {
                fits(SECTOR).filter(|_| place.is_multiple_of(SECTOR))?;
                Self::Other { at, crc: u32::try_from(be64(body(8)?, 0)).ok()? }
            }
            _ => return None,
        };
        let len = item.encoded_len();
        (len <= bytes.len()).then_some((item, len))
    }
}

/// A transaction as it stands in the journal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) generation: u64,
    pub(crate) key: u128,
    pub(crate) sequence: u64,
    /// The highest transaction that was known to be durable.
    pub(crate) durable: u64,
    /// The first record that recovery needs.
    pub(crate) tail: u64,
    /// If this is the last record, the image needs a repair: the state it leads to was being changed in
    /// place.
    pub(crate) asks_for_repair: bool,
    pub(crate) items: Vec<Item>,
}

impl Record {
    /// How many bytes the record takes, before the padding.
    pub(crate) fn encoded_len(&self) -> usize {
        HEADER_LEN + self.items.iter().map(Item::encoded_len).sum::<usize>()
    }

    /// The record's bytes, padded with zeros to whole blocks.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let len = self.encoded_len();
        let padded = len.next_multiple_of(usize::try_from(BLOCK).expect("a block"));
        let mut bytes = Vec::with_capacity(padded);
        bytes.resize(HEADER_LEN, 0);
        for item in &self.items {
            item.encode(&mut bytes);
        }
        debug_assert_eq!(bytes.len(), len);
        put64(&mut bytes, at::MAGIC, MAGIC);
        put64(&mut bytes, at::GENERATION, self.generation);
        put64(&mut bytes, at::SEQUENCE, self.sequence);
        put64(&mut bytes, at::DURABLE, self.durable);
        put64(&mut bytes, at::TAIL, self.tail);
        put32(&mut bytes, at::LENGTH, u32::try_from(len).expect("a record is far below 4 GiB"));
        put32(&mut bytes, at::FLAGS, if self.asks_for_repair { REPAIR } else { 0 });
        put32(&mut bytes, at::ITEMS, u32::try_from(self.items.len()).expect("far fewer than bytes"));
        put128(&mut bytes, at::KEY, self.key);
        let crc = crc32c::crc32c(&bytes);
        put32(&mut bytes, at::CRC, crc);
        bytes.resize(padded, 0);
        bytes
    }

    /// How long the record at the start of `bytes` claims to be. `None` when it is no record of this journal.
    /// Nothing else in it has been checked yet.
    pub(crate) fn claimed_len(bytes: &[u8], generation: u64, key: u128) -> Option<usize> {
        let head = bytes.get(..HEADER_LEN)?;
        let is_ours = be64(head, at::MAGIC) == MAGIC
            && be64(head, at::GENERATION) == generation
            && be128(head, at::KEY) == key;
        let len = be32(head, at::LENGTH) as usize;
        (is_ours && len >= HEADER_LEN && len <= bytes.len()).then_some(len)
    }

    /// The record at the start of `bytes`, and its length without padding. `None` when it is no record of
    /// this journal.
    pub(crate) fn decode(bytes: &[u8], generation: u64, key: u128) -> Option<(Self, usize)> {
        let len = Self::claimed_len(bytes, generation, key)?;
        let head = &bytes[..HEADER_LEN];
        let mut copy = bytes[..len].to_vec();
        put32(&mut copy, at::CRC, 0);
        if crc32c::crc32c(&copy) != be32(head, at::CRC) {
            return None;
        }
        let mut items = Vec::new();
        let mut rest = &copy[HEADER_LEN..];
        for _ in 0..be32(head, at::ITEMS) {
            let (item, item_len) = Item::decode(rest)?;
            items.push(item);
            rest = &rest[item_len..];
        }
        let record = Self {
            generation,
            key,
            sequence: be64(head, at::SEQUENCE),
            durable: be64(head, at::DURABLE),
            tail: be64(head, at::TAIL),
            asks_for_repair: be32(head, at::FLAGS) & REPAIR != 0,
            items,
        };
        let is_possible = record.tail <= record.sequence
            && record.durable < record.sequence
            && record.sequence < SEQUENCE_MAX;
        (rest.is_empty() && is_possible).then_some((record, len))
    }
}

/// The largest journal. Recovery reads the whole run.
pub(crate) const BYTES_MAX: u64 = 64 << 20;
/// The smallest journal that is of use.
pub(crate) const BYTES_MIN: u64 = 64 << 10;

pub(crate) fn put128(bytes: &mut [u8], at: usize, value: u128) {
    bytes[at..at + 16].copy_from_slice(&value.to_be_bytes());
}

pub(crate) fn be128(bytes: &[u8], at: usize) -> u128 {
    u128::from_be_bytes(bytes[at..at + 16].try_into().expect("sixteen bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let at = ImageOffset::new;
        Record {
            generation: 3,
            key: 77,
            sequence: 9,
            durable: 8,
            tail: 4,
            asks_for_repair: false,
            items: vec![
                Item::Words { at: at(0x4_0000), values: vec![1, u64::MAX] },
                Item::Zero(at(0x9_0000).span(65_536)),
                Item::Check { at: at(0x20_0000), crcs: vec![1, 2, 3] },
                Item::PendingRefcount { first: 17, count: 16 },
                Item::Other { at: at(0x20_0200), crc: u32::MAX },
                Item::Full { at: at(0x20_0400), bytes: vec![5; 1024] },
            ],
        }
    }

    #[test]
    fn a_record_reads_as_it_was_written() {
        let bytes = record().encode();
        assert_eq!(bytes.len(), 4096);
        let (found, len) = Record::decode(&bytes, 3, 77).unwrap();
        assert_eq!((found, len), (record(), record().encoded_len()));
        assert!(Record::decode(&bytes, 4, 77).is_none(), "of another generation");
        assert!(Record::decode(&bytes, 3, 78).is_none(), "of another journal");
    }

    #[test]
    fn every_bit_counts() {
        let bytes = record().encode();
        for bit in 0..record().encoded_len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Record::decode(&bytes, 3, 77).is_none(), "bit {bit}");
        }
        for len in 0..record().encoded_len() {
            assert!(Record::decode(&bytes[..len], 3, 77).is_none(), "cut to {len}");
        }
    }
}
