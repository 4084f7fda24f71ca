//! Units that only the fast medium has: their space in the image is free.
//!
//! ```text
//!   move   copied, no snapshots ► first of an opening: a new session, row, both superblocks: from here on the medium must be there
//!            ► claim ► image and copy read: the same? ► gate: still copied? entry = moved, stored unit freed    a commit follows
//!   read   entry moved ► slots of the copy ──error──► an error
//!   back   claim ► slots read ► fresh unit, checks ► gate: entry, bit cleared ► commit ► the slots are free     (`tier_over.rs`: or zeros)
//! ```
//!
//! What says so is the unit's entry in the table: a number that no stored unit has. So a path that does not know it finds
//! no bytes, and not wrong ones. `docs/design/0021-tiers.md` argues the order.
//!
//! 1. A moved unit is a copied one: its bit is set, its copy and its entries are durable. What copies are kept by, keeps
//!    it.
//! 2. The entry changes only if the unit is still copied, with the slots that were compared: a writer takes a unit out of the
//!    copied ones before it changes a byte. So what was compared is what the disk reads as.
//! 3. A writer copies the unit back before it goes on. For it nothing is moved then, and nothing becomes so while it is
//!    inside: a promotion waits for it, and a move needs a promotion.
//! 4. Before the first moved entry can be durable, both superblocks say that the medium must be there, and the row of the
//!    medium says that it is needed. They say so until no moved entry can be on the medium.
//! 5. While anything is moved there is no snapshot, and none is made. Nothing is done to the image without its medium.
//!    While the row says so, no image takes it for which it does not count: it may be that of a copy.
//! 6. An opening finds all moved units copied, or it is refused; to read the rest, it may be opened read-only.
//! 7. A unit of which a part is read from the base is not moved, so what copies the base, and what detaches it, meets none.
//!
//! Left out: snapshots of a disk with moved units.

use std::sync::Arc;

use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestCluster, GuestOffset, GuestSpan, Result,
};

use super::image::{Native, Origin};
use super::publish::WORD_COST;
use super::read::Part;
use super::tier_over::{New, Source};
use super::tier_state::{Copied, State, Tier};
use crate::engine::Commit as _;
use crate::fast::{FastMedium, Moved, OpenRow};
use crate::state::{UnderWay, lock};

/// The entry, the unit's zone, and a bit; of a block packed over the base also its mask and that bit.
const WORDS: u64 = 5;
/// Entries of one page of the table.
const ENTRIES: u64 = 1024;

/// The slots of a unit that only the fast medium has.
fn slots_if_moved(state: &State, unit: u64) -> Option<Arc<[u32]>> {
    state.copied.get(&unit).filter(|copied| copied.is_moved).map(|copied| copied.slots.clone())
}

/// Whether only the fast medium has the unit, or should have it.
fn is_alone(state: &State, unit: u64) -> bool {
    state.missing.contains(&unit) || slots_if_moved(state, unit).is_some()
}

impl Native {
    /// The units whose entries say that only the fast medium has them.
    pub(super) async fn moved_units(&self) -> Result<Vec<u64>> {
        let mut moved = Vec::new();
        if !self.superblocks.lock().await.superblock.has_moved {
            return Ok(moved);
        }
        let units = self.places.shape().units();
        for first in (0..units).step_by(usize::try_from(ENTRIES).expect("a page")) {
            self.find(|| self.entry(first)).await?;
            for unit in first..units.min(first + ENTRIES) {
                if self.find(|| self.entry(unit)).await? == self.places.moved_number() {
                    moved.push(unit);
                }
            }
        }
        Ok(moved)
    }

    pub(super) fn medium_is_wrong(&self, medium: &FastMedium, units: usize) -> Error {
        Error::new(
            ErrorKind::Changed,
            format!(
                "{units} units are on the fast medium alone, and what {} has does not belong to this state of the image: one of \
                 the two was put back from a copy, or is a copy of an image that was used since",
                medium.name()
            ),
        )
    }

    /// A row that has units of the disk alone is that of the image whose units they are: a copy of the image from another
    /// time does not take it over.
    pub(super) fn may_take_row(&self, medium: &FastMedium, row: &OpenRow, counts: bool) -> Result<()> {
        if counts || !row.is_needed() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Refused,
            format!(
                "{} alone has units of another copy of this image, or of another time of it: bring them back there (`vellum tier \
                 move --back`), or give them up (`vellum tier forget --force`)",
                medium.name()
            ),
        ))
    }

    /// Notes, in an opening, which of the copied units only the fast medium has. Returns those that it should have and has not.
    pub(super) fn note_moved(
        &self,
        medium: &FastMedium,
        state: &mut State,
        moved: &[u64],
        salvages: bool,
    ) -> Result<Vec<u64>> {
        let mut missing = Vec::new();
        for unit in moved {
            match state.copied.get_mut(unit) {
                Some(copied) => copied.is_moved = true,
                None => missing.push(*unit),
            }
        }
        if missing.is_empty() || self.engine.geometry.read_only || salvages {
            return Ok(missing);
        }
        let why = match medium.cut_off() {
            Some(cut) => format!(", because {cut}"),
            None => ": its table is damaged, or one of the two was put back from a copy".to_owned(),
        };
        Err(Error::new(
            ErrorKind::Changed,
            format!(
                "{} of {} units that are on the fast medium alone are not on {}{why}. What is left can be copied (`vellum convert \
                 --salvage`), served (`vellum serve --salvage`), or brought back (`vellum tier move --back`)",
                missing.len(),
                moved.len(),
                medium.name()
            ),
        ))
    }

    /// The units that only the fast medium has, and that it has not.
    pub(super) fn missing_units(&self) -> Vec<u64> {
        match self.tier.get() {
            Some(tier) => lock(&tier.state).missing.iter().copied().collect(),
            None => self.missing.get().cloned().unwrap_or_default(),
        }
    }

    /// Reads the units that only the fast medium has, one after the other. How many there are, and what is lost of them.
    pub(super) async fn find_lost(&self) -> Result<(u64, Vec<GuestSpan>)> {
        let mut lost = self.missing_units();
        let mut count = lost.len() as u64;
        if let Some(tier) = self.tier.get() {
            let _inside = tier.epochs.enter();
            let len = usize::try_from(self.unit().map_or(0, BlockSize::bytes)).expect("a unit");
            for unit in self.moved_units().await? {
                let Some(slots) = slots_if_moved(&lock(&tier.state), unit) else { continue };
                count += 1;
                if tier.row.read(&slots, 0, Buffer::for_overwrite(len)).await.is_err() {
                    lost.push(unit);
                }
            }
        }
        Ok((count, self.spans_of_units(lost)))
    }

    /// What the disk has of these units, neighbours together.
    pub(super) fn spans_of_units(&self, mut units: Vec<u64>) -> Vec<GuestSpan> {
        units.sort_unstable();
        units.dedup();
        let mut spans: Vec<GuestSpan> = Vec::new();
        for span in units.into_iter().map(|unit| self.span_of_unit(unit)) {
            match spans.last_mut().filter(|last| last.end() == span.start()) {
                Some(last) => *last = GuestSpan::between(last.start(), span.end()),
                None => spans.push(span),
            }
        }
        spans
    }

    /// The error for a part of the disk that is on a fast medium alone, and was not read from there.
    fn out_of_reach(&self, at: GuestOffset) -> Error {
        let error = Error::new(ErrorKind::Io, self.out_of_reach_text(at));
        let medium = self.tier.get().map(|tier| tier.row.medium());
        match medium.and_then(|medium| Some((medium.name(), medium.cut_off()?))) {
            Some((name, cut)) => Error::new(ErrorKind::Io, format!("{name}: {cut}")).context(error.chain()),
            None => error,
        }
    }

    pub(super) fn out_of_reach_text(&self, at: GuestOffset) -> String {
        format!("{}: the disk at {:#x} is on its fast medium alone", self.engine.name, at.bytes())
    }

    /// Whether only the fast medium has the unit of this byte.
    pub(super) fn is_moved(&self, tier: &Tier, at: GuestOffset) -> bool {
        let unit = self.unit().expect("only a table has a tier").cluster_of(at).index();
        slots_if_moved(&lock(&tier.state), unit).is_some()
    }

    /// Writers copy units back before they look.
    pub(super) fn refuse_moved(&self, span: GuestSpan, parts: &[Part]) -> Result<()> {
        match parts.iter().any(|part| part.from == Origin::Moved) {
            true => Err(self.out_of_reach(span.start())),
            false => Ok(()),
        }
    }

    /// Reads a run whose entries were found to be moved.
    pub(super) async fn read_moved(&self, at: GuestOffset, mut buffer: Buffer) -> Result<Buffer> {
        let size = self.unit().expect("it has entries");
        let tier = self.tier.get().ok_or_else(|| self.out_of_reach(at))?;
        // Slots that are looked up here are given to no other unit until this request has left.
        let _inside = tier.epochs.enter();
        let mut filled = Buffer::empty();
        for piece in size.pieces_of(at.span(buffer.len() as u64)) {
            let part = buffer.split_to(usize::try_from(piece.len()).expect("within the buffer"));
            let unit = size.cluster_of(piece.start()).index();
            let slots = slots_if_moved(&lock(&tier.state), unit);
            let read = match slots {
                Some(slots) => {
                    let read = tier.row.read(&slots, size.within(piece.start()), part).await;
                    tier.tally.note_lost(&read);
                    read
                }
                // It has been copied back since it was looked up, or else it is lost.
                None if self.find(|| self.entry(unit)).await? != self.places.moved_number() => {
                    self.read_span(piece, part).await
                }
                None => Err(self.out_of_reach(piece.start())),
            };
            filled.append(read.context(|| self.out_of_reach_text(piece.start()))?);
        }
        Ok(filled)
    }

    /// Frees the space of units that are copied. A unit that cannot be read stays as it is and is reported; the others are moved.
    pub(super) async fn move_units(&self, tier: &Tier, ranges: &[GuestSpan]) -> Result<Moved> {
        let (mut done, mut left) = (Moved::default(), Vec::new());
        if self.engine.geometry.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open read-only", self.engine.name)));
        }
        tier.row.check()?;
        let mut begun = tier.begun.lock().await;
        self.engine.state.check_open()?;
        self.engine.state.check_stopped()?;
        let disk = GuestOffset::ZERO.span(self.engine.geometry.size);
        let mut has_begun = false;
        for range in ranges {
            for unit in self.units_of_span(range.intersect(disk)) {
                match tier.with(|state| state.copied.get(&unit).map(|copied| copied.is_moved)) {
                    None => done.not_copied += 1,
                    Some(true) => done.there += 1,
                    Some(false) => {
                        if !begun.moving {
                            // Copies of the image that were made in a session of promotions have units of their own.
                            self.begin_fast(tier, &mut begun).await?;
                            begun.moving = true;
                        }
                        if !has_begun {
                            self.begin_moving(tier).await?;
                            has_begun = true;
                        }
                        let moved = self.move_unit(tier, unit, &mut done).await;
                        if moved.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt) {
                            // No promotion is under way. Guests read the image again.
                            let copy = (self.span_of_unit(unit), New::Nothing);
                            drop(self.end_copies(tier, unit..unit + 1, copy).await?);
                        }
                        if let Some(error) = moved? {
                            left.push(unit);
                            done.why.get_or_insert(error);
                        }
                        self.engine.state.check_open()?;
                    }
                }
            }
        }
        if done.units > 0 {
            self.commit().await?; // commit point: the entries are durable, and the units behind them are free
        }
        done.left = self.spans_of_units(left);
        Ok(done)
    }

    /// Nothing is moved while there are snapshots.
    pub(super) fn check_no_snapshots(&self) -> Result<()> {
        match self.snapshots()?.is_empty() && !self.views()?.any() {
            true => Ok(()),
            false => Err(Error::unsupported(
                "the disk has snapshots, which do not see the fast medium: delete them first",
            )),
        }
    }

    /// Makes sure, durably, that the image is not used without its medium any more.
    async fn begin_moving(&self, tier: &Tier) -> Result<()> {
        let views = self.views()?;
        // No snapshot is made meanwhile.
        let _one = views.changing.lock().await;
        self.check_no_snapshots()?;
        tier.row.say_needed(true).await?;
        self.say_moved(true).await
    }

    /// Both copies of the superblock say whether the medium is needed.
    async fn say_moved(&self, has_moved: bool) -> Result<()> {
        let context =
            || format!("{}: can't record that units are on its fast medium alone", self.engine.name);
        let mut superblocks = self.superblocks.lock().await;
        if superblocks.superblock.has_moved == has_moved {
            return Ok(());
        }
        for _ in 0..2 {
            let under_way = UnderWay::begin(&self.engine.state, "a write of the superblock");
            let before = superblocks.clone();
            superblocks.superblock.has_moved = has_moved;
            let written = superblocks.write(&*self.metadata).await;
            if written.is_err() {
                *superblocks = before; // the next write goes over the copy that may be torn
                superblocks.superblock.has_moved = !has_moved; // and again both are written
            }
            under_way.end();
            written.context(context)?;
            self.flush_storage().await?; // commit point, the second time when it begins, the first when it ends
        }
        Ok(())
    }

    /// The error of a unit that cannot be read is no error of this: nothing has changed then, and others can be moved.
    async fn move_unit(&self, tier: &Tier, unit: u64, done: &mut Moved) -> Result<Option<Error>> {
        self.begin_journal().await?;
        // What copies the stored unit elsewhere changes its entry as well.
        let held = self.engine.claims.claim(GuestCluster::new(unit), u32::MAX).await;
        let moved = self.move_claimed(tier, unit, done).await;
        self.release_claim(held);
        moved
    }

    async fn move_claimed(&self, tier: &Tier, unit: u64, done: &mut Moved) -> Result<Option<Error>> {
        let entry = self.places.entry(unit);
        let span = self.span_of_unit(unit);
        let stored = self.find(|| self.entry(unit)).await?;
        if stored == 0 || !self.find(|| self.subs_to_publish(span)).await?.is_empty() {
            done.not_stored += 1;
            return Ok(None);
        }
        let copied = |state: &State| {
            state.copied.get(&unit).filter(|copied| !copied.is_moved).map(|copied| copied.slots.clone())
        };
        let Some(slots) = copied(&lock(&tier.state)) else {
            done.written += 1;
            return Ok(None);
        };
        let both = {
            let _inside = tier.epochs.enter();
            let len = usize::try_from(span.len()).expect("a unit");
            self.both_of(tier, &slots, span, len).await
        };
        let (copy, bytes) = match both {
            Ok(both) => both,
            Err(error) => {
                let at = span.start().bytes();
                return Ok(Some(
                    error.context(format!("{}: the disk at {at:#x} cannot be moved", self.engine.name)),
                ));
            }
        };
        let is_same = copy.to_vec() == bytes.to_vec();
        let gate = self.enter_changing(WORDS * WORD_COST, || vec![entry.word]).await?;
        let is_moved = tier.with(|state| {
            let Some(now) = copied(state).filter(|now| Arc::ptr_eq(now, &slots)) else { return Ok(false) };
            if !is_same {
                return Err(Error::corrupt(format!(
                    "the copy of the disk at {:#x} on the fast medium is not what the image has: it is taken away, and what comes \
                     behind it is not moved. Look whether the medium fails, and move again",
                    span.start().bytes()
                )));
            }
            self.put_entry(entry, self.places.moved_number());
            let reason = state.copied[&unit].reason;
            state.copied.insert(unit, Copied { slots: now, reason, is_moved: true });
            Ok(true)
        });
        drop(gate);
        self.engine.commits.note_change();
        match is_moved? {
            true => done.units += 1,
            false => done.written += 1,
        }
        Ok(None)
    }

    /// What the fast medium has of a unit, and what the image has.
    async fn both_of(
        &self,
        tier: &Tier,
        slots: &[u32],
        span: GuestSpan,
        len: usize,
    ) -> Result<(Buffer, Buffer)> {
        let copy = tier.row.read(slots, 0, Buffer::for_overwrite(len)).await?;
        Ok((copy, self.read_span(span, Buffer::for_overwrite(len)).await?))
    }

    /// Copies a unit back, if only the fast medium has it, or puts what a request has in its place, and clears its bit, in the
    /// open transaction. The error of a unit that the medium does not give is no error of this: nothing has changed then, and
    /// others can be copied back.
    pub(super) async fn bring_back(
        &self,
        tier: &Tier,
        unit: u64,
        source: Source<'_>,
    ) -> Result<Option<Error>> {
        let context = || format!("{}: can't copy a unit back from its fast medium", self.engine.name);
        let mut rounds = 0;
        loop {
            if !is_alone(&lock(&tier.state), unit) {
                return Ok(None);
            }
            let given = self.units().given();
            self.begin_journal().await?;
            let held = self.engine.claims.claim(GuestCluster::new(unit), u32::MAX).await;
            let brought = self.bring_claimed(tier, unit, source).await;
            self.release_claim(held);
            match brought {
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    if !self.space_again(&mut rounds, given, 1).await? {
                        return Err(error);
                    }
                }
                brought => {
                    return brought
                        .context(context)
                        .map(|unread| unread.map(|error| error.context(context())));
                }
            }
        }
    }

    async fn bring_claimed(&self, tier: &Tier, unit: u64, source: Source<'_>) -> Result<Option<Error>> {
        if !is_alone(&lock(&tier.state), unit) {
            return Ok(None); // another request was here
        }
        let bytes = match source {
            Source::Zeros => return self.enter_zeros(tier, unit).await.map(|()| None),
            Source::Data { data, at, len } => {
                let whole = usize::try_from(self.unit().map_or(0, BlockSize::bytes)).expect("a unit");
                let mut bytes = vec![0; whole.max(len)];
                data.copy_to(at, &mut bytes[..len]);
                bytes
            }
            Source::Fast => match self.read_alone(tier, unit).await {
                Ok(bytes) => bytes,
                Err(error) => return Ok(Some(error)),
            },
        };
        let (entry, bit) = (self.places.entry(unit), self.places.fast_bit(unit).expect("it is copied"));
        self.find(|| self.home.get(bit)).await?;
        self.reserve(&[entry.word, bit.word]).await?;
        let fresh = self.allocate().await?;
        let entered = self.enter_back(tier, unit, bytes, fresh).await;
        self.engine.commits.note_change();
        if entered.is_err() {
            self.give_up(fresh);
        }
        entered.map(|()| None)
    }

    /// All of a unit that only the fast medium has.
    async fn read_alone(&self, tier: &Tier, unit: u64) -> Result<Vec<u8>> {
        let at = self.span_of_unit(unit).start();
        let slots = slots_if_moved(&lock(&tier.state), unit).ok_or_else(|| self.out_of_reach(at))?;
        let len = usize::try_from(self.unit().map_or(0, BlockSize::bytes)).expect("a unit");
        let read = tier.row.read(&slots, 0, Buffer::for_overwrite(len)).await;
        tier.tally.note_lost(&read);
        read.map(|read| read.to_vec()).context(|| self.out_of_reach_text(at))
    }

    async fn enter_back(&self, tier: &Tier, unit: u64, bytes: Vec<u8>, fresh: u32) -> Result<()> {
        let (entry, bit) = (self.places.entry(unit), self.places.fast_bit(unit).expect("it is copied"));
        let mut checks = self.write_unit(&bytes, fresh).await?;
        let bytes_of_checks: u64 = checks.iter().map(|(_, crcs)| 20 + crcs.len() as u64 * 4).sum();
        let mut cost = WORDS * WORD_COST + bytes_of_checks;
        if cost > self.record_max() / 8 {
            self.flush_storage().await?;
            (checks, cost) = (Vec::new(), WORDS * WORD_COST);
        }
        let gate = self.enter_changing(cost, || vec![entry.word]).await?;
        self.journal().expect("it has begun").add_checks(&checks);
        tier.with(|state| {
            self.enter_unit(entry, fresh);
            self.leave_fast(tier, state, unit, bit);
        });
        drop(gate);
        Ok(())
    }

    /// Whether there are units that only the fast medium has, or should have.
    pub(super) fn has_alone(&self, tier: &Tier) -> bool {
        let is_moved = |state: &mut State| state.copied.values().any(|copied| copied.is_moved);
        tier.with(is_moved) || !self.missing_units().is_empty()
    }

    /// The image does not need its medium any more, if nothing is moved. What was copied back is durable.
    pub(super) async fn end_moving(&self, tier: &Tier) -> Result<()> {
        if !self.superblocks.lock().await.superblock.has_moved && !tier.row.is_needed() {
            return Ok(());
        }
        let _none_begins = tier.begun.lock().await;
        if self.has_alone(tier) {
            return Ok(());
        }
        self.end_clearing(tier, |_| true).await?;
        self.say_moved(false).await?;
        // Also where a crash came between the two. If the medium fails, its row is only needed for longer than it is.
        if let Err(error) = tier.row.say_needed(false).await {
            debug_assert!(tier.row.medium().trouble().is_some(), "{error:?}");
        }
        Ok(())
    }
}
