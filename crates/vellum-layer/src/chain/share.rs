//! How the images of a chain share the memory for their mappings.
//!
//! ```text
//!   needs    2 MiB   40 MiB   40 MiB   1 MiB        of 32 MiB
//!   shares   2 MiB   14.5     14.5     1 MiB        none has more than it can use; the rest is shared evenly
//! ```
//!
//! Where two or more images are below the top, a part of the memory is for the view that is read instead of
//! them. Pure. An image takes its memory only when it is read.

use vellum_format::image::MAPPING_BYTES_DEFAULT;

/// A mapping is held in pages of this many bytes, 16 of them at least.
const PAGE: u64 = 4096;
const LEAST: u64 = 16 * PAGE;

/// The default limit for the images of a chain together: as much as four images that need more than they can
/// have.
const CHAIN_DEFAULT: u64 = 4 * MAPPING_BYTES_DEFAULT;

/// The memory for the mappings of a chain, in bytes.
pub(super) struct Shares {
    /// That of each image, from the top down.
    pub(super) images: Vec<u64>,
    /// That of the view of those below the top.
    pub(super) view: u64,
}

/// The shares of `total` bytes when the mapping of each image takes this much as a whole.
pub(super) fn shares(needs: &[u64], total: Option<u64>) -> Shares {
    let (total, each) = total.map_or((CHAIN_DEFAULT, MAPPING_BYTES_DEFAULT), |total| (total, total));
    let view = if needs.len() > 2 { (total / 4).min(MAPPING_BYTES_DEFAULT) } else { 0 };
    Shares { images: shares_of_images(needs, total - view, each), view }
}

fn shares_of_images(needs: &[u64], total: u64, each: u64) -> Vec<u64> {
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

    fn of_images(needs: &[u64], total: Option<u64>) -> Vec<u64> {
        shares(needs, total).images
    }

    #[test]
    fn nobody_has_more_than_it_needs_and_the_rest_is_shared() {
        assert_eq!(
            shares_of_images(&[2 * MIB, 40 * MIB, 40 * MIB, MIB], 32 * MIB, 32 * MIB),
            [2 * MIB, 29 * MIB / 2, 29 * MIB / 2, MIB]
        );
        assert_eq!(
            of_images(&[1 << 40], Some(256 * MIB)),
            [256 * MIB],
            "what is said is for one that needs it"
        );
    }

    #[test]
    fn an_image_in_a_chain_has_what_it_would_have_alone_until_there_are_many() {
        assert_eq!(of_images(&[1 << 40], None), [32 * MIB]);
        assert_eq!(of_images(&[1 << 40; 3], None), [32 * MIB; 3]);
        assert_eq!(of_images(&[3 * MIB; 10], None), [3 * MIB; 10]);
        assert_eq!(of_images(&[12 * MIB, 0, 0], None), [12 * MIB, LEAST, LEAST]);
    }

    #[test]
    fn there_is_a_view_from_two_images_below_the_top_on() {
        assert_eq!(shares(&[1 << 40], None).view, 0);
        assert_eq!(shares(&[1 << 40; 2], None).view, 0);
        assert_eq!(shares(&[1 << 40; 3], None).view, 32 * MIB);
        assert_eq!(shares(&[1 << 40; 3], Some(4 * MIB)).view, MIB);
    }

    #[test]
    fn a_long_chain_takes_no_more_than_a_short_one() {
        for len in [1, 2, 5, 32, 100, 256] {
            for total in [None, Some(MIB), Some(64 * MIB), Some(0)] {
                let least = len as u64 * LEAST;
                let Shares { images, view } = shares(&vec![1 << 40; len], total);
                let sum = images.iter().sum::<u64>() + view;
                assert!(sum <= total.unwrap_or(128 * MIB).max(least) + least, "{len} {total:?}");
            }
        }
    }
}
