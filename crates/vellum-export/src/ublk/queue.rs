//! One queue, on one worker: each tag fetches a request, executes it, and answers it with the next fetch.
//!
//! ```text
//!   tag 0   next ─► row ─► the disk ─► next(answer) ─► …       until the kernel says that there are no more
//!   tag 1   next ─► …
//! ```
//!
//! 1. A queue is one future on one worker and shares nothing with other queues but the disk and its
//!    [`Target`].
//! 2. A queue ends when all its tags were aborted, which the kernel does when the device was stopped and all
//!    requests were answered.
//! 3. When the server is cut, new requests are answered with EIO and are not begun, so that the kernel can
//!    finish; those that were begun are waited for.
//! 4. No tag monopolises a worker: it returns to the kernel after each request.
//! 5. A device that is left to its next server ([`Target::leave`]) begins no more requests, and does not
//!    answer those that still arrive: the kernel hands them to the next server. Requests that were begun are
//!    answered.
//! 6. An answer for which the kernel has no memory is submitted again until it is accepted. A request that is
//!    never answered would block its users, and the program that stops the device, forever.

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use event_listener::Event;
use vellum_core::{
    Buffer, Error, ErrorKind, LocalFuture, Result, SharedDisk, WriteFlags, ZeroFlags, lock,
    witnessed_from_now,
};

use super::facts::Facts;
use super::request::{Request, Row, Terms};
use crate::flight::Flight;
use crate::shutdown::Shutdown;

/// The kernel, as a queue sees it.
pub trait Kernel {
    /// Tells what became of the tag's last request, if there was one, and waits for the next.
    fn next(&self, tag: u16, answer: Option<i32>) -> impl Future<Output = Result<Told>>;

    /// Waits a little before something is tried again.
    fn pause(&self) -> impl Future<Output = ()>;

    /// The tag's request.
    fn row(&self, tag: u16) -> Row;

    /// The data of a write.
    fn take(&self, tag: u16, len: usize) -> Result<Buffer>;

    /// Hands over the data of a read.
    fn give(&self, tag: u16, data: &Buffer) -> Result<()>;
}

/// What a queue hears.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// There is a request.
    Request,
    /// There are no more.
    NoMore,
    /// The kernel had no memory for it; nothing was submitted, and the caller must submit it again.
    NotNow,
}

/// What all queues of a device share.
pub struct Target {
    /// As the kernel uses it: all queues are one user, to which lost writes are reported once.
    disk: SharedDisk,
    sectors: AtomicU64,
    read_only: bool,
    write_through: bool,
    /// What kept a queue from hearing of requests.
    broken: Mutex<Option<Error>>,
    /// Requests that were begun and not answered yet.
    begun: AtomicUsize,
    is_left: AtomicBool,
    /// Something broke, or the last request was answered of a device that is left.
    changed: Event,
}

/// A request that was begun, until it is answered.
struct Begun<'a>(&'a Target);

impl Target {
    /// The disk, and the parameters that the kernel was given.
    pub fn new(disk: SharedDisk, facts: &Facts) -> Self {
        let sectors = AtomicU64::new(facts.sectors);
        let Facts { read_only, write_through, .. } = *facts;
        Self {
            disk: witnessed_from_now(disk),
            sectors,
            read_only,
            write_through,
            broken: Mutex::default(),
            begun: AtomicUsize::new(0),
            is_left: AtomicBool::new(false),
            changed: Event::new(),
        }
    }

    /// Records the current size of the disk; true if it has changed.
    pub fn resize(&self, sectors: u64) -> bool {
        self.sectors.swap(sectors, Ordering::Relaxed) != sectors
    }

    /// What kept a queue from hearing of requests, if anything did.
    pub fn broken(&self) -> Option<Error> {
        lock(&self.broken).clone()
    }

    /// Completes when something keeps a queue from hearing of requests.
    pub async fn breaks_down(&self) -> Error {
        loop {
            let listener = self.changed.listen();
            if let Some(error) = self.broken() {
                return error;
            }
            listener.await;
        }
    }

    /// From here on nothing is begun: requests that arrive wait for the next server. Completes when those
    /// that were begun have been answered.
    pub async fn leave(&self) {
        self.is_left.store(true, Ordering::SeqCst);
        loop {
            let listener = self.changed.listen();
            if self.begun.load(Ordering::SeqCst) == 0 {
                return;
            }
            listener.await;
        }
    }

    /// A request may be begun, unless the device is left: either this call sees that it is, or `leave` sees
    /// the request.
    fn begin(&self) -> Option<Begun<'_>> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        let begun = Begun(self);
        (!self.is_left.load(Ordering::SeqCst)).then_some(begun)
    }

    fn terms(&self) -> Terms {
        let sectors = self.sectors.load(Ordering::Relaxed);
        Terms { sectors, read_only: self.read_only, write_through: self.write_through }
    }

    /// It is not served as it should be any more.
    pub fn break_down(&self, error: Error) {
        tracing::warn!("a queue of a ublk device is no longer served: {}", error.chain());
        lock(&self.broken).get_or_insert(error);
        self.changed.notify(usize::MAX);
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        let is_last = self.0.begun.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last && self.0.is_left.load(Ordering::SeqCst) {
            self.0.changed.notify(usize::MAX);
        }
    }
}

/// Serves a queue of this many tags to its end. By the time it is first pending, all tags have been
/// submitted.
pub async fn serve_queue<K: Kernel + 'static>(
    kernel: K,
    depth: u16,
    target: Arc<Target>,
    shutdown: Shutdown,
) {
    let kernel = Rc::new(kernel);
    let mut flight: Flight<LocalFuture<'static, Result<()>>> = Flight::new(usize::from(depth));
    let note = |ended: Result<()>| {
        if let Err(error) = ended {
            target.break_down(error);
        }
    };
    for tag in 0..depth {
        let serving = serve_tag(kernel.clone(), tag, target.clone(), shutdown.clone());
        if let Some(ended) = flight.start(Box::pin(serving)) {
            note(ended);
        }
    }
    poll_fn(|context| {
        flight.poll_woken(context, note);
        if flight.running() == 0 { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

async fn serve_tag<K: Kernel>(
    kernel: Rc<K>,
    tag: u16,
    target: Arc<Target>,
    shutdown: Shutdown,
) -> Result<()> {
    let mut answer = None;
    loop {
        match kernel.next(tag, answer).await? {
            Told::Request => {}
            Told::NoMore => return Ok(()),
            Told::NotNow => {
                kernel.pause().await;
                continue;
            }
        }
        let Some(begun) = target.begin() else {
            // It stays with this tag, unanswered, until the kernel takes it back from a server that has
            // ended.
            return std::future::pending().await;
        };
        let done = match Request::parse(&kernel.row(tag), &target.terms()) {
            Ok(_) if shutdown.is_cut() => Err(libc::EIO),
            Ok(request) => perform(request, &*kernel, tag, &target.disk).await,
            Err(errno) => Err(errno),
        };
        answer = Some(match done {
            Ok(bytes) => i32::try_from(bytes).expect("requests are small"),
            Err(errno) => -errno,
        });
        drop(begun);
    }
}

/// Returns how many bytes were moved.
async fn perform<K: Kernel>(request: Request, kernel: &K, tag: u16, disk: &SharedDisk) -> Result<usize, i32> {
    match request {
        Request::Read { at, len } => {
            let data = disk.read(at, Buffer::for_overwrite(len)).await.map_err(errno_of)?;
            kernel.give(tag, &data).map_err(errno_of)?;
            Ok(len)
        }
        Request::Write { at, len, fua } => {
            let data = kernel.take(tag, len).map_err(errno_of)?;
            disk.write(at, data, WriteFlags { fua }).await.map_err(errno_of)?;
            Ok(len)
        }
        Request::Flush => disk.flush().await.map(|()| 0).map_err(errno_of),
        Request::Discard { span, fua } => {
            disk.discard(span, WriteFlags { fua }).await.map(|()| 0).map_err(errno_of)
        }
        Request::WriteZeroes { span, fua, may_unmap } => {
            let flags = ZeroFlags { fua, may_unmap, fast_only: false };
            disk.write_zeroes(span, flags).await.map(|()| 0).map_err(errno_of)
        }
    }
}

/// The kernel gets the error code; the log gets the cause.
#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn errno_of(error: Error) -> i32 {
    tracing::debug!("a request over ublk failed: {}", error.chain());
    match error.kind() {
        ErrorKind::NoSpace => libc::ENOSPC,
        ErrorKind::Unsupported => libc::EOPNOTSUPP,
        _ => libc::EIO,
    }
}

#[cfg(test)]
mod tests;
