//! Several workers: one thread each, given tasks from anywhere.
//!
//! ```text
//!   spawn(2, make) ──▶ inbox of worker 2 ──▶ its thread calls make() and runs the future it gives
//!                                                          │ value
//!   Spawned (a future, for any thread) ◀───────────────────┘
//! ```
//!
//! The closure is sent, the future is not: it is made on the worker's thread, so it may hold values that are
//! not `Send`.
//!
//! 1. [`Workers::join`] waits until every task that was started with `spawn` has ended, [`Workers::shutdown`]
//!    drops the tasks; both then end the threads. A task that was started with `spawn_local` and not awaited
//!    ends with its worker.
//! 2. A panic on any worker ends all of them, and is propagated by `join` or `shutdown`.
//! 3. When a worker has ended, none of its I/O is in flight.

use std::any::Any;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vellum_core::{Context as _, Error, ErrorKind, Result, lock};

use crate::driver::IoMode;
use crate::oneshot::{Receiver, oneshot};
use crate::worker::{io_mode, run_as, spawn_local};

/// How many workers, and how they reach the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkersConfig {
    /// How many threads, at least one.
    pub threads: usize,
    /// How they reach the kernel; all the same way.
    pub mode: IoMode,
    /// How long a worker busy-polls before it sleeps, if it has a ring and an event came as fast the last
    /// time. That takes a processor and saves the cost of waking; zero means never.
    pub poll_max: Duration,
}

impl Default for WorkersConfig {
    /// One per core, with a ring where there is one.
    fn default() -> Self {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        Self { threads, mode: IoMode::Auto, poll_max: Duration::ZERO }
    }
}

/// Some worker threads. Dropping them shuts them down. None of their own tasks may drop or end them.
pub struct Workers {
    handle: WorkersHandle,
    threads: Vec<JoinHandle<()>>,
}

/// Gives tasks to workers, from any thread.
#[derive(Clone)]
pub struct WorkersHandle {
    shared: Arc<Shared>,
}

struct Shared {
    mode: IoMode,
    inboxes: Vec<Inbox>,
    census: Mutex<Census>,
    changed: Condvar,
}

#[derive(Default)]
struct Census {
    /// Tasks that were started and have not ended.
    tasks: usize,
    /// The first panic of a worker.
    panic: Option<Box<dyn Any + Send>>,
}

/// The tasks that a worker is given from outside.
#[derive(Default)]
struct Inbox(Mutex<Letters>);

#[derive(Default)]
struct Letters {
    jobs: VecDeque<Job>,
    is_closed: bool,
    reader: Option<Waker>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Workers {
    /// Starts the threads and waits until each of them works.
    ///
    /// Fails with `Unsupported` when the mode is not available, with `Io` when the host cannot start a
    /// thread.
    pub fn start(config: WorkersConfig) -> Result<Self> {
        if config.threads == 0 {
            return Err(Error::invalid("can't start no workers: at least one thread is needed"));
        }
        let (sender, started) = mpsc::channel();
        let mut gates = Vec::new();
        let mut threads = Vec::new();
        let mut result = Ok(());
        for index in 0..config.threads {
            let (gate, wait) = mpsc::channel::<Arc<Shared>>();
            let sender = sender.clone();
            let thread = thread::Builder::new()
                .name(format!("vellum-worker-{index}"))
                .spawn(move || work(index, config, &sender, &wait));
            match thread.context(|| format!("can't start worker {index}")) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
            gates.push(gate);
        }
        drop(sender);
        let mut mode = config.mode;
        for _ in &threads {
            match started.recv().expect("a worker says whether it works") {
                Ok(its) => mode = its,
                Err(error) => result = Err(error),
            }
        }
        let inboxes = gates.iter().map(|_| Inbox::default()).collect();
        let (census, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { mode, inboxes, census, changed });
        let workers = Self { handle: WorkersHandle { shared: shared.clone() }, threads };
        if let Err(error) = result {
            // The workers that have started wait at their gates; this ends them.
            drop(gates);
            return Err(error);
        }
        for gate in gates {
            gate.send(shared.clone()).expect("a worker that has started waits at its gate");
        }
        Ok(workers)
    }

    /// For starting tasks, also from tasks.
    pub fn handle(&self) -> WorkersHandle {
        self.handle.clone()
    }

    /// How many workers there are.
    pub fn count(&self) -> usize {
        self.handle.count()
    }

    /// How they reach the kernel: `Uring` or `Threads`.
    pub fn mode(&self) -> IoMode {
        self.handle.shared.mode
    }

    /// Runs the future that `make` makes on a worker. As [`WorkersHandle::spawn`].
    pub fn spawn<T, F>(&self, index: usize, make: impl FnOnce() -> F + Send + 'static) -> Spawned<T>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        self.handle.spawn(index, make)
    }

    /// Waits, blocking the thread, until every task has ended, and ends the workers. If one of them panicked,
    /// resumes its panic.
    pub fn join(mut self) {
        let shared = &self.handle.shared;
        let mut census = shared.census();
        while census.tasks > 0 && census.panic.is_none() {
            census = shared.changed.wait(census).unwrap_or_else(PoisonError::into_inner);
        }
        drop(census);
        self.end();
        self.pass_panic_on();
    }

    /// Ends the workers, blocking the thread until they have ended, and drops the remaining tasks. If one of
    /// them panicked, resumes its panic.
    pub fn shutdown(mut self) {
        self.end();
        self.pass_panic_on();
    }

    fn end(&mut self) {
        self.handle.shared.close();
        for thread in self.threads.drain(..) {
            // Their panics are in the census.
            drop(thread.join());
        }
    }

    fn pass_panic_on(&self) {
        let panic = self.handle.shared.census().panic.take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.end();
    }
}

impl WorkersHandle {
    /// How many workers there are.
    pub fn count(&self) -> usize {
        self.shared.inboxes.len()
    }

    /// Runs the future that `make` makes on the worker with this number: `make` is called there. The task
    /// continues when the result is dropped. Panics when there is no such worker.
    pub fn spawn<T, F>(&self, index: usize, make: impl FnOnce() -> F + Send + 'static) -> Spawned<T>
    where
        F: Future<Output = T> + 'static,
        T: Send + 'static,
    {
        let (sender, receiver) = oneshot();
        let counted = Counted::new(self.shared.clone());
        self.shared.inboxes[index].put(Box::new(move || {
            let task = spawn_local(async move {
                let _counted = counted;
                sender.send(make().await);
            });
            task.detach();
        }));
        Spawned(receiver)
    }
}

/// A task on a worker. A future, on any thread, of its value; fails with `Closed` when the worker ended
/// before it.
pub struct Spawned<T>(Receiver<T>);

impl<T> Future for Spawned<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        Pin::new(&mut self.0).poll(context).map(|value| {
            value.ok_or_else(|| Error::new(ErrorKind::Closed, "the worker ended before its task"))
        })
    }
}

/// One task, counted as long as it exists.
struct Counted(Arc<Shared>);

impl Counted {
    fn new(shared: Arc<Shared>) -> Self {
        shared.census().tasks += 1;
        Self(shared)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.census().tasks -= 1;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn census(&self) -> MutexGuard<'_, Census> {
        lock(&self.census)
    }

    fn close(&self) {
        self.inboxes.iter().for_each(Inbox::close);
    }

    fn panicked(&self, panic: Box<dyn Any + Send>) {
        self.census().panic.get_or_insert(panic);
        self.changed.notify_all();
        self.close();
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Letters> {
        lock(&self.0)
    }

    fn put(&self, job: Job) {
        let mut letters = self.lock();
        if letters.is_closed {
            drop(letters);
            // With nothing locked, because dropping the job decrements the count of tasks.
            drop(job);
            return;
        }
        letters.jobs.push_back(job);
        let reader = letters.reader.take();
        drop(letters);
        reader.into_iter().for_each(Waker::wake);
    }

    fn close(&self) {
        let mut letters = self.lock();
        letters.is_closed = true;
        let jobs = std::mem::take(&mut letters.jobs);
        let reader = letters.reader.take();
        drop(letters);
        drop(jobs);
        reader.into_iter().for_each(Waker::wake);
    }

    /// The next job, or `None` when there will be no more.
    async fn next(&self) -> Option<Job> {
        poll_fn(|context| {
            let mut letters = self.lock();
            if let Some(job) = letters.jobs.pop_front() {
                return Poll::Ready(Some(job));
            }
            if letters.is_closed {
                return Poll::Ready(None);
            }
            letters.reader = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

/// The body of a worker's thread: reports that it has started, waits until all others have, and serves its
/// inbox.
fn work(
    index: usize,
    config: WorkersConfig,
    started: &mpsc::Sender<Result<IoMode>>,
    gate: &mpsc::Receiver<Arc<Shared>>,
) {
    let mut shared = None;
    let served = catch_unwind(AssertUnwindSafe(|| {
        run_as(index, config.mode, config.poll_max, async || {
            // The receiver is gone once another worker has failed to start.
            drop(started.send(Ok(io_mode())));
            let shared = shared.insert(gate.recv().ok()?);
            while let Some(job) = shared.inboxes[index].next().await {
                job();
            }
            Some(())
        })
    }));
    match (served, shared) {
        (Ok(Err(error)), _) => drop(started.send(Err(error))),
        (Err(panic), Some(shared)) => shared.panicked(panic),
        (Err(panic), None) => resume_unwind(panic),
        (Ok(Ok(_)), _) => {}
    }
}
