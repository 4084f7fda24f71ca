//! What is done before something changes that a snapshot sees: a page of home is kept, a unit is copied.
//!
//! ```text
//!   a page   slot ► its bytes written there ► gate: check, index    then the change, in this record or later
//!   a unit   its writers have left ► fresh unit ► copied ► gate: checks, entry      then the write, as usual
//! ```
//!
//! 1. The copy of a page is entered before the page changes, in the same transaction at the latest. A
//!    snapshot that is made in between needs a copy of its own, so this is checked again under the gate.
//! 2. Zeros of a unit are not copied: a fresh unit is zero.
//! 3. A copy counts only if its unit was held from before it was read until its entry changes. This is
//!    checked under the lock under which units are released: the snapshot may have been deleted meanwhile,
//!    and the unit overwritten in place.
//! 4. The copy of a unit and the write that asked for it share a flush. Only where the checks would not fit a
//!    record is the copy flushed first.

use std::sync::RwLockReadGuard;

use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestCluster, GuestSpan, ImageOffset, LocalFuture, Result,
    is_zero, try_join_all,
};

use super::super::geometry::{Bits, SNAPSHOTS};
use super::super::home_pages::Missing;
use super::super::image::Native;
use super::super::publish::RECORDING_COST;
use super::copies::SlotAt;
use super::{Held, Ordering, Views, page_of};
use crate::engine::Commit as _;
use crate::journal::{SectorChecks, checks_of};
use crate::state::lock;

/// The bytes of a record that a kept page takes, at most.
const KEPT_BYTES: u64 = 20 + 8 * 4 + 2 * 24;
/// The bytes for an entry, for the bit of the unit that it named, and for the mask of a block packed there.
const ENTRY_BYTES: u64 = RECORDING_COST;
/// For at most this many pages it is remembered when they were kept. Beyond that, those for which it is durable are forgotten.
const KEPT_IN_MAX: usize = 256;
/// Units are copied in pieces of this size.
const PAGE: usize = 4096;
/// A run of checks never crosses a multiple of this.
const CHECKS_TOGETHER: BlockSize = BlockSize::from_shift(20);

impl Native {
    /// Whether snapshots allow these pages of home to change. `words` is not called where there are no
    /// snapshots.
    pub(in crate::native) fn may_change(&self, words: &impl Fn() -> Vec<ImageOffset>) -> bool {
        let Some(views) = self.views.as_ref().filter(|views| views.any()) else { return true };
        let held = lock(&views.copies);
        words().into_iter().all(|word| held.is_kept(page_of(word)))
    }

    /// Whether this word of home may change without a record: a recovery that finds the entry elsewhere changes nothing
    /// that a snapshot sees. So the page is durably kept.
    pub(in crate::native) fn may_change_unrecorded(&self, word: ImageOffset) -> bool {
        let Some(views) = self.views.as_ref().filter(|views| views.any()) else { return true };
        let held = lock(&views.copies);
        let page = page_of(word);
        let is_durable = |kept_in: &u64| self.engine.commits.is_durable(*kept_in);
        held.is_kept(page) && held.kept_in.get(&page).is_none_or(is_durable)
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

    /// Keeps these pages for the snapshot that relies on home, unless it has copies of them.
    pub(in crate::native) async fn keep(&self, words: &impl Fn() -> Vec<ImageOffset>) -> Result<()> {
        if self.may_change(words) {
            return Ok(());
        }
        let views = self.views.as_ref().expect("somebody wants pages kept");
        let _one = views.keeping.lock().await;
        let mut pages: Vec<u64> = words().into_iter().map(page_of).collect();
        pages.dedup();
        for page in pages {
            self.keep_page(views, page)
                .await
                .context(|| format!("{}: can't keep a page", self.engine.name))?;
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
            // The page cannot change before it is kept.
            let bytes = self.home.bytes(ImageOffset::new(page)).expect("as just loaded");
            let buffer = Buffer::copy_of(&bytes);
            let checks = checks_of(at, &buffer, BlockSize::PAGE, |_| true);
            let give_back = |_: &Error| lock(&views.copies).copies.give_slot(slot);
            self.metadata.write(at, buffer).await.inspect_err(give_back)?;
            self.engine.commits.note_change();
            let _gate = self.enter_transaction(KEPT_BYTES).await.inspect_err(give_back)?;
            let mut held = lock(&views.copies);
            let is_same = self.home.bytes(ImageOffset::new(page)).is_some_and(|now| now == bytes);
            if held.is_kept(page) || !is_same {
                // The snapshot is gone, and there may be another one.
                held.copies.give_slot(slot);
                continue;
            }
            self.journal().expect("it has begun").add_checks(&checks);
            let id = held.keepers[0];
            held.copies.add(id, page, slot, &bytes);
            let sequence = self.journal().expect("it has begun").open_sequence();
            let commits = &self.engine.commits;
            if held.kept_in.len() >= KEPT_IN_MAX {
                held.kept_in.retain(|_, kept_in| !commits.is_durable(*kept_in));
            }
            held.kept_in.insert(page, sequence);
            return Ok(());
        }
    }

    /// A slot for a copy, in a new map unit if no other has one.
    async fn slot(&self, views: &Views) -> Result<SlotAt> {
        let records = self.engine.commits.records();
        if let Some(slot) = { lock(&views.copies).copies.take_slot(records) } {
            return Ok(slot);
        }
        let unit = self.allocate().await?;
        // A checkpoint writes the index, and that must not fail for lack of space.
        let index = self.places.unit(unit).start().span(PAGE as u64);
        let reserved = match self.metadata.preallocate(index).await {
            Err(error) if error.kind() != ErrorKind::Unsupported => Err(error),
            _ => self.load_entry(SNAPSHOTS - 1).await,
        };
        if let Err(error) = reserved {
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

    /// As above, for a caller that has locked the copies.
    fn is_held_by(&self, views: &Views, held: &Held, number: u64, unit: u32) -> bool {
        let page = page_of(self.places.entry(number).word);
        let is_seen = views.any() && (!held.is_kept(page) || held.copies.names(unit));
        let is_held = unit != 0 && (is_seen || self.is_being_emptied(unit));
        held.released.note(number, unit, is_held);
        is_held
    }

    /// Whether the unit has been held ever since the stamp was read, so that no request may write to it in
    /// place.
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

    /// Gives the disk its own units where it is about to write. Must not be called from inside an epoch.
    pub(in crate::native) async fn unshare(&self, span: GuestSpan) -> Result<()> {
        let Some(views) = self.views.as_ref().filter(|_| self.holds_units()) else { return Ok(()) };
        for number in self.units_of(span) {
            let mut rounds = 0;
            loop {
                let given = self.units().given();
                match self.unshare_unit(views, number).await {
                    // The unit may be written in place: emptying a zone fails no write.
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

    /// Whether there are units that must not be written in place.
    fn holds_units(&self) -> bool {
        self.views.as_ref().is_some_and(Views::any) || self.empties_any()
    }

    /// Enters a fresh unit in the table. While zones are being emptied, the unit may have been taken from one
    /// of them before that began. Writers that find it in the table from now on may write to it.
    pub(in crate::native) fn enter_unit(&self, bits: Bits, unit: u32) {
        let change = || self.home.change(bits.word, |word| bits.set(word, u64::from(unit)));
        let Some(views) = self.views.as_ref().filter(|_| self.compacts()) else {
            change();
            return;
        };
        let mut held = lock(&views.copies);
        change();
        if self.is_being_emptied(unit) {
            self.stamp(views, &mut held);
        }
    }

    /// As above, where the entry names another unit, which becomes free if no snapshot sees it. The caller holds
    /// the gate, and the page is kept.
    pub(in crate::native) fn enter_instead(&self, bits: Bits, unit: u32) {
        let mut held = self.views.as_ref().map(|views| lock(&views.copies));
        self.put_entry_of(held.as_deref_mut(), bits, unit);
        if let (Some(views), Some(held)) = (&self.views, held.as_deref_mut())
            && self.compacts()
            && self.is_being_emptied(unit)
        {
            self.stamp(views, held);
        }
    }

    /// Lets more units become held. Writers that looked before may still write to them, so a copy of such a
    /// unit waits for these writers.
    pub(in crate::native) fn say_held(&self, say: impl FnOnce()) {
        let Some(views) = &self.views else { return };
        let mut held = lock(&views.copies);
        say();
        self.stamp(views, &mut held);
    }

    /// Moves the unit of the disk to another place, if it lies in a zone that is being emptied.
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
            if stamp > 0 {
                // A write that looked before the snapshot was made may still be on its way to the old unit.
                self.engine.epochs.until_passed(stamp - 1).await;
            }
            let held = self.engine.claims.claim(GuestCluster::new(number), u32::MAX).await;
            let result = match views.stamp.load(Ordering::Acquire) == stamp {
                true => self.copy_unit(views, number, stamp).await,
                false => Ok(()), // a snapshot was made in between
            };
            self.release_claim(held);
            result?;
        }
        Ok(())
    }

    /// Gives the disk a copy of a unit that is held. The caller has claimed it, and all writers that looked
    /// before the stamp have left.
    async fn copy_unit(&self, views: &Views, number: u64, stamp: u64) -> Result<()> {
        if !self.find(|| self.is_held(number)).await? {
            return Ok(());
        }
        let (old, form) = self.find(|| self.entry_and_form(number)).await?;
        // Before a unit is taken: otherwise the two could keep taking the last space from each other.
        self.keep(&|| vec![self.places.entry(number).word]).await?;
        let fresh = self.allocate().await?;
        let is_held = self.is_held_since(views, &lock(&views.copies), number, stamp);
        let result = match is_held {
            true => self.copy_into(views, number, (old, form), fresh, stamp).await,
            false => Ok(false), // only units of the zone being emptied were left
        };
        self.engine.commits.note_change();
        if !matches!(result, Ok(true)) {
            self.give_up(fresh);
        }
        result.map(|_| ()).context(|| format!("{}: can't copy a unit", self.engine.name))
    }

    /// Returns whether the disk has got the copy. It has not when the unit was released meanwhile, because
    /// then it may have been overwritten in place.
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
        if !self.is_held_since(views, &held, number, stamp) {
            return Ok(false);
        }
        self.journal().expect("it has begun").add_checks(&checks);
        self.put_entry_of(Some(&mut held), bits, fresh);
        drop((held, gate));
        Ok(true)
    }

    /// Copies everything that is not zero, and returns the checks of the copy.
    async fn copy_bytes(
        &self,
        number: u64,
        (old, form): (u32, u32),
        fresh: u32,
    ) -> Result<Vec<SectorChecks>> {
        let from = self.inside(self.places.unit(old));
        let len = usize::try_from(from.len()).expect("a unit");
        let bytes = self.plain()?.read(from.start(), Buffer::for_overwrite(len)).await?;
        let mut bytes = bytes.to_vec();
        if let Some(block) = form.checked_sub(1) {
            // The packed form would be meaningless in another place.
            let at = from.start() + u64::from(block) * PAGE as u64;
            let within = block as usize * PAGE..(block as usize + 1) * PAGE;
            let plain = self.unpack(number, at).await?;
            bytes[within].copy_from_slice(&plain);
        }
        self.write_unit(&bytes, fresh).await
    }

    /// Writes everything that is not zero to a fresh unit, and returns the checks.
    pub(in crate::native) async fn write_unit(&self, bytes: &[u8], fresh: u32) -> Result<Vec<SectorChecks>> {
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
            // Where it is encrypted, its new place counts.
            let data = self.stored(to + start as u64, Buffer::copy_of(&bytes[start..end])).await?;
            checks.extend(checks_of(to + start as u64, &data, together, |_| true));
            writes.push(self.data.write(to + start as u64, data));
        }
        try_join_all(writes).await?;
        Ok(checks)
    }

    /// Changes an entry of the table. The unit that it named becomes free if no snapshot sees it. The caller
    /// holds the gate, and the page is kept.
    pub(in crate::native) fn put_entry(&self, bits: Bits, entry: u32) {
        let mut held = self.views.as_ref().map(|views| lock(&views.copies));
        self.put_entry_of(held.as_deref_mut(), bits, entry);
    }

    fn put_entry_of(&self, held: Option<&mut Held>, bits: Bits, entry: u32) {
        let old = self.home.get(bits).expect("pages are loaded before they are changed");
        let (old, _) = self.places.split_entry(u32::try_from(old).expect("32 bits"));
        let (unit, _) = self.places.split_entry(entry);
        let is_stored = old != self.places.moved_number();
        if is_stored {
            self.mark_recorded(old);
        }
        self.home.change(bits.word, |word| bits.set(word, u64::from(entry)));
        if !is_stored {
            return; // it had no unit here
        }
        let is_named = held.is_some_and(|held| held.copies.names(old));
        if old != 0 && old != unit && !is_named {
            self.free(old);
        }
    }
}
