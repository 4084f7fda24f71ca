//! Serves a [`Disk`](vellum_core::Disk): parses each request once, completes it exactly once.
//!
//! Bytes from outside become a checked request in one place per protocol; from there on nothing is checked again, only
//! asserted. What every protocol needs stands here: `flight` (the requests that are running), [`shutdown`] (ending
//! a session in good order) and [`slots`] (how many connections there may be). The protocols are [`nbd`] and [`vhost`]; [`fuse`] shows a
//! disk as a file, `ublk` (a feature) as a block device.
//!
//! Invariants
//! 1. A request that was started is polled to its end, whatever becomes of the peer (contract 10 of the disk).
//! 2. A request that was accepted is answered once, or its peer is gone. The books of a session are only clear when
//!    that is so, and they are asserted to be clear when it ends.
//! 3. What a peer can make a session hold in memory is bounded, in every phase, by numbers the server chose.
//! 4. Nothing here reads a clock, spawns a task or opens a socket: a session is one future over a
//!    [`ByteStream`](vellum_core::ByteStream), so it runs on a real connection and in a simulator alike. (With [`vhost`] the
//!    guest's memory and its eventfds are real; where queues run and how they wait is the caller's to say. The requests of [`fuse`]
//!    come from threads of the `fuser` crate, and its file has times.)

#![forbid(unsafe_code)]

mod flight;
pub mod fuse;
pub mod nbd;
pub mod shutdown;
pub mod slots;
#[cfg(feature = "ublk")]
pub mod ublk;
pub mod vhost;

pub use shutdown::Shutdown;
pub use slots::{ConnectionSlot, ConnectionSlots};
