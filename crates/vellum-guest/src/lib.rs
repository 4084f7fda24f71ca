//! What a guest has on its disk: partitions, a file system, and which bytes of the disk its files have.
//!
//! ```text
//!   disk ─► look ─► volumes          whole disk, MBR or GPT (`partitions`)
//!                     │ find_files: paths, which files are wanted
//!                     ▼
//!                   walk ─► spans    the directories below the paths; each wanted file's bytes on the disk
//!                     │
//!                     ├─ ext         superblock, groups, inodes, extents, directories; journal replayed in memory
//!                     └─ xfs         the same of XFS; its log too
//! ```
//!
//! The guest is not asked, and nothing is written. Crates that read ext4 or XFS give the bytes of files, not their places, which
//! are all that is wanted here.
//!
//! 1. The disk is untrusted: the guest writes it. No memory is allocated in proportion to a number that it states. Work is
//!    bounded by the size of the volume ([`pieces`]), depth by the format, and what is held by [`FILES_MAX`] and
//!    [`SPANS_MAX`].
//! 2. A span lies in the volume, and has bytes of a wanted file: no hole, no block that is allocated and never written,
//!    nothing behind the file's end.
//! 3. What is not understood is refused by name.
//!
//! Left out: file systems other than ext2, ext3, ext4 and XFS; file systems on LVM, RAID, or encrypted partitions; mounts (each
//! file system has its own paths); checksums of metadata, which a wrong answer here does not need: it moves copies.

#![forbid(unsafe_code)]

mod bytes;
mod ext;
mod file;
mod partitions;
mod pieces;
#[cfg(feature = "samples")]
#[doc(hidden)]
pub mod samples;
mod walk;
mod xfs;

pub use file::FileFacts;
pub use partitions::{Volume, VolumeKind, look};
pub use walk::{FILES_MAX, Found, SPANS_MAX, find_files, has_path};
