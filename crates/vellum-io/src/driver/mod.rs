//! How operations reach the kernel: through a ring, or through threads. One driver per worker.
//!
//! ```text
//!   Submission (a future) ── start / poll_op / abandon ──▶ Driver ─┬─ Uring     the ring of this worker
//!   the worker's loop ────── submit / wait / reap ──────▶          └─ Threads   the blocking pool and a poller
//! ```
//!
//! Both keep the same promises:
//! 1. An operation that was started owns its memory and descriptor until it has ended, even if its future is
//!    dropped.
//! 2. Results are delivered only by `reap`, in the worker's loop. So a task that always finds its data ready
//!    cannot keep the others from running.
//! 3. When the driver has been closed, everything that was started has ended.

mod choose;
mod entry;
mod execute;
pub(crate) mod op;
mod shares;
mod slots;
mod threads;
mod uring;
mod watch;

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use vellum_core::Result;

pub use choose::IoMode;
#[cfg(feature = "ublk")]
pub(crate) use choose::{NoRing, no_ring};
use op::{Op, OpResult};

use crate::blocking::unblock_on;
use crate::wakeup::Wakeup;
use crate::worker;

/// One worker's way to the kernel.
#[expect(clippy::large_enum_variant, reason = "there is one per worker, behind a pointer")]
pub(crate) enum Driver {
    Uring(uring::Uring),
    Threads(threads::Threads),
}

impl Driver {
    /// A driver for this thread, in the requested mode or the one that works. A ring is polled for up to
    /// `watch` before its worker sleeps.
    pub(crate) fn new(mode: IoMode, watch: Duration) -> Result<(Self, Arc<Wakeup>)> {
        if mode != IoMode::Threads {
            match uring::Uring::new(watch) {
                Ok((ring, wakeup)) => return Ok((Self::Uring(ring), wakeup)),
                Err(reason) => {
                    if let Some(error) = choose::without_ring(mode, reason) {
                        return Err(error);
                    }
                }
            }
        }
        let (threads, wakeup) = threads::Threads::new()?;
        Ok((Self::Threads(threads), wakeup))
    }

    /// Which one it has become.
    pub(crate) fn mode(&self) -> IoMode {
        match self {
            Self::Uring(_) => IoMode::Uring,
            Self::Threads(_) => IoMode::Threads,
        }
    }

    /// Why the kernel takes no more operations, if it does not.
    fn given_up(&self) -> Option<i32> {
        match self {
            Self::Uring(ring) => ring.given_up(),
            Self::Threads(_) => None,
        }
    }

    fn start(&self, op: Op) -> usize {
        match self {
            Self::Uring(ring) => ring.start(op),
            Self::Threads(threads) => threads.start(op),
        }
    }

    fn poll_op(&self, key: usize, context: &Context<'_>) -> Poll<(OpResult, Op)> {
        match self {
            Self::Uring(ring) => ring.poll_op(key, context),
            Self::Threads(threads) => threads.poll_op(key, context),
        }
    }

    fn abandon(&self, key: usize) {
        match self {
            Self::Uring(ring) => ring.abandon(key),
            Self::Threads(threads) => threads.abandon(key),
        }
    }

    /// Tells the kernel what has gathered, without waiting.
    pub(crate) fn submit(&self) {
        match self {
            Self::Uring(ring) => ring.submit(),
            Self::Threads(threads) => threads.look(),
        }
    }

    /// Submits what has gathered to the kernel and waits until an operation ends, another thread rings, or
    /// `patience` is over. The worker has marked itself as asleep before.
    pub(crate) fn wait(&self, patience: Option<Duration>) {
        match self {
            Self::Uring(ring) => ring.wait(patience),
            Self::Threads(threads) => threads.wait(patience),
        }
    }

    /// Waits for the end of everything that was started. Nothing is started afterwards.
    pub(crate) fn close(&self) {
        match self {
            Self::Uring(ring) => ring.close(),
            Self::Threads(threads) => threads.close(),
        }
    }

    /// Wakes those whose operations have ended.
    pub(crate) fn reap(&self) {
        match self {
            Self::Uring(ring) => ring.reap(),
            Self::Threads(threads) => threads.reap(),
        }
    }
}

/// An operation in flight on this worker. Returns the result and the operation with everything it owned. If
/// it is dropped earlier, the kernel is asked to cancel the operation, and what it owns lives on until that
/// has ended.
pub(crate) struct Submission {
    driver: Rc<Driver>,
    key: Option<usize>,
}

/// Starts the operation on the current worker. Panics when the thread is none.
pub(crate) fn submit(op: Op) -> Submission {
    let driver = worker::current_driver();
    let key = Some(driver.start(op));
    Submission { driver, key }
}

impl Future for Submission {
    type Output = (OpResult, Op);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let key = self.key.expect("a submission is not polled after its end");
        let polled = self.driver.poll_op(key, context);
        if polled.is_ready() {
            self.key = None;
        }
        polled
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.driver.abandon(key);
        }
    }
}

/// What is added to the error of an operation, where it is this worker's way to the kernel that has failed.
pub(crate) fn why_given_up() -> String {
    match worker::try_current_driver().and_then(|driver| driver.given_up()) {
        None => String::new(),
        Some(errno) => format!(
            ", because the kernel refuses all that is asked over io_uring ({}): this program has to be started again",
            std::io::Error::from_raw_os_error(errno)
        ),
    }
}

/// Performs an operation on a file with a blocking system call on the pool: for the rare one that the ring
/// fails again and again with `EAGAIN`.
pub(crate) async fn submit_blocking(mut op: Op) -> (OpResult, Op) {
    unblock_on(op.backend(), move || {
        let result = execute::perform(&mut op);
        op.settle(result);
        (result, op)
    })
    .await
}
