//! What is known of a cache, for people and programs; also of one that is not opened.

use std::collections::BTreeMap;

use vellum_core::{Result, SharedStorage};

use crate::layout::{Key, Layout, Slot, Superblock};
use crate::opened::Opened;
use crate::options::FlashOptions;
use crate::record::{Item, Record, Row};
use crate::recover;
use crate::regions::Word;
use crate::session::{CacheId, SessionNumber};
use crate::shared::FlashCache;
use crate::state::{Limits, State};

/// A picture of the slots has at most this many pieces.
const STRIP_MAX: u32 = 256;

/// Facts about a cache.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// How many bytes of the storage it uses.
    pub file_bytes: u64,
    /// How many blocks it can hold.
    pub slots: u64,
    /// Slots that are free, or will be without anything being given up.
    pub free_slots: u64,
    /// Blocks that it holds.
    pub blocks: u64,
    /// Those of them that home may have older.
    pub dirty_blocks: u64,
    /// Runs of zeros that home may not have.
    pub zero_runs: u64,
    /// Regions of 64 MiB in which home and flash may differ: after an unclean end their blocks are void.
    pub written_regions: u64,
    /// The length of the ring.
    pub ring_bytes: u64,
    /// What of it a recovery would need.
    pub ring_used: u64,
    /// Memory for the map and all that belongs to it.
    pub memory_bytes: u64,
    /// The most memory that the cache takes.
    pub budget_bytes: u64,
    /// What counts against that: what is there, and what a commit may take besides.
    pub budget_used_bytes: u64,
    /// The newest record.
    pub sequence: u64,
    /// How many parts the map has.
    pub parts: u32,
}

/// What the cache stores about a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowFacts {
    /// The number of its row.
    pub number: u16,
    /// What identifies the disk where no session does.
    pub disk: [u8; 16],
    /// The session that the image named when the newest was made.
    pub named: Option<SessionNumber>,
    /// The newest session.
    pub newest: Option<SessionNumber>,
    /// Only the newest session counts: it has a record, or the image is known to name it.
    pub has_record: bool,
    /// The disk is open.
    pub is_open: bool,
    /// It is not a disk, but the tables of an image.
    pub is_tables: bool,
    /// Blocks that have slots.
    pub blocks: u64,
    /// Those of them that home may have older.
    pub dirty_blocks: u64,
    /// Blocks in runs of zeros.
    pub zero_blocks: u64,
}

/// What is on flash, of a cache that is not open.
#[derive(Debug, Clone)]
pub struct Look {
    /// The cache's id.
    pub id: CacheId,
    /// Facts.
    pub facts: Facts,
    /// The rows.
    pub rows: Vec<RowFacts>,
    /// Slots in the order of their places: how many in each piece, how many in use, how many dirty.
    pub strip: Vec<(u32, u32, u32)>,
    /// The newest record was never acknowledged; an opening makes it void.
    pub has_void: bool,
}

impl Facts {
    pub(crate) fn of_layout(layout: &Layout) -> Self {
        let slots = u64::from(layout.slots);
        Self {
            file_bytes: layout.total_bytes(),
            slots,
            free_slots: slots,
            ring_bytes: layout.ring_bytes,
            parts: layout.parts,
            ..Self::default()
        }
    }

    fn of_state(state: &State) -> Self {
        Self {
            free_slots: u64::from(state.slots.free() + state.slots.leaving() + state.slots.trimmed()),
            blocks: state.map.blocks(),
            dirty_blocks: state.map.dirty_blocks(),
            zero_runs: state.ledger.zeros.len() as u64,
            written_regions: state.ledger.regions.count(),
            ring_used: state.ring_used(),
            memory_bytes: state.memory_bytes(),
            budget_bytes: state.budget_bytes(),
            budget_used_bytes: state.budget_used(),
            sequence: state.durable,
            ..Self::of_layout(&state.layout)
        }
    }
}

fn row_facts(state: &State, row: &Row, is_open: bool) -> RowFacts {
    let counts = state.counts(row.number);
    RowFacts {
        number: row.number,
        disk: row.disk.to_be_bytes(),
        named: SessionNumber::new(row.named.to_be_bytes()),
        newest: SessionNumber::new(row.newest.to_be_bytes()),
        has_record: row.has_record,
        is_open,
        is_tables: crate::metadata::is_of_tables(row),
        blocks: counts.blocks,
        dirty_blocks: counts.dirty,
        zero_blocks: state.runs_of(row.number).map(|run| run.blocks).sum(),
    }
}

/// Pieces of equal length, at most `STRIP_MAX`; the last may be shorter.
fn strip(state: &State) -> Vec<(u32, u32, u32)> {
    let slots = state.layout.slots;
    let each = slots.div_ceil(STRIP_MAX);
    let mut strip: Vec<(u32, u32, u32)> =
        (0..slots.div_ceil(each)).map(|piece| ((slots - piece * each).min(each), 0, 0)).collect();
    for (_, entry) in state.map.entries() {
        let Slot(slot) = entry.slot;
        let piece = &mut strip[(slot / each) as usize];
        piece.1 += 1;
        piece.2 += u32::from(entry.dirty);
    }
    strip
}

/// Looks at a cache that is not open. Writes nothing.
///
/// # Errors
/// `Corrupt` when it is none or has lost what was durable, `Unsupported` for another version, and those of the storage.
pub async fn look(storage: &SharedStorage) -> Result<Look> {
    let image = recover::look(storage).await?;
    let has_void = image.void.is_some();
    let start = recover::start_of(image);
    let id = CacheId::new(start.id.to_be_bytes()).ok_or_else(recover::no_id)?;
    let state = State::new(start);
    let rows = state.ledger.rows.values().map(|row| row_facts(&state, row, false)).collect();
    Ok(Look { id, facts: Facts::of_state(&state), rows, strip: strip(&state), has_void })
}

/// The blocks that an item is about.
fn blocks_of(item: &Item) -> impl Iterator<Item = Key> + use<> {
    let found = item.blocks();
    found.into_iter().flat_map(|(key, blocks)| (0..blocks).map(move |n| key.plus(u64::from(n))))
}

/// Checks a cache that is not open: says each error. Returns how many there are. Writes nothing.
///
/// # Errors
/// Those of the storage.
pub async fn check(storage: &SharedStorage, say: &mut dyn FnMut(String)) -> Result<u64> {
    let image = match recover::look(storage).await {
        Ok(image) => image,
        Err(error) if error.kind() == vellum_core::ErrorKind::Corrupt => {
            say(error.chain());
            return Ok(1);
        }
        Err(error) => return Err(error),
    };
    // What a durable record had checked must still be there where nothing can have overwritten it: in clean slots since that
    // record. Of several blocks with one CRC that is all of them.
    let mut errors = 0;
    let mut newest: BTreeMap<Key, usize> = BTreeMap::new();
    let mut checked: Vec<&Item> = Vec::new();
    let records: Vec<Record> = image.records.values().map(|found| found.record(&image.superblock)).collect();
    for item in records.iter().flat_map(|record| &record.items) {
        match item {
            Item::Put { checks: None, .. } | Item::Puts { check: None, .. } => {}
            Item::Put { .. } | Item::Puts { .. } => {
                newest.extend(blocks_of(item).map(|key| (key, checked.len())));
                checked.push(item);
            }
            Item::Drop { .. } | Item::Drops { .. } => {
                for key in blocks_of(item) {
                    newest.remove(&key);
                }
            }
            Item::Zero { key, blocks, .. } => {
                let last = Key::from_bits(key.bits() + (blocks - 1));
                newest.retain(|other, _| other < key || *other > last);
            }
            Item::NoRow(row) => newest.retain(|key, _| key.row() != *row),
            // Slots of a region that is being written may be overwritten in place.
            Item::Written(word) | Item::Settled(word) | Item::Void(word) => newest.retain(|key, _| {
                let own = Word::of(*key);
                own.key != word.key || own.bits & word.bits == 0
            }),
            Item::Unzero { .. } | Item::Row(_) => {}
        }
    }
    for (index, item) in checked.into_iter().enumerate() {
        let (Some((key, blocks)), Some((slot, _))) = (item.blocks(), item.checked_slots()) else { continue };
        // A dirty block may have been written in place since, and so may one whose region is being written.
        let is_dirty = matches!(item, Item::Put { dirty: true, .. } | Item::Puts { dirty: true, .. });
        let is_newest = blocks_of(item).all(|key| newest.get(&key) == Some(&index));
        // An opening within less memory leaves clean blocks out without a word in a record, and their slots are used again.
        let is_there = (0..blocks).all(|n| {
            let entry = image.map.get(key.plus(u64::from(n)));
            entry.is_some_and(|entry| entry.slot.0 == slot.0 + n)
        });
        if is_dirty || !is_newest || !is_there || image.ledger.regions.has(key) {
            continue;
        }
        let at = image.superblock.layout.slot_at(slot);
        let buffer = vellum_core::Buffer::for_overwrite(blocks as usize * crate::layout::BLOCK_LEN);
        let what = match storage.read(at, buffer).await {
            Ok(bytes) => match item.holds(bytes.contiguous().slice()) {
                true => continue,
                false => "has other bytes than its record says".to_owned(),
            },
            Err(error) => format!("cannot be read: {}", error.chain()),
        };
        errors += 1;
        let which = match blocks {
            1 => format!("block {}", key.block()),
            _ => format!("one of the blocks {} to {}", key.block(), key.block() + u64::from(blocks) - 1),
        };
        say(format!("{}: the slot of {which} of disk {} {what}", storage.name(), key.row()));
    }
    Ok(errors)
}

impl FlashCache {
    /// Opens a cache: recovers what a crash left, and continues there. One process has it at a time; the caller sees to
    /// that with a lock on the storage. Clean blocks for which the memory is too little are given up while the map is read;
    /// what is dirty stays, also where it takes more.
    ///
    /// # Errors
    /// `Invalid` when the memory is too little for any blocks. `Corrupt` when it is none or has lost what was durable, `Unsupported` for another version, and those of the
    /// storage.
    pub async fn open(storage: SharedStorage, options: FlashOptions) -> Result<std::sync::Arc<Self>> {
        let limits = Limits {
            bytes_max: options.memory_bytes_max,
            fetched_bytes_max: options.fetched_bytes_max as u64,
            replacement: options.replacement,
        };
        let start = recover::recover(&storage, limits).await?;
        let id = CacheId::new(start.id.to_be_bytes()).ok_or_else(recover::no_id)?;
        let mut state = State::new(start);
        // Home and flash may differ where an opening that did not end well has written.
        let is_void = state.void_regions(None);
        debug_assert!(is_void, "a record has room for all words");
        let cache = Self::with(storage, id, state, options, limits)?;
        cache.write_short().await?;
        cache.add_features(Superblock::NEIGHBOURS | Superblock::VOIDED).await?;
        cache.forget_lost_rows().await?;
        Ok(cache)
    }

    /// Facts, as of now.
    pub fn facts(&self) -> Facts {
        Facts::of_state(&self.state())
    }

    /// What its opening came to.
    pub fn opened(&self) -> Opened {
        self.state().opened
    }

    /// The rows, as of now.
    pub fn rows(&self) -> Vec<RowFacts> {
        let open: Vec<u16> = self.homes().iter().filter(|home| home.is_open()).map(|home| home.row).collect();
        let state = self.state();
        state.ledger.rows.values().map(|row| row_facts(&state, row, open.contains(&row.number))).collect()
    }

    /// Slots in the order of their places: how many in each piece, how many in use, how many dirty.
    pub fn strip(&self) -> Vec<(u32, u32, u32)> {
        strip(&self.state())
    }
}
