//! A fast medium: one file or device that holds copies of units of many disks (`docs/design/0021-tiers.md`).
//!
//! ```text
//!   image A ── bit of a unit ──► row of A ──► entries of the unit's parts ──► slots
//!   image B ── bit of a unit ──► row of B ──► …
//! ```
//!
//! What counts is decided by the images: a bit there, and the number of a session. Nothing here is ever believed
//! without them, so nothing has to be erased, and a medium that is lost loses nothing.
//!
//! 1. Only a copy made for a promotion is ever written to a slot. No request of a guest has a way to here.
//! 2. Slots and entries are flushed before an image is told that the medium has a unit.
//! 3. An entry is there only as long as its slot has the bytes of its promotion, and of a unit there is one promotion at
//!    most. So an image that was copied, and a medium that was, can miss copies and not read wrong ones.
//!
//! `layout` is every byte on the medium (`docs/format/fast.md`), `medium` is an open one, with what is
//! `known` of it in memory, `damage` what is wrong with it, and `cut` notes where it ends.

mod cut;
mod damage;
mod known;
mod layout;
mod medium;
mod named;
mod tables;

pub use cut::note_cut;
pub use layout::{FastId, Reason, SLOT_BYTES};
pub use medium::{FastCounts, FastMedium, NewRow, RowFacts, create};
pub(crate) use medium::{OpenRow, Part};
pub use named::{
    Demoted, FAST_NAME_MAX, Moved, NamedFast, Promoted, Promotion, STRIP_PARTS, TierFacts, Tiers,
};
