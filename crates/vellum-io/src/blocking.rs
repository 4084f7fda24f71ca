//! The blocking pool: threads, shared by all workers, for system calls that a ring cannot perform.
//!
//! ```text
//!   unblock_at(path) ─┐                 ┌─ backend A   [ at most THREADS_MAX begun ] [ the others wait ]
//!   an open file     ─┼──▶ its backend ─┼─ backend B   [            …             ] [       …        ]──▶ a thread each
//!   unblock          ─┘                 └─ none
//! ```
//!
//! It opens files, queries their properties and truncates them; in thread mode it also performs every read,
//! write and flush. A thread is started when a job finds none idle, and ends after [`IDLE_MAX`] without a
//! job.
//!
//! 1. A job owns everything it works on, so the future that waits for it may be dropped before it ends.
//! 2. A job never waits for another job; so the cap on threads delays, and never deadlocks.
//! 3. A panic in a job is passed to the future that waits for its answer; the thread continues.
//! 4. Each backend has at most [`THREADS_MAX`] threads, and there is no cap on the total: storage that does
//!    not answer delays its own jobs and no others.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use vellum_core::lock;

use crate::oneshot::oneshot;

/// How many threads one backend has at most. It is also the depth of the queue that a drive sees in thread
/// mode.
const THREADS_MAX: usize = 64;

/// How long a thread waits for its next job.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// What a job may have to wait for. When one does not answer, the others do not notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Backend {
    /// No storage: computations, name servers, and whatever else is rare.
    None,
    /// A file system or a block device, by the number of its device.
    Device(u64),
    /// A directory, by a hash of its path, until its device is known: finding that out may take as long as
    /// any other call.
    Directory(u64),
}

impl Backend {
    /// Where this path leads.
    pub(crate) fn at(path: &Path) -> Self {
        let mut hasher = DefaultHasher::new();
        path.parent().unwrap_or(path).hash(&mut hasher);
        Self::Directory(hasher.finish())
    }
}

type Job = Box<dyn FnOnce() + Send>;

struct Pool {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    /// Jobs for which there is a thread, or will be at once.
    ready: VecDeque<(Backend, Job)>,
    /// Backends that have jobs.
    queues: HashMap<Backend, Queue>,
    threads: usize,
    idle: usize,
}

/// The jobs of one backend.
#[derive(Default)]
struct Queue {
    /// How many are ready or run.
    begun: usize,
    /// Those that wait until one of them has ended.
    waiting: VecDeque<Job>,
}

static POOL: LazyLock<Pool> =
    LazyLock::new(|| Pool { state: Mutex::new(State::default()), work: Condvar::new() });

/// Runs `call`, which may block, on a thread of the blocking pool and waits for its answer. Works on any
/// thread, on a worker or not. When the future is dropped the call runs on and its answer is lost.
pub async fn unblock<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    unblock_on(Backend::None, call).await
}

/// As above, for a call that uses the file at `path`: if its storage does not answer, only calls for the same
/// directory wait.
pub async fn unblock_at<T: Send + 'static>(path: &Path, call: impl FnOnce() -> T + Send + 'static) -> T {
    unblock_on(Backend::at(path), call).await
}

/// As above, for a call that uses this backend.
pub(crate) async fn unblock_on<T: Send + 'static>(
    backend: Backend,
    call: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (sender, receiver) = oneshot();
    submit(backend, move || sender.send(catch_unwind(AssertUnwindSafe(call))));
    match receiver.await.expect("a job answers before it is dropped") {
        Ok(value) => value,
        Err(panic) => resume_unwind(panic),
    }
}

/// Runs `job`, which uses this backend, on a thread of the pool, some time.
pub(crate) fn submit(backend: Backend, job: impl FnOnce() + Send + 'static) {
    let mut state = POOL.lock();
    let queue = state.queues.entry(backend).or_default();
    if queue.begun == THREADS_MAX {
        queue.waiting.push_back(Box::new(job));
        return;
    }
    queue.begun += 1;
    state.ready.push_back((backend, Box::new(job)));
    // An idle thread counts as idle until it has taken a job, so jobs are weighed against all of them.
    let start = state.ready.len() > state.idle;
    if start {
        state.threads += 1;
    }
    drop(state);
    POOL.work.notify_one();
    if start {
        let started = thread::Builder::new().name("vellum-blocking".into()).spawn(|| POOL.serve());
        if started.is_err() {
            POOL.without_a_thread();
        }
    }
}

impl State {
    /// A job of this backend has ended: the next one of it is ready.
    fn ended(&mut self, backend: Backend) {
        let queue = self.queues.get_mut(&backend).expect("it had a job");
        if let Some(job) = queue.waiting.pop_front() {
            self.ready.push_back((backend, job));
            return;
        }
        queue.begun -= 1;
        if queue.begun == 0 {
            self.queues.remove(&backend);
        }
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn serve(&self) {
        let mut state = self.lock();
        loop {
            if let Some((backend, job)) = state.ready.pop_front() {
                drop(state);
                // Jobs pass their panics on themselves; one that does not must not cost the pool a thread.
                drop(catch_unwind(AssertUnwindSafe(job)));
                state = self.lock();
                state.ended(backend);
                continue;
            }
            state.idle += 1;
            let (woken, wait) =
                self.work.wait_timeout(state, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if wait.timed_out() && state.ready.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }

    /// The host gave no thread. While others run they will come to the job; the last resort is the caller's
    /// own.
    fn without_a_thread(&self) {
        let mut state = self.lock();
        state.threads -= 1;
        while state.threads == 0
            && let Some((backend, job)) = state.ready.pop_front()
        {
            drop(state);
            drop(catch_unwind(AssertUnwindSafe(job)));
            state = self.lock();
            state.ended(backend);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_lite::future::block_on;

    #[test]
    fn many_calls_at_once_all_answer() {
        let calls: Vec<_> = (0..500).map(|n| Box::pin(unblock(move || n * 2))).collect();
        let answers = block_on(vellum_core::join_all(calls));
        assert_eq!(answers, (0..500).map(|n| n * 2).collect::<Vec<_>>());
    }

    #[test]
    fn a_panic_passes_to_the_caller_and_the_pool_lives() {
        let result = catch_unwind(|| block_on(unblock(|| panic!("as planned"))));
        assert_eq!(result.expect_err("it panicked").downcast_ref::<&str>(), Some(&"as planned"));
        assert_eq!(block_on(unblock(|| 1)), 1);
    }

    #[test]
    fn a_backend_that_does_not_answer_keeps_only_its_own_jobs_waiting() {
        let (hung, other) = (Backend::Device(u64::MAX), Backend::Device(u64::MAX - 1));
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let wait = std::sync::Arc::new(Mutex::new(wait));
        let calls: Vec<_> = (0..2 * THREADS_MAX)
            .map(|_| {
                let (sender, receiver) = oneshot();
                let wait = wait.clone();
                submit(hung, move || {
                    // The first waits for the word, the others for the first.
                    let _ = lock(&wait).recv();
                    sender.send(());
                });
                Box::pin(receiver)
            })
            .collect();
        for n in 0..2 * THREADS_MAX {
            assert_eq!(block_on(unblock_on(other, move || n)), n);
            assert_eq!(block_on(unblock(move || n)), n);
        }
        assert_eq!(POOL.lock().queues[&hung].begun, THREADS_MAX);
        drop(go_on);
        assert!(block_on(vellum_core::join_all(calls)).iter().all(Option::is_some));
    }
}
