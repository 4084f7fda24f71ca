//! A part of the map as its slice has it, read group by group.
//!
//! ```text
//!   payload ─► heads: key, bits, segment, where the numbers are       a full part has 256 of them, and 4096 blocks
//!                ├─ plain: all blocks are whole, in one segment ─► its numbers go into the map as they are
//!                └─ others ─► their blocks, one by one (`fill`)
//! ```
//!
//! 1. A payload is trusted for nothing. What one group can be wrong by itself is looked at here: its key, its part, its bits, slots
//!    and rows that there cannot be, bytes that are missing.
//! 2. That a group is there twice shows when it is put into the map, and in `decode_part`. Whether two blocks have one slot is
//!    looked at by `recover`.

use super::{DIRTY, PRESENT, RUN, SEGMENT};
use super::{
    DIRTY_GROUP_COST, Entry, GROUP_COST, GROUP_LEN, GROUP_WORDS, Group, Map, NUMBER_BYTES_MAX, NUMBER_LEN,
    ODD_LEN, Part, indexes, len_of,
};
use crate::bytes::{be16, be32, be64};
use crate::layout::{GROUP_PLACES, Key, Layout, ROWS_MAX, SECTORS_ALL, SEGMENT_SLOTS, Slot, mix};
use crate::table::entry_of;
use crate::units::order_of;

const HEAD_LEN: usize = GROUP_LEN as usize;

/// What a slice says of a group, and where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    /// The first block.
    pub(crate) key: Key,
    hash: u64,
    pub(crate) present: u16,
    pub(crate) dirty: u16,
    odd: u16,
    pub(crate) segment: u16,
    /// Where in the payload its numbers begin.
    at: u32,
}

impl Head {
    /// The hash of its key ([`mix`]).
    pub(crate) const fn hash(&self) -> u64 {
        self.hash
    }

    /// Whether all its blocks are whole and in its segment.
    pub(crate) const fn is_plain(&self) -> bool {
        self.odd == 0
    }

    /// How many blocks it has.
    pub(crate) const fn blocks(&self) -> u32 {
        self.present.count_ones()
    }

    /// The key of its nth block.
    pub(crate) fn nth(&self, n: usize) -> Key {
        let index = indexes(self.present).nth(n).expect("it has as many");
        Key::from_bits(self.key.bits() + index)
    }

    /// Of a plain group, the slots of its blocks within the segment.
    pub(crate) fn numbers<'a>(&self, payload: &[u8], into: &'a mut [u16; GROUP_PLACES]) -> &'a [u16] {
        debug_assert!(self.is_plain());
        let (count, at) = (self.blocks() as usize, self.at as usize);
        let bytes = &payload[at..at + count * NUMBER_LEN as usize];
        for (number, bytes) in into.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *number = u16::from_be_bytes(*bytes);
        }
        &into[..count]
    }

    /// Its blocks, in order.
    pub(crate) fn entries<'a>(&self, payload: &'a [u8]) -> impl Iterator<Item = (Key, Entry)> + use<'a> {
        let (head, mut at) = (*self, self.at as usize);
        indexes(self.present).map(move |index| {
            let is_odd = head.odd & 1 << index != 0;
            let number = &payload[at..];
            at += len_of(true, is_odd) as usize;
            let (slot, sectors) = match is_odd {
                true => (Slot(be32(number, 0)), number[4]),
                false => (Slot::of_segment(head.segment, be16(number, 0)), SECTORS_ALL),
            };
            let entry = Entry { slot, sectors, dirty: head.dirty & 1 << index != 0 };
            (Key::from_bits(head.key.bits() + index), entry)
        })
    }

    /// As `cost_of`, of a plain group.
    pub(crate) const fn cost(&self) -> u64 {
        let count = self.blocks();
        let dirty = if self.dirty != 0 { DIRTY_GROUP_COST } else { 0 };
        GROUP_COST + (NUMBER_BYTES_MAX << order_of(count)) + (GROUP_LEN + NUMBER_LEN * count) as u64 + dirty
    }
}

/// The groups of the payload of part `part`'s slice. `None` when it is none: a group of another part or without blocks, a slot or a
/// row that there cannot be, bytes at the end.
#[must_use]
pub(crate) fn heads_of(layout: &Layout, part: u32, payload: &[u8], heads: &mut Vec<Head>) -> Option<()> {
    heads.clear();
    // Those before have all their slots.
    let last_segment = layout.slots / SEGMENT_SLOTS;
    let mut at = 0;
    while at < payload.len() {
        let bytes: &[u8; HEAD_LEN] = payload.get(at..at + HEAD_LEN)?.first_chunk()?;
        at += HEAD_LEN;
        let key = Key::from_bits(be64(bytes, 0));
        let [present, dirty, odd, segment] = [8, 10, 12, 14].map(|at| be16(bytes, at));
        let hash = mix(layout.secret, key);
        let is_good = key.group() == key
            && key.row() < ROWS_MAX
            && layout.part_of_hash(hash) == part
            && present != 0
            && (dirty | odd) & !present == 0;
        let len = NUMBER_LEN * present.count_ones() + (ODD_LEN - NUMBER_LEN) * odd.count_ones();
        let end = at + len as usize;
        if !is_good || end > payload.len() {
            return None;
        }
        let start = u32::try_from(at).expect("a payload is short");
        let head = Head { key, hash, present, dirty, odd, segment, at: start };
        let can_be = |entry: Entry| entry.slot.0 < layout.slots && entry.sectors != 0;
        let is_certain = odd == 0 && u32::from(segment) < last_segment;
        if !is_certain && !head.entries(payload).all(|(_, entry)| can_be(entry)) {
            return None;
        }
        heads.push(head);
        at = end;
    }
    Some(())
}

/// The blocks that the payload of part `part`'s slice names. `None` when it is none, by rule 1 or because a group is there twice.
/// Whether two blocks have one slot is not looked at.
#[cfg(any(test, feature = "fuzz"))]
pub(crate) fn decode_part(layout: &Layout, part: u32, payload: &[u8]) -> Option<Vec<(Key, Entry)>> {
    let mut heads = Vec::new();
    heads_of(layout, part, payload, &mut heads)?;
    let mut keys: Vec<Key> = heads.iter().map(|head| head.key).collect();
    keys.sort_unstable();
    let is_once = keys.windows(2).all(|pair| pair[0] != pair[1]);
    is_once.then(|| heads.iter().flat_map(|head| head.entries(payload)).collect())
}

impl Part {
    /// A plain group. False when it is there already.
    fn fill_plain(&mut self, head: &Head, payload: &[u8]) -> bool {
        let mut group: Group = entry_of::<GROUP_WORDS>(head.key.bits());
        let count = head.blocks();
        (group[PRESENT], group[DIRTY], group[SEGMENT]) = (head.present, head.dirty, head.segment);
        group[RUN] = self.units.take(order_of(count));
        let mut numbers = [0; GROUP_PLACES];
        let numbers = head.numbers(payload, &mut numbers);
        self.units.run_mut(group[RUN], numbers.len()).copy_from_slice(numbers);
        self.payload += GROUP_LEN + NUMBER_LEN * count;
        self.groups.insert_found(head.hash, group)
    }
}

impl Map {
    /// Fills a part with plain groups, and with groups of these blocks, as [`Map::fill`] does. False when one is there twice.
    #[must_use]
    pub(crate) fn fill_found(
        &mut self,
        part: u32,
        (plain, payload): (&[Head], &[u8]),
        others: &[(Key, Entry)],
    ) -> bool {
        let groups = || others.chunk_by(|(a, _), (b, _)| a.group() == b.group());
        let own = &mut self.parts[part as usize];
        let before = own.size();
        let numbers = plain.iter().map(|head| 1 << order_of(head.blocks())).sum::<usize>();
        own.groups.reserve(self.layout.secret, plain.len() + groups().count());
        own.units.reserve(numbers + others.len());
        for head in plain {
            if !own.fill_plain(head, payload) {
                return false;
            }
            self.blocks += u64::from(head.blocks());
            self.dirty += u64::from(head.dirty.count_ones());
        }
        let after = own.size();
        self.note_size(before, after);
        self.fill(part, groups().count(), groups())
    }
}
