//! The limit on concurrent connections, for the accept loop.
//!
//! A slot is taken *before* `accept`, so that clients beyond the limit wait in the kernel's queue and cost
//! nothing here; or after it with [`try_take`](ConnectionSlots::try_take), to turn them away. Every
//! connection holds its slot until its session has ended, however it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::Event;

/// A fixed number of slots, shared by all accept loops of a server.
#[derive(Debug, Clone)]
pub struct ConnectionSlots(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    max: usize,
    taken: AtomicUsize,
    freed: Event,
}

/// The right to one connection. Dropping it returns the slot.
#[derive(Debug)]
#[must_use = "the slot is free again as soon as this is dropped"]
pub struct ConnectionSlot(Arc<Inner>);

impl ConnectionSlots {
    /// `max` slots; with zero no connection gets one.
    pub fn new(max: usize) -> Self {
        Self(Arc::new(Inner { max, taken: AtomicUsize::new(0), freed: Event::new() }))
    }

    /// A slot, if one is free.
    pub fn try_take(&self) -> Option<ConnectionSlot> {
        let more = |taken| (taken < self.0.max).then_some(taken + 1);
        let before = self.0.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        before.ok().map(|_| ConnectionSlot(self.0.clone()))
    }

    /// A slot, as soon as one is free.
    pub async fn take(&self) -> ConnectionSlot {
        loop {
            if let Some(slot) = self.try_take() {
                return slot;
            }
            let freed = self.0.freed.listen();
            if let Some(slot) = self.try_take() {
                return slot;
            }
            freed.await;
        }
    }

    /// How many are taken.
    pub fn taken(&self) -> usize {
        self.0.taken.load(Ordering::Acquire)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::AcqRel);
        self.0.freed.notify(1);
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::{block_on, poll_once, zip};

    use super::*;

    #[test]
    fn a_slot_is_free_again_when_it_is_dropped() {
        let slots = ConnectionSlots::new(2);
        let first = slots.try_take();
        let second = slots.try_take();
        assert!(first.is_some() && second.is_some() && slots.try_take().is_none());
        drop(first);
        assert_eq!(slots.taken(), 1);
        assert!(slots.try_take().is_some());
        drop(second);
        assert_eq!(slots.taken(), 0);
    }

    #[test]
    fn those_who_wait_are_served_in_turn() {
        let slots = ConnectionSlots::new(1);
        block_on(async {
            let held = slots.take().await;
            let mut waiting = std::pin::pin!(slots.take());
            assert!(poll_once(&mut waiting).await.is_none());
            let (second, ()) = zip(waiting, async { drop(held) }).await;
            drop(second);
        });
        assert_eq!(slots.taken(), 0);
    }
}
