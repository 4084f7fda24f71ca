//! What is in memory of the zones of an image: those that are open (`zones.rs`), and the one that is being
//! emptied (`compact.rs`).

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::over_base::OverBase;
use crate::prealloc::Need;

/// The zones of an image that is open for writing.
pub(super) struct Zones {
    /// How much space is prepared ahead of need (`ahead.rs`).
    pub(super) need: async_lock::Mutex<Need>,
    /// Where zones are emptied in quiet times (`compact.rs`).
    pub(super) compaction: Option<Compaction>,
    /// How many bytes the guest has written.
    written_bytes: AtomicU64,
    pub(super) open: Mutex<Vec<OpenZone>>,
    /// Units over the base whose entry only their packed block has.
    pub(super) over_base: OverBase,
    /// The number of the zone that is being emptied (`compact.rs`), plus one. 0: none is.
    pub(super) emptying: AtomicU32,
    /// Held while a zone is opened.
    pub(super) opening: async_lock::Mutex<()>,
    /// Held while embedded entries are written to the table.
    pub(super) recording: async_lock::Mutex<()>,
    /// The number of callers that have paused embedded allocation.
    paused: AtomicU32,
    /// How many units were handed out to hold their own entries.
    pub(super) given: AtomicU64,
    /// How many were handed out as plain units.
    pub(super) given_plain: AtomicU64,
    /// The number of units that had become clean when no zone could be opened, plus one.
    pub(super) none_found_at: AtomicU64,
    /// The count of `given` when the disk was last seen busy, and when that was.
    pub(super) quiet: Mutex<(u64, Duration)>,
}

impl Zones {
    pub(super) fn new(need: Need, compaction: Option<Compaction>) -> Self {
        Self {
            need: async_lock::Mutex::new(need),
            compaction,
            written_bytes: AtomicU64::new(0),
            open: Mutex::default(),
            over_base: OverBase::default(),
            emptying: AtomicU32::new(0),
            opening: async_lock::Mutex::default(),
            recording: async_lock::Mutex::default(),
            paused: AtomicU32::new(0),
            given: AtomicU64::new(0),
            given_plain: AtomicU64::new(0),
            none_found_at: AtomicU64::new(0),
            quiet: Mutex::default(),
        }
    }

    /// Pauses embedded allocation.
    pub(super) fn pause(&self) -> Paused<'_> {
        self.paused.fetch_add(1, Ordering::AcqRel);
        Paused(&self.paused)
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Acquire) > 0
    }

    pub(super) fn note_written(&self, bytes: u64) {
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }
}

/// A zone that is open.
pub(super) struct OpenZone {
    pub(super) zone: u32,
    pub(super) tag: u64,
    /// The transaction that opens it.
    pub(super) opened_in: u64,
    /// Units from here on were neither handed out nor prepared.
    pub(super) next: u32,
    /// Units before that which were filled with zeros (`ahead.rs`) and not handed out.
    pub(super) prepared: VecDeque<Range<u32>>,
    /// How many more of them are being filled now.
    being_prepared: u32,
    /// Units that were handed out to hold their own entries, and are neither published nor invalidated.
    pub(super) under_way: u32,
    /// Units whose entry only their own block states: the index in the zone, and the unit of the disk.
    pub(super) unrecorded: Vec<(u32, u64)>,
}

impl OpenZone {
    /// A zone that was just opened.
    pub(super) fn new(zone: u32, tag: u64, opened_in: u64) -> Self {
        Self {
            zone,
            tag,
            opened_in,
            next: 0,
            prepared: VecDeque::new(),
            being_prepared: 0,
            under_way: 0,
            unrecorded: Vec::new(),
        }
    }

    /// Takes a unit that was not handed out yet.
    pub(super) fn take(&mut self, per_zone: u32) -> Option<u32> {
        self.take_prepared().or_else(|| {
            let unit = Some(self.next).filter(|next| *next < per_zone)?;
            self.next += 1;
            Some(unit)
        })
    }

    pub(super) fn take_prepared(&mut self) -> Option<u32> {
        let run = self.prepared.front_mut()?;
        let unit = run.start;
        run.start += 1;
        if run.start == run.end {
            self.prepared.pop_front();
        }
        Some(unit)
    }

    /// How many units can still be handed out.
    pub(super) fn left(&self, per_zone: u32) -> u32 {
        let prepared: u32 = self.prepared.iter().map(|run| run.end - run.start).sum();
        per_zone - self.next + prepared + self.being_prepared
    }

    pub(super) fn is_used_up(&self, per_zone: u32) -> bool {
        self.next == per_zone && self.left(per_zone) == 0 && self.under_way == 0
    }

    /// How many units are prepared.
    pub(super) fn prepared(&self) -> u32 {
        self.prepared.iter().map(|run| run.end - run.start).sum()
    }

    /// Takes the next `count` units, to be prepared. Fewer where the zone ends.
    pub(super) fn begin_preparing(&mut self, count: u32, per_zone: u32) -> Range<u32> {
        let run = self.next..per_zone.min(self.next.saturating_add(count));
        self.next = run.end;
        self.being_prepared += run.end - run.start;
        run
    }

    /// Notes that preparing these ended. They read as zero as before, whether or not the zeros were written.
    pub(super) fn end_preparing(&mut self, run: Range<u32>) {
        self.being_prepared -= run.end - run.start;
        self.prepared.push_back(run);
    }
}

/// A unit that is to hold its own entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given {
    pub(super) unit: u32,
    pub(super) tag: u64,
}

/// No entry is embedded while this is held.
pub(super) struct Paused<'a>(&'a AtomicU32);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The state of compaction.
#[derive(Default)]
pub(super) struct Compaction {
    pub(super) work: async_lock::Mutex<Work>,
}

#[derive(Default)]
pub(super) struct Work {
    /// Since when the disk is quiet, and how many units and bytes the guest had taken and written by then.
    pub(super) quiet_since: Duration,
    pub(super) taken: u64,
    pub(super) written: u64,
    pub(super) now: Option<Emptying>,
    /// Zones that could not be emptied.
    pub(super) given_up: BTreeSet<u32>,
}

pub(super) struct Emptying {
    pub(super) zone: u32,
    /// The table was searched up to this entry.
    pub(super) seen: u64,
    /// Units of the disk that lie in the zone.
    pub(super) left: Vec<u64>,
    pub(super) waits: u32,
}
