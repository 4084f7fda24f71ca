//! Counts the requests inside and closes the door to new ones: requests pass without a lock, and all of them
//! can be waited for.
//!
//! ```text
//!   enter   counted inside ► not held? ── yes ──► inside                         hold     from now on none enters
//!                              └── no ──► counted out again, wait until open     ► drained   none is inside
//! ```
//!
//! 1. A request counts itself before it checks whether the passage is held; a holder announces itself before
//!    it reads the count. So one of them sees the other.
//! 2. Several holders may hold it at a time. It is open when the last has released it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use event_listener::Event;

/// Counters are spread so that cores do not fight for one cache line.
const SHARDS: usize = 8;

#[repr(align(64))]
#[derive(Default)]
struct Shard(AtomicUsize);

thread_local! {
    static SHARD: usize = {
        static NEXT: AtomicUsize = const { AtomicUsize::new(0) };
        NEXT.fetch_add(1, SeqCst) % SHARDS
    };
}

/// Where all requests of a disk pass.
#[derive(Default)]
pub(crate) struct Passage {
    holders: AtomicUsize,
    inside: [Shard; SHARDS],
    waiting: AtomicUsize,
    opened: Event,
    left: Event,
}

/// A request that is inside.
pub(crate) struct Inside<'a> {
    passage: &'a Passage,
    counter: &'a AtomicUsize,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.counter.fetch_sub(1, SeqCst);
        if self.passage.holders.load(SeqCst) > 0 {
            self.passage.left.notify(usize::MAX);
        }
    }
}

/// No request enters until this is dropped.
pub struct Hold(Arc<Passage>);

impl Drop for Hold {
    fn drop(&mut self) {
        if self.0.holders.fetch_sub(1, SeqCst) == 1 {
            self.0.opened.notify(usize::MAX);
        }
    }
}

/// A request that waits, until dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

impl Passage {
    /// Enters if it is open.
    pub(crate) fn try_enter(&self) -> Option<Inside<'_>> {
        let counter = &self.inside[SHARD.with(|shard| *shard)].0;
        counter.fetch_add(1, SeqCst);
        let inside = Inside { passage: self, counter };
        (self.holders.load(SeqCst) == 0).then_some(inside)
    }

    /// Enters, as soon as it is open.
    pub(crate) async fn enter(&self) -> Inside<'_> {
        if let Some(inside) = self.try_enter() {
            return inside;
        }
        self.waiting.fetch_add(1, SeqCst);
        let _waiting = Waiting(&self.waiting);
        loop {
            let opened = self.opened.listen();
            if let Some(inside) = self.try_enter() {
                return inside;
            }
            opened.await;
        }
    }

    /// From now on no request enters. Requests that are already inside continue.
    pub(crate) fn hold(self: &Arc<Self>) -> Hold {
        self.holders.fetch_add(1, SeqCst);
        Hold(self.clone())
    }

    /// Waits until no request is inside. For a holder.
    pub(crate) async fn drained(&self) {
        loop {
            let left = self.left.listen();
            if self.inside() == 0 {
                return;
            }
            left.await;
        }
    }

    /// How many are inside.
    pub(crate) fn inside(&self) -> usize {
        self.inside.iter().map(|shard| shard.0.load(SeqCst)).sum()
    }

    /// How many wait until it is open.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use futures_lite::future::{block_on, poll_once};

    use super::*;

    #[test]
    fn who_is_inside_is_waited_for_and_nobody_else_enters() {
        let passage = Arc::new(Passage::default());
        let inside = passage.try_enter().expect("it is open");
        let first = passage.hold();
        block_on(async {
            let mut drained = std::pin::pin!(passage.drained());
            assert!(poll_once(&mut drained).await.is_none());
            let mut enter = std::pin::pin!(passage.enter());
            assert!(poll_once(&mut enter).await.is_none());
            assert_eq!((passage.inside(), passage.waiting()), (1, 1));
            drop(inside);
            drained.await;
            let second = passage.hold();
            drop(first);
            assert!(poll_once(&mut enter).await.is_none(), "it is still held");
            drop(second);
            drop(enter.await);
        });
        assert_eq!((passage.inside(), passage.waiting()), (0, 0));
    }

    #[test]
    fn a_waiter_that_goes_is_no_longer_counted() {
        let passage = Arc::new(Passage::default());
        let _hold = passage.hold();
        block_on(async {
            let mut enter = Box::pin(passage.enter());
            assert!(poll_once(&mut enter).await.is_none());
            drop(enter);
        });
        assert_eq!((passage.inside(), passage.waiting()), (0, 0));
    }

    /// Threads that pass all the time, and one that holds the passage again and again: while it is held none
    /// is inside.
    #[test]
    fn nobody_is_inside_while_it_is_held() {
        const ROUNDS: usize = 2000;
        let (passage, is_alone, ends) =
            (Arc::new(Passage::default()), AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let passers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let mut passed = 0u64;
                        while !ends.load(SeqCst) {
                            let inside = block_on(passage.enter());
                            assert!(!is_alone.load(SeqCst), "somebody holds it");
                            passed += 1;
                            drop(inside);
                        }
                        passed
                    })
                })
                .collect();
            for _ in 0..ROUNDS {
                let hold = passage.hold();
                block_on(passage.drained());
                is_alone.store(true, SeqCst);
                std::hint::spin_loop();
                is_alone.store(false, SeqCst);
                drop(hold);
            }
            ends.store(true, SeqCst);
            for passer in passers {
                passer.join().expect("it was never wrong");
            }
        });
        assert_eq!((passage.inside(), passage.waiting()), (0, 0));
    }
}
