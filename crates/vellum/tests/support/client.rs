//! A small synchronous NBD client: fixed newstyle, simple replies, as many requests in flight as the caller
//! likes. It knows just enough to be a guest whose every flush is remembered, and to misbehave.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use super::{PATIENCE, until};

const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const WRITE_ZEROES: u16 = 6;

pub const FLAG_FUA: u16 = 1;
pub const FLAG_NO_HOLE: u16 = 2;
pub const FLAG_FAST_ZERO: u16 = 16;

/// Where a server is.
#[derive(Debug, Clone)]
pub enum Peer {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// A byte stream to a server.
pub enum Socket {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Peer {
    /// A connection, before anything was sent.
    pub fn connect(&self) -> io::Result<Socket> {
        let socket = match self {
            Self::Unix(path) => Socket::Unix(UnixStream::connect(path)?),
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_nodelay(true)?;
                Socket::Tcp(stream)
            }
        };
        socket.set_patience(PATIENCE)?;
        Ok(socket)
    }

    /// A client of an export, as soon as there is one.
    #[track_caller]
    pub fn wait_for(&self, name: &str) -> Client {
        let mut client = None;
        until(&format!("there is an export {name:?} at {self:?}"), || {
            client = Client::connect(self, name).ok();
            client.is_some()
        });
        client.expect("it is there")
    }
}

impl Socket {
    /// How long a read or a write may wait.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_read_timeout(Some(patience))?;
                stream.set_write_timeout(Some(patience))
            }
            Self::Tcp(stream) => {
                stream.set_read_timeout(Some(patience))?;
                stream.set_write_timeout(Some(patience))
            }
        }
    }

    /// A second handle on the same stream.
    pub fn duplicate(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
        })
    }

    pub fn shut_down(&self) {
        match self {
            Self::Unix(stream) => drop(stream.shutdown(std::net::Shutdown::Both)),
            Self::Tcp(stream) => drop(stream.shutdown(std::net::Shutdown::Both)),
        }
    }

    pub fn exactly(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> io::Result<u32> {
        Ok(u32::from_be_bytes(self.exactly(4)?.try_into().expect("four bytes")))
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.read(buffer),
            Self::Tcp(stream) => stream.read(buffer),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.write(bytes),
            Self::Tcp(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection in transmission.
pub struct Client {
    pub socket: Socket,
    pub size: u64,
    pub flags: u16,
    next_cookie: u64,
}

/// An answer: the cookie of its request, and its error (zero for success).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    pub cookie: u64,
    pub error: u32,
}

/// The bytes of an option.
pub fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).expect("short");
    [OPTION_MAGIC, &number.to_be_bytes()[..], &len.to_be_bytes(), data].concat()
}

/// The bytes of a request without its payload.
pub fn request(flags: u16, command: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    [
        &0x2560_9513_u32.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &command.to_be_bytes(),
        &cookie.to_be_bytes(),
        &at.to_be_bytes(),
        &len.to_be_bytes(),
    ]
    .concat()
}

fn bad(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl Client {
    /// From the connection to the first request.
    pub fn connect(peer: &Peer, name: &str) -> io::Result<Self> {
        let mut socket = peer.connect()?;
        if socket.exactly(18)? != *b"NBDMAGICIHAVEOPT\0\x03" {
            return Err(bad("the greeting is another"));
        }
        socket.write_all(&3u32.to_be_bytes())?;
        let len = u32::try_from(name.len()).expect("short");
        let go = [&len.to_be_bytes()[..], name.as_bytes(), &0u16.to_be_bytes()].concat();
        socket.write_all(&option(OPTION_GO, &go))?;
        let (mut size, mut flags) = (0, 0);
        loop {
            let head = socket.exactly(8)?;
            if head != 0x0003_e889_0455_65a9_u64.to_be_bytes() {
                return Err(bad("an option's reply begins otherwise"));
            }
            let (_, kind, len) = (socket.u32()?, socket.u32()?, socket.u32()?);
            let data = socket.exactly(len as usize)?;
            match kind {
                REPLY_ACK => break,
                REPLY_INFO if data[..2] == [0, 0] => {
                    size = u64::from_be_bytes(data[2..10].try_into().expect("eight bytes"));
                    flags = u16::from_be_bytes(data[10..12].try_into().expect("two bytes"));
                }
                REPLY_INFO => {}
                kind => {
                    let text = String::from_utf8_lossy(&data);
                    return Err(bad(format!("the export is refused ({kind:#x}): {text}")));
                }
            }
        }
        Ok(Self { socket, size, flags, next_cookie: 1 })
    }

    /// Sends a request and does not wait. Returns its cookie.
    pub fn send(&mut self, command: u16, flags: u16, at: u64, len: u32, data: &[u8]) -> io::Result<u64> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let mut bytes = request(flags, command, cookie, at, len);
        bytes.extend_from_slice(data);
        self.socket.write_all(&bytes)?;
        Ok(cookie)
    }

    /// The next answer.
    pub fn answer(&mut self) -> io::Result<Answer> {
        let magic = self.socket.u32()?;
        if magic != 0x6744_6698 {
            return Err(bad(format!("a reply begins with {magic:#x}")));
        }
        let error = self.socket.u32()?;
        let cookie = u64::from_be_bytes(self.socket.exactly(8)?.try_into().expect("eight bytes"));
        Ok(Answer { cookie, error })
    }

    fn call(&mut self, command: u16, flags: u16, at: u64, len: u32, data: &[u8]) -> io::Result<()> {
        let cookie = self.send(command, flags, at, len, data)?;
        let answer = self.answer()?;
        if answer.cookie != cookie {
            return Err(bad("the answer is to another request"));
        }
        match answer.error {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(i32::try_from(error).expect("an error number"))),
        }
    }

    pub fn read(&mut self, at: u64, len: u32) -> io::Result<Vec<u8>> {
        self.call(READ, 0, at, len, &[])?;
        self.socket.exactly(len as usize)
    }

    pub fn write(&mut self, at: u64, data: &[u8], flags: u16) -> io::Result<()> {
        self.call(WRITE, flags, at, u32::try_from(data.len()).expect("short"), data)
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.call(FLUSH, 0, 0, 0, &[])
    }

    pub fn zero(&mut self, at: u64, len: u32, flags: u16) -> io::Result<()> {
        self.call(WRITE_ZEROES, flags, at, len, &[])
    }

    pub fn trim(&mut self, at: u64, len: u32) -> io::Result<()> {
        self.call(TRIM, 0, at, len, &[])
    }

    /// Says goodbye.
    pub fn disconnect(mut self) {
        drop(self.send(DISCONNECT, 0, 0, 0, &[]));
    }

    /// All of the disk.
    pub fn read_all(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut at = 0;
        while at < self.size {
            let len = u32::try_from((self.size - at).min(1 << 20)).expect("a mebibyte");
            bytes.extend(self.read(at, len)?);
            at += u64::from(len);
        }
        Ok(bytes)
    }
}
