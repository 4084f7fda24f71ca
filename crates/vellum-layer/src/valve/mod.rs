//! The valve: every request of every export passes through it, so that a disk can be stopped, throttled and
//! exchanged while it is served.
//!
//! ```text
//!   exports ──► limits: it is this request's turn ──► passage: not held ──► the disk, whichever it is now
//!                flushes bypass these                    paused, or exchanged
//! ```
//!
//! 1. A disk that is neither limited nor held costs a request two increments of a counter that few cores
//!    share, and no lock.
//! 2. A map query counts as a read of no bytes, a discard as a write of no bytes; so do zeros, where the disk
//!    can make them without writing them.
//! 3. A waiting request holds nothing but its place in line; the exports bound how many there can be.
//! 4. A request that was admitted is not stopped any more. A pause waits for it, and flushes. Requests that
//!    waited meanwhile begin at the rate of the limits.
//! 5. Background work ([`Disk::tend`], [`Disk::fill`]) does not begin while the disk is held.
//! 6. When the server ends the valve opens for good: waiting requests are executed at the disk's own pace.
//! 7. A snapshot of the disk is read through the same limits and the same passage (`beside`).
//! 8. If the disk behind it has lost answered writes, the next flush of each user of the valve reports it
//!    (`Losses`).
//! 9. While it is barred, changes wait before they enter; reads and flushes pass. So is the target of a migration,
//!    until it may be written.
//! 10. If so configured, a request that finds no space waits until there is some, and fails only when the
//!     server ends.

mod aside;
mod beside;
mod limits;
mod space;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use arc_swap::ArcSwap;
use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{
    Buffer, Clock, Disk, Error, ErrorKind, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan,
    LocalFuture, Losses, MergedExtent, PlaceKind, Result, Room, SharedDisk, WriteFlags, ZeroFlags, lock,
};

use limits::{Direction, Limits};
pub use limits::{Kind, Rate, RateLimits};
use space::Space;

pub use crate::passage::Hold;
use crate::passage::{Inside, Passage};

/// A disk that can be stopped, slowed and exchanged.
pub struct Valve {
    inner: ArcSwap<SharedDisk>,
    limits: Limits,
    passage: Arc<Passage>,
    space: Space,
    /// Of the disks that were behind it.
    losses: Arc<Losses>,
    flow: Mutex<Flow>,
    /// Counts pauses and resumes, so that a waiter can tell that its pause was superseded.
    turns: AtomicU64,
    turned: Event,
    has_ended: AtomicBool,
    is_barred: AtomicBool,
    unbarred: Event,
    clock: Arc<dyn Clock>,
}

/// Whether requests continue.
enum Flow {
    Running,
    Pausing(Hold),
    Paused { _hold: Hold, since: Duration },
}

/// Whether requests are admitted, for status reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// They do.
    Running,
    /// New ones wait; earlier ones are still in flight, or being flushed.
    Pausing,
    /// No request is in flight, everything is durable, and new requests wait, for this long already.
    Paused(Duration),
}

impl Valve {
    /// Over this disk, open.
    pub fn new(inner: SharedDisk, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            inner: ArcSwap::from_pointee(inner),
            limits: Limits::new(clock.clone()),
            passage: Arc::default(),
            space: Space::default(),
            losses: Arc::new(Losses::new(clock.clone())),
            flow: Mutex::new(Flow::Running),
            turns: AtomicU64::new(0),
            turned: Event::new(),
            has_ended: AtomicBool::new(false),
            is_barred: AtomicBool::new(false),
            unbarred: Event::new(),
            clock,
        })
    }

    fn flow(&self) -> MutexGuard<'_, Flow> {
        lock(&self.flow)
    }

    /// Whether requests continue.
    pub fn state(&self) -> State {
        match &*self.flow() {
            Flow::Running => State::Running,
            Flow::Pausing(_) => State::Pausing,
            Flow::Paused { since, .. } => State::Paused(self.clock.now().saturating_sub(*since)),
        }
    }

    /// Requests that wait until it is open again.
    pub fn held(&self) -> usize {
        self.passage.waiting()
    }

    /// What is limited.
    pub fn limits(&self) -> RateLimits {
        self.limits.rates()
    }

    /// Limits requests, also those that wait already. Once the server ends nothing is limited.
    pub fn limit(&self, rates: RateLimits) {
        let _flow = self.flow();
        if !self.has_ended.load(Ordering::Acquire) {
            self.limits.set(rates);
        }
    }

    /// Requests that wait for their limits.
    pub fn limited(&self) -> usize {
        self.limits.waiting()
    }

    /// Stops new requests. Returns when none is in flight and everything that was answered is durable.
    /// Pausing twice is legal.
    ///
    /// # Errors
    /// Returns the result of the flush; then requests continue. `Closed` when the pause was ended elsewhere,
    /// or the server ends.
    pub async fn pause(&self) -> Result<()> {
        let turn = {
            let mut flow = self.flow();
            if self.has_ended.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::Closed, "the server is shutting down"));
            }
            match &*flow {
                Flow::Paused { .. } => return Ok(()),
                Flow::Pausing(_) => {}
                Flow::Running => {
                    *flow = Flow::Pausing(self.passage.hold());
                    self.turns.fetch_add(1, Ordering::AcqRel);
                }
            }
            self.turns.load(Ordering::Acquire)
        };
        // Once the disk is resumed, leaving requests no longer wake the waiter.
        or(self.passage.drained(), self.turned_from(turn)).await;
        let flushed = self.inner.load_full().flush().await;
        let mut flow = self.flow();
        let is_ours = self.turns.load(Ordering::Acquire) == turn;
        match std::mem::replace(&mut *flow, Flow::Running) {
            Flow::Pausing(hold) if is_ours && flushed.is_ok() => {
                *flow = Flow::Paused { _hold: hold, since: self.clock.now() };
                Ok(())
            }
            Flow::Pausing(hold) if is_ours => {
                self.turns.fetch_add(1, Ordering::AcqRel);
                drop(hold);
                flushed
            }
            // Another task, which had also paused it, was faster.
            paused @ Flow::Paused { .. } if is_ours => {
                *flow = paused;
                Ok(())
            }
            other => {
                *flow = other;
                Err(Error::new(ErrorKind::Closed, "it was resumed before it had paused"))
            }
        }
    }

    /// Waits until the pause is ended.
    async fn turned_from(&self, turn: u64) {
        loop {
            let turned = self.turned.listen();
            if self.turns.load(Ordering::Acquire) != turn {
                return;
            }
            turned.await;
        }
    }

    /// Whether requests that find no space are held until there is some, or fail. Once the server ends they
    /// fail.
    pub fn hold_when_full(&self, holds: bool) {
        let _flow = self.flow();
        self.space.set_waited_for(holds && !self.has_ended.load(Ordering::Acquire));
    }

    /// Requests that wait for space.
    pub fn waiting_for_space(&self) -> usize {
        self.space.waiting()
    }

    /// Requests that wait for space try again at once; true if there are any. They also try by themselves at
    /// intervals.
    pub fn try_again(&self) -> bool {
        self.space.try_again()
    }

    /// Lets requests continue; true if they had been stopped.
    pub fn resume(&self) -> bool {
        let mut flow = self.flow();
        self.turns.fetch_add(1, Ordering::AcqRel);
        self.turned.notify(usize::MAX);
        !matches!(std::mem::replace(&mut *flow, Flow::Running), Flow::Running)
    }

    /// Opens it for good.
    pub fn end(&self) {
        let mut flow = self.flow();
        self.has_ended.store(true, Ordering::Release);
        self.turns.fetch_add(1, Ordering::AcqRel);
        self.turned.notify(usize::MAX);
        *flow = Flow::Running;
        self.limits.set(RateLimits::default());
        self.space.set_waited_for(false);
        self.is_barred.store(false, Ordering::Release);
        self.unbarred.notify(usize::MAX);
    }

    /// Stops new requests until the hold is dropped, in addition to any pause. Returns when none is in
    /// flight.
    pub async fn hold(&self) -> Hold {
        let hold = self.passage.hold();
        self.passage.drained().await;
        hold
    }

    /// Whether changes wait. Once the server ends they do not.
    pub fn bar(&self, is_barred: bool) {
        let _flow = self.flow();
        self.is_barred.store(is_barred && !self.has_ended.load(Ordering::Acquire), Ordering::Release);
        self.unbarred.notify(usize::MAX);
    }

    fn is_barred(&self) -> bool {
        self.is_barred.load(Ordering::Acquire)
    }

    /// Waits until changes pass.
    async fn past_bar(&self) {
        loop {
            let unbarred = self.unbarred.listen();
            if !self.is_barred() {
                return;
            }
            unbarred.await;
        }
    }

    /// Requests go to this disk from now on. The valve must be held, with nothing in flight.
    pub fn exchange(&self, _hold: &Hold, inner: SharedDisk) {
        debug_assert_eq!(self.passage.inside(), 0, "the disk before is still in use");
        self.inner.store(Arc::new(inner));
    }

    /// Answered writes of the disk behind it may be missing from the next disk, which is installed while this
    /// is held: every user of the valve gets a report.
    pub fn lose(&self, _hold: &Hold) {
        self.losses.grow();
    }

    /// As above, for a loss at this time, by the clock of the valve.
    pub fn lose_at(&self, _hold: &Hold, when: Duration) {
        self.losses.grow_at(when);
    }

    /// The bytes that zeros there may move.
    fn moved_by_zeros(&self, span: GuestSpan) -> u64 {
        if self.geometry().fast_zeroes { 0 } else { span.len() }
    }

    /// Enters at once if nothing is limited and the valve is not held.
    #[inline]
    fn begin_at_once(&self) -> Option<Inside<'_>> {
        if self.limits.are_on() { None } else { self.passage.try_enter() }
    }

    /// Enters as soon as it may: a request that moves this many bytes, if it is of a limited kind. Boxed, so
    /// that a request that need not wait does not carry the state for waiting.
    fn begin_in_turn(&self, limited: Option<(Direction, u64)>) -> LocalFuture<'_, Inside<'_>> {
        Box::pin(async move {
            let Some((direction, bytes)) = limited else { return self.passage.enter().await };
            loop {
                // No request has its turn while the disk is held; otherwise all of them would begin at once
                // afterwards.
                drop(self.passage.enter().await);
                self.limits.pass(direction, bytes).await;
                if let Some(inside) = self.passage.try_enter() {
                    return inside;
                }
            }
        })
    }
}

/// A change of the disk, as often as it is tried.
type Change<'a> = Box<dyn Fn(&SharedDisk) -> LocalFuture<'_, Result<()>> + 'a>;

impl Valve {
    /// Makes a change, again and again as long as there is no space for it.
    fn patiently<'a>(
        &'a self,
        limited: Option<(Direction, u64)>,
        change: Change<'a>,
    ) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            let mut limited = limited;
            loop {
                let inside = match self.begin_at_once() {
                    Some(inside) => inside,
                    None => self.begin_in_turn(limited.take()).await,
                };
                let result = change(&self.inner.load_full()).await;
                drop(inside);
                match result {
                    Err(error) if error.kind() == ErrorKind::NoSpace && self.space.is_waited_for() => {
                        self.space.wait(&*self.clock).await;
                    }
                    Ok(()) => {
                        self.space.is_back();
                        return Ok(());
                    }
                    failed => return failed,
                }
            }
        })
    }
}

/// Does `$request` at the disk that is there, once it may begin.
macro_rules! pass {
    ($valve:ident, $limited:expr, $inner:ident => $request:expr) => {
        Box::pin(async move {
            let _inside = match $valve.begin_at_once() {
                Some(inside) => inside,
                None => $valve.begin_in_turn($limited).await,
            };
            let $inner = $valve.inner.load();
            $request.await
        })
    };
}

impl Disk for Valve {
    fn geometry(&self) -> Geometry {
        self.inner.load().geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.load().below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        pass!(self, Some((Direction::Read, buffer.len() as u64)), disk => disk.read(at, buffer))
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        if self.is_barred() {
            return Box::pin(async move {
                self.past_bar().await;
                self.write(at, data, flags).await
            });
        }
        let limited = Some((Direction::Write, data.len() as u64));
        if self.space.is_waited_for() {
            // The bytes may be needed again.
            return self.patiently(limited, Box::new(move |disk| disk.write(at, data.duplicate(), flags)));
        }
        pass!(self, limited, disk => disk.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        if self.space.is_waited_for() {
            return self.patiently(None, Box::new(|disk| disk.flush()));
        }
        pass!(self, None, disk => disk.flush())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        if self.is_barred() {
            return Box::pin(async move {
                self.past_bar().await;
                self.write_zeroes(span, flags).await
            });
        }
        let limited = Some((Direction::Write, self.moved_by_zeros(span)));
        if self.space.is_waited_for() {
            return self.patiently(limited, Box::new(move |disk| disk.write_zeroes(span, flags)));
        }
        pass!(self, limited, disk => disk.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        if self.is_barred() {
            return Box::pin(async move {
                self.past_bar().await;
                self.discard(span, flags).await
            });
        }
        let limited = Some((Direction::Write, 0));
        if self.space.is_waited_for() {
            return self.patiently(limited, Box::new(move |disk| disk.discard(span, flags)));
        }
        pass!(self, limited, disk => disk.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        pass!(self, Some((Direction::Read, 0)), disk => disk.map(span))
    }

    /// One request at the chain that is there: it cannot be exchanged between two of its disks.
    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        pass!(self, Some((Direction::Read, 0)), disk => disk.map_whole(span))
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        Box::pin(async move {
            let Some(_inside) = self.passage.try_enter() else { return false };
            self.inner.load().tend(now).await
        })
    }

    fn filling(&self) -> Option<Filling> {
        self.inner.load().filling()
    }

    /// While the disk is held nothing is kept: a fill waits for nothing.
    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        Box::pin(async move {
            let Some(_inside) = self.passage.try_enter() else { return Ok(Filled::default()) };
            self.inner.load().fill(at, data).await
        })
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        pass!(self, None, disk => disk.room())
    }

    fn losses(&self) -> Option<Arc<Losses>> {
        Some(self.losses.clone())
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move { self.inner.load().close().await })
    }
}

#[cfg(test)]
mod tests;
