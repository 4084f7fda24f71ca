//! Long work on a disk and its fast medium, piece by piece: somebody follows it, and may end it between two pieces.
//!
//! After each piece the disk is as complete as after all of them, so what is done stays done.

use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::{BlockSize, GuestSpan, Result};

/// A piece has this many bytes of the disk, which are whole units; more for a large disk.
const PIECE_BYTES: u64 = 64 << 20;
/// A disk has at most about this many pieces.
const PIECES_MAX: u64 = 4096;

static NEVER: AtomicBool = AtomicBool::new(false);

/// Who follows long work.
#[derive(Clone, Copy)]
pub struct Watch<'a> {
    /// When this is set, the work ends after the piece that is under way.
    pub stop: &'a AtomicBool,
    /// Gets the bytes that there are to do, and those that are done.
    pub progress: &'a dyn Fn(u64, u64),
}

impl Watch<'static> {
    /// Nobody.
    pub(crate) fn nobody() -> Self {
        Self { stop: &NEVER, progress: &|_, _| {} }
    }
}

impl Watch<'_> {
    /// Acts on spans of a disk of `size` bytes. Whether that was done to the end.
    pub(super) async fn each(
        &self,
        spans: &[GuestSpan],
        size: u64,
        mut act: impl AsyncFnMut(GuestSpan) -> Result<()>,
    ) -> Result<bool> {
        let total = spans.iter().map(|span| span.len()).sum();
        let bytes = PIECE_BYTES.max((size / PIECES_MAX).next_power_of_two());
        let piece = BlockSize::from_bytes(bytes).expect("a power of two");
        let mut done = 0;
        (self.progress)(total, done);
        for now in spans.iter().flat_map(|span| piece.pieces_of(*span)) {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            act(now).await?;
            done += now.len();
            (self.progress)(total, done);
        }
        Ok(true)
    }
}
