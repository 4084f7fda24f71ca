//! What the records from the tail on say of blocks, by the slices that the blocks are in.
//!
//! ```text
//!   records ─► items about blocks: slice, record, place        in the order of slices; a part looks at its own
//!           └► runs that lost all blocks: the last record      zeros, rows that went, regions that are void
//!
//!   part ─► its items, by groups ─┬─► a group that none of them names, of which no run has lost anything: as its slice has it
//!                                 └─► the others: what the slice has ► without what runs took ► item by item
//! ```
//!
//! 1. Of a block counts the last item about it, if its record is newer than the slice. Items are absolute, so what came
//!    before does not matter. A run of a newer record takes the block away; one of the same record comes before the item.
//! 2. Items stay as bytes until their part is read. So this takes the live part of the ring, and 12 bytes for each item.
//! 3. A slice that has a group twice is refused, whichever way its groups go.

use std::collections::BTreeMap;
use std::ops::Range;

use super::sieve::Sieve;
use crate::layout::{BLOCKS_MAX, GROUP_PLACES, Key, Layout, SECTORS_ALL, Slot, mix};
use crate::map::{Entry, Head};
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
    /// Which groups those runs may have.
    sieve: Sieve,
    /// The first record.
    first: u64,
}

/// What an item says of blocks of a group.
#[derive(Debug, Clone, Copy)]
struct Said {
    group: Key,
    /// Which of the part's items, in the order of their records.
    number: u32,
    sequence: u64,
    /// The first block within the group, and how many.
    first: u32,
    count: u32,
    /// What the first has from then on; the others have the slots behind. None where they have none.
    entry: Option<Entry>,
}

/// A group of which items say something.
#[derive(Debug)]
struct Named {
    group: Key,
    said: Range<usize>,
    /// What the slice has of it.
    head: Option<Head>,
}

/// What records newer than its slice say of a part.
#[derive(Debug, Default)]
pub(super) struct Newer {
    as_of: u64,
    said: Vec<Said>,
    /// In the order of their keys.
    named: Vec<Named>,
    /// Hashes of those keys. A no is certain.
    bits: [u64; 16],
    /// Groups of which the slice alone says something, and that are not as it has them, or have odd blocks.
    others: Vec<Head>,
    /// The first record that the slice needs.
    needed: Option<u64>,
}

/// What becomes of a group that a slice has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is as the slice has it, and plain.
    Stays,
    /// [`Changes::apply`] says what it is.
    Kept,
    /// The slice has it twice.
    Twice,
}

/// A slice has a group twice.
#[derive(Debug)]
pub(super) struct Twice;

impl Newer {
    /// The memory that it takes, in bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        let Self { said, named, others, .. } = self;
        (said.capacity() * size_of::<Said>()
            + named.capacity() * size_of::<Named>()
            + others.capacity() * size_of::<Head>()) as u64
    }
}

fn bit_of(hash: u64) -> (usize, u64) {
    (usize::try_from(hash >> 6 & 15).expect("below 16"), 1 << (hash & 63))
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
        self.sieve = Sieve::of(self.cleared.0.iter().map(|(start, (end, _))| (*start, *end)));
    }

    /// The memory that they take, in bytes, without the records.
    pub(super) fn memory_bytes(&self) -> u64 {
        (self.places.capacity() * size_of::<Place>()) as u64 + self.cleared.0.len() as u64 * RUN_BYTES
    }

    /// What is newer than a slice which is as of this record. `records` are the bytes of all from the first one on.
    pub(super) fn newer(
        &self,
        layout: &Layout,
        (number, as_of): (u32, u64),
        records: &[&[u8]],
        newer: &mut Newer,
    ) {
        (newer.as_of, newer.needed, newer.bits) = (as_of, None, [0; 16]);
        newer.said.clear();
        newer.named.clear();
        newer.others.clear();
        let start = self.places.partition_point(|place| place.slice < number);
        for place in self.places[start..].iter().take_while(|place| place.slice == number) {
            let sequence = self.first + u64::from(place.record);
            if sequence <= as_of {
                continue;
            }
            let bytes = &records[place.record as usize][place.at as usize..];
            let item = Item::decode(bytes, layout.slots).expect("it was decoded before");
            let (key, count) = item.blocks().expect("only such items have places");
            let entry = match item {
                Item::Put { slot, sectors, dirty, .. } => Some(Entry { slot, sectors, dirty }),
                Item::Puts { slot, dirty, .. } => Some(Entry { slot, sectors: SECTORS_ALL, dirty }),
                _ => None,
            };
            let number = u32::try_from(newer.said.len()).expect("the ring has fewer");
            let (group, first) = (key.group(), key.index());
            newer.said.push(Said { group, number, sequence, first, count, entry });
        }
        newer.said.sort_unstable_by_key(|said| (said.group, said.number));
        let mut at = 0;
        for said in newer.said.chunk_by(|a, b| a.group == b.group) {
            let (word, bit) = bit_of(mix(layout.secret, said[0].group));
            newer.bits[word] |= bit;
            newer.named.push(Named { group: said[0].group, said: at..at + said.len(), head: None });
            at += said.len();
        }
    }

    /// What becomes of a group that the slice has.
    pub(super) fn fate(&self, head: &Head, newer: &mut Newer) -> Fate {
        let (word, bit) = bit_of(head.hash());
        if newer.bits[word] & bit != 0
            && let Ok(found) = newer.named.binary_search_by_key(&head.key, |named| named.group)
        {
            return match newer.named[found].head.replace(*head) {
                None => Fate::Kept,
                Some(_) => Fate::Twice,
            };
        }
        if head.is_plain() && !self.sieve.may_have(head.key) {
            return Fate::Stays;
        }
        newer.others.push(*head);
        Fate::Kept
    }

    /// The blocks of all groups that were kept, and of those that only records name: what they are now. The blocks of each group are
    /// neighbours, in the order of their keys. Returns the first record that the slice needs for that. An error when the slice has a
    /// group twice.
    pub(super) fn apply(
        &self,
        payload: &[u8],
        newer: &mut Newer,
        blocks: &mut Vec<(Key, Entry)>,
    ) -> Result<Option<u64>, Twice> {
        let Newer { as_of, said, named, others, needed, .. } = newer;
        others.sort_unstable_by_key(|head| head.key);
        if others.windows(2).any(|pair| pair[0].key == pair[1].key) {
            return Err(Twice);
        }
        for head in others.iter() {
            self.become_now((head.key, *as_of), Some((head, payload)), &[], needed, blocks);
        }
        for Named { group, said: own, head } in named.iter() {
            let head = head.as_ref().map(|head| (head, payload));
            self.become_now((*group, *as_of), head, &said[own.clone()], needed, blocks);
        }
        Ok(*needed)
    }

    fn become_now(
        &self,
        (group, as_of): (Key, u64),
        head: Option<(&Head, &[u8])>,
        said: &[Said],
        needed: &mut Option<u64>,
        blocks: &mut Vec<(Key, Entry)>,
    ) {
        let mut needs = |record: u64| *needed = Some(needed.map_or(record, |first| first.min(record)));
        let may_be_cleared = self.sieve.may_have(group);
        let cleared = |index: usize| match may_be_cleared {
            true => self.cleared.last(group.plus(index as u64)),
            false => 0,
        };
        let mut now = [None; GROUP_PLACES];
        for (key, entry) in head.into_iter().flat_map(|(head, payload)| head.entries(payload)) {
            let index = key.index() as usize;
            match cleared(index) {
                record if record > as_of => needs(record),
                _ => now[index] = Some(entry),
            }
        }
        for Said { sequence, first, count, entry, .. } in said {
            needs(*sequence);
            for n in 0..*count {
                let index = (first + n) as usize;
                let entry = entry.filter(|_| cleared(index) <= *sequence);
                now[index] = entry.map(|entry| Entry { slot: Slot(entry.slot.0 + n), ..entry });
            }
        }
        let now = (0..).zip(now).filter_map(|(index, entry)| Some((group.plus(index), entry?)));
        blocks.extend(now);
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;
    use crate::map::{Map, heads_of};
    use crate::regions::Word;

    type Blocks = BTreeMap<Key, Entry>;

    /// A record of random items, about blocks below `blocks` of disks 0 and 1.
    fn record(random: &mut Random, sequence: u64, slots: u32, blocks: u64) -> Record {
        let key = |random: &mut Random| Key::new(*random.pick(&[0, 1]), random.below(blocks));
        let mut items = Vec::new();
        if random.one_in(4) {
            items.push(match random.below(8) {
                0 => Item::NoRow(1),
                1 => Item::Void(Word { key: Key::new(*random.pick(&[0, 1]), 0), bits: 1 }),
                _ => Item::Zero { key: key(random), blocks: 1 + random.below(60), may_free: false },
            });
        }
        for _ in 0..random.below(12) {
            let (key, dirty) = (key(random), random.one_in(2));
            let slot = Slot(u32::try_from(random.below(u64::from(slots) - 16)).unwrap());
            let count = 1 + u32::try_from(random.below(u64::from(16 - key.index()))).unwrap();
            let is_several = count > 1;
            items.push(match random.below(4) {
                0 if is_several => Item::Drops { key, blocks: count },
                0 => Item::Drop { key },
                1 if is_several => Item::Puts { key, slot, blocks: count, dirty, check: None },
                1 | 2 => Item::Put { key, slot, sectors: SECTORS_ALL, dirty, checks: None },
                _ => Item::Put { key, slot, sectors: 5, dirty, checks: None },
            });
        }
        Record { id: 1, sequence, durable: sequence - 1, tail: 1, items }
    }

    /// What records say, one after the other; and which block's slice needs which record first.
    fn tell(record: &Record, blocks: &mut Blocks, mut needs: impl FnMut(Key)) {
        for item in &record.items {
            let gone = |key: &Key| match item {
                Item::NoRow(row) => key.row() == *row,
                Item::Void(word) => key.row() == word.key.row(),
                Item::Zero { key: first, blocks, .. } => {
                    (first.bits()..first.bits() + blocks).contains(&key.bits())
                }
                _ => false,
            };
            for key in blocks.keys().copied().filter(gone).collect::<Vec<_>>() {
                blocks.remove(&key);
                needs(key);
            }
            let Some((first, count)) = item.blocks() else { continue };
            for n in 0..count {
                let key = first.plus(u64::from(n));
                needs(key);
                match item {
                    Item::Put { slot, sectors, dirty, .. } => {
                        blocks.insert(key, Entry { slot: *slot, sectors: *sectors, dirty: *dirty })
                    }
                    Item::Puts { slot, dirty, .. } => {
                        let slot = Slot(slot.0 + n);
                        blocks.insert(key, Entry { slot, sectors: SECTORS_ALL, dirty: *dirty })
                    }
                    _ => blocks.remove(&key),
                };
            }
        }
    }

    #[test]
    fn slices_with_what_is_newer_are_what_all_records_say() {
        for seed in 0..300 {
            let mut random = Random::from_seed(seed);
            let layout = Layout::new(9000, 1 << 20, 0x5EC2_E700_0000_0001).unwrap();
            let blocks = [60, 400, 5000][random.index(3)];
            let records: Vec<Record> =
                (1..2 + random.below(12)).map(|n| record(&mut random, n, 9000, blocks)).collect();
            let mut model = Blocks::new();
            let mut base: Vec<Blocks> = Vec::new();
            for _ in 0..random.below(300) {
                let key = Key::new(*random.pick(&[0, 1]), random.below(blocks));
                let (slot, sectors) = (
                    Slot(u32::try_from(random.below(9000)).unwrap()),
                    *random.pick(&[SECTORS_ALL, SECTORS_ALL, 3]),
                );
                model.insert(key, Entry { slot, sectors, dirty: random.one_in(2) });
            }
            base.push(model.clone());
            for record in &records {
                tell(record, &mut model, |_| {});
                base.push(model.clone());
            }
            let encoded: Vec<Vec<u8>> = records.iter().map(Record::encode).collect();
            let bytes: Vec<&[u8]> = encoded.iter().map(|bytes| &bytes[..]).collect();
            let mut changes = Changes::from(1);
            records.iter().for_each(|record| changes.add(&layout, record));
            changes.sort();
            let (mut newer, mut heads) = (Newer::default(), Vec::new());
            for part in 0..layout.parts {
                let why = format!("seed {seed}, part {part}");
                // The slice is as of any of the records.
                let as_of = random.below(records.len() as u64 + 1);
                let is_own = |key: &Key| layout.part_of(*key) == part;
                let mut map = Map::new(&layout);
                for (key, entry) in
                    base[usize::try_from(as_of).unwrap()].iter().filter(|(key, _)| is_own(key))
                {
                    map.put(*key, *entry);
                }
                let payload = map.encode_part(part);
                heads_of(&layout, part, &payload, &mut heads).unwrap();
                changes.newer(&layout, (part + 1, as_of), &bytes, &mut newer);
                let (mut found, mut others) = (Blocks::new(), Vec::new());
                for head in &heads {
                    match changes.fate(head, &mut newer) {
                        Fate::Stays => found.extend(head.entries(&payload)),
                        Fate::Kept => {}
                        Fate::Twice => panic!("{why}"),
                    }
                }
                let needed = changes.apply(&payload, &mut newer, &mut others).unwrap();
                for group in others.chunk_by(|(a, _), (b, _)| a.group() == b.group()) {
                    assert!(group.is_sorted_by_key(|(key, _)| *key), "{why}");
                    assert!(!found.keys().any(|key| key.group() == group[0].0.group()), "{why}: once");
                    found.extend(group.iter().copied());
                }
                let wanted: Blocks =
                    model.iter().filter(|(key, _)| is_own(key)).map(|(k, e)| (*k, *e)).collect();
                assert_eq!(found, wanted, "{why}");
                // No later than the first record that changes a block of the slice.
                let (mut state, mut first) = (base[usize::try_from(as_of).unwrap()].clone(), None);
                for record in records.iter().filter(|record| record.sequence > as_of) {
                    tell(record, &mut state, |key| {
                        if is_own(&key) {
                            first = first.or(Some(record.sequence));
                        }
                    });
                }
                assert_eq!(needed.is_some(), first.is_some(), "{why}");
            }
        }
    }

    #[test]
    fn a_group_that_a_slice_has_twice_is_seen_whichever_way_it_goes() {
        let layout = Layout::new(4000, 1 << 20, 5).unwrap();
        let entry = |slot, sectors| Entry { slot: Slot(slot), sectors, dirty: false };
        let payload = |sectors: u8| {
            let mut map = Map::new(&layout);
            map.put(Key::new(0, 32), entry(7, sectors));
            let one = map.encode_part(0);
            [&one[..], &one[..]].concat()
        };
        let put = Item::Put { key: Key::new(0, 33), slot: Slot(9), sectors: 1, dirty: true, checks: None };
        let zero = Item::Zero { key: Key::new(0, 0), blocks: 90, may_free: false };
        for (sectors, items) in [(3, vec![]), (SECTORS_ALL, vec![put]), (SECTORS_ALL, vec![zero])] {
            let record = Record { id: 1, sequence: 1, durable: 0, tail: 1, items };
            let (mut changes, bytes) = (Changes::from(1), record.encode());
            changes.add(&layout, &record);
            changes.sort();
            let (mut newer, mut heads, payload) = (Newer::default(), Vec::new(), payload(sectors));
            heads_of(&layout, 0, &payload, &mut heads).unwrap();
            changes.newer(&layout, (1, 0), &[&bytes], &mut newer);
            let fates: Vec<Fate> = heads.iter().map(|head| changes.fate(head, &mut newer)).collect();
            let is_seen =
                fates.contains(&Fate::Twice) || changes.apply(&payload, &mut newer, &mut Vec::new()).is_err();
            assert!(is_seen, "{record:?}: {fates:?}");
        }
    }

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
