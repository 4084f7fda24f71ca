//! A guest that waits for each answer before it goes on: what a synchronous writer is.

use std::path::Path;

use vellum_core::{Error, Result};
use vellum_export::nbd::wire::{RequestHeader, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC, command};

use super::connection::{Session, be, broken};
use super::workload::filler;

/// The longest write.
const WRITE_BYTES_MAX: usize = 64 << 10;

/// A request of such a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// Write so many bytes there, at most 64 KiB.
    Write {
        /// Where.
        offset: u64,
        /// How many.
        len: usize,
    },
    /// Discard them.
    Discard {
        /// Where.
        offset: u64,
        /// How many.
        len: usize,
    },
    /// Make durable what was answered.
    Flush,
}

/// A connection on which one request at a time is under way.
pub(crate) struct Guest {
    session: Session,
    payload: Vec<u8>,
}

impl Guest {
    /// Connects.
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        Ok(Self { session: Session::open(socket, false)?, payload: filler(WRITE_BYTES_MAX) })
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&mut self, request: Request) -> Result<()> {
        match request {
            Request::Write { offset, len } => self.call(command::WRITE, offset, len, len),
            Request::Discard { offset, len } => self.call(command::TRIM, offset, len, 0),
            Request::Flush => self.call(command::FLUSH, 0, 0, 0),
        }
    }

    /// Reads one block at the start of the disk, whatever it holds: something to count that changes nothing.
    pub(crate) fn read_a_block(&mut self) -> Result<()> {
        self.call(command::READ, 0, 4096, 0)?;
        self.session.take::<4096>().map(drop)
    }

    fn call(&mut self, command: u16, offset: u64, len: usize, payload: usize) -> Result<()> {
        let header = RequestHeader { flags: 0, command, cookie: 1, offset, len: len as u64 };
        self.session.put(&[&header.encode()[..], &self.payload[..payload]].concat())?;
        let reply: [u8; SIMPLE_REPLY_BYTES] = self.session.take()?;
        if be(&reply, 0) != SIMPLE_REPLY_MAGIC.to_be_bytes() || be(&reply, 8) != 1u64.to_be_bytes() {
            return Err(broken("a reply to a request that was not made"));
        }
        match u32::from_be_bytes(be(&reply, 4)) {
            0 => Ok(()),
            error => Err(Error::os(error.cast_signed(), "the server failed a request")),
        }
    }

    /// Says goodbye.
    pub(crate) fn leave(mut self) -> Result<()> {
        self.session.say_goodbye()
    }
}
