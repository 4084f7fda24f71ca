//! What was read from home gets slots: later, in the background.
//!
//! ```text
//!   read ─► watch ─► home ─► copy ─► answered
//!                              └─► waits, in bounded memory ─► slot ─► publish: clean
//! ```
//!
//! 1. The copy is made before the guest has the bytes.
//! 2. A block is published only if nobody has claimed it since the watch began, which was before the last look
//!    into the map, and if nothing is known of it still.
//! 3. Only what this image itself has is kept; what a disk below has is kept for that disk, so clones share it.
//!    Zeros are not kept.
//! 4. Only spare slots and spare memory are used, and nothing waits.
//! 5. Under writethrough nothing is published while home has changes that no flush has covered, in regions that do not count
//!    as written: home may lose what was read.

use std::sync::atomic::Ordering;

use vellum_core::{Buffer, GuestOffset, GuestSpan, ImageOffset, Place, Result, lock};

use crate::claims::Watch;
use crate::disk::count;
use crate::layout::{BLOCK_BYTES, BLOCK_LEN, Key, Slot};
use crate::open::{PUT_BYTES, Share};
use crate::options::FlashPolicy;
use crate::record::Checks;
use crate::shared::{Fetched, FlashCache, Home};
use crate::state::Found;

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
    }

    /// Gives slots to what one read got. True when there is more.
    pub(crate) async fn admit_some(&self) -> bool {
        let Some(fetched) = lock(&self.fetched).pop_front() else { return false };
        self.cache.fetched_bytes.fetch_sub(fetched.bytes, Ordering::Relaxed);
        if self.is_open() && self.policy() != FlashPolicy::Off {
            // An error is counted; nothing was published.
            let _admitted = self.admit(fetched).await;
        }
        !lock(&self.fetched).is_empty()
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
                    Place::Data { .. } | Place::Compressed => true,
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

    async fn admit(&self, fetched: Fetched) -> Result<()> {
        let Fetched { runs, watch, .. } = fetched;
        let size = self.size();
        let mut new: Vec<(Key, Slot, u8, Checks)> = Vec::new();
        let mut parts: Vec<(ImageOffset, Buffer)> = Vec::new();
        for (first, mut bytes) in runs {
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
                let copy = copy.contiguous();
                let key = Key::new(self.row, block);
                let slot = {
                    let mut state = self.cache.state();
                    if state.find(key) == Found::Home { state.take_spare(key) } else { None }
                };
                let Some(slot) = slot else {
                    count(&self.tally.refused, 1);
                    continue;
                };
                let sectors = FlashCache::sectors_of(block, size);
                new.push((key, slot, sectors, Checks::of(sectors, copy.slice())));
                parts.push((self.cache.slot_at(slot), copy));
            }
        }
        if new.is_empty() {
            return Ok(());
        }
        parts.sort_unstable_by_key(|(at, _)| *at);
        let bytes = (parts.len() * BLOCK_LEN) as u64;
        let written = self.cache.write_slots(parts).await;
        count(&self.tally.admit_writes, bytes);
        watch.end(|touched| {
            let mut state = self.cache.state();
            for (key, slot, sectors, checks) in new {
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
            }
        });
        self.cache.freed.notify(usize::MAX);
        written.inspect_err(|_| count(&self.tally.errors, 1))
    }
}
