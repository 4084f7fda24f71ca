//! One queue, on one worker: chains are taken as the guest makes them available, and handed back as they
//! complete.
//!
//! ```text
//!   kick ──► avail ring ──take──► Job ──► flight (many at once, in any order) ──► used ring ──► call
//!                          ▲                │
//!                          └── no more while requests or memory are at their limits
//! ```
//!
//! 1. A queue is one future on one worker and shares nothing with other queues but the disk.
//! 2. A queue that is stopped takes nothing more, waits for everything that it took, and hands all of it
//!    back: then the next one continues at the base that it returns, and nothing is lost or executed twice.
//!    After a kill `inflight` knows what is left.
//! 3. An invalid ring is broken: nothing more is taken from it until the front end sets it up anew, while its
//!    other queues continue.
//! 4. No guest monopolises a worker: after [`TURN_MAX`] chains, or as many MiB of data, other tasks get their
//!    turn.
//! 5. The requests of a queue are bounded: in number by the ring, in bytes by [`HELD_BYTES_MAX`].

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use vellum_core::{LocalFuture, lock};
use virtio_queue::{Queue, QueueOwnedT, QueueT};

use super::Host;
use super::bell::Bell;
use super::inflight::Pages;
use super::memory::Memory;
use super::request::REQUEST_BYTES_MAX;
use super::walk::Walk;
use super::work::{Done, Job, Target};
use crate::flight::Flight;
use crate::shutdown::{Shutdown, Stage, Watch};

/// How many chains are taken before others have their turn. One MiB of data, which is copied, counts like one
/// chain more.
const TURN_MAX: usize = 64;

/// What the data of a queue's running requests may take. The largest request fits, beside others.
const HELD_BYTES_MAX: usize = 2 * REQUEST_BYTES_MAX;

/// A bell that the front end may exchange at any time.
#[derive(Default)]
pub(super) struct Line(Mutex<Option<Bell>>);

impl Line {
    /// Another bell, or none.
    pub(super) fn replace(&self, bell: Option<Bell>) {
        *lock(&self.0) = bell;
    }

    /// Rings it, from a worker.
    pub(super) fn ring(&self, host: &dyn Host) {
        let bell = lock(&self.0).clone();
        if let Some(bell) = bell {
            host.ring(bell.descriptor());
        }
    }
}

/// A queue that runs.
pub(super) struct Ring {
    queue: Queue,
    memory: Arc<ArcSwap<Memory>>,
    target: Arc<Target>,
    call: Arc<Line>,
    err: Arc<Line>,
    /// Writes the eventfds; `None` in the fuzzer, which has none.
    host: Option<Arc<dyn Host>>,
    flight: Flight<LocalFuture<'static, Done>>,
    /// Where it is kept what was taken, if the front end keeps it.
    pages: Option<Pages>,
    /// Heads that a killed server had taken and not handed back.
    left: VecDeque<u16>,
    /// Taken, and waiting for room.
    waiting: Option<Waiting>,
    held: usize,
    /// Something was handed back, and the guest was not notified.
    is_untold: bool,
    is_broken: bool,
}

/// A request that has not begun.
struct Waiting {
    job: Job,
    /// A killed server entered it in the pages.
    is_entered: bool,
}

/// Where a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// There is more to take, and others come first.
    More,
    /// There is no room for more.
    Full,
    /// Nothing is left to take; the guest will ring.
    Rest,
}

/// A ring that makes no sense, and why.
struct Broken(String);

impl From<virtio_queue::Error> for Broken {
    fn from(error: virtio_queue::Error) -> Self {
        Self(error.to_string())
    }
}

impl Ring {
    pub(super) fn new(
        queue: Queue,
        memory: Arc<ArcSwap<Memory>>,
        target: Arc<Target>,
        (call, err): (Arc<Line>, Arc<Line>),
        kept: Option<(Pages, Vec<u16>)>,
    ) -> Self {
        let (pages, left) = kept.map_or((None, Vec::new()), |(pages, left)| (Some(pages), left));
        let flight = Flight::new(usize::from(queue.size()));
        Self {
            queue,
            memory,
            target,
            call,
            err,
            host: None,
            flight,
            pages,
            left: left.into(),
            waiting: None,
            held: 0,
            is_untold: false,
            is_broken: false,
        }
    }

    /// Serves the queue until it is stopped. Returns the next position in the avail ring.
    pub(super) async fn serve(mut self, kick: Bell, stop: Shutdown, host: Arc<dyn Host>) -> u16 {
        let mut watch = Watch::new(&stop);
        self.host = Some(host.clone());
        let mut rung = host.readable(kick.descriptor());
        poll_fn(|context| {
            self.flight.begin_turn();
            loop {
                let is_stopping = watch.poll_stage(context) > Stage::Serving;
                let turn = self.turn(context, is_stopping);
                if is_stopping && self.is_idle() {
                    return Poll::Ready(());
                }
                match turn {
                    Turn::More => {
                        context.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    Turn::Full => return Poll::Pending,
                    Turn::Rest if is_stopping || self.is_broken => return Poll::Pending,
                    Turn::Rest => {}
                }
                match rung.as_mut().poll(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(heard) => {
                        if let Err(error) = heard.and_then(|()| kick.clear()) {
                            self.break_down(&Broken(error.chain()));
                        }
                        rung = host.readable(kick.descriptor());
                    }
                }
            }
        })
        .await;
        // A ring that broke may have taken a chain and never begun it.
        self.queue.next_avail().wrapping_sub(u16::from(self.waiting.is_some()))
    }

    /// Whether nothing that was taken is still to be handed back.
    fn is_idle(&self) -> bool {
        self.flight.running() == 0 && (self.is_broken || (self.waiting.is_none() && self.left.is_empty()))
    }

    /// Takes the available chains and hands back those that have completed. Everything that was begun here is
    /// polled once more before this returns, so that no wake-up is missed.
    fn turn(&mut self, context: &Context<'_>, is_stopping: bool) -> Turn {
        let memory = self.memory.load_full();
        let mut budget = TURN_MAX;
        let turn = loop {
            let turn = match self.take(&memory, &mut budget, !is_stopping) {
                Ok(turn) => turn,
                Err(broken) => {
                    self.break_down(&broken);
                    Turn::Rest
                }
            };
            let mut ended: smallvec::SmallVec<[Done; 16]> = smallvec::SmallVec::new();
            self.flight.poll_woken(context, |done| ended.push(done));
            let has_room = !ended.is_empty();
            for done in ended {
                self.hand_back(&memory, done);
            }
            if !(has_room && turn == Turn::Full) {
                break turn;
            }
        };
        self.tell(&memory);
        turn
    }

    /// One turn, for the fuzzer; whatever the disk answers at once has been handed back afterwards.
    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn try_turn(&mut self, context: &Context<'_>) {
        self.flight.begin_turn();
        self.turn(context, false);
        assert!(
            self.flight.running() > 0 || self.held == 0,
            "nothing runs, and {} bytes are held",
            self.held
        );
    }

    /// Begins the waiting requests, those that another server left, and, if there is room for more, new
    /// chains of the guest.
    fn take(&mut self, memory: &Arc<Memory>, budget: &mut usize, wants_more: bool) -> Result<Turn, Broken> {
        loop {
            if self.is_broken {
                return Ok(Turn::Rest);
            }
            if let Some(waiting) = self.waiting.take() {
                let weight = waiting.job.weight();
                let is_admitted = self.held == 0 || weight <= HELD_BYTES_MAX.saturating_sub(self.held);
                if !is_admitted || self.flight.running() >= usize::from(self.queue.size()) {
                    self.waiting = Some(waiting);
                    return Ok(Turn::Full);
                }
                *budget = budget.saturating_sub(weight >> 20);
                self.begin(memory, waiting);
            }
            if *budget == 0 {
                return Ok(Turn::More);
            }
            *budget -= 1;
            if let Some(head) = self.left.pop_front() {
                self.read(memory, head, true);
                continue;
            }
            if !wants_more {
                return Ok(Turn::Rest);
            }
            // Acquire: what the guest wrote before it moved the index is seen.
            let ready = self.queue.avail_idx(memory.mapped(), Ordering::Acquire)?;
            if ready.0 != self.queue.next_avail() {
                self.pop(memory)?;
            } else if !self.queue.enable_notification(memory.mapped())? {
                return Ok(Turn::Rest);
            }
        }
    }

    fn pop(&mut self, memory: &Arc<Memory>) -> Result<(), Broken> {
        let chain = self.queue.iter(memory.mapped())?.next();
        let chain = chain.ok_or_else(|| Broken("its avail ring is not in memory".to_owned()))?;
        self.read(memory, chain.head_index(), false);
        Ok(())
    }

    /// Reads a chain; one that makes no sense is handed back.
    fn read(&mut self, memory: &Arc<Memory>, head: u16, is_entered: bool) {
        let links = Walk::along(memory, self.queue.desc_table(), self.queue.size(), head);
        match Job::of(head, links, memory, &self.target) {
            Ok(job) => self.waiting = Some(Waiting { job, is_entered }),
            Err(malformed) => {
                tracing::debug!("a malformed descriptor chain was returned unprocessed: {}", malformed.0);
                self.hand_back(memory, Done { head, written: 0, weight: 0 });
            }
        }
    }

    fn begin(&mut self, memory: &Memory, Waiting { job, is_entered }: Waiting) {
        self.held += job.weight();
        if let Some(pages) = self.pages.as_mut().filter(|_| !is_entered) {
            pages.enter(job.head());
        }
        let target = self.target.clone();
        if job.is_long() {
            self.flight.start_long(Box::pin(job.run(target)));
        } else if let Some(done) = self.flight.start(Box::pin(job.run(target))) {
            self.hand_back(memory, done);
        }
    }

    fn hand_back(&mut self, memory: &Memory, done: Done) {
        self.held -= done.weight;
        let pages = self.pages.as_ref().filter(|_| done.head < self.queue.size());
        if let Some(pages) = pages {
            pages.end(done.head);
        }
        match self.queue.add_used(memory.mapped(), done.head, done.written) {
            Ok(()) => self.is_untold = true,
            Err(error) => return self.break_down(&error.into()),
        }
        if let Some(pages) = &self.pages {
            pages.strike(done.head, self.queue.next_used());
        }
    }

    /// Notifies the guest of what was handed back, if it wants that.
    fn tell(&mut self, memory: &Memory) {
        if !std::mem::take(&mut self.is_untold) {
            return;
        }
        // Whether the guest wants it cannot be read from a ring that is gone; then it gets one notification
        // too many.
        if self.queue.needs_notification(memory.mapped()).unwrap_or(true) {
            self.ring(&self.call);
        }
    }

    fn break_down(&mut self, broken: &Broken) {
        if !std::mem::replace(&mut self.is_broken, true) {
            tracing::warn!("a queue of a vhost-user-blk front end is no longer served: {}", broken.0);
            self.ring(&self.err);
        }
    }

    fn ring(&self, line: &Line) {
        if let Some(host) = &self.host {
            line.ring(&**host);
        }
    }
}
