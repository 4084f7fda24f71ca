//! VHD, the format of Virtual PC, Hyper-V before VHDX, Xen and Azure (`vpc` in `qemu-img`).
//!
//! ```text
//!   fixed      the disk, then a footer of 512 bytes
//!   dynamic    a copy of the footer, a header, a table of blocks, blocks, the footer    all big endian
//!   a block    a bitmap with a bit for each sector, then the sectors, 2 MiB as a rule
//! ```
//!
//! 1. A sector whose bit is not set was never written and reads as zero, whatever lies in its place.
//! 2. Of two footers one with a good checksum is used. Some programs write wrong ones, so one without is used when
//!    there is no other.
//!
//! Left out: differencing images.

use std::sync::Arc;

use vellum_core::{Error, LocalFuture, Result, SharedStorage, Storage};

use crate::bytes::{be16, be32, be64, read_at, read_padded};
use crate::layout::{Header, Layout, OpenLayout, Run, Where};
use crate::pages::Pages;
use crate::{Description, ForeignFact, ForeignKind};

const SECTOR: u64 = 512;
const FOOTER: usize = 512;
const COOKIE: &[u8] = b"conectix";
const HEADER_COOKIE: &[u8] = b"cxsparse";
const FIXED: u32 = 2;
const DYNAMIC: u32 = 3;
const DIFFERENCING: u32 = 4;
/// The entry of a block that was never written.
const NONE: u32 = 0xFFFF_FFFF;
const BLOCK_SHIFTS: std::ops::RangeInclusive<u32> = 9..=28;

#[derive(Clone)]
enum Vhd {
    Fixed,
    Dynamic { table_at: u64, block: u64 },
}

/// The footer that counts.
async fn footer(image: &dyn Storage) -> Result<Vec<u8>> {
    let mut found = Vec::new();
    // Old ones lack their last byte.
    for len in [512, 511] {
        if let Some(at) = image.len().checked_sub(len) {
            found.push(read_padded(image, at, FOOTER).await?);
        }
    }
    found.push(read_padded(image, 0, FOOTER).await?);
    found.retain(|footer| footer.starts_with(COOKIE));
    let is_good = |footer: &Vec<u8>| {
        let sum = footer.iter().map(|byte| u32::from(*byte)).sum::<u32>();
        let own = footer[64..68].iter().map(|byte| u32::from(*byte)).sum::<u32>();
        !(sum - own) == be32(footer, 64)
    };
    let good = found.iter().position(is_good).unwrap_or(0);
    if found.is_empty() {
        return Err(Error::corrupt("the footer is missing"));
    }
    Ok(found.swap_remove(good))
}

/// The size that a footer records, in bytes. Virtual PC and programs like it count in cylinders, heads and
/// sectors. Others write the true size, and so do all programs where the geometry is at its limit.
fn size_of(footer: &[u8]) -> u64 {
    const COUNTS_BYTES: [&[u8]; 5] = [b"win ", b"qem2", b"d2v ", b"tap\0", b"CTXS"];
    let sectors = u64::from(be16(footer, 56)) * u64::from(footer[58]) * u64::from(footer[59]);
    let is_at_its_limit = sectors >= 65_535 * 16 * 255;
    match COUNTS_BYTES.contains(&&footer[28..32]) || is_at_its_limit {
        true => be64(footer, 48),
        false => sectors * SECTOR,
    }
}

pub(crate) async fn look(image: &dyn Storage) -> Result<Description> {
    let footer = footer(image).await?;
    let size = size_of(&footer) / SECTOR * SECTOR;
    let kind = be32(&footer, 60);
    let creator = String::from_utf8_lossy(&footer[28..32]).trim_end_matches(['\0', ' ']).to_owned();
    let facts = |subformat: &str| {
        vec![
            ("subformat", ForeignFact::Text(subformat.to_owned())),
            ("creator", ForeignFact::Text(creator.clone())),
        ]
    };
    match kind {
        FIXED => {
            let there = image.len().saturating_sub(511) / SECTOR * SECTOR;
            if size > there {
                return Err(Error::corrupt(format!(
                    "the disk has {size} bytes, but the file has only {there} of them: it was not copied as a whole"
                )));
            }
            Ok(Description { facts: facts("fixed"), ..Description::of(ForeignKind::Vhd, size, Vhd::Fixed) })
        }
        DYNAMIC => {
            let header = read_at(image, be64(&footer, 16), 1024).await?;
            if !header.starts_with(HEADER_COOKIE) {
                return Err(Error::corrupt("the header of the dynamic disk is missing"));
            }
            let (table_at, entries, block) = (be64(&header, 16), be32(&header, 28), be32(&header, 32));
            if !block.is_power_of_two() || !BLOCK_SHIFTS.contains(&block.trailing_zeros()) {
                return Err(Error::corrupt(format!("blocks of {block} bytes are not possible")));
            }
            let block = u64::from(block);
            if size.div_ceil(block) > u64::from(entries) {
                return Err(Error::corrupt(format!(
                    "the disk of {size} bytes does not fit {entries} blocks of {block}"
                )));
            }
            let vhd = Vhd::Dynamic { table_at, block };
            let description = Description::of(ForeignKind::Vhd, size, vhd);
            Ok(Description { cluster_size: Some(block), facts: facts("dynamic"), ..description })
        }
        DIFFERENCING => Err(Error::unsupported(
            "it is a differencing disk: merge it into its parent first, for example with `Merge-VHD`",
        )),
        other => Err(Error::unsupported(format!("disks of type {other}"))),
    }
}

impl Header for Vhd {
    fn open(&self, files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>> {
        let pages = Pages::of(files);
        let layout = Blocks { header: self.clone(), pages: pages.clone() };
        Box::pin(std::future::ready(Ok(OpenLayout::over(pages, layout))))
    }
}

struct Blocks {
    header: Vhd,
    pages: Arc<Pages>,
}

impl Layout for Blocks {
    fn find(&self, at: u64, wanted: u64) -> LocalFuture<'_, Result<Run>> {
        Box::pin(async move {
            let Vhd::Dynamic { table_at, block } = self.header else {
                return Ok(Run { len: wanted, place: Where::Plain { file: 0, at, is_flat: true } });
            };
            let within = at % block;
            // A place that large lies past the end of the file.
            let entry = self.pages.be32(0, table_at.saturating_add(at / block * 4)).await?;
            if entry == NONE {
                return Ok(Run { len: block - within, place: Where::Zero { allocated: false } });
            }
            let bitmap_at = u64::from(entry) * SECTOR;
            let data_at = bitmap_at + (block / SECTOR).div_ceil(8).next_multiple_of(SECTOR);
            let (is_written, len) = self.sectors(bitmap_at, within, wanted.min(block - within)).await?;
            let place = match is_written {
                true => Where::Plain { file: 0, at: data_at + within, is_flat: false },
                false => Where::Zero { allocated: true },
            };
            Ok(Run { len, place })
        })
    }
}

impl Blocks {
    /// Whether the sector at this byte of a block was written, and for how many bytes that does not change; no
    /// further than `wanted`, as whole sectors.
    async fn sectors(&self, bitmap_at: u64, within: u64, wanted: u64) -> Result<(bool, u64)> {
        let (first, end) = (within / SECTOR, (within + wanted).div_ceil(SECTOR));
        let is_set = |bits: u64, sector: u64| bits << (sector % 64) >> 63 == 1;
        let mut bits = self.word(bitmap_at, first).await?;
        let is_written = is_set(bits, first);
        let mut next = first + 1;
        while next < end {
            if next % 64 == 0 {
                bits = self.word(bitmap_at, next).await?;
                let same = if is_written { u64::MAX } else { 0 };
                if bits == same {
                    next += 64;
                    continue;
                }
            }
            if is_set(bits, next) != is_written {
                break;
            }
            next += 1;
        }
        Ok((is_written, next.min(end) * SECTOR - within))
    }

    /// 64 bits of a bitmap, that of the sector among them. A bitmap is a multiple of a sector long.
    async fn word(&self, bitmap_at: u64, sector: u64) -> Result<u64> {
        self.pages.be64(0, bitmap_at + sector / 64 * 8).await
    }
}
