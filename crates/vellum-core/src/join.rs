//! Waiting for several futures at once, all of them to the end.
//!
//! The usual `try_join` drops the others when one fails. Here that would leave host writes running whose
//! request has already been answered, so both functions always wait for all. They poll every future at each
//! wake-up: they are meant for the handful of transfers that one request is cut into.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

use smallvec::SmallVec;

use crate::Result;

enum Slot<F: Future> {
    Running(F),
    Done(F::Output),
}

/// Runs all futures concurrently and returns their results in order.
pub async fn join_all<F: Future + Unpin>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut slots: SmallVec<[Slot<F>; 4]> = futures.into_iter().map(Slot::Running).collect();
    poll_fn(|context| {
        let mut waiting = false;
        for slot in &mut slots {
            if let Slot::Running(future) = slot {
                match Pin::new(future).poll(context) {
                    Poll::Ready(output) => *slot = Slot::Done(output),
                    Poll::Pending => waiting = true,
                }
            }
        }
        if waiting { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    slots
        .into_iter()
        .map(|slot| match slot {
            Slot::Done(output) => output,
            Slot::Running(_) => unreachable!("all futures have ended"),
        })
        .collect()
}

/// Runs all futures concurrently, waits for all of them, and returns their values in order or the first
/// error.
pub async fn try_join_all<F, T>(futures: impl IntoIterator<Item = F>) -> Result<Vec<T>>
where
    F: Future<Output = Result<T>> + Unpin,
{
    join_all(futures).await.into_iter().collect()
}
