//! What the records from the tail on say of blocks, by the slices that the blocks are in.
//!
//! ```text
//!   records ─► items about blocks: slice, record, place        in the order of slices; a part looks at its own
//!           └► runs that lost all blocks: the last record      zeros, rows that went, regions that are void
//! ```
//!
//! 1. Of a block counts the last item about it, if its record is newer than the slice. Items are absolute, so what came
//!    before does not matter. A run of a newer record takes the block away; one of the same record comes before the item.
//! 2. Items stay as bytes until their part is read. So this takes the live part of the ring, and 12 bytes for each item.

use std::collections::BTreeMap;

use super::Found;
use crate::layout::{BLOCKS_MAX, Key, Layout, SECTORS_ALL, Slot};
use crate::map::Entry;
use crate::record::{HEADER_LEN, Item, Record};
use crate::regions::REGION_BLOCKS;

/// Where an item about blocks is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    slice: u32,
    /// The record, from the first one on, and where in it.
    record: u32,
    at: u32,
}

/// Runs of blocks, and the last record that took all of them away.
#[derive(Debug, Default)]
struct Cleared(BTreeMap<u64, (u64, u64)>);

/// A run in a tree that is two thirds full.
const RUN_BYTES: u64 = 40;

impl Cleared {
    /// Records come in order.
    fn add(&mut self, first: Key, blocks: u64, record: u64) {
        let (start, end) = (first.bits(), first.bits().saturating_add(blocks));
        while let Some((&other, &(other_end, before))) = self.0.range(..end).next_back()
            && other_end > start
        {
            self.0.remove(&other);
            if other < start {
                self.0.insert(other, (start, before));
            }
            if other_end > end {
                self.0.insert(end, (other_end, before));
            }
        }
        self.0.insert(start, (end, record));
    }

    fn last(&self, key: Key) -> u64 {
        let run = self.0.range(..=key.bits()).next_back();
        run.filter(|(_, (end, _))| *end > key.bits()).map_or(0, |(_, (_, record))| *record)
    }
}

/// All changes.
#[derive(Debug, Default)]
pub(super) struct Changes {
    places: Vec<Place>,
    cleared: Cleared,
    /// The first record.
    first: u64,
}

impl Changes {
    /// Before anything of the records, of which this is the first.
    pub(super) fn from(first: u64) -> Self {
        Self { first, ..Self::default() }
    }

    /// What the next record says of blocks.
    pub(super) fn add(&mut self, layout: &Layout, record: &Record) {
        let number =
            u32::try_from(record.sequence - self.first).expect("the ring has at most 16,384 records");
        let mut at = HEADER_LEN;
        for item in &record.items {
            match item {
                Item::Put { key, .. }
                | Item::Puts { key, .. }
                | Item::Drop { key }
                | Item::Drops { key, .. } => {
                    // Several are of one group, so of one slice.
                    let place = u32::try_from(at).expect("a record has at most 8 MiB");
                    self.places.push(Place { slice: layout.slice_of(*key), record: number, at: place });
                }
                Item::Zero { key, blocks, .. } => self.cleared.add(*key, *blocks, record.sequence),
                Item::NoRow(row) => self.cleared.add(Key::new(*row, 0), BLOCKS_MAX, record.sequence),
                Item::Void(word) => {
                    for region in word.regions() {
                        self.cleared.add(region, REGION_BLOCKS, record.sequence);
                    }
                }
                Item::Unzero { .. } | Item::Row(_) | Item::Written(_) | Item::Settled(_) => {}
            }
            at += item.encoded_len();
        }
    }

    /// There are no more records.
    pub(super) fn sort(&mut self) {
        self.places.sort_unstable();
    }

    /// The memory that they take, in bytes, without the records.
    pub(super) fn memory_bytes(&self) -> u64 {
        (self.places.capacity() * size_of::<Place>()) as u64 + self.cleared.0.len() as u64 * RUN_BYTES
    }

    /// What a slice has, which is as of this record, becomes what it has now. The blocks of each group are neighbours, in the
    /// order of their keys. Returns the first record that it needs for that.
    pub(super) fn apply(
        &self,
        (number, as_of): (u32, u64),
        records: &BTreeMap<u64, Found>,
        slots: u32,
        blocks: &mut Vec<(Key, Entry)>,
    ) -> Option<u64> {
        let mut first: Option<u64> = None;
        let mut needs = |record: u64| first = Some(first.map_or(record, |first| first.min(record)));
        if !self.cleared.0.is_empty() {
            blocks.retain(|(key, _)| {
                let cleared = self.cleared.last(*key);
                if cleared > as_of {
                    needs(cleared);
                }
                cleared <= as_of
            });
        }
        let start = self.places.partition_point(|place| place.slice < number);
        let own = self.places[start..].iter().take_while(|place| place.slice == number);
        let mut newer = own.filter(|place| self.first + u64::from(place.record) > as_of).peekable();
        if newer.peek().is_none() {
            return first;
        }
        let mut all: BTreeMap<Key, Entry> = blocks.drain(..).collect();
        for place in newer {
            let sequence = self.first + u64::from(place.record);
            needs(sequence);
            let bytes = &records[&sequence].bytes[place.at as usize..];
            let item = Item::decode(bytes, slots).expect("it was decoded before");
            let (key, count) = item.blocks().expect("only such items have places");
            for n in 0..count {
                let key = key.plus(u64::from(n));
                let entry = match &item {
                    _ if self.cleared.last(key) > sequence => None,
                    Item::Put { slot, sectors, dirty, .. } => {
                        Some(Entry { slot: *slot, sectors: *sectors, dirty: *dirty })
                    }
                    Item::Puts { slot, dirty, .. } => {
                        Some(Entry { slot: Slot(slot.0 + n), sectors: SECTORS_ALL, dirty: *dirty })
                    }
                    _ => None,
                };
                match entry {
                    Some(entry) => all.insert(key, entry),
                    None => all.remove(&key),
                };
            }
        }
        blocks.extend(all);
        first
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn the_last_run_over_a_block_counts() {
        for seed in 0..40 {
            let mut random = Random::from_seed(seed);
            let (mut cleared, mut model) = (Cleared::default(), [0u64; 300]);
            for record in 1..60 {
                let (first, blocks) =
                    (random.below(290), 1 + random.below(if record % 7 == 0 { 200 } else { 9 }));
                cleared.add(Key::from_bits(first), blocks, record);
                for block in first..(first + blocks).min(300) {
                    model[usize::try_from(block).unwrap()] = record;
                }
                for (block, record) in (0..).zip(model) {
                    assert_eq!(cleared.last(Key::from_bits(block)), record, "seed {seed}, block {block}");
                }
            }
            let ends: Vec<(u64, u64)> = cleared.0.iter().map(|(start, (end, _))| (*start, *end)).collect();
            assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0), "no two overlap");
        }
    }
}
