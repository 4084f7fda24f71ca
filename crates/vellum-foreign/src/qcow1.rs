//! qcow version 1, the format of QEMU before qcow2.
//!
//! ```text
//!   0     signature, version, name of the backing image, size, shifts      48 bytes, all big endian
//!   L1    64-bit offsets of L2 tables, as many as the disk needs
//!   L2    64-bit offsets of clusters; bit 63: compressed, its length is in the bits below
//! ```
//!
//! Left out: encrypted images. Their cipher was never safe.

use std::sync::Arc;

use vellum_core::{Error, LocalFuture, Result, SharedStorage, Storage};

use crate::bytes::{be32, be64, name_at, read_at};
use crate::layout::{Header, Layout, OpenLayout, Run, Where};
use crate::pages::Pages;
use crate::unpack::{Packed, Packing};
use crate::{Description, ForeignKind};

const COMPRESSED: u64 = 1 << 63;
const CLUSTER_SHIFTS: std::ops::RangeInclusive<u8> = 9..=16;
const L2_SHIFTS: std::ops::RangeInclusive<u8> = 6..=13;

#[derive(Clone)]
struct Qcow1 {
    cluster_shift: u8,
    l2_shift: u8,
    l1_at: u64,
}

pub(crate) async fn look(image: &dyn Storage) -> Result<Description> {
    let bytes = read_at(image, 0, 48).await?;
    let (name_from, name_len) = (be64(&bytes, 8), u64::from(be32(&bytes, 16)));
    let (size, cluster_shift, l2_shift) = (be64(&bytes, 24), bytes[32], bytes[33]);
    if be32(&bytes, 36) != 0 {
        return Err(Error::unsupported("it is encrypted: convert it with `qemu-img convert`"));
    }
    if !CLUSTER_SHIFTS.contains(&cluster_shift) || !L2_SHIFTS.contains(&l2_shift) {
        return Err(Error::corrupt(format!(
            "clusters of 2^{cluster_shift} bytes and L2 tables of 2^{l2_shift} entries are not possible"
        )));
    }
    // QEMU ignores the part of a last sector.
    let size = size / 512 * 512;
    let backing = match name_from {
        0 => None,
        _ => name_at(image, name_from, name_len).await?.map(|name| (name, None)),
    };
    let header = Qcow1 { cluster_shift, l2_shift, l1_at: be64(&bytes, 40) };
    let description = Description::of(ForeignKind::Qcow1, size, header);
    Ok(Description { cluster_size: Some(1 << cluster_shift), backing, ..description })
}

struct Tables {
    header: Qcow1,
    pages: Arc<Pages>,
}

impl Header for Qcow1 {
    fn open(&self, files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>> {
        let pages = Pages::of(files);
        let layout = Tables { header: self.clone(), pages: pages.clone() };
        Box::pin(std::future::ready(Ok(OpenLayout::over(pages, layout))))
    }
}

impl Layout for Tables {
    fn find(&self, at: u64, _wanted: u64) -> LocalFuture<'_, Result<Run>> {
        Box::pin(async move {
            let Qcow1 { cluster_shift, l2_shift, l1_at } = self.header;
            let (cluster, entries) = (1 << cluster_shift, 1 << l2_shift);
            let (index, within) = (at >> cluster_shift, at % cluster);
            // Offsets that large lie past the end of the file.
            let l1_entry = l1_at.saturating_add((index >> l2_shift) * 8);
            let l2_at = self.pages.be64(0, l1_entry).await?;
            if l2_at == 0 {
                let len = (entries - index % entries) * cluster - within;
                return Ok(Run { len, place: Where::Below });
            }
            let entry = self.pages.be64(0, l2_at.saturating_add(index % entries * 8)).await?;
            if entry == 0 {
                return Ok(Run::in_block(cluster, within, 0, None));
            }
            if entry & COMPRESSED == 0 {
                return Ok(Run::in_block(cluster, within, 0, Some(entry)));
            }
            let shift = 63 - u32::from(cluster_shift);
            let (at, packed_len) = (entry & ((1 << shift) - 1), (entry >> shift) & (cluster - 1));
            let chunk = Packed { file: 0, at, packed_len, len: cluster, packing: Packing::Deflate };
            Ok(Run { len: cluster - within, place: Where::Packed { chunk, skip: within } })
        })
    }
}
