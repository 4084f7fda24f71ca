//! When may a freed cluster be used again? Not before every request that may still be reading or writing it
//! has ended.
//!
//! A request looks up where a cluster is and then transfers bytes there without holding a lock. If the
//! cluster were freed and reused meanwhile, it would read foreign bytes, or write over them. So each request
//! enters the current *epoch* first and leaves it at the end; a cluster that was unmapped in epoch `t` has no
//! users left as soon as all requests that entered in `t` or before have left.
//!
//! 1. The epoch moves from `e` to `e + 1` only when no request from `e - 1` is left.
//! 2. So in epoch `t + 2` no request is left that entered in `t` or before.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use event_listener::Event;

use crate::perturb;

/// Counters are spread so that cores do not fight for one cache line.
const SHARDS: usize = 8;

#[repr(align(64))]
#[derive(Default)]
struct Shard {
    inside: [AtomicU64; 2],
}

/// The epochs of one image.
#[derive(Default)]
pub struct Epochs {
    current: AtomicU64,
    shards: [Shard; SHARDS],
    /// How many tasks wait for requests to leave, and the event that wakes them.
    waiting: AtomicU64,
    left: Event,
}

/// A request that is inside an epoch.
pub struct Inside<'a> {
    epochs: &'a Epochs,
    counter: &'a AtomicU64,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.counter.fetch_sub(1, SeqCst);
        if self.epochs.waiting.load(SeqCst) > 0 {
            self.epochs.left.notify(usize::MAX);
        }
    }
}

/// A waiting task, counted until dropped.
struct Waiting<'a>(&'a AtomicU64);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

thread_local! {
    static SHARD: usize = {
        static NEXT: std::sync::atomic::AtomicUsize = const { std::sync::atomic::AtomicUsize::new(0) };
        NEXT.fetch_add(1, SeqCst) % SHARDS
    };
}

impl Epochs {
    /// Enters the current epoch.
    #[track_caller]
    pub fn enter(&self) -> Inside<'_> {
        let shard = &self.shards[SHARD.with(|shard| *shard)];
        loop {
            let epoch = self.current.load(SeqCst);
            let counter = &shard.inside[Self::slot(epoch)];
            counter.fetch_add(1, SeqCst);
            let inside = Inside { epochs: self, counter };
            // Had the epoch moved on in between, the task that moved it might have missed this count.
            if self.current.load(SeqCst) == epoch {
                perturb::point(); // what is looked up now may be something else when it is used
                return inside;
            }
        }
    }

    fn slot(epoch: u64) -> usize {
        usize::from(epoch % 2 == 1)
    }

    /// The current epoch: the stamp for what is unmapped now.
    pub fn now(&self) -> u64 {
        self.current.load(SeqCst)
    }

    /// Whether no request is left that entered in the epoch of the stamp or before. Advances the epoch if it
    /// can.
    #[track_caller]
    pub fn has_passed(&self, stamp: u64) -> bool {
        perturb::point();
        loop {
            let epoch = self.current.load(SeqCst);
            if epoch >= stamp + 2 {
                return true;
            }
            let before = Self::slot(epoch + 1);
            if self.shards.iter().any(|shard| shard.inside[before].load(SeqCst) != 0) {
                return false;
            }
            // Another task may have moved it instead. It is moved until the stamp has passed, because no
            // later request to leave would wake the waiting tasks.
            let _ = self.current.compare_exchange(epoch, epoch + 1, SeqCst, SeqCst);
        }
    }

    /// Waits until [`Epochs::has_passed`]. Must not be called from inside an epoch.
    pub async fn until_passed(&self, stamp: u64) {
        self.waiting.fetch_add(1, SeqCst);
        let _waiting = Waiting(&self.waiting);
        loop {
            let left = self.left.listen();
            if self.has_passed(stamp) {
                return;
            }
            left.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_no_request_inside_any_stamp_has_passed() {
        let epochs = Epochs::default();
        for ahead in [0, 1, 2] {
            assert!(epochs.has_passed(epochs.now() + ahead), "{ahead}: nobody would tell of it later");
        }
    }

    #[test]
    fn a_stamp_passes_when_the_last_earlier_request_has_left() {
        let epochs = Epochs::default();
        let early = epochs.enter();
        let stamp = epochs.now();
        assert!(!epochs.has_passed(stamp));
        let late = epochs.enter();
        drop(early);
        assert!(!epochs.has_passed(stamp) || epochs.now() >= stamp + 2);
        drop(late);
        assert!(epochs.has_passed(stamp));
    }

    #[test]
    fn requests_that_entered_later_do_not_hold_a_stamp_for_ever() {
        let epochs = Epochs::default();
        let mut inside = epochs.enter();
        let stamp = epochs.now();
        // A steady stream: each request enters before the one before it leaves.
        let mut passed = false;
        for _ in 0..8 {
            passed |= epochs.has_passed(stamp);
            inside = {
                let next = epochs.enter();
                drop(inside);
                next
            };
        }
        drop(inside);
        assert!(passed);
    }

    #[test]
    fn no_request_is_inside_when_a_stamp_has_passed() {
        // Each "cluster" is unmapped by the freer and may be in use by readers that entered before.
        let epochs = Epochs::default();
        let mapped = AtomicU64::new(0);
        let freed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..100_000 {
                        let inside = epochs.enter();
                        let cluster = mapped.load(SeqCst);
                        assert!(cluster >= freed.load(SeqCst), "a reader looks at a freed cluster");
                        drop(inside);
                    }
                });
            }
            scope.spawn(|| {
                for next in 1..20_000u64 {
                    mapped.store(next, SeqCst);
                    let stamp = epochs.now();
                    while !epochs.has_passed(stamp) {
                        std::hint::spin_loop();
                    }
                    freed.store(next, SeqCst);
                }
            });
        });
    }
}
