//! A request at the disk: begun, polled to its end, and returned with the ticket that says which reply it
//! belongs to.
//!
//! Most requests are one call of the disk, whose future is held as it is; only reads that look for holes,
//! cache requests, block status and long requests need a future of their own.
//!
//! **Long.** With extended headers 32 bytes may ask for the whole export to be zeroed, trimmed, or
//! prefetched. Such a request is executed slice by slice (`slices`), takes no more memory than a short one,
//! yields after each slice, and stops when its result is no longer wanted. What was done by then stays, as
//! with any request that fails.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_lite::future::yield_now;
use vellum_core::losses::lost;
use vellum_core::{Buffer, Error, GuestSpan, LocalFuture, Result, SharedDisk, WriteFlags, ZeroFlags};

use super::limits::memory_of;
use super::reply::Label;
use super::request::Request;
use super::sparse::{self, Outlook, Parts, stop_if_left};
use super::status::{self, Question, SharedMarks, Statuses};
use super::terms::{Headers, Terms};
use crate::slices::{SLICE, in_slices};

/// A cache request reads this much at a time.
const CACHE_BYTES: u64 = 1 << 20;

/// A request about more than this, other than a read or a write, waits for its turn among the long ones of
/// its session.
const SHORT_MAX: u64 = 1 << 20;

/// What is needed to answer a request in flight.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) label: Label,
    pub(super) request: Request,
    /// What the ledger has it down for.
    pub(super) memory: usize,
}

/// How a request ended.
pub(super) enum Outcome {
    Bytes(Result<Buffer>),
    Parts(Parts),
    Done(Result<()>),
    Status(Result<Statuses>),
}

/// A request at the disk.
pub(super) struct Running<'a> {
    ticket: Option<Ticket>,
    work: Work<'a>,
}

enum Work<'a> {
    Bytes(LocalFuture<'a, Result<Buffer>>),
    Parts(LocalFuture<'a, Parts>),
    Done(LocalFuture<'a, Result<()>>),
    Status(LocalFuture<'a, Result<Statuses>>),
}

/// The memory that a request holds until its reply has left; that of a write only until it is written.
pub(super) fn memory_for(request: &Request) -> usize {
    match request {
        Request::Read { span, .. } | Request::Write { span, .. } => memory_of(span.len()),
        Request::Cache { span } => memory_of(span.len().min(CACHE_BYTES)),
        Request::Status { .. } => status::MEMORY_BYTES,
        Request::Flush | Request::Trim { .. } | Request::Zero { .. } | Request::Disconnect => 0,
    }
}

/// Whether a poll of it may take a while, as the disk may do much without ever waiting.
fn is_long(request: &Request) -> bool {
    match request {
        Request::Trim { span, .. }
        | Request::Zero { span, .. }
        | Request::Cache { span }
        | Request::Status { span, .. } => span.len() > SHORT_MAX,
        Request::Read { .. } | Request::Write { .. } | Request::Flush | Request::Disconnect => false,
    }
}

impl<'a> Running<'a> {
    /// Begins a request; `payload` is as long as a write's span, and empty for all others.
    pub(super) fn new(
        disk: &'a SharedDisk,
        terms: &'a Terms,
        marks: &'a [SharedMarks],
        outlook: &'a Outlook,
        ticket: Ticket,
        payload: Buffer,
    ) -> Self {
        let work = match ticket.request {
            Request::Read { span, whole } => {
                if terms.headers.have_chunks() && !whole && span.len() >= sparse::MAP_BYTES_MIN {
                    Work::Parts(Box::pin(sparse::read(disk, span, outlook)))
                } else {
                    let len = usize::try_from(span.len()).expect("a payload fits the address space");
                    Work::Bytes(disk.read(span.start(), Buffer::for_overwrite(len)))
                }
            }
            Request::Write { span, fua } => {
                assert!(payload.len() as u64 == span.len(), "a write has the payload its header promised");
                Work::Done(disk.write(span.start(), payload, WriteFlags { fua }))
            }
            Request::Flush => Work::Done(disk.flush()),
            Request::Trim { span, fua } if span.len() > SLICE.bytes() => {
                let trim = move |piece| disk.discard(piece, WriteFlags { fua: false });
                Work::Done(Box::pin(long(disk, span, fua, outlook, trim)))
            }
            Request::Trim { span, fua } => Work::Done(disk.discard(span, WriteFlags { fua })),
            Request::Zero { span, flags } if span.len() > SLICE.bytes() => {
                let zero = move |piece| disk.write_zeroes(piece, ZeroFlags { fua: false, ..flags });
                Work::Done(Box::pin(long(disk, span, flags.fua, outlook, zero)))
            }
            Request::Zero { span, flags } => Work::Done(disk.write_zeroes(span, flags)),
            Request::Cache { span } => Work::Done(Box::pin(cache(disk, span, outlook))),
            Request::Status { span, one } => {
                let block = u64::from(terms.block_min);
                let runs_max = match terms.headers {
                    _ if one => 1,
                    Headers::Extended => status::RUNS_MAX_EXTENDED,
                    Headers::Simple | Headers::Structured => status::RUNS_MAX,
                };
                let question = Question { span, runs_max, block, contexts: &terms.contexts, marks };
                Work::Status(Box::pin(status::block_status(disk, question, outlook)))
            }
            Request::Disconnect => unreachable!("a goodbye is no work"),
        };
        Self { ticket: Some(ticket), work }
    }

    /// Whether a poll of it may take a while.
    pub(super) fn is_long(&self) -> bool {
        self.ticket.as_ref().is_some_and(|ticket| is_long(&ticket.request))
    }
}

impl Future for Running<'_> {
    type Output = (Ticket, Outcome);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = match &mut self.work {
            Work::Bytes(future) => future.as_mut().poll(context).map(Outcome::Bytes),
            Work::Parts(future) => future.as_mut().poll(context).map(Outcome::Parts),
            Work::Done(future) => future.as_mut().poll(context).map(Outcome::Done),
            Work::Status(future) => future.as_mut().poll(context).map(Outcome::Status),
        };
        outcome.map(|outcome| {
            let ticket = self.ticket.take().expect("a request ends once");
            (ticket, outcome)
        })
    }
}

/// Reads the run and discards the bytes, so that data from below or far away is near when it is wanted: in a
/// base that is copied on read, a cache, the host's page cache. One piece at a time, because no client waits
/// for the bytes.
async fn cache(disk: &SharedDisk, span: GuestSpan, outlook: &Outlook) -> Result<()> {
    let mut rest = span;
    let mut buffer = Buffer::empty();
    while !rest.is_empty() {
        let (now, later) = rest.split_at(CACHE_BYTES);
        let len = usize::try_from(now.len()).expect("at most 1 MiB");
        if buffer.len() != len {
            buffer = Buffer::for_overwrite(len);
        }
        buffer = disk.read(now.start(), buffer).await?;
        if buffer.len() != len {
            return Err(Error::corrupt("the disk returned fewer bytes than requested"));
        }
        rest = later;
        if !rest.is_empty() {
            // A disk that has it in memory would not let others have their turn.
            yield_now().await;
            stop_if_left(outlook)?;
        }
    }
    Ok(())
}

/// Does something with each slice of a long run; with `fua`, one flush at the end makes it durable. That
/// flush would not report that the first slices were lost meanwhile, if another request of the session has
/// already been notified of the loss. So this also checks whether any loss has occurred since the first
/// slice.
async fn long<'a>(
    disk: &'a SharedDisk,
    span: GuestSpan,
    fua: bool,
    outlook: &Outlook,
    act: impl Fn(GuestSpan) -> LocalFuture<'a, Result<()>>,
) -> Result<()> {
    let losses = || disk.losses().map_or(0, |losses| losses.count());
    let before = losses();
    in_slices(span, act, || stop_if_left(outlook)).await?;
    if fua {
        disk.flush_change().await?;
        if losses() != before {
            return Err(lost());
        }
    }
    Ok(())
}
