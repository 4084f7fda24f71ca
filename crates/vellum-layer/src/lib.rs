//! Layers: they turn a [`Disk`](vellum_core::Disk) into a [`Disk`](vellum_core::Disk). The
//! copy-on-write chain; the valve that a disk is stopped, slowed and exchanged with while it is served; and what is done with
//! whole disks: copying, comparing.

#![forbid(unsafe_code)]

pub mod chain;
pub mod copy;
pub mod gate;
pub mod valve;

pub use chain::{Chain, ChainOptions, Member, Opener, Purpose};
pub use copy::{Comparison, CopyOptions, compare, copy, find_zeros};
pub use gate::Gate;
pub use valve::Valve;
