//! Writing: in place where the image has the bytes already, else claim, transfer, publish.
//!
//! ```text
//!   all of it the image's, and in a unit?  ──yes──► one host write per run, nothing else
//!          │no
//!   claim ► look again ► a unit for each cell without one ► data, with what fills up its first and last sub-block
//!         ► gate: entry, checks, bits and masks, one step ► let go
//! ```
//!
//! 1. Bytes are written before bits and entries that lead to them are published, so a reader never sees what was there before.
//! 2. A fresh unit is zero, durably (`units.rs`). Bytes behind the base need no check: should they not arrive, the sector is as
//!    it was. Bytes over the base get a check in the transaction that says the image has them.
//! 3. Nothing is read from the base for whole sub-blocks; for a part of one its rest is.
//! 4. When anything fails, what was allocated and not published is given back: as a unit of unknown content if anybody may have
//!    written to it. Who finds too few units waits its turn, and keeps it until its write is done.
//! 5. No lock is held while bytes move; claims keep others from the same parts only.
//! 6. A write that is dropped half way may land later, where a check says something else then: the image stops.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use vellum_core::{
    BlockSize, Buffer, Context, ErrorKind, GuestCluster, GuestOffset, GuestSpan, ImageOffset, LocalFuture,
    Result, try_join_all,
};

use super::geometry::SUB_BLOCK;
use super::home::Missing;
use super::image::{Native, Origin, Sub};
use super::publish::Step;
use super::read::Parts;
use crate::claims::{Ask, Fresh, Held};
use crate::journal::{checks_of, unchanging};
use crate::sabotage::{self, Bug};
use crate::state::UnderWay;

/// A write that must change more than data is done in pieces of at most this many bytes.
const BYTES_AT_ONCE: u64 = 8 << 20;
/// Runs of checks reach over no multiple of this; units begin at multiples of it or of their size.
const CHECKS_TOGETHER: BlockSize = BlockSize::from_shift(20);

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    Done,
    /// Nothing: what was looked up is something else by now.
    LookAgain,
}

impl Native {
    pub(super) async fn write_span(&self, span: GuestSpan, mut data: Buffer) -> Result<()> {
        if self.zones_ahead.is_some() {
            self.written_bytes.fetch_add(span.len(), Ordering::Relaxed);
        }
        let mut rest = span;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(self.bytes_at_once());
            let part = data.split_to(usize::try_from(now.len()).expect("within the buffer"));
            self.write_some(now, part).await?;
            rest = later;
            if self.journal().is_some_and(|journal| journal.is_large()) {
                self.commit().await?;
            }
        }
        Ok(())
    }

    /// So much is written at once that a record has room for its checks several times.
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
                let _inside = self.epochs.enter();
                if self.find(|| self.holds_any(span)).await? {
                    continue; // a snapshot has come in between
                }
                let parts = self.parts(span).await?;
                if parts.iter().any(|part| matches!(part.from, Origin::Embedded(_))) {
                    self.make_plain_parts(span, &parts, &data).await?;
                    continue;
                }
                if parts.iter().all(|part| matches!(part.from, Origin::Host(_))) {
                    let result = self.write_parts(parts, data).await;
                    self.commits.note_change();
                    return result;
                }
                // The host may be full too. Then what was freed may help, and the bytes are needed once more.
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
            // Units that are free but not clean yet may be what is missing.
            let needed = usize::try_from(self.cell.count_for(span.len()) + 1).expect("a few");
            if let Some(units) = self.units.as_ref().filter(|_| turn.is_none()) {
                turn = Some(units.hungry.lock().await);
            }
            if !self.space_again(&mut rounds, given, needed).await? {
                return Err(error);
            }
        }
    }

    /// Blocks that hold their units' entries become blocks like others, with the new bytes where all of a block changes.
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

    /// Overwrites bytes of the disk where they lie.
    async fn write_in_place(&self, at: ImageOffset, data: Buffer) -> Result<()> {
        match self.journal() {
            None => self.data.write(at, data).await,
            Some(journal) => journal.write_in_place(&self.data, at, data, async || self.commit().await).await,
        }
    }

    /// Writes where bits, masks or entries must change. Takes the data out of the buffer when there is a place for all of it;
    /// when it fails before that, the buffer is whole. The caller is inside an epoch.
    pub(super) async fn write_allocating(&self, span: GuestSpan, data: &mut Buffer) -> Result<Written> {
        let mut steps = Vec::new();
        let under_way = UnderWay::begin(&self.state, "a write");
        let result = self.write_steps(span, data, &mut steps).await;
        self.commits.note_change();
        let any_fresh = steps.iter().any(|step| step.is_fresh);
        if result.is_err() && data.len() as u64 != span.len() {
            steps.iter().for_each(|step| step.held.spoil());
        }
        for step in steps {
            if let Some(birth) = step.birth.as_ref().filter(|_| !step.is_published.get()) {
                self.retire(birth.given.unit).await;
            }
            self.let_go(step.held);
        }
        under_way.end();
        if any_fresh || self.wants_zone() {
            // Whatever keeps a zone from being opened or closed keeps no write.
            let _ = self.tidy_zones().await;
        }
        result
    }

    /// Ends a claim; a fresh unit that nobody published is given back.
    pub(super) fn let_go(&self, held: Held<'_>) {
        match held.release() {
            Some(fresh) if fresh.zeroed => self.units().take_back(self.number_of(fresh.at)),
            Some(fresh) => self.give_up(self.number_of(fresh.at)),
            None => {}
        }
    }

    /// The number of the unit that lies there.
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
            let mask = if self.could_be_born(cell) { u32::MAX } else { self.parts_of(part) };
            let held = self.claims.claim(cell, mask).await;
            steps.push(Step::new(part, held));
            rest = later;
        }
        for step in &mut *steps {
            step.subs = self.find(|| self.subs_to_publish(step.part)).await?;
        }
        for step in &*steps {
            // The place of a step is not settled yet: as if it were to get a unit.
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

    /// The sub-blocks of a run that are not the image's yet.
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

    /// Settles where each cell's bytes go: a unit for each that has none.
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
                return Ok(Written::LookAgain); // born since it was looked up
            }
            if entry != 0 {
                step.at = Some(self.places.unit(entry).start());
                continue;
            }
            step.is_fresh = true;
            if let Some(birth) = self.bear(step, data, here) {
                let place = self.places.unit(birth.given.unit);
                step.at = Some(place.start());
                step.birth = Some(birth);
                self.reach(place).await?;
                continue;
            }
            step.at = Some(loop {
                match step.held.fresh() {
                    Ask::Have(fresh) => break fresh.at,
                    // Who allocates waits for nobody.
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

    /// Whether a part of a cell has bytes in this block of it.
    pub(super) fn touches_block(&self, part: GuestSpan, block: u32) -> bool {
        let start = self.cell.start_of(self.cell_of(part.start())) + u64::from(block) * SUB_BLOCK.bytes();
        part.overlaps(start.span(SUB_BLOCK.bytes()))
    }

    /// Writes the guest's bytes, with what fills up sub-blocks that become data.
    async fn transfer(&self, steps: &mut [Step<'_>], data: &mut Buffer) -> Result<()> {
        let has_checks = steps.iter().any(|step| !step.subs.is_empty());
        if has_checks {
            // The record says what arrives over the base, so nobody may change it any more.
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
            if let Some(birth) = &step.birth {
                let (within, piece) = self.with_block(step, birth, piece);
                pieces.push((place(cell) + within, Box::pin(std::future::ready(Ok(piece)))));
                continue;
            }
            pieces.push((place(step.part.start()), Box::pin(std::future::ready(Ok(piece)))));
            if !tail.is_empty() {
                pieces.push((place(tail.start()), Box::pin(self.fill(tail))));
            }
        }
        let (places, pieces): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
        let pieces = try_join_all(pieces).await.context(|| format!("{}: can't read the base", self.name))?;
        let mut writes: Vec<(ImageOffset, Buffer)> = Vec::new();
        for (at, piece) in places.into_iter().zip(pieces) {
            match writes.last_mut() {
                Some((first, before)) if *first + before.len() as u64 == at => before.append(piece),
                _ => writes.push((at, piece)),
            }
        }
        if has_checks {
            for (at, data) in &writes {
                self.add_checks(steps, *at, data);
            }
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

    /// Writes a run of which some may have been the image's before. That is overwritten as recovery lets.
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
        // A byte behind the last one is nobody's.
        let Some((step, place)) = found else { return false };
        let guest = self.cell.start_of(self.cell_of(step.part.start())) + (at - place);
        step.subs.binary_search(&SUB_BLOCK.cluster_of(guest).index()).is_ok()
    }

    /// What lies before and behind the step's bytes in sub-blocks that become data.
    fn fill_of(&self, step: &Step<'_>) -> (GuestSpan, GuestSpan) {
        let part = step.part;
        let size = GuestOffset::new(self.geometry.size);
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

    /// Bytes of one sub-block that the guest did not write.
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

    /// Notes the checksums of what becomes data over the base.
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

    /// The cell that a byte lies in.
    pub(super) fn cell_of(&self, at: GuestOffset) -> GuestCluster {
        self.cell.cluster_of(at)
    }
}
