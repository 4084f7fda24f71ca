//! Internal snapshots: views of bitmap, masks and table that no longer change.
//!
//! ```text
//!   create   one entry of the list, in one transaction; no page is copied                              mod.rs, list.rs
//!   from then on, before a page of home changes for the first time: its old bytes are kept             keep.rs, copies.rs
//!                 before bytes change in a unit that a snapshot sees: the unit is copied, the disk gets the copy
//!   delete   a flag ► copies passed on to who relies on it, or freed with their units ► the entry       delete.rs
//!   revert   a mark ► the pages of home become what the snapshot sees ► the size ► no mark              revert.rs
//!   open     pages are looked up along the chain                                                        view.rs
//!            the same beside the disk, while that is written                                            live.rs
//! ```
//!
//! 1. A snapshot sees a page: the copy that it has, else the one of the next snapshot in its chain, and so on; home at the end.
//!    So no copy is made for a page that does not change, and a copy serves all snapshots before it.
//! 2. A unit belongs to a snapshot when a copy of a page of the table names it, or when home names it in a page that was not
//!    kept for the snapshot that relies on home. Before an entry changes its page is kept, so what home lets go of is counted
//!    by then: it is free when no copy names it.
//! 3. The moment of a snapshot is the gate held alone. What was in flight then may be in it or not; whoever copies a unit waits
//!    until those who may still write to it have left, and looks again before the copy counts (`keep.rs`, 3).
//! 4. Lock order: the journal's gate, then the copies, then pages of home. The list comes after the gate, too.

mod copies;
mod delete;
mod keep;
mod list;
mod live;
mod revert;
mod view;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, Weak};

use vellum_core::{Context, Error, ErrorKind, ImageOffset, Result, SharedStorage};

use super::geometry::{Bits, Places, Region, SNAPSHOTS};
use super::image::Native;
use super::superblock::Superblocks;
use crate::hash::HashMap;
use crate::state::lock;
use copies::Copies;
use list::{ENTRY_WORDS, Entry, FLAGS_WORD, HOME, List, NAME_MAX, NAME_WORD, name_words, word, word_of};
pub(super) use live::Live;
pub use revert::revert;
pub(super) use view::{Still, View, refuse_half_reverted};

/// A page of home, by the place of a word in it.
pub(super) fn page_of(word: ImageOffset) -> u64 {
    word.bytes() & !4095
}

/// A snapshot, for who wants to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its number; never used again.
    pub id: u32,
    /// What it is called.
    pub name: String,
    /// The size of the disk then, in bytes.
    pub size: u64,
    /// When it was made, in seconds since 1970.
    pub seconds: u64,
}

/// The snapshots of an image that is open for writing.
pub(super) struct Views {
    list: Mutex<List>,
    copies: Mutex<Held>,
    /// There are snapshots; looked at without a lock.
    any: AtomicBool,
    /// One keeps pages at a time.
    keeping: async_lock::Mutex<()>,
    /// One makes a snapshot, or takes an entry off the list, at a time.
    changing: async_lock::Mutex<()>,
    /// One deletes at a time. Snapshots are made meanwhile.
    deleting: async_lock::Mutex<()>,
    /// What was begun in the background is to stop where it is.
    is_ending: AtomicBool,
    /// Snapshots that are open beside the disk, by id. Locked after the list.
    open: Mutex<HashMap<u32, Weak<Native>>>,
    /// One more than the epoch in which the newest snapshot was made; 0 when none was since the image was opened.
    stamp: AtomicU64,
}

/// The copies, and for whom pages are kept now; changed together.
struct Held {
    copies: Copies,
    /// The snapshot that relies on home; 0: none.
    relies_on_home: u32,
}

impl Held {
    /// Whether this page of home may be changed as far as snapshots are concerned.
    fn is_kept(&self, page: u64) -> bool {
        self.relies_on_home == 0 || self.copies.has(self.relies_on_home, page)
    }
}

impl Views {
    pub(super) async fn read(image: &SharedStorage, places: &Places, has_snapshots: bool) -> Result<Self> {
        let (list, copies) = match has_snapshots {
            false => (List::empty(), Copies::new(*places)),
            true => {
                let list = List::read(&**image, places).await?;
                let ids: Vec<u32> = list.entries.iter().map(|entry| entry.id).collect();
                let copies = Copies::read(&**image, *places, list.first_map_unit, &ids, true).await?;
                (list, copies)
            }
        };
        Ok(Self {
            any: AtomicBool::new(!list.entries.is_empty()),
            copies: Mutex::new(Held { copies, relies_on_home: list.relies_on_home }),
            list: Mutex::new(list),
            keeping: Default::default(),
            changing: Default::default(),
            deleting: Default::default(),
            is_ending: AtomicBool::new(false),
            open: Default::default(),
            stamp: AtomicU64::new(0),
        })
    }

    /// Units that are in use because of snapshots.
    pub(super) fn units(&self) -> Vec<u32> {
        lock(&self.copies).copies.units().collect()
    }

    /// Whether home must not name the unit for this unit of the disk.
    pub(super) fn contradict(&self, index: u64, unit: u32) -> bool {
        self.any() && lock(&self.copies).copies.contradicts(index, unit)
    }

    /// While this lives no unit is held, or let go, and no copy of one comes to count.
    pub(super) fn hold(&self) -> impl Drop {
        lock(&self.copies)
    }

    pub(super) fn any(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }

    /// The index pages that have changed. The caller holds the gate alone.
    pub(super) fn seal(&self) -> Vec<super::home::SealedPage> {
        lock(&self.copies).copies.seal()
    }

    /// What was begun and not ended when the image was closed.
    pub(super) fn unfinished(&self) -> (bool, Vec<u32>) {
        let list = lock(&self.list);
        let deleted = list.entries.iter().filter(|entry| entry.is_being_deleted).map(|entry| entry.id);
        (list.reverts_to != 0, deleted.collect())
    }
}

impl Native {
    pub(super) fn views(&self) -> Result<&Views> {
        self.check_change(Some(vellum_core::GuestOffset::ZERO.span(0)))?;
        self.views.as_ref().ok_or_else(|| {
            Error::unsupported(format!("{}: snapshots need layout=table; a linear image has none", self.name))
        })
    }

    /// All snapshots, in the order in which they were made.
    ///
    /// # Errors
    /// `Unsupported` when the image cannot have any, `ReadOnly` when it is open for reading.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        Ok(public(&lock(&self.views()?.list)))
    }

    /// Makes a snapshot of the disk as it is now: every write that has returned is in it. It is durable when this returns. Gives
    /// its number. Requests go on meanwhile.
    ///
    /// # Errors
    /// `Unsupported` in `linear`, `Invalid` for a name that is taken or cannot be, and what the storage says.
    pub async fn snapshot_create(&self, name: &str, now_seconds: u64) -> Result<u32> {
        let context = || format!("{}: can't make snapshot {name}", self.name);
        self.create_inner(name, now_seconds).await.context(context)
    }

    async fn create_inner(&self, name: &str, now_seconds: u64) -> Result<u32> {
        let views = self.views()?;
        if name.is_empty() || name.len() > NAME_MAX || name.contains('\0') {
            return Err(Error::invalid(format!("a name has 1 to {NAME_MAX} bytes, none of them zero")));
        }
        let _one = views.changing.lock().await;
        let (index, id, before) = {
            let list = lock(&views.list);
            if list.entries.iter().any(|entry| entry.name == name && !entry.is_being_deleted) {
                return Err(Error::invalid("there is a snapshot of this name"));
            }
            let taken = |index: &u64| list.entries.iter().any(|entry| entry.index == *index);
            let Some(index) = (0..SNAPSHOTS - 1).find(|index| !taken(index)) else {
                return Err(Error::new(ErrorKind::NoSpace, format!("there are {} snapshots", SNAPSHOTS - 1)));
            };
            if list.next_id >= HOME - 1 {
                return Err(Error::new(ErrorKind::NoSpace, "all numbers of snapshots were given out"));
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
        let size = self.geometry.size;
        let _paused = self.pause_births();
        {
            let _alone = loop {
                // Something lies beneath from then on: what the table does not tell it must tell before.
                self.settle_all().await?;
                let alone = self.enter_alone(512).await?;
                if self.all_settled() {
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
                name: name.to_owned(),
            });
            self.put_last(&list);
            held.relies_on_home = id;
            views.any.store(true, Ordering::SeqCst);
            // Who looked before may write to what the snapshot sees from now on.
            views.stamp.store(self.epochs.now() + 1, Ordering::Release);
        }
        self.commits.note_change();
        self.commit().await?; // commit point
        Ok(id)
    }

    /// The feature bit: who does not know of snapshots must not open the image any more.
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

    /// Brings the page of an entry of the list into memory, and makes sure that the host has space for it.
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

    /// Writes what the last entry has. The caller holds the gate.
    fn put_last(&self, list: &List) {
        self.put_word(SNAPSHOTS - 1, 0, word(list.first_map_unit, list.relies_on_home));
        self.put_word(SNAPSHOTS - 1, 1, word(list.next_id, list.reverts_to));
    }

    /// Enters the open transaction with all others outside.
    async fn enter_alone(&self, cost: u64) -> Result<std::sync::RwLockWriteGuard<'_, ()>> {
        let journal = self.journal().expect("the journal has begun");
        loop {
            self.state.check_stopped()?;
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

fn public(list: &List) -> Vec<Snapshot> {
    let there = list.entries.iter().filter(|entry| !entry.is_being_deleted);
    let mut snapshots: Vec<Snapshot> = there
        .map(|entry| Snapshot {
            id: entry.id,
            name: entry.name.clone(),
            size: entry.size,
            seconds: entry.seconds,
        })
        .collect();
    snapshots.sort_unstable_by_key(|snapshot| snapshot.id);
    snapshots
}

/// The snapshots of a closed image, in the order in which they were made.
///
/// # Errors
/// `Unsupported` when the journal must be replayed first, `Corrupt` when the list cannot be, and what the storage says.
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
