//! The transmission: requests in, replies out, many at a time, in one future.
//!
//! ```text
//!              ┌───────────── one pass ─────────────┐
//!   stream ──► take_in ──► begin ──► flight ──► gather ──► replies ──► send ──► stream
//!                 ▲                 (the disk)                │
//!                 └───────────── ledger: room again ◄─────────┘ sent
//! ```
//!
//! A pass begins every request that has arrived and gathers every one that has completed; then all replies
//! that are ready leave in one write. During that write more of them gather for the next: the busier the
//! session, the more requests share one system call.
//!
//! 1. Requests run concurrently and are answered as they complete. A client that needs an order waits for
//!    replies.
//! 2. **Flush.** It is submitted to the disk when it is parsed. A write whose reply was sent before the
//!    client sent the flush had returned from the disk before that, on whichever connection, as all of them
//!    use the one disk; so contract 1 of the disk makes the flush cover it. That is what
//!    `NBD_FLAG_CAN_MULTI_CONN` promises. A write that is still running when the flush comes may or may not
//!    be covered, as the protocol allows ("Ordering of messages and writes").
//! 3. **Back-pressure.** Each request is opened in the ledger when it is taken in, and settled when its reply
//!    has left. The server stops reading from a client that does not read.
//! 4. **The end.** However it comes, requests that were begun are polled to their end. If the peer still
//!    listens they are answered; if it is gone their results are dropped, and long requests stop at their
//!    next piece (`work`). Then the ledger is clear.
//! 5. After a drain was requested no request is begun. One that had arrived but was not begun stays
//!    unanswered, and the client, finding the connection closed, sends it again elsewhere.
//!
//! 6. A peer that takes no byte for a minute while there is something to send, or sends none in the middle of
//!    a request, is given up; so is one that is found gone while it is not listened to. Its seat is free as
//!    soon as the session has stopped taking in requests.
//!
//! Source: NBD protocol, "Transmission", "Terminating the transmission phase".

use std::future::poll_fn;
use std::task::{Context, Poll};

use vellum_core::{ByteStream, Clock, Error, LocalFuture, Result, SharedDisk};

use super::budget::Share;
use super::clients::Client;
use super::ending::Ending;
use super::intake::{Intake, Next};
use super::ledger::{Holding, Ledger};
use super::limits::SessionLimits;
use super::reply::{Label, Replies, sentence_of};
use super::request::Request;
use super::sparse::{Outlook, Part};
use super::stall::{Progress, Stall, Verdict};
use super::status::SharedMarks;
use super::terms::Terms;
use super::wire::Errno;
use super::work::{Outcome, Running, Ticket};
use crate::flight::Flight;
use crate::shutdown::{Stage, Watch};

/// After this many passes in a row the worker's other tasks get their turn.
const PASSES_MAX: usize = 16;

/// With this much to send, sending begins before more requests do, so that the peer has something to process
/// meanwhile.
const EAGER_BYTES: usize = 256 << 10;

/// The parts of a session that the transmission uses.
pub(super) struct Ground<'a> {
    pub(super) client: &'a Client,
    pub(super) clock: &'a dyn Clock,
    pub(super) stream: &'a dyn ByteStream,
    /// As this session uses it.
    pub(super) disk: &'a SharedDisk,
    pub(super) terms: &'a Terms,
    pub(super) marks: &'a [SharedMarks],
    pub(super) limits: &'a SessionLimits,
}

/// Serves requests until the client leaves or is disconnected, or a shutdown is requested.
pub(super) async fn transmit(ground: Ground<'_>, mut watches: [Watch<'_>; 4], early: &[u8]) -> Ending {
    let Ground { client, clock, stream, disk, terms, marks, limits } = ground;
    let outlook = Outlook::new();
    let mut session = Session {
        client,
        stream,
        disk,
        terms,
        marks,
        outlook: &outlook,
        intake: Intake::new(stream, limits.receive_bytes, early),
        flight: Flight::new(limits.requests_max),
        books: Books {
            replies: Replies::new(terms.headers),
            ledger: Ledger::new(limits.requests_max, limits.memory_bytes_max, Share::of(client.budget())),
            encoded: Holding::default(),
            peer_is_gone: false,
        },
        sending: None,
        ending: None,
        has_sent_close: false,
        stall: Stall::new(clock),
        received: 0,
    };
    let ending = poll_fn(|context| {
        let stage = watches.iter_mut().map(|watch| watch.poll_stage(context)).max();
        session.obey(stage.unwrap_or_default());
        session.poll(context)
    })
    .await;
    assert!(session.books.ledger.is_clear(), "every request was answered once: {:?}", session.books.ledger);
    ending
}

struct Session<'a> {
    client: &'a Client,
    stream: &'a dyn ByteStream,
    disk: &'a SharedDisk,
    terms: &'a Terms,
    marks: &'a [SharedMarks],
    outlook: &'a Outlook,
    intake: Intake<'a>,
    flight: Flight<Running<'a>>,
    books: Books,
    /// A write of replies that is going on, and what it settles.
    sending: Option<(LocalFuture<'a, Result<()>>, Holding)>,
    /// Why nothing more is taken in.
    ending: Option<Ending>,
    /// The closing message of the stream was sent.
    has_sent_close: bool,
    /// Checks whether the peer is still there.
    stall: Stall<'a>,
    /// How often bytes came.
    received: u64,
}

/// The replies and their accounts.
struct Books {
    replies: Replies,
    ledger: Ledger,
    /// What the replies that are ready will settle when they have left.
    encoded: Holding,
    /// Replies will no longer be read.
    peer_is_gone: bool,
}

impl Session<'_> {
    fn obey(&mut self, stage: Stage) {
        match stage {
            Stage::Serving => {}
            Stage::Draining => self.end(Ending::Drained),
            Stage::Cut if self.books.peer_is_gone => {}
            Stage::Cut => {
                self.end(Ending::Cut);
                self.ending = Some(Ending::Cut);
                self.lose_peer();
            }
        }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ending> {
        self.flight.begin_turn();
        for _ in 0..PASSES_MAX {
            let books = &mut self.books;
            let gathered = self.flight.poll_woken(context, |(ticket, outcome)| books.answer(ticket, outcome));
            let taken = self.take_in(context);
            let sent = self.send(context);
            let is_done =
                self.flight.running() == 0 && self.sending.is_none() && self.books.replies.is_empty();
            if is_done && self.ending.is_some() && !self.books.peer_is_gone && !self.has_sent_close {
                self.has_sent_close = true;
                self.sending = Some((self.stream.send_close(), Holding::default()));
                continue;
            }
            if is_done && let Some(ending) = self.ending.take() {
                self.stream.shutdown();
                return Poll::Ready(ending);
            }
            if gathered > 0 || taken || sent || self.books.ledger.poll_freed(context) {
                continue;
            }
            if !self.has_lost_peer(context) {
                return Poll::Pending;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Checks, when it is time, whether the peer makes progress. Returns whether it has been given up now.
    fn has_lost_peer(&mut self, context: &Context<'_>) -> bool {
        if self.books.peer_is_gone {
            return false;
        }
        let is_sending = self.sending.is_some();
        let is_within = self.intake.is_listening() && !self.intake.is_between_requests();
        let is_deaf = self.ending.is_none() && !self.intake.is_listening();
        let (stream, received) = (self.stream, self.received);
        let progress = || Progress {
            sent: stream.sent().filter(|_| is_sending),
            received: is_within.then_some(received),
        };
        let why = match self.stall.poll(context, is_sending || is_within || is_deaf, progress) {
            Verdict::Fine => return false,
            Verdict::Look if !stream.is_deserted() => return false,
            Verdict::Look => Ending::Hangup,
            Verdict::Stuck => {
                Ending::Refused("it neither sent nor accepted a byte for a minute in the middle of a request")
            }
        };
        self.end(why);
        self.lose_peer();
        true
    }

    /// Begins what has come, and reads once more. Tells whether anything happened.
    fn take_in(&mut self, context: &mut Context<'_>) -> bool {
        let mut happened = false;
        let mut may_read = true;
        while self.ending.is_none() {
            let size = self.disk.geometry().size;
            match self.intake.next(self.terms, size, &mut self.books.ledger) {
                Next::Begin(ticket, payload) => {
                    happened = true;
                    let running =
                        Running::new(self.disk, self.terms, self.marks, self.outlook, ticket, payload);
                    if running.is_long() {
                        self.flight.start_long(running);
                    } else if let Some((ticket, outcome)) = self.flight.start(running) {
                        self.books.answer(ticket, outcome);
                    }
                    if self.sending.is_none() && self.books.replies.len() >= EAGER_BYTES {
                        break;
                    }
                }
                Next::Refuse { label, refusal } => {
                    happened = true;
                    self.books.replies.failed(label, refusal.errno, refusal.message);
                    self.books.encoded.requests += 1;
                    if refusal.is_abuse {
                        self.end(Ending::Violation("a payload too large to wait for"));
                    }
                }
                Next::Starved if !may_read => break,
                Next::Starved => match self.intake.poll_receive(context) {
                    Poll::Pending => break,
                    Poll::Ready(received) => {
                        happened = true;
                        // Once: first what has come is answered.
                        may_read = false;
                        self.received(received);
                    }
                },
                Next::Blocked => break,
                Next::Goodbye => self.end(Ending::Goodbye),
                Next::Broken => self.end(Ending::Violation("a request without its magic")),
            }
        }
        happened
    }

    fn received(&mut self, received: Result<usize>) {
        match received {
            Ok(0) => {
                let ending = match self.intake.is_between_requests() {
                    true => Ending::Hangup,
                    false => Ending::Violation("the stream ended within a request"),
                };
                self.end(ending);
                // Short requests complete as usual and are answered; the long ones are abandoned.
                self.outlook.leave();
            }
            Ok(_) => self.received += 1,
            Err(error) => {
                self.end(Ending::Failed(error));
                self.lose_peer();
            }
        }
    }

    /// Sends what is ready. Tells whether anything was handed to the stream whole.
    fn send(&mut self, context: &mut Context<'_>) -> bool {
        if self.sending.is_none() && !self.books.replies.is_empty() {
            let settles = std::mem::take(&mut self.books.encoded);
            self.sending = Some((self.stream.write_all(self.books.replies.take()), settles));
        }
        let Some((write, settles)) = &mut self.sending else { return false };
        let Poll::Ready(written) = write.as_mut().poll(context) else { return false };
        self.books.ledger.settle(*settles);
        self.sending = None;
        if let Err(error) = written {
            self.end(Ending::Failed(error));
            self.lose_peer();
        }
        true
    }

    /// Takes in nothing more. The first reason is the one that is reported.
    fn end(&mut self, ending: Ending) {
        if self.ending.is_none() {
            self.client.leave();
            self.intake.abandon(&mut self.books.ledger);
            self.ending = Some(ending);
        }
    }

    /// Sends nothing more.
    fn lose_peer(&mut self) {
        if self.books.peer_is_gone {
            return;
        }
        self.books.peer_is_gone = true;
        self.outlook.leave();
        if let Some((_, settles)) = self.sending.take() {
            self.books.ledger.settle(settles);
        }
        drop(self.books.replies.take());
        self.books.ledger.settle(std::mem::take(&mut self.books.encoded));
        self.stream.shutdown();
    }
}

impl Books {
    /// Encodes the reply to a request that has completed, if the peer is still there to read it.
    fn answer(&mut self, ticket: Ticket, outcome: Outcome) {
        let mut holding = Holding { requests: 1, memory: ticket.memory };
        if let Request::Write { .. } | Request::Cache { .. } = ticket.request {
            // The disk has let go of the payload.
            self.ledger.release(holding.memory);
            holding.memory = 0;
        }
        if self.peer_is_gone {
            return self.ledger.settle(holding);
        }
        self.encoded.requests += holding.requests;
        self.encoded.memory += holding.memory;
        self.encode(ticket.label, ticket.request, outcome);
    }

    fn encode(&mut self, label: Label, request: Request, outcome: Outcome) {
        let error = match (outcome, request) {
            (Outcome::Done(Ok(())), _) => return self.replies.done(label),
            (Outcome::Status(Ok(answers)), _) => return self.replies.status(label, &answers),
            (Outcome::Parts(parts), _) => {
                for part in &parts {
                    if let Part::Failed { at, error } = part {
                        tracing::debug!(?request, %at, error = error.chain(), "a part of a read failed");
                    }
                }
                return self.replies.parts(label, parts);
            }
            (Outcome::Bytes(Ok(bytes)), Request::Read { span, whole })
                if bytes.len() as u64 == span.len() =>
            {
                return self.replies.read(label, span, whole, bytes);
            }
            (Outcome::Bytes(Ok(_)), _) => Error::corrupt("the disk returned fewer bytes than requested"),
            (Outcome::Done(Err(error)) | Outcome::Status(Err(error)) | Outcome::Bytes(Err(error)), _) => {
                error
            }
        };
        tracing::debug!(?request, error = error.chain(), "a request failed");
        let had_to_be_fast = matches!(request, Request::Zero { flags, .. } if flags.fast_only);
        let errno = Errno::of(error.kind(), had_to_be_fast);
        self.replies.failed(label, errno, &sentence_of(&error));
    }
}
