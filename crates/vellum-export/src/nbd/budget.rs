//! The memory for payloads that all clients of a server share.
//!
//! ```text
//!   a session   │ floor │ of the budget ░░░░░░░░░░ │ free           up to the session's own limit
//!                 its own   taken when a request is accepted, given back when its reply has left
//! ```
//!
//! 1. Each session has a [`FLOOR`] that no other session can use, so ordinary requests continue whatever the
//!    others hold.
//! 2. What a session needs above its floor comes out of the budget; while the budget is exhausted the session
//!    reads nothing more.
//! 3. A request larger than the whole budget is charged for the whole budget, and runs alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Context;

use event_listener::{Event, EventListener};
use futures_lite::FutureExt as _;

/// What each session may hold, however much others do.
pub(super) const FLOOR: usize = 1 << 20;

/// A number of bytes, shared by all sessions.
#[derive(Debug)]
pub(super) struct Budget {
    max: usize,
    taken: AtomicUsize,
    freed: Event,
}

impl Budget {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, taken: AtomicUsize::new(0), freed: Event::new() })
    }

    fn take(&self, bytes: usize) -> bool {
        let more = |taken: usize| (bytes <= self.max - taken).then(|| taken + bytes);
        self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.taken.fetch_sub(bytes, Ordering::AcqRel);
        self.freed.notify(usize::MAX);
    }
}

/// What one session has of the budget.
#[derive(Debug)]
pub(super) struct Share {
    budget: Arc<Budget>,
    taken: usize,
    /// It was refused, and is woken when there is more.
    waiting: Option<EventListener>,
}

impl Share {
    pub(super) fn of(budget: &Arc<Budget>) -> Self {
        Self { budget: budget.clone(), taken: 0, waiting: None }
    }

    /// The session wants to hold this much in all. False: there is not enough, and [`Share::poll_freed`]
    /// completes when it is worth trying again.
    pub(super) fn grow(&mut self, held: usize) -> bool {
        let wanted = held.saturating_sub(FLOOR).min(self.budget.max);
        let Some(more) = wanted.checked_sub(self.taken).filter(|more| *more > 0) else {
            self.waiting = None;
            return true;
        };
        let mut is_taken = self.budget.take(more);
        if !is_taken {
            // First the registration, then another look.
            let listener = self.budget.freed.listen();
            is_taken = self.budget.take(more);
            self.waiting = (!is_taken).then_some(listener);
        }
        if is_taken {
            self.waiting = None;
            self.taken += more;
        }
        is_taken
    }

    /// The session holds so much in all from now on.
    pub(super) fn shrink(&mut self, held: usize) {
        let wanted = held.saturating_sub(FLOOR).min(self.budget.max);
        if let Some(less) = self.taken.checked_sub(wanted).filter(|less| *less > 0) {
            self.taken = wanted;
            self.budget.give_back(less);
        }
    }

    /// Whether something was given back since it was refused. The task of `context` is woken when that is so.
    pub(super) fn poll_freed(&mut self, context: &mut Context<'_>) -> bool {
        let is_freed = self.waiting.as_mut().is_some_and(|listener| listener.poll(context).is_ready());
        if is_freed {
            self.waiting = None;
        }
        is_freed
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_floor_and_shares_the_rest() {
        let budget = Budget::new(3 << 20);
        let (mut one, mut other) = (Share::of(&budget), Share::of(&budget));
        assert!(one.grow(FLOOR + (2 << 20)) && !other.grow(FLOOR + (2 << 20)) && other.grow(FLOOR));
        let mut context = Context::from_waker(std::task::Waker::noop());
        assert!(!other.grow(FLOOR + (2 << 20)) && !other.poll_freed(&mut context));
        one.shrink(FLOOR);
        assert!(other.poll_freed(&mut context) && other.grow(FLOOR + (2 << 20)));
        drop(other);
        assert!(one.grow(1 << 40), "what is larger than all goes alone");
        drop(one);
        assert_eq!(budget.taken.load(Ordering::Relaxed), 0);
    }
}
