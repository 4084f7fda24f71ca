//! The map of a whole chain, as one disk reports it: which image holds each byte, and at what depth.
//!
//! Each disk's [`map`](crate::Disk::map) covers only its own data and reports [`Place::Below`] elsewhere.
//! Here the query goes down the chain until a disk holds the range. Past the end of a shorter disk below,
//! everything reads as zero.

use crate::disk::{Disk, Extent, Filled, Place, SharedDisk};
use crate::units::{GuestOffset, GuestSpan};
use crate::{Buffer, Error, Result};

/// Fills the buffer from the disk below, if there is one; zeros past its end, and where there is none.
pub async fn read_below(below: Option<&SharedDisk>, at: GuestOffset, mut buffer: Buffer) -> Result<Buffer> {
    let inside = below.map_or(0, |below| below.geometry().size.saturating_sub(at.bytes()));
    let mut outside = buffer.split_off(usize::try_from(inside).unwrap_or(usize::MAX).min(buffer.len()));
    outside.fill(0);
    let mut filled = match below {
        Some(below) if !buffer.is_empty() => below.read(at, buffer).await?,
        _ => buffer,
    };
    filled.append(outside);
    Ok(filled)
}

/// Gives the disk a copy of what the disk below has there, widened to whole blocks of
/// [`Filling::unit`](crate::Filling). Nothing happens to a disk that takes no copies.
///
/// # Errors
/// Those of the disk below, and of [`Disk::fill`].
pub async fn fill_from_below(disk: &dyn Disk, span: GuestSpan) -> Result<Filled> {
    let (Some(filling), Some(below)) = (disk.filling(), disk.below()) else { return Ok(Filled::default()) };
    let end = below.geometry().size.min(disk.geometry().size);
    let wide = filling.unit.widen(span);
    let (span, _) = wide.split_at(end.saturating_sub(wide.start().bytes()));
    if span.is_empty() {
        return Ok(Filled::default());
    }
    let len = usize::try_from(span.len()).map_err(|_| Error::invalid("the run is longer than memory"))?;
    let copy = below.read(span.start(), Buffer::for_overwrite(len)).await?;
    disk.fill(span.start(), copy).await
}

/// After this many extents an answer stops early, so that its size is bounded.
const EXTENTS_MAX: usize = 4096;

/// An extent of a chain.
#[derive(Debug, Clone)]
pub struct MergedExtent {
    /// Which bytes of the top disk.
    pub span: GuestSpan,
    /// Where they are. `Below` only when no disk of the chain has anything there: they read as zero.
    pub place: Place,
    /// How many disks above had no data there: 0 for the top disk.
    pub depth: usize,
}

enum Step {
    Ask { disk: SharedDisk, span: GuestSpan, depth: usize },
    Answer { extent: Extent, depth: usize },
}

/// The extents of the run, from its start, in order, without gaps, neighbours of one place merged. May stop
/// early, but is not empty unless the run is.
pub async fn map_merged(disk: &SharedDisk, span: GuestSpan) -> Result<Vec<MergedExtent>> {
    let mut answer: Vec<MergedExtent> = Vec::new();
    // A stack instead of recursion, because a chain may be long. What comes first on the disk is on top.
    let mut steps = vec![Step::Ask { disk: disk.clone(), span, depth: 0 }];
    while let Some(step) = steps.pop() {
        let (disk, span, depth) = match step {
            Step::Answer { extent, depth } => {
                if answer.len() >= EXTENTS_MAX {
                    break;
                }
                push(&mut answer, MergedExtent { span: extent.span, place: extent.place, depth });
                continue;
            }
            Step::Ask { disk, span, depth } => (disk, span, depth),
        };
        let size = disk.geometry().size;
        let (inside, outside) = span.split_at(size.saturating_sub(span.start().bytes()));
        if !outside.is_empty() {
            let extent = Extent { span: outside, place: Place::Zero { allocated: false } };
            steps.push(Step::Answer { extent, depth });
        }
        if inside.is_empty() {
            continue;
        }
        let extents = disk.map(inside).await?;
        let covered = extents.last().map_or(inside.start(), |last| last.span.end());
        if covered < inside.end() {
            let rest = GuestSpan::between(covered, inside.end());
            steps.push(Step::Ask { disk: disk.clone(), span: rest, depth });
        }
        let below = disk.below();
        steps.extend(extents.into_iter().rev().map(|extent| match (&extent.place, &below) {
            (Place::Below, Some(below)) => {
                Step::Ask { disk: below.clone(), span: extent.span, depth: depth + 1 }
            }
            _ => Step::Answer { extent, depth },
        }));
    }
    Ok(answer)
}

fn push(answer: &mut Vec<MergedExtent>, next: MergedExtent) {
    if next.span.is_empty() {
        return;
    }
    if let Some(last) = answer.last_mut()
        && last.depth == next.depth
        && last.span.end() == next.span.start()
        && continues(last, &next.place)
    {
        last.span = GuestSpan::between(last.span.start(), next.span.end());
        return;
    }
    answer.push(next);
}

fn continues(last: &MergedExtent, next: &Place) -> bool {
    match (&last.place, next) {
        (Place::Zero { allocated: a }, Place::Zero { allocated: b }) => a == b,
        (Place::Data { storage: a, at }, Place::Data { storage: b, at: next_at }) => {
            std::sync::Arc::ptr_eq(a, b) && at.checked_add(last.span.len()) == Some(*next_at)
        }
        (Place::Compressed, Place::Compressed) | (Place::Below, Place::Below) => true,
        _ => false,
    }
}
