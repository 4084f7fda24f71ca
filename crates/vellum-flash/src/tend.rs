//! What is done in the background, a little at a time: slots for what was read, write-back, and TRIM (`trim`).
//!
//! ```text
//!   tend ─► spare slots ─┬─► disk: admit ► settle regions ► write home     each by itself
//!                        ├─► disk: …                      one that is still under way is left alone
//!                        └─► disk: …
//! ```
//!
//! 1. What is done for all waits for flash alone.
//! 2. A disk is tended once at a time, and waits for no other. A server gives each step a task of its own
//!    ([`FlashCache::tend_with`]), so that a home which does not answer holds up nothing else.
//! 3. A step ends before its disk is closed, and none begins after that. Nor does one that waits hold the image.
//! 4. What others need room of goes home before anything else.
//! 5. What was read of a disk that does not answer makes way when the memory for it is short.

use std::collections::btree_map::Entry;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_lite::future::zip;
use vellum_core::{Error, LocalFuture, Result, join_all, lock};

use crate::disk::count;
use crate::layout::{BLOCK_BYTES, BLOCKS_MAX};
use crate::open::{Open, PUT_BYTES, ROW_BYTES, Share};
use crate::options::FlashPolicy;
use crate::shared::{FlashCache, Home};
use crate::state::Shed;

/// The background sends at most this much home at a time, for each disk.
const STEP_BLOCKS: usize = 256;
/// A disk whose step takes longer does not answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// A step takes at most this many batches of what was read.
const ADMITTED_AT_ONCE: usize = 4;
/// How often the length of the storage is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const STEP_BYTES: u64 = STEP_BLOCKS as u64 * BLOCK_BYTES;

/// What is done now.
#[derive(Debug, Clone, Copy)]
struct Round {
    /// Groups that were dirty then go home; none while there is no need.
    until: Option<u32>,
    is_much: bool,
    /// Regions that no writer has entered since then are settled.
    settles: Option<u32>,
}

/// A disk that is being tended, and how much of the rate it has.
/// While its step waits for its turn it holds neither the disk nor its image, which may be opened anew meanwhile.
struct Tended {
    home: Weak<Home>,
    row: u16,
    cache: Arc<FlashCache>,
    /// The disk's.
    tending: Arc<async_lock::Mutex<bool>>,
    bytes: u64,
}

impl Drop for Tended {
    fn drop(&mut self) {
        lock(&self.cache.tended).remove(&self.row);
        let mut pace = lock(&self.cache.pace);
        pace.allowed = pace.allowed.saturating_add(self.bytes).min(self.cache.options.bytes_per_second);
    }
}

impl Home {
    /// Keeps why blocks cannot go home, until some can.
    pub(crate) fn noting<T>(&self, written: Result<T>) -> Result<T> {
        *lock(&self.trouble) = written.as_ref().err().cloned();
        written
    }

    pub(crate) fn drop_fetched(&self) {
        let mut fetched = lock(&self.fetched);
        let bytes: u64 = fetched.drain(..).map(|fetched| fetched.bytes).sum();
        count(&self.tally.refused, bytes.div_ceil(BLOCK_BYTES));
        self.cache.fetched_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Tended {
    /// True when there is more to do at once.
    async fn step(self, round: Round) -> bool {
        // Given back when the image is let go, too: whoever closes the disk may open it again at once.
        let is_closed = self.tending.clone().lock_arc().await;
        if *is_closed {
            return false;
        }
        let Some(home) = self.home.upgrade() else { return false };
        let has_more = self.step_alone(home, round).await;
        drop(is_closed);
        has_more
    }

    async fn step_alone(mut self, home: Arc<Home>, round: Round) -> bool {
        let wanted = lock(&home.cache.wanted).remove(&home.row);
        if let Some(block) = wanted {
            let _written = home.noting(home.write_back_from(block).await);
            home.cache.freed.notify(usize::MAX);
        }
        let (mut has_more, mut batches) = (true, 0);
        while has_more && batches < ADMITTED_AT_ONCE {
            has_more = home.admit_some().await;
            batches += 1;
        }
        if let Some(until) = round.settles
            && home.policy() == FlashPolicy::WriteThrough
        {
            let _settled = home.noting(home.settle_through(until).await);
        }
        let Some(until) = round.until.filter(|_| self.bytes > 0) else { return has_more };
        let from = home.hand.load(Ordering::Relaxed);
        // An error is kept, and it is tried again. What asks for room, and a close, get the error themselves.
        let Ok(batch) = home.noting(home.write_back(from, STEP_BLOCKS, until).await) else {
            return has_more;
        };
        home.hand.store(batch.next.filter(|next| *next < BLOCKS_MAX).unwrap_or(0), Ordering::Relaxed);
        self.bytes = self.bytes.saturating_sub(batch.clean * BLOCK_BYTES);
        has_more |= batch.clean > 0;
        let is_idle = batch.next.is_none() && from == 0;
        if is_idle && !round.is_much && home.cache.state().runs_of(home.row).next().is_some() {
            let _sent = home.noting(home.send_runs_home().await);
        }
        has_more
    }
}

impl FlashCache {
    /// Does a little in the background, with the time of one clock: gives slots to what was read, and writes home
    /// what has been dirty for long, or more when much is dirty. Waits for the homes. True when there is more to do
    /// at once.
    pub async fn tend(&self, now: Duration) -> bool {
        let trim = self.next_trim(now);
        let trimmed = async {
            if let Some(trim) = trim {
                trim.run().await;
            }
        };
        let steps = self.steps(now).await.into_iter().map(|(tended, round)| Box::pin(tended.step(round)));
        let (steps, ()) = zip(join_all(steps), trimmed).await;
        steps.into_iter().fold(false, |more, one| more | one)
    }

    /// The same, but it waits for no home: each disk's part is given to `spawn`, which runs it to its end. A disk whose
    /// part has not ended is left alone. True when parts that have ended since the last time have more to do.
    pub async fn tend_with(&self, now: Duration, spawn: &dyn Fn(LocalFuture<'static, ()>)) -> bool {
        self.has_tasks.store(true, Ordering::Relaxed);
        if let Some(trim) = self.next_trim(now) {
            spawn(Box::pin(trim.run()));
        }
        for (tended, round) in self.steps(now).await {
            let cache = tended.cache.clone();
            spawn(Box::pin(async move {
                if tended.step(round).await {
                    cache.has_more.store(true, Ordering::Relaxed);
                }
            }));
        }
        self.has_more.swap(false, Ordering::Relaxed)
    }

    /// Waits until something was read that may get slots, since the last round began.
    pub async fn wait_for_reads(&self) {
        loop {
            let listener = self.offered.listen();
            if self.has_offers.load(Ordering::Acquire) {
                return;
            }
            listener.await;
        }
    }

    pub(crate) fn note_offer(&self) {
        if !self.has_offers.swap(true, Ordering::AcqRel) {
            self.offered.notify(usize::MAX);
        }
    }

    async fn steps(&self, now: Duration) -> Vec<(Tended, Round)> {
        self.has_offers.store(false, Ordering::Release);
        if self.failure().is_some() || self.check_open().is_err() {
            return Vec::new();
        }
        let seconds = u32::try_from(now.as_secs()).unwrap_or(u32::MAX - 1);
        self.state().now = seconds;
        if self.look_is_due(now) && self.check_whole().await.is_err() {
            return Vec::new();
        }
        let is_through = |home: &Arc<Home>| home.policy() == FlashPolicy::WriteThrough;
        let is_fetched = self.fetched_bytes.load(Ordering::Relaxed) > 0;
        if is_fetched || self.homes().iter().any(is_through) {
            // An error has stopped the cache, which is met elsewhere.
            let _made = self.make_spare(if is_fetched { 16 } else { 0 }).await;
        }
        let is_much = {
            let state = self.state();
            let (dirty, percent) = (state.dirty_blocks() * 100, self.options.dirty_percent);
            dirty > u64::from(state.slots.total()) * u64::from(percent) || state.is_memory_dirty(percent)
        };
        let age = u32::try_from(self.options.age.as_secs()).unwrap_or(u32::MAX);
        let until = if is_much { Some(u32::MAX) } else { seconds.checked_sub(age) };
        self.earn(now);
        let settles =
            if self.state().is_full_of_regions() { Some(seconds) } else { seconds.checked_sub(age) };
        let round = Round { until, is_much, settles };
        self.homes()
            .into_iter()
            .filter_map(|home| self.take_up(home, now))
            .map(|tended| (tended, round))
            .collect()
    }

    /// Whether the storage was not looked at for a while.
    fn look_is_due(&self, now: Duration) -> bool {
        let mut looked = lock(&self.looked);
        let is_due = looked.is_none_or(|looked| now.saturating_sub(looked) >= LOOK_EVERY);
        if is_due {
            *looked = Some(now);
        }
        is_due
    }

    /// A disk that is not being tended, with its part of what may be written now.
    fn take_up(&self, home: Arc<Home>, now: Duration) -> Option<Tended> {
        let since = match lock(&self.tended).entry(home.row) {
            Entry::Occupied(since) => Some(*since.get()),
            Entry::Vacant(free) => {
                free.insert(now);
                None
            }
        };
        if let Some(since) = since {
            let is_short =
                self.fetched_bytes.load(Ordering::Relaxed) > self.options.fetched_bytes_max as u64 / 2;
            if is_short && now.saturating_sub(since) >= ANSWERS_WITHIN {
                home.drop_fetched();
            }
            return None;
        }
        let mut pace = lock(&self.pace);
        let bytes = pace.allowed.min(STEP_BYTES);
        pace.allowed -= bytes;
        drop(pace);
        let (row, tending) = (home.row, home.tending.clone());
        Some(Tended { home: Arc::downgrade(&home), row, cache: home.cache.clone(), tending, bytes })
    }

    /// For blocks that were read, or are written through: clean ones give up their slots, this many more than would be
    /// missed; and what waits for a record gets one when its share of the next has no room for this many, and a few.
    pub(crate) async fn make_spare(&self, more: u32) -> Result<()> {
        let is_due = {
            let mut state = self.state();
            state.reclaim(&self.epochs);
            let wanted = 2 * state.low_water() + more;
            let short = wanted.saturating_sub(state.free_unpromised() + state.leaving_slots());
            if short > 0 && state.slots.taken() > 0 {
                state.evict(short as usize);
            }
            let is_shed = state.shed_early() == Shed::NoRecord;
            // What leaves is free with a record, which is made when few are.
            let least = state.low_water() * 3 / 2 + more;
            let is_short = state.free_unpromised() < least && state.has_left() || is_shed;
            let room = Open::bytes_max(Share::Through, state.record_bytes_max()) / 4;
            let puts = more.max(16) as usize * PUT_BYTES + ROW_BYTES;
            is_short || state.room_for(Share::Admit) < puts || state.room_for(Share::Through) < room
        };
        if is_due && self.state().has_open() { self.commit_all().await } else { Ok::<(), Error>(()) }
    }

    /// What may be written since the last time: the rate of the background is limited.
    fn earn(&self, now: Duration) {
        let mut pace = lock(&self.pace);
        let rate = self.options.bytes_per_second;
        let passed = pace.last.map_or(Duration::from_secs(1), |last| now.saturating_sub(last));
        let more = u64::try_from(passed.as_micros()).unwrap_or(u64::MAX).saturating_mul(rate / 1_000_000 + 1);
        pace.last = Some(now);
        pace.allowed = pace.allowed.saturating_add(more).min(rate);
    }
}
