//! What was read from home gets slots: later, in the background.
//!
//! ```text
//!   read ─► watch ─► home ─► copy ─► answered
//!                              └─► waits, in bounded memory ─► slots of several reads ─► publish: clean
//! ```
//!
//! 1. The copy is made before the guest has the bytes.
//! 2. A block is published only if nobody has claimed it since the watch began, which was before the last look
//!    into the map, and if nothing is known of it still.
//! 3. Only what this image itself has is kept; what a disk below has is kept for that disk, so clones share it.
//!    Zeros are not kept.
//! 4. Only spare slots and spare memory are used. No guest waits: the background makes slots spare, with a record where
//!    there has to be one, and what does not fit into the memory for what waits is not kept.
//! 5. Under writethrough nothing is published while home has changes that no flush has covered, in regions that do not count
//!    as written: home may lose what was read.

use std::sync::atomic::Ordering;

use vellum_core::{Buffer, GuestOffset, GuestSpan, ImageOffset, Place, Result, lock};

use crate::claims::Watch;
use crate::disk::count;
use crate::layout::{BLOCK_BYTES, BLOCK_LEN, Key, Slot};
use crate::open::{Open, PUT_BYTES, ROW_BYTES, Share};
use crate::options::FlashPolicy;
use crate::record::Checks;
use crate::shared::{Fetched, FlashCache, Home};
use crate::state::Found;

/// What the background takes at a time: reads of this many bytes, and what the last of them has besides.
const BATCH_BYTES: u64 = 1 << 20;

/// A whole block that one of some reads got.
struct Copy {
    read: usize,
    key: Key,
    bytes: Buffer,
}

/// The same, with a slot.
struct New {
    read: usize,
    key: Key,
    slot: Slot,
    sectors: u8,
    checks: Checks,
}

impl Home {
    /// Copies of what was read from home. What is whole blocks waits for slots.
    pub(crate) fn offer(&self, copies: Vec<(GuestSpan, Buffer)>, watch: Watch) {
        let size = self.size();
        let (mut runs, mut bytes) = (Vec::new(), 0);
        for (span, mut copy) in copies {
            let first = span.start().bytes().div_ceil(BLOCK_BYTES);
            let end = span.end().bytes();
            let last = if end == size { end.div_ceil(BLOCK_BYTES) } else { end / BLOCK_BYTES };
            if first >= last {
                continue;
            }
            drop(copy.split_to(usize::try_from(first * BLOCK_BYTES - span.start().bytes()).expect("short")));
            let len = (last * BLOCK_BYTES).min(size) - first * BLOCK_BYTES;
            drop(copy.split_off(usize::try_from(len).expect("within a buffer")));
            bytes += len;
            runs.push((first, copy));
        }
        if runs.is_empty() {
            return;
        }
        let waiting = self.cache.fetched_bytes.load(Ordering::Relaxed);
        if waiting + bytes > self.cache.options.fetched_bytes_max as u64 || self.cache.failure().is_some() {
            count(&self.tally.refused, bytes.div_ceil(BLOCK_BYTES));
            return;
        }
        self.cache.fetched_bytes.fetch_add(bytes, Ordering::Relaxed);
        lock(&self.fetched).push_back(Fetched { runs, watch, bytes });
        self.cache.note_offer();
    }

    /// Gives slots to what some reads got. True when there is more.
    pub(crate) async fn admit_some(&self) -> bool {
        let batch = self.next_batch();
        if batch.is_empty() {
            return false;
        }
        if self.is_open() && self.policy() != FlashPolicy::Off {
            // An error is counted; what it is about was not published.
            let _admitted = self.admit(batch).await;
        }
        !lock(&self.fetched).is_empty()
    }

    fn next_batch(&self) -> Vec<Fetched> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let mut fetched = lock(&self.fetched);
        while bytes < BATCH_BYTES
            && let Some(next) = fetched.pop_front()
        {
            bytes += next.bytes;
            batch.push(next);
        }
        self.cache.fetched_bytes.fetch_sub(bytes, Ordering::Relaxed);
        batch
    }

    /// The parts of a run that this image itself has, and that are not zero.
    async fn own_blocks(&self, first: u64, blocks: u64) -> Result<Vec<std::ops::Range<u64>>> {
        let end = (first + blocks) * BLOCK_BYTES;
        let end = GuestOffset::new(end.min(self.size()));
        let mut rest = GuestSpan::between(GuestOffset::new(first * BLOCK_BYTES).min(end), end);
        let mut own: Vec<std::ops::Range<u64>> = Vec::new();
        let has_below = self.disk.below().is_some();
        while !rest.is_empty() {
            let extents = self.disk.map(rest).await?;
            let Some(last) = extents.last() else { break };
            rest = GuestSpan::between(last.span.end(), rest.end());
            for extent in extents {
                let is_own = match extent.place {
                    Place::Data { .. } | Place::Compressed { .. } => true,
                    Place::Zero { .. } | Place::Below => false,
                };
                let (start, end) = (extent.span.start().bytes(), extent.span.end().bytes());
                // A block that lies in several extents is kept when any of it is own and nothing is below. One with which
                // the disk ends is whole when it is own from its beginning.
                let run = match is_own {
                    true if has_below && end == self.size() => {
                        start.div_ceil(BLOCK_BYTES)..end.div_ceil(BLOCK_BYTES)
                    }
                    true if has_below => start.div_ceil(BLOCK_BYTES)..end / BLOCK_BYTES,
                    true => start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES),
                    false => continue,
                };
                if run.is_empty() {
                    continue;
                }
                match own.last_mut() {
                    Some(last) if last.end >= run.start => last.end = last.end.max(run.end),
                    _ => own.push(run),
                }
            }
        }
        Ok(own)
    }

    /// The blocks of some reads that are worth keeping, each with the number of its read.
    async fn worth_keeping(&self, batch: &mut [Fetched]) -> Vec<Copy> {
        let mut copies = Vec::new();
        for (read, fetched) in batch.iter_mut().enumerate() {
            for (first, mut bytes) in fetched.runs.drain(..) {
                let blocks = (bytes.len() as u64).div_ceil(BLOCK_BYTES);
                // An image that cannot say where its bytes are has none that are worth keeping.
                let own = self.own_blocks(first, blocks).await.unwrap_or_default();
                for block in first..first + blocks {
                    let len = bytes.len().min(BLOCK_LEN);
                    let mut copy = bytes.split_to(len);
                    if !own.iter().any(|run| run.contains(&block)) {
                        continue;
                    }
                    if len < BLOCK_LEN {
                        copy.append(Buffer::zeroed(BLOCK_LEN - len));
                    }
                    copies.push(Copy { read, key: Key::new(self.row, block), bytes: copy.contiguous() });
                }
            }
        }
        copies
    }

    async fn admit(&self, mut batch: Vec<Fetched>) -> Result<()> {
        // The first of a disk may bring its row along.
        let share = Open::bytes_max(Share::Admit, self.cache.state().record_bytes_max()) - 2 * ROW_BYTES;
        let most = (share / PUT_BYTES).max(1);
        let mut copies = self.worth_keeping(&mut batch).await;
        let mut admitted = Ok(());
        while !copies.is_empty() {
            let rest = copies.split_off(most.min(copies.len()));
            let some = std::mem::replace(&mut copies, rest);
            // An error has stopped the cache, which is met elsewhere.
            let more = u32::try_from(some.len()).expect("what a record has room for");
            let _made = self.cache.make_spare(more).await;
            admitted = admitted.and(self.admit_copies(&batch, some).await);
        }
        admitted
    }

    /// Gives slots to as many blocks as a record has room for.
    async fn admit_copies(&self, batch: &[Fetched], copies: Vec<Copy>) -> Result<()> {
        let size = self.size();
        let mut new: Vec<New> = Vec::new();
        let mut parts: Vec<(ImageOffset, Buffer)> = Vec::new();
        for Copy { read, key, bytes } in copies {
            let slot = {
                let mut state = self.cache.state();
                if state.find(key) != Found::Home {
                    continue; // It was cached before, or is now.
                }
                state.take_spare(key)
            };
            let Some(slot) = slot else {
                count(&self.tally.refused, 1);
                continue;
            };
            let sectors = FlashCache::sectors_of(key.block(), size);
            new.push(New { read, key, slot, sectors, checks: Checks::of(sectors, bytes.slice()) });
            parts.push((self.cache.slot_at(slot), bytes));
        }
        if new.is_empty() {
            return Ok(());
        }
        parts.sort_unstable_by_key(|(at, _)| *at);
        count(&self.tally.admit_writes, (parts.len() * BLOCK_LEN) as u64);
        let written = self.cache.write_slots(parts).await;
        for New { read, key, slot, sectors, checks } in new {
            batch[read].watch.decide(|touched| {
                let mut state = self.cache.state();
                let may = written.is_ok()
                    && self.is_open()
                    && !touched.contains(key.block())
                    && state.find(key) == Found::Home
                    && !state.is_undecided(self.row)
                    && self.is_all_recorded()
                    && state.room_for(Share::Admit) >= PUT_BYTES
                    && state.has_spare_memory();
                if may {
                    state.put(key, slot, sectors, false, Some(checks), Share::Admit);
                } else {
                    state.give_back(slot);
                }
                count(if may { &self.tally.admitted } else { &self.tally.refused }, 1);
            });
        }
        self.cache.freed.notify(usize::MAX);
        written.inspect_err(|_| count(&self.tally.errors, 1))
    }
}
