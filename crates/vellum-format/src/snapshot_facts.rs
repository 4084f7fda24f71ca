//! What is known of a snapshot inside an image, whatever the format.

/// A snapshot, of any format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its number, or a substitute for one.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The size of the disk at that time, in bytes.
    pub size: u64,
    /// When it was made, in seconds since 1970.
    pub seconds: u64,
    /// The machine's state, in formats that have a place for it.
    pub machine: Option<Machine>,
    /// Whether clones stand on it, so that it cannot be deleted.
    pub is_cloned: bool,
}

/// The machine state that a snapshot records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Bytes of its state; 0 when only the disk was kept.
    pub state_bytes: u64,
    /// The fraction of a second of the time at which it was made, in nanoseconds.
    pub nanoseconds: u32,
    /// How long the guest had run, in nanoseconds.
    pub clock_nanoseconds: u64,
    /// Instructions the guest had executed, where that was counted.
    pub icount: Option<u64>,
}
