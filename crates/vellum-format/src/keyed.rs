//! Mutual exclusion per key: the first task that loads a page or makes a table does it for all.

use std::sync::{Mutex, MutexGuard};

use event_listener::Event;

use crate::hash::HashSet;
use crate::state::lock;

/// Locks that come into being when they are taken.
#[derive(Default)]
pub(crate) struct KeyedLocks {
    taken: Mutex<HashSet<u64>>,
    released: Event,
}

impl KeyedLocks {
    /// Waits until the key is free, and takes it.
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
        lock(&self.taken)
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
