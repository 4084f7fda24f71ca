//! Sockets that a service manager opened and passed on: `sd_listen_fds(3)`, without its library.
//!
//! ```text
//!   LISTEN_PID      whom they are for; another number means that they are not for us, and there are none
//!   LISTEN_FDS      how many: descriptors 3, 4, …
//!   LISTEN_FDNAMES  what the manager calls them, with colons between; may be missing
//! ```
//!
//! 1. A descriptor that the environment announces is checked before it is taken: it must be open, a stream
//!    socket, and listening.
//! 2. A descriptor is taken once, and is not inherited by programs that this one starts.
//! 3. Only the environment says which descriptors they are: no caller can have another one taken.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use socket2::{SockRef, Type};
use vellum_core::{Context, Error, Result};

use super::Listener;
use super::address::Address;

/// The first descriptor that is passed.
const FIRST: RawFd = 3;
/// No manager passes more.
const SOCKETS_MAX: RawFd = 1024;

static WERE_TAKEN: AtomicBool = AtomicBool::new(false);

/// The environment's description of passed sockets.
#[derive(Debug, Clone, Default)]
pub struct PassedTo {
    pid: Option<OsString>,
    count: Option<OsString>,
    names: Option<OsString>,
}

/// A listening socket that was passed.
#[derive(Debug, Clone)]
pub struct PassedSocket {
    socket: Arc<OwnedFd>,
    address: Address,
    name: Option<String>,
}

impl PassedTo {
    /// The description in this program's environment.
    pub fn from_environment() -> Self {
        let [pid, count, names] = ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"].map(std::env::var_os);
        Self { pid, count, names }
    }

    /// For which process sockets were passed, if any were.
    pub fn for_whom(&self) -> Option<&OsStr> {
        self.count.as_ref().and(self.pid.as_deref())
    }

    /// The sockets; none when they are for another process, or none were passed.
    ///
    /// Must be called before the program opens anything: what the environment promises is taken for what it
    /// is.
    ///
    /// # Errors
    /// `Invalid` when the environment is inconsistent, or names something other than a listening stream
    /// socket; and when the sockets were taken before.
    pub fn sockets(&self) -> Result<Vec<PassedSocket>> {
        let is_ours =
            self.pid.as_ref().is_some_and(|pid| number(pid) == i32::try_from(std::process::id()).ok());
        let Some(count) = self.count.as_ref().filter(|_| is_ours) else { return Ok(Vec::new()) };
        let count = number(count).filter(|count| (0..=SOCKETS_MAX).contains(count)).ok_or_else(|| {
            Error::invalid(format!(
                "LISTEN_FDS is {:?}, which is not a number of sockets",
                count.display().to_string()
            ))
        })?;
        let names = self.names(count)?;
        if count > 0 && WERE_TAKEN.swap(true, Ordering::AcqRel) {
            return Err(Error::invalid("the sockets that were passed are in use already"));
        }
        (FIRST..).zip(names).map(|(descriptor, name)| PassedSocket::take(descriptor, name)).collect()
    }

    /// As many names as sockets.
    fn names(&self, count: i32) -> Result<Vec<Option<String>>> {
        let count = usize::try_from(count).expect("not negative");
        let Some(names) = self.names.as_ref().filter(|names| !names.is_empty()) else {
            return Ok(vec![None; count]);
        };
        let names: Vec<_> = names.as_bytes().split(|byte| *byte == b':').collect();
        if names.len() != count {
            let found = names.len();
            return Err(Error::invalid(format!(
                "LISTEN_FDS says {count} sockets, LISTEN_FDNAMES names {found}"
            )));
        }
        Ok(names.into_iter().map(|name| Some(String::from_utf8_lossy(name).into_owned())).collect())
    }
}

fn number(text: &OsStr) -> Option<i32> {
    text.to_str()?.parse().ok()
}

impl PassedSocket {
    fn take(descriptor: RawFd, name: Option<String>) -> Result<Self> {
        let called = match &name {
            Some(name) => format!("socket {descriptor} ({name}), which was passed to this program,"),
            None => format!("socket {descriptor}, which was passed to this program,"),
        };
        // SAFETY: F_SETFD takes any number and changes nothing but a flag of the descriptor, if there is one.
        if unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
            return Err(Error::invalid(format!("{called} is not open")));
        }
        // SAFETY: it is open, as the line above has shown; it was given to this process, as `LISTEN_PID`
        // says, before the process could open anything under that number; and it is taken only once, as
        // `WERE_TAKEN` ensures.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let is_stream = SockRef::from(&socket).r#type().is_ok_and(|kind| kind == Type::STREAM);
        if !is_stream {
            return Err(Error::invalid(format!("{called} is not a stream socket")));
        }
        if !is_listening(&socket).context(|| format!("can't stat {called}"))? {
            let remedy = "with systemd, use Accept=no, the default";
            return Err(Error::invalid(format!("{called} does not listen; {remedy}")));
        }
        let address = address_of(&socket)
            .ok_or_else(|| Error::invalid(format!("{called} is neither a Unix nor a TCP socket")))?;
        Ok(Self { socket: Arc::new(socket), address, name })
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// What the manager calls it.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }
}

impl From<&PassedSocket> for Listener {
    /// Its file, if any, stays when the listener is closed: it is the manager's.
    fn from(passed: &PassedSocket) -> Self {
        Self::sharing(passed.socket.clone(), passed.address.clone())
    }
}

fn is_listening(socket: &OwnedFd) -> std::io::Result<bool> {
    let (mut value, mut len): (libc::c_int, libc::socklen_t) = (0, 4);
    // SAFETY: the kernel writes at most `len` bytes to `value`, which has that many, and any bytes make a
    // number.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ACCEPTCONN,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    if result == 0 { Ok(value != 0) } else { Err(std::io::Error::last_os_error()) }
}

fn address_of(socket: &OwnedFd) -> Option<Address> {
    let address = SockRef::from(socket).local_addr().ok()?;
    if let Some(address) = address.as_socket() {
        return Some(Address::from(address));
    }
    if !address.is_unix() {
        return None;
    }
    let path = address.as_pathname().map(Path::to_owned);
    // One without a file: `@` stands for the zero that its name begins with.
    let hidden = || {
        let name = address.as_abstract_namespace().unwrap_or_default();
        PathBuf::from(OsString::from(format!("@{}", String::from_utf8_lossy(name))))
    };
    Some(Address::Unix(path.unwrap_or_else(hidden)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(pid: &str, count: &str, names: Option<&str>) -> PassedTo {
        PassedTo { pid: Some(pid.into()), count: Some(count.into()), names: names.map(OsString::from) }
    }

    #[test]
    fn what_is_for_another_process_is_left_alone() {
        let own = std::process::id().to_string();
        let others = [
            PassedTo::default(),
            said("1", "1", None),
            said("", "1", None),
            said(&format!("{own}0"), "junk", None),
            PassedTo { count: None, ..said(&own, "", None) },
            said(&own, "0", None),
        ];
        for environment in others {
            assert!(environment.sockets().is_ok_and(|sockets| sockets.is_empty()), "{environment:?}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_before_anything_is_taken() {
        let own = std::process::id().to_string();
        for count in ["", "-1", "1025", "4294967297", "one", "1 "] {
            let error = said(&own, count, None).sockets().expect_err("no number");
            assert!(error.to_string().contains("LISTEN_FDS"), "{error}");
        }
        let error = said(&own, "2", Some("a")).sockets().expect_err("a name is missing");
        assert_eq!(error.to_string(), "LISTEN_FDS says 2 sockets, LISTEN_FDNAMES names 1");
        // The process does not have this many descriptors open.
        let error = PassedSocket::take(1_000_000, Some("web".into())).expect_err("nothing is there");
        assert_eq!(error.to_string(), "socket 1000000 (web), which was passed to this program, is not open");
    }
}
