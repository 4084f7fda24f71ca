//! What is done before something changes that a snapshot sees: a page of home is kept, a unit is copied.
//!
//! ```text
//!   a page   slot ► its bytes written there ► gate: check, index                 then the change, in this record or a later one
//!   a unit   who may write to it has left ► fresh unit ► copied ► gate: checks, entry              then the write, as ever
//! ```
//!
//! 1. The copy of a page is entered before the page changes: in the same transaction at the latest. A snapshot that is made in
//!    between asks for a copy of its own, so it is looked again under the gate.
//! 2. Zeros of a unit are not copied: a fresh unit is zero.
//! 3. A copy counts only if its unit was held from before it was read until its entry changes, which is looked at under the lock by
//!    which units are let go: the snapshot may have been deleted meanwhile, and the unit written to where it lies.
//! 4. The copy of a unit and the write that asked for it share a flush. Only where the checks would not fit a record the copy is
//!    flushed first.

use std::sync::RwLockReadGuard;

use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestCluster, GuestSpan, ImageOffset, LocalFuture, Result,
    is_zero, try_join_all,
};

use super::super::geometry::{Bits, SNAPSHOTS};
use super::super::home::Missing;
use super::super::image::Native;
use super::super::publish::WORD_COST;
use super::copies::SlotAt;
use super::{Held, Ordering, Views, page_of};
use crate::journal::{SectorChecks, checks_of};
use crate::sabotage::{self, Bug};
use crate::state::lock;

/// What a kept page takes of a record, at most.
const KEPT_BYTES: u64 = 20 + 8 * 4 + 2 * 24;
/// What an entry takes, and the bit of the unit that it named.
const ENTRY_BYTES: u64 = 2 * WORD_COST;
/// Units are copied in pieces of this.
const PAGE: usize = 4096;
/// Runs of checks reach over no multiple of this.
const CHECKS_TOGETHER: BlockSize = BlockSize::from_shift(20);

impl Native {
    /// Whether these pages of home may change as far as snapshots are concerned. Nothing is asked for where there are none.
    fn may_change(&self, words: &impl Fn() -> Vec<ImageOffset>) -> bool {
        let Some(views) = self.views.as_ref().filter(|views| views.any()) else { return true };
        let held = lock(&views.copies);
        if sabotage::is(Bug::PageKeptLate) {
            // Asked for only when it has changed.
            let late = |page| held.copies.late.contains(&page);
            return words().into_iter().map(page_of).all(|page| !late(page) || held.is_kept(page));
        }
        held.relies_on_home == 0 || words().into_iter().all(|word| held.is_kept(page_of(word)))
    }

    /// Enters the open transaction with changes of these words of home.
    pub(in crate::native) async fn enter_changing(
        &self,
        cost: u64,
        words: impl Fn() -> Vec<ImageOffset>,
    ) -> Result<RwLockReadGuard<'_, ()>> {
        loop {
            self.keep(&words).await?;
            let gate = self.enter_transaction(cost).await?;
            if self.may_change(&words) {
                return Ok(gate);
            }
        }
    }

    /// Keeps these pages for the snapshot that relies on home, if it has no copies of them.
    pub(in crate::native) async fn keep(&self, words: &impl Fn() -> Vec<ImageOffset>) -> Result<()> {
        if self.may_change(words) {
            return Ok(());
        }
        let views = self.views.as_ref().expect("somebody wants pages kept");
        let _one = views.keeping.lock().await;
        let mut pages: Vec<u64> = words().into_iter().map(page_of).collect();
        pages.dedup();
        for page in pages {
            self.keep_page(views, page).await.context(|| format!("{}: can't keep a page", self.name))?;
        }
        Ok(())
    }

    async fn keep_page(&self, views: &Views, page: u64) -> Result<()> {
        let first = Bits { word: ImageOffset::new(page), shift: 0, width: 1 };
        self.find(|| self.home.get(first)).await?;
        loop {
            if lock(&views.copies).is_kept(page) {
                return Ok(());
            }
            let slot = self.slot(views).await?;
            let at = lock(&views.copies).copies.place(slot).start();
            // Nobody changes it before it is kept.
            let bytes = self.home.bytes(ImageOffset::new(page)).expect("as just loaded");
            let buffer = Buffer::copy_of(&bytes);
            let checks = checks_of(at, &buffer, BlockSize::PAGE, |_| true);
            let give_back = |_: &Error| lock(&views.copies).copies.give_slot(slot);
            self.metadata.write(at, buffer).await.inspect_err(give_back)?;
            self.commits.note_change();
            let _gate = self.enter_transaction(KEPT_BYTES).await.inspect_err(give_back)?;
            let mut held = lock(&views.copies);
            let is_same = self.home.bytes(ImageOffset::new(page)).is_some_and(|now| now == bytes);
            if held.is_kept(page) || !is_same {
                // The snapshot is gone, and perhaps there is another one.
                held.copies.give_slot(slot);
                continue;
            }
            self.journal().expect("it has begun").add_checks(&checks);
            let id = held.relies_on_home;
            held.copies.add(id, page, slot, &bytes);
            return Ok(());
        }
    }

    /// A slot for a copy; a new map unit when no other has one.
    async fn slot(&self, views: &Views) -> Result<SlotAt> {
        let records = self.commits.records();
        if let Some(slot) = { lock(&views.copies).copies.take_slot(records) } {
            return Ok(slot);
        }
        let unit = self.allocate().await?;
        if let Err(error) = self.load_entry(SNAPSHOTS - 1).await {
            self.give_up(unit);
            return Err(error);
        }
        let gate = self.enter_transaction(4 * 24).await.inspect_err(|_| self.give_up(unit))?;
        let mut held = lock(&views.copies);
        held.copies.add_map_unit(unit);
        let mut list = lock(&views.list);
        list.first_map_unit = unit;
        self.put_last(&list);
        drop(list);
        let slot = held.copies.take_slot(records).expect("a new map unit has room");
        drop((held, gate));
        Ok(slot)
    }

    /// Whether a snapshot sees the unit that the disk has there.
    pub(in crate::native) fn is_held(&self, number: u64) -> Result<bool, Missing> {
        let Some(views) = self.views.as_ref().filter(|_| self.holds_units()) else { return Ok(false) };
        let unit = self.entry(number)?;
        Ok(self.is_held_by(views, &lock(&views.copies), number, unit))
    }

    /// The same for one who looks at the copies.
    fn is_held_by(&self, views: &Views, held: &Held, number: u64, unit: u32) -> bool {
        let page = page_of(self.places.entry(number).word);
        let is_seen = views.any() && (!held.is_kept(page) || held.copies.names(unit));
        unit != 0 && ((is_seen && !sabotage::is(Bug::HeldOverwritten)) || self.is_being_emptied(unit))
    }

    /// Whether the unit has been held all the time since the stamp was read: nobody may write to it where it lies.
    fn is_held_since(&self, views: &Views, held: &Held, number: u64, stamp: u64) -> bool {
        let unit = self.entry(number);
        views.stamp.load(Ordering::Acquire) == stamp
            && unit.is_ok_and(|unit| self.is_held_by(views, held, number, unit))
    }

    /// Whether a snapshot sees a unit that the run touches.
    pub(in crate::native) fn holds_any(&self, span: GuestSpan) -> Result<bool, Missing> {
        if !self.holds_units() {
            return Ok(false);
        }
        for number in self.units_of(span) {
            if self.is_held(number)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn units_of(&self, span: GuestSpan) -> std::ops::Range<u64> {
        let unit = self.unit().expect("only a table has snapshots");
        if span.is_empty() {
            return 0..0;
        }
        unit.cluster_of(span.start()).index()..unit.count_for(span.end().bytes())
    }

    /// Gives the disk units of its own where it writes. Must not be called from inside an epoch.
    pub(in crate::native) async fn unshare(&self, span: GuestSpan) -> Result<()> {
        let Some(views) = self.views.as_ref().filter(|_| self.holds_units()) else { return Ok(()) };
        for number in self.units_of(span) {
            let mut rounds = 0;
            loop {
                let given = self.units().given();
                match self.unshare_unit(views, number).await {
                    // It can be written to where it lies: emptying a zone fails no write.
                    Err(_) if self.ends_emptying_for(number) => {}
                    Err(error) if error.kind() == ErrorKind::NoSpace => {
                        if !self.space_again(&mut rounds, given, 1).await? {
                            return Err(error);
                        }
                    }
                    result => break result?,
                }
            }
        }
        Ok(())
    }

    /// Whether there are units that are not written to where they lie.
    fn holds_units(&self) -> bool {
        self.views.as_ref().is_some_and(Views::any) || self.empties_any()
    }

    /// A fresh unit becomes the disk's. Where zones are emptied it may have been taken from one before that was said: who finds it in
    /// the table from now on may write to it.
    pub(in crate::native) fn enter_unit(&self, bits: Bits, unit: u32) {
        let change = || self.home.change(bits.word, |word| bits.set(word, u64::from(unit)));
        let Some(views) = self.views.as_ref().filter(|_| self.compaction.is_some()) else {
            change();
            return;
        };
        let _held = lock(&views.copies);
        change();
        if self.is_being_emptied(unit) {
            views.stamp.store(self.epochs.now() + 1, Ordering::Release);
        }
    }

    /// More units become such ones. Who looked before may write to them from now on, too: that is waited for by who copies one.
    pub(in crate::native) fn say_held(&self, say: impl FnOnce()) {
        let Some(views) = &self.views else { return };
        let _held = lock(&views.copies);
        say();
        views.stamp.store(self.epochs.now() + 1, Ordering::Release);
    }

    /// The unit of the disk gets another place, if it lies in a zone that is being emptied.
    pub(in crate::native) async fn leave_unit(&self, number: u64) -> Result<()> {
        match &self.views {
            Some(views) => self.unshare_unit(views, number).await,
            None => Ok(()),
        }
    }

    async fn unshare_unit(&self, views: &Views, number: u64) -> Result<()> {
        while self.find(|| self.is_held(number)).await? {
            self.begin_journal().await?;
            let stamp = views.stamp.load(Ordering::Acquire);
            if stamp > 0 && !sabotage::is(Bug::MovedUnderWriters) {
                // A write that looked before the snapshot was made may still be on its way to the old unit.
                self.epochs.until_passed(stamp - 1).await;
            }
            let held = self.claims.claim(GuestCluster::new(number), u32::MAX).await;
            let result = match views.stamp.load(Ordering::Acquire) == stamp {
                true => self.copy_unit(views, number, stamp).await,
                false => Ok(()), // a snapshot has come in between
            };
            self.let_go(held);
            result?;
        }
        Ok(())
    }

    /// The disk gets a copy of a unit that is held. The caller has claimed it, and who looked before the stamp has left.
    async fn copy_unit(&self, views: &Views, number: u64, stamp: u64) -> Result<()> {
        if !self.find(|| self.is_held(number)).await? {
            return Ok(());
        }
        let (old, form) = self.find(|| self.entry_and_form(number)).await?;
        // Before there is a unit: else the two could take what is left from each other for ever.
        self.keep(&|| vec![self.places.entry(number).word]).await?;
        let fresh = self.allocate().await?;
        let is_held = self.is_held_since(views, &lock(&views.copies), number, stamp);
        let result = match is_held {
            true => self.copy_into(views, number, (old, form), fresh, stamp).await,
            false => Ok(false), // there was no other unit than those of the zone that was being emptied
        };
        self.commits.note_change();
        if !matches!(result, Ok(true)) {
            self.give_up(fresh);
        }
        result.map(|_| ()).context(|| format!("{}: can't copy a unit", self.name))
    }

    /// Tells whether the disk has the copy. It has not where the unit was let go meanwhile: then somebody may have written to it
    /// where it lies.
    async fn copy_into(
        &self,
        views: &Views,
        number: u64,
        old: (u32, u32),
        fresh: u32,
        stamp: u64,
    ) -> Result<bool> {
        let mut checks = self.copy_bytes(number, old, fresh).await?;
        let mut cost = ENTRY_BYTES + checks.iter().map(|(_, crcs)| 20 + crcs.len() as u64 * 4).sum::<u64>();
        if cost > self.record_max() / 8 {
            self.flush_storage().await?;
            (checks, cost) = (Vec::new(), ENTRY_BYTES);
        }
        let bits = self.places.entry(number);
        let gate = self.enter_changing(cost, || vec![bits.word]).await?;
        let mut held = lock(&views.copies);
        if !self.is_held_since(views, &held, number, stamp) && !sabotage::is(Bug::HoldNotLookedAtAgain) {
            return Ok(false);
        }
        self.journal().expect("it has begun").add_checks(&checks);
        self.put_entry_of(Some(&mut held), bits, fresh);
        drop((held, gate));
        Ok(true)
    }

    /// Copies what is not zero; gives its checks.
    async fn copy_bytes(
        &self,
        number: u64,
        (old, form): (u32, u32),
        fresh: u32,
    ) -> Result<Vec<SectorChecks>> {
        let from = self.inside(self.places.unit(old));
        let len = usize::try_from(from.len()).expect("a unit");
        let bytes = self.data.read(from.start(), Buffer::for_overwrite(len)).await?;
        let mut bytes = bytes.to_vec();
        if let Some(block) = form.checked_sub(1) {
            // Elsewhere its entry would say nothing.
            let at = from.start() + u64::from(block) * PAGE as u64;
            let within = block as usize * PAGE..(block as usize + 1) * PAGE;
            let plain = self.unpack(number, at).await?;
            bytes[within].copy_from_slice(&plain);
        }
        let to = self.places.unit(fresh).start();
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (index, page) in bytes.chunks(PAGE).enumerate().filter(|(_, page)| !is_zero(page)) {
            let (start, end) = (index * PAGE, index * PAGE + page.len());
            match runs.last_mut() {
                Some((_, last)) if *last == start => *last = end,
                _ => runs.push((start, end)),
            }
        }
        let together = self.cell.min(CHECKS_TOGETHER);
        let mut checks = Vec::new();
        let mut writes: Vec<LocalFuture<'_, Result<()>>> = Vec::new();
        for (start, end) in runs {
            let data = Buffer::copy_of(&bytes[start..end]);
            checks.extend(checks_of(to + start as u64, &data, together, |_| true));
            writes.push(self.data.write(to + start as u64, data));
        }
        try_join_all(writes).await?;
        Ok(checks)
    }

    /// Changes an entry of the table. The unit that it named is free if no snapshot sees it. The caller holds the gate, and the
    /// page is kept.
    pub(in crate::native) fn put_entry(&self, bits: Bits, entry: u32) {
        let mut held = self.views.as_ref().map(|views| lock(&views.copies));
        self.put_entry_of(held.as_deref_mut(), bits, entry);
    }

    fn put_entry_of(&self, mut held: Option<&mut Held>, bits: Bits, entry: u32) {
        let old = self.home.change(bits.word, |word| bits.set(word, u64::from(entry)));
        let (old, _) = self.places.split_entry(u32::try_from(bits.get(old)).expect("32 bits"));
        let (unit, _) = self.places.split_entry(entry);
        self.tell_of(old);
        if let Some(held) = held.as_mut().filter(|_| sabotage::is(Bug::PageKeptLate)) {
            held.copies.late.insert(page_of(bits.word));
        }
        let is_named = held.as_mut().is_some_and(|held| held.copies.names(old));
        if old != 0 && old != unit && (!is_named || sabotage::is(Bug::NamedUnitFreed)) {
            self.free(old);
        }
    }
}
