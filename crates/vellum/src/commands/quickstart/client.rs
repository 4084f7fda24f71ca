//! The smallest NBD client that can write synchronously: one request at a time over a Unix socket.
//!
//! It stands here and not on the server's code, so that the tour shows what a stranger's client would see.
//! Source: NBD protocol, fixed newstyle handshake, simple replies.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054; // "IHAVEOPT"
const OPTION_REPLY_MAGIC: u64 = 0x0003_E889_0455_65A9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

const FLAGS_FIXED_NO_ZEROES: u32 = 0b11;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
/// The write is durable when it is answered.
pub(crate) const FUA: u16 = 1;

/// A connection to one export.
pub(crate) struct Client {
    stream: UnixStream,
    /// The disk's size in bytes.
    pub(crate) size: u64,
    cookie: u64,
}

fn refused(what: &str) -> io::Error {
    io::Error::other(format!("the server violated the NBD protocol: {what}"))
}

impl Client {
    /// Connects to the default export.
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        let mut client = Self { stream, size: 0, cookie: 0 };
        let mut greeting = [0; 18];
        client.stream.read_exact(&mut greeting)?;
        if &greeting[..8] != b"NBDMAGIC" || greeting[8..16] != OPTION_MAGIC.to_be_bytes() {
            return Err(refused("greeting"));
        }
        let mut hello = FLAGS_FIXED_NO_ZEROES.to_be_bytes().to_vec();
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(OPTION_GO.to_be_bytes());
        hello.extend(6u32.to_be_bytes()); // an empty name, no information asked for
        hello.extend([0; 6]);
        client.stream.write_all(&hello)?;
        loop {
            let mut header = [0; 20];
            client.stream.read_exact(&mut header)?;
            if header[..8] != OPTION_REPLY_MAGIC.to_be_bytes() {
                return Err(refused("option reply"));
            }
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().expect("four bytes"));
            let mut body = vec![0; word(16).min(4096) as usize];
            client.stream.read_exact(&mut body)?;
            match word(12) {
                REPLY_ACK => return Ok(client),
                REPLY_INFO if body.len() >= 10 && body[..2] == INFO_EXPORT.to_be_bytes() => {
                    client.size = u64::from_be_bytes(body[2..10].try_into().expect("eight bytes"));
                }
                REPLY_INFO => {}
                _ => return Err(refused("the server refused the export")),
            }
        }
    }

    fn request(&mut self, command: u16, flags: u16, offset: u64, len: u32, payload: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend(self.cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(len.to_be_bytes());
        request.extend(payload);
        self.stream.write_all(&request)?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        let error = u32::from_be_bytes(reply[4..8].try_into().expect("four bytes"));
        if reply[..4] != REPLY_MAGIC.to_be_bytes() || reply[8..] != self.cookie.to_be_bytes() {
            return Err(refused("reply"));
        }
        match error {
            0 => Ok(()),
            errno => Err(io::Error::other(format!("the server answered with error {errno}"))),
        }
    }

    /// Writes bytes; with [`FUA`] durably.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8], flags: u16) -> io::Result<()> {
        let len = u32::try_from(bytes.len()).expect("a small write");
        self.request(WRITE, flags, offset, len, bytes)
    }

    /// Makes durable what was written.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.request(FLUSH, 0, 0, 0, &[])
    }

    /// Reads bytes.
    pub(crate) fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let len = u32::try_from(bytes.len()).expect("a small read");
        self.request(READ, 0, offset, len, &[])?;
        self.stream.read_exact(bytes)
    }
}
