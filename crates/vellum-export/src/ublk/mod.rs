//! ublk: a disk as a block device of this kernel.
//!
//! ```text
//!   kernel ─► row ──parse──► request ──► the disk ──► answer ─► kernel        one loop for each tag, all of one queue on one
//!               (request)     data taken before, or given after               worker
//! ```
//!
//! In reading order: `facts` (the parameters that the kernel is given), `request` (what it asks for), `queue`
//! (fetching and answering). Access to the kernel is behind [`Kernel`], so that a queue can be tested without
//! one; the server that uses this module adds and removes the devices.
//!
//! 1. A row that the kernel shares is read once and checked: a request lies within the disk, consists of
//!    whole sectors, and is no larger than [`REQUEST_BYTES_MAX`]. An invalid one is answered with an error.
//! 2. Each request is answered once, together with the next fetch of its tag; a request that was begun is
//!    polled to its end.
//! 3. A queue holds at most [`DEPTH`] requests of [`REQUEST_BYTES_MAX`] bytes.
//!
//! Source: `include/uapi/linux/ublk_cmd.h` and `Documentation/block/ublk.rst` of Linux.

mod facts;
mod queue;
mod request;

pub use facts::Facts;
pub use queue::{Kernel, Target, Told, serve_queue};
pub use request::{RANGE_SECTORS_MAX, REQUEST_BYTES_MAX, Row, SECTOR_BYTES};

/// Requests of a queue that may be in flight.
pub const DEPTH: u16 = 128;

/// The most queues of a device.
pub const QUEUES_MAX: u16 = 256;
