//! A request at the disk: begun, polled to its end, and handed over with the ticket that says whom it belongs to.
//!
//! Most requests are one call of the disk, whose future is held as it is; only reads that look for holes, cache
//! requests, block status and what is long need a future of their own.
//!
//! **Long.** With extended headers 32 bytes may ask for the whole export: to be zeroed, trimmed, or brought near. Such a
//! request is done piece by piece, takes no more memory than a short one, gives way to others after each piece, and
//! stops when nobody waits for it any more. What was done of it by then stays, as with any request that fails.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_lite::future::yield_now;
use vellum_core::{
    BlockSize, Buffer, Error, ErrorKind, GuestSpan, LocalFuture, Result, SharedDisk, WriteFlags, ZeroFlags,
};

use super::limits::memory_of;
use super::reply::Label;
use super::request::Request;
use super::sparse::{self, Outlook, Parts};
use super::status::{self, Question, Statuses};
use super::terms::{Headers, Terms};

/// A cache request reads this much at a time.
const CACHE_BYTES: u64 = 1 << 20;

/// Zeros and trims that are longer are done in pieces of this size and alignment: no cluster of any format is larger.
const LONG: BlockSize = BlockSize::from_shift(30);

/// What is needed to answer a request that was begun.
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

impl<'a> Running<'a> {
    /// Begins a request; `payload` is as long as a write's span, and empty for all others.
    pub(super) fn new(
        disk: &'a SharedDisk,
        terms: &'a Terms,
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
            Request::Trim { span, fua } if span.len() > LONG.bytes() => {
                let trim = move |piece| disk.discard(piece, WriteFlags { fua: false });
                Work::Done(Box::pin(in_pieces(disk, span, fua, outlook, trim)))
            }
            Request::Trim { span, fua } => Work::Done(disk.discard(span, WriteFlags { fua })),
            Request::Zero { span, flags } if span.len() > LONG.bytes() => {
                let zero = move |piece| disk.write_zeroes(piece, ZeroFlags { fua: false, ..flags });
                Work::Done(Box::pin(in_pieces(disk, span, flags.fua, outlook, zero)))
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
                let question = Question { span, runs_max, block, contexts: &terms.contexts };
                Work::Status(Box::pin(status::block_status(disk, question, outlook)))
            }
            Request::Disconnect => unreachable!("a goodbye is no work"),
        };
        Self { ticket: Some(ticket), work }
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

/// Reads the run and throws it away, so that what lies below or far away is near when it is wanted: a base that is
/// copied on read, a cache, the host's page cache. One piece at a time, as nobody waits for the bytes.
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
            return Err(Error::corrupt("the disk gave fewer bytes than it was asked for"));
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

/// Does something with each piece of a long run, and makes it durable at the end, if that is wanted.
async fn in_pieces<'a>(
    disk: &SharedDisk,
    span: GuestSpan,
    fua: bool,
    outlook: &Outlook,
    act: impl Fn(GuestSpan) -> LocalFuture<'a, Result<()>>,
) -> Result<()> {
    for piece in LONG.pieces_of(span) {
        act(piece).await?;
        yield_now().await;
        stop_if_left(outlook)?;
    }
    if fua { disk.flush().await } else { Ok(()) }
}

pub(super) fn stop_if_left(outlook: &Outlook) -> Result<()> {
    if outlook.is_left() {
        return Err(Error::new(ErrorKind::Closed, "nobody waits for the answer any more"));
    }
    Ok(())
}
