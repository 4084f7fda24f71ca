//! One value from one thread to a future on another.
//!
//! It carries the answer of a job of the blocking pool, and the result of a task on another worker. The
//! receiver notices when the sender is dropped without an answer, so no future waits for a job that is gone.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use vellum_core::lock;

enum State<T> {
    Waiting(Option<Waker>),
    Sent(T),
    Gone,
}

struct Shared<T>(Mutex<State<T>>);

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        lock(&self.0)
    }

    /// Leaves the waiting state and wakes the receiver; does nothing if it was left before.
    fn settle(&self, state: State<T>) {
        let mut current = self.lock();
        if let State::Waiting(waker) = &mut *current {
            let waker = waker.take();
            *current = state;
            drop(current);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}

/// Sends the value, once.
pub struct Sender<T>(Arc<Shared<T>>);

/// Waits for the value; `None` when the sender was dropped without sending one.
pub struct Receiver<T>(Arc<Shared<T>>);

/// A place for one value, and its two ends.
pub fn oneshot<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared(Mutex::new(State::Waiting(None))));
    (Sender(shared.clone()), Receiver(shared))
}

impl<T> Sender<T> {
    /// Gives the value to the receiver, if it is still there.
    pub fn send(self, value: T) {
        self.0.settle(State::Sent(value));
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.settle(State::Gone);
    }
}

impl<T> Future for Receiver<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.0.lock();
        match &mut *state {
            State::Waiting(waker) => {
                match waker {
                    Some(waker) => waker.clone_from(context.waker()),
                    None => *waker = Some(context.waker().clone()),
                }
                Poll::Pending
            }
            State::Sent(_) | State::Gone => match std::mem::replace(&mut *state, State::Gone) {
                State::Sent(value) => Poll::Ready(Some(value)),
                _ => Poll::Ready(None),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_lite::future::block_on;

    #[test]
    fn a_value_crosses_threads() {
        let (sender, receiver) = oneshot();
        let thread = std::thread::spawn(move || sender.send(7));
        assert_eq!(block_on(receiver), Some(7));
        thread.join().expect("the sender ends");
    }

    #[test]
    fn a_dropped_sender_is_noticed() {
        let (sender, receiver) = oneshot::<u8>();
        drop(sender);
        assert_eq!(block_on(receiver), None);
    }
}
