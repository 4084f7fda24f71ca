//! NBD, the network block device protocol: fixed newstyle handshake, structured replies, block status.
//!
//! ```text
//!   serve_connection      session       greeting, deadline, the end (ending); tls, where it is asked for
//!     handshake           handshake     bytes in, bytes out ──► an export (exports) and the terms of its use (terms)
//!     transmission        transmission  passes: take in, begin, gather, send
//!                           intake      bytes from the stream ──► requests with payloads, as the ledger admits them
//!                           request     the only way in: header + terms ──► Request or Refusal
//!                           work        a request at the disk; sparse (reads without zeros), status (block status)
//!                           reply       output
//!     wire                numbers and layouts; limits: what one client may use
//! ```
//!
//! An accept loop takes a [`ConnectionSlot`](crate::ConnectionSlot), accepts, and runs [`serve_connection`]
//! on the new stream as a task of its own on its worker; the slot is dropped when that returns.
//!
//! Source: `doc/proto.md` of NetworkBlockDevice/nbd. Left out for now: resizing while connected.

mod access;
mod budget;
mod certificate;
mod clients;
mod ending;
mod exports;
#[cfg(any(test, feature = "fuzz"))]
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
mod stall;
mod status;
mod terms;
mod tls;
mod tls_client;
mod transmission;
pub mod wire;
mod work;

pub use access::{AccessList, NamePattern, SharedAccessList, Verdict};
pub use clients::{Bounds, Census, Client, ClientFacts, Clients, Stage};
pub use ending::Ending;
pub use exports::{Export, Exports, OnDemand, Removed, SentAway, Suspended, View};
pub use limits::SessionLimits;
pub use session::{serve_client, serve_connection, serve_connection_with};
pub use status::{Marked, Marks, MarksKind, OffersMarks, SharedMarks};
pub use tls::{Tls, TlsPolicy, TlsStream};
pub use tls_client::{ServerIdentity, TlsClient};
