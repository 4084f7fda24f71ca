//! Volumes of a disk: the whole disk, or the partitions that an MBR or a GPT names, with the file system in each.
//!
//! ```text
//!   sector 0       1            2 …                          last
//!   MBR            GPT header ─► entries                      the header again
//!    ├ type EE: read the GPT      ├ first, last sector
//!    └ type 05, 0F, 85: a chain of tables, one for each logical partition
//! ```
//!
//! 1. A chain and a table have a bound. A table whose checksum is wrong is not used; a GPT has a second header.
//! 2. A volume lies in the disk, and begins behind sector 0 unless it is the whole disk.

use vellum_core::{Disk, Error, GuestOffset, GuestSpan, Result};

use crate::bytes::{le16, le32, le64};
use crate::ext::is_ext;
use crate::pieces::Pieces;
use crate::xfs::is_xfs;

const SECTOR: u64 = 512;
/// Partitions of a table, at most.
const PARTITIONS_MAX: u32 = 256;
/// Where logical partitions begin to be counted.
const FIRST_LOGICAL: u32 = 5;

/// Which file system a volume has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeKind {
    /// ext2, ext3 or ext4.
    Ext,
    /// XFS.
    Xfs,
    /// One that is not read here.
    Other,
}

/// A part of the disk that may have a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Volume {
    /// The number that Linux gives it; `None` for the whole disk.
    pub partition: Option<u32>,
    /// Where it is.
    pub span: GuestSpan,
    /// What it has.
    pub kind: VolumeKind,
}

/// The volumes of a disk.
///
/// # Errors
/// Those of the disk, and `Corrupt` where a partition table contradicts itself.
pub async fn look(disk: &dyn Disk) -> Result<Vec<Volume>> {
    let whole = GuestOffset::ZERO.span(disk.geometry().size);
    let kind = kind_of(disk, whole).await?;
    if kind != VolumeKind::Other {
        return Ok(vec![Volume { partition: None, span: whole, kind }]);
    }
    let mut volumes = Vec::new();
    for (number, span) in partitions(disk, whole).await? {
        volumes.push(Volume { partition: Some(number), span, kind: kind_of(disk, span).await? });
    }
    Ok(volumes)
}

async fn kind_of(disk: &dyn Disk, span: GuestSpan) -> Result<VolumeKind> {
    if span.len() < 4096 {
        return Ok(VolumeKind::Other);
    }
    let bytes = Pieces::new(disk, span).read(0, 4096).await?;
    Ok(match () {
        () if is_ext(&bytes) => VolumeKind::Ext,
        () if is_xfs(&bytes) => VolumeKind::Xfs,
        () => VolumeKind::Other,
    })
}

async fn partitions(disk: &dyn Disk, whole: GuestSpan) -> Result<Vec<(u32, GuestSpan)>> {
    let all = Pieces::new(disk, whole);
    if all.len() < 2 * SECTOR {
        return Ok(Vec::new());
    }
    let mbr = all.read(0, SECTOR).await?;
    if le16(&mbr, 510) != 0xaa55 {
        return Ok(Vec::new());
    }
    let entries = Entry::all_of(&mbr);
    if entries.iter().any(|entry| entry.kind == 0xee) {
        return gpt(&all).await;
    }
    let mut found = Vec::new();
    for (number, entry) in (1..).zip(entries) {
        if entry.is_extended() {
            logical(&all, entry.first, &mut found).await?;
        } else if let Some(span) = entry.span(0, whole) {
            found.push((number, span));
        }
    }
    found.sort_unstable_by_key(|(number, _)| *number);
    Ok(found)
}

/// An entry of an MBR.
struct Entry {
    kind: u8,
    first: u64,
    count: u64,
}

impl Entry {
    fn all_of(table: &[u8]) -> [Self; 4] {
        [0, 1, 2, 3].map(|index| {
            let at = 446 + 16 * index;
            Self {
                kind: table[at + 4],
                first: le32(table, at + 8).into(),
                count: le32(table, at + 12).into(),
            }
        })
    }

    fn is_extended(&self) -> bool {
        matches!(self.kind, 0x05 | 0x0f | 0x85)
    }

    fn span(&self, from: u64, whole: GuestSpan) -> Option<GuestSpan> {
        (self.kind != 0).then(|| span_of(from + self.first, self.count, SECTOR, whole))?
    }
}

fn span_of(first: u64, count: u64, sector: u64, whole: GuestSpan) -> Option<GuestSpan> {
    let (start, len) = (first.checked_mul(sector)?, count.checked_mul(sector)?);
    let span = GuestSpan::checked(GuestOffset::new(start), len)?;
    let fits = span.end() <= whole.end() && !span.is_empty() && first > 0;
    fits.then_some(span)
}

async fn logical(all: &Pieces<'_>, extended: u64, found: &mut Vec<(u32, GuestSpan)>) -> Result<()> {
    let (mut table_at, mut number) = (extended, FIRST_LOGICAL);
    while number < PARTITIONS_MAX {
        let table = all.read(table_at * SECTOR, SECTOR).await?;
        if le16(&table, 510) != 0xaa55 {
            return Ok(());
        }
        let [own, next, ..] = Entry::all_of(&table);
        if let Some(span) = own.span(table_at, all.volume()) {
            found.push((number, span));
            number += 1;
        }
        if !next.is_extended() || next.first == 0 {
            return Ok(());
        }
        let next_at = extended + next.first;
        if next_at <= table_at {
            return Err(Error::corrupt("the chain of its logical partitions goes back"));
        }
        table_at = next_at;
    }
    Ok(())
}

async fn gpt(all: &Pieces<'_>) -> Result<Vec<(u32, GuestSpan)>> {
    for sector in [SECTOR, 4096] {
        for at in [Some(sector), (all.len() / sector * sector).checked_sub(sector)] {
            if let Some(at) = at
                && let Some(found) = gpt_at(all, at, sector).await?
            {
                return Ok(found);
            }
        }
    }
    Err(Error::corrupt("both headers of its GUID partition table are damaged"))
}

/// The partitions of a GPT, if there is a sound one.
async fn gpt_at(all: &Pieces<'_>, at: u64, sector: u64) -> Result<Option<Vec<(u32, GuestSpan)>>> {
    if at + SECTOR > all.len() {
        return Ok(None);
    }
    let mut header = all.read(at, SECTOR).await?;
    let header_len = le32(&header, 12);
    if &header[..8] != b"EFI PART" || !(92..=512).contains(&header_len) {
        return Ok(None);
    }
    let said = le32(&header, 16);
    header[16..20].fill(0);
    let (entries_at, count, entry_len) = (le64(&header, 72), le32(&header, 80), le32(&header, 84));
    let is_sound = crc32(&[&header[..header_len as usize]]) == said;
    let is_known = entry_len.is_multiple_of(128) && (128..=4096).contains(&entry_len);
    let Some(mut place) = entries_at.checked_mul(sector).filter(|_| is_sound && is_known && count <= 1024)
    else {
        return Ok(None);
    };
    let (mut found, mut entries) = (Vec::new(), Vec::new());
    for _ in 0..count {
        if place.checked_add(entry_len.into()).is_none_or(|end| end > all.len()) {
            return Ok(None);
        }
        entries.push(all.read(place, entry_len.into()).await?);
        place += u64::from(entry_len);
    }
    if crc32(&entries.iter().map(Vec::as_slice).collect::<Vec<_>>()) != le32(&header, 88) {
        return Ok(None);
    }
    for (number, entry) in (1..=PARTITIONS_MAX).zip(&entries) {
        let (first, last) = (le64(entry, 32), le64(entry, 40));
        let is_used = entry[..16].iter().any(|byte| *byte != 0) && first <= last && last < u64::MAX;
        let span = is_used.then(|| span_of(first, last - first + 1, sector, all.volume()));
        found.extend(span.flatten().map(|span| (number, span)));
    }
    Ok(Some(found))
}

/// CRC-32 as in Ethernet.
fn crc32(parts: &[&[u8]]) -> u32 {
    let mut crc = u32::MAX;
    for byte in parts.iter().copied().flatten() {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_standard() {
        assert_eq!(crc32(&[b"1234", b"56789"]), 0xcbf4_3926);
    }
}
