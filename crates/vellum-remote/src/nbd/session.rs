//! One connection, from the end of the handshake to its own: requests out, replies in.
//!
//! 1. At most [`IN_FLIGHT_MAX`] requests are on the wire.
//! 2. Whatever the server sends, memory is bounded by what was asked of it: bytes go into the buffers of the
//!    requests, a status keeps at most [`RUNS_MAX`] runs, a message [`MESSAGE_BYTES_MAX`] bytes.
//! 3. A reply counts only when it is whole and agrees with its request: every byte of a read once, no byte beside
//!    it. Anything else ends the connection.
//! 4. A request that is not answered stays in `pending`, also when the session is dropped half way.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::convert::Infallible;

use vellum_core::{Buffer, ByteStream, Error, ErrorKind, Result};
use vellum_export::nbd::wire::{
    CHUNK_MAGIC, Errno, RequestHeader, SIMPLE_REPLY_MAGIC, allocation, chunk, command, command_flag,
};

use super::desk::{Answer, Ask, Desk, Job, Run};
use super::handshake::{ExportFacts, broken, printable};
use super::intake::Intake;

/// How many requests are on the wire at once.
pub(super) const IN_FLIGHT_MAX: usize = 64;
/// How many runs of one status are kept; the rest is asked for again.
const RUNS_MAX: usize = 16 << 10;
/// The longest message of an error, in bytes ("Conventions").
const MESSAGE_BYTES_MAX: usize = 4096;
/// The longest status, in bytes.
const STATUS_BYTES_MAX: u32 = 32 << 20;

/// A reply may name several errors: more than these are none.
const ERRORS_MAX: u32 = 1024;

/// A request on the wire, and what has come of its reply.
pub(super) struct Sent {
    job: Job,
    /// The ranges of a read that have come, in order, neighbours merged: offsets from its start.
    covered: Vec<(usize, usize)>,
    runs: Option<Vec<Run>>,
    failed: Option<Error>,
    /// How many chunks of errors have come.
    errors: u32,
}

impl Sent {
    fn read_len(&self) -> Option<usize> {
        match &self.job.ask {
            Ask::Read { buffer, .. } => Some(buffer.len()),
            _ => None,
        }
    }

    /// Takes note of bytes of a read; an error if they had come before or were not asked for.
    fn cover(&mut self, at: u64, len: u32) -> Result<usize> {
        let Ask::Read { at: start, buffer } = &self.job.ask else {
            return Err(broken("it sends bytes that were not asked for"));
        };
        let from = at.checked_sub(*start).and_then(|from| usize::try_from(from).ok());
        let range = from.and_then(|from| Some((from, from.checked_add(len as usize)?)));
        let Some((from, to)) = range.filter(|(_, to)| *to <= buffer.len()) else {
            return Err(broken("it sends bytes beside those that were asked for"));
        };
        if from == to {
            return Err(broken("a chunk of a read is empty"));
        }
        let index = self.covered.partition_point(|(start, _)| *start < from);
        let overlaps =
            |range: Option<&(usize, usize)>| range.is_some_and(|(start, end)| *start < to && from < *end);
        if overlaps(self.covered.get(index))
            || overlaps(index.checked_sub(1).and_then(|index| self.covered.get(index)))
        {
            return Err(broken("it sends the same bytes twice"));
        }
        self.covered.insert(index, (from, to));
        if let Some((_, end)) = self.covered.get(index + 1).filter(|(start, _)| *start == to).copied() {
            self.covered[index].1 = end;
            self.covered.remove(index + 1);
        }
        if index > 0 && self.covered[index - 1].1 == from {
            self.covered[index - 1].1 = self.covered[index].1;
            self.covered.remove(index);
        }
        Ok(from)
    }

    fn is_covered(&self) -> bool {
        self.read_len().is_none_or(|len| self.covered == [(0, len)])
    }
}

/// One connection at work.
pub(super) struct Session<'a> {
    pub(super) desk: &'a Desk,
    pub(super) stream: &'a dyn ByteStream,
    pub(super) facts: &'a ExportFacts,
    pub(super) pending: RefCell<BTreeMap<u64, Sent>>,
    /// How many headers of replies and pieces of payload have come: the sign that the server is alive.
    pub(super) heard: Cell<u64>,
    /// How many requests were answered.
    pub(super) answered: Cell<u64>,
}

impl<'a> Session<'a> {
    pub(super) fn new(desk: &'a Desk, stream: &'a dyn ByteStream, facts: &'a ExportFacts) -> Self {
        Self { desk, stream, facts, pending: RefCell::default(), heard: Cell::new(0), answered: Cell::new(0) }
    }

    /// The requests that were not answered, in the order in which they were sent.
    pub(super) fn into_left(self) -> Vec<Job> {
        self.pending.into_inner().into_values().map(|sent| sent.job).collect()
    }

    /// Sends requests until no more will come.
    pub(super) async fn send(&self) -> Result<()> {
        let mut cookie = 0;
        loop {
            let listener = self.desk.listen();
            let has_room = self.pending.borrow().len() < IN_FLIGHT_MAX;
            let Some(job) = has_room.then(|| self.desk.next()).flatten() else {
                if self.desk.is_closed() && self.pending.borrow().is_empty() {
                    let header =
                        RequestHeader { flags: 0, command: command::DISC, cookie, offset: 0, len: 0 };
                    return self.stream.write_all(Buffer::copy_of(&header.encode())).await;
                }
                listener.await;
                continue;
            };
            cookie += 1;
            let bytes = request_bytes(&job.ask, cookie);
            self.pending
                .borrow_mut()
                .insert(cookie, Sent { job, covered: Vec::new(), runs: None, failed: None, errors: 0 });
            self.stream.write_all(bytes).await?;
        }
    }

    /// Takes replies in until the connection ends.
    pub(super) async fn receive(&self, intake: &mut Intake<'_>) -> Result<Infallible> {
        loop {
            match intake.word().await? {
                SIMPLE_REPLY_MAGIC => self.simple_reply(intake).await?,
                CHUNK_MAGIC if self.facts.structured => self.chunk(intake).await?,
                _ => return Err(broken("what it sends is no reply")),
            }
            self.heard.set(self.heard.get() + 1);
        }
    }

    async fn simple_reply(&self, intake: &mut Intake<'_>) -> Result<()> {
        let code = intake.word().await?;
        let cookie = intake.long().await?;
        let read_len = self.with(cookie, |sent| Ok(sent.read_len()))?;
        if code != 0 {
            self.with(cookie, |sent| fail(sent, self.desk.name(), code, ""))?;
        } else if let Some(len) = read_len {
            if self.facts.structured {
                return Err(broken("a read is answered by a simple reply"));
            }
            let at = self.with(cookie, |sent| match &sent.job.ask {
                Ask::Read { at, .. } => Ok(*at),
                _ => unreachable!("it is a read"),
            })?;
            self.take_bytes(intake, cookie, at, u32::try_from(len).expect("a read is short")).await?;
        }
        self.complete(cookie)
    }

    async fn chunk(&self, intake: &mut Intake<'_>) -> Result<()> {
        let flags = intake.half().await?;
        let kind = intake.half().await?;
        let cookie = intake.long().await?;
        let len = intake.word().await?;
        self.with(cookie, |_| Ok(()))?;
        match kind {
            // The specification asks for it; without end they would look like life.
            chunk::NONE if len == 0 && flags & chunk::FLAG_DONE != 0 => {}
            chunk::OFFSET_DATA if len >= 8 => {
                let at = intake.long().await?;
                self.take_bytes(intake, cookie, at, len - 8).await?;
            }
            chunk::OFFSET_HOLE if len == 12 => {
                let at = intake.long().await?;
                let len = intake.word().await?;
                self.with(cookie, |sent| {
                    let from = sent.cover(at, len)?;
                    let Ask::Read { buffer, .. } = &mut sent.job.ask else { unreachable!("it was covered") };
                    let zeros = [0; 4096];
                    for at in (from..from + len as usize).step_by(zeros.len()) {
                        buffer.copy_from(at, &zeros[..zeros.len().min(from + len as usize - at)]);
                    }
                    Ok(())
                })?;
            }
            chunk::BLOCK_STATUS if (12..=STATUS_BYTES_MAX).contains(&len) && len % 8 == 4 => {
                let context = intake.word().await?;
                if Some(context) != self.facts.allocation {
                    return Err(broken("it reports a status that was not asked for"));
                }
                self.take_runs(intake, cookie, (len - 4) / 8).await?;
            }
            _ if kind & (1 << 15) != 0 && len >= 6 => {
                let code = intake.word().await?;
                let said = usize::from(intake.half().await?);
                let rest = (len as usize).checked_sub(6 + said);
                let Some(rest) = rest.filter(|rest| said <= MESSAGE_BYTES_MAX && *rest <= 64) else {
                    return Err(broken("an error has a wrong length"));
                };
                let message = intake.bytes(said).await?;
                intake.skip(rest).await?;
                if code == 0 {
                    return Err(broken("an error has no number"));
                }
                self.with(cookie, |sent| fail(sent, self.desk.name(), code, &printable(&message)))?;
            }
            _ => return Err(broken("a chunk has an unknown kind or a wrong length")),
        }
        match flags & chunk::FLAG_DONE {
            0 => Ok(()),
            _ => self.complete(cookie),
        }
    }

    async fn take_bytes(&self, intake: &mut Intake<'_>, cookie: u64, at: u64, len: u32) -> Result<()> {
        let mut from = self.with(cookie, |sent| sent.cover(at, len))?;
        let end = from + len as usize;
        while from < end {
            from += intake
                .some(end - from, |part| {
                    if let Some(Sent { job: Job { ask: Ask::Read { buffer, .. }, .. }, .. }) =
                        self.pending.borrow_mut().get_mut(&cookie)
                    {
                        buffer.copy_from(from, part);
                    }
                })
                .await?;
            self.heard.set(self.heard.get() + 1);
        }
        Ok(())
    }

    async fn take_runs(&self, intake: &mut Intake<'_>, cookie: u64, count: u32) -> Result<()> {
        let asked = self.with(cookie, |sent| match &sent.job.ask {
            Ask::Status { len, .. } if sent.runs.is_none() => Ok(u64::from(*len)),
            _ => Err(broken("it reports a status that was not asked for")),
        })?;
        let mut runs: Vec<Run> = Vec::new();
        let mut left = asked;
        for _ in 0..count {
            let len = u64::from(intake.word().await?);
            let is_data = intake.word().await? & allocation::ZERO == 0;
            self.heard.set(self.heard.get() + 1);
            if len == 0 {
                return Err(broken("a run of a status is empty"));
            }
            // The last one may be longer than what was asked for.
            let len = len.min(left);
            left -= len;
            let has_room = runs.len() < RUNS_MAX;
            match runs.last_mut() {
                _ if len == 0 => {}
                Some(last) if last.1 == is_data => last.0 += len,
                _ if has_room => runs.push((len, is_data)),
                // Nothing after a gap counts.
                _ => left = 0,
            }
        }
        self.with(cookie, |sent| {
            sent.runs = Some(runs);
            Ok(())
        })
    }

    /// The reply is whole.
    fn complete(&self, cookie: u64) -> Result<()> {
        self.with(cookie, |sent| match &sent.job.ask {
            _ if sent.failed.is_some() => Ok(()),
            Ask::Status { .. } if sent.runs.is_none() => Err(broken("a status is missing")),
            Ask::Read { .. } if !sent.is_covered() => Err(broken("a part of a read is missing")),
            _ => Ok(()),
        })?;
        let mut sent = self.pending.borrow_mut().remove(&cookie).expect("it was there");
        let answer = match (sent.failed, &mut sent.job.ask) {
            (Some(error), _) => Err(error),
            (None, Ask::Read { buffer, .. }) => Ok(Answer::Bytes(std::mem::replace(buffer, Buffer::empty()))),
            (None, Ask::Status { .. }) => Ok(Answer::Runs(sent.runs.unwrap_or_default())),
            (None, _) => Ok(Answer::Done),
        };
        self.answered.set(self.answered.get() + 1);
        self.desk.answer(sent.job, answer);
        Ok(())
    }

    fn with<T>(&self, cookie: u64, look: impl FnOnce(&mut Sent) -> Result<T>) -> Result<T> {
        match self.pending.borrow_mut().get_mut(&cookie) {
            Some(sent) => look(sent),
            None => Err(broken("it answers a request that was not sent")),
        }
    }
}

/// Takes note of an error of the server. One that goes down answers nothing: its requests are sent again.
fn fail(sent: &mut Sent, name: &str, code: u32, says: &str) -> Result<()> {
    if code == Errno::Shutdown.code() {
        return Err(Error::new(ErrorKind::Closed, "the server is shutting down"));
    }
    let kind = [
        (Errno::Perm, ErrorKind::ReadOnly),
        (Errno::Invalid, ErrorKind::Invalid),
        (Errno::NoSpace, ErrorKind::NoSpace),
        (Errno::NotSupported, ErrorKind::Unsupported),
    ];
    let kind = kind.iter().find(|(errno, _)| errno.code() == code).map_or(ErrorKind::Io, |(_, kind)| *kind);
    let what = match &sent.job.ask {
        Ask::Read { .. } => "read",
        Ask::Write { .. } => "write",
        Ask::Zero { .. } => "write of zeros",
        Ask::Trim { .. } => "discard",
        Ask::Flush => "flush",
        Ask::Status { .. } => "question for the block status",
    };
    let says = if says.is_empty() { String::new() } else { format!(": {says}") };
    sent.errors += 1;
    if sent.errors > ERRORS_MAX {
        return Err(broken("it says too often why a request has failed")); // without end, it would look like life
    }
    let error = Error::new(kind, format!("{name}: the server fails a {what} with NBD error {code}{says}"));
    sent.failed.get_or_insert(error);
    Ok(())
}

fn request_bytes(ask: &Ask, cookie: u64) -> Buffer {
    let (command, flags, offset, len) = match ask {
        Ask::Read { at, buffer } => (command::READ, 0, *at, buffer.len() as u64),
        Ask::Write { at, data } => (command::WRITE, 0, *at, data.len() as u64),
        Ask::Zero { at, len, keeps_space } => {
            let flags = if *keeps_space { command_flag::NO_HOLE } else { 0 };
            (command::WRITE_ZEROES, flags, *at, u64::from(*len))
        }
        Ask::Trim { at, len } => (command::TRIM, 0, *at, u64::from(*len)),
        Ask::Flush => (command::FLUSH, 0, 0, 0),
        Ask::Status { at, len } => (command::BLOCK_STATUS, 0, *at, u64::from(*len)),
    };
    let mut bytes = Buffer::copy_of(&RequestHeader { flags, command, cookie, offset, len }.encode());
    if let Ask::Write { data, .. } = ask {
        bytes.append(data.duplicate());
    }
    bytes
}
