//! What the cache knows: the map, the zeros, the rows and the slots, together with the open transaction.
//!
//! ```text
//!   publish   map and zeros change, and the open transaction says how                      readers see it at once
//!   seal      ► the record of what is open; copies of the slices that are furthest behind   one moment
//!   settle    ◄ the record is durable: what it released may leave, what came before it is proven
//! ```
//!
//! 1. Every change of the map, the zeros and the rows is in the open transaction before anybody else can look. So
//!    at a seal the map is what the records up to that one say, and a slice that is copied then says no more.
//! 2. Copies are written with the next record, when theirs is durable. The tail counts them one record later.
//! 3. An entry is *proven* when a record after its own is durable. Those of the open transaction, of the record on
//!    its way, and of the newest durable one are not.
//! 4. A slot that was released is free when that record is durable and no request is left that may have looked
//!    it up.
//! 5. What a request needs is promised to it (`promises`), and the memory has a bound (`memory`).
//! 6. Clean blocks that an opening leaves out of the map are still named by slices on flash. Their slots are free when all
//!    those slices have been written without them, durably, and no disk is opened before.
//!
//! Nothing here reads or writes flash, and nothing waits. Rows are in `rows`, regions in `written`.

mod dirty;
mod memory;
mod promises;
mod rows;
mod written;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use vellum_core::{Error, Result};
use vellum_format::commit::{Epochs, Ring};

use crate::layout::{Key, Layout, ROWS_MAX, SECTORS_ALL, Slot, Superblock};
use crate::map::{self, Changed, Map};
use crate::neighbours::joined;
use crate::open::{Change, Open, Share};
use crate::opened::Opened;
use crate::policy::{Policy, Replacement};
use crate::record::{Checks, Item, Record};
use crate::regions::Uses;
use crate::slice::{Ledger, Slice};
use crate::slices::Slices;
use crate::slots::Slots;
use crate::windows::Room;
use crate::zeros::Run;

use dirty::DirtyGroups;
pub(crate) use written::Entry;

pub(crate) use memory::{Budget, Limits, Shed, blocks_bytes};
pub(crate) use promises::{Need, Short};

/// Each seal copies at least this many slices when the ring fills.
const COPIES_MIN: u64 = 4;

/// A search for dirty blocks passes at most this many groups at once.
const DIRTY_GROUPS_AT_ONCE: usize = 4096;
/// A part whose slice has room for fewer blocks takes no new ones before others have left it: more by what requests
/// that are under way may bring, and no more than this.
const PART_ROOM: (u32, u32) = (160, 600);

/// What is known of the blocks of a disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Blocks that have slots.
    pub(crate) blocks: u64,
    /// Those of them that home may have older.
    pub(crate) dirty: u64,
    /// The most memory that those may take.
    pub(crate) dirty_cost: u64,
}

/// Where the bytes of a block are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// These sectors in the slot, the others at home.
    Slot {
        slot: Slot,
        sectors: u8,
        dirty: bool,
    },
    Zero,
    Home,
}

/// What a seal took: to be written, flushed and settled.
pub(crate) struct Sealed {
    pub(crate) record: Record,
    /// Where in the ring.
    pub(crate) at: u64,
    /// Slices to be written with it, with the place of each.
    pub(crate) slices: Vec<(Slice, u32)>,
}

pub(crate) struct State {
    pub(crate) layout: Layout,
    id: u128,
    /// Those of the superblock.
    pub(crate) features: u64,
    pub(crate) map: Map,
    pub(crate) ledger: Ledger,
    pub(crate) slots: Slots,
    /// Groups that may have dirty blocks, and since when.
    dirty: DirtyGroups,
    counts: BTreeMap<u16, Counts>,
    open: Open,
    /// Blocks of the record on its way, in order; those of them whose slots it checks; and those that the newest durable
    /// record checks.
    sealed: Vec<Key>,
    sealed_checked: Vec<Key>,
    newest: Vec<Key>,
    /// The last record that was sealed, and the last durable one.
    pub(crate) sequence: u64,
    pub(crate) durable: u64,
    ring: Ring,
    slices: Slices,
    copied: Vec<Slice>,
    /// Slots that the record on its way releases.
    left: Vec<Slot>,
    /// Slots that durable records have released, and the epoch after which no request uses them.
    leaving: VecDeque<(u64, Vec<Slot>)>,
    promised: Need,
    /// Slots and runs that the requests of each disk asked for and have been promised, until they end.
    asked: BTreeMap<u16, Need>,
    policy: Box<dyn Policy>,
    /// Slices that name blocks on flash which an opening has left out of the map, until they have been written without them.
    short: BTreeSet<u32>,
    /// Those that the next seal copies.
    to_copy: Vec<u32>,
    /// What the opening came to.
    pub(crate) opened: Opened,
    /// The time by which dirty groups are stamped, in seconds.
    pub(crate) now: u32,
    /// Rows whose newest number may not have reached the image.
    undecided: BTreeSet<u16>,
    /// The writers in the regions that count as written.
    uses: Uses,
    budget: Budget,
    /// What may be known of the tables of images.
    pub(crate) windows: Arc<Room>,
}

/// What a recovery, or a creation, begins with.
pub(crate) struct Start {
    pub(crate) id: u128,
    pub(crate) features: u64,
    pub(crate) layout: Layout,
    pub(crate) map: Map,
    pub(crate) ledger: Ledger,
    pub(crate) slots: Slots,
    /// The newest record, and the blocks it verifies.
    pub(crate) sequence: u64,
    pub(crate) newest: Vec<Key>,
    /// Sequence, start and end of each record from the tail on.
    pub(crate) records: Vec<(u64, u64, u64)>,
    pub(crate) slices: Slices,
    /// Slices that name blocks which are not in the map.
    pub(crate) short: BTreeSet<u32>,
    pub(crate) opened: Opened,
}

impl State {
    pub(crate) fn new(start: Start) -> Self {
        let Start { id, features, layout, map, ledger, slots, sequence, mut newest, records, .. } = start;
        let (slices, short, opened) = (start.slices, start.short, start.opened);
        newest.sort_unstable();
        let mut state = Self {
            id,
            features,
            layout,
            map,
            ledger,
            slots,
            dirty: DirtyGroups::default(),
            counts: BTreeMap::new(),
            open: Open::default(),
            sealed: Vec::new(),
            sealed_checked: Vec::new(),
            newest,
            sequence,
            durable: sequence,
            ring: Ring::resumed(layout.ring_bytes, records.into_iter()),
            slices,
            copied: Vec::new(),
            left: Vec::new(),
            leaving: VecDeque::new(),
            promised: Need::default(),
            asked: BTreeMap::new(),
            policy: Replacement::default().policy(0),
            short,
            to_copy: Vec::new(),
            opened,
            now: 0,
            undecided: BTreeSet::new(),
            uses: Uses::default(),
            budget: Budget::default(),
            windows: Arc::new(Room::of_slots(u64::from(layout.slots))),
        };
        state.limit_memory(Limits::default()).expect("the usual budget is enough");
        let (mut counts, mut dirty) = (vec![Counts::default(); usize::from(ROWS_MAX)], Vec::new());
        for (group, cost) in (0..layout.parts).flat_map(|part| state.map.dirty_costs_in(part)) {
            let counts = &mut counts[usize::from(group.key.row())];
            counts.blocks += u64::from(group.present.count_ones());
            if group.dirty != 0 {
                counts.dirty += u64::from(group.dirty.count_ones());
                counts.dirty_cost += cost;
                dirty.push(group.key);
            }
        }
        let known = (0..).zip(counts).filter(|(_, counts)| counts.blocks > 0);
        (state.counts, state.dirty) = (known.collect(), DirtyGroups::found(dirty));
        state
    }

    /// Whether there was a record, or there is a block.
    pub(crate) fn was_used(&self) -> bool {
        self.sequence > 0 || !self.counts.is_empty()
    }

    // Looking.

    /// A block that has a slot was read.
    pub(crate) fn note_use(&mut self, key: Key) {
        self.policy.used(&mut self.map, key, false);
    }

    /// The block is hidden by one of a disk above. It is given up before others, or at once when no other disk sees it.
    /// Returns whether it had a slot.
    pub(crate) fn demote(&mut self, key: Key, is_seen_elsewhere: bool) -> bool {
        let Some(entry) = self.map.get(key) else { return false };
        if !is_seen_elsewhere && !entry.dirty && self.room_for(Share::Evict) >= crate::open::PUT_BYTES {
            self.drop_block(key, Share::Evict);
        } else {
            self.policy.demoted(&mut self.map, key);
        }
        true
    }

    pub(crate) fn find(&self, key: Key) -> Found {
        match self.map.get(key) {
            Some(map::Entry { slot, sectors, dirty }) => Found::Slot { slot, sectors, dirty },
            None if self.ledger.zeros.is_empty() || self.ledger.zeros.get(key).is_none() => Found::Home,
            None => Found::Zero,
        }
    }

    /// The same for a block that is read: a slot counts as used.
    pub(crate) fn find_used(&mut self, key: Key) -> Found {
        let Some(map::Entry { slot, sectors, dirty }) = self.map.get_seen(key) else {
            return self.find(key);
        };
        if self.policy.orders_uses() {
            self.note_use(key);
        }
        Found::Slot { slot, sectors, dirty }
    }

    /// Whether a recovery would find what the map says of the block.
    pub(crate) fn is_durable(&self, key: Key) -> bool {
        !self.open.has(key) && self.sealed.binary_search(&key).is_err()
    }

    /// Whether a record after that of the block's entry is durable.
    pub(crate) fn is_proven(&self, key: Key) -> bool {
        self.is_durable(key) && self.newest.binary_search(&key).is_err()
    }

    /// Whether the slot of a clean block may be overwritten with what home gets too: no recovery verifies it.
    pub(crate) fn is_unchecked(&self, key: Key) -> bool {
        !self.open.has_checked(key)
            && self.sealed_checked.binary_search(&key).is_err()
            && self.newest.binary_search(&key).is_err()
    }

    pub(crate) fn counts(&self, row: u16) -> Counts {
        self.counts.get(&row).copied().unwrap_or_default()
    }

    pub(crate) fn dirty_blocks(&self) -> u64 {
        self.counts.values().map(|counts| counts.dirty).sum()
    }

    /// Whether anything of the disk, or of all, is not home.
    pub(crate) fn is_dirty(&self, row: u16) -> bool {
        self.counts(row).dirty > 0 || self.runs_of(row).next().is_some()
    }

    pub(crate) fn runs_of(&self, row: u16) -> impl Iterator<Item = Run> {
        let (first, last) = (Key::new(row, 0), Key::new(row, crate::layout::BLOCKS_MAX - 1));
        self.ledger.zeros.overlapping(first, last.block() + 1)
    }

    /// Dirty blocks of the disk in the order of their numbers, from this one on, at most `most`; only of groups
    /// that became dirty up to that time. Looks at a bounded number of groups; then also returns where to go on.
    pub(crate) fn dirty_from(
        &mut self,
        row: u16,
        from: u64,
        most: usize,
        until: u32,
    ) -> (Vec<(Key, Slot, u8)>, Option<u64>) {
        let (mut found, mut clean, mut next) = (Vec::new(), Vec::new(), None);
        let end = Key::from_bits(u64::from(row) << 48 | (crate::layout::BLOCKS_MAX - 1));
        let groups = self.dirty.between(Key::new(row, from).group(), end);
        for (number, (group, since)) in groups.enumerate() {
            if found.len() >= most || number >= DIRTY_GROUPS_AT_ONCE {
                next = Some(group.block());
                break;
            }
            let bits = if since <= until { self.map.group(group) } else { continue };
            if bits.is_none_or(|bits| bits.dirty == 0) {
                clean.push(group);
                continue;
            }
            for index in 0..crate::layout::GROUP_BLOCKS {
                let key = group.plus(index);
                if let Some(map::Entry { slot, sectors, dirty: true }) = self.map.get(key)
                    && key.block() >= from
                    && found.len() < most
                {
                    found.push((key, slot, sectors));
                }
            }
        }
        for group in clean {
            self.dirty.remove(group);
        }
        (found, next)
    }

    /// A slot that was taken and not published is free again: nobody knows it.
    pub(crate) fn give_back(&mut self, slot: Slot) {
        self.slots.give_back(slot);
    }

    pub(crate) fn record_bytes_max(&self) -> usize {
        usize::try_from(self.layout.record_bytes_max()).expect("at most 8 MiB")
    }

    /// How many more bytes write-back may add to the record.
    pub(crate) fn room_for(&self, share: Share) -> usize {
        // The first item of a disk may bring its row along.
        let used = self.open.bytes(share) + crate::open::ROW_BYTES;
        Open::bytes_max(share, self.record_bytes_max()).saturating_sub(used)
    }

    // Publishing.

    fn release(&mut self, slot: Slot) {
        self.slots.leave(slot);
        self.open.note_left(slot);
    }

    fn forget(&mut self, key: Key) -> Option<map::Entry> {
        let Changed { old, cost_before, cost } = self.map.take_out(key);
        let entry = old?;
        let counts = self.counts.entry(key.row()).or_default();
        counts.blocks -= 1;
        counts.dirty -= u64::from(entry.dirty);
        counts.dirty_cost = counts.dirty_cost + cost - cost_before;
        self.open.note_slice(self.layout.slice_of(key));
        self.release(entry.slot);
        self.forget_clean(key);
        Some(entry)
    }

    /// A group without a dirty block is not looked at by write-back.
    fn forget_clean(&mut self, key: Key) {
        if self.map.group(key).is_none_or(|group| group.dirty == 0) {
            self.dirty.remove(key.group());
        }
    }

    /// The newest session of the disk has a record, with what is published now.
    fn note_record(&mut self, row: u16, share: Share) {
        if let Some(row) = self.ledger.rows.get_mut(&row)
            && !row.has_record
        {
            row.has_record = true;
            let item = Item::Row(*row);
            self.open.note_ledger(item, share);
        }
    }

    /// The block is in this slot and nowhere else.
    pub(crate) fn put(
        &mut self,
        key: Key,
        slot: Slot,
        sectors: u8,
        dirty: bool,
        checks: Option<Checks>,
        share: Share,
    ) {
        // A cache that is found with a block of no row is refused as a whole.
        assert!(self.ledger.rows.contains_key(&key.row()), "{key:?} has no row");
        self.note_record(key.row(), share);
        if !self.ledger.zeros.is_empty() && self.ledger.zeros.get(key).is_some() {
            assert!(self.ledger.zeros.remove(key, 1), "a split was promised");
            self.open.note_ledger(Item::Unzero { key, blocks: 1 }, share);
        }
        let Changed { old, cost_before, cost } = self.map.put_in(key, map::Entry { slot, sectors, dirty });
        let counts = self.counts.entry(key.row()).or_default();
        counts.dirty_cost = counts.dirty_cost + cost - cost_before;
        match old {
            Some(old) => counts.dirty -= u64::from(old.dirty),
            None => counts.blocks += 1,
        }
        counts.dirty += u64::from(dirty);
        if let Some(old) = old
            && old.slot != slot
        {
            self.release(old.slot);
        }
        if dirty {
            self.dirty.insert(key.group(), self.now);
        } else {
            self.forget_clean(key);
        }
        // That home has the block now is no use of it.
        if old.is_none() || dirty {
            self.policy.used(&mut self.map, key, old.is_none());
        }
        let change = Change::Put { slot, sectors, dirty, checks };
        self.open.note_block(key, self.layout.slice_of(key), change, share);
    }

    /// The block is in another slot, and nothing else changes: which sessions count is not said by it.
    pub(crate) fn move_block(&mut self, key: Key, slot: Slot, checks: Checks) {
        let Some(map::Entry { slot: old, sectors, dirty }) = self.map.get(key) else { return };
        let Changed { cost_before, cost, .. } = self.map.put_in(key, map::Entry { slot, sectors, dirty });
        let counts = self.counts.entry(key.row()).or_default();
        counts.dirty_cost = counts.dirty_cost + cost - cost_before;
        self.release(old);
        let change = Change::Put { slot, sectors, dirty, checks: Some(checks) };
        self.open.note_block(key, self.layout.slice_of(key), change, Share::Guest);
    }

    /// Home has the block, and it gives its slot up.
    pub(crate) fn drop_block(&mut self, key: Key, share: Share) {
        if self.forget(key).is_some() {
            self.open.note_block(key, self.layout.slice_of(key), Change::Drop, share);
        }
    }

    /// These blocks are zero. Room for the runs was promised.
    pub(crate) fn zero(&mut self, run: Run) {
        let Run { key, blocks, may_free } = run;
        let known = self.ledger.zeros.get(key);
        let says_so = known.is_some_and(|known| {
            known.may_free == may_free && known.key.bits() + known.blocks >= key.bits() + blocks
        });
        if says_so {
            return;
        }
        self.note_record(key.row(), Share::Guest);
        for key in self.map.keys_between(key, blocks) {
            self.forget(key);
            self.open.forget_block(key);
        }
        self.open.forget_blocks(key, blocks);
        assert!(self.ledger.zeros.put(run), "runs were promised");
        self.open.note_ledger(Item::Zero { key, blocks, may_free }, Share::Guest);
    }

    /// Home has the zeros of these blocks. False when the table has no room for that; then it is not said.
    pub(crate) fn unzero(&mut self, key: Key, blocks: u64) -> bool {
        let is_done = self.ledger.zeros.remove(key, blocks);
        if is_done {
            self.open.note_ledger(Item::Unzero { key, blocks }, Share::Home);
        }
        is_done
    }

    /// The part of the block, if its slice is as good as full and the block is not in it.
    pub(crate) fn full_part(&self, key: Key) -> Option<u32> {
        if self.layout.parts == 1 {
            return None; // All slots fit into one slice, whatever their blocks are.
        }
        let part = self.layout.part_of(key);
        // Slots that are promised, or taken and not published yet: a part gets its share of them, and seldom twice that.
        let coming = u64::from(self.promised.slots + self.slots.taken()).saturating_sub(self.map.blocks());
        let share = u32::try_from(2 * coming / u64::from(self.layout.parts)).unwrap_or(u32::MAX);
        let least = PART_ROOM.0.saturating_add(share).min(PART_ROOM.1);
        (self.map.room_in(part) < least && self.map.get(key).is_none()).then_some(part)
    }

    /// Clean blocks of a part leave it. Without any, a block of each disk that has dirty ones there.
    pub(crate) fn empty_part(&mut self, part: u32) -> Vec<Key> {
        let most = self.room_for(Share::Evict) / 16;
        let clean: Vec<Key> = self
            .map
            .entries_in(part)
            .filter(|(_, entry)| !entry.dirty)
            .map(|(key, _)| key)
            .take(most)
            .collect();
        for key in &clean {
            self.drop_block(*key, Share::Evict);
        }
        if !clean.is_empty() {
            return Vec::new();
        }
        let first: BTreeMap<u16, Key> = self.map.entries_in(part).map(|(key, _)| (key.row(), key)).collect();
        first.into_values().collect()
    }

    /// Before blocks of a run are put into slots: they leave the runs of zeros. A split was promised.
    pub(crate) fn leave_runs(&mut self, key: Key, blocks: u64) {
        if self.ledger.zeros.is_empty() || self.ledger.zeros.overlapping(key, blocks).next().is_none() {
            return;
        }
        assert!(self.ledger.zeros.remove(key, blocks), "a split was promised");
        self.open.note_ledger(Item::Unzero { key, blocks }, Share::Guest);
    }

    /// Clean blocks give up their slots: up to this many.
    pub(crate) fn evict(&mut self, most: usize) -> usize {
        let most = most.min(self.room_for(Share::Evict) / 16);
        // A policy looks at a bounded number of blocks. It may have passed only some that were used, which are then
        // the next.
        let mut victims = self.policy.victims(&mut self.map, most);
        while victims.is_empty() && most > 0 && self.map.blocks() > self.map.dirty_blocks() {
            victims = self.policy.victims(&mut self.map, most);
        }
        for key in &victims {
            self.drop_block(*key, Share::Evict);
        }
        victims.len()
    }

    // A commit.

    pub(crate) fn has_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// The next seal takes everything.
    pub(crate) fn make_urgent(&mut self) {
        self.open.make_urgent();
    }

    pub(crate) fn ring_used(&self) -> u64 {
        self.ring.used()
    }

    /// How many slices this seal copies: none while the ring has plenty of room, then as many as leave none behind
    /// at three eighths.
    fn copies(&self) -> usize {
        let (used, quarter, eighth) =
            (self.ring.used(), self.layout.ring_bytes / 4, self.layout.ring_bytes / 8);
        if used < quarter {
            return 0;
        }
        let uncopied = self.slices.uncopied() as u64;
        let due = (uncopied * (used - quarter)).div_ceil(eighth).clamp(COPIES_MIN, uncopied.max(COPIES_MIN));
        usize::try_from(due).expect("at most as many as there are parts")
    }

    /// Takes what is open for a record; none when there is nothing that a flush has to write.
    pub(crate) fn seal(&mut self) -> Result<Option<Sealed>> {
        if !self.open.is_urgent() {
            return Ok(None);
        }
        debug_assert!(self.left.is_empty() && self.sealed.is_empty(), "one commit at a time");
        // Clean blocks give up slots before they are missed, with a record that is due anyway.
        let short = self.low_water().saturating_sub(self.slots.free() + self.slots.leaving());
        if short > 0 {
            self.evict(short as usize);
        }
        self.shed_early();
        let taken = self.open.take();
        self.sequence += 1;
        let sequence = self.sequence;
        for slice in taken.slices {
            self.slices.touch(slice, sequence);
        }
        let to_copy = std::mem::take(&mut self.to_copy);
        to_copy.iter().for_each(|slice| self.slices.touch(*slice, sequence));
        let tail = self.slices.tail().unwrap_or(sequence);
        // An older program knows of single blocks alone.
        let items = match self.features & Superblock::NEIGHBOURS {
            0 => taken.items,
            _ => joined(taken.items),
        };
        let record = Record { id: self.id, sequence, durable: self.durable, tail, items };
        let len = Record::padded_len(record.items.iter().map(Item::encoded_len).sum());
        let Some(at) = self.ring.place(sequence, len as u64) else {
            return Err(Error::corrupt("the ring of the flash cache has no room for a record"));
        };
        let slices = std::mem::take(&mut self.copied)
            .into_iter()
            .map(|slice| {
                let place = self.slices.place_of_copy(slice.number);
                (slice, place)
            })
            .collect();
        let copied = self.slices.copy_chosen(&to_copy);
        for number in copied.into_iter().chain(self.slices.copy_next(self.copies())) {
            let payload = match number {
                0 => self.ledger.encode(),
                number => self.map.encode_part(number - 1),
            };
            self.copied.push(Slice { number, as_of: sequence, payload });
        }
        (self.sealed, self.sealed_checked, self.left) = (taken.keys, taken.checked, taken.left);
        Ok(Some(Sealed { record, at, slices }))
    }

    /// The record, and the slices that were written with it, are durable.
    pub(crate) fn settle(&mut self, sealed: &Sealed, epochs: &Epochs) {
        self.durable = sealed.record.sequence;
        self.sealed = Vec::new();
        self.newest = std::mem::take(&mut self.sealed_checked);
        for (slice, _) in &sealed.slices {
            self.slices.note_written(slice.number);
            self.short.remove(&slice.number);
        }
        self.ring.advance(sealed.record.tail);
        let left = std::mem::take(&mut self.left);
        if !left.is_empty() {
            self.leaving.push_back((epochs.now(), left));
        }
        self.reclaim(epochs);
    }

    /// Slices are written without the blocks that an opening has left out, at most `most` with the next record; true while
    /// there are some. Then the slots of those blocks are free: nothing on flash names them.
    pub(crate) fn write_short(&mut self, most: usize) -> bool {
        if self.short.is_empty() {
            self.slots.release_unrecorded();
            return false;
        }
        let is_due = |number: &&u32| !self.slices.is_copied(**number);
        self.to_copy = self.short.iter().filter(is_due).take(most).copied().collect();
        self.opened.slices_written += self.to_copy.len() as u64;
        // Also without any: a record takes the copies along that are on their way.
        self.open.force();
        true
    }

    /// Slots that no request uses any more are free. Returns the epoch that the next ones wait for.
    pub(crate) fn reclaim(&mut self, epochs: &Epochs) -> Option<u64> {
        while let Some((stamp, _)) = self.leaving.front() {
            if !epochs.has_passed(*stamp) {
                return Some(*stamp);
            }
            let (_, slots) = self.leaving.pop_front().expect("it was there");
            slots.into_iter().for_each(|slot| self.slots.release(slot));
        }
        None
    }

    /// Whether slots were released that no durable record has released yet.
    pub(crate) fn has_left(&self) -> bool {
        self.open.left() > 0 || !self.left.is_empty()
    }

    /// Sectors that a block has, whose disk ends here.
    pub(crate) fn sectors_of(block: u64, size: u64) -> u8 {
        let left =
            size.saturating_sub(block * crate::layout::BLOCK_BYTES).div_ceil(crate::layout::SECTOR_BYTES);
        if left >= 8 { SECTORS_ALL } else { (1u8 << left) - 1 }
    }
}
