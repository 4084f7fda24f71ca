//! Two disks compared: what they read as, and where they have what.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_lite::future::{or, try_zip};
use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, GuestOffset, GuestSpan, MergedExtent, Place, Result, SharedDisk,
    map_merged, read_below,
};
use vellum_format::{ForeignKind, FormatKind};
use vellum_layer::Chain;

use super::{Cut, Piece, in_pieces, stopped};

/// Bytes compared as one piece. With several pieces of two disks at once, all of their memory stays in the pool of
/// [`Buffer`], and most of it in the caches of the processor.
const PIECE: BlockSize = BlockSize::from_shift(18);

/// How a comparison ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// They read the same.
    Identical,
    /// The first byte that differs.
    DiffersAt(GuestOffset),
    /// They read the same up to here, where one has another kind of place: data, recorded zeros, or nothing.
    PlacesDifferAt(GuestOffset),
}

/// Compares two disks. Where one is longer, its rest must read as zero.
///
/// # Errors
/// The errors of reading; `Closed` when it was stopped.
pub async fn compare(
    first: &SharedDisk,
    second: &SharedDisk,
    pieces_at_once: usize,
    stop: &AtomicBool,
    progress: &dyn Fn(u64),
) -> Result<Comparison> {
    let size = first.geometry().size.max(second.geometry().size);
    compare_up_to(first, second, size, pieces_at_once, stop, progress).await
}

/// As [`compare`], for disks of one size that must also have data, recorded zeros and nothing in the same places, as `qemu-img
/// compare -s` sees them ([`Kept`]). What comes first in the disk is found.
///
/// # Errors
/// Those of [`compare`].
pub async fn compare_strictly(
    first: &Chain,
    second: &Chain,
    pieces_at_once: usize,
    stop: &AtomicBool,
    progress: &dyn Fn(u64),
) -> Result<Comparison> {
    let other = first_other_place(first, second, stop).await?;
    let (first, second) = (first.disk(), second.disk());
    let end = other.map_or(first.geometry().size, GuestOffset::bytes);
    let same = compare_up_to(first, second, end, pieces_at_once, stop, progress).await?;
    Ok(match (same, other) {
        (Comparison::Identical, Some(at)) => Comparison::PlacesDifferAt(at),
        (same, _) => same,
    })
}

/// How a part of a disk is kept, as far as QEMU tells one way from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kept {
    how: How,
    /// It has a place in a file.
    is_placed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Data,
    Packed,
    Zeros,
    /// A hole of a file that has all bytes of the disk.
    Hole,
    Nowhere,
}

impl Kept {
    fn of(chain: &Chain, extent: &MergedExtent) -> Self {
        let member = chain.member(extent.depth);
        let kind = member.head.kind();
        // Of these QEMU does not ask where they have what.
        if matches!(kind, FormatKind::Foreign(ForeignKind::Vhdx | ForeignKind::Dmg) | FormatKind::Luks) {
            return Self { how: How::Data, is_placed: false };
        }
        let is_raw = kind == FormatKind::Raw;
        let (how, is_placed) = match &extent.place {
            Place::Data { .. } => (How::Data, !member.head.is_encrypted()),
            Place::Compressed { .. } => (How::Packed, false),
            Place::Below => (How::Nowhere, false),
            Place::Zero { allocated: false } if kind == FormatKind::Foreign(ForeignKind::Vmdk) => {
                (How::Hole, true)
            }
            Place::Zero { allocated } => (How::Zeros, is_raw || *allocated && member.opened.zeros.is_some()),
        };
        Self { how, is_placed }
    }
}

/// Where two disks of one size first keep what they have in different ways.
async fn first_other_place(first: &Chain, second: &Chain, stop: &AtomicBool) -> Result<Option<GuestOffset>> {
    let sizes = [first, second].map(|chain| chain.disk().geometry().size);
    let mut rest = GuestOffset::ZERO.span(sizes[0].min(sizes[1]));
    let mut maps = [Vec::new(), Vec::new()];
    while !rest.is_empty() {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "stopped before the end"));
        }
        for (chain, map) in [first, second].into_iter().zip(&mut maps) {
            if map.is_empty() {
                let extents = map_merged(chain.disk(), rest).await?;
                *map = extents.iter().map(|extent| (extent.span, Kept::of(chain, extent))).collect();
                map.reverse();
            }
        }
        let [one, other] = &mut maps;
        let (a, b) = (one.pop().expect("a map is not empty"), other.pop().expect("a map is not empty"));
        if a.1 != b.1 {
            return Ok(Some(rest.start()));
        }
        let end = a.0.end().min(b.0.end());
        for (map, (span, kept)) in [(one, a), (other, b)] {
            if span.end() > end {
                map.push((GuestSpan::between(end, span.end()), kept));
            }
        }
        rest = GuestSpan::between(end, rest.end());
    }
    Ok(None)
}

/// As [`compare`], up to there.
async fn compare_up_to(
    first: &SharedDisk,
    second: &SharedDisk,
    size: u64,
    pieces_at_once: usize,
    stop: &AtomicBool,
    progress: &dyn Fn(u64),
) -> Result<Comparison> {
    let piece = |piece: Piece| or(compare_piece(first, second, piece), stopped(stop));
    let all = GuestOffset::ZERO.span(size);
    let found =
        in_pieces(&[first, second], all, Cut::at_most(PIECE), pieces_at_once, stop, progress, piece).await?;
    Ok(found.map_or(Comparison::Identical, Comparison::DiffersAt))
}

async fn compare_piece(first: &SharedDisk, second: &SharedDisk, piece: Piece) -> Result<Option<GuestOffset>> {
    let span = piece.span;
    if piece.is_zero {
        return Ok(None);
    }
    let len = usize::try_from(span.len()).expect("a piece is small");
    // Past its end a disk reads as zero, as if it lay below a longer one.
    let read = |disk| read_below(Some(disk), span.start(), Buffer::for_overwrite(len));
    let (one, other) = try_zip(read(first), read(second)).await?;
    let (one, other) = (one.contiguous(), other.contiguous());
    if one.slice() == other.slice() {
        return Ok(None);
    }
    let at = one.slice().iter().zip(other.slice()).position(|(a, b)| a != b).expect("they differ");
    Ok(Some(span.start() + at as u64))
}
