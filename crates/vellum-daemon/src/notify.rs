//! Notifies a service manager of the server's state: a datagram to the socket that it has named, as
//! `sd_notify(3)` does.
//!
//! A manager that has no room for the message gets it a little later: without `READY=1` it would end the
//! server. A manager that cannot be reached gets no further messages; the server continues.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use vellum_io::clock;

/// How often it is tried again, and after what time, while the manager has no room.
const TRIES_MAX: u32 = 200;
const TRIED_EVERY: Duration = Duration::from_millis(50);

/// How often, and for how much more time, to ask a manager while images are opened.
const EXTENDED_EVERY: Duration = Duration::from_secs(5);
const EXTENDED_BY: Duration = Duration::from_secs(30);

/// Where the manager listens.
#[derive(Debug, Clone)]
pub struct NotifySocket(OsString);

impl NotifySocket {
    /// The value of `NOTIFY_SOCKET`: a path, or an abstract name behind an `@`.
    pub fn new(name: OsString) -> Self {
        Self(name)
    }

    /// Reports that clients can connect. Waits some seconds while the manager has no room; the worker
    /// continues meanwhile.
    pub(crate) async fn is_ready(&self) {
        let state = "READY=1";
        let mut result = self.send(state.as_bytes());
        for _ in 0..TRIES_MAX {
            if !matches!(&result, Err(error) if error.kind() == io::ErrorKind::WouldBlock) {
                break;
            }
            clock().sleep(TRIED_EVERY).await;
            result = self.send(state.as_bytes());
        }
        self.said(state, result);
    }

    /// Images are being opened, and recovered where they were not closed: that may take longer than a manager
    /// waits. Never returns.
    pub(crate) async fn is_starting<T>(&self) -> T {
        let state = format!("EXTEND_TIMEOUT_USEC={}", EXTENDED_BY.as_micros());
        loop {
            clock().sleep(EXTENDED_EVERY).await;
            // One that has no room gets it the next time.
            drop(self.send(state.as_bytes()));
        }
    }

    /// No new client is admitted.
    pub(crate) fn is_stopping(&self) {
        let state = "STOPPING=1";
        self.said(state, self.send(state.as_bytes()));
    }

    fn said(&self, state: &str, result: io::Result<()>) {
        if let Err(error) = result {
            tracing::warn!("can't send {state} to the service manager at {}: {error}", self.0.display());
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
        // A manager that does not read must not block the server.
        socket.set_nonblocking(true)?;
        socket.send_to_addr(state, &address).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use vellum_io::IoMode;

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

    #[test]
    fn a_manager_that_has_no_room_is_told_as_soon_as_it_has() {
        let name = format!("vellum-notify-full-{}", std::process::id());
        let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).expect("a name"));
        let manager = manager.expect("it is free");
        let socket = NotifySocket::new(format!("@{name}").into());
        let mut before = 0;
        let full = loop {
            match socket.send(b"X=1") {
                Ok(()) => before += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock, "{full}");
        let telling =
            thread::spawn(move || vellum_io::run(IoMode::Threads, async || socket.is_ready().await));
        thread::sleep(TRIED_EVERY);
        let mut bytes = [0; 64];
        for _ in 0..before {
            let len = manager.recv(&mut bytes).expect("a message");
            assert_eq!(&bytes[..len], b"X=1");
        }
        let len = manager.recv(&mut bytes).expect("a message");
        assert_eq!(&bytes[..len], b"READY=1");
        telling.join().expect("no panic").expect("it ran");
    }
}
