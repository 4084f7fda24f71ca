//! The filler: takes the copies that the tap has kept into the image above, and copies ahead of need.
//!
//! ```text
//!   keep_copies   copies of what guests read ──► fill
//!   prefetch      what is missing: the recorded order, then from the start ──► its turn (`pace`) ──► fetch ──► fill
//!                      └── nothing is missing: the disk can be detached
//! ```
//!
//! 1. Nothing is held while the disk below is read: no claim and no lock. A fill holds a claim for one local write
//!    (contract 15).
//! 2. A fill asks for no flush. Where there is no more room before the next flush, the filler waits for one of the
//!    guest. Only when the guest has not flushed for [`IDLE`], and is idle, or for [`LONG`], it flushes
//!    itself; such commits are counted. In a hurry it does so at once.
//! 3. What fails concerns the copy alone. It is counted, the prefetcher says so, and tries again later.
//! 4. What a boot trace names is copied without a rest and several pieces at once, also beside a guest at work: the
//!    guest asks for it next, and what is there by then it need not wait for. The limits and the pauses hold all the same.
//! 5. A worker is never kept: maps and reads of an image whose tables are in memory complete at once, and so could a whole
//!    round. Between windows and between pieces, others get their turn.
//! 6. Between the reading of the base and a fill the files below are looked at ([`Tap`]'s `BaseFiles`). Where one has changed
//!    nothing is filled any more, and the disk says so.
//! 7. Prefetching is complete when all that the image does not have is known to be zero below. What the disk itself
//!    says is asked for each round, so nothing else need be remembered, also over a restart.

use std::cell::Cell;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_lock::{Mutex as AsyncMutex, MutexGuard, Semaphore, SemaphoreGuard};
use futures_lite::future::{or, yield_now};
use vellum_core::{
    Clock, Error, ErrorKind, GuestOffset, GuestSpan, LocalFuture, Random, Result, SharedDisk, join_all, lock,
};

use super::control::{HydrationControl, State};
use super::missing::{missing_in, windows_of};
use super::order::{RUNS_MAX, Run};
use super::pace::{Pace, Side, rest_after};
use super::runs::Runs;
use super::tap::{Copied, Facts, Reading, Tap};

/// A guest that has not flushed for this long, and is idle, is not waited for.
const IDLE: Duration = Duration::from_secs(2);
/// Nor is one that has not flushed for this long.
const LONG: Duration = Duration::from_secs(10);
/// A guest without a request for this long is idle.
const QUIET: Duration = Duration::from_millis(100);
/// How often to look for what is waited for.
const EVERY: Duration = Duration::from_millis(20);
/// What is fetched at once, in bytes; a block that is larger counts as a piece.
const PIECE: u64 = 512 << 10;
/// The smallest piece, where the disk below is slow.
const PIECE_MIN: u64 = 64 << 10;
/// A piece is to take no longer than this, and becomes larger again if it takes much less.
const PIECE_TIME: Duration = Duration::from_millis(100);
/// A fetch that takes longer has no turn any more, and the base is said not to answer.
const ANSWERED_IN: Duration = Duration::from_secs(5);
/// Pieces at once, while the guest is idle.
const LANES: usize = 4;
/// The number of runs of a trace that are looked at together.
const TRACED_AT_ONCE: usize = 64;
/// The number of missing pieces of them that are copied together.
const PIECES_AT_ONCE: usize = 1024;
/// The number of flushes in a row after which a copy is dropped, if none of them made room for any fill.
const FLUSHES_IN_VAIN_MAX: u32 = 16;
/// How long to wait after a round that has moved nothing, at first and at most.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// The number of errors in a row after which a round is given up. The next one begins behind the last.
const ERRORS_MAX: u64 = 8;

/// What the guest does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Activity {
    /// Requests so far, flushes included.
    pub requests: u64,
    /// Flushes so far.
    pub flushes: u64,
    /// The disk is paused, or being exchanged.
    pub is_held: bool,
}

/// What a filler needs to know of the guest.
pub trait Guest: Send + Sync {
    /// What it does.
    fn activity(&self) -> Activity;
}

/// How prefetching ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The image has everything.
    Complete,
    /// A file below has changed: there is nothing to copy any more.
    Changed,
    /// It was ended before.
    Ended,
}

/// What the fillers of a process share.
#[derive(Debug, Clone)]
pub struct FillerTurns(Arc<Semaphore>);

impl Default for FillerTurns {
    /// As many pieces at once as one disk has twice.
    fn default() -> Self {
        Self::of(2 * LANES)
    }
}

impl FillerTurns {
    /// So many pieces at once.
    pub(super) fn of(pieces: usize) -> Self {
        Self(Arc::new(Semaphore::new(pieces)))
    }
}

/// A disk whose image is being filled.
pub struct Filler {
    /// What copies come from.
    pub tap: Arc<Tap>,
    /// What fills go to.
    pub disk: SharedDisk,
    /// For maps and flushes: held by nothing, and failing while the disk is held.
    pub aside: SharedDisk,
    /// Who comes first.
    pub guest: Arc<dyn Guest>,
    /// The time.
    pub clock: Arc<dyn Clock>,
    /// Where pauses come from.
    pub chance: Random,
    /// Of all disks of the process.
    pub turns: FillerTurns,
    /// Its settings and progress.
    pub control: Arc<HydrationControl>,
}

/// When the guest did what last, as far as was noticed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Noticed {
    activity: Activity,
    request_at: Duration,
    flush_at: Duration,
}

impl Noticed {
    pub(super) fn new(activity: Activity, now: Duration) -> Self {
        Self { activity, request_at: now, flush_at: now }
    }

    pub(super) fn look(&mut self, activity: Activity, now: Duration) -> &Self {
        if activity.requests != self.activity.requests {
            self.request_at = now;
        }
        if activity.flushes != self.activity.flushes {
            self.flush_at = now;
        }
        self.activity = activity;
        self
    }

    pub(super) fn is_quiet(&self, now: Duration) -> bool {
        now.saturating_sub(self.request_at) >= QUIET
    }

    /// Whether a flush of the guest need not be waited for.
    pub(super) fn may_flush(&self, now: Duration) -> bool {
        let since = now.saturating_sub(self.flush_at);
        since >= LONG || (since >= IDLE && self.is_quiet(now))
    }
}

/// A prefetcher at work.
struct Round<'a> {
    filler: &'a Filler,
    pace: Mutex<Pace>,
    chance: Mutex<Random>,
    noticed: Mutex<Noticed>,
    /// Held by the only piece at a time beside a guest that is at work.
    alone: AsyncMutex<()>,
    /// How large the next piece is, in bytes.
    piece_bytes: Cell<u64>,
    /// What a boot trace names is being copied.
    is_traced: Cell<bool>,
    errors: Cell<u64>,
    /// Those since something went well.
    errors_in_a_row: Cell<u64>,
    /// Where this round begins: behind what the one before has failed at.
    start: Cell<GuestOffset>,
    moved: Cell<u64>,
}

impl Filler {
    /// Takes copies of what guests read into the image, until it is ended.
    pub async fn keep_copies(&self) {
        let noticed = Mutex::new(Noticed::new(self.guest.activity(), self.clock.now()));
        loop {
            let came = self.tap.next_copy();
            if self.control.has_ended() {
                return self.tap.drop_copies();
            }
            let Some(copied) = self.tap.take_copy() else {
                let ended = self.control.wait_for_word(|| true);
                or(came, ended).await;
                continue;
            };
            if self.keep(&copied, &noticed).await.is_err() {
                drop(copied);
                self.tap.drop_copies();
                if let Some(error) = self.tap.changed_below() {
                    self.control.set_changed(error.clone());
                    self.control.wait_for_word(|| true).await;
                    continue;
                }
                self.control.tallies.errors.fetch_add(1, Ordering::Relaxed);
                self.control.wait(&*self.clock, RETRY_FIRST).await;
            }
        }
    }

    async fn keep(&self, copied: &Copied, noticed: &Mutex<Noticed>) -> Result<()> {
        self.tap.check_below().await?;
        for span in &copied.keep {
            let kept = self.fill(copied, *span, noticed, None).await?;
            self.control.tallies.filled.fetch_add(kept, Ordering::Relaxed);
            self.control.is_less_missing(kept);
        }
        Ok(())
    }

    /// Fills a part, and waits for flushes where there is no room before one. Returns how much was kept.
    async fn fill(
        &self,
        copied: &Copied,
        span: GuestSpan,
        noticed: &Mutex<Noticed>,
        pace: Option<&Mutex<Pace>>,
    ) -> Result<u64> {
        let tallies = &self.control.tallies;
        let mut kept = 0;
        // What all fills had kept when this one began to wait for a flush, and how often that was in vain since.
        let (mut when_waiting, mut in_vain) = (None, 0);
        loop {
            let data = copied.part(span);
            if let Some(pace) = pace {
                lock(pace).begin(Side::Image, span.len(), self.clock.now());
            }
            let number = tallies.fills.fetch_add(1, Ordering::AcqRel) + 1;
            let others = tallies.filling.load(Ordering::Acquire);
            let filled = {
                let _filling = Reading::begin(&tallies.filling);
                self.disk.fill(span.start(), data).await
            };
            let was_alone = others == 0 && tallies.fills.load(Ordering::Acquire) == number;
            if let Some(pace) = pace {
                let moved = filled.as_ref().map_or(0, |_| span.len());
                lock(pace).end(Side::Image, moved, self.clock.now());
            }
            let filled = filled?;
            kept += filled.kept;
            let by_all = tallies.kept.fetch_add(filled.kept, Ordering::Relaxed) + filled.kept;
            if !filled.wants_flush {
                return Ok(kept);
            }
            // A flush that has made no room for any fill will not do so the next time. Where another fill was faster, or has
            // the room and is not done yet, the copy is worth the wait: to drop it is to fetch it again.
            in_vain = if when_waiting == Some(by_all) { in_vain + 1 } else { 0 };
            when_waiting = Some(by_all);
            let is_hopeless = in_vain > 0 && (was_alone || in_vain == FLUSHES_IN_VAIN_MAX);
            if is_hopeless || !self.is_flushed(noticed).await? {
                self.tap.count_dropped(span.len().saturating_sub(kept));
                return Ok(kept);
            }
        }
    }

    /// Waits until there was a flush. False when it was ended before.
    async fn is_flushed(&self, noticed: &Mutex<Noticed>) -> Result<bool> {
        let before = self.guest.activity().flushes;
        loop {
            let (activity, now) = (self.guest.activity(), self.clock.now());
            let may_flush = lock(noticed).look(activity, now).may_flush(now);
            if self.control.has_ended() {
                return Ok(false);
            }
            if activity.flushes != before {
                return Ok(true);
            }
            if !activity.is_held && (self.control.hurries() || may_flush) {
                self.aside.flush().await?;
                self.control.tallies.commits.fetch_add(1, Ordering::Relaxed);
                return Ok(true);
            }
            self.control.wait(&*self.clock, EVERY).await;
        }
    }

    /// Copies what is missing, until nothing is, or it is ended. Errors are noted, and it tries again.
    pub async fn prefetch(&self) -> Outcome {
        let limits = self.control.limits();
        let mut round = Round {
            filler: self,
            pace: Mutex::new(Pace::new(limits, self.clock.now())),
            chance: Mutex::new(self.chance.clone()),
            noticed: Mutex::new(Noticed::new(self.guest.activity(), self.clock.now())),
            alone: AsyncMutex::new(()),
            piece_bytes: Cell::new(PIECE),
            is_traced: Cell::new(false),
            errors: Cell::new(0),
            errors_in_a_row: Cell::new(0),
            start: Cell::new(GuestOffset::ZERO),
            moved: Cell::new(0),
        };
        let (mut in_force, mut retry, mut is_first) = (limits, RETRY_FIRST, true);
        loop {
            let has_changed = || self.tap.changed_below().is_some();
            self.control.wait_for_word(|| !self.control.prefetches() && !has_changed()).await;
            if self.control.is_paused() {
                self.control.set_state(State::Paused);
                self.control.wait_for_word(|| self.control.is_paused() && !has_changed()).await;
            }
            if self.control.has_ended() {
                return Outcome::Ended;
            }
            if let Some(error) = self.tap.changed_below() {
                self.control.set_changed(error.clone());
                return Outcome::Changed;
            }
            let limits = self.control.limits();
            if limits != in_force {
                in_force = limits;
                round.pace = Mutex::new(Pace::new(limits, self.clock.now()));
            }
            self.control.set_state(State::Running);
            round.errors.set(0);
            round.errors_in_a_row.set(0);
            round.moved.set(0);
            let done = round.run(is_first).await;
            if done.as_ref().is_err_and(|error| error.kind() == ErrorKind::Changed) {
                // A file that was cut also fails to be read. Whether it has changed is decided in one place.
                let _ = self.tap.check_below().await;
            }
            match done {
                Ok(true) => return Outcome::Complete,
                Ok(false) if round.errors.get() == 0 && round.moved.get() == 0 && !self.is_stopped() => {
                    self.control.set_state(State::Waiting);
                }
                Ok(_) => {}
                Err(error) => round.note(error),
            }
            is_first &= round.moved.get() == 0;
            if round.moved.get() > 0 {
                retry = RETRY_FIRST;
            }
            if round.moved.get() > 0 && round.errors.get() == 0 {
                continue;
            }
            if !self.is_stopped() && !has_changed() {
                self.control.wait(&*self.clock, retry).await;
                retry = (retry * 2).min(RETRY_MAX);
            }
        }
    }

    /// Completes a fetch. When it is not answered in time, others get its turn: a base that hangs is not to keep the disks
    /// whose bases do not. Nor is a piece that hangs to keep the other pieces of its disk.
    async fn in_turn<T>(
        &self,
        turn: SemaphoreGuard<'_>,
        alone: &mut Option<MutexGuard<'_, ()>>,
        fetch: impl Future<Output = T>,
    ) -> T {
        let mut fetch = pin!(fetch);
        let late = async {
            self.clock.sleep(ANSWERED_IN).await;
            None
        };
        if let Some(fetched) = or(async { Some(fetch.as_mut().await) }, late).await {
            return fetched;
        }
        drop((turn, alone.take()));
        self.control.set_state(State::NoAnswer);
        let fetched = fetch.await;
        if self.control.progress().state == State::NoAnswer {
            self.control.set_state(State::Running);
        }
        fetched
    }

    fn is_stopped(&self) -> bool {
        self.control.has_ended() || self.control.is_paused()
    }
}

/// The size of the next piece, after one of this size that took this long.
pub(super) fn next_piece(bytes: u64, took: Duration) -> u64 {
    let next = match took {
        took if took > PIECE_TIME => bytes / 2,
        took if took < PIECE_TIME / 4 => bytes * 2,
        _ => bytes,
    };
    next.clamp(PIECE_MIN, PIECE)
}

impl Round<'_> {
    /// One look at the whole disk. True when nothing was missing from the start.
    async fn run(&self, is_first: bool) -> Result<bool> {
        let filler = self.filler;
        let Some(facts) = filler.tap.facts() else {
            return Err(Error::unsupported("the image takes no copies of what is below it"));
        };
        let mut missing = 0;
        for window in windows_of(GuestOffset::ZERO.span(facts.end.bytes())) {
            let its = missing_in(&filler.aside, &filler.tap, &facts, window).await?;
            missing += its.iter().map(|span| span.len()).sum::<u64>();
            if filler.is_stopped() {
                return Ok(false);
            }
        }
        // What they call zero counts, as what is read from them does.
        filler.tap.check_below().await?;
        filler.control.set_missing(missing);
        if missing == 0 {
            return Ok(true);
        }
        let trace = if is_first { filler.control.trace() } else { Arc::default() };
        self.is_traced.set(true);
        let traced = self.copy_traced(&facts, &trace).await;
        self.is_traced.set(false);
        traced?;
        self.errors_in_a_row.set(0);
        // From where the last round was given up to the end, and then what is before that.
        let start = self.start.replace(GuestOffset::ZERO).min(facts.end);
        let halves = [GuestSpan::between(start, facts.end), GuestSpan::between(GuestOffset::ZERO, start)];
        for window in halves.into_iter().flat_map(windows_of) {
            let missing = missing_in(&filler.aside, &filler.tap, &facts, window).await?;
            self.copy(&facts, missing).await?;
            if filler.is_stopped() || self.is_given_up() {
                break;
            }
        }
        Ok(false)
    }

    /// What the trace names, in its order. Runs past the end, and bytes that an earlier run has named, are left out: a trace
    /// may name the whole disk in each of its runs.
    async fn copy_traced(&self, facts: &Facts, trace: &[Run]) -> Result<()> {
        let filler = self.filler;
        let disk = GuestOffset::ZERO.span(facts.end.bytes());
        let mut named = Runs::with_room_for(RUNS_MAX);
        for runs in trace.chunks(TRACED_AT_ONCE) {
            let mut pieces = Vec::new();
            for run in runs {
                let Some(span) = GuestSpan::checked(GuestOffset::new(run.at), run.len) else { continue };
                let span = span.intersect(disk);
                if span.is_empty() {
                    continue;
                }
                let span = facts.widened(span);
                let parts = named.missing_in(span);
                named.insert(span);
                for window in parts.into_iter().flat_map(windows_of) {
                    pieces.extend(missing_in(&filler.aside, &filler.tap, facts, window).await?);
                    if filler.is_stopped() {
                        return Ok(());
                    }
                    if pieces.len() >= PIECES_AT_ONCE {
                        self.copy(facts, std::mem::take(&mut pieces)).await?;
                    }
                }
            }
            self.copy(facts, pieces).await?;
            yield_now().await;
            if filler.is_stopped() || self.is_given_up() {
                break;
            }
        }
        Ok(())
    }

    fn is_given_up(&self) -> bool {
        self.errors_in_a_row.get() >= ERRORS_MAX
    }

    /// Copies these runs, several pieces at once.
    async fn copy(&self, facts: &Facts, runs: Vec<GuestSpan>) -> Result<()> {
        let runs = Mutex::new(VecDeque::from(runs));
        let lanes = (0..LANES).map(|_| -> LocalFuture<'_, Result<()>> { Box::pin(self.lane(facts, &runs)) });
        join_all(lanes).await.into_iter().collect()
    }

    /// The next piece. It ends at a multiple of its size.
    fn take(&self, facts: &Facts, runs: &Mutex<VecDeque<GuestSpan>>) -> Option<GuestSpan> {
        let piece = self.piece_bytes.get().max(facts.unit.bytes());
        let mut runs = lock(runs);
        let run = runs.pop_front()?;
        let (now, rest) = run.split_at(piece - run.start().bytes() % piece);
        if !rest.is_empty() {
            runs.push_front(rest);
        }
        Some(now)
    }

    async fn lane(&self, facts: &Facts, runs: &Mutex<VecDeque<GuestSpan>>) -> Result<()> {
        let filler = self.filler;
        loop {
            yield_now().await;
            let Some(mut alone) = self.turn().await else { return Ok(()) };
            if self.is_given_up() {
                return Ok(());
            }
            let Some(piece) = self.take(facts, runs) else { return Ok(()) };
            let began = filler.clock.now();
            let done = self.piece(piece, &mut alone).await;
            if done.as_ref().is_err_and(|error| error.kind() == ErrorKind::Changed) {
                let _ = filler.tap.check_below().await;
            }
            match done {
                Ok(()) => self.errors_in_a_row.set(0),
                // Without space no other piece will have any, and of another content none is copied.
                Err(error) if error.kind() == ErrorKind::NoSpace || filler.tap.changed_below().is_some() => {
                    lock(runs).clear();
                    return Err(error);
                }
                Err(error) => {
                    self.note(error);
                    if self.is_given_up() {
                        self.start.set(piece.end());
                    }
                }
            }
            let now = filler.clock.now();
            self.piece_bytes.set(next_piece(self.piece_bytes.get(), now.saturating_sub(began)));
            if lock(&self.pace).look(now, &mut lock(&self.chance)).is_some() {
                filler.control.tallies.pauses.fetch_add(1, Ordering::Relaxed);
            }
            let is_quiet = lock(&self.noticed).look(filler.guest.activity(), now).is_quiet(now);
            if alone.is_some() && !is_quiet {
                filler.control.wait(&*filler.clock, rest_after(now.saturating_sub(began))).await;
            }
        }
    }

    fn note(&self, error: Error) {
        self.errors.set(self.errors.get() + 1);
        self.errors_in_a_row.set(self.errors_in_a_row.get() + 1);
        let state = match error.kind() {
            ErrorKind::NoSpace => State::NoSpace,
            ErrorKind::Changed => State::Changed,
            // The disk is held: that passes.
            ErrorKind::Locked => return,
            _ => State::Failed,
        };
        self.filler.control.set_failed(state, error);
    }

    /// Waits until a piece may be fetched: alone, if the guest is at work. `None` when none is to be any more.
    async fn turn(&self) -> Option<Option<MutexGuard<'_, ()>>> {
        let filler = self.filler;
        loop {
            if filler.is_stopped() {
                return None;
            }
            let (activity, now) = (filler.guest.activity(), filler.clock.now());
            let is_quiet = lock(&self.noticed).look(activity, now).is_quiet(now) && !filler.tap.is_read();
            if activity.is_held {
                filler.control.wait(&*filler.clock, EVERY).await;
                continue;
            }
            if filler.control.hurries() {
                return Some(None);
            }
            let (ready, paused) = {
                let pace = lock(&self.pace);
                (pace.ready_at(), pace.paused_until(now))
            };
            if ready > now {
                if paused.is_some() {
                    filler.control.set_state(State::Contended);
                }
                filler.control.wait(&*filler.clock, ready - now).await;
                continue;
            }
            if filler.control.progress().state == State::Contended {
                filler.control.set_state(State::Running);
            }
            // A slow disk below is not made slower by several pieces at once.
            if is_quiet && self.piece_bytes.get() > PIECE_MIN {
                return Some(None);
            }
            if self.is_traced.get() {
                return Some(None);
            }
            let is_alone = self.alone.lock().await;
            if filler.is_stopped() || filler.guest.activity().is_held {
                continue;
            }
            return Some(Some(is_alone));
        }
    }

    async fn piece(&self, span: GuestSpan, alone: &mut Option<MutexGuard<'_, ()>>) -> Result<()> {
        let filler = self.filler;
        let taken = loop {
            match filler.tap.memory(span.len()) {
                Some(taken) => break taken,
                None if filler.is_stopped() => return Ok(()),
                None => filler.control.wait(&*filler.clock, EVERY).await,
            }
        };
        let _shared = filler.tap.share_fetches();
        let (copies, joined) = {
            let stopped = filler.control.wait_for_word(|| !filler.control.is_paused());
            let turn = or(async { Some(filler.turns.0.acquire().await) }, async {
                stopped.await;
                None
            });
            let Some(turn) = turn.await else { return Ok(()) };
            lock(&self.pace).begin(Side::Base, span.len(), filler.clock.now());
            let fetched = filler.in_turn(turn, alone, filler.tap.fetch(span, &taken)).await;
            let moved = fetched.as_ref().map_or(0, |_| span.len());
            lock(&self.pace).end(Side::Base, moved, filler.clock.now());
            fetched?
        };
        filler.tap.check_below().await?;
        let mut kept = 0;
        for copied in &copies {
            for part in &copied.keep {
                kept += filler.fill(copied, *part, &self.noticed, Some(&self.pace)).await?;
            }
        }
        // Also what is zero: the next round has less to look at.
        let zero: u64 = copies.iter().map(|copied| copied.zero).sum();
        filler.control.count_prefetched(kept, filler.clock.now());
        filler.control.is_less_missing(zero);
        self.moved.set(self.moved.get() + kept + zero);
        drop((copies, taken));
        // What another reader has fetched waits for its own fill. To look again at once is to find it missing still.
        for part in joined {
            let is_gone = async {
                part.is_gone().await;
                true
            };
            let is_late = async {
                filler.control.wait(&*filler.clock, LONG).await;
                false
            };
            if or(is_gone, is_late).await {
                self.moved.set(self.moved.get() + part.span.len());
            }
        }
        Ok(())
    }
}
