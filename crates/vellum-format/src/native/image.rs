//! The open image: its state in memory, and the locks that protect it.
//!
//! ```text
//!   guest offset ──► bit of its block ── 1 ───────────────────────────► the image ──► linear: data_offset + offset
//!                          │0                                              ▲          table: its entry; 0: zero
//!                          └──► mask of its sub-block ── data ─────────────┘
//!                                     │           └───── zero ──► zeros
//!                                     └───────────────── base ──► the disk below
//! ```
//!
//! A sub-block goes from base to zero or data, and from zero to data, never back. Data is removed only by
//! letting go of its whole unit in the table. So readers look at bit, mask and entry one after the other,
//! without a lock, and writers change the entry first. A reader that a bit or mask sends to the image finds
//! there the right bytes, or zero.
//!
//! Locks, in the order in which they may be held together. None is held across I/O.
//!
//! 1. Claims on cells of the disk (`claims.rs`), ascending.
//! 2. The journal's gate.
//! 3. The lock of a block's masks.
//! 4. Short in-memory locks: a page's changes and within it the list of dirty pages, the pool of units, the
//!    list of freed units.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use vellum_core::{BlockSize, Error, GuestOffset, GuestSpan, ImageOffset, Result, SharedDisk, SharedStorage};

use super::encryption_state::Encryption;
use super::filled::FilledBlocks;
use super::geometry::{Places, SUB_BLOCK};
use super::home_pages::{HomePages, Missing};
use super::in_use::InUse;
use super::snapshots::still::Still;
use super::snapshots::views::Views;
use super::superblock::Superblocks;
use super::tier_state::Tier;
use super::units::Units;
use super::zone_state::Zones;
use crate::engine::Engine;
use crate::hash::HashMap;
use crate::journal::Journal;
use crate::session::CacheId;
use crate::state::lock;

/// The number of locks for blocks' masks. Many blocks share one.
const BLOCK_LOCKS: usize = 64;
/// The size of a cell where there are no units.
pub(super) const LINEAR_CELL: BlockSize = BlockSize::from_shift(17);
/// A cell is claimed in at most this many parts.
const PARTS: u32 = 32;

/// An open image.
pub struct Native {
    pub(super) engine: Engine<u32>,
    pub(super) places: Places,
    pub(super) superblocks: Arc<async_lock::Mutex<Superblocks>>,
    /// The image, through the path for metadata.
    pub(super) metadata: SharedStorage,
    /// The same storage, for reads of tables: through the cache that keeps them, if there is one.
    pub(super) tables: SharedStorage,
    /// The same storage, for the writes of checkpoints.
    pub(super) checkpoint_storage: SharedStorage,
    /// The same storage, for guest data as it is stored.
    pub(super) data: SharedStorage,
    /// How guest data is stored.
    pub(super) encryption: Encryption,
    /// The same storage, without the newer bytes that the journal has.
    pub(super) under: SharedStorage,
    /// The same storage, for zeros written ahead of need.
    pub(super) ahead: SharedStorage,
    pub(super) below: Option<SharedDisk>,
    /// The same, for reads that complete a sub-block.
    pub(super) fills: Option<SharedDisk>,
    pub(super) home: HomePages,
    /// The size of a cell: of a unit, or of a run of the disk.
    pub(super) cell: BlockSize,
    pub(super) block_locks: [Mutex<()>; BLOCK_LOCKS],
    /// With a table, when the image is open read-write.
    pub(super) units: Option<Units>,
    /// As for `units`.
    pub(super) views: Option<Views>,
    /// The snapshots that are open beside the disk, by id. Locked after the list of snapshots.
    pub(super) open_views: Mutex<HashMap<u32, Weak<Self>>>,
    /// In `zoned`, when the image is open read-write and units may hold their entries.
    pub(super) zones: Option<Zones>,
    /// The snapshot that is read instead of the disk.
    pub(super) view: Option<View>,
    /// `None` when no page of home can change.
    pub(super) journal: Option<Journal>,
    pub(super) in_use: InUse,
    /// The flash cache that it is open with.
    pub(super) flash: Option<CacheId>,
    /// The fast medium that has copies of units. Set before the image is used, if at all.
    pub(super) tier: OnceLock<Tier>,
    /// Why there is none, although one was given.
    pub(super) tier_trouble: OnceLock<Error>,
    /// The units that only a fast medium has and of which it says nothing complete, in order; as the image was when it was opened.
    pub(super) missing: OnceLock<Vec<u64>>,
    /// In `linear`: blocks that the image has although their bits say that it has not.
    pub(super) filled: FilledBlocks,
    /// What was left in the image, as counted when it was last made ready to stand alone; `u64::MAX`: it was not.
    pub(super) ready_alone: AtomicU64,
    /// How many bytes of a record the open transaction may need, at most.
    pub(super) open_bytes: AtomicU64,
}

/// The pages of home that a snapshot sees.
pub(super) enum View {
    /// Of an image that is not written.
    Still(Still),
    /// Of an image that is open read-write.
    Live(Live),
}

/// What a snapshot sees of an image that is open read-write (`snapshots/live.rs`).
pub(super) struct Live {
    pub(super) disk: Arc<Native>,
    pub(super) id: u32,
    /// The chain is in the order in which this program makes it. Making and deleting snapshots keep that
    /// order.
    pub(super) is_line: bool,
    pub(super) settled: async_lock::OnceCell<()>,
}

/// The state of a sub-block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sub {
    Base,
    Image,
    Zero,
    /// Its mask has an undefined value.
    Broken,
}

/// The values of a mask.
pub(super) mod mask {
    pub(in crate::native) const BASE: u64 = 0;
    pub(in crate::native) const DATA: u64 = 1;
    pub(in crate::native) const ZERO: u64 = 2;
}

/// Where a run of the disk lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Host(ImageOffset),
    /// In the packed block at this offset, which also holds its unit's entry.
    Embedded(ImageOffset),
    /// The image has the run, and it is zero: no unit holds it.
    NoUnit,
    /// The image has the run, and only its fast medium has the bytes.
    Moved,
    /// Zero, over the base.
    Zero,
    Below,
    /// Its mask has an undefined value.
    Broken,
}

impl Native {
    /// The journal, when it has begun.
    pub(super) fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref().filter(|journal| journal.is_on())
    }

    /// The size of a unit. `None` in `linear`.
    pub(super) fn unit(&self) -> Option<BlockSize> {
        self.places.shape().layout.unit()
    }

    /// The first byte behind the last sub-block that has a mask. From there on everything is the image's.
    pub(super) fn base_end(&self) -> GuestOffset {
        GuestOffset::new(self.places.shape().sub_blocks() << SUB_BLOCK.shift())
    }

    /// The state of a sub-block.
    pub(super) fn sub(&self, sub_block: u64) -> Result<Sub, Missing> {
        if sub_block >= self.places.shape().sub_blocks() {
            return Ok(Sub::Image);
        }
        self.sub_over_base(sub_block, || self.recorded_sub(sub_block))
    }

    /// The state of a sub-block of the base, as its bit and its mask say.
    fn recorded_sub(&self, sub_block: u64) -> Result<Sub, Missing> {
        let block = self.block_of_sub(sub_block);
        if self.home.get(self.places.bit(block))? == 1 {
            return Ok(Sub::Image);
        }
        Ok(match self.home.get(self.places.mask(sub_block))? {
            mask::BASE => Sub::Base,
            mask::DATA => Sub::Image,
            mask::ZERO => Sub::Zero,
            _ => Sub::Broken,
        })
    }

    pub(super) fn block_of_sub(&self, sub_block: u64) -> u64 {
        sub_block >> (self.places.shape().block.shift() - SUB_BLOCK.shift())
    }

    /// The sub-blocks of a block that have masks.
    pub(super) fn subs_of(&self, block: u64) -> std::ops::Range<u64> {
        let shift = self.places.shape().block.shift() - SUB_BLOCK.shift();
        block << shift..((block + 1) << shift).min(self.places.shape().sub_blocks())
    }

    /// The state of the run's first byte, and how many bytes of the run share it.
    pub(super) fn first_state(&self, span: GuestSpan) -> Result<(Sub, u64), Missing> {
        let start = span.start();
        if start >= self.base_end() {
            return Ok((Sub::Image, span.len()));
        }
        let block = self.places.shape().block;
        let number = block.cluster_of(start).index();
        if self.home.get(self.places.bit(number))? == 1 {
            return Ok((Sub::Image, span.len().min(block.bytes() - block.within(start))));
        }
        let len = SUB_BLOCK.bytes() - SUB_BLOCK.within(start);
        Ok((self.sub(SUB_BLOCK.cluster_of(start).index())?, span.len().min(len)))
    }

    /// The stored unit of a unit of the disk; 0: none.
    pub(super) fn entry(&self, unit: u64) -> Result<u32, Missing> {
        Ok(self.entry_and_form(unit)?.0)
    }

    /// The same entry, with its form.
    pub(super) fn entry_and_form(&self, unit: u64) -> Result<(u32, u32), Missing> {
        let entry = self.home.get(self.places.entry(unit))?;
        Ok(self.places.split_entry(u32::try_from(entry).expect("32 bits")))
    }

    /// Where a byte lies that the image has, and how many bytes from there on are contiguous.
    pub(super) fn place(&self, at: GuestOffset) -> Result<(Origin, u64), Missing> {
        let Some(unit) = self.unit() else {
            return Ok((Origin::Host(self.places.linear(at)), u64::MAX));
        };
        let (within, left) = (unit.within(at), unit.bytes() - unit.within(at));
        let (number, form) = self.entry_and_form(unit.cluster_of(at).index())?;
        if number == 0 {
            return Ok((Origin::NoUnit, left));
        }
        if number == self.places.moved_number() {
            return Ok((Origin::Moved, left));
        }
        let start = self.places.unit(number).start();
        if form == 0 {
            return Ok((Origin::Host(start + within), left));
        }
        let block = u64::from(form - 1);
        Ok(match within / SUB_BLOCK.bytes() {
            here if here == block => {
                let end = (block + 1) * SUB_BLOCK.bytes();
                (Origin::Embedded(start + block * SUB_BLOCK.bytes()), end - within)
            }
            here if here < block => (Origin::Host(start + within), block * SUB_BLOCK.bytes() - within),
            _ => (Origin::Host(start + within), left),
        })
    }

    /// Reads a page of home that is missing.
    pub(super) async fn load(&self, missing: Missing) -> Result<()> {
        // All views share the zone table.
        let place = |page| match &self.view {
            Some(View::Still(view)) if !self.places.is_in_zone_table(page) => view.place(page),
            _ => Some(page),
        };
        match &self.view {
            Some(View::Live(view)) => {
                self.home.hold(missing, &view.page(missing.0).await?);
                Ok(())
            }
            _ => self.home.load(&*self.tables, missing, place).await,
        }
    }

    /// Runs `look`, loading the pages that it misses.
    pub(super) async fn find<T>(&self, look: impl Fn() -> Result<T, Missing>) -> Result<T> {
        loop {
            match look() {
                Ok(found) => return Ok(found),
                Err(missing) => self.load(missing).await?,
            }
        }
    }

    /// The error for a mask with an undefined value.
    pub(super) fn broken(&self, at: GuestOffset) -> Error {
        let (name, at) = (&self.engine.name, at.bytes());
        Error::corrupt(format!("{name}: the mask of the disk at {at:#x} is impossible: run `vellum check`"))
    }

    /// The part of the run that lies in its first cell, and the rest.
    pub(super) fn first_part(&self, span: GuestSpan) -> (GuestSpan, GuestSpan) {
        span.split_at(self.cell.bytes() - self.cell.within(span.start()))
    }

    /// The parts of a cell that the run touches, for a claim.
    pub(super) fn parts_of(&self, part: GuestSpan) -> u32 {
        let size = (self.cell.bytes() / u64::from(PARTS)).max(SUB_BLOCK.bytes());
        let first = self.cell.within(part.start()) / size;
        let last = (self.cell.within(part.start()) + part.len() - 1) / size;
        let upto = |n: u64| if n >= 32 { u32::MAX } else { (1 << n) - 1 };
        upto(last + 1) & !upto(first)
    }

    /// Held while masks of a block are changed that must be changed together.
    pub(super) fn lock_block(&self, block: u64) -> std::sync::MutexGuard<'_, ()> {
        let index = usize::try_from(block % BLOCK_LOCKS as u64).expect("a small number");
        lock(&self.block_locks[index])
    }

    /// Notes that the disk no longer uses a unit. It is used again once that is durable, and once it is
    /// ready. This is noted together with the change that frees it.
    pub(super) fn free(&self, unit: u32) {
        if let Some(journal) = self.journal() {
            journal.forget_checks(self.places.unit(unit));
        }
        self.engine.commits.note_freed(unit);
    }
}
