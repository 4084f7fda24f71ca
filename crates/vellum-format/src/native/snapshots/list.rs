//! The list of snapshots. What is read from the medium is checked for contradictions before it is used.

use std::collections::{BTreeMap, BTreeSet};

use vellum_core::{Buffer, Context, Error, ImageOffset, Result, Storage};

use super::super::geometry::{Places, Region, SNAPSHOTS};
use crate::bytes::{be32, be64};
use crate::hash::HashMap;
use crate::work;

/// `next` of the snapshot that relies on home.
pub(in crate::native) const HOME: u32 = u32::MAX;
/// Longest name, in bytes.
pub(super) const NAME_MAX: usize = 64;
/// Words of an entry, and the first one of the name.
pub(super) const ENTRY_WORDS: u64 = 16;
pub(super) const NAME_WORD: u64 = 8;
/// The word with the flags: of a snapshot that is being deleted, and of one on which clones stand.
pub(super) const FLAGS_WORD: u64 = 4;
pub(super) const BEING_DELETED: u64 = 1 << 32;
pub(super) const CLONED: u64 = 1 << 33;

/// One snapshot, as in its entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its index in the list.
    pub(super) index: u64,
    pub(super) id: u32,
    /// The snapshot on which it relies for pages that it has no copy of.
    pub(super) next: u32,
    pub(super) size: u64,
    pub(super) seconds: u64,
    pub(super) is_being_deleted: bool,
    /// Clones stand on it, so it must not be deleted.
    pub(super) is_cloned: bool,
    pub(super) name: String,
}

/// All snapshots, and the content of the last entry.
#[derive(Debug, Clone, Default)]
pub(super) struct List {
    pub(super) entries: Vec<Entry>,
    pub(super) first_map_unit: u32,
    /// The snapshot that relies on home; 0: none.
    pub(super) relies_on_home: u32,
    pub(super) next_id: u32,
    /// The snapshot to which the disk is being reverted; 0: none.
    pub(super) reverts_to: u32,
}

impl List {
    /// The list of an image without snapshots.
    pub(super) fn empty() -> Self {
        Self { next_id: 1, ..Self::default() }
    }

    pub(super) async fn read(storage: &dyn Storage, places: &Places) -> Result<Self> {
        let region = places.region(Region::Snapshots);
        let len = usize::try_from(region.len()).expect("512 KiB");
        let bytes = storage.read(region.start(), Buffer::for_overwrite(len)).await;
        let bytes = bytes.context(|| "can't read the list of snapshots")?;
        Self::parse(bytes.slice(), places).context(|| "the list of snapshots is damaged: run `vellum check`")
    }

    fn parse(bytes: &[u8], places: &Places) -> Result<Self> {
        let entry_of = |index: u64| {
            let at = places.snapshot(index).start() - places.region(Region::Snapshots).start();
            &bytes[usize::try_from(at).expect("512 KiB")..][..128]
        };
        let last = entry_of(SNAPSHOTS - 1);
        let mut list = Self {
            entries: Vec::new(),
            first_map_unit: be32(last, 0),
            relies_on_home: be32(last, 4),
            next_id: be32(last, 8).max(1),
            reverts_to: be32(last, 12),
        };
        for index in 0..SNAPSHOTS - 1 {
            let bytes = entry_of(index);
            if be32(bytes, 0) == 0 {
                continue;
            }
            let name = bytes[64..].split(|byte| *byte == 0).next().unwrap_or_default();
            let Ok(name) = std::str::from_utf8(name) else {
                return Err(Error::corrupt(format!("the name of entry {index} is not valid text")));
            };
            list.entries.push(Entry {
                index,
                id: be32(bytes, 0),
                next: be32(bytes, 4),
                size: be64(bytes, 8),
                seconds: be64(bytes, 16),
                is_being_deleted: be32(bytes, 32) & 1 == 1,
                is_cloned: be32(bytes, 32) & 2 == 2,
                name: name.to_owned(),
            });
        }
        list.check(places)?;
        Ok(list)
    }

    fn check(&self, places: &Places) -> Result<()> {
        let mut ids = BTreeSet::new();
        let mut relied_on = BTreeSet::new();
        for entry in &self.entries {
            let id = entry.id;
            let is_possible =
                id < self.next_id && entry.size.is_multiple_of(512) && entry.size <= places.size_max();
            if !is_possible || !ids.insert(id) {
                return Err(Error::corrupt(format!("snapshot {id} is impossible")));
            }
            if entry.is_cloned && entry.is_being_deleted {
                return Err(Error::corrupt(format!(
                    "snapshot {id} is being deleted, and clones stand on it"
                )));
            }
            if (entry.next == HOME) != (id == self.relies_on_home) {
                return Err(Error::corrupt(format!("it is not clear whether snapshot {id} relies on home")));
            }
            // Each snapshot has at most one that relies on it, so a chain that ends has no circle.
            if entry.next != 0 && !relied_on.insert(entry.next) {
                return Err(Error::corrupt(format!("two snapshots rely on {}", entry.next)));
            }
        }
        for id in [self.relies_on_home, self.reverts_to].into_iter().filter(|id| *id != 0) {
            if !ids.contains(&id) {
                return Err(Error::corrupt(format!("snapshot {id} is named and does not exist")));
            }
        }
        self.check_chains(&ids)
    }

    /// Checks that every chain ends. No two snapshots have the same next one, so those on chains that end are
    /// found by walking back from the ends, each of them once. A circle has no end.
    fn check_chains(&self, ids: &BTreeSet<u32>) -> Result<()> {
        let mut before: BTreeMap<u32, u32> = BTreeMap::new();
        let mut ending: Vec<u32> = Vec::new();
        for Entry { id, next, .. } in &self.entries {
            match *next {
                0 | HOME => ending.push(*id),
                next if !ids.contains(&next) => {
                    return Err(Error::corrupt(format!(
                        "snapshot {id} relies on {next}, which does not exist"
                    )));
                }
                next => drop(before.insert(next, *id)),
            }
        }
        let mut count = 0;
        while let Some(id) = ending.pop() {
            work::note(1);
            count += 1;
            ending.extend(before.remove(&id));
        }
        match before.values().next() {
            Some(id) if count < self.entries.len() => {
                Err(Error::corrupt(format!("snapshot {id} relies on itself")))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn get(&self, id: u32) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.id == id)
    }

    pub(super) fn get_mut(&mut self, id: u32) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    /// The snapshot that relies on this one.
    pub(super) fn before(&self, id: u32) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.next == id)
    }

    /// The newest snapshot that stays, and after it those that are being deleted, up to the one that relies
    /// on home. Empty when no snapshot stays.
    pub(super) fn keepers(&self) -> Vec<u32> {
        let before: HashMap<u32, &Entry> = self.entries.iter().map(|entry| (entry.next, entry)).collect();
        let mut keepers = Vec::new();
        let mut at = HOME;
        while let Some(entry) = before.get(&at) {
            keepers.insert(0, entry.id);
            if !entry.is_being_deleted {
                return keepers;
            }
            at = entry.id;
        }
        Vec::new()
    }

    /// The snapshot of this id, else of this name, else the one that `snapshot.id=ID` or `snapshot.name=NAME` means to QEMU.
    pub(super) fn find(&self, wanted: &str) -> Result<&Entry> {
        let there = || self.entries.iter().filter(|entry| !entry.is_being_deleted);
        let of_id = |id: &str| there().find(|entry| entry.id.to_string() == id);
        let of_name = |name: &str| there().find(|entry| entry.name == name);
        let found = of_id(wanted)
            .or_else(|| of_name(wanted))
            .or_else(|| of_id(wanted.strip_prefix("snapshot.id=")?))
            .or_else(|| of_name(wanted.strip_prefix("snapshot.name=")?));
        found.ok_or_else(|| {
            Error::new(vellum_core::ErrorKind::NotFound, format!("there is no snapshot named {wanted}"))
        })
    }

    /// The same for a change: what is changed is meant beyond doubt, so what is the id of one and the name of another is refused.
    pub(super) fn find_for_change(&self, wanted: &str) -> Result<&Entry> {
        let found = self.find(wanted)?;
        let mut there = self.entries.iter().filter(|entry| !entry.is_being_deleted);
        match there.find(|entry| entry.name == wanted) {
            Some(named) if named.id != found.id => Err(Error::invalid(format!(
                "{wanted} is the id of snapshot {} and the name of another, whose id is {}: say snapshot.id={wanted} for the one, or \
                 snapshot.name={wanted} for the other",
                found.name, named.id
            ))),
            _ => Ok(found),
        }
    }

    /// Whether each snapshot relies on the next younger one, and the youngest on home. This program makes no
    /// other images.
    pub(super) fn is_line(&self) -> bool {
        let mut all: Vec<(u32, u32)> = self.entries.iter().map(|entry| (entry.id, entry.next)).collect();
        all.sort_unstable();
        let ids = all.iter().skip(1).map(|(id, _)| *id).chain([HOME]);
        all.iter().zip(ids).all(|((_, next), id)| *next == id)
    }

    /// The snapshot, the one on which it relies, and so on; and whether the chain ends in home.
    pub(super) fn chain(&self, id: u32) -> Result<(Vec<u32>, bool)> {
        let entries: BTreeMap<u32, &Entry> = self.entries.iter().map(|entry| (entry.id, entry)).collect();
        let mut chain = Vec::new();
        let mut at = id;
        while at != 0 && at != HOME {
            work::note(1);
            let Some(entry) = entries.get(&at) else {
                return Err(Error::corrupt(format!("snapshot {id} relies on {at}, which does not exist")));
            };
            chain.push(at);
            if chain.len() > self.entries.len() {
                return Err(Error::corrupt(format!("snapshot {id} relies on itself")));
            }
            at = entry.next;
        }
        Ok((chain, at == HOME))
    }
}

/// The place of a word of an entry.
pub(super) fn word_of(places: &Places, index: u64, word: u64) -> ImageOffset {
    places.snapshot(index).start() + word * 8
}

/// Combines two numbers into a word.
pub(super) fn word(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// The name as it is stored in the words of an entry.
pub(super) fn name_words(name: &str) -> [u64; NAME_MAX / 8] {
    let mut bytes = [0; NAME_MAX];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    std::array::from_fn(|index| be64(&bytes, index * 8))
}
