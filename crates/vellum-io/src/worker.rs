//! A worker: one thread with its tasks, its timers and its driver.
//!
//! ```text
//!   ┌─▶ timers that are due ─▶ the main future, if woken ─▶ a batch of tasks ┬─ more to run ─▶ submit ─┐
//!   │                                                                       └─ nothing ─▶ lie down,   │
//!   │                                                    look once more, submit and wait in the kernel │
//!   └──────────────────────────── hand out what has ended ◀────────────────────────────────────────────┘
//! ```
//!
//! 1. A worker never waits in the kernel while a task can run.
//! 2. Tasks run in batches, and the driver is polled in between. A batch ends after 64 tasks or 200 µs,
//!    whichever comes first. So a task that is always ready delays the others, but cannot stop them or their
//!    I/O: between two polls of the driver lie at most 200 µs and the one task poll that was running then.
//! 3. A panic in any task ends the worker: [`run`] or joining the [`Workers`](crate::Workers) propagates it.
//!    The other tasks are dropped. An engine that has broken one of its own rules must not continue to write.
//! 4. A worker ends in this order: its tasks are dropped, then the driver, which waits for everything that
//!    the kernel still does.

use std::any::Any;
use std::cell::RefCell;
use std::future::pending;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_executor::LocalExecutor;
use futures_lite::FutureExt as _;
use vellum_core::{Clock, Error, ErrorKind, Result};

use crate::driver::{Driver, IoMode};
use crate::timer::{RealClock, Timers, now};
use crate::wakeup::{MainReady, Wakeup};

/// A task of the current worker. Dropping it drops the future; `detach` lets it run on its own.
pub use async_executor::Task;

/// How many tasks run between two polls of the driver, at most.
const BATCH: usize = 64;

/// How long they may take together. A poll costs about a microsecond.
const BATCH_TIME: Duration = Duration::from_micros(200);

type Panic = Box<dyn Any + Send>;

/// What the thread's tasks can reach without a parameter.
struct Worker {
    index: usize,
    driver: Rc<Driver>,
    timers: Rc<Timers>,
    /// Gone once the worker is ending.
    executor: RefCell<Option<Rc<LocalExecutor<'static>>>>,
    /// The panic of a task, on its way out.
    panic: RefCell<Option<Panic>>,
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<Worker>>> = const { RefCell::new(None) };
}

fn try_current<T>(look: impl FnOnce(&Rc<Worker>) -> T) -> Option<T> {
    CURRENT.with_borrow(|current| current.as_ref().map(look))
}

fn current<T>(look: impl FnOnce(&Rc<Worker>) -> T) -> T {
    try_current(look).expect("this runs on a worker: within vellum_io::run or a task of Workers")
}

/// Makes this thread a worker, runs `main` on it to its end, and returns its value. Tasks that are left are
/// dropped.
///
/// Fails with `Unsupported` when the mode is not available, and with `Invalid` on a thread that is a worker
/// already. Panics when a task does. The first worker of a program makes the process ignore the signal
/// SIGXFSZ, so that a write past the limit on file sizes fails like any other instead of ending the program.
pub fn run<T>(mode: IoMode, main: impl AsyncFnOnce() -> T) -> Result<T> {
    run_as(0, mode, Duration::ZERO, main)
}

/// As above, for a worker with this number, which busy-polls for up to `watch` before it sleeps.
pub(crate) fn run_as<T>(
    index: usize,
    mode: IoMode,
    watch: Duration,
    main: impl AsyncFnOnce() -> T,
) -> Result<T> {
    let stage = Stage::set(index, mode, watch)?;
    // On the stack below the stage, so that it is dropped first when a panic passes.
    let main = pin!(main());
    stage.drive(main)
}

/// Runs the future on this worker, beside the others. Panics when the thread is not a worker.
pub fn spawn_local<T: 'static>(future: impl Future<Output = T> + 'static) -> Task<T> {
    let worker = current(Rc::clone);
    let executor = worker.executor.borrow().clone().expect("a worker that is ending starts nothing new");
    executor.spawn(async move {
        match AssertUnwindSafe(future).catch_unwind().await {
            Ok(value) => value,
            Err(panic) => {
                worker.panic.borrow_mut().get_or_insert(panic);
                // The worker ends at once; a task that has ended without a value must not be seen.
                pending().await
            }
        }
    })
}

/// The real clock. Its sleeps must be polled on a worker; `now` can be called anywhere.
pub fn clock() -> Arc<dyn Clock> {
    Arc::new(RealClock)
}

/// The number of the current worker, counted from zero: its place among the [`Workers`](crate::Workers) it
/// belongs to. Panics when the thread is not a worker.
pub fn worker_index() -> usize {
    current(|worker| worker.index)
}

/// How the current worker reaches the kernel: `Uring` or `Threads`. Panics when the thread is not a worker.
pub fn io_mode() -> IoMode {
    current(|worker| worker.driver.mode())
}

pub(crate) fn current_driver() -> Rc<Driver> {
    current(|worker| worker.driver.clone())
}

pub(crate) fn try_current_driver() -> Option<Rc<Driver>> {
    try_current(|worker| worker.driver.clone())
}

pub(crate) fn current_timers() -> Rc<Timers> {
    current(|worker| worker.timers.clone())
}

/// The thread as a worker, until dropped.
struct Stage {
    worker: Rc<Worker>,
    wakeup: Arc<Wakeup>,
}

impl Stage {
    fn set(index: usize, mode: IoMode, watch: Duration) -> Result<Self> {
        if try_current(|_| ()).is_some() {
            return Err(Error::new(ErrorKind::Invalid, "this thread is a worker already"));
        }
        take_file_size_errors();
        let (driver, wakeup) = Driver::new(mode, watch)?;
        let worker = Rc::new(Worker {
            index,
            driver: Rc::new(driver),
            timers: Rc::default(),
            executor: RefCell::new(Some(Rc::new(LocalExecutor::new()))),
            panic: RefCell::new(None),
        });
        CURRENT.set(Some(worker.clone()));
        Ok(Self { worker, wakeup })
    }

    /// The loop.
    fn drive<T>(&self, mut main: Pin<&mut impl Future<Output = T>>) -> Result<T> {
        let (driver, timers) = (&*self.worker.driver, &*self.worker.timers);
        let executor = self.worker.executor.borrow().clone().expect("the worker has just begun");
        let main_ready = MainReady::new(self.wakeup.clone());
        let main_waker = Waker::from(main_ready.clone());
        let mut main_context = Context::from_waker(&main_waker);
        let tick_waker = Waker::from(self.wakeup.clone());
        let mut tick_context = Context::from_waker(&tick_waker);
        loop {
            if let Some(panic) = self.worker.panic.take() {
                resume_unwind(panic);
            }
            timers.fire();
            if main_ready.take()
                && let Poll::Ready(value) = main.as_mut().poll(&mut main_context)
            {
                return Ok(value);
            }
            if run_batch(&executor) || main_ready.is_ready() || self.worker.panic.borrow().is_some() {
                driver.submit();
                driver.reap();
                continue;
            }
            self.wakeup.lie_down();
            {
                // From its first poll on, this is woken for every task that others make ready.
                let tick = pin!(executor.tick());
                if tick.poll(&mut tick_context).is_pending() && !main_ready.is_ready() {
                    driver.wait(timers.patience());
                } else {
                    driver.submit();
                }
            }
            self.wakeup.get_up();
            driver.reap();
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // The tasks first: what they drop reaches the driver through their futures, and this thread's worker.
        let executor = self.worker.executor.take();
        drop(executor);
        CURRENT.take();
        // Closed explicitly, because a leaked task may hold the driver.
        self.worker.driver.close();
    }
}

/// Runs tasks until none is ready or the batch is full. Returns whether more may be ready.
fn run_batch(executor: &LocalExecutor<'static>) -> bool {
    let end = now() + BATCH_TIME;
    for _ in 0..BATCH {
        if !executor.try_tick() {
            return false;
        }
        if now() >= end {
            return true;
        }
    }
    true
}

/// A write past the limit on file sizes should fail, not kill the program: it is one guest's error.
fn take_file_size_errors() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: queries and sets the disposition of one signal, with constants; no handler of ours runs.
        let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        if before != libc::SIG_DFL {
            // A handler was installed.
            // SAFETY: as above, with what was set before.
            unsafe { libc::signal(libc::SIGXFSZ, before) };
        }
    });
}
