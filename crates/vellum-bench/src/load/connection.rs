//! One NBD connection of the generator: requests out, replies in.
//!
//! ```text
//!   requests ──► outbox ──► one write for all that are ready
//!   replies  ◄── inbox  ◄── one read for all that have come; payloads are looked at where they lie
//! ```
//!
//! It is as lean as a client can be without tricks, so that the server is what is measured, and it treats all
//! servers alike. Every reply is checked: its cookie, its length, and the tags of its bytes.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use vellum_core::{Context, Error, Result};
use vellum_export::nbd::wire::{
    CHUNK_HEADER_BYTES, CHUNK_MAGIC, RequestHeader, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC, chunk, command,
};
use vellum_lab::guest::filler;
use vellum_lab::session::{Session, be, broken};

use super::Busy;
use super::workload::{BLOCK, Operation, Places, Workload, stamp, tag};

/// What one read can bring.
const INBOX_BYTES: usize = 256 << 10;

/// Payloads of this size are written from where they are; smaller ones go out together.
const LARGE_BYTES: usize = 64 << 10;

/// A request in flight.
#[derive(Debug, Clone, Copy)]
struct Slot {
    offset: u64,
    begun: Instant,
    /// Bytes that have come.
    come: usize,
    busy: bool,
}

/// A connection with a workload.
pub(crate) struct Client {
    session: Session,
    workload: Workload,
    places: Places,
    slots: Vec<Slot>,
    idle: Vec<usize>,
    outbox: Vec<u8>,
    payload: Vec<u8>,
    inbox: Vec<u8>,
    start: usize,
    end: usize,
    /// A payload that has come in part: whose, and how many bytes are left; whether its reply ends with it.
    partial: Option<(usize, usize, bool)>,
}

impl Client {
    pub(crate) fn new(session: Session, workload: Workload, places: Places) -> Self {
        let idle_slot = Slot { offset: 0, begun: Instant::now(), come: 0, busy: false };
        Self {
            session,
            workload,
            places,
            slots: vec![idle_slot; workload.depth],
            idle: (0..workload.depth).collect(),
            outbox: Vec::new(),
            payload: filler(workload.len),
            inbox: vec![0; INBOX_BYTES],
            start: 0,
            end: 0,
            partial: None,
        }
    }

    fn send(&mut self) -> Result<()> {
        if !self.outbox.is_empty() {
            self.session.stream().write_all(&self.outbox).context(|| "can't write to the server")?;
            self.outbox.clear();
        }
        Ok(())
    }

    /// Takes the next piece out of the inbox: `None` when it is not there yet, and the request whose reply it
    /// ends.
    fn next_piece(&mut self) -> Result<Option<Option<usize>>> {
        if let Some((index, left, is_last)) = self.partial.take() {
            let part = left.min(self.end - self.start);
            if part == 0 {
                self.partial = Some((index, left, is_last));
                return Ok(None);
            }
            self.take_payload(index, part)?;
            if part < left {
                self.partial = Some((index, left - part, is_last));
                return Ok(None);
            }
            return Ok(Some(is_last.then_some(index)));
        }
        let bytes = &self.inbox[self.start..self.end];
        if bytes.len() < SIMPLE_REPLY_BYTES {
            return Ok(None);
        }
        match u32::from_be_bytes(be(bytes, 0)) {
            SIMPLE_REPLY_MAGIC => {
                let (error, cookie) = (u32::from_be_bytes(be(bytes, 4)), u64::from_be_bytes(be(bytes, 8)));
                if error != 0 {
                    return Err(Error::os(error.cast_signed(), "the server failed a request"));
                }
                self.start += SIMPLE_REPLY_BYTES;
                let index = self.slot_of(cookie)?;
                if self.workload.operation == Operation::Read {
                    self.partial = Some((index, self.workload.len, true));
                    return Ok(Some(None));
                }
                Ok(Some(Some(index)))
            }
            CHUNK_MAGIC => self.next_chunk(),
            magic => Err(broken(&format!("a reply with the magic {magic:#x}"))),
        }
    }

    fn next_chunk(&mut self) -> Result<Option<Option<usize>>> {
        let bytes = &self.inbox[self.start..self.end];
        if bytes.len() < CHUNK_HEADER_BYTES {
            return Ok(None);
        }
        let (flags, kind) = (u16::from_be_bytes(be(bytes, 4)), u16::from_be_bytes(be(bytes, 6)));
        let (cookie, len) = (u64::from_be_bytes(be(bytes, 8)), u32::from_be_bytes(be(bytes, 16)) as usize);
        let is_last = flags & chunk::FLAG_DONE != 0;
        match kind {
            chunk::NONE if len == 0 => {
                self.start += CHUNK_HEADER_BYTES;
                Ok(Some(is_last.then_some(self.slot_of(cookie)?)))
            }
            chunk::OFFSET_DATA if len > 8 => {
                if bytes.len() < CHUNK_HEADER_BYTES + 8 {
                    return Ok(None);
                }
                let at = u64::from_be_bytes(be(bytes, CHUNK_HEADER_BYTES));
                self.start += CHUNK_HEADER_BYTES + 8;
                let index = self.slot_of(cookie)?;
                let slot = self.slots[index];
                if at != slot.offset + slot.come as u64 {
                    return Err(broken("its chunks do not come in order, as this client wants them"));
                }
                self.partial = Some((index, len - 8, is_last));
                Ok(Some(None))
            }
            chunk::OFFSET_HOLE => Err(broken("it says there is a hole where data was written")),
            _ => Err(broken(&format!("a chunk of kind {kind:#x} and {len} bytes"))),
        }
    }

    fn slot_of(&self, cookie: u64) -> Result<usize> {
        let index =
            usize::try_from(cookie).ok().filter(|index| self.slots.get(*index).is_some_and(|slot| slot.busy));
        index.ok_or_else(|| broken("a reply to a request that was not made"))
    }

    /// Checks the bytes of a read.
    fn take_payload(&mut self, index: usize, part: usize) -> Result<()> {
        let bytes = &self.inbox[self.start..self.start + part];
        let slot = &mut self.slots[index];
        if slot.come + part > self.workload.len {
            return Err(broken("more bytes than were asked for"));
        }
        let mut at = slot.come.next_multiple_of(BLOCK) - slot.come;
        while at + 8 <= part {
            let place = slot.offset + (slot.come + at) as u64;
            if be(bytes, at) != tag(place) {
                return Err(Error::corrupt(format!("the server gave wrong bytes for {place:#x}")));
            }
            at += BLOCK;
        }
        slot.come += part;
        self.start += part;
        Ok(())
    }

    fn finish(&mut self, index: usize) -> Result<()> {
        let slot = &mut self.slots[index];
        if self.workload.operation == Operation::Read && slot.come != self.workload.len {
            return Err(broken("fewer bytes than were asked for"));
        }
        slot.busy = false;
        self.idle.push(index);
        Ok(())
    }
}

impl Busy for Client {
    fn under_way(&self) -> usize {
        self.slots.len() - self.idle.len()
    }

    fn ask(&mut self) -> Result<()> {
        let now = Instant::now();
        while let Some(index) = self.idle.pop() {
            let offset = self.places.next();
            self.slots[index] = Slot { offset, begun: now, come: 0, busy: true };
            let command = match self.workload.operation {
                Operation::Read => command::READ,
                Operation::Write => command::WRITE,
            };
            let len = self.workload.len as u64;
            let header = RequestHeader { flags: 0, command, cookie: index as u64, offset, len };
            self.outbox.extend_from_slice(&header.encode());
            if self.workload.operation == Operation::Write {
                stamp(&mut self.payload, offset);
                if self.payload.len() >= LARGE_BYTES {
                    self.send()?;
                    self.session.stream().write_all(&self.payload).context(|| "can't write to the server")?;
                } else {
                    self.outbox.extend_from_slice(&self.payload);
                }
            }
        }
        self.send()
    }

    fn hear(&mut self, ended: &mut dyn FnMut(Duration)) -> Result<()> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 && self.inbox.len() - self.end < CHUNK_HEADER_BYTES + 8 {
            self.inbox.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let count = self
            .session
            .stream()
            .read(&mut self.inbox[self.end..])
            .context(|| "can't read from the server")?;
        if count == 0 {
            return Err(broken("it hung up"));
        }
        self.end += count;
        let now = Instant::now();
        while let Some(ends) = self.next_piece()? {
            if let Some(index) = ends {
                self.finish(index)?;
                ended(now - self.slots[index].begun);
            }
        }
        Ok(())
    }

    fn leave(mut self) -> Result<()> {
        self.session.say_goodbye()
    }
}
