//! NBD, the network block device protocol: fixed newstyle handshake, structured replies, block status.
//!
//! ```text
//!   serve_connection      session       greeting, deadline, the end; tls, where it is asked for
//!     handshake           handshake     bytes in, bytes out ──► an export (exports) and the terms of its use (terms)
//!     transmission        transmission  passes: take in, begin, gather, send
//!                           intake      bytes from the stream ──► requests with payloads, as the ledger admits them
//!                           request     the one door: header + terms ──► Request or Refusal
//!                           work        a request at the disk; sparse (reads without zeros), status (block status)
//!                           reply       what goes out
//!     wire                numbers and layouts; limits: what one client may take
//! ```
//!
//! An accept loop takes a [`ConnectionSlot`](crate::ConnectionSlot), accepts, and runs [`serve_connection`] on the new
//! stream as a task of its own worker; the slot is dropped when that returns.
//!
//! Source: `doc/proto.md` of NetworkBlockDevice/nbd. Left out for now: resizing while connected.

mod exports;
#[doc(hidden)]
pub mod fuzz;
mod handshake;
mod intake;
mod ledger;
mod limits;
mod reply;
mod request;
mod session;
mod sparse;
mod status;
mod terms;
mod tls;
mod transmission;
pub mod wire;
mod work;

pub use exports::{Export, Exports, OnDemand, Removed};
pub use limits::Limits;
pub use session::{Ending, serve_connection, serve_connection_with};
pub use tls::{Tls, TlsPolicy};
