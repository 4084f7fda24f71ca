//! Models of real drives, in virtual time: how long a request takes there, and what reaches the medium for
//! it.
//!
//! ```text
//!   hdd        an arm, a spindle, a queue, a cache        ┐ DriveModel
//!   ssd        a cache, pages, several ways               │
//!   early_ssd  one way, blocks that are erased            ┘
//!   device     takes requests and a model's time, and no bytes
//!   forgetful  a Storage on such a device that keeps little of what is written
//!   host_file  a file of ext4 on such a Storage
//! ```
//!
//! The seam is [`vellum_sim::model`]. Each model says what it leaves out.
//!
//! Parameters are those of no drive that was measured here: each set names its sources, and what is a guess.
//! A figure of a model is printed with the model's name, and as simulated.

mod device;
mod early_ssd;
mod flushes;
mod forgetful;
mod hdd;
mod host_file;
mod ssd;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub(crate) use device::Device;
pub(crate) use early_ssd::{EarlySsd, EarlySsdParameters};
pub(crate) use forgetful::ForgetfulDrive;
pub(crate) use hdd::{Hdd, HddParameters};
pub(crate) use host_file::{HostFile, HostLayout};
pub(crate) use ssd::{Ssd, SsdParameters};

/// The time to move this many bytes at this rate in bytes per second, rounded up to the nanosecond.
fn transfer(bytes: u64, rate: u64) -> Duration {
    let nanos = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}
