//! A lane: the bounded queue from a thread that takes requests from the kernel to the worker that executes
//! them.
//!
//! ```text
//!   fuser's thread ── put ──► [ job │ job │ job ] ──► serve, on a worker ──► flight ──► answer
//!        ▲ waits while the lane is full                    │
//!        └──────────────────── settled ◄───────────────────┘
//! ```
//!
//! 1. A job and its memory are counted from `put` until its answer was sent. `put` waits for room; a single
//!    job is always admitted.
//! 2. Every job is answered once: by the worker, or by `put`, which returns the job when no more jobs are
//!    begun.
//! 3. `serve` ends when the lane is closed and every job that was put in is answered.
//!
//! Lanes share nothing, so threads and workers of different lanes never contend.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use futures_lite::FutureExt as _;
use vellum_core::{Error, ErrorKind, LocalFuture, Result, lock};

use super::work::{Behind, Operation, Outcome};
use crate::flight::Flight;

/// Requests of one lane that are waiting or in flight.
pub const REQUESTS_MAX: usize = 256;

/// The bytes that these hold. The largest request has 1 MiB.
pub const MEMORY_BYTES_MAX: usize = 32 << 20;

/// After this many passes in a row the worker's other tasks get their turn.
const PASSES_MAX: usize = 16;

/// How the answer reaches the program that waits for it.
pub(super) trait Answer: Send + 'static {
    /// Answers, once.
    fn answer(self, result: Result<Outcome>);
}

/// A request, and where its answer goes.
pub(super) struct Job<A> {
    pub(super) operation: Operation,
    pub(super) answer: A,
}

/// What a job counts for while it is in the lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Load {
    requests: usize,
    memory: usize,
}

/// One queue, of one worker.
pub(super) struct Lane<A> {
    state: Mutex<State<A>>,
    /// There is room again, or no more jobs are begun.
    changed: Condvar,
}

struct State<A> {
    jobs: VecDeque<Job<A>>,
    load: Load,
    /// Threads that wait for room.
    waiting: usize,
    takes_more: bool,
    is_closed: bool,
    worker: Option<Waker>,
}

impl<A: Answer> Lane<A> {
    pub(super) fn new() -> Self {
        let state = State {
            jobs: VecDeque::new(),
            load: Load::default(),
            waiting: 0,
            takes_more: true,
            is_closed: false,
            worker: None,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<A>> {
        lock(&self.state)
    }

    /// Puts a job in, as soon as there is room. Returns it if no more jobs are begun.
    pub(super) fn put(&self, job: Job<A>) -> Result<(), Job<A>> {
        let memory = job.operation.memory_bytes();
        let mut state = self.lock();
        while state.takes_more && !state.has_room(memory) {
            state.waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        if !state.takes_more {
            return Err(job);
        }
        state.load.requests += 1;
        state.load.memory += memory;
        state.jobs.push_back(job);
        let worker = state.worker.take();
        drop(state);
        worker.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// Begins nothing more.
    pub(super) fn drain(&self) {
        self.lock().takes_more = false;
        self.changed.notify_all();
    }

    /// Whether everything that was put in is answered.
    pub(super) fn is_idle(&self) -> bool {
        self.lock().load == Load::default()
    }

    /// Lets `serve` end once everything is answered. No more jobs are begun.
    pub(super) fn close(&self) {
        self.drain();
        let mut state = self.lock();
        state.is_closed = true;
        let worker = state.worker.take();
        drop(state);
        worker.into_iter().for_each(Waker::wake);
    }

    /// Does what comes in, on the worker that polls this, until the lane is closed.
    pub(super) async fn serve(&self, behind: &Behind) {
        let mut flight: Flight<LocalFuture<'_, usize>> = Flight::new(REQUESTS_MAX);
        poll_fn(|context| {
            for _ in 0..PASSES_MAX {
                let mut settled = Load::default();
                let mut settle = |memory| {
                    settled.requests += 1;
                    settled.memory += memory;
                };
                let ended = flight.poll_woken(context, &mut settle);
                let (jobs, is_closed) = self.take(context);
                let begun = jobs.len();
                for job in jobs {
                    if let Some(memory) = flight.start(Box::pin(carry_out(behind, job))) {
                        settle(memory);
                    }
                }
                if settled != Load::default() {
                    self.settle(settled);
                }
                if ended == 0 && begun == 0 {
                    let is_over = is_closed && flight.running() == 0;
                    return if is_over { Poll::Ready(()) } else { Poll::Pending };
                }
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    /// All that has come, and whether the lane is closed. The task is woken when more comes.
    fn take(&self, context: &Context<'_>) -> (VecDeque<Job<A>>, bool) {
        let mut state = self.lock();
        if state.jobs.is_empty() {
            state.worker = Some(context.waker().clone());
        }
        (std::mem::take(&mut state.jobs), state.is_closed)
    }

    fn settle(&self, settled: Load) {
        let mut state = self.lock();
        state.load.requests -= settled.requests;
        state.load.memory -= settled.memory;
        let is_waited_for = state.waiting > 0;
        drop(state);
        if is_waited_for {
            self.changed.notify_all();
        }
    }
}

impl<A> State<A> {
    fn has_room(&self, memory: usize) -> bool {
        self.load.requests == 0
            || (self.load.requests < REQUESTS_MAX
                && self.load.memory.saturating_add(memory) <= MEMORY_BYTES_MAX)
    }
}

/// Executes a job, answers it, and returns what it held.
async fn carry_out<A: Answer>(behind: &Behind, job: Job<A>) -> usize {
    let memory = job.operation.memory_bytes();
    let answer = match AssertUnwindSafe(behind.perform(job.operation)).catch_unwind().await {
        Ok(answer) => answer,
        // What a disk does is caught there; this is for the rules on the way to it.
        Err(_) => {
            tracing::error!("a FUSE request failed with an internal error");
            Err(Error::new(ErrorKind::Io, "internal error of the server"))
        }
    };
    job.answer.answer(answer);
    memory
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use futures_lite::future::{block_on, poll_once};
    use vellum_core::{
        Buffer, Disk, Extent, Geometry, GuestOffset, GuestSpan, MemoryDisk, WriteFlags, ZeroFlags,
    };

    use super::*;

    impl Answer for Sender<Result<Outcome>> {
        fn answer(self, result: Result<Outcome>) {
            self.send(result).expect("the test listens");
        }
    }

    type TestLane = Lane<Sender<Result<Outcome>>>;

    fn behind() -> Behind {
        Behind::new(MemoryDisk::new(64 << 20))
    }

    fn read(len: u64) -> (Job<Sender<Result<Outcome>>>, Receiver<Result<Outcome>>) {
        let (answer, answered) = channel();
        (Job { operation: Operation::Read { span: GuestOffset::ZERO.span(len) }, answer }, answered)
    }

    #[test]
    fn each_job_of_many_threads_is_answered_once() {
        let (lane, behind) = (Arc::new(TestLane::new()), behind());
        let threads: Vec<_> = (0..4_u64)
            .map(|thread| {
                let lane = lane.clone();
                std::thread::spawn(move || {
                    for round in 0..500 {
                        let data = Buffer::copy_of(&thread.to_le_bytes());
                        let at = GuestOffset::new((thread * 500 + round) * 8);
                        let (answer, answered) = channel();
                        let operation = Operation::Write { at, data, synced: None };
                        assert!(lane.put(Job { operation, answer }).is_ok());
                        assert!(matches!(answered.recv(), Ok(Ok(Outcome::Written(8)))));
                        assert!(answered.recv().is_err(), "one answer");
                    }
                })
            })
            .collect();
        let closing = lane.clone();
        let closer = std::thread::spawn(move || {
            threads.into_iter().for_each(|thread| thread.join().expect("a thread"));
            closing.close();
        });
        block_on(lane.serve(&behind));
        closer.join().expect("it closes");
        assert!(lane.is_idle());
    }

    struct Panics;

    impl Disk for Panics {
        fn geometry(&self) -> Geometry {
            MemoryDisk::new(4096).geometry()
        }

        fn read(&self, _: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
            match buffer.len() {
                512 => panic!("as planned"),
                _ => Box::pin(std::future::ready(Ok(buffer))),
            }
        }

        fn write(&self, _: GuestOffset, _: Buffer, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
            panic!("as planned")
        }

        fn flush(&self) -> LocalFuture<'_, Result<()>> {
            panic!("as planned")
        }

        fn write_zeroes(&self, _: GuestSpan, _: ZeroFlags) -> LocalFuture<'_, Result<()>> {
            panic!("as planned")
        }

        fn discard(&self, _: GuestSpan, _: WriteFlags) -> LocalFuture<'_, Result<()>> {
            panic!("as planned")
        }

        fn map(&self, _: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
            panic!("as planned")
        }

        fn close(&self) -> LocalFuture<'_, Result<()>> {
            panic!("as planned")
        }
    }

    #[test]
    fn a_job_that_panics_fails_alone() {
        let (lane, behind) = (TestLane::new(), Behind::new(Arc::new(Panics)));
        let (broken, failed) = read(512);
        let (sound, answered) = read(1024);
        assert!(lane.put(broken).is_ok() && lane.put(sound).is_ok());
        lane.close();
        block_on(lane.serve(&behind));
        assert!(matches!(failed.recv(), Ok(Err(_))) && matches!(answered.recv(), Ok(Ok(Outcome::Bytes(_)))));
        assert!(lane.is_idle());
    }

    #[test]
    fn a_full_lane_lets_nobody_in_until_something_is_answered() {
        let (lane, behind) = (Arc::new(TestLane::new()), behind());
        let mut answers = Vec::new();
        for _ in 0..MEMORY_BYTES_MAX >> 20 {
            let (job, answered) = read(1 << 20);
            assert!(lane.put(job).is_ok());
            answers.push(answered);
        }
        let (job, last) = read(1);
        let other = lane.clone();
        let thread = std::thread::spawn(move || other.put(job).is_ok());
        while lane.lock().waiting == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(last.try_recv().is_err());
        let mut serving = Box::pin(lane.serve(&behind));
        while last.try_recv().is_err() {
            assert!(block_on(poll_once(&mut serving)).is_none());
        }
        assert!(thread.join().expect("it was let in"));
        assert!(answers.iter().all(|answered| answered.recv().is_ok()));
        lane.close();
        block_on(serving);
    }

    #[test]
    fn after_a_drain_jobs_come_back_and_those_that_wait_are_woken() {
        let (lane, behind) = (Arc::new(TestLane::new()), behind());
        let (large, answered) = read((MEMORY_BYTES_MAX + 1) as u64);
        assert!(lane.put(large).is_ok(), "one alone has room");
        let (job, _) = read(1);
        let other = lane.clone();
        let thread = std::thread::spawn(move || other.put(job).is_err());
        while lane.lock().waiting == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        lane.drain();
        assert!(thread.join().expect("it is woken"), "the job comes back");
        assert!(!lane.is_idle());
        lane.close();
        block_on(lane.serve(&behind));
        assert!(matches!(answered.recv(), Ok(Ok(Outcome::Bytes(_)))), "what was begun is answered");
        assert!(lane.is_idle());
    }
}
