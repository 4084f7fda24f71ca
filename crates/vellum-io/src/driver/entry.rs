//! How each operation is encoded for the ring.
//!
//! A buffer of one piece is passed as address and length. A buffer of several pieces is passed as a vector
//! that the slot keeps with the operation, on the heap, because the slot itself may move when the table of
//! slots grows.

use std::os::fd::AsRawFd;
use std::ptr::null_mut;

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};
use smallvec::SmallVec;

use super::op::{Message, Op, Readiness, Transfer, raw_slices};
use super::shares::Line;

/// What a slot keeps until the terminal completion: the operation, and what the ring's entry points to.
pub(crate) struct Held {
    pub(crate) op: Op,
    /// Whose turn it takes among the kernel's threads; none where a ring does without.
    pub(crate) line: Option<Line>,
    /// On the heap whenever an entry points to it, which is from two pieces on.
    iovecs: SmallVec<[libc::iovec; 1]>,
    header: Option<Box<libc::msghdr>>,
}

impl Held {
    pub(crate) fn new(op: Op, line: Option<Line>) -> Self {
        Self { op, line, iovecs: SmallVec::new(), header: None }
    }

    /// The entry that requests the operation from the kernel. What it points to stays valid until `self` is
    /// dropped or makes another entry; `self` may be moved.
    pub(crate) fn entry(&mut self) -> squeue::Entry {
        match &mut self.op {
            Op::Read(transfer) => {
                self.iovecs = transfer_slices(transfer);
                let (fd, at) = (Fd(transfer.descriptor().as_raw_fd()), transfer.position());
                match &self.iovecs[..] {
                    [one] => opcode::Read::new(fd, one.iov_base.cast(), length(one)).offset(at).build(),
                    many => opcode::Readv::new(fd, many.as_ptr(), count(many)).offset(at).build(),
                }
            }
            Op::Write(transfer) => {
                self.iovecs = transfer_slices(transfer);
                let (fd, at) = (Fd(transfer.descriptor().as_raw_fd()), transfer.position());
                match &self.iovecs[..] {
                    [one] => opcode::Write::new(fd, one.iov_base.cast::<u8>().cast_const(), length(one))
                        .offset(at)
                        .build(),
                    many => opcode::Writev::new(fd, many.as_ptr(), count(many)).offset(at).build(),
                }
            }
            Op::Sync(file) => {
                let fd = Fd(file.descriptor(false).as_raw_fd());
                opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build()
            }
            Op::Allocate(allocation) => {
                let fd = Fd(allocation.descriptor().as_raw_fd());
                let mode = i32::try_from(allocation.mode.bits()).expect("the flags of fallocate are small");
                opcode::Fallocate::new(fd, allocation.len).offset(allocation.at).mode(mode).build()
            }
            Op::Receive(message) => {
                self.iovecs = message_slices(message);
                let fd = Fd(message.descriptor().as_raw_fd());
                match &self.iovecs[..] {
                    [one] => opcode::Recv::new(fd, one.iov_base.cast(), length(one)).build(),
                    _ => opcode::RecvMsg::new(fd, self.message_header()).build(),
                }
            }
            Op::Send(message) => {
                self.iovecs = message_slices(message);
                let fd = Fd(message.descriptor().as_raw_fd());
                match &self.iovecs[..] {
                    [one] => opcode::Send::new(fd, one.iov_base.cast::<u8>().cast_const(), length(one))
                        .flags(libc::MSG_NOSIGNAL)
                        .build(),
                    _ => opcode::SendMsg::new(fd, self.message_header().cast_const())
                        .flags(libc::MSG_NOSIGNAL.cast_unsigned())
                        .build(),
                }
            }
            Op::Accept(socket) => {
                let fd = Fd(socket.as_raw_fd());
                opcode::Accept::new(fd, null_mut(), null_mut()).flags(libc::SOCK_CLOEXEC).build()
            }
            Op::Await(socket, readiness) => {
                let events = match readiness {
                    Readiness::Read => libc::POLLIN,
                    Readiness::Write => libc::POLLOUT,
                };
                let events = u32::from(events.cast_unsigned());
                opcode::PollAdd::new(Fd(socket.as_raw_fd()), events).build()
            }
            #[cfg(feature = "ublk")]
            Op::Command(command) => {
                let fd = Fd(command.device.as_raw_fd());
                opcode::UringCmd16::new(fd, command.code).cmd(command.words).build()
            }
        }
    }

    /// A message header over the vector.
    fn message_header(&mut self) -> *mut libc::msghdr {
        let header = self.header.insert(Box::new(libc::msghdr {
            msg_name: null_mut(),
            msg_namelen: 0,
            msg_iov: null_mut(),
            msg_iovlen: 0,
            msg_control: null_mut(),
            msg_controllen: 0,
            msg_flags: 0,
        }));
        header.msg_iov = self.iovecs.as_mut_ptr();
        header.msg_iovlen = self.iovecs.len();
        &raw mut **header
    }
}

fn transfer_slices(transfer: &mut Transfer) -> SmallVec<[libc::iovec; 1]> {
    let stretch = transfer.stretch();
    raw_slices(&mut transfer.buffer, transfer.done, stretch)
}

fn message_slices(message: &mut Message) -> SmallVec<[libc::iovec; 1]> {
    let rest = message.buffer.len() - message.done;
    raw_slices(&mut message.buffer, message.done, rest)
}

fn length(iovec: &libc::iovec) -> u32 {
    // A longer piece is moved in part; the caller continues.
    u32::try_from(iovec.iov_len).unwrap_or(u32::MAX)
}

fn count(iovecs: &[libc::iovec]) -> u32 {
    u32::try_from(iovecs.len()).expect("at most PIECES_MAX")
}
