//! A copy into a target that reads as something already: only what differs is written.

use futures_lite::future::try_zip;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use vellum_core::{
    BlockSize, Buffer, Context, GuestSpan, LocalFuture, PlaceKind, Result, SharedDisk, WriteFlags, ZeroFlags,
    read_below,
};

use super::{Piece, read_piece};

/// How many runs of one piece are written at once where writes overlap. One in two blocks of it may be zero.
pub(crate) const RUNS_AT_ONCE: usize = 16;

/// In which of its units the target reads differently, and what belongs there; nothing for zeros. Past its end a target reads as
/// zero.
pub(crate) async fn differences(
    source: &SharedDisk,
    target: &SharedDisk,
    piece: Piece,
    unit: BlockSize,
) -> Result<Vec<(GuestSpan, Option<Buffer>)>> {
    let span = piece.span;
    let len = usize::try_from(span.len()).expect("a piece is small");
    if piece.is_zero && reads_as_zero(target, span).await? {
        return Ok(Vec::new());
    }
    let there = async {
        let there = read_below(Some(target), span.start(), Buffer::for_overwrite(len)).await;
        there.context(|| format!("can't read {len} bytes at {}", span.start()))
    };
    let data = async {
        match piece.is_zero {
            true => Ok(Buffer::zeroed(len)),
            false => read_piece(source, span).await,
        }
    };
    let (there, data) = try_zip(there, data).await?;
    let (there, mut data) = (there.contiguous(), data.contiguous());
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

/// Writes them, so many at once: data, or zeros where there is none. They do not overlap. When it returns, all that have begun
/// have ended.
pub(crate) async fn write_runs(
    target: &SharedDisk,
    runs: Vec<(GuestSpan, Option<Buffer>)>,
    at_once: usize,
) -> Result<()> {
    let mut writes = runs.into_iter().map(|(run, data)| {
        let write = async move {
            let context = || format!("can't write {} bytes at {}", run.len(), run.start());
            match data {
                Some(data) => target.write(run.start(), data, WriteFlags::default()).await.context(context),
                None => {
                    let flags = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
                    target.write_zeroes(run, flags).await.context(context)
                }
            }
        };
        Box::pin(write) as LocalFuture<'_, Result<()>>
    });
    let mut running = FuturesUnordered::new();
    let mut written = Ok(());
    loop {
        while written.is_ok()
            && running.len() < at_once
            && let Some(write) = writes.next()
        {
            running.push(write);
        }
        let Some(ended) = running.next().await else { return written };
        written = written.and(ended);
    }
}
