//! The blocking pool: a few threads, shared by all workers, for system calls that cannot be asked of a ring.
//!
//! Opening files, asking for their facts, cutting them off; and in thread mode every read, write and flush. A thread is
//! started when a job finds none idle, up to [`THREADS_MAX`], and ends when it has had nothing to do for [`IDLE_MAX`].
//!
//! 1. A job owns all it works on, so whoever asked for it may go away before it ends.
//! 2. A job never waits for another job; so the cap on threads delays, and never deadlocks.
//! 3. A panic in a job passes to whoever waits for its answer; the thread goes on.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::oneshot::oneshot;

/// How many threads there are at most. It is also the depth of the queue that a drive sees in thread mode.
const THREADS_MAX: usize = 64;

/// How long a thread waits for its next job.
const IDLE_MAX: Duration = Duration::from_secs(10);

type Job = Box<dyn FnOnce() + Send>;

struct Pool {
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

static POOL: Pool =
    Pool { state: Mutex::new(State { jobs: VecDeque::new(), threads: 0, idle: 0 }), work: Condvar::new() };

/// Runs `call`, which may block, on a thread of the blocking pool and waits for its answer. Works on any thread, on
/// a worker or not. When the future is dropped the call runs on and its answer is lost.
pub async fn unblock<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = oneshot();
    submit(move || sender.send(catch_unwind(AssertUnwindSafe(call))));
    match receiver.await.expect("a job answers before it is dropped") {
        Ok(value) => value,
        Err(panic) => resume_unwind(panic),
    }
}

/// Runs `job` on a thread of the pool, some time.
pub(crate) fn submit(job: impl FnOnce() + Send + 'static) {
    let mut state = POOL.lock();
    state.jobs.push_back(Box::new(job));
    // An idle thread counts as idle until it has taken a job, so jobs are weighed against all of them.
    let start = state.jobs.len() > state.idle && state.threads < THREADS_MAX;
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

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                // Jobs pass their panics on themselves; one that does not must not cost the pool a thread.
                drop(catch_unwind(AssertUnwindSafe(job)));
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let (woken, wait) =
                self.work.wait_timeout(state, IDLE_MAX).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            state.idle -= 1;
            if wait.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }

    /// The host gave no thread. While others run they will come to the job; the last resort is the caller's own.
    fn without_a_thread(&self) {
        let mut state = self.lock();
        state.threads -= 1;
        while state.threads == 0
            && let Some(job) = state.jobs.pop_front()
        {
            drop(state);
            drop(catch_unwind(AssertUnwindSafe(job)));
            state = self.lock();
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
}
