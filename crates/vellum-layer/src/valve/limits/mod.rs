//! Limits and their order: a request takes its cost from every bucket it counts for, or waits in line.
//!
//! ```text
//!   no request waits, all buckets have room ──► taken without a lock ──► it begins
//!            otherwise ──► the line of its direction ──► its head sleeps until the buckets have room ──► it begins
//! ```
//!
//! 1. Requests of one direction never overtake each other. Where the heads of both directions could begin,
//!    they alternate.
//! 2. A request takes from all of its buckets or from none.
//! 3. A waiting request holds no lock: it has a place in line until its turn comes or it is dropped.
//! 4. Flushes and background work are not limited, and never wait here.
//! 5. New limits apply at once, also to waiting requests; their buckets are empty at first.
//!
//! The line, not a worker, gives a request its turn: queues and connections of all workers share one limit.

mod bucket;
mod rates;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};

use arc_swap::ArcSwap;
use event_listener::Event;
use futures_lite::future::or;
use vellum_core::{Clock, lock};

pub use bucket::Rate;
use bucket::{Bucket, Ticks, duration, ticks};
pub(super) use rates::Direction;
pub use rates::{Kind, RateLimits};

/// The limits of one disk, and the requests that wait for them.
pub(super) struct Limits {
    clock: Arc<dyn Clock>,
    /// A limit is set, or a request waits.
    is_on: AtomicBool,
    buckets: ArcSwap<Buckets>,
    waiting: AtomicUsize,
    line: Mutex<Line>,
}

/// The buckets of these rates.
#[derive(Default)]
struct Buckets {
    rates: RateLimits,
    all: [Option<Bucket>; 6],
}

/// What a request costs.
#[derive(Debug, Clone, Copy)]
struct Cost {
    direction: Direction,
    bytes: u64,
}

/// A request in line.
struct Place {
    cost: Cost,
    is_its_turn: AtomicBool,
    /// It is its turn, it is at the head, or limits have changed.
    news: Event,
}

#[derive(Default)]
struct Line {
    /// Reads and writes.
    waiting: [VecDeque<Arc<Place>>; 2],
    /// The direction whose head is tried first.
    turn: usize,
}

impl Buckets {
    fn new(rates: RateLimits) -> Self {
        let all = Kind::ALL.map(|kind| rates.rate(kind).map(Bucket::new));
        Self { rates, all }
    }

    fn of(&self, cost: Cost) -> impl Iterator<Item = (&Bucket, bucket::Units)> {
        cost.direction.kinds().into_iter().filter_map(move |kind| {
            let place = Kind::ALL.iter().position(|its| *its == kind).expect("it is one of them");
            Some((self.all[place].as_ref()?, self.rates.units(kind, cost.bytes)?))
        })
    }

    /// Takes it from all of its buckets, or from none.
    fn take(&self, cost: Cost, now: Ticks) -> bool {
        for (number, (bucket, units)) in self.of(cost).enumerate() {
            if !bucket.take(units, now) {
                self.of(cost).take(number).for_each(|(bucket, units)| bucket.give_back(units));
                return false;
            }
        }
        true
    }

    fn ready_at(&self, cost: Cost) -> Ticks {
        self.of(cost).map(|(bucket, _)| bucket.ready_at()).max().unwrap_or(0)
    }
}

impl Line {
    /// Lets every request begin that may. The new heads of the lines are then woken, so that they set their
    /// alarms.
    fn advance(&mut self, buckets: &Buckets, now: Ticks) -> usize {
        let mut began = 0;
        'again: loop {
            for direction in [self.turn, 1 - self.turn] {
                let Some(head) = self.waiting[direction].front() else { continue };
                if buckets.take(head.cost, now) {
                    let head = self.waiting[direction].pop_front().expect("it was just there");
                    head.is_its_turn.store(true, SeqCst);
                    head.news.notify(usize::MAX);
                    began += 1;
                    self.turn = 1 - direction;
                    continue 'again;
                }
            }
            break;
        }
        if began > 0 {
            self.tell_heads();
        }
        began
    }

    fn tell_heads(&self) {
        self.waiting.iter().filter_map(VecDeque::front).for_each(|head| {
            head.news.notify(usize::MAX);
        });
    }
}

/// A place in line, given up when dropped.
struct Standing<'a> {
    limits: &'a Limits,
    place: Arc<Place>,
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        if self.place.is_its_turn.load(SeqCst) {
            return;
        }
        let mut line = self.limits.line();
        let before = line.waiting.iter().map(VecDeque::len).sum::<usize>();
        for waiting in &mut line.waiting {
            waiting.retain(|place| !Arc::ptr_eq(place, &self.place));
        }
        let after = line.waiting.iter().map(VecDeque::len).sum::<usize>();
        self.limits.waiting.fetch_sub(before - after, SeqCst);
        line.tell_heads();
    }
}

impl Limits {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            is_on: AtomicBool::new(false),
            buckets: ArcSwap::default(),
            waiting: AtomicUsize::new(0),
            line: Mutex::default(),
        }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        lock(&self.line)
    }

    fn now(&self) -> Ticks {
        ticks(self.clock.now())
    }

    /// What they are.
    pub(super) fn rates(&self) -> RateLimits {
        self.buckets.load().rates.clone()
    }

    /// How many requests wait for them.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }

    /// Sets the limits, also for waiting requests.
    pub(super) fn set(&self, rates: RateLimits) {
        let mut line = self.line();
        let is_on = !rates.are_none();
        self.buckets.store(Arc::new(Buckets::new(rates)));
        self.is_on.store(is_on, SeqCst);
        self.advance(&mut line);
        line.tell_heads();
    }

    fn advance(&self, line: &mut Line) {
        let began = line.advance(&self.buckets.load(), self.now());
        self.waiting.fetch_sub(began, SeqCst);
    }

    /// Whether there are any.
    #[inline]
    pub(super) fn are_on(&self) -> bool {
        self.is_on.load(SeqCst)
    }

    /// Waits until a request that moves this many bytes may begin.
    pub(super) async fn pass(&self, direction: Direction, bytes: u64) {
        if self.are_on() {
            self.pass_limited(Cost { direction, bytes }).await;
        }
    }

    async fn pass_limited(&self, cost: Cost) {
        if self.waiting.load(SeqCst) == 0 && self.buckets.load().take(cost, self.now()) {
            return;
        }
        let place = Arc::new(Place { cost, is_its_turn: AtomicBool::new(false), news: Event::new() });
        self.waiting.fetch_add(1, SeqCst);
        self.line().waiting[cost.direction as usize].push_back(place.clone());
        let standing = Standing { limits: self, place };
        let place = &standing.place;
        loop {
            let news = place.news.listen();
            let alarm = {
                let mut line = self.line();
                self.advance(&mut line);
                let is_head = line.waiting[cost.direction as usize]
                    .front()
                    .is_some_and(|head| Arc::ptr_eq(head, place));
                is_head.then(|| self.buckets.load().ready_at(cost))
            };
            if place.is_its_turn.load(SeqCst) {
                return;
            }
            match alarm {
                // Only the head of a line sleeps; the others are woken when they become the head.
                Some(at) => {
                    let wait = duration(at.saturating_sub(self.now()));
                    or(news, self.clock.sleep(wait)).await;
                }
                None => news.await,
            }
        }
    }
}

#[cfg(test)]
mod tests;
