//! The open transaction: what was published since the last seal, and how much of a record it takes.
//!
//! 1. About a block it says what holds at the end, once. About rows, runs and regions it says every change, in order.
//! 2. A record has room for all that may join: requests of guests have half of it, and write-back, admission and
//!    eviction the rest, each its share. A share counts every change, also one that replaces another.
//! 3. What only saves work later, such as a block that was read, waits for a record that is due for something
//!    else.

use std::collections::{BTreeMap, BTreeSet};

use crate::layout::{Key, Slot};
use crate::record::{Checks, Item};

/// Who changes something. Each has a share of the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    /// A request of a guest.
    Guest,
    /// A request that home gets too: it has the room of guests, and no flush waits for it.
    Through,
    /// Write-back says that home has a block.
    Home,
    /// A block that was read gets a slot.
    Admit,
    /// A clean block gives its slot up.
    Evict,
}

impl Share {
    const fn index(self) -> usize {
        match self {
            Self::Guest | Self::Through => 0,
            Self::Home => 1,
            Self::Admit => 2,
            Self::Evict => 3,
        }
    }
}

/// An item about a block counts for this many bytes: what it takes of a record, and of memory until then.
pub(crate) const PUT_BYTES: usize = 48;
/// The same of an item that has no CRC.
pub(crate) const DROP_BYTES: usize = 16;
/// An item about a run takes 24 bytes of a record.
pub(crate) const RUN_BYTES: usize = 24;
/// An item about a row takes 64.
pub(crate) const ROW_BYTES: usize = 64;
/// The record itself takes 64.
pub(crate) const RECORD_BYTES: usize = 64;

/// What holds for a block at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    Put { slot: Slot, sectors: u8, dirty: bool, checks: Option<Checks> },
    Drop,
}

/// The open transaction.
#[derive(Debug, Default)]
pub(crate) struct Open {
    /// Rows, runs and regions.
    ledger: Vec<Item>,
    blocks: BTreeMap<Key, Change>,
    /// Slices that change.
    slices: BTreeSet<u32>,
    /// Slots that were released.
    left: Vec<Slot>,
    bytes: [usize; 4],
    is_urgent: bool,
    /// There is a record even if it has no items.
    is_forced: bool,
}

impl Open {
    /// Whether there is nothing to say.
    pub(crate) fn is_empty(&self) -> bool {
        self.ledger.is_empty() && self.blocks.is_empty() && self.left.is_empty() && !self.is_forced
    }

    /// Whether a flush has to write it.
    pub(crate) fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// The next seal takes it, whatever it says.
    pub(crate) fn make_urgent(&mut self) {
        self.is_urgent = !self.is_empty();
    }

    /// Whether a put of the block has not been sealed.
    pub(crate) fn has(&self, key: Key) -> bool {
        self.blocks.contains_key(&key)
    }

    /// Whether a put of the block that has not been sealed has checks.
    pub(crate) fn has_checked(&self, key: Key) -> bool {
        matches!(self.blocks.get(&key), Some(Change::Put { checks: Some(_), .. }))
    }

    /// Those of these blocks of which something has not been sealed.
    pub(crate) fn keys_between(&self, first: Key, last: Key) -> impl Iterator<Item = Key> {
        self.blocks.range(first..=last).map(|(key, _)| *key)
    }

    /// The bytes of a share that are in use.
    pub(crate) fn bytes(&self, share: Share) -> usize {
        self.bytes[share.index()]
    }

    /// How many bytes of a record a share may use.
    pub(crate) fn bytes_max(share: Share, record_bytes_max: usize) -> usize {
        let all = record_bytes_max - RECORD_BYTES;
        match share {
            Share::Guest | Share::Through => all / 2,
            Share::Home => all / 4,
            Share::Admit | Share::Evict => all / 8,
        }
    }

    /// How many slots were released.
    pub(crate) fn left(&self) -> usize {
        self.left.len()
    }

    pub(crate) fn note_slice(&mut self, number: u32) {
        self.slices.insert(number);
    }

    /// The next seal makes a record, also of nothing: for slices that are to be written.
    pub(crate) fn force(&mut self) {
        (self.is_forced, self.is_urgent) = (true, true);
    }

    pub(crate) fn note_left(&mut self, slot: Slot) {
        self.left.push(slot);
    }

    /// Something about rows, runs or regions, which the next flush writes.
    pub(crate) fn note_ledger(&mut self, item: Item, share: Share) {
        self.bytes[share.index()] += item.encoded_len();
        self.slices.insert(0);
        self.is_urgent |= share == Share::Guest;
        self.ledger.push(item);
    }

    /// What holds for a block from now on.
    pub(crate) fn note_block(&mut self, key: Key, slice: u32, change: Change, share: Share) {
        self.bytes[share.index()] += match &change {
            Change::Put { checks: Some(_), .. } => PUT_BYTES,
            Change::Put { checks: None, .. } | Change::Drop => DROP_BYTES,
        };
        self.slices.insert(slice);
        self.is_urgent |= share == Share::Guest;
        self.blocks.insert(key, change);
    }

    /// The block is in no item of its own any more: a run says what holds.
    pub(crate) fn forget_block(&mut self, key: Key) {
        self.blocks.remove(&key);
    }

    /// As above, for a run of blocks.
    pub(crate) fn forget_blocks(&mut self, first: Key, blocks: u64) {
        let last = Key::from_bits(first.bits() + (blocks - 1));
        let keys: Vec<Key> = self.blocks.range(first..=last).map(|(key, _)| *key).collect();
        keys.iter().for_each(|key| self.forget_block(*key));
    }

    /// Everything, for a seal.
    pub(crate) fn take(&mut self) -> Taken {
        let open = std::mem::take(self);
        let keys = open.blocks.keys().copied().collect();
        let is_checked = |change: &Change| matches!(change, Change::Put { checks: Some(_), .. });
        let checked =
            open.blocks.iter().filter(|(_, change)| is_checked(change)).map(|(key, _)| *key).collect();
        let mut items = open.ledger;
        items.extend(open.blocks.into_iter().map(|(key, change)| match change {
            Change::Put { slot, sectors, dirty, checks } => Item::Put { key, slot, sectors, dirty, checks },
            Change::Drop => Item::Drop { key },
        }));
        Taken { items, keys, checked, slices: open.slices, left: open.left }
    }
}

/// What a seal takes.
pub(crate) struct Taken {
    pub(crate) items: Vec<Item>,
    /// The blocks that have items, in order.
    pub(crate) keys: Vec<Key>,
    /// Those of them whose slots the record checks.
    pub(crate) checked: Vec<Key>,
    pub(crate) slices: BTreeSet<u32>,
    pub(crate) left: Vec<Slot>,
}
