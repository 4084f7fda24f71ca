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
mod tests {
    use std::future::pending;

    use futures_lite::future::{block_on, poll_once};
    use vellum_core::MemoryDisk;
    use vellum_sim::{ForwardDisk, Forwarding, World};

    use super::*;

    /// No time passes.
    struct Still;

    impl Clock for Still {
        fn now(&self) -> Duration {
            Duration::ZERO
        }

        fn sleep(&self, _wait: Duration) -> LocalFuture<'static, ()> {
            Box::pin(pending())
        }
    }

    fn valve(size: u64) -> Arc<Valve> {
        Valve::new(MemoryDisk::new(size), Arc::new(Still))
    }

    fn write(valve: &Valve, byte: u8) -> LocalFuture<'_, Result<()>> {
        valve.write(GuestOffset::ZERO, Buffer::copy_of(&[byte; 512]), WriteFlags::default())
    }

    /// A disk whose map is waited for until it is told.
    struct Late {
        disk: Arc<MemoryDisk>,
        is_told: AtomicBool,
    }

    impl ForwardDisk for Late {
        fn inner(&self) -> &dyn Disk {
            &*self.disk
        }

        fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
            Box::pin(async move {
                let is_told = |_: &mut std::task::Context<'_>| match self.is_told.load(Ordering::SeqCst) {
                    true => std::task::Poll::Ready(()),
                    false => std::task::Poll::Pending,
                };
                std::future::poll_fn(is_told).await;
                self.disk.map(span).await
            })
        }
    }

    #[test]
    fn a_chain_is_not_exchanged_in_the_middle_of_its_map() {
        let below = Forwarding::new(Late { disk: MemoryDisk::new(4096), is_told: false.into() });
        let valve = Valve::new(MemoryDisk::over(4096, Some(below.clone())), Arc::new(Still));
        block_on(async {
            let mut map = valve.map_whole(GuestOffset::ZERO.span(4096));
            assert!(poll_once(&mut map).await.is_none(), "it asks the disk below");
            let mut hold = Box::pin(valve.hold());
            assert!(poll_once(&mut hold).await.is_none(), "it is under way");
            below.is_told.store(true, Ordering::SeqCst);
            let extents = map.await.expect("a map");
            assert_eq!((extents.len(), extents[0].depth), (1, 1));
            let hold = hold.await;
            let mut late = valve.map_whole(GuestOffset::ZERO.span(4096));
            assert!(poll_once(&mut late).await.is_none(), "it is held");
            valve.exchange(&hold, MemoryDisk::new(4096));
            drop(hold);
            assert_eq!(late.await.expect("a map")[0].depth, 0, "of the chain that came meanwhile");
        });
    }

    #[test]
    fn a_paused_disk_answers_when_it_is_resumed() {
        let valve = valve(4096);
        block_on(async {
            write(&valve, 1).await.expect("it is open");
            valve.pause().await.expect("nothing is under way");
            valve.pause().await.expect("twice is once");
            assert_eq!(valve.state(), State::Paused(Duration::ZERO));
            let mut waits = write(&valve, 2);
            assert!(poll_once(&mut waits).await.is_none());
            let mut flush = valve.flush();
            assert!(poll_once(&mut flush).await.is_none());
            assert!(!valve.tend(Duration::ZERO).await, "and nothing is tended");
            assert_eq!((valve.held(), valve.geometry().size), (2, 4096));
            assert!(valve.resume());
            assert!(!valve.resume(), "it goes on already");
            waits.await.expect("now");
            flush.await.expect("now");
            let read = valve.read(GuestOffset::ZERO, Buffer::zeroed(1)).await.expect("now");
            assert_eq!((read.slice()[0], valve.held(), valve.state()), (2, 0, State::Running));
        });
    }

    #[test]
    fn changes_of_a_barred_disk_wait_and_nothing_else_does() {
        let valve = valve(4096);
        block_on(async {
            valve.bar(true);
            let (mut waits, span) = (write(&valve, 1), GuestOffset::ZERO.span(512));
            let mut zeros = valve.write_zeroes(span, ZeroFlags::default());
            let mut discard = valve.discard(span, WriteFlags::default());
            assert!(poll_once(&mut waits).await.is_none() && poll_once(&mut zeros).await.is_none());
            assert!(poll_once(&mut discard).await.is_none());
            valve.flush().await.expect("it passes");
            assert_eq!(
                valve.read(GuestOffset::ZERO, Buffer::zeroed(1)).await.expect("it passes").slice()[0],
                0
            );
            // The disk can be exchanged meanwhile.
            let hold = valve.hold().await;
            let next = MemoryDisk::new(4096);
            valve.exchange(&hold, next.clone());
            valve.bar(false);
            drop(hold);
            waits.await.expect("now");
            assert_eq!(next.read(GuestOffset::ZERO, Buffer::zeroed(1)).await.expect("read").slice()[0], 1);
            zeros.await.expect("now");
            discard.await.expect("now");
            valve.bar(true);
            let mut late = write(&valve, 2);
            assert!(poll_once(&mut late).await.is_none());
            valve.end();
            late.await.expect("the server ends");
        });
    }

    #[test]
    fn who_pauses_waits_for_what_is_under_way_or_hears_that_it_was_resumed() {
        let valve = valve(4096);
        block_on(async {
            let inside = valve.passage.try_enter().expect("it is open");
            let mut pause = Box::pin(valve.pause());
            let mut again = Box::pin(valve.pause());
            assert!(poll_once(&mut pause).await.is_none() && poll_once(&mut again).await.is_none());
            assert_eq!(valve.state(), State::Pausing);
            assert!(valve.resume());
            drop(inside);
            let error = pause.await.expect_err("somebody resumed it");
            assert!(error.kind() == ErrorKind::Closed && again.await.is_err(), "{error:?}");
            assert_eq!(valve.state(), State::Running);
            let inside = valve.passage.try_enter().expect("it is open");
            let mut pause = Box::pin(valve.pause());
            let mut again = Box::pin(valve.pause());
            assert!(poll_once(&mut pause).await.is_none() && poll_once(&mut again).await.is_none());
            drop(inside);
            pause.await.expect("nothing is under way any more");
            again.await.expect("for both");
            assert_eq!(valve.state(), State::Paused(Duration::ZERO));
        });
    }

    #[test]
    fn a_disk_that_cannot_be_flushed_is_not_paused() {
        let valve = valve(4096);
        block_on(async {
            valve.close().await.expect("closed");
            valve.pause().await.expect_err("a closed disk");
            assert_eq!((valve.state(), valve.held()), (State::Running, 0));
            write(&valve, 1).await.expect_err("answered, not held");
        });
    }

    #[test]
    fn a_disk_beside_it_waits_where_it_waits() {
        let valve = valve(4096);
        let beside = valve.beside(MemoryDisk::new(4096));
        let read = || beside.read(GuestOffset::ZERO, Buffer::zeroed(512));
        block_on(async {
            valve.pause().await.expect("nothing is under way");
            let mut waits = read();
            assert!(poll_once(&mut waits).await.is_none());
            assert_eq!(valve.held(), 1);
            valve.resume();
            waits.await.expect("now");
            valve.limit(RateLimits::of([("iops-total", 1)]).expect("a limit"));
            read().await.expect("the first");
            let mut waits = read();
            assert!(poll_once(&mut waits).await.is_none());
            assert_eq!(valve.limited(), 1);
        });
    }

    #[test]
    fn the_end_lets_all_go_on() {
        let valve = valve(4096);
        block_on(async {
            valve.pause().await.expect("nothing is under way");
            let mut waits = write(&valve, 2);
            assert!(poll_once(&mut waits).await.is_none());
            valve.end();
            waits.await.expect("it is done");
            assert_eq!(valve.pause().await.expect_err("it ends").kind(), ErrorKind::Closed);
            write(&valve, 3).await.expect("it is open for good");
        });
    }

    #[test]
    fn what_waits_goes_to_the_disk_that_came_meanwhile() {
        let valve = valve(4096);
        block_on(async {
            valve.pause().await.expect("nothing is under way");
            let hold = valve.hold().await;
            let mut waits = write(&valve, 7);
            assert!(poll_once(&mut waits).await.is_none());
            let larger = MemoryDisk::new(8192);
            valve.exchange(&hold, larger.clone());
            assert_eq!(valve.geometry().size, 8192);
            valve.resume();
            assert!(poll_once(&mut waits).await.is_none(), "it is still held");
            drop(hold);
            waits.await.expect("now");
            let read = larger.read(GuestOffset::ZERO, Buffer::zeroed(1)).await.expect("read");
            assert_eq!(read.slice()[0], 7);
        });
    }

    #[test]
    fn a_flush_that_waited_while_writes_were_lost_is_not_answered_well() {
        let valve = valve(4096);
        let losses = vellum_core::Disk::losses(&*valve).expect("it has them");
        let session = vellum_core::witnessed(valve.clone(), Some(&losses.witness()));
        block_on(async {
            session.flush().await.expect("nothing was lost");
            let hold = valve.hold().await;
            let mut flush = session.flush();
            assert!(poll_once(&mut flush).await.is_none());
            valve.lose(&hold);
            valve.exchange(&hold, MemoryDisk::new(4096));
            drop(hold);
            flush.await.expect_err("what was written before is gone");
            session.flush().await.expect("it has been told");
        });
    }

    /// A disk of memory that has space, or not.
    struct Tight {
        memory: Arc<MemoryDisk>,
        is_full: AtomicBool,
        tries: AtomicU64,
    }

    impl ForwardDisk for Tight {
        fn inner(&self) -> &dyn Disk {
            &*self.memory
        }

        fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
            self.tries.fetch_add(1, Ordering::SeqCst);
            if self.is_full.load(Ordering::SeqCst) {
                return Box::pin(std::future::ready(Err(Error::new(ErrorKind::NoSpace, "full"))));
            }
            self.memory.write(at, data, flags)
        }
    }

    /// Three writes of one byte each to a full disk that holds them; what `then` does; their answers.
    fn held_for_space(
        then: impl AsyncFnOnce(&Tight, &Valve),
    ) -> (Vec<Result<()>>, Arc<Forwarding<Tight>>, Duration) {
        let world = World::new(5);
        let memory = MemoryDisk::new(4096);
        let tight =
            Forwarding::new(Tight { memory, is_full: AtomicBool::new(true), tries: AtomicU64::new(0) });
        let valve = Valve::new(tight.clone(), world.clock());
        valve.hold_when_full(true);
        let answers = world.run(async {
            let mut writes = Vec::new();
            for number in 0..3u8 {
                let valve = valve.clone();
                writes.push(world.spawn(async move {
                    let at = GuestOffset::new(u64::from(number) * 512);
                    valve.write(at, Buffer::copy_of(&[number + 1; 512]), WriteFlags::default()).await
                }));
            }
            world.sleep(Duration::from_secs(10)).await;
            assert_eq!((valve.waiting_for_space(), valve.state()), (3, State::Running));
            let tries = tight.tries.load(Ordering::SeqCst);
            assert!((10..=16).contains(&tries), "one of them tries each second: {tries}");
            valve.read(GuestOffset::ZERO, Buffer::zeroed(512)).await.expect("reads go on");
            then(&tight, &valve).await;
            let mut answers = Vec::new();
            for write in writes {
                answers.push(write.await);
            }
            answers
        });
        assert_eq!(valve.waiting_for_space(), 0);
        (answers, tight, world.now())
    }

    #[test]
    fn requests_wait_for_space_and_go_on_by_themselves() {
        let (answers, tight, took) =
            held_for_space(async |tight, _| tight.is_full.store(false, Ordering::SeqCst));
        assert!(answers.iter().all(Result::is_ok) && took < Duration::from_secs(12), "{answers:?} {took:?}");
        let read = block_on(tight.read(GuestOffset::ZERO, Buffer::zeroed(1536))).expect("read");
        assert_eq!([0, 512, 1024].map(|at| read.slice()[at]), [1, 2, 3], "each with its own bytes");
    }

    #[test]
    fn a_disk_without_space_is_paused_and_told_to_try_again() {
        let (answers, _, _) = held_for_space(async |tight, valve| {
            valve.pause().await.expect("who waits for space is not under way");
            tight.is_full.store(false, Ordering::SeqCst);
            assert!(valve.try_again());
            assert!(valve.resume());
        });
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    }

    #[test]
    fn what_waits_for_space_fails_when_the_server_ends() {
        let (answers, _, _) = held_for_space(async |_, valve| {
            valve.end();
            valve.hold_when_full(true);
        });
        let kinds: Vec<_> = answers.iter().map(|answer| answer.as_ref().expect_err("no").kind()).collect();
        assert_eq!(kinds, [ErrorKind::NoSpace; 3]);
    }

    #[test]
    fn questions_where_data_is_count_as_requests() {
        let world = World::new(6);
        let valve = Valve::new(MemoryDisk::new(4096), world.clock());
        valve.limit(RateLimits::of([("iops-read", 100)]).expect("a limit"));
        world.run(async {
            for _ in 0..50 {
                valve.map(GuestOffset::ZERO.span(4096)).await.expect("a map");
            }
            // The bucket holds 11.
            assert!(world.now() >= Duration::from_millis(380), "50 took {:?}", world.now());
        });
    }

    #[test]
    fn what_waited_while_it_was_paused_begins_at_its_rate() {
        let world = World::new(5);
        let valve = Valve::new(MemoryDisk::new(4096), world.clock());
        valve.limit(RateLimits::of([("iops-total", 100)]).expect("a limit"));
        world.run(async {
            let mut tasks = Vec::new();
            for _ in 0..60 {
                let valve = valve.clone();
                let begun = async move { write(&valve, 1).await.map(|()| valve.clock.now()) };
                tasks.push(world.spawn(begun));
            }
            world.sleep(Duration::from_millis(100)).await;
            valve.pause().await.expect("nothing is under way");
            // Long enough for all of them to have had their turn.
            world.sleep(Duration::from_secs(2)).await;
            assert!(valve.held() > 0, "they wait for the pause, too");
            let resumed = world.now();
            valve.resume();
            let mut late = 0;
            for task in tasks {
                let done = task.await.expect("it is resumed");
                late += usize::from(done > resumed + Duration::from_millis(50));
            }
            // The bucket holds 11, and 5 more come in 50 ms; 20 or 21 were done before the pause.
            assert!((22..=28).contains(&late), "{late} of 60 waited for their turn");
            assert!(world.now() < resumed + Duration::from_secs(1));
        });
    }
}
