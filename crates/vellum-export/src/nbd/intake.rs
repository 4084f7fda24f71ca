//! Input: bytes from the stream become requests with their payloads.
//!
//! ```text
//!   inbox    │ used │ header │ payload │ header │ head│           │     one read brings many requests
//!                   ▲ start                           ▲ end
//!
//!   payload  │ aligned buffer of its own ░░░░░░░░│                      small ones are copied out of the inbox;
//!   read     └──────────────────────────── here ─┴─ then inbox ──►      of large ones only the head: the rest is
//!                                                                       read in place, with what follows in the inbox
//! ```
//!
//! 1. A request is taken from the inbox only when the [`Ledger`] admits it; until then nothing more is read.
//! 2. The memory for a payload is charged before it is allocated. It is allocated at the size that the header
//!    gives, and only after the header was found valid.
//! 3. The payload of a refused write is read from the stream and discarded before the refusal is handed over.
//! 4. A payload that is incomplete is never given to the disk.
//!
//! It does no I/O by itself except for the one read that it keeps pending.

use std::task::{Context, Poll};

use vellum_core::{Buffer, ByteStream, LocalFuture, Result};

use super::ledger::{Holding, Ledger};
use super::reply::Label;
use super::request::{Refusal, Request, check};
use super::terms::{Headers, Terms};
use super::wire::{EXTENDED_HEADER_BYTES, REQUEST_HEADER_BYTES, RequestHeader};
use super::work::{Ticket, memory_for};

/// A payload of which so much is still to come is large.
const LARGE_BYTES: usize = 16 << 10;

/// What follows a large payload is probably another one. So a read that completes one brings no more than a
/// head of what follows; the rest of the next payload can then be read in place too, instead of being copied
/// out of the inbox.
const HEAD_BYTES: usize = 4096;

/// What is to be done next.
pub(super) enum Next {
    /// A request with its payload.
    Begin(Ticket, Buffer),
    /// A request that is to be refused; it has an entry in the ledger, without memory.
    Refuse { label: Label, refusal: Refusal },
    /// Nothing before more bytes have come.
    Starved,
    /// Nothing before the ledger has room.
    Blocked,
    /// The client says goodbye.
    Goodbye,
    /// These bytes are no request.
    Broken,
}

/// The receiving side of one session.
pub(super) struct Intake<'a> {
    stream: &'a dyn ByteStream,
    /// Away while a read is going on.
    inbox: Buffer,
    /// The part of the inbox that a read was not given.
    spare: Buffer,
    start: usize,
    end: usize,
    stage: Stage,
    receiving: Option<LocalFuture<'a, Result<(Buffer, usize)>>>,
}

enum Stage {
    Header,
    /// The first `filled` bytes have come. The rest of `bytes` is away while a read is going on.
    Payload {
        ticket: Ticket,
        bytes: Buffer,
        filled: usize,
    },
    Skip {
        left: u64,
        label: Label,
        refusal: Refusal,
    },
}

impl<'a> Intake<'a> {
    /// `early` are bytes that came behind the handshake.
    pub(super) fn new(stream: &'a dyn ByteStream, receive_bytes: usize, early: &[u8]) -> Self {
        let mut inbox = Buffer::for_overwrite(receive_bytes.max(early.len()));
        inbox.copy_from(0, early);
        Self {
            stream,
            inbox,
            spare: Buffer::empty(),
            start: 0,
            end: early.len(),
            stage: Stage::Header,
            receiving: None,
        }
    }

    /// Whether the stream may end here: between two requests.
    pub(super) fn is_between_requests(&self) -> bool {
        matches!(self.stage, Stage::Header) && self.start == self.end
    }

    /// Whether a read is going on, so that the end of the stream will be noticed.
    pub(super) fn is_listening(&self) -> bool {
        self.receiving.is_some()
    }

    /// The next request, if it has come and the ledger has room for it. `size` is the disk's now.
    pub(super) fn next(&mut self, terms: &Terms, size: u64, ledger: &mut Ledger) -> Next {
        if self.receiving.is_some() {
            return Next::Starved;
        }
        match std::mem::replace(&mut self.stage, Stage::Header) {
            Stage::Header => self.next_header(terms, size, ledger),
            Stage::Payload { ticket, bytes, filled } => self.next_payload(ticket, bytes, filled),
            Stage::Skip { left, label, refusal } => self.next_skipped(left, label, refusal),
        }
    }

    fn next_header(&mut self, terms: &Terms, size: u64, ledger: &mut Ledger) -> Next {
        let unread = self.unread();
        let (header_bytes, header) = if terms.headers == Headers::Extended {
            (EXTENDED_HEADER_BYTES, unread.first_chunk().map(RequestHeader::parse_extended))
        } else {
            (REQUEST_HEADER_BYTES, unread.first_chunk().map(RequestHeader::parse))
        };
        let header = match header {
            None => return Next::Starved,
            Some(None) => return Next::Broken,
            Some(Some(header)) => header,
        };
        let label = Label { cookie: header.cookie, offset: header.offset };
        let request = match check(&header, terms, size) {
            Ok(Request::Disconnect) => return Next::Goodbye,
            Ok(request) => request,
            Err(refusal) => {
                if !ledger.open(0) {
                    return Next::Blocked;
                }
                self.start += header_bytes;
                let left = if refusal.is_abuse { 0 } else { refusal.payload };
                return self.next_skipped(left, label, refusal);
            }
        };
        let memory = ledger.charge(memory_for(&request));
        if !ledger.open(memory) {
            return Next::Blocked;
        }
        self.start += header_bytes;
        let ticket = Ticket { label, request, memory };
        let Request::Write { span, .. } = request else {
            return Next::Begin(ticket, Buffer::empty());
        };
        let len = usize::try_from(span.len()).expect("a payload fits the address space");
        if let Some(payload) = self.unread().get(..len) {
            let payload = Buffer::copy_of(payload);
            self.start += len;
            return Next::Begin(ticket, payload);
        }
        self.next_payload(ticket, Buffer::for_overwrite(len), 0)
    }

    fn next_payload(&mut self, ticket: Ticket, mut bytes: Buffer, mut filled: usize) -> Next {
        let come = self.unread();
        let part = come.len().min(bytes.len() - filled);
        bytes.copy_from(filled, &come[..part]);
        self.start += part;
        filled += part;
        if filled == bytes.len() {
            return Next::Begin(ticket, bytes);
        }
        self.stage = Stage::Payload { ticket, bytes, filled };
        Next::Starved
    }

    fn next_skipped(&mut self, left: u64, label: Label, refusal: Refusal) -> Next {
        let part = left.min(self.unread().len() as u64);
        self.start += usize::try_from(part).expect("no more than has come");
        if left == part {
            return Next::Refuse { label, refusal };
        }
        self.stage = Stage::Skip { left: left - part, label, refusal };
        Next::Starved
    }

    fn unread(&self) -> &[u8] {
        &self.inbox.slice()[self.start..self.end]
    }

    /// Reads more, once everything that has arrived was taken. Returns the number of bytes; zero is the end.
    pub(super) fn poll_receive(&mut self, context: &mut Context<'_>) -> Poll<Result<usize>> {
        let mut receiving = match self.receiving.take() {
            Some(receiving) => receiving,
            None => self.stream.read(self.target()),
        };
        let Poll::Ready(received) = receiving.as_mut().poll(context) else {
            self.receiving = Some(receiving);
            return Poll::Pending;
        };
        let (buffer, count) = match received {
            Ok(received) => received,
            Err(error) => return Poll::Ready(Err(error)),
        };
        assert!(count <= buffer.len(), "a stream gives no more bytes than it was given room for");
        self.put_back(buffer, count);
        Poll::Ready(Ok(count))
    }

    /// Where the next bytes belong: behind those of a header that is not whole, or into what a payload still
    /// lacks and then into the inbox.
    fn target(&mut self) -> Buffer {
        if let Stage::Payload { bytes, filled, .. } = &mut self.stage {
            debug_assert!(self.start == self.end, "the payload took what had come");
            (self.start, self.end) = (0, 0);
            let mut target = bytes.split_off(*filled);
            if target.len() >= LARGE_BYTES {
                self.spare = self.inbox.split_off(HEAD_BYTES);
            }
            target.append(std::mem::take(&mut self.inbox));
            return target;
        }
        self.inbox.slice_mut().copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        self.inbox.split_off(self.end)
    }

    fn put_back(&mut self, mut buffer: Buffer, count: usize) {
        if let Stage::Payload { ticket, bytes, filled } = &mut self.stage
            && let Request::Write { span, .. } = ticket.request
        {
            let lacking = usize::try_from(span.len()).expect("a payload fits the address space") - *filled;
            self.inbox = buffer.split_off(lacking);
            self.inbox.append(std::mem::take(&mut self.spare));
            bytes.append(buffer);
            *filled += count.min(lacking);
            self.end = count.saturating_sub(lacking);
        } else {
            self.inbox.append(buffer);
            self.end += count;
        }
    }

    /// Discards what has arrived only in part.
    pub(super) fn abandon(&mut self, ledger: &mut Ledger) {
        match std::mem::replace(&mut self.stage, Stage::Header) {
            Stage::Header => {}
            Stage::Payload { ticket, .. } => ledger.settle(Holding { requests: 1, memory: ticket.memory }),
            Stage::Skip { .. } => ledger.settle(Holding { requests: 1, memory: 0 }),
        }
        self.receiving = None;
        self.inbox = Buffer::empty();
        self.spare = Buffer::empty();
        (self.start, self.end) = (0, 0);
    }
}
