//! Deleting a snapshot while requests continue.
//!
//! ```text
//!   flag ── commit ──► each copy: the snapshot before has none ► passed on to it
//!                                  it has one, or there is none ► freed, with units that nothing else names
//!                 ──► no copy is left: the one before relies on the next; the entry is free ── commit
//! ```
//!
//! From the flag's commit point on no page is kept for the snapshot and no unit is copied for it. So the
//! steps come to an end, however much is written meanwhile. This does not hold earlier: a crash before would
//! bring the snapshot back.
//!
//! What the snapshot before sees is the same after each step, so the steps may take any number of
//! transactions. A crash leaves the flag, and the next opening continues. The same happens when the server is
//! asked to end.
//!
//! Snapshots may be made meanwhile. They come at the end of the chain, which these steps do not touch.

use std::future::poll_fn;
use std::task::Poll;

use vellum_core::{Buffer, Context, Error, ErrorKind, ImageOffset, Result};

use super::super::geometry::SNAPSHOTS;
use super::super::image::Native;
use super::list::{BEING_DELETED, ENTRY_WORDS, FLAGS_WORD, HOME, word};
use super::{Ordering, Views};
use crate::engine::Commit as _;
use crate::perturb;
use crate::state::lock;

/// The bytes of a record that freeing a copy takes, at most.
const FREED_BYTES: u64 = 2 * 24;

/// Steps that find everything in memory would otherwise keep a worker busy until the last of them.
async fn let_others_go_on() {
    perturb::point();
    let mut is_second = false;
    poll_fn(|context| {
        if std::mem::replace(&mut is_second, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl Native {
    /// Deletes the snapshot of this number or name. When this returns, the snapshot is durably gone and the
    /// space that only it used is free. Requests continue meanwhile.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Locked` when it is open beside the disk, `Refused` when clones stand on it, `Closed` when the deletion
    /// was stopped half way, and the errors of the storage.
    pub async fn snapshot_delete(&self, wanted: &str) -> Result<()> {
        let context = || format!("{}: can't delete snapshot {wanted}", self.engine.name);
        self.delete_inner(wanted).await.context(context)
    }

    async fn delete_inner(&self, wanted: &str) -> Result<()> {
        let views = self.views()?;
        let _one = views.deleting.lock().await;
        self.engine.state.check_open()?;
        let (id, index) = {
            let list = lock(&views.list);
            let entry = list.find_for_change(wanted)?;
            entry.refuse_cloned()?;
            (entry.id, entry.index)
        };
        self.begin_journal().await?;
        self.load_entry(index).await?;
        {
            let _gate = self.enter_transaction(24).await?;
            let mut list = lock(&views.list);
            let entry = list.get_mut(id).expect("as just found");
            // Clones may have been made meanwhile.
            entry.refuse_cloned()?;
            if self.is_open_beside(id) {
                return Err(Error::new(ErrorKind::Locked, "it is being read"));
            }
            self.put_word(index, FLAGS_WORD, BEING_DELETED);
            entry.is_being_deleted = true;
        }
        self.engine.commits.note_change();
        self.commit().await?; // commit point: from here on it is gone
        self.release_deleted(views);
        self.finish_delete(views, id).await
    }

    /// Continues the deletions that an earlier opening began.
    pub(in crate::native) async fn finish_deletes(&self) -> Result<()> {
        let views = self.views()?;
        let _one = views.deleting.lock().await;
        let flagged: Vec<u32> = {
            let list = lock(&views.list);
            list.entries.iter().filter(|entry| entry.is_being_deleted).map(|entry| entry.id).collect()
        };
        for id in flagged {
            self.begin_journal().await?;
            self.finish_delete(views, id).await?;
        }
        Ok(())
    }

    /// Stops a running deletion where it is, with an error. The next opening continues it. To be called when
    /// the disk is about to be closed.
    pub fn stop_deleting(&self) {
        if let Some(views) = &self.views {
            views.is_ending.store(true, Ordering::Release);
        }
    }

    /// As above, for the close of the disk: the deletion has stopped when this returns, and no other one runs
    /// while the returned guard lives. A step after the journal's end would be in no record.
    pub(in crate::native) async fn end_deleting(&self) -> Option<async_lock::MutexGuard<'_, ()>> {
        self.stop_deleting();
        match &self.views {
            Some(views) => Some(views.deleting.lock().await),
            None => None,
        }
    }

    /// Snapshots that are durably being deleted need no copies any more.
    fn release_deleted(&self, views: &Views) {
        let mut held = lock(&views.copies);
        held.keepers = lock(&views.list).keepers();
    }

    async fn finish_delete(&self, views: &Views, id: u32) -> Result<()> {
        loop {
            if views.is_ending.load(Ordering::Acquire) {
                return Err(Error::new(
                    ErrorKind::Closed,
                    "the server is shutting down; the deletion continues when the image is next opened",
                ));
            }
            let_others_go_on().await;
            let before = { lock(&views.list).before(id).map(|entry| entry.id) };
            let next = {
                let held = lock(&views.copies);
                let page = held.copies.pages_of(id).next();
                page.map(|page| {
                    let is_passed_on = before.is_some_and(|before| !held.copies.has(before, page));
                    let at = held.copies.copy(id, page).expect("as just found").start();
                    (page, is_passed_on, at)
                })
            };
            match next {
                Some((page, true, _)) => {
                    let _gate = self.enter_transaction(FREED_BYTES).await?;
                    let mut held = lock(&views.copies);
                    held.copies.pass_on(page, id, before.expect("it is passed on"));
                }
                Some((page, false, at)) => self.free_copy(views, id, page, at).await?,
                None if self.free_entry(views, id).await? => break,
                None => {}
            }
        }
        self.engine.commits.note_change();
        self.commit().await
    }

    async fn free_copy(&self, views: &Views, id: u32, page: u64, at: ImageOffset) -> Result<()> {
        let bytes = self.metadata.read(at, Buffer::for_overwrite(4096)).await?;
        let _gate = self.enter_transaction(FREED_BYTES).await?;
        let mut held = lock(&views.copies);
        for (index, unit) in held.copies.remove(id, page, bytes.slice(), self.engine.commits.records()) {
            if !self.home_names(index, unit) {
                self.free(unit);
            }
        }
        Ok(())
    }

    /// Whether home's entry for a unit of the disk names this unit. All pages of the table that are not zero
    /// are in memory.
    fn home_names(&self, index: u64, unit: u32) -> bool {
        let at = self.places.entry_place(index);
        let word = self.home.word(ImageOffset::new(at.bytes() & !7));
        let number = usize::from(!index.is_multiple_of(2));
        word.is_ok_and(|word| self.places.units_in(word)[number] == unit)
    }

    /// Frees the entry, unless there are copies again.
    async fn free_entry(&self, views: &Views, id: u32) -> Result<bool> {
        let _one = views.changing.lock().await;
        let (index, next, before) = {
            let list = lock(&views.list);
            let entry = list.get(id).expect("it is being deleted");
            (entry.index, entry.next, list.before(id).map(|before| (before.index, before.id)))
        };
        self.load_entry(index).await?;
        self.load_entry(SNAPSHOTS - 1).await?;
        if let Some((before, _)) = before {
            self.load_entry(before).await?;
        }
        let _alone = self.enter_alone(512).await?;
        let mut held = lock(&views.copies);
        let has_copies = held.copies.pages_of(id).next().is_some();
        debug_assert!(!has_copies, "no page is kept for one that is being deleted");
        if has_copies {
            return Ok(false);
        }
        let mut list = lock(&views.list);
        for at in 0..ENTRY_WORDS {
            self.put_word(index, at, 0);
        }
        if let Some((before, before_id)) = before {
            self.put_word(before, 0, word(before_id, next));
            list.get_mut(before_id).expect("as just found").next = next;
        }
        if next == HOME {
            list.relies_on_home = before.map_or(0, |(_, id)| id);
        }
        list.entries.retain(|entry| entry.id != id);
        held.keepers = list.keepers();
        self.put_last(&list);
        views.any.store(!list.entries.is_empty(), Ordering::SeqCst);
        Ok(true)
    }

    /// Takes empty map units out of the chain. To be called before a record has words of them.
    pub(in crate::native) async fn drop_empty_map_units(&self) -> Result<()> {
        const AT_MOST: usize = 16;
        let Some(views) = &self.views else { return Ok(()) };
        if lock(&views.copies).copies.first() == 0 {
            return Ok(());
        }
        self.load_entry(SNAPSHOTS - 1).await?;
        let _gate = self.enter_transaction(24 * (AT_MOST as u64 + 2)).await?;
        let mut held = lock(&views.copies);
        let dropped = held.copies.drop_empty(AT_MOST);
        if dropped.is_empty() {
            return Ok(());
        }
        let mut list = lock(&views.list);
        list.first_map_unit = held.copies.first();
        self.put_last(&list);
        for unit in dropped {
            self.free(unit);
        }
        Ok(())
    }
}
