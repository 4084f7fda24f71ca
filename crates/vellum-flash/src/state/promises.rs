//! Promises: what a request needs is set aside before it claims blocks.
//!
//! ```text
//!   short_of ─ enough ─► promise ─► take_promised, publish ─► end_promise
//!      └ slots, bytes of the record, runs, memory: of all; or what the disk has its share of ─► room.rs
//! ```
//!
//! 1. Slots, bytes of the record, runs and memory that are promised are there when they are needed.
//! 2. What is dirty or promised of all disks, that of each open one in write-back counted as no less than its reserve, and one
//!    reserve more for a disk that is opened next, are no more than there is: of slots, of runs of zeros, and of
//!    memory (as `memory` counts it). So a disk with less than its reserve gets what it needs without any other disk's
//!    blocks going home. Reserves are a half of all, in equal parts. A disk that has nothing may have what is free.

use std::collections::{BTreeMap, BTreeSet};

use super::State;
use crate::layout::{Key, Slot};
use crate::map::DIRTY_COST_MAX;
use crate::open::{Open, Share};
use crate::zeros::{RUNS_FOR_NEW, RUNS_MAX};

/// What a request needs before it claims blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Need {
    /// Each brings the memory for its block along.
    pub(crate) slots: u32,
    /// Bytes of the record.
    pub(crate) bytes: usize,
    /// By how many the runs of zeros may grow.
    pub(crate) runs: usize,
    /// They are new runs, not splits.
    pub(crate) is_zero: bool,
}

/// What is short.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Short {
    pub(crate) slots: bool,
    pub(crate) bytes: bool,
    pub(crate) runs: bool,
    pub(crate) memory: bool,
    /// The disk has its share of the slots, of the runs, or of the memory, and more of them than others leave.
    pub(crate) own_slots: bool,
    pub(crate) own_runs: bool,
    pub(crate) own_memory: bool,
}

/// The reserve of each open disk, when this many are open.
fn reserve(total: u64, open: usize) -> u64 {
    total / (2 * (open as u64 + 1))
}

/// Whether a row that gets this much more leaves others less than their reserves.
fn exceeds(
    total: u64,
    reserve: u64,
    row: u16,
    wanted: u64,
    open: &[u16],
    rows: impl Iterator<Item = (u16, u64)>,
) -> bool {
    let (mut own, mut others) = (0, reserve * open.len() as u64);
    for (other, used) in rows {
        if other == row {
            own = used;
        } else {
            others += if open.contains(&other) { used.saturating_sub(reserve) } else { used };
        }
    }
    let is_within = own == 0 || own + wanted <= reserve;
    !is_within && others + (own + wanted).max(reserve) > total
}

impl State {
    /// Whether a disk can have this at once; if not, what is short. `open` are the rows of the open disks.
    pub(crate) fn short_of(&self, row: u16, need: Need, open: &[u16]) -> Option<Short> {
        let bytes_max = Open::bytes_max(Share::Guest, self.record_bytes_max());
        let runs_max = if need.is_zero { RUNS_FOR_NEW } else { RUNS_MAX };
        let runs = self.ledger.zeros.len() + self.promised.runs + need.runs;
        let short = Short {
            slots: self.slots.free() < self.promised.slots + need.slots,
            bytes: self.open.bytes(Share::Guest) + self.promised.bytes + need.bytes > bytes_max,
            runs: need.runs > 0 && runs > runs_max,
            memory: need.slots > 0 && self.lacks_memory(u64::from(need.slots)),
            own_slots: self.has_its_slots(row, need, open),
            own_runs: self.has_its_runs(row, need, open, runs_max),
            own_memory: self.has_its_memory(row, need, open),
        };
        (short != Short::default()).then_some(short)
    }

    /// Whether the disk would leave others less than their reserves of slots (rule 6).
    fn has_its_slots(&self, row: u16, need: Need, open: &[u16]) -> bool {
        let total = u64::from(self.slots.total());
        let reserve = reserve(total, open.len());
        let wanted = u64::from(need.slots);
        let asked: u64 = self.asked.values().map(|asked| u64::from(asked.slots)).sum();
        if wanted == 0 || self.dirty_blocks() + asked + wanted <= total - reserve * (open.len() as u64 + 1) {
            return false;
        }
        let of =
            |row| self.counts(row).dirty + self.asked.get(&row).map_or(0, |asked| u64::from(asked.slots));
        let rows = self.counts.keys().chain(self.asked.keys()).copied().collect::<BTreeSet<u16>>();
        exceeds(total, reserve, row, wanted, open, rows.into_iter().map(|row| (row, of(row))))
    }

    /// The same for the memory that dirty blocks take.
    fn has_its_memory(&self, row: u16, need: Need, open: &[u16]) -> bool {
        let total = self.memory_for_blocks();
        let reserve = reserve(total, open.len());
        let cost = |slots: u32| u64::from(slots) * DIRTY_COST_MAX;
        let wanted = cost(need.slots);
        let asked: u64 = self.asked.values().map(|asked| cost(asked.slots)).sum();
        let spare = total.saturating_sub(reserve * (open.len() as u64 + 1));
        if wanted == 0 || self.dirty_cost() + asked + wanted <= spare {
            return false;
        }
        let of =
            |row| self.counts(row).dirty_cost + self.asked.get(&row).map_or(0, |asked| cost(asked.slots));
        let rows = self.counts.keys().chain(self.asked.keys()).copied().collect::<BTreeSet<u16>>();
        exceeds(total, reserve, row, wanted, open, rows.into_iter().map(|row| (row, of(row))))
    }

    /// The same for runs of zeros.
    fn has_its_runs(&self, row: u16, need: Need, open: &[u16], runs_max: usize) -> bool {
        let (total, wanted) = (runs_max as u64, need.runs as u64);
        let reserve = reserve(total, open.len());
        let used = (self.ledger.zeros.len() + self.promised.runs) as u64;
        if wanted == 0 || used + wanted <= total - reserve * (open.len() as u64 + 1) {
            return false;
        }
        let mut of: BTreeMap<u16, u64> =
            self.asked.iter().map(|(row, asked)| (*row, asked.runs as u64)).collect();
        for run in self.ledger.zeros.runs() {
            *of.entry(run.key.row()).or_default() += 1;
        }
        exceeds(total, reserve, row, wanted, open, of.into_iter())
    }

    /// How many blocks each open disk may have dirty, whatever the others do.
    pub(crate) fn reserve(&self, open: usize) -> u64 {
        let of_memory = reserve(self.memory_for_blocks(), open) / DIRTY_COST_MAX;
        reserve(u64::from(self.slots.total()), open).min(of_memory)
    }

    /// Whether slots are free, or can be without anything being written home.
    pub(crate) fn has_flash_room(&self) -> bool {
        let is_spare = u64::from(self.slots.taken()) > self.map.dirty_blocks();
        is_spare || self.slots.leaving() + self.slots.trimmed() > 0 || self.has_left()
    }

    pub(crate) fn promise(&mut self, row: u16, need: Need) {
        self.promised.slots += need.slots;
        self.promised.bytes += need.bytes;
        self.promised.runs += need.runs;
        if need.slots > 0 || need.runs > 0 {
            let asked = self.asked.entry(row).or_default();
            asked.slots += need.slots;
            asked.runs += need.runs;
        }
    }

    /// What was asked is no more, of which this was left.
    pub(crate) fn end_promise(&mut self, row: u16, need: Need, left: Need) {
        self.promised.slots -= left.slots;
        self.promised.bytes -= left.bytes;
        self.promised.runs -= left.runs;
        // Room in the record alone is no share of anything, and was not counted.
        if need.slots == 0 && need.runs == 0 {
            return;
        }
        let asked = self.asked.get_mut(&row).expect("it was promised");
        asked.slots -= need.slots;
        asked.runs -= need.runs;
        if asked.slots == 0 && asked.runs == 0 {
            self.asked.remove(&row);
        }
    }

    /// One of the slots that were promised.
    pub(crate) fn take_promised(&mut self, key: Key, promise: &mut Need) -> Slot {
        assert!(promise.slots > 0, "a slot was promised");
        promise.slots -= 1;
        self.promised.slots -= 1;
        self.slots.take(self.map.segment_for(key)).expect("promised slots are free")
    }

    /// A slot for something that is not needed, unless slots are short.
    pub(crate) fn take_spare(&mut self, key: Key) -> Option<Slot> {
        let spare = self.slots.free() > self.promised.slots + self.low_water();
        let has_room = self.full_part(key).is_none() && self.room_for(Share::Admit) >= crate::open::PUT_BYTES;
        (spare && has_room && self.has_spare_memory())
            .then(|| self.slots.take(self.map.segment_for(key)))
            .flatten()
    }

    /// A slot for a block that is written through, unless slots or memory are short.
    pub(crate) fn take_for_through(&mut self, key: Key) -> Option<Slot> {
        let spare = self.slots.free() > self.promised.slots + self.low_water();
        let has_room = self.full_part(key).is_none() && self.has_spare_memory();
        (spare && has_room).then(|| self.slots.take(self.map.segment_for(key))).flatten()
    }

    /// Below this many free slots, clean blocks give up theirs.
    pub(crate) fn low_water(&self) -> u32 {
        (self.slots.total() / 32).min(4096)
    }

    pub(crate) fn free_unpromised(&self) -> u32 {
        self.slots.free() - self.promised.slots
    }

    /// Slots that will be free without anything else being given up.
    pub(crate) fn leaving_slots(&self) -> u32 {
        self.slots.leaving()
    }
}
