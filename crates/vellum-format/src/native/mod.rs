//! The native format, version 1 (`vellum`, suffix `.vlm`). Its functions are switches, and one that is off
//! costs nothing.
//!
//! `docs/format/native.md` is the specification. The disk is stored byte for byte (`linear`), or in units
//! that a single table maps (`table`). Over a base, a bitmap records what the image has itself. Changes to
//! these small tables go through the same journal that qcow2 images use, so that a flush of the guest is one
//! flush of the host.
//!
//! | on disk | |
//! |---|---|
//! | [`superblock`] | two copies of one page: untrusted bytes, checked once |
//! | [`geometry`] | where everything lies |
//! | [`parts`], `table_places` | the rest of a table that a disk has outgrown; where entries lie in all of it |
//! | [`embed`] | a block that also holds its unit's entry |
//!
//! | what is done | |
//! |---|---|
//! | [`mod@create`] | a new image |
//! | [`open`], `recover`, `zone_scan` with `zone_cases` | opening, with its checks; recovery after a crash |
//! | `image`, `home_pages` | what is in memory: the home pages, read without a lock |
//! | `read`, `write` with `publish`, `zero` | requests |
//! | `commit` with `in_use` | how the journal begins, what a transaction holds, what the engine needs |
//! | `session` | which flash cache holds writes of an open image |
//! | `tier` with `tier_open`, `tier_move`, `tier_session`, `tier_state`, `attach_fast`, `fast_places` | which units a fast medium has copies of |
//! | `resize` | another size for the disk |
//! | [`unfinished`] | what an interrupted change of several steps leaves, and what opening does about it |
//! | [`snapshots`] | views of the disk that no longer change |
//! | `encrypted` with `encryption_state` | guest data that is stored encrypted |
//! | `zones` with `zone_state`, `embedded_alloc` | zones and units that hold their own entries, until these are in the table |
//! | `compact` | sparsely used zones, emptied in quiet times |
//! | `ahead` | zones of a file, written with zeros ahead of need |
//! | `room` | how much space a device has left, and how much it has gained since |
//! | `units` with `allocate`, `ready` | which units are free, and how they are made zero before use, ahead of need |
//! | [`mod@check`] | the invariants of a closed image: checked, and repaired |
//! | `format` | the interface that all formats have |

mod ahead;
mod allocate;
mod attach_fast;
pub mod check;
mod commit;
mod compact;
pub mod create;
mod detach;
pub mod embed;
mod embedded_alloc;
mod encrypted;
mod encryption_state;
mod fast_places;
mod fill;
mod fill_linear;
mod filled;
mod format;
pub mod geometry;
mod heat;
mod home_pages;
mod image;
mod in_use;
pub mod open;
mod over_base;
mod pack_over_base;
pub mod parts;
mod publish;
mod read;
mod ready;
mod recover;
mod resize;
mod room;
mod session;
pub mod snapshots;
pub mod superblock;
mod table_places;
mod tier;
mod tier_move;
mod tier_open;
mod tier_over;
mod tier_session;
mod tier_state;
pub mod unfinished;
mod units;
mod write;
mod zero;
mod zero_pace;
mod zone_cases;
mod zone_scan;
mod zone_state;
mod zones;

pub use create::{CreateOptions, JOURNAL_BYTES_DEFAULT, JOURNAL_BYTES_ZONED, NewBase, create};
pub(crate) use format::NativeFormat;
pub use geometry::{Layout, Places, Region, Shape};
pub use image::Native;
pub use open::{OpenOptions, finish, finish_interrupted};
pub use recover::recover;
pub use resize::resize;
pub use superblock::{Base, Slot, Superblock, Superblocks};
