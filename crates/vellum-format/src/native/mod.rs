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
//! | [`embed`] | a block that holds its unit's entry, too |
//!
//! | what is done | |
//! |---|---|
//! | [`mod@create`] | a new image |
//! | [`open`], `recover`, `rescue` | and what is believed of an image; what a crash leaves |
//! | `image`, `home` | what is in memory: the home pages, read without a lock |
//! | `read`, `write` with `publish`, `zero` | requests |
//! | `commit` | the journal's life, and what is durable when |
//! | `resize` | another size for the disk |
//! | [`snapshots`] | views of the disk that no longer change |
//! | `zones`, `birth` | units that hold their own entries: opened, written, told to the table; overwritten |
//! | `compact` | zones of which little is used, emptied in quiet times |
//! | `ahead` | zones of a file, written with zeros ahead of need |
//! | `room` | how much a device has left, and what it got since |
//! | `units`, `ready` | which units are free, and what must happen before one is used; that happens ahead of need |
//! | [`mod@check`] | the invariants of a closed image, each looked at; and repaired |

mod ahead;
mod birth;
pub mod check;
mod commit;
mod compact;
pub mod create;
pub mod embed;
pub mod geometry;
mod home;
mod image;
pub mod open;
mod publish;
mod read;
mod ready;
mod recover;
mod rescue;
mod resize;
mod room;
pub mod snapshots;
pub mod superblock;
mod units;
mod write;
mod zero;
mod zones;

pub use create::{CreateOptions, JOURNAL_BYTES_DEFAULT, JOURNAL_BYTES_ZONED, NewBase, create};
pub use geometry::{Layout, Places, Region, Shape};
pub use image::Native;
pub use open::OpenOptions;
pub use recover::recover;
pub use resize::resize;
pub use superblock::{Base, Slot, Superblock, Superblocks};
