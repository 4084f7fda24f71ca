//! The operations in flight: the waker of each, and what it keeps alive.
//!
//! ```text
//!              insert                complete(result)              poll
//!   (nothing) ───────▶ Running ───────────────────────▶ Done ────────────▶ (nothing), back to the future
//!                         │ abandon                       │ abandon
//!                         ▼                               ▼
//!                      Orphan ──── complete(result) ──▶ (nothing), discarded
//! ```
//!
//! 1. What a slot holds stays in place until `complete`: its key is not reused before, so the kernel's
//!    completion always finds the operation it belongs to.
//! 2. No code of others is woken, dropped or called here: what is to be woken or dropped is returned, because
//!    a waker or a drop may call the driver again.

use std::task::{Context, Poll, Waker};

use slab::Slab;

use super::op::OpResult;

enum State {
    Running(Option<Waker>),
    Orphan,
    Done(OpResult),
}

struct Slot<H> {
    held: H,
    state: State,
}

/// The operations in flight, each holding an `H`.
pub(crate) struct Slots<H> {
    slots: Slab<Slot<H>>,
    running: usize,
}

/// What becomes of a slot when its operation ends.
pub(crate) enum Completed<H> {
    /// A future waits, and must be woken.
    Wake(Waker),
    /// The future will be polled and finds the result.
    Quiet,
    /// The future was dropped; the result must be discarded.
    Orphan(H),
}

impl<H> Slots<H> {
    pub(crate) fn new() -> Self {
        Self { slots: Slab::with_capacity(256), running: 0 }
    }

    /// A new running operation.
    pub(crate) fn insert(&mut self, held: H) -> usize {
        self.running += 1;
        self.slots.insert(Slot { held, state: State::Running(None) })
    }

    /// What the operation holds.
    pub(crate) fn held(&mut self, key: usize) -> &mut H {
        &mut self.slots[key].held
    }

    /// What the operation holds, to look at.
    pub(crate) fn peek(&self, key: usize) -> Option<&H> {
        self.slots.get(key).map(|slot| &slot.held)
    }

    /// How many operations have not ended.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// The operation has ended.
    pub(crate) fn complete(&mut self, key: usize, result: OpResult) -> Completed<H> {
        self.running -= 1;
        let slot = &mut self.slots[key];
        match std::mem::replace(&mut slot.state, State::Done(result)) {
            State::Running(Some(waker)) => Completed::Wake(waker),
            State::Running(None) => Completed::Quiet,
            State::Orphan => Completed::Orphan(self.slots.remove(key).held),
            State::Done(_) => unreachable!("an operation ends once"),
        }
    }

    /// The result, or a promise to wake.
    pub(crate) fn poll(&mut self, key: usize, context: &Context<'_>) -> Poll<(OpResult, H)> {
        let slot = &mut self.slots[key];
        match &mut slot.state {
            State::Running(Some(waker)) => waker.clone_from(context.waker()),
            State::Running(waker) => *waker = Some(context.waker().clone()),
            State::Done(result) => {
                let result = *result;
                return Poll::Ready((result, self.slots.remove(key).held));
            }
            State::Orphan => unreachable!("nobody asks for what was abandoned"),
        }
        Poll::Pending
    }

    /// The future was dropped. Returns the operation if it has ended already, and the waker in any case.
    pub(crate) fn abandon(&mut self, key: usize) -> (Option<(OpResult, H)>, Option<Waker>) {
        let slot = &mut self.slots[key];
        match &mut slot.state {
            State::Running(waker) => {
                let waker = waker.take();
                slot.state = State::Orphan;
                (None, waker)
            }
            State::Done(result) => {
                let result = *result;
                (Some((result, self.slots.remove(key).held)), None)
            }
            State::Orphan => unreachable!("an operation is abandoned once"),
        }
    }

    /// The keys of all operations that have not ended.
    pub(crate) fn running_keys(&self) -> Vec<usize> {
        let running = |slot: &Slot<H>| !matches!(slot.state, State::Done(_));
        self.slots.iter().filter(|(_, slot)| running(slot)).map(|(key, _)| key).collect()
    }

    /// Forgets everything without freeing it: for when the kernel cannot be made to release it.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::replace(self, Self { slots: Slab::new(), running: 0 }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_operation_holds_stays_until_it_has_ended() {
        let mut slots = Slots::new();
        let kept = slots.insert("kept");
        let orphan = slots.insert("orphan");
        assert_eq!(slots.running(), 2);
        assert!(slots.abandon(orphan).0.is_none(), "it has not ended");
        assert_eq!(slots.peek(orphan), Some(&"orphan"));
        assert_ne!(slots.insert("late"), orphan, "its number is not used again");
        assert!(matches!(slots.complete(orphan, Ok(1)), Completed::Orphan("orphan")));
        assert!(matches!(slots.complete(kept, Err(5)), Completed::Quiet));
        let context = Context::from_waker(Waker::noop());
        assert!(matches!(slots.poll(kept, &context), Poll::Ready((Err(5), "kept"))));
        assert_eq!(slots.peek(kept), None);
        assert_eq!(slots.running(), 1);
    }

    #[test]
    fn one_that_has_ended_is_given_back_when_it_is_abandoned() {
        let mut slots = Slots::new();
        let key = slots.insert(7);
        let context = Context::from_waker(Waker::noop());
        assert!(slots.poll(key, &context).is_pending());
        assert!(matches!(slots.complete(key, Ok(3)), Completed::Wake(_)));
        assert_eq!(slots.running_keys(), [0usize; 0]);
        assert!(matches!(slots.abandon(key), (Some((Ok(3), 7)), None)));
    }
}
