//! The bytes of a commit: records, and what their items say.
//!
//! ```text
//!   magic  id  sequence  durable  tail  length  items  crc  zero │ item │ item │ … │ zeros
//!   0      8   24        32       40    48      52     56   60   64            to a multiple of 4 KiB
//! ```
//!
//! 1. [`Record::decode`] trusts nothing: lengths and counts are bounded by the bytes that are there, every slot,
//!    row and key by what the cache can have.
//! 2. Items are absolute: applied twice they say the same.
//! 3. Items about runs, rows and regions come first, in the order of their changes. Items about blocks come after
//!    them, one for a block at most.
//!
//! The text of this is `docs/format/flash.md`. What is copied to slices is in `slice`, how blocks come to share an item in
//! `neighbours`.

use smallvec::{SmallVec, smallvec};

use crate::bytes::{be16, be32, be64, be128, put32, put64, put128};
use crate::layout::{BLOCK_LEN, BLOCKS_MAX, GROUP_BLOCKS, Key, ROWS_MAX, SECTOR_LEN, Slot, has_good_crc};
use crate::regions::{WORD_BYTES, Word};

const MAGIC: u64 = 0x5645_4C4C_554D_4631; // "VELLUMF1"
/// The length of a record's header.
pub(crate) const HEADER_LEN: usize = 64;

mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const ID: usize = 8;
    pub(super) const SEQUENCE: usize = 24;
    pub(super) const DURABLE: usize = 32;
    pub(super) const TAIL: usize = 40;
    pub(super) const LENGTH: usize = 48;
    pub(super) const ITEMS: usize = 52;
    pub(super) const CRC: usize = 56;
    pub(super) const ZERO: usize = 60;
}

/// A sequence never comes near this limit.
const SEQUENCE_MAX: u64 = 1 << 62;

/// What the sectors that a put names are verified by: one CRC32C of all of them, one after the other. Older caches have
/// one of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checks(SmallVec<[u32; 1]>);

/// The sectors that are named, the first first.
fn named(sectors: u8, block: &[u8]) -> impl Iterator<Item = &[u8]> {
    assert_eq!(block.len(), BLOCK_LEN);
    block
        .chunks_exact(SECTOR_LEN)
        .enumerate()
        .filter(move |(n, _)| sectors & 1 << n != 0)
        .map(|(_, sector)| sector)
}

impl Checks {
    /// Those of these sectors of a block. Panics when it is not 4 KiB.
    pub(crate) fn of(sectors: u8, block: &[u8]) -> Self {
        Self(smallvec![named(sectors, block).fold(0, crc32c::crc32c_append)])
    }

    /// Whether these sectors of a block have them.
    pub(crate) fn matches(&self, sectors: u8, block: &[u8]) -> bool {
        match self.len() {
            1 => *self == Self::of(sectors, block),
            _ => named(sectors, block).map(crc32c::crc32c).eq(self.iter()),
        }
    }

    /// The one that all sectors have, if it is one.
    pub(crate) fn of_all(&self) -> Option<u32> {
        (self.len() == 1).then(|| self.0[0])
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }
}

/// The length of an encoded row.
pub(crate) const ROW_LEN: usize = 56;

/// What the cache stores about one disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    /// Its number, below [`ROWS_MAX`].
    pub(crate) number: u16,
    /// Only the newest session counts: it has a record, or the image is known to name it.
    pub(crate) has_record: bool,
    /// The image's uuid, or a hash of what identifies it.
    pub(crate) disk: u128,
    /// The session that the image named when the newest was made; zero for none.
    pub(crate) named: u128,
    /// The newest session; zero for none.
    pub(crate) newest: u128,
}

impl Row {
    /// The row's bytes.
    pub(crate) fn encode(&self) -> [u8; ROW_LEN] {
        let mut bytes = [0; ROW_LEN];
        bytes[..2].copy_from_slice(&self.number.to_be_bytes());
        bytes[2] = u8::from(self.has_record);
        put128(&mut bytes, 8, self.disk);
        put128(&mut bytes, 24, self.named);
        put128(&mut bytes, 40, self.newest);
        bytes
    }

    /// The row in these bytes. `None` when it is none.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..ROW_LEN)?;
        let is_good = be16(bytes, 0) < ROWS_MAX && bytes[2] <= 1 && bytes[3..8].iter().all(|byte| *byte == 0);
        is_good.then(|| Self {
            number: be16(bytes, 0),
            has_record: bytes[2] == 1,
            disk: be128(bytes, 8),
            named: be128(bytes, 24),
            newest: be128(bytes, 40),
        })
    }
}

/// One thing that a commit says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item {
    /// The block is in this slot and nowhere else. With checks a recovery verifies the sectors.
    Put { key: Key, slot: Slot, sectors: u8, dirty: bool, checks: Option<Checks> },
    /// These blocks of a group, from 2 to all, are whole in slots that follow each other, and nowhere else. With a check a
    /// recovery verifies all their bytes.
    Puts { key: Key, slot: Slot, blocks: u32, dirty: bool, check: Option<u32> },
    /// The block has no slot and is in no run of zeros: home has it.
    Drop { key: Key },
    /// The same of neighbouring blocks of a group, from 2 to all.
    Drops { key: Key, blocks: u32 },
    /// The blocks are zero, and have no slots.
    Zero { key: Key, blocks: u64, may_free: bool },
    /// The blocks are in no run of zeros: home has the zeros.
    Unzero { key: Key, blocks: u64 },
    /// What the row says from now on.
    Row(Row),
    /// The row is free; none of its blocks is cached or zero, and none of its regions is written.
    NoRow(u16),
    /// These regions are being written: home and flash may differ in them.
    Written(Word),
    /// These regions are not being written any more.
    Settled(Word),
    /// As before, and none of their blocks has a slot.
    Void(Word),
}

mod kind {
    pub(super) const PUT: u8 = 1;
    pub(super) const DROP: u8 = 2;
    pub(super) const ZERO: u8 = 3;
    pub(super) const UNZERO: u8 = 4;
    pub(super) const ROW: u8 = 5;
    pub(super) const NO_ROW: u8 = 6;
    pub(super) const WRITTEN: u8 = 7;
    pub(super) const SETTLED: u8 = 8;
    pub(super) const VOID: u8 = 9;
    pub(super) const PUTS: u8 = 10;
    pub(super) const DROPS: u8 = 11;
}

const DIRTY: u8 = 1;
/// With the CRC of each sector, and with one for all.
const CHECKED_EACH: u8 = 2;
const CHECKED: u8 = 4;
const MAY_FREE: u8 = 1;
/// The length of a put without checks, and of a drop.
const BLOCK_ITEM_LEN: usize = 16;

impl Item {
    /// How many bytes the item takes in a record.
    pub(crate) fn encoded_len(&self) -> usize {
        match self {
            Self::Put { checks, .. } => BLOCK_ITEM_LEN + checks.as_ref().map_or(0, |checks| checks.len() * 4),
            Self::Puts { check, .. } => BLOCK_ITEM_LEN + check.map_or(0, |_| 4),
            Self::Drop { .. } | Self::Drops { .. } => BLOCK_ITEM_LEN,
            Self::Zero { .. } | Self::Unzero { .. } => 24,
            Self::Written(_) | Self::Settled(_) | Self::Void(_) => WORD_BYTES,
            Self::Row(_) => 8 + ROW_LEN,
            Self::NoRow(_) => 8,
        }
    }

    /// The first block that the item is about, and how many, if it is about blocks.
    pub(crate) const fn blocks(&self) -> Option<(Key, u32)> {
        match self {
            Self::Put { key, .. } | Self::Drop { key } => Some((*key, 1)),
            Self::Puts { key, blocks, .. } | Self::Drops { key, blocks } => Some((*key, *blocks)),
            _ => None,
        }
    }

    /// The slots whose bytes it checks: the first, and how many.
    pub(crate) const fn checked_slots(&self) -> Option<(Slot, u32)> {
        match self {
            Self::Put { slot, checks: Some(_), .. } => Some((*slot, 1)),
            Self::Puts { slot, blocks, check: Some(_), .. } => Some((*slot, *blocks)),
            _ => None,
        }
    }

    /// Whether these are the bytes that it checks; true when it checks none.
    pub(crate) fn holds(&self, bytes: &[u8]) -> bool {
        match self {
            Self::Put { sectors, checks: Some(checks), .. } => checks.matches(*sectors, bytes),
            Self::Puts { check: Some(check), .. } => crc32c::crc32c(bytes) == *check,
            _ => true,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Put { key, slot, sectors, dirty, checks } => {
                let checked = match checks.as_ref().map(Checks::len) {
                    None => 0,
                    Some(1) => CHECKED,
                    Some(_) => CHECKED_EACH,
                };
                let flags = if *dirty { DIRTY } else { 0 } | checked;
                out.extend([kind::PUT, flags, *sectors, 0]);
                out.extend(slot.0.to_be_bytes());
                out.extend(key.bits().to_be_bytes());
                out.extend(checks.iter().flat_map(Checks::iter).flat_map(u32::to_be_bytes));
            }
            Self::Puts { key, slot, blocks, dirty, check } => {
                let flags = if *dirty { DIRTY } else { 0 } | check.map_or(0, |_| CHECKED);
                out.extend([kind::PUTS, flags]);
                out.extend(count_of(*blocks));
                out.extend(slot.0.to_be_bytes());
                out.extend(key.bits().to_be_bytes());
                out.extend(check.iter().flat_map(|crc| crc.to_be_bytes()));
            }
            Self::Drop { key } => {
                out.extend([kind::DROP, 0, 0, 0, 0, 0, 0, 0]);
                out.extend(key.bits().to_be_bytes());
            }
            Self::Drops { key, blocks } => {
                out.extend([kind::DROPS, 0]);
                out.extend(count_of(*blocks));
                out.extend([0; 4]);
                out.extend(key.bits().to_be_bytes());
            }
            Self::Zero { key, blocks, may_free } => {
                out.extend([kind::ZERO, if *may_free { MAY_FREE } else { 0 }, 0, 0, 0, 0, 0, 0]);
                out.extend(key.bits().to_be_bytes());
                out.extend(blocks.to_be_bytes());
            }
            Self::Unzero { key, blocks } => {
                out.extend([kind::UNZERO, 0, 0, 0, 0, 0, 0, 0]);
                out.extend(key.bits().to_be_bytes());
                out.extend(blocks.to_be_bytes());
            }
            Self::Row(row) => {
                out.extend([kind::ROW, 0, 0, 0, 0, 0, 0, 0]);
                out.extend(row.encode());
            }
            Self::NoRow(number) => {
                out.extend([kind::NO_ROW, 0, 0, 0, 0, 0]);
                out.extend(number.to_be_bytes());
            }
            Self::Written(word) => encode_word(kind::WRITTEN, *word, out),
            Self::Settled(word) => encode_word(kind::SETTLED, *word, out),
            Self::Void(word) => encode_word(kind::VOID, *word, out),
        }
    }

    /// The item at the start of these bytes. `None` when it is none.
    pub(crate) fn decode(bytes: &[u8], slots: u32) -> Option<Self> {
        let head = bytes.get(..8)?;
        let is_zero = |from: usize, to: usize| head[from..to].iter().all(|byte| *byte == 0);
        let key_at = |at: usize| {
            let key = Key::from_bits(be64(bytes.get(at..at + 8)?, 0));
            (key.row() < ROWS_MAX).then_some(key)
        };
        let run = || {
            let (key, blocks) = (key_at(8)?, be64(bytes.get(16..24)?, 0));
            (blocks > 0 && blocks <= BLOCKS_MAX - key.block()).then_some((key, blocks))
        };
        // Several blocks of one group.
        let several = || {
            let (key, blocks) = (key_at(8)?, u32::from(be16(head, 2)));
            let is_within = blocks >= 2 && u64::from(key.index() + blocks) <= GROUP_BLOCKS;
            is_within.then_some((key, blocks))
        };
        let word = || {
            let word = Word { key: key_at(8)?, bits: be64(bytes.get(16..24)?, 0) };
            word.is_good().then_some(word)
        };
        Some(match head[0] {
            kind::PUT => {
                let (flags, sectors, slot) = (head[1], head[2], Slot(be32(head, 4)));
                let is_good = flags & !DIRTY <= CHECKED && sectors != 0 && head[3] == 0 && slot.0 < slots;
                let key = key_at(8).filter(|_| is_good)?;
                let count = match flags & !DIRTY {
                    CHECKED => 1,
                    CHECKED_EACH => sectors.count_ones() as usize,
                    _ => 0,
                };
                let crcs = bytes.get(BLOCK_ITEM_LEN..BLOCK_ITEM_LEN + count * 4)?;
                let checks =
                    (count > 0).then(|| Checks(crcs.chunks_exact(4).map(|crc| be32(crc, 0)).collect()));
                Self::Put { key, slot, sectors, dirty: flags & DIRTY != 0, checks }
            }
            kind::PUTS => {
                let (flags, slot, (key, blocks)) = (head[1], Slot(be32(head, 4)), several()?);
                let is_good = flags & !(DIRTY | CHECKED) == 0 && slot.0 < slots && blocks <= slots - slot.0;
                let check = match flags & CHECKED {
                    0 => None,
                    _ => Some(be32(bytes.get(BLOCK_ITEM_LEN..BLOCK_ITEM_LEN + 4)?, 0)),
                };
                let puts = Self::Puts { key, slot, blocks, dirty: flags & DIRTY != 0, check };
                return is_good.then_some(puts);
            }
            kind::DROP if is_zero(1, 8) => Self::Drop { key: key_at(8)? },
            kind::DROPS if head[1] == 0 && is_zero(4, 8) => {
                let (key, blocks) = several()?;
                Self::Drops { key, blocks }
            }
            kind::ZERO if head[1] & !MAY_FREE == 0 && is_zero(2, 8) => {
                let (key, blocks) = run()?;
                Self::Zero { key, blocks, may_free: head[1] & MAY_FREE != 0 }
            }
            kind::UNZERO if is_zero(1, 8) => {
                let (key, blocks) = run()?;
                Self::Unzero { key, blocks }
            }
            kind::ROW if is_zero(1, 8) => Self::Row(Row::decode(&bytes[8..])?),
            kind::NO_ROW if is_zero(1, 6) && be16(head, 6) < ROWS_MAX => Self::NoRow(be16(head, 6)),
            kind::WRITTEN if is_zero(1, 8) => Self::Written(word()?),
            kind::SETTLED if is_zero(1, 8) => Self::Settled(word()?),
            kind::VOID if is_zero(1, 8) => Self::Void(word()?),
            _ => return None,
        })
    }
}

fn count_of(blocks: u32) -> [u8; 2] {
    u16::try_from(blocks).expect("at most those of a group").to_be_bytes()
}

fn encode_word(kind: u8, word: Word, out: &mut Vec<u8>) {
    out.extend([kind, 0, 0, 0, 0, 0, 0, 0]);
    out.extend(word.key.bits().to_be_bytes());
    out.extend(word.bits.to_be_bytes());
}

/// What one commit says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Record {
    /// The cache's id.
    pub(crate) id: u128,
    /// From 1.
    pub(crate) sequence: u64,
    /// The highest record known to be durable.
    pub(crate) durable: u64,
    /// The first record that some slice does not have yet.
    pub(crate) tail: u64,
    /// Runs, rows and regions first, then blocks.
    pub(crate) items: Vec<Item>,
}

/// What the header of a record says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Glance {
    pub(crate) sequence: u64,
    pub(crate) tail: u64,
    /// Its length in bytes.
    pub(crate) len: usize,
}

impl Record {
    /// How many bytes of flash a record takes whose items take this many.
    pub(crate) const fn padded_len(items_len: usize) -> usize {
        (HEADER_LEN + items_len).next_multiple_of(BLOCK_LEN)
    }

    /// The record's bytes, padded with zeros to a multiple of 4 KiB.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let padded = Self::padded_len(self.items.iter().map(Item::encoded_len).sum());
        let mut bytes = Vec::with_capacity(padded);
        bytes.resize(HEADER_LEN, 0);
        for item in &self.items {
            item.encode(&mut bytes);
        }
        bytes.resize(padded, 0);
        put64(&mut bytes, at::MAGIC, MAGIC);
        put128(&mut bytes, at::ID, self.id);
        put64(&mut bytes, at::SEQUENCE, self.sequence);
        put64(&mut bytes, at::DURABLE, self.durable);
        put64(&mut bytes, at::TAIL, self.tail);
        put32(&mut bytes, at::LENGTH, u32::try_from(padded).expect("a record is far below 4 GiB"));
        put32(&mut bytes, at::ITEMS, u32::try_from(self.items.len()).expect("far fewer than bytes"));
        let crc = crc32c::crc32c(&bytes);
        put32(&mut bytes, at::CRC, crc);
        bytes
    }

    /// How long the record that begins with these bytes claims to be, at most `most`. `None` when it is no record of
    /// this cache. Nothing else in it has been checked yet.
    pub(crate) fn claimed_len(bytes: &[u8], id: u128, most: u64) -> Option<usize> {
        let head = bytes.get(..HEADER_LEN)?;
        let len = be32(head, at::LENGTH);
        let is_ours = be64(head, at::MAGIC) == MAGIC && be128(head, at::ID) == id;
        let len_in_memory = len as usize;
        let is_possible = len != 0
            && len_in_memory.is_multiple_of(BLOCK_LEN)
            && u64::from(len) <= most
            && be32(head, at::ZERO) == 0;
        (is_ours && is_possible).then_some(len_in_memory)
    }

    /// What the header says of the record at the start of `bytes`, of a cache with this id. `None` when it is no record of this
    /// cache, or not whole. Its items may still be none ([`Record::decode`]).
    pub(crate) fn glance(bytes: &[u8], id: u128) -> Option<Glance> {
        let len = Self::claimed_len(bytes, id, bytes.len() as u64)?;
        Self::header(bytes, len).filter(|_| has_good_crc(&bytes[..len], at::CRC))
    }

    /// As above, of a record of at most `most` bytes. `sum` is given its first block, where the CRC is zero, and its length, and says
    /// the CRC of all.
    pub(crate) fn glance_summed(
        bytes: &[u8],
        id: u128,
        most: u64,
        sum: impl FnOnce(&[u8], usize) -> u32,
    ) -> Option<Glance> {
        let len = Self::claimed_len(bytes, id, most.min(bytes.len() as u64))?;
        let glance = Self::header(bytes, len)?;
        let mut head = bytes[..BLOCK_LEN].to_vec();
        put32(&mut head, at::CRC, 0);
        (sum(&head, len) == be32(bytes, at::CRC)).then_some(glance)
    }

    /// What the header says, if that is possible.
    fn header(bytes: &[u8], len: usize) -> Option<Glance> {
        let (sequence, durable, tail) =
            (be64(bytes, at::SEQUENCE), be64(bytes, at::DURABLE), be64(bytes, at::TAIL));
        let is_good = (1..SEQUENCE_MAX).contains(&sequence)
            && durable == sequence - 1
            && (1..=sequence).contains(&tail);
        is_good.then_some(Glance { sequence, tail, len })
    }

    /// The record at the start of `bytes`, of a cache with this id and this many slots, and its length. `None` when
    /// it is no record of this cache.
    pub(crate) fn decode(bytes: &[u8], id: u128, slots: u32) -> Option<(Self, usize)> {
        let Glance { sequence, tail, len } = Self::glance(bytes, id)?;
        let bytes = &bytes[..len];
        let count = be32(bytes, at::ITEMS) as usize;
        // The shortest item has 8 bytes.
        if count > (len - HEADER_LEN) / 8 {
            return None;
        }
        let mut items = Vec::new();
        let mut rest = &bytes[HEADER_LEN..];
        for _ in 0..count {
            let item = Item::decode(rest, slots)?;
            rest = &rest[item.encoded_len()..];
            items.push(item);
        }
        let record = Self { id, sequence, durable: sequence - 1, tail, items };
        let is_good = rest.iter().all(|byte| *byte == 0) && record.is_in_order();
        is_good.then_some((record, len))
    }

    /// Whether blocks come last, and each once.
    fn is_in_order(&self) -> bool {
        let first = self.items.iter().position(|item| item.blocks().is_some()).unwrap_or(self.items.len());
        let blocks: Option<Vec<(Key, u32)>> = self.items[first..].iter().map(Item::blocks).collect();
        let Some(mut blocks) = blocks else { return false };
        blocks.sort_unstable();
        let is_before = |(key, blocks): (Key, u32), next: Key| key.bits() + u64::from(blocks) <= next.bits();
        blocks.windows(2).all(|pair| is_before(pair[0], pair[1].0))
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    fn row() -> Row {
        Row { number: 3, has_record: true, disk: 1 << 100, named: 5, newest: u128::MAX }
    }

    fn record() -> Record {
        let key = |block| Key::new(3, block);
        let word = Word { key: Key::new(3, 1 << 20), bits: 5 };
        Record {
            id: 77,
            sequence: 9,
            durable: 8,
            tail: 4,
            items: vec![
                Item::NoRow(1021),
                Item::Row(row()),
                Item::Zero { key: key(5), blocks: 7, may_free: true },
                Item::Unzero { key: key(6), blocks: 1 },
                Item::Written(word),
                Item::Settled(word),
                Item::Void(Word { bits: u64::MAX, ..word }),
                Item::Put { key: key(9), slot: Slot(99), sectors: 0xFF, dirty: true, checks: None },
                Item::Put {
                    key: key(8),
                    slot: Slot(0),
                    sectors: 0b101,
                    dirty: false,
                    checks: Some(Checks(smallvec![7, u32::MAX])),
                },
                Item::Put {
                    key: key(7),
                    slot: Slot(1),
                    sectors: 0xFF,
                    dirty: true,
                    checks: Some(Checks(smallvec![5])),
                },
                Item::Puts { key: key(16), slot: Slot(84), blocks: 16, dirty: true, check: Some(7) },
                Item::Puts { key: key(34), slot: Slot(3), blocks: 2, dirty: false, check: None },
                Item::Drop { key: key(1 << 40) },
                Item::Drops { key: key(36), blocks: 12 },
            ],
        }
    }

    #[test]
    fn a_record_reads_as_it_was_written() {
        let bytes = record().encode();
        assert_eq!(bytes.len(), 4096);
        assert_eq!(Record::claimed_len(&bytes, 77, 4096), Some(4096));
        assert_eq!(Record::claimed_len(&bytes, 77, 4095), None);
        assert_eq!(Record::decode(&bytes, 77, 100), Some((record(), 4096)));
        assert!(Record::decode(&bytes, 78, 100).is_none(), "of another cache");
        assert!(Record::decode(&bytes, 77, 99).is_none(), "of a slot that is not there");
    }

    #[test]
    fn every_bit_counts() {
        let bytes = record().encode();
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Record::decode(&bytes, 77, 100).is_none(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(Record::decode(&bytes[..len], 77, 100).is_none(), "cut to {len}");
        }
    }

    #[test]
    fn checks_are_of_the_sectors_that_are_named() {
        let mut block = vec![0; 4096];
        block[512] = 7;
        let each = Checks(block.chunks(SECTOR_LEN).skip(1).take(2).map(crc32c::crc32c).collect());
        for checks in [Checks::of(0b110, &block), each] {
            let mut block = block.clone();
            assert!(checks.matches(0b110, &block) && !checks.matches(0b11, &block));
            block[0] = 1;
            assert!(checks.matches(0b110, &block), "a sector that is not named may be anything");
            block[1535] = 1;
            assert!(!checks.matches(0b110, &block));
        }
        assert_eq!(Checks::of(0xFF, &block).len(), 1);
        assert_eq!(Checks::of(0xFF, &block).iter().next(), Some(crc32c::crc32c(&block)));
    }

    fn recoded(change: impl FnOnce(&mut Vec<u8>)) -> Option<Record> {
        let mut bytes = record().encode();
        change(&mut bytes);
        put32(&mut bytes, at::CRC, 0);
        let crc = crc32c::crc32c(&bytes);
        put32(&mut bytes, at::CRC, crc);
        Record::decode(&bytes, 77, 100).map(|(record, _)| record)
    }

    #[test]
    fn what_no_cache_writes_is_refused() {
        assert_eq!(recoded(|_| {}), Some(record()));
        for (what, value) in
            [(at::SEQUENCE, 0), (at::SEQUENCE, 1 << 62), (at::DURABLE, 9), (at::TAIL, 10), (at::TAIL, 0)]
        {
            assert!(recoded(|bytes| put64(bytes, what, value)).is_none(), "{what}: {value}");
        }
        for (what, value) in
            [(at::ITEMS, 13), (at::ITEMS, 15), (at::ITEMS, u32::MAX), (at::ZERO, 1), (at::LENGTH, 8192)]
        {
            assert!(recoded(|bytes| put32(bytes, what, value)).is_none(), "{what}: {value}");
        }
        let refused = |items: Vec<Item>| {
            let record = Record { items, ..record() };
            assert!(Record::decode(&record.encode(), 77, 100).is_none(), "{record:?}");
        };
        let drop = Item::Drop { key: Key::new(3, 5) };
        refused(vec![drop.clone(), drop.clone()]);
        refused(vec![drop.clone(), Item::NoRow(3)]);
        let puts = |block, slot, blocks| Item::Puts {
            key: Key::new(3, block),
            slot: Slot(slot),
            blocks,
            dirty: true,
            check: None,
        };
        refused(vec![puts(4, 0, 2), drop.clone()]);
        refused(vec![drop.clone(), puts(4, 0, 2)]);
        refused(vec![Item::Drops { key: Key::new(3, 4), blocks: 2 }, drop.clone()]);
        refused(vec![puts(0, 99, 2)]);
        refused(vec![puts(0, 100, 2)]);
        for (block, blocks) in [(0, 0), (0, 1), (0, 17), (1, 16), (15, 2), (0, u32::from(u16::MAX))] {
            refused(vec![puts(block, 0, blocks)]);
            refused(vec![Item::Drops { key: Key::new(3, block), blocks }]);
        }
        refused(vec![Item::Drops { key: Key::new(1022, 0), blocks: 2 }]);
        refused(vec![Item::NoRow(1022)]);
        refused(vec![Item::Row(Row { number: 1022, ..row() })]);
        refused(vec![Item::Drop { key: Key::new(1022, 5) }]);
        refused(vec![Item::Zero { key: Key::new(1, 5), blocks: 0, may_free: true }]);
        refused(vec![Item::Unzero { key: Key::new(1, 5), blocks: BLOCKS_MAX - 4 }]);
        refused(vec![Item::Written(Word { key: Key::new(1, 0), bits: 0 })]);
        refused(vec![Item::Void(Word { key: Key::new(1, 1 << 14), bits: 1 })]);
        refused(vec![Item::Settled(Word { key: Key::new(1022, 0), bits: 1 })]);
        refused(vec![Item::Put {
            key: Key::new(1, 5),
            slot: Slot(1),
            sectors: 0,
            dirty: true,
            checks: None,
        }]);
    }

    #[test]
    fn any_bytes_with_a_good_crc_are_read_or_refused() {
        for seed in 0..3000 {
            let mut random = Random::from_seed(seed);
            let found = recoded(|bytes| {
                for _ in 0..=random.below(3) {
                    bytes[HEADER_LEN + random.index(300)] ^= 1 << random.below(8);
                }
            });
            if let Some(found) = found {
                let again = Record::decode(&found.encode(), 77, 100).unwrap();
                assert_eq!(again.0, found, "seed {seed}");
            }
        }
    }
}
