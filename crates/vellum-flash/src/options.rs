//! What a caller may choose.

use std::sync::Arc;
use std::time::Duration;

use vellum_core::{Clock, Random};

use crate::policy::Replacement;
use crate::session::Sessions;

/// Copies of what was read wait for their slots in this much memory, where nothing else is said.
pub(crate) const FETCHED_BYTES_USUAL: usize = 8 << 20;

/// Longer than a tick of any host's clock: a change after this has another time than one before it.
pub(crate) const CLOCK_STEP: Duration = Duration::from_millis(20);

/// What the cache does for a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlashPolicy {
    /// Writes go to flash, and home later. The image must be able to name a session.
    WriteBack,
    /// Writes go to flash and home at the same time. Home is always complete.
    WriteThrough,
    /// What is read is cached. Writes go home, and drop what is cached.
    ReadOnly,
    /// Nothing is cached.
    Off,
}

/// Options of a cache.
#[derive(Clone)]
pub struct FlashOptions {
    /// The clock by which flushes wait for one another; without one they do not.
    pub clock: Option<Arc<dyn Clock>>,
    /// From where the numbers of sessions come.
    pub chance: Random,
    /// Blocks that have been dirty for this long go home in the background.
    pub age: Duration,
    /// When more than this many of a hundred slots are dirty, blocks go home in the background whatever their age.
    pub dirty_percent: u32,
    /// The background writes at most this many bytes home in a second.
    pub bytes_per_second: u64,
    /// Which blocks are given up when slots are short.
    pub replacement: Replacement,
    /// Copies of what was read wait for their slots in at most this many bytes of memory.
    pub fetched_bytes_max: usize,
    /// The most memory for what is cached; none for the usual, which the size of the cache determines.
    pub memory_bytes_max: Option<u64>,
    /// Slots that become free are passed to flash as discards.
    pub discards: bool,
    /// Only runs of at least this many slots are.
    pub discard_slots_min: u32,
}

impl FlashOptions {
    /// The usual ones.
    pub fn new(clock: Option<Arc<dyn Clock>>, chance: Random) -> Self {
        Self {
            clock,
            chance,
            age: Duration::from_secs(30),
            dirty_percent: 40,
            bytes_per_second: 256 << 20,
            replacement: Replacement::default(),
            fetched_bytes_max: FETCHED_BYTES_USUAL,
            memory_bytes_max: None,
            discards: false,
            discard_slots_min: 64,
        }
    }
}

/// A disk that is to be cached.
pub struct DiskOptions {
    /// What identifies it where no session does: of what is only read, a hash of what proves the content.
    pub disk: [u8; 16],
    /// Where its blocks come from and go to. The disk that is returned closes it.
    pub home: vellum_core::SharedDisk,
    /// What ties the image to the cache; none for what is only read.
    pub sessions: Option<Arc<dyn Sessions>>,
    /// What is done.
    pub policy: FlashPolicy,
    /// `disk` identifies the image and its content, also after writes: nobody changes it without this cache. Then
    /// write-back needs no session. For tests, and for homes that only this program can reach.
    pub trusts_home: bool,
}
