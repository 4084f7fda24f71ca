//! Image formats: they turn a [`Storage`](vellum_core::Storage) into a [`Disk`](vellum_core::Disk).
//!
//! A format answers *where* bytes are; only the storage moves guest bytes. A format knows that there may be a
//! disk below it, but never which. It reads no clock, no environment and no file by itself: everything it
//! needs is passed in.

#![forbid(unsafe_code)]

mod bytes;
mod claims;
mod engine;
mod epochs;
pub mod foreign;
mod formats;
mod hash;
pub mod image;
mod in_memory;
mod journal;
mod keyed;
pub mod native;
#[doc(hidden)]
pub mod perturb;
mod prealloc;
pub mod probe;
pub mod qcow2;
pub mod raw;
pub mod report;
#[doc(hidden)]
pub mod sabotage;
mod state;
mod truth;
#[cfg_attr(feature = "sabotage", doc(hidden))]
pub mod work;
pub mod zeros;

pub use in_memory::{needs_replay, replayed_in_memory};
pub use native::Native;
pub use prealloc::Prealloc;
pub use probe::{FormatKind, probe};
pub use qcow2::Qcow2;
pub use raw::Raw;
pub use truth::settle;
