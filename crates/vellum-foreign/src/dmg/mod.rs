//! dmg, the disk image of macOS (UDIF).
//!
//! ```text
//!   data fork     chunks: raw, or compressed with zlib or bzip2
//!   property list an XML text with a table of chunks, in base64, for each part of the disk
//!   trailer       512 bytes, "koly": where these are, and the size of the disk                  big endian
//! ```
//!
//! 1. The list has at most [`LIST_BYTES_MAX`] bytes and is read as a whole: it is what bounds the number of chunks.
//! 2. Each sector of the disk is in exactly one chunk, also where it reads as zero: of a list that lost a table, or
//!    a part of one, nothing is read as zeros.
//! 3. A chunk is at most 64 MiB long, unless it is raw or zero.
//!
//! Left out: images with a resource fork and no list, images in segments, encrypted ones, and chunks of ADC, LZFSE
//! and LZMA, which are refused by name when the image is opened. The checksums of tables and of the whole image are not
//! compared: they would need all of the content. Those of compressed chunks are.

mod list;

use std::sync::Arc;

use vellum_core::{Error, LocalFuture, Result, SharedStorage, Storage};

use crate::bytes::{be32, be64, read_at};
use crate::layout::{Header, Layout, OpenLayout, Run, Where};
use crate::unpack::{CHUNK_BYTES_MAX, Packed, Packing};
use crate::{Description, ForeignFact, ForeignKind};

const SECTOR: u64 = 512;
const TRAILER: u64 = 512;
/// Enough for the tables of more than a terabyte in chunks of 1 MiB.
const LIST_BYTES_MAX: u64 = 64 << 20;
const TABLE_HEADER: usize = 204;
const CHUNK: usize = 40;

const ZERO: u32 = 0;
const RAW: u32 = 1;
const IGNORED: u32 = 2;
const ADC: u32 = 0x8000_0004;
const ZLIB: u32 = 0x8000_0005;
const BZIP2: u32 = 0x8000_0006;
const LZFSE: u32 = 0x8000_0007;
const LZMA: u32 = 0x8000_0008;
const COMMENT: u32 = 0x7FFF_FFFE;
const END: u32 = 0xFFFF_FFFF;

/// A run of the disk that one entry of a table has.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    /// Where it begins and ends in the disk.
    start: u64,
    end: u64,
    content: Content,
}

#[derive(Debug, Clone, Copy)]
enum Content {
    Zeros,
    Raw { at: u64 },
    Packed { at: u64, packed_len: u64, packing: Packing },
}

#[derive(Clone)]
struct Dmg {
    /// In the order of the disk, without gaps.
    chunks: Arc<[Chunk]>,
}

/// The trailer: as many bytes as it has, of which something shorter than a sector may follow.
async fn trailer(image: &dyn Storage) -> Result<Vec<u8>> {
    let len = image.len().min(2 * TRAILER - 1);
    let tail = read_at(image, image.len() - len, len).await?;
    let is_it = |bytes: &&[u8]| bytes.starts_with(b"koly\0\0\0\x04\0\0\x02\0");
    let found = tail.windows(512).rev().find(is_it);
    found.map(<[u8]>::to_vec).ok_or_else(|| Error::corrupt("the trailer is missing"))
}

pub(crate) async fn look(image: &dyn Storage) -> Result<Description> {
    let trailer = trailer(image).await?;
    let (data_at, segments) = (be64(&trailer, 24), be32(&trailer, 60));
    let (list_at, list_len, sectors) = (be64(&trailer, 216), be64(&trailer, 224), be64(&trailer, 492));
    if segments > 1 {
        return Err(Error::unsupported(format!(
            "an image in {segments} segments: join them with `hdiutil convert`"
        )));
    }
    if list_len == 0 {
        return Err(Error::unsupported("an image with a resource fork and no property list"));
    }
    if list_len > LIST_BYTES_MAX {
        return Err(Error::corrupt(format!(
            "a property list of {list_len} bytes; at most {LIST_BYTES_MAX} are read"
        )));
    }
    let size = sectors.checked_mul(SECTOR);
    let size = size.ok_or_else(|| Error::corrupt(format!("no disk has {sectors} sectors")))?;
    let text = read_at(image, list_at, list_len).await?;
    let mut chunks = Vec::new();
    let mut kinds = Vec::new();
    for table in list::tables(&text) {
        add_table(&table?, data_at, size, &mut chunks, &mut kinds)?;
    }
    chunks.sort_unstable_by_key(|chunk| chunk.start);
    check_cover(&chunks, size)?;
    let facts = vec![("compression", ForeignFact::Text(kinds.join(", ")))];
    let description = Description::of(ForeignKind::Dmg, size, Dmg { chunks: chunks.into() });
    Ok(Description { facts, ..description })
}

/// Whether the chunks, in the order of the disk, have each of its bytes once.
fn check_cover(chunks: &[Chunk], size: u64) -> Result<()> {
    let mut covered = 0;
    for chunk in chunks {
        if chunk.start < covered {
            return Err(Error::corrupt(format!("two chunks have the bytes at {:#x}", chunk.start)));
        }
        if chunk.start > covered {
            break;
        }
        covered = chunk.end;
    }
    match covered == size {
        true => Ok(()),
        false => Err(Error::corrupt(format!(
            "no chunk has the bytes at {covered:#x} of a disk of {size} bytes: its property list is damaged, or was \
             not copied as a whole"
        ))),
    }
}

/// Adds the chunks of one table.
fn add_table(
    table: &[u8],
    data_at: u64,
    size: u64,
    chunks: &mut Vec<Chunk>,
    kinds: &mut Vec<&'static str>,
) -> Result<()> {
    if table.len() < TABLE_HEADER {
        return Err(Error::corrupt("a table of chunks is too short"));
    }
    let (first, at) = (be64(table, 8), be64(table, 24));
    let count = be32(table, 200) as usize;
    let entries = table[TABLE_HEADER..].chunks_exact(CHUNK);
    if count > entries.len() {
        return Err(Error::corrupt(format!("a table of {count} chunks has only {} of them", entries.len())));
    }
    let mut uses = |name| {
        if !kinds.contains(&name) {
            kinds.push(name);
        }
    };
    for (index, entry) in entries.take(count).enumerate() {
        let kind = be32(entry, 0);
        let packing = match kind {
            COMMENT => continue,
            END if index + 1 == count => break,
            END => {
                return Err(Error::corrupt(format!("a table of {count} chunks ends after {index} of them")));
            }
            ZERO | IGNORED | RAW => None,
            ZLIB => {
                uses("zlib");
                Some(Packing::Zlib)
            }
            BZIP2 => {
                uses("bzip2");
                Some(Packing::Bzip2)
            }
            ADC => return Err(unread("ADC")),
            LZFSE => return Err(unread("LZFSE")),
            LZMA => return Err(unread("LZMA")),
            other => return Err(Error::unsupported(format!("chunks of the kind {other:#x}"))),
        };
        let wrong = || Error::corrupt("a chunk is not within the disk");
        let start = first.checked_add(be64(entry, 8)).and_then(|sector| sector.checked_mul(SECTOR));
        let len = be64(entry, 16).checked_mul(SECTOR).ok_or_else(wrong)?;
        let end =
            start.and_then(|start| start.checked_add(len)).filter(|end| *end <= size).ok_or_else(wrong)?;
        if len == 0 {
            continue;
        }
        let content = match kind {
            ZERO | IGNORED => Content::Zeros,
            _ => {
                let place = data_at.checked_add(at).and_then(|at| at.checked_add(be64(entry, 24)));
                stored(place, be64(entry, 32), len, packing)?
            }
        };
        chunks.push(Chunk { start: end - len, end, content });
    }
    Ok(())
}

/// The content of a chunk that has bytes in the file.
fn stored(place: Option<u64>, packed_len: u64, len: u64, packing: Option<Packing>) -> Result<Content> {
    let at = place.filter(|at| at.checked_add(packed_len).is_some());
    let at = at.ok_or_else(|| Error::corrupt("a chunk is not within the file"))?;
    match packing {
        Some(_) if len > CHUNK_BYTES_MAX || packed_len > CHUNK_BYTES_MAX => {
            Err(Error::corrupt(format!("a chunk of {len} bytes, {packed_len} of them in the file")))
        }
        Some(packing) => Ok(Content::Packed { at, packed_len, packing }),
        None if packed_len < len => {
            Err(Error::corrupt(format!("a chunk of {len} bytes has only {packed_len} in the file")))
        }
        None => Ok(Content::Raw { at }),
    }
}

fn unread(name: &str) -> Error {
    Error::unsupported(format!(
        "chunks compressed with {name} are not read: convert it with `hdiutil convert -format UDZO`, or another program"
    ))
}

impl Header for Dmg {
    fn open(&self, files: Vec<SharedStorage>) -> LocalFuture<'_, Result<OpenLayout>> {
        Box::pin(std::future::ready(Ok(OpenLayout { layout: Box::new(self.clone()), files })))
    }
}

impl Layout for Dmg {
    fn find(&self, at: u64, _wanted: u64) -> LocalFuture<'_, Result<Run>> {
        let index = self.chunks.partition_point(|chunk| chunk.end <= at);
        let Chunk { start, end, content } = self.chunks[index];
        let skip = at - start;
        let place = match content {
            Content::Zeros => Where::Zero { allocated: false },
            Content::Raw { at } => Where::Plain { file: 0, at: at + skip, is_flat: false },
            Content::Packed { at, packed_len, packing } => {
                Where::Packed { chunk: Packed { file: 0, at, packed_len, len: end - start, packing }, skip }
            }
        };
        Box::pin(std::future::ready(Ok(Run { len: end - at, place })))
    }
}
