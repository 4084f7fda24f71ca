//! Layers: they turn a [`Disk`](vellum_core::Disk) into a [`Disk`](vellum_core::Disk). The
//! copy-on-write chain; and what is done with whole disks: copying, comparing.

#![forbid(unsafe_code)]

pub mod chain;
pub mod copy;
pub mod gate;

pub use chain::{Chain, ChainOptions, Member, Opener, Purpose};
pub use copy::{Comparison, CopyOptions, compare, copy, find_zeros};
pub use gate::Gate;
