//! Long requests, executed a slice at a time, so that no request occupies a worker for long.
//!
//! A disk may complete a request without ever waiting, for example while it visits every cluster of a run or
//! marks each of them as zero. So no call covers more than one slice, and the caller yields after each.

use futures_lite::future::yield_now;
use vellum_core::{BlockSize, GuestSpan, LocalFuture, Result};

/// The largest range that a disk is asked to map, zero or discard at once. No cluster of any format is
/// larger, and slices are aligned to it.
pub(crate) const SLICE: BlockSize = BlockSize::from_shift(26);

/// Does something with each slice of a run, yielding in between; `may_go_on` is checked after each.
pub(crate) async fn in_slices<'a>(
    span: GuestSpan,
    act: impl Fn(GuestSpan) -> LocalFuture<'a, Result<()>>,
    may_go_on: impl Fn() -> Result<()>,
) -> Result<()> {
    for piece in SLICE.pieces_of(span) {
        act(piece).await?;
        if piece.end() < span.end() {
            yield_now().await;
            may_go_on()?;
        }
    }
    Ok(())
}
