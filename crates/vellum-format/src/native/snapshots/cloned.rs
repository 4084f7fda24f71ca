//! Snapshots on which clones stand.
//!
//! ```text
//!   first clone   superblock: there may be clones ─ flush ─► flag of the snapshot ── commit ──► the clone's file
//!   deletion      the flag is set ► refused
//!   release       clones that are open here: refused; else no flag ── commit
//! ```
//!
//! 1. The flag is durable before the first clone exists. So a crash leaves, at worst, a snapshot that cannot be
//!    deleted until it is released, and never a clone whose snapshot can be.
//! 2. A flag and a deletion exclude each other: each is set in a transaction, under the lock of the list, that
//!    finds the other one absent.
//! 3. The image does not know where the clones are, or how many there are. The user says when the last one is
//!    gone.

use vellum_core::{Context, Error, ErrorKind, Result};

use super::super::image::Native;
use super::list::{CLONED, Entry, FLAGS_WORD};
use super::{Snapshot, public_of};
use crate::engine::Commit as _;
use crate::state::lock;

impl Entry {
    /// Why it cannot be deleted, if clones stand on it.
    pub(super) fn refuse_cloned(&self) -> Result<()> {
        match self.is_cloned {
            false => Ok(()),
            true => Err(Error::new(
                ErrorKind::Refused,
                "clones stand on it: remove them, or make them independent with `vellum flatten`, and then release \
                 the snapshot with `vellum snapshot release`",
            )),
        }
    }
}

impl Native {
    /// Records that clones stand on the snapshot of this number or name: from now on it cannot be deleted. That
    /// is durable when this returns. Requests continue meanwhile.
    ///
    /// # Errors
    /// `NotFound` when there is none, and the errors of the storage.
    pub async fn snapshot_mark_cloned(&self, wanted: &str) -> Result<Snapshot> {
        let context = || format!("{}: can't make clones of snapshot {wanted}", self.engine.name);
        self.set_cloned(wanted, true).await.context(context)
    }

    /// Records that no clone stands on the snapshot any more, so that it can be deleted.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Locked` when it is open beside the disk, and the errors of the storage.
    pub async fn snapshot_release(&self, wanted: &str) -> Result<Snapshot> {
        let context = || format!("{}: can't release snapshot {wanted}", self.engine.name);
        self.set_cloned(wanted, false).await.context(context)
    }

    async fn set_cloned(&self, wanted: &str, is_cloned: bool) -> Result<Snapshot> {
        let views = self.views()?;
        self.engine.state.check_open()?;
        if lock(&views.list).find(wanted)?.is_cloned != is_cloned {
            self.begin_journal().await?;
            if is_cloned {
                self.say_that_there_are_clones().await?;
            }
        }
        let snapshot = loop {
            let (id, index) = {
                let list = lock(&views.list);
                let entry = list.find(wanted)?;
                if entry.is_cloned == is_cloned {
                    break public_of(entry);
                }
                (entry.id, entry.index)
            };
            self.load_entry(index).await?;
            let _gate = self.enter_transaction(24).await?;
            let mut list = lock(&views.list);
            // Meanwhile it may have been deleted, and its entry may be another's.
            let found = list.get_mut(id).filter(|entry| entry.index == index && !entry.is_being_deleted);
            let Some(entry) = found else { continue };
            if !is_cloned && self.is_open_beside(id) {
                return Err(Error::new(
                    ErrorKind::Locked,
                    "it is being read, perhaps by a clone that is served",
                ));
            }
            self.put_word(index, FLAGS_WORD, if is_cloned { CLONED } else { 0 });
            entry.is_cloned = is_cloned;
            let snapshot = public_of(entry);
            self.engine.commits.note_change();
            break snapshot;
        };
        // Also where another task has set it: that may not be durable yet.
        self.commit().await?; // commit point
        Ok(snapshot)
    }

    /// Sets the feature bit: a program that does not know the flag would delete such snapshots.
    async fn say_that_there_are_clones(&self) -> Result<()> {
        let mut superblocks = self.superblocks.lock().await;
        if superblocks.superblock.has_clones {
            return Ok(());
        }
        superblocks.superblock.has_clones = true;
        if let Err(error) = superblocks.write(&*self.metadata).await {
            superblocks.superblock.has_clones = false;
            return Err(error);
        }
        self.flush_storage().await
    }
}
