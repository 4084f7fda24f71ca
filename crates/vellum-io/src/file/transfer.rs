//! One run of bytes to or from a file, continued until it is complete.
//!
//! The kernel may move less than requested: at the end of the file, at the end of the space, at a signal, or
//! because there were too many pieces for one call. The rest is requested again, with the same operation.
//!
//! 1. A read that meets the end of the file fills the rest with zeros. It fails where a file that is only read, or
//!    keeps its length, has become shorter than it was.
//! 2. A write either completes as a whole or fails.

use vellum_core::{Buffer, Error, ErrorKind, ImageOffset, ImageSpan, Result};

use super::gate::Passage;
use super::{File, POSITION_MAX};
use crate::driver::op::{Op, PIECES_MAX, Transfer};
use crate::driver::{submit, submit_blocking};

/// How often one transfer may come back unmoved before a thread performs it, blocking as long as it takes;
/// and how often in all.
const FROM_RING_MAX: u32 = 8;
const UNMOVED_MAX: u32 = 16;

impl File {
    /// Reads through the page cache, or whole blocks.
    pub(super) async fn read_run(&self, at: u64, buffer: Buffer) -> Result<Buffer> {
        let len = buffer.len();
        if len == 0 {
            return Ok(buffer);
        }
        let mut transfer = self.transfer(at, buffer, None);
        if at.checked_add(len as u64).is_none_or(|end| end > POSITION_MAX) {
            // No file reaches that far, so all of it is past the end; and the kernel would not accept the
            // position.
            zero_from(&mut transfer.buffer, 0);
            return Ok(transfer.buffer);
        }
        let (mut unmoved, mut was_odd) = (0, false);
        loop {
            let (result, op) = match unmoved {
                ..FROM_RING_MAX => submit(Op::Read(transfer)).await,
                _ => submit_blocking(Op::Read(transfer)).await,
            };
            transfer = op.into_transfer();
            match result {
                Ok(count) => {
                    transfer.done += count as usize;
                    if transfer.done == len {
                        return Ok(transfer.buffer);
                    }
                    // With O_DIRECT, an odd count means the end of the file, or that lent memory ended in the
                    // middle. The second time it is the end, whatever the recorded length.
                    let whole =
                        self.direct.as_ref().map_or(transfer.done, |direct| direct.whole(transfer.done));
                    let is_odd = whole != transfer.done;
                    if count == 0 || is_odd && (was_odd || transfer.position() >= self.handle.len()) {
                        if transfer.position() < self.handle.len() {
                            self.ended_early().await?;
                        }
                        zero_from(&mut transfer.buffer, transfer.done);
                        return Ok(transfer.buffer);
                    }
                    (transfer.done, was_odd) = (whole, is_odd);
                }
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) if unmoved < UNMOVED_MAX => unmoved += 1,
                Err(errno) => return Err(Error::os(errno, self.doing("read", at, len as u64))),
            }
        }
    }

    /// Writes through the page cache.
    pub(super) async fn write_run(&self, at: u64, data: Buffer) -> Result<()> {
        self.check_write(at, data.len())?;
        if data.is_empty() {
            return Ok(());
        }
        // Many tiny pieces could not be cut at a sector; they are worth a copy.
        let tiny = data.piece_count() > PIECES_MAX && data.len() / data.piece_count() < 1024;
        let data = if tiny { data.contiguous() } else { data };
        self.write_all(self.transfer(at, data, None)).await.map(drop)
    }

    /// Whether a write there may be made.
    pub(super) fn check_write(&self, at: u64, len: usize) -> Result<()> {
        let span = ImageSpan::checked(ImageOffset::new(at), len as u64).ok_or_else(|| {
            Error::new(
                ErrorKind::NoSpace,
                format!("a write of {len} bytes at {at:#x} of {} passes 2^64", self.name),
            )
        })?;
        self.check_change(span)
    }

    pub(super) fn transfer(&self, at: u64, buffer: Buffer, passage: Option<Passage>) -> Transfer {
        Transfer { file: self.handle.clone(), cached: false, at, buffer, done: 0, passage }
    }

    /// Writes all of it and returns the buffer.
    pub(super) async fn write_all(&self, mut transfer: Transfer) -> Result<Buffer> {
        let (at, len) = (transfer.at, transfer.buffer.len());
        let mut unmoved = 0;
        loop {
            let (result, op) = match unmoved {
                ..FROM_RING_MAX => submit(Op::Write(transfer)).await,
                _ => submit_blocking(Op::Write(transfer)).await,
            };
            transfer = op.into_transfer();
            let before = transfer.done;
            match result {
                // The kernel's way to report that there is no room, where it has no other.
                Ok(0) => return Err(Error::os(libc::ENOSPC, self.doing("write", at, len as u64))),
                Ok(count) => {
                    transfer.done += count as usize;
                    if transfer.done == len {
                        return Ok(transfer.buffer);
                    }
                    if let (Some(direct), false) = (&self.direct, transfer.cached) {
                        // The next call has to start at a block again, though part of it is written already.
                        transfer.done = direct.whole(transfer.done);
                    }
                    if transfer.done == before && unmoved == UNMOVED_MAX {
                        return Err(Error::os(libc::EIO, self.doing("write", at, len as u64)));
                    }
                    unmoved += u32::from(transfer.done == before);
                }
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) if unmoved < UNMOVED_MAX => unmoved += 1,
                Err(errno) => return Err(Error::os(errno, self.doing("write", at, len as u64))),
            }
        }
    }
}

/// Sets the bytes of the buffer from position `from` on to zero.
fn zero_from(buffer: &mut Buffer, from: usize) {
    let mut rest = buffer.split_off(from);
    rest.fill(0);
    buffer.append(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_start_in_the_middle_of_a_piece() {
        let mut buffer = Buffer::copy_of(&[1; 10]);
        buffer.append(Buffer::copy_of(&[2; 10]));
        buffer.append(Buffer::copy_of(&[3; 10]));
        zero_from(&mut buffer, 15);
        let mut expected = vec![1; 10];
        expected.extend([2; 5]);
        expected.resize(30, 0);
        assert_eq!(buffer.to_vec(), expected);
    }
}
