//! Requests that wait, in every state of the valve.

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

/// A disk whose map does not answer until the test lets it.
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
        assert_eq!(valve.read(GuestOffset::ZERO, Buffer::zeroed(1)).await.expect("it passes").slice()[0], 0);
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
    let tight = Forwarding::new(Tight { memory, is_full: AtomicBool::new(true), tries: AtomicU64::new(0) });
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
