//! QED, a format that QEMU had before qcow2 version 3.
//!
//! ```text
//!   0       header, padded to clusters; the name of the backing image is in it
//!   L1      64-bit offsets of L2 tables, in `table_size` clusters
//!   L2      64-bit offsets of clusters: 0 is none, 1 is zeros
//! ```
//!
//! The mark "needs a check" says that clusters may have been lost. It changes nothing that is read.
//!
//! 1. Each L2 table belongs to one entry of L1, and they do not overlap: what a map of the disk looks up is bounded by the
//!    length of the file.

use std::sync::Arc;

use vellum_core::{Error, LocalFuture, Result, SharedStorage, Storage};

use crate::bytes::{le32, le64, name_at, read_at};
use crate::layout::{Header, Layout, OpenLayout, Run, Where};
use crate::pages::Pages;
use crate::{Description, ForeignKind};

const HAS_BACKING: u64 = 1;
const NEEDS_CHECK: u64 = 2;
/// The backing image is raw.
const BACKING_IS_RAW: u64 = 4;
const KNOWN: u64 = HAS_BACKING | NEEDS_CHECK | BACKING_IS_RAW;
const CLUSTER_SHIFTS: std::ops::RangeInclusive<u32> = 12..=26;
const TABLE_CLUSTERS_MAX: u32 = 16;
/// With the clusters that QEMU makes these are petabytes.
const L1_ENTRIES_MAX: u64 = 1 << 20;
/// So much of L1 is read at once.
const L1_PIECE_BYTES: u64 = 64 << 10;

#[derive(Clone)]
struct Qed {
    cluster: u64,
    /// Entries of a table.
    entries: u64,
    l1_at: u64,
    /// Entries of L1 that the disk needs.
    l1_len: u64,
}

pub(crate) async fn look(image: &dyn Storage) -> Result<Description> {
    let bytes = read_at(image, 0, 64).await?;
    let (cluster, table, header) = (le32(&bytes, 4), le32(&bytes, 8), le32(&bytes, 12));
    let features = le64(&bytes, 16);
    if features & !KNOWN != 0 {
        return Err(Error::unsupported(format!("unknown features {:#x}", features & !KNOWN)));
    }
    if !cluster.is_power_of_two() || !CLUSTER_SHIFTS.contains(&cluster.trailing_zeros()) {
        return Err(Error::corrupt(format!("clusters of {cluster} bytes are not possible")));
    }
    if !table.is_power_of_two() || table > TABLE_CLUSTERS_MAX {
        return Err(Error::corrupt(format!("tables of {table} clusters are not possible")));
    }
    let cluster = u64::from(cluster);
    let entries = u64::from(table) * cluster / 8;
    let (l1_at, size) = (le64(&bytes, 40), le64(&bytes, 48));
    if l1_at == 0 || l1_at % cluster != 0 {
        return Err(Error::corrupt(format!("the L1 table cannot be at {l1_at:#x}")));
    }
    let size_max = entries.saturating_mul(entries).saturating_mul(cluster);
    if size > size_max || size % 512 != 0 {
        return Err(Error::corrupt(format!("a disk of {size} bytes is not possible")));
    }
    let l1_len = size.div_ceil(entries * cluster);
    if l1_len > L1_ENTRIES_MAX {
        return Err(Error::unsupported(format!(
            "a disk of {size} bytes, whose L1 table has {l1_len} entries"
        )));
    }
    let mut backing = None;
    if features & HAS_BACKING != 0 {
        let (name_from, name_len) = (u64::from(le32(&bytes, 56)), u64::from(le32(&bytes, 60)));
        if name_from + name_len > u64::from(header) * cluster {
            return Err(Error::corrupt("the name of its backing image is not in the header"));
        }
        let format = (features & BACKING_IS_RAW != 0).then(|| "raw".to_owned());
        backing = name_at(image, name_from, name_len).await?.map(|name| (name, format));
    }
    let description = Description::of(ForeignKind::Qed, size, Qed { cluster, entries, l1_at, l1_len });
    let was_left_open = features & NEEDS_CHECK != 0;
    Ok(Description { cluster_size: Some(cluster), backing, was_left_open, ..description })
}

struct Tables {
    header: Qed,
    pages: Arc<Pages>,
}

impl Header for Qed {
    fn open(&self, files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>> {
        Box::pin(async move {
            self.check_tables(&*files[0]).await?;
            let pages = Pages::of(files);
            Ok(OpenLayout::over(pages.clone(), Tables { header: self.clone(), pages }))
        })
    }
}

impl Qed {
    /// Whether no two entries of L1 lead to the same table, or to a part of it. What the file does not have of L1 is found
    /// when it is used.
    async fn check_tables(&self, image: &dyn Storage) -> Result<()> {
        let end = self.l1_at.saturating_add(self.l1_len * 8).min(image.len());
        let mut tables = Vec::new();
        let mut at = self.l1_at;
        while at < end {
            let piece = read_at(image, at, (end - at).min(L1_PIECE_BYTES)).await?;
            tables.extend(piece.chunks_exact(8).map(|entry| le64(entry, 0)).filter(|table| *table != 0));
            at += piece.len() as u64;
        }
        tables.sort_unstable();
        match tables.windows(2).find(|pair| pair[1] - pair[0] < self.entries * 8) {
            Some(pair) => Err(Error::corrupt(format!(
                "two entries of L1 lead to the L2 table at {:#x}, or to a part of it: the image is damaged, and what one of them had \
                 is lost",
                pair[1]
            ))),
            None => Ok(()),
        }
    }
}

impl Layout for Tables {
    fn find(&self, at: u64, _wanted: u64) -> LocalFuture<'_, Result<Run>> {
        Box::pin(async move {
            let Qed { cluster, entries, l1_at, .. } = self.header;
            let (index, within) = (at / cluster, at % cluster);
            let (l1_index, l2_index) = (index / entries, index % entries);
            let l2_at = self.pages.le64(0, l1_at + l1_index * 8).await?;
            if l2_at == 0 {
                let len = (entries - l2_index) * cluster - within;
                return Ok(Run { len, place: Where::Below });
            }
            aligned(l2_at, cluster, "an L2 table")?;
            // An offset this large lies past the end of the file.
            let entry = self.pages.le64(0, l2_at.saturating_add(l2_index * 8)).await?;
            match entry {
                0 => Ok(Run::in_block(cluster, within, 0, None)),
                1 => Ok(Run { len: cluster - within, place: Where::Zero { allocated: true } }),
                start => {
                    aligned(start, cluster, "a cluster")?;
                    Ok(Run::in_block(cluster, within, 0, Some(start)))
                }
            }
        })
    }
}

fn aligned(at: u64, cluster: u64, what: &str) -> Result<()> {
    match at % cluster {
        0 => Ok(()),
        _ => Err(Error::corrupt(format!("{what} cannot be at {at:#x}, within a cluster"))),
    }
}
