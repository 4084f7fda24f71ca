//! The kernel's driver for block devices that a program serves (ublk): its commands and data.
//!
//! ```text
//!   /dev/ublk-control   Control   devices are added, described, started, stopped and removed: a small ring of its own
//!   /dev/ublkcN         Device    one program has it open
//!                       Queue     on one worker: asks for requests and answers them through the worker's ring,
//!                                 finds them in memory that the kernel shows, moves their data
//!   /dev/ublkbN         the block device, while it is started
//! ```
//!
//! 1. Commands carry no address of ours except those of [`Control`], which waits for their completion. So a
//!    command that a device never answers holds no memory.
//! 2. The kernel requires all commands of a queue to come from one thread. A [`Queue`] is moved to its worker
//!    and stays there.
//! 3. What the kernel shares is copied once, and the server checks it: in this crate nothing is trusted or
//!    checked.
//! 4. A device is removed when all its queues are gone: each of them keeps it open.
//!
//! Data is moved by plain system calls (`UBLK_F_USER_COPY`): they copy between two pieces of memory and never
//! wait, while the ring would give each to a kernel thread, because the device does not report that it never
//! waits.
//!
//! Left out: zero copy and registered buffers (Linux 6.15), zones, unprivileged devices.
//!
//! Source: `include/uapi/linux/ublk_cmd.h` and `Documentation/block/ublk.rst` of Linux;
//! `drivers/block/ublk_drv.c` for what they leave open.

mod abi;
mod control;
mod queue;

pub use control::{Control, Params, Shape, Standing, State};
pub use queue::{Device, Queue, Row, Told};

/// Numbers of devices are below this (`MINORBITS`).
pub const NUMBERS_MAX: u32 = 1 << 20;
