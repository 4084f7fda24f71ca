//! Connections: listening, connecting, and the bytes in between.
//!
//! ```text
//!   Listener ── accept ──▶ Socket ── (may travel to another worker) ── attach ──▶ Stream: ByteStream
//!   connect ─────────────────┘
//! ```
//!
//! A [`Socket`] belongs to no worker; a [`Stream`] stays on the worker that it was attached on.

mod address;
mod listener;
mod passed;
mod stream;

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

pub use address::Address;
pub use listener::Listener;
pub use passed::{PassedSocket, PassedTo};
pub use stream::{Stream, connect};

use vellum_core::{Context, Result};

/// One end of a connection that no worker uses yet.
#[derive(Debug)]
pub struct Socket {
    descriptor: OwnedFd,
    peer: String,
}

impl Socket {
    /// Any connected stream socket, and what to call its other end in messages.
    pub fn new(descriptor: OwnedFd, peer: impl Into<String>) -> Self {
        Self { descriptor, peer: peer.into() }
    }

    /// Two ends of one connection within the program.
    pub fn pair() -> Result<(Self, Self)> {
        let (one, other) = UnixStream::pair().context(|| "can't create a pair of sockets")?;
        Ok((Self::new(one.into(), "this program"), Self::new(other.into(), "this program")))
    }

    /// The peer, for messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Makes the connection one of the current worker.
    pub fn attach(self) -> Stream {
        Stream::new(self.descriptor, self.peer)
    }
}

impl From<Socket> for OwnedFd {
    /// The bare socket, for a library that reads it itself.
    fn from(socket: Socket) -> Self {
        socket.descriptor
    }
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        let descriptor = OwnedFd::from(stream);
        let peer = address::peer_of(&descriptor);
        Self { descriptor, peer }
    }
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Self {
        let descriptor = OwnedFd::from(stream);
        let peer = address::peer_of(&descriptor);
        Self { descriptor, peer }
    }
}
