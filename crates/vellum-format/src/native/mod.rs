//! The native format, version 1 (`vellum`, suffix `.vlm`): functions that are switches.
//!
//! `docs/format/native.md` is the specification. A disk lies in the image byte for byte (`linear`) or in units that one table
//! names (`table`); over a base a bitmap tells what is the image's own. What changes in those small tables goes through the
//! journal that qcow2 images have too, so that a flush of the guest is one flush of the host.
//!
//! | on disk | |
//! |---|---|
//! | [`superblock`] | two copies of one page: read as bytes that nobody vouches for, checked once |
//! | [`geometry`] | where everything lies |
//!
//! | what is done | |
//! |---|---|
//! | [`mod@create`] | a new image |
//! | [`mod@check`] | the invariants of a closed image, each looked at; and repaired |

pub mod check;
pub mod create;
pub mod geometry;
pub mod superblock;

pub use create::{CreateOptions, JOURNAL_BYTES_DEFAULT, NewBase, create};
pub use geometry::{Layout, Places, Region, Shape};
pub use superblock::{Base, Slot, Superblock, Superblocks};
