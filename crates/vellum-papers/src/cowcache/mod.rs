//! The paper COWCache: its rival, its guests, and the flash cache under the same guests.
//!
//! ```text
//!   guest ─┬─► qcow2, the engine ─┬─ tables ─► Trdc: memory of whole tables ┐
//!          │    (an overlay)      ├─ data ───► Trdc: blocks of 4 KiB, LRU   ├─► flash (Device)
//!          │                      └─ base ───► the same                     ┘   network (Device)
//!          └─► FlashDisk, the engine ─► flash (ForgetfulDrive)
//!                     └───────────────► home ─► network (Device)
//!
//!   guest          FIO's random writes, mixes, OLTP     trdc     the rival: a cache below the format
//!   applications   Varmail, Fileserver, YCSB-A          scene    one side with its devices, and what was counted
//!   trace          recorded ones: CloudPhysics, MSR     timed    one side on modelled devices
//!   order          which request waits for which        format   what copy-on-write costs without a cache
//! ```
//!
//! The rival's cache (TRDC in the paper) knows nothing of copy-on-write: it sees fills, reads of the base and whole
//! tables like everything else. The format above it is our own qcow2 without a journal.

pub(crate) mod applications;
pub(crate) mod format;
pub(crate) mod guest;
mod order;
mod processor;
pub(crate) mod scene;
pub(crate) mod timed;
pub(crate) mod trace;
pub(crate) mod trdc;

/// Clusters of the paper's images.
pub(crate) const CLUSTER_BYTES: u64 = 64 << 10;
/// Blocks of its cache.
pub(crate) const BLOCK_BYTES: u64 = 4096;
/// The disk of its guest.
pub(crate) const DISK_BYTES: u64 = 1 << 40;
