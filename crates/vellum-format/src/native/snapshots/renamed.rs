//! Another name for a snapshot.
//!
//! ```text
//!   words of the name in its entry of the list ── one transaction, commit
//! ```
//!
//! 1. A crash leaves the old name or the new one, whole: all words change in one transaction.
//! 2. Clones name their snapshot. One on which they stand keeps its name, so that they are opened.
//! 3. No two snapshots get one name: it is looked for under the lock of the list, in the step that gives it.

use vellum_core::{Context, Error, ErrorKind, Result};

use super::super::image::Native;
use super::list::{NAME_WORD, name_words};
use super::{Snapshot, check_name, public_of};
use crate::engine::Commit as _;
use crate::session::must_be_drained;
use crate::state::lock;

/// What the words of a name take in a record.
const NAME_COST: u64 = 192;

impl Native {
    /// Gives the snapshot of this number or name another name, durably. Requests continue meanwhile.
    ///
    /// # Errors
    /// `NotFound` when there is none, `Invalid` for a name that is taken or not allowed, `Refused` when clones stand on it, and
    /// the errors of the storage.
    pub async fn snapshot_rename(&self, wanted: &str, name: &str) -> Result<Snapshot> {
        let context = || format!("{}: can't rename snapshot {wanted}", self.engine.name);
        self.rename_inner(wanted, name).await.context(context)
    }

    async fn rename_inner(&self, wanted: &str, name: &str) -> Result<Snapshot> {
        let views = self.views()?;
        self.engine.state.check_open()?;
        check_name(name)?;
        must_be_drained(&self.engine.name, self.superblocks.lock().await.superblock.session())?;
        if lock(&views.list).find_for_change(wanted)?.name != name {
            self.begin_journal().await?;
        }
        let snapshot = loop {
            let (id, index) = {
                let list = lock(&views.list);
                let entry = list.find_for_change(wanted)?;
                if entry.name == name {
                    break public_of(entry);
                }
                (entry.id, entry.index)
            };
            self.load_entry(index).await?;
            let _gate = self.enter_transaction(NAME_COST).await?;
            let mut list = lock(&views.list);
            if list.entries.iter().any(|entry| entry.name == name && !entry.is_being_deleted) {
                return Err(Error::invalid(format!("there is a snapshot named {name} already")));
            }
            // Meanwhile it may have been deleted, and its entry may be another's.
            let found = list.get_mut(id).filter(|entry| entry.index == index && !entry.is_being_deleted);
            let Some(entry) = found else { continue };
            if entry.is_cloned {
                return Err(Error::new(
                    ErrorKind::Refused,
                    "clones stand on it, and they name it: remove them, or make them independent with `vellum flatten`, and \
                     then release the snapshot with `vellum snapshot release`",
                ));
            }
            for (at, value) in (NAME_WORD..).zip(name_words(name)) {
                self.put_word(index, at, value);
            }
            name.clone_into(&mut entry.name);
            let snapshot = public_of(entry);
            self.engine.commits.note_change();
            break snapshot;
        };
        // Also where another task has done it: that may not be durable yet.
        self.commit().await?; // commit point
        Ok(snapshot)
    }
}
