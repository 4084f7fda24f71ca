//! Which units are free, and what must happen before one is used.
//!
//! ```text
//!                          ┌──────────── unknown: free when the image was opened, or never finished
//!                          ▼
//!   freed ── commit ──► waiting for requests to leave ──► made zero ── flush ──► clean ──► entered in the table
//!                                                                                  ▲
//!   behind the end of a file that grows zeroed ────────────────────────────────────┘
//! ```
//!
//! 1. A unit that is given out reads as zero, durably: what is not written in it needs no check, and after a crash each sector
//!    of it is zero or what was written.
//! 2. Nothing gets to *waiting* before a commit has made durable that the table does not name it.
//! 3. What a closed image has free may hold anything, too: a crash may have come before.
//! 4. A device may become longer while the image is open (`room.rs`): what it has more is *unknown*.
//! 5. Units are made zero ahead of need, when a flush of the guest comes by anyhow. Only when none is left somebody waits for a
//!    flush of its own; those are counted.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use roaring::RoaringBitmap;
use vellum_core::{Context, Error, ErrorKind, ImageOffset, ImageSpan, Result, Zeroes};

use super::image::Native;
use crate::sabotage::{self, Bug};
use crate::state::lock;

/// The file grows by so many bytes at a time; what is too much is cut off when the image is closed.
const GROWTH_STEP: u64 = 16 << 20;
/// So many clean units are kept ahead of need where zeros cost writes.
const CLEAN_AHEAD: usize = 4;
/// So many units of unknown content are made zero with one flush where zeros cost nothing.
const CLEANED_AT_ONCE: usize = 64;

/// The units of an image that no table names.
pub(super) struct Units {
    pool: Mutex<Pool>,
    /// Waiting for requests to leave: the epoch in which it became durable that they are free.
    waiting: Mutex<VecDeque<(u64, Vec<u32>)>>,
    /// Made zero: the change that this was.
    zeroed: Mutex<VecDeque<(u64, u32)>>,
    /// Held by who gives back units.
    giving: async_lock::Mutex<()>,
    /// Held by who makes the file longer.
    growing: async_lock::Mutex<()>,
    /// How many units have become clean.
    given: AtomicU64,
    /// How often a write had to wait until a unit was zero.
    waits: AtomicU64,
    /// How often none was left.
    refused: AtomicU64,
}

struct Pool {
    /// They read as zero, durably.
    clean: Vec<u32>,
    /// They may hold anything.
    unknown: RoaringBitmap,
    /// All from here on have never been there: nothing on a medium that cannot grow.
    next: Option<u32>,
    /// The last unit that was there when the image was opened, or the device looked at.
    end: u32,
}

impl Units {
    /// The pool of an image whose table names `used`; `in_file` units lie at least in part inside the file, and `can_grow`
    /// tells whether what is behind it reads as zero.
    pub(super) fn new(used: &RoaringBitmap, in_file: u32, can_grow: bool) -> Self {
        let end = used.max().map_or(in_file, |last| last.max(in_file));
        let mut unknown = RoaringBitmap::new();
        if end > 0 {
            unknown.insert_range(1..=end);
        }
        unknown -= used;
        let pool = Pool { clean: Vec::new(), unknown, next: end.checked_add(1).filter(|_| can_grow), end };
        Self {
            pool: Mutex::new(pool),
            waiting: Mutex::default(),
            zeroed: Mutex::default(),
            giving: async_lock::Mutex::default(),
            growing: async_lock::Mutex::default(),
            given: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// A clean unit; nothing when there is none.
    fn take(&self) -> Option<u32> {
        let mut pool = lock(&self.pool);
        if let Some(unit) = pool.clean.pop() {
            return Some(unit);
        }
        if sabotage::is(Bug::UnitNotZeroed)
            && let Some(unit) = pool.unknown.min()
        {
            pool.unknown.remove(unit);
            return Some(unit);
        }
        let next = pool.next?;
        pool.next = next.checked_add(1);
        Some(next)
    }

    /// A unit that was taken, and may hold anything by now.
    fn give_up(&self, unit: u32) {
        lock(&self.pool).unknown.insert(unit);
    }

    pub(super) fn add_freed(&self, epoch: u64, units: Vec<u32>) {
        lock(&self.waiting).push_back((epoch, units));
    }

    /// Whether units wait to become clean.
    pub(super) fn any_waits(&self) -> bool {
        !lock(&self.waiting).is_empty() || !lock(&self.zeroed).is_empty()
    }

    pub(super) fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// How often a write had to wait until a unit was zero.
    pub(super) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Acquire)
    }

    /// A device has so many units now.
    pub(super) fn extend(&self, end: u32) {
        let mut pool = lock(&self.pool);
        if end > pool.end {
            let more = pool.end + 1..=end;
            pool.unknown.insert_range(more);
            pool.end = end;
        }
    }

    /// How many units there are to be had, or soon.
    pub(super) fn free(&self) -> u64 {
        let waiting: usize = lock(&self.waiting).iter().map(|(_, units)| units.len()).sum();
        let zeroed = lock(&self.zeroed).len();
        let pool = lock(&self.pool);
        (waiting + zeroed + pool.clean.len()) as u64 + pool.unknown.len()
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Acquire)
    }

    fn clean(&self, unit: u32) {
        lock(&self.pool).clean.push(unit);
        self.given.fetch_add(1, Ordering::AcqRel);
    }
}

/// How soon units are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// When it costs no flush.
    Later,
    Now,
}

impl Native {
    pub(super) fn units(&self) -> &Units {
        self.units.as_ref().expect("an image with a table that is written has units")
    }

    /// A unit that reads as zero, durably. Never waits for a commit: that is for who calls [`Native::make_space`].
    pub(super) async fn allocate(&self) -> Result<u32> {
        let Some(unit) = self.units().take() else {
            let why = match self.metadata.limits().fixed_len {
                true => format!(
                    "{}: the device is full, and needs at least {} bytes more",
                    self.name,
                    self.missing()
                ),
                false => format!("{}: no unit is free", self.name),
            };
            return Err(Error::new(ErrorKind::NoSpace, why));
        };
        // A unit that was given up because the file could not grow comes back as a clean one, and lies behind the end still: were
        // it written there, somebody who makes the file longer meanwhile could cut it off.
        if let Err(error) = self.reach(self.places.unit(unit)).await {
            self.units().give_up(unit);
            return Err(error);
        }
        Ok(unit)
    }

    /// A unit that was allocated and is not in the table. Somebody may have written to it.
    pub(super) fn give_back(&self, unit: u32) {
        self.units().give_up(unit);
    }

    /// Makes the file long enough to hold the unit.
    async fn reach(&self, unit: ImageSpan) -> Result<()> {
        if self.metadata.len() >= unit.end().bytes() {
            return Ok(());
        }
        let _growing = self.units().growing.lock().await;
        if self.metadata.len() < unit.end().bytes() {
            let len = unit.end().bytes() + GROWTH_STEP - unit.len().min(GROWTH_STEP);
            let longer = self.metadata.set_len(len).await;
            longer.context(|| format!("{}: can't make the file longer", self.name))?;
        }
        Ok(())
    }

    /// Makes units clean, if there are any that nobody uses. Must not be called from inside an epoch. Tells whether any
    /// became clean, by whomever, since `given` was asked.
    pub(super) async fn make_space(&self, given: u64) -> Result<bool> {
        let Some(units) = &self.units else { return Ok(false) };
        units.waits.fetch_add(1, Ordering::AcqRel);
        self.commit().await?;
        let mut has_looked = !self.metadata.limits().fixed_len;
        loop {
            self.give_back_freed(Pace::Now).await?;
            if units.given() != given {
                return Ok(true);
            }
            let stamp = lock(&units.waiting).front().map(|(stamp, _)| *stamp);
            match stamp {
                Some(stamp) => self.epochs.until_passed(stamp).await,
                None if !has_looked => {
                    self.look_at_device().await?;
                    has_looked = true;
                }
                None => {
                    units.refused.fetch_add(1, Ordering::AcqRel);
                    return Ok(false);
                }
            }
        }
    }

    /// Takes units on their way as far as they can go.
    pub(super) async fn give_back_freed(&self, pace: Pace) -> Result<()> {
        let Some(units) = &self.units else { return Ok(()) };
        let giving = units.giving.lock().await;
        self.give_back_all(units, giving, pace).await
    }

    /// The same, unless somebody is doing it.
    pub(super) async fn give_back_unless_busy(&self) -> Result<()> {
        let Some(units) = &self.units else { return Ok(()) };
        match units.giving.try_lock() {
            Some(giving) => self.give_back_all(units, giving, Pace::Later).await,
            None => Ok(()),
        }
    }

    async fn give_back_all(
        &self,
        units: &Units,
        _giving: async_lock::MutexGuard<'_, ()>,
        pace: Pace,
    ) -> Result<()> {
        self.settle_zeroed(units);
        self.zero_freed(units, pace).await?;
        self.zero_unknown(units, pace).await;
        if sabotage::is(Bug::ZeroNotCovered) {
            self.settle_zeroed(units);
        }
        if pace == Pace::Now && !lock(&units.zeroed).is_empty() {
            self.commit().await?; // whatever is in it, it covers the zeros
            self.settle_zeroed(units);
        }
        Ok(())
    }

    /// Units whose zeros a flush covers are clean.
    fn settle_zeroed(&self, units: &Units) {
        let covered = self.commits.covered();
        let is_careless = sabotage::is(Bug::ZeroNotCovered) || sabotage::is(Bug::UnitFreedBeforeDurable);
        let mut zeroed = lock(&units.zeroed);
        while let Some((_, unit)) =
            zeroed.front().copied().filter(|(change, _)| *change <= covered || is_careless)
        {
            zeroed.pop_front();
            units.clean(unit);
        }
    }

    /// Makes units zero that are free, durably, and that nobody looks at any more.
    async fn zero_freed(&self, units: &Units, pace: Pace) -> Result<()> {
        loop {
            let batch = {
                let mut waiting = lock(&units.waiting);
                match waiting.front() {
                    Some((stamp, _)) if self.epochs.has_passed(*stamp) => waiting.pop_front(),
                    _ => None,
                }
            };
            let Some((stamp, mut batch)) = batch else { return Ok(()) };
            while let Some(unit) = batch.pop() {
                if !self.is_out_of_records(unit, pace).await? {
                    batch.push(unit);
                    lock(&units.waiting).push_front((stamp, batch));
                    return Ok(());
                }
                if sabotage::is(Bug::UnitNotZeroed) {
                    units.give_up(unit);
                    continue;
                }
                self.zero(units, unit).await;
            }
        }
    }

    /// Makes a unit zero that nobody uses. One that cannot be is tried again some time.
    async fn zero(&self, units: &Units, unit: u32) {
        let done = self.metadata.write_zeroes(self.inside(self.places.unit(unit)), Zeroes::MayUnmap).await;
        let change = self.commits.note_change();
        match done {
            Ok(()) => lock(&units.zeroed).push_back((change, unit)),
            Err(_) => units.give_up(unit),
        }
    }

    /// The part of a unit that the medium has.
    pub(super) fn inside(&self, unit: ImageSpan) -> ImageSpan {
        unit.intersect(ImageOffset::ZERO.span(self.metadata.len()))
    }

    /// Makes units zero of which nobody knows what they hold: many where that costs nothing, a few ahead of need elsewhere.
    async fn zero_unknown(&self, units: &Units, pace: Pace) {
        let at_once = match (self.metadata.limits().fast_zeroes, pace) {
            (true, _) => CLEANED_AT_ONCE,
            (false, Pace::Now) => CLEAN_AHEAD.max(1),
            (false, Pace::Later) => CLEAN_AHEAD,
        };
        let ready = { lock(&units.pool).clean.len() } + { lock(&units.zeroed).len() };
        let at_once = if sabotage::is(Bug::UnitNotZeroed) { 0 } else { at_once };
        for _ in ready..at_once {
            let next = {
                let mut pool = lock(&units.pool);
                let next = pool.unknown.min();
                if let Some(unit) = next {
                    pool.unknown.remove(unit);
                }
                next
            };
            let Some(unit) = next else { return };
            self.zero(units, unit).await;
        }
    }

    /// Whether no record has guest data of this unit that a recovery would bring back. Asks for it to be made so.
    async fn is_out_of_records(&self, unit: u32, pace: Pace) -> Result<bool> {
        let Some(journal) = self.journal() else { return Ok(true) };
        let span = self.places.unit(unit);
        while journal.full.has(span) {
            journal.want_relief();
            if pace == Pace::Later {
                return Ok(false);
            }
            self.commit().await?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_holds_is_not_given_out_before_it_is_clean() {
        let used: RoaringBitmap = [2, 5].into_iter().collect();
        let units = Units::new(&used, 4, true);
        assert_eq!(lock(&units.pool).unknown.iter().collect::<Vec<_>>(), [1, 3, 4]);
        assert_eq!(units.take(), Some(6), "behind the end");
        units.clean(3);
        assert_eq!(units.take(), Some(3));
        units.give_up(6);
        assert_eq!(units.take(), Some(7));
        let device = Units::new(&used, 8, false);
        assert_eq!(device.take(), None);
        assert_eq!(lock(&device.pool).unknown.len(), 6);
    }
}
