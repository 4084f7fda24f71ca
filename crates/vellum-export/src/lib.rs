//! Serves a [`Disk`](vellum_core::Disk): parses each request once, completes it exactly once.
//!
//! Bytes from outside become a checked request in one place per protocol; after that they are only asserted,
//! never checked again. What all protocols share is here: `flight` (the requests in flight), `slices` (long
//! requests are executed a slice at a time), [`shutdown`] (ending a session in good order) and [`slots`] (the
//! limit on connections). The protocols are [`nbd`] and [`vhost`]; [`fuse`] exports a disk as a file, `ublk`
//! (a feature) as a block device.
//!
//! Invariants
//! 1. A request that was started is polled to its end, whatever the peer does (contract 10 of the disk).
//! 2. A request that was accepted is answered exactly once, unless its peer is gone. Only then is the ledger
//!    of a session clear, and each session asserts at its end that it is.
//! 3. The memory that a peer can make a session hold is bounded in every phase by limits that the server
//!    chose.
//! 4. Nothing here reads a clock, spawns a task or opens a socket: a session is one future over a
//!    [`ByteStream`](vellum_core::ByteStream), so it runs on a real connection and in a simulator alike.
//!    (With [`vhost`] the guest's memory and its eventfds are real; the caller decides where queues run and
//!    how they wait. The requests of [`fuse`] come from threads of the `fuser` crate, and its file has
//!    timestamps.)

#![forbid(unsafe_code)]

mod flight;
pub mod fuse;
pub mod nbd;
pub mod shutdown;
mod slices;
pub mod slots;
#[cfg(feature = "ublk")]
pub mod ublk;
pub mod vhost;

pub use shutdown::Shutdown;
pub use slots::{ConnectionSlot, ConnectionSlots};
