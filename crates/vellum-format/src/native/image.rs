//! The open image: what is in memory of it, and who may change what.
//!
//! ```text
//!   guest offset ──► bit of its block ── 1 ───────────────────────────► the image ──► linear: data_offset + offset
//!                          │0                                              ▲          table: its entry; 0: zero
//!                          └──► mask of its sub-block ── data ─────────────┘
//!                                     │           └───── zero ──► zeros
//!                                     └───────────────── base ──► the disk below
//! ```
//!
//! A sub-block goes from base to zero or data, and from zero to data, never back. What no longer holds data by itself is a
//! unit that the table lets go of. So readers look at bit, mask and entry one after the other, without a lock, and writers
//! change the entry first: what a bit or a mask sends to the image finds there what it is to find, or zero.
//!
//! Locks, in the order in which they may be held together; none is held across I/O:
//!
//! 1. claims on cells of the disk (`claims.rs`), ascending;
//! 2. the journal's gate;
//! 3. the lock of a block's masks;
//! 4. short in-memory locks: a page's changes and within it the list of dirty pages, the pool of units, what was freed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vellum_core::{
    BlockSize, Clock, Error, ErrorKind, Geometry, GuestOffset, GuestSpan, ImageOffset, Result, SharedDisk,
    SharedStorage,
};

use super::compact::Compaction;
use super::geometry::{Places, Region, SUB_BLOCK};
use super::home::{Home, Missing};
use super::snapshots::{View, Views};
use super::superblock::Superblocks;
use super::units::Units;
use super::zones::Zones;
use crate::claims::Claims;
use crate::epochs::Epochs;
use crate::journal::Journal;
use crate::prealloc::Need;
use crate::sabotage::{self, Bug};
use crate::state::{State, lock};
use crate::turns::Turns;

/// Locks of blocks' masks: one for many blocks.
const BLOCK_LOCKS: usize = 64;
/// What is claimed at once, where there are no units.
pub(super) const LINEAR_CELL: BlockSize = BlockSize::from_shift(17);
/// A cell has so many parts that are claimed one by one, at most.
const PARTS: u32 = 32;

/// An open image.
pub struct Native {
    pub(super) name: String,
    pub(super) geometry: Geometry,
    pub(super) places: Places,
    pub(super) superblocks: Arc<async_lock::Mutex<Superblocks>>,
    /// The image, as the way for metadata.
    pub(super) metadata: SharedStorage,
    /// The same, for what the journal takes home.
    pub(super) homeward: SharedStorage,
    /// The same, for guest data.
    pub(super) data: SharedStorage,
    /// The same, without what the journal has that is newer.
    pub(super) under: SharedStorage,
    /// The same, for zeros ahead of need.
    pub(super) ahead: SharedStorage,
    pub(super) below: Option<SharedDisk>,
    pub(super) home: Home,
    /// What is claimed at once: a unit, or a run of this size.
    pub(super) cell: BlockSize,
    pub(super) claims: Claims,
    pub(super) epochs: Epochs,
    pub(super) block_locks: [Mutex<()>; BLOCK_LOCKS],
    /// In `table`, when it is open for writing.
    pub(super) units: Option<Units>,
    /// Likewise.
    pub(super) views: Option<Views>,
    /// In `zoned`, when it is open for writing and units hold their entries.
    pub(super) zones: Option<Zones>,
    /// Likewise.
    pub(super) zones_ahead: Option<async_lock::Mutex<Need>>,
    /// Likewise.
    pub(super) compaction: Option<Compaction>,
    /// How much the guest has written, in bytes, where that is asked for.
    pub(super) written_bytes: AtomicU64,
    /// The snapshot that is read instead of the disk.
    pub(super) view: Option<View>,
    /// Nothing when no home page can change.
    pub(super) journal: Option<Journal>,
    pub(super) beginning: async_lock::Mutex<()>,
    /// What the open transaction may take in its record, at most.
    pub(super) open_bytes: AtomicU64,
    pub(super) commits: Commits,
    pub(super) state: State,
}

/// Who commits, and what was freed.
#[derive(Default)]
pub(super) struct Commits {
    pub(super) turns: Turns,
    /// Units freed since the last seal.
    pub(super) freed: Mutex<Vec<u32>>,
    /// Changes of the storage that have completed.
    changes: AtomicU64,
    /// The value of `changes` that the last good host flush covers.
    covered: AtomicU64,
    /// Records that are durable.
    records: AtomicU64,
    /// The last transaction that is.
    durable: AtomicU64,
}

impl Commits {
    /// With a clock by which those who flush wait for one another.
    pub(super) fn new(clock: Option<Arc<dyn Clock>>) -> Self {
        Self { turns: Turns::with_clock(clock), ..Self::default() }
    }

    /// Notes that bytes of the storage were changed by a request that is about to return.
    pub(super) fn note_change(&self) -> u64 {
        self.changes.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// How many records are durable.
    pub(super) fn records(&self) -> u64 {
        self.records.load(Ordering::Acquire)
    }

    pub(super) fn note_record(&self, sequence: u64) {
        self.records.fetch_add(1, Ordering::AcqRel);
        self.durable.fetch_max(sequence, Ordering::AcqRel);
    }

    /// Whether a transaction is durable.
    pub(super) fn is_durable(&self, sequence: u64) -> bool {
        self.durable.load(Ordering::Acquire) >= sequence
    }

    /// How many changes there have been.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// How many of them a host flush covers.
    pub(super) fn covered(&self) -> u64 {
        self.covered.load(Ordering::Acquire)
    }

    /// A flush that began when there were so many has ended well.
    pub(super) fn cover(&self, changes: u64) {
        self.covered.fetch_max(changes, Ordering::AcqRel);
    }
}

/// What a sub-block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sub {
    Base,
    Image,
    Zero,
    /// Its mask has the value that means nothing.
    Broken,
}

/// The masks' values.
pub(super) mod mask {
    pub(in crate::native) const BASE: u64 = 0;
    pub(in crate::native) const DATA: u64 = 1;
    pub(in crate::native) const ZERO: u64 = 2;
}

/// Where a run of the disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Host(ImageOffset),
    /// In a block that holds its unit's entry, too, and so is packed. Where the block lies.
    Embedded(ImageOffset),
    /// The image has it, and it is zero: no unit holds it.
    NoUnit,
    /// Zero, over the base.
    Zero,
    Below,
    /// Nobody can tell.
    Broken,
}

impl Native {
    /// Checks that the request is inside the disk and the disk still open.
    pub(super) fn check(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        self.state.check_open()?;
        let span = span.ok_or_else(|| Error::invalid("the request passes 2^64"))?;
        if span.end().bytes() > self.geometry.size {
            return Err(Error::invalid(format!(
                "the request {span} passes the end of the disk at {:#x}",
                self.geometry.size
            )));
        }
        Ok(span)
    }

    /// Checks that a change is allowed.
    pub(super) fn check_change(&self, span: Option<GuestSpan>) -> Result<GuestSpan> {
        let span = self.check(span)?;
        if self.geometry.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open for reading only", self.name)));
        }
        self.state.check_stopped()?;
        Ok(span)
    }

    /// The journal, when it has begun.
    pub(super) fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref().filter(|journal| journal.is_on())
    }

    /// The size of a unit; nothing in `linear`.
    pub(super) fn unit(&self) -> Option<BlockSize> {
        self.places.shape().layout.unit()
    }

    /// The first byte behind the last sub-block that has a mask. From there on all is the image's.
    pub(super) fn base_end(&self) -> GuestOffset {
        GuestOffset::new(self.places.shape().sub_blocks() << SUB_BLOCK.shift())
    }

    /// What a sub-block is.
    pub(super) fn sub(&self, sub_block: u64) -> Result<Sub, Missing> {
        if sub_block >= self.places.shape().sub_blocks() {
            return Ok(Sub::Image);
        }
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

    /// What the run begins with, and how long that is within the run.
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

    /// The same, and its form.
    pub(super) fn entry_and_form(&self, unit: u64) -> Result<(u32, u32), Missing> {
        let entry = self.home.get(self.places.entry(unit))?;
        Ok(self.places.split_entry(u32::try_from(entry).expect("32 bits")))
    }

    /// Where the image's own byte lies, and how many bytes from there on lie in one piece.
    pub(super) fn place(&self, at: GuestOffset) -> Result<(Origin, u64), Missing> {
        let Some(unit) = self.unit() else {
            return Ok((Origin::Host(self.places.linear(at)), u64::MAX));
        };
        let (within, left) = (unit.within(at), unit.bytes() - unit.within(at));
        let (number, form) = self.entry_and_form(unit.cluster_of(at).index())?;
        if number == 0 {
            return Ok((Origin::NoUnit, left));
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
        // The zone table is that of all views.
        let zones = self.places.region(Region::Zones);
        let place = |page| match &self.view {
            Some(View::Still(view)) if !zones.contains(page) => view.place(page),
            _ => Some(page),
        };
        match &self.view {
            Some(View::Live(view)) => {
                self.home.hold(missing, &view.page(missing.0).await?);
                Ok(())
            }
            _ => self.home.load(&*self.metadata, missing, place).await,
        }
    }

    /// What `look` finds, loading what it misses.
    pub(super) async fn find<T>(&self, look: impl Fn() -> Result<T, Missing>) -> Result<T> {
        loop {
            match look() {
                Ok(found) => return Ok(found),
                Err(missing) => self.load(missing).await?,
            }
        }
    }

    /// What a mask says that means nothing.
    pub(super) fn broken(&self, at: GuestOffset) -> Error {
        let (name, at) = (&self.name, at.bytes());
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

    /// Held while masks of a block are changed that must be looked at together.
    pub(super) fn lock_block(&self, block: u64) -> std::sync::MutexGuard<'_, ()> {
        let index = usize::try_from(block % BLOCK_LOCKS as u64).expect("a small number");
        lock(&self.block_locks[index])
    }

    /// Notes that a unit is no longer the disk's. It is used again once that is durable, and more. Noted together with the
    /// change that frees it.
    pub(super) fn free(&self, unit: u32) {
        if let Some(journal) = self.journal() {
            journal.forget_checks(self.places.unit(unit));
        }
        if sabotage::is(Bug::UnitFreedBeforeDurable) {
            if let Some(units) = &self.units {
                units.add_freed(self.epochs.now(), vec![unit]);
            }
            return;
        }
        lock(&self.commits.freed).push(unit);
    }
}
