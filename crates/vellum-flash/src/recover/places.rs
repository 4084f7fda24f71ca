//! Which of the two places of a slice counts, and whether the other may be as it is.
//!
//! ```text
//!   record    …  A   …   B  B+1 B+2 …                    a copy is made with record B, written with B+1, flushed with it
//!   place 0      A ····································   good
//!   place 1              B ┄┄┄┄┄┄┄┄┄┄                     not good: cut off while the newest record is B or B+1,
//!                                                        damaged when there is B+2: B was durable before that began
//! ```
//!
//! 1. While a copy may have been cut off, the records that the older place lacks are all there: the tail passes them when the copy
//!    is durable. Afterwards they may be gone, so a damaged place is never passed over for an older one.
//! 2. So that a place which was cut off is not met again when there are more records, an opening makes it void
//!    ([`Superblock::VOIDED`]). Caches without that feature keep such places; of them it is only known that a slice which
//!    the tail has passed was durable.
//! 3. The first sector of a place, with the header, is written whole. One that is zeros has not been written since the cache was
//!    made, so what is in the other is as of no record.
//!
//! Left out: a header of which damage has made the age lower than that of the other place is taken for an older one.

use crate::layout::{PLACE_BYTES, SLICE_HEADER_LEN, Superblock};
use crate::slice::Slice;

/// What the header of a place says, before it is known whether the place is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// Zeros: not written since the cache was made.
    Unwritten,
    /// A copy of the slice, of this age; the length of the place's bytes.
    Copy { as_of: u64, len: usize },
    /// Something else.
    Foreign,
}

impl Claim {
    pub(super) fn of(head: &[u8; SLICE_HEADER_LEN], id: u128, number: u32) -> Self {
        if head.iter().all(|byte| *byte == 0) {
            return Self::Unwritten;
        }
        match Slice::claim(head, id, number) {
            Some((as_of, len)) if (SLICE_HEADER_LEN + len) as u64 <= PLACE_BYTES => {
                Self::Copy { as_of, len: SLICE_HEADER_LEN + len }
            }
            _ => Self::Foreign,
        }
    }
}

/// What is known of the records when slices are read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ages {
    pub(super) newest: u64,
    pub(super) tail: u64,
    /// Places that were cut off are made void.
    pub(super) voids: bool,
}

impl Ages {
    pub(super) const fn of(superblock: &Superblock, newest: u64, tail: u64) -> Self {
        Self { newest, tail, voids: superblock.features & Superblock::VOIDED != 0 }
    }
}

/// What the place that does not count is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Other {
    /// As it may be.
    Fine,
    /// Cut off, or nothing that counts: an opening makes it void.
    ToVoid,
    /// It was newer, durably, and is damaged.
    Damaged,
}

/// The place that counts is good, and `as_of` old. The other one claims this; it is not good where it claims to be newer.
pub(super) fn judge(as_of: u64, other: Claim, ages: Ages) -> Other {
    match other {
        Claim::Copy { as_of: older, .. } if older <= as_of => Other::Fine,
        Claim::Copy { as_of: newer, .. } => {
            let was_durable = match ages.voids {
                true => newer > ages.newest || ages.newest - newer >= 2,
                false => newer < ages.tail,
            };
            if was_durable { Other::Damaged } else { Other::ToVoid }
        }
        Claim::Unwritten if as_of == 0 => Other::Fine,
        Claim::Unwritten | Claim::Foreign if ages.voids => Other::Damaged,
        Claim::Unwritten | Claim::Foreign => Other::ToVoid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: [u8; SLICE_HEADER_LEN] = [0; SLICE_HEADER_LEN];

    fn head(as_of: u64) -> [u8; SLICE_HEADER_LEN] {
        let bytes = Slice { number: 3, as_of, payload: vec![7; 100] }.encode(77);
        *bytes.first_chunk().unwrap()
    }

    #[test]
    fn a_claim_is_what_the_header_says() {
        assert_eq!(Claim::of(&HEAD, 77, 3), Claim::Unwritten);
        assert_eq!(Claim::of(&head(9), 77, 3), Claim::Copy { as_of: 9, len: 164 });
        assert_eq!(Claim::of(&head(9), 78, 3), Claim::Foreign);
        assert_eq!(Claim::of(&head(9), 77, 4), Claim::Foreign);
        for byte in [0, 12, 16, 43, 63] {
            let mut head = head(9);
            head[if byte == 43 { 40 } else { byte }] ^= 0x80;
            assert_eq!(Claim::of(&head, 77, 3), Claim::Foreign, "byte {byte}");
        }
    }

    #[test]
    fn a_copy_is_cut_off_while_its_record_is_the_last_but_one() {
        let copy = |as_of| Claim::Copy { as_of, len: 164 };
        for (tail, newest, of_feature, without) in [
            (3, 7, Other::ToVoid, Other::ToVoid),
            (3, 8, Other::ToVoid, Other::ToVoid),
            (3, 9, Other::Damaged, Other::ToVoid),
            (7, 9, Other::Damaged, Other::ToVoid),
            (8, 9, Other::Damaged, Other::Damaged),
            (3, 6, Other::Damaged, Other::ToVoid),
        ] {
            let ages = |voids| Ages { newest, tail, voids };
            let about = format!("the newest is {newest}, the tail {tail}");
            assert_eq!(judge(2, copy(7), ages(true)), of_feature, "{about}");
            assert_eq!(judge(2, copy(7), ages(false)), without, "{about}");
        }
        let ages = |voids| Ages { newest: 9, tail: 3, voids };
        for voids in [true, false] {
            assert_eq!(judge(7, copy(2), ages(voids)), Other::Fine);
            assert_eq!(judge(0, Claim::Unwritten, ages(voids)), Other::Fine);
        }
        for claim in [Claim::Unwritten, Claim::Foreign] {
            assert_eq!(judge(4, claim, ages(true)), Other::Damaged);
            assert_eq!(judge(4, claim, ages(false)), Other::ToVoid);
        }
    }
}
