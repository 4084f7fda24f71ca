//! The bytes of one connection, on one worker.
//!
//! 1. A buffer is passed to the kernel as a whole, in as many pieces as it has, and comes back; nothing is
//!    copied here.
//! 2. Reading and writing are separate operations, so both may be in flight at once.
//! 3. A connection that the other end has closed or lost fails with `Closed`; a signal is never raised for
//!    it.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use socket2::{Domain, Protocol, SockAddr, SockRef, Type};
use vellum_core::{Buffer, ByteStream, Error, ErrorKind, LocalFuture, Result};

use super::Socket;
use super::address::{Address, peer_of, resolve};
use crate::blocking::unblock;
use crate::driver::op::{Message, Op, Readiness};
use crate::driver::submit;

/// TCP keepalive: how long a peer may be silent before it is probed, the time between two probes, and their
/// number. Data that stays unacknowledged for as long as that takes in all also ends the connection.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(10), 6);

/// One end of a connection, used by tasks of one worker.
pub struct Stream {
    socket: Arc<OwnedFd>,
    peer: String,
    sent: Cell<u64>,
    stays_here: PhantomData<Rc<()>>,
}

/// Connects to the listener at `address`. May be attached on this worker or on another.
///
/// Fails with `NotFound` when there is no such socket or host, with `Closed` when no program listens there.
pub async fn connect(address: &Address) -> Result<Socket> {
    let result = match address {
        Address::Unix(path) => {
            let path = path.clone();
            // On a thread, because it waits without end when too many others are waiting to be accepted.
            unblock(move || UnixStream::connect(path)).await.map(Socket::from)
        }
        Address::Tcp { host, port } => {
            let mut result = Err(std::io::ErrorKind::NotFound.into());
            for resolved in resolve(host, *port).await? {
                result = connect_tcp(resolved).await;
                if result.is_ok() {
                    break;
                }
            }
            result
        }
    };
    result.map_err(|error| {
        let refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
        let error = Error::io(error, format!("can't connect to {address}"));
        if refused { error.with_kind(ErrorKind::Closed) } else { error }
    })
}

async fn connect_tcp(address: SocketAddr) -> std::io::Result<Socket> {
    let socket = socket2::Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    let begun = socket.connect(&SockAddr::from(address));
    let socket = Arc::new(OwnedFd::from(socket));
    match begun {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {
            let (result, _) = submit(Op::Await(socket.clone(), Readiness::Write)).await;
            result.map_err(std::io::Error::from_raw_os_error)?;
            if let Some(error) = SockRef::from(&*socket).take_error()? {
                return Err(error);
            }
        }
        Err(error) => return Err(error),
    }
    SockRef::from(&*socket).set_nonblocking(false)?;
    let descriptor = Arc::into_inner(socket).expect("the operation has given its share back");
    let peer = peer_of(&descriptor);
    Ok(Socket { descriptor, peer })
}

impl Stream {
    pub(super) fn new(descriptor: OwnedFd, peer: String) -> Self {
        let socket = SockRef::from(&descriptor);
        if socket.local_addr().is_ok_and(|address| address.as_socket().is_some()) {
            // Replies are written whole, so there is nothing to wait for and gather; and a peer that has
            // vanished without a word is to be noticed within minutes, not hours. A socket that takes neither
            // works as well.
            drop(socket.set_tcp_nodelay(true));
            let (idle, interval, times) = KEEPALIVE;
            drop(socket.set_keepalive(true));
            let _ = sockopt::set_tcp_keepidle(&descriptor, idle);
            let _ = sockopt::set_tcp_keepintvl(&descriptor, interval);
            let _ = sockopt::set_tcp_keepcnt(&descriptor, times);
            let patience = u32::try_from((idle + interval * times).as_millis()).unwrap_or(u32::MAX);
            let _ = sockopt::set_tcp_user_timeout(&descriptor, patience);
        }
        Self { socket: Arc::new(descriptor), peer, sent: Cell::new(0), stays_here: PhantomData }
    }

    /// The peer, for messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Shuts down one direction of the connection, or both. Never fails: a connection that is gone counts as
    /// shut down.
    pub fn shut_down(&self, how: Shutdown) {
        drop(SockRef::from(&*self.socket).shutdown(how));
    }

    /// Whether the peer is gone. A peer that has only shut down its sending side still listens.
    pub fn is_gone(&self) -> bool {
        // That both directions have ended is reported without being requested.
        let mut polled = [PollFd::new(&*self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok_and(|count| count > 0)
    }

    /// Waits for the socket again, after one that was made non-blocking elsewhere had nothing.
    async fn until(&self, readiness: Readiness) -> Result<(), i32> {
        submit(Op::Await(self.socket.clone(), readiness)).await.0.map(drop)
    }

    fn failed(&self, errno: i32, what: &str) -> Error {
        let error = Error::os(errno, format!("can't {what} {}", self.peer));
        match errno {
            libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN | libc::ECONNABORTED => {
                error.with_kind(ErrorKind::Closed)
            }
            _ => error,
        }
    }

    async fn receive(&self, buffer: Buffer) -> Result<(Buffer, usize)> {
        if buffer.is_empty() {
            return Err(Error::invalid("can't read into a buffer of no bytes"));
        }
        let mut message = Message { socket: self.socket.clone(), buffer, done: 0 };
        loop {
            let (result, op) = submit(Op::Receive(message)).await;
            message = op.into_message();
            let waited = match result {
                Ok(count) => return Ok((message.buffer, count as usize)),
                Err(libc::EINTR) => Ok(()),
                Err(libc::EAGAIN) => self.until(Readiness::Read).await,
                Err(errno) => Err(errno),
            };
            waited.map_err(|errno| self.failed(errno, "hear from"))?;
        }
    }

    async fn send(&self, data: Buffer) -> Result<()> {
        let len = data.len();
        let mut message = Message { socket: self.socket.clone(), buffer: data, done: 0 };
        while message.done < len {
            let (result, op) = submit(Op::Send(message)).await;
            message = op.into_message();
            let waited = match result {
                Ok(count) => {
                    message.done += count as usize;
                    self.sent.set(self.sent.get() + u64::from(count));
                    Ok(())
                }
                Err(libc::EINTR) => Ok(()),
                Err(libc::EAGAIN) => self.until(Readiness::Write).await,
                Err(errno) => Err(errno),
            };
            waited.map_err(|errno| self.failed(errno, "talk to"))?;
        }
        Ok(())
    }
}

impl ByteStream for Stream {
    fn read(&self, buffer: Buffer) -> LocalFuture<'_, Result<(Buffer, usize)>> {
        Box::pin(self.receive(buffer))
    }

    fn write_all(&self, data: Buffer) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.send(data))
    }

    fn sent(&self) -> Option<u64> {
        Some(self.sent.get())
    }

    fn is_deserted(&self) -> bool {
        // The end that comes behind unread requests is also seen.
        let mut polled = [PollFd::new(&*self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut polled, Some(&now)).is_ok_and(|count| count > 0)
    }

    fn shutdown(&self) {
        self.shut_down(Shutdown::Both);
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream(with {})", self.peer)
    }
}
