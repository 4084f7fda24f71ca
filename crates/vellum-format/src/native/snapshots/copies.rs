//! Copies of home pages, and the map units that hold them.
//!
//! ```text
//!   map unit   ┌───────┬────────┬────────┬──      index: whose copy each page is, and of what
//!              │ index │ copy 0 │ copy 1 │ ..     a change of it goes through the journal, as words
//!              └───┬───┴────────┴────────┴──      a copy is data with checks
//!                  └──► next map unit
//! ```
//!
//! 1. A unit that a copy of a page of the table names is some snapshot's. How many do so is counted in memory alone.
//! 2. The slot of a copy that is gone is used again when that is durable and nothing of what lay there is verified any more:
//!    when the record that says so is durable, and the next one.
//! 3. A map unit never leaves the chain while records of this opening may have words of its index. So those that are empty go
//!    at the beginning of the next one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use vellum_core::{Buffer, Context, Error, ImageOffset, ImageSpan, Result, Storage};

use super::super::geometry::{Layout, Places, Region};
use super::super::home::SealedPage;
use crate::bytes::{be32, be64};
use crate::hash::{HashMap, HashSet};
use crate::journal::Changed;

/// The first bytes of an index page, as a word.
const MAGIC: u64 = u64::from_be_bytes(*b"VELLUMmu");
const PAGE: u64 = 4096;
const WORDS: usize = 512;
/// The word that names the next map unit.
const NEXT: usize = 1;

/// Where a copy lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotAt {
    unit: u32,
    slot: usize,
}

struct IndexPage {
    words: Box<[u64; WORDS]>,
    changed: Option<Changed>,
}

impl IndexPage {
    fn set(&mut self, word: usize, value: u64) {
        if self.words[word] != value {
            self.words[word] = value;
            self.changed.get_or_insert_default().add(word);
        }
    }

    fn set_slot(&mut self, slot: usize, id: u32, page: u64) {
        self.set(2 + 2 * slot, u64::from(id) << 32);
        self.set(3 + 2 * slot, page);
    }
}

/// A unit that copies of pages name: what for, and how many.
struct Named {
    index: u64,
    count: u32,
}

/// All copies of an image.
pub(super) struct Copies {
    places: Places,
    /// By snapshot and page of home.
    by_page: BTreeMap<(u32, u64), SlotAt>,
    /// The same by page of home and snapshot, so that the first copy from a snapshot on is found at once.
    owners: BTreeSet<(u64, u32)>,
    names: HashMap<u32, Named>,
    pages: HashMap<u32, IndexPage>,
    /// The map units, in their order.
    chain: Vec<u32>,
    /// Map units that had no copy when the image was opened.
    empty: HashSet<u32>,
    free: Vec<SlotAt>,
    /// Slots that will be free: when so many records were written.
    later: VecDeque<(u64, SlotAt)>,
    /// A mistake: pages that were not kept when they should have been.
    pub(super) late: HashSet<u64>,
}

impl Copies {
    pub(super) fn new(places: Places) -> Self {
        Self {
            places,
            by_page: BTreeMap::new(),
            owners: BTreeSet::new(),
            names: HashMap::default(),
            pages: HashMap::default(),
            chain: Vec::new(),
            empty: HashSet::default(),
            free: Vec::new(),
            later: VecDeque::new(),
            late: HashSet::default(),
        }
    }

    /// The copies of an image, from the first map unit on. What they name is counted when it is asked for.
    pub(super) async fn read(
        storage: &dyn Storage,
        places: Places,
        first: u32,
        ids: &[u32],
        counts: bool,
    ) -> Result<Self> {
        let mut copies = Self::new(places);
        let mut unit = first;
        while unit != 0 {
            let next =
                copies.read_map_unit(storage, unit, ids).await.context(|| format!("map unit {unit}"))?;
            copies.chain.push(unit);
            unit = next;
        }
        if counts {
            let tables: Vec<(u64, SlotAt)> =
                copies.by_page.iter().map(|((_, page), slot)| (*page, *slot)).collect();
            for (page, slot) in tables {
                if !copies.is_of_table(page) {
                    continue;
                }
                let at = copies.place(slot).start();
                let bytes = storage.read(at, Buffer::for_overwrite(4096)).await?;
                copies.count(storage, page, bytes.slice())?;
            }
            if let Some(unit) = copies.chain.iter().find(|unit| copies.names.contains_key(unit)) {
                return Err(Error::corrupt(format!("unit {unit} is data and holds copies of pages")));
            }
        }
        Ok(copies)
    }

    async fn read_map_unit(&mut self, storage: &dyn Storage, unit: u32, ids: &[u32]) -> Result<u32> {
        let limits = storage.limits();
        if !self.places.may_hold(unit, storage.len(), limits.fixed_len) || self.pages.contains_key(&unit) {
            return Err(Error::corrupt("it cannot be there: run `vellum check`"));
        }
        let at = self.places.unit(unit).start();
        let bytes = storage.read(at, Buffer::for_overwrite(4096)).await?;
        let words: [u64; WORDS] = std::array::from_fn(|word| be64(bytes.slice(), word * 8));
        let next = u32::try_from(words[NEXT]);
        let (MAGIC, Ok(next)) = (words[0], next) else {
            return Err(Error::corrupt("its index is damaged: run `vellum check`"));
        };
        let mut free = Vec::new();
        for slot in 0..self.slots() {
            let (id, page) = (words[2 + 2 * slot] >> 32, words[3 + 2 * slot]);
            let at = SlotAt { unit, slot };
            match ids.iter().find(|known| u64::from(**known) == id) {
                // One of a snapshot that is gone is lost space.
                None => free.push(at),
                Some(id) => {
                    let is_page = page.is_multiple_of(PAGE) && self.is_of_view(page);
                    if !is_page || self.by_page.insert((*id, page), at).is_some() {
                        return Err(Error::corrupt(format!(
                            "snapshot {id}: the copy of {page:#x} is impossible"
                        )));
                    }
                    self.owners.insert((page, *id));
                }
            }
        }
        match free.len() == self.slots() {
            true => drop(self.empty.insert(unit)),
            false => self.free.extend(free),
        }
        self.pages.insert(unit, IndexPage { words: Box::new(words), changed: None });
        Ok(next)
    }

    fn count(&mut self, storage: &dyn Storage, page: u64, bytes: &[u8]) -> Result<()> {
        for (index, unit) in self.entries(page, bytes) {
            if !self.places.may_hold(unit, storage.len(), storage.limits().fixed_len) {
                return Err(Error::corrupt(format!("a snapshot names unit {unit}, which cannot be")));
            }
            let named = self.names.entry(unit).or_insert(Named { index, count: 0 });
            if named.index != index {
                return Err(Error::corrupt(format!(
                    "unit {unit} is named for two purposes: run `vellum check`"
                )));
            }
            named.count += 1;
        }
        Ok(())
    }

    /// How many copies a map unit has room for.
    fn slots(&self) -> usize {
        let Layout::Table(unit) = self.places.shape().layout else { return 0 };
        usize::try_from(unit.bytes() / PAGE - 1).expect("at most 511").min((4096 - 16) / 16)
    }

    fn is_of_view(&self, page: u64) -> bool {
        let regions = [Region::Bitmap, Region::Masks, Region::Table];
        regions.iter().any(|region| self.places.region(*region).contains(ImageOffset::new(page)))
    }

    pub(super) fn is_of_table(&self, page: u64) -> bool {
        self.places.region(Region::Table).contains(ImageOffset::new(page))
    }

    /// The units that a page of the table names, each with its unit of the disk.
    fn entries(&self, page: u64, bytes: &[u8]) -> Vec<(u64, u32)> {
        let first = (page - self.places.region(Region::Table).start().bytes()) / 4;
        let entries = (first..).zip(bytes.chunks_exact(4).map(|entry| be32(entry, 0)));
        entries.filter(|(_, unit)| *unit != 0).collect()
    }

    pub(super) fn has(&self, id: u32, page: u64) -> bool {
        self.by_page.contains_key(&(id, page))
    }

    /// Where the copy lies that a snapshot has of a page.
    pub(super) fn copy(&self, id: u32, page: u64) -> Option<ImageSpan> {
        self.by_page.get(&(id, page)).map(|slot| self.place(*slot))
    }

    /// Where the copy lies that the snapshot of this id, or the first of a higher one, has of a page.
    pub(super) fn first_from(&self, id: u32, page: u64) -> Option<ImageSpan> {
        let (_, owner) = self.owners.range((page, id)..=(page, u32::MAX)).next()?;
        self.copy(*owner, page)
    }

    /// The pages of which a snapshot has copies.
    pub(super) fn pages_of(&self, id: u32) -> impl Iterator<Item = u64> {
        self.by_page.range((id, 0)..=(id, u64::MAX)).map(|((_, page), _)| *page)
    }

    /// Whether a copy names the unit.
    pub(super) fn names(&self, unit: u32) -> bool {
        self.names.contains_key(&unit)
    }

    /// Whether home must not name the unit for this unit of the disk: it is named for something else.
    pub(super) fn contradicts(&self, index: u64, unit: u32) -> bool {
        self.pages.contains_key(&unit) || self.names.get(&unit).is_some_and(|named| named.index != index)
    }

    /// Units that are in use because of snapshots.
    pub(super) fn units(&self) -> impl Iterator<Item = u32> {
        self.names.keys().chain(&self.chain).copied()
    }

    /// Where a slot's page lies.
    pub(super) fn place(&self, at: SlotAt) -> ImageSpan {
        (self.places.unit(at.unit).start() + (at.slot as u64 + 1) * PAGE).span(PAGE)
    }

    /// A slot for a copy, when `records` were written; nothing when a new map unit must be.
    pub(super) fn take_slot(&mut self, records: u64) -> Option<SlotAt> {
        while let Some((_, slot)) = self.later.pop_front_if(|(from, _)| *from <= records) {
            self.free.push(slot);
        }
        self.free.pop()
    }

    /// A slot that nothing was said of.
    pub(super) fn give_slot(&mut self, at: SlotAt) {
        self.free.push(at);
    }

    /// A fresh unit becomes the first of the map units. The caller holds the gate, and names it in the list.
    pub(super) fn add_map_unit(&mut self, unit: u32) {
        let mut page = IndexPage { words: Box::new([0; WORDS]), changed: None };
        page.set(0, MAGIC);
        page.set(NEXT, u64::from(self.chain.first().copied().unwrap_or(0)));
        self.pages.insert(unit, page);
        self.chain.insert(0, unit);
        self.free.extend((0..self.slots()).rev().map(|slot| SlotAt { unit, slot }));
    }

    /// Takes map units out of the chain that were empty when the image was opened: so many at most. The caller holds the gate,
    /// and names the one that is the first then.
    pub(super) fn drop_empty(&mut self, most: usize) -> Vec<u32> {
        let (mut dropped, mut kept): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
        for unit in std::mem::take(&mut self.chain) {
            if dropped.len() < most && self.empty.remove(&unit) {
                self.pages.remove(&unit);
                dropped.push(unit);
            } else {
                kept.push(unit);
            }
        }
        for (index, unit) in kept.iter().enumerate() {
            let next = kept.get(index + 1).copied().unwrap_or(0);
            self.pages.get_mut(unit).expect("of the chain").set(NEXT, u64::from(next));
        }
        self.chain = kept;
        dropped
    }

    /// The first map unit; 0: none.
    pub(super) fn first(&self) -> u32 {
        self.chain.first().copied().unwrap_or(0)
    }

    /// The copy in this slot is this snapshot's. The caller holds the gate.
    pub(super) fn add(&mut self, id: u32, page: u64, at: SlotAt, bytes: &[u8]) {
        self.index_of(at).set_slot(at.slot, id, page);
        self.by_page.insert((id, page), at);
        self.owners.insert((page, id));
        if self.is_of_table(page) {
            for (index, unit) in self.entries(page, bytes) {
                self.names.entry(unit).or_insert(Named { index, count: 0 }).count += 1;
            }
        }
    }

    fn index_of(&mut self, at: SlotAt) -> &mut IndexPage {
        self.pages.get_mut(&at.unit).expect("a map unit")
    }

    /// A copy becomes another snapshot's. The caller holds the gate.
    pub(super) fn pass_on(&mut self, page: u64, from: u32, to: u32) {
        if let Some(at) = self.by_page.remove(&(from, page)) {
            self.index_of(at).set_slot(at.slot, to, page);
            self.by_page.insert((to, page), at);
            self.owners.remove(&(page, from));
            self.owners.insert((page, to));
        }
    }

    /// A copy is gone, of which these are the bytes. Tells the units that no copy names any more. The caller holds the gate;
    /// `records` were written.
    pub(super) fn remove(&mut self, id: u32, page: u64, bytes: &[u8], records: u64) -> Vec<(u64, u32)> {
        let Some(at) = self.by_page.remove(&(id, page)) else { return Vec::new() };
        self.owners.remove(&(page, id));
        self.index_of(at).set_slot(at.slot, 0, 0);
        // A record may be on its way that has not this yet.
        self.later.push_back((records + 3, at));
        if !self.is_of_table(page) {
            return Vec::new();
        }
        let mut unnamed = self.entries(page, bytes);
        unnamed.retain(|(_, unit)| {
            let Some(named) = self.names.get_mut(unit) else { return false };
            named.count -= 1;
            named.count == 0
        });
        for (_, unit) in &unnamed {
            self.names.remove(unit);
        }
        unnamed
    }

    /// The index pages that have changed. The caller holds the gate alone.
    pub(super) fn seal(&mut self) -> Vec<SealedPage> {
        let places = self.places;
        let changed = self.pages.iter_mut().filter_map(|(unit, page)| {
            let changed = page.changed.take()?;
            let bytes: Arc<[u8]> = page.words.iter().flat_map(|word| word.to_be_bytes()).collect();
            Some(SealedPage { at: places.unit(*unit).start(), bytes, changed })
        });
        let mut sealed: Vec<SealedPage> = changed.collect();
        sealed.sort_unstable_by_key(|page| page.at);
        sealed
    }
}
