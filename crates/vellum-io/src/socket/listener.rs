//! Listening for connections.
//!
//! A Unix socket leaves a file behind when its program dies, and the next program finds the address in use.
//! Such a file is removed when connections to it are refused. Between that check and the removal another
//! program could begin to listen; so the program that removes the file holds a lock on the directory.
//!
//! 1. A socket file is removed only when a connection to it was refused, or when it is our own. If the
//!    listening program has ended and the kernel has not closed its socket yet, that is waited for.
//! 2. An accept that fails for one connection, or temporarily, does not end a loop that continues after
//!    `NoSpace`.

use std::fmt;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, Type};
use vellum_core::{Context, Error, ErrorKind, Result};

use super::Socket;
use super::address::{Address, peer_of, resolve};
use crate::blocking::unblock;
use crate::clock;
use crate::driver::op::{Op, Readiness, accepted};
use crate::driver::submit;

/// How often to check whether a socket whose program has ended is gone, and the time between two checks.
const LOOKS_MAX: u32 = 200;
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(10);
/// How many connections the kernel keeps waiting. It also has a limit of its own.
const BACKLOG: i32 = 1024;

/// How long an accept waits before it reports a shortage, so that a loop around it neither spins nor stops.
const SHORTAGE_WAIT: Duration = Duration::from_millis(100);

/// A listening socket.
pub struct Listener {
    socket: Arc<OwnedFd>,
    address: Address,
    #[expect(dead_code, reason = "it is held, and removes the file when it is dropped")]
    file: Option<SocketFile>,
}

impl Listener {
    /// Listens at `address`. A stale file of a Unix socket is replaced.
    ///
    /// Fails with `Locked` when another program listens there, with `Invalid` when the path is too long or
    /// leads to something other than a socket.
    pub async fn bind(address: &Address) -> Result<Self> {
        match address {
            Address::Unix(path) => {
                let path = path.clone();
                unblock(move || bind_unix(&path, None)).await
            }
            Address::Tcp { host, port } => {
                let mut result = Err(Error::new(ErrorKind::NotFound, "no address was tried"));
                for resolved in resolve(host, *port).await? {
                    result = bind_tcp(resolved);
                    if result.is_ok() {
                        break;
                    }
                }
                let (socket, bound) = result?;
                Ok(Self { socket: Arc::new(socket), address: bound, file: None })
            }
        }
    }

    /// Listens at a Unix socket that only its owner can connect to, from the moment it is there (mode 0600).
    /// Otherwise as [`Listener::bind`].
    pub async fn bind_private(path: &Path) -> Result<Self> {
        let path = path.to_owned();
        unblock(move || bind_unix(&path, Some(Mode::RUSR | Mode::WUSR))).await
    }

    /// Takes over a socket that listens already, as a service manager passes them. Its file, if any, stays.
    pub fn adopt(socket: OwnedFd, address: Address) -> Self {
        Self::sharing(Arc::new(socket), address)
    }

    pub(super) fn sharing(socket: Arc<OwnedFd>, address: Address) -> Self {
        Self { socket, address, file: None }
    }

    /// The address it listens at; with the actual port if any port was requested.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The next connection. May be called by several tasks at once.
    ///
    /// A caller that accepts in a loop continues when this fails with `NoSpace`: the host is short of
    /// descriptors or memory, the connection still waits, and this has waited a little before it failed. Any
    /// other failure means that the listener is broken. Connections that were gone before they were accepted
    /// are skipped.
    pub async fn accept(&self) -> Result<Socket> {
        loop {
            let (result, _) = submit(Op::Accept(self.socket.clone())).await;
            let errno = match result {
                Ok(descriptor) => {
                    let descriptor = accepted(descriptor);
                    let peer = peer_of(&descriptor);
                    return Ok(Socket { descriptor, peer });
                }
                Err(errno) => errno,
            };
            match errno {
                // Errors of a single connection are reported here too; the next connection may be fine.
                libc::ECONNABORTED | libc::EINTR | libc::EPERM | libc::EPROTO | libc::ENETDOWN => {}
                libc::ENETUNREACH
                | libc::EHOSTUNREACH
                | libc::EHOSTDOWN
                | libc::ENONET
                | libc::ENOPROTOOPT => {}
                // A listener that was made non-blocking elsewhere.
                libc::EAGAIN => drop(submit(Op::Await(self.socket.clone(), Readiness::Read)).await),
                libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM => {
                    clock().sleep(SHORTAGE_WAIT).await;
                    let error = Error::os(errno, format!("can't accept a connection on {}", self.address));
                    return Err(error.with_kind(ErrorKind::NoSpace));
                }
                _ => return Err(Error::os(errno, format!("can't listen on {}", self.address))),
            }
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({})", self.address)
    }
}

/// The file of a Unix socket that we listen at.
struct SocketFile {
    path: PathBuf,
    /// Device and number, so that another's file that has taken the name stays.
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|now| (now.dev(), now.ino()) == self.identity) {
            drop(fs::remove_file(&self.path));
        }
    }
}

/// The longest path that the kernel takes for a Unix socket, in bytes.
const PATH_MAX: usize = 107;

/// A socket with a file of this mode at most, that listens.
fn bind_with(path: &Path, mode: Option<Mode>) -> io::Result<UnixListener> {
    let Some(mode) = mode else { return UnixListener::bind(path) };
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // The file gets the mode that the socket has when it is bound.
    rustix::fs::fchmod(&socket, mode)?;
    socket.bind(&SockAddr::unix(path)?)?;
    socket.listen(BACKLOG)?;
    Ok(OwnedFd::from(socket).into())
}

fn bind_unix(path: &Path, mode: Option<Mode>) -> Result<Listener> {
    let doing = || format!("can't listen on {}", path.display());
    let len = path.as_os_str().len();
    if len > PATH_MAX {
        return Err(Error::invalid(format!(
            "{}: the path of the socket is too long ({len} bytes of at most {PATH_MAX})",
            doing()
        )));
    }
    let listener = match bind_with(path, mode) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let _lock = lock_directory_of(path);
            remove_stale(path)?;
            bind_with(path, mode)
        }
        bound => bound,
    };
    let listener = listener.map_err(|error| {
        let in_use = error.kind() == io::ErrorKind::AddrInUse;
        let error = Error::io(error, doing());
        if in_use { error.with_kind(ErrorKind::Locked) } else { error }
    })?;
    let facts = fs::symlink_metadata(path).context(doing)?;
    let file = SocketFile { path: path.to_owned(), identity: (facts.dev(), facts.ino()) };
    let socket = Arc::new(OwnedFd::from(listener));
    Ok(Listener { socket, address: Address::unix(path), file: Some(file) })
}

/// Removes a socket's file if no program listens there any more.
fn remove_stale(path: &Path) -> Result<()> {
    let doing = || format!("can't listen on {}", path.display());
    let Ok(facts) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    if !facts.file_type().is_socket() {
        return Err(Error::invalid(format!("{}: a file that is not a socket exists there", doing())));
    }
    let mut looks = 0;
    loop {
        match connect_at_once(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return fs::remove_file(path).context(doing);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Ok(connected) if looks < LOOKS_MAX && is_of_the_dead(&connected) => {
                looks += 1;
                std::thread::sleep(LOOK_AGAIN_AFTER);
            }
            _ => {
                return Err(Error::new(
                    ErrorKind::Locked,
                    format!("{}: another program is listening there", doing()),
                ));
            }
        }
    }
}

/// A connection, if the listener's queue has room for one: never blocks.
fn connect_at_once(path: &Path) -> io::Result<UnixStream> {
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(OwnedFd::from(socket).into())
}

/// Whether the process that listens has ended. The kernel may take a moment to take a killed program's rings
/// apart, and with them the sockets that they hold.
fn is_of_the_dead(connected: &UnixStream) -> bool {
    let Some(pid) = peer_pid(connected).and_then(rustix::process::Pid::from_raw) else { return false };
    match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
        Err(error) => error == rustix::io::Errno::SRCH,
        Ok(process) => {
            // It can be read when the process has ended, waited for or not.
            let mut ended = [rustix::event::PollFd::new(&process, rustix::event::PollFlags::IN)];
            let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut ended, Some(&at_once)).is_ok_and(|count| count > 0)
        }
    }
}

/// The process that listens; 0 when it is of another name space.
fn peer_pid(connected: &UnixStream) -> Option<i32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = u32::try_from(size_of::<libc::ucred>()).expect("a few bytes");
    // SAFETY: the kernel writes at most `len` bytes to `peer`, which is as long, and any bytes make a ucred.
    let result = unsafe {
        libc::getsockopt(
            connected.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    (result == 0).then_some(peer.pid)
}

/// How long another program may keep the directory locked before a stale socket is removed without the lock.
/// Any program that may read the directory can lock it, and must not be able to keep a server from starting.
const LOCK_PATIENCE: (u32, Duration) = (20, Duration::from_millis(50));

/// Keeps out other programs that do the same. If the directory cannot be locked, the work continues without
/// the lock.
fn lock_directory_of(path: &Path) -> Option<OwnedFd> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags, Mode::empty()).ok()?;
    for _ in 0..LOCK_PATIENCE.0 {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(directory),
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(LOCK_PATIENCE.1),
            Err(_) => return None,
        }
    }
    None
}

fn bind_tcp(address: std::net::SocketAddr) -> Result<(OwnedFd, Address)> {
    let bind = || {
        let socket = socket2::Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        // A server that is started anew finds its port in use by connections of the last one otherwise.
        socket.set_reuse_address(true)?;
        socket.bind(&SockAddr::from(address))?;
        socket.listen(BACKLOG)?;
        let bound = socket.local_addr()?.as_socket().unwrap_or(address);
        Ok((OwnedFd::from(socket), Address::from(bound)))
    };
    bind().map_err(|error: io::Error| {
        let in_use = error.kind() == io::ErrorKind::AddrInUse;
        let error = Error::io(error, format!("can't listen on {address}"));
        if in_use { error.with_kind(ErrorKind::Locked) } else { error }
    })
}
