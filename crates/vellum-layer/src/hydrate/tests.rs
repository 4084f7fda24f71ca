//! Copy-on-read and prefetch over a disk in memory, in the simulator.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_lite::future::poll_once;
use vellum_core::{
    Buffer, Clock, Disk, Error, ErrorKind, Extent, Filled, GuestOffset, GuestSpan, LocalFuture, MemoryDisk,
    MemoryStorage, Place, Result, SharedBytes, SharedDisk, WriteFlags, lock,
};
use vellum_sim::{ForwardDisk, Forwarding, World};

mod changed;
mod room;

use changed::Fact;

use super::filler::{Noticed, next_piece};
use super::*;

const SIZE: u64 = 4 << 20;
const BLOCK: u64 = 4096;

/// The disk below: its reads take a while, are counted, and fail or hang where the test says so.
struct Below {
    memory: Arc<MemoryDisk>,
    clock: Arc<dyn Clock>,
    took: Mutex<Duration>,
    reads: Mutex<Vec<GuestSpan>>,
    bad: Mutex<Option<GuestSpan>>,
    hangs: AtomicBool,
    /// Reads of these bytes are not answered.
    hung: Mutex<Option<GuestSpan>>,
    /// Reads complete when they are first asked, as those of an image in memory do.
    is_instant: AtomicBool,
    /// Reads as zero, and says so.
    hole: GuestSpan,
}

impl ForwardDisk for Below {
    fn inner(&self) -> &dyn Disk {
        &*self.memory
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        Box::pin(async move {
            let span = at.span(buffer.len() as u64);
            lock(&self.reads).push(span);
            let took = *lock(&self.took);
            if !self.is_instant.load(SeqCst) {
                self.clock.sleep(took).await;
            }
            while self.hangs.load(SeqCst) || lock(&self.hung).is_some_and(|hung| hung.overlaps(span)) {
                self.clock.sleep(Duration::from_millis(1)).await;
            }
            if lock(&self.bad).is_some_and(|bad| bad.overlaps(span)) {
                return Err(Error::new(ErrorKind::Io, "a bad block of the base"));
            }
            self.memory.read(at, buffer).await
        })
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            let mut extents = self.memory.map(span).await?;
            let hole = span.intersect(self.hole);
            if !hole.is_empty() {
                let all = extents.remove(0);
                let storage = match all.place {
                    Place::Data { storage, .. } => storage,
                    other => panic!("{other:?}"),
                };
                let data = |span: GuestSpan| Extent {
                    span,
                    place: Place::Data {
                        storage: storage.clone(),
                        at: vellum_core::ImageOffset::new(span.start().bytes()),
                    },
                };
                extents = vec![
                    data(GuestSpan::between(span.start(), hole.start())),
                    Extent { span: hole, place: Place::Zero { allocated: false } },
                    data(GuestSpan::between(hole.end(), span.end())),
                ];
                extents.retain(|extent| !extent.span.is_empty());
            }
            Ok(extents)
        })
    }
}

/// The image: it has room for so much before each flush, or for nothing at all.
struct Top {
    memory: Arc<MemoryDisk>,
    room: AtomicU64,
    room_each: u64,
    flushes: AtomicU64,
    maps: AtomicU64,
    is_full: AtomicBool,
    clock: Arc<dyn Clock>,
    /// How long a fill has its room before it has kept anything.
    takes: Mutex<Duration>,
}

impl ForwardDisk for Top {
    fn inner(&self) -> &dyn Disk {
        &*self.memory
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.flushes.fetch_add(1, SeqCst);
        self.room.store(self.room_each, SeqCst);
        self.memory.flush()
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.maps.fetch_add(1, SeqCst);
        self.memory.map(span)
    }

    fn fill(&self, at: GuestOffset, mut data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        Box::pin(async move {
            if self.is_full.load(SeqCst) {
                return Err(Error::new(ErrorKind::NoSpace, "the host is full"));
            }
            let mut sum = Filled::default();
            let (mut at, mut planned) = (at, Vec::new());
            while !data.is_empty() && !sum.wants_flush {
                let block = data.split_to(data.len().min(4096));
                let span = at.span(block.len() as u64);
                at = span.end();
                let map = self.memory.map(span).await?;
                if map.iter().any(|extent| matches!(extent.place, Place::Below)) {
                    match self.room.load(SeqCst) < BLOCK {
                        true => sum.wants_flush = true,
                        false => planned.push((span, block)),
                    }
                    self.room.fetch_sub(if sum.wants_flush { 0 } else { BLOCK }, SeqCst);
                }
            }
            let takes = *lock(&self.takes);
            if !planned.is_empty() && !takes.is_zero() {
                self.clock.sleep(takes).await;
            }
            for (span, block) in planned {
                sum.kept += self.memory.fill(span.start(), block).await?.kept;
            }
            Ok(sum)
        })
    }
}

/// What the guest of a test does.
#[derive(Default)]
struct Script {
    requests: AtomicU64,
    flushes: AtomicU64,
}

impl Guest for Script {
    fn activity(&self) -> Activity {
        Activity { requests: self.requests.load(SeqCst), flushes: self.flushes.load(SeqCst), is_held: false }
    }
}

struct Set {
    world: World,
    below: Arc<Forwarding<Below>>,
    fact: Arc<Fact>,
    tap: Arc<Tap>,
    top: Arc<Forwarding<Top>>,
    guest: Arc<Script>,
    control: Arc<HydrationControl>,
}

fn byte_of(block: u64) -> u8 {
    u8::try_from(block % 251).unwrap() + 1
}

fn set(seed: u64, copy_on_read: bool, room_each: u64) -> Set {
    set_over(seed, copy_on_read, room_each, GuestOffset::ZERO.span(0), byte_of)
}

fn set_over(seed: u64, copy_on_read: bool, room_each: u64, hole: GuestSpan, byte: impl Fn(u64) -> u8) -> Set {
    let world = World::new(seed);
    let bytes: Vec<u8> = (0..SIZE).map(|at| byte(at / BLOCK)).collect();
    let below = Forwarding::new(Below {
        memory: MemoryDisk::holding(&bytes),
        clock: world.clock(),
        took: Mutex::new(Duration::from_millis(1)),
        reads: Mutex::default(),
        bad: Mutex::default(),
        hangs: AtomicBool::new(false),
        hung: Mutex::default(),
        is_instant: AtomicBool::new(false),
        hole,
    });
    let options = TapOptions { copy_on_read, keeps_order: true, ..TapOptions::default() };
    let fact = Arc::new(Fact { memory: MemoryStorage::new("base.raw"), changes: AtomicU64::new(0) });
    let tap = Tap::over(below.clone(), BaseFiles::of(vec![fact.clone()]), options);
    let top = Forwarding::new(Top {
        memory: MemoryDisk::over(SIZE, Some(tap.clone())),
        room: AtomicU64::new(room_each),
        room_each,
        flushes: AtomicU64::new(0),
        maps: AtomicU64::new(0),
        is_full: AtomicBool::new(false),
        clock: world.clock(),
        takes: Mutex::default(),
    });
    tap.is_below(&*top);
    Set { world, below, fact, tap, top, guest: Arc::default(), control: Arc::default() }
}

impl Set {
    fn filler(&self) -> Arc<Filler> {
        Arc::new(Filler {
            tap: self.tap.clone(),
            disk: self.top.clone(),
            aside: self.top.clone(),
            guest: self.guest.clone(),
            clock: self.world.clock(),
            chance: self.world.random(),
            turns: FillerTurns::default(),
            control: self.control.clone(),
        })
    }

    async fn read(&self, at: u64, len: usize) -> Result<Buffer> {
        self.guest.requests.fetch_add(1, SeqCst);
        self.top.read(GuestOffset::new(at), Buffer::zeroed(len)).await
    }

    async fn write(&self, at: u64, byte: u8) -> Result<()> {
        self.guest.requests.fetch_add(1, SeqCst);
        self.top.write(GuestOffset::new(at), Buffer::copy_of(&[byte; 4096]), WriteFlags::default()).await
    }

    /// How much the image itself has.
    async fn own(&self) -> u64 {
        let map = self.top.map(GuestOffset::ZERO.span(SIZE)).await.unwrap();
        map.iter()
            .filter(|extent| !matches!(extent.place, Place::Below))
            .map(|extent| extent.span.len())
            .sum()
    }

    fn base_reads(&self) -> Vec<GuestSpan> {
        lock(&self.below.reads).clone()
    }

    async fn sleep(&self, millis: u64) {
        self.world.sleep(Duration::from_millis(millis)).await;
    }
}

#[test]
fn what_a_guest_reads_comes_into_the_image_and_is_read_from_there() {
    let set = set(1, true, u64::MAX);
    set.world.run(async {
        let filler = set.filler();
        let keeping = set.world.spawn(async move { filler.keep_copies().await });
        let read = set.read(BLOCK + 100, 50).await.unwrap();
        assert!(read.slice().iter().all(|byte| *byte == byte_of(1)));
        set.sleep(5).await;
        assert_eq!(set.own().await, BLOCK, "the whole block, and no more");
        set.read(BLOCK, 4096).await.unwrap();
        assert_eq!(set.base_reads(), [GuestOffset::new(BLOCK).span(BLOCK)]);
        assert_eq!((set.control.counts().filled, set.top.flushes.load(SeqCst)), (BLOCK, 0));
        set.control.end();
        keeping.await;
    });
}

#[test]
fn a_block_that_several_miss_is_fetched_once() {
    for seed in 0..20 {
        let set = set(seed, true, u64::MAX);
        set.world.run(async {
            let reads = (0..8u64).map(|reader| {
                let set = &set;
                Box::pin(async move {
                    set.sleep(reader % 2).await;
                    let at = reader * 512;
                    let read = set.read(at, 6000).await.unwrap();
                    let right = (at..at + 6000).map(|at| byte_of(at / BLOCK));
                    assert!(read.slice().iter().copied().eq(right), "reader {reader}");
                })
            });
            vellum_core::join_all(reads).await;
            let bytes: u64 = set.base_reads().iter().map(|span| span.len()).sum();
            assert_eq!(bytes, 3 * BLOCK, "{:?}", set.base_reads());
        });
    }
}

/// The copies that guests have left wait for their fills, and nothing below ever makes a reader wait: the prefetcher leaves
/// the only worker to those who copy them.
#[test]
fn a_prefetcher_that_finds_only_copies_that_wait_lets_them_be_filled() {
    let set = set(13, true, u64::MAX);
    set.below.is_instant.store(true, SeqCst);
    set.world.run(async {
        for block in 0..SIZE / BLOCK {
            set.read(block * BLOCK, 4096).await.unwrap();
        }
        assert_eq!(set.own().await, 0, "nobody takes the copies yet");
        set.control.set_prefetch(PrefetchLimits::default(), None);
        let filler = set.filler();
        let keeping = filler.keep_copies();
        let prefetching = async {
            let outcome = filler.prefetch().await;
            set.control.end();
            outcome
        };
        // As the server does: one task for both, and the prefetcher is asked first.
        let (outcome, ()) = futures_lite::future::zip(prefetching, keeping).await;
        assert_eq!((outcome, set.own().await), (Outcome::Complete, SIZE));
        let bytes: u64 = set.base_reads().iter().map(|span| span.len()).sum();
        assert_eq!(bytes, SIZE, "nothing is fetched twice");
    });
}

/// A guest that changes the buffer of a read, before the answer and after it, changes its own copy alone.
#[test]
fn what_is_filled_was_never_in_the_hands_of_the_guest() {
    let set = set(2, true, u64::MAX);
    set.world.run(async {
        let memory = SharedBytes::zeroed(4096);
        let mut read = set.top.read(GuestOffset::ZERO, memory.lend(&[(0, 4096)]));
        assert!(poll_once(&mut read).await.is_none());
        memory.set(0, &[0xEE; 4096]);
        read.await.unwrap();
        memory.set(0, &[0xEE; 4096]);
        let filler = set.filler();
        let keeping = set.world.spawn(async move { filler.keep_copies().await });
        set.sleep(5).await;
        assert_eq!(set.own().await, BLOCK);
        let again = set.read(0, 4096).await.unwrap();
        assert!(again.slice().iter().all(|byte| *byte == byte_of(0)), "it is what the disk below has");
        set.control.end();
        keeping.await;
    });
}

#[test]
fn a_request_fails_only_where_its_own_bytes_are_concerned() {
    let set = set(4, true, u64::MAX);
    *lock(&set.below.bad) = Some(GuestOffset::new(1024).span(512));
    set.world.run(async {
        let read = set.read(0, 1024).await.expect("its own bytes are well");
        assert!(read.slice().iter().all(|byte| *byte == byte_of(0)));
        assert!(set.read(512, 1024).await.is_err());
        assert!(set.tap.take_copy().is_none(), "there is no copy of it");
    });
}

#[test]
fn everything_is_prefetched_what_is_zero_is_not_and_the_order_is_the_recorded_one() {
    let hole = GuestOffset::new(1 << 20).span(1 << 20);
    // The third MiB is zero, too, but nobody says so.
    let quiet = GuestOffset::new(2 << 20).span(1 << 20);
    let zero = |block: u64| {
        hole.contains(GuestOffset::new(block * BLOCK)) || quiet.contains(GuestOffset::new(block * BLOCK))
    };
    let set = set_over(5, false, u64::MAX, hole, |block| if zero(block) { 0 } else { byte_of(block) });
    let trace = vec![Run { at: 3 << 20, len: 100 }, Run { at: 7, len: 1 }, Run { at: 1 << 40, len: 5 }];
    set.control.set_prefetch(PrefetchLimits::default(), Some(trace.into()));
    set.world.run(async {
        let outcome = set.filler().prefetch().await;
        assert_eq!(outcome, Outcome::Complete);
        assert_eq!(set.own().await, 2 << 20, "what is not zero");
        let reads = set.base_reads();
        assert_eq!(reads[..2], [GuestOffset::new(3 << 20).span(BLOCK), GuestOffset::ZERO.span(BLOCK)]);
        assert!(reads.iter().all(|read| !read.overlaps(hole)), "what is said to be zero is not read");
        let counts = set.control.counts();
        assert_eq!((counts.prefetched, counts.commits, set.top.flushes.load(SeqCst)), (2 << 20, 0, 0));
        for block in 0..SIZE / BLOCK {
            let read = set.read(block * BLOCK, 4096).await.unwrap();
            let byte = if zero(block) { 0 } else { byte_of(block) };
            assert!(read.slice().iter().all(|its| *its == byte), "block {block}");
        }
        assert_eq!(
            set.base_reads().len(),
            reads.len() + 256 * 8,
            "only what is said to be zero is asked for below"
        );
    });
}

/// A guest boots: it is at work all the time. What a trace names is there before it would have been copied beside any other
/// guest, and what follows waits again.
#[test]
fn what_a_trace_names_is_copied_beside_a_guest_at_work_and_nothing_else_is_hurried() {
    const TRACED: u64 = 40;
    let set = set(10, false, u64::MAX);
    *lock(&set.below.took) = Duration::from_millis(20);
    let trace: Vec<Run> =
        (0..TRACED).map(|run| Run { at: SIZE - (run + 1) * 16 * BLOCK, len: 4096 }).collect();
    set.control.set_prefetch(PrefetchLimits::default(), Some(trace.into()));
    set.world.run(async {
        let filler = set.filler();
        let prefetching = set.world.spawn(async move { filler.prefetch().await });
        for _ in 0..100 {
            set.guest.requests.fetch_add(1, SeqCst);
            set.sleep(5).await;
        }
        // 40 pieces of 20 ms, four at a time, take 200 ms. With rests it would be 20 s. In what is left of the half second
        // there is time for one piece of what follows.
        let prefetched = set.control.counts().prefetched;
        assert!(prefetched >= TRACED * BLOCK, "{prefetched}");
        assert!(prefetched <= TRACED * BLOCK + (512 << 10), "{prefetched}");
        set.control.end();
        prefetching.await;
    });
}

/// The disk below hangs under the prefetcher: a guest writes what is being fetched, and keeps what it has written.
#[test]
fn a_hung_base_holds_up_no_write() {
    for seed in 0..20 {
        let set = set(seed, true, u64::MAX);
        set.below.hangs.store(true, SeqCst);
        set.control.set_prefetch(PrefetchLimits::default(), None);
        set.world.run(async {
            let filler = set.filler();
            let prefetching = set.world.spawn(async move { filler.prefetch().await });
            set.sleep(50).await;
            for block in [0, 7, 300] {
                set.write(block * BLOCK, 0xAA).await.unwrap();
            }
            assert!(!set.base_reads().is_empty() && set.own().await == 3 * BLOCK);
            set.below.hangs.store(false, SeqCst);
            assert_eq!(prefetching.await, Outcome::Complete);
            assert_eq!(set.own().await, SIZE);
            for block in 0..SIZE / BLOCK {
                let byte = if [0, 7, 300].contains(&block) { 0xAA } else { byte_of(block) };
                assert_eq!(set.read(block * BLOCK, 4096).await.unwrap().slice()[0], byte, "block {block}");
            }
        });
    }
}

/// One piece at a time is fetched in the whole process, and one is not answered: the others are, and who ends need not wait.
#[test]
fn a_hung_base_keeps_no_other_disk_from_being_filled_or_closed() {
    let set = set(16, false, u64::MAX);
    let hung = GuestOffset::ZERO.span(512 << 10);
    *lock(&set.below.hung) = Some(hung);
    set.control.set_prefetch(PrefetchLimits::default(), None);
    set.world.run(async {
        let filler = Filler { turns: FillerTurns::of(1), ..Arc::into_inner(set.filler()).unwrap() };
        let turns = filler.turns.clone();
        let prefetching = set.world.spawn(async move { filler.prefetch().await });
        set.sleep(100).await;
        // Of two others, one is closed before its turn has come.
        let other = |control: &Arc<HydrationControl>| {
            control.set_prefetch(PrefetchLimits::default(), None);
            let (turns, control) = (turns.clone(), control.clone());
            Filler { turns, control, ..Arc::into_inner(set.filler()).unwrap() }
        };
        let controls = [Arc::new(HydrationControl::default()), Arc::new(HydrationControl::default())];
        let [closed, filled] = controls.each_ref().map(|control| {
            let filler = other(control);
            set.world.spawn(async move { filler.prefetch().await })
        });
        set.sleep(100).await;
        controls[0].end();
        set.sleep(100).await;
        assert!(closed.is_finished() && set.own().await == 0);
        set.sleep(60_000).await;
        assert_eq!(set.own().await, SIZE - hung.len());
        assert_eq!(set.control.progress().state, State::NoAnswer);
        controls[1].end();
        assert_eq!(filled.await, Outcome::Ended);
        set.control.set_paused(true);
        assert_eq!(set.control.progress().state, State::Paused);
        *lock(&set.below.hung) = None;
        set.sleep(100).await;
        assert_eq!(set.control.progress().state, State::Paused);
        set.control.set_prefetch(PrefetchLimits::default(), None);
        assert_eq!(prefetching.await, Outcome::Complete);
    });
}

/// Beside a guest at work one piece is copied at a time, and one is not answered: the others are copied, one at a time.
#[test]
fn a_piece_that_hangs_beside_a_busy_guest_keeps_no_other_piece_from_being_copied() {
    let set = set(17, false, u64::MAX);
    let hung = GuestOffset::ZERO.span(512 << 10);
    *lock(&set.below.hung) = Some(hung);
    set.guest.requests.fetch_add(1, SeqCst);
    set.control.set_prefetch(PrefetchLimits::default(), None);
    set.world.run(async {
        let filler = set.filler();
        let prefetching = set.world.spawn(async move { filler.prefetch().await });
        for _ in 0..4000 {
            set.guest.requests.fetch_add(1, SeqCst);
            set.sleep(10).await;
        }
        assert_eq!(set.own().await, SIZE - hung.len());
        *lock(&set.below.hung) = None;
        assert_eq!(prefetching.await, Outcome::Complete);
    });
}

#[test]
fn a_full_host_and_a_bad_block_are_said_and_tried_again() {
    let set = set(6, true, u64::MAX);
    set.top.is_full.store(true, SeqCst);
    set.control.set_prefetch(PrefetchLimits::default(), None);
    set.world.run(async {
        let filler = set.filler();
        let prefetching = set.world.spawn(async move { filler.prefetch().await });
        set.sleep(500).await;
        assert_eq!(set.control.progress().state, State::NoSpace);
        let read = set.read(0, 4096).await.unwrap();
        assert_eq!(read.slice()[0], byte_of(0), "the guest is not affected");
        set.write(0, 9).await.unwrap();
        *lock(&set.below.bad) = Some(GuestOffset::new(1 << 20).span(512));
        set.top.is_full.store(false, SeqCst);
        set.sleep(5000).await;
        let progress = set.control.progress();
        assert_eq!(progress.state, State::Failed);
        assert!(progress.last_error.unwrap().chain().contains("a bad block"));
        assert_eq!(set.own().await, SIZE - (512 << 10), "all but the piece that has it");
        *lock(&set.below.bad) = None;
        assert_eq!(prefetching.await, Outcome::Complete);
        assert!(set.control.counts().errors >= 2);
    });
}

/// The first MiB cannot be read: more pieces than a round bears errors. What follows is copied all the same.
#[test]
fn a_bad_start_of_the_base_keeps_nothing_behind_it_from_being_copied() {
    let set = set(14, false, u64::MAX);
    let bad = GuestOffset::ZERO.span(2 << 20);
    *lock(&set.below.bad) = Some(bad);
    // Slow enough for the smallest pieces: there are 32 bad ones.
    *lock(&set.below.took) = Duration::from_millis(150);
    set.control.set_prefetch(PrefetchLimits::default(), None);
    set.world.run(async {
        let filler = set.filler();
        let prefetching = set.world.spawn(async move { filler.prefetch().await });
        set.sleep(60_000).await;
        assert_eq!(set.own().await, SIZE - bad.len());
        let reads = set.base_reads().len();
        set.sleep(60_000).await;
        assert!(set.base_reads().len() < reads + 60, "it is tried again, and seldom");
        *lock(&set.below.bad) = None;
        assert_eq!(prefetching.await, Outcome::Complete);
    });
}

/// Each run of the trace names the whole disk.
#[test]
fn a_trace_that_names_everything_again_and_again_is_walked_once() {
    let set = set(15, false, u64::MAX);
    set.below.is_instant.store(true, SeqCst);
    let trace = vec![Run { at: 0, len: 1 << 62 }; 1 << 16];
    set.control.set_prefetch(PrefetchLimits::default(), Some(trace.into()));
    set.world.run(async {
        assert_eq!(set.filler().prefetch().await, Outcome::Complete);
        let maps = set.top.maps.load(SeqCst);
        assert!(maps < 100, "the image was asked {maps} times what it has");
    });
}

#[test]
fn fills_wait_for_the_flushes_of_the_guest_and_for_an_idle_one_no_longer_than_seconds() {
    // A guest that flushes every 10 ms.
    let set = set(7, true, 64 << 10);
    set.control.set_prefetch(PrefetchLimits::default(), None);
    set.world.run(async {
        let filler = set.filler();
        let prefetching = set.world.spawn(async move { filler.prefetch().await });
        while !prefetching.is_finished() {
            set.sleep(10).await;
            set.top.flush().await.unwrap();
            set.guest.flushes.fetch_add(1, SeqCst);
        }
        assert_eq!((prefetching.await, set.control.counts().commits), (Outcome::Complete, 0));
    });
    // One that does nothing, and one that is in a hurry.
    for (hurries, seconds) in [(false, 2), (true, 0)] {
        let set = self::set(8, true, 64 << 10);
        set.control.set_prefetch(PrefetchLimits::default(), None);
        let _hurry = hurries.then(|| set.control.hurry());
        set.world.run(async {
            assert_eq!(set.filler().prefetch().await, Outcome::Complete);
        });
        let commits = set.control.counts().commits;
        assert_eq!(commits, set.top.flushes.load(SeqCst));
        assert!((60..=64).contains(&commits), "{commits}");
        assert_eq!(set.world.now().as_secs(), seconds, "it waits once");
    }
}

#[test]
fn it_hurries_as_long_as_anybody_waits_for_it() {
    let control = HydrationControl::default();
    let first = control.hurry();
    let second = control.hurry();
    drop(first);
    assert!(control.hurries());
    drop(second);
    assert!(!control.hurries());
}

#[test]
fn whose_flush_is_waited_for() {
    let millis = Duration::from_millis;
    for (request_at, flush_at, now, may) in [
        (0, 0, 1999, false),
        (0, 0, 2000, true),
        (1950, 0, 2000, false),
        (9990, 0, 9999, false),
        (9999, 0, 10_000, true),
        (5000, 5000, 6000, false),
    ] {
        let mut noticed = Noticed::new(Activity::default(), Duration::ZERO);
        let mut events = [(request_at, true), (flush_at, false)];
        events.sort_unstable();
        let mut activity = Activity::default();
        for (at, is_request) in events.into_iter().filter(|(at, _)| *at > 0) {
            activity.requests += 1;
            activity.flushes += u64::from(!is_request);
            noticed.look(activity, millis(at));
        }
        assert_eq!(noticed.may_flush(millis(now)), may, "{request_at} {flush_at} {now}");
    }
}

#[test]
fn a_pause_ends_it_for_now_and_a_word_begins_it_again() {
    let set = set(9, true, u64::MAX);
    *lock(&set.below.took) = Duration::from_millis(100);
    let limits =
        PrefetchLimits { base: SideLimits { upper: Some(1 << 20), lower: 0 }, ..PrefetchLimits::default() };
    set.control.set_prefetch(limits, None);
    set.world.run(async {
        let filler = set.filler();
        let prefetching = set.world.spawn(async move { filler.prefetch().await });
        set.sleep(1500).await;
        set.control.set_paused(true);
        set.sleep(1000).await;
        let (own, progress) = (set.own().await, set.control.progress());
        assert_eq!(progress.state, State::Paused);
        assert_eq!(progress.missing, Some(SIZE - own));
        assert!((1 << 20..=3 << 20).contains(&own), "{own}");
        set.sleep(10_000).await;
        assert_eq!(set.own().await, own);
        set.control.set_prefetch(PrefetchLimits::default(), None);
        assert_eq!(prefetching.await, Outcome::Complete);
    });
    let other = self::set(10, true, u64::MAX);
    other.control.set_prefetch(limits, None);
    other.world.run(async {
        let filler = other.filler();
        let prefetching = other.world.spawn(async move { filler.prefetch().await });
        other.sleep(500).await;
        other.control.end();
        assert_eq!(prefetching.await, Outcome::Ended);
    });
}

/// A guest that always has a request in flight: the prefetcher has a small share of the time, and a piece at a time.
#[test]
fn beside_a_busy_guest_one_piece_is_fetched_at_a_time_and_seldom() {
    let set = set(11, false, u64::MAX);
    *lock(&set.below.took) = Duration::from_millis(10);
    set.control.set_prefetch(PrefetchLimits::default(), None);
    set.world.run(async {
        let filler = set.filler();
        let prefetching = set.world.spawn(async move { filler.prefetch().await });
        let mut at = 0;
        for _ in 0..1000 {
            set.guest.requests.fetch_add(1, SeqCst);
            set.sleep(1).await;
            at += 1;
        }
        assert_eq!(at, 1000);
        let reads = set.base_reads().len();
        // The four that began while it was idle, and then one in 250 ms.
        assert!((4..=9).contains(&reads), "{reads}");
        assert_eq!(prefetching.await, Outcome::Complete);
    });
}

#[test]
fn a_disk_is_whole_when_nothing_is_read_from_below() {
    let set = set(12, true, u64::MAX);
    let top: SharedDisk = set.top.clone();
    set.world.run(async {
        assert!(!is_whole(&top, &set.tap, &|| false).await.unwrap());
        set.control.set_prefetch(PrefetchLimits::default(), None);
        set.filler().prefetch().await;
        assert!(is_whole(&top, &set.tap, &|| false).await.unwrap());
    });
}

#[test]
fn pieces_are_as_large_as_the_disk_below_is_fast() {
    let millis = Duration::from_millis;
    for (bytes, took, next) in [
        (512 << 10, 1, 512 << 10),
        (256 << 10, 24, 512 << 10),
        (256 << 10, 25, 256 << 10),
        (256 << 10, 100, 256 << 10),
        (256 << 10, 101, 128 << 10),
        (64 << 10, 5000, 64 << 10),
    ] {
        assert_eq!(next_piece(bytes, millis(took)), next, "{bytes} {took}");
    }
}
