//! The driver without a ring: files by the blocking pool, sockets by a poller.
//!
//! ```text
//!   file op ──▶ page cache? ── yes ───────────────────────────▶ finished ─┐
//!                   └─ no ──▶ job of the blocking pool ──▶ mailbox ───────┼──▶ reap ──▶ slot ──▶ future
//!   socket op ──▶ ready? ──── yes ────────────────────────────▶ finished ─┘
//!                   └─ no ──▶ waits at the poller ──▶ try again
//! ```
//!
//! 1. A job owns its operation until it puts both into the mailbox. While it runs the slot is empty.
//! 2. A descriptor is registered with the poller exactly while an operation waits for it, and that operation
//!    keeps it open.
//! 3. Closing the driver waits for the jobs: they are on regular files or block devices, so they end.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use polling::{Event, Events, Poller};
use vellum_core::{Context as _, Result, lock};

use super::execute::{attempt, perform, read_cached};
use super::op::{Op, OpResult, Readiness};
use super::slots::{Completed, Slots};
use crate::blocking;
use crate::wakeup::{Bell, Wakeup};

/// A worker's blocking driver.
pub(crate) struct Threads {
    state: RefCell<State>,
    poller: Arc<Poller>,
    events: RefCell<Events>,
    mailbox: Arc<Mailbox>,
}

struct State {
    slots: Slots<Option<Op>>,
    waiting: HashMap<RawFd, Waiting>,
    finished: Vec<(usize, OpResult)>,
}

/// The operations that wait for one descriptor.
struct Waiting {
    socket: Arc<OwnedFd>,
    readers: Vec<usize>,
    writers: Vec<usize>,
}

/// Where jobs leave what they have done.
struct Mailbox {
    letters: Mutex<Vec<Letter>>,
    arrived: Condvar,
    wakeup: Arc<Wakeup>,
}

struct Letter {
    key: usize,
    op: Op,
    result: OpResult,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Vec<Letter>> {
        lock(&self.letters)
    }

    fn put(&self, letter: Letter) {
        self.lock().push(letter);
        self.arrived.notify_all();
        self.wakeup.ring();
    }
}

impl Threads {
    /// A driver for this thread, and the bell that others ring.
    pub(crate) fn new() -> Result<(Self, Arc<Wakeup>)> {
        let poller = Arc::new(Poller::new().context(|| "can't make a poller for sockets")?);
        let wakeup = Wakeup::new(Bell::Poller(poller.clone()));
        let mailbox = Mailbox { letters: Mutex::default(), arrived: Condvar::new(), wakeup: wakeup.clone() };
        let state = State { slots: Slots::new(), waiting: HashMap::new(), finished: Vec::new() };
        let state = RefCell::new(state);
        let events = RefCell::new(Events::new());
        Ok((Self { state, poller, events, mailbox: Arc::new(mailbox) }, wakeup))
    }

    /// Starts the operation: at once, on the pool, or when its socket is ready.
    pub(crate) fn start(&self, mut op: Op) -> usize {
        let state = &mut *self.state.borrow_mut();
        if op.socket().is_some() {
            let attempted = attempt(&mut op);
            let key = state.slots.insert(Some(op));
            match attempted {
                Some(result) => state.finished.push((key, result)),
                None => state.wait_for_socket(key, &self.poller),
            }
            return key;
        }
        let cached = match &mut op {
            Op::Read(transfer) if transfer.cached || !transfer.file.is_direct() => read_cached(transfer),
            _ => None,
        };
        if let Some(result) = cached {
            let key = state.slots.insert(Some(op));
            state.finished.push((key, result));
            return key;
        }
        let key = state.slots.insert(None);
        let mailbox = self.mailbox.clone();
        blocking::submit(op.backend(), move || {
            let result = perform(&mut op);
            mailbox.put(Letter { key, op, result });
        });
        key
    }

    /// The result of the operation, or a promise to wake.
    pub(crate) fn poll_op(&self, key: usize, context: &Context<'_>) -> Poll<(OpResult, Op)> {
        let polled = self.state.borrow_mut().slots.poll(key, context);
        polled.map(|(result, op)| (result, op.expect("an operation that has ended is in its slot")))
    }

    /// The future was dropped. An operation that waits for a socket ends here; a job continues.
    pub(crate) fn abandon(&self, key: usize) {
        let mut state = self.state.borrow_mut();
        let (mut ended, waker) = state.slots.abandon(key);
        if ended.is_none() && state.stop_waiting(key, &self.poller) {
            state.end(key, Err(libc::ECANCELED), &mut Vec::new(), &mut ended);
        }
        drop(state);
        drop(waker);
        if let Some((result, Some(op))) = ended {
            op.discard(result);
        }
    }

    /// Polls the sockets, without waiting.
    pub(crate) fn look(&self) {
        if !self.state.borrow().waiting.is_empty() {
            self.poll_sockets(Some(Duration::ZERO));
        }
    }

    /// Waits until an operation ends, another thread rings, or `patience` is over.
    pub(crate) fn wait(&self, patience: Option<Duration>) {
        let something = !self.state.borrow().finished.is_empty() || !self.mailbox.lock().is_empty();
        self.poll_sockets(if something { Some(Duration::ZERO) } else { patience });
    }

    /// Waits for the end of everything that was started.
    pub(crate) fn close(&self) {
        let mut state = self.state.borrow_mut();
        // No more socket events will be handled. Sockets have to leave the poller before they are closed.
        let waiting = std::mem::take(&mut state.waiting);
        for waiting in waiting.into_values() {
            drop(self.poller.delete(&waiting.socket));
            let keys = waiting.readers.into_iter().chain(waiting.writers);
            state.finished.extend(keys.map(|key| (key, Err(libc::ECANCELED))));
        }
        drop(state);
        self.reap();
        while self.state.borrow().slots.running() > 0 {
            let mut letters = self.mailbox.lock();
            while letters.is_empty() {
                letters = self.mailbox.arrived.wait(letters).unwrap_or_else(PoisonError::into_inner);
            }
            drop(letters);
            self.reap();
        }
    }

    /// Hands out what has ended.
    pub(crate) fn reap(&self) {
        let letters = std::mem::take(&mut *self.mailbox.lock());
        let mut state = self.state.borrow_mut();
        if letters.is_empty() && state.finished.is_empty() {
            return;
        }
        for letter in letters {
            *state.slots.held(letter.key) = Some(letter.op);
            state.finished.push((letter.key, letter.result));
        }
        let mut wakers = Vec::new();
        let mut orphans = Vec::new();
        for (key, result) in std::mem::take(&mut state.finished) {
            let mut orphan = None;
            state.end(key, result, &mut wakers, &mut orphan);
            orphans.extend(orphan);
        }
        // Wakers and drops may come back here.
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        for (result, op) in orphans {
            if let Some(op) = op {
                op.discard(result);
            }
        }
    }

    /// Waits for the sockets and the bell, and tries again what was waiting for those that are ready.
    fn poll_sockets(&self, patience: Option<Duration>) {
        let mut events = self.events.borrow_mut();
        events.clear();
        // It fails for nothing that can happen here, and the worker's loop comes back anyway.
        let polled = self.poller.wait(&mut events, patience);
        debug_assert!(polled.is_ok(), "waiting for sockets: {polled:?}");
        let mut state = self.state.borrow_mut();
        for event in events.iter() {
            let descriptor = RawFd::try_from(event.key).expect("keys are descriptors");
            state.try_waiting(descriptor, event, &self.poller);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.close();
    }
}

impl State {
    /// The operation has ended, and its slot holds it.
    fn end(
        &mut self,
        key: usize,
        result: OpResult,
        wakers: &mut Vec<Waker>,
        orphan: &mut Option<(OpResult, Option<Op>)>,
    ) {
        self.slots.held(key).as_ref().expect("the job has put it back").settle(result);
        match self.slots.complete(key, result) {
            Completed::Wake(waker) => wakers.push(waker),
            Completed::Orphan(op) => *orphan = Some((result, op)),
            Completed::Quiet => {}
        }
    }

    fn wait_for_socket(&mut self, key: usize, poller: &Poller) {
        let op = self.slots.held(key).as_ref().expect("it has just been put there");
        let (socket, readiness) = op.socket().expect("only sockets are waited for");
        let descriptor = socket.as_raw_fd();
        let waiting = match self.waiting.entry(descriptor) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let socket = socket.clone();
                // SAFETY: it leaves the poller when no operation waits for it any more, and is kept open
                // until then.
                let added = unsafe { poller.add(&socket, Event::none(key_of(descriptor))) };
                if let Err(error) = added {
                    self.finished.push((key, Err(error.raw_os_error().unwrap_or(libc::EIO))));
                    return;
                }
                entry.insert(Waiting { socket, readers: Vec::new(), writers: Vec::new() })
            }
        };
        waiting.queue(readiness).push(key);
        self.arm(descriptor, poller);
    }

    /// Tells the poller what is still waited for, or takes the descriptor away from it.
    fn arm(&mut self, descriptor: RawFd, poller: &Poller) {
        let Some(waiting) = self.waiting.get(&descriptor) else { return };
        let interest =
            Event::new(key_of(descriptor), !waiting.readers.is_empty(), !waiting.writers.is_empty());
        if interest.readable || interest.writable {
            // This fails only for want of memory. The waiting operations then get the error instead of
            // waiting forever.
            if let Err(error) = poller.modify(&waiting.socket, interest) {
                let waiting = self.waiting.remove(&descriptor).expect("found above");
                drop(poller.delete(&waiting.socket));
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                let keys = waiting.readers.into_iter().chain(waiting.writers);
                self.finished.extend(keys.map(|key| (key, Err(errno))));
            }
        } else {
            drop(poller.delete(&waiting.socket));
            self.waiting.remove(&descriptor);
        }
    }

    /// Takes an operation from those that wait for a socket. False when it is none of them.
    fn stop_waiting(&mut self, key: usize, poller: &Poller) -> bool {
        let Some(Some(op)) = self.slots.peek(key) else { return false };
        let Some((socket, readiness)) = op.socket() else { return false };
        let descriptor = socket.as_raw_fd();
        let Some(waiting) = self.waiting.get_mut(&descriptor) else { return false };
        let queue = waiting.queue(readiness);
        let Some(place) = queue.iter().position(|waiter| *waiter == key) else { return false };
        queue.remove(place);
        self.arm(descriptor, poller);
        true
    }

    /// A socket is ready: tries again what waited for that.
    fn try_waiting(&mut self, descriptor: RawFd, event: Event, poller: &Poller) {
        let Some(waiting) = self.waiting.get_mut(&descriptor) else { return };
        let readers = if event.readable { std::mem::take(&mut waiting.readers) } else { Vec::new() };
        let writers = if event.writable { std::mem::take(&mut waiting.writers) } else { Vec::new() };
        for key in readers.into_iter().chain(writers) {
            let op = self.slots.held(key).as_mut().expect("an operation that waits is in its slot");
            match attempt(op) {
                Some(result) => self.finished.push((key, result)),
                None => {
                    let (_, readiness) = op.socket().expect("only sockets are waited for");
                    let waiting = self.waiting.get_mut(&descriptor).expect("found above");
                    waiting.queue(readiness).push(key);
                }
            }
        }
        self.arm(descriptor, poller);
    }
}

impl Waiting {
    fn queue(&mut self, readiness: Readiness) -> &mut Vec<usize> {
        match readiness {
            Readiness::Read => &mut self.readers,
            Readiness::Write => &mut self.writers,
        }
    }
}

fn key_of(descriptor: RawFd) -> usize {
    usize::try_from(descriptor).expect("descriptors are not negative")
}
