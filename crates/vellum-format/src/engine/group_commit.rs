//! Group commit: flushes that arrive while a commit is under way share the next one.
//!
//! ```text
//!   arrives ──► takes a ticket: the number of the next round that has not begun
//!           ──► no round is under way: leads one, for every caller whose ticket is not higher
//!           └─► a round is under way: waits for its end, and looks again
//! ```
//!
//! 1. A round does for each of its callers what that caller would have done as its leader, because it begins
//!    after the caller arrived.
//! 2. When a leader's future is dropped halfway, the round ends with the error that [`GroupCommit::share`]
//!    was given for that, or it counts as never begun and the next caller leads it. A leader that is dropped
//!    before its round began did nothing.
//! 3. With a clock, a leader waits briefly for the callers that were there when the last round ended: they
//!    are likely to be back soon, and one round for all costs as much as one for some. Otherwise threads that
//!    write and flush split into two halves, each of which waits for the other's round. The wait is at most a
//!    quarter of a round and at most [`DELAY_MAX`]. After a wait that no other caller joined, the next
//!    rounds skip it, at most [`SKIPS_MAX`] of them.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use event_listener::{Event, EventListener};
use futures_lite::future::or;
use vellum_core::{Clock, Error, Result};

use crate::state::lock;

/// No leader waits longer for others.
const DELAY_MAX: Duration = Duration::from_millis(2);
/// A shorter wait is not worth a timer.
const DELAY_MIN: Duration = Duration::from_micros(50);
/// After a wait that no other caller joined, at most this many rounds skip the wait.
const SKIPS_MAX: u32 = 64;

/// Elects the leader of a round. The other callers wait for its end.
#[derive(Default)]
pub struct GroupCommit {
    state: Mutex<State>,
    finished: Event,
    /// Every caller that a leader waits for has arrived.
    all_arrived: Event,
    clock: Option<Arc<dyn Clock>>,
}

#[derive(Default)]
struct State {
    started: u64,
    ended: u64,
    is_running: bool,
    last: Option<Result<()>>,
    /// How many callers wait for the next round.
    waiting: u32,
    /// How many callers are in the round that runs.
    members: u32,
    delay: CommitDelay,
}

/// How long a leader waits for followers before its round: as long as that pays.
#[derive(Default)]
struct CommitDelay {
    /// This many callers were there when the last round ended.
    expected: u32,
    /// How long a round takes.
    took: Duration,
    /// This many rounds skip the wait.
    skips: u32,
    /// How many will skip it after the next wait that no caller joins.
    next_skips: u32,
}

impl CommitDelay {
    /// How long the leader should wait for other callers.
    fn wait_before(&mut self, waiting: u32) -> Option<Duration> {
        if waiting >= self.expected {
            return None;
        }
        if self.skips > 0 {
            self.skips -= 1;
            return None;
        }
        Some((self.took / 4).min(DELAY_MAX)).filter(|wait| *wait >= DELAY_MIN)
    }

    /// This many callers came during the wait.
    fn note(&mut self, came: u32) {
        match came {
            0 => {
                self.skips = self.next_skips.max(1);
                self.next_skips = (2 * self.skips).min(SKIPS_MAX);
            }
            _ => self.next_skips = 0,
        }
    }
}

/// What a caller does next.
enum Role {
    /// Lead the next round.
    Lead,
    /// Wait for this, and look again.
    Follow(EventListener),
    /// A round that began after the caller's arrival has ended like this.
    Over(Result<()>),
}

/// A caller, whose round may not have begun.
struct Caller<'a> {
    group: &'a GroupCommit,
    ticket: u64,
}

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        let mut state = self.group.state();
        if self.ticket > state.started {
            state.waiting -= 1;
        }
    }
}

/// The leader, until its work has ended.
struct Leader<'a, A: Fn() -> Option<Error>> {
    group: &'a GroupCommit,
    abandoned: &'a A,
    has_begun: bool,
    has_ended: bool,
}

impl<A: Fn() -> Option<Error>> Drop for Leader<'_, A> {
    fn drop(&mut self) {
        if !self.has_ended {
            let error = if self.has_begun { (self.abandoned)() } else { None };
            self.group.end(error.map(Err));
        }
    }
}

impl GroupCommit {
    /// With a clock by which leaders wait for other callers.
    pub fn with_clock(clock: Option<Arc<dyn Clock>>) -> Self {
        Self { clock, ..Self::default() }
    }

    #[track_caller]
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Does `work`, or waits for a caller that begins it after now. When the work is dropped halfway,
    /// `abandoned` gives the error of the callers that wait; without one, the next of them begins the work
    /// again.
    pub async fn share(
        &self,
        work: impl AsyncFn() -> Result<()>,
        abandoned: impl Fn() -> Option<Error>,
    ) -> Result<()> {
        let caller = self.arrive();
        loop {
            match self.role(caller.ticket) {
                Role::Over(result) => return result,
                Role::Follow(listener) => listener.await,
                Role::Lead => {
                    let mut leader =
                        Leader { group: self, abandoned: &abandoned, has_begun: false, has_ended: false };
                    self.wait_for_followers().await;
                    self.begin();
                    leader.has_begun = true;
                    let from = self.now();
                    let result = work().await;
                    leader.has_ended = true;
                    if let (Some(from), Some(to)) = (from, self.now()) {
                        self.state().delay.took = to.saturating_sub(from);
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
        if state.waiting == state.delay.expected {
            self.all_arrived.notify(1);
        }
        Caller { group: self, ticket: state.started + 1 }
    }

    fn role(&self, ticket: u64) -> Role {
        let mut state = self.state();
        if state.ended >= ticket {
            return Role::Over(state.last.clone().expect("a round has ended"));
        }
        if state.is_running {
            return Role::Follow(self.finished.listen());
        }
        state.is_running = true;
        Role::Lead
    }

    /// Waits for other callers, if that pays. The round has not begun, so those that arrive now are in it.
    async fn wait_for_followers(&self) {
        let Some(clock) = &self.clock else { return };
        let (wait, before, listener) = {
            let mut state = self.state();
            let before = state.waiting;
            let Some(wait) = state.delay.wait_before(before) else { return };
            (wait, before, self.all_arrived.listen())
        };
        or(listener, clock.sleep(wait)).await;
        let mut state = self.state();
        let came = state.waiting.saturating_sub(before);
        state.delay.note(came);
    }

    fn begin(&self) {
        let mut state = self.state();
        state.started += 1;
        state.members = std::mem::take(&mut state.waiting);
    }

    /// The round has ended with this result, or never happened.
    fn end(&self, result: Option<Result<()>>) {
        let mut state = self.state();
        state.is_running = false;
        state.delay.expected = state.members + state.waiting;
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
    fn a_caller_that_comes_during_a_round_shares_the_next() {
        let (group, rounds) = (GroupCommit::default(), Cell::new(0));
        let work = async || {
            rounds.set(rounds.get() + 1);
            yield_now().await;
            Ok(())
        };
        block_on(async {
            let mut first = Box::pin(group.share(work, || None));
            assert!(poll_once(&mut first).await.is_none());
            let mut others: Vec<_> = (0..3).map(|_| Box::pin(group.share(work, || None))).collect();
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

    /// A clock by which each round takes 4 ms, and an alarm that rings when a test notifies it.
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

    fn with_alarm() -> (GroupCommit, Arc<Event>) {
        let rings = Arc::new(Event::new());
        let alarm = Alarm { now: Mutex::default(), rings: rings.clone() };
        (GroupCommit::with_clock(Some(Arc::new(alarm))), rings)
    }

    #[test]
    fn a_leader_waits_for_those_who_were_there() {
        let (group, rings) = with_alarm();
        let rounds = Cell::new(0);
        let work = async || {
            rounds.set(rounds.get() + 1);
            yield_now().await;
            Ok(())
        };
        let come = || Box::pin(group.share(work, || None));
        block_on(async {
            // Two halves: one is working, the other waits.
            let (mut early, mut one, mut two) = (come(), come(), come());
            assert!(poll_once(&mut early).await.is_none());
            assert!(poll_once(&mut one).await.is_none());
            assert!(poll_once(&mut two).await.is_none());
            early.await.unwrap();
            assert_eq!(rounds.get(), 1);
            // The second half leads only when the first has come back.
            assert!(poll_once(&mut one).await.is_none());
            assert!(poll_once(&mut two).await.is_none());
            assert_eq!(rounds.get(), 1);
            let mut again = come();
            assert!(poll_once(&mut again).await.is_none());
            one.await.unwrap();
            two.await.unwrap();
            again.await.unwrap();
            assert_eq!(rounds.get(), 2, "one round for all");
            // Only one caller comes. It waits for the alarm, and then skips the wait for a while.
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
        let (group, rings) = with_alarm();
        let work = async || {
            yield_now().await;
            Ok(())
        };
        let come = || Box::pin(group.share(work, || Some(Error::invalid("dropped"))));
        block_on(async {
            let (mut one, mut two) = (come(), come());
            assert!(poll_once(&mut one).await.is_none());
            assert!(poll_once(&mut two).await.is_none());
            one.await.unwrap();
            // Waits for the first caller, which does not come back.
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
    fn after_a_wait_that_no_caller_joined_some_rounds_skip_it() {
        let mut delay =
            CommitDelay { expected: 4, took: Duration::from_millis(20), ..CommitDelay::default() };
        assert_eq!(delay.wait_before(1), Some(DELAY_MAX));
        assert_eq!(delay.wait_before(4), None, "all are here");
        for pause in [1, 2, 4, 8, 16, 32, 64, 64] {
            delay.note(0);
            for _ in 0..pause {
                assert_eq!(delay.wait_before(1), None, "{pause}");
            }
            assert!(delay.wait_before(1).is_some(), "{pause}");
        }
        delay.note(1);
        assert!(delay.wait_before(1).is_some());
        delay.note(0);
        assert_eq!(delay.wait_before(1), None);
        assert!(delay.wait_before(1).is_some());
        delay.took = Duration::from_micros(199);
        assert_eq!(delay.wait_before(1), None, "it is not worth a timer");
    }

    #[test]
    fn a_round_that_was_dropped_is_begun_again_or_fails() {
        let group = GroupCommit::default();
        let never = async || std::future::pending().await;
        block_on(async {
            let mut dropped = Box::pin(group.share(never, || None));
            assert!(poll_once(&mut dropped).await.is_none());
            let mut other = Box::pin(group.share(async || Ok(()), || None));
            assert!(poll_once(&mut other).await.is_none());
            drop(dropped);
            other.await.unwrap();

            let mut dropped = Box::pin(group.share(never, || Some(Error::invalid("dropped"))));
            assert!(poll_once(&mut dropped).await.is_none());
            let mut other = Box::pin(group.share(async || Ok(()), || None));
            assert!(poll_once(&mut other).await.is_none());
            drop(dropped);
            other.await.unwrap();
            assert!(group.share(async || Err(Error::invalid("no")), || None).await.is_err());
        });
    }
}
