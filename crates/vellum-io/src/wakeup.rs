//! How other threads wake a sleeping worker, with a system call only when it does sleep.
//!
//! ```text
//!   worker                                     another thread
//!     asleep = true                              queue.push(task)
//!     look at every queue once more              if asleep.swap(false) { bell.ring() }
//!     wait in the kernel ─────────────── eventfd ───────┘
//!     asleep = false
//! ```
//!
//! 1. The worker sets the flag before it checks its queues for the last time; the other thread checks the
//!    flag after it has filled a queue. One of them sees the other, so no wake-up is lost.
//! 2. Only the thread that clears the flag rings, so a burst of wake-ups costs one system call, and wake-ups
//!    by the worker itself while it is awake cost none.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::Wake;

use polling::Poller;

/// Ends a thread's wait in the kernel.
pub(crate) enum Bell {
    /// A ring waits by reading this eventfd.
    Eventfd(OwnedFd),
    /// A poller has its own.
    Poller(Arc<Poller>),
}

/// The sleep of one worker.
pub(crate) struct Wakeup {
    asleep: AtomicBool,
    bell: Bell,
}

impl Wakeup {
    pub(crate) fn new(bell: Bell) -> Arc<Self> {
        Arc::new(Self { asleep: AtomicBool::new(false), bell })
    }

    /// Called by the worker before it checks its queues for the last time.
    pub(crate) fn lie_down(&self) {
        self.asleep.store(true, SeqCst);
    }

    /// Called by the worker when it is awake again, before it wakes any task.
    pub(crate) fn get_up(&self) {
        self.asleep.store(false, SeqCst);
    }

    /// Wakes the worker if it sleeps; called by other threads after giving it work.
    pub(crate) fn ring(&self) {
        if !self.asleep.swap(false, SeqCst) {
            return;
        }
        #[expect(clippy::host_endian_bytes, reason = "an eventfd takes a number of the host")]
        let one = 1u64.to_ne_bytes();
        match &self.bell {
            // The counter is far from its maximum, so the write cannot block; and it cannot fail for another
            // reason.
            Bell::Eventfd(eventfd) => drop(rustix::io::write(eventfd, &one)),
            Bell::Poller(poller) => drop(poller.notify()),
        }
    }

    /// The eventfd of a ring.
    pub(crate) fn eventfd(&self) -> Option<&OwnedFd> {
        match &self.bell {
            Bell::Eventfd(eventfd) => Some(eventfd),
            Bell::Poller(_) => None,
        }
    }
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        self.ring();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ring();
    }
}

/// Whether the main future of a worker must be polled; its waker.
pub(crate) struct MainReady {
    ready: AtomicBool,
    wakeup: Arc<Wakeup>,
}

impl MainReady {
    /// Ready from the start.
    pub(crate) fn new(wakeup: Arc<Wakeup>) -> Arc<Self> {
        Arc::new(Self { ready: AtomicBool::new(true), wakeup })
    }

    /// Whether it was woken since the last call.
    pub(crate) fn take(&self) -> bool {
        // A plain load first: the answer is mostly no, and a swap would take the cache line for writing.
        self.is_ready() && self.ready.swap(false, SeqCst)
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(SeqCst)
    }
}

impl Wake for MainReady {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.store(true, SeqCst);
        self.wakeup.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::Errno;

    #[test]
    fn only_a_sleeping_thread_costs_a_system_call_and_only_once() {
        let bell = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let wakeup = Wakeup::new(Bell::Eventfd(bell));
        let rings = || {
            let mut count = [0; 8];
            rustix::io::read(wakeup.eventfd().expect("an eventfd"), &mut count).map(|_| count[0])
        };
        wakeup.ring();
        assert_eq!(rings(), Err(Errno::AGAIN), "it is up");
        wakeup.lie_down();
        (0..5).for_each(|_| wakeup.ring());
        assert_eq!(rings(), Ok(1), "one of five gets it up");
        wakeup.lie_down();
        wakeup.get_up();
        wakeup.ring();
        assert_eq!(rings(), Err(Errno::AGAIN), "it got up by itself");
    }

    #[test]
    fn the_main_future_is_woken_once_for_many_calls() {
        let bell = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let ready = MainReady::new(Wakeup::new(Bell::Eventfd(bell)));
        assert!(ready.take(), "it is polled first of all");
        assert!(!ready.take());
        ready.wake_by_ref();
        ready.clone().wake();
        assert!(ready.take() && !ready.take());
    }
}
