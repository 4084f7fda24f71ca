//! How free units become ready for use: made zero, and that flushed, before somebody needs them.
//!
//! ```text
//!   nobody tends the disk    in the flush of a guest, when it has been answered for: all that was freed, a few units ahead
//!   somebody does            here and now, a little at a time: nothing of it in the guest's flushes
//!   no unit is clean         the write that wants one waits for it, and for a flush; these are counted
//! ```
//!
//! 1. What lies ready is bounded: as much as is allocated in about a second (`prealloc.rs`), a few units at least; more is begun
//!    when a quarter of it is used up. So a quiet disk costs nothing. Where zeros cost no writes it is always the same number.
//! 2. Before the first change of an image in a file nothing is done: there is the end of the file to go on with. A device has no
//!    such end, so a few of its units are made ready at once.
//! 3. A flush of ours comes only when half of what should be ready is not clean yet, and no flush of a guest has come by.
//! 4. Where zeros cost writes, what is a hole already is left alone, and what is freed beyond need is not made zero.

use std::ops::Range;
use std::time::Duration;

use vellum_core::{ImageOffset, ImageSpan, Result, SharedStorage, Zeroes};

use super::image::Native;
use super::units::Units;
use crate::prealloc::Prealloc;
use crate::sabotage::{self, Bug};
use crate::state::lock;

/// So many clean units are kept ahead of need where zeros cost writes.
const CLEAN_AHEAD: usize = 4;
/// So many units of unknown content are made zero with one flush where zeros cost nothing.
const CLEANED_AT_ONCE: usize = 64;
/// So many bytes are made zero before it is looked again whether somebody waits, one unit at least, where zeros cost writes: a disk
/// with an arm moves for each of them.
const ZEROED_IN_A_GO_BYTES: u64 = 1 << 20;
/// So many units, where zeros cost nothing.
const ZEROED_IN_A_GO_FAST: usize = 16;

/// So often somebody who finds no space looks for some: more than it ever takes where there is any.
const ROUNDS_MAX: u32 = 64;

/// How soon units are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Haste {
    /// When it costs no flush.
    Later,
    Now,
}

/// How much is done before somebody looks again.
struct Work {
    haste: Haste,
    /// So many units are to be ready.
    wanted: usize,
    /// So many are made zero, at most.
    most: usize,
    /// Zeros go this way.
    way: SharedStorage,
}

impl Native {
    /// Makes units clean for who needs so many, if there are any that nobody uses. Must not be called from inside an epoch. Tells
    /// whether any became clean, by whomever, since `given` was asked.
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
                Some(stamp) => self.epochs.until_passed(stamp).await,
                None if !has_looked => {
                    self.look_at_device().await?;
                    has_looked = true;
                }
                None if self.give_up_young(units) => return Ok(true),
                None => {
                    units.note_refusal();
                    return Ok(false);
                }
            }
        }
    }

    /// The same for who has looked for space `rounds` times: not for ever. Where the host is full, units that it takes back become clean
    /// again and again, and no write to them succeeds.
    pub(super) async fn space_again(&self, rounds: &mut u32, given: u64, needed: usize) -> Result<bool> {
        *rounds += 1;
        match *rounds < ROUNDS_MAX {
            true => self.make_space(given, needed).await,
            false => Ok(false),
        }
    }

    /// Takes units on their way as far as they can go.
    pub(super) async fn give_back_freed(&self, haste: Haste) -> Result<()> {
        match &self.units {
            Some(units) => self.give_back(units, haste, 0).await,
            None => Ok(()),
        }
    }

    async fn give_back(&self, units: &Units, haste: Haste, needed: usize) -> Result<()> {
        let giving = units.giving.lock().await;
        self.give_back_all(units, giving, haste, needed).await
    }

    /// After a flush of the guest: takes them as far as that, unless somebody is doing it.
    pub(super) async fn give_back_unless_busy(&self) -> Result<()> {
        let Some(units) = &self.units else { return Ok(()) };
        if units.is_tended() {
            self.settle_zeroed(units);
            return Ok(());
        }
        match units.giving.try_lock() {
            Some(giving) => self.give_back_all(units, giving, Haste::Later, 0).await,
            None => Ok(()),
        }
    }

    /// Makes a few units ready while nobody waits. Tells whether there is more to do at once.
    pub(super) async fn make_ready(&self, now: Duration) -> bool {
        let Some(units) = &self.units else { return false };
        let has_begun = self.journal().is_some();
        if !(has_begun || units.needs_unknown()) {
            return false;
        }
        let Some(_giving) = units.giving.try_lock() else { return false };
        if self.state.check_open().is_err() || self.state.check_stopped().is_err() {
            return false;
        }
        units.note_tended();
        // What keeps it from being told now is found out by who needs it.
        let _ = self.settle_when_quiet(now).await;
        let has_more = self.make_some_ready(units, now).await.unwrap_or(false);
        self.prepare_zones(now).await || has_more
    }

    async fn make_some_ready(&self, units: &Units, now: Duration) -> Result<bool> {
        let is_fast = self.metadata.limits().fast_zeroes;
        let distance = {
            let unit = self.unit().expect("only a table has units");
            let mut pace = lock(&units.pace);
            pace.note(now, (units.taken() + self.given_of_zones()) << unit.shift());
            usize::try_from(pace.distance(Prealloc::Adaptive) >> unit.shift()).expect("at most 1024")
        };
        let wanted = match is_fast && self.journal().is_some() {
            true => CLEANED_AT_ONCE,
            false => distance.max(CLEAN_AHEAD).max(self.units_for_zones()),
        };
        let most = match (is_fast, self.unit()) {
            (false, Some(unit)) => usize::try_from(unit.count_for(ZEROED_IN_A_GO_BYTES)).expect("at most 16"),
            _ => ZEROED_IN_A_GO_FAST,
        };
        self.settle_zeroed(units);
        let work = Work { haste: Haste::Later, wanted, most, way: self.ahead.clone() };
        let mut done = self.zero_freed(units, &work).await?;
        let ready = units.ready();
        let has_unknown = units.has_unknown();
        if done == 0 && has_unknown && (units.refills() || wanted - ready.min(wanted) >= wanted.div_ceil(4)) {
            done += self.zero_unknown(units, &work).await;
            units.set_refills(units.ready() < wanted && units.has_unknown());
        }
        let has_more = done > 0 && (units.refills() || units.any_waits());
        if done == 0 && units.clean_count() * 2 < units.ready().min(wanted) {
            self.commit().await?; // no guest has come by; whatever is in it, it covers the zeros
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
    ) -> Result<()> {
        let wanted = match self.metadata.limits().fast_zeroes {
            true => CLEANED_AT_ONCE.max(needed),
            false => CLEAN_AHEAD.max(needed),
        };
        let work = Work { haste, wanted, most: usize::MAX, way: self.metadata.clone() };
        self.settle_zeroed(units);
        self.zero_freed(units, &work).await?;
        self.zero_unknown(units, &work).await;
        if sabotage::is(Bug::ZeroNotCovered) {
            self.settle_zeroed(units);
        }
        if haste == Haste::Now && units.any_zeroed() {
            self.commit().await?; // whatever is in it, it covers the zeros
            self.settle_zeroed(units);
        }
        Ok(())
    }

    /// Units whose zeros a flush covers are clean.
    fn settle_zeroed(&self, units: &Units) {
        let is_careless = sabotage::is(Bug::ZeroNotCovered) || sabotage::is(Bug::UnitFreedBeforeDurable);
        units.settle(if is_careless { u64::MAX } else { self.commits.covered() });
    }

    /// Makes units zero that are free, durably, and that nobody looks at any more. Tells how many it dealt with.
    async fn zero_freed(&self, units: &Units, work: &Work) -> Result<usize> {
        let mut done = 0;
        while done < work.most {
            let Some((stamp, mut batch)) = units.next_freed(|stamp| self.epochs.has_passed(stamp)) else {
                break;
            };
            while let Some(unit) = batch.pop() {
                if done == work.most || !self.is_out_of_records(unit, work.haste).await? {
                    batch.push(unit);
                    units.put_back_freed(stamp, batch);
                    return Ok(done);
                }
                done += 1;
                let is_too_much = !self.metadata.limits().fast_zeroes && units.ready() >= work.wanted;
                if is_too_much || sabotage::is(Bug::UnitNotZeroed) {
                    units.give_up(unit);
                    continue;
                }
                self.zero(units, unit..unit + 1, &work.way).await;
            }
        }
        Ok(done)
    }

    /// Makes units in a row zero that nobody uses. Those that cannot be are tried again some time.
    async fn zero(&self, units: &Units, run: Range<u32>, way: &SharedStorage) -> bool {
        let span =
            ImageSpan::between(self.places.unit(run.start).start(), self.places.unit(run.end - 1).end());
        let done = self.zero_bytes(self.inside(span), way).await;
        let change = self.commits.note_change();
        for unit in run {
            match done {
                Ok(()) => units.zeroed(change, unit),
                Err(_) => units.give_up(unit),
            }
        }
        done.is_ok()
    }

    /// Makes some of these zero that are of unknown content. Tells whether there were any.
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

    /// The part of a unit that the medium has.
    pub(super) fn inside(&self, unit: ImageSpan) -> ImageSpan {
        unit.intersect(ImageOffset::ZERO.span(self.metadata.len()))
    }

    /// Makes units zero of which nobody knows what they hold, until one cannot be. Tells how many.
    async fn zero_unknown(&self, units: &Units, work: &Work) -> usize {
        if sabotage::is(Bug::UnitNotZeroed) {
            return 0;
        }
        let missing = work.wanted.saturating_sub(units.ready()).min(work.most);
        let at_once = self.unit().map_or(1, |unit| unit.count_for(ZEROED_IN_A_GO_BYTES));
        let at_once = usize::try_from(at_once).expect("at most 16");
        let mut done = 0;
        while done < missing {
            let Some(run) = units.take_unknown(at_once.min(missing - done)) else { break };
            let (first, count) = (run.start, run.len());
            if !self.zero(units, run, &work.way).await {
                if count == 1 {
                    units.pass_over(first);
                }
                // One of them may be what fails, and the others as good as any.
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

    /// So many units are to be clean that a zone of them is as a whole, whatever is taken one by one meanwhile: then it is opened.
    fn units_for_zones(&self) -> usize {
        if self.journal().is_some() && self.may_be_born() { 2 * self.zone_len() } else { 0 }
    }

    /// Whether no record has guest data of this unit that a recovery would bring back. Asks for it to be made so.
    async fn is_out_of_records(&self, unit: u32, haste: Haste) -> Result<bool> {
        let Some(journal) = self.journal() else { return Ok(true) };
        let span = self.places.unit(unit);
        while journal.full.has(span) {
            journal.want_relief();
            if haste == Haste::Later {
                return Ok(false);
            }
            self.commit().await?;
        }
        Ok(true)
    }
}
