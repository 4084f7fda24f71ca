//! A guest that waits for each answer before it continues: a synchronous writer.

use std::path::Path;

use vellum_core::{Error, Random, Result};
use vellum_export::nbd::wire::{
    RequestHeader, SIMPLE_REPLY_BYTES, SIMPLE_REPLY_MAGIC, command, command_flag,
};

use crate::session::{Session, be, broken};

/// What a guest has at hand to write; a longer write makes more of it.
const PAYLOAD_BYTES: usize = 64 << 10;

/// What is written. A format that packs blocks does not care where, but what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Bytes {
    /// Random bytes, which do not compress.
    #[default]
    Noise,
    /// One repeated byte other than zero: every block compresses.
    Same,
}

impl Bytes {
    /// Some of them.
    pub fn make(self, len: usize) -> Vec<u8> {
        match self {
            Self::Noise => filler(len),
            Self::Same => vec![0x5a; len],
        }
    }
}

/// Bytes that do not compress.
pub fn filler(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Random::from_seed(1).fill(&mut bytes);
    bytes
}

/// A request of such a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Write this many bytes there.
    Write {
        /// Where.
        offset: u64,
        /// How many.
        len: usize,
    },
    /// Write them, and answer when they are durable (FUA).
    WriteThrough {
        /// Where.
        offset: u64,
        /// How many.
        len: usize,
    },
    /// Read them, whatever they are.
    Read {
        /// Where.
        offset: u64,
        /// How many.
        len: usize,
    },
    /// Zero them.
    Zero {
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

/// A connection on which one request at a time is in flight.
pub struct Guest {
    session: Session,
    bytes: Bytes,
    payload: Vec<u8>,
    /// Of the other kind, once some was asked for.
    other: Vec<u8>,
    scratch: Vec<u8>,
}

impl Guest {
    /// Connects; what it writes is noise.
    pub fn connect(socket: &Path) -> Result<Self> {
        Self::connect_writing(socket, Bytes::Noise)
    }

    /// Connects, to write such bytes.
    pub fn connect_writing(socket: &Path, bytes: Bytes) -> Result<Self> {
        let session = Session::open(socket, false)?;
        Ok(Self {
            session,
            bytes,
            payload: bytes.make(PAYLOAD_BYTES),
            other: Vec::new(),
            scratch: Vec::new(),
        })
    }

    /// Connects to the export of this name.
    pub fn connect_to(socket: &Path, export: &str) -> Result<Self> {
        let session = Session::open_export(socket, export, false)?;
        Ok(Self { session, bytes: Bytes::Noise, payload: Vec::new(), other: Vec::new(), scratch: Vec::new() })
    }

    /// Writes these bytes.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.payload.clear();
        self.payload.extend_from_slice(bytes);
        self.call(command::WRITE, 0, offset, bytes.len(), bytes.len())
    }

    /// Writes this many bytes of this kind.
    pub fn write_some(&mut self, bytes: Bytes, offset: u64, len: usize) -> Result<()> {
        if bytes != self.bytes {
            std::mem::swap(&mut self.payload, &mut self.other);
            self.bytes = bytes;
        }
        self.ask(Request::Write { offset, len })
    }

    /// The bytes that are there.
    pub fn read(&mut self, offset: u64, len: usize) -> Result<&[u8]> {
        self.ask(Request::Read { offset, len })?;
        Ok(&self.scratch)
    }

    /// Sends a request, and waits for the answer.
    pub fn ask(&mut self, request: Request) -> Result<()> {
        match request {
            Request::Write { offset, len } => self.call(command::WRITE, 0, offset, len, len),
            Request::WriteThrough { offset, len } => {
                self.call(command::WRITE, command_flag::FUA, offset, len, len)
            }
            Request::Read { offset, len } => {
                self.call(command::READ, 0, offset, len, 0)?;
                self.scratch.resize(len, 0);
                self.session.fill(&mut self.scratch)
            }
            Request::Zero { offset, len } => self.call(command::WRITE_ZEROES, 0, offset, len, 0),
            Request::Discard { offset, len } => self.call(command::TRIM, 0, offset, len, 0),
            Request::Flush => self.call(command::FLUSH, 0, 0, 0, 0),
        }
    }

    /// Reads one block at the start of the disk: something to count that changes nothing.
    pub fn read_a_block(&mut self) -> Result<()> {
        self.ask(Request::Read { offset: 0, len: 4096 })
    }

    fn call(&mut self, command: u16, flags: u16, offset: u64, len: usize, payload: usize) -> Result<()> {
        if self.payload.len() < payload {
            self.payload = self.bytes.make(payload.next_power_of_two());
        }
        let header = RequestHeader { flags, command, cookie: 1, offset, len: len as u64 };
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
    pub fn leave(mut self) -> Result<()> {
        self.session.say_goodbye()
    }
}
