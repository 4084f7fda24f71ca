//! Hydration: an image gets copies of what it reads from below, until it needs nothing from there any more.
//!
//! ```text
//!   guest ─► valve ─► top image ─────── read of what it has not ──────► tap ─► the images below
//!                        ▲                                               │ copies, bounded
//!                        └──────────── fill ◄──── filler ◄───────────────┘
//!                                                   └─ and what no guest has read yet (prefetch)
//! ```
//!
//! - [`Tap`] sees what is read from below and keeps copies of it: copy-on-read.
//! - [`Filler`] gives the copies to the image ([`Disk::fill`](vellum_core::Disk::fill)), and fetches what is missing.
//! - [`trace`] is the file with the order in which a guest that boots reads its disk.
//! - `pace` decides how fast that goes, and that guests come first.
//!
//! The chain puts the tap in its place, and detaches a disk that needs nothing from below
//! ([`Chain::detach`](crate::Chain::detach)). Whoever serves the disk runs the filler.

mod base_files;
mod control;
mod filler;
mod memory;
mod missing;
mod order;
mod pace;
mod runs;
mod tap;
#[cfg(test)]
mod tests;
pub mod trace;

pub use base_files::BaseFiles;
pub use control::{Hurry, HydrationControl, HydrationCounts, Progress, State};
pub use filler::{Activity, Filler, FillerTurns, Guest, Outcome};
pub use memory::CopyMemory;
pub(crate) use missing::is_whole;
pub use order::Run;
pub use pace::{Pace, PrefetchLimits, Side, SideLimits, rest_after};
pub use tap::{Tap, TapCounts, TapOptions};
