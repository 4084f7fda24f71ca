//! Copies of home pages, and the map units that hold them.
//!
//! ```text
//!   map unit   ┌───────┬────────┬────────┬──      index: whose copy each page is, and of what
//!              │ index │ copy 0 │ copy 1 │ ..     a change of it goes through the journal, as words
//!              └───┬───┴────────┴────────┴──      a copy is data with checks
//!                  └──► next map unit
//! ```
//!
//! 1. A unit that a copy of a table page names belongs to some snapshot. The number of copies that name it is
//!    kept in memory only.
//! 2. The slot of a freed copy is used again when the freeing is durable and its old content is not verified
//!    any more: after the record of the freeing and the record after that are durable.
//! 3. A map unit stays in the chain as long as records of this opening may have words of its index. Empty map
//!    units are therefore dropped at the beginning of the next opening.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use vellum_core::{Buffer, Context, Error, ImageOffset, ImageSpan, Result, Storage};

use super::super::geometry::{Places, Region};
use super::super::home_pages::SealedPage;
use crate::bytes::{be32, be64};
use crate::hash::{HashMap, HashSet};
use crate::journal::Changed;
use crate::work;

/// The first bytes of an index page, as a word.
const MAGIC: u64 = u64::from_be_bytes(*b"VELLUMmu");
const PAGE: u64 = 4096;
const WORDS: usize = 512;
/// The word that names the next map unit.
const NEXT: usize = 1;

/// The place of a copy.
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
            let _bytes = self.changed.get_or_insert_default().add(word);
        }
    }

    fn set_slot(&mut self, slot: usize, id: u32, page: u64) {
        self.set(2 + 2 * slot, u64::from(id) << 32);
        self.set(3 + 2 * slot, page);
    }
}

/// A unit that copies of pages name: for which unit of the disk, and in how many copies.
struct Named {
    index: u64,
    count: u32,
}

/// All copies of an image.
pub(super) struct Copies {
    places: Places,
    /// By snapshot and page of home.
    by_page: BTreeMap<(u32, u64), SlotAt>,
    /// The same pairs by page of home and snapshot, so that the first copy from a snapshot on is found at
    /// once.
    owners: BTreeSet<(u64, u32)>,
    names: HashMap<u32, Named>,
    pages: HashMap<u32, IndexPage>,
    /// The map units, in the order of the chain.
    chain: Vec<u32>,
    /// Map units that had no copies when the image was opened.
    empty: HashSet<u32>,
    free: Vec<SlotAt>,
    /// Slots that become free once this many records were written.
    later: VecDeque<(u64, SlotAt)>,
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
        }
    }

    /// Reads the copies of an image, from the first map unit on. With `counts`, also counts which units they
    /// name.
    pub(super) async fn read(
        storage: &dyn Storage,
        places: Places,
        first: u32,
        ids: &BTreeSet<u32>,
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

    async fn read_map_unit(&mut self, storage: &dyn Storage, unit: u32, ids: &BTreeSet<u32>) -> Result<u32> {
        let limits = storage.limits();
        let may_be = self.places.may_hold(unit, storage.len(), limits.fixed_len);
        if !may_be || self.places.is_of_part(unit) || self.pages.contains_key(&unit) {
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
            work::note(1);
            match u32::try_from(id).ok().as_ref().and_then(|id| ids.get(id)) {
                // A free slot, or a copy of a snapshot that no longer exists.
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
        work::note(WORDS);
        for (index, unit) in self.entries(page, bytes) {
            let may_be = self.places.may_hold(unit, storage.len(), storage.limits().fixed_len);
            if !may_be || self.places.is_of_part(unit) {
                return Err(Error::corrupt(format!("a snapshot names unit {unit}, which is impossible")));
            }
            let named = self.names.entry(unit).or_insert(Named { index, count: 0 });
            if named.index != index {
                return Err(Error::corrupt(format!(
                    "unit {unit} is used for two purposes: run `vellum check`"
                )));
            }
            named.count += 1;
        }
        Ok(())
    }

    /// How many copies a map unit has room for.
    fn slots(&self) -> usize {
        let Some(unit) = self.places.shape().layout.unit() else { return 0 };
        usize::try_from(unit.bytes() / PAGE - 1).expect("at most 511").min((4096 - 16) / 16)
    }

    fn is_of_view(&self, page: u64) -> bool {
        let regions = [Region::Bitmap, Region::Masks];
        self.is_of_table(page)
            || regions.iter().any(|region| self.places.region(*region).contains(ImageOffset::new(page)))
    }

    pub(super) fn is_of_table(&self, page: u64) -> bool {
        self.places.is_in_table(ImageOffset::new(page))
    }

    /// The units that a page of the table names, each with its unit of the disk.
    fn entries(&self, page: u64, bytes: &[u8]) -> Vec<(u64, u32)> {
        let first = self.places.entry_at(ImageOffset::new(page)).expect("a page of the table");
        let unit = |entry: &[u8]| self.places.split_entry(be32(entry, 0)).0;
        let entries = (first..).zip(bytes.chunks_exact(4).map(unit));
        entries.filter(|(_, unit)| *unit != 0).collect()
    }

    pub(super) fn has(&self, id: u32, page: u64) -> bool {
        self.by_page.contains_key(&(id, page))
    }

    /// Where a snapshot's own copy of a page lies, if it has one.
    pub(super) fn copy(&self, id: u32, page: u64) -> Option<ImageSpan> {
        self.by_page.get(&(id, page)).map(|slot| self.place(*slot))
    }

    /// Where the copy of a page lies that this snapshot has, or else the first younger one.
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

    /// Whether home must not name the unit for this unit of the disk, because the unit is named for something
    /// else.
    pub(super) fn contradicts(&self, index: u64, unit: u32) -> bool {
        self.pages.contains_key(&unit) || self.names.get(&unit).is_some_and(|named| named.index != index)
    }

    /// The units that are in use because of snapshots.
    pub(super) fn units(&self) -> impl Iterator<Item = u32> {
        self.names.keys().chain(&self.chain).copied()
    }

    /// Where the page of a slot lies.
    pub(super) fn place(&self, at: SlotAt) -> ImageSpan {
        (self.places.unit(at.unit).start() + (at.slot as u64 + 1) * PAGE).span(PAGE)
    }

    /// Takes a slot for a copy, when `records` records were written. `None` when a new map unit is needed.
    pub(super) fn take_slot(&mut self, records: u64) -> Option<SlotAt> {
        while let Some((_, slot)) = self.later.pop_front_if(|(from, _)| *from <= records) {
            self.free.push(slot);
        }
        self.free.pop()
    }

    /// Returns a slot that no index page was given.
    pub(super) fn give_slot(&mut self, at: SlotAt) {
        self.free.push(at);
    }

    /// Makes a fresh unit the first map unit. The caller holds the gate, and names the unit in the list.
    pub(super) fn add_map_unit(&mut self, unit: u32) {
        let mut page = IndexPage { words: Box::new([0; WORDS]), changed: None };
        page.set(0, MAGIC);
        page.set(NEXT, u64::from(self.chain.first().copied().unwrap_or(0)));
        self.pages.insert(unit, page);
        self.chain.insert(0, unit);
        self.free.extend((0..self.slots()).rev().map(|slot| SlotAt { unit, slot }));
    }

    /// Takes at most `most` map units out of the chain that were empty when the image was opened. The caller
    /// holds the gate, and names the new first one.
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

    /// Enters the copy in this slot as this snapshot's. The caller holds the gate.
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

    /// Passes a copy on to another snapshot. The caller holds the gate.
    pub(super) fn pass_on(&mut self, page: u64, from: u32, to: u32) {
        if let Some(at) = self.by_page.remove(&(from, page)) {
            self.index_of(at).set_slot(at.slot, to, page);
            self.by_page.insert((to, page), at);
            self.owners.remove(&(page, from));
            self.owners.insert((page, to));
        }
    }

    /// Removes a copy, whose bytes these are. Returns the units that no copy names any more. The caller holds
    /// the gate. `records` is the number of records that were written.
    pub(super) fn remove(&mut self, id: u32, page: u64, bytes: &[u8], records: u64) -> Vec<(u64, u32)> {
        let Some(at) = self.by_page.remove(&(id, page)) else { return Vec::new() };
        self.owners.remove(&(page, id));
        self.index_of(at).set_slot(at.slot, 0, 0);
        // A record that does not have this change yet may be on its way.
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

    /// Copies the index pages that have changed. The caller holds the gate alone.
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
