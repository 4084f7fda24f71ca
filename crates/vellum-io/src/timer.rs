//! The clock of a worker: the current time, and the sleepers with their deadlines.
//!
//! Sleepers are ordered by their deadlines; the worker's loop wakes those that are due and does not sleep
//! past the first. Thousands of them cost a tree of that size, and nothing while they sleep.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use vellum_core::{Clock, LocalFuture};

use crate::worker;

/// The sleepers of one worker.
#[derive(Default)]
pub(crate) struct Timers {
    sleepers: RefCell<BTreeMap<Key, Waker>>,
    next: Cell<u64>,
}

/// A deadline, and a number that distinguishes sleepers with the same deadline.
type Key = (Duration, u64);

impl Timers {
    /// Wakes those whose time has come.
    pub(crate) fn fire(&self) {
        if self.sleepers.borrow().is_empty() {
            return;
        }
        let now = now();
        loop {
            let mut sleepers = self.sleepers.borrow_mut();
            match sleepers.first_key_value() {
                Some(((deadline, _), _)) if *deadline <= now => {
                    let waker = sleepers.pop_first().map(|(_, waker)| waker);
                    // A waker may run anything, a sleep that begins or ends among it.
                    drop(sleepers);
                    waker.into_iter().for_each(Waker::wake);
                }
                _ => return,
            }
        }
    }

    /// The time until the first deadline; `None` when there are no sleepers.
    pub(crate) fn patience(&self) -> Option<Duration> {
        let sleepers = self.sleepers.borrow();
        let ((deadline, _), _) = sleepers.first_key_value()?;
        Some(deadline.saturating_sub(now()))
    }

    fn insert(&self, deadline: Duration, waker: Waker) -> Key {
        let number = self.next.get();
        self.next.set(number + 1);
        self.sleepers.borrow_mut().insert((deadline, number), waker);
        (deadline, number)
    }
}

/// The time since the program first called it.
pub(crate) fn now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// The real clock. One for all workers: a sleep belongs to the worker that polls it.
pub(crate) struct RealClock;

impl Clock for RealClock {
    fn now(&self) -> Duration {
        now()
    }

    fn sleep(&self, wait: Duration) -> LocalFuture<'static, ()> {
        Box::pin(Sleep { deadline: now().saturating_add(wait), sleeping: None })
    }
}

struct Sleep {
    deadline: Duration,
    sleeping: Option<(Rc<Timers>, Key)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let deadline = self.deadline;
        let Some((timers, key)) = &self.sleeping else {
            // Even a sleep of no length lets others run first.
            let timers = worker::current_timers();
            let key = timers.insert(deadline, context.waker().clone());
            self.sleeping = Some((timers, key));
            return Poll::Pending;
        };
        match timers.sleepers.borrow_mut().get_mut(key) {
            Some(waker) => {
                waker.clone_from(context.waker());
                return Poll::Pending;
            }
            None => debug_assert!(now() >= deadline, "a sleeper is woken when it is time"),
        }
        Poll::Ready(())
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some((timers, key)) = self.sleeping.take() {
            // The waker goes after the table has been let go of.
            let waker = timers.sleepers.borrow_mut().remove(&key);
            drop(waker);
        }
    }
}
