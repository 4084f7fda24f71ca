//! Slices: what the ledger, or one part of the map, was when a record was durable.
//!
//! ```text
//!   magic  crc  number  id  as_of  length  zero │ payload            at most 88 KiB, in two places by turns
//!   0      8    12      16  32     40      44   64
//! ```
//!
//! 1. Of the two places of a slice the good one with the higher `as_of` counts. The other is written next, so a
//!    torn write harms nothing. When one that is not good may be passed over, `recover` says.
//! 2. A payload is bounded by what fits a place, and trusted for nothing: a part's is read by `map`, the ledger's
//!    here.
//!
//! The text of this is `docs/format/flash.md`.

use std::collections::BTreeMap;

use crate::bytes::{be16, be32, be64, be128, put32, put64, put128};
use crate::layout::{BLOCK_LEN, BLOCKS_MAX, Key, PAYLOAD_MAX, ROWS_MAX, SLICE_HEADER_LEN, has_good_crc};
use crate::record::{ROW_LEN, Row};
use crate::regions::{Regions, WORDS_MAX, Word};
use crate::zeros::{RUNS_FOUND_MAX, Run, Zeros};

const MAGIC: u64 = 0x5645_4C4C_554D_4632; // "VELLUMF2"

mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const CRC: usize = 8;
    pub(super) const NUMBER: usize = 12;
    pub(super) const ID: usize = 16;
    pub(super) const AS_OF: usize = 32;
    pub(super) const LENGTH: usize = 40;
    pub(super) const ZERO: usize = 44;
}

/// Runs of zeros and words of regions in a ledger, together: beside all rows, no more have room.
pub(crate) const PAIRS_MAX: usize = RUNS_FOUND_MAX;

/// A slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slice {
    /// 0 is the ledger, n + 1 part n.
    pub(crate) number: u32,
    /// The last record that it has.
    pub(crate) as_of: u64,
    /// What it says.
    pub(crate) payload: Vec<u8>,
}

impl Slice {
    /// The slice's bytes, padded with zeros to a multiple of 4 KiB. Panics when the payload is too long for a place.
    pub(crate) fn encode(&self, id: u128) -> Vec<u8> {
        assert!(self.payload.len() <= PAYLOAD_MAX, "slice {} has {} bytes", self.number, self.payload.len());
        let len = SLICE_HEADER_LEN + self.payload.len();
        let mut bytes = Vec::with_capacity(len.next_multiple_of(BLOCK_LEN));
        bytes.resize(SLICE_HEADER_LEN, 0);
        bytes.extend_from_slice(&self.payload);
        put64(&mut bytes, at::MAGIC, MAGIC);
        put32(&mut bytes, at::NUMBER, self.number);
        put128(&mut bytes, at::ID, id);
        put64(&mut bytes, at::AS_OF, self.as_of);
        put32(&mut bytes, at::LENGTH, u32::try_from(self.payload.len()).expect("bounded above"));
        let crc = crc32c::crc32c(&bytes);
        put32(&mut bytes, at::CRC, crc);
        bytes.resize(len.next_multiple_of(BLOCK_LEN), 0);
        bytes
    }

    /// What a header says, of slice `number` of this cache: the last record that it has, and the length of its payload. `None` when
    /// it is no header. Nothing says yet that the slice is whole.
    pub(crate) fn claim(head: &[u8; SLICE_HEADER_LEN], id: u128, number: u32) -> Option<(u64, usize)> {
        let len = be32(head, at::LENGTH) as usize;
        let is_ours = be64(head, at::MAGIC) == MAGIC
            && be128(head, at::ID) == id
            && be32(head, at::NUMBER) == number
            && len <= PAYLOAD_MAX
            && head[at::ZERO..].iter().all(|byte| *byte == 0);
        is_ours.then(|| (be64(head, at::AS_OF), len))
    }

    /// Slice `number` of this cache, in the place that begins with these bytes: the last record that it has, and the length of its
    /// payload, which is behind the header. `None` when it is not there, or not whole.
    pub(crate) fn look(bytes: &[u8], id: u128, number: u32) -> Option<(u64, usize)> {
        let (as_of, len) = Self::claim(bytes.first_chunk()?, id, number)?;
        let whole = bytes.get(..SLICE_HEADER_LEN + len)?;
        has_good_crc(whole, at::CRC).then_some((as_of, len))
    }

    /// A place that was cut off, made void: a slice as of no record, with nothing. Where the other place is as of no record itself,
    /// zeros, as in a new cache.
    pub(crate) fn void(number: u32, id: u128, other_as_of: u64) -> [u8; SLICE_HEADER_LEN] {
        match other_as_of {
            0 => [0; SLICE_HEADER_LEN],
            _ => {
                let bytes = Self { number, as_of: 0, payload: Vec::new() }.encode(id);
                *bytes.first_chunk().expect("a slice has a header")
            }
        }
    }

    /// The same, with a copy of the payload.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn decode(bytes: &[u8], id: u128, number: u32) -> Option<Self> {
        let (as_of, len) = Self::look(bytes, id, number)?;
        Some(Self { number, as_of, payload: bytes[SLICE_HEADER_LEN..][..len].to_vec() })
    }
}

/// Rows, regions and runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ledger {
    /// The disks that the cache knows, by their numbers.
    pub(crate) rows: BTreeMap<u16, Row>,
    /// The regions that count as written.
    pub(crate) regions: Regions,
    /// The blocks that are zero.
    pub(crate) zeros: Zeros,
}

impl Ledger {
    /// The payload of slice 0.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let count =
            |count: usize| u16::try_from(count).expect("at most 1022 rows, and 512 words").to_be_bytes();
        let pairs = self.zeros.len() + self.regions.len();
        let mut payload = Vec::with_capacity(4 + self.rows.len() * ROW_LEN + pairs * 16);
        payload.extend(count(self.regions.len()));
        payload.extend(count(self.rows.len()));
        payload.extend(self.rows.values().flat_map(Row::encode));
        for word in self.regions.words() {
            payload.extend(word.key.bits().to_be_bytes());
            payload.extend(word.bits.to_be_bytes());
        }
        for run in self.zeros.runs() {
            payload.extend(run.key.bits().to_be_bytes());
            payload.extend((run.blocks << 1 | u64::from(run.may_free)).to_be_bytes());
        }
        payload
    }

    /// The ledger in the payload of slice 0. `None` when it is none: a row, a region or a block twice, more of them than
    /// there may be, bytes at the end.
    pub(crate) fn decode(payload: &[u8]) -> Option<Self> {
        let mut ledger = Self::default();
        if payload.is_empty() {
            return Some(ledger);
        }
        let (words, count) = (usize::from(be16(payload.get(..4)?, 0)), be16(payload, 2));
        if count > ROWS_MAX || words > WORDS_MAX {
            return None;
        }
        let (rows, rest) = payload[4..].split_at_checked(usize::from(count) * ROW_LEN)?;
        let (words, runs) = rest.split_at_checked(words * 16)?;
        for row in rows.chunks_exact(ROW_LEN) {
            let row = Row::decode(row)?;
            if ledger.rows.insert(row.number, row).is_some() {
                return None;
            }
        }
        for word in words.chunks_exact(16) {
            let word = Word { key: Key::from_bits(be64(word, 0)), bits: be64(word, 8) };
            if word.key.row() >= ROWS_MAX || !word.is_good() || ledger.regions.has_word(word.key) {
                return None;
            }
            ledger.regions.add(word);
        }
        if !runs.len().is_multiple_of(16) || runs.len() / 16 + ledger.regions.len() > PAIRS_MAX {
            return None;
        }
        for run in runs.chunks_exact(16) {
            let (key, blocks) = (Key::from_bits(be64(run, 0)), be64(run, 8) >> 1);
            let is_good = key.row() < ROWS_MAX
                && blocks > 0
                && blocks <= BLOCKS_MAX - key.block()
                && ledger.zeros.overlapping(key, blocks).next().is_none();
            let run = Run { key, blocks, may_free: be64(run, 8) & 1 != 0 };
            if !is_good || !ledger.zeros.restore(run) {
                return None;
            }
        }
        Some(ledger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice() -> Slice {
        Slice { number: 5, as_of: 9, payload: vec![7; 5000] }
    }

    fn ledger() -> Ledger {
        let mut ledger = Ledger::default();
        for number in [0, 7, 1021] {
            let row = Row { number, has_record: number == 7, disk: 1, named: 2, newest: 3 };
            ledger.rows.insert(number, row);
        }
        for (key, may_free) in [(Key::new(7, 3), true), (Key::new(7, 90), false)] {
            assert!(ledger.zeros.add(Run { key, blocks: 20, may_free }));
        }
        for (key, bits) in [(Key::new(7, 0), 1 << 63), (Key::new(7, 1 << 20), 5)] {
            ledger.regions.add(Word { key, bits });
        }
        ledger
    }

    #[test]
    fn a_slice_reads_as_it_was_written() {
        let bytes = slice().encode(77);
        assert_eq!(bytes.len(), 8192);
        assert_eq!(Slice::decode(&bytes, 77, 5), Some(slice()));
        assert_eq!(Slice::decode(&bytes, 78, 5), None);
        assert_eq!(Slice::decode(&bytes, 77, 4), None);
        let longest = Slice { payload: vec![1; PAYLOAD_MAX], ..slice() };
        let bytes = longest.encode(77);
        assert_eq!(bytes.len() as u64, crate::layout::PLACE_BYTES);
        assert_eq!(Slice::decode(&bytes, 77, 5), Some(longest));
    }

    #[test]
    fn every_bit_counts() {
        let bytes = slice().encode(77);
        for bit in 0..5064 * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Slice::decode(&bytes, 77, 5), None, "bit {bit}");
        }
        for len in 0..5064 {
            assert_eq!(Slice::decode(&bytes[..len], 77, 5), None, "cut to {len}");
        }
    }

    #[test]
    fn a_ledger_reads_as_it_was_written() {
        assert_eq!(Ledger::decode(&ledger().encode()), Some(ledger()));
        assert_eq!(Ledger::decode(&[]), Some(Ledger::default()));
        assert_eq!(Ledger::decode(&Ledger::default().encode()), Some(Ledger::default()));
    }

    #[test]
    fn the_fullest_ledger_has_room() {
        let mut full = Ledger::default();
        for number in 0..ROWS_MAX {
            full.rows.insert(number, Row { number, has_record: true, disk: 1, named: 2, newest: 3 });
        }
        for n in 0..WORDS_MAX as u64 {
            full.regions.add(Word { key: Key::new(1, n << 20), bits: 1 });
        }
        for n in 0..(PAIRS_MAX - WORDS_MAX) as u64 {
            assert!(full.zeros.restore(Run { key: Key::new(1, n * 2), blocks: 1, may_free: false }));
        }
        assert!(full.encode().len() <= PAYLOAD_MAX);
        assert_eq!(Ledger::decode(&full.encode()), Some(full));
    }

    #[test]
    fn what_no_cache_writes_is_refused() {
        let bytes = ledger().encode();
        for len in 1..bytes.len() {
            let before = 4 + 3 * ROW_LEN + 2 * 16;
            let is_whole = len >= before && (len - before).is_multiple_of(16);
            assert_eq!(Ledger::decode(&bytes[..len]).is_some(), is_whole, "cut to {len}");
        }
        let with = |at: usize, value: &[u8]| {
            let mut bytes = bytes.clone();
            bytes[at..at + value.len()].copy_from_slice(value);
            Ledger::decode(&bytes)
        };
        let words = 4 + 3 * ROW_LEN;
        assert!(with(words + 16, &bytes[words..words + 8]).is_none(), "a region twice");
        assert!(with(words + 8, &[0; 8]).is_none(), "a word of none");
        assert!(with(words + 6, &[1]).is_none(), "a word that does not begin 64 regions");
        assert!(with(words, &[255, 0]).is_none(), "a word of no row");
        assert!(with(0, &[2, 1]).is_none(), "more words than there may be");
        let runs = words + 2 * 16;
        assert!(with(4 + ROW_LEN, &[0, 0]).is_none(), "a row twice");
        assert!(with(4, &[4, 0]).is_none(), "a row that has no number");
        assert!(with(0, &[0, 0, 0, 2]).is_none(), "another number of rows");
        assert!(with(0, &[255; 4]).is_none());
        assert!(with(runs + 16, &bytes[runs..runs + 8]).is_none(), "a block in two runs");
        assert!(with(runs + 8, &[0; 8]).is_none(), "a run of none");
        assert!(with(runs + 8, &[255; 8]).is_none(), "a run beyond its disk");
        assert!(with(runs, &[255; 8]).is_none(), "a run of no row");
    }
}
