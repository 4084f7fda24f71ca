//! Writing: in place where the image already has the bytes, else claim, transfer, publish.
//!
//! ```text
//!   the image has all of it, in plain units?  ──yes──► one host write per run, nothing else (the first of an
//!          │                                           opening marks the image as in use)
//!          │no
//!   claim ► look again ► a unit for each cell without one ► data, its first and last sub-block filled up
//!         ► gate: entry, checks, bits and masks, one step ► release the claim
//! ```
//!
//! 1. Bytes are written before the bits and entries that lead to them are published. A reader therefore never
//!    sees what the unit held before.
//! 2. A fresh unit is zero, durably (`units.rs`). Bytes behind the base need no check: if they do not arrive,
//!    the sector is as it was. Bytes over the base get a check in the transaction that records them as the
//!    image's. In bulk they are flushed before the record instead (the fence of `journal/checks.rs`).
//! 3. Nothing is read from the base for whole sub-blocks. For a partly written sub-block the rest of it is
//!    read.
//! 4. When anything fails, units that were allocated and not published are freed. One that may have been
//!    written to is freed as a unit of unknown content. A write that finds too few units waits its turn, and
//!    keeps the turn until it is done.
//! 5. No lock is held while bytes move. A claim only keeps other writers from the same parts.
//! 6. A dropped write may land later, when a check says something else about these bytes. So the image stops.

use std::cell::Cell;

use smallvec::SmallVec;
use vellum_core::{
    BlockSize, Buffer, Context, ErrorKind, GuestCluster, GuestOffset, GuestSpan, ImageOffset, LocalFuture,
    Result, try_join_all,
};

use super::geometry::SUB_BLOCK;
use super::home_pages::Missing;
use super::image::{Native, Origin, Sub};
use super::publish::Step;
use super::read::Parts;
use crate::claims::{Ask, Fresh, Held};
use crate::engine::Commit as _;
use crate::journal::{checks_of, unchanging};
use crate::sabotage::{self, Bug};
use crate::state::UnderWay;

/// A write that must change more than data is split into pieces of at most this many bytes.
const BYTES_AT_ONCE: u64 = 8 << 20;
/// A run of checks never crosses a multiple of this. Units begin at multiples of this or of their own size.
const CHECKS_TOGETHER: BlockSize = BlockSize::from_shift(20);

/// The result of one attempt to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    Done,
    /// Nothing was written: what was looked up has changed since.
    LookAgain,
}

impl Native {
    pub(super) async fn write_span(&self, span: GuestSpan, mut data: Buffer) -> Result<()> {
        if let Some(zones) = &self.zones {
            zones.note_written(span.len());
        }
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = rest.split_between_blocks(self.bytes_at_once());
            let part = data.split_to(usize::try_from(now.len()).expect("within the buffer"));
            self.write_some(now, part).await?;
            rest = later;
            if self.journal().is_some_and(|journal| journal.is_large()) {
                self.commit().await?;
            }
        }
        Ok(())
    }

    /// The bytes that are written in one piece: few enough that a record has room for their checks several
    /// times over.
    pub(super) fn bytes_at_once(&self) -> u64 {
        let most = self.record_max().saturating_mul(16).min(BYTES_AT_ONCE);
        SUB_BLOCK.round_down(most).max(SUB_BLOCK.bytes())
    }

    async fn write_some(&self, span: GuestSpan, mut data: Buffer) -> Result<()> {
        let (mut turn, mut rounds) = (None, 0);
        loop {
            self.unshare(span).await?;
            let (given, mut copy) = (self.units.as_ref().map_or(0, |units| units.given()), None);
            let result = {
                let _inside = self.engine.epochs.enter();
                if self.find(|| self.holds_any(span)).await? {
                    continue; // a snapshot was made in between
                }
                let parts = self.parts(span).await?;
                if parts.iter().any(|part| matches!(part.from, Origin::Embedded(_))) {
                    self.make_plain_parts(span, &parts, &data).await?;
                    continue;
                }
                if parts.iter().all(|part| matches!(part.from, Origin::Host(_))) {
                    let result = self.write_parts(parts, data).await;
                    self.engine.commits.note_change();
                    return result;
                }
                // The host may be full too. Then freed space may help, and the bytes are needed a second
                // time.
                if self.units.as_ref().is_some_and(|units| units.any_waits()) {
                    copy = Some(data.duplicate());
                }
                self.write_allocating(span, &mut data).await
            };
            let error = match result {
                Ok(Written::Done) => return Ok(()),
                Ok(Written::LookAgain) => continue,
                Err(error) if error.kind() == ErrorKind::NoSpace => error,
                Err(error) => return Err(error),
            };
            if data.len() as u64 != span.len() {
                let Some(copy) = copy else { return Err(error) };
                data = copy;
            }
            // Units that are free but not clean yet may be enough.
            let needed = usize::try_from(self.cell.count_for(span.len()) + 1).expect("a few");
            if let Some(units) = self.units.as_ref().filter(|_| turn.is_none()) {
                turn = Some(units.hungry.lock().await);
            }
            if !self.space_again(&mut rounds, given, needed).await? {
                return Err(error);
            }
        }
    }

    /// Turns blocks that hold their units' entries into plain blocks. A block that is overwritten as a whole
    /// gets its new bytes at once.
    async fn make_plain_parts(&self, span: GuestSpan, parts: &Parts, data: &Buffer) -> Result<()> {
        let mut at = span.start();
        for part in parts {
            if matches!(part.from, Origin::Embedded(_)) {
                let new = (part.len == SUB_BLOCK.bytes()).then(|| {
                    let mut bytes = vec![0; 4096];
                    data.copy_to(usize::try_from(at - span.start()).expect("within the buffer"), &mut bytes);
                    Buffer::copy_of(&bytes)
                });
                self.make_plain(self.cell_of(at).index(), new).await?;
            }
            at += part.len;
        }
        Ok(())
    }

    async fn write_parts(&self, parts: Parts, mut data: Buffer) -> Result<()> {
        self.begin_in_place().await?;
        let runs = parts.into_iter().map(|part| match part.from {
            Origin::Host(at) => (at, part.len),
            _ => unreachable!("all of it is in the image"),
        });
        let runs: SmallVec<[(ImageOffset, u64); 2]> = runs.collect();
        if let [(at, _)] = runs[..] {
            return self.write_in_place(at, data).await;
        }
        let writes = runs.into_iter().map(|(at, len)| {
            let part = data.split_to(usize::try_from(len).expect("within the buffer"));
            Box::pin(self.write_in_place(at, part)) as LocalFuture<'_, Result<()>>
        });
        let writes: Vec<_> = writes.collect();
        try_join_all(writes).await.map(drop)
    }

    /// Overwrites bytes of the disk in place.
    async fn write_in_place(&self, at: ImageOffset, data: Buffer) -> Result<()> {
        match self.journal() {
            None => self.data.write(at, data).await,
            Some(journal) => journal.write_in_place(&self.data, at, data, async || self.commit().await).await,
        }
    }

    /// Writes where bits, masks or entries must change. The data is taken out of the buffer once all of it
    /// has a place. A failure before that leaves the buffer whole. The caller is inside an epoch.
    pub(super) async fn write_allocating(&self, span: GuestSpan, data: &mut Buffer) -> Result<Written> {
        let mut steps = Vec::new();
        let under_way = UnderWay::begin(&self.engine.state, "a write");
        let result = self.write_steps(span, data, &mut steps).await;
        self.engine.commits.note_change();
        let any_fresh = steps.iter().any(|step| step.is_fresh);
        let may_be_written = result.is_err() && data.len() as u64 != span.len();
        if may_be_written && !sabotage::is(Bug::HalfWrittenIsClean) {
            steps.iter().for_each(|step| step.held.spoil());
        }
        for step in steps {
            if let Some(embedded) = step.embedded.as_ref().filter(|_| !step.is_published.get()) {
                self.invalidate_embedded(embedded.given.unit).await;
            }
            self.release_claim(step.held);
        }
        under_way.end();
        if any_fresh || self.wants_zone() {
            // A zone that cannot be opened or closed fails no write.
            let _ = self.tidy_zones().await;
        }
        result
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

    async fn write_steps<'a>(
        &'a self,
        span: GuestSpan,
        data: &mut Buffer,
        steps: &mut Vec<Step<'a>>,
    ) -> Result<Written> {
        self.begin_journal().await?;
        let mut rest = span;
        while !rest.is_empty() {
            let (part, later) = self.first_part(rest);
            let cell = self.cell.cluster_of(part.start());
            let mask = if self.could_embed(cell) { u32::MAX } else { self.parts_of(part) };
            let held = self.engine.claims.claim(cell, mask).await;
            steps.push(Step::new(part, held));
            rest = later;
        }
        for step in &mut *steps {
            step.subs = self.find(|| self.subs_to_publish(step.part)).await?;
        }
        for step in &*steps {
            // The places of the steps are not settled yet, so each is counted as if it were to get a unit.
            let words = || self.words_of_any(step);
            self.keep(&words).await?;
        }
        if self.settle_places(steps, data).await? == Written::LookAgain {
            return Ok(Written::LookAgain);
        }
        self.transfer(steps, data).await?;
        if !sabotage::is(Bug::BitBeforeData) {
            self.publish_steps(steps).await?;
        }
        Ok(Written::Done)
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
    async fn settle_places(&self, steps: &mut [Step<'_>], data: &Buffer) -> Result<Written> {
        let Some(unit) = self.unit() else {
            for step in steps {
                step.at =
                    Some(self.places.linear(self.cell.start_of(self.cell.cluster_of(step.part.start()))));
            }
            return Ok(Written::Done);
        };
        let mut within = 0;
        for step in steps {
            let here = within;
            within += usize::try_from(step.part.len()).expect("within the buffer");
            let number = unit.cluster_of(step.part.start()).index();
            let (entry, form) = self.find(|| self.entry_and_form(number)).await?;
            if form != 0 && self.touches_block(step.part, form - 1) {
                return Ok(Written::LookAgain); // it was allocated after it was looked up
            }
            if entry != 0 {
                step.at = Some(self.places.unit(entry).start());
                continue;
            }
            step.is_fresh = true;
            if let Some(embedded) = self.embed(step, data, here) {
                let place = self.places.unit(embedded.given.unit);
                step.at = Some(place.start());
                step.embedded = Some(embedded);
                self.reach(place).await?;
                continue;
            }
            step.at = Some(loop {
                match step.held.fresh() {
                    Ask::Have(fresh) => break fresh.at,
                    // The allocator never waits for another request.
                    Ask::Wait(listener) => listener.await,
                    Ask::Yours => match self.allocate().await {
                        Ok(number) => {
                            step.held.provide(Fresh { at: self.places.unit(number).start(), zeroed: true });
                        }
                        Err(error) => {
                            step.held.give_up();
                            return Err(error);
                        }
                    },
                }
            });
        }
        Ok(Written::Done)
    }

    /// Whether a part of a cell has bytes in this block of the cell.
    pub(super) fn touches_block(&self, part: GuestSpan, block: u32) -> bool {
        let start = self.cell.start_of(self.cell_of(part.start())) + u64::from(block) * SUB_BLOCK.bytes();
        part.overlaps(start.span(SUB_BLOCK.bytes()))
    }

    /// Writes the guest's bytes, and fills up the sub-blocks that become data.
    async fn transfer(&self, steps: &mut [Step<'_>], data: &mut Buffer) -> Result<()> {
        let becomes_data = steps.iter().any(|step| !step.subs.is_empty());
        // In bulk nothing is checked: the data of the open transaction is flushed before its record.
        let is_checked = becomes_data && self.journal().is_some_and(|journal| !journal.is_fenced());
        if is_checked {
            // The record describes the bytes that arrive over the base, so the guest must not be able to
            // change them any more.
            *data = unchanging(std::mem::take(data));
        }
        let mut pieces: Vec<(ImageOffset, LocalFuture<'_, Result<Buffer>>)> = Vec::new();
        for step in &*steps {
            let (head, tail) = self.fill_of(step);
            let cell = self.cell.start_of(self.cell.cluster_of(step.part.start()));
            let place = |at: GuestOffset| step.at.expect("settled") + (at - cell);
            if !head.is_empty() {
                pieces.push((place(head.start()), Box::pin(self.fill(head))));
            }
            let piece = data.split_to(usize::try_from(step.part.len()).expect("within the buffer"));
            if let Some(embedded) = &step.embedded {
                let (within, piece) = self.with_block(step, embedded, piece);
                pieces.push((place(cell) + within, Box::pin(std::future::ready(Ok(piece)))));
                continue;
            }
            pieces.push((place(step.part.start()), Box::pin(std::future::ready(Ok(piece)))));
            if !tail.is_empty() {
                pieces.push((place(tail.start()), Box::pin(self.fill(tail))));
            }
        }
        let (places, pieces): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
        let pieces =
            try_join_all(pieces).await.context(|| format!("{}: can't read the base", self.engine.name))?;
        let mut writes: Vec<(ImageOffset, Buffer)> = Vec::new();
        for (at, piece) in places.into_iter().zip(pieces) {
            match writes.last_mut() {
                Some((first, before)) if *first + before.len() as u64 == at => before.append(piece),
                _ => writes.push((at, piece)),
            }
        }
        if is_checked {
            for (at, data) in &writes {
                self.add_checks(steps, *at, data);
            }
        } else {
            steps.iter_mut().for_each(|step| step.is_unchecked = !step.subs.is_empty());
        }
        if sabotage::is(Bug::BitBeforeData) {
            self.publish_steps(steps).await?;
        }
        let steps = &*steps;
        let writes = writes
            .into_iter()
            .map(|(at, data)| Box::pin(self.write_run(steps, at, data)) as LocalFuture<'_, Result<()>>);
        try_join_all(writes).await.map(drop)
    }

    /// Writes a run, parts of which the image may have had before. Those are overwritten as the recovery
    /// rules allow.
    async fn write_run(&self, steps: &[Step<'_>], at: ImageOffset, mut data: Buffer) -> Result<()> {
        let must_wait = |at: ImageOffset, len| self.journal().is_some_and(|j| j.must_wait(at.span(len)));
        if !must_wait(at, data.len() as u64) {
            return self.data.write(at, data).await;
        }
        let mut here = at;
        while !data.is_empty() {
            let is_new = self.becomes_data(steps, here);
            let end = at + data.len() as u64 + (here - at);
            let mut next = here;
            while next < end && self.becomes_data(steps, next) == is_new {
                next = ImageOffset::new(SUB_BLOCK.round_down(next.bytes()) + SUB_BLOCK.bytes()).min(end);
            }
            let piece = data.split_to(usize::try_from(next - here).expect("within the buffer"));
            match is_new {
                true => self.data.write(here, piece).await?,
                false => self.write_in_place(here, piece).await?,
            }
            here = next;
        }
        Ok(())
    }

    /// Whether the byte lies in a sub-block that becomes data.
    fn becomes_data(&self, steps: &[Step<'_>], at: ImageOffset) -> bool {
        let found = steps.iter().find_map(|step| {
            let place = step.at.expect("settled");
            (place <= at && at < place + self.cell.bytes()).then_some((step, place))
        });
        // A byte behind the last step belongs to none.
        let Some((step, place)) = found else { return false };
        let guest = self.cell.start_of(self.cell_of(step.part.start())) + (at - place);
        step.subs.binary_search(&SUB_BLOCK.cluster_of(guest).index()).is_ok()
    }

    /// The runs before and behind the step's bytes that fill up sub-blocks which become data.
    fn fill_of(&self, step: &Step<'_>) -> (GuestSpan, GuestSpan) {
        let part = step.part;
        let size = GuestOffset::new(self.engine.geometry.size);
        let first = GuestOffset::new(SUB_BLOCK.round_down(part.start().bytes()));
        let end = GuestOffset::new(SUB_BLOCK.round_up(part.end().bytes())).min(size);
        let becomes_data = |at: GuestOffset| step.subs.contains(&SUB_BLOCK.cluster_of(at).index());
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

    /// The bytes of one sub-block that the guest did not write.
    async fn fill(&self, span: GuestSpan) -> Result<Buffer> {
        let mut buffer = Buffer::for_overwrite(usize::try_from(span.len()).expect("within a sub-block"));
        match self.find(|| self.sub(SUB_BLOCK.cluster_of(span.start()).index())).await? {
            Sub::Base => self.read_base(span.start(), buffer).await,
            Sub::Zero => {
                buffer.fill(0);
                Ok(buffer)
            }
            Sub::Broken => Err(self.broken(span.start())),
            Sub::Image => unreachable!("the part is claimed"),
        }
    }

    /// Records the checksums of the sectors that become data over the base.
    fn add_checks(&self, steps: &mut [Step<'_>], at: ImageOffset, data: &Buffer) {
        let last = Cell::new((u64::MAX, false));
        let seen = &*steps;
        let wanted = |sector: ImageOffset| {
            let page = sector.bytes() / SUB_BLOCK.bytes();
            if last.get().0 != page {
                last.set((page, self.becomes_data(seen, sector)));
            }
            last.get().1
        };
        let together = self.unit().map_or(CHECKS_TOGETHER, |unit| unit.min(CHECKS_TOGETHER));
        for check in checks_of(at, data, together, wanted) {
            let holds = |step: &Step<'_>| {
                let place = step.at.expect("settled");
                place <= check.0 && check.0 < place + self.cell.bytes()
            };
            let index = steps.iter().position(holds).expect("every write is some step's");
            steps[index].checks.push(check);
        }
    }

    /// The cell that contains this offset.
    pub(super) fn cell_of(&self, at: GuestOffset) -> GuestCluster {
        self.cell.cluster_of(at)
    }
}
