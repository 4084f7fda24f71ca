//! One operation of the kernel, together with everything the kernel uses until it is done.
//!
//! ```text
//!   future ── Op ──▶ driver ── the kernel works on its memory ──▶ driver ── Op + result ──▶ future
//! ```
//!
//! 1. An operation owns its buffer, its descriptor and its place at the gate; the driver owns the operation
//!    until its terminal completion. So nothing that the kernel still uses is freed or released, whatever has
//!    been dropped meanwhile.
//! 2. [`Op::settle`] runs exactly once, at the terminal completion, even if the future was dropped: it
//!    records what the operation did to the file (its length, a failed flush).
//! 3. An operation moves one stretch of a transfer. The caller continues a short one with the same operation.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use smallvec::SmallVec;
use vellum_core::Buffer;

use crate::blocking::Backend;
use crate::file::gate::Passage;
use crate::file::handle::Handle;

/// The most pieces of memory that one system call takes (`UIO_MAXIOV`).
pub(crate) const PIECES_MAX: usize = 1024;

/// The most bytes that one system call moves (`MAX_RW_COUNT`).
pub(crate) const TRANSFER_MAX: usize = 0x7fff_f000;

/// What an operation gave: a count, or the `errno` it failed with.
pub(crate) type OpResult = Result<u32, i32>;

/// One operation of the kernel.
pub(crate) enum Op {
    /// Fill a buffer from a file.
    Read(Transfer),
    /// Write a buffer to a file.
    Write(Transfer),
    /// Make a file's data durable (`fdatasync`).
    Sync(Arc<Handle>),
    /// Reserve, zero or free a run of a file (`fallocate`).
    Allocate(Allocation),
    /// Fill the front of a buffer from a socket.
    Receive(Message),
    /// Send a buffer to a socket.
    Send(Message),
    /// Take the next connection; the result is its descriptor.
    Accept(Arc<OwnedFd>),
    /// Wait until a descriptor can be read or written.
    Await(Arc<OwnedFd>, Readiness),
    /// Send a device a command of its own, and wait for its answer (`IORING_OP_URING_CMD`).
    #[cfg(feature = "ublk")]
    Command(Command),
}

/// What to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// There is something to read, or nothing ever will be.
    Read,
    /// There is room to write, or a connection has been made or refused.
    Write,
}

/// A buffer on its way to or from a file.
pub(crate) struct Transfer {
    pub(crate) file: Arc<Handle>,
    /// Through the page cache, although the file is open for direct transfers.
    pub(crate) cached: bool,
    /// Where in the file the buffer's first byte goes.
    pub(crate) at: u64,
    pub(crate) buffer: Buffer,
    /// How many bytes of the buffer have been moved.
    pub(crate) done: usize,
    /// What keeps conflicting requests away; given up when the operation ends.
    #[expect(dead_code, reason = "it is held, and does its work when it is dropped")]
    pub(crate) passage: Option<Passage>,
}

/// A run of a file to reserve, zero or free.
pub(crate) struct Allocation {
    pub(crate) file: Arc<Handle>,
    /// The flags of `fallocate`.
    pub(crate) mode: rustix::fs::FallocateFlags,
    pub(crate) at: u64,
    pub(crate) len: u64,
    pub(crate) passage: Option<Passage>,
}

/// A command to a device. It contains no address, so the kernel uses no memory of ours.
#[cfg(feature = "ublk")]
pub(crate) struct Command {
    pub(crate) device: Arc<OwnedFd>,
    pub(crate) code: u32,
    pub(crate) words: [u8; 16],
}

/// A buffer on its way to or from a socket.
pub(crate) struct Message {
    pub(crate) socket: Arc<OwnedFd>,
    pub(crate) buffer: Buffer,
    /// How many bytes of the buffer have been moved.
    pub(crate) done: usize,
}

impl Op {
    /// Notes what the operation did to its file. Called once, by the driver, with the terminal result.
    pub(crate) fn settle(&self, result: OpResult) {
        match (self, result) {
            (Self::Write(transfer), Ok(count)) => {
                transfer.file.note_end(transfer.at + transfer.done as u64 + u64::from(count));
            }
            (Self::Allocate(allocation), Ok(_)) if allocation.grows() => {
                allocation.file.note_end(allocation.at + allocation.len);
            }
            // The kernel reports lost pages once. The failure has to be recorded here, even if the future was
            // dropped.
            (Self::Sync(file), Err(errno)) if errno != libc::ECANCELED => file.poison(),
            _ => {}
        }
    }

    /// Disposes of an operation that has ended and whose future was dropped.
    pub(crate) fn discard(self, result: OpResult) {
        if let (Self::Accept(_), Ok(descriptor)) = (&self, result) {
            drop(accepted(descriptor));
        }
    }

    /// Whether asking the kernel to give up makes sense. A flush that is cut short would leave us not knowing
    /// what it had learned.
    pub(crate) fn may_cancel(&self) -> bool {
        // A device answers its commands when it is stopped, and the kernel has no other way to end them.
        !matches!(self, Self::Sync(_) | Self::Allocate(_)) && !self.ends_with_its_ring()
    }

    /// Whether the kernel ends the operation when the ring is closed, and uses no memory of ours until then:
    /// closing does not wait for it.
    pub(crate) fn ends_with_its_ring(&self) -> bool {
        #[cfg(feature = "ublk")]
        if let Self::Command(_) = self {
            return true;
        }
        false
    }

    /// What it may have to wait for, besides sockets and devices, which are waited for otherwise.
    pub(crate) fn backend(&self) -> Backend {
        self.file().map_or(Backend::None, |file| file.storage().backend)
    }

    /// The backend that a thread of the kernel waits for until the operation has ended; none where a ring
    /// does without.
    pub(crate) fn waits_for(&self) -> Option<Backend> {
        let file = self.file()?.storage();
        let is_transfer = matches!(self, Self::Read(_) | Self::Write(_));
        (!is_transfer || file.makes_wait).then_some(file.backend)
    }

    /// The file that it copies to or from, as a number that no other open file has, and whether it writes.
    pub(crate) fn copied_file(&self) -> Option<(usize, bool)> {
        match self {
            Self::Read(transfer) | Self::Write(transfer) => {
                Some((Arc::as_ptr(&transfer.file).addr(), matches!(self, Self::Write(_))))
            }
            _ => None,
        }
    }

    /// How many bytes the kernel copies for it at once, on the submitting thread, if all of them are in the
    /// page cache.
    pub(crate) fn copies(&self) -> usize {
        match self {
            Self::Read(transfer) | Self::Write(transfer) if transfer.is_cached() => transfer.stretch(),
            _ => 0,
        }
    }

    fn file(&self) -> Option<&Handle> {
        match self {
            Self::Read(transfer) | Self::Write(transfer) => Some(&transfer.file),
            Self::Sync(file) => Some(file),
            Self::Allocate(allocation) => Some(&allocation.file),
            _ => None,
        }
    }

    /// Which socket it is about; none for files.
    pub(crate) fn socket(&self) -> Option<(&Arc<OwnedFd>, Readiness)> {
        match self {
            Self::Receive(message) => Some((&message.socket, Readiness::Read)),
            Self::Send(message) => Some((&message.socket, Readiness::Write)),
            Self::Accept(socket) => Some((socket, Readiness::Read)),
            Self::Await(socket, readiness) => Some((socket, *readiness)),
            Self::Read(_) | Self::Write(_) | Self::Sync(_) | Self::Allocate(_) => None,
            #[cfg(feature = "ublk")]
            Self::Command(_) => None,
        }
    }

    /// The transfer of a read or write, given back.
    pub(crate) fn into_transfer(self) -> Transfer {
        match self {
            Self::Read(transfer) | Self::Write(transfer) => transfer,
            _ => unreachable!("a transfer comes back as it was given"),
        }
    }

    /// The message of a receive or send, given back.
    pub(crate) fn into_message(self) -> Message {
        match self {
            Self::Receive(message) | Self::Send(message) => message,
            _ => unreachable!("a message comes back as it was given"),
        }
    }
}

/// The descriptor that an accept gave.
pub(crate) fn accepted(descriptor: u32) -> OwnedFd {
    let descriptor = i32::try_from(descriptor).expect("descriptors are small numbers");
    // SAFETY: the kernel has just made the descriptor for us, and an operation's result is used once.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

impl Transfer {
    /// The descriptor to use.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.descriptor(self.cached)
    }

    /// Whether it goes through the page cache.
    fn is_cached(&self) -> bool {
        self.cached || !self.file.is_direct()
    }

    /// Where in the file the next byte goes.
    pub(crate) fn position(&self) -> u64 {
        self.at + self.done as u64
    }

    /// How many bytes the next system call should move: all that is left, within what the kernel takes at
    /// once. When that cuts the transfer it cuts at a sector, so that overlapping writes do not mix inside of
    /// one.
    pub(crate) fn stretch(&self) -> usize {
        let rest = self.buffer.len() - self.done;
        if self.buffer.piece_count() <= PIECES_MAX && rest <= TRANSFER_MAX {
            return rest;
        }
        let mut skip = self.done;
        let left = self.buffer.piece_lengths().filter_map(|len| {
            let before = skip.min(len);
            skip -= before;
            (before < len).then_some(len - before)
        });
        let taken: usize = left.take(PIECES_MAX).sum();
        let taken = taken.min(TRANSFER_MAX);
        if taken == rest {
            return rest;
        }
        let beyond = usize::try_from((self.position() + taken as u64) % 512).expect("below 512");
        if beyond < taken { taken - beyond } else { taken }
    }
}

impl Allocation {
    fn grows(&self) -> bool {
        !self.mode.contains(rustix::fs::FallocateFlags::KEEP_SIZE)
    }

    /// The descriptor to use.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.descriptor(false)
    }
}

impl Message {
    /// The descriptor to use.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The pieces of the buffer that are left after its first `done` bytes.
fn remaining(buffer: &Buffer, done: usize) -> impl Iterator<Item = &[u8]> {
    let mut skip = done;
    buffer.pieces().filter_map(move |piece| {
        let part = skip.min(piece.len());
        skip -= part;
        (part < piece.len()).then(|| &piece[part..])
    })
}

/// The memory of `len` bytes of the buffer from position `done` on, for a system call that reads it.
pub(crate) fn slices(buffer: &Buffer, done: usize, len: usize) -> SmallVec<[IoSlice<'_>; 4]> {
    let mut left = len;
    remaining(buffer, done)
        .map_while(|piece| {
            let part = left.min(piece.len());
            left -= part;
            (part > 0).then(|| IoSlice::new(&piece[..part]))
        })
        .take(PIECES_MAX)
        .collect()
}

/// The memory of `len` bytes of the buffer from position `done` on, for a system call that fills it.
pub(crate) fn slices_mut(buffer: &mut Buffer, done: usize, len: usize) -> SmallVec<[IoSliceMut<'_>; 4]> {
    let (mut skip, mut left) = (done, len);
    buffer
        .pieces_mut()
        .filter_map(|piece| {
            let start = skip.min(piece.len());
            skip -= start;
            let part = left.min(piece.len() - start);
            left -= part;
            (part > 0).then(|| IoSliceMut::new(&mut piece[start..start + part]))
        })
        .take(PIECES_MAX)
        .collect()
}

/// The memory of `len` bytes of the buffer from position `done` on, in the form that the kernel wants.
pub(crate) fn raw_slices(buffer: &mut Buffer, done: usize, len: usize) -> SmallVec<[libc::iovec; 1]> {
    let (mut skip, mut left) = (done, len);
    buffer
        .raw_pieces()
        .filter_map(|(start, size)| {
            let before = skip.min(size);
            skip -= before;
            let part = left.min(size - before);
            left -= part;
            let base = start.wrapping_add(before).cast();
            (part > 0).then_some(libc::iovec { iov_base: base, iov_len: part })
        })
        .take(PIECES_MAX)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_pieces(sizes: &[usize]) -> Buffer {
        let mut buffer = Buffer::empty();
        for size in sizes {
            buffer.append(Buffer::zeroed(*size));
        }
        buffer
    }

    #[test]
    fn what_is_left_is_cut_inside_of_pieces() {
        let mut buffer = in_pieces(&[100, 50, 30]);
        let lengths: Vec<_> = slices(&buffer, 120, 40).iter().map(|slice| slice.len()).collect();
        assert_eq!(lengths, [30, 10]);
        let lengths: Vec<_> = slices_mut(&mut buffer, 120, 40).iter().map(|slice| slice.len()).collect();
        assert_eq!(lengths, [30, 10]);
        let raw: Vec<_> = raw_slices(&mut buffer, 120, 40).iter().map(|iovec| iovec.iov_len).collect();
        assert_eq!(raw, [30, 10]);
        assert_eq!(slices(&buffer, 180, 10).len(), 0);
        assert_eq!(slices(&buffer, 0, 180).len(), 3);
    }

    #[test]
    fn a_failed_flush_poisons_its_file_and_a_cancelled_one_does_not() {
        let file = Handle::for_test();
        Op::Sync(file.clone()).settle(Ok(0));
        Op::Sync(file.clone()).settle(Err(libc::ECANCELED));
        assert!(!file.is_poisoned());
        Op::Sync(file.clone()).settle(Err(libc::EIO));
        assert!(file.is_poisoned());
    }

    #[test]
    fn a_write_that_ended_counts_for_the_length_and_one_that_failed_does_not() {
        let file = Handle::for_test();
        let write = |at, done| {
            let buffer = Buffer::zeroed(100);
            Op::Write(Transfer { file: file.clone(), cached: false, at, buffer, done, passage: None })
        };
        write(1000, 10).settle(Ok(50));
        assert_eq!(file.len(), 1060);
        write(5000, 0).settle(Err(libc::EIO));
        write(0, 0).settle(Ok(100));
        assert_eq!(file.len(), 1060);
    }

    #[test]
    fn a_transfer_of_too_many_pieces_is_cut_at_a_sector() {
        let file = Handle::for_test();
        let buffer = in_pieces(&[100; 1500]);
        let transfer = Transfer { file, cached: false, at: 10, buffer, done: 0, passage: None };
        let stretch = transfer.stretch();
        assert!(stretch <= 100 * PIECES_MAX && stretch > 100 * PIECES_MAX - 512);
        assert_eq!((10 + stretch) % 512, 0);
    }
}
