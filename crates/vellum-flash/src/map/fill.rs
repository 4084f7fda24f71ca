//! A map that is filled from flash: whole groups at once, which take their places in it without growing.

use super::{DIRTY, DIRTY_GROUP_COST, ODD, PRESENT, RUN, SEGMENT};
use super::{
    Entry, GROUP_COST, GROUP_LEN, GROUP_WORDS, Group, Map, NUMBER_BYTES_MAX, NUMBER_LEN, ODD_COST, ODD_LEN,
    Part, len_of,
};
use crate::layout::{Key, SECTORS_ALL};
use crate::table::entry_of;
use crate::units::order_of;

/// The segment of a group that has these blocks: that of most of the whole ones.
fn segment_of(blocks: &[(Key, Entry)]) -> u16 {
    let whole = || {
        let is_whole = |(_, entry): &&(Key, Entry)| entry.sectors == SECTORS_ALL;
        blocks.iter().filter(is_whole).map(|(_, entry)| entry.slot.segment())
    };
    let first = whole().next().unwrap_or_else(|| blocks[0].1.slot.segment());
    if whole().all(|segment| segment == first) {
        return first;
    }
    let count = |segment: &u16| whole().filter(|other| other == segment).count();
    whole().max_by_key(count).unwrap_or(first)
}

fn is_odd(segment: u16, entry: &Entry) -> bool {
    entry.sectors != SECTORS_ALL || entry.slot.segment() != segment
}

/// The most memory that a group of these blocks takes, with its part of a copy of the slice, and, where one is dirty, what
/// `state` keeps of it.
pub(crate) fn cost_of(blocks: &[(Key, Entry)]) -> u64 {
    let segment = segment_of(blocks);
    let count = u32::try_from(blocks.len()).expect("at most those of a group");
    let odd = blocks.iter().filter(|(_, entry)| is_odd(segment, entry)).count() as u64;
    let payload = u64::from(GROUP_LEN + NUMBER_LEN * count) + odd * u64::from(ODD_LEN - NUMBER_LEN);
    let dirty = if blocks.iter().any(|(_, entry)| entry.dirty) { DIRTY_GROUP_COST } else { 0 };
    GROUP_COST + odd * ODD_COST + (NUMBER_BYTES_MAX << order_of(count)) + payload + dirty
}

impl Part {
    /// The blocks of a group, in order. False, and nothing is put in, when it is there already.
    fn fill(&mut self, secret: u64, blocks: &[(Key, Entry)]) -> bool {
        let key = blocks[0].0.group().bits();
        if self.groups.find(secret, key).is_some() {
            return false;
        }
        let segment = segment_of(blocks);
        let mut group: Group = entry_of::<GROUP_WORDS>(key);
        group[SEGMENT] = segment;
        group[RUN] =
            self.units.take(order_of(u32::try_from(blocks.len()).expect("at most those of a group")));
        self.payload += GROUP_LEN;
        for (key, entry) in blocks {
            let (bit, is_odd) = (1 << key.index(), is_odd(segment, entry));
            group[PRESENT] |= bit;
            if entry.dirty {
                group[DIRTY] |= bit;
            }
            if is_odd {
                group[ODD] |= bit;
                let mut odd = entry_of(key.bits());
                (odd[4], odd[5], odd[6]) =
                    (entry.slot.segment(), entry.slot.within(), u16::from(entry.sectors));
                self.odd.insert(secret, odd);
            }
            self.payload += len_of(true, is_odd);
        }
        let numbers = self.units.run_mut(group[RUN], blocks.len());
        for (number, (_, entry)) in numbers.iter_mut().zip(blocks) {
            *number = entry.slot.within();
        }
        self.groups.insert(secret, group);
        true
    }
}

impl Map {
    /// Fills a part with groups. The blocks of each group are neighbours here, in the order of their keys. False when it has one of
    /// the groups already; then what it has says nothing. Whether there is memory, and whether the slice has room, is up to the
    /// caller ([`Map::payload_of`]).
    #[must_use]
    pub(crate) fn fill<'a>(
        &mut self,
        part: u32,
        count: usize,
        groups: impl Iterator<Item = &'a [(Key, Entry)]>,
    ) -> bool {
        let secret = self.layout.secret;
        let own = &mut self.parts[part as usize];
        let before = own.size();
        own.groups.reserve(secret, count);
        for blocks in groups {
            if !own.fill(secret, blocks) {
                return false;
            }
            self.blocks += blocks.len() as u64;
            self.dirty += blocks.iter().filter(|(_, entry)| entry.dirty).count() as u64;
        }
        let after = own.size();
        self.note_size(before, after);
        true
    }

    /// The length of a part's slice, in bytes.
    pub(crate) fn payload_of(&self, part: u32) -> usize {
        self.parts[part as usize].payload as usize
    }

    /// The clean blocks of a part, those of groups with the fewest blocks first.
    pub(crate) fn clean_in(&self, part: u32) -> Vec<(Key, Entry)> {
        let mut clean: Vec<(u32, Key, Entry)> = self
            .entries_in(part)
            .filter(|(_, entry)| !entry.dirty)
            .map(|(key, entry)| {
                let blocks = self.group(key).map_or(0, |group| group.present.count_ones());
                (blocks, key, entry)
            })
            .collect();
        clean.sort_unstable_by_key(|(blocks, key, _)| (*blocks, *key));
        clean.into_iter().map(|(_, key, entry)| (key, entry)).collect()
    }
}
