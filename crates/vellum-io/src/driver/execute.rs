//! Operations performed by plain system calls, for the driver that has no ring.
//!
//! File operations run on threads that may block ([`perform`]). Reads are first tried without blocking on the
//! worker's own thread ([`read_cached`]), which succeeds for cached data; a ring does the same. Socket calls
//! are made non-blocking one by one ([`attempt`]), so that sockets need no mode of their own and can move to
//! a worker that has a ring.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags};

use super::op::{Message, Op, OpResult, Readiness, Transfer, raw_slices, slices, slices_mut};

/// Performs an operation on a file, blocking as long as it takes. Interrupted calls are tried again.
pub(crate) fn perform(op: &mut Op) -> OpResult {
    loop {
        let result = match op {
            Op::Read(transfer) => read(transfer, 0),
            Op::Write(transfer) => write(transfer),
            Op::Sync(file) => rustix::fs::fdatasync(file.descriptor(false)).map(|()| 0),
            Op::Allocate(run) => {
                rustix::fs::fallocate(run.descriptor(), run.mode, run.at, run.len).map(|()| 0)
            }
            Op::Receive(_) | Op::Send(_) | Op::Accept(_) | Op::Await(..) => {
                unreachable!("sockets are not worked on by blocking threads")
            }
            // There is no system call for it.
            #[cfg(feature = "ublk")]
            Op::Command(_) => Err(Errno::OPNOTSUPP),
        };
        // A flush that was interrupted is not tried again: a report of lost pages may have been consumed.
        match (result, &op) {
            (Err(Errno::INTR), Op::Read(_) | Op::Write(_) | Op::Allocate(_)) => {}
            (result, _) => return op_result(result),
        }
    }
}

/// Tries a read that needs no drive, because all or part of the data is in the page cache. `None` when it
/// does.
pub(crate) fn read_cached(transfer: &mut Transfer) -> Option<OpResult> {
    static UNSUPPORTED: AtomicBool = AtomicBool::new(false);
    if UNSUPPORTED.load(Relaxed) {
        return None;
    }
    match read(transfer, libc::RWF_NOWAIT) {
        // Some kernels say zero without being at the end of the file; a thread finds out.
        Ok(0) => None,
        Ok(count) => Some(op_result(Ok(count))),
        Err(Errno::NOSYS) => {
            UNSUPPORTED.store(true, Relaxed);
            None
        }
        // EAGAIN: not in the cache. Any other error will occur again in a thread, which reports it.
        Err(_) => None,
    }
}

/// Tries an operation on a socket. `None` when the socket is not ready for it.
pub(crate) fn attempt(op: &mut Op) -> Option<OpResult> {
    loop {
        let result = match op {
            Op::Receive(message) => receive(message),
            Op::Send(message) => send(message),
            Op::Accept(socket) => accept(socket.as_fd()),
            Op::Await(socket, readiness) => is_ready(socket.as_fd(), *readiness),
            Op::Read(_) | Op::Write(_) | Op::Sync(_) | Op::Allocate(_) => {
                unreachable!("files are always ready")
            }
            #[cfg(feature = "ublk")]
            Op::Command(_) => unreachable!("devices are not waited for as sockets are"),
        };
        match result {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return None,
            result => return Some(op_result(result)),
        }
    }
}

fn op_result(result: Result<usize, Errno>) -> OpResult {
    let count = result.map_err(Errno::raw_os_error)?;
    Ok(u32::try_from(count).expect("a system call moves less than 4 GiB"))
}

fn read(transfer: &mut Transfer, flags: i32) -> Result<usize, Errno> {
    let (at, stretch) = (position(transfer)?, transfer.stretch());
    let slices = raw_slices(&mut transfer.buffer, transfer.done, stretch);
    let (fd, count) = (transfer.descriptor().as_raw_fd(), c_int(slices.len()));
    // SAFETY: the slices are within the buffer's memory, which is in use only here, and by the lenders of the
    // memory, who know that it may change.
    moved(unsafe {
        match flags {
            0 => libc::preadv(fd, slices.as_ptr(), count, at),
            _ => libc::preadv2(fd, slices.as_ptr(), count, at, flags),
        }
    })
}

fn write(transfer: &mut Transfer) -> Result<usize, Errno> {
    let (at, stretch) = (position(transfer)?, transfer.stretch());
    let slices = raw_slices(&mut transfer.buffer, transfer.done, stretch);
    let (fd, count) = (transfer.descriptor().as_raw_fd(), c_int(slices.len()));
    // SAFETY: as in `read`.
    moved(unsafe { libc::pwritev(fd, slices.as_ptr(), count, at) })
}

fn position(transfer: &Transfer) -> Result<libc::off_t, Errno> {
    libc::off_t::try_from(transfer.position()).map_err(|_| Errno::INVAL)
}

fn c_int(count: usize) -> libc::c_int {
    libc::c_int::try_from(count).expect("at most PIECES_MAX")
}

/// What a call that moves bytes gave.
fn moved(result: isize) -> Result<usize, Errno> {
    usize::try_from(result)
        .map_err(|_| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

fn receive(message: &mut Message) -> Result<usize, Errno> {
    let socket = message.socket.clone();
    let rest = message.buffer.len() - message.done;
    let mut slices = slices_mut(&mut message.buffer, message.done, rest);
    let mut none = RecvAncillaryBuffer::default();
    Ok(rustix::net::recvmsg(&socket, &mut slices, &mut none, RecvFlags::DONTWAIT)?.bytes)
}

fn send(message: &Message) -> Result<usize, Errno> {
    let rest = message.buffer.len() - message.done;
    let slices = slices(&message.buffer, message.done, rest);
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(message.descriptor(), &slices, &mut SendAncillaryBuffer::default(), flags)
}

fn accept(socket: BorrowedFd<'_>) -> Result<usize, Errno> {
    is_ready(socket, Readiness::Read)?;
    // The listener may be a blocking one, made for a ring or by the process that passed it, and a connection
    // may vanish after it was announced, or be accepted by another process that shares the socket. This call
    // must not block then.
    let flags = fcntl_getfl(socket)?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(socket, flags | OFlags::NONBLOCK)?;
    }
    let accepted = rustix::net::accept_with(socket, SocketFlags::CLOEXEC)?;
    Ok(usize::try_from(accepted.into_raw_fd()).expect("descriptors are not negative"))
}

fn is_ready(socket: BorrowedFd<'_>, readiness: Readiness) -> Result<usize, Errno> {
    let events = match readiness {
        Readiness::Read => PollFlags::IN,
        Readiness::Write => PollFlags::OUT,
    };
    let mut polled = [PollFd::from_borrowed_fd(socket, events)];
    match poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? {
        0 => Err(Errno::AGAIN),
        _ => Ok(usize::from(polled[0].revents().bits())),
    }
}
