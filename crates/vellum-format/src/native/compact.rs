//! Compaction: emptying a zone most of whose units are free, so that it can be opened again.
//!
//! ```text
//!   quiet, and no zone can be opened ► a zone with few units ► hold: a write there first moves its unit
//!     ► the table is searched ► each remaining unit is copied ► freed, durably ► made zero ► the zone opened
//! ```
//!
//! Free units of closed zones are used one by one, so no space is lost without compaction. A fragmented
//! device only loses the chance to embed entries in new units. In a file new zones lie behind the others, and
//! free units are holes.
//!
//! 1. A unit is copied like one that a snapshot sees (`snapshots/keep.rs`): writers that looked before it was
//!    held have left, the copy is claimed, and its checks and its entry are one step. After that nothing
//!    names the old unit, and it is freed like any other.
//! 2. No unit of the zone is handed out meanwhile. When there is no other unit, or when a copy fails that a
//!    write waits for, the zone is released: compaction fails no write. A copy that is in progress then does
//!    not count.
//! 3. Compaction begins only after two quiet seconds, for a zone of which at most half is used, and never
//!    while there are snapshots. It does a little at a time, and ends when the guest writes much. So an
//!    opened zone costs at most half a zone of copies.
//! 4. A zone that could not be emptied is not tried again before the next opening.
//! 5. Compaction may be interrupted anywhere: it consists of nothing but writes and frees.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vellum_core::Result;

use super::image::Native;
use super::zone_state::{Compaction, Emptying, Zones};
use crate::bytes::be32;
use crate::engine::Commit as _;
use crate::state::lock;

/// Compaction begins when no unit was taken, and little was written, for this long.
const QUIET_AFTER: Duration = Duration::from_secs(2);
/// This many bytes count as little, before compaction begins and between two goes.
const WRITTEN_MAX: u64 = 256 << 10;
/// The number of entries in a page of the table.
const ENTRIES: u64 = 1024;
/// At most this many pages of the table are searched in one go.
const PAGES_IN_A_GO: u64 = 256;
/// At most this many units are copied in one go.
const COPIED_IN_A_GO: usize = 8;
/// After waiting this often for freed units, the zone is given up.
const WAITS_MAX: u32 = 200;

/// How compaction continues.
enum Step {
    More {
        at_once: bool,
    },
    Over,
    /// The zone cannot be emptied.
    GivenUp,
}

impl Native {
    /// Where zones are emptied at all, and those zones.
    fn compaction(&self) -> Option<(&Compaction, &Zones)> {
        let zones = self.zones.as_ref()?;
        Some((zones.compaction.as_ref()?, zones))
    }

    /// Whether zones are emptied at all.
    pub(super) fn compacts(&self) -> bool {
        self.compaction().is_some()
    }

    /// Waits for the running step, and ends compaction.
    pub(super) async fn end_compaction(&self) {
        if let Some((compaction, zones)) = self.compaction() {
            compaction.work.lock().await.now = None;
            self.end_emptying(zones);
        }
    }

    /// Does a little work, if there is any. Returns whether there is more at once. Must not be called from
    /// inside an epoch, nor while units are being made ready.
    pub(super) async fn compact_some(&self, now: Duration) -> bool {
        let Some((compaction, zones)) = self.compaction() else { return false };
        let Some(mut work) = compaction.work.try_lock() else { return false };
        let has_ended = self.engine.state.check_open().is_err() || self.engine.state.check_stopped().is_err();
        if has_ended || self.journal().is_none() || !self.may_compact() {
            work.now = None;
            self.end_emptying(zones);
            return false;
        }
        let work = &mut *work;
        let written = zones.written_bytes();
        let is_busy = written - work.written > WRITTEN_MAX;
        let Some(emptying) = &mut work.now else {
            let taken = self.units().taken() + self.given_of_zones();
            if work.taken != taken || is_busy {
                (work.quiet_since, work.taken, work.written) = (now, taken, written);
            }
            if now.saturating_sub(work.quiet_since) < QUIET_AFTER {
                return false;
            }
            // One attempt for each quiet time.
            (work.quiet_since, work.written) = (now, written);
            let Some(zone) = self.zone_to_empty(zones, &work.given_up) else { return false };
            self.hold_zone(zones, zone);
            work.now = Some(Emptying { zone, seen: 0, left: Vec::new(), waits: 0 });
            return true;
        };
        // Its units were needed, or the guest is busy.
        let has_ended = is_busy || zones.emptying.load(Ordering::SeqCst) != emptying.zone + 1;
        work.written = written;
        let zone = emptying.zone;
        match if has_ended { Ok(Step::Over) } else { self.empty_some(zones, emptying).await } {
            Ok(Step::More { at_once }) => at_once,
            ended => {
                // An error that keeps a unit from being copied is found by the next request that needs a
                // copy.
                if matches!(ended, Ok(Step::GivenUp) | Err(_)) {
                    work.given_up.insert(zone);
                }
                work.now = None;
                self.end_emptying(zones);
                false
            }
        }
    }

    async fn empty_some(&self, zones: &Zones, emptying: &mut Emptying) -> Result<Step> {
        if emptying.seen < self.places.entries() {
            let end = (emptying.seen + PAGES_IN_A_GO * ENTRIES).min(self.places.entries());
            self.look_through(emptying, end);
            emptying.seen = end;
            return Ok(Step::More { at_once: true });
        }
        if !emptying.left.is_empty() {
            for _ in 0..COPIED_IN_A_GO {
                let Some(number) = emptying.left.last() else { break };
                self.leave_unit(*number).await?;
                emptying.left.pop();
            }
            return Ok(Step::More { at_once: true });
        }
        if self.units().is_free(self.units_of_zone(emptying.zone), true) {
            self.end_emptying(zones);
            self.tidy_zones().await?;
            return Ok(Step::Over);
        }
        emptying.waits += 1;
        if emptying.waits > WAITS_MAX {
            return Ok(Step::GivenUp);
        }
        // Freed units become zero when that is durable and no request reads them any more. The rest of the
        // zone is made zero here.
        let has_more = self.zero_some_of(self.units_of_zone(emptying.zone)).await;
        if !has_more && (self.engine.commits.any_freed() || self.units().any_waits()) {
            self.commit().await?;
        }
        Ok(Step::More { at_once: has_more })
    }

    /// Notes the units of the disk that lie in the zone, by a part of the table.
    fn look_through(&self, emptying: &mut Emptying, end: u64) {
        let zone = emptying.zone;
        let mut first = emptying.seen;
        while first < end {
            if let Some(bytes) = self.home.bytes(self.places.entry_place(first)) {
                let lies_there = |entry: &[u8]| {
                    let (unit, _) = self.places.split_entry(be32(entry, 0));
                    unit != 0 && self.places.zone_of(unit).is_some_and(|(number, _)| number == zone)
                };
                let entries = (first..).zip(bytes.chunks_exact(4));
                emptying
                    .left
                    .extend(entries.filter(|(_, entry)| lies_there(entry)).map(|(number, _)| number));
            }
            first += ENTRIES;
        }
    }

    fn units_of_zone(&self, zone: u32) -> std::ops::Range<u32> {
        let per_zone = self.places.units_per_zone();
        zone * per_zone + 1..(zone + 1) * per_zone + 1
    }

    /// The zone with the fewest used units, if a zone is needed and this one helps.
    fn zone_to_empty(&self, zones: &Zones, given_up: &BTreeSet<u32>) -> Option<u32> {
        let (per_zone, open) = (self.places.units_per_zone(), self.open_zones(zones));
        // Map units of snapshots and parts of the table are named by no table, and stay.
        let of_views = self.views.as_ref().map_or(Vec::new(), |views| views.units());
        let kept: BTreeSet<u32> = of_views
            .into_iter()
            .chain(self.places.units_of_parts())
            .filter_map(|unit| Some(self.places.zone_of(unit)?.0))
            .collect();
        if self.left_in_zones() > per_zone / 2 || self.has_zone_to_open(zones) {
            return None;
        }
        self.units().emptiest_zone(per_zone, self.places.zones(), |zone| {
            open.contains(&zone) || kept.contains(&zone) || given_up.contains(&zone)
        })
    }

    /// From now on a write to a unit of the zone first moves the unit elsewhere.
    fn hold_zone(&self, zones: &Zones, zone: u32) {
        self.say_held(|| {
            self.units().avoid(Some(self.units_of_zone(zone)));
            zones.emptying.store(zone + 1, Ordering::SeqCst);
        });
    }

    /// Lets the zone go, if the disk's unit lies in the zone that is being emptied. Returns whether it did.
    pub(super) fn ends_emptying_for(&self, number: u64) -> bool {
        let Some(zones) = &self.zones else { return false };
        let is_in_it = self.entry(number).is_ok_and(|unit| unit != 0 && self.is_being_emptied(unit));
        if is_in_it {
            self.end_emptying(zones);
        }
        is_in_it
    }

    /// Ends the emptying. The zone's units are plain units again.
    pub(super) fn end_emptying(&self, zones: &Zones) {
        if zones.emptying.load(Ordering::SeqCst) == 0 {
            return;
        }
        // Taken under the lock under which copies come to count.
        let _held = self.views.as_ref().map(|views| views.hold());
        if zones.emptying.swap(0, Ordering::SeqCst) != 0 {
            self.units().avoid(None);
        }
    }

    /// Whether this stored unit lies in the zone that is being emptied.
    pub(super) fn is_being_emptied(&self, unit: u32) -> bool {
        let Some(zones) = &self.zones else { return false };
        let zone = zones.emptying.load(Ordering::SeqCst);
        zone != 0 && self.places.zone_of(unit).is_some_and(|(number, _)| number + 1 == zone)
    }

    /// Whether any zone is being emptied.
    pub(super) fn empties_any(&self) -> bool {
        self.zones.as_ref().is_some_and(|zones| zones.emptying.load(Ordering::SeqCst) != 0)
    }

    /// The numbers of the open zones.
    fn open_zones(&self, zones: &Zones) -> Vec<u32> {
        lock(&zones.open).iter().map(|zone| zone.zone).collect()
    }
}
