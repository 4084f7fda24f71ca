//! Disks that are elsewhere, through the real program.
//!
//! ```text
//!   hand_over.rs     a disk that moves to another server, killed at each step
//!   wrong_orders.rs  its steps by hand, too early or twice, and files that are not where they were
//!   nbd.rs           an export of an NBD server as an image: of our server, of QEMU's and of nbdkit
//!   nbd_base.rs      such an export as the base of other images
//!   rbd.rs           snapshots of a Ceph cluster
//! ```

#![allow(unreachable_pub, reason = "the modules of a test are its own")]

#[path = "../support/mod.rs"]
mod support;

mod hand_over;
mod nbd;
mod nbd_base;
mod rbd;
mod wrong_orders;
