//! Whether the cache still takes changes.
//!
//! A cache stops when it no longer knows what is on flash: after a failed record, slice or flush, and after a
//! request was dropped half way, whose bytes may land in a slot that has another owner by then. Reads go on.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::{Error, ErrorKind, Result, lock};

#[derive(Default)]
pub(crate) struct Stop {
    is_stopped: AtomicBool,
    why: Mutex<Option<Error>>,
}

impl Stop {
    /// Refuses changes once the cache has stopped.
    pub(crate) fn check(&self) -> Result<()> {
        match self.why() {
            Some(why) => Err(why),
            None => Ok(()),
        }
    }

    /// Why it has stopped.
    pub(crate) fn why(&self) -> Option<Error> {
        if !self.is_stopped.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.why).clone()
    }

    /// It stops, for this reason. The first reason stays.
    pub(crate) fn stop(&self, error: Error, what: String) -> Error {
        let why =
            error.context(format!("{what}, so it takes no more changes")).with_kind(ErrorKind::Poisoned);
        let mut first = lock(&self.why);
        first.get_or_insert(why.clone());
        self.is_stopped.store(true, Ordering::Release);
        why
    }

    /// A transfer that stops the cache when it is dropped half way.
    pub(crate) fn under_way(&self, what: &'static str) -> UnderWay<'_> {
        UnderWay { stop: self, what, has_ended: false }
    }
}

/// Bytes in transfer to flash, or a commit.
pub(crate) struct UnderWay<'a> {
    stop: &'a Stop,
    what: &'static str,
    has_ended: bool,
}

impl UnderWay<'_> {
    /// They have landed, or failed to.
    pub(crate) fn end(mut self) {
        self.has_ended = true;
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let what = format!("{} was dropped half way", self.what);
            let _stopped = self.stop.stop(Error::new(ErrorKind::Poisoned, "interrupted"), what);
        }
    }
}
