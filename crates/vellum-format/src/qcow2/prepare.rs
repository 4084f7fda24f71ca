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

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_lock::{Mutex, MutexGuard};
use vellum_core::{Buffer, Context, ImageOffset, ImageSpan, Result, SharedStorage, Storage, is_zero};

use super::check::Hole;
use super::header::Header;
use super::image::Qcow2;
use super::layout::{OFFSET_MASK, be64};
use super::refcount;
use crate::prealloc::{Need, Prealloc, earned_by_flush};
use crate::sabotage::{self, Bug};
use crate::state::UnderWay;

/// What is prepared, and how.
pub(crate) struct Prepare {
    is_on: bool,
    /// The image file, for zeros.
    storage: SharedStorage,
    /// Held during a preparation, and during the close.
    need: Mutex<Need>,
    /// Bytes that the guest has written since its last flush.
    unflushed: AtomicU64,
    /// How many of the bytes that it has written and flushed count.
    flushed: AtomicU64,
}

impl Prepare {
    pub(crate) fn new(how: Prealloc, storage: SharedStorage) -> Self {
        let need = Need::new(how, storage.limits());
        let (unflushed, flushed) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { is_on: need.is_on(), storage, need: Mutex::new(need), unflushed, flushed }
    }

    /// Counts bytes that the guest writes.
    pub(crate) fn note_written(&self, bytes: u64) {
        if self.is_on {
            self.unflushed.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Counts a flush of the guest.
    pub(crate) fn note_flush(&self) {
        if self.is_on {
            let bytes = self.unflushed.swap(0, Ordering::Relaxed);
            self.flushed.fetch_add(earned_by_flush(bytes), Ordering::Relaxed);
        }
    }

    /// Waits for the piece in flight. Nothing is begun while the guard lives.
    pub(crate) async fn rest(&self) -> MutexGuard<'_, Need> {
        self.need.lock().await
    }
}

impl Qcow2 {
    /// Prepares a piece, if it is time for one. Returns whether it is time for another.
    pub(crate) async fn prepare_some(&self, now: Duration) -> bool {
        // Before the first change the need is unknown, and a crash would go unnoticed.
        if !self.prepare.is_on || !self.header.is_marked() {
            return false;
        }
        let Some(mut need) = self.prepare.need.try_lock() else { return false };
        if self.engine.state.check_open().is_err() || self.engine.state.check_stopped().is_err() {
            return false;
        }
        let (end, ready) = self.refcounts().ahead();
        need.note(now, end, self.prepare.flushed.load(Ordering::Relaxed));
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
        let written = self.prepare.storage.write(start, Buffer::zeroed(len)).await;
        under_way.end();
        self.refcounts().prepare_ended(written.is_ok());
        written.map(|()| true)
    }
}

/// Cuts an image that was not closed to the end of what its refcounts say is in use, but leaves `keep` in
/// place. The refcounts must be right and checkpointed.
pub(super) async fn give_back_tail(header: &Header, storage: &dyn Storage, keep: ImageSpan) -> Result<()> {
    if storage.limits().fixed_len {
        return Ok(());
    }
    let end = match sabotage::is(Bug::GivenBackInUse) {
        false => used_end(header, storage).await?.max(keep.end().bytes()),
        true => keep.end().bytes().max(header.cluster_size().bytes()),
    };
    if end < storage.len() {
        storage.set_len(end).await.context(|| "can't truncate the file")?;
    }
    Ok(())
}

/// The end of the last cluster with a refcount, in bytes. Begins at the end, and looks at no more than
/// necessary.
async fn used_end(header: &Header, storage: &dyn Storage) -> Result<u64> {
    let cluster = header.cluster_size();
    let read = async |span: ImageSpan| {
        let len = usize::try_from(span.len()).expect("a table fits memory");
        storage.read(span.start(), Buffer::for_overwrite(len)).await.context(|| "can't read the refcounts")
    };
    let table = read(header.refcount_table).await?;
    let per_block = (cluster.bytes() * 8) >> header.refcount_order;
    let entries = table.slice().chunks_exact(8).enumerate();
    let mut blocks: Vec<(ImageOffset, usize)> =
        entries.map(|(index, entry)| (ImageOffset::new(be64(entry, 0) & OFFSET_MASK), index)).collect();
    blocks.retain(|(block, _)| block.bytes() != 0);
    blocks.sort_unstable();
    // Blocks in holes have no refcounts.
    let mut hole = Hole::default();
    let mut there = BTreeMap::new();
    for (block, index) in blocks {
        if !hole.covers(storage, block.span(cluster.bytes())).await {
            there.insert(index, block);
        }
    }
    for (index, block) in there.into_iter().rev() {
        let block = read(block.span(cluster.bytes())).await?;
        if is_zero(block.slice()) {
            continue;
        }
        let last =
            (0..per_block).rev().find(|i| refcount::read(block.slice(), header.refcount_order, *i) != 0);
        if let Some(last) = last {
            return Ok((index as u64 * per_block + last + 1) << cluster.shift());
        }
    }
    Ok(cluster.bytes())
}
