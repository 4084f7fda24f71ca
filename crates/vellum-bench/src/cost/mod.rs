//! What a server asks of the host: counts, from two witnesses.
//!
//! ```text
//!   strace    every write and flush the process makes, with the time it began     any program that does not use a ring
//!   stats     Vellum's own counters (`serve --stats-json`)                         Vellum, however it does its I/O
//! ```
//!
//! Both count the same: writes and their bytes, flushes of the file, and calls that punch a hole or zero a range. What sets
//! the length of the file or reserves space is in neither.

pub(crate) mod stats;
pub(crate) mod strace;

use std::ops::{AddAssign, Sub};

/// What the host was asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Counts {
    /// `fdatasync`, `fsync`.
    pub(crate) flushes: u64,
    /// `pwrite64`, `pwritev` and their kin.
    pub(crate) writes: u64,
    /// What they wrote.
    pub(crate) bytes_written: u64,
    /// `fallocate` that punches a hole or zeroes a range.
    pub(crate) holes: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.flushes += other.flushes;
        self.writes += other.writes;
        self.bytes_written += other.bytes_written;
        self.holes += other.holes;
    }
}

impl Sub for Counts {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        Self {
            flushes: self.flushes - earlier.flushes,
            writes: self.writes - earlier.writes,
            bytes_written: self.bytes_written - earlier.bytes_written,
            holes: self.holes - earlier.holes,
        }
    }
}
