//! How the images of a chain share the memory for their mappings.
//!
//! ```text
//!   needs    2 MiB   40 MiB   40 MiB   1 MiB        of 32 MiB
//!   shares   2 MiB   14.5     14.5     1 MiB        none has more than it can use; the rest is shared evenly
//! ```
//!
//! Pure. An image takes its memory only when it is read.

use vellum_format::image::MAPPING_BYTES_DEFAULT;

/// A mapping is held in pages of this many bytes, 16 of them at least.
const PAGE: u64 = 4096;
const LEAST: u64 = 16 * PAGE;

/// The default limit for the images of a chain together: as much as four images that need more than they can
/// have.
const CHAIN_DEFAULT: u64 = 4 * MAPPING_BYTES_DEFAULT;

/// The share of each image of a chain that needs so much, of `total` bytes.
pub(super) fn shares(needs: &[u64], total: Option<u64>) -> Vec<u64> {
    let (total, each) = total.map_or((CHAIN_DEFAULT, MAPPING_BYTES_DEFAULT), |total| (total, total));
    let mut shares = vec![0; needs.len()];
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|index| needs[*index]);
    let (mut left, mut sharers) = (total, needs.len() as u64);
    for index in order {
        // The smallest first: what it leaves is for the others.
        let share = needs[index].min(each).min(left / sharers);
        shares[index] = share.max(LEAST);
        left -= share;
        sharers -= 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn nobody_has_more_than_it_needs_and_the_rest_is_shared() {
        assert_eq!(
            shares(&[2 * MIB, 40 * MIB, 40 * MIB, MIB], Some(32 * MIB)),
            [2 * MIB, 29 * MIB / 2, 29 * MIB / 2, MIB]
        );
        assert_eq!(shares(&[1 << 40], Some(256 * MIB)), [256 * MIB], "what is said is for one that needs it");
    }

    #[test]
    fn an_image_in_a_chain_has_what_it_would_have_alone_until_there_are_many() {
        assert_eq!(shares(&[1 << 40], None), [32 * MIB]);
        assert_eq!(shares(&[1 << 40; 4], None), [32 * MIB; 4]);
        assert_eq!(shares(&[3 * MIB; 10], None), [3 * MIB; 10]);
        assert_eq!(shares(&[12 * MIB, 0, 0], None), [12 * MIB, LEAST, LEAST]);
    }

    #[test]
    fn a_long_chain_takes_no_more_than_a_short_one() {
        for len in [1, 2, 5, 32, 100, 256] {
            for total in [None, Some(MIB), Some(64 * MIB), Some(0)] {
                let least = len as u64 * LEAST;
                let sum: u64 = shares(&vec![1 << 40; len], total).iter().sum();
                assert!(sum <= total.unwrap_or(128 * MIB).max(least) + least, "{len} {total:?}");
            }
        }
    }
}
