//! The engine over a scripted transport, in virtual time.

use std::cell::Cell;
use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use async_executor::Executor;
use futures_lite::future::{block_on, poll_once};
use vellum_core::{Random, try_join_all};

use futures_util::future::FutureExt as _;
use futures_util::stream;

use super::*;
use crate::silence::{SILENCE_MAX, Task};

const SECOND: Duration = Duration::from_secs(1);

/// A clock that moves when nothing else can, and the tasks.
#[derive(Default)]
struct World {
    now: Mutex<Duration>,
    sleepers: Mutex<Vec<(Duration, Waker)>>,
    tasks: Executor<'static>,
    chance: AtomicU64,
}

struct Sleep(Arc<World>, Duration);

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if *lock(&self.0.now) >= self.1 {
            return Poll::Ready(());
        }
        lock(&self.0.sleepers).push((self.1, context.waker().clone()));
        Poll::Pending
    }
}

#[derive(Clone)]
struct Here(Arc<World>);

impl Ground for Here {
    fn now(&self) -> Duration {
        *lock(&self.0.now)
    }

    fn sleep(&self, time: Duration) -> Task<()> {
        Box::pin(Sleep(self.0.clone(), self.now() + time))
    }

    fn chance(&self) -> u64 {
        self.0.chance.fetch_add(7919, Ordering::Relaxed)
    }

    fn spawn(&self, task: Task<()>) {
        self.0.tasks.spawn(task).detach();
    }
}

impl World {
    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        loop {
            if let Some(value) = block_on(poll_once(&mut future)) {
                return value;
            }
            let mut has_moved = false;
            while self.tasks.try_tick() {
                has_moved = true;
            }
            if has_moved {
                continue;
            }
            let mut sleepers = lock(&self.sleepers);
            let next = sleepers.iter().map(|(until, _)| *until).min().expect("something will happen");
            let mut now = lock(&self.now);
            *now = next.max(*now);
            sleepers.extract_if(.., |(until, _)| *until <= *now).for_each(|(_, waker)| waker.wake());
        }
    }
}

#[derive(Clone)]
enum Act {
    /// The bytes, after this long.
    After(Duration),
    Passing,
    Final,
    Short,
    Never,
    /// The bytes in parts of this length, each after this long; after this number of parts, nothing more comes.
    Parts(usize, Duration, usize),
}

/// Answers by a script; after its end as the last part says.
#[derive(Clone)]
struct Script {
    world: Arc<World>,
    content: Arc<Vec<u8>>,
    acts: Arc<Mutex<VecDeque<Act>>>,
    then: Arc<Mutex<Act>>,
    asked: Arc<Mutex<Vec<Range<u64>>>>,
}

impl Transport for Script {
    fn fetch(&self, range: Range<u64>) -> Parts {
        lock(&self.asked).push(range.clone());
        let act = lock(&self.acts).pop_front().unwrap_or_else(|| lock(&self.then).clone());
        let (content, ground) = (self.content.clone(), Here(self.world.clone()));
        if let Act::Parts(len, after, count) = act {
            return Box::pin(stream::unfold((range.start, 0), move |(at, sent)| {
                let (content, ground, end) = (content.clone(), ground.clone(), range.end);
                async move {
                    if at == end {
                        return None;
                    }
                    if sent == count {
                        std::future::pending::<()>().await;
                    }
                    ground.sleep(after).await;
                    let next = end.min(at + len as u64);
                    let part = Bytes::copy_from_slice(&content[small(at)..small(next)]);
                    Some((Ok(part), (next, sent + 1)))
                }
            }));
        }
        let answer = async move {
            let bytes = |end: u64| Ok(Bytes::copy_from_slice(&content[small(range.start)..small(end)]));
            let error = || Error::new(ErrorKind::Io, "as scripted");
            match act {
                Act::After(time) => {
                    ground.sleep(time).await;
                    bytes(range.end)
                }
                Act::Passing => Err(Failure::Passing(error())),
                Act::Final => Err(Failure::Final(error().with_kind(ErrorKind::Changed))),
                Act::Short => bytes(range.end - 1),
                Act::Never => std::future::pending().await,
                Act::Parts(..) => unreachable!("it is above"),
            }
        };
        Box::pin(answer.into_stream())
    }
}

const FAST: Act = Act::After(Duration::from_millis(10));

fn base_in(world: &Arc<World>, len: usize, acts: &[Act]) -> (RemoteBase, Script) {
    base_for(world, len, acts, 60 * SECOND)
}

fn base_for(world: &Arc<World>, len: usize, acts: &[Act], timeout: Duration) -> (RemoteBase, Script) {
    let mut content = vec![0; len];
    Random::from_seed(5).fill(&mut content);
    let script = Script {
        world: world.clone(),
        content: Arc::new(content),
        acts: Arc::new(Mutex::new(acts.iter().cloned().collect())),
        then: Arc::new(Mutex::new(FAST)),
        asked: Arc::default(),
    };
    let facts =
        Facts { name: "http://host/base".to_owned(), len: len as u64, proof: None, timeout, kept: None };
    (RemoteBase::new(facts, Box::new(script.clone()), Box::new(Here(world.clone()))), script)
}

fn base(len: usize, acts: &[Act]) -> (Arc<World>, RemoteBase, Script) {
    let world = Arc::new(World::default());
    let (base, script) = base_in(&world, len, acts);
    (world, base, script)
}

async fn read(base: &RemoteBase, at: u64, len: usize) -> Result<Vec<u8>> {
    Ok(base.read(ImageOffset::new(at), Buffer::for_overwrite(len)).await?.to_vec())
}

const BLOCK: usize = 64 << 10;

#[test]
fn any_bytes_are_those_of_the_object_and_zeros_behind_its_end() {
    let len = 40 * BLOCK + 777;
    let (world, base, script) = base(len, &[]);
    let mut expected = script.content.to_vec();
    expected.resize(len + 3 * BLOCK, 0);
    let mut random = Random::from_seed(1);
    for _ in 0..300 {
        let at = small(random.below(len as u64 + FETCH_BLOCK));
        let most = if random.one_in(4) { 2 * FETCH_BLOCK } else { 5000 };
        let count = small(random.below(most));
        let is = world.run(read(&base, at as u64, count)).expect("it can be read");
        assert!(is == expected[at..at + count], "{count} bytes at {at}");
    }
    // The end of the object is no reason to ask for more than it has.
    assert!(lock(&script.asked).iter().all(|range| range.end <= len as u64 && range.start < range.end));
    let whole = world.run(read(&base, 0, len)).expect("it can be read");
    assert!(whole == expected[..len], "in many windows");
}

#[test]
fn two_readers_of_one_block_fetch_it_once_and_neighbours_come_together() {
    let (world, base, script) = base(64 * BLOCK, &[]);
    let both = [read(&base, 100, 10), read(&base, 5000, 10)];
    world.run(try_join_all(both.into_iter().map(Box::pin).collect::<Vec<_>>())).expect("both");
    assert_eq!(base.counts().requests, 1);
    world.run(read(&base, 10 * FETCH_BLOCK + 5, 4 * BLOCK)).expect("five blocks");
    assert_eq!(lock(&script.asked)[1], 10 * FETCH_BLOCK..15 * FETCH_BLOCK);
    world.run(read(&base, 100, 10)).expect("in memory");
    assert_eq!(base.counts().requests, 2);
}

#[test]
fn a_read_is_held_while_requests_fail_and_no_longer_than_the_timeout() {
    let (world, base, script) = base(BLOCK, &[Act::Passing, Act::Short, Act::Never, Act::Passing]);
    assert!(world.run(read(&base, 0, BLOCK)).expect("in the end") == *script.content);
    let now = Here(world.clone()).now();
    assert!(now > SILENCE_MAX && now < SILENCE_MAX + 2 * SECOND, "{now:?}");
    assert_eq!((base.counts().retries, base.counts().requests), (4, 5));

    let (world, base, script) = self::base(BLOCK, &[]);
    *lock(&script.then) = Act::Passing;
    let error = world.run(read(&base, 0, 10)).expect_err("it is given up");
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(
        error.chain().contains("--remote-timeout") && error.chain().contains("as scripted"),
        "{}",
        error.chain()
    );
    let now = Here(world.clone()).now();
    assert!(now >= 60 * SECOND && now < 61 * SECOND, "{now:?}");
    assert!(base.counts().requests < 40, "the pauses grow: {:?}", base.counts());
    *lock(&script.then) = FAST;
    world.run(read(&base, 0, 10)).expect("a failure is not remembered");
}

#[test]
fn a_slow_link_is_not_silent_and_is_read_to_the_end() {
    // A megabyte takes 160 s, and more than one request waits.
    let (world, base, script) = base(16 * BLOCK, &[]);
    *lock(&script.then) = Act::Parts(BLOCK, 10 * SECOND, usize::MAX);
    let whole = world.run(read(&base, 0, 16 * BLOCK)).expect("bytes come all the time");
    assert!(whole == *script.content);
    let counts = base.counts();
    assert_eq!((counts.requests, counts.failed, counts.fetched_bytes), (1, 0, 16 * FETCH_BLOCK));
    assert!(Here(world.clone()).now() >= 160 * SECOND);

    // Less than what counts as progress: held no longer than by silence.
    let (world, base, script) = self::base(BLOCK, &[]);
    *lock(&script.then) = Act::Parts(1, SECOND, usize::MAX);
    let error = world.run(read(&base, 0, BLOCK)).expect_err("that would take a day");
    assert!(error.chain().contains("bytes in"), "{}", error.chain());
    let now = Here(world.clone()).now();
    assert!(now >= 60 * SECOND && now <= 60 * SECOND + LAST_TRY, "{now:?}");
}

#[test]
fn what_arrived_before_a_failure_is_not_asked_for_again() {
    let (world, base, script) =
        base(16 * BLOCK, &[Act::Parts(BLOCK, SECOND, 5), Act::Parts(1000, SECOND, 7)]);
    let whole = world.run(read(&base, 0, 16 * BLOCK)).expect("in the end");
    assert!(whole == *script.content);
    let starts: Vec<u64> = lock(&script.asked).iter().map(|range| range.start).collect();
    assert_eq!(starts, [0, 5 * FETCH_BLOCK, 5 * FETCH_BLOCK + 7000]);
    assert_eq!(base.counts().fetched_bytes, 16 * FETCH_BLOCK);
}

#[test]
fn silence_makes_requests_shorter_and_fewer_until_there_are_answers() {
    let (world, base, script) = base(2000 * BLOCK, &[Act::Never, Act::Never, Act::Never]);
    world.run(read(&base, 0, 100)).expect("by the fourth request");
    lock(&script.asked).clear();
    world.run(read(&base, 16 * FETCH_BLOCK, 16 * BLOCK)).expect("in short runs");
    assert_eq!(lock(&script.asked)[0], 16 * FETCH_BLOCK..18 * FETCH_BLOCK);
    for at in 10..50 {
        world.run(read(&base, at * 31 * FETCH_BLOCK, 100)).expect("answers");
    }
    lock(&script.asked).clear();
    world.run(read(&base, 64 * FETCH_BLOCK, 16 * BLOCK)).expect("in one run");
    assert_eq!(*lock(&script.asked), vec![64 * FETCH_BLOCK..80 * FETCH_BLOCK; 1]);
}

#[test]
fn all_reads_over_a_silent_base_fail_in_time_however_many_wait() {
    for then in [Act::Never, Act::Passing] {
        let world = Arc::new(World::default());
        let (base, script) = base_for(&world, 1000 * BLOCK, &[], 5 * SECOND);
        *lock(&script.then) = then;
        let reads = (0..96).map(|at| {
            let (base, world) = (&base, world.clone());
            Box::pin(async move {
                read(base, at * 9 * FETCH_BLOCK, 10).await.expect_err("nothing answers");
                Ok::<_, Error>(Here(world).now())
            })
        });
        let ends = world.run(try_join_all(reads.collect::<Vec<_>>())).expect("all end");
        let (first, last) = (ends.iter().min().expect("some"), ends.iter().max().expect("some"));
        assert!(*first >= 5 * SECOND && *last <= 5 * SECOND + LAST_TRY, "{first:?} {last:?}");
        assert_eq!(base.counts().failed, 96);
    }
}

#[test]
fn a_reader_that_joins_a_fetch_has_one_timeout_in_all() {
    let world = Arc::new(World::default());
    let (base, script) = base_for(&world, BLOCK, &[], 5 * SECOND);
    *lock(&script.then) = Act::Never;
    let ground = Here(world.clone());
    let first = async {
        read(&base, 0, 10).await.expect_err("nothing answers");
        Ok::<_, Error>(ground.now())
    };
    let second = async {
        ground.sleep(3 * SECOND).await;
        read(&base, 0, 10).await.expect_err("nothing answers");
        Ok::<_, Error>(ground.now())
    };
    let both: [Pin<Box<dyn Future<Output = Result<Duration>> + '_>>; 2] = [Box::pin(first), Box::pin(second)];
    let ends = world.run(try_join_all(both.into_iter().collect::<Vec<_>>())).expect("both end");
    assert_eq!(ends[0], 5 * SECOND);
    assert!(ends[1] >= 8 * SECOND && ends[1] <= 8 * SECOND + LAST_TRY, "{ends:?}");
}

#[test]
fn many_reads_at_once_use_all_places_all_the_time() {
    let (world, base, script) = base(1000 * BLOCK, &[]);
    *lock(&script.then) = Act::After(SECOND);
    let reads = (0..96).map(|at| Box::pin(read(&base, at * 9 * FETCH_BLOCK, 10)));
    world.run(try_join_all(reads.collect::<Vec<_>>())).expect("all");
    assert_eq!(Here(world.clone()).now(), 6 * SECOND, "six rounds of sixteen");
    drop(script);
}

#[test]
fn what_will_not_pass_fails_at_once() {
    let (world, base, _) = base(BLOCK, &[Act::Final]);
    assert_eq!(world.run(read(&base, 0, 10)).expect_err("refused").kind(), ErrorKind::Changed);
    assert_eq!(
        (Here(world.clone()).now(), base.counts().requests, base.counts().failed),
        (Duration::ZERO, 1, 1)
    );
}

#[test]
fn a_stalled_base_does_not_stop_another() {
    let world = Arc::new(World::default());
    let (stalled, script) = base_in(&world, 1000 * BLOCK, &[]);
    *lock(&script.then) = Act::Never;
    let (other, _) = base_in(&world, BLOCK, &[]);
    let ended = Cell::new(0);
    let waiting = (0..100).map(|at| {
        let (stalled, ended) = (&stalled, &ended);
        Box::pin(async move {
            let result = read(stalled, at * 9 * FETCH_BLOCK, 10).await;
            ended.set(ended.get() + 1);
            Ok::<_, Error>(result)
        })
    });
    let waiting = try_join_all(waiting.collect::<Vec<_>>());
    world.run(async {
        futures_lite::future::or(async { drop(waiting.await) }, async {
            drop(read(&other, 0, 10).await.expect("at once"))
        })
        .await;
    });
    assert_eq!(ended.get(), 0);
    assert!(Here(world.clone()).now() < SECOND);
    assert_eq!(lock(&script.asked).len(), IN_FLIGHT_MAX, "and no more requests than places");
}

#[test]
fn reading_on_is_read_ahead_and_memory_is_bounded() {
    let blocks = 1500;
    let (world, base, script) = base(blocks * BLOCK, &[]);
    for at in (0..blocks as u64 * FETCH_BLOCK).step_by(4 * BLOCK) {
        world.run(read(&base, at, 4 * BLOCK)).expect("it can be read");
        assert!(lock(&base.0.state).ready <= CACHE_BLOCKS);
    }
    let counts = base.counts();
    assert_eq!(counts.fetched_bytes, (blocks * BLOCK) as u64, "nothing is fetched twice");
    assert!(counts.ahead_used > blocks as u64 * 9 / 10 && counts.ahead_wasted == 0, "{counts:?}");
    assert!(counts.requests < blocks as u64 / 6, "{counts:?}");
    let took = Here(world.clone()).now();
    assert!(took < Duration::from_millis(10) * 150, "reads find most of it: {took:?}");
    drop(script);
}

#[test]
fn random_reads_fetch_little_more_than_they_ask_for() {
    let (world, base, _) = base(4000 * BLOCK, &[]);
    let mut random = Random::from_seed(3);
    let asked = 1500;
    for _ in 0..asked {
        let block = random.below(4000);
        world.run(read(&base, block * FETCH_BLOCK, 100)).expect("it can be read");
    }
    let counts = base.counts();
    assert!(counts.fetched_bytes / FETCH_BLOCK <= asked + asked / 10, "{counts:?}");
}

#[test]
fn a_slow_request_gets_a_second_one_beside_it() {
    let mut acts = vec![FAST; 32];
    acts.push(Act::After(10 * SECOND));
    let (world, base, script) = base(200 * BLOCK, &acts);
    for block in 0..32 {
        world.run(read(&base, block * 3 * FETCH_BLOCK, 10)).expect("it can be read");
    }
    let before = Here(world.clone()).now();
    world.run(read(&base, 150 * FETCH_BLOCK, 10)).expect("by the second request");
    assert!(Here(world.clone()).now() - before < Duration::from_millis(100));
    assert_eq!(base.counts().hedges, 1);
    // When all are slow, only a few are made twice.
    *lock(&script.then) = Act::After(SECOND);
    for block in 0..40 {
        world.run(read(&base, (block * 3 + 1) * FETCH_BLOCK, 10)).expect("it can be read");
    }
    assert!(base.counts().hedges <= 5, "{:?}", base.counts());
}

#[test]
fn it_is_not_written() {
    let (world, base, _) = base(BLOCK, &[]);
    let write = base.write(ImageOffset::ZERO, Buffer::zeroed(512));
    assert_eq!(world.run(write).expect_err("refused").kind(), ErrorKind::ReadOnly);
    assert!(base.limits().read_only && !base.limits().fixed_len);
    let runs = world.run(base.runs(ImageOffset::new(100).span(1 << 20))).expect("what is there");
    assert_eq!(runs, [StorageRun { span: ImageOffset::new(100).span(FETCH_BLOCK - 100), is_data: true }]);
}

#[test]
fn a_reader_close_behind_another_is_served_from_memory() {
    const MIB: usize = 1 << 20;
    // Twice what is kept in memory; and the second reader is a quarter of that behind.
    let (count, behind) = (64, 8);
    let (world, base, script) = base(count * MIB, &[]);
    for turn in 0..count + behind {
        for at in [Some(turn).filter(|at| *at < count), turn.checked_sub(behind)].into_iter().flatten() {
            let is = world.run(read(&base, (at * MIB) as u64, MIB)).expect("it can be read");
            assert!(is == script.content[at * MIB..(at + 1) * MIB], "{at}");
        }
    }
    let asked: u64 = lock(&script.asked).iter().map(|range| range.end - range.start).sum();
    assert_eq!(asked, (count * MIB) as u64, "each byte once");
}
