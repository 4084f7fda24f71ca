//! How large an image will be: counted from its options, before there is one.
//!
//! ```text
//!   header │ L1 table │ L2 tables of the whole disk │ refcount blocks and their table │ journal │ data
//! ```
//!
//! The tables are those of a full image, also where less is stored: a number that is too large by some tables is better
//! than one that is too small. The refcounts count themselves, so their number is found by trying again until it stays.
//! Without a journal, these are the numbers of `qemu-img measure`.

use vellum_core::{BlockSize, Result};

use super::create::{CreateOptions, Plan, Preallocation};
use crate::measure::ImageSizes;

impl CreateOptions {
    /// The sizes of an image with these options, once it holds data.
    ///
    /// # Errors
    /// Those of creating it, as far as the options are to blame.
    pub fn sizes(&self) -> Result<ImageSizes> {
        Plan::new(self)?;
        let cluster = BlockSize::from_bytes(self.cluster_size).expect("as just checked");
        let disk = cluster.round_up(self.size);
        let entry = if self.extended_l2 { 16 } else { 8 };
        let l2 = cluster.round_up((disk >> cluster.shift()) * entry);
        let l1 = cluster.round_up((l2 >> cluster.shift()) * 8);
        let tables = cluster.bytes() + l2 + l1;
        let journal = cluster.round_up(self.journal.unwrap_or(0));
        let refcounts =
            refcount_clusters((tables + disk + journal) >> cluster.shift(), cluster, self.refcount_bits);
        let is_full = matches!(self.preallocation, Preallocation::Falloc | Preallocation::Full);
        Ok(ImageSizes {
            metadata: tables + journal + (refcounts << cluster.shift()),
            unit: cluster,
            disk,
            is_full,
        })
    }
}

/// How many clusters the refcounts of this many clusters, and of their own, take, with their table.
fn refcount_clusters(clusters: u64, cluster: BlockSize, refcount_bits: u32) -> u64 {
    let per_block = cluster.bytes() * 8 / u64::from(refcount_bits);
    let (mut blocks, mut table) = (0u64, 0u64);
    loop {
        let before = (blocks, table);
        blocks = (clusters + blocks + table).div_ceil(per_block);
        table = blocks.div_ceil(cluster.bytes() / 8);
        if before == (blocks, table) {
            return blocks + table;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_count_themselves() {
        let cluster = BlockSize::from_shift(16);
        assert_eq!(refcount_clusters(0, cluster, 16), 0);
        assert_eq!(refcount_clusters(1, cluster, 16), 2);
        // With the block and the table, one more than a block counts.
        assert_eq!(refcount_clusters(32_766, cluster, 16), 2);
        assert_eq!(refcount_clusters(32_767, cluster, 16), 3);
    }

    #[test]
    fn a_disk_of_a_gibibyte() {
        // As `qemu-img measure -O qcow2 --size 1G` says.
        let options = CreateOptions { size: 1 << 30, ..CreateOptions::without_journal() };
        let sizes = options.sizes().unwrap();
        assert_eq!((sizes.required(0), sizes.full()), (393_216, 1_074_135_040));
        let with = CreateOptions { size: 1 << 30, ..CreateOptions::default() }.sizes().unwrap();
        assert_eq!(with.full() - sizes.full(), 1 << 20);
    }
}
