//! The valve: every request of every export goes through it, so that a disk can be stopped, slowed and exchanged while it is
//! served.
//!
//! ```text
//!   exports ──► limits: it is this request's turn ──► passage: nobody holds it ──► the disk, whichever it is now
//!                flushes and maps go past                paused, or exchanged
//! ```
//!
//! 1. A disk that is neither limited nor held costs a request two counts on a counter that few cores share, and no lock.
//! 2. A discard counts as a request that moves nothing; zeros do, too, where the disk can make them without writing them.
//! 3. A request that waits holds nothing but its place: how many there can be is the exports' to say.
//! 4. A request that was let through is not stopped any more. Who pauses waits for it, and flushes. What waited meanwhile begins at
//!    the rate of its limits.
//! 5. Work that nobody waits for ([`Disk::tend`]) does not begin while the disk is held.
//! 6. When the server ends it opens for good: what waits is done, at the disk's own pace.

mod limits;
mod passage;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{
    Buffer, Clock, Disk, Error, ErrorKind, Extent, Geometry, GuestOffset, GuestSpan, LocalFuture, Result,
    Room, SharedDisk, WriteFlags, ZeroFlags,
};

use limits::{Direction, Limits};
pub use limits::{Kind, Rate, Settings};
pub use passage::Hold;
use passage::{Inside, Passage};

/// A disk that can be stopped, slowed and exchanged.
pub struct Valve {
    inner: ArcSwap<SharedDisk>,
    limits: Limits,
    passage: Arc<Passage>,
    flow: Mutex<Flow>,
    /// So many pauses were begun, and ended: who waits for one learns that it is no longer his.
    turns: AtomicU64,
    turned: Event,
    has_ended: AtomicBool,
    clock: Arc<dyn Clock>,
}

/// Whether requests go on.
enum Flow {
    Running,
    Pausing(Hold),
    Paused { _hold: Hold, since: Duration },
}

/// Whether requests go on, for who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// They do.
    Running,
    /// New ones wait; those before are still under way, or being flushed.
    Pausing,
    /// Nothing is under way, all is durable, and new requests wait, for so long already.
    Paused(Duration),
}

impl Valve {
    /// Over this disk, open.
    pub fn new(inner: SharedDisk, clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self {
            inner: ArcSwap::from_pointee(inner),
            limits: Limits::new(clock.clone()),
            passage: Arc::default(),
            flow: Mutex::new(Flow::Running),
            turns: AtomicU64::new(0),
            turned: Event::new(),
            has_ended: AtomicBool::new(false),
            clock,
        })
    }

    fn flow(&self) -> MutexGuard<'_, Flow> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether requests go on.
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
    pub fn limits(&self) -> Settings {
        self.limits.settings()
    }

    /// Limits requests, also those that wait already. Once the server ends nothing is limited.
    pub fn limit(&self, settings: Settings) {
        let _flow = self.flow();
        if !self.has_ended.load(Ordering::Acquire) {
            self.limits.set(settings);
        }
    }

    /// Requests that wait for their limits.
    pub fn limited(&self) -> usize {
        self.limits.waiting()
    }

    /// Stops new requests. Returns when none is under way and all that was answered is durable. Pausing twice is legal.
    ///
    /// # Errors
    /// What the flush says; then requests go on. `Closed` when somebody let them go on meanwhile, or the server ends.
    pub async fn pause(&self) -> Result<()> {
        let turn = {
            let mut flow = self.flow();
            if self.has_ended.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::Closed, "the server ends"));
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
        // Once it is resumed, who leaves tells nobody.
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
            // Another who paused it, too, was faster.
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

    /// Waits until somebody has let requests go on.
    async fn turned_from(&self, turn: u64) {
        loop {
            let turned = self.turned.listen();
            if self.turns.load(Ordering::Acquire) != turn {
                return;
            }
            turned.await;
        }
    }

    /// Lets requests go on; true if they had been stopped.
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
        self.limits.set(Settings::default());
    }

    /// Stops new requests until the hold is dropped, beside any pause. Returns when none is under way.
    pub async fn hold(&self) -> Hold {
        let hold = self.passage.hold();
        self.passage.drained().await;
        hold
    }

    /// Requests go to this disk from now on. It must be held, and nothing under way.
    pub fn exchange(&self, _hold: &Hold, inner: SharedDisk) {
        debug_assert_eq!(self.passage.inside(), 0, "somebody still uses the disk before");
        self.inner.store(Arc::new(inner));
    }

    /// The bytes that zeros there may move.
    fn moved_by_zeros(&self, span: GuestSpan) -> u64 {
        if self.geometry().fast_zeroes { 0 } else { span.len() }
    }

    /// Enters at once, where nothing is limited and nobody holds it.
    #[inline]
    fn begin_at_once(&self) -> Option<Inside<'_>> {
        if self.limits.are_on() { None } else { self.passage.try_enter() }
    }

    /// Enters as soon as it may: a request that moves so many bytes, where it is one that is limited. Boxed, so that a request that
    /// need not wait does not carry what it takes to wait.
    fn begin_in_turn(&self, limited: Option<(Direction, u64)>) -> LocalFuture<'_, Inside<'_>> {
        Box::pin(async move {
            let Some((direction, bytes)) = limited else { return self.passage.enter().await };
            loop {
                // Nobody has its turn while the disk is held; otherwise all of them would go on at once afterwards.
                drop(self.passage.enter().await);
                self.limits.pass(direction, bytes).await;
                if let Some(inside) = self.passage.try_enter() {
                    return inside;
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
        pass!(self, Some((Direction::Write, data.len() as u64)), disk => disk.write(at, data, flags))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        pass!(self, None, disk => disk.flush())
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        let limited = Some((Direction::Write, self.moved_by_zeros(span)));
        pass!(self, limited, disk => disk.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        pass!(self, Some((Direction::Write, 0)), disk => disk.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        pass!(self, None, disk => disk.map(span))
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        Box::pin(async move {
            let Some(_inside) = self.passage.try_enter() else { return false };
            self.inner.load().tend(now).await
        })
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        pass!(self, None, disk => disk.room())
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
    use vellum_sim::World;

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
    fn what_waited_while_it_was_paused_begins_at_its_rate() {
        let world = World::new(5);
        let valve = Valve::new(MemoryDisk::new(4096), world.clock());
        valve.limit(Settings::of([("iops-total", 100)]).expect("a limit"));
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
