//! Two disks compared: what they read as, and where they have what.

use std::sync::atomic::{AtomicBool, Ordering};

use futures_lite::future::{or, try_zip};
use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, GuestOffset, GuestSpan, MergedExtent, Result, SharedDisk, read_below,
};

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

/// As [`compare`], for disks of one size that must also have data, recorded zeros and nothing in the same places. What comes
/// first in the disk is found.
///
/// # Errors
/// Those of [`compare`].
pub async fn compare_strictly(
    first: &SharedDisk,
    second: &SharedDisk,
    pieces_at_once: usize,
    stop: &AtomicBool,
    progress: &dyn Fn(u64),
) -> Result<Comparison> {
    let other = first_other_place(first, second, stop).await?;
    let end = other.map_or(first.geometry().size, GuestOffset::bytes);
    let same = compare_up_to(first, second, end, pieces_at_once, stop, progress).await?;
    Ok(match (same, other) {
        (Comparison::Identical, Some(at)) => Comparison::PlacesDifferAt(at),
        (same, _) => same,
    })
}

/// Where two disks of one size first have different kinds of places.
async fn first_other_place(
    first: &SharedDisk,
    second: &SharedDisk,
    stop: &AtomicBool,
) -> Result<Option<GuestOffset>> {
    let mut rest = GuestOffset::ZERO.span(first.geometry().size.min(second.geometry().size));
    let mut maps = [Vec::new(), Vec::new()];
    while !rest.is_empty() {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Closed, "stopped before the end"));
        }
        for (disk, map) in [first, second].into_iter().zip(&mut maps) {
            if map.is_empty() {
                *map = disk.map_whole(rest).await?;
                map.reverse();
            }
        }
        let [one, other] = &mut maps;
        let (a, b) = (one.pop().expect("a map is not empty"), other.pop().expect("a map is not empty"));
        if a.place != b.place {
            return Ok(Some(rest.start()));
        }
        let end = a.span.end().min(b.span.end());
        for (map, extent) in [(one, a), (other, b)] {
            if extent.span.end() > end {
                map.push(MergedExtent { span: GuestSpan::between(end, extent.span.end()), ..extent });
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
