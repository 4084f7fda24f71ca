//! Persistent bitmaps: which parts of the disk were changed since somebody last looked.
//!
//! ```text
//!   header extension ──► directory ──► entry: name, granularity, flags ──► table ──► clusters of bits
//!                                                                           │ 0: none is set
//!                                                                           │ 1: all are set
//! ```
//!
//! | | |
//! |---|---|
//! | `directory` | the entries, as bytes |
//! | `bits` | the bits in memory |
//! | `track` | enabled bitmaps of an open image, in memory |
//! | `marking` | how they are marked before the disk changes |
//! | `change` | adding, removing, clearing, merging in a closed image |
//!
//! 1. What a bitmap claims to have is bounded before anything is read of it.
//! 2. A bitmap that is in use, or of an unknown kind, is listed, kept as it is, and not used.

mod bits;
mod change;
mod directory;
mod marking;
pub(crate) mod track;

use vellum_core::{Buffer, Context, Error, ErrorKind, ImageOffset, ImageSpan, Result, Storage};

pub use bits::Bits;
pub(super) use change::{change, resize};
use directory::{Entry, parse};

use super::header::Header;
use super::layout::{OFFSET_MASK, be64};

/// The entry of a table for a cluster of bits that are all set.
const ONES: u64 = 1;

/// A persistent bitmap, as described in the directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bitmap {
    /// Its name.
    pub name: String,
    /// Bytes of the disk that one bit stands for.
    pub granularity: u64,
    /// The program that updated it last did not close it, so its contents are invalid.
    pub is_in_use: bool,
    /// A program that opens the image for writing must update it.
    pub is_auto: bool,
}

/// The bits of a bitmap, and where they are.
struct Read {
    bits: Bits,
    table: ImageSpan,
    entries: Vec<u64>,
}

/// The persistent bitmaps of an image, if they are valid.
///
/// # Errors
/// `Corrupt` when the directory is damaged.
pub async fn list(header: &Header, storage: &dyn Storage) -> Result<Vec<Bitmap>> {
    let bitmap = |entry: Entry| Bitmap {
        name: entry.shown(),
        granularity: 1 << entry.granularity_bits(),
        is_in_use: entry.is_in_use(),
        is_auto: entry.is_auto(),
    };
    Ok(read_directory(header, storage).await?.into_iter().map(bitmap).collect())
}

/// The bits of a bitmap of an image that is closed, or that is only read.
///
/// # Errors
/// `NotFound` when there is none of this name, why it cannot be used, and the errors of the storage.
pub async fn load(header: &Header, storage: &dyn Storage, name: &str) -> Result<Bits> {
    let context = || format!("can't read bitmap {name} of {}", storage.name());
    let entries = read_directory(header, storage).await?;
    let entry = entries.iter().find(|entry| entry.name == name.as_bytes());
    let entry = entry.ok_or_else(|| none_named(name)).context(context)?;
    entry.check(header).context(context)?;
    Ok(read_bits(header, storage, entry).await.context(context)?.bits)
}

fn none_named(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no bitmap named {name}"))
}

/// The tables of the bitmaps, which name the clusters with their bits.
pub(super) async fn tables(header: &Header, storage: &dyn Storage) -> Result<Vec<ImageSpan>> {
    read_directory(header, storage).await?.iter().map(|entry| entry.table(header)).collect()
}

/// The entries of the directory; none where the bitmaps are not valid.
async fn read_directory(header: &Header, storage: &dyn Storage) -> Result<Vec<Entry>> {
    let Some(directory) = header.bitmaps() else { return Ok(Vec::new()) };
    let context = || format!("{}: can't read the directory of its bitmaps", storage.name());
    let len = usize::try_from(directory.span.len()).expect("at most 128 MiB");
    let read = storage.read(directory.span.start(), Buffer::for_overwrite(len)).await.context(context)?;
    parse(read.slice(), directory.count).context(context)
}

/// The bits of a bitmap that was checked.
async fn read_bits(header: &Header, storage: &dyn Storage, entry: &Entry) -> Result<Read> {
    let context = || format!("{}: can't read bitmap {}", storage.name(), entry.shown());
    let (table, cluster) = (entry.table(header)?, header.cluster_size());
    let bits = Bits::new(header.size(), entry.granularity_bits())?;
    let mut entries = Vec::new();
    if !table.is_empty() {
        let len = usize::try_from(table.len()).expect("as many entries as a bitmap has clusters");
        let bytes = storage.read(table.start(), Buffer::for_overwrite(len)).await.context(context)?;
        entries = bytes.slice().chunks_exact(8).map(|entry| be64(entry, 0)).collect();
    }
    let words_per_cluster = cluster.bytes() / 8;
    for (index, entry) in entries.iter().copied().enumerate() {
        let first = index as u64 * words_per_cluster;
        let words = first..(first + words_per_cluster).min(bits.words());
        match entry {
            0 => {}
            ONES => words.for_each(|word| bits.add(word, u64::MAX)),
            place => {
                let at = ImageOffset::new(place);
                if place & !OFFSET_MASK != 0 || !cluster.aligns(at) || at.bytes() >= storage.len() {
                    let why =
                        format!("entry {index} of its table is impossible ({place:#x}): run `vellum check`");
                    return Err(Error::corrupt(why)).context(context);
                }
                let len = usize::try_from((words.end - words.start) * 8).expect("a cluster");
                let read = storage.read(at, Buffer::for_overwrite(len)).await.context(context)?;
                for (word, bytes) in words.zip(read.contiguous().slice().chunks_exact(8)) {
                    bits.add(word, u64::from_le_bytes(bytes.try_into().expect("8 bytes")));
                }
            }
        }
    }
    Ok(Read { bits, table, entries })
}
