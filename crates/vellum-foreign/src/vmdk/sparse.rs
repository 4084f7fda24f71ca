//! A file of grains: a sparse extent, as VMware Workstation and ESX write them.
//!
//! ```text
//!   KDMV   header, descriptor, directory ► tables ► grains       everything in sectors, little endian
//!          stream-optimised: each grain behind a marker (its place, its length), compressed; the directory
//!          and a second header, which counts, at the end
//!   COWD   header, directory ► tables of 4096 entries ► grains
//! ```

use vellum_core::{Error, Result, Storage};

use super::SECTOR;
use crate::bytes::{le16, le32, le64, read_at};
use crate::layout::{Run, Where};
use crate::pages::Pages;
use crate::unpack::{Packed, Packing};

const SIGNATURE: &[u8] = b"KDMV";
const ESX_SIGNATURE: &[u8] = b"COWD";
/// The directory is at the end, and so is the header that says where.
const AT_END: u64 = u64::MAX;
const HAS_ZEROED_GRAINS: u32 = 1 << 2;
const IS_COMPRESSED: u32 = 1 << 16;
const HAS_MARKERS: u32 = 1 << 17;
const DEFLATE: u16 = 1;
const MARKER_FOOTER: u32 = 3;
/// A grain that reads as zero, where the header allows such entries.
const ZEROED: u32 = 1;
const ESX_TABLE_ENTRIES: u64 = 4096;
/// QEMU takes tables of at most 512 entries; VMware writes no others.
const TABLE_ENTRIES_MAX: u32 = 512;
/// Grains of at most 64 MiB, so that a compressed one fits.
const GRAIN_SECTORS_MAX: u64 = 1 << 17;

/// The header of such a file.
#[derive(Debug, Clone)]
pub(crate) struct Sparse {
    /// The bytes of the disk that it holds.
    pub(crate) len: u64,
    /// Where its descriptor is, and how long, in bytes.
    pub(crate) descriptor: Option<(u64, u64)>,
    grain: u64,
    entries: u64,
    directory_at: u64,
    has_zeroed: bool,
    is_compressed: bool,
    is_esx: bool,
}

/// Whether a file that begins like this is one.
pub(crate) fn is_sparse(start: &[u8]) -> bool {
    start.starts_with(SIGNATURE) || start.starts_with(ESX_SIGNATURE)
}

fn sectors(count: u64) -> Result<u64> {
    count.checked_mul(SECTOR).ok_or_else(|| Error::corrupt(format!("sector {count} is past 2^64")))
}

impl Sparse {
    /// Reads the header of a file.
    pub(crate) async fn read(file: &dyn Storage) -> Result<Self> {
        let bytes = read_at(file, 0, SECTOR).await?;
        if bytes.starts_with(ESX_SIGNATURE) {
            return Self::of_esx(&bytes);
        }
        let first = Self::of(&bytes)?;
        if first.directory_at != AT_END {
            return Ok(first);
        }
        // A marker, the header that counts, and the marker of the end.
        let end = file.len() / SECTOR * SECTOR;
        let at = end.checked_sub(3 * SECTOR).ok_or_else(|| Error::corrupt("the footer is missing"))?;
        let bytes = read_at(file, at, 3 * SECTOR).await?;
        let is_end = bytes[1024..1040].iter().all(|byte| *byte == 0);
        if le32(&bytes, 8) != 0 || le32(&bytes, 12) != MARKER_FOOTER || !is_end {
            return Err(Error::corrupt(
                "the footer is missing: the file was not written, or copied, to its end",
            ));
        }
        let last = Self::of(&bytes[512..1024])?;
        if last.directory_at == AT_END {
            return Err(Error::corrupt("the footer does not say where the directory is"));
        }
        Ok(Self { descriptor: first.descriptor, ..last })
    }

    fn of(bytes: &[u8]) -> Result<Self> {
        if !bytes.starts_with(SIGNATURE) {
            return Err(Error::corrupt("the signature of a sparse extent is missing"));
        }
        let (version, flags) = (le32(bytes, 4), le32(bytes, 8));
        let (capacity, grain, entries) = (le64(bytes, 12), le64(bytes, 20), le32(bytes, 44));
        if version == 0 || version > 3 {
            return Err(Error::unsupported(format!("version {version} of sparse extents")));
        }
        let is_compressed = flags & IS_COMPRESSED != 0;
        let algorithm = le16(bytes, 77);
        if is_compressed && (algorithm != DEFLATE || flags & HAS_MARKERS == 0) {
            return Err(Error::unsupported(format!("grains compressed with algorithm {algorithm}")));
        }
        if entries == 0 || entries > TABLE_ENTRIES_MAX {
            return Err(Error::corrupt(format!("grain tables of {entries} entries are not possible")));
        }
        let (descriptor_at, descriptor_len) = (le64(bytes, 28), le64(bytes, 36));
        let descriptor = match descriptor_at {
            0 => None,
            _ => Some((sectors(descriptor_at)?, sectors(descriptor_len)?)),
        };
        let directory = le64(bytes, 56);
        let directory_at = if directory == AT_END { AT_END } else { sectors(directory)? };
        let sparse = Self {
            len: sectors(capacity)?,
            descriptor,
            grain: grain_bytes(grain)?,
            entries: u64::from(entries),
            directory_at,
            has_zeroed: flags & HAS_ZEROED_GRAINS != 0,
            is_compressed,
            is_esx: false,
        };
        Ok(sparse)
    }

    fn of_esx(bytes: &[u8]) -> Result<Self> {
        let (version, capacity, grain) = (le32(bytes, 4), le32(bytes, 12), le32(bytes, 16));
        let (directory, tables) = (le32(bytes, 20), u64::from(le32(bytes, 24)));
        if version != 1 {
            return Err(Error::unsupported(format!("version {version} of COWD extents")));
        }
        let (len, grain) = (sectors(u64::from(capacity))?, grain_bytes(u64::from(grain))?);
        if len.div_ceil(grain * ESX_TABLE_ENTRIES) > tables {
            return Err(Error::corrupt(format!("{len} bytes need more than {tables} grain tables")));
        }
        Ok(Self {
            len,
            descriptor: None,
            grain,
            entries: ESX_TABLE_ENTRIES,
            directory_at: sectors(u64::from(directory))?,
            has_zeroed: false,
            is_compressed: false,
            is_esx: true,
        })
    }

    /// The size in which space is allocated, in bytes.
    pub(crate) fn grain(&self) -> u64 {
        self.grain
    }

    /// The kind of extent, as descriptors name it.
    pub(crate) fn format(&self) -> &'static str {
        if self.is_esx { "VMFSSPARSE" } else { "SPARSE" }
    }

    /// Where the byte `at` of the extent is.
    pub(crate) async fn find(&self, pages: &Pages, file: usize, at: u64, _wanted: u64) -> Result<Run> {
        let (index, within) = (at / self.grain, at % self.grain);
        let (table, entry) = (index / self.entries, index % self.entries);
        // A place past 2^64 lies past the end of the file.
        let table_at = pages.le32(file, self.directory_at.saturating_add(table * 4)).await?;
        if table_at == 0 {
            let len = (self.entries - entry) * self.grain - within;
            return Ok(Run { len, place: Where::Below });
        }
        let grain_at = pages.le32(file, u64::from(table_at) * SECTOR + entry * 4).await?;
        let len = self.grain - within;
        let place = match grain_at {
            0 => Where::Below,
            ZEROED if self.has_zeroed => Where::Zero { allocated: true },
            _ if self.is_compressed => {
                let at = u64::from(grain_at) * SECTOR;
                let marker: [u8; 12] = pages.bytes(file, at).await?;
                let (sector, packed_len) = (le64(&marker, 0), u64::from(le32(&marker, 8)));
                if sector.checked_mul(SECTOR) != Some(index * self.grain) {
                    return Err(Error::corrupt(format!(
                        "the grain at {at:#x} belongs to sector {sector}, and not to {}",
                        index * self.grain / SECTOR
                    )));
                }
                let packing = Packing::Zlib;
                let chunk = Packed { file, at: at + 12, packed_len, len: self.content_len(index), packing };
                Where::Packed { chunk, skip: within }
            }
            _ => Where::Plain { file, at: u64::from(grain_at) * SECTOR + within, is_flat: false },
        };
        Ok(Run { len, place })
    }

    /// How many bytes the content of a compressed grain has at least: the last one may end with the disk.
    fn content_len(&self, index: u64) -> u64 {
        self.grain.min(self.len - index * self.grain)
    }
}

/// The size of a grain. It must be a power of two.
fn grain_bytes(count: u64) -> Result<u64> {
    if !count.is_power_of_two() || count > GRAIN_SECTORS_MAX {
        return Err(Error::corrupt(format!("grains of {count} sectors are not possible")));
    }
    Ok(count * SECTOR)
}
