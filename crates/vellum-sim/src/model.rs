//! The seam for models of whole drives, in virtual time: how long a request takes there, and what reaches the
//! medium for it.
//!
//! ```text
//!   Drive ──submit──▶ model: queue, write cache, flushes ──▶ medium     one operation at a time, or several ways (SSD)
//!     ▲                 │                                      │
//!     └────── ended ────┴── next(): when something happens ◀───┘         Medium::counts(): what the medium did
//! ```
//!
//! A model gets each request when it arrives and reports later that it has ended, in an order of its own. It
//! is pure: its answers depend on nothing but the requests and their times, in whole nanoseconds.
//!
//! A [`Drive`](crate::Drive) asks a model through [`Delay::medium`](crate::Delay::medium), any other `Storage`
//! through [`Medium::submit`]. The models of a hard disk and an SSD are in `vellum-papers`.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Sub;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use vellum_core::lock;

use crate::operation::Request;

/// A drive that takes requests as they come and ends them in its own order.
///
/// 1. Nothing happens but in [`DriveModel::submit`] and [`DriveModel::advance`], whose times never go back.
/// 2. While a request has not ended, [`DriveModel::next`] names a time after that of the last call.
/// 3. A request that comes does not make one end earlier that came before.
pub trait DriveModel: Send {
    /// A request has come.
    fn submit(&mut self, ticket: u64, request: &Request);

    /// When something happens next if no request comes before.
    fn next(&self) -> Option<Duration>;

    /// Lets everything happen up to and with `now`; appends what has ended.
    fn advance(&mut self, now: Duration, ended: &mut Vec<u64>);

    /// What the medium has done.
    fn counts(&self) -> MediumCounts;
}

/// What a medium has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MediumCounts {
    /// Operations, after neighbours in the queue or the cache were joined.
    pub reads: u64,
    /// The same.
    pub writes: u64,
    /// What they moved.
    pub bytes_read: u64,
    /// The same.
    pub bytes_written: u64,
    /// Flushes that were carried out; a request that arrives while one runs shares the next.
    pub flushes: u64,
    /// Operations that did not begin where the last one had ended.
    pub seeks: u64,
    /// How far apart, in bytes, each operation began from the end of the one before.
    pub seek_bytes: u64,
    /// How long the medium was at work.
    pub busy: Duration,
}

impl MediumCounts {
    /// Reads and writes.
    pub fn operations(&self) -> u64 {
        self.reads + self.writes
    }

    /// The way from one operation to the next, in bytes, on average.
    pub fn average_seek_bytes(&self) -> u64 {
        self.seek_bytes / self.operations().max(1)
    }

    /// Counts one read or write of `len` bytes that began this far from the end of the last one.
    pub fn note(&mut self, is_read: bool, len: u64, distance: u64) {
        let (operations, bytes) = match is_read {
            true => (&mut self.reads, &mut self.bytes_read),
            false => (&mut self.writes, &mut self.bytes_written),
        };
        *operations += 1;
        *bytes += len;
        self.seeks += u64::from(distance > 0);
        self.seek_bytes += distance;
    }
}

impl Sub for MediumCounts {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        Self {
            reads: self.reads - earlier.reads,
            writes: self.writes - earlier.writes,
            bytes_read: self.bytes_read - earlier.bytes_read,
            bytes_written: self.bytes_written - earlier.bytes_written,
            flushes: self.flushes - earlier.flushes,
            seeks: self.seeks - earlier.seeks,
            seek_bytes: self.seek_bytes - earlier.seek_bytes,
            busy: self.busy - earlier.busy,
        }
    }
}

/// A model at work, shared by a drive and the code that asks what the medium did.
#[derive(Clone)]
pub struct Medium(Arc<Mutex<Queue>>);

struct Queue {
    model: Box<dyn DriveModel>,
    tickets: u64,
    waiting: BTreeSet<u64>,
    ended: Vec<u64>,
}

impl Medium {
    /// A model, idle.
    pub fn new(model: impl DriveModel + 'static) -> Self {
        let model = Box::new(model);
        Self(Arc::new(Mutex::new(Queue { model, tickets: 0, waiting: BTreeSet::new(), ended: Vec::new() })))
    }

    /// What the medium has done.
    pub fn counts(&self) -> MediumCounts {
        self.lock().model.counts()
    }

    /// Gives the model a request, at the time that the request names. Its ticket says when it has ended.
    pub fn submit(&self, request: &Request) -> Ticket {
        let mut queue = self.lock();
        queue.advance(request.now);
        let number = queue.tickets;
        queue.tickets += 1;
        queue.waiting.insert(number);
        queue.model.submit(number, request);
        Ticket { medium: self.clone(), number }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.0)
    }
}

impl fmt::Debug for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Medium({:?})", self.counts())
    }
}

impl Queue {
    fn advance(&mut self, now: Duration) {
        self.model.advance(now, &mut self.ended);
        for ended in self.ended.drain(..) {
            self.waiting.remove(&ended);
        }
    }
}

/// A request in a model.
pub struct Ticket {
    medium: Medium,
    number: u64,
}

impl Ticket {
    /// When to look again; `None` when the request has ended.
    pub fn look(&self, now: Duration) -> Option<Duration> {
        let mut queue = self.medium.lock();
        queue.advance(now);
        if !queue.waiting.contains(&self.number) {
            return None;
        }
        let next = queue.model.next().expect("a request that has not ended will");
        assert!(next > now, "a model that stands still never ends");
        Some(next)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.medium.lock().waiting.remove(&self.number);
    }
}
