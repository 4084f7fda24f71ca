//! qcow2, versions 2 and 3: the format of QEMU's copy-on-write images, read and written.
//!
//! The nouns name what is on disk, the verbs what a request does:
//!
//! | on disk | |
//! |---|---|
//! | [`layout`] | bytes, offsets, bits |
//! | [`header`] | the header, checked once |
//! | [`entry`] | L2 entries, and the one type that represents them all |
//! | [`pages`] | the mapping in memory, read without a lock |
//! | [`refcount`] | which clusters are in use, the allocator, and its search for free clusters |
//! | [`snapshot`] | internal snapshots |
//! | [`bitmaps`] | persistent bitmaps: listed, kept up while the disk is written, changed in a closed image |
//! | [`compressed`], `compress` | compressed clusters: read; and made |
//!
//! | action | |
//! |---|---|
//! | [`open`], [`mod@create`] | opening, with the checks of an image's claims; creation |
//! | [`read`], [`mod@write`] with [`plan`], [`zero`], [`map`] | requests |
//! | [`commit`] | what others see of an open image: a disk, a map, a medium; the ordered stages without a journal |
//! | [`journal`] | qcow2's part of the journal: pending refcounts, oversized transactions, recovery |
//! | [`journal_setting`] | whether an image is to have a journal: changes the header of an existing image |
//! | `ahead` | space ahead of need, zeroed in the background; `prepare` keeps the account |
//! | [`corrupt`] | the handling of an image that contradicts itself |
//! | [`late`] | older writes that may still land where units were made zero |
//! | [`quarantine`], `give_back` | freed clusters, until they may be reused; how they are given back |
//! | `pin` | what proves the backing file: an extension of the header |
//! | `snapshots` | making, deleting and renaming internal snapshots of a closed image, and reverting to one |
//! | `snapshot_table` | the table of snapshots, written anew |
//! | `shadow`, `tree` | new metadata beside the old, and one write that switches to it; what an L1 table leads to |
//! | `measure` | how large an image will be |
//! | `amend` | version 3, lazy refcounts, wider or narrower refcounts in an existing image |
//! | `resize` | a larger disk, as far as the L1 table has room |
//! | [`check`] | compares everything an image claims, and repairs it; `hole` and `tail` skip what a file does not have, and cut off what it does not need |
//! | `format` | the interface that all formats have |
//!
//! Shared with other formats: `engine` (the order of a commit and of a close, in `engine/commit.rs` and
//! `engine/close.rs`), `claims`, `epochs` and `keyed` (which requests may change a unit, which may still use
//! an old mapping, which one loads a page), and most of the journal (the writes around a record are in
//! `journal/commit.rs`).
//!
//! Source: QEMU's `docs/interop/qcow2.rst`. The old AES-CBC encryption is only read.

mod ahead;
mod amend;
pub mod bitmaps;
pub mod check;
mod commit;
mod compress;
mod compressed;
mod contradiction;
mod corrupt;
pub mod create;
mod delete_in_place;
mod detach;
mod downgrade;
mod encrypted;
mod entry;
mod fill;
mod format;
mod give_back;
pub mod header;
mod header_state;
mod hole;
mod image;
mod journal;
pub mod journal_setting;
mod late;
mod layout;
mod map;
mod mapping;
mod measure;
pub mod open;
mod pages;
mod pin;
mod plan;
mod prepare;
mod quarantine;
mod read;
mod refcount;
mod references;
mod resize;
mod session;
mod shadow;
pub mod snapshot;
mod snapshot_table;
mod snapshots;
mod table_edits;
mod tail;
mod tree;
mod views;
mod write;
mod zero;

pub use crate::image::Files;
pub use check::recover;
pub use create::{CreateOptions, Preallocation, create, create_with};
pub(crate) use format::Qcow2Format;
pub use header::{Compression, Encryption, Header};
pub use image::Qcow2;
pub use journal_setting::set_journal;
pub use layout::JOURNAL_BYTES_DEFAULT;
pub use open::OpenOptions;
pub use resize::{grow, grow_with, shrink};
pub use snapshot::Snapshot;
