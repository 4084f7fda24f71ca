//! Which units are free, and what must happen before one is used.
//!
//! ```text
//!                          ┌──────────── unknown: free when the image was opened, or never finished
//!                          ▼
//!   freed ── commit ──► waiting for requests to leave ──► made zero ── flush ──► clean ──► entered in the table
//!                                                                                  ▲
//!   behind the end of a file that grows zeroed ────────────────────────────────────┘
//! ```
//!
//! 1. A unit that is handed out reads as zero, durably. What is not written in it needs no check, and after a
//!    crash each of its sectors is zero or what was written.
//! 2. A unit becomes *waiting* only after a commit has made durable that the table does not name it.
//! 3. Units that are free in a closed image may hold anything too, because there may have been a crash
//!    before.
//! 4. A device may grow while the image is open (`room.rs`). The units that this adds are *unknown*.
//! 5. Units are made ready ahead of need (`ready.rs`). A write waits for that only when none is left; these
//!    waits are counted.
//! 6. A write that fills a unit from end to end takes one of unknown content where no unit is new: nothing of the
//!    old content can be read once all of the write has arrived, and the record says whether it has (`write.rs`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use roaring::RoaringBitmap;

use super::zero_pace::ZeroPace;
use crate::prealloc::Pace;
use crate::state::lock;

/// The units of an image that no table names.
pub(super) struct Units {
    pool: Mutex<Pool>,
    /// Waiting for requests to leave, with the epoch in which their freeing became durable.
    waiting: Mutex<VecDeque<(u64, Vec<u32>)>>,
    /// Made zero, with the number of that change.
    zeroed: Mutex<VecDeque<(u64, u32)>>,
    /// Held while units are made zero and given back to the pool.
    pub(super) giving: async_lock::Mutex<()>,
    /// Held by a write that has found too few clean units, until the write is done. Otherwise two such writes
    /// could keep taking from each other what both need.
    pub(super) hungry: async_lock::Mutex<()>,
    /// Held while the file is extended.
    pub(super) growing: async_lock::Mutex<()>,
    /// How fast units are taken.
    pub(super) pace: Mutex<Pace>,
    /// When units are made zero beyond those that are taken one by one.
    pub(super) zero_pace: Mutex<ZeroPace>,
    /// How many units are to be kept ready in quiet times, because somebody asked for it.
    kept_ready: AtomicU64,
    /// How many bytes the guest has written.
    written_bytes: AtomicU64,
    taken: AtomicU64,
    /// The caller tends the disk.
    is_tended: AtomicBool,
    /// The guest has flushed, and freed units have not been looked at since.
    is_due: AtomicBool,
    /// More units are being made ready, up to the wanted number.
    refills: AtomicBool,
    /// How many units have become clean.
    given: AtomicU64,
    /// How often a write had to wait until a unit was zero.
    waits: AtomicU64,
    /// How often no unit was left.
    refused: AtomicU64,
}

struct Pool {
    /// These read as zero, durably. The lowest is handed out first, so that consecutive writes lie next to
    /// each other and zones behind stay whole.
    clean: RoaringBitmap,
    /// These may hold anything.
    unknown: RoaringBitmap,
    /// Units from here on have never been used. `None` on a medium that cannot grow.
    next: Option<u32>,
    /// The highest unit number that is possible.
    last: u32,
    /// Units that are not handed out one by one.
    avoided: Range<u32>,
    /// The zone that is being made zero, to be opened: no write fills its units meanwhile.
    readied: Range<u32>,
    /// The search for units of unknown content starts here, because one before this could not be made zero.
    look_from: u32,
    /// The last unit that existed when the image was opened, or when the device's size was last checked.
    end: u32,
}

impl Pool {
    /// The first unit of unknown content that a write may fill.
    fn to_fill(&self) -> Option<u32> {
        // In a file, what is behind the end is as good, and keeps writes in a row.
        if self.next.is_some() {
            return None;
        }
        let mut unit = self.unknown.min()?;
        while let Some(apart) = [&self.avoided, &self.readied].into_iter().find(|apart| apart.contains(&unit))
        {
            unit = self.unknown.range(apart.end..).next()?;
        }
        Some(unit)
    }

    /// Takes units of unknown content that lie in a row, from `first` on and at most `most` of them.
    fn take_run(&mut self, first: u32, before: u32, most: usize) -> Range<u32> {
        let most = u32::try_from(most.max(1)).unwrap_or(u32::MAX);
        let mut end = first + 1;
        while end < before && end - first < most && self.unknown.contains(end) {
            end += 1;
        }
        self.unknown.remove_range(first..end);
        first..end
    }
}

impl Units {
    /// The pool of an image whose table names `used`. `in_file` units lie at least partly inside the file.
    /// `can_grow` says whether everything behind the file's end reads as zero.
    pub(super) fn new(used: &RoaringBitmap, in_file: u32, last: u32, can_grow: bool) -> Self {
        let end = used.max().map_or(in_file, |last| last.max(in_file));
        let mut unknown = RoaringBitmap::new();
        if end > 0 {
            unknown.insert_range(1..=end);
        }
        unknown -= used;
        let next = Some(end + 1).filter(|_| can_grow);
        let pool = Pool {
            clean: RoaringBitmap::new(),
            unknown,
            next,
            last,
            avoided: 0..0,
            readied: 0..0,
            look_from: 0,
            end,
        };
        Self {
            pool: Mutex::new(pool),
            waiting: Mutex::default(),
            zeroed: Mutex::default(),
            giving: async_lock::Mutex::default(),
            hungry: async_lock::Mutex::default(),
            growing: async_lock::Mutex::default(),
            pace: Mutex::default(),
            zero_pace: Mutex::default(),
            kept_ready: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            is_tended: AtomicBool::new(false),
            is_due: AtomicBool::new(false),
            refills: AtomicBool::new(false),
            given: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// A clean unit, if there is one.
    pub(super) fn take(&self) -> Option<u32> {
        self.taken.fetch_add(1, Ordering::AcqRel);
        let mut pool = lock(&self.pool);
        let lowest = pool.clean.min().map(|unit| match pool.avoided.contains(&unit) {
            true => pool.clean.range(pool.avoided.end..).next(),
            false => Some(unit),
        });
        if let Some(unit) = lowest.flatten() {
            pool.clean.remove(unit);
            return Some(unit);
        }
        let next = pool.next.filter(|next| *next <= pool.last)?;
        pool.next = Some(next + 1);
        Some(next)
    }

    /// Takes a unit of unknown content for a write that fills all of it.
    pub(super) fn take_to_fill(&self) -> Option<u32> {
        let mut pool = lock(&self.pool);
        let unit = pool.to_fill()?;
        pool.unknown.remove(unit);
        Some(unit)
    }

    /// Whether there is such a unit.
    pub(super) fn has_one_to_fill(&self) -> bool {
        lock(&self.pool).to_fill().is_some()
    }

    /// Takes units of unknown content that lie in a row, at most `most` of them, in a zone whose units are all
    /// free. The zones of `len` units are taken one after the other.
    pub(super) fn take_unknown_of_a_zone(
        &self,
        len: u32,
        zones: u32,
        most: usize,
        is_open: impl Fn(u32) -> bool,
    ) -> Option<Range<u32>> {
        let mut pool = lock(&self.pool);
        let zone = pool.readied.clone();
        if let Some(first) = pool.unknown.range(zone.clone()).next() {
            return Some(pool.take_run(first, zone.end, most));
        }
        let is_next = |zone: &Range<u32>| {
            let unknown = pool.unknown.range_cardinality(zone.clone());
            unknown > 0 && unknown + pool.clean.range_cardinality(zone.clone()) == u64::from(len)
        };
        let units = |zone: u32| zone * len + 1..(zone + 1) * len + 1;
        let next = (0..zones.min(pool.end / len)).filter(|zone| !is_open(*zone)).map(units).find(is_next);
        pool.readied = next.clone().unwrap_or(0..0);
        let zone = next?;
        let first = pool.unknown.range(zone.clone()).next()?;
        Some(pool.take_run(first, zone.end, most))
    }

    /// Takes a run of `len` units that have never been used, if it is one of the first `zones` such runs, and
    /// returns its first unit. The units before it become clean.
    pub(super) fn take_zone(&self, len: u32, zones: u32) -> Option<u32> {
        let mut pool = lock(&self.pool);
        let next = pool.next?;
        let first = (next - 1).checked_next_multiple_of(len)?.checked_add(1)?;
        if first.checked_add(len)? > pool.last || first / len >= zones {
            return None;
        }
        pool.clean.insert_range(next..first);
        pool.next = Some(first + len);
        Some(first)
    }

    /// Takes a zone whose units are all free. Returns its first unit, and whether its content is unknown.
    /// With `is_clean` only a zone of clean units counts.
    pub(super) fn take_free_zone(
        &self,
        len: u32,
        zones: u32,
        is_clean: bool,
        is_open: impl Fn(u32) -> bool,
    ) -> Option<(u32, bool)> {
        let mut pool = lock(&self.pool);
        let pool = &mut *pool;
        let both;
        let free = match is_clean {
            true => &pool.clean,
            false => {
                both = &pool.clean | &pool.unknown;
                &both
            }
        };
        let last = free.max()?;
        let all = u64::from(len);
        let first = (0..zones.min(last / len))
            .filter(|zone| !is_open(*zone))
            .map(|zone| zone * len + 1)
            .find(|first| free.range_cardinality(*first..*first + len) == all)?;
        let run = first..first + len;
        let clean = pool.clean.range_cardinality(run.clone());
        pool.clean.remove_range(run.clone());
        pool.unknown.remove_range(run.clone());
        Some((first, clean < all))
    }

    /// From now on none of these units is handed out by itself. A zone of them can still be opened.
    pub(super) fn avoid(&self, units: Option<Range<u32>>) {
        lock(&self.pool).avoided = units.unwrap_or(0..0);
    }

    /// Whether all of these units are free, and also made zero if `is_clean`.
    pub(super) fn is_free(&self, units: Range<u32>, is_clean: bool) -> bool {
        let pool = lock(&self.pool);
        let all = u64::from(units.end - units.start);
        let unknown = if is_clean { 0 } else { pool.unknown.range_cardinality(units.clone()) };
        pool.clean.range_cardinality(units) + unknown == all
    }

    /// The first unit of a run of `count` free units, among those that exist.
    pub(super) fn find_run(&self, count: u32) -> Option<u32> {
        let pool = lock(&self.pool);
        let free = &pool.clean | &pool.unknown;
        let mut run = 0..0;
        for unit in &free {
            run = if unit == run.end { run.start..unit + 1 } else { unit..unit + 1 };
            if run.end - run.start >= count {
                return Some(run.start);
            }
        }
        None
    }

    /// Whether there is a run of `len` units that have never been used.
    pub(super) fn has_new_zone(&self, len: u32, zones: u32) -> bool {
        let pool = lock(&self.pool);
        let first = pool.next.and_then(|next| (next - 1).checked_next_multiple_of(len)?.checked_add(1));
        first.is_some_and(|first| {
            first.checked_add(len).is_some_and(|end| end <= pool.last) && first / len < zones
        })
    }

    /// Whether all units of a zone are free.
    pub(super) fn has_free_zone(
        &self,
        len: u32,
        zones: u32,
        is_clean: bool,
        is_open: impl Fn(u32) -> bool,
    ) -> bool {
        self.used_by_zone(len, zones, is_clean, is_open).any(|(_, used)| used == 0)
    }

    /// The zone with the fewest used units, if at most half of its units are used and there is room for these
    /// elsewhere.
    pub(super) fn emptiest_zone(&self, len: u32, zones: u32, is_open: impl Fn(u32) -> bool) -> Option<u32> {
        let least = self.used_by_zone(len, zones, false, is_open).min_by_key(|(_, used)| *used);
        let (zone, _) = least?;
        // Counted again, because other requests take units meanwhile.
        let pool = lock(&self.pool);
        let units = zone * len + 1..(zone + 1) * len + 1;
        let here = pool.clean.range_cardinality(units.clone()) + pool.unknown.range_cardinality(units);
        let (used, elsewhere) = (u64::from(len) - here, pool.clean.len() + pool.unknown.len() - here);
        (used <= u64::from(len / 2) && elsewhere > used).then_some(zone)
    }

    /// How many units of each zone are not free, or not clean.
    fn used_by_zone(
        &self,
        len: u32,
        zones: u32,
        is_clean: bool,
        is_open: impl Fn(u32) -> bool,
    ) -> impl Iterator<Item = (u32, u64)> {
        let pool = lock(&self.pool);
        let free = if is_clean { pool.clean.clone() } else { &pool.clean | &pool.unknown };
        let count = zones.min(pool.end / len);
        drop(pool);
        (0..count).filter(move |zone| !is_open(*zone)).map(move |zone| {
            let first = zone * len + 1;
            (zone, u64::from(len) - free.range_cardinality(first..first + len))
        })
    }

    /// Takes units of unknown content that lie in a row among these, at most `most` of them.
    pub(super) fn take_unknown_of(&self, units: Range<u32>, most: usize) -> Option<Range<u32>> {
        let mut pool = lock(&self.pool);
        let first = pool.unknown.range(units.clone()).next()?;
        Some(pool.take_run(first, units.end, most))
    }

    /// Adds units of an open zone that were not handed out.
    pub(super) fn add_clean(&self, units: Range<u32>) {
        let count = units.len() as u64;
        lock(&self.pool).clean.insert_range(units);
        self.given.fetch_add(count, Ordering::AcqRel);
    }

    /// Returns a zone that was taken and never opened.
    pub(super) fn give_zone_back(&self, first: u32, len: u32) {
        lock(&self.pool).unknown.insert_range(first..first + len);
    }

    /// Returns a unit that was taken and may hold anything by now.
    pub(super) fn give_up(&self, unit: u32) {
        lock(&self.pool).unknown.insert(unit);
    }

    /// Returns a unit that was taken and not written to. It does not count as newly clean.
    pub(super) fn take_back(&self, unit: u32) {
        lock(&self.pool).clean.insert(unit);
    }

    pub(super) fn add_freed(&self, epoch: u64, mut units: Vec<u32>) {
        units.sort_unstable_by_key(|unit| std::cmp::Reverse(*unit)); // popped from the back: ascending
        lock(&self.waiting).push_back((epoch, units));
    }

    /// Whether units wait to become clean.
    pub(super) fn any_waits(&self) -> bool {
        !lock(&self.waiting).is_empty() || !lock(&self.zeroed).is_empty()
    }

    pub(super) fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// How often a write had to wait until a unit was zero.
    pub(super) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Acquire)
    }

    /// Notes that the device now has `end` units.
    pub(super) fn extend(&self, end: u32) {
        let mut pool = lock(&self.pool);
        if end > pool.end {
            let more = pool.end + 1..=end;
            pool.unknown.insert_range(more);
            pool.end = end;
        }
    }

    /// The number of units that are available, now or soon.
    pub(super) fn free(&self) -> u64 {
        let waiting: usize = lock(&self.waiting).iter().map(|(_, units)| units.len()).sum();
        let zeroed = lock(&self.zeroed).len();
        let pool = lock(&self.pool);
        (waiting + zeroed) as u64 + pool.clean.len() + pool.unknown.len()
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Acquire)
    }

    fn clean(&self, unit: u32) {
        lock(&self.pool).clean.insert(unit);
        self.given.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes the next batch of freed units, with the epoch in which they became free, if that epoch has
    /// passed.
    pub(super) fn next_freed(&self, has_passed: impl Fn(u64) -> bool) -> Option<(u64, Vec<u32>)> {
        lock(&self.waiting).pop_front_if(|(stamp, _)| has_passed(*stamp))
    }

    pub(super) fn put_back_freed(&self, stamp: u64, units: Vec<u32>) {
        lock(&self.waiting).push_front((stamp, units));
    }

    /// The epoch that freed units wait for.
    pub(super) fn first_freed(&self) -> Option<u64> {
        lock(&self.waiting).front().map(|(stamp, _)| *stamp)
    }

    /// Notes that a unit was made zero, by this change.
    pub(super) fn zeroed(&self, change: u64, unit: u32) {
        lock(&self.zeroed).push_back((change, unit));
    }

    /// Notes that zeros up to this change are durable.
    pub(super) fn settle(&self, covered: u64) {
        let mut zeroed = lock(&self.zeroed);
        while let Some((_, unit)) = zeroed.pop_front_if(|(change, _)| *change <= covered) {
            self.clean(unit);
        }
    }

    /// Whether units wait to be made zero.
    pub(super) fn any_freed(&self) -> bool {
        !lock(&self.waiting).is_empty()
    }

    pub(super) fn any_zeroed(&self) -> bool {
        !lock(&self.zeroed).is_empty()
    }

    /// The number of units that are clean, or will be after the next flush.
    pub(super) fn ready(&self) -> usize {
        self.clean_count() + lock(&self.zeroed).len()
    }

    pub(super) fn clean_count(&self) -> usize {
        usize::try_from(lock(&self.pool).clean.len()).expect("units have 32 bits")
    }

    /// The number of units that will be clean after the next flush.
    pub(super) fn zeroed_count(&self) -> usize {
        lock(&self.zeroed).len()
    }

    /// Takes the next units of unknown content that lie in a row, at most `most` of them.
    pub(super) fn take_unknown(&self, most: usize) -> Option<Range<u32>> {
        let mut pool = lock(&self.pool);
        let next = pool.unknown.range(pool.look_from..).next();
        let first = next.or_else(|| pool.unknown.min())?;
        if next.is_none() {
            pool.look_from = 0;
        }
        Some(pool.take_run(first, u32::MAX, most))
    }

    /// Notes that this unit could not be made zero. Those behind it are tried first.
    pub(super) fn pass_over(&self, unit: u32) {
        lock(&self.pool).look_from = unit + 1;
    }

    pub(super) fn has_unknown(&self) -> bool {
        !lock(&self.pool).unknown.is_empty()
    }

    /// Whether units of unknown content are the only source of units.
    pub(super) fn needs_unknown(&self) -> bool {
        lock(&self.pool).next.is_none()
    }

    pub(super) fn keep_ready(&self, units: u64) {
        self.kept_ready.store(units, Ordering::Release);
    }

    /// How many units are to be kept ready in quiet times.
    pub(super) fn kept_ready(&self) -> usize {
        usize::try_from(self.kept_ready.load(Ordering::Acquire)).unwrap_or(usize::MAX)
    }

    pub(super) fn note_written(&self, bytes: u64) {
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn written_bytes(&self) -> u64 {
        self.written_bytes.load(Ordering::Relaxed)
    }

    /// How many units were asked for.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Acquire)
    }

    pub(super) fn note_wait(&self) {
        self.waits.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn note_refusal(&self) {
        self.refused.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn is_tended(&self) -> bool {
        self.is_tended.load(Ordering::Acquire)
    }

    pub(super) fn note_tended(&self) {
        self.is_tended.store(true, Ordering::Release);
    }

    /// Whether a request should first give back some units: after a flush, where the caller does not tend the
    /// disk.
    pub(super) fn take_due(&self) -> bool {
        self.is_due.load(Ordering::Relaxed) && !self.is_tended() && self.is_due.swap(false, Ordering::AcqRel)
    }

    pub(super) fn note_due(&self) {
        self.is_due.store(true, Ordering::Release);
    }

    pub(super) fn refills(&self) -> bool {
        self.refills.load(Ordering::Acquire)
    }

    pub(super) fn set_refills(&self, refills: bool) {
        self.refills.store(refills, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_holds_is_not_given_out_before_it_is_clean() {
        let used: RoaringBitmap = [2, 5].into_iter().collect();
        let units = Units::new(&used, 4, 100, true);
        assert_eq!(lock(&units.pool).unknown.iter().collect::<Vec<_>>(), [1, 3, 4]);
        assert_eq!(units.take(), Some(6), "behind the end");
        units.clean(3);
        assert_eq!(units.take(), Some(3));
        units.give_up(6);
        assert_eq!(units.take(), Some(7));
        let device = Units::new(&used, 8, 100, false);
        assert_eq!(device.take(), None);
        assert_eq!(lock(&device.pool).unknown.len(), 6);
    }
}
