//! Layers: they turn a [`Disk`](vellum_core::Disk) into a [`Disk`](vellum_core::Disk). For now the copy-on-write chain.

#![forbid(unsafe_code)]

pub mod chain;
pub mod gate;

pub use chain::{Chain, ChainOptions, Member, Opener, Purpose};
pub use gate::Gate;
