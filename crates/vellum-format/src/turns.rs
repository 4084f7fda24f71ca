//! Work that many want and one does: flushes and commits that arrive while one is under way share the next.
//!
//! ```text
//!   arrives ──► takes a ticket: the number of the next round that has not begun
//!           ──► nobody is at work: leads that round, for all whose ticket is not higher
//!           └─► somebody is: waits, and asks again
//! ```
//!
//! 1. A round does for its caller whatever it would have done had the caller led it: it begins after the caller came.
//! 2. When a leader's future is dropped half way, the round ends with the error that [`Turns::share`] was given for that, or
//!    never happened.

use std::sync::{Mutex, MutexGuard, PoisonError};

use event_listener::{Event, EventListener};
use vellum_core::{Error, Result};

/// Whose turn it is.
#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<State>,
    finished: Event,
}

#[derive(Default)]
struct State {
    started: u64,
    ended: u64,
    is_running: bool,
    last: Option<Result<()>>,
}

enum Turn {
    Lead,
    Wait(EventListener),
    Over(Result<()>),
}

/// Who leads, until the work has ended.
struct Leading<'a, A: Fn() -> Option<Error>> {
    turns: &'a Turns,
    abandoned: &'a A,
    has_ended: bool,
}

impl<A: Fn() -> Option<Error>> Drop for Leading<'_, A> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.turns.end((self.abandoned)().map(Err));
        }
    }
}

impl Turns {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does `work`, or waits for somebody who begins it after now. `abandoned` is asked for the error of those who wait when
    /// the work is dropped half way; without one, the next of them begins it again.
    pub(crate) async fn share(
        &self,
        work: impl AsyncFn() -> Result<()>,
        abandoned: impl Fn() -> Option<Error>,
    ) -> Result<()> {
        let ticket = self.state().started + 1;
        loop {
            match self.turn(ticket) {
                Turn::Over(result) => return result,
                Turn::Wait(listener) => listener.await,
                Turn::Lead => {
                    let mut leading = Leading { turns: self, abandoned: &abandoned, has_ended: false };
                    let result = work().await;
                    leading.has_ended = true;
                    self.end(Some(result));
                }
            }
        }
    }

    fn turn(&self, ticket: u64) -> Turn {
        let mut state = self.state();
        if state.ended >= ticket {
            return Turn::Over(state.last.clone().expect("a round has ended"));
        }
        if state.is_running {
            return Turn::Wait(self.finished.listen());
        }
        state.is_running = true;
        state.started += 1;
        Turn::Lead
    }

    /// The round ended so, or never happened.
    fn end(&self, result: Option<Result<()>>) {
        let mut state = self.state();
        state.is_running = false;
        if let Some(result) = result {
            state.ended = state.started;
            state.last = Some(result);
        }
        drop(state);
        self.finished.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_lite::future::{block_on, poll_once, yield_now};

    use super::*;

    #[test]
    fn who_comes_during_a_round_shares_the_next() {
        let (turns, rounds) = (Turns::default(), Cell::new(0));
        let work = async || {
            rounds.set(rounds.get() + 1);
            yield_now().await;
            Ok(())
        };
        block_on(async {
            let mut first = Box::pin(turns.share(work, || None));
            assert!(poll_once(&mut first).await.is_none());
            let mut others: Vec<_> = (0..3).map(|_| Box::pin(turns.share(work, || None))).collect();
            for other in &mut others {
                assert!(poll_once(other).await.is_none());
            }
            first.await.unwrap();
            for other in others {
                other.await.unwrap();
            }
        });
        assert_eq!(rounds.get(), 2);
    }

    #[test]
    fn a_round_that_was_dropped_is_begun_again_or_fails() {
        let turns = Turns::default();
        let never = async || std::future::pending().await;
        block_on(async {
            let mut dropped = Box::pin(turns.share(never, || None));
            assert!(poll_once(&mut dropped).await.is_none());
            let mut other = Box::pin(turns.share(async || Ok(()), || None));
            assert!(poll_once(&mut other).await.is_none());
            drop(dropped);
            other.await.unwrap();

            let mut dropped = Box::pin(turns.share(never, || Some(Error::invalid("dropped"))));
            assert!(poll_once(&mut dropped).await.is_none());
            let mut other = Box::pin(turns.share(async || Ok(()), || None));
            assert!(poll_once(&mut other).await.is_none());
            drop(dropped);
            other.await.unwrap();
            assert!(turns.share(async || Err(Error::invalid("no")), || None).await.is_err());
        });
    }
}
