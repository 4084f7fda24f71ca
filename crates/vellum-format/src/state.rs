//! Whether an image still takes requests, and how its locks are taken.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vellum_core::{Error, ErrorKind, Result};

/// Whether the image still takes requests.
#[derive(Default)]
pub(crate) struct State {
    closed: AtomicBool,
    stopped: Mutex<Option<Error>>,
    is_stopped: AtomicBool,
}

impl State {
    /// Refuses what comes after `close`.
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

/// Locks a mutex; a panic elsewhere while it was held does not matter, as nothing is left half done under it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes that are on their way. Were the future dropped, they could land at any later time, on what somebody else has written there by
/// then: so the image takes no more changes.
pub(crate) struct UnderWay<'a> {
    state: &'a State,
    what: &'static str,
    has_ended: bool,
}

impl<'a> UnderWay<'a> {
    /// `what` is said of them when they are abandoned.
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
            let why = format!("{} was abandoned half way: reopen the image", self.what);
            self.state.stop(Error::new(ErrorKind::Poisoned, why));
        }
    }
}
