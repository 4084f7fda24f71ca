//! The flash cache: a [`Disk`](vellum_core::Disk) over each disk of a chain, which keeps blocks of it on a local
//! SSD, and has a commit of its own.
//!
//! ```text
//!   guest ─► FlashDisk ─► top image ─► FlashDisk ─► template          a block's key: (disk, number of the block)
//!                │  write, flush         │  read only
//!                └──────────┬────────────┘
//!                       FlashCache ─► flash: slots, records, slices    one per process, locked
//! ```
//!
//! An allocating write is one slot and one entry. Allocation, fill and metadata come when the block is written
//! home, by the image's ordinary writes. So an image is intact in itself at every moment: without its cache it
//! is behind, never broken.
//!
//! 1. An answered flush is durable: one record and one flush of flash, for all disks together.
//! 2. A slot never shows bytes of its previous owner, and an acknowledged write is never undone.
//! 3. Nothing goes home before a recovery would find it on flash.
//! 4. A slice on flash never says more than durable records do.
//!
//! The crate knows no image format and no chain. It is given disks. What ties an image to its cache is a trait
//! that formats implement.
//!
//! # Where to look
//!
//! `layout` and `record` are every byte on flash (`docs/format/flash.md`). `map`, `units`, `slots` and `zeros` are
//! what is known in memory. Why it is all as it is stands in `docs/design/0019-flash-cache.md`.

#![forbid(unsafe_code)]

mod admit;
mod bytes;
mod cache;
mod claims;
mod create;
mod disk;
mod facts;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod home;
mod layout;
mod listing;
mod map;
mod metadata;
mod neighbours;
mod open;
mod opened;
mod options;
mod policy;
mod record;
mod recover;
mod regions;
mod resize;
mod room;
pub mod session;
mod shared;
mod slice;
mod slices;
mod slots;
mod state;
mod stop;
mod table;
mod tend;
mod through;
mod trial;
mod trim;
mod units;
mod windows;
mod zeros;

pub use create::create;
pub use disk::{FlashCounts, FlashDisk};
pub use facts::{Facts, Look, RowFacts, check, look};
pub use listing::listing;
pub use metadata::{FlashMetadata, MetadataCounts, MetadataOptions};
pub use opened::Opened;
pub use options::{DiskOptions, FlashOptions, FlashPolicy};
pub use policy::Replacement;
pub use resize::Resized;
pub use shared::{CacheCounts, FlashCache};
pub use trial::{HitCounts, hits, uses_of};
