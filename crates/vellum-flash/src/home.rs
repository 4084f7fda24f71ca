//! Write-back: what is dirty goes home, with ordinary writes.
//!
//! ```text
//!   commit, if anything of it is not durable ► watch ► read the slots ► write home ► flush the disk ► publish: clean
//!                                                      a batch in parts: while one is written home, the next is read
//! ```
//!
//! 1. Nothing goes home before a recovery would find it on flash. Otherwise a crash could find an older clean
//!    entry, which reads as the old bytes and, once evicted, as the new ones.
//! 2. Clean are those blocks alone that nobody had claimed at any time since the watch began. The others stay
//!    dirty, and those that were claimed before their slots were read, or meanwhile, are not even written home: such bytes
//!    may be neither old nor new, or, once the slot has another owner, those of another block.
//! 3. The record that says *clean* has the CRCs of what was read. A write in place that went home with the block is
//!    durable on flash only with that record's flush.
//! 4. One write-back of a disk is under way at a time, so what is older never comes home later.
//! 5. Write-back waits for no slot, and for no claim.
//! 6. What cannot go home stays dirty, and the caller gets the error.
//! 7. After the slots were read, the storage of the cache is as long as ever. A file that somebody has cut reads as
//!    zeros where slots were written behind the cut since.

use std::sync::atomic::Ordering;

use futures_lite::future::zip;
use vellum_core::{
    Buffer, Context, Error, GuestOffset, GuestSpan, LocalFuture, Result, ZeroFlags, join_all, try_join_all,
};

use crate::claims::Watch;
use crate::disk::count;
use crate::layout::{BLOCK_BYTES, BLOCK_LEN, Key, SECTOR_BYTES, Slot};
use crate::open::{Open, PUT_BYTES, ROW_BYTES, RUN_BYTES, Share};
use crate::options::FlashPolicy;
use crate::record::Checks;
use crate::shared::{FlashCache, Home};
use crate::state::{Found, State};
use crate::zeros::Run;

/// A batch has at most this many blocks.
const BATCH_BLOCKS_MAX: usize = 1024;
/// A part of it has this many, and then the rest of the row of neighbours that it ends in, but not more than twice as many.
const PART_BLOCKS: usize = 256;
/// A write home has at most this many bytes.
const WRITE_BYTES_MAX: u64 = 1 << 20;
/// At most this many writes home are in flight at once.
const WRITES_AT_ONCE: usize = 8;
/// A disk that is written meanwhile is swept at most this often; then the rest is what was written since.
const SWEEPS_MAX: usize = 4;

/// A block that goes home.
struct Going {
    key: Key,
    slot: Slot,
    sectors: u8,
    bytes: Buffer,
}

/// A block that went home, and what its bytes are known by.
struct Sent {
    key: Key,
    slot: Slot,
    sectors: u8,
    checks: Checks,
}

impl Sent {
    fn of(going: &Going) -> Self {
        let Going { key, slot, sectors, bytes } = going;
        Self { key: *key, slot: *slot, sectors: *sectors, checks: Checks::of(*sectors, bytes.slice()) }
    }
}

impl Home {
    /// Writes home what was dirty when it was called.
    pub(crate) async fn drain(&self) -> Result<()> {
        if !self.may_be_behind() {
            return Ok(()); // Home has it all, also when flash has failed.
        }
        for _ in 0..SWEEPS_MAX {
            let mut from = 0;
            while let Some(next) = self.write_back(from, BATCH_BLOCKS_MAX, u32::MAX).await?.next {
                from = next;
            }
            while self.send_runs_home().await? > 0 {}
            if !self.cache.state().is_dirty(self.row) {
                break;
            }
        }
        Ok(())
    }

    /// Whether home may lack something that flash has.
    pub(crate) fn may_be_behind(&self) -> bool {
        match self.policy() {
            FlashPolicy::WriteBack => true,
            FlashPolicy::WriteThrough => false,
            FlashPolicy::ReadOnly | FlashPolicy::Off => self.cache.state().is_dirty(self.row),
        }
    }

    /// Writes some blocks home, going on where it stopped. Returns how many.
    pub(crate) async fn write_back_some(&self) -> Result<u64> {
        let start = self.hand.load(Ordering::Relaxed);
        let (mut from, mut has_turned) = (start, start == 0);
        loop {
            let Batch { next, clean } = self.write_back(from, BATCH_BLOCKS_MAX, u32::MAX).await?;
            if clean > 0 || (next.is_none() && has_turned) {
                self.hand.store(next.unwrap_or(0), Ordering::Relaxed);
                return Ok(clean);
            }
            has_turned |= next.is_none();
            from = next.unwrap_or(0);
        }
    }

    /// Writes some blocks home, from this one on. Returns how many.
    pub(crate) async fn write_back_from(&self, block: u64) -> Result<u64> {
        self.write_back(block, 1, u32::MAX).await.map(|batch| batch.clean)
    }

    /// Writes home at most `most` dirty blocks, the first at `from` or behind, of groups that were dirty at `until`.
    pub(crate) async fn write_back(&self, from: u64, most: usize, until: u32) -> Result<Batch> {
        let _alone = self.writing_back.lock().await;
        let cache = &*self.cache;
        cache.stop.check()?;
        let (chosen, next, is_durable) = {
            let mut state = cache.state();
            let share = Open::bytes_max(Share::Home, state.record_bytes_max()) - ROW_BYTES;
            let most = most.min(share / PUT_BYTES).max(1);
            let (chosen, next) = state.dirty_from(self.row, from, most, until);
            let is_durable = chosen.iter().all(|(key, ..)| state.is_durable(*key));
            (chosen, next, is_durable)
        };
        match chosen.is_empty() {
            true => Ok(Batch { next, clean: 0 }),
            false => {
                self.begin().await?;
                self.write_these(&chosen, is_durable).await
            }
        }
    }

    async fn write_these(&self, chosen: &[(Key, Slot, u8)], is_durable: bool) -> Result<Batch> {
        let cache = &*self.cache;
        if !is_durable {
            cache.commit().await?; // commit point, rule 1
        }
        let (first, last) = (chosen[0].0.block(), chosen[chosen.len() - 1].0.block());
        let watch = self.claims.watch(first..last + 1);
        // What still holds, now that every change is seen.
        let still: Vec<(Key, Slot, u8)> = {
            let state = cache.state();
            let holds = |(key, ..): &&(Key, Slot, u8)| state.is_durable(*key);
            let found = |(key, ..): &(Key, Slot, u8)| match state.find(*key) {
                Found::Slot { slot, sectors, dirty: true } => Some((*key, slot, sectors)),
                _ => None,
            };
            chosen.iter().filter(holds).filter_map(found).collect()
        };
        let (sent, unreadable) = self.send(still, &watch).await?;
        if !sent.is_empty() {
            self.flush_home().await?; // commit point
        }
        count(&self.tally.written_home, sent.len() as u64);
        let publishing = cache.publishing.lock().await;
        if cache.state().room_for(Share::Home) < sent.len() * PUT_BYTES {
            cache.commit_all().await?;
        }
        let clean = watch.end(|touched| {
            let mut state = cache.state();
            let mut clean = 0;
            for Sent { key, slot, sectors, checks } in sent {
                let is_same = state.find(key) == Found::Slot { slot, sectors, dirty: true };
                let has_room = state.room_for(Share::Home) >= PUT_BYTES && !state.is_undecided(self.row);
                if is_same && has_room && !touched.contains(key.block()) {
                    state.put(key, slot, sectors, false, Some(checks), Share::Home);
                    clean += 1;
                }
            }
            clean
        });
        drop(publishing);
        cache.note_home(clean);
        match unreadable {
            Some(error) => Err(error),
            None => Ok(Batch { next: Some(last + 1), clean }),
        }
    }

    /// Writes the blocks home, but for those that were claimed by then (rule 2), a part while the slots of the next one are
    /// read. Returns those that went home, and the first error of a slot. At most two parts are in memory.
    async fn send(
        &self,
        mut rest: Vec<(Key, Slot, u8)>,
        watch: &Watch,
    ) -> Result<(Vec<Sent>, Option<Error>)> {
        let size = self.size();
        let (mut sent, mut ready, mut unreadable) = (Vec::with_capacity(rest.len()), Vec::new(), None);
        while !(rest.is_empty() && ready.is_empty()) {
            let part = part_of(&mut rest);
            // Both to the end, whatever becomes of the other.
            let (read, written) = zip(self.read_part(part, watch), self.write_blocks(&ready, size)).await;
            written?;
            sent.extend(ready.iter().map(Sent::of));
            let failed;
            (ready, failed) = read?;
            unreadable = unreadable.or(failed);
        }
        Ok((sent, unreadable))
    }

    /// The bytes of those blocks that nobody has claimed by then, and the first error of a slot.
    async fn read_part(
        &self,
        mut part: Vec<(Key, Slot, u8)>,
        watch: &Watch,
    ) -> Result<(Vec<Going>, Option<Error>)> {
        // Slots of blocks that were written since the watch began may be those of other blocks by now.
        watch.decide(|touched| part.retain(|(key, ..)| !touched.contains(key.block())));
        if part.is_empty() {
            return Ok((Vec::new(), None));
        }
        let (mut going, failed) = self.read_slots(part, watch).await;
        self.cache.check_whole().await?; // rule 7
        watch.decide(|touched| going.retain(|going| !touched.contains(going.key.block())));
        Ok((going, failed))
    }

    /// The bytes of the slots, in order. Blocks whose slots cannot be read are left out, and the error is returned, unless
    /// somebody has claimed the block: then the slot need not be its own any more.
    async fn read_slots(&self, blocks: Vec<(Key, Slot, u8)>, watch: &Watch) -> (Vec<Going>, Option<Error>) {
        let cache = &*self.cache;
        let _inside = cache.epochs.enter();
        let mut by_slot = blocks;
        by_slot.sort_unstable_by_key(|(_, slot, _)| *slot);
        let runs = by_slot.chunk_by(|(_, a, _), (_, b, _)| a.0 + 1 == b.0);
        let read_run = async |run: &[(Key, Slot, u8)]| {
            let buffer = Buffer::for_overwrite(run.len() * BLOCK_LEN);
            let mut bytes = cache.read_slots(cache.slot_at(run[0].1), buffer).await?;
            let going = |(key, slot, sectors): &(Key, Slot, u8)| Going {
                key: *key,
                slot: *slot,
                sectors: *sectors,
                bytes: bytes.split_to(BLOCK_LEN).contiguous(),
            };
            Ok::<Vec<Going>, Error>(run.iter().map(going).collect())
        };
        let reads: Vec<_> = runs.map(|run| Box::pin(async move { (run, read_run(run).await) })).collect();
        let (mut going, mut failed) = (Vec::new(), None);
        for (run, read) in join_all(reads).await {
            match read {
                Ok(some) => going.extend(some),
                // One by one, so that the others go home.
                Err(_) => {
                    for one in run {
                        match read_run(std::slice::from_ref(one)).await {
                            Ok(some) => going.extend(some),
                            Err(_) if watch.is_touched(one.0.block()) => {}
                            Err(error) => {
                                count(&self.tally.errors, 1);
                                let what = format!("{}: a dirty block cannot be read", cache.name());
                                failed.get_or_insert(error.context(what));
                            }
                        }
                    }
                }
            }
        }
        going.sort_unstable_by_key(|going| going.key);
        (going, failed)
    }

    /// Neighbours together.
    async fn write_blocks(&self, going: &[Going], size: u64) -> Result<()> {
        let mut writes: Vec<(GuestOffset, Buffer)> = Vec::new();
        for Going { key, sectors, bytes, .. } in going {
            let start = key.block() * BLOCK_BYTES;
            let mut sector = 0;
            while sector < 8 {
                if sectors & 1 << sector == 0 {
                    sector += 1;
                    continue;
                }
                let from = sector;
                while sector < 8 && sectors & 1 << sector != 0 {
                    sector += 1;
                }
                let at = start + from * SECTOR_BYTES;
                let end = (start + sector * SECTOR_BYTES).min(size);
                if at >= end {
                    continue;
                }
                let within = |at: u64| usize::try_from(at - start).expect("within a block");
                let data = Buffer::copy_of(&bytes.slice()[within(at)..within(end)]);
                match writes.last_mut() {
                    Some((last, all))
                        if last.bytes() + all.len() as u64 == at && (all.len() as u64) < WRITE_BYTES_MAX =>
                    {
                        all.append(data);
                    }
                    _ => writes.push((GuestOffset::new(at), data)),
                }
            }
        }
        let mut writes = writes.into_iter();
        loop {
            let some: Vec<LocalFuture<'_, Result<()>>> = writes
                .by_ref()
                .take(WRITES_AT_ONCE)
                .map(|(at, data)| self.disk.write(at, data, vellum_core::WriteFlags::default()))
                .collect();
            if some.is_empty() {
                return Ok(());
            }
            let written = try_join_all(some).await;
            written.inspect_err(|_| count(&self.tally.errors, 1)).context(|| "blocks cannot go home")?;
        }
    }

    async fn flush_home(&self) -> Result<()> {
        let flushed = self.disk.flush().await;
        flushed
            .inspect_err(|_| count(&self.tally.errors, 1))
            .context(|| "blocks that went home are not durable")
    }

    /// Sends runs of zeros home, as many as one record may name. Returns how many blocks' runs are gone.
    pub(crate) async fn send_runs_home(&self) -> Result<u64> {
        let _alone = self.writing_back.lock().await;
        let cache = &*self.cache;
        cache.stop.check()?;
        let chosen: Vec<Run> = {
            let state = cache.state();
            let share = Open::bytes_max(Share::Home, state.record_bytes_max()) - ROW_BYTES;
            state.runs_of(self.row).take((share / RUN_BYTES / 2).max(1)).collect()
        };
        let [first, ..] = &chosen[..] else { return Ok(0) };
        self.begin().await?;
        cache.commit().await?; // commit point, rule 1
        let last = chosen[chosen.len() - 1];
        let watch = self.claims.watch(first.key.block()..last.key.block() + last.blocks);
        let still: Vec<Run> = {
            let state = cache.state();
            let both = |run: &Run| -> Vec<Run> {
                let now = state.ledger.zeros.overlapping(run.key, run.blocks);
                now.map(|now| clipped(now, *run)).collect()
            };
            chosen.iter().flat_map(both).collect()
        };
        let size = self.size();
        for run in &still {
            let start = run.key.block() * BLOCK_BYTES;
            let end = (start + run.blocks * BLOCK_BYTES).min(size);
            if start >= end {
                continue;
            }
            let span = GuestSpan::between(GuestOffset::new(start), GuestOffset::new(end));
            let flags = ZeroFlags { may_unmap: run.may_free, ..ZeroFlags::default() };
            let written = self.disk.write_zeroes(span, flags).await;
            written.inspect_err(|_| count(&self.tally.errors, 1)).context(|| "zeros cannot go home")?;
        }
        self.flush_home().await?; // commit point
        let publishing = cache.publishing.lock().await;
        if cache.state().room_for(Share::Home) < 2 * still.len() * RUN_BYTES {
            cache.commit_all().await?;
        }
        let gone = watch.end(|touched| {
            let mut state = cache.state();
            let mut gone = 0;
            for run in &still {
                let blocks = run.key.block()..run.key.block() + run.blocks;
                for rest in touched.rest_of(blocks) {
                    let (key, blocks) = (Key::new(self.row, rest.start), rest.end - rest.start);
                    if state.room_for(Share::Home) >= RUN_BYTES && state.unzero(key, blocks) {
                        gone += blocks;
                    }
                }
            }
            gone
        });
        drop(publishing);
        cache.note_home(gone);
        Ok(gone)
    }
}

/// Takes the first part away.
fn part_of(rest: &mut Vec<(Key, Slot, u8)>) -> Vec<(Key, Slot, u8)> {
    let is_end = |at: &usize| *at == 2 * PART_BLOCKS || rest[*at].0.bits() != rest[*at - 1].0.bits() + 1;
    let end = (PART_BLOCKS..rest.len()).find(is_end).unwrap_or(rest.len());
    let behind = rest.split_off(end);
    std::mem::replace(rest, behind)
}

/// What of a run lies within another.
fn clipped(run: Run, within: Run) -> Run {
    let start = run.key.bits().max(within.key.bits());
    let end = (run.key.bits() + run.blocks).min(within.key.bits() + within.blocks);
    Run { key: Key::from_bits(start), blocks: end - start, may_free: run.may_free }
}

/// What a batch came to.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Where the next one begins; none behind the last dirty block.
    pub(crate) next: Option<u64>,
    /// Blocks that are clean now.
    pub(crate) clean: u64,
}

impl FlashCache {
    /// Writes home what is dirty of all disks that are open.
    ///
    /// # Errors
    /// The first of a disk; the others are drained all the same.
    pub async fn drain(&self) -> Result<()> {
        let mut result = Ok(());
        for home in self.homes() {
            result = result.and(home.drain().await);
        }
        result
    }

    /// So many blocks have gone home. Those who wait for room look again; where there are none they would find what they found, and
    /// send home again what cannot go now, without end.
    fn note_home(&self, blocks: u64) {
        if blocks > 0 {
            self.freed.notify(usize::MAX);
        }
    }

    /// Sectors that a block of a disk of this size has.
    pub(crate) fn sectors_of(block: u64, size: u64) -> u8 {
        State::sectors_of(block, size)
    }
}
