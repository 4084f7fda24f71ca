//! Requests that are made ahead: some are under way at once, and what they come to is had in their order.
//!
//! ```text
//!   next ─► the first has ended: taken       meanwhile all others have been looked at, so that what they ask for next
//!        └► it has not: wait                 is under way while a caller works on this one
//! ```

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use vellum_core::LocalFuture;

enum Request<'a, T> {
    UnderWay(LocalFuture<'a, T>),
    Ended(T),
}

/// The requests, the first first.
pub(super) struct Ahead<'a, T>(VecDeque<Request<'a, T>>);

impl<'a, T> Ahead<'a, T> {
    pub(super) const fn new() -> Self {
        Self(VecDeque::new())
    }

    /// How many have not been taken.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// A request behind all others. It begins with the next look.
    pub(super) fn add(&mut self, request: LocalFuture<'a, T>) {
        self.0.push_back(Request::UnderWay(request));
    }

    fn look(&mut self, context: &mut Context<'_>) {
        for request in &mut self.0 {
            if let Request::UnderWay(future) = request
                && let Poll::Ready(output) = Pin::new(future).poll(context)
            {
                *request = Request::Ended(output);
            }
        }
    }

    /// What the first comes to; none where there is none.
    pub(super) async fn next(&mut self) -> Option<T> {
        poll_fn(|context| {
            self.look(context);
            match self.0.pop_front() {
                None => Poll::Ready(None),
                Some(Request::Ended(output)) => Poll::Ready(Some(output)),
                Some(waiting @ Request::UnderWay(_)) => {
                    self.0.push_front(waiting);
                    Poll::Pending
                }
            }
        })
        .await
    }

    /// Waits for all that are left. What they come to is of no use.
    pub(super) async fn end(mut self) {
        while self.next().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_lite::future::{block_on, poll_once, yield_now};

    use super::*;

    #[test]
    fn what_they_come_to_is_in_order_and_they_run_together() {
        let begun = Cell::new(0);
        let wait = |turns: usize| -> LocalFuture<'_, usize> {
            let begun = &begun;
            Box::pin(async move {
                begun.set(begun.get() + 1);
                for _ in 0..turns {
                    yield_now().await;
                }
                turns
            })
        };
        block_on(async {
            let mut ahead = Ahead::new();
            [5, 0, 3].into_iter().for_each(|turns| ahead.add(wait(turns)));
            assert_eq!((ahead.len(), begun.get()), (3, 0));
            assert!(poll_once(ahead.next()).await.is_none(), "the first has not ended");
            assert_eq!(begun.get(), 3, "all have begun");
            assert_eq!(ahead.next().await, Some(5));
            ahead.add(wait(1));
            assert_eq!((ahead.next().await, ahead.next().await), (Some(0), Some(3)));
            assert_eq!((ahead.next().await, ahead.next().await), (Some(1), None));
            ahead.add(wait(2));
            ahead.end().await;
            assert_eq!(begun.get(), 5);
        });
    }
}
