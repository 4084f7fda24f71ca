//! Image formats: they turn a [`Storage`](vellum_core::Storage) into a [`Disk`](vellum_core::Disk).
//!
//! A format answers *where* bytes are; only the storage moves guest bytes. A format knows that there may be a
//! disk below it, but never which. It reads no clock, no environment and no file by itself: everything it
//! needs is passed in.
//!
//! # A clone, in memory
//!
//! ```
//! use futures_lite::future::block_on;
//! use vellum_core::{Buffer, Disk, GuestOffset, MemoryDisk, MemoryStorage, Result, WriteFlags};
//! use vellum_format::image::{Files, OpenOptions};
//! use vellum_format::{FormatKind, qcow2};
//!
//! # fn main() -> Result<()> {
//! block_on(async {
//!     let file = MemoryStorage::new("clone.qcow2");
//!     let backing = Some(("template.raw".to_owned(), Some("raw".to_owned())));
//!     qcow2::create(&*file, None, &qcow2::CreateOptions { size: 1 << 20, backing, ..Default::default() }).await?;
//!
//!     let template = MemoryDisk::holding(&[7; 1 << 20]);
//!     let head = FormatKind::Qcow2.format().read(&*file).await?;
//!     let files = Files { image: file, data_file: None, below: Some(template) };
//!     let disk = head.open(files, OpenOptions::default()).await?.disk;
//!
//!     disk.write(GuestOffset::new(4096), Buffer::copy_of(b"hello"), WriteFlags::default()).await?;
//!     disk.flush().await?; // after this it survives a crash
//!     let found = disk.read(GuestOffset::new(4094), Buffer::for_overwrite(8)).await?;
//!     assert_eq!(found.to_vec(), b"\x07\x07hello\x07");
//!     disk.close().await
//! })
//! # }
//! ```
//!
//! A future of a disk is `!Send` and must be polled to its end: a disk may refuse writes after one was dropped
//! half way. The crate `vellum-disk` puts disks on threads of their own and opens files and chains; most
//! programs should use it instead.
//!
//! # Where to look
//!
//! [`image`] is the door: [`FormatKind::format`](probe::FormatKind::format) gives a
//! [`Format`](image::Format), which checks, recovers and resizes closed images and reads their
//! [`Head`](image::Head), which opens them. [`probe()`] tells the formats apart; [`foreign`] names those of
//! other programs, of which `vellum-foreign` reads some. [`qcow2`], [`native`] and [`raw`] are the formats, and have what only they need: the
//! options of new images. [`commit`] is for engines that keep a journal on another medium.

#![forbid(unsafe_code)]

mod bytes;
mod claims;
mod closed_bitmaps;
mod closed_snapshots;
pub mod commit;
mod compressing;
mod engine;
mod epochs;
pub mod fast;
pub mod foreign;
mod foreign_format;
mod formats;
mod growth;
pub mod handover;
mod hash;
pub mod image;
mod in_memory;
mod journal;
mod keyed;
pub mod luks;
pub mod measure;
pub mod native;
#[cfg(not(feature = "test-hooks"))]
mod perturb;
#[cfg(feature = "test-hooks")]
#[doc(hidden)]
pub mod perturb;
mod prealloc;
pub mod probe;
pub mod qcow2;
pub mod raw;
pub mod report;
pub mod session;
mod shared_or_alone;
mod snapshot_base;
mod snapshot_facts;
mod state;
mod truth;
mod views;
mod wish;
#[cfg(not(feature = "test-hooks"))]
mod work;
#[cfg(feature = "test-hooks")]
#[doc(hidden)]
pub mod work;
mod zero_places;
pub mod zeros;

pub use in_memory::{needs_replay, replayed_in_memory};
pub use native::Native;
pub use prealloc::Prealloc;
pub use probe::{FormatKind, probe};
pub use qcow2::Qcow2;
pub use raw::Raw;
pub use snapshot_base::{SNAPSHOT_FORMAT, SnapshotBase, SnapshotKey};
pub use truth::settle;
pub use vellum_foreign::ForeignKind;
pub use wish::Wish;
