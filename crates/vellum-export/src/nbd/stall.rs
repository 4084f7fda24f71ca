//! Whether the peer of a session makes progress: checked now and then, by an alarm of the session's own.
//!
//! 1. A session is checked only while it wants something from its peer, or does not read from it: an idle
//!    session has no alarm.
//! 2. While no alarm has rung, the check costs one load from memory each time the session is polled.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use vellum_core::{Clock, LocalFuture, lock};

/// Between two looks.
const LOOKED_EVERY: Duration = Duration::from_secs(10);

/// After this many checks without a byte the peer is given up.
const LOOKS_MAX: u32 = 6;

/// What the session wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progress {
    /// Bytes that the peer has taken; `Some` only while the session wants to send.
    pub(super) sent: Option<u64>,
    /// How often bytes came; something only while a request has come in part.
    pub(super) received: Option<u64>,
}

impl Progress {
    /// Whether the session waits for something that has not moved since.
    fn is_stuck_since(self, before: Self) -> bool {
        let is_stuck = |now: Option<u64>, before: Option<u64>| now.is_some() && now == before;
        is_stuck(self.sent, before.sent) || is_stuck(self.received, before.received)
    }
}

/// What a look finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It was not time, or all is well.
    Fine,
    /// It is time to see whether the peer is still there.
    Look,
    /// Nothing has moved for a minute.
    Stuck,
}

/// The alarm of a session.
pub(super) struct Stall<'a> {
    clock: &'a dyn Clock,
    alarm: Option<LocalFuture<'static, ()>>,
    bell: Arc<Bell>,
    before: Progress,
    looks: u32,
}

/// Rung by the alarm.
struct Bell {
    has_rung: AtomicBool,
    session: Mutex<Waker>,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.has_rung.store(true, Ordering::Release);
        let session = lock(&self.session).clone();
        session.wake();
    }
}

impl<'a> Stall<'a> {
    pub(super) fn new(clock: &'a dyn Clock) -> Self {
        let bell = Bell { has_rung: AtomicBool::new(false), session: Mutex::new(Waker::noop().clone()) };
        let before = Progress { sent: None, received: None };
        Self { clock, alarm: None, bell: Arc::new(bell), before, looks: 0 }
    }

    /// To be called whenever the session is about to wait. `is_wanted`: it waits for its peer, or does not
    /// read from it.
    pub(super) fn poll(
        &mut self,
        context: &Context<'_>,
        is_wanted: bool,
        progress: impl FnOnce() -> Progress,
    ) -> Verdict {
        match &self.alarm {
            None if !is_wanted => return Verdict::Fine,
            None => {
                (self.before, self.looks) = (progress(), 0);
                self.set(context);
                return Verdict::Fine;
            }
            Some(_) if !self.bell.has_rung.swap(false, Ordering::AcqRel) => return Verdict::Fine,
            Some(_) => {}
        }
        self.alarm = None;
        if !is_wanted {
            return Verdict::Fine;
        }
        let now = progress();
        self.looks = if now.is_stuck_since(self.before) { self.looks + 1 } else { 0 };
        self.before = now;
        if self.looks >= LOOKS_MAX {
            return Verdict::Stuck;
        }
        self.set(context);
        Verdict::Look
    }

    fn set(&mut self, context: &Context<'_>) {
        lock(&self.bell.session).clone_from(context.waker());
        let mut alarm = self.clock.sleep(LOOKED_EVERY);
        let waker = Waker::from(self.bell.clone());
        if alarm.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
            waker.wake();
        }
        self.alarm = Some(alarm);
    }
}
