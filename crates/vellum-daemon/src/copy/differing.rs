//! A copy into a target that reads as something already: only what differs is written.

use vellum_core::{Buffer, Context, GuestSpan, PlaceKind, Result, SharedDisk, WriteFlags, ZeroFlags};

use super::{Piece, read_piece};

/// Where the target reads differently, and what belongs there; nothing for zeros.
pub(super) async fn differences(
    source: &SharedDisk,
    target: &SharedDisk,
    piece: Piece,
) -> Result<Vec<(GuestSpan, Option<Buffer>)>> {
    let span = piece.span;
    let len = usize::try_from(span.len()).expect("a piece is small");
    if piece.is_zero && reads_as_zero(target, span).await? {
        return Ok(Vec::new());
    }
    let there = read_piece(target, span).await?.contiguous();
    let mut data = match piece.is_zero {
        true => Buffer::zeroed(len),
        false => read_piece(source, span).await?.contiguous(),
    };
    // Whole blocks of the target, so that none of them is filled from below.
    let unit = target.geometry().preferred_size;
    let mut runs: Vec<(GuestSpan, bool)> = Vec::new();
    let mut at = 0;
    for part in unit.pieces_of(span) {
        let end = at + usize::try_from(part.len()).expect("a piece is small");
        let is_other = data.slice()[at..end] != there.slice()[at..end];
        at = end;
        match runs.last_mut() {
            Some((last, same)) if *same == is_other => *last = GuestSpan::between(last.start(), part.end()),
            _ => runs.push((part, is_other)),
        }
    }
    let runs = runs.into_iter().filter_map(|(run, is_other)| {
        let part = data.split_to(usize::try_from(run.len()).expect("a piece is small"));
        is_other.then(|| (run, (!part.is_zero()).then_some(part)))
    });
    Ok(runs.collect())
}

/// Whether the map says so, for all of it.
async fn reads_as_zero(disk: &SharedDisk, span: GuestSpan) -> Result<bool> {
    let map = disk.map_whole(span).await?;
    let is_zero = |place: &PlaceKind| matches!(place, PlaceKind::Zero { .. } | PlaceKind::Below);
    Ok(map.last().is_some_and(|last| last.span.end() >= span.end())
        && map.iter().all(|part| is_zero(&part.place)))
}

pub(super) async fn write_runs(target: &SharedDisk, runs: Vec<(GuestSpan, Option<Buffer>)>) -> Result<()> {
    for (run, data) in runs {
        let context = || format!("can't write {} bytes at {}", run.len(), run.start());
        match data {
            Some(data) => target.write(run.start(), data, WriteFlags::default()).await.context(context)?,
            None => {
                let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
                target.write_zeroes(run, flags).await.context(context)?;
            }
        }
    }
    Ok(())
}
