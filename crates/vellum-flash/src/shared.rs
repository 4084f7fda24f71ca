//! What a cache is, and a disk of it: two nouns that know each other. What they do is in the files of their names.
//!
//! ```text
//!   FlashCache ─ a weak reference for each open disk ─► Home ─ its cache ─► FlashCache
//! ```

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use event_listener::Event;
use vellum_core::{Buffer, Error, ErrorKind, Random, SharedDisk, SharedStorage};
use vellum_format::commit::{Epochs, GroupCommit};

use crate::claims::{Claims, Watch};
use crate::layout::Layout;
use crate::options::{FlashOptions, FlashPolicy};
use crate::session::{CacheId, Sessions};
use crate::state::State;
use crate::stop::Stop;
use crate::windows::Room;

/// What the cache wrote to flash for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheCounts {
    /// Records.
    pub records: u64,
    /// The bytes of the records.
    pub record_bytes: u64,
    /// Slices of the map.
    pub slices: u64,
    /// The bytes of the slices.
    pub slice_bytes: u64,
    /// Flushes of flash.
    pub flushes: u64,
    /// Bytes of free slots that were passed to flash as discards.
    pub discard_bytes: u64,
}

/// A flash cache that is open. Disks are opened over their homes with
/// [`open_disk`](FlashCache::open_disk).
pub struct FlashCache {
    /// Itself, for tasks of their own.
    pub(crate) me: Weak<Self>,
    pub(crate) storage: SharedStorage,
    pub(crate) id: CacheId,
    pub(crate) layout: Layout,
    pub(crate) options: FlashOptions,
    pub(crate) state: Mutex<State>,
    pub(crate) epochs: Epochs,
    pub(crate) stop: Stop,
    pub(crate) commits: GroupCommit,
    /// Room that flash itself has, for all who wait.
    pub(crate) room: GroupCommit,
    /// Room that a disk makes by its own write-back, for those who wait for it.
    pub(crate) rooms: Mutex<BTreeMap<u16, Arc<GroupCommit>>>,
    /// Rows whose disks are being tended, each by a task of its own, and since when.
    pub(crate) tended: Mutex<BTreeMap<u16, Duration>>,
    /// Blocks that others need room of: the tasks of their disks write them home first.
    pub(crate) wanted: Mutex<BTreeMap<u16, u64>>,
    /// The background gives each disk a task of its own.
    pub(crate) has_tasks: AtomicBool,
    /// A disk that was tended has more to do.
    pub(crate) has_more: AtomicBool,
    /// Changes of slots that have ended, and how many of them a flush covers.
    pub(crate) changes: AtomicU64,
    pub(crate) covered: AtomicU64,
    /// A promise has ended, or a slot is free.
    pub(crate) freed: Event,
    pub(crate) disks: Mutex<BTreeMap<u16, Weak<Home>>>,
    /// Held while a row is chosen and its disk is listed as open, so that none is opened twice.
    pub(crate) opening: Mutex<()>,
    pub(crate) random: Mutex<Random>,
    pub(crate) counts: Mutex<CacheCounts>,
    pub(crate) is_closed: AtomicBool,
    /// Part of the storage is gone: its slots may read as zero.
    pub(crate) is_cut: AtomicBool,
    /// When the length of the storage was looked at.
    pub(crate) looked: Mutex<Option<Duration>>,
    /// Held while write-back says that home has blocks: it has one share of the record.
    pub(crate) publishing: async_lock::Mutex<()>,
    /// Bytes that were read and wait for slots.
    pub(crate) fetched_bytes: AtomicU64,
    /// Something was read since the background began its last round, and whom that wakes.
    pub(crate) has_offers: AtomicBool,
    pub(crate) offered: Event,
    /// What may be known of the tables of images.
    pub(crate) windows: Arc<Room>,
    /// Rows of open disks that may get dirty blocks: each has a reserve.
    pub(crate) reserves: Mutex<BTreeSet<u16>>,
    pub(crate) pace: Mutex<Pace>,
    pub(crate) trims: Mutex<TrimPace>,
}

/// How much the background has written, and when.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    pub(crate) last: Option<Duration>,
    /// Bytes that may be written at once.
    pub(crate) allowed: u64,
}

/// How much was trimmed, and when.
#[derive(Debug, Default)]
pub(crate) struct TrimPace {
    pub(crate) last: Option<Duration>,
    /// Bytes that may be trimmed at once.
    pub(crate) allowed: u64,
    pub(crate) is_under_way: bool,
    /// There are no more until the cache is opened again.
    pub(crate) has_failed: bool,
}

#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) admitted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) demoted: AtomicU64,
    pub(crate) written_home: AtomicU64,
    pub(crate) slot_writes: AtomicU64,
    pub(crate) admit_writes: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) passed: AtomicU64,
}

/// A disk of the cache, shared by those who use it.
pub(crate) struct Home {
    pub(crate) cache: Arc<FlashCache>,
    pub(crate) disk: SharedDisk,
    pub(crate) row: u16,
    pub(crate) claims: Arc<Claims>,
    pub(crate) policy: Mutex<FlashPolicy>,
    pub(crate) sessions: Option<Arc<dyn Sessions>>,
    /// The number of this opening is in the row and in the image.
    pub(crate) has_begun: AtomicBool,
    /// `DiskOptions::trusts_home`.
    pub(crate) trusts_home: bool,
    /// What names the row of a disk that was opened with `open_file`, as long as it is open.
    pub(crate) drawn: Option<u128>,
    /// It was closed, and nothing of the close failed.
    pub(crate) has_ended_well: AtomicBool,
    /// Flash has failed under writethrough, and nothing of it counts for the disk any more.
    pub(crate) is_alone: AtomicBool,
    /// A flush of home has failed under writethrough.
    pub(crate) has_lost_flush: AtomicBool,
    /// Changes of home under writethrough in regions that need not count as written, how many of them a flush of home
    /// covers, and when the last one was, in seconds.
    pub(crate) unrecorded: AtomicU64,
    pub(crate) unrecorded_covered: AtomicU64,
    pub(crate) unrecorded_at: AtomicU32,
    pub(crate) beginning: async_lock::Mutex<()>,
    /// Held by the one write-back that is under way.
    pub(crate) writing_back: async_lock::Mutex<()>,
    /// Held while the background tends it; true once it is closed. A close waits for that: what is published later would be found in a
    /// row that another disk may have by then.
    pub(crate) tending: Arc<async_lock::Mutex<bool>>,
    /// A fill asked for a flush of home.
    pub(crate) wants_flush: AtomicBool,
    pub(crate) is_closed: AtomicBool,
    /// The image was opened beside the one of which it is a copy: what it names is that one's.
    pub(crate) is_copy: bool,
    pub(crate) keeps_at_close: AtomicBool,
    pub(crate) tally: Tally,
    /// Disks of the cache that this one lies over, and how many lie over it.
    pub(crate) below: Mutex<Vec<Over>>,
    pub(crate) above: Above,
    /// What was read from home and waits for slots.
    pub(crate) fetched: Mutex<VecDeque<Fetched>>,
    /// Where the background goes on writing home.
    pub(crate) hand: AtomicU64,
    /// Why the background could not write home the last time.
    pub(crate) trouble: Mutex<Option<Error>>,
}

/// What one read got from home.
pub(crate) struct Fetched {
    /// The first block of each run, and the bytes of whole blocks.
    pub(crate) runs: Vec<(u64, Buffer)>,
    pub(crate) watch: Watch,
    pub(crate) bytes: u64,
}

/// How many open disks lie over one.
#[derive(Default)]
pub(crate) struct Above(pub(crate) AtomicU64);

/// A disk that another lies over, until this is dropped.
pub(crate) struct Over(pub(crate) Weak<Home>);

impl Drop for Over {
    fn drop(&mut self) {
        if let Some(below) = self.0.upgrade() {
            below.above.0.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A block whose part of the map is full on flash, and from which nothing leaves.
pub(crate) fn part_is_full(name: &str) -> Error {
    Error::new(ErrorKind::NoSpace, format!("{name}: a part of the flash cache is full"))
}
