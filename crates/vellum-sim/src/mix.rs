//! Fast 64-bit digests: of pages, of contents, of a whole run. They are good enough to distinguish states,
//! not to resist malice.
//!
//! The building block is a folded multiplication (64 × 64 → 128 bits, halves joined), which mixes sixteen
//! bytes in a few cycles. Four lanes run side by side, because one multiplication must wait for the one
//! before it.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

const KEYS: [u64; 2] = [0x9E37_79B9_7F4A_7C15, 0xA076_1D64_78BD_642F];

/// Where the lanes start. None is a key: a lane equal to the key would multiply by zero and lose the other
/// word.
const LANES: [u64; 4] =
    [0xE703_7ED1_A0B4_28DB, 0x8EBC_6AF0_9C88_C6E3, 0x5899_65CC_7537_4CC3, 0x1D8E_4E27_C47D_124F];

/// Two words into one.
pub(crate) fn mix(one: u64, other: u64) -> u64 {
    let product = u128::from(one ^ KEYS[0]) * u128::from(other ^ KEYS[1]);
    let [low, high] = [product & u128::from(u64::MAX), product >> 64];
    u64::try_from(low ^ high).expect("two halves of 64 bits")
}

/// The digest of a run of bytes whose length is a multiple of 64 (a sector, a page).
pub(crate) fn digest_of(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<64>();
    assert!(rest.is_empty(), "digests are taken of whole sectors");
    let mut lanes = LANES;
    for block in blocks {
        let (words, _) = block.as_chunks::<8>();
        for (lane, pair) in lanes.iter_mut().zip(words.chunks_exact(2)) {
            *lane = mix(*lane ^ u64::from_le_bytes(pair[0]), u64::from_le_bytes(pair[1]));
        }
    }
    mix(mix(lanes[0], lanes[1]), mix(lanes[2], lanes[3]))
}

/// Hashes digests: they are mixed well enough to be their own hash.
#[derive(Default)]
pub(crate) struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |hash, byte| mix(hash, u64::from(*byte)));
    }

    fn write_u64(&mut self, digest: u64) {
        self.0 = digest;
    }
}

/// A set of digests.
pub(crate) type DigestSet = HashSet<u64, BuildHasherDefault<AsIs>>;
/// What is known by its digest.
pub(crate) type DigestMap<T> = HashMap<u64, T, BuildHasherDefault<AsIs>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_a_sector_counts() {
        let mut sector = [0u8; 512];
        let mut seen = vec![digest_of(&sector)];
        for bit in 0..512 * 8 {
            sector[bit / 8] ^= 1 << (bit % 8);
            seen.push(digest_of(&sector));
            sector[bit / 8] ^= 1 << (bit % 8);
        }
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 512 * 8 + 1);
    }
}
