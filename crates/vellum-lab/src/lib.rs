//! What programs that measure share: servers are started, get requests, and are watched.
//!
//! ```text
//!   trace ──► guest ──session──► server ──► image          subjects: formats with their options, and their makers
//!                                  │
//!                             cost: writes and flushes of the host, counted
//! ```
//!
//! In reading order: [`subjects`] and [`programs`] make an image, [`server`] serves it, [`guest`] sends it
//! requests over a [`session`], [`trace`] reads recorded ones, and [`cost`] counts what the server asks of the
//! host. [`device`] is the block device below, [`mod@line`] makes a server far away, [`report`] prints.
//!
//! The crate runs no measurement of its own, and nothing that serves a disk depends on it.

#![forbid(unsafe_code)]

pub mod cost;
pub mod device;
pub mod guest;
pub mod line;
pub mod programs;
pub mod report;
pub mod server;
pub mod session;
pub mod subjects;
pub mod trace;
