//! Stopping chosen operations half way, so that a race becomes a story: "while a flush is held, reads
//! continue".
//!
//! A held operation has been submitted and has no effect yet. When released, it continues and takes the time
//! it would have taken. Dropping the [`Hold`] releases everything.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};

use vellum_core::{ImageSpan, lock};

use crate::operation::{Operation, Operations};

/// Holds operations of a drive. See [`Drive::hold`](crate::Drive::hold).
pub struct Hold(Arc<Gate>);

impl Hold {
    /// How many operations are held now.
    pub fn count(&self) -> usize {
        self.0.lock().held.len()
    }

    /// Waits until at least this many operations are held.
    pub async fn caught(&self, count: usize) {
        poll_fn(|context| {
            let mut state = self.0.lock();
            if state.held.len() >= count {
                return Poll::Ready(());
            }
            state.watchers.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Lets the operation go that has been held longest, and holds the others. False when none is held.
    pub fn release_one(&self) -> bool {
        let ticket = self.0.lock().held.pop_front();
        ticket.map(|ticket| ticket.release()).is_some()
    }

    /// Lets all go and holds no more.
    pub fn release(self) {}
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// The drive's side of a hold.
pub(crate) struct Gate {
    operations: Operations,
    within: Option<ImageSpan>,
    state: Mutex<GateState>,
}

#[derive(Default)]
struct GateState {
    open: bool,
    held: VecDeque<Arc<Ticket>>,
    watchers: Vec<Waker>,
}

impl Gate {
    pub(crate) fn new(operations: Operations, within: Option<ImageSpan>) -> (Hold, Arc<Self>) {
        let gate = Arc::new(Self { operations, within, state: Mutex::default() });
        (Hold(gate.clone()), gate)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.lock().open
    }

    /// Stops the operation, if it is one of those that are to be stopped.
    pub(crate) fn stop(self: &Arc<Self>, operation: Operation, span: ImageSpan) -> Option<Held> {
        let matches =
            self.operations.contains(operation) && self.within.is_none_or(|within| within.overlaps(span));
        let mut state = self.lock();
        if state.open || !matches {
            return None;
        }
        let ticket = Arc::new(Ticket::default());
        state.held.push_back(ticket.clone());
        Some(Held { gate: self.clone(), ticket })
    }

    pub(crate) fn open(&self) {
        let held = {
            let mut state = self.lock();
            state.open = true;
            std::mem::take(&mut state.held)
        };
        for ticket in held {
            ticket.release();
        }
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        lock(&self.state)
    }
}

/// A stopped operation.
pub(crate) struct Held {
    gate: Arc<Gate>,
    ticket: Arc<Ticket>,
}

impl Held {
    /// Waits until it is released.
    pub(crate) async fn released(&self) {
        // Woken here and not in `stop`, because the drive is locked there.
        let watchers = std::mem::take(&mut self.gate.lock().watchers);
        for watcher in watchers {
            watcher.wake();
        }
        poll_fn(|context| {
            let mut state = self.ticket.lock();
            if state.released {
                return Poll::Ready(());
            }
            state.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gate.lock().held.retain(|ticket| !Arc::ptr_eq(ticket, &self.ticket));
    }
}

#[derive(Default)]
struct Ticket(Mutex<TicketState>);

#[derive(Default)]
struct TicketState {
    released: bool,
    waker: Option<Waker>,
}

impl Ticket {
    fn lock(&self) -> MutexGuard<'_, TicketState> {
        lock(&self.0)
    }

    fn release(&self) {
        let waker = {
            let mut state = self.lock();
            state.released = true;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
