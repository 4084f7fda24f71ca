//! Writethrough: a write goes to home and to flash at the same time.
//!
//! ```text
//!   region counts as written ─► join ─► plan ─┬─► home ──┬─► publish: clean ─► the claim ends ─► answered
//!                                             └─► slots ─┘
//! ```
//!
//! 1. Home is always complete, and what it answers is the answer. A slot that cannot be written costs the block its place,
//!    and a cache that has stopped costs all of them: the image names no session from then on, and the disk goes on.
//! 2. A block that another has written at the same time is dropped by both: their order may not be the same on both media.
//! 3. A slot is written in place only where no recovery verifies it. That it may then differ from home after a crash is
//!    what the region says.
//! 4. What is cached of a block, and the write has not, is kept: in place, or carried over to the new slot. A write of part
//!    of a sector drops the block: it would have to read home first.
//! 5. What is changed in a region that need not count as written (zeros where nothing is cached, writes past the cache) keeps
//!    what is read from being cached until a flush of home has covered it.
//! 6. A large write is several parts, each of which is published in one record: what a part needs of it, an empty record has.
//! 7. The epoch is that of the transfer to flash, and room in the record is promised when home has answered. So a home that
//!    does not answer holds up no other disk.

use std::ops::Range;
use std::sync::atomic::Ordering;

use futures_lite::future::zip;
use vellum_core::{Buffer, GuestOffset, GuestSpan, ImageOffset, LocalFuture, Result, WriteFlags, join_all};
use vellum_format::commit::Inside;

use super::count;
use super::read::in_blocks;
use super::write::{Edges, Under, only_sectors, touched, whole};
use crate::claims::Touched;
use crate::layout::{BLOCK_BYTES, Key, Slot};
use crate::open::{DROP_BYTES, Open, ROW_BYTES, Share};
use crate::options::FlashPolicy;
use crate::regions::regions_of;
use crate::shared::{FlashCache, Home};
use crate::state::{Found, Need, State};
use crate::through::Entered;

/// A part of a write has at most this many blocks.
const PART_BLOCKS_MAX: u64 = 1024;

/// What becomes of a block that is written.
struct Plan {
    key: Key,
    /// Which of its bytes.
    from: u64,
    to: u64,
    place: Place,
}

#[derive(Clone, Copy)]
enum Place {
    /// Its slot has these sectors already.
    Same(Slot),
    /// A new slot, with what the old one has.
    New { slot: Slot, under: Under, sectors: u8 },
    /// None: it is dropped.
    Nowhere,
}

/// How a change gets to home.
enum Way<'a> {
    /// These regions count as written.
    Through(Entered<'a>),
    /// No recovery may find anything of the blocks.
    Past,
    /// Nothing of the disk counts.
    Without,
}

fn blocks_of(span: GuestSpan) -> Range<u64> {
    span.start().bytes() / BLOCK_BYTES..span.end().bytes().div_ceil(BLOCK_BYTES)
}

impl Home {
    /// Whether requests go to home alone: the policy says so, or flash has failed under a disk whose home is complete.
    pub(super) fn is_without_flash(&self) -> bool {
        match self.policy() {
            FlashPolicy::Off => true,
            FlashPolicy::WriteThrough => self.cache.failure().is_some(),
            FlashPolicy::WriteBack | FlashPolicy::ReadOnly => false,
        }
    }

    pub(super) async fn write_through(&self, span: GuestSpan, data: Buffer, flags: WriteFlags) -> Result<()> {
        let most = self.through_blocks();
        let blocks = blocks_of(span);
        if blocks.end - blocks.start <= most {
            return self.write_part_through(span, data, flags).await;
        }
        let (mut at, mut data) = (span.start(), data.owned());
        let mut parts: Vec<LocalFuture<'_, Result<()>>> = Vec::new();
        while !data.is_empty() {
            let end = GuestOffset::new((at.bytes() / BLOCK_BYTES + most) * BLOCK_BYTES);
            let (part, _) = at.span(data.len() as u64).split_at(end - at);
            let bytes = data.split_to(usize::try_from(part.len()).expect("within a buffer"));
            parts.push(Box::pin(self.write_part_through(part, bytes, WriteFlags::default())));
            at = part.end();
        }
        // Each ends, also when another fails.
        join_all(parts).await.into_iter().fold(Ok(()), Result::and)?;
        if flags.fua { self.flush_through().await } else { Ok(()) }
    }

    /// How many blocks a part of a write has: what is to be said of them fits half of what an empty record has for it.
    fn through_blocks(&self) -> u64 {
        let bytes = Open::bytes_max(Share::Guest, self.cache.state().record_bytes_max()) - ROW_BYTES;
        PART_BLOCKS_MAX.min((bytes / DROP_BYTES / 2) as u64).max(1)
    }

    async fn write_part_through(&self, span: GuestSpan, data: Buffer, flags: WriteFlags) -> Result<()> {
        let (blocks, data) = (blocks_of(span), data.owned());
        let number = blocks.end - blocks.start;
        let mut entered = match self.way(regions_of(self.row, &blocks)).await? {
            Way::Through(entered) => entered,
            Way::Past => {
                return self.past(blocks, async || self.disk.write(span.start(), data, flags).await).await;
            }
            Way::Without => return self.disk.write(span.start(), data, flags).await,
        };
        let cache = &*self.cache;
        // An error has stopped the cache. Home gets the bytes, and then nothing of them is published.
        let _made = cache.make_through_room(number).await;
        let joined = self.claims.join(blocks).await;
        let inside = cache.epochs.enter();
        let plans = self.plan_through(span);
        let under_way = cache.stop.under_way("a write");
        entered.start();
        let home = self.disk.write(span.start(), data.duplicate(), flags);
        let (home, slots) = zip(home, self.bring(&plans, data, inside)).await;
        under_way.end();
        if slots.is_err() {
            count(&self.tally.errors, 1);
        }
        cache.note_change();
        count(&self.tally.writes, number);
        let need = Need {
            bytes: usize::try_from(number).expect("in memory") * DROP_BYTES + ROW_BYTES,
            ..Need::default()
        };
        let promise = cache.promise_bytes(self, need).await;
        let is_written = home.is_ok() && slots.is_ok() && promise.is_ok();
        joined.end(|contested| self.publish_through(plans, is_written, contested));
        entered.end();
        drop(promise);
        home
    }

    /// Decides for each block where its bytes go.
    fn plan_through(&self, span: GuestSpan) -> Vec<Plan> {
        let size = self.size();
        let mut state = self.cache.state();
        let plan = |(block, from, to)| {
            let key = Key::new(self.row, block);
            let sectors = touched(from, to);
            let block_bytes = BLOCK_BYTES.min(size - block * BLOCK_BYTES);
            let is_aligned = sectors == whole(from, to, block_bytes);
            let found = state.find(key);
            let under = match found {
                Found::Slot { slot, sectors: has, .. } if has & !sectors != 0 => Under::Slot(slot, has),
                _ => Under::Home,
            };
            let place = match found {
                _ if !is_aligned => Place::Nowhere,
                Found::Slot { slot, sectors: has, dirty: false }
                    if sectors & !has == 0 && state.is_unchecked(key) =>
                {
                    Place::Same(slot)
                }
                Found::Slot { dirty: false, .. } | Found::Home => {
                    let has = if let Under::Slot(_, has) = under { has } else { 0 };
                    let slot = state.take_for_through(key);
                    slot.map_or(Place::Nowhere, |slot| Place::New { slot, under, sectors: sectors | has })
                }
                // A disk that is written through has nothing that home has not.
                Found::Slot { dirty: true, .. } | Found::Zero => Place::Nowhere,
            };
            Plan { key, from, to, place }
        };
        in_blocks(span).map(plan).collect()
    }

    /// Brings the bytes to their slots.
    async fn bring(&self, plans: &[Plan], mut data: Buffer, inside: Inside<'_>) -> Result<()> {
        let mut parts: Vec<(ImageOffset, Buffer)> = Vec::with_capacity(plans.len());
        for Plan { key, from, to, place } in plans {
            let bytes = data.split_to(usize::try_from(to - from).expect("within a block"));
            match *place {
                Place::Nowhere => {}
                Place::Same(slot) => parts.push((self.cache.slot_at(slot) + *from, bytes)),
                Place::New { slot, under, sectors } => {
                    let block = self.whole_block(*key, (*from, *to), bytes, under, &Edges::default()).await?;
                    parts.push(only_sectors(self.cache.slot_at(slot), block, sectors));
                }
            }
        }
        if parts.is_empty() {
            return Ok(());
        }
        parts.sort_unstable_by_key(|(at, _)| *at);
        count(&self.tally.slot_writes, parts.iter().map(|(_, bytes)| bytes.len() as u64).sum());
        let written = self.cache.write_slots(parts).await;
        drop(inside);
        written
    }

    /// What is cached of the blocks from now on. Room in the record was promised if they were written.
    fn publish_through(&self, plans: Vec<Plan>, is_written: bool, contested: &Touched) {
        let mut state = self.cache.state();
        let has_stopped = self.cache.failure().is_some();
        let is_published = is_written && !has_stopped && !state.is_undecided(self.row);
        for Plan { key, place, .. } in plans {
            let may = is_published && !contested.contains(key.block());
            match place {
                Place::Same(slot)
                    if may && matches!(state.find(key), Found::Slot { slot: now, .. } if now == slot) =>
                {
                    state.note_use(key);
                }
                Place::New { slot, sectors, .. } if may && state.has_spare_memory() => {
                    let is_known = state.map.get(key).is_some();
                    state.put(key, slot, sectors, false, None, Share::Through);
                    if is_known {
                        state.note_use(key);
                    }
                    self.mask(&mut state, key.block(), sectors);
                }
                place => {
                    if let Place::New { slot, .. } = place {
                        state.give_back(slot);
                    }
                    // Nothing is read from a cache that has stopped, and none of its records says anything any more.
                    if !has_stopped {
                        state.drop_block(key, Share::Through);
                    }
                    count(&self.tally.passed, 1);
                }
            }
        }
    }

    /// Makes a change of home after which nothing is cached of these bytes: zeros, or a discard.
    pub(super) async fn zero_through(
        &self,
        span: GuestSpan,
        change: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let blocks = blocks_of(span);
        let (first, number) = (Key::new(self.row, blocks.start), blocks.end - blocks.start);
        loop {
            // Only where something is cached, or a recovery may find it.
            let known = self.cache.state().known_regions(first, number);
            let mut entered = match self.way(known).await? {
                Way::Through(entered) => entered,
                Way::Past => return self.past(blocks, change).await,
                Way::Without => return change().await,
            };
            let joined = self.claims.join(blocks.clone()).await;
            let known = self.cache.state().known_regions(first, number);
            if known.iter().all(|region| entered.has(*region)) {
                if self.drop_blocks(first, number) {
                    entered.start();
                    let changed = change().await;
                    self.note_unrecorded();
                    drop(joined);
                    entered.end();
                    return changed;
                }
                drop((joined, entered));
                self.cache.commit_all().await?;
            }
        }
    }

    /// Before a change of these regions.
    async fn way(&self, regions: impl IntoIterator<Item = Key>) -> Result<Way<'_>> {
        let cache = &*self.cache;
        if cache.failure().is_none() {
            let entered = match self.begin().await {
                Ok(()) => cache.enter_regions(regions).await,
                Err(error) => Err(error),
            };
            match entered {
                Ok(Some(entered)) => return Ok(Way::Through(entered)),
                Ok(None) => return Ok(Way::Past),
                Err(error) if cache.failure().is_none() => return Err(error),
                Err(_) => {}
            }
        }
        self.go_without().await?;
        Ok(Way::Without)
    }

    /// Flash has failed: nothing of it counts for the image any more, durably, before home changes without it.
    pub(super) async fn go_without(&self) -> Result<()> {
        if self.is_alone.load(Ordering::Acquire) {
            return Ok(());
        }
        let _alone = self.beginning.lock().await;
        if self.is_alone.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Some(sessions) = &self.sessions {
            if sessions.session().await.is_some_and(|session| session.counts()) {
                sessions.end().await?; // commit point
            }
        } else if self.trusts_home {
            // Its row counts for the next opening, whatever home is given now. Without that, it is this opening's alone.
            self.cache.stop.check()?;
        }
        self.is_alone.store(true, Ordering::Release);
        Ok(())
    }

    /// Makes a change of home in regions that do not count as written: no recovery may find anything of the blocks.
    async fn past(&self, blocks: Range<u64>, change: impl AsyncFnOnce() -> Result<()>) -> Result<()> {
        let (first, number) = (Key::new(self.row, blocks.start), blocks.end - blocks.start);
        count(&self.tally.passed, number);
        loop {
            let joined = self.claims.join(blocks.clone()).await;
            let known = self.cache.state().known_regions(first, number);
            if known.is_empty() {
                let under_way = self.cache.stop.under_way("a write past the cache");
                let changed = change().await;
                under_way.end();
                self.note_unrecorded();
                drop(joined);
                return changed;
            }
            self.drop_blocks(first, number);
            drop(joined);
            self.cache.commit_all().await?;
        }
    }

    /// Home was changed in regions that may not count as written. Before the claim ends: nothing of them that is read from
    /// now on is cached before a flush.
    fn note_unrecorded(&self) {
        self.unrecorded_at.store(self.cache.state().now, Ordering::Relaxed);
        self.unrecorded.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether a flush of home has covered all changes in regions that need not count as written.
    pub(crate) fn is_all_recorded(&self) -> bool {
        self.unrecorded_covered.load(Ordering::Acquire) == self.unrecorded.load(Ordering::Acquire)
    }

    /// Regions that no writer has entered since this time stop counting as written.
    pub(crate) async fn settle_through(&self, until: u32) -> Result<usize> {
        if self.has_lost_flush.load(Ordering::Acquire) {
            return Ok(0);
        }
        if !self.is_all_recorded() && self.unrecorded_at.load(Ordering::Relaxed) <= until {
            self.flush_through().await?;
        }
        self.cache.settle_regions(self.row, until, async || self.flush_through().await).await
    }

    /// Flushes home. After a failure it is unknown what home has, so no region is settled in this opening.
    pub(super) async fn flush_through(&self) -> Result<()> {
        let covers = self.unrecorded.load(Ordering::Acquire);
        let flushed = self.disk.flush().await;
        match &flushed {
            Ok(()) => drop(self.unrecorded_covered.fetch_max(covers, Ordering::AcqRel)),
            Err(_) => self.has_lost_flush.store(true, Ordering::Release),
        }
        flushed
    }

    /// The disk's regions are settled, and the image gets a number that no copy of it has.
    pub(super) async fn end_through(&self) -> Result<()> {
        if self.cache.failure().is_some() {
            return match self.trusts_home {
                true => Ok(()),
                false => self.go_without().await,
            };
        }
        self.settle_through(u32::MAX).await?;
        if let Some(sessions) = &self.sessions {
            let _alone = self.beginning.lock().await;
            if self.has_begun.swap(false, Ordering::AcqRel) {
                self.renew(&**sessions).await?;
            }
        }
        self.cache.commit_all().await // commit point
    }
}

impl FlashCache {
    /// Makes room for this many blocks that are written through: clean ones give up their slots, in a commit. Waits for flash
    /// alone. Where there is none all the same, a block gets no slot.
    async fn make_through_room(&self, blocks: u64) -> Result<()> {
        let is_short = |state: &mut State| {
            state.reclaim(&self.epochs);
            let wanted = u64::from(state.low_water()) + blocks.min(u64::from(state.slots.total() / 4));
            wanted.saturating_sub(u64::from(state.free_unpromised()))
        };
        if is_short(&mut self.state()) == 0 {
            return Ok(());
        }
        let make = async || {
            {
                let mut state = self.state();
                let short = is_short(&mut state);
                if short == 0 {
                    return Ok(());
                }
                if !state.has_left() && u64::from(state.leaving_slots()) < short {
                    let more = short + u64::from(state.low_water());
                    state.evict(usize::try_from(more).expect("fewer than slots"));
                }
                if !state.has_left() {
                    return Ok(());
                }
            }
            self.commit_all().await
        };
        self.room.share(make, || None).await
    }
}
