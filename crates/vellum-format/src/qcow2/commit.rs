//! The order in which metadata reaches the medium. All of it stands here.
//!
//! Metadata changes in memory first, where readers see them at once ("published"). A *commit* takes everything that was
//! changed until then and writes it in stages, each made durable by a host flush before the next:
//!
//! ```text
//!   seal      copy, in this order: freed clusters, L1, L2 pages, refcounts      (a change seen in a later copy may be
//!                                                                                missing in an earlier one, never the
//!                                                                                other way round)
//!   stage 1   refcount pages, a moved refcount table      ── flush ──           also makes all guest data durable
//!   stage 2   refcount table entries, or the header       ── flush ──           only when blocks were added
//!   stage 3   L2 pages, L1 entries                        ── flush ──           commit point
//!   after     what was freed may be given back, once nobody reads it any more
//! ```
//!
//! Invariants, for the medium at every moment:
//!
//! 1. An L2 entry names a cluster only if its refcount, its data and its refcount block's place are durable (1, 2
//!    before 3).
//! 2. An L1 entry names a table only if its refcount is durable, and so is its first content: zeros, or a copy of the
//!    table it replaces (written when the table was made, before stage 1's flush).
//! 3. A refcount is lowered, and the cluster's bytes are punched or reused, only after the metadata that named it was
//!    replaced durably (freed in an earlier commit) and after every request has left that may have looked it up.
//! 4. So whatever a crash leaves, no reachable cluster has a refcount too low; too high it may be, which the dirty bit
//!    tells and the next opening repairs.
//!
//! One commit runs at a time; flushes that arrive meanwhile share the next one. With nothing to write a flush is one
//! host flush, and none when nothing was written since the last. A failed metadata *write* fails the flushes that waited
//! for it and is tried again by the next; a failed *flush* stops the image for good.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use event_listener::{Event, EventListener};
use vellum_core::{
    Buffer, Context, Error, ErrorKind, ImageOffset, ImageSpan, LocalFuture, Result, Zeroes, try_join_all,
};

use super::image::{Qcow2, lock};
use super::layout::{autoclear, incompatible, put64};
use super::pages::Page;
use super::refcount::SealedRefcounts;

/// This many metadata writes are under way at once.
const WRITES_AT_ONCE: usize = 32;
/// L1 entries are written in sectors of this many.
const L1_SECTOR_ENTRIES: usize = 64;

/// Who commits, who waits, and what was freed.
#[derive(Default)]
pub(crate) struct Commits {
    turns: Mutex<Turns>,
    finished: Event,
    /// Freed since the last seal.
    freed: Mutex<Vec<ImageSpan>>,
    /// Freed, durably so, and waiting for requests to leave: the epoch in which they were sealed, and what.
    quarantine: Mutex<VecDeque<(u64, Vec<ImageSpan>)>>,
    /// Changes of the storage that have completed.
    changes: AtomicU64,
    /// The value of `changes` that the last good host flush covers.
    covered: AtomicU64,
}

#[derive(Default)]
struct Turns {
    started: u64,
    ended: u64,
    is_running: bool,
    last: Option<Result<()>>,
}

enum Turn {
    Lead,
    Wait(EventListener),
    Over(Result<()>),
}

impl Commits {
    /// Notes that bytes of the storage were changed by a request that is about to return.
    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn note_free(&self, span: ImageSpan) {
        lock(&self.freed).push(span);
    }

    /// Whether clusters wait to be given back.
    pub(crate) fn has_quarantine(&self) -> bool {
        !lock(&self.freed).is_empty() || !lock(&self.quarantine).is_empty()
    }

    /// The number of the first commit that begins after this moment.
    fn ticket(&self) -> u64 {
        lock(&self.turns).started + 1
    }

    fn turn(&self, ticket: u64) -> Turn {
        let mut turns = lock(&self.turns);
        if turns.ended >= ticket {
            return Turn::Over(turns.last.clone().expect("a commit has ended"));
        }
        if turns.is_running {
            return Turn::Wait(self.finished.listen());
        }
        turns.is_running = true;
        turns.started += 1;
        Turn::Lead
    }
}

/// The leader of a commit; if its future is dropped half way, the image stops.
struct Leading<'a> {
    image: &'a Qcow2,
    has_ended: bool,
}

impl Leading<'_> {
    fn end(mut self, result: Result<()>) -> Result<()> {
        self.has_ended = true;
        self.image.commits.ended(result.clone());
        result
    }
}

impl Drop for Leading<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let why = Error::new(ErrorKind::Poisoned, "a commit was abandoned half way: reopen the image");
            self.image.state.stop(why.clone());
            self.image.commits.ended(Err(why));
        }
    }
}

impl Commits {
    fn ended(&self, result: Result<()>) {
        let mut turns = lock(&self.turns);
        turns.is_running = false;
        turns.ended = turns.started;
        turns.last = Some(result);
        drop(turns);
        self.finished.notify(usize::MAX);
    }
}

/// Copies of everything that a commit writes.
struct Sealed {
    freed: Vec<ImageSpan>,
    l1: Vec<(ImageOffset, Vec<u8>, Vec<usize>)>,
    pages: Vec<(Arc<Page>, ImageOffset, Vec<u8>)>,
    refcounts: SealedRefcounts,
}

impl Sealed {
    fn has_mapping(&self) -> bool {
        !self.l1.is_empty() || !self.pages.is_empty()
    }

    fn is_empty(&self) -> bool {
        !self.has_mapping() && self.refcounts.pages.is_empty() && self.refcounts.table.is_empty()
    }
}

impl Qcow2 {
    /// Makes durable every change that was published before the call.
    pub(crate) async fn commit(&self) -> Result<()> {
        let ticket = self.commits.ticket();
        loop {
            match self.commits.turn(ticket) {
                Turn::Over(result) => return result,
                Turn::Wait(listener) => listener.await,
                Turn::Lead => {
                    let leading = Leading { image: self, has_ended: false };
                    let result = self.lead().await;
                    let _ = leading.end(result);
                }
            }
        }
    }

    async fn lead(&self) -> Result<()> {
        self.state.check_stopped()?;
        let covers = self.commits.changes.load(Ordering::Acquire);
        let sealed = self.seal()?;
        if sealed.is_empty() {
            let result = match self.commits.covered.load(Ordering::Acquire) == covers {
                true => Ok(()),
                false => self.flush_storage().await,
            };
            return self.settle(sealed, covers, result);
        }
        let result = self.write_sealed(&sealed).await;
        self.settle(sealed, covers, result)
    }

    /// Copies what is dirty, in the order that the module gives.
    fn seal(&self) -> Result<Sealed> {
        let freed = std::mem::take(&mut *lock(&self.commits.freed));
        let l1 = self.seal_l1();
        let dirty = std::mem::take(&mut *lock(&self.dirty));
        let mut pages = Vec::with_capacity(dirty.len());
        for page in dirty.into_values() {
            let place = self.page_place(page.number())?.expect("a changed page has a table");
            let bytes = page.seal();
            pages.push((page, place.start(), bytes));
        }
        pages.sort_by_key(|(_, at, _)| *at);
        let refcounts = self.refcounts().seal();
        Ok(Sealed { freed, l1, pages, refcounts })
    }

    fn seal_l1(&self) -> Vec<(ImageOffset, Vec<u8>, Vec<usize>)> {
        let dirty = std::mem::take(&mut *lock(&self.l1.dirty));
        let mut sectors: Vec<(ImageOffset, Vec<u8>, Vec<usize>)> = Vec::new();
        let mut last = None;
        for index in dirty {
            let sector = index / L1_SECTOR_ENTRIES;
            if last == Some(sector) {
                sectors.last_mut().expect("there is one").2.push(index);
                continue;
            }
            last = Some(sector);
            let first = sector * L1_SECTOR_ENTRIES;
            let end = self.l1.entries.len().min(first + L1_SECTOR_ENTRIES);
            let mut bytes = vec![0; (end - first) * 8];
            for (i, entry) in self.l1.entries[first..end].iter().enumerate() {
                put64(&mut bytes, i * 8, entry.load(Ordering::Acquire));
            }
            sectors.push((self.l1.at + first as u64 * 8, bytes, vec![index]));
        }
        sectors
    }

    async fn write_sealed(&self, sealed: &Sealed) -> Result<()> {
        let refcounts = &sealed.refcounts;
        let moved = refcounts.moved_to;
        // Stage 1.
        let pages = refcounts.pages.iter().map(|(_, at, bytes)| (*at, &bytes[..]));
        let table = refcounts.table.iter().map(|(at, bytes)| (*at, &bytes[..]));
        let with_pages = moved.is_some().then(|| table.clone()).into_iter().flatten();
        self.write_all(pages.chain(with_pages), "refcounts").await?;
        self.flush_storage().await?;
        // Stage 2.
        if let Some(place) = moved {
            self.change_header(|header| header.set_refcount_table(place)).await?;
            self.flush_storage().await?;
        } else if !refcounts.table.is_empty() {
            self.write_all(table, "the refcount table").await?;
            self.flush_storage().await?;
        }
        // Stage 3.
        if sealed.has_mapping() {
            let l1 = sealed.l1.iter().map(|(at, bytes, _)| (*at, &bytes[..]));
            let pages = sealed.pages.iter().map(|(_, at, bytes)| (*at, &bytes[..]));
            self.write_all(l1.chain(pages), "the mapping").await?;
            self.flush_storage().await?; // commit point
        }
        Ok(())
    }

    async fn write_all<'a>(
        &self,
        parts: impl Iterator<Item = (ImageOffset, &'a [u8])>,
        what: &str,
    ) -> Result<()> {
        let mut parts = parts.peekable();
        while parts.peek().is_some() {
            let mut batch: Vec<LocalFuture<'_, Result<()>>> = Vec::new();
            while let Some((at, bytes)) = parts.next().filter(|_| batch.len() < WRITES_AT_ONCE) {
                // Neighbours go out as one write.
                let mut data = Buffer::copy_of(bytes);
                while let Some((_, next)) = parts.next_if(|(next, _)| *next == at + data.len() as u64) {
                    data.append(Buffer::copy_of(next));
                }
                batch.push(self.metadata.write(at, data));
                if batch.len() == WRITES_AT_ONCE {
                    break;
                }
            }
            try_join_all(batch).await.context(|| format!("{}: can't write {what}", self.name))?;
        }
        Ok(())
    }

    /// Makes durable what was written to the image and to its data file. A failure stops the image.
    pub(crate) async fn flush_storage(&self) -> Result<()> {
        let flushed = match self.has_data_file {
            true => try_join_all([self.data.flush(), self.metadata.flush()]).await.map(drop),
            false => self.data.flush().await,
        };
        flushed.map_err(|error| {
            let why = error.context(format!("{}: a host flush failed; reopen the image", self.name));
            let why = why.with_kind(ErrorKind::Poisoned);
            self.state.stop(why.clone());
            why
        })
    }

    /// Takes note of how the commit ended.
    fn settle(&self, sealed: Sealed, covers: u64, result: Result<()>) -> Result<()> {
        let failed = result.is_err();
        for (page, _, _) in &sealed.pages {
            page.written(failed, || self.list_dirty(page));
        }
        let Sealed { freed, l1, mut refcounts, .. } = sealed;
        let old_tables = if failed { Vec::new() } else { std::mem::take(&mut refcounts.old_tables) };
        self.refcounts().written(refcounts, failed);
        if failed {
            lock(&self.l1.dirty).extend(l1.into_iter().flat_map(|(_, _, indexes)| indexes));
            lock(&self.commits.freed).extend(freed);
            return result;
        }
        self.commits.covered.fetch_max(covers, Ordering::AcqRel);
        // The old places of the refcount table were named by the header until now.
        let freed: Vec<ImageSpan> = freed.into_iter().chain(old_tables).collect();
        if !freed.is_empty() {
            lock(&self.commits.quarantine).push_back((self.epochs.now(), freed));
        }
        Ok(())
    }

    /// Gives back the clusters that were freed durably and that nobody can be using any more. Must not be called from
    /// inside an epoch if it is to get anywhere. Tells whether any was given back.
    pub(crate) async fn give_back_freed(&self) -> Result<bool> {
        let mut any = false;
        loop {
            let batch = {
                let mut quarantine = lock(&self.commits.quarantine);
                match quarantine.front() {
                    Some((stamp, _)) if self.epochs.has_passed(*stamp) => quarantine.pop_front(),
                    _ => None,
                }
            };
            let Some((stamp, mut spans)) = batch else { return Ok(any) };
            while let Some(span) = spans.pop() {
                let Err((rest, error)) = self.give_back_span(span).await else {
                    any = true;
                    continue;
                };
                if error.kind() == ErrorKind::Corrupt {
                    self.state.stop(error.clone());
                    return Err(error);
                }
                spans.push(rest); // it will be tried again
                lock(&self.commits.quarantine).push_front((stamp, spans));
                return Err(error);
            }
        }
    }

    /// Lowers the refcount of each cluster that holds a byte of the run, and punches them if all become free. On
    /// failure tells what is left to do.
    async fn give_back_span(&self, span: ImageSpan) -> Result<(), (ImageSpan, Error)> {
        let wide = self.cluster.widen(span);
        let mut sole = true;
        for cluster in self.cluster.clusters_in(wide) {
            let count = self.with_refcounts(|refcounts| refcounts.get(cluster.index())).await;
            sole &= count.map_err(|error| (wide, error))? == 1;
        }
        // Punched before the refcount is lowered: from then on somebody else may write there.
        let punched = sole
            && self.metadata.limits().fast_zeroes
            && self.metadata.write_zeroes(wide, Zeroes::MayUnmap).await.is_ok();
        self.commits.note_change();
        for cluster in self.cluster.clusters_in(wide) {
            let released = self.with_refcounts(|refcounts| refcounts.release(cluster.index(), punched)).await;
            let rest = ImageSpan::between(self.cluster.start_of(cluster), wide.end());
            released.map_err(|error| (rest, error))?;
        }
        Ok(())
    }

    /// Marks the image as being written, before its first change: sets the dirty bit (version 3), so that whoever opens
    /// it after a crash repairs the refcounts, and clears the autoclear bits of what this program does not keep up.
    pub(crate) async fn begin_change(&self) -> Result<()> {
        if self.is_marked.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut marked = self.marked.lock().await;
        if *marked {
            return Ok(());
        }
        if let Some(end) = { self.refcounts().end() } {
            self.reach(end).await?;
        }
        if lock(&self.header).version() >= 3 {
            self.change_header(|header| {
                let autoclear = header.autoclear & autoclear::KEPT;
                header.set_features(header.incompatible | incompatible::DIRTY, autoclear);
            })
            .await?;
            self.flush_storage().await?;
        }
        *marked = true;
        self.is_marked.store(true, Ordering::Release);
        Ok(())
    }

    /// Writes a changed header; in memory it changes when the write has succeeded. Not durable before the next flush.
    async fn change_header(&self, change: impl FnOnce(&mut super::header::Header)) -> Result<()> {
        let mut new = lock(&self.header).clone();
        change(&mut new);
        let sector = new.first_sector();
        self.metadata
            .write(ImageOffset::ZERO, sector)
            .await
            .context(|| format!("{}: can't write the header", self.name))?;
        *lock(&self.header) = new;
        Ok(())
    }

    /// Everything home, everything freed given back, and the dirty bit cleared.
    pub(crate) async fn close_image(&self) -> Result<()> {
        if !self.state.close() || self.geometry.read_only {
            return Ok(());
        }
        self.state.check_stopped()?;
        loop {
            self.commit().await?;
            if !self.give_back_freed().await? {
                break;
            }
        }
        let was_marked = *self.marked.lock().await;
        if let Some(end) = { self.refcounts().end() }.filter(|end| was_marked && *end < self.metadata.len()) {
            self.metadata
                .set_len(end)
                .await
                .context(|| format!("{}: can't cut the file to its end", self.name))?;
        }
        if was_marked && lock(&self.header).version() >= 3 {
            // Commit point of the clean close: what the bit stands for was flushed above.
            self.change_header(|header| {
                header.set_features(header.incompatible & !incompatible::DIRTY, header.autoclear);
            })
            .await?;
            self.flush_storage().await?;
        }
        Ok(())
    }
}
