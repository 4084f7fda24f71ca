//! A small hash table of packed entries, each `N` two-byte words of which the first four are its key.
//!
//! ```text
//!   home = low 32 bits of the key's hash × capacity >> 32;  an entry is at its home or, without a gap, behind it
//! ```
//!
//! 1. No entry costs more than its words, and between 64 % and 88 % of the places are in use once there are more
//!    than a few: the table grows by an eighth, which costs little because a part of the map has few groups.
//!    A table that doubles would on average waste twice as much.
//! 2. A removal moves entries back, so no marks of removed ones are left.
//! 3. The hash has a secret, so keys that a guest chooses are spread like random ones.
//!
//! Left out: what the words mean (`map`).

use crate::layout::{Key, mix};

/// A table of this many places or fewer does not become smaller until it is empty.
pub(crate) const SMALL_PLACES: usize = 16;

/// The first four words of a place that is empty. No key is this.
const EMPTY: u64 = u64::MAX;

/// The table.
#[derive(Debug)]
pub(crate) struct Table<const N: usize> {
    places: Vec<[u16; N]>,
    len: usize,
}

/// The key of an entry.
pub(crate) const fn key_of<const N: usize>(entry: &[u16; N]) -> u64 {
    (entry[0] as u64) << 48 | (entry[1] as u64) << 32 | (entry[2] as u64) << 16 | entry[3] as u64
}

/// An entry of this key; its other words are zero.
#[allow(clippy::cast_possible_truncation, reason = "a word at a time")]
pub(crate) const fn entry_of<const N: usize>(key: u64) -> [u16; N] {
    let mut entry = [0; N];
    entry[0] = (key >> 48) as u16;
    entry[1] = (key >> 32) as u16;
    entry[2] = (key >> 16) as u16;
    entry[3] = key as u16;
    entry
}

impl<const N: usize> Table<N> {
    /// An empty table, which takes no memory.
    pub(crate) const fn new() -> Self {
        Self { places: Vec::new(), len: 0 }
    }

    /// How many entries there are.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// How many places there are: the numbers of places are below it.
    pub(crate) const fn places(&self) -> usize {
        self.places.len()
    }

    /// The entry in a place.
    pub(crate) fn at(&self, place: usize) -> Option<&[u16; N]> {
        self.places.get(place).filter(|entry| key_of(entry) != EMPTY)
    }

    /// The entry in a place that has one. Its key must not be changed.
    pub(crate) fn at_mut(&mut self, place: usize) -> &mut [u16; N] {
        debug_assert!(key_of(&self.places[place]) != EMPTY);
        &mut self.places[place]
    }

    /// All entries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &[u16; N]> {
        self.places.iter().filter(|entry| key_of(entry) != EMPTY)
    }

    /// The place of a key.
    pub(crate) fn find(&self, secret: u64, key: u64) -> Option<usize> {
        if self.len == 0 {
            return None;
        }
        let mut place = self.home(secret, key);
        loop {
            match key_of(&self.places[place]) {
                found if found == key => return Some(place),
                EMPTY => return None,
                _ => place = self.after(place),
            }
        }
    }

    /// Puts an entry in whose key the table does not have. Its place.
    pub(crate) fn insert(&mut self, secret: u64, entry: [u16; N]) -> usize {
        debug_assert!(self.find(secret, key_of(&entry)).is_none() && key_of(&entry) != EMPTY);
        if (self.len + 1) * 8 > self.places.len() * 7 {
            let more = (self.places.len() + self.places.len() / 8 + 1).max(4);
            self.rebuild(secret, more);
        }
        self.len += 1;
        self.put(secret, entry)
    }

    /// Puts an entry in whose key has this hash ([`mix`]), where room was made for it ([`Table::reserve`]). False when the table has
    /// the key already.
    #[must_use]
    pub(crate) fn insert_found(&mut self, hash: u64, entry: [u16; N]) -> bool {
        debug_assert!((self.len + 1) * 8 <= self.places.len() * 7, "room was made");
        let key = key_of(&entry);
        let mut place = self.home_of(hash);
        loop {
            match key_of(&self.places[place]) {
                EMPTY => break,
                found if found == key => return false,
                _ => place = self.after(place),
            }
        }
        self.places[place] = entry;
        self.len += 1;
        true
    }

    /// Makes room for this many entries more, at once.
    pub(crate) fn reserve(&mut self, secret: u64, more: usize) {
        let places = ((self.len + more) * 8).div_ceil(7);
        if more > 0 && places > self.places.len() {
            self.rebuild(secret, places.max(4));
        }
    }

    /// Takes the entry in a place out. Others may move.
    pub(crate) fn remove(&mut self, secret: u64, place: usize) {
        debug_assert!(key_of(&self.places[place]) != EMPTY);
        let mut gap = place;
        let mut next = self.after(gap);
        loop {
            let key = key_of(&self.places[next]);
            if key == EMPTY {
                break;
            }
            // It may move into the gap unless its home is between the gap and its place.
            let home = self.home(secret, key);
            let stays = if gap < next { gap < home && home <= next } else { gap < home || home <= next };
            if !stays {
                self.places[gap] = self.places[next];
                gap = next;
            }
            next = self.after(next);
        }
        self.places[gap] = entry_of(EMPTY);
        self.len -= 1;
        if self.len == 0 {
            self.places = Vec::new();
        } else if self.len * 100 < self.places.len() * 64 && self.places.len() > SMALL_PLACES {
            self.rebuild(secret, self.len * 5 / 4 + 1);
        }
    }

    /// The memory of the places, in bytes.
    pub(crate) const fn memory_bytes(&self) -> u64 {
        (self.places.capacity() * size_of::<[u16; N]>()) as u64
    }

    fn home(&self, secret: u64, key: u64) -> usize {
        self.home_of(mix(secret, Key::from_bits(key)))
    }

    fn home_of(&self, hash: u64) -> usize {
        let low = hash & u64::from(u32::MAX);
        usize::try_from((low * self.places.len() as u64) >> 32).expect("below the number of places")
    }

    fn after(&self, place: usize) -> usize {
        if place + 1 == self.places.len() { 0 } else { place + 1 }
    }

    fn put(&mut self, secret: u64, entry: [u16; N]) -> usize {
        let mut place = self.home(secret, key_of(&entry));
        while key_of(&self.places[place]) != EMPTY {
            place = self.after(place);
        }
        self.places[place] = entry;
        place
    }

    fn rebuild(&mut self, secret: u64, places: usize) {
        let mut new = Vec::new();
        new.reserve_exact(places);
        new.resize(places, entry_of(EMPTY));
        for entry in std::mem::replace(&mut self.places, new) {
            if key_of(&entry) != EMPTY {
                self.put(secret, entry);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use vellum_core::Random;

    use super::*;

    #[test]
    fn the_entries_are_those_of_a_model() {
        for seed in 0..50 {
            let mut random = Random::from_seed(seed);
            let mut table = Table::<5>::new();
            let mut model = BTreeMap::new();
            for step in 0..4000_u16 {
                let grows = if step / 1000 % 2 == 0 { 3 } else { 1 };
                let key = random.below(1500) << 44 | random.below(2);
                match (random.below(4) < grows, table.find(seed, key)) {
                    (true, None) => {
                        let mut entry = entry_of(key);
                        entry[4] = step;
                        let place = table.insert(seed, entry);
                        assert_eq!(table.at(place), Some(&entry), "seed {seed}");
                        assert_eq!(model.insert(key, entry), None, "seed {seed}");
                    }
                    (true, Some(place)) => {
                        table.at_mut(place)[4] = step;
                        model.get_mut(&key).unwrap()[4] = step;
                    }
                    (false, Some(place)) => {
                        assert_eq!(table.at(place).copied(), model.remove(&key), "seed {seed}");
                        table.remove(seed, place);
                    }
                    (false, None) => assert!(!model.contains_key(&key), "seed {seed}"),
                }
                assert_eq!(table.len(), model.len());
                assert!(table.places() <= 16 || table.len() * 100 >= table.places() * 60, "seed {seed}");
            }
            let found: BTreeMap<u64, [u16; 5]> = table.iter().map(|entry| (key_of(entry), *entry)).collect();
            assert_eq!(found, model, "seed {seed}");
            for key in model.keys() {
                assert!(table.find(seed, *key).is_some(), "seed {seed}");
            }
        }
    }

    #[test]
    fn an_empty_table_takes_no_memory() {
        let mut table = Table::<5>::new();
        let place = table.insert(1, entry_of(7));
        table.remove(1, place);
        assert_eq!((table.memory_bytes(), table.find(1, 7), table.at(0)), (0, None, None));
    }
}
