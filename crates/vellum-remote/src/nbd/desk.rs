//! Where requests wait for the connection, and what is known of it.
//!
//! ```text
//!   workers ── submit ──▶ queue ── next ──▶ on the wire (session) ──▶ answered
//!                           ▲                        │
//!                           └── requeue: reads ──────┘ the connection is lost
//! ```
//!
//! 1. A job is answered exactly once: with its result, or with an error when it was held for too long.
//! 2. Only what changes nothing is held over a lost connection. A change that was sent and not answered may still be
//!    carried out by the old connection's server, also after later changes: it is never sent again. The storage
//!    then counts as poisoned, as it does when answered changes were not flushed.
//! 3. A request is held since the last connection that has brought an answer, to whichever request: a handshake is no answer, and a
//!    server that goes no further would hold it for ever.
//! 4. Nothing here waits, and the lock is held for nanoseconds.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use event_listener::{Event, EventListener};
use vellum_core::{Buffer, Error, ErrorKind, Result, lock};
use vellum_io::{OneshotSender, oneshot};

/// What is asked of the server.
#[derive(Debug)]
pub(super) enum Ask {
    Read { at: u64, buffer: Buffer },
    Write { at: u64, data: Buffer },
    Zero { at: u64, len: u32, keeps_space: bool },
    Trim { at: u64, len: u32 },
    Flush,
    Status { at: u64, len: u32 },
}

impl Ask {
    /// Whether it changes what the export holds.
    pub(super) fn is_change(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Zero { .. } | Self::Trim { .. })
    }
}

/// A run of the export: its length in bytes, and whether it may hold anything but zeros.
pub(super) type Run = (u64, bool);

/// What the server has answered.
#[derive(Debug)]
pub(super) enum Answer {
    Done,
    Bytes(Buffer),
    Runs(Vec<Run>),
}

/// A request, with the place where its answer goes.
pub(super) struct Job {
    pub(super) ask: Ask,
    /// Since when it has been held: since there was no connection, or one was lost, and none has brought an answer.
    pub(super) held_since: Option<Duration>,
    /// For a flush: this many changes had been answered when it was sent.
    pub(super) covers: u64,
    answer: OneshotSender<Result<Answer>>,
}

impl Job {
    pub(super) fn finish(self, answer: Result<Answer>) {
        self.answer.send(answer);
    }
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    /// No more requests will come.
    is_closed: bool,
    /// No connection will serve them any more.
    is_over: bool,
    /// Since when there has been no connection, and why.
    down: Option<(Duration, Error)>,
    /// How many changes were answered, and how many of them a flush has made durable.
    answered: u64,
    flushed: u64,
    poisoned: Option<Error>,
}

/// The requests of one storage.
pub(super) struct Desk {
    name: String,
    /// A request is held for this long without a connection.
    patience: Duration,
    state: Mutex<State>,
    event: Event,
}

impl Desk {
    pub(super) fn new(name: String, patience: Duration) -> Self {
        Self { name, patience, state: Mutex::default(), event: Event::new() }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Queues a request and waits for its answer.
    pub(super) async fn submit(&self, ask: Ask) -> Result<Answer> {
        let (answer, answered) = oneshot();
        {
            let mut state = lock(&self.state);
            if state.is_over {
                return Err(self.over());
            }
            let is_stopped = ask.is_change() || matches!(ask, Ask::Flush);
            if let Some(error) = state.poisoned.as_ref().filter(|_| is_stopped) {
                return Err(error.clone());
            }
            state.queue.push_back(Job { ask, held_since: None, covers: 0, answer });
        }
        self.event.notify(usize::MAX);
        answered.await.unwrap_or_else(|| Err(self.over()))
    }

    fn over(&self) -> Error {
        Error::new(ErrorKind::Closed, format!("{}: the connection has ended", self.name))
    }

    /// For the next change of the queue or of the connection.
    pub(super) fn listen(&self) -> EventListener {
        self.event.listen()
    }

    /// Wakes those that listen.
    pub(super) fn wake(&self) {
        self.event.notify(usize::MAX);
    }

    /// The next request to be sent.
    pub(super) fn next(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        let mut job = state.queue.pop_front()?;
        job.covers = state.answered;
        Some(job)
    }

    pub(super) fn close(&self) {
        lock(&self.state).is_closed = true;
        self.wake();
    }

    pub(super) fn is_closed(&self) -> bool {
        lock(&self.state).is_closed
    }

    /// The connection is usable from now on.
    pub(super) fn up(&self) {
        lock(&self.state).down = None;
    }

    /// The connection is gone, and these requests were on it, in the order in which they were sent.
    pub(super) fn down(&self, now: Duration, why: &Error, on_the_wire: Vec<Job>) {
        self.lost(now, why, on_the_wire, false);
    }

    /// As above, of a connection that has brought answers or has not.
    pub(super) fn lost(&self, now: Duration, why: &Error, mut on_the_wire: Vec<Job>, has_answered: bool) {
        let mut state = lock(&self.state);
        if has_answered {
            on_the_wire.iter_mut().chain(&mut state.queue).for_each(|job| job.held_since = None);
        }
        let has_changes = on_the_wire.iter().any(|job| job.ask.is_change());
        if has_changes || state.answered > state.flushed {
            self.poison(&mut state, &why.clone().context("the connection was lost before a flush"));
        }
        let mut lost = Vec::new();
        for mut job in on_the_wire.into_iter().rev() {
            job.held_since.get_or_insert(now);
            let is_stopped = job.ask.is_change() || matches!(job.ask, Ask::Flush);
            let is_long = job.held_since.is_some_and(|since| since + self.patience <= now);
            match state.poisoned.clone().filter(|_| is_stopped) {
                Some(error) => lost.push((job, error)),
                None if is_long => lost.push((job, self.unanswered(why))),
                None => state.queue.push_front(job),
            }
        }
        state.down.get_or_insert((now, why.clone())).1 = why.clone();
        drop(state);
        lost.into_iter().for_each(|(job, error)| job.finish(Err(error)));
    }

    /// Fails what has been held for too long, and what comes while there has been no connection for as long.
    pub(super) fn give_up(&self, now: Duration) {
        let mut expired = Vec::new();
        let mut state = lock(&self.state);
        let Some((since, why)) = state.down.clone() else { return };
        let is_long = since + self.patience <= now;
        for mut job in std::mem::take(&mut state.queue) {
            let held_since = *job.held_since.get_or_insert(now);
            match is_long || held_since + self.patience <= now {
                true => expired.push(job),
                false => state.queue.push_back(job),
            }
        }
        drop(state);
        let error = match is_long {
            true => why.with_kind(ErrorKind::Io).context(format!(
                "{}: the server has not been reachable for {} seconds",
                self.name,
                self.patience.as_secs()
            )),
            false => self.unanswered(&why),
        };
        expired.into_iter().for_each(|job| job.finish(Err(error.clone())));
    }

    /// The error of a request that was held for too long, though the server was there in between.
    fn unanswered(&self, why: &Error) -> Error {
        why.clone().with_kind(ErrorKind::Io).context(format!(
            "{}: the server has not answered in {} seconds, and several connections",
            self.name,
            self.patience.as_secs()
        ))
    }

    /// The server has answered this request.
    pub(super) fn answer(&self, job: Job, answer: Result<Answer>) {
        let mut state = lock(&self.state);
        match (&job.ask, &answer) {
            (Ask::Flush, Ok(_)) => state.flushed = state.flushed.max(job.covers),
            (Ask::Flush, Err(error)) => self.poison(&mut state, error),
            (ask, Ok(_)) if ask.is_change() => state.answered += 1,
            // It may have changed some of the bytes.
            (ask, Err(_)) if ask.is_change() => state.answered += 1,
            _ => {}
        }
        drop(state);
        job.finish(answer);
        self.wake();
    }

    fn poison(&self, state: &mut State, why: &Error) {
        state.poisoned.get_or_insert_with(|| {
            why.clone().with_kind(ErrorKind::Poisoned).context(format!(
                "{}: what was written since the last flush may be lost; open it again",
                self.name
            ))
        });
    }

    /// Nothing will be sent any more.
    pub(super) fn end(&self) {
        let mut state = lock(&self.state);
        state.is_over = true;
        let left = std::mem::take(&mut state.queue);
        drop(state);
        left.into_iter().for_each(|job| job.finish(Err(self.over())));
    }
}
