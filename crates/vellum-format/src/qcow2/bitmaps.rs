//! Persistent bitmaps: their directory is read and checked, so that they can be listed. They are not updated:
//! the first change of an image clears the bit that says they are valid.

use vellum_core::{Buffer, Context, Error, ImageSpan, Result, Storage};

use super::header::Header;
use super::layout::*;

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

const FIXED_LEN: usize = 24;
const IN_USE: u32 = 1 << 0;
const AUTO: u32 = 1 << 1;

/// The persistent bitmaps of an image, if they are valid.
///
/// # Errors
/// `Corrupt` when the directory is damaged.
pub async fn list(header: &Header, storage: &dyn Storage) -> Result<Vec<Bitmap>> {
    Ok(read(header, storage).await?.into_iter().map(|(bitmap, _)| bitmap).collect())
}

/// The tables of the bitmaps, which name the clusters with their bits.
pub(super) async fn tables(header: &Header, storage: &dyn Storage) -> Result<Vec<ImageSpan>> {
    let places = read(header, storage).await?.into_iter().map(|(_, place)| place);
    places.map(|(at, entries)| header.table(at, u64::from(entries) * 8, "bitmap table")).collect()
}

/// The bitmaps, with the place of each one's table and the number of its entries.
async fn read(header: &Header, storage: &dyn Storage) -> Result<Vec<(Bitmap, (u64, u32))>> {
    let Some(directory) = header.bitmaps() else { return Ok(Vec::new()) };
    let context = || format!("{}: can't read the directory of its bitmaps", storage.name());
    let len = usize::try_from(directory.span.len()).expect("at most 128 MiB");
    let read = storage.read(directory.span.start(), Buffer::for_overwrite(len)).await.context(context)?;
    parse(read.slice(), directory.count).context(context)
}

fn parse(directory: &[u8], count: u32) -> Result<Vec<(Bitmap, (u64, u32))>> {
    let mut bitmaps = Vec::new();
    let mut at = 0;
    for _ in 0..count {
        let ends = || Error::corrupt("it ends too early");
        let fixed = directory.get(at..at + FIXED_LEN).ok_or_else(ends)?;
        let (flags, bits) = (be32(fixed, 12), u32::from(fixed[17]));
        let (name_len, extra_len) = (usize::from(be16(fixed, 18)), be32(fixed, 20) as usize);
        let name_at = at + FIXED_LEN + extra_len;
        let name = directory.get(name_at..name_at + name_len).ok_or_else(ends)?;
        let granularity = 1u64
            .checked_shl(bits)
            .ok_or_else(|| Error::corrupt(format!("a granularity of 2^{bits} bytes is impossible")))?;
        let bitmap = Bitmap {
            name: String::from_utf8_lossy(name).into_owned(),
            granularity,
            is_in_use: flags & IN_USE != 0,
            is_auto: flags & AUTO != 0,
        };
        bitmaps.push((bitmap, (be64(fixed, 0), be32(fixed, 8))));
        at = (name_at + name_len).next_multiple_of(8);
    }
    Ok(bitmaps)
}
