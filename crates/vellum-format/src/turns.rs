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
//!    never happened. Before it has begun nothing was done.
//! 3. With a clock, who leads waits a little for those who were there when the last round ended: they are likely to be back soon, and
//!    a round for all costs what one for some does. Without that, threads that write and flush go in two halves, each of
//!    which waits for the other's round. It waits a quarter of a round at most, [`PATIENCE_MAX`] at most, and not at
//!    all for a while after nobody came.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use event_listener::{Event, EventListener};
use futures_lite::future::or;
use vellum_core::{Clock, Error, Result};

/// No leader waits longer for others.
const PATIENCE_MAX: Duration = Duration::from_millis(2);
/// It is not worth a timer.
const PATIENCE_MIN: Duration = Duration::from_micros(50);
/// After nobody came no more than so many rounds go without waiting.
const HURRIED_MAX: u32 = 64;

/// Whose turn it is.
#[derive(Default)]
pub(crate) struct Turns {
    state: Mutex<State>,
    finished: Event,
    /// All who are waited for are here.
    gathered: Event,
    clock: Option<Arc<dyn Clock>>,
}

#[derive(Default)]
struct State {
    started: u64,
    ended: u64,
    is_running: bool,
    last: Option<Result<()>>,
    /// How many are here for the next round.
    waiting: u32,
    /// How many are in the round that runs.
    members: u32,
    gathering: Gathering,
}

/// What is known of who comes.
#[derive(Default)]
struct Gathering {
    /// So many were here when the last round ended.
    expected: u32,
    /// What a round takes.
    took: Duration,
    /// So many rounds are not waited for.
    hurried: u32,
    /// How many it will be when nobody comes again.
    next_hurried: u32,
}

impl Gathering {
    /// How long it is worth to wait for others.
    fn patience(&mut self, waiting: u32) -> Option<Duration> {
        if waiting >= self.expected {
            return None;
        }
        if self.hurried > 0 {
            self.hurried -= 1;
            return None;
        }
        Some((self.took / 4).min(PATIENCE_MAX)).filter(|patience| *patience >= PATIENCE_MIN)
    }

    /// So many came while it was waited.
    fn note(&mut self, came: u32) {
        match came {
            0 => {
                self.hurried = self.next_hurried.max(1);
                self.next_hurried = (2 * self.hurried).min(HURRIED_MAX);
            }
            _ => self.next_hurried = 0,
        }
    }
}

enum Turn {
    Lead,
    Wait(EventListener),
    Over(Result<()>),
}

/// One who is here for a round that may not have begun.
struct Caller<'a> {
    turns: &'a Turns,
    ticket: u64,
}

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        if self.ticket > state.started {
            state.waiting -= 1;
        }
    }
}

/// Who leads, until the work has ended.
struct Leading<'a, A: Fn() -> Option<Error>> {
    turns: &'a Turns,
    abandoned: &'a A,
    has_begun: bool,
    has_ended: bool,
}

impl<A: Fn() -> Option<Error>> Drop for Leading<'_, A> {
    fn drop(&mut self) {
        if !self.has_ended {
            let error = if self.has_begun { (self.abandoned)() } else { None };
            self.turns.end(error.map(Err));
        }
    }
}

impl Turns {
    /// With a clock by which leaders wait for others.
    pub(crate) fn with_clock(clock: Option<Arc<dyn Clock>>) -> Self {
        Self { clock, ..Self::default() }
    }

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
        let caller = self.arrive();
        loop {
            match self.turn(caller.ticket) {
                Turn::Over(result) => return result,
                Turn::Wait(listener) => listener.await,
                Turn::Lead => {
                    let mut leading =
                        Leading { turns: self, abandoned: &abandoned, has_begun: false, has_ended: false };
                    self.gather().await;
                    self.begin();
                    leading.has_begun = true;
                    let from = self.now();
                    let result = work().await;
                    leading.has_ended = true;
                    if let (Some(from), Some(to)) = (from, self.now()) {
                        self.state().gathering.took = to.saturating_sub(from);
                    }
                    self.end(Some(result));
                }
            }
        }
    }

    fn now(&self) -> Option<Duration> {
        self.clock.as_ref().map(|clock| clock.now())
    }

    fn arrive(&self) -> Caller<'_> {
        let mut state = self.state();
        state.waiting += 1;
        if state.waiting == state.gathering.expected {
            self.gathered.notify(1);
        }
        Caller { turns: self, ticket: state.started + 1 }
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
        Turn::Lead
    }

    /// Waits for others, if that is worth it. The round has not begun: who comes now is in it.
    async fn gather(&self) {
        let Some(clock) = &self.clock else { return };
        let (patience, before, listener) = {
            let mut state = self.state();
            let before = state.waiting;
            let Some(patience) = state.gathering.patience(before) else { return };
            (patience, before, self.gathered.listen())
        };
        or(listener, clock.sleep(patience)).await;
        let mut state = self.state();
        let came = state.waiting.saturating_sub(before);
        state.gathering.note(came);
    }

    fn begin(&self) {
        let mut state = self.state();
        state.started += 1;
        state.members = std::mem::take(&mut state.waiting);
    }

    /// The round ended so, or never happened.
    fn end(&self, result: Option<Result<()>>) {
        let mut state = self.state();
        state.is_running = false;
        state.gathering.expected = state.members + state.waiting;
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
    use vellum_core::LocalFuture;

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

    /// A clock by which each round takes 4 ms, and an alarm that rings when it is told to.
    struct Alarm {
        now: Mutex<Duration>,
        rings: Arc<Event>,
    }

    impl Clock for Alarm {
        fn now(&self) -> Duration {
            let mut now = self.now.lock().unwrap();
            *now += Duration::from_millis(4);
            *now
        }

        fn sleep(&self, wait: Duration) -> LocalFuture<'static, ()> {
            assert_eq!(wait, Duration::from_millis(1), "a quarter of a round");
            Box::pin(self.rings.listen())
        }
    }

    fn with_alarm() -> (Turns, Arc<Event>) {
        let rings = Arc::new(Event::new());
        let alarm = Alarm { now: Mutex::default(), rings: rings.clone() };
        (Turns::with_clock(Some(Arc::new(alarm))), rings)
    }

    #[test]
    fn who_leads_waits_for_those_who_were_there() {
        let (turns, rings) = with_alarm();
        let rounds = Cell::new(0);
        let work = async || {
            rounds.set(rounds.get() + 1);
            yield_now().await;
            Ok(())
        };
        let come = || Box::pin(turns.share(work, || None));
        block_on(async {
            // Two halves: one is at work, the other waits.
            let (mut early, mut one, mut two) = (come(), come(), come());
            assert!(poll_once(&mut early).await.is_none());
            assert!(poll_once(&mut one).await.is_none());
            assert!(poll_once(&mut two).await.is_none());
            early.await.unwrap();
            assert_eq!(rounds.get(), 1);
            // The second half leads only when the first has come again.
            assert!(poll_once(&mut one).await.is_none());
            assert!(poll_once(&mut two).await.is_none());
            assert_eq!(rounds.get(), 1);
            let mut again = come();
            assert!(poll_once(&mut again).await.is_none());
            one.await.unwrap();
            two.await.unwrap();
            again.await.unwrap();
            assert_eq!(rounds.get(), 2, "one round for all");
            // Nobody comes but one: it waits for the alarm, and then not at all, for a while.
            let mut alone = come();
            assert!(poll_once(&mut alone).await.is_none());
            assert!(poll_once(&mut alone).await.is_none());
            assert_eq!(rounds.get(), 2);
            rings.notify(1);
            alone.await.unwrap();
            for _ in 0..5 {
                come().await.unwrap();
            }
            assert_eq!(rounds.get(), 8);
        });
    }

    #[test]
    fn a_leader_that_is_dropped_while_it_waits_did_nothing() {
        let (turns, rings) = with_alarm();
        let work = async || {
            yield_now().await;
            Ok(())
        };
        let come = || Box::pin(turns.share(work, || Some(Error::invalid("dropped"))));
        block_on(async {
            let (mut one, mut two) = (come(), come());
            assert!(poll_once(&mut one).await.is_none());
            assert!(poll_once(&mut two).await.is_none());
            one.await.unwrap();
            // Waits for the first, who does not come.
            for _ in 0..4 {
                assert!(poll_once(&mut two).await.is_none());
            }
            drop(two);
            let mut three = come();
            assert!(poll_once(&mut three).await.is_none());
            rings.notify(1);
            three.await.unwrap();
        });
    }

    #[test]
    fn after_nobody_came_some_rounds_go_without_waiting() {
        let mut gathering =
            Gathering { expected: 4, took: Duration::from_millis(20), ..Gathering::default() };
        assert_eq!(gathering.patience(1), Some(PATIENCE_MAX));
        assert_eq!(gathering.patience(4), None, "all are here");
        for pause in [1, 2, 4, 8, 16, 32, 64, 64] {
            gathering.note(0);
            for _ in 0..pause {
                assert_eq!(gathering.patience(1), None, "{pause}");
            }
            assert!(gathering.patience(1).is_some(), "{pause}");
        }
        gathering.note(1);
        assert!(gathering.patience(1).is_some());
        gathering.note(0);
        assert_eq!(gathering.patience(1), None);
        assert!(gathering.patience(1).is_some());
        gathering.took = Duration::from_micros(199);
        assert_eq!(gathering.patience(1), None, "it is not worth a timer");
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
