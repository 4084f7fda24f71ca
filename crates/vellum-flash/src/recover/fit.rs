//! The map as it is read from flash, within the memory that blocks may take.
//!
//! ```text
//!   part ─► all of it fits: all ─► map               plain groups as they are on flash
//!        └► it does not: dirty blocks ─► map        also where it takes more; then earlier parts give up clean ones, the last first
//!                        clean groups ─► map        those of most blocks first, as long as there is memory
//!                        the others   ─► nowhere    their slots leave, unrecorded, their slices are short
//! ```
//!
//! 1. At no time does the map take more than the memory, save for one part, and for dirty blocks that take more by themselves.
//! 2. Nothing dirty is left out. Of what is clean home has the same.
//! 3. A slot whose block is left out is not free: a slice on flash names it. `State::write_short` sees to that.
//! 4. Once something was left out, a headroom stays free too: the next seal would give it up anyway.

use std::collections::BTreeSet;

use crate::layout::Key;
use crate::map::{Entry, Head, Map, cost_of};
use crate::opened::Opened;
use crate::slots::Slots;
use crate::state::{Budget, blocks_bytes};

/// A block that is cached.
type Block = (Key, Entry);

/// What is kept of a map.
#[derive(Debug, Default)]
pub(super) struct Fit {
    /// None where all is kept.
    budget: Option<Budget>,
    dirty_groups: u64,
    /// Parts that may have clean blocks in the map, the last one read last.
    clean_parts: Vec<u32>,
    /// The memory was too little for something.
    is_over: bool,
    /// Slices of which something was left out.
    short: BTreeSet<u32>,
    opened: Opened,
}

impl Fit {
    pub(super) fn new(budget: Option<Budget>) -> Self {
        Self { budget, ..Self::default() }
    }

    /// The groups of the next part: plain ones, and the blocks of the others, each group's together and in order. Their slots are
    /// taken. `more` is what else is in memory. False when a group is there twice.
    #[must_use]
    pub(super) fn keep(
        &mut self,
        map: &mut Map,
        slots: &mut Slots,
        (part, (plain, payload), others): (u32, (&[Head], &[u8]), &[Block]),
        more: u64,
    ) -> bool {
        self.opened.slices_read += 1;
        let groups = || others.chunk_by(|(a, _), (b, _)| a.group() == b.group());
        let is_dirty = |blocks: &[Block]| blocks.iter().any(|(_, entry)| entry.dirty);
        let own_bytes = plain.iter().map(Head::cost).sum::<u64>() + groups().map(cost_of).sum::<u64>();
        if own_bytes == 0 {
            return true;
        }
        let fits = self.left(map).is_none_or(|left| left >= i128::from(own_bytes));
        let dirty_groups = plain.iter().filter(|head| head.dirty != 0).count()
            + groups().filter(|blocks| is_dirty(blocks)).count();
        let is_once = if fits {
            self.clean_parts.push(part);
            map.fill_found(part, (plain, payload), others)
        } else {
            let mut blocks: Vec<Block> = plain.iter().flat_map(|head| head.entries(payload)).collect();
            blocks.extend_from_slice(others);
            let groups = || blocks.chunk_by(|(a, _), (b, _)| a.group() == b.group());
            // One of two may be left out.
            let mut keys: Vec<Key> = groups().map(|blocks| blocks[0].0.group()).collect();
            keys.sort_unstable();
            keys.windows(2).all(|pair| pair[0] != pair[1]) && self.keep_some(map, slots, part, groups())
        };
        self.dirty_groups += dirty_groups as u64;
        self.note_bytes(map, more);
        self.make_room(map, slots);
        is_once
    }

    /// What blocks may take beyond what they do; none without a bound.
    fn left(&self, map: &Map) -> Option<i128> {
        let budget = self.budget.as_ref()?;
        let headroom = if self.is_over { budget.headroom() } else { 0 };
        let used = blocks_bytes(map, self.dirty_groups) + headroom;
        Some(i128::from(budget.for_blocks()) - i128::from(used))
    }

    fn keep_some<'a>(
        &mut self,
        map: &mut Map,
        slots: &mut Slots,
        part: u32,
        groups: impl Iterator<Item = &'a [Block]>,
    ) -> bool {
        self.is_over = true;
        let (mut kept, mut clean): (Vec<Vec<Block>>, Vec<&[Block]>) = (Vec::new(), Vec::new());
        for blocks in groups {
            let (dirty, others): (Vec<Block>, Vec<Block>) = blocks.iter().partition(|(_, entry)| entry.dirty);
            if dirty.is_empty() {
                clean.push(blocks);
                continue;
            }
            self.leave_out(slots, part, &others);
            kept.push(dirty);
        }
        let bytes: u64 = kept.iter().map(|blocks| cost_of(blocks)).sum();
        let mut left = self.left(map).unwrap_or_default() - i128::from(bytes);
        // Those of most blocks take least memory for each.
        clean.sort_by_key(|blocks| std::cmp::Reverse(blocks.len()));
        for blocks in clean {
            let bytes = i128::from(cost_of(blocks));
            if left >= bytes {
                left -= bytes;
                kept.push(blocks.to_vec());
            } else {
                self.leave_out(slots, part, blocks);
            }
        }
        self.clean_parts.push(part);
        map.fill(part, kept.len(), kept.iter().map(Vec::as_slice))
    }

    fn leave_out(&mut self, slots: &mut Slots, part: u32, blocks: &[Block]) {
        for (_, entry) in blocks {
            slots.leave_unrecorded(entry.slot);
            self.short.insert(part + 1);
            self.opened.given_up += 1;
        }
    }

    /// Clean blocks of parts that were read before make room for dirty ones.
    fn make_room(&mut self, map: &mut Map, slots: &mut Slots) {
        while self.left(map).is_some_and(|left| left < 0)
            && let Some(part) = self.clean_parts.pop()
        {
            self.is_over = true;
            let mut clean = map.clean_in(part).into_iter().peekable();
            while self.left(map).is_some_and(|left| left < 0)
                && let Some((key, entry)) = clean.next()
            {
                map.remove(key);
                self.leave_out(slots, part, &[(key, entry)]);
            }
            if clean.peek().is_some() {
                self.clean_parts.push(part);
            }
        }
    }

    /// What is in memory now, beside what a cache keeps whatever is in it.
    pub(super) fn note_bytes(&mut self, map: &Map, more: u64) {
        let bytes = blocks_bytes(map, self.dirty_groups) + more;
        self.opened.bytes_max = self.opened.bytes_max.max(bytes);
    }

    /// The slices that are short, and what was done.
    pub(super) fn end(self) -> (BTreeSet<u32>, Opened) {
        (self.short, self.opened)
    }
}
