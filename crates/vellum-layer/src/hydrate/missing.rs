//! What an image still reads from below, apart from zeros.

use futures_lite::future::yield_now;
use vellum_core::{Error, ErrorKind, GuestOffset, GuestSpan, Place, Result, SharedDisk, map_merged};

use super::tap::{Facts, Tap};

/// The mapping is looked at for this many bytes at a time.
const WINDOW: u64 = 256 << 20;

/// The span in windows.
pub(super) fn windows_of(span: GuestSpan) -> impl Iterator<Item = GuestSpan> {
    let mut rest = span;
    std::iter::from_fn(move || {
        let (window, after) = rest.split_at(WINDOW.min(rest.len()));
        rest = after;
        (!window.is_empty()).then_some(window)
    })
}

/// Whether the image has everything that the disk below has. `stop` is asked between two windows.
///
/// # Errors
/// Those of the maps, and `Closed` when it was stopped.
pub(crate) async fn is_whole(top: &SharedDisk, tap: &Tap, stop: &dyn Fn() -> bool) -> Result<bool> {
    let Some(facts) = tap.facts() else { return Ok(false) };
    for window in windows_of(GuestOffset::ZERO.span(facts.end.bytes())) {
        if stop() {
            return Err(Error::new(ErrorKind::Closed, "stopped"));
        }
        if !missing_in(top, tap, &facts, window).await?.is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What the image does not have in this span, and what is not known to be zero below: whole blocks, in order.
pub(super) async fn missing_in(
    top: &SharedDisk,
    tap: &Tap,
    facts: &Facts,
    span: GuestSpan,
) -> Result<Vec<GuestSpan>> {
    let mut missing: Vec<GuestSpan> = Vec::new();
    let mut rest = span.intersect(GuestOffset::ZERO.span(facts.end.bytes()));
    while !rest.is_empty() {
        // A map whose tables are in memory completes at once, and there may be many of them.
        yield_now().await;
        let extents = top.map(rest).await?;
        let covered = extents.last().map(|last| last.span.end()).ok_or_else(says_nothing)?;
        for extent in extents.iter().filter(|extent| matches!(extent.place, Place::Below)) {
            for part in tap.not_known_zero(extent.span) {
                add_not_zero(tap, facts, part, &mut missing).await?;
            }
        }
        rest = GuestSpan::between(covered, rest.end().max(covered));
    }
    Ok(missing)
}

/// Adds those blocks of the span that the disks below do not call zero.
async fn add_not_zero(tap: &Tap, facts: &Facts, span: GuestSpan, missing: &mut Vec<GuestSpan>) -> Result<()> {
    let mut rest = span;
    while !rest.is_empty() {
        yield_now().await;
        let extents = map_merged(tap.inner(), rest).await?;
        let covered = extents.last().map(|last| last.span.end()).ok_or_else(says_nothing)?;
        for extent in &extents {
            if matches!(extent.place, Place::Zero { .. } | Place::Below) {
                continue;
            }
            let wide = facts.widened(extent.span);
            match missing.last_mut() {
                Some(last) if last.end() >= wide.start() => {
                    *last = GuestSpan::between(last.start(), last.end().max(wide.end()));
                }
                _ => missing.push(wide),
            }
        }
        rest = GuestSpan::between(covered, rest.end().max(covered));
    }
    Ok(())
}

fn says_nothing() -> Error {
    Error::invalid("a disk says nothing about its bytes")
}
