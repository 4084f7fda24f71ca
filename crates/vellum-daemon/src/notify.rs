//! Tells a service manager how the server is: a datagram to the socket that it has named, as `sd_notify(3)` does.
//!
//! A manager that cannot be told is told nothing more; the server goes on.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Where the manager listens.
#[derive(Debug, Clone)]
pub struct NotifySocket(OsString);

impl NotifySocket {
    /// The value of `NOTIFY_SOCKET`: a path, or an abstract name behind an `@`.
    pub fn new(name: OsString) -> Self {
        Self(name)
    }

    /// Clients can connect.
    pub(crate) fn is_ready(&self) {
        self.tell("READY=1");
    }

    /// Nobody new is let in.
    pub(crate) fn is_stopping(&self) {
        self.tell("STOPPING=1");
    }

    fn tell(&self, state: &str) {
        if let Err(error) = self.send(state.as_bytes()) {
            tracing::warn!("can't tell {} that {state}: {error}", self.0.display());
        }
    }

    fn send(&self, state: &[u8]) -> io::Result<()> {
        let address = match self.0.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            [b'/', ..] => SocketAddr::from_pathname(&self.0)?,
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "neither a path nor an abstract name",
                ));
            }
        };
        let socket = UnixDatagram::unbound()?;
        // A manager that does not read keeps nobody waiting.
        socket.set_nonblocking(true)?;
        socket.send_to_addr(state, &address).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abstract_name_is_one_and_other_names_are_refused() {
        let name = format!("vellum-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let manager = UnixDatagram::bind_addr(&address).expect("it is free");
        NotifySocket::new(format!("@{name}").into()).send(b"READY=1").expect("it listens");
        let mut bytes = [0; 64];
        let len = manager.recv(&mut bytes).expect("a message");
        assert_eq!(&bytes[..len], b"READY=1");
        NotifySocket::new("vsock:2:1234".into()).send(b"READY=1").expect_err("not this one");
        NotifySocket::new("/nobody/listens".into()).send(b"READY=1").expect_err("nobody is there");
    }
}
