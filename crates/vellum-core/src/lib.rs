//! The vocabulary of Vellum, without any I/O.
//!
//! Everything is built on two nouns. [`Storage`] is a flat array of bytes on the host side; [`Disk`] is what
//! a guest sees. *Backends give `Storage`. Formats turn `Storage` into `Disk`. Layers turn `Disk` into
//! `Disk`. Exports serve a `Disk`. The control plane wires them.* That sentence is the architecture.
//!
//! In reading order: [`units`] (typed addresses), [`buffer`] (memory for guest data), [`error`], [`storage`]
//! and [`disk`] (the two traits with their written contracts), [`clock`] (time and randomness as arguments),
//! [`mod@offload`] (long computations elsewhere), [`tally`] (counting I/O), [`stream`] (a connection),
//! [`losses`] (reports to sessions after a failure; [`witnessed()`] is a disk that gives them), [`merged`] (a
//! chain's map as one), [`mod@pin`] (what proves the content of a base), [`mod@reference`] (URLs as names of
//! images), [`memory`] (the reference implementations), [`checked`] (watches a seam), [`contract`]
//! (the suites any implementation must pass), [`lending`] (the same in lent memory), [`lock()`] (how every
//! mutex is locked).

pub mod buffer;
pub mod checked;
pub mod clock;
pub mod contract;
pub mod disk;
pub mod error;
pub mod join;
pub mod lending;
mod lock;
pub mod losses;
pub mod memory;
pub mod merged;
pub mod offload;
pub mod pin;
pub mod reference;
pub mod storage;
pub mod stream;
pub mod tally;
pub mod units;
mod witnessed;

use std::pin::Pin;

pub use buffer::{BUFFER_ALIGNMENT, Buffer, SharedBytes, is_zero};
pub use checked::CheckedDisk;
pub use clock::{Clock, Random};
pub use disk::{
    Disk, Extent, Filled, Filling, Geometry, MergedExtent, Place, PlaceKind, Room, SharedDisk, WriteFlags,
    ZeroFlags,
};
pub use error::{Context, Error, ErrorKind, Result};
pub use join::{join_all, try_join_all};
pub use lending::Lending;
pub use lock::lock;
pub use losses::{Losses, Witness};
pub use memory::{MemoryDisk, MemoryStorage};
pub use merged::{fill_from_below, map_merged, map_placed, read_below};
pub use offload::{Inline, Offload, offload};
pub use reference::{Scheme, Url, UrlPrefix};
pub use storage::{Limits, SharedStorage, Storage, StorageRun, Zeroes};
pub use stream::ByteStream;
pub use tally::{HostTally, IoCounts, IoTally, Tallied};
pub use units::{
    BlockSize, Cluster, Guest, GuestCluster, GuestOffset, GuestSpan, Image, ImageCluster, ImageOffset,
    ImageSpan, Offset, Span,
};
pub use witnessed::{witnessed, witnessed_by_connection, witnessed_from_now};

/// A future that stays on the worker it was made on. Disks and storages are shared by all workers; their
/// futures use the ring of the worker that polls them.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;
