//! `Disk`: what a guest sees. Formats make it from a [`Storage`](crate::Storage), layers make it from another
//! disk, exports serve it.
//!
//! # What a guest may rely on
//!
//! This is the contract. It stands here and nowhere else; tests refer to it by number.
//!
//! 1. **Durable**: when a flush returns, every write that had returned before the flush was submitted is durable;
//!    a write with FUA is itself durable when it returns.
//! 2. **Old or new, nothing else**: after a crash each 512-byte sector reads as its last flushed value or as a
//!    value written later. Never zeros that were not written, never another block's bytes, never bytes of a freed
//!    cluster, never the base where a flushed zero or discard stands.
//! 3. **Snapshots are fixed**: a snapshot that was acknowledged never changes, whatever crashes.
//! 4. **Recovery is idempotent**, may itself crash, and is bounded. (What bounds it is the format's to say.)
//! 5. **Errors are told**: a failed host read, write or ENOSPC fails the guest request it belongs to and nothing
//!    else; a failed host *flush* is never retried as if nothing had happened: the disk refuses writes from then
//!    on until it is reopened and recovered.
//! 6. **Nothing leaks**: after recovery no cluster is lost.
//! 7. **A killed server loses nothing that was flushed.** Writes that completed without a flush may be lost with
//!    it, as with any write-back server.
//!
//! The medium is that of the [`Storage`](crate::storage) contract: anything goes between two completed flushes,
//! sector by sector. A power cut, a killed process (the host's page cache survives) and a failed flush (dirty
//! pages may be gone and look clean) are three different crashes.
//!
//! # What a caller must do
//!
//! 8. Requests stay inside [`Geometry::size`]; others fail with `Invalid` and change nothing. Any byte range is
//!    legal; [`Geometry::block_size`] tells what is moved without reading and merging. Length zero is legal.
//! 9. Requests may run at the same time, on any worker. Overlapping writes leave each sector with the bytes of one
//!    of them. A read beside a write gives old or new bytes, sector by sector.
//! 10. **Cancellation**: a future that was polled is polled to its end, unless the whole disk is thrown away
//!     without `close`, as in a crash. A disk may refuse writes after a future was dropped half way.
//! 11. Futures run on the worker that polls them first and are not moved to another.
//! 12. After [`close`](Disk::close) has returned every request fails with `Closed`. `close` is called when no other
//!     request is running.
//! 13. The bytes of a write may be lent, and change while it is under way ([`Buffer::lent`]). What is written is what they
//!     were at some time of it, byte by byte; such a write harms nothing else, and is as durable as any.
//! 14. [`tend`](Disk::tend) may be called at any time, beside requests, and need not be called at all: whatever it does
//!     or leaves undone, the other answers are the same. Its future is polled to its end, too.

use std::sync::Arc;
use std::time::Duration;

use crate::storage::SharedStorage;
use crate::units::{BlockSize, GuestOffset, GuestSpan, ImageOffset};
use crate::{Buffer, LocalFuture, Result};

/// What a disk is. Facts; only `size` may change, when the disk is resized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// The size in bytes.
    pub size: u64,
    /// Requests aligned to this are served without reading and merging.
    pub block_size: BlockSize,
    /// Requests of a multiple of this are best: the cluster size, or what the storage likes.
    pub preferred_size: BlockSize,
    /// Writes are refused with `ReadOnly`.
    pub read_only: bool,
    /// `write_zeroes` can be done without writing the zeros.
    pub fast_zeroes: bool,
}

/// What a write must do besides writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteFlags {
    /// It is durable when it returns (contract 1).
    pub fua: bool,
}

impl WriteFlags {
    /// Durable when it returns.
    pub const FUA: Self = Self { fua: true };
}

/// How zeros are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZeroFlags {
    /// Durable when it returns.
    pub fua: bool,
    /// The space may be given back; otherwise a later write there must not fail for want of space where the
    /// disk can help it.
    pub may_unmap: bool,
    /// Fail with `Unsupported`, changing nothing, rather than write the zeros one by one.
    pub fast_only: bool,
}

/// Where the bytes of an extent are.
#[derive(Clone)]
pub enum Place {
    /// It reads as zero. `allocated` tells whether space is set aside for it.
    Zero {
        /// Space is set aside for it.
        allocated: bool,
    },
    /// The bytes lie in the storage, one after the other, from `at` on. They may move as soon as somebody writes.
    Data {
        /// Which storage.
        storage: SharedStorage,
        /// Where the first byte is.
        at: ImageOffset,
    },
    /// The bytes are stored compressed.
    Compressed,
    /// This disk has nothing of its own there: the disk below decides, and where there is none it reads as zero.
    Below,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Zero { allocated } => write!(f, "Zero {{ allocated: {allocated} }}"),
            Self::Data { storage, at } => write!(f, "Data {{ {} at {at} }}", storage.name()),
            Self::Compressed => f.write_str("Compressed"),
            Self::Below => f.write_str("Below"),
        }
    }
}

/// A run of the disk whose bytes are all in one kind of place, and one after the other there.
#[derive(Debug, Clone)]
pub struct Extent {
    /// Which bytes of the disk.
    pub span: GuestSpan,
    /// Where they are.
    pub place: Place,
}

/// How much more a disk can store that allocates within a storage of fixed length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// How long the storage is, in bytes: it was just looked at.
    pub len: u64,
    /// So many bytes can be stored before it is full.
    pub free: u64,
    /// For more than that the storage must be longer, by so many bytes at least.
    pub step: u64,
    /// All of the disk fits a storage that is so long, in bytes; its snapshots take more.
    pub len_for_all: u64,
    /// So many requests failed because it was full.
    pub refused: u64,
}

/// What a guest sees. The module has the contract.
pub trait Disk: Send + Sync {
    /// Facts about it.
    fn geometry(&self) -> Geometry;

    /// The disk that answers where this one has [`Place::Below`].
    fn below(&self) -> Option<Arc<dyn Disk>> {
        None
    }

    /// Fills the buffer with the bytes from `at` on and gives it back: that one, whose memory may be lent, not another.
    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>>;

    /// Writes the buffer's bytes from `at` on.
    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>>;

    /// Makes durable what has been written (contract 1).
    fn flush(&self) -> LocalFuture<'_, Result<()>>;

    /// Makes the run read as zero.
    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>>;

    /// Tells the disk that nobody needs the bytes of the run. Afterwards each sector reads as zero or as before,
    /// never as the disk below.
    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>>;

    /// Where the bytes of the run are: from its start, in order, without gaps. The answer may stop early after any
    /// extent, but is not empty unless the run is.
    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>>;

    /// Does a little of the work that nobody waits for: called every now and then, with the time of one clock. True when
    /// there is more to do at once. What fails is tried again, or given up; the guest is not told.
    fn tend(&self, _now: Duration) -> LocalFuture<'_, bool> {
        Box::pin(std::future::ready(false))
    }

    /// How much more can be stored; nothing where the host decides that, as for a file.
    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Flushes, writes home what is still only in memory, marks the image clean and lets go of it. Closing twice is
    /// legal.
    fn close(&self) -> LocalFuture<'_, Result<()>>;
}

/// A disk shared by all who use it.
pub type SharedDisk = Arc<dyn Disk>;
