//! `Disk`: what a guest sees. Formats make it from a [`Storage`](crate::Storage), layers make it from another
//! disk, exports serve it.
//!
//! # What a guest may rely on
//!
//! This is the contract. It is written here and nowhere else; tests refer to it by number.
//!
//! 1. **Durable**: when a flush returns, every write that had returned before the flush was submitted is
//!    durable; a write with FUA is itself durable when it returns.
//! 2. **Old or new, nothing else**: after a crash each 512-byte sector reads as its last flushed value or as
//!    a value written later. Never zeros that were not written, never another block's bytes, never bytes of a
//!    freed cluster, never the base where a flushed zero or discard stands.
//! 3. **Snapshots are fixed**: a snapshot that was acknowledged never changes, whatever crashes.
//! 4. **Recovery is idempotent**, may itself crash, and is bounded. (The format states the bound.)
//! 5. **Errors are reported**: a failed host read, write or ENOSPC fails the guest request it belongs to and
//!    nothing else; a failed host *flush* is never retried as if nothing had happened: the disk refuses
//!    writes from then on until it is reopened and recovered. Where that happens without its users noticing,
//!    the next flush of each fails, once ([`losses`](crate::losses)).
//! 6. **Nothing leaks**: after recovery no cluster is lost.
//! 7. **A killed server loses nothing that was flushed.** Writes that completed without a flush may be lost
//!    with it, as with any write-back server.
//!
//! The medium is that of the [`Storage`](crate::storage) contract: anything may happen between two completed
//! flushes, sector by sector. A power cut, a killed process (the host's page cache survives) and a failed
//! flush (dirty pages may be gone and look clean) are three different crashes.
//!
//! # What a caller must do
//!
//! 8. Requests stay inside [`Geometry::size`]; others fail with `Invalid` and change nothing. Any byte range
//!    is legal; [`Geometry::block_size`] is the unit that is written without read-modify-write. Length zero
//!    is legal.
//! 9. Requests may run concurrently, on any worker. Overlapping writes leave each sector with the bytes of
//!    one of them. A read concurrent with a write of the same bytes returns old and new ones in any mixture,
//!    also within a sector: the host's page cache copies without a lock.
//! 10. **Cancellation**: a future that was polled is polled to its end, unless the whole disk is thrown away
//!     without `close`, as in a crash. A disk may refuse writes after a future was dropped half way.
//! 11. Futures run on the worker that first polls them and are not moved to another.
//! 12. After [`close`](Disk::close) has returned every request fails with `Closed`. `close` is called when no
//!     other request is running.
//! 13. The bytes of a write may be lent, and change while it is in flight ([`Buffer::lent`]). Each byte that
//!     is written is one that was there at some time during the write. Such a write harms nothing else, and
//!     is as durable as any.
//! 14. [`tend`](Disk::tend) may be called at any time, concurrently with requests, and need not be called at
//!     all: whatever it does or leaves undone, the answers of other requests are the same. Its future is also
//!     polled to its end.
//! 15. [`fill`](Disk::fill) is given the bytes that the disk below has, read from it while this disk was open.
//!     It changes no answer of any other request, now or after a crash. It waits for no other request and asks
//!     for no flush. What it keeps is as durable as a write that was not flushed: it may be lost, and the disk
//!     then reads the disk below as before. What is claimed, no longer [`Place::Below`], or seen by a snapshot
//!     is dropped.

use std::sync::Arc;
use std::time::Duration;

use crate::losses::Losses;
use crate::storage::SharedStorage;
use crate::units::{BlockSize, GuestOffset, GuestSpan, ImageOffset};
use crate::{Buffer, Error, LocalFuture, Result};

/// The properties of a disk. Only `size` may change, when the disk is resized.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// The size in bytes.
    pub size: u64,
    /// Requests aligned to this are served without read-modify-write.
    pub block_size: BlockSize,
    /// Requests of a multiple of this are best: the cluster size, or what the storage prefers.
    pub preferred_size: BlockSize,
    /// Writes are refused with `ReadOnly`.
    pub read_only: bool,
    /// `write_zeroes` can be done without writing the zeros.
    pub fast_zeroes: bool,
}

/// Options of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteFlags {
    /// The write is durable when it returns (contract 1).
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
    /// The space may be freed; otherwise a later write there must not fail for want of space if the disk can
    /// prevent it.
    pub may_unmap: bool,
    /// Fail with `Unsupported`, changing nothing, rather than write the zeros one by one.
    pub fast_only: bool,
}

/// Where the bytes of an extent are.
#[derive(Clone)]
pub enum Place {
    /// It reads as zero. `allocated` says whether space is allocated for it.
    Zero {
        /// Space is allocated for it.
        allocated: bool,
    },
    /// The bytes are in the storage, contiguously, from `at` on. Any write may move them.
    Data {
        /// Which storage.
        storage: SharedStorage,
        /// Where the first byte is.
        at: ImageOffset,
    },
    /// The bytes are stored compressed.
    Compressed {
        /// In which storage, and at which place the first byte of the run would be if nothing were compressed: what is compressed
        /// begins there, or before it by as much as the run begins behind it. Runs with the same one are the same bytes. `None` where
        /// nobody can tell.
        from: Option<(SharedStorage, ImageOffset)>,
    },
    /// This disk has no data of its own there: the disk below decides, and without one the run reads as zero.
    Below,
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Zero { allocated } => write!(f, "Zero {{ allocated: {allocated} }}"),
            Self::Data { storage, at } => write!(f, "Data {{ {} at {at} }}", storage.name()),
            Self::Compressed { from: None } => f.write_str("Compressed"),
            Self::Compressed { from: Some((storage, at)) } => {
                write!(f, "Compressed {{ {} at {at} }}", storage.name())
            }
            Self::Below => f.write_str("Below"),
        }
    }
}

/// A run of the disk whose bytes are all in one kind of place, and contiguous there.
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
    /// The length of the storage, in bytes: it was just queried.
    pub len: u64,
    /// This many bytes can be stored before it is full.
    pub free: u64,
    /// To hold more than that the storage must be longer by at least this many bytes.
    pub step: u64,
    /// The whole disk fits a storage of this length, in bytes; its snapshots take more.
    pub len_for_all: u64,
    /// This many requests failed because it was full.
    pub refused: u64,
}

/// How a disk takes copies of what the disk below has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filling {
    /// A fill keeps whole blocks of this size, at multiples of it. The last one may end with the disk below, or
    /// with this one.
    pub unit: BlockSize,
    /// Filled blocks are known on the medium only once the disk was closed, so a flush makes none of them
    /// durable, and [`Filled::wants_flush`] is never set.
    pub kept_at_close: bool,
}

/// What became of a fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Filled {
    /// This many bytes were kept: the disk read them from below, and no longer does.
    pub kept: u64,
    /// Blocks were dropped because fills have no more room before the next flush.
    pub wants_flush: bool,
}

/// What a guest sees. The module has the contract.
pub trait Disk: Send + Sync {
    /// Facts about it.
    fn geometry(&self) -> Geometry;

    /// The disk that is read where this one has [`Place::Below`].
    fn below(&self) -> Option<Arc<dyn Disk>> {
        None
    }

    /// Fills the buffer with the bytes from `at` on and returns it: the same buffer, whose memory may be
    /// lent.
    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>>;

    /// Writes the buffer's bytes from `at` on.
    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>>;

    /// Makes durable what has been written (contract 1).
    fn flush(&self) -> LocalFuture<'_, Result<()>>;

    /// Makes the run read as zero.
    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>>;

    /// Says that the bytes of the run are no longer needed. Afterwards each sector reads as zero or as
    /// before, never as the disk below.
    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>>;

    /// Where the bytes of the run are: from its start, in order, without gaps. The answer may stop early
    /// after any extent, but is not empty unless the run is.
    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>>;

    /// The same for the whole chain, without the storages: what the guest finds, whichever disk has it. The answer
    /// may stop early, but is not empty unless the run is.
    ///
    /// A disk that can be exchanged answers it as one request. In parts, one disk could say that the bytes are
    /// below, and another one what is below.
    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        Box::pin(whole(self, span))
    }

    /// Does a little background work: called every now and then, with the time of one clock. True when there
    /// is more to do at once. What fails is tried again or given up, without an error for the guest.
    fn tend(&self, _now: Duration) -> LocalFuture<'_, bool> {
        Box::pin(std::future::ready(false))
    }

    /// How copies of what the disk below has are taken; `None` if this disk takes none.
    fn filling(&self) -> Option<Filling> {
        None
    }

    /// Keeps a copy of what the disk below has from `at` on, as far as that is possible at once (contract 15).
    /// `at` is a multiple of [`Filling::unit`]. Of a last block that is not whole, and ends neither with this disk
    /// nor with the one below, nothing is kept.
    ///
    /// # Errors
    /// `Unsupported` where [`filling`](Self::filling) is `None`, `NoSpace`, and those of the storage. They concern
    /// the copy alone.
    fn fill(&self, _at: GuestOffset, _data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        Box::pin(std::future::ready(Err(Error::unsupported("this disk takes no copies of the disk below"))))
    }

    /// How much more can be stored; `None` where the host decides that, as for a file.
    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// The flush at the end of a change with FUA that was made in parts. It is not a flush of the session: a
    /// session that gets the report of a loss through it still fails its own next flush.
    fn flush_change(&self) -> LocalFuture<'_, Result<()>> {
        self.flush()
    }

    /// The record of losses of answered writes; `None` if this disk never loses any.
    fn losses(&self) -> Option<Arc<Losses>> {
        None
    }

    /// Flushes, writes what is still only in memory to its place, marks the image clean and closes the files.
    /// Closing twice is legal.
    fn close(&self) -> LocalFuture<'_, Result<()>>;
}

/// A disk shared by all its users.
pub type SharedDisk = Arc<dyn Disk>;

/// After this many extents an answer stops early, so that its size is bounded.
const EXTENTS_MAX: usize = 4096;

/// One answer asks the disks of a chain at most this many times: a storage may know little at a time, and a caller has to be able to
/// stop in between.
const ASKS_MAX: usize = EXTENTS_MAX;

/// An extent of a chain.
#[derive(Debug, Clone)]
pub struct MergedExtent<P = Place> {
    /// Which bytes of the top disk.
    pub span: GuestSpan,
    /// Where they are. `Below` only when no disk of the chain has anything there: they read as zero.
    pub place: P,
    /// How many disks above had no data there: 0 for the top disk.
    pub depth: usize,
}

/// What a place is, without the storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaceKind {
    /// It reads as zero. `allocated` says whether space is allocated for it.
    Zero {
        /// Space is allocated for it.
        allocated: bool,
    },
    /// The bytes are stored as they are.
    Data,
    /// The bytes are stored compressed.
    Compressed,
    /// No disk has data there.
    Below,
}

impl From<Place> for PlaceKind {
    fn from(place: Place) -> Self {
        match place {
            Place::Zero { allocated } => Self::Zero { allocated },
            Place::Data { .. } => Self::Data,
            Place::Compressed { .. } => Self::Compressed,
            Place::Below => Self::Below,
        }
    }
}

enum Step<P> {
    /// `None` is the top disk.
    Ask {
        disk: Option<SharedDisk>,
        span: GuestSpan,
        depth: usize,
    },
    Answer {
        span: GuestSpan,
        place: P,
        depth: usize,
    },
}

/// The map of the whole chain without the storages, none of which is held while it waits.
async fn whole<D: Disk + ?Sized>(disk: &D, span: GuestSpan) -> Result<Vec<MergedExtent<PlaceKind>>> {
    merged(disk, span, |last, next| last.place == *next).await
}

/// The walk down a chain: the query goes down until a disk has the range.
pub(crate) async fn merged<D: Disk + ?Sized, P: From<Place>>(
    top: &D,
    span: GuestSpan,
    joins: fn(&mut MergedExtent<P>, &P) -> bool,
) -> Result<Vec<MergedExtent<P>>> {
    let mut answer: Vec<MergedExtent<P>> = Vec::new();
    // A stack instead of recursion, because a chain may be long. What comes first on the disk is on top.
    let mut steps = vec![Step::Ask { disk: None, span, depth: 0 }];
    let mut asked = 0;
    while let Some(step) = steps.pop() {
        let (disk, span, depth) = match step {
            Step::Answer { span, place, depth } => {
                if answer.len() >= EXTENTS_MAX {
                    break;
                }
                push(&mut answer, MergedExtent { span, place, depth }, joins);
                continue;
            }
            Step::Ask { .. } if asked >= ASKS_MAX && !answer.is_empty() => break,
            Step::Ask { disk, span, depth } => (disk, span, depth),
        };
        asked += 1;
        let size = disk.as_ref().map_or_else(|| top.geometry().size, |disk| disk.geometry().size);
        let (inside, outside) = span.split_at(size.saturating_sub(span.start().bytes()));
        if !outside.is_empty() {
            let place = Place::Zero { allocated: false }.into();
            steps.push(Step::Answer { span: outside, place, depth });
        }
        if inside.is_empty() {
            continue;
        }
        let extents = match &disk {
            Some(disk) => disk.map(inside).await?,
            None => top.map(inside).await?,
        };
        let covered = extents.last().map_or(inside.start(), |last| last.span.end());
        if covered < inside.end() {
            let rest = GuestSpan::between(covered, inside.end());
            steps.push(Step::Ask { disk: disk.clone(), span: rest, depth });
        }
        let below = disk.as_ref().map_or_else(|| top.below(), |disk| disk.below());
        steps.extend(extents.into_iter().rev().map(|Extent { span, place }| match (&place, &below) {
            (Place::Below, Some(below)) => Step::Ask { disk: Some(below.clone()), span, depth: depth + 1 },
            _ => Step::Answer { span, place: place.into(), depth },
        }));
    }
    Ok(answer)
}

fn push<P>(
    answer: &mut Vec<MergedExtent<P>>,
    next: MergedExtent<P>,
    joins: fn(&mut MergedExtent<P>, &P) -> bool,
) {
    if next.span.is_empty() {
        return;
    }
    if let Some(last) = answer.last_mut()
        && last.depth == next.depth
        && last.span.end() == next.span.start()
        && joins(last, &next.place)
    {
        last.span = GuestSpan::between(last.span.start(), next.span.end());
        return;
    }
    answer.push(next);
}
