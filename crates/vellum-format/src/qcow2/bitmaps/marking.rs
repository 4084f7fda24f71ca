//! Bitmaps of an image that is open for writing: what changes is marked before it changes.
//!
//! ```text
//!   request ──► exact bits, in memory ──► its regions are durable? ──yes──► goes on
//!                                              │no
//!                                              └► regions marked whole ──► commit ──► goes on
//!   close   ──► the words of these regions get the exact bits ──► commit
//! ```
//!
//! A *region* is 256 granules: 16 MiB of the disk with the usual granularity. On the medium, bits are written by regions, and
//! before anything in the region changes. So marking costs one commit for each region in an opening, and a crash leaves
//! bits that are set in whole regions; a clean close leaves the exact ones.
//!
//! For the medium at every moment, whatever a crash leaves:
//!
//! 1. What differs on the disk from what it was when a bit was last cleared has its bit set: no request of a guest changes
//!    anything before the commit that covers its regions.
//! 2. Bits on the medium are only set while requests run, and only cleared by the close, in which no request runs. Each word
//!    is old or new, and both obey rule 1. So the bitmap is valid at all times, and is not marked as in use.
//! 3. A table names a cluster of bits only together with its refcount, and when it reads as zeros durably: it changes in
//!    the same transactions as the mapping (`commit.rs`, `journal/`).
//! 4. If there is no space for a cluster of bits, its entry says that all of them are set. A request that needs no space
//!    itself never fails for want of it.
//!
//! Bitmaps that are disabled are not touched: they stay valid. Those that another program has left in use stay so.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_core::{Context, ErrorKind, GuestOffset, GuestSpan, ImageCluster, LocalFuture, Result, Zeroes};

use super::bits::Bits;
use super::track::Tracked;
use super::{ONES, load};
use crate::closed_bitmaps::OpenBitmaps;
use crate::engine::Commit as _;
use crate::qcow2::header::Header;
use crate::qcow2::image::Qcow2;
use crate::state::lock;

/// Bytes that an entry of a table takes in a record, at most.
const ENTRY_RECORD_BYTES: u64 = 24;

impl Qcow2 {
    /// Marks in the bitmaps what a request is about to change. Whatever becomes of the request, the marks are durable before
    /// it changes anything.
    pub(crate) async fn mark_changed(&self, span: GuestSpan) -> Result<()> {
        if self.tracking.is_empty() || span.is_empty() || !self.tracking.mark(span) {
            return Ok(());
        }
        // Boxed: it happens once in a while, and would make the future of every write larger.
        Box::pin(self.mark_on_the_medium(span)).await
    }

    async fn mark_on_the_medium(&self, span: GuestSpan) -> Result<()> {
        let context = || format!("{}: can't mark a change in its bitmaps", self.engine.name);
        self.begin_change().await?;
        for one in self.tracking.tracked.iter().filter(|one| !one.durable.covers(span)) {
            for index in one.entries_of(span) {
                if one.places[index].load(Ordering::Acquire) == 0 {
                    self.make_place(one, index).await.context(context)?;
                }
            }
            let _shared = self.shared();
            let bytes = one.mark_regions(span);
            if let Some(journal) = self.journal() {
                journal.common.add_words(bytes);
            }
        }
        // Another request may have marked a region just before, in a commit that is still under way: this one begins after it.
        self.commit().await.context(context)?; // commit point
        self.tracking.tracked.iter().for_each(|one| one.durable.mark(span));
        Ok(())
    }

    /// Gives a cluster of bits a place, where it reads as zeros; or says that all of them are set, if there is no space.
    async fn make_place(&self, one: &Tracked, index: usize) -> Result<()> {
        let _making = one.making.lock().await;
        if one.places[index].load(Ordering::Acquire) != 0 {
            return Ok(());
        }
        let run = match self.allocate(1).await {
            Ok(run) => run,
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                self.set_place(one, index, ONES, || ());
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let place = self.cluster.start_of(ImageCluster::new(run.first)).span(self.cluster.bytes());
        if let Err(error) = self.metadata.write_zeroes(place, Zeroes::Allocated).await {
            self.give_back(run).await;
            if error.kind() == ErrorKind::NoSpace {
                self.set_place(one, index, ONES, || ());
                return Ok(());
            }
            return Err(error);
        }
        self.refcounts().note_metadata(place);
        self.set_place(one, index, place.start().bytes(), || {
            if let Some(journal) = self.journal() {
                journal.remove_pending(ImageCluster::new(run.first));
                journal.common.add_zeros(place);
            }
        });
        Ok(())
    }

    /// Changes an entry of the table, together with what `with` records.
    fn set_place(&self, one: &Tracked, index: usize, entry: u64, with: impl FnOnce()) {
        let _shared = self.shared();
        with();
        one.places[index].store(entry, Ordering::Release);
        lock(&one.dirty).entries.insert(index);
        if let Some(journal) = self.journal() {
            journal.common.add_words(ENTRY_RECORD_BYTES);
        }
    }

    /// The bitmap of this name, if it is kept up.
    fn tracked(&self, name: &str) -> Result<&Tracked> {
        let found = self.tracking.tracked.iter().find(|one| one.name == name);
        found.ok_or_else(|| self.tracking.why_not(name).context(self.engine.name.clone()))
    }

    /// Lists the words in which something is marked, to be written with the next commit.
    fn list_marked(&self, one: &Tracked, bits: &Bits) {
        let _shared = self.shared();
        let mut dirty = lock(&one.dirty);
        let mut at = GuestOffset::ZERO;
        while let Some(run) = bits.next_marked(at) {
            at = run.end();
            one.list(&mut dirty, bits.words_in(run));
        }
    }

    /// The image is being closed: the exact bits replace whole regions, with the next commit.
    pub(crate) fn settle_bitmaps(&self) {
        for one in &self.tracking.tracked {
            let _shared = self.shared();
            one.is_closing.store(true, Ordering::Release);
            let mut dirty = lock(&one.dirty);
            let all = GuestOffset::ZERO.span(one.marked.size());
            let mut at = GuestOffset::ZERO;
            while let Some(run) = one.marked.next_marked(at) {
                at = run.end();
                let words = one.exact.load().words_in(run.intersect(all));
                for word in words.filter(|word| one.medium_word(*word) != one.exact.load().full_word(*word)) {
                    one.list(&mut dirty, word..word + 1);
                }
            }
        }
    }
}

impl OpenBitmaps for Qcow2 {
    fn load<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<Arc<Bits>>> {
        Box::pin(async move {
            if let Some(one) = self.tracking.tracked.iter().find(|one| one.name == name) {
                let exact = one.exact();
                let Some(held) = lock(&one.held).clone() else { return Ok(exact) };
                let all = Bits::new(exact.size(), exact.granularity().trailing_zeros())?;
                all.merge(&exact);
                all.merge(&held);
                return Ok(Arc::new(all));
            }
            // One that is not kept up is not written either.
            let header = self.header.read(Header::clone);
            load(&header, &*self.metadata, name).await.map(Arc::new)
        })
    }

    fn begin_anew(&self, name: &str) -> Result<Arc<Bits>> {
        let one = self.tracked(name)?;
        let new = Bits::new(one.exact.load().size(), one.exact.load().granularity().trailing_zeros())?;
        let mut held = lock(&one.held);
        let old = one.exact.swap(Arc::new(new));
        *held = Some(match held.take() {
            None => old.clone(),
            Some(before) => {
                before.merge(&old);
                before
            }
        });
        Ok(old)
    }

    fn take_back(&self, name: &str) {
        let Ok(one) = self.tracked(name) else { return };
        let mut held = lock(&one.held);
        if let Some(old) = held.take() {
            one.exact.load().merge(&old);
        }
    }

    fn forget<'a>(&'a self, name: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let one = self.tracked(name)?;
            let Some(old) = lock(&one.held).take() else { return Ok(()) };
            let mut result = self.begin_change().await;
            let is_listed = result.is_ok();
            if is_listed {
                self.list_marked(one, &old);
                result = self.make_durable().await; // commit point
            }
            if result.is_err() {
                one.exact.load().merge(&old);
                if is_listed {
                    // The medium may have it or not: it is written once more.
                    self.list_marked(one, &old);
                }
            }
            result
        })
    }
}
