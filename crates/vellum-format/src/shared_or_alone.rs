//! A lock that many hold together, or one alone.
//!
//! A release wakes all who wait, and each looks once. `async_lock::RwLock` wakes one of its waiting readers, who wakes
//! the next even where another writer has come first: readers then wake one another in a circle for as long as that
//! writer takes.
//!
//! 1. Who waits to be alone comes before those who come later, so that it is not kept waiting for ever.

use std::sync::Mutex;

use event_listener::Event;
use vellum_core::lock;

#[derive(Default)]
struct State {
    shared: usize,
    is_alone: bool,
    /// How many wait to be alone.
    waiting: usize,
}

/// The lock.
#[derive(Default)]
pub(crate) struct SharedOrAlone {
    state: Mutex<State>,
    released: Event,
}

/// Held until it is dropped.
pub(crate) struct Held<'a> {
    of: &'a SharedOrAlone,
    is_alone: bool,
}

/// Counts one who waits to be alone; no longer, when it is dropped.
struct Waiting<'a>(&'a SharedOrAlone);

impl SharedOrAlone {
    /// Holds it together with others.
    pub(crate) async fn shared(&self) -> Held<'_> {
        self.when(|state| {
            let is_free = !state.is_alone && state.waiting == 0;
            state.shared += usize::from(is_free);
            is_free
        })
        .await;
        Held { of: self, is_alone: false }
    }

    /// Holds it alone.
    pub(crate) async fn alone(&self) -> Held<'_> {
        lock(&self.state).waiting += 1;
        let waiting = Waiting(self);
        self.when(|state| {
            let is_free = !state.is_alone && state.shared == 0;
            state.is_alone |= is_free;
            is_free
        })
        .await;
        let held = Held { of: self, is_alone: true };
        drop(waiting);
        held
    }

    async fn when(&self, mut take: impl FnMut(&mut State) -> bool) {
        loop {
            if take(&mut lock(&self.state)) {
                return;
            }
            let listener = self.released.listen();
            if take(&mut lock(&self.state)) {
                return;
            }
            listener.await;
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).waiting -= 1;
        self.0.released.notify(usize::MAX);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        {
            let mut state = lock(&self.of.state);
            match self.is_alone {
                true => state.is_alone = false,
                false => state.shared -= 1,
            }
        }
        self.of.released.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::{block_on, poll_once};

    use super::*;

    #[test]
    fn one_alone_waits_for_all_others_and_comes_before_later_ones() {
        block_on(async {
            let held = SharedOrAlone::default();
            let (first, second) = (held.shared().await, held.shared().await);
            let mut alone = Box::pin(held.alone());
            assert!(poll_once(&mut alone).await.is_none());
            let mut later = Box::pin(held.shared());
            assert!(poll_once(&mut later).await.is_none(), "it comes after the one who waits");
            drop(first);
            assert!(poll_once(&mut alone).await.is_none());
            drop(second);
            let alone = poll_once(&mut alone).await.expect("nobody else holds it");
            assert!(poll_once(&mut later).await.is_none());
            drop(alone);
            assert!(poll_once(&mut later).await.is_some());
        });
    }

    #[test]
    fn who_gives_up_waiting_keeps_nobody_out() {
        block_on(async {
            let held = SharedOrAlone::default();
            let first = held.shared().await;
            let mut alone = Box::pin(held.alone());
            assert!(poll_once(&mut alone).await.is_none());
            let mut later = Box::pin(held.shared());
            assert!(poll_once(&mut later).await.is_none());
            drop(alone);
            assert!(poll_once(&mut later).await.is_some());
            drop(first);
        });
    }
}
