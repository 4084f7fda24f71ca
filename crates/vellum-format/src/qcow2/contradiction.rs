//! What is remembered of an image that contradicts itself, from the request that meets it to the one that acts
//! on it (`corrupt.rs`).

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use vellum_core::Error;

use crate::state::lock;

/// The first contradiction found in the metadata, until it is acted on.
#[derive(Default)]
pub(crate) struct Contradiction {
    first: Mutex<Option<Error>>,
    is_found: AtomicBool,
}

impl Contradiction {
    pub(crate) fn find(&self, error: &Error) {
        lock(&self.first).get_or_insert_with(|| error.clone());
        self.is_found.store(true, Ordering::Release);
    }

    pub(crate) fn is_found(&self) -> bool {
        self.is_found.load(Ordering::Acquire)
    }

    /// The first caller gets it.
    pub(crate) fn take(&self) -> Option<Error> {
        lock(&self.first).take()
    }
}
