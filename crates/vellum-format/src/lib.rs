//! Image formats: they turn a [`Storage`](vellum_core::Storage) into a [`Disk`](vellum_core::Disk).
//!
//! A format answers *where* bytes are; only the storage moves guest bytes. A format knows that there may be a disk below
//! it, never which. It reads no clock, no environment and no file by itself: what it needs is given to it.

#![forbid(unsafe_code)]

mod bytes;
mod claims;
mod epochs;
mod hash;
mod journal;
mod keyed;
pub mod native;
mod prealloc;
pub mod probe;
pub mod qcow2;
pub mod raw;
#[doc(hidden)]
pub mod sabotage;
mod state;
mod turns;
pub mod zeros;

pub use native::Native;
pub use prealloc::Prealloc;
pub use probe::{FormatKind, probe};
pub use qcow2::Qcow2;
pub use raw::Raw;
