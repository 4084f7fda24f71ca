//! What a server asks of the host: counts, from two witnesses.
//!
//! ```text
//!   strace    every write and flush the process makes, with the time it began     any program that does not use a ring
//!   stats     Vellum's own counters (`serve --stats-json`)                         Vellum, however it does its I/O
//! ```
//!
//! [`lab`] makes an image, runs guests on it, closes it and reads the counts. Both witnesses count the same
//! things: writes and their bytes, flushes of the file, and calls that punch a hole or zero a range. Calls
//! that set the length of the file or reserve space are counted by neither.

pub mod lab;
pub mod stats;
pub mod strace;

use std::ops::{AddAssign, Sub};

/// What the host was asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Counts {
    /// `fdatasync`, `fsync`.
    pub flushes: u64,
    /// `pwrite64`, `pwritev` and their kin.
    pub writes: u64,
    /// What they wrote.
    pub bytes_written: u64,
    /// `fallocate` that punches a hole or zeroes a range.
    pub holes: u64,
}

impl Counts {
    /// Whether another witness agrees. Holes are reported and not compared: a file system without them fails
    /// the call, which only one witness counts.
    pub fn is_confirmed_by(self, other: Self) -> bool {
        let compared = |counts: Self| Self { holes: 0, ..counts };
        compared(self) == compared(other)
    }
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

/// What the guest asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Guest {
    /// Writes.
    pub writes: u64,
    /// What they wrote.
    pub bytes_written: u64,
    /// Discards.
    pub discards: u64,
    /// Flushes, and writes that include one.
    pub flushes: u64,
}

/// The requests to the host for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Host {
    /// Until the last answer.
    pub foreground: Counts,
    /// Until the image was closed.
    pub total: Counts,
}
