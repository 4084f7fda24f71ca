//! QED, a format that QEMU had before qcow2 version 3.
//!
//! ```text
//!   0       header, padded to clusters; the name of the backing image is in it
//!   L1      64-bit offsets of L2 tables, in `table_size` clusters
//!   L2      64-bit offsets of clusters: 0 is none, 1 is zeros
//! ```
//!
//! The mark "needs a check" says that clusters may have been lost. It changes nothing that is read.

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

#[derive(Clone)]
struct Qed {
    cluster: u64,
    /// Entries of a table.
    entries: u64,
    l1_at: u64,
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
    let mut backing = None;
    if features & HAS_BACKING != 0 {
        let (name_from, name_len) = (u64::from(le32(&bytes, 56)), u64::from(le32(&bytes, 60)));
        if name_from + name_len > u64::from(header) * cluster {
            return Err(Error::corrupt("the name of its backing image is not in the header"));
        }
        let format = (features & BACKING_IS_RAW != 0).then(|| "raw".to_owned());
        backing = name_at(image, name_from, name_len).await?.map(|name| (name, format));
    }
    let description = Description::of(ForeignKind::Qed, size, Qed { cluster, entries, l1_at });
    let was_left_open = features & NEEDS_CHECK != 0;
    Ok(Description { cluster_size: Some(cluster), backing, was_left_open, ..description })
}

struct Tables {
    header: Qed,
    pages: Arc<Pages>,
}

impl Header for Qed {
    fn open(&self, files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>> {
        let pages = Pages::of(files);
        let layout = Tables { header: self.clone(), pages: pages.clone() };
        Box::pin(std::future::ready(Ok(OpenLayout::over(pages, layout))))
    }
}

impl Layout for Tables {
    fn find(&self, at: u64, _wanted: u64) -> LocalFuture<'_, Result<Run>> {
        Box::pin(async move {
            let Qed { cluster, entries, l1_at } = self.header;
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
