//! A packed block: 4 KiB of the guest, compressed, behind a header that serves as their unit's table entry.
//!
//! ```text
//!  0     8            12           16      17  18     20      24                                   4096
//!  ├─────┼────────────┼────────────┼───────┼───┼──────┼───────┼───────────────────────┬──────────────┤
//!  │ tag │ guest unit │ image unit │ block │ 0 │ len  │ CRC32C│ LZ4, `len` bytes      │ zeros        │
//!  └─────┴────────────┴────────────┴───────┴───┴──────┴───────┴───────────────────────┴──────────────┘
//! ```
//!
//! Selfie (SYSTOR 2015, §2.1) puts the virtual cluster address into the lead block of a cluster, in ten
//! bytes. Here the header takes 24 of 4096 bytes (0.6 %), and goes into whichever whole block is written
//! first.
//!
//! 1. The tag is drawn when the zone is opened, and no guest can know it. So a guest's bytes are never taken
//!    for an entry.
//! 2. The block says where it lies. A copy of it somewhere else does not count.
//! 3. The CRC32C covers the whole block, with its own field as zero. A torn block does not count.

use vellum_core::{Error, Result};

use crate::bytes::{be32, be64, put32, put64};

/// The size of a block in bytes.
pub const BLOCK_LEN: usize = 4096;
/// A form can name this many blocks of a unit.
pub const BLOCKS_MAX: u64 = 31;
const HEADER_LEN: usize = 24;
/// The guest's bytes must pack into at most this many bytes, or the block is not packed.
const PACKED_MAX: usize = BLOCK_LEN - HEADER_LEN;

mod field {
    pub(super) const TAG: usize = 0;
    pub(super) const GUEST: usize = 8;
    pub(super) const IMAGE: usize = 12;
    pub(super) const BLOCK: usize = 16;
    pub(super) const LEN: usize = 18;
    pub(super) const CRC: usize = 20;
}

/// The identity of a packed block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    /// The tag that its zone got when it was opened.
    pub tag: u64,
    /// The unit of the disk.
    pub guest_unit: u32,
    /// The stored unit in which it lies.
    pub image_unit: u32,
    /// Which block of the unit it is.
    pub block: u8,
}

/// The compressed bytes of a block, short enough to fit behind its header.
pub struct Packed(Vec<u8>);

impl Packed {
    /// Packs 4 KiB of a guest. `None` when the result is too long.
    pub fn of(plain: &[u8]) -> Option<Self> {
        debug_assert_eq!(plain.len(), BLOCK_LEN);
        let mut packed = vec![0; lz4_flex::block::get_maximum_output_size(BLOCK_LEN)];
        let len = lz4_flex::block::compress_into(plain, &mut packed).ok()?;
        packed.truncate(len);
        (len <= PACKED_MAX).then_some(Self(packed))
    }

    /// The block as it is written to the image.
    pub fn block(&self, identity: Identity) -> Vec<u8> {
        let mut block = vec![0; BLOCK_LEN];
        put64(&mut block, field::TAG, identity.tag);
        put32(&mut block, field::GUEST, identity.guest_unit);
        put32(&mut block, field::IMAGE, identity.image_unit);
        block[field::BLOCK] = identity.block;
        let len = u16::try_from(self.0.len()).expect("at most 4072");
        block[field::LEN..field::LEN + 2].copy_from_slice(&len.to_be_bytes());
        block[HEADER_LEN..HEADER_LEN + self.0.len()].copy_from_slice(&self.0);
        let crc = crc32c::crc32c(&block);
        put32(&mut block, field::CRC, crc);
        block
    }
}

/// The identity of the block at this place of a zone. `None` when it holds no entry, which is cheap to find
/// out.
pub fn identify(block: &[u8], tag: u64, image_unit: u32, index: u8) -> Option<Identity> {
    if block.len() != BLOCK_LEN || tag == 0 || be64(block, field::TAG) != tag {
        return None;
    }
    let is_here = be32(block, field::IMAGE) == image_unit && block[field::BLOCK] == index;
    let len = usize::from(u16::from_be_bytes([block[field::LEN], block[field::LEN + 1]]));
    if !is_here || block[field::BLOCK + 1] != 0 || len > PACKED_MAX {
        return None;
    }
    let crc = crc32c::crc32c(&block[..field::CRC]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    let crc = crc32c::crc32c_append(crc, &block[HEADER_LEN..]);
    let guest_unit = be32(block, field::GUEST);
    (crc == be32(block, field::CRC)).then_some(Identity { tag, guest_unit, image_unit, block: index })
}

/// Unpacks the guest's 4 KiB.
///
/// # Errors
/// `Corrupt` when the block does not have this identity.
pub fn unpack(block: &[u8], identity: Identity) -> Result<Vec<u8>> {
    if identify(block, identity.tag, identity.image_unit, identity.block) != Some(identity) {
        return Err(Error::corrupt("a block that should hold its unit's entry does not"));
    }
    let len = usize::from(u16::from_be_bytes([block[field::LEN], block[field::LEN + 1]]));
    let mut plain = vec![0; BLOCK_LEN];
    match lz4_flex::block::decompress_into(&block[HEADER_LEN..HEADER_LEN + len], &mut plain) {
        Ok(BLOCK_LEN) => Ok(plain),
        _ => Err(Error::corrupt("a packed block does not unpack to 4 KiB")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Identity = Identity { tag: 0xA5A5, guest_unit: 7, image_unit: 9, block: 3 };

    #[test]
    fn what_was_packed_comes_back() {
        for plain in [vec![0; 4096], vec![7; 4096], (0..4096_u32).map(|n| (n / 7 % 251) as u8).collect()] {
            let block = Packed::of(&plain).unwrap().block(HERE);
            assert_eq!(identify(&block, HERE.tag, 9, 3), Some(HERE));
            assert_eq!(unpack(&block, HERE).unwrap(), plain);
        }
    }

    #[test]
    fn what_does_not_become_short_enough_is_not_packed() {
        let mut state = 1_u64;
        let noise: Vec<u8> = (0..4096)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        assert!(Packed::of(&noise).is_none());
    }

    #[test]
    fn elsewhere_torn_or_of_another_time_it_says_nothing() {
        let block = Packed::of(&[7; 4096]).unwrap().block(HERE);
        assert_eq!(identify(&block, HERE.tag + 1, 9, 3), None, "another time");
        assert_eq!(identify(&block, HERE.tag, 10, 3), None, "another unit");
        assert_eq!(identify(&block, HERE.tag, 9, 4), None, "another block");
        assert_eq!(identify(&block, 0, 9, 3), None, "a zone that was never opened");
        for at in 0..4096 {
            let mut other = block.clone();
            other[at] ^= 1;
            assert_eq!(identify(&other, HERE.tag, 9, 3), None, "byte {at}");
        }
        let other = Identity { guest_unit: 8, ..HERE };
        assert!(unpack(&block, other).is_err(), "of another unit of the disk");
    }
}
