//! A world in one thread from one seed: the order of turns, the time, and the random numbers.
//!
//! ```text
//!            wake                          turn by turn
//!   tasks ─────────▶ queue of turns ─────────────────────▶ poll
//!                        │ empty?
//!                        ▼
//!               clock jumps to the next alarm ──▶ wake         none left: deadlock, with the seed in the message
//! ```
//!
//! 1. Everything runs on the thread that made the world, one turn at a time. Computing takes no virtual time;
//!    only waiting does, and the clock moves only when no task can run.
//! 2. The same seed gives the same turns. [`World::new`] takes them first come, first served; in a
//!    [`World::shuffled`] world the seed decides the order, so that many seeds explore many interleavings.
//! 3. Every event takes the next [`Position`] on one line that all drives and oracles of the world share. A
//!    crash is a position: what is before it has happened.
//! 4. [`World::digest`] covers every turn and every event. Two runs with the same digest did the same.
//! 5. When the world is dropped its tasks are dropped, so nothing lives on through a circle of references.
//!
//! Left out: threads. Correctness between threads is another tool's work.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use async_task::{Runnable, Task};
use vellum_core::{Clock, Random, lock};

use crate::alarm::{Alarms, SimClock, Sleep};
use crate::mix::mix;

/// This many turns without a step of the clock are a loop in which no task waits.
const TURNS_AT_ONE_TIME_MAX: u64 = 20_000_000;
/// A run that comes this far has only tickers left.
const TIME_MAX: Duration = Duration::from_hours(24 * 366);

/// A place on the line of all events of a world. A crash *at* a position comes after everything before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Position(pub(crate) u64);

impl Position {
    /// Before everything.
    pub const START: Self = Self(0);

    /// The position right after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// A world. The module lists what holds in it.
pub struct World {
    core: Arc<Core>,
    one_thread: PhantomData<Rc<()>>,
}

impl World {
    /// The world that belongs to `seed`; turns are taken first come, first served.
    pub fn new(seed: u64) -> Self {
        Self::with(seed, false)
    }

    /// The world that belongs to `seed`; the seed decides the order of turns.
    pub fn shuffled(seed: u64) -> Self {
        Self::with(seed, true)
    }

    fn with(seed: u64, shuffled: bool) -> Self {
        let mut random = Random::from_seed(seed);
        let shuffle = shuffled.then(|| random.fork());
        let turns = Turns {
            now: Duration::ZERO,
            alarms: Alarms::default(),
            queue: VecDeque::new(),
            shuffle,
            random,
            position: Position::START,
            digest: mix(seed, u64::from(shuffled)),
            tasks: BTreeMap::new(),
            tasks_made: 0,
            runs: 0,
            running: false,
            turns_at_this_time: 0,
            closed: false,
        };
        Self { core: Arc::new(Core { seed, turns: Mutex::new(turns) }), one_thread: PhantomData }
    }

    /// The seed it was made from.
    pub fn seed(&self) -> u64 {
        self.core.seed
    }

    /// Runs until `future` ends; spawned tasks run meanwhile, and stay for the next `run`.
    ///
    /// Panics, with seed and virtual time, when no task can run and no alarm is set, and when a task panics.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        let core = &self.core;
        let run = core.begin_run();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut future = pin!(future);
            let main = Arc::new(MainWaker { core: core.clone(), run, queued: AtomicBool::new(false) });
            let waker = Waker::from(main.clone());
            main.queue();
            loop {
                match core.next_turn() {
                    Some(Turn::Task(runnable)) => {
                        core.note(*runnable.metadata());
                        runnable.run();
                    }
                    Some(Turn::Main(of)) if of == run => {
                        core.note(u64::MAX);
                        main.queued.store(false, Ordering::Relaxed);
                        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                            return output;
                        }
                    }
                    Some(Turn::Main(_)) => {}
                    None => panic!("deadlock: nobody can run and no alarm is set"),
                }
            }
        }));
        core.lock().running = false;
        outcome.unwrap_or_else(|panic| {
            let message = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| Some((*panic.downcast_ref::<&str>()?).to_owned()));
            match message {
                Some(message) => panic!("seed {} at {:?}: {message}", self.seed(), self.now()),
                None => resume_unwind(panic),
            }
        })
    }

    /// Starts a task. It runs whether or not the handle is kept.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Handle<T> {
        Handle(Some(self.core.spawn(future)))
    }

    /// What a task needs to start others.
    pub fn spawner(&self) -> Spawner {
        Spawner { core: self.core.clone(), one_thread: PhantomData }
    }

    /// The clock of this world, to be handed to whatever needs one.
    pub fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(SimClock::new(self.core.clone()))
    }

    /// The virtual time.
    pub fn now(&self) -> Duration {
        self.core.now()
    }

    /// Waits in virtual time.
    pub fn sleep(&self, wait: Duration) -> impl Future<Output = ()> + use<> {
        self.core.sleep(wait)
    }

    /// Lets every other task that can run have a turn first.
    pub fn yield_now(&self) -> impl Future<Output = ()> + use<> {
        yield_now()
    }

    /// A source of random numbers of its own, drawn from the seed.
    pub fn random(&self) -> Random {
        self.core.random()
    }

    /// The position that what happens next will take: a crash here is a crash now.
    pub fn position(&self) -> Position {
        self.core.position()
    }

    /// A number that stands for everything that has happened.
    pub fn digest(&self) -> u64 {
        self.core.lock().digest
    }

    /// Makes `fact` part of the digest: a result, so that two runs that differ in it differ in their digest.
    pub fn note(&self, fact: u64) {
        self.core.note(fact);
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.core.close();
    }
}

/// Starts tasks in a world, from inside its tasks.
#[derive(Clone)]
pub struct Spawner {
    core: Arc<Core>,
    one_thread: PhantomData<Rc<()>>,
}

impl Spawner {
    /// Starts a task. It runs whether or not the handle is kept, until its world is dropped.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Handle<T> {
        Handle(Some(self.core.spawn(future)))
    }
}

/// A task, to be waited for. Dropping the handle leaves the task running.
pub struct Handle<T>(Option<Task<T, u64>>);

impl<T> Handle<T> {
    /// Whether the task has ended.
    pub fn is_finished(&self) -> bool {
        self.0.as_ref().is_none_or(Task::is_finished)
    }

    /// Ends the task where it is, as a killed process ends, and waits until everything it held is dropped.
    /// Returns its result if it had ended by itself before.
    pub async fn abort(mut self) -> Option<T> {
        self.0.take()?.cancel().await
    }
}

impl<T> Future for Handle<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let task = self.0.as_mut().expect("a handle is waited for once");
        let output = std::task::ready!(Pin::new(task).poll(context));
        self.0 = None;
        Poll::Ready(output)
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.detach();
        }
    }
}

/// Ends at the second poll.
pub(crate) fn yield_now() -> impl Future<Output = ()> {
    let mut yielded = false;
    poll_fn(move |context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
}

/// What drives, clocks and wakers share with the world.
pub(crate) struct Core {
    seed: u64,
    turns: Mutex<Turns>,
}

enum Turn {
    /// The future given to `run`, with the number of the run: an old one may still be woken.
    Main(u64),
    Task(Runnable<u64>),
}

struct Turns {
    now: Duration,
    alarms: Alarms,
    queue: VecDeque<Turn>,
    shuffle: Option<Random>,
    random: Random,
    position: Position,
    digest: u64,
    /// One waker for each living task, so that all can be ended with the world.
    tasks: BTreeMap<u64, Waker>,
    tasks_made: u64,
    runs: u64,
    running: bool,
    turns_at_this_time: u64,
    closed: bool,
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, Turns> {
        lock(&self.turns)
    }

    pub(crate) fn now(&self) -> Duration {
        self.lock().now
    }

    pub(crate) fn with_alarms<T>(&self, change: impl FnOnce(&mut Alarms, Duration) -> T) -> T {
        let mut turns = self.lock();
        let now = turns.now;
        change(&mut turns.alarms, now)
    }

    pub(crate) fn sleep(self: &Arc<Self>, wait: Duration) -> Sleep {
        Sleep::until(self.clone(), self.now().saturating_add(wait))
    }

    pub(crate) fn random(&self) -> Random {
        self.lock().random.fork()
    }

    /// The position that comes next.
    pub(crate) fn position(&self) -> Position {
        self.lock().position
    }

    /// Takes the next position.
    pub(crate) fn take_position(&self) -> Position {
        let mut turns = self.lock();
        let position = turns.position;
        turns.position = position.next();
        position
    }

    pub(crate) fn note(&self, fact: u64) {
        let mut turns = self.lock();
        turns.digest = mix(turns.digest.wrapping_add(fact), turns.position.0);
    }

    pub(crate) fn spawn<T: 'static>(
        self: &Arc<Self>,
        future: impl Future<Output = T> + 'static,
    ) -> Task<T, u64> {
        let id = {
            let mut turns = self.lock();
            turns.tasks_made += 1;
            turns.tasks_made
        };
        let living = Living { core: Arc::downgrade(self), id };
        let core = self.clone();
        let (runnable, task) = async_task::Builder::new().metadata(id).spawn_local(
            move |_| async move {
                let _living = living;
                future.await
            },
            move |runnable| core.queue(Turn::Task(runnable)),
        );
        self.lock().tasks.insert(id, runnable.waker());
        runnable.schedule();
        task
    }

    fn queue(&self, turn: Turn) {
        let mut turns = self.lock();
        if turns.closed {
            // Dropping the turn drops the task, which may come back here: so, unlocked.
            drop(turns);
            drop(turn);
        } else {
            turns.queue.push_back(turn);
        }
    }

    fn begin_run(&self) -> u64 {
        let mut turns = self.lock();
        assert!(!turns.running, "a world runs one future at a time; use spawn inside");
        turns.running = true;
        turns.runs += 1;
        turns.runs
    }

    /// The next task, moving the clock if none can run now.
    fn next_turn(&self) -> Option<Turn> {
        loop {
            let mut turns = self.lock();
            if let Some(turn) = turns.take_turn() {
                turns.turns_at_this_time += 1;
                let is_livelock = turns.turns_at_this_time >= TURNS_AT_ONE_TIME_MAX;
                // The turn is dropped by a panic, and may then wake others, which takes the lock.
                drop(turns);
                assert!(!is_livelock, "livelock: turns go round and nobody waits");
                return Some(turn);
            }
            let (time, woken) = turns.alarms.take_next()?;
            turns.now = turns.now.max(time);
            turns.turns_at_this_time = 0;
            assert!(turns.now < TIME_MAX, "nothing but tickers is left");
            turns.digest = mix(turns.digest, u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
            drop(turns);
            for waker in woken {
                waker.wake();
            }
        }
    }

    fn close(&self) {
        let (tasks, alarms) = {
            let mut turns = self.lock();
            turns.closed = true;
            (std::mem::take(&mut turns.tasks), std::mem::take(&mut turns.alarms))
        };
        // A woken task of a closed world is dropped instead of queued; those in the queue are dropped below.
        for waker in tasks.into_values() {
            waker.wake();
        }
        drop(alarms);
        loop {
            let queue = std::mem::take(&mut self.lock().queue);
            if queue.is_empty() {
                return;
            }
            drop(queue);
        }
    }
}

impl Turns {
    fn take_turn(&mut self) -> Option<Turn> {
        match &mut self.shuffle {
            Some(random) if self.queue.len() > 1 => {
                let index = random.index(self.queue.len());
                self.queue.swap_remove_back(index)
            }
            _ => self.queue.pop_front(),
        }
    }
}

struct MainWaker {
    core: Arc<Core>,
    run: u64,
    queued: AtomicBool,
}

impl MainWaker {
    fn queue(&self) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            self.core.queue(Turn::Main(self.run));
        }
    }
}

impl Wake for MainWaker {
    fn wake(self: Arc<Self>) {
        self.queue();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.queue();
    }
}

/// Held by a task while it lives.
struct Living {
    core: Weak<Core>,
    id: u64,
}

impl Drop for Living {
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade() {
            let waker = core.lock().tasks.remove(&self.id);
            drop(waker);
        }
    }
}
