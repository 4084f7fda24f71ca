//! Where the whole records of a ring are.
//!
//! ```text
//!   ring     │ block │ block │ block │ block │        each summed once: the CRC from the ring's start up to each of them
//!   record           └── header ── … ────────┘        its CRC follows from two of these sums, and one of its first block
//! ```
//!
//! 1. A header may be what is left of an old record, so each block may begin one, and each may claim to be long. However many do, the
//!    bytes of the ring are summed once, and a header's block once more.
//! 2. Whole records do not overlap: the newer one of two would have overwritten the other. So all of them together are no longer than
//!    the ring, which bounds what is decoded and kept of them.

use std::collections::BTreeMap;

use crate::layout::BLOCK_LEN;
use crate::record::{Glance, Record};

/// What was found.
pub(super) struct Found {
    /// By its sequence, where a record begins, its length, its tail.
    pub(super) places: BTreeMap<u64, (usize, usize, u64)>,
    /// How many bytes were summed.
    #[cfg_attr(not(test), allow(dead_code, reason = "a test bounds it"))]
    pub(super) summed: usize,
}

/// The whole records of a cache with this id in its ring, none of which is longer than `most`. `None` when two of them overlap.
pub(super) fn find(ring: &[u8], id: u128, most: u64) -> Option<Found> {
    let (blocks, _) = ring.as_chunks::<BLOCK_LEN>();
    // Most rings have a few thousand records, and one that has none yet needs no sums.
    let mut sums: Vec<u32> = Vec::new();
    let mut found = Found { places: BTreeMap::new(), summed: 0 };
    let mut end = 0;
    for (number, block) in blocks.iter().enumerate() {
        let at = number * BLOCK_LEN;
        // Old records may lie anywhere within the place of a newer one that did not arrive.
        let glance = Record::glance_summed(&ring[at..], id, most, |head, len| {
            if sums.is_empty() {
                sums = sums_of(blocks);
                found.summed += ring.len();
            }
            found.summed += BLOCK_LEN;
            debug_assert_eq!(head.len(), block.len());
            let (from, upto) = (number + 1, number + len / BLOCK_LEN);
            joined(crc32c::crc32c(head), between(&sums, from, upto), (upto - from) * BLOCK_LEN)
        });
        let Some(Glance { sequence, tail, len }) = glance else { continue };
        if at < end {
            return None;
        }
        end = at + len;
        found.places.insert(sequence, (at, len, tail));
    }
    Some(found)
}

/// The CRC of what comes before each block, and of all.
fn sums_of(blocks: &[[u8; BLOCK_LEN]]) -> Vec<u32> {
    let mut sums = Vec::with_capacity(blocks.len() + 1);
    sums.push(0);
    for block in blocks {
        sums.push(crc32c::crc32c_append(sums[sums.len() - 1], block));
    }
    sums
}

/// The CRC of the blocks from one to another.
fn between(sums: &[u32], from: usize, upto: usize) -> u32 {
    // A CRC is linear: what comes before is shifted, and taken away.
    joined(sums[from], sums[upto], (upto - from) * BLOCK_LEN)
}

/// The CRC of bytes whose CRC is `first`, followed by `second_len` bytes whose CRC is `second`.
fn joined(first: u32, second: u32, second_len: usize) -> u32 {
    crc32c::crc32c_combine(first, second, second_len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::{put32, put64};
    use crate::layout::{Key, has_good_crc};
    use crate::record::Item;

    const ID: u128 = 77;
    const BLOCKS: usize = 512;
    const MOST: u64 = (BLOCKS * BLOCK_LEN / 8) as u64;
    /// Where the CRC of a record is.
    const CRC: usize = 56;

    fn record(sequence: u64, drops: u64) -> Vec<u8> {
        let items = (0..drops).map(|block| Item::Drop { key: Key::new(0, 2 * block) }).collect();
        Record { id: ID, sequence, durable: sequence - 1, tail: 1, items }.encode()
    }

    /// What a program finds that sums each record from its start to its end.
    fn plainly(ring: &[u8]) -> BTreeMap<u64, (usize, usize, u64)> {
        let mut places = BTreeMap::new();
        for at in (0..ring.len()).step_by(BLOCK_LEN) {
            if let Some(Glance { sequence, tail, len }) = Record::glance(&ring[at..], ID)
                && len as u64 <= MOST
            {
                places.insert(sequence, (at, len, tail));
            }
        }
        places
    }

    #[test]
    fn whole_records_are_found_and_torn_ones_are_not() {
        let mut random = vellum_core::Random::from_seed(5);
        let mut kinds = [0; 2];
        for seed in 0..40 {
            let mut ring = vec![0; BLOCKS * BLOCK_LEN];
            let (mut at, mut sequence) = (0, 1 + seed);
            while at < ring.len() {
                let bytes = record(sequence, random.below(2500));
                // Some do not arrive as a whole: what was there before stays.
                let keep = if random.one_in(4) { random.index(bytes.len()) } else { bytes.len() };
                let keep = keep.min(ring.len() - at);
                ring[at..at + keep].copy_from_slice(&bytes[..keep]);
                at += bytes.len();
                sequence += 1;
            }
            let found = find(&ring, ID, MOST).expect("none overlap").places;
            assert_eq!(found, plainly(&ring), "seed {seed}");
            kinds[0] += found.len();
            kinds[1] += usize::try_from(sequence - 1 - seed).unwrap() - found.len();
        }
        assert!(kinds.iter().all(|count| *count > 100), "{kinds:?}");
    }

    /// Every block begins with a header that claims the longest record.
    #[test]
    fn a_ring_of_claims_is_summed_once() {
        let mut ring = record(9, 0).repeat(BLOCKS);
        for block in ring.chunks_mut(BLOCK_LEN) {
            put32(block, 48, u32::try_from(MOST).unwrap());
        }
        let found = find(&ring, ID, MOST).expect("none is whole");
        assert!(found.places.is_empty());
        assert!(found.summed <= 2 * ring.len(), "{} bytes of {} were summed", found.summed, ring.len());
    }

    /// The same, and the CRC of each is good: what is decoded and kept of them would be many times the ring.
    #[test]
    fn records_that_overlap_are_refused() {
        let mut ring = record(9, 0).repeat(BLOCKS);
        let len = usize::try_from(MOST).unwrap();
        for number in (0..=BLOCKS - len / BLOCK_LEN).rev() {
            let bytes = &mut ring[number * BLOCK_LEN..][..len];
            put64(bytes, 24, 1000 + number as u64);
            put64(bytes, 32, 999 + number as u64);
            put32(bytes, 48, u32::try_from(MOST).unwrap());
            put32(bytes, CRC, 0);
            let crc = crc32c::crc32c(bytes);
            put32(bytes, CRC, crc);
            assert!(has_good_crc(bytes, CRC));
        }
        assert!(plainly(&ring).len() > 400);
        assert!(find(&ring, ID, MOST).is_none());
    }
}
