//! VHDX, the format of Hyper-V.
//!
//! ```text
//!   0         identifier
//!   64 KiB    two headers: which log is to be replayed, and where it is       the valid one with the higher number
//!   192 KiB   two region tables: where the block table and the metadata are
//!   1 MiB …   log, metadata, block table, blocks                              each at a multiple of 1 MiB
//!   block table    a 64-bit entry for each block: state, place; after each chunk one for a bitmap
//! ```
//!
//! 1. The log is replayed in memory (`log`, `overlay`): everything behind the headers is read as it is after
//!    that. The file is never written.
//! 2. Headers, region tables and log entries have checksums, and nothing is read from one that has a wrong one.
//! 3. An unknown region, or item of metadata, that says it is required is refused.
//!
//! Left out: differencing images.

mod log;
mod overlay;

use std::sync::Arc;

use vellum_core::{Error, LocalFuture, Result, SharedStorage, Storage};

use crate::bytes::{le16, le32, le64, read_at};
use crate::layout::{Header, Layout, OpenLayout, Run, Where};
use crate::pages::Pages;
use crate::{Description, ForeignFact, ForeignKind};
use log::Log;
use overlay::{Overlay, Patches};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const HEADERS: [u64; 2] = [64 * KIB, 128 * KIB];
const HEADER_BYTES: u64 = 4 * KIB;
const REGION_TABLES: [u64; 2] = [192 * KIB, 256 * KIB];
const REGION_TABLE_BYTES: u64 = 64 * KIB;
const METADATA_TABLE_BYTES: u64 = 64 * KIB;
const REGIONS_MAX: u32 = 2047;
const ITEMS_MAX: u16 = 2047;
const SIZE_MAX: u64 = 64 << 40;

const REGION_TABLE: Guid =
    guid(0x2DC2_7766, 0xF623, 0x4200, [0x9D, 0x64, 0x11, 0x5E, 0x9B, 0xFD, 0x4A, 0x08]);
const REGION_METADATA: Guid =
    guid(0x8B7C_A206, 0x4790, 0x4B9A, [0xB8, 0xFE, 0x57, 0x5F, 0x05, 0x0F, 0x88, 0x6E]);
const PARAMETERS: Guid = guid(0xCAA1_6737, 0xFA36, 0x4D43, [0xB3, 0xB6, 0x33, 0xF0, 0xAA, 0x44, 0xE7, 0x6B]);
const DISK_SIZE: Guid = guid(0x2FA5_4224, 0xCD1B, 0x4876, [0xB2, 0x11, 0x5D, 0xBE, 0xD8, 0x3B, 0xF4, 0xB8]);
const DISK_ID: Guid = guid(0xBECA_12AB, 0xB2E6, 0x4523, [0x93, 0xEF, 0xC3, 0x09, 0xE0, 0x00, 0xC7, 0x46]);
const LOGICAL_SECTOR: Guid =
    guid(0x8141_BF1D, 0xA96F, 0x4709, [0xBA, 0x47, 0xF2, 0x33, 0xA8, 0xFA, 0xAB, 0x5F]);
const PHYSICAL_SECTOR: Guid =
    guid(0xCDA3_48C7, 0x445D, 0x4471, [0x9C, 0xC9, 0xE9, 0x88, 0x52, 0x51, 0xC5, 0x56]);
const PARENT: Guid = guid(0xA8D3_5F2D, 0xB30B, 0x454D, [0xAB, 0xF7, 0xD3, 0xD8, 0x48, 0x34, 0xAB, 0x0C]);
const KNOWN_ITEMS: [Guid; 6] = [PARAMETERS, DISK_SIZE, DISK_ID, LOGICAL_SECTOR, PHYSICAL_SECTOR, PARENT];

/// States of a block.
const NOT_PRESENT: u64 = 0;
const UNDEFINED: u64 = 1;
const ZERO: u64 = 2;
const UNMAPPED: u64 = 3;
/// The same in early drafts of the format, which QEMU knows too.
const UNMAPPED_DRAFT: u64 = 5;
const FULLY_PRESENT: u64 = 6;

type Guid = [u8; 16];

/// A GUID as it is in a file: the first three numbers are little endian.
const fn guid(a: u32, b: u16, c: u16, d: [u8; 8]) -> Guid {
    let (a, b, c) = (a.to_le_bytes(), b.to_le_bytes(), c.to_le_bytes());
    [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]]
}

/// The CRC-32C of a structure whose own checksum is at byte 4 and counts as zero.
fn has_good_checksum(bytes: &[u8]) -> bool {
    let crc = crc32c::crc32c(&bytes[..4]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[8..]) == le32(bytes, 4)
}

#[derive(Clone)]
struct Vhdx {
    block: u64,
    /// So many blocks, then an entry for a bitmap.
    chunk: u64,
    table_at: u64,
    table_len: u64,
    /// What its log changes, if that is to be replayed.
    patches: Option<Arc<Patches>>,
}

/// The header that counts: of the valid ones the later one.
async fn current_header(image: &dyn Storage) -> Result<Vec<u8>> {
    let mut best: Option<Vec<u8>> = None;
    for at in HEADERS {
        let bytes = read_at(image, at, HEADER_BYTES).await?;
        let is_later = best.as_ref().is_none_or(|best| le64(&bytes, 8) > le64(best, 8));
        if bytes.starts_with(b"head") && has_good_checksum(&bytes) && is_later {
            best = Some(bytes);
        }
    }
    best.ok_or_else(|| Error::corrupt("both headers are damaged"))
}

pub(crate) async fn look(image: &dyn Storage) -> Result<Description> {
    let header = current_header(image).await?;
    let (log_version, version) = (le16(&header, 64), le16(&header, 66));
    if version != 1 || log_version != 0 {
        return Err(Error::unsupported(format!("version {version} with a log of version {log_version}")));
    }
    let log = Log::of_header(&header)?;
    let patches = match &log {
        Some(log) => Some(Arc::new(log.replay(image).await?)),
        None => None,
    };
    let view = View { image, patches: patches.as_deref() };
    let regions = view.regions().await?;
    let region = |wanted: Guid, name: &str| {
        let found = regions.iter().find(|region| region.id == wanted).map(|region| (region.at, region.len));
        found.ok_or_else(|| Error::corrupt(format!("the {name} is missing")))
    };
    let (table_at, table_len) = region(REGION_TABLE, "block table")?;
    let (metadata_at, metadata_len) = region(REGION_METADATA, "metadata")?;
    let items = view.items(metadata_at, metadata_len).await?;
    let (block, flags) = (le32(&items.parameters, 0), le32(&items.parameters, 4));
    if flags & 2 != 0 || items.has_parent {
        return Err(Error::unsupported(
            "it is a differencing disk: merge it into its parent first, for example with `Merge-VHD`",
        ));
    }
    let (size, sector) = (le64(&items.size, 0), le32(&items.sector, 0));
    if !block.is_power_of_two() || u64::from(block) < MIB || block > 256 << 20 {
        return Err(Error::corrupt(format!("blocks of {block} bytes are not possible")));
    }
    if sector != 512 && sector != 4096 {
        return Err(Error::corrupt(format!("sectors of {sector} bytes are not possible")));
    }
    if size > SIZE_MAX || size % u64::from(sector) != 0 {
        return Err(Error::corrupt(format!("a disk of {size} bytes is not possible")));
    }
    let block = u64::from(block);
    let chunk = (u64::from(sector) << 23) / block;
    let blocks = size.div_ceil(block);
    let entries = blocks + blocks.saturating_sub(1) / chunk;
    if entries * 8 > table_len {
        return Err(Error::corrupt(format!("the block table has {table_len} bytes for {blocks} blocks")));
    }
    let is_to_be_replayed = log.is_some();
    let vhdx = Vhdx { block, chunk, table_at, table_len, patches };
    let description = Description::of(ForeignKind::Vhdx, size, vhdx);
    let state = if is_to_be_replayed { "is replayed in memory" } else { "empty" };
    let facts = vec![
        ("log", ForeignFact::Text(state.to_owned())),
        ("logical-sector-size", ForeignFact::Number(u64::from(sector))),
    ];
    Ok(Description { cluster_size: Some(block), facts, was_left_open: is_to_be_replayed, ..description })
}

/// The file as it is once its log is replayed.
struct View<'a> {
    image: &'a dyn Storage,
    patches: Option<&'a Patches>,
}

struct Region {
    id: Guid,
    at: u64,
    len: u64,
}

/// The items of metadata that are used.
struct Items {
    parameters: [u8; 8],
    size: [u8; 8],
    sector: [u8; 4],
    has_parent: bool,
}

impl View<'_> {
    async fn read(&self, at: u64, len: u64) -> Result<Vec<u8>> {
        let mut bytes = read_at(self.image, at, len).await?;
        if let Some(patches) = self.patches {
            patches.apply(at, &mut bytes);
        }
        Ok(bytes)
    }

    /// The regions, checked: none overlaps another, or the headers.
    async fn regions(&self) -> Result<Vec<Region>> {
        let mut table = None;
        for at in REGION_TABLES {
            let bytes = self.read(at, REGION_TABLE_BYTES).await?;
            if bytes.starts_with(b"regi") && has_good_checksum(&bytes) && le32(&bytes, 8) <= REGIONS_MAX {
                table = Some(bytes);
                break;
            }
        }
        let bytes = table.ok_or_else(|| Error::corrupt("both region tables are damaged"))?;
        let mut regions: Vec<Region> = Vec::new();
        for entry in bytes[16..].chunks_exact(32).take(le32(&bytes, 8) as usize) {
            let id = crate::bytes::field(entry, 0);
            let (at, len) = (le64(entry, 16), u64::from(le32(entry, 24)));
            if id != REGION_TABLE && id != REGION_METADATA {
                if le32(entry, 28) & 1 != 0 {
                    return Err(Error::unsupported("a region that is required and not known"));
                }
                continue;
            }
            let is_placed = at >= MIB && at % MIB == 0 && at.checked_add(len).is_some();
            // Computed only where the end is below 2^64.
            let is_alone = || regions.iter().all(|other| at >= other.at + other.len || other.at >= at + len);
            if !is_placed || !is_alone() || regions.iter().any(|other| other.id == id) {
                return Err(Error::corrupt(format!("a region of {len} bytes cannot be at {at:#x}")));
            }
            regions.push(Region { id, at, len });
        }
        Ok(regions)
    }

    async fn items(&self, region_at: u64, region_len: u64) -> Result<Items> {
        let table = self.read(region_at, METADATA_TABLE_BYTES).await?;
        let count = le16(&table, 10);
        if !table.starts_with(b"metadata") || count > ITEMS_MAX {
            return Err(Error::corrupt("the table of metadata is damaged"));
        }
        let mut items = Items { parameters: [0; 8], size: [0; 8], sector: [0; 4], has_parent: false };
        let mut seen = [false; 3];
        for entry in table[32..].chunks_exact(32).take(usize::from(count)) {
            let id: Guid = crate::bytes::field(entry, 0);
            let (offset, len) = (u64::from(le32(entry, 16)), u64::from(le32(entry, 20)));
            let flags = le32(entry, 24);
            let (is_users, is_required) = (flags & 1 != 0, flags & 4 != 0);
            if is_users || !KNOWN_ITEMS.contains(&id) {
                if is_required {
                    return Err(Error::unsupported("an item of metadata that is required and not known"));
                }
                continue;
            }
            let place: (usize, &mut [u8]) = match id {
                PARAMETERS => (0, &mut items.parameters),
                DISK_SIZE => (1, &mut items.size),
                LOGICAL_SECTOR => (2, &mut items.sector),
                PARENT => {
                    items.has_parent = true;
                    continue;
                }
                _ => continue,
            };
            let (index, item) = place;
            let wanted = item.len() as u64;
            if len != wanted || offset < METADATA_TABLE_BYTES || offset + len > region_len || seen[index] {
                return Err(Error::corrupt("an item of metadata is not where it must be"));
            }
            seen[index] = true;
            item.copy_from_slice(&self.read(region_at + offset, wanted).await?);
        }
        match seen {
            [true, true, true] => Ok(items),
            _ => Err(Error::corrupt("an item of metadata is missing")),
        }
    }
}

impl Header for Vhdx {
    fn open(&self, mut files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>> {
        Box::pin(async move {
            if let Some(patches) = &self.patches {
                files[0] = Arc::new(Overlay::new(files[0].clone(), patches.clone()));
            }
            let pages = Pages::of(files);
            Ok(OpenLayout::over(pages.clone(), Blocks { header: self.clone(), pages }))
        })
    }
}

struct Blocks {
    header: Vhdx,
    pages: Arc<Pages>,
}

impl Layout for Blocks {
    fn find(&self, at: u64, _wanted: u64) -> LocalFuture<'_, Result<Run>> {
        Box::pin(async move {
            let Vhdx { block, chunk, table_at, table_len, .. } = self.header;
            let (index, within) = (at / block, at % block);
            let entry = (index + index / chunk) * 8;
            debug_assert!(entry + 8 <= table_len, "the table is long enough");
            let entry = self.pages.le64(0, table_at + entry).await?;
            let place = match entry & 7 {
                NOT_PRESENT | UNDEFINED | UNMAPPED | UNMAPPED_DRAFT => Where::Zero { allocated: false },
                ZERO => Where::Zero { allocated: true },
                FULLY_PRESENT => {
                    let start = entry / MIB * MIB;
                    if start < MIB {
                        return Err(Error::corrupt(format!("block {index} cannot be at {start:#x}")));
                    }
                    Where::Plain { file: 0, at: start.saturating_add(within), is_flat: false }
                }
                state => return Err(Error::corrupt(format!("block {index} has the state {state}"))),
            };
            Ok(Run { len: block - within, place })
        })
    }
}
