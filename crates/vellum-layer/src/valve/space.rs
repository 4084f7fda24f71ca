//! Requests that found no space and are held until there is some: `werror=enospc` of QEMU.
//!
//! ```text
//!   no space ──► wait: one of those that wait tries again every second     success ──► all try again
//!                      the others wait for it                              no space ──► wait
//! ```
//!
//! 1. A waiting request is not inside: the disk can be paused, exchanged and ended meanwhile.
//! 2. As long as requests wait, one of them tries.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use event_listener::Event;
use futures_lite::future::or;
use vellum_core::Clock;

/// How often it is tried again.
const TRIED_EVERY: Duration = Duration::from_secs(1);

/// The requests that wait for space.
#[derive(Default)]
pub(super) struct Space {
    is_waited_for: AtomicBool,
    waiting: AtomicUsize,
    /// How often all of them were woken to try again.
    turns: AtomicU64,
    somebody_tries: AtomicBool,
    changed: Event,
}

/// Tries again for all, until dropped.
struct Trying<'a>(&'a Space);

impl Drop for Trying<'_> {
    fn drop(&mut self) {
        self.0.somebody_tries.store(false, SeqCst);
        self.0.changed.notify(usize::MAX);
    }
}

struct Waiting<'a>(&'a Space);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, SeqCst);
    }
}

impl Space {
    /// Whether requests that find no space wait, from now on.
    pub(super) fn is_waited_for(&self) -> bool {
        self.is_waited_for.load(SeqCst)
    }

    pub(super) fn set_waited_for(&self, is_waited_for: bool) {
        self.is_waited_for.store(is_waited_for, SeqCst);
        self.try_again();
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }

    /// All try again; true if there were any.
    pub(super) fn try_again(&self) -> bool {
        self.turns.fetch_add(1, SeqCst);
        self.changed.notify(usize::MAX);
        self.waiting() > 0
    }

    /// A request found space.
    pub(super) fn is_back(&self) {
        if self.waiting() > 0 {
            self.try_again();
        }
    }

    /// Waits until it is worth trying again.
    pub(super) async fn wait(&self, clock: &dyn Clock) {
        self.waiting.fetch_add(1, SeqCst);
        let _waiting = Waiting(self);
        let turn = self.turns.load(SeqCst);
        loop {
            let changed = self.changed.listen();
            if self.turns.load(SeqCst) != turn || !self.is_waited_for() {
                return;
            }
            if !self.somebody_tries.swap(true, SeqCst) {
                let _trying = Trying(self);
                or(changed, clock.sleep(TRIED_EVERY)).await;
                return;
            }
            changed.await;
        }
    }
}
