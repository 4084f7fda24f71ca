//! Space ahead of need: clusters behind all that is in use are written with zeros while nobody waits, and given back.
//!
//! ```text
//!   in use … │ journal │ … in use │ zeros, written │ zeros, on their way │ not written ……… end of the file
//!                                 ▲ front          ▲ prepared            (all of it reads as zero, as it did before)
//! ```
//!
//! What the next allocations get was written before, so the flush that follows them costs the file system less
//! (`prealloc.rs` says how far ahead, and `docs/design/0005-preallocation.md` what is won).
//!
//! 1. Zeros are written only to clusters of which none was ever in use, and while they are under way nobody is given one of
//!    them (`refcount.rs`, invariant 6): zeros never land on what somebody else has written.
//! 2. A cluster that is prepared reads as it did: nothing else depends on whether it is. So no flush is asked for; the next
//!    one that comes along covers the zeros.
//! 3. One piece is under way at a time. Closing waits for it, then cuts the file to the end of what is in use.
//! 4. The image is marked as open before, so whatever a crash leaves of it is looked at, and cut off, by who recovers it.
//! 5. A failure ends it for this opening. The guest does not hear of it: its own writes need no more than they always did.
//! 6. What the guest writes counts for the bound on zeros (`prealloc.rs`) once it is flushed, and of each flush not more than
//!    [`FLUSHED_BYTES_MAX`]: the file system's own writes, which the zeros save, come once for a flush, however much it carries.
//!    Where nobody flushes there is nothing to save.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_lock::{Mutex, MutexGuard};
use vellum_core::{Buffer, Context, ImageOffset, ImageSpan, Result, SharedStorage, Storage};

use super::header::Header;
use super::image::Qcow2;
use super::layout::{OFFSET_MASK, be64};
use super::refcount;
use crate::prealloc::{Need, Prealloc};
use crate::sabotage::{self, Bug};
use crate::state::UnderWay;

/// So much of what was written before a flush counts for zeros, in bytes.
const FLUSHED_BYTES_MAX: u64 = 256 << 10;

/// What is prepared, and how.
pub(crate) struct Prepare {
    is_on: bool,
    /// The image file, as the way for zeros.
    storage: SharedStorage,
    /// Held by who prepares, and by who closes.
    need: Mutex<Need>,
    /// How much the guest has written since it flushed, in bytes.
    unflushed: AtomicU64,
    /// How much of what it has written and flushed counts, in bytes.
    flushed: AtomicU64,
}

impl Prepare {
    pub(crate) fn new(how: Prealloc, storage: SharedStorage) -> Self {
        let need = Need::new(how, storage.limits());
        let (unflushed, flushed) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { is_on: need.is_on(), storage, need: Mutex::new(need), unflushed, flushed }
    }

    /// The guest writes so many bytes.
    pub(crate) fn note_written(&self, bytes: u64) {
        if self.is_on {
            self.unflushed.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// The guest flushes.
    pub(crate) fn note_flush(&self) {
        if self.is_on {
            let bytes = self.unflushed.swap(0, Ordering::Relaxed).min(FLUSHED_BYTES_MAX);
            self.flushed.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Waits for what is under way; nothing is begun while the guard lives.
    pub(crate) async fn rest(&self) -> MutexGuard<'_, Need> {
        self.need.lock().await
    }
}

impl Qcow2 {
    /// Prepares a piece, if it is time for one. Tells whether it is time for another.
    pub(crate) async fn prepare_some(&self, now: Duration) -> bool {
        // Before the first change nothing is known of the need, and a crash would not be noticed.
        if !self.prepare.is_on || !self.is_changed() {
            return false;
        }
        let Some(mut need) = self.prepare.need.try_lock() else { return false };
        if self.state.check_open().is_err() || self.state.check_stopped().is_err() {
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

    /// Writes zeros to about so many bytes. Tells whether there were any to write to.
    async fn prepare_piece(&self, bytes: u64) -> Result<bool> {
        let want = self.cluster.count_for(bytes);
        let Some(piece) = self.with_refcounts(|refcounts| refcounts.prepare(want)).await? else {
            return Ok(false);
        };
        let under_way = UnderWay::begin(&self.state, "writing zeros ahead of need");
        let start = ImageOffset::new(piece.start << self.cluster.shift());
        let len =
            usize::try_from((piece.end - piece.start) << self.cluster.shift()).expect("a piece is small");
        let written = self.prepare.storage.write(start, Buffer::zeroed(len)).await;
        under_way.end();
        self.refcounts().prepare_ended(written.is_ok());
        written.map(|()| true)
    }
}

/// Cuts an image that was not closed to the end of what its refcounts say is in use, but leaves `keep` in place. The
/// refcounts are right and home.
pub(super) async fn give_back_tail(header: &Header, storage: &dyn Storage, keep: ImageSpan) -> Result<()> {
    if storage.limits().fixed_len {
        return Ok(());
    }
    let end = match sabotage::is(Bug::GivenBackInUse) {
        false => used_end(header, storage).await?.max(keep.end().bytes()),
        true => keep.end().bytes().max(header.cluster_size().bytes()),
    };
    if end < storage.len() {
        storage.set_len(end).await.context(|| "can't cut the file to its end")?;
    }
    Ok(())
}

/// Where the last cluster ends that has a refcount, in bytes. Looks at no more than it must, from the end on.
async fn used_end(header: &Header, storage: &dyn Storage) -> Result<u64> {
    let cluster = header.cluster_size();
    let read = async |span: ImageSpan| {
        let len = usize::try_from(span.len()).expect("a table fits memory");
        storage.read(span.start(), Buffer::for_overwrite(len)).await.context(|| "can't read the refcounts")
    };
    let table = read(header.refcount_table).await?;
    let per_block = (cluster.bytes() * 8) >> header.refcount_order;
    for (index, entry) in table.slice().chunks_exact(8).enumerate().rev() {
        let block = ImageOffset::new(be64(entry, 0) & OFFSET_MASK);
        if block.bytes() == 0 {
            continue;
        }
        let block = read(block.span(cluster.bytes())).await?;
        let last =
            (0..per_block).rev().find(|i| refcount::read(block.slice(), header.refcount_order, *i) != 0);
        if let Some(last) = last {
            return Ok((index as u64 * per_block + last + 1) << cluster.shift());
        }
    }
    Ok(cluster.bytes())
}
