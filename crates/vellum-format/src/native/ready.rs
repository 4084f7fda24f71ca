//! How free units become ready for use: made zero, and that flushed, before a write needs them.
//!
//! ```text
//!   the disk is not tended   before the first change after a flush: freed units, a few units ahead
//!   the disk is tended       from time to time, a little at a time: no part of it in the guest's flushes
//!   no unit is clean         the write that wants one waits for it, and for a flush; these waits are counted
//! ```
//!
//! 1. The number of ready units is bounded: as many as are allocated in about a second (`prealloc.rs`), and
//!    at least a few. More are made ready when a quarter of them is used up. So a quiet disk costs nothing.
//!    Where zeros cost no writes the number is fixed.
//! 2. In a file nothing is done before the first change of the image, because units can be taken behind the
//!    end of the file. A device has no such end, so a few of its units are made ready at once.
//! 3. A flush for this purpose alone is made only when half of the wanted units are not clean yet and no
//!    flush of a guest has come meanwhile, and in quiet times after each 64 MiB.
//! 4. No flush of the guest waits for any of this. Where zeros cost nothing, units that were freed together
//!    and lie in a row are made zero together.
//! 5. Where zeros cost writes, space that is a hole already is left alone, and units that are freed beyond
//!    need are not made zero.
//! 6. There, units for zones, and what somebody wants to be kept ready (`--prealloc SIZE`), are made zero when
//!    the guest is quiet, or has paid for it (`zero_pace.rs`).

use std::ops::Range;
use std::time::Duration;

use vellum_core::{ErrorKind, ImageOffset, ImageSpan, Result, SharedStorage, Zeroes};

use super::image::Native;
use super::units::Units;
use crate::engine::Commit as _;
use crate::prealloc::Prealloc;
use crate::state::lock;

/// At most this many clean units are kept ahead of need where zeros cost writes.
const CLEAN_AHEAD: usize = 4;
/// Where zeros cost nothing, this many units of unknown content are made zero with one flush.
const CLEANED_AT_ONCE: usize = 64;
/// Where zeros cost writes, at most this many bytes, and at least one unit, are made zero before the next
/// check for waiting requests: a hard disk seeks for each of them.
const ZEROED_IN_A_GO_BYTES: u64 = 1 << 20;
/// The same bound where zeros cost nothing, in runs of units.
const ZEROED_IN_A_GO_FAST: usize = 16;
/// There, at most this many bytes of a run are made zero at once, because other requests to the file wait for
/// that in the kernel.
const ZEROED_AT_ONCE_FAST: u64 = 256 << 20;

/// In quiet times zeros are flushed whenever this many bytes of them are not.
const FLUSHED_AFTER_BYTES: u64 = 64 << 20;

/// A request that finds no space looks for some at most this often. It never takes as many rounds where there
/// is space.
const ROUNDS_MAX: u32 = 64;

/// How soon units are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Haste {
    /// When it costs no flush.
    Later,
    Now,
}

/// How much is done in one go.
struct Work {
    haste: Haste,
    /// This many units are to be ready.
    wanted: usize,
    /// As many of these are taken where they are found; the others lie in zones of which all is free.
    singles: usize,
    /// At most this many units are made zero, or runs of units where zeros cost nothing.
    most: usize,
    /// The storage through which zeros are written.
    way: SharedStorage,
}

impl Native {
    /// Makes units clean for a caller that needs `needed` of them, if there are free ones. Must not be called
    /// from inside an epoch. Returns whether any unit became clean, by whatever means, since `given` was
    /// read.
    pub(super) async fn make_space(&self, given: u64, needed: usize) -> Result<bool> {
        let Some(units) = &self.units else { return Ok(false) };
        units.note_wait();
        self.commit().await?;
        let mut has_looked = !self.metadata.limits().fixed_len;
        loop {
            self.give_back(units, Haste::Now, needed).await?;
            if units.given() != given {
                return Ok(true);
            }
            match units.first_freed() {
                Some(stamp) => self.engine.epochs.until_passed(stamp).await,
                None if !has_looked => {
                    self.look_at_device().await?;
                    has_looked = true;
                }
                None if self.give_up_open_zones(units) => return Ok(true),
                None => {
                    units.note_refusal();
                    return Ok(false);
                }
            }
        }
    }

    /// As above, for a caller that has looked for space `rounds` times, but not for ever. On a full host,
    /// returned units become clean again and again although no write to them succeeds.
    pub(super) async fn space_again(&self, rounds: &mut u32, given: u64, needed: usize) -> Result<bool> {
        *rounds += 1;
        match *rounds < ROUNDS_MAX {
            true => self.make_space(given, needed).await,
            false => Ok(false),
        }
    }

    /// Takes freed units as far towards clean as possible.
    pub(super) async fn give_back_freed(&self, haste: Haste) -> Result<()> {
        match &self.units {
            Some(units) => self.give_back(units, haste, 0).await,
            None => Ok(()),
        }
    }

    async fn give_back(&self, units: &Units, haste: Haste, needed: usize) -> Result<()> {
        let giving = units.giving.lock().await;
        self.give_back_all(units, giving, haste, needed, usize::MAX).await
    }

    /// Called before a request that changes the disk, outside of an epoch.
    pub(super) async fn give_back_if_due(&self) -> Result<()> {
        match &self.units {
            Some(units) if units.take_due() => {}
            _ => return Ok(()),
        }
        match self.give_back_unless_busy().await {
            Err(error) if error.kind() == ErrorKind::Corrupt => Err(error),
            _ => Ok(()), // what cannot be given back now will be later
        }
    }

    /// Gives back a few units, unless another task is doing that.
    pub(super) async fn give_back_unless_busy(&self) -> Result<()> {
        let Some(units) = &self.units else { return Ok(()) };
        let most = match self.metadata.limits().fast_zeroes {
            true => ZEROED_IN_A_GO_FAST,
            false => usize::MAX, // the excess is not made zero
        };
        if let Some(giving) = units.giving.try_lock() {
            self.give_back_all(units, giving, Haste::Later, 0, most).await?;
            if units.any_freed() {
                units.note_due();
            }
        }
        Ok(())
    }

    /// Makes a few units ready while no request waits. Returns whether there is more to do at once.
    pub(super) async fn make_ready(&self, now: Duration) -> bool {
        let Some(units) = &self.units else { return false };
        let has_begun = self.journal().is_some();
        if !(has_begun || units.needs_unknown()) {
            return false;
        }
        let Some(_giving) = units.giving.try_lock() else { return false };
        if self.engine.state.check_open().is_err() || self.engine.state.check_stopped().is_err() {
            return false;
        }
        units.note_tended();
        // An error that keeps the entries from being recorded now is found by the next request that needs
        // them recorded.
        let _ = self.record_when_quiet(now).await;
        let has_more = self.make_some_ready(units, now).await.unwrap_or(false);
        self.prepare_zones(now).await || has_more
    }

    async fn make_some_ready(&self, units: &Units, now: Duration) -> Result<bool> {
        let is_fast = self.metadata.limits().fast_zeroes;
        let unit = self.unit().expect("only a table has units");
        let distance = {
            let mut pace = lock(&units.pace);
            pace.note(now, units.taken() << unit.shift());
            usize::try_from(pace.distance(Prealloc::Adaptive) >> unit.shift()).expect("at most 1024")
        };
        let (is_quiet, is_paid_for) = {
            let mut pace = lock(&units.zero_pace);
            (pace.is_quiet(now, units.written_bytes()), pace.is_paid_for())
        };
        let singles = match is_fast && self.journal().is_some() {
            true => CLEANED_AT_ONCE,
            false => distance.max(CLEAN_AHEAD),
        };
        let wanted = match (is_fast, is_quiet, is_paid_for) {
            (true, ..) | (false, false, false) => singles,
            (false, true, _) => singles.max(self.units_for_zones()).max(units.kept_ready()),
            (false, false, true) => singles.max(self.units_for_zones()),
        };
        let most = match is_fast {
            false => usize::try_from(unit.count_for(ZEROED_IN_A_GO_BYTES)).expect("at most 16"),
            true => ZEROED_IN_A_GO_FAST,
        };
        self.settle_zeroed(units);
        let work = Work { haste: Haste::Later, wanted, singles, most, way: self.ahead.clone() };
        let mut done = self.zero_freed(units, &work).await?;
        let ready = units.ready();
        let has_unknown = units.has_unknown();
        if done == 0 && has_unknown && (units.refills() || wanted - ready.min(wanted) >= wanted.div_ceil(4)) {
            let zeroed = self.zero_unknown(units, &work).await;
            if ready >= singles && !is_quiet {
                lock(&units.zero_pace).spend((zeroed as u64) << unit.shift());
            }
            done += zeroed;
            units.set_refills(units.ready() < wanted && units.has_unknown());
        }
        let has_more = done > 0 && (units.refills() || units.any_waits());
        let is_much = is_quiet && (units.zeroed_count() as u64) << unit.shift() >= FLUSHED_AFTER_BYTES;
        if is_much || (done == 0 && units.clean_count() * 2 < units.ready().min(wanted)) {
            self.commit().await?; // no guest has flushed; any commit covers the zeros
            self.settle_zeroed(units);
        }
        Ok(has_more)
    }

    async fn give_back_all(
        &self,
        units: &Units,
        _giving: async_lock::MutexGuard<'_, ()>,
        haste: Haste,
        needed: usize,
        most: usize,
    ) -> Result<()> {
        let wanted = match self.metadata.limits().fast_zeroes {
            true => CLEANED_AT_ONCE.max(needed),
            false => CLEAN_AHEAD.max(needed),
        };
        let work = Work { haste, wanted, singles: wanted, most, way: self.metadata.clone() };
        self.settle_zeroed(units);
        self.zero_freed(units, &work).await?;
        let work = Work { most: usize::MAX, ..work };
        self.zero_unknown(units, &work).await;
        if haste == Haste::Now && units.any_zeroed() {
            self.commit().await?; // any commit covers the zeros
            self.settle_zeroed(units);
        }
        Ok(())
    }

    /// Units whose zeros a flush covers become clean.
    pub(super) fn settle_zeroed(&self, units: &Units) {
        units.settle(self.engine.commits.covered());
    }

    /// Makes units zero that are durably free and that no request reads any more. Returns how many it dealt
    /// with.
    async fn zero_freed(&self, units: &Units, work: &Work) -> Result<usize> {
        let is_fast = self.metadata.limits().fast_zeroes;
        let run_max = self.unit().map_or(1, |unit| unit.count_for(ZEROED_AT_ONCE_FAST));
        let run_max = usize::try_from(run_max).expect("units are large");
        let mut done = 0;
        while done < work.most {
            let Some((stamp, mut batch)) = units.next_freed(|stamp| self.engine.epochs.has_passed(stamp))
            else {
                break;
            };
            while let Some(unit) = batch.pop() {
                if done == work.most || !self.is_out_of_records(unit, work.haste).await? {
                    batch.push(unit);
                    units.put_back_freed(stamp, batch);
                    return Ok(done);
                }
                done += 1;
                let is_too_much = !is_fast && units.ready() >= work.wanted;
                if is_too_much {
                    units.give_up(unit);
                    continue;
                }
                let mut run = unit..unit + 1;
                while is_fast && run.len() < run_max && batch.last() == Some(&run.end) {
                    if !self.is_out_of_records(run.end, work.haste).await? {
                        break;
                    }
                    batch.pop();
                    run.end += 1;
                }
                self.zero(units, run, &work.way).await;
            }
        }
        Ok(done)
    }

    /// Makes free units in a row zero. Units that cannot be made zero are tried again later.
    async fn zero(&self, units: &Units, run: Range<u32>, way: &SharedStorage) -> bool {
        let span =
            ImageSpan::between(self.places.unit(run.start).start(), self.places.unit(run.end - 1).end());
        let done = self.zero_bytes(self.inside(span), way).await;
        let change = self.engine.commits.note_change();
        for unit in run {
            match done {
                Ok(()) => units.zeroed(change, unit),
                Err(_) => units.give_up(unit),
            }
        }
        done.is_ok()
    }

    /// Makes some of these units of unknown content zero. Returns whether there were any.
    pub(super) async fn zero_some_of(&self, run: Range<u32>) -> bool {
        let units = self.units();
        let _giving = units.giving.lock().await;
        let at_once = self.unit().map_or(1, |unit| unit.count_for(ZEROED_IN_A_GO_BYTES));
        match units.take_unknown_of(run, usize::try_from(at_once).expect("at most 16")) {
            Some(some) => self.zero(units, some, &self.ahead).await,
            None => false,
        }
    }

    async fn zero_bytes(&self, span: ImageSpan, way: &SharedStorage) -> Result<()> {
        let limits = way.limits();
        if limits.fast_zeroes || limits.fixed_len {
            return way.write_zeroes(span, Zeroes::MayUnmap).await;
        }
        let mut rest = span;
        while !rest.is_empty() {
            for run in way.runs(rest).await? {
                if run.is_data {
                    way.write_zeroes(run.span, Zeroes::MayUnmap).await?;
                }
                rest = ImageSpan::between(run.span.end(), rest.end());
            }
        }
        Ok(())
    }

    /// The part of a unit that exists on the medium.
    pub(super) fn inside(&self, unit: ImageSpan) -> ImageSpan {
        unit.intersect(ImageOffset::ZERO.span(self.metadata.len()))
    }

    /// Makes units of unknown content zero, until one of them fails. Returns how many.
    async fn zero_unknown(&self, units: &Units, work: &Work) -> usize {
        let missing = work.wanted.saturating_sub(units.ready()).min(work.most);
        let at_once = self.unit().map_or(1, |unit| unit.count_for(ZEROED_IN_A_GO_BYTES));
        let at_once = usize::try_from(at_once).expect("at most 16");
        let mut done = 0;
        while done < missing {
            let some = at_once.min(missing - done);
            let of_a_zone = || self.take_unknown_of_a_zone(units, some);
            let run = if units.ready() < work.singles { None } else { of_a_zone() };
            let Some(run) = run.or_else(|| units.take_unknown(some)) else { break };
            let (first, count) = (run.start, run.len());
            if !self.zero(units, run, &work.way).await {
                if count == 1 {
                    units.pass_over(first);
                }
                // Only one of them may be at fault, and the others may be fine.
                for _ in 1..count {
                    let Some(one) = units.take_unknown(1) else { break };
                    let this = one.start;
                    if !self.zero(units, one, &work.way).await {
                        units.pass_over(this);
                        break;
                    }
                    done += 1;
                }
                break;
            }
            done += count;
        }
        done
    }

    /// The number of units that must be clean so that a whole zone of them can be opened, even if single
    /// units are taken meanwhile.
    fn units_for_zones(&self) -> usize {
        if self.journal().is_some() && self.may_embed() { 2 * self.zone_len() } else { 0 }
    }

    /// Whether no record has guest data of this unit that a recovery would write back. Requests a checkpoint
    /// if one has.
    async fn is_out_of_records(&self, unit: u32, haste: Haste) -> Result<bool> {
        let Some(journal) = self.journal() else { return Ok(true) };
        let span = self.places.unit(unit);
        while journal.full.has(span) {
            journal.request_checkpoint();
            if haste == Haste::Later {
                return Ok(false);
            }
            self.commit().await?;
        }
        Ok(true)
    }
}
