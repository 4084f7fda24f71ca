//! One at a time per key: whoever loads a page or makes a table first does it for all.

use std::sync::{Mutex, MutexGuard, PoisonError};

use event_listener::Event;

use crate::hash::HashSet;

/// Locks that come into being when they are taken.
#[derive(Default)]
pub(crate) struct KeyedLocks {
    taken: Mutex<HashSet<u64>>,
    released: Event,
}

impl KeyedLocks {
    /// Waits until nobody holds the key, and takes it.
    pub(crate) async fn lock(&self, key: u64) -> KeyGuard<'_> {
        loop {
            let listener = {
                let mut taken = self.taken();
                if taken.insert(key) {
                    return KeyGuard { locks: self, key };
                }
                self.released.listen()
            };
            listener.await;
        }
    }

    fn taken(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Holds a key until it is dropped.
pub(crate) struct KeyGuard<'a> {
    locks: &'a KeyedLocks,
    key: u64,
}

impl Drop for KeyGuard<'_> {
    fn drop(&mut self) {
        self.locks.taken().remove(&self.key);
        self.locks.released.notify(usize::MAX);
    }
}
