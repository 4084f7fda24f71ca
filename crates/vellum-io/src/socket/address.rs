//! Addresses to listen at and to connect to.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use socket2::SockRef;
use vellum_core::{Context, Error, ErrorKind, Result};

use crate::blocking::unblock;

/// A place that can be listened at or connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket in the file system.
    Unix(PathBuf),
    /// A TCP port of a host, by name or number.
    Tcp {
        /// A name, an IPv4 address or an IPv6 address without brackets.
        host: String,
        /// The port; 0 to listen at any that is free.
        port: u16,
    },
}

impl Address {
    /// The Unix socket at `path`.
    pub fn unix(path: impl Into<PathBuf>) -> Self {
        Self::Unix(path.into())
    }

    /// The TCP port of a host.
    pub fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self::Tcp { host: host.into(), port }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp { host: address.ip().to_string(), port: address.port() }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// The addresses of a host's name, best first.
pub(super) async fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let name = host.to_owned();
    let found = unblock(move || (name.as_str(), port).to_socket_addrs().map(Vec::from_iter)).await;
    let found = found.context(|| format!("can't find the host {host}"))?;
    if found.is_empty() {
        return Err(Error::new(ErrorKind::NotFound, format!("the host {host} has no address")));
    }
    Ok(found)
}

/// The peer: an address, or the process behind a Unix socket.
pub(super) fn peer_of(descriptor: &OwnedFd) -> String {
    let address = SockRef::from(descriptor).peer_addr().ok().and_then(|address| address.as_socket());
    match (address, peer_process(descriptor)) {
        (Some(address), _) => address.to_string(),
        // In another container it may have no number that we know.
        (None, Some(process)) if process != 0 => format!("process {process}"),
        (None, _) => "another program".into(),
    }
}

fn peer_process(descriptor: &OwnedFd) -> Option<libc::pid_t> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = libc::socklen_t::try_from(size_of_val(&peer)).expect("a small structure");
    // SAFETY: the kernel writes at most `len` bytes to `peer`, which has that many, and any numbers are good
    // in it.
    let result = unsafe {
        libc::getsockopt(
            descriptor.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    (result == 0).then_some(peer.pid)
}
