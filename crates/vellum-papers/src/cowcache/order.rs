//! The order that a guest's file system and its databases keep: a flush waits for the writes before it, and the writes behind
//! it wait for the flush. Reads wait for nobody.
//!
//! ```text
//!   write 1 ─┐
//!   write 2 ─┴─► flush 3 ─┬─► write 4
//!                         └─► write 5
//! ```

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Requests that have not ended, in the order in which they were taken.
#[derive(Debug, Default)]
pub(crate) struct Order(RefCell<State>);

#[derive(Debug, Default)]
struct State {
    taken: u64,
    /// Whether each is a flush.
    open: BTreeMap<u64, bool>,
    waiting: Vec<Waker>,
}

impl State {
    fn is_due(&self, number: u64) -> bool {
        let is_flush = self.open[&number];
        !self.open.range(..number).any(|(_, before)| is_flush || *before)
    }
}

impl Order {
    /// Takes a write or a flush; its number.
    pub(crate) fn take(&self, is_flush: bool) -> u64 {
        let mut state = self.0.borrow_mut();
        state.taken += 1;
        let number = state.taken;
        state.open.insert(number, is_flush);
        number
    }

    /// Ends when it is due.
    pub(crate) async fn turn(&self, number: u64) {
        poll_fn(|context| {
            let mut state = self.0.borrow_mut();
            if state.is_due(number) {
                return Poll::Ready(());
            }
            state.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// It has ended.
    pub(crate) fn end(&self, number: u64) {
        let waiting = {
            let mut state = self.0.borrow_mut();
            state.open.remove(&number);
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_waits_for_writes_before_it_and_holds_up_those_behind_it() {
        let order = Order::default();
        let [first, second, flush, third] = [false, false, true, false].map(|is_flush| order.take(is_flush));
        let due = |number| order.0.borrow().is_due(number);
        assert!(due(first) && due(second) && !due(flush) && !due(third));
        order.end(first);
        assert!(!due(flush));
        order.end(second);
        assert!(due(flush) && !due(third));
        let later = order.take(true);
        order.end(flush);
        assert!(due(third) && !due(later));
        order.end(third);
        assert!(due(later));
    }
}
