//! Layers turn a [`Disk`](vellum_core::Disk) into a [`Disk`](vellum_core::Disk): the copy-on-write chain; the
//! valve, with which a disk is stopped, throttled and exchanged while it is served; writes that are
//! durable when they are answered; what becomes of discards and written zeros; and the order in which a disk migrates to another image.

#![forbid(unsafe_code)]

pub mod barred;
pub mod chain;
pub mod delta;
pub mod durable;
pub mod gate;
pub mod hydrate;
pub mod merge;
pub mod migrate;
pub mod noted;
mod passage;
pub mod sparse;
pub mod valve;
mod view;

pub use chain::{
    Chain, ChainOptions, Encrypted, FlashChoice, Flashed, FlashedTables, HeldForks, Identity, Member, Opener,
    Purpose, Templates,
};
pub use durable::Durable;
pub use gate::{Gate, Referrer, Trust};
pub use sparse::{DiscardMode, SparseMode, ZeroDetection};
pub use valve::Valve;
