//! A fast medium beside an open image: which units it has, how they get there, and how they go back.
//!
//! ```text
//!   read      unit copied? ──yes──► fast medium ──error──► as below
//!                  │no
//!                  └──────────────► as without a tier
//!   write     mark? taken away      bit? cleared ► commit      then as without a tier, all inside the tier's epoch
//!   promote   earlier clears durable ► marks ► earlier requests have left ► read ► slots, entries ── flush fast ──►
//!             commit ► gate: marks still there? ► bits
//! ```
//!
//! A copy is of what the disk reads as, so only what changes that concerns it: writes, zeros and discards. What moves
//! bytes of the image leaves copies as they are. `docs/design/0021-tiers.md` says why each step is needed.
//!
//! 1. A bit that may be durable leads to a copy that is durable, of bytes that are durable in the image.
//! 2. No byte of a unit changes in the image while its bit may be set on the medium. A clear that is not durable yet is
//!    known (`clearing`), and every writer of the unit waits for a commit that covers it.
//! 3. A writer takes the mark of a unit away, and a promotion that has lost its mark sets no bit. A writer that looked
//!    before the mark was made is waited for.
//! 4. Nothing is promoted whose clear is not durable.
//! 5. Slots are free when the clear is durable, and no reader is left that may have looked them up.
//! 6. A bit that leads to nothing is one that is set (`lost`), for the medium that has the copy may come back.
//! 7. The bits in memory and on the medium count only while `counts`; before the first promotion of such an opening they
//!    are all cleared, durably.
//!
//! 8. A unit that only the fast medium has (`tier_move.rs`) is copied back before its bit is cleared, or what a request has for all
//!    of it takes its place (`tier_over.rs`).
//!
//! Left out: a record that carries a small write together with the cleared bit, which would save its flush.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use vellum_core::{
    BlockSize, Buffer, Context, Error, ErrorKind, GuestOffset, GuestSpan, ImageOffset, LocalFuture, Result,
    try_join_all,
};

use super::geometry::Bits;
use super::heat::Heat;
use super::image::{Native, Origin};
use super::publish::WORD_COST;
use super::tier_over::New;
use super::tier_state::{Copied, Ended, Leaving, Tally, Tier};
use crate::engine::Commit as _;
use crate::epochs::Inside;
use crate::fast::{
    Demoted, Moved, Part, Promoted, Promotion, Reason, SLOT_BYTES, STRIP_PARTS, TierFacts, Tiers,
};
use crate::state::lock;

/// Units that are promoted together, at most.
const UNITS_AT_ONCE: usize = 64;
/// And their bytes.
const BYTES_AT_ONCE: u64 = 16 << 20;
/// Words that change in one step of a transaction.
pub(super) const WORDS_AT_ONCE: usize = 16;

/// What a promotion does with the units of one round.
struct Round {
    sequence: u64,
    reason: Reason,
    copies: Vec<(u64, Arc<[u32]>)>,
}

impl Native {
    /// Waits until no promotion is under way. The image is closed, so none begins. If all moved units have come back, it does
    /// not need its medium any more.
    pub(super) async fn end_promoting(&self) -> Result<()> {
        let Some(tier) = self.tier.get().filter(|_| !self.engine.geometry.read_only) else { return Ok(()) };
        drop(tier.begun.lock().await);
        self.end_moving(tier).await
    }

    /// Lets another opening have the row. No request is left.
    pub(super) fn let_go_of_fast(&self) {
        if let Some(tier) = self.tier.get() {
            tier.row.release();
        }
    }

    /// Whether an opening that changes the image takes the session with its fast medium along.
    pub(super) fn keeps_fast(&self) -> bool {
        self.tier.get().is_some_and(|tier| tier.counts.load(SeqCst))
    }

    pub(super) fn units_of_span(&self, span: GuestSpan) -> Range<u64> {
        let unit = self.unit().expect("only a table has a tier");
        match span.is_empty() {
            true => 0..0,
            false => unit.cluster_of(span.start()).index()..unit.count_for(span.end().bytes()),
        }
    }

    /// Called before anything changes what the disk reads as there. The change is made while the guard exists.
    pub(super) async fn before_change<'a>(
        &self,
        tier: &'a Tier,
        span: GuestSpan,
        new: New<'_>,
    ) -> Result<Inside<'a>> {
        let inside = tier.epochs.enter();
        tier.note_change(self.units_of_span(span));
        if tier.listed.load(SeqCst) > 0 && !span.is_empty() {
            let ended = self.end_copies(tier, self.units_of_span(span), (span, new)).await?;
            ended.why.map_or(Ok(()), Err)?;
        }
        Ok(inside)
    }

    /// From when this returns, neither a mark nor a bit of these units is left, in memory or on the medium. Those that only the
    /// fast medium has and that it does not give are reported, and stay as they were; they do not keep the others there. In those of
    /// which the request has everything, what it has takes the place of what is there alone.
    pub(super) async fn end_copies(
        &self,
        tier: &Tier,
        range: Range<u64>,
        (span, new): (GuestSpan, New<'_>),
    ) -> Result<Ended> {
        let (copied, lost, missing) = tier.with(|state| {
            for unit in Tier::within(&range, state.marks.iter(), |unit| state.marks.contains(unit)) {
                state.marks.remove(&unit);
            }
            let lost = Tier::within(&range, state.lost.iter(), |unit| state.lost.contains(unit));
            let missing = Tier::within(&range, state.missing.iter(), |unit| state.missing.contains(unit));
            (Tier::within(&range, state.copied.keys(), |unit| state.copied.contains_key(unit)), lost, missing)
        });
        self.clear_bits(tier, &copied).await?;
        // Those that were not cleared: the image has nothing of them.
        let mut ended = Ended::default();
        for unit in copied.iter().chain(&missing) {
            let source = new.source(span, self.span_of_unit(*unit));
            if let Some(error) = self.bring_back(tier, *unit, source).await? {
                ended.left.push(*unit);
                ended.why.get_or_insert(error);
            }
        }
        self.clear_bits(tier, &lost).await?;
        self.end_clearing(tier, |unit| range.contains(&unit)).await?;
        ended.units = (copied.len() + missing.len() - ended.left.len()) as u64;
        tier.tally.demoted.fetch_add(ended.units, SeqCst);
        Ok(ended)
    }

    /// Makes the clears of these units durable, if they are not.
    pub(super) async fn end_clearing(&self, tier: &Tier, which: impl Fn(u64) -> bool) -> Result<()> {
        let clearing: Vec<u64> =
            tier.with(|state| state.clearing.iter().copied().filter(|unit| which(*unit)).collect());
        if clearing.is_empty() {
            return Ok(());
        }
        self.commit().await?; // commit point: no crash finds these bits
        tier.with(|state| {
            for unit in &clearing {
                state.clearing.remove(unit);
            }
            for leaving in state.leaving.iter_mut().filter(|leaving| clearing.contains(&leaving.unit)) {
                leaving.is_durable = true;
            }
        });
        Ok(())
    }

    /// Clears the bits of these units, in the open transaction.
    async fn clear_bits(&self, tier: &Tier, units: &[u64]) -> Result<()> {
        if units.is_empty() {
            return Ok(());
        }
        self.begin_journal().await?;
        for units in units.chunks(WORDS_AT_ONCE) {
            let bits: Vec<Bits> = units.iter().filter_map(|unit| self.places.fast_bit(*unit)).collect();
            for bit in &bits {
                self.find(|| self.home.get(*bit)).await?;
            }
            let gate = self.enter_transaction(WORD_COST * bits.len() as u64).await?;
            tier.with(|state| {
                for unit in units {
                    let Some(bit) = self.places.fast_bit(*unit) else { continue };
                    if state.copied.get(unit).is_some_and(|copied| copied.is_moved) {
                        continue; // it is copied back first
                    }
                    self.home.change(bit.word, |word| bit.set(word, 0));
                    state.clearing.insert(*unit);
                    state.lost.remove(unit);
                    if let Some(Copied { slots, .. }) = state.copied.remove(unit) {
                        let stamp = tier.epochs.now();
                        state.leaving.push(Leaving { unit: *unit, slots, stamp, is_durable: false });
                    }
                }
            });
            drop(gate);
        }
        self.engine.commits.note_change();
        Ok(())
    }

    /// Reads a run of the disk, from the fast medium where it has a copy.
    pub(super) async fn read_tiered(
        &self,
        tier: &Tier,
        span: GuestSpan,
        mut buffer: Buffer,
    ) -> Result<Buffer> {
        tier.note_read(self.unit().expect("only a table has a tier"), span);
        if tier.listed.load(SeqCst) == 0 || span.is_empty() {
            Tally::note(&tier.tally.slow, span.len());
            return self.read_span(span, buffer).await;
        }
        // Slots that are looked up here are given to no other unit until this request has left.
        let _inside = tier.epochs.enter();
        let pieces = self.pieces_of(tier, span);
        if let [(_, slots)] = &pieces[..] {
            return self.read_piece(tier, span, slots.clone(), buffer).await;
        }
        let reads = pieces.into_iter().map(|(piece, slots)| {
            let part = buffer.split_to(usize::try_from(piece.len()).expect("within the buffer"));
            Box::pin(self.read_piece(tier, piece, slots, part)) as LocalFuture<'_, Result<Buffer>>
        });
        let reads: Vec<_> = reads.collect();
        let mut filled = Buffer::empty();
        for piece in try_join_all(reads).await? {
            filled.append(piece);
        }
        Ok(filled)
    }

    /// The run, cut where it goes from one medium to the other, or from one unit on the fast one to the next.
    fn pieces_of(&self, tier: &Tier, span: GuestSpan) -> Vec<(GuestSpan, Option<Arc<[u32]>>)> {
        let unit = self.unit().expect("only a table has a tier");
        let mut pieces: Vec<(GuestSpan, Option<Arc<[u32]>>)> = Vec::new();
        let state = lock(&tier.state);
        for piece in unit.pieces_of(span) {
            let number = unit.cluster_of(piece.start()).index();
            let slots = state.copied.get(&number).map(|copied| copied.slots.clone());
            match pieces.last_mut() {
                Some((last, None)) if slots.is_none() => {
                    *last = GuestSpan::between(last.start(), piece.end())
                }
                _ => pieces.push((piece, slots)),
            }
        }
        pieces
    }

    async fn read_piece(
        &self,
        tier: &Tier,
        span: GuestSpan,
        slots: Option<Arc<[u32]>>,
        mut buffer: Buffer,
    ) -> Result<Buffer> {
        let Some(slots) = slots else {
            Tally::note(&tier.tally.slow, span.len());
            return self.read_span(span, buffer).await;
        };
        let within = self.unit().expect("only a table has a tier").within(span.start());
        // Lent memory comes back only from a read that succeeds, and here another may have to follow.
        match tier.row.read(&slots, within, Buffer::for_overwrite(buffer.len())).await {
            Ok(own) => {
                Tally::note(&tier.tally.fast, span.len());
                if !buffer.is_lent() {
                    return Ok(own);
                }
                let mut at = 0;
                for piece in own.pieces() {
                    buffer.copy_from(at, piece);
                    at += piece.len();
                }
                Ok(buffer)
            }
            // The image has nothing of it.
            Err(error) if self.is_moved(tier, span.start()) => {
                tier.tally.lost.fetch_add(1, SeqCst);
                Err(error.context(self.out_of_reach_text(span.start())))
            }
            Err(_) => {
                tier.tally.failed.fetch_add(1, SeqCst);
                Tally::note(&tier.tally.slow, span.len());
                self.read_span(span, buffer).await
            }
        }
    }

    async fn promote_units(&self, tier: &Tier, promotion: &Promotion) -> Result<Promoted> {
        if self.engine.geometry.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, format!("{} is open read-only", self.engine.name)));
        }
        tier.row.check()?;
        let mut begun = tier.begun.lock().await;
        self.engine.state.check_open()?;
        self.engine.state.check_stopped()?;
        let mut done = Promoted::default();
        let disk = GuestOffset::ZERO.span(self.engine.geometry.size);
        let unit_bytes = self.unit().map_or(1, BlockSize::bytes);
        let at_once = UNITS_AT_ONCE.min(usize::try_from(BYTES_AT_ONCE / unit_bytes).expect("a few")).max(1);
        for range in &promotion.ranges {
            let mut units = self.units_of_span(range.intersect(disk));
            while !units.is_empty() {
                // The first one that is worth it begins the session.
                let mut round = Vec::new();
                while round.len() < at_once
                    && let Some(unit) = units.next()
                {
                    if self.is_worth_promoting(tier, unit, promotion, &mut done).await? {
                        round.push(unit);
                    }
                }
                if round.is_empty() {
                    continue;
                }
                if !begun.session {
                    self.begin_fast(tier, &mut begun).await?;
                }
                self.promote_round(tier, &round, promotion.reason, &mut done).await?;
                self.engine.state.check_open()?;
            }
        }
        if done.units > 0 {
            self.commit().await?; // commit point: the bits are durable
        }
        Ok(done)
    }

    async fn is_worth_promoting(
        &self,
        tier: &Tier,
        unit: u64,
        promotion: &Promotion,
        done: &mut Promoted,
    ) -> Result<bool> {
        if tier.with(|state| state.copied.contains_key(&unit) || state.missing.contains(&unit)) {
            done.there += 1;
            return Ok(false);
        }
        if self.places.fast_bit(unit).is_none() {
            done.no_bit += 1;
            return Ok(false);
        }
        let parts = {
            let _inside = self.engine.epochs.enter();
            self.parts(self.span_of_unit(unit)).await?
        };
        let is_nothing = |from: Origin| matches!(from, Origin::NoUnit | Origin::Zero);
        if parts.iter().all(|part| is_nothing(part.from)) {
            done.zero += 1;
            return Ok(false);
        }
        let is_of_base = |from: Origin| is_nothing(from) || from == Origin::Below;
        if !promotion.copies_base && parts.iter().all(|part| is_of_base(part.from)) {
            done.in_base += 1;
            return Ok(false);
        }
        Ok(true)
    }

    /// What the disk has of a unit.
    pub(super) fn span_of_unit(&self, unit: u64) -> GuestSpan {
        let size = self.unit().expect("only a table has a tier");
        let start = GuestOffset::new(unit << size.shift());
        start.span(size.bytes().min(self.engine.geometry.size - start.bytes()))
    }

    async fn promote_round(
        &self,
        tier: &Tier,
        units: &[u64],
        reason: Reason,
        done: &mut Promoted,
    ) -> Result<()> {
        self.settle_clears(tier, units).await?;
        tier.free_slots();
        let stamp = tier.with(|state| {
            state.marks.extend(units);
            tier.epochs.now()
        });
        tier.epochs.until_passed(stamp).await;
        // Nobody looks at the units' earlier copies any more: what the medium says of them goes before what is new.
        tier.free_slots();
        let mut round = Round { sequence: tier.row.next_sequence(), reason, copies: Vec::new() };
        let copied = self.copy_round(tier, units, &mut round, done).await;
        let bits = match copied {
            Ok(true) => self.set_bits(tier, &round, done).await,
            Ok(false) => {
                done.written += round.copies.len() as u64;
                Ok(())
            }
            Err(error) => Err(error),
        };
        let unused: Vec<Arc<[u32]>> = tier.with(|state| {
            for unit in units {
                state.marks.remove(unit);
            }
            let is_used = |unit: &u64, slots: &Arc<[u32]>| {
                state.copied.get(unit).is_some_and(|copied| Arc::ptr_eq(&copied.slots, slots))
                    || state.leaving.iter().any(|leaving| Arc::ptr_eq(&leaving.slots, slots))
            };
            let unused = round.copies.iter().filter(|(unit, slots)| !is_used(unit, slots));
            unused.map(|(_, slots)| slots.clone()).collect()
        });
        // No bit ever led to them, so nobody has looked them up.
        unused.iter().for_each(|slots| tier.row.free(slots));
        bits
    }

    /// Makes sure that no bit of these units is set on the medium.
    async fn settle_clears(&self, tier: &Tier, units: &[u64]) -> Result<()> {
        let mut lost = Vec::new();
        for unit in units {
            let bit = self.places.fast_bit(*unit).expect("as was looked at before");
            // A bit that leads to nothing.
            if self.find(|| self.home.get(bit)).await? == 1 {
                lost.push(*unit);
            }
        }
        self.clear_bits(tier, &lost).await?;
        self.end_clearing(tier, |unit| units.contains(&unit)).await
    }

    /// Copies units that are still marked. Whether there was one.
    async fn copy_round(
        &self,
        tier: &Tier,
        units: &[u64],
        round: &mut Round,
        done: &mut Promoted,
    ) -> Result<bool> {
        let unit_bytes = self.unit().map_or(0, BlockSize::bytes);
        let count = u32::try_from(unit_bytes / SLOT_BYTES).expect("at most 32");
        for unit in units {
            if !tier.with(|state| state.marks.contains(unit)) {
                done.written += 1;
                continue;
            }
            match tier.row.take(count) {
                Some(slots) => round.copies.push((*unit, slots.into())),
                None => done.no_room += 1,
            }
        }
        if round.copies.is_empty() {
            return Ok(false);
        }
        tier.row.vacate().await?;
        let mut parts = Vec::new();
        for (unit, slots) in &round.copies {
            if !tier.with(|state| state.marks.contains(unit)) {
                continue;
            }
            let span = self.span_of_unit(*unit);
            let len = usize::try_from(span.len()).expect("a unit");
            let mut bytes = self.read_span(span, Buffer::for_overwrite(len)).await?;
            if span.len() < unit_bytes {
                bytes.append(Buffer::zeroed(usize::try_from(unit_bytes).expect("a unit") - len));
            }
            tier.row.write(slots, bytes).await?;
            let part = |(part, slot): (u16, &u32)| Part {
                unit: *unit,
                part,
                slot: *slot,
                sequence: round.sequence,
                reason: round.reason,
            };
            parts.extend((0..).zip(slots.iter()).map(part));
        }
        if parts.is_empty() {
            return Ok(false);
        }
        tier.row.enter(&parts).await.map(|()| true)
    }

    /// Sets the bits of the units that were not written since they were marked.
    async fn set_bits(&self, tier: &Tier, round: &Round, done: &mut Promoted) -> Result<()> {
        self.commit().await?; // commit point: what was copied is durable in the image
        let sequence = self.places.fast_sequence();
        let bit_of = |unit: u64| self.places.fast_bit(unit).expect("as was looked at before");
        let mut words: Vec<ImageOffset> = round.copies.iter().map(|(unit, _)| bit_of(*unit).word).collect();
        words.push(sequence);
        for word in &words {
            self.find(|| self.home.word(*word)).await?;
        }
        self.reserve(&words).await?;
        for copies in round.copies.chunks(WORDS_AT_ONCE) {
            let gate = self.enter_transaction(WORD_COST * (copies.len() as u64 + 1)).await?;
            let set = tier.with(|state| {
                let mut set = 0;
                for (unit, slots) in copies {
                    if !state.marks.remove(unit) {
                        continue;
                    }
                    let bit = bit_of(*unit);
                    self.home.change(bit.word, |word| bit.set(word, 1));
                    let copied = Copied { slots: slots.clone(), reason: round.reason, is_moved: false };
                    state.copied.insert(*unit, copied);
                    set += 1;
                }
                self.home.change(sequence, |_| round.sequence);
                set
            });
            drop(gate);
            done.units += set;
            done.written += copies.len() as u64 - set;
            tier.tally.promoted[index_of(round.reason)].fetch_add(set, SeqCst);
        }
        self.engine.commits.note_change();
        Ok(())
    }

    fn used_tier(&self) -> Result<&Tier> {
        self.tier.get().ok_or_else(|| {
            let why = format!("{} is open without a fast medium", self.engine.name);
            self.tier_trouble.get().cloned().unwrap_or_else(|| Error::unsupported(why))
        })
    }
}

fn index_of(reason: Reason) -> usize {
    Reason::ALL.iter().position(|one| *one == reason).expect("one of all")
}

impl Tiers for Native {
    fn promote(&self, promotion: Promotion) -> LocalFuture<'_, Result<Promoted>> {
        Box::pin(async move {
            let tier = self.used_tier()?;
            let promoted = self.promote_units(tier, &promotion).await;
            tier.free_slots();
            promoted.context(|| format!("{}: can't promote", self.engine.name))
        })
    }

    fn demote<'a>(&'a self, ranges: &'a [GuestSpan]) -> LocalFuture<'a, Result<Demoted>> {
        Box::pin(async move {
            let tier = self.used_tier()?;
            let disk = GuestOffset::ZERO.span(self.engine.geometry.size);
            let (mut done, mut left) = (Demoted::default(), Vec::new());
            for range in ranges {
                let range = self.engine.check_change(Some(range.intersect(disk)))?;
                // A promotion waits for this as for a writer. Otherwise a unit could be promoted and written while this still
                // waits, which would then take the clear of that write for durable.
                let _inside = tier.epochs.enter();
                let units = self.units_of_span(range);
                let ended = self.end_copies(tier, units.clone(), (range, New::Nothing)).await?;
                done.units += ended.units;
                left.extend(ended.left);
                done.why = done.why.or(ended.why);
            }
            self.end_moving(tier).await?;
            tier.free_slots();
            done.left = self.spans_of_units(left);
            Ok(done)
        })
    }

    fn move_away<'a>(&'a self, ranges: &'a [GuestSpan]) -> LocalFuture<'a, Result<Moved>> {
        Box::pin(async move {
            let tier = self.used_tier()?;
            let moved = self.move_units(tier, ranges).await;
            moved.context(|| format!("{}: can't move units to its fast medium", self.engine.name))
        })
    }

    fn may_move(&self) -> Result<()> {
        self.used_tier()?;
        let may = self.check_no_snapshots();
        may.context(|| format!("{}: can't move units to its fast medium", self.engine.name))
    }

    fn check_not_cut(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            match self.tier.get() {
                Some(tier) if self.has_alone(tier) => tier.row.medium().check_not_cut().await,
                _ => Ok(()),
            }
        })
    }

    fn missing(&self) -> Vec<GuestSpan> {
        self.spans_of_units(self.missing_units())
    }

    fn look_for_lost<'a>(&'a self) -> LocalFuture<'a, Result<(u64, Vec<GuestSpan>)>> {
        Box::pin(self.find_lost())
    }

    fn facts(&self) -> TierFacts {
        let unit_bytes = self.unit().map_or(0, BlockSize::bytes);
        let Some(tier) = self.tier.get() else {
            return TierFacts {
                trouble: self.tier_trouble.get().cloned(),
                unit_bytes,
                missing: self.missing_units().len() as u64,
                ..TierFacts::default()
            };
        };
        // What was taken back is free, or is when the disk is opened to be written.
        let void = match tier.row.is_needed() {
            true => 0,
            false => lock(&tier.others).len() as u64 * SLOT_BYTES,
        };
        let mut facts = TierFacts {
            trouble: tier.row.medium().trouble(),
            unit_bytes,
            used: tier.row.used().saturating_sub(void),
            budget: tier.row.budget().min(tier.row.medium().room_bytes()),
            missing: self.missing_units().len() as u64,
            ..TierFacts::default()
        };
        facts.disk_units = self.places.shape().units();
        for (unit, copied) in &lock(&tier.state).copied {
            facts.units += 1;
            facts.moved += u64::from(copied.is_moved);
            facts.by_reason[index_of(copied.reason)] += 1;
            let part = |unit: u64| {
                let part = u128::from(unit) * STRIP_PARTS as u128 / u128::from(facts.disk_units.max(1));
                usize::try_from(part).unwrap_or(STRIP_PARTS).min(STRIP_PARTS)
            };
            let (from, upto) = (part(*unit), part(*unit + 1));
            facts.strip[from..upto.max(from + 1).min(STRIP_PARTS)].iter_mut().for_each(|units| *units += 1);
        }
        let get = |number: &AtomicU64| number.load(SeqCst);
        if facts.trouble.is_none() && get(&tier.tally.lost) > 0 {
            facts.trouble = Some(Error::new(
                ErrorKind::Io,
                format!("{}: units that are there alone could not be read", tier.row.medium().name()),
            ));
        }
        let Tally { fast, slow, failed, lost, promoted, demoted } = &tier.tally;
        (facts.fast_reads, facts.slow_reads) = (fast.each_ref().map(get), slow.each_ref().map(get));
        facts.promoted_by = promoted.each_ref().map(get);
        facts.promoted = facts.promoted_by.iter().sum();
        (facts.failed_reads, facts.lost_reads, facts.demoted) = (get(failed), get(lost), get(demoted));
        facts
    }

    fn lost_reads(&self) -> u64 {
        self.tier.get().map_or(0, |tier| tier.tally.lost.load(SeqCst))
    }

    fn unit_bytes(&self) -> u64 {
        self.unit().map_or(0, BlockSize::bytes)
    }

    fn count_heat(&self) -> bool {
        let Some(tier) = self.tier.get() else { return false };
        let mut is_new = false;
        tier.heat.get_or_init(|| {
            is_new = true;
            Heat::new(self.places.shape().units(), self.unit_bytes())
        });
        is_new
    }

    fn take_up_heat(&self, bytes: &[u8]) -> bool {
        self.tier.get().and_then(|tier| tier.heat.get()).is_some_and(|heat| heat.take_up(bytes))
    }

    fn heat(&self) -> Option<Vec<u8>> {
        Some(self.tier.get()?.heat.get()?.to_bytes())
    }

    fn age_heat(&self) {
        if let Some(tier) = self.tier.get() {
            tier.age_heat();
        }
    }

    fn hot(&self, most: usize) -> Vec<GuestSpan> {
        let hot = self.tier.get().map(|tier| tier.hot(most)).unwrap_or_default();
        hot.into_iter().map(|unit| self.span_of_unit(unit)).collect()
    }

    fn cold(&self, most: usize) -> Vec<GuestSpan> {
        let cold = self.tier.get().map(|tier| tier.cold(most)).unwrap_or_default();
        cold.into_iter().map(|unit| self.span_of_unit(unit)).collect()
    }
}
