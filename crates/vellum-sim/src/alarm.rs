//! The virtual clock's alarms: which tasks to wake, and when.
//!
//! 1. Alarms for the same time go off together, in the order in which they were set.
//! 2. An alarm is forgotten when its sleeper is dropped.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use vellum_core::{Clock, LocalFuture};

use crate::world::Core;

#[derive(Default)]
pub(crate) struct Alarms {
    set: BTreeMap<(Duration, u64), Waker>,
    made: u64,
}

impl Alarms {
    /// The earliest alarm time, and all tasks that wait for it.
    pub(crate) fn take_next(&mut self) -> Option<(Duration, Vec<Waker>)> {
        let ((time, _), _) = self.set.first_key_value()?;
        let time = *time;
        let mut woken = Vec::new();
        while let Some(first) = self.set.first_entry()
            && first.key().0 == time
        {
            woken.push(first.remove());
        }
        Some((time, woken))
    }

    fn set(&mut self, at: Duration, number: Option<u64>, waker: &Waker) -> u64 {
        let number = number.unwrap_or_else(|| {
            self.made += 1;
            self.made
        });
        self.set.insert((at, number), waker.clone());
        number
    }
}

/// Ends at a certain virtual time.
pub(crate) struct Sleep {
    core: Arc<Core>,
    until: Duration,
    /// The number of the alarm, once it is set.
    alarm: Option<u64>,
}

impl Sleep {
    pub(crate) fn until(core: Arc<Core>, until: Duration) -> Self {
        Self { core, until, alarm: None }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let (until, alarm) = (self.until, self.alarm);
        let set = self.core.with_alarms(|alarms, now| {
            if now >= until {
                return None;
            }
            Some(alarms.set(until, alarm, context.waker()))
        });
        match set {
            None => Poll::Ready(()),
            set => {
                self.alarm = set;
                Poll::Pending
            }
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(alarm) = self.alarm {
            let waker = self.core.with_alarms(|alarms, _| alarms.set.remove(&(self.until, alarm)));
            drop(waker);
        }
    }
}

/// The clock of a world.
pub(crate) struct SimClock(Arc<Core>);

impl SimClock {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self(core)
    }
}

impl Clock for SimClock {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn sleep(&self, wait: Duration) -> LocalFuture<'static, ()> {
        Box::pin(self.0.sleep(wait))
    }
}
