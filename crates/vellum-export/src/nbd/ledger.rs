//! The ledger of one session: what its requests hold, from acceptance to the moment their replies have left.
//!
//! ```text
//!   open ──────────────► release ──────────────────► settle
//!   accepted             its payload was written:     its reply has been handed to the stream,
//!   (one request,        the memory is free           or the peer is gone
//!    so much memory)
//! ```
//!
//! 1. A request is opened before anything is allocated for it, and only when the limits admit it. So the
//!    server stops reading from a client that does not read its replies: the ledger stays full.
//! 2. What a session holds beyond its floor also comes out of the server's budget (`budget`).
//! 3. Each request is settled once. If the ledger is not [clear](Ledger::is_clear) at the end, a reply was
//!    lost or sent twice.

use std::task::Context;

use super::budget::Share;

/// What requests hold now, and what they may hold.
#[derive(Debug)]
pub(super) struct Ledger {
    requests_max: usize,
    memory_max: usize,
    held: Holding,
    share: Share,
}

/// A number of requests, and memory that they hold.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Holding {
    pub(super) requests: usize,
    pub(super) memory: usize,
}

impl Ledger {
    pub(super) fn new(requests_max: usize, memory_max: usize, share: Share) -> Self {
        Self { requests_max, memory_max, held: Holding::default(), share }
    }

    /// What a request for this much memory is charged: never more than the total, so that each is admitted in
    /// the end, if necessary alone.
    pub(super) fn charge(&self, memory: usize) -> usize {
        memory.min(self.memory_max)
    }

    /// Opens an entry for one more request, if the limits admit it.
    pub(super) fn open(&mut self, memory: usize) -> bool {
        let admitted = self.held.requests < self.requests_max
            && memory <= self.memory_max - self.held.memory
            && self.share.grow(self.held.memory + memory);
        if admitted {
            self.held.requests += 1;
            self.held.memory += memory;
        }
        admitted
    }

    /// Memory that a request held is free before its reply has left.
    pub(super) fn release(&mut self, memory: usize) {
        self.settle(Holding { requests: 0, memory });
    }

    /// Requests are done with.
    pub(super) fn settle(&mut self, done: Holding) {
        let requests = self.held.requests.checked_sub(done.requests);
        let memory = self.held.memory.checked_sub(done.memory);
        self.held = match (requests, memory) {
            (Some(requests), Some(memory)) => Holding { requests, memory },
            _ => panic!("a request was settled twice: {done:?} of {:?}", self.held),
        };
        self.share.shrink(self.held.memory);
    }

    /// Whether the server's budget has room again, after it had none. The task of `context` is woken when
    /// that is so.
    pub(super) fn poll_freed(&mut self, context: &mut Context<'_>) -> bool {
        self.share.poll_freed(context)
    }

    /// Whether nothing is open.
    pub(super) fn is_clear(&self) -> bool {
        self.held == Holding::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::Budget;
    use super::*;

    #[test]
    fn requests_and_memory_are_both_bounded() {
        let mut ledger = Ledger::new(3, 100, Share::of(&Budget::new(0)));
        assert!(ledger.open(60) && !ledger.open(41) && ledger.open(40) && !ledger.open(1));
        assert!(ledger.open(0) && !ledger.open(0), "three requests");
        ledger.release(60);
        assert!(!ledger.open(0), "its reply has not left");
        ledger.settle(Holding { requests: 2, memory: 40 });
        assert!(ledger.open(100));
        ledger.settle(Holding { requests: 2, memory: 100 });
        assert!(ledger.is_clear());
        assert_eq!(ledger.charge(1 << 30), 100);
    }

    #[test]
    #[should_panic(expected = "settled twice")]
    fn settling_twice_is_a_bug() {
        let mut ledger = Ledger::new(3, 100, Share::of(&Budget::new(0)));
        assert!(ledger.open(1));
        ledger.settle(Holding { requests: 1, memory: 1 });
        ledger.settle(Holding { requests: 1, memory: 0 });
    }
}
