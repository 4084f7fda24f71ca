//! What a writer keeps in memory of the snapshots of its image: the list, and the copies of pages.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vellum_core::{Result, SharedStorage};

use super::super::geometry::Places;
use super::super::home_pages::SealedPage;
use super::super::unfinished::Found;
use super::copies::Copies;
use super::list::List;
use super::released::Released;
use crate::hash::HashMap;
use crate::state::lock;

/// The snapshots of an image that is open read-write.
pub(in crate::native) struct Views {
    pub(super) list: Mutex<List>,
    pub(super) copies: Mutex<Held>,
    /// Whether there are snapshots. Read without a lock.
    pub(super) any: AtomicBool,
    /// Held while pages are kept.
    pub(super) keeping: async_lock::Mutex<()>,
    /// Held while a snapshot is made, or an entry is taken off the list.
    pub(in crate::native) changing: async_lock::Mutex<()>,
    /// Held while a snapshot is deleted. Snapshots can be made meanwhile.
    pub(super) deleting: async_lock::Mutex<()>,
    /// Background work is to stop where it is.
    pub(super) is_ending: AtomicBool,
    /// The epoch in which units last became held, plus one. 0: not since the image was opened. See
    /// `stamp` in `mod.rs`.
    pub(super) stamp: AtomicU64,
}

/// The copies, and the snapshots for which pages are kept now. They change together.
pub(super) struct Held {
    pub(super) copies: Copies,
    /// The end of the chain: the newest snapshot that stays, for which pages are kept, and after it those
    /// that are being deleted, on whose copies it still relies. Empty when no snapshot stays.
    pub(super) keepers: Vec<u32>,
    /// The transactions in which pages were kept of late.
    pub(super) kept_in: HashMap<u64, u64>,
    pub(super) released: Released,
}

impl Held {
    /// Whether snapshots allow this page of home to change. The answer stays the same while a deletion passes
    /// copies on and frees them: a copy that is passed on to a keeper comes from a keeper, and a copy of a
    /// keeper is freed only if an earlier keeper also has one.
    pub(super) fn is_kept(&self, page: u64) -> bool {
        self.keepers.is_empty() || self.keepers.iter().any(|id| self.copies.has(*id, page))
    }
}

impl Views {
    pub(in crate::native) async fn read(
        image: &SharedStorage,
        places: &Places,
        has_snapshots: bool,
    ) -> Result<Self> {
        let (list, copies) = match has_snapshots {
            false => (List::empty(), Copies::new(*places)),
            true => {
                let list = List::read(&**image, places).await?;
                let ids: BTreeSet<u32> = list.entries.iter().map(|entry| entry.id).collect();
                let copies = Copies::read(&**image, *places, list.first_map_unit, &ids, true).await?;
                (list, copies)
            }
        };
        Ok(Self {
            any: AtomicBool::new(!list.entries.is_empty()),
            copies: Mutex::new(Held {
                copies,
                keepers: list.keepers(),
                kept_in: HashMap::default(),
                released: Released::default(),
            }),
            list: Mutex::new(list),
            keeping: Default::default(),
            changing: Default::default(),
            deleting: Default::default(),
            is_ending: AtomicBool::new(false),
            stamp: AtomicU64::new(0),
        })
    }

    /// The units that are in use because of snapshots.
    pub(in crate::native) fn units(&self) -> Vec<u32> {
        lock(&self.copies).copies.units().collect()
    }

    /// Whether home must not name the unit for this unit of the disk.
    pub(in crate::native) fn contradict(&self, index: u64, unit: u32) -> bool {
        self.any() && lock(&self.copies).copies.contradicts(index, unit)
    }

    /// While the returned guard lives, no unit becomes held or is released, and no copy of a unit comes to
    /// count.
    pub(in crate::native) fn hold(&self) -> impl Drop {
        lock(&self.copies)
    }

    pub(in crate::native) fn any(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }

    /// Copies the index pages that have changed. The caller holds the gate alone.
    pub(in crate::native) fn seal(&self) -> Vec<SealedPage> {
        lock(&self.copies).copies.seal()
    }

    /// The unfinished change that an earlier opening left. A revert comes first, because it may need a
    /// snapshot that is being deleted.
    pub(in crate::native) fn unfinished(&self) -> Option<Found> {
        let list = lock(&self.list);
        if list.reverts_to != 0 {
            return Some(Found::RevertMark);
        }
        let is_flagged = list.entries.iter().any(|entry| entry.is_being_deleted);
        is_flagged.then_some(Found::DeleteFlag)
    }

    /// The size that the disk will have, if it is being reverted.
    pub(in crate::native) fn reverted_size(&self) -> Option<u64> {
        let list = lock(&self.list);
        list.get(list.reverts_to).map(|entry| entry.size)
    }
}
