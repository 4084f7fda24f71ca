//! Writing: what the engine needs of the native format to write a disk. The order of a write is in
//! `engine/write.rs`.
//!
//! ```text
//!   the image has all of it, in plain units?  ──yes──► in place (the first write of an opening marks the image
//!          │no                                         as in use)
//!   claim all cells ► sub-blocks that become data ► pages kept ► a unit for each cell without one
//! ```
//!
//! 1. A fresh unit is zero, durably (`units.rs`), or it is filled from end to end: then all of it has checks, or is
//!    flushed before the record that names it, and its old bytes are never read. Bytes behind the base need no check: if they do not arrive,
//!    the sector is as it was. Bytes over the base get a check in the transaction that records them as the
//!    image's.
//! 2. Nothing is read from the base for whole sub-blocks. For a partly written sub-block the rest of it is
//!    read.
//! 3. A unit that was allocated and not published is freed. One that may have been written to is freed as a
//!    unit of unknown content. A write that finds too few units waits its turn, and keeps the turn until it is
//!    done.
//! 4. A unit that holds its own entry and is filled from end to end gets another place, where there is one. The old
//!    one is freed in the transaction that changes the entry, as in the paper Selfie.
//! 5. A dropped write may land later, when a check says something else about these bytes. So the image stops.

use std::ops::Range;

use async_lock::MutexGuard;
use smallvec::{SmallVec, smallvec};
use vellum_core::{
    BlockSize, Buffer, Context, GuestCluster, GuestOffset, GuestSpan, ImageOffset, Result, SharedStorage,
};

use super::geometry::SUB_BLOCK;
use super::home_pages::Missing;
use super::image::{Native, Origin, Sub};
use super::publish::{Planned, Step};
use super::read::{Part, Parts};
use crate::claims::{Ask, Fresh, Held};
use crate::engine::{self, Pieces, Space, Way, Write as _, Writer, place_fresh};
use crate::state::UnderWay;

/// A write that must change more than data is split into pieces of at most this many bytes.
const BYTES_AT_ONCE: u64 = 8 << 20;
/// A run of checks never crosses a multiple of this. Units begin at multiples of this or of their own size.
const CHECKS_TOGETHER: BlockSize = BlockSize::from_shift(20);

/// Why a write makes another attempt: what it looked up has changed since, or a snapshot sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LookAgain;

/// The result of one attempt to change a part of the disk.
pub(super) type Done = engine::Done<LookAgain>;

/// The bytes of a cell that lie in these sub-blocks. The cell begins at `start`.
pub(super) fn bytes_of(subs: &[u64], start: GuestOffset) -> SmallVec<[Range<u64>; 2]> {
    let mut ranges: SmallVec<[Range<u64>; 2]> = SmallVec::new();
    for sub in subs {
        let from = sub * SUB_BLOCK.bytes() - start.bytes();
        match ranges.last_mut() {
            Some(last) if last.end == from => last.end += SUB_BLOCK.bytes(),
            _ => ranges.push(from..from + SUB_BLOCK.bytes()),
        }
    }
    ranges
}

impl Native {
    pub(super) async fn write_span(&self, span: GuestSpan, data: Buffer) -> Result<()> {
        if let Some(zones) = &self.zones {
            zones.note_written(span.len());
        }
        if let Some(units) = &self.units {
            units.note_written(span.len());
        }
        let is_large = || self.journal().is_some_and(|journal| journal.is_large());
        self.write_in_parts(span, data, self.bytes_at_once(), is_large).await
    }

    /// The bytes that are written in one piece: few enough that a record has room for their checks several
    /// times over.
    pub(super) fn bytes_at_once(&self) -> u64 {
        let most = self.record_max().saturating_mul(16).min(BYTES_AT_ONCE);
        SUB_BLOCK.round_down(most).max(SUB_BLOCK.bytes())
    }

    /// Whether a write of this run fills the cell of this byte from end to end.
    fn fills_cell_of(&self, span: GuestSpan, at: GuestOffset) -> bool {
        let cell = self.cell.start_of(self.cell_of(at)).span(self.cell.bytes());
        span.intersect(cell) == cell
    }

    /// Turns blocks that hold their units' entries into plain blocks. A block that is overwritten as a whole
    /// gets its new bytes at once. Units that are filled from end to end are left alone: they get another place,
    /// if there is one. Returns whether any block was turned into a plain one.
    async fn make_plain_parts(&self, span: GuestSpan, parts: &Parts, data: &Buffer) -> Result<bool> {
        let mut at = span.start();
        let mut any = false;
        for part in parts {
            let is_embedded = matches!(part.from, Origin::Embedded(_));
            if is_embedded && !(self.fills_cell_of(span, at) && self.units().has_one_to_fill()) {
                any = true;
                let new = (part.len == SUB_BLOCK.bytes()).then(|| {
                    let mut bytes = vec![0; 4096];
                    data.copy_to(usize::try_from(at - span.start()).expect("within the buffer"), &mut bytes);
                    Buffer::copy_of(&bytes)
                });
                self.make_plain(self.cell_of(at).index(), new).await?;
            }
            at += part.len;
        }
        Ok(any)
    }

    /// Takes a unit of unknown content for a step that fills its cell, if there is one. All of the step's bytes
    /// are fresh then: the record says whether they have arrived, and what was there before is read by nobody.
    async fn take_to_fill(&self, step: &mut Step<'_>) -> Result<bool> {
        if step.plan.part.len() != self.cell.bytes() || !self.units().has_one_to_fill() {
            return Ok(false);
        }
        // The claim of the whole cell: nobody else allocates for it.
        let Ask::Yours = step.held().fresh() else { return Ok(false) };
        let Some(unit) = self.units().take_to_fill() else {
            step.held().give_up();
            return Ok(false);
        };
        let place = self.places.unit(unit);
        let fresh = Fresh { at: place.start(), zeroed: false };
        step.held().provide(fresh);
        step.place = Some(fresh);
        step.fresh = smallvec![0..self.cell.bytes()];
        self.reach(place).await.map(|()| true)
    }

    /// Releases a claim. A fresh unit that was not published is freed.
    pub(super) fn release_claim(&self, held: Held<'_>) {
        match held.release() {
            Some(fresh) if fresh.zeroed => self.units().take_back(self.number_of(fresh.at)),
            Some(fresh) => self.give_up(self.number_of(fresh.at)),
            None => {}
        }
    }

    /// The number of the unit at this place.
    pub(super) fn number_of(&self, at: ImageOffset) -> u32 {
        let unit = self.unit().expect("only a table has units");
        let index = (at - self.places.data_offset()) >> unit.shift();
        u32::try_from(index + 1).expect("units have 32 bits")
    }

    /// The sub-blocks of a run that the image does not have yet.
    pub(super) fn subs_to_publish(&self, part: GuestSpan) -> Result<Vec<u64>, Missing> {
        let mut subs = Vec::new();
        let mut rest = part.intersect(GuestSpan::between(GuestOffset::ZERO, self.base_end()));
        while !rest.is_empty() {
            let (sub, len) = self.first_state(rest)?;
            let (now, later) = rest.split_at(len);
            if sub != Sub::Image {
                subs.push(SUB_BLOCK.cluster_of(now.start()).index());
            }
            rest = later;
        }
        Ok(subs)
    }

    /// Settles where each cell's bytes go, with a unit for each cell that has none.
    async fn settle_places(&self, steps: &mut [Step<'_>], data: &Buffer) -> Result<Done> {
        let Some(unit) = self.unit() else {
            for step in steps {
                let cell = self.cell.start_of(self.cell_of(step.plan.part.start()));
                step.place = Some(Fresh { at: self.places.linear(cell), zeroed: false });
            }
            return Ok(Done::Yes);
        };
        let settled = |place: ImageOffset| Some(Fresh { at: place, zeroed: false });
        let mut within = 0;
        for step in &mut *steps {
            let (here, part) = (within, step.plan.part);
            within += usize::try_from(part.len()).expect("within the buffer");
            let number = unit.cluster_of(part.start()).index();
            let (entry, form) = self.find(|| self.entry_and_form(number)).await?;
            if form != 0 && self.touches_block(part, form - 1) {
                if self.take_to_fill(step).await? {
                    step.plan.is_fresh = true;
                    continue;
                }
                return Ok(Done::After(LookAgain)); // it was allocated after it was looked up
            }
            if entry != 0 {
                step.place = settled(self.places.unit(entry).start());
                continue;
            }
            step.plan.is_fresh = true;
            if let Some(embedded) = self.embed(step, data, here).await? {
                let place = self.places.unit(embedded.given.unit);
                step.place = settled(place.start());
                step.fresh = SmallVec::new(); // the packed block says itself whether it has arrived
                step.plan.embedded = Some(embedded);
                self.reach(place).await?;
            } else {
                self.take_to_fill(step).await?;
            }
        }
        let allocate = async |_| {
            let number = self.allocate().await?;
            Ok(Some(Fresh { at: self.places.unit(number).start(), zeroed: true }))
        };
        place_fresh(steps, allocate).await.map(|()| Done::Yes)
    }

    /// Whether a part of a cell has bytes in this block of the cell.
    pub(super) fn touches_block(&self, part: GuestSpan, block: u32) -> bool {
        let start = self.cell.start_of(self.cell_of(part.start())) + u64::from(block) * SUB_BLOCK.bytes();
        part.overlaps(start.span(SUB_BLOCK.bytes()))
    }

    /// The runs before and behind the step's bytes that fill up sub-blocks which become data.
    pub(super) fn fill_of(&self, step: &Step<'_>) -> (GuestSpan, GuestSpan) {
        let part = step.plan.part;
        let size = GuestOffset::new(self.engine.geometry.size);
        let first = GuestOffset::new(SUB_BLOCK.round_down(part.start().bytes()));
        let end = GuestOffset::new(SUB_BLOCK.round_up(part.end().bytes())).min(size);
        let becomes_data = |at: GuestOffset| step.plan.subs.contains(&SUB_BLOCK.cluster_of(at).index());
        let nothing = |at: GuestOffset| at.span(0);
        let head = match becomes_data(first) {
            true => GuestSpan::between(first, part.start()),
            false => nothing(first),
        };
        let last = GuestOffset::new(part.end().bytes() - 1);
        let tail = match becomes_data(last) {
            true => GuestSpan::between(part.end(), end.max(part.end())),
            false => nothing(end),
        };
        (head, tail)
    }

    /// The bytes of one sub-block that the guest did not write. The part is claimed.
    pub(super) async fn fill(&self, span: GuestSpan) -> Result<Buffer> {
        self.fill_up(span).await.context(|| format!("{}: can't read the base", self.engine.name))
    }

    async fn fill_up(&self, span: GuestSpan) -> Result<Buffer> {
        let mut buffer = Buffer::for_overwrite(usize::try_from(span.len()).expect("within a sub-block"));
        match self.find(|| self.sub(SUB_BLOCK.cluster_of(span.start()).index())).await? {
            // Nobody makes it zero meanwhile: the part is claimed.
            Sub::Base if self.filled.has(self.places.shape().block.cluster_of(span.start()).index()) => {
                self.plain()?.read(self.places.linear(span.start()), buffer).await
            }
            Sub::Base => self.read_base(self.fills.as_ref(), span.start(), buffer).await,
            Sub::Zero => {
                buffer.fill(0);
                Ok(buffer)
            }
            Sub::Broken => Err(self.broken(span.start())),
            Sub::Image => unreachable!("the part is claimed"),
        }
    }

    /// The cell that contains this offset.
    pub(super) fn cell_of(&self, at: GuestOffset) -> GuestCluster {
        self.cell.cluster_of(at)
    }
}

impl Writer for Native {
    type Plan = Planned;
    type Before = LookAgain;
    /// The turn of a write that found no space, and how often it has looked for some.
    type Turn<'a> = (Option<MutexGuard<'a, ()>>, u32);

    fn data(&self) -> &SharedStorage {
        &self.data
    }

    fn cell(&self) -> BlockSize {
        self.cell
    }

    async fn as_stored(&self, at: ImageOffset, data: Buffer) -> Result<Buffer> {
        self.stored(at, data).await
    }

    fn checks_together(&self) -> BlockSize {
        self.unit().map_or(CHECKS_TOGETHER, |unit| unit.min(CHECKS_TOGETHER))
    }

    async fn decide(&self, span: GuestSpan, data: &Buffer) -> Result<Way<LookAgain>> {
        if self.find(|| self.holds_any(span)).await? {
            return Ok(Way::After(LookAgain));
        }
        let parts = self.parts(span).await?;
        if parts.iter().any(|part| matches!(part.from, Origin::Embedded(_)))
            && self.make_plain_parts(span, &parts, data).await?
        {
            return Ok(Way::After(LookAgain));
        }
        self.refuse_moved(span, &parts)?;
        let place = |part: &Part| match part.from {
            Origin::Host(at) => Some((at, part.len)),
            _ => None,
        };
        if let Some(runs) = parts.iter().map(place).collect() {
            self.begin_in_place().await?;
            return Ok(Way::InPlace(runs));
        }
        let units = self.units.as_ref();
        Ok(Way::Allocate(Space {
            given: units.map_or(0, |units| units.given()),
            more_may_come: units.is_some_and(|units| units.any_waits()),
        }))
    }

    async fn plan_steps<'a>(
        &'a self,
        span: GuestSpan,
        data: &Buffer,
        steps: &mut Vec<Step<'a>>,
    ) -> Result<Done> {
        self.begin_journal().await?;
        let mut rest = span;
        while !rest.is_empty() {
            let (part, later) = self.first_part(rest);
            let cell = self.cell_of(part.start());
            let mask = if self.could_embed(cell) { u32::MAX } else { self.parts_of(part) };
            let held = self.engine.claims.claim(cell, mask).await;
            let mut step = Step::new(Planned::new(part), Some(held));
            step.under_way = Some(UnderWay::begin(&self.engine.state, "a write"));
            steps.push(step);
            rest = later;
        }
        for step in &mut *steps {
            let part = step.plan.part;
            step.plan.subs = self.find(|| self.subs_to_publish(part)).await?;
            step.fresh = bytes_of(&step.plan.subs, self.cell.start_of(self.cell_of(part.start())));
        }
        for step in &*steps {
            // The places of the steps are not settled yet, so each is counted as if it were to get a unit.
            let words = || self.words_of_any(step);
            self.keep(&words).await?;
        }
        self.settle_places(steps, data).await
    }

    fn add_pieces<'s>(&'s self, step: &'s Step<'_>, data: &mut Buffer, pieces: &mut Pieces<'s>) {
        let part = step.plan.part;
        let cell = self.cell.start_of(self.cell_of(part.start()));
        let place = |at: GuestOffset| step.at() + (at - cell);
        if let Some(embedded) = &step.plan.embedded {
            let bytes = data.split_to(usize::try_from(part.len()).expect("within the buffer"));
            let (within, bytes) = self.with_block(step, embedded, bytes);
            return pieces.add(step.at() + within, bytes);
        }
        let (head, tail) = self.fill_of(step);
        if !head.is_empty() {
            pieces.fill(place(head.start()), self.fill(head));
        }
        let bytes = data.split_to(usize::try_from(part.len()).expect("within the buffer"));
        pieces.add(place(part.start()), bytes);
        if !tail.is_empty() {
            pieces.fill(place(tail.start()), self.fill(tail));
        }
    }

    async fn publish_step(&self, step: &Step<'_>) -> Result<()> {
        match &step.plan.embedded {
            Some(embedded) => self.publish_embedded(step, embedded).await,
            None if step.plan.is_fresh || !step.plan.subs.is_empty() => self.publish_plain(step).await,
            None => Ok(()),
        }
    }

    async fn release_steps(&self, steps: Vec<Step<'_>>) {
        let any_fresh = steps.iter().any(|step| step.plan.is_fresh);
        for step in steps {
            if let Some(embedded) = step.plan.embedded.as_ref().filter(|_| !step.is_published) {
                self.invalidate_embedded(embedded.given.unit).await;
            }
            if let Some(held) = step.end() {
                self.release_claim(held);
            }
        }
        if any_fresh || self.wants_zone() {
            // A zone that cannot be opened or closed fails no write.
            let _ = self.tidy_zones().await;
        }
    }

    async fn wait_for(&self, _again: LookAgain, span: GuestSpan) -> Result<()> {
        self.unshare(span).await
    }

    async fn find_space<'a>(
        &'a self,
        span: GuestSpan,
        given: u64,
        (turn, rounds): &mut (Option<MutexGuard<'a, ()>>, u32),
    ) -> Result<bool> {
        // Units that are free but not clean yet may be enough.
        let needed = usize::try_from(self.cell.count_for(span.len()) + 1).expect("a few");
        if let Some(units) = self.units.as_ref().filter(|_| turn.is_none()) {
            *turn = Some(units.hungry.lock().await);
        }
        self.space_again(rounds, given, needed).await
    }
}
