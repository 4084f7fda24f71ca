//! Which blocks are cached, and in which slots.
//!
//! ```text
//!   key of a group ─hash─► part ─► table: key, present, dirty, seen, odd, segment, run        20 bytes for 16 blocks
//!                                                                                  └─► units: two bytes for each block
//!                                                                                      that is present, in order
//!   a block that is odd ─► table: key, slot, sectors                                       14 bytes
//! ```
//!
//! 1. `dirty`, `seen` and `odd` have no bit that `present` has not. A group without a present block has no entry.
//! 2. A block is *odd* when its slot is not in the group's segment, or only some of its sectors are cached. Then
//!    its two bytes say nothing, and the side table has its slot and sectors. Others have all sectors.
//! 3. A part knows how long its slice is. A block is put in only where the slice has room, whatever it becomes
//!    there ([`Map::room_in`]), so a slice can always be written.
//! 4. The memory is at most 65 bytes for a full group, on average over how full the tables are: 20 bytes at 64 % to
//!    88 % of the places, and 34 with the mask of its page, which grow by an eighth.
//!
//! 5. What is counted for memory is the most that groups, odd blocks and numbers can take, with the places that tables
//!    leave empty and numbers that no run has ([`Map::grown_bytes`]). What small tables keep counts for the part
//!    ([`Map::empty_bytes_max`]). A block adds at most [`DIRTY_COST_MAX`], with its part of a copy of the slice and an
//!    entry in the set of dirty groups. The dirty blocks of a group, as if nothing else were in it, take at most
//!    [`dirty_cost`]. So a map without clean blocks has grown by no more than the cost of its groups.
//!
//! Nothing here reads or writes flash. Which slots are free is in `slots`.

mod fill;
mod found;
#[cfg(test)]
mod tests;

pub(crate) use fill::cost_of;
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use found::decode_part;
pub(crate) use found::{Head, heads_of};

use crate::layout::{GROUP_BLOCKS, Key, Layout, PAYLOAD_MAX, SECTORS_ALL, Slot};
use crate::table::{SMALL_PLACES, Table, entry_of, key_of};
use crate::units::{NUMBER_BYTES_MAX, SMALL_BYTES_MAX, Units, order_of};

/// What is known of a block that is cached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Where it is.
    pub(crate) slot: Slot,
    /// Which sectors are cached, at least one.
    pub(crate) sectors: u8,
    /// Home may have older bytes.
    pub(crate) dirty: bool,
}

/// The blocks of a group that have something in common: a bit for each, the first the lowest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GroupBits {
    /// The first block.
    pub(crate) key: Key,
    /// The blocks that are cached.
    pub(crate) present: u16,
    /// Those of which home may have older bytes.
    pub(crate) dirty: u16,
}

/// Words of a group, after the four of its key.
const PRESENT: usize = 4;
const DIRTY: usize = 5;
const SEEN: usize = 6;
const ODD: usize = 7;
const SEGMENT: usize = 8;
const RUN: usize = 9;
const GROUP_WORDS: usize = 10;
type Group = [u16; GROUP_WORDS];

/// Bytes of a slice: for a group, for a block, and for one that is odd.
const GROUP_LEN: u32 = 16;
const NUMBER_LEN: u32 = 2;
const ODD_LEN: u32 = 5;
/// The most that a block can add to a slice.
const BLOCK_LEN_MAX: u32 = GROUP_LEN + ODD_LEN;
/// [`PAYLOAD_MAX`], as parts count.
const PAYLOAD_BYTES_MAX: u32 = 90_048;
const _: () = assert!(PAYLOAD_BYTES_MAX as usize == PAYLOAD_MAX);
/// The most memory for a group (20 bytes of 64 % of the places), for a block that is odd (14 bytes of them), and for
/// what `state` keeps of a group that is dirty.
const GROUP_COST: u64 = 32;
const ODD_COST: u64 = 22;
const DIRTY_GROUP_COST: u64 = 24;
/// The most that a dirty block costs: it is odd, and the only one of its group. In a group that has more it costs less,
/// also where it makes the run longer.
pub(crate) const DIRTY_COST_MAX: u64 =
    GROUP_COST + ODD_COST + DIRTY_GROUP_COST + NUMBER_BYTES_MAX + BLOCK_LEN_MAX as u64;
/// Numbers of the run of a group.
const NUMBERS_MAX: usize = 16;

/// A part of the map: what one slice has.
#[derive(Debug)]
struct Part {
    groups: Table<GROUP_WORDS>,
    /// Words: key, slot, sectors.
    odd: Table<7>,
    units: Units,
    /// The length of the slice's payload, in bytes.
    payload: u32,
}

/// What became of a block, and the most memory that the dirty blocks of its group take: before, and now.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Changed {
    pub(crate) old: Option<Entry>,
    pub(crate) cost_before: u64,
    pub(crate) cost: u64,
}

/// The size of a part.
#[derive(Debug, Clone, Copy)]
struct Size {
    groups: u64,
    payload: u64,
    grown: u64,
}

/// All parts.
#[derive(Debug)]
pub(crate) struct Map {
    layout: Layout,
    parts: Vec<Part>,
    blocks: u64,
    dirty: u64,
    /// Sums over all parts.
    sum: Size,
    /// The group that is looked at next for groups of few blocks: part, place in its table.
    sparse_hand: (usize, usize),
    /// The group that is looked at next for blocks to give up: part, place in its table.
    hand: (usize, usize),
}

/// The place of a block among those that are present.
const fn rank(present: u16, index: u32) -> usize {
    (present & ((1 << index) - 1)).count_ones() as usize
}

impl Part {
    const fn new() -> Self {
        Self { groups: Table::new(), odd: Table::new(), units: Units::new(), payload: 0 }
    }

    fn entry(&self, secret: u64, group: &Group, key: Key) -> Option<Entry> {
        let bit = 1 << key.index();
        if group[PRESENT] & bit == 0 {
            return None;
        }
        let dirty = group[DIRTY] & bit != 0;
        if group[ODD] & bit != 0 {
            let place = self.odd.find(secret, key.bits()).expect("an odd block is in the side table");
            let [.., high, low, sectors] = *self.odd.at(place).expect("just found");
            let slot = Slot(u32::from(high) << 16 | u32::from(low));
            return Some(Entry { slot, sectors: (sectors & 0xFF) as u8, dirty });
        }
        let rank = rank(group[PRESENT], key.index());
        let within = self.units.run(group[RUN], rank + 1)[rank];
        Some(Entry { slot: Slot::of_segment(group[SEGMENT], within), sectors: SECTORS_ALL, dirty })
    }

    /// Puts a number into the run of a group at this rank, which is behind `count` that are there.
    fn widen(&mut self, run: u16, count: u32, rank: usize) -> u16 {
        let (old, new) = (order_of(count.max(1)), order_of(count + 1));
        let count = count as usize;
        if count == 0 {
            return self.units.take(0);
        }
        if old == new {
            self.units.run_mut(run, count + 1).copy_within(rank..count, rank + 1);
            return run;
        }
        let longer = self.units.take(new);
        let mut numbers = [0; NUMBERS_MAX];
        numbers[..count].copy_from_slice(self.units.run(run, count));
        let target = self.units.run_mut(longer, count + 1);
        target[..rank].copy_from_slice(&numbers[..rank]);
        target[rank + 1..].copy_from_slice(&numbers[rank..count]);
        self.units.give_back(run, old);
        longer
    }

    /// Takes the number at this rank out of a run of `count`.
    fn narrow(&mut self, run: u16, count: u32, rank: usize) -> u16 {
        let old = order_of(count);
        let len = count as usize;
        if count == 1 {
            self.units.give_back(run, old);
            return 0;
        }
        self.units.run_mut(run, len).copy_within(rank + 1..len, rank);
        let new = order_of(count - 1);
        if old == new {
            return run;
        }
        let mut numbers = [0; NUMBERS_MAX];
        numbers[..len - 1].copy_from_slice(self.units.run(run, len - 1));
        // Given back first: then the shorter run may stay where it is.
        self.units.give_back(run, old);
        let shorter = self.units.take(new);
        self.units.run_mut(shorter, len - 1).copy_from_slice(&numbers[..len - 1]);
        shorter
    }

    fn put(&mut self, secret: u64, key: Key, new: Entry) -> Changed {
        let (bit, index) = (1 << key.index(), key.index());
        let group_key = key.group().bits();
        let place = self.groups.find(secret, group_key).unwrap_or_else(|| {
            self.payload += GROUP_LEN;
            self.groups.insert(secret, entry_of(group_key))
        });
        let mut group = *self.groups.at(place).expect("just found");
        let cost_before = dirty_cost(&group);
        let old = self.entry(secret, &group, key);
        let rank = rank(group[PRESENT], index);
        if old.is_none() {
            group[RUN] = self.widen(group[RUN], group[PRESENT].count_ones(), rank);
            group[PRESENT] |= bit;
        }
        let others = group[PRESENT] & !group[ODD] & !bit;
        if others == 0 {
            group[SEGMENT] = new.slot.segment();
        }
        let was_odd = group[ODD] & bit != 0;
        let is_odd = new.sectors != SECTORS_ALL || new.slot.segment() != group[SEGMENT];
        self.payload -= len_of(old.is_some(), was_odd);
        self.payload += len_of(true, is_odd);
        if is_odd {
            let place = self.odd.find(secret, key.bits());
            let place = place.unwrap_or_else(|| self.odd.insert(secret, entry_of(key.bits())));
            let entry = self.odd.at_mut(place);
            (entry[4], entry[5], entry[6]) = (new.slot.segment(), new.slot.within(), u16::from(new.sectors));
            group[ODD] |= bit;
        } else if was_odd {
            self.forget_odd(secret, key);
            group[ODD] &= !bit;
        }
        self.units.run_mut(group[RUN], rank + 1)[rank] = new.slot.within();
        group[DIRTY] = if new.dirty { group[DIRTY] | bit } else { group[DIRTY] & !bit };
        *self.groups.at_mut(place) = group;
        self.close_gaps();
        Changed { old, cost_before, cost: dirty_cost(&group) }
    }

    /// Makes all runs anew where the pages have become sparse.
    fn close_gaps(&mut self) {
        if !self.units.is_sparse() {
            return;
        }
        let count_at = |place: usize| self.groups.at(place).map_or(0, |group| group[PRESENT].count_ones());
        let mut places: Vec<usize> = (0..self.groups.places()).filter(|place| count_at(*place) > 0).collect();
        // The longest first, so that none needs a page of which a shorter one has a part.
        places.sort_by_key(|place| std::cmp::Reverse(order_of(count_at(*place))));
        let mut units = Units::new();
        for place in places {
            let group = self.groups.at_mut(place);
            let count = group[PRESENT].count_ones();
            let run = units.take(order_of(count));
            units.run_mut(run, count as usize).copy_from_slice(self.units.run(group[RUN], count as usize));
            group[RUN] = run;
        }
        self.units = units;
    }

    fn size(&self) -> Size {
        Size {
            groups: self.groups.len() as u64,
            payload: u64::from(self.payload),
            grown: self.groups.len() as u64 * GROUP_COST
                + self.odd.len() as u64 * ODD_COST
                + self.units.used() * NUMBER_BYTES_MAX,
        }
    }

    fn forget_odd(&mut self, secret: u64, key: Key) {
        let place = self.odd.find(secret, key.bits()).expect("an odd block is in the side table");
        self.odd.remove(secret, place);
    }

    fn take_out(&mut self, secret: u64, key: Key) -> Changed {
        let bit = 1 << key.index();
        let none = Changed::default();
        let Some(place) = self.groups.find(secret, key.group().bits()) else { return none };
        let mut group = *self.groups.at(place).expect("just found");
        let Some(old) = self.entry(secret, &group, key) else { return none };
        let cost_before = dirty_cost(&group);
        self.payload -= len_of(true, group[ODD] & bit != 0);
        if group[ODD] & bit != 0 {
            self.forget_odd(secret, key);
        }
        group[RUN] = self.narrow(group[RUN], group[PRESENT].count_ones(), rank(group[PRESENT], key.index()));
        for bits in [PRESENT, DIRTY, SEEN, ODD] {
            group[bits] &= !bit;
        }
        if group[PRESENT] == 0 {
            self.payload -= GROUP_LEN;
            self.groups.remove(secret, place);
        } else {
            *self.groups.at_mut(place) = group;
        }
        self.close_gaps();
        Changed { old: Some(old), cost_before, cost: dirty_cost(&group) }
    }

    fn memory_bytes(&self) -> u64 {
        self.groups.memory_bytes() + self.odd.memory_bytes() + self.units.memory_bytes()
    }
}

/// What a block takes in a slice.
const fn len_of(is_there: bool, is_odd: bool) -> u32 {
    match (is_there, is_odd) {
        (false, _) => 0,
        (true, false) => NUMBER_LEN,
        (true, true) => ODD_LEN,
    }
}

/// The most memory that the dirty blocks of a group take.
fn dirty_cost(group: &Group) -> u64 {
    let dirty = group[DIRTY];
    if dirty == 0 {
        return 0;
    }
    let (count, odd) = (dirty.count_ones(), (dirty & group[ODD]).count_ones());
    let payload = GROUP_LEN + count * NUMBER_LEN + odd * (ODD_LEN - NUMBER_LEN);
    let numbers = NUMBER_BYTES_MAX << order_of(count);
    GROUP_COST + DIRTY_GROUP_COST + numbers + u64::from(odd) * ODD_COST + u64::from(payload)
}

/// What a part keeps that has hardly any blocks.
const PART_EMPTY_BYTES_MAX: u64 = (SMALL_PLACES * (2 * GROUP_WORDS + 2 * 7)) as u64 + SMALL_BYTES_MAX;

const fn bits_of(group: &Group) -> GroupBits {
    GroupBits { key: Key::from_bits(key_of(group)), present: group[PRESENT], dirty: group[DIRTY] }
}

/// The indexes of the bits that are set, upwards.
fn indexes(mut bits: u16) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let index = bits.trailing_zeros();
        bits &= bits.wrapping_sub(1);
        (index < 16).then_some(u64::from(index))
    })
}

impl GroupBits {
    /// The keys of the blocks that are cached, upwards.
    pub(crate) fn keys(&self) -> impl Iterator<Item = Key> {
        let first = self.key.bits();
        indexes(self.present).map(move |index| Key::from_bits(first + index))
    }

    /// The keys of those that are dirty, upwards.
    #[cfg(test)]
    pub(crate) fn dirty_keys(&self) -> impl Iterator<Item = Key> {
        let first = self.key.bits();
        indexes(self.dirty).map(move |index| Key::from_bits(first + index))
    }
}

impl Map {
    /// An empty map.
    pub(crate) fn new(layout: &Layout) -> Self {
        let parts = (0..layout.parts).map(|_| Part::new()).collect();
        let sum = Size { groups: 0, payload: 0, grown: 0 };
        Self { layout: *layout, parts, blocks: 0, dirty: 0, sum, sparse_hand: (0, 0), hand: (0, 0) }
    }

    /// How many blocks are cached.
    pub(crate) const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// How many of them are dirty.
    pub(crate) const fn dirty_blocks(&self) -> u64 {
        self.dirty
    }

    /// How many parts there are.
    #[cfg(test)]
    pub(crate) const fn parts(&self) -> u32 {
        self.layout.parts
    }

    /// What is known of a block.
    pub(crate) fn get(&self, key: Key) -> Option<Entry> {
        let part = &self.parts[self.layout.part_of(key) as usize];
        let place = part.groups.find(self.layout.secret, key.group().bits())?;
        part.entry(self.layout.secret, part.groups.at(place).expect("just found"), key)
    }

    /// The same, and the block counts as seen.
    pub(crate) fn get_seen(&mut self, key: Key) -> Option<Entry> {
        let secret = self.layout.secret;
        let part = &mut self.parts[self.layout.part_of(key) as usize];
        let place = part.groups.find(secret, key.group().bits())?;
        let entry = part.entry(secret, part.groups.at(place).expect("just found"), key)?;
        part.groups.at_mut(place)[SEEN] |= 1 << key.index();
        Some(entry)
    }

    /// Which blocks of the group of this key are cached.
    pub(crate) fn group(&self, key: Key) -> Option<GroupBits> {
        self.find_group(key).map(bits_of)
    }

    /// The block is in this slot from now on; what was known of it before. Whether it was seen stays as it is, and a
    /// new block was not. A caller makes sure that its part has room.
    pub(crate) fn put(&mut self, key: Key, entry: Entry) -> Option<Entry> {
        self.put_in(key, entry).old
    }

    /// As above, and what it means for the memory.
    pub(crate) fn put_in(&mut self, key: Key, entry: Entry) -> Changed {
        debug_assert!(entry.sectors != 0 && entry.slot.0 < self.layout.slots);
        let (number, secret) = (self.layout.part_of(key) as usize, self.layout.secret);
        let changed = self.changing(number, |part| part.put(secret, key, entry));
        debug_assert!(self.parts[number].payload as usize <= PAYLOAD_MAX, "a slice is full");
        self.blocks += u64::from(changed.old.is_none());
        self.dirty -= u64::from(changed.old.is_some_and(|old| old.dirty));
        self.dirty += u64::from(entry.dirty);
        changed
    }

    /// The block is not cached any more; what was known of it.
    pub(crate) fn remove(&mut self, key: Key) -> Option<Entry> {
        self.take_out(key).old
    }

    /// As above, and what it means for the memory.
    pub(crate) fn take_out(&mut self, key: Key) -> Changed {
        let (number, secret) = (self.layout.part_of(key) as usize, self.layout.secret);
        let changed = self.changing(number, |part| part.take_out(secret, key));
        if let Some(old) = changed.old {
            self.blocks -= 1;
            self.dirty -= u64::from(old.dirty);
        }
        changed
    }

    /// Changes a part, and counts how it grows.
    fn changing(&mut self, number: usize, change: impl FnOnce(&mut Part) -> Changed) -> Changed {
        let part = &mut self.parts[number];
        let before = part.size();
        let changed = change(part);
        let after = part.size();
        self.note_size(before, after);
        changed
    }

    fn note_size(&mut self, before: Size, after: Size) {
        self.sum.groups = self.sum.groups + after.groups - before.groups;
        self.sum.payload = self.sum.payload + after.payload - before.payload;
        self.sum.grown = self.sum.grown + after.grown - before.grown;
    }

    /// How many groups have a cached block.
    pub(crate) const fn groups(&self) -> u64 {
        self.sum.groups
    }

    /// The payloads of all slices, in bytes.
    pub(crate) const fn payload_bytes(&self) -> u64 {
        self.sum.payload
    }

    /// The most memory that parts take beyond what hardly any blocks do, in bytes: by what is in them, so that it grows
    /// with each block, and not when a table does.
    pub(crate) const fn grown_bytes(&self) -> u64 {
        self.sum.grown
    }

    /// The most memory for hardly any blocks, in bytes.
    pub(crate) fn empty_bytes_max(&self) -> u64 {
        (self.parts.capacity() * size_of::<Part>()) as u64 + self.parts.len() as u64 * PART_EMPTY_BYTES_MAX
    }

    /// The groups of a part, and the most memory that their dirty blocks take.
    pub(crate) fn dirty_costs_in(&self, part: u32) -> impl Iterator<Item = (GroupBits, u64)> {
        self.parts[part as usize].groups.iter().map(|group| (bits_of(group), dirty_cost(group)))
    }

    /// Blocks to give up for memory, at most `most`, of groups that are all clean: those of which give up `bytes`, the
    /// groups of fewest blocks first, and of those the ones that were not seen. Looks at the next `groups_max` groups, so
    /// it may find none although there are some: a caller asks again.
    pub(crate) fn sparse(&mut self, bytes: u64, most: usize, groups_max: usize) -> Vec<Key> {
        let start = self.sparse_hand;
        let (mut number, mut place) = start;
        let (mut looked, mut has_turned) = (0, false);
        let mut found: Vec<(u32, bool, GroupBits, u64)> = Vec::new();
        while looked < groups_max && !(has_turned && (number, place) >= start) {
            let part = &self.parts[number];
            if place >= part.groups.places() {
                has_turned |= number + 1 == self.parts.len();
                number = if number + 1 == self.parts.len() { 0 } else { number + 1 };
                place = 0;
                continue;
            }
            place += 1;
            let Some(group) = part.groups.at(place - 1) else { continue };
            looked += 1;
            if group[DIRTY] != 0 {
                continue;
            }
            let (blocks, odd) = (group[PRESENT].count_ones(), group[ODD].count_ones());
            let payload = GROUP_LEN + NUMBER_LEN * blocks + (ODD_LEN - NUMBER_LEN) * odd;
            let numbers = NUMBER_BYTES_MAX << order_of(blocks);
            let gone = GROUP_COST + u64::from(odd) * ODD_COST + numbers + u64::from(payload);
            found.push((blocks, group[SEEN] != 0, bits_of(group), gone));
        }
        self.sparse_hand = (number, place);
        found.sort_by_key(|(blocks, is_seen, ..)| (*blocks, *is_seen));
        let (mut keys, mut freed) = (Vec::new(), 0);
        for (.., bits, gone) in found {
            if freed >= bytes || keys.len() >= most {
                break;
            }
            let left = most - keys.len();
            keys.extend(bits.keys().take(left));
            freed += gone;
        }
        keys
    }

    /// Home has, or has not, what the cache has of this block. Nothing changes when the block is not cached.
    #[cfg(test)]
    pub(crate) fn set_dirty(&mut self, key: Key, dirty: bool) {
        let number = self.layout.part_of(key) as usize;
        let part = &mut self.parts[number];
        let Some(place) = part.groups.find(self.layout.secret, key.group().bits()) else { return };
        let (group, bit) = (part.groups.at_mut(place), 1 << key.index());
        let was_dirty = group[DIRTY] & bit != 0;
        if group[PRESENT] & bit != 0 && was_dirty != dirty {
            group[DIRTY] ^= bit;
            self.dirty = if dirty { self.dirty + 1 } else { self.dirty - 1 };
        }
    }

    /// The block was used, or (`false`) is the first to be given up. Nothing changes when it is not cached.
    pub(crate) fn set_seen(&mut self, key: Key, seen: bool) {
        let part = &mut self.parts[self.layout.part_of(key) as usize];
        if let Some(place) = part.groups.find(self.layout.secret, key.group().bits()) {
            let (group, bit) = (part.groups.at_mut(place), 1 << key.index());
            group[SEEN] = if seen { group[SEEN] | bit & group[PRESENT] } else { group[SEEN] & !bit };
        }
    }

    /// Whether the block was used since it was last looked at for being given up.
    pub(crate) fn is_seen(&self, key: Key) -> bool {
        self.find_group(key).is_some_and(|group| group[SEEN] & 1 << key.index() != 0)
    }

    /// The segment in which a new slot of this block should be: that of its group.
    pub(crate) fn segment_for(&self, key: Key) -> Option<u16> {
        let group = self.find_group(key)?;
        (group[PRESENT] & !group[ODD] != 0).then_some(group[SEGMENT])
    }

    /// How many more blocks the part of this key has room for, whatever they become there.
    pub(crate) fn room_in(&self, part: u32) -> u32 {
        (PAYLOAD_BYTES_MAX - self.parts[part as usize].payload.min(PAYLOAD_BYTES_MAX)) / BLOCK_LEN_MAX
    }

    /// Whether this block can be put in, whatever it becomes: it may be there already.
    pub(crate) fn has_room(&self, key: Key) -> bool {
        self.room_in(self.layout.part_of(key)) > 0
    }

    /// The groups of a part, in no order.
    pub(crate) fn groups_in(&self, part: u32) -> impl Iterator<Item = GroupBits> {
        self.parts[part as usize].groups.iter().map(bits_of)
    }

    /// The cached blocks of a part with what is known of them, in no order.
    pub(crate) fn entries_in(&self, part: u32) -> impl Iterator<Item = (Key, Entry)> {
        let (part, secret) = (&self.parts[part as usize], self.layout.secret);
        part.groups.iter().flat_map(move |group| {
            bits_of(group)
                .keys()
                .collect::<smallvec::SmallVec<[Key; 16]>>()
                .into_iter()
                .map(move |key| (key, part.entry(secret, group, key).expect("it is present")))
        })
    }

    /// All cached blocks, in no order.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (Key, Entry)> {
        (0..self.layout.parts).flat_map(|part| self.entries_in(part))
    }

    /// The groups that have a cached block among these `blocks` blocks, in order; with the bits of those blocks
    /// alone. Looks at each group of the run, or at each of the map, whichever are fewer.
    pub(crate) fn groups_between(&self, first: Key, blocks: u64) -> Vec<GroupBits> {
        let (start, end) = (first.bits(), first.bits().saturating_add(blocks));
        let clipped = |bits: GroupBits| {
            let (from, to) = (bits.key.bits().max(start), (bits.key.bits() + GROUP_BLOCKS).min(end));
            if from >= to {
                return None;
            }
            let (low, count) = (from - bits.key.bits(), to - from);
            let mask = u16::try_from(((1_u32 << count) - 1) << low).expect("within sixteen bits");
            let bits = GroupBits { present: bits.present & mask, dirty: bits.dirty & mask, ..bits };
            (bits.present != 0).then_some(bits)
        };
        let in_run = blocks / GROUP_BLOCKS + 2;
        let in_map: u64 = self.parts.iter().map(|part| part.groups.len() as u64).sum();
        if in_run <= in_map + u64::from(self.layout.parts) {
            let groups = (first.group().bits()..end).step_by(16);
            return groups.filter_map(|key| self.group(Key::from_bits(key))).filter_map(clipped).collect();
        }
        let mut found: Vec<_> =
            (0..self.layout.parts).flat_map(|part| self.groups_in(part)).filter_map(clipped).collect();
        found.sort_unstable_by_key(|bits| bits.key);
        found
    }

    /// The cached blocks among these `blocks` blocks, in order.
    pub(crate) fn keys_between(&self, first: Key, blocks: u64) -> Vec<Key> {
        self.groups_between(first, blocks).iter().flat_map(GroupBits::keys).collect()
    }

    /// Up to `most` clean blocks that were not seen since the hand last passed them. Those that were are passed, and
    /// count as not seen from now on. Looks at no more than `groups_max` groups, and at none twice, so it may find
    /// none although there are some: a caller asks again.
    pub(crate) fn sweep(&mut self, most: usize, groups_max: usize) -> Vec<Key> {
        self.pass(most, groups_max, true)
    }

    /// As [`Map::sweep`], but what was seen still counts as seen.
    pub(crate) fn find_unseen(&mut self, most: usize, groups_max: usize) -> Vec<Key> {
        self.pass(most, groups_max, false)
    }

    fn pass(&mut self, most: usize, groups_max: usize, clears: bool) -> Vec<Key> {
        let mut found = Vec::new();
        // A table may have become smaller since.
        self.hand.1 = self.hand.1.min(self.parts[self.hand.0].groups.places());
        let (mut groups, start) = (0, self.hand);
        let mut has_turned = false;
        while found.len() < most && groups < groups_max && self.blocks > self.dirty {
            let (number, place) = self.hand;
            if has_turned && self.hand >= start {
                break;
            }
            let part = &mut self.parts[number];
            if place >= part.groups.places() {
                let next = number + 1;
                has_turned |= next == self.parts.len();
                self.hand = (if next == self.parts.len() { 0 } else { next }, 0);
                // Empty parts also cost a look.
                groups += usize::from(place == 0);
                continue;
            }
            self.hand.1 += 1;
            let Some(entry) = part.groups.at(place) else { continue };
            groups += 1;
            let (key, clean) = (Key::from_bits(key_of(entry)), entry[PRESENT] & !entry[DIRTY]);
            let unseen = clean & !entry[SEEN];
            if clears {
                part.groups.at_mut(place)[SEEN] &= !clean;
            }
            let left = most - found.len();
            found.extend(indexes(unseen).take(left).map(|index| Key::from_bits(key.bits() + index)));
        }
        found
    }

    /// The payload of a part's slice.
    pub(crate) fn encode_part(&self, part: u32) -> Vec<u8> {
        let part = &self.parts[part as usize];
        let mut payload = Vec::with_capacity(part.payload as usize);
        for group in part.groups.iter() {
            let key = Key::from_bits(key_of(group));
            payload.extend(key.bits().to_be_bytes());
            for word in [PRESENT, DIRTY, ODD, SEGMENT] {
                payload.extend(group[word].to_be_bytes());
            }
            for index in indexes(group[PRESENT]) {
                let key = Key::from_bits(key.bits() + index);
                let entry = part.entry(self.layout.secret, group, key).expect("it is present");
                if group[ODD] & 1 << index != 0 {
                    payload.extend(entry.slot.0.to_be_bytes());
                    payload.push(entry.sectors);
                } else {
                    payload.extend(entry.slot.within().to_be_bytes());
                }
            }
        }
        debug_assert_eq!(payload.len(), part.payload as usize);
        payload
    }

    /// The memory that the map takes, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let own = self.parts.capacity() * size_of::<Part>();
        own as u64 + self.parts.iter().map(Part::memory_bytes).sum::<u64>()
    }

    fn find_group(&self, key: Key) -> Option<&Group> {
        let part = &self.parts[self.layout.part_of(key) as usize];
        let place = part.groups.find(self.layout.secret, key.group().bits())?;
        part.groups.at(place)
    }
}
