//! Whether an image still takes requests, and how its locks are taken.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use vellum_core::{Error, ErrorKind, Result};

use crate::perturb;

/// Whether the image still takes requests.
#[derive(Default)]
pub(crate) struct State {
    closed: AtomicBool,
    stopped: Mutex<Option<Error>>,
    is_stopped: AtomicBool,
}

impl State {
    /// Refuses requests after `close`.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the disk is closed"));
        }
        Ok(())
    }

    /// Refuses changes once something happened after which the medium cannot be trusted.
    pub(crate) fn check_stopped(&self) -> Result<()> {
        if self.is_stopped.load(Ordering::Acquire) {
            let stopped = lock(&self.stopped);
            return Err(stopped.clone().expect("set before the flag"));
        }
        Ok(())
    }

    /// From now on no change is accepted, for this reason. The first reason stays.
    pub(crate) fn stop(&self, why: Error) {
        let mut stopped = lock(&self.stopped);
        stopped.get_or_insert(why);
        self.is_stopped.store(true, Ordering::Release);
    }

    pub(crate) fn close(&self) -> bool {
        !self.closed.swap(true, Ordering::AcqRel)
    }
}

/// Locks a mutex as everywhere, and is a place where a thread may be delayed in a test.
#[track_caller]
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    perturb::point();
    vellum_core::lock(mutex)
}

/// Bytes in transfer. If the future is dropped, they may land at any later time, over data that another
/// request has written there by then. So the image accepts no more changes after that.
pub(crate) struct UnderWay<'a> {
    state: &'a State,
    what: &'static str,
    has_ended: bool,
}

impl<'a> UnderWay<'a> {
    /// `what` describes them in the message if they are abandoned.
    pub(crate) fn begin(state: &'a State, what: &'static str) -> Self {
        Self { state, what, has_ended: false }
    }

    /// They have landed, or failed to.
    pub(crate) fn end(mut self) {
        self.has_ended = true;
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let why = format!("{} was interrupted: reopen the image", self.what);
            self.state.stop(Error::new(ErrorKind::Poisoned, why));
        }
    }
}
