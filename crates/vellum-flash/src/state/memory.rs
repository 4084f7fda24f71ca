//! How much memory the cache may take, and what it takes.
//!
//! ```text
//!   budget   │ fixed: slots, slices, empty parts, a commit, rows, runs, tables, copies   │ blocks: map, dirty groups, │
//!            │                                                                          │ a copy of each slice       │
//!   blocks   │ dirty: at most what `map` says, in reserves (promises) │ clean: given up when the budget is reached    │
//! ```
//!
//! 1. What is counted ([`State::budget_used`]) is never more than the budget, save for dirty blocks that a recovery found. All
//!    that grows with the guests' requests is counted, by the most that it can take.
//! 2. Without its clean blocks the map takes no more than the dirty ones may cost. So whoever has a promise, or is
//!    within its reserve, has memory once clean blocks are given up, and no home is waited for.
//! 3. A block that was read gets in only where it leaves the budget whole. What is given up first is what takes most
//!    memory for a block: groups of few blocks.
//!
//! Left out: data of requests that are under way, what the host's allocator adds.

use vellum_core::{Error, Result};

use super::State;
use crate::layout::{Layout, ROWS_MAX};
use crate::map::{DIRTY_COST_MAX, Map};
use crate::open::Share;
use crate::policy::Replacement;
use crate::regions::WORDS_MAX;
use crate::slices::Slices;
use crate::slots::Slots;
use crate::windows::Room;
use crate::zeros::RUNS_MAX;

/// Memory for the blocks of a cache, for each slot, where nothing else is said: four times what full groups take.
const USUAL_FOR_SLOT: u64 = 16;
/// A cache of fewer slots gets as much as one of these.
const SLOTS_MIN: u64 = 1 << 16;
/// The least memory for blocks: for this many that are the only ones of their groups.
const BLOCKS_MIN: u64 = 8;
/// A commit takes at most as much memory as this many of the longest records: the open transaction, the record on its
/// way as items and as bytes, and the keys that are not proven.
const RECORDS_OF_COMMIT: u64 = 7;
/// A row and its disk, and a run of zeros.
const ROW_BYTES: u64 = 256;
const RUN_BYTES: u64 = 64;
/// A word of regions that are being written, and the writers in each of its 64 regions.
const WORD_BYTES: u64 = 64 * 64;
/// A group in the set of those that are dirty: an entry, in tree nodes that are two thirds full.
const DIRTY_GROUP_BYTES: u64 = 24;
/// Slices on their way to flash are in memory twice more, at most this many at once.
const SLICES_ON_THEIR_WAY: u64 = 2 * 16 * crate::layout::PLACE_BYTES;
/// A key that a policy remembers beside the map, which Clock does not.
const POLICY_KEY_BYTES: u64 = 64;
/// Blocks are given up before the budget is reached: this part of what blocks may take is kept free.
const HEADROOM_SHARE: u64 = 32;
/// A clean block beside others takes at least this much.
const CLEAN_COST_MIN: u64 = 7;
/// One search for blocks to give up looks at this many groups at a time, and at most `LOOKS_MAX` times.
const LOOKS_AT_ONCE: usize = 4096;
const LOOKS_MAX: usize = 16;

/// What a caller says of the memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The most that the cache takes; none for the usual: 16 bytes for each slot, and what a cache of this size takes
    /// whatever is in it.
    pub(crate) bytes_max: Option<u64>,
    /// What of it is for copies of what was read.
    pub(crate) fetched_bytes_max: u64,
    /// How blocks to give up are named.
    pub(crate) replacement: Replacement,
}

impl Default for Limits {
    fn default() -> Self {
        let fetched_bytes_max = crate::options::FETCHED_BYTES_USUAL as u64;
        Self { bytes_max: None, fetched_bytes_max, replacement: Replacement::default() }
    }
}

/// The bound.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Budget {
    bytes_max: u64,
    /// What of it is for everything but blocks.
    fixed: u64,
    /// How many keys the policy may remember.
    keys_max: u64,
}

impl Budget {
    /// That of a cache of this layout; the others say what they take. An error when it is too small.
    pub(crate) fn new(
        layout: &Layout,
        (slots, slices, map): (&Slots, &Slices, &Map),
        limits: Limits,
    ) -> Result<Self> {
        let Limits { bytes_max, fetched_bytes_max, replacement } = limits;
        let count = u64::from(layout.slots);
        let mut fixed = slots.memory_bytes()
            + slices.memory_bytes_max()
            + map.empty_bytes_max()
            + RECORDS_OF_COMMIT * layout.record_bytes_max()
            + SLICES_ON_THEIR_WAY.min(2 * u64::from(layout.slices()) * crate::layout::PLACE_BYTES)
            + u64::from(ROWS_MAX) * ROW_BYTES
            + RUNS_MAX as u64 * RUN_BYTES
            + WORDS_MAX as u64 * WORD_BYTES
            + Room::of_slots(count).bytes_max()
            + fetched_bytes_max;
        // Clock keeps nothing beside the map. The others remember what a quarter of the rest has room for.
        let keys_max = match (replacement, bytes_max) {
            (Replacement::Clock, _) => 0,
            (_, None) => count,
            (_, Some(bytes_max)) => count.min(bytes_max.saturating_sub(fixed) / 4 / POLICY_KEY_BYTES),
        };
        fixed += keys_max * POLICY_KEY_BYTES;
        let bytes_max = bytes_max.unwrap_or(fixed + count.max(SLOTS_MIN) * USUAL_FOR_SLOT);
        let least = fixed + BLOCKS_MIN * DIRTY_COST_MAX;
        if bytes_max < least {
            let why = format!(
                "{bytes_max} bytes of memory (--flash-memory) are too few for a flash cache of this size: it needs at least {least}"
            );
            return Err(Error::invalid(why));
        }
        Ok(Self { bytes_max, fixed, keys_max })
    }

    /// What blocks may take.
    pub(crate) const fn for_blocks(&self) -> u64 {
        self.bytes_max - self.fixed
    }

    /// What of that is kept free once it was reached.
    pub(crate) const fn headroom(&self) -> u64 {
        self.for_blocks() / HEADROOM_SHARE
    }
}

/// What the blocks of a map count for, of which this many groups are dirty.
pub(crate) const fn blocks_bytes(map: &Map, dirty_groups: u64) -> u64 {
    map.grown_bytes() + map.payload_bytes() + dirty_groups * DIRTY_GROUP_BYTES
}

/// What came of giving up blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shed {
    /// There is more memory than before, or other groups are looked at next.
    Some,
    /// The record has no room to say so.
    NoRecord,
    /// No block is clean.
    AllDirty,
}

impl State {
    /// The most that the cache takes from now on. What was used before is not known to the policy. An error when it is too
    /// little.
    pub(crate) fn limit_memory(&mut self, limits: Limits) -> Result<()> {
        self.budget = Budget::new(&self.layout, (&self.slots, &self.slices, &self.map), limits)?;
        let keys_max = usize::try_from(self.budget.keys_max).expect("at most as many as there are slots");
        self.policy = limits.replacement.policy(keys_max);
        Ok(())
    }

    /// What blocks may take.
    pub(crate) fn memory_for_blocks(&self) -> u64 {
        self.budget.for_blocks()
    }

    /// The bound of the memory.
    pub(crate) const fn budget_bytes(&self) -> u64 {
        self.budget.bytes_max
    }

    /// What counts against it.
    pub(crate) fn budget_used(&self) -> u64 {
        self.budget.fixed + self.blocks_bytes()
    }

    fn blocks_bytes(&self) -> u64 {
        blocks_bytes(&self.map, self.dirty.len() as u64)
    }

    /// The most that all dirty blocks may take.
    pub(crate) fn dirty_cost(&self) -> u64 {
        self.counts.values().map(|counts| counts.dirty_cost).sum()
    }

    /// What is left for this many blocks more, after all promises; negative where it is too little.
    fn left_for(&self, blocks: u64) -> i128 {
        let promised = (u64::from(self.promised.slots) + blocks) * DIRTY_COST_MAX;
        i128::from(self.memory_for_blocks()) - i128::from(self.blocks_bytes() + promised)
    }

    pub(crate) fn lacks_memory(&self, blocks: u64) -> bool {
        self.left_for(blocks) < 0
    }

    /// Whether there is memory for a block to which none was promised.
    pub(crate) fn has_spare_memory(&self) -> bool {
        self.left_for(1) >= i128::from(self.headroom() / 2)
    }

    fn headroom(&self) -> u64 {
        self.budget.headroom()
    }

    /// Whether there is memory, or can be without anything being written home.
    pub(crate) fn has_memory_room(&self) -> bool {
        self.map.blocks() > self.map.dirty_blocks()
    }

    /// Whether more is dirty than this share in a hundred of the memory for blocks.
    pub(crate) fn is_memory_dirty(&self, percent: u32) -> bool {
        u128::from(self.dirty_cost()) * 100 > u128::from(self.memory_for_blocks()) * u128::from(percent)
    }

    /// Gives up clean blocks until there is memory for this many more. Looks at a bounded number of groups.
    pub(crate) fn shed(&mut self, blocks: u64) -> Shed {
        for _ in 0..LOOKS_MAX {
            let short = -self.left_for(blocks);
            if short <= 0 {
                return Shed::Some;
            }
            if !self.has_memory_room() {
                return Shed::AllDirty;
            }
            let most = self.room_for(Share::Evict) / 16;
            if most == 0 {
                return Shed::NoRecord;
            }
            let short = u64::try_from(short).unwrap_or(u64::MAX);
            let victims = match self.map.groups() > self.dirty.len() as u64 {
                true => self.map.sparse(short, most, LOOKS_AT_ONCE),
                // Each group that is left has something dirty.
                false => {
                    let few = usize::try_from(short / CLEAN_COST_MIN + 1).unwrap_or(usize::MAX);
                    self.map.sweep(most.min(few), LOOKS_AT_ONCE)
                }
            };
            for key in victims {
                self.drop_block(key, Share::Evict);
            }
        }
        Shed::Some
    }

    /// Gives up clean blocks before memory runs short: for this many more, and the headroom.
    pub(crate) fn shed_early(&mut self) -> Shed {
        let headroom = self.headroom();
        if self.left_for(0) >= i128::from(headroom) {
            Shed::Some
        } else {
            self.shed(headroom.div_ceil(DIRTY_COST_MAX))
        }
    }

    /// Memory for the map and all that belongs to it, as of now.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.map.memory_bytes()
            + self.policy.memory_bytes()
            + self.slots.memory_bytes()
            + self.slices.memory_bytes()
            + self.uses.memory_bytes()
            + self.windows.bytes()
            + self.dirty.len() as u64 * DIRTY_GROUP_BYTES
    }
}
