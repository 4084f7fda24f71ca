//! `Storage`: a flat array of bytes on the host side. Formats turn it into a [`Disk`](crate::Disk).
//!
//! Backends implement it: a file, a block device, an object, a peer, a simulated drive. What one *can* do is
//! a field of [`Limits`], not another trait. Every implementation passes
//! [`contract::storage`](crate::contract).
//!
//! # The contract
//!
//! 1. **Any byte range** may be read or written; a storage that can only move aligned blocks does the rest
//!    itself, and reports in [`Limits::block_size`] what it moves without that work. Overlapping requests
//!    that run concurrently leave each sector with the bytes of one of them, or of none that failed. A read
//!    of bytes that are being written returns any mixture of old and new, byte by byte: callers rely on none
//!    of it.
//! 2. **Reads past the end** return zeros. A write past the end grows the storage; the bytes between read as
//!    zero. Where the length is fixed ([`Limits::fixed_len`]) such a write fails with `NoSpace` and changes
//!    nothing.
//! 3. **Durable**: when [`flush`](Storage::flush) returns, every change that had returned before the flush
//!    was *submitted* (first polled) is durable: bytes, zeros, holes and length.
//! 4. **Between two completed flushes anything may happen**: changes reach the medium in any order, in part,
//!    or not at all, 512-byte sector by sector. A sector is old or new, never mixed. A change never harms
//!    other sectors.
//! 5. **A failed write** may have changed any of the sectors it covers, and no other; it may be tried again.
//! 6. **A failed flush is final**: what was written since the last successful flush may be lost although it
//!    can still be read, even after the storage was opened anew. Every later write and flush fails with
//!    `Poisoned` until it is opened anew; code that then relies on what it reads calls
//!    [`reconcile`](Storage::reconcile) first.
//! 7. **Cancellation**: a future that was polled should be polled to its end. When it is dropped earlier, the
//!    operation may still happen, at any later time; no memory is ever freed that the kernel still uses.
//! 8. Futures run on the worker that first polls them and are not moved to another.
//! 9. **Lent memory** ([`Buffer::lent`]) may change while it is written: then each byte stored is one that
//!    was there at some time during the write. Code that must know what was written copies the bytes first
//!    ([`Buffer::owned`]).

use std::sync::Arc;

use crate::pin::Proof;
use crate::units::{BlockSize, ImageOffset, ImageSpan};
use crate::{Buffer, LocalFuture, Result};

/// The properties and abilities of a storage, fixed while it is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Requests whose position and length are aligned to this are transferred without read-modify-write.
    pub block_size: BlockSize,
    /// The unit that the medium writes internally: 4 KiB on most drives, whatever they report on the bus.
    /// Records that must not share fate are kept this far apart.
    pub physical_block: BlockSize,
    /// The length cannot be changed (a block device). It may be extended from outside:
    /// [`Storage::look_at_len`].
    pub fixed_len: bool,
    /// Writes are refused.
    pub read_only: bool,
    /// Space never written before reads as zero: a file that grows does, a block device does not.
    pub grows_zeroed: bool,
    /// `write_zeroes` is done by the host without writing the zeros.
    pub fast_zeroes: bool,
    /// `discard` frees space.
    pub discards: bool,
    /// A flush is cheaper if the written blocks had been written before: then the file system has nothing of
    /// its own to write (ext4, XFS). False where every write goes to a new place, or where there is no file
    /// system in between.
    pub prefers_written: bool,
}

impl Limits {
    /// A file that can grow, moves any byte range, and can do everything.
    pub fn plain() -> Self {
        Self {
            block_size: BlockSize::from_shift(0),
            physical_block: BlockSize::PAGE,
            fixed_len: false,
            read_only: false,
            grows_zeroed: true,
            fast_zeroes: true,
            discards: true,
            prefers_written: false,
        }
    }
}

/// How zeros may be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeroes {
    /// The space stays allocated, so that a later write there cannot fail for want of it.
    Allocated,
    /// The space may be given back to the host.
    MayUnmap,
}

/// A run of a storage, and whether the host stores bytes for it or it is a hole that reads as zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageRun {
    /// Where it lies.
    pub span: ImageSpan,
    /// False for a hole.
    pub is_data: bool,
}

/// A flat array of bytes on the host side. The module has the contract.
#[expect(clippy::len_without_is_empty, reason = "nobody asks whether a drive is empty")]
pub trait Storage: Send + Sync {
    /// Its name in messages: the file's name as the user knows it.
    fn name(&self) -> &str;

    /// Facts about it.
    fn limits(&self) -> &Limits;

    /// The length in bytes, counting every change that has returned.
    fn len(&self) -> u64;

    /// Checks whether a storage of fixed length has been enlarged from outside, and returns the length, as
    /// [`len`](Self::len) does from then on.
    fn look_at_len(&self) -> LocalFuture<'_, Result<u64>> {
        Box::pin(std::future::ready(Ok(self.len())))
    }

    /// What proves that the content is still the same when the storage is opened again, as it was found when it was
    /// opened; `None` where nothing does. A remote storage that has a proof gives no bytes of any other content: a
    /// read fails instead.
    fn proof(&self) -> Option<Proof> {
        None
    }

    /// What proves the content now, as far as the host says so without anything being read: a file may be changed from
    /// outside while it is open. A caller that keeps copies asks after each read: what differs from [`proof`](Self::proof) is
    /// another content. For a storage whose reads fail in that case, this is what was found at opening.
    ///
    /// # Errors
    /// Those of the host.
    fn proof_now(&self) -> LocalFuture<'_, Result<Option<Proof>>> {
        Box::pin(std::future::ready(Ok(self.proof())))
    }

    /// When anything of it was changed last, as the host says it now: a number that only later changes make larger, and that no
    /// program can set. `None` where there is no such thing.
    ///
    /// # Errors
    /// Those of the host.
    fn changed_at(&self) -> LocalFuture<'_, Result<Option<i128>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// What the server of the storage says about it, for people, as it was found when it was opened; empty where there is
    /// none.
    fn description(&self) -> String {
        String::new()
    }

    /// Fills the buffer with the bytes from `at` on and returns it: the same buffer, whose memory may be
    /// lent.
    fn read(&self, at: ImageOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>>;

    /// Writes the buffer's bytes from `at` on.
    fn write(&self, at: ImageOffset, data: Buffer) -> LocalFuture<'_, Result<()>>;

    /// Makes durable what has been written (contract 3).
    fn flush(&self) -> LocalFuture<'_, Result<()>>;

    /// Makes the run read as what is on the medium. After a failed flush a host shows bytes that it has given
    /// up writing, as if they were durable, and no flush fails because of them again. Such bytes are dropped
    /// from the cache, so that the medium is read, or, where they cannot be, written again. True when any
    /// were: the next flush decides. Bytes that were merely not flushed yet stay as they are. The run must
    /// not be written meanwhile.
    fn reconcile(&self, _span: ImageSpan) -> LocalFuture<'_, Result<bool>> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// Makes the run read as zero. A run past the end grows the storage, as a write would.
    fn write_zeroes(&self, span: ImageSpan, how: Zeroes) -> LocalFuture<'_, Result<()>>;

    /// Tells the host that the bytes of the run are no longer needed. Afterwards each sector reads as zero or
    /// as before; the length does not change. Never fails for want of support.
    fn discard(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>>;

    /// Truncates the storage to `len` bytes or extends it with zeros. `Unsupported` where the length is
    /// fixed.
    fn set_len(&self, len: u64) -> LocalFuture<'_, Result<()>>;

    /// Reserves space for the run, so that writes there do not fail for want of it; grows the storage to hold
    /// it. Bytes do not change. `Unsupported` where the host cannot.
    fn preallocate(&self, span: ImageSpan) -> LocalFuture<'_, Result<()>>;

    /// Which parts of the run (clipped to the end of the storage) are data and which are holes: from its
    /// start, in order, without gaps, neighbours merged. Where the host cannot report holes, everything is
    /// data. The answer may stop early after any run but is not empty unless the run is.
    fn runs(&self, span: ImageSpan) -> LocalFuture<'_, Result<Vec<StorageRun>>>;
}

/// A storage shared by all its users.
pub type SharedStorage = Arc<dyn Storage>;
