//! Internal snapshots: views of bitmap, masks and table that no longer change.
//!
//! ```text
//!   create   one entry of the list, in one transaction; no page is copied                  mod.rs, list.rs
//!   from then on, before a page of home changes for the first time: old bytes are kept  keep.rs, copies.rs
//!                before bytes change in a unit that a snapshot sees: it is copied, the disk gets the copy
//!   delete   a flag ► copies passed on to the snapshot before, or freed with their units   delete.rs
//!                   ► the entry
//!   revert   a mark ► the pages of home become what the snapshot sees ► the size ► no mark revert.rs
//!   clone    a flag: it cannot be deleted while clones stand on it                        cloned.rs
//!   rename   the words of its name                                                        renamed.rs
//!   open     pages are looked up along the chain                                           still.rs
//!            the same beside the disk, while that is written                               live.rs
//! ```
//!
//! 1. A snapshot sees of a page the copy that it has, else the copy of the next snapshot in its chain, and so
//!    on, with home at the end. So no copy is made of a page that does not change, and a copy serves all
//!    snapshots before it.
//! 2. A unit belongs to a snapshot when a copy of a table page names it, or when home names it in a page that
//!    was not kept for the snapshot that relies on home. Before an entry changes its page is kept. So a unit
//!    that home releases is counted by then: it is free when no copy names it.
//! 3. The moment of a snapshot is the gate held alone. A request in flight at that moment may be in it or
//!    not. The copy of a unit waits until all requests that may still write to the unit have left, and checks
//!    again before it counts (`keep.rs`, 3).
//! 4. A unit becomes held only together with a new stamp: when a snapshot is made, or a zone is to be
//!    emptied. Deletion releases units and makes none held: from its commit point on nothing is kept for
//!    the snapshot that is deleted, and what its copies kept stays kept.
//! 5. Lock order: the journal's gate, then the copies, then pages of home. The list also comes after the
//!    gate.
//!
//! What a writer keeps in memory of all this is in `views.rs`.

mod cloned;
mod copies;
mod delete;
mod keep;
mod list;
mod live;
mod released;
mod renamed;
mod revert;
pub(super) mod still;
pub(super) mod views;

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use vellum_core::{Context, Error, ErrorKind, ImageOffset, Result, SharedStorage};

use super::geometry::{Bits, Region, SNAPSHOTS};
use super::image::Native;
use super::superblock::Superblocks;
use crate::engine::Commit as _;
use crate::session::must_be_drained;
use crate::state::lock;
use list::{ENTRY_WORDS, Entry, FLAGS_WORD, HOME, List, NAME_MAX, NAME_WORD, name_words, word, word_of};
pub use revert::revert;
use views::{Held, Views};

/// The page of home that contains this word.
pub(super) fn page_of(word: ImageOffset) -> u64 {
    word.bytes() & !4095
}

/// A snapshot, as it is reported to callers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its number, which is never used again.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The size of the disk at that time, in bytes.
    pub size: u64,
    /// When it was made, in seconds since 1970.
    pub seconds: u64,
    /// Whether clones stand on it, so that it cannot be deleted.
    pub is_cloned: bool,
}

impl Native {
    pub(super) fn views(&self) -> Result<&Views> {
        self.engine.check_change(Some(vellum_core::GuestOffset::ZERO.span(0)))?;
        self.views.as_ref().ok_or_else(|| {
            Error::unsupported(format!(
                "{}: snapshots need layout=zoned or layout=table; a linear image has none",
                self.engine.name
            ))
        })
    }

    /// All snapshots, in the order in which they were made.
    ///
    /// # Errors
    /// `Unsupported` when the image cannot have any, `ReadOnly` when it is open read-only.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        Ok(public(&lock(&self.views()?.list)))
    }

    /// Makes a snapshot of the disk as it is now, and returns its number. Every write that has returned is in
    /// it. It is durable when this returns. Requests continue meanwhile.
    ///
    /// # Errors
    /// `Unsupported` in `linear`, `Invalid` for a name that is taken or not allowed, and the errors of the
    /// storage.
    pub async fn snapshot_create(&self, name: &str, now_seconds: u64) -> Result<u32> {
        let context = || format!("{}: can't create snapshot {name}", self.engine.name);
        self.create_inner(name, now_seconds).await.context(context)
    }

    async fn create_inner(&self, name: &str, now_seconds: u64) -> Result<u32> {
        let views = self.views()?;
        check_name(name)?;
        let _one = views.changing.lock().await;
        {
            let superblocks = self.superblocks.lock().await;
            must_be_drained(&self.engine.name, superblocks.superblock.session())?;
            if superblocks.superblock.has_moved {
                return Err(Error::unsupported(
                    "units of the disk are on its fast medium alone, where a snapshot does not see them: bring them back \
                     first (`vellum tier move --back`)",
                ));
            }
        }
        let (index, id, before) = {
            let list = lock(&views.list);
            if list.entries.iter().any(|entry| entry.name == name && !entry.is_being_deleted) {
                return Err(Error::invalid("a snapshot with this name already exists"));
            }
            let taken: BTreeSet<u64> = list.entries.iter().map(|entry| entry.index).collect();
            let Some(index) = (0..SNAPSHOTS - 1).find(|index| !taken.contains(index)) else {
                return Err(Error::new(
                    ErrorKind::NoSpace,
                    format!("there are already {} snapshots", SNAPSHOTS - 1),
                ));
            };
            if list.next_id >= HOME - 1 {
                return Err(Error::new(ErrorKind::NoSpace, "all snapshot IDs have been used"));
            }
            (index, list.next_id, list.get(list.relies_on_home).map(|entry| (entry.index, entry.id)))
        };
        self.begin_journal().await?;
        self.say_that_there_are_snapshots().await?;
        self.load_entry(index).await?;
        self.load_entry(SNAPSHOTS - 1).await?;
        if let Some((before, _)) = before {
            self.load_entry(before).await?;
        }
        let size = self.engine.geometry.size;
        let _paused = self.pause_embedding();
        {
            let _alone = loop {
                // From then on units lie under a snapshot, so the table must have all entries before.
                self.record_all().await?;
                let alone = self.enter_alone(512).await?;
                if self.all_recorded() {
                    break alone;
                }
            };
            let mut held = lock(&views.copies);
            let mut list = lock(&views.list);
            self.put_word(index, 0, word(id, HOME));
            self.put_word(index, 1, size);
            self.put_word(index, 2, now_seconds);
            self.put_word(index, 3, 0);
            self.put_word(index, FLAGS_WORD, 0);
            for (at, value) in (NAME_WORD..).zip(name_words(name)) {
                self.put_word(index, at, value);
            }
            if let Some((before, before_id)) = before {
                self.put_word(before, 0, word(before_id, id));
                list.get_mut(before_id).expect("as just found").next = id;
            }
            list.relies_on_home = id;
            list.next_id = id + 1;
            list.entries.push(Entry {
                index,
                id,
                next: HOME,
                size,
                seconds: now_seconds,
                is_being_deleted: false,
                is_cloned: false,
                name: name.to_owned(),
            });
            self.put_last(&list);
            held.keepers = list.keepers();
            views.any.store(true, Ordering::SeqCst);
            // Writers that looked before may still write to units that the snapshot now sees.
            self.stamp(views, &mut held);
        }
        self.engine.commits.note_change();
        self.commit().await?; // commit point
        Ok(id)
    }

    /// Records that units become held. This is the only way in which that happens. Writers that looked before
    /// hold nothing but their epoch, so the copy of a unit waits until they have left.
    fn stamp(&self, views: &Views, held: &mut Held) {
        held.released.forget();
        views.stamp.store(self.engine.epochs.now() + 1, Ordering::Release);
    }

    /// Sets the feature bit: a program that does not know snapshots must not open the image from now on.
    async fn say_that_there_are_snapshots(&self) -> Result<()> {
        let mut superblocks = self.superblocks.lock().await;
        if superblocks.superblock.has_snapshots {
            return Ok(());
        }
        superblocks.superblock.has_snapshots = true;
        if let Err(error) = superblocks.write(&*self.metadata).await {
            superblocks.superblock.has_snapshots = false;
            return Err(error);
        }
        self.flush_storage().await
    }

    /// Loads the page of an entry of the list, and makes sure that the host has space for it.
    async fn load_entry(&self, index: u64) -> Result<()> {
        let bits = Bits { word: word_of(&self.places, index, 0), shift: 0, width: 1 };
        self.find(|| self.home.get(bits)).await?;
        self.reserve(&[bits.word]).await
    }

    /// Changes a word of an entry of the list. The caller holds the gate.
    fn put_word(&self, index: u64, at: u64, value: u64) {
        debug_assert!(at < ENTRY_WORDS);
        self.home.change(word_of(&self.places, index, at), |_| value);
    }

    /// Writes the last entry. The caller holds the gate.
    fn put_last(&self, list: &List) {
        self.put_word(SNAPSHOTS - 1, 0, word(list.first_map_unit, list.relies_on_home));
        self.put_word(SNAPSHOTS - 1, 1, word(list.next_id, list.reverts_to));
    }

    /// Enters the open transaction with all other changes kept out.
    async fn enter_alone(&self, cost: u64) -> Result<std::sync::RwLockWriteGuard<'_, ()>> {
        let journal = self.journal().expect("the journal has begun");
        loop {
            self.engine.state.check_stopped()?;
            let alone = journal.alone();
            let before = self.open_bytes.fetch_add(cost, Ordering::AcqRel);
            if before + cost <= self.record_max() / 4 {
                return Ok(alone);
            }
            self.open_bytes.fetch_sub(cost, Ordering::AcqRel);
            drop(alone);
            self.commit().await?;
        }
    }
}

/// Refuses what cannot be a name.
fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > NAME_MAX || name.contains(char::is_control) {
        return Err(Error::invalid(format!(
            "{name:?} cannot be the name of a snapshot: a name has 1 to {NAME_MAX} bytes and no control characters"
        )));
    }
    Ok(())
}

fn public(list: &List) -> Vec<Snapshot> {
    let there = list.entries.iter().filter(|entry| !entry.is_being_deleted);
    let mut snapshots: Vec<Snapshot> = there.map(public_of).collect();
    snapshots.sort_unstable_by_key(|snapshot| snapshot.id);
    snapshots
}

fn public_of(entry: &Entry) -> Snapshot {
    Snapshot {
        id: entry.id,
        name: entry.name.clone(),
        size: entry.size,
        seconds: entry.seconds,
        is_cloned: entry.is_cloned,
    }
}

/// The snapshots of a closed image, in the order in which they were made.
///
/// # Errors
/// `Unsupported` when the journal must be replayed first, `Corrupt` when the list is invalid, and the errors
/// of the storage.
pub async fn snapshots(image: &SharedStorage) -> Result<Vec<Snapshot>> {
    let superblock = Superblocks::read(&**image).await?.superblock;
    if superblock.needs_replay() {
        return Err(superblock.replay_first(image.name()));
    }
    let places = superblock.places();
    if !superblock.has_snapshots() || !places.shape().layout.has_table() {
        return Ok(Vec::new());
    }
    debug_assert!(!places.region(Region::Snapshots).is_empty());
    Ok(public(&List::read(&**image, &places).await?))
}
