//! A world in one thread from one seed, in which the engine's tests run.
//!
//! ```text
//!   World     the order of turns, the time, the random numbers; one line of positions for all events
//!   Drive     a Storage that records every event, takes virtual time, fails and holds on request
//!   EventLog  ── crash(kind, position) ──▶ CrashPoint ── image, subsets, corners, tears, random ──▶ Content
//!   Oracle    watches a Disk and judges what is found after a crash
//!   SimStream two ends of a connection
//!   Medium    a model of a whole drive, which ends requests in an order of its own
//!   Explorer  every image of every crash of every program, recovered and judged
//! ```
//!
//! # A crash test
//!
//! ```
//! use std::time::Duration;
//! use vellum_core::{Buffer, ImageOffset, Storage};
//! use vellum_sim::{Content, CrashKind, Delay, Drive, DriveOptions, World};
//!
//! let world = World::shuffled(7);
//! let delay = Delay::between(Duration::from_micros(20)..=Duration::from_micros(200));
//! let drive = Drive::from_content(&world, Content::zeroed(1 << 20), DriveOptions { delay, ..Default::default() });
//!
//! world.run(async {
//!     drive.write(ImageOffset::new(0), Buffer::copy_of(&[1; 4096])).await?;
//!     drive.flush().await?;
//!     drive.write(ImageOffset::new(0), Buffer::copy_of(&[2; 4096])).await
//! })?;
//!
//! // The second write was not flushed: after a power cut each of its eight sectors is old or new.
//! let point = drive.log().crash(CrashKind::PowerCut, world.position());
//! assert_eq!(point.pending().len(), 1);
//! let mut seen = std::collections::HashSet::new();
//! for image in point.tears(0, 0) {
//!     let bytes = image.to_vec();
//!     assert!(bytes[..4096].chunks(512).all(|sector| sector == [1; 512] || sector == [2; 512]));
//!     seen.insert(image.digest());
//! }
//! assert_eq!(seen.len(), 256);
//! # Ok::<(), vellum_core::Error>(())
//! ```
//!
//! # What a test can do
//!
//! - *Races*: [`Drive::hold`] stops an operation until the test releases it; [`World::shuffled`] tries
//!   another interleaving with every seed.
//! - *Failures*: [`FaultPlan`] fails the Nth operation; [`fault_loop`] fails each one in turn.
//! - *Crashes while it runs*: [`Drive::crash`] gives one random image, [`Drive::restart`] the same host after
//!   a killed process.
//! - *Crashes afterwards*: run to the end, take [`Drive::log`], and go through [`EventLog::crash_positions`].
//! - *Verdicts*: [`Oracle::watch`] the disk, then [`Oracle::expect_at`] the position and
//!   [`Expectation::check_disk`] what was recovered.
//! - *Counts*: [`Drive::counts`] before and after.
//! - *Anything else between the engine and its host*: [`ForwardStorage`] and [`ForwardDisk`] forward what a
//!   test does not override.
//!
//! In reading order: [`world`], [`content`] (bytes that cost nothing to copy), [`operation`], [`change`],
//! [`log`] and [`crash`] (what the medium may hold), [`delay`], [`model`], [`fault`], [`hold`], [`drive`],
//! [`forward`], [`stream`], [`guest`], [`oracle`], [`expectation`], [`explore`].

#![forbid(unsafe_code)]

mod alarm;
pub mod change;
pub mod content;
pub mod crash;
pub mod delay;
pub mod drive;
pub mod expectation;
pub mod explore;
pub mod fault;
pub mod forward;
pub mod guest;
pub mod hold;
pub mod log;
mod mix;
pub mod model;
pub mod operation;
pub mod oracle;
pub mod stream;
pub mod world;

pub use change::{Granule, Torn};
pub use content::Content;
pub use crash::{CrashKind, CrashPoint, Fate, Pending};
pub use delay::Delay;
pub use drive::{Discards, Drive, DriveOptions};
pub use expectation::{Expectation, Violation};
pub use fault::{Effect, Fault, FaultPlan, FaultSweep, Repeat, SweepReport, fault_loop};
pub use forward::{ForwardDisk, ForwardStorage, Forwarding};
pub use guest::GuestRequest;
pub use hold::Hold;
pub use log::{Event, EventLog, History, Outcome};
pub use operation::{Operation, Operations, Request};
pub use oracle::{Oracle, OracleDisk, read_disk};
pub use stream::{SimStream, StreamOptions, stream_pair};
pub use world::{Handle, Position, Spawner, World};
