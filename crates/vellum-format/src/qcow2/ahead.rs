//! Space ahead of need: clusters behind everything in use are zeroed in the background, and handed back to
//! the allocator.
//!
//! ```text
//!   in use … │ journal │ … in use │ zeros, written │ zeros, in flight  │ not written ……… end of the file
//!                                 ▲ front          ▲ prepared        (all of it reads as zero, as before)
//! ```
//!
//! The next allocations get space that was written before, so the flush that follows them costs the file
//! system less (`prealloc.rs` says how far ahead, and `docs/design/0005-preallocation.md` what is gained).
//!
//! 1. Zeros are written only to clusters that were never in use, and none of them is handed out while the
//!    zeros are in flight (`refcount.rs`, invariant 6). So zeros never land on data.
//! 2. A prepared cluster reads as it did before, and nothing else depends on whether it is prepared. So this
//!    requests no flush; the next flush for another reason covers the zeros.
//! 3. One piece is in flight at a time. A close waits for it, then cuts the file to the end of what is in
//!    use.
//! 4. The image is marked as open before, so after a crash the recovery looks at what is left of it and cuts
//!    it off.
//! 5. A failure ends the preparation for this opening. The guest gets no error: its own writes need no more
//!    than they always did.
//! 6. Bytes that the guest writes count for the bound on zeros (`prealloc.rs`) once they are flushed, and
//!    only as far as that pays. The zeros save the file system's own writes, which come once for a flush,
//!    however much it carries. Without flushes there is nothing to save.

use std::time::Duration;

use vellum_core::{ImageOffset, Result};

use super::image::Qcow2;
use crate::state::UnderWay;

impl Qcow2 {
    /// Prepares a piece, if it is time for one. Returns whether it is time for another.
    pub(crate) async fn prepare_some(&self, now: Duration) -> bool {
        // Before the first change the need is unknown, and a crash would go unnoticed.
        if !self.prepare.is_on() || !self.header.is_marked() {
            return false;
        }
        let Some(mut need) = self.prepare.try_need() else { return false };
        if self.engine.state.check_open().is_err() || self.engine.state.check_stopped().is_err() {
            return false;
        }
        let (end, ready) = self.refcounts().ahead();
        need.note(now, end, self.prepare.flushed());
        let Some(bytes) = need.piece(ready) else { return false };
        match self.prepare_piece(bytes).await {
            Ok(true) => {
                need.spend(bytes);
                need.piece(self.refcounts().ahead().1).is_some()
            }
            Ok(false) => false,
            Err(_) => {
                need.give_up();
                false
            }
        }
    }

    /// Zeroes about this many bytes. Returns whether there was space to zero.
    async fn prepare_piece(&self, bytes: u64) -> Result<bool> {
        let want = self.cluster.count_for(bytes);
        let Some(piece) = self.with_refcounts(|refcounts| refcounts.prepare(want)).await? else {
            return Ok(false);
        };
        let under_way = UnderWay::begin(&self.engine.state, "writing zeros ahead of need");
        let start = ImageOffset::new(piece.start << self.cluster.shift());
        let len =
            usize::try_from((piece.end - piece.start) << self.cluster.shift()).expect("a piece is small");
        let written = self.prepare.write_zeros(start, len).await;
        under_way.end();
        self.refcounts().prepare_ended(written.is_ok());
        written.map(|()| true)
    }
}
